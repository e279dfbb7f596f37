// One new token of each sequence: q/k norm, rope, KV write, and attention over the paged cache, in one kernel.
//
//   q, k = rope(norm(qkv)),  cache[position] = k, v,  out = softmax(q · Kᵀ · scale) · V
//
// Work split: an item is a run of tokens of one kv head of one sequence; the G query heads that share the kv head stay
// together, so the cache is read once. CTAs have 8 warps, or 4 so that those of 64 sequences and 8 kv heads are all resident.
// Runs merge in global memory, where the last to arrive adds them up.
//
// ITEMS: where more than 8 query heads share a kv head, as many items have up to G of them each, the last maybe fewer. They run
// at the same time, so most of what the others read comes from L2. All of them make the newest key and value for themselves, and
// the first alone stores them.
//
//      run:    | warp 0: 16 tokens | warp 1: 16 tokens | … | warp 0 | …
//      warp:   scores [16 tokens × G heads] = K · qᵀ;  then [HEAD_DIM × G] += Vᵀ · scores, both on the matrix units
//
// K and V go from memory straight to the registers in which the matrix units want them: which of a product's inputs is which
// dimension does not matter, as long as q agrees, so a lane (g, t) takes 16 bytes of token g's key at a time. Of V a product's
// rows are dimensions, which are free as well: a lane takes 16 bytes of four tokens, and pairs of tokens are made by permuting
// bytes. Heads of 80 and 96 end in a shorter word (attention_words.cuh). The registers of K are filled again as soon as the scores are there, those of V after the sums: 16 tokens of every
// warp are always on their way.
//
// The split that owns the newest token takes its key and value from shared memory, not from the cache it writes.
// Limit: bytes of KV / bandwidth; latency for short contexts and few sequences. Lengths, tables, rope, norms and the first older
// tokens of the cache are read before the wait: what wrote them ended before this step began (a step's only write is the
// newest token, which nobody reads back), so the kernel just before this one cannot touch them.
//
// PACKED: results are written in the order of the product that follows (packed.cuh): its SB, and its ORDER. VECTORS: in that of a VPTQ
// product (vectors.cuh), its STAGE_STEPS, with its columns' scales; what their biases add to a row is summed up for each item of
// each kv head.
//
// KV8: the cache holds codes of 8 bits (kv8.cuh). A lane takes 8 bytes where it took 16, and makes fp16 numbers of them just before
// a product; q has the scale of scores in it. Weights have the scale of their token's value in them, and so has the running maximum:
// a weight never is more than 1. The newest token is read as it is stored, as by any later step.
//
// CHUNK: up to so many rows are tokens of one sequence that follow each other (speculation). `before` says how many rows just
// before a row are of its sequence. Their keys and values are not in the cache yet: every row makes them for itself from qkv, beside
// its own, and stores its own alone. So a launch needs no other one in front that writes them.
//
//      tokens of the sequence:  0 … length − 2 − before        | … newest       (= length − 1)
//      read from                the cache                      | shared memory, made from rows sequence − before … sequence of qkv
//
// SOFT_CAP: scores become cap · tanh(score / cap). SINKS: a logit for each query head takes its share of the softmax and gives
// nothing, so it only counts in the last sum.
//
// GATED: a row of qkv begins with a gate for each result, which is multiplied by σ(gate).
//
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAGE, QK_NORM, WINDOW, WARPS, SHORTEST, ITEMS (1), PACKED (0), ORDER (0),
// VECTORS (0), KV8 (0), CHUNK (1), SOFT_CAP (0), SINKS (0), GATED (0)
#ifndef CHUNK
#define CHUNK 1
#endif
#ifndef PACKED
#define PACKED 0
#define ORDER 0
#endif
#ifndef VECTORS
#define VECTORS 0
#endif
#ifndef GATED
#define GATED 0
#endif
#include "attention.cuh"
#include "attention_words.cuh"
#include "kv8.cuh"
#include "packed.cuh"
#include "vectors.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int UNITS = KV_HEADS * ITEMS;    // of a sequence
constexpr int PER = (HEAD_DIM + 31) / 32;  // values of a head in one thread
constexpr int TURNS = (ROTARY + 63) / 64;  // and pairs that rope turns
constexpr int PIECES = (HEAD_DIM + 31) / 32;  // 16-byte words of a key in one lane
constexpr int PARTS = (HEAD_DIM + 63) / 64;   // and of a value
constexpr int PRODUCTS = HEAD_DIM / 16;
constexpr int QUERY_ROW = HEAD_DIM / 64 * 64 + 32;  // two rows lie in different banks
constexpr int GATES = GATED * HEADS * HEAD_DIM, QKV_ROW = GATES + (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int STATE = HEAD_DIM + 4;        // a partial result: accumulator, maximum, sum; whole 16-byte words
constexpr int OUT_WORDS = G * HEAD_DIM / 4, MOST_TEAMS = THREADS / OUT_WORDS < WARPS ? THREADS / OUT_WORDS : WARPS;
constexpr int TEAMS = MOST_TEAMS > 1 ? MOST_TEAMS : 1;  // of threads, which share out the runs that are merged
constexpr int MOST_RUNS = 64;             // of a sequence that can be merged, as in attention.py
constexpr int TASKS = G + 2 * CHUNK, ROUNDS = (TASKS + WARPS - 1) / WARPS;  // heads of q, k and v to prepare
static_assert(PAGE % 8 == 0 && G <= 8, "eight tokens lie in one page; the heads are the columns of a product");
static_assert((ITEMS - 1) * G < SHARING, "the last item has a head");

struct Shared {  // all but the scales is read or written in words of 16 bytes
  __align__(16) u16 query[8][QUERY_ROW];   // zeros from G on
  __align__(16) Stored newest[2][CHUNK][HEAD_DIM];  // keys and values of the step's own tokens
  __align__(16) float partial[WARPS][G][STATE];
  float share[G][MOST_RUNS];               // of every run, in the merge
  u16 newest_scales[2][CHUNK];             // KV8
};

// One head through norm and rope, by one warp; value i of a lane is number lane + 32 · i. `scratch` holds a head.
DEVICE void prepare_head(float (&v)[PER], const float (&weight)[PER], const float2 (&turn)[TURNS], float epsilon, bool normed,
                         bool turned, float* scratch, int lane) {
  if (normed) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) squares += v[i] * v[i];
    const float inverse = rsqrtf(warp_sum(squares) / HEAD_DIM + epsilon);
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] *= inverse * weight[i];
  }
  if (turned) {
#pragma unroll
    for (int i = 0; i < PER; i++)
      if (in_head(lane + 32 * i)) scratch[lane + 32 * i] = v[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int first = lane + 32 * i, second = first + ROTARY / 2;
      if (first < ROTARY / 2) {
        const float a = scratch[first], b = scratch[second];
        scratch[first] = a * turn[i].x - b * turn[i].y;
        scratch[second] = b * turn[i].x + a * turn[i].y;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] = in_head(lane + 32 * i) ? scratch[lane + 32 * i] : 0.f;
    __syncwarp();
  }
}
// A query to shared memory, as the product takes it: in the type of activations, or with `factor` in fp16.
DEVICE void store_query(const float (&v)[PER], float factor, u16* to, int lane) {
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const u16 bits = to_bits(v[i]);
    if (in_head(lane + 32 * i)) to[lane + 32 * i] = KV8 ? (u16)(pack_as<true>(to_float(bits) * factor, 0.f) & 0xffff) : bits;
  }
}
// A key or value to shared memory, as the cache stores it, and its scale.
DEVICE void store_newest(const float (&v)[PER], float fixed, Stored* to, u16* scale_to, int lane) {
  float scale = 1, inverse = 1;
#if KV8
  float most = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) most = fmaxf(most, fabsf(to_float(to_bits(v[i]))));
  const u16 bits = scale_bits(warp_max(most), fixed);
  if (lane == 0) *scale_to = bits;
  scale = scale_of(bits), inverse = 1.f / scale;
