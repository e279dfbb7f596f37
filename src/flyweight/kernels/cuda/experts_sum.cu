// The second linear of the experts that one token has chosen, and the sum of what they make of it.
//
//      y[n] = residual[n] + sum_j share[j] · sum_k x[j, k] · W[expert of j][n, k]
//
// A linear of CHOICES · (an expert's inputs), whose weights lie with their experts: x is one row of all choices, times their shares, and
// a stage of the ring is what one expert has of a tile. So sums meet in registers, where experts.cu and `combine` write and read the
// answer of each choice, and a kernel less stands between two layers.
//
// Work split: a CTA has whole tiles of outputs (gemv.cu). Weights come as soon as the choices are known (experts.cu), mostly
// before x is there. The last CTA that has seen all inputs takes the number of choices down to 0, as `combine` does. CHOOSES: choices
// come as words that are their own flags (experts.cu), and these and the logits are emptied here.
// Limit: bytes of the weights in use / bandwidth, and how soon x is ready.
//
// defines: those of gemv.cuh, SLOT_BLOCKS, SHARED_BYTES, CHOOSES (0: else how many logits there are)
#include "gemv.cuh"
#include "patience.cuh"
#include "words.cuh"

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");
#ifndef CHOOSES
#define CHOOSES 0
#endif
constexpr int CHOICES = BLOCKS / SLOT_BLOCKS;
static_assert(ROWS == 1 && STAGE_BLOCKS == SLOT_BLOCKS && BLOCKS % SLOT_BLOCKS == 0 && !BALANCED && !OWN_COPIES, "an expert is a stage");

// arrived is zero before and after. CHOOSES: `shares` are the words of choices, experts first, and `slots` those of logits.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 2)
experts_sum(const u8* weights, const u32* records, const u16* X, const float* shares, const u16* residual, u16* Y, const int* expert_of,
            int* slots, u32* arrived LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  LinearShared& sh = *(LinearShared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  begin_linear(sh);
#if CHOOSES
  __shared__ float found[2 * CHOICES];  // experts, shares
  if (threadIdx.x < 2 * CHOICES) {
    const int at[1] = {(int)threadIdx.x};
    float word[1];
    await_words(shares, at, word);
    found[threadIdx.x] = word[0];
  }
  __syncthreads();
#else
  if (threadIdx.x == 0) {
    Patience patience;
    while (!load_acquire(slots)) patience.poll();
  }
  __syncthreads();
#endif
  const int first = (int)((long long)blockIdx.x * TILES / gridDim.x), count = (int)((long long)(blockIdx.x + 1) * TILES / gridDim.x) - first;
  auto tile_at = [=](int i) { return first + i; };
  Linear a = {weights, records, nullptr, X, nullptr, nullptr, residual, Y, 0.f};
  a.experts = expert_of, a.shares = shares;
#if CHOOSES
  a.experts = (const int*)found, a.shares = found + CHOICES;
#endif
  const Slice whole = slice_at(0);
  if (warp == WARPS) return produce(sh, a, whole, count, tile_at, [] {}, lane);
  const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
#if CHOOSES
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < CHOOSES; i += gridDim.x * THREADS) slots[i] = ~0;  // who chose by them has ended
  if (threadIdx.x == 0 && atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1)
    for (int i = 0; i < 2 * CHOICES; i++) ((u32*)shares)[i] = ~0u;
#else
  if (threadIdx.x == 0 && atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1) *slots = 0;
#endif
  Ring ring = {sh};
  Rounds<decltype(tile_at)> rounds = {a, tile_at, count, whole};
  consume(sh, inputs, whole, 0, count, rounds, ring, warp, lane);
  end_launch(THREADS);
}
