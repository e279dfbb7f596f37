// One step of a decoder: every thread walks this program, and phases are parted by barriers.
//
//   embed │ each layer: (norm, quantize) q·k·v │ rope, store │ attend │ (quantize) o + residual │
//         │             (norm, quantize) silu(gate) · up │ (quantize) down + residual │ norm, head
//
// What stands in parentheses is done by every thread for itself where there are few rows, since
// that costs less than a barrier, and is a phase of its own where there are many.
#include "decoder.h"

#define FEW 2
#define ALIGNED(bytes) (((size_t)(bytes) + 63) / 64 * 64)

typedef struct {
    Run run;
    Team *team;
    int thread;
} Walk;

static int is_few(const Walk *walk) {
    return walk->run.rows <= FEW || walk->team->threads == 1;
}

static uint8_t *own_memory(const Walk *walk) {
    return walk->run.own + walk->run.own_bytes * walk->thread;
}

// Norms rows begin … end of x into `normed` and makes of them what each product takes.
static void prepare_rows(const Walk *walk, Product *products, int count, const float *x,
        const float *norm, float *normed,
                         int begin, int end) {
    int size = products[0].w->inputs;
    if (norm)
        for (int row = begin; row < end; row++) {
            size_t at = (size_t)row * size;
            rms_norm(x + at, norm, normed + at, size, walk->run.decoder->epsilon);
        }
    for (int i = 0; i < count; i++)
        if (i == 0 || !input_same(products[0].w, products[i].w))
            input_fill(products[i].w, &products[i].input, norm ? normed : x, size, begin, end);
}

// x [rows][inputs], normed where there is a norm, as the input of each product.
static void prepare(const Walk *walk, Product *products, int count, const float *x,
        const float *norm) {
    int rows = walk->run.rows;
    int size = products[0].w->inputs;
    uint8_t *at = is_few(walk) ? own_memory(walk) : walk->run.shared;
    float *normed = (float *)at;
    at += ALIGNED(4 * (size_t)rows * size);
    for (int i = 0; i < count; i++) {
        if (i > 0 && input_same(products[0].w, products[i].w)) {
            products[i].input = products[0].input;
            continue;
        }
        input_place(products[i].w, &products[i].input, norm ? normed : x, rows, size, at);
        at += input_bytes(products[i].w, rows);
    }
    if (is_few(walk)) {
        prepare_rows(walk, products, count, x, norm, normed, 0, rows);
        return;
    }
    int step = rows_together(rows);
    for (int row; (row = team_claim(walk->team, step)) < rows;)
        prepare_rows(walk, products, count, x, norm, normed, row,
                row + step < rows ? row + step : rows);
    team_barrier(walk->team);
}

static void embed(const Walk *walk) {
    const Decoder *d = walk->run.decoder;
    for (int row; (row = team_claim(walk->team, 1)) < walk->run.rows;) {
        float *to = walk->run.hidden + (size_t)row * d->hidden;
        size_t token = walk->run.step->tokens[row];
        size_t bytes = d->table_storage == STORE_FLOAT32 ? 4 : 2;
        if (d->embedding) matrix_row(d->embedding, token, to);
        else fetch(to, (const uint8_t *)d->table + token * d->hidden * bytes, d->hidden,
                d->table_storage);
        if (d->embedding_scale != 1)
            for (int k = 0; k < d->hidden; k++) to[k] *= d->embedding_scale;
    }
    team_barrier(walk->team);
}

// hidden += w x, or hidden += norm(w x)
static void add_to_hidden(const Walk *walk, const Matrix *w, const float *x, const float *norm) {
    const Run *run = &walk->run;
    int size = run->decoder->hidden;
    Product product = {w, {0}, {norm ? run->other : run->hidden, size, norm ? REPLACE : ADD}};
    prepare(walk, &product, 1, x, NULL);
    project(walk->team, walk->thread, &product, 1);
    team_barrier(walk->team);
    if (!norm) return;
    for (int row; (row = team_claim(walk->team, 1)) < run->rows;) {
        float *more = run->other + (size_t)row * size;
        float *hidden = run->hidden + (size_t)row * size;
        rms_norm(more, norm, more, size, run->decoder->epsilon);
        for (int k = 0; k < size; k++) hidden[k] += more[k];
    }
    team_barrier(walk->team);
}

static void project_qkv(const Walk *walk, const Layer *layer) {
    const Decoder *d = walk->run.decoder;
    Product products[MOST_PARTS];
    int width = (d->heads + 2 * d->kv_heads) * d->head_dim;
    int at = 0;
    for (int i = 0; i < layer->qkv.count; i++) {
        products[i] = (Product){layer->qkv.parts[i], {0}, {walk->run.qkv + at, width, REPLACE}};
        at += layer->qkv.parts[i]->outputs;
    }
    prepare(walk, products, layer->qkv.count, walk->run.hidden, layer->input_norm);
    project(walk->team, walk->thread, products, layer->qkv.count);
    team_barrier(walk->team);
}

