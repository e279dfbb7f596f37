// y[r, n] = sum_k x[r, k] · W[n, k] for 9 rows to many thousands, from the same tiles that gemv.cu reads.
//
// Work split: the weight is the left operand (its rows are the matrix units' 64), tokens are the columns.
//
//      W: MT tiles of 16 outputs  ─┐  per stage: SB blocks of 64 inputs of each tile, one bulk copy a tile
//      x: TOKENS rows, packed     ─┴→ D[16 · MT, TOKENS] in registers; WGS warpgroups, 64 outputs each
//
// A stage's weights go from shared memory to registers, become 16-bit floats there where they are codes (exact integers
// less the zero point, times the scale, rounded once) and meet x, which stays in shared memory. pack.cu has written x in
// the order that the matrix units want (core matrices; inputs permuted the way a lane holds its codes), with the norm
// applied and, for W8A8 and float8, quantized. So both operands arrive by plain bulk copies. 2:4 weights stay compressed: the
// sparse matrix units take 64 inputs (8 bits) or 32 (16 bits) at a time, with a word that says which of them are kept.
//
// How the tiles are shared out (SPLIT):
//   CLUSTERS, few rows: the inputs of a tile are cut over the CTAs of a cluster, which add up in each other's shared
//     memory, every owner some columns. Rings and registers are kept so small that two kernels fit on an SM.
//   LINE, too few tiles for whole ones: the stages of all tiles lie in one line that is cut evenly over the CTAs. A CTA
//     whose part begins inside a tile leaves its sums in `partials`; the CTA that has the tile's beginning comes to it
//     last, adds them in order and writes the outputs. Every CTA is resident (grid ≤ SMs), so waiting is safe.
//   WHOLE: CTAs take tiles in turn, neighbours sharing rows and columns so that L2 serves most reads.
// Sums are added in a fixed order: the same bits every time.
//
// STAGED tokens at a time (0: none) go through shared memory when a tile is done, so that whole lines are written; where that is
// the whole tile, the residual waits there from the tile's beginning on.
//
// EXPERTS: the weights of many experts are stacked, and a tile of tokens belongs to one of them. How many tiles there are, and
// whose, route.cu has left in memory: nothing is fetched before that. Rows that fill up a tile are zeros.
//
// Limit: bytes of weights / bandwidth for few rows, the matrix units for many.
//
// defines: FORMAT, SPARSE (0), FP16, SCALE_FP16, KDIM, NDIM, GROUP, EPILOGUE, BIAS, TOKENS, WGS, SB, STAGES, SPLIT, LOADERS,
// CLUSTER, STAGED, EXPERTS (0)
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"

#ifndef EXPERTS
#define EXPERTS 0
#endif
#define WHOLE 0
#define LINE 1
#define CLUSTERS 2

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr bool GROUPED = FORMAT == INT4 || FORMAT == INT8;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (SB * 64 + GROUP - 1) / GROUP;
constexpr int MT = 4 * WGS, M_TILES = (TILES + MT - 1) / MT;
constexpr int STAGE_COUNT = BLOCKS / SB;                       // of a tile
constexpr int WEIGHT_BYTES = MT * SB * BLOCK_BYTES, RECORD_BYTES = MT * STAGE_GROUPS * 64;
constexpr int X_ROW = SB * 64 * (QUANTIZED ? 1 : 2), X_BYTES = TOKENS * X_ROW;
constexpr int STAGE_BYTES = WEIGHT_BYTES + RECORD_BYTES + X_BYTES;
constexpr int THREADS = WGS * 128;
constexpr bool WIDE = TOKENS == 256;                           // accumulators take most registers: the producers give theirs
constexpr int COLUMNS = TOKENS / 8;                            // groups of 8 tokens
constexpr int MOST_OWNERS = CLUSTER < COLUMNS ? CLUSTER : COLUMNS;
constexpr int OWNERS = MOST_OWNERS >= 8 ? 8 : MOST_OWNERS >= 4 ? 4 : MOST_OWNERS >= 2 ? 2 : 1, OWNED = COLUMNS / OWNERS;
constexpr int STEPS = (QUANTIZED ? 2 : 4) / (1 + SPARSE);      // matrix products a block of 64 inputs takes
constexpr int STEP_BYTES = 256 * (1 + SPARSE);                 // of 8 tokens, that one product takes
constexpr int WORDS = 4 + SPARSE;                              // of a lane: codes, and which inputs they are
constexpr int WIDTH = EPILOGUE == SILU ? NDIM / 2 : NDIM;
constexpr int OUT_BYTES = EPILOGUE == SILU ? 64 : 128;         // of a token, by one warpgroup
constexpr int OUT_ROW = OUT_BYTES + 16;                        // padded: 8 rows lie in different banks
static_assert(!STAGED || (SPLIT != CLUSTERS && STAGED >= 32 && TOKENS % STAGED == 0 && WIDTH % 8 == 0), "written in pieces of 16 bytes");
static_assert(BLOCKS % SB == 0, "stages are whole");
static_assert(!EXPERTS || (SPLIT == WHOLE && NDIM % 16 == 0 && !BIAS), "whole tiles of one expert each");
static_assert(!GROUPED || GROUP >= KDIM || SB * 64 % GROUP == 0 || GROUP % (SB * 64) == 0, "a stage holds whole groups, or a group stages");

