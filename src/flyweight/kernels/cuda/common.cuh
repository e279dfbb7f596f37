// What every kernel shares: 16-bit floats without headers, asynchronous copies, barriers, dependent launch.
// Hopper-only instructions are guarded; from sm_80 on the same source compiles to plain cp.async.
#ifndef COMMON
#define COMMON
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#ifndef FP16
#define FP16 0
#endif

#define DEVICE __device__ __forceinline__
#define LOWEST __int_as_float(0xff800000)  // minus infinity

// ---- 16-bit floats: a value is its bits in a u16, two of them in a u32 (low half first) ----
template <bool HALF> DEVICE float float_of(u16 bits) {
  if (!HALF) return __uint_as_float((u32)bits << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
template <bool HALF> DEVICE u32 pack_as(float low, float high) {
  u32 r;
  if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// The same in the type of activations.
DEVICE float to_float(u16 bits) { return float_of<FP16>(bits); }
DEVICE float low_float(u32 pair) { return to_float((u16)(pair & 0xffff)); }
DEVICE float high_float(u32 pair) { return to_float((u16)(pair >> 16)); }
DEVICE u32 pack2(float low, float high) { return pack_as<FP16>(low, high); }
DEVICE u32 add2(u32 a, u32 b) {
  u32 r;
  if (FP16) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#if __CUDA_ARCH__ >= 900
  else asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80), "r"(b));
#endif
  return r;
}
DEVICE u32 mul2(u32 a, u32 b) {
  u32 r;
  if (FP16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#if __CUDA_ARCH__ >= 900
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000));
#endif
  return r;
}
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  if (FP16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// In one instruction: with two constants the compiler takes two.
DEVICE u32 and_or(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEVICE u32 and_xor(u32 a, u32 b, u32 c) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// A byte of `a` and `b` for each of the four lowest digits of `order`; for digits from 8 on the sign of byte (digit - 8), eight times.
DEVICE u32 bytes_or_signs(u32 a, u32 b, u32 order) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(order));
  return r;
}
// sum + two signed 16-bit numbers of `pair` times the lower (upper) two unsigned bytes of `four`
DEVICE int dot_lower(u32 pair, u32 four, int sum) {
  int r;
  asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(four), "r"(sum));
  return r;
}
DEVICE int dot_upper(u32 pair, u32 four, int sum) {
  int r;
  asm("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(four), "r"(sum));
  return r;
}
DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE float log2_fast(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE u16 to_bits(float f) { return (u16)(pack2(f, 0.f) & 0xffff); }

DEVICE u32 to_int8(float f) {  // rounded to nearest even, saturated
  u32 r;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(r) : "f"(f));
  return r;
}
// a / b as the division unit rounds it, for normal numbers; inverse = 1 / b. Codes then agree with the reference where x lies
// halfway between two, as 16-bit numbers often do.
DEVICE float quotient(float a, float b, float inverse) {
  const float q = a * inverse;
  return fmaf(fmaf(-q, b, a), inverse, q);
}
DEVICE u32 float8_bits(float f) {  // e4m3 without an instruction for it: rounded to nearest even, saturated
  const float size = fminf(fabsf(f), 448.f);
  const u32 sign = __float_as_uint(f) >> 24 & 0x80, bits = __float_as_uint(size);
  if (size < 0.015625f) return sign | __float_as_uint(size + 16384.f) & 15;  // whose last bit is 2^-9, as of the smallest codes
  return sign | ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
}
DEVICE u32 to_float8(float low, float high) {  // two e4m3, rounded to nearest even, saturated
#if __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  return float8_bits(low) | float8_bits(high) << 8;
#endif
}
DEVICE u32 float8_pair(u32 codes) {  // two e4m3 as two fp16 numbers
  u32 r;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)codes));
