// common.cuh for a host: the kernels' own sources, compiled by a C++ compiler and run on a CPU.
//
// host_grid.hpp comes before it: a CTA is a thread of the host, its CUDA threads are fibers of that. So `__shared__` is
// thread_local. What common.cuh does with instructions is done here in plain C++, with the registers of a warp laid out as the
// PTX ISA says. Copies check their alignment; a warp or CTA that waits for ever is reported. What this cannot show: dependent
// launches, and what memory does without fences.
#ifndef COMMON
#define COMMON
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#ifndef FP16
#define FP16 0
#endif
#define __CUDA_ARCH__ 900
#define DEVICE inline  // not static: some are members
#define __global__
#define __grid_constant__
#define __device__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local
#define LOWEST (-INFINITY)
#define ON_THE_HOST
struct Patience { void poll() {} };  // give_way counts

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float3 make_float3(float x, float y, float z) { return {x, y, z}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE int min(int a, int b) { return a < b ? a : b; }
DEVICE int max(int a, int b) { return a > b ? a : b; }
template <class To, class From> static inline To bits_of(From v) { To r; static_assert(sizeof r == sizeof v); memcpy(&r, &v, sizeof r); return r; }
DEVICE u32 __float_as_uint(float v) { return bits_of<u32>(v); }
DEVICE int __float_as_int(float v) { return bits_of<int>(v); }
DEVICE float __uint_as_float(u32 v) { return bits_of<float>(v); }
DEVICE float __int_as_float(int v) { return bits_of<float>(v); }
DEVICE float rsqrtf(float v) { return 1.f / sqrtf(v); }
#define __expf expf
#define __logf logf
DEVICE float __fdividef(float a, float b) { return a / b; }
DEVICE float exp2_fast(float v) { return exp2f(v); }
DEVICE float log2_fast(float v) { return log2f(v); }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE u32 __vmaxu2(u32 a, u32 b) { return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16; }
DEVICE u32 __vmaxu4(u32 a, u32 b) {
  u32 r = 0;
  for (int i = 0; i < 32; i += 8) r |= std::max(a >> i & 255, b >> i & 255) << i;
  return r;
}
DEVICE u32 and_or(u32 a, u32 b, u32 c) { return a & b | c; }
DEVICE u32 and_xor(u32 a, u32 b, u32 c) { return a & b ^ c; }
DEVICE int dot_lower(u32 pair, u32 four, int sum) {
  return (int)((u32)sum + (u32)((int)(short)pair * (int)(four & 255)) + (u32)((int)(short)(pair >> 16) * (int)(four >> 8 & 255)));
}
DEVICE int dot_upper(u32 pair, u32 four, int sum) { return dot_lower(pair, four >> 16, sum); }
DEVICE int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
DEVICE u32 __byte_perm(u32 a, u32 b, u32 order) {
  const u64 all = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(all >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
DEVICE u32 __funnelshift_r(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> (by & 31)); }
DEVICE u32 bytes_or_signs(u32 a, u32 b, u32 order) {
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 byte = __byte_perm(a, b, order >> 4 * i & 7) & 255;
    r |= (order >> 4 * i & 8 ? byte >> 7 ? 255 : 0 : byte) << 8 * i;
  }
  return r;
}

// ---- the threads of a CTA ----
DEVICE void give_way() {
  if (++cta->waits > 400'000'000) fprintf(stderr, "CTA %u, %u waits for ever (thread %d)\n", blockIdx.x, blockIdx.y, cta->at), abort();
  pause_fiber();
}
DEVICE void meet(Meeting& m, int count) {
  const unsigned turn = m.turn;
  if (++m.arrived == count) m.arrived = 0, m.turn++;
  else while (m.turn == turn) give_way();
}
DEVICE void __syncthreads() { meet(cta->all, blockDim.x); }
DEVICE void __syncwarp() { meet(cta->warps[threadIdx.x / 32], 32); }
DEVICE void named_barrier(int id, int threads) { meet(cta->named[id], threads); }
DEVICE void named_arrive(int id, int threads) {
  Meeting& m = cta->named[id];
  if (++m.arrived == threads) m.arrived = 0, m.turn++;
}
DEVICE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// What every lane of the warp gives, as all of them see it: value i of lane l is found[l + 32 · i].
template <int COUNT> static inline void share(const u64 (&mine)[COUNT], u64 (&found)[32 * COUNT]) {
  const int first = threadIdx.x / 32 * 32;
  for (int i = 0; i < COUNT; i++) cta->exchange[i][threadIdx.x] = mine[i];
  __syncwarp();
  for (int i = 0; i < COUNT; i++) memcpy(found + 32 * i, &cta->exchange[i][first], 32 * sizeof(u64));
  __syncwarp();
}
template <class T> static inline T from_lane(T v, int lane) {
  u64 mine[1] = {}, found[32];
  memcpy(mine, &v, sizeof v);
  share(mine, found);
  memcpy(&v, &found[lane], sizeof v);
  return v;
}
template <class T> static inline T __shfl_xor_sync(u32, T v, int mask) { return from_lane(v, threadIdx.x % 32 ^ mask); }
template <class T> static inline T __shfl_sync(u32, T v, int lane) { return from_lane(v, lane & 31); }
template <class T> static inline T __shfl_up_sync(u32, T v, int by) {
  const int lane = threadIdx.x % 32;
  return from_lane(v, lane < by ? lane : lane - by);
}
DEVICE bool __any_sync(u32, bool v) {
  const u64 mine[1] = {v};
  u64 found[32], any = 0;
  share(mine, found);
  for (u64 one : found) any |= one;
  return any;
}
DEVICE u32 __ballot_sync(u32, bool v) {
  const u64 mine[1] = {v};
  u64 found[32];
  u32 all = 0;
  share(mine, found);
  for (int i = 0; i < 32; i++) all |= (u32)found[i] << i;
  return all;
}
DEVICE int __popc(u32 v) { return __builtin_popcount(v); }
DEVICE int __ffs(u32 v) { return __builtin_ffs((int)v); }
DEVICE u32 __reduce_max_sync(u32, u32 v) {
  const u64 mine[1] = {v};
  u64 found[32];
  share(mine, found);
  return (u32)*std::max_element(found, found + 32);
}
DEVICE int __reduce_add_sync(u32, int v) {
  const u64 mine[1] = {(u32)v};
  u64 found[32];
  share(mine, found);
  u32 sum = 0;
  for (u64 one : found) sum += (u32)one;
  return (int)sum;
}
template <class... A, size_t... I> static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(A*)args[I]...);
}
template <class... A> static void call_with(void (*kernel)(A...), void** args) { call(kernel, args, std::index_sequence_for<A...>()); }

