// Any processor: plain loops over eight values, which the compiler turns into whatever vectors
// there are.
#pragma once

#define INSTRUCTIONS "plain C"
#define BYTE_BIAS 0
#define HALF_PRODUCTS 0
#define DOT_SUMS 1
#define MANY_ROWS_SUMS 1
#define PANEL_BLOCKS 1
#define PANEL_ROWS 4
#define EACH for (int i = 0; i < 8; i++)

// Of numbers that come divided by it, and of x beside them; codes come as they are (see
// vectors_neon.h).
#define HALF_FACTOR 1.0f
#define FLOAT8_FACTOR 0x1p8f
#define INPUT_FACTOR 1.0f
#define CODE_OFFSET 0.0f

typedef struct { float at[8]; } floats8;
typedef struct { int32_t at[8]; } ints8;

ALWAYS_INLINE floats8 floats_splat(float value) {
    floats8 a;
    EACH a.at[i] = value;
    return a;
}

ALWAYS_INLINE floats8 floats_load(const float *from) {
    floats8 a;
    memcpy(a.at, from, sizeof a.at);
    return a;
}

ALWAYS_INLINE void floats_store(float *to, floats8 a) {
    memcpy(to, a.at, sizeof a.at);
}

ALWAYS_INLINE floats8 floats_add(floats8 a, floats8 b) {
    EACH a.at[i] += b.at[i];
    return a;
}

ALWAYS_INLINE floats8 floats_subtract(floats8 a, floats8 b) {
    EACH a.at[i] -= b.at[i];
    return a;
}

ALWAYS_INLINE floats8 floats_multiply(floats8 a, floats8 b) {
    EACH a.at[i] *= b.at[i];
    return a;
}

ALWAYS_INLINE floats8 floats_scale(floats8 a, float b) {
    EACH a.at[i] *= b;
    return a;
}

// sum + a · b
ALWAYS_INLINE floats8 floats_fma(floats8 sum, floats8 a, floats8 b) {
    EACH sum.at[i] += a.at[i] * b.at[i];
    return sum;
}

ALWAYS_INLINE floats8 floats_fma_scalar(floats8 sum, floats8 a, float b) {
    EACH sum.at[i] += a.at[i] * b;
    return sum;
}

// sum[j % sums] += a[j] · x[j] for four j
ALWAYS_INLINE void floats_fma4(floats8 *sum, const int sums, const floats8 a[4], const float *x) {
    UNROLL for (int j = 0; j < 4; j++) sum[j % sums] = floats_fma_scalar(sum[j % sums], a[j], x[j]);
}

ALWAYS_INLINE float floats_sum(floats8 a) {
    float sum = 0;
    EACH sum += a.at[i];
    return sum;
}

// The sums of four vectors, one after the other.
ALWAYS_INLINE void floats_sum4(float *to, floats8 a, floats8 b, floats8 c, floats8 d) {
    to[0] = floats_sum(a);
    to[1] = floats_sum(b);
    to[2] = floats_sum(c);
    to[3] = floats_sum(d);
}

ALWAYS_INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

ALWAYS_INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// By a multiplication that moves the exponent's bias, so that subnormal numbers need no case of
// their own.
ALWAYS_INLINE float float_of_half(uint16_t half) {
    uint32_t rest = (uint32_t)(half & 0x7fff) << 13;
    float value = float_of_bits(rest) * 0x1p112f;
    if ((half & 0x7c00) == 0x7c00) value = float_of_bits(rest | 0x7f800000);
    return float_of_bits(bits_of_float(value) | (uint32_t)(half & 0x8000) << 16);
}

ALWAYS_INLINE uint16_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000)  // subnormal: the sum is rounded to the last bit that a half has
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - 0x38000000) >> 13);
}

ALWAYS_INLINE floats8 halves_load(const void *from) {
    const uint16_t *halves = from;
    floats8 a;
    EACH a.at[i] = float_of_half(halves[i]);
    return a;
}

ALWAYS_INLINE void halves_store(void *to, floats8 a) {
    uint16_t *halves = to;
    EACH halves[i] = half_of_float(a.at[i]);
}

ALWAYS_INLINE floats8 bfloats_load(const void *from) {
    const uint16_t *values = from;
    floats8 a;
    EACH a.at[i] = float_of_bits((uint32_t)values[i] << 16);
    return a;
}