#if FORMAT == W8A8
typedef int accumulator;
#else
typedef float accumulator;
#endif

// Groups beyond the last have only zeros of x: their place is taken by the last.
constexpr bool RAGGED = GROUPED && GROUPS * GROUP < BLOCKS * 64 && GROUP < KDIM;
DEVICE int first_group(int stage) { return RAGGED ? min(stage * SB * 64 / GROUP, GROUPS - STAGE_GROUPS) : stage * SB * 64 / GROUP; }
DEVICE int group_in_stage(int stage, int block, int half) {
  if (!RAGGED) return GROUP >= SB * 64 ? 0 : (block * 64 + half * 32) / GROUP;
  return min(((stage * SB + block) * 64 + half * 32) / GROUP, GROUPS - 1) - first_group(stage);
}

struct __align__(128) Shared {
  union {
    u8 ring[STAGES][STAGE_BYTES];
    uint4 exchange[CLUSTER][CLUSTER > 1 ? OWNED : 1][THREADS];  // [from][column group]: the others' share of this CTA's columns
  };
  u8 staging[WGS][STAGED ? STAGED * OUT_ROW : 16];
  u64 full[STAGES], empty[STAGES];
};

DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}
#include "fragments.cuh"

// The compiler must not touch sums before the products are done; it would then do the products one by one.
template <int COUNT> DEVICE void keep_behind(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int COUNT> DEVICE void keep_behind(int (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(acc[i])::"memory");
}

#if FORMAT == FP8
// Float8 sums inside the matrix units have 14 bits, so a stage's are added to `acc` in full float32: PART tokens at a time, to
// have the registers.
constexpr int PART = TOKENS < 128 ? TOKENS : 128;
DEVICE void multiply_stage(float (&acc)[TOKENS / 2], const u8* mine, u64 x, int lane) {
  u32 a[SB][STEPS][WORDS];
#pragma unroll
  for (int block = 0; block < SB; block++) load_block(a[block], mine, nullptr, 0, block, lane);
#pragma unroll
  for (int part = 0; part < TOKENS / PART; part++) {
    float sum[PART / 2];
    const u64 b = x + part * (PART * X_ROW >> 4);
    wgmma_fence();
    wgmma_first(sum, a[0][0], b);
#pragma unroll
    for (int i = 1; i < SB * STEPS; i++) wgmma(sum, a[i / STEPS][i % STEPS], b + i * (STEP_BYTES >> 4));
    wgmma_commit();
    wgmma_wait<0>();
    keep_behind(sum);
#pragma unroll
    for (int i = 0; i < PART / 2; i++) acc[part * PART / 2 + i] += sum[i];
  }
}
#endif

// What part of which tile a CTA has.
struct Segment {
  int m, n, begin, end;  // tile; stages
  int expert = 0;
};
DEVICE int unit_begin(int cta, int units) { return (int)((long long)cta * units / gridDim.x); }
DEVICE Segment place(int tile, int n_tiles) {
  constexpr int side = SIDE;  // token tiles side by side, for L2
  const int group = tile / (side * M_TILES), inside = tile % (side * M_TILES), width = min(side, n_tiles - group * side);
  return {inside / width, group * side + inside % width, 0, STAGE_COUNT};
}
// The i-th segment of this CTA; `units` counts on through them. False after the last.
DEVICE bool next_segment(Segment& s, int& unit, int n_tiles, const int* expert_of) {
#if SPLIT == CLUSTERS
  if (unit < 0) return false;
  const int rank = unit % CLUSTER;
  s = {unit / CLUSTER, 0, rank * STAGE_COUNT / CLUSTER, (rank + 1) * STAGE_COUNT / CLUSTER};
  unit = -1;
#elif SPLIT == LINE
  const int end = unit_begin(blockIdx.x + 1, M_TILES * n_tiles * STAGE_COUNT);
  if (unit >= end) return false;
  s = place(unit / STAGE_COUNT, n_tiles);
  s.begin = unit % STAGE_COUNT;
  s.end = min(STAGE_COUNT, s.begin + end - unit);
  unit += s.end - s.begin;
#else
  if (unit >= M_TILES * n_tiles) return false;
  s = place(unit, n_tiles);
  if (EXPERTS) s.expert = expert_of[s.n];
  unit += gridDim.x;
#endif
  return true;
}
// Neighbouring CTAs go through the stages from different ones on, so that they do not all want the same part of x at once.
DEVICE int first_stage(const Segment& s) {
  if (!ROTATE || SPLIT == LINE) return s.begin;
  return s.begin + (int)((long long)(blockIdx.x / CLUSTER) * (s.end - s.begin) / (gridDim.x / CLUSTER));
}
DEVICE int next_stage(const Segment& s, int stage) { return stage + 1 == s.end ? s.begin : stage + 1; }
DEVICE int first_unit(int n_tiles) { return SPLIT == LINE ? unit_begin(blockIdx.x, M_TILES * n_tiles * STAGE_COUNT) : blockIdx.x; }

// A loader warp's part of a stage: a quarter of the tiles, and of x. One lane does it.
DEVICE void copy_weights(u8* slot, u64* full, const u8* weights, const u32* records, const Segment& s, int stage, int loader) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }"
               ::"r"(shared_address(full)), "r"(STAGE_BYTES / LOADERS) : "memory");
