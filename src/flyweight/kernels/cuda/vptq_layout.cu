// Into the layout of vptq.cu and out of it again: the order of the items in a window, and the dense matrix.
//
// SCHEDULE. Eight lanes gather at once and 8 bank groups serve one entry each (entries of 8 bytes: 16 and 16, LANES): a step of a
// window takes as many cycles as items share its fullest bank. A lane may take its items in any order, and where the codebook is stored twice, from
// either copy. One thread anneals one window of so many lanes: it swaps two steps of a lane, or takes the other copy, and
// keeps what lowers 20 · (fullest bank) + sum of squares over the two steps, or, while it is hot, what raises it a
// little. Cycles a step for random entries, windows of 4, 8, 16 steps, counted over 4000 windows: 2.6 unordered; annealed
// 1.82, 1.58, 1.42, with a second copy 1.15, 1.07, 1.04. No order of one copy is below 1.76, 1.53, 1.37.
// RESIDUALS: where there are fewer than eight copies of the residual book its lookups clash, too; both are counted and added.
// In windows of 8 steps, four copies, main and residual cycles: 1.58 + 1.94 by main entries alone, 1.60 + 1.38 by both.
// DEQUANTIZE. W[n][stored column] · scale + bias, for many rows of x: a CTA decodes a piece of one row block into
// shared memory and writes it out row by row. The codebook is read through L1 and L2.
//
// defines: KERNEL, those of vptq.cuh; SCHEDULE needs only POS_BITS, LANES (8 or 16) and RESIDUALS (0; 1 with 8 lanes)
#define SCHEDULE 0
#define DEQUANTIZE 1
#define DEQUANTIZE_SLICED 2
#if KERNEL == SCHEDULE
#ifndef RESIDUALS
#define RESIDUALS 0
#endif
#include "common.cuh"
constexpr int W = 1 << POS_BITS, THREADS = 64;
// words of a thread; odd, so that threads start in different banks
constexpr int COUNTED = LANES / 8 + RESIDUALS;  // words of a step
constexpr int STRIDE = COUNTED * W + LANES / 2 * W + 1;

