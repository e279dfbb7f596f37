// Where a drafting head goes on after a step that checked guesses: at the last row of each sequence whose guesses were right.
//
//   row = first[s];  while row + 1 is of the same sequence and its token is the one chosen after row:  row += 1
//   state[s] = hidden[row], state_lengths[s] = lengths[row], state_tables[s] = tables[row]
//
// Work split: a CTA a sequence; each thread finds the row for itself (at most CHUNK steps), then all copy.
// Limit: latency. torch's ops would be a dozen launches.
//
// defines: WIDTH (of a hidden state, a multiple of 8), THREADS
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    accept(const u64* chosen, const u64* tokens, const int* before, const u64* first, const u16* hidden, const int* lengths,
           const int* tables, u16* state, int* state_lengths, int* state_tables, int rows, int pages, int state_pages) {
  wait_for_inputs();
  const int sequence = blockIdx.x;
  int row = (int)first[sequence];
  while (row + 1 < rows && before[row + 1] > 0 && chosen[row] == tokens[row + 1]) row++;
  const uint4* from = (const uint4*)(hidden + (size_t)row * WIDTH);
  for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS) ((uint4*)(state + (size_t)sequence * WIDTH))[i] = from[i];
  for (int i = threadIdx.x; i < pages; i += THREADS)
    state_tables[(size_t)sequence * state_pages + i] = tables[(size_t)row * pages + i];
  if (threadIdx.x == 0) state_lengths[sequence] = lengths[row];
}
