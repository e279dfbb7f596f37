// y[r, n] = sum_k x[r, k] · W[n, k] for 1 to 8 rows: every weight format, norm before and activation after included.
//
// Work split: one CTA an SM. Weights lie in tiles of 16 outputs × all of K, cut into blocks of 64 inputs in the very
// order in which the matrix units want them; a CTA owns some tiles: gemv.cu a contiguous run, qkv_attention.cu those of a head.
//
//      tile t      | block 0 | block 1 | … |        a stage = STAGE_BLOCKS blocks of one tile, one bulk copy
//                    warp 0    warp 1              the warps take a stage's units in turn
//
// A producer warp streams stages through a ring in shared memory. It fills the ring BEFORE it waits for the kernel
// before this one: memory is never idle between two dependent kernels. The ring is sized so that two kernels fit on
// an SM at once. Warps keep their partial sums of many tiles in shared memory and meet once in SLOTS tiles.
// Limit: bytes of weights / bandwidth.
//
// What happens between x and the first multiplication delays the whole chain, so little does: integer weights are
// multiplied as integers. x becomes 16-bit integers, one scale for each group of inputs, split into a high and a low
// byte that sit in neighbouring columns of B; codes go into A as they are (int8) or masked (int4: the high nibbles of
// a word are 16 times too large and have accumulators of their own). No code is ever converted to a float, and
// total += s · s_x · (acc − z · sum x) is exact up to the scales. The norm's factor is applied at the end.
// W8A8 quantizes x to 8 bits in the prologue, the same in every CTA; plain weights meet x in their own type.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, ROWS, GROUP, NORM, EPILOGUE, BIAS, WARPS, STAGES, STAGE_BLOCKS,
// SLOTS
#include "common.cuh"
#include "linear.cuh"

constexpr int BLOCKS = (KDIM + 63) / 64;                           // blocks of 64 inputs in a tile
constexpr int TILES = (NDIM + 15) / 16;
constexpr int VECTORS = FORMAT == INT4 ? 1 : FORMAT == PLAIN ? 4 : 2;  // 16-byte words a lane reads of one block
constexpr int BLOCK_BYTES = VECTORS * 512;
constexpr bool GROUPED = FORMAT == INT4 || FORMAT == INT8;
constexpr int UNIT_BLOCKS = GROUPED && GROUP % 128 == 0 ? 2 : 1;    // blocks a warp takes between two scalings
constexpr int UNITS = !GROUPED ? 1 : GROUP == 32 ? 2 * BLOCKS : (BLOCKS + UNIT_BLOCKS - 1) / UNIT_BLOCKS;  // scales of x
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int TILE_STAGES = (BLOCKS + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (STAGE_BLOCKS * 64 + GROUP - 1) / GROUP;
constexpr int STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES + STAGE_GROUPS * 64;
constexpr int PLANES = GROUPED ? 2 : 1;                             // columns of B that one row of x takes
constexpr int COLUMN_TILES = (ROWS * PLANES + 7) / 8;
constexpr int XBLOCK = FORMAT == PLAIN ? 128 : 64;                  // bytes of a column that meet one block
constexpr int XROW = FORMAT == PLAIN ? BLOCKS * 128 + 64 : (BLOCKS | 1) * 64;  // neighbours hit different banks
constexpr int THREADS = WARPS * 32;
constexpr bool FULL = BLOCKS % STAGE_BLOCKS == 0 && STAGE_BLOCKS % (UNIT_BLOCKS * WARPS) == 0;  // no warp is ever idle
constexpr int STAGE_UNITS = (STAGE_BLOCKS + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
constexpr int PER_ROW = WARPS / ROWS;                               // warps that load one row of x
constexpr int PIECES = BLOCKS * 8;                                  // 8 inputs each
constexpr int PER_LANE = (PIECES + PER_ROW * 32 - 1) / (PER_ROW * 32);

static_assert(WARPS % ROWS == 0, "each row is loaded by the same number of warps");
static_assert(!GROUPED || GROUP >= KDIM || (STAGE_BLOCKS * 64) % GROUP == 0 || GROUP % (STAGE_BLOCKS * 64) == 0 || TILE_STAGES == 1,
              "a stage holds whole groups, or a group whole stages");

struct XGroup {  // of one group of inputs of one row
  int sum;
  float scale;
};
struct __align__(128) LinearShared {
  u8 ring[STAGES][STAGE_BYTES];
  u8 x[ROWS * PLANES * XROW];
  XGroup groups[UNITS][ROWS];
  float partial[SLOTS][WARPS][16][ROWS];
  float2 row_stats[ROWS][WARPS];  // sum of squares, maximum
  u64 full[STAGES], empty[STAGES];
};

// What a linear is made of, as the host gives it; pointers to what its format or its call has not are null.
struct Linear {
  const u8* weights;
  const u32* records;          // scale and zero point of each group of inputs
  const float* channel_scale;  // W8A8
  const u16 *x, *norm, *bias, *residual;
  u16* y;
  float epsilon;
};

// One 64-input block of one tile, times x; the halves of the block have accumulators of their own.
template <typename Accumulator>
DEVICE void multiply_block(const u8* w, const u8* xs, Accumulator (&acc)[2][COLUMN_TILES][4], int lane) {
  const uint4* words = (const uint4*)w + lane;
#if FORMAT == PLAIN
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 b = *(const uint4*)(xs + h * 64), a0 = words[h * 64], a1 = words[h * 64 + 32];
    mma16<FP16>(acc[h][0], a0.x, a0.y, a0.z, a0.w, b.x, b.y);
    mma16<FP16>(acc[h][0], a1.x, a1.y, a1.z, a1.w, b.z, b.w);
  }
#else
  uint4 a[2];
#if FORMAT == INT4
  const uint4 q = words[0];
  a[0] = make_uint4(q.x & 0x0f0f0f0f, q.y & 0x0f0f0f0f, q.z & 0x0f0f0f0f, q.w & 0x0f0f0f0f);
  a[1] = make_uint4(q.x & 0xf0f0f0f0, q.y & 0xf0f0f0f0, q.z & 0xf0f0f0f0, q.w & 0xf0f0f0f0);
#else
  a[0] = words[0], a[1] = words[32];
#endif
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const uint4 b = *(const uint4*)(xs + n * 8 * XROW);
    mma32<FORMAT != W8A8>(acc[0][n], a[0], b.x, b.y);
    mma32<FORMAT != W8A8>(acc[1][n], a[1], b.z, b.w);
  }
#endif
}

