// y[r, n] = sum_k x[r, k] · W[n, k] for 3 to 64 rows, from gemv.cuh's tiles and with its integer products.
//
// Work split: a CTA has the tiles of a group, ROUND at a time, and one of SLICES slices of the inputs. It goes along the inputs in steps of
// 128; sums stay in registers until the slice ends.
//
//      stage = one step:   ROUND tiles × 2 blocks of weights, their records | x of all rows, as batch_pack.cu left it
//      warp (i, j):        tiles PER_WARP · i … + PER_WARP - 1, and the j-th part of the columns; its x serves PER_WARP tiles
//
// So x, which does not fit into shared memory as a whole, streams like the weights, and is converted once for all CTAs. Loader warps
// fill the ring with weights before batch_pack has ended. One CTA fits on an SM, so none ever gets two. Slices hand their sums over
// as in gemv_split.cu (mail.cuh), in a fixed order. W8A8 adds up integers: the same numbers as with any other number of rows.
// Limit: bytes of weights and of x through L2, or the instructions of a block (docs/kernels.md has the arithmetic).
//
// defines: FORMAT, SPARSE (0), SYMMETRIC (0), FP16, SCALE_FP16, KDIM, NDIM, GROUP, EPILOGUE, BIAS, ROWS, ROUND, PER_WARP, COLUMN_WARPS, SLICES, STAGES, LOADERS, SHARED_BYTES
#include "common.cuh"
#include "linear.cuh"
#include "piece.cuh"
#include "output.cuh"
#include "mail.cuh"

constexpr int BLOCKS = (KDIM + 63) / 64, STEPS = (BLOCKS + 1) / 2, TILES = (NDIM + 15) / 16;
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int SCALES = !GROUPED ? 0 : GROUP == 32 ? 4 : 2 / UNIT_BLOCKS;                      // of a row, in a step
constexpr int RECORDS = GROUP < 128 ? 128 / GROUP : 1, RECORD_BYTES = GROUPED ? RECORDS * 64 : 0;  // of a tile, in a step
constexpr int COLUMN_TILES = ROWS * PLANES / 8 / COLUMN_WARPS, TILE_WARPS = (ROUND + PER_WARP - 1) / PER_WARP;  // of a warp; of a column part
constexpr int SETS = GROUPED && GROUP == 32 ? 2 : 1;                                          // of accumulators; halves with groups of their own
constexpr int SUMS = SPARSE && GROUPED && !SIGNED ? SETS : 0;                                 // of x where weights are kept, for zero points
constexpr int COLUMN_BYTES = FORMAT == PLAIN ? 256 : 128, GROUPS_AT = ROWS * PLANES * COLUMN_BYTES;
constexpr int X_BYTES = GROUPS_AT + SCALES * ROWS * 8;
constexpr int RECORDS_AT = ROUND * 2 * BLOCK_BYTES, X_AT = RECORDS_AT + ROUND * RECORD_BYTES, STAGE_BYTES = X_AT + X_BYTES;
constexpr int WARPS = TILE_WARPS * COLUMN_WARPS, THREADS = WARPS * 32;
constexpr int XROW = COLUMN_BYTES;
static_assert(FORMAT != FP8, "weights of integers or 16-bit floats");
static_assert(ROWS * PLANES % (8 * COLUMN_WARPS) == 0, "whole column tiles");
#include "gemv_products.cuh"

