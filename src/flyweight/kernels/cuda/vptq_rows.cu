// y[r, n] = sum_k x[r, k] · W[n, k] for 2 to TOKENS rows, with W as in vptq_decode.cu, never written out.
//
// A warpgroup multiplies 64 outputs (8 row blocks, two a warp) by all rows at once: W is the left operand, from registers, x the
// right one, packed by vptq_pack.cu with the columns' scales in it. Lookups are those of vptq.cu, but here all row blocks share one x,
// so the columns come in their own order: a warp puts the items of a span in order in shared memory first. Two row blocks of 16 columns
// are 32 items, a piece:
//
//      A [16 × 16]   rows 0-7: row block 0     rows 8-15: row block 1     columns: half a step (vptq.cuh)
//
// `load_matrices` brings their entries as exactly that. Pieces go in groups, a few of which are under way:
//
//      lookups     |  group 2        |  group 3        |  group 4        | …
//      products    |  group 0        |  group 1        |  group 2        | …      items of the next unit are put in order meanwhile
//
//      line of units          |  tile 0: span 0, 1, 2 …, outliers  |  tile 1: …        a tile is two row blocks for each warp
//      CTAs, contiguous runs  |  CTA 0      |  CTA 1      |  CTA 2      | …            best with none in two tiles
//
// A tile that several CTAs have a part of: each leaves its sums in memory and, when all are there, adds up and ends its share of them,
// in the order of the CTAs. One CTA an SM, and no more CTAs than SMs: waiting is safe.
//
// Limit: shared memory. A piece takes 10.4 cycles (random entries), 4 for residuals, 2 to come in order, TOKENS / 16 for x. Measured on
// one H200: 23, 25 and 28 cycles for 16, 32 and 64 rows, and 7 to 11 µs a launch besides, packing included.
//
// With more rows sums take more registers, so there are fewer warps, and x more room, so stages are shorter.
//
// defines: those of vptq_tables.cuh (PIECES 1), TOKENS (16 to 128), STAGES, STAGE_STEPS (of 32 columns), GROUP (pieces), REGISTERS (of a
// thread at launch), DENSE (there are outliers)
#include "vptq_tables.cuh"

constexpr int TILE = 2 * WARPS;                  // row blocks
constexpr int GROUPS = 2 * SPAN / GROUP, STAGE_GROUPS = 2 * STAGE_STEPS / GROUP;  // of a unit, of a stage
constexpr int SPAN_STAGES = SPAN / STAGE_STEPS;
constexpr int X_STAGE = TOKENS * 64 * STAGE_STEPS;
constexpr int ITEMS_BYTES = WARPS * 2 * SPAN * 128;
constexpr int COLUMNS = TOKENS / 8;              // groups of 8 rows of x
constexpr int ALL_THREADS = THREADS + 128;       // with the warpgroup that fetches, and gives its registers to the others
constexpr int LOADED = 10;                       // sums of other CTAs that are fetched together: most have no more
constexpr int ADDERS = 96;                       // threads of it, which add the columns' biases up meanwhile
constexpr int GIVEN_REGISTERS = 24, TAKEN_REGISTERS = (REGISTERS * ALL_THREADS - GIVEN_REGISTERS * 128) / THREADS / 8 * 8;
constexpr int AHEAD = 2, RING = 2 * AHEAD;       // groups under way, and in registers: as many may still be read by products
static_assert(PIECES == 1 && GROUPS % RING == 0 && GROUPS > AHEAD + 1 && STAGE_GROUPS >= AHEAD && SPAN % STAGE_STEPS == 0, "vectors of 8, whole stages");

struct Line {  // of the units of a part, cut over its CTAs
  u32 per_tile, total, ctas;
  DEVICE int begin(int cta) const { return total * cta / ctas; }
  DEVICE int owner(int unit) const { return ((unit + 1) * ctas - 1) / total; }
};
struct Results {
  const u16 *bias, *rest;
  const float* biases;  // [TOKENS]: what the columns' biases add
  u16* y;
  int rows, width, first, outputs;
  DEVICE float2 added(int output, int row) const {  // to one output of two rows, `rest` aside
    const float here = bias && output < outputs ? to_float(bias[first + output]) : 0.f;
    return make_float2(here + biases[row], here + biases[row + 1]);
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
        const float2 add = added(o, row);
        y[at] = to_bits(sum[i] + (i % 2 ? add.y : add.x) + (rest ? to_float(rest[at]) : 0.f));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 old = transpose8(i ? before.y : before.x);
      const float2 add = added(output + 8 * i + g, row);
      const u32 pair = transpose8(pack2(sum[2 * i] + add.x + low_float(old), sum[2 * i + 1] + add.y + high_float(old)));
      const int own = output + 8 * i + 2 * t;
      if (inside(own, 8 * column + g)) *(u32*)(y + place(own, 8 * column + g)) = pair;
    }
  }
};

