/* tests/gpu/test_index.c - the lightning indexer of decode steps: one launch against the three that
 * test_mla.c holds against float64, bit for bit; selection against a sort. bench_index: how long
 * a layer's takes. */
#include "gpu.h"

enum { N_SMS = 132, TOP_K = 2048 };

typedef struct shape {
    bgk_type type;
    int heads, dim, block_tokens, n_rot;
    bool neox, bias;
    int top_k, max_ctx, n;
} shape;

#define WORDS_BYTES ((size_t)BGK_INDEX_FEW * BGK_INDEX_FEW_KEYS * 4)

typedef struct setup {
    shape s;
    size_t key_bytes;
    char *keys; /* what the cache holds before the step; the row's own key is NaN */
    float *scores, *w;
    void *q;
    bgk_index x;
    bgk_rows rows;
    bgk_out iq;
    float *ik;
    int64_t ik_cols;
    uint32_t *words;
    int32_t *pos; /* on the host */
} setup;

/* Sequences of pos[i] + 1 tokens each; pos < 0: none, as a row that is padding. */
static setup setup_new(shape s, const int32_t *pos, int layers)
{
    setup t = {.s = s};
    const int per = (s.max_ctx + s.block_tokens - 1) / s.block_tokens, n_blocks = s.n * per + 1;
    const size_t tokens = (size_t)n_blocks * (size_t)s.block_tokens, dim = (size_t)s.dim;
    const size_t n = (size_t)s.n, heads = (size_t)s.heads;
    int32_t *table = malloc((size_t)n_blocks * 4), *seq = malloc(n * 4), *block0 = malloc(n * 4);
    float freq[64];
    for (int i = 0; i + 1 < n_blocks; i++)
        table[i] = i + 1;
    for (int i = n_blocks - 2; i > 0; i--) {
        const int k = (int)(bg_mix64((uint64_t)i) % (uint64_t)(i + 1)), v = table[i];
        table[i] = table[k];
        table[k] = v;
    }
    for (int i = 0; i < s.n; i++) { /* rows and sequences in different orders */
        seq[i] = s.n - 1 - i;
        block0[s.n - 1 - i] = i * per;
    }
    for (int i = 0; i < s.n_rot / 2; i++)
        freq[i] = powf(10000.0f, -(float)i / ((float)s.n_rot / 2));
    t.key_bytes = tokens * dim * 2 * (size_t)layers;
    uint16_t *one = malloc(tokens * dim * 2); /* the same in all layers */
    for (size_t i = 0; i < tokens * dim; i++) {
        const float v = gpu_random(5, i / dim % 7 == 3 ? i % dim : i); /* some are alike */
        one[i] = s.type == BGK_BF16 ? bg_f32_to_bf16(v) : bg_f32_to_f16(v);
    }
    for (int i = 0; i < s.n; i++) {
        const int b = s.block_tokens;
        if (pos[i] < 0) continue;
        const size_t at = (size_t)table[i * per + pos[i] / b] * (size_t)b + (size_t)(pos[i] % b);
        memset(one + at * dim, 0xff, dim * 2);
    }
    CU(cudaMalloc((void **)&t.keys, t.key_bytes));
    for (int l = 0; l < layers; l++)
        CU(cudaMemcpy(t.keys + (size_t)l * tokens * dim * 2, one, tokens * dim * 2,
                      cudaMemcpyHostToDevice));
    t.pos = malloc(n * 4);
    memcpy(t.pos, pos, n * 4);
    float *iq = random_f32(n * heads * dim, 31, 1), *ik = random_f32(n * (dim + heads), 32, 1);
    float *norm = random_f32(dim, 33, 1), *norm_b = random_f32(dim, 34, 0.2f);
    t.rows = (bgk_rows){.pos = to_device(pos, n * 4),
                        .seq = to_device(seq, n * 4),
                        .blocks = to_device(table, (size_t)n_blocks * 4),
                        .block0 = to_device(block0, n * 4),
                        .rows = s.n};
    t.x = (bgk_index){.type = s.type,
                      .n_blocks = n_blocks,
                      .block_tokens = s.block_tokens,
                      .n_heads = s.heads,
                      .dim = s.dim,
                      .k_norm = to_device(norm, dim * 4),
                      .k_norm_b = s.bias ? to_device(norm_b, dim * 4) : NULL,
                      .eps = 1e-6f,
                      .rope = {to_device(freq, sizeof freq), s.n_rot, s.neox, 1.1f},
                      .scale = 0.07f};
    t.ik_cols = s.dim + s.heads;
    t.ik = to_device(ik, n * (dim + heads) * 4);
    t.iq = (bgk_out){to_device(iq, n * heads * dim * 4), BGK_ROWS, s.heads * s.dim};
    t.q = poisoned(n * heads * dim * 2);
    t.w = poisoned(n * heads * 4);
    t.scores = poisoned(n * (size_t)s.max_ctx * 4);
    CU(cudaMalloc((void **)&t.words, WORDS_BYTES));
    CU(cudaMemset(t.words, 0, WORDS_BYTES));
    free(table);
    free(seq);
    free(block0);
    free(one);
    free(iq);
    free(ik);
    free(norm);
    free(norm_b);
    return t;
}

