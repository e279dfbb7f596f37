// The second linear of the experts that one token has chosen, and the sum of what they make of it.
//
//      y[n] = residual[n] + sum_j share[j] · sum_k x[j, k] · W[expert of j][n, k]
//
// A linear of CHOICES · (an expert's inputs), whose weights lie with their experts: x is one row of all choices, times their shares, and
// a stage of the ring is what one expert has of a tile. So sums meet in registers, where experts.cu and `combine` write and read the
// answer of each choice, and a kernel less stands between two layers.
//
// Work split: a CTA has whole tiles of outputs (gemv.cu). Weights come as soon as the choices are known (experts.cu), mostly
// before x is there. The last CTA that has seen all inputs takes the number of choices down to 0, as `combine` does.
// Limit: bytes of the weights in use / bandwidth, and how soon x is ready.
//
// defines: those of gemv.cuh, SLOT_BLOCKS, SHARED_BYTES
#include "gemv.cuh"
#include "patience.cuh"

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");
static_assert(ROWS == 1 && STAGE_BLOCKS == SLOT_BLOCKS && BLOCKS % SLOT_BLOCKS == 0 && !BALANCED && !OWN_COPIES, "an expert is a stage");

// arrived is zero before and after.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 2)
experts_sum(const u8* weights, const u32* records, const u16* X, const float* shares, const u16* residual, u16* Y, const int* expert_of,
            int* slots, u32* arrived LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  LinearShared& sh = *(LinearShared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  begin_linear(sh);
  if (threadIdx.x == 0) {
    Patience patience;
    while (!load_acquire(slots)) patience.poll();
  }
  __syncthreads();
  const int first = (int)((long long)blockIdx.x * TILES / gridDim.x), count = (int)((long long)(blockIdx.x + 1) * TILES / gridDim.x) - first;
  auto tile_at = [=](int i) { return first + i; };
  Linear a = {weights, records, nullptr, X, nullptr, nullptr, residual, Y, 0.f};
  a.experts = expert_of, a.shares = shares;
  const Slice whole = slice_at(0);
  if (warp == WARPS) return produce(sh, a, whole, count, tile_at, [] {}, lane);
  const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
  if (threadIdx.x == 0 && atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1) *slots = 0;
  Ring ring = {sh};
  Rounds<decltype(tile_at)> rounds = {a, tile_at, count, whole};
  consume(sh, inputs, whole, 0, count, rounds, ring, warp, lane);
  end_launch(THREADS);
}
