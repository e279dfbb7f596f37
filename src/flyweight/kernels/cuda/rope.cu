// Of the new tokens of a prefill step: q and k normed and turned in place, k and v written to their slots of the cache.
//
//   q, k = rope(x / √(mean x² + ε) · w);  cache[slot] = k, v        qkv [tokens, HEADS + 2 · KV_HEADS, HEAD_DIM]
//
// LANES lanes take a head: a lane has EACH neighbours of the first half of what rope turns, and those of the second half that
// they are paired with; what rope leaves alone (HEAD_DIM > ROTARY) follows. It takes up to ROUNDS heads of the same token, which
// share their angles, and loads all of them before it uses the first: with a head a warp, in words, too little was on its way at
// once, and angles took more loads than heads. Values are rounded to 16 bits where the torch ops of reference.py round them.
// Limit: bytes / bandwidth; for few tokens the launch, which is why it is here and not in Triton.
//
// KV8: k and v are written as codes of 8 bits with a scale for each token and head (kv8.cuh), found by the lanes of the head; in
// qkv stays what the codes stand for, so that a prompt gives the same whether attention reads it there or in the cache.
//
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, ROTARY, QK_NORM, KV8 (0), PAGE where that is given
#ifndef PAGE
#define PAGE 1
#endif
#include "common.cuh"
#include "kv8.cuh"

constexpr int ALL = HEADS + 2 * KV_HEADS, PAIRS = ROTARY / 2, REST = HEAD_DIM - ROTARY;
constexpr int EACH = PAIRS % 8 + REST % 8 == 0 ? 8 : PAIRS % 4 + REST % 4 == 0 ? 4 : 2;
constexpr int USED = PAIRS / EACH;                                    // lanes
constexpr int LANES = USED <= 1 ? 1 : USED <= 2 ? 2 : USED <= 4 ? 4 : USED <= 8 ? 8 : USED <= 16 ? 16 : 32;
constexpr int ABREAST = 32 / LANES, ROUNDS = ALL < 4 * ABREAST ? (ALL + ABREAST - 1) / ABREAST : 4;
constexpr int PARTS = (ALL + ABREAST * ROUNDS - 1) / (ABREAST * ROUNDS);  // warps of a token
constexpr int RESTS = (REST + LANES * EACH - 1) / (LANES * EACH);     // pieces of a lane
static_assert(USED <= 32, "a lane has one piece");

struct __align__(2 * EACH) Piece { u32 pairs[EACH / 2]; };
struct __align__(EACH) Codes { u16 pairs[EACH / 2]; };
struct __align__(EACH == 2 ? 8 : 16) Angles { float of[EACH]; };

DEVICE float squares(const Piece& v) {
  float sum = 0;
#pragma unroll
  for (u32 pair : v.pairs) sum += low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair);
  return sum;
}
DEVICE Piece normed(const Piece& v, float inverse, const u16* weight) {
  const Piece w = *(const Piece*)weight;
  Piece r;
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) {
    const u32 once = pack2(low_float(v.pairs[i]) * inverse, high_float(v.pairs[i]) * inverse);
    r.pairs[i] = pack2(low_float(once) * low_float(w.pairs[i]), high_float(once) * high_float(w.pairs[i]));
  }
  return r;
}
DEVICE float size_of(const Piece& v) {
  float most = 0;
#pragma unroll
  for (u32 pair : v.pairs) most = fmaxf(most, fmaxf(fabsf(low_float(pair)), fabsf(high_float(pair))));
  return most;
}
DEVICE Codes coded(const Piece& v, float scale, float inverse) {
  Codes r;
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) r.pairs[i] = (u16)code_pair(low_float(v.pairs[i]), high_float(v.pairs[i]), scale, inverse);
  return r;
}
DEVICE Piece decoded(const Codes& v, float scale) {
  Piece r;
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) r.pairs[i] = decoded_pair(v.pairs[i], scale);
  return r;
}
DEVICE void times(Piece& v, float by) {
#pragma unroll
  for (u32& pair : v.pairs) pair = pack2(low_float(pair) * by, high_float(pair) * by);
}
DEVICE void turn(Piece& low, Piece& high, const Angles& c, const Angles& s, float by) {
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) {
    const float x0 = low_float(low.pairs[i]), x1 = high_float(low.pairs[i]);
    const float y0 = low_float(high.pairs[i]), y1 = high_float(high.pairs[i]);
    const float c0 = c.of[2 * i], c1 = c.of[2 * i + 1], s0 = s.of[2 * i], s1 = s.of[2 * i + 1];
    low.pairs[i] = pack2((x0 * c0 - y0 * s0) * by, (x1 * c1 - y1 * s1) * by);
    high.pairs[i] = pack2((y0 * c0 + x0 * s0) * by, (y1 * c1 + x1 * s1) * by);
  }
}

