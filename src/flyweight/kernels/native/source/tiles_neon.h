// What ARM's processors share, whatever the width of their vectors: tiles of many rows of x, the
// rounding of x, and products in float16. Needs floats8, `floats_add` and `floats_join`.
#pragma once

#include <arm_neon.h>

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define HALF_PRODUCTS 1
#else
#define HALF_PRODUCTS 0
#endif
#define LOWER(codes) vreinterpretq_s8_u8(vandq_u8(codes, mask))
#define UPPER(codes) vreinterpretq_s8_u8(vshrq_n_u8(codes, 4))

// -- tiles of eight rows and four outputs ---------------------------------------------------------

#define TALL 8
#define PARTS 2
typedef float32x4_t floats_part;
typedef int32x4_t ints_part;

ALWAYS_INLINE floats_part part_splat(float value) {
    return vdupq_n_f32(value);
}

ALWAYS_INLINE floats_part part_load(const void *from) {
    return vld1q_f32(from);
}

ALWAYS_INLINE floats_part part_load_halves(const void *from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

ALWAYS_INLINE void part_store(float *to, floats_part a) {
    vst1q_f32(to, a);
}

ALWAYS_INLINE ints_part part_from_bytes(const uint8_t *from) {
    uint32_t four;
    memcpy(&four, from, 4);
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}

ALWAYS_INLINE ints_part part_start(int32_t from) {
    return vdupq_n_s32(from);
}

// from + a · b
ALWAYS_INLINE ints_part part_start_at(int32_t from, ints_part a, int32_t b) {
    return vmlaq_n_s32(vdupq_n_s32(from), a, b);
}

ALWAYS_INLINE floats_part part_as_floats(ints_part a) {
    return vreinterpretq_f32_s32(a);
}

ALWAYS_INLINE floats_part part_to_floats(ints_part a) {
    return vcvtq_f32_s32(a);
}

ALWAYS_INLINE floats_part part_subtract(floats_part a, floats_part b) {
    return vsubq_f32(a, b);
}

ALWAYS_INLINE floats_part part_fma(floats_part sum, floats_part a, floats_part b) {
    return vfmaq_f32(sum, a, b);
}

// to[m] = a · by[m] for four rows: four scalars are one load.
ALWAYS_INLINE void part_scale(floats_part to[4], floats_part a, const float *by) {
    float32x4_t four = vld1q_f32(by);
    to[0] = vmulq_laneq_f32(a, four, 0);
    to[1] = vmulq_laneq_f32(a, four, 1);
    to[2] = vmulq_laneq_f32(a, four, 2);
    to[3] = vmulq_laneq_f32(a, four, 3);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define TOGETHER 8

// Eight inputs of eight rows and four outputs, in tiles of two rows and two outputs, which is what
// one instruction multiplies:
//
//   tile[2 p + q] = rows 2p, 2p + 1 × outputs 2q, 2q + 1
ALWAYS_INLINE void multiply_tiles(int32x4_t tile[8], int8x16_t w_first, int8x16_t w_second,
        const int8_t *x, size_t quad) {
    int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(w_first),
            vreinterpretq_s32_s8(w_second)));
    int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(w_first),
            vreinterpretq_s32_s8(w_second)));
    UNROLL for (int pair = 0; pair < 4; pair++) {
        int8x16_t rows = vld1q_s8(x + pair / 2 * quad + 16 * (pair % 2));
        tile[2 * pair] = vmmlaq_s32(tile[2 * pair], rows, low);
        tile[2 * pair + 1] = vmmlaq_s32(tile[2 * pair + 1], rows, high);
    }
}

ALWAYS_INLINE void add_tiles(ints_part *sum, const int32x4_t tile[8]) {
    UNROLL for (int pair = 0; pair < 4; pair++) {
        int64x2_t left = vreinterpretq_s64_s32(tile[2 * pair]);
        int64x2_t right = vreinterpretq_s64_s32(tile[2 * pair + 1]);
        int32x4_t first = vreinterpretq_s32_s64(vzip1q_s64(left, right));
        int32x4_t second = vreinterpretq_s32_s64(vzip2q_s64(left, right));
        sum[2 * pair] = vaddq_s32(sum[2 * pair], first);
        sum[2 * pair + 1] = vaddq_s32(sum[2 * pair + 1], second);
    }
}

