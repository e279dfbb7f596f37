// The two ends of a layer of experts: which expert gets which token, and the sum of what they made of it.
//
//   route     logits = router · norm(x), shares = the CHOSEN largest of softmax(logits), and a place for each (token, choice)
//   combine   out[t] = residual[t] + sum_j share[t, j] · y[place[t, j]]  (+ gate[t] · shared[t]); RESIDUAL 0: without the first term
//   place_chosen   the places alone, of experts and shares that somebody else has chosen
//
// SIGMOID: shares are the experts' own sigmoid(logit). BIASED: a number for each expert, added to its logit, or (SIGMOID) to
// its share for the choice alone. GROUPS: experts in as many equal groups, of which CHOSEN_GROUPS are looked into: those with the
// largest sums of their two best (SIGMOID), or with the largest of all. NORMALIZE: shares of a token add up to 1. All shares are multiplied by `scale` in the end.
// SHARED: there is an expert for all tokens, counted by its gate (GATE) or whole.
//
// Work split of route: a CTA has ROWS tokens, normed, in registers and some rows of the router, which come through shared memory,
// RING at a time: of few tokens all that a CTA has, before its inputs are there. The last CTA of those tokens chooses their experts, a warp a token; the last of these lays the tiles of the
// grouped product out, TILE rows of one expert each. An expert has as many tiles as its tokens fill, and rows that nobody fills
// have source -1; or (BY_TOKEN, for few tokens) one tile, row t being token t. Tokens of an expert come in any order: no product
// depends on its neighbours. The router and all sums are float32; x is normed and rounded as the other kernels do it. The gate of
// the shared expert is the router's last row. Rows of length 0 are nobody's: they go to no expert (their shares are 0), but for
// the first, so that there is a tile.
// LOGITS_ALONE (one token): logits are all that is left, as words that are their own flags, for experts.cu to choose by.
// One token (ROWS 1, BY_TOKEN) needs no such order: its j-th choice is tile j; of many experts all warps of the CTA choose. JOINED: the shared expert, which lies behind the others,
// then is as many choices more as it is as large as one of them, and the experts' own linears multiply it too.
// combine adds in the order of the choices: the same bits every time. It also takes the number of tiles down to 0, which is
// how experts.cu knows that it is looking at this layer's own: it fetches weights before the kernels between are done.
// Limit: latency; of route with many tokens reads of shared memory, of combine bytes / bandwidth.
//
// Of few tokens both stand between kernels that take half an SM each and work at one pace only where every SM has one CTA of
// each. The host therefore reserves shared memory for them, and registers are held to half an SM's: else an SM that is left
// early gets two CTAs of the next kernel and another none.
//
// defines: FP16, KDIM, EXPERTS, CHOSEN, GATE, SHARED (GATE), NORMALIZE, SIGMOID (0), BIASED (0), GROUPS (1), CHOSEN_GROUPS (1), ROWS,
// TILE, BY_TOKEN, JOINED (0), RING (2), RESIDUAL (1), LOGITS_ALONE (0: else RING rows are all that a CTA has)
#include "common.cuh"
#include "patience.cuh"

#ifndef GROUPS
#define GROUPS 1
#define CHOSEN_GROUPS 1
#endif
#ifndef SHARED
#define SHARED GATE
#endif
#ifndef JOINED
#define JOINED 0
#endif
#ifndef RING
#define RING 2
#endif
#ifndef RESIDUAL
#define RESIDUAL 1
#endif
#ifndef LOGITS_ALONE
#define LOGITS_ALONE 0
#endif
constexpr int THREADS = 256, WARPS = 8, OUTPUTS = EXPERTS + GATE;
#include "choose.cuh"
constexpr int PER_ROW = WARPS / ROWS, PIECES = KDIM / 8;  // warps of a token; 8 inputs each
constexpr int PER_LANE = (PIECES + PER_ROW * 32 - 1) / (PER_ROW * 32);
constexpr int OWN = (EXPERTS + 31) / 32;  // experts of a lane
constexpr int AHEAD = 8;                  // pairs that a thread reads at a time where there are many
constexpr int PER_GROUP = EXPERTS / GROUPS;
constexpr int CHOICES = CHOSEN + JOINED;
constexpr bool ALONE = ROWS == 1 && BY_TOKEN;  // one token
constexpr bool BY_WARPS = ALONE && GROUPS == 1 && EXPERTS >= 256 && LISTED <= 32;  // one warp would take long
static_assert(!LOGITS_ALONE || ALONE, "of one token alone");
static_assert(KDIM % 8 == 0 && CHOICES <= 32 && CHOSEN <= EXPERTS, "sizes");
static_assert(!JOINED || (!SHARED && TILE == 1) || !BY_TOKEN, "of one token alone");
static_assert(EXPERTS % GROUPS == 0 && GROUPS <= 32 && CHOSEN <= CHOSEN_GROUPS * PER_GROUP, "groups");

