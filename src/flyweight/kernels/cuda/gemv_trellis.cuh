// A trellis' codes (trellis.cuh) times few rows of x, on the matrix units: gemv_bits.cuh's groups of whole blocks, two of which are a
// circle. A half block is three products with one x; |value| · 32,512 over 128 inputs stays below 2^31.
//
// A scale that the whole row has (ROW_SCALED) is not multiplied with until the tile ends: it waits in `whole`, which nothing else needs.
typedef float accumulator;
#ifndef TRELLIS_SETS
#define TRELLIS_SETS 1
#endif

struct Inputs {  // where a lane's lie
  const u8* x;
  DEVICE float sized(float sum, int, int) const { return sum; }
};
DEVICE Inputs inputs_at(const LinearShared& sh, int lane) { return {sh.x + min(lane / 4, ROWS * PLANES - 1) * XROW + lane % 4 * 16}; }

// A unit of a tile, whose first block is the slice's `block`-th and whose record is the first of `records`: two blocks, or a row's last.
DEVICE void multiply_unit(const LinearShared& sh, Slice slice, const u8* weights, const Record* records, const Inputs& inputs, int block,
                          float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const int g = lane / 4, t = lane % 4;
  const bool two = BLOCKS % 2 == 0 || block + 1 < slice.blocks;
  BlockWords words[2] = {load_words(weights, lane), load_words(weights + two * BLOCK_BYTES, lane)};
  words[0].word[BITS] = words[1].word[0], words[1].word[BITS] = words[0].word[0];
  int acc[TRELLIS_SETS][COLUMN_TILES][4] = {};
#pragma unroll
  for (int b = 0; b < 2; b++) {
    if (b && !two) break;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      FourTerms four[4];
#pragma unroll
      for (int i = 0; i < 4; i++) four[i] = four_terms(words[b], 4 * half + i);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        const uint2 x = *(const uint2*)(inputs.x + n * 8 * XROW + (block + b) * XBLOCK + half * 8);
#pragma unroll
        for (int i = 0; i < TERMS; i++)
          mma32<false>(acc[half % TRELLIS_SETS][n], make_uint4(four[0].term[i], four[1].term[i], four[2].term[i], four[3].term[i]), x.x, x.y);
      }
    }
  }
  const int group = group_of((slice.first + block) * 64);
  const float scale[2] = {group_scale(records, group, g).scale, group_scale(records, group, g + 8).scale};
  if (ROW_SCALED) whole[0][0][0] = scale[0], whole[0][0][1] = scale[1];
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const XGroup x = sh.groups[block / UNIT_BLOCKS][min(t + 4 * n, ROWS - 1)];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int high = acc[0][n][2 * j], low = acc[0][n][2 * j + 1];
      if (TRELLIS_SETS > 1) high += acc[TRELLIS_SETS - 1][n][2 * j], low += acc[TRELLIS_SETS - 1][n][2 * j + 1];
      total[n][j] += (float)(256 * high + low) * (ROW_SCALED ? x.scale : x.scale * scale[j]);
    }
  }
}
