// A lane's registers of a 16 × 64 block of weights, as gemm.cu's products take them: codes become 16-bit floats here, exact
// integers less the zero point times the scale, rounded once; 8-bit formats and plain weights go in as they lie.
// Needs gemm.cu's STEPS, WORDS and group_in_stage.

// Codes in the low byte of each half (4 or 8 bits) → (code − zero) · scale. An integer set into the mantissa of a power
// of two is that power plus the integer, exactly; a bf16 mantissa has 7 bits, so bit 7 of a code goes in by itself, and takes
// what a zero point has beyond 128 with it: 128 + 129 is no bf16.
struct Scale {
  u32 scale, offset, high;  // offset: −(power + zero), or that of a zero up to 128; high: −(power + the rest)
};
DEVICE Scale read_scale(u32 record) {
  const float scale = float_of<SCALE_FP16>((u16)(record & 0xffff)), power = FP16 ? 1024.f : 128.f;
  const int zero = record >> 16, low = FORMAT == INT8 && !FP16 ? min(zero, 128) : zero;
  const float offset = -(power + (float)low), high = -(power + (float)(zero - low));
  return {pack2(scale, scale), pack2(offset, offset), pack2(high, high)};
}
DEVICE u32 decode(u32 codes, Scale s) {
  constexpr u32 power = FP16 ? 0x64006400 : 0x43004300;
  if (FORMAT == INT4) return mul2(add2(codes & 0x000f000f | power, s.offset), s.scale);
  if (FP16) return mul2(add2(codes & 0x00ff00ff | power, s.offset), s.scale);
  // zero is 128: the lower 7 bits are 128 more than they should be, and 256 less 128 where bit 7 is set comes off
  if (SYMMETRIC) return mul2(add2(codes & 0x007f007f | power, codes & 0x00800080 ^ 0xc380c380), s.scale);
  const u32 low = add2(codes & 0x007f007f | power, s.offset), high = add2(codes & 0x00800080 | power, s.high);
  return mul2(add2(low, high), s.scale);
}

// Of 2:4 weights in 16 bits a lane has other fours than in 8 bits, and other words tell which are kept: lane t % 2 = 0 of the
// four takes the even places of both rows, lane 1 the odd ones.
DEVICE u32 regroup(uint2 places, int odd) {
  u32 low = places.x >> (4 * odd) & 0x0f0f0f0f, high = places.y >> (4 * odd) & 0x0f0f0f0f;
  low |= low >> 4, high |= high >> 4;
  return __byte_perm(low, high, 0x6420);
}
// The registers of one block of 64 inputs of this warp's tile: STEPS products of WORDS words each.
DEVICE void load_block(u32 (&a)[STEPS][WORDS], const u8* tile, const u32* records, int stage, int block, int lane) {
  const uint4* words = (const uint4*)(tile + block * BLOCK_BYTES) + lane;
#if SPARSE
  const u32* places = (const u32*)(tile + (block + 1) * BLOCK_BYTES - 128);
#if FORMAT == W8A8
  const uint4 w = words[0];
  a[0][0] = w.x, a[0][1] = w.y, a[0][2] = w.z, a[0][3] = w.w, a[0][4] = places[lane];
#else
  const int g = lane / 4;
  const uint2 q = FORMAT == INT4 ? ((const uint2*)(tile + block * BLOCK_BYTES))[lane] : make_uint2(0, 0);
  const uint4 w = FORMAT == INT4 ? make_uint4(q.x, q.y, q.x >> 4, q.y >> 4) : words[0];
  const u32 codes[4] = {w.x, w.y, w.z, w.w};  // rows g and g + 8 of the first half, then of the second
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32* r = records + group_in_stage(stage, block, half) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
      a[half][i] = decode(__byte_perm(codes[2 * half + i % 2], 0, i / 2 ? 0x4342 : 0x4140), read_scale(r[g + 8 * (i % 2)]));
    a[half][4] = regroup(((const uint2*)places)[2 * g + half], lane % 2);
  }
#endif
#elif FORMAT == PLAIN || FORMAT == W8A8 || FORMAT == FP8
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const uint4 w = words[32 * i];
    a[i][0] = w.x, a[i][1] = w.y, a[i][2] = w.z, a[i][3] = w.w;
  }
#else
  const int g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 w4 = words[FORMAT == INT8 ? 32 * half : 0];
    const u32 w[4] = {w4.x, w4.y, w4.z, w4.w};  // (step 0, row g), (step 0, row g + 8), (step 1, g), (step 1, g + 8)
    const u32* r = records + group_in_stage(stage, block, half) * 16;
    const Scale scale[2] = {read_scale(r[g]), read_scale(r[g + 8])};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 code = FORMAT == INT4 && half ? w[i] >> 4 : w[i];
      a[2 * half + i / 2][i % 2] = decode(code, scale[i % 2]);
      a[2 * half + i / 2][2 + i % 2] = decode(code >> 8, scale[i % 2]);
    }
  }
#endif
}
