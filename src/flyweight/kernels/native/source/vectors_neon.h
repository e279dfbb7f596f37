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

// Converting float16 takes two slow instructions where a shift and a mask give the same number
// times 2^-112 (float8: 2^-120). x is made larger by INPUT_FACTOR, so that products of such small
// numbers keep all their bits.
#define HALF_FACTOR 0x1p112f
#define FLOAT8_FACTOR 0x1p120f
#define INPUT_FACTOR 0x1p80f

// Codes come as 2^23 + code, which is an integer's bits below those of 2^23.
#define CODE_OFFSET 8388608.0f

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define HALF_PRODUCTS 1
#else
#define HALF_PRODUCTS 0
#endif

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
#define LOWER(codes) vreinterpretq_s8_u8(vandq_u8(codes, mask))
#define UPPER(codes) vreinterpretq_s8_u8(vshrq_n_u8(codes, 4))

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
    return (floats8){vaddq_f32(total.low, low), vaddq_f32(total.high, high)};
}
#endif
