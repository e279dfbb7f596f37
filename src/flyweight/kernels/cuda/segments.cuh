// How the tiles of gemm.cu and gemm_mma.cu are shared out over the CTAs. Needs M_TILES, STAGE_COUNT, SPLIT, SLICED, CLUSTER, EXPERTS (and UNITS_BY_PARTS, 0).

// So many CTAs have a part: all, or fewer, so that tiles begin and end with CTAs and fewer share one. A number that the compiler knows
// spares divisions, which the first copy waits for.
#ifndef WORKING
#define WORKING gridDim.x
#endif
DEVICE u32 working() { return WORKING; }

// What part of which tile a CTA has.
struct Segment {
  int m, n, begin, end;  // tile; stages
  int expert = 0;
};
#if UNITS_BY_PARTS  // the same without a division of 64 bits
DEVICE int unit_begin(u32 cta, u32 units) { return cta * (units / working()) + cta * (units % working()) / working(); }
#else
DEVICE int unit_begin(int cta, int units) { return (int)((long long)cta * units / working()); }
#endif
// The unit from which on work is shared out evenly. ROUNDS_FIRST: while two rounds of whole tiles and more are left, every CTA has one of each
// round, so that all are at neighbouring tiles at the same time, which read the same weights and the same x from L2. Parts of a long
// line lie far from each other, and each reads its own from memory.
#ifndef ROUNDS_FIRST
#define ROUNDS_FIRST 0
#endif
#if !ROUNDS_FIRST
constexpr int SIDE = 8;  // token tiles side by side, for L2
#endif
DEVICE int line_begin(int n_tiles) {
  const int rounds = M_TILES * n_tiles / (int)working();
  return ROUNDS_FIRST && rounds > 1 ? (rounds - 1) * (int)working() * STAGE_COUNT : 0;
}
// X_TILES: so many token tiles there are, where the compiler knows.
#ifndef X_TILES
#define X_TILES 0
#endif
DEVICE Segment place(int tile, int n_tiles) {
  if (X_TILES == 1) return {tile, 0, 0, STAGE_COUNT};
  const int group = tile / (SIDE * M_TILES), inside = tile % (SIDE * M_TILES), width = min(SIDE, n_tiles - group * SIDE);
  return {inside / width, group * SIDE + inside % width, 0, STAGE_COUNT};
}
// The i-th segment of this CTA; `units` counts on through them. False after the last.
DEVICE bool next_segment(Segment& s, int& unit, int n_tiles, const int* expert_of) {
#if SLICED
  if (unit < 0) return false;
  const int rank = unit % CLUSTER;
  s = place(unit / CLUSTER, n_tiles);
  s.begin = rank * STAGE_COUNT / CLUSTER, s.end = (rank + 1) * STAGE_COUNT / CLUSTER;
  unit = -1;
#elif SPLIT == LINE
  const int line = line_begin(n_tiles);
  const bool whole = unit < line;
  const int end = whole ? unit + STAGE_COUNT : line + unit_begin(blockIdx.x + 1, M_TILES * n_tiles * STAGE_COUNT - line);
  if (unit >= end) return false;
  s = place(unit / STAGE_COUNT, n_tiles);
  s.begin = unit % STAGE_COUNT;
  s.end = min(STAGE_COUNT, s.begin + end - unit);
  unit += whole ? working() * STAGE_COUNT : s.end - s.begin;
  if (whole && unit >= line) unit = line + unit_begin(blockIdx.x, M_TILES * n_tiles * STAGE_COUNT - line);
#else
  if (unit >= M_TILES * n_tiles) return false;
  s = place(unit, n_tiles);
  if (EXPERTS) s.expert = expert_of[s.n];
  unit += gridDim.x;
#endif
  return true;
}
DEVICE int first_unit(int n_tiles) {
  if (SPLIT != LINE) return blockIdx.x;
  const int line = line_begin(n_tiles);
  return line ? blockIdx.x * STAGE_COUNT : unit_begin(blockIdx.x, M_TILES * n_tiles * STAGE_COUNT);
}
