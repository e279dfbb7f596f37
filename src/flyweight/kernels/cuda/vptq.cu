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
// entries clash; POS_BITS of an item tell its column. Lane L owns the columns L mod 32: reading x never clashes.
//
//      row blocks of a CTA        |  block 0              |  block 1              | …
//      chunks of 8 steps          |  0  1  2  3  4  5  6  |  0  1  2  3  4  5  6  |
//      warps, contiguous runs     |  warp 0   |  warp 1   |  warp 2   | …          one partial sum per (warp, block)
//
// With SPLIT a cluster of CTAs shares row blocks and each takes a part of the columns: less x to stage for large K.
// Direct kernel, for weights too small to pay for staging: the same stream, entries gathered through L1 and L2.
// Sliced kernel, for codebooks larger than shared memory, or one for each group of columns: a CTA holds one slice and
// takes the items that fall into it; the partial sums of the slices are added in a fixed order by the last CTA.
//
// defines: KERNEL, MAIN_BITS, RES_BITS, POS_BITS, ITEM_BYTES (3 or 4), HALVES (16-byte pieces of an entry), COPIES (of the
// residual book, 8 unless shared memory is short), ROWS, FP16, WARPS, RESIDENT (CTAs of two launches that share an SM),
// CLUSTER (CTAs that share one fetch of the codebook), SPLIT
#include "common.cuh"

#define STAGED 0
#define DIRECT 1
#define SLICED 2
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 8;                            // steps
constexpr int WORDS = CHUNK * ITEM_BYTES / 4;       // of one lane in one chunk
constexpr int CHUNK_BYTES = 32 * CHUNK * ITEM_BYTES;
constexpr u32 ENTRIES = 1u << MAIN_BITS;
constexpr u32 RES_SLOTS = RES_BITS ? COPIES << RES_BITS : 0;
constexpr u32 BOOK_BYTES = 16 * HALVES * ENTRIES;
constexpr u32 RES_BYTES = 16 * HALVES * RES_SLOTS;
constexpr u32 WINDOW = 1u << POS_BITS;              // steps
constexpr int OUTPUTS = 8 * HALVES;
constexpr int SUMS = ROWS * OUTPUTS;                // partial sums of one row block

typedef float Accumulators[ROWS][HALVES][4];

