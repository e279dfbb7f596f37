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
// KV8: the cache holds codes of 8 bits (kv8.cuh). They go to shared memory as they are, with the words their scales stand in, and
// from there to registers as in attention.cu: 8 bytes of a token's key, 8 of each of four tokens' values.
//
// CHUNK: up to so many rows are tokens of one sequence that follow each other, as in attention.cu. The run that owns the newest
// token takes all of the sequence's new ones, `before` + 1 of them, from shared memory: it makes their keys and values for itself
// from the mailbox, and stores those of its own row alone. Other runs end where the new tokens begin.
//
// TOGETHER: a CTA takes as many rows of a sequence at once as have room in the 8 columns of a product, so K and V pass through
// registers once for them, and runs are as much longer than those of a row alone as there are fewer parts of the step than rows. A row
// does not see the new tokens behind it. A CTA makes and hands over so many more results; all rows of a sequence at once were slower.
//
//      columns (G = 4):   | row 0, heads 0 … 3 | row 1, heads 0 … 3 |        a part of the step: TAKEN = 2 rows
//
// ITEMS: where more than 8 query heads share a kv head, its CTAs attend in as many equal parts, G query heads each. They share out the
// tiles of the linear all the same. All make the newest key and value for themselves, and the first part alone stores them.
//
// GATED: the linear has a gate for each result before its queries, and results are multiplied by σ(gate). Gates come through the mailbox
// like the others, and are waited for only where a result is written.
//
// defines: those of gemv.cuh and attention.cuh, HEAD_CTAS, ROTARY, PAGE, QK_NORM, SHARED_BYTES, KV8 (0), CHUNK (1), TOGETHER (0),
// GATED (0)
#ifndef TOGETHER
#define TOGETHER 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef CHUNK
#define CHUNK 1
#endif
#if CHUNK > 1
#define CHUNK_ARGUMENTS , const int* before
#else
#define CHUNK_ARGUMENTS
#endif
#include "gemv.cuh"
#ifndef KNOWN  // tiles of a run whose place in the cache is asked for ahead of the linear, where each lies in one page
#define KNOWN (PAGE % 16 == 0 && WINDOW == 0 ? 32 : 0)
#endif
#include "patience.cuh"
#include "attention.cuh"
#include "kv8.cuh"

constexpr int HEAD_TILES = HEAD_DIM / 16, LOCAL_TILES = ((1 + GATED) * SHARING + 2) * HEAD_TILES;
constexpr int FIRST_QUERY = GATED * HEADS;    // among the heads that the linear makes: gates, queries, keys, values
constexpr int ITEM_CTAS = HEAD_CTAS / ITEMS;  // that attend with the same query heads
constexpr int SPLITS = ITEM_CTAS < ROWS ? 1 : ITEM_CTAS / ROWS < 32 ? ITEM_CTAS / ROWS : 32;  // runs of a row, at most
constexpr int TAKEN = !TOGETHER ? 1 : CHUNK < 8 / G ? CHUNK : 8 / G;  // rows that a CTA takes at once
constexpr int QUERIES = TAKEN * G;
constexpr int DIM_PARTS = HEAD_DIM / 64;
constexpr int KV_ROW = sizeof(Stored) * HEAD_DIM + (KV8 ? 32 : 16);  // bytes; the padding keeps loads free of bank conflicts
constexpr int NEW_ROW = CHUNK > 1 ? KV_ROW : HEAD_DIM * sizeof(Stored);  // of a new token, where several are one tile
constexpr int SCALES = 2 * 16 * KV_ROW;           // where scales begin in a tile: 16 of keys, 16 of values, a word each
constexpr int KV_TILE = SCALES + (KV8 ? 128 : 0);  // 16 keys, then 16 values
constexpr int PART_BYTES = 64 * sizeof(Stored);   // of a row, which a warp of a lane takes of values
constexpr int RING_TILES = (STAGES * STAGE_BYTES + (ROWS > 1 ? X_BYTES : 0)) / KV_TILE;  // x lies behind the ring
constexpr int STATE = HEAD_DIM + 4;               // a partial result: accumulator, maximum, sum; whole 16-byte words
constexpr int LANES = RING_TILES < WARPS / DIM_PARTS ? RING_TILES : WARPS / DIM_PARTS;
constexpr int DEPTH = RING_TILES / LANES < 3 ? RING_TILES / LANES : 3;  // tiles of a lane on their way
constexpr int QUERY_ROW = HEAD_DIM + (KV8 ? 32 : 8);
constexpr int PER = HEAD_DIM / 32;                // values of a head in one thread
constexpr int TASKS = (QUERIES + 2 * CHUNK) / WARPS;          // heads of q, k and v that a warp makes, at most
constexpr int AT_ONCE = !TOGETHER || !IN_REGISTERS || TASKS < 1 ? 1 : TASKS;
constexpr int RESULTS_AT_ONCE =  // that a thread adds up
    TOGETHER && QUERIES * HEAD_DIM >= 4 * THREADS ? 4 : OWN_COPIES && QUERIES * HEAD_DIM >= 2 * THREADS ? 2 : 1;

