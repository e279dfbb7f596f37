// Programmatic dependent launch where the hardware has none (before Hopper): a kernel is launched beside the one before it, fetches
// its first weights, and waits for that one's results here. kernels/dependent_launch.py says why this is safe.
//
// Each launch of a graph has a counter of its own, which LAUNCH_ROUND more tell that all its CTAs have ended. So a CTA that has not ended
// yet reads from its own counter how many times the graph has run, and waits until the counter before it is one LAUNCH_ROUND ahead: nothing
// is ever reset, and counters may wrap. Null pointers: nothing to wait for, nobody to tell.
//
// One lane of the CTA's last warp polls memory, the other warps a word in shared memory.
#include "patience.cuh"
constexpr u32 LAUNCH_ROUND = 1024;  // at least as many as a launch has CTAs

// LETTERS (one row): outputs go to a box of the launch, too, whose words are their own flags, so that the next launch needs no counter to
// know that its x is there, and no second trip to memory. There are two boxes, for replays of the graph by turns: a launch empties the one
// that the replay before has filled.
#ifndef TURN_NAP
#define TURN_NAP 0
#endif
#ifndef LETTERS
#define LETTERS 0
#endif
#if LETTERS
#define LAUNCH_ARGUMENTS , const u16 *letters_x, u16 *letters_y, u32 letters_x_step, u32 letters_y_step, const u32 *launch_before, u32 *launch_own
#define BEGIN_LAUNCH begin_launch(launch_before, launch_own, Letters{letters_x, letters_y, letters_x_step, letters_y_step, 0})
#else
#define LAUNCH_ARGUMENTS , const u32 *launch_before, u32 *launch_own
#define BEGIN_LAUNCH begin_launch(launch_before, launch_own)
#endif
struct Letters {
  const u16* x;  // the boxes of the kernel before, or null
  u16* y;
  u32 x_step, y_step;  // from one box to the other
  u32 turn;            // of the boxes
};

struct Launch {
  const u32* before;
  u32* own;
  u32 ready;
#if LETTERS
  Letters letters;
#endif
};
__shared__ Launch launch;

DEVICE u32 load_acquire_block(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"((u32)__cvta_generic_to_shared(p)) : "memory");
  return v;
}
DEVICE void store_release_block(u32* p, u32 v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(p)), "r"(v) : "memory");
}

// By all threads, before anything waits.
DEVICE void begin_launch(const u32* before, u32* own) {
  if (threadIdx.x == 0) launch = {before, own, before == nullptr};
  __syncthreads();
}
#if LETTERS
DEVICE void begin_launch(const u32* before, u32* own, Letters letters) {
  if (threadIdx.x == 0) launch = {before, own, before == nullptr, letters};
  __syncthreads();
}
DEVICE u32 box_of_replay() {
  if (!launch.own) return 0;
  u32 begun[1];
  load_relaxed(launch.own, begun);
  return begun[0] / LAUNCH_ROUND % 2;
}
DEVICE void leave_letter(int index, u16 bits) {
  if (!launch.letters.y) return;
  u16* const box = launch.letters.y + index;
  store_relaxed(box + launch.letters.turn * launch.letters.y_step, bits);
  store_relaxed(box + (launch.letters.turn ^ 1) * launch.letters.y_step, (u16)0xffff);
}
// This lane's pieces of x: one of the warp's is watched until it is there, then all.
template <int COUNT, class EXISTS, class PLACE> DEVICE void await_pieces(uint4 (&x)[COUNT], int lane, EXISTS exists, PLACE place) {
  Patience patience;
  u32 words[4];
  if (lane == 0 && exists(0))
    do {
      patience.poll();
      load_relaxed(place(0), words);
    } while (missing<true>(words));
  __syncwarp();
  bool there[COUNT], all;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    there[i] = !exists(i);
    if (there[i]) x[i] = make_uint4(0, 0, 0, 0);
  }
  do {
    patience.poll();
    u32 found[COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!there[i]) load_relaxed(place(i), found[i]);
    all = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!there[i]) {
        there[i] = !missing<true>(found[i]);
        all &= there[i];
        x[i] = make_uint4(found[i][0], found[i][1], found[i][2], found[i][3]);
      }
  } while (!all);
  __syncwarp();
}
#endif
// Whether this kernel runs beside its neighbours: after begin_launch.
DEVICE bool launches_overlap() { return launch.own; }
// Rings in turn, as in turns.cuh: a ticket of this SM, and the wait for whoever has the one before, or until the kernel before this one has
// ended: a thread block of this very launch may have that ticket. By one thread.
DEVICE bool await_turn_beside(u32* turns) {
  const u32 ticket = count_up(turns);
  if (!launch.before) return true;
  u32 done[1], now[1], begun[1];
  load_relaxed(launch.own, begun);
  Patience patience;
  do {
    patience.poll();
#if TURN_NAP
    asm volatile("nanosleep.u32 %0;" ::"n"(TURN_NAP));
#endif
    load_relaxed(turns + 1, done);
    load_relaxed(launch.before, now);
  } while ((int)(done[0] - ticket) < 0 && now[0] - (begun[0] & ~(LAUNCH_ROUND - 1)) < LAUNCH_ROUND);
  return now[0] - (begun[0] & ~(LAUNCH_ROUND - 1)) >= LAUNCH_ROUND;
}
// By whole warps; the last warp of the CTA must come here, too.
DEVICE void wait_for_inputs() {
  const u32 last = (blockDim.x - 1) / 32;
  if (threadIdx.x % 32 == 0 && !load_acquire_block(&launch.ready)) {
    Patience patience;
    if (threadIdx.x / 32 < last) {
      do {
        patience.poll();
        asm volatile("nanosleep.u32 50;");  // the kernel before this one needs the instructions
      } while (!load_acquire_block(&launch.ready));
    } else {
      u32 now, begun;
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(begun) : "l"(launch.own) : "memory");
      begun &= ~(LAUNCH_ROUND - 1);
      do {
        patience.poll();
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(launch.before) : "memory");
      } while (now - begun < LAUNCH_ROUND);
      store_release_block(&launch.ready, 1);
    }
  }
  __syncwarp();
}
// By thread 0 of a CTA whose results are all written, and seen by that thread (a barrier).
DEVICE void count_launch() {
  if (threadIdx.x || !launch.own) return;
  const u32 count = blockIdx.x || blockIdx.y ? 1 : LAUNCH_ROUND + 1 - gridDim.x * gridDim.y;
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(launch.own), "r"(count) : "memory");
}
