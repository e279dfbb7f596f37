// ARM with the dot product instructions (ARMv8.2 and later; Apple's M1 and later).
#pragma once

#include <arm_neon.h>

#define INSTRUCTIONS "neon dotprod"
#define BYTE_BIAS 0

typedef struct { float32x4_t low, high; } floats8;
typedef struct { int32x4_t low, high; } ints8;

ALWAYS_INLINE floats8 floats_splat(float value) {
    return (floats8){vdupq_n_f32(value), vdupq_n_f32(value)};
}

ALWAYS_INLINE floats8 floats_load(const float *from) {
    return (floats8){vld1q_f32(from), vld1q_f32(from + 4)};
}

ALWAYS_INLINE void floats_store(float *to, floats8 a) {
    vst1q_f32(to, a.low);
    vst1q_f32(to + 4, a.high);
}

ALWAYS_INLINE floats8 floats_add(floats8 a, floats8 b) {
    return (floats8){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}

ALWAYS_INLINE floats8 floats_subtract(floats8 a, floats8 b) {
    return (floats8){vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}

ALWAYS_INLINE floats8 floats_multiply(floats8 a, floats8 b) {
    return (floats8){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}

ALWAYS_INLINE floats8 floats_scale(floats8 a, float b) {
    return (floats8){vmulq_n_f32(a.low, b), vmulq_n_f32(a.high, b)};
}

// sum + a · b
ALWAYS_INLINE floats8 floats_fma(floats8 sum, floats8 a, floats8 b) {
    return (floats8){vfmaq_f32(sum.low, a.low, b.low), vfmaq_f32(sum.high, a.high, b.high)};
}

ALWAYS_INLINE floats8 floats_fma_scalar(floats8 sum, floats8 a, float b) {
    return (floats8){vfmaq_n_f32(sum.low, a.low, b), vfmaq_n_f32(sum.high, a.high, b)};
}

ALWAYS_INLINE float floats_sum(floats8 a) {
    return vaddvq_f32(vaddq_f32(a.low, a.high));
}

// The sums of four vectors, one after the other.
ALWAYS_INLINE void floats_sum4(float *to, floats8 a, floats8 b, floats8 c, floats8 d) {
    float32x4_t ab = vpaddq_f32(vaddq_f32(a.low, a.high), vaddq_f32(b.low, b.high));
    float32x4_t cd = vpaddq_f32(vaddq_f32(c.low, c.high), vaddq_f32(d.low, d.high));
    vst1q_f32(to, vpaddq_f32(ab, cd));
}

ALWAYS_INLINE floats8 halves_load(const void *from) {
    float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
    return (floats8){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}

ALWAYS_INLINE void halves_store(void *to, floats8 a) {
    vst1q_u16(to, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high)));
}

ALWAYS_INLINE floats8 bfloats_load(const void *from) {
    uint16x8_t bits = vld1q_u16(from);
    return (floats8){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
                     vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
}

// e4m3 without NaN, times 2^-8: the bits of a float16 after a shift.
ALWAYS_INLINE floats8 float8s_load(const void *from) {
    uint16x8_t wide = vshll_n_u8(vld1_u8(from), 8);
    uint16x8_t sign = vandq_u16(wide, vdupq_n_u16(0x8000));
    uint16x8_t rest = vshrq_n_u16(vshlq_n_u16(wide, 1), 2);
    float16x8_t halves = vreinterpretq_f16_u16(vorrq_u16(sign, rest));
    return (floats8){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}

ALWAYS_INLINE ints8 ints_splat(int32_t value) {
    return (ints8){vdupq_n_s32(value), vdupq_n_s32(value)};
}

ALWAYS_INLINE ints8 ints_add(ints8 a, ints8 b) {
    return (ints8){vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}

ALWAYS_INLINE ints8 ints_scale(ints8 a, int32_t b) {
    return (ints8){vmulq_n_s32(a.low, b), vmulq_n_s32(a.high, b)};
}

ALWAYS_INLINE ints8 ints_from_bytes(const void *from) {
    uint16x8_t wide = vmovl_u8(vld1_u8(from));
    return (ints8){vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))), vreinterpretq_s32_u32(vmovl_high_u16(wide))};
}

ALWAYS_INLINE floats8 ints_to_floats(ints8 a) {
    return (floats8){vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)};
}

ALWAYS_INLINE ints8 dot_nibbles(ints8 sum, const uint8_t *codes, const int8_t *x) {
    const uint8x16_t mask = vdupq_n_u8(15);
    int8x16_t inputs = vld1q_s8(x);
    uint8x16_t a = vld1q_u8(codes), b = vld1q_u8(codes + 16), c = vld1q_u8(codes + 32), d = vld1q_u8(codes + 48);
    sum.low = vdotq_laneq_s32(sum.low, vreinterpretq_s8_u8(vandq_u8(a, mask)), inputs, 0);
    sum.high = vdotq_laneq_s32(sum.high, vreinterpretq_s8_u8(vandq_u8(b, mask)), inputs, 0);
    sum.low = vdotq_laneq_s32(sum.low, vreinterpretq_s8_u8(vshrq_n_u8(a, 4)), inputs, 1);
    sum.high = vdotq_laneq_s32(sum.high, vreinterpretq_s8_u8(vshrq_n_u8(b, 4)), inputs, 1);
    sum.low = vdotq_laneq_s32(sum.low, vreinterpretq_s8_u8(vandq_u8(c, mask)), inputs, 2);
    sum.high = vdotq_laneq_s32(sum.high, vreinterpretq_s8_u8(vandq_u8(d, mask)), inputs, 2);
    sum.low = vdotq_laneq_s32(sum.low, vreinterpretq_s8_u8(vshrq_n_u8(c, 4)), inputs, 3);
    sum.high = vdotq_laneq_s32(sum.high, vreinterpretq_s8_u8(vshrq_n_u8(d, 4)), inputs, 3);
    return sum;
}

ALWAYS_INLINE ints8 dot_bytes(ints8 sum, const uint8_t *codes, const int8_t *x) {
    const int8_t *w = (const int8_t *)codes;
    int8x16_t inputs = vld1q_s8(x);
    sum.low = vdotq_laneq_s32(sum.low, vld1q_s8(w), inputs, 0);
    sum.high = vdotq_laneq_s32(sum.high, vld1q_s8(w + 16), inputs, 0);
    sum.low = vdotq_laneq_s32(sum.low, vld1q_s8(w + 32), inputs, 1);
    sum.high = vdotq_laneq_s32(sum.high, vld1q_s8(w + 48), inputs, 1);
    sum.low = vdotq_laneq_s32(sum.low, vld1q_s8(w + 64), inputs, 2);
    sum.high = vdotq_laneq_s32(sum.high, vld1q_s8(w + 80), inputs, 2);
    sum.low = vdotq_laneq_s32(sum.low, vld1q_s8(w + 96), inputs, 3);
    sum.high = vdotq_laneq_s32(sum.high, vld1q_s8(w + 112), inputs, 3);
    return sum;
}

ALWAYS_INLINE floats8 widen_bytes(int8x8_t bytes) {
    int16x8_t wide = vmovl_s8(bytes);
    return (floats8){vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}

// Four inputs of eight outputs, stored by output, become four vectors of eight outputs.
ALWAYS_INLINE void transpose_bytes(floats8 to[4], int8x16_t rows0to3, int8x16_t rows4to7) {
    static const uint8_t first[16] = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
    const uint8x16_t at = vld1q_u8(first);
    int8x16x2_t table = {{rows0to3, rows4to7}};
    int8x16_t pair01 = vqtbl2q_s8(table, at), pair23 = vqtbl2q_s8(table, vaddq_u8(at, vdupq_n_u8(2)));
    to[0] = widen_bytes(vget_low_s8(pair01));
    to[1] = widen_bytes(vget_high_s8(pair01));
    to[2] = widen_bytes(vget_low_s8(pair23));
    to[3] = widen_bytes(vget_high_s8(pair23));
}

ALWAYS_INLINE void nibbles_to_floats(floats8 to[8], const uint8_t *codes) {
    const uint8x16_t mask = vdupq_n_u8(15);
    uint8x16_t a = vld1q_u8(codes), b = vld1q_u8(codes + 16);
    transpose_bytes(to, vreinterpretq_s8_u8(vandq_u8(a, mask)), vreinterpretq_s8_u8(vandq_u8(b, mask)));
    transpose_bytes(to + 4, vreinterpretq_s8_u8(vshrq_n_u8(a, 4)), vreinterpretq_s8_u8(vshrq_n_u8(b, 4)));
}

ALWAYS_INLINE void bytes_to_floats(floats8 to[8], const uint8_t *codes) {
    const int8_t *w = (const int8_t *)codes;
    transpose_bytes(to, vld1q_s8(w), vld1q_s8(w + 16));
    transpose_bytes(to + 4, vld1q_s8(w + 32), vld1q_s8(w + 48));
}
