// x of a linear whose inputs lie in another order (GPTQ's act-order), where its kernel does not bring them into that order itself.
//
//      out[r, i] = x[r, order[i]]
//
// Work split: a CTA a row, which goes through shared memory. The order is read before the wait. The linear that follows fetches its
// weights meanwhile; it wants every SM to have one CTA of the kernel before it, so the host launches one on each and reserves shared
// memory for it (see route.cu).
// Limit: latency; of many rows bytes / bandwidth.
//
// defines: KDIM
#include "common.cuh"

constexpr int THREADS = 512, PIECES = KDIM / 8, PER = (PIECES + THREADS - 1) / THREADS;
static_assert(KDIM % 8 == 0, "pieces of eight");

// order [KDIM] of 16 bits each
extern "C" __global__ void __launch_bounds__(THREADS) gather(const uint4* x, const uint4* order, uint4* out, int rows) {
  extern __shared__ __align__(128) u8 raw[];
  const u16* const natural = (const u16*)raw;
  launch_dependents();
  uint4 places[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) places[i] = order[min((int)threadIdx.x + i * THREADS, PIECES - 1)];
  wait_for_inputs();
  const size_t row = blockIdx.x;
  if (row >= rows) return;
  for (int piece = threadIdx.x; piece < PIECES; piece += THREADS) ((uint4*)raw)[piece] = x[row * PIECES + piece];
  __syncthreads();
  auto two = [&](u32 at) { return natural[at & 0xffff] | (u32)natural[at >> 16] << 16; };
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int piece = threadIdx.x + i * THREADS;
    if (piece >= PIECES) break;
    out[row * PIECES + piece] = make_uint4(two(places[i].x), two(places[i].y), two(places[i].z), two(places[i].w));
  }
}
