// x [rows, K] → the images of it that batch.cu fetches: norm weights multiplied in, converted once for all CTAs (piece.cuh).
//
// packed: for each step of 128 inputs [column][128 bytes] (plain: 256), then of integer weights {sum, scale} [group][row]. A column is
// a row, or one of its two byte planes (2 row + plane). Within a column a lane of the matrix units finds its 16 bytes together;
// odd columns have their halves of 64 bytes exchanged, so that neighbours lie in different banks. Rows that do not exist are zeros.
// row_factor [ROWS]: what finished sums are multiplied with: the norm's factor, the scale of W8A8's codes.
//
// Work split: PARTS CTAs to a row, so that nearly every SM has one; each looks at all of its row and writes its part of it.
// Limit: latency.
//
// defines: FORMAT, SPARSE (0), SYMMETRIC (0), STATIC (0), FP16, KDIM, GROUP, NORM, ROWS, PARTS, WARPS
#include "common.cuh"
#include "linear.cuh"
#include "piece.cuh"

constexpr int STEPS = (KDIM + 127) / 128, PIECES = STEPS * 16;
constexpr int THREADS = WARPS * 32, HELD = (PIECES + THREADS - 1) / THREADS;
constexpr int SCALES = !GROUPED ? 0 : GROUP == 32 ? 4 : 2 / UNIT_BLOCKS;  // of a row, in a step
constexpr int COLUMN_BYTES = FORMAT == PLAIN ? 256 : 128, GROUPS_AT = ROWS * PLANES * COLUMN_BYTES;
constexpr int STEP_BYTES = GROUPS_AT + SCALES * ROWS * 8;
static_assert(HELD <= 16, "a row is held in registers");

extern "C" __global__ void __launch_bounds__(THREADS)
batch_pack(const u16* X, const u16* norm, u8* packed, float* row_factor, const float* static_scale, float epsilon, int rows) {
  __shared__ float2 stats[WARPS];
  const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= ROWS) return stay();
  uint4 weight[NORM ? HELD : 1], x[HELD];
#pragma unroll
  for (int i = 0; i < (NORM ? HELD : 0); i++) {
    const int piece = i * THREADS + threadIdx.x;
    weight[i] = piece < KDIM / 8 ? ((const uint4*)norm)[piece] : make_uint4(0, 0, 0, 0);
  }
  launch_dependents();
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int piece = i * THREADS + threadIdx.x;
    x[i] = row < rows && piece < KDIM / 8 ? ((const uint4*)(X + (size_t)row * KDIM))[piece] : make_uint4(0, 0, 0, 0);
  }
  float squares = 0, most = STATIC ? *static_scale : 0.f, inverse = 1;
  auto inputs = [&](int i, float (&v)[8], float& sum) {
    widen(v, x[i]);
    if (NORM) weigh(v, weight[i], sum);
  };
  if (NORM || (QUANTIZED && !STATIC)) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      float v[8];
      inputs(i, v, squares);
#pragma unroll
      for (int j = 0; j < (QUANTIZED && !STATIC ? 8 : 0); j++) most = largest(most, fabsf(v[j]));
    }
    squares = warp_sum(squares), most = warp_largest(most);
    if (lane == 0) stats[warp] = make_float2(squares, most);
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) squares += stats[i].x, most = largest(most, stats[i].y);
    if (NORM) inverse = rsqrtf(squares / KDIM + epsilon);
  }
  if (part == 0 && threadIdx.x == 0) row_factor[row] = QUANTIZED ? input_scale(most) * (STATIC ? 1.f : inverse) : inverse;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i * PARTS / HELD != part && HELD >= PARTS) continue;  // whole warps: they share scales
    const int piece = i * THREADS + threadIdx.x, step = piece / 16, place = piece % 16;
    float v[8], unused = 0;
    inputs(i, v, unused);
    const Piece p = convert<larger(GROUP == 32 ? 2 : 1)>(v, most, STATIC ? inverse : 1.f, lane);  // sets: see batch.cu
    if (piece >= PIECES || (HELD < PARTS && warp % PARTS != part)) continue;
    u8* image = packed + (size_t)step * STEP_BYTES;
    if constexpr (FORMAT == PLAIN) {
      *(uint4*)(image + row * 256 + ((place * 16) ^ (row % 2 * 64))) = p.words;
    } else {
      const int to = place / 8 * 64 + place % 4 * 16 + place / 4 % 2 * 8, column = row * PLANES;
      *(uint2*)(image + column * 128 + (to ^ (column % 2 * 64))) = make_uint2(p.words.x, p.words.y);
      if constexpr (GROUPED) {
        *(uint2*)(image + (column + 1) * 128 + (to ^ 64)) = make_uint2(p.words.z, p.words.w);
        if (lane % SHARERS == 0) ((XGroup*)(image + GROUPS_AT))[place / SHARERS * ROWS + row] = p.group;
      }
    }
  }
}
