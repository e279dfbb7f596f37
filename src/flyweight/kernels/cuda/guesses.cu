// Between the rows of a step with guesses and the sequences' own rows, where the host has not read the tokens yet.
//
//   take    rows' tokens[place[i]] = sequences' tokens[sequence[i]]: last tokens that are still in flight
//   go_on   row = first[s];  while the token chosen after row is the one guessed there:  row += 1
//           the sequence of row takes that token, and the length that counts it
//   count   the tokens chosen after row first[s] and its right guesses are counted for the sequence
//   guess_on  the same token and length into the row first[s] itself, and behind it the next guesses, as many as it had
//
// Work split: a thread a token or a sequence (at most CHUNK steps each).
// Limit: latency. torch's ops are four and thirteen launches, which the device waits for.
//
// defines: THREADS
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    take(u64* tokens, const u64* sequence_tokens, const u64* place, const u64* sequence, int count) {
  wait_for_inputs();
  const int i = threadIdx.x;
  if (i < count) tokens[place[i]] = sequence_tokens[sequence[i]];
}

// `guesses`: after each row; all bits set where there is none, as after the last row of a sequence.
extern "C" __global__ void __launch_bounds__(THREADS)
    go_on(const u64* chosen, const u64* guesses, const u64* first, const u64* at, const int* lengths, u64* sequence_tokens,
          int* sequence_lengths, int sequences) {
  wait_for_inputs();
  const int s = threadIdx.x;
  if (s >= sequences) return;
  int row = (int)first[s];
  while (chosen[row] == guesses[row]) row++;
  const int sequence = (int)at[row];
  sequence_tokens[sequence] = chosen[row];
  sequence_lengths[sequence] = lengths[row] + 1;
}

// `times` [sequences][vocabulary], as penalties read it
extern "C" __global__ void __launch_bounds__(THREADS)
    count(const u64* chosen, const u64* tokens, const int* before, const u64* first, const u64* at, int* times, int vocabulary, int rows,
          int sequences) {
  wait_for_inputs();
  const int s = threadIdx.x;
  if (s >= sequences) return;
  int row = (int)first[s];
  int* own = times + (size_t)at[row] * vocabulary;
  own[chosen[row]] += 1;
  for (; row + 1 < rows && before[row + 1] > 0 && chosen[row] == tokens[row + 1]; row++) own[chosen[row + 1]] += 1;
}

// `before`: rows of the same sequence before each; `found` [guesses][stride], a column a sequence.
extern "C" __global__ void __launch_bounds__(THREADS)
    guess_on(const u64* chosen, u64* tokens, const int* before, const u64* first, int* lengths, const u64* found, int stride, int rows,
             int sequences) {
  wait_for_inputs();
  const int s = threadIdx.x;
  if (s >= sequences) return;
  const int begin = (int)first[s];
  int last = begin;
  while (last + 1 < rows && before[last + 1] > 0 && chosen[last] == tokens[last + 1]) last++;
  const u64 token = chosen[last];
  const int length = lengths[last] + 1;
  tokens[begin] = token;
  lengths[begin] = length;
  for (int i = 1; begin + i < rows && before[begin + i] == i; i++) {
    tokens[begin + i] = found[(size_t)(i - 1) * stride + s];
    lengths[begin + i] = length + i;
  }
}
