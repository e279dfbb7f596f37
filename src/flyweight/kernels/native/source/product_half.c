// y[m, n] = xscale[m] · Σ over runs of 32 inputs of (Σ W[n, k] · x[m, k]), the sum inside in float16
//
// for weights in 16 bits on processors that multiply eight float16 in one instruction. x is rounded
// to float16 once, after a power of two that brings its largest value to HALF_INPUT; weights are
// packed with their largest below HALF_WEIGHT. So no sum of 32 products leaves float16:
//
//   one output, four sums:  k = 0 4 8 … 28 │ 1 5 9 … 29 │ 2 6 … │ 3 7 …    each eight products long,
//                           added in pairs, and from there on in float32
//
// What is lost is less than bfloat16 loses by rounding x alone; `exact` takes product_float.c.
// Every row is computed in the same order whatever the number of rows.
#include "matrix.h"

#if HALF_PRODUCTS

#define AHEAD 1024
#define RUN 32

ALWAYS_INLINE void tile(const Matrix *w, const Input *input, int block, int begin,
        float out[][WIDTH], const int rows) {
    const uint16_t *at = (const uint16_t *)(w->data + block * w->block_bytes);
    const uint16_t *x = (const uint16_t *)input->codes + (size_t)begin * w->columns;
    floats8 total[4];
    UNROLL for (int m = 0; m < rows; m++) total[m] = floats_splat(0);
    for (int k = 0; k < w->columns; k += RUN) {
        int end = w->columns - k < RUN ? w->columns : k + RUN;
        halves8 sum[4][4];
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int i = 0; i < 4; i++) sum[m][i] = halves_zero();
        for (int j = k; j < end; j += 8, at += 64) {
            __builtin_prefetch((const uint8_t *)at + AHEAD);
            __builtin_prefetch((const uint8_t *)at + AHEAD + 64);
            halves_fma8(sum, at, x + j, w->columns, rows);
        }
        UNROLL for (int m = 0; m < rows; m++) total[m] = halves_add_up(total[m], sum[m]);
    }
    UNROLL for (int m = 0; m < rows; m++)
        floats_store(out[m], floats_scale(total[m], input->scales[begin + m]));
}

void half_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    switch (rows) {
    case 1: tile(w, input, block, begin, out, 1); return;
    case 2: tile(w, input, block, begin, out, 2); return;
    case 3: tile(w, input, block, begin, out, 3); return;
    default: tile(w, input, block, begin, out, 4); return;
    }
}

#else

void half_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    float_product(w, input, block, begin, rows, out); // nobody packs weights for it here
}

#endif

int half_products(void) {
    return HALF_PRODUCTS;
}
