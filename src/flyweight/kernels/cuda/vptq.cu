// y[n] = sum_k (C[i(n / 8, k)][n % 8] + R[r(n / 8, k)][n % 8]) · scale[k] · x[k]  +  sum_k bias[k] · x[k]
//
// An item is one lookup: the 8 outputs of one row block in one column. The limit is not memory but how fast shared
// memory serves 16-byte entries: eight lanes at once if their entries lie in eight different bank groups (entry mod 8),
// one cycle more for each clash. 32 random entries take 10.4 cycles, the floor is 4.
//
// Staged kernel. One CTA an SM holds the codebook, and the residual book eight times over: lane l reads copy l % 8, so
// residuals never clash. A step is 32 items of one row block. A warp takes it with two `ldmatrix` whose row addresses
// are the entries, so they arrive as the A fragment of mma.m16n8k16 without a shuffle:
//
//      A [16 × 16]   rows 0-7: the 8 outputs of items 0-15     rows 8-15: the same 8 outputs of items 16-31
//      B [16 × 8]    lane L supplies the x of one item in one slot, and zeros: every item has an x of its own
//      D [16 × 8]    rows 0-7 count in columns 0-3, rows 8-15 in columns 4-7; added up they are y
//
// So the items of a lane may come in any order. The host orders them within windows of 2^POS_BITS steps such that few
// entries clash; POS_BITS of an item tell its column. Two rows of x share the gathers: one more mma, and both rows lie in
// one word of shared memory. Eight rows lie together by columns and come by `ldmatrix` too, as the left operand: then two
// mma do, whose D is y at once. Where x does not fit, the columns are taken in phases.
//
// Up to three weights with one x share a launch. NORM: x is normed on its way to shared memory, by its weights there and
// its factor at the end; GATED: x is act(gate) · up of a row with both.
//
//      row blocks of a CTA        |  block 0              |  block 1              | …
//      chunks of 8 steps          |  0  1  2  3  4  5  6  |  0  1  2  3  4  5  6  |
//      warps, contiguous runs     |  warp 0   |  warp 1   |  warp 2   | …          one partial sum per (warp, block)
//
// Direct kernel, for weights too small to pay for staging: the same stream, entries gathered through L1 and L2.
// Sliced kernel, for codebooks larger than shared memory, or one for each group of columns: a CTA holds one slice and
// takes the items that fall into it; the partial sums of the slices are added in a fixed order by the last CTA.
//
// Measured on one H200 (1.98 GHz), cold L2, time / torch bf16 time, before the last round of changes: 16384 × 53248 with
// 8192 + 256 entries 196 µs, 0.45; 4096 × 4096 7.7 µs, 0.62; 1024 × 1024 (direct) 1.9 µs, 0.25; 65536 + 256 entries
// 0.58 to 0.91. A step of the staged kernel takes 4 c + 7.5 cycles, c clashes: 2.6 for items in natural order (241 µs),
// 1.8, 1.6 in windows of 8, 16 steps ordered greedily (196, 184 µs). Clusters that share one fetch of the codebook,
// or split columns, were slower on every shape: a launch with clusters of 2 costs 0.8 µs, of 4 1.6 to 3 µs.
//
// SPLIT: so many neighbouring CTAs have the same row blocks, each a slice of the columns, and so of x; those behind the first leave
// their sums to it. For few row blocks of many columns: all have about as much to do, and each stages little of x.
//
// defines: KERNEL, those of vptq_tables.cuh (COPIES: 8 unless shared memory is short), ROWS (1, 2, 4, 8), RESIDENT (CTAs
// of two launches that share an SM), NORM (0), GATED (0), SPLIT (1)
#ifndef SPLIT
#define SPLIT 1
#endif
#include "vptq_step.cuh"
#if SPLIT > 1
#define SLICES (SPLIT - 1)
#include "patience.cuh"
#include "mail.cuh"
#define MAIL , float *mail, int letters  // [CTA][letters]: sums of its row blocks, and ROWS sums of squares
#else
#define MAIL
#endif

// What each thread adds up in the end is known before products begin. Not where two CTAs share an SM: they have no registers for it and became
// slower. Nor on Hopper, where that is untimed.
#define KNOWN (RESIDENT == 1 && __CUDA_ARCH__ < 900)

#define STAGED 0
#define DIRECT 1
#define SLICED 2

