// What the linears mean by FORMAT and EPILOGUE; gemv.py has the same numbers.
#define PLAIN 0
#define INT4 1
#define INT8 2
#define W8A8 3
#define FP8 4
#define FP8_WIDE 5  // float8 weights and 16-bit x, where no matrix unit takes float8
#define MXFP4 6     // e2m1 codes, and an exponent for 32 inputs
#define FP8_BLOCKS 7  // float8 weights with a scale for each GROUP outputs × GROUP inputs, and 16-bit x
#define BIT_PLANES 8  // codes of 2 to 8 bits as files have them, with scales for groups of 16 inputs and more: bits.cuh
#define STORE 0
#define RESIDUAL 1
#include "activation.cuh"

// Two of four neighbouring inputs are kept (SPARSE): a 16 × 64 block is the kept codes, then a word for each lane that says
// which they are, two bits for each.
#ifndef SPARSE
#define SPARSE 0
#endif
// All zero points of integer weights lie in the middle of their range, so codes are signed numbers: what 2:4 weights make use of.
#ifndef SYMMETRIC
#define SYMMETRIC 0
#endif
// x is quantized with a scale of its own for each row, or with the one that follows the channels' scales (STATIC).
#ifndef STATIC
#define STATIC 0
#endif
// x of integer weights comes as integers, too: gemm_planes.cuh.
#ifndef IN_PLANES
#define IN_PLANES 0
#endif
#ifdef EPILOGUE
constexpr bool GATE_UP = EPILOGUE >= SILU;  // outputs of gate and up lie by turns, and act(gate) · up is the result
#endif
constexpr bool QUANTIZED = FORMAT == W8A8 || FORMAT == FP8;  // x too, by the row
constexpr bool CHANNELS = QUANTIZED || FORMAT == FP8_WIDE;   // have a scale each
constexpr bool NIBBLES = FORMAT == INT4 || FORMAT == MXFP4;  // two codes a byte
constexpr bool GROUPED = NIBBLES || FORMAT == INT8 || FORMAT == FP8_BLOCKS || FORMAT == BIT_PLANES;  // scales for groups of inputs
constexpr bool FLOATS = FORMAT == PLAIN || FORMAT == FP8_BLOCKS;  // multiplied as 16-bit floats, x as it is
// What a group of inputs has for each of the 16 outputs of a tile: scale (low half) and zero point, or an exponent; or (FP8_BLOCKS) two
// floats in as many bytes, the scales of the first 8 and of the last 8 outputs.
#if FORMAT == MXFP4 || FORMAT == FP8_BLOCKS || FORMAT == BIT_PLANES
typedef u8 Record;
#else
typedef u32 Record;
#endif
#if FORMAT == BIT_PLANES
#include "bits.cuh"
constexpr int GROUP_BYTES = BYTES_OF_A_RECORD;
constexpr int BLOCK_BYTES = 128 * BITS;
#else
constexpr int GROUP_BYTES = 16 * sizeof(Record);
constexpr int BLOCK_BYTES = (NIBBLES ? 512 : FORMAT == PLAIN ? 2048 : 1024) / (1 + SPARSE) + 128 * SPARSE;
#endif
constexpr int RECORD_LENGTH = GROUP_BYTES / sizeof(Record);
