// The parts of the kernels in vptq.cu: the product of one step, and what is staged in shared memory before the first.
#include "vptq_tables.cuh"

#ifndef NORM
#define NORM 0
#endif
#ifndef GATED
#define GATED 0
#endif

// Eight rows of the staged kernel: x is the left operand, brought by `load_matrices` as entries are, so each lane needs the column of
// the item that it looks up itself.
constexpr bool TURNED = ROWS == 8 && KERNEL == 0;
constexpr int SUMS = ROWS * OUTPUTS;             // partial sums of one row block
constexpr int X_BYTES = ROWS == 1 ? 2 : 4;       // of a column in one plane: one row, or a pair of rows
constexpr int PLANES = ROWS == 1 ? 1 : ROWS / 2;

typedef float Accumulators[TURNED ? 1 : ROWS][PIECES][4];

// ---- the product of one step ----
struct Tables {
  u32 book, residual, x;          // shared addresses; residual is this lane's copy
  int plane;                      // bytes from one plane of x to the next
  u32 select0, select1, odd;      // where this lane's x goes in the two registers of its B fragment; odd rows: + odd
  DEVICE Tables(const void* book, const void* residual, const void* x, int plane, int lane)
      : book(shared_address(book)), residual(shared_address(residual) + 16 * (lane % COPIES)), x(shared_address(x)), plane(plane) {
    const u32 here = lane >> 2 & 1 ? 0x1044 : 0x4410;
    select0 = lane >> 3 & 1 ? 0x4444 : here;
    select1 = lane >> 3 & 1 ? here : 0x4444;
    odd = lane >> 2 & 1 ? 0x2200 : 0x0022;
  }
  DEVICE u32 select(int which, int row) const {
    const u32 even = which ? select1 : select0;
    return row % 2 && even != 0x4444 ? even + odd : even;
  }
};
// Where this lane's x of step p lies: in bank `lane`, for one row (two columns a word) and for pairs (two rows a word). TURNED: the
// eight rows of its item's column, those of eight lanes in different banks.
DEVICE u32 x_offset(u32 p, int lane) {
  return TURNED ? p * 512 + lane * 16 : ROWS == 1 ? (p >> 1) * 128 + lane * 4 + (p & 1) * 2 : p * 128 + lane * 4;
}

