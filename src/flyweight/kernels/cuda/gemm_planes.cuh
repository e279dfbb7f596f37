// Integer weights in groups of 128 times few rows of x, which are integers too (IN_PLANES). Of every row and group pack.cu has made 16-bit
// integers X = 256 · high + low; their bytes are two planes, each columns of the product. s is their scale, c = −s · sum_k X:
//
//      y[r, n] = sum over groups of scale[n] · (s[r] · sum_k code[n, k] · X[r, k] + zero[n] · c[r])
//
// Codes go in as bytes: as they lie, or a nibble each. Without zero points they are signed and c is not needed; those of int4 then stand
// in the upper half of their byte, 16 times as large.
// Limit: what is done in registers. The matrix units read and write their sums there, and other instructions only get what they leave,
// so that those for a weight (less than one; to make a 16-bit float of it takes two) count as much as products. Those for
// every sum and group (four) outweigh that beyond 32 rows.
// Measured (docs/kernels.md, kernels.jsonl): down and gate/up of 16 rows are faster than with few.cu, gate/up of 32 than with floats.
#if IN_PLANES
static_assert(GROUPED && !SPARSE && GROUP == 128 && KDIM % 128 == 0 && SB % 2 == 0, "whole groups");
constexpr bool EARLY = TOKENS <= 16;  // there are registers for the next group's codes
DEVICE u32 four_codes(u32 word, int half) {
  if (FORMAT == INT8) return SYMMETRIC ? word ^ 0x80808080 : word;
  if (SYMMETRIC) return and_xor(half ? word : word << 4, 0xf0f0f0f0, 0x80808080);
  return (half ? word >> 4 : word) & 0x0f0f0f0f;
}
// Adds the products of the stage in `slot` to `acc`. `sum` lives on from stage to stage: see multiply_window.
DEVICE void multiply_planes(Shared& sh, float (&acc)[TOKENS / 2], int (&sum)[TOKENS], int slot, int keep, int warp, int lane) {
  const u8 *ring = sh.ring[slot], *records = ring + WEIGHT_BYTES, *scales = records + RECORD_BYTES + X_ALL;
  const u64 x = matrix_descriptor(sh.ring[__shfl_sync(~0u, slot, 0)] + WEIGHT_BYTES + RECORD_BYTES, X_ROW * 8);
  u32 a[1 + EARLY][4][4];  // 32 inputs each
  auto take = [&](int group) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u8* block = ring + (warp * SB + group * 2 + i / 2) * BLOCK_BYTES;
      const uint4 w = ((const uint4*)block)[(FORMAT == INT8 ? i % 2 * 32 : 0) + lane];
      u32(&to)[4] = a[group % (1 + EARLY)][i];
      to[0] = four_codes(w.x, i % 2), to[1] = four_codes(w.y, i % 2), to[2] = four_codes(w.z, i % 2), to[3] = four_codes(w.w, i % 2);
    }
  };
  take(0);
#pragma unroll
  for (int group = 0; group < STAGE_GROUPS; group++) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u64 b = x + (group * 4 + i) * (STEP_BYTES >> 4);
      if (i == 0) wgmma_first(sum, a[group % (1 + EARLY)][i], b, keep);
      else wgmma(sum, a[group % (1 + EARLY)][i], b);
    }
    wgmma_commit();
    if (EARLY && group + 1 < STAGE_GROUPS) take(group + 1);
    float scale[2], zero[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 record = ((const u32*)records)[(warp * STAGE_GROUPS + group) * 16 + lane / 4 + 8 * i];
      scale[i] = float_of<SCALE_FP16>((u16)(record & 0xffff)) * (SYMMETRIC && FORMAT == INT4 ? 1 / 16.f : 1.f);
      zero[i] = (float)(record >> 16);
    }
    wgmma_wait<0>();
    keep_behind(sum);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
      const int pair = group * (TOKENS / 2) + i * 4 + lane % 4;  // of rows of x
      float s[2], c[2];
      if (SYMMETRIC) {
        const float2 two = ((const float2*)scales)[pair];
        s[0] = two.x, s[1] = two.y, c[0] = c[1] = 0;
      } else {
        const float4 two = ((const float4*)scales)[pair];
        s[0] = two.x, c[0] = two.y, s[1] = two.z, c[1] = two.w;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float whole = (float)(sum[4 * i + e] * 256 + sum[TOKENS / 2 + 4 * i + e]);
        if (SYMMETRIC) acc[4 * i + e] += scale[e / 2] * s[e % 2] * whole;
        else acc[4 * i + e] += scale[e / 2] * (s[e % 2] * whole + zero[e / 2] * c[e % 2]);
      }
    }
    if (!EARLY && group + 1 < STAGE_GROUPS) take(group + 1);
  }
}
#endif
