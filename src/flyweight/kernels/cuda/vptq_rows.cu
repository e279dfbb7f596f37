// y[r, n] = sum_k x[r, k] · W[n, k] for 2 to TOKENS rows, with W as in vptq_decode.cu, never written out.
//
// A warpgroup multiplies 64 outputs (8 row blocks, two a warp) by all rows at once: W is the left operand, from registers, x the
// right one, packed by vptq_pack.cu. Lookups are those of vptq.cu, but here all row blocks share one x, so the columns come in their
// own order: a warp puts the items of a span in order in shared memory first. Two row blocks of 16 columns are 32 items:
//
//      A [16 × 16]   rows 0-7: row block 0     rows 8-15: row block 1     columns: half a step (vptq.cuh)
//
// `load_matrices` brings their entries as exactly that; scale and bias of a column are applied there, in 16 bits.
//
//      line of units          |  tile 0: span 0, 1, 2 …, outliers  |  tile 1: …        a tile is two row blocks for each warp
//      CTAs, contiguous runs  |  CTA 0      |  CTA 1      |  CTA 2      | …
//
// A tile that several CTAs have a part of: each leaves its sums in memory and, when all are there, adds up and ends its share of them,
// in the order of the CTAs. One CTA an SM, and no more CTAs than SMs: waiting is safe.
//
// Limit: shared memory. 32 items take 10.4 cycles (random entries), 4 for residuals, 2 to come in order, TOKENS / 16 for x.
//
// With more rows sums take more registers, so there are fewer warps, and x more room, so stages are shorter.
//
// defines: those of vptq_tables.cuh (PIECES 1), TOKENS (16 to 256), STAGES, STAGE_STEPS (of 32 columns), DENSE (there are outliers)
#include "vptq_tables.cuh"

constexpr int TILE = 2 * WARPS;                  // row blocks
constexpr int SPAN_STAGES = SPAN / STAGE_STEPS;
constexpr int HALVES_OF_STAGE = STAGE_STEPS == 4 ? 2 : 1, GROUP = 2 * STAGE_STEPS / HALVES_OF_STAGE;  // products that are in flight together
constexpr int TURNS = 2 / HALVES_OF_STAGE;       // stages between which registers change: they have to be known to the compiler
constexpr int X_STAGE = TOKENS * 64 * STAGE_STEPS, AFFINE_STAGE = 128 * STAGE_STEPS, STAGE_BYTES = X_STAGE + AFFINE_STAGE;
constexpr int ITEMS_BYTES = WARPS * 2 * SPAN * 128;
constexpr int COLUMNS = TOKENS / 8;              // groups of 8 rows of x
constexpr int ALL_THREADS = THREADS + 128;       // with the warpgroup that fetches, and gives its registers to the others
constexpr int GIVEN_REGISTERS = 24, TAKEN_REGISTERS = (65536 / ALL_THREADS / 8 * 8 * ALL_THREADS - GIVEN_REGISTERS * 128) / THREADS / 8 * 8;
static_assert(PIECES == 1 && SPAN_STAGES % TURNS == 0 && SPAN % STAGE_STEPS == 0, "vectors of 8, whole stages");

