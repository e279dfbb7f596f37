// x into shared memory, in the form that a format multiplies with; needs gemv.cuh's sizes.
//
// Integer weights: 16-bit integers with a scale for each group, as a plane of high and one of low bytes. W8A8 and float8: codes of
// 8 bits with a scale for the row, which its maximum gives. Plain weights: x in its own type. The norm's weights are multiplied in
// here, its factor at the end. Within a block of 64 the two halves of what a lane of the matrix units takes lie side by side.
//
// One row is read at once and stays in registers: nothing is sooner. Several rows are read in pieces of 256 inputs, PIECES_AHEAD
// at a time by each warp, so that registers do not grow with the rows; W8A8 and float8 read them twice.
DEVICE float squares_of(const LinearShared& sh, int row) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < STATS; i++) squares += sh.row_stats[row][i].x;
  return squares;
}
DEVICE float inverse_norm(const LinearShared& sh, int row, float epsilon) { return rsqrtf(squares_of(sh, row) / KDIM + epsilon); }

#if !IN_REGISTERS && FORMAT != BIT_PLANES  // which gemv_bits.cuh has
struct Inputs {  // where a lane's lie. Column g of B: token g (W8A8, plain), or plane g % 2 of token g / 2; beyond the last row it is repeated
  const u8* x;
  template <typename Sum> DEVICE Sum sized(Sum sum, int, int) const { return sum; }
};
DEVICE Inputs inputs_at(const LinearShared& sh, int lane) { return {sh.x + min(lane / 4, ROWS * PLANES - 1) * XROW + lane % 4 * 16}; }
#endif

#if AS_HALVES
// Eight neighbouring inputs of a row, to their place: 16-bit floats, divided by a power of two that a block of 64 shares, so that none
// is too large and few bits are lost. Their order is that in which codes come apart: 0 and 2, 1 and 3 of four.
DEVICE void store_piece(LinearShared& sh, const float (&v)[8], int row, int piece, float, float, int lane) {
  float peak = 1e-30f, sum = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) peak = largest(peak, fabsf(v[j]));
#pragma unroll
  for (int o = 4; o; o >>= 1) peak = largest(peak, __shfl_xor_sync(~0u, peak, o));
  const u32 power = __float_as_uint(peak) >> 23;
  const float inverse = __uint_as_float((254 - power) << 23);
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int j = i / 2 * 4 + i % 2;
    words[i] = pack_as<true>(v[j] * inverse, v[j + 2] * inverse);
    sum += float_of<true>((u16)words[i]) + float_of<true>((u16)(words[i] >> 16));  // of what is multiplied
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (piece >= PIECES) return;
  *(uint4*)(sh.x + row * XROW + piece * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  if (lane % 2 == 0) sh.groups[piece / 2][row] = {sum, __uint_as_float(power << 23)};
}
#elif !IN_REGISTERS
// Eight neighbouring inputs of a row, to their place; see `convert`.
DEVICE void store_piece(LinearShared& sh, const float (&v)[8], int row, int piece, float most, float inverse, int lane) {
  const Piece p = convert<larger(SETS)>(v, most, inverse, lane);
  if (piece >= PIECES) return;
  if constexpr (FLOATS) {
    *(uint4*)(sh.x + row * XROW + piece * 16) = p.words;
  } else {
    u8* to = sh.x + row * PLANES * XROW + piece / 8 * 64 + piece % 4 * 16 + piece / 4 % 2 * 8;  // a lane's two halves together
    *(uint2*)to = make_uint2(p.words.x, p.words.y);
    if constexpr (GROUPED) {
      *(uint2*)(to + XROW) = make_uint2(p.words.z, p.words.w);
      if (lane % ADDERS == 0) sh.groups[piece / ADDERS][row] = p.group;
    }
  }
}
#endif

