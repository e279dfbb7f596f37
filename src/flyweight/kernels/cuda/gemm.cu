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
// applied and, for W8A8, quantized. So both operands arrive by plain bulk copies.
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
// Limit: bytes of weights / bandwidth for few rows, the matrix units for many.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, GROUP, EPILOGUE, BIAS, TOKENS, WGS, SB, STAGES, SPLIT, LOADERS, CLUSTER
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"

#define WHOLE 0
#define LINE 1
#define CLUSTERS 2

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr int VECTORS = FORMAT == INT4 ? 1 : FORMAT == PLAIN ? 4 : 2;  // 16-byte words a lane reads of one block
constexpr int BLOCK_BYTES = VECTORS * 512;
constexpr bool GROUPED = FORMAT == INT4 || FORMAT == INT8;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (SB * 64 + GROUP - 1) / GROUP;
constexpr int MT = 4 * WGS, M_TILES = (TILES + MT - 1) / MT;
constexpr int STAGE_COUNT = BLOCKS / SB;                       // of a tile
constexpr int WEIGHT_BYTES = MT * SB * BLOCK_BYTES, RECORD_BYTES = MT * STAGE_GROUPS * 64;
constexpr int X_ROW = SB * 64 * (FORMAT == W8A8 ? 1 : 2), X_BYTES = TOKENS * X_ROW;
constexpr int STAGE_BYTES = WEIGHT_BYTES + RECORD_BYTES + X_BYTES;
constexpr int THREADS = WGS * 128;
constexpr bool WIDE = TOKENS == 256;                           // accumulators take most registers: the producers give theirs
constexpr int COLUMNS = TOKENS / 8;                            // groups of 8 tokens
constexpr int MOST_OWNERS = CLUSTER < COLUMNS ? CLUSTER : COLUMNS;
constexpr int OWNERS = MOST_OWNERS >= 8 ? 8 : MOST_OWNERS >= 4 ? 4 : MOST_OWNERS >= 2 ? 2 : 1, OWNED = COLUMNS / OWNERS;
constexpr int STEPS = FORMAT == W8A8 ? 2 : 4;                  // matrix products a block of 64 inputs takes
constexpr int WIDTH = EPILOGUE == SILU ? NDIM / 2 : NDIM;
static_assert(BLOCKS % SB == 0, "stages are whole");
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
  u64 full[STAGES], empty[STAGES];
};

DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}

// Two 16-bit floats at a time.
DEVICE u32 add2(u32 a, u32 b) {
  u32 r;
  if (FP16) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 r;
  if (FP16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Codes in the low byte of each half (4 or 8 bits) → (code − zero) · scale. An integer set into the mantissa of a power
// of two is that power plus the integer, exactly; a bf16 mantissa has 7 bits, so bit 7 of a code goes in by itself, and takes
// what a zero point has beyond 128 with it: 128 + 129 is no bf16.
struct Scale {
  u32 scale, offset, high;  // offset: −(power + zero), or that of a zero up to 128; high: −(power + the rest)
};
DEVICE Scale read_scale(u32 record) {
  const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff)), power = FP16 ? 1024.f : 128.f;
  const int zero = record >> 16, low = FORMAT == INT8 && !FP16 ? min(zero, 128) : zero;
  const float offset = -(power + (float)low), high = -(power + (float)(zero - low));
  return {pack2(scale, scale), pack2(offset, offset), pack2(high, high)};
}
DEVICE u32 decode(u32 codes, Scale s) {
  constexpr u32 power = FP16 ? 0x64006400 : 0x43004300;
  if (FORMAT == INT4) return mul2(add2(codes & 0x000f000f | power, s.offset), s.scale);
  if (FP16) return mul2(add2(codes & 0x00ff00ff | power, s.offset), s.scale);
  const u32 low = add2(codes & 0x007f007f | power, s.offset), high = add2(codes & 0x00800080 | power, s.high);
  return mul2(add2(low, high), s.scale);
}

// The registers of one block of 64 inputs of this warp's tile: STEPS products of four words each.
DEVICE void load_block(u32 (&a)[STEPS][4], const u8* tile, const u32* records, int stage, int block, int lane) {
  const uint4* words = (const uint4*)(tile + block * BLOCK_BYTES) + lane;
#if FORMAT == PLAIN || FORMAT == W8A8
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const uint4 w = words[32 * i];
    a[i][0] = w.x, a[i][1] = w.y, a[i][2] = w.z, a[i][3] = w.w;
  }
