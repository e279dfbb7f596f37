// y[r, n] = sum_k x[r, k] · W[n, k] for up to TOKENS rows, with W as in vptq_decode.cu, never written out.
//
// A warpgroup multiplies 64 outputs (8 row blocks, two a warp) by all rows at once: W is the left operand, from registers, x the
// right one, packed by vptq_pack.cu with the columns' scales in it. Lookups are those of vptq.cu, but here all row blocks share one
// x, so the columns come in their own order: a lane sorts the items of a span by their positions. A step, 32 columns, of two row
// blocks is two products:
//
//      A [16 × 16]   rows 0-7: row block 0     rows 8-15: row block 1     columns: half a step (vptq.cuh)
//
// `load_matrices` brings a step of one row block as four registers, quarters of the step: the products take two of each row block.
//
//      lookups     |  step 1         |  step 2         |  step 3         | …
//      products    |  step 0         |  step 1         |  step 2         | …      items of the next unit are put in order meanwhile
//
//      line of units          |  tile 0: span 0, 1, 2 …, outliers  |  tile 1: …        a tile is two row blocks for each warp
//      CTAs, contiguous runs  |  CTA 0      |  CTA 1      |  CTA 2      | …            best with none in two tiles
//
// A last tile with row blocks for a third of the warps at most may be a line of its own, with CTAs of its own (`apart`): warpgroups
// that have none look nothing up, so it takes fewer CTAs than a whole one.
//
// There is a CTA on every SM, if need be without work: on an SM without one thread blocks of the next vptq_pack.cu would gather.
//
// A tile that several CTAs have a part of: each leaves its sums in memory, words that are their own flags (common.cuh), and adds up
// and ends its share of them, in the order of the CTAs. One CTA an SM, and no more CTAs than SMs: waiting is safe.
//
// PAIRED: 2, 4 or 8 CTAs have a tile for themselves, two each in a cluster, whose shared memory takes half of the other's sums. What
// then meets in memory is columns of 8 rows that one pair has ended, and the others have their half of.
//
//      pair 0 │ CTA 0: columns 0 1 2 3 ⇄ CTA 1: columns 4 5 6 7 │   CTA 0 ends 0 1, CTA 1 4 5
//      pair 1 │ CTA 2: columns 0 1 2 3 ⇄ CTA 3: columns 4 5 6 7 │   CTA 2 ends 2 3, CTA 3 6 7
//
// COMING: lookups leave memory idle. A warp that has nothing else to do asks for keys and values of the attention that follows, so that
// they are in L2 when it begins.
//
// Limit: shared memory. 32 items, half of a step of two row blocks, take 10.4 cycles (random entries), 4 for residuals, TOKENS / 16
// for x, TOKENS / 4 / WARPS for x to come.
//
// With more rows sums take more registers, so there are fewer warps, and x more room, so stages are shorter.
//
// defines: those of vptq_tables.cuh (PIECES 1), TOKENS (8 to 128), STAGES, STAGE_STEPS (of 32 columns), AHEAD (steps looked up),
// REGISTERS (of a thread at launch), DENSE (there are outliers), PAIRED (0), COMING (0)
#include "vptq_tables.cuh"
#include "words.cuh"

#ifndef COMING
#define COMING 0
#endif

constexpr int TILE = 2 * WARPS;                  // row blocks
constexpr int SPAN_STAGES = SPAN / STAGE_STEPS;
constexpr int X_STAGE = TOKENS * 64 * STAGE_STEPS;
constexpr int COLUMNS = TOKENS / 8;              // groups of 8 rows of x
constexpr int ALL_THREADS = THREADS + 128;       // with the warpgroup that fetches, and gives its registers to the others
constexpr int LOADED = 10;                       // sums of other CTAs that are fetched together: most have no more
constexpr int ADDERS = 64;                       // threads of it, which add the columns' biases up meanwhile
constexpr int GIVEN_REGISTERS = 24, TAKEN_REGISTERS = (REGISTERS * ALL_THREADS - GIVEN_REGISTERS * 128) / THREADS / 8 * 8;
static_assert(!PAIRED || COLUMNS % 2 == 0, "halves are whole columns");
static_assert(PIECES == 1 && STAGE_STEPS > 1 && SPAN % STAGE_STEPS == 0 && AHEAD <= 2, "vectors of 8, whole stages");

