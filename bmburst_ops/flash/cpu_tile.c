/* Attention of one tile on one thread of a CPU, forward and backward, in fp32: see cpu.py.
 *
 * A block is 64 queries by 64 keys. Its scores stay in the first cache, and every product is `multiply`, which keeps
 * 8 rows by 32 columns in registers (32 of 16 numbers: AVX-512). Queries are scaled by log2(e) too, so that the softmax
 * is one of powers of two. The maths is that of FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LN2 0.69314718055994531
enum { LANES = 16, ROWS = 8, COLUMNS = 2 * LANES, BLOCK = 64 };
enum { DIM = HEAD_DIM }; /* a multiple of 32, given to the compiler */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

/* One operand: numbers between two batches, tokens and heads. The last dimension is dense. */
typedef struct {
    float *start;
    int64_t batch, token, head;
} operand;

typedef struct {
    int64_t batches, queries, keys, heads, kv_heads;
    int32_t causal; /* aligned at the bottom right; not more queries than keys */
    float scale;
} tile;

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec larger(vec a, vec b) {
    ints is = a > b;
    return (vec)((is & (ints)a) | (~is & (ints)b));
}

/* 2^x; not a number stays so. Polynomial: exp2f of Cephes, on -0.5 ... 0.5. */
INLINE vec power(vec x) {
    ints low = x < all(-126.0f), high = x > all(128.0f);
    x = (vec)((~(low | high) & (ints)x) | (high & (ints)all(128.0f)));
    vec whole = (x + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to the nearest integer */
    vec f = x - whole;
    vec y = 1.535336188319500e-4f * f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
    ints exponent = (__builtin_convertvector(whole, ints) + 127) << 23;
    return (vec)(~low & (ints)(y * (vec)exponent));
}

INLINE float power1(float x) { return power(all(x))[0]; }

/* The largest number, or the sum, in all places. */
#define FOLD(x, join)                                                                            \
    x = join(x, __builtin_shuffle(x, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7})), \
    x = join(x, __builtin_shuffle(x, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11})), \
    x = join(x, __builtin_shuffle(x, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13})), \
    x = join(x, __builtin_shuffle(x, (ints){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}))
INLINE vec plus(vec a, vec b) { return a + b; }
INLINE float largest(vec x) { return (FOLD(x, larger))[0]; }
INLINE float sum(vec x) { return (FOLD(x, plus))[0]; }

/* acc[r] += sum over k < depth of a[r * row + k * step] * b[k * width ...], 8 rows of 32 columns. */
INLINE void multiply(vec acc[ROWS][2], int64_t depth, const float *a, int64_t row, int64_t step, const float *b,
                     int64_t width) {
    for (int64_t k = 0; k < depth; k++) {
        vec left = load(b + k * width), right = load(b + k * width + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vec factor = all(a[r * row + k * step]);
            acc[r][0] += factor * left;
            acc[r][1] += factor * right;
        }
    }
}

/* A block of `[64, DIM]` at c, plus a product of depth 64. */
INLINE void add_product(float *c, const float *a, int64_t row, int64_t step, const float *b) {
    for (int64_t at = 0; at < DIM; at += COLUMNS)
        for (int first = 0; first < BLOCK; first += ROWS) {
            vec acc[ROWS][2];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                acc[r][0] = load(c + (first + r) * DIM + at);
                acc[r][1] = load(c + (first + r) * DIM + at + LANES);
            }
            multiply(acc, BLOCK, a + first * row, row, step, b + at, DIM);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                store(c + (first + r) * DIM + at, acc[r][0]);
                store(c + (first + r) * DIM + at + LANES, acc[r][1]);
            }
        }
}

INLINE int64_t blocks(int64_t tokens) { return (tokens + BLOCK - 1) / BLOCK; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Copy a head as `[blocks * 64, DIM]`, times a factor, with zeros behind the last token. */
INLINE void pack(float *to, operand from, int64_t batch, int64_t head, int64_t tokens, float factor) {
    const float *rows = from.start + batch * from.batch + head * from.head;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < DIM; d++) to[t * DIM + d] = rows[t * from.token + d] * factor;
    memset(to + tokens * DIM, 0, sizeof(float) * (size_t)((blocks(tokens) * BLOCK - tokens) * DIM));
}

/* Copy packed rows as `[blocks, DIM, 64]`. */
INLINE void turn(float *to, const float *from, int64_t tokens) {
    for (int64_t block = 0; block < blocks(tokens); block++)
        for (int64_t d = 0; d < DIM; d++)
            for (int64_t t = 0; t < BLOCK; t++)
                to[(block * DIM + d) * BLOCK + t] = from[(block * BLOCK + t) * DIM + d];
}

/* Keys of the block at `key` that the query `row` sees. */
INLINE int64_t seen(const tile *t, int64_t row, int64_t key) {
    int64_t end = t->causal ? least(t->keys, row + t->keys - t->queries + 1) : t->keys;
    return end - key < 0 ? 0 : least(end - key, BLOCK);
}

