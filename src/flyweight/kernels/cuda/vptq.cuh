// What the VPTQ kernels and the ones that prepare and undo their layout share: the format of an item.
//
// A step is 32 items of one row block, one a lane. Lane l gathers an entry; the x it belongs to is supplied by lane
// column_lane(l), in whose word its position stands. Lane L owns the columns 64 i + 2 L and 64 i + 2 L + 1: they are one
// word of x, in bank L. Step p takes the first or second of them, p = 2 i or 2 i + 1, for the natural order.
//
// OWN: an item has the position of its own column, and lies in two pieces: 16 bits, the position below the main index, and 8 bits,
// the residual index. So the main index is an offset in a book of 8-byte entries as it stands (vptq_bytes.cu).
//
// defines: MAIN_BITS, RES_BITS, POS_BITS, ITEM_BYTES (3 or 4), PIECES (of 16 bytes, of an entry), FP16, OWN (0; POS_BITS is 3)
#define FORMAT 0
#ifndef PAIRED
#define PAIRED 0
#endif
#ifndef OWN
#define OWN 0
#endif
#define CLUSTER (1 + PAIRED)
#include "common.cuh"
#include "linear.cuh"
#include "wgmma.cuh"

constexpr int CHUNK = 8;                        // steps
constexpr int WORDS = CHUNK * ITEM_BYTES / 4;   // of one lane in one chunk
constexpr int CHUNK_BYTES = 32 * CHUNK * ITEM_BYTES;
constexpr u32 ENTRIES = 1u << MAIN_BITS;
constexpr u32 WINDOW = 1u << POS_BITS;          // steps
constexpr int OUTPUTS = 8 * PIECES;             // of a row block, with padding

DEVICE void load_chunk(u32 (&w)[WORDS], const char* chunk, int lane) {
  uint4 q = stream_load(chunk + 16 * lane);
  w[0] = q.x, w[1] = q.y, w[2] = q.z, w[3] = q.w;
  if constexpr (ITEM_BYTES == 3) {
    uint2 r = stream_load2(chunk + 512 + 8 * lane);
    w[4] = r.x, w[5] = r.y;
  } else {
    uint4 r = stream_load(chunk + 512 + 16 * lane);
    w[4] = r.x, w[5] = r.y, w[WORDS - 2] = r.z, w[WORDS - 1] = r.w;
  }
}
template <int S>
DEVICE u32 item(const u32 (&w)[WORDS]) {  // bits above the fields may be anything
  if constexpr (ITEM_BYTES == 4) {
    return w[S];
  } else if constexpr (OWN) {
    return __byte_perm(w[S / 2], w[4 + S / 4], (S % 2 ? 0x32 : 0x10) | (4 + S % 4) << 8);
  } else {
    constexpr int word = 3 * S / 4, byte = 3 * S % 4;
    if constexpr (byte == 0) return w[word];
    else if constexpr (byte == 1) return w[word] >> 8;
    else return __byte_perm(w[word], w[word + 1], byte == 2 ? 0x5432 : 0x6543);
  }
}
DEVICE void all_items(u32 (&v)[CHUNK], const u32 (&w)[WORDS]) {
  v[0] = item<0>(w), v[1] = item<1>(w), v[2] = item<2>(w), v[3] = item<3>(w);
  v[4] = item<4>(w), v[5] = item<5>(w), v[6] = item<6>(w), v[7] = item<7>(w);
}
DEVICE u32 main_index(u32 v) { return (OWN ? v >> POS_BITS : v) & (ENTRIES - 1); }
DEVICE u32 residual_index(u32 v) { return (v >> (OWN ? 16 : MAIN_BITS)) & ((1u << RES_BITS) - 1); }
DEVICE u32 position(u32 v) { return (OWN ? v : v >> (MAIN_BITS + RES_BITS)) & (WINDOW - 1); }

// Bits g2 g1 g0 t1 t0 of a lane that supplies x become g1 g2 t1 t0 g0 of the lane that gathers: how ldmatrix and
// mma.m16n8k16 number rows and columns. This is the inverse.
DEVICE int column_lane(int l) { return (l >> 3 & 1) << 4 | (l >> 4 & 1) << 3 | (l & 1) << 2 | (l >> 1 & 3); }
DEVICE int column_of(int step, int lane) { return (step >> 1) * 64 + 2 * lane + (step & 1); }
// The column of the entry this lane gathers in step `step` of its row block.
DEVICE int gathered_column(u32 v, int step, int lane) {
  const u32 owner = OWN ? v : __shfl_sync(~0u, v, column_lane(lane));
  return column_of((step & ~(WINDOW - 1)) + position(owner), column_lane(lane));
}

