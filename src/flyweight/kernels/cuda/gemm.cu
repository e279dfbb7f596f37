// y[r, n] = sum_k x[r, k] · W[n, k] for 9 rows to many thousands, from the same tiles that gemv.cu reads.
//
// Work split: the weight is the left operand (its rows are the matrix units' 64), tokens are the columns.
//
//      W: MT tiles of 16 outputs  ─┐  per stage: SB blocks of 64 inputs of each tile, one bulk copy a tile
//      x: TOKENS rows, packed     ─┴→ D[16 · MT, TOKENS] in registers; WGS warpgroups, 64 outputs each
//
// A stage's weights go from shared memory to registers, become 16-bit floats there where they are codes (exact integers
// less the zero point, times the scale, rounded once) and meet x, which stays in shared memory. pack.cu has written x in
// the order that the matrix units want (core matrices; inputs permuted the way a lane holds its codes: packed.cuh), with the norm
// applied and, for W8A8 and float8, quantized. So both operands arrive by plain bulk copies. 2:4 weights stay compressed: the
// sparse matrix units take 64 inputs (8 bits) or 32 (16 bits) at a time, with a word that says which of them are kept.
//
// How the tiles are shared out (SPLIT):
//   CLUSTERS, few rows: the inputs of a tile are cut over the CTAs of a cluster, which add up in each other's shared
//     memory, every owner some columns. A CTA is alone on its SM, or rings and registers are so small that two kernels fit on it.
//     Sums meet where the rings were, when all are done with theirs, or, with few tokens, in a place of their own (APART).
//   MAIL: the same without clusters, sums meet in memory. Of clusters of more than two, with an SM to each CTA, fewer are
//     resident than there is room for, since GPCs are not all whole. Every CTA is resident (grid ≤ SMs), so waiting is safe.
//   LINE, too few tiles for whole ones: the stages of all tiles lie in one line that is cut evenly over the CTAs. A CTA
//     whose part begins inside a tile leaves its sums in `partials`; the CTA that has the tile's beginning comes to it
//     last, adds them in order and writes the outputs. Every CTA is resident here too.
//   WHOLE: CTAs take tiles in turn, neighbours sharing rows and columns so that L2 serves most reads.
// Sums are added in a fixed order: the same bits every time.
//
// TEAMS = 2: a tile of 64 outputs that has an SM for itself is two warpgroups' work: stages go to them by turns, and the second
// leaves its sums to the first in shared memory. One alone waits for its own barriers, loads and conversions.
//
// STAGED tokens at a time (0: none) go through shared memory when a tile is done, so that whole lines are written; where that is
// the whole tile, the residual waits there from the tile's beginning on. So do scales: fetched when they are wanted, they would
// hold up the matrix units at every tile's end.
//
// PACKED: act(gate)·up's results are written in the order of the product that follows, which then needs no pack.cu: its SB, and its ORDER.
//
// EXPERTS: the weights of many experts are stacked, and a tile of tokens belongs to one of them. How many tiles there are, and
// whose, route.cu has left in memory: nothing is fetched before that. Rows that fill up a tile are zeros.
//
// Limit: bytes of weights / bandwidth for few rows, the matrix units for many.
//
// defines: FORMAT, SPARSE (0), SYMMETRIC (0), FP16, SCALE_FP16, KDIM, NDIM, GROUP, EPILOGUE, BIAS, TOKENS, WGS, SB, STAGES, SPLIT, LOADERS,
// CLUSTER, STAGED, TEAMS (1), BEFORE (STAGES), EXPERTS (0), APART (0), IN_PLANES (0: gemm_planes.cuh), PACKED (0), ORDER (0), BY_ROWS (0:
// 16-bit tiles whose 16 bytes are of one row each, as kernels that have just decoded a row write them)
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"
#include "patience.cuh"

