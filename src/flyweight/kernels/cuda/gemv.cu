// A linear of 1 to 8 rows as a kernel of its own; gemv.cuh has the formula, the split and the limits.
// CTA b owns a contiguous run of tiles. defines: those of gemv.cuh, SHARED_BYTES
#include "gemv.cuh"

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

extern "C" __global__ void __launch_bounds__(ALL_THREADS, ON_SM)
gemv(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
     const u16* residual, u16* Y, float epsilon, u32* turns ADAPTER_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  const int first = (int)((long long)blockIdx.x * TILES / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * TILES / gridDim.x);
  if (first == last) return stay();
  const Linear arguments = {weights, records, channel_scale, X, norm, bias, residual, Y, epsilon, turns ADAPTER_GIVEN};
  const bool few = TILES < (int)gridDim.x;  // then CTAs with a tile have one each
  linear(*(LinearShared*)raw, arguments, last - first, [=](int i) { return first + i; }, [] {}, few ? first : (int)blockIdx.x,
         few ? TILES : (int)gridDim.x);
}
