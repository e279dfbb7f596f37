// What both decode attention kernels share: how a sequence is cut into runs of tokens.
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, WINDOW, SHORTEST, ITEMS (1)
#ifndef ITEMS
#define ITEMS 1
#endif
#include "common.cuh"

constexpr int SHARING = HEADS / KV_HEADS;             // query heads that share a kv head
constexpr int G = (SHARING + ITEMS - 1) / ITEMS;      // and those of them that a CTA takes

// The tokens [begin, end) of one split. Runs come from the length on the device (a captured grid is fixed): as many as there
// are splits, but none shorter than SHORTEST, so that the first `used` splits have work.
struct Run {
  int begin, end, used;
};
DEVICE Run run_of(int length, int split, int splits) {
  const int oldest = WINDOW ? max(0, length - WINDOW) : 0;
  const int each = max(SHORTEST, ((length - oldest + splits - 1) / splits + 15) / 16 * 16);
  const int begin = oldest + split * each;
  return {begin, min(begin + each, length), max((length - oldest + each - 1) / each, 1)};
}
