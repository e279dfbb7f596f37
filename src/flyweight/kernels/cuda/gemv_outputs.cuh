// What becomes of the sums of a round of SLOTS tiles: norm factor and scales, bias, residual or silu · mul; needs gemv.cuh's sizes.

// Where a tile lies among the weights, where its outputs lie in a row of y, and which row is the first. A linear alone has
// all its tiles in order; of several stacked ones (experts.cu) these differ.
struct Tile {
  int weights, outputs, row;
};
DEVICE Tile place_of(int tile) { return {tile, tile, 0}; }
DEVICE Tile place_of(Tile tile) { return tile; }

constexpr int OUTPUTS = EPILOGUE == SILU ? 8 : 16, WIDTH = EPILOGUE == SILU ? NDIM / 2 : NDIM;
constexpr int PARTS = EPILOGUE == SILU ? 2 : 1;  // sums that make an output: gate and up lie 8 rows apart

// An output, and what its end needs from memory.
struct Output {
  int slot, row, token, index;
  bool mine;
  float residual, bias[2], scale[2];
};
DEVICE void fetch_ends(Output& o, const Linear& a, Tile tile) {
  if (EPILOGUE == RESIDUAL) o.residual = to_float(a.residual[o.index]);
#pragma unroll
  for (int half = 0; half < PARTS; half++) {
    const int channel = tile.weights * 16 + 8 * half + o.row;
    if (BIAS) o.bias[half] = to_float(a.bias[channel]);
    if (QUANTIZED) o.scale[half] = a.channel_scale[channel];
  }
}
DEVICE void write_output(const Output& o, float (&v)[2], u16* Y) {
#pragma unroll
  for (int half = 0; half < PARTS; half++)
    if (BIAS) v[half] += o.bias[half];
  store_relaxed(Y + o.index, to_bits(EPILOGUE == SILU ? v[0] / (1.f + __expf(-v[0])) * v[1] : v[0] + o.residual));
}

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
  DEVICE void end(const LinearShared& sh, int first, int last) {
    static_assert(SLOTS * OUTPUTS * ROWS <= THREADS, "one output a thread");
    if (!o.mine) return;
    const float factor = row_factor(sh, o.token, a.epsilon);
    float v[2];
#pragma unroll
    for (int half = 0; half < PARTS; half++)
      v[half] = add_warps(sh, o.slot, o.row + 8 * half, o.token) * (QUANTIZED ? factor * o.scale[half] : factor);
    write_output(o, v, a.y);
  }
};
