// One new token of each row through latent attention: all heads share one cached row of RANK + ROPE numbers a token.
//
//   absorb    inside[h] = K[h]ᵀ · q_plain[h] | rope(q_rope[h]),  cache[newest] = norm(latent) | rope(key)
//   attend    part = softmax over a run of tokens of (inside · row · scale), times row[0 … RANK)
//   release   out[h] = V[h] · (parts of all runs, merged)
//
// K [HEADS][PLAIN][RANK] and V [HEADS][VALUE][RANK] are the two halves of kv_b. A row's numbers are read once for their two
// uses: as a key (all of it) and as a value (its first RANK).
//
// Work split. absorb: a CTA has 64 columns of one head's K in registers and up to 8 rows of the step; one more CTA norms and
// stores the rows' own latents, a warp each. release: a CTA has 32 values of one head, and merges the runs for itself.
// attend: a CTA has a run of tokens of one row and 16 heads, which are the rows of a product on the matrix units:
//
//      tile of 32 tokens in shared memory (two of them: one is fetched while the other is worked on)
//      warp w:   scores [16 heads × 8 tokens w] = inside · rowsᵀ        → shared memory
//                weights [16 × 32] of all tokens, by every warp          → registers
//                acc [16 × RANK / 4 numbers w] += weights · rows         (rows transposed on their way from shared memory)
//
// Runs are cut from the length on the device, because a captured grid is fixed: `splits` of them, none shorter than SHORTEST.
// Rows of one sequence (speculation) need nothing special: all rows of a step are stored before any of them is read.
// Limit: absorb and release bytes of K and V; attend bytes of the cache, and for short contexts the latency of one tile.
// Before the wait weights, lengths and tables are read, and of the cache what earlier steps stored.
//
// defines: FP16, HEADS, PLAIN, RANK, ROPE, VALUE, PAGE, SHORTEST
#include "common.cuh"

constexpr int WIDTH = RANK + ROPE, QUERY = PLAIN + ROPE;
constexpr int ROWS = 8;                           // of a step in one CTA of absorb or release
constexpr int TILE = 32, WARPS = 4, THREADS = 128;  // of attend
constexpr int PITCH = WIDTH + 8;                  // rows that follow each other lie in different banks
constexpr int SCORES = TILE + 8;                  // pitch of a head's scores
constexpr int GROUPS = (HEADS + 15) / 16;         // of heads
constexpr int OWN = RANK / WARPS;                 // numbers that a warp sums up
constexpr int STATE = 16 * RANK;                  // a run's sums
constexpr int FRESH = 8;                          // tokens of a sequence that one step may store
static_assert(PLAIN % 32 == 0 && RANK % 64 == 0 && ROPE % 32 == 0 && VALUE % 32 == 0, "whole fragments");
static_assert(SHORTEST % TILE == 0, "runs are of whole tiles");

struct Cut {
  int each, used;  // tokens of a run, and runs
};
DEVICE Cut cut_of(int length, int splits) {
  const int each = max(SHORTEST, ((length + splits - 1) / splits + TILE - 1) / TILE * TILE);
  return {each, (length + each - 1) / each};
}
DEVICE void unpack(uint4 word, float (&v)[8]) {
  v[0] = low_float(word.x), v[1] = high_float(word.x), v[2] = low_float(word.y), v[3] = high_float(word.y);
  v[4] = low_float(word.z), v[5] = high_float(word.z), v[6] = low_float(word.w), v[7] = high_float(word.w);
}
DEVICE size_t slot_of(const int* table, int token) { return (size_t)table[token / PAGE] * PAGE + token % PAGE; }
DEVICE float2 turned(float a, float b, float2 turn) { return make_float2(a * turn.x - b * turn.y, b * turn.x + a * turn.y); }