extern "C" __global__ void __launch_bounds__(128)
rope(u16* qkv, const float* cosine, const float* sine, const long long* slots, const u16* norm, Stored* keys, Stored* values,
     int tokens, int row_stride, int table_stride, int slot_stride, float epsilon, float query_scale SCALE_ARGUMENTS) {
  launch_dependents();
  wait_for_inputs();
  const int warp = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, token = warp / PARTS;
  const int first = warp % PARTS * ROUNDS * ABREAST + lane / LANES, at = lane % LANES * EACH;
  if (token >= tokens) return;
  const bool mine = at < PAIRS;
  u16* row = qkv + (size_t)token * row_stride;
  Piece low[ROUNDS], high[ROUNDS], rest[ROUNDS][RESTS ? RESTS : 1];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int head = first + i * ABREAST;
    const u16* from = row + head * HEAD_DIM;
    low[i] = high[i] = {};
    if (head < ALL && mine) low[i] = *(const Piece*)(from + at), high[i] = *(const Piece*)(from + PAIRS + at);
#pragma unroll
    for (int j = 0; j < RESTS; j++) {
      const int place = j * LANES * EACH + at;
      rest[i][j] = {};
      if (head < ALL && place < REST) rest[i][j] = *(const Piece*)(from + ROTARY + place);
    }
  }
  Angles c = {}, s = {};
  if (mine) {
    c = *(const Angles*)(cosine + (size_t)token * table_stride + at);
    s = *(const Angles*)(sine + (size_t)token * table_stride + at);
  }
  const long long slot = slots[token];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int head = first + i * ABREAST;
    const bool turns = head < HEADS + KV_HEADS;
    float sum = squares(low[i]) + squares(high[i]);
#pragma unroll
    for (int j = 0; j < RESTS; j++) sum += squares(rest[i][j]);
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    const float inverse = rsqrtf(sum / HEAD_DIM + epsilon), by = head < HEADS ? query_scale : 1.f;
    const int kv_head = head - HEADS - (turns ? 0 : KV_HEADS);
    Stored* cache = head < HEADS || head >= ALL || slot < 0
        ? nullptr : (turns ? keys : values) + slot * slot_stride + kv_head * HEAD_DIM;
    const u16* weight = norm + head * HEAD_DIM;
    auto write = [&](int place, const Piece& v) {
      if (turns) *(Piece*)(row + head * HEAD_DIM + place) = v;
      if (!KV8 && cache) *(Piece*)(cache + place) = v;
    };
    if (head < ALL) {
      if (mine) {
        if (QK_NORM && turns)
          low[i] = normed(low[i], inverse, weight + at), high[i] = normed(high[i], inverse, weight + PAIRS + at);
        if (turns) turn(low[i], high[i], c, s, by);
        write(at, low[i]), write(PAIRS + at, high[i]);
      }
#pragma unroll
      for (int j = 0; j < RESTS; j++) {
        const int place = ROTARY + j * LANES * EACH + at;
        if (place >= HEAD_DIM) continue;
        if (QK_NORM && turns) rest[i][j] = normed(rest[i][j], inverse, weight + place);
        if (head < HEADS) times(rest[i][j], by);
        write(place, rest[i][j]);
      }
    }
#if KV8
    float most = fmaxf(size_of(low[i]), size_of(high[i]));
#pragma unroll
    for (int j = 0; j < RESTS; j++) most = fmaxf(most, size_of(rest[i][j]));
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    if (!cache) continue;
    const u16 bits = scale_bits(most, turns ? fixed_key : fixed_value);
    const float scale = scale_of(bits), scale_inverse = 1.f / scale;
    if (at == 0) (turns ? key_scales : value_scales)[scale_place(slot, kv_head)] = bits;
    auto write_codes = [&](int place, const Piece& v) {
      const Codes codes = coded(v, scale, scale_inverse);
      *(Codes*)(cache + place) = codes;
      *(Piece*)(row + head * HEAD_DIM + place) = decoded(codes, scale);
    };
    if (mine) write_codes(at, low[i]), write_codes(PAIRS + at, high[i]);
#pragma unroll
    for (int j = 0; j < RESTS; j++) {
      const int place = ROTARY + j * LANES * EACH + at;
      if (place < HEAD_DIM) write_codes(place, rest[i][j]);
    }
#endif
  }
}
