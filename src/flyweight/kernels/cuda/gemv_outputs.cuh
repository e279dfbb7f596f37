// What becomes of the sums of a round of SLOTS tiles, where a CTA has all inputs of its tiles; needs gemv.cuh's sizes.

// The warps' sums of one output of a tile.
DEVICE void partial_of(float word, float& sum) { sum += word; }
DEVICE void partial_of(float word, int& sum) { sum += __float_as_int(word); }
template <typename Sum> DEVICE Sum add_partials(const LinearShared& sh, int slot, int row, int token) {
  Sum sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) partial_of(sh.partial[slot][w][row][token], sum);
  return sum;
}
#if FORMAT == W8A8
typedef int Sum;
#else
typedef float Sum;
#endif
DEVICE float add_warps(const LinearShared& sh, int slot, int row, int token) { return (float)add_partials<Sum>(sh, slot, row, token); }

// A CTA that has all inputs of its tiles: every thread has at most one output of a round. What its end needs is read when the
// round begins, so that nothing waits for it between the last multiplication and the next kernel.
template <typename TileAt> struct Rounds {
  const Linear& a;
  TileAt tile_at;
  int count;
  Slice slice;
  float* mail;  // BALANCED: [CTA, 16, row]
  Output o;
#if HELD_INPUTS
  int place = 0;  // of this round's partial sums
#else
  enum { place = 0 };
#endif
  DEVICE void begin(int first) {
    o = {};
    const int i = threadIdx.x;
    o.token = i % ROWS, o.row = i / ROWS % OUTPUTS, o.slot = i / ROWS / OUTPUTS * (1 + PART_TILES);
    const Tile tile = place_of(tile_at(first + o.slot));
    const int n = tile.outputs * OUTPUTS + o.row;
    o.index = (tile.row + o.token) * WIDTH + n;
    o.mine = o.slot < min(count - first, SLOTS) && n < WIDTH;
    if (o.mine) fetch_ends(o, a, tile);
  }
  DEVICE void end(LinearShared& sh, int first, int last) {
    static_assert(SLICES > 1 || SLOTS / (1 + PART_TILES) * OUTPUTS * ROWS <= THREADS, "one output a thread");
    static_assert(!APART || (SLOTS % 2 == 0 && !BALANCED), "gate and up end together");
    if (!o.mine || (BALANCED && first + o.slot >= last)) return;
    Sum sums[2];
#pragma unroll
    for (int half = 0; half < PARTS; half++) sums[half] = add_partials<Sum>(sh, place + o.slot + half * PART_TILES, o.row + half * PART_ROWS, o.token);
#if BALANCED
    const bool given = first + o.slot == 0 && slice.skipped, shared = first + o.slot + 1 == count && slice.last < TILE_STAGES;
#pragma unroll
    for (int half = 0; half < PARTS; half++) {
      float* word = mail + (blockIdx.x * 16 + o.row + 8 * half) * ROWS + o.token;
      if (given) leave(word, sums[half]);
      else if (shared) sums[half] += take<Sum>(word + 16 * ROWS, 0);
    }
    if (given) return;
#endif
    const float factor = row_factor(sh, o.token, a.epsilon);
    float v[2];
#pragma unroll
    for (int half = 0; half < PARTS; half++) v[half] = __fmul_rn((float)sums[half], QUANTIZED ? factor * o.scale[half] : factor);
#if ADAPTER_RANK
    const float inverse = NORM ? inverse_norm(sh, o.token, a.epsilon) : 1.f;
    barrier_wait(&sh.adapter.ready, 0);
#pragma unroll
    for (int half = 0; half < PARTS; half++) v[half] += inverse * sh.adapter.added[(first + o.slot + half * PART_TILES) * 16 + o.row + half * PART_ROWS];
#endif
    write_output(o, v, a.y);
  }
};

#if PAIRED
// Two rounds of SLOTS tiles: the other CTA's, whose sums it is sent, and our own, to which its sums are added.
template <typename TileAt> struct PairRounds {
  static constexpr int WORDS = SLOTS * 16 * ROWS, EACH = (WORDS + THREADS - 1) / THREADS;
  static_assert(ROWS % 4 == 0 && NORM && PARTS == 1 && !QUANTIZED, "what pairs are for");
  enum { place = 0 };
  const Linear& a;
  TileAt tile_at;
  int rank;
  Output of[EACH];
  DEVICE void begin(int first) {
    if (first == 0) return cluster_wait();  // the other CTA is there
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int word = i * THREADS + threadIdx.x;
      Output& o = of[i];
      o = Output{};
      o.token = word % ROWS, o.row = word / ROWS % 16, o.slot = word / ROWS / 16;
      o.mine = word < WORDS;
      if (!o.mine) continue;
      const Tile tile = place_of(tile_at(SLOTS + o.slot));
      o.index = o.token * WIDTH + tile.outputs * 16 + o.row;
      fetch_ends(o, a, tile);
    }
  }
  DEVICE void end(LinearShared& sh, int first, int) {
    if (first == 0) return send(sh);
    barrier_wait(&sh.met, 0);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const Output& o = of[i];
      if (!o.mine) continue;
      const float squares = sh.squares[o.token] + sh.received[WORDS + o.token];
      const float sum = add_warps(sh, o.slot, o.row, o.token) + sh.received[i * THREADS + threadIdx.x];
      float v[2] = {__fmul_rn(sum, rsqrtf(squares / KDIM + a.epsilon)), 0.f};
      write_output(o, v, a.y);
    }
  }
  // Four sums of neighbouring rows at a time; and the squares.
  DEVICE void send(LinearShared& sh) {
    for (int word = 4 * threadIdx.x; word < WORDS + ROWS; word += 4 * THREADS) {
      float4 sum = make_float4(0, 0, 0, 0);
      if (word < WORDS) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float4 part = *(const float4*)&sh.partial[word / ROWS / 16][w][word / ROWS % 16][word % ROWS];
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
      } else {
        sum = *(const float4*)&sh.squares[word - WORDS];
      }
      const uint4 bits = make_uint4(__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w));
      send_in_cluster(sh.received + word, &sh.met, 1 - rank, bits);
    }
  }
};
#endif