DEVICE int address_lane(int l) { return (l >> 4 & 1) << 3 | (l >> 3 & 1) << 4 | (l >> 2 & 1) | (l & 3) << 1; }  // its inverse

// A span: the fewest steps that are whole chunks and whole windows. `unfold` puts the items of one row block in their own order:
// that of column p of lane column_lane(l) to to[32 p + l]; `sort`: to v[p] of lane l.
constexpr int SPAN = WINDOW > CHUNK ? WINDOW : CHUNK;
typedef u32 Words[SPAN / CHUNK][WORDS];
DEVICE void load_span(Words& words, const char* from, int lane) {
#pragma unroll
  for (int c = 0; c < SPAN / CHUNK; c++) load_chunk(words[c], from + c * CHUNK_BYTES, lane);
}
// Of the eight items that this lane looks up in a chunk the steps within their windows, four bits each.
DEVICE u32 stored_places(const u32 (&v)[CHUNK]) {
  u32 places = 0;
#pragma unroll
  for (int s = 0; s < CHUNK; s++) places |= position(v[s]) << 4 * s;
  return places;
}
DEVICE u32 places_of(const u32 (&v)[CHUNK], int lane) {
  const u32 places = stored_places(v);
  return OWN ? places : __shfl_sync(~0u, places, column_lane(lane));
}
// The same of the items whose x this lane supplies.
DEVICE u32 supplied_places(const u32 (&v)[CHUNK], int lane) {
  const u32 places = stored_places(v);
  return OWN ? __shfl_sync(~0u, places, address_lane(lane)) : places;
}
DEVICE void unfold(u32* to, const Words& words, int lane) {
#pragma unroll
  for (int c = 0; c < SPAN / CHUNK; c++) {
    u32 v[CHUNK];
    all_items(v, words[c]);
    const u32 places = places_of(v, lane);
#pragma unroll
    for (int s = 0; s < CHUNK; s++)
      to[(((c * CHUNK + s) & ~(int)(WINDOW - 1)) + (places >> 4 * s & 15)) * 32 + lane] = v[s];
  }
}

// Bits above the fields are the key: the smaller of two comes first (a bitonic network, all of it in registers).
DEVICE void sort(u32 (&v)[SPAN], const Words& words, int lane) {
#pragma unroll
  for (int c = 0; c < SPAN / CHUNK; c++) {
    u32 here[CHUNK];
    all_items(here, words[c]);
    const u32 places = POS_BITS ? places_of(here, lane) : 0;
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      const u32 window = (u32)((c * CHUNK + s) & ~(int)(WINDOW - 1)) << 28;
      v[c * CHUNK + s] = POS_BITS ? here[s] & 0x0fffffff | places << (28 - 4 * s) & 0xf0000000 | window : here[s];
    }
  }
  if constexpr (POS_BITS > 0)
#pragma unroll
    for (int size = 2; size <= SPAN; size *= 2)
#pragma unroll
      for (int apart = size / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int i = 0; i < SPAN; i++)
          if (!(i & apart)) {
            const u32 one = v[i], two = v[i + apart];
            const bool rising = !(i & size);
            v[i] = (one < two) == rising ? one : two, v[i + apart] = (one < two) == rising ? two : one;
          }
}

// Up to three weights that share one x (q, k and v; gate and up) are one launch: each has some of its CTAs, and its outputs follow
// those of the one before in a row of y.
struct Part {
  const char *stream, *book;
  const uint4 *residual, *dense;
  const u32* affine;   // [stored columns, whole eights]: scale in the low half, bias in the high half; zero for padding
  const u16* source;   // [stored columns]: the input a column belongs to, or null where they are the same
  int outputs, ctas;
  int index, cta, first;  // which part, which of its CTAs, and its first output
};
#define PART(i) const char *stream##i, const char *book##i, const uint4 *residual##i, const uint4 *dense##i, const u32 *affine##i, \
                const u16 *source##i, int outputs##i, int ctas##i
#define GIVEN(i) Part{stream##i, book##i, residual##i, dense##i, affine##i, source##i, outputs##i, ctas##i, i, 0, 0}
DEVICE Part own_part(const Part& a, const Part& b, const Part& c) {
  Part p = a;
  int cta = blockIdx.x, first = 0;
  if (cta >= a.ctas) {
    p = b, cta -= a.ctas, first = a.outputs;
    if (cta >= b.ctas) p = c, cta -= b.ctas, first += b.outputs;
  }
  p.cta = cta, p.first = first;
  return p;
}

DEVICE uint4 add8(uint4 a, uint4 b) { return make_uint4(add2(a.x, b.x), add2(a.y, b.y), add2(a.z, b.z), add2(a.w, b.w)); }
