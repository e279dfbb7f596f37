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
// inputs are just what the tiles' order asks for; codes of 4 and 8 bits are brought into that order as they are taken apart
// (NATURAL_ORDER), of other formats they come in the order 0, 2, 1, 3 and x is exchanged to suit.
//
// How the tiles are shared out (SPLIT): WHOLE, CTAs take them in turn; LINE, the last round, or all where they are few, cut evenly (gemm.cu
// says how; every CTA is resident). Copies of a CTA's next tile begin while it ends one. EXPERTS: as in gemm.cu.
// Limit: the matrix units; shared memory where a warp has few tiles and tokens; the instructions of codes where it has few tokens.
//
// defines: FORMAT, SPARSE (0), SYMMETRIC (0), FP16, SCALE_FP16, KDIM, NDIM, GROUP, EPILOGUE, BIAS, OUT_WARPS, TOKEN_WARPS, PER_WARP,
// COLUMNS, SB, STAGES, SPLIT, CTAS (of an SM), X_ROWS (0), EXPERTS (0), WORKING (LINE: CTAs that have a part), X_TILES (0: as many as rows
// ask for), AHEAD (0: multiply_ahead)
#include "common.cuh"
#include "linear.cuh"
#include "words.cuh"

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
#define UNITS_BY_PARTS 1
#define ROUNDS_FIRST 1
#ifndef AHEAD
#define AHEAD 0
#endif
#define NATURAL_ORDER (X_ROWS && GROUPED && FORMAT != BIT_PLANES)
#define LATE_SCALE ((FORMAT == INT4 || FORMAT == INT8) && !SPARSE && GROUP % 128 == 0 && PER_WARP * COLUMNS <= 4)

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (SB * 64 + GROUP - 1) / GROUP;
constexpr int MT = OUT_WARPS * PER_WARP, M_TILES = (TILES + MT - 1) / MT, TOKENS = TOKEN_WARPS * COLUMNS * 8;
constexpr int WARPS = OUT_WARPS * TOKEN_WARPS, THREADS = WARPS * 32;
constexpr int SIDE = TOKENS == 128 ? 16 : 8;               // token tiles side by side: a round's are about as wide as high
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
#include "mma_results.cuh"

// The copies of a stage, shared out over all threads.
struct Source {
  const u8* weights;
  const u32* records;
  const u8* x;
  int rows, x_tiles;
};
constexpr int WEIGHT_PIECES = SB * BLOCK_BYTES / 16, RECORD_PIECES = STAGE_GROUPS * GROUP_BYTES / 16;  // of 16 bytes, of a tile
constexpr bool RECORDS_COUNT = GROUPED && !RAGGED && SB * 64 % GROUP == 0;  // each stage has groups of its own

// COUNT pieces of 16 bytes, PIECES of them from each tile; tiles lie STRIDE bytes apart. Where they come out even each thread has one
// address (`mine`, of its first piece) and fixed distances from it.
template <int COUNT, int PIECES, int STRIDE> struct Tiles {
  static constexpr bool FEW = COUNT <= THREADS, EVEN = TILES % MT == 0 && THREADS % PIECES == 0 && (FEW || COUNT % THREADS == 0);
  const u8* mine;
  DEVICE void begin(const u8* from, int first) {
    mine = EVEN ? from + (size_t)(first + threadIdx.x / PIECES) * STRIDE + threadIdx.x % PIECES * 16 : from;
  }
  static constexpr int OWN = EVEN ? (COUNT + THREADS - 1) / THREADS : 0;  // copies of a thread
  DEVICE void copy_own(u32 to, int i) const {
    if (!FEW || threadIdx.x < COUNT) copy16(to + (i * THREADS + threadIdx.x) * 16, mine + (size_t)(i * THREADS / PIECES) * STRIDE);
  }
  DEVICE void copy(u32 to, int first, int last) const {
    if constexpr (EVEN) {
      if (!FEW || threadIdx.x < COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT; i += THREADS) copy16(to + i * 16 + threadIdx.x * 16, mine + (size_t)(i / PIECES) * STRIDE);
      }
    } else {
#pragma unroll
      for (int i = threadIdx.x; i < COUNT; i += THREADS)
        copy16(to + i * 16, mine + (size_t)min(first + i / PIECES, last) * STRIDE + i % PIECES * 16);
    }
  }
};
// x as rows: a warp's copy is of 4 tokens × 64 inputs, whole lines of memory, to the places that load_x takes them from.
constexpr int ABREAST = 2 * SB;  // copies of 8 tokens
constexpr int X_COPIES = TOKENS / 8 * ABREAST;
constexpr bool X_EVEN = X_COPIES % WARPS == 0 && WARPS % ABREAST == 0 && KDIM % 64 == 0;
// AHEAD: of odd chunks neighbouring tokens change places, so that a line of memory goes to as many banks as it is long.
DEVICE u32 place_of(int i, int lane) {
  const int odd = lane / 4 % 2;
  return (i / ABREAST * SB + i / 2 % SB) * 1024 + odd * 512 + ((i % 2 * 4 + lane / 8) ^ odd * AHEAD) * 64 + lane % 4 * 16;
}
DEVICE int row_of(int i, int lane) { return i / ABREAST * 8 + i % 2 * 4 + lane / 8; }
DEVICE int input_of(int i, int lane) { return i / 2 % SB * 64 + lane % 8 * 8; }

