// ARM with SVE vectors of 256 bits (Neoverse V1): eight numbers in one register. Where SVE's
// vectors have 128 bits (Neoverse V2, N2) NEON is as wide, and is used instead.
//
// One or few rows of x are multiplied here; tiles of many rows stay with NEON, whose four units
// multiply as much as SVE's two.
#pragma once

#include <arm_neon.h>
#include <arm_sve.h>

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define INSTRUCTIONS "sve 256 bits, neon i8mm"
#else
#define INSTRUCTIONS "sve 256 bits, neon dotprod"
#endif
#define BYTE_BIAS 0
#define DOT_SUMS 1
#define MANY_ROWS_SUMS 1
#define PANEL_BLOCKS 2
#define PANEL_ROWS 8

// Of numbers that come divided by it, and of x beside them; codes come as they are (see
// vectors_neon.h).
#define HALF_FACTOR 1.0f
#define FLOAT8_FACTOR 0x1p8f
#define INPUT_FACTOR 1.0f
#define CODE_OFFSET 0.0f

typedef svfloat32_t floats8 __attribute__((arm_sve_vector_bits(256)));
typedef svint32_t ints8 __attribute__((arm_sve_vector_bits(256)));
#define ALL svptrue_b32()

ALWAYS_INLINE floats8 floats_splat(float value) {
    return svdup_n_f32(value);
}

ALWAYS_INLINE floats8 floats_load(const float *from) {
    return svld1_f32(ALL, from);
}

ALWAYS_INLINE void floats_store(float *to, floats8 a) {
    svst1_f32(ALL, to, a);
}

ALWAYS_INLINE floats8 floats_join(float32x4_t low, float32x4_t high) {
    float both[8];
    vst1q_f32(both, low);
    vst1q_f32(both + 4, high);
    return floats_load(both);
}

ALWAYS_INLINE floats8 floats_add(floats8 a, floats8 b) {
    return svadd_f32_x(ALL, a, b);
}

ALWAYS_INLINE floats8 floats_subtract(floats8 a, floats8 b) {
    return svsub_f32_x(ALL, a, b);
}

ALWAYS_INLINE floats8 floats_multiply(floats8 a, floats8 b) {
    return svmul_f32_x(ALL, a, b);
}

ALWAYS_INLINE floats8 floats_scale(floats8 a, float b) {
    return svmul_n_f32_x(ALL, a, b);
}

// sum + a · b
ALWAYS_INLINE floats8 floats_fma(floats8 sum, floats8 a, floats8 b) {
    return svmla_f32_x(ALL, sum, a, b);
}

ALWAYS_INLINE floats8 floats_fma_scalar(floats8 sum, floats8 a, float b) {
    return svmla_n_f32_x(ALL, sum, a, b);
}

// sum[j % sums] += a[j] · x[j] for four j: four scalars are one load.
ALWAYS_INLINE void floats_fma4(floats8 *sum, const int sums, const floats8 a[4], const float *x) {
    svfloat32_t b = svld1rq_f32(ALL, x);
    sum[0] = svmla_lane_f32(sum[0], a[0], b, 0);
    sum[1 % sums] = svmla_lane_f32(sum[1 % sums], a[1], b, 1);
    sum[2 % sums] = svmla_lane_f32(sum[2 % sums], a[2], b, 2);
    sum[3 % sums] = svmla_lane_f32(sum[3 % sums], a[3], b, 3);
}

ALWAYS_INLINE float floats_sum(floats8 a) {
    return svaddv_f32(ALL, a);
}

// The sums of four vectors, one after the other.
ALWAYS_INLINE void floats_sum4(float *to, floats8 a, floats8 b, floats8 c, floats8 d) {
    to[0] = floats_sum(a);
    to[1] = floats_sum(b);
    to[2] = floats_sum(c);
    to[3] = floats_sum(d);
}

// The lower halves of eight lanes as float16.
ALWAYS_INLINE floats8 floats_of_halves(svuint32_t halves) {
    return svcvt_f32_f16_x(ALL, svreinterpret_f16_u32(halves));
}

ALWAYS_INLINE floats8 halves_load(const void *from) {
    return floats_of_halves(svld1uh_u32(ALL, from));
}

ALWAYS_INLINE void halves_store(void *to, floats8 a) {
    svst1h_u32(ALL, to, svreinterpret_u32_f16(svcvt_f16_f32_x(ALL, a)));
}

ALWAYS_INLINE floats8 bfloats_load(const void *from) {
    return svreinterpret_f32_u32(svlsl_n_u32_x(ALL, svld1uh_u32(ALL, from), 16));
}

ALWAYS_INLINE floats8 small_halves_load(const void *from) {
    return halves_load(from);
}