#ifndef EXPERTS
#define EXPERTS 0
#endif
#ifndef PACKED
#define PACKED 0
#define ORDER 0
#endif
#ifndef BY_ROWS
#define BY_ROWS 0
#endif
#ifndef BEFORE
#define BEFORE STAGES
#endif
#ifndef TEAMS
#define TEAMS 1
#endif
#define WHOLE 0
#define LINE 1
#define CLUSTERS 2
#define MAIL 3
#define SLICED (SPLIT == CLUSTERS || SPLIT == MAIL)
#define IN_CLUSTER (SPLIT == CLUSTERS && CLUSTER > 1)
#ifndef APART
#define APART 0
#endif

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (SB * 64 + GROUP - 1) / GROUP;
constexpr int MT = 4 * WGS, M_TILES = (TILES + MT - 1) / MT;
constexpr int STAGE_COUNT = BLOCKS / SB;                       // of a tile
constexpr int WEIGHT_BYTES = MT * SB * BLOCK_BYTES, RECORD_BYTES = MT * STAGE_GROUPS * GROUP_BYTES;
constexpr bool BYTES = QUANTIZED || IN_PLANES;                 // x consists of them
constexpr int X_ROW = SB * 64 * (BYTES ? 1 : 2), X_ALL = TOKENS * (1 + IN_PLANES) * X_ROW;
constexpr int X_BYTES = X_ALL + IN_PLANES * STAGE_GROUPS * TOKENS * 8;  // and scales
constexpr int STAGE_BYTES = WEIGHT_BYTES + RECORD_BYTES + X_BYTES;
constexpr int THREADS = WGS * 128, MULTIPLYING = TEAMS * WGS * 4;  // of a team; warps of all
constexpr bool WIDE = FORMAT == FP8 ? TOKENS >= 128 : TOKENS >= 192 && WGS > 1;  // accumulators take most registers: the producers give theirs
static_assert(!WIDE || WGS <= 2, "there are registers for two warpgroups with 232 each: more would wait for them forever");
constexpr int COLUMNS = TOKENS / 8;                            // groups of 8 tokens
constexpr int MOST_OWNERS = CLUSTER < COLUMNS ? CLUSTER : COLUMNS;
constexpr int OWNERS = MOST_OWNERS >= 8 ? 8 : MOST_OWNERS >= 4 ? 4 : MOST_OWNERS >= 2 ? 2 : 1, OWNED = COLUMNS / OWNERS;
constexpr int STEPS = (BYTES ? 2 : 4) / (1 + SPARSE);          // matrix products a block of 64 inputs takes
constexpr int TOGETHER = TOKENS > 64 ? STEPS : 1;              // products issued before more weights are taken apart
constexpr int IN_FLIGHT = STEPS / TOGETHER > 2 ? STEPS / TOGETHER - 1 : 1;
constexpr int STEP_BYTES = 256 * (1 + SPARSE);                 // of 8 tokens, that one product takes
constexpr int WORDS = 4 + SPARSE;                              // of a lane: codes, and which inputs they are
constexpr int WIDTH = GATE_UP ? NDIM / 2 : NDIM;
constexpr int OUT_BYTES = GATE_UP ? 64 : 128;         // of a token, by one warpgroup
constexpr int OUT_ROW = OUT_BYTES + 16;                        // padded: 8 rows lie in different banks
static_assert(!STAGED || (!SLICED && STAGED >= 32 && TOKENS % STAGED == 0 && WIDTH % 8 == 0), "written in pieces of 16 bytes");
static_assert(!PACKED || (GATE_UP && WIDTH % (64 * PACKED) == 0), "whole stages");
static_assert(BLOCKS % SB == 0, "stages are whole");
static_assert(TEAMS == 1 || (SB > 1 && SPLIT != LINE && !EXPERTS && STAGES > TEAMS), "a CTA has one tile");
static_assert(!EXPERTS || (SPLIT == WHOLE && NDIM % 16 == 0), "whole tiles of one expert each");
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
    uint4 exchange[IN_CLUSTER && !APART ? CLUSTER : 1][IN_CLUSTER ? OWNED : 1][THREADS];  // [from][column group]: shares of ours
  };
  uint4 apart[APART ? CLUSTER - 1 : 1][APART ? OWNED : 1][APART ? THREADS : 1];  // the others' alone
  u8 staging[WGS][STAGED ? STAGED * OUT_ROW : 16];
  float scales[WGS][STAGED && QUANTIZED ? TOKENS + 64 : 4];  // of the tile's rows, then of a warpgroup's outputs
  u64 full[STAGES], empty[STAGES], met;
};

