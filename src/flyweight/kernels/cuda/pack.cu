// x [rows, K] → the order in which gemm.cu's matrix units read it; the norm applied, and quantized to 8 bits for W8A8 and float8.
//
// packed.cuh has the order; quantized (QUANTIZE: 1 to int8, 2 to float8) the two columns of 32 inputs hold bytes 8t + 4s … + 3. Rows
// up to a whole tile of tokens repeat the last one. QUANTIZE = 3, for integer weights: two planes of such bytes and scales of every 128
// inputs (gemm_planes.cuh), all planes of a stage, then its scales [group][row], with zero points (SYMMETRIC = 0) followed by c.
//
// Work split: a thread takes 8 neighbouring inputs at a time. ROWS = 8: a warp has 32 inputs of 8 rows (lane 4 · row + t), so
// that each of its stores is a line of 128 bytes, and a CTA 8 whole rows. ROWS = 4 or 2: parts of lines, but more CTAs on an SM,
// of which one writes while another reads. ROWS = 1, for few rows: a CTA has one row, or its PARTS write a part each, since a
// store then begins 8 lines. Without norm and quantization nothing is to be known of a whole row: of 8 rows PARTS CTAs read and
// write a part each, as many warps as the GPU has room for.
// Threads keep what they read in registers between the sum over the row and the writing where that fits (KEPT).
// Limit: bytes read and written / bandwidth, and instructions, which hardly overlap with them: few CTAs fit on an SM, and all begin
// at once. For few rows latency.
//
// TILE: rows go to experts (route.cu). There are as many as `tiles` of TILE rows, and row r is row source[r] of x, zeros where
// that is -1; source may be missing where x lies in this order already.
//
// defines: FP16, KDIM, SB, NORM, QUANTIZE, STATIC (0: a scale for each row), SYMMETRIC (0), ORDER, ROWS, WARPS, PARTS (1), TILE (0)
#include "common.cuh"
#include "packed.cuh"
#include "integers.cuh"
#ifndef TILE
#define TILE 0
#endif
#ifndef PARTS
#define PARTS 1
#endif

#ifndef SYMMETRIC
#define SYMMETRIC 0
#endif
constexpr bool PLANES = QUANTIZE == 3, SCALED = QUANTIZE && !PLANES;  // by the row
constexpr bool LOOKED = NORM || SCALED;                       // at all of a row
constexpr int EIGHTS = (KDIM + 63) / 64 * 8;                  // of a row
constexpr int PART = LOOKED ? EIGHTS : EIGHTS / PARTS;        // of those, what a CTA reads
constexpr int THREADS = WARPS * 32, TEAM = THREADS / ROWS;    // threads of a row
constexpr int HELD = (PART + TEAM - 1) / TEAM;                // eights of a thread
static_assert(PARTS == 1 || (LOOKED ? PARTS <= HELD : PART * PARTS == EIGHTS && PART % TEAM == 0), "none is empty, and all are even");
constexpr bool KEPT = HELD <= 16;
constexpr bool EARLY = NORM && ROWS <= 2 && KEPT;             // the norm's weights, long out of L2, are fetched while x is still made
#ifndef STATIC
#define STATIC 0
#endif
constexpr float LARGEST = QUANTIZE == 2 ? 448.f : 127.f;      // code
constexpr bool DIVIDED = STATIC || QUANTIZE == 2;             // codes are x / scale, not x · (largest / most)