// e4m3 without NaN, divided by FLOAT8_FACTOR: the bits of a float16 after a shift.
ALWAYS_INLINE floats8 small_float8s_load(const void *from) {
    svuint32_t bytes = svld1ub_u32(ALL, from);
    svuint32_t sign = svlsl_n_u32_x(ALL, svand_n_u32_x(ALL, bytes, 0x80), 8);
    svuint32_t rest = svlsl_n_u32_x(ALL, svand_n_u32_x(ALL, bytes, 0x7f), 7);
    return floats_of_halves(svorr_u32_x(ALL, sign, rest));
}

ALWAYS_INLINE ints8 ints_splat(int32_t value) {
    return svdup_n_s32(value);
}

ALWAYS_INLINE ints8 ints_add(ints8 a, ints8 b) {
    return svadd_s32_x(ALL, a, b);
}

ALWAYS_INLINE ints8 ints_scale(ints8 a, int32_t b) {
    return svmul_n_s32_x(ALL, a, b);
}

ALWAYS_INLINE ints8 ints_from_bytes(const void *from) {
    return svld1ub_s32(ALL, from);
}

// The same bits.
ALWAYS_INLINE floats8 ints_as_floats(ints8 a) {
    return svreinterpret_f32_s32(a);
}

ALWAYS_INLINE floats8 ints_to_floats(ints8 a) {
    return svcvt_f32_s32_x(ALL, a);
}

#include "tiles_neon.h"

// -- dot products ---------------------------------------------------------------------------------

// Inputs 4 · quarter to 4 · quarter + 3 of every row: a load has 16 inputs of x in both halves of
// the vector, of which the instruction takes four.
#define DOT_QUARTER(quarter, weights)                                                             \
    {                                                                                             \
        const svint8_t w = weights;                                                               \
        UNROLL for (int m = 0; m < rows; m++) {                                                   \
            svint8_t inputs = svld1rq_s8(svptrue_b8(), x + m * stride);                           \
            ints8 *to = sum + m * sums + quarter % sums;                                          \
            *to = svdot_lane_s32(*to, w, inputs, quarter);                                        \
        }                                                                                         \
    }
#define SVE_LOWER(codes) svreinterpret_s8_u8(svand_n_u8_x(svptrue_b8(), codes, 15))
#define SVE_UPPER(codes) svreinterpret_s8_u8(svlsr_n_u8_x(svptrue_b8(), codes, 4))

ALWAYS_INLINE void dot_nibbles(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows, const int sums) {
    svuint8_t first = svld1_u8(svptrue_b8(), codes);
    svuint8_t second = svld1_u8(svptrue_b8(), codes + 32);
    DOT_QUARTER(0, SVE_LOWER(first))
    DOT_QUARTER(1, SVE_UPPER(first))
    DOT_QUARTER(2, SVE_LOWER(second))
    DOT_QUARTER(3, SVE_UPPER(second))
}

ALWAYS_INLINE void dot_bytes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows, const int sums) {
    const int8_t *from = (const int8_t *)codes;
    DOT_QUARTER(0, svld1_s8(svptrue_b8(), from))
    DOT_QUARTER(1, svld1_s8(svptrue_b8(), from + 32))
    DOT_QUARTER(2, svld1_s8(svptrue_b8(), from + 64))
    DOT_QUARTER(3, svld1_s8(svptrue_b8(), from + 96))
}

// -- codes as floats ------------------------------------------------------------------------------

// Four inputs of eight outputs, stored by output, become four vectors of eight outputs.
ALWAYS_INLINE void transpose_bytes(floats8 to[4], svuint8_t rows) {
    svuint32_t lanes = svreinterpret_u32_u8(rows);
    UNROLL for (int j = 0; j < 4; j++) {
        svuint32_t codes = svand_n_u32_x(ALL, svlsr_u32_x(ALL, lanes, svdup_n_u32(8 * j)), 255);
        to[j] = svcvt_f32_u32_x(ALL, codes);
    }
}

ALWAYS_INLINE void nibbles_to_floats(floats8 to[8], const uint8_t *codes) {
    svuint8_t both = svld1_u8(svptrue_b8(), codes);
    transpose_bytes(to, svand_n_u8_x(svptrue_b8(), both, 15));
    transpose_bytes(to + 4, svlsr_n_u8_x(svptrue_b8(), both, 4));
}

ALWAYS_INLINE void bytes_to_floats(floats8 to[8], const uint8_t *codes) {
    svuint8_t first = svld1_u8(svptrue_b8(), codes);
    svuint8_t second = svld1_u8(svptrue_b8(), codes + 32);
    transpose_bytes(to, sveor_n_u8_x(svptrue_b8(), first, 128));
    transpose_bytes(to + 4, sveor_n_u8_x(svptrue_b8(), second, 128));
}
