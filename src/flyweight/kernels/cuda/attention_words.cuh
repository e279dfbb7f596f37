// How lanes share out a head: each of 4 or 8 takes 16 bytes at a time, 32 or 64 values together. A head that is no multiple of
// those (HEAD_DIM 80, 96) ends in a word of 8 or 4 bytes, so that no lane has more than another and nothing is padded.
//
//   96 values, 8 lanes:   | 8 | 8 | 8 | 8 | 8 | 8 | 8 | 8 |  4 | 4 | 4 | 4 | 4 | 4 | 4 | 4 |
//
// defines: HEAD_DIM
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM % 64 != 48, "the last word is 4, 8 or 16 bytes");

// 16-bit values in word i of a lane
template <int LANES> DEVICE int word_values(int i) {
  if constexpr (HEAD_DIM % (8 * LANES) == 0) return 8;
  return i < HEAD_DIM / (8 * LANES) ? 8 : HEAD_DIM % (8 * LANES) / LANES;
}
// Word i of a lane, which begins at `from`; what it lacks of 16 bytes is zeros.
template <int LANES> DEVICE uint4 load_word(const u16* from, int i) {
  if (word_values<LANES>(i) == 8) return *(const uint4*)from;
  if (word_values<LANES>(i) == 2) return make_uint4(*(const u32*)from, 0, 0, 0);
  const uint2 half = *(const uint2*)from;
  return make_uint4(half.x, half.y, 0, 0);
}
// The same of codes of 8 bits, a byte each.
template <int LANES> DEVICE uint2 load_word(const u8* from, int i) {
  if (word_values<LANES>(i) == 8) return *(const uint2*)from;
  if (word_values<LANES>(i) == 2) return make_uint2(*(const u16*)from, 0);
  return make_uint2(*(const u32*)from, 0);
}
// Whether a warp whose lanes take every 32nd value has one at d.
DEVICE bool in_head(int d) { return HEAD_DIM % 32 == 0 || d < HEAD_DIM; }
