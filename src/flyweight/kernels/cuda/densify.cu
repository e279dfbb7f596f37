// A 2:4 weight in gemv.cu's tiles → the tiles of the same weight with its zeros written out: dense codes for gemm.cu.
//
// One warp a 16 × 64 block, lane by lane as untile.cu reads it. Four neighbouring inputs of a row are a word of dense codes
// (int4: of both halves of the block, one in the low and one in the high nibbles), so each store is 4 bytes. A zero is the code
// 0 (W8A8) or the group's zero point.
// Limit: bytes read + written / bandwidth; a hundredth of the product of 4,096 rows.
//
// defines: FORMAT, SPARSE = 1, KDIM, GROUP
#include "common.cuh"
#include "linear.cuh"

constexpr int BLOCKS = (KDIM + 63) / 64, GROUPS = (KDIM + GROUP - 1) / GROUP;
constexpr int DENSE_BYTES = FORMAT == INT4 ? 512 : 1024;
static_assert(SPARSE && (FORMAT == INT4 || FORMAT == INT8 || FORMAT == W8A8), "2:4 formats");

extern "C" __global__ void __launch_bounds__(256) densify(const u8* weights, const u32* records, u32* out, int units) {
  const int lane = threadIdx.x % 32, g = lane / 4, unit = blockIdx.x * 8 + threadIdx.x / 32;
  if (unit >= units) return;
  const int tile = unit / BLOCKS, block = unit % BLOCKS;
  const u8* from = weights + (size_t)unit * BLOCK_BYTES;
  const u32* words = (const u32*)from + lane * (FORMAT == INT4 ? 2 : 4);
  const u32* which = (const u32*)(from + BLOCK_BYTES - 128) + g * 4;
  u32* to = out + (size_t)unit * (DENSE_BYTES / 4) + g * 16;
#pragma unroll
  for (int part = 0; part < 4; part++) {  // the lane's two fours of rows g and g + 8
    const int j = part % 2, order = lane % 4 * 2 + part / 2, column = order % 4 * 4 + order / 4 * 2 + j;  // of a row's words
    u32 both = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 zero = 0;
      if (FORMAT != W8A8) {  // groups beyond the last have only zeros of x
        const int group = min((block * 64 + half * 32) / GROUP, GROUPS - 1);
        zero = records[((size_t)tile * GROUPS + group) * 16 + g + 8 * j] >> 16;
      }
      const u32 places = which[2 * half + j] >> (4 * order);
      const u32 codes = words[FORMAT == INT4 ? j : 2 * half + j] >> (16 * (part / 2));
      u32 four = zero * 0x01010101;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int at = 8 * (places >> (2 * e) & 3);
        const u32 code = FORMAT == INT4 ? codes >> (8 * e + 4 * half) & 15 : codes >> (8 * e) & 255;
        four = four & ~(255u << at) | code << at;
      }
      if (FORMAT == INT4) both |= four << (4 * half);
      else to[128 * half + column] = four;
    }
    if (FORMAT == INT4) to[column] = both;
  }
}