struct Eight {
  u32 word[4];
  DEVICE float value(int i) const { return i & 1 ? high_float(word[i / 2]) : low_float(word[i / 2]); }
};
constexpr bool WHOLE_EIGHTS = KDIM % 64 == 0 && PART % TEAM == 0;  // no thread looks beyond its row
DEVICE Eight read_eight(const u16* row, int eight, bool exists) {
  const uint4 w = exists && (WHOLE_EIGHTS || eight * 8 < KDIM) ? *(const uint4*)(row + eight * 8) : make_uint4(0, 0, 0, 0);
  return {{w.x, w.y, w.z, w.w}};
}
// Four codes of the eight inputs from `first` on. Rounding by addition: conversions to integers run at a sixteenth rate.
DEVICE u32 codes_of(const float (&f)[8], int first, float scale, float factor) {
  float code[4];
#pragma unroll
  for (int i = 0; i < 4; i++) code[i] = DIVIDED ? quotient(f[first + i], scale, factor) : __fmul_rn(f[first + i], factor);
  if (QUANTIZE == 2) return to_float8(code[0], code[1]) | to_float8(code[2], code[3]) << 16;
  u32 bits[4];
#pragma unroll
  for (int i = 0; i < 4; i++)  // beyond 8 bits with a static scale only
    bits[i] = __float_as_uint(__fadd_rn(STATIC ? fminf(fmaxf(code[i], -128.f), 127.f) : code[i], 12582912.f));  // 1.5 · 2^23
  return bytes_of<0>(bits);
}

