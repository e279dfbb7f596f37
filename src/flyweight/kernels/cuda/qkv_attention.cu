// The qkv linear and the attention of the new tokens behind it, in one kernel: a decoder layer is four.
//
//   q, k, v = x Wᵀ;  q, k = rope(norm(q, k));  cache[position] = k, v;  out = softmax(q · Kᵀ · scale) · V
//
// Why one: each linear fetches its first weights while the kernel before it runs, which needs room for exactly one more
// CTA on every SM. With attention between them, `o` was resident only after qkv had left (0.29 of 1.65 ms a token).
//
// Work split: HEAD_CTAS CTAs to a kv head, one an SM; those that are left over only fill their SM. First they compute the
// head's tiles of q, k and v (gemv.cuh). Then each takes a run of tokens of one sequence:
//
//      CTA:    | lane 0: 16 tokens | lane 1: 16 tokens | … | lane 0 | …       a lane is HEAD_DIM / 64 warps
//      warp:   scores [16 tokens × G heads] = K · qᵀ;  then 64 dimensions of Vᵀ · scores, both on the matrix units
//
// so K and V pass through registers once for all heads. Runs meet in memory: each writes its partial result, and gathers
// 1 / used of the outputs from all others.
//
// Hand-over between CTAs, twice: of q, k, v to the CTAs of their head, and of the partial results. A word is its own flag
// (see common.cuh), which spares the fence, the counter, and one trip to memory. All CTAs are resident at once
// (at most one for each SM; later kernels start when all are here), so waiting for each other is safe. Mailboxes must be
// empty (all ones) when the kernel starts, so each launch empties those of the launch after it: by then what used
// them last has ended.
//
// Limit: bytes of weights and KV / bandwidth, and for short contexts two trips through L2. Before the wait, older tokens,
// rope and norms are brought to L2: all of them were written before this step began.
//
// defines: those of gemv.cuh and attention.cuh, HEAD_CTAS, ROTARY, PAGE, QK_NORM, SHARED_BYTES
#include "gemv.cuh"
#include "patience.cuh"
#include "attention.cuh"

constexpr int HEAD_TILES = HEAD_DIM / 16, LOCAL_TILES = (G + 2) * HEAD_TILES;
constexpr int SPLITS = HEAD_CTAS < ROWS ? 1 : HEAD_CTAS / ROWS < 32 ? HEAD_CTAS / ROWS : 32;  // runs of a sequence, at most
constexpr int DIM_PARTS = HEAD_DIM / 64;
constexpr int KV_ROW = 2 * HEAD_DIM + 16;         // bytes; the padding keeps matrix loads free of bank conflicts
constexpr int KV_TILE = 2 * 16 * KV_ROW;          // 16 keys, then 16 values
constexpr int RING_TILES = (STAGES * STAGE_BYTES + (ROWS > 1 ? X_BYTES : 0)) / KV_TILE;  // x lies behind the ring
constexpr int LANES = RING_TILES < WARPS / DIM_PARTS ? RING_TILES : WARPS / DIM_PARTS;
constexpr int DEPTH = RING_TILES / LANES < 3 ? RING_TILES / LANES : 3;  // tiles of a lane on their way
constexpr int STATE = HEAD_DIM + 4;               // a partial result: accumulator, maximum, sum; whole 16-byte words
constexpr int QUERY_ROW = HEAD_DIM + 8;
constexpr int PER = HEAD_DIM / 32;                // values of a head in one thread

static_assert(EPILOGUE == STORE && NDIM == (HEADS + 2 * KV_HEADS) * HEAD_DIM && HEAD_CTAS <= LOCAL_TILES, "a merged qkv");
static_assert(LANES >= 1 && G * STATE * 4 <= KV_TILE && G <= 8, "a lane leaves its result where its tokens were");
static_assert(ROTARY % (2 * PER) == 0, "a thread turns whole pairs with one other");

