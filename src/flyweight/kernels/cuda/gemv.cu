// A linear of 1 to 8 rows as a kernel of its own; gemv.cuh has the formula, the split and the limits.
// CTA b owns a contiguous run of tiles; where a few CTAs would have one tile more than the others (EVEN, one row), of stages:
//
//      tiles:    | 0         | 1         | 2         | 3  …
//      CTAs:     |  0             |  1             |  2         each begins with what it has of its last tile, and leaves
//                                                               the sums in the mail of the CTA that ends this tile
//
// There they have long been when that CTA is done, so nobody waits; its producer warp takes them out, once it has asked for the last
// of its weights. A CTA has a tile or more, so no tile has more than two.
//
// defines: those of gemv.cuh, SHARED_BYTES
#include "gemv.cuh"
#include "mail.cuh"

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");
static_assert(!EVEN || (ROWS == 1 && SLICES == 1), "16 sums to a letter");

#if EVEN
// The begin of a tile that the next CTA ends.
struct Giving {
  float* mail;
  DEVICE void begin(int) {}
  DEVICE void end(const LinearShared& sh, int, int) {
    if (threadIdx.x < 16) leave(mail + threadIdx.x, add_warps(sh, 0, threadIdx.x, 0));
  }
};

DEVICE void multiply(LinearShared& sh, const Linear& a, float* mail) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long line = (long long)TILES * TILE_STAGES;
  const int begin = (int)(blockIdx.x * line / gridDim.x), end = (int)((blockIdx.x + 1) * line / gridDim.x);
  const Share share = {begin, end, end % TILE_STAGES};
  const int first = begin / TILE_STAGES, from = begin % TILE_STAGES;
  const Slice whole = slice_at(0);
  begin_linear(sh);
  if (warp == WARPS) {
    produce(sh, a, whole, share, [](int tile) { return tile; }, [] {}, lane);
    if (from == 0) return;
    if (lane < 16) sh.letters[lane] = take<accumulated>(mail + ((int)blockIdx.x - 1) * 16 + lane, 0);
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.mailed);
    return;
  }
  const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
  Ring ring = {0, 0};
  if (share.given) {
    Giving giving = {mail + blockIdx.x * 16};
    consume(sh, inputs, whole, 0, 1, giving, ring, warp, lane, 0, share.given);
    named_barrier(1, THREADS);  // before others leave new sums
  }
  auto tile_at = [=](int i) { return first + i; };
  Rounds<decltype(tile_at)> rounds = {a, tile_at, end / TILE_STAGES - first, from > 0};
  consume(sh, inputs, whole, 0, rounds.count, rounds, ring, warp, lane, from);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32, ON_SM)
gemv(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
     const u16* residual, u16* Y, float epsilon, u32* turns, float* mail) {
  extern __shared__ __align__(128) u8 raw[];
  const Linear arguments = {weights, records, channel_scale, X, norm, bias, residual, Y, epsilon, turns};
#if EVEN
  multiply(*(LinearShared*)raw, arguments, mail);
#else
  const int first = (int)((long long)blockIdx.x * TILES / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * TILES / gridDim.x);
  if (first == last) return stay();
  linear(*(LinearShared*)raw, arguments, last - first, [=](int i) { return first + i; }, [] {});
#endif
}