#else  // the same bits one place further on are 2^-8 times as much
  const u32 bits = __byte_perm(codes, 0, 0x1404);
  r = and_or(bits >> 1, 0x3f803f80, bits & 0x80008000);
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(r), "r"(0x5c005c00));
#endif
  return r;
}
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEVICE u32 add_halves(u32 a, u32 b) {  // fp16, whatever activations are
  u32 r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// e4m3 in the low byte of each half → the 16-bit type: its bits are those of a float that is too small by a power of two. (Its one NaN
// comes out as 480.)
DEVICE u32 widen_float8(u32 codes) {
  const u32 high = codes << 8;
  return mul2((high & 0x7f007f00) >> (FP16 ? 1 : 4) | (high & 0x80008000), FP16 ? 0x5c005c00 : 0x7b807b80);
}

// ---- matrix units: D[16 × 8] += A[16 × 16] · B[16 × 8], fp32 accumulators ----
template <bool HALF> DEVICE void mma16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// D[16 × 8] += A[16 × 32] · B[32 × 8] in integers; A signed or unsigned bytes, B signed
template <bool UNSIGNED> DEVICE void mma32(int (&d)[4], uint4 a, u32 b0, u32 b1) {
  if (UNSIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// The same over 64 inputs, of which A has two of four neighbours: `kept`, and in `which` two rising bits for the place of each.
// Of lane (g, t), `which` is about row g + 8 · (t % 2) and inputs 32 · (t / 2) … + 31.
template <bool UNSIGNED> DEVICE void mma64_sparse(int (&d)[4], uint4 kept, u32 which, uint4 b) {
  if (UNSIGNED)
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0;"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(kept.x), "r"(kept.y), "r"(kept.z), "r"(kept.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(which));
  else
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0;"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(kept.x), "r"(kept.y), "r"(kept.z), "r"(kept.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(which));
}
// 16-bit floats over 32 inputs, of which A has two of four neighbours. Of lane (g, t), t < 2, `which` is about rows g (low half) and
// g + 8 and inputs 16 · t … + 15; other lanes' is not read.
template <bool HALF> DEVICE void mma32_sparse(float (&d)[4], uint4 kept, u32 which, uint4 b) {
  if (HALF)
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(kept.x), "r"(kept.y), "r"(kept.z), "r"(kept.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(which));
  else
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(kept.x), "r"(kept.y), "r"(kept.z), "r"(kept.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(which));
}
// D[16 × 8] += A[16 × 32] · B[32 × 8] in float8 (e4m3), fp32 accumulators: from sm_89 on
DEVICE void mma32_float8(float (&d)[4], uint4 a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}

// Four 8 × 8 matrices of 16-bit values from shared memory: lane i gives the address of row i % 8 of matrix i / 8, and gets
// two neighbours of row lane / 4 (TRANSPOSED: of column lane / 4) of each.
template <bool TRANSPOSED> DEVICE uint4 load_matrices(u32 address) {
  uint4 r;
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
  return r;
}
DEVICE u32 transpose8(u32 pair) {  // an 8 × 8 matrix of 16-bit values in the registers of a warp
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// ---- loads of what is read once, past L1, and by addresses in shared memory ----
DEVICE uint4 stream_load(const void* p) {
  uint4 q;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
  return q;
}
DEVICE uint4 constant_load(const void* p) {  // through L1; on its way where it stands, before we wait for inputs
  uint4 q;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
  return q;
}
DEVICE uint2 stream_load2(const void* p) {
  uint2 q;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(q.x), "=r"(q.y) : "l"(p));
  return q;
}
DEVICE u32 stream_load1(const void* p) {
  u32 q;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(q) : "l"(p));
  return q;
}
DEVICE u32 shared_load16(u32 address) {
  u16 q;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(q) : "r"(address));
  return q;
}
DEVICE u32 shared_load(u32 address) {
  u32 q;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(q) : "r"(address));
  return q;
}

DEVICE uint2 shared_load2(u32 address) {
  uint2 q;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(q.x), "=r"(q.y) : "r"(address));
  return q;
}

// ---- barriers in shared memory, and copies that complete on them ----
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64* b, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
DEVICE void fence_barriers() {  // after the inits, before anyone else (the copy engine too) uses them
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEVICE void barrier_arrive(u64* b) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_address(b)) : "memory");
}
DEVICE void barrier_wait(u64* b, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p;\n wait: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @p bra done;\n bra wait;\n done: }"
#else
  asm volatile(
      "{ .reg .pred p;\n wait: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n @p bra done;\n bra wait;\n done: }"
#endif
      ::"r"(shared_address(b)), "r"(parity) : "memory");
}
// On Hopper one thread announces the bytes and the copy engine fetches them; before it, a warp copies 16 bytes a lane.
// So a `full` barrier expects COPY_ARRIVALS arrivals, and copy_begin / copy_bytes / copy_end are called by a whole warp.
#if __CUDA_ARCH__ >= 900
#define COPY_ARRIVALS 1
#else
#define COPY_ARRIVALS 32
#endif
DEVICE void copy_begin(u64* full, u32 bytes, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0)
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(shared_address(full)), "r"(bytes)
                 : "memory");
