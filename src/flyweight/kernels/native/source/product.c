// Products shared out over threads: a thread claims some blocks of outputs, reads their weights
// once and uses them for all rows.
#include "matrix.h"

#include <stdlib.h>

#include "maths.h"

#define ROWS_AT_ONCE 4 // of rows that do not make a whole tile
#define MOST_ROWS (TALL > ROWS_AT_ONCE ? TALL : ROWS_AT_ONCE)
#define MANY_TILED (3 * TALL)
#define PIECES 8 // that a thread's share of a phase is taken in
#define CACHED (24 << 10) // bytes of weights, of the first cache's 32 KB or more

// out[row][0..7] = the eight outputs of one block for rows begin … begin + rows of x.
static void block_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]) {
    if (begin < tiled_rows(w, input->rows)) tall_product(w, input, block, begin, out);
    else if (w->format == BLOCKS) blocks_product(w, input, block, begin, rows, out);
    else if (takes_sums(w)) trellis_product(w, input, block, begin, rows, out);
    else if (takes_integers(w)) integer_product(w, input, block, begin, rows, out);
    else if (takes_halves(w)) half_product(w, input, block, begin, rows, out);
    else float_product(w, input, block, begin, rows, out);
}

// So many pieces of work that a thread whose core is busy with something else leaves most to the
// others.
static int blocks_at_once(const Team *team, int blocks, const Product *products) {
    int share = blocks / (PIECES * team->threads);
    if (products->input.tiles) share = (share + PANEL_BLOCKS - 1) / PANEL_BLOCKS * PANEL_BLOCKS;
    return share < 1 ? 1 : share;
}

// What becomes of eight products where `to` has `count` outputs.
ALWAYS_INLINE void put_eight(float *to, floats8 values, int count, const int mode) {
    float found[WIDTH], old[WIDTH] = {0};
    floats_store(found, values);
    if (mode != REPLACE) memcpy(old, to, 4 * (size_t)count);
    if (mode == ADD)
        for (int i = 0; i < WIDTH; i++) found[i] += old[i];
    if (mode == SILU)
        for (int i = 0; i < WIDTH; i++) found[i] *= silu(old[i]);
    if (mode == GELU)
        for (int i = 0; i < WIDTH; i++) found[i] *= gelu(old[i]);
    memcpy(to, found, 4 * (size_t)count);
}

// The products of a block and some rows, scaled and with bias, to where they belong. The number of
// outputs is a constant in all blocks but the last: a copy of a size that is known takes two
// instructions, another one a call.
ALWAYS_INLINE void put_rows(const Product *product, const Matrix *w, int block, int begin,
        int rows, const float *out, int out_stride, const int mode) {
    int stride = product->target.stride;
    float *to = product->target.out + (size_t)begin * stride + (size_t)block * WIDTH;
    float factor = product_factor(w);
    floats8 bias = w->bias ? floats_load(w->bias + (size_t)block * WIDTH) : floats_splat(0);
    int left = w->outputs - block * WIDTH;
    for (int m = 0; m < rows; m++, to += stride) {
        floats8 more = floats_add(bias, floats_splat(product->input.offsets[begin + m]));
        floats8 values = floats_fma_scalar(more, floats_load(out + (size_t)m * out_stride), factor);
        if (left >= WIDTH) put_eight(to, values, WIDTH, mode);
        else put_eight(to, values, left, mode);
    }
}

static void put(const Product *product, const Matrix *w, int block, int begin, int rows,
        const float *out, int stride) {
    switch (product->target.mode) {
    case REPLACE: put_rows(product, w, block, begin, rows, out, stride, REPLACE); return;
    case ADD: put_rows(product, w, block, begin, rows, out, stride, ADD); return;
    case SILU: put_rows(product, w, block, begin, rows, out, stride, SILU); return;
    default: put_rows(product, w, block, begin, rows, out, stride, GELU);
    }
}

// -- blocks written out for many rows -------------------------------------------------------------

