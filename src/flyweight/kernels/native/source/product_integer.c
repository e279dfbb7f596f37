// y[m, n] = Σ over groups p of x of scale[n, p] · xscale[m, p] · (Σ over k in p of code[n, k] ·
// xcode[m, k] − zero[n, p] · Σ xcode)
//
// where scale[n, p] and zero[n, p] are those of the weight's group that p is a part of. Short
// groups of x cost a little time and save accuracy: what is lost by rounding x depends on the
// largest value of a group.
//
// The sum inside is of integers and exact. Codes of 4 bits are unsigned, their zero point 8 where
// none is stored; codes of 8 bits are signed (stored less 128), as are their zero points. One call
// makes eight outputs of one to four rows of x, or of TALL rows that lie in quads (matrix.h):
//
//   NEON       8 rows × 4 outputs, twice       8 + 8 of 32 registers are sums of integers and floats
//   AVX-512    8 rows × 8 outputs              8 + 8 of 32
//   AVX2       4 rows × 8 outputs              4 + 4 of 16
//
// The codes are unpacked once for all of them, and both sums stay in registers. With many rows a
// block's codes of 4 bits are unpacked once for all tiles (CODES).
//
// Bound by memory at one row, by dot products from about four rows on; rows in benchmarks/cpu/.
#include "matrix.h"

// Bytes: far enough ahead to be there in time, and near enough not to be gone again.
#define AHEAD 1024

// Where the sum of a group begins: what `input_fill` has made of the sum of x, or, with zero
// points, a product with it.
ALWAYS_INLINE ints8 start(ints8 zero, int32_t xsum, const int bits, const int wide,
        const int zeros) {
    if (!zeros) return ints_splat(xsum);
    const int32_t from = wide ? 0 : MIDDLE_BITS;
    return ints_add(ints_scale(zero, -xsum), ints_splat(from + (bits == 8
            ? (128 - BYTE_BIAS) * xsum : 0)));
}

ALWAYS_INLINE floats8 finish(ints8 sum, const int wide) {
    return wide ? ints_to_floats(sum) : floats_subtract(ints_as_floats(sum), floats_splat(MIDDLE));
}