#endif
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (in_head(lane + 32 * i)) to[lane + 32 * i] = KV8 ? (Stored)code_pair(to_float(to_bits(v[i])), 0.f, scale, inverse) : to_bits(v[i]);
}

DEVICE u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

#if VECTORS
#define VECTOR_ARGUMENTS , const u32 *affine, float *bias_sums
#else
#define VECTOR_ARGUMENTS
#endif
#if CHUNK > 1
#define CHUNK_ARGUMENTS , const int* before
#else
#define CHUNK_ARGUMENTS
#endif

// Softmax of heads 2t and 2t + 1 over the tokens a warp has seen; `sum` is of this lane's tokens alone.
struct Running {
  float most[2], sum[2], acc[PRODUCTS][4];
};
// 16 tokens: the weights of tokens g and g + 8 from their scores (0, 1 and 2, 3), as the right operand of the product with V.
// `scale`: of the two tokens' values, 1 where these are numbers.
DEVICE uint2 weigh(Running& run, const float (&score)[4], const float (&scale)[2]) {
  float most[2], fade[2];
  const float shift[2] = {KV8 ? log2_fast(scale[0]) : 0.f, KV8 ? log2_fast(scale[1]) : 0.f};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    most[j] = fmaxf(run.most[j], KV8 ? fmaxf(score[j] + shift[0], score[2 + j] + shift[1]) : fmaxf(score[j], score[2 + j]));
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], o));
    fade[j] = exp2_fast(run.most[j] - most[j]);
    run.most[j] = most[j];
  }
  float weight[4];
