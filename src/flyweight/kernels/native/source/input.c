// x as a matrix takes it: columns in the matrix's order and filled up with zeros, then rounded to
// what its format asks for.
//
// Integers: codes = round(127 x / most), scale = most / 127 over each group, ties to even:
// `quantize_int8_rows` in tensors/. A group with NaN or infinity gets the scale NaN, so that the
// result says so. Float8 stays floats, rounded to e4m3; float16 by row is for product_half.c.
#include <math.h>

#include "matrix.h"

#define ALIGNED(bytes) (((size_t)(bytes) + 63) / 64 * 64)

static int needs_copy(const Matrix *w) {
    if (input_factor(w) != 1) return 1;
    if (w->order || w->columns != w->inputs || w->column_scale || w->column_bias) return 1;
    return w->activation != AS_IT_IS && !takes_integers(w) && !takes_halves(w);
}

size_t input_bytes(const Matrix *w, int rows) {
    size_t values = needs_copy(w) ? ALIGNED(4 * (size_t)rows * w->columns) : 0;
    size_t tiles = ALIGNED(4 * (size_t)tiles_of(w, rows) * PANEL_ROWS * w->columns);
    size_t codes = takes_integers(w) ? ALIGNED((size_t)rows * w->columns) : 0;
    if (takes_halves(w)) codes = ALIGNED(2 * (size_t)rows * w->columns) + ALIGNED(4 * (size_t)rows);
    size_t scales = takes_integers(w) ? 2 * ALIGNED(4 * (size_t)rows * input_groups(w)) : 0;
    return values + tiles + codes + scales + ALIGNED(4 * (size_t)rows);
}

void input_place(const Matrix *w, Input *input, const float *x, int rows, int stride,
        void *scratch) {
    uint8_t *at = scratch;
    *input = (Input){.rows = rows, .values = x, .stride = stride, .offsets = (float *)at};
    at += ALIGNED(4 * (size_t)rows);
    if (needs_copy(w)) {
        input->values = (float *)at;
        input->stride = w->columns;
        at += ALIGNED(4 * (size_t)rows * w->columns);
    }
    if (tiles_of(w, rows)) input->tiles = (float *)at;
    if (takes_integers(w)) {
        input->codes = (int8_t *)at;
        at += ALIGNED((size_t)rows * w->columns);
        input->scales = (float *)at;
        at += ALIGNED(4 * (size_t)rows * input_groups(w));
        input->sums = (int32_t *)at;
    }
    if (takes_halves(w)) {
        input->codes = (int8_t *)at;
        input->scales = (float *)(at + ALIGNED(2 * (size_t)rows * w->columns));
    }
}

int input_same(const Matrix *a, const Matrix *b) {
    if (takes_integers(a) && (a->format != b->format || a->zeros != b->zeros
            || a->wide_scales != b->wide_scales)) return 0;
    return a->activation == b->activation && a->inputs == b->inputs && a->columns == b->columns
        && a->input_group == b->input_group
        && a->order == b->order && a->column_scale == b->column_scale
                && a->column_bias == b->column_bias
        && a->input_scale == b->input_scale && a->input_zero == b->input_zero
                && input_factor(a) == input_factor(b);
}

static float largest(const float *x, int count) {
    int32_t most = 0;
    for (int k = 0; k < count; k++) {
        int32_t bits;
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff; // magnitudes compare like their bits, and NaN is above infinity
        most = bits > most ? bits : most;
    }
    float value;
    memcpy(&value, &most, 4);
    return value;
}

#define GROUPS_AT_ONCE 8

// Where the integers of one row go.
typedef struct {
    int8_t *codes;
    float *scales;  // of groups 0, next, 2 · next, …
    int32_t *sums;
    size_t next;
} Row;

// Up to GROUPS_AT_ONCE groups, in three passes over them: what each group needs from its largest
// value is a long chain of instructions, and those of several groups run beside each other.
ALWAYS_INLINE void quantize_groups(const float *x, Row row, int groups, int count,
        const int in_quad) {
    float most[GROUPS_AT_ONCE], inverse[GROUPS_AT_ONCE];
    for (int g = 0; g < groups; g++) {
        int32_t bits = 0;
        for (int k = 0; k < count; k += 16) bits = largest_bits(x + g * count + k, bits);
        memcpy(most + g, &bits, 4);
    }
    for (int g = 0; g < groups; g++) {
        int is_number = most[g] <= 3.4028234e38f;
        float least = most[g] < 127e-12f ? 127e-12f : most[g];
        inverse[g] = is_number ? 127.0f / least : 0;
        row.scales[g * row.next] = is_number ? least / 127.0f : NAN;
    }
    for (int g = 0; g < groups; g++) {
        int32_t total = 0;
        for (int k = 0; k < count; k += 16, row.codes += in_quad ? 16 * QUAD : 16)
            total += round_codes(x + g * count + k, inverse[g], row.codes, in_quad);
        row.sums[g * row.next] = total;
    }
}