// Which stage is copied next: runs through the same segments as the products, ahead of them. Addresses are counted up.
struct Ahead {
  Segment s = {};
  int unit, stage = 0, n_tiles;
  const int* expert_of;
  Tiles<MT * WEIGHT_PIECES, WEIGHT_PIECES, BLOCKS * BLOCK_BYTES> weights;
  Tiles<MT * (GROUPED ? RECORD_PIECES : 1), GROUPED ? RECORD_PIECES : 1, GROUPS * GROUP_BYTES> records;
  const u16* x;
  DEVICE Ahead(int tiles, const int* experts) : unit(first_unit(tiles)), n_tiles(tiles), expert_of(experts) {}
  DEVICE int first() const { return s.expert * TILES + s.m * MT; }
  DEVICE void begin_records(const Source& a) { records.begin((const u8*)a.records + first_group(stage) * GROUP_BYTES, first()); }
  template <bool WEIGHTS, bool X> DEVICE void begin(const Source& a) {
    stage = s.begin;
    if (WEIGHTS) weights.begin(a.weights + (size_t)stage * (SB * BLOCK_BYTES), first());
    if (WEIGHTS && GROUPED) begin_records(a);
    if (X && X_ROWS && X_EVEN) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      x = (const u16*)a.x + (size_t)(s.n * TOKENS + row_of(warp, lane)) * KDIM + stage * SB * 64 + input_of(warp, lane);
    }
  }
  DEVICE void fetch_weights(u32 to, const Source& a) {
    const int last = s.expert * TILES + TILES - 1;
    weights.copy(to, first(), last);
    weights.mine += SB * BLOCK_BYTES;
    if constexpr (GROUPED) {
      if (!RECORDS_COUNT) begin_records(a);
      records.copy(to + WEIGHT_BYTES, first(), last);
      records.mine += STAGE_GROUPS * GROUP_BYTES;
    }
  }
  DEVICE void fetch_x(u32 to, const Source& a) {
    to += X_AT;
#if X_ROWS
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (X_EVEN && (s.n + 1) * TOKENS <= a.rows) {
#pragma unroll
      for (int i = 0; i < X_COPIES; i += WARPS) copy16(to + place_of(warp, lane) + i / ABREAST * (8 * X_ROW), x + (size_t)(i / ABREAST * 8) * KDIM);
    } else {
      const u16* from = (const u16*)a.x + stage * SB * 64;
#pragma unroll
      for (int i = warp; i < X_COPIES; i += WARPS) {
        const int row = s.n * TOKENS + row_of(i, lane), input = input_of(i, lane);
        const bool exists = row < a.rows && (KDIM % 64 == 0 || stage * SB * 64 + input < KDIM);
        copy16_or_zeros(to + place_of(i, lane), exists ? from + (size_t)row * KDIM + input : from, exists);
      }
    }
    if (X_EVEN) x += SB * 64;
#else
    const u8* from = a.x + ((size_t)stage * a.x_tiles + s.n) * X_BYTES;
#pragma unroll
    for (int i = threadIdx.x; i < X_BYTES / 16; i += THREADS) copy16(to + i * 16, from + i * 16);
#endif
  }
