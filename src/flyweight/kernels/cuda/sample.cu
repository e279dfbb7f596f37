// The next token of each row: penalties, bias, mask, temperature, top_k, top_p, min_p and the draw.
//
//   l = penalties(logits + bias), −∞ where the mask forbids;  m = 2^((l − max l) · log2(e) / T)
//   kept: of all tokens by (l falling, id rising) the first top_k, of these the first whose masses
//         before them sum to less than top_p of the whole, of these those with m ≥ min_p
//   token = argmax over kept of m / E(seed, position, id), E exponential noise;  T = 0: argmax of l
//           (the same as argmax of log m + Gumbel noise, with fewer logarithms)
//
// All three filters keep the beginning of one order, so that a row needs a single bound: the last
// token kept, as the 64-bit word (l in an order that integers share, id turned round). It is found
// without sorting. Histograms of counts and masses say in which bin the bound lies; the first is
// over log m (as fine as spreads the logits, by their mean), each further one over the words
// between the least and the largest of that bin, until one word is left. Masses are added as
// integers, so that no order of additions changes a result, to 2^-24 of each. What a row gets
// depends on nothing of its neighbours. (`kernels/sample_reference.py`: the same in float64.)
//
// Work split: a cluster of CTAs a row, which hold their parts of l in shared memory
//
//   row    ├ CTA 0 ┼ CTA 1 ┼ … ┤   8 tokens a thread, then the next 8 · THREADS · CLUSTER
//   pass   read, mask ─► max ─► histogram ─► (least, largest ─► histogram)… ─► argmax
//          ─► : a block reduction, then one barrier of the cluster and reads of each other's shared
//
// so that logits are read once and each pass costs an exchange, not a launch. Without clusters
// (CLUSTER 1), or where a part is too large for shared memory (HELD 0), l goes through `scratch`.
// Greedy rows end after the first exchange. A row that is refined needs at most seven histograms,
// whatever its logits. Loops stay rolled: code that is read once costs as much as data.
// Limit: latency of exchanges at one row, shared atomics at many.
//
// defines: VOCAB, TYPE (0 bfloat16, 1 float16, 2 float32), CLUSTER, THREADS, HELD
#include "common.cuh"
#include "cluster.cuh"

#define BINS 1024
#define COARSEST 16.f  // bins of the first histogram for an octave of masses
#define FINEST 65536.f
#define CHUNKS ((VOCAB + 8 * THREADS * CLUSTER - 1) / (8 * THREADS * CLUSTER))
#define OWN (BINS / THREADS)  // bins that a thread adds up
#define MOST_BIASES 320
#define WARPS (THREADS / 32)
#define BYTES (TYPE == 2 ? 4 : 2)
#define UNIT 16777216.f  // 2^24: masses within a bin are counted in its top's 2^-24

struct Histogram { u32 count[BINS], low[BINS], high[BINS]; };  // low and high: a 64-bit mass
struct Sums { u32 count; u64 mass; };
struct Bound { u32 bin; Sums before; u64 mass; };  // a bin, and what is before it
struct __align__(16) Shared {
  Histogram histograms[2];
  u64 words[4][3];  // what this CTA tells the others
  u64 warp_words[3][32];
  u32 warp_counts[32];
  int bias_id[MOST_BIASES];
  float bias[MOST_BIASES];
  float scale[2];
  Bound bound;
};
#ifndef ON_THE_HOST
extern __shared__ __align__(1024) u8 raw[];
#endif

static_assert(sizeof(Shared) <= 28 << 10, "OTHER_SHARED of kernels/sample.py");

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
DEVICE u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

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
  DEVICE float uniform(int id) const {
    const u32 bits = mix(mix((u32)id ^ first) + second);
    // full relative precision near 0, where the winners are, and never 0 or 1
    return fminf(((float)bits + .5f) * 0x1p-32f, 1.f - 0x1p-24f);
  }
};

struct Row {
  float* values;  // token j of chunk c of each thread: [8 · c + j][THREADS]
  int rank;
  Shared* sh;
  int slot, buffer;
  // of the softmax
  float top, scale, scale_low;
  float per_octave, bin_octaves;  // of the first histogram: bins an octave, and octaves a bin
  u64 least;  // words below it are not kept
  // of the first histogram, summed over the cluster: this thread's bins, and all before them
  u32 counts[OWN];
  u64 masses[OWN];
  Sums before, all;

