// y[m, n] = Σ over groups g of scale[n, g] · Σ over k in g of value[n, k] · x[m, k]
//
// of weights in the trellis code (tensors/trellis.py): `bits` new bits for each weight, four weights
// a step, and the step's value is a hash of the last STATE bits. The three words of the hash are
// multiplied with x one after the other, each as four signed bytes: nothing adds them up before.
//
//   tile (16 outputs) = circle | circle | …         of 128 inputs; a row may end with one of 64
//   circle = stream 0 | stream 1 | stream 2 | stream 3     t: inputs 8 t … + 7 of each half of 64
//   stream = word 0 of outputs 0 to 7 | word 1 of them | …    `bits` words of 32 bits for each 64
//
// Output g + 8 lies in the streams of output g: a block of eight reads the tile that it is a half of
// and takes every second step.
//
// PLANES, made for many rows out of TRELLIS: [groups][halves][3][256 bytes], in the order of dot_bytes.
#include "matrix.h"

#define AHEAD 1024
#define INPUTS 64 // of a group
#define HALF 32
#define HALF_PLANE (HALF * WIDTH)
#define STATE(bits) ((bits) == 2 ? 18 : 20) // bits of a stream that a step sees

static const uint32_t FIRST = 0xcbac1fed, OFFSET = 0x01234567, SECOND = 0x9e3779b1,
        THIRD = 0x85ebca6b;

typedef uint32_t words8 __attribute__((vector_size(32)));

// Where 64 inputs of eight outputs are.
typedef struct {
    const uint32_t *words;  // of the circle
    int count;              // words of a stream
    int step;               // the first of this group and these outputs
} Circle;

ALWAYS_INLINE Circle circle_of(const Matrix *w, int block, int g, const int bits) {
    const uint32_t *tile = (const uint32_t *)(w->data + block / 2 * (2 * w->block_bytes));
    const int alone = g % 2 == 0 && g + 1 == w->groups;
    return (Circle){tile + (g - g % 2) * 4 * bits * WIDTH, alone ? bits : 2 * bits,
            8 * (g % 2) + block % 2};
}

// The words of four inputs of eight outputs in streams t to t + count: to [stream][plane], so far
// apart.
ALWAYS_INLINE void step_words(Circle c, int step, int t, const int count, uint32_t *to,
        const int stream, const int plane, const int bits) {
    const int at = 4 * bits * step;
    const int low = at / 32;
    const int high = low + 1 == c.count ? 0 : low + 1;
    const uint32_t shift = (uint32_t)at % 32;
    UNROLL for (int i = 0; i < count; i++, to += stream) {
        const uint32_t *from = c.words + (t + i) * c.count * WIDTH;
        words8 lower, upper;
        memcpy(&lower, from + low * WIDTH, sizeof lower);
        memcpy(&upper, from + high * WIDTH, sizeof upper);
        const words8 both = lower >> shift | (upper << 1) << (31 - shift);
        const words8 first = (both & (uint32_t)((1 << STATE(bits)) - 1)) * FIRST + OFFSET;
        const words8 turned = first << 16 | first >> 16;
        const words8 second = turned * SECOND, third = turned * THIRD;
        memcpy(to, &first, sizeof first);
        memcpy(to + plane, &second, sizeof second);
        memcpy(to + 2 * plane, &third, sizeof third);
    }
}

// Half a group, in three planes of 32 inputs.
ALWAYS_INLINE void half_planes(Circle c, int half, uint32_t to[3 * HALF_PLANE / 4],
        const int bits) {
    UNROLL for (int four = 0; four < 2; four++)
        step_words(c, c.step + 4 * half + 2 * four, 0, 4, to + four * WIDTH, 2 * WIDTH,
                HALF_PLANE / 4, bits);
}

ALWAYS_INLINE floats8 scale_of(const Matrix *w, int block, int g) {
    const int groups = w->groups / w->super_groups + (w->groups % w->super_groups != 0);
    return floats_load(w->scales + ((size_t)block * groups + g / w->super_groups) * WIDTH);
}

// -- x in 8 bits ----------------------------------------------------------------------------------

