// The states of circular trellises that are nearest to given weights (quant/trellis_search.py has the same in torch).
//
//   least[n][o] = min over states s whose lowest bits are o of  |x_n − value(s)|² + least[n + 1][s >> FRESH]
//
// o is what a step shares with the one before it (OVERLAP bits), FRESH what it shares not. From the last step to the first; then the
// states are read off from the first to the last, each found anew among its 2^FRESH, so that the first way keeps no choices.
//
//   circle   1. 2 · REACH steps around the seam, free at both ends: what the seam shares
//            2. all steps, with that shared at both ends
//
// Work split: a CTA takes CIRCLES circles at a time, a thread some overlaps o of all of them: a state's values are read and squared
// once for all. Neighbours have neighbouring o, so that their states lie side by side and they ask for the same least[n + 1].
//
//   least[n + 1] (shared) ─► thread o: for all s of o: 4 multiply-adds, add, min for each circle ─► least[n] (shared, and kept)
//
// Limit: issued instructions, six of them for a state and a circle.
//
// defines: STATE (bits of a state), FRESH (bits a step), STEPS, REACH, CIRCLES (a multiple of 4), THREADS
#include "common.cuh"

#define OVERLAP (STATE - FRESH)
#define OVERLAPS (1 << OVERLAP)
#define BRANCHES (1 << FRESH)
#define ALIKE (FRESH > OVERLAP ? 1 << (FRESH - OVERLAP) : 1)  // neighbouring branches that ask for the same least[n + 1]
#define SIZE (OVERLAPS * CIRCLES)  // of least[n]
#define WARPS (THREADS / 32)
#define FAR 3e38f

struct Four {
  float at[4];
};

DEVICE Four values_of(const uint2* table, int state) {
  const uint2 halves = table[state];
  return {{float_of<true>((u16)halves.x), float_of<true>((u16)(halves.x >> 16)), float_of<true>((u16)halves.y),
           float_of<true>((u16)(halves.y >> 16))}};
}