// ---- 16-bit and 8-bit floats ----
#ifdef __x86_64__
// by the compiler's own names: the header of the others takes longer to read than most kernels to compile
typedef short Half8 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));
DEVICE float from_half(u16 v) { return __builtin_ia32_vcvtph2ps(Half8{(short)v})[0]; }
DEVICE u16 to_half(float f) { return __builtin_ia32_vcvtps2ph(Float4{f}, 0)[0]; }
#else
DEVICE float from_half(u16 v) { __fp16 h; memcpy(&h, &v, 2); return h; }
DEVICE u16 to_half(float f) { const __fp16 h = f; u16 v; memcpy(&v, &h, 2); return v; }
#endif
template <bool HALF> static inline float float_of(u16 v) { return HALF ? from_half(v) : __uint_as_float((u32)v << 16); }
template <bool HALF> static inline u16 bits16(float f) {
  if (HALF) return to_half(f);
  const u32 v = __float_as_uint(f);
  return f != f ? 0x7fff : (u16)((v + 0x7fff + (v >> 16 & 1)) >> 16);
}
template <bool HALF> static inline u32 pack_as(float low, float high) { return bits16<HALF>(low) | (u32)bits16<HALF>(high) << 16; }
DEVICE u32 pack2(float low, float high) { return bits16<FP16>(low) | (u32)bits16<FP16>(high) << 16; }
DEVICE float to_float(u16 v) { return float_of<FP16>(v); }
DEVICE float low_float(u32 pair) { return to_float((u16)(pair & 0xffff)); }
DEVICE float high_float(u32 pair) { return to_float((u16)(pair >> 16)); }
DEVICE u32 add2(u32 a, u32 b) { return pack2(low_float(a) + low_float(b), high_float(a) + high_float(b)); }
DEVICE u32 mul2(u32 a, u32 b) { return pack2(low_float(a) * low_float(b), high_float(a) * high_float(b)); }
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  return pack2(fmaf(low_float(a), low_float(b), low_float(c)), fmaf(high_float(a), high_float(b), high_float(c)));
}
DEVICE u16 to_bits(float f) { return bits16<FP16>(f); }
DEVICE u32 to_int8(float f) { return (u32)(int)fminf(fmaxf(rintf(f), -128.f), 127.f); }
DEVICE float quotient(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(fmaf(-q, b, a), inverse, q);
}
DEVICE float eighth(u32 code) {  // e4m3
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float v = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return code & 128 ? -v : v;
}
DEVICE u32 to_eighth(float f) {  // to nearest, ties to the even code, saturated
  u32 best = 0;
  for (u32 code = 1; code < 127; code++) {
    const float now = fabsf(fabsf(f) - eighth(code)), before = fabsf(fabsf(f) - eighth(best));
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best | (f < 0 ? 128 : 0);
}
DEVICE u32 to_float8(float low, float high) { return to_eighth(low) | to_eighth(high) << 8; }
DEVICE u32 float8_pair(u32 codes) { return pack_as<true>(eighth(codes & 255), eighth(codes >> 8 & 255)); }
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  auto one = [](u32 x, u32 y, u32 z) { return fmaf(float_of<true>((u16)x), float_of<true>((u16)y), float_of<true>((u16)z)); };
  return pack_as<true>(one(a, b, c), one(a >> 16, b >> 16, c >> 16));
}
DEVICE u32 add_halves(u32 a, u32 b) {
  return pack_as<true>(from_half(a & 0xffff) + from_half(b & 0xffff), from_half(a >> 16) + from_half(b >> 16));
}