#pragma unroll
  for (int i = 0; i < MT / LOADERS; i++) {
    const int place = loader * (MT / LOADERS) + i, tile = s.expert * TILES + min(s.m * MT + place, TILES - 1);
    bulk_copy(slot + place * SB * BLOCK_BYTES, weights + ((size_t)tile * BLOCKS + stage * SB) * BLOCK_BYTES, SB * BLOCK_BYTES, full);
    if (GROUPED)
      bulk_copy(slot + WEIGHT_BYTES + place * STAGE_GROUPS * 64, records + ((size_t)tile * GROUPS + first_group(stage)) * 16,
                STAGE_GROUPS * 64, full);
  }
}
DEVICE void copy_x(u8* slot, u64* full, const u8* x, const Segment& s, int stage, int x_tiles, int loader) {
  constexpr int part = X_BYTES / LOADERS;
  bulk_copy(slot + WEIGHT_BYTES + RECORD_BYTES + loader * part, x + ((size_t)stage * x_tiles + s.n) * X_BYTES + loader * part, part, full);
}
// The ring's first weights are fetched before this kernel's inputs are there, its x after.
DEVICE void produce(Shared& sh, const u8* weights, const u32* records, const u8* x, const int* expert_of, int n_tiles, int x_tiles,
                    int loader) {
  Segment s;
  for (int pass = 0; pass < 2; pass++) {
    int unit = first_unit(n_tiles), at = 0;
    while (next_segment(s, unit, n_tiles, expert_of)) {
      for (int i = s.begin, stage = first_stage(s); i < s.end; i++, at++, stage = next_stage(s, stage)) {
        const int slot = at % STAGES;
        if (pass == 0) {
          if (at == STAGES) goto filled;
          copy_weights(sh.ring[slot], &sh.full[slot], weights, records, s, stage, loader);
        } else {
          if (at >= STAGES) {
            barrier_wait(&sh.empty[slot], (at / STAGES + 1) & 1);
            copy_weights(sh.ring[slot], &sh.full[slot], weights, records, s, stage, loader);
          }
          copy_x(sh.ring[slot], &sh.full[slot], x, s, stage, x_tiles, loader);
        }
      }
    }
  filled:
    if (pass == 0) wait_for_inputs();
  }
}

