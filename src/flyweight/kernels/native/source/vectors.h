// Eight floats or eight 32-bit integers at a time, and the two dot products that everything rests
// on.
//
// Weights lie in blocks of eight outputs, so eight is the width of every kernel, whatever the
// processor: two NEON registers, one of AVX2 or of SVE where its vectors have 256 bits. Each processor gives the same few functions:
//
//   floats8, ints8                    the types
//   dot_nibbles(sum, codes, x, …)     codes of 8 outputs, 16 inputs, times x[0..15] of each row;
//                                     unsigned, 64 bytes
//   dot_bytes(sum, codes, x, …)       the same with codes of 8 bits, signed, 128 bytes; it may
//                                     leave out BYTE_BIAS · Σ x
//   part_nibbles, part_bytes          32 inputs of TALL rows of x that lie in quads (matrix.h), and
//                                     one of PARTS parts of the eight outputs
//   part_codes(sum, codes, x, …)      like part_bytes, but codes are unsigned and below 128
//   nibbles_to_floats, bytes_to_floats   codes written out, unsigned: 8 inputs of 8 outputs
//
//   PANEL_BLOCKS, PANEL_ROWS          how many sums the registers hold (product_panel.c)
//   floats_wide, wide_load, …         the widest vectors for them, of WIDE floats
//
// A dot product of 16 inputs is four instructions, one after each four inputs. They go to `sums`
// vectors in turn, because an instruction that adds to what the one before it has made would wait
// for it: sum[m · sums + i] is of row m of x.
//
// Layout of 8 inputs of a block in 4 bits (32 bytes): byte 4r + j has input j of output r in its
// low half, input 4 + j above. In 8 bits (64 bytes): byte 4r + j has input j, byte 32 + 4r + j
// input 4 + j.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define WIDTH 8

// Four rows of x make a quad (matrix.h), in which TOGETHER columns of a row stand together: where
// a column lies.
#define QUAD 4
#define QUAD_PLACE(column) ((column) / TOGETHER * TOGETHER * QUAD + (column) % TOGETHER)

// Before a short loop over registers: without it arrays of vectors go to memory.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#if defined(__ARM_FEATURE_DOTPROD) && __ARM_FEATURE_SVE_BITS == 256
#include "vectors_sve.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "vectors_neon.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors_avx2.h"
#else
#include "vectors_plain.h"
#endif

#define PANEL (PANEL_BLOCKS * WIDTH)
#if !defined(WIDE)
#define WIDE WIDTH
typedef floats8 floats_wide;
#define wide_load floats_load
#define wide_store floats_store
#define wide_fma_scalar floats_fma_scalar
#endif

#if !defined(PARTS)
// A part of a block is all of it.
#define PARTS 1
#define TOGETHER 4
typedef floats8 floats_part;
typedef ints8 ints_part;
#define part_splat floats_splat
#define part_load floats_load
#define part_load_halves halves_load
#define part_store floats_store
#define part_from_bytes ints_from_bytes
#define part_start ints_splat
#define part_as_floats ints_as_floats
#define part_to_floats ints_to_floats
#define part_subtract floats_subtract
#define part_fma floats_fma

ALWAYS_INLINE ints_part part_start_at(int32_t from, ints_part a, int32_t b) {
    return ints_add(ints_splat(from), ints_scale(a, b));
}

ALWAYS_INLINE void part_scale(floats_part to[4], floats_part a, const float *by) {
    UNROLL for (int m = 0; m < 4; m++) to[m] = floats_scale(a, by[m]);
}

// -- rounding x -----------------------------------------------------------------------------------

// The bits of the largest magnitude of 16 numbers, or of `most`: magnitudes compare like their
// bits, and NaN is above infinity.
ALWAYS_INLINE int32_t largest_bits(const float *x, int32_t most) {
    for (int k = 0; k < 16; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

// 16 numbers times `factor` to the nearest integers, ties to even, as codes, behind each other or
// in a quad; their sum.
ALWAYS_INLINE int32_t round_codes(const float *x, float factor, int8_t *to, const int in_quad) {
    int32_t sum = 0;
    for (int k = 0; k < 16; k++) {
        float value = rintf(x[k] * factor);
        int32_t code = value == value ? (int32_t)value : 0; // the scale says NaN
        to[in_quad ? QUAD_PLACE(k) : k] = (int8_t)code;
        sum += code;
    }
    return sum;
}
#endif