DEVICE u32 widen_float8(u32 codes) {
  const u32 high = codes << 8;
  return mul2((high & 0x7f007f00) >> (FP16 ? 1 : 4) | (high & 0x80008000), FP16 ? 0x5c005c00 : 0x7b807b80);
}

// ---- matrix units. Lane (g, t) has rows g and g + 8 of A (registers 0, 2 and 1, 3), column g of B; D's columns 2 t, 2 t + 1 ----
static inline u32 byte_at(u64 word, int i) { return word >> 8 * i & 255; }
struct Operands { u64 found[32 * 9]; };
template <class Product, class T> static inline void each_output(T (&d)[4], Product product) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) d[i] += product(lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
}
template <bool HALF> static inline void mma16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u64 mine[6] = {a0, a1, a2, a3, b0, b1};
  u64 all[192];
  share(mine, all);
  each_output(d, [&](int row, int column) {
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const u64 a = all[32 * (row / 8 + 2 * (k / 8)) + row % 8 * 4 + k % 8 / 2], b = all[32 * (4 + k / 8) + column * 4 + k % 8 / 2];
      sum += float_of<HALF>(a >> 16 * (k % 2)) * float_of<HALF>(b >> 16 * (k % 2));
    }
    return sum;
  });
}
template <class T, class Value> static inline void mma32_bytes(T (&d)[4], uint4 a, u32 b0, u32 b1, Value value) {
  const u64 mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
  u64 all[192];
  share(mine, all);
  each_output(d, [&](int row, int column) {
    T sum = 0;
    for (int k = 0; k < 32; k++)
      sum += value(byte_at(all[32 * (row / 8 + 2 * (k / 16)) + row % 8 * 4 + k % 16 / 4], k % 4),
                   byte_at(all[32 * (4 + k / 16) + column * 4 + k % 16 / 4], k % 4));
    return sum;
  });
}
template <bool UNSIGNED> static inline void mma32(int (&d)[4], uint4 a, u32 b0, u32 b1) {
  mma32_bytes(d, a, b0, b1, [](u32 x, u32 y) { return (UNSIGNED ? (int)x : (int)(signed char)x) * (int)(signed char)y; });
}
DEVICE void mma32_float8(float (&d)[4], uint4 a, u32 b0, u32 b1) {
  mma32_bytes(d, a, b0, b1, [](u32 x, u32 y) { return eighth(x) * eighth(y); });
}
template <bool UNSIGNED> static inline void mma64_sparse(int (&d)[4], uint4 kept, u32 which, uint4 b) {
  const u64 mine[5] = {kept.x | (u64)kept.y << 32, kept.z | (u64)kept.w << 32, which, b.x | (u64)b.y << 32, b.z | (u64)b.w << 32};
  u64 all[160];
  share(mine, all);
  each_output(d, [&](int row, int column) {
    int sum = 0;
    for (int k = 0; k < 32; k++) {  // kept: two of each four of 64
      const int code = byte_at(all[32 * (k / 16) + row % 8 * 4 + k % 16 / 4], 4 * (row / 8) + k % 4);
      const int place = all[64 + row % 8 * 4 + row / 8 + 2 * (k / 16)] >> 2 * (k % 16) & 3;
      const int input = k / 2 * 4 + place;
      const int x = (signed char)byte_at(all[96 + 32 * (input / 32) + column * 4 + input % 16 / 4], 4 * (input / 16 % 2) + input % 4);
      sum += (UNSIGNED ? code : (int)(signed char)code) * x;
    }
    return sum;
  });
}