static void setup_free(setup *t)
{
    void *device[] = {t->keys,
                      t->scores,
                      t->words,
                      t->w,
                      t->q,
                      t->ik,
                      t->iq.data,
                      (void *)t->rows.pos,
                      (void *)t->rows.seq,
                      (void *)t->rows.blocks,
                      (void *)t->rows.block0,
                      (void *)t->x.k_norm,
                      (void *)t->x.k_norm_b,
                      (void *)t->x.rope.freq};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        CU(cudaFree(device[i]));
    free(t->pos);
}

static void three(setup *t, int32_t *list, int32_t *count)
{
    const shape *s = &t->s;
    CU(bgk_index_store(&t->x, t->q, t->w, &t->iq, t->ik, t->ik_cols, &t->rows, 0));
    CU(bgk_index_scores(t->scores, s->max_ctx, &t->x, t->q, t->w, &t->rows, 0, s->n, s->top_k,
                        s->max_ctx, N_SMS, 0));
    CU(bgk_index_select(list, count, t->scores, s->max_ctx, &t->rows, 0, s->n, s->top_k, 0));
}

/* Rows [row0, row0 + n). False: not on this GPU. */
static bool at_once(setup *t, int32_t *list, int32_t *count, uint32_t *words, int row0, int n,
                    cudaStream_t stream)
{
    const shape *s = &t->s;
    const cudaError_t e =
        bgk_index_rows(list, count, t->scores, s->max_ctx, words, &t->x, &t->iq, t->ik, t->ik_cols,
                       &t->rows, row0, n, s->top_k, s->max_ctx, N_SMS, stream);
    if (e == cudaErrorNotSupported) return false;
    CU(e);
    return true;
}

