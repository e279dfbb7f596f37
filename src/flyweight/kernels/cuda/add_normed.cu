// What a decode step adds to its hidden state where a family norms or scales the results of attention and MLP first.
//
//      out[r] = hidden[r] + scale · norm(y[r]),  norm(y) = y / √(mean y² + ε) · weight, or (NORM 0) y itself
//
// Work split: a CTA a row, eight neighbouring values at a time to a thread. Rounded where torch would round. `out` may be `hidden`.
// The linear that follows fetches its weights meanwhile; it wants every SM to have one CTA of the kernel before it, so the host
// launches one on each and reserves shared memory for it (see route.cu).
// Limit: latency.
//
// defines: FP16, KDIM, NORM
#include "common.cuh"

constexpr int THREADS = 256, PIECES = KDIM / 8, PER = (PIECES + THREADS - 1) / THREADS;
static_assert(KDIM % 8 == 0, "pieces of eight");

DEVICE float squares_of(u32 pair) { return low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair); }
DEVICE u32 added(u32 old, u32 pair, u32 factors, float inverse, float scale) {
  if (NORM) {
    pair = pack2(low_float(pair) * inverse, high_float(pair) * inverse);
    pair = pack2(low_float(pair) * low_float(factors), high_float(pair) * high_float(factors));
  }
  return pack2(low_float(old) + scale * low_float(pair), high_float(old) + scale * high_float(pair));
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_normed(const uint4* hidden, const uint4* y, const uint4* weight, uint4* out, int rows, float epsilon, float scale) {
  __shared__ float of_warps[THREADS / 32];
  launch_dependents();
  uint4 factors[PER], values[PER], old[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = min(threadIdx.x + i * THREADS, PIECES - 1);
    if (NORM) factors[i] = weight[piece];
  }
  wait_for_inputs();
  const int row = blockIdx.x;
  if (row >= rows) return;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = min(threadIdx.x + i * THREADS, PIECES - 1);
    values[i] = y[(size_t)row * PIECES + piece], old[i] = hidden[(size_t)row * PIECES + piece];
    if (threadIdx.x + i * THREADS < PIECES)
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
    const uint4 v = values[i], o = old[i], f = factors[i];
    out[(size_t)row * PIECES + piece] = make_uint4(added(o.x, v.x, f.x, inverse, scale), added(o.y, v.y, f.y, inverse, scale),
                                                   added(o.z, v.z, f.z, inverse, scale), added(o.w, v.w, f.w, inverse, scale));
  }
}
