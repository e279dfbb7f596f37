// y[r, n] = sum_k x[r, k] · W[n, k] for 8 or 16 rows of int4 and int8, x as it lies in memory: no kernel before, nothing converted.
//
// Work split: a cluster of two CTAs has some tiles of 16 outputs, each CTA one half of their inputs.
//
//      stage = one tile × UNITS units of 128 inputs, two copies; all tiles, then the next UNITS of the inputs
//      WARPS that multiply:   PER_WARP units of every stage; their part of x stays in registers from tile to tile
//      a warp that ends:      adds the sums of the others up, sends them to the CTA whose tile it is, or writes the outputs
//      a warp that fetches:   ahead of the kernel before this one; two kernels fit on an SM, as in gemv.cuh
//
// So warps that multiply wait for nothing but weights. total += s · (sum_k (P + q) · x − (P + z) · sum_k x), as in gemv_registers.cuh.
// A half of the inputs is what 16 warps have registers for, beside another kernel.
// NORM: x is multiplied by its weights, rounded to 16 bits; the factor meets the outputs.
// Limit: bytes of weights; taking codes apart needs half as long.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, NORM, EPILOGUE, BIAS, ROWS, UNITS, WARPS, ROUND, PARTIALS, STAGES, HELD, SHARED_BYTES
#define CLUSTER 2
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"
#include "output.cuh"
#include "turns.cuh"
#include "codes.cuh"
#ifndef PROBE
#define PROBE 0  // 1: codes are not multiplied; 2: weights are not fetched; 3: shifts by 8 are products, which another pipe does
#endif

constexpr int BLOCKS = KDIM / 64, GROUPS = KDIM / 128, TILES = NDIM / 16, COLUMNS = ROWS / 8;
constexpr int TURNS = GROUPS / CLUSTER / UNITS, PER_WARP = UNITS / WARPS, OWNED = (ROUND + CLUSTER - 1) / CLUSTER;
constexpr int CHAINS = COLUMNS == 1 ? 2 : 1;  // of additions, that do not wait for each other
constexpr int RECORDS_AT = UNITS * 2 * BLOCK_BYTES, STAGE_BYTES = RECORDS_AT + UNITS * 64;
static_assert((FORMAT == INT4 || FORMAT == INT8) && !SPARSE, "dense integer weights");
static_assert(KDIM % (CLUSTER * UNITS * 128) == 0 && NDIM % 16 == 0 && UNITS % WARPS == 0, "no stage is ragged");
static_assert(!NORM || (TURNS == 1 && !FP16), "squares come once; x times the norm's weights may be too large for fp16");
static_assert(TURNS == 1 || PARTIALS >= ROUND, "sums of all tiles stay until the last turn");