// 32 inputs of eight rows, 4 bits.
ALWAYS_INLINE void part_nibbles(ints_part *sum, const uint8_t *codes, const int8_t *x,
        size_t quad) {
    const uint8x16_t mask = vdupq_n_u8(15);
    int32x4_t tile[8];
    UNROLL for (int i = 0; i < 8; i++) tile[i] = vdupq_n_s32(0);
    UNROLL for (int eight = 0; eight < 4; eight++) {
        uint8x16_t both = vld1q_u8(codes + 32 * eight);
        multiply_tiles(tile, LOWER(both), UPPER(both), x + 32 * eight, quad);
    }
    add_tiles(sum, tile);
}

// The same in 8 bits.
ALWAYS_INLINE void part_bytes(ints_part *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    const int8_t *w = (const int8_t *)codes;
    int32x4_t tile[8];
    UNROLL for (int i = 0; i < 8; i++) tile[i] = vdupq_n_s32(0);
    UNROLL for (int eight = 0; eight < 4; eight++)
        multiply_tiles(tile, vld1q_s8(w + 64 * eight), vld1q_s8(w + 64 * eight + 32),
                x + 32 * eight, quad);
    add_tiles(sum, tile);
}
#else
#define TOGETHER 4

// Four inputs of eight rows.
#define DOT_ROWS(w, x, y)                                                                         \
    "sdot %[sum0].4s, %[" w "].16b, %[" x "].4b[0]\n"                                             \
    "sdot %[sum1].4s, %[" w "].16b, %[" x "].4b[1]\n"                                             \
    "sdot %[sum2].4s, %[" w "].16b, %[" x "].4b[2]\n"                                             \
    "sdot %[sum3].4s, %[" w "].16b, %[" x "].4b[3]\n"                                             \
    "sdot %[sum4].4s, %[" w "].16b, %[" y "].4b[0]\n"                                             \
    "sdot %[sum5].4s, %[" w "].16b, %[" y "].4b[1]\n"                                             \
    "sdot %[sum6].4s, %[" w "].16b, %[" y "].4b[2]\n"                                             \
    "sdot %[sum7].4s, %[" w "].16b, %[" y "].4b[3]\n"
#define LOAD(to, from, at) "ldr %q[" to "], [%[" from "], #" at "]\n"
#define LOAD_ROWS(x, y, at) LOAD(x, "first", at) LOAD(y, "second", at)
#define SUMS(sum)                                                                                 \
    [sum0] "+w"(sum[0]), [sum1] "+w"(sum[1]), [sum2] "+w"(sum[2]), [sum3] "+w"(sum[3]),           \
            [sum4] "+w"(sum[4]), [sum5] "+w"(sum[5]), [sum6] "+w"(sum[6]), [sum7] "+w"(sum[7])

