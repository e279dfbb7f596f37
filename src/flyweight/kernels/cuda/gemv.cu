// y[r, n] = sum_k x[r, k] · W[n, k] for 1 to 8 rows: every weight format, norm before and activation after included.
//
// Work split: one CTA an SM. Weights lie in tiles of 16 outputs × all of K, cut into blocks of 64 inputs in the very
// order in which mma.m16n8k16 wants them; CTA b owns a contiguous run of tiles.
//
//      tile t      | block 0 | block 1 | … |        a stage = STAGE_BLOCKS blocks of one tile, one bulk copy
//                    warp 0    warp 1              the warps take a stage's units in turn
//
// A producer warp streams stages through a ring in shared memory. It fills the ring BEFORE it waits for the kernel
// before this one: memory is never idle between two dependent kernels. The ring is sized so that two kernels fit on
// an SM at once. Warps keep their partial sums of many tiles in shared memory and meet once in SLOTS tiles.
// Limit: bytes of weights / bandwidth.
//
// Integer codes become fp16 by or-ing them into a mantissa: 1024 + q, or 1024 + 16·q where the nibble sits four bits
// up, which saves the shift (those inputs are stored divided by 16). Accumulators start at minus the offset's share, and
// a group ends with total += s · (acc − z · sum x). So x is fp16 here even where activations are bf16: a power of two
// per row brings its largest value to about 2^9, which keeps every bit that matters, and is taken out at the end.
// W8A8 quantizes x in the prologue, the same in every CTA.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, ROWS, GROUP, NORM, EPILOGUE, BIAS, WARPS, STAGES, STAGE_BLOCKS,
// PREFETCH, SHARED_BYTES
#include "common.cuh"

#define PLAIN 0
#define INT4 1
#define INT8 2
#define W8A8 3
#define STORE 0
#define RESIDUAL 1
#define SILU 2

