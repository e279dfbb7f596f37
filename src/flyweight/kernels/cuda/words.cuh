#ifndef WORDS_CUH
#define WORDS_CUH
#include "patience.cuh"
// Words that are their own flags (common.cuh), asked for together until all are there: those that `asked(i)` says, from `place(i)`.
template <int COUNT, int WIDTH, class ASKED, class PLACE>
DEVICE void await_words(u32 (&words)[COUNT][WIDTH], ASKED asked, PLACE place) {
  bool all;
  Patience patience;
  do {
    patience.poll();
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (asked(i)) load_relaxed(place(i), words[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (asked(i)) all &= !missing<false>(words[i]);
  } while (!all);
}
template <int COUNT, int WIDTH, class PLACE> DEVICE void await_words(u32 (&words)[COUNT][WIDTH], PLACE place) {
  await_words(words, [](int) { return true; }, place);
}

// Floats; a place below 0 has none, which is 0. A loop of its own: through the one above a few instructions more come out.
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