// 32 inputs of eight rows, 4 bits. As assembler, because compilers put the products of one row
// behind each other, each of which then waits for the one before.
ALWAYS_INLINE void part_nibbles(ints_part *sum, const uint8_t *codes, const int8_t *x,
        size_t quad) {
    uint8x16_t both, more, lower, upper, lower2, upper2, x0, y0, x1, y1;
#define UNPACK(lower, upper, from)                                                                \
    "and %[" lower "].16b, %[" from "].16b, %[mask].16b\n"                                        \
    "ushr %[" upper "].16b, %[" from "].16b, #4\n"
    __asm__(LOAD("both", "codes", "0") LOAD("more", "codes", "32")
            LOAD_ROWS("x0", "y0", "0") LOAD_ROWS("x1", "y1", "16")
            UNPACK("lower", "upper", "both")
            DOT_ROWS("lower", "x0", "y0")
            LOAD("both", "codes", "64") LOAD_ROWS("x0", "y0", "32")
            UNPACK("lower2", "upper2", "more")
            DOT_ROWS("upper", "x1", "y1")
            LOAD("more", "codes", "96") LOAD_ROWS("x1", "y1", "48")
            DOT_ROWS("lower2", "x0", "y0")
            LOAD_ROWS("x0", "y0", "64")
            UNPACK("lower", "upper", "both")
            DOT_ROWS("upper2", "x1", "y1")
            LOAD_ROWS("x1", "y1", "80")
            DOT_ROWS("lower", "x0", "y0")
            LOAD_ROWS("x0", "y0", "96")
            UNPACK("lower2", "upper2", "more")
            DOT_ROWS("upper", "x1", "y1")
            LOAD_ROWS("x1", "y1", "112")
            DOT_ROWS("lower2", "x0", "y0")
            DOT_ROWS("upper2", "x1", "y1")
            : SUMS(sum), [both] "=&w"(both), [more] "=&w"(more), [lower] "=&w"(lower),
              [upper] "=&w"(upper), [lower2] "=&w"(lower2), [upper2] "=&w"(upper2),
              [x0] "=&w"(x0), [y0] "=&w"(y0), [x1] "=&w"(x1), [y1] "=&w"(y1)
            : [codes] "r"(codes), [first] "r"(x), [second] "r"(x + quad),
              [mask] "w"(vdupq_n_u8(15))
            : "memory");
#undef UNPACK
}

// The same in 8 bits.
ALWAYS_INLINE void part_bytes(ints_part *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    int8x16_t w0, w1, x0, y0, x1, y1;
#define EIGHT_INPUTS(x_now, x_next, from, from_next)                                              \
    LOAD("w0", "codes", from) LOAD_ROWS("x0", "y0", x_now)                                        \
    LOAD("w1", "codes", from_next) LOAD_ROWS("x1", "y1", x_next)                                  \
    DOT_ROWS("w0", "x0", "y0") DOT_ROWS("w1", "x1", "y1")
    __asm__(EIGHT_INPUTS("0", "16", "0", "32") EIGHT_INPUTS("32", "48", "64", "96")
            EIGHT_INPUTS("64", "80", "128", "160") EIGHT_INPUTS("96", "112", "192", "224")
            : SUMS(sum), [w0] "=&w"(w0), [w1] "=&w"(w1), [x0] "=&w"(x0), [y0] "=&w"(y0),
              [x1] "=&w"(x1), [y1] "=&w"(y1)
            : [codes] "r"(codes), [first] "r"(x), [second] "r"(x + quad)
            : "memory");
#undef EIGHT_INPUTS
}
#endif

ALWAYS_INLINE void part_codes(ints_part *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    part_bytes(sum, codes, x, quad);
}

// 16 inputs in 4 bits become bytes, in the order of dot_bytes.
ALWAYS_INLINE void nibbles_to_bytes(uint8_t *to, const uint8_t *codes) {
    const uint8x16_t mask = vdupq_n_u8(15);
    UNROLL for (int i = 0; i < 4; i++) {
        uint8x16_t both = vld1q_u8(codes + 16 * i);
        uint8_t *half = to + 64 * (i / 2) + 16 * (i % 2);
        vst1q_u8(half, vandq_u8(both, mask));
        vst1q_u8(half + 32, vshrq_n_u8(both, 4));
    }
}

// -- rounding x -----------------------------------------------------------------------------------

// The bits of the largest magnitude of 16 numbers, or of `most`.
ALWAYS_INLINE int32_t largest_bits(const float *x, int32_t most) {
    const int32x4_t mask = vdupq_n_s32(0x7fffffff);
    int32x4_t a = vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x)), mask);
    int32x4_t b = vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x + 4)), mask);
    int32x4_t c = vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x + 8)), mask);
    int32x4_t d = vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x + 12)), mask);
    int32_t found = vmaxvq_s32(vmaxq_s32(vmaxq_s32(a, b), vmaxq_s32(c, d)));
    return found > most ? found : most;
}

