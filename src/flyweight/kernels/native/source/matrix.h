// A weight [outputs, inputs] as the kernels read it, and the x that it is multiplied with.
//
// Outputs stand in blocks of eight (`WIDTH`), inputs in groups that share a scale:
//
//   data = block 0 | block 1 | …        (the last one filled up with zeros)
//   block = group 0 | group 1 | …
//   group = 8 scales (float16 or float32) | 8 zero points (bytes, filled up to 16), if any | codes
//
// Formats of floats have scales of their own beside the data, [blocks][groups][8], or none.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "team.h"
#include "vectors.h"

// Made for many rows: CODES out of INT4, bytes below 128, whose scales are float32; PLANES out of
// TRELLIS.
enum Format {
    INT4, INT8, FLOAT32, FLOAT16, BFLOAT16, FLOAT8, VECTORS, BLOCKS, TRELLIS, CODES, PLANES
};
#define WIDE_BFLOAT16 2

enum Activation {
    AS_IT_IS, INT8_GROUP, INT8_STATIC, FLOAT8_TOKEN, FLOAT8_STATIC, FLOAT8_GROUP, FLOAT16_ROW
};

// Of BLOCKS; see product_blocks.c.
enum Mins { MINS_NONE, MINS_STORED, MINS_ZEROS };
enum Subs { SUBS_NONE, SUBS_BYTES, SUBS_NIBBLES, SUBS_FLOAT8, SUBS_EXPONENTS };

// Of product_half.c: 32 products of two such numbers stay below 2^15.
#define HALF_INPUT 64.0f
#define HALF_WEIGHT 16.0f

typedef struct {
    int32_t format;      // enum Format
    int32_t activation;  // enum Activation: what x is rounded to
    int32_t outputs;
    int32_t inputs;
    int32_t columns;     // inputs filled up to whole groups
    int32_t group;
    int32_t groups;
    int32_t input_group; // columns that share a scale of x: a part of a group, or all of it
    // the scales inside the data, or the books, are float32; 2: books are bfloat16
    int32_t wide_scales;
    int32_t zeros;       // there are zero points
    float input_scale;   // of static activations
    float input_zero;
    // every product is multiplied with it: a power of two that brings scales into float16
    float factor;
    int64_t block_bytes;
    const uint8_t *data;
    const float *scales; // formats of floats: [blocks][groups][8] or NULL
    const int32_t *order; // [columns]: the input of each column, −1 for filling; NULL: as they are
    const float *bias;   // [outputs] or NULL
    const float *column_scale; // [columns] or NULL: x is multiplied with it
    const float *column_bias;  // [columns] or NULL: x · column_bias is added to every output
    // VECTORS: block = 16-bit indices [columns] | residual indices [columns]; a group is what
    // shares its books
    const void *book;         // [groups][entries][8], in the type that wide_scales says
    const void *residual;     // the same, or NULL
    int32_t entries;
    int32_t residual_entries;
    int32_t residual_bytes;   // of an index: 0, 1 or 2
    // BLOCKS and TRELLIS
    int32_t bits;             // of a code
    int32_t super_groups;     // groups that share a scale of theirs
    // BLOCKS
    int32_t mins;             // enum Mins
    int32_t subs;             // enum Subs
    int32_t sub_bias;         // what a sub-scale has too much
    int32_t middle;           // the code that stands for zero
    const int8_t *table;      // [16]: what the codes stand for, or NULL: themselves, less middle
} Matrix;

// Sums of integers below 2^22 begin at the bits of 1.5 · 2^23, and so end as the bits of 1.5 · 2^23
// + sum: no conversion is needed. Only W8A8's long sums, whose scales are float32, are converted.
#define MIDDLE_BITS 0x4b400000
#define MIDDLE 12582912.0f

