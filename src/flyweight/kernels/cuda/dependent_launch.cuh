// Programmatic dependent launch where the hardware has none (before Hopper): a kernel is launched beside the one before it, fetches
// its first weights, and waits for that one's results here. kernels/dependent_launch.py says why this is safe.
//
// Each launch of a graph has a counter of its own, which LAUNCH_ROUND more tell that all its CTAs have ended. So a CTA that has not ended
// yet reads from its own counter how many times the graph has run, and waits until the counter before it is one LAUNCH_ROUND ahead: nothing
// is ever reset, and counters may wrap. Null pointers: nothing to wait for, nobody to tell.
//
// One lane of the CTA's last warp polls memory, the other warps a word in shared memory.
#include "patience.cuh"
#define LAUNCH_ARGUMENTS , const u32 *launch_before, u32 *launch_own
constexpr u32 LAUNCH_ROUND = 1024;  // at least as many as a launch has CTAs

struct Launch {
  const u32* before;
  u32* own;
  u32 ready;
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
// Whether this kernel runs beside its neighbours: after begin_launch.
DEVICE bool launches_overlap() { return launch.own; }
// Whether all inputs are there.
DEVICE bool nothing_in_front() { return !launch.before; }
// Rings in turn, as in turns.cuh: a ticket of this SM, and the wait for whoever has the one before, or until the kernel before this one has
// ended: a thread block of this very launch may have that ticket. By one thread.
DEVICE void await_turn_beside(u32* turns) {
  const u32 ticket = count_up(turns);
  if (!launch.before) return;
  u32 done[1], now[1], begun[1];
  load_relaxed(launch.own, begun);
  Patience patience;
  do {
    patience.poll();
    load_relaxed(turns + 1, done);
    load_relaxed(launch.before, now);
  } while ((int)(done[0] - ticket) < 0 && now[0] - (begun[0] & ~(LAUNCH_ROUND - 1)) < LAUNCH_ROUND);
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
