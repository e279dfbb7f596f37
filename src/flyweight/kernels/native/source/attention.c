// Rope, and attention over the paged KV cache.
//
// An item of work is one tile of a sequence's new tokens and one kv head (or, where there would be
// too few items, one query head). Keys and values of TILE tokens at a time are gathered from their
// pages as float32, used for all the item's queries, and softmax goes along ("online"):
//
//            keys →   tile 0   tile 1   tile 2
//   queries ↓         ┌──────┬──────┬──────┐   most, sum and the weighted values of each query are kept
//   (tokens × heads)  │  ──► │  ──► │  ──► │      and rescaled when a larger score comes
//                     └──────┴──────┴──────┘
#include "decoder.h"
#include "maths.h"

#define TILE 64
#define QUERIES 32 // of an item

typedef struct {
    float *keys;    // [TILE][head_dim]
    float *values;  // [TILE][head_dim]
    float *scores;  // [2][TILE]
    float *sums;    // [QUERIES][head_dim]
    float *most;    // [QUERIES]
    float *total;   // [QUERIES]
} Scratch;

typedef struct {
    const Run *run;
    int layer;
    int sequence;
    int first;      // token of the sequence's new ones
    int count;
    int before;     // the first one's place in the sequence
    int head;
    int heads;
} Item;

size_t attention_bytes(const Decoder *d) {
    size_t rows = QUERIES + d->heads;
    return 4 * ((2 * TILE + rows) * d->head_dim + 2 * TILE + 2 * rows) + 256;
}

static Scratch place(const Decoder *d, void *memory) {
    Scratch s;
    size_t most = QUERIES + d->heads;
    s.keys = memory;
    s.values = s.keys + TILE * d->head_dim;
    s.sums = s.values + TILE * d->head_dim;
    s.scores = s.sums + most * d->head_dim;
    s.most = s.scores + 2 * TILE;
    s.total = s.most + most;
    return s;
}

// -- norm and rope --------------------------------------------------------------------------------

void rms_norm(const float *x, const float *weight, float *out, int size, float epsilon) {
    floats8 squares = floats_splat(0);
    float rest = 0;
    int k = 0;
    for (; k + WIDTH <= size; k += WIDTH) {
        floats8 eight = floats_load(x + k);
        squares = floats_fma(squares, eight, eight);
    }
    for (; k < size; k++) rest += x[k] * x[k];
    float scale = 1.0f / sqrtf((floats_sum(squares) + rest) / size + epsilon);
    for (k = 0; k < size; k++) out[k] = x[k] * scale * weight[k];
}

