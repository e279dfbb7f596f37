// y[m, n] = Σ over groups g of scale[n, g] · xscale[m, g] · (Σ over k in g of code[n, k] · xcode[m, k] − zero[n, g] · xsum[m, g])
//
// The sum inside is of integers and exact. Codes of 4 bits are unsigned, their zero point 8 where none is stored; codes of 8
// bits are signed (stored less 128), as are their zero points. One call makes eight outputs of one to four rows of x:
// the codes are unpacked once for all of them, and both sums stay in registers.
//
// Bound by memory at one row, by dot products from about four rows on; rows in benchmarks/cpu/.
#include "matrix.h"

#define AHEAD 1024 // bytes: what is far enough ahead to be there in time, and near enough not to be gone again

ALWAYS_INLINE ints8 start(const Matrix *w, const uint8_t *header, int32_t xsum, const int bits, const int wide, const int zeros) {
    const int middle = bits == 4 ? 8 : BYTE_BIAS;
    if (!zeros) return ints_splat(-middle * xsum);
    ints8 zero = ints_from_bytes(header + (wide ? 32 : 16));
    if (bits == 8) return ints_add(ints_scale(zero, -xsum), ints_splat((128 - BYTE_BIAS) * xsum));
    return ints_scale(zero, -xsum);
}

ALWAYS_INLINE void tile(const Matrix *w, const Input *input, int block, int begin, float out[][WIDTH], const int rows,
                        const int bits, const int wide, const int zeros) {
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
        UNROLL for (int m = 0; m < rows; m++) sum[m] = start(w, at, xsums[m * groups + g], bits, wide, zeros);
        at += header;
        for (int k = 0; k < group; k += 16, at += 16 * bits, x += 16) {
            __builtin_prefetch(at + AHEAD);
            if (bits == 8) __builtin_prefetch(at + AHEAD + 64);
            UNROLL for (int m = 0; m < rows; m++) {
                const int8_t *inputs = x + (size_t)m * w->columns;
                sum[m] = bits == 4 ? dot_nibbles(sum[m], at, inputs) : dot_bytes(sum[m], at, inputs);
            }
        }
        UNROLL for (int m = 0; m < rows; m++)
            total[m] = floats_fma(total[m], ints_to_floats(sum[m]), floats_scale(scales, xscales[m * groups + g]));
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
