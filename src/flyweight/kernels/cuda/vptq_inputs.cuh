// x for the products of vptq_rows.cu, packed by a warpgroup of the same CTA: what vptq_pack.cu does, for the columns that the CTA
// takes, in the same order. A CTA repeats what those of other tiles do, but no kernel stands between this product and the one before.
//
// A warp makes two steps (the even and the odd ones of 64 columns) of eight rows at a time: lane l has row l % 8 and 16 columns, other
// ones than its neighbours, so that they read from different banks of L1, as they write to different ones of shared memory.
// Rows are not normed yet: a sum of squares tells the factor of their results. That and what the columns' biases add are sums over
// the columns of a tile that this CTA has; they lie beside the tile's last stage.
//
// defines: NORM, GATED, INSIDE (this is used), those of vptq_rows.cu
constexpr int LINES = STAGE_STEPS / 2;                    // of 64 columns in a stage; each has its warps
constexpr int STRIDE = 4 / LINES, MADE = COLUMNS / STRIDE;  // groups of eight rows: from one of a warp to its next, and how many
constexpr int ROW_SUMS = 2 * LINES * TOKENS;              // of a stage: biases, squares; each line's
static_assert(!INSIDE || (LINES <= 4 && COLUMNS % STRIDE == 0 && COLUMNS >= STRIDE), "every warp has rows");

DEVICE float silu(float gate) { return __fdividef(gate, 1.f + __expf(-gate)); }
struct Sixteen {  // neighbouring columns of a row
  uint4 low, high;
  DEVICE void load(const u16* from, int second = 0) {  // `second`: that half first
    low = ((const uint4*)from)[second], high = ((const uint4*)from)[1 - second];
  }
  DEVICE void turn(bool over) {
    const uint4 was = low;
    low = over ? high : low, high = over ? was : high;
  }
  DEVICE float operator[](int i) const {
    const uint4 q = i < 8 ? low : high;
    const u32 pair = i % 8 < 2 ? q.x : i % 8 < 4 ? q.y : i % 8 < 6 ? q.z : q.w;
    return i % 2 ? high_float(pair) : low_float(pair);
  }
};

struct Packer {
  const u16 *x, *norm;
  const u32* affine;
  int rows, in_features, lane, line, group0, quarter, second;
  float biases[MADE], squares[MADE];
  DEVICE Packer(const u16* x, const u16* norm, const u32* affine, int rows, int in_features, int warp, int lane)
      : x(x), norm(norm), affine(affine), rows(rows), in_features(in_features), lane(lane), line(warp % LINES), group0(warp / LINES),
        quarter((lane / 8 + lane) % 4), second(lane / 4 % 2) {
    clear();
  }
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < MADE; i++) biases[i] = squares[i] = 0;
  }
  // `wait`: until the stage's place in shared memory is free; x is on its way meanwhile.
  template <typename Wait> DEVICE void make(u8* to, int stage, Wait wait) {
    const int column = (stage * LINES + line) * 64 + quarter * 16;
    const bool there = column < in_features;
    Sixteen own[MADE], up[GATED ? MADE : 1], weight;
    uint4 words[4];
    if (there) {
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] = ((const uint4*)(affine + column))[i];
      if (NORM) weight.load(norm + column);
#pragma unroll
      for (int i = 0; i < MADE; i++) {
        const int row = min((group0 + i * STRIDE) * 8 + lane % 8, rows - 1);
        const u16* const from = x + (size_t)row * in_features * (1 + GATED) + column;
        own[i].load(from, second);
        if (GATED) up[i].load(from + in_features, second);
      }
    }
    wait();
    float scale[16], add[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const uint4 q = words[i / 4];
      const u32 word = i % 4 == 0 ? q.x : i % 4 == 1 ? q.y : i % 4 == 2 ? q.z : q.w;
      const float factor = NORM ? weight[i] : 1.f;
      scale[i] = low_float(word) * factor, add[i] = high_float(word) * factor;
    }
    const int piece = line * 8 + (quarter >> 1 | (quarter & 1) << 1);
#pragma unroll
    for (int i = 0; i < MADE; i++) {
      own[i].turn(second);
      if (GATED) up[GATED ? i : 0].turn(second);
      float value[16];
#pragma unroll
      for (int c = 0; c < 16; c++) {
        value[c] = GATED ? silu(own[i][c]) * up[GATED ? i : 0][c] : own[i][c];
        if (!there) value[c] = 0;
        if (there) biases[i] += value[c] * add[c];
        if (NORM) squares[i] += value[c] * value[c];
        value[c] = there ? value[c] * scale[c] : 0.f;
      }
      uint4* const place = (uint4*)to + ((group0 + i * STRIDE) * 4 * STAGE_STEPS + piece) * 8 + lane % 8;
      place[0] = make_uint4(pack2(value[0], value[8]), pack2(value[2], value[10]), pack2(value[4], value[12]), pack2(value[6], value[14]));
      place[32] = make_uint4(pack2(value[1], value[9]), pack2(value[3], value[11]), pack2(value[5], value[13]), pack2(value[7], value[15]));
    }
  }
  DEVICE void end_tile(float* sums) {
#pragma unroll
    for (int i = 0; i < MADE; i++) {
#pragma unroll
      for (int o = 8; o < 32; o *= 2) {
        biases[i] += __shfl_xor_sync(~0u, biases[i], o);
        if (NORM) squares[i] += __shfl_xor_sync(~0u, squares[i], o);
      }
      if (lane < 8) {
        float* const to = sums + line * TOKENS + (group0 + i * STRIDE) * 8 + lane;
        to[0] = biases[i];
        if (NORM) to[LINES * TOKENS] = squares[i];
      }
    }
    clear();
  }
};
DEVICE float sum_of_lines(const float* sums, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < LINES; i++) sum += sums[i * TOKENS + row];
  return sum;
}