ALWAYS_INLINE void tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows,
                        const int bits, const int wide, const int zeros) {
    const int sums = DOT_SUMS / rows > 1 ? DOT_SUMS / rows : 1;
    const int header = (wide ? 32 : 16) + (zeros ? 16 : 0);
    const int step = w->input_group;
    const int groups = input_groups(w);
    const uint8_t *at = w->data + block * w->block_bytes;
    const int8_t *x = input->codes + (size_t)begin * w->columns;
    const float *xscales = input->scales + (size_t)begin * groups;
    const int32_t *xsums = input->sums + (size_t)begin * groups;
    floats8 total[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < w->groups; g++) {
        floats8 scales = wide ? floats_load((const float *)at) : halves_load(at);
        ints8 zero = zeros ? ints_from_bytes(at + (wide ? 32 : 16)) : ints_splat(0), sum[4];
        at += header;
        for (int part = 0; part < w->group; part += step, xscales++, xsums++) {
            UNROLL for (int m = 0; m < rows; m++) {
                sum[m * sums] = start(zero, xsums[m * groups], bits, wide, zeros);
                UNROLL for (int i = 1; i < sums; i++) sum[m * sums + i] = ints_splat(0);
            }
            for (int k = 0; k < step; k += 16, at += 16 * bits, x += 16) {
                __builtin_prefetch(at + AHEAD);
                if (bits == 8) __builtin_prefetch(at + AHEAD + 64);
                if (bits == 4) dot_nibbles(sum, at, x, w->columns, rows, sums);
                else dot_bytes(sum, at, x, w->columns, rows, sums);
            }
            UNROLL for (int m = 0; m < rows; m++) {
                UNROLL for (int i = 1; i < sums; i++) sum[m * sums] = ints_add(sum[m * sums],
                        sum[m * sums + i]);
                total[m] = floats_fma(total[m], finish(sum[m * sums], wide), floats_scale(scales,
                        xscales[m * groups]));
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++) floats_store(out[m], total[m]);
}

#define ROWS(bits, wide, zeros)                                                                    \
    switch (rows) {                                                                                \
    case 1: tile(w, input, block, begin, out, 1, bits, wide, zeros); return;                       \
    case 2: tile(w, input, block, begin, out, 2, bits, wide, zeros); return;                       \
    case 3: tile(w, input, block, begin, out, 3, bits, wide, zeros); return;                       \
    default: tile(w, input, block, begin, out, 4, bits, wide, zeros); return;                      \
    }
#define SCALES(bits, zeros) if (w->wide_scales) ROWS(bits, 1, zeros) else ROWS(bits, 0, zeros)

void integer_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    if (w->format == INT4) {
        if (w->zeros) SCALES(4, 1) else SCALES(4, 0)
    } else {
        if (w->zeros) SCALES(8, 1) else SCALES(8, 0)
    }
}

// -- whole tiles of rows --------------------------------------------------------------------------

// TALL rows and one part of the eight outputs: the same sums, in the same order. What was unpacked
// and what was loaded serve so many products that little but products is left to do.
ALWAYS_INLINE void tall_tile(const Matrix *w, const Input *input, int block, int begin, int part,
        float out[][WIDTH], const int format, const int wide, const int zeros) {
    const int lanes = WIDTH / PARTS;
    const int floats = wide || format == CODES;
    const int header = (floats ? 32 : 16) + (zeros ? 16 : 0);
    const int bits = format == INT4 ? 4 : 8;
    const int step = wide && format == INT8 ? w->input_group : TILED_GROUP; // see tiled_rows
    const size_t quad = QUAD * (size_t)w->columns;
    const size_t groups = QUAD * (size_t)input_groups(w);
    const uint8_t *at = w->data + block * w->block_bytes;
    const int8_t *x = input->codes + (size_t)begin * w->columns;
    const float *xscales = input->scales + begin * (groups / QUAD);
    const int32_t *xsums = input->sums + begin * (groups / QUAD);
    const floats_part middle = part_splat(MIDDLE);
    floats_part total[TALL];
    UNROLL for (int m = 0; m < TALL; m++) total[m] = part_splat(0);
    for (int g = 0; g < w->groups; g++) {
        floats_part scales = floats ? part_load((const float *)(at + 4 * lanes * part))
                : part_load_halves(at + 2 * lanes * part);
        ints_part zero = part_start(0);
        if (zeros) zero = part_from_bytes(at + header - 16 + lanes * part);
        at += header;
        for (int k = 0; k < w->group; k += step, xscales += QUAD, xsums += QUAD) {
            ints_part sum[TALL];
            floats_part scale[TALL];
            UNROLL for (int m = 0; m < TALL; m++) {
                int32_t xsum = xsums[m / QUAD * groups + m % QUAD];
                if (zeros) sum[m] = part_start_at((wide ? 0 : MIDDLE_BITS)
                        + (format == INT8 ? (128 - BYTE_BIAS) * xsum : 0), zero, -xsum);
                else sum[m] = part_start(xsum);
            }
            for (int j = 0; j < step; j += 32, at += 32 * bits, x += 32 * QUAD) {
                const uint8_t *codes = at + 4 * lanes * part;
                if (format == INT4) part_nibbles(sum, codes, x, quad);
                else if (format == INT8) part_bytes(sum, codes, x, quad);
                else part_codes(sum, codes, x, quad);
            }
            UNROLL for (int m = 0; m < TALL; m += QUAD)
                part_scale(scale + m, scales, xscales + m / QUAD * groups);
            UNROLL for (int m = 0; m < TALL; m++)
                total[m] = part_fma(total[m], wide ? part_to_floats(sum[m])
                        : part_subtract(part_as_floats(sum[m]), middle), scale[m]);
        }
    }
    UNROLL for (int m = 0; m < TALL; m++) part_store(out[m] + lanes * part, total[m]);
}

#define TALL_TILE(format)                                                                          \
    switch (2 * !!w->wide_scales + !!w->zeros) {                                                   \
    case 0: tall_tile(w, input, block, begin, part, out, format, 0, 0); break;                     \
    case 1: tall_tile(w, input, block, begin, part, out, format, 0, 1); break;                     \
    case 2: tall_tile(w, input, block, begin, part, out, format, 1, 0); break;                     \
    default: tall_tile(w, input, block, begin, part, out, format, 1, 1);                           \
    }

void tall_product(const Matrix *w, const Input *input, int block, int begin, float out[][WIDTH]) {
    for (int part = 0; part < PARTS; part++) {
        if (w->format == INT4) TALL_TILE(INT4)
        else if (w->format == INT8) TALL_TILE(INT8)
        else TALL_TILE(CODES)
    }
}

size_t block_codes_bytes(const Matrix *w) {
    return (size_t)w->groups * (32 + (w->zeros ? 16 : 0) + (size_t)w->group * WIDTH);
}

void block_to_codes(const Matrix *w, int block, uint8_t *to) {
    const uint8_t *at = w->data + block * w->block_bytes;
    for (int g = 0; g < w->groups; g++) {
        floats8 scales = w->wide_scales ? floats_load((const float *)at) : halves_load(at);
        at += w->wide_scales ? 32 : 16;
        floats_store((float *)to, scales);
        to += 32;
        if (w->zeros) {
            memcpy(to, at, 16);
            at += 16;
            to += 16;
        }
        for (int k = 0; k < w->group; k += 16, at += 64, to += 128) nibbles_to_bytes(to, at);
    }
}