struct Line {  // of the units of a part, cut over its CTAs
  u32 per_tile, total, ctas;
  DEVICE int begin(int cta) const { return total * cta / ctas; }
  DEVICE int owner(int unit) const { return ((unit + 1) * ctas - 1) / total; }
};
// The last tile of a part, where it is as small as said above, and the others are parts by themselves.
DEVICE void split_off(Part& part, int apart, int chunks, int dense_steps) {
  const int blocks = (part.outputs + 7) / 8, whole = blocks / TILE * TILE;
  if (!apart || blocks == whole || blocks - whole > TILE / 3) return;
  part.ctas -= apart;
  if (part.cta < part.ctas) {
    part.outputs = 8 * whole;
    return;
  }
  part.cta -= part.ctas, part.ctas = apart;
  part.stream += (size_t)whole * chunks * CHUNK_BYTES, part.dense += (size_t)whole * dense_steps * 32;
  part.first += 8 * whole, part.outputs -= 8 * whole;
}
struct Results {
  const u16 *bias, *rest;
  const float *biases, *factors;  // [TOKENS]: what the columns' biases add; the norm's
  u16* y;
  int rows, width, first, outputs;
  DEVICE float whole(float sum, int output, int row) const {  // `rest` aside
    const float here = bias && output < outputs ? to_float(bias[first + output]) : 0.f;
    return (sum + biases[row]) * factors[row] + here;
  }
  DEVICE bool in_halves() const { return (width | first | outputs) % 2; }
  DEVICE size_t place(int output, int row) const { return (size_t)row * width + first + output; }
  DEVICE bool inside(int output, int row) const { return output < outputs && row < rows; }
  // Neighbouring outputs of row g are a word of memory: of `rest`, what `write` then adds. Both may lie in one place.
  DEVICE uint2 before(int tile, int column, int thread) const {
    const int row = 8 * column + thread % 32 / 4, output = tile * TILE * 8 + thread / 32 * 16 + thread % 4 * 2;
    if (!rest || in_halves()) return make_uint2(0, 0);
    return make_uint2(inside(output, row) ? *(const u32*)(rest + place(output, row)) : 0,
                      inside(output + 8, row) ? *(const u32*)(rest + place(output + 8, row)) : 0);
  }
  // Of a warp, `thread` / 32, all at once: outputs g and g + 8 of its 16, rows 2t and 2t + 1 of 8.
  DEVICE void write(const float (&sum)[4], uint2 before, int tile, int column, int thread) const {
    const int g = thread % 32 / 4, t = thread % 4, output = tile * TILE * 8 + thread / 32 * 16, row = 8 * column + 2 * t;
    if (in_halves()) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int o = output + i / 2 * 8 + g, r = row + i % 2;
        if (!inside(o, r)) continue;
        const size_t at = place(o, r);
        y[at] = to_bits(whole(sum[i], o, r) + (rest ? to_float(rest[at]) : 0.f));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 old = transpose8(i ? before.y : before.x);
      const float low = whole(sum[2 * i], output + 8 * i + g, row), high = whole(sum[2 * i + 1], output + 8 * i + g, row + 1);
      const u32 pair = transpose8(pack2(low + low_float(old), high + high_float(old)));
      const int own = output + 8 * i + 2 * t;
      if (inside(own, 8 * column + g)) *(u32*)(y + place(own, 8 * column + g)) = pair;
    }
  }
};

