/* One AdamW step in host memory, in one pass over weights, gradient and state: see host_adamw.py.
 *
 * Every number is computed alike, wherever a thread's part begins: results do not depend on the number of threads.
 * Build with -fopenmp -fno-math-errno -ffp-contract=off.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float factor, scale, decay, rest1, beta2, rest2, step_size, root, eps;
    int32_t is_scaled; /* whether factor is applied, and the product rounded to the dtype of the gradient */
} rates;

static inline float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

/* The upper half of the bfloat16 nearest to a number, ties to even; not a number stays so. */
static inline uint32_t rounded(float number) {
    uint32_t bits = bits_of(number);
    uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return number == number ? nearest : 0x7fc0u;
}

static inline float updated(float weight, float gradient, float *mean, float *square, const rates *r) {
    float g = gradient / r->scale;
    float m = fmaf(r->rest1, g - *mean, *mean);
    float v = fmaf(r->rest2 * g, g, *square * r->beta2);
    *mean = m;
    *square = v;
    return weight * r->decay - r->step_size * m / (sqrtf(v) / r->root + r->eps);
}

/* The weights are their own master. */
void adamw_fp32(int64_t count, float *restrict weights, const float *restrict gradient, float *restrict mean,
                float *restrict square, const rates *given, int32_t threads) {
    const rates r = *given;
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = r.is_scaled ? gradient[i] * r.factor : gradient[i];
        weights[i] = updated(weights[i], g, mean + i, square + i, &r);
    }
}

/* Bfloat16 weights with an fp32 master. */
void adamw_master(int64_t count, uint16_t *restrict weights, float *restrict master, const uint16_t *restrict gradient,
                  float *restrict mean, float *restrict square, const rates *given, int32_t threads) {
    const rates r = *given;
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = float_of((uint32_t)gradient[i] << 16);
        g = r.is_scaled ? float_of(rounded(g * r.factor) << 16) : g;
        float w = updated(master[i], g, mean + i, square + i, &r);
        master[i] = w;
        weights[i] = (uint16_t)rounded(w);
    }
}

/* Bfloat16 weights; the master is their bits and a remainder. */
void adamw_remainder(int64_t count, uint16_t *restrict weights, int16_t *restrict remainder,
                     const uint16_t *restrict gradient, float *restrict mean, float *restrict square,
                     const rates *given, int32_t threads) {
    const rates r = *given;
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = float_of((uint32_t)gradient[i] << 16);
        g = r.is_scaled ? float_of(rounded(g * r.factor) << 16) : g;
        float w = float_of(((uint32_t)weights[i] << 16) + (uint32_t)(int32_t)remainder[i]);
        w = updated(w, g, mean + i, square + i, &r);
        uint32_t nearest = rounded(w);
        int32_t rest = (int32_t)(bits_of(w) - (nearest << 16));
        weights[i] = (uint16_t)nearest;
        remainder[i] = (int16_t)(rest > 32767 ? 32767 : rest);
    }
}