// What becomes of the sums of a thread: outputs g and g + 8 of its warp's tile, tokens 2t and 2t + 1 of 8.
struct Finish {
  float scale[2], offset[2];  // of the two outputs
  const float* row_scale;     // of token 2t
  DEVICE Finish(int tile, const float* channel_scale, const float* rows_from, const u16* bias, int lane)
      : row_scale(rows_from + 2 * (lane % 4)) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int channel = min(tile * 16 + 8 * half + lane / 4, NDIM - 1);
      scale[half] = QUANTIZED ? channel_scale[channel] : 1.f;
      offset[half] = BIAS ? to_float(bias[channel]) : 0.f;
    }
  }
  DEVICE void operator()(const accumulator* acc, int column, float (&v)[2][2]) const {
    float2 row = make_float2(1.f, 1.f);
    if (QUANTIZED) row = *(const float2*)(row_scale + column);  // of rows that do not exist too: nobody writes those
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = (float)acc[i];
      if (QUANTIZED) x *= scale[i / 2] * (i % 2 ? row.y : row.x);
      v[i / 2][i % 2] = x + offset[i / 2];
    }
    if (EPILOGUE == SILU)
#pragma unroll
      for (int i = 0; i < 2; i++) v[0][i] = __fdividef(v[0][i], 1.f + __expf(-v[0][i])) * v[1][i];
  }
};

// D transposed in 8 × 8 pieces: a lane writes two outputs of token 8j + g at once. `acc` has the column groups from `first` on.
template <int COUNT>
DEVICE void write_tile(const accumulator (&acc)[COUNT * 4], const Segment& s, int first, const float* channel_scale,
                       const float* row_scale, const u16* bias, const u16* residual, u16* Y, int rows, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, tile = s.m * MT + warp;
  if (tile >= TILES) return;
  const Finish finish(tile, channel_scale + s.expert * NDIM, row_scale, bias, lane);
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int column = s.n * TOKENS + 8 * (first + j);
    if (column >= rows) break;
    float v[2][2];
    finish(acc + 4 * j, column, v);
    const int token = column + g;
    if constexpr (EPILOGUE == SILU) {
      const u32 pair = transpose8(pack2(v[0][0], v[0][1]));
      if (token < rows && tile * 8 + 2 * t < WIDTH) *(u32*)(Y + (size_t)token * WIDTH + tile * 8 + 2 * t) = pair;
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = tile * 16 + 8 * half + 2 * t;
        const bool inside = token < rows && n < NDIM;
        const size_t at = (size_t)token * WIDTH + n;
        if (EPILOGUE == RESIDUAL) {
          const u32 old = transpose8(inside ? *(const u32*)(residual + at) : 0);
          v[half][0] += low_float(old), v[half][1] += high_float(old);
        }
        const u32 pair = transpose8(pack2(v[half][0], v[half][1]));
        if (inside) *(u32*)(Y + at) = pair;
      }
    }
  }
}