struct __align__(128) Shared {
  LinearShared linear;         // its ring, and of several rows x, holds the lanes' tokens later
  u16 query[G][QUERY_ROW];
  u16 key[HEAD_DIM], value[HEAD_DIM];  // of the newest token
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

struct Attention {
  const u16 *query_norm, *key_norm;
  const float2* rope;
  const int *lengths, *tables;
  u16 *keys, *values, *out;
  float scale;  // of logits in base 2
  int table_width;
};

// A tile of the head: its query heads' first, then k, then v.
DEVICE int head_tile(int head, int i) {
  if (i < G * HEAD_TILES) return head * G * HEAD_TILES + i;
  const int kind = i / HEAD_TILES - G;  // 0: key, 1: value
  return (HEADS + kind * KV_HEADS + head) * HEAD_TILES + i % HEAD_TILES;
}

DEVICE size_t token_at(const Attention& a, int sequence, int token, int head) {
  const int page = a.tables[(size_t)sequence * a.table_width + token / PAGE];
  return (((size_t)page * PAGE + token % PAGE) * KV_HEADS + head) * HEAD_DIM;
}

// By the producer warp while it waits: what attention reads first, to L2.
DEVICE void prefetch(const Attention& a, int sequence, int split, int head, int lane) {
  constexpr int LINES = HEAD_DIM / 64;  // of 128 bytes, in a row of keys or values
  const int length = sequence < ROWS ? a.lengths[sequence] : 0;
  const Run run = run_of(length, split, SPLITS);
  if (length == 0 || split >= run.used) return;
  if (lane < (ROTARY + 31) / 32) prefetch_l2(a.rope + (size_t)(length - 1) * (ROTARY / 2) + lane * 16);
  if (QK_NORM && lane < 2 * LINES) prefetch_l2((const u8*)(lane < LINES ? a.query_norm : a.key_norm) + lane % LINES * 128);
#pragma unroll 1
  for (int i = lane; i < min(run.end - run.begin, LANES * DEPTH * 16) * LINES; i += 32) {
    const size_t at = token_at(a, sequence, run.begin + i / LINES, head) + i % LINES * 64;
    prefetch_l2(a.keys + at);
    prefetch_l2(a.values + at);
  }
}

// One head of q, k or v, by one warp: waited for, normed, rotated, written to shared memory and (k, v) to the cache.
DEVICE void prepare_head(const u16* from, const u16* norm, const float2* turns, float epsilon, u16* to, u16* cache, int lane) {
  constexpr int HALF = ROTARY / 2 / PER;  // lanes between the two of a pair
  float weight[PER], v[PER], squares = 0;
  float2 turn[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {  // here before the values are
    weight[i] = QK_NORM && norm ? to_float(norm[lane * PER + i]) : 1.f;
    turn[i] = turns && lane < 2 * HALF ? turns[lane % HALF * PER + i] : make_float2(1, 0);
  }
  u32 words[PER / 2];
  Patience patience;
  do {
    patience.poll();
    load_relaxed(from + lane * PER, words);
  } while (missing<true>(words));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PER; i++) {
    v[i] = i & 1 ? high_float(words[i / 2]) : low_float(words[i / 2]);
    squares += v[i] * v[i];
  }
  const float inverse = QK_NORM && norm ? rsqrtf(warp_sum(squares) / HEAD_DIM + epsilon) : 1.f;
#pragma unroll
  for (int i = 0; i < PER; i++) v[i] *= inverse * weight[i];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const float other = __shfl_sync(~0u, v[i], lane < HALF ? lane + HALF : lane - HALF);
    v[i] = v[i] * turn[i].x + (lane < HALF ? -other : other) * turn[i].y;
  }
#pragma unroll
  for (int i = 0; i < PER / 2; i++) {
    const u32 pair = pack2(v[2 * i], v[2 * i + 1]);
    ((u32*)to)[lane * PER / 2 + i] = pair;
    if (cache) ((u32*)cache)[lane * PER / 2 + i] = pair;
  }
}

// Running softmax of the two heads 2 · (lane % 4) and the next, over this warp's 64 dimensions.
struct Softmax {
  float most[2], sum[2], values[4][4];
};
// The next `count` (1 to 16) tokens; rows beyond them are read as the last one, and count for nothing.
DEVICE void absorb(Softmax& run, const u16* query, u32 keys, u32 values, int count, float scale, int lane) {
  const int g = lane / 4, t = lane % 4;
  float score[2][4] = {};  // two chains of additions
  keys += min(lane % 16, count - 1) * KV_ROW + lane / 16 * 16;
  query += min(g, G - 1) * QUERY_ROW + 2 * t;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
    const uint4 a = load_matrices<false>(keys + k * 32);
    mma16<FP16>(score[k % 2], a.x, a.y, a.z, a.w, *(const u32*)(query + k * 16), *(const u32*)(query + k * 16 + 8));
  }
  float most[2] = {run.most[0], run.most[1]};