// As what a block is written out first; its own format where it is not.
static int written_format(const Product *product) {
    const Matrix *w = product->w;
    if (w->format == INT4 && tiled_rows(w, product->input.rows) >= MANY_TILED) return CODES;
    if (w->format == TRELLIS && takes_integers(w) && product->input.rows > ROWS_AT_ONCE)
        return PLANES;
    return w->format;
}

// Memory of the thread's, or NULL.
static void *own_memory(size_t needed) {
    static _Thread_local void *memory;
    static _Thread_local size_t size;
    if (size < needed) {
        free(memory);
        memory = aligned_alloc(64, (needed + 63) / 64 * 64);
        size = memory ? needed : 0;
    }
    return size < needed ? NULL : memory;
}

static size_t written_bytes(const Product *product) {
    int format = written_format(product);
    if (format == product->w->format) return 0;
    return format == CODES ? block_codes_bytes(product->w) : block_planes_bytes(product->w);
}

// Blocks first to last as a weight of their own, in `memory`.
static Matrix write_out(const Product *product, int first, int last, uint8_t *memory) {
    Matrix made = *product->w;
    size_t bytes = written_bytes(product);
    if (!bytes || !memory) return made;
    made.format = written_format(product);
    for (int block = first; block < last; block++, memory += bytes) {
        if (made.format == CODES) block_to_codes(product->w, block, memory);
        else block_to_planes(product->w, block, memory);
    }
    made.block_bytes = (int64_t)bytes;
    made.data = memory - last * (int64_t)bytes;
    return made;
}

// Blocks whose weights stay in the first cache while all rows of x go by, a few at a time: what is
// written then are long pieces of rows, not one block's eight outputs of every row.
static int blocks_in_cache(const Product *products, int count) {
    int64_t bytes = 0;
    for (int i = 0; i < count; i++) {
        int64_t written = (int64_t)written_bytes(products + i);
        bytes += written ? written : products[i].w->block_bytes;
    }
    return bytes && bytes < CACHED ? CACHED / bytes : 1;
}

// Some rows of x, from `row` on, and blocks first to last.
static void project_rows(const Product *product, const Matrix *w, int row, int rows, int first,
        int last) {
    for (int block = first; block < last; block++) {
        float out[MOST_ROWS][WIDTH];
        const float *to = product->target.out + (size_t)row * product->target.stride;
        for (int m = 0; m < rows; m++) // it is far away when there are many rows
            __builtin_prefetch(to + (size_t)m * product->target.stride + block * WIDTH, 1);
        block_product(w, &product->input, block, row, rows, out);
        put(product, w, block, row, rows, *out, WIDTH);
    }
}

// The same, as many rows at a time as the product's kernels take; CODES are for whole tiles alone.
static void project_some(const Product *product, const Matrix *made, int row, int rows, int first,
        int last) {
    int tiled = tiled_rows(product->w, product->input.rows);
    for (int end = row + rows, some; row < end; row += some) {
        some = end - row < ROWS_AT_ONCE ? end - row : ROWS_AT_ONCE;
        if (row < tiled) some = TALL;
        project_rows(product, row < tiled || made->format != CODES ? made : product->w, row, some,
                first, last);
    }
}

// All rows of x, in tiles, and a panel of blocks. Without memory the panel is written out again for
// each tile, a few columns at a time.
static void project_panel(const Product *product, int block, int blocks) {
    Matrix written = *product->w; // as floats, whose scales and factors are multiplied in
    written.format = FLOAT32;
    written.factor = 1 / input_factor(product->w);
    int rows = product->input.rows;
    int tiles = tiles_of(product->w, rows);
    float *memory = own_memory(panel_floats(product->w, tiles) * sizeof(float));
    _Alignas(64) float least[LEAST_PANEL];
    int at_once = memory ? tiles : 1;
    for (int tile = 0; tile < tiles; tile += at_once) {
        const float *out = panel_product(product->w, &product->input, block, blocks, tile, at_once,
                memory ? memory : least, memory ? MOST_CHUNK : LEAST_CHUNK);
        int begin = tile * PANEL_ROWS;
        int some = rows - begin < at_once * PANEL_ROWS ? rows - begin : at_once * PANEL_ROWS;
        for (int i = 0; i < blocks; i++)
            put(product, &written, block + i, begin, some, out + i * WIDTH, PANEL);
    }
}

