// x [rows, in] → the order in which vptq_rows.cu's matrix units read it: the norm applied (NORM), or silu(gate) · up of a row that
// has both (GATED), the columns in their stored order, each times its scale. What their biases add to a row of y is summed here too.
//
// packed: [part][stage][8 rows][4 · STAGE_STEPS pieces of 8 columns][row][16 bytes]. Pieces 4 p … 4 p + 3 are step p: of 64 columns
// the even (p even) or odd ones. Piece q of them has those of 16 neighbours from column 0, 32, 16, 48 on, 2 j and 2 j + 8 side by
// side, for j = 0 … 3: how a step of vptq.cu numbers its lanes. Rows that do not exist may hold anything.
// sums: [part][row][slice].
//
// Work split: a row is cut over `slices` CTAs; a thread makes one piece at a time, for each part. CTAs have so few threads and registers
// that they fit beside one of vptq_rows.cu, which fetches its codebook meanwhile: from L2, where these have asked for it.
//
// defines: FP16, NORM, GATED, WARPS, STAGE_STEPS, PARTS, BOOK_BYTES
#include "common.cuh"

constexpr int THREADS = 32 * WARPS;

struct Columns {  // of a piece, in a row: two a word, 8 apart
  u32 pair[4];
  DEVICE Columns(const u16* row, const u16* source, int begin, int in_features) {
    const int first = begin / 16 * 16, odd = begin & 1;
    if (!source && in_features % 8 == 0 && first + 16 <= in_features) {
      const uint4 low = *(const uint4*)(row + first), high = *(const uint4*)(row + first + 8);
      const u32 order = odd ? 0x7632 : 0x5410;
      pair[0] = __byte_perm(low.x, high.x, order), pair[1] = __byte_perm(low.y, high.y, order);
      pair[2] = __byte_perm(low.z, high.z, order), pair[3] = __byte_perm(low.w, high.w, order);
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 two[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = first + odd + 2 * j + 8 * i;
        two[i] = source ? row[source[column]] : column < in_features ? row[column] : 0;
      }
      pair[j] = two[0] | two[1] << 16;
    }
  }
};
DEVICE float silu(float gate) { return __fdividef(gate, 1.f + __expf(-gate)); }

DEVICE float block_sum(float v, float (&of_warps)[WARPS]) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) v += of_warps[w];
  return v;
}
#define PACK(i) const u16 *source##i, const uint4 *pairs##i, const u8 *book##i

extern "C" __global__ void __launch_bounds__(THREADS, 64 / WARPS) vptq_pack(
    PACK(0), PACK(1), PACK(2), const u16* x, const u16* norm, uint4* packed, float* sums, float epsilon, int rows, int in_features,
    int stored, int groups, int slices) {
  __shared__ float shared[PARTS + 1][WARPS];
  const int row = blockIdx.x / slices, slice = blockIdx.x % slices, stages = (stored / 32 + STAGE_STEPS - 1) / STAGE_STEPS;
  launch_dependents();
  for (int line = blockIdx.x * THREADS + threadIdx.x; line < PARTS * (BOOK_BYTES / 128); line += gridDim.x * THREADS) {
    const int part = line / (BOOK_BYTES / 128);
    prefetch_l2((part == 0 ? book0 : part == 1 ? book1 : book2) + line % (BOOK_BYTES / 128) * 128);
  }
  wait_for_inputs();
  const u16* const from = x + (size_t)row * in_features * (1 + GATED);
  float factor = 1;
  if (NORM) {
    float squares = 0;
    if (in_features % 8 == 0) {
#pragma unroll 4
      for (int i = threadIdx.x; i < in_features / 8; i += THREADS) {
        const uint4 q = ((const uint4*)from)[i];
        const u32 pair[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int j = 0; j < 4; j++) squares += low_float(pair[j]) * low_float(pair[j]) + high_float(pair[j]) * high_float(pair[j]);
      }
    } else {
      for (int i = threadIdx.x; i < in_features; i += THREADS) squares += to_float(from[i]) * to_float(from[i]);
    }
    factor = rsqrtf(block_sum(squares, shared[PARTS]) / in_features + epsilon);
  }
  float biases[PARTS] = {};
  for (int unit = slice * THREADS + threadIdx.x; unit < stored / 8; unit += slices * THREADS) {
    const int begin = unit / 2 * 16 + unit % 2;  // its first column: even ones of 16, then odd ones
    const int quarter = unit / 2 % 4, step = unit / 8 * 2 + unit % 2, piece = step % STAGE_STEPS * 4 + (quarter >> 1 | (quarter & 1) << 1);
    float value[8];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const u16* const source = part == 0 ? source0 : part == 1 ? source1 : source2;
      const uint4* const pairs = (part == 0 ? pairs0 : part == 1 ? pairs1 : pairs2) + 2 * unit;
      if (part == 0 || source) {
        const Columns v(from, source, begin, in_features);
#pragma unroll
        for (int j = 0; j < 4; j++) value[2 * j] = low_float(v.pair[j]) * factor, value[2 * j + 1] = high_float(v.pair[j]) * factor;
        if (GATED) {
          const Columns up(from + in_features, source, begin, in_features);
#pragma unroll
          for (int j = 0; j < 4; j++)
            value[2 * j] = silu(value[2 * j]) * low_float(up.pair[j]), value[2 * j + 1] = silu(value[2 * j + 1]) * high_float(up.pair[j]);
        }
        if (NORM) {
          const Columns weight(norm, source, begin, in_features);
#pragma unroll
          for (int j = 0; j < 4; j++) value[2 * j] *= low_float(weight.pair[j]), value[2 * j + 1] *= high_float(weight.pair[j]);
        }
      }
      const uint4 scales = pairs[0], adds = pairs[1];
      const u32 scale[4] = {scales.x, scales.y, scales.z, scales.w}, add[4] = {adds.x, adds.y, adds.z, adds.w};
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        biases[part] += value[2 * j] * low_float(add[j]) + value[2 * j + 1] * high_float(add[j]);
        words[j] = pack2(value[2 * j] * low_float(scale[j]), value[2 * j + 1] * high_float(scale[j]));
      }
      const size_t place = (((size_t)part * stages + step / STAGE_STEPS) * groups + row / 8) * 4 * STAGE_STEPS + piece;
      packed[place * 8 + row % 8] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const float sum = block_sum(biases[part], shared[part]);
    if (threadIdx.x == 0) sums[((size_t)part * rows + row) * slices + slice] = sum;
  }
}
