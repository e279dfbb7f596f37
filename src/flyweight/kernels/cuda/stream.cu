// y[r, n] = sum_k x[r, k] · W[n, k] for 5 to 32 rows of int4 and int8, x as it lies in memory: no kernel before, nothing converted.
//
// Work split: a CTA (or a cluster of two, a half of the inputs each) has up to ROUND tiles of 16 outputs, all at once, and goes along
// the inputs in steps of 128. Two such kernels fit on an SM, so the weights of one arrive while the one before it ends, as in gemv.cuh.
//
//      ring of weights:   a slot is SPAN steps of one tile and their records, two copies; tile after tile, then the next SPAN steps
//      warp (i, k):       tiles PER_WARP · i … of steps k, k + K_WARPS, …; the warps of one k fetch x of these themselves,
//                         AHEAD of them at a time, into buffers of their own
//
// Copies are that long because starting one takes a warp as long as a kilobyte takes memory.
// A lane of the matrix units wants eight neighbours of a row of x for every 32 inputs: 16 bytes, which lie side by side in a quarter of
// a buffer. Codes become 16-bit floats less the zero point, exact integers; scales meet the sums of a step (or weights: SCALED). Sums
// of the warps, and of the two CTAs of a cluster, are added in a fixed order, through the ring's place and each other's shared memory.
// NORM: its weights come as one row more of x and are multiplied in (rounded to 16 bits); the matrix units add up the squares of x, whose
// factor meets the sums at the end.
// Limit: bytes of weights and of x through L2, or taking codes apart (docs/kernels.md has the arithmetic).
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, GROUP, NORM, EPILOGUE, BIAS, ROWS, ROUND, PER_WARP, K_WARPS, SPAN, AHEAD, CLUSTER, SLOTS, HELD,
// SHARED_BYTES
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"
#include "output.cuh"
#include "turns.cuh"

constexpr int BLOCKS = (KDIM + 63) / 64, STEPS = (BLOCKS + 1) / 2, TILES = (NDIM + 15) / 16, GROUPS = (KDIM + GROUP - 1) / GROUP;
constexpr int COLUMNS = ROWS / 8, TILE_WARPS = (ROUND + PER_WARP - 1) / PER_WARP, K_THREADS = TILE_WARPS * 32;
constexpr int WARPS = TILE_WARPS * K_WARPS, THREADS = WARPS * 32;
constexpr int LOADERS = 2, STEP_BYTES = 2 * BLOCK_BYTES, RECORDS_AT = SPAN * STEP_BYTES, SLOT_BYTES = RECORDS_AT + SPAN * 64;
constexpr bool EVEN = BLOCKS % 2 == 0 && STEPS % (SPAN * CLUSTER) == 0 && GROUP == 128;  // all slots are full
constexpr int X_QUARTER = (ROWS + 1) * 64;  // of a step's inputs: all rows, the norm's weights; neighbours lie in different banks
constexpr int OWNED = (ROUND + CLUSTER - 1) / CLUSTER;  // tiles that a CTA ends
constexpr u32 POWER = FP16 ? 0x64006400 : 0x43004300;   // 1024 and 128: a code set into their mantissa is added to them
constexpr bool SCALED = COLUMNS > 2;  // weights are, and rounded once, where there are no registers for sums of a step
static_assert(!(NORM && FP16), "x times the norm's weights may be too large for 16 bits");
static_assert((FORMAT == INT4 || FORMAT == INT8) && !SPARSE, "dense integer weights");
static_assert(GROUP % 128 == 0 || GROUP >= KDIM, "a step has one scale");
static_assert(AHEAD > 1, "x of a step comes while the one before is multiplied");
static_assert(SPAN % K_WARPS == 0 && K_WARPS <= 12 && CLUSTER <= 2, "a k has as much of every slot; its warps have a barrier");