  DEVICE int first_of(int chunk) const {
    return ((chunk * CLUSTER + rank) * THREADS + (int)threadIdx.x) * 8;
  }
  template <class F> DEVICE void each(F f) const {  // f(l, id) of this thread's tokens
#pragma unroll 2
    for (int i = 0; i < 8 * CHUNKS; i++)
      f(values[i * THREADS + threadIdx.x], first_of(i / 8) + i % 8);
  }
  // How many octaves a token's mass is below the largest; never falls as l falls.
  DEVICE float octaves(float l) const { return l == top ? 0.f : (top - l) * scale; }
  DEVICE int bin_of(float octaves) const { return (int)fminf(octaves * per_octave, BINS - 1); }
  // Its mass in 2^-24 of what a token at the top of its bin has.
  DEVICE u32 mass_of(float l, float octaves, int bin) const {
    if (l == top) return (u32)UNIT;
    const float below = top - l, rest = fmaf(below, scale, -octaves) + below * scale_low;
    return (u32)rintf(exp2_fast(fminf(bin * bin_octaves - octaves - rest, 0.f)) * UNIT);
  }

  // ---- exchanges: every thread of the cluster gets the same ----
  template <bool SUM> DEVICE static u64 joined(u64 v, int lanes) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      if (o >= lanes) continue;
      const u64 other = __shfl_xor_sync(~0u, v, o);
      v = SUM ? v + other : larger(v, other);
    }
    return v;
  }
  // The largest of all, or (the last SUMS) the sums.
  template <int SUMS = 0, int COUNT> DEVICE void exchange(u64 (&v)[COUNT]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      v[i] = i < COUNT - SUMS ? joined<false>(v[i], 32) : joined<true>(v[i], 32);
      if (lane == 0) sh->warp_words[i][warp] = v[i];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        u64 mine = lane < WARPS ? sh->warp_words[i][lane] : 0;
        mine = i < COUNT - SUMS ? joined<false>(mine, 32) : joined<true>(mine, 32);
        if (lane == 0) sh->words[slot][i] = mine;
      }
    }
    __syncwarp();
    cluster_sync();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      v[i] = load_in_cluster(&sh->words[slot][i], lane % CLUSTER);
      v[i] = i < COUNT - SUMS ? joined<false>(v[i], CLUSTER) : joined<true>(v[i], CLUSTER);
    }
    slot = (slot + 1) % 4;  // read by others until they are at the next exchange
  }

  DEVICE Histogram& cleared() {
    buffer ^= 1;
    u32* words = (u32*)&sh->histograms[buffer];
    for (int i = threadIdx.x; i < 3 * BINS; i += THREADS) words[i] = 0;
    __syncthreads();
    return sh->histograms[buffer];
  }
  DEVICE static void add(Histogram& h, int bin, u32 mass, bool with_mass) {
    atomicAdd(&h.count[bin], 1u);
    if (with_mass && atomicAdd(&h.low[bin], mass) + mass < mass) atomicAdd(&h.high[bin], 1u);
  }
  // The cluster's sums of this thread's bins.
  DEVICE void gather(const Histogram& h, u32 (&counts)[OWN], u64 (&masses)[OWN], bool with_mass) {
    __syncwarp();
    cluster_sync();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int bin = threadIdx.x * OWN + i;
      counts[i] = 0, masses[i] = 0;
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) {
        counts[i] += load_in_cluster(&h.count[bin], r);
        if (with_mass)
          masses[i] += (u64)load_in_cluster(&h.high[bin], r) << 32 | load_in_cluster(&h.low[bin], r);
      }
    }
  }
  // What all threads before this one have, and all together.
  DEVICE void scan(const u32 (&counts)[OWN], const u64 (&masses)[OWN], Sums& before, Sums& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 own_count = 0;
    u64 own_mass = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) own_count += counts[i], own_mass += masses[i];
    u32 count = own_count;
    u64 mass = own_mass;
    inclusive(count, mass, lane);
    if (lane == 31) sh->warp_counts[warp] = count, sh->warp_words[0][warp] = mass;
    __syncthreads();
    u32 warps_count = lane < WARPS ? sh->warp_counts[lane] : 0;
    u64 warps_mass = lane < WARPS ? sh->warp_words[0][lane] : 0;
    inclusive(warps_count, warps_mass, lane);
    const u32 count_before = __shfl_sync(~0u, warps_count, (warp + 31) % 32);
    const u64 mass_before = __shfl_sync(~0u, warps_mass, (warp + 31) % 32);
    before.count = count - own_count + (warp ? count_before : 0);
    before.mass = mass - own_mass + (warp ? mass_before : 0);
    all.count = __shfl_sync(~0u, warps_count, 31), all.mass = __shfl_sync(~0u, warps_mass, 31);
    __syncthreads();  // warp_words are free again
  }
  DEVICE static void inclusive(u32& count, u64& mass, int lane) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const u32 c = __shfl_up_sync(~0u, count, o);
      const u64 m = __shfl_up_sync(~0u, mass, o);
      if (lane >= o) count += c, mass += m;
    }
  }
  // The bin in which the count (or the mass) first reaches `target`; it must be reached.
  DEVICE Bound find(const u32 (&counts)[OWN], const u64 (&masses)[OWN], Sums before, u64 target,
                    bool by_mass) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const u64 sum = by_mass ? before.mass : before.count, here = by_mass ? masses[i] : counts[i];
      if (sum < target && target <= sum + here)
        sh->bound = {threadIdx.x * OWN + i, before, masses[i]};
      before.count += counts[i], before.mass += masses[i];
    }
    __syncthreads();
    const Bound found = sh->bound;
    __syncthreads();
    return found;
  }

  // ---- the first histogram: masses in 2^-40 of the largest ----
  // Bins so fine that the logits' mean comes near the middle of them. `sum`: of l in 2^-16.
  DEVICE void divide(u64 sum, u64 tokens) {
    const float mean = (float)((double)(long long)sum / 65536. / (double)tokens);
    const float range = 2.f * (clamped(top) - mean) * scale;
    per_octave = COARSEST;
    while (per_octave < FINEST && range * 2.f * per_octave <= BINS) per_octave *= 2.f;
    bin_octaves = 1.f / per_octave;
  }
  DEVICE static float clamped(float l) { return fminf(fmaxf(l, -32000.f), 32000.f); }
  DEVICE void survey(bool with_mass) {
    Histogram& h = cleared();
    each([&](float l, int id) {
      if (l > LOWEST && word_of(l, id) >= least) {
        const float below = octaves(l);
        const int bin = bin_of(below);
        add(h, bin, with_mass ? mass_of(l, below, bin) : 0, with_mass);
      }
    });
    gather(h, counts, masses, with_mass);
#pragma unroll
    for (int i = 0; i < OWN; i++) masses[i] = (u64)((double)masses[i] * unit_of(threadIdx.x * OWN + i));
    scan(counts, masses, before, all);
  }
  DEVICE double unit_of(int bin) const { return exp2_fast(-bin * bin_octaves) * 65536.; }

  // The word of the token within a bin at which the count (or the mass, in the bin's units) reaches
  // `target`.
  DEVICE u64 refine(u32 bin, u64 target, bool by_mass) {
    u64 ends[2] = {0, 0};  // largest, and least turned round
    each([&](float l, int id) {
      const u64 word = word_of(l, id);
      if (l > LOWEST && word >= least && bin_of(octaves(l)) == (int)bin) {
        ends[0] = larger(ends[0], word), ends[1] = larger(ends[1], ~word);
      }
    });
    while (true) {
      exchange(ends);
      const u64 high = ends[0], low = ~ends[1];
      if (high <= low) return high;
      const int shift = max(0, 54 - __clzll((long long)(high - low)));
      Histogram& h = cleared();
      each([&](float l, int id) {
        const u64 word = word_of(l, id);
        if (low <= word && word <= high)
          add(h, (int)((high - word) >> shift), by_mass ? mass_of(l, octaves(l), bin) : 0, by_mass);
      });
      u32 fine_counts[OWN];
      u64 fine_masses[OWN];
      Sums fine_before, whole;
      gather(h, fine_counts, fine_masses, by_mass);
      scan(fine_counts, fine_masses, fine_before, whole);
      target = smaller(target, by_mass ? whole.mass : whole.count);  // after rounding of units
      const Bound found = find(fine_counts, fine_masses, fine_before, target, by_mass);
      target -= by_mass ? found.before.mass : found.before.count;
      ends[0] = ends[1] = 0;
      each([&](float l, int id) {
        const u64 word = word_of(l, id);
        if (low <= word && word <= high && (u32)((high - word) >> shift) == found.bin)
          ends[0] = larger(ends[0], word), ends[1] = larger(ends[1], ~word);
      });
    }
  }

  // The word of the last token that top_k and top_p keep; 0: they keep all.
  DEVICE u64 bound(u64 top_k, float top_p) {
    least = 0;
#pragma unroll 1
    for (int by_mass = 0; by_mass < 2; by_mass++) {
      if (by_mass ? top_p >= 1.f : !top_k) continue;
      survey(by_mass);  // of top_p: what top_k has left
      if (!by_mass && top_k >= all.count) continue;
      u64 target = top_k;
      if (by_mass) target = (u64)ceil((double)top_p * (double)all.mass);
      if (by_mass) target = larger(1, smaller(all.mass, target));
      const Bound at = find(counts, masses, before, target, by_mass);
      u64 rest = target - at.before.count;
      if (by_mass) rest = larger(1, (u64)ceil((double)(target - at.before.mass) / unit_of(at.bin)));
      least = refine(at.bin, rest, by_mass);
    }
    return least;
  }
};

