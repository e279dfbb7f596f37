// x [rows, in] → the order in which vptq_rows.cu's matrix units read it: the norm applied (NORM), or act(gate) · up of a row that
// has both (GATED: which), the columns in their stored order, each times its scale. What their biases add to a row of y is summed here too.
//
// packed: vectors.cuh.
// sums: [part][row][slice], then those of the squares, for the norm.
//
// Work split: a row is cut over `slices` CTAs; a thread makes one piece at a time, for each part, or (APART) every part has CTAs of
// its own: warps are so few on a scheduler that each goes on at the pace of its instructions' latency. What depends on no other
// kernel (scales, norm weights) is on its way before the wait, and the codebooks are asked for in L2. CTAs have so few threads and
// registers that they fit beside one of vptq_rows.cu.
// Limit: latency, and instructions where CTAs share an SM.
//
// defines: FP16, NORM, GATED, WARPS, STAGE_STEPS, PARTS, APART, BOOK_BYTES, WHOLE (columns are whole 256, in their own order)
#include "common.cuh"
#include "activation.cuh"
#include "vectors.cuh"

constexpr int THREADS = 32 * WARPS, HERE = APART ? 1 : PARTS;  // parts of a CTA
constexpr int LATE = NORM && WHOLE && !FP16;  // the norm's factor is left to the products; half precision has no range for that