struct __align__(128) Shared {
  union __align__(128) {
    u8 ring[SLOTS][SLOT_BYTES];
    float partial[K_WARPS][ROUND][ROWS][20];  // 16 outputs; padded: tokens lie in different banks
  };
  u8 x[K_WARPS][AHEAD][4 * X_QUARTER];
  float4 exchange[CLUSTER > 1 ? OWNED : 1][CLUSTER > 1 ? ROWS : 1][4];  // the other CTA's sums of our tiles
  float squares[WARPS][ROWS], all_squares[2][ROWS];                     // all_squares: of this CTA, of the other
  u64 full[SLOTS], empty[SLOTS], exchanged;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

// The part of the work that is this CTA's.
struct Part {
  int rank, first_tile, count, first_step, steps;
};
DEVICE Part part_of(int cta, int ctas) {
  const int groups = ctas / CLUSTER, group = cta / CLUSTER, rank = cta % CLUSTER;
  const int tile = group * TILES / groups, step = rank * STEPS / CLUSTER;
  return {rank, tile, (group + 1) * TILES / groups - tile, step, (rank + 1) * STEPS / CLUSTER - step};
}

// A loader warp: every LOADERS-th slot. The last HELD slots of the first filling come when x does.
DEVICE void load_weights(Shared& sh, const Linear& a, const Part& part, int loader, int lane) {
  if (a.turns) {
    if (loader == 0) await_turn(a.turns + 2 * processor(), lane);
    named_barrier(2 + K_WARPS, LOADERS * 32);
  }
  int slot = loader, tile = loader, step = part.first_step;
  u32 parity = 1;
#pragma unroll 1
  for (int i = loader; i < part.count * ((part.steps + SPAN - 1) / SPAN); i += LOADERS) {
    if (i >= SLOTS - HELD && i < SLOTS - HELD + LOADERS) wait_for_inputs();
    for (; tile >= part.count; tile -= part.count) step += SPAN;
    if (i >= SLOTS) barrier_wait(&sh.empty[slot], parity);
    const int last = min(step + SPAN, part.first_step + part.steps), group = step * 128 / GROUP;
    const u32 bytes = EVEN ? RECORDS_AT : (min(2 * last, BLOCKS) - 2 * step) * BLOCK_BYTES;
    const u32 record_bytes = EVEN ? SPAN * 64 : (min((last * 128 - 1) / GROUP + 1, GROUPS) - group) * 64;
    copy_begin(&sh.full[slot], bytes + record_bytes, lane);
    copy_bytes(sh.ring[slot], a.weights + ((size_t)(part.first_tile + tile) * BLOCKS + step * 2) * BLOCK_BYTES, bytes, &sh.full[slot], lane);
    copy_bytes(sh.ring[slot] + RECORDS_AT, a.records + ((size_t)(part.first_tile + tile) * GROUPS + group) * 16, record_bytes,
               &sh.full[slot], lane);
    tile += LOADERS;
    if ((slot += LOADERS) >= SLOTS) slot -= SLOTS, parity ^= 1;
  }
  if (a.turns && loader == 0 && lane == 0) count_up(a.turns + 2 * processor() + 1);
  wait_for_inputs();
}

// x of a step, by the warps of one k. What does not exist of its rows stays undefined, in columns of its own.
DEVICE bool inputs_exist(int step, int eight) { return KDIM % 128 == 0 || step * 16 + eight < KDIM / 8; }
DEVICE void fetch_inputs(u8* to, const Linear& a, int step, int rows, int thread) {
#pragma unroll
  for (int piece = thread; piece < (ROWS + NORM) * 16; piece += K_THREADS) {
    const int row = piece / 16, eight = piece % 16;
    const u16* from = row < ROWS ? a.x + (size_t)row * KDIM : a.norm;
    if ((row < rows || row == ROWS) && inputs_exist(step, eight))
      copy_piece(to + eight / 4 * X_QUARTER + row * 64 + eight % 4 * 16, from + step * 128 + eight * 8);
  }
}

// Two codes, each in the low bits of a half → code − zero, an exact integer; SCALED: times the scale.
struct Scale {
  u32 offset, scale;
  float exact;
};
DEVICE Scale read_scale(u32 record) {
  const u32 zero = record >> 16;
  const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff));
  const u32 offset = FORMAT == INT8 && !FP16 ? pack2(128.f - zero, 128.f - zero) : __byte_perm(record, 0, 0x3232) | POWER | 0x80008000;
  return {offset, SCALED ? pack2(scale, scale) : 0, scale};
}
DEVICE u32 weights_of(u32 codes, Scale s) {
  u32 w = and_or(codes, FORMAT == INT4 ? 0x000f000f : FP16 ? 0x00ff00ff : 0x007f007f, POWER);
  // of 8 bits: the lower seven are 128 more than they should be, and 256 less 128 where bit 7 is set comes off, so code − 128
  if (FORMAT == INT8 && !FP16) w = add2(w, and_xor(codes, 0x00800080, 0xc380c380));
  w = add2(w, s.offset);
  return SCALED ? mul2(w, s.scale) : w;
}
// A block of 64 inputs of a tile; x: of its halves.
DEVICE void multiply_block(float (&acc)[COLUMNS][4], const u8* block, const Scale (&scale)[2], const uint4 (&x)[2][COLUMNS], int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int half = i % 2, step = i / 2;
    const uint4 q = ((const uint4*)block)[lane + (FORMAT == INT8 ? 32 * half : 0)];
    u32 a[4];  // outputs g, g + 8 of inputs 0 and 1 of four, then of 2 and 3
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 codes = __byte_perm(j % 2 ? step ? q.w : q.y : step ? q.z : q.x, 0, j / 2 ? 0x4342 : 0x4140);
      a[j] = weights_of(FORMAT == INT4 ? codes >> 4 * half : codes, scale[j % 2]);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
      mma16<FP16>(acc[n], a[0], a[1], a[2], a[3], step ? x[half][n].z : x[half][n].x, step ? x[half][n].w : x[half][n].y);
  }
}
// x of a block times the norm's weights; the warps of a step share its squares out among them.
DEVICE void weigh_inputs(uint4 (&x)[2][COLUMNS], float (&squares)[COLUMNS], const u8* norm, int step, int block,
                         int tile_warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int quarter = 2 * block + half;
    uint4 w = *(const uint4*)(norm + quarter * X_QUARTER);
    if (!inputs_exist(step, quarter * 4 + lane % 4)) w = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      uint4& v = x[half][n];
      if (quarter % TILE_WARPS == tile_warp) {
        float products[4] = {};  // of rows g with rows 2 t and 2 t + 1
        mma16<FP16>(products, v.x, 0, v.y, 0, v.x, v.y);
        mma16<FP16>(products, v.z, 0, v.w, 0, v.z, v.w);
        squares[n] += lane / 4 % 2 ? products[1] : products[0];
      }
      v = make_uint4(mul2(v.x, w.x), mul2(v.y, w.y), mul2(v.z, w.z), mul2(v.w, w.w));
    }
  }
}
// A step of this warp's tiles, whether or not all exist; xs: this lane's place in the first quarter of x.
DEVICE void multiply_step(float (&total)[PER_WARP][COLUMNS][4], float (&squares)[COLUMNS], const u8* (&weights)[PER_WARP],
                          const u32* (&records)[PER_WARP], const u8* xs, int step, int tile_warp, int lane) {
  float sums[PER_WARP][COLUMNS][4] = {};
  auto& acc = SCALED ? total : sums;
#pragma unroll(COLUMNS > 1 ? 1 : 2)
  for (int block = 0; block < 2; block++) {
    uint4 x[2][COLUMNS];
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; i++) {
      const int quarter = 2 * block + i / COLUMNS, n = i % COLUMNS;
      x[i / COLUMNS][n] = *(const uint4*)(xs + quarter * X_QUARTER + n * 512);
      if (!inputs_exist(step, quarter * 4 + lane % 4)) x[i / COLUMNS][n] = make_uint4(0, 0, 0, 0);
    }
    if (NORM) weigh_inputs(x, squares, xs + ROWS * 64 - lane / 4 * 64, step, block, tile_warp, lane);
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
      const Scale scale[2] = {read_scale(records[m][0]), read_scale(records[m][8])};
      multiply_block(acc[m], weights[m] + block * BLOCK_BYTES, scale, x, lane);
    }
  }
