// y[r, n] = sum_k x[r, k] · W[n, k] for up to 16 rows of int4 and int8 in groups of 128, and 8 of W8A8; x as it lies in memory: no
// kernel before it.
//
// Work split: a cluster of two CTAs has some tiles of 16 outputs, each CTA one half of their inputs. Of an odd number of groups the
// first CTA has one more.
//
//      stage = one tile × 128 inputs for each warp of a team, two copies; all tiles, then the next inputs
//              RAGGED: of the last inputs some warps have none, no bytes come for them, and their sums are zeros
//      WARPS that multiply:   TEAM of them share a stage; their inputs of x stay where they are from tile to tile, of 8 rows in
//                             registers, of the next 8 in shared memory. Sums take the place of the weights they are made of
//      a warp that ends:      adds the sums of the others up, sends them to the CTA whose tile it is, or writes the outputs
//      a warp that fetches:   ahead of the kernel before this one; two kernels fit on an SM, as in gemv.cuh
//
// So warps that multiply wait for nothing but weights. y = s · (sum_k (P + q) · x − (P + z) · sum_k x), as in gemv_registers.cuh.
// W8A8: each warp tells both CTAs the largest of its inputs of every row, so all quantize with the same scale. Integers are added
// up, to the same numbers as in any other kernel.
// A half of the inputs is what 16 warps have registers for, beside another kernel; of more inputs there are several turns.
// Limit: bytes of weights where there are many outputs, else latency; taking codes apart needs half as long as the bytes.
// Measured (docs/kernels.md): 8 rows are faster than with batch.cu, alone and as o and down of a layer. Twice the inputs a warp,
// other numbers of stages held back: no faster; rings not filled in turn, shifts done by products: slower. With a norm it is faster
// than batch.cu where all kernels of a layer leave each other room, and slower elsewhere; W8A8's qkv made steps slower: it has none.
//
// SPREAD: up to four rows have two columns of the products each, and share out the inputs: one has the first halves of blocks, the other
// the second, as in gemv_registers.cuh. So each lane has half as many, and columns are added up when a tile ends.
//
// NORM: x is multiplied with the norm's weights on its way into registers; warps tell both CTAs the squares of all their inputs, of
// several turns in the last one, and sums get the norm's factor at the end.
//
// BESIDE: registers are those of a kernel with 16 warps. Of two kernels on an SM the other may be one with fewer warps and more registers
// (qkv_attention.cu with x in them), and registers are given out by quarters of an SM.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, NORM (0), EPILOGUE, BIAS, BESIDE (0), SETS (of 8 rows), SPREAD (1), WARPS, TEAM, ROUND, STAGES,
// HELD, SHARED_BYTES
#define CLUSTER 2
#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef SPREAD
#define SPREAD 1
#endif
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"
#include "output.cuh"
#include "turns.cuh"
#if FORMAT == W8A8
#undef GROUP
#define GROUP KDIM
#include "piece.cuh"
typedef int accumulator;
struct __align__(16) sum4 {
  int x, y, z, w;
};
#else
#include "codes.cuh"
typedef float accumulator;
typedef float4 sum4;
#endif

constexpr int GROUPS = KDIM / 128, HALF = (GROUPS + CLUSTER - 1) / CLUSTER, TURNS = (HALF + WARPS - 1) / WARPS;
constexpr bool RAGGED = GROUPS != CLUSTER * TURNS * WARPS;
constexpr int TILES = NDIM / 16, OWNED = (ROUND + CLUSTER - 1) / CLUSTER;
constexpr int TEAMS = WARPS / TEAM, MOVED = SETS - 1;
constexpr int OWN_HALVES = 4 / SPREAD;            // of blocks, that a lane has of 128 inputs
constexpr int NORMS = NORM ? OWN_HALVES : 1;      // 16 bytes of the norm's weights, in a lane
constexpr int SUMMING = (TEAM + 1) * 32;  // threads that meet when a stage's sums are there
constexpr int UNIT_BYTES = 2 * BLOCK_BYTES, RECORD_BYTES = QUANTIZED ? 0 : 64;  // of a tile × 128 inputs
constexpr int RECORDS_AT = TEAM * UNIT_BYTES, STAGE_BYTES = TEAM * (UNIT_BYTES + RECORD_BYTES);
constexpr bool TELLS = QUANTIZED || NORM;  // warps tell both CTAs something of every row
static_assert((FORMAT == INT4 || FORMAT == INT8 || FORMAT == W8A8) && !SPARSE, "what this is for");
static_assert(!(NORM || GATE_UP) || (!QUANTIZED && SETS == 1 && !(NORM && FP16)), "one set; x times the norm's weights is no float16");
static_assert(KDIM % 128 == 0 && NDIM % 16 == 0, "whole groups and tiles");
static_assert(SPREAD == 1 || (SETS == 1 && !QUANTIZED), "a row has SPREAD columns, and the two halves of blocks chains of their own");
static_assert(WARPS % TEAM == 0 && WARPS <= 16, "teams are whole");
static_assert(SETS * 512 <= UNIT_BYTES && STAGES >= TEAMS && STAGES < 16, "sums fit where weights were; a barrier for each stage");