struct __align__(128) Shared {
  u8 ring[STAGES][STAGE_BYTES];
  float4 partial[PARTIALS][WARPS][COLUMNS][32];  // of a lane
  float4 exchange[OWNED][COLUMNS][32];           // the other CTA's sums of our tiles
  float4 squares[NORM ? WARPS + 1 : 1][ROWS / 4];  // sums of the warps' x, then of the other CTA's
  float factors[ROWS];
  u64 full[STAGES], empty[STAGES], summed[PARTIALS], taken[PARTIALS], exchanged[OWNED], squared, squares_exchanged;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

// The part of the work that is this CTA's. Tiles of a cluster end in its CTAs by turns.
struct Part {
  int rank, first_tile, count;
};
DEVICE Part part_of(int cta, int ctas) {
  const int groups = ctas / CLUSTER, group = cta / CLUSTER, tile = group * TILES / groups;
  return {cta % CLUSTER, tile, (group + 1) * TILES / groups - tile};
}

// The last HELD stages of the first filling come when x does.
DEVICE void load_weights(Shared& sh, const Linear& a, const Part& part, int lane) {
  if (a.turns) await_turn(a.turns + 2 * processor(), lane);
  int slot = 0, tile = 0, unit = part.rank * TURNS * UNITS;
  u32 parity = 1;
#pragma unroll 1
  for (int i = 0; i < part.count * TURNS; i++) {
    if (i == STAGES - HELD) wait_for_inputs();
    if (i >= STAGES) barrier_wait(&sh.empty[slot], parity);
    const size_t at = (size_t)(part.first_tile + tile) * GROUPS + unit;
    copy_begin(&sh.full[slot], PROBE == 2 ? 0 : STAGE_BYTES, lane);
    if (PROBE != 2) {
      copy_bytes(sh.ring[slot], a.weights + at * 2 * BLOCK_BYTES, RECORDS_AT, &sh.full[slot], lane);
      copy_bytes(sh.ring[slot] + RECORDS_AT, a.records + at * 16, UNITS * 64, &sh.full[slot], lane);
    }
    if (++tile == part.count) tile = 0, unit += UNITS;
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (a.turns && lane == 0) count_up(a.turns + 2 * processor() + 1);
  wait_for_inputs();
}

// A warp's units of x, as the matrix units want them, and their sums of rows 2 t and 2 t + 1; rows that do not exist are zeros.
struct Inputs {
  u32 x[PER_WARP][COLUMNS][8][2];
  float sum[PER_WARP][COLUMNS][2];
  u32 power;
};
// x times the norm's weights, and its squares, which the matrix units add up.
DEVICE void weigh_inputs(Shared& sh, Inputs& in, const uint4 (&norm)[PER_WARP][4], int warp, int lane) {
  const int g = lane / 4;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    float products[2][4] = {};  // of row g with rows 2 t and 2 t + 1
#pragma unroll
    for (int i = 0; i < PER_WARP * 8; i++) {
      u32(&x)[2] = in.x[i / 8][n][i % 8];
      const uint4 w = norm[i / 8][i % 8 / 2];
      mma16<FP16>(products[i % 2], x[0], 0, x[1], 0, x[0], x[1]);
      x[0] = mul2(x[0], i % 2 ? w.z : w.x), x[1] = mul2(x[1], i % 2 ? w.w : w.y);
    }
    if (lane % 4 == g / 2) ((float*)sh.squares[warp])[8 * n + g] = g % 2 ? products[0][1] + products[1][1] : products[0][0] + products[1][0];
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(&sh.squared);
}
DEVICE void load_inputs(Shared& sh, Inputs& in, const Linear& a, int first_unit, int rows, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint4 norm[PER_WARP][4];  // before the kernel before this one has ended
#pragma unroll
  for (int i = 0; i < (NORM ? PER_WARP * 4 : 0); i++)
    norm[i / 4][i % 4] = ((const uint4*)a.norm)[(first_unit + i / 4 * WARPS + warp) * 16 + i % 4 * 4 + t];
  in.power = rows < 1000 ? 1 << 24 : 0;  // not known to the compiler
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < PER_WARP * COLUMNS * 4; i++) {
    const int u = i / 4 / COLUMNS, column = i / 4 % COLUMNS, row = 8 * column + g, unit = first_unit + u * WARPS + warp;
    const uint4 x = row < rows ? ((const uint4*)(a.x + (size_t)row * KDIM))[unit * 16 + i % 4 * 4 + t] : make_uint4(0, 0, 0, 0);
    u32(&to)[8][2] = in.x[u][column];
    to[i % 4 * 2][0] = x.x, to[i % 4 * 2][1] = x.y, to[i % 4 * 2 + 1][0] = x.z, to[i % 4 * 2 + 1][1] = x.w;
  }
  if (NORM) weigh_inputs(sh, in, norm, warp, lane);
#pragma unroll
  for (int i = 0; i < PER_WARP * COLUMNS; i++) {
    float sums[2][4] = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32(&x)[2] = in.x[i / COLUMNS][i % COLUMNS][j];
      mma16<FP16>(sums[j % 2], ONES, ONES, ONES, ONES, x[0], x[1]);
      const u32 even = __byte_perm(x[0], x[1], 0x5410);  // inputs 0 and 2, 1 and 3 of four: how codes come apart
      x[1] = __byte_perm(x[0], x[1], 0x7632), x[0] = even;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) in.sum[i / COLUMNS][i % COLUMNS][j] = sums[0][j] + sums[1][j];
  }
}

