#ifndef CHOOSE_CUH
#define CHOOSE_CUH
// Which experts one token goes to, found by all warps of a thread block: of the router's logits the CHOSEN largest, and their shares.
//
// Shared by route.cu, whose last thread block chooses, and experts.cu (CHOOSES), where every thread block does, since words from one SM
// to all others take longer than the choice.
//
// defines: EXPERTS, CHOSEN, GATE, NORMALIZE, SIGMOID (0), BIASED (0); WARPS is a constant or a define
#ifndef SIGMOID
#define SIGMOID 0
#endif
#ifndef BIASED
#define BIASED 0
#endif
constexpr int OF_WARP = (EXPERTS + WARPS - 1) / WARPS, OF_LANE = (OF_WARP + 31) / 32;  // experts
constexpr int LEADERS = (CHOSEN + WARPS - 1) / WARPS, LISTED = WARPS * LEADERS;         // of a warp, and of all

DEVICE u64 rank(float value, int index) {  // in an order that integers share; the first of equals is the largest
  const u32 bits = __float_as_uint(value), ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (u32)~index;
}
DEVICE float value_of(u64 key) {
  const u32 ordered = (u32)(key >> 32);
  return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}
DEVICE float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// One CTA, one token. Each warp lists its LEADERS largest; of these the CHOSEN-th is a floor, below which nobody is chosen. Who is not
// below it, few as a rule, counts how many others are larger, which is its place. `read` brings the logits of a lane's experts, all
// at once. Shares are there for the first warp.
template <typename Read>
DEVICE void choose_by_warps(Read read, const float* bias, float scale, int* chosen, float* shares, int warp, int lane) {
  static_assert(LISTED <= 32, "a lane for each");
  __shared__ __align__(16) u64 leaders[LISTED], candidates[EXPERTS];
  __shared__ int count;
  __shared__ float values[EXPERTS], best_values[CHOSEN];
  u64 own[OF_LANE], mine = 0;
  int expert[OF_LANE];  // -1: none
  float logit[OF_LANE];
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    const int at = lane + 32 * i, e = warp * OF_WARP + at;
    expert[i] = at < OF_WARP && e < EXPERTS ? e : -1;
  }
  read(expert, logit);
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    const int e = expert[i];
    own[i] = 0;
    if (e < 0) continue;
    const float added = BIASED ? bias[e] : 0.f;
    const float value = SIGMOID ? sigmoid(logit[i]) : logit[i] + added;
    values[e] = value;
    own[i] = rank(SIGMOID ? value + added : value, e);
  }
  u64 left[OF_LANE];
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) left[i] = own[i];
#pragma unroll
  for (int n = 0; n < LEADERS; n++) {
    u64 best = left[0];
#pragma unroll
    for (int i = 1; i < OF_LANE; i++) best = left[i] > best ? left[i] : best;
    const u32 high = __reduce_max_sync(~0u, (u32)(best >> 32));
    const u32 low = __reduce_max_sync(~0u, (u32)(best >> 32) == high ? (u32)best : 0);
    const u64 largest = (u64)high << 32 | low;
    if (lane == n) mine = largest;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
      if (left[i] == largest) left[i] = 0;
  }
  if (lane < LEADERS) leaders[warp * LEADERS + lane] = mine;
  if (threadIdx.x == 0) count = 0;
  named_barrier(1, 32 * WARPS);
  const u64 leader = lane < LISTED ? leaders[lane] : 0;
  int larger = 0;
#pragma unroll
  for (int i = 0; i < LISTED; i++) larger += leaders[i] > leader;
  const u32 last = __reduce_max_sync(~0u, leader && larger == CHOSEN - 1 ? (u32)lane + 1 : 0u);  // 0: there are fewer leaders
  const u64 found = __shfl_sync(~0u, leader, last ? last - 1 : 0), least = last ? found : 1;
#pragma unroll
  for (int i = 0; i < OF_LANE; i++)
    if (own[i] >= least) candidates[atomicAdd(&count, 1)] = own[i];
  named_barrier(1, 32 * WARPS);
  const int total = count;
  for (int t = threadIdx.x; t < total; t += 32 * WARPS) {
    const u64 key = candidates[t];
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < total; i++) before += candidates[i] > key;
    if (before < CHOSEN) {
      const int e = (int)~(u32)key;
      chosen[before] = e;
      best_values[before] = values[e];
    }
  }
  named_barrier(1, 32 * WARPS);
  if (warp > 0) return;
  const float most = best_values[0];
  float share = 0, all = 1;
  if (lane < CHOSEN) share = SIGMOID ? best_values[lane] : __expf(best_values[lane] - most);
  if (NORMALIZE) {
    all = warp_sum(share);
  } else if (!SIGMOID) {
    float sum = 0;
    for (int e = lane; e < EXPERTS; e += 32) sum += __expf(values[e] - most);
    all = warp_sum(sum);
  }
  if (lane < CHOSEN) shares[lane] = share / all * scale;
}
#endif
