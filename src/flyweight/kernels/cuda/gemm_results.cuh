// The end of a tile of gemm.cu: scales, bias, residual or act(gate)·up, and the writing, straight or through shared memory.

// What becomes of the sums of a thread: outputs g and g + 8 of its warp's tile, tokens 2t and 2t + 1 of 8.
struct Finish {
  float scale[2], offset[2];  // of the two outputs
  const float* row_scale;     // of token 2t
  Finish() = default;
  DEVICE Finish(int tile, const float* channel_scale, const float* rows_from, const u16* bias, int lane)
      : row_scale(rows_from + 2 * (lane % 4)) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int channel = min(tile * 16 + 8 * half + lane / 4, NDIM - 1);
      scale[half] = CHANNELS ? channel_scale[channel] : 1.f;
      offset[half] = BIAS ? to_float(bias[channel]) : 0.f;
    }
  }
  DEVICE float2 rows(int column) const {  // of rows that do not exist too: nobody writes those
    return QUANTIZED ? *(const float2*)(row_scale + column) : make_float2(1.f, 1.f);
  }
  DEVICE void operator()(const accumulator* acc, float2 row, float (&v)[2][2]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x = (float)acc[i];
      if (CHANNELS) x = __fmul_rn(x, QUANTIZED ? scale[i / 2] * (i % 2 ? row.y : row.x) : scale[i / 2]);
      v[i / 2][i % 2] = BIAS ? x + offset[i / 2] : x;
    }
    if constexpr (GATE_UP)
#pragma unroll
      for (int i = 0; i < 2; i++) v[0][i] = gated<EPILOGUE>(v[0][i], v[1][i]);
  }
};

// What the COUNT column groups from `first` on need beside their sums, so that it can be asked for before those are there.
template <int COUNT> struct Ends {
  Finish finish;
  float2 row[QUANTIZED ? COUNT : 1];
  u32 old[EPILOGUE == RESIDUAL ? COUNT : 1][2];  // of the residual: two outputs of token 8j + g
  DEVICE Ends(const Segment& s, int first, const float* channel_scale, const float* row_scale, const u16* bias, const u16* residual,
              int rows, int warp, int lane)
      : finish(s.m * MT + warp, channel_scale + s.expert * NDIM, row_scale, bias + s.expert * NDIM, lane) {
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      const int column = s.n * TOKENS + 8 * (first + j), token = column + lane / 4;
      if (QUANTIZED && column < rows) row[j] = finish.rows(column);
#pragma unroll
      for (int half = 0; half < (EPILOGUE == RESIDUAL ? 2 : 0); half++) {
        const int n = (s.m * MT + warp) * 16 + 8 * half + 2 * (lane % 4);
        old[j][half] = token < rows && n < NDIM ? *(const u32*)(residual + (size_t)token * WIDTH + n) : 0;
      }
    }
  }
};
// D transposed in 8 × 8 pieces: a lane writes two outputs of token 8j + g at once. `acc` has the column groups from `first` on.
template <int COUNT>
DEVICE void write_tile(const accumulator (&acc)[COUNT * 4], const Ends<COUNT>& ends, const Segment& s, int first, u16* Y, int rows,
                       int groups, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, tile = s.m * MT + warp;
  if (tile >= TILES) return;
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const int column = s.n * TOKENS + 8 * (first + j);
    if (column >= rows) break;
    float v[2][2];
    ends.finish(acc + 4 * j, ends.row[QUANTIZED ? j : 0], v);
    const int token = column + g;
    if constexpr (GATE_UP) {
      const u32 pair = transpose8(pack2(v[0][0], v[0][1]));
      const int n = tile * 8 + 2 * t;
      if (token < rows && n < WIDTH) {
#if PACKED  // small pieces, of the few rows that are not staged
        Y[packed_place(token, n, groups)] = (u16)pair, Y[packed_place(token, n + 1, groups)] = (u16)(pair >> 16);
#else
        *(u32*)(Y + (size_t)token * WIDTH + n) = pair;
#endif
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int n = tile * 16 + 8 * half + 2 * t;
        const bool inside = token < rows && n < NDIM;
        const size_t at = (size_t)token * WIDTH + n;
        if (EPILOGUE == RESIDUAL) {
          const u32 old = transpose8(ends.old[j][half]);
          v[half][0] += low_float(old), v[half][1] += high_float(old);
        }
        const u32 pair = transpose8(pack2(v[half][0], v[half][1]));
        if (inside) *(u32*)(Y + at) = pair;
      }
    }
  }
}