static void check(shape s, const int32_t *pos)
{
    setup t = setup_new(s, pos, 1);
    const size_t list_bytes = (size_t)s.n * (size_t)s.top_k * 4, count_bytes = (size_t)s.n * 4;
    int32_t *list[2], *count[2];
    char *keys[2];
    for (int i = 0; i < 2; i++) {
        list[i] = poisoned(list_bytes + GUARD);
        count[i] = poisoned(count_bytes);
        CU(cudaMalloc((void **)&keys[i], t.key_bytes));
        CU(cudaMemcpy(keys[i], t.keys, t.key_bytes, cudaMemcpyDeviceToDevice));
    }
    t.x.keys = keys[0];
    three(&t, list[0], count[0]);
    t.x.keys = keys[1];
    int32_t *want = from_device(list[0], list_bytes), *counts = from_device(count[0], count_bytes);
    char *want_keys = from_device(keys[0], t.key_bytes);
    for (int run = 0; run < 6; run++) { /* all, again on what is there, in slices; without words */
        CU(cudaMemset(list[1], 0xff, list_bytes));
        CU(cudaMemset(count[1], 0xff, count_bytes));
        CU(cudaMemset(t.scores, 0xff, (size_t)s.n * (size_t)s.max_ctx * 4));
        CU(cudaDeviceSynchronize());
        const int slice = run % 3 < 2 ? s.n : s.n / 3 + 1;
        uint32_t *words = run < 3 ? t.words : NULL;
        for (int at = 0; at < s.n; at += slice)
            if (!at_once(&t, list[1], count[1], words, at, s.n - at < slice ? s.n - at : slice, 0))
                cr_skip_test("not on this GPU");
        int32_t *got = from_device(list[1], list_bytes + GUARD);
        int32_t *got_counts = from_device(count[1], count_bytes);
        char *got_keys = from_device(keys[1], t.key_bytes);
        for (int r = 0; r < s.n; r++) {
            cr_assert_eq(got_counts[r], counts[r], "run %d row %d of %d keys: count %d, want %d",
                         run, r, pos[r] + 1, got_counts[r], counts[r]);
            for (int i = 0; i < s.top_k; i++)
                cr_assert_eq(got[r * s.top_k + i], want[r * s.top_k + i],
                             "run %d, %d x %d heads, row %d of %d keys, place %d: %d, want %d", run,
                             s.heads, s.dim, r, pos[r] + 1, i, got[r * s.top_k + i],
                             want[r * s.top_k + i]);
        }
        cr_assert(all_poison((char *)got + list_bytes, GUARD));
        cr_assert_eq(memcmp(got_keys, want_keys, t.key_bytes), 0, "run %d: keys", run);
        free(got);
        free(got_counts);
        free(got_keys);
    }
    uint32_t *left = from_device(t.words, WORDS_BYTES);
    for (size_t i = 0; i < WORDS_BYTES / 4; i++)
        cr_assert_eq(left[i], 0, "word %zu is left as %x", i, left[i]);
    free(left);
    free(want);
    free(counts);
    free(want_keys);
    for (int i = 0; i < 2; i++) {
        CU(cudaFree(list[i]));
        CU(cudaFree(count[i]));
        CU(cudaFree(keys[i]));
    }
    setup_free(&t);
}

static int32_t *random_pos(int n, int max_ctx, int top_k)
{
    const int edges[] = {-1,        0,           top_k - 1,  top_k,
                         top_k + 1, max_ctx - 1, top_k | 31, (top_k | 31) + 1};
    int32_t *pos = malloc((size_t)n * 4);
    for (int i = 0; i < n; i++) {
        pos[i] =
            i < 8 ? edges[(i + 5) % 8] : (int32_t)(bg_mix64((uint64_t)i + 77) % (uint64_t)max_ctx);
        if (pos[i] >= max_ctx) pos[i] = max_ctx - 1;
    }
    return pos;
}

Test(index, one_launch)
{
    NEEDS_GPU();
    static const shape shapes[] = {
        {BGK_F16, 32, 128, 32, 64, false, true, 64, 700, 1},
        {BGK_F16, 32, 128, 16, 64, true, true, 64, 700, 8},
        {BGK_BF16, 32, 128, 24, 128, false, false, 100, 900, 9},
        {BGK_F16, 64, 64, 32, 32, true, true, 33, 1500, 20},
        {BGK_BF16, 16, 64, 64, 0, false, true, 200, 999, 40},
        {BGK_F16, 128, 128, 32, 64, false, true, 64, 500, 70},
        {BGK_F16, 48, 128, 32, 64, false, true, 64, 501, 140},
        {BGK_F16, 32, 128, 32, 64, false, true, TOP_K, 4100, 3},
        {BGK_F16, 32, 128, 32, 64, false, true, TOP_K, 9001, 5},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (gpu_small() && shapes[i].n * shapes[i].max_ctx > 10000) continue;
        int32_t *pos = random_pos(shapes[i].n, shapes[i].max_ctx, shapes[i].top_k);
        check(shapes[i], pos);
        free(pos);
    }
}