#pragma unroll
  for (int j = 0; j < 4; j++) weight[j] = exp2_fast(score[j] - most[j % 2]);
  const u32 low = KV8 ? pack_as<true>(weight[0] * scale[0], weight[1] * scale[0]) : pack2(weight[0], weight[1]);
  const u32 high = KV8 ? pack_as<true>(weight[2] * scale[1], weight[3] * scale[1]) : pack2(weight[2], weight[3]);
  if (KV8) {
#pragma unroll
    for (int j = 0; j < 2; j++) run.sum[j] = run.sum[j] * fade[j] + weight[j] + weight[2 + j];
  } else {
    run.sum[0] = run.sum[0] * fade[0] + low_float(low) + low_float(high);  // what is multiplied: the rounded weights
    run.sum[1] = run.sum[1] * fade[1] + high_float(low) + high_float(high);
  }
#pragma unroll
  for (int i = 0; i < PRODUCTS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) run.acc[i][j] *= fade[j % 2];
  return make_uint2(transpose8(low), transpose8(high));
}

// The weighted sum of the warps' partial states for one (head, dimension): value, maximum, sum.
DEVICE float3 merge_warps(const Shared& sh, int h, int d) {
  float most = LOWEST, sum = 0, value = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) most = fmaxf(most, sh.partial[i][h][HEAD_DIM]);
  if (most == LOWEST) return make_float3(0, most, 0);
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    const float weight = exp2_fast(sh.partial[i][h][HEAD_DIM] - most);
    sum += weight * sh.partial[i][h][HEAD_DIM + 1];
    value += weight * sh.partial[i][h][d];
  }
  return make_float3(value, most, sum);
}
// What each of `used` runs counts for in a head, by one warp; their states lie in `states` [used][G][STATE].
DEVICE void share_out(Shared& sh, const float* states, int used, int h, float sink, int lane) {
  constexpr int N = MOST_RUNS / 32;
  float most[N], sum[N], top = LOWEST, total = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int run = lane + 32 * i;
    const float* end = states + (size_t)(run * G + h) * STATE + HEAD_DIM;
    most[i] = run < used ? __ldcg(end) : LOWEST, sum[i] = run < used ? __ldcg(end + 1) : 0;
    top = fmaxf(top, most[i]);
  }
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
  for (int i = 0; i < N; i++) most[i] = exp2_fast(most[i] - top), total += most[i] * sum[i];
  total = warp_sum(total);
  if (SINKS) total += exp2_fast(sink - top);