struct Piece {
  float v[8];
};
DEVICE Piece unpack(uint4 p) {
  return {low_float(p.x), high_float(p.x), low_float(p.y), high_float(p.y), low_float(p.z), high_float(p.z), low_float(p.w), high_float(p.w)};
}
DEVICE u32 normed(u32 pair, u32 factors, float inverse) {
  const u32 scaled = pack2(low_float(pair) * inverse, high_float(pair) * inverse);
  return pack2(low_float(scaled) * low_float(factors), high_float(scaled) * high_float(factors));
}
// True in all threads of the CTA that comes last of `count`. The counter is zero again then.
DEVICE bool is_last(u32* arrived, int count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, count - 1) == count - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// One warp: the keys of experts outside the best groups become 0, which ranks after all others.
DEVICE void keep_groups(u64* keys, int lane) {
  float best = LOWEST, second = LOWEST;
  if (lane < GROUPS)
    for (int i = 0; i < PER_GROUP; i++) {
      const float value = value_of(keys[lane * PER_GROUP + i]);
      second = fmaxf(second, fminf(best, value)), best = fmaxf(best, value);
    }
  const u64 own = rank(SIGMOID && PER_GROUP > 1 ? best + second : best, lane);
  int before = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) before += __shfl_sync(~0u, own, g) > own;
  u32 kept = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) kept |= (u32)(__shfl_sync(~0u, before, g) < CHOSEN_GROUPS) << g;
  for (int e = lane; e < EXPERTS; e += 32)
    if (!(kept >> e / PER_GROUP & 1)) keys[e] = 0;
  __syncwarp();
}

// One warp, one token: the CHOSEN largest, one after the other.
DEVICE void choose(const float* logits, const float* bias, float scale, u64* keys, int* chosen, float* shares, float* gate, int lane) {
  float value[OWN], most = LOWEST, sum = 0, kept = 0;
  u64 own[OWN];
  int before[OWN];  // its place among the chosen
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int e = lane + 32 * i;
    const float added = BIASED && e < EXPERTS ? bias[e] : 0.f;
    value[i] = e < EXPERTS ? __ldcg(logits + e) + (SIGMOID ? 0.f : added) : LOWEST;
    most = fmaxf(most, value[i]);
    if (SIGMOID && e < EXPERTS) value[i] = sigmoid(value[i]);
    if (e < EXPERTS) keys[e] = rank(SIGMOID ? value[i] + added : value[i], e);
  }
  most = warp_max(most);
  __syncwarp();
  if (GROUPS > 1) keep_groups(keys, lane);
#pragma unroll
  for (int i = 0; i < OWN; i++) own[i] = lane + 32 * i < EXPERTS ? keys[lane + 32 * i] : 0, before[i] = -1;
#pragma unroll 1
  for (int place = 0; place < CHOSEN; place++) {
    u64 best = own[0];
#pragma unroll
    for (int i = 1; i < OWN; i++) best = own[i] > best ? own[i] : best;
    const u32 high = __reduce_max_sync(~0u, (u32)(best >> 32));
    const u32 low = __reduce_max_sync(~0u, (u32)(best >> 32) == high ? (u32)best : 0);
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (own[i] == ((u64)high << 32 | low)) before[i] = place, own[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (!SIGMOID) value[i] = __expf(value[i] - most);
    sum += value[i];
    if (before[i] >= 0) kept += value[i];
  }
  const float all = NORMALIZE || !SIGMOID ? warp_sum(NORMALIZE ? kept : sum) : 1.f;
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (before[i] >= 0) chosen[before[i]] = lane + 32 * i, shares[before[i]] = value[i] / all * scale;
  if (GATE && lane == 0) *gate = sigmoid(__ldcg(logits + EXPERTS));
}

