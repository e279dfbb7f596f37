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
//
// Smaller ones and more than two rows (AS_HALVES): codes become 16-bit floats less their middle, exactly, and columns of B are rows of x
// (gemv_inputs.cuh), so that all rows take the products of one. Those of 32 inputs, a half block, are scaled once; where groups have
// 16, a half block is multiplied twice, with zeros for the inputs of the other group.
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
#elif AS_HALVES
struct Inputs {  // where a lane's lie, of row g
  const u8* x;
  DEVICE float sized(float sum, int, int) const { return sum; }
};
DEVICE Inputs inputs_at(const LinearShared& sh, int lane) { return {sh.x + min(lane / 4, ROWS - 1) * XROW + lane % 4 * 16}; }

constexpr bool WHOLE_MIDDLES = WHOLE_ZEROS && RECORD_KIND != WITH_ZEROS;  // no group has a zero point of its own
constexpr int PARTS_OF_HALF = SUBGROUP == 16 ? 2 : 1;
// A code in the mantissa of 1,024 is 1,024 too large, and what is taken from it leaves the code less its middle; codes of a table are signed.
constexpr u32 TAKEN = 0xe400e400 + 0x00010001 * ((SIGNED_CODES ? 128 : 0) + (WHOLE_MIDDLES ? MIDDLE : 0));
DEVICE u32 two_codes(u32 codes) { return add_halves((codes & 0x00ff00ff) | 0x64006400, TAKEN); }

// A half of a block: two products of 16 inputs, of which `kept` has ones for those that count.
DEVICE void multiply_half(const u32 (&codes)[4], uint4 x, u32 kept, float (&acc)[4]) {
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const u32 first = codes[2 * step] ^ (SIGNED_CODES ? 0x80808080 : 0), second = codes[2 * step + 1] ^ (SIGNED_CODES ? 0x80808080 : 0);
    mma16<true>(acc, two_codes(first), two_codes(second), two_codes(first >> 8), two_codes(second >> 8), (step ? x.z : x.x) & kept,
                (step ? x.w : x.y) & kept);
  }
}

// A unit of a tile, a block: the slice's `block`-th, whose record is the first of `records`.
DEVICE void multiply_unit(const LinearShared& sh, Slice slice, const u8* weights, const Record* records, const Inputs& inputs, int block,
                          float (&)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const int g = lane / 4, t = lane % 4;
  const BlockCodes c = load_codes(weights, lane);
  float total[COLUMN_TILES][4] = {};
#pragma unroll
  for (int part = 0; part < 2 * PARTS_OF_HALF; part++) {  // of the block's inputs, with a scale each
    const int half = part / PARTS_OF_HALF;
    int input = half * 32 + part % PARTS_OF_HALF * 16;
    if (KDIM % 64 && GROUP < 64) input = min(input, KDIM - SUBGROUP - (slice.first + block) * 64);  // beyond the last x is 0
    const u8* record = records + record_of(input) * RECORD_LENGTH;
    const int group = group_of((slice.first + block) * 64 + input);
    const GroupScale scale[2] = {group_scale(record, group, g), group_scale(record, group, g + 8)};
    const u32 kept = PARTS_OF_HALF == 1 || t / 2 == part % 2 ? ~0u : 0;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const u8* x = inputs.x + n * 8 * XROW + block * XBLOCK + half * 64;
      float acc[4] = {};
      multiply_half(c.word[half], *(const uint4*)x, kept, acc);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        total[n][j] += scale[j / 2].scale * acc[j];
        if (WHOLE_MIDDLES) continue;
        const int row = min(8 * n + 2 * t + j % 2, ROWS - 1);
        float sum = sh.groups[4 * block + (PARTS_OF_HALF == 1 ? 2 * half : part)][row].sum;
        if (PARTS_OF_HALF == 1) sum += sh.groups[4 * block + 2 * half + 1][row].sum;
        total[n][j] -= scale[j / 2].least * sum;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < COLUMN_TILES * 4; i++)
    whole[0][i / 4][i % 4] += total[i / 4][i % 4] * sh.groups[4 * block][min(i / 4 * 8 + 2 * t + i % 2, ROWS - 1)].scale;
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
