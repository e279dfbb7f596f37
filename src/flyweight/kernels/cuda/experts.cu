// A linear of each expert that has tokens, for 1 to 8 tokens in all: gemv.cuh's tiles of many weights, stacked.
//
//      y[slot · ROWS + t, n] = sum_k x[t or slot · ROWS + t, k] · W[expert of slot][n, k]
//
// route.cu has listed the experts in use, one slot each. All tokens are multiplied with all of them: a column more of the
// matrix unit costs nothing, and only weights that are needed are read. Nobody looks at the products of a token with an
// expert that it was not sent to. PER_SLOT: each slot has rows of its own (the second linear of an expert).
//
// Work split: the tiles of all slots lie in one line that is cut evenly over the CTAs; each loads the rows of a slot when
// it comes to it, while the ring goes on. PER_SLOT: CTAs have tiles of one slot only where that makes the longest run hardly longer,
// since loading other rows takes as long as several tiles. Which weights these are is known as soon as `slots` is not 0, which is long before the
// kernel before this one has ended where that is the shared expert or the experts' first linear: so the ring is filled then.
// Waiting for it is safe: route's CTAs have all begun before any of this kernel may.
// Limit: bytes of the weights in use / bandwidth.
//
// CHOOSES (one token): route.cu has left logits alone, and every CTA chooses for itself. A word takes a microsecond from one SM to
// another; so there is one such way, from the router to here, where a counter, the last CTA's choice and the list of it are three.
// Tiles of the shared expert (JOINED), which is always chosen, are cut evenly by themselves, come first, and are fetched before the choice:
// with the first logit, as weights that come sooner may keep the router from its inputs.
//
// A shared expert that is as large as JOINED others (one token) counts as so many choices. Its first linear's tiles wait for no choice and
// come first: more than half a layer's bytes mostly, in which time the router has long spoken. Of its second linear a tile holds what JOINED
// slots multiply, one after the other.
//
// defines: those of gemv.cuh, PER_SLOT, SHARED_BYTES, CHOOSES (0), with it JOINED and those of choose.cuh, JOINED (0; else EXPERTS and CHOSEN)
#include "gemv.cuh"
#include "patience.cuh"
#include "words.cuh"
#ifndef CHOOSES
#define CHOOSES 0
#endif
#ifndef JOINED
#define JOINED 0
#endif
#if CHOOSES
#include "choose.cuh"
constexpr int CHOICES = CHOSEN + JOINED;
static_assert(ROWS == 1 && !PER_SLOT, "one token");
static_assert(!OWN_COPIES, "a producer fetches what is chosen in any case");
#endif

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");
static_assert(NDIM % 16 == 0, "no tile belongs to two experts");

struct Part {  // of some tiles, a CTA's
  int first, count;
};
DEVICE Part part_of(int tiles) {
  const int first = (int)((long long)blockIdx.x * tiles / gridDim.x);
  return {first, (int)((long long)(blockIdx.x + 1) * tiles / gridDim.x) - first};
}
#if !CHOOSES
DEVICE int tile_of(int expert, int tile) {
#if JOINED && PER_SLOT
  if (expert >= EXPERTS) return EXPERTS * TILES + tile * JOINED + expert - EXPERTS;
#endif
  return expert * TILES + tile;
}
#if JOINED && !PER_SLOT
static_assert(ROWS == 1, "one token");
struct JoinedTiles {
  Part shared, chosen;
  const int *expert_of, *slots;
  mutable bool known;
  DEVICE Tile operator()(int i) const {
    if (i < shared.count) {
      const int at = shared.first + i;
      return {EXPERTS * TILES + at, at % TILES, CHOSEN + at / TILES};
    }
    Patience patience;
    while (!known && !(known = load_acquire(slots))) patience.poll();
    const int at = chosen.first + i - shared.count, slot = min(at / TILES, CHOSEN - 1), tile = at % TILES;
    return {tile_of(expert_of[slot], tile), tile, slot};
  }
};
DEVICE void multiply_joined(LinearShared& sh, const Linear& a, const int* slots, const int* expert_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const JoinedTiles tile_at = {part_of(JOINED * TILES), part_of(CHOSEN * TILES), expert_of, slots, false};
  const int count = tile_at.shared.count + tile_at.chosen.count;
  const Slice whole = slice_at(0);
#if OWN_COPIES
  OwnRing<JoinedTiles> ring(sh, a, whole, tile_at, stages_of(whole, count), warp, lane);
  ring.fill();
#else
  if (warp == WARPS) return produce(sh, a, whole, count, tile_at, [] {}, lane);
  Ring ring = {sh};
#endif
  Rounds<JoinedTiles> rounds = {a, tile_at, count, whole};
  const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
  consume(sh, inputs, whole, 0, count, rounds, ring, warp, lane);
  end_launch(THREADS);
}
#endif
// The products of `used` slots.
DEVICE void multiply_slots(LinearShared& sh, Linear a, const u16* X, int used, const int* expert_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles = used * TILES;
  const int ctas = gridDim.x, index = blockIdx.x, fewest = ctas / used;  // of a slot
  int first = (int)((long long)index * tiles / ctas), count = (int)((long long)(index + 1) * tiles / ctas) - first;
  if (PER_SLOT && fewest > 0 && (TILES + fewest - 1) / fewest <= (tiles + ctas - 1) / ctas + 1) {
    const int slot = index * used / ctas, begin = (slot * ctas + used - 1) / used, own = ((slot + 1) * ctas + used - 1) / used - begin;
    first = slot * TILES + (index - begin) * TILES / own;
    count = slot * TILES + (index - begin + 1) * TILES / own - first;
  }
  auto tile_at = [=](int i) {
    const int slot = min((first + i) / TILES, used - 1), tile = (first + i) % TILES;
    return Tile{tile_of(expert_of[slot], tile), tile, slot * ROWS};
  };
  const Slice whole = slice_at(0);
#if OWN_COPIES
  OwnRing<decltype(tile_at)> ring(sh, a, whole, tile_at, stages_of(whole, count), warp, lane);
  ring.fill();
#else
  if (warp == WARPS) return produce(sh, a, whole, count, tile_at, [] {}, lane);
  Ring ring = {sh};
#endif
  Rounds<decltype(tile_at)> rounds = {a, tile_at, count, whole};
  if (!PER_SLOT) {
    const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
    consume(sh, inputs, whole, 0, count, rounds, ring, warp, lane);
    return end_launch(THREADS);
  }
  for (int done = 0, end; done < count; done = end) {
    const int slot = (first + done) / TILES;
    end = min(count, (slot + 1) * TILES - first);
    if (done) named_barrier(1, THREADS);  // nobody reads the rows of the slot before any more
    a.x = X + (size_t)slot * ROWS * KDIM;
    const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
    rounds.count = end;
    consume(sh, inputs, whole, done, end, rounds, ring, warp, lane);
  }
  end_launch(THREADS);
}