// One warp: the row that a token leaves in the cache.
DEVICE void store_row(const u16* from, const u16* norm, const float2* rope, u16* to, float epsilon, int lane) {
  constexpr int PER = RANK / 64;  // pairs of a lane
  u32 pairs[PER];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    pairs[i] = ((const u32*)from)[lane + 32 * i];
    squares += low_float(pairs[i]) * low_float(pairs[i]) + high_float(pairs[i]) * high_float(pairs[i]);
  }
  const float inverse = rsqrtf(warp_sum(squares) / RANK + epsilon);
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const u32 factors = ((const u32*)norm)[lane + 32 * i];
    const u32 scaled = pack2(low_float(pairs[i]) * inverse, high_float(pairs[i]) * inverse);
    ((u32*)to)[lane + 32 * i] = pack2(low_float(scaled) * low_float(factors), high_float(scaled) * high_float(factors));
  }
  for (int i = lane; i < ROPE / 2; i += 32) {
    const float2 pair = turned(to_float(from[RANK + i]), to_float(from[RANK + ROPE / 2 + i]), rope[i]);
    to[RANK + i] = to_bits(pair.x), to[RANK + ROPE / 2 + i] = to_bits(pair.y);
  }
}

// queries [rows][query_pitch], HEADS · QUERY of them in each; latents [rows][latent_pitch] of WIDTH; inside [rows][HEADS][WIDTH]
extern "C" __global__ void __launch_bounds__(256)
absorb(const u16* queries, const u16* latents, const u16* norm, const u16* keys, const float2* rope, const int* lengths,
       const int* tables, u16* cache, u16* inside, float epsilon, int query_pitch, int latent_pitch, int table_width, int rows) {
  constexpr int SLICES = RANK / 64, PER = PLAIN / 32, TURNED = 16 * (ROPE / 2);
  __shared__ float sums[ROWS][8][64];  // of each warp
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, first = blockIdx.y * ROWS, count = min(ROWS, rows - first);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = threadIdx.x % 8, part = threadIdx.x / 8;
  const int more = blockIdx.x - HEADS * SLICES;  // CTAs without weights
  launch_dependents();
  if (more == 0) {  // the rows themselves
    const int row = first + warp, length = warp < count ? lengths[row] : 0;
    u16* const to = cache + (length ? slot_of(tables + (size_t)row * table_width, length - 1) : 0) * WIDTH;
    wait_for_inputs();
    if (length) store_row(latents + (size_t)row * latent_pitch, norm, rope + (size_t)(length - 1) * (ROPE / 2), to, epsilon, lane);
    return;
  }
  if (more > 0) {  // what rope turns of 16 heads; beyond those, CTAs that only fill the GPU
    wait_for_inputs();
    for (int i = threadIdx.x; i < (more <= GROUPS ? count * TURNED : 0); i += 256) {
      const int row = first + i / TURNED, h = (more - 1) * 16 + i % TURNED / (ROPE / 2), at = i % (ROPE / 2);
      if (h >= HEADS) continue;
      const int position = max(0, lengths[row] - 1);
      const u16* from = queries + (size_t)row * query_pitch + h * QUERY + PLAIN;
      const float2 pair = turned(to_float(from[at]), to_float(from[ROPE / 2 + at]), rope[(size_t)position * (ROPE / 2) + at]);
      u16* to = inside + ((size_t)row * HEADS + h) * WIDTH + RANK;
      to[at] = to_bits(pair.x), to[ROPE / 2 + at] = to_bits(pair.y);
    }
    return;
  }
  uint4 weights[PER];
#pragma unroll
  for (int i = 0; i < PER; i++)
    weights[i] = constant_load(keys + ((size_t)head * PLAIN + part + 32 * i) * RANK + slice * 64 + piece * 8);
  wait_for_inputs();
  for (int row = 0; row < count; row++) {
    const u16* query = queries + (size_t)(first + row) * query_pitch + head * QUERY + part;
    u16 q[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) q[i] = query[32 * i];
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < PER; i++) {
      float w[8];
      unpack(weights[i], w);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += to_float(q[i]) * w[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      sum[j] += __shfl_xor_sync(~0u, sum[j], 8);
      sum[j] += __shfl_xor_sync(~0u, sum[j], 16);
      if (lane < 8) sums[row][warp][piece * 8 + j] = sum[j];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * 64; i += 256) {
    const int row = i / 64, column = i % 64;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += sums[row][w][column];
    inside[((size_t)(first + row) * HEADS + head) * WIDTH + slice * 64 + column] = to_bits(sum);
  }
}

struct Shared {
  __align__(16) u16 query[16][PITCH];    // zeros from HEADS on
  __align__(16) u16 rows[2][TILE][PITCH];
  __align__(16) float scores[16][SCORES];
};

// states [row][group][split]: STATE sums, then 16 maxima and 16 sums of weights, in base 2
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attend(const u16* inside, const u16* cache, const int* lengths, const int* tables, float* states, float scale, int table_width,
       int rows, int splits) {
  extern __shared__ __align__(128) u8 raw[];
  Shared& sh = *(Shared*)raw;
  const int split = blockIdx.x % splits, group = blockIdx.x / splits % GROUPS, row = blockIdx.x / splits / GROUPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  launch_dependents();
  const int length = row < rows ? lengths[row] : 0;
  const Cut cut = cut_of(length, splits);
  if (split >= cut.used) {
    wait_for_inputs();
    return;
  }
  const int* table = tables + (size_t)row * table_width;
  const int begin = split * cut.each, end = min(length, begin + cut.each), tiles = (end - begin + TILE - 1) / TILE;

  const int settled = length - FRESH;  // tokens before this one were stored by earlier steps
  auto fetch = [&](int tile, int from_token, int to_token) {  // those of a tile that lie between two tokens; beyond the end zeros
    for (int i = warp; i < TILE; i += WARPS) {
      const int token = begin + tile * TILE + i;
      if (token < from_token || token >= to_token) continue;
      const u16* from = cache + slot_of(table, min(token, end - 1)) * WIDTH;
      for (int j = lane; j < WIDTH / 8; j += 32)
        copy16_or_zeros(shared_address(&sh.rows[tile % 2][i][j * 8]), from + j * 8, token < end);
    }
  };
  constexpr int ALL = 1 << 30;
  fetch(0, 0, settled);
  wait_for_inputs();
  fetch(0, settled, ALL);
  for (int i = warp; i < 16; i += WARPS) {
    const int head = group * 16 + i;
    const u16* from = inside + ((size_t)row * HEADS + min(head, HEADS - 1)) * WIDTH;
    for (int j = lane; j < WIDTH / 8; j += 32) copy16_or_zeros(shared_address(&sh.query[i][j * 8]), from + j * 8, head < HEADS);
  }
  copy_group();
  float acc[OWN / 8][4] = {}, most[2] = {LOWEST, LOWEST}, sum[2] = {};
  for (int tile = 0; tile < tiles; tile++) {
    copy_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) fetch(tile + 1, 0, ALL);
    copy_group();
    const u16(*here)[PITCH] = sh.rows[tile % 2];

    float score[2][4] = {};  // two sums, so that products need not wait for each other
    const u32 query_at = shared_address(&sh.query[lane % 16][lane / 16 * 8]);
    const u32 row_at = shared_address(&here[warp * 8 + lane % 8][lane / 8 * 8]);
#pragma unroll 6
    for (int k = 0; k < WIDTH; k += 32) {
      const uint4 b = load_matrices<false>(row_at + 2 * k);
      const uint4 a0 = load_matrices<false>(query_at + 2 * k), a1 = load_matrices<false>(query_at + 2 * k + 32);
      mma16<FP16>(score[0], a0.x, a0.y, a0.z, a0.w, b.x, b.y);
      mma16<FP16>(score[1], a1.x, a1.y, a1.z, a1.w, b.z, b.w);
    }
    const int column = warp * 8 + 2 * t, token = begin + tile * TILE + column;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float value = (score[0][j] + score[1][j]) * scale;
      sh.scores[g + j / 2 * 8][column + j % 2] = token + j % 2 < end ? value : LOWEST;
    }
    __syncthreads();

    float fade[2];
    u32 weights[TILE / 16][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {  // heads g and g + 8
      float own[TILE / 4], top = most[half];
#pragma unroll
      for (int i = 0; i < TILE / 8; i++) {
        const float2 pair = *(const float2*)&sh.scores[g + half * 8][i * 8 + 2 * t];
        own[2 * i] = pair.x, own[2 * i + 1] = pair.y, top = fmaxf(top, fmaxf(pair.x, pair.y));
      }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      fade[half] = exp2_fast(most[half] - top), most[half] = top;
      sum[half] *= fade[half];
#pragma unroll
      for (int i = 0; i < TILE / 8; i++) {
        const u32 pair = pack2(exp2_fast(own[2 * i] - top), exp2_fast(own[2 * i + 1] - top));
        sum[half] += low_float(pair) + high_float(pair);  // what is multiplied: the rounded weights
        weights[i / 2][i % 2 * 2 + half] = pair;
      }
    }
#pragma unroll
    for (int i = 0; i < OWN / 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) acc[i][j] *= fade[j / 2];
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      const u32 value_at = shared_address(&here[k * 16 + lane % 16][warp * OWN + lane / 16 * 8]);
#pragma unroll
      for (int i = 0; i < OWN / 16; i++) {
        const uint4 b = load_matrices<true>(value_at + 32 * i);
        mma16<FP16>(acc[2 * i], weights[k][0], weights[k][1], weights[k][2], weights[k][3], b.x, b.y);
        mma16<FP16>(acc[2 * i + 1], weights[k][0], weights[k][1], weights[k][2], weights[k][3], b.z, b.w);
      }
    }
  }

  float* state = states + ((size_t)(row * GROUPS + group) * splits + split) * (STATE + 32);