INLINE void hide(const tile *t, float *scores, int64_t query, int64_t key, float value) {
    for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t c = seen(t, query + r, key); c < BLOCK; c++) scores[r * BLOCK + c] = value;
}

static float *numbers(int64_t count) { return aligned_alloc(64, sizeof(float) * (size_t)((count + 15) / 16 * 16)); }

/* Output of 64 queries before it is divided by `total`, with the largest score of each and its sum of weights. */
INLINE void forward_block(const tile *t, int64_t query, const float *q, const float *turned_k, const float *v,
                          float *restrict scores, float *restrict out, float *most, float *total) {
    vec sums[BLOCK] = {0};
    memset(out, 0, sizeof(float) * BLOCK * DIM);
    for (int r = 0; r < BLOCK; r++) most[r] = -INFINITY;
    for (int64_t key = 0; key < t->keys && seen(t, query + BLOCK - 1, key); key += BLOCK) {
        for (int first = 0; first < BLOCK; first += ROWS)
            for (int at = 0; at < BLOCK; at += COLUMNS) {
                vec acc[ROWS][2] = {0};
                multiply(acc, DIM, q + first * DIM, DIM, 1, turned_k + key * DIM + at, BLOCK);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    store(scores + (first + r) * BLOCK + at, acc[r][0]);
                    store(scores + (first + r) * BLOCK + at + LANES, acc[r][1]);
                }
            }
        if (seen(t, query, key) < BLOCK) hide(t, scores, query, key, -INFINITY);
        for (int r = 0; r < BLOCK; r++) {
            float *row = scores + r * BLOCK;
            vec a = load(row), b = load(row + 16), c = load(row + 32), d = load(row + 48);
            float now = largest(larger(larger(a, b), larger(c, d)));
            now = now > most[r] ? now : most[r];
            float peak = now == -INFINITY ? 0 : now; /* of a query that sees nothing yet */
            float shrink = most[r] == now ? 1.0f : power1(most[r] - peak);
            a = power(a - peak), b = power(b - peak), c = power(c - peak), d = power(d - peak);
            store(row, a), store(row + 16, b), store(row + 32, c), store(row + 48, d);
            sums[r] = sums[r] * shrink + ((a + b) + (c + d));
            most[r] = now;
            if (shrink != 1.0f)
                for (int at = 0; at < DIM; at += LANES) store(out + r * DIM + at, load(out + r * DIM + at) * shrink);
        }
        add_product(out, scores, BLOCK, 1, v + key * DIM);
    }
    for (int r = 0; r < BLOCK; r++) total[r] = sum(sums[r]);
}

/* Write output and log-sum-exp, dense, of queries, keys and values; return 1 where there is no memory. */
int attention_forward(const tile *t, const operand in[3], const operand *out, float *lse) {
    operand q = in[0], k = in[1], v = in[2];
    int64_t keys = blocks(t->keys) * BLOCK, group = t->heads / t->kv_heads;
    float *scratch = numbers(3 * keys * DIM + BLOCK * (2 * DIM + BLOCK + 2));
    if (!scratch) return 1;
    float *rows_k = scratch, *turned_k = rows_k + keys * DIM, *rows_v = turned_k + keys * DIM;
    float *queries = rows_v + keys * DIM, *result = queries + BLOCK * DIM, *scores = result + BLOCK * DIM;
    float *most = scores + BLOCK * BLOCK, *total = most + BLOCK;
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < t->heads; h++) {
            if (h % group == 0) {
                pack(rows_k, k, b, h / group, t->keys, 1.0f);
                turn(turned_k, rows_k, t->keys);
                pack(rows_v, v, b, h / group, t->keys, 1.0f);
            }
            for (int64_t query = 0; query < t->queries; query += BLOCK) {
                int64_t count = least(BLOCK, t->queries - query);
                operand block = q;
                block.start += query * q.token;
                pack(queries, block, b, h, count, (float)(t->scale / LN2));
                forward_block(t, query, queries, turned_k, rows_v, scores, result, most, total);
                for (int64_t r = 0; r < count; r++) {
                    float *to = out->start + b * out->batch + (query + r) * out->token + h * out->head;
                    for (int64_t d = 0; d < DIM; d++) to[d] = result[r * DIM + d] / total[r];
                    lse[(b * t->heads + h) * t->queries + query + r] = (float)(LN2 * (most[r] + log2(total[r])));
                }
            }
        }
    free(scratch);
    return 0;
}

