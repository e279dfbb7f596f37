// What a LoRA adapter adds to the one row of a linear (delta.py):
//
//      low[o] = Σ_k A[slot][o][k] · x[k]                 o: a rank of one of ADAPTER_PARTS parts (q, k and v; gate and up)
//      added[n] = Σ_r low[part of n][r] · B[slot][r][n]      the norm's factor comes last, as for the product itself
//
// Work split: every CTA has all of x in the registers of the warps that multiply, as they prepare it. ADAPTER_SPLITS CTAs have one o, each with
// some of these warps: a warp leaves its sum as a word that is its own flag (common.cuh). A warp more in each CTA reads the words of
// all, and makes what is added to the CTA's own outputs while the others multiply. Every launch empties the words of the launch
// before it, which nobody reads any more.
//
//      one warp    | B on its way                   | waits for all words: low | added → shared memory |
//      the others  | weights, A on their way | x is there: a word of low | products …        … | sums + added → y |
//
// Limit: latency, that of words from one SM to all others.
//
// defines: ADAPTER_RANK (0: none), ADAPTER_PARTS, ADAPTER_SPLITS, ADAPTER_END1, ADAPTER_END2 (where the first and the second part end, where they
// are no gate and up by turns), ADAPTER_TILES (the most that a CTA has), ADAPTER_HELD (whether B lies in shared memory); needs ROWS 1
#include "words.cuh"
#define ADAPTER_ARGUMENTS , const u16 *adapter_a, const u16 *adapter_b, const int *slots, float *low, float *low_before, int words_before
#define ADAPTER_GIVEN , adapter_a, adapter_b, slots, low, low_before, words_before
static_assert(ROWS == 1 && SLICES == 1 && !IN_REGISTERS && !INDEXED && KDIM % 8 == 0, "one row, whole, in order, of eights");
static_assert(WARPS % 4 == 0 && WARPS % ADAPTER_SPLITS == 0, "words of an o are whole vectors, and CTAs have whole warps of it");
constexpr int LOWS = ADAPTER_PARTS * ADAPTER_RANK;
constexpr int LOW_PIECES = (PIECES + THREADS - 1) / THREADS;  // eights of inputs in a lane
constexpr int OWN_OUTPUTS = ADAPTER_TILES * 16;
constexpr int LOW_SHARERS = WARPS / 4, LOW_VECTORS = LOWS * LOW_SHARERS, VECTORS_AT_ONCE = 8;  // of four words

struct AdapterShared {
  __align__(16) u16 b[ADAPTER_HELD ? ADAPTER_RANK : 1][ADAPTER_HELD ? OWN_OUTPUTS : 8];
  float low[LOWS], added[OWN_OUTPUTS];
  int index, workers;  // this CTA among those with outputs
  u64 ready;
};

// A warp's part in A x. `fetch` comes ahead of the inputs; `multiply` gets them as the weights do, the norm's factor aside.
struct LowProducts {
  const u16* A;
  float* low;
  int slot, unit, workers, warp, lane;
  uint4 held[LOW_PIECES];