#else
  const int g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 w4 = words[FORMAT == INT8 ? 32 * half : 0];
    const u32 w[4] = {w4.x, w4.y, w4.z, w4.w};  // (step 0, row g), (step 0, row g + 8), (step 1, g), (step 1, g + 8)
    const u32* r = records + group_in_stage(stage, block, half) * 16;
    const Scale scale[2] = {read_scale(r[g]), read_scale(r[g + 8])};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 code = FORMAT == INT4 && half ? w[i] >> 4 : w[i];
      a[2 * half + i / 2][i % 2] = decode(code, scale[i % 2]);
      a[2 * half + i / 2][2 + i % 2] = decode(code >> 8, scale[i % 2]);
    }
  }
#endif
}

// The compiler must not touch sums before the products are done; it would then do the products one by one.
DEVICE void keep_behind(float (&acc)[TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
}
DEVICE void keep_behind(int (&acc)[TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) asm volatile("" : "+r"(acc[i])::"memory");
}

// What part of which tile a CTA has.
struct Segment {
  int m, n, begin, end;  // tile; stages
};
DEVICE int unit_begin(int cta, int units) { return (int)((long long)cta * units / gridDim.x); }
DEVICE Segment place(int tile, int n_tiles) {
  constexpr int side = 8;  // token tiles side by side, for L2
  const int group = tile / (side * M_TILES), inside = tile % (side * M_TILES), width = min(side, n_tiles - group * side);
  return {inside / width, group * side + inside % width, 0, STAGE_COUNT};
}
// The i-th segment of this CTA; `units` counts on through them. False after the last.
DEVICE bool next_segment(Segment& s, int& unit, int n_tiles) {
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
  unit += gridDim.x;
#endif
  return true;
}
DEVICE int first_unit(int n_tiles) { return SPLIT == LINE ? unit_begin(blockIdx.x, M_TILES * n_tiles * STAGE_COUNT) : blockIdx.x; }

// A loader warp's part of a stage: a quarter of the tiles, and of x. One lane does it.
DEVICE void copy_weights(u8* slot, u64* full, const u8* weights, const u32* records, const Segment& s, int stage, int loader) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }"
               ::"r"(shared_address(full)), "r"(STAGE_BYTES / LOADERS) : "memory");
#pragma unroll
  for (int i = 0; i < MT / LOADERS; i++) {
    const int place = loader * (MT / LOADERS) + i, tile = min(s.m * MT + place, TILES - 1);
    bulk_copy(slot + place * SB * BLOCK_BYTES, weights + ((size_t)tile * BLOCKS + stage * SB) * BLOCK_BYTES, SB * BLOCK_BYTES, full);
    if (GROUPED)
      bulk_copy(slot + WEIGHT_BYTES + place * STAGE_GROUPS * 64, records + ((size_t)tile * GROUPS + first_group(stage)) * 16,
                STAGE_GROUPS * 64, full);
  }
}
DEVICE void copy_x(u8* slot, u64* full, const u8* x, const Segment& s, int stage, int n_tiles, int loader) {
  constexpr int part = X_BYTES / LOADERS;
  bulk_copy(slot + WEIGHT_BYTES + RECORD_BYTES + loader * part, x + ((size_t)stage * n_tiles + s.n) * X_BYTES + loader * part, part, full);
}
// The ring's first weights are fetched before this kernel's inputs are there, its x after.
DEVICE void produce(Shared& sh, const u8* weights, const u32* records, const u8* x, int n_tiles, int loader) {
  Segment s;
  for (int pass = 0; pass < 2; pass++) {
    int unit = first_unit(n_tiles), at = 0;
    while (next_segment(s, unit, n_tiles)) {
      for (int stage = s.begin; stage < s.end; stage++, at++) {
        const int slot = at % STAGES;
        if (pass == 0) {
          if (at == STAGES) goto filled;
          copy_weights(sh.ring[slot], &sh.full[slot], weights, records, s, stage, loader);
        } else {
          if (at >= STAGES) {
            barrier_wait(&sh.empty[slot], (at / STAGES + 1) & 1);
            copy_weights(sh.ring[slot], &sh.full[slot], weights, records, s, stage, loader);
          }
          copy_x(sh.ring[slot], &sh.full[slot], x, s, stage, n_tiles, loader);
        }
      }
    }
  filled:
    if (pass == 0) wait_for_inputs();
  }
}

