// W[n][column] = (C[i(n / 8, column)][n % 8] + R[r(n / 8, column)][n % 8]) · scale[column] + bias[column], in 16 bits, for so many
// rows of x that cuBLAS multiplies. Vectors of 8; vptq_layout.cu has a slower kernel for the others.
//
// One CTA an SM holds the codebooks (see vptq.cu); its warps take spans of one row block in turn. `load_matrices` transposes: its row
// addresses are the entries of 32 columns, so chosen that a lane gets eight neighbouring columns of one output.
//
//      lane (g, t)     output g     columns 8 t … 8 t + 7: two from each of the four 8 × 8 matrices
//
// IN_TILES: gate and up, the two parts, for gemm.cu and silu·mul (its BY_ROWS): a row block of both is a tile, and what a lane has is
// the 16 bytes of a row.
//
// Limit: the bytes written. The codebook is fetched once for an SM, where a CTA for every row block would fetch it from L2 each time.
//
// defines: those of vptq_tables.cuh, IN_TILES
#include "vptq_tables.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) vptq_decode(
    PART(0), PART(1), PART(2), u16* weight, int stored, int chunks, int dense_steps) {
  extern __shared__ __align__(128) u8 raw[];
  __shared__ u64 barrier;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Part part = own_part(GIVEN(0), GIVEN(1), GIVEN(2));
  launch_dependents();
  stage_book((char*)raw, part.book, &barrier);
  Residual residuals;
  residuals.load(part.residual);
  residuals.store((char*)raw + BOOK_BYTES);
  const u32 book = shared_address(raw), residual = book + BOOK_BYTES + 16 * (lane % COPIES);
  u32* const items = (u32*)(raw + BOOK_BYTES + RES_BYTES) + warp * SPAN * 32;

  const int blocks = (part.outputs + 7) / 8, spans = chunks * CHUNK / SPAN, g = lane / 4, t = lane % 4;
  const long long units = (long long)blocks * spans;
  const int begin = (int)(units * part.cta / part.ctas), end = (int)(units * (part.cta + 1) / part.ctas);
  Words words;
  if (begin + warp < end) load_span(words, part.stream + (size_t)(begin + warp) * (SPAN / CHUNK) * CHUNK_BYTES, lane);
  wait_for_inputs();  // nobody reads what was there before any more
  __syncthreads();
  book_ready(&barrier);

  // This lane's item of 32 columns: column 8 (i / 2) + 2 m + i % 2 for row i of matrix m.
  const int own = lane % 2 * 32 + address_lane(4 * (lane % 8 / 2) + lane / 8);
  u16* const rows = weight + (size_t)part.first * stored;
#pragma unroll 1
  for (int unit = begin + warp; unit < end; unit += WARPS) {
    unfold(items, words, lane);
    __syncwarp();
    if (unit + WARPS < end) load_span(words, part.stream + (size_t)(unit + WARPS) * (SPAN / CHUNK) * CHUNK_BYTES, lane);
    const int row = unit / spans * 8 + g, column = unit % spans * SPAN * 32 + 8 * t;
    // 32 columns of a part are half of a tile's block of 64
    uint4* const in_tile = (uint4*)weight + (((size_t)(unit / spans) * (stored / 32) + unit % spans * SPAN) * 2 + part.index) * 32 + lane;
    u16* const to = rows + (size_t)row * stored + column;
    u32 v[SPAN];  // of 32 columns each; + 16 of a column's lane is + 8 of the address's
#pragma unroll
    for (int q = 0; q < SPAN; q++) v[q] = items[q / 2 * 64 + (own ^ q % 2 * 8)];
#pragma unroll
    for (int q = 0; q < SPAN; q++) {
      u32 a[4];
      gather(a, v[q], book, residual);
      const uint4 affine[2] = {__ldg((const uint4*)(part.affine + column + 32 * q)), __ldg((const uint4*)(part.affine + column + 32 * q) + 1)};
      const u32* const one = (const u32*)affine;
#pragma unroll
      for (int m = 0; m < 4; m++)
        a[m] = fma2(a[m], __byte_perm(one[2 * m], one[2 * m + 1], 0x5410), __byte_perm(one[2 * m], one[2 * m + 1], 0x7632));
      if (row < part.outputs) *(IN_TILES ? in_tile + 64 * q : (uint4*)(to + 32 * q)) = make_uint4(a[0], a[1], a[2], a[3]);
    }
    __syncwarp();
  }

  // Outliers: a lane has two items of output g from each quarter of a step, as vptq.cu multiplies them.
  const long long steps = (long long)blocks * dense_steps;
  for (int at = (int)(steps * part.cta / part.ctas) + warp; at < (int)(steps * (part.cta + 1) / part.ctas); at += WARPS) {
    const uint4 q = stream_load(part.dense + (size_t)at * 32 + lane);
    const u32 pair[4] = {q.x, q.y, q.z, q.w};
    const int row = at / dense_steps * 8 + g, step = at % dense_steps;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int column = 256 * chunks + column_of(step, column_lane(i / 2 * 8 + 2 * t + i % 2));
      const u32 affine = part.affine[column], value = i % 2 ? pair[i / 2] >> 16 : pair[i / 2] & 0xffff;
      if (row < part.outputs) rows[(size_t)row * stored + column] = (u16)fma2(value, affine & 0xffff, affine >> 16);
    }
  }
}
