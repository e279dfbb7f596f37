// From row-major weights to the layout of matrix.h, all threads at once.
#include "matrix.h"

static int column_input(const Matrix *w, int column) {
    if (w->order) return w->order[column];
    return column < w->inputs ? column : -1;
}

static uint8_t *pack_header(const Packing *p, int block, int g, uint8_t *at) {
    const Matrix *w = p->w;
    int from = g * w->group / p->weight_group;
    float scales[WIDTH] = {0};
    uint8_t *after = at + (w->wide_scales ? 32 : 16);
    for (int r = 0; r < WIDTH && block * WIDTH + r < w->outputs; r++) {
        int64_t source = (int64_t)(block * WIDTH + r) * p->weight_groups + from;
        scales[r] = p->scales[source];
        if (w->zeros) after[r] = p->zeros[source];
    }
    if (w->wide_scales) memcpy(at, scales, 32);
    else halves_store(at, floats_load(scales));
    return after + (w->zeros ? 16 : 0);
}

static uint8_t code_at(const Packing *p, int output, int column) {
    int input = output < p->w->outputs ? column_input(p->w, column) : -1;
    if (input < 0) return 0;
    const uint8_t *row = p->codes + output * p->row_bytes;
    if (p->source_bits == 4) return row[input / 2] >> (input % 2 * 4) & 15;
    return p->is_signed || p->w->format == INT4 ? row[input] : row[input] ^ 0x80;
}

// Eight inputs of one output, from any source.
static void pack_eight(const Packing *p, int output, int column, uint8_t *low, uint8_t *high) {
    for (int j = 0; j < 4; j++) {
        uint8_t first = code_at(p, output, column + j);
        uint8_t second = code_at(p, output, column + 4 + j);
        low[j] = p->w->format == INT4 ? (uint8_t)(first | second << 4) : first;
        if (p->w->format == INT8) high[j] = second;
    }
}

// Four codes of 4 bits as four bytes.
static uint32_t spread(uint32_t codes) {
    codes = (codes | codes << 8) & 0x00ff00ff;
    return (codes | codes << 4) & 0x0f0f0f0f;
}

// The same where the inputs lie in order and the bits are already those of the format: a word at a
// time.
static void pack_eight_fast(const Packing *p, int output, int column, uint8_t *low, uint8_t *high) {
    const uint8_t *from = p->codes + output * p->row_bytes + (p->w->format == INT4 ? column / 2
            : column);
    uint32_t words[2];
    if (p->w->format == INT4) {
        memcpy(words, from, 4);
        words[0] = spread(words[0] & 0xffff) | spread(words[0] >> 16) << 4;
        memcpy(low, words, 4);
        return;
    }
    uint32_t flip = p->is_signed ? 0 : 0x80808080;
    memcpy(words, from, 8);
    words[0] ^= flip;
    words[1] ^= flip;
    memcpy(low, words, 4);
    memcpy(high, words + 1, 4);
}

static void pack_integer_block(const Packing *p, int block) {
    const Matrix *w = p->w;
    uint8_t *at = p->to + block * w->block_bytes;
    int fast = !w->order && (block + 1) * WIDTH <= w->outputs
            && p->source_bits == (w->format == INT4 ? 4 : 8);
    for (int g = 0; g < w->groups; g++) {
        at = pack_header(p, block, g, at);
        for (int k = g * w->group; k < (g + 1) * w->group; k += 8, at += w->format == INT4 ? 32
                : 64)
            for (int r = 0; r < WIDTH; r++) {
                if (fast && k + 8 <= w->inputs) pack_eight_fast(p, block * WIDTH + r, k,
                        at + 4 * r, at + 32 + 4 * r);
                else pack_eight(p, block * WIDTH + r, k, at + 4 * r, at + 32 + 4 * r);
            }
    }
}

#define TRANSPOSE(type)                                                                            \
    for (int r = 0; r < WIDTH && block * WIDTH + r < w->outputs; r++) {                            \
        const type *row = (const type *)(p->codes + (block * WIDTH + r) * p->row_bytes);           \
        for (int k = 0; k < w->inputs; k++) ((type *)to)[k * WIDTH + r] = row[k];                  \
    }

// A block of 16-bit floats as float16 times a power of two, in place.
static void rescale_block(const Packing *p, uint8_t *at) {
    const uint8_t *end = at + p->w->block_bytes;
    for (; at < end; at += 2 * WIDTH) {
        floats8 eight = p->from_bfloats ? bfloats_load(at) : halves_load(at);
        halves_store(at, floats_scale(eight, p->factor));
    }
}

static void pack_float_block(const Packing *p, int block) {
    const Matrix *w = p->w;
    uint8_t *to = p->to + block * w->block_bytes;
    memset(to, 0, w->block_bytes);
    if (p->source_bits == 8) TRANSPOSE(uint8_t)
    if (p->source_bits == 16) TRANSPOSE(uint16_t)
    if (p->source_bits == 32) TRANSPOSE(uint32_t)
    if (takes_halves(w)) rescale_block(p, to);
}

static void pack_blocks(void *argument, Team *team, int thread) {
    const Packing *p = argument;
    int blocks = matrix_blocks(p->w);
    int integers = p->w->format == INT4 || p->w->format == INT8;
    for (int block; (block = team_claim(team, 1)) < blocks;) {
        if (integers) pack_integer_block(p, block);
        else pack_float_block(p, block);
    }
}

void matrix_pack(Team *team, const Packing *packing) {
    team_run(team, pack_blocks, (void *)packing);
}

size_t matrix_scratch(const Matrix *w, int rows) {
    return input_bytes(w, rows);
}

const char *instructions(void) {
    return INSTRUCTIONS;
}