static_assert(EPILOGUE == STORE && NDIM == (FIRST_QUERY + HEADS + 2 * KV_HEADS) * HEAD_DIM && HEAD_CTAS <= LOCAL_TILES, "a merged qkv");
static_assert(LANES >= 1 && QUERIES * STATE * 4 <= KV_TILE && QUERIES <= 8, "a lane leaves its results where its tokens were");
static_assert(SHARING % ITEMS == 0 && HEAD_CTAS % ITEMS == 0, "equal parts");
static_assert(CHUNK <= 16, "the new tokens are one tile");
static_assert(!PAIRED || (HEAD_CTAS % 2 == 0 && LOCAL_TILES == HEAD_CTAS * SLOTS), "pairs are of a head, and have whole rounds");
static_assert(ROTARY % (2 * PER) == 0, "a thread turns whole pairs with one other");
static_assert(!TOGETHER || (CHUNK > 1 && !GATED), "what rows of a sequence have together");
static_assert(!TOGETHER || WINDOW == 0 || WINDOW >= 64, "no tile has a row that sees nothing of it");

// What a CTA takes at once: a row, or rows of a sequence that follow each other.
struct Part {
  int first, rows;   // the first row, and how many
  int older, fresh;  // tokens in the cache, and new ones: the last `rows` of them are the rows'
  DEVICE int length() const { return older + fresh; }
  DEVICE int row_of(int place) const { return first + rows - fresh + place; }  // of a new token
};
// The older tokens of a part, cut as in attention.cuh: the last run has the new ones, too.
DEVICE Run run_of(const Part& part, int split, int splits) {
  const int oldest = oldest_of(part.length(), part.rows), all = max(part.older - oldest, 0);
  const int each = max(SHORTEST, ((all + splits - 1) / splits + 15) / 16 * 16), begin = oldest + split * each;
  return {begin, max(begin, min(begin + each, part.older)), max((all + each - 1) / each, 1)};
}
#if TOGETHER
// The parts of a step. Of rows a bit each: which begin a part, which go on with one. A row's length and what is before it are in its lane.
struct Parts {
  int length, back;
  u32 begin, go_on;
  int count, splits;  // runs of a part, at most
  DEVICE Parts(int length, int back) : length(length), back(back) {
    go_on = __ballot_sync(~0u, length > 0 && back % TAKEN != 0);
    begin = __ballot_sync(~0u, length > 0 && back % TAKEN == 0);
    count = __popc(begin);
    splits = max(1, min(32, ITEM_CTAS / max(1, count)));
  }
  DEVICE Part part(int index) const {
    u32 rest = begin;
    for (int i = 0; i < index; i++) rest &= rest - 1;
    const int first = __ffs(rest) - 1, rows = __ffs(~(go_on >> 1 >> first)), whole = __shfl_sync(~0u, length, first);
    const int mine = min(__shfl_sync(~0u, back, first), whole - 1);
    return {first, rows, whole - 1 - mine, mine + rows};
  }
};
#else
struct Parts {
  DEVICE Part part(int length, const int* before, int row) const {
    const int back = CHUNK > 1 ? min(before[row], min(CHUNK, length) - 1) : 0;  // new tokens of the sequence in rows before
    return {row, 1, length - 1 - back, back + 1};
  }
};
#endif

// Of a part's results, four each, where those begin that a run's CTA gathers.
DEVICE int quad_of(const Part& part, const Run& run, int split) { return split * (part.rows * G * HEAD_DIM / 4) / run.used; }

// What a CTA takes of a step: a run of a part, and the same of the parts `step` further on. Made ahead of the linear, since it takes a
// dozen divisions.
struct Share {
  Part part;
  Run run;
  int first_quad, last_quad;  // of the part's results, four each, that this CTA gathers
  int split, splits;     // of the part
  int own, step, count;  // the first part, how many lie between two, and how many there are
  DEVICE bool exists() const { return part.length() && split < run.used; }
};