/* Gradients of 64 keys from the 64 queries at `query`. */
INLINE void backward_block(const tile *t, int64_t query, int64_t key, const float *const packed[5],
                           const float *lse, const float *delta, float *restrict weights, float *restrict slopes,
                           float *grad_q, float *grad_k, float *grad_v) {
    const float *q = packed[0] + query * DIM, *grad = packed[1] + query * DIM, *k = packed[2] + key * DIM;
    const float *turned_k = packed[3] + key * DIM, *turned_v = packed[4] + key * DIM;
    int is_whole = seen(t, query, key) == BLOCK;
    for (int first = 0; first < BLOCK; first += ROWS)
        for (int at = 0; at < BLOCK; at += COLUMNS) {
            vec acc[ROWS][2] = {0};
            float *to = weights + first * BLOCK + at;
            multiply(acc, DIM, q + first * DIM, DIM, 1, turned_k + at, BLOCK);
            for (int r = 0; r < ROWS; r++) {
                store(to + r * BLOCK, power(acc[r][0] - lse[query + first + r]));
                store(to + r * BLOCK + LANES, power(acc[r][1] - lse[query + first + r]));
            }
        }
    if (!is_whole) hide(t, weights, query, key, 0.0f);
    for (int first = 0; first < BLOCK; first += ROWS)
        for (int at = 0; at < BLOCK; at += COLUMNS) {
            vec acc[ROWS][2] = {0};
            float *from = weights + first * BLOCK + at, *to = slopes + first * BLOCK + at;
            multiply(acc, DIM, grad + first * DIM, DIM, 1, turned_v + at, BLOCK);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                float less = delta[query + first + r];
                store(to + r * BLOCK, load(from + r * BLOCK) * (acc[r][0] - less));
                store(to + r * BLOCK + LANES, load(from + r * BLOCK + LANES) * (acc[r][1] - less));
            }
        }
    if (!is_whole) hide(t, slopes, query, key, 0.0f);
    add_product(grad_v, weights, 1, BLOCK, grad);
    add_product(grad_k, slopes, 1, BLOCK, q);
    add_product(grad_q + query * DIM, slopes, BLOCK, 1, k);
}

INLINE void unpack(operand to, const float *from, int64_t batch, int64_t head, int64_t tokens, float factor) {
    float *rows = to.start + batch * to.batch + head * to.head;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t d = 0; d < DIM; d++) rows[t * to.token + d] = from[t * DIM + d] * factor;
}

/* Write the gradients of queries, keys and values, of dO and these, and of dense statistics; return as forward. */
int attention_backward(const tile *t, const operand in[4], const float *lse, const float *delta, const operand out[3]) {
    int64_t keys = blocks(t->keys) * BLOCK, queries = blocks(t->queries) * BLOCK, group = t->heads / t->kv_heads;
    int64_t of_keys = keys * DIM, of_queries = queries * DIM;
    float *scratch = numbers(6 * of_keys + 3 * of_queries + 2 * BLOCK * BLOCK + 2 * queries);
    if (!scratch) return 1;
    float *k = scratch, *turned_k = k + of_keys, *v = turned_k + of_keys, *turned_v = v + of_keys;
    float *grad_k = turned_v + of_keys, *grad_v = grad_k + of_keys, *q = grad_v + of_keys, *grad = q + of_queries;
    float *grad_q = grad + of_queries, *weights = grad_q + of_queries, *slopes = weights + BLOCK * BLOCK;
    float *own_lse = slopes + BLOCK * BLOCK, *own_delta = own_lse + queries;
    const float *const packed[5] = {q, grad, k, turned_k, turned_v};
    for (int64_t b = 0; b < t->batches; b++)
        for (int64_t h = 0; h < t->heads; h++) {
            int64_t kv_head = h / group;
            if (h % group == 0) {
                pack(k, in[2], b, kv_head, t->keys, 1.0f);
                turn(turned_k, k, t->keys);
                pack(v, in[3], b, kv_head, t->keys, 1.0f);
                turn(turned_v, v, t->keys);
                memset(grad_k, 0, sizeof(float) * (size_t)(2 * of_keys));
            }
            pack(grad, in[0], b, h, t->queries, 1.0f);
            pack(q, in[1], b, h, t->queries, (float)(t->scale / LN2));
            memset(grad_q, 0, sizeof(float) * (size_t)of_queries);
            for (int64_t r = 0; r < queries; r++) { /* behind the last query weights are zero */
                int64_t at = (b * t->heads + h) * t->queries + r;
                own_lse[r] = r < t->queries ? (float)(lse[at] / LN2) : INFINITY;
                own_delta[r] = r < t->queries ? delta[at] : 0;
            }
            for (int64_t key = 0; key < t->keys; key += BLOCK)
                for (int64_t query = 0; query < t->queries; query += BLOCK)
                    if (seen(t, query + BLOCK - 1, key))
                        backward_block(t, query, key, packed, own_lse, own_delta, weights, slopes, grad_q,
                                       grad_k + key * DIM, grad_v + key * DIM);
            unpack(out[0], grad_q, b, h, t->queries, t->scale);
            if (h % group == group - 1) {
                unpack(out[1], grad_k, b, kv_head, t->keys, (float)LN2);
                unpack(out[2], grad_v, b, kv_head, t->keys, 1.0f);
            }
        }
    free(scratch);
    return 0;
}
