/* The operations of a decode step between its matrix products, for AVX-512; see compiled.py.

   `half` is bfloat16: such numbers are computed in float32, in the order of PyTorch and oneDNN, and
   rounded where the modules of a model round them, so that engine and trainer get the same bits.
   Letters: B rows, T tokens, S slots, H heads, K heads of keys, D head size, a multiple of
   2 * WIDTH. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 16, TILE = 4 };
enum { BLOCK = 512, PART = 1024 }; /* values that oneDNN adds at once, and see weighted_sum */
enum { FEW = 64, MOST_ROWS = 8 };  /* keys, and rows that read them, at a time */
typedef __m512 Floats;
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t half;

#define INLINE static inline __attribute__((always_inline))

INLINE Floats all(float x) { return x - (Floats){}; }

INLINE Floats where(Ints condition, Floats a, Floats b) {
    return (Floats)(((Ints)a & condition) | ((Ints)b & ~condition));
}

/* To the nearest number of bfloat16, to even between two; NaN stays NaN. */
INLINE Floats rounded(Floats x) {
    Bits bits = (Bits)x;
    Floats nearest = (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    return where(x == x, nearest, (Floats)(bits | 0x7fffffffu));
}

INLINE Floats load(const void *from, long at, int is_half) {
    if (is_half) {
        Halves x;
        memcpy(&x, (const half *)from + at, sizeof x);
        return (Floats)(__builtin_convertvector(x, Bits) << 16);
    }
    Floats x;
    memcpy(&x, (const float *)from + at, sizeof x);
    return x;
}

INLINE void store(void *to, long at, Floats x, int is_half) {
    if (is_half) {
        Halves upper = __builtin_convertvector((Bits)rounded(x) >> 16, Halves);
        memcpy((half *)to + at, &upper, sizeof upper);
    } else {
        memcpy((float *)to + at, &x, sizeof x);
    }
}

/* a * b + c, rounded once; elsewhere, the compiler rounds products. */
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

/* The sum, of halves at each step. */
INLINE float sum(Floats x) {
    for (int half_of = WIDTH / 2; half_of; half_of /= 2)
        for (int i = 0; i < half_of; i++) x[i] += x[i + half_of];
    return x[0];
}

/* e to the power of x as PyTorch computes it, up to x = 88, and 0 below -87. */
INLINE Floats power_of_e(Floats x) {
    Ints none = x < -87.0f;
    x = where(x > 88.0f, all(88.0f), x); /* NaN stays NaN */
    Floats n = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
    Floats r = fused(n, all(-1.428606765330187045e-06f), fused(n, all(-0.693145751953125f), x));
    Floats p = fused(all(0.000198527617612853646f), r, all(0.00139304355252534151f));
    p = fused(p, r, all(0.00833336077630519867f));
    p = fused(p, r, all(0.0416664853692054749f));
    p = fused(p, r, all(0.166666671633720398f));
    p = fused(p, r, all(0.5f));
    p = 1.0f + fused(r * r, p, r);
    Ints exponent = (Ints)_mm512_cvtps_epi32(n) + 127;
    return where(none, all(0.0f), p * (Floats)(exponent << 23));
}

/* Scores of `tile` queries, (tile, D), with the keys first..last, (D, capacity). */
INLINE void scores_of(const int tile, const float *queries, const float *keys, long capacity,
                      int size, int first, int last, float *scores, long room) {
    int place = first;
    for (; place + 4 * WIDTH <= last; place += 4 * WIDTH) {
        Floats sums[TILE][4] = {};
        for (int d = 0; d < size; d++) {
            Floats key[4];
            for (int j = 0; j < 4; j++) key[j] = load(keys, d * capacity + place + j * WIDTH, 0);
            for (int g = 0; g < tile; g++)
                for (int j = 0; j < 4; j++)
                    sums[g][j] = fused(all(queries[g * size + d]), key[j], sums[g][j]);
        }
        for (int g = 0; g < tile; g++)
            for (int j = 0; j < 4; j++) store(scores, g * room + place + j * WIDTH, sums[g][j], 0);
    }
    for (; place < last; place += WIDTH) {
        Floats sums[TILE] = {};
        for (int d = 0; d < size; d++) {
            Floats key = load(keys, d * capacity + place, 0);
            for (int g = 0; g < tile; g++)
                sums[g] = fused(all(queries[g * size + d]), key, sums[g]);
        }
        for (int g = 0; g < tile; g++) store(scores, g * room + place, sums[g], 0);
    }
}

/* Adds `many` vectors of the weighted values first..last, (places, D), to the sums, (tile, D). The
   second of two values comes first, as in the processor's instruction for bfloat16. */
INLINE void add_columns(const int tile, const int many, int column, const float *weights, long room,
                        const void *values, int is_half, int size, long first, long last,
                        float *out) {
    Floats sums[TILE][4];
    for (int g = 0; g < tile; g++)
        for (int j = 0; j < many; j++) sums[g][j] = load(out, g * size + column + j * WIDTH, 0);
    for (long pair = first; pair < last; pair += 2)
        for (long place = pair + 1; place >= pair; place--) {
            if (place == last) continue;
            Floats value[4];
            for (int j = 0; j < many; j++)
                value[j] = load(values, place * size + column + j * WIDTH, is_half);
            for (int g = 0; g < tile; g++)
                for (int j = 0; j < many; j++)
                    sums[g][j] = fused(all(weights[g * room + place]), value[j], sums[g][j]);
        }
    for (int g = 0; g < tile; g++)
        for (int j = 0; j < many; j++) store(out, g * size + column + j * WIDTH, sums[g][j], 0);
}

INLINE void add_values(const int tile, const float *weights, long room, const void *values,
                       int is_half, int size, long first, long last, float *out) {
    int d = 0;
    for (; d + 4 * WIDTH <= size; d += 4 * WIDTH)
        add_columns(tile, 4, d, weights, room, values, is_half, size, first, last, out);
    for (; d < size; d += 2 * WIDTH)
        add_columns(tile, 2, d, weights, room, values, is_half, size, first, last, out);
}

/* Calls a function for `count` queries with a number of them that the compiler knows. */
#define IN_TILES(count, call)                                                                      \
    for (int done = 0; done < count; done += TILE) switch (count - done) {                         \
            case 1: { enum { tile = 1 }; call; } break;                                            \
            case 2: { enum { tile = 2 }; call; } break;                                            \
            case 3: { enum { tile = 3 }; call; } break;                                            \
            default: { enum { tile = 4 }; call; }                                                  \
        }

INLINE void softmax(float *scores, int first, int last, int is_half) {
    Floats most = all(-INFINITY), total = {};
    for (int l = first; l < last; l += WIDTH) {
        Floats x = load(scores, l, 0);
        most = where(x > most, x, most);
    }
    float peak = most[0];
    for (int i = 1; i < WIDTH; i++) peak = most[i] > peak ? most[i] : peak;
    for (int l = first; l < last; l += WIDTH) {
        Floats x = power_of_e(load(scores, l, 0) - peak);
        total += x;
        store(scores, l, x, 0);
    }
    float inverse = 1.0f / sum(total);
    for (int l = first; l < last; l += WIDTH) {
        Floats x = load(scores, l, 0) * inverse;
        store(scores, l, is_half ? rounded(x) : x, 0);
    }
}

INLINE void move_sums(float *to, float *from, int count, int is_half) {
    for (int d = 0; d < count; d += WIDTH) {
        Floats x = load(from, d, 0);
        store(to, d, load(to, d, 0) + (is_half ? rounded(x) : x), 0);
        store(from, d, all(0.0f), 0);
    }
}

/* What `attend` gets, and the bytes of a number. */
typedef struct {
    const void *query, *key, *value;
    const long *strides;
    float *keys;
    char *values;
    void *out;
    int shared, group, size;
    long capacity, places, number_bytes;
    float scale;
    long window;
} Step;

INLINE long least(long a, long b) { return a < b ? a : b; }

INLINE void store_token(const Step *s, const int64_t *row, int head, int is_half) {
    long slot = row[2] * s->shared + head, position = row[3], bytes = s->size * s->number_bytes;
    float *keys = s->keys + slot * s->size * s->capacity + position;
    for (int d = 0; d < s->size; d += WIDTH) {
        Floats x = load(s->key, row[1] * s->strides[1] + head * s->size + d, is_half);
        for (int i = 0; i < WIDTH; i++) keys[(d + i) * s->capacity] = x[i];
    }
    long from = (row[1] * s->strides[2] + head * s->size) * s->number_bytes;
    memcpy(s->values + (slot * s->places + position) * bytes, (const char *)s->value + from, bytes);
}

/* The attention of `rows` rows that follow each other in the table to one head of keys, in memory
   for rows * group * (capacity + 4 * D) numbers. The rows begin alike, so that each block of their
   common keys and values is read once, and then from the first cache. */
INLINE void attend_rows(const Step *s, const int64_t *table, int rows, int head, float *memory,
                        int is_half) {
    int size = s->size, group = s->group, count = rows * group, width = group * size;
    long room = s->capacity, bytes = size * s->number_bytes;
    long anchor = table[4] * s->shared + head, common = table[5];
    float *scores = memory, *queries = scores + count * room, *block = queries + count * size;
    float *part = block + count * size, *out = part + count * size;
    memset(block, 0, sizeof(float) * 3 * count * size);
    long start = s->window && table[3] >= s->window ? table[3] + 1 - s->window : 0;
    long first = start / WIDTH * WIDTH;
    if (common < first) common = first;
    for (int r = 0; r < rows; r++) {
        const int64_t *row = table + 6 * r;
        if (s->key) store_token(s, row, head, is_half);
        long from = row[1] * s->strides[0] + head * width;
        for (int d = 0; d < width; d += WIDTH)
            store(queries, r * width + d, load(s->query, from + d, is_half) * s->scale, 0);
    }
    const float *keys = s->keys + anchor * size * room;
    const char *values = s->values + anchor * s->places * bytes;
    for (long from = first; from < common; from += FEW) {
        long to = least(from + FEW, common);
        IN_TILES(count, scores_of(tile, queries + done * size, keys, room, size, from, to,
                                  scores + done * room, room))
    }
    for (int r = 0; r < rows; r++) {
        const int64_t *row = table + 6 * r;
        long end = row[3] + 1, last = (end + WIDTH - 1) / WIDTH * WIDTH;
        float *own_scores = scores + r * group * room, *own_queries = queries + r * width;
        const float *own = s->keys + (row[2] * s->shared + head) * size * room;
        IN_TILES(group, scores_of(tile, own_queries + done * size, own, room, size, common, last,
                                  own_scores + done * room, room))
        for (int g = 0; g < group; g++, own_scores += room) {
            for (long l = first; l < start; l++) own_scores[l] = -INFINITY;
            for (long l = end; l < last; l++) own_scores[l] = -INFINITY;
            softmax(own_scores, first, last, is_half);
        }
    }
    for (long from = first, to; from < common; from = to) {
        to = least((from / FEW + 1) * FEW, common);
        IN_TILES(count, add_values(tile, scores + done * room, room, values, is_half, size, from,
                                   to, block + done * size))
        if (to % BLOCK == 0) move_sums(part, block, count * size, 0);
        if (to % PART == 0) move_sums(out, part, count * size, is_half);
    }
    for (int r = 0; r < rows; r++) {
        const int64_t *row = table + 6 * r;
        const char *own = s->values + (row[2] * s->shared + head) * s->places * bytes;
        long end = row[3] + 1, at = r * width;
        for (long from = common, to; from < end; from = to) {
            to = least((from / BLOCK + 1) * BLOCK, end);
            IN_TILES(group, add_values(tile, scores + (r * group + done) * room, room, own, is_half,
                                       size, from, to, block + at + done * size))
            move_sums(part + at, block + at, width, 0);
            if (to == end || to % PART == 0) move_sums(out + at, part + at, width, is_half);
        }
        long to = (row[0] * s->shared + head) * width;
        for (int d = 0; d < width; d += WIDTH)
            store(s->out, to + d, load(out, at + d, 0), is_half);
    }
}

/* Attention of rows with one token each, whose key and value are stored first if they are given.

   query, key, value: (T, ..., D), whose tokens are `strides` numbers apart. keys: (S, K, D,
   capacity). values: (S, K, places, D). out: (B, H, D). table: (B, 6) of each row its place in
   `out`, its token, its slot, its position, and the slot with which it has how many first tokens
   in common, a multiple of WIDTH. window: the number of last tokens that a token sees, or 0.
   Returns 0, or 1 if there is no memory. */
int attend(const void *query, const void *key, const void *value, const long *strides, float *keys,
           void *values, void *out, const int64_t *table, int rows, int shared, int group, int size,
           long capacity, long places, float scale, long window, int is_half, int threads) {
    const Step step = {
        .query = query, .key = key, .value = value, .strides = strides, .keys = keys,
        .values = values, .out = out, .shared = shared, .group = group, .size = size,
        .capacity = capacity, .places = places, .scale = scale, .window = window,
        .number_bytes = is_half ? sizeof(half) : sizeof(float),
    };
    int *starts = malloc(sizeof(int) * (rows + 1)), chunks = 0, failed = 0;
    int most = least(MOST_ROWS, 1 + rows * shared / (4 * threads)); /* work for all threads */
    if (!starts) return 1;
    for (int row = 0, begin = 0; row < rows; row++) {
        int alike = !window && table[6 * row + 4] == table[6 * begin + 4];
        if (row && alike && row - begin < most) continue;
        starts[chunks++] = begin = row;
    }
    starts[chunks] = rows;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *memory = malloc(sizeof(float) * most * group * (capacity + 4 * size));
        failed = !memory;
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < shared * chunks; task++) {
            if (!memory) continue;
            int head = task / chunks, first = starts[task % chunks];
            int many = starts[task % chunks + 1] - first;
            if (is_half)
                attend_rows(&step, table + 6 * first, many, head, memory, 1);
            else
                attend_rows(&step, table + 6 * first, many, head, memory, 0);
        }
        free(memory);
    }
    free(starts);
    return failed;
}