#if PAIRED
constexpr int HALF = COLUMNS / 2, MOST_PAIRS = HALF < 4 ? HALF : 4;    // columns that a CTA of a pair has
constexpr int LETTERS = HALF > 1 ? HALF - HALF / MOST_PAIRS : 1;       // that other pairs have of ours, at most
struct Pairs {  // of the pairs that share a tile: each ends as many columns of a CTA's half
  uint4* mail;
  int pair, owned;
  DEVICE bool ours(int j) const { return j / owned == pair; }
  DEVICE uint4* place(int of, int j) const { return mail + ((size_t)(blockIdx.x + 2 * (of - pair)) * HALF + j) * THREADS + threadIdx.x; }
  DEVICE int letters() const { return HALF - owned; }  // one pair's after the other's
  DEVICE int column(int i) const { return pair * owned + i % owned; }
  DEVICE uint4* letter(int i) const { return place(i / owned + (i / owned >= pair), column(i)); }
};
DEVICE void end_in_pairs(const float (&acc)[TOKENS / 2], const Results& results, const Pairs& all, uint4* received, u64* met, int tile) {
  const int rank = blockIdx.x % 2;
  cluster_wait();  // both have begun
#pragma unroll
  for (int j = 0; j < COLUMNS; j++)
    if (j / HALF != rank) send_in_cluster(received + j % HALF * THREADS + threadIdx.x, met, rank ^ 1, *(const uint4*)&acc[4 * j]);
  uint2 rest_of[HALF];  // comes while we wait
#pragma unroll
  for (int j = 0; j < HALF; j++)
    if (all.ours(j)) rest_of[j] = results.before(tile, rank * HALF + j, threadIdx.x);
  barrier_wait(met, 0);
#pragma unroll
  for (int j = 0; j < HALF; j++) {
    uint4& place = received[j * THREADS + threadIdx.x];
    const uint4 other = place;
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = (rank ? acc[4 * (HALF + j) + i] : acc[4 * j + i]) + ((const float*)&other)[i];
    if (all.ours(j)) place = *(const uint4*)sum;
    else store_relaxed(all.place(all.pair, j), *(const uint4*)sum);
  }
  u32 words[LETTERS][4];
  const int letters = all.letters();
  await_words(words, [=](int i) { return i < letters; }, [&](int i) { return all.letter(i); });
#pragma unroll
  for (int i = 0; i < LETTERS; i++) {
    if (i >= all.letters()) break;
    store_relaxed(all.letter(i), make_uint4(~0u, ~0u, ~0u, ~0u));
    float* const sum = (float*)&received[all.column(i) * THREADS + threadIdx.x];
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] += __uint_as_float(words[i][k]);
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < HALF; j++) {
    if (!all.ours(j)) continue;
    const uint4 v = received[j * THREADS + threadIdx.x];
    const float* sum = (const float*)&v;
    results.write({sum[0], sum[1], sum[2], sum[3]}, rest_of[j], tile, rank * HALF + j, threadIdx.x);
  }
}
#endif

#if COMING
// Keys and values of decode attention, the first `pages` of those that are this CTA's: the first of every sequence come first. Slowly,
// so that nothing that is needed sooner queues behind; what is left when the products are `done` attention fetches itself.
DEVICE void fetch_pages(const int* lengths, const int* tables, const u8* keys, const u8* values, int table_width, int sequences, int page,
                        int token_bytes, int pages, int pause, int ctas, const volatile int& done, int lane) {
  constexpr int PIECE = 8192;
  for (int first = 0; first < pages; first += 32) {  // a lane finds one
    const int i = blockIdx.x + (first + lane) * ctas, sequence = i % sequences, index = i / sequences;
    const int tokens = first + lane < pages && index < table_width ? min(lengths[sequence] - index * page, page) : 0;
    const size_t from = tokens > 0 ? (size_t)tables[sequence * table_width + index] * page * token_bytes : 0;
    for (int j = 0; j < 32; j++) {
      const int bytes = __shfl_sync(~0u, tokens, j) * token_bytes;
      const size_t begin = __shfl_sync(~0u, from, j);
      for (int at = 0; at < bytes; at += PIECE) {
        if (__any_sync(~0u, done)) return;
        if (lane < 2) prefetch_bulk((lane ? values : keys) + begin + at, min(PIECE, bytes - at));
        sleep_for(pause);
      }
    }
  }
}
#define COMING_ARGUMENTS , const int *lengths, const int *tables, const u8 *keys, const u8 *values, int table_width, int sequences, int page, \
                         int token_bytes, int pages, int pause
#else
#define COMING_ARGUMENTS
#endif