// total[row g, g + 8] of token t (+ 4 a column tile) += scale · x scale · (acc − zero · sum of x).
// A record is the scale (low half) and the zero point (high half). `low`: 256 · hi + lo of the first half's accumulators.
DEVICE void add_group(float (&total)[COLUMN_TILES][2], const int (&value)[COLUMN_TILES][2], const u32* records, const XGroup* groups,
                      int g, int t) {
#pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++) {
    const XGroup x = groups[min(t + 4 * n, ROWS - 1)];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 record = records[g + 8 * j];
      const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff)) * x.scale;
      total[n][j] += (float)(value[n][j] - (int)(record >> 16) * x.sum) * scale;
    }
  }
}

// x into shared memory. Each row belongs to PER_ROW warps; the norm's weights are read ahead of the wait. Integer weights
// want whole groups only, so warps need not meet before the multiplication; W8A8 wants the row's maximum.
DEVICE void load_rows(LinearShared& sh, const u16* X, const u16* norm, int warp, int lane) {
  const int row = warp / PER_ROW, part = warp % PER_ROW;
  uint4 x[PER_LANE], weight[NORM ? PER_LANE : 1];
#pragma unroll
  for (int i = 0; i < (NORM ? PER_LANE : 0); i++) {
    const int piece = (i * PER_ROW + part) * 32 + lane;
    weight[i] = piece < KDIM / 8 ? ((const uint4*)norm)[piece] : make_uint4(0, 0, 0, 0);
  }
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int piece = (i * PER_ROW + part) * 32 + lane;
    x[i] = piece < KDIM / 8 ? ((const uint4*)(X + (size_t)row * KDIM))[piece] : make_uint4(0, 0, 0, 0);
  }
  float v[PER_LANE][8], squares = 0, most = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const u32 p[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 8; j++) v[i][j] = j & 1 ? high_float(p[j / 2]) : low_float(p[j / 2]);
    if (NORM) {
      const u32 n[4] = {weight[i].x, weight[i].y, weight[i].z, weight[i].w};
#pragma unroll
      for (int j = 0; j < 8; j++) {
        squares += v[i][j] * v[i][j];
        v[i][j] *= j & 1 ? high_float(n[j / 2]) : low_float(n[j / 2]);
      }
    }
    if (FORMAT == W8A8) {
#pragma unroll
      for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(v[i][j]));
    }
  }
  if (NORM) squares = warp_sum(squares);
  if (FORMAT == W8A8) most = warp_max(most);
  if (lane == 0) sh.row_stats[row][part] = make_float2(squares, most);
  if (FORMAT == W8A8 && PER_ROW > 1) {
    named_barrier(1, THREADS);
#pragma unroll
    for (int i = 0; i < PER_ROW; i++) most = fmaxf(most, sh.row_stats[row][i].y);
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int piece = (i * PER_ROW + part) * 32 + lane;
    if constexpr (FORMAT == PLAIN) {
      const uint4 p = make_uint4(pack2(v[i][0], v[i][1]), pack2(v[i][2], v[i][3]), pack2(v[i][4], v[i][5]), pack2(v[i][6], v[i][7]));
      if (piece < PIECES) *(uint4*)(sh.x + row * XROW + piece * 16) = p;
    } else {
      u8* to = sh.x + row * PLANES * XROW + piece / 8 * 64 + piece % 4 * 16 + piece / 4 % 2 * 8;  // a lane's two halves together
      u32 high[2] = {0, 0}, low[2] = {0, 0};
      if constexpr (FORMAT == W8A8) {
        const float factor = 127.f / fmaxf(most, 127e-12f);
#pragma unroll
        for (int j = 0; j < 8; j++) high[j / 4] |= (to_int8(v[i][j] * factor) & 0xff) << (8 * (j % 4));
        if (piece < PIECES) *(uint2*)to = make_uint2(high[0], high[1]);
      } else {
        constexpr int lanes = GROUP == 32 ? 4 : UNIT_BLOCKS * 8;  // that share a scale
        float peak = 1e-30f;
#pragma unroll
        for (int j = 0; j < 8; j++) peak = fmaxf(peak, fabsf(v[i][j]));
#pragma unroll
        for (int o = lanes / 2; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
        // v · factor + 1.5 · 2^23 leaves the rounded integer in the low bits of the float: no conversion unit needed
        const float factor = __fdividef(32512.f, peak);
        u32 q[8];
        int sum = -8 * 0x4b400000;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += q[j] = __float_as_uint(fmaf(v[i][j], factor, 12582912.f));
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          low[j / 4] = __byte_perm(__byte_perm(q[j], q[j + 1], 0x0040), __byte_perm(q[j + 2], q[j + 3], 0x0040), 0x5410);
#pragma unroll
          for (int l = j; l < j + 4; l++) q[l] += 128;  // the low byte is signed: round the high one
          high[j / 4] = __byte_perm(__byte_perm(q[j], q[j + 1], 0x0051), __byte_perm(q[j + 2], q[j + 3], 0x0051), 0x5410);
        }
#pragma unroll
        for (int o = lanes / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
        if (piece < PIECES) {
          *(uint2*)to = make_uint2(high[0], high[1]);
          *(uint2*)(to + XROW) = make_uint2(low[0], low[1]);
          // int4: values are 16 times too large, and so is the sum that the zero point takes out
          constexpr int larger = FORMAT == INT4 ? 16 : 1;
          if (lane % lanes == 0) sh.groups[piece / lanes][row] = {sum * larger, 1.f / (factor * larger)};
        }
      }
    }
  }
  named_barrier(1, THREADS);
}

