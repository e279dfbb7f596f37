// One new token of each sequence: q/k norm, rope, KV write, and attention over the paged cache, in one kernel.
//
//   q, k = rope(norm(qkv)),  cache[position] = k, v,  out = softmax(q · Kᵀ · scale) · V
//
// Work split: grid (splits, kv heads, sequences); the G query heads that share a kv head stay together, so the cache
// is read once. A sequence's tokens are cut into `splits` runs by its length on the device (a captured grid is fixed).
// CLUSTER neighbouring splits merge through distributed shared memory; further clusters through global memory, where
// the last to arrive adds them up.
//
//      split:   | warp 0: 8 tokens | warp 1: 8 tokens | … | warp 0 | …       a lane holds 8 of head_dim
//
// The split that owns the newest token takes its key and value from shared memory, not from the cache it writes.
// Limit: bytes of KV / bandwidth for long contexts, latency (three dependent reads) for short ones. Lengths, tables,
// rope and norm weights are read before the wait: they are older than the kernel before this one.
//
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAGE, QK_NORM, WINDOW, WARPS, CLUSTER
#include "common.cuh"

constexpr int G = HEADS / KV_HEADS;
constexpr int LANES = HEAD_DIM / 8;     // lanes that share a token
constexpr int SIDE = 32 / LANES;        // tokens side by side in a warp
constexpr int DEPTH = 8 / SIDE;         // and one after the other: 8 tokens in flight
constexpr int THREADS = WARPS * 32;
constexpr int STATE = HEAD_DIM + 2;     // a partial result: accumulator, maximum, sum

struct __align__(16) Shared {           // its size is known to the host as well
  float query[G][HEAD_DIM];             // scaled by softmax scale · log2(e)
  float key[HEAD_DIM], value[HEAD_DIM]; // the newest token
  float partial[WARPS][G][STATE];
  float merged[G][STATE];
};

DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

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
template <int TOKENS>
DEVICE void absorb(Running& run, const float (&query)[G][8], const float (&key)[TOKENS][8], const float (&value)[TOKENS][8],
                   const bool (&valid)[TOKENS]) {
  float score[TOKENS][G];
#pragma unroll
  for (int u = 0; u < TOKENS; u++)
#pragma unroll
    for (int h = 0; h < G; h++) {
      float s = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) s += query[h][i] * key[u][i];
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
      score[u][h] = valid[u] ? s : LOWEST;
    }
#pragma unroll
  for (int h = 0; h < G; h++) {
    float most = run.most[h];
#pragma unroll
    for (int u = 0; u < TOKENS; u++) most = fmaxf(most, score[u][h]);
    if (most == LOWEST) continue;
    const float fade = exp2_fast(run.most[h] - most);
    run.most[h] = most;
    run.sum[h] *= fade;
#pragma unroll
    for (int i = 0; i < 8; i++) run.acc[h][i] *= fade;
#pragma unroll
    for (int u = 0; u < TOKENS; u++) {
      const float p = exp2_fast(score[u][h] - most);
      run.sum[h] += p;
#pragma unroll
      for (int i = 0; i < 8; i++) run.acc[h][i] += p * value[u][i];
    }
  }
}

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