// One CTA: use(pair, expert), AHEAD reads at a time.
template <typename Use> DEVICE void each_pair(const int* chosen, int pairs, Use use) {
  for (int first = threadIdx.x; first < pairs; first += AHEAD * THREADS) {
    int expert[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) expert[i] = first + i * THREADS < pairs ? __ldcg(chosen + first + i * THREADS) : -1;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (first + i * THREADS < pairs) use(first + i * THREADS, expert[i]);
  }
}

// One CTA: from the experts of all pairs to places, sources, and the expert of each tile.
DEVICE void arrange(const int* chosen, int* place, int* source, int* expert_of, int* tiles, int pairs) {
  __shared__ int counts[EXPERTS], begins[EXPERTS], taken[EXPERTS], total;
  const int lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = taken[e] = 0;
  __syncthreads();
  each_pair(chosen, pairs, [&](int, int e) {
    if (e >= 0) atomicAdd(&counts[e], 1);
  });
  __syncthreads();
  auto tiles_of = [&](int e) { return e >= EXPERTS ? 0 : BY_TOKEN ? counts[e] > 0 : (counts[e] + TILE - 1) / TILE; };
  if (threadIdx.x < 32) {
    int mine = 0, before;
    for (int i = 0; i < OWN; i++) mine += tiles_of(lane * OWN + i);
    before = mine;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int other = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before += other;
    }
    if (lane == 31) total = before;
    before -= mine;
    for (int i = 0; i < OWN && lane * OWN + i < EXPERTS; i++) begins[lane * OWN + i] = before, before += tiles_of(lane * OWN + i);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS)
    for (int i = 0; i < tiles_of(e); i++) expert_of[begins[e] + i] = e;
  if (BY_TOKEN) {  // experts.cu waits for no more than this
    __threadfence();
    __syncthreads();
  }
  if (threadIdx.x == 0) store_release(tiles, total);
  each_pair(chosen, pairs, [&](int i, int e) {
    const int at = e < 0 ? 0 : begins[e] * TILE + (BY_TOKEN ? i / CHOSEN : atomicAdd(&taken[e], 1));
    place[i] = at;
    if (!BY_TOKEN && e >= 0) source[at] = i / CHOSEN;
  });
  for (int i = threadIdx.x; i < (BY_TOKEN ? 0 : EXPERTS * TILE); i += THREADS) {  // the empty rows of last tiles
    const int e = i / TILE, last = tiles_of(e) - 1;
    if (last >= 0 && last * TILE + i % TILE >= counts[e]) source[(begins[e] + last) * TILE + i % TILE] = -1;
  }
}

struct RouteShared {
  float4 weights[RING][2][PIECES];  // of the router: this row and those after it, the halves of pieces apart, so that lanes are neighbours
  uint4 norm[PIECES];
};