DEVICE void multiply(Accumulators& acc, const u32 (&a)[PIECES][4], u32 x_at, const Tables& t) {
  if constexpr (TURNED) {  // D [rows of x, and as many that are not used][8 outputs]
    const uint4 x = load_matrices<true>(t.x + x_at);
#pragma unroll
    for (int h = 0; h < PIECES; h++) {
      mma16<FP16>(acc[0][h], x.x, 0, x.y, 0, a[h][0], a[h][1]);
      mma16<FP16>(acc[0][h], x.z, 0, x.w, 0, a[h][2], a[h][3]);
    }
    return;
  }
  u32 x[PLANES];
#pragma unroll
  for (int p = 0; p < PLANES; p++)
    x[p] = ROWS == 1 ? shared_load16(t.x + x_at) : shared_load(t.x + p * t.plane + x_at);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const u32 b0 = __byte_perm(x[r / 2], 0, t.select(0, r)), b1 = __byte_perm(x[r / 2], 0, t.select(1, r));
#pragma unroll
    for (int h = 0; h < PIECES; h++) mma16<FP16>(acc[r][h], a[h][0], a[h][1], a[h][2], a[h][3], b0, b1);
  }
}
DEVICE void take(Accumulators& acc, u32 v, u32 x_at, const Tables& t) {
  u32 a[PIECES][4];
#pragma unroll
  for (int h = 0; h < PIECES; h++) gather(a[h], v, t.book + 16 * h * ENTRIES, t.residual + 16 * h * RES_SLOTS);
  multiply(acc, a, x_at, t);
}
template <int S>
DEVICE void take_chunk(Accumulators& acc, const u32 (&w)[WORDS], u32 first, const Tables& t, int lane) {
  if constexpr (TURNED || OWN) {
    u32 v[CHUNK];
    all_items(v, w);
    const u32 places = TURNED ? places_of(v, lane) : supplied_places(v, lane);
#pragma unroll
    for (int s = 0; s < CHUNK; s++) take(acc, v[s], x_offset(((first + s) & ~(WINDOW - 1)) + (places >> 4 * s & 15), lane), t);
  } else if constexpr (S < CHUNK) {
    const u32 v = item<S>(w);
    take(acc, v, x_offset(((first + S) & ~(WINDOW - 1)) + position(v), lane), t);
    take_chunk<S + 1>(acc, w, first, t, lane);
  }
}
// Outlier columns: 32 of them are one A fragment, laid out by the host.
DEVICE void take_dense(Accumulators& acc, const uint4* fragments, u32 x_at, const Tables& t, int lane) {
  u32 a[PIECES][4];
#pragma unroll
  for (int h = 0; h < PIECES; h++) {
    const uint4 q = stream_load(fragments + 32 * h + lane);
    a[h][0] = q.x, a[h][1] = q.y, a[h][2] = q.z, a[h][3] = q.w;
  }
  multiply(acc, a, x_at, t);
}
// Writes the sums of one row block and clears the accumulators; lane 4 g holds output g.
DEVICE void flush(Accumulators& acc, float* to, int row_stride, int lane) {
  if constexpr (TURNED) {
#pragma unroll
    for (int h = 0; h < PIECES; h++) {
      float (&d)[4] = acc[0][h];
      *(float2*)(to + lane / 4 * row_stride + h * 8 + lane % 4 * 2) = make_float2(d[0], d[1]);
      d[0] = d[1] = 0;
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < (TURNED ? 0 : ROWS); r++)
#pragma unroll
    for (int h = 0; h < PIECES; h++) {
      float (&d)[4] = acc[r][h];
      float sum = lane & 2 ? d[2] + d[3] : d[0] + d[1];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if ((lane & 3) == 0) to[r * row_stride + h * 8 + (lane >> 2)] = sum;
      d[0] = d[1] = d[2] = d[3] = 0;
    }
}

// ---- x ----
struct Inputs {
  const u16 *x, *norm;  // [rows][in_features], GATED: [rows][gate and up, in_features each]; [in_features]
  const u32* affine;    // as in Part
  const u16* source;
  int in_features, rows;
};
struct Eight { u32 affine[8]; uint4 source, norm; };  // of eight neighbouring columns, what depends on no other kernel
DEVICE u32 half_of(const uint4& q, int j) {  // j is a constant once unrolled
  const u32 pair = j < 2 ? q.x : j < 4 ? q.y : j < 6 ? q.z : q.w;
  return j % 2 ? pair >> 16 : pair & 0xffff;
}
DEVICE uint4 load_columns(const u16* from, const Inputs& in, const Eight& e, int column) {
  if (!in.source && column + 8 <= in.in_features && !((size_t)(from + column) & 15)) return *(const uint4*)(from + column);
  u32 value[8];
#pragma unroll
  for (int j = 0; j < 8; j++) value[j] = e.affine[j] ? from[in.source ? half_of(e.source, j) : column + j] : 0;
  return make_uint4(value[0] | value[1] << 16, value[2] | value[3] << 16, value[4] | value[5] << 16, value[6] | value[7] << 16);
}
DEVICE Eight load_eight(const Inputs& in, int column) {
  Eight e;
  *(uint4*)&e.affine[0] = *(const uint4*)(in.affine + column), *(uint4*)&e.affine[4] = *(const uint4*)(in.affine + column + 4);
  if (in.source) e.source = *(const uint4*)(in.source + column);
  if (NORM) e.norm = load_columns(in.norm, in, e, column);
  return e;
}
struct Loaded { uint4 x, up; };
DEVICE Loaded load_x(const Inputs& in, const Eight& e, int row, int column) {
  const u16* x = in.x + (size_t)row * in.in_features * (1 + (GATED > 0));
  Loaded l = {};
  if (row >= in.rows) return l;
  l.x = load_columns(x, in, e, column);
  if (GATED) l.up = load_columns(x + in.in_features, in, e, column);
  return l;
}
struct Sums { float bias, squares; };  // over the columns: of bias · x and of x², for the norm
DEVICE float scaled(const Loaded& l, const Eight& e, int j, Sums& sums) {
  float value = to_float((u16)half_of(l.x, j));
#if GATED
  value = gated<GATED>(value, to_float((u16)half_of(l.up, j)));
#endif
  if (NORM) sums.squares += value * value, value *= to_float((u16)half_of(e.norm, j));
  sums.bias += value * high_float(e.affine[j]);
  return value * low_float(e.affine[j]);
}
// Eight rows, by columns: four of the rows of eight columns are a thread's, which neighbouring warps share.
DEVICE void stage_turned(Sums (&sums)[ROWS], char* to, const Inputs& in, int first, int units) {
  const int half = threadIdx.x / 32 % 2;
  Sums own[4] = {};
  // by whole warps, as the wait wants them
  for (int unit = threadIdx.x / 64 * 32 + threadIdx.x % 32; unit - threadIdx.x % 32 < units; unit += THREADS / 2) {
    Eight e = {};
    if (unit < units) e = load_eight(in, first + 8 * unit);
    wait_for_inputs();
    if (unit >= units) break;
    Loaded l[4];
#pragma unroll
    for (int r = 0; r < 4; r++) l[r] = load_x(in, e, 4 * half + r, first + 8 * unit);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float v[4] = {scaled(l[0], e, j, own[0]), scaled(l[1], e, j, own[1]), scaled(l[2], e, j, own[2]), scaled(l[3], e, j, own[3])};
      const int place = (unit / 8 * 2 + j % 2) * 512 + address_lane(unit % 8 * 4 + j / 2) * 16 + half * 8;
      *(uint2*)(to + place) = make_uint2(pack2(v[0], v[1]), pack2(v[2], v[3]));
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    if (r / 4 == half) sums[r].bias += own[r % 4].bias, sums[r].squares += own[r % 4].squares;
  wait_for_inputs();  // every thread must, also one without a column
}
// Stages stored columns [first, first + count), both whole eights, times their scale and the norm's weights; its factor comes last.
// LINED: pairs of rows lie as x_offset wants them, else one column after the other. Waits for the kernel before once the first
// scales are on their way. `behind`: what is asked for behind the first of x.
template <bool LINED, class BEHIND>
DEVICE void stage_x(Sums (&sums)[ROWS], char* to, int plane, const Inputs& in, int first, int count, BEHIND behind) {
  // eights of a thread on their way, as registers allow
  constexpr int BATCH = THREADS * RESIDENT > 512 || ROWS == 8 ? 1 : ROWS > 1 || NORM ? 2 : 3;
  const int units = count / 8;
  if constexpr (TURNED) {
    behind();
    stage_turned(sums, to, in, first, units);
    return;
  }
  bool asked = false;
  for (int begin = threadIdx.x; begin - threadIdx.x % 32 < units; begin += BATCH * THREADS) {  // whole warps, as the wait wants them
    Eight eights[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
      if (begin + b * THREADS < units) eights[b] = load_eight(in, first + 8 * (begin + b * THREADS));
    wait_for_inputs();
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
      Loaded even[BATCH], odd[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        if (begin + b * THREADS < units) {
          even[b] = load_x(in, eights[b], r, first + 8 * (begin + b * THREADS));
          if constexpr (ROWS > 1) odd[b] = load_x(in, eights[b], r + 1, first + 8 * (begin + b * THREADS));
        }
      if (!asked) behind(), asked = true;
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int unit = begin + b * THREADS;
        if (unit >= units) break;
        u32 w[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float value = scaled(even[b], eights[b], j, sums[r]);
          if constexpr (ROWS > 1) w[j] = pack2(value, scaled(odd[b], eights[b], j, sums[ROWS > 1 ? r + 1 : 0]));
          else w[j / 2] = j % 2 ? w[j / 2] | pack2(0.f, value) : pack2(value, 0.f);
        }
        char* const at = to + r / 2 * plane + (ROWS == 1 ? 16 * unit : LINED ? unit / 8 * 256 + unit % 8 * 16 : 32 * unit);
        constexpr int STEP = LINED && ROWS > 1 ? 2 : 1;
        *(uint4*)at = make_uint4(w[0], w[STEP], w[2 * STEP], w[3 * STEP]);
        if constexpr (ROWS > 1) *(uint4*)(at + (LINED ? 128 : 16)) = LINED ? make_uint4(w[1], w[3], w[5], w[7]) : make_uint4(w[4], w[5], w[6], w[7]);
      }
    }
  }
  if (!asked) behind();
  wait_for_inputs();  // every thread must, also one without a column
}
// The sums over the CTA: `collect` before a __syncthreads, `total` after it, read after another.
struct Totals {
  float bias[ROWS], factor[ROWS];  // of bias · x; the norm's
  Sums of_warp[WARPS][ROWS];
#if SPLIT > 1 && NORM
  float squares[ROWS];  // over this CTA's columns
  DEVICE void norm(int r, float all, int in_features, float epsilon) { factor[r] = rsqrtf(all / in_features + epsilon); }
#endif
  DEVICE void collect(const Sums (&sums)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Sums sum = {warp_sum(sums[r].bias), NORM ? warp_sum(sums[r].squares) : 0.f};
      if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][r] = sum;
    }
  }
  DEVICE void total(int in_features, float epsilon) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
      const Sums mine = lane < WARPS ? of_warp[lane][r] : Sums{0.f, 0.f};
      const float sum = warp_sum(mine.bias), squares = NORM ? warp_sum(mine.squares) : 0.f;
      if (lane == 0) bias[r] = sum, factor[r] = NORM ? rsqrtf(squares / in_features + epsilon) : 1.f;
#if SPLIT > 1 && NORM
      if (lane == 0) this->squares[r] = squares;
#endif
    }
  }
  DEVICE float finish(float sum, int row) const { return (sum + bias[row]) * factor[row]; }
};
struct Outputs {
  const u16 *bias, *rest;  // of the linear, or null: one for an output; what is added to y, in its shape
  u16* y;                  // [rows][width]
  int width, first, outputs, length, rows;  // `outputs` from `first` on are this part's
  DEVICE int place(int block, int inner) const {  // inner counts rows, then outputs of the row block; -1: nobody's
    const int row = inner / OUTPUTS, within = inner % OUTPUTS, output = block * length + within;
    return row < rows && within < length && output < outputs ? row * width + first + output : -1;
  }
  DEVICE float added(int at) const {
    if (at < 0) return 0;
    return (rest ? to_float(rest[at]) : 0.f) + (bias ? to_float(bias[at % width]) : 0.f);
  }
};