/* More scores than shared memory has room for, and as many as it has. */
Test(index, long_rows)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    static const int32_t pos[] = {40000, 18431, 18432, 2047, 33333, 100};
    check((shape){BGK_F16, 32, 128, 32, 64, false, true, TOP_K, 40001, 1}, pos);
    check((shape){BGK_F16, 32, 128, 32, 64, false, true, TOP_K, 40001, 6}, pos);
}

Test(index, refused)
{
    NEEDS_GPU();
    static const int32_t pos[] = {99};
    setup t = setup_new((shape){BGK_F16, 32, 128, 32, 64, false, true, 64, 100, 1}, pos, 1);
    t.x.keys = t.keys;
    bgk_index x = t.x;
    bgk_out iq = t.iq;
    int32_t list, count;
#define TRY()                                                                                      \
    bgk_index_rows(&list, &count, t.scores, 100, t.words, &x, &iq, t.ik, t.ik_cols, &t.rows, 0, 1, \
                   64, 100, N_SMS, 0)
    x.n_heads = 5;
    cr_assert_eq(TRY(), cudaErrorNotSupported);
    x = t.x;
    x.dim = 96;
    cr_assert_eq(TRY(), cudaErrorNotSupported);
    x = t.x;
    x.type = BGK_F32;
    cr_assert_eq(TRY(), cudaErrorNotSupported);
    x = t.x;
    iq.layout = BGK_TILES;
    cr_assert_eq(TRY(), cudaErrorNotSupported);
    iq = t.iq;
    x.k_norm = NULL;
    cr_assert_eq(TRY(), cudaErrorInvalidValue);
#undef TRY
    setup_free(&t);
}

/* ---- selection ------------------------------------------------------------------------------- */

typedef struct ranked {
    float score;
    int pos;
} ranked;

static int better(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->pos < y->pos ? -1 : 1;
}

