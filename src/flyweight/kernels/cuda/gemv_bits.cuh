// Codes in planes (bits.cuh) times few rows of x, on the matrix units: gemv_products.cuh for groups as small as 16 inputs.
//
//   total[n, r] += scale · s_x · sum_k code[n, k] · X[r, k] − least · sum_k x[r, k]      over the 16 inputs of a lane's group
//
// x are 16-bit integers X with a scale s_x for 64 or 128 inputs, in two byte planes. Columns of B are not rows of x, but quarters of the
// block's inputs: column 2 q + plane has zeros but for inputs 16 q … + 15, so that D has the four sums of a block side by side, and lane
// (g, t) scales those of quarter t. Every group of 16, 32 or more inputs is whole quarters; no sum is scaled twice. A second row of x
// is a second product.
struct Inputs {
  const u8* x;        // where a lane's lie, of the half block that its column has
  u32 first, second;  // all ones where that column has this lane's inputs of a half
  DEVICE float sized(float sum, int, int) const { return sum; }
};
DEVICE Inputs inputs_at(const LinearShared& sh, int lane) {
  const int g = lane / 4, t = lane % 4;
  const bool own = t / 2 == g / 2 % 2;
  return {sh.x + g % 2 * XROW + t * 16 + g / 4 * 8, own && g < 4 ? ~0u : 0, own && g >= 4 ? ~0u : 0};
}
typedef float accumulator;

// A unit of a tile, whose first block is the slice's `block`-th and whose record is the first of `records`: a block, or two in a group.
DEVICE void multiply_unit(const LinearShared& sh, Slice slice, const u8* weights, const Record* records, const Inputs& inputs, int block,
                          float (&total)[COLUMN_TILES][2], accumulator (&)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const int g = lane / 4, t = lane % 4;
  int acc[ROWS][4] = {};
  float sum[ROWS] = {};
#pragma unroll
  for (int b = 0; b < UNIT_BLOCKS; b++) {
    if (UNIT_BLOCKS > 1 && BLOCKS % UNIT_BLOCKS && block + b >= slice.blocks) break;
    const BlockCodes c = load_codes(weights + b * BLOCK_BYTES, lane);
    const uint4 a0 = make_uint4(c.word[0][0], c.word[0][1], c.word[0][2], c.word[0][3]);
    const uint4 a1 = make_uint4(c.word[1][0], c.word[1][1], c.word[1][2], c.word[1][3]);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      const uint2 x = *(const uint2*)(inputs.x + row * PLANES * XROW + (block + b) * XBLOCK);
      mma32<!SIGNED_CODES>(acc[row], a0, x.x & inputs.first, x.y & inputs.first);
      mma32<!SIGNED_CODES>(acc[row], a1, x.x & inputs.second, x.y & inputs.second);
      sum[row] += sh.groups[4 * (block + b) + t][row].sum;
    }
  }
  int input = 16 * t;  // the first of this lane's group, within the block
  if (KDIM % 64 && GROUP < 64) input = min(input, KDIM - SUBGROUP - (slice.first + block) * 64);  // beyond the last x is 0
  const u8* record = records + record_of(input) * RECORD_LENGTH;
  const int group = group_of((slice.first + block) * 64 + input);
  const GroupScale scale[2] = {group_scale(record, group, g), group_scale(record, group, g + 8)};
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    const float x_scale = sh.groups[4 * block + t][row].scale;
#pragma unroll
    for (int j = 0; j < 2; j++)
      total[row][j] += (float)(256 * acc[row][2 * j] + acc[row][2 * j + 1]) * (scale[j].scale * x_scale) - scale[j].least * sum[row];
  }
}
