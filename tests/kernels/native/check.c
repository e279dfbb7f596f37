// Every product against sums in double, for processors that Python does not run on here: compiled
// with the kernels for x86 (under an emulator) or without any vectors. Ends with 0 and the name of
// the instructions, or says what is wrong.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "matrix.h"

#define OUTPUTS 43
#define MOST_INPUTS 256
#define ROWS 7

static uint32_t state = 1;

static uint32_t draw(void) { // xorshift: the same numbers everywhere
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static float draw_float(void) {
    return (float)(draw() % 20001) / 10000.0f - 1.0f;
}

typedef struct {
    const char *name;
    int format, activation, inputs, group, wide, zeros;
    double most; // error allowed, of the largest result
} Case;

static float dense[OUTPUTS][MOST_INPUTS], x[ROWS * MOST_INPUTS], y[ROWS * OUTPUTS];
static uint8_t codes[OUTPUTS * MOST_INPUTS * 4], zero_points[OUTPUTS * MOST_INPUTS];
static float scales[OUTPUTS * MOST_INPUTS];

static float decode_float8(uint8_t byte) {
    int exponent = byte >> 3 & 15;
    int mantissa = byte & 7;
    float size = exponent ? ldexpf(1 + mantissa / 8.0f, exponent - 7) : ldexpf(mantissa / 8.0f, -6);
    return byte & 0x80 ? -size : size;
}

// The weight of one place, written to `codes` in the format's bits.
static float make_weight(const Case *c, int n, int k, int group) {
    int at = n * c->inputs + k;
    int from = n * ((c->inputs + c->group - 1) / c->group) + group;
    int code = draw() % 256;
    float value = draw_float();
    uint32_t bits;
    memcpy(&bits, &value, 4);
    switch (c->format) {
    case INT4: case INT8: {
        int few = c->format == INT4 ? 15 : 255;
        codes[at] = code & few;
        return scales[from] * ((code & few) - (c->zeros ? zero_points[from] : (few + 1) / 2));
    }
    case FLOAT32:
        memcpy(codes + 4 * at, &value, 4);
        return value;
    case BFLOAT16:
        ((uint16_t *)codes)[at] = bits >> 16;
        bits &= 0xffff0000;
        memcpy(&value, &bits, 4);
        return value;
    case FLOAT16: // a sixteenth and its multiples below 8, of either sign: 3 exponents and 5 bits
        ((uint16_t *)codes)[at] =
                (uint16_t)((code & 1) << 15 | (14 + code % 3) << 10 | (code >> 3) << 5);
        value = ldexpf(1 + (code >> 3) / 32.0f, code % 3 - 1);
        return code & 1 ? -value : value;
    default:
        codes[at] = code & 0x7f & ~(code % 5 ? 0 : 0x78) & 0x77; // no NaN, some subnormal
        return decode_float8(codes[at]);
    }
}

static int bytes_of_eight(int format) {
    return format == INT4 ? 32 : format == FLOAT32 ? 256 : format == INT8 || format == FLOAT8
            ? 64 : 128;
}

static Matrix describe(const Case *c) {
    int integers = c->format == INT4 || c->format == INT8;
    int group = integers ? c->group : (c->inputs + 7) / 8 * 8;
    int groups = integers ? (c->inputs + group - 1) / group : 1;
    Matrix w = {.format = c->format, .activation = c->activation, .outputs = OUTPUTS, .inputs =
            c->inputs};
    w.group = group;
    w.groups = groups;
    w.input_group = integers && group > 32 ? 32 : group;
    w.columns = group * groups;
    w.wide_scales = c->wide;
    w.zeros = c->zeros;
    w.factor = 1;
    w.block_bytes = groups * ((integers ? (c->wide ? 32 : 16) + 16 * c->zeros
            : 0) + group / 8 * bytes_of_eight(c->format));
    return w;
}

static int check(Team *team, const Case *c) {
    Matrix w = describe(c);
    int groups = (c->inputs + c->group - 1) / c->group;
    int integers = c->format == INT4 || c->format == INT8;
    for (int i = 0; i < OUTPUTS * groups; i++) {
        scales[i] = (float)(1 + draw() % 64) / 1024; // float16 holds it
        zero_points[i] = c->format == INT4 ? draw() % 16 : draw() % 256;
    }
    for (int n = 0; n < OUTPUTS; n++)
        for (int k = 0; k < c->inputs; k++) dense[n][k] = make_weight(c, n, k, k / c->group);
    for (int i = 0; i < ROWS * c->inputs; i++) x[i] = draw_float();
    uint8_t *data = aligned_alloc(64, (matrix_blocks(&w) * w.block_bytes + 63) / 64 * 64);
    int bits = integers ? 8 : bytes_of_eight(c->format) / 8;
    Packing packing = {&w, codes, (int64_t)c->inputs * bits / 8, bits, 0, scales, zero_points,
            c->group, groups, 1, 0, data};
    w.data = data;
    matrix_pack(team, &packing);
    void *scratch = aligned_alloc(64, (matrix_scratch(&w, ROWS) + 63) / 64 * 64);
    double most = 0;
    double error = 0;
    for (int rows = 1; rows <= ROWS; rows++) {
        matrix_multiply(team, &w, x, y, rows, scratch);
        for (int m = 0; m < rows; m++)
            for (int n = 0; n < OUTPUTS; n++) {
                double sum = 0;
                for (int k =
                        0; k < c->inputs; k++) sum += (double)dense[n][k] * x[m * c->inputs + k];
                most = fmax(most, fabs(sum));
                error = fmax(error, fabs(sum - y[m * OUTPUTS + n]));
            }
    }
    free(data);
    free(scratch);
    if (error <= c->most * most) return 0;
    printf("%s: error %g of %g\n", c->name, error, most);
    return 1;
}

int main(void) {
    const double exact = 2e-6;
    const double rounded = 0.02;
    const Case cases[] = {
        {"int4", INT4, INT8_GROUP, 256, 64, 0, 0, rounded},
        {"int4 zeros", INT4, INT8_GROUP, 256, 32, 0, 1, rounded},
        {"int4 wide", INT4, INT8_GROUP, 192, 64, 1, 1, rounded},
        {"int4 exact", INT4, AS_IT_IS, 256, 64, 0, 1, exact},
        {"int4 ragged", INT4, AS_IT_IS, 200, 16, 0, 0, exact},
        {"int8", INT8, INT8_GROUP, 256, 128, 0, 0, rounded},
        {"int8 zeros", INT8, INT8_GROUP, 256, 32, 1, 1, rounded},
        {"int8 exact", INT8, AS_IT_IS, 256, 32, 0, 1, exact},
        {"float32", FLOAT32, AS_IT_IS, 101, 104, 0, 0, exact},
        {"float16", FLOAT16, AS_IT_IS, 101, 104, 0, 0, exact},
        {"bfloat16", BFLOAT16, AS_IT_IS, 101, 104, 0, 0, exact},
        {"float8", FLOAT8, AS_IT_IS, 101, 104, 0, 0, exact},
    };
    int wrong = 0;
    Team *team = team_make(2, NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) wrong += check(team, &cases[i]);
    printf("%s\n", instructions());
    return wrong != 0;
}