#if !IN_REGISTERS
#if ROWS == 1
// Each of the warps loads its part of the row; the norm's weights are read ahead of the wait. Integer weights want whole groups
// only, so warps need not meet before the multiplication; W8A8 wants the row's maximum.
DEVICE Inputs load_rows(LinearShared& sh, const Linear& a, Slice, int, int warp, int lane) {
  constexpr int PER_LANE = (PIECES + THREADS - 1) / THREADS;
  const int row = warp / WARPS, part = warp % WARPS;  // 0 and warp: what the compiler then knows spares tests
  uint4 x[PER_LANE], up[GATED_INPUT ? PER_LANE : 1], weight[NORM ? PER_LANE : 1];
#pragma unroll
  for (int i = 0; i < (NORM ? PER_LANE : 0); i++) {
    const int piece = (i * WARPS + part) * 32 + lane;
    weight[i] = piece < KDIM / 8 ? ((const uint4*)a.norm)[piece] : make_uint4(0, 0, 0, 0);
  }
  uint4 places[INDEXED ? PER_LANE : 1];
#pragma unroll
  for (int i = 0; i < (INDEXED ? PER_LANE : 0); i++)
    places[i] = ((const uint4*)a.channel_scale)[min((i * WARPS + part) * 32 + lane, KDIM / 8 - 1)];
#if SLOT_BLOCKS
  float share[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) share[i] = a.shares[min((i * WARPS + part) * 32 + lane, PIECES - 1) / (SLOT_BLOCKS * 8)];
#endif
  float squares = 0, most = STATIC ? a.channel_scale[NDIM] : 0.f, inverse = 1;
#if ADAPTER_RANK
  LowProducts low(sh.adapter, a, warp, lane);
  low.fetch();
#endif
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int piece = (i * WARPS + part) * 32 + lane;
    x[i] = piece < KDIM / 8 ? ((const uint4*)(a.x + (size_t)row * KDIM))[piece] : make_uint4(0, 0, 0, 0);
    if (GATED_INPUT) up[GATED_INPUT ? i : 0] = piece < KDIM / 8 ? ((const uint4*)(a.x + KDIM))[piece] : make_uint4(0, 0, 0, 0);
  }
  if constexpr (INDEXED) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const int piece = (i * WARPS + part) * 32 + lane;
      if (piece < KDIM / 8) ((uint4*)sh.x)[piece] = x[i];
    }
    named_barrier(1, THREADS);
    const u16* const natural = (const u16*)sh.x;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      auto two = [&](u32 at) { return natural[at & 0xffff] | (u32)natural[at >> 16] << 16; };
      if ((i * WARPS + part) * 32 + lane < KDIM / 8)
        x[i] = make_uint4(two(places[i].x), two(places[i].y), two(places[i].z), two(places[i].w));
    }
    named_barrier(1, THREADS);
  }
  float v[PER_LANE][8];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    widen(v[i], x[i]);
#if SLOT_BLOCKS
#pragma unroll
    for (int j = 0; j < 8; j++) v[i][j] *= share[i];
#endif
    if (GATED_INPUT) gate_inputs(v[i], up[GATED_INPUT ? i : 0]);
    if (NORM) weigh(v[i], weight[i], squares);
    if (QUANTIZED && !STATIC) {
#pragma unroll
      for (int j = 0; j < 8; j++) most = largest(most, fabsf(v[i][j]));
    }
  }
#if ADAPTER_RANK
  low.multiply(v);  // all CTAs wait for it