extern "C" __global__ void __maxnreg__(REGISTERS) vptq_rows(
    PART(0), PART(1), PART(2), const u8* x, const float* sums, const u16* bias, const u16* rest, u16* y, float4* partials, int* arrived,
    int rows, int width, int chunks, int dense_steps, int part_bytes, int slices) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  u8* const ring = raw + BOOK_BYTES + RES_BYTES + ITEMS_BYTES;
  u64* const full = (u64*)(ring + STAGES * X_STAGE), *const empty = full + STAGES, *const barrier = empty + STAGES;
  __shared__ u32 targets[2];
  __shared__ float biases[TOKENS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Part part = own_part(GIVEN(0), GIVEN(1), GIVEN(2));
  const int blocks = (part.outputs + 7) / 8, spans = chunks * CHUNK / SPAN;
  const int per_tile = spans + DENSE;
  const Line line = {(u32)per_tile, (u32)((blocks + TILE - 1) / TILE * per_tile), (u32)part.ctas};
  const int begin = line.begin(part.cta), end = line.begin(part.cta + 1);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], WARPS);
    }
    fence_barriers();
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
  wait_for_inputs();
  const auto stages_of = [&](int unit) { return DENSE && unit % per_tile == spans ? (dense_steps + STAGE_STEPS - 1) / STAGE_STEPS : SPAN_STAGES; };
  if (warp >= WARPS) {
    give_registers<GIVEN_REGISTERS>();
    if (warp > WARPS) {
      for (int row = threadIdx.x - THREADS - 32; row < TOKENS; row += ADDERS) {
        float sum = 0;
        for (int i = 0; i < slices && row < rows; i++) sum += __ldcg(sums + ((size_t)part.index * rows + row) * slices + i);
        biases[row] = sum;
      }
      named_arrive(2, THREADS + ADDERS);
    } else if (lane == 0) {
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
  take_registers<TAKEN_REGISTERS>();
  book_ready(barrier);

  const u32 book = shared_address(raw), residual = book + BOOK_BYTES + 16 * (lane % COPIES);
  u32* const items = (u32*)(raw + BOOK_BYTES + RES_BYTES) + warp * 2 * SPAN * 32;
  const int second = lane >> 3 & 1;  // this lane looks up items of the second row block, in the other half of the banks
  const u32* const own_items = items + second * SPAN * 32 + lane % 8 + lane / 16 * 8;
  const Results results = {bias, rest, biases, y, rows, width, part.first, part.outputs};
  int slot = 0, left = 0;
  u32 parity = 0;
  u32 v[GROUP];                   // items of the group whose lookups are next
  u32 a[RING][GROUP][4];
  uint4 added[AHEAD][GROUP];      // residuals of the groups on their way
  const auto read_items = [&](int group) {
#pragma unroll
    for (int k = 0; k < GROUP; k++) v[k] = own_items[(group * GROUP + k) / 2 * 32 + 16 * ((group * GROUP + k) % 2 ^ second)];
  };
  const auto spread_items = [&] {
    __syncwarp();
    unfold(items, words[0], 0, lane);
    unfold(items + SPAN * 32, words[1], 16, lane);
    __syncwarp();
  };
  const auto look_up = [&](int group, int k) {
    const uint4 q = load_matrices<true>(book + 16 * main_index(v[k]));
    if constexpr (RES_BITS > 0) added[group % AHEAD][k] = load_matrices<true>(residual + 16 * COPIES * residual_index(v[k]));
    u32 (&to)[4] = a[group % RING][k];
    to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
  };
#pragma unroll 1
  for (int unit = begin; unit < end;) {  // a tile, or what of it is ours
    const int tile = unit / per_tile, stop = min(end, (tile + 1) * per_tile), last = stop - (DENSE && stop % per_tile == 0);
    float acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
    int before = -1;  // the slot that products in flight may still read
    const auto multiply = [&](const u32 (&from)[GROUP][4], int group) {  // of the stage
      const u64 columns = matrix_descriptor(ring + slot * X_STAGE, STAGE_STEPS * 512);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < GROUP; k++) wgmma(acc, from[k], columns + (group * GROUP + k) * (256 >> 4));
      wgmma_commit();
    };
    const auto next_stage = [&] {
      before = slot;
      if (++slot == STAGES) slot = 0, parity ^= 1;
    };
    if (unit < last) {
      spread_items();
      if (unit + 1 < last) fetch();
      read_items(0);
#pragma unroll
      for (int group = 0; group < AHEAD; group++) {
#pragma unroll
        for (int k = 0; k < GROUP; k++) look_up(group, k);
        read_items(group + 1);
      }
    }
#pragma unroll 1
    for (; unit < last; unit++) {
#pragma unroll
      for (int q = 0; q < GROUPS; q++) {
        // Here, since the compiler lets a warp that waits in a loop wait for its lookups too.
        if (q % STAGE_GROUPS == 0) barrier_wait(&full[slot], parity);
        wgmma_wait<AHEAD - 1>();  // group q - AHEAD is done: its registers are free, and in time the stage before
        if (q % STAGE_GROUPS == AHEAD - 1 && before >= 0 && lane == 0) barrier_arrive(&empty[before]);
#pragma unroll
        for (int k = 0; k < GROUP; k++) {  // always as many lookups on their way; behind the last unit they are nobody's
          if constexpr (RES_BITS > 0) {
            u32 (&w)[4] = a[q % RING][k];
            const uint4 r = added[q % AHEAD][k];
            w[0] = add2(w[0], r.x), w[1] = add2(w[1], r.y), w[2] = add2(w[2], r.z), w[3] = add2(w[3], r.w);
          }
          look_up(q + AHEAD, k);
        }
        multiply(a[q % RING], q % STAGE_GROUPS);
        if (q % STAGE_GROUPS == STAGE_GROUPS - 1) next_stage();
        read_items((q + AHEAD + 1) % GROUPS);
        if (q == GROUPS - AHEAD - 2) {  // all items of the unit are read; behind the last one there is nothing new, and nobody reads it
          spread_items();
          if (unit + 2 < last) fetch();
        }
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
        for (int group = 0; group < STAGE_GROUPS; group++) {
          if (i + group * GROUP / 2 >= dense_steps) break;
#pragma unroll
          for (int k = 0; k < GROUP; k++) {  // half a step
            const int at = group * GROUP + k;
            const uint4 one = stream_load(from[0] + (i + at / 2) * 32), two = stream_load(from[1] + (i + at / 2) * 32);
            a[0][k][0] = at % 2 ? one.z : one.x, a[0][k][1] = at % 2 ? two.z : two.x;
            a[0][k][2] = at % 2 ? one.w : one.y, a[0][k][3] = at % 2 ? two.w : two.y;
          }
          multiply(a[0], group);
          wgmma_wait<0>();
        }
        next_stage();
      }
    }
#endif
    keep_behind(acc);
    if (tile == begin / per_tile) named_barrier(2, THREADS + ADDERS);  // biases are there
    if (lane == 0) barrier_arrive(&empty[before]);
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
    float4* const to = partials + (size_t)(blockIdx.x * 2 + which) * COLUMNS * THREADS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) to[j * THREADS] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
    __threadfence();
    named_barrier(1, THREADS);
    if (threadIdx.x == 0) {  // counts on and on: all of a launch are here at the next multiple of their number
      const u32 sharers = line.owner((tile + 1) * per_tile - 1) - line.owner(tile * per_tile) + 1;
      targets[which] = ((u32)atomicAdd(arrived + part.index * 1024 + tile, 1) / sharers + 1) * sharers;
    }
    left |= 1 << which;
  }

  for (int which = 0; which < 2; which++) {
    if (!(left >> which & 1)) continue;
    const int tile = (which ? end - 1 : begin) / per_tile, from = line.owner(tile * per_tile), to = line.owner((tile + 1) * per_tile - 1);
    const int sharers = to - from + 1, share = part.cta - from, all = COLUMNS * THREADS;  // whole warps
    const int at0 = all / 32 * share / sharers * 32 + threadIdx.x, at1 = all / 32 * (share + 1) / sharers * 32;
    // Sums of the others lie where this tile is the first of a CTA's; only the first CTA can have begun before.
    const float4* const others = partials + (size_t)(blockIdx.x - part.cta + from) * 2 * all, *const firsts = others + (line.begin(from) < tile * per_tile ? all : 0);
    uint2 rest_of = at0 < at1 ? results.before(tile, at0 / THREADS, at0 % THREADS) : make_uint2(0, 0);  // comes while we wait
    if (threadIdx.x == 0) while ((int)((u32)load_acquire(arrived + part.index * 1024 + tile) - targets[which]) < 0) {}
    named_barrier(1, THREADS);
    for (int at = at0; at < at1; at += THREADS) {
      if (at != at0) rest_of = results.before(tile, at / THREADS, at % THREADS);
      float sum[4] = {};
      for (int done = 0; done < sharers; done += LOADED) {
        float4 p[LOADED];
#pragma unroll
        for (int i = 0; i < LOADED; i++)
          if (done + i < sharers) p[i] = __ldcg((done + i ? others + (size_t)(done + i) * 2 * all : firsts) + at);
#pragma unroll
        for (int i = 0; i < LOADED; i++)
          if (done + i < sharers) sum[0] += p[i].x, sum[1] += p[i].y, sum[2] += p[i].z, sum[3] += p[i].w;
      }
      results.write(sum, rest_of, tile, at / THREADS, at % THREADS);
    }
  }
#endif
}
