// x [rows, in] → the order in which vptq_rows.cu's matrix units read it: the norm applied (NORM), or silu(gate) · up of a row that
// has both (GATED), and the columns in their stored order.
//
// packed: [part][stage of 128 columns][8 rows][16 pieces of 8 columns][row][16 bytes]. Piece 4 p + q of a stage, p = 0 … 3, has of
// 64 columns the even (p even) or odd ones of 16 neighbours: 2 j and 2 j + 8 side by side, for j = 0 … 3; those of q = 0, 1, 2, 3
// begin at column 0, 32, 16, 48: how a step of vptq.cu numbers its lanes. Rows that do not exist may hold anything.
//
// Work split: a CTA has one row, for one part where the parts' columns are in different order; a thread 16 columns at a time.
//
// defines: FP16, NORM, GATED, WARPS
#include "common.cuh"

constexpr int THREADS = 32 * WARPS;

DEVICE float silu(float gate) { return __fdividef(gate, 1.f + __expf(-gate)); }

extern "C" __global__ void __launch_bounds__(THREADS) vptq_pack(
    const u16* x, const u16* norm, const u16* source0, const u16* source1, const u16* source2, uint4* packed, float epsilon,
    int in_features, int stored, int groups) {
  __shared__ float squares_of[WARPS];
  const int row = blockIdx.x, part = blockIdx.y, stages = (stored + 127) / 128;
  const u16* const source = part == 0 ? source0 : part == 1 ? source1 : source2;
  launch_dependents();
  wait_for_inputs();
  const u16* const from = x + (size_t)row * in_features * (1 + GATED);
  float factor = 1;
  if (NORM) {
    float squares = 0;
    for (int i = threadIdx.x; i < in_features; i += THREADS) squares += to_float(from[i]) * to_float(from[i]);
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) squares_of[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) squares += squares_of[w];
    factor = rsqrtf(squares / in_features + epsilon);
  }
  const bool whole = !source && in_features % 8 == 0;
  for (int unit = threadIdx.x; unit < stored / 16; unit += THREADS) {
    u16 value[16], up[16], weight[16];
    const auto fetch = [&](u16 (&to)[16], const u16* row) {
      if (whole && 16 * unit + 16 <= in_features) {
        *(uint4*)&to[0] = *(const uint4*)(row + 16 * unit), *(uint4*)&to[8] = *(const uint4*)(row + 16 * unit + 8);
      } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const int column = 16 * unit + i;
          to[i] = source ? row[source[column]] : column < in_features ? row[column] : 0;
        }
      }
    };
    fetch(value, from);
    if (GATED) fetch(up, from + in_features);
    if (NORM) fetch(weight, norm);
    float f[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      f[i] = to_float(value[i]);
      if (GATED) f[i] = silu(f[i]) * to_float(up[i]);
      if (NORM) f[i] *= factor * to_float(weight[i]);
    }
    const int begin = unit % 4, piece = begin >> 1 | (begin & 1) << 1;
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int step = unit / 4 * 2 + odd;
      const size_t place = (((size_t)part * stages + step / 4) * groups + row / 8) * 16 + step % 4 * 4 + piece;
      packed[place * 8 + row % 8] = make_uint4(pack2(f[odd], f[8 + odd]), pack2(f[2 + odd], f[10 + odd]), pack2(f[4 + odd], f[12 + odd]),
                                               pack2(f[6 + odd], f[14 + odd]));
    }
  }
}