static void run_mlp(const Walk *walk, const Layer *layer) {
    const Decoder *d = walk->run.decoder;
    Product products[2] = {{layer->gate, {0}, {walk->run.gated, d->intermediate, REPLACE}},
                           {layer->up, {0}, {walk->run.gated, d->intermediate, d->gated}}};
    prepare(walk, products, 2, walk->run.hidden, layer->post_norm);
    project_gated(walk->team, walk->thread, products);
    team_barrier(walk->team);
    add_to_hidden(walk, layer->down, walk->run.gated, layer->mlp_out_norm);
}

// Of the last layer only the rows whose logits are wanted go on.
static void pick_rows(Walk *walk) {
    Run *run = &walk->run;
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    int width = d->heads * d->head_dim;
    float *attended = run->qkv; // no longer needed, and wider
    for (int i; (i = team_claim(walk->team, 1)) < step->outputs;) {
        size_t row = step->output_rows[i];
        memcpy(run->other + (size_t)i * d->hidden, run->hidden + row * d->hidden,
                4 * (size_t)d->hidden);
        memcpy(attended + (size_t)i * width, run->attended + row * width, 4 * (size_t)width);
    }
    float *hidden = run->other;
    run->other = run->hidden;
    run->hidden = hidden;
    run->attended = attended;
    run->rows = step->outputs;
    team_barrier(walk->team);
}

static void run_layer(Walk *walk, int index) {
    const Decoder *d = walk->run.decoder;
    const Layer *layer = d->layers + index;
    int last = index == d->layers_count - 1;
    project_qkv(walk, layer);
    rope_and_store(&walk->run, walk->team, index);
    team_barrier(walk->team);
    if (last && !walk->run.step->outputs) return;
    attend(&walk->run, walk->team, index, own_memory(walk));
    team_barrier(walk->team);
    if (last) pick_rows(walk);
    add_to_hidden(walk, layer->o, walk->run.attended, layer->attention_out_norm);
    run_mlp(walk, layer);
}

static void walk_step(void *argument, Team *team, int thread) {
    Walk walk = {*(const Run *)argument, team, thread};
    const Decoder *d = walk.run.decoder;
    embed(&walk);
    for (int layer = 0; layer < d->layers_count; layer++) run_layer(&walk, layer);
    if (!walk.run.step->outputs) return;
    if (walk.run.step->states) { // every layer ends with a barrier
        size_t bytes = 4 * (size_t)d->hidden;
        for (int row; (row = team_claim(team, 1)) < walk.run.rows;)
            memcpy(walk.run.step->states + (size_t)row * d->hidden,
                    walk.run.hidden + (size_t)row * d->hidden, bytes);
        return;
    }
    Product product = {d->head, {0}, {walk.run.step->logits, d->vocabulary, REPLACE}};
    prepare(&walk, &product, 1, walk.run.hidden, d->final_norm);
    project(team, thread, &product, 1);
}

// -- memory ---------------------------------------------------------------------------------------

static size_t most(size_t a, size_t b) {
    return a > b ? a : b;
}

// Of the widest x and all that is made of it at once.
static size_t prepared_bytes(const Decoder *d, int rows) {
    size_t found = input_bytes(d->head, rows);
    int widest = d->hidden;
    for (int i = 0; i < d->layers_count; i++) {
        const Layer *l = d->layers + i;
        size_t qkv = 0;
        for (int k = 0; k < l->qkv.count; k++) qkv += input_bytes(l->qkv.parts[k], rows);
        found = most(found, most(qkv, input_bytes(l->gate, rows) + input_bytes(l->up, rows)));
        found = most(found, most(input_bytes(l->o, rows), input_bytes(l->down, rows)));
        widest = most(widest, most(l->o->inputs, l->down->inputs));
    }
    return ALIGNED(4 * (size_t)rows * widest) + found + 64;
}

// Cuts the memory up; with `memory` NULL only the size is of use.
static size_t place_run(Run *run, const Decoder *d, int tokens, int threads, uint8_t *memory) {
    size_t rows = tokens;
    size_t at = 0;
    size_t heads = (size_t)d->heads * d->head_dim;
    size_t all = heads + 2 * (size_t)d->kv_heads * d->head_dim;
    size_t widths[] = {d->hidden, d->hidden, all, heads, d->intermediate};
    float **places[] = {&run->hidden, &run->other, &run->qkv, &run->attended, &run->gated};
    for (int i = 0; i < 5; i++) {
        *places[i] = (float *)(memory + at);
        at += ALIGNED(4 * rows * widths[i]);
    }
    int few = threads == 1 ? tokens : FEW;
    run->own_bytes = ALIGNED(most(prepared_bytes(d, few), attention_bytes(d)));
    run->own = memory + at;
    at += run->own_bytes * threads;
    run->shared = memory + at;
    return at + (threads == 1 ? 0 : ALIGNED(prepared_bytes(d, tokens)));
}

size_t decoder_workspace(const Team *team, const Decoder *d, int tokens) {
    Run run;
    return place_run(&run, d, tokens, team->threads, NULL);
}

void decoder_step(Team *team, const Decoder *decoder, const Step *step, void *memory) {
    Run run = {.decoder = decoder, .step = step, .rows = step->tokens_count};
    place_run(&run, decoder, step->tokens_count, team->threads, memory);
    team_run(team, walk_step, &run);
}