static int by_pos(const void *a, const void *b)
{
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

static float score_of(int kind, uint64_t i)
{
    const uint64_t u = bg_mix64(i);
    const float v = gpu_random(41, u), g = v + gpu_random(42, u) + gpu_random(43, u);
    switch (kind) {
    case 0:
        return g; /* as they are */
    case 1:
        return i % 1000 ? g : 1e6f * v; /* with outliers */
    case 2:
        return 1.0f; /* all alike */
    case 3:
        return u % 2 ? 0.5f : g; /* half of them */
    case 4:
        return (float)(u % 600); /* ties everywhere */
    case 5:
        return u % 100 ? g : (float)INFINITY;
    case 6:
        return v * 1e-41f; /* subnormal */
    case 7:
        return u % 3 ? g * 3e38f : -g * 3e38f; /* a range beyond the largest float */
    default:
        return 1.0f + (float)(u % 50) * 0x1p-23f;
    }
}

Test(index, select)
{
    NEEDS_GPU();
    enum { KINDS = 9 };
    static const int lens[] = {2049, 4096, 4097, 9999, 33000};
    const int n_lens = gpu_small() ? 1 : 5, stride = 33001, rows = KINDS * n_lens;
    float *s = malloc(sizeof *s * (size_t)rows * (size_t)stride);
    int32_t *pos = malloc((size_t)rows * 4);
    for (int r = 0; r < rows; r++) {
        pos[r] = lens[r / KINDS] - 1;
        for (int i = 0; i < stride; i++)
            s[(size_t)r * (size_t)stride + (size_t)i] =
                i > pos[r] ? (float)INFINITY : score_of(r % KINDS, (uint64_t)(r * stride + i));
    }
    const size_t bytes = (size_t)rows * TOP_K * 4;
    const bgk_rows on = {.pos = to_device(pos, (size_t)rows * 4), .rows = rows};
    float *d = to_device(s, sizeof *s * (size_t)rows * (size_t)stride);
    int32_t *list = poisoned(bytes + GUARD), *count = poisoned((size_t)rows * 4);
    CU(bgk_index_select(list, count, d, stride, &on, 0, rows, TOP_K, 0));
    int32_t *got = from_device(list, bytes + GUARD), *n = from_device(count, (size_t)rows * 4);
    cr_assert(all_poison((char *)got + bytes, GUARD));
    for (int r = 0; r < rows; r++) {
        const int len = pos[r] + 1;
        ranked *k = malloc((size_t)len * sizeof *k);
        int32_t want[TOP_K];
        for (int i = 0; i < len; i++)
            k[i] = (ranked){s[(size_t)r * (size_t)stride + (size_t)i], i};
        qsort(k, (size_t)len, sizeof *k, better);
        for (int i = 0; i < TOP_K; i++)
            want[i] = k[i].pos;
        qsort(want, TOP_K, sizeof *want, by_pos);
        cr_assert_eq(n[r], TOP_K);
        for (int i = 0; i < TOP_K; i++)
            cr_assert_eq(got[r * TOP_K + i], want[i], "kind %d, %d keys, place %d: %d, want %d",
                         r % KINDS, len, i, got[r * TOP_K + i], want[i]);
        free(k);
    }
    CU(cudaFree((void *)on.pos));
    CU(cudaFree(d));
    CU(cudaFree(list));
    CU(cudaFree(count));
    free(s);
    free(pos);
    free(got);
    free(n);
}

/* ---- speed ----------------------------------------------------------------------------------- */

typedef struct bench {
    setup t;
    int32_t *list, *count;
    int layers, next;
    bool once;
} bench;

static void bench_call(void *ctx, cudaStream_t stream)
{
    bench *b = ctx;
    const shape *s = &b->t.s;
    setup *t = &b->t;
    t->x.layer = b->next++ % b->layers;
    if (b->once) {
        at_once(t, b->list, b->count, t->words, 0, s->n, stream);
        return;
    }
    CU(bgk_index_store(&t->x, t->q, t->w, &t->iq, t->ik, t->ik_cols, &t->rows, stream));
    CU(bgk_index_scores(t->scores, s->max_ctx, &t->x, t->q, t->w, &t->rows, 0, s->n, s->top_k,
                        s->max_ctx, N_SMS, stream));
    CU(bgk_index_select(b->list, b->count, t->scores, s->max_ctx, &t->rows, 0, s->n, s->top_k,
                        stream));
}

static void bench_one(int n, int ctx, int max_ctx)
{
    const shape s = {BGK_F16, 32, 128, 32, 64, false, true, TOP_K, max_ctx, n};
    const size_t layer = (size_t)n * (size_t)max_ctx * 256;
    int32_t *pos = malloc((size_t)n * 4);
    for (int i = 0; i < n; i++)
        pos[i] = ctx - 1;
    bench b = {.layers = (int)(((size_t)300 << 20) / layer) + 1}; /* more than the cache holds */
    b.t = setup_new(s, pos, b.layers);
    b.t.x.keys = b.t.keys;
    b.list = poisoned((size_t)n * TOP_K * 4);
    b.count = poisoned((size_t)n * 4);
    double us[2] = {0, 0};
    for (int once = 0; once < 2; once++) {
        b.once = once;
        if (once && !at_once(&b.t, b.list, b.count, b.t.words, 0, n, 0)) break;
        bench_call(&b, 0); /* kernels are loaded and asked about before a capture */
        CU(cudaDeviceSynchronize());
        us[once] = gpu_time_us(bench_call, &b, 40);
    }
    fprintf(stderr, "%4d x %6d keys of at most %6d: three %8.2f us, one %8.2f us, %5.2f TB/s\n", n,
            ctx, max_ctx, us[0], us[1], (double)n * ctx * 256 / us[1] * 1e-6);
    CU(cudaFree(b.list));
    CU(cudaFree(b.count));
    setup_free(&b.t);
    free(pos);
}

Test(index, bench_index)
{
    NEEDS_GPU();
    if (gpu_small()) return;
    bench_one(1, 4096, 4160);
    bench_one(1, 4096, 32768);
    bench_one(1, 1024, 4160);
    bench_one(8, 4096, 4160);
    bench_one(32, 4096, 4160);
    bench_one(128, 4096, 4160);
    bench_one(1, 32768, 32800);
    bench_one(1, 131072, 131072);
}
