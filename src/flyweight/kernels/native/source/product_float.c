// y[m, n] = Σ over groups g of scale[n, g] · Σ over k in g of W[n, k] · x[m, k], with x and both
// sums in float32.
//
// Eight inputs of eight outputs are written out as floats in registers and used for one to four
// rows of x. This takes every format: weights in 16 bits and float8, the codebooks of VPTQ, and
// integers where x must not be rounded (`exact`).
#include "matrix.h"

#define AHEAD 1024

// Zero points of integers as floats; codes are unsigned here.
ALWAYS_INLINE floats8 zero_points(const uint8_t *header, const int format, const int wide,
        const int zeros) {
    if (!zeros) return floats_splat((format == INT4 ? 8 : 128) + CODE_OFFSET);
    floats8 stored = ints_to_floats(ints_from_bytes(header + (wide ? 32 : 16)));
    return floats_add(stored, floats_splat(CODE_OFFSET));
}

ALWAYS_INLINE int bytes_of_eight(const int format) {
    return format == INT4 ? 32 : format == FLOAT32 ? 256 : format == FLOAT16
            || format == BFLOAT16 ? 128 : 64;
}

ALWAYS_INLINE floats8 book_entry(const Matrix *w, const void *book, size_t index, const int wide) {
    if (wide == WIDE_BFLOAT16) return bfloats_load((const uint16_t *)book + 8 * index);
    return wide ? floats_load((const float *)book + 8 * index)
            : small_halves_load((const uint16_t *)book + 8 * index);
}

ALWAYS_INLINE void look_up(const Matrix *w, const uint8_t *block, int column, int group,
        floats8 to[8], const int wide) {
    const uint16_t *main = (const uint16_t *)block + column;
    const uint8_t *more = block + 2 * (size_t)w->columns + (size_t)column * w->residual_bytes;
    const size_t base = (size_t)group * w->entries;
    const size_t residual_base = (size_t)group * w->residual_entries;
    UNROLL for (int j = 0; j < 8; j++) {
        to[j] = book_entry(w, w->book, base + main[j], wide);
        if (w->residual_bytes == 1) to[j] = floats_add(to[j], book_entry(w, w->residual,
                residual_base + more[j], wide));
        if (w->residual_bytes == 2)
            to[j] = floats_add(to[j], book_entry(w, w->residual,
                    residual_base + ((const uint16_t *)more)[j], wide));
    }
}

ALWAYS_INLINE void write_out(const uint8_t *at, floats8 to[8], floats8 zero, const int format) {
    if (format == INT4) nibbles_to_floats(to, at);
    if (format == INT8) bytes_to_floats(to, at);
    UNROLL for (int j = 0; j < 8; j++) {
        if (format == INT4 || format == INT8) to[j] = floats_subtract(to[j], zero);
        if (format == FLOAT32) to[j] = floats_load((const float *)at + 8 * j);
        if (format == FLOAT16) to[j] = small_halves_load(at + 16 * j);
        if (format == BFLOAT16) to[j] = bfloats_load(at + 16 * j);
        if (format == FLOAT8) to[j] = small_float8s_load(at + 8 * j);
    }
}

// One row of x has four sums for every output, because one would wait for itself; so would four
// rows of one sum where two instructions begin in each cycle (MANY_ROWS_SUMS).
ALWAYS_INLINE void tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows,
                        const int format, const int wide, const int zeros) {
    const int integers = format == INT4 || format == INT8;
    const int sums = rows == 1 ? 4 : rows == 2 ? 2 : MANY_ROWS_SUMS;
    const int header = integers ? (wide ? 32 : 16) + (zeros ? 16 : 0) : 0;
    const int step = bytes_of_eight(format);
    const uint8_t *start = w->data + block * w->block_bytes;
    const uint8_t *at = start;
    const float *x = input->values + (size_t)begin * input->stride;
    floats8 total[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < w->groups; g++) {
        floats8 scales = floats_splat(1);
        floats8 zero = floats_splat(0);
        floats8 sum[4 * MANY_ROWS_SUMS];
        floats8 eight[8];
        if (integers) {
            scales = wide ? floats_load((const float *)at) : halves_load(at);
            zero = zero_points(at, format, wide, zeros);
        } else if (w->scales) {
            scales = floats_load(w->scales + ((size_t)block * w->groups + g) * WIDTH);
        }
        at += header;
        UNROLL for (int i = 0; i < rows * sums; i++) sum[i] = floats_splat(0);
        for (int k = 0; k < w->group; k += 8, x += 8, at += step) {
            __builtin_prefetch(at + AHEAD);
            if (step > 64) __builtin_prefetch(at + AHEAD + 64);
            if (format == VECTORS) look_up(w, start, g * w->group + k, g, eight, wide);
            else write_out(at, eight, zero, format);
            UNROLL for (int m = 0; m < rows; m++) {
                const float *inputs = x + (size_t)m * input->stride;
                floats_fma4(sum + m * sums, sums, eight, inputs);
                floats_fma4(sum + m * sums, sums, eight + 4, inputs + 4);
            }
        }
        UNROLL for (int m = 0; m < rows; m++) {
            UNROLL for (int i = 1; i < sums; i++) sum[m * sums] = floats_add(sum[m * sums],
                    sum[m * sums + i]);
            total[m] = floats_fma(total[m], sum[m * sums], scales);
        }
    }
    UNROLL for (int m = 0; m < rows; m++) floats_store(out[m], total[m]);
}

