// Up to eight rows with x in registers and codes of 4 or 8 bits as 16-bit floats; needs gemv.cuh's sizes.
//
//   total[n, r] += s · (sum_k (P + q[n, k]) · x[r, k] − (P + z) · sum_k x[r, k])   over the 128 inputs of a unit
//
// A warp has the same units of the inputs of every tile, so its part of x stays in its registers from beginning to end: it comes there
// straight from memory, as the matrix units want it (eight neighbours of a row are what a lane needs of 32 inputs), without conversion
// and without shared memory, which the ring has instead. A code set into the mantissa of a power of two P is P + q: two weights cost
// an instruction and most of a shift; P, zero point and scale meet sums, not weights. The matrix units add up x (times ones) and
// its squares (times itself) too. Columns of B are the rows of x. One such kernel fits on an SM.
//
// SPREAD: up to four rows have two columns each, that share out the inputs: one has the first halves of blocks, the other the second.
// So no lane is without inputs, and each has half as many. A product of the first halves' weights counts in the first columns alone.
//
//      columns:   | row 0 … 3, inputs 0 … 31 of 64 | row 0 … 3, inputs 32 … 63 |
//
// Limit: latency; with 8 warps the steps from a stage to its sums hide each other in part only (docs/kernels.md).
#ifndef SPREAD
#define SPREAD 1
#endif
#include "codes.cuh"

constexpr int STAGE_TURNS = (STAGE_UNITS + WARPS - 1) / WARPS, TURNS = TILE_STAGES * STAGE_TURNS;  // units of a warp: in a stage, in all
constexpr bool SHRUNK = FP16 && NORM;  // x times the norm's weights may be too large for 16 bits
static_assert(GROUPED && !SPARSE && UNIT_BLOCKS == 2 && ROWS > 1 && ROWS <= 8, "what this is for");
typedef float accumulator;
constexpr int OWN_HALVES = 4 / SPREAD;  // of blocks, that a lane has of a unit
static_assert(SPREAD == 1 || ROWS <= 4, "a row has SPREAD columns");

struct Inputs {
  u32 x[TURNS][OWN_HALVES][2][2];  // of 32 inputs, the two registers that each of two products takes
  float larger[2];        // (SHRUNK) what sums of rows 2 t and 2 t + 1 are to be multiplied with
  DEVICE float sized(float sum, int, int row) const {
    if (SPREAD > 1) sum += __shfl_xor_sync(~0u, sum, 2);
    return SHRUNK ? sum * larger[row] : sum;
  }
};
DEVICE int row_of(int column) { return SPREAD > 1 ? column % 4 : column; }
DEVICE int half_of(int i, int column) { return SPREAD > 1 ? 2 * i + column / 4 : i; }  // of a unit's four, the i-th of a column's

DEVICE int unit_of(int turn, int warp) { return turn / STAGE_TURNS * STAGE_UNITS + turn % STAGE_TURNS * WARPS + warp; }
DEVICE bool unit_exists(int turn, int warp, Slice slice) {
  return FULL || (turn % STAGE_TURNS * WARPS + warp < STAGE_UNITS && 2 * unit_of(turn, warp) < slice.blocks);
}

// The norm: squares of this warp's inputs of each row to shared memory, x times the norm's weights. 16-bit floats with few bits of
// exponent are first brought to about 1 by a power of two of the row's.
DEVICE void weigh_inputs(LinearShared& sh, Inputs& in, Slice slice, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  float products[4][4] = {};  // of row g with rows 2 t and 2 t + 1
#pragma unroll
  for (int i = 0; i < TURNS * OWN_HALVES * 2; i++) {
    const u32(&x)[2] = in.x[i / (OWN_HALVES * 2)][i / 2 % OWN_HALVES][i % 2];
    mma16<FP16>(products[i % 4], x[0], 0, x[1], 0, x[0], x[1]);
  }
  float sums[2];
#pragma unroll
  for (int j = 0; j < 2; j++) sums[j] = products[0][j] + products[1][j] + products[2][j] + products[3][j];
  float squares = g % 2 ? sums[1] : sums[0];  // registers have no index
  if (SPREAD > 1) squares += __shfl_sync(~0u, squares, (lane + 18) % 32);  // of column g + 4, where lane is that of column g
  if (t == g / 2 && g < ROWS) sh.row_stats[g][warp] = make_float2(squares, 0.f);
  u32 shrink = 0;
  if constexpr (SHRUNK) {
    const float mean = __shfl_sync(~0u, squares, 4 * row_of(g) + row_of(g) / 2) / (TURNS * 128);
    const int power = max(-14, min(15, -(((int)(__float_as_uint(mean) >> 23) - 127) >> 1)));
    shrink = (power + 15) * 0x04000400;
#pragma unroll
    for (int i = 0; i < 2; i++) in.larger[i] = __uint_as_float((127 - __shfl_sync(~0u, power, 4 * (2 * t + i))) << 23);
  }
#pragma unroll
  for (int i = 0; i < TURNS * OWN_HALVES; i++) {
    const int turn = i / OWN_HALVES;
    if (!unit_exists(turn, warp, slice)) continue;
    const uint4 weight = ((const uint4*)sh.norm)[unit_of(turn, warp) * 16 + half_of(i % OWN_HALVES, g) * 4 + t];
    const u32 w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32& x = in.x[turn][i % OWN_HALVES][j / 2][j % 2];
      x = mul2(SHRUNK ? mul2(x, shrink) : x, w[j]);
    }
  }
}

