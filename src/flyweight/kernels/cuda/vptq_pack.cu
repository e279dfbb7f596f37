// x [rows, in] → the order in which vptq_rows.cu's matrix units read it: the norm applied (NORM), or silu(gate) · up of a row that
// has both (GATED), the columns in their stored order, each times its scale. What their biases add to a row of y is summed here too.
//
// packed: [part][stage][8 rows][4 · STAGE_STEPS pieces of 8 columns][row][16 bytes]. Pieces 4 p … 4 p + 3 are step p: of 64 columns
// the even (p even) or odd ones. Piece q of them has those of 16 neighbours from column 0, 32, 16, 48 on, 2 j and 2 j + 8 side by
// side, for j = 0 … 3: how a step of vptq.cu numbers its lanes. Rows that do not exist may hold anything.
// sums: [part][row][slice].
//
// Work split: a row is cut over `slices` CTAs; a thread makes one piece at a time, for each part. What depends on no other kernel (scales,
// norm weights) is on its way before the wait, and the codebooks are asked for in L2. CTAs have so few threads and registers, and are
// so few, that all fit beside those of the vptq_rows.cu before: CTAs that came when it ends would gather on the SMs that are free
// first, and keep the next product and its codebook off them. So threads have several pieces where there are many rows.
//
// defines: FP16, NORM, GATED, WARPS, STAGE_STEPS, PARTS, BOOK_BYTES
#include "common.cuh"

constexpr int THREADS = 32 * WARPS;

struct Columns {  // of a piece, in a row: two a word, 8 apart
  u32 pair[4];
  DEVICE Columns() {}
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

struct Piece {  // of one part: scales and biases of its columns
  uint4 scales, biases;
  DEVICE void load(const uint4* pairs, int unit) { scales = pairs[2 * unit], biases = pairs[2 * unit + 1]; }
};
#define PACK(i) const u16 *source##i, const uint4 *pairs##i, const u8 *book##i

extern "C" __global__ void __launch_bounds__(THREADS, 40 / WARPS) vptq_pack(
    PACK(0), PACK(1), PACK(2), const u16* x, const u16* norm, uint4* packed, float* sums, float epsilon, int rows, int in_features,
    int stored, int groups, int slices) {
  __shared__ float of_warps[PARTS + 1][WARPS];
  const u16* const sources[3] = {source0, source1, source2};
  const uint4* const pairs[3] = {pairs0, pairs1, pairs2};
  const u8* const books[3] = {book0, book1, book2};
  const int row = blockIdx.x / slices, slice = blockIdx.x % slices, stages = (stored / 32 + STAGE_STEPS - 1) / STAGE_STEPS;
  const int first = slice * THREADS + threadIdx.x, units = stored / 8;
  const auto column_of = [](int unit) { return unit / 2 * 16 + unit % 2; };  // the first of a piece: even ones of 16, then odd ones
  launch_dependents();
  Piece pieces[PARTS];
  Columns weight;
  if (first < units) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) pieces[part].load(pairs[part], first);
    if (NORM) weight = Columns(norm, sources[0], column_of(first), in_features);
  }
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    for (int line = blockIdx.x * THREADS + threadIdx.x; line < BOOK_BYTES / 128; line += gridDim.x * THREADS)
      prefetch_l2(books[part] + line * 128);
  const int stride = slices * THREADS;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    for (int unit = first + stride; unit < units; unit += stride) prefetch_l2(pairs[part] + 2 * unit);
  wait_for_inputs();
  const u16* const from = x + (size_t)row * in_features * (1 + GATED);
  Columns own, up;
  const auto load = [&](int part, int unit) {
    own = Columns(from, sources[part], column_of(unit), in_features);
    if (GATED) up = Columns(from + in_features, sources[part], column_of(unit), in_features);
  };
  if (first < units) load(0, first);
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
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) of_warps[PARTS][threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) squares += of_warps[PARTS][w];
    factor = rsqrtf(squares / in_features + epsilon);
  }
  float biases[PARTS] = {};
  for (int unit = first; unit < units; unit += stride) {
    const int quarter = unit / 2 % 4, step = unit / 8 * 2 + unit % 2, piece = step % STAGE_STEPS * 4 + (quarter >> 1 | (quarter & 1) << 1);
    float value[8];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      if (part > 0 ? sources[part] != nullptr : unit != first) {
        if (PARTS > 1) load(part, unit);
        if (NORM) weight = Columns(norm, sources[part], column_of(unit), in_features);
      }
      if (part == 0 || sources[part])
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const auto half = [&](const Columns& c) { return i % 2 ? high_float(c.pair[i / 2]) : low_float(c.pair[i / 2]); };
          value[i] = half(own) * factor;
          if (GATED) value[i] = silu(value[i]) * half(up);
          if (NORM) value[i] *= half(weight);
        }
      const bool more = unit + stride < units;
      if (PARTS == 1 && more) load(0, unit + stride);  // on its way while this one is packed
      const uint4 s = pieces[part].scales, b = pieces[part].biases;
      const u32 scale[4] = {s.x, s.y, s.z, s.w}, add[4] = {b.x, b.y, b.z, b.w};
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        biases[part] += value[2 * j] * low_float(add[j]) + value[2 * j + 1] * high_float(add[j]);
        words[j] = pack2(value[2 * j] * low_float(scale[j]), value[2 * j + 1] * high_float(scale[j]));
      }
      const size_t place = (((size_t)part * stages + step / STAGE_STEPS) * groups + row / 8) * 4 * STAGE_STEPS + piece;
      packed[place * 8 + row % 8] = make_uint4(words[0], words[1], words[2], words[3]);
      if (more) pieces[part].load(pairs[part], unit + stride);
    }
  }
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const float sum = warp_sum(biases[part]);
    if (threadIdx.x % 32 == 0) of_warps[part][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x < PARTS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += of_warps[threadIdx.x][w];
    sums[((size_t)threadIdx.x * rows + row) * slices + slice] = sum;
  }
}