#endif
  if (NORM) squares = warp_sum(squares);
  if (QUANTIZED) most = warp_largest(most);
  if (lane == 0) sh.row_stats[row][part] = make_float2(squares, most);
  if (QUANTIZED && WARPS > 1) {
    named_barrier(1, THREADS);
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = largest(most, sh.row_stats[row][i].y);
  }
  if (STATIC && NORM) {
    __syncwarp();
    inverse = inverse_norm(sh, row, a.epsilon);
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) store_piece(sh, v[i], row, (i * WARPS + part) * 32 + lane, most, inverse, lane);
  named_barrier(1, THREADS);
  return inputs_at(sh, lane);
}
#else
// This CTA's slice of `rows` rows; those up to ROWS are zeros. Warps take (row, 256 inputs) in turn.
template <typename Use> DEVICE void each_piece(const Linear& a, Slice slice, int rows, int warp, int lane, Use use) {
#pragma unroll 1
  for (int first = warp; first < ROWS * STATS; first += WARPS * PIECES_AHEAD) {
    uint4 x[PIECES_AHEAD], weight[NORM ? PIECES_AHEAD : 1];
#pragma unroll
    for (int i = 0; i < PIECES_AHEAD; i++) {
      const int item = first + i * WARPS, row = item / STATS, place = item % STATS * 32 + lane, piece = slice.first * 8 + place;
      const bool exists = row < rows && piece < KDIM / 8 && (SLICES == 1 || place < slice.blocks * 8);
      x[i] = exists ? ((const uint4*)(a.x + (size_t)row * KDIM))[piece] : make_uint4(0, 0, 0, 0);
      if (NORM) weight[i] = exists ? ((const uint4*)a.norm)[piece] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < PIECES_AHEAD; i++) {
      const int item = first + i * WARPS;
      if (item >= ROWS * STATS) break;
      float v[8], squares = 0;
      widen(v, x[i]);
      if (NORM) weigh(v, weight[i], squares);
      use(v, squares, item / STATS, item % STATS);
    }
  }
}
DEVICE Inputs load_rows(LinearShared& sh, const Linear& a, Slice slice, int rows, int warp, int lane) {
  for (int line = threadIdx.x; line < (NORM ? min(SLICE, BLOCKS - slice.first) : 0); line += THREADS)
    prefetch_l2((const u8*)a.norm + (size_t)(slice.first + line) * 128);
  wait_for_inputs();
  if (QUANTIZED) {
    const float given = STATIC ? a.channel_scale[NDIM] : 0.f;
    if (!STATIC || NORM)
      each_piece(a, slice, rows, warp, lane, [&](const float (&v)[8], float squares, int row, int part) {
        float most = given;
#pragma unroll
        for (int j = 0; j < (STATIC ? 0 : 8); j++) most = largest(most, fabsf(v[j]));
        if (NORM) squares = warp_sum(squares);
        if (!STATIC) most = warp_largest(most);
        if (lane == 0) sh.row_stats[row][part] = make_float2(squares, most);
      });
    named_barrier(1, THREADS);
    if (threadIdx.x < ROWS) {
      float most = given;
#pragma unroll 4
      for (int i = 0; i < (STATIC ? 0 : STATS); i++) most = largest(most, sh.row_stats[threadIdx.x][i].y);
      sh.row_most[threadIdx.x] = make_float2(NORM ? inverse_norm(sh, threadIdx.x, a.epsilon) : 1.f, most);
    }
    named_barrier(1, THREADS);
  }
  each_piece(a, slice, rows, warp, lane, [&](const float (&v)[8], float squares, int row, int part) {
    float2 known = make_float2(1.f, 0.f);
    if (QUANTIZED) known = sh.row_most[row];
    store_piece(sh, v, row, part * 32 + lane, known.y, STATIC && NORM ? known.x : 1.f, lane);
    if (NORM && !QUANTIZED) {
      squares = warp_sum(squares);
      if (lane == 0) sh.row_stats[row][part] = make_float2(squares, 0.f);
    }
  });
  named_barrier(1, THREADS);
  if (!QUANTIZED && NORM && SLICES == 1 && threadIdx.x < ROWS)  // seen by all after their next meeting
    sh.row_most[threadIdx.x] = make_float2(inverse_norm(sh, threadIdx.x, a.epsilon), 0.f);
  return inputs_at(sh, lane);
}
#endif
#endif

// What a finished sum of row `token` is multiplied with, the weights' own scales aside.
DEVICE float row_factor(const LinearShared& sh, int token, float epsilon) {
#if ROWS == 1
  float most = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) most = largest(most, sh.row_stats[token][i].y);
  const float inverse = NORM && !STATIC ? inverse_norm(sh, token, epsilon) : 1.f;
  return QUANTIZED ? input_scale(most) * inverse : inverse;
#else
  const float2 known = sh.row_most[token];
  const float inverse = NORM && !STATIC ? known.x : 1.f;
  return QUANTIZED ? input_scale(known.y) * inverse : inverse;
#endif
}