  DEVICE LowProducts(const AdapterShared& sh, const Linear& a, int warp, int lane)
      : low(a.low), slot(a.slots[0]), unit(sh.index), workers(sh.workers), warp(warp), lane(lane) {
    A = a.adapter_a + (size_t)max(slot, 0) * LOWS * KDIM;
  }
  DEVICE bool mine() const { return slot >= 0 && unit < LOWS * ADAPTER_SPLITS && unit % ADAPTER_SPLITS == warp % ADAPTER_SPLITS; }
  DEVICE void fetch() {
    if (!mine()) return;
#pragma unroll
    for (int i = 0; i < LOW_PIECES; i++) {
      const int piece = (i * WARPS + warp) * 32 + lane;
      held[i] = piece < KDIM / 8 ? stream_load(A + (size_t)(unit / ADAPTER_SPLITS) * KDIM + 8 * piece) : make_uint4(0, 0, 0, 0);
    }
  }
  DEVICE void multiply(const float (&x)[LOW_PIECES][8]) {
    for (; unit < LOWS * ADAPTER_SPLITS; unit += workers, fetch()) {
      if (!mine()) continue;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < LOW_PIECES; i++) {
        float w[8];
        widen(w, held[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(x[i][j], w[j], sum);
      }
      sum = warp_sum(sum);
      if (lane == 0) store_relaxed(low + unit / ADAPTER_SPLITS * WARPS + warp, sum);
    }
  }
};

// All of low into shared memory, by one warp: a lane has four words of an o, its neighbours the others.
DEVICE void collect_low(AdapterShared& sh, const Linear& a, int lane) {
#pragma unroll 1
  for (int first = 0; first < LOW_VECTORS; first += 32 * VECTORS_AT_ONCE) {
    constexpr int COUNT = LOW_VECTORS < 32 * VECTORS_AT_ONCE ? (LOW_VECTORS + 31) / 32 : VECTORS_AT_ONCE;
    u32 words[COUNT][4];
    await_words(words, [&](int i) { return a.low + 4 * min(first + i * 32 + lane, LOW_VECTORS - 1); });
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) sum += __uint_as_float(words[i][j]);
#pragma unroll
      for (int apart = 1; apart < LOW_SHARERS; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      const int vector = first + i * 32 + lane;
      if (vector < LOW_VECTORS && vector % LOW_SHARERS == 0) sh.low[vector / LOW_SHARERS] = sum;
    }
  }
  __syncwarp();
}

// The whole of this warp's work, of CTA `index` of `workers`.
template <typename TileAt>
DEVICE void adapt(AdapterShared& sh, const Linear& a, int count, TileAt tile_at, int index, int workers, int lane) {
  const int slot = a.slots[0];
  const u16* const B = a.adapter_b + (size_t)max(slot, 0) * ADAPTER_RANK * NDIM;
  for (int i = lane; slot >= 0 && i < count * ADAPTER_RANK * 2; i += 32) {  // 8 outputs each
    const int r = i / 2 % ADAPTER_RANK, tile = i / 2 / ADAPTER_RANK, channel = place_of(tile_at(tile)).weights * 16 + i % 2 * 8;
    const u16* from = B + (size_t)r * NDIM + channel;
    if (!ADAPTER_HELD && i % 2 == 0) prefetch_l2(from);
    if (ADAPTER_HELD && channel < NDIM) copy_piece(&sh.b[ADAPTER_HELD ? r : 0][ADAPTER_HELD ? tile * 16 + i % 2 * 8 : 0], from);
  }
  copy_group();
  wait_for_inputs();
  if (slot >= 0) collect_low(sh, a, lane);
  copy_wait<0>();
  __syncwarp();
  for (int i = 2 * lane; i < count * 16; i += 64) {  // two neighbours of a part
    const int channel = place_of(tile_at(i / 16)).weights * 16 + i % 16;
    const int part = GATE_UP && !APART ? i % 16 / 8 : (ADAPTER_PARTS > 1 && channel >= ADAPTER_END1) + (ADAPTER_PARTS > 2 && channel >= ADAPTER_END2);
    float sum[2] = {};
    if (slot >= 0 && channel < NDIM)
#pragma unroll 16
      for (int r = 0; r < ADAPTER_RANK; r++) {
        const u32 pair = *(const u32*)(ADAPTER_HELD ? &sh.b[r][i] : B + (size_t)r * NDIM + channel);
        sum[0] = fmaf(sh.low[part * ADAPTER_RANK + r], low_float(pair), sum[0]);
        sum[1] = fmaf(sh.low[part * ADAPTER_RANK + r], high_float(pair), sum[1]);
      }
    sh.added[i] = sum[0], sh.added[i + 1] = sum[1];
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&sh.ready);
  for (int i = index * 32 + lane; i < a.words_before; i += workers * 32) store_relaxed(a.low_before + i, __uint_as_float(~0u));
}
