// A lane's registers of a 16 × 64 block of weights, as gemm.cu's products take them: codes become 16-bit floats here, exact
// integers less the zero point times the scale, rounded once; 8-bit formats and plain weights go in as they lie.
// Needs gemm.cu's STEPS, WORDS, GROUPED and group_in_stage.
#ifndef NATURAL_ORDER
#define NATURAL_ORDER 0  // four codes come as 0, 1 and 2, 3, as x lies in memory; or as 0, 2 and 1, 3, an instruction less
#endif
#ifndef LATE_SCALE
#define LATE_SCALE 0  // codes become integers less the zero point alone, and sums of a group are scaled
#endif

// Codes in the low byte of each half (4 or 8 bits) → (code − zero) · scale. An integer set into the mantissa of a power
// of two is that power plus the integer, exactly; a bf16 mantissa has 7 bits, so bit 7 of a code goes in by itself, and takes
// what a zero point has beyond 128 with it: 128 + 129 is no bf16.
#if FORMAT == MXFP4
// e2m1 in the low four bits of each half: its bits are those of a float that is too small by a power of two.
struct Scale {
  u32 scale;
};
DEVICE Scale read_scale(u8 exponent) {
  const float scale = __uint_as_float((u32)exponent << 23);
  return {pack2(scale, scale)};
}
DEVICE u32 decode(u32 codes, Scale s) {
  const u32 bits = (codes & 0x00070007) << (FP16 ? 9 : 6) | (codes & 0x00080008) << 12;
  return mul2(mul2(bits, FP16 ? 0x74007400 : 0x7e807e80), s.scale);
}
#elif FORMAT == BIT_PLANES && CODING == TRELLIS
#include "trellis_fragments.cuh"
#elif FORMAT == BIT_PLANES
#include "bits_fragments.cuh"
#elif FORMAT == FP8_BLOCKS
struct Scale {
  float scale;  // of eight outputs
};
DEVICE u32 decode(u32 codes, Scale s) {  // e4m3 in the low byte of each half
  const u32 two = widen_float8(codes & 0x00ff00ff);
  return pack2(low_float(two) * s.scale, high_float(two) * s.scale);
}
#else
constexpr u32 POWER = FP16 ? 0x64006400 : 0x43004300, SIGN = 0x80008000;
struct Scale {
  u32 scale, offset, high;  // offset: −(power + zero), or that of a zero up to 128; high: −(power + the rest).
};
DEVICE u32 twice(u32 low) { return __byte_perm(low, 0, 0x1010); }
DEVICE Scale read_scale(u32 record) {
  const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff));
  const u32 zero = SYMMETRIC ? FORMAT == INT4 ? 8 : 128 : record >> 16;
  const u32 low = FORMAT == INT8 && !FP16 ? (u32)min((int)zero, 128) : zero;
  return {SCALE_FP16 == FP16 ? twice(record) : pack2(scale, scale), twice(low) | POWER | SIGN, twice(zero - low) | POWER | SIGN};
}
DEVICE u32 scaled(u32 integers, Scale s) { return LATE_SCALE ? integers : mul2(integers, s.scale); }
DEVICE u32 decode(u32 codes, Scale s) {
  if (FORMAT == INT4) return scaled(add2(and_or(codes, 0x000f000f, POWER), s.offset), s);
  if (FP16) return scaled(add2(and_or(codes, 0x00ff00ff, POWER), s.offset), s);
  const u32 low = and_or(codes, 0x007f007f, POWER);
  // zero is 128: the lower 7 bits are 128 more than they should be, and 256 less 128 where bit 7 is set comes off
  if (SYMMETRIC) return scaled(add2(low, and_xor(codes, 0x00800080, 0xc380c380)), s);
  return scaled(add2(add2(low, s.offset), add2(and_or(codes, 0x00800080, POWER), s.high)), s);
}
#endif

// Of 2:4 weights in 16 bits a lane has other fours than in 8 bits, and other words tell which are kept: lane t % 2 = 0 of the
// four takes the even places of both rows, lane 1 the odd ones.
DEVICE u32 regroup(uint2 places, int odd) {
  u32 low = places.x >> (4 * odd) & 0x0f0f0f0f, high = places.y >> (4 * odd) & 0x0f0f0f0f;
  low |= low >> 4, high |= high >> 4;
  return __byte_perm(low, high, 0x6420);
}