/* The sum of the squares of a row, in PyTorch's order: it adds vectors of 8 numbers in turns to 4
   sums, which it adds to others after every 16 rounds. */
INLINE float squares_of(const void *x, long at, int size, int is_half) {
    Floats sums[2] = {}, older[2] = {};
    int d = 0;
    for (int turn = 1; d + 2 * WIDTH <= size; d += 2 * WIDTH, turn++)
        for (int j = 0; j < 2; j++) {
            Floats part = load(x, at + d + j * WIDTH, is_half);
            sums[j] += part * part;
            if (turn % 16 == 0) {
                older[j] += sums[j];
                sums[j] = all(0.0f);
            }
        }
    Floats rest = d < size ? load(x, at + d, is_half) : all(0.0f);
    float total = 0.0f;
    for (int j = 0; j < 2; j++) sums[j] += older[j];
    for (int i = 0; i < 8; i++) {
        float lane = (sums[0][i] + rest[i] * rest[i]) + rest[i + 8] * rest[i + 8];
        total += ((lane + sums[0][i + 8]) + sums[1][i]) + sums[1][i + 8];
    }
    return total;
}

INLINE void norm_row(const void *x, const void *weight, void *out, long at, long weight_at,
                     int size, float eps, int is_half) {
    float squares = squares_of(x, at, size, is_half);
    float inverse = 1.0f / sqrtf(squares / size + eps);
    for (int d = 0; d < size; d += WIDTH) {
        Floats y = load(x, at + d, is_half) * inverse;
        y = (is_half ? rounded(y) : y) * load(weight, weight_at + d, is_half);
        store(out, at + d, y, is_half);
    }
}