#if PROBE == 3
DEVICE u32 shifted(u32 codes, u32 power) { return __umulhi(codes, power); }
#else
DEVICE u32 shifted(u32 codes, u32) { return codes >> 8; }
#endif
// Unit u of this warp's in a stage.
DEVICE void multiply_unit(float (&total)[COLUMNS][4], const u8* stage, const Inputs& in, int u, int warp, int lane) {
  const int unit = u * WARPS + warp;
  float acc[CHAINS][COLUMNS][4] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int half = j % 2, step = j / 2 % 2, block = j / 4, shift = FORMAT == INT4 ? 4 * half : 0;
    const uint4 q = ((const uint4*)(stage + (2 * unit + block) * BLOCK_BYTES))[lane + (FORMAT == INT8 ? 32 * half : 0)];
    const u32 first = (step ? q.z : q.x) >> shift, second = (step ? q.w : q.y) >> shift;
    if (PROBE == 1) {
      acc[0][0][step] += __uint_as_float(first ^ second);
      continue;
    }
    const u32 w[4] = {weights_of(first), weights_of(second), weights_of(shifted(first, in.power)), weights_of(shifted(second, in.power))};
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const u32(&x)[2] = in.x[u][n][4 * block + 2 * half + step];
      mma16<FP16>(acc[half % CHAINS][n], w[0], w[1], w[2], w[3], x[0], x[1]);
    }
  }
  const u32* records = (const u32*)(stage + RECORDS_AT) + unit * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 record = records[8 * i];
    const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff)), offset = offset_of(record);
#pragma unroll
    for (int j = 0; j < COLUMNS * 2; j++) {
      const int n = j / 2, e = 2 * i + j % 2;
      total[n][e] += scale * (acc[0][n][e] + (CHAINS > 1 ? acc[CHAINS - 1][n][e] : 0.f) + offset * in.sum[u][n][j % 2]);
    }
  }
}
DEVICE void multiply(Shared& sh, const Linear& a, const Part& part, int rows, int warp, int lane) {
  int slot = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    Inputs in;
    load_inputs(sh, in, a, (part.rank * TURNS + turn) * UNITS, rows, warp, lane);
    int place = 0;
    u32 round = 1;  // its parity in the places of sums
#pragma unroll 1
    for (int tile = 0; tile < part.count; tile++) {
      float total[COLUMNS][4] = {};
      barrier_wait(&sh.full[slot], parity);
#pragma unroll
      for (int u = 0; u < PER_WARP; u++) multiply_unit(total, sh.ring[slot], in, u, warp, lane);
      if (TURNS == 1 && tile >= PARTIALS) barrier_wait(&sh.taken[place], round);
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        float4& sum = sh.partial[place][warp][n][lane];
        const float4 before = turn ? sum : make_float4(0, 0, 0, 0);
        sum = make_float4(before.x + total[n][0], before.y + total[n][1], before.z + total[n][2], before.w + total[n][3]);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&sh.empty[slot]);
        if (turn == TURNS - 1) barrier_arrive(&sh.summed[place]);
      }
      if (++slot == STAGES) slot = 0, parity ^= 1;
      if (++place == PARTIALS) place = 0, round ^= 1;
    }
  }
}