DEVICE void await_stage(Shared& sh, int slot, u32 parity) {
  // the other team's stage may still be on its way there: only when that is done with, `parity` means what it says
  if (STAGES % TEAMS) barrier_wait(&sh.empty[slot], parity ^ 1);
  barrier_wait(&sh.full[slot], parity);
}
DEVICE void next_slot(int& slot, u32& parity) {  // of a team
  if constexpr (TEAMS > 1) {
    if ((slot += TEAMS) >= STAGES) slot -= STAGES, parity ^= 1;
  } else {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
}

#include "fragments.cuh"
#include "gemm_planes.cuh"

#if FORMAT == FP8
// Float8 sums inside the matrix units have 14 bits, so those of WINDOW stages are added to `acc` in full float32: PART tokens at a
// time, to have the registers, and AHEAD parts late, so that the matrix units have work meanwhile. All are added when a window ends:
// where sums are in flight across the loop's end, the compiler does the products one by one. `sum` lives on from window to
// window: if it were new, the compiler would spread it over more registers than there are.
constexpr int WINDOW = TOKENS >= 128 && STAGES >= 4 ? 2 : 1;
static_assert(TEAMS == 1 || WINDOW == 1, "a team takes a stage at a time");
constexpr int AHEAD = TOKENS >= 128 ? 1 : 0, PART = TOKENS >= 128 ? 64 : TOKENS, STAGE_PARTS = TOKENS / PART;
template <int COUNT>
DEVICE void multiply_window(Shared& sh, float (&acc)[TOKENS / 2], float (&sum)[AHEAD + 1][PART / 2], int& slot, u32& parity, int keep,
                            int warp, int lane) {
  u32 a[COUNT][SB][STEPS][WORDS];
  u64 x[COUNT];
  int slots[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    await_stage(sh, slot, parity);
    const u8* ring = sh.ring[slot];
#pragma unroll
    for (int j = 0; j < SB * STEPS; j++)
      Block(ring + warp * SB * BLOCK_BYTES, nullptr, 0, j / STEPS, lane).take(j % STEPS, a[i][j / STEPS][j % STEPS]);
    x[i] = matrix_descriptor(ring + WEIGHT_BYTES, X_ROW * 8);
    slots[i] = slot;
    next_slot(slot, parity);
  }
  auto add = [&](int part) {  // whose products are done
    float(&from)[PART / 2] = sum[part % (AHEAD + 1)];
    keep_behind(from);
#pragma unroll
    for (int i = 0; i < PART / 2; i++) acc[part * PART / 2 + i] += from[i];
  };
#pragma unroll
  for (int part = 0; part < STAGE_PARTS; part++) {
    float(&to)[PART / 2] = sum[part % (AHEAD + 1)];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < COUNT * SB * STEPS; i++) {
      const int stage = i / STEPS / SB, block = i / STEPS % SB, step = i % STEPS;
      const u64 b = x[stage] + part * (PART * X_ROW >> 4) + (block * STEPS + step) * (STEP_BYTES >> 4);
      if (i == 0) wgmma_first(to, a[stage][block][step], b, keep);
      else wgmma(to, a[stage][block][step], b);
    }
    wgmma_commit();
    if (part < AHEAD) continue;
    wgmma_wait<AHEAD>();
    add(part - AHEAD);
  }
  wgmma_wait<0>();
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < COUNT; i++) barrier_arrive(&sh.empty[slots[i]]);
  if (AHEAD) add(STAGE_PARTS - 1);
}
#endif

#include "packed.cuh"
#include "segments.cuh"
#include "gemm_segments.cuh"
#include "gemm_results.cuh"
#define SLICES CLUSTER
#include "mail.cuh"
#include "gemm_sums.cuh"

