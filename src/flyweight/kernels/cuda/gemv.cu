// y[r, n] = sum_k x[r, k] · W[n, k] for 1 to 8 rows: every weight format, norm before and activation after included.
//
// Work split: one CTA an SM. Weights lie in tiles of 16 outputs × all of K, cut into blocks of 64 inputs in the very
// order in which mma.m16n8k16 wants them; CTA b owns a contiguous run of tiles.
//
//      tile t      | block 0 | block 1 | … |        a stage = STAGE_BLOCKS blocks of one tile, one bulk copy
//                    warp 0    warp 1              8 warps take a stage's units in turn and meet once a tile
//
// A producer warp streams stages through a ring in shared memory. It fills the ring BEFORE it waits for the kernel
// before this one: memory is never idle between two dependent kernels. The ring is sized so that two kernels fit on
// an SM at once. Limit: bytes of weights / bandwidth.
//
// Integers become floats by or-ing the code into a float's mantissa (1024 + q in fp16, 128 + q in bf16); offset and
// zero point are taken out once a group: s · (sum x·(offset + q) − (offset + z) · sum x). An int8 code in bf16 goes
// through as two nibbles, 16 · high + low. W8A8 quantizes x in the prologue, the same in every CTA.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, ROWS, GROUP, NORM, EPILOGUE, BIAS, WARPS, STAGES, STAGE_BLOCKS,
// SHARED_BYTES
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
constexpr int XROW = BLOCKS * 128 + 64;                             // bytes; + 64 so that 8 rows hit different banks
constexpr int THREADS = WARPS * 32;
constexpr float OFFSET = FORMAT == INT8 && !FP16 ? 2176.f : FP16 ? 1024.f : 128.f;

static_assert(WARPS % ROWS == 0, "each row is loaded by the same number of warps");
static_assert(!GROUPED || GROUP >= KDIM || (STAGE_BLOCKS * 64) % GROUP == 0 || GROUP % (STAGE_BLOCKS * 64) == 0 || TILE_STAGES == 1, "stage");

struct __align__(128) Shared {
  u8 ring[STAGES][STAGE_BYTES];
  u8 x[ROWS * XROW];
  u8 x8[FORMAT == W8A8 ? ROWS * (BLOCKS * 64 + 32) : 16];
  float sums[GROUPED ? SUMS : 1][ROWS];
  float partial[2][WARPS][16][ROWS];
  float row_stats[ROWS][WARPS];
  float x_scale[ROWS];
  u64 full[STAGES], empty[STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

// One 64-input block of one tile, times x: `acc` gets both halves of the block apart (groups of 32 need that).
template <typename Accumulator>
DEVICE void multiply_block(const u8* w, const u8* xs, Accumulator (&acc)[2][4], Accumulator (&high)[2][4], int lane) {
  const uint4* words = (const uint4*)w + lane;
#if FORMAT == W8A8
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint4 a = words[h * 32];
    uint2 b = *(const uint2*)(xs + h * 32);
    mma32_s8(acc[h], a.x, a.y, a.z, a.w, b.x, b.y);
  }
#else
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint4 b4 = *(const uint4*)(xs + h * 64);
    u32 b[4] = {b4.x, b4.y, b4.z, b4.w};
#if FORMAT == INT4
    uint4 q4 = words[0];
    u32 q[2] = {h ? q4.z : q4.x, h ? q4.w : q4.y};
#elif FORMAT == INT8
    uint4 q4 = words[h * 32];
    u32 q[4] = {q4.x, q4.y, q4.z, q4.w};
#endif
#pragma unroll
    for (int s = 0; s < 2; s++) {
#if FORMAT != PLAIN
      u32 a[4];
#endif
#if FORMAT == PLAIN
      uint4 a4 = words[(2 * h + s) * 32];
      mma16(acc[h], a4.x, a4.y, a4.z, a4.w, b[2 * s], b[2 * s + 1]);
#elif FORMAT == INT4
      constexpr u32 magic = FP16 ? 0x64006400 : 0x43004300;
#pragma unroll
      for (int j = 0; j < 4; j++)
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a[j]) : "r"(q[s] >> (4 * j)), "r"(0x000f000f), "r"(magic));
      mma16(acc[h], a[0], a[1], a[2], a[3], b[2 * s], b[2 * s + 1]);
#elif FP16
#pragma unroll
      for (int j = 0; j < 2; j++) {  // q[2s + j]: row g + 8j, bytes i0 i2 i1 i3
        a[j] = __byte_perm(q[2 * s + j], 0x64646464, 0x4240);
        a[2 + j] = __byte_perm(q[2 * s + j], 0x64646464, 0x4341);
      }
      mma16(acc[h], a[0], a[1], a[2], a[3], b[2 * s], b[2 * s + 1]);
#else
      u32 t[4];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 v = q[2 * s + j];
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a[j]) : "r"(v), "r"(0x000f000f), "r"(0x43004300));
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a[2 + j]) : "r"(v >> 8), "r"(0x000f000f), "r"(0x43004300));
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(t[j]) : "r"(v >> 4), "r"(0x000f000f), "r"(0x43004300));
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(t[2 + j]) : "r"(v >> 12), "r"(0x000f000f), "r"(0x43004300));
      }
      mma16(acc[h], a[0], a[1], a[2], a[3], b[2 * s], b[2 * s + 1]);
      mma16(high[h], t[0], t[1], t[2], t[3], b[2 * s], b[2 * s + 1]);
