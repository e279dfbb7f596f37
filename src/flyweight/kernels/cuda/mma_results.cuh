// The end of gemm_mma.cu's tiles where a warp has several: results of neighbours, which are neighbouring outputs, are written together, 64
// bytes of a token by four lanes, where write_tile writes 16: whole sectors, and a fourth of the instructions.

constexpr int TOGETHER_TILES = GATE_UP ? 4 : 2;  // of a warp: four words of a lane
constexpr bool IN_LINES = PER_WARP % TOGETHER_TILES == 0 && TILES % TOGETHER_TILES == 0 && NDIM % 16 == 0;

// Of four neighbouring lanes: word i of lane t becomes word t of lane i.
DEVICE void exchange_words(u32 (&w)[4], int t) {
#pragma unroll
  for (int far = 1; far < 4; far *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & far) continue;
      const u32 got = __shfl_xor_sync(~0u, t & far ? w[i] : w[i + far], far);
      if (t & far) w[i] = got;
      else w[i + far] = got;
    }
}
// Tiles `m` and its neighbours of this warp, whose first is `first_tile` and whose first column group is `first`.
DEVICE void write_lines(const accumulator (&sums)[PER_WARP][COLUMNS * 4], int m, const Segment& s, int first_tile, int first,
                        const float* channel_scale, const float* row_scale, const u16* bias, const u16* residual, u16* Y, int rows, int lane) {
  const int g = lane / 4, t = lane % 4, tile = s.m * MT + first_tile + m;
  if (tile >= TILES) return;
  Finish finish[TOGETHER_TILES];
#pragma unroll
  for (int i = 0; i < TOGETHER_TILES; i++)
    finish[i] = Finish(tile + i, channel_scale + s.expert * NDIM, row_scale, bias + s.expert * NDIM, lane);
  const int token = s.n * TOKENS + 8 * first + g;
  const size_t at = (size_t)token * WIDTH + tile * (GATE_UP ? 8 : 16) + 8 * t;  // 8 outputs of this lane
  uint4 olds[EPILOGUE == RESIDUAL ? COLUMNS : 1];
  float2 row[QUANTIZED ? COLUMNS : 1];
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    if (EPILOGUE == RESIDUAL) olds[j] = token + 8 * j < rows ? *(const uint4*)(residual + at + (size_t)(8 * j) * WIDTH) : uint4{};
    if (QUANTIZED) row[j] = token - g + 8 * j < rows ? finish[0].rows(token - g + 8 * j) : make_float2(0.f, 0.f);
  }
#pragma unroll
  for (int j = 0; j < COLUMNS; j++) {
    if (token - g + 8 * j >= rows) break;
    const float2 of_row = QUANTIZED ? row[j] : make_float2(1.f, 1.f);
    u32 w[4], old[4];
    if (EPILOGUE == RESIDUAL) {
      old[0] = olds[j].x, old[1] = olds[j].y, old[2] = olds[j].z, old[3] = olds[j].w;
      exchange_words(old, t);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER_TILES; i++) {
      float v[2][2];
      finish[i](sums[m + i] + 4 * j, of_row, v);
#pragma unroll
      for (int half = 0; half < 4 / TOGETHER_TILES; half++) {
        const int k = 4 / TOGETHER_TILES * i + half;
        if (EPILOGUE == RESIDUAL) {
          const u32 before = transpose8(old[k]);
          v[half][0] += low_float(before), v[half][1] += high_float(before);
        }
        w[k] = transpose8(pack2(v[half][0], v[half][1]));
      }
    }
    exchange_words(w, t);
    if (token + 8 * j < rows) *(uint4*)(Y + at + (size_t)(8 * j) * WIDTH) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
