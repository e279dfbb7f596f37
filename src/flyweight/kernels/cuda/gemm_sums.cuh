// Sums of a tile of gemm.cu that several CTAs have a part of: through memory (LINE, MAIL) or within a cluster (CLUSTERS). And those of
// two teams in one CTA.

#if TEAMS > 1
static_assert(TEAMS == 2 && sizeof(Shared::ring) >= COLUMNS * THREADS * 16, "the second's sums have room where stages were");
DEVICE void leave_sums(Shared& sh, const accumulator (&acc)[TOKENS / 2]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) ((uint4*)sh.ring)[j * THREADS + threadIdx.x % THREADS] = *(const uint4*)&acc[4 * j];
}
DEVICE void add_sums(accumulator (&acc)[TOKENS / 2], const Shared& sh) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    const uint4 p = ((const uint4*)sh.ring)[j * THREADS + threadIdx.x];
    const accumulator* v = (const accumulator*)&p;
#pragma unroll
    for (int i = 0; i < 4; i++) acc[4 * j + i] += v[i];
  }
}
#endif

// Sums of a tile that begins in another CTA, left for it; and the owner's taking them in, in the order of the stages.
DEVICE void leave_partial(const accumulator (&acc)[TOKENS / 2], uint4* partials, int* flags) {
  uint4* to = partials + (size_t)blockIdx.x * (TOKENS / 8) * THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) to[i * THREADS] = *(const uint4*)&acc[4 * i];
  __threadfence();
  named_barrier(1, THREADS);
  if (threadIdx.x == 0) store_release(flags + blockIdx.x, 1);
}
DEVICE void take_partials(accumulator (&acc)[TOKENS / 2], const uint4* partials, int* flags, const Segment& s, int tile, int n_tiles) {
  const int units = M_TILES * n_tiles * STAGE_COUNT, stop = (tile + 1) * STAGE_COUNT;
  for (int cta = blockIdx.x + 1; unit_begin(cta, units) < stop; cta++) {
    if (unit_begin(cta, units) == unit_begin(cta + 1, units)) continue;  // more CTAs than units
    Patience patience;
    while (!load_acquire(flags + cta)) patience.poll();
    const uint4* from = partials + (size_t)cta * (TOKENS / 8) * THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
      const uint4 p = __ldcg(from + i * THREADS);
      const accumulator* v = (const accumulator*)&p;
#pragma unroll
      for (int j = 0; j < 4; j++) acc[4 * i + j] += v[j];
    }
    named_barrier(1, THREADS);
    if (threadIdx.x == 0) flags[cta] = 0;
  }
}

// The CTAs of a cluster give each other what they have of the owners' columns.
DEVICE void give_sums(Shared& sh, const accumulator (&acc)[TOKENS / 2], int rank) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    const uint4 v = *(const uint4*)&acc[4 * j];
    store_in_cluster(&sh.exchange[rank][j % OWNED][threadIdx.x], j / OWNED, v);
  }
}
template <int COUNT, class SHARES> DEVICE void add_shares(accumulator (&sum)[OWNED * 4], const SHARES& shares) {
#pragma unroll
  for (int from = 0; from < COUNT; from++)
#pragma unroll
    for (int j = 0; j < OWNED; j++) {
      const uint4 p = shares[from][j][threadIdx.x];
      const accumulator* v = (const accumulator*)&p;
#pragma unroll
      for (int i = 0; i < 4; i++) sum[4 * j + i] += v[i];
    }
}
DEVICE void take_sums(const Shared& sh, accumulator (&sum)[OWNED * 4]) {
#pragma unroll
  for (int i = 0; i < OWNED * 4; i++) sum[i] = 0;
  add_shares<CLUSTER>(sum, sh.exchange);
}

#if CLUSTER > 1
DEVICE void own_sums(accumulator (&sum)[OWNED * 4], const accumulator (&acc)[TOKENS / 2], int rank) {
#pragma unroll
  for (int j = 0; j < COLUMNS * 4; j++)
    if (j / (OWNED * 4) == 0 || j / (OWNED * 4) == rank) sum[j % (OWNED * 4)] = acc[j];
}
#endif
#if APART
// Or each to a place of its own beside the ring, on whose barrier the bytes complete: nobody waits for the others' rings. An owner's own
// sums come first, then the others' in order.
DEVICE void send_sums(Shared& sh, const accumulator (&acc)[TOKENS / 2], int rank) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    const int owner = j / OWNED;
    if (owner != rank)
      send_in_cluster(&sh.apart[rank - (rank > owner)][j % OWNED][threadIdx.x], &sh.met, owner, *(const uint4*)&acc[4 * j]);
  }
}
DEVICE void receive_sums(Shared& sh, accumulator (&sum)[OWNED * 4], const accumulator (&acc)[TOKENS / 2], int rank) {
  own_sums(sum, acc, rank);
  barrier_wait(&sh.met, 0);
  add_shares<CLUSTER - 1>(sum, sh.apart);
}
#endif

#if SPLIT == MAIL && CLUSTER > 1
// Or through memory: [tile][owner][other][column group][thread], words that are their own flags. An owner's own sums come first,
// then the others' in order.
DEVICE uint4* mail_place(uint4* mail, int tile, int owner, int other, int column) {
  return mail + (((size_t)(tile * OWNERS + owner) * (CLUSTER - 1) + other) * OWNED + column) * THREADS + threadIdx.x;
}
DEVICE void post_sums(const accumulator (&acc)[TOKENS / 2], uint4* mail, int tile, int rank) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    const int owner = j / OWNED;
    const accumulator* v = acc + 4 * j;
    if (owner != rank)
      store_relaxed(mail_place(mail, tile, owner, rank - (rank > owner), j % OWNED),
                    make_uint4(letter(v[0]), letter(v[1]), letter(v[2]), letter(v[3])));
  }
}
DEVICE void collect_sums(accumulator (&sum)[OWNED * 4], const accumulator (&acc)[TOKENS / 2], uint4* mail, int tile, int rank) {
  constexpr int count = (CLUSTER - 1) * OWNED;
  uint4* from = mail_place(mail, tile, rank, 0, 0);
  u32 words[count][4];
  await_words(words, [&](int i) { return from + i * THREADS; });
  own_sums(sum, acc, rank);
#pragma unroll
  for (int i = 0; i < count; i++) {
    store_relaxed(from + i * THREADS, make_uint4(~0u, ~0u, ~0u, ~0u));
#pragma unroll
    for (int j = 0; j < 4; j++) open_letter(words[i][j], sum[i % OWNED * 4 + j]);
  }
}
#endif