#pragma unroll
  for (int i = 0; i < N; i++) sh.share[h][lane + 32 * i] = most[i] / total;
}

extern "C" __global__ void __launch_bounds__(THREADS, (HEAD_DIM > 128 ? 256 : 512) / THREADS)
attention(const u16* qkv, const u16* query_norm, const u16* key_norm, const float2* rope, const int* lengths, const int* tables,
          Stored* keys, Stored* values, u16* out, float* scratch, int* tickets, float epsilon, float scale, int table_width,
          int sequences, int splits, int groups CHUNK_ARGUMENTS SCALE_ARGUMENTS BEND_ARGUMENTS VECTOR_ARGUMENTS) {
  __shared__ Shared sh;
  __shared__ bool last_one;
#if VECTORS
  __shared__ u32 affine_here[G * HEAD_DIM];
  __shared__ float of_warps[WARPS];
#endif
  // First splits come first: of a short context no other one has anything to do, and the first CTAs have a place the soonest.
  const int row = blockIdx.x % (sequences * UNITS), split = blockIdx.x / (sequences * UNITS), unit = row % UNITS, sequence = row / UNITS;
  const int head = unit / ITEMS, item = unit % ITEMS;
  const int own = ITEMS == 1 ? G : min(G, SHARING - item * G);  // query heads; the others of G are zeros, which nobody looks at
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  launch_dependents();
  const int length = lengths[sequence], newest = length - 1;
  const int span = WINDOW ? min(length, WINDOW) : length;
  const Run tokens = run_of(length, split, max(1, min(splits, span / SHORTEST)));
  if (split >= tokens.used || length == 0) {
    wait_for_inputs();
    return;
  }
#if CHUNK > 1
  const int back = min(before[sequence], min(CHUNK, length) - 1);
#else
  constexpr int back = 0;
#endif
  const int fresh = newest - back;  // the first token that is not in the cache
  const int* table = tables + (size_t)sequence * table_width;
  const int first = tokens.begin / 16 + warp, last = (tokens.end + 15) / 16;  // sixteens; every WARPS-th is this warp's
  const int stop = min(tokens.end, fresh);                                    // of the tokens in the cache

  // Pages of this warp's next sixteens, two to each (for its eights): 16 sixteens in the lanes, and as many that come after them.
  auto page_list = [&](int turn) {
    const int eight = (first + (turn + lane / 2) * WARPS) * 2 + lane % 2;
    return eight * 8 < tokens.end ? table[eight * 8 / PAGE] : 0;
  };
  int pages = page_list(0), later = page_list(16);
  size_t at[2];  // where the eights of the sixteen to be fetched begin
  size_t scales_at[2];  // and their scales
  auto locate = [&](int turn) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const size_t page = __shfl_sync(~0u, pages, turn % 16 * 2 + half);
      const int offset = ((first + turn * WARPS) * 16 + half * 8) % PAGE;
      at[half] = ((page * PAGE + offset) * KV_HEADS + head) * HEAD_DIM;
      scales_at[half] = (page * KV_HEADS + head) * PAGE + offset;
    }
  };
  constexpr int STEP = KV_HEADS * HEAD_DIM;  // from token to token
  StoredWord k4[2][PIECES], v4[4][PARTS];
  u16 key_scale[2], value_scale[2];  // of tokens g and g + 8
  auto fetch_keys = [&] {  // beyond the end too, as far as its page: such scores are not looked at
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < PIECES; i++) k4[half][i] = load_word<4>(keys + at[half] + g * STEP + i * 32 + t * word_values<4>(i), i);
#if KV8
#pragma unroll
    for (int half = 0; half < 2; half++) key_scale[half] = key_scales[scales_at[half] + g];
