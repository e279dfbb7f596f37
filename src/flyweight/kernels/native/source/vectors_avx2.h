// x86 with AVX2, and with VNNI (in its AVX-512 or its AVX form) where the compiler was told of it.
#pragma once

#include <immintrin.h>

#define HALF_PRODUCTS 0
#define DOT_SUMS 4
#ifdef __AVX512VL__
#define MANY_ROWS_SUMS 2 // it has 32 registers
#else
#define MANY_ROWS_SUMS 1
#endif

typedef __m256 floats8;
typedef __m256i ints8;

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define INSTRUCTIONS "avx512 vnni"
#define BYTE_BIAS 128
#define DOT_UNSIGNED(sum, w, x) _mm256_dpbusd_epi32(sum, w, x)
#elif defined(__AVXVNNI__)
#define INSTRUCTIONS "avx2 vnni"
#define BYTE_BIAS 128
#define DOT_UNSIGNED(sum, w, x) _mm256_dpbusd_avx_epi32(sum, w, x)
#else
#define INSTRUCTIONS "avx2"
#define BYTE_BIAS 0
// Pairs are added in 16 bits, which saturates; 15 · 127 · 2 does not, nor does 128 · 127 · 2.
#define DOT_UNSIGNED(sum, w, x) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)))
#endif

// Of numbers that come divided by it, and of x beside them; codes come as they are (see
// vectors_neon.h).
#define HALF_FACTOR 1.0f
#define FLOAT8_FACTOR 0x1p8f
#define INPUT_FACTOR 1.0f
#define CODE_OFFSET 0.0f

ALWAYS_INLINE floats8 floats_splat(float value) {
    return _mm256_set1_ps(value);
}

ALWAYS_INLINE floats8 floats_load(const float *from) {
    return _mm256_loadu_ps(from);
}

ALWAYS_INLINE void floats_store(float *to, floats8 a) {
    _mm256_storeu_ps(to, a);
}

ALWAYS_INLINE floats8 floats_add(floats8 a, floats8 b) {
    return _mm256_add_ps(a, b);
}

ALWAYS_INLINE floats8 floats_subtract(floats8 a, floats8 b) {
    return _mm256_sub_ps(a, b);
}

ALWAYS_INLINE floats8 floats_multiply(floats8 a, floats8 b) {
    return _mm256_mul_ps(a, b);
}

ALWAYS_INLINE floats8 floats_scale(floats8 a, float b) {
    return _mm256_mul_ps(a, _mm256_set1_ps(b));
}

// sum + a · b
ALWAYS_INLINE floats8 floats_fma(floats8 sum, floats8 a, floats8 b) {
    return _mm256_fmadd_ps(a, b, sum);
}

ALWAYS_INLINE floats8 floats_fma_scalar(floats8 sum, floats8 a, float b) {
    return _mm256_fmadd_ps(a, _mm256_set1_ps(b), sum);
}

// sum[j % sums] += a[j] · x[j] for four j
ALWAYS_INLINE void floats_fma4(floats8 *sum, const int sums, const floats8 a[4], const float *x) {
    UNROLL for (int j = 0; j < 4; j++) sum[j % sums] = floats_fma_scalar(sum[j % sums], a[j], x[j]);
}

ALWAYS_INLINE float floats_sum(floats8 a) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The sums of four vectors, one after the other.
ALWAYS_INLINE void floats_sum4(float *to, floats8 a, floats8 b, floats8 c, floats8 d) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

ALWAYS_INLINE floats8 halves_load(const void *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(from));
}

ALWAYS_INLINE void halves_store(void *to, floats8 a) {
    _mm_storeu_si128(to, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

ALWAYS_INLINE floats8 bfloats_load(const void *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16));
}

ALWAYS_INLINE floats8 small_halves_load(const void *from) {
    return halves_load(from);
}

// e4m3 without NaN, divided by FLOAT8_FACTOR: the bits of a float16 after a shift.
ALWAYS_INLINE floats8 small_float8s_load(const void *from) {
    __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(from)), 8);
    __m128i sign = _mm_and_si128(wide, _mm_set1_epi16((short)0x8000));
    __m128i rest = _mm_srli_epi16(_mm_slli_epi16(wide, 1), 2);
    return _mm256_cvtph_ps(_mm_or_si128(sign, rest));
}

ALWAYS_INLINE ints8 ints_splat(int32_t value) {
    return _mm256_set1_epi32(value);
}

ALWAYS_INLINE ints8 ints_add(ints8 a, ints8 b) {
    return _mm256_add_epi32(a, b);
}

ALWAYS_INLINE ints8 ints_scale(ints8 a, int32_t b) {
    return _mm256_mullo_epi32(a, _mm256_set1_epi32(b));
}

ALWAYS_INLINE ints8 ints_from_bytes(const void *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
}

// The same bits.
ALWAYS_INLINE floats8 ints_as_floats(ints8 a) {
    return _mm256_castsi256_ps(a);
}

ALWAYS_INLINE floats8 ints_to_floats(ints8 a) {
    return _mm256_cvtepi32_ps(a);
}

ALWAYS_INLINE __m256i four_inputs(const int8_t *x) {
    int32_t bits;
    memcpy(&bits, x, 4);
    return _mm256_set1_epi32(bits);
}

// Four inputs of row m of x, in quads of rows (see matrix.h) that are `quad` bytes apart.
ALWAYS_INLINE __m256i quad_inputs(const int8_t *x, size_t quad, int m) {
    return four_inputs(x + m / 4 * quad + 4 * (m % 4));
}