static void turn(const Decoder *d, float *head, int64_t position) {
    int half = d->rotary / 2;
    const float *cos = d->cos + position * half;
    const float *sin = d->sin + position * half;
    for (int i = 0; i < half; i++) {
        float a = head[i];
        float b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

void rope_and_store(const Run *run, Team *team, int layer) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    const Layer *l = d->layers + layer;
    int size = d->head_dim;
    int all = d->heads + 2 * d->kv_heads;
    for (int row; (row = team_claim(team, 1)) < run->rows;) {
        float *heads = run->qkv + (size_t)row * all * size;
        for (int h = 0; h < d->heads + d->kv_heads; h++) {
            const float *norm = h < d->heads ? l->query_norm : l->key_norm;
            if (norm) rms_norm(heads + h * size, norm, heads + h * size, size, d->epsilon);
            turn(d, heads + h * size, step->positions[row]);
        }
        const float *keys = heads + d->heads * size;
        cache_write(run, layer, KEYS, step->slots[row], keys);
        cache_write(run, layer, VALUES, step->slots[row], keys + d->kv_heads * size);
    }
}

// -- attention ------------------------------------------------------------------------------------

// scores[r][t] = query r · key t for `rows` queries, a constant; keys from `count` on are old
// scratch, whose scores nobody reads.
ALWAYS_INLINE void score_keys(const float *const queries[2], const float *keys, float *scores,
        int count, int size,
                              const int rows) {
    for (int t = 0; t < count; t += 4) {
        floats8 sum[8];
        const float *key = keys + t * size;
        UNROLL for (int i = 0; i < 4 * rows; i++) sum[i] = floats_splat(0);
        for (int d = 0; d < size; d += WIDTH) {
            floats8 first = floats_load(queries[0] + d);
            floats8 second = floats_load(queries[rows - 1] + d);
            UNROLL for (int i = 0; i < 4; i++) {
                floats8 k = floats_load(key + i * size + d);
                sum[i] = floats_fma(sum[i], first, k);
                if (rows == 2) sum[4 + i] = floats_fma(sum[4 + i], second, k);
            }
        }
        floats_sum4(scores + t, sum[0], sum[1], sum[2], sum[3]);
        if (rows == 2) floats_sum4(scores + TILE + t, sum[4], sum[5], sum[6], sum[7]);
    }
}

// Scores → weights of one query, which sees keys `skip` to `count` of the tile; the sums so far are
// to be multiplied with the result. Lanes of eight, because one maximum or sum would wait for
// itself. NaN is no maximum, but stays in the weights.
static float weigh(Scratch *s, int row, float *scores, int skip, int count, float scale) {
    int end = (count + WIDTH - 1) / WIDTH * WIDTH;
    float most[WIDTH], total[WIDTH] = {0};
    for (int i = 0; i < WIDTH; i++) most[i] = -INFINITY;
    for (int t = 0; t < skip; t++) scores[t] = -INFINITY;
    for (int t = count; t < end; t++) scores[t] = -INFINITY;
    for (int t = 0; t < end; t += WIDTH)
        for (int i = 0; i < WIDTH; i++) {
            float score = scores[t + i] * scale;
            scores[t + i] = score;
            most[i] = score > most[i] ? score : most[i];
        }
    float before = s->most[row];
    float now = before;
    for (int i = 0; i < WIDTH; i++) now = most[i] > now ? most[i] : now;
    if (now == -INFINITY) now = 0; // nothing but NaN
    for (int t = 0; t < end; t += WIDTH)
        for (int i = 0; i < WIDTH; i++) {
            float weight = scores[t + i] == -INFINITY ? 0 : exponential(scores[t + i] - now);
            scores[t + i] = weight;
            total[i] += weight;
        }
    float fade = before == -INFINITY ? 0 : exponential(before - now);
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += total[i];
    s->total[row] = s->total[row] * fade + sum;
    s->most[row] = now;
    return fade;
}

#define CHUNK 4 // vectors of a head that stay in registers while the values go by

ALWAYS_INLINE void add_values(float *const sums[2], const float *values, const float *weights,
        int count, int size,
                              const float fade[2], const int rows) {
    for (int d = 0; d < size; d += CHUNK * WIDTH) {
        floats8 sum[2][CHUNK];
        int chunk = (size - d) / WIDTH < CHUNK ? (size - d) / WIDTH : CHUNK;
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < CHUNK; i++)
                sum[r][i] = i < chunk ? floats_scale(floats_load(sums[r] + d + i * WIDTH),
                        fade[r]) : floats_splat(0);
        for (int t = 0; t < count; t++)
            // what lies beyond a short head is read, but not used
            UNROLL for (int i = 0; i < CHUNK; i++) {
                floats8 v = floats_load(values + t * size + d + i * WIDTH);
                UNROLL for (int r = 0; r < rows; r++) sum[r][i] = floats_fma_scalar(sum[r][i], v,
                        weights[r * TILE + t]);
            }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < CHUNK; i++)
                if (i < chunk) floats_store(sums[r] + d + i * WIDTH, sum[r][i]);
    }
}

