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
// entries clash; POS_BITS of an item tell its column. Up to 8 rows of x share the gathers: one more mma a row, and two
// rows lie in one word of shared memory. Where x does not fit, the columns are taken in phases.
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
// defines: those of vptq.cuh, KERNEL, COPIES (of the residual book, 8 unless shared memory is short), ROWS (1, 2, 4, 8),
// WARPS, RESIDENT (CTAs of two launches that share an SM)
#include "vptq.cuh"

#define STAGED 0
#define DIRECT 1
#define SLICED 2
constexpr int THREADS = 32 * WARPS;
constexpr u32 RES_SLOTS = RES_BITS ? COPIES << RES_BITS : 0;
constexpr u32 BOOK_BYTES = 16 * HALVES * ENTRIES;
constexpr u32 RES_BYTES = 16 * HALVES * RES_SLOTS;
constexpr int SUMS = ROWS * OUTPUTS;             // partial sums of one row block
constexpr int X_BYTES = ROWS == 1 ? 2 : 4;       // of a column in one plane: one row, or a pair of rows
constexpr int PLANES = ROWS == 1 ? 1 : ROWS / 2;

typedef float Accumulators[ROWS][HALVES][4];

DEVICE void gather(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}

// ---- the product of one step ----
struct Tables {
  u32 book, residual, x;          // shared addresses; residual is this lane's copy
  int plane;                      // bytes from one plane of x to the next
  u32 select0, select1, odd;      // where this lane's x goes in the two registers of its B fragment; odd rows: + odd
  DEVICE Tables(const void* book, const void* residual, const void* x, int plane, int lane)
      : book(shared_address(book)), residual(shared_address(residual) + 16 * (lane % COPIES)), x(shared_address(x)), plane(plane) {
    const u32 here = lane >> 2 & 1 ? 0x1044 : 0x4410;
    select0 = lane >> 3 & 1 ? 0x4444 : here;
    select1 = lane >> 3 & 1 ? here : 0x4444;
    odd = lane >> 2 & 1 ? 0x2200 : 0x0022;
  }
  DEVICE u32 select(int which, int row) const {
    const u32 even = which ? select1 : select0;
    return row % 2 && even != 0x4444 ? even + odd : even;
  }
};
// Where this lane's x of step p lies: in bank `lane`, for one row (two columns a word) and for pairs (two rows a word).
DEVICE u32 x_offset(u32 p, int lane) { return ROWS == 1 ? (p >> 1) * 128 + lane * 4 + (p & 1) * 2 : p * 128 + lane * 4; }

DEVICE void multiply(Accumulators& acc, const u32 (&a)[HALVES][4], u32 x_at, const Tables& t) {
  u32 x[PLANES];
#pragma unroll
  for (int p = 0; p < PLANES; p++) {
    if constexpr (ROWS == 1) {
      u16 one;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(one) : "r"(t.x + x_at));
      x[p] = one;
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[p]) : "r"(t.x + p * t.plane + x_at));
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 b0 = __byte_perm(x[r / 2], 0, t.select(0, r)), b1 = __byte_perm(x[r / 2], 0, t.select(1, r));
#pragma unroll
    for (int h = 0; h < HALVES; h++) mma16<FP16>(acc[r][h], a[h][0], a[h][1], a[h][2], a[h][3], b0, b1);
  }
}
DEVICE void take(Accumulators& acc, u32 v, u32 x_at, const Tables& t) {
  u32 a[HALVES][4];
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    gather(a[h], t.book + 16 * (h * ENTRIES + main_index(v)));
    if constexpr (RES_BITS > 0) {
      u32 b[4];
      gather(b, t.residual + 16 * (h * RES_SLOTS + COPIES * residual_index(v)));
#pragma unroll
      for (int j = 0; j < 4; j++) a[h][j] = add2(a[h][j], b[j]);
    }
  }
  multiply(acc, a, x_at, t);
}
template <int S>
DEVICE void take_chunk(Accumulators& acc, const u32 (&w)[WORDS], u32 first, const Tables& t, int lane) {
  if constexpr (S < CHUNK) {
    const u32 v = item<S>(w);
    take(acc, v, x_offset(((first + S) & ~(WINDOW - 1)) + position(v), lane), t);
    take_chunk<S + 1>(acc, w, first, t, lane);
  }
}
// Outlier columns: 32 of them are one A fragment, laid out by the host.
DEVICE void take_dense(Accumulators& acc, const uint4* fragments, u32 x_at, const Tables& t, int lane) {
  u32 a[HALVES][4];
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    const uint4 q = stream_load(fragments + 32 * h + lane);
    a[h][0] = q.x, a[h][1] = q.y, a[h][2] = q.z, a[h][3] = q.w;
  }
  multiply(acc, a, x_at, t);
}
// Writes the sums of one row block and clears the accumulators; lane 4 g holds output g.
DEVICE void flush(Accumulators& acc, float* to, int row_stride, int lane) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      float (&d)[4] = acc[r][h];
      float sum = lane & 2 ? d[2] + d[3] : d[0] + d[1];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if ((lane & 3) == 0) to[r * row_stride + h * 8 + (lane >> 2)] = sum;
      d[0] = d[1] = d[2] = d[3] = 0;
    }
}