constexpr int BLOCKS = (KDIM + 63) / 64;                           // blocks of 64 inputs in a tile
constexpr int TILES = (NDIM + 15) / 16;
constexpr int VECTORS = FORMAT == INT4 ? 1 : FORMAT == PLAIN ? 4 : 2;  // 16-byte words a lane reads of one block
constexpr int BLOCK_BYTES = VECTORS * 512;
constexpr bool GROUPED = FORMAT == INT4 || FORMAT == INT8;
constexpr int UNIT_BLOCKS = GROUPED && GROUP % 128 == 0 ? 2 : 1;    // blocks a warp takes between two scalings
constexpr int SUMS = GROUPED && GROUP == 32 ? 2 * BLOCKS : (BLOCKS + UNIT_BLOCKS - 1) / UNIT_BLOCKS;  // sums of x kept
constexpr int GROUPS = GROUPED ? (KDIM + GROUP - 1) / GROUP : 0;
constexpr int TILE_STAGES = (BLOCKS + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
constexpr int STAGE_GROUPS = !GROUPED ? 0 : (STAGE_BLOCKS * 64 + GROUP - 1) / GROUP;
constexpr int STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES + STAGE_GROUPS * 64;
constexpr int XBLOCK = FORMAT == W8A8 ? 64 : 128;                   // bytes of x that meet one block
constexpr int XROW = BLOCKS * XBLOCK + XBLOCK / 2;                  // padded so that 8 rows hit different banks
constexpr int SLOTS = ROWS > 8 ? 1 : 16 / ROWS;                     // tiles between two meetings of the warps
constexpr int THREADS = WARPS * 32;
constexpr bool FULL = BLOCKS % STAGE_BLOCKS == 0 && STAGE_BLOCKS % (UNIT_BLOCKS * WARPS) == 0;  // no warp is ever idle

static_assert(WARPS % ROWS == 0, "each row is loaded by the same number of warps");
static_assert(!GROUPED || GROUP >= KDIM || (STAGE_BLOCKS * 64) % GROUP == 0 || GROUP % (STAGE_BLOCKS * 64) == 0 || TILE_STAGES == 1, "stage");

struct __align__(128) Shared {
  u8 ring[STAGES][STAGE_BYTES];
  u8 x[ROWS * XROW];
  float2 sums[GROUPED ? SUMS : 1][ROWS];  // of x: −1024 times as stored, and as it is
  float partial[SLOTS][WARPS][16][ROWS];
  float2 row_stats[1][ROWS][WARPS];
  float x_scale[ROWS];
  u64 full[STAGES], empty[STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

// One 64-input block of one tile, times x; the halves of the block are kept apart (groups of 32, and shorter chains).
template <typename Accumulator> DEVICE void multiply_block(const u8* w, const u8* xs, Accumulator (&acc)[2][4], int lane) {
  const uint4* words = (const uint4*)w + lane;
#if FORMAT == INT4
  const uint4 q4 = words[0];
  const u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#endif
#pragma unroll
  for (int h = 0; h < 2; h++) {
#if FORMAT == W8A8
    const uint4 a = words[h * 32];
    const uint2 b = *(const uint2*)(xs + h * 32);
    mma32_s8(acc[h], a.x, a.y, a.z, a.w, b.x, b.y);
#else
    const uint4 b4 = *(const uint4*)(xs + h * 64);
    const u32 b[4] = {b4.x, b4.y, b4.z, b4.w};
#if FORMAT == INT8
    const uint4 q4 = words[h * 32];
    const u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#endif
#pragma unroll
    for (int s = 0; s < 2; s++) {
      u32 a[4];
#if FORMAT == PLAIN
      const uint4 a4 = words[(2 * h + s) * 32];
      a[0] = a4.x, a[1] = a4.y, a[2] = a4.z, a[3] = a4.w;
#elif FORMAT == INT4
#pragma unroll
      for (int j = 0; j < 2; j++) {  // rows g and g + 8
        const u32 v = q[2 * h + s] >> (8 * j);
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a[j]) : "r"(v), "r"(0x000f000f), "r"(0x64006400));
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a[2 + j]) : "r"(v), "r"(0x00f000f0), "r"(0x64006400));
      }
#else
#pragma unroll
      for (int j = 0; j < 2; j++) {  // bytes i0 i2 i1 i3
        a[j] = __byte_perm(q[2 * s + j], 0x64646464, 0x4240);
        a[2 + j] = __byte_perm(q[2 * s + j], 0x64646464, 0x4341);
      }
#endif
      mma16<GROUPED || FP16>(acc[h], a[0], a[1], a[2], a[3], b[2 * s], b[2 * s + 1]);
    }
#endif
  }
}

// The sums of x for tokens 2t and 2t + 1.
DEVICE void token_sums(float2 (&sums)[2], const float2* of_group, int t) {
  sums[0] = of_group[ROWS == 1 ? 0 : min(2 * t, ROWS - 1)];
  sums[1] = ROWS == 1 ? sums[0] : of_group[min(2 * t + 1, ROWS - 1)];
}
// total[rows g, g + 8][tokens 2t, 2t + 1] += scale · (acc − zero · sum of x); a record is scale (low half) and zero point
DEVICE void add_group(float (&total)[4], const float (&acc)[4], const u32* records, const float2 (&sums)[2], int g) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const u32 record = records[g + 8 * j];
    const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff)), zero = float_of<SCALE_FP16>((u16)(record >> 16));
    total[2 * j] += scale * (acc[2 * j] - zero * sums[0].y);
    if (ROWS > 1) total[2 * j + 1] += scale * (acc[2 * j + 1] - zero * sums[1].y);
  }
}

// x into shared memory, normalized, summed by groups and (W8A8) quantized. Each row belongs to PER_ROW warps, and a lane
// keeps its pieces in registers from the first read to the last write. The norm's weights are read ahead of the wait.
constexpr int PER_ROW = WARPS / ROWS;
constexpr int PIECES = BLOCKS * 8;  // 16-byte pieces of a row, padded to whole blocks
constexpr int PER_LANE = (PIECES + PER_ROW * 32 - 1) / (PER_ROW * 32);