// ---- loads ----
DEVICE uint4 stream_load(const void* p) {
  uint4 q;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
  return q;
}
DEVICE uint2 stream_load2(const void* p) {
  uint2 q;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(q.x), "=r"(q.y) : "l"(p));
  return q;
}
DEVICE u32 stream_load1(const void* p) {
  u32 q;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(q) : "l"(p));
  return q;
}
DEVICE void gather(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
}
DEVICE u32 add2(u32 a, u32 b) {
  u32 c;
#if FP16
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3f803f80), "r"(b));
#endif
  return c;
}
DEVICE u32 cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900 && CLUSTER > 1
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
DEVICE void cluster_sync() {
#if __CUDA_ARCH__ >= 900 && CLUSTER > 1
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// ---- items ----
DEVICE void load_chunk(u32 (&w)[WORDS], const char* chunk, int lane) {
  uint4 q = stream_load(chunk + 16 * lane);
  w[0] = q.x, w[1] = q.y, w[2] = q.z, w[3] = q.w;
  if constexpr (ITEM_BYTES == 3) {
    uint2 r = stream_load2(chunk + 512 + 8 * lane);
    w[4] = r.x, w[5] = r.y;
  } else {
    uint4 r = stream_load(chunk + 512 + 16 * lane);
    w[4] = r.x, w[5] = r.y, w[WORDS - 2] = r.z, w[WORDS - 1] = r.w;
  }
}
template <int S>
DEVICE u32 item(const u32 (&w)[WORDS]) {  // bits above the fields may be anything
  if constexpr (ITEM_BYTES == 4) {
    return w[S];
  } else {
    constexpr int word = 3 * S / 4, byte = 3 * S % 4;
    if constexpr (byte == 0) return w[word];
    else if constexpr (byte == 1) return w[word] >> 8;
    else return __byte_perm(w[word], w[word + 1], byte == 2 ? 0x5432 : 0x6543);
  }
}
DEVICE u32 main_index(u32 v) { return v & (ENTRIES - 1); }
DEVICE u32 residual_index(u32 v) { return (v >> MAIN_BITS) & ((1u << RES_BITS) - 1); }
DEVICE u32 position(u32 v) { return (v >> (MAIN_BITS + RES_BITS)) & (WINDOW - 1); }

// Lane L supplies the x of the item whose entry another lane fetches: bits g2 g1 g0 t1 t0 of L become g1 g2 t1 t0 g0.
// This is the inverse: the lane, and so the column mod 32, that belongs to the entry this lane fetches.
DEVICE int column_lane(int l) { return (l >> 3 & 1) << 4 | (l >> 4 & 1) << 3 | (l & 1) << 2 | (l >> 1 & 3); }

struct Tables {
  u32 book, residual, x;  // shared addresses; residual is this lane's copy, x this lane's word
  int x_row;              // bytes from one row of x to the next
  u32 select0, select1;   // where this lane's x goes in the two registers of its B fragment
  DEVICE Tables(const void* book, const void* residual, const void* x, int x_row, int lane)
      : book(shared_address(book)), residual(shared_address(residual) + 16 * (lane % COPIES)), x(shared_address(x)), x_row(x_row) {
    u32 here = lane >> 2 & 1 ? 0x1044 : 0x4410;
    select0 = lane >> 3 & 1 ? 0x4444 : here;
    select1 = lane >> 3 & 1 ? here : 0x4444;
  }
};
// x in shared memory: column 32 p + L is half p % 2 of word L of line p / 2, so lane L always reads bank L.
DEVICE u32 x_offset(u32 p, int lane) { return (p >> 1) * 128 + lane * 4 + (p & 1) * 2; }

DEVICE void multiply(Accumulators& acc, const u32 (&a)[HALVES][4], u32 x_at, const Tables& t) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(t.x + r * t.x_row + x_at));
    u32 b0 = __byte_perm(x, 0, t.select0), b1 = __byte_perm(x, 0, t.select1);
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
    u32 v = item<S>(w);
    take(acc, v, x_offset(((first + S) & ~(WINDOW - 1)) + position(v), lane), t);
    take_chunk<S + 1>(acc, w, first, t, lane);
  }
}
// Outlier columns: 32 of them are one A fragment, laid out by the host.
DEVICE void take_dense(Accumulators& acc, const uint4* fragments, u32 x_at, const Tables& t, int lane) {
  u32 a[HALVES][4];
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    uint4 q = stream_load(fragments + 32 * h + lane);
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
// One thread fetches this CTA's share of the codebook, for every CTA of its cluster.
DEVICE void fetch_book(char* to, const char* from, u64* barrier, u32 rank) {
#if __CUDA_ARCH__ >= 900
  constexpr u32 share = BOOK_BYTES / CLUSTER, piece = share < 16384 ? share : 16384;
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(shared_address(barrier)), "r"(BOOK_BYTES)
               : "memory");
  for (u32 at = rank * share; at < (rank + 1) * share; at += piece)
#if CLUSTER > 1
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to) + at), "l"(from + at), "r"(piece), "r"(shared_address(barrier)), "h"((u16)((1 << CLUSTER) - 1))
                 : "memory");
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to) + at), "l"(from + at), "r"(piece), "r"(shared_address(barrier)) : "memory");
#endif
#endif
}
// Every thread calls these before it waits for inputs, and `book_ready` after the __syncthreads that follows.
DEVICE void stage_book(char* to, const char* book, u64* barrier, u32 rank) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    fence_barriers();
  }
  cluster_sync();  // no CTA may receive before its barrier stands
  if (threadIdx.x == 0) fetch_book(to, book, barrier, rank);
#else
  for (u32 i = threadIdx.x; i < BOOK_BYTES / 16; i += THREADS) ((uint4*)to)[i] = ((const uint4*)book)[i];
#endif
}
DEVICE void stage_residual(char* to, const uint4* residual) {
  for (u32 i = threadIdx.x; i < HALVES * RES_SLOTS; i += THREADS) ((uint4*)to)[i] = residual[i / COPIES];
}
DEVICE void book_ready(u64* barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier, 0);
#endif
}

