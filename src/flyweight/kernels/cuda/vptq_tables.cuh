// The codebooks in shared memory: how they come there, and lookups. Of the residual book there are COPIES, so that lanes that read at
// once read from different banks: the copies of an entry follow each other.
//
// defines: those of vptq.cuh, WARPS (of a CTA), COPIES
#include "vptq.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr u32 RES_SLOTS = RES_BITS ? COPIES << RES_BITS : 0;
constexpr u32 BOOK_BYTES = 16 * PIECES * ENTRIES;
constexpr u32 RES_BYTES = 16 * PIECES * RES_SLOTS;

// Each lane looks an item up; as `load_matrices` spreads them, four registers have two items of one output each. The addresses are
// those of the book and of this lane's copy of the residual book.
DEVICE void gather(u32 (&a)[4], u32 v, u32 book, u32 residual) {
  uint4 q = load_matrices<true>(book + 16 * main_index(v));
  if constexpr (RES_BITS > 0) q = add8(q, load_matrices<true>(residual + 16 * COPIES * residual_index(v)));
  a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
}

// Every thread calls this before it waits for inputs, and `book_ready` after the __syncthreads that follows. CTAs begin at different
// places: not all at once in the same lines of L2. Before Hopper each thread copies its own words.
template <u32 BYTES = BOOK_BYTES> DEVICE void stage_book(char* to, const char* book, u64* barrier) {
  constexpr u32 PIECE = BYTES < 16384 ? BYTES : 16384, COUNT = BYTES / PIECE;
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    fence_barriers();
    copy_begin(barrier, BYTES, 0);
    for (u32 i = 0; i < COUNT; i++) {
      const u32 at = (i + blockIdx.x) % COUNT * PIECE;
      bulk_copy(to + at, book + at, PIECE, barrier);
    }
  }
#else
  const u32 first = blockIdx.x % COUNT * PIECE, shared = shared_address(to);
#pragma unroll 8
  for (u32 i = 16 * threadIdx.x; i < BYTES; i += 16 * THREADS) {
    const u32 at = first + i < BYTES ? first + i : first + i - BYTES;
    copy16(shared + at, book + at);
  }
  copy_group();
#endif
}
// The residual book on its way to shared memory: held while other loads start, so that their latencies overlap.
struct Residual {
  static constexpr int COUNT = RES_BITS ? PIECES << RES_BITS : 0;
  uint4 held[COUNT / THREADS + 1];
  DEVICE void load(const uint4* residual) {
#pragma unroll
    for (int i = 0; i <= COUNT / THREADS; i++)
      if ((int)threadIdx.x + i * THREADS < COUNT) held[i] = residual[threadIdx.x + i * THREADS];
  }
  DEVICE void store(char* to) const {  // neighbours begin with different copies: no two in one bank
#pragma unroll
    for (int i = 0; i <= COUNT / THREADS; i++)
      for (int c = 0; c < COPIES; c++)
        if ((int)threadIdx.x + i * THREADS < COUNT)
          ((uint4*)to)[(threadIdx.x + i * THREADS) * COPIES + (c + threadIdx.x) % COPIES] = held[i];
  }
};
DEVICE void book_ready(u64* barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier, 0);
#else
  copy_wait<0>();
  __syncthreads();
#endif
}