#if AHEAD
  // The same in small parts, which go between products: begin_stage, copy_part from 0 on, end_stage.
  static constexpr bool EVEN = decltype(weights)::EVEN && (X_ROWS ? X_EVEN : X_BYTES / 16 % THREADS == 0);
  static constexpr int OF_WEIGHTS = decltype(weights)::OWN, OF_X = EVEN ? (X_ROWS ? X_COPIES / WARPS : X_BYTES / 16 / THREADS) : 0;
  static constexpr int COPIES = OF_WEIGHTS + OF_X;
  bool in_parts;
  const u8* packed;
  DEVICE void begin_stage(u32 to, const Source& a) {
    if (stage >= s.end && next_segment(s, unit, n_tiles, expert_of)) {
      begin<true, true>(a);
      if (!X_ROWS) packed = a.x + ((size_t)stage * a.x_tiles + s.n) * X_BYTES + threadIdx.x * 16;
    }
    in_parts = EVEN && stage < s.end && (!X_ROWS || (s.n + 1) * TOKENS <= a.rows);
    if (!in_parts && stage < s.end) {
      fetch_weights(to, a);
      fetch_x(to, a);
    }
  }
  DEVICE void copy_part(u32 to, int i) const {
    if (!in_parts) return;
    if (i < OF_WEIGHTS) return weights.copy_own(to, i);
    const int j = i - OF_WEIGHTS;
#if X_ROWS
    constexpr int each = WARPS / ABREAST;
    copy16(to + X_AT + place_of(threadIdx.x / 32, threadIdx.x % 32) + j * each * (8 * X_ROW), x + (size_t)(j * each * 8) * KDIM);
#else
    copy16(to + X_AT + (j * THREADS + threadIdx.x) * 16, packed + j * THREADS * 16);
#endif
  }
  DEVICE void end_stage(const Source& a) {
    if (in_parts) {
      weights.mine += SB * BLOCK_BYTES;
      if (X_ROWS) x += SB * 64;
    }
    if (!X_ROWS) packed += (size_t)a.x_tiles * X_BYTES;
    stage++;
    copy_group();
  }
#endif
  template <bool WEIGHTS, bool X> DEVICE void fetch(u32 to, const Source& a) {
    if (stage >= s.end && next_segment(s, unit, n_tiles, expert_of)) begin<WEIGHTS, X>(a);
    if (stage < s.end) {
      if (WEIGHTS) fetch_weights(to, a);
      if (X) fetch_x(to, a);
      stage++;
    }
  }
  // The first STAGES - 1 stages. Weights do not depend on the kernel before this one, and so come while it runs; with them the first
  // stage's x is one group of copies.
  DEVICE static Ahead fill(u32 ring, const Source& a, int tiles, const int* experts) {
    Ahead early(tiles, experts), late(tiles, experts);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) early.fetch<true, false>(ring + i * STAGE_BYTES, a);
    if (!EXPERTS) wait_for_inputs();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) late.fetch<false, true>(ring + i * STAGE_BYTES, a), copy_group();
    late.weights = early.weights, late.records = early.records;
#if AHEAD
    if (!X_ROWS) late.packed = a.x + ((size_t)late.stage * a.x_tiles + late.s.n) * X_BYTES + threadIdx.x * 16;
#endif
    return late;
  }
};

