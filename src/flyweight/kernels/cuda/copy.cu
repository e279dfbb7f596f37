// to = from, 16 bytes at a time: what memory gives to so many SMs, one CTA on each.
//
// Work split: a CTA has every gridDim-th piece of 16 · THREADS · AHEAD bytes; a thread has AHEAD loads on their way.
// Limit: bytes in flight on the SMs used, or memory's bandwidth.
//
// defines: THREADS, AHEAD
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) copy(const uint4* from, uint4* to, int pieces) {
  for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const size_t at = (size_t)piece * THREADS * AHEAD + threadIdx.x;
    uint4 words[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) words[i] = stream_load(from + at + i * THREADS);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) __stcs(to + at + i * THREADS, words[i]);
  }
}
