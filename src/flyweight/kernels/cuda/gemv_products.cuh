// A tile's blocks of 16 outputs × 64 inputs times x, on the matrix units; needs gemv.cuh's sizes.
//
// A: outputs g and g + 8 of the tile, inputs 8 t … + 7 of each half block (lane = 4 g + t). B: a column is a row of x (W8A8,
// float8, plain) or one of its two byte planes (2 row + plane). D: lane (g, t) has columns 2 t and 2 t + 1 of outputs g, g + 8.
#if FORMAT == PLAIN || FORMAT == FP8 || FORMAT == FP8_BLOCKS
typedef float accumulator;
#else
typedef int accumulator;
#endif
#if FORMAT == FP8_BLOCKS
typedef float group_sum;  // of the inputs between two scalings
#else
typedef int group_sum;
#endif

// A lane's weights of a block, and its inputs of a column tile: 16 bytes of each half block for each word of A.
constexpr int WIDE = FORMAT == PLAIN ? 2 : 1;
struct Fragment {
  uint4 a[SPARSE ? SETS : 2 * WIDE];
  u32 which;  // of the inputs are kept
};
struct Column {
  uint4 b[FLOATS ? 2 : 1];
};
#if SPARSE
DEVICE Fragment load_fragment(const u8* w, int lane) {
  constexpr u32 flip = SIGNED ? 0x80808080 : 0;
  Fragment f;
  f.which = ((const u32*)(w + BLOCK_BYTES - 128))[lane];
#if FORMAT == INT4
  constexpr int up = SIGNED ? 4 : 0, down = !SIGNED && SETS == 1 ? 4 : 0;  // to where both halves are of one size
  constexpr u32 low = SIGNED ? 0xf0f0f0f0 : 0x0f0f0f0f, high = down ? 0x0f0f0f0f : 0xf0f0f0f0;
  const uint2 q = ((const uint2*)w)[lane];
  f.a[0] = make_uint4(q.x << up & low ^ flip, q.y << up & low ^ flip, q.x >> down & high ^ flip, q.y >> down & high ^ flip);
#else
  const uint4 q = ((const uint4*)w)[lane];
  f.a[0] = make_uint4(q.x ^ flip, q.y ^ flip, q.z ^ flip, q.w ^ flip);
#endif
  if constexpr (SETS == 2) f.a[1] = make_uint4(0, 0, f.a[0].z, f.a[0].w), f.a[0].z = f.a[0].w = 0;
  return f;
}
#else
#if FORMAT == MXFP4
// Eight e2m1 codes, the low and the high halves of four bytes → twice their values and RAISED, in bytes. There is a table for codes
// without and one for codes with a sign; each gives zeros for the others, whose digits are 8 and more.
constexpr int RAISED = 12;
DEVICE void raised_float4(u32 codes, u32& low, u32& high) {
  const u32 other = codes ^ 0x88888888;
  const u32 one = bytes_or_signs(0x0f0e0d0c, 0x18141210, codes) | bytes_or_signs(0x090a0b0c, 0x00040608, other);
  const u32 two = bytes_or_signs(0x0f0e0d0c, 0x18141210, codes >> 16) | bytes_or_signs(0x090a0b0c, 0x00040608, other >> 16);
  low = __byte_perm(one, two, 0x6420), high = __byte_perm(one, two, 0x7531);
}
#endif
constexpr int BLOCK_WORDS = BLOCK_BYTES / 512;  // of 16 bytes, in a lane
DEVICE Fragment fragment_of(const uint4 (&words)[BLOCK_WORDS]) {
  Fragment f;
#if FORMAT == INT4
  const uint4 q = words[0];
  constexpr int shift = SETS == 1 ? 4 : 0;  // one set has no room for sums that are 16 times too large
  constexpr u32 mask = SETS == 1 ? 0x0f0f0f0f : 0xf0f0f0f0;
  f.a[0] = make_uint4(q.x & 0x0f0f0f0f, q.y & 0x0f0f0f0f, q.z & 0x0f0f0f0f, q.w & 0x0f0f0f0f);
  f.a[1] = make_uint4(q.x >> shift & mask, q.y >> shift & mask, q.z >> shift & mask, q.w >> shift & mask);
#elif FORMAT == MXFP4
  const uint4 q = words[0];
  raised_float4(q.x, f.a[0].x, f.a[1].x), raised_float4(q.y, f.a[0].y, f.a[1].y);
  raised_float4(q.z, f.a[0].z, f.a[1].z), raised_float4(q.w, f.a[0].w, f.a[1].w);
#else
#pragma unroll
  for (int i = 0; i < 2 * WIDE; i++) f.a[i] = words[i];
#endif
  return f;
}
DEVICE Fragment load_fragment(const u8* w, int lane) {
  uint4 words[BLOCK_WORDS];
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; i++) words[i] = ((const uint4*)w)[32 * i + lane];
  return fragment_of(words);
}
#endif
// `flip`: where the second half of a plain block lies (64, or -64 where the halves are exchanged).
DEVICE Column load_column(const u8* xs, int flip = 64) {
  Column c;
#pragma unroll
  for (int i = 0; i < (FLOATS ? 2 : 1); i++) c.b[i] = *(const uint4*)(xs + i * flip);
  return c;
}
DEVICE u32 first_two(u32 codes) { return widen_float8(__byte_perm(codes, 0, 0x4140)); }  // of four float8
DEVICE u32 last_two(u32 codes) { return widen_float8(__byte_perm(codes, 0, 0x4342)); }
// The halves of a block have accumulators of their own where there are two SETS.
template <typename Accumulator>
DEVICE void multiply(const Fragment& f, const Column& c, Accumulator (&acc)[SETS + SUMS][COLUMN_TILES][4], int n) {
#if SPARSE
#pragma unroll
  for (int i = 0; i < SETS; i++) mma64_sparse<GROUPED && !SIGNED>(acc[i][n], f.a[i], f.which, c.b[0]);
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const u32 first = i == 0 ? 0x01010101 : 0, second = i == SUMS - 1 ? 0x01010101 : 0;
    mma64_sparse<true>(acc[SETS + i][n], make_uint4(first, first, second, second), f.which, c.b[0]);
  }