// Four registers of x, of a token and a chunk, which is an odd one or not.
DEVICE uint4 load_x(const u8* chunk, int odd, int lane) {
#if X_ROWS
  const uint4 w = ((const uint4*)chunk)[lane ^ 4 * odd * AHEAD];
  if (NATURAL_ORDER || (!GROUPED && FORMAT != FP8_WIDE)) return w;
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

// A chunk's registers of x, of all columns of a warp.
DEVICE void load_columns(uint4 (&x)[COLUMNS], const u8* from, int chunk, int lane) {
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) x[n] = load_x(from + chunk * 512 + n * 8 * X_ROW, chunk % CHUNKS, lane);
}
constexpr int RUN = LATE_SCALE && SB > 2 ? 2 * CHUNKS : SB * CHUNKS;  // chunks whose sums are of one group, or of a stage
DEVICE const Record* records_of(const u8* slot, int tile) { return (const Record*)(slot + WEIGHT_BYTES) + tile * STAGE_GROUPS * RECORD_LENGTH; }
// A stage of a warp: `first` is its first tile, `x` its first column's. Codes of a tile are taken apart between the products of the one
// before it, so that the matrix units have work meanwhile; x of a chunk stays in registers for all tiles, and comes a chunk ahead
// where there is room. With few columns scales meet the sums of a group: those are fewer than its weights (LATE_SCALE).
DEVICE void multiply_chunks(Sums& sums, const u8* slot, const u8* x, int stage, int begin, int first, int lane) {
  constexpr int SETS = COLUMNS <= (LATE_SCALE ? 2 : 8) ? 2 : 1;
  uint4 columns[SETS][COLUMNS];
  if (SETS == 2) load_columns(columns[0], x, begin, lane);
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const int block = (begin + i) / CHUNKS, chunk = i % CHUNKS;
    if (SETS == 1) load_columns(columns[0], x, begin + i, lane);
    else if (i + 1 < RUN) load_columns(columns[(i + 1) % SETS], x, begin + i + 1, lane);
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
      const Block here(slot + (first + m) * SB * BLOCK_BYTES, records_of(slot, first + m), stage, block, lane);
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        u32 a[WORDS];
        here.take(chunk * TOGETHER + j, a);
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) product(four(sums, m, n), a, columns[i % SETS][n], j);
      }
    }
  }
}
DEVICE void multiply_stage(Sums& sums, const u8* slot, const u8* x, int stage, int first, int lane) {
#if LATE_SCALE
#pragma unroll
  for (int begin = 0; begin < SB * CHUNKS; begin += RUN) {
    Sums group = {};
    multiply_chunks(group, slot, x, stage, begin, first, lane);
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
      const Record* record = records_of(slot, first + m) + group_in_stage(stage, begin / CHUNKS, 0) * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < COLUMNS * 4; j++)
        sums[m][j] += group[m][j] * float_of<SCALE_FP16>((u16)(record[j / 2 % 2 * 8] & 0xffff));
    }
  }
#else
  multiply_chunks(sums, slot, x, stage, 0, first, lane);
#endif
}

#if AHEAD
// The same where codes go in as they lie, for many tokens. What a warp multiplies next is in registers before it is done with what it
// has: weights of the next tile, and x of the next chunk, a column as soon as the last tile is done with it; of the next stage, too. So
// the barrier between stages stands before the products of the last two tiles, when the last weights of a stage are taken, and the matrix
// units have work meanwhile.
static_assert((FORMAT == PLAIN || FORMAT == W8A8) && !SPARSE, "codes as they lie");
static_assert(SB * CHUNKS * PER_WARP % 2 == 0 && SB * CHUNKS * PER_WARP > 2, "a stage is fetched before its barrier");
struct Fragments {
  uint4 x[COLUMNS], weights[2][TOGETHER];
};
DEVICE void load_weights(uint4 (&w)[TOGETHER], const u8* tiles, int i, int m, int lane) {
  const u8* block = tiles + (m * SB + i / CHUNKS) * BLOCK_BYTES;
#pragma unroll
  for (int j = 0; j < TOGETHER; j++) w[j] = ((const uint4*)block)[32 * (i % CHUNKS * TOGETHER + j) + lane];
}
struct Stage {  // of a warp
  const u8 *weights, *x;
  DEVICE Stage(const u8* slot, int first, int column) : weights(slot + first * SB * BLOCK_BYTES), x(slot + X_AT + column * 8 * X_ROW) {}
};
DEVICE void multiply_one(Sums& sums, uint4 w, uint4 x, int m, int n, int j) {
  const u32 a[WORDS] = {w.x, w.y, w.z, w.w};
  product(four(sums, m, n), a, x, j);
}
template <class FETCH, class NEXT>
DEVICE void multiply_ahead(Sums& sums, Fragments& f, Stage here, Stage next, int lane, FETCH fetch, NEXT next_stage) {
  constexpr int COUNT = SB * CHUNKS * PER_WARP;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int i = k / PER_WARP, m = k % PER_WARP;
    if (k + 1 < COUNT) load_weights(f.weights[(k + 1) % 2], here.weights, (k + 1) / PER_WARP, (k + 1) % PER_WARP, lane);
    else load_weights(f.weights[(k + 1) % 2], next.weights, 0, 0, lane);
    if (k + 2 == COUNT) next_stage();
    const uint4(&w)[TOGETHER] = f.weights[k % 2];
    if (m + 1 < PER_WARP) {
#pragma unroll
      for (int j = 0; j < TOGETHER; j++)
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) multiply_one(sums, w[j], f.x[n], m, n, j);
    } else {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) multiply_one(sums, w[j], f.x[n], m, n, j);
        if (i + 1 < SB * CHUNKS) f.x[n] = load_x(here.x + (i + 1) * 512 + n * 8 * X_ROW, (i + 1) % CHUNKS, lane);
        else f.x[n] = load_x(next.x + n * 8 * X_ROW, 0, lane);
      }
    }
    fetch(k);
  }
}
#endif