// arrived [token groups + 1] is zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, PER_LANE <= 16 ? 2 : 1)
route(const u16* X, const u16* norm, const float* router, float* logits, int* chosen, float* shares, float* gates, int* place, int* source,
      int* expert_of, int* tiles, u32* arrived, const int* lengths, const float* bias, int tokens, float epsilon, float scale
      LAUNCH_ARGUMENTS) {
  BEGIN_LAUNCH;
  extern __shared__ __align__(128) u8 raw[];
  RouteShared& sh = *(RouteShared*)raw;
  __shared__ float squares_of[WARPS], sums[2][WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / PER_ROW, part = warp % PER_ROW;
  const int token = blockIdx.y * ROWS + row;
  launch_dependents();
  auto fetch = [&](int output, int to) {
    for (int i = threadIdx.x; i < 2 * PIECES; i += THREADS)
      copy_piece(&sh.weights[to][i % 2][i / 2], (const float4*)(router + (size_t)output * KDIM) + i);
  };
  if (blockIdx.x < OUTPUTS) {
#pragma unroll
    for (int i = 0; i < RING; i++)
      if (blockIdx.x + i * gridDim.x < OUTPUTS) fetch(blockIdx.x + i * gridDim.x, i);
    for (int i = threadIdx.x; i < PIECES; i += THREADS) copy_piece(&sh.norm[i], (const uint4*)norm + i);
    copy_group();
  }
  wait_for_inputs();
  if (LOGITS_ALONE && blockIdx.x >= OUTPUTS) return count_launch();
  if (blockIdx.x >= OUTPUTS) {  // here, and to the end, only so that the next kernel finds all SMs alike
    Patience patience;
    while (BY_TOKEN && threadIdx.x == 0 && !load_acquire(tiles)) patience.poll();
    return count_launch();
  }
  uint4 x[PER_LANE];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int piece = (i * PER_ROW + part) * 32 + lane;
    x[i] = piece < PIECES && token < tokens ? ((const uint4*)(X + (size_t)token * KDIM))[piece] : make_uint4(0, 0, 0, 0);
    const Piece p = unpack(x[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += p.v[j] * p.v[j];
  }
  squares = warp_sum(squares);
  if (lane == 0) squares_of[warp] = squares;
  copy_wait<0>();
  __syncthreads();
  squares = 0;
#pragma unroll
  for (int i = 0; i < PER_ROW; i++) squares += squares_of[row * PER_ROW + i];
  const float inverse = rsqrtf(squares / KDIM + epsilon);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const uint4 f = sh.norm[min((i * PER_ROW + part) * 32 + lane, PIECES - 1)];
    x[i] = make_uint4(normed(x[i].x, f.x, inverse), normed(x[i].y, f.y, inverse), normed(x[i].z, f.z, inverse), normed(x[i].w, f.w, inverse));
  }
  auto add_products = [&](float& sum, int i, int slot) {
    const int piece = min((i * PER_ROW + part) * 32 + lane, PIECES - 1);  // x is 0 beyond the last
    const Piece p = unpack(x[i]);
    const float4 a = sh.weights[slot][0][piece], b = sh.weights[slot][1][piece];
    const float w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 8; j++) sum += p.v[j] * w[j];
  };
#if LOGITS_ALONE  // all rows of this CTA are here: warps meet once
  __shared__ float all_sums[RING][WARPS];
  float own_sums[RING];
#pragma unroll
  for (int n = 0; n < RING; n++) {
    own_sums[n] = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) add_products(own_sums[n], i, n);
  }
#pragma unroll
  for (int n = 0; n < RING; n++) own_sums[n] = warp_sum(own_sums[n]);
#pragma unroll
  for (int n = 0; n < RING; n++)
    if (lane == 0) all_sums[n][warp] = own_sums[n];
  __syncthreads();
  const int written = blockIdx.x + threadIdx.x * gridDim.x;
  if (threadIdx.x < RING && written < OUTPUTS) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += all_sums[threadIdx.x][i];
    store_relaxed(logits + written, sum);
  }
  return end_launch(THREADS);