ALWAYS_INLINE floats8 small_halves_load(const void *from) {
    return halves_load(from);
}

// e4m3 without NaN, divided by FLOAT8_FACTOR: the bits of a float16 after a shift.
ALWAYS_INLINE floats8 small_float8s_load(const void *from) {
    const uint8_t *bytes = from;
    floats8 a;
    EACH a.at[i] = float_of_half((uint16_t)((bytes[i] & 0x80) << 8 | (bytes[i] & 0x7f) << 7));
    return a;
}

ALWAYS_INLINE ints8 ints_splat(int32_t value) {
    ints8 a;
    EACH a.at[i] = value;
    return a;
}

ALWAYS_INLINE ints8 ints_add(ints8 a, ints8 b) {
    EACH a.at[i] += b.at[i];
    return a;
}

ALWAYS_INLINE ints8 ints_scale(ints8 a, int32_t b) {
    EACH a.at[i] *= b;
    return a;
}

ALWAYS_INLINE ints8 ints_from_bytes(const void *from) {
    const uint8_t *bytes = from;
    ints8 a;
    EACH a.at[i] = bytes[i];
    return a;
}

// The same bits.
ALWAYS_INLINE floats8 ints_as_floats(ints8 a) {
    floats8 b;
    memcpy(b.at, a.at, sizeof b.at);
    return b;
}

ALWAYS_INLINE floats8 ints_to_floats(ints8 a) {
    floats8 b;
    EACH b.at[i] = (float)a.at[i];
    return b;
}

ALWAYS_INLINE void dot_nibbles(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows,
                               const int sums) {
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < 16; j++)
            EACH {
                int code = codes[32 * (j / 8) + 4 * i + j % 4] >> (j / 4 % 2 * 4) & 15;
                sum[m * sums].at[i] += code * x[m * stride + j];
            }
}

ALWAYS_INLINE void dot_bytes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows,
                             const int sums) {
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < 16; j++)
            EACH {
                int code = (int8_t)codes[32 * (j / 4) + 4 * i + j % 4];
                sum[m * sums].at[i] += code * x[m * stride + j];
            }
}

// -- tiles of four rows and eight outputs ---------------------------------------------------------

#define TALL 4

ALWAYS_INLINE void part_bytes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    for (int m = 0; m < TALL; m++)
        for (int j = 0; j < 32; j++)
            EACH {
                int code = (int8_t)codes[32 * (j / 4) + 4 * i + j % 4];
                sum[m].at[i] += code * x[m / 4 * quad + 16 * (j / 4) + 4 * (m % 4) + j % 4];
            }
}

ALWAYS_INLINE void part_codes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    part_bytes(sum, codes, x, quad);
}

// 16 inputs in 4 bits become bytes, in the order of dot_bytes.
ALWAYS_INLINE void nibbles_to_bytes(uint8_t *to, const uint8_t *codes) {
    for (int i = 0; i < 64; i++) {
        to[64 * (i / 32) + i % 32] = codes[i] & 15;
        to[64 * (i / 32) + 32 + i % 32] = codes[i] >> 4;
    }
}

ALWAYS_INLINE void part_nibbles(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    uint8_t bytes[256];
    nibbles_to_bytes(bytes, codes);
    nibbles_to_bytes(bytes + 128, codes + 64);
    part_bytes(sum, bytes, x, quad);
}

ALWAYS_INLINE void nibbles_to_floats(floats8 to[8], const uint8_t *codes) {
    for (int j = 0; j < 4; j++) {
        EACH to[j].at[i] = (float)(codes[4 * i + j] & 15);
        EACH to[4 + j].at[i] = (float)(codes[4 * i + j] >> 4);
    }
}

ALWAYS_INLINE void bytes_to_floats(floats8 to[8], const uint8_t *codes) {
    for (int j = 0; j < 8; j++)
        EACH to[j].at[i] = (float)(codes[32 * (j / 4) + 4 * i + j % 4] ^ 128);
}

// Codes below 16 replaced by what a table has for them.
ALWAYS_INLINE void bytes_look_up(uint8_t *codes, const int8_t *table, const int count) {
    for (int i = 0; i < count; i++) codes[i] = (uint8_t)table[codes[i]];
}