#elif FORMAT == PLAIN
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 a0 = f.a[2 * h], a1 = f.a[2 * h + 1], b = c.b[h];
    mma16<FP16>(acc[h % SETS][n], a0.x, a0.y, a0.z, a0.w, b.x, b.y);
    mma16<FP16>(acc[h % SETS][n], a1.x, a1.y, a1.z, a1.w, b.z, b.w);
  }
#elif FORMAT == FP8_BLOCKS
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 a = f.a[h], b = c.b[h];
    mma16<FP16>(acc[h % SETS][n], first_two(a.x), first_two(a.y), last_two(a.x), last_two(a.y), b.x, b.y);
    mma16<FP16>(acc[h % SETS][n], first_two(a.z), first_two(a.w), last_two(a.z), last_two(a.w), b.z, b.w);
  }
#elif FORMAT == FP8
  mma32_float8(acc[0][n], f.a[0], c.b[0].x, c.b[0].y);
  mma32_float8(acc[SETS - 1][n], f.a[1], c.b[0].z, c.b[0].w);
#else
  mma32<FORMAT != W8A8 && !SIGNED>(acc[0][n], f.a[0], c.b[0].x, c.b[0].y);
  mma32<FORMAT != W8A8 && !SIGNED>(acc[SETS - 1][n], f.a[1], c.b[0].z, c.b[0].w);
#endif
}

// One 64-input block of one tile, times x.
template <typename Accumulator>
DEVICE void multiply_block(const Fragment& f, const u8* xs, Accumulator (&acc)[SETS + SUMS][COLUMN_TILES][4]) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) multiply(f, load_column(xs + n * 8 * XROW), acc, n);
}