#endif
  for (int output = blockIdx.x, turn = 0, slot = 0; output < OUTPUTS; output += gridDim.x, turn ^= 1) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) add_products(sum, i, slot);
    sum = warp_sum(sum);
    if (lane == 0) sums[turn][warp] = sum;
    copy_wait<0>();
    __syncthreads();  // all have added up, and the next row is here
    if (output + RING * gridDim.x < OUTPUTS) fetch(output + RING * gridDim.x, slot);
    copy_group();
    if (++slot == RING) slot = 0;
    if (threadIdx.x < ROWS && blockIdx.y * ROWS + threadIdx.x < tokens) {
      sum = 0;
#pragma unroll
      for (int i = 0; i < PER_ROW; i++) sum += sums[turn][threadIdx.x * PER_ROW + i];
      logits[(size_t)(blockIdx.y * ROWS + threadIdx.x) * OUTPUTS + output] = sum;
    }
  }
  if (!is_last(arrived + blockIdx.y, min((int)gridDim.x, OUTPUTS))) return count_launch();
  const int own = blockIdx.y * ROWS + warp;
  __shared__ u64 keys[BY_WARPS ? 1 : ROWS][BY_WARPS ? 1 : EXPERTS];
  if (ALONE) {
    if constexpr (BY_WARPS) {
      auto read = [&](const int (&expert)[OF_LANE], float (&logit)[OF_LANE]) {
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) logit[i] = expert[i] < 0 ? 0.f : __ldcg(logits + expert[i]);
      };
      choose_by_warps(read, bias, scale, expert_of, shares, warp, lane);
      if (GATE && threadIdx.x == 0) *gates = sigmoid(__ldcg(logits + EXPERTS));
    }
    if (warp > 0) return;
    if constexpr (!BY_WARPS) choose(logits, bias, scale, keys[0], expert_of, shares, gates, lane);
    if (lane < CHOICES) place[lane] = lane;
    if (lane < JOINED) {
      expert_of[CHOSEN + lane] = EXPERTS + lane;
      shares[CHOSEN + lane] = GATE ? sigmoid(__ldcg(logits + EXPERTS)) : 1.f;
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) store_release(tiles, CHOICES);  // experts.cu waits for no more than this
    return count_launch();
  }
  if (warp < ROWS && own < tokens && lengths && own && !lengths[own]) {
    if (lane < CHOSEN) chosen[own * CHOSEN + lane] = -1, shares[own * CHOSEN + lane] = 0;
    if (GATE && lane == 0) gates[own] = 0;
  } else if (warp < ROWS && own < tokens)
    choose(logits + (size_t)own * OUTPUTS, bias, scale, keys[warp], chosen + own * CHOSEN, shares + own * CHOSEN, gates + own, lane);
  __syncthreads();
  if (gridDim.y == 1 || is_last(arrived + gridDim.y, gridDim.y)) arrange(chosen, place, source, expert_of, tiles, tokens * CHOSEN);
  end_launch(THREADS);
}

// One CTA, which nothing may overlap on its front: experts.cu must find `tiles` 0 until all is arranged. An expert below 0 is
// another GPU's; where all are, expert 0 gets a tile that nobody looks at, since the kernels after this one wait for some.
extern "C" __global__ void __launch_bounds__(THREADS)
place_chosen(const int* chosen, const float* given, float* shares, int* place, int* source, int* expert_of, int* tiles, int tokens
             LAUNCH_ARGUMENTS) {
  BEGIN_LAUNCH;
  launch_dependents();
  wait_for_inputs();
  __shared__ int own;
  if (threadIdx.x == 0) own = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < tokens * CHOSEN; i += THREADS) {
    const bool here = chosen[i] >= 0;
    shares[i] = here ? given[i] : 0.f;
    if (here) own = 1;
  }
  __syncthreads();
  if (own) {
    arrange(chosen, place, source, expert_of, tiles, tokens * CHOSEN);
    return end_launch(THREADS);
  }
  for (int i = threadIdx.x; i < tokens * CHOSEN; i += THREADS) place[i] = 0;
  for (int i = threadIdx.x; i < (BY_TOKEN ? 0 : TILE); i += THREADS) source[i] = -1;
  if (threadIdx.x == 0) expert_of[0] = 0;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(tiles, 1);
  end_launch(THREADS);
}

// Two outputs a thread, CTAs striding over all of them.
extern "C" __global__ void __launch_bounds__(THREADS)
combine(const u16* y, const int* place, const float* shares, const u16* shared, const float* gates, const u16* residual, u16* out,
        int* tiles, int tokens LAUNCH_ARGUMENTS) {
  BEGIN_LAUNCH;
  launch_dependents();
  wait_for_inputs();
  if (blockIdx.x == 0 && threadIdx.x == 0) tiles[0] = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < tokens * (KDIM / 2); i += gridDim.x * THREADS) {
    const int token = i / (KDIM / 2), column = i % (KDIM / 2);
    const u32 old = RESIDUAL ? ((const u32*)residual)[i] : 0;
    float low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < CHOICES; j++) {
      const u32 pair = ((const u32*)y)[(size_t)place[token * CHOICES + j] * (KDIM / 2) + column];
      const float share = shares[token * CHOICES + j];
      low += share * low_float(pair), high += share * high_float(pair);
    }
    if (SHARED) {
      const u32 pair = ((const u32*)shared)[i];
      const float gate = GATE ? gates[token] : 1.f;
      low += gate * low_float(pair), high += gate * high_float(pair);
    }
    ((u32*)out)[i] = pack2(low_float(old) + low, high_float(old) + high);
  }
  end_launch(THREADS);
}