struct __align__(128) Shared {
  LinearShared linear;         // its ring, and of several rows x, holds the lanes' tokens later
  u16 query[QUERIES][QUERY_ROW];
  __align__(16) u8 newest[2][CHUNK][NEW_ROW];  // keys and values of the new tokens
#if KV8
  u32 newest_scales[2][16];    // of each token a word, both its halves
#endif
  Share share;
  int places[KNOWN ? KNOWN : 1], slots[CHUNK];  // in the cache: of the first tiles of our first run, of its part's new tokens
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");

struct Attention {
  const u16 *query_norm, *key_norm;
  const float2* rope;
  const int *lengths, *tables;
  Stored *keys, *values;
  u16* out;
  float scale;  // of logits in base 2
  int table_width;
  float soft_cap;    // of logits in base 2
  const u16* sinks;  // of this part's query heads
#if KV8
  u16 *key_scales, *value_scales;
#endif
};

// A tile of the head: its query heads' first, then k, then v, then the gates of its query heads.
DEVICE int head_tile(int head, int i) {
  if (i < SHARING * HEAD_TILES) return (FIRST_QUERY + head * SHARING) * HEAD_TILES + i;
  const int kind = i / HEAD_TILES - SHARING;  // 0: key, 1: value
  if (GATED && kind > 1) return head * SHARING * HEAD_TILES + i - (SHARING + 2) * HEAD_TILES;
  return (FIRST_QUERY + HEADS + kind * KV_HEADS + head) * HEAD_TILES + i % HEAD_TILES;
}
// What neighbouring results are multiplied by, when their gates are there. Asked for early, since that takes a trip to L2.
template <int PAIRS> struct Gates {
  u32 words[PAIRS];
  const u16* from;
  DEVICE Gates(const u16* gates) : from(gates) {
    if (GATED) load_relaxed(from, words);
  }
  DEVICE void await() {
    Patience patience;
    while (GATED && missing<true>(words)) {
      patience.poll();
      load_relaxed(from, words);
    }
  }
  DEVICE float factor(int i) const {
    return GATED ? __fdividef(1.f, 1.f + __expf(-(i % 2 ? high_float(words[i / 2]) : low_float(words[i / 2])))) : 1.f;
  }
};

DEVICE size_t slot_of(const Attention& a, int sequence, int token) {
  const int page = a.tables[(size_t)sequence * a.table_width + token / PAGE];
  return (size_t)page * PAGE + token % PAGE;
}
DEVICE size_t token_at(const Attention& a, int sequence, int token, int head) {
  return (slot_of(a, sequence, token) * KV_HEADS + head) * HEAD_DIM;
}

// By the producer warp while it waits: what attention reads first, to L2.
DEVICE void prefetch(const Attention& a, const Share& share, int head, int lane) {
  constexpr int LINES = HEAD_DIM / 64;  // of 128 bytes, in a head of 16-bit values
  constexpr int KV_LINES = (HEAD_DIM * sizeof(Stored) + 127) / 128;  // and in a row of keys or values
  const Run& run = share.run;
  if (!share.exists()) return;
  if (lane < (ROTARY + 31) / 32) prefetch_l2(a.rope + (size_t)(share.part.length() - 1) * (ROTARY / 2) + lane * 16);
  if (QK_NORM && lane < 2 * LINES) prefetch_l2((const u8*)(lane < LINES ? a.query_norm : a.key_norm) + lane % LINES * 128);
#pragma unroll 1
  for (int i = lane; i < min(run.end - run.begin, LANES * DEPTH * 16) * KV_LINES; i += 32) {
    const size_t at = token_at(a, share.part.first, run.begin + i / KV_LINES, head) + i % KV_LINES * (128 / sizeof(Stored));
    prefetch_l2(a.keys + at);
    prefetch_l2(a.values + at);
  }
}
// By one warp while it waits, so that nothing asks for them behind the linear.
DEVICE void look_up(Shared& sh, const Attention& a, Share share, int lane) {
  share.first_quad = quad_of(share.part, share.run, share.split), share.last_quad = quad_of(share.part, share.run, share.split + 1);
  if (lane == 0) sh.share = share;
  if (!share.exists()) return;
  const int token = share.run.begin + lane * 16;
  if (lane < KNOWN && token < share.run.end) sh.places[lane] = (int)slot_of(a, share.part.first, token);
  if (lane < share.part.fresh) sh.slots[lane] = (int)slot_of(a, share.part.row_of(lane), share.part.older + lane);
}

// Heads of q, k or v, by one warp: waited for together, then normed, rotated and rounded to 16 bits.
struct Head { u32 pairs[PER / 2]; };
struct HeadSource {
  const u16 *from, *norm;
  const float2* turns;
};
template <int COUNT> DEVICE void prepare_heads(const HeadSource (&source)[COUNT], int count, float epsilon, int lane, Head (&heads)[COUNT]) {
  constexpr int HALF = ROTARY / 2 / PER;  // lanes between the two of a pair
  u32 weight[COUNT][PER / 2];  // two each
  float2 turn[COUNT][PER];
#pragma unroll
  for (int n = 0; n < COUNT; n++) {  // here before the values are
    const bool asked = COUNT == 1 || n < count;
#pragma unroll
    for (int i = 0; i < PER / 2; i++)
      if (QK_NORM && asked && source[n].norm) weight[n][i] = ((const u32*)source[n].norm)[lane * PER / 2 + i];
#pragma unroll
    for (int i = 0; i < PER; i++)
      turn[n][i] = asked && source[n].turns && lane < 2 * HALF ? source[n].turns[lane % HALF * PER + i] : make_float2(1, 0);
  }
  u32 words[COUNT][PER / 2];
  bool all;
  Patience patience;
  do {
    patience.poll();
    all = true;
#pragma unroll
    for (int n = 0; n < COUNT; n++)
      if (COUNT == 1 || n < count) load_relaxed(source[n].from + lane * PER, words[n]);
#pragma unroll
    for (int n = 0; n < COUNT; n++)
      if (COUNT == 1 || n < count) all &= !missing<true>(words[n]);
  } while (!all);
  __syncwarp();
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    if (COUNT > 1 && n >= count) break;
    float v[PER], squares = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
      v[i] = i & 1 ? high_float(words[n][i / 2]) : low_float(words[n][i / 2]);
      squares += v[i] * v[i];
    }
    if (QK_NORM && source[n].norm) {
      const float inverse = rsqrtf(warp_sum(squares) / HEAD_DIM + epsilon);
#pragma unroll
      for (int i = 0; i < PER; i++) v[i] *= inverse * (i & 1 ? high_float(weight[n][i / 2]) : low_float(weight[n][i / 2]));
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
      const float other = __shfl_sync(~0u, v[i], lane < HALF ? lane + HALF : lane - HALF);
      v[i] = v[i] * turn[n][i].x + (lane < HALF ? -other : other) * turn[n][i].y;
    }
#pragma unroll
    for (int i = 0; i < PER / 2; i++) heads[n].pairs[i] = pack2(v[2 * i], v[2 * i + 1]);
  }
}
// A query to shared memory, as the product takes it: in the type of activations, or with the scale of scores in fp16.
DEVICE void store_query(const Head& v, float scale, u16* to, int lane) {
#pragma unroll
  for (int i = 0; i < PER / 2; i++)
    ((u32*)to)[lane * PER / 2 + i] =
        KV8 ? pack_as<true>(low_float(v.pairs[i]) * scale, high_float(v.pairs[i]) * scale) : v.pairs[i];
}
// A key or value to shared memory and, unless that is null, to the cache, as that stores it, with its scale.
DEVICE void store_newest(const Head& v, Stored* to, Stored* cache, u32* scale_to, u16* scale_cache, float fixed, int lane) {
#if KV8
  float most = 0;
#pragma unroll
  for (int i = 0; i < PER / 2; i++) most = fmaxf(most, fmaxf(fabsf(low_float(v.pairs[i])), fabsf(high_float(v.pairs[i]))));
  const u16 bits = scale_bits(warp_max(most), fixed);
  const float scale = scale_of(bits), inverse = 1.f / scale;
  if (lane == 0) *scale_to = bits | (u32)bits << 16;
  if (lane == 0 && cache) *scale_cache = bits;
#pragma unroll
  for (int i = 0; i < PER / 2; i++) {
    const u16 codes = (u16)code_pair(low_float(v.pairs[i]), high_float(v.pairs[i]), scale, inverse);
    ((u16*)to)[lane * PER / 2 + i] = codes;
    if (cache) ((u16*)cache)[lane * PER / 2 + i] = codes;
  }
#else
#pragma unroll
  for (int i = 0; i < PER / 2; i++) {
    ((u32*)to)[lane * PER / 2 + i] = v.pairs[i];
    if (cache) ((u32*)cache)[lane * PER / 2 + i] = v.pairs[i];
  }
#endif
}

