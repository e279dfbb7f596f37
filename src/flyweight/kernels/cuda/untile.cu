// A weight in the tiles of gemv.cu → row-major [NDIM, KDIM] in 16-bit floats, for the matrix product of many rows, or (IN_TILES)
// 16-bit tiles, for that of gemm.cu (its BY_ROWS), or (INTO) tiles of 8-bit codes with a scale for each output, for gemm.cu with x
// in 8 bits: code = q · scale of the group / scale of the output, rounded. A lane's nibbles are the bytes of two words there.
// Or (LOOK_UP) single rows of it: the head as the table of an embedding that is tied to it.
//
// One warp a 16 × 64 block, lane by lane as gemv.cu reads it: a lane's codes are 8 neighbouring inputs of a row, so each
// store is 16 bytes; of a 2:4 weight twice two kept ones of 4 neighbours. W8A8 and float8 codes come out as they are (exact
// in bf16 and fp16), without their channel scale.
// Limit: bytes read + written / bandwidth.
//
// defines: FORMAT, SPARSE (0), FP16, SCALE_FP16, KDIM, NDIM, GROUP, INTERLEAVED (rows of gate and up take turns, eight by eight),
// IN_TILES (0), INTO (0; W8A8 or FP8, from INT4 alone), LOOK_UP (0; INT4, INT8 or BIT_PLANES)
#include "common.cuh"
#include "linear.cuh"
#ifndef IN_TILES
#define IN_TILES 0
#endif
#ifndef INTO
#define INTO 0
#endif
#ifndef LOOK_UP
#define LOOK_UP 0
#endif

constexpr int BLOCKS = (KDIM + 63) / 64, TILES = (NDIM + 15) / 16;
constexpr int VECTORS = NIBBLES ? 1 : FORMAT == PLAIN ? 4 : 2;
constexpr int GROUPS = (KDIM + GROUP - 1) / GROUP;

struct Scale {
  float scale;
  int zero;
};
DEVICE Scale read_scale(const u32* records, int tile, int row, int column) {
  if (!GROUPED) return {1.f, 0};
  if (FORMAT == FP8_BLOCKS)
    return {((const float*)records)[((size_t)tile * GROUPS + column / GROUP) * 4 + row / 8], 0};
  const Record record = ((const Record*)records)[((size_t)tile * GROUPS + column / GROUP) * 16 + row];
  if (FORMAT == MXFP4) return {__uint_as_float((u32)max((int)record - 1, 0) << 23), 0};  // of twice the codes' values
  return {float_of<SCALE_FP16>((u16)(record & 0xffff)), (int)(record >> 16)};
}
DEVICE int twice_float4(u32 code) {
  const int magnitude = code & 7, twice = magnitude < 4 ? magnitude : (2 + magnitude % 2) << (magnitude / 2 - 1);
  return code & 8 ? -twice : twice;
}
DEVICE int place_of(int tile, int row) { return INTERLEAVED ? tile * 8 + row % 8 + NDIM / 2 * (row / 8) : tile * 16 + row; }
DEVICE u32 widened_pair(u32 codes) { return widen_float8((codes & 0xff) | (codes & 0xff00) << 8); }

// The kept codes of a lane: of rows g and g + 8 and each half of the inputs, those of two fours.
DEVICE void expand(const u8* block_bytes, const u32* records, u16* out, int tile, int block, int lane) {
  const u32* words = (const u32*)block_bytes + lane * (FORMAT == INT4 ? 2 : 4);
  const u32* which = (const u32*)(block_bytes + BLOCK_BYTES - 128) + lane / 4 * 4;
#pragma unroll
  for (int part = 0; part < 8; part++) {
    const int j = part % 2, half = part / 2 % 2, order = lane % 4 * 2 + part / 4, row = lane / 4 + 8 * j;
    const int column = block * 64 + 32 * half + 8 * (order % 4) + 4 * (order / 4);
    if (tile * 16 + row >= NDIM || column >= KDIM) continue;
    const Scale s = read_scale(records, tile, row, column);
    const u32 places = which[2 * half + j] >> (4 * order), codes = words[FORMAT == INT4 ? j : 2 * half + j] >> (16 * (part / 4));
    float value[4] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32 code = FORMAT == INT4 ? codes >> (8 * e + 4 * half) & 15 : codes >> (8 * e) & 255;
      const float v = FORMAT == W8A8 ? (float)((int)(code << 24) >> 24) : (float)((int)code - s.zero) * s.scale;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((places >> (2 * e) & 3) == i) value[i] = v;
    }
    *(uint2*)(out + (size_t)place_of(tile, row) * KDIM + column) = make_uint2(pack2(value[0], value[1]), pack2(value[2], value[3]));
  }
}