#pragma unroll
  for (int j = 0; j < 4; j++) {  // token g + 8 · (j / 2), head 2 t + j % 2
    score[0][j] = g + j / 2 * 8 < count ? (score[0][j] + score[1][j]) * scale : LOWEST;
    most[j % 2] = fmaxf(most[j % 2], score[0][j]);
  }
#pragma unroll
  for (int o = 4; o < 32; o <<= 1)
#pragma unroll
    for (int j = 0; j < 2; j++) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], o));
  u32 pair[2];
  float fade[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    fade[j] = exp2_fast(run.most[j] - most[j]);
    run.most[j] = most[j];
    pair[j] = pack2(exp2_fast(score[0][2 * j] - most[0]), exp2_fast(score[0][2 * j + 1] - most[1]));
  }
  // the sum counts what is multiplied: the rounded weights
  run.sum[0] = run.sum[0] * fade[0] + low_float(pair[0]) + low_float(pair[1]);
  run.sum[1] = run.sum[1] * fade[1] + high_float(pair[0]) + high_float(pair[1]);
  const u32 b0 = transpose8(pair[0]), b1 = transpose8(pair[1]);
  values += min(lane / 16 * 8 + lane % 8, count - 1) * KV_ROW + lane / 8 % 2 * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {  // dimension 16 i + g + 8 · (j / 2), head 2 t + j % 2
    const uint4 a = load_matrices<true>(values + i * 32);
#pragma unroll
    for (int j = 0; j < 4; j++) run.values[i][j] *= fade[j % 2];
    mma16<FP16>(run.values[i], a.x, a.y, a.z, a.w, b0, b1);
  }
}

// The run [begin, end) of a sequence's older tokens, and its newest one if `owner`: every lane of the CTA leaves its state
// [G][STATE] at the start of its tokens. Between the start and `prepare`, which makes the query, tokens are fetched.
template <typename Prepare>
DEVICE int attend(Shared& sh, const Attention& a, int sequence, int head, int begin, int end, bool owner, Prepare prepare) {
  constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes in a row
  const int thread = threadIdx.x % (DIM_PARTS * 32), index = threadIdx.x / (DIM_PARTS * 32), lane = threadIdx.x % 32;
  const int older = (end - begin + 15) / 16, tiles = older + owner;
  const u32 memory = shared_address(sh.linear.ring) + index * DEPTH * KV_TILE;
  auto fetch = [&](int tile, int slot) {
    if (tile < older)
#pragma unroll
      for (int i = thread / CHUNKS; i < 16; i += 4) {
        const int token = begin + tile * 16 + i;
        if (token < end) {
          const size_t at = token_at(a, sequence, token, head) + thread % CHUNKS * 8;
          const u32 to = memory + slot * KV_TILE + i * KV_ROW + thread % CHUNKS * 16;
          copy16(to, a.keys + at);
          copy16(to + KV_TILE / 2, a.values + at);
        }
      }
    copy_group();
  };
  auto meet = [&] {  // the warps of a lane
    if (DIM_PARTS == 1) __syncwarp();
    else named_barrier(2 + index, DIM_PARTS * 32);
  };
  if (index < LANES)
#pragma unroll
    for (int i = 0; i < DEPTH; i++) fetch(index + i * LANES, i);
  prepare();
  named_barrier(1, THREADS);
  if (index >= min(LANES, tiles)) return min(LANES, tiles);

  const int part = thread / 32 * 128;  // bytes before this warp's dimensions
  Softmax run = {{LOWEST, LOWEST}};
  int slot = 0;
  for (int tile = index; tile < tiles; tile += LANES) {
    copy_wait<DEPTH - 1>();
    meet();
    const bool old = tile < older;
    const u32 keys = old ? memory + slot * KV_TILE : shared_address(sh.key);
    const u32 values = old ? keys + KV_TILE / 2 : shared_address(sh.value);
    absorb(run, sh.query[0], keys, values + part, old ? min(16, end - begin - tile * 16) : 1, a.scale, lane);
    meet();
    fetch(tile + DEPTH * LANES, slot);
    if (++slot == DEPTH) slot = 0;
  }
  float* state = (float*)(sh.linear.ring[0] + index * DEPTH * KV_TILE);
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) run.sum[j] += __shfl_xor_sync(~0u, run.sum[j], o);
    const int h = lane % 4 * 2 + j;
    if (h < G) {
#pragma unroll
      for (int i = 0; i < 8; i++) state[h * STATE + part / 2 + i * 8 + lane / 4] = run.values[i / 2][i % 2 * 2 + j];
      if (part == 0 && lane < 4) state[h * STATE + HEAD_DIM] = run.most[j], state[h * STATE + HEAD_DIM + 1] = run.sum[j];
    }
  }
  return min(LANES, tiles);
}

