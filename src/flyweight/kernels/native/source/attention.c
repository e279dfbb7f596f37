// Rope, the paged KV cache, and attention over it.
//
// An item of work is one tile of a sequence's new tokens and one kv head (or, where there would be too few items, one
// query head). Keys and values of TILE tokens at a time are gathered from their pages as float32, used for all the
// item's queries, and softmax goes along ("online"):
//
//            keys →   tile 0   tile 1   tile 2
//   queries ↓         ┌──────┬──────┬──────┐      most, sum and the weighted values of each query are kept
//   (tokens × heads)  │  ──► │  ──► │  ──► │      and rescaled when a larger score comes
//                     └──────┴──────┴──────┘
#include "decoder.h"
#include "maths.h"

#define TILE 64
#define QUERIES 32 // of an item

typedef struct {
    float *keys;    // [TILE][head_dim]
    float *values;  // [TILE][head_dim]
    float *scores;  // [TILE]
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
    int head;
    int heads;
} Item;

size_t attention_bytes(const Decoder *d) {
    return 4 * ((size_t)(2 * TILE + QUERIES + d->heads) * d->head_dim + TILE + 2 * (QUERIES + d->heads)) + 64;
}

static Scratch place(const Decoder *d, void *memory) {
    Scratch s;
    size_t most = QUERIES + d->heads;
    s.keys = memory;
    s.values = s.keys + TILE * d->head_dim;
    s.sums = s.values + TILE * d->head_dim;
    s.scores = s.sums + most * d->head_dim;
    s.most = s.scores + TILE;
    s.total = s.most + most;
    return s;
}

// -- the cache --------------------------------------------------------------------------------------------------------

static void store(void *to, const float *from, int count, int storage) {
    for (int d = 0; d < count; d += WIDTH) {
        floats8 eight = floats_load(from + d);
        if (storage == STORE_FLOAT32) floats_store((float *)to + d, eight);
        else if (storage == STORE_FLOAT16) halves_store((uint16_t *)to + d, eight);
        else
            for (int i = 0; i < WIDTH; i++) {
                uint32_t bits;
                memcpy(&bits, from + d + i, 4);
                bits = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
                ((uint16_t *)to)[d + i] = (uint16_t)(bits >> 16);
            }
    }
}

void fetch(float *to, const void *from, int count, int storage) {
    for (int d = 0; d < count; d += WIDTH) {
        if (storage == STORE_FLOAT32) floats_store(to + d, floats_load((const float *)from + d));
        else if (storage == STORE_FLOAT16) floats_store(to + d, halves_load((const uint16_t *)from + d));
        else floats_store(to + d, bfloats_load((const uint16_t *)from + d));
    }
}

static size_t bytes_of(const Decoder *d) {
    return d->storage == STORE_FLOAT32 ? 4 : 2;
}

static void gather(const Item *item, int kv_head, int begin, int count, const void *pages, float *to) {
    const Decoder *d = item->run->decoder;
    const Step *step = item->run->step;
    const int32_t *table = step->block_tables + (size_t)item->sequence * step->table_width;
    for (int i = 0; i < count; i++) {
        size_t slot = (size_t)table[(begin + i) / d->block_size] * d->block_size + (begin + i) % d->block_size;
        size_t at = (slot * d->kv_heads + kv_head) * d->head_dim;
        fetch(to + i * d->head_dim, (const uint8_t *)pages + at * bytes_of(d), d->head_dim, d->storage);
    }
}

// -- norm and rope ----------------------------------------------------------------------------------------------------

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
    const float *cos = d->cos + position * half, *sin = d->sin + position * half;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

void rope_and_store(const Run *run, Team *team, int layer) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    const Layer *l = d->layers + layer;
    int size = d->head_dim, all = d->heads + 2 * d->kv_heads, width = bytes_of(d);
    for (int row; (row = team_claim(team, 1)) < run->rows;) {
        float *heads = run->qkv + (size_t)row * all * size;
        size_t at = (size_t)step->slots[row] * d->kv_heads * size;
        for (int h = 0; h < d->heads + d->kv_heads; h++) {
            const float *norm = h < d->heads ? l->query_norm : l->key_norm;
            if (norm) rms_norm(heads + h * size, norm, heads + h * size, size, d->epsilon);
            turn(d, heads + h * size, step->positions[row]);
        }
        const float *keys = heads + d->heads * size, *values = keys + d->kv_heads * size;
        store((uint8_t *)step->keys[layer] + at * width, keys, d->kv_heads * size, d->storage);
        store((uint8_t *)step->values[layer] + at * width, values, d->kv_heads * size, d->storage);
    }
}

// -- attention --------------------------------------------------------------------------------------------------------

static float score_tile(const float *query, const float *keys, float *scores, int count, int size, float scale) {
    float most = -INFINITY;
    for (int t = 0; t < count; t += 4) { // beyond count there is old scratch: finite or not, it is not looked at
        floats8 sum[4];
        const float *key = keys + t * size;
        UNROLL for (int i = 0; i < 4; i++) sum[i] = floats_splat(0);
        for (int d = 0; d < size; d += WIDTH) {
            floats8 q = floats_load(query + d);
            UNROLL for (int i = 0; i < 4; i++) sum[i] = floats_fma(sum[i], q, floats_load(key + i * size + d));
        }
        floats_sum4(scores + t, sum[0], sum[1], sum[2], sum[3]);
    }
    for (int t = 0; t < count; t++) {
        scores[t] *= scale;
        most = scores[t] > most || scores[t] != scores[t] ? scores[t] : most;
    }
    return most;
}