#if STAGED
// A warpgroup's results lie in shared memory token by token. Its warps write there, each its 16 outputs of all tokens; then
// each takes a quarter of the tokens to global memory, in pieces of 16 bytes. The residual comes in the same way.
template <class ACTION> DEVICE void each_piece(const Segment& s, int first, int rows, int warp, int lane, ACTION act) {
  constexpr int lanes = OUT_BYTES / 16, quarter = STAGED / 4;
#pragma unroll 4
  for (int i = 0; i < quarter * lanes / 32; i++) {
    const int token = warp % 4 * quarter + i * (32 / lanes) + lane / lanes, row = s.n * TOKENS + first + token;
    const int n = (s.m * WGS + warp / 4) * (OUT_BYTES / 2) + lane % lanes * 8;
    if (row < rows && n < WIDTH) act((size_t)row * WIDTH + n, token * OUT_ROW + lane % lanes * 16);
  }
}
DEVICE void fetch_residual(Shared& sh, const Segment& s, int first, const u16* residual, int rows, int warp, int lane) {
  const u32 staging = shared_address(sh.staging[warp / 4]);
  __syncwarp();
  each_piece(s, first, rows, warp, lane, [&](size_t from, int to) { copy16(staging + to, residual + from); });
  copy_group();
}
DEVICE void store_matrices(u32 address, const u32 (&v)[4]) {  // transposed; lane i has the address of row i % 8 of matrix i / 8
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
DEVICE void write_staged(Shared& sh, const accumulator (&acc)[TOKENS / 2], const Segment& s, const float* channel_scale,
                         const float* row_scale, const u16* bias, const u16* residual, u16* Y, int rows, int warp, int lane) {
  const u8* staging = sh.staging[warp / 4];
  const Finish finish(s.m * MT + warp, channel_scale + s.expert * NDIM, row_scale, bias, lane);
  const int matrix = lane / 8, output = EPILOGUE == SILU ? warp % 4 * 8 : warp % 4 * 16 + matrix % 2 * 8;
  constexpr int together = EPILOGUE == SILU ? 4 : 2;  // groups of 8 tokens
  const u32 place = shared_address(staging) + (8 * (EPILOGUE == SILU ? matrix : matrix / 2) + lane % 8) * OUT_ROW + output * 2;
#pragma unroll
  for (int first = 0; first < TOKENS; first += STAGED) {
    if (s.n * TOKENS + first >= rows) break;
    if (EPILOGUE == RESIDUAL && first > 0) fetch_residual(sh, s, first, residual, rows, warp, lane);
    if (EPILOGUE == RESIDUAL) copy_wait<0>();
    named_barrier(2 + warp / 4, 128);  // the residual is there, and what was here before is gone
#pragma unroll
    for (int j = 0; j < STAGED / 8; j += together) {
      u32 words[4], old[4] = {};
      if (EPILOGUE == RESIDUAL) {
        const uint4 w = load_matrices<true>(place + j * 8 * OUT_ROW);
        old[0] = w.x, old[1] = w.y, old[2] = w.z, old[3] = w.w;
      }
#pragma unroll
      for (int i = 0; i < together; i++) {
        float v[2][2];
        finish(acc + first / 2 + 4 * (j + i), s.n * TOKENS + first + 8 * (j + i), v);
#pragma unroll
        for (int half = 0; half < 4 / together; half++) {
          if (EPILOGUE == RESIDUAL) v[half][0] += low_float(old[2 * i + half]), v[half][1] += high_float(old[2 * i + half]);
          words[4 / together * i + half] = pack2(v[half][0], v[half][1]);
        }
      }
      store_matrices(place + j * 8 * OUT_ROW, words);
    }
    named_barrier(2 + warp / 4, 128);
    each_piece(s, first, rows, warp, lane, [&](size_t to, int from) { *(uint4*)(Y + to) = *(const uint4*)(staging + from); });
  }
}
#endif

// Sums of a tile that begins in another CTA, left for it; and the owner's taking them in, in the order of the stages.
DEVICE void leave_partial(const accumulator (&acc)[TOKENS / 2], uint4* partials, int* flags) {
  uint4* to = partials + (size_t)blockIdx.x * (TOKENS / 8) * THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) to[i * THREADS] = *(const uint4*)&acc[4 * i];
  __threadfence();
  named_barrier(1, THREADS);
  if (threadIdx.x == 0) store_release(flags + blockIdx.x, 1);
}
DEVICE void take_partials(accumulator (&acc)[TOKENS / 2], const uint4* partials, int* flags, const Segment& s, int tile, int n_tiles) {
  const int units = M_TILES * n_tiles * STAGE_COUNT, stop = (tile + 1) * STAGE_COUNT;
  for (int cta = blockIdx.x + 1; unit_begin(cta, units) < stop; cta++) {
    if (unit_begin(cta, units) == unit_begin(cta + 1, units)) continue;  // more CTAs than units
    while (!load_acquire(flags + cta)) {}
    const uint4* from = partials + (size_t)cta * (TOKENS / 8) * THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
      const uint4 p = __ldcg(from + i * THREADS);
      const accumulator* v = (const accumulator*)&p;
#pragma unroll
      for (int j = 0; j < 4; j++) acc[4 * i + j] += v[j];
    }
    named_barrier(1, THREADS);
    if (threadIdx.x == 0) flags[cta] = 0;
  }
}

// The CTAs of a cluster give each other what they have of the owners' columns.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void give_sums(Shared& sh, const accumulator (&acc)[TOKENS / 2], int rank) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    const uint4 v = *(const uint4*)&acc[4 * j];
    u32 to;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(&sh.exchange[rank][j % OWNED][threadIdx.x])), "r"(j / OWNED));
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
}
DEVICE void take_sums(const Shared& sh, accumulator (&sum)[OWNED * 4]) {
#pragma unroll
  for (int i = 0; i < OWNED * 4; i++) sum[i] = 0;
#pragma unroll
  for (int from = 0; from < CLUSTER; from++)
#pragma unroll
    for (int j = 0; j < OWNED; j++) {
      const uint4 p = sh.exchange[from][j][threadIdx.x];
      const accumulator* v = (const accumulator*)&p;
#pragma unroll
      for (int i = 0; i < 4; i++) sum[4 * j + i] += v[i];
    }
}

