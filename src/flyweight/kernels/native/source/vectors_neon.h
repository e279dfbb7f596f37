// ARM with the dot product instructions (ARMv8.2 and later; Apple's M1 and later).
#pragma once

#include <arm_neon.h>

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define INSTRUCTIONS "neon i8mm"
#else
#define INSTRUCTIONS "neon dotprod"
#endif
#define BYTE_BIAS 0
#define DOT_SUMS 1 // a dot product can add to the one before it without waiting
#define MANY_ROWS_SUMS 1
#define PANEL_BLOCKS 1
#define PANEL_ROWS 8

// Converting float16 takes two slow instructions where a shift and a mask give the same number
// times 2^-112 (float8: 2^-120). x is made larger by INPUT_FACTOR, so that products of such small
// numbers keep all their bits.
#define HALF_FACTOR 0x1p112f
#define FLOAT8_FACTOR 0x1p120f
#define INPUT_FACTOR 0x1p80f

// Codes come as 2^23 + code, which is an integer's bits below those of 2^23.
#define CODE_OFFSET 8388608.0f


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

ALWAYS_INLINE floats8 floats_join(float32x4_t low, float32x4_t high) {
    return (floats8){low, high};
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

// sum[j % sums] += a[j] · x[j] for four j: four scalars are one load.
ALWAYS_INLINE void floats_fma4(floats8 *sum, const int sums, const floats8 a[4], const float *x) {
    float32x4_t b = vld1q_f32(x);
    sum[0].low = vfmaq_laneq_f32(sum[0].low, a[0].low, b, 0);
    sum[0].high = vfmaq_laneq_f32(sum[0].high, a[0].high, b, 0);
    sum[1 % sums].low = vfmaq_laneq_f32(sum[1 % sums].low, a[1].low, b, 1);
    sum[1 % sums].high = vfmaq_laneq_f32(sum[1 % sums].high, a[1].high, b, 1);
    sum[2 % sums].low = vfmaq_laneq_f32(sum[2 % sums].low, a[2].low, b, 2);
    sum[2 % sums].high = vfmaq_laneq_f32(sum[2 % sums].high, a[2].high, b, 2);
    sum[3 % sums].low = vfmaq_laneq_f32(sum[3 % sums].low, a[3].low, b, 3);
    sum[3 % sums].high = vfmaq_laneq_f32(sum[3 % sums].high, a[3].high, b, 3);
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
    static const uint8_t first[16] = {255, 255, 0, 1, 255, 255, 2, 3, 255, 255, 4, 5, 255, 255, 6,
            7};
    static const uint8_t second[16] = {255, 255, 8, 9, 255, 255, 10, 11, 255, 255, 12, 13, 255,
            255, 14, 15};
    uint8x16_t bits = vld1q_u8(from); // tables go through both vector units, shifts through one
    return (floats8){vreinterpretq_f32_u8(vqtbl1q_u8(bits, vld1q_u8(first))),
                     vreinterpretq_f32_u8(vqtbl1q_u8(bits, vld1q_u8(second)))};
}

// float16 without NaN and infinity, divided by HALF_FACTOR. A shift and a product with 2^13 do the
// same, but on Neoverse N1 one goes through one vector unit alone and the other through the other
// alone.
ALWAYS_INLINE floats8 small_halves_load(const void *from) {
    const int32x4_t mask = vdupq_n_s32((int32_t)0x8fffffff);
    int16x8_t bits = vld1q_s16(from);
    return (floats8){vreinterpretq_f32_s32(vandq_s32(vshll_n_s16(vget_low_s16(bits), 13), mask)),
                     vreinterpretq_f32_s32(vandq_s32(vmull_high_s16(bits, vdupq_n_s16(1 << 13)),
                             mask))};
}

// e4m3 without NaN, divided by FLOAT8_FACTOR: four bytes each become the upper bytes of four lanes.
ALWAYS_INLINE floats8 small_float8s_load(const void *from) {
    static const uint8_t first[16] = {255, 255, 255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255,
            255, 255, 3};
    static const uint8_t second[16] = {255, 255, 255, 4, 255, 255, 255, 5, 255, 255, 255, 6, 255,
            255, 255, 7};
    const int32x4_t mask = vdupq_n_s32((int32_t)0x87ffffff);
    uint8x16_t bytes = vcombine_u8(vld1_u8(from), vdup_n_u8(0));
    int32x4_t low = vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vld1q_u8(first)));
    int32x4_t high = vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vld1q_u8(second)));
    return (floats8){vreinterpretq_f32_s32(vandq_s32(vshrq_n_s32(low, 4), mask)),
                     vreinterpretq_f32_s32(vandq_s32(vshrq_n_s32(high, 4), mask))};
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
    return (ints8){vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))),
            vreinterpretq_s32_u32(vmovl_high_u16(wide))};
}

