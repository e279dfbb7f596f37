// y[r, n] = sum_k x[r, k] · W[n, k] for many rows with mma.sync and cp.async alone: gemm.cu for GPUs other than Hopper.
//
// Work split: as in gemm.cu the weight is the left operand, tokens are the columns, and both come in stages of SB blocks of 64 inputs.
//
//      W: MT tiles of 16 outputs  ─┐  all threads copy a stage, STAGES - 1 ahead
//      x: TOKENS rows             ─┴→ D[16 · MT, TOKENS], OUT_WARPS × TOKEN_WARPS warps of PER_WARP tiles × COLUMNS · 8 tokens
//
// A warp takes its codes apart once for all of its tokens, so what codes cost in instructions falls with COLUMNS, and what x costs in
// reads of shared memory with PER_WARP. A lane's four registers of x, 32 inputs of 16 bits or 64 of 8 bits of one token, come
// by one load: x lies packed (pack.cu, which norms and quantizes), or (X_ROWS) as the rows it is, of which a lane's eight neighbouring
// inputs are just what the tiles' order asks for; codes come in the order 0, 2, 1, 3 and x is exchanged to suit.
//
// How the tiles are shared out (SPLIT): WHOLE, CTAs take them in turn; LINE, too few for whole ones, cut evenly (gemm.cu says how;
// every CTA is resident). Copies of a CTA's next tile begin while it ends one. EXPERTS: as in gemm.cu.
// Limit: the matrix units; shared memory where a warp has few tiles and tokens; the instructions of codes where it has few tokens.
//
// defines: FORMAT, SPARSE (0), SYMMETRIC (0), FP16, SCALE_FP16, KDIM, NDIM, GROUP, EPILOGUE, BIAS, OUT_WARPS, TOKEN_WARPS, PER_WARP,
// COLUMNS, SB, STAGES, SPLIT, CTAS (of an SM), X_ROWS (0), EXPERTS (0)
#include "common.cuh"
#include "linear.cuh"
#include "patience.cuh"

#ifndef EXPERTS
#define EXPERTS 0
#endif
#ifndef X_ROWS
#define X_ROWS 0
#endif
#define PACKED 0
#define ORDER 0
#define BY_ROWS 0
#define STAGED 0
#define WHOLE 0
#define LINE 1
#define SLICED 0
#define CLUSTER 1

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (SB * 64 + GROUP - 1) / GROUP;
constexpr int MT = OUT_WARPS * PER_WARP, M_TILES = (TILES + MT - 1) / MT, TOKENS = TOKEN_WARPS * COLUMNS * 8;
constexpr int WARPS = OUT_WARPS * TOKEN_WARPS, THREADS = WARPS * 32;
constexpr int STAGE_COUNT = BLOCKS / SB;                   // of a tile
constexpr int WEIGHT_BYTES = MT * SB * BLOCK_BYTES, RECORD_BYTES = MT * STAGE_GROUPS * GROUP_BYTES;
constexpr int X_ROW = SB * 64 * (QUANTIZED ? 1 : 2), X_BYTES = TOKENS * X_ROW, X_AT = WEIGHT_BYTES + RECORD_BYTES;
constexpr int STAGE_BYTES = X_AT + X_BYTES;
constexpr int STEPS = (QUANTIZED ? 2 : 4) / (1 + SPARSE);  // matrix products a block of 64 inputs takes
constexpr int CHUNKS = QUANTIZED ? 1 : 2;                  // of a block: what a lane's four registers of x are of
constexpr int TOGETHER = STEPS / CHUNKS;                   // products of a chunk
constexpr int WORDS = 4 + SPARSE;                          // of a lane: codes, and which inputs they are
constexpr int WIDTH = GATE_UP ? NDIM / 2 : NDIM;
static_assert(BLOCKS % SB == 0, "stages are whole");
static_assert(!EXPERTS || (SPLIT == WHOLE && NDIM % 16 == 0), "whole tiles of one expert each");
static_assert(!GROUPED || GROUP >= KDIM || SB * 64 % GROUP == 0 || GROUP % (SB * 64) == 0, "a stage holds whole groups, or a group stages");
static_assert(!X_ROWS || (!QUANTIZED && !SPARSE), "x is packed where it becomes codes, and for 2:4 weights");

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

#include "packed.cuh"
#include "fragments.cuh"
#include "segments.cuh"
#include "gemm_results.cuh"

