// Eight neighbouring inputs of a row as 16-bit integers, high and low bytes apart: how integer weights meet x in piece.cuh and pack.cu.
constexpr float LARGEST_INTEGER = 32512;
template <int BYTE> DEVICE u32 bytes_of(const u32* words) {  // that byte of four words
  constexpr u32 two = BYTE | (4 + BYTE) << 4;
  return __byte_perm(__byte_perm(words[0], words[1], two), __byte_perm(words[2], words[3], two), 0x5410);
}
// SHARERS neighbouring lanes have a scale, ADDERS of them a sum. All lanes of a warp call it. The group's largest input, which LARGEST_INTEGER stands for, is
// returned, the sum of its integers is in `sum`.
template <int SHARERS, int ADDERS = SHARERS> DEVICE float integers_of(const float (&v)[8], u32 (&high)[2], u32 (&low)[2], int& sum) {
  float peak = 1e-30f;
#pragma unroll
  for (int j = 0; j < 8; j++) peak = largest(peak, fabsf(v[j]));
#pragma unroll
  for (int o = SHARERS / 2; o; o >>= 1) peak = largest(peak, __shfl_xor_sync(~0u, peak, o));
  // v · factor + 1.5 · 2^23 leaves the rounded integer in the low bits of the float: no conversion unit needed.
  // No division: its branch would keep pieces from overlapping
  const float factor = __fdividef(LARGEST_INTEGER, peak);
  u32 q[8];
  sum = -8 * 0x4b400000;
#pragma unroll
  for (int j = 0; j < 8; j++) sum += q[j] = __float_as_uint(fmaf(v[j], factor, 12582912.f));
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    low[j / 4] = bytes_of<0>(q + j);
#pragma unroll
    for (int l = j; l < j + 4; l++) q[l] += 128;  // the low byte is signed: round the high one
    high[j / 4] = bytes_of<1>(q + j);
  }
#pragma unroll
  for (int o = ADDERS / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  return peak;
}