extern "C" __global__ void __maxnreg__(REGISTERS) vptq_rows(
    PART(0), PART(1), PART(2), const u8* x, const float* sums, const float* squares, const u16* bias, const u16* rest, u16* y,
    uint4* mail, float epsilon, int rows, int width, int in_features, int chunks, int dense_steps, int part_bytes, int slices,
    int apart COMING_ARGUMENTS) {
#if __CUDA_ARCH__ >= 900
  if ((int)blockIdx.x >= ctas0 + ctas1 + ctas2) return stay();
  extern __shared__ __align__(128) u8 raw[];
  u8* const ring = raw + BOOK_BYTES + RES_BYTES;
  u64* const full = (u64*)(ring + STAGES * X_STAGE), *const empty = full + STAGES, *const barrier = empty + STAGES;
  u64* const met = barrier + 1;  // PAIRED: its barrier
  uint4* const received = (uint4*)(met + 1);  // PAIRED: [HALF][THREADS], sums of the other CTA
  __shared__ float biases[TOKENS], factors[TOKENS];
#if COMING
  __shared__ int done;
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Part part = own_part(GIVEN(0), GIVEN(1), GIVEN(2));
  split_off(part, apart, chunks, dense_steps);
  const int blocks = (part.outputs + 7) / 8, spans = chunks * CHUNK / SPAN;
  const int per_tile = spans + DENSE;
  const Line line = {(u32)per_tile, (u32)((blocks + TILE - 1) / TILE * per_tile), (u32)part.ctas};
  const int begin = line.begin(part.cta), end = line.begin(part.cta + 1);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], WARPS);
    }
#if COMING
    done = 0;
#endif
    if (PAIRED) barrier_init(met, 1);
    fence_barriers();
    if (PAIRED) copy_begin(met, COLUMNS / 2 * THREADS * 16, 0);
  }
  launch_dependents();
  stage_book((char*)raw, part.book, barrier);
  Residual residuals;
  if (warp < WARPS) {
    residuals.load(part.residual);
    residuals.store((char*)raw + BOOK_BYTES);
  }
  Words words[2];
  const char* from[2];  // where the next words of this warp's row blocks are
  const auto fetch = [&] {
#pragma unroll
    for (int b = 0; b < 2; b++) {
      load_span(words[b], from[b], lane);
      from[b] += SPAN / CHUNK * CHUNK_BYTES;
    }
  };
  const auto go_to = [&](int unit) {
    const int span = unit % per_tile;
#pragma unroll
    for (int b = 0; b < 2; b++)
      from[b] = part.stream + ((size_t)min(unit / per_tile * TILE + 2 * warp + b, blocks - 1) * chunks + span * (SPAN / CHUNK)) * CHUNK_BYTES;
    if (span < spans) fetch();
  };
  if (warp < WARPS) go_to(begin);
  __syncthreads();
#if PAIRED
  cluster_arrive();
