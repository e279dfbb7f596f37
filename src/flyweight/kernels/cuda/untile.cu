// A weight in the tiles of gemv.cu → row-major [NDIM, KDIM] in 16-bit floats, for the matrix product of many rows.
//
// One warp a 16 × 64 block, lane by lane as gemv.cu reads it: a lane's codes are 8 neighbouring inputs of a row, so each
// store is 16 bytes. W8A8 codes come out as whole numbers (exact in bf16 and fp16), without their channel scale.
// Limit: bytes read + written / bandwidth.
//
// defines: FORMAT, FP16, SCALE_FP16, KDIM, NDIM, GROUP, INTERLEAVED (rows of gate and up take turns, eight by eight)
#include "common.cuh"
#include "linear.cuh"

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr int VECTORS = FORMAT == INT4 ? 1 : FORMAT == PLAIN ? 4 : 2;
constexpr int GROUPS = (KDIM + GROUP - 1) / GROUP;

extern "C" __global__ void __launch_bounds__(256) untile(const uint4* weights, const u32* records, u16* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int unit = blockIdx.x * 8 + threadIdx.x / 32, tile = unit / BLOCKS, block = unit % BLOCKS;
  if (tile >= TILES) return;
  uint4 words[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) words[v] = weights[((size_t)unit * VECTORS + v) * 32 + lane];
  const u32* word = (const u32*)words;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = tile * 16 + g + 8 * j, column = block * 64 + 32 * half + 8 * t;
      const int place = INTERLEAVED ? tile * 8 + g + (NDIM / 2) * j : row;
      if (row >= NDIM || column >= KDIM) continue;
      uint4 result;
      u32* pair = (u32*)&result;
      float scale = 1.f;
      int zero = 0;
      if (FORMAT == INT4 || FORMAT == INT8) {
        const u32 record = records[((size_t)tile * GROUPS + column / GROUP) * 16 + g + 8 * j];
        scale = float_of<SCALE_FP16>((u16)(record & 0xffff)), zero = record >> 16;
      }
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        if (FORMAT == PLAIN) {
          pair[i / 2] = word[(half * 2 + i / 4) * 4 + i / 2 % 2 * 2 + j];
        } else {
          int q[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int step = i / 4, byte = i % 4 + e;
            if (FORMAT == INT4) q[e] = (int)(word[2 * step + j] >> (8 * byte + 4 * half) & 15) - zero;
            else if (FORMAT == INT8) q[e] = (int)(word[half * 4 + 2 * step + j] >> (8 * byte) & 255) - zero;
            else q[e] = (int)(word[half * 4 + 2 * step + j] << (24 - 8 * byte)) >> 24;
          }
          pair[i / 2] = pack2(q[0] * scale, q[1] * scale);
        }
      }
      *(uint4*)(out + (size_t)place * KDIM + column) = result;
    }
}
