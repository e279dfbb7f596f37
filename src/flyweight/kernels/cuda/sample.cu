// The next token of each row: penalties, bias, mask, temperature, top_k, top_p, min_p and the draw.
//
//   l = penalties(logits + bias), −∞ where the mask forbids;  m = 2^((l − max l) · log2(e) / T)
//   kept: of all tokens by (l falling, id rising) the first top_k, of these the first whose masses
//         before them sum to less than top_p of the whole, of these those with m ≥ min_p
//   token = argmax over kept of l · log2(e) / T − log2(E(seed, position, id)), E exponential noise;
//           T = 0: argmax of l
//
// A token's place in that order is one 64-bit word (l in an order that integers share, id turned
// round). Nothing is sorted, and top_p's border is never looked for:
//
//   draw first   The token is drawn from all, in the pass that finds the largest logit. If top_p
//                keeps it, it is the argmax over what top_p keeps, too; that asks for the mass of
//                the words above it, one more pass. If it is not kept, nothing up to its word is,
//                and the draw is repeated above it: with top_p 0.9 once in ten times, and
//                log(1 / top_p) times for flat logits.
//   min_p        The largest logit gives its border: the draw is a second pass, above that.
//   few          A small top_k compares the largest logits of GROUPS groups of tokens: the k-th of
//                them is a bound below which no kept token can lie, and hardly more than k tokens
//                are above it. The first CTA takes these, ranks all pairs and does the rest alone.
//   many         A large top_k, or one whose candidates are too many (ties), finds its last word by
//                histograms of words, 10 bits a round; then the draw as above, from what is left.
//
// Masses are added as integers, so that no order of additions changes a result; what a row gets
// depends on nothing of its neighbours. (`kernels/sample_reference.py`: the same in float64.)
//
// Work split: a cluster of CTAs a row, each of which reads its part again in every pass (from L1)
//
//   row    ├ CTA 0 ┼ CTA 1 ┼ … ┤   2 tokens a thread, then the next 2 · THREADS · CLUSTER
//   pass   read, change, look ─► [weigh ─► [draw again ─► weigh ─► …]]
//          ─► : a block reduction, then one barrier of the cluster and reads of each other's shared
//
// so that a greedy row or one with a temperature costs one exchange, top_p two. Loops stay rolled:
// a step has read a whole model since the last launch, so code comes from memory, as data does.
// Limit: latency of exchanges at one row, the noise's integer instructions at many.
//
// defines: VOCAB, TYPE (0 bfloat16, 1 float16, 2 float32), CLUSTER, THREADS
#include "common.cuh"
#include "cluster.cuh"

#define BINS 1024
#define OWN (BINS / THREADS)  // bins that a thread adds up
#define STEP (2 * THREADS * CLUSTER)  // tokens between two pairs of a thread
#define ROUNDS ((VOCAB + STEP - 1) / STEP)
#define GROUPS (THREADS * CLUSTER < 128 ? THREADS * CLUSTER : 128)
#define OWN_GROUPS (GROUPS / CLUSTER)
#define GROUP_LANES (THREADS / OWN_GROUPS < 32 ? THREADS / OWN_GROUPS : 32)
#define FEW (GROUPS * 3 / 4)  // a top_k for which the groups' largest are a good guess
#define LIST THREADS  // candidates: one a thread
#define MOST_BIASES 320
#define BIAS_WORDS 256
#define MOST_GUESSES 7  // before a row of a step that checks them
#define WARPS (THREADS / 32)
#define BYTES (TYPE == 2 ? 4 : 2)
#define UNIT 0x1p44f  // of masses: what the largest logit has

// What a row asks to be done to its logits before anything else.
struct Changes {
  int at, biases, position, guesses;
  float repetition, presence, frequency;
  bool penalized;
  const u8* allowed;  // bits, or null
  const u8* in_prompt;
  const int* in_answer;
  u32 biased[BIAS_WORDS];  // a bit a pair of tokens, modulo their number: may have a bias
  int ids[MOST_BIASES];
  float values[MOST_BIASES];
  int guessed[MOST_GUESSES];  // tokens that count as if they stood in the answer