// FP8_BLOCKS: the sums of a unit of inputs, times the scales of the tile's first and last 8 outputs.
template <typename Accumulator>
DEVICE void add_scaled(Accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], const Accumulator (&acc)[SETS + SUMS][COLUMN_TILES][4],
                       float2 scales) {
#pragma unroll
  for (int i = 0; i < SETS * COLUMN_TILES * 4; i++) {
    const int set = i % SETS, n = i / SETS / 4, j = i / SETS % 4;
    whole[set][n][j] += acc[set][n][j] * (j / 2 ? scales.y : scales.x);
  }
}
struct LaneRecords {  // of outputs g and g + 8, in registers
  Record of[2];
};
DEVICE Record record_of(const Record* records, int g, int j) { return records[g + 8 * j]; }
DEVICE Record record_of(const LaneRecords& records, int, int j) { return records.of[j]; }
DEVICE float scale_of(u32 record) { return float_of<SCALE_FP16>((u16)(record & 0xffff)); }
DEVICE float scale_of(u8 exponent) { return __uint_as_float((u32)max(exponent - 1, 0) << 23); }  // of codes that are twice as large
#if FORMAT != FP8_BLOCKS
// total[row g, g + 8] of token t (+ 4 a column tile) += scale · x scale · (acc − zero · sum of x).
// A record is the scale (low half) and the zero point (high half). `kept` (SPARSE): the sum of x where weights are.
template <typename Records>
DEVICE void add_group(float (&total)[COLUMN_TILES][2], const int (&value)[COLUMN_TILES][2], const int (&kept)[COLUMN_TILES][2],
                      const Records& records, const XGroup* groups, int g, int t) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const XGroup x = groups[min(t + 4 * n, ROWS - 1)];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const Record record = record_of(records, g, j);
      const float scale = scale_of(record) * x.scale;
#if FORMAT == MXFP4
      const int taken = RAISED * x.sum;
#else
      const int taken = SIGNED ? 0 : (int)(record >> 16) * (SPARSE ? kept[n][j] : x.sum);
#endif
      total[n][j] += (float)(value[n][j] - taken) * scale;
    }
  }
}

// The sums of a unit, scaled: both planes of x, and then (int4 in two sets) both halves of the weights, at their true size. Groups of
// 32 inputs are the halves of a block, each with a record and a scale of x; `second`: there is a second one.
template <typename Records>
DEVICE void add_unit(float (&total)[COLUMN_TILES][2], const int (&acc)[SETS + SUMS][COLUMN_TILES][4], const Records& records,
                     const XGroup* groups, bool second, int g, int t) {
  int value[SETS][COLUMN_TILES][2], kept[2][COLUMN_TILES][2] = {};
#pragma unroll
  for (int h = 0; h < SUMS; h++)
#pragma unroll
    for (int i = 0; i < COLUMN_TILES * 2; i++) {
      const int* planes = acc[SETS + h][i / 2] + i % 2 * 2;
      kept[h][i / 2][i % 2] = (256 * planes[0] + planes[1]) * larger(SETS);
    }
#pragma unroll
  for (int i = 0; i < COLUMN_TILES * 2 * SETS; i++) {
    const int h = i % SETS, j = i / SETS % 2, c = i / SETS / 2;
    value[h][c][j] = (256 * acc[h][c][2 * j] + acc[h][c][2 * j + 1]) * (h < SETS - 1 && !SIGNED ? larger(SETS) : 1);
  }
  if constexpr (GROUP == 32) {
    add_group(total, value[0], kept[0], records, groups, g, t);
    if (second) add_group(total, value[1], kept[1], records + 16, groups + ROWS, g, t);
  } else {
#pragma unroll
    for (int i = 0; i < COLUMN_TILES * 2 * (SETS - 1); i++) value[0][i / 2][i % 2] += value[SETS - 1][i / 2][i % 2];
    add_group(total, value[0], kept[0], records, groups, g, t);
  }
}
#endif
