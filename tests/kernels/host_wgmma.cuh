// wgmma.cuh for a host (see host_cuda.cuh). A product is done as late as it may be, when a wait asks for it: a stage that is given
// back too early, or a sum that is read too early, shows.
#include <deque>
#include <functional>
DEVICE u64 matrix_descriptor(const void* p, u32 row_step) { return (u64)(uintptr_t)p >> 4 | (u64)(row_step >> 4) << 44; }
DEVICE void store_relaxed(uint4* p, uint4 v) {
  for (int i = 0; i < 4; i++) __atomic_store_n((u32*)p + i, ((const u32*)&v)[i], __ATOMIC_RELAXED);
}
struct Pending {  // of a thread
  std::deque<std::vector<std::function<void()>>> groups;
  std::vector<std::function<void()>> open;
};
static thread_local std::vector<Pending> pending;
DEVICE Pending& mine() {
  if (pending.size() < blockDim.x) pending.resize(blockDim.x);
  return pending[threadIdx.x];
}
DEVICE void wgmma_fence() {}
DEVICE void fence_for_products() {}
DEVICE void wgmma_commit() { Pending& p = mine(); p.groups.push_back(std::move(p.open)); p.open.clear(); }
template <int LEFT> static inline void wgmma_wait() {
  while ((int)mine().groups.size() > LEFT) {
    auto group = std::move(mine().groups.front());
    mine().groups.pop_front();
    for (auto& product : group) product();
  }
}
#ifndef FORMAT  // attention: rows of 128 swizzled bytes
struct Operand {  // a matrix in shared memory: bytes from 64 columns to the next, and where its values are
  const u8* base;
  int step;
  explicit Operand(u64 d) : base((const u8*)((d & ((1ull << 44) - 1)) << 4)), step((int)(d >> 44) << 4) {}
  float at(u64 offset) const {
    const u64 place = (u64)(uintptr_t)base + offset;
    return to_float(*(const u16*)(place ^ (place >> 7 & 7) << 4));
  }
  float by_input(int n, int k) const { return at(n / 8 * 1024 + n % 8 * 128 + 2 * k); }
  float by_column(int n, int k) const { return at((u64)(n / 64) * step + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2); }
};
DEVICE u64 swizzled_descriptor(const void* p, u32 step) { return matrix_descriptor(p, step); }
template <class Product> static inline void later(float* d, int columns, bool keep, Product product) {
  mine().open.push_back([=] {
    for (int i = 0; i < columns / 2; i++) {
      float sum = keep ? d[i] : 0;
      const int row = threadIdx.x % 32 / 4 + 8 * (i % 4 / 2), n = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) sum += product(row, n, k);
      d[i] = sum;
    }
  });
}
template <int COUNT> static inline void wgmma_shared(float (&d)[COUNT], u64 a, u64 b, bool keep) {
  const Operand left(a), right(b);
  const int first = threadIdx.x % 128 / 32 * 16;  // row of this warp
  later(d, 2 * COUNT, keep, [=](int row, int n, int k) { return left.by_input(first + row, k) * right.by_input(n, k); });
}
template <int COUNT> static inline void wgmma(float (&d)[COUNT], u64 a, u64 b) { wgmma_shared(d, a, b, true); }
template <int COUNT> static inline void wgmma_first(float (&d)[COUNT], u64 a, u64 b) { wgmma_shared(d, a, b, false); }
template <int COUNT> static inline void wgmma(float (&d)[COUNT], const u32 (&a)[4], u64 b) {
  const Operand right(b);
  const u64 own[4] = {a[0], a[1], a[2], a[3]};
  std::vector<u64> all(128);
  share(own, *(u64(*)[128])all.data());
  later(d, 2 * COUNT, true, [=](int row, int n, int k) {
    return to_float((u16)(all[32 * (row / 8 + 2 * (k / 8)) + row % 8 * 4 + k % 8 / 2] >> 16 * (k % 2))) * right.by_column(n, k);
  });
}
struct TensorMap { u64 address, sizes[3], strides[2], box[3], unused[7]; };  // strides in bytes
DEVICE void tensor_copy(void* to, const TensorMap& map, int x, int y, int z, u64* full) {
  give_way();
  if ((uintptr_t)to % 1024) fprintf(stderr, "a swizzled box is not aligned\n"), abort();
  u16* place = (u16*)to;
  for (u64 k = z; k < z + map.box[2]; k++)
    for (u64 j = y; j < y + map.box[1]; j++)
      for (u64 i = x; i < x + map.box[0]; i++, place++) {
        const bool inside = i < map.sizes[0] && j < map.sizes[1] && k < map.sizes[2];
        *(u16*)((u64)place ^ ((u64)place >> 7 & 7) << 4) = inside
            ? *(const u16*)(map.address + 2 * i + j * map.strides[0] + k * map.strides[1]) : 0;
      }
  barrier_of(full).bytes_and_parity -= 2 * (int)((u8*)place - (u8*)to);
  complete(barrier_of(full));
}
#else
// D += A · B: A in the registers of the warp, B in core matrices of 8 columns × 16 bytes, `step` bytes from 8 columns to the next.
template <class T> static inline void multiply(T* d, int columns, const u32* a, u64 b, bool keep) {
  constexpr int WORDS_OF_A = 4 + SPARSE, EACH = QUANTIZED || IN_PLANES ? 1 : 2;  // bytes of an input
  const u8* base = (const u8*)((b & ((1ull << 44) - 1)) << 4);
  const int step = (int)(b >> 44) << 4, lane = threadIdx.x % 32;
  u64 own[WORDS_OF_A], all[32 * WORDS_OF_A];
  for (int i = 0; i < WORDS_OF_A; i++) own[i] = a[i];
  share(own, all);
  for (int i = 0; i < columns / 2; i++) {
    const int row = lane / 4 + 8 * (i % 4 / 2), n = i / 4 * 8 + lane % 4 * 2 + i % 2;
    T sum = 0;
    for (int k = 0; k < 32 / EACH; k++) {
      const int byte = k * EACH;
      const u64 word = all[32 * (row / 8 + 2 * (byte / 16)) + row % 8 * 4 + byte % 16 / 4];
      int input = k;  // 2:4: which of four is kept. 8 bits: a word for a row and 32 inputs; 16 bits: for two rows and 16 inputs
      if (SPARSE && QUANTIZED) input = k / 2 * 4 + (all[128 + row % 8 * 4 + row / 8 + 2 * (k / 16)] >> 2 * (k % 16) & 3);
      if (SPARSE && !QUANTIZED) input = k / 2 * 4 + (all[128 + row % 8 * 4 + k / 8] >> (16 * (row / 8) + 2 * (k % 8)) & 3);
      const u8* x = base + n / 8 * step + input * EACH / 16 * 128 + n % 8 * 16 + input * EACH % 16;
      if (IN_PLANES) sum += (SYMMETRIC ? (int)(signed char)byte_at(word, k % 4) : (int)byte_at(word, k % 4)) * (int)*(const signed char*)x;
      else if (FORMAT == W8A8) sum += (int)(signed char)byte_at(word, k % 4) * (int)*(const signed char*)x;
      else if (FORMAT == FP8) sum += eighth(byte_at(word, k % 4)) * eighth(*x);
      else sum += to_float((u16)(word >> 16 * (k % 2))) * to_float(*(const u16*)x);
    }
    d[i] = keep ? d[i] + sum : sum;
  }
}
template <class T, int COUNT> static inline void later(T (&d)[COUNT], const u32 (&a)[4 + SPARSE], u64 b, bool keep) {
  mine().open.push_back([at = &d[0], words = std::vector<u32>(a, a + 4 + SPARSE), b, keep] {
    multiply(at, 2 * COUNT, words.data(), b, keep);
  });
}
template <class T, int COUNT> static inline void wgmma(T (&d)[COUNT], const u32 (&a)[4 + SPARSE], u64 b) { later(d, a, b, true); }
template <class T, int COUNT> static inline void wgmma_first(T (&d)[COUNT], const u32 (&a)[4 + SPARSE], u64 b, int keep) { later(d, a, b, keep); }
#endif
template <class T, int COUNT> static inline void keep_behind(T (&)[COUNT]) {}
template <int COUNT> static inline void give_registers() {}
template <int COUNT> static inline void take_registers() {}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* full) { copy_bytes(to, from, bytes, full, 0); }
DEVICE void prefetch_bulk(const void* from, u32 bytes) { std::vector<u8> there((const u8*)from, (const u8*)from + bytes); }
DEVICE void sleep_for(u32) {}