// Running softmax of the two columns 2 · (lane % 4) and the next of a product, over this warp's 64 dimensions.
struct Softmax {
  float most[2], sum[2], values[4][4];
};
// What the columns of a product see of a tile of `count` (1 to 16) tokens; rows beyond those are read as the last one, and count for
// nothing. Where rows go together, each sees one new token more than the one before it, and a window begins one token later.
struct Tokens {
  int count, first;  // tokens, and which of the sequence the first is
  int before;        // of new tokens: those that the first row sees besides its own; −1: these are older ones
  int oldest;        // that the first row sees, may be below 0
  DEVICE bool seen(int token, int column) const {
    if (TAKEN == 1) return token < count;
    const int row = column / G;
    if (before >= 0) return token <= before + row;
    return token < count && (!WINDOW || first + token >= oldest + row);
  }
};
#if KV8
// A scale is the half of its word that its token's place in the page says.
DEVICE void absorb(Softmax& run, const u16* query, u32 keys, u32 values, u32 scales, Tokens tokens, float soft_cap, int lane) {
  const int g = lane / 4, t = lane % 4, count = tokens.count;
  float score[2][4] = {};  // two chains of additions
  float key_by[2], value_by[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = min(g + 8 * half, count - 1), high = 2 * ((tokens.first + token) % 2);
    key_by[half] = scale_of((u16)shared_load16(scales + token * 4 + high));
    value_by[half] = scale_of((u16)shared_load16(scales + 64 + token * 4 + high));
    shift[half] = log2_fast(value_by[half]);
  }
  const u32 low_row = keys + min(g, count - 1) * KV_ROW + t * 8, high_row = keys + min(g + 8, count - 1) * KV_ROW + t * 8;
  query += min(g, QUERIES - 1) * QUERY_ROW + t * 8;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    const uint4 q = *(const uint4*)(query + i * 32);
    const uint4 low = widened(shared_load2(low_row + i * 32)), high = widened(shared_load2(high_row + i * 32));
    mma16<true>(score[0], low.x, high.x, low.y, high.y, q.x, q.y);
    mma16<true>(score[1], low.z, high.z, low.w, high.w, q.z, q.w);
  }
  float most[2] = {run.most[0], run.most[1]};
#pragma unroll
  for (int j = 0; j < 4; j++) {  // token g + 8 · (j / 2), column 2 t + j % 2
    const float whole = (score[0][j] + score[1][j]) * key_by[j / 2];
    score[0][j] = tokens.seen(g + j / 2 * 8, 2 * t + j % 2) ? SOFT_CAP ? bend(whole, soft_cap) : whole : LOWEST;
    most[j % 2] = fmaxf(most[j % 2], score[0][j] + shift[j / 2]);
  }
#pragma unroll
  for (int o = 4; o < 32; o <<= 1)
#pragma unroll
    for (int j = 0; j < 2; j++) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], o));
  float fade[2], weight[4];
