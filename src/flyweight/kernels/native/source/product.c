// Products shared out over threads: a thread claims some blocks of outputs, reads their weights
// once and uses them for all rows.
#include "matrix.h"

#include <stdlib.h>

#include "maths.h"

#define ROWS_AT_ONCE 4
// Rows from which on writing a block out as floats once costs less than doing so every four rows.
#define MANY 16
#define CACHED (24 << 10) // bytes of weights, of the first cache's 32 KB or more

void block_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    if (w->format == BLOCKS) blocks_product(w, input, block, begin, rows, out);
    else if (takes_integers(w)) integer_product(w, input, block, begin, rows, out);
    else if (takes_halves(w)) half_product(w, input, block, begin, rows, out);
    else float_product(w, input, block, begin, rows, out);
    float factor = product_factor(w);
    if (factor == 1 && !w->bias && !w->column_bias) return;
    floats8 bias = w->bias ? floats_load(w->bias + (size_t)block * WIDTH) : floats_splat(0);
    for (int m = 0; m < rows; m++) {
        floats8 more = floats_add(bias, floats_splat(input->offsets[begin + m]));
        floats_store(out[m], floats_fma_scalar(more, floats_load(out[m]), factor));
    }
}

// So many pieces of work that a thread whose core is busy with something else leaves most to the
// others.
static int blocks_at_once(const Team *team, int blocks) {
    int share = blocks / (8 * team->threads);
    return share < 1 ? 1 : share;
}

// What becomes of `values` where `to` has `count` outputs, a constant in all blocks but the last: a
// copy of a size that is known takes two instructions, another one a call.
ALWAYS_INLINE void put_some(float *to, const float *values, int mode, const int count) {
    float found[WIDTH], old[WIDTH] = {0};
    memcpy(found, values, sizeof found);
    if (mode != REPLACE) memcpy(old, to, 4 * (size_t)count);
    if (mode == ADD)
        for (int i = 0; i < WIDTH; i++) found[i] += old[i];
    if (mode == SILU)
        for (int i = 0; i < WIDTH; i++) found[i] *= silu(old[i]);
    if (mode == GELU)
        for (int i = 0; i < WIDTH; i++) found[i] *= gelu(old[i]);
    memcpy(to, found, 4 * (size_t)count);
}

static void put(const Matrix *w, Target target, int block, int row, const float *values) {
    float *to = target.out + (size_t)row * target.stride + (size_t)block * WIDTH;
    int left = w->outputs - block * WIDTH;
    if (left >= WIDTH) put_some(to, values, target.mode, WIDTH);
    else put_some(to, values, target.mode, left);
}

// One block of a weight as a weight of floats of its own, in memory of the thread's; false where
// there is none.
static int widen(const Matrix *w, int block, Matrix *wide) {
    static _Thread_local float *memory;
    static _Thread_local size_t size;
    size_t needed = (size_t)w->columns * WIDTH * sizeof(float);
    if (size < needed) {
        free(memory);
        memory = aligned_alloc(64, (needed + 63) / 64 * 64);
        size = memory ? needed : 0;
        if (!memory) return 0;
    }
    block_to_floats(w, block, memory);
    *wide = *w;
    wide->format = FLOAT32;
    wide->group = w->columns;
    wide->groups = 1;
    wide->scales = NULL;
    wide->factor = 1 / input_factor(w);
    wide->data = (const uint8_t *)memory;
    wide->block_bytes = 0; // whatever the block's number is
    return 1;
}

// Four rows of x (fewer at the end), from `row` on, and blocks first to last.
static void project_rows(const Product *product, const Matrix *w, int row, int first, int last) {
    int left = product->input.rows - row;
    int count = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
    for (int block = first; block < last; block++) {
        float out[ROWS_AT_ONCE][WIDTH];
        block_product(w, &product->input, block, row, count, out);
        for (int m = 0; m < count; m++) put(w, product->target, block, row + m, out[m]);
    }
}

static int is_widened(const Product *product) {
    const Matrix *w = product->w;
    return product->input.rows >= MANY && !takes_integers(w) && !takes_halves(w)
            && w->format != FLOAT32;
}

// Blocks whose weights stay in the first cache while all rows of x go by, four at a time: what is
// written then are long pieces of rows, not one block's eight outputs of every row.
static int blocks_in_cache(const Product *products, int count) {
    int64_t bytes = 0;
    for (int i = 0; i < count; i++) {
        if (is_widened(products + i)) return 1;
        bytes += products[i].w->block_bytes;
    }
    return bytes && bytes < CACHED ? CACHED / bytes : 1;
}

// All rows of x and blocks first to last of one product, or of a gate and what it multiplies.
static void project_blocks(const Product *products, int count, int first, int last) {
    int together = blocks_in_cache(products, count);
    for (int block = first; block < last; block += together) {
        int end = block + together < last ? block + together : last;
        Matrix wide;
        int rows = products->input.rows;
        for (int i = 0; i < count; i++)
            if (is_widened(products + i)) {
                int made = widen(products[i].w, block, &wide);
                const Matrix *w = made ? &wide : products[i].w;
                for (int row = 0; row < rows; row += ROWS_AT_ONCE)
                    project_rows(products + i, w, row, block, end);
            }
        for (int row = 0; row < rows; row += ROWS_AT_ONCE)
            for (int i = 0; i < count; i++)
                if (!is_widened(products + i))
                    project_rows(products + i, products[i].w, row, block, end);
    }
}

void project(Team *team, const Product *products, int count) {
    int before = 0;
    int piece = team_claim(team, 1);
    for (int i = 0; i < count; i++) {
        int blocks = matrix_blocks(products[i].w);
        int step = blocks_at_once(team, blocks);
        int pieces = (blocks + step - 1) / step;
        for (; piece < before + pieces; piece = team_claim(team, 1)) {
            int first = (piece - before) * step;
            int last = first + step < blocks ? first + step : blocks;
            project_blocks(products + i, 1, first, last);
        }
        before += pieces;
    }
}

void project_gated(Team *team, const Product *gate_and_up) {
    int blocks = matrix_blocks(gate_and_up->w);
    int step = blocks_at_once(team, blocks);
    for (int first; (first = team_claim(team, step)) < blocks;)
        project_blocks(gate_and_up, 2, first, first + step < blocks ? first + step : blocks);
}

// x Wᵀ as one call: what a layer of torch, or a test, asks for.
typedef struct {
    Product product;
    const float *x;
} Call;

static void fill_and_project(void *argument, Team *team, int thread) {
    Call *call = argument;
    const Matrix *w = call->product.w;
    for (int row; (row = team_claim(team, 1)) < call->product.input.rows;)
        input_fill(w, &call->product.input, call->x, w->inputs, row, row + 1);
    team_barrier(team);
    project(team, &call->product, 1);
}

void matrix_multiply(Team *team, const Matrix *w, const float *x, float *y, int rows,
        void *scratch) {
    Call call = {{w, {0}, {y, w->outputs, REPLACE}}, x};
    input_place(w, &call.product.input, x, rows, w->inputs, scratch);
    team_run(team, fill_and_project, &call);
}
