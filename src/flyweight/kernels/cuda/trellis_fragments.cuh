// fragments.cuh of a trellis' codes (trellis.cuh): the three bytes of a value are added as integers up to 765, set into the mantissa of
// 1,024 (fp16: exact) or in two parts into those of 1,024 and 128 (bf16: their sum is rounded once), and multiplied with the scale.
static_assert(SB % 2 == 0 || SB == (KDIM + 63) / 64, "a stage has both blocks of a circle");
struct Scale {
  u32 scale;
};
DEVICE u32 decode(u32 raised, Scale s) {
  if (FP16) return mul2(add2(raised | 0x64006400, 0xe580e580), s.scale);  // less 1,024 + 384
  const u32 high = add2(and_or(raised >> 3, 0x00700070, 0x44804480), 0xc4c0c4c0);  // less 1,536
  return mul2(add2(high, and_or(raised, 0x007f007f, 0x43004300)), s.scale);
}

struct Block {
  BlockWords words;
  Scale scale[2];  // of rows g and g + 8
  DEVICE Block(const u8* tile, const Record* records, int stage, int block, int lane)
      : words(load_words(tile + block * BLOCK_BYTES, tile + (block_after(stage * SB + block, (KDIM + 63) / 64) - stage * SB) * BLOCK_BYTES, lane)) {
    const int input = (stage * SB + block) * 64;
    const u8* record = records + (record_of(input) - first_group(stage)) * RECORD_LENGTH;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float own = group_scale(record, group_of(input), lane / 4 + 8 * j).scale;
      scale[j] = {pack2(own, own)};
    }
  }
  DEVICE void take(int step, u32 (&a)[WORDS]) const {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const FourTerms four = four_terms(words, 2 * step + row);
      a[row] = decode(raised_pair<0>(four), scale[row]);
      a[2 + row] = decode(raised_pair<1>(four), scale[row]);
    }
  }
};
