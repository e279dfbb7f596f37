// y[m, n] = Σ over groups g of scale[n, g] · Σ over k in g of value(code[n, k]) · x[m, k]
//                             − min[n, g] · Σ over k in g of x[m, k]
//
// with codes of 2 to 6 bits, kept in those bits: GGUF's types, integers of 2, 3, 5 and 6 bits, and
// floats of 4.
//
//   block = super-block 0 | super-block 1 | …     of eight outputs and super_groups groups each
//   super-block = 8 scales | 8 minima (float16), if MINS_STORED | group 0 | group 1 | …
//   group = 8 sub-scales | 8 sub-minima or zero points (bytes), as far as there are | codes
//
// scale is the super-block's scale, times the group's (less sub_bias) where there is one; likewise
// min. A zero point stands for a minimum of zero · scale. SUBS_NIBBLES has both in one byte. Of
// NVFP4 a sub-scale is a float8 (SUBS_FLOAT8), of MXFP4 a power of two (SUBS_EXPONENTS).
//
// Codes of 16 inputs are `16 · bits` bytes: their lower 4 (or 2) bits in the order of dot_nibbles,
// then what is left of them as planes of 1 or 2 bits. They become bytes in registers, for which the
// compiler makes vectors of the loops below.
#include "matrix.h"

#define AHEAD 1024
#define STEP 16
#define STEP_CODES (STEP * WIDTH)

typedef struct {
    floats8 scales, mins; // of the super-block
    floats8 scale, min;   // of the group
} Scales;

ALWAYS_INLINE floats8 bytes_as_floats(const uint8_t *from, float less) {
    return floats_subtract(ints_to_floats(ints_from_bytes(from)), floats_splat(less));
}

ALWAYS_INLINE const uint8_t *super_header(const Matrix *w, const uint8_t *at, Scales *s) {
    s->scales = w->wide_scales ? floats_load((const float *)at) : halves_load(at);
    at += w->wide_scales ? 32 : 16;
    s->mins = floats_splat(0);
    if (w->mins == MINS_STORED) {
        s->mins = halves_load(at);
        at += 16;
    }
    return at;
}

ALWAYS_INLINE floats8 powers_of_two(const uint8_t *exponents) {
    union {
        uint32_t bits[WIDTH];
        float values[WIDTH];
    } powers;
    for (int i = 0; i < WIDTH; i++)
        powers.bits[i] = exponents[i] ? (uint32_t)exponents[i] << 23 : 1u << 22;
    return floats_load(powers.values);
}

ALWAYS_INLINE const uint8_t *group_scales(const Matrix *w, const uint8_t *at, Scales *s) {
    s->scale = s->scales;
    s->min = s->mins;
    if (w->subs == SUBS_NIBBLES) {
        uint8_t lower[WIDTH], upper[WIDTH];
        for (int i = 0; i < WIDTH; i++) {
            lower[i] = at[i] & 15;
            upper[i] = at[i] >> 4;
        }
        s->scale = floats_multiply(s->scales, bytes_as_floats(lower, 0));
        s->min = floats_multiply(s->mins, bytes_as_floats(upper, 0));
        return at + 8;
    }
    if (w->subs >= SUBS_FLOAT8) {
        const floats8 own = w->subs == SUBS_FLOAT8
                ? floats_scale(small_float8s_load(at), FLOAT8_FACTOR) : powers_of_two(at);
        s->scale = floats_multiply(s->scales, own);
        return at + 8;
    }
    if (w->subs) {
        s->scale = floats_multiply(s->scales, bytes_as_floats(at, (float)w->sub_bias));
        at += 8;
    }
    if (w->mins == MINS_ZEROS) {
        s->min = floats_multiply(s->scale, bytes_as_floats(at, 0));
        at += 8;
    }
    if (w->mins == MINS_STORED && w->subs) {
        s->min = floats_multiply(s->mins, bytes_as_floats(at, 0));
        at += 8;
    }
    return at;
}