#define CHUNK 8 // vectors of a head that stay in registers while the values go by

static void add_values(float *sums, const float *values, const float *weights, int count, int size, float fade) {
    int d = 0;
    for (; d + CHUNK * WIDTH <= size; d += CHUNK * WIDTH) {
        floats8 sum[CHUNK];
        UNROLL for (int i = 0; i < CHUNK; i++) sum[i] = floats_scale(floats_load(sums + d + i * WIDTH), fade);
        for (int t = 0; t < count; t++)
            UNROLL for (int i = 0; i < CHUNK; i++)
                sum[i] = floats_fma_scalar(sum[i], floats_load(values + t * size + d + i * WIDTH), weights[t]);
        UNROLL for (int i = 0; i < CHUNK; i++) floats_store(sums + d + i * WIDTH, sum[i]);
    }
    for (; d < size; d += WIDTH) {
        floats8 sum = floats_scale(floats_load(sums + d), fade);
        for (int t = 0; t < count; t++) sum = floats_fma_scalar(sum, floats_load(values + t * size + d), weights[t]);
        floats_store(sums + d, sum);
    }
}

// One query and the tile's keys from `skip` to `count`, which are those that it sees.
static void attend_tile(const Decoder *d, Scratch *s, int row, const float *query, int skip, int count) {
    int size = d->head_dim;
    const float *keys = s->keys + skip * size, *values = s->values + skip * size;
    count -= skip;
    float found = score_tile(query, keys, s->scores, count, size, d->scale), total = 0;
    float most = found > s->most[row] || found != found ? found : s->most[row];
    for (int t = 0; t < count; t++) s->scores[t] = exponential(s->scores[t] - most);
    for (int t = 0; t < count; t++) total += s->scores[t];
    float fade = s->most[row] == -INFINITY ? 0 : exponential(s->most[row] - most);
    s->total[row] = s->total[row] * fade + total;
    s->most[row] = most;
    add_values(s->sums + row * size, values, s->scores, count, size, fade);
}

static void attend_item(const Item *item, Scratch *s) {
    const Run *run = item->run;
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    int size = d->head_dim, all = (d->heads + 2 * d->kv_heads) * size, window = d->layers[item->layer].window;
    int start = step->query_starts[item->sequence], fresh = step->query_starts[item->sequence + 1] - start;
    int before = step->kv_lengths[item->sequence] - fresh + item->first; // position of the item's first token in its pages
    int kv_head = item->head / (d->heads / d->kv_heads), end = before + item->count;
    int begin = window && before + 1 > window ? before + 1 - window : 0;
    for (int row = 0; row < item->count * item->heads; row++) s->most[row] = -INFINITY, s->total[row] = 0;
    memset(s->sums, 0, 4 * (size_t)item->count * item->heads * size);
    for (int t = begin; t < end; t += TILE) {
        int count = end - t < TILE ? end - t : TILE;
        gather(item, kv_head, t, count, step->keys[item->layer], s->keys);
        gather(item, kv_head, t, count, step->values[item->layer], s->values);
        for (int i = 0; i < item->count; i++) {
            int last = before + i + 1 - t, skip = window ? before + i + 1 - window - t : 0;
            last = last < count ? last : count;
            skip = skip > 0 ? skip : 0;
            if (last <= skip) continue;
            const float *queries = run->qkv + (size_t)(start + item->first + i) * all + item->head * size;
            for (int h = 0; h < item->heads; h++)
                attend_tile(d, s, i * item->heads + h, queries + h * size, skip, last);
        }
    }
    for (int i = 0; i < item->count; i++)
        for (int h = 0; h < item->heads; h++) {
            float *out = run->attended + ((size_t)(start + item->first + i) * d->heads + item->head + h) * size;
            int row = i * item->heads + h;
            for (int k = 0; k < size; k++) out[k] = s->sums[row * size + k] / s->total[row];
        }
}

void attend(const Run *run, Team *team, int layer, void *scratch) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    Scratch s = place(d, scratch);
    int group = d->heads / d->kv_heads;
    int heads = run->rows * d->kv_heads < 4 * team->threads ? 1 : group;
    int tile = QUERIES / heads > 1 ? QUERIES / heads : 1, across = d->heads / heads, claimed = team_claim(team, 1), piece = 0;
    for (int sequence = 0; sequence < step->sequences; sequence++) {
        int fresh = step->query_starts[sequence + 1] - step->query_starts[sequence];
        int tiles = (fresh + tile - 1) / tile;
        for (; claimed < piece + tiles * across; claimed = team_claim(team, 1)) {
            int at = claimed - piece, first = (tiles - 1 - at / across) * tile; // the longest first
            int count = fresh - first < tile ? fresh - first : tile;
            Item item = {run, layer, sequence, first, count, at % across * heads, heads};
            attend_item(&item, &s);
        }
        piece += tiles * across;
    }
}