#pragma unroll
  for (int j = 0; j < 4; j++) weight[j] = exp2_fast(score[0][j] - most[j % 2]);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    fade[j] = exp2_fast(run.most[j] - most[j]);
    run.most[j] = most[j];
    run.sum[j] = run.sum[j] * fade[j] + weight[j] + weight[2 + j];
  }
  const u32 b0 = transpose8(pack_as<true>(weight[0] * value_by[0], weight[1] * value_by[0]));
  const u32 b1 = transpose8(pack_as<true>(weight[2] * value_by[1], weight[3] * value_by[1]));
  uint4 word[4];
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = widened(shared_load2(values + min(i / 2 * 8 + 2 * t + i % 2, count - 1) * KV_ROW + g * 8));
#pragma unroll
  for (int i = 0; i < 4; i++) {  // dimension 8 g + 2 i + j / 2, column 2 t + j % 2
    u32 of[4];
#pragma unroll
    for (int j = 0; j < 4; j++) of[j] = i == 0 ? word[j].x : i == 1 ? word[j].y : i == 2 ? word[j].z : word[j].w;
#pragma unroll
    for (int j = 0; j < 4; j++) run.values[i][j] *= fade[j % 2];
    mma16<true>(run.values[i], __byte_perm(of[0], of[1], 0x5410), __byte_perm(of[0], of[1], 0x7632),
                __byte_perm(of[2], of[3], 0x5410), __byte_perm(of[2], of[3], 0x7632), b0, b1);
  }
}
// Where number i of the eight results of a lane and column stands among its warp's dimensions.
DEVICE int dimension_of(int i, int lane) { return lane / 4 * 8 + i; }
#else
DEVICE int dimension_of(int i, int lane) { return i * 8 + lane / 4; }
DEVICE void absorb(Softmax& run, const u16* query, u32 keys, u32 values, Tokens tokens, float scale, float soft_cap, int lane) {
  const int g = lane / 4, t = lane % 4, count = tokens.count;
  float score[2][4] = {};  // two chains of additions
  keys += min(lane % 16, count - 1) * KV_ROW + lane / 16 * 16;
  query += min(g, QUERIES - 1) * QUERY_ROW + 2 * t;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
    const uint4 a = load_matrices<false>(keys + k * 32);
    mma16<FP16>(score[k % 2], a.x, a.y, a.z, a.w, *(const u32*)(query + k * 16), *(const u32*)(query + k * 16 + 8));
  }
  float most[2] = {run.most[0], run.most[1]};
#pragma unroll
  for (int j = 0; j < 4; j++) {  // token g + 8 · (j / 2), column 2 t + j % 2
    const float whole = (score[0][j] + score[1][j]) * scale;
    score[0][j] = tokens.seen(g + j / 2 * 8, 2 * t + j % 2) ? SOFT_CAP ? bend(whole, soft_cap) : whole : LOWEST;
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
  for (int i = 0; i < 4; i++) {  // dimension 16 i + g + 8 · (j / 2), column 2 t + j % 2
    const uint4 a = load_matrices<true>(values + i * 32);
#pragma unroll
    for (int j = 0; j < 4; j++) run.values[i][j] *= fade[j % 2];
    mma16<FP16>(run.values[i], a.x, a.y, a.z, a.w, b0, b1);
  }
}
#endif