// The row's sum of `sum` and maximum of `most` over its warps.
DEVICE void row_total(Shared& sh, float& sum, float& most, int round, int row, int part, int lane) {
  sum = warp_sum(sum);
  most = warp_max(most);
  if (PER_ROW == 1) return;
  float2* stats = sh.row_stats[round][row];
  if (lane == 0) stats[part] = make_float2(sum, most);
  named_barrier(1, THREADS);
  sum = most = 0;
#pragma unroll
  for (int i = 0; i < PER_ROW; i++) sum += stats[i].x, most = fmaxf(most, stats[i].y);
}

DEVICE void load_rows(Shared& sh, const u16* X, const u16* norm, float epsilon, int warp, int lane) {
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
  float squares = 0, most = 0, inverse = 1;
  if (NORM || FORMAT != PLAIN) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const u32 p[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float v = j & 1 ? high_float(p[j / 2]) : low_float(p[j / 2]);
        squares += v * v;
        if (NORM) {
          const u32 n[4] = {weight[i].x, weight[i].y, weight[i].z, weight[i].w};
          v *= j & 1 ? high_float(n[j / 2]) : low_float(n[j / 2]);
        }
        most = fmaxf(most, fabsf(v));
      }
    }
    row_total(sh, squares, most, 0, row, part, lane);
    if (NORM) inverse = rsqrtf(squares / KDIM + epsilon);
    most *= inverse;
  }
  // W8A8: codes are x · 127 / most, and so must see the row as 16-bit floats; integers: x times a power of two
  if (FORMAT == W8A8 && NORM) most = low_float(pack2(most, 0.f));
  most = fmaxf(most, 127e-12f);
  const int exponent = 9 - ((int)(__float_as_uint(most) >> 23) - 127);
  const float factor = FORMAT == W8A8 ? 127.f / most : GROUPED ? __uint_as_float((u32)(127 + min(exponent, 100)) << 23) : 1.f;
  if (lane == 0) sh.x_scale[row] = FORMAT == W8A8 ? most / 127.f : 1.f / factor;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int piece = (i * PER_ROW + part) * 32 + lane;
    u32 p[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    if (NORM) {
      const u32 n[4] = {weight[i].x, weight[i].y, weight[i].z, weight[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++)
        p[j] = pack2(low_float(p[j]) * inverse * low_float(n[j]), high_float(p[j]) * inverse * high_float(n[j]));
    }
    u8* to = sh.x + row * XROW + piece * (FORMAT == W8A8 ? 8 : 16);
    if constexpr (FORMAT == W8A8) {
      u32 q[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 8; j++)
        q[j / 4] |= (to_int8((j & 1 ? high_float(p[j / 2]) : low_float(p[j / 2])) * factor) & 0xff) << (8 * (j % 4));
      if (piece < PIECES) *(uint2*)to = make_uint2(q[0], q[1]);
    } else if constexpr (GROUPED) {
      constexpr int lanes = GROUP == 32 ? 4 : UNIT_BLOCKS * 8;  // that share a sum
      float stored = 0, whole = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float divisor = FORMAT == INT4 && (j & 1) ? 0.0625f : 1.f;  // every second pair meets codes times 16
        p[j] = pack<true>(low_float(p[j]) * factor * divisor, high_float(p[j]) * factor * divisor);
        const float pair = float_of<true>((u16)(p[j] & 0xffff)) + float_of<true>((u16)(p[j] >> 16));
        stored += pair;
        whole += pair / divisor;
      }
#pragma unroll
      for (int o = lanes / 2; o; o >>= 1) stored += __shfl_xor_sync(~0u, stored, o), whole += __shfl_xor_sync(~0u, whole, o);
      if (lane % lanes == 0 && piece < PIECES) sh.sums[piece / lanes][row] = make_float2(-1024.f * stored, whole);
    }
    if (FORMAT != W8A8 && piece < PIECES) *(uint4*)to = make_uint4(p[0], p[1], p[2], p[3]);
  }
  named_barrier(1, THREADS);
}

