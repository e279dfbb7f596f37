// x [rows, K] → the order in which gemm.cu's matrix units read it; the norm applied, and quantized to 8 bits for W8A8.
//
// packed: [stage][8 rows][16-byte column][row][16 bytes]. Within 32 inputs the columns hold, for s, p in {0, 1} and
// t = 0 … 3, input 8t + 4s + 2p and the next (ORDER 0), inputs 8t + 4s + p and + 2 (ORDER 1: how a lane takes its codes
// apart), or bytes 8t + 4s … + 3 (QUANTIZE). Rows up to a whole tile of tokens are zeros.
//
// Work split: 256 threads take PER_CTA rows. BESIDE: neighbouring lanes have neighbouring rows and fill whole lines when they
// write (16-bit output); otherwise they have neighbouring inputs of one row. A thread keeps its pieces of 32 inputs in
// registers between the sum over the row and the writing where they are few, and reads them again where not.
// Limit: bytes read and written / bandwidth; for few rows latency.
//
// TILE: rows go to experts (route.cu). There are as many as `tiles` of TILE rows, and row r is row source[r] of x, zeros where
// that is -1; source may be missing where x lies in this order already.
//
// defines: FP16, KDIM, SB, NORM, QUANTIZE, ORDER, PER_CTA, BESIDE, TILE (0 where it is not given)
#include "common.cuh"
#ifndef TILE
#define TILE 0
#endif

constexpr int PIECES = (KDIM + 63) / 64 * 2;        // of 32 inputs
constexpr int TEAM = 256 / PER_CTA;
constexpr int OWN = (PIECES + TEAM - 1) / TEAM;     // pieces of a thread
constexpr bool KEPT = OWN <= (BESIDE ? 2 : 3);
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
pack(const u16* X, const u16* norm, uint4* packed, float* row_scale, const int* source, const int* tiles, int rows, int groups,
     float epsilon) {
  constexpr int ROWS = BESIDE ? PER_CTA : 1;                    // of a warp
  constexpr int WARPS = BESIDE ? 8 : TEAM / 32;                 // of a row
  __shared__ float2 stats[8][ROWS];
  const int place = BESIDE ? threadIdx.x % PER_CTA : threadIdx.x / TEAM, row = blockIdx.x * PER_CTA + place;
  const int thread = BESIDE ? threadIdx.x / PER_CTA : threadIdx.x % TEAM;
  launch_dependents();
  wait_for_inputs();
  int from_row = row;
  if (TILE) {
    rows = tiles[0] * TILE;
    if (blockIdx.x * PER_CTA >= rows) return;
    if (source) from_row = source[row];
  }
  const bool exists = row < rows && from_row >= 0;
  const u16* from = X + (size_t)from_row * KDIM;
  u32 kept[KEPT ? OWN : 1][16];
  auto fetch = [&](u32(&v)[16], int piece) {
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = 0;
    if (exists && piece < PIECES) load_piece(v, from, piece);
  };
#pragma unroll
  for (int p = 0; p < (KEPT ? OWN : 0); p++) fetch(kept[p], thread + p * TEAM);
  float factor = 1, most = 0, squares = 0;
  if (NORM || QUANTIZE) {
    auto look = [&](u32(&v)[16], int piece) {
      float f[32];
      multiply_norm(v, norm, min(piece, PIECES - 1), 1.f, f);
#pragma unroll
      for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(f[i])), squares += value(v, i) * value(v, i);
    };
#pragma unroll
    for (int p = 0; p < (KEPT ? OWN : 0); p++) look(kept[p], thread + p * TEAM);
    for (int p = 0; p < (KEPT ? 0 : OWN); p++) fetch(kept[0], thread + p * TEAM), look(kept[0], thread + p * TEAM);
#pragma unroll
    for (int o = 16; o >= ROWS; o >>= 1) {
      squares += __shfl_xor_sync(~0u, squares, o);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    }
    if (threadIdx.x % 32 < ROWS) stats[threadIdx.x / 32][threadIdx.x % 32] = make_float2(squares, most);
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float2 other = stats[BESIDE ? i : place * WARPS + i][BESIDE ? place : 0];
      squares += other.x, most = fmaxf(most, other.y);
    }
    factor = NORM ? rsqrtf(squares / KDIM + epsilon) : 1.f;
    if (QUANTIZE) {
      if (thread == 0 && row < rows) row_scale[row] = fmaxf(most, 127e-12f) / 127.f * factor;
      factor = 127.f / fmaxf(most, 127e-12f);
    }
  }
  auto write = [&](u32(&v)[16], int piece) {
    constexpr int own = QUANTIZE ? 2 : 4;  // columns
    uint4* to = packed + (((size_t)(piece / (2 * SB)) * groups + row / 8) * COLUMNS + piece % (2 * SB) * own) * 8 + row % 8;
    float f[32];
    if (NORM || QUANTIZE) multiply_norm(v, norm, piece, QUANTIZE ? 1.f : factor, f);
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
      for (int i = 0; i < (NORM ? 16 : 0); i++) v[i] = pack2(f[2 * i], f[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 word[4];
#pragma unroll
        for (int t = 0; t < 4; t++)
          word[t] = ORDER == 0 ? v[4 * t + i] : __byte_perm(v[4 * t + i / 2 * 2], v[4 * t + i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
        to[8 * i] = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  };
#pragma unroll
  for (int p = 0; p < (KEPT ? OWN : 0); p++)
    if (thread + p * TEAM < PIECES) write(kept[p], thread + p * TEAM);
  for (int piece = thread; piece < (KEPT ? 0 : PIECES); piece += TEAM) fetch(kept[0], piece), write(kept[0], piece);
}