// What a matrix takes: integers with scales and sums for INT8_…, else floats.
//
// The codes of rows that come in whole tiles of TALL (`tiled_rows`) lie in quads of four rows, in
// which each four columns (eight with i8mm: TOGETHER) stand together, so that one load serves
// several rows; the other rows lie as they are:
//
//   quad = columns 0–3 of row 0 | of row 1 | of row 2 | of row 3 | columns 4–7 of row 0 | …
//
// and their scales and sums likewise: group 0 of rows 0 to 3 | group 1 of rows 0 to 3 | …
//
// Floats of many rows (`tiles_of`) lie in tiles as well, the last filled up with zeros:
//
//   tile = column 0 of PANEL_ROWS rows | column 1 of PANEL_ROWS rows | …
typedef struct {
    int32_t rows;
    const float *values;  // [rows][stride]
    int32_t stride;
    float *tiles;         // [tiles][columns][PANEL_ROWS]
    int8_t *codes;        // [rows][columns]; of FLOAT16_ROW, numbers of 16 bits
    float *scales;        // [rows][input groups]; of FLOAT16_ROW, [rows]
    // [rows][input groups]: of the codes; without zero points, what integer sums begin at
    int32_t *sums;
    float *offsets;       // [rows]: what column_bias adds to every output
} Input;

static inline int matrix_blocks(const Matrix *w) {
    return (w->outputs + WIDTH - 1) / WIDTH;
}

static inline int input_groups(const Matrix *w) {
    return w->columns / w->input_group;
}

// Whose kernels take x row by row, with the sums of its codes as they are.
static inline int takes_sums(const Matrix *w) {
    return w->format == BLOCKS || w->format == TRELLIS || w->format == PLANES;
}

static inline int takes_integers(const Matrix *w) {
    // a static scale may ask for −128, which AVX2 cannot multiply: that goes through floats
    return w->activation == INT8_GROUP;
}

#define TILED_GROUP 32

// How many of `rows` rows of x the kernels of whole tiles take: those of integers, where x comes
// in groups of 32 or, as in W8A8, in whole rows of such.
static inline int tiled_rows(const Matrix *w, int rows) {
    int is_long = w->format == INT8 && w->wide_scales && w->input_group % TILED_GROUP == 0;
    int fits = !takes_sums(w) && (is_long || w->input_group == TILED_GROUP);
    return takes_integers(w) && fits ? rows / TALL * TALL : 0;
}

static inline int takes_halves(const Matrix *w) {
    return w->activation == FLOAT16_ROW;
}

// Rows from which on writing weights out as floats, or as bytes, once costs less than doing so for
// each few rows.
#define MANY 16

// Tiles of x that go through product_panel.c; 0: x is taken as it is.
static inline int tiles_of(const Matrix *w, int rows) {
    int fits = rows >= MANY && !takes_integers(w) && !takes_halves(w);
    return fits ? (rows + PANEL_ROWS - 1) / PANEL_ROWS : 0;
}

// Rows that one thread should fill: those of a quad or of a tile lie in the same cache lines.
static inline int rows_together(int rows) {
    return rows < MANY ? (rows < 2 * QUAD ? 1 : QUAD) : PANEL_ROWS > QUAD ? PANEL_ROWS : QUAD;
}

// What the numbers of a format have to be multiplied with once they are read.
static inline float weight_factor(const Matrix *w) {
    if (w->format == FLOAT16 || (w->format == VECTORS && !w->wide_scales)) return HALF_FACTOR;
    return w->format == FLOAT8 ? FLOAT8_FACTOR : 1.0f;
}

static inline float input_factor(const Matrix *w) {
    return weight_factor(w) == 1.0f || takes_halves(w) ? 1.0f : INPUT_FACTOR;
}

// What is left to be multiplied to a product.
static inline float product_factor(const Matrix *w) {
    return takes_halves(w) ? w->factor : w->factor * (weight_factor(w) / input_factor(w));
}

// Bytes of scratch that `rows` of x need for this matrix.
size_t input_bytes(const Matrix *w, int rows);

// Points an Input into scratch; `x` [rows][stride] is used as it is where nothing has to be done to
// it.
void input_place(const Matrix *w, Input *input, const float *x, int rows, int stride,
        void *scratch);

// Fills rows begin … end of a placed Input.
void input_fill(const Matrix *w, Input *input, const float *x, int stride, int begin, int end);

// Whether two matrices of the same x can share one Input.
int input_same(const Matrix *a, const Matrix *b);