#endif
  };
  auto value_token = [&](int i) { return i / 2 * 8 + 2 * t + i % 2; };  // of the lane's four
  auto fetch_values = [&](int start) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = start + value_token(i);
      const bool there = token >= tokens.begin && token < stop;  // else it may be anything, and 0 times that no number
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        v4[i][part] = {};
        if (there) v4[i][part] = load_word<8>(values + at[i / 2] + (2 * t + i % 2) * STEP + part * 64 + g * word_values<8>(part), part);
      }
    }
#if KV8
#pragma unroll
    for (int half = 0; half < 2; half++) value_scale[half] = value_scales[scales_at[half] + g];
#endif
  };
  if (first < last) {
    locate(0);
    fetch_keys();
    fetch_values(first * 16);
  }
  const bool owner = tokens.end == length, makes = tokens.end > fresh;
  float2 turn[TURNS];
  float weight[2][PER];  // of queries, of keys
#pragma unroll
  for (int i = 0; i < TURNS; i++)
    turn[i] = lane + 32 * i < ROTARY / 2 ? rope[(size_t)newest * (ROTARY / 2) + lane + 32 * i] : make_float2(1, 0);
#pragma unroll
  for (int i = 0; i < PER; i++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      weight[j][i] = QK_NORM && in_head(lane + 32 * i) ? to_float((j ? key_norm : query_norm)[lane + 32 * i]) : 1.f;
  const size_t slot = (size_t)table[newest / PAGE] * PAGE + newest % PAGE;
  const float factor = scale * 1.4426950408889634f;
  for (int i = threadIdx.x; i < (8 - own) * QUERY_ROW; i += THREADS) sh.query[own][i] = 0;
#if VECTORS
  for (int i = threadIdx.x; i < own * HEAD_DIM; i += THREADS) affine_here[i] = affine[(head * SHARING + item * G) * HEAD_DIM + i];
#endif
  wait_for_inputs();

  const int tasks = own + 2 * makes * (back + 1);  // query heads, then key and value of each new token
  auto token_of = [&](int task) { return CHUNK == 1 || task < own ? back : (task - own) / 2; };  // counted from `fresh`
  float v[ROUNDS][PER];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {  // all of them are asked for before the first is looked at
    const int task = warp + i * WARPS, side = (task - own) % 2;
    const int column = task < own ? head * SHARING + item * G + task : HEADS + side * KV_HEADS + head;
    const u16* row = qkv + (size_t)(sequence - back + token_of(task)) * QKV_ROW + GATES;
#pragma unroll
    for (int j = 0; j < PER; j++)
      v[i][j] = task < tasks && in_head(lane + 32 * j) ? to_float(row[column * HEAD_DIM + lane + 32 * j]) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int task = warp + i * WARPS;
    if (task >= tasks) break;
    const int side = (task - own) % 2, token = token_of(task);  // 0: key, 1: value
    const bool turned = task < own || side == 0;
#if CHUNK > 1
    if (task >= own && side == 0)
#pragma unroll
      for (int j = 0; j < TURNS; j++)
        if (lane + 32 * j < ROTARY / 2) turn[j] = rope[(size_t)(fresh + token) * (ROTARY / 2) + lane + 32 * j];
#endif
    prepare_head(v[i], weight[task >= own], turn, epsilon, QK_NORM && turned, turned, sh.partial[warp][0], lane);
    if (task < own) {
      store_query(v[i], factor, sh.query[task], lane);
      continue;
    }
#if KV8
    store_newest(v[i], side ? fixed_value : fixed_key, sh.newest[side][token], &sh.newest_scales[side][token], lane);
#else
    store_newest(v[i], 0.f, sh.newest[side][token], nullptr, lane);
#endif
    __syncwarp();
    if (item != 0 || !owner || token != back) continue;
    Stored* cache = (side ? values : keys) + (slot * KV_HEADS + head) * HEAD_DIM + lane * 8;
    if (lane < HEAD_DIM / 8) *(StoredWord*)cache = *(const StoredWord*)(sh.newest[side][token] + lane * 8);
#if KV8
    if (lane == 0) (side ? value_scales : key_scales)[scale_place(slot, head)] = sh.newest_scales[side][token];
#endif
  }
  __syncthreads();

  Running run;
#pragma unroll
  for (int i = 0; i < 2; i++) run.most[i] = LOWEST, run.sum[i] = 0;
#pragma unroll
  for (int i = 0; i < PRODUCTS * 4; i++) run.acc[i / 4][i % 4] = 0;
#pragma unroll 1
  for (int n = 0, sixteen = first; sixteen < last; n++, sixteen += WARPS) {
    const int start = sixteen * 16, next = sixteen + WARPS;
    if (makes && newest >= start && fresh < start + 16) {
      auto is_new = [&](int token) { return CHUNK == 1 ? token == newest : token >= fresh && token <= newest; };
      auto place_of = [&](int token) { return CHUNK == 1 ? 0 : token - fresh; };
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int token = start + half * 8 + g;
        if (!is_new(token)) continue;
        const Stored* key = sh.newest[0][place_of(token)];
#pragma unroll
        for (int i = 0; i < PIECES; i++) k4[half][i] = load_word<4>(key + i * 32 + t * word_values<4>(i), i);
        if (KV8) key_scale[half] = sh.newest_scales[0][place_of(token)], value_scale[half] = sh.newest_scales[1][place_of(token)];
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = start + value_token(i);
        if (!is_new(token)) continue;
        const Stored* value = sh.newest[1][place_of(token)];
#pragma unroll
        for (int part = 0; part < PARTS; part++) v4[i][part] = load_word<8>(value + part * 64 + g * word_values<8>(part), part);
      }
    }
    float by[2] = {factor, factor}, value_by[2] = {1, 1};  // of tokens g and g + 8
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = start + half * 8 + g;  // beyond the run lies what may be no number
      if (KV8) by[half] = scale_of(key_scale[half]);
      if (KV8 && token >= tokens.begin && token < tokens.end) value_by[half] = scale_of(value_scale[half]);
    }
    float score[2][4] = {};  // two chains of additions; token g + 8 · (j / 2), head 2t + j % 2
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const uint4 q = load_word<4>(sh.query[g] + i * 32 + t * word_values<4>(i), i);
      const uint4 low = widened(k4[0][i]), high = widened(k4[1][i]);
      mma16<HALVES>(score[0], low.x, high.x, low.y, high.y, q.x, q.y);
      if (word_values<4>(i) == 8) mma16<HALVES>(score[1], low.z, high.z, low.w, high.w, q.z, q.w);
    }
    if (next < last) {
      if ((n + 1) % 16 == 0) pages = later, later = page_list(n + 17);
      locate(n + 1);
      fetch_keys();
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = start + g + j / 2 * 8;
      float bent = (score[0][j] + score[1][j]) * by[j / 2];
#if SOFT_CAP
      bent = bend(bent, soft_cap * 1.4426950408889634f);
#endif
      score[0][j] = token >= tokens.begin && token < tokens.end ? bent : LOWEST;
    }
    const uint2 weights = weigh(run, score[0], value_by);
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {  // of the lane's word i / 4, dimensions 2 · (i % 4) and the next
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; j++) word[j] = word_of(widened(v4[j][i / 4]), i % 4);
      mma16<HALVES>(run.acc[i], __byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                  __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632), weights.x, weights.y);
    }
    if (next < last) fetch_values(next * 16);
  }