struct Line {  // of the units of a part, cut over its CTAs
  int per_tile, total, ctas;
  DEVICE int begin(int cta) const { return (int)((long long)total * cta / ctas); }
  DEVICE int owner(int unit) const { return (int)(((long long)(unit + 1) * ctas - 1) / total); }
};
struct Results {
  const u16 *bias, *rest;
  u16* y;
  int rows, width, first, outputs;
  // Of the thread that has them, `from`: outputs g and g + 8 of its warp's 16, rows 2t and 2t + 1 of 8.
  DEVICE void write(const float (&sum)[4], int tile, int column, int from) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int output = tile * TILE * 8 + from / 32 * 16 + i / 2 * 8 + from % 32 / 4, row = 8 * column + from % 4 * 2 + i % 2;
      if (output >= outputs || row >= rows) continue;
      const size_t at = (size_t)row * width + first + output;
      const float added = (rest ? to_float(rest[at]) : 0.f) + (bias ? to_float(bias[first + output]) : 0.f);
      y[at] = to_bits(sum[i] + added);
    }
  }
};

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) vptq_rows(
    PART(0), PART(1), PART(2), const u8* x, const u16* bias, const u16* rest, u16* y, float4* partials, int* arrived, int rows,
    int width, int chunks, int dense_steps, int part_bytes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) u8 raw[];
  u8* const ring = raw + BOOK_BYTES + RES_BYTES + ITEMS_BYTES;
  u64* const full = (u64*)(ring + STAGES * STAGE_BYTES), *const empty = full + STAGES, *const barrier = empty + STAGES;
  __shared__ u32 targets[2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Part part = own_part(GIVEN(0), GIVEN(1), GIVEN(2));  // affine: in the order of A's registers
  const int blocks = (part.outputs + 7) / 8, spans = chunks * CHUNK / SPAN;
  const int per_tile = spans + DENSE;
  const Line line = {per_tile, (blocks + TILE - 1) / TILE * per_tile, part.ctas};
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
  const auto load_unit = [&](int unit) {
    if (unit >= end || unit % per_tile >= spans) return;
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const int block = min(unit / per_tile * TILE + 2 * warp + b, blocks - 1);
      load_span(words[b], part.stream + ((size_t)block * chunks + unit % per_tile * (SPAN / CHUNK)) * CHUNK_BYTES, lane);
    }
  };
  if (warp < WARPS) load_unit(begin);
  __syncthreads();
  wait_for_inputs();
  const auto stages_of = [&](int unit) { return DENSE && unit % per_tile == spans ? (dense_steps + STAGE_STEPS - 1) / STAGE_STEPS : SPAN_STAGES; };
  if (warp >= WARPS) {
    give_registers<GIVEN_REGISTERS>();
    if (threadIdx.x == THREADS) {
      int n = 0;
      const u8* const own_x = x + (size_t)part.index * part_bytes;
      for (int unit = begin; unit < end; unit++)
        for (int i = 0; i < stages_of(unit); i++, n++) {
          const int slot = n % STAGES, stage = unit % per_tile * SPAN_STAGES + i;
          if (n >= STAGES) barrier_wait(&empty[slot], (n / STAGES + 1) & 1);
          copy_begin(&full[slot], STAGE_BYTES, 0);
          bulk_copy(ring + slot * STAGE_BYTES, own_x + (size_t)stage * X_STAGE, X_STAGE, &full[slot]);
          bulk_copy(ring + slot * STAGE_BYTES + X_STAGE, (const u8*)part.affine + (size_t)stage * AFFINE_STAGE, AFFINE_STAGE, &full[slot]);
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
  const Results results = {bias, rest, y, rows, width, part.first, part.outputs};
  int slot = 0, left = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int unit = begin; unit < end;) {  // a tile, or what of it is ours
    const int tile = unit / per_tile, stop = min(end, (tile + 1) * per_tile);
    float acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0;
    u32 a[2][GROUP][4];
    int before = -1;  // the slot that products in flight may still read
    const auto multiply = [&](u32 (&words)[GROUP][4], int half) {
      const u8* const stage = ring + slot * STAGE_BYTES;
#pragma unroll
      for (int k = 0; k < GROUP; k++) {
        const uint4 affine = *(const uint4*)(stage + X_STAGE + ((half * GROUP + k) * 4 + lane % 4) * 16);
        words[k][0] = fma2(words[k][0], affine.x, affine.z), words[k][1] = fma2(words[k][1], affine.x, affine.z);
        words[k][2] = fma2(words[k][2], affine.y, affine.w), words[k][3] = fma2(words[k][3], affine.y, affine.w);
      }
      const u64 columns = matrix_descriptor(stage, STAGE_STEPS * 512);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < GROUP; k++) wgmma(acc, words[k], columns + (half * GROUP + k) * (256 >> 4));
      wgmma_commit();
      wgmma_wait<1>();  // the group before is done, and with the first one the stage before
      if (half == 0 && before >= 0 && lane == 0) barrier_arrive(&empty[before]);
    };
    const auto next_stage = [&] {
      before = slot;
      if (++slot == STAGES) slot = 0, parity ^= 1;
    };
#pragma unroll 1
    for (; unit < stop - (DENSE && stop % per_tile == 0); unit++) {
      unfold(items, words[0], 0, lane);
      unfold(items + SPAN * 32, words[1], 16, lane);
      __syncwarp();
      load_unit(unit + 1);
#pragma unroll 1
      for (int i = 0; i < SPAN_STAGES; i += TURNS) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
          u32 v[2 * STAGE_STEPS];
#pragma unroll
          for (int j = 0; j < 2 * STAGE_STEPS; j++) v[j] = own_items[((i + turn) * STAGE_STEPS + j / 2) * 32 + 16 * (j % 2 ^ second)];
          barrier_wait(&full[slot], parity);
#pragma unroll
          for (int half = 0; half < HALVES_OF_STAGE; half++) {
#pragma unroll
            for (int k = 0; k < GROUP; k++) gather(a[turn + half][k], v[half * GROUP + k], book, residual);
            multiply(a[turn + half], half);
          }
          next_stage();
        }
      }
      __syncwarp();
    }
    wgmma_wait<0>();