// The copies of a stage, shared out over all threads.
struct Source {
  const u8* weights;
  const u32* records;
  const u8* x;
  int rows, x_tiles;
};
DEVICE void fetch_stage(u32 to, const Source& a, const Segment& s, int stage) {
  constexpr int pieces = SB * BLOCK_BYTES / 16, record_pieces = STAGE_GROUPS * GROUP_BYTES / 16;
  const int first = s.expert * TILES;
#pragma unroll
  for (int i = threadIdx.x; i < MT * pieces; i += THREADS) {
    const int tile = first + min(s.m * MT + i / pieces, TILES - 1);
    copy16(to + i * 16, a.weights + ((size_t)tile * BLOCKS + stage * SB) * BLOCK_BYTES + i % pieces * 16);
  }
#if FORMAT == INT4 || FORMAT == INT8 || FORMAT == MXFP4 || FORMAT == FP8_BLOCKS || FORMAT == BIT_PLANES
#pragma unroll
  for (int i = threadIdx.x; i < MT * record_pieces; i += THREADS) {
    const int tile = first + min(s.m * MT + i / record_pieces, TILES - 1);
    const u8* from = (const u8*)a.records + ((size_t)tile * GROUPS + first_group(stage)) * GROUP_BYTES;
    copy16(to + WEIGHT_BYTES + i * 16, from + i % record_pieces * 16);
  }
#endif
#if X_ROWS
  const int lane = threadIdx.x % 32;
  const u16* x = (const u16*)a.x + stage * SB * 64;
#pragma unroll
  for (int i = threadIdx.x / 32; i < TOKENS / 8 * 2 * SB; i += WARPS) {  // 8 tokens × 32 inputs
    const int row = s.n * TOKENS + i / (2 * SB) * 8 + lane / 4, input = i % (2 * SB) * 32 + lane % 4 * 8;
    const bool exists = row < a.rows && (KDIM % 64 == 0 || stage * SB * 64 + input < KDIM);
    copy16_or_zeros(to + X_AT + i * 512 + lane * 16, exists ? x + (size_t)row * KDIM + input : x, exists);
  }
#else
  const u8* x = a.x + ((size_t)stage * a.x_tiles + s.n) * X_BYTES;
#pragma unroll
  for (int i = threadIdx.x; i < X_BYTES / 16; i += THREADS) copy16(to + X_AT + i * 16, x + i * 16);
#endif
}

// Which stage is copied next: runs through the same segments as the products, ahead of them.
struct Ahead {
  Segment s = {};
  int unit, stage = 0, n_tiles;
  const int* expert_of;
  DEVICE Ahead(int tiles, const int* experts) : unit(first_unit(tiles)), n_tiles(tiles), expert_of(experts) {}
  DEVICE void fetch(u32 to, const Source& a) {
    if (stage >= s.end && next_segment(s, unit, n_tiles, expert_of)) stage = s.begin;
    if (stage < s.end) fetch_stage(to, a, s, stage), stage++;
    copy_group();
  }
};

// Four registers of x, of a token and a chunk.
DEVICE uint4 load_x(const u8* chunk, int lane) {
#if X_ROWS
  const uint4 w = ((const uint4*)chunk)[lane];
  if (!GROUPED && FORMAT != FP8_WIDE) return w;
  return make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x5410),
                    __byte_perm(w.z, w.w, 0x7632));
#else
  return load_matrices<false>(shared_address(chunk) + lane * 16);
#endif
}
DEVICE void product(accumulator (&d)[4], const u32 (&a)[WORDS], uint4 x, int step) {
  const u32 b0 = step ? x.z : x.x, b1 = step ? x.w : x.y;
  const uint4 w = make_uint4(a[0], a[1], a[2], a[3]);
#if SPARSE && FORMAT == W8A8
  mma64_sparse<false>(d, w, a[WORDS - 1], x);
#elif SPARSE
  mma32_sparse<FP16>(d, w, a[WORDS - 1], x);
#elif FORMAT == W8A8
  mma32<false>(d, w, b0, b1);
#elif FORMAT == FP8
  mma32_float8(d, w, b0, b1);
#else
  mma16<FP16>(d, a[0], a[1], a[2], a[3], b0, b1);
#endif
}
typedef accumulator Sums[PER_WARP][COLUMNS * 4];
DEVICE accumulator (&four(Sums& sums, int m, int n))[4] { return *(accumulator(*)[4]) & sums[m][4 * n]; }

// A stage of a warp: `first` is its first tile, `x` its first column's.
DEVICE void multiply_stage(Sums& sums, const u8* slot, const u8* x, int stage, int first, int lane) {
#pragma unroll
  for (int block = 0; block < SB; block++) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const u8* column = x + (block * CHUNKS + chunk) * 512;
      uint4 next = load_x(column, lane);
      u32 a[PER_WARP][TOGETHER][WORDS];
#pragma unroll
      for (int m = 0; m < PER_WARP; m++) {
        const Record* records = (const Record*)(slot + WEIGHT_BYTES) + (first + m) * STAGE_GROUPS * RECORD_LENGTH;
        const Block here(slot + (first + m) * SB * BLOCK_BYTES, records, stage, block, lane);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) here.take(chunk * TOGETHER + i, a[m][i]);
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        const uint4 now = next;
        if (n + 1 < COLUMNS) next = load_x(column + (n + 1) * 8 * X_ROW, lane);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
#pragma unroll
          for (int m = 0; m < PER_WARP; m++) product(four(sums, m, n), a[m][i], now, i);
      }
    }
  }
}