// The codes of 16 inputs and eight outputs, in the order of dot_bytes.
ALWAYS_INLINE void unpack_codes(const uint8_t *at, uint8_t *to, const int bits) {
    const int low = bits < 4 ? 2 : 4;
    const uint8_t *more = at + STEP * low;
    for (int quarter = 0; quarter < 4; quarter++)
        for (int i = 0; i < 32; i++)
            to[32 * quarter + i] = low == 4 ? at[32 * (quarter / 2) + i] >> (quarter % 2 * 4) & 15
                    : at[i] >> (2 * quarter) & 3;
    if (bits - low == 1)
        for (int bit = 0; bit < 8; bit++)
            for (int i = 0; i < 16; i++) to[16 * bit + i] |= (more[i] >> bit & 1) << low;
    if (bits - low == 2)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++)
                to[32 * quarter + i] |= (more[i] >> (2 * quarter) & 3) << low;
}

// What they stand for, as signed bytes.
ALWAYS_INLINE void unpack_values(const Matrix *w, const uint8_t *at, uint8_t *to, const int bits,
        const int table) {
    unpack_codes(at, to, bits);
    if (table) {
        bytes_look_up(to, w->table, STEP_CODES);
        return;
    }
    const uint8_t middle = (uint8_t)w->middle;
    for (int i = 0; i < STEP_CODES; i++) to[i] = (uint8_t)(to[i] - middle);
}

// -- x in 8 bits ----------------------------------------------------------------------------------

