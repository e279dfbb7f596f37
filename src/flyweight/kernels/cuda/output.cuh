// A linear as the host gives it, and how one of its outputs ends: bias, residual or act(gate)·up. Needs linear.cuh's names.
#ifndef ADAPTER_RANK
#define ADAPTER_RANK 0
#endif
#ifndef APART
#define APART 0  // gate and up lie whole tiles apart, half of all; a CTA then has both of a pair, one after the other
#endif
// What a linear is made of, as the host gives it; pointers to what its format or its call has not are null.
struct Linear {
  const u8* weights;
  const u32* records;          // scale and zero point of each group of inputs
  const float* channel_scale;  // W8A8, float8
  const u16 *x, *norm, *bias, *residual;
  u16* y;
  float epsilon;
  u32* turns = nullptr;  // of each SM: linears that have begun there, and that have asked for the last of their weights
#if ADAPTER_RANK
  const u16 *adapter_a, *adapter_b;  // [slots][parts][rank][inputs], [slots][rank][outputs]: gemv_delta.cuh
  const int* slots;                  // of each row; -1: nothing is added
  float *low, *low_before;           // words of this launch and of the one before it
  int words_before;
#endif
#if SLOT_BLOCKS
  const int* experts;   // of each choice
  const float* shares;
#endif
};

// Where a tile lies among the weights, where its outputs lie in a row of y, and which row is the first. A linear alone has
// all its tiles in order; of several stacked ones (experts.cu) these differ.
struct Tile {
  int weights, outputs, row;
};
DEVICE Tile place_of(int tile) { return {tile, tile, 0}; }
DEVICE Tile place_of(Tile tile) { return tile; }

constexpr int OUTPUTS = GATE_UP && !APART ? 8 : 16, WIDTH = GATE_UP ? NDIM / 2 : NDIM;
constexpr int PARTS = GATE_UP ? 2 : 1;  // sums that make an output: gate and up lie 8 rows apart, or in two tiles
constexpr int PART_ROWS = APART ? 0 : 8, PART_TILES = APART ? 1 : 0;  // from one to the other, in a CTA
static_assert(!APART || (GATE_UP && NDIM % 32 == 0), "whole tiles of gate and of up");

// An output, and what its end needs from memory.
struct Output {
  int slot, row, token, index;
  bool mine;
  float residual, bias[2], scale[2];
};
DEVICE void fetch_ends(Output& o, const Linear& a, Tile tile) {
  if (EPILOGUE == RESIDUAL) o.residual = to_float(a.residual[o.index]);
#pragma unroll
  for (int half = 0; half < PARTS; half++) {
    const int channel = tile.weights * 16 + half * (APART ? NDIM / 2 : 8) + o.row;
    if (BIAS) o.bias[half] = to_float(a.bias[channel]);
    if (QUANTIZED) o.scale[half] = a.channel_scale[channel];
  }
}
DEVICE float ended(const Output& o, const float (&v)[2]) {
  if constexpr (GATE_UP)
    return gated<EPILOGUE>(v[0], v[1]);
  else
    return v[0] + o.residual;
}
// Sums come scaled by __fmul_rn, which no compiler joins with the addition here, and the sigmoid is gemm_results.cuh's: W8A8 then
// has the same bits from every kernel.
DEVICE void write_output(const Output& o, float (&v)[2], u16* Y) {
#pragma unroll
  for (int half = 0; half < PARTS; half++)
    if (BIAS) v[half] += o.bias[half];
  store_relaxed(Y + o.index, to_bits(ended(o, v)));
}