#if DENSE
    if (unit < stop) {
      load_unit(++unit);
      const uint4* from[2];
#pragma unroll
      for (int b = 0; b < 2; b++) from[b] = part.dense + (size_t)min(tile * TILE + 2 * warp + b, blocks - 1) * dense_steps * 32 + lane;
#pragma unroll 1
      for (int i = 0; i < dense_steps; i += STAGE_STEPS) {
        barrier_wait(&full[slot], parity);
#pragma unroll
        for (int half = 0; half < HALVES_OF_STAGE; half++) {
          if (i + half * GROUP / 2 >= dense_steps) break;
#pragma unroll
          for (int k = 0; k < GROUP; k++) {  // half a step
            const int at = half * GROUP + k;
            const uint4 one = stream_load(from[0] + (i + at / 2) * 32), two = stream_load(from[1] + (i + at / 2) * 32);
            a[half][k][0] = at % 2 ? one.z : one.x, a[half][k][1] = at % 2 ? two.z : two.x;
            a[half][k][2] = at % 2 ? one.w : one.y, a[half][k][3] = at % 2 ? two.w : two.y;
          }
          multiply(a[half], half);
          wgmma_wait<0>();
        }
        next_stage();
      }
    }
#endif
    keep_behind(acc);
    if (lane == 0) barrier_arrive(&empty[before]);
    if (line.owner(tile * per_tile) == line.owner((tile + 1) * per_tile - 1)) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) results.write({acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]}, tile, j, threadIdx.x);
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
    if (threadIdx.x == 0) while ((int)((u32)load_acquire(arrived + part.index * 1024 + tile) - targets[which]) < 0) {}
    named_barrier(1, THREADS);
    const int sharers = to - from + 1, share = part.cta - from, all = COLUMNS * THREADS;
    for (int at = all * share / sharers + threadIdx.x; at < all * (share + 1) / sharers; at += THREADS) {
      float sum[4] = {};
#pragma unroll 4
      for (int cta = from; cta <= to; cta++) {
        const int its = line.begin(cta) >= tile * per_tile ? 0 : 1;
        const float4 p = __ldcg(partials + (size_t)((blockIdx.x - part.cta + cta) * 2 + its) * all + at);
        sum[0] += p.x, sum[1] += p.y, sum[2] += p.z, sum[3] += p.w;
      }
      results.write(sum, tile, at / THREADS, at % THREADS);
    }
  }
#endif
}