ALWAYS_INLINE void integer_tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows, const int bits, const int table) {
    const int as_nibbles = bits == 4 && !table;
    const int sums = DOT_SUMS / rows > 1 ? DOT_SUMS / rows : 1;
    const int groups = input_groups(w);
    const int middle = as_nibbles ? w->middle : BYTE_BIAS;
    const uint8_t *at = w->data + block * w->block_bytes;
    const int8_t *x = input->codes + (size_t)begin * w->columns;
    const float *xscales = input->scales + (size_t)begin * groups;
    const int32_t *xsums = input->sums + (size_t)begin * groups;
    Scales s;
    floats8 total[4];
    ints8 sum[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < w->groups; g++) {
        if (g % w->super_groups == 0) at = super_header(w, at, &s);
        at = group_scales(w, at, &s);
        for (int part = 0; part < w->group; part += w->input_group, xscales++, xsums++) {
            UNROLL for (int m = 0; m < rows; m++) {
                sum[m * sums] = ints_splat(MIDDLE_BITS - middle * xsums[m * groups]);
                UNROLL for (int i = 1; i < sums; i++) sum[m * sums + i] = ints_splat(0);
            }
            for (int k = 0; k < w->input_group; k += STEP, at += STEP * bits, x += STEP) {
                __builtin_prefetch(at + AHEAD);
                if (as_nibbles) {
                    dot_nibbles(sum, at, x, w->columns, rows, sums);
                } else {
                    uint8_t values[STEP_CODES];
                    unpack_values(w, at, values, bits, table);
                    dot_bytes(sum, values, x, w->columns, rows, sums);
                }
            }
            UNROLL for (int m = 0; m < rows; m++) {
                UNROLL for (int i = 1; i < sums; i++)
                    sum[m * sums] = ints_add(sum[m * sums], sum[m * sums + i]);
                floats8 whole = floats_subtract(ints_as_floats(sum[m * sums]),
                        floats_splat(MIDDLE));
                float xscale = xscales[m * groups];
                total[m] = floats_fma(total[m], whole, floats_scale(s.scale, xscale));
                if (w->mins) total[m] = floats_fma_scalar(total[m], s.min,
                        -xscale * (float)xsums[m * groups]);
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++) floats_store(out[m], total[m]);
}

// -- x in float32 ---------------------------------------------------------------------------------

// Eight of 16 inputs as floats: the weights themselves.
ALWAYS_INLINE void eight_inputs(const uint8_t *values, const Scales *s, floats8 to[8]) {
    bytes_to_floats(to, values);
    UNROLL for (int j = 0; j < 8; j++) {
        to[j] = floats_subtract(to[j], floats_splat(128 + CODE_OFFSET));
        to[j] = floats_subtract(floats_multiply(to[j], s->scale), s->min);
    }
}

ALWAYS_INLINE void float_tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows, const int bits, const int table) {
    const uint8_t *at = w->data + block * w->block_bytes;
    const float *x = input->values + (size_t)begin * input->stride;
    Scales s;
    floats8 total[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < w->groups; g++) {
        if (g % w->super_groups == 0) at = super_header(w, at, &s);
        at = group_scales(w, at, &s);
        for (int k = 0; k < w->group; k += STEP, at += STEP * bits, x += STEP) {
            uint8_t values[STEP_CODES];
            unpack_values(w, at, values, bits, table);
            UNROLL for (int half = 0; half < 2; half++) {
                floats8 eight[8];
                eight_inputs(values + 64 * half, &s, eight);
                UNROLL for (int m = 0; m < rows; m++) {
                    const float *inputs = x + (size_t)m * input->stride + 8 * half;
                    floats_fma4(total + m, 1, eight, inputs);
                    floats_fma4(total + m, 1, eight + 4, inputs + 4);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++) floats_store(out[m], total[m]);
}

#define ROWS(tile, bits, table)                                                                    \
    switch (rows) {                                                                                \
    case 1: tile(w, input, block, begin, out, 1, bits, table); return;                             \
    case 2: tile(w, input, block, begin, out, 2, bits, table); return;                             \
    case 3: tile(w, input, block, begin, out, 3, bits, table); return;                             \
    default: tile(w, input, block, begin, out, 4, bits, table); return;                            \
    }
#define BITS(tile)                                                                                 \
    switch (w->bits) {                                                                             \
    case 2: ROWS(tile, 2, 0)                                                                       \
    case 3: ROWS(tile, 3, 0)                                                                       \
    case 5: ROWS(tile, 5, 0)                                                                       \
    case 6: ROWS(tile, 6, 0)                                                                       \
    default:                                                                                       \
        if (w->table) ROWS(tile, 4, 1)                                                             \
        ROWS(tile, 4, 0)                                                                           \
    }

static void integer_rows(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    BITS(integer_tile)
}

static void float_rows(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    BITS(float_tile)
}

void blocks_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    if (takes_integers(w)) integer_rows(w, input, block, begin, rows, out);
    else float_rows(w, input, block, begin, rows, out);
}

// -- weights written out --------------------------------------------------------------------------

static int group_header_bytes(const Matrix *w) {
    if (w->subs == SUBS_NIBBLES) return 8;
    return (w->subs ? 8 : 0) + (w->mins == MINS_ZEROS || (w->mins && w->subs) ? 8 : 0);
}

void blocks_written_out(const Matrix *w, int block, int column, floats8 to[8]) {
    const int group = column / w->group;
    const int64_t group_bytes = group_header_bytes(w) + (int64_t)w->group * w->bits;
    const int64_t super_bytes = w->block_bytes / (w->groups / w->super_groups);
    const uint8_t *at = w->data + block * w->block_bytes + group / w->super_groups * super_bytes;
    Scales s;
    at = super_header(w, at, &s) + group % w->super_groups * group_bytes;
    at = group_scales(w, at, &s) + column % w->group / STEP * STEP * w->bits;
    uint8_t values[STEP_CODES];
    switch (w->bits) {
    case 2: unpack_values(w, at, values, 2, 0); break;
    case 3: unpack_values(w, at, values, 3, 0); break;
    case 5: unpack_values(w, at, values, 5, 0); break;
    case 6: unpack_values(w, at, values, 6, 0); break;
    default: unpack_values(w, at, values, 4, w->table != NULL);
    }
    eight_inputs(values + column % STEP * 8, &s, to);
    for (int j = 0; j < 8; j++) to[j] = floats_scale(to[j], w->factor);
}
