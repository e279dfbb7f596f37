// The thread blocks of one cluster: a barrier for all their threads, and reads of each other's
// shared memory (`raw`, the dynamic part). With CLUSTER 1 a cluster is a plain block, on any GPU.
DEVICE void cluster_sync() {  // all threads of all blocks, with what they have written
#if CLUSTER == 1
  __syncthreads();
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
DEVICE u32 cluster_address(const void* place, int rank) {
  u32 there = shared_address(place);
#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
#endif
  return there;
}
DEVICE u32 load_in_cluster(const u32* place, int rank) {
#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(v) : "r"(cluster_address(place, rank)) : "memory");
  return v;
#else
  return *place;
#endif
}
DEVICE u64 load_in_cluster(const u64* place, int rank) {
#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];"
               : "=l"(v) : "r"(cluster_address(place, rank)) : "memory");
  return v;
#else
  return *place;
#endif
}
