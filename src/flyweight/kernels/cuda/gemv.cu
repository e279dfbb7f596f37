// A linear of 1 to 8 rows as a kernel of its own; gemv.cuh has the formula, the split and the limits.
// CTA b owns a contiguous run of tiles, or of stages of tiles. defines: those of gemv.cuh, SHARED_BYTES
#include "gemv.cuh"

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

extern "C" __global__ void __launch_bounds__(ALL_THREADS, ON_SM)
gemv(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
     const u16* residual, u16* Y, float epsilon, u32* turns, float* mail ADAPTER_ARGUMENTS LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  constexpr int UNIT = BALANCED ? TILE_STAGES : 1;  // of what CTAs have runs, in a tile, or (APART) in a pair of tiles
  constexpr int RUNS = APART ? TILES / 2 : TILES;
  const int begin = (int)((long long)blockIdx.x * RUNS * UNIT / gridDim.x), end = (int)((long long)(blockIdx.x + 1) * RUNS * UNIT / gridDim.x);
  if (begin == end) return stay();
  const int first = begin / UNIT, last = (end - 1) / UNIT;
  Slice slice = slice_at(0);
  if (BALANCED) slice.skipped = begin % UNIT, slice.last = end - last * UNIT;
  const Linear arguments = {weights, records, channel_scale, X, norm, bias, residual, Y, epsilon, turns ADAPTER_GIVEN};
  const bool few = RUNS < (int)gridDim.x;  // then CTAs with a tile have one each
  const int index = few ? first : (int)blockIdx.x, workers = few ? RUNS : (int)gridDim.x;
#if APART
  auto tile_at = [=](int i) { return Tile{first + i / 2 + i % 2 * RUNS, first + i / 2, 0}; };
#else
  auto tile_at = [=](int i) { return first + i; };
#endif
  const int count = (last + 1 - first) * (APART ? 2 : 1);
  if (linear(*(LinearShared*)raw, arguments, count, tile_at, [] {}, index, workers, slice, mail))
    end_launch(THREADS);
}