// One row of x as integers, among those of a quad or on its own.
static void quantize_row(const Matrix *w, Input *input, const float *x, int index) {
    int groups = input_groups(w);
    int tiled = index < tiled_rows(w, input->rows);
    size_t first = tiled ? index / QUAD * QUAD : index;
    int within = tiled ? index % QUAD : 0;
    size_t next = tiled ? QUAD : 1;
    Row row = {input->codes + first * w->columns + TOGETHER * within,
            input->scales + first * groups + within, input->sums + first * groups + within, next};
    int32_t *sums = row.sums;
    for (int g = 0; g < groups; g += GROUPS_AT_ONCE) {
        int some = groups - g < GROUPS_AT_ONCE ? groups - g : GROUPS_AT_ONCE;
        const float *from = x + (size_t)g * w->input_group;
        if (tiled) quantize_groups(from, row, some, w->input_group, 1);
        else quantize_groups(from, row, some, w->input_group, 0);
        row.codes += (size_t)some * w->input_group * next;
        row.scales += some * next;
        row.sums += some * next;
    }
    if (w->zeros || takes_sums(w)) return;
    int32_t from = w->wide_scales ? 0 : MIDDLE_BITS;
    int32_t middle = w->format == INT4 ? 8 : BYTE_BIAS;
    for (int g = 0; g < groups; g++) sums[g * next] = from - middle * sums[g * next];
}

// x · 2^n as float16, with n such that the largest comes near HALF_INPUT; the scale is 2^-n.
static void narrow_row(const float *x, int count, uint16_t *to, float *scale) {
    float most = largest(x, count);
    if (!(most <= 3.4028234e38f)) {
        memset(to, 0, 2 * (size_t)count);
        *scale = NAN;
        return;
    }
    int exponent = 0;
    frexpf(HALF_INPUT / (most < 1e-30f ? 1e-30f : most), &exponent);
    exponent--;
    float factor = ldexpf(1, exponent);
    for (int k = 0; k < count; k += WIDTH)
        halves_store(to + k, floats_scale(floats_load(x + k), factor));
    *scale = ldexpf(1, -exponent);
}

// To the nearest e4m3, ties to even; |x| is at most 448 or x is NaN.
static inline float round_float8(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000;
    float normal;
    memcpy(&normal, &rounded, 4);
    float tiny = rintf(x * 512.0f) * (1 / 512.0f);
    float value = fabsf(x) < 0x1p-6f ? tiny : normal;
    return x == x ? value : x;
}

static void round_float8_group(float *x, int count, float scale) {
    for (int k = 0; k < count; k++) {
        float value = x[k] / scale;
        value = value > 448.0f ? 448.0f : value;
        value = value < -448.0f ? -448.0f : value;
        x[k] = round_float8(value) * scale;
    }
}

static float float8_scale(const float *x, int count) {
    float most = largest(x, count) / 448.0f;
    return most < 1e-12f ? 1e-12f : most;
}

static void round_int8_static(float *x, int count, float scale, float zero) {
    for (int k = 0; k < count; k++) {
        float value = rintf(x[k] / scale + zero);
        value = value > 127.0f ? 127.0f : value;
        value = value < -128.0f ? -128.0f : value;
        x[k] = (value - zero) * scale;
    }
}

static void copy_columns(const Matrix *w, const float *x, float *to, float *offset) {
    float total = 0;
    for (int k = 0; k < w->columns; k++) {
        int from = w->order ? w->order[k] : k < w->inputs ? k : -1;
        to[k] = from < 0 ? 0 : x[from];
    }
    if (w->column_bias)
        for (int k = 0; k < w->columns; k++) total += to[k] * w->column_bias[k];
    if (w->column_scale)
        for (int k = 0; k < w->columns; k++) to[k] *= w->column_scale[k];
    *offset = total;
}

static void round_row(const Matrix *w, float *x) {
    int count = w->inputs;
    if (w->activation == FLOAT8_TOKEN) round_float8_group(x, count, float8_scale(x, count));
    if (w->activation == FLOAT8_STATIC) round_float8_group(x, count, w->input_scale);
    if (w->activation == INT8_STATIC) round_int8_static(x, count, w->input_scale, w->input_zero);
    if (w->activation == FLOAT8_GROUP)
        for (int k = 0; k < count; k += 128) round_float8_group(x + k, 128, float8_scale(x + k,
                128));
}

// Rows begin to end into their tiles, and zeros behind the last row.
static void fill_tiles(const Matrix *w, Input *input, const float *x, int stride, int begin,
        int end) {
    int filled = end < input->rows ? end : tiles_of(w, end) * PANEL_ROWS;
    for (int row = begin, last; row < filled; row = last) {
        last = row / PANEL_ROWS * PANEL_ROWS + PANEL_ROWS;
        last = last < filled ? last : filled;
        float *to = input->tiles + (size_t)(row / PANEL_ROWS) * PANEL_ROWS * w->columns;
        for (int k = 0; k < w->columns; k++, to += PANEL_ROWS)
            for (int m = row; m < last; m++)
                to[m % PANEL_ROWS] = m < end ? x[(size_t)m * stride + k] : 0;
    }
}

void input_fill(const Matrix *w, Input *input, const float *x, int stride, int begin, int end) {
    for (int row = begin; row < end; row++) {
        const float *values = x + (size_t)row * stride;
        input->offsets[row] = 0;
        if (needs_copy(w)) {
            float *to = (float *)input->values + (size_t)row * w->columns;
            copy_columns(w, values, to, input->offsets + row);
            round_row(w, to);
            if (input_factor(w) != 1)
                for (int k = 0; k < w->columns; k++) to[k] *= input_factor(w);
            values = to;
        }
        if (takes_halves(w)) narrow_row(values, w->columns,
                (uint16_t *)input->codes + (size_t)row * w->columns, input->scales + row);
        if (takes_integers(w)) quantize_row(w, input, values, row);
    }
    if (!tiles_of(w, input->rows)) return;
    if (needs_copy(w)) fill_tiles(w, input, input->values, w->columns, begin, end);
    else fill_tiles(w, input, x, stride, begin, end);
}
