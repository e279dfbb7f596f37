// Functions of one float that compilers turn into vectors inside loops; NaN stays NaN.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

// eˣ to about one unit in the last place: 2^n · a polynomial over |r| ≤ ln 2 / 2.
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((n == n ? (int32_t)n : 0) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline float silu(float x) {
    return x / (1.0f + exponential(-x));
}

// The form with tanh, as Gemma has it.
static inline float gelu(float x) {
    float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * inner));
}