extern "C" __global__ void
#if SPLIT != CLUSTERS  // whose registers the host limits
__launch_bounds__(THREADS + LOADERS * 32, 1)
#endif
gemm(const u8* weights, const u32* records, const float* channel_scale, const u8* x, const float* row_scale, const u16* bias,
     const u16* residual, u16* Y, uint4* partials, int* flags, const int* expert_of, const int* tiles, int rows) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x_tiles = (rows + TOKENS - 1) / TOKENS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], LOADERS);
      barrier_init(&sh.empty[i], WGS * 4);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();
  int n_tiles = x_tiles;
  if (EXPERTS) {
    wait_for_inputs();
    n_tiles = tiles[0], rows = n_tiles * TOKENS;
  }
  if (warp >= WGS * 4) {
    if (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (lane == 0) produce(sh, weights, records, x, expert_of, n_tiles, x_tiles, warp - WGS * 4);
    else wait_for_inputs();
    __syncwarp();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait(), cluster_arrive(), cluster_wait();
    return;
  }
  if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_inputs();
#if SKEW
  if (warp >= 4)
    for (const long long begin = clock64(); clock64() - begin < SKEW;) {}
#endif
  int slot = 0, unit = first_unit(n_tiles);
  u32 parity = 0;
  Segment s;
  while (next_segment(s, unit, n_tiles, expert_of)) {
    accumulator acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
#if STAGED
    if (EPILOGUE == RESIDUAL && s.begin == 0) fetch_residual(sh, s, 0, residual, rows, warp, lane);
#endif
    u32 a[2][STEPS][WORDS];
    int before = -1;  // the slot that the products in flight may still read
    int stage = first_stage(s);
    auto multiply = [&](int turn) {  // with the stage in `slot`
      barrier_wait(&sh.full[slot], parity);
      const u8* ring = sh.ring[slot];
      const u8* mine = ring + warp * SB * BLOCK_BYTES;
      const u32* records_here = (const u32*)(ring + WEIGHT_BYTES) + warp * STAGE_GROUPS * 16;
      const u64 b0 = matrix_descriptor(ring + WEIGHT_BYTES + RECORD_BYTES, X_ROW * 8);
#if FORMAT == FP8
      if (before >= 0 && lane == 0) barrier_arrive(&sh.empty[before]);
      multiply_stage(acc, mine, b0, lane);
#else
#pragma unroll
      for (int block = 0; block < SB; block++) {  // loaded while the products of the one before run
        u32(&words)[STEPS][WORDS] = a[(turn + block) & 1];
        load_block(words, mine, records_here, stage, block, lane);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; step++) wgmma(acc, words[step], b0 + (block * STEPS + step) * (STEP_BYTES >> 4));
        wgmma_commit();
        wgmma_wait<1>();  // the block before is done, and with the first one the stage before
        if (block == 0 && before >= 0 && lane == 0) barrier_arrive(&sh.empty[before]);
      }
#endif
      before = slot, stage = next_stage(s, stage);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    };
    constexpr int turns = SB == 1 ? 2 : 1;  // a block's registers have to be known when this is compiled
#pragma unroll 1
    for (int i = s.begin; i + turns <= s.end; i += turns) {
      multiply(0);
      if (turns == 2) multiply(1);
    }
    if (turns == 2 && (s.end - s.begin) % 2) {
      wgmma_wait<0>();
      multiply(0);
    }
    wgmma_wait<0>();
    keep_behind(acc);
    if (lane == 0) barrier_arrive(&sh.empty[before]);
#if CLUSTER > 1
    const int rank = blockIdx.x % CLUSTER;
    cluster_arrive(), cluster_wait();  // all rings are done with
    give_sums(sh, acc, rank);
    cluster_arrive(), cluster_wait();
    if (rank < OWNERS) {
      accumulator sum[OWNED * 4];
      take_sums(sh, sum);
      write_tile<OWNED>(sum, s, rank * OWNED, channel_scale, row_scale, bias, residual, Y, rows, warp, lane);
    }
#else
    if (SPLIT == LINE && s.begin > 0) {
      leave_partial(acc, partials, flags);
    } else {
      if (SPLIT == LINE && s.end < STAGE_COUNT) take_partials(acc, partials, flags, s, (unit - 1) / STAGE_COUNT, n_tiles);
#if STAGED
      write_staged(sh, acc, s, channel_scale, row_scale, bias, residual, Y, rows, warp, lane);
#else
      write_tile<COLUMNS>(acc, s, 0, channel_scale, row_scale, bias, residual, Y, rows, warp, lane);
#endif
    }
#endif
  }
#endif
}