// What a finished sum of row `token` is multiplied with, the weights' own scales aside.
DEVICE float row_factor(const LinearShared& sh, int token, float epsilon) {
  float squares = 0, most = 0;
#pragma unroll
  for (int i = 0; i < PER_ROW; i++) squares += sh.row_stats[token][i].x, most = fmaxf(most, sh.row_stats[token][i].y);
  const float inverse = NORM ? rsqrtf(squares / KDIM + epsilon) : 1.f;
  return FORMAT == W8A8 ? fmaxf(most, 127e-12f) / 127.f * inverse : inverse;
}

// One output of a round of SLOTS tiles: every thread has at most one. What its end needs from memory is read when the
// round begins, so that nothing waits for it between the last multiplication and the next kernel.
constexpr int OUTPUTS = EPILOGUE == SILU ? 8 : 16, WIDTH = EPILOGUE == SILU ? NDIM / 2 : NDIM;
static_assert(SLOTS * OUTPUTS * ROWS <= THREADS, "one output a thread");

struct Output {
  int slot, row, token, index;
  bool mine;
  float residual, bias[2], scale[2];
};
template <typename TileAt> DEVICE Output begin_round(const Linear& a, int first, int count, TileAt tile_at) {
  Output o = {};
  const int i = threadIdx.x;
  o.token = i % ROWS, o.row = i / ROWS % OUTPUTS, o.slot = i / ROWS / OUTPUTS;
  const int tile = tile_at(first + o.slot), n = tile * OUTPUTS + o.row;
  o.index = o.token * WIDTH + n;
  o.mine = o.slot < min(count - first, SLOTS) && n < WIDTH;
  if (o.mine) {
    if (EPILOGUE == RESIDUAL) o.residual = to_float(a.residual[o.index]);
#pragma unroll
    for (int half = 0; half < (EPILOGUE == SILU ? 2 : 1); half++) {
      const int channel = tile * 16 + 8 * half + o.row;
      if (BIAS) o.bias[half] = to_float(a.bias[channel]);
      if (FORMAT == W8A8) o.scale[half] = a.channel_scale[channel];
    }
  }
  return o;
}
DEVICE void end_round(const LinearShared& sh, const Output& o, u16* Y, float epsilon) {
  if (!o.mine) return;
  const float factor = row_factor(sh, o.token, epsilon);
  float v[2];
#pragma unroll
  for (int half = 0; half < (EPILOGUE == SILU ? 2 : 1); half++) {
    const int r = o.row + 8 * half;
    if constexpr (FORMAT == W8A8) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += __float_as_int(sh.partial[o.slot][w][r][o.token]);
      v[half] = (float)sum * (factor * o.scale[half]);
    } else {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += sh.partial[o.slot][w][r][o.token];
      v[half] = sum * factor;
    }
    if (BIAS) v[half] += o.bias[half];
  }
  store_relaxed(Y + o.index, to_bits(EPILOGUE == SILU ? v[0] / (1.f + __expf(-v[0])) * v[1] : v[0] + o.residual));
}

