// x [rows, K] → the order in which gemm.cu's matrix units read it; the norm applied, and quantized to 8 bits for W8A8.
//
// packed: [stage][8 rows][16-byte column][row][16 bytes]. Within 32 inputs the columns hold, for s, p in {0, 1} and
// t = 0 … 3, input 8t + 4s + 2p and the next (ORDER 0), inputs 8t + 4s + p and + 2 (ORDER 1: how a lane takes its codes
// apart), or bytes 8t + 4s … + 3 (QUANTIZE). Rows up to a whole tile of tokens are zeros.
//
// Work split: 256 threads take PER_CTA rows; a thread keeps its pieces of 32 inputs in registers between the sum over the
// row and the writing. Neighbouring rows fill the two halves of a sector.
// Limit: bytes read and written / bandwidth; for few rows latency.
//
// defines: FP16, KDIM, SB, NORM, QUANTIZE, ORDER, PER_CTA
#include "common.cuh"

constexpr int PIECES = (KDIM + 63) / 64 * 2;        // of 32 inputs
constexpr int TEAM = 256 / PER_CTA, WARPS = TEAM / 32;
constexpr int OWN = (PIECES + TEAM - 1) / TEAM;     // pieces of a thread
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

DEVICE void multiply_norm(u32 (&v)[16], const u16* norm, int piece, float factor, float (&out)[32]) {
  u32 n[16];
  if (NORM) load_piece(n, norm, piece);
#pragma unroll
  for (int i = 0; i < 32; i++) out[i] = value(v, i) * (NORM ? value(n, i) * factor : factor);
}

extern "C" __global__ void __launch_bounds__(256)
pack(const u16* X, const u16* norm, uint4* packed, float* row_scale, int rows, int groups, float epsilon) {
  __shared__ float2 stats[8];
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, row = blockIdx.x * PER_CTA + team;
  launch_dependents();
  wait_for_inputs();
  u32 v[OWN][16];
#pragma unroll
  for (int p = 0; p < OWN; p++) {
    const int piece = thread + p * TEAM;
#pragma unroll
    for (int i = 0; i < 16; i++) v[p][i] = 0;
    if (row < rows && piece < PIECES) load_piece(v[p], X + (size_t)row * KDIM, piece);
  }
  float factor = 1, most = 0, squares = 0;
  if (NORM || QUANTIZE) {
#pragma unroll
    for (int p = 0; p < OWN; p++) {
      const int piece = min(thread + p * TEAM, PIECES - 1);
      float f[32];
      multiply_norm(v[p], norm, piece, 1.f, f);
#pragma unroll
      for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(f[i])), squares += value(v[p], i) * value(v[p], i);
    }
    squares = warp_sum(squares), most = warp_max(most);
    if (WARPS > 1) {
      if (threadIdx.x % 32 == 0) stats[threadIdx.x / 32] = make_float2(squares, most);
      __syncthreads();
      squares = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) squares += stats[team * WARPS + i].x, most = fmaxf(most, stats[team * WARPS + i].y);
    }
    factor = NORM ? rsqrtf(squares / KDIM + epsilon) : 1.f;
    if (QUANTIZE) {
      if (thread == 0 && row < rows) row_scale[row] = fmaxf(most, 127e-12f) / 127.f * factor;
      factor = 127.f / fmaxf(most, 127e-12f);
    }
  }
#pragma unroll
  for (int p = 0; p < OWN; p++) {
    const int piece = thread + p * TEAM;
    if (piece >= PIECES) break;
    constexpr int own = QUANTIZE ? 2 : 4;  // columns
    uint4* to = packed + (((size_t)(piece / (2 * SB)) * groups + row / 8) * COLUMNS + piece % (2 * SB) * own) * 8 + row % 8;
    float f[32];
    if (NORM || QUANTIZE) multiply_norm(v[p], norm, piece, QUANTIZE ? 1.f : factor, f);
    if constexpr (QUANTIZE) {
#pragma unroll
      for (int s = 0; s < 2; s++) {
        u32 word[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) word[i / 4] |= (to_int8(f[8 * (i / 4) + 4 * s + i % 4] * factor) & 0xff) << (8 * (i % 4));
        to[8 * s] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < (NORM ? 16 : 0); i++) v[p][i] = pack2(f[2 * i], f[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 word[4];
#pragma unroll
        for (int t = 0; t < 4; t++)
          word[t] = ORDER == 0 ? v[p][4 * t + i]
                               : __byte_perm(v[p][4 * t + i / 2 * 2], v[p][4 * t + i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
        to[8 * i] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}
