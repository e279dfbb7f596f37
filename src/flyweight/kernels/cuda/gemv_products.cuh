// A tile's blocks of 16 outputs × 64 inputs times x, on the matrix units; needs gemv.cuh's sizes.
//
// A: outputs g and g + 8 of the tile, inputs 8 t … + 7 of each half block (lane = 4 g + t). B: a column is a row of x (W8A8,
// float8, plain) or one of its two byte planes (2 row + plane). D: lane (g, t) has columns 2 t and 2 t + 1 of outputs g, g + 8.
#if FORMAT == PLAIN || FORMAT == FP8
typedef float accumulator;
#else
typedef int accumulator;
#endif

// One 64-input block of one tile, times x; the halves of the block have accumulators of their own where there are two SETS.
template <typename Accumulator>
DEVICE void multiply_block(const u8* w, const u8* xs, Accumulator (&acc)[SETS + SUMS][COLUMN_TILES][4], int lane) {
  const uint4* words = (const uint4*)w + lane;
#if FORMAT == PLAIN
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 a0 = words[h * 64], a1 = words[h * 64 + 32];
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      const uint4 b = *(const uint4*)(xs + n * 8 * XROW + h * 64);
      mma16<FP16>(acc[h % SETS][n], a0.x, a0.y, a0.z, a0.w, b.x, b.y);
      mma16<FP16>(acc[h % SETS][n], a1.x, a1.y, a1.z, a1.w, b.z, b.w);
    }
  }
#elif SPARSE
  constexpr bool halves = FORMAT == INT4 || (GROUPED && GROUP == 32);  // have accumulators of their own
  const u32 which = ((const u32*)(w + BLOCK_BYTES - 128))[lane];
  uint4 a[2];
#if FORMAT == INT4
  const uint2 q = ((const uint2*)w)[lane];
  a[0] = make_uint4(q.x & 0x0f0f0f0f, q.y & 0x0f0f0f0f, 0, 0);
  a[1] = make_uint4(0, 0, q.x & 0xf0f0f0f0, q.y & 0xf0f0f0f0);
#else
  const uint4 q = words[0];
  a[0] = halves ? make_uint4(q.x, q.y, 0, 0) : q;
  a[1] = make_uint4(0, 0, q.z, q.w);
#endif
  constexpr u32 one = 0x01010101;
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const uint4 b = *(const uint4*)(xs + n * 8 * XROW);
    mma64_sparse<GROUPED>(acc[0][n], a[0], which, b);
    if (halves) mma64_sparse<GROUPED>(acc[1][n], a[1], which, b);
    if constexpr (SUMS == 1) mma64_sparse<true>(acc[2][n], make_uint4(one, one, one, one), which, b);
    if constexpr (SUMS == 2) {
      mma64_sparse<true>(acc[2][n], make_uint4(one, one, 0, 0), which, b);
      mma64_sparse<true>(acc[3][n], make_uint4(0, 0, one, one), which, b);
    }
  }
#else
  uint4 a[2];
#if FORMAT == INT4
  const uint4 q = words[0];
  constexpr int shift = SETS == 1 ? 4 : 0;  // one set has no room for sums that are 16 times too large
  constexpr u32 mask = SETS == 1 ? 0x0f0f0f0f : 0xf0f0f0f0;
  a[0] = make_uint4(q.x & 0x0f0f0f0f, q.y & 0x0f0f0f0f, q.z & 0x0f0f0f0f, q.w & 0x0f0f0f0f);
  a[1] = make_uint4(q.x >> shift & mask, q.y >> shift & mask, q.z >> shift & mask, q.w >> shift & mask);
#else
  a[0] = words[0], a[1] = words[32];
#endif
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const uint4 b = *(const uint4*)(xs + n * 8 * XROW);
#if FORMAT == FP8
    mma32_float8(acc[0][n], a[0], b.x, b.y);
    mma32_float8(acc[SETS - 1][n], a[1], b.z, b.w);
#else
    mma32<FORMAT != W8A8>(acc[0][n], a[0], b.x, b.y);
    mma32<FORMAT != W8A8>(acc[SETS - 1][n], a[1], b.z, b.w);