struct __align__(128) Shared {
  u8 ring[STAGES][STAGE_BYTES];  // where a warp's weights were, then its sums: of a set and a lane
  uint4 x[WARPS][MOVED ? MOVED * 4 * 32 : 1];       // a lane's own, converted
  sum4 totals[TURNS > 1 ? ROUND : 1][SETS][32];     // of the turns so far
  sum4 own[SETS][32], exchange[OWNED][SETS][32];    // our sums of a tile of ours, the other CTA's of all of them
  float4 told[TELLS ? CLUSTER * WARPS : 1][2];              // of a warp's inputs of each row: the largest, or the sum of squares
  u64 full[STAGES], empty[STAGES], exchanged[OWNED], known;  // known: all of `told`
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

// The part of the work that is this CTA's. Tiles of a cluster end in its CTAs by turns.
struct Part {
  int rank, first_tile, count;
  int first_unit, units;  // of 128 inputs
  DEVICE int left(int unit, int most) const { return !RAGGED ? most : max(0, min(most, units - unit)); }  // of our units from one on
};
DEVICE Part part_of(int cta, int ctas) {
  const int groups = ctas / CLUSTER, group = cta / CLUSTER, tile = group * TILES / groups;
  const int rank = cta % CLUSTER;
  return {rank, tile, (group + 1) * TILES / groups - tile, rank * HALF, rank ? GROUPS - HALF : HALF};
}
DEVICE sum4 sum_of(sum4 a, sum4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The last HELD stages of the first filling come when x does.
DEVICE void load_weights(Shared& sh, const Linear& a, const Part& part, int lane) {
  u32* const turns = a.turns ? a.turns + 2 * processor() : nullptr;  // asked once: a preempted CTA may go on elsewhere
  if (turns) await_turn(turns, lane);
  int slot = 0, team = 0, tile = 0, unit = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int i = 0; i < part.count * TURNS * TEAMS; i++) {
    if (i == STAGES - HELD) wait_for_inputs();
    if (i >= STAGES) barrier_wait(&sh.empty[slot], parity);
    const size_t at = (size_t)(part.first_tile + tile) * GROUPS + part.first_unit + unit + team * TEAM;
    const int units = part.left(unit + team * TEAM, TEAM);
    copy_begin(&sh.full[slot], units * (UNIT_BYTES + RECORD_BYTES), lane);
    if (units) {
      copy_bytes(sh.ring[slot], a.weights + at * UNIT_BYTES, units * UNIT_BYTES, &sh.full[slot], lane);
      if (!QUANTIZED) copy_bytes(sh.ring[slot] + RECORDS_AT, a.records + at * 16, units * RECORD_BYTES, &sh.full[slot], lane);
    }
    if (++team == TEAMS) team = 0, tile++;
    if (tile == part.count) tile = 0, unit += WARPS;
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (turns && lane == 0) count_up(turns + 1);
  wait_for_inputs();
}

// The 128 inputs that a warp has in a turn, where there are any.
struct Place {
  int unit, warp, teller;
  bool there, last;  // it has inputs; no turn follows
};

DEVICE int row_of(int lane) { return SPREAD > 1 ? lane / 4 % 4 : lane / 4; }
DEVICE int half_of(int i, int lane) { return SPREAD > 1 ? 2 * i + lane / 16 : i; }  // of four, the i-th of a lane's

// What the four lanes of a row have found goes to both CTAs; `teller`: which warp of a cluster's. The other CTA must be there.
DEVICE void tell(Shared& sh, float found, int teller, int lane) {
  u32 four[4];
#pragma unroll
  for (int i = 0; i < 4; i++) four[i] = __float_as_uint(__shfl_sync(~0u, found, lane / 16 * 16 + i * 4));
  if (lane % 16 < CLUSTER)  // of four rows, to each CTA by a lane
    send_in_cluster(&sh.told[teller][lane / 16], &sh.known, lane % 16, make_uint4(four[0], four[1], four[2], four[3]));
}
DEVICE float sum_of_four(float sum) {  // lanes
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

#if FORMAT == W8A8
static_assert(TURNS == 1 && SETS == 1 && !STATIC, "x waits in registers until its scale is known");
// 128 inputs of x: codes of 32 at a time.
struct Inputs {
  u32 x[4][2];
};
DEVICE float largest_of_four(float most) {  // lanes
  most = largest(most, __shfl_xor_sync(~0u, most, 1));
  return largest(most, __shfl_xor_sync(~0u, most, 2));
}
DEVICE float largest_of(const Shared& sh, int row, int lane) {  // by all warps
  float most = 0;
#pragma unroll
  for (int i = lane % 4; i < CLUSTER * WARPS; i += 4) most = largest(most, ((const float*)sh.told[i])[row]);
  return largest_of_four(most);
}
DEVICE void load_inputs(Inputs& in, Shared& sh, const Linear& a, const uint4 (&)[NORMS], float&, Place place, int rows, int lane) {
  const int row = lane / 4;
  uint4 x[4] = {};
  float most = 0;
  if (row < rows && place.there)
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = ((const uint4*)(a.x + (size_t)row * KDIM))[place.unit * 16 + i * 4 + lane % 4];
  __syncwarp();
  cluster_wait();  // the other CTA is there
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float v[8];
    widen(v, x[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) most = largest(most, fabsf(v[j]));
  }
  tell(sh, largest_of_four(most), place.teller, lane);
  barrier_wait(&sh.known, 0);
  most = largest_of(sh, row, lane);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float v[8];
    widen(v, x[i]);
    const Piece p = convert<1>(v, most, 1.f, lane);
    in.x[i][0] = p.words.x, in.x[i][1] = p.words.y;
  }
}
DEVICE void multiply_unit(u8* unit, const u32*, const Inputs& in, const uint4*, int lane) {
  int acc[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 q = ((const uint4*)unit)[i * 32 + lane];
    mma32<false>(acc, q, in.x[i][0], in.x[i][1]);
  }
  ((sum4*)unit)[lane] = {acc[0], acc[1], acc[2], acc[3]};
}
#else
constexpr int CHAINS = SETS == 1 ? 2 : 1;  // of additions
// 128 inputs of x as the matrix units want them, and their sums of rows 2 t and 2 t + 1 of a set; rows that are not there are 0.
struct Inputs {
  u32 x[2 * OWN_HALVES][2];
  float sum[SETS][2];
};
// Eight inputs times the norm's weights.
DEVICE uint4 weighed(uint4 x, uint4 weight, float& squares) {
  u32 of[4] = {x.x, x.y, x.z, x.w};
  const u32 by[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = low_float(of[i]), high = high_float(of[i]);
    squares += low * low + high * high;
    of[i] = pack2(low * low_float(by[i]), high * high_float(by[i]));
  }
  return make_uint4(of[0], of[1], of[2], of[3]);
}
DEVICE void load_inputs(Inputs& in, Shared& sh, const Linear& a, const uint4 (&norm)[NORMS], float& squares, Place place, int rows,
                        int lane) {
  uint4* moved = sh.x[place.warp];
  u32 all[SETS][2 * OWN_HALVES][2];
#pragma unroll
  for (int i = 0; i < SETS * OWN_HALVES; i++) {
    const int row = i / OWN_HALVES * 8 + row_of(lane), own = i % OWN_HALVES;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < rows && place.there) x = ((const uint4*)(a.x + (size_t)row * KDIM))[place.unit * 16 + half_of(own, lane) * 4 + lane % 4];
    if (NORM) x = weighed(x, norm[i % NORMS], squares);
    u32(&to)[2 * OWN_HALVES][2] = all[i / OWN_HALVES];
    to[own * 2][0] = x.x, to[own * 2][1] = x.y, to[own * 2 + 1][0] = x.z, to[own * 2 + 1][1] = x.w;
  }
#pragma unroll
  for (int set = SETS - 1; set >= 0; set--) {  // the one that leaves its registers first
    float sums[CHAINS][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * OWN_HALVES; i++) {
      u32(&x)[2] = all[set][i];
      mma16<FP16>(sums[i % CHAINS], ONES, ONES, ONES, ONES, x[0], x[1]);
      const u32 even = __byte_perm(x[0], x[1], 0x5410);  // inputs 0 and 2, 1 and 3 of four: how codes come apart
      x[1] = __byte_perm(x[0], x[1], 0x7632), x[0] = even;
      if (set == 0) in.x[i][0] = x[0], in.x[i][1] = x[1];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) in.sum[set][i] = CHAINS == 1 ? sums[0][i] : sums[0][i] + sums[CHAINS - 1][i];
#pragma unroll
    for (int i = 0; i < (set ? 4 : 0); i++) {  // what four codes of a lane meet
      const u32(&first)[2] = all[set][i / 2 * 4 + i % 2], (&second)[2] = all[set][i / 2 * 4 + 2 + i % 2];
      moved[((set - 1) * 4 + i) * 32 + lane] = make_uint4(first[0], first[1], second[0], second[1]);
    }
  }
  if (NORM && place.last) {
    __syncwarp();
    cluster_wait();  // the other CTA is there
    squares = sum_of_four(squares);
    if (SPREAD > 1) squares += __shfl_xor_sync(~0u, squares, 16);  // of a row's other column
    tell(sh, squares, place.teller, lane);
  }
}

// A warp's part of a stage: its sums take the place of its weights.
DEVICE void multiply_unit(u8* unit, const u32* records, const Inputs& in, const uint4* moved, int lane) {
  float acc[SETS][CHAINS][4] = {};  // at least two chains of additions, that do not wait for each other
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int block = i / 2, step = i % 2;
    uint4 q[2];  // of int4 a word has codes of both halves of a block
#pragma unroll
    for (int half = 0; half < 2; half++) q[half] = ((const uint4*)(unit + block * BLOCK_BYTES))[(FORMAT == INT8 ? 32 * half : 0) + lane];
    uint4 xs[MOVED ? MOVED : 1];
#pragma unroll
    for (int set = 0; set < MOVED; set++) xs[set] = moved[(set * 4 + i) * 32 + lane];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int shift = FORMAT == INT8 ? 0 : 4 * half;
      const u32 first = (step ? q[half].z : q[half].x) >> shift, second = (step ? q[half].w : q[half].y) >> shift;
      const u32 w[4] = {weights_of(first), weights_of(second), weights_of(first >> 8), weights_of(second >> 8)};
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        const uint4 far = xs[set ? set - 1 : 0];
        const u32(&near)[2] = in.x[SPREAD > 1 ? 2 * block + step : 4 * block + 2 * half + step];
        const u32 x0 = !set ? near[0] : half ? far.z : far.x, x1 = !set ? near[1] : half ? far.w : far.y;
        mma16<FP16>(acc[set][half % CHAINS], w[0], w[1], w[2], w[3], x0, x1);
      }
    }
  }
  float scale[2], offset[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 record = records[8 * i];
    scale[i] = float_of<SCALE_FP16>((u16)(record & 0xffff)), offset[i] = offset_of(record);
  }
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    float total[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float sum = CHAINS == 1 ? acc[set][0][e] : acc[set][0][e] + acc[set][CHAINS - 1][e];
      if (SPREAD > 1) sum = lane % 4 < 2 ? acc[set][0][e] : acc[set][CHAINS - 1][e];
      total[e] = scale[e / 2] * (sum + offset[e / 2] * in.sum[set][e % 2]);
    }
    ((float4*)unit)[set * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
  }
}
#endif
DEVICE void load_norm(uint4 (&norm)[NORMS], const Linear& a, const Place& place, int lane) {
#pragma unroll
  for (int i = 0; i < (NORM ? NORMS : 0); i++) {
    norm[i] = make_uint4(0, 0, 0, 0);
    if (place.there) norm[i] = ((const uint4*)a.norm)[place.unit * 16 + half_of(i, lane) * 4 + lane % 4];
  }
}
DEVICE Place place_in(const Part& part, int turn, int warp) {
  const int unit = turn * WARPS + warp;
  return {part.first_unit + unit, warp, part.rank * WARPS + warp, part.left(unit, 1) > 0, turn == TURNS - 1};
}
DEVICE void multiply(Shared& sh, const Linear& a, const Part& part, int rows, int warp, int lane) {
  const int member = warp % TEAM;
  int slot = warp / TEAM;
  u32 parity = 0;
  uint4 norm[NORMS];
  float squares = 0;
  load_norm(norm, a, place_in(part, 0, warp), lane);
  wait_for_inputs();
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    const Place place = place_in(part, turn, warp);
    if (turn) load_norm(norm, a, place, lane);
    Inputs in;
    load_inputs(in, sh, a, norm, squares, place, rows, lane);
#pragma unroll 1
    for (int tile = 0; tile < part.count; tile++) {
      u8* stage = sh.ring[slot];
      // Another team's stage may still be on its way to this slot: only when that is done with, `parity` means what it says
      if (STAGES % TEAMS) barrier_wait(&sh.empty[slot], parity ^ 1);
      barrier_wait(&sh.full[slot], parity);
      u8* unit = stage + member * UNIT_BYTES;
      if (place.there)
        multiply_unit(unit, (const u32*)(stage + RECORDS_AT) + member * 16 + lane / 4, in, sh.x[warp], lane);
      else
        for (int set = 0; set < SETS; set++) ((uint4*)unit)[set * 32 + lane] = make_uint4(0, 0, 0, 0);
      named_arrive(1 + slot, SUMMING);
      if ((slot += TEAMS) >= STAGES) slot -= STAGES, parity ^= 1;
    }
  }
}

