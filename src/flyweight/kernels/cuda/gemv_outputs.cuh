// What becomes of the sums of a round of SLOTS tiles, where a CTA has all inputs of its tiles; needs gemv.cuh's sizes.

// The warps' sums of one output of a tile.
DEVICE float add_warps(const LinearShared& sh, int slot, int row, int token) {
  if constexpr (FORMAT == W8A8) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += __float_as_int(sh.partial[slot][w][row][token]);
    return (float)sum;
  } else {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sh.partial[slot][w][row][token];
    return sum;
  }
}

// A CTA that has all inputs of its tiles: every thread has at most one output of a round. What its end needs is read when the
// round begins, so that nothing waits for it between the last multiplication and the next kernel.
template <typename TileAt> struct Rounds {
  const Linear& a;
  TileAt tile_at;
  int count;
  Output o;
  DEVICE void begin(int first) {
    o = {};
    const int i = threadIdx.x;
    o.token = i % ROWS, o.row = i / ROWS % OUTPUTS, o.slot = i / ROWS / OUTPUTS;
    const Tile tile = place_of(tile_at(first + o.slot));
    const int n = tile.outputs * OUTPUTS + o.row;
    o.index = (tile.row + o.token) * WIDTH + n;
    o.mine = o.slot < min(count - first, SLOTS) && n < WIDTH;
    if (o.mine) fetch_ends(o, a, tile);
  }
  DEVICE void end(LinearShared& sh, int first, int last) {
    static_assert(SLICES > 1 || SLOTS * OUTPUTS * ROWS <= THREADS, "one output a thread");
    if (!o.mine) return;
    const float factor = row_factor(sh, o.token, a.epsilon);
    float v[2];
#pragma unroll
    for (int half = 0; half < PARTS; half++)
      v[half] = __fmul_rn(add_warps(sh, o.slot, o.row + 8 * half, o.token), QUANTIZED ? factor * o.scale[half] : factor);
#if ADAPTER_RANK
    barrier_wait(&sh.adapter.ready, 0);
    const float inverse = NORM ? inverse_norm(sh, o.token, a.epsilon) : 1.f;
#pragma unroll
    for (int half = 0; half < PARTS; half++) v[half] += inverse * sh.adapter.added[(first + o.slot) * 16 + o.row + 8 * half];
#endif
    write_output(o, v, a.y);
  }
};