// Where stage `start` of a tile lies, and how much of it there is.
struct Stage {
  const u8* weights;
  const u32* records;
  int bytes, record_bytes;
};
DEVICE Stage stage_at(const Linear& a, int tile, int start) {
  const u8* weights = a.weights + ((size_t)tile * BLOCKS + start) * BLOCK_BYTES;
  Stage s = {weights, a.records, min(STAGE_BLOCKS, BLOCKS - start) * BLOCK_BYTES, 0};
  if constexpr (GROUPED) {
    const int group = start * 64 / GROUP;
    s.records += ((size_t)tile * GROUPS + group) * 16;
    s.record_bytes = min(STAGE_GROUPS, GROUPS - group) * 64;
  }
  return s;
}

// The ring is filled before this kernel's inputs are there; `early` runs once it is full, still ahead of the wait.
template <typename TileAt, typename Early>
DEVICE void produce(LinearShared& sh, const Linear& a, int count, TileAt tile_at, Early early, int lane) {
  const int stages = count * TILE_STAGES;
  int slot = 0, parity = 1;
  for (int i = 0; i < stages; i++) {
    if (i == STAGES) early(), wait_for_inputs();
    if (i >= STAGES) barrier_wait(&sh.empty[slot], parity);
    const Stage s = stage_at(a, tile_at(i / TILE_STAGES), i % TILE_STAGES * STAGE_BLOCKS);
    copy_begin(&sh.full[slot], s.bytes + s.record_bytes, lane);
    copy_bytes(sh.ring[slot], s.weights, s.bytes, &sh.full[slot], lane);
    if (GROUPED) copy_bytes(sh.ring[slot] + STAGE_BLOCKS * BLOCK_BYTES, s.records, s.record_bytes, &sh.full[slot], lane);
    copy_end(&sh.full[slot]);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (stages <= STAGES) early(), wait_for_inputs();
}

#if FORMAT == PLAIN
typedef float accumulator;
#else
typedef int accumulator;
#endif
DEVICE float as_float(float v) { return v; }
DEVICE float as_float(int v) { return __int_as_float(v); }

// One stage of one tile, this warp's units of it: into `whole`, or scaled group by group into `total`.
// `turn`: which of the stage's units this warp begins with; it moves on from stage to stage where units and warps do not match.
DEVICE void multiply_stage(const LinearShared& sh, const u8* ring, const u8* xs, int start, float (&total)[COLUMN_TILES][2],
                           accumulator (&whole)[2][COLUMN_TILES][4], int turn, int lane) {
  const int g = lane / 4, t = lane % 4, blocks = FULL ? STAGE_BLOCKS : min(STAGE_BLOCKS, BLOCKS - start);
#pragma unroll
  for (int unit = turn * UNIT_BLOCKS, n = 0; n < (STAGE_BLOCKS + UNIT_BLOCKS * WARPS - 1) / (UNIT_BLOCKS * WARPS);
       n++, unit += WARPS * UNIT_BLOCKS) {
    if (!FULL && unit >= blocks) break;
    const int block = start + unit;
    if constexpr (!GROUPED) {
      multiply_block(ring + unit * BLOCK_BYTES, xs + block * XBLOCK, whole, lane);
    } else {
      int acc[2][COLUMN_TILES][4] = {};
#pragma unroll
      for (int b = 0; b < UNIT_BLOCKS; b++)
        if (UNIT_BLOCKS == 1 || BLOCKS % UNIT_BLOCKS == 0 || unit + b < blocks)
          multiply_block(ring + (unit + b) * BLOCK_BYTES, xs + (block + b) * XBLOCK, acc, lane);
      const u32* records = (const u32*)(ring + STAGE_BLOCKS * BLOCK_BYTES) + (block * 64 / GROUP - start * 64 / GROUP) * 16;
      int value[2][COLUMN_TILES][2];
#pragma unroll
      for (int i = 0; i < COLUMN_TILES * 4; i++) {  // the planes of x, and then (int4) of the weights, at their true size
        const int h = i % 2, j = i / 2 % 2, c = i / 4;
        value[h][c][j] = (256 * acc[h][c][2 * j] + acc[h][c][2 * j + 1]) * (FORMAT == INT4 && h == 0 ? 16 : 1);
      }
      if constexpr (GROUP == 32) {
        add_group(total, value[0], records, sh.groups[2 * block], g, t);
        if (block * 2 + 1 < GROUPS) add_group(total, value[1], records + 16, sh.groups[2 * block + 1], g, t);
      } else {
#pragma unroll
        for (int i = 0; i < COLUMN_TILES * 2; i++) value[0][i / 2][i % 2] += value[1][i / 2][i % 2];
        add_group(total, value[0], records, sh.groups[block / UNIT_BLOCKS], g, t);
      }
    }
  }
}

// This CTA's tiles tile_at(0) … tile_at(count - 1) of the linear. The producer warp comes back with false and is done;
// for the others the ring is free, and what they wrote to y is on its way. Before its first use of x, everything here is
// ahead of the kernel before this one.
template <typename TileAt, typename Early>
DEVICE bool linear(LinearShared& sh, const Linear& a, int count, TileAt tile_at, Early early) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], COPY_ARRIVALS);
      barrier_init(&sh.empty[i], WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();  // at once: while this CTA is here, the SM has room for exactly one of the next kernel's

  if (warp == WARPS) {
    produce(sh, a, count, tile_at, early, lane);
    return false;
  }
  load_rows(sh, a.x, a.norm, warp, lane);

  // Column g of B: token g (W8A8, plain), or plane g % 2 of token g / 2; columns beyond the last row repeat it.
  const u8* xs = sh.x + min(g, ROWS * PLANES - 1) * XROW + t * 16;
  int done = 0;  // tiles before this one are finished
  Output output = begin_round(a, 0, count, tile_at);
  int slot = 0, turn = warp;
  u32 parity = 0;
  for (int tile = 0; tile < count; tile++) {
    float total[COLUMN_TILES][2] = {};  // of the tile
    accumulator whole[2][COLUMN_TILES][4] = {};
#pragma unroll 1
    for (int stage = 0; stage < TILE_STAGES; stage++) {
      barrier_wait(&sh.full[slot], parity);
      multiply_stage(sh, sh.ring[slot], xs, stage * STAGE_BLOCKS, total, whole, turn, lane);
      if (!FULL) turn = (turn + WARPS - STAGE_UNITS % WARPS) % WARPS;
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.empty[slot]);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    auto& partial = sh.partial[tile - done][warp];
    if constexpr (GROUPED) {
#pragma unroll
      for (int i = 0; i < COLUMN_TILES * 2; i++) {
        const int token = t + i / 2 * 4;
        if (token < ROWS) partial[g + 8 * (i % 2)][token] = total[i / 2][i % 2];
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int token = 2 * t + (j & 1);
        if (token < ROWS) partial[g + 8 * (j / 2)][token] = as_float(whole[0][0][j] + whole[1][0][j]);
      }
    }
    if (tile + 1 == count || tile + 1 - done == SLOTS) {
      named_barrier(1, THREADS);
      end_round(sh, output, a.y, a.epsilon);
      done = tile + 1;
      if (done < count) {
        named_barrier(1, THREADS);
        output = begin_round(a, done, count, tile_at);
      }
    }
  }
  return true;
}
