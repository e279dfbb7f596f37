#ifndef WORDS_CUH
#define WORDS_CUH
// Words that are their own flags (common.cuh), some at a time: asked for together, until all are there. A place below 0 has none.
#include "patience.cuh"
template <int COUNT> DEVICE void await_words(const float* words, const int (&places)[COUNT], float (&found)[COUNT]) {
  u32 word[COUNT][1];
  bool all;
  Patience patience;
  do {
    patience.poll();
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      word[i][0] = 0;
      if (places[i] >= 0) load_relaxed(words + places[i], word[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) all &= !missing<false>(word[i]);
  } while (!all);
#pragma unroll
  for (int i = 0; i < COUNT; i++) found[i] = __uint_as_float(word[i][0]);
}
#endif
