// The paged KV cache: numbers of 32 or 16 bits, or codes of 8 bits with a scale for each token and
// kv head (kv_format.py says what they mean).
#include "decoder.h"
#include "maths.h"

#define SMALLEST_SCALE 0x1p-24f

// -- numbers --------------------------------------------------------------------------------------

static void store_numbers(void *to, const float *from, int count, int storage) {
    for (int d = 0; d < count; d += WIDTH) {
        floats8 eight = floats_load(from + d);
        if (storage == STORE_FLOAT32) floats_store((float *)to + d, eight);
        else if (storage == STORE_FLOAT16) halves_store((uint16_t *)to + d, eight);
        else
            for (int i = 0; i < WIDTH; i++) {
                uint32_t bits;
                memcpy(&bits, from + d + i, 4);
                bits = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000
                        : bits + 0x7fff + (bits >> 16 & 1);
                ((uint16_t *)to)[d + i] = (uint16_t)(bits >> 16);
            }
    }
}

void fetch(float *to, const void *from, int count, int storage) {
    for (int d = 0; d < count; d += WIDTH) {
        if (storage == STORE_FLOAT32) floats_store(to + d, floats_load((const float *)from + d));
        else if (storage == STORE_FLOAT16) floats_store(to + d,
                halves_load((const uint16_t *)from + d));
        else floats_store(to + d, bfloats_load((const uint16_t *)from + d));
    }
}

// -- codes ----------------------------------------------------------------------------------------

static float bfloat_value(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

// The largest |x| over the largest code, as a bfloat16 rounded upwards; NaN where x has one.
static uint16_t scale_of(const float *x, int count, float limit) {
    float most = 0;
    for (int i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        most = size > most || size != size ? size : most;
        if (most != most) return 0x7fc0;
    }
    float wanted = most / limit;
    wanted = wanted < SMALLEST_SCALE ? SMALLEST_SCALE : wanted;
    uint32_t bits;
    memcpy(&bits, &wanted, 4);
    return (uint16_t)((bits + 0xffff) >> 16);
}

// The nearest e4m3 of |x| <= 448, ties to even.
static uint8_t float8_code(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (bits < 0x3c800000) return sign | (uint8_t)rintf(fabsf(x) * 512.0f); // below 2^-6
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | (uint8_t)((bits >> 20) - ((127 - 7) << 3));
}

static void store_codes(uint8_t *to, const float *x, int count, int storage, float scale) {
    float limit = storage == STORE_FLOAT8 ? 448.0f : 127.0f;
    for (int i = 0; i < count; i++) {
        float value = x[i] / scale;
        value = value < limit ? value : limit; // of NaN, too: its scale is NaN
        value = value > -limit ? value : -limit;
        to[i] = storage == STORE_FLOAT8 ? float8_code(value) : (uint8_t)(int8_t)rintf(value);
    }
}

static void fetch_codes(float *to, const uint8_t *from, int count, int storage, float scale) {
    for (int d = 0; d < count; d += WIDTH)
        if (storage == STORE_FLOAT8) {
            floats8 eight = floats_scale(small_float8s_load(from + d), FLOAT8_FACTOR);
            floats_store(to + d, floats_scale(eight, scale));
        } else {
            for (int i = 0; i < WIDTH; i++) to[d + i] = (int8_t)from[d + i] * scale;
        }
}

// -- pages ----------------------------------------------------------------------------------------

static int is_coded(const Decoder *d) {
    return d->storage == STORE_FLOAT8 || d->storage == STORE_INT8;
}

static void *pages_of(const Run *run, int layer, int side) {
    return side == KEYS ? run->step->keys[layer] : run->step->values[layer];
}

// [blocks][kv_heads][block_size]
static uint16_t *scale_at(const Run *run, int layer, int side, size_t slot, int kv_head) {
    const Decoder *d = run->decoder;
    size_t page = slot / d->block_size;
    return run->step->scales[2 * layer + side] + (page * d->kv_heads + kv_head) * d->block_size
            + slot % d->block_size;
}

void cache_write(const Run *run, int layer, int side, size_t slot, const float *from) {
    const Decoder *d = run->decoder;
    int size = d->head_dim;
    size_t at = slot * d->kv_heads * size;
    if (!is_coded(d)) {
        size_t width = d->storage == STORE_FLOAT32 ? 4 : 2;
        store_numbers((uint8_t *)pages_of(run, layer, side) + at * width, from,
                d->kv_heads * size, d->storage);
        return;
    }
    float limit = d->storage == STORE_FLOAT8 ? 448.0f : 127.0f;
    uint16_t fixed = run->step->fixed_scales[2 * layer + side];
    for (int head = 0; head < d->kv_heads; head++) {
        const float *x = from + head * size;
        uint16_t scale = scale_of(x, size, limit);
        if (fixed && scale != 0x7fc0) scale = fixed;
        *scale_at(run, layer, side, slot, head) = scale;
        store_codes((uint8_t *)pages_of(run, layer, side) + at + head * size, x, size,
                d->storage, bfloat_value(scale));
    }
}

void cache_read(const Run *run, Span span, int side, float *to) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    const uint8_t *pages = pages_of(run, span.layer, side);
    const int32_t *table = step->block_tables + (size_t)span.sequence * step->table_width;
    int size = d->head_dim;
    for (int i = 0; i < span.count; i++) {
        size_t page = table[(span.begin + i) / d->block_size];
        size_t slot = page * d->block_size + (span.begin + i) % d->block_size;
        size_t at = (slot * d->kv_heads + span.kv_head) * size;
        float *out = to + i * size;
        if (is_coded(d)) {
            float scale = bfloat_value(*scale_at(run, span.layer, side, slot, span.kv_head));
            fetch_codes(out, pages + at, size, d->storage, scale);
        } else {
            size_t width = d->storage == STORE_FLOAT32 ? 4 : 2;
            // a head's numbers of the next tokens lie apart, which the processor does not foresee
            const uint8_t *ahead = pages + (at + 4 * (size_t)d->kv_heads * size) * width;
            for (size_t byte = 0; byte < size * width; byte += 64)
                __builtin_prefetch(ahead + byte);
            fetch(out, pages + at * width, size, d->storage);
        }
    }
}
