// What a LoRA adapter adds to the one row of a linear, by a warp of its own beside those that multiply (delta.py):
//
//      low[o] = Σ_k A[slot][o][k] · x[k]                 o: a rank of one of ADAPTER_PARTS parts (q, k and v; gate and up)
//      added[n] = Σ_r low[part of n][r] · B[slot][r][n]      the norm's factor comes last, as for the product itself
//
// Work split: an o is cut into ADAPTER_SPLITS pieces of the inputs, one for a CTA, whose sums meet in memory as words that are their own
// flags (common.cuh): every CTA reads them all, and makes what is added to its own outputs. All of it happens while the other warps
// multiply. Every launch empties the words of the launch before it, which nobody reads any more.
//
//      this warp   | A, B on their way | x is there: a piece of low → words | all of low | added → shared memory |
//      the others  | weights on their way | x is there: products … … …                       … | sums + added → y |
//
// defines: ADAPTER_RANK (0: none), ADAPTER_PARTS, ADAPTER_SPLITS, ADAPTER_END1, ADAPTER_END2 (where the first and the second part end, where they
// are no gate and up by turns), ADAPTER_TILES (the most that a CTA has); needs ROWS 1
#include "patience.cuh"
#define ADAPTER_ARGUMENTS , const u16 *adapter_a, const u16 *adapter_b, const int *slots, float *low, float *low_before, int words_before
#define ADAPTER_GIVEN , adapter_a, adapter_b, slots, low, low_before, words_before
static_assert(ROWS == 1 && SLICES == 1 && !IN_REGISTERS && KDIM % 8 == 0, "one row, whole, of eights");
constexpr int LOWS = ADAPTER_PARTS * ADAPTER_RANK, LOW_WORDS = LOWS * ADAPTER_SPLITS;
constexpr int SPLIT_PIECES = (KDIM / 8 + ADAPTER_SPLITS - 1) / ADAPTER_SPLITS, LOADS = (SPLIT_PIECES + 31) / 32;  // eights of inputs

struct AdapterShared {
  float low[LOWS], added[ADAPTER_TILES * 16];
  u64 ready;
};
// Eight inputs as the weights meet them, the norm's factor aside.
DEVICE void adapter_inputs(float (&v)[8], const Linear& a, int piece) {
  float squares = 0;
  widen(v, ((const uint4*)a.x)[piece]);
  if constexpr (GATED_INPUT) gate_inputs(v, ((const uint4*)(a.x + KDIM))[piece]);
  if (NORM) weigh(v, ((const uint4*)a.norm)[piece], squares);
}
DEVICE void adapter_weights(uint4 (&held)[LOADS], const u16* A, int unit, int lane) {
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int within = i * 32 + lane, piece = unit % ADAPTER_SPLITS * SPLIT_PIECES + within;
    const bool exists = within < SPLIT_PIECES && piece < KDIM / 8;
    held[i] = exists ? stream_load(A + (size_t)(unit / ADAPTER_SPLITS) * KDIM + 8 * piece) : make_uint4(0, 0, 0, 0);
  }
}
DEVICE float adapter_product(const uint4 (&held)[LOADS], const Linear& a, int unit, int lane) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int within = i * 32 + lane, piece = unit % ADAPTER_SPLITS * SPLIT_PIECES + within;
    if (within >= SPLIT_PIECES || piece >= KDIM / 8) continue;
    float v[8], w[8];
    adapter_inputs(v, a, piece);
    widen(w, held[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(v[j], w[j], sum);
  }
  return warp_sum(sum);
}
DEVICE float low_at(const Linear& a, int o) {  // the words of all its pieces, in order
  u32 words[ADAPTER_SPLITS][1];
  bool all;
  Patience patience;
  do {
    patience.poll();
    all = true;
#pragma unroll
    for (int i = 0; i < ADAPTER_SPLITS; i++) load_relaxed(a.low + o * ADAPTER_SPLITS + i, words[i]);
#pragma unroll
    for (int i = 0; i < ADAPTER_SPLITS; i++) all &= !missing<false>(words[i]);
  } while (!all);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < ADAPTER_SPLITS; i++) sum += __uint_as_float(words[i][0]);
  return sum;
}

// The whole of this warp's work, of CTA `index` of `workers`.
template <typename TileAt>
DEVICE void adapt(AdapterShared& sh, const Linear& a, int count, TileAt tile_at, int index, int workers, int lane) {
  const int slot = a.slots[0];
  const u16* const A = a.adapter_a + (size_t)max(slot, 0) * LOWS * KDIM;
  const u16* const B = a.adapter_b + (size_t)max(slot, 0) * ADAPTER_RANK * NDIM;
  uint4 held[LOADS];
  if (slot >= 0) {
    if (index < LOW_WORDS) adapter_weights(held, A, index, lane);
    for (int i = lane; i < count * ADAPTER_RANK; i += 32)
      prefetch_l2(B + (size_t)(i % ADAPTER_RANK) * NDIM + place_of(tile_at(i / ADAPTER_RANK)).weights * 16);
  }
  wait_for_inputs();
  for (int unit = index; slot >= 0 && unit < LOW_WORDS; unit += workers) {
    if (unit > index) adapter_weights(held, A, unit, lane);
    const float sum = adapter_product(held, a, unit, lane);
    if (lane == 0) store_relaxed(a.low + unit, sum);
  }
  for (int i = index * 32 + lane; i < a.words_before; i += workers * 32) store_relaxed(a.low_before + i, __uint_as_float(~0u));
  for (int o = lane; slot >= 0 && o < LOWS; o += 32) sh.low[o] = low_at(a, o);
  __syncwarp();
  for (int i = 2 * lane; i < count * 16; i += 64) {  // two neighbours of a part
    const int channel = place_of(tile_at(i / 16)).weights * 16 + i % 16;
    const int part = GATE_UP ? i % 16 / 8 : (ADAPTER_PARTS > 1 && channel >= ADAPTER_END1) + (ADAPTER_PARTS > 2 && channel >= ADAPTER_END2);
    float sum[2] = {};
    if (slot >= 0 && channel < NDIM)
#pragma unroll 16
      for (int r = 0; r < ADAPTER_RANK; r++) {
        const u32 pair = *(const u32*)(B + (size_t)r * NDIM + channel);
        sum[0] = fmaf(sh.low[part * ADAPTER_RANK + r], low_float(pair), sum[0]);
        sum[1] = fmaf(sh.low[part * ADAPTER_RANK + r], high_float(pair), sum[1]);
      }
    sh.added[i] = sum[0], sh.added[i + 1] = sum[1];
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&sh.ready);
}
