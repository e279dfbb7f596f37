// Decode steps of sequences that lie in a table, one row each: what a step needs is worked out of
// the table, and every row takes its likeliest token.
#include <math.h>

#include "decoder.h"

#define PIECES 16 // of a row's logits, which threads search side by side

typedef struct {
    int32_t pages;
    int64_t *tokens;       // [rows]: the last one of each sequence, which is not in the cache yet
    int32_t *lengths;      // [rows]: that one counted
    const int32_t *tables; // [rows][pages]
    int64_t *room;         // `rows_room` bytes
} Rows;

typedef struct {
    const float *logits;
    int64_t *found; // [rows][PIECES]
    int rows;
    int vocabulary;
} Search;

size_t rows_room(int rows) {
    return sizeof(int64_t) * ((size_t)rows * (5 + PIECES) + 1);
}

// The first of the largest numbers; NaN counts as the largest of all.
static int likeliest(const float *x, int count) {
    float most[WIDTH];
    int is_number[WIDTH];
    float largest = -INFINITY;
    int all_numbers = 1;
    int k = 0;
    for (int i = 0; i < WIDTH; i++) most[i] = -INFINITY, is_number[i] = 1;
    for (; k + WIDTH <= count; k += WIDTH)
        for (int i = 0; i < WIDTH; i++) {
            most[i] = x[k + i] > most[i] ? x[k + i] : most[i];
            is_number[i] &= x[k + i] == x[k + i];
        }
    for (int i = 0; i < WIDTH; i++) {
        largest = most[i] > largest ? most[i] : largest;
        all_numbers &= is_number[i];
    }
    for (; k < count; k++) {
        largest = x[k] > largest ? x[k] : largest;
        all_numbers &= x[k] == x[k];
    }
    for (k = 0; k < count - 1; k++)
        if (all_numbers ? x[k] == largest : x[k] != x[k]) break;
    return k;
}

static void search_pieces(void *argument, Team *team, int thread) {
    const Search *search = argument;
    int size = (search->vocabulary + PIECES - 1) / PIECES;
    (void)thread;
    for (int piece; (piece = team_claim(team, 1)) < search->rows * PIECES;) {
        int begin = piece % PIECES * size;
        int count = search->vocabulary - begin < size ? search->vocabulary - begin : size;
        const float *row = search->logits + (size_t)(piece / PIECES) * search->vocabulary;
        search->found[piece] = count < 1 ? 0 : begin + likeliest(row + begin, count);
    }
}

static void choose(Team *team, const Search *search, int64_t *tokens) {
    team_run(team, search_pieces, (void *)search);
    for (int row = 0; row < search->rows; row++) {
        float best[PIECES];
        const int64_t *found = search->found + (size_t)row * PIECES;
        for (int i = 0; i < PIECES; i++)
            best[i] = search->logits[(size_t)row * search->vocabulary + found[i]];
        tokens[row] = found[likeliest(best, PIECES)];
    }
}

// One step of the first `count` rows. `pages` has the addresses of the cache and of the logits;
// `memory` as for `decoder_step`. The rows move on where `advances`.
void decoder_advance(Team *team, const Decoder *decoder, const Step *pages, const Rows *rows,
        int count, int advances, void *memory) {
    int64_t *positions = rows->room;
    int64_t *slots = positions + count;
    int64_t *lengths = slots + count;
    int64_t *outputs = lengths + count;
    int64_t *starts = outputs + count;
    for (int row = 0; row < count; row++) {
        int64_t at = rows->lengths[row] - 1;
        const int32_t *table = rows->tables + (size_t)row * rows->pages;
        positions[row] = at;
        slots[row] = (int64_t)table[at / decoder->block_size] * decoder->block_size
                + at % decoder->block_size;
        lengths[row] = at + 1;
        outputs[row] = starts[row] = row;
    }
    starts[count] = count;
    Step step = *pages;
    step.tokens_count = step.sequences = step.outputs = count;
    step.table_width = rows->pages;
    step.tokens = rows->tokens;
    step.positions = positions;
    step.slots = slots;
    step.block_tables = rows->tables;
    step.query_starts = starts;
    step.kv_lengths = lengths;
    step.output_rows = outputs;
    decoder_step(team, decoder, &step, memory);
    if (!advances) return;
    Search search = {step.logits, starts + count + 1, count, decoder->vocabulary};
    choose(team, &search, rows->tokens);
    for (int row = 0; row < count; row++) rows->lengths[row]++;
}
