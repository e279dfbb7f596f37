// Every product against sums in double, for processors that Python does not run on here: compiled
// with the kernels for x86 (under an emulator) or without any vectors. Ends with 0 and the name of
// the instructions, or says what is wrong.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "matrix.h"

#define OUTPUTS 43
#define MOST_INPUTS 256
#define ROWS 25 // three tiles of eight, and one more

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
    for (int rows = 1; rows <= ROWS; rows += rows < 5 ? 1 : 10) {
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

// -- codes of 2 to 6 bits -------------------------------------------------------------------------

typedef struct {
    const char *name;
    int bits, activation, mins, subs, table;
    double most;
} BlockCase;

static const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69,
        89, 113};

// One code among those of 16 inputs and eight outputs.
static void put_code(uint8_t *step, int bits, int output, int input, int code) {
    int at = 32 * (input / 4) + 4 * output + input % 4;
    int low = bits < 4 ? 2 : 4;
    uint8_t *more = step + 16 * low;
    if (low == 4) step[32 * (at / 64) + at % 32] |= (code & 15) << (at / 32 % 2 * 4);
    else step[at % 32] |= (code & 3) << (at / 32 * 2);
    if (bits - low == 1) more[at % 16] |= (code >> low & 1) << (at / 16);
    if (bits - low == 2) more[at % 32] |= (code >> low & 3) << (at / 32 * 2);
}

static float put_scale(uint8_t *at, int output) { // a power of two, as float16
    int exponent = draw() % 4;
    ((uint16_t *)at)[output] = (uint16_t)((15 - 6 - exponent) << 10);
    return ldexpf(1, -6 - exponent);
}

// Four super-blocks of two groups of 16 inputs.
static Matrix make_blocks(const BlockCase *c, uint8_t *data) {
    int header = c->mins == MINS_STORED ? 32 : 16;
    int own = c->subs == SUBS_NIBBLES ? 8 : (c->subs ? 8 : 0)
            + (c->mins == MINS_ZEROS || (c->mins && c->subs) ? 8 : 0);
    int group = own + 16 * c->bits;
    Matrix w = {.format = BLOCKS, .activation = c->activation, .outputs = OUTPUTS, .inputs = 128};
    w.columns = 128;
    w.group = w.input_group = 16;
    w.groups = 8;
    w.factor = 1;
    w.bits = c->bits;
    w.super_groups = 2;
    w.mins = c->mins;
    w.subs = c->subs;
    w.sub_bias = c->subs == SUBS_BYTES ? 128 : 0;
    w.middle = c->mins || c->table ? 0 : 1 << (c->bits - 1);
    w.table = c->table ? values : NULL;
    w.block_bytes = 4 * (header + 2 * group);
    w.data = data;
    memset(data, 0, matrix_blocks(&w) * w.block_bytes);
    for (int n = 0; n < OUTPUTS; n++)
        for (int super = 0; super < 4; super++) {
            uint8_t *at = data + n / 8 * w.block_bytes + super * (header + 2 * group);
            float scale = put_scale(at, n % 8);
            float least = c->mins == MINS_STORED ? put_scale(at + 16, n % 8) : 0;
            for (int g = 0; g < 2; g++) {
                uint8_t *own_at = at + header + g * group;
                int sub = draw() % 16;
                int more = draw() % 16;
                float s = scale * (c->subs ? (float)sub : 1);
                float m = least * (c->subs ? (float)more : 1);
                if (c->mins == MINS_ZEROS) m = s * (float)more;
                if (c->subs == SUBS_NIBBLES) own_at[n % 8] = (uint8_t)(sub | more << 4);
                else if (c->subs) own_at[n % 8] = (uint8_t)(sub + 128);
                if (own > 8) own_at[8 + n % 8] = (uint8_t)more;
                else if (c->mins == MINS_ZEROS) own_at[n % 8] = (uint8_t)more;
                for (int k = 0; k < 16; k++) {
                    int code = draw() % (1 << c->bits);
                    put_code(own_at + own, c->bits, n % 8, k, code);
                    int value = c->table ? values[code] : code - w.middle;
                    dense[n][super * 32 + g * 16 + k] = s * (float)value - m;
                }
            }
        }
    return w;
}

static int check_blocks(Team *team, const BlockCase *c) {
    static uint8_t data[6 * 4 * (32 + 2 * (16 + 96))];
    Matrix w = make_blocks(c, data);
    for (int i = 0; i < ROWS * 128; i++) x[i] = draw_float();
    void *scratch = aligned_alloc(64, (matrix_scratch(&w, ROWS) + 63) / 64 * 64);
    double most = 0;
    double error = 0;
    for (int rows = 1; rows <= ROWS; rows += rows < 5 ? 1 : 10) {
        matrix_multiply(team, &w, x, y, rows, scratch);
        for (int m = 0; m < rows; m++)
            for (int n = 0; n < OUTPUTS; n++) {
                double sum = 0;
                for (int k = 0; k < 128; k++) sum += (double)dense[n][k] * x[m * 128 + k];
                most = fmax(most, fabs(sum));
                error = fmax(error, fabs(sum - y[m * OUTPUTS + n]));
            }
    }
    free(scratch);
    for (int n = 0; n < OUTPUTS; n++) {
        float row[128];
        matrix_row(&w, n, row);
        for (int k = 0; k < 128; k++)
            if (fabsf(row[k] - dense[n][k]) > 1e-6f * fabsf(dense[n][k]) + 1e-6f) error = INFINITY;
    }
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
    const BlockCase small[] = {
        {"2 bits, as Q2_K", 2, INT8_GROUP, MINS_STORED, SUBS_NIBBLES, 0, rounded},
        {"3 bits, as Q3_K", 3, INT8_GROUP, MINS_NONE, SUBS_BYTES, 0, rounded},
        {"3 bits with zero points", 3, INT8_GROUP, MINS_ZEROS, SUBS_NONE, 0, rounded},
        {"4 bits, as Q4_1", 4, INT8_GROUP, MINS_STORED, SUBS_NONE, 0, rounded},
        {"4 bits, as Q4_K", 4, INT8_GROUP, MINS_STORED, SUBS_BYTES, 0, rounded},
        {"4 bits, as IQ4_XS", 4, INT8_GROUP, MINS_NONE, SUBS_BYTES, 1, rounded},
        {"5 bits, as Q5_0", 5, INT8_GROUP, MINS_NONE, SUBS_NONE, 0, rounded},
        {"6 bits, as Q6_K", 6, INT8_GROUP, MINS_NONE, SUBS_BYTES, 0, rounded},
        {"2 bits exact", 2, AS_IT_IS, MINS_STORED, SUBS_NIBBLES, 0, exact},
        {"3 bits exact", 3, AS_IT_IS, MINS_ZEROS, SUBS_BYTES, 0, exact},
        {"4 bits exact", 4, AS_IT_IS, MINS_STORED, SUBS_BYTES, 1, exact},
        {"5 bits exact", 5, AS_IT_IS, MINS_STORED, SUBS_BYTES, 0, exact},
        {"6 bits exact", 6, AS_IT_IS, MINS_NONE, SUBS_BYTES, 0, exact},
    };
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        wrong += check_blocks(team, &small[i]);
    printf("%s\n", instructions());
    return wrong != 0;
}