#endif
  const auto stages_of = [&](int unit) { return DENSE && unit % per_tile == spans ? (dense_steps + STAGE_STEPS - 1) / STAGE_STEPS : SPAN_STAGES; };
  if (warp >= WARPS) {
    give_registers<GIVEN_REGISTERS>();
#if COMING
    if (warp == WARPS + 3)
      fetch_pages(lengths, tables, keys, values, table_width, sequences, page, token_bytes, pages, pause, ctas0 + ctas1 + ctas2, done, lane);
#endif
    wait_for_inputs();
    if (warp > WARPS && warp < WARPS + 3) {
      for (int row = threadIdx.x - THREADS - 32; row < TOKENS; row += ADDERS) {
        float sum = 0, square = 0;
        for (int i = 0; i < slices && row < rows; i++) {
          sum += __ldcg(sums + ((size_t)part.index * rows + row) * slices + i);
          if (squares) square += __ldcg(squares + row * slices + i);
        }
        biases[row] = sum, factors[row] = squares ? rsqrtf(square / in_features + epsilon) : 1.f;
      }
      named_arrive(2, THREADS + ADDERS);
    } else if (warp == WARPS && lane == 0) {
      int n = 0;
      const u8* const own_x = x + (size_t)part.index * part_bytes;
      for (int unit = begin; unit < end; unit++)
        for (int i = 0; i < stages_of(unit); i++, n++) {
          const int slot = n % STAGES, stage = unit % per_tile * SPAN_STAGES + i;
          if (n >= STAGES) barrier_wait(&empty[slot], (n / STAGES + 1) & 1);
          copy_begin(&full[slot], X_STAGE, 0);
          bulk_copy(ring + slot * X_STAGE, own_x + (size_t)stage * X_STAGE, X_STAGE, &full[slot]);
        }
    }
    return;
  }
  wait_for_inputs();
  take_registers<TAKEN_REGISTERS>();
  book_ready(barrier);

  const u32 book = shared_address(raw), residual = book + BOOK_BYTES + 16 * (lane % COPIES);
  const Results results = {bias, rest, biases, factors, y, rows, width, part.first, part.outputs};
  const int first_block = __shfl_sync(~0u, 2 * (warp & ~3), 0);  // of the warpgroup; the compiler sees that a warp is of one mind
  int slot = 0, left = 0;
  u32 parity = 0;
  u32 v[2][SPAN];                 // items of both row blocks, in their order
  u32 a[2][2][4];                 // of two steps: one's products may still read it
  uint4 entry[AHEAD][2], added[AHEAD][2];  // of the steps on their way: entries and residuals of both row blocks
  const auto look_up = [&](int step) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
      entry[step % AHEAD][b] = load_matrices<true>(book + 16 * main_index(v[b][step]));
      if constexpr (RES_BITS > 0) added[step % AHEAD][b] = load_matrices<true>(residual + 16 * COPIES * residual_index(v[b][step]));
    }
  };
  const auto weights = [&](int b, int step) {
    if constexpr (RES_BITS > 0) return add8(entry[step % AHEAD][b], added[step % AHEAD][b]);
    else return entry[step % AHEAD][b];
  };
#pragma unroll 1
  for (int unit = begin; unit < end;) {  // a tile, or what of it is ours
    const int tile = unit / per_tile, stop = min(end, (tile + 1) * per_tile), last = stop - (DENSE && stop % per_tile == 0);
    float acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
    int before = -1;  // the slot that products in flight may still read
    const auto multiply = [&](int which, int step) {  // of the stage
      const u64 columns = matrix_descriptor(ring + slot * X_STAGE, STAGE_STEPS * 512) + step * (512 >> 4);
      wgmma_fence();
      wgmma(acc, a[which][0], columns);
      wgmma(acc, a[which][1], columns + (256 >> 4));
      wgmma_commit();
    };
    const auto put = [&](int which, uint4 one, uint4 two) {  // a step of both row blocks: quarters 0 and 1, then 2 and 3
      u32 (&first)[4] = a[which][0], (&second)[4] = a[which][1];
      first[0] = one.x, first[1] = two.x, first[2] = one.y, first[3] = two.y;
      second[0] = one.z, second[1] = two.z, second[2] = one.w, second[3] = two.w;
    };
    const auto order = [&] {
      sort(v[0], words[0], lane);
      sort(v[1], words[1], lane);
    };
    const auto next_stage = [&] {
      before = slot;
      if (++slot == STAGES) slot = 0, parity ^= 1;
    };
    if (tile * TILE + first_block >= blocks) {  // a warpgroup without row blocks: its sums stay zero
      for (int i = (last - unit) * SPAN_STAGES; i > 0; i--) {
        barrier_wait(&full[slot], parity);
        if (before >= 0 && lane == 0) barrier_arrive(&empty[before]);
        next_stage();
      }
      unit = max(unit, last);
    }
    if (unit < last) {
      order();
#pragma unroll
      for (int step = 0; step < AHEAD; step++) look_up(step);
    }
#pragma unroll 1
    for (; unit < last; unit++) {
#pragma unroll
      for (int q = 0; q < SPAN; q++) {
        if (q % STAGE_STEPS == 0) barrier_wait(&full[slot], parity);
        wgmma_wait<1>();  // step q - 2 is done: its registers are free, and with the stage's second step the stage before
        if (q % STAGE_STEPS == 1 && before >= 0 && lane == 0) barrier_arrive(&empty[before]);
        put(q % 2, weights(0, q), weights(1, q));
        look_up((q + AHEAD) % SPAN);  // behind the last unit nobody's
        multiply(q % 2, q % STAGE_STEPS);
        if (q % STAGE_STEPS == STAGE_STEPS - 1) next_stage();
        if (q == 1 && unit + 1 < last) fetch();  // elsewhere the compiler does the products one by one
        if (q == SPAN - AHEAD - 1) order();  // all items of the unit are looked up; behind the last one there is nothing new
      }
    }
    wgmma_wait<0>();
    if (stop < end) go_to(stop);
#if DENSE
    if (unit < stop) {
      unit++;
      const uint4* from[2];
#pragma unroll
      for (int b = 0; b < 2; b++) from[b] = part.dense + (size_t)min(tile * TILE + 2 * warp + b, blocks - 1) * dense_steps * 32 + lane;
#pragma unroll 1
      for (int i = 0; i < dense_steps; i += STAGE_STEPS) {
        if (before >= 0 && lane == 0) barrier_arrive(&empty[before]);
        barrier_wait(&full[slot], parity);
#pragma unroll
        for (int step = 0; step < STAGE_STEPS; step++) {
          if (i + step >= dense_steps) break;
          put(0, stream_load(from[0] + (i + step) * 32), stream_load(from[1] + (i + step) * 32));
          multiply(0, step);
          wgmma_wait<0>();
        }
        next_stage();
      }
    }
#endif
    keep_behind(acc);
#if COMING
    if (threadIdx.x == 0 && stop == end) done = 1;
#endif
    if (tile == begin / per_tile) named_barrier(2, THREADS + ADDERS);  // biases are there
    if (lane == 0) barrier_arrive(&empty[before]);
#if PAIRED
    const int from = line.owner(tile * per_tile), sharers = line.owner((tile + 1) * per_tile - 1) - from + 1;
    end_in_pairs(acc, results, {mail, (part.cta - from) / 2, HALF / (sharers / 2)}, received, met, tile);
#else
    if (line.owner(tile * per_tile) == line.owner((tile + 1) * per_tile - 1)) {
      uint2 rest_of[COLUMNS];
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) rest_of[j] = results.before(tile, j, threadIdx.x);
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
        results.write({acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]}, rest_of[j], tile, j, threadIdx.x);
      continue;
    }
    const int which = begin >= tile * per_tile ? 0 : 1;
    uint4* const to = mail + (size_t)(blockIdx.x * 2 + which) * COLUMNS * THREADS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) store_relaxed(to + j * THREADS, *(const uint4*)&acc[4 * j]);
    left |= 1 << which;