// D lies with outputs in rows g, g + 8 and tokens 8j + 2t, + 1; transposed in 8 × 8 pieces, a lane writes two outputs of
// token 8j + g at once.
// `acc` has the column groups from `first` on.
template <int COUNT>
DEVICE void write_tile(const accumulator (&acc)[COUNT * 4], const Segment& s, int first, const float* channel_scale,
                       const float* row_scale, const u16* bias, const u16* residual, u16* Y, int rows, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, tile = s.m * MT + warp;
  if (tile >= TILES) return;
  float scale[2] = {1.f, 1.f}, offset[2] = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int channel = min(tile * 16 + 8 * half + g, NDIM - 1);
    if (FORMAT == W8A8) scale[half] = channel_scale[channel];
    if (BIAS) offset[half] = to_float(bias[channel]);
  }
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int column = s.n * TOKENS + 8 * (first + j);
    if (column >= rows) break;
    float v[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = (float)acc[4 * j + i];
      if (FORMAT == W8A8) x *= scale[i / 2] * row_scale[min(column + 2 * t + i % 2, rows - 1)];
      v[i / 2][i % 2] = x + offset[i / 2];
    }
    const int token = column + g;
    if constexpr (EPILOGUE == SILU) {
#pragma unroll
      for (int i = 0; i < 2; i++) v[0][i] = v[0][i] / (1.f + __expf(-v[0][i])) * v[1][i];
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

// Sums of a tile that begins in another CTA, left for it; and the owner's taking them in, in the order of the stages.
DEVICE void leave_partial(const accumulator (&acc)[TOKENS / 2], uint4* partials, int* flags) {
  uint4* to = partials + (size_t)blockIdx.x * (TOKENS / 8) * THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) to[i * THREADS] = *(const uint4*)&acc[4 * i];
  __threadfence();
  named_barrier(1, THREADS);
  if (threadIdx.x == 0) asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(flags + blockIdx.x), "r"(1) : "memory");
}
DEVICE void take_partials(accumulator (&acc)[TOKENS / 2], const uint4* partials, int* flags, const Segment& s, int tile, int n_tiles) {
  const int units = M_TILES * n_tiles * STAGE_COUNT, stop = (tile + 1) * STAGE_COUNT;
  for (int cta = blockIdx.x + 1; unit_begin(cta, units) < stop; cta++) {
    if (unit_begin(cta, units) == unit_begin(cta + 1, units)) continue;  // more CTAs than units
    int ready = 0;
    while (!ready) asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(ready) : "l"(flags + cta) : "memory");
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
     const u16* residual, u16* Y, uint4* partials, int* flags, int rows) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_tiles = (rows + TOKENS - 1) / TOKENS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], LOADERS);
      barrier_init(&sh.empty[i], WGS * 4);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();
  if (warp >= WGS * 4) {
    if (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (lane == 0) produce(sh, weights, records, x, n_tiles, warp - WGS * 4);
    else wait_for_inputs();
    __syncwarp();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait(), cluster_arrive(), cluster_wait();
    return;
  }
  if (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_inputs();
  int slot = 0, unit = first_unit(n_tiles);
  u32 parity = 0;
  Segment s;
  while (next_segment(s, unit, n_tiles)) {
    accumulator acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
    u32 a[2][STEPS][4];
    int before = -1;  // the slot that the products in flight may still read
#pragma unroll 1
    for (int stage = s.begin; stage < s.end; stage++) {
      barrier_wait(&sh.full[slot], parity);
      const u8* ring = sh.ring[slot];
      const u8* mine = ring + warp * SB * BLOCK_BYTES;
      const u32* records_here = (const u32*)(ring + WEIGHT_BYTES) + warp * STAGE_GROUPS * 16;
      const u64 b0 = matrix_descriptor(ring + WEIGHT_BYTES + RECORD_BYTES, X_ROW * 8);
#pragma unroll
      for (int block = 0; block < SB; block++) {
        wgmma_wait<SB == 1 ? 0 : 1>();  // what used these registers two blocks ago
        if (block == (SB == 1 ? 0 : 1) && before >= 0 && lane == 0) barrier_arrive(&sh.empty[before]);
        load_block(a[block & 1], mine, records_here, stage, block, lane);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEPS; i++) wgmma(acc, a[block & 1][i], b0 + (block * STEPS + i) * (256 >> 4));
        wgmma_commit();
      }
      before = slot;
      if (++slot == STAGES) slot = 0, parity ^= 1;
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
      write_tile<COLUMNS>(acc, s, 0, channel_scale, row_scale, bias, residual, Y, rows, warp, lane);
    }
#endif
  }
#endif
}
