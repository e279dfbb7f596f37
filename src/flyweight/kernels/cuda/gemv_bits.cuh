// Codes in planes (bits.cuh) times few rows of x, on the matrix units: gemv_products.cuh for records of every kind.
//
//   total[n, r] += scale · s_x · sum_k code[n, k] · X[r, k] − least · sum_k x[r, k]      over the inputs of a group
//
// x are 16-bit integers X with a scale s_x for 64 or 128 inputs, in two byte planes. Codes may go in a power of two too large, the same
// for all of a row and half block (`raised_by`), which its sums are then divided by.
//
// Groups of whole blocks (WHOLE_BLOCKS): columns of B are the planes of rows of x, as gemv_products.cuh has them.
//
// Smaller ones: columns of B are not rows of x, but quarters of the block's inputs: column 2 q + plane has zeros but for inputs
// 16 q … + 15, so that D has the four sums of a block side by side, and lane (g, t) scales those of quarter t. Every group of 16 or 32
// inputs is whole quarters; no sum is scaled twice. A second row of x is a second product.
typedef float accumulator;

DEVICE float scaled(int value, float by, GroupScale s, float sum) {
  if (WHOLE_ZEROS) return s.scale * ((float)value * by - s.zero * sum);
  return (float)value * (s.scale * by) - s.least * sum;
}
#if WHOLE_BLOCKS
struct Inputs {  // where a lane's lie
  const u8* x;
  DEVICE float sized(float sum, int, int) const { return sum; }
};
DEVICE Inputs inputs_at(const LinearShared& sh, int lane) { return {sh.x + min(lane / 4, ROWS * PLANES - 1) * XROW + lane % 4 * 16}; }

// A unit of a tile, whose first block is the slice's `block`-th and whose record is the first of `records`: a block, or two in a group.
DEVICE void multiply_unit(const LinearShared& sh, Slice slice, const u8* weights, const Record* records, const Inputs& inputs, int block,
                          float (&total)[COLUMN_TILES][2], accumulator (&)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const int g = lane / 4, t = lane % 4;
  int acc[2][COLUMN_TILES][4] = {};  // of the halves of blocks
#pragma unroll
  for (int b = 0; b < UNIT_BLOCKS; b++) {
    if (UNIT_BLOCKS > 1 && BLOCKS % UNIT_BLOCKS && block + b >= slice.blocks) break;
    const BlockCodes c = raised_codes(weights + b * BLOCK_BYTES, lane);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const uint4 x = *(const uint4*)(inputs.x + n * 8 * XROW + (block + b) * XBLOCK);
      mma32<!SIGNED_CODES>(acc[0][n], make_uint4(c.word[0][0], c.word[0][1], c.word[0][2], c.word[0][3]), x.x, x.y);
      mma32<!SIGNED_CODES>(acc[1][n], make_uint4(c.word[1][0], c.word[1][1], c.word[1][2], c.word[1][3]), x.z, x.w);
    }
  }
  const int group = group_of((slice.first + block) * 64);
  const GroupScale scale[2] = {group_scale(records, group, g), group_scale(records, group, g + 8)};
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const XGroup x = sh.groups[block / UNIT_BLOCKS][min(t + 4 * n, ROWS - 1)];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      constexpr int lift[2] = {raised_by(1, 0) / raised_by(0, 0), raised_by(1, 1) / raised_by(0, 1)};
      constexpr float lower[2] = {1.f / raised_by(1, 0), 1.f / raised_by(1, 1)};
      const int high = acc[0][n][2 * j] * lift[j] + acc[1][n][2 * j], low = acc[0][n][2 * j + 1] * lift[j] + acc[1][n][2 * j + 1];
      total[n][j] += scaled(256 * high + low, x.scale * lower[j], scale[j], x.sum);
    }
  }
}
#else
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

// A unit of a tile, whose first block is the slice's `block`-th and whose record is the first of `records`: a block, or two in a group.
DEVICE void multiply_unit(const LinearShared& sh, Slice slice, const u8* weights, const Record* records, const Inputs& inputs, int block,
                          float (&total)[COLUMN_TILES][2], accumulator (&)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const int g = lane / 4, t = lane % 4;
  int acc[ROWS][4] = {};
  float sum[ROWS] = {};
#pragma unroll
  for (int b = 0; b < UNIT_BLOCKS; b++) {
    if (UNIT_BLOCKS > 1 && BLOCKS % UNIT_BLOCKS && block + b >= slice.blocks) break;
    const BlockCodes c = raised_codes(weights + b * BLOCK_BYTES, lane);
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
    for (int j = 0; j < 2; j++) {
      const float lower = t < 2 ? 1.f / raised_by(0, j) : 1.f / raised_by(1, j);
      total[row][j] += scaled(256 * acc[row][2 * j] + acc[row][2 * j + 1], x_scale * lower, scale[j], sum[row]);
    }
  }
}
#endif