#endif
  }
#if !PAIRED
  for (int which = 0; which < 2; which++) {
    if (!(left >> which & 1)) continue;
    const int tile = (which ? end - 1 : begin) / per_tile, from = line.owner(tile * per_tile), to = line.owner((tile + 1) * per_tile - 1);
    const int sharers = to - from + 1, share = part.cta - from, all = COLUMNS * THREADS;  // whole warps
    const int at0 = all / 32 * share / sharers * 32 + threadIdx.x, at1 = all / 32 * (share + 1) / sharers * 32;
    // Sums of the others lie where this tile is the first of a CTA's; only the first CTA can have begun before.
    uint4* const others = mail + (size_t)(blockIdx.x - part.cta + from) * 2 * all, *const firsts = others + (line.begin(from) < tile * per_tile ? all : 0);
    for (int at = at0; at < at1; at += THREADS) {
      const uint2 rest_of = results.before(tile, at / THREADS, at % THREADS);  // comes while we wait
      const auto place = [&](int i) { return (i ? others + (size_t)i * 2 * all : firsts) + at; };
      float sum[4] = {};
      for (int done = 0; done < sharers; done += LOADED) {
        u32 words[LOADED][4];
        const int left = sharers - done;
        await_words(words, [=](int i) { return i < left; }, [&](int i) { return place(done + i); });
#pragma unroll
        for (int i = 0; i < LOADED; i++)
          if (done + i < sharers) {
            store_relaxed(place(done + i), make_uint4(~0u, ~0u, ~0u, ~0u));
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += __uint_as_float(words[i][j]);
          }
      }
      __syncwarp();
      results.write(sum, rest_of, tile, at / THREADS, at % THREADS);
    }
  }
#endif
#endif
}