static_assert(!PLANES || (ROWS == 1 && SB % 2 == 0 && KDIM % 128 == 0 && TEAM % 16 == 0 && !TILE), "16 lanes have a group");

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= (ROWS == 8 ? 256 : 384) ? 2 : 1)
pack(const u16* X, const u16* norm, u32* packed, float* row_scale, int rows, int groups, float epsilon, const float* static_scale,
     const int* source, const int* tiles) {
  __shared__ float2 stats[WARPS][ROWS];
  constexpr int LANES = 32 / ROWS;  // of a row
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane / LANES;
  const int row = blockIdx.x / PARTS * ROWS + place, part = blockIdx.x % PARTS;
  const int thread = (LOOKED ? 0 : part * PART) + warp * LANES + lane % LANES;  // of the row's
  launch_dependents();
  Eight weights[EARLY ? HELD : 1];
#pragma unroll
  for (int p = 0; p < (EARLY ? HELD : 0); p++) weights[p] = read_eight(norm, thread + p * TEAM, true);
  wait_for_inputs();
  int from_row = min(row, rows - 1);
  if (TILE) {
    rows = tiles[0] * TILE, from_row = row;
    if (blockIdx.x / PARTS * ROWS >= rows) return;
    if (source) from_row = source[row];
  }
  const u16* from = X + (size_t)from_row * KDIM;
  const bool exists = !TILE || from_row >= 0;
  Eight kept[KEPT ? HELD : 1];
#pragma unroll
  for (int p = 0; p < (KEPT ? HELD : 0); p++) kept[p] = read_eight(from, thread + p * TEAM, exists);
  float factor = 1, scale = 1, inverse = 1, most = 0, squares = 0;
  auto normed = [&](const Eight& x, int p, float (&f)[8], float by) {
    Eight weight;
    if (NORM) weight = EARLY ? weights[p] : read_eight(norm, thread + p * TEAM, true);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = x.value(i) * (NORM ? weight.value(i) * by : by);
  };
  if (NORM || (SCALED && !STATIC)) {
    u32 pair = 0;  // without signs and norm the largest of 16-bit floats is that of their bits
    auto look = [&](const Eight& x, int p) {
      if constexpr (NORM) {
        float f[8];
        normed(x, p, f, 1.f);
#pragma unroll
        for (int i = 0; i < 8; i++) most = largest(most, fabsf(f[i])), squares += x.value(i) * x.value(i);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) pair = __vmaxu2(pair, x.word[i] & 0x7fff7fff);
      }
    };
#pragma unroll
    for (int p = 0; p < (KEPT ? HELD : 0); p++) look(kept[p], p);
    for (int p = 0; p < (KEPT ? 0 : HELD); p++) look(read_eight(from, thread + p * TEAM, exists), p);
    if (!NORM) most = largest(low_float(pair), high_float(pair));
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) {
      squares += __shfl_xor_sync(~0u, squares, o);
      most = largest(most, __shfl_xor_sync(~0u, most, o));
    }
    if (lane == LANES * place) stats[warp][place] = make_float2(squares, most);
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) squares += stats[i][place].x, most = largest(most, stats[i][place].y);
    factor = NORM ? rsqrtf(squares / KDIM + epsilon) : 1.f;
  }
  if (SCALED) {
    scale = STATIC ? *static_scale : largest(most, LARGEST * 1e-12f) / LARGEST;
    if (part == 0 && thread == 0 && row < rows) row_scale[row] = STATIC ? scale : scale * factor;
    inverse = STATIC ? factor : 1.f;
    factor = DIVIDED ? 1.f / scale : LARGEST / largest(most, LARGEST * 1e-12f);
  }
  // Where a thread's eights are whole stages apart, so are their places.
  constexpr int own = QUANTIZE ? 2 : 4;  // columns that the 32 inputs around an eight fill
  constexpr bool even = TEAM % (8 * SB) == 0;
  u32* const first = packed + packed_place<SB, own>(row, thread / 4, groups) * 4 + thread % 4;
  const size_t step = (size_t)(TEAM / (8 * SB)) * groups * (2 * SB * own * 8 * 4);
  auto write_planes = [&](const Eight& x, int p, int eight) {
    float f[8];
    normed(x, p, f, 1.f);
    u32 high[2], low[2];
    int sum;
    const float peak = integers_of<16>(f, high, low, sum);
    if (!WHOLE_EIGHTS && eight >= EIGHTS) return;
    constexpr int plane = 2 * SB * own * 8 * 4, stage_groups = SB / 2;  // words of 8 rows in a stage; groups of inputs
    const int count = groups * 4, stage = eight / (8 * SB);             // rows, with those up to a whole tile
    u32* const behind = packed + (size_t)stage * stage_groups * count * 2;  // the scales of the stages before
    u32* const to = behind + packed_place<SB, own>(row, eight / 4, groups) * 4 + eight % 4;
#pragma unroll
    for (int s = 0; s < 2; s++) to[32 * s] = high[s], to[32 * s + groups / 2 * plane] = low[s];
    if (lane % 16) return;
    const float scale = peak * (1 / LARGEST_INTEGER) * factor;
    u32* const scales = behind + (size_t)(stage + 1) * groups * plane;
    const int place = eight / 16 % stage_groups * count + row;
    if (SYMMETRIC) ((float*)scales)[place] = scale;
    else ((float2*)scales)[place] = make_float2(scale, -scale * sum);
  };
  auto write = [&](const Eight& x, int p) {
    const int eight = thread + p * TEAM, t = eight % 4;
    if ((!WHOLE_EIGHTS && !PLANES && eight >= EIGHTS) || (LOOKED && p % PARTS != part)) return;
    if constexpr (PLANES) return write_planes(x, p, eight);
    u32* to = even ? first + p * step : packed + packed_place<SB, own>(row, eight / 4, groups) * 4 + t;
    float f[8];
    if (NORM || QUANTIZE) normed(x, p, f, QUANTIZE ? inverse : factor);
    if constexpr (QUANTIZE) {
#pragma unroll
      for (int s = 0; s < 2; s++) to[32 * s] = codes_of(f, 4 * s, scale, factor);
    } else {
      u32 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = NORM ? pack2(f[2 * i], f[2 * i + 1]) : x.word[i];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int four = 2 * t + i / 2;  // of the 32 inputs
        if (ORDER == 2) to[32 * (four % 4) + four / 4 * 2 + i % 2 - t] = v[i];
        else to[32 * i] = ORDER == 0 ? v[i] : __byte_perm(v[i / 2 * 2], v[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
      }
    }
  };
#pragma unroll
  for (int p = 0; p < (KEPT ? HELD : 0); p++) write(kept[p], p);
  for (int p = 0; p < (KEPT ? 0 : HELD); p++) write(read_eight(from, thread + p * TEAM, exists), p);
}