#else
// Tiles of a CTA: its part of the shared expert's, then its part of all chosen ones'. `expert_of` is there when all threads have met.
template <typename Await, typename Choose, typename Publish>
DEVICE void multiply_chosen(LinearShared& sh, const Linear& a, const int* expert_of, Await await_router, Choose choose, Publish publish) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part shared = part_of(JOINED ? TILES : 0), others = part_of(CHOSEN * TILES);
  const int count = shared.count + others.count;
  auto tile_at = [=](int i) {
    if (i < shared.count) return Tile{EXPERTS * TILES + shared.first + i, shared.first + i, CHOSEN};
    const int at = others.first + i - shared.count, slot = min(at / TILES, CHOSEN - 1), tile = at % TILES;
    return Tile{expert_of[slot] * TILES + tile, tile, slot};
  };
  const Slice whole = slice_at(0);
  const int known = min(shared.count, STAGES / TILE_STAGES);  // more would wait for those who choose
  if (warp == WARPS) {
    if (known) await_router();
    produce(sh, a, whole, count, tile_at, [] {}, known, [] { __syncthreads(); }, lane);
    if (known == count) __syncthreads();
    return;
  }
  choose();
  __syncthreads();
  publish();
  const Inputs inputs = load_rows(sh, a, whole, ROWS, warp, lane);
  Rounds<decltype(tile_at)> rounds = {a, tile_at, count, whole};
  Ring ring = {sh};
  consume(sh, inputs, whole, 0, count, rounds, ring, warp, lane);
  end_launch(THREADS);
}
#endif

#if !CHOOSES
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 2)
experts(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
        u16* Y, const int* expert_of, const int* slots, float epsilon LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  LinearShared& sh = *(LinearShared*)raw;
  begin_linear(sh);
#if JOINED && !PER_SLOT
  return multiply_joined(sh, {weights, records, channel_scale, X, norm, bias, nullptr, Y, epsilon}, slots, expert_of);
#endif
  __shared__ int found;
  if (threadIdx.x == 0) {  // alone: others would keep memory from those who find it out
    Patience patience;
    while (!(found = load_acquire(slots))) patience.poll();
  }
  __syncthreads();
  multiply_slots(sh, {weights, records, channel_scale, X, norm, bias, nullptr, Y, epsilon}, X, found, expert_of);
}
#else
// logits [EXPERTS + GATE] and choices [2 · CHOICES] (experts, then shares) are words that are their own flags: all ones before and after,
// which experts_sum.cu sees to.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 2)
experts(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
        u16* Y, const float* logits, float* choices, const float* router_bias, float scale, float epsilon LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  LinearShared& sh = *(LinearShared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ int chosen[CHOICES];
  __shared__ float shares[CHOICES];
  begin_linear(sh);
  auto choose = [&] {
    auto read = [&](const int (&expert)[OF_LANE], float (&logit)[OF_LANE]) {
      await_words(logits, expert, logit);
    };
    choose_by_warps(read, router_bias, scale, chosen, shares, warp, lane);
    if (JOINED && threadIdx.x == 0) chosen[CHOSEN] = EXPERTS;
  };
  auto publish = [&] {  // for experts_sum.cu
    if (blockIdx.x > 0 || warp > 0) return;
    if (JOINED && GATE && lane == CHOSEN) {
      const int at[1] = {EXPERTS};
      float gate[1];
      await_words(logits, at, gate);
      shares[CHOSEN] = sigmoid(gate[0]);
    } else if (JOINED && lane == CHOSEN) {
      shares[CHOSEN] = 1.f;
    }
    __syncwarp();
    if (lane < CHOICES) {
      store_relaxed(choices + lane, __int_as_float(chosen[lane]));
      store_relaxed(choices + CHOICES + lane, shares[lane]);
    }
  };
  const Linear a = {weights, records, channel_scale, X, norm, bias, nullptr, Y, epsilon};
  auto await_router = [&] {
    const int at[1] = {0};
    float first[1];
    await_words(logits, at, first);
  };
  multiply_chosen(sh, a, chosen, await_router, choose, publish);
}
#endif