// Eight logits from `first` on, as they lie; loaded one chunk ahead.
struct Chunk { u32 words[2 * BYTES]; };
DEVICE Chunk load_chunk(const void* logits, size_t at, int first, bool aligned) {
  Chunk chunk;
  const char* from = (const char*)logits + at * BYTES;
  if (aligned && first + 8 <= VOCAB) {
#pragma unroll
    for (int i = 0; i < BYTES / 2; i++) *(uint4*)(chunk.words + 4 * i) = ((const uint4*)from)[i];
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      u32 bits = 0;
      if (first + j < VOCAB) bits = BYTES == 4 ? ((const u32*)from)[j] : ((const u16*)from)[j];
      if (BYTES == 4) chunk.words[j] = bits;
      else chunk.words[j / 2] = j % 2 ? chunk.words[j / 2] | bits << 16 : bits;
    }
  }
  return chunk;
}
DEVICE float logit(const Chunk& chunk, int j) {
  return BYTES == 4 ? __uint_as_float(chunk.words[j])
                    : float_of<TYPE == 1>((u16)(chunk.words[j / 2] >> j % 2 * 16));
}

// What a row asks to be done to its logits before anything else.
struct Changes {
  int at, biases, position;
  float repetition, presence, frequency;
  bool penalized;
  const u8* allowed;  // bits, or null
  const u8* in_prompt;
  const int* in_answer;