struct Inputs {
  const u16* x;        // [rows][in_features]
  const u32* affine;   // [stored columns]: scale in the low half, bias in the high half; zero for padding
  const u16* source;   // [stored columns]: the input a column belongs to, or null where they are the same
  int in_features, rows;
};
// Stages stored columns [first, first + count), count even. LINED: in the lines of x_offset, else one after the other.
// Waits for the kernel before once the first scales, which depend on nothing, are on their way.
template <bool LINED>
DEVICE void stage_x(float (&bias)[ROWS], char* to, int x_row, const Inputs& in, int first, int count) {
  constexpr int BATCH = 4;
  const int words = LINED ? (count + 63) / 64 * 32 : count / 2;
  for (int begin = threadIdx.x; begin < words; begin += BATCH * THREADS) {
    u32 affine[BATCH][2];
    int from[BATCH][2];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int i = begin + b * THREADS, within = LINED ? i / 32 * 64 + 32 * j + i % 32 : 2 * i + j;
        affine[b][j] = within < count ? in.affine[first + within] : 0;
        from[b][j] = first + within;
        if (affine[b][j] && in.source) from[b][j] = in.source[first + within];
      }
    wait_for_inputs();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float value[BATCH][2];
#pragma unroll
      for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          value[b][j] = affine[b][j] && r < in.rows ? to_float(in.x[(size_t)r * in.in_features + from[b][j]]) : 0.f;
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int i = begin + b * THREADS;
        bias[r] += value[b][0] * high_float(affine[b][0]) + value[b][1] * high_float(affine[b][1]);
        if (i < words) *(u32*)(to + r * x_row + 4 * i) = pack2(value[b][0] * low_float(affine[b][0]), value[b][1] * low_float(affine[b][1]));
      }
    }
  }
  wait_for_inputs();  // every thread must, also one without a column
}
// The sum over the CTA of every thread's bias term, for all threads; `scratch` is [WARPS][ROWS].
DEVICE void share_bias(const float (&bias)[ROWS], float* scratch) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float sum = warp_sum(bias[r]);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32 * ROWS + r] = sum;
  }
}
DEVICE float total_bias(const float* scratch, int row) {
  float sum = 0;
  for (int w = 0; w < WARPS; w++) sum += scratch[w * ROWS + row];
  return sum;
}
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
    const u16* x, u16* y, int rows, int in_features, int out_features, int length, int row_blocks, int chunks, int dense_steps) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 barrier;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 rank = cluster_rank();
  launch_dependents();
  stage_book(shared, book, &barrier, rank);

  // Our row blocks, and with SPLIT our chunks of them; a window never straddles two CTAs.
  const int parts = gridDim.x / (SPLIT ? CLUSTER : 1), part = blockIdx.x / (SPLIT ? CLUSTER : 1);
  const int block0 = (int)((long long)row_blocks * part / parts), here = (int)((long long)row_blocks * (part + 1) / parts) - block0;
  constexpr int align = WINDOW > CHUNK ? WINDOW / CHUNK : 1;
  const int chunk0 = SPLIT ? chunks / align * rank / CLUSTER * align : 0;
  const int each = (SPLIT ? chunks / align * (rank + 1) / CLUSTER * align : chunks) - chunk0;
  const int dense_here = !SPLIT || rank == CLUSTER - 1 ? dense_steps : 0;

  const int columns = 256 * each + 32 * dense_here, x_row = (columns + 63) / 64 * 128;
  char* const shared_x = shared + BOOK_BYTES + RES_BYTES;
  float* const biases = (float*)(shared_x + ROWS * x_row);  // [WARPS][ROWS]
  float* const partial = biases + WARPS * ROWS;             // [WARPS + here][SUMS]
  float* const sums = partial + (WARPS + here) * SUMS;      // with SPLIT: [here][SUMS]

  // This warp's run of chunks. Two are on their way before we wait: they depend on no other kernel.
  const int total = here * each, begin = total * warp / WARPS, end = total * (warp + 1) / WARPS;
  const char* next = stream + ((size_t)(block0 + begin / max(each, 1)) * chunks + chunk0 + begin % max(each, 1)) * CHUNK_BYTES;
  int next_chunk = begin % max(each, 1);
  u32 words[2][WORDS];
  const auto fetch = [&](int slot, int at) {
    if (at >= end) return;
    load_chunk(words[slot], next, lane);
    next += CHUNK_BYTES;
    if (++next_chunk == each) next_chunk = 0, next += (size_t)(chunks - each) * CHUNK_BYTES;
  };
  fetch(0, begin);
  fetch(1, begin + 1);
  stage_residual(shared + BOOK_BYTES, residual);

  float bias[ROWS] = {};
  stage_x<true>(bias, shared_x, x_row, {x, affine, source, in_features, rows}, 256 * chunk0, columns);
  share_bias(bias, biases);
  __syncthreads();
  book_ready(&barrier);

  const Tables tables(shared, shared + BOOK_BYTES, shared_x, x_row, lane);
  Accumulators acc = {};
  int block = begin / max(each, 1), chunk = begin % max(each, 1);
  for (int at = begin; at < end; at += 2) {
#pragma unroll
    for (int slot = 0; slot < 2; slot++) {
      if (at + slot >= end) break;
      take_chunk<0>(acc, words[slot], CHUNK * chunk, tables, lane);
      fetch(slot, at + slot + 2);
      const bool finished = ++chunk == each;
      if (finished)
        for (int s = 0; s < dense_here; s++)
          take_dense(acc, dense + ((size_t)(block0 + block) * dense_steps + s) * HALVES * 32, x_offset(CHUNK * each + s, lane), tables, lane);
      if (finished || at + slot == end - 1) flush(acc, partial + (warp + block) * SUMS, OUTPUTS, lane);
      if (finished) chunk = 0, block++;
    }
  }
  __syncthreads();

  // Runs are contiguous, so slot warp + block is unique; the warps of a block are added in their order.
  const Outputs out = {y, out_features, length, rows};
  for (int i = threadIdx.x; i < here * SUMS; i += THREADS) {
    const int b = i / SUMS, inner = i % SUMS;
    float sum = total_bias(biases, inner / OUTPUTS);
    for (int w = total ? b * each * WARPS / total : 0; w < WARPS && total * w / WARPS < (b + 1) * each; w++)
      if (total * (w + 1) / WARPS > max(b * each, total * w / WARPS)) sum += partial[(w + b) * SUMS + inner];
    if (SPLIT) sums[i] = sum;
    else out.store(block0 + b, inner, sum);
  }