// One or two queries of an item and a tile of keys; `begin` is the first key's place in the
// sequence.
ALWAYS_INLINE void attend_rows(const Item *item, Scratch *s, int row, int begin, int count,
        const int rows) {
    const Run *run = item->run;
    const Decoder *d = run->decoder;
    int size = d->head_dim;
    int window = d->layers[item->layer].window;
    int least = TILE;
    int most = 0;
    int all = (d->heads + 2 * d->kv_heads) * size;
    int start = run->step->query_starts[item->sequence] + item->first;
    int skips[2], ends[2];
    const float *queries[2];
    float *sums[2], fade[2];
    for (int r = 0; r < rows; r++) {
        int token = (row + r) / item->heads;
        int head = item->head + (row + r) % item->heads;
        int end = item->before + token + 1 - begin;
        queries[r] = run->qkv + (size_t)(start + token) * all + head * size;
        sums[r] = s->sums + (row + r) * size;
        ends[r] = end < 0 ? 0 : end < count ? end : count;
        skips[r] = window && end > window ? end - window : 0;
        skips[r] = skips[r] < ends[r] ? skips[r] : ends[r];
        least = skips[r] < least ? skips[r] : least;
        most = ends[r] > most ? ends[r] : most;
    }
    if (least >= most) return;
    score_keys(queries, s->keys, s->scores, most, size, rows);
    for (int r = 0; r < rows; r++) {
        float *scores = s->scores + r * TILE;
        fade[r] = 1;
        if (skips[r] < ends[r]) fade[r] = weigh(s, row + r, scores, skips[r], ends[r], d->scale);
        for (int t = skips[r] < ends[r] ? ends[r] : 0; t < most; t++) scores[t] = 0;
    }
    add_values(sums, s->values, s->scores, most, size, fade, rows);
}

static void attend_item(const Item *item, Scratch *s) {
    const Run *run = item->run;
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    int size = d->head_dim;
    int window = d->layers[item->layer].window;
    int rows = item->count * item->heads;
    int kv_head = item->head / (d->heads / d->kv_heads);
    int end = item->before + item->count;
    int begin = window && item->before + 1 > window ? item->before + 1 - window : 0;
    for (int row = 0; row < rows; row++) s->most[row] = -INFINITY, s->total[row] = 0;
    memset(s->sums, 0, 4 * (size_t)rows * size);
    for (int t = begin; t < end; t += TILE) {
        int count = end - t < TILE ? end - t : TILE;
        int row = 0;
        Span span = {item->layer, item->sequence, kv_head, t, count};
        cache_read(run, span, KEYS, s->keys);
        cache_read(run, span, VALUES, s->values);
        for (; row + 2 <= rows; row += 2) attend_rows(item, s, row, t, count, 2);
        if (row < rows) attend_rows(item, s, row, t, count, 1);
    }
    for (int row = 0; row < rows; row++) {
        size_t token = step->query_starts[item->sequence] + item->first + row / item->heads;
        float *out = run->attended + (token * d->heads + item->head + row % item->heads) * size;
        float scale = 1 / s->total[row];
        for (int k = 0; k < size; k++) out[k] = s->sums[row * size + k] * scale;
    }
}

void attend(const Run *run, Team *team, int layer, void *scratch) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    Scratch s = place(d, scratch);
    int group = d->heads / d->kv_heads;
    // keys are gathered once for all heads of an item
    int heads = run->rows * d->kv_heads < team->threads ? 1 : group;
    int tile = QUERIES / heads > 1 ? QUERIES / heads : 1;
    int across = d->heads / heads;
    int claimed = team_claim(team, 1);
    int piece = 0;
    for (int sequence = 0; sequence < step->sequences; sequence++) {
        int fresh = step->query_starts[sequence + 1] - step->query_starts[sequence];
        int tiles = (fresh + tile - 1) / tile;
        for (; claimed < piece + tiles * across; claimed = team_claim(team, 1)) {
            int at = claimed - piece;
            int first = (tiles - 1 - at / across) * tile; // the longest first
            int count = fresh - first < tile ? fresh - first : tile;
            int before = step->kv_lengths[sequence] - fresh + first;
            Item item = {run, layer, sequence, first, count, before, at % across * heads, heads};
            attend_item(&item, &s);
        }
        piece += tiles * across;
    }
}