// counts: a nibble a bank, in one word for each eight. Where 16 lanes take the same entry one carries: the order is worse, no more.
// RESIDUALS: the last word is of the residual book's banks.
struct Counts { u32 word[COUNTED]; };
DEVICE int fullest(u32 counts) {
  u32 m = __vmaxu4(counts & 0x0f0f0f0f, counts >> 4 & 0x0f0f0f0f);
  m = __vmaxu4(m, m >> 16);
  return max(m & 0xff, m >> 8 & 0xff);
}
DEVICE int energy(const Counts& counts) {
  int squares = 0, most = 0;
#pragma unroll
  for (int i = 0; i < COUNTED; i++)
#pragma unroll
    for (int b = 0; b < 8; b++) squares += (counts.word[i] >> 4 * b & 15) * (counts.word[i] >> 4 * b & 15);
#pragma unroll
  for (int i = 0; i < LANES / 8; i++) most = max(most, fullest(counts.word[i]));
  if (RESIDUALS) most += fullest(counts.word[COUNTED - 1]);  // one lookup after the other
  return 20 * most + squares;
}
DEVICE Counts moved(Counts counts, u32 from, u32 to) {
  counts.word[from / 8] -= 1u << 4 * (from % 8);
  counts.word[to / 8] += 1u << 4 * (to % 8);
  return counts;
}
// The same of a whole item, by its bits as in `items`.
DEVICE Counts exchanged(Counts counts, u32 from, u32 to) {
  counts = moved(counts, from >> 4 & 15, to >> 4 & 15);
  if (RESIDUALS) {
    counts.word[COUNTED - 1] -= 1u << 4 * (from >> 13);
    counts.word[COUNTED - 1] += 1u << 4 * (to >> 13);
  }
  return counts;
}
// banks [groups][LANES][W]: bank of the entry, and of its copy (or the same) in the high half; residuals, same shape: of the lane's
// copy of its residual entry. order, same shape: at each step the item that is taken, and 128 where from the copy.
extern "C" __global__ void __launch_bounds__(THREADS)
vptq_schedule(const u8* banks, const u8* residuals, u8* order, int groups, int iterations) {
  __shared__ u32 memory[THREADS * STRIDE];
  const int group = blockIdx.x * THREADS + threadIdx.x;
  if (group >= groups) return;
  Counts* const counts = (Counts*)(memory + threadIdx.x * STRIDE);  // [W]
  // [LANES][W]: index | bank << 4 | other bank << 8 | from the copy << 12 | residual's bank << 13
  u16* const items = (u16*)(counts + W);
  for (int s = 0; s < W; s++) counts[s] = {};
  for (int i = 0; i < LANES * W; i++) {
    const u32 b = banks[(size_t)group * LANES * W + i];
    const u32 residual = RESIDUALS ? residuals[(size_t)group * LANES * W + i] & 7 : 0;
    items[i] = i % W | (b & 15) << 4 | (b >> 4 & 15) << 8 | residual << 13;
    counts[i % W].word[(b & 15) / 8] += 1u << 4 * (b & 7);
    if (RESIDUALS) counts[i % W].word[COUNTED - 1] += 1u << 4 * residual;
  }
  u32 random = group * 2654435761u + 12345;
  for (int it = 0; it < iterations; it++) {
    random ^= random << 13, random ^= random >> 17, random ^= random << 5;
    const int lane = random & (LANES - 1), s = random >> 4 & (W - 1);
    const float heat = 6.f * (iterations - it) / iterations;
    const float allowed = -heat * __logf(((random >> 9) + 1) * 1.2e-7f);
    u16 &a = items[lane * W + s];
    const u32 bank = a >> 4 & 15, other = a >> 8 & 15;
    if (bank != other && random >> 31) {
      const Counts changed = moved(counts[s], bank, other);
      if (energy(changed) - energy(counts[s]) > allowed) continue;
      counts[s] = changed;
      a = (a & 0xf00f) ^ 4096 | other << 4 | bank << 8;
    } else {
      const int t = (s + 1 + (random >> 20) % (W - 1)) & (W - 1);
      u16 &b = items[lane * W + t];
      if (bank == (b >> 4 & 15) && a >> 13 == b >> 13) continue;
      const Counts at_s = exchanged(counts[s], a, b), at_t = exchanged(counts[t], b, a);
      if (energy(at_s) + energy(at_t) - energy(counts[s]) - energy(counts[t]) > allowed) continue;
      counts[s] = at_s, counts[t] = at_t;
      const u16 taken = a;
      a = b, b = taken;
    }
  }
  for (int i = 0; i < LANES * W; i++) order[(size_t)group * LANES * W + i] = (items[i] & 15) | (items[i] & 4096 ? 128 : 0);
}
#else
#include "vptq.cuh"

// One piece of a row block in shared memory, [OUTPUTS][columns].
struct Tile {
  u16* at;
  int columns;
  DEVICE void put(int column, int half, uint4 entry) const {
    const u32 pair[4] = {entry.x, entry.y, entry.z, entry.w};
#pragma unroll
    for (int j = 0; j < 8; j++) at[(8 * half + j) * columns + column] = (u16)(j % 2 ? pair[j / 2] >> 16 : pair[j / 2]);
  }
};
struct Matrix {
  u16* weight;        // [out_features][stored]
  const u32* affine;  // [stored]
  int out_features, stored, length;
  // Scales and shifts the tile and writes it as columns [first, first + tile.columns) of its row block; even numbers.
  DEVICE void write(const Tile& tile, int block, int first) const {
    for (int i = threadIdx.x; i < OUTPUTS * tile.columns / 2; i += blockDim.x) {
      const int output = i / (tile.columns / 2), column = i % (tile.columns / 2) * 2, row = block * length + output;
      if (output >= length || row >= out_features) continue;
      const uint2 a = *(const uint2*)(affine + first + column);
      const u32 pair = *(const u32*)(tile.at + output * tile.columns + column);
      const float low = a.x ? low_float(pair) * low_float(a.x) + high_float(a.x) : 0.f;  // padding was never decoded
      const float high = a.y ? high_float(pair) * low_float(a.y) + high_float(a.y) : 0.f;
      *(u32*)(weight + (size_t)row * stored + first + column) = pack2(low, high);
    }
  }
};
DEVICE uint4 entry_of(const uint4* book, const uint4* residual, u32 v, int half) {
  uint4 q = __ldg(book + half * ENTRIES + main_index(v));
  if constexpr (RES_BITS > 0) q = add8(q, __ldg(residual + (half << RES_BITS) + residual_index(v)));
  return q;
}
// Outlier columns: two steps of A fragments are 64 columns.
DEVICE void put_dense(const Tile& tile, const uint4* fragments, int lane) {
  for (int i = threadIdx.x / 32; i < 2 * PIECES; i += blockDim.x / 32) {
    const int step = i / PIECES, half = i % PIECES;
    const uint4 q = stream_load(fragments + 32 * i + lane);
    const u32 pair[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 8; j++)
      tile.at[(8 * half + lane / 4) * tile.columns + column_of(step, column_lane(8 * (j / 2) + 2 * (lane % 4) + j % 2))] =
          (u16)(j % 2 ? pair[j / 2] >> 16 : pair[j / 2]);
  }
}