// The outputs of `count` tiles from the partial sums of all warps; every thread takes some.
DEVICE void finish_tiles(Shared& sh, int first, int count, const float* channel_scale, const u16* bias, const u16* residual, u16* Y) {
  constexpr int OUTPUTS = EPILOGUE == SILU ? 8 : 16, WIDTH = EPILOGUE == SILU ? NDIM / 2 : NDIM;
  for (int i = threadIdx.x; i < count * OUTPUTS * ROWS; i += THREADS) {
    const int token = i % ROWS, r = i / ROWS % OUTPUTS, slot = i / ROWS / OUTPUTS, tile = first + slot, n = tile * OUTPUTS + r;
    if (n >= WIDTH) continue;
    float before = 0;
    if (EPILOGUE == RESIDUAL) before = to_float(residual[(size_t)token * WIDTH + n]);
    float v[2];
#pragma unroll
    for (int half = 0; half < (EPILOGUE == SILU ? 2 : 1); half++) {
      const int channel = tile * 16 + 8 * half + r;
      if constexpr (FORMAT == W8A8) {
        const float scale = channel_scale[channel];
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += __float_as_int(sh.partial[slot][w][r + 8 * half][token]);
        v[half] = (float)sum * (sh.x_scale[token] * scale);
      } else {
        v[half] = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) v[half] += sh.partial[slot][w][r + 8 * half][token];
        if (GROUPED) v[half] *= sh.x_scale[token];
      }
      if (BIAS) v[half] += to_float(bias[channel]);
    }
    const float y = EPILOGUE == SILU ? v[0] / (1.f + __expf(-v[0])) * v[1] : v[0] + before;
    Y[(size_t)token * WIDTH + n] = to_bits(y);
  }
}

// Where stage `i` of this CTA lies, and how much of it there is.
struct Stage {
  const u8* weights;
  const u32* records;
  int bytes, record_bytes;
};
DEVICE Stage stage_at(const u8* weights, const u32* records, int first, int i) {
  const int tile = first + i / TILE_STAGES, start = i % TILE_STAGES * STAGE_BLOCKS;
  Stage s = {weights + ((size_t)tile * BLOCKS + start) * BLOCK_BYTES, records, min(STAGE_BLOCKS, BLOCKS - start) * BLOCK_BYTES, 0};
  if constexpr (GROUPED) {
    const int group = start * 64 / GROUP;
    s.records += ((size_t)tile * GROUPS + group) * 16;
    s.record_bytes = min(STAGE_GROUPS, GROUPS - group) * 64;
  }
  return s;
}