#endif
    }
  }
#endif
}

// A group's record: scale in the low half, zero point as an integer in the high half.
DEVICE float scale_float(u32 record) {
#if SCALE_FP16
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)(record & 0xffff)));
  return f;
#else
  return __uint_as_float(record << 16);
#endif
}

// total[rows g, g + 8][tokens 2t, 2t + 1] += scale · (acc − (offset + zero) · sum of x)
DEVICE void add_group(float (&total)[4], const float (&acc)[4], const u32* scales, const float* sums, int g, int t) {
  u32 top = scales[g], bottom = scales[g + 8];
  float first = sums[min(2 * t, ROWS - 1)], second = sums[min(2 * t + 1, ROWS - 1)];
  float s0 = scale_float(top), z0 = OFFSET + (top >> 16), s1 = scale_float(bottom), z1 = OFFSET + (bottom >> 16);
  total[0] += s0 * (acc[0] - z0 * first);
  total[1] += s0 * (acc[1] - z0 * second);
  total[2] += s1 * (acc[2] - z1 * first);
  total[3] += s1 * (acc[3] - z1 * second);
}

// Row-wide statistic over the WARPS / ROWS warps (or fewer rows a warp) that share a row.
DEVICE void load_rows(Shared& sh, const u16* X, const u16* norm, float epsilon, int warp, int lane) {
  constexpr int PER_ROW = WARPS / ROWS > 0 ? WARPS / ROWS : 1;  // warps that share a row
  constexpr int STEP = PER_ROW * 32;
  constexpr int CHUNKS = BLOCKS * 8;  // 16-byte pieces of a row, padded to whole blocks
  const int part = warp % PER_ROW, unit_lanes = GROUPED && GROUP < 64 ? 4 : UNIT_BLOCKS * 8;
  for (int row = warp / PER_ROW; row < ROWS; row += WARPS / PER_ROW) {
    u8* to = sh.x + row * XROW;
    const uint4* from = (const uint4*)(X + (size_t)row * KDIM);
    float squares = 0, most = 0;
#pragma unroll 4
    for (int c = part * 32 + lane; c < CHUNKS; c += STEP) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (c < KDIM / 8) v = from[c];
      *(uint4*)(to + c * 16) = v;
      if (NORM || FORMAT == W8A8) {
        u32 p[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float a = low_float(p[i]), b = high_float(p[i]);
          squares += a * a + b * b;
          most = fmaxf(most, fmaxf(fabsf(a), fabsf(b)));
        }
      }
    }
    float inverse = 1.f;
    if (NORM) {
      squares = warp_sum(squares);
      if (PER_ROW > 1) {
        if (lane == 0) sh.row_stats[row][part] = squares;
        named_barrier(1, THREADS);
        squares = 0;
        for (int i = 0; i < PER_ROW; i++) squares += sh.row_stats[row][i];
      }
      inverse = rsqrtf(squares / KDIM + epsilon);
      most = 0;
    }
    if (NORM || GROUPED) {
#pragma unroll 4
      for (int start = part * 32; start < CHUNKS; start += STEP) {  // whole warps, for the shuffles
        const int c = start + lane;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (c < CHUNKS) v = *(uint4*)(to + c * 16);
        u32 p[4] = {v.x, v.y, v.z, v.w};
        if (NORM && c < KDIM / 8) {
          uint4 n4 = ((const uint4*)norm)[c];
          u32 n[4] = {n4.x, n4.y, n4.z, n4.w};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            p[i] = pack2(low_float(p[i]) * inverse * low_float(n[i]), high_float(p[i]) * inverse * high_float(n[i]));
            most = fmaxf(most, fmaxf(fabsf(low_float(p[i])), fabsf(high_float(p[i]))));
          }
          *(uint4*)(to + c * 16) = make_uint4(p[0], p[1], p[2], p[3]);
        }
        if (GROUPED) {
          float sum = 0;
#pragma unroll
          for (int i = 0; i < 4; i++) sum += low_float(p[i]) + high_float(p[i]);
#pragma unroll
          for (int o = unit_lanes / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
          if (lane % unit_lanes == 0 && c < CHUNKS) sh.sums[c / unit_lanes][row] = sum;
        }
      }
    }
#if FORMAT == W8A8
    most = warp_max(most);
    if (PER_ROW > 1) {
      named_barrier(1, THREADS);  // row_stats may still be read
      if (lane == 0) sh.row_stats[row][part] = most;
      named_barrier(1, THREADS);
      for (int i = 0; i < PER_ROW; i++) most = fmaxf(most, sh.row_stats[row][i]);
    }
    float scale = fmaxf(most / 127.f, 1e-12f);
    if (lane == 0) sh.x_scale[row] = scale;
    for (int c = part * 32 + lane; c < CHUNKS; c += STEP) {
      uint4 v = *(uint4*)(to + c * 16);
      u32 p[4] = {v.x, v.y, v.z, v.w}, q[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float f = (i & 1 ? high_float(p[i / 2]) : low_float(p[i / 2])) / scale;
        q[i / 4] |= ((u32)__float2int_rn(f) & 0xff) << (8 * (i % 4));
      }
      *(uint2*)(sh.x8 + row * (BLOCKS * 64 + 32) + c * 8) = make_uint2(q[0], q[1]);
    }
#endif
  }
  named_barrier(1, THREADS);
}