// ---- staging ----
// Every thread calls this before it waits for inputs, and `book_ready` after the __syncthreads that follows.
DEVICE void stage_book(char* to, const char* book, u64* barrier) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    fence_barriers();
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(shared_address(barrier)), "r"(BOOK_BYTES)
                 : "memory");
    constexpr u32 PIECE = BOOK_BYTES < 16384 ? BOOK_BYTES : 16384;
    for (u32 at = 0; at < BOOK_BYTES; at += PIECE)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   ::"r"(shared_address(to) + at), "l"(book + at), "r"(PIECE), "r"(shared_address(barrier)) : "memory");
  }
#else
  for (u32 i = threadIdx.x; i < BOOK_BYTES / 16; i += THREADS) ((uint4*)to)[i] = ((const uint4*)book)[i];
#endif
}
// The residual book on its way to shared memory: held while other loads start, so that their latencies overlap.
struct Residual {
  static constexpr int COUNT = RES_BITS ? HALVES << RES_BITS : 0;
  uint4 held[COUNT / THREADS + 1];
  DEVICE void load(const uint4* residual) {
#pragma unroll
    for (int i = 0; i <= COUNT / THREADS; i++)
      if ((int)threadIdx.x + i * THREADS < COUNT) held[i] = residual[threadIdx.x + i * THREADS];
  }
  DEVICE void store(char* to) const {  // neighbours begin with different copies: no two in one bank
#pragma unroll
    for (int i = 0; i <= COUNT / THREADS; i++)
      for (int c = 0; c < COPIES; c++)
        if ((int)threadIdx.x + i * THREADS < COUNT)
          ((uint4*)to)[(threadIdx.x + i * THREADS) * COPIES + (c + threadIdx.x) % COPIES] = held[i];
  }
};
DEVICE void book_ready(u64* barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier, 0);
#endif
}