static void project_panels(const Product *products, int count, int first, int last) {
    for (int block = first; block < last; block += PANEL_BLOCKS)
        for (int i = 0; i < count; i++)
            project_panel(products + i, block,
                    last - block < PANEL_BLOCKS ? last - block : PANEL_BLOCKS);
}

// All rows of x and blocks first to last of one product, or of a gate and what it multiplies.
static void project_blocks(const Product *products, int count, int first, int last) {
    if (count == 2 && !products[0].input.tiles != !products[1].input.tiles) {
        project_blocks(products, 1, first, last);
        project_blocks(products + 1, 1, first, last);
        return;
    }
    if (products->input.tiles) {
        project_panels(products, count, first, last);
        return;
    }
    int together = blocks_in_cache(products, count);
    int rows = products->input.rows;
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += together * written_bytes(products + i);
    for (int block = first; block < last; block += together) {
        int end = block + together < last ? block + together : last;
        uint8_t *memory = bytes ? own_memory(bytes) : NULL;
        Matrix made[2];
        for (int i = 0; i < count; i++) {
            made[i] = write_out(products + i, block, end, memory);
            if (memory) memory += together * written_bytes(products + i);
        }
        for (int row = 0; row < rows; row += MOST_ROWS) {
            int some = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            for (int i = 0; i < count; i++)
                project_some(products + i, made + i, row, some, block, end);
        }
    }
}

// Blocks first to last of products whose blocks are counted one after the other.
static void project_parts(const Product *products, int count, int first, int last) {
    for (int i = 0; i < count && last > 0; i++) {
        int blocks = matrix_blocks(products[i].w);
        if (first < blocks)
            project_blocks(products + i, 1, first, last < blocks ? last : blocks);
        first = first > blocks ? first - blocks : 0;
        last -= blocks;
    }
}

void project(Team *team, int thread, const Product *products, int count) {
    int blocks = 0;
    int first, last;
    for (int i = 0; i < count; i++) blocks += matrix_blocks(products[i].w);
    Sharing sharing = team_share(team, thread, blocks, blocks_at_once(team, blocks, products));
    while (share_take(&sharing, &first, &last)) project_parts(products, count, first, last);
}

void project_gated(Team *team, int thread, const Product *gate_and_up) {
    int blocks = matrix_blocks(gate_and_up->w);
    int first, last;
    Sharing sharing = team_share(team, thread, blocks, blocks_at_once(team, blocks, gate_and_up));
    while (share_take(&sharing, &first, &last)) project_blocks(gate_and_up, 2, first, last);
}

// x Wᵀ as one call: what a layer of torch, or a test, asks for.
typedef struct {
    Product product;
    const float *x;
} Call;

static void fill_and_project(void *argument, Team *team, int thread) {
    Call *call = argument;
    const Matrix *w = call->product.w;
    int rows = call->product.input.rows;
    int step = rows_together(rows);
    for (int row; (row = team_claim(team, step)) < rows;)
        input_fill(w, &call->product.input, call->x, w->inputs, row,
                row + step < rows ? row + step : rows);
    team_barrier(team);
    project(team, thread, &call->product, 1);
}

void matrix_multiply(Team *team, const Matrix *w, const float *x, float *y, int rows,
        void *scratch) {
    Call call = {{w, {0}, {y, w->outputs, REPLACE}}, x};
    input_place(w, &call.product.input, x, rows, w->inputs, scratch);
    team_run(team, fill_and_project, &call);
}
