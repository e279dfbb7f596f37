// Hopper's warpgroup matrix product: D[64 × N] += A[64 × 32 bytes] · B[32 bytes × N], A in registers, B in shared memory.
//
// A lane's four words of A are those of mma.sync: rows g and g + 8 of its warp's 16, twice. B lies as 8 × 16-byte core
// matrices of 128 contiguous bytes, not swizzled: `row_step` bytes from one group of 8 columns of D to the next, 128 from
// one 16 bytes of the inner dimension to the next. Only sm_90a has it.
DEVICE u64 matrix_descriptor(const void* p, u32 row_step) {
  return (u64)(shared_address(p) >> 4 & 0x3fff) | (u64)(128 >> 4) << 16 | (u64)(row_step >> 4 & 0x3fff) << 32;
}
// Or as rows of 128 bytes, the way tensor copies leave them: the 16 bytes at an address are found where its bits 4 to 6 are
// turned over by its bits 7 to 9. `step`: bytes from 64 columns of D to the next 64, where these lie in a row.
DEVICE u64 swizzled_descriptor(const void* p, u32 step) {
  return (u64)(shared_address(p) >> 4 & 0x3fff) | (u64)(step >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Lists of operands: names in the instruction, and the registers bound to them.
#define N0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define N1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define N2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define N3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define N4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define N5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define N6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define N7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define N8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define N9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define N10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define N11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define N12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define N13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define N14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define N15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define NAMES_4 "%0,%1,%2,%3"
#define NAMES_8 N0
#define NAMES_16 N0 "," N1
#define NAMES_32 NAMES_16 "," N2 "," N3
#define NAMES_48 NAMES_32 "," N4 "," N5
#define NAMES_64 NAMES_48 "," N6 "," N7
#define NAMES_80 NAMES_64 "," N8 "," N9
#define NAMES_96 NAMES_80 "," N10 "," N11
#define NAMES_112 NAMES_96 "," N12 "," N13
#define NAMES_128 NAMES_64 "," N8 "," N9 "," N10 "," N11 "," N12 "," N13 "," N14 "," N15
#define BIND_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define BIND_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define BIND_16(c, i) BIND_8(c, i), BIND_8(c, i + 8)
#define BIND_32(c, i) BIND_16(c, i), BIND_16(c, i + 16)
#define BIND_48(c, i) BIND_32(c, i), BIND_16(c, i + 32)
#define BIND_64(c, i) BIND_32(c, i), BIND_32(c, i + 32)
#define BIND_80(c, i) BIND_64(c, i), BIND_16(c, i + 64)
#define BIND_96(c, i) BIND_80(c, i), BIND_16(c, i + 80)
#define BIND_112(c, i) BIND_96(c, i), BIND_16(c, i + 96)
#define BIND_128(c, i) BIND_64(c, i), BIND_64(c, i + 64)
#define WGMMA(NAME, N, COUNT, TYPE, BIND, SHAPE, KINDS, KEEP, FLAGS, A0, A1, A2, A3, B)                                  \
  DEVICE void NAME(TYPE (&d)[COUNT], const u32 (&a)[4], u64 b) {                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N SHAPE KINDS " {" NAMES_##COUNT "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
                 "}, %" #B KEEP FLAGS ";" : BIND_##COUNT(BIND, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
// D new where `keep` is 0: a number that the compiler does not know, or it would take other registers for D.
#define WGMMA_FIRST(N, COUNT, TYPE, BIND, SHAPE, KINDS, FLAGS, A0, A1, A2, A3, B, KEEP)                                  \
  DEVICE void wgmma_first(TYPE (&d)[COUNT], const u32 (&a)[4], u64 b, int keep) {                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE KINDS " {"  \
                 NAMES_##COUNT "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p" FLAGS ";\n}"                      \
                 : BIND_##COUNT(BIND, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));               \
  }
// Twice as many inputs, of which A has two of four neighbours; the fifth word says which.
#define WGMMA_SPARSE(N, COUNT, TYPE, BIND, SHAPE, KINDS, FLAGS, A0, A1, A2, A3, B, E)                                    \
  DEVICE void wgmma(TYPE (&d)[COUNT], const u32 (&a)[5], u64 b) {                                                        \
    asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #N SHAPE KINDS " {" NAMES_##COUNT "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
                 "}, %" #B ", %" #E ", 0, 1" FLAGS ";"                                                                   \
                 : BIND_##COUNT(BIND, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(a[4]));               \
  }
#define FLOATS(v) "+f"(v)
#define NEW_FLOATS(v) "=f"(v)
#define INTEGERS(v) "+r"(v)
#if FP16
#define HALF_TYPES ".f32.f16.f16"
#else
#define HALF_TYPES ".f32.bf16.bf16"
#endif
#define EIGHTHS ".f32.e4m3.e4m3"
#ifndef FORMAT  // attention: A of scores in shared memory; B of results has its columns, not its inputs, side by side
#define SCORES(N, COUNT, A, B)                                                                                           \
  WGMMA_SHARED(wgmma_first, N, COUNT, NEW_FLOATS, ", 0", A, B)                                                           \
  WGMMA_SHARED(wgmma, N, COUNT, FLOATS, ", 1", A, B)
#define WGMMA_SHARED(NAME, N, COUNT, BIND, KEEP, A, B)                                                                   \
  DEVICE void NAME(float (&d)[COUNT], u64 a, u64 b) {                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16" HALF_TYPES " {" NAMES_##COUNT "}, %" #A ", %" #B KEEP ", 1, 1, 0, 0;" \
                 : BIND_##COUNT(BIND, 0) : "l"(a), "l"(b));                                                              \
  }
SCORES(64, 32, 32, 33)
SCORES(96, 48, 48, 49)
SCORES(128, 64, 64, 65)
SCORES(160, 80, 80, 81)
WGMMA(wgmma, 64, 32, float, FLOATS, "k16", HALF_TYPES, ", 1", ", 1, 1, 1", 32, 33, 34, 35, 36)
WGMMA(wgmma, 128, 64, float, FLOATS, "k16", HALF_TYPES, ", 1", ", 1, 1, 1", 64, 65, 66, 67, 68)
#define ALL(N, COUNT, A0, A1, A2, A3, B, E)
#elif SPARSE
#define ALL(N, COUNT, A0, A1, A2, A3, B, E)                                                \
  WGMMA_SPARSE(N, COUNT, float, FLOATS, "k32", HALF_TYPES, ", 1, 1, 0", A0, A1, A2, A3, B, E) \
  WGMMA_SPARSE(N, COUNT, int, INTEGERS, "k64", ".s32.s8.s8", "", A0, A1, A2, A3, B, E)
#elif FORMAT == FP8
#define ALL(N, COUNT, A0, A1, A2, A3, B, E)                                                          \
  WGMMA(wgmma, N, COUNT, float, FLOATS, "k32", EIGHTHS, ", 1", ", 1, 1", A0, A1, A2, A3, B)          \
  WGMMA_FIRST(N, COUNT, float, FLOATS, "k32", EIGHTHS, ", 1, 1", A0, A1, A2, A3, B, E)
#elif IN_PLANES
#if SYMMETRIC
#define CODES ".s32.s8.s8"
#else
#define CODES ".s32.u8.s8"
#endif
#define ALL(N, COUNT, A0, A1, A2, A3, B, E)                                                     \
  WGMMA(wgmma, N, COUNT, int, INTEGERS, "k32", CODES, ", 1", "", A0, A1, A2, A3, B)      \
  WGMMA_FIRST(N, COUNT, int, INTEGERS, "k32", CODES, "", A0, A1, A2, A3, B, E)
#else
#define ALL(N, COUNT, A0, A1, A2, A3, B, E)                                                \
  WGMMA(wgmma, N, COUNT, float, FLOATS, "k16", HALF_TYPES, ", 1", ", 1, 1, 0", A0, A1, A2, A3, B) \
  WGMMA(wgmma, N, COUNT, int, INTEGERS, "k32", ".s32.s8.s8", ", 1", "", A0, A1, A2, A3, B)
#endif
ALL(8, 4, 4, 5, 6, 7, 8, 9)
ALL(16, 8, 8, 9, 10, 11, 12, 13)
ALL(32, 16, 16, 17, 18, 19, 20, 21)
ALL(64, 32, 32, 33, 34, 35, 36, 37)
ALL(128, 64, 64, 65, 66, 67, 68, 69)
ALL(160, 80, 80, 81, 82, 83, 84, 85)
ALL(192, 96, 96, 97, 98, 99, 100, 101)
ALL(224, 112, 112, 113, 114, 115, 116, 117)
ALL(256, 128, 128, 129, 130, 131, 132, 133)

// The compiler must not touch sums before the products are done; it would then do the products one by one.
template <int COUNT> DEVICE void keep_behind(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int COUNT> DEVICE void keep_behind(int (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(acc[i])::"memory");
}
DEVICE void store_relaxed(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Between warps: registers that producers do not need. Between the CTAs of a cluster: a barrier, and stores to each other.
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void store_in_cluster(void* place, int rank, uint4 v) {
  u32 to;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(place)), "r"(rank));
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void send_in_cluster(void* place, u64* full, int rank, uint4 v) {  // the same; its bytes complete on the barrier there
  u32 to, barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(place)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(full)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}
DEVICE void prefetch_bulk(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE void sleep_for(u32 nanoseconds) { __nanosleep(nanoseconds); }
// A box of a tensor in global memory; the host has described both (jit.tensor_map). Kernels take the description by value.
struct __align__(64) TensorMap { u64 words[16]; };
DEVICE void tensor_copy(void* to, const TensorMap& map, int x, int y, int z, u64* full) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(full)) : "memory");
}
// What threads have written to shared memory, the matrix units and copies see from here on.
DEVICE void fence_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void store_matrices(u32 address, const u32 (&v)[4]) {  // transposed; lane i has the address of row i % 8 of matrix i / 8
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