// What a state costs any circle.
DEVICE float own_cost(const Four& value, const float4 weight) {
  const float w[4] = {weight.x, weight.y, weight.z, weight.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum = fmaf(w[i] * value.at[i], value.at[i], sum);
  return sum;
}

DEVICE float pulled(const Four& value, const float4 pull, float sum) {
  sum = fmaf(value.at[0], pull.x, sum);
  sum = fmaf(value.at[1], pull.y, sum);
  sum = fmaf(value.at[2], pull.z, sum);
  return fmaf(value.at[3], pull.w, sum);
}

struct Circles {
  const uint2* table;
  const float4* pulls;    // [circles][STEPS]: −2 · weight · x
  const float4* weights;  // [STEPS]
  float* kept;            // least, of this CTA: [STEPS][OVERLAPS][CIRCLES]
  int first, count;

  DEVICE const float4* pull(int circle, int step) const {
    const int at = first + circle < count ? first + circle : count - 1;
    return pulls + (size_t)at * STEPS + step;
  }
};

// least[n] of all overlaps from least[n + 1].
DEVICE void go_back(const Circles& all, int step, const float* next, float* least, float* kept) {
  float4 pull[CIRCLES];
#pragma unroll
  for (int c = 0; c < CIRCLES; c++) pull[c] = *all.pull(c, step);
  const float4 weight = all.weights[step];
  for (int o = threadIdx.x; o < OVERLAPS; o += THREADS) {
    float best[CIRCLES];
#pragma unroll
    for (int c = 0; c < CIRCLES; c++) best[c] = FAR;
    for (int branch = 0; branch < BRANCHES; branch += ALIKE) {
      const float4* behind = (const float4*)(next + (((branch << OVERLAP) | o) >> FRESH) * CIRCLES);
      if (ALIKE == 1) {
        const Four value = values_of(all.table, branch << OVERLAP | o);
        const float own = own_cost(value, weight);
#pragma unroll
        for (int c = 0; c < CIRCLES; c += 4) {
          const float4 b = behind[c / 4];
          best[c] = fminf(best[c], pulled(value, pull[c], b.x + own));
          best[c + 1] = fminf(best[c + 1], pulled(value, pull[c + 1], b.y + own));
          best[c + 2] = fminf(best[c + 2], pulled(value, pull[c + 2], b.z + own));
          best[c + 3] = fminf(best[c + 3], pulled(value, pull[c + 3], b.w + own));
        }
      } else {
        float near[CIRCLES];
#pragma unroll
        for (int c = 0; c < CIRCLES; c++) near[c] = FAR;
#pragma unroll 4
        for (int i = 0; i < ALIKE; i++) {
          const Four value = values_of(all.table, (branch + i) << OVERLAP | o);
          const float own = own_cost(value, weight);
#pragma unroll
          for (int c = 0; c < CIRCLES; c++) near[c] = fminf(near[c], pulled(value, pull[c], own));
        }
#pragma unroll
        for (int c = 0; c < CIRCLES; c += 4) {
          const float4 b = behind[c / 4];
          best[c] = fminf(best[c], near[c] + b.x);
          best[c + 1] = fminf(best[c + 1], near[c + 1] + b.y);
          best[c + 2] = fminf(best[c + 2], near[c + 2] + b.z);
          best[c + 3] = fminf(best[c + 3], near[c + 3] + b.w);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < CIRCLES; c += 4) {
      const float4 four = {best[c], best[c + 1], best[c + 2], best[c + 3]};
      *(float4*)(least + o * CIRCLES + c) = four;
      *(float4*)(kept + o * CIRCLES + c) = four;
    }
  }
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
  const float4 pull = *all.pull(circle, step), weight = all.weights[step];
  float cost = FAR;
  int found = 0x7fffffff;
  for (int branch = threadIdx.x % 32; branch < BRANCHES; branch += 32) {
    const int state = branch << OVERLAP | o, rest = state >> FRESH;
    const Four value = values_of(all.table, state);
    const float after = end < 0 ? behind[rest * CIRCLES + circle] : rest == end ? 0.f : FAR;
    const float sum = pulled(value, pull, after + own_cost(value, weight));
    if (sum < cost) {
      cost = sum;
      found = state;
    }
  }
  return lowest_of(cost, found);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    search(const uint2* table, const float4* pulls, const float4* weights, float* kept, int* states, int count) {
  extern __shared__ __align__(128) u8 raw[];
  float* least = (float*)raw;  // [2][SIZE]
  __shared__ int seam[CIRCLES];
  const int warp = threadIdx.x / 32;
  Circles all = {table, pulls, weights, kept + (size_t)blockIdx.x * STEPS * SIZE, 0, count};
  for (all.first = blockIdx.x * CIRCLES; all.first < count; all.first += gridDim.x * CIRCLES) {
    // 1. steps STEPS − REACH … STEPS + REACH − 1 of the circle
    for (int i = threadIdx.x; i < SIZE; i += THREADS) least[2 * REACH % 2 * SIZE + i] = 0;
    __syncthreads();
    for (int n = 2 * REACH - 1; n >= 0; n--) {
      go_back(all, (STEPS - REACH + n) % STEPS, least + (n + 1) % 2 * SIZE, least + n % 2 * SIZE, all.kept + (size_t)n % STEPS * SIZE);
      __syncthreads();
    }
    for (int c = warp; c < CIRCLES; c += WARPS) {
      float cost = FAR;
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
    for (int i = threadIdx.x; i < SIZE; i += THREADS) least[STEPS % 2 * SIZE + i] = i / CIRCLES == seam[i % CIRCLES] ? 0 : FAR;
    __syncthreads();
    for (int n = STEPS - 1; n >= 0; n--) {
      go_back(all, n, least + (n + 1) % 2 * SIZE, least + n % 2 * SIZE, all.kept + (size_t)n * SIZE);
      __syncthreads();
    }
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
