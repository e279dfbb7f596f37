// A trellis' codes of 2 and 3 bits (CODING == TRELLIS): a step of a lane, four weights, is a hash of the STATE_BITS of its stream from
// the step's place on, of which 4 · BITS are its own and the others those of the steps that follow.
//
//      y = state · M1 + A,   r = y turned by 16 bits,   value of weight i = byte i of y + byte i of r · M2 + byte i of r · M3, all signed
//
// A lane's steps of a block of 16 × 64: of each half of 32 inputs x, y, z, w as bits.cuh has them, 8 steps in BITS words. The stream of
// two blocks (the last one of a row may be by itself) is a circle: behind the last word comes the first.
//
// Where values meet x as bytes nobody adds them: the matrix units take the three with the same x into the same sums. So a step costs
// a funnel shift, a mask, three multiplications and a turn.
constexpr int STATE_BITS = BITS == 2 ? 18 : 20;
constexpr int TERMS = 3;  // bytes of a weight
constexpr u32 TURN_BY = 0xcbac1fed, TURN_FROM = 0x01234567, SECOND_BY = 0x9e3779b1, THIRD_BY = 0x85ebca6b;
static_assert(BITS == 2 || BITS == 3, "widths that there are constants for");

// A lane's words of a block, and the one that its stream goes on with.
struct BlockWords {
  u32 word[BITS + 1];
};
DEVICE u32 first_word(const u8* block, int lane) { return ((const u32*)block)[2 * lane]; }
DEVICE BlockWords load_words(const u8* block, int lane) {
  BlockWords q;
  const uint2 two = ((const uint2*)block)[lane];
  q.word[0] = two.x, q.word[1] = two.y;
  if constexpr (BITS == 3) q.word[2] = ((const u32*)(block + 256))[lane];
  return q;
}
DEVICE BlockWords load_words(const u8* block, const u8* next, int lane) {
  BlockWords q = load_words(block, lane);
  q.word[BITS] = first_word(next, lane);
  return q;
}
// Where the stream of a row's `block` goes on, of `blocks`.
DEVICE int block_after(int block, int blocks) { return (block ^ 1) < blocks ? block ^ 1 : block; }

// Signed bytes of four weights, to be added.
struct FourTerms {
  u32 term[TERMS];
};
DEVICE FourTerms four_terms(const BlockWords& q, int step) {
  const int first = 4 * BITS * step / 32, place = 4 * BITS * step % 32;
  const u32 window = place + STATE_BITS > 32 ? __funnelshift_r(q.word[first], q.word[first + 1], place) : q.word[first] >> place;
  const u32 y = (window & ((1u << STATE_BITS) - 1)) * TURN_BY + TURN_FROM;
  const u32 turned = __byte_perm(y, 0, 0x1032);
  return {{y, turned * SECOND_BY, turned * THIRD_BY}};
}
DEVICE int value_of(const FourTerms& four, int weight) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < TERMS; i++) sum += (int)(four.term[i] << (24 - 8 * weight)) >> 24;
  return sum;
}
// Values of weights 0 and 2 (ODD: 1 and 3) of four, 384 too large, in the halves of a word.
template <int ODD> DEVICE u32 raised_pair(const FourTerms& four) {
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < TERMS; i++) sum += (four.term[i] ^ 0x80808080) >> 8 * ODD & 0x00ff00ff;
  return sum;
}
