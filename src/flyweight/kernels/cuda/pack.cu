// x [rows, K] → the order in which gemm.cu's matrix units read it; the norm applied, and quantized to 8 bits for W8A8.
//
// packed: [stage][8 rows][16-byte column][row][16 bytes]. Within 32 inputs the columns hold, for s, p in {0, 1} and
// t = 0 … 3, input 8t + 4s + 2p and the next (ORDER 0), inputs 8t + 4s + p and + 2 (ORDER 1: how a lane takes its codes
// apart), or bytes 8t + 4s … + 3 (QUANTIZE). Rows up to a whole tile of tokens are zeros.
//
// Work split: 256 threads take PER_CTA rows, each row twice: for its sum of squares and maximum, and to write it.
// Limit: bytes read and written / bandwidth; for few rows latency.
//
// defines: FP16, KDIM, SB, NORM, QUANTIZE, ORDER, PER_CTA
#include "common.cuh"

constexpr int PIECES = (KDIM + 63) / 64 * 2;        // of 32 inputs
constexpr int TEAM = 256 / PER_CTA, WARPS = TEAM / 32;
constexpr int COLUMNS = QUANTIZE ? SB * 4 : SB * 8;  // of a stage

DEVICE void load_piece(u32 (&v)[16], const u16* row, int piece) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int k = piece * 32 + 8 * i;
    const uint4 w = k < KDIM ? *(const uint4*)(row + k) : make_uint4(0, 0, 0, 0);
    v[4 * i] = w.x, v[4 * i + 1] = w.y, v[4 * i + 2] = w.z, v[4 * i + 3] = w.w;
  }
}
DEVICE float value(const u32 (&v)[16], int i) { return i & 1 ? high_float(v[i / 2]) : low_float(v[i / 2]); }

extern "C" __global__ void __launch_bounds__(256)
pack(const u16* X, const u16* norm, uint4* packed, float* row_scale, int rows, int groups, float epsilon) {
  __shared__ float2 stats[8];
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, row = blockIdx.x * PER_CTA + team;
  launch_dependents();
  wait_for_inputs();
  const u16* from = X + (size_t)min(row, rows - 1) * KDIM;
  float inverse = 1, most = 0, squares = 0;
  if (NORM || QUANTIZE) {
    for (int piece = thread; piece < PIECES; piece += TEAM) {
      u32 v[16], n[16];
      load_piece(v, from, piece);
      if (NORM) load_piece(n, norm, piece);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const float x = value(v, i);
        squares += x * x;
        most = fmaxf(most, fabsf(NORM ? x * value(n, i) : x));
      }
    }
    squares = warp_sum(squares), most = warp_max(most);
    if (WARPS > 1) {
      if (threadIdx.x % 32 == 0) stats[threadIdx.x / 32] = make_float2(squares, most);
      __syncthreads();
      squares = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) squares += stats[team * WARPS + i].x, most = fmaxf(most, stats[team * WARPS + i].y);
    }
    if (NORM) inverse = rsqrtf(squares / KDIM + epsilon);
  }
  const float factor = QUANTIZE ? 127.f / fmaxf(most, 127e-12f) : inverse;
  if (QUANTIZE && thread == 0 && row < rows) row_scale[row] = fmaxf(most, 127e-12f) / 127.f * inverse;
  for (int piece = thread; piece < PIECES; piece += TEAM) {
    u32 v[16] = {}, n[16];
    if (row < rows) load_piece(v, from, piece);
    if (NORM) load_piece(n, norm, piece);
    constexpr int own = QUANTIZE ? 2 : 4;  // columns
    uint4* to = packed + (((size_t)(piece / (2 * SB)) * groups + row / 8) * COLUMNS + piece % (2 * SB) * own) * 8 + row % 8;
    if constexpr (QUANTIZE) {
#pragma unroll
      for (int s = 0; s < 2; s++) {
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const int k = 8 * (i / 4) + 4 * s + i % 4;
          const float x = NORM ? value(v, k) * value(n, k) : value(v, k);
          word[i / 4] |= (to_int8(x * factor) & 0xff) << (8 * (i % 4));
        }
        to[8 * s] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    } else {
      if (NORM) {
#pragma unroll
        for (int i = 0; i < 16; i++)
          v[i] = pack2(low_float(v[i]) * inverse * low_float(n[i]), high_float(v[i]) * inverse * high_float(n[i]));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 word[4];
#pragma unroll
        for (int t = 0; t < 4; t++)
          word[t] = ORDER == 0 ? v[4 * t + i] : __byte_perm(v[4 * t + i / 2 * 2], v[4 * t + i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
        to[8 * i] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}
