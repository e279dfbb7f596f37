// What both decode attention kernels share: how a sequence is cut into runs of tokens, and what bends its scores.
//
// SOFT_CAP: scores become cap · tanh(score / cap). SINKS: a logit for each query head takes its share of the softmax and gives
// nothing, so it only counts in the last sum.
// defines: FP16, HEADS, KV_HEADS, HEAD_DIM, WINDOW, SHORTEST, ITEMS (1), SOFT_CAP (0), SINKS (0)
#ifndef ITEMS
#define ITEMS 1
#endif
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#if SOFT_CAP || SINKS
#define BEND_ARGUMENTS , float soft_cap, const u16* sinks
#else
#define BEND_ARGUMENTS
#endif
#include "common.cuh"

constexpr int SHARING = HEADS / KV_HEADS;             // query heads that share a kv head
constexpr int G = (SHARING + ITEMS - 1) / ITEMS;      // and those of them that a CTA takes

// The tokens [begin, end) of one split. Runs come from the length on the device (a captured grid is fixed): as many as there
// are splits, but none shorter than SHORTEST, so that the first `used` splits have work. `rows`: new tokens whose windows are read.
struct Run {
  int begin, end, used;
};
DEVICE int oldest_of(int length, int rows) { return WINDOW ? max(0, length - (rows - 1) - WINDOW) : 0; }
DEVICE Run run_of(int length, int split, int splits, int rows = 1) {
  const int oldest = oldest_of(length, rows);
  const int each = max(SHORTEST, ((length - oldest + splits - 1) / splits + 15) / 16 * 16);
  const int begin = oldest + split * each;
  return {begin, min(begin + each, length), max((length - oldest + each - 1) / each, 1)};
}

// cap · tanh(x / cap), as both grow: exp2 of much is infinite, and of little 0.
DEVICE float bend(float x, float cap) { return cap - __fdividef(2.f * cap, 1.f + exp2_fast(2.8853900817779268f * x / cap)); }
