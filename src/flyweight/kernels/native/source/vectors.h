// Eight floats or eight 32-bit integers at a time, and the two dot products that everything rests
// on.
//
// Weights lie in blocks of eight outputs, so eight is the width of every kernel, whatever the
// processor: two NEON registers, one of AVX2. Each processor gives the same few functions:
//
//   floats8, ints8                    the types
//   dot_nibbles(sum, codes, x, …)     codes of 8 outputs, 16 inputs, times x[0..15] of each row;
//                                     unsigned, 64 bytes
//   dot_bytes(sum, codes, x, …)       the same with codes of 8 bits, signed, 128 bytes; it may
//                                     leave out BYTE_BIAS · Σ x
//   nibbles_to_floats, bytes_to_floats   codes written out, unsigned: 8 inputs of 8 outputs
//
// A dot product of 16 inputs is four instructions, one after each four inputs. They go to `sums`
// vectors in turn, because an instruction that adds to what the one before it has made would wait
// for it: sum[m · sums + i] is of row m of x.
//
// Layout of 8 inputs of a block in 4 bits (32 bytes): byte 4r + j has input j of output r in its
// low half, input 4 + j above. In 8 bits (64 bytes): byte 4r + j has input j, byte 32 + 4r + j
// input 4 + j.
#pragma once

#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define WIDTH 8

// Before a short loop over registers: without it arrays of vectors go to memory.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#if defined(__ARM_FEATURE_DOTPROD)
#include "vectors_neon.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vectors_avx2.h"
#else
#include "vectors_plain.h"
#endif