struct Inputs {
  const u16* x;        // [rows][in_features]
  const u32* affine;   // [stored columns, whole eights]: scale in the low half, bias in the high half; zero for padding
  const u16* source;   // [stored columns]: the input a column belongs to, or null where they are the same
  int in_features, rows;
};
struct Eight { u32 affine[8]; uint4 source; };  // of eight neighbouring columns, what depends on no other kernel
DEVICE Eight load_eight(const Inputs& in, int column) {
  Eight e;
  *(uint4*)&e.affine[0] = *(const uint4*)(in.affine + column), *(uint4*)&e.affine[4] = *(const uint4*)(in.affine + column + 4);
  if (in.source) e.source = *(const uint4*)(in.source + column);
  return e;
}
DEVICE u32 half_of(const uint4& q, int j) {  // j is a constant once unrolled
  const u32 pair = j < 2 ? q.x : j < 4 ? q.y : j < 6 ? q.z : q.w;
  return j % 2 ? pair >> 16 : pair & 0xffff;
}
DEVICE uint4 load_x(const Inputs& in, const Eight& e, int row, int column) {
  const u16* x = in.x + (size_t)row * in.in_features;
  if (row >= in.rows) return make_uint4(0, 0, 0, 0);
  if (!in.source && column + 8 <= in.in_features && !((size_t)(x + column) & 15)) return *(const uint4*)(x + column);
  u32 value[8];
#pragma unroll
  for (int j = 0; j < 8; j++) value[j] = e.affine[j] ? x[in.source ? half_of(e.source, j) : column + j] : 0;
  return make_uint4(value[0] | value[1] << 16, value[2] | value[3] << 16, value[4] | value[5] << 16, value[6] | value[7] << 16);
}
DEVICE float scaled(const uint4& x, const Eight& e, int j, float& bias) {
  const float value = to_float((u16)half_of(x, j));
  bias += value * high_float(e.affine[j]);
  return value * low_float(e.affine[j]);
}
// Stages stored columns [first, first + count), both whole eights, times their scale. LINED: pairs of rows lie as x_offset
// wants them, else one column after the other. Waits for the kernel before once the first scales are on their way.
template <bool LINED>
DEVICE void stage_x(float (&bias)[ROWS], char* to, int plane, const Inputs& in, int first, int count) {
  constexpr int BATCH = THREADS * RESIDENT > 512 || ROWS == 8 ? 1 : ROWS == 1 ? 4 : 2;  // eights of a thread on their way, as registers allow
  const int units = count / 8;
  for (int begin = threadIdx.x; begin < units; begin += BATCH * THREADS) {
    Eight eights[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
      if (begin + b * THREADS < units) eights[b] = load_eight(in, first + 8 * (begin + b * THREADS));
    wait_for_inputs();
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
      uint4 even[BATCH], odd[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        if (begin + b * THREADS < units) {
          even[b] = load_x(in, eights[b], r, first + 8 * (begin + b * THREADS));
          if constexpr (ROWS > 1) odd[b] = load_x(in, eights[b], r + 1, first + 8 * (begin + b * THREADS));
        }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int unit = begin + b * THREADS;
        if (unit >= units) break;
        u32 w[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float value = scaled(even[b], eights[b], j, bias[r]);
          if constexpr (ROWS > 1) w[j] = pack2(value, scaled(odd[b], eights[b], j, bias[ROWS > 1 ? r + 1 : 0]));
          else w[j / 2] = j % 2 ? w[j / 2] | pack2(0.f, value) : pack2(value, 0.f);
        }
        char* const at = to + r / 2 * plane + (ROWS == 1 ? 16 * unit : LINED ? unit / 8 * 256 + unit % 8 * 16 : 32 * unit);
        constexpr int STEP = LINED && ROWS > 1 ? 2 : 1;
        *(uint4*)at = make_uint4(w[0], w[STEP], w[2 * STEP], w[3 * STEP]);
        if constexpr (ROWS > 1) *(uint4*)(at + (LINED ? 128 : 16)) = LINED ? make_uint4(w[1], w[3], w[5], w[7]) : make_uint4(w[4], w[5], w[6], w[7]);
      }
    }
  }
  wait_for_inputs();  // every thread must, also one without a column
}
// The sum over the CTA of every thread's bias terms: `collect` before a __syncthreads, `total` after it, read after another.
struct Biases {
  float sum[ROWS], of_warp[WARPS][ROWS];
  DEVICE void collect(const float (&bias)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float sum = warp_sum(bias[r]);
      if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][r] = sum;
    }
  }
  DEVICE void total() {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
      const float total = warp_sum(lane < WARPS ? of_warp[lane][r] : 0.f);
      if (lane == 0) sum[r] = total;
    }
  }
};
struct Outputs {
  u16* y;  // [rows][out_features]
  int out_features, length, rows;
  DEVICE void store(int block, int inner, float value) const {  // inner counts rows, then outputs of the row block
    const int row = inner / OUTPUTS, within = inner % OUTPUTS, output = block * length + within;
    if (row < rows && within < length && output < out_features) y[(size_t)row * out_features + output] = to_bits(value);
  }
};

