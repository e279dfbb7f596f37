// Codes of 4 or 8 bits as 16-bit floats: a code set into the mantissa of a power of two P is P + code. Needs linear.cuh's names.
constexpr u32 POWER = FP16 ? 0x64006400 : 0x43004300, ONES = FP16 ? 0x3c003c00 : 0x3f803f80;
// Two codes → P + code; of 8 bits, for which bf16 has no such P, code − 128: the lower seven are 128 more than they should be, and 256
// less 128 where bit 7 is set comes off.
DEVICE u32 weights_of(u32 codes) {
  if (FORMAT == INT4) return and_or(codes, 0x000f000f, POWER);
  if (FP16) return and_or(codes, 0x00ff00ff, POWER);
  return add2(and_or(codes, 0x007f007f, POWER), and_xor(codes, 0x00800080, 0xc380c380));
}
DEVICE float offset_of(u32 record) {  // −(P + zero)
  if (FORMAT == INT4 && !FP16) return __uint_as_float(and_or(record, 0x007f0000, 0xc3000000));
  return 8388608.f - (FP16 ? 1024.f : -128.f) - __uint_as_float(record >> 16 | 0x4b000000);
}