#pragma unroll
  for (int i = 0; i < OWN / 8; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *(float2*)&state[(g + half * 8) * RANK + warp * OWN + i * 8 + 2 * t] = make_float2(acc[i][2 * half], acc[i][2 * half + 1]);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    if (warp == 0 && t == 0) state[STATE + g + half * 8] = most[half], state[STATE + 16 + g + half * 8] = sum[half];
  }
}

// out [rows][HEADS · VALUE]; rows of length 0 become zeros
extern "C" __global__ void __launch_bounds__(256)
release(const float* states, const u16* values, const int* lengths, u16* out, int rows, int splits) {
  constexpr int SLICES = VALUE / 32, PER = (RANK / 8 + 31) / 32, AT_ONCE = 16;  // runs that are merged at a time
  __shared__ __align__(16) float mixed[ROWS][RANK];
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, first = blockIdx.y * ROWS, count = min(ROWS, rows - first);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = head / 16, place = head % 16;
  launch_dependents();
  uint4 weights[4][PER];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const int value = min(head, HEADS - 1) * VALUE + slice * 32 + warp * 4 + i, piece = min(lane + 32 * j, RANK / 8 - 1);
      weights[i][j] = constant_load(values + (size_t)value * RANK + piece * 8);
    }
  int length = lengths[first];
  wait_for_inputs();
  if (head >= HEADS) return;  // a CTA that only fills the GPU
