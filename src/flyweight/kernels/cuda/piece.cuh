// Eight neighbouring inputs of a row, in the form that a format multiplies with: what gemv_inputs.cuh and batch_pack.cu share.
//
// Integer weights: 16-bit integers with a scale for each group, as high and low bytes. W8A8 and float8: codes of 8 bits with a
// scale for the row, which its maximum gives. Plain weights: 16-bit floats.
#include "integers.cuh"
#if FORMAT == BIT_PLANES
#define WHOLE_BLOCKS (SUBGROUP % 64 == 0)  // groups are whole blocks of 64 inputs
#ifndef HALVES_FROM
#define HALVES_FROM 1000
#endif
#define AS_HALVES (!WHOLE_BLOCKS && ROWS >= HALVES_FROM)  // x and codes of small groups are 16-bit floats
constexpr int SMALLEST_GROUP = SUBGROUP;   // inputs that share a scale
#else
#define WHOLE_BLOCKS 0
#define AS_HALVES 0
constexpr int SMALLEST_GROUP = GROUP;
#endif
constexpr int UNIT_BLOCKS = GROUPED && SMALLEST_GROUP % 128 == 0 ? 2 : 1;    // blocks of 64 inputs between two scalings
constexpr bool SIGNED = (SPARSE && GROUPED && SYMMETRIC) || FORMAT == MXFP4;  // codes of weights, as the matrix units get them
DEVICE constexpr int larger(int sets) { return FORMAT == INT4 && (sets == 2 || SIGNED) ? 16 : 1; }  // the products are than they should be
constexpr int PLANES = GROUPED && !FLOATS ? 2 : 1;                             // columns of B that one row of x takes
constexpr int SHARERS = FORMAT != BIT_PLANES && GROUP == 32 ? 4 : UNIT_BLOCKS * 8;  // lanes that share a scale
constexpr int ADDERS = FORMAT == BIT_PLANES && !WHOLE_BLOCKS ? 2 : SHARERS;          // lanes whose inputs have a sum
constexpr float LARGEST = FORMAT == FP8 ? 448.f : 127.f;            // code of x
constexpr bool DIVIDED = STATIC || FORMAT == FP8;                   // codes are x / scale, not x · (largest / most)

struct XGroup {  // of one group of inputs of one row
#if FORMAT == BIT_PLANES
  float sum;  // of the inputs themselves, ADDERS · 8 of them
#else
  int sum;  // of their integers
#endif
  float scale;
};
struct Piece {
  uint4 words;  // plain: all; W8A8, float8: x, y; integer weights: high bytes in x, y and low ones in z, w
  XGroup group;
};

DEVICE float input_scale(float most) { return STATIC ? most : largest(most, LARGEST * 1e-12f) / LARGEST; }  // a NaN, if `most` is

// Eight inputs as floats, and times the norm's weights.
DEVICE void widen(float (&v)[8], uint4 words) {
  const u32 p[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = j & 1 ? high_float(p[j / 2]) : low_float(p[j / 2]);
}
DEVICE void weigh(float (&v)[8], uint4 weight, float& squares) {
  const u32 n[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    squares += v[j] * v[j];
    v[j] *= j & 1 ? high_float(n[j / 2]) : low_float(n[j / 2]);
  }
}

// `most`: of the row (W8A8, float8); `inverse`: the norm's factor where the scale is STATIC, else 1. All lanes of a warp call it,
// each with the eight inputs after its neighbour's. The products' sums are LARGER times too large (int4).
template <int LARGER> DEVICE Piece convert(const float (&v)[8], float most, float inverse, int lane) {
  Piece p = {};
  if constexpr (FLOATS) {
    p.words = make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
  } else {
    u32 high[2] = {0, 0}, low[2] = {0, 0};
    if constexpr (QUANTIZED) {
      // of a row with a NaN codes are anything. By fmaxf, since the compiler divides once for several pieces then
      const float least = fmaxf(most, LARGEST * 1e-12f), scale = STATIC ? most : least / LARGEST;
      const float factor = DIVIDED ? 1.f / scale : LARGEST / least;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float code[2] = {v[j], v[j + 1]};
#pragma unroll
        for (int e = 0; e < 2; e++) code[e] = DIVIDED ? quotient(code[e] * inverse, scale, factor) : code[e] * factor;
        const u32 two = FORMAT == FP8 ? to_float8(code[0], code[1]) : (to_int8(code[0]) & 0xff) | (to_int8(code[1]) & 0xff) << 8;
        high[j / 4] |= two << (8 * (j % 4));
      }
    } else {
      int sum;
      const float peak = integers_of<SHARERS, ADDERS>(v, high, low, sum);
#if FORMAT == BIT_PLANES
      p.group = {sum * (peak * (1.f / LARGEST_INTEGER)), peak * (1.f / LARGEST_INTEGER)};
#else
      p.group = {sum * LARGER, peak * (1.f / LARGEST_INTEGER / LARGER)};  // what the zero point takes out is as large as the sums
#endif
    }
    p.words = make_uint4(high[0], high[1], low[0], low[1]);
  }
  return p;
}