struct __align__(128) Shared {
  u8 ring[STAGES][STAGE_BYTES];
  float factors[ROWS];
  u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

// The part of the work that is this CTA's.
struct Part {
  int group, slice, first_tile, count, first_step, steps;
};
DEVICE Part part_of(int cta, int ctas) {
  constexpr int cut = GROUPED && GROUP < KDIM && GROUP > 128 ? GROUP / 128 : 1, cuts = (STEPS + cut - 1) / cut;
  const int groups = ctas / SLICES, group = cta / SLICES, slice = cta % SLICES;
  const int tile = group * TILES / groups, next_tile = (group + 1) * TILES / groups;
  const int step = slice * cuts / SLICES * cut, next_step = min((slice + 1) * cuts / SLICES * cut, STEPS);
  return {group, slice, tile, group < groups ? next_tile - tile : 0, step, next_step - step};
}

// A loader warp's share of a stage: every LOADERS-th tile with its records, a lane each; the last warp has x too. A warp by itself
// takes several cycles for each instruction, and int4 has 750 for a step at memory's rate: so nothing is done tile by tile that lanes
// can do at once, and no step is found by a division.
struct Loader {
  Shared& sh;
  const Linear& a;
  const u8* packed;
  Part part;
  int loader, lane;
  struct Place {  // the tiles done before this round, and the step of the slice
    int done, step;
    DEVICE void move_on(int steps) {
      if (++step == steps) step = 0, done += ROUND;
    }
  };
  DEVICE void weights(int slot, Place at) const {
    u8* stage = sh.ring[slot];
    const int tiles = (min(ROUND, part.count - at.done) - loader + LOADERS - 1) / LOADERS, tile = loader + lane * LOADERS;
    const int first = part.first_tile + at.done, step = part.first_step + at.step;
    const int bytes = (BLOCKS % 2 && step == STEPS - 1 ? 1 : 2) * BLOCK_BYTES;
    copy_begin(&sh.full[slot], tiles * bytes + (loader == LOADERS - 1 ? X_BYTES : 0), lane);
    if (lane < tiles)
      copy_own(stage + tile * 2 * BLOCK_BYTES, a.weights + ((size_t)(first + tile) * BLOCKS + step * 2) * BLOCK_BYTES, bytes,
               &sh.full[slot]);
    if constexpr (GROUPED) {
#pragma unroll
      for (int piece = lane; piece < (ROUND + LOADERS - 1) / LOADERS * RECORDS * 4; piece += 32) {
        if (piece >= tiles * RECORDS * 4) break;
        const int its = loader + piece / 4 / RECORDS * LOADERS, record = piece / 4 % RECORDS;
        const int group = min(step * 128 / GROUP + record, GROUPS - 1);
        copy_piece(stage + RECORDS_AT + (its * RECORDS + record) * 64 + piece % 4 * 16,
                   a.records + ((size_t)(first + its) * GROUPS + group) * 16 + piece % 4 * 4);
      }
      copy_arrive(&sh.full[slot]);
    }
  }
  DEVICE void inputs(int slot, Place at) const {
    if (loader == LOADERS - 1)
      copy_bytes(sh.ring[slot] + X_AT, packed + (size_t)(part.first_step + at.step) * X_BYTES, X_BYTES, &sh.full[slot], lane);
    copy_end(&sh.full[slot]);
  }
  DEVICE void run() const {
    const int stages = (part.count + ROUND - 1) / ROUND * part.steps, first = min(stages, STAGES);
    Place at = {0, 0}, x_at = {0, 0};
    for (int i = 0; i < first; i++, at.move_on(part.steps)) weights(i, at);
    wait_for_inputs();
    for (int i = 0; i < first; i++, x_at.move_on(part.steps)) inputs(i, x_at);
    int slot = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int i = first; i < stages; i++, at.move_on(part.steps)) {
      barrier_wait(&sh.empty[slot], parity);
      weights(slot, at);
      inputs(slot, at);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  }
};

// What a warp has of PER_WARP tiles: sums of integer weights scaled unit by unit, or whole.
struct Sums {
  float total[PER_WARP][COLUMN_TILES][2];
  accumulator whole[PER_WARP][SETS + SUMS][COLUMN_TILES][4];
};
// One step. `tiles` of the warp's PER_WARP exist; xs: this lane's place in its first column; `odd`: its columns have their halves exchanged.
DEVICE void multiply_step(Sums& s, const u8* stage, const u8* xs, int odd, int first_tile, int tiles, int first_token, int step, int lane) {
  const XGroup* groups = (const XGroup*)(stage + X_AT + GROUPS_AT) + first_token;
#pragma unroll
  for (int unit = 0; unit < 2 / UNIT_BLOCKS; unit++) {
    Column columns[UNIT_BLOCKS][COLUMN_TILES];
#pragma unroll
    for (int b = 0; b < UNIT_BLOCKS; b++) {
      const int block = unit * UNIT_BLOCKS + b, at = FORMAT == PLAIN ? block * 128 + odd * 64 : (block * 64) ^ (odd * 64);
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) columns[b][n] = load_column(xs + n * 8 * XROW + at, odd ? -64 : 64);
    }
#pragma unroll
    for (int m = 0; m < PER_WARP; m++) {
      if (m >= tiles) break;
      const u8* w = stage + (first_tile + m) * 2 * BLOCK_BYTES;
      accumulator acc[SETS + SUMS][COLUMN_TILES][4] = {};
#pragma unroll
      for (int b = 0; b < UNIT_BLOCKS; b++) {
        const int block = unit * UNIT_BLOCKS + b;
        if (BLOCKS % 2 && block == 1 && step == STEPS - 1) break;
        const Fragment f = load_fragment(w + block * BLOCK_BYTES, lane);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
          multiply(f, columns[b][n], GROUPED ? acc : s.whole[m], n);
        }
      }
#if FORMAT == INT4 || FORMAT == INT8
      {
        const int record = GROUP < 128 ? unit * UNIT_BLOCKS * 64 / GROUP : 0;
        const u32* records = (const u32*)(stage + RECORDS_AT) + ((first_tile + m) * RECORDS + record) * 16;
        add_unit(s.total[m], acc, records, groups + unit * (SCALES * UNIT_BLOCKS / 2) * ROWS, true, lane / 4, lane % 4);
      }
#endif
    }
  }
}

DEVICE accumulator sum_of(const Sums& s, int m, int n, int token, int half) {  // an integer for W8A8
  accumulator sum = 0;
#pragma unroll
  for (int i = 0; i < SETS; i++) sum += s.whole[m][i][n][2 * half + token];
  return sum;
}
#if FORMAT == W8A8
typedef int whole_sum;
#else
typedef float whole_sum;
#endif