#pragma unroll
  for (int i = 0; i < (SCALED ? 0 : PER_WARP * 2); i++) {
    const float scale = read_scale(records[i / 2][i % 2 * 8]).exact;
#pragma unroll
    for (int j = 0; j < COLUMNS * 2; j++) total[i / 2][j / 2][i % 2 * 2 + j % 2] += scale * sums[i / 2][j / 2][i % 2 * 2 + j % 2];
  }
}

// All steps of warp (i, k).
DEVICE void multiply(Shared& sh, float (&total)[PER_WARP][COLUMNS][4], const Part& part, const Linear& a, int rows, int tile_warp, int k,
                     int lane) {
  const int mine = tile_warp * PER_WARP, thread = tile_warp * 32 + lane;
  float squares[COLUMNS] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (k + i * K_WARPS < part.steps) fetch_inputs(sh.x[k][i], a, part.first_step + k + i * K_WARPS, rows, thread);
    copy_group();
  }
  const int tiles = part.count - mine;
  int buffer = 0;
#pragma unroll 1
  for (int i = k; i < part.steps; i += K_WARPS) {
    const int step = part.first_step + i, later = i + (AHEAD - 1) * K_WARPS;
    copy_wait<AHEAD - 1>();
    if (TILE_WARPS == 1) __syncwarp();
    else named_barrier(2 + k, K_THREADS);  // all have x of this step, and are done with the one before: its buffer is free
    if (i > k && later < part.steps)
      fetch_inputs(sh.x[k][buffer ? buffer - 1 : AHEAD - 1], a, part.first_step + later, rows, thread);
    copy_group();
    if (NORM || tiles > 0) {
      const int first = i / SPAN * part.count + mine, group = step * 128 / GROUP - (step - i % SPAN) * 128 / GROUP;
      const u8* weights[PER_WARP];
      const u32* records[PER_WARP];
      int slots[PER_WARP];
#pragma unroll
      for (int m = 0; m < PER_WARP; m++) {
        const int place = first + max(0, min(m, tiles - 1));
        slots[m] = place % SLOTS;
        if (m < tiles) barrier_wait(&sh.full[slots[m]], place / SLOTS % 2);
        weights[m] = sh.ring[slots[m]] + i % SPAN * STEP_BYTES;
        records[m] = (const u32*)(sh.ring[slots[m]] + RECORDS_AT) + group * 16 + lane / 4;
      }
      multiply_step(total, squares, weights, records, sh.x[k][buffer] + lane * 16, step, tile_warp, lane);
      __syncwarp();
#pragma unroll
      for (int m = 0; m < PER_WARP; m++)
        if (lane == 0 && m < tiles && i % SPAN >= SPAN - K_WARPS) barrier_arrive(&sh.empty[slots[m]]);
    }
    if (++buffer == AHEAD) buffer = 0;
  }