#if INTO
static_assert(FORMAT == INT4 && !SPARSE && (INTO == W8A8 || INTO == FP8), "nibbles with scales of groups");
// Four codes of a word of nibbles, in one half of the inputs; `less` is −(1024 + zero), twice, and `by` the factor, twice, in fp16.
// A nibble is the last bits of 1024 + q; 1536 more than a whole number has that number in its last byte, rounded by the addition.
DEVICE u32 recoded(u32 word, int half, u32 less, u32 by) {
  const u32 q = word >> (4 * half) & 0x0f0f0f0f, ones = 0x64646464;
  const u32 low = add_halves(__byte_perm(q, ones, 0x4140), less), high = add_halves(__byte_perm(q, ones, 0x4342), less);
  if (INTO == W8A8) return __byte_perm(fma_halves(low, by, 0x66006600), fma_halves(high, by, 0x66006600), 0x6420);
  const u32 a = fma_halves(low, by, 0), b = fma_halves(high, by, 0);
  return to_float8(float_of<true>((u16)a), float_of<true>((u16)(a >> 16))) |
         to_float8(float_of<true>((u16)b), float_of<true>((u16)(b >> 16))) << 16;
}
// `channel_scale` [NDIM], in the order of the tiles.
extern "C" __global__ void __launch_bounds__(256)
recode(const uint4* weights, const u32* records, const float* channel_scale, uint4* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int unit = blockIdx.x * 8 + threadIdx.x / 32, tile = unit / BLOCKS, block = unit % BLOCKS;
  if (tile >= TILES) return;
  const uint4 nibbles = weights[(size_t)unit * 32 + lane];  // words: inputs 0 to 3 of rows g, g + 8; inputs 4 to 7 of both
  u32 less[2], by[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (half && GROUP % 64 == 0 && KDIM % 64 == 0) continue;  // of the same group
      const int row = tile * 16 + g + 8 * j, column = block * 64 + 32 * half + 8 * t;
      const bool there = row < NDIM && column < KDIM;
      const Scale s = there ? read_scale(records, tile, g + 8 * j, column) : Scale{0.f, 0};
      const float factor = there ? s.scale / channel_scale[row] : 0.f;
      less[j] = (0xe400 + s.zero) * 0x10001, by[j] = pack_as<true>(factor, factor);
    }
    out[((size_t)unit * 2 + half) * 32 + lane] =
        make_uint4(recoded(nibbles.x, half, less[0], by[0]), recoded(nibbles.y, half, less[1], by[1]),
                   recoded(nibbles.z, half, less[0], by[0]), recoded(nibbles.w, half, less[1], by[1]));
  }
}
#endif

#if FORMAT == BIT_PLANES && CODING == TRELLIS
typedef BlockWords LaneCodes;
DEVICE LaneCodes lane_codes(const u8* weights, size_t unit, int block, int lane) {
  return load_words(weights + unit * BLOCK_BYTES, weights + (unit - block + block_after(block, BLOCKS)) * BLOCK_BYTES, lane);
}
#elif FORMAT == BIT_PLANES
typedef BlockCodes LaneCodes;
DEVICE LaneCodes lane_codes(const u8* weights, size_t unit, int, int lane) { return load_codes(weights + unit * BLOCK_BYTES, lane); }
#endif
#if FORMAT == BIT_PLANES
// Eight neighbouring inputs, from `column` on, of one row of a tile: those that a lane has of one half for one of its two rows (j).
DEVICE uint4 eight_of(const LaneCodes& codes, const u32* records, int tile, int row, int column) {
  const u8* record = (const u8*)records + ((size_t)tile * GROUPS + record_of(column)) * GROUP_BYTES;
  const GroupScale s = group_scale(record, group_of(column), row);
  const int half = column % 64 / 32, j = row / 8;
  uint4 result;
  u32* pair = (u32*)&result;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    float v[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
#if CODING == TRELLIS
      v[e] = value_of(four_terms(codes, 4 * half + 2 * (i / 4) + j), i % 4 + e) * s.scale;
#else
      const u32 code = codes.word[half][2 * (i / 4) + j] >> (8 * (i % 4 + e)) & 255;
      const float whole = SIGNED_CODES ? byte_float(code ^ 128) - 128.f : byte_float(code);
      v[e] = WHOLE_ZEROS ? (whole - s.zero) * s.scale : whole * s.scale - s.least;
#endif
    }
    pair[i / 2] = pack2(v[0], v[1]);
  }
  return result;
}
#endif

