// What LoRA adapters add to a linear, for the few rows of a decode step; each row has its own adapter, or none (slot -1).
//
//   low[row][o] = Σ_k A[slot][o][k] · norm(x[row])[k]           o: a rank of one of the PARTS, each with its own A
//                                                               GATED: x = silu(gate) · up, written to `gated`, too
//   out[row][j] = residual[row][j] + Σ_r low[row][part of j][r] · B[slot][r][j]
//
// Work split: shrink has a CTA for each (o, row), whose threads share the inputs; expand has as many CTAs as the GPU has
// processors for each row, one warp each, with neighbouring outputs, 8 a lane.
// Limit: latency. So shrink fetches A, and brings B to L2, before it waits for x; expand fetches the first of B before it waits
// for shrink, and, since its CTAs leave every processor alike, lets the product that follows begin at once.
//
// defines: FP16, INPUTS, OUTPUTS, RANK, PARTS, END1, END2 (where the first and second part end), NORM, GATED, RESIDUAL, THREADS
#include "common.cuh"

#define VECTORS ((INPUTS / 8 + THREADS - 1) / THREADS)
#define WARPS (THREADS / 32)
#define LOWS (PARTS * RANK)
#define HELD (RANK < 16 ? RANK : 16)

DEVICE void add_products(uint4 a, uint4 x, uint4 w, float& dot, float& squares) {
  const u32 as[4] = {a.x, a.y, a.z, a.w}, xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = low_float(xs[i]), high = high_float(xs[i]);
    if (NORM) {
      squares = fmaf(low, low, fmaf(high, high, squares));
      dot = fmaf(low_float(as[i]) * low_float(ws[i]), low, fmaf(high_float(as[i]) * high_float(ws[i]), high, dot));
    } else {
      dot = fmaf(low_float(as[i]), low, fmaf(high_float(as[i]), high, dot));
    }
  }
}

DEVICE float silu_product(float gate, float up) { return gate / (1.f + exp2_fast(gate * -1.44269504f)) * up; }
DEVICE uint4 gate_product(uint4 gate, uint4 up) {
  const u32 gates[4] = {gate.x, gate.y, gate.z, gate.w}, ups[4] = {up.x, up.y, up.z, up.w};
  u32 found[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    found[i] = pack2(silu_product(low_float(gates[i]), low_float(ups[i])), silu_product(high_float(gates[i]), high_float(ups[i])));
  uint4 result;
  result.x = found[0];
  result.y = found[1];
  result.z = found[2];
  result.w = found[3];
  return result;
}

extern "C" __global__ void __launch_bounds__(THREADS)
shrink(const u16* a, const u16* b, const u16* x, const u16* weight, const int* slots, float* low, u16* gated, float epsilon) {
  __shared__ float sums[2][WARPS];
  const int which = blockIdx.x, row = blockIdx.y, slot = slots[row], thread = threadIdx.x;
  const bool writes = GATED && which == 0;  // one CTA of the row
  if (slot < 0 && !writes) {  // after those before it all the same: the kernel that follows waits for this one alone
    wait_for_inputs();
    return;
  }
  const uint4 zero = {0, 0, 0, 0};
  const u16* own = a + ((size_t)slot * LOWS + which) * INPUTS;
  uint4 as[VECTORS], ws[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = (thread + i * THREADS) * 8;
    as[i] = at < INPUTS && slot >= 0 ? stream_load(own + at) : zero;
    ws[i] = NORM && at < INPUTS ? constant_load(weight + at) : zero;
  }
  // 128 bytes a thread of what expand will read, all CTAs of the row together
  const char* bytes = (const char*)(b + (size_t)slot * RANK * OUTPUTS);
  for (size_t at = ((size_t)which * THREADS + thread) * 128; slot >= 0 && at < (size_t)RANK * OUTPUTS * 2; at += (size_t)LOWS * THREADS * 128)
    prefetch_l2(bytes + at);
  wait_for_inputs();
  float dot = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = (thread + i * THREADS) * 8;
    if (at >= INPUTS) continue;
    const u16* from = x + (size_t)row * INPUTS * (1 + GATED) + at;
    uint4 v = *(const uint4*)from;
    if (GATED) v = gate_product(v, *(const uint4*)(from + INPUTS));
    if (writes) *(uint4*)(gated + (size_t)row * INPUTS + at) = v;
    add_products(as[i], v, ws[i], dot, squares);
  }
  if (slot < 0) return;
  dot = warp_sum(dot);
  if (NORM) squares = warp_sum(squares);
  if (thread % 32 == 0) {
    sums[0][thread / 32] = dot;
    sums[1][thread / 32] = squares;
  }
  __syncthreads();
  if (thread > 0) return;
  dot = squares = 0;
  for (int i = 0; i < WARPS; i++) {
    dot += sums[0][i];
    squares += sums[1][i];
  }
  low[(size_t)row * LOWS + which] = NORM ? dot * rsqrtf(squares / INPUTS + epsilon) : dot;
}

DEVICE void add_column(uint4 v, float factor, float (&sum)[8]) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[2 * i] = fmaf(factor, low_float(pairs[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(factor, high_float(pairs[i]), sum[2 * i + 1]);
  }
}

extern "C" __global__ void __launch_bounds__(32)
expand(const u16* b, const float* low, const int* slots, const u16* residual, u16* out) {
  const int share = (OUTPUTS / 8 + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
  const int end = min(OUTPUTS / 8, begin + share), first = begin + threadIdx.x;
  const int row = blockIdx.y, slot = slots[row];
  uint4 held[HELD];  // of this lane's first outputs: fetched before we wait
  if (first < end && slot >= 0) {
#pragma unroll
    for (int r = 0; r < HELD; r++) held[r] = stream_load(b + ((size_t)slot * RANK + r) * OUTPUTS + first * 8);
  }
  launch_dependents();
  wait_for_inputs();
  for (int vector = first; vector < end; vector += 32) {
    const int at = vector * 8, part = (PARTS > 1 && at >= END1) + (PARTS > 2 && at >= END2);
    const float* own = low + (size_t)row * LOWS + part * RANK;
    float sum[8] = {};
    if (RESIDUAL) add_column(*(const uint4*)(residual + (size_t)row * OUTPUTS + at), 1.f, sum);
    if (slot >= 0) {
      const u16* column = b + (size_t)slot * RANK * OUTPUTS + at;
#pragma unroll
      for (int r = 0; r < HELD; r++) add_column(vector == first ? held[r] : stream_load(column + (size_t)r * OUTPUTS), own[r], sum);
#pragma unroll 8
      for (int r = HELD; r < RANK; r++) add_column(stream_load(column + (size_t)r * OUTPUTS), own[r], sum);
    }
    uint4 result;
    result.x = pack2(sum[0], sum[1]);
    result.y = pack2(sum[2], sum[3]);
    result.z = pack2(sum[4], sum[5]);
    result.w = pack2(sum[6], sum[7]);
    *(uint4*)(out + (size_t)row * OUTPUTS + at) = result;
  }
}