#pragma unroll
  for (int n = 0; n < (NORM ? COLUMNS : 0); n++)
    if (lane % 4 == lane / 8) sh.squares[k * TILE_WARPS + tile_warp][8 * n + lane / 4] = squares[n];
}

// Four neighbouring outputs of a tile and token, of all warps.
DEVICE float4 add_warps(const Shared& sh, int tile, int token, int four) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int k = 0; k < K_WARPS; k++) {
    const float4 v = *(const float4*)&sh.partial[k][tile][token][four * 4];
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  return sum;
}
// The warps' sums, to the ring's place: nobody uses it any more.
DEVICE void leave_sums(Shared& sh, const float (&total)[PER_WARP][COLUMNS][4], int mine, int tiles, int k, int lane) {
  named_barrier(1, THREADS);
  if (NORM && threadIdx.x < ROWS) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sh.squares[i][threadIdx.x];
    sh.all_squares[0][threadIdx.x] = sum;
  }
#pragma unroll
  for (int m = 0; m < PER_WARP; m++) {
    if (m >= tiles) break;
#pragma unroll
    for (int i = 0; i < COLUMNS * 4; i++)
      sh.partial[k][mine + m][i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i % 4 / 2 * 8] = total[m][i / 4][i % 4];
  }
  named_barrier(1, THREADS);
}
DEVICE void end_tiles(Shared& sh, const Linear& a, const Part& part, int rows) {
  const int mine = part.rank * OWNED;
#if CLUSTER > 1
  const int others = (1 - part.rank) * OWNED;
  cluster_wait();  // the other CTA is there
  if (NORM && threadIdx.x < ROWS / 4)
    send_in_cluster(&sh.all_squares[1][threadIdx.x * 4], &sh.exchanged, 1 - part.rank, *(const uint4*)&sh.all_squares[0][threadIdx.x * 4]);
  for (int i = threadIdx.x; i < min(OWNED, part.count - others) * ROWS * 4; i += THREADS) {
    const float4 sum = add_warps(sh, others + i / 4 / ROWS, i / 4 % ROWS, i % 4);
    send_in_cluster(&sh.exchange[i / 4 / ROWS][i / 4 % ROWS][i % 4], &sh.exchanged, 1 - part.rank, *(const uint4*)&sum);
  }
#endif
  for (int i = threadIdx.x; i < min(OWNED, part.count - mine) * ROWS * (OUTPUTS / 4); i += THREADS) {
    const int four = i % (OUTPUTS / 4), token = i / (OUTPUTS / 4) % ROWS, tile = i / (OUTPUTS / 4) / ROWS;
    if (token >= rows) continue;
    Output o[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int n = (part.first_tile + mine + tile) * OUTPUTS + four * 4 + j;
      o[j] = {};
      o[j].row = four * 4 + j, o[j].token = token, o[j].index = token * WIDTH + n, o[j].mine = n < WIDTH;
      if (o[j].mine) fetch_ends(o[j], a, place_of(part.first_tile + mine + tile));
    }
    if (CLUSTER > 1) barrier_wait(&sh.exchanged, 0);
    const float squares = sh.all_squares[0][token] + (CLUSTER > 1 ? sh.all_squares[1][token] : 0.f);
    const float factor = NORM ? rsqrtf(squares / KDIM + a.epsilon) : 1.f;
    float sums[2][4];
#pragma unroll
    for (int half = 0; half < PARTS; half++) {
      *(float4*)sums[half] = add_warps(sh, mine + tile, token, four + 2 * half);
#pragma unroll
      for (int j = 0; j < (CLUSTER > 1 ? 4 : 0); j++) sums[half][j] += ((const float*)&sh.exchange[tile][token][four + 2 * half])[j];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float v[2] = {sums[0][j] * factor, sums[PARTS - 1][j] * factor};
      if (o[j].mine) write_output(o[j], v, a.y);
    }
  }
  if (CLUSTER > 1) barrier_wait(&sh.exchanged, 0);  // nobody leaves before what is sent to this CTA has come
}

