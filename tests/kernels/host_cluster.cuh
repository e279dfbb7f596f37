// cluster.cuh for a host (see host_cuda.cuh): the CTAs of a cluster are neighbours.
#include <thread>
struct Cluster { int arrived = 0; unsigned turn = 0; };
static Cluster clusters[256];
static u8* memory_of[256];
static thread_local std::vector<unsigned> turns;
DEVICE void cluster_sync() {
  memory_of[blockIdx.x] = raw;
  if (turns.size() < blockDim.x) turns.resize(blockDim.x);
  Cluster& c = clusters[blockIdx.x / CLUSTER];
  turns[threadIdx.x] = __atomic_load_n(&c.turn, __ATOMIC_SEQ_CST);
  if (__atomic_add_fetch(&c.arrived, 1, __ATOMIC_SEQ_CST) == (int)blockDim.x * CLUSTER) {
    __atomic_store_n(&c.arrived, 0, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&c.turn, 1, __ATOMIC_SEQ_CST);
  }
  while (__atomic_load_n(&c.turn, __ATOMIC_SEQ_CST) == turns[threadIdx.x])
    std::this_thread::yield(), give_way();
}
template <class T> static inline T load_in_cluster(const T* place, int rank) {
  T v;
  memcpy(&v, memory_of[blockIdx.x / CLUSTER * CLUSTER + rank] + ((u8*)place - raw), sizeof v);
  return v;
}