// A tile of ours that waits for the other CTA's sums.
struct End {
  int tile;  // of this CTA, or -1
  float4 sums[COLUMNS];
  Output outputs[COLUMNS][4 / PARTS];
};
DEVICE void begin_end(End& end, const Linear& a, const Part& part, int rows, int lane) {
#pragma unroll
  for (int i = 0; i < COLUMNS * 4 / PARTS; i++) {
    Output& o = end.outputs[i / (4 / PARTS)][i % (4 / PARTS)];
    const int tile = part.first_tile + end.tile;
    o.row = lane / 4 + i % (4 / PARTS) / 2 * 8, o.token = i / (4 / PARTS) * 8 + lane % 4 * 2 + i % 2;
    o.index = o.token * WIDTH + tile * OUTPUTS + o.row, o.residual = 0, o.mine = o.token < rows;
    if (o.mine) fetch_ends(o, a, place_of(tile));
  }
}
DEVICE void finish(Shared& sh, const End& end, const Linear& a, int lane) {
  if (end.tile < 0) return;
  barrier_wait(&sh.exchanged[end.tile / CLUSTER], 0);
#pragma unroll
  for (int n = 0; n < COLUMNS; n++) {
    const float4 other = sh.exchange[end.tile / CLUSTER][n][lane];
    const float sums[4] = {end.sums[n].x + other.x, end.sums[n].y + other.y, end.sums[n].z + other.z, end.sums[n].w + other.w};
#pragma unroll
    for (int j = 0; j < 4 / PARTS; j++) {
      const float factor = NORM ? sh.factors[8 * n + lane % 4 * 2 + j % 2] : 1.f;
      float v[2] = {sums[j] * factor, sums[2 + j % 2] * factor};
      if (end.outputs[n][j].mine) write_output(end.outputs[n][j], v, a.y);
    }
  }
}
// The norm's factors of all rows, from the squares of both CTAs.
DEVICE void find_factors(Shared& sh, const Linear& a, const Part& part, int lane) {
  barrier_wait(&sh.squared, 0);
  float4 sum = make_float4(0, 0, 0, 0);
  if (lane < ROWS / 4) {
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float4 v = sh.squares[i][lane];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    send_in_cluster(&sh.squares[WARPS][lane], &sh.squares_exchanged, 1 - part.rank, *(const uint4*)&sum);
  }
  barrier_wait(&sh.squares_exchanged, 0);
  if (lane < ROWS / 4) {
    const float4 other = sh.squares[WARPS][lane];
    const float all[4] = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
#pragma unroll
    for (int i = 0; i < 4; i++) sh.factors[4 * lane + i] = rsqrtf(all[i] / KDIM + a.epsilon);
  }
  __syncwarp();
}
DEVICE void end_tiles(Shared& sh, const Linear& a, const Part& part, int rows, int lane) {
  End end;
  end.tile = -1;
  wait_for_inputs();  // the residual
  cluster_wait();     // the other CTA is there
  if (NORM) find_factors(sh, a, part, lane);
  int place = 0;
  u32 round = 0;
#pragma unroll 1
  for (int tile = 0; tile < part.count; tile++) {
    barrier_wait(&sh.summed[place], round);
    float4 sums[COLUMNS];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      float4 sum = sh.partial[place][0][n][lane];
#pragma unroll
      for (int i = 1; i < WARPS; i++) {
        const float4 v = sh.partial[place][i][n][lane];
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
      }
      sums[n] = sum;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.taken[place]);
    if (tile % CLUSTER == part.rank) {
      finish(sh, end, a, lane);  // the one before: by now the other CTA has sent it
      end.tile = tile;
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) end.sums[n] = sums[n];
      begin_end(end, a, part, rows, lane);
    } else {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
        send_in_cluster(&sh.exchange[tile / CLUSTER][n][lane], &sh.exchanged[tile / CLUSTER], 1 - part.rank, *(const uint4*)&sums[n]);
    }
    if (++place == PARTIALS) place = 0, round ^= 1;
  }
  finish(sh, end, a, lane);  // so nobody leaves before what is sent to this CTA has come
}

extern "C" __global__ void __launch_bounds__((WARPS + 2) * 32, 2)
few(const u8* weights, const u32* records, const u16* X, const u16* norm, const u16* bias, const u16* residual, u16* Y, float epsilon, int rows,
    u32* turns) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part part = part_of(blockIdx.x, gridDim.x);
  const Linear a = {weights, records, nullptr, X, norm, bias, residual, Y, epsilon, turns};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&sh.full[i], COPY_ARRIVALS), barrier_init(&sh.empty[i], WARPS);
    for (int i = 0; i < PARTIALS; i++) barrier_init(&sh.summed[i], WARPS), barrier_init(&sh.taken[i], 1);
    for (int i = 0; i < OWNED; i++) barrier_init(&sh.exchanged[i], COPY_ARRIVALS);
    barrier_init(&sh.squared, WARPS), barrier_init(&sh.squares_exchanged, COPY_ARRIVALS);
    fence_barriers();
    copy_begin(&sh.squares_exchanged, ROWS * 4, 0);
    for (int i = 0; i < OWNED; i++) copy_begin(&sh.exchanged[i], COLUMNS * 512, 0);
  }
  __syncthreads();
  launch_dependents();
  cluster_arrive();
  if (warp == WARPS) {
    load_weights(sh, a, part, lane);
  } else if (warp == WARPS + 1) {
    return end_tiles(sh, a, part, rows, lane);
  } else {
    multiply(sh, a, part, rows, warp, lane);
  }
  __syncwarp();
  cluster_wait();
#endif
}