// The same bits.
ALWAYS_INLINE floats8 ints_as_floats(ints8 a) {
    return (floats8){vreinterpretq_f32_s32(a.low), vreinterpretq_f32_s32(a.high)};
}

ALWAYS_INLINE floats8 ints_to_floats(ints8 a) {
    return (floats8){vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)};
}

#include "tiles_neon.h"

// Inputs 4 · quarter to 4 · quarter + 3 of every row.
#define DOT_QUARTER(quarter, w_low, w_high)                                                       \
    {                                                                                             \
        const int8x16_t to_low = w_low, to_high = w_high;                                         \
        UNROLL for (int m = 0; m < rows; m++) {                                                   \
            ints8 *to = sum + m * sums + quarter % sums;                                          \
            to->low = vdotq_laneq_s32(to->low, to_low, inputs[m], quarter);                       \
            to->high = vdotq_laneq_s32(to->high, to_high, inputs[m], quarter);                    \
        }                                                                                         \
    }

ALWAYS_INLINE void dot_nibbles(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows,
                               const int sums) {
    const uint8x16_t mask = vdupq_n_u8(15);
    int8x16_t inputs[4];
    uint8x16_t a = vld1q_u8(codes);
    uint8x16_t b = vld1q_u8(codes + 16);
    uint8x16_t c = vld1q_u8(codes + 32);
    uint8x16_t d = vld1q_u8(codes + 48);
    UNROLL for (int m = 0; m < rows; m++) inputs[m] = vld1q_s8(x + m * stride);
    DOT_QUARTER(0, LOWER(a), LOWER(b))
    DOT_QUARTER(1, UPPER(a), UPPER(b))
    DOT_QUARTER(2, LOWER(c), LOWER(d))
    DOT_QUARTER(3, UPPER(c), UPPER(d))
}

ALWAYS_INLINE void dot_bytes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows,
                             const int sums) {
    const int8_t *w = (const int8_t *)codes;
    int8x16_t inputs[4];
    UNROLL for (int m = 0; m < rows; m++) inputs[m] = vld1q_s8(x + m * stride);
    DOT_QUARTER(0, vld1q_s8(w), vld1q_s8(w + 16))
    DOT_QUARTER(1, vld1q_s8(w + 32), vld1q_s8(w + 48))
    DOT_QUARTER(2, vld1q_s8(w + 64), vld1q_s8(w + 80))
    DOT_QUARTER(3, vld1q_s8(w + 96), vld1q_s8(w + 112))
}

// -- codes as floats ------------------------------------------------------------------------------

// One input of four outputs: byte `at` of each lane below the bits of 2^23.
#define CODES(lanes, at) below_middle(at ? vshrq_n_u32(lanes, at ? 8 * at : 1) : lanes)

ALWAYS_INLINE float32x4_t below_middle(uint32x4_t codes) {
    return vreinterpretq_f32_u32(vbslq_u32(vdupq_n_u32(255), codes, vdupq_n_u32(0x4b000000)));
}

ALWAYS_INLINE void spread_codes(floats8 to[4], uint8x16_t rows0to3, uint8x16_t rows4to7) {
    uint32x4_t low = vreinterpretq_u32_u8(rows0to3);
    uint32x4_t high = vreinterpretq_u32_u8(rows4to7);
    to[0] = (floats8){CODES(low, 0), CODES(high, 0)};
    to[1] = (floats8){CODES(low, 1), CODES(high, 1)};
    to[2] = (floats8){CODES(low, 2), CODES(high, 2)};
    to[3] = (floats8){CODES(low, 3), CODES(high, 3)};
}

ALWAYS_INLINE void nibbles_to_floats(floats8 to[8], const uint8_t *codes) {
    const uint8x16_t mask = vdupq_n_u8(15);
    uint8x16_t a = vld1q_u8(codes);
    uint8x16_t b = vld1q_u8(codes + 16);
    spread_codes(to, vandq_u8(a, mask), vandq_u8(b, mask));
    spread_codes(to + 4, vshrq_n_u8(a, 4), vshrq_n_u8(b, 4));
}

ALWAYS_INLINE void bytes_to_floats(floats8 to[8], const uint8_t *codes) {
    const uint8x16_t sign = vdupq_n_u8(128);
    spread_codes(to, veorq_u8(vld1q_u8(codes), sign), veorq_u8(vld1q_u8(codes + 16), sign));
    spread_codes(to + 4, veorq_u8(vld1q_u8(codes + 32), sign), veorq_u8(vld1q_u8(codes + 48),
            sign));
}
