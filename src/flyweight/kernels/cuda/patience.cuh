// A wait for other CTAs of the grid that has an end. All of them are on the GPU at once by plan (docs/kernels.md); where that should
// fail, a kernel that waits for ever would take the GPU with it. So the clock is looked at every 16,384 polls, some milliseconds, and
// after ten seconds the wait ends in a trap, with a word left for the host that says which kernel it was (kernels/stall.py).
//
// One register: polls in the low 14 bits, and above them the clock (units of 2^28 ns) when they were first full, with its top bit set.
#if !defined(ON_THE_HOST) && !defined(PATIENCE)
#define PATIENCE
__device__ u32* stalled;  // in the host's memory, which outlives the trap; null where nobody asked

struct Patience {
  static constexpr u32 UNITS = 38;  // of 0.27 seconds
  u32 state = 0;
  DEVICE void poll() {
    if ((++state & 16383) == 0) look();
  }
  DEVICE void look() {
    u64 nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    const u32 now = (u32)(nanoseconds >> 28) & 0x1ffff, begun = (state >> 14) - 1;
    if (begun == 0) {
      state = (now | 0x20000) << 14;
      return;
    }
    state -= 1 << 14;
    if ((now - begun & 0x1ffff) < UNITS) return;
    if (stalled) {
      *(volatile u32*)stalled = blockIdx.x + 1;
      __threadfence_system();
    }
    asm volatile("trap;");
  }
};
#endif