  DEVICE bool any() const { return biases || penalized || allowed; }
  // By all threads, between two barriers.
  DEVICE void read_biases(const u64* all_ids, const float* all_values, const u64* ends) {
    for (int i = threadIdx.x; i < biases; i += THREADS) {
      const size_t entry = (size_t)at * MOST_BIASES + i;
      const int id = (int)all_ids[entry];
      ids[i] = id;
      values[i] = (u64)position < ends[entry] ? all_values[entry] : 0.f;
      atomicOr(&biased[id / 64 % BIAS_WORDS], 1u << id / 2 % 32);
    }
  }
  DEVICE void bias(int first, float (&v)[2]) const {
    if (!(biased[first / 64 % BIAS_WORDS] >> first / 2 % 32 & 1)) return;
    int low = 0;
    for (int high = biases; low < high;) {
      const int middle = (low + high) / 2;
      if (ids[middle] < first) low = middle + 1;
      else high = middle;
    }
    for (; low < biases && ids[low] < first + 2; low++) {
      if (ids[low] == first) v[0] += values[low];
      else v[1] += values[low];
    }
  }
  DEVICE float penalize(int id, float v) const {
    if (id >= VOCAB) return v;
    const size_t place = (size_t)at * VOCAB + id;
    int times = in_answer[place];
    for (int i = 0; i < guesses; i++) times += guessed[i] == id;
    if (times > 0 || in_prompt[place]) v = v > 0.f ? v / repetition : v * repetition;
    if (times > 0) v = __fadd_rn(__fadd_rn(v, -__fmul_rn(frequency, (float)times)), -presence);
    return v;
  }
  // Not inlined: most rows have no changes, and every pass would have them in the way of its code.
  __device__ __noinline__ float2 apply(int first, float2 pair) const {
    float v[2] = {pair.x, pair.y};
    if (biases) bias(first, v);
    if (penalized) v[0] = penalize(first, v[0]), v[1] = penalize(first + 1, v[1]);
    if (allowed && first < VOCAB) {
      const u32 bits = allowed[first / 8] >> first % 8;
      if (!(bits & 1)) v[0] = LOWEST;
      if (!(bits & 2)) v[1] = LOWEST;
    }
    return make_float2(v[0], v[1]);
  }
};

struct Asked {  // of the filters
  float temperature, top_p, min_p;
  u64 top_k;

  DEVICE bool random() const { return temperature != 0.f; }
  DEVICE bool few() const { return random() && top_k && top_k <= FEW; }
  DEVICE float farthest() const {  // octaves that a token may be below the largest
    return min_p > 0.f ? fmaxf(0.f, -log2f(min_p)) : __int_as_float(0x7f800000);
  }
};
struct Bin { u32 bin, before, all; };  // a bin, what is before it, and the count of all bins
struct __align__(16) Shared {
  u32 histograms[2][BINS];
  u64 list[LIST];  // this CTA's candidates
  u64 candidates[LIST], masses[LIST];  // the cluster's, in its first CTA
  u64 words[4][2];  // what this CTA tells the others
  u64 warp_words[2][32];
  u64 mass;  // of what top_k has left
  u32 warp_counts[32];
  u32 groups[OWN_GROUPS], all_groups[GROUPS];  // largest logits, ordered
  u32 ends[2];  // the largest logit, and the bound of candidates
  u32 listed;
  Changes changes;
  Bin bin;
};
#ifndef ON_THE_HOST
extern __shared__ __align__(1024) u8 raw[];
#endif

static_assert(sizeof(Shared) <= 40 << 10, "SHARED of kernels/sample.py");

// Parameters of the rows of a table: COLUMNS and INTEGERS of kernels/sample.py.
enum { TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY };
enum { TOP_K, SEED, BIASES };

