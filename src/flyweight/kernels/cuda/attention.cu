// One new token of each sequence: q/k norm, rope, KV write, and attention over the paged cache, in one kernel.
//
//   q, k = rope(norm(qkv)),  cache[position] = k, v,  out = softmax(q · Kᵀ · scale) · V
//
// Work split: an item is a run of tokens of one kv head of one sequence; the G query heads that share the kv head stay
// together, so the cache is read once. Runs merge in global memory, where the last to arrive adds them up.
// The grid is padded to one CTA for every SM, and takes so much shared memory that no SM holds two: the linear that
// follows fills an SM wherever it finds room, so the room must be the same everywhere.
//
//      split:   | warp 0: 4 tokens | warp 1: 4 tokens | … | warp 0 | …       a lane holds 8 of head_dim
//
// The split that owns the newest token takes its key and value from shared memory, not from the cache it writes.
// Limit: bytes of KV / bandwidth for long contexts, latency for short ones. Lengths, tables, rope and the first older
// tokens of the cache are read before the wait: what wrote them ended before this step began (a step's only write is the
// newest token, which nobody reads back), so the kernel just before this one cannot touch them.
//
// PACKED: results are written in the order of the product that follows (packed.cuh): its SB, and its ORDER.
//
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAGE, QK_NORM, WINDOW, WARPS, SHORTEST, PACKED (0), ORDER (0)
#ifndef PACKED
#define PACKED 0
#define ORDER 0
#endif
#include "attention.cuh"
#include "packed.cuh"

constexpr int LANES = HEAD_DIM / 8;     // lanes that share a token
constexpr int SIDE = 32 / LANES;        // tokens side by side in a warp
constexpr int TOKENS = SIDE > 4 ? SIDE : 4;
constexpr int DEPTH = TOKENS / SIDE;    // and one after the other
constexpr int THREADS = WARPS * 32;
constexpr int STATE = HEAD_DIM + 2;     // a partial result: accumulator, maximum, sum

struct __align__(16) Shared {           // its size is known to the host as well
  float query[G][HEAD_DIM];             // scaled by softmax scale · log2(e)
  float key[HEAD_DIM], value[HEAD_DIM]; // the newest token
  float partial[WARPS][G][STATE];
};

// One head through norm and rope, by one warp; `to` in shared memory.
DEVICE void prepare_head(const u16* from, const u16* norm, const float2* turns, float epsilon, float factor, bool normed, bool rotated,
                         float* to, int lane) {
  constexpr int PER = HEAD_DIM / 32;
  float v[PER], squares = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) v[i] = to_float(from[lane + 32 * i]), squares += v[i] * v[i];
  if (normed) {
    const float inverse = rsqrtf(warp_sum(squares) / HEAD_DIM + epsilon);
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] *= inverse * to_float(norm[lane + 32 * i]);
  }
#pragma unroll
  for (int i = 0; i < PER; i++) to[lane + 32 * i] = v[i];
  __syncwarp();
  if (rotated) {
    for (int i = lane; i < ROTARY / 2; i += 32) {
      const float2 turn = turns[i];
      const float a = to[i], b = to[i + ROTARY / 2];
      to[i] = a * turn.x - b * turn.y;
      to[i + ROTARY / 2] = b * turn.x + a * turn.y;
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < PER; i++) to[lane + 32 * i] = to_float(to_bits(to[lane + 32 * i])) * factor;
}

// Running softmax of G heads over the tokens a group of lanes has seen.
struct Running {
  float most[G], sum[G], acc[G][8];
};
DEVICE void unpack8(uint4 v, float (&f)[8]) {
  const u32 p[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; i++) f[i] = i & 1 ? high_float(p[i / 2]) : low_float(p[i / 2]);
}
template <int COUNT>
DEVICE void absorb(Running& run, const float (&query)[G][8], const uint4 (&keys)[COUNT], const uint4 (&values)[COUNT],
                   const bool (&valid)[COUNT]) {
  float score[COUNT][G];
#pragma unroll
  for (int u = 0; u < COUNT; u++) {
    float key[8];
    unpack8(keys[u], key);
#pragma unroll
    for (int h = 0; h < G; h++) {
      float s = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) s += query[h][i] * key[i];
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      score[u][h] = valid[u] ? s : LOWEST;
    }
  }
