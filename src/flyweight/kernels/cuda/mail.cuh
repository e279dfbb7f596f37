#ifndef MAIL_CUH
#define MAIL_CUH
#include "words.cuh"
// Sums that the CTAs of one grid hand to each other: SLICES words to an output, each its own flag (common.cuh). Whoever takes a word
// empties it again, before the wait of the next kernel is over, so one mail serves all launches of a stream.
DEVICE u32 letter(float sum) { return __float_as_uint(sum); }
DEVICE u32 letter(int sum) { return (u32)sum ^ 0x80000000u; }  // empty would be the largest integer, which no sum comes near
DEVICE void open_letter(u32 word, float& sum) { sum += __uint_as_float(word); }
DEVICE void open_letter(u32 word, int& sum) { sum += (int)(word ^ 0x80000000u); }
template <typename Sum> DEVICE void leave(float* mail, Sum sum) { store_relaxed(mail, __uint_as_float(letter(sum))); }

// The words of all slices, `step` apart, added up in order.
template <typename Sum> DEVICE Sum take(float* mail, int step) {
  constexpr int together = SLICES < 6 ? SLICES : 6;
  Sum sum = 0;
#pragma unroll
  for (int first = 0; first < SLICES; first += together) {
    u32 words[together][1];
    await_words(words, [=](int i) { return first + i < SLICES; }, [=](int i) { return mail + (first + i) * step; });
#pragma unroll
    for (int i = 0; i < together; i++)
      if (first + i < SLICES) {
        store_relaxed(mail + (first + i) * step, __uint_as_float(~0u));
        open_letter(words[i][0], sum);
      }
  }
  return sum;
}
#endif