DEVICE u32 ordered(float v) {
  const u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float from_ordered(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
DEVICE u64 word_of(float v, int id) { return (u64)ordered(v) << 32 | (u32)~id; }
DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }
DEVICE u64 warp_largest(u64 v) {
  const u32 high = __reduce_max_sync(~0u, (u32)(v >> 32));
  const u32 low = __reduce_max_sync(~0u, (u32)(v >> 32) == high ? (u32)v : 0);
  return (u64)high << 32 | low;
}
DEVICE u64 lanes_sum(u64 v, int lanes) {
#pragma unroll
  for (int o = 16; o; o >>= 1)
    if (o < lanes) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

DEVICE u32 mix(u32 x) {  // lowbias32
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
struct Noise {
  u32 first, second;
  DEVICE void begin(u64 seed, u32 position) {
    first = mix(mix((u32)seed) ^ position);
    second = mix(mix((u32)(seed >> 32) ^ 0x9e3779b9u) + position);
  }
  DEVICE u32 bits(int id) const { return mix(mix((u32)id ^ first) + second); }
};
DEVICE float uniform(u32 bits) {
  // full relative precision near 0, where the winners are, and never 0 or 1
  return fminf(((float)bits + .5f) * 0x1p-32f, 1.f - 0x1p-24f);
}
DEVICE float uniform_in_1_2(u32 bits) { return __uint_as_float(0x3f800000u | bits >> 9); }  // below

// Two logits as they lie; −∞ where there is none.
struct Pair { u32 words[BYTES / 2]; };

struct Row {
  const char* logits;
  bool aligned, changed;
  int rank;
  Shared* sh;
  int slot, buffer;
  Noise noise;
  float top, scale;
  u64 within;      // words below it are not among the first top_k
  u64 least;       // words below it are not drawn,
  float farthest;  // nor what is more octaves below the largest

  // ---- tokens ----
  DEVICE Pair load(int first) const {
    Pair pair;
    const char* from = logits + (size_t)first * BYTES;
    if (aligned && first + 2 <= VOCAB) {
      if (BYTES == 4) {
        const uint2 both = *(const uint2*)from;
        pair.words[0] = both.x, pair.words[BYTES / 2 - 1] = both.y;
      } else {
        pair.words[0] = *(const u32*)from;
      }
      return pair;
    }
    const u32 nothing = TYPE == 0 ? 0xff80 : TYPE == 1 ? 0xfc00 : 0xff800000u;
    u32 bits[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      bits[j] = nothing;
      if (first + j < VOCAB) bits[j] = BYTES == 4 ? ((const u32*)from)[j] : ((const u16*)from)[j];
    }
    if (BYTES == 4) pair.words[0] = bits[0], pair.words[BYTES / 2 - 1] = bits[1];
    else pair.words[0] = bits[0] | bits[1] << 16;
    return pair;
  }
  DEVICE void read(const Pair& pair, int first, float (&v)[2]) const {
    if (BYTES == 4) {
      v[0] = __uint_as_float(pair.words[0]), v[1] = __uint_as_float(pair.words[BYTES / 2 - 1]);
    } else {
      v[0] = float_of<TYPE == 1>((u16)pair.words[0]);
      v[1] = float_of<TYPE == 1>((u16)(pair.words[0] >> 16));
    }
    if (changed) {
      const float2 other = sh->changes.apply(first, make_float2(v[0], v[1]));
      v[0] = other.x, v[1] = other.y;
    }
    v[0] = fmaxf(v[0], LOWEST), v[1] = fmaxf(v[1], LOWEST);  // a NaN is never chosen
  }
  template <class F> DEVICE void each(F f) const {  // f(l, id) of this thread's tokens
    int first = (rank * THREADS + (int)threadIdx.x) * 2;
    Pair next = load(first);
#pragma unroll 2
    for (int i = 0; i < ROUNDS; i++) {
      const Pair pair = next;
      if (i + 1 < ROUNDS) next = load(first + STEP);
      float v[2];
      read(pair, first, v);
      f(v[0], first), f(v[1], first + 1);
      first += STEP;
    }
  }
  DEVICE float value(int id) const {
    float v[2];
    read(load(id & ~1), id & ~1, v);
    return id & 1 ? v[1] : v[0];
  }
  // How many octaves a token's mass is below the largest; never falls as l falls.
  DEVICE float octaves(float l) const { return l == top ? 0.f : (top - l) * scale; }
  DEVICE u64 mass_of(float l) const { return (u64)(exp2_fast(-octaves(l)) * UNIT); }
  DEVICE float scaled(float l) const { return fmaxf(l * scale, -0x1p126f); }
  DEVICE float score(float l, u32 bits) const {
    return scaled(l) - log2_fast(-log1pf(-uniform(bits)));
  }

  // ---- exchanges: every thread of the cluster gets the same ----
  template <bool SUM> DEVICE static u64 warp_joined(u64 v) {
    return SUM ? lanes_sum(v, 32) : warp_largest(v);
  }
  // The largest (or the sums) of the block, for its first warp.
  template <bool SUM> DEVICE void join_block(u64 (&v)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      v[i] = warp_joined<SUM>(v[i]);
      if (lane == 0) sh->warp_words[i][warp] = v[i];
    }
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
      v[i] = warp_joined<SUM>(lane < WARPS ? sh->warp_words[i][lane] : 0);
  }
  template <bool SUM> DEVICE void exchange(u64 (&v)[2]) {
    const int lane = threadIdx.x % 32;
    join_block<SUM>(v);
    if (threadIdx.x == 0) sh->words[slot][0] = v[0], sh->words[slot][1] = v[1];
    __syncwarp();
    cluster_sync();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      v[i] = load_in_cluster(&sh->words[slot][i], lane % CLUSTER);
      v[i] = SUM ? lanes_sum(v[i], CLUSTER) : warp_largest(v[i]);
    }
    slot = (slot + 1) % 4;  // read by others until they are at the next exchange
  }

  // ---- draw first ----
  // No logit below it is drawn, and few above are not.
  DEVICE float lowest_drawn() const {
    const float nearest = top - farthest / scale * 1.00001f;
    const float by_word = least ? from_ordered((u32)(least >> 32)) : LOWEST;
    return nearest > by_word ? nearest : by_word;  // of −∞ or a NaN: by the word
  }
  // This thread's largest word, and (drawing) the best score of what may be drawn.
  DEVICE void look(bool drawing, u64 (&best)[2]) const {
    const float lowest = lowest_drawn();
    float most = LOWEST, lead = LOWEST, mark = LOWEST;
    int at = 0;
    best[1] = 0;
    each([&](float l, int id) {
      if (l > most) most = l, at = id;
      // where few are kept, most warps have none of them
      if (!drawing || !__any_sync(~0u, l >= lowest)) return;
      // E ≥ uniform: most tokens need no logarithm to be left behind the warp's best
      const u32 bits = noise.bits(id);
      const bool may =
          l >= lowest && exp2_fast(scaled(l) - mark) + 1.f >= uniform_in_1_2(bits);
      if (!__any_sync(~0u, may)) return;
      if (may && l > LOWEST && octaves(l) <= farthest && word_of(l, id) >= least) {
        const float own = score(l, bits);
        best[1] = larger(best[1], word_of(own, id));
        lead = fmaxf(lead, own);
      }
      lead = warp_max(lead);
      mark = fminf(lead, 0x1p100f);
      mark -= fabsf(mark) * 0x1p-20f + 0x1p-15f;  // more than scores are rounded by
    });
    best[0] = most > LOWEST ? word_of(most, at) : 0;
  }
  // Whether top_p keeps a word, or would if a token had it.
  DEVICE bool keeps(u64 word, float top_p) {
    u64 sums[2] = {0, 0};  // above it, and all
    each([&](float l, int id) {
      const u64 own = word_of(l, id), mass = own >= within ? mass_of(l) : 0;
      sums[1] += mass;
      if (own > word) sums[0] += mass;
    });
    exchange<true>(sums);
    return sums[0] < share(top_p, sums[1]);
  }
  DEVICE static u64 share(float top_p, u64 mass) {
    return larger(1, (u64)ceil((double)top_p * (double)mass));
  }
  // Whether top_p keeps a token that was drawn; if not, what lies up to it is drawn no more.
  DEVICE bool accepts(int id, float top_p) {
    if (top_p >= 1.f) return true;
    const u64 word = word_of(value(id), id);
    if (keeps(word, top_p)) return true;
    least = word + 1;
    return false;
  }
  // For tests: the least word that is kept, by asking for one after the other.
  DEVICE u64 last_kept(u64 high, float top_p) {
    u64 low = within;
    while (top_p < 1.f && low < high) {
      const u64 middle = low + (high - low) / 2;
      if (keeps(middle, top_p)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // ---- a small top_k ----
  // The first `top_k` tokens are no lower than the k-th of the groups' largest logits, of which
  // `key` is this thread's, ordered (0: none); also finds the largest of all.
  DEVICE float lowest_candidate(u32 key, u32 top_k) {
#pragma unroll
    for (int o = 1; o < GROUP_LANES; o *= 2) {
      const u32 other = __shfl_xor_sync(~0u, key, o);
      key = other > key ? other : key;
    }
    if (threadIdx.x % GROUP_LANES == 0)
      atomicMax(&sh->groups[threadIdx.x / (THREADS / OWN_GROUPS)], key);
    __syncwarp();
    cluster_sync();
    for (int g = threadIdx.x; g < GROUPS; g += THREADS)
      sh->all_groups[g] = load_in_cluster(&sh->groups[g % OWN_GROUPS], g / OWN_GROUPS);
    __syncthreads();
    for (int g = threadIdx.x; g < GROUPS; g += THREADS) {
      const u32 mine = sh->all_groups[g];
      u32 above = 0, equal = 0;
#pragma unroll 8
      for (int other = 0; other < GROUPS; other++) {
        above += sh->all_groups[other] > mine;
        equal += sh->all_groups[other] == mine;
      }
      if (above == 0) sh->ends[0] = mine;
      if (above < top_k && top_k <= above + equal) sh->ends[1] = mine;
    }
    __syncthreads();
    top = from_ordered(sh->ends[0]);
    return from_ordered(sh->ends[1]);
  }
  // How many candidates there are. If not too many, thread i of the first CTA has the i-th in `word`.
  DEVICE u32 collect(float lowest, u64& word) {
    each([&](float l, int id) {
      if (!(l >= lowest) || l == LOWEST) return;
      const u32 place = atomicAdd(&sh->listed, 1u);
      if (place < LIST) sh->list[place] = word_of(l, id);
    });
    __syncwarp();
    cluster_sync();
    const u32 count = load_in_cluster(&sh->listed, threadIdx.x % CLUSTER);
    u32 all = 0;
    word = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      const u32 there = __shfl_sync(~0u, count, r), place = threadIdx.x - all;
      if (rank == 0 && threadIdx.x >= all && place < there)
        word = load_in_cluster(&sh->list[place], r);
      all += there;
    }
    return all;
  }
  // The token, in the first thread of the first CTA; false: there are too many candidates.
  DEVICE bool draw_of_few(u64 own_best, const Asked& asked, u32& token, u64* last) {
    const u32 top_k = (u32)asked.top_k;
    u64 word;
    const u32 count = collect(lowest_candidate((u32)(own_best >> 32), top_k), word);
    if (count > LIST) return false;
    if (rank) return true;
    const float l = from_ordered((u32)(word >> 32));
    const int id = (int)~(u32)word;
    const u64 mass = word ? mass_of(l) : 0;
    sh->candidates[threadIdx.x] = word, sh->masses[threadIdx.x] = mass;
    __syncthreads();
    u32 before = 0;
    u64 mass_before = 0;
    if (word)
#pragma unroll 4
      for (u32 i = 0; i < count; i++)
        if (sh->candidates[i] > word) before += 1, mass_before += sh->masses[i];
    if (word && before + 1 == (top_k < count ? top_k : count)) sh->mass = mass_before + mass;
    __syncthreads();
    bool kept = word && before < top_k;
    if (asked.top_p < 1.f) kept = kept && mass_before < share(asked.top_p, sh->mass);
    u64 found[2] = {0, kept ? ~word : 0};
    if (kept && octaves(l) <= farthest) found[0] = word_of(score(l, noise.bits(id)), id);
    join_block<false>(found);
    token = found[0] ? ~(u32)found[0] : 0;
    if (last) *last = ~found[1];
    return true;
  }

  // ---- a large top_k ----
  DEVICE u32* cleared() {
    buffer ^= 1;
    for (int i = threadIdx.x; i < BINS; i += THREADS) sh->histograms[buffer][i] = 0;
    __syncthreads();
    return sh->histograms[buffer];
  }
  // The bin in which the cluster's count reaches k; if it never does, any.
  DEVICE Bin find(const u32* histogram, u64 k) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncwarp();
    cluster_sync();
    u32 counts[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      counts[i] = 0;
#pragma unroll
      for (int r = 0; r < CLUSTER; r++)
        counts[i] += load_in_cluster(&histogram[threadIdx.x * OWN + i], r);
      own += counts[i];
    }
    const u32 lanes = inclusive(own, lane);
    if (lane == 31) sh->warp_counts[warp] = lanes;
    __syncthreads();
    const u32 warps = inclusive(lane < WARPS ? sh->warp_counts[lane] : 0, lane);
    const u32 warps_before = __shfl_sync(~0u, warps, (warp + 31) % 32);
    u32 before = lanes - own + (warp ? warps_before : 0);
    const u32 all = __shfl_sync(~0u, warps, 31);
    if (threadIdx.x == 0 && all < k) sh->bin = {0, 0, all};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (before < k && k <= before + counts[i]) sh->bin = {threadIdx.x * OWN + i, before, all};
      before += counts[i];
    }
    __syncthreads();
    const Bin found = sh->bin;
    __syncthreads();
    return found;
  }
  DEVICE static u32 inclusive(u32 count, int lane) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const u32 other = __shfl_up_sync(~0u, count, o);
      if (lane >= o) count += other;
    }
    return count;
  }
  // The k-th word, where `high` is the first; 0: there are fewer.
  DEVICE u64 word_at(u64 k, u64 high) {
    u64 low = (u64)(ordered(LOWEST) + 1) << 32;
    while (low < high) {
      const int shift = max(0, 54 - __clzll((long long)(high - low)));
      u32* histogram = cleared();
      each([&](float l, int id) {
        const u64 word = word_of(l, id);
        if (low <= word && word <= high) atomicAdd(&histogram[(high - word) >> shift], 1u);
      });
      const Bin at = find(histogram, k);
      if (at.all < k) return 0;
      k -= at.before;
      high -= (u64)at.bin << shift;
      const u64 width = 1ull << shift;
      if (high - low >= width) low = high - width + 1;
    }
    return high;
  }

  // The token, which only the first CTA may know; where nothing is allowed, the first one.
  DEVICE u32 choose(const Asked& asked, u64* last) {
    u64 best[2];
    top = 0.f, within = least = 0, farthest = __int_as_float(0x7f800000);  // nothing is known yet
    bool drawing = asked.random() && !asked.top_k && asked.min_p <= 0.f;
    for (bool begin = true;; begin = false) {
      look(drawing, best);
      if (begin) {
        farthest = asked.farthest();
        u32 token;
        if (asked.few() && draw_of_few(best[0], asked, token, last)) return token;
      }
      exchange<false>(best);
      if (!asked.random() || !best[0]) return best[0] ? ~(u32)best[0] : 0;
      if (begin) {
        top = from_ordered((u32)(best[0] >> 32));
        if (asked.top_k) within = least = word_at(asked.top_k, best[0]);
      }
      const int id = (int)~(u32)best[1];
      if (drawing && accepts(id, asked.top_p)) {
        if (last) *last = last_kept(best[0], asked.top_p);
        return id;
      }
      drawing = true;
    }
  }
};

