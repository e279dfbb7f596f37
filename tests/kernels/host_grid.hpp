// How a host runs a grid: host_grid.cpp, which is compiled once for all kernels. A CTA is a thread of the host, its CUDA threads
// are fibers of that; a fiber gives way wherever threads wait for each other. CTAs run at the same time, as on a GPU.
#include <cstdint>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#pragma GCC visibility push(hidden)  // each kernel's library has its own
struct Meeting { int arrived; unsigned turn; };
struct Index { u32 x, y, z; };
struct Cta {
  int at;  // the fiber that runs
  long long waits;
  Meeting all, named[16];
  Meeting* warps;
  u64* exchange[6];  // of each thread, for what a warp does together
};
extern __thread Cta* cta;
extern __thread Index threadIdx, blockIdx;
extern Index gridDim, blockDim;

void pause_fiber();  // the others run, until it is this one's turn again
// `kernel` takes its arguments from their addresses. 0, or a line of the source that used a misaligned address
int run_grid(void (*kernel)(void** args), int x, int y, int block, void** args);
#pragma GCC visibility pop