// A tile of ours that waits for the other CTA's sums.
struct End {
  int tile;  // of this CTA, or -1
  float residual[SETS * 4], bias[2], scale[2];
};
DEVICE Output output_of(const End& end, const Part& part, int rows, int i, int lane) {
  Output o;
  o.row = lane / 4 + (GATE_UP ? 0 : i % 4 / 2 * 8), o.token = i / 4 * 8 + lane % 4 * 2 + i % 2;
  o.index = o.token * WIDTH + (part.first_tile + end.tile) * OUTPUTS + o.row, o.mine = o.token < rows;
  o.residual = end.residual[i], o.bias[0] = end.bias[GATE_UP ? 0 : i % 4 / 2], o.scale[0] = end.scale[i % 4 / 2];
  if (GATE_UP) o.bias[1] = end.bias[1];
  return o;
}
DEVICE void begin_end(End& end, const Linear& a, const Part& part, int rows, int lane) {
#pragma unroll
  for (int i = 0; i < SETS * 4; i++) {
    end.residual[i] = 0;
    Output o = output_of(end, part, rows, i, lane);
    if (GATE_UP && i % 4 / 2) continue;
    if (o.mine) fetch_ends(o, a, place_of(part.first_tile + end.tile));
    end.residual[i] = o.residual, end.bias[i % 4 / 2] = o.bias[0], end.scale[i % 4 / 2] = o.scale[0];
    if (GATE_UP) end.bias[1] = o.bias[1];
  }
}
DEVICE void finish(Shared& sh, const End& end, const Linear& a, const Part& part, const float (&factors)[SETS][2], int rows, int lane) {
  if (end.tile < 0) return;
  barrier_wait(&sh.exchanged[end.tile / CLUSTER], 0);
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    const sum4 sum = sum_of(sh.own[set][lane], sh.exchange[end.tile / CLUSTER][set][lane]);
    const accumulator sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < (GATE_UP ? 2 : 4); i++) {
      const Output o = output_of(end, part, rows, set * 4 + i, lane);
      float v[2] = {(float)sums[i], GATE_UP ? (float)sums[i % 2 + 2] : 0.f};
      if (QUANTIZED) v[0] = __fmul_rn(v[0], factors[set][i % 2] * o.scale[0]);
      if (NORM) v[0] = __fmul_rn(v[0], factors[set][i % 2]), v[1] = __fmul_rn(v[1], factors[set][i % 2]);
      if (o.mine) write_output(o, v, a.y);
    }
  }
}
// Sums of all warps of a tile, whose stages are empty then.
DEVICE void take_sums(sum4 (&sums)[SETS], Shared& sh, int& slot, int lane) {
#pragma unroll
  for (int team = 0; team < TEAMS; team++) {
    named_barrier(1 + slot, SUMMING);
#pragma unroll
    for (int i = 0; i < TEAM * SETS; i++) {
      const sum4 sum = ((const sum4*)(sh.ring[slot] + i / SETS * UNIT_BYTES))[i % SETS * 32 + lane];
      sums[i % SETS] = team || i >= SETS ? sum_of(sums[i % SETS], sum) : sum;
    }
    __syncwarp();
    if (lane == 0) {
      fence_for_products();  // the next copy comes where sums were written
      barrier_arrive(&sh.empty[slot]);
    }
    if (++slot == STAGES) slot = 0;
  }
  if constexpr (SPREAD > 1) {
    sum4& of = sums[0];
    of = sum_of(of, {__shfl_xor_sync(~0u, of.x, 2), __shfl_xor_sync(~0u, of.y, 2), __shfl_xor_sync(~0u, of.z, 2), __shfl_xor_sync(~0u, of.w, 2)});
  }
}
// What sums of row lane / 4 are multiplied with at the end.
DEVICE float row_factor(const Shared& sh, const Linear& a, int lane) {
#if FORMAT == W8A8
  return input_scale(largest_of(sh, lane / 4, lane));
#else
  float squares = 0;
#pragma unroll
  for (int i = lane % 4; i < CLUSTER * WARPS; i += 4) squares += ((const float*)sh.told[TELLS ? i : 0])[lane / 4];
  return rsqrtf(sum_of_four(squares) / KDIM + a.epsilon);
#endif
}
// Of the rows of this lane's sums, when all warps have told what they know.
DEVICE void take_factors(float (&factors)[2], Shared& sh, const Linear& a, int lane) {
  barrier_wait(&sh.known, 0);
  const float factor = row_factor(sh, a, lane);
#pragma unroll
  for (int i = 0; i < 2; i++) factors[i] = __shfl_sync(~0u, factor, 4 * (lane % 4 * 2 + i));
}
DEVICE void end_tiles(Shared& sh, const Linear& a, const Part& part, int rows, int lane) {
  End end, next;
  end.tile = -1;
  wait_for_inputs();  // the residual
  cluster_wait();     // the other CTA is there
  auto ask = [&](int tile) {
    next.tile = tile < part.count ? tile : -1;
    if (next.tile >= 0) begin_end(next, a, part, rows, lane);
  };
  constexpr bool AHEAD = SETS == 1;  // what the next tile of ours needs from memory comes meanwhile, where there are registers for it
  if (AHEAD) ask(part.rank);
  float factors[SETS][2] = {};
  int slot = 0;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    if constexpr (TELLS)
      if (turn == TURNS - 1) take_factors(factors[0], sh, a, lane);
#pragma unroll 1
    for (int tile = 0; tile < part.count; tile++) {
      sum4 sums[SETS];
      take_sums(sums, sh, slot, lane);
#pragma unroll
      for (int set = 0; set < (TURNS > 1 ? SETS : 0); set++) {
        sum4& total = sh.totals[tile][set][lane];
        if (turn) sums[set] = sum_of(total, sums[set]);
        if (turn < TURNS - 1) total = sums[set];
      }
      if (turn < TURNS - 1) continue;
      if (tile % CLUSTER == part.rank) {
        finish(sh, end, a, part, factors, rows, lane);  // the one before: by now the other CTA has sent it
#pragma unroll
        for (int set = 0; set < SETS; set++) sh.own[set][lane] = sums[set];
        if (!AHEAD) ask(tile);
        end = next;
        if (AHEAD) ask(tile + CLUSTER);
      } else {
        const int there = tile / CLUSTER;
#pragma unroll
        for (int set = 0; set < SETS; set++)
          send_in_cluster(&sh.exchange[there][set][lane], &sh.exchanged[there], 1 - part.rank, *(const uint4*)&sums[set]);
      }
    }
  }
  finish(sh, end, a, part, factors, rows, lane);  // so nobody leaves before what is sent to this CTA has come
}

extern "C" __global__ void __launch_bounds__(((BESIDE ? 16 : WARPS) + 2) * 32, 2)
few(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
    const u16* residual, u16* Y, float epsilon, int rows, u32* turns) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part part = part_of(blockIdx.x, gridDim.x);
  const Linear a = {weights, records, channel_scale, X, norm, bias, residual, Y, epsilon, turns};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++)
      barrier_init(&sh.full[i], COPY_ARRIVALS), barrier_init(&sh.empty[i], 1);
    for (int i = 0; i < OWNED; i++) barrier_init(&sh.exchanged[i], COPY_ARRIVALS);
    if (TELLS) barrier_init(&sh.known, COPY_ARRIVALS);
    fence_barriers();
    if (TELLS) copy_begin(&sh.known, sizeof(sh.told), 0);
    for (int i = 0; i < OWNED; i++) copy_begin(&sh.exchanged[i], SETS * 512, 0);
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
    if (TELLS) return;  // it has waited
  }
  __syncwarp();
  cluster_wait();
#endif
}