#endif
  }
#endif
}

// total[row g, g + 8] of token t (+ 4 a column tile) += scale · x scale · (acc − zero · sum of x).
// A record is the scale (low half) and the zero point (high half). `kept` (SPARSE): the sum of x where weights are.
DEVICE void add_group(float (&total)[COLUMN_TILES][2], const int (&value)[COLUMN_TILES][2], const int (&kept)[COLUMN_TILES][2],
                      const u32* records, const XGroup* groups, int g, int t) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const XGroup x = groups[min(t + 4 * n, ROWS - 1)];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 record = records[g + 8 * j];
      const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff)) * x.scale;
      total[n][j] += (float)(value[n][j] - (int)(record >> 16) * (SPARSE ? kept[n][j] : x.sum)) * scale;
    }
  }
}

// One stage of one tile, this warp's units of it: into `whole`, or scaled group by group into `total`.
// `turn`: which of the stage's units this warp begins with; it moves on from stage to stage where units and warps do not match.
DEVICE void multiply_stage(const LinearShared& sh, Slice slice, const u8* ring, const u8* xs, int start,
                           float (&total)[COLUMN_TILES][2], accumulator (&whole)[SETS + SUMS][COLUMN_TILES][4], int turn, int lane) {
  const int g = lane / 4, t = lane % 4, blocks = FULL ? STAGE_BLOCKS : min(STAGE_BLOCKS, slice.blocks - start);
#pragma unroll
  for (int unit = turn * UNIT_BLOCKS, n = 0; n < (STAGE_BLOCKS + UNIT_BLOCKS * WARPS - 1) / (UNIT_BLOCKS * WARPS);
       n++, unit += WARPS * UNIT_BLOCKS) {
    if (!FULL && unit >= blocks) break;
    const int block = start + unit;
    if constexpr (!GROUPED) {
      multiply_block(ring + unit * BLOCK_BYTES, xs + block * XBLOCK, whole, lane);
    } else {
      int acc[SETS + SUMS][COLUMN_TILES][4] = {};
#pragma unroll
      for (int b = 0; b < UNIT_BLOCKS; b++)
        if (UNIT_BLOCKS == 1 || BLOCKS % UNIT_BLOCKS == 0 || unit + b < blocks)
          multiply_block(ring + (unit + b) * BLOCK_BYTES, xs + (block + b) * XBLOCK, acc, lane);
      const u32* records = (const u32*)(ring + STAGE_BLOCKS * BLOCK_BYTES) + (block * 64 / GROUP - start * 64 / GROUP) * 16;
      int value[SETS][COLUMN_TILES][2], kept[2][COLUMN_TILES][2] = {};
#pragma unroll
      for (int h = 0; h < SUMS; h++)
#pragma unroll
        for (int i = 0; i < COLUMN_TILES * 2; i++) {
          const int* planes = acc[SETS + h][i / 2] + i % 2 * 2;
          kept[h][i / 2][i % 2] = (256 * planes[0] + planes[1]) * (FORMAT == INT4 ? 16 : 1);
        }
#pragma unroll
      for (int i = 0; i < COLUMN_TILES * 2 * SETS; i++) {  // the planes of x, and then (int4) of the weights, at their true size
        const int h = i % SETS, j = i / SETS % 2, c = i / SETS / 2;
        value[h][c][j] = (256 * acc[h][c][2 * j] + acc[h][c][2 * j + 1]) * (FORMAT == INT4 && h < SETS - 1 ? 16 : 1);
      }
      if constexpr (GROUP == 32) {
        add_group(total, value[0], kept[0], records, sh.groups[2 * block], g, t);
        if ((slice.first + block) * 2 + 1 < GROUPS)
          add_group(total, value[1], kept[1], records + 16, sh.groups[2 * block + 1], g, t);
      } else {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES * 2 * (SETS - 1); i++) value[0][i / 2][i % 2] += value[SETS - 1][i / 2][i % 2];
        add_group(total, value[0], kept[0], records, sh.groups[block / UNIT_BLOCKS], g, t);
      }
    }
  }
}
