// fragments.cuh of codes in planes (bits.cuh): they become bytes, and then 16-bit floats less a whole zero point (exact) times the scale, or
// times the scale less the minimum. Values of a table go the same way, 128 being added to them and to their zero point.
constexpr u32 POWER = FP16 ? 0x64006400 : 0x43004300, SIGN = 0x80008000;
constexpr bool WIDE_CODES = BITS == 8 || SIGNED_CODES;        // more than the mantissa of a bf16 has
constexpr bool BY_PARTS = WIDE_CODES && !FP16;                // so bit 7 goes in by itself, and codes come out as they are
constexpr float RAISED = (SIGNED_CODES ? 128.f : 0.f) + (BY_PARTS ? 0.f : FP16 ? 1024.f : 128.f);
struct Scale {
  u32 scale, offset;  // −(zero point + what codes are too large by), or −minimum
};
DEVICE Scale scale_of(GroupScale s) {
  const float offset = WHOLE_ZEROS ? -(s.zero + RAISED) : -s.least;
  return {pack2(s.scale, s.scale), pack2(offset, offset)};
}
DEVICE u32 decode(u32 codes, Scale s) {
  u32 v = and_or(codes, BY_PARTS ? 0x007f007f : 0x00ff00ff, POWER);
  if (BY_PARTS) v = add2(add2(v, POWER | SIGN), add2(and_or(codes, 0x00800080, POWER), POWER | SIGN));
  if (WHOLE_ZEROS) return mul2(add2(v, s.offset), s.scale);
  return fma2(BY_PARTS ? v : add2(v, POWER | SIGN), s.scale, s.offset);
}

struct Block {
  BlockCodes codes;
  Scale scale[2][2];  // of halves; rows g and g + 8
  DEVICE Block(const u8* tile, const Record* records, int stage, int block, int lane) : codes(load_codes(tile + block * BLOCK_BYTES, lane)) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int input = min((stage * SB + block) * 64 + half * 32 + t * 8, KDIM - 1);  // beyond the last x is 0
      const u8* record = records + (record_of(input) - first_group(stage)) * RECORD_LENGTH;
#pragma unroll
      for (int j = 0; j < 2; j++) scale[half][j] = scale_of(group_scale(record, group_of(input), g + 8 * j));
    }
  }
  DEVICE void take(int step, u32 (&a)[WORDS]) const {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const u32 four = codes.word[step / 2][step % 2 * 2 + row] ^ (SIGNED_CODES ? 0x80808080 : 0);
      a[row] = decode(four, scale[step / 2][row]);
      a[2 + row] = decode(four >> 8, scale[step / 2][row]);
    }
  }
};
