// Codes of BITS bits in planes, and the scales of their groups (FORMAT == BIT_PLANES): GGUF's types, integers of 2 to 8 bits in groups of
// 16 and more, NVFP4. The bits are those of the files, in the order in which a lane takes them:
//
//      block of 16 × 64    | lower plane: 2 bits | 4 bits | 8 bits |, 8 · bits bytes · 16  | upper plane: 1 or 2 bits |
//      lane 4 g + t        rows g and g + 8, inputs 8 t … + 7 of each half: words x (g, first 4), y (g + 8), z (g, last 4), w (g + 8)
//
// A byte of a plane has the same byte of several words: 4 bits are both halves, 2 bits x, y, z, w of one half, 1 bit of both.
//
// Codes of 3 bits lie in three words of a lane instead, where a mask alone gives most of them (`raised_codes`: as they lie, a power of
// two too large). A byte of each word, its highest bits first; codes of half 1 are marked ', and two of them are in parts:
//
//      first    y' without its lowest bit | y | x
//      second   lowest bit of w', of y'   | w | z
//      third    w' without its lowest bit | z' | x'
//
//      weight = scale · code − least      of each group of SUBGROUP inputs; RECORD_KIND says how its record holds both
//
// A record is of GROUP inputs of the 16 outputs of a tile; where it has a scale of scales, of several groups.
//
// defines: BITS, SUBGROUP, RECORD_KIND, CODING (0), MIDDLE (0)
#define SCALES_ALONE 0         // 16 scales; zero points lie in the MIDDLE
#define WITH_ZEROS 1     // 16 scales, 16 zero points in bytes
#define WITH_MINIMA 2    // 16 × (scale, minimum)
#define SUBSCALES 3      // 16 scales; then of each group 16 factors in signed bytes
#define SUBMINIMA 4      // 16 × (scale, scale of minima); of each group 16 × (factor, factor of the minimum) in bytes
#define SUBNIBBLES 5     // the same with both factors in a byte
#define FLOAT8_SCALES 6  // 16 scales in float32; then of each group 16 factors in float8
#define SUBSIXES 7       // as SUBSCALES, in 6 bits: of two groups 16 bytes with their lower 4 bits, of four 16 with their upper ones
#define INTEGERS 0       // CODING
#define LOOKED_UP 1      // IQ4_NL's sixteen values
#define TWICE_E2M1 2     // 4-bit floats; their scales are halved
#define TRELLIS 3        // hashes of overlapping bits, of 2 and 3 for a weight: trellis.cuh
#ifndef CODING
#define CODING 0
#endif
#ifndef MIDDLE
#define MIDDLE 0
#endif
constexpr int LOWER = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, UPPER = BITS - LOWER;
constexpr bool SIGNED_CODES = CODING != INTEGERS;
static_assert(BITS == 2 || BITS == 3 || BITS == 4 || BITS == 5 || BITS == 6 || BITS == 8, "planes of 1, 2, 4 and 8 bits");
static_assert(!SIGNED_CODES || BITS == 4 || CODING == TRELLIS, "a code is a place in a table");

template <int RIGHT> DEVICE u32 shifted(u32 word) { return RIGHT >= 0 ? word >> (RIGHT & 31) : word << (-RIGHT & 31); }
#if CODING == TRELLIS
#include "trellis.cuh"
#elif CODING != INTEGERS
constexpr u32 TABLE0 = CODING == LOOKED_UP ? 0xbfad9881 : 0x03020100, TABLE4 = CODING == LOOKED_UP ? 0xf6eaddcf : 0x0c080604;
constexpr u32 TABLE8 = CODING == LOOKED_UP ? 0x26190d01 : 0xfdfeff00, TABLE12 = CODING == LOOKED_UP ? 0x71594535 : 0xf4f8fafc;
// Eight codes, the low and the high halves of four bytes → their values in signed bytes.
DEVICE void look_up(u32 codes, u32& low, u32& high) {
  const u32 places = codes & 0x77777777;
  const u32 one = __byte_perm(TABLE0, TABLE4, places), two = __byte_perm(TABLE0, TABLE4, places >> 16);
  const u32 upper_one = __byte_perm(TABLE8, TABLE12, places), upper_two = __byte_perm(TABLE8, TABLE12, places >> 16);
  const u32 below = (codes >> 3 & 0x01010101) * 255, above = (codes >> 7 & 0x01010101) * 255;  // all ones from 8 on
  low = (__byte_perm(one, two, 0x6420) & ~below) | (__byte_perm(upper_one, upper_two, 0x6420) & below);
  high = (__byte_perm(one, two, 0x7531) & ~above) | (__byte_perm(upper_one, upper_two, 0x7531) & above);
}
#endif