ALWAYS_INLINE void dot_nibbles(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows,
                               const int sums) {
    const __m256i mask = _mm256_set1_epi8(15);
    UNROLL for (int quarter = 0; quarter < 4; quarter++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 32 * (quarter / 2)));
        __m256i w = _mm256_and_si256(quarter % 2 ? _mm256_srli_epi16(both, 4) : both, mask);
        UNROLL for (int m = 0; m < rows; m++) {
            ints8 *to = sum + m * sums + quarter % sums;
            *to = DOT_UNSIGNED(*to, w, four_inputs(x + m * stride + 4 * quarter));
        }
    }
}

ALWAYS_INLINE ints8 dot_signed(ints8 sum, __m256i w, __m256i inputs) {
#if BYTE_BIAS
    return DOT_UNSIGNED(sum, _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80)), inputs);
#else
    return DOT_UNSIGNED(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(inputs, w));
#endif
}

ALWAYS_INLINE void dot_bytes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t stride,
        const int rows,
                             const int sums) {
    UNROLL for (int quarter = 0; quarter < 4; quarter++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(codes + 32 * quarter));
        UNROLL for (int m = 0; m < rows; m++) {
            ints8 *to = sum + m * sums + quarter % sums;
            *to = dot_signed(*to, w, four_inputs(x + m * stride + 4 * quarter));
        }
    }
}

#if defined(__AVX512VL__)
#define PANEL_BLOCKS 4
#define PANEL_ROWS 8
#define WIDE 16
typedef __m512 floats_wide;

ALWAYS_INLINE floats_wide wide_load(const float *from) {
    return _mm512_loadu_ps(from);
}

ALWAYS_INLINE void wide_store(float *to, floats_wide a) {
    _mm512_storeu_ps(to, a);
}

ALWAYS_INLINE floats_wide wide_fma_scalar(floats_wide sum, floats_wide a, float b) {
    return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum);
}
#else
#define PANEL_BLOCKS 2
#define PANEL_ROWS 4
#endif

// -- tiles of four or eight rows and eight outputs ------------------------------------------------

#if defined(__AVX512VL__)
#define TALL 8 // of 32 registers; there are 16 without AVX-512
#else
#define TALL 4
#endif

ALWAYS_INLINE void part_nibbles(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    const __m256i mask = _mm256_set1_epi8(15);
    UNROLL for (int quarter = 0; quarter < 8; quarter++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 32 * (quarter / 2)));
        __m256i w = _mm256_and_si256(quarter % 2 ? _mm256_srli_epi16(both, 4) : both, mask);
        UNROLL for (int m = 0; m < TALL; m++)
            sum[m] = DOT_UNSIGNED(sum[m], w, quad_inputs(x + 16 * quarter, quad, m));
    }
}

ALWAYS_INLINE void part_bytes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    UNROLL for (int quarter = 0; quarter < 8; quarter++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(codes + 32 * quarter));
        UNROLL for (int m = 0; m < TALL; m++)
            sum[m] = dot_signed(sum[m], w, quad_inputs(x + 16 * quarter, quad, m));
    }
}

ALWAYS_INLINE void part_codes(ints8 *sum, const uint8_t *codes, const int8_t *x, size_t quad) {
    UNROLL for (int quarter = 0; quarter < 8; quarter++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(codes + 32 * quarter));
        UNROLL for (int m = 0; m < TALL; m++)
            sum[m] = DOT_UNSIGNED(sum[m], w, quad_inputs(x + 16 * quarter, quad, m));
    }
}

// 16 inputs in 4 bits become bytes, in the order of dot_bytes.
ALWAYS_INLINE void nibbles_to_bytes(uint8_t *to, const uint8_t *codes) {
    const __m256i mask = _mm256_set1_epi8(15);
    UNROLL for (int i = 0; i < 2; i++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 32 * i));
        __m256i *at = (__m256i *)(to + 64 * i);
        _mm256_storeu_si256(at, _mm256_and_si256(both, mask));
        _mm256_storeu_si256(at + 1, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    }
}

// Four inputs of eight outputs, stored by output, become four vectors of eight outputs.
ALWAYS_INLINE void transpose_bytes(floats8 to[4], __m256i rows) {
    for (int j = 0; j < 4; j++)
        to[j] = _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_slli_epi32(rows, 24 - 8 * j), 24));
}

ALWAYS_INLINE void nibbles_to_floats(floats8 to[8], const uint8_t *codes) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i both = _mm256_loadu_si256((const __m256i *)codes);
    transpose_bytes(to, _mm256_and_si256(both, mask));
    transpose_bytes(to + 4, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
}

ALWAYS_INLINE void bytes_to_floats(floats8 to[8], const uint8_t *codes) {
    const __m256i sign = _mm256_set1_epi8((char)128);
    transpose_bytes(to, _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)codes), sign));
    transpose_bytes(to + 4, _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(codes + 32)),
            sign));
}

// Codes below 16 replaced by what a table has for them.
ALWAYS_INLINE void bytes_look_up(uint8_t *codes, const int8_t *table, const int count) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    for (int i = 0; i < count; i += 32) {
        __m256i *at = (__m256i *)(codes + i);
        _mm256_storeu_si256(at, _mm256_shuffle_epi8(all, _mm256_loadu_si256(at)));
    }
}
