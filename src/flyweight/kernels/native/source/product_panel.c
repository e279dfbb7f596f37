// Many rows of x times weights of any format, which become floats once for all rows:
//
//   panel = input 0 of the outputs of PANEL_BLOCKS blocks | input 1 of them | …
//
// The products of a panel and a tile of x (matrix.h) stay in registers, PANEL_ROWS · PANEL sums:
// each number that is loaded is used for so many products that loads do not hold them up. A chunk
// of a panel stays in the second cache while all tiles go by.
#include "matrix.h"

size_t panel_floats(const Matrix *w, int tiles) {
    size_t chunk = w->columns < MOST_CHUNK ? w->columns : MOST_CHUNK;
    return (chunk + (size_t)tiles * PANEL_ROWS) * PANEL;
}

// sums [PANEL_ROWS][PANEL] += some columns of `rows` rows of a tile times those of a panel
ALWAYS_INLINE void multiply(float *sums, const float *panel, const float *x, int columns,
        const int rows) {
    enum { WIDES = PANEL / WIDE };
    floats_wide sum[PANEL_ROWS][WIDES];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int i = 0; i < WIDES; i++) sum[m][i] = wide_load(sums + m * PANEL + i * WIDE);
    for (int k = 0; k < columns; k++, panel += PANEL, x += PANEL_ROWS) {
        floats_wide w[WIDES];
        UNROLL for (int i = 0; i < WIDES; i++) w[i] = wide_load(panel + i * WIDE);
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int i = 0; i < WIDES; i++)
                sum[m][i] = wide_fma_scalar(sum[m][i], w[i], x[m]);
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int i = 0; i < WIDES; i++) wide_store(sums + m * PANEL + i * WIDE, sum[m][i]);
}

static void write_panel(const Matrix *w, int block, int blocks, int begin, int end, float *to) {
    if (blocks < PANEL_BLOCKS) memset(to, 0, sizeof(float) * PANEL * (size_t)(end - begin));
    for (int i = 0; i < blocks; i++)
        block_to_floats(w, block + i, begin, end, to + i * WIDTH, PANEL);
}

const float *panel_product(const Matrix *w, const Input *input, int block, int blocks, int tile,
        int tiles, float *memory, int chunk) {
    float *sums = memory;
    float *panel = memory + (size_t)tiles * PANEL_ROWS * PANEL;
    memset(sums, 0, sizeof(float) * PANEL_ROWS * PANEL * (size_t)tiles);
    for (int begin = 0; begin < w->columns; begin += chunk) {
        int end = w->columns - begin < chunk ? w->columns : begin + chunk;
        write_panel(w, block, blocks, begin, end, panel);
        for (int t = 0; t < tiles; t++) {
            const float *x = input->tiles + ((size_t)(tile + t) * w->columns + begin) * PANEL_ROWS;
            float *to = sums + (size_t)t * PANEL_ROWS * PANEL;
            int rows = input->rows - (tile + t) * PANEL_ROWS;
            if (2 * rows > PANEL_ROWS) multiply(to, panel, x, end - begin, PANEL_ROWS);
            else multiply(to, panel, x, end - begin, PANEL_ROWS / 2);
        }
    }
    return sums;
}