#if CODING != TRELLIS
// A lane's codes of a block, a byte each: of both halves the words x, y, z, w.
struct BlockCodes {
  u32 word[2][4];
};
#if BITS == 3
struct ThreeWords {
  u32 first, second, third;
};
DEVICE ThreeWords load_threes(const u8* block, int lane) {
  const uint2 q = ((const uint2*)block)[lane];
  return {q.x, q.y, ((const u32*)(block + 256))[lane]};
}
// All codes of a half and row are as much too large: `raised_by`.
DEVICE constexpr int raised_by(int half, int row) { return row == 0 ? 1 : half == 0 ? 8 : 32; }
DEVICE BlockCodes raised_codes(const u8* block, int lane) {
  constexpr u32 low = 0x07070707, high = 0x38383838, top = 0xc0c0c0c0, single = 0x20202020;
  const ThreeWords q = load_threes(block, lane);
  return {{{q.first & low, q.first & high, q.second & low, q.second & high},
           {q.third & low, (q.first & top) | (q.second >> 1 & single), q.third >> 3 & low, (q.third & top) | (q.second >> 2 & single)}}};
}
#elif CODING == INTEGERS
// Word I of both halves: the bits of the lower plane, and those of the upper one where they belong.
template <int I> DEVICE void take_apart(BlockCodes& c, const u32* lower, const u32* upper) {
  constexpr u32 all = LOWER == 4 ? 0x0f0f0f0f : 0x03030303, more = (UPPER == 2 ? 0x03030303u : 0x01010101u) << LOWER;
  c.word[0][I] = LOWER == 4 ? lower[I] & all : lower[0] >> (2 * I) & all;
  c.word[1][I] = LOWER == 4 ? lower[I] >> 4 & all : lower[1] >> (2 * I) & all;
  if (UPPER == 2) {
    c.word[0][I] |= shifted<2 * I - LOWER>(upper[0]) & more;
    c.word[1][I] |= shifted<2 * I - LOWER>(upper[1]) & more;
  } else if (UPPER == 1) {
    c.word[0][I] |= shifted<I - LOWER>(upper[0]) & more;
    c.word[1][I] |= shifted<4 + I - LOWER>(upper[0]) & more;
  }
}
#endif
#if BITS == 3
DEVICE BlockCodes load_codes(const u8* block, int lane) {
  constexpr u32 low = 0x07070707, two = 0x06060606, one = 0x01010101;
  const ThreeWords q = load_threes(block, lane);
  return {{{q.first & low, q.first >> 3 & low, q.second & low, q.second >> 3 & low},
           {q.third & low, (q.first >> 5 & two) | (q.second >> 6 & one), q.third >> 3 & low, (q.third >> 5 & two) | (q.second >> 7 & one)}}};
}
#else
DEVICE constexpr int raised_by(int, int) { return 1; }
DEVICE BlockCodes load_codes(const u8* block, int lane) {
  BlockCodes c;
  u32 lower[8];
  if constexpr (LOWER == 8) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 q = ((const uint4*)block)[32 * half + lane];
      c.word[half][0] = q.x, c.word[half][1] = q.y, c.word[half][2] = q.z, c.word[half][3] = q.w;
    }
    return c;
  } else if constexpr (LOWER == 4) {
    const uint4 q = ((const uint4*)block)[lane];
    lower[0] = q.x, lower[1] = q.y, lower[2] = q.z, lower[3] = q.w;
  } else {
    const uint2 q = ((const uint2*)block)[lane];
    lower[0] = q.x, lower[1] = q.y;
  }
#if CODING != INTEGERS
#pragma unroll
  for (int i = 0; i < 4; i++) look_up(lower[i], c.word[0][i], c.word[1][i]);
