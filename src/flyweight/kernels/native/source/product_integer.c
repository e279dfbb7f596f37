// y[m, n] = Σ over groups g of scale[n, g] · xscale[m, g] · (Σ over k in g of code[n, k] · xcode[m, k] − zero[n, g] · xsum[m, g])
//
// The sum inside is of integers and exact. Codes of 4 bits are unsigned, their zero point 8 where none is stored; codes of 8
// bits are signed (stored less 128), as are their zero points. One call makes eight outputs of one to four rows of x:
// the codes are unpacked once for all of them, and both sums stay in registers.
//
// Bound by memory at one row, by dot products from about four rows on; rows in benchmarks/cpu/.
#include "matrix.h"

#define AHEAD 1024 // bytes: what is far enough ahead to be there in time, and near enough not to be gone again

// Sums below 2^22 begin at the bits of 1.5 · 2^23, and so end as the bits of 1.5 · 2^23 + sum: no conversion is needed.
#define MIDDLE_BITS 0x4b400000
#define MIDDLE 12582912.0f
#define MOST_SHORT 128 // inputs of 8 bits and 8 bits whose sum stays below 2^22

ALWAYS_INLINE ints8 start(const uint8_t *header, int32_t xsum, const int bits, const int wide, const int zeros) {
    const int32_t from = wide ? 0 : MIDDLE_BITS, middle = bits == 4 ? 8 : BYTE_BIAS;
    if (!zeros) return ints_splat(from - middle * xsum);
    ints8 zero = ints_from_bytes(header + (wide ? 32 : 16));
    return ints_add(ints_scale(zero, -xsum), ints_splat(from + (bits == 8 ? (128 - BYTE_BIAS) * xsum : 0)));
}

ALWAYS_INLINE floats8 finish(ints8 sum, const int wide) {
    return wide ? ints_to_floats(sum) : floats_subtract(ints_as_floats(sum), floats_splat(MIDDLE));
}

ALWAYS_INLINE void tile(const Matrix *w, const Input *input, int block, int begin, float out[][WIDTH], const int rows,
                        const int bits, const int wide, const int zeros) {
    const int sums = DOT_SUMS / rows > 1 ? DOT_SUMS / rows : 1;
    const int header = (wide ? 32 : 16) + (zeros ? 16 : 0), group = w->group, groups = w->groups;
    const uint8_t *at = w->data + block * w->block_bytes;
    const int8_t *x = input->codes + (size_t)begin * w->columns;
    const float *xscales = input->scales + (size_t)begin * groups;
    const int32_t *xsums = input->sums + (size_t)begin * groups;
    floats8 total[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < groups; g++) {
        floats8 scales = wide ? floats_load((const float *)at) : halves_load(at);
        ints8 sum[4];
        UNROLL for (int m = 0; m < rows; m++) {
            sum[m * sums] = start(at, xsums[m * groups + g], bits, wide, zeros);
            UNROLL for (int i = 1; i < sums; i++) sum[m * sums + i] = ints_splat(0);
        }
        at += header;
        for (int k = 0; k < group; k += 16, at += 16 * bits, x += 16) {
            __builtin_prefetch(at + AHEAD);
            if (bits == 8) __builtin_prefetch(at + AHEAD + 64);
            if (bits == 4) dot_nibbles(sum, at, x, w->columns, rows, sums);
            else dot_bytes(sum, at, x, w->columns, rows, sums);
        }
        UNROLL for (int m = 0; m < rows; m++) {
            UNROLL for (int i = 1; i < sums; i++) sum[m * sums] = ints_add(sum[m * sums], sum[m * sums + i]);
            floats8 both = floats_scale(scales, xscales[m * groups + g]);
            total[m] = floats_fma(total[m], finish(sum[m * sums], wide), both);
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

void integer_product(const Matrix *w, const Input *input, int block, int begin, int rows, float out[][WIDTH]) {
    if (w->format == INT4) {
        if (w->zeros) SCALES(4, 1) else SCALES(4, 0)
    } else {
        if (w->zeros) SCALES(8, 1) else SCALES(8, 0)
    }
}