#ifdef CLUSTER
// ---- clusters: their CTAs are neighbours ----
struct Cluster { int arrived = 0; unsigned turn = 0; };
static Cluster clusters[64];
static u8* memory_of[64];
static thread_local std::vector<unsigned> turns;
DEVICE void cluster_arrive() {
  memory_of[blockIdx.x] = raw;
  if (turns.size() < blockDim.x) turns.resize(blockDim.x);
  Cluster& c = clusters[blockIdx.x / CLUSTER];
  turns[threadIdx.x] = __atomic_load_n(&c.turn, __ATOMIC_SEQ_CST);
  if (__atomic_add_fetch(&c.arrived, 1, __ATOMIC_SEQ_CST) == (int)blockDim.x * CLUSTER) {
    __atomic_store_n(&c.arrived, 0, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&c.turn, 1, __ATOMIC_SEQ_CST);
  }
}
DEVICE void cluster_wait() {
  while (__atomic_load_n(&clusters[blockIdx.x / CLUSTER].turn, __ATOMIC_SEQ_CST) == turns[threadIdx.x]) give_way();
}
DEVICE void store_in_cluster(void* place, int rank, uint4 v) {
  memcpy(memory_of[blockIdx.x / CLUSTER * CLUSTER + rank] + ((u8*)place - raw), &v, sizeof v);
}
DEVICE void send_in_cluster(void* place, u64* full, int rank, uint4 v) {
  store_in_cluster(place, rank, v);
  Barrier& there = barrier_of((u64*)(memory_of[blockIdx.x / CLUSTER * CLUSTER + rank] + ((u8*)full - raw)));
  const int left = __atomic_sub_fetch(&there.bytes_and_parity, 2 * (int)sizeof v, __ATOMIC_SEQ_CST);
  if (left >> 1 == 0) complete(there);  // several CTAs send at once: the last one alone sees that
}
#endif

// ---- 8 × 8 matrices of 16-bit values ----
DEVICE void store_matrices(u32 address, const u32 (&v)[4]) {
  const u64 own[1] = {address};
  u64 all[32];
  share(own, all);
  const int a = threadIdx.x % 32 / 4, b = threadIdx.x % 4 * 2;
  for (int m = 0; m < 4; m++) *(u16*)(raw + all[8 * m + b] + 2 * a) = v[m], *(u16*)(raw + all[8 * m + b + 1] + 2 * a) = v[m] >> 16;
  __syncwarp();
}