DEVICE float load_remote(const float* mine, u32 rank) {
#if __CUDA_ARCH__ >= 900
  u32 address;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
#else
  return *mine;
#endif
}
DEVICE void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention(const u16* qkv, const u16* query_norm, const u16* key_norm, const float2* rope, const int* lengths, const int* tables,
          u16* keys, u16* values, u16* out, float* scratch, int* tickets, float epsilon, float scale, int table_width) {
  extern __shared__ __align__(16) u8 raw[];
  Shared& sh = *(Shared*)raw;
  __shared__ bool last_one;
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, sequence = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % LANES, side = lane / LANES;
  launch_dependents();
  const int length = lengths[sequence], newest = length - 1;
  const int oldest = WINDOW ? max(0, length - WINDOW) : 0;
  const int run_length = ((length - oldest + splits - 1) / splits + 7) / 8 * 8;
  const int begin = oldest + split * run_length, end = min(begin + run_length, length);
  const int* table = tables + (size_t)sequence * table_width;
  const float2* turns = rope + (size_t)max(newest, 0) * (ROTARY / 2);
  wait_for_inputs();

  const u16* row = qkv + (size_t)sequence * (HEADS + 2 * KV_HEADS) * HEAD_DIM;
  const bool owner = newest >= begin && newest < end;
  if (length > 0) {
    for (int h = warp; h < G; h += WARPS)
      prepare_head(row + (head * G + h) * HEAD_DIM, query_norm, turns, epsilon, scale * 1.4426950408889634f, QK_NORM, true, sh.query[h], lane);
    if (owner && warp == WARPS - 1)
      prepare_head(row + (HEADS + head) * HEAD_DIM, key_norm, turns, epsilon, 1.f, QK_NORM, true, sh.key, lane);
    if (owner && warp == (WARPS > 1 ? WARPS - 2 : 0))
      prepare_head(row + (HEADS + KV_HEADS + head) * HEAD_DIM, nullptr, turns, epsilon, 1.f, false, false, sh.value, lane);
  }
  __syncthreads();

  Running run;
  float query[G][8];
#pragma unroll
  for (int h = 0; h < G; h++) {
    run.most[h] = LOWEST, run.sum[h] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) run.acc[h][i] = 0, query[h][i] = sh.query[h][part * 8 + i];
  }
  const int stop = min(end, newest);  // the newest token comes from shared memory
  auto slot = [&](int token) {
    return (((size_t)table[token / PAGE] * PAGE + token % PAGE) * KV_HEADS + head) * HEAD_DIM + part * 8;
  };
  if (owner && warp == 0 && length > 0) {
    const size_t at = slot(newest);
    float key[1][8], value[1][8];
    const bool valid[1] = {side == 0};
#pragma unroll
    for (int i = 0; i < 8; i++) key[0][i] = sh.key[part * 8 + i], value[0][i] = sh.value[part * 8 + i];
    if (side == 0) {
      *(uint4*)(keys + at) = make_uint4(pack2(key[0][0], key[0][1]), pack2(key[0][2], key[0][3]), pack2(key[0][4], key[0][5]), pack2(key[0][6], key[0][7]));
      *(uint4*)(values + at) = make_uint4(pack2(value[0][0], value[0][1]), pack2(value[0][2], value[0][3]), pack2(value[0][4], value[0][5]), pack2(value[0][6], value[0][7]));
    }
    absorb<1>(run, query, key, value, valid);
  }
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
  int start = begin + warp * 8;
  if (start < stop) load(start);
  while (start < stop) {
    float key[DEPTH][8], value[DEPTH][8];
    bool valid[DEPTH];
#pragma unroll
    for (int u = 0; u < DEPTH; u++) {
      unpack8(k4[u], key[u]), unpack8(v4[u], value[u]);
      valid[u] = start + u * SIDE + side < stop;
    }
    start += WARPS * 8;
    if (start < stop) load(start);
    absorb<DEPTH>(run, query, key, value, valid);
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
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, d = i % HEAD_DIM;
    const float3 state = merge_states(WARPS, d, [&](int p, int c) { return sh.partial[p][h][c]; });
    sh.merged[h][d] = state.x;
    if (d == 0) sh.merged[h][HEAD_DIM] = state.y, sh.merged[h][HEAD_DIM + 1] = state.z;
  }
  cluster_barrier();

  // This CTA's share of the cluster's outputs.
  const int rank = split % CLUSTER, clusters = splits / CLUSTER, cluster = split / CLUSTER;
  constexpr int SHARE = (G * HEAD_DIM + CLUSTER - 1) / CLUSTER;
  const size_t place = ((size_t)sequence * KV_HEADS + head) * clusters;
  u16* target = out + ((size_t)sequence * HEADS + head * G) * HEAD_DIM;
  for (int i = rank * SHARE + threadIdx.x; i < min((rank + 1) * SHARE, G * HEAD_DIM); i += THREADS) {
    const int h = i / HEAD_DIM, d = i % HEAD_DIM;
    const float3 state = merge_states(CLUSTER, d, [&](int r, int c) { return load_remote(&sh.merged[h][c], r); });
    if (clusters == 1) {
      target[i] = to_bits(state.z > 0 ? state.x / state.z : 0.f);
    } else {
      float* to = scratch + (place + cluster) * G * STATE + h * STATE;
      to[d] = state.x;
      if (d == 0) to[HEAD_DIM] = state.y, to[HEAD_DIM + 1] = state.z;
    }
  }
  cluster_barrier();  // nobody leaves while its shared memory is still read
  if (clusters == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* ticket = tickets + sequence * KV_HEADS + head;
    last_one = atomicAdd(ticket, 1) == splits - 1;
    if (last_one) *ticket = 0;
  }
  __syncthreads();
  if (!last_one) return;
  __threadfence();
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, d = i % HEAD_DIM;
    const volatile float* from = scratch + place * G * STATE + h * STATE;
    const float3 state = merge_states(clusters, d, [&](int c, int column) { return from[(size_t)c * G * STATE + column]; });
    target[i] = to_bits(state.z > 0 ? state.x / state.z : 0.f);
  }
}