// x · factor to the nearest integer, ties to even, as the lower bits of 1.5 · 2^23 + that. The
// empty statement keeps product and sum apart, which rounds as the format says.
ALWAYS_INLINE int32x4_t round_four(const float *x, float factor) {
    float32x4_t scaled = vmulq_n_f32(vld1q_f32(x), factor);
    __asm__("" : "+w"(scaled));
    return vreinterpretq_s32_f32(vaddq_f32(scaled, vdupq_n_f32(12582912.0f)));
}

// 16 numbers as codes, behind each other or in a quad; their sum.
ALWAYS_INLINE int32_t round_codes(const float *x, float factor, int8_t *to, const int in_quad) {
    int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(round_four(x, factor)),
            vreinterpretq_s16_s32(round_four(x + 4, factor)));
    int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(round_four(x + 8, factor)),
            vreinterpretq_s16_s32(round_four(x + 12, factor)));
    int8x16_t codes = vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high));
    if (!in_quad) {
        vst1q_s8(to, codes);
    } else {
        int32x4_t fours = vreinterpretq_s32_s8(codes);
        vst1q_lane_s32((int32_t *)(to + QUAD_PLACE(0)), fours, 0);
        vst1q_lane_s32((int32_t *)(to + QUAD_PLACE(4)), fours, 1);
        vst1q_lane_s32((int32_t *)(to + QUAD_PLACE(8)), fours, 2);
        vst1q_lane_s32((int32_t *)(to + QUAD_PLACE(12)), fours, 3);
    }
    return vaddvq_s32(vdotq_s32(vdupq_n_s32(0), codes, vdupq_n_s8(1)));
}

// Codes below 16 replaced by what a table has for them.
ALWAYS_INLINE void bytes_look_up(uint8_t *codes, const int8_t *table, const int count) {
    const uint8x16_t all = vld1q_u8((const uint8_t *)table);
    for (int i = 0; i < count; i += 16)
        vst1q_u8(codes + i, vqtbl1q_u8(all, vld1q_u8(codes + i)));
}

#if HALF_PRODUCTS
typedef float16x8_t halves8;

ALWAYS_INLINE halves8 halves_zero(void) {
    return vreinterpretq_f16_u16(vdupq_n_u16(0));
}

// sum[m][j % 4] += w[j] · x[m][j] for eight j, where w[j] is one input of eight outputs. As
// assembler, because one of eight lanes can be chosen in half of the registers only (constraint x),
// and gcc copies it into a vector of its own instead.
ALWAYS_INLINE void halves_fma8(halves8 sum[][4], const uint16_t *w, const uint16_t *x,
        size_t stride, const int rows) {
    halves8 inputs[4];
    UNROLL for (int m = 0; m < rows; m++)
        inputs[m] = vreinterpretq_f16_u16(vld1q_u16(x + m * stride));
#define HALF_STEP(j)                                                                              \
    {                                                                                             \
        const halves8 weights = vreinterpretq_f16_u16(vld1q_u16(w + 8 * j));                      \
        UNROLL for (int m = 0; m < rows; m++)                                                     \
            __asm__("fmla %0.8h, %1.8h, %2.h[" #j "]" : "+w"(sum[m][j % 4])                       \
                    : "w"(weights), "x"(inputs[m]));                                              \
    }
    HALF_STEP(0) HALF_STEP(1) HALF_STEP(2) HALF_STEP(3)
    HALF_STEP(4) HALF_STEP(5) HALF_STEP(6) HALF_STEP(7)
}

ALWAYS_INLINE floats8 halves_add_up(floats8 total, const halves8 sum[4]) {
    halves8 first = vaddq_f16(sum[0], sum[1]);
    halves8 second = vaddq_f16(sum[2], sum[3]);
    float32x4_t low = vaddq_f32(vcvt_f32_f16(vget_low_f16(first)),
            vcvt_f32_f16(vget_low_f16(second)));
    float32x4_t high = vaddq_f32(vcvt_high_f32_f16(first), vcvt_high_f32_f16(second));
    return floats_add(total, floats_join(low, high));
}
#endif
