// A linear of 2 to 16 rows, its inputs cut into SLICES: gemv.cuh has the formula and the limits.
//
// Why: with several rows the work that every CTA does for itself, fetching x and turning it into what the matrix units take,
// and the memory that x needs, grow until nothing runs beside them. A CTA with a slice of the inputs (of more tiles) has
// that much less of both.
//
//      inputs:    | slice 0 | slice 1 | slice 2 | slice 3 |
//      tiles 0–7    CTA 0     CTA 1     CTA 2     CTA 3        a group: each leaves its sums of all tiles,
//      tiles 8–15   CTA 4     CTA 5     …                      and ends every SLICES-th tile
//
// Hand-over: through `mail` (mail.cuh). The tiles of a round are taken one round later, when the other slices have surely left
// them; slices are added in order: the same bits every time. All CTAs are on their SMs at once
// (at most one for each; later kernels start when all are here), so waiting for each other is safe.
//
// defines: those of gemv.cuh, SHARED_BYTES
#include "gemv.cuh"
#include "mail.cuh"

static_assert(sizeof(LinearShared) <= SHARED_BYTES, "the host reserves SHARED_BYTES");
constexpr int TILE_WORDS = 16 * ROWS;

// The tiles first_tile … of a group, as one of its slices sees them.
struct SplitRounds {
  const Linear& a;
  LinearShared& sh;
  float *squares, *sums;  // mail: [group, to, from, row]; [tile, from, 16, row]
  int group, slice, first_tile, rows, taken;

  DEVICE void begin(int first) {  // what the norm needs of this slice, to all of the group
    if (!NORM || first) return;
    for (int i = threadIdx.x; i < SLICES * ROWS; i += THREADS) {
      const int row = i % ROWS;
      float sum = 0;
#pragma unroll 4
      for (int part = 0; part < STATS; part++) sum += sh.row_stats[row][part].x;
      if (row < rows) leave(squares + ((group * SLICES + i / ROWS) * SLICES + slice) * ROWS + row, sum);
    }
  }
  DEVICE void end(const LinearShared&, int first, int last) {
    for (int i = threadIdx.x; i < (last - first) * TILE_WORDS; i += THREADS) {
      const int tile = first + i / TILE_WORDS, word = i % TILE_WORDS, row = word / ROWS, token = word % ROWS;
      const float sum = add_warps(sh, tile - first, row, token);
      if (token < rows && (first_tile + tile) * 16 + row < NDIM)
        leave(sums + ((size_t)(first_tile + tile) * SLICES + slice) * TILE_WORDS + word, sum);
    }
    if (NORM && first == 0 && threadIdx.x < rows) {
      const float all = take<float>(squares + (group * SLICES + slice) * SLICES * ROWS + threadIdx.x, ROWS);
      sh.row_most[threadIdx.x] = make_float2(rsqrtf(all / KDIM + a.epsilon), 0.f);  // seen by all after their next meeting
    }
    take_tiles(first);
  }
  DEVICE void take_tiles(int last) {  // this slice's of those before `last`
    for (; taken < last; taken++) {
      if (taken % SLICES != slice) continue;
      const int tile = first_tile + taken;
      for (int i = threadIdx.x; i < OUTPUTS * ROWS; i += THREADS) {
        Output o = {};
        o.token = i % ROWS, o.row = i / ROWS;
        const int n = tile * OUTPUTS + o.row;
        if (o.token >= rows || n >= WIDTH) continue;
        o.index = o.token * WIDTH + n;
        fetch_ends(o, a, place_of(tile));
        float v[2];
#pragma unroll
        for (int half = 0; half < PARTS; half++)
          v[half] = take<float>(sums + (size_t)tile * SLICES * TILE_WORDS + (o.row + 8 * half) * ROWS + o.token, TILE_WORDS);
        const float factor = row_factor(sh, o.token, a.epsilon);
#pragma unroll
        for (int half = 0; half < PARTS; half++) v[half] *= factor;
        write_output(o, v, a.y);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(ALL_THREADS, ON_SM)
gemv_split(const u8* weights, const u32* records, const u16* X, const u16* norm, const u16* bias, const u16* residual, u16* Y,
           float* mail, float epsilon, int rows, u32* turns LAUNCH_ARGUMENTS) {
  extern __shared__ __align__(128) u8 raw[];
  BEGIN_LAUNCH;
  LinearShared& sh = *(LinearShared*)raw;
  const int groups = gridDim.x / SLICES, group = blockIdx.x / SLICES, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = group * TILES / groups, count = (group + 1) * TILES / groups - first;
  if (group >= groups || count == 0) return stay();
  const Linear a = {weights, records, nullptr, X, norm, bias, residual, Y, epsilon, turns};
  const Slice slice = slice_at(blockIdx.x % SLICES);
  begin_linear(sh);
  const auto tile_at = [=](int i) { return first + i; };
#if OWN_COPIES
  OwnRing<decltype(tile_at)> ring(sh, a, slice, tile_at, stages_of(slice, count), warp, lane);
  ring.fill();
#else
  if (warp == WARPS) return produce(sh, a, slice, count, tile_at, [] {}, lane);
  Ring ring = {sh};
#endif
  const Inputs inputs = load_rows(sh, a, slice, rows, warp, lane);
  float* sums = mail + gridDim.x * SLICES * ROWS;
  SplitRounds rounds = {a, sh, mail, sums, group, (int)(blockIdx.x % SLICES), first, rows, 0};
  consume(sh, inputs, slice, 0, count, rounds, ring, warp, lane);
  named_barrier(1, THREADS);  // the norm's factors are there
  rounds.take_tiles(count);
  end_launch(THREADS);
}