#pragma unroll
  for (int h = 0; h < G; h++) {
    float most = run.most[h];
#pragma unroll
    for (int u = 0; u < COUNT; u++) most = fmaxf(most, score[u][h]);
    const float fade = most == LOWEST ? 1.f : exp2_fast(run.most[h] - most);
    run.most[h] = most;
    run.sum[h] *= fade;
#pragma unroll
    for (int i = 0; i < 8; i++) run.acc[h][i] *= fade;
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
      score[u][h] = most == LOWEST ? 0.f : exp2_fast(score[u][h] - most);
      run.sum[h] += score[u][h];
    }
  }
#pragma unroll
  for (int u = 0; u < COUNT; u++) {
    float value[8];
    unpack8(values[u], value);
#pragma unroll
    for (int h = 0; h < G; h++)
#pragma unroll
      for (int i = 0; i < 8; i++) run.acc[h][i] += score[u][h] * value[i];
  }
}
DEVICE uint4 pack8(const float* f) { return make_uint4(pack2(f[0], f[1]), pack2(f[2], f[3]), pack2(f[4], f[5]), pack2(f[6], f[7])); }

// The weighted sum of `count` partial states for one (head, dimension), where `at(i)` gives the i-th state of the head.
template <typename At> DEVICE float3 merge_states(int count, int dimension, At at) {
  float most = LOWEST, sum = 0, value = 0;
  for (int i = 0; i < count; i++) most = fmaxf(most, at(i, HEAD_DIM));
  if (most == LOWEST) return make_float3(0, most, 0);
  for (int i = 0; i < count; i++) {
    const float weight = exp2_fast(at(i, HEAD_DIM) - most);
    sum += weight * at(i, HEAD_DIM + 1);
    value += weight * at(i, dimension);
  }
  return make_float3(value, most, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, G > 4 ? 1 : 2)
attention(const u16* qkv, const u16* query_norm, const u16* key_norm, const float2* rope, const int* lengths, const int* tables,
          u16* keys, u16* values, u16* out, float* scratch, int* tickets, float epsilon, float scale, int table_width, int sequences, int splits,
          int groups) {
  extern __shared__ __align__(16) u8 raw[];
  Shared& sh = *(Shared*)raw;
  __shared__ bool last_one;
  const int split = blockIdx.x % splits, head = blockIdx.x / splits % KV_HEADS, sequence = blockIdx.x / splits / KV_HEADS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % LANES, side = lane / LANES;
  launch_dependents();
  const int length = sequence < sequences ? lengths[sequence] : 0, newest = length - 1;
  const Run run_tokens = run_of(length, split, splits);
  const int begin = run_tokens.begin, end = run_tokens.end, used = run_tokens.used;
  if (split >= used || length == 0) {
    wait_for_inputs();
    return;
  }
  const int* table = tables + (size_t)sequence * table_width;
  const float2* turns = rope + (size_t)newest * (ROTARY / 2);

  const int stop = min(end, newest);  // the newest token comes from shared memory
  auto slot = [&](int token) {
    return (((size_t)table[token / PAGE] * PAGE + token % PAGE) * KV_HEADS + head) * HEAD_DIM + part * 8;
  };
  uint4 k4[DEPTH], v4[DEPTH];
  auto load = [&](int start) {
#pragma unroll
    for (int u = 0; u < DEPTH; u++) {
      const int token = start + u * SIDE + side;
      k4[u] = v4[u] = make_uint4(0, 0, 0, 0);
      if (token < stop) {
        const size_t at = slot(token);
        k4[u] = *(const uint4*)(keys + at);
        v4[u] = *(const uint4*)(values + at);
      }
    }
  };
  int start = begin + warp * TOKENS;
  load(start);
  constexpr int LINES = HEAD_DIM * 2 / 128;
  if (QK_NORM && threadIdx.x < 2 * LINES)  // of this layer alone, and so long out of L2
    prefetch_l2((const u8*)(threadIdx.x < LINES ? query_norm : key_norm) + threadIdx.x % LINES * 128);
  wait_for_inputs();

  const u16* row = qkv + (size_t)sequence * (HEADS + 2 * KV_HEADS) * HEAD_DIM;
  const bool owner = newest >= begin && newest < end;
  for (int h = warp; h < G; h += WARPS)
    prepare_head(row + (head * G + h) * HEAD_DIM, query_norm, turns, epsilon, scale * 1.4426950408889634f, QK_NORM, true, sh.query[h], lane);
  if (owner && warp == WARPS - 1)
    prepare_head(row + (HEADS + head) * HEAD_DIM, key_norm, turns, epsilon, 1.f, QK_NORM, true, sh.key, lane);
  if (owner && warp == WARPS - 2)
    prepare_head(row + (HEADS + KV_HEADS + head) * HEAD_DIM, nullptr, turns, epsilon, 1.f, false, false, sh.value, lane);
  __syncthreads();

  Running run;
  float query[G][8];
#pragma unroll
  for (int h = 0; h < G; h++) {
    run.most[h] = LOWEST, run.sum[h] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) run.acc[h][i] = 0, query[h][i] = sh.query[h][part * 8 + i];
  }
  if (owner && warp == 0) {
    const uint4 key[1] = {pack8(sh.key + part * 8)}, value[1] = {pack8(sh.value + part * 8)};
    const bool valid[1] = {side == 0};
    if (side == 0) {
      const size_t at = slot(newest);
      *(uint4*)(keys + at) = key[0];
      *(uint4*)(values + at) = value[0];
    }
    absorb<1>(run, query, key, value, valid);
  }
  while (start < stop) {
    bool valid[DEPTH];
#pragma unroll
    for (int u = 0; u < DEPTH; u++) valid[u] = start + u * SIDE + side < stop;
    const int next = start + WARPS * TOKENS;
    if (next < stop) {  // what comes next is on its way while this is added up
      uint4 k[DEPTH], v[DEPTH];
#pragma unroll
      for (int u = 0; u < DEPTH; u++) k[u] = k4[u], v[u] = v4[u];
      load(next);
      absorb<DEPTH>(run, query, k, v, valid);
    } else {
      absorb<DEPTH>(run, query, k4, v4, valid);
    }
    start = next;
  }

  float(&mine)[G][STATE] = sh.partial[warp];
#pragma unroll
  for (int h = 0; h < G; h++) {  // tokens side by side: the groups of lanes agree on a maximum and add up
    float most = run.most[h];
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    const float fade = most == LOWEST ? 0.f : exp2_fast(run.most[h] - most);
    run.sum[h] *= fade;
#pragma unroll
    for (int i = 0; i < 8; i++) run.acc[h][i] *= fade;
#pragma unroll
    for (int o = LANES; o < 32; o <<= 1) {
      run.sum[h] += __shfl_xor_sync(~0u, run.sum[h], o);
#pragma unroll
      for (int i = 0; i < 8; i++) run.acc[h][i] += __shfl_xor_sync(~0u, run.acc[h][i], o);
    }
    if (side == 0) {
#pragma unroll
      for (int i = 0; i < 8; i++) mine[h][part * 8 + i] = run.acc[h][i];
      if (part == 0) mine[h][HEAD_DIM] = most, mine[h][HEAD_DIM + 1] = run.sum[h];
    }
  }
  __syncthreads();
  auto write = [&](int i, float value) {
    const int n = head * G * HEAD_DIM + i;
#if PACKED
    out[packed_place(sequence, n, groups)] = to_bits(value);
#else
    out[(size_t)sequence * HEADS * HEAD_DIM + n] = to_bits(value);
#endif
  };
  const size_t place = ((size_t)sequence * KV_HEADS + head) * splits;
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, d = i % HEAD_DIM;
    const float3 state = merge_states(WARPS, d, [&](int p, int c) { return sh.partial[p][h][c]; });
    if (used == 1) {
      write(i, state.x / state.z);
    } else {
      float* to = scratch + (place + split) * G * STATE + h * STATE;
      to[d] = state.x;
      if (d == 0) to[HEAD_DIM] = state.y, to[HEAD_DIM + 1] = state.z;
    }
  }
  if (used == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* ticket = tickets + sequence * KV_HEADS + head;
    last_one = atomicAdd(ticket, 1) == used - 1;
    if (last_one) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last_one) return;
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, d = i % HEAD_DIM;
    const float* from = scratch + place * G * STATE + h * STATE;
    const float3 state = merge_states(used, d, [&](int c, int column) { return __ldcg(from + (size_t)c * G * STATE + column); });
    write(i, state.x / state.z);
  }
}
