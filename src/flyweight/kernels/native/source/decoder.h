// A decoder as data, one step of it, and the memory that a step needs.
#pragma once

#include "matrix.h"

enum Storage { STORE_FLOAT32, STORE_FLOAT16, STORE_BFLOAT16, STORE_FLOAT8, STORE_INT8 };
enum Side { KEYS, VALUES };

#define MOST_PARTS 3

// Projections of one x whose outputs follow each other: q, k and v are one matrix where their
// formats agree.
typedef struct {
    int32_t count;
    const Matrix *parts[MOST_PARTS];
} Projection;

typedef struct {
    const float *input_norm;           // [hidden]
    const float *post_norm;            // [hidden]: before the MLP
    const float *attention_out_norm;   // [hidden] or NULL: of what attention adds (Gemma)
    const float *mlp_out_norm;         // [hidden] or NULL
    const float *query_norm;           // [head_dim] or NULL
    const float *key_norm;             // [head_dim] or NULL
    Projection qkv;
    const Matrix *o;
    const Matrix *gate;
    const Matrix *up;
    const Matrix *down;
    int32_t window;                    // 0 sees everything
} Layer;

typedef struct {
    int32_t layers_count;
    int32_t hidden;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t rotary;        // of head_dim, how much rope turns
    int32_t intermediate;
    int32_t vocabulary;
    int32_t gated;         // enum Mode: SILU or GELU
    int32_t storage;       // enum Storage, of the KV cache
    int32_t block_size;    // tokens of a page
    float epsilon;
    float scale;           // of attention
    float embedding_scale;
    const float *cos;      // [positions][rotary / 2]
    const float *sin;
    const Layer *layers;
    const float *final_norm;
    const Matrix *embedding;      // NULL: rows of `table`
    const void *table;            // [vocabulary][hidden]
    int32_t table_storage;        // enum Storage
    const Matrix *head;
} Decoder;

// As engine/batch.py has it. Sequence i owns tokens query_starts[i] to query_starts[i + 1].
typedef struct {
    int32_t tokens_count;
    int32_t sequences;
    int32_t outputs;
    int32_t table_width;
    const int64_t *tokens;
    const int64_t *positions;
    const int64_t *slots;
    const int32_t *block_tables;  // [sequences][table_width]
    const int64_t *query_starts;  // [sequences + 1]
    const int64_t *kv_lengths;    // [sequences]
    const int64_t *output_rows;   // [outputs]
    void *const *keys;            // [layers]: [blocks][block_size][kv_heads][head_dim]
    void *const *values;
    uint16_t *const *scales;      // [layers][2]: bfloat16 [blocks][kv_heads][block_size], of codes
    const uint16_t *fixed_scales; // [layers][2]: bfloat16; 0: found for each token
    float *logits;                // [outputs][vocabulary]
    float *states;                // [outputs][hidden] instead of logits, or NULL
} Step;

// What a step runs in, all of it cut out of one piece of memory.
typedef struct {
    const Decoder *decoder;
    const Step *step;
    int rows;          // tokens; of the last layer's end and the head, outputs
    float *hidden;     // [rows][hidden]
    // [rows][hidden]: what attention or the MLP adds where a norm comes between; rows picked out
    float *other;
    float *qkv;        // [rows][(heads + 2 kv_heads) · head_dim]
    float *attended;   // [rows][heads · head_dim]
    float *gated;      // [rows][intermediate]
    uint8_t *shared;   // normed rows and inputs of all threads
    // of each thread, `own_bytes` apart: the same for few rows, and attention's scratch
    uint8_t *own;
    size_t own_bytes;
} Run;

size_t attention_bytes(const Decoder *decoder);

// Stored numbers (no codes) as float32; `count` is rounded up to whole vectors of eight.
void fetch(float *to, const void *from, int count, int storage);

// A token's keys or values (enum Side) of all kv heads, into their slot.
void cache_write(const Run *run, int layer, int side, size_t slot, const float *from);

// One kv head's keys or values of so many tokens of a sequence, from `begin` on.
typedef struct {
    int layer;
    int sequence;
    int kv_head;
    int begin;
    int count;
} Span;

// → [count][head_dim]
void cache_read(const Run *run, Span span, int side, float *to);

// Norms and turns q and k, and writes k and v into their slots: the calling thread's share.
void rope_and_store(const Run *run, Team *team, int layer);

// The calling thread's share of attention: run->qkv → run->attended.
void attend(const Run *run, Team *team, int layer, void *scratch);

void rms_norm(const float *x, const float *weight, float *out, int size, float epsilon);

// One step; `memory`: `decoder_workspace` bytes, aligned to 64.
void decoder_step(Team *team, const Decoder *decoder, const Step *step, void *memory);