template <bool HALF> static inline void mma32_sparse(float (&d)[4], uint4 kept, u32 which, uint4 b) {
  const u64 mine[6] = {kept.x | (u64)kept.y << 32, kept.z | (u64)kept.w << 32, which, b.x | (u64)b.y << 32, b.z | (u64)b.w << 32, 0};
  u64 all[192];
  share(mine, all);
  each_output(d, [&](int row, int column) {
    float sum = 0;
    for (int k = 0; k < 16; k++) {  // kept: two of each four of 32
      const u64 word = all[32 * (k / 8) + row % 8 * 4 + k % 8 / 2] >> 32 * (row / 8);
      const int input = k / 2 * 4 + (all[64 + row % 8 * 4 + k / 8] >> (16 * (row / 8) + 2 * (k % 8)) & 3);
      const u64 x = all[96 + 32 * (input / 16) + column * 4 + input % 8 / 2] >> 32 * (input / 8 % 2);
      sum += float_of<HALF>(word >> 16 * (k % 2)) * float_of<HALF>(x >> 16 * (input % 2));
    }
    return sum;
  });
}

DEVICE u32 transpose8(u32 pair) {  // an 8 × 8 matrix of 16-bit values in the registers of a warp
  const u64 own[1] = {pair};
  u64 all[32];
  share(own, all);
  const int a = threadIdx.x % 32 / 4, b = threadIdx.x % 4 * 2;
  auto at = [&](int row, int col) { return (u32)(all[row * 4 + col / 2] >> 16 * (col % 2) & 0xffff); };
  return at(b, a) | at(b + 1, a) << 16;
}

// ---- barriers: expected arrivals, those missing, the phase's parity; bytes on their way. Only one host thread uses one ----
struct Barrier { u16 expected, missing; int bytes_and_parity; };
DEVICE Barrier& barrier_of(u64* b) { return *(Barrier*)b; }
DEVICE void complete(Barrier& b) {
  if (b.missing == 0 && b.bytes_and_parity >> 1 == 0) b.missing = b.expected, b.bytes_and_parity ^= 1;
}
DEVICE void barrier_init(u64* b, u32 count) { barrier_of(b) = {(u16)count, (u16)count, 0}; }
DEVICE void fence_barriers() {}
DEVICE void barrier_arrive(u64* b) {
  if (barrier_of(b).missing-- == 0) fprintf(stderr, "one arrival too many\n"), abort();
  complete(barrier_of(b));
}
DEVICE void barrier_wait(u64* b, u32 parity) {
  while ((barrier_of(b).bytes_and_parity & 1) == (int)parity) give_way();
}
#define COPY_ARRIVALS 1
DEVICE void copy_begin(u64* full, u32 bytes, int lane) {
  if (lane == 0) barrier_of(full).bytes_and_parity += 2 * (int)bytes, barrier_arrive(full);
}
DEVICE void copy_own(void* to, const void* from, u32 bytes, u64* full) {
  give_way();
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) fprintf(stderr, "a bulk copy is not aligned\n"), abort();
  memcpy(to, from, bytes);
  barrier_of(full).bytes_and_parity -= 2 * (int)bytes;
  complete(barrier_of(full));
}
DEVICE void copy_bytes(void* to, const void* from, u32 bytes, u64* full, int lane) {
  if (lane == 0) copy_own(to, from, bytes, full);
}
DEVICE void copy_end(u64*) {}
DEVICE void copy_piece(void* to, const void* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fprintf(stderr, "a copy of 16 bytes is not aligned\n"), abort();
  memcpy(to, from, 16);
}
DEVICE void copy_arrive(u64* full) { barrier_arrive(full); }
DEVICE void prefetch_l2(const void*) {}