// A run of a part's older tokens, and its `fresh` new ones (0: another run has them): every lane of the CTA leaves its states
// [QUERIES][STATE] where its tokens were. Between the start and `prepare`, which makes the queries, tokens are fetched. `known`: this
// is the run whose places were looked up.
template <typename Prepare>
DEVICE int attend(Shared& sh, const Attention& a, const Part& part, int head, const Run& run_of_older, int fresh, bool known, Prepare prepare) {
  const int begin = run_of_older.begin, end = run_of_older.end;
  constexpr int EACH = 16 / sizeof(Stored), CHUNKS = HEAD_DIM / EACH;  // of 16 bytes in a row
  const int thread = threadIdx.x % (DIM_PARTS * 32), index = threadIdx.x / (DIM_PARTS * 32), lane = threadIdx.x % 32;
  const int older = (end - begin + 15) / 16, tiles = older + (fresh > 0);
  const u32 memory = shared_address(sh.linear.ring) + index * DEPTH * KV_TILE;
  auto place_of = [&](int tile) {  // of a tile's first token
    if (tile >= older) return 0;
    return known && tile < KNOWN ? sh.places[tile] : (int)slot_of(a, part.first, begin + tile * 16);
  };
  int place = 0;  // of the tile that is fetched
  auto fetch = [&](int tile, int slot) {
    if (tile < older)
#pragma unroll
      for (int i = thread / CHUNKS; i < 16; i += DIM_PARTS * 32 / CHUNKS) {
        const int token = begin + tile * 16 + i;
        if (token < end) {
          const size_t row = KNOWN ? ((size_t)(place + i) * KV_HEADS + head) * HEAD_DIM : token_at(a, part.first, token, head);
          const size_t at = row + thread % CHUNKS * EACH;
          const u32 to = memory + slot * KV_TILE + i * KV_ROW + thread % CHUNKS * 16;
          copy16(to, a.keys + at);
          copy16(to + SCALES / 2, a.values + at);
        }
      }
#if KV8
    if (tile < older && thread < 32 && begin + tile * 16 + thread % 16 < end) {
      const size_t at = scale_place(KNOWN ? place + thread % 16 : slot_of(a, part.first, begin + tile * 16 + thread % 16), head);
      copy4(memory + slot * KV_TILE + SCALES + thread * 4, (thread < 16 ? a.key_scales : a.value_scales) + at / 2 * 2);
    }
#endif
    copy_group();
  };
  auto meet = [&] {  // the warps of a lane
    if (DIM_PARTS == 1) __syncwarp();
    else named_barrier(2 + index, DIM_PARTS * 32);
  };
  if (index < LANES)
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (KNOWN) place = place_of(index + i * LANES);
      fetch(index + i * LANES, i);
    }
  if (KNOWN) place = place_of(index + DEPTH * LANES);
  prepare();
  named_barrier(1, THREADS);
  if (index >= min(LANES, tiles)) return min(LANES, tiles);

  const int dims = thread / 32 * PART_BYTES;  // bytes before this warp's dimensions
  Softmax run = {{LOWEST, LOWEST}};
  int slot = 0;
  for (int tile = index; tile < tiles; tile += LANES) {
    copy_wait<DEPTH - 1>();
    meet();
    const bool old = tile < older;
    const u32 keys = old ? memory + slot * KV_TILE : shared_address(sh.newest[0]);
    const u32 values = old ? keys + SCALES / 2 : shared_address(sh.newest[1]);
    const Tokens tokens = {old ? min(16, end - begin - tile * 16) : fresh, begin + tile * 16, old ? -1 : part.fresh - part.rows,
                           part.length() - part.rows + 1 - WINDOW};
#if KV8
    const u32 scales = old ? keys + SCALES : shared_address(sh.newest_scales);
    absorb(run, sh.query[0], keys, values + dims, scales, tokens, a.soft_cap, lane);
#else
    absorb(run, sh.query[0], keys, values + dims, tokens, a.scale, a.soft_cap, lane);
#endif
    meet();
    fetch(tile + DEPTH * LANES, slot);
    if (KNOWN) place = place_of(tile + (DEPTH + 1) * LANES);
    if (++slot == DEPTH) slot = 0;
  }
  float* states = (float*)(sh.linear.ring[0] + index * DEPTH * KV_TILE);
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) run.sum[j] += __shfl_xor_sync(~0u, run.sum[j], o);
    const int own = lane % 4 * 2 + j;
    if (own < QUERIES) {
      float* state = states + own * STATE;
#pragma unroll
      for (int i = 0; i < 8; i++) state[dims / sizeof(Stored) + dimension_of(i, lane)] = run.values[i / 2][i % 2 * 2 + j];
      if (dims == 0 && lane < 4) state[HEAD_DIM] = run.most[j], state[HEAD_DIM + 1] = run.sum[j];
    }
  }
  return min(LANES, tiles);
}

// Neighbouring dimensions, from d on, of query h in the states of the first `count` lanes: values, maximum, sum.
template <int N> struct Merged {
  float values[N], most, sum;
};
template <int N> DEVICE Merged<N> merge_lanes(const Shared& sh, int count, int h, int d) {
  const float* state = (const float*)sh.linear.ring[0] + h * STATE;
  constexpr int STEP = DEPTH * KV_TILE / 4;
  float limit[LANES];
  Merged<N> r = {{}, LOWEST, 0};
#pragma unroll
  for (int i = 0; i < LANES; i++) limit[i] = i < count ? state[i * STEP + HEAD_DIM] : LOWEST, r.most = fmaxf(r.most, limit[i]);
#pragma unroll
  for (int i = 0; i < LANES; i++) {
    const float weight = exp2_fast(limit[i] - r.most);
    if (i < count) {
      r.sum += weight * state[i * STEP + HEAD_DIM + 1];
      if constexpr (N == 2) {
        const float2 two = *(const float2*)(state + i * STEP + d);
        r.values[0] += weight * two.x, r.values[1] += weight * two.y;
      } else if constexpr (N == 4) {
        const float4 four = *(const float4*)(state + i * STEP + d);
        r.values[0] += weight * four.x, r.values[1] += weight * four.y, r.values[2] += weight * four.z, r.values[3] += weight * four.w;
      } else {
        r.values[0] += weight * state[i * STEP + d];
      }
    }
  }
  return r;
}

// What a sum of weights has to be raised by, where `most` is the logit that weighs 1.
DEVICE float sunk(const Attention& a, int h, float most) {
  return SINKS ? exp2_fast(to_float(a.sinks[h]) * 1.4426950408889634f - most) : 0.f;
}

