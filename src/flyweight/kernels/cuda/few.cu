// y[r, n] = sum_k x[r, k] · W[n, k] for up to 8 rows of int4 in groups of 128; x as it lies in memory: no kernel before it.
//
// Work split: a cluster of two CTAs has some tiles of 16 outputs, each CTA one half of their inputs.
//
//      stage = one tile × 128 inputs for each warp that multiplies, two copies; all tiles, then the next inputs
//      WARPS that multiply:   their inputs of x stay in registers from tile to tile
//      a warp that ends:      adds the sums of the others up, sends them to the CTA whose tile it is, or writes the outputs
//      a warp that fetches:   ahead of the kernel before this one; two kernels fit on an SM, as in gemv.cuh
//
// So warps that multiply wait for nothing but weights. y = s · (sum_k (P + q) · x − (P + z) · sum_k x), as in gemv_registers.cuh.
// A half of the inputs is what 16 warps have registers for, beside another kernel; of more inputs there are several turns.
// Limit: bytes of weights where there are many outputs, else latency; taking codes apart needs half as long as the bytes.
// Measured (docs/kernels.md): faster than batch.cu, alone and as o and down of a layer. Twice the inputs a warp, other numbers of
// stages held back: no faster; rings not filled in turn, shifts done by products: slower. Behind itself with a norm, and with 16
// rows, it was slower than batch.cu: it has neither.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, EPILOGUE, BIAS, WARPS, ROUND, PARTIALS, STAGES, HELD, SHARED_BYTES
#define CLUSTER 2
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"
#include "output.cuh"
#include "turns.cuh"
#include "codes.cuh"

constexpr int GROUPS = KDIM / 128, TILES = NDIM / 16, TURNS = GROUPS / CLUSTER / WARPS, OWNED = (ROUND + CLUSTER - 1) / CLUSTER;
constexpr int RECORDS_AT = WARPS * 2 * BLOCK_BYTES, STAGE_BYTES = RECORDS_AT + WARPS * 64;
static_assert(FORMAT == INT4 && !SPARSE && EPILOGUE != SILU, "what this is for");
static_assert(KDIM % (CLUSTER * WARPS * 128) == 0 && NDIM % 16 == 0, "no stage is ragged");
static_assert(TURNS == 1 || PARTIALS >= ROUND, "sums of all tiles stay until the last turn");

struct __align__(128) Shared {
  u8 ring[STAGES][STAGE_BYTES];
  float4 partial[PARTIALS][WARPS][32];  // of a lane
  float4 exchange[OWNED][32];           // the other CTA's sums of our tiles
  u64 full[STAGES], empty[STAGES], summed[PARTIALS], taken[PARTIALS], exchanged[OWNED];
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
DEVICE float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The last HELD stages of the first filling come when x does.
DEVICE void load_weights(Shared& sh, const Linear& a, const Part& part, int lane) {
  if (a.turns) await_turn(a.turns + 2 * processor(), lane);
  int slot = 0, tile = 0, unit = part.rank * TURNS * WARPS;
  u32 parity = 1;
#pragma unroll 1
  for (int i = 0; i < part.count * TURNS; i++) {
    if (i == STAGES - HELD) wait_for_inputs();
    if (i >= STAGES) barrier_wait(&sh.empty[slot], parity);
    const size_t at = (size_t)(part.first_tile + tile) * GROUPS + unit;
    copy_begin(&sh.full[slot], STAGE_BYTES, lane);
    copy_bytes(sh.ring[slot], a.weights + at * 2 * BLOCK_BYTES, RECORDS_AT, &sh.full[slot], lane);
    copy_bytes(sh.ring[slot] + RECORDS_AT, a.records + at * 16, WARPS * 64, &sh.full[slot], lane);
    if (++tile == part.count) tile = 0, unit += WARPS;
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (a.turns && lane == 0) count_up(a.turns + 2 * processor() + 1);
  wait_for_inputs();
}

// 128 inputs of x as the matrix units want them, and their sums of rows 2 t and 2 t + 1; rows that do not exist are zeros.
struct Inputs {
  u32 x[8][2];
  float sum[2];
};
DEVICE void load_inputs(Inputs& in, const Linear& a, int unit, int rows, int lane) {
  const int row = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 x = row < rows ? ((const uint4*)(a.x + (size_t)row * KDIM))[unit * 16 + i * 4 + lane % 4] : make_uint4(0, 0, 0, 0);
    in.x[2 * i][0] = x.x, in.x[2 * i][1] = x.y, in.x[2 * i + 1][0] = x.z, in.x[2 * i + 1][1] = x.w;
  }
  float sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32(&x)[2] = in.x[i];
    mma16<FP16>(sums[i % 2], ONES, ONES, ONES, ONES, x[0], x[1]);
    const u32 even = __byte_perm(x[0], x[1], 0x5410);  // inputs 0 and 2, 1 and 3 of four: how codes come apart
    x[1] = __byte_perm(x[0], x[1], 0x7632), x[0] = even;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) in.sum[i] = sums[0][i] + sums[1][i];
}