#define ROWS(format, wide, zeros)                                                                  \
    switch (rows) {                                                                                \
    case 1: tile(w, input, block, begin, out, 1, format, wide, zeros); return;                     \
    case 2: tile(w, input, block, begin, out, 2, format, wide, zeros); return;                     \
    case 3: tile(w, input, block, begin, out, 3, format, wide, zeros); return;                     \
    default: tile(w, input, block, begin, out, 4, format, wide, zeros); return;                    \
    }
#define SCALES(format, zeros)                                                                      \
    {                                                                                              \
        if (w->wide_scales) ROWS(format, 1, zeros)                                                 \
        else ROWS(format, 0, zeros)                                                                \
    }

void float_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    switch (w->format) {
    case INT4: if (w->zeros) SCALES(INT4, 1) else SCALES(INT4, 0)
    case INT8: if (w->zeros) SCALES(INT8, 1) else SCALES(INT8, 0)
    case FLOAT32: ROWS(FLOAT32, 0, 0)
    case FLOAT16: ROWS(FLOAT16, 0, 0)
    case BFLOAT16: ROWS(BFLOAT16, 0, 0)
    case FLOAT8: ROWS(FLOAT8, 0, 0)
    case VECTORS:
        if (w->wide_scales == WIDE_BFLOAT16) ROWS(VECTORS, WIDE_BFLOAT16, 0)
        SCALES(VECTORS, 0)
    }
}

// -- weights written out --------------------------------------------------------------------------

// Eight columns of a block as floats, group scales and factors multiplied in.
static void written_out(const Matrix *w, int block, int g, int k, const uint8_t *header,
        floats8 to[8]) {
    if (w->format == BLOCKS) {
        blocks_written_out(w, block, g * w->group + k, to);
        return;
    }
    if (w->format == TRELLIS) {
        trellis_written_out(w, block, g * w->group + k, to);
        return;
    }
    const int integers = w->format == INT4 || w->format == INT8;
    const int wide = w->wide_scales;
    const int size = integers ? (wide ? 32 : 16) + (w->zeros ? 16 : 0) : 0;
    floats8 scales = floats_splat(1);
    floats8 zero = floats_splat(0);
    if (integers) {
        scales = wide ? floats_load((const float *)header) : halves_load(header);
        zero = zero_points(header, w->format, wide, w->zeros);
    } else if (w->scales) {
        scales = floats_load(w->scales + ((size_t)block * w->groups + g) * WIDTH);
    }
    if (w->format == VECTORS) look_up(w, w->data + block * w->block_bytes, g * w->group + k, g,
            to, wide);
    else write_out(header + size + k / 8 * bytes_of_eight(w->format), to, zero, w->format);
    scales = floats_scale(scales, w->factor * weight_factor(w));
    for (int j = 0; j < 8; j++) to[j] = floats_multiply(to[j], scales);
}

static const uint8_t *group_header(const Matrix *w, int block, int g) {
    return w->data + block * w->block_bytes + (w->format == VECTORS ? 0
            : w->block_bytes / w->groups * g);
}

void block_to_floats(const Matrix *w, int block, int begin, int end, float *to, int stride) {
    for (int column = begin, last; column < end; column = last) {
        int g = column / w->group;
        const uint8_t *header = group_header(w, block, g);
        last = (g + 1) * w->group < end ? (g + 1) * w->group : end;
        for (int k = column; k < last; k += 8) {
            floats8 eight[8];
            written_out(w, block, g, k - g * w->group, header, eight);
            for (int j = 0; j < 8; j++, to += stride) floats_store(to, eight[j]);
        }
    }
}

void matrix_row(const Matrix *w, int row, float *out) {
    for (int g = 0; g < w->groups; g++)
        for (int k = 0; k < w->group; k += 8) {
            floats8 eight[8];
            written_out(w, row / WIDTH, g, k, group_header(w, row / WIDTH, g), eight);
            for (int j = 0; j < 8; j++) {
                float lanes[WIDTH];
                int column = g * w->group + k + j;
                int input = w->order ? w->order[column] : column;
                floats_store(lanes, eight[j]);
                if (input >= 0 && input < w->inputs) out[input] = lanes[row % WIDTH];
            }
        }
}