#pragma unroll 1
  for (int row = 0; row < count; row++) {
    const int used = cut_of(length, splits).used;
    if (row + 1 < count) length = lengths[first + row + 1];
    for (int at = threadIdx.x; at < RANK / 2; at += 256) {
      const float* from = states + (size_t)((first + row) * GROUPS + group) * splits * (STATE + 32);
      float2 sum = make_float2(0, 0);
      float most = LOWEST, total = 0;
      for (int run = 0; run < used; run += AT_ONCE) {  // one wait for memory
        float2 pair[AT_ONCE];
        float top[AT_ONCE], weight[AT_ONCE], next = most;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const float* state = from + (size_t)min(run + i, used - 1) * (STATE + 32);
          pair[i] = *(const float2*)(state + place * RANK + 2 * at);
          top[i] = state[STATE + place], weight[i] = state[STATE + 16 + place];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) next = fmaxf(next, top[i]);
        const float fade = exp2_fast(most - next);
        sum.x *= fade, sum.y *= fade, total *= fade, most = next;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const float share = run + i < used ? exp2_fast(top[i] - next) : 0.f;
          sum.x += share * pair[i].x, sum.y += share * pair[i].y, total += share * weight[i];
        }
      }
      const float inverse = used ? 1.f / total : 0.f;
      *(float2*)&mixed[row][2 * at] = make_float2(sum.x * inverse, sum.y * inverse);
    }
  }
  __syncthreads();
  for (int row = 0; row < count; row++) {
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const int piece = lane + 32 * j;
      if (piece < RANK / 8) {
        const float4 low = *(const float4*)&mixed[row][piece * 8], high = *(const float4*)&mixed[row][piece * 8 + 4];
        const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float w[8];
          unpack(weights[i][j], w);
#pragma unroll
          for (int k = 0; k < 8; k++) sum[i] += w[k] * x[k];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = warp_sum(sum[i]);
    if (lane == 0) {
      u16* to = out + ((size_t)(first + row) * HEADS + head) * VALUE + slice * 32 + warp * 4;
      *(uint2*)to = make_uint2(pack2(sum[0], sum[1]), pack2(sum[2], sum[3]));
    }
  }
}
