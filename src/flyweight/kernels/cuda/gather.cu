// x of a linear whose inputs lie in another order (GPTQ's act-order), normed on its way where a norm comes before.
//
//      out[r, i] = norm(x[r])[order[i]],  norm(x) = x / √(mean x² + ε) · weight, or (NORM 0) x itself
//
// Work split: a CTA a row, which goes through shared memory. Order and weights of the norm are read before the wait. The linear that
// follows fetches its weights meanwhile; it wants every SM to have one CTA of the kernel before it, so the host launches one on each
// and reserves shared memory for it (see route.cu). Rounded where torch would round.
// Limit: latency.
//
// defines: FP16, KDIM, NORM
#include "common.cuh"

constexpr int THREADS = 512, PIECES = KDIM / 8, PER = (PIECES + THREADS - 1) / THREADS;
static_assert(KDIM % 8 == 0, "pieces of eight");

DEVICE float squares_of(u32 pair) { return low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair); }
DEVICE u32 normed(u32 pair, u32 factors, float inverse) {
  const u32 scaled = pack2(low_float(pair) * inverse, high_float(pair) * inverse);
  return pack2(low_float(scaled) * low_float(factors), high_float(scaled) * high_float(factors));
}

// order [KDIM] of 16 bits each
extern "C" __global__ void __launch_bounds__(THREADS)
gather(const uint4* x, const uint4* weight, const uint4* order, uint4* out, int rows, float epsilon) {
  extern __shared__ __align__(128) u8 raw[];
  __shared__ float of_warps[THREADS / 32];
  u16* const row_here = (u16*)raw;
  launch_dependents();
  uint4 factors[PER], from[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = min((int)threadIdx.x + i * THREADS, PIECES - 1);
    from[i] = order[piece];
    if (NORM) factors[i] = weight[piece];
  }
  wait_for_inputs();
  const int row = blockIdx.x;
  if (row >= rows) return;
  uint4 values[PER];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = min((int)threadIdx.x + i * THREADS, PIECES - 1);
    values[i] = x[(size_t)row * PIECES + piece];
    if (NORM && threadIdx.x + i * THREADS < PIECES)
      squares += squares_of(values[i].x) + squares_of(values[i].y) + squares_of(values[i].z) + squares_of(values[i].w);
  }
  float inverse = 1;
  if (NORM) {
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) squares += of_warps[w];
    inverse = rsqrtf(squares / KDIM + epsilon);
  }
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = threadIdx.x + i * THREADS;
    if (piece >= PIECES) break;
    uint4 v = values[i];
    const uint4 f = factors[i];
    if (NORM) v = make_uint4(normed(v.x, f.x, inverse), normed(v.y, f.y, inverse), normed(v.z, f.z, inverse), normed(v.w, f.w, inverse));
    ((uint4*)row_here)[piece] = v;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = threadIdx.x + i * THREADS;
    if (piece >= PIECES) break;
    const u32 places[4] = {from[i].x, from[i].y, from[i].z, from[i].w};
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = row_here[places[j] & 0xffff] | (u32)row_here[places[j] >> 16] << 16;
    out[(size_t)row * PIECES + piece] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}