// Eight neighbouring columns of a row (WHOLE), or those of a piece: two a word, 8 apart.
DEVICE uint4 load_columns(const u16* row, const u16* source, int unit, int in_features) {
  if (WHOLE) return ((const uint4*)row)[unit];
  u32 pair[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 two[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = unit / 2 * 16 + unit % 2 + 2 * j + 8 * i;
      two[i] = source ? row[source[column]] : column < in_features ? row[column] : 0;
    }
    pair[j] = two[0] | two[1] << 16;
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
// Those of the piece: the neighbouring thread has the other eight of 16 columns, of which one makes the even piece, one the odd.
DEVICE uint4 piece_of(uint4 q) {
  if (!WHOLE) return q;
  const bool odd = threadIdx.x % 2;
  const u32 keep = odd ? 0x7632 : 0x5410, give = odd ? 0x5410 : 0x7632, low = odd ? 0x1054 : 0x5410, high = odd ? 0x3276 : 0x7632;
  const u32 one = __byte_perm(q.x, q.y, keep), two = __byte_perm(q.z, q.w, keep);
  const u32 three = __shfl_xor_sync(~0u, __byte_perm(q.x, q.y, give), 1), four = __shfl_xor_sync(~0u, __byte_perm(q.z, q.w, give), 1);
  return make_uint4(__byte_perm(one, three, low), __byte_perm(one, three, high), __byte_perm(two, four, low), __byte_perm(two, four, high));
}
DEVICE float half_of(const uint4& q, int i) {  // i is a constant once unrolled
  const u32 pair = i < 2 ? q.x : i < 4 ? q.y : i < 6 ? q.z : q.w;
  return i % 2 ? high_float(pair) : low_float(pair);
}

struct Piece {  // of one part: scales and biases of its columns
  uint4 scales, biases;
  DEVICE void load(const uint4* pairs, int unit) { scales = pairs[2 * unit], biases = pairs[2 * unit + 1]; }
};
#define PACK(i) const u16 *source##i, const uint4 *pairs##i, const u8 *book##i

extern "C" __global__ void __launch_bounds__(THREADS, 32 / WARPS) vptq_pack(
    PACK(0), PACK(1), PACK(2), const u16* x, const u16* norm, uint4* packed, float* sums, float epsilon, int rows, int in_features,
    int stored, int groups, int slices) {
  __shared__ float of_warps[HERE + NORM][WARPS];
  const int own_part = APART ? blockIdx.x % PARTS : 0, cta = APART ? blockIdx.x / PARTS : blockIdx.x;
  if (own_part == 1) source0 = source1, pairs0 = pairs1, book0 = book1;
  if (own_part == 2) source0 = source2, pairs0 = pairs2, book0 = book2;
  const u16* const sources[3] = {source0, source1, source2};
  const uint4* const pairs[3] = {pairs0, pairs1, pairs2};
  const u8* const books[3] = {book0, book1, book2};
  const int row = cta / slices, slice = cta % slices, stages = (stored / 32 + STAGE_STEPS - 1) / STAGE_STEPS;
  const int first = slice * THREADS + threadIdx.x, units = stored / 8, step = slices * THREADS;
  launch_dependents();
  Piece pieces[HERE];
  uint4 weight;
  if (first < units) {
#pragma unroll
    for (int part = 0; part < HERE; part++) pieces[part].load(pairs[part], first);
    if (NORM) weight = piece_of(load_columns(norm, sources[0], first, in_features));
  }
#pragma unroll
  for (int part = 0; part < HERE; part++)
#pragma unroll 1
    for (int line = cta * THREADS + threadIdx.x; line < BOOK_BYTES / 128; line += rows * slices * THREADS)
      prefetch_l2(books[part] + line * 128);
  wait_for_inputs();
  const u16* const from = x + (size_t)row * in_features * (1 + (GATED > 0));
  uint4 own, up;
  const auto load = [&](int part, int unit) {
    own = load_columns(from, sources[part], unit, in_features);
    if (GATED) up = load_columns(from + in_features, sources[part], unit, in_features);
  };
  if (first < units) load(0, first);
  float factor = 1;
  if (NORM && !LATE) {
    float squares = 0;
    for (int i = threadIdx.x; i < in_features; i += THREADS) squares += to_float(from[i]) * to_float(from[i]);
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) of_warps[HERE][threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) squares += of_warps[HERE][w];
    factor = rsqrtf(squares / in_features + epsilon);
  }
  float biases[HERE + LATE] = {};  // and squares
#pragma unroll 1
  for (int unit = first; unit < units; unit += step) {
    const size_t place = vector_place<STAGE_STEPS>(row, unit, groups);
    float value[8];
#pragma unroll
    for (int part = 0; part < HERE; part++) {
      if (unit != first) pieces[part].load(pairs[part], unit);
      if (part == 0 ? unit != first : !WHOLE && sources[part]) {
        load(part, unit);
        if (NORM) weight = piece_of(load_columns(norm, sources[part], unit, in_features));
      }
      if (part == 0 || (!WHOLE && sources[part])) {
        own = piece_of(own);
        if (GATED) up = piece_of(up);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float& v = value[i];
          v = half_of(own, i);
          if (LATE) biases[HERE] += v * v;
          else v *= factor;
#if GATED
          v = gated<GATED>(v, half_of(up, i));
#endif
          if (NORM) v *= half_of(weight, i);
        }
      }
      const Piece& now = pieces[part];
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float one = value[2 * j], two = value[2 * j + 1];
        biases[part] += one * half_of(now.biases, 2 * j) + two * half_of(now.biases, 2 * j + 1);
        words[j] = pack2(one * half_of(now.scales, 2 * j), two * half_of(now.scales, 2 * j + 1));
      }
      packed[place + (size_t)(own_part + part) * stages * groups * 32 * STAGE_STEPS] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (HERE > 1) break;  // slices are so many that a thread has one piece: more would cost registers
  }
#pragma unroll
  for (int part = 0; part < HERE + LATE; part++) {
    const float sum = warp_sum(biases[part]);
    if (threadIdx.x % 32 == 0) of_warps[part][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  const bool squares = threadIdx.x >= HERE;  // they follow the last part, and are the same for all
  if (threadIdx.x < HERE + LATE && !(squares && own_part > 0)) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += of_warps[threadIdx.x][w];
    sums[((size_t)(squares ? PARTS : own_part + threadIdx.x) * rows + row) * slices + slice] = sum;
  }
}