  DEVICE void bias(const Shared& sh, int first, float (&v)[8]) const {
    int low = 0;
    for (int high = biases; low < high;) {
      const int middle = (low + high) / 2;
      if (sh.bias_id[middle] < first) low = middle + 1;
      else high = middle;
    }
    for (; low < biases && sh.bias_id[low] < first + 8; low++)
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (sh.bias_id[low] == first + j) v[j] += sh.bias[low];
  }
  DEVICE void penalize(int first, float (&v)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (first + j >= VOCAB) continue;
      const size_t place = (size_t)at * VOCAB + first + j;
      const int times = in_answer[place];
      if (times > 0 || in_prompt[place]) v[j] = v[j] > 0.f ? v[j] / repetition : v[j] * repetition;
      if (times > 0)
        v[j] = __fadd_rn(__fadd_rn(v[j], -__fmul_rn(frequency, (float)times)), -presence);
    }
  }
  DEVICE void apply(const Shared& sh, int first, float (&v)[8]) const {
    if (biases) bias(sh, first, v);
    if (penalized) penalize(first, v);
    const u32 bits = allowed && first < VOCAB ? allowed[first / 8] : 255;
#pragma unroll
    for (int j = 0; j < 8; j++)  // a NaN is never chosen
      if (first + j >= VOCAB || !(bits >> j & 1) || !(v[j] == v[j])) v[j] = LOWEST;
  }
};