#if KERNEL == STAGED
#if KNOWN
// What one of 4 threads (of 1, where that leaves one output to a thread) adds up of an output: the sums of every 4th of the warps that had a
// part of its row block. Runs are contiguous, so warp + block is a slot of its own.
struct Addends {
  int shift, block, inner, part;  // threads of an output, as a power of two; this one among them
  int warp, from, to;             // its first warp, perhaps; the row block's chunks
  DEVICE Addends() {}
  DEVICE static int shift_of(int here) { return 4 * here * SUMS <= THREADS ? 2 : 0; }
  DEVICE Addends(int i, int here, int each) {
    shift = shift_of(here), part = i & (1 << shift) - 1, i >>= shift;
    block = i / SUMS, inner = i % SUMS, from = block * each, to = from + each;
    warp = (u32)(block * WARPS) / (u32)here + part;
  }
  DEVICE bool ends(int here) const { return part == 0 && block < here; }
  DEVICE float sum(const float* partial, int total) const {  // by whole warps, or by those whose outputs are whole
    float sum = 0;
    for (int w = warp; w < WARPS && total * w / WARPS < to; w += 1 << shift)
      if (total * (w + 1) / WARPS > max(from, total * w / WARPS)) sum += partial[(w + block) * SUMS + inner];
    if (!shift) return sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};
#endif
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) vptq_staged(
    PART(0), PART(1), PART(2), const u16* x, const u16* norm, const u16* bias, const u16* rest, u16* y, float epsilon, int rows,
    int in_features, int width, int length, int chunks, int phase, int x_columns, int dense_steps MAIL LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  __shared__ u64 barrier;
  __shared__ Totals totals;
  char* const shared = (char*)raw;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Part part = own_part(GIVEN(0), GIVEN(1), GIVEN(2));
  BEGIN_LAUNCH;
  launch_dependents();
  // Where no launch is in front, x is there already: asked for behind a large book and its own places
  // it would come as late as they. (With 64 KB the book is later for it, and two CTAs on an SM have no registers to spare.)
  const bool x_first = RESIDENT == 1 && BOOK_BYTES > 65536 && nothing_in_front();
  if (!x_first) stage_book(shared, part.book, &barrier);

#if KNOWN
  const int slice = part.cta % SPLIT;
  int block0, here;  // this CTA's row blocks: `begin`
#else
  const int row_blocks = (part.outputs + length - 1) / length;
  const int slice = part.cta % SPLIT, group = part.cta / SPLIT, groups = part.ctas / SPLIT;
  const int block0 = (int)((long long)row_blocks * group / groups);
  const int here = (int)((long long)row_blocks * (group + 1) / groups) - block0;
#endif
  constexpr int ALIGN = SPAN / CHUNK;  // chunks of a window
  const int slice_begin = chunks / ALIGN * slice / SPLIT * ALIGN, slice_end = chunks / ALIGN * (slice + 1) / SPLIT * ALIGN;
  const int dense_here = slice == SPLIT - 1 ? dense_steps : 0;  // they lie behind the others
  const int plane = X_BYTES * x_columns;
  char* const shared_x = shared + BOOK_BYTES + RES_BYTES;
  float* const partial = (float*)(shared_x + PLANES * plane);  // [WARPS + here][SUMS]
#if !KNOWN
  float* const before = partial + (WARPS + here) * SUMS;       // [here][SUMS], only with several phases
#endif
  const Tables tables(shared, shared + BOOK_BYTES, shared_x, plane, lane);
  const Inputs in = {x, norm, part.affine, part.source, in_features, rows};
  const Outputs out = {bias, rest, y, width, part.first, part.outputs, length, rows};
  Accumulators acc = {};
  Sums sums[ROWS] = {};
  float added = 0;  // to this thread's first output: on its way while products run

  for (int chunk0 = slice_begin; chunk0 < slice_end; chunk0 += phase) {
    const bool first = chunk0 == slice_begin, last = chunk0 + phase >= slice_end;
    const int each = last ? slice_end - chunk0 : phase;
#if KNOWN
    int total, begin, end, block, chunk, next_chunk;  // this warp's run of chunks
    const char* next;
#else
    // This warp's run of chunks. Two are on their way before we wait: they depend on no other kernel.
    const int total = here * each, begin = total * warp / WARPS, end = total * (warp + 1) / WARPS;
    int block = begin / each, chunk = begin % each, next_chunk = chunk;
    const char* next = part.stream + ((size_t)(block0 + block) * chunks + chunk0 + chunk) * CHUNK_BYTES;
#endif
    u32 words[2][WORDS];
    const auto fetch = [&](int slot, int at) {
      if (at >= end) return;
      load_chunk(words[slot], next, lane);
      next += CHUNK_BYTES;
      if (++next_chunk == each) next_chunk = 0, next += (size_t)(chunks - each) * CHUNK_BYTES;
    };
#if !KNOWN
    fetch(0, begin);
    fetch(1, begin + 1);
#endif
    Residual residuals;
#if KNOWN
    Addends own;  // of this thread's first output, known before products end where registers hold it
    const auto set_out = [&] {
      if (first) {
        const u32 row_blocks = (u32)(part.outputs + length - 1) / (u32)length, group = part.cta / SPLIT, groups = part.ctas / SPLIT;
        block0 = row_blocks * group / groups, here = row_blocks * (group + 1) / groups - block0;
      }
      total = here * each, begin = total * warp / WARPS, end = total * (warp + 1) / WARPS;
      block = (u32)begin / (u32)each, chunk = begin - block * each, next_chunk = chunk;
      next = part.stream + ((size_t)(block0 + block) * chunks + chunk0 + chunk) * CHUNK_BYTES;
      // Two chunks are on their way before we wait: they depend on no other kernel.
      fetch(0, begin);
      fetch(1, begin + 1);
      if (first) residuals.load(part.residual);
      own = Addends(threadIdx.x, here, each);
    };
    const bool late = x_first && first;
    if (!late) set_out();
#else
    if (first) residuals.load(part.residual);
#endif
    stage_x<true>(sums, shared_x, plane, in, 256 * chunk0, 256 * each + (last ? 32 * dense_here : 0),
#if KNOWN
                  [&] { if (late) stage_book(shared, part.book, &barrier), set_out(); });
#else
                  [&] { if (x_first && first) stage_book(shared, part.book, &barrier); });
#endif
    if (first) residuals.store(shared + BOOK_BYTES);
    if (last) totals.collect(sums);
    __syncthreads();
    if (last) totals.total(in_features, epsilon);
#if KNOWN
    if (last && !slice && own.ends(here)) added = out.added(out.place(block0 + own.block, own.inner));
#else
    if (last && !slice && threadIdx.x % 4 == 0 && threadIdx.x < 4 * here * SUMS)
      added = out.added(out.place(block0 + threadIdx.x / (4 * SUMS), threadIdx.x / 4 % SUMS));
#endif
    book_ready(&barrier);

    for (int at = begin; at < end; at += 2) {
#pragma unroll
      for (int slot = 0; slot < 2; slot++) {
        if (at + slot >= end) break;
        take_chunk<0>(acc, words[slot], CHUNK * chunk, tables, lane);
        fetch(slot, at + slot + 2);
        const bool finished = ++chunk == each;
        if (finished && last)
          for (int s = 0; s < dense_here; s++)
            take_dense(acc, part.dense + ((size_t)(block0 + block) * dense_steps + s) * PIECES * 32, x_offset(CHUNK * each + s, lane), tables, lane);
        if (finished || at + slot == end - 1) flush(acc, partial + (warp + block) * SUMS, OUTPUTS, lane);
        if (finished) chunk = 0, block++;
      }
    }
    __syncthreads();
#if SPLIT > 1 && NORM
    if (last && threadIdx.x < ROWS) {
      float* const squares = mail + (blockIdx.x + 1) * letters - ROWS + threadIdx.x;
      if (slice) leave(squares, totals.squares[threadIdx.x]);
      else totals.norm(threadIdx.x, totals.squares[threadIdx.x] + take<float>(squares + letters, letters), in_features, epsilon);
    }
    __syncthreads();
#endif

#if KNOWN
    float* const before = partial + (WARPS + here) * SUMS;  // [here][SUMS], only with several phases
    for (int i = threadIdx.x; i < here * SUMS << Addends::shift_of(here); i += THREADS) {
      const Addends a = i == threadIdx.x ? own : Addends(i, here, each);
      float sum = a.sum(partial, total);
      if (!a.ends(here)) continue;
      const int place = a.block * SUMS + a.inner;
      if (!first) sum += before[place];
#else
    // Runs are contiguous, so slot warp + block is unique; four threads add the warps of a block, always in one order.
    for (int i = threadIdx.x; i < 4 * here * SUMS; i += THREADS) {
      const int b = i / (4 * SUMS), inner = i / 4 % SUMS;
      float sum = 0;
      const int from = b * each, to = from + each;
      for (int w = b * WARPS / here + i % 4; w < WARPS && total * w / WARPS < to; w += 4)
        if (total * (w + 1) / WARPS > max(from, total * w / WARPS)) sum += partial[(w + b) * SUMS + inner];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (i % 4) continue;
      if (!first) sum += before[i / 4];
#endif
      if (!last) {
#if KNOWN
        before[place] = sum;
#else
        before[i / 4] = sum;
#endif
        continue;
      }
#if SPLIT > 1
#if KNOWN
      float* const letter = mail + blockIdx.x * letters + place;
#else
      float* const letter = mail + blockIdx.x * letters + i / 4;
#endif
      if (slice) {
#if KNOWN
        leave(letter, sum + totals.bias[a.inner / OUTPUTS]);
#else
        leave(letter, sum + totals.bias[inner / OUTPUTS]);
#endif
        continue;
      }
      sum += take<float>(letter + letters, letters);
#endif
#if KNOWN
      const int at = out.place(block0 + a.block, a.inner);
      if (at >= 0) y[at] = to_bits(totals.finish(sum, a.inner / OUTPUTS) + (i == threadIdx.x ? added : out.added(at)));
#else
      const int at = out.place(block0 + b, inner);
      if (at >= 0) y[at] = to_bits(totals.finish(sum, inner / OUTPUTS) + (i == threadIdx.x ? added : out.added(at)));
#endif
    }
  }
  end_launch(THREADS);
}
#elif KERNEL == DIRECT
// One row block per CTA, one row of x; no codebook in shared memory. Outlier columns are left to the staged kernel.
extern "C" __global__ void __launch_bounds__(THREADS) vptq_direct(
    const char* stream, const uint4* book, const uint4* residual, const u32* affine, const u16* source, const u16* x, u16* y,
    int rows, int in_features, int out_features, int length, int chunks LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  char* const shared_x = (char*)raw;
  __shared__ uint4 shared_residual[RES_BITS ? PIECES << RES_BITS : 1];
  __shared__ float partial[WARPS][OUTPUTS];
  __shared__ Totals totals;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  BEGIN_LAUNCH;
  launch_dependents();
  u32 words[WORDS], v[CHUNK];
  uint4 entry[CHUNK][PIECES];
  const char* from = stream + (size_t)blockIdx.x * chunks * CHUNK_BYTES;
  const auto lookup = [&](int chunk) {  // the entries of this chunk and the words of the next
    all_items(v, words);
#pragma unroll
    for (int s = 0; s < CHUNK; s++)
#pragma unroll
      for (int h = 0; h < PIECES; h++) entry[s][h] = constant_load(book + h * ENTRIES + main_index(v[s]));
    if (chunk + WARPS < chunks) load_chunk(words, from + (chunk + WARPS) * CHUNK_BYTES, lane);
  };
  if (warp < chunks) load_chunk(words, from + warp * CHUNK_BYTES, lane);
  if constexpr (RES_BITS > 0)
    for (int i = threadIdx.x; i < PIECES << RES_BITS; i += THREADS) shared_residual[i] = residual[i];
  if (warp < chunks) lookup(warp);
  Sums sums[1] = {};
  stage_x<false>(sums, shared_x, 0, {x, nullptr, affine, source, in_features, rows}, 0, 256 * chunks, [] {});
  totals.collect(sums);
  __syncthreads();
  totals.total(in_features, 0.f);

  float acc[OUTPUTS] = {};
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    if (chunk != warp) lookup(chunk);
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      const float value = to_float(*(const u16*)(shared_x + 2 * gathered_column(v[s], CHUNK * chunk + s, lane)));
#pragma unroll
      for (int h = 0; h < PIECES; h++) {
        uint4 q = entry[s][h];
        if constexpr (RES_BITS > 0) q = add8(q, shared_residual[(h << RES_BITS) + residual_index(v[s])]);
        const u32 pair[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int j = 0; j < 8; j++) acc[8 * h + j] += value * (j % 2 ? high_float(pair[j / 2]) : low_float(pair[j / 2]));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < OUTPUTS; j++) {
    const float sum = warp_sum(acc[j]);
    if (lane == 0) partial[warp][j] = sum;
  }
  __syncthreads();
  if (threadIdx.x < OUTPUTS) {
    float sum = totals.bias[0];
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[w][threadIdx.x];
    const Outputs out = {nullptr, nullptr, y, out_features, 0, out_features, length, rows};
    const int at = out.place(blockIdx.x, threadIdx.x);
    if (at >= 0) y[at] = to_bits(sum);
  }
  end_launch(THREADS);
}
#elif KERNEL == SLICED
// CTA (part, slice): the codebook slice in shared memory, all of x, and the lists of its row blocks, one warp a block.
// A list holds the items of one row block, slice and range of `range` columns, 4 bytes each, padded to whole steps
// with items whose x is the zero behind the range. The columns of a list are in no order.
extern "C" __global__ void __launch_bounds__(THREADS, 1) vptq_sliced(
    const u32* stream, const int* offsets, const char* book, const uint4* residual, const uint4* dense, const u32* affine,
    const u16* source, const u16* x, u16* y, float* workspace, int* arrived, int rows, int in_features, int out_features, int length,
    int row_blocks, int slices, int residual_books, int ranges, int range, int dense_begin, int dense_steps
    LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  char* const shared = (char*)raw;
  __shared__ u64 barrier;
  __shared__ Totals totals;
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x % slices, part = blockIdx.x / slices;
  const int parts = gridDim.x / slices;
  BEGIN_LAUNCH;
  launch_dependents();
  stage_book(shared, book + (size_t)slice * BOOK_BYTES, &barrier);
  Residual residuals;
  residuals.load(residual + (size_t)(residual_books > 1 ? slice : 0) * (PIECES << RES_BITS));
  const int block0 = (int)((long long)row_blocks * part / parts), block1 = (int)((long long)row_blocks * (part + 1) / parts);

  char* const shared_x = shared + BOOK_BYTES + RES_BYTES;  // [ranges][range + 2], whole eights, then the dense columns
  const int columns = dense_begin + 32 * dense_steps, plane = X_BYTES * columns;
  Sums sums[ROWS] = {};
  stage_x<false>(sums, shared_x, plane, {x, nullptr, affine, source, in_features, rows}, 0, columns, [] {});
  residuals.store(shared + BOOK_BYTES);
  totals.collect(sums);
  __syncthreads();
  totals.total(in_features, 0.f);
  book_ready(&barrier);

  const Tables tables(shared, shared + BOOK_BYTES, shared_x, plane, lane);
  Accumulators acc = {};
  constexpr int DEPTH = 6;  // steps on their way while as many are taken
  for (int block = block0 + warp; block < block1; block += WARPS) {
    // Lists of one row block and slice follow each other; lane r knows where the list of range r begins.
    const int* list = offsets + ((size_t)block * slices + slice) * ranges;
    const int bounds = lane < ranges ? list[lane] : 0x7fffffff, end = list[ranges];
    int r = 0, r_end = __shfl_sync(~0u, bounds, 1);
    u32 v[2][DEPTH];
    const auto fetch = [&](int slot, int at) {
#pragma unroll
      for (int j = 0; j < DEPTH; j++) if (at + j < end) v[slot][j] = stream_load1(stream + (size_t)(at + j) * 32 + lane);
    };
    int at = list[0];
    fetch(0, at);
    while (at < end) {
#pragma unroll
      for (int slot = 0; slot < 2; slot++) {
        fetch(slot ^ 1, at + DEPTH);
        u32 x_at[DEPTH];
#pragma unroll
        for (int j = 0; j < DEPTH; j++) {
          while (at + j >= r_end) r_end = __shfl_sync(~0u, bounds, ++r + 1);
          x_at[j] = X_BYTES * (r * (range + 2) + position(v[slot][j]));
        }
        if (at + DEPTH <= end) {  // without a branch in between, the steps overlap
#pragma unroll
          for (int j = 0; j < DEPTH; j++) take(acc, v[slot][j], x_at[j], tables);
        } else {
#pragma unroll
          for (int j = 0; j < DEPTH; j++)
            if (at + j < end) take(acc, v[slot][j], x_at[j], tables);
        }
        at += DEPTH;
      }
    }
    if (slice == 0)
      for (int s = 0; s < dense_steps; s++)
        take_dense(acc, dense + ((size_t)block * dense_steps + s) * PIECES * 32, X_BYTES * (dense_begin + column_of(s, lane)), tables, lane);
    flush(acc, workspace + ((size_t)slice * ROWS * row_blocks + block) * OUTPUTS, row_blocks * OUTPUTS, lane);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(arrived + part, 1) == slices - 1;
  __syncthreads();
  if (!is_last) return end_launch(THREADS);
  __threadfence();
  const Outputs out = {nullptr, nullptr, y, out_features, 0, out_features, length, rows};
  for (int i = threadIdx.x; i < (block1 - block0) * SUMS; i += THREADS) {
    const int block = block0 + i / SUMS, inner = i % SUMS, row = inner / OUTPUTS;
    float sum = totals.bias[row];
    for (int s = 0; s < slices; s++)
      sum += __ldcg(workspace + ((size_t)(s * ROWS + row) * row_blocks + block) * OUTPUTS + inner % OUTPUTS);
    const int at = out.place(block, inner);
    if (at >= 0) y[at] = to_bits(sum);
  }
  if (threadIdx.x == 0) arrived[part] = 0;  // ready for the next launch
  end_launch(THREADS);
}
#endif