#else
  u32 upper[2] = {0, 0};
  if constexpr (UPPER == 2) {
    const uint2 q = ((const uint2*)(block + 128 * LOWER))[lane];
    upper[0] = q.x, upper[1] = q.y;
  } else if constexpr (UPPER == 1) {
    upper[0] = ((const u32*)(block + 128 * LOWER))[lane];
  }
  take_apart<0>(c, lower, upper), take_apart<1>(c, lower, upper), take_apart<2>(c, lower, upper), take_apart<3>(c, lower, upper);
#endif
  return c;
}
DEVICE BlockCodes raised_codes(const u8* block, int lane) { return load_codes(block, lane); }
#endif
#endif

constexpr int RECORD_GROUPS = GROUP > SUBGROUP ? GROUP / SUBGROUP : 1;
constexpr int BYTES_OF_A_RECORD = RECORD_KIND == SCALES_ALONE ? 32 : RECORD_KIND == WITH_ZEROS ? 48 : RECORD_KIND == WITH_MINIMA ? 64
    : RECORD_KIND == SUBSCALES ? 32 + 16 * RECORD_GROUPS : RECORD_KIND == SUBSIXES ? 32 + 12 * RECORD_GROUPS : RECORD_KIND == SUBMINIMA ? 64 + 32 * RECORD_GROUPS
    : 64 + 16 * RECORD_GROUPS;

// What a group has for one output.
struct GroupScale {
  float scale, zero, least;  // least: scale · zero, or a minimum; zero where it is a whole number
};
constexpr bool WHOLE_ZEROS = RECORD_KIND == SCALES_ALONE || RECORD_KIND == WITH_ZEROS || RECORD_KIND == SUBSCALES || RECORD_KIND == SUBSIXES ||
                            RECORD_KIND == FLOAT8_SCALES;
DEVICE float byte_float(u32 byte) { return __uint_as_float(0x4b000000 | byte) - 8388608.f; }  // no conversion unit needed
DEVICE GroupScale with_zero(float scale, float zero) { return {scale, zero, scale * zero}; }
// `record`: of a tile; `group`: of those that it has; `row` of the tile's 16.
DEVICE GroupScale group_scale(const u8* record, int group, int row) {
  const u16* halves = (const u16*)record;
#if RECORD_KIND == SCALES_ALONE
  return with_zero(float_of<SCALE_FP16>(halves[row]), MIDDLE);
#elif RECORD_KIND == WITH_ZEROS
  return with_zero(float_of<SCALE_FP16>(halves[row]), byte_float(record[32 + row]));
#elif RECORD_KIND == WITH_MINIMA
  const u32 both = ((const u32*)record)[row];
  return {float_of<SCALE_FP16>((u16)both), 0.f, float_of<SCALE_FP16>((u16)(both >> 16))};
#elif RECORD_KIND == SUBSCALES
  const u32 factor = record[32 + 16 * group + row];
  return with_zero(float_of<true>(halves[row]) * (byte_float(factor ^ 128) - 128.f), MIDDLE);
#elif RECORD_KIND == SUBSIXES
  const u32 low = record[32 + 16 * (group / 2) + row] >> 4 * (group % 2) & 15;
  const u32 high = record[32 + 8 * RECORD_GROUPS + 16 * (group / 4) + row] >> 2 * (group % 4) & 3;
  return with_zero(float_of<true>(halves[row]) * (byte_float(high << 4 | low) - 32.f), MIDDLE);
#elif RECORD_KIND == SUBMINIMA || RECORD_KIND == SUBNIBBLES
  const u32 both = ((const u32*)record)[row];
  u32 factor, least;
  if (RECORD_KIND == SUBMINIMA) {
    const u32 factors = ((const u16*)(record + 64))[16 * group + row];
    factor = factors & 255, least = factors >> 8;
  } else {
    const u32 factors = record[64 + 16 * group + row];
    factor = factors & 15, least = factors >> 4;
  }
  return {float_of<true>((u16)both) * byte_float(factor), 0.f, float_of<true>((u16)(both >> 16)) * byte_float(least)};
#else
  const float factor = low_float(widen_float8(record[64 + 16 * group + row]));
  return with_zero(((const float*)record)[row] * (CODING == TWICE_E2M1 ? .5f : 1.f) * factor, MIDDLE);
#endif
}
// Where the group of `input` (of those of a row) is: which record, and which group of it.
DEVICE int record_of(int input) { return input / GROUP; }
DEVICE int group_of(int input) { return GROUP > SUBGROUP ? input % GROUP / SUBGROUP : 0; }