// Outputs of `rows` rows of this CTA's head, four each from `begin` to `last`, from the states of all runs; `states` is the first one's.
// Runs sit side by side in the lanes of a warp, four outputs in each. `gates` and `out`: of the first row.
DEVICE void gather(const Attention& a, const float* states, const u16* gates, u16* out, int rows, int begin, int last, int used, int warp,
                   int lane) {
  const int quads = rows * G * HEAD_DIM / 4;
  const int wide = used <= 2 ? 2 : used <= 4 ? 4 : used <= 8 ? 8 : used <= 16 ? 16 : 32;  // lanes for one quad
  for (int first = begin + warp * (32 / wide); first < last; first += WARPS * (32 / wide)) {
    const int quad = first + lane / wide, run = lane % wide, query = min(quad, quads - 1) * 4 / HEAD_DIM;
    u32 words[4] = {}, limits[2] = {__float_as_uint(LOWEST), 0};
    Gates<2> factors(gates + 4 * min(quad, quads - 1));
    if (quad < last && run < used) {
      const float* state = states + ((size_t)run * QUERIES + query) * STATE;
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
    const float inverse = __fdividef(1.f, sum + sunk(a, query % G, most));
    if (quad < last && run == 0) {
      factors.await();
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] *= inverse * factors.factor(i);
      u16* row = out + (size_t)(query / G) * HEADS * HEAD_DIM;
      ((uint2*)row)[quad - query / G * (G * HEAD_DIM / 4)] = make_uint2(pack2(v[0], v[1]), pack2(v[2], v[3]));
    }
  }
}

// The mailboxes of the next launch, by the last warps: the first ones are busy with the heads.
DEVICE void empty(u16* qkv, float* states) {
  const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
  const int thread = THREADS - 1 - threadIdx.x;
  for (int i = thread; i < QUERIES * STATE / 4; i += THREADS) ((uint4*)(states + (size_t)blockIdx.x * QUERIES * STATE))[i] = ones;
  constexpr int CTAS = KV_HEADS * HEAD_CTAS;
  for (int i = thread * CTAS + blockIdx.x; i < ROWS * NDIM / 8; i += THREADS * CTAS) ((uint4*)qkv)[i] = ones;
}