#endif
}
DEVICE void copy_own(void* to, const void* from, u32 bytes, u64* full) {  // a copy of this lane's; they start one after the other
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy; }"
      ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
#else
  for (u32 i = 0; i < bytes; i += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i), "l"((const char*)from + i));
#endif
}
DEVICE void copy_bytes(void* to, const void* from, u32 bytes, u64* full, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) copy_own(to, from, bytes, full);
#else
  for (u32 i = lane * 16; i < bytes; i += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i), "l"((const char*)from + i));
#endif
}
DEVICE void copy_end(u64* full) {
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");
#endif
}

// Copies of 16 bytes by each thread for itself, waited for in the order of their groups.
DEVICE void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy16_or_zeros(u32 to, const void* from, bool exists) {  // nothing is read where it does not exist
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
DEVICE void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_piece(void* to, const void* from) { copy16(shared_address(to), from); }
DEVICE void copy_arrive(u64* full) {  // an arrival of this thread, once all its copies so far are done
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");
}
DEVICE void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- words that CTAs of one grid hand to each other: no fence, no flag. A word that is not written yet holds all ones, a
// NaN that no conversion and no arithmetic makes; whoever waits for it reads it until it is something else. ----
DEVICE void store_relaxed(u16* p, u16 v) { asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }
DEVICE void store_relaxed(float* p, float v) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }
DEVICE void store_relaxed(float* p, const float (&v)[1]) { store_relaxed(p, v[0]); }
DEVICE void store_relaxed(float* p, const float (&v)[2]) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(v[0]), "f"(v[1]) : "memory");
}
DEVICE void store_relaxed(float* p, const float (&v)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
DEVICE void store_release(int* p, int v) { asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void load_relaxed(const void* p, u32 (&w)[1]) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
DEVICE void load_relaxed(const void* p, u32 (&w)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
DEVICE void load_relaxed(const void* p, u32 (&w)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
// SIXTEEN: each word is two 16-bit values, either of which may be missing.
template <bool SIXTEEN, int WORDS> DEVICE bool missing(const u32 (&words)[WORDS]) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < WORDS; i++) any |= SIXTEEN ? (words[i] & 0xffff) == 0xffff || words[i] >= 0xffff0000u : words[i] == ~0u;
  return any;
}

// ---- the kernels on one SM: who fetches ----
DEVICE int processor() {
  int r;
  asm volatile("mov.u32 %0, %smid;" : "=r"(r));
  return r;
}
DEVICE u32 count_up(u32* p) {  // what it was
  u32 r;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(p) : "memory");
  return r;
}
DEVICE u32 cycles() {
  u32 r;
  asm volatile("mov.u32 %0, %clock;" : "=r"(r));
  return r;
}

// ---- programmatic dependent launch: the next kernel starts while this one runs, and waits for its results ----
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// BY_COUNTERS: the same by memory, before Hopper; LAUNCH_ARGUMENTS then end the kernel's parameters, and begin_launch begins it.
#ifndef BY_COUNTERS
#define BY_COUNTERS 0
#endif
#if BY_COUNTERS
#include "dependent_launch.cuh"
#define BEGIN_LAUNCH begin_launch(launch_before, launch_own)
#else
#define LAUNCH_ARGUMENTS
#define BEGIN_LAUNCH
DEVICE void count_launch() {}
DEVICE constexpr bool nothing_in_front() { return false; }
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif
// A CTA without work. Where it left at once, two CTAs of the next kernel would share its SM and another SM would get none.
DEVICE void stay() {
  launch_dependents();
  wait_for_inputs();
  const u32 begin = cycles();  // by then the next kernel has taken the room that the one before this left
  while (cycles() - begin < 1200) {}
  count_launch();
}
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// The end of a CTA of which `threads` have written results: all of them call it.
DEVICE void end_launch(int threads) {
#if BY_COUNTERS
  named_barrier(1, threads);
  count_launch();
#endif
}
DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEVICE float largest(float a, float b) {  // a NaN, if there is one: a row's scale passes it on to all its results
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DEVICE float warp_largest(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = largest(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
#endif