#if KERNEL == STAGED
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) vptq_staged(
    const char* stream, const char* book, const uint4* residual, const uint4* dense, const u32* affine, const u16* source,
    const u16* x, u16* y, int rows, int in_features, int out_features, int length, int row_blocks, int chunks, int phase,
    int x_columns, int dense_steps) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 barrier;
  __shared__ Biases biases;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  stage_book(shared, book, &barrier);

  const int block0 = (int)((long long)row_blocks * blockIdx.x / gridDim.x);
  const int here = (int)((long long)row_blocks * (blockIdx.x + 1) / gridDim.x) - block0;
  const int plane = X_BYTES * x_columns;
  char* const shared_x = shared + BOOK_BYTES + RES_BYTES;
  float* const partial = (float*)(shared_x + PLANES * plane);  // [WARPS + here][SUMS]
  float* const sums = partial + (WARPS + here) * SUMS;         // [here][SUMS], only with several phases
  const Tables tables(shared, shared + BOOK_BYTES, shared_x, plane, lane);
  const Inputs in = {x, affine, source, in_features, rows};
  const Outputs out = {y, out_features, length, rows};
  Accumulators acc = {};
  float bias[ROWS] = {};

  for (int chunk0 = 0; chunk0 < chunks; chunk0 += phase) {
    const bool first = chunk0 == 0, last = chunk0 + phase >= chunks;
    const int each = last ? chunks - chunk0 : phase;
    // This warp's run of chunks. Two are on their way before we wait: they depend on no other kernel.
    const int total = here * each, begin = total * warp / WARPS, end = total * (warp + 1) / WARPS;
    int block = begin / each, chunk = begin % each, next_chunk = chunk;
    const char* next = stream + ((size_t)(block0 + block) * chunks + chunk0 + chunk) * CHUNK_BYTES;
    u32 words[2][WORDS];
    const auto fetch = [&](int slot, int at) {
      if (at >= end) return;
      load_chunk(words[slot], next, lane);
      next += CHUNK_BYTES;
      if (++next_chunk == each) next_chunk = 0, next += (size_t)(chunks - each) * CHUNK_BYTES;
    };
    fetch(0, begin);
    fetch(1, begin + 1);
    Residual residuals;
    if (first) residuals.load(residual);
    stage_x<true>(bias, shared_x, plane, in, 256 * chunk0, 256 * each + (last ? 32 * dense_steps : 0));
    if (first) residuals.store(shared + BOOK_BYTES);
    if (last) biases.collect(bias);
    __syncthreads();
    if (last) biases.total();
    book_ready(&barrier);

    for (int at = begin; at < end; at += 2) {
#pragma unroll
      for (int slot = 0; slot < 2; slot++) {
        if (at + slot >= end) break;
        take_chunk<0>(acc, words[slot], CHUNK * chunk, tables, lane);
        fetch(slot, at + slot + 2);
        const bool finished = ++chunk == each;
        if (finished && last)
          for (int s = 0; s < dense_steps; s++)
            take_dense(acc, dense + ((size_t)(block0 + block) * dense_steps + s) * HALVES * 32, x_offset(CHUNK * each + s, lane), tables, lane);
        if (finished || at + slot == end - 1) flush(acc, partial + (warp + block) * SUMS, OUTPUTS, lane);
        if (finished) chunk = 0, block++;
      }
    }
    __syncthreads();

    // Runs are contiguous, so slot warp + block is unique; four threads add the warps of a block, always in one order.
    for (int i = threadIdx.x; i < 4 * here * SUMS; i += THREADS) {
      const int b = i / (4 * SUMS), inner = i / 4 % SUMS;
      float sum = 0;
      for (int w = b * WARPS / here + i % 4; w < WARPS && total * w / WARPS < (b + 1) * each; w += 4)
        if (total * (w + 1) / WARPS > max(b * each, total * w / WARPS)) sum += partial[(w + b) * SUMS + inner];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (i % 4) continue;
      if (!first) sum += sums[i / 4];
      if (last) out.store(block0 + b, inner, sum + biases.sum[inner / OUTPUTS]);
      else sums[i / 4] = sum;
    }
  }
}
#elif KERNEL == DIRECT
// One row block per CTA, one row of x; no codebook in shared memory. Outlier columns are left to the staged kernel.
DEVICE uint4 gather_global(const uint4* p) {  // volatile: it must be on its way before we wait for inputs
  uint4 q;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
  return q;
}
extern "C" __global__ void __launch_bounds__(THREADS) vptq_direct(
    const char* stream, const uint4* book, const uint4* residual, const u32* affine, const u16* source, const u16* x, u16* y,
    int rows, int in_features, int out_features, int length, int chunks) {
  extern __shared__ __align__(128) char shared_x[];
  __shared__ uint4 shared_residual[RES_BITS ? HALVES << RES_BITS : 1];
  __shared__ float partial[WARPS][OUTPUTS];
  __shared__ Biases biases;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  u32 words[WORDS], v[CHUNK];
  uint4 entry[CHUNK][HALVES];
  const char* from = stream + (size_t)blockIdx.x * chunks * CHUNK_BYTES;
  const auto lookup = [&](int chunk) {  // the entries of this chunk and the words of the next
    all_items(v, words);
#pragma unroll
    for (int s = 0; s < CHUNK; s++)
#pragma unroll
      for (int h = 0; h < HALVES; h++) entry[s][h] = gather_global(book + h * ENTRIES + main_index(v[s]));
    if (chunk + WARPS < chunks) load_chunk(words, from + (chunk + WARPS) * CHUNK_BYTES, lane);
  };
  if (warp < chunks) load_chunk(words, from + warp * CHUNK_BYTES, lane);
  if constexpr (RES_BITS > 0)
    for (int i = threadIdx.x; i < HALVES << RES_BITS; i += THREADS) shared_residual[i] = residual[i];
  if (warp < chunks) lookup(warp);
  float bias[1] = {};
  stage_x<false>(bias, shared_x, 0, {x, affine, source, in_features, rows}, 0, 256 * chunks);
  biases.collect(bias);
  __syncthreads();
  biases.total();

  float acc[OUTPUTS] = {};
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    if (chunk != warp) lookup(chunk);
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      const float value = to_float(*(const u16*)(shared_x + 2 * gathered_column(v[s], CHUNK * chunk + s, lane)));
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
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
    float sum = biases.sum[0];
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[w][threadIdx.x];
    const Outputs out = {y, out_features, length, rows};
    out.store(blockIdx.x, threadIdx.x, sum);
  }
}
#elif KERNEL == SLICED
// CTA (part, slice): the codebook slice in shared memory, all of x, and the lists of its row blocks, one warp a block.
// A list holds the items of one row block, slice and range of `range` columns, 4 bytes each, padded to whole steps
// with items whose x is the zero behind the range. The columns of a list are in no order.
extern "C" __global__ void __launch_bounds__(THREADS, 1) vptq_sliced(
    const u32* stream, const int* offsets, const char* book, const uint4* residual, const uint4* dense, const u32* affine,
    const u16* source, const u16* x, u16* y, float* workspace, int* arrived, int rows, int in_features, int out_features, int length,
    int row_blocks, int slices, int residual_books, int ranges, int range, int dense_begin, int dense_steps) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 barrier;
  __shared__ Biases biases;
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x % slices, part = blockIdx.x / slices;
  const int parts = gridDim.x / slices;
  launch_dependents();
  stage_book(shared, book + (size_t)slice * BOOK_BYTES, &barrier);
  Residual residuals;
  residuals.load(residual + (size_t)(residual_books > 1 ? slice : 0) * (HALVES << RES_BITS));
  const int block0 = (int)((long long)row_blocks * part / parts), block1 = (int)((long long)row_blocks * (part + 1) / parts);

  char* const shared_x = shared + BOOK_BYTES + RES_BYTES;  // [ranges][range + 2], whole eights, then the dense columns
  const int columns = dense_begin + 32 * dense_steps, plane = X_BYTES * columns;
  float bias[ROWS] = {};
  stage_x<false>(bias, shared_x, plane, {x, affine, source, in_features, rows}, 0, columns);
  residuals.store(shared + BOOK_BYTES);
  biases.collect(bias);
  __syncthreads();
  biases.total();
  book_ready(&barrier);

  const Tables tables(shared, shared + BOOK_BYTES, shared_x, plane, lane);
  Accumulators acc = {};
  constexpr int DEPTH = 6;  // steps on their way while as many are taken
  for (int block = block0 + warp; block < block1; block += WARPS) {
    // Lists of one row block and slice follow each other; lane r knows where the list of range r begins.
    const int* list = offsets + ((size_t)block * slices + slice) * ranges;
    const int bounds = lane < ranges ? list[lane] : 0x7fffffff, end = list[ranges];
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
#pragma unroll
        for (int j = 0; j < DEPTH; j++)
          if (at + j < end) {
            const int r = __popc(__ballot_sync(~0u, bounds <= at + j)) - 1;
            take(acc, v[slot][j], X_BYTES * (r * (range + 2) + position(v[slot][j])), tables);
          }
        at += DEPTH;
      }
    }
    if (slice == 0)
      for (int s = 0; s < dense_steps; s++)
        take_dense(acc, dense + ((size_t)block * dense_steps + s) * HALVES * 32, X_BYTES * (dense_begin + column_of(s, lane)), tables, lane);
    flush(acc, workspace + ((size_t)slice * ROWS * row_blocks + block) * OUTPUTS, row_blocks * OUTPUTS, lane);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(arrived + part, 1) == slices - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const Outputs out = {y, out_features, length, rows};
  for (int i = threadIdx.x; i < (block1 - block0) * SUMS; i += THREADS) {
    const int block = block0 + i / SUMS, inner = i % SUMS, row = inner / OUTPUTS;
    float sum = biases.sum[row];
    for (int s = 0; s < slices; s++)
      sum += __ldcg(workspace + ((size_t)(s * ROWS + row) * row_blocks + block) * OUTPUTS + inner % OUTPUTS);
    out.store(block, inner, sum);
  }
  if (threadIdx.x == 0) arrived[part] = 0;  // ready for the next launch
}
#endif
