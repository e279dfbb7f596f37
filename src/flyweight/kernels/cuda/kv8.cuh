// Keys and values as the paged cache stores them: 16 bits, or codes of 8 with a bfloat16 scale for each token and kv head
// (kv_format.py): x = code · scale. Scales lie as [blocks, KV_HEADS, PAGE], so that those of a page's head are neighbours.
//
// Attention over codes computes in fp16 whatever the activations are, since every code is an fp16 number and the conversion
// takes an instruction or two for a pair. The scale of a key multiplies its token's score, that of a value its token's weight.
//
// defines: KV8 (0: 16 bits, 1: e4m3, 2: int8), KV_HEADS, PAGE; after common.cuh
#ifndef KV8
#define KV8 0
#endif

constexpr bool HALVES = FP16 || KV8;  // the type of products
#if KV8
typedef u8 Stored;
typedef uint2 StoredWord;  // of eight values
#define SCALE_ARGUMENTS , u16 *key_scales, u16 *value_scales, float fixed_key, float fixed_value
#else
typedef u16 Stored;
typedef uint4 StoredWord;
#define SCALE_ARGUMENTS
#endif
constexpr float CODE_LIMIT = KV8 == 2 ? 127.f : 448.f;

DEVICE uint4 widened(uint4 word) { return word; }
DEVICE uint4 widened(uint2 codes) {
  if (KV8 == 1)
    return make_uint4(float8_pair(codes.x & 0xffff), float8_pair(codes.x >> 16), float8_pair(codes.y & 0xffff), float8_pair(codes.y >> 16));
  // 1024 + code + 128 as the bits of an fp16 number, less 1152
  const u32 x = codes.x ^ 0x80808080, y = codes.y ^ 0x80808080, ones = 0x64646464, less = 0xe480e480;
  return make_uint4(add_halves(__byte_perm(x, ones, 0x4140), less), add_halves(__byte_perm(x, ones, 0x4342), less),
                    add_halves(__byte_perm(y, ones, 0x4140), less), add_halves(__byte_perm(y, ones, 0x4342), less));
}

// The scale of a head whose largest value is `most`, as bfloat16 bits: rounded upwards, so that no code is cut off.
DEVICE u16 scale_bits(float most, float fixed) {
  if (fixed > 0) return (u16)(pack_as<false>(fixed, 0.f) & 0xffff);
  return (u16)((__float_as_uint(fmaxf(most / CODE_LIMIT, 5.9604644775390625e-8f)) + 0xffff) >> 16);
}
DEVICE float scale_of(u16 bits) { return float_of<false>(bits); }
DEVICE u32 code_pair(float low, float high, float scale, float inverse) {
  const float a = fminf(fmaxf(quotient(low, scale, inverse), -CODE_LIMIT), CODE_LIMIT);
  const float b = fminf(fmaxf(quotient(high, scale, inverse), -CODE_LIMIT), CODE_LIMIT);
  return KV8 == 1 ? to_float8(a, b) : (to_int8(a) & 255) | (to_int8(b) & 255) << 8;
}
// What two codes stand for, in the type of activations.
DEVICE u32 decoded_pair(u32 codes, float scale) {
  const u32 halves = float8_pair(codes & 0xffff);
  const float low = KV8 == 1 ? float_of<true>((u16)(halves & 0xffff)) : (float)(signed char)(codes & 255);
  const float high = KV8 == 1 ? float_of<true>((u16)(halves >> 16)) : (float)(signed char)(codes >> 8 & 255);
  return pack2(low * scale, high * scale);
}
// Of the token in this slot of the cache.
DEVICE size_t scale_place(size_t slot, int head) { return (slot / PAGE * KV_HEADS + head) * PAGE + slot % PAGE; }
