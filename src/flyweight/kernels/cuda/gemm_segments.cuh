// How the tiles of gemm.cu are shared out over the CTAs, and how the loader warps fill the ring with them.

// What part of which tile a CTA has.
struct Segment {
  int m, n, begin, end;  // tile; stages
  int expert = 0;
};
DEVICE int unit_begin(int cta, int units) { return (int)((long long)cta * units / gridDim.x); }
DEVICE Segment place(int tile, int n_tiles) {
  constexpr int side = 8;  // token tiles side by side, for L2
  const int group = tile / (side * M_TILES), inside = tile % (side * M_TILES), width = min(side, n_tiles - group * side);
  return {inside / width, group * side + inside % width, 0, STAGE_COUNT};
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
  const int end = unit_begin(blockIdx.x + 1, M_TILES * n_tiles * STAGE_COUNT);
  if (unit >= end) return false;
  s = place(unit / STAGE_COUNT, n_tiles);
  s.begin = unit % STAGE_COUNT;
  s.end = min(STAGE_COUNT, s.begin + end - unit);
  unit += s.end - s.begin;
#else
  if (unit >= M_TILES * n_tiles) return false;
  s = place(unit, n_tiles);
  if (EXPERTS) s.expert = expert_of[s.n];
  unit += gridDim.x;
#endif
  return true;
}
DEVICE int first_unit(int n_tiles) { return SPLIT == LINE ? unit_begin(blockIdx.x, M_TILES * n_tiles * STAGE_COUNT) : blockIdx.x; }

// A loader warp's part of a stage: a quarter of the tiles, and of x. One lane does it.
DEVICE void copy_weights(u8* slot, u64* full, const u8* weights, const u32* records, const Segment& s, int stage, int loader) {
  copy_begin(full, STAGE_BYTES / LOADERS, 0);
#pragma unroll
  for (int i = 0; i < MT / LOADERS; i++) {
    const int place = loader * (MT / LOADERS) + i, tile = s.expert * TILES + min(s.m * MT + place, TILES - 1);
    bulk_copy(slot + place * SB * BLOCK_BYTES, weights + ((size_t)tile * BLOCKS + stage * SB) * BLOCK_BYTES, SB * BLOCK_BYTES, full);
    if (GROUPED)
      bulk_copy(slot + WEIGHT_BYTES + place * STAGE_GROUPS * 64, records + ((size_t)tile * GROUPS + first_group(stage)) * 16,
                STAGE_GROUPS * 64, full);
  }
}
DEVICE void copy_x(u8* slot, u64* full, const u8* x, const Segment& s, int stage, int x_tiles, int loader) {
  constexpr int part = X_BYTES / LOADERS;
  bulk_copy(slot + WEIGHT_BYTES + RECORD_BYTES + loader * part, x + ((size_t)stage * x_tiles + s.n) * X_BYTES + loader * part, part, full);
}
// The weights of the first BEFORE stages are fetched before this kernel's inputs are there. Not of the whole ring: memory that is busy
// with them holds up the kernel in front, and then x.
DEVICE void produce(Shared& sh, const u8* weights, const u32* records, const u8* x, const int* expert_of, int n_tiles, int x_tiles,
                    int loader) {
  Segment s;
  for (int pass = 0; pass < 2; pass++) {
    int unit = first_unit(n_tiles), at = 0;
    while (next_segment(s, unit, n_tiles, expert_of)) {
      for (int stage = s.begin; stage < s.end; stage++, at++) {
        const int slot = at % STAGES;
        if (pass == 0) {
          if (at == BEFORE) goto filled;
          copy_weights(sh.ring[slot], &sh.full[slot], weights, records, s, stage, loader);
        } else {
          if (at >= BEFORE) {
            if (at >= STAGES) barrier_wait(&sh.empty[slot], (at / STAGES + 1) & 1);
            copy_weights(sh.ring[slot], &sh.full[slot], weights, records, s, stage, loader);
          }
          copy_x(sh.ring[slot], &sh.full[slot], x, s, stage, x_tiles, loader);
        }
      }
    }
  filled:
    if (pass == 0) wait_for_inputs();
  }
}