// Sums of a tile that begins in another CTA, left for it in `mail`; and the owner's taking them in, in the order of the stages. A word
// is its own flag, as in mail.cuh: all ones until it is written, and all ones again when it is taken.
constexpr int PIECES = PER_WARP * COLUMNS;  // of 16 bytes, that a thread leaves
constexpr u32 FLIP = FORMAT == W8A8 ? 0x80000000u : 0;  // all ones would be -1: so they are an integer that no sum comes near
DEVICE void store_words(uint4* p, uint4 v) {
#ifdef ON_THE_HOST
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) store_relaxed((float*)p + i, __uint_as_float(words[i]));
#else
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
DEVICE uint4* mail_of(uint4* mail, int cta) { return mail + (size_t)cta * PIECES * THREADS + threadIdx.x; }
DEVICE void leave_partial(const Sums& sums, uint4* mail) {
  uint4* to = mail_of(mail, blockIdx.x);
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const uint4 v = *(const uint4*)&sums[i / COLUMNS][i % COLUMNS * 4];
    store_words(to + i * THREADS, make_uint4(v.x ^ FLIP, v.y ^ FLIP, v.z ^ FLIP, v.w ^ FLIP));
  }
}
// Several CTAs' words are asked for at a time: one after the other their ways through memory would add up.
DEVICE void take_partials(Sums& sums, uint4* mail, int tile, int n_tiles) {
  constexpr int MOST = THREADS * CTAS <= 256 && PIECES <= 16 ? 16 : 8;  // pieces that registers have room for beside the sums
  constexpr int AT_ONCE = PIECES <= MOST ? PIECES : PIECES % MOST == 0 ? MOST : PIECES % 4 == 0 ? 4 : 1;
  constexpr int OTHERS = PIECES < MOST ? MOST / PIECES : 1;
  const int line = line_begin(n_tiles), units = M_TILES * n_tiles * STAGE_COUNT - line, stop = (tile + 1) * STAGE_COUNT - line;
  const int last = (int)(((unsigned long long)stop * working() - 1) / units);  // the CTA that has unit stop - 1
  auto works = [&](int cta) {  // there may be more CTAs than units
    return cta <= last && (units >= (int)working() || unit_begin(cta, units) < unit_begin(cta + 1, units));
  };
#pragma unroll 1
  for (int cta = blockIdx.x + 1; cta <= last; cta += OTHERS) {
    bool there[OTHERS];
#pragma unroll
    for (int c = 0; c < OTHERS; c++) there[c] = works(cta + c);
#pragma unroll
    for (int part = 0; part < PIECES; part += AT_ONCE) {
      u32 words[OTHERS * AT_ONCE][4];
      await_words(words, [&](int i) { return there[i / AT_ONCE]; },
                  [&](int i) { return mail_of(mail, cta + i / AT_ONCE) + (part + i % AT_ONCE) * THREADS; });
#pragma unroll
      for (int i = 0; i < OTHERS * AT_ONCE; i++) {
        const int c = i / AT_ONCE, piece = part + i % AT_ONCE;
        if (!there[c]) continue;
        store_words(mail_of(mail, cta + c) + piece * THREADS, make_uint4(~0u, ~0u, ~0u, ~0u));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 word = words[i][j] ^ FLIP;
          sums[piece / COLUMNS][piece % COLUMNS * 4 + j] += *(const accumulator*)&word;
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
gemm_mma(const u8* weights, const u32* records, const float* channel_scale, const u8* x, const float* row_scale, const u16* bias,
         const u16* residual, u16* Y, uint4* mail, const int* expert_of, const int* tiles, int rows, int groups LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  if (SPLIT == LINE && blockIdx.x >= working()) return stay();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_tile = warp % OUT_WARPS * PER_WARP, first_column = warp / OUT_WARPS * COLUMNS;
  launch_dependents();
  const int x_tiles = X_TILES ? X_TILES : (rows + TOKENS - 1) / TOKENS;
  int n_tiles = x_tiles;
  if (EXPERTS) wait_for_inputs(), n_tiles = tiles[0], rows = n_tiles * TOKENS;
  const Source source = {weights, records, x, rows, x_tiles};
  const u32 ring = shared_address(raw);
  Ahead ahead = Ahead::fill(ring, source, n_tiles, expert_of);
  int slot = 0, unit = first_unit(n_tiles);
  Segment s;
#if AHEAD
  Fragments fragments;
  auto stage_in = [&](int slot) { return Stage(raw + slot * STAGE_BYTES, first_tile, first_column); };
  auto next_stage = [&]() {
    copy_wait<STAGES - 2>();
    __syncthreads();  // the next stage is there, and nobody reads this one any more
  };
  next_stage();
  load_columns(fragments.x, stage_in(0).x, 0, lane);
  load_weights(fragments.weights[0], stage_in(0).weights, 0, 0, lane);
#endif
  while (next_segment(s, unit, n_tiles, expert_of)) {
    Sums sums = {};
#pragma unroll 1
    for (int stage = s.begin; stage < s.end; stage++) {
#if AHEAD
      const u32 to = ring + (slot ? slot - 1 : STAGES - 1) * STAGE_BYTES;
      auto fetch = [&](int k) {  // in as many parts as there are tiles to multiply before the barrier
        constexpr int before = SB * CHUNKS * PER_WARP - 2;
        if (k == 0) ahead.begin_stage(to, source);
#pragma unroll
        for (int i = 0; i < Ahead::COPIES; i++)
          if (i * before / Ahead::COPIES == k) ahead.copy_part(to, i);
        if (k + 1 == before) ahead.end_stage(source);
      };
      const int next = slot + 1 == STAGES ? 0 : slot + 1;
      multiply_ahead(sums, fragments, stage_in(slot), stage_in(next), lane, fetch, next_stage);
      slot = next;
#else
      copy_wait<STAGES - 2>();
      __syncthreads();  // the stage is there, and all are done with the one before it
      ahead.fetch<true, true>(ring + (slot ? slot - 1 : STAGES - 1) * STAGE_BYTES, source);
      copy_group();
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
#endif
    }
    if (SPLIT == LINE && s.begin > 0) {
      leave_partial(sums, mail);
      continue;
    }
    if (SPLIT == LINE && s.end < STAGE_COUNT) take_partials(sums, mail, (unit - 1) / STAGE_COUNT, n_tiles);
#pragma unroll
    for (int m = 0; m < PER_WARP; m += IN_LINES ? TOGETHER_TILES : 1) {
      if constexpr (IN_LINES) {
        write_lines(sums, m, s, first_tile, first_column, channel_scale, row_scale, bias, residual, Y, rows, lane);
        continue;
      }
      const Ends<COLUMNS> ends(s, first_column, channel_scale, row_scale, bias, residual, rows, first_tile + m, lane);
      write_tile<COLUMNS>(sums[m], ends, s, first_column, Y, rows, groups, first_tile + m, lane);
    }
  }
  end_launch(THREADS);
}
