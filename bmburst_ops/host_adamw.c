/* One AdamW step in host memory, in one pass over weights, gradient and state: see host_adamw.py.
 *
 * Every number is computed alike, wherever a thread's part begins: results do not depend on the number of threads.
 * Build with -fopenmp -fno-math-errno -ffp-contract=off.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float scale, decay, rest1, beta2, rest2, step_size, root, eps;
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
        weights[i] = updated(weights[i], gradient[i], mean + i, square + i, &r);
    }
}

/* Bfloat16 weights with an fp32 master. */
void adamw_master(int64_t count, uint16_t *restrict weights, float *restrict master, const uint16_t *restrict gradient,
                  float *restrict mean, float *restrict square, const rates *given, int32_t threads) {
    const rates r = *given;
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = float_of((uint32_t)gradient[i] << 16);
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
        float w = float_of(((uint32_t)weights[i] << 16) + (uint32_t)(int32_t)remainder[i]);
        w = updated(w, g, mean + i, square + i, &r);
        uint32_t nearest = rounded(w);
        int32_t rest = (int32_t)(bits_of(w) - (nearest << 16));
        weights[i] = (uint16_t)nearest;
        remainder[i] = (int16_t)(rest > 32767 ? 32767 : rest);
    }
}

/* Small moments: see moments.py. A block of BLOCK elements at a time is read to fp32, updated, and rounded. */
enum { BLOCK = 256, CODES = 256 };

/* 32 random bits of an element: the finalizer of MurmurHash3. */
static inline uint32_t random_bits(uint32_t index, uint32_t key) {
    uint32_t x = index * 0x9e3779b1u + key;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

/* Rounded up with the probability that makes the mean exact; `noise` has 16 bits. */
static inline uint16_t rounded_by(float number, uint32_t noise) {
    uint32_t bits = bits_of(number);
    return (uint16_t)((bits & 0x7f800000u) == 0x7f800000u ? rounded(number) : (bits + noise) >> 16);
}

static void decode(int count, const uint8_t *codes, float scale, const float *table, float *numbers) {
#pragma omp simd
    for (int i = 0; i < count; i++) numbers[i] = table[codes[i]] * scale;
}

static float encode(int count, const float *numbers, const uint32_t *noise, int shift, const float *table,
                    uint8_t *codes) {
    const float flip = table[0] < 0.0f ? 1.0f / table[0] : 0.0f;
    float most = 0.0f;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < count; i++) {
        float size = numbers[i] * flip > numbers[i] ? numbers[i] * flip : numbers[i];
        most = size > most ? size : most;
    }
    const float divisor = most > 0.0f ? most : 1.0f;
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float part = numbers[i] / divisor;
        part = part > 1.0f ? 1.0f : part;
        int32_t at = 0;
        for (int32_t step = CODES / 2; step; step /= 2) at += table[at + step] <= part ? step : 0;
        float low = table[at], width = table[at < CODES - 1 ? at + 1 : at] - low;
        at += (part - low) * 65536.0f > (float)(int32_t)((noise[i] >> shift) & 0xffffu) * width;
        codes[i] = (uint8_t)(flip == 0.0f && at == 0 && numbers[i] > 0.0f ? 1 : at);
    }
    return most;
}

/* Moments are bfloat16 if `scales_mean` is NULL, else codes of `table_mean` and `table_square`. Weights are bfloat16
 * with remainders, or fp32 and their own master if `remainder` is NULL. `first` is the index of the first element in
 * its parameter, at whose multiples of BLOCK blocks begin. */
void adamw_small(int64_t count, int64_t first, uint32_t key, void *weights, int16_t *remainder, const void *gradient,
                 void *mean, void *square, float *scales_mean, float *scales_square, const float *table_mean,
                 const float *table_square, const rates *given, int32_t threads) {
    const rates r = *given;
    const int64_t lead = first % BLOCK, blocks = (lead + count + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = block ? block * BLOCK - lead : 0, end = (block + 1) * BLOCK - lead;
        const int size = (int)((end < count ? end : count) - begin);
        float w[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
        uint32_t noise[BLOCK];
        uint16_t *narrow = (uint16_t *)weights + begin;
        float *wide = (float *)weights + begin;
        uint16_t *m16 = (uint16_t *)mean + begin, *v16 = (uint16_t *)square + begin;
        if (remainder) {
            const uint16_t *given16 = (const uint16_t *)gradient + begin;
            const int16_t *rest = remainder + begin;
#pragma omp simd
            for (int i = 0; i < size; i++) {
                g[i] = float_of((uint32_t)given16[i] << 16);
                w[i] = float_of(((uint32_t)narrow[i] << 16) + (uint32_t)(int32_t)rest[i]);
            }
        } else {
            const float *given32 = (const float *)gradient + begin;
#pragma omp simd
            for (int i = 0; i < size; i++) {
                g[i] = given32[i];
                w[i] = wide[i];
            }
        }
        if (scales_mean) {
            decode(size, (uint8_t *)mean + begin, scales_mean[block], table_mean, m);
            decode(size, (uint8_t *)square + begin, scales_square[block], table_square, v);
        } else {
#pragma omp simd
            for (int i = 0; i < size; i++) {
                m[i] = float_of((uint32_t)m16[i] << 16);
                v[i] = float_of((uint32_t)v16[i] << 16);
            }
        }
#pragma omp simd
        for (int i = 0; i < size; i++) {
            w[i] = updated(w[i], g[i], m + i, v + i, &r);
            noise[i] = random_bits((uint32_t)(first + begin + i), key);
        }
        if (scales_mean) {
            scales_mean[block] = encode(size, m, noise, 0, table_mean, (uint8_t *)mean + begin);
            scales_square[block] = encode(size, v, noise, 16, table_square, (uint8_t *)square + begin);
        } else {
#pragma omp simd
            for (int i = 0; i < size; i++) {
                m16[i] = rounded_by(m[i], noise[i] & 0xffffu);
                v16[i] = rounded_by(v[i], noise[i] >> 16);
            }
        }
        if (remainder) {
            int16_t *rest = remainder + begin;
#pragma omp simd
            for (int i = 0; i < size; i++) {
                uint32_t nearest = rounded(w[i]);
                int32_t left = (int32_t)(bits_of(w[i]) - (nearest << 16));
                narrow[i] = (uint16_t)nearest;
                rest[i] = (int16_t)(left > 32767 ? 32767 : left);
            }
        } else {
            memcpy(wide, w, (size_t)size * sizeof(float));
        }
    }
}