// rows [n]: of the table (null: the first n); tokens and lengths are the table's. The position that
// is filled is positions[n] or, where that is null, by `lengths`: with `advance` they do not count
// the token yet, and get it counted (0: nobody is here), else they do.
// masks [.., mask_words] bits of what is allowed, mask_of [n] or −1.
// guessed [n], before [n]: the tokens of a step that checks guesses, and how many of each row's last
// ones are guesses, which penalties count. They do not count what is chosen then: who knows whether
// it stays.
// skip_plain: rows that want nothing but the likeliest token have it already.
// tokens[row] and chosen[n] get the token, bounds[n] (for tests) the word of the last one kept.
extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const void* logits, const u64* rows, u64* tokens, int* lengths, const u64* positions,
    const float* values, const u64* integers, const u64* bias_ids, const float* bias_values,
    const u64* bias_ends, const u8* in_prompt, int* in_answer, const u64* guessed,
    const int* before, const u8* masks, const int* mask_of, u64* chosen, u64* bounds, int stride,
    int capacity, int mask_bytes, int skip_plain, int advance) {
  const int n = blockIdx.x / CLUSTER, at = rows ? (int)rows[n] : n;
  const int length = lengths[at];
  if (advance && !length) return;
  auto value = [&](int which) { return values[which * capacity + at]; };
  auto integer = [&](int which) { return integers[which * capacity + at]; };
  const Asked asked = {value(TEMPERATURE), value(TOP_P), value(MIN_P), integer(TOP_K)};
  const int position = positions ? (int)positions[n] : length - !advance;
  const float repetition = value(REPETITION), presence = value(PRESENCE);
  const float frequency = value(FREQUENCY);
  const bool penalized = repetition != 1.f || presence != 0.f || frequency != 0.f;
  const int biases = (int)integer(BIASES), mask = mask_of ? mask_of[n] : -1;

  Row row;
  row.changed = penalized || biases || mask >= 0;
  if (skip_plain && !asked.random() && !row.changed) return;
  Shared& sh = *(Shared*)raw;
  row.sh = &sh, row.rank = blockIdx.x % CLUSTER, row.slot = row.buffer = 0;
  row.logits = (const char*)logits + (size_t)n * stride * BYTES;
  row.aligned = ((size_t)logits | (size_t)stride * BYTES) % (2 * BYTES) == 0;
  row.noise.begin(integer(SEED), (u32)position);
  row.scale = fminf(1.44269504f / (asked.random() ? asked.temperature : 1.f), 1e30f);
  for (int i = threadIdx.x; i < OWN_GROUPS; i += THREADS) sh.groups[i] = ordered(LOWEST);
  if (threadIdx.x == 0) sh.listed = 0;
  if (row.changed) {
    Changes& changes = sh.changes;
    for (int i = threadIdx.x; i < BIAS_WORDS; i += THREADS) changes.biased[i] = 0;
    if (threadIdx.x == 0) {
      changes.at = at, changes.position = position;
      changes.biases = biases, changes.penalized = penalized;
      changes.repetition = repetition, changes.presence = presence, changes.frequency = frequency;
      changes.allowed = mask < 0 ? nullptr : masks + (size_t)mask * mask_bytes;
      changes.in_prompt = in_prompt, changes.in_answer = in_answer;
      changes.guesses = before ? before[n] : 0;
      for (int i = 0; i < changes.guesses; i++) changes.guessed[i] = (int)guessed[n - i];
    }
    __syncthreads();
    changes.read_biases(bias_ids, bias_values, bias_ends);
  }
  __syncthreads();
  wait_for_inputs();

  u64 last = 0;
  const u32 token = row.choose(asked, bounds ? &last : nullptr);
  if (row.rank == 0 && threadIdx.x == 0) {
    if (tokens) tokens[at] = token;
    if (chosen) chosen[n] = token;
    if (bounds) bounds[n] = last;
    if (advance) lengths[at] = length + 1;
    if (penalized && !before) in_answer[(size_t)at * VOCAB + token] += 1;
  }
  cluster_sync();  // others may still read what this CTA has told
}
