// Rounding of weights, for the solvers of quant/: the error of a grid, the columns of GPTQ, and the
// largest numbers that a grid has to hold.
//
//   error[p] = Σ_k weight[k] · (q_k · scale[p] − x_k)²   of each group p of a row's columns, with
//   q_k = x_k / scale[p], to nearest, within −zero[p] … steps − zero[p]; without weights the square
//   is its own weight: the fourth power
//
// A group stays in registers and the first cache while it is read once. Columns are walked sixteen
// rows of the weight at a time (`LANES`): rows are independent, so that a block of columns of them
// is small enough for the first cache, and each column's error goes to all later ones there.
#include <math.h>
#include <stddef.h>

#include "team.h"
#include "vectors.h"

#define LANES 16
#define BLOCK 128
#define AT_ONCE 64 // pieces of work that a thread claims: groups, or lanes

static inline float between(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

typedef struct {
    const float *pieces;  // [count][size]
    const float *scales;  // [count]
    const float *zeros;   // [count], or NULL: half of the steps for all
    const float *weights; // [groups][size], for groups p, p + groups, …; or NULL: the squares
    float *errors;        // [count]
    int64_t count;
    int64_t groups;
    int32_t size;
    int32_t steps;        // the largest code
} Rounding;

ALWAYS_INLINE float group_error(const Rounding *r, int64_t p, const int weighted) {
    const float *x = r->pieces + p * r->size;
    const float *weights = weighted ? r->weights + p % r->groups * r->size : x;
    float scale = r->scales[p];
    float inverse = 1 / scale;
    float zero = r->zeros ? r->zeros[p] : (float)(r->steps / 2 + 1);
    float low = -zero;
    float high = (float)r->steps - zero;
    float sums[LANES] = {0};
    float total = 0;
    int k = 0;
    for (; k + LANES <= r->size; k += LANES)
        for (int i = 0; i < LANES; i++) {
            float code = between(rintf(x[k + i] * inverse), low, high);
            float error = code * scale - x[k + i];
            float square = error * error;
            sums[i] += (weighted ? weights[k + i] : square) * square;
        }
    for (; k < r->size; k++) {
        float error = between(rintf(x[k] * inverse), low, high) * scale - x[k];
        float square = error * error;
        total += (weighted ? weights[k] : square) * square;
    }
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

static void share_errors(void *argument, Team *team, int thread) {
    const Rounding *r = argument;
    (void)thread;
    for (int64_t first; (first = (int64_t)team_claim(team, 1) * AT_ONCE) < r->count;) {
        int64_t last = first + AT_ONCE < r->count ? first + AT_ONCE : r->count;
        for (int64_t p = first; p < last; p++)
            r->errors[p] = r->weights ? group_error(r, p, 1) : group_error(r, p, 0);
    }
}

void rounding_errors(Team *team, const Rounding *rounding) {
    team_run(team, share_errors, (void *)rounding);
}

typedef struct {
    const float *tile;    // [columns][rows]: what is to be rounded, or the pull on `values`
    const float *matrix;  // [columns][stride]
    const float *scales;  // [columns][rows]
    const float *zeros;   // [columns][rows]
    const uint8_t *kept;  // [columns][rows]: 0 stays zero; or NULL
    const float *values;  // [columns][rows]: coordinate descent moves these; or NULL
    float *codes;         // [columns][rows]
    float *errors;        // [columns][rows]: what later columns have to make up for, or the moves
    int64_t rows;
    int64_t stride;
    int32_t columns;      // at most BLOCK
    int32_t steps;
} Walk;

// Column i of some rows: its codes, and its errors into `error`.
static void round_column(const Walk *w, int i, int64_t row, int count, const float *pulled,
        float error[LANES]) {
    size_t at = (size_t)i * w->rows + row;
    float pivot = w->matrix[i * w->stride + i];
    for (int n = 0; n < count; n++) {
        float scale = w->scales[at + n];
        float zero = w->zeros[at + n];
        float x = w->values ? w->values[at + n] + pulled[n] / pivot : pulled[n];
        float code = between(rintf(x / scale) + zero, 0, (float)w->steps);
        if (w->kept && !w->kept[at + n]) code = zero;
        float rounded = (code - zero) * scale;
        error[n] = w->values ? rounded - w->values[at + n] : (x - rounded) / pivot;
        w->codes[at + n] = code;
        w->errors[at + n] = error[n];
    }
}

static void walk_rows(const Walk *w, int64_t row, int count) {
    _Alignas(64) float tile[BLOCK][LANES] = {{0}};
    _Alignas(64) float error[LANES] = {0};
    for (int i = 0; i < w->columns; i++)
        for (int n = 0; n < count; n++) tile[i][n] = w->tile[(size_t)i * w->rows + row + n];
    for (int i = 0; i < w->columns; i++) {
        const float *factors = w->matrix + i * w->stride;
        round_column(w, i, row, count, tile[i], error);
        for (int j = i + 1; j < w->columns; j++)
            for (int n = 0; n < LANES; n++) tile[j][n] -= factors[j] * error[n];
    }
}

static void share_columns(void *argument, Team *team, int thread) {
    const Walk *w = argument;
    (void)thread;
    for (int64_t row; (row = (int64_t)team_claim(team, 1) * LANES) < w->rows;)
        walk_rows(w, row, w->rows - row < LANES ? (int)(w->rows - row) : LANES);
}

void rounding_walk(Team *team, const Walk *walk) {
    team_run(team, share_columns, (void *)walk);
}

// The largest of each group's products with scales, and where it is.
typedef struct {
    const float *sizes;   // [count][size]
    const float *scales;  // [groups][size], for groups p, p + groups, …
    float *largest;       // [count]: sizes, not their products
    int64_t *at;          // [count]: in scales
    int64_t count;
    int64_t groups;
    int32_t size;
} Largest;

static void find_largest(const Largest *f, int64_t p) {
    const float *x = f->sizes + p * f->size;
    const float *scales = f->scales + p % f->groups * f->size;
    float lanes[LANES];
    float most = -INFINITY;
    int k = 0;
    int found = 0;
    for (int i = 0; i < LANES; i++) lanes[i] = -INFINITY;
    for (; k + LANES <= f->size; k += LANES)
        for (int i = 0; i < LANES; i++) {
            float product = x[k + i] * scales[k + i];
            lanes[i] = product > lanes[i] ? product : lanes[i];
        }
    for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    for (; k < f->size; k++) most = x[k] * scales[k] > most ? x[k] * scales[k] : most;
    while (found < f->size - 1 && x[found] * scales[found] != most) found++;
    f->largest[p] = x[found];
    f->at[p] = p % f->groups * f->size + found;
}

static void share_largest(void *argument, Team *team, int thread) {
    const Largest *f = argument;
    (void)thread;
    for (int64_t first; (first = (int64_t)team_claim(team, 1) * AT_ONCE) < f->count;) {
        int64_t last = first + AT_ONCE < f->count ? first + AT_ONCE : f->count;
        for (int64_t p = first; p < last; p++) find_largest(f, p);
    }
}

void rounding_largest(Team *team, const Largest *call) {
    team_run(team, share_largest, (void *)call);
}