// ---- between CTAs ----
DEVICE void store_relaxed(u16* p, u16 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE void store_relaxed(float* p, float v) { __atomic_store_n((u32*)p, __float_as_uint(v), __ATOMIC_RELAXED); }
template <int COUNT> static inline void store_relaxed(float* p, const float (&v)[COUNT]) {
  for (int i = 0; i < COUNT; i++) store_relaxed(p + i, v[i]);
}
DEVICE void store_release(int* p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE int load_acquire(const int* p) {
  give_way();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <int WORDS> static inline void load_relaxed(const void* p, u32 (&w)[WORDS]) {
  give_way();
  for (int i = 0; i < WORDS; i++) w[i] = __atomic_load_n((const u32*)p + i, __ATOMIC_RELAXED);
}
template <bool SIXTEEN, int WORDS> static inline bool missing(const u32 (&words)[WORDS]) {
  bool any = false;
  for (int i = 0; i < WORDS; i++) any |= SIXTEEN ? (words[i] & 0xffff) == 0xffff || words[i] >= 0xffff0000u : words[i] == ~0u;
  return any;
}
DEVICE uint4 stream_load(const void* p) { return *(const uint4*)p; }
DEVICE uint4 constant_load(const void* p) { return *(const uint4*)p; }
DEVICE uint2 stream_load2(const void* p) { return *(const uint2*)p; }
DEVICE u32 stream_load1(const void* p) { return *(const u32*)p; }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
DEVICE int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
DEVICE u32 atomicAdd(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
DEVICE u32 atomicOr(u32* p, u32 v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
DEVICE u32 atomicMax(u32* p, u32 v) {
  u32 old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, std::max(old, v), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}
DEVICE u32 atomicInc(u32* p, u32 limit) {
  u32 old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, old >= limit ? 0 : old + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}
DEVICE int processor() { return blockIdx.x; }
DEVICE u32 count_up(u32* p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
DEVICE u32 cycles() { return 0; }
DEVICE void launch_dependents() {}
DEVICE void wait_for_inputs() {}
#define LAUNCH_ARGUMENTS
#define BEGIN_LAUNCH
DEVICE void count_launch() {}
DEVICE bool nothing_in_front() { return blockIdx.x % 2; }  // both
DEVICE void end_launch(int) {}
DEVICE void stay() {}
DEVICE float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEVICE float largest(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
DEVICE float warp_largest(float v) {
  for (int o = 16; o; o >>= 1) v = largest(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
DEVICE float warp_max(float v) {
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
alignas(1024) thread_local u8 raw[240 << 10];  // dynamic shared memory

// ---- 8 × 8 matrices of 16-bit values; a shared address is one within `raw` ----
DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - raw); }
// A copy is done as late as it may be, when a wait asks for its group: a stage that is read too early, or given back too late, shows.
struct Copy { u32 to; const void* from; bool exists; u32 bytes = 16; };
struct Copies { std::vector<std::vector<Copy>> groups; std::vector<Copy> open; };  // of a thread
static thread_local std::vector<Copies> copies;
DEVICE Copies& own_copies() {
  if (copies.size() < blockDim.x) copies.resize(blockDim.x);
  return copies[threadIdx.x];
}
DEVICE void copy16_or_zeros(u32 to, const void* from, bool exists) {
  if (to % 16 || (uintptr_t)from % 16) fprintf(stderr, "a copy of 16 bytes is not aligned\n"), abort();
  own_copies().open.push_back({to, from, exists});
}
DEVICE void copy16(u32 to, const void* from) { copy16_or_zeros(to, from, true); }
DEVICE void copy4(u32 to, const void* from) {
  if (to % 4 || (uintptr_t)from % 4) fprintf(stderr, "a copy of 4 bytes is not aligned\n"), abort();
  own_copies().open.push_back({to, from, true, 4});
}
DEVICE void copy_group() {
  own_copies().groups.push_back(own_copies().open);
  own_copies().open.clear();
}
template <int LEFT> DEVICE void copy_wait() {
  auto& groups = own_copies().groups;
  while ((int)groups.size() > LEFT) {
    for (const Copy& one : groups.front())
      if (one.exists) memcpy(raw + one.to, one.from, one.bytes);
      else memset(raw + one.to, 0, one.bytes);
    groups.erase(groups.begin());
  }
}
DEVICE u32 shared_load16(u32 address) { return *(u16*)(raw + address); }
DEVICE u32 shared_load(u32 address) { return *(u32*)(raw + address); }
DEVICE uint2 shared_load2(u32 address) { return *(uint2*)(raw + address); }
template <bool TRANSPOSED> static inline uint4 load_matrices(u32 address) {
  const u64 own[1] = {address};
  u64 all[32];
  share(own, all);
  const int lane = threadIdx.x % 32;
  u32 r[4];
  for (int m = 0; m < 4; m++) {
    auto at = [&](int row, int col) { return (u32) * (u16*)(raw + all[8 * m + row] + 2 * col); };
    const int a = lane / 4, b = lane % 4 * 2;
    r[m] = TRANSPOSED ? at(b, a) | at(b + 1, a) << 16 : at(a, b) | at(a, b + 1) << 16;
  }
  __syncwarp();
  return {r[0], r[1], r[2], r[3]};
}
#endif