// The ring is filled, and PREFETCH stages more are brought to L2, before this kernel's inputs are there.
DEVICE void produce(Shared& sh, const u8* weights, const u32* records, int first, int stages, int lane) {
  int slot = 0, parity = 1;
  for (int i = 0; i < stages; i++) {
    if (i == STAGES) {
      for (int ahead = i; ahead < min(i + PREFETCH, stages); ahead++) {
        const Stage s = stage_at(weights, records, first, ahead);
        prefetch_l2(s.weights, s.bytes, lane);
        if (GROUPED) prefetch_l2(s.records, s.record_bytes, lane);
      }
      wait_for_inputs();
    }
    if (i >= STAGES) {
      barrier_wait(&sh.empty[slot], parity);
      if (PREFETCH && i + PREFETCH < stages) {
        const Stage s = stage_at(weights, records, first, i + PREFETCH);
        prefetch_l2(s.weights, s.bytes, lane);
        if (GROUPED) prefetch_l2(s.records, s.record_bytes, lane);
      }
    }
    const Stage s = stage_at(weights, records, first, i);
    copy_begin(&sh.full[slot], s.bytes + s.record_bytes, lane);
    copy_bytes(sh.ring[slot], s.weights, s.bytes, &sh.full[slot], lane);
    if (GROUPED) copy_bytes(sh.ring[slot] + STAGE_BLOCKS * BLOCK_BYTES, s.records, s.record_bytes, &sh.full[slot], lane);
    copy_end(&sh.full[slot]);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (stages <= STAGES) wait_for_inputs();
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 2)
gemv(const u8* weights, const u32* scales, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
     const u16* residual, u16* Y, float epsilon) {
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = (int)((long long)blockIdx.x * TILES / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * TILES / gridDim.x);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], COPY_ARRIVALS);
      barrier_init(&sh.empty[i], WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();

  if (warp == WARPS) {
    produce(sh, weights, scales, first, (last - first) * TILE_STAGES, lane);
    return;
  }
  load_rows(sh, X, norm, epsilon, warp, lane);

  const u8* xs = sh.x + min(g, ROWS - 1) * XROW + t * (FORMAT == W8A8 ? 8 : 16);
  int done = first;  // tiles before this one are finished
  int slot = 0;
  u32 parity = 0;
  for (int tile = first; tile < last; tile++) {
    float total[4] = {}, split[2][4] = {};  // of the tile; plain weights keep the two halves of a block apart
    int integers[2][4] = {};
#pragma unroll 1
    for (int stage = 0; stage < TILE_STAGES; stage++) {
      const u8* ring = sh.ring[slot];
      const int start = stage * STAGE_BLOCKS, blocks = FULL ? STAGE_BLOCKS : min(STAGE_BLOCKS, BLOCKS - start);
      barrier_wait(&sh.full[slot], parity);
#pragma unroll
      for (int unit = warp * UNIT_BLOCKS, n = 0; n < (STAGE_BLOCKS + UNIT_BLOCKS * WARPS - 1) / (UNIT_BLOCKS * WARPS);
           n++, unit += WARPS * UNIT_BLOCKS) {
        if (!FULL && unit >= blocks) break;
        const int block = start + unit;
        if constexpr (FORMAT == W8A8) {
          multiply_block<int>(ring + unit * BLOCK_BYTES, xs + block * XBLOCK, integers, lane);
        } else if constexpr (FORMAT == PLAIN) {
          multiply_block<float>(ring + unit * BLOCK_BYTES, xs + block * XBLOCK, split, lane);
        } else {
          const u32* records = (const u32*)(ring + STAGE_BLOCKS * BLOCK_BYTES) + (block * 64 / GROUP - start * 64 / GROUP) * 16;
          float2 sums[2][2];
          float acc[2][4] = {};
          token_sums(sums[0], sh.sums[GROUP == 32 ? 2 * block : block / UNIT_BLOCKS], t);
          if (GROUP == 32) token_sums(sums[1], sh.sums[2 * block + 1], t);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            acc[0][j] = sums[0][j & 1].x;
            if (GROUP == 32) acc[1][j] = sums[1][j & 1].x;
          }
#pragma unroll
          for (int b = 0; b < UNIT_BLOCKS; b++)
            if (UNIT_BLOCKS == 1 || BLOCKS % UNIT_BLOCKS == 0 || unit + b < blocks)
              multiply_block<float>(ring + (unit + b) * BLOCK_BYTES, xs + (block + b) * XBLOCK, acc, lane);
          if constexpr (GROUP == 32) {
            add_group(total, acc[0], records, sums[0], g);
            if (block * 2 + 1 < GROUPS) add_group(total, acc[1], records + 16, sums[1], g);
          } else {
#pragma unroll
            for (int j = 0; j < 4; j++) acc[0][j] += acc[1][j];
            add_group(total, acc[0], records, sums[0], g);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.empty[slot]);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = 2 * t + (j & 1);
      const float v = FORMAT == W8A8 ? __int_as_float(integers[0][j] + integers[1][j])
                    : FORMAT == PLAIN ? split[0][j] + split[1][j] : total[j];
      if (token < ROWS) sh.partial[tile - done][warp][g + 8 * (j / 2)][token] = v;
    }
    if (tile + 1 == last || tile + 1 - done == SLOTS) {
      named_barrier(1, THREADS);
      finish_tiles(sh, done, tile + 1 - done, channel_scale, bias, residual, Y);
      done = tile + 1;
      if (done < last) named_barrier(1, THREADS);
    }
  }
}