// rows [n]: of the table (null: the first n); tokens and lengths are the table's, and lengths count
// the token to be chosen. masks [.., mask_words] bits of what is allowed, mask_of [n] or −1.
// skip_plain: rows that want nothing but the likeliest token have it already.
// tokens[row] and chosen[n] get the token, bounds[n] (for tests) the word of the last one kept.
extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const void* logits, const u64* rows, u64* tokens, const int* lengths, const float* values,
    const u64* integers, const u64* bias_ids, const float* bias_values, const u64* bias_ends,
    const u8* in_prompt, int* in_answer, const u8* masks, const int* mask_of, u64* chosen,
    u64* bounds, float* scratch, int stride, int capacity, int mask_bytes, int skip_plain) {
  const int n = blockIdx.x / CLUSTER, at = rows ? (int)rows[n] : n;
  auto value = [&](int which) { return values[which * capacity + at]; };
  auto integer = [&](int which) { return integers[which * capacity + at]; };
  const float temperature = value(TEMPERATURE);
  const int mask = mask_of ? mask_of[n] : -1;
  Changes changes = {at, (int)integer(BIASES), lengths[at] - 1, value(REPETITION), value(PRESENCE),
                     value(FREQUENCY)};
  changes.penalized =
      changes.repetition != 1.f || changes.presence != 0.f || changes.frequency != 0.f;
  changes.allowed = mask < 0 ? nullptr : masks + (size_t)mask * mask_bytes;
  changes.in_prompt = in_prompt, changes.in_answer = in_answer;
  if (skip_plain && temperature == 0.f && !changes.penalized && !changes.biases && mask < 0) return;

  Row row;
  Shared& sh = *(Shared*)raw;
  row.sh = &sh, row.rank = blockIdx.x % CLUSTER, row.slot = row.buffer = 0;
  row.values = HELD ? (float*)(raw + sizeof(Shared))
                    : scratch + (size_t)blockIdx.x * (8 * CHUNKS * THREADS);
  for (int i = threadIdx.x; i < changes.biases; i += THREADS) {
    const size_t entry = (size_t)at * MOST_BIASES + i;
    sh.bias_id[i] = (int)bias_ids[entry];
    sh.bias[i] = (u64)changes.position < bias_ends[entry] ? bias_values[entry] : 0.f;
  }
  if (threadIdx.x == 0) {
    const double scale = 1.4426950408889634 / (temperature == 0.f ? 1.f : temperature);
    sh.scale[0] = (float)scale, sh.scale[1] = (float)(scale - (float)scale);
  }
  __syncthreads();
  row.scale = sh.scale[0], row.scale_low = sh.scale[1];

  const bool aligned = ((size_t)logits | (size_t)stride * BYTES) % 16 == 0;
  const size_t start = (size_t)n * stride;
  u64 first_look[3] = {0, 0, 0}, last = 0;  // the largest word, the number of tokens, their sum
  Chunk chunk = load_chunk(logits, start + row.first_of(0), row.first_of(0), aligned);
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
    const int first = row.first_of(c);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = logit(chunk, j);
    if (c + 1 < CHUNKS) {
      const int next = row.first_of(c + 1);
      chunk = load_chunk(logits, start + next, next, aligned);
    }
    changes.apply(sh, first, v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      row.values[(8 * c + j) * THREADS + threadIdx.x] = v[j];
      if (v[j] > LOWEST) {
        first_look[0] = larger(first_look[0], word_of(v[j], first + j));
        first_look[1] += 1;
        first_look[2] += (u64)(long long)(int)(Row::clamped(v[j]) * 65536.f);
      }
    }
  }
  row.exchange<2>(first_look);
  u64 best[1] = {first_look[0]};
  if (temperature != 0.f && best[0]) {
    row.top = from_ordered((u32)(best[0] >> 32));
    const u64 top_k = integer(TOP_K);
    const float top_p = value(TOP_P), min_p = value(MIN_P);
    if (top_k || top_p < 1.f) {
      row.divide(first_look[2], first_look[1]);
      last = row.bound(top_k, top_p);
    }
    // E lies between 2^-33 and 17, as noise: what is 38 octaves behind cannot win
    const float farthest = fminf(min_p > 0.f ? -log2f(min_p) : 38.f, 38.f);
    Noise noise;
    noise.begin(integer(SEED), (u32)changes.position);
    best[0] = 0;
    float lead = 0.f;  // the best of the warp so far
    row.each([&](float l, int id) {
      const float below = row.octaves(l), mass = exp2_fast(-below), uniform = noise.uniform(id);
      // E ≥ uniform: most tokens need no logarithm to be left behind
      const bool may = l > LOWEST && below <= farthest && word_of(l, id) >= last &&
                       mass * 1.000001f >= lead * uniform;
      if (!__any_sync(~0u, may)) return;
      if (may) {
        const float score = mass / -log1pf(-uniform);
        best[0] = larger(best[0], word_of(score, id));
        lead = fmaxf(lead, score);
      }
      lead = warp_max(lead);
    });
    row.exchange(best);
  }
  if (row.rank == 0 && threadIdx.x == 0) {
    const u32 token = best[0] ? ~(u32)best[0] : 0;  // where nothing is allowed: the first
    tokens[at] = token;
    if (chosen) chosen[n] = token;
    if (bounds) bounds[n] = last;
    if (changes.penalized) in_answer[(size_t)at * VOCAB + token] += 1;
  }
  cluster_sync();  // others may still read what this CTA has told
}