#if LOOK_UP
static_assert((FORMAT == INT4 || FORMAT == INT8 || FORMAT == BIT_PLANES) && !SPARSE && !INTERLEAVED && KDIM % 8 == 0, "rows of whole eights");
// out[i] = the weight's row rows[i]: a CTA each, 8 neighbouring inputs a thread.
extern "C" __global__ void __launch_bounds__(256) look_up_rows(const u32* weights, const u32* records, const u64* rows, u16* out) {
  wait_for_inputs();  // and no early start of what follows: token.cu says why
  const int place = (int)rows[blockIdx.x], tile = place / 16, row = place % 16, g = row % 8;
  for (int column = threadIdx.x * 8; column < KDIM; column += 256 * 8) {
    const int t = column % 32 / 8;
    const size_t unit = (size_t)tile * BLOCKS + column / 64;
    uint4* const eight = (uint4*)(out + (size_t)blockIdx.x * KDIM + column);
#if FORMAT == BIT_PLANES
    *eight = eight_of(lane_codes((const u8*)weights, unit, column / 64, g * 4 + t), records, tile, row, column);
#else
    const int half = column % 64 / 32, j = row / 8;
    const u32* words = weights + ((unit * VECTORS + (NIBBLES ? 0 : half)) * 32 + g * 4 + t) * 4 + j;
    const Scale s = read_scale(records, tile, row, column);
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 word = words[i / 4 * 2] >> (8 * (i % 4));
      const int q = (int)(NIBBLES ? word >> (4 * half) & 15 : word & 255) - s.zero;
      value[i] = q * s.scale;
    }
    *eight = make_uint4(pack2(value[0], value[1]), pack2(value[2], value[3]), pack2(value[4], value[5]), pack2(value[6], value[7]));
#endif
  }
}
#endif

extern "C" __global__ void __launch_bounds__(256) untile(const uint4* weights, const u32* records, u16* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int unit = blockIdx.x * 8 + threadIdx.x / 32, tile = unit / BLOCKS, block = unit % BLOCKS;
  if (tile >= TILES) return;
#if SPARSE
  expand((const u8*)weights + (size_t)unit * BLOCK_BYTES, records, out, tile, block, lane);
#elif FORMAT == BIT_PLANES
  const LaneCodes codes = lane_codes((const u8*)weights, unit, block, lane);
#pragma unroll
  for (int part = 0; part < 4; part++) {
    const int half = part / 2, j = part % 2, row = tile * 16 + g + 8 * j, column = block * 64 + 32 * half + 8 * t;
    uint4* const in_tile = (uint4*)out + ((size_t)unit * 4 + part) * 32 + lane;
    if (row >= NDIM || column >= KDIM) {
      if (IN_TILES) *in_tile = make_uint4(0, 0, 0, 0);
      continue;
    }
    *(IN_TILES ? in_tile : (uint4*)(out + (size_t)place_of(tile, g + 8 * j) * KDIM + column)) =
        eight_of(codes, records, tile, g + 8 * j, column);
  }
#else
  uint4 words[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) words[v] = weights[((size_t)unit * VECTORS + v) * 32 + lane];
  const u32* word = (const u32*)words;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = tile * 16 + g + 8 * j, column = block * 64 + 32 * half + 8 * t;
      uint4* const in_tile = (uint4*)out + ((size_t)unit * 4 + 2 * half + j) * 32 + lane;
      if (row >= NDIM || column >= KDIM) {
        if (IN_TILES) *in_tile = make_uint4(0, 0, 0, 0);
        continue;
      }
      uint4 result;
      u32* pair = (u32*)&result;
      const Scale s = read_scale(records, tile, g + 8 * j, column);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        if (FORMAT == PLAIN) {
          pair[i / 2] = word[(half * 2 + i / 4) * 4 + i / 2 % 2 * 2 + j];
        } else if (FORMAT == FP8 || FORMAT == FP8_WIDE) {
          pair[i / 2] = widened_pair(word[half * 4 + 2 * (i / 4) + j] >> (8 * (i % 4)) & 0xffff);
        } else if (FORMAT == FP8_BLOCKS) {
          const u32 two = widened_pair(word[half * 4 + 2 * (i / 4) + j] >> (8 * (i % 4)) & 0xffff);
          pair[i / 2] = pack2(low_float(two) * s.scale, high_float(two) * s.scale);
        } else {
          int q[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int step = i / 4, byte = i % 4 + e;
            if (FORMAT == INT4) q[e] = (int)(word[2 * step + j] >> (8 * byte + 4 * half) & 15) - s.zero;
            else if (FORMAT == MXFP4) q[e] = twice_float4(word[2 * step + j] >> (8 * byte + 4 * half) & 15);
            else if (FORMAT == INT8) q[e] = (int)(word[half * 4 + 2 * step + j] >> (8 * byte) & 255) - s.zero;
            else q[e] = (int)(word[half * 4 + 2 * step + j] << (24 - 8 * byte)) >> 24;
          }
          pair[i / 2] = pack2(q[0] * s.scale, q[1] * s.scale);
        }
      }
      *(IN_TILES ? in_tile : (uint4*)(out + (size_t)place_of(tile, g + 8 * j) * KDIM + column)) = result;
    }
#endif
}