// This warp's part of a stage.
DEVICE float4 multiply_unit(const u8* stage, const Inputs& in, int warp, int lane) {
  float acc[2][4] = {}, total[4];  // two chains of additions, that do not wait for each other
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int half = j % 2, step = j / 2 % 2, block = j / 4;
    const uint4 q = ((const uint4*)(stage + (2 * warp + block) * BLOCK_BYTES))[lane];
    const u32 first = (step ? q.z : q.x) >> 4 * half, second = (step ? q.w : q.y) >> 4 * half;
    const u32(&x)[2] = in.x[4 * block + 2 * half + step];
    mma16<FP16>(acc[half], weights_of(first), weights_of(second), weights_of(first >> 8), weights_of(second >> 8), x[0], x[1]);
  }
  const u32* records = (const u32*)(stage + RECORDS_AT) + warp * 16 + lane / 4;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const u32 record = records[e / 2 * 8];
    total[e] = float_of<SCALE_FP16>((u16)(record & 0xffff)) * (acc[0][e] + acc[1][e] + offset_of(record) * in.sum[e % 2]);
  }
  return make_float4(total[0], total[1], total[2], total[3]);
}
DEVICE void multiply(Shared& sh, const Linear& a, const Part& part, int rows, int warp, int lane) {
  int slot = 0;
  u32 parity = 0;
  wait_for_inputs();
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    Inputs in;
    load_inputs(in, a, (part.rank * TURNS + turn) * WARPS + warp, rows, lane);
    int place = 0;
    u32 round = 1;  // its parity in the places of sums
#pragma unroll 1
    for (int tile = 0; tile < part.count; tile++) {
      barrier_wait(&sh.full[slot], parity);
      const float4 total = multiply_unit(sh.ring[slot], in, warp, lane);
      if (TURNS == 1 && tile >= PARTIALS) barrier_wait(&sh.taken[place], round);
      float4& sum = sh.partial[place][warp][lane];
      sum = turn ? sum_of(sum, total) : total;
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
  float4 sums;
  Output outputs[4];
};
DEVICE void begin_end(End& end, const Linear& a, const Part& part, int rows, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    Output& o = end.outputs[i];
    const int tile = part.first_tile + end.tile;
    o.row = lane / 4 + i / 2 * 8, o.token = lane % 4 * 2 + i % 2;
    o.index = o.token * NDIM + tile * 16 + o.row, o.residual = 0, o.mine = o.token < rows;
    if (o.mine) fetch_ends(o, a, place_of(tile));
  }
}
DEVICE void finish(Shared& sh, const End& end, const Linear& a, int lane) {
  if (end.tile < 0) return;
  barrier_wait(&sh.exchanged[end.tile / CLUSTER], 0);
  const float4 sum = sum_of(end.sums, sh.exchange[end.tile / CLUSTER][lane]);
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float v[2] = {sums[i], 0};
    if (end.outputs[i].mine) write_output(end.outputs[i], v, a.y);
  }
}
DEVICE void end_tiles(Shared& sh, const Linear& a, const Part& part, int rows, int lane) {
  End end;
  end.tile = -1;
  wait_for_inputs();  // the residual
  cluster_wait();     // the other CTA is there
  int place = 0;
  u32 round = 0;
#pragma unroll 1
  for (int tile = 0; tile < part.count; tile++) {
    barrier_wait(&sh.summed[place], round);
    float4 sum = sh.partial[place][0][lane];
#pragma unroll
    for (int i = 1; i < WARPS; i++) sum = sum_of(sum, sh.partial[place][i][lane]);
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.taken[place]);
    if (tile % CLUSTER == part.rank) {
      finish(sh, end, a, lane);  // the one before: by now the other CTA has sent it
      end.tile = tile, end.sums = sum;
      begin_end(end, a, part, rows, lane);
    } else {
      const int there = tile / CLUSTER;
      send_in_cluster(&sh.exchange[there][lane], &sh.exchanged[there], 1 - part.rank, *(const uint4*)&sum);
    }
    if (++place == PARTIALS) place = 0, round ^= 1;
  }
  finish(sh, end, a, lane);  // so nobody leaves before what is sent to this CTA has come
}

extern "C" __global__ void __launch_bounds__((WARPS + 2) * 32, 2)
few(const u8* weights, const u32* records, const u16* X, const u16* bias, const u16* residual, u16* Y, int rows, u32* turns) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part part = part_of(blockIdx.x, gridDim.x);
  const Linear a = {weights, records, nullptr, X, nullptr, bias, residual, Y, 0, turns};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&sh.full[i], COPY_ARRIVALS), barrier_init(&sh.empty[i], WARPS);
    for (int i = 0; i < PARTIALS; i++) barrier_init(&sh.summed[i], WARPS), barrier_init(&sh.taken[i], 1);
    for (int i = 0; i < OWNED; i++) barrier_init(&sh.exchanged[i], COPY_ARRIVALS);
    fence_barriers();
    for (int i = 0; i < OWNED; i++) copy_begin(&sh.exchanged[i], 512, 0);
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