// out[row][0..7] = the eight outputs of one block for rows begin … begin + rows of x (1 to 4).
void integer_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]);
// The same for TALL rows that lie in quads.
void tall_product(const Matrix *w, const Input *input, int block, int begin, float out[][WIDTH]);
// Bytes of a block of INT4 as CODES, and the block.
size_t block_codes_bytes(const Matrix *w);
void block_to_codes(const Matrix *w, int block, uint8_t *to);

void float_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]);
void blocks_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]);
void half_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]);
void trellis_product(const Matrix *w, const Input *input, int block, int begin, int rows,
        float out[][WIDTH]);
// Bytes of a block of TRELLIS as PLANES, and the block.
size_t block_planes_bytes(const Matrix *w);
void block_to_planes(const Matrix *w, int block, uint8_t *to);

// Floats of `panel_memory` that a thread needs for some tiles; without memory it takes one tile at a
// time and LEAST_PANEL floats.
size_t panel_floats(const Matrix *w, int tiles);
#define MOST_CHUNK 1024 // of such a panel the second cache holds 128 KB
#define LEAST_CHUNK 64
#define LEAST_PANEL ((LEAST_CHUNK + PANEL_ROWS) * PANEL)

// The products of up to PANEL_BLOCKS blocks and some tiles, [tiles][PANEL_ROWS][PANEL], in `memory`.
const float *panel_product(const Matrix *w, const Input *input, int block, int blocks, int tile,
        int tiles, float *memory, int chunk);

// Whether this processor has half_product.
int half_products(void);

// What becomes of a product: it replaces what is in out [rows][stride], is added to it, or is
// multiplied with silu or gelu of it.
enum Mode { REPLACE, ADD, SILU, GELU };

typedef struct {
    float *out;
    int32_t stride;
    int32_t mode; // enum Mode
} Target;

// One of several products of a phase.
typedef struct {
    const Matrix *w;
    Input input;
    Target target;
} Product;

// The calling thread's share of x Wᵀ for each; every thread of the team calls it, and a barrier has
// to follow.
void project(Team *team, int thread, const Product *products, int count);

// silu(x gateᵀ) · (x upᵀ), likewise: gate replaces, up has the mode SILU or GELU and the same
// target.
void project_gated(Team *team, int thread, const Product *gate_and_up);

// Columns begin to end of one block as floats, eight of each column, `stride` apart.
void block_to_floats(const Matrix *w, int block, int begin, int end, float *to, int stride);

// Eight columns of a block of BLOCKS, or of TRELLIS, as floats.
void blocks_written_out(const Matrix *w, int block, int column, floats8 to[8]);
void trellis_written_out(const Matrix *w, int block, int column, floats8 to[8]);

// One row of the weight itself: what an embedding looks up.
void matrix_row(const Matrix *w, int row, float *out);

// A row-major weight to be packed; of `w` everything is filled in but what `data` points to.
typedef struct {
    const Matrix *w;
    // [outputs][row_bytes]: integers of source_bits, two to a byte from the low half up, or floats
    const uint8_t *codes;
    int64_t row_bytes;
    int32_t source_bits;
    int32_t is_signed;     // codes of 8 bits are, and need no 128 taken off
    const float *scales;   // [outputs][weight_groups]
    const uint8_t *zeros;  // [outputs][weight_groups] or NULL
    int32_t weight_group;  // columns (in their new order) that share a scale of the source
    int32_t weight_groups;
    // FLOAT16_ROW: what weights are multiplied with to become the float16 of product_half.c, and
    // whether they are bfloat16 before
    float factor;
    int32_t from_bfloats;
    uint8_t *to;
} Packing;

void matrix_pack(Team *team, const Packing *packing);

size_t matrix_scratch(const Matrix *w, int rows);

// y [rows][outputs] = x [rows][inputs] Wᵀ; scratch: `matrix_scratch` bytes, aligned to 64.
void matrix_multiply(Team *team, const Matrix *w, const float *x, float *y, int rows,
        void *scratch);

// What the kernels were compiled for.
const char *instructions(void);
