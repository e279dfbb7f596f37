// The states of circular trellises that are nearest to given weights (quant/trellis_search.py has the same in torch).
//
//   least[n][o] = min over states s whose lowest bits are o of  cost_n(s) + least[n + 1][s >> FRESH]
//   cost_n(s) = Σ over the four values v of s:  weight · v² + pull · v,   pull = −2 · weight · x_n
//
// o is what a step shares with the one before it (OVERLAP bits), FRESH what it shares not. From the last step to the first; then the
// states are read off from the first to the last, each found anew among its 2^FRESH, so that the first way keeps no choices.
//
//   circle   1. 2 · REACH steps around the seam, some of them twice, free at both ends: what the seam shares
//            2. all steps, with that shared at both ends
//
// Costs of 16 states for 8 circles are one product of the matrix units. A row: v and v² of a state, v² as a half and its rest, so that
// it is exact; a column: pulls and weights of a circle; what is added: least[n + 1].
//
//   k of a row        0 … 3   4 … 7   8 … 11            12 … 15
//   state             v       –       v² in 11 bits     the rest of v²
//   circle            pulls   0       weights           weights
//
// Work split: a CTA takes CIRCLES circles at a time, a warp some tiles of 16 overlaps o and all states of these, two branches at a
// time: neighbouring rows have neighbouring o, so their values lie side by side and all ask for the same least[n + 1].
//
//   least[n + 1] (shared) ─► two products ─► one minimum of three ─► … ─► least[n] (shared, and kept)
//
// Costs begin above zero, so that they are compared as integers, for which there is a minimum of three.
// Limit: minima, two for a product, and the products.
//
// defines: FP16 = 1, STATE (bits of a state), FRESH (bits a step), STEPS, REACH (fewer than STEPS), CIRCLES (8, 16 or 32), WARPS
#include "common.cuh"

#define OVERLAP (STATE - FRESH)
#define OVERLAPS (1 << OVERLAP)
#define BRANCHES (1 << FRESH)
#define ALIKE (FRESH > OVERLAP ? 1 << (FRESH - OVERLAP) : 1)  // neighbouring branches that ask for the same least[n + 1]
#define SIZE (OVERLAPS * CIRCLES)  // of least[n]
#define THREADS (32 * WARPS)
#define TILES (OVERLAPS / 16 / WARPS)  // of a warp
#define SETS (CIRCLES / 8)
#define FAR 1e30f

struct Circles {
  const u32* table;      // [states][2]: four halves, values / 128
  const uint2* pulls;    // [circles][STEPS]: four halves
  const uint2* weights;  // [STEPS]: four halves
  const float* sizes;    // [circles]: above what all of a circle's costs can fall below zero
  float* kept;           // least, of this CTA: [STEPS][OVERLAPS][CIRCLES]
  int first, count;

  DEVICE int at(int circle) const { return first + circle < count ? first + circle : count - 1; }
  DEVICE uint2 pull(int circle, int step) const { return pulls[(size_t)at(circle) * STEPS + step]; }
};

DEVICE float cost_of(uint2 value, uint2 pull, uint2 weight, float sum) {
  const float v[4] = {low_float(value.x), high_float(value.x), low_float(value.y), high_float(value.y)};
  const float p[4] = {low_float(pull.x), high_float(pull.x), low_float(pull.y), high_float(pull.y)};
  const float w[4] = {low_float(weight.x), high_float(weight.x), low_float(weight.y), high_float(weight.y)};
#pragma unroll
  for (int i = 0; i < 4; i++) sum = fmaf(w[i] * v[i], v[i], fmaf(p[i], v[i], sum));
  return sum;
}

// What a row of states has behind its values: of lanes below `rest` squares, of the others what rounding left of them.
DEVICE u32 squares(u32 pair, u32 rest) {
  const u32 square = mul2(pair, pair);
  return fma2(pair, pair, and_xor(square, rest, 0x80008000));
}

DEVICE int least_of(int a, float b, float c) { return min(min(a, __float_as_int(b)), __float_as_int(c)); }

// least[n] of all overlaps from least[n + 1], in place.
DEVICE void go_back(const Circles& all, int step, float* least, float* kept) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const u32 rest = t < 2 ? 0 : ~0u;
  const uint2 weight = all.weights[step];
  const u32 weights = t % 2 ? weight.y : weight.x;
  u32 pulls[SETS];
#pragma unroll
  for (int n = 0; n < SETS; n++) {
    const uint2 pull = all.pull(8 * n + g, step);
    pulls[n] = t == 0 ? pull.x : t == 1 ? pull.y : 0;
  }
  int best[TILES][SETS][4];
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int n = 0; n < SETS; n++)
#pragma unroll
      for (int q = 0; q < 4; q++) best[i][n][q] = __float_as_int(FAR);

  const int overlap = 16 * TILES * warp;  // the first
  const u32* values = all.table + 2 * (overlap + g) + t % 2;
  float2 behind[2][SETS];
  for (int branch = 0; branch < BRANCHES; branch += 2) {
    if (branch % ALIKE == 0) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int at = ((branch + (ALIKE == 1 ? k : 0)) << OVERLAP | overlap) >> FRESH;
#pragma unroll
        for (int n = 0; n < SETS; n++) behind[k][n] = *(const float2*)(least + at * CIRCLES + 8 * n + 2 * t);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      u32 a[2][4];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const u32* row = values + 2 * (((branch + k) << OVERLAP) + 16 * i);
        a[k][0] = row[0];
        a[k][1] = row[16];
        a[k][2] = squares(a[k][0], rest);
        a[k][3] = squares(a[k][1], rest);
      }