// bits 0: PLANES
ALWAYS_INLINE void integer_tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows, const int bits) {
    const int sums = DOT_SUMS / rows > 1 ? DOT_SUMS / rows : 1;
    const int groups = input_groups(w);
    const int8_t *x = input->codes + (size_t)begin * w->columns;
    const float *xscales = input->scales + (size_t)begin * groups;
    const int32_t *xsums = input->sums + (size_t)begin * groups;
    const uint8_t *planes = w->data + block * w->block_bytes;
    floats8 total[4];
    ints8 sum[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < w->groups; g++) {
        const floats8 scale = scale_of(w, block, g);
        Circle circle = {0};
        if (bits) circle = circle_of(w, block, g, bits);
        if (bits) __builtin_prefetch((const uint8_t *)circle.words + AHEAD);
        for (int half = 0; half < 2; half++, xscales++, xsums++, x += HALF) {
            uint32_t made[3 * HALF_PLANE / 4];
            const uint8_t *codes = (const uint8_t *)made;
            if (bits) half_planes(circle, half, made, bits);
            else codes = planes + (2 * g + half) * 3 * HALF_PLANE;
            UNROLL for (int m = 0; m < rows; m++) {
                sum[m * sums] = ints_splat(MIDDLE_BITS - 3 * BYTE_BIAS * xsums[m * groups]);
                UNROLL for (int i = 1; i < sums; i++) sum[m * sums + i] = ints_splat(0);
            }
            UNROLL for (int i = 0; i < 6; i++)
                dot_bytes(sum, codes + 128 * i, x + 16 * (i % 2), w->columns, rows, sums);
            UNROLL for (int m = 0; m < rows; m++) {
                UNROLL for (int i = 1; i < sums; i++)
                    sum[m * sums] = ints_add(sum[m * sums], sum[m * sums + i]);
                floats8 whole = floats_subtract(ints_as_floats(sum[m * sums]),
                        floats_splat(MIDDLE));
                total[m] = floats_fma(total[m], whole, floats_scale(scale, xscales[m * groups]));
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++) floats_store(out[m], total[m]);
}

// -- x in float32 ---------------------------------------------------------------------------------

// Inputs 8 t … + 7 of a half, without their scale.
ALWAYS_INLINE void eight_inputs(Circle c, int half, int t, floats8 to[8], const int bits) {
    uint32_t words[2][3 * WIDTH];
    float values[8][WIDTH];
    UNROLL for (int four = 0; four < 2; four++)
        step_words(c, c.step + 4 * half + 2 * four, t, 1, words[four], 0, WIDTH, bits);
    UNROLL for (int j = 0; j < 8; j++)
        for (int i = 0; i < WIDTH; i++) {
            const uint32_t *word = words[j / 4] + i;
            const int left = 24 - 8 * (j % 4);
            values[j][i] = (float)(((int32_t)(word[0] << left) >> 24)
                    + ((int32_t)(word[WIDTH] << left) >> 24)
                    + ((int32_t)(word[2 * WIDTH] << left) >> 24));
        }
    UNROLL for (int j = 0; j < 8; j++) to[j] = floats_load(values[j]);
}

ALWAYS_INLINE void float_tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows, const int bits) {
    const float *x = input->values + (size_t)begin * input->stride;
    floats8 total[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int g = 0; g < w->groups; g++) {
        const Circle circle = circle_of(w, block, g, bits);
        const floats8 scale = scale_of(w, block, g);
        for (int eight = 0; eight < INPUTS / 8; eight++, x += 8) {
            floats8 weights[8];
            eight_inputs(circle, eight / 4, eight % 4, weights, bits);
            UNROLL for (int j = 0; j < 8; j++) weights[j] = floats_multiply(weights[j], scale);
            UNROLL for (int m = 0; m < rows; m++) {
                const float *inputs = x + (size_t)m * input->stride;
                floats_fma4(total + m, 1, weights, inputs);
                floats_fma4(total + m, 1, weights + 4, inputs + 4);
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++) floats_store(out[m], total[m]);
}

#define ROWS(tile, bits)                                                                           \
    switch (rows) {                                                                                \
    case 1: tile(w, input, block, begin, out, 1, bits); return;                                    \
    case 2: tile(w, input, block, begin, out, 2, bits); return;                                    \
    case 3: tile(w, input, block, begin, out, 3, bits); return;                                    \
    default: tile(w, input, block, begin, out, 4, bits); return;                                   \
    }

void trellis_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    if (w->format == PLANES) ROWS(integer_tile, 0)
    if (takes_integers(w)) {
        if (w->bits == 2) ROWS(integer_tile, 2)
        ROWS(integer_tile, 3)
    }
    if (w->bits == 2) ROWS(float_tile, 2)
    ROWS(float_tile, 3)
}

// -- weights written out --------------------------------------------------------------------------

size_t block_planes_bytes(const Matrix *w) {
    return (size_t)w->groups * 2 * 3 * HALF_PLANE;
}

void block_to_planes(const Matrix *w, int block, uint8_t *to) {
    for (int g = 0; g < w->groups; g++)
        for (int half = 0; half < 2; half++, to += 3 * HALF_PLANE) {
            if (w->bits == 2) half_planes(circle_of(w, block, g, 2), half, (uint32_t *)to, 2);
            else half_planes(circle_of(w, block, g, 3), half, (uint32_t *)to, 3);
        }
}

void trellis_written_out(const Matrix *w, int block, int column, floats8 to[8]) {
    const int g = column / INPUTS;
    const int half = column % INPUTS / HALF;
    const int t = column % HALF / 8;
    const floats8 scale = floats_scale(scale_of(w, block, g), w->factor);
    if (w->bits == 2) eight_inputs(circle_of(w, block, g, 2), half, t, to, 2);
    else eight_inputs(circle_of(w, block, g, 3), half, t, to, 3);
    for (int j = 0; j < 8; j++) to[j] = floats_multiply(to[j], scale);
}