#if STAGED
// A warpgroup's results lie in shared memory token by token. Its warps write there, each its 16 outputs of all tokens; then
// each takes a quarter of the tokens to global memory, in pieces of 16 bytes. The residual comes in the same way.
template <class ACTION> DEVICE void each_piece(const Segment& s, int first, int rows, int warp, int lane, ACTION act) {
  constexpr int lanes = OUT_BYTES / 16, quarter = STAGED / 4;
#pragma unroll 4
  for (int i = 0; i < quarter * lanes / 32; i++) {
    const int token = warp % 4 * quarter + i * (32 / lanes) + lane / lanes, row = s.n * TOKENS + first + token;
    const int n = (s.m * WGS + warp / 4) * (OUT_BYTES / 2) + lane % lanes * 8;
    if (row < rows && n < WIDTH) act((size_t)row * WIDTH + n, token * OUT_ROW + lane % lanes * 16);
  }
}
DEVICE void fetch_residual(Shared& sh, const Segment& s, int first, const u16* residual, int rows, int warp, int lane) {
  const u32 staging = shared_address(sh.staging[warp / 4]);
  __syncwarp();
  each_piece(s, first, rows, warp, lane, [&](size_t from, int to) { copy16(staging + to, residual + from); });
  copy_group();
}
// What a tile's end will fetch of it piece by piece comes as far as L2 while the tile is multiplied.
DEVICE void prefetch_residual(const Segment& s, const u16* residual, int rows, int warp) {
  const int n = (s.m * WGS + warp / 4) * (OUT_BYTES / 2);
  for (int token = STAGED + threadIdx.x % 128; token < TOKENS; token += 128) {
    const int row = s.n * TOKENS + token;
    if (row < rows && n < WIDTH) prefetch_l2(residual + (size_t)row * WIDTH + n);
  }
}
// Row and channel scales of a tile, to this warpgroup's own place.
DEVICE void fetch_scales(Shared& sh, const Segment& s, const float* channel_scale, const float* row_scale, int warp) {
  const int i = threadIdx.x % 128 * 4, channel = (s.m * WGS + warp / 4) * 64 + i;
  const u32 to = shared_address(sh.scales[warp / 4]);
  if (i < TOKENS) copy16(to + i * 4, row_scale + s.n * TOKENS + i);
  if (i < 64 && channel < NDIM) copy16(to + (TOKENS + i) * 4, channel_scale + s.expert * NDIM + channel);
  copy_group();
}
#if PACKED
// The 32 outputs of a warpgroup are the four columns of as many inputs; a warp writes them for 8 tokens at a time: 512 bytes in a row.
DEVICE void write_packed(const u8* staging, const Segment& s, int first, u16* Y, int rows, int groups, int warp, int lane) {
  const int column = lane / 8, piece = s.m * WGS + warp / 4;
#pragma unroll
  for (int i = 0; i < STAGED / 32; i++) {
    const int token = (warp % 4 * (STAGED / 32) + i) * 8 + lane % 8, row = s.n * TOKENS + first + token;
    if (row / 8 * 8 >= rows || piece >= WIDTH / 32) continue;
    u32 words[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const u8* from = staging + token * OUT_ROW + 16 * t;
      const uint2 pairs = *(const uint2*)(from + column / 2 * 8);
      words[t] = ORDER ? __byte_perm(pairs.x, pairs.y, column % 2 ? 0x7632 : 0x5410) : *(const u32*)(from + column * 4);
    }
    ((uint4*)Y)[packed_place<PACKED, 4>(row, piece, groups) + 8 * column] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
#endif
DEVICE void write_staged(Shared& sh, const accumulator (&acc)[TOKENS / 2], const Segment& s, const u16* bias, const u16* residual,
                         u16* Y, int rows, int groups, int warp, int lane) {
  const u8* staging = sh.staging[warp / 4];
  if (QUANTIZED) copy_wait<0>(), named_barrier(2 + warp / 4, 128);  // the scales are there
  const float* scales = sh.scales[warp / 4];
  const Finish finish(s.m * MT + warp, scales + TOKENS - (s.m * WGS + warp / 4) * 64, scales, bias + s.expert * NDIM, lane);
  const int matrix = lane / 8, output = GATE_UP ? warp % 4 * 8 : warp % 4 * 16 + matrix % 2 * 8;
  constexpr int together = GATE_UP ? 4 : 2;  // groups of 8 tokens
  const u32 place = shared_address(staging) + (8 * (GATE_UP ? matrix : matrix / 2) + lane % 8) * OUT_ROW + output * 2;
#pragma unroll
  for (int first = 0; first < TOKENS; first += STAGED) {
    if (s.n * TOKENS + first >= rows) break;
    if (EPILOGUE == RESIDUAL && first > 0) fetch_residual(sh, s, first, residual, rows, warp, lane);
    if (EPILOGUE == RESIDUAL) copy_wait<0>();
    named_barrier(2 + warp / 4, 128);  // the residual is there, and what was here before is gone
#pragma unroll
    for (int j = 0; j < STAGED / 8; j += together) {
      u32 words[4], old[4] = {};
      if (EPILOGUE == RESIDUAL) {
        const uint4 w = load_matrices<true>(place + j * 8 * OUT_ROW);
        old[0] = w.x, old[1] = w.y, old[2] = w.z, old[3] = w.w;
      }
#pragma unroll
      for (int i = 0; i < together; i++) {
        float v[2][2];
        finish(acc + first / 2 + 4 * (j + i), finish.rows(first + 8 * (j + i)), v);
#pragma unroll
        for (int half = 0; half < 4 / together; half++) {
          if (EPILOGUE == RESIDUAL) v[half][0] += low_float(old[2 * i + half]), v[half][1] += high_float(old[2 * i + half]);
          words[4 / together * i + half] = pack2(v[half][0], v[half][1]);
        }
      }
      store_matrices(place + j * 8 * OUT_ROW, words);
    }
    named_barrier(2 + warp / 4, 128);
#if PACKED
    write_packed(staging, s, first, Y, rows, groups, warp, lane);
#else
    each_piece(s, first, rows, warp, lane, [&](size_t to, int from) { *(uint4*)(Y + to) = *(const uint4*)(staging + from); });
#endif
  }
}
#endif