extern "C" __global__ void
#if TOKENS > 64  // of others the host limits the registers
__launch_bounds__(TEAMS * THREADS + LOADERS * 32, 1)
#endif
gemm(const u8* weights, const u32* records, const float* channel_scale, const u8* x, const float* row_scale, const u16* bias,
     const u16* residual, u16* Y, uint4* partials, int* flags, const int* expert_of, const int* tiles, int rows,
     int groups) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int cta_warp = threadIdx.x / 32, lane = threadIdx.x % 32, x_tiles = (rows + TOKENS - 1) / TOKENS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], LOADERS);
      barrier_init(&sh.empty[i], WGS * 4);
    }
    if (APART) barrier_init(&sh.met, 1);
    fence_barriers();
    if (APART && blockIdx.x % CLUSTER < OWNERS) copy_begin(&sh.met, sizeof sh.apart, 0);
  }
  __syncthreads();
  launch_dependents();
  if (APART) cluster_arrive();
  int n_tiles = x_tiles;
  if (EXPERTS) {
    wait_for_inputs();
    n_tiles = tiles[0], rows = n_tiles * TOKENS;
  }
  if (SLICED && blockIdx.x >= M_TILES * n_tiles * CLUSTER) return;  // the grid is of the most rows that this call takes
  if (cta_warp >= MULTIPLYING) {
    if (WIDE) give_registers<40>();
    if (lane == 0) produce(sh, weights, records, x, expert_of, n_tiles, x_tiles, cta_warp - MULTIPLYING);
    else wait_for_inputs();
    __syncwarp();
    if (IN_CLUSTER && !APART) cluster_arrive(), cluster_wait(), cluster_arrive(), cluster_wait();
    return;
  }
  // where there is one, the compiler has to know that it is 0: for one number more it has no register with float8
  const int team = TEAMS > 1 ? threadIdx.x / THREADS : 0, warp = TEAMS > 1 ? cta_warp % (WGS * 4) : cta_warp;
  if (WIDE) take_registers<232>();
  if (QUANTIZED && SLICED && lane == 0)  // here before they are needed
    prefetch_l2(channel_scale + min((int)blockIdx.x / CLUSTER / x_tiles * MT + warp, TILES - 1) * 16);
  wait_for_inputs();
  int slot = team, unit = first_unit(n_tiles);
  u32 parity = 0;
  Segment s;
  while (next_segment(s, unit, n_tiles, expert_of)) {
    accumulator acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
#if STAGED
    if (QUANTIZED && s.begin == 0 && team == 0) fetch_scales(sh, s, channel_scale, row_scale, warp);
    if (EPILOGUE == RESIDUAL && s.begin == 0 && team == 0) {
      fetch_residual(sh, s, 0, residual, rows, warp, lane);
      prefetch_residual(s, residual, rows, warp);
    }
#endif
#if FORMAT == FP8
    float sum[AHEAD + 1][PART / 2] = {};
    int stage = s.begin + team;
#pragma unroll 1
    for (; stage + WINDOW <= s.end; stage += WINDOW * TEAMS) multiply_window<WINDOW>(sh, acc, sum, slot, parity, rows < 0, warp, lane);
#pragma unroll 1
    for (; WINDOW > 1 && stage < s.end; stage++) multiply_window<1>(sh, acc, sum, slot, parity, rows < 0, warp, lane);
#elif IN_PLANES
    int sum[TOKENS] = {};
#pragma unroll 1
    for (int stage = s.begin + team; stage < s.end; stage += TEAMS) {
      await_stage(sh, slot, parity);
      multiply_planes(sh, acc, sum, slot, rows < 0, warp, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.empty[slot]);
      next_slot(slot, parity);
    }
#else
    int before = -1, stage = s.begin + team;  // `before`: the slot that the products in flight may still read
    auto multiply = [&] {  // with the stage in `slot`
      await_stage(sh, slot, parity);
      const u8* ring = sh.ring[slot];
      const u8* mine = ring + warp * SB * BLOCK_BYTES;
      const Record* records_here = (const Record*)(ring + WEIGHT_BYTES) + warp * STAGE_GROUPS * RECORD_LENGTH;
      // by shuffle: only then the compiler knows that it is the same in all lanes, and keeps it where the products want it
      const u64 b0 = matrix_descriptor(sh.ring[__shfl_sync(~0u, slot, 0)] + WEIGHT_BYTES + RECORD_BYTES, X_ROW * 8);
      Block next(mine, records_here, stage, 0, lane);
#pragma unroll
      for (int block = 0; block < SB; block++) {
        const Block here = next;
        auto fetch = [&] {
          if (block + 1 < SB) next = Block(mine, records_here, stage, block + 1, lane);
        };
        constexpr bool early = GROUPED && !SPARSE;  // of others it goes into registers that products in flight may still read
        if (early) fetch();
#pragma unroll
        for (int first = 0; first < STEPS; first += TOGETHER) {  // taken apart while the products before run
          u32 a[TOGETHER][WORDS];
#pragma unroll
          for (int i = 0; i < TOGETHER; i++) here.take(first + i, a[i]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < TOGETHER; i++) wgmma(acc, a[i], b0 + (block * STEPS + first + i) * (STEP_BYTES >> 4));
          wgmma_commit();
          wgmma_wait<IN_FLIGHT>();
        }
        if (!early) fetch();
        if (block == 0 && before >= 0 && lane == 0) barrier_arrive(&sh.empty[before]);  // the stage before is done
      }
      before = slot, stage += TEAMS;
      next_slot(slot, parity);
    };
    constexpr int turns = SB == 1 ? 2 : 1;  // the registers of a block are read on while the next one's are filled: two sets
#pragma unroll 1
    for (int i = s.begin + team; i + turns <= s.end; i += turns * TEAMS) {
      multiply();
      if (turns == 2) multiply();
    }
    if (turns == 2 && (s.end - s.begin) % 2) {
      wgmma_wait<0>();
      multiply();
    }
    wgmma_wait<0>();
    keep_behind(acc);
    if (lane == 0 && (TEAMS == 1 || before >= 0)) barrier_arrive(&sh.empty[before]);
#endif
#if TEAMS > 1
    named_barrier(7, TEAMS * THREADS);  // all of the ring is done with
    if (team) leave_sums(sh, acc);
    named_barrier(7, TEAMS * THREADS);
    if (team) {
      if (IN_CLUSTER && !APART) cluster_arrive(), cluster_wait(), cluster_arrive(), cluster_wait();
      return;
    }
    add_sums(acc, sh);
#endif
#if CLUSTER > 1
    const int rank = blockIdx.x % CLUSTER, first = rank % OWNERS * OWNED;
#if APART
    cluster_wait();  // all have begun
    send_sums(sh, acc, rank);
#elif IN_CLUSTER
    cluster_arrive(), cluster_wait();  // all rings are done with
    give_sums(sh, acc, rank);
    cluster_arrive();
#else
    post_sums(acc, partials, blockIdx.x / CLUSTER, rank);
#endif
    const Ends<OWNED> ends(s, first, channel_scale, row_scale, bias, residual, rows, warp, lane);
    if (IN_CLUSTER && !APART) cluster_wait();
    if (rank < OWNERS) {
      accumulator sum[OWNED * 4];
#if APART
      receive_sums(sh, sum, acc, rank);
#elif IN_CLUSTER
      take_sums(sh, sum);
#else
      collect_sums(sum, acc, partials, blockIdx.x / CLUSTER, rank);
#endif
      write_tile<OWNED>(sum, ends, s, first, Y, rows, groups, warp, lane);
    }
#else
    if (SPLIT == LINE && s.begin > 0) {
      leave_partial(acc, partials, flags);
    } else {
      if (SPLIT == LINE && s.end < STAGE_COUNT) take_partials(acc, partials, flags, s, (unit - 1) / STAGE_COUNT, n_tiles);
#if STAGED
      write_staged(sh, acc, s, bias, residual, Y, rows, groups, warp, lane);
#else
      const Ends<COLUMNS> ends(s, 0, channel_scale, row_scale, bias, residual, rows, warp, lane);
      write_tile<COLUMNS>(acc, ends, s, 0, Y, rows, groups, warp, lane);
#endif
    }
#endif
  }
#endif
}
