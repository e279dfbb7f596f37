// The two ends of a decode step: a token's embedding, and the likeliest token of its logits.
//
//   hidden[row] = embedding[tokens[row]];   tokens[row] = argmax(logits[row]), lengths[row] += 1
//
// Work split: a CTA a row; and CTAs of 8 logits a thread, which meet in one 64-bit maximum a row: the value in an order
// that integers share, then the index turned round, so that the first of equals wins. The last to arrive takes it.
// Limit: latency. Both are here only because torch's kernels do not overlap with ours.
//
// defines: FP16, WIDTH (of a row: of embeddings, or of logits), THREADS
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) embed(const u16* embedding, const u64* tokens, u16* hidden LAUNCH_ARGUMENTS) {
  BEGIN_LAUNCH;
  wait_for_inputs();
  // No early start of what follows by the hardware: it reads lengths before it waits, and it must find all SMs alike. Beside the few
  // CTAs here two of its own would land on one SM, and every kernel after it would inherit that.
  const uint4* from = (const uint4*)(embedding + tokens[blockIdx.x] * WIDTH);
  for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS) ((uint4*)(hidden + (size_t)blockIdx.x * WIDTH))[i] = from[i];
  end_launch(THREADS);
}

DEVICE u64 rank(u16 bits, int index) {
  const u32 value = __float_as_uint(to_float(bits)), ordered = value >> 31 ? ~value : value | 0x80000000u;
  return (u64)ordered << 32 | (u32)~index;
}
DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }
DEVICE u64 warp_largest(u64 best) {
#pragma unroll
  for (int o = 16; o; o >>= 1) best = larger(best, __shfl_xor_sync(~0u, best, o));
  return best;
}

// best and arrived [rows] are zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS)
choose(const u16* logits, u64* tokens, int* lengths, u64* best, u32* arrived LAUNCH_ARGUMENTS) {
  __shared__ u64 bests[THREADS / 32];
  const int row = blockIdx.y, first = (blockIdx.x * THREADS + threadIdx.x) * 8;
  BEGIN_LAUNCH;
  launch_dependents();
  wait_for_inputs();
  u64 mine = 0;
  if (first < WIDTH) {
    const uint4 v = *(const uint4*)(logits + (size_t)row * WIDTH + first);
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++) mine = larger(mine, rank((u16)(pairs[i / 2] >> (i % 2 * 16)), first + i));
  }
  mine = warp_largest(mine);
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  mine = warp_largest(threadIdx.x < THREADS / 32 ? bests[threadIdx.x] : 0);
  if (threadIdx.x == 0) {
    atomicMax(best + row, mine);
    __threadfence();
    if (atomicInc(arrived + row, gridDim.x - 1) == gridDim.x - 1) {  // which is zero again now
      __threadfence();
      tokens[row] = (u32)~atomicExch(best + row, 0ull);
      if (lengths[row]) lengths[row] += 1;  // 0: padding
    }
    count_launch();
  }
}