#if FORMAT != BIT_PLANES
// What a lane has of a block of 64 inputs of its warp's tile, as it lies, and the registers that each of STEPS products takes.
struct Block {
  static constexpr int LOADS = SPARSE || NIBBLES ? 1 : FORMAT == PLAIN ? 4 : 2;
  uint4 words[LOADS];  // grouped: rows g and g + 8 of two steps, or 2:4 of one
  Scale scale[2][2];   // of halves; rows g and g + 8
  u32 places[STEPS];
  DEVICE Block(const u8* tile, const Record* records, int stage, int block, int lane) {
    const u8* from = tile + block * BLOCK_BYTES;
    const int g = lane / 4;
    if (SPARSE && FORMAT == INT4) {
      const uint2 codes = ((const uint2*)from)[lane];
      words[0] = make_uint4(codes.x, codes.y, codes.x >> 4, codes.y >> 4);
    } else {
#pragma unroll
      for (int i = 0; i < LOADS; i++) words[i] = ((const uint4*)from)[32 * i + lane];
    }
#pragma unroll
    for (int half = 0; half < 2 * GROUPED; half++) {
      const Record* r = records + group_in_stage(stage, block, half) * 16;
#if FORMAT == FP8_BLOCKS
      scale[half][0] = {((const float*)r)[0]}, scale[half][1] = {((const float*)r)[1]};
#else
      scale[half][0] = read_scale(r[g]), scale[half][1] = read_scale(r[g + 8]);
#endif
    }
#pragma unroll
    for (int step = 0; step < STEPS * SPARSE; step++) {
      const u8* kept = from + BLOCK_BYTES - 128;
      places[step] = GROUPED ? regroup(((const uint2*)kept)[2 * g + step], lane % 2) : ((const u32*)kept)[lane];
    }
  }
  DEVICE void take(int step, u32 (&a)[WORDS]) const {
    const uint4 w = words[step * LOADS / STEPS];
    if (BY_ROWS) {
      const uint4 one = words[step / 2 * 2], two = words[(step / 2 * 2 + 1) % LOADS];
      if (step % 2) a[0] = one.z, a[1] = two.z, a[2] = one.w, a[3] = two.w;
      else a[0] = one.x, a[1] = two.x, a[2] = one.y, a[3] = two.y;
    } else if (FORMAT == FP8_WIDE) {
      const u32 low = step % 2 ? w.z : w.x, high = step % 2 ? w.w : w.y;  // of rows g and g + 8
      a[0] = widen_float8(low), a[1] = widen_float8(high), a[2] = widen_float8(low >> 8), a[3] = widen_float8(high >> 8);
    } else if (!GROUPED) {
      a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
    } else {
      const bool second = step % 2;
      const u32 codes[2] = {second ? w.z : w.x, second ? w.w : w.y};
      const int half = SPARSE ? step : step / 2;
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const u32 mine = !SPARSE && NIBBLES && half ? codes[row] >> 4 : codes[row];
        constexpr bool ordered = SPARSE || NATURAL_ORDER;
#if FORMAT == INT4
        if (NATURAL_ORDER && !SPARSE) {  // one mask for four codes, which then meet the power's upper bytes
          const u32 four = mine & 0x0f0f0f0f;
          const Scale s = scale[half][row];
          a[row] = scaled(add2(__byte_perm(four, POWER, 0x5150), s.offset), s);
          a[2 + row] = scaled(add2(__byte_perm(four, POWER, 0x5352), s.offset), s);
          continue;
        }
#endif
        a[row] = decode(ordered ? __byte_perm(mine, 0, 0x4140) : mine, scale[half][row]);
        a[2 + row] = decode(ordered ? __byte_perm(mine, 0, 0x4342) : mine >> 8, scale[half][row]);
      }
    }
    if (SPARSE) a[WORDS - 1] = places[step];
  }
};
#endif