DEVICE void finish_tile(Shared& sh, int tile, int buffer, const float* channel_scale, const u16* bias, const u16* residual, u16* Y,
                        int lane) {
  constexpr int OUTPUTS = EPILOGUE == SILU ? 8 : 16, WIDTH = EPILOGUE == SILU ? NDIM / 2 : NDIM;
  for (int i = lane; i < OUTPUTS * ROWS; i += 32) {
    int r = i % OUTPUTS, token = i / OUTPUTS, n = tile * OUTPUTS + r;
    float v[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < (EPILOGUE == SILU ? 2 : 1); half++) {
      if constexpr (FORMAT == W8A8) {
        int sum = 0;
        for (int w = 0; w < WARPS; w++) sum += __float_as_int(sh.partial[buffer][w][r + 8 * half][token]);
        int channel = min(EPILOGUE == SILU ? tile * 16 + 8 * half + r : n, NDIM - 1);
        v[half] = (float)sum * sh.x_scale[token] * channel_scale[channel];
      } else {
        for (int w = 0; w < WARPS; w++) v[half] += sh.partial[buffer][w][r + 8 * half][token];
      }
      if (BIAS && n < WIDTH) v[half] += to_float(bias[EPILOGUE == SILU ? tile * 16 + 8 * half + r : n]);
    }
    if (n >= WIDTH) continue;
    float y = v[0];
    if (EPILOGUE == SILU) y = v[0] / (1.f + __expf(-v[0])) * v[1];
    if (EPILOGUE == RESIDUAL) y += to_float(residual[(size_t)token * WIDTH + n]);
    Y[(size_t)token * WIDTH + n] = to_bits(y);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
gemv(const u8* weights, const u32* scales, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
     const u16* residual, u16* Y, float epsilon) {
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = (int)((long long)blockIdx.x * TILES / gridDim.x), last = (int)((long long)(blockIdx.x + 1) * TILES / gridDim.x);
  const int stages = (last - first) * TILE_STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&sh.full[i], COPY_ARRIVALS);
      barrier_init(&sh.empty[i], WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  launch_dependents();

  if (warp == WARPS) {  // the producer
    for (int i = 0; i < stages; i++) {
      int slot = i % STAGES, tile = first + i / TILE_STAGES, stage = i % TILE_STAGES;
      if (i == STAGES) wait_for_inputs();
      if (i >= STAGES) barrier_wait(&sh.empty[slot], (i / STAGES - 1) & 1);
      int blocks = min(STAGE_BLOCKS, BLOCKS - stage * STAGE_BLOCKS), bytes = blocks * BLOCK_BYTES;
      int group = 0, groups = 0;
      if (GROUPED) {
        group = stage * STAGE_BLOCKS * 64 / GROUP;
        groups = min(STAGE_GROUPS, GROUPS - group);
      }
      copy_begin(&sh.full[slot], bytes + groups * 64, lane);
      copy_bytes(sh.ring[slot], weights + ((size_t)tile * BLOCKS + stage * STAGE_BLOCKS) * BLOCK_BYTES, bytes, &sh.full[slot], lane);
      if (GROUPED)
        copy_bytes(sh.ring[slot] + STAGE_BLOCKS * BLOCK_BYTES, scales + ((size_t)tile * GROUPS + group) * 16, groups * 64,
                   &sh.full[slot], lane);
      copy_end(&sh.full[slot]);
    }
    if (stages <= STAGES) wait_for_inputs();
    return;
  }

  wait_for_inputs();
  load_rows(sh, X, norm, epsilon, warp, lane);

  const int row = min(g, ROWS - 1);
  const u8* xs = FORMAT == W8A8 ? sh.x8 + row * (BLOCKS * 64 + 32) + t * 8 : sh.x + row * XROW + t * 16;
  constexpr int XBLOCK = FORMAT == W8A8 ? 64 : 128;
  for (int tile = first, i = 0; tile < last; tile++) {
    float total[4] = {};
    int itotal[2][4] = {};
    float plain[2][4] = {};
    for (int stage = 0; stage < TILE_STAGES; stage++, i++) {
      const u8* ring = sh.ring[i % STAGES];
      const int blocks = min(STAGE_BLOCKS, BLOCKS - stage * STAGE_BLOCKS);
      barrier_wait(&sh.full[i % STAGES], (i / STAGES) & 1);
      for (int unit = warp * UNIT_BLOCKS; unit < blocks; unit += WARPS * UNIT_BLOCKS) {
        const int block = stage * STAGE_BLOCKS + unit;
        if constexpr (FORMAT == W8A8) {
          multiply_block<int>(ring + unit * BLOCK_BYTES, xs + block * XBLOCK, itotal, itotal, lane);
        } else if constexpr (FORMAT == PLAIN) {
          multiply_block<float>(ring + unit * BLOCK_BYTES, xs + block * XBLOCK, plain, plain, lane);
        } else {
          float acc[2][4] = {}, high[2][4] = {};
#pragma unroll
          for (int b = 0; b < UNIT_BLOCKS; b++)
            if (UNIT_BLOCKS == 1 || unit + b < blocks)
              multiply_block<float>(ring + (unit + b) * BLOCK_BYTES, xs + (block + b) * XBLOCK, acc, high, lane);
          const u32* group = (const u32*)(ring + STAGE_BLOCKS * BLOCK_BYTES);
          const int g0 = block * 64 / GROUP - stage * STAGE_BLOCKS * 64 / GROUP;
          if (FORMAT == INT8 && !FP16) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
              for (int j = 0; j < 4; j++) acc[h][j] += 16.f * high[h][j];
          }
          if constexpr (GROUP == 32) {
            add_group(total, acc[0], group + g0 * 16, sh.sums[2 * block], g, t);
            if (block * 2 + 1 < GROUPS) add_group(total, acc[1], group + (g0 + 1) * 16, sh.sums[2 * block + 1], g, t);
          } else {
#pragma unroll
            for (int j = 0; j < 4; j++) acc[0][j] += acc[1][j];
            add_group(total, acc[0], group + g0 * 16, sh.sums[block / UNIT_BLOCKS], g, t);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&sh.empty[i % STAGES]);
    }
    const int buffer = (tile - first) & 1;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int token = 2 * t + (j & 1);
      float v = FORMAT == W8A8 ? __int_as_float(itotal[0][j] + itotal[1][j]) : FORMAT == PLAIN ? plain[0][j] + plain[1][j] : total[j];
      if (token < ROWS) sh.partial[buffer][warp][g + 8 * (j / 2)][token] = v;
    }
    named_barrier(1, THREADS);
    if ((tile - first) % WARPS == warp) finish_tile(sh, tile, buffer, channel_scale, bias, residual, Y, lane);
  }
}