#if SPLIT && __CUDA_ARCH__ >= 900
  cluster_sync();
  for (int i = threadIdx.x + THREADS * rank; i < here * SUMS; i += THREADS * CLUSTER) {
    float sum = 0;
    for (u32 c = 0; c < CLUSTER; c++) {
      const int each_c = chunks / align * (c + 1) / CLUSTER * align - chunks / align * c / CLUSTER * align;
      const int columns_c = 256 * each_c + (c == CLUSTER - 1 ? 32 * dense_steps : 0);  // where that CTA keeps its sums
      const char* at = shared_x + ROWS * ((columns_c + 63) / 64 * 128) + 4 * (WARPS * ROWS + (WARPS + here) * SUMS + i);
      u32 remote;
      float value;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(at)), "r"(c));
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote));
      sum += value;
    }
    out.store(block0 + i / SUMS, i % SUMS, sum);
  }
  cluster_sync();  // nobody leaves while others still read from it
#endif
}
#elif KERNEL == DIRECT
// One row block per CTA; no codebook in shared memory. Dense columns are left to the staged kernel.
extern "C" __global__ void __launch_bounds__(THREADS) vptq_direct(
    const char* stream, const uint4* book, const uint4* residual, const u32* affine, const u16* source, const u16* x, u16* y,
    int rows, int in_features, int out_features, int length, int chunks) {
  __shared__ uint4 shared_residual[RES_BITS ? HALVES << RES_BITS : 1];
  __shared__ float partial[WARPS][SUMS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  launch_dependents();
  u32 words[WORDS];
  const char* from = stream + ((size_t)blockIdx.x * chunks + warp) * CHUNK_BYTES;
  if (warp < chunks) load_chunk(words, from, lane);
  if constexpr (RES_BITS > 0) {
    for (int i = threadIdx.x; i < HALVES << RES_BITS; i += THREADS) shared_residual[i] = residual[i];
    __syncthreads();
  }

  float acc[ROWS][OUTPUTS] = {}, bias[ROWS] = {};
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    uint4 entry[CHUNK][HALVES];
    u32 v[CHUNK];
    v[0] = item<0>(words), v[1] = item<1>(words), v[2] = item<2>(words), v[3] = item<3>(words);
    v[4] = item<4>(words), v[5] = item<5>(words), v[6] = item<6>(words), v[7] = item<7>(words);
#pragma unroll
    for (int s = 0; s < CHUNK; s++)
#pragma unroll
      for (int h = 0; h < HALVES; h++) entry[s][h] = __ldg(book + h * ENTRIES + main_index(v[s]));
    if (chunk + WARPS < chunks) load_chunk(words, from += WARPS * CHUNK_BYTES, lane);
    u32 scale[CHUNK];
    int input[CHUNK];
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      const u32 step = ((CHUNK * chunk + s) & ~(WINDOW - 1)) + position(__shfl_sync(~0u, v[s], column_lane(lane)));
      input[s] = 32 * step + column_lane(lane);
      scale[s] = affine[input[s]];
      if (scale[s] && source) input[s] = source[input[s]];
    }
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      float value[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float plain = scale[s] && r < rows ? to_float(x[(size_t)r * in_features + input[s]]) : 0.f;
        bias[r] += plain * high_float(scale[s]);
        value[r] = to_float(to_bits(plain * low_float(scale[s])));
      }
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        u32 pair[4] = {entry[s][h].x, entry[s][h].y, entry[s][h].z, entry[s][h].w};
        if constexpr (RES_BITS > 0) {
          uint4 q = shared_residual[(h << RES_BITS) + residual_index(v[s])];
          pair[0] = add2(pair[0], q.x), pair[1] = add2(pair[1], q.y), pair[2] = add2(pair[2], q.z), pair[3] = add2(pair[3], q.w);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int j = 0; j < 8; j++)
            acc[r][8 * h + j] += value[r] * (j % 2 ? high_float(pair[j / 2]) : low_float(pair[j / 2]));
      }
    }
  }
  wait_for_inputs();  // every thread must, also one without a chunk
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int j = 0; j < OUTPUTS; j++) {
      float sum = warp_sum(acc[r][j] + bias[r]);
      if (lane == 0) partial[warp][r * OUTPUTS + j] = sum;
    }
  __syncthreads();
  if (threadIdx.x < SUMS) {
    float sum = 0;
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
    int row_blocks, int slices, int residual_books, int ranges, int range, int dense_steps) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 barrier;
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x % slices, part = blockIdx.x / slices;
  const int parts = gridDim.x / slices;
  launch_dependents();
  stage_book(shared, book + (size_t)slice * BOOK_BYTES, &barrier, 0);
  stage_residual(shared + BOOK_BYTES, residual + (size_t)(residual_books > 1 ? slice : 0) * (HALVES << RES_BITS));
  const int block0 = (int)((long long)row_blocks * part / parts), block1 = (int)((long long)row_blocks * (part + 1) / parts);

  char* const shared_x = shared + BOOK_BYTES + RES_BYTES;  // [ranges][range + 2], then the dense columns
  const int columns = ranges * (range + 2) + 32 * dense_steps, x_row = 2 * columns;
  float* const biases = (float*)(shared_x + (ROWS * x_row + 15) / 16 * 16);
  float bias[ROWS] = {};
  stage_x<false>(bias, shared_x, x_row, {x, affine, source, in_features, rows}, 0, columns);
  share_bias(bias, biases);
  __syncthreads();
  book_ready(&barrier);

  const Tables tables(shared, shared + BOOK_BYTES, shared_x, x_row, lane);
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
            take(acc, v[slot][j], 2 * (r * (range + 2) + position(v[slot][j])), tables);
          }
        at += DEPTH;
      }
    }
    if (slice == 0)
      for (int s = 0; s < dense_steps; s++)
        take_dense(acc, dense + ((size_t)block * dense_steps + s) * HALVES * 32, 2 * (ranges * (range + 2) + 32 * s + lane), tables, lane);
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
    float sum = total_bias(biases, row);
    for (int s = 0; s < slices; s++)
      sum += __ldcg(workspace + ((size_t)(s * ROWS + row) * row_blocks + block) * OUTPUTS + inner % OUTPUTS);
    out.store(block, inner, sum);
  }
  if (threadIdx.x == 0) arrived[part] = 0;  // ready for the next launch
}
#endif