// This warp's units of `rows` rows; those up to ROWS are zeros.
DEVICE Inputs load_rows(LinearShared& sh, const Linear& a, Slice slice, int rows, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  if (NORM) {
    for (int i = threadIdx.x; i < (slice.blocks + slice.blocks % 2) * 8; i += THREADS) {
      const int piece = slice.first * 8 + i;
      ((uint4*)sh.norm)[i] = piece < KDIM / 8 ? ((const uint4*)a.norm)[piece] : make_uint4(0, 0, 0, 0);
    }
    named_barrier(1, THREADS);
  }
  wait_for_inputs();
  Inputs in;
#pragma unroll
  for (int i = 0; i < TURNS * OWN_HALVES; i++) {
    const int turn = i / OWN_HALVES, row = row_of(g);
    const int piece = slice.first * 8 + unit_of(turn, warp) * 16 + half_of(i % OWN_HALVES, g) * 4 + t;
    const bool exists = row < rows && piece < KDIM / 8 && unit_exists(turn, warp, slice);
    const uint4 x = exists ? ((const uint4*)(a.x + (size_t)row * KDIM))[piece] : make_uint4(0, 0, 0, 0);
    u32(&to)[2][2] = in.x[turn][i % OWN_HALVES];
    to[0][0] = x.x, to[0][1] = x.y, to[1][0] = x.z, to[1][1] = x.w;
  }
  if (NORM) weigh_inputs(sh, in, slice, warp, lane);
  // additions of a turn wait for each other; many turns, and x of eight rows, leave no registers to do those of others meanwhile
  constexpr int SUMS_AT_ONCE = TURNS * OWN_HALVES <= (SPREAD > 1 ? 10 : 8) ? TURNS : 1;
#pragma unroll
  for (int first = 0; first < TURNS; first += SUMS_AT_ONCE) {
    float sum[SUMS_AT_ONCE][4] = {};
#pragma unroll
    for (int j = 0; j < 2 * OWN_HALVES; j++)
#pragma unroll
      for (int n = 0; n < SUMS_AT_ONCE; n++) {
        u32(&x)[2] = in.x[first + n][j / 2][j % 2];
        mma16<FP16>(sum[n], ONES, 0, ONES, 0, x[0], x[1]);
        const u32 even = __byte_perm(x[0], x[1], 0x5410);  // inputs 0 and 2, 1 and 3 of four: how codes come apart
        x[1] = __byte_perm(x[0], x[1], 0x7632), x[0] = even;
      }
#pragma unroll
    for (int n = 0; n < SUMS_AT_ONCE; n++)
      if (g == 0 && unit_exists(first + n, warp, slice))
        *(float2*)&sh.sums[unit_of(first + n, warp)][2 * t] = make_float2(sum[n][0], sum[n][1]);
  }
  named_barrier(1, THREADS);
  if (NORM && threadIdx.x < ROWS) {  // seen by all after their next meeting
#if PAIRED
    sh.squares[threadIdx.x] = squares_of(sh, threadIdx.x);
#else
    sh.row_most[threadIdx.x] = make_float2(inverse_norm(sh, threadIdx.x, a.epsilon), 0.f);
#endif
  }
  return in;
}

// This warp's units of the stage that begins with block `start` of the slice.
DEVICE void multiply_stage(const LinearShared& sh, Slice slice, const u8* ring, const Inputs& in, int start, float (&)[COLUMN_TILES][2],
                           accumulator (&total)[1][COLUMN_TILES][4], int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < STAGE_TURNS; i++) {
    const int turn = start / STAGE_BLOCKS * STAGE_TURNS + i, unit = i * WARPS + warp, block = start + 2 * unit;
    if (!unit_exists(turn, warp, slice)) break;
    float acc[2][4] = {};  // two chains of additions
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int half = j % 2, step = j / 2 % 2, b = j / 4, shift = FORMAT == INT4 ? 4 * half : 0;
      const uint4 q = ((const uint4*)(ring + (2 * unit + b) * BLOCK_BYTES))[lane + (FORMAT == INT8 ? 32 * half : 0)];
      const u32 first = (step ? q.z : q.x) >> shift, second = (step ? q.w : q.y) >> shift;
      const u32(&x)[2] = in.x[turn][SPREAD > 1 ? b : 2 * b + half][step];
      mma16<FP16>(acc[half], weights_of(first), weights_of(second), weights_of(first >> 8), weights_of(second >> 8), x[0], x[1]);
    }
    const u32* records = (const u32*)(ring + STAGE_BLOCKS * BLOCK_BYTES) + (block * 64 / GROUP - start * 64 / GROUP) * 16;
    const float2 sum = *(const float2*)&sh.sums[block / 2][2 * t];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 record = records[g + j / 2 * 8];
      const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff));
      const float products = SPREAD == 1 ? acc[0][j] + acc[1][j] : t < 2 ? acc[0][j] : acc[1][j];
      total[0][0][j] += scale * (products + offset_of(record) * (j % 2 ? sum.y : sum.x));
    }
  }
}