// Sums of a tile that begins in another CTA, left for it; and the owner's taking them in, in the order of the stages.
DEVICE void leave_partial(const Sums& sums, uint4* partials, int* flags) {
  uint4* to = partials + (size_t)blockIdx.x * PER_WARP * COLUMNS * THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < PER_WARP * COLUMNS; i++) to[i * THREADS] = *(const uint4*)&sums[i / COLUMNS][i % COLUMNS * 4];
  __syncthreads();
  if (threadIdx.x == 0) store_release(flags + blockIdx.x, 1);
}
// A thread waits for each of them, all at the same time: one after the other their ways through memory would add up.
DEVICE void take_partials(Sums& sums, const uint4* partials, int* flags, int tile, int n_tiles) {
  const int units = M_TILES * n_tiles * STAGE_COUNT, stop = (tile + 1) * STAGE_COUNT, first = blockIdx.x + 1;
  int last = first;
  while (unit_begin(last, units) < stop) last++;
  auto works = [&](int cta) { return unit_begin(cta, units) < unit_begin(cta + 1, units); };  // there may be more CTAs than units
  for (int cta = first + threadIdx.x; cta < last; cta += THREADS) {
    Patience patience;
    while (works(cta) && !load_acquire(flags + cta)) patience.poll();
  }
  __syncthreads();
#pragma unroll 2
  for (int cta = first; cta < last; cta++) {
    if (!works(cta)) continue;
    const uint4* from = partials + (size_t)cta * PER_WARP * COLUMNS * THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < PER_WARP * COLUMNS; i++) {
      const uint4 p = __ldcg(from + i * THREADS);
      const accumulator* v = (const accumulator*)&p;
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i / COLUMNS][i % COLUMNS * 4 + j] += v[j];
    }
  }
  __syncthreads();
  for (int cta = first + threadIdx.x; cta < last; cta += THREADS) flags[cta] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
gemm_mma(const u8* weights, const u32* records, const float* channel_scale, const u8* x, const float* row_scale, const u16* bias,
         const u16* residual, u16* Y, uint4* partials, int* flags, const int* expert_of, const int* tiles, int rows, int groups) {
  extern __shared__ __align__(128) u8 raw[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_tile = warp % OUT_WARPS * PER_WARP, first_column = warp / OUT_WARPS * COLUMNS;
  launch_dependents();
  wait_for_inputs();
  const int x_tiles = (rows + TOKENS - 1) / TOKENS;
  int n_tiles = x_tiles;
  if (EXPERTS) n_tiles = tiles[0], rows = n_tiles * TOKENS;
  const Source source = {weights, records, x, rows, x_tiles};
  const u32 ring = shared_address(raw);
  Ahead ahead(n_tiles, expert_of);
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) ahead.fetch(ring + i * STAGE_BYTES, source);
  int slot = 0, unit = first_unit(n_tiles);
  Segment s;
  while (next_segment(s, unit, n_tiles, expert_of)) {
    Sums sums = {};
#pragma unroll 1
    for (int stage = s.begin; stage < s.end; stage++) {
      copy_wait<STAGES - 2>();
      __syncthreads();  // the stage is there, and all are done with the one before it
      ahead.fetch(ring + (slot ? slot - 1 : STAGES - 1) * STAGE_BYTES, source);
      const u8* here = raw + slot * STAGE_BYTES;
      const u8* mine = here + X_AT + first_column * 8 * X_ROW;
#if FORMAT == FP8  // sums inside the matrix units have fewer bits than a float
      Sums part = {};
      multiply_stage(part, here, mine, stage, first_tile, lane);
#pragma unroll
      for (int i = 0; i < PER_WARP * COLUMNS * 4; i++) sums[i / (COLUMNS * 4)][i % (COLUMNS * 4)] += part[i / (COLUMNS * 4)][i % (COLUMNS * 4)];
#else
      multiply_stage(sums, here, mine, stage, first_tile, lane);
#endif
      if (++slot == STAGES) slot = 0;
    }
    if (SPLIT == LINE && s.begin > 0) {
      leave_partial(sums, partials, flags);
      continue;
    }
    if (SPLIT == LINE && s.end < STAGE_COUNT) take_partials(sums, partials, flags, (unit - 1) / STAGE_COUNT, n_tiles);
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
      const Ends<COLUMNS> ends(s, first_column, channel_scale, row_scale, bias, residual, rows, first_tile + m, lane);
      write_tile<COLUMNS>(sums[m], ends, s, first_column, Y, rows, groups, first_tile + m, lane);
    }
  }
}