#if KERNEL == DEQUANTIZE
// CTA (piece, row block): four spans of whole windows and chunks, one a warp; behind them 64 outlier columns a piece.
extern "C" __global__ void __launch_bounds__(128) vptq_dequantize(
    const char* stream, const uint4* book, const uint4* residual, const uint4* dense, const u32* affine, u16* weight,
    int out_features, int stored, int length, int chunks, int dense_steps) {
  extern __shared__ __align__(16) u8 raw[];
  u16* const shared = (u16*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.y;
  const int spans = chunks * CHUNK / SPAN, pieces = (spans + 3) / 4, piece = blockIdx.x;
  const Matrix matrix = {weight, affine, out_features, stored, length};
  if (piece >= pieces) {
    const Tile tile = {shared, 64};
    put_dense(tile, dense + ((size_t)block * dense_steps + 2 * (piece - pieces)) * PIECES * 32, lane);
    __syncthreads();
    matrix.write(tile, block, 256 * chunks + 64 * (piece - pieces));
    return;
  }
  const Tile tile = {shared, 32 * SPAN * min(4, spans - 4 * piece)};
  if (4 * piece + warp < spans)
    for (int c = 0; c < SPAN / CHUNK; c++) {
      const int chunk = (4 * piece + warp) * (SPAN / CHUNK) + c;
      u32 words[WORDS], v[CHUNK];
      load_chunk(words, stream + ((size_t)block * chunks + chunk) * CHUNK_BYTES, lane);
      all_items(v, words);
#pragma unroll
      for (int s = 0; s < CHUNK; s++) {
        const int column = gathered_column(v[s], CHUNK * chunk + s, lane) - 128 * SPAN * piece;
#pragma unroll
        for (int h = 0; h < PIECES; h++) tile.put(column, h, entry_of(book, residual, v[s], h));
      }
    }
  __syncthreads();
  matrix.write(tile, block, 128 * SPAN * piece);
}
#else
// CTA (range, row block): the lists of all slices, step by step over the warps; behind them 64 outlier columns a piece.
extern "C" __global__ void __launch_bounds__(128) vptq_dequantize_sliced(
    const u32* stream, const int* offsets, const uint4* book, const uint4* residual, const uint4* dense, const u32* affine,
    u16* weight, int out_features, int stored, int length, int slices, int residual_books, int ranges, int range, int dense_begin,
    int dense_steps) {
  extern __shared__ __align__(16) u8 raw[];
  u16* const shared = (u16*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.y, piece = blockIdx.x;
  const Matrix matrix = {weight, affine, out_features, stored, length};
  if (piece >= ranges) {
    const Tile tile = {shared, 64};
    put_dense(tile, dense + ((size_t)block * dense_steps + 2 * (piece - ranges)) * PIECES * 32, lane);
    __syncthreads();
    matrix.write(tile, block, dense_begin + 64 * (piece - ranges));
    return;
  }
  const Tile tile = {shared, range + 2};  // the two columns behind the range take the padding of the lists
  for (int slice = 0; slice < slices; slice++) {
    const int* list = offsets + ((size_t)block * slices + slice) * ranges + piece;
    const uint4* slice_book = book + (size_t)slice * PIECES * ENTRIES;
    const uint4* slice_residual = residual + (size_t)(residual_books > 1 ? slice : 0) * (PIECES << RES_BITS);
    for (int step = list[0] + warp; step < list[1]; step += 4) {
      const u32 v = stream_load1(stream + (size_t)step * 32 + lane);
      const u32 column = position(__shfl_sync(~0u, v, column_lane(lane)));
#pragma unroll
      for (int h = 0; h < PIECES; h++) tile.put(column, h, entry_of(slice_book, slice_residual, v, h));
    }
  }
  __syncthreads();
  matrix.write(tile, block, piece * (range + 2));
}
#endif
#endif