/* RMS norms of rows, (T, size). */
void norm(const void *x, const void *weight, void *out, long rows, int size, float eps, int is_half,
          int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 16)
    for (long row = 0; row < rows; row++)
        if (is_half)
            norm_row(x, weight, out, row * size, 0, size, eps, 1);
        else
            norm_row(x, weight, out, row * size, 0, size, eps, 0);
}

INLINE void rotate_row(void *x, const void *cosine, const void *sine, const void *weight,
                       long row, int heads, int all_heads, int size, float eps, int is_half) {
    for (int head = 0; head < heads; head++) {
        long at = (row * all_heads + head) * size, other = at + size / 2;
        if (weight) norm_row(x, weight, x, at, (long)head * size, size, eps, is_half);
        for (int d = 0; d < size / 2; d += WIDTH) {
            long angle = row * 2 * size + d, opposite = angle + size / 2;
            Floats a = load(x, at + d, is_half), b = load(x, other + d, is_half);
            Floats parts[4] = {a * load(cosine, angle, is_half), b * load(sine, angle, is_half),
                               b * load(cosine, opposite, is_half),
                               a * load(sine, opposite, is_half)};
            if (is_half)
                for (int j = 0; j < 4; j++) parts[j] = rounded(parts[j]);
            store(x, at + d, parts[0] + parts[1], is_half);
            store(x, other + d, parts[2] + parts[3], is_half);
        }
    }
}

/* Norms, with weights (heads, D) if there are, and rotates the first heads of x, (T, all_heads, D),
   in place. Cosines and signed sines, (T, D), are 2 D numbers apart. */
void rotate(void *x, const void *cosine, const void *sine, const void *weight, long rows, int heads,
            int all_heads, int size, float eps, int is_half, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * size > 1 << 16)
    for (long row = 0; row < rows; row++)
        if (is_half)
            rotate_row(x, cosine, sine, weight, row, heads, all_heads, size, eps, 1);
        else
            rotate_row(x, cosine, sine, weight, row, heads, all_heads, size, eps, 0);
}

/* silu(gate) * up in bfloat16; x is (T, 2, size), out (T, size). */
void gated(const half *x, half *out, long rows, int size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 14)
    for (long row = 0; row < rows; row++)
        for (int d = 0; d < size; d += WIDTH) {
            Floats gate = load(x, row * 2 * size + d, 1);
            Floats up = load(x, row * 2 * size + size + d, 1);
            Floats active = rounded(gate / (1.0f + power_of_e(-gate)));
            store(out, row * size + d, active * up, 1);
        }
}