// What an output needs from memory besides its sums, and its end.
DEVICE Output output_at(const Linear& a, int tile, int row, int token) {
  Output o = {};
  o.row = row, o.token = token, o.index = token * WIDTH + tile * OUTPUTS + row, o.mine = tile * OUTPUTS + row < WIDTH;
  if (o.mine) fetch_ends(o, a, place_of(tile));
  return o;
}
DEVICE void finish(const Linear& a, const Output& o, const whole_sum (&sums)[2], float factor) {
  if (!o.mine) return;
  float v[2];
#pragma unroll
  for (int half = 0; half < PARTS; half++) v[half] = __fmul_rn((float)sums[half], QUANTIZED ? factor * o.scale[half] : factor);
  write_output(o, v, a.y);
}

// The sums of the round's tiles: ended here, or left for the slices that end them.
DEVICE void leave_round(const Linear& a, const Part& part, const Sums& s, float* mail, const float* factors, int first_tile, int tiles,
                        int first_token, int rows, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < PER_WARP; m++) {
    if (m >= tiles) break;
    const int tile = first_tile + m;
#pragma unroll
    for (int i = 0; i < COLUMN_TILES * 2 / PLANES; i++) {
      const int n = GROUPED ? i : i / 2, token = first_token + (GROUPED ? 4 * n + t : 8 * n + 2 * t + i % 2);
      if (token >= rows) continue;
      whole_sum pair[2];  // outputs g and g + 8
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if constexpr (GROUPED) pair[half] = s.total[m][n][half];
        else pair[half] = sum_of(s, m, n, i % 2, half);
      }
      if constexpr (SLICES == 1) {
#pragma unroll
        for (int half = 0; half < 2 / PARTS; half++) {
          const whole_sum sums[2] = {pair[half], pair[1]};
          finish(a, output_at(a, tile, g + 8 * half, token), sums, factors[token]);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; half++)
          if (tile * 16 + g + 8 * half < NDIM)
            leave(mail + (((size_t)tile * SLICES + part.slice) * ROWS + token) * 16 + g + 8 * half, pair[half]);
      }
    }
  }
}
// Every SLICES-th tile of the group is this CTA's to end.
DEVICE void end_tiles(const Linear& a, const Part& part, float* mail, const float* factors, int rows) {
  for (int i = part.slice; i < part.count; i += SLICES) {
    const int tile = part.first_tile + i;
    for (int j = threadIdx.x; j < rows * OUTPUTS; j += THREADS) {
      const int token = j / OUTPUTS, row = j % OUTPUTS;
      const Output o = output_at(a, tile, row, token);
      if (!o.mine) continue;
      whole_sum sums[2] = {};
#pragma unroll
      for (int half = 0; half < PARTS; half++)
        sums[half] = take<whole_sum>(mail + ((size_t)tile * SLICES * ROWS + token) * 16 + row + 8 * half, ROWS * 16);
      finish(a, o, sums, factors[token]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + LOADERS * 32, 1)
batch(const u8* weights, const u32* records, const float* channel_scale, const u8* packed, const float* row_factor, const u16* bias,
      const u16* residual, u16* Y, float* mail, int rows) {
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Part part = part_of(blockIdx.x, gridDim.x);
  if (part.count == 0) return stay();
  const Linear a = {weights, records, channel_scale, nullptr, nullptr, bias, residual, Y, 0.f};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], LOADERS * (COPY_ARRIVALS + (GROUPED ? 32 : 0)));  // records: an arrival of each lane
      barrier_init(&sh.empty[i], WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();
  if (warp >= WARPS) return Loader{sh, a, packed, part, warp - WARPS, lane}.run();
  if (QUANTIZED)  // here before they are needed
    for (int i = threadIdx.x; i < (part.count + 1) / 2; i += THREADS) prefetch_l2(channel_scale + (part.first_tile + 2 * i) * 16);
  wait_for_inputs();
  for (int i = threadIdx.x; i < rows; i += THREADS) sh.factors[i] = row_factor[i];
  named_barrier(1, THREADS);
  const int mine = warp % TILE_WARPS * PER_WARP, first_token = warp / TILE_WARPS * (COLUMN_TILES * 8 / PLANES), odd = lane / 4 % 2;
  const int place = X_AT + (first_token * PLANES + lane / 4) * XROW + lane % 4 * 16;
  int slot = 0;
  u32 parity = 0;
  for (int done = 0; done < part.count; done += ROUND) {
    const int tiles = min(PER_WARP, min(ROUND, part.count - done) - mine);
    Sums sums = {};
#pragma unroll 1
    for (int step = part.first_step; step < part.first_step + part.steps; step++) {
      barrier_wait(&sh.full[slot], parity);
      multiply_step(sums, sh.ring[slot], sh.ring[slot] + place, odd, mine, tiles, first_token, step, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.empty[slot]);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    leave_round(a, part, sums, mail, sh.factors, part.first_tile + done + mine, tiles, first_token, rows, lane);
  }
  if (SLICES > 1) end_tiles(a, part, mail, sh.factors, rows);
}
