// Of the new tokens of a prefill step: q and k normed and turned in place, k and v written to their slots of the cache.
//
//   q, k = rope(x / √(mean x² + ε) · w);  cache[slot] = k, v        qkv [tokens, HEADS + 2 · KV_HEADS, HEAD_DIM]
//
// A warp takes one head of a token; a lane takes two neighbours of the first half of what rope turns, and the two of the
// second half that they are paired with; what rope leaves alone (HEAD_DIM > ROTARY) follows. Values are rounded to 16 bits
// where the torch ops of reference.py round them. Limit: bytes / bandwidth; for few tokens the launch, which is why it is here
// and not in Triton.
//
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, ROTARY, QK_NORM
#include "common.cuh"

constexpr int ALL = HEADS + 2 * KV_HEADS, PAIRS = ROTARY / 2;
constexpr int TURNED = (PAIRS + 63) / 64, REST = (HEAD_DIM - ROTARY + 63) / 64;  // rounds of a warp

DEVICE u32 rounded(float low, float high, u32 weight) {
  const u32 once = pack2(low, high);
  return pack2(low_float(once) * low_float(weight), high_float(once) * high_float(weight));
}

extern "C" __global__ void __launch_bounds__(256)
rope(u16* qkv, const float* cosine, const float* sine, const long long* slots, const u16* norm, u16* keys, u16* values,
     int tokens, int row_stride, int table_stride, int slot_stride, float epsilon) {
  launch_dependents();
  wait_for_inputs();
  const int unit = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, token = unit / ALL, head = unit % ALL;
  if (token >= tokens) return;
  const bool turns = head < HEADS + KV_HEADS;
  u16* row = qkv + (size_t)token * row_stride + head * HEAD_DIM;
  u32 low[TURNED], high[TURNED], rest[REST ? REST : 1];
  float squares = 0;
  auto add = [&](u32 v) { squares += low_float(v) * low_float(v) + high_float(v) * high_float(v); };
#pragma unroll
  for (int i = 0; i < TURNED; i++) {
    const int at = i * 64 + 2 * lane;
    low[i] = at < PAIRS ? *(const u32*)(row + at) : 0, high[i] = at < PAIRS ? *(const u32*)(row + PAIRS + at) : 0;
    add(low[i]), add(high[i]);
  }
#pragma unroll
  for (int i = 0; i < REST; i++) {
    const int at = ROTARY + i * 64 + 2 * lane;
    rest[i] = at < HEAD_DIM ? *(const u32*)(row + at) : 0;
    add(rest[i]);
  }
  const float inverse = QK_NORM && turns ? rsqrtf(warp_sum(squares) / HEAD_DIM + epsilon) : 1.f;
  const long long slot = slots[token];
  const int kv_head = turns ? head - HEADS : head - HEADS - KV_HEADS;
  u16* cache = head < HEADS || slot < 0 ? nullptr : (turns ? keys : values) + slot * slot_stride + kv_head * HEAD_DIM;
  const u16* weight = norm + head * HEAD_DIM;
  auto write = [&](int at, u32 v) {
    if (turns) *(u32*)(row + at) = v;
    if (cache) *(u32*)(cache + at) = v;
  };
#pragma unroll
  for (int i = 0; i < TURNED; i++) {
    const int at = i * 64 + 2 * lane;
    if (at >= PAIRS) continue;
    u32 a = low[i], b = high[i];
    if (turns) {
      if (QK_NORM) {
        a = rounded(low_float(a) * inverse, high_float(a) * inverse, *(const u32*)(weight + at));
        b = rounded(low_float(b) * inverse, high_float(b) * inverse, *(const u32*)(weight + PAIRS + at));
      }
      const float2 c = *(const float2*)(cosine + (size_t)token * table_stride + at);
      const float2 s = *(const float2*)(sine + (size_t)token * table_stride + at);
      const float x0 = low_float(a), x1 = high_float(a), y0 = low_float(b), y1 = high_float(b);
      a = pack2(x0 * c.x - y0 * s.x, x1 * c.y - y1 * s.y), b = pack2(y0 * c.x + x0 * s.x, y1 * c.y + x1 * s.y);
    }
    write(at, a), write(PAIRS + at, b);
  }
#pragma unroll
  for (int i = 0; i < REST; i++) {
    const int at = ROTARY + i * 64 + 2 * lane;
    if (at >= HEAD_DIM) continue;
    if (QK_NORM && turns) rest[i] = rounded(low_float(rest[i]) * inverse, high_float(rest[i]) * inverse, *(const u32*)(weight + at));
    write(at, rest[i]);
  }
}