#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) run.sum[j] += __shfl_xor_sync(~0u, run.sum[j], o);
    const int h = 2 * t + j;
    if (h >= G) continue;
    float* mine = sh.partial[warp][h];
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++)
      *(float2*)(mine + i / 4 * 64 + g * word_values<8>(i / 4) + i % 4 * 2) = make_float2(run.acc[i][j], run.acc[i][2 + j]);
    if (g == 0) mine[HEAD_DIM] = run.most[j], mine[HEAD_DIM + 1] = run.sum[j];
  }
  __syncthreads();
#if VECTORS
  float biases = 0;
#endif
  auto write = [&](int i, float value) {
    if (ITEMS > 1 && i >= own * HEAD_DIM) return;
    const int n = (head * SHARING + item * G) * HEAD_DIM + i;
    if (GATED) value /= 1.f + __expf(-to_float(qkv[(size_t)sequence * QKV_ROW + n]));
#if VECTORS
    const u32 scale_and_bias = affine_here[i];
    const float rounded = to_float(to_bits(value));
    biases += rounded * high_float(scale_and_bias);
    out[vector_place<VECTORS>(sequence, n / 16 * 2 + n % 2, groups) * 8 + n % 8 / 2 * 2 + n % 16 / 8] = to_bits(rounded * low_float(scale_and_bias));
#elif PACKED
    out[packed_place(sequence, n, groups)] = to_bits(value);
#else
    out[(size_t)sequence * HEADS * HEAD_DIM + n] = to_bits(value);
#endif
  };
  auto end = [&] {  // of the writing
#if VECTORS
    const float sum = warp_sum(biases);
    if (lane == 0) of_warps[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += of_warps[w];
    bias_sums[sequence * UNITS + unit] = all;
#endif
  };
  auto sink_of = [&](int h) {  // in powers of two, as scores are
#if SINKS
    return h < own ? to_float(sinks[head * SHARING + item * G + h]) * 1.4426950408889634f : LOWEST;
#else
    return LOWEST;
#endif
  };
  const size_t place = ((size_t)sequence * UNITS + unit) * splits;
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, d = i % HEAD_DIM;
    const float3 state = merge_warps(sh, h, d);
    if (tokens.used == 1) {
      write(i, state.x / (SINKS ? state.z + exp2_fast(sink_of(h) - state.y) : state.z));
    } else {
      float* to = scratch + (place + split) * G * STATE + h * STATE;
      to[d] = state.x;
      if (d == 0) to[HEAD_DIM] = state.y, to[HEAD_DIM + 1] = state.z;
    }
  }
  if (tokens.used == 1) return end();
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* ticket = tickets + sequence * UNITS + unit;
    last_one = atomicAdd(ticket, 1) == tokens.used - 1;
    if (last_one) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last_one) return;
  const float* states = scratch + place * G * STATE;
  for (int h = warp; h < G; h += WARPS) share_out(sh, states, tokens.used, h, sink_of(h), lane);
  __syncthreads();
  float* sums = sh.partial[0][0];  // [team][head][dimension]
  const int team = TEAMS > 1 ? threadIdx.x / OUT_WORDS : 0;
  for (int word = threadIdx.x - team * OUT_WORDS; word < OUT_WORDS && team < TEAMS; word += THREADS) {
    const int h = word * 4 / HEAD_DIM;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int run = team; run < tokens.used; run += TEAMS) {  // several are asked for before the first is looked at
      const float4 v = __ldcg((const float4*)(states + (size_t)(run * G + h) * STATE + word * 4 % HEAD_DIM));
      const float share = sh.share[h][run];
      sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
    }
    *(float4*)(sums + (team * OUT_WORDS + word) * 4) = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += THREADS) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < TEAMS; j++) sum += sums[j * G * HEAD_DIM + i];
    write(i, sum);
  }
  end();
}