// Mailboxes: qkv [ROWS, NDIM], states [KV_HEADS, HEAD_CTAS, QUERIES, STATE]; the next launch's are emptied.
extern "C" __global__ void __launch_bounds__(ALL_THREADS, ON_SM)
qkv_attention(const u8* weights, const u32* records, const float* channel_scale, const u16* X, const u16* norm, const u16* bias,
              const u16* query_norm, const u16* key_norm, const float2* rope, const int* lengths, const int* tables, Stored* keys,
              Stored* values, u16* out, u16* qkv, float* states, u16* next_qkv, float* next_states, float epsilon, float scale,
              int table_width, u32* turns CHUNK_ARGUMENTS SCALE_ARGUMENTS BEND_ARGUMENTS ADAPTER_ARGUMENTS LAUNCH_ARGUMENTS) {

  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  Shared& sh = *(Shared*)raw;
  const int head = blockIdx.x / HEAD_CTAS, cta = blockIdx.x % HEAD_CTAS;
  const int item = cta / ITEM_CTAS, member = cta % ITEM_CTAS;
  if (head >= KV_HEADS) {  // stays until the next kernel has surely taken the room that the one before this left on every SM
    launch_dependents();
    wait_for_inputs();
    u32 last[1];
    Patience patience;
    if (threadIdx.x == 0) do {
        patience.poll();
        load_relaxed(qkv + NDIM - 2, last);
      } while (missing<true>(last));
    return count_launch();
  }
#if PAIRED  // the other CTA's tiles, then ours
  const int ours = cta * SLOTS, others = (cta ^ 1) * SLOTS, tiles = 2 * SLOTS;
  auto tile_at = [=](int i) { return head_tile(head, i < SLOTS ? others + i : ours + i - SLOTS); };
#else
  const int first = cta * LOCAL_TILES / HEAD_CTAS, tiles = (cta + 1) * LOCAL_TILES / HEAD_CTAS - first;
  auto tile_at = [=](int i) { return head_tile(head, first + i); };
#endif
  const Linear arguments = {weights, records, channel_scale, X, norm, bias, nullptr, qkv, epsilon, turns ADAPTER_GIVEN};
  const Attention a = {query_norm, key_norm, rope, lengths, tables, keys, values, out, scale * 1.4426950408889634f, table_width,
#if SOFT_CAP || SINKS
                       soft_cap * 1.4426950408889634f, SINKS ? sinks + head * SHARING + item * G : nullptr
#else
                       0.f, nullptr
#endif
#if KV8
                       , key_scales, value_scales
#endif
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if CHUNK == 1
  constexpr int* before = nullptr;
#endif
#if TOGETHER
  const int row_length = lane < ROWS ? lengths[lane] : 0, row_back = lane < ROWS ? before[lane] : 0;  // before they are needed
  auto first_share = [&]() -> Share {
    const Parts parts(row_length, row_back);
    const int own = member / parts.splits, split = member % parts.splits;
    const Part part = own < parts.count ? parts.part(own) : Part{};
    return {part, run_of(part, split, parts.splits), 0, 0, split, parts.splits, own, ITEM_CTAS / parts.splits, parts.count};
  };
  auto part_at = [&](int index) { return Parts(lane < ROWS ? lengths[lane] : 0, lane < ROWS ? before[lane] : 0).part(index); };
#else
  const int length = member / SPLITS < ROWS ? lengths[member / SPLITS] : 0;  // in a register before it is needed
  auto first_share = [&]() -> Share {
    const Part part = length ? Parts().part(length, before, member / SPLITS) : Part{};
    return {part, run_of(part, member % SPLITS, SPLITS), 0, 0, member % SPLITS, SPLITS, member / SPLITS, ITEM_CTAS / SPLITS, ROWS};
  };
  auto part_at = [&](int index) { return lengths[index] ? Parts().part(lengths[index], before, index) : Part{}; };
#endif
  auto early = [&] { prefetch(a, first_share(), head, lane); };
  auto meanwhile = [&] {
    if (warp == 0) look_up(sh, a, first_share(), lane);
  };
  if (!linear(sh.linear, arguments, tiles, tile_at, early, blockIdx.x, KV_HEADS * HEAD_CTAS, slice_at(PAIRED ? cta % 2 : 0), nullptr,
              meanwhile)) return;

  if (!OWN_COPIES) empty(next_qkv, next_states);
#if TOGETHER
  const Share& share = sh.share;
  const int splits = share.splits, split = share.split, own = share.own, step = share.step, count = share.count;
#else
  constexpr int splits = SPLITS, step = ITEM_CTAS / SPLITS, count = ROWS;
  const int split = member % splits, own = member / splits;
#endif
  for (int index = own; index < count; index += step) {
    const bool known = index == own;
    const Part part = known ? sh.share.part : part_at(index);
    const Run run = known ? sh.share.run : run_of(part, split, splits);
    if (part.length() == 0 || split >= run.used) continue;
    const int fresh = split + 1 == run.used ? part.fresh : 0;
    const int lanes = attend(sh, a, part, head, run, fresh, known, [&] {
      const int queries = part.rows * G, tasks = queries + 2 * fresh;
      for (int task = warp; task < tasks; task += WARPS * AT_ONCE) {
        HeadSource sources[AT_ONCE];
        Head heads[AT_ONCE];
        auto place_of = [&](int h) { return h < queries ? part.fresh - part.rows + h / G : (h - queries) / 2; };  // among the new tokens
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
          const int h = min(task + n * WARPS, tasks - 1), place = place_of(h);
          const bool query = h < queries, key = (h - queries) % 2 == 0;
          const int column = (FIRST_QUERY + (query ? head * SHARING + item * G + h % G : key ? HEADS + head : HEADS + KV_HEADS + head)) * HEAD_DIM;
          sources[n] = {qkv + (size_t)part.row_of(place) * NDIM + column, query ? query_norm : key ? key_norm : nullptr,
                        query || key ? rope + (size_t)(part.older + place) * (ROTARY / 2) : nullptr};
        }
        prepare_heads(sources, (tasks - task + WARPS - 1) / WARPS, epsilon, lane, heads);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
          const int h = task + n * WARPS, place = place_of(h);
          if (AT_ONCE > 1 && h >= tasks) break;
          if (h < queries) {
            store_query(heads[n], a.scale, sh.query[h], lane);
          } else {
            const bool key = (h - queries) % 2 == 0, kept = place >= part.fresh - part.rows && item == 0;
            const size_t slot = known ? (size_t)sh.slots[place] : slot_of(a, part.row_of(place), part.older + place);
            Stored* cache = kept ? (key ? keys : values) + (slot * KV_HEADS + head) * HEAD_DIM : nullptr;
            Stored* to = (Stored*)sh.newest[!key][place];
#if KV8
            store_newest(heads[n], to, cache, sh.newest_scales[!key] + place,
                         (key ? key_scales : value_scales) + scale_place(slot, head), key ? fixed_key : fixed_value, lane);
#else
            store_newest(heads[n], to, cache, nullptr, nullptr, 0.f, lane);
#endif
          }
        }
      }
    });
    named_barrier(1, THREADS);
    const size_t results = (size_t)(head * SHARING + item * G) * HEAD_DIM;  // where those of this part begin in a row
    u16* target = out + (size_t)part.first * HEADS * HEAD_DIM + results;
    const u16* gates = qkv + (size_t)part.first * NDIM + results;
    float* mine = states + (size_t)blockIdx.x * QUERIES * STATE;
    constexpr int N = RESULTS_AT_ONCE;
    for (int i = threadIdx.x * N; i < part.rows * G * HEAD_DIM; i += THREADS * N) {
      const int h = i / HEAD_DIM, d = i % HEAD_DIM;
      const Merged<N> state = merge_lanes<N>(sh, lanes, h, d);
      if (run.used == 1) {
        Gates<1> factors(gates + i / 2 * 2);
        factors.await();
        const float sum = state.sum + sunk(a, h % G, state.most);
#pragma unroll
        for (int j = 0; j < N; j++)
          target[(size_t)(h / G) * HEADS * HEAD_DIM + h % G * HEAD_DIM + d + j] = to_bits(state.values[j] / sum * factors.factor((i + j) % 2));
      } else {
        store_relaxed(mine + h * STATE + d, state.values);
        if (d < 2 * N && d % N == 0) store_relaxed(mine + h * STATE + HEAD_DIM + d / N, d ? state.sum : state.most);
      }
    }
    if (run.used > 1) {
      const int begin = known ? sh.share.first_quad : quad_of(part, run, split), end = known ? sh.share.last_quad : quad_of(part, run, split + 1);
      gather(a, mine - (size_t)split * QUERIES * STATE, gates, target, part.rows, begin, end, run.used, warp, lane);
    }
    if (index + step < count) named_barrier(1, THREADS);  // before others fetch over the states
  }
  if (OWN_COPIES) empty(next_qkv, next_states);
  end_launch(THREADS);
}
