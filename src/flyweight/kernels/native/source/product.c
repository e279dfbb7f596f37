// Products shared out over threads: a thread claims some blocks of outputs, reads their weights once and uses them for all rows.
#include "matrix.h"

#include "maths.h"

#define ROWS_AT_ONCE 4

void block_product(const Matrix *w, const Input *input, int block, int begin, int rows, float out[][WIDTH]) {
    if (takes_integers(w)) integer_product(w, input, block, begin, rows, out);
    else float_product(w, input, block, begin, rows, out);
    if (w->factor == 1 && !w->bias && !w->column_bias) return;
    floats8 bias = w->bias ? floats_load(w->bias + (size_t)block * WIDTH) : floats_splat(0);
    for (int m = 0; m < rows; m++) {
        floats8 more = floats_add(bias, floats_splat(input->offsets[begin + m]));
        floats_store(out[m], floats_fma_scalar(more, floats_load(out[m]), w->factor));
    }
}

// So many pieces of work that a thread whose core is busy with something else leaves most to the others.
static int blocks_at_once(const Team *team, int blocks) {
    int share = blocks / (8 * team->threads);
    return share < 1 ? 1 : share;
}

static void put(const Matrix *w, Target target, int block, int row, const float *values) {
    float *to = target.out + (size_t)row * target.stride + (size_t)block * WIDTH;
    int count = w->outputs - block * WIDTH;
    if (count >= WIDTH) {
        floats8 all = floats_load(values);
        floats_store(to, target.add ? floats_add(all, floats_load(to)) : all);
        return;
    }
    for (int i = 0; i < count; i++) to[i] = target.add ? to[i] + values[i] : values[i];
}

static void project_blocks(const Product *product, int first, int last) {
    const Matrix *w = product->w;
    int rows = product->input.rows;
    for (int block = first; block < last; block++)
        for (int row = 0; row < rows; row += ROWS_AT_ONCE) {
            float out[ROWS_AT_ONCE][WIDTH];
            int count = rows - row < ROWS_AT_ONCE ? rows - row : ROWS_AT_ONCE;
            block_product(w, &product->input, block, row, count, out);
            for (int m = 0; m < count; m++) put(w, product->target, block, row + m, out[m]);
        }
}

void project(Team *team, const Product *products, int count) {
    int before = 0, piece = team_claim(team, 1);
    for (int i = 0; i < count; i++) {
        int blocks = matrix_blocks(products[i].w), step = blocks_at_once(team, blocks), pieces = (blocks + step - 1) / step;
        for (; piece < before + pieces; piece = team_claim(team, 1)) {
            int first = (piece - before) * step, last = first + step < blocks ? first + step : blocks;
            project_blocks(products + i, first, last);
        }
        before += pieces;
    }
}

static void gate(float *gate, const float *up, int kind) {
    for (int i = 0; i < WIDTH; i++) gate[i] = (kind == 1 ? silu(gate[i]) : gelu(gate[i])) * up[i];
}

void project_gated(Team *team, const Product *gates, const Product *ups, int gated) {
    int blocks = matrix_blocks(gates->w), step = blocks_at_once(team, blocks), rows = gates->input.rows;
    for (int first; (first = team_claim(team, step)) < blocks;) {
        int last = first + step < blocks ? first + step : blocks;
        for (int block = first; block < last; block++)
            for (int row = 0; row < rows; row += ROWS_AT_ONCE) {
                float left[ROWS_AT_ONCE][WIDTH], right[ROWS_AT_ONCE][WIDTH];
                int count = rows - row < ROWS_AT_ONCE ? rows - row : ROWS_AT_ONCE;
                block_product(gates->w, &gates->input, block, row, count, left);
                block_product(ups->w, &ups->input, block, row, count, right);
                for (int m = 0; m < count; m++) {
                    gate(left[m], right[m], gated);
                    put(gates->w, gates->target, block, row + m, left[m]);
                }
            }
    }
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

void matrix_multiply(Team *team, const Matrix *w, const float *x, float *y, int rows, void *scratch) {
    Call call = {{w, {0}, {y, w->outputs, 0}}, x};
    input_place(w, &call.product.input, x, rows, w->inputs, scratch);
    team_run(team, fill_and_project, &call);
}
