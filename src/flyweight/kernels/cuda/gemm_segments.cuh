// How the loader warps of gemm.cu fill the ring with the stages of its segments.
// A loader warp's part of a stage: a quarter of the tiles, and of x. One lane does it.
DEVICE void copy_weights(u8* slot, u64* full, const u8* weights, const u32* records, const Segment& s, int stage, int loader) {
  copy_begin(full, STAGE_BYTES / LOADERS, 0);
#pragma unroll
  for (int i = 0; i < MT / LOADERS; i++) {
    const int place = loader * (MT / LOADERS) + i, tile = s.expert * TILES + min(s.m * MT + place, TILES - 1);
    bulk_copy(slot + place * SB * BLOCK_BYTES, weights + ((size_t)tile * BLOCKS + stage * SB) * BLOCK_BYTES, SB * BLOCK_BYTES, full);
    if (GROUPED)
      bulk_copy(slot + WEIGHT_BYTES + place * STAGE_GROUPS * GROUP_BYTES,
                (const Record*)records + ((size_t)tile * GROUPS + first_group(stage)) * RECORD_LENGTH, STAGE_GROUPS * GROUP_BYTES, full);
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