// One (head, dimension) of the states of the first `count` lanes: value, maximum, sum.
DEVICE float3 merge_lanes(const Shared& sh, int count, int h, int d) {
  const float* state = (const float*)sh.linear.ring[0] + h * STATE;
  constexpr int STEP = DEPTH * KV_TILE / 4;
  float limit[LANES], most = LOWEST, sum = 0, value = 0;
#pragma unroll
  for (int i = 0; i < LANES; i++) limit[i] = i < count ? state[i * STEP + HEAD_DIM] : LOWEST, most = fmaxf(most, limit[i]);
#pragma unroll
  for (int i = 0; i < LANES; i++) {
    const float weight = exp2_fast(limit[i] - most);
    if (i < count) sum += weight * state[i * STEP + HEAD_DIM + 1], value += weight * state[i * STEP + d];
  }
  return make_float3(value, most, sum);
}

// This CTA's share of the outputs of its head, from the states of all runs; `states` is the first one's. Runs sit side by
// side in the lanes of a warp, four outputs in each.
DEVICE void gather(const float* states, u16* out, int split, int used, int warp, int lane) {
  constexpr int QUADS = G * HEAD_DIM / 4;
  const int wide = used <= 2 ? 2 : used <= 4 ? 4 : used <= 8 ? 8 : used <= 16 ? 16 : 32;  // lanes for one quad
  const int last = (split + 1) * QUADS / used;
  for (int first = split * QUADS / used + warp * (32 / wide); first < last; first += WARPS * (32 / wide)) {
    const int quad = first + lane / wide, run = lane % wide, h = min(quad, QUADS - 1) * 4 / HEAD_DIM;
    u32 words[4] = {}, limits[2] = {__float_as_uint(LOWEST), 0};
    if (quad < last && run < used) {
      const float* state = states + ((size_t)run * G + h) * STATE;
      Patience patience;
      do {
        patience.poll();
        load_relaxed(state + quad * 4 % HEAD_DIM, words);
        load_relaxed(state + HEAD_DIM, limits);
      } while (missing<false>(words) || missing<false>(limits));
    }
    __syncwarp();
    float most = __uint_as_float(limits[0]), v[4];
    for (int o = 1; o < wide; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    const float weight = quad < last ? exp2_fast(__uint_as_float(limits[0]) - most) : 0.f;
    float sum = weight * __uint_as_float(limits[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = weight * __uint_as_float(words[i]);
    for (int o = 1; o < wide; o <<= 1) {
      sum += __shfl_xor_sync(~0u, sum, o);
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] += __shfl_xor_sync(~0u, v[i], o);
    }
    const float inverse = __fdividef(1.f, sum);
    if (quad < last && run == 0)
      ((uint2*)out)[quad] = make_uint2(pack2(v[0] * inverse, v[1] * inverse), pack2(v[2] * inverse, v[3] * inverse));
  }
}

// The mailboxes of the next launch, by the last warps: the first ones are busy with the heads.
DEVICE void empty(u16* qkv, float* states) {
  const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
  const int thread = THREADS - 1 - threadIdx.x;
  for (int i = thread; i < G * STATE / 4; i += THREADS) ((uint4*)(states + (size_t)blockIdx.x * G * STATE))[i] = ones;
  constexpr int CTAS = KV_HEADS * HEAD_CTAS;
  for (int i = thread * CTAS + blockIdx.x; i < ROWS * NDIM / 8; i += THREADS * CTAS) ((uint4*)qkv)[i] = ones;
}

// Mailboxes: qkv [ROWS, NDIM], states [KV_HEADS, HEAD_CTAS, G, STATE]; the next launch's are emptied.
extern "C" __global__ void __launch_bounds__(THREADS + 32, ON_SM)
qkv_attention(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
              const u16* query_norm, const u16* key_norm, const float2* rope, const int* lengths, const int* tables, u16* keys,
              u16* values, u16* out, u16* qkv, float* states, u16* next_qkv, float* next_states, float epsilon, float scale,
              int table_width, u32* turns) {
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int head = blockIdx.x / HEAD_CTAS, cta = blockIdx.x % HEAD_CTAS, split = cta % SPLITS;
  if (head >= KV_HEADS) {  // stays until the next kernel has surely taken the room that the one before this left on every SM
    launch_dependents();
    wait_for_inputs();
    u32 last[1];
    Patience patience;
    if (threadIdx.x == 0) do {
        patience.poll();
        load_relaxed(qkv + NDIM - 2, last);
      } while (missing<true>(last));
    return;
  }
  const int first = cta * LOCAL_TILES / HEAD_CTAS, last = (cta + 1) * LOCAL_TILES / HEAD_CTAS;
  const Linear arguments = {weights, records, channel_scale, X, norm, bias, nullptr, qkv, epsilon, turns};
  const Attention a = {query_norm, key_norm, rope, lengths, tables, keys, values, out, scale * 1.4426950408889634f, table_width};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto early = [&] { prefetch(a, cta / SPLITS, split, head, lane); };
  const int own = cta / SPLITS < ROWS ? lengths[cta / SPLITS] : 0;  // in a register before it is needed
  if (!linear(sh.linear, arguments, last - first, [=](int i) { return head_tile(head, first + i); }, early)) return;

  empty(next_qkv, next_states);
  for (int sequence = cta / SPLITS; sequence < ROWS; sequence += HEAD_CTAS / SPLITS) {
    const int length = sequence == cta / SPLITS ? own : lengths[sequence], newest = length - 1;
    const Run run = run_of(length, split, SPLITS);
    if (length == 0 || split >= run.used) continue;
    const bool owner = run.end == length;
    const int count = attend(sh, a, sequence, head, run.begin, min(run.end, newest), owner, [&] {
      const float2* turns = rope + (size_t)newest * (ROTARY / 2);
      const u16* row = qkv + (size_t)sequence * NDIM;
      for (int h = warp; h < G + 2 * owner; h += WARPS) {
        const bool query = h < G, key = h == G;
        const int column = (query ? head * G + h : key ? HEADS + head : HEADS + KV_HEADS + head) * HEAD_DIM;
        u16* cache = query ? nullptr : (key ? keys : values) + token_at(a, sequence, newest, head);
        prepare_head(row + column, query ? query_norm : key ? key_norm : nullptr, query || key ? turns : nullptr, epsilon,
                     query ? sh.query[h] : key ? sh.key : sh.value, cache, lane);
      }
    });
    named_barrier(1, THREADS);
    u16* target = out + ((size_t)sequence * HEADS + head * G) * HEAD_DIM;
    float* mine = states + (size_t)blockIdx.x * G * STATE;
    for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
      const int h = i / HEAD_DIM, d = i % HEAD_DIM;
      const float3 state = merge_lanes(sh, count, h, d);
      if (run.used == 1) {
        target[i] = to_bits(state.x / state.z);
      } else {
        store_relaxed(mine + h * STATE + d, state.x);
        if (d < 2) store_relaxed(mine + h * STATE + HEAD_DIM + d, d ? state.z : state.y);
      }
    }
    if (run.used > 1) gather(mine - (size_t)split * G * STATE, target, split, run.used, warp, lane);
    if (sequence + HEAD_CTAS / SPLITS < ROWS) named_barrier(1, THREADS);  // before others fetch over the states
  }
}