#pragma unroll
      for (int n = 0; n < SETS; n++) {
        float cost[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          cost[k][0] = cost[k][2] = behind[k][n].x;
          cost[k][1] = cost[k][3] = behind[k][n].y;
          mma16<true>(cost[k], a[k][0], a[k][1], a[k][2], a[k][3], pulls[n], weights);
        }
#pragma unroll
        for (int q = 0; q < 4; q++) best[i][n][q] = least_of(best[i][n][q], cost[0][q], cost[1][q]);
      }
    }
  }
  __syncthreads();  // all have read least[n + 1]
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int n = 0; n < SETS; n++)
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const float2 two = {__int_as_float(best[i][n][2 * row]), __int_as_float(best[i][n][2 * row + 1])};
        const int at = (overlap + 16 * i + g + 8 * row) * CIRCLES + 8 * n + 2 * t;
        *(float2*)(least + at) = two;
        *(float2*)(kept + at) = two;
      }
  __syncthreads();
}

// The smallest of a warp's and its number; the lower number where two are alike.
DEVICE int lowest_of(float cost, int number) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const float other = __shfl_xor_sync(0xffffffff, cost, d);
    const int its = __shfl_xor_sync(0xffffffff, number, d);
    if (other < cost || (other == cost && its < number)) {
      cost = other;
      number = its;
    }
  }
  return number;
}

// The best state of a step that begins with overlap o; `end`: what the last step must share, or −1 before it.
DEVICE int best_state(const Circles& all, int circle, int step, int o, const float* behind, int end) {
  const uint2 pull = all.pull(circle, step), weight = all.weights[step];
  float cost = 3e38f;
  int found = 0x7fffffff;
  for (int branch = threadIdx.x % 32; branch < BRANCHES; branch += 32) {
    const int state = branch << OVERLAP | o, rest = state >> FRESH;
    const float after = end < 0 ? behind[rest * CIRCLES + circle] : rest == end ? 0.f : FAR;
    const float sum = cost_of(((const uint2*)all.table)[state], pull, weight, after);
    if (sum < cost) {
      cost = sum;
      found = state;
    }
  }
  return lowest_of(cost, found);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    search(const u32* table, const uint2* pulls, const uint2* weights, const float* sizes, float* kept, int* states, int count) {
  extern __shared__ __align__(128) u8 raw[];
  float* least = (float*)raw;  // [SIZE]
  __shared__ int seam[CIRCLES];
  const int warp = threadIdx.x / 32;
  Circles all = {table, pulls, weights, sizes, kept + (size_t)blockIdx.x * STEPS * SIZE, 0, count};
  for (all.first = blockIdx.x * CIRCLES; all.first < count; all.first += gridDim.x * CIRCLES) {
    // 1. steps STEPS − REACH … STEPS + REACH − 1 of the circle
    for (int i = threadIdx.x; i < SIZE; i += THREADS) least[i] = all.sizes[all.at(i % CIRCLES)];
    __syncthreads();
    for (int n = 2 * REACH - 1; n >= 0; n--) go_back(all, (STEPS - REACH + n) % STEPS, least, all.kept + (size_t)n % STEPS * SIZE);
    for (int c = warp; c < CIRCLES; c += WARPS) {
      float cost = 3e38f;
      int o = 0x7fffffff;
      for (int i = threadIdx.x % 32; i < OVERLAPS; i += 32)
        if (least[i * CIRCLES + c] < cost) {
          cost = least[i * CIRCLES + c];
          o = i;
        }
      o = lowest_of(cost, o);
      for (int n = 0; n < REACH; n++)
        o = best_state(all, c, (STEPS - REACH + n) % STEPS, o, all.kept + (size_t)(n + 1) % STEPS * SIZE, -1) >> FRESH;
      if (threadIdx.x % 32 == 0) seam[c] = o;
    }
    __syncthreads();
    // 2.
    for (int i = threadIdx.x; i < SIZE; i += THREADS)
      least[i] = i / CIRCLES == seam[i % CIRCLES] ? all.sizes[all.at(i % CIRCLES)] : FAR;
    __syncthreads();
    for (int n = STEPS - 1; n >= 0; n--) go_back(all, n, least, all.kept + (size_t)n * SIZE);
    for (int c = warp; c < CIRCLES; c += WARPS) {
      int o = seam[c];
      for (int n = 0; n < STEPS; n++) {
        const int state = best_state(all, c, n, o, all.kept + (size_t)(n + 1) % STEPS * SIZE, n + 1 < STEPS ? -1 : seam[c]);
        if (threadIdx.x % 32 == 0 && all.first + c < count) states[(size_t)(all.first + c) * STEPS + n] = state;
        o = state >> FRESH;
      }
    }
    __syncthreads();
  }
}