extern "C" __global__ void __launch_bounds__(THREADS + LOADERS * 32, 2)
stream(const u8* weights, const u32* records, const u16* X, const u16* norm, const u16* bias, const u16* residual, u16* Y, float epsilon,
       int rows, u32* turns) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part part = part_of(blockIdx.x, gridDim.x);
  if (part.count == 0) return stay();
  const Linear a = {weights, records, nullptr, X, norm, bias, residual, Y, epsilon, turns};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(&sh.full[i], COPY_ARRIVALS);
      barrier_init(&sh.empty[i], K_WARPS);
    }
    barrier_init(&sh.exchanged, COPY_ARRIVALS);
    fence_barriers();
    if (CLUSTER > 1) copy_begin(&sh.exchanged, max(0, min(OWNED, part.count - part.rank * OWNED)) * ROWS * 64 + NORM * ROWS * 4, 0);
  }
  __syncthreads();
  launch_dependents();
#if CLUSTER > 1
  cluster_arrive();
#endif
  if (warp >= WARPS) {
    load_weights(sh, a, part, warp - WARPS, lane);
#if CLUSTER > 1
    __syncwarp();
    cluster_wait();
#endif
    return;
  }
  wait_for_inputs();
  const int tile_warp = warp % TILE_WARPS, mine = tile_warp * PER_WARP, k = warp / TILE_WARPS;
  float total[PER_WARP][COLUMNS][4] = {};
  multiply(sh, total, part, a, rows, tile_warp, k, lane);
  leave_sums(sh, total, mine, part.count - mine, k, lane);
  end_tiles(sh, a, part, rows);
#endif
}
