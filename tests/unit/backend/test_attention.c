/* rope_store and attention: against float64, and the same bits however a sequence is cut into
 * chunks, whatever else is in the step, and on any number of threads. */
#include "unit/backend/cpu_fixture.h"

#include "base/f16.h"

typedef struct shape {
    int n_heads, head0, group; /* query heads [head0, head0 + n_heads) of groups of this size */
    int head_dim, v_dim, block_tokens;
    bg_cache_type type;
    int window;
    float softcap;
    bool sinks;
} shape;

enum { MAX_SEQS = 4, LAYERS = 2, LAYER = 1 };

static int kv_first(const shape *s)
{
    return s->head0 / s->group;
}

static int kv_count(const shape *s)
{
    return (s->head0 + s->n_heads - 1) / s->group - kv_first(s) + 1;
}

static float scale_of(const shape *s)
{
    return 1.0f / sqrtf((float)s->head_dim);
}

/* Value i of row `part` (0 q, 1 k, 2 v) of a head (global number) at a position of a sequence. */
static float input(int seq, int pos, int part, int head, int i)
{
    const uint64_t at = (uint64_t)pos * 4096u + (uint64_t)i;
    const double u = uniform((uint64_t)(seq * 997 + part * 131 + head + 7), at) - 0.5;
    return (float)(u * (part == 0 ? 7 : 3.5));
}

static double stored(const shape *s, float x)
{
    if (s->type == BG_CACHE_F16) return (double)bg_f16_to_f32(bg_f32_to_f16(x));
    if (s->type == BG_CACHE_BF16) return (double)bg_bf16_to_f32(bg_f32_to_bf16(x));
    return (double)x;
}

/* Runs sequences of the given lengths, chunk positions of each a step, in block tables that are all
 * mixed up; the cache starts as NaN. out[seq] is [len, n_heads * v_dim]. */
static void run(const shape *s, const char *isa, int n_threads, int n_seqs, const int *ids,
                const int *len, int chunk, float **out)
{
    bg_backend_config config = config_of(isa, n_threads);
    config.check = true;
    bg_backend *b = backend_of(&config);
    bg_cpu *c = (bg_cpu *)b;
    const int n_kv = kv_count(s);
    const bg_cache_spec spec = {.n_layers = LAYERS,
                                .n_blocks = 160,
                                .block_tokens = s->block_tokens,
                                .n_kv_heads = n_kv,
                                .k_dim = s->head_dim,
                                .v_dim = s->v_dim,
                                .type = s->type};
    OK(b->ops->cache_new(b, &spec, err));
    memset(c->cache.k, 0xff, c->cache.k_head_bytes * LAYERS * 160 * (size_t)n_kv);
    memset(c->cache.v, 0xff, c->cache.v_head_bytes * LAYERS * 160 * (size_t)n_kv);
    /* Padding of V rows is never written: it must be what the backend made it. */
    if (c->cache.v_stride != s->v_dim)
        memset(c->cache.v, 0, c->cache.v_head_bytes * LAYERS * 160 * (size_t)n_kv);

    const int64_t q_cols = (int64_t)s->n_heads * s->head_dim;
    const int64_t cols = q_cols + (int64_t)n_kv * (s->head_dim + s->v_dim);
    bg_act qkv, q, o;
    OK(b->ops->act_new(b, &qkv, "qkv", 256, cols, err));
    OK(b->ops->act_new(b, &q, "q", 256, q_cols + 5, err));
    OK(b->ops->act_new(b, &o, "o", 256, (int64_t)s->n_heads * s->v_dim + 3, err));
    bg_vec sinks = {0};
    float sink_values[64];
    for (int h = 0; h < s->n_heads; h++)
        sink_values[h] = 0.5f * (float)(h + s->head0) - 1.0f;
    OK(b->ops->vec_new(b, &sinks, "sinks", sink_values, s->n_heads, err));

    int32_t tables[MAX_SEQS][160];
    int done[MAX_SEQS] = {0}, left = 0;
    for (int i = 0; i < n_seqs; i++) {
        seat(b, i, len[i]);
        left += len[i];
        for (int j = 0; j < 160 / MAX_SEQS; j++)
            tables[i][j] = (j * 97 + i * 31 + 11) % (160 / MAX_SEQS - 1) * MAX_SEQS + i + 1;
    }
    while (left > 0) {
        bg_seq_step steps[MAX_SEQS];
        int n = 0, row = 0, of[MAX_SEQS];
        for (int i = 0; i < n_seqs; i++) {
            const int m = len[i] - done[i] < chunk ? len[i] - done[i] : chunk;
            if (m == 0) continue;
            of[n] = i;
            steps[n++] = (bg_seq_step){i, done[i], m, 160 / MAX_SEQS, tables[i], false};
            for (int r = 0; r < m; r++, row++) {
                float *to = (float *)qkv.data + row * cols;
                for (int h = 0; h < s->n_heads; h++)
                    for (int d = 0; d < s->head_dim; d++)
                        *to++ = input(ids[i], done[i] + r, 0, s->head0 + h, d);
                for (int h = 0; h < n_kv; h++)
                    for (int d = 0; d < s->head_dim; d++)
                        *to++ = input(ids[i], done[i] + r, 1, kv_first(s) + h, d);
                for (int h = 0; h < n_kv; h++)
                    for (int d = 0; d < s->v_dim; d++)
                        *to++ = input(ids[i], done[i] + r, 2, kv_first(s) + h, d);
            }
        }
        const bg_batch batch = {n, steps, false};
        OK(b->ops->begin_step(b, &batch, err));
        const bg_attn_in in = {.layer = LAYER,
                               .n_heads = s->n_heads,
                               .n_kv_heads = n_kv,
                               .head_dim = s->head_dim,
                               .v_dim = s->v_dim};
        OK(bg_op_rope_store(b, &q, &qkv, &in, err));
        const bg_attn at = {.layer = LAYER,
                            .n_heads = s->n_heads,
                            .n_kv_heads = n_kv,
                            .head0 = s->head0,
                            .kv_head0 = kv_first(s),
                            .group = s->group,
                            .head_dim = s->head_dim,
                            .v_dim = s->v_dim,
                            .scale = scale_of(s),
                            .softcap = s->softcap,
                            .window = s->window,
                            .sinks = s->sinks ? &sinks : NULL};
        OK(bg_op_attention(b, &o, &q, &at, err));
        row = 0;
        for (int j = 0; j < n; j++)
            for (int r = 0; r < steps[j].n_tokens; r++, row++)
                memcpy(out[of[j]] + (int64_t)(steps[j].pos0 + r) * s->n_heads * s->v_dim,
                       (float *)o.data + row * o.cols,
                       (size_t)s->n_heads * (size_t)s->v_dim * sizeof(float));
        for (int j = 0; j < n; j++) {
            done[of[j]] += steps[j].n_tokens;
            left -= steps[j].n_tokens;
        }
    }
    bg_backend_free(b);
}

static float *room(const shape *s, int len)
{
    return malloc((size_t)len * (size_t)s->n_heads * (size_t)s->v_dim * sizeof(float));
}

/* Worst error relative to sum_j p_j |v_j|, over some positions. */
static double worst_error(const shape *s, int seq, int len, const float *got)
{
    double worst = 0;
    double *p = malloc((size_t)len * sizeof *p);
    for (int pos = 0; pos < len; pos += pos < 70 ? 1 : 13)
        for (int h = 0; h < s->n_heads; h++) {
            const int kv = (s->head0 + h) / s->group;
            const int from = s->window && pos >= s->window ? pos - s->window + 1 : 0;
            double max = s->sinks ? 0.5 * (h + s->head0) - 1 : -INFINITY, total = 0;
            for (int j = from; j <= pos; j++) {
                p[j] = 0;
                for (int d = 0; d < s->head_dim; d++)
                    p[j] += (double)input(seq, pos, 0, s->head0 + h, d) *
                            stored(s, input(seq, j, 1, kv, d));
                p[j] *= (double)scale_of(s);
                if (s->softcap > 0) p[j] = (double)s->softcap * tanh(p[j] / (double)s->softcap);
                max = p[j] > max ? p[j] : max;
            }
            if (s->sinks) total = exp(0.5 * (h + s->head0) - 1 - max);
            for (int j = from; j <= pos; j++)
                total += p[j] = exp(p[j] - max);
            for (int i = 0; i < s->v_dim; i++) {
                double sum = 0, size = 0;
                for (int j = from; j <= pos; j++) {
                    const double v = stored(s, input(seq, j, 2, kv, i));
                    sum += p[j] / total * v;
                    size += p[j] / total * fabs(v);
                }
                const double g = (double)got[((int64_t)pos * s->n_heads + h) * s->v_dim + i];
                const double e = fabs(g - sum) / size;
                if (!(e <= worst)) worst = e;
            }
        }
    free(p);
    return worst;
}

static const shape shapes[] = {
    {.n_heads = 9, .group = 3, .head_dim = 64, .v_dim = 64, .block_tokens = 16},
    {.n_heads = 9,
     .group = 3,
     .head_dim = 64,
     .v_dim = 64,
     .block_tokens = 32,
     .type = BG_CACHE_F32},
    {.n_heads = 4,
     .group = 1,
     .head_dim = 80,
     .v_dim = 80,
     .block_tokens = 32,
     .type = BG_CACHE_BF16},
    {.n_heads = 4,
     .group = 4,
     .head_dim = 256,
     .v_dim = 256,
     .block_tokens = 16,
     .window = 37,
     .softcap = 5},
    {.n_heads = 8,
     .group = 8,
     .head_dim = 128,
     .v_dim = 128,
     .block_tokens = 64,
     .sinks = true,
     .window = 16},
    {.n_heads = 3,
     .group = 3,
     .head_dim = 72,
     .v_dim = 40,
     .block_tokens = 20,
     .softcap = 3,
     .sinks = true},
    /* a share that begins and ends inside a group */
    {.n_heads = 5, .head0 = 2, .group = 4, .head_dim = 32, .v_dim = 32, .block_tokens = 16},
    {.n_heads = 17, .group = 17, .head_dim = 576, .v_dim = 512, .block_tokens = 32},
    {.n_heads = 2, .group = 2, .head_dim = 64, .v_dim = 64, .block_tokens = 8, .window = 1},
};

Test(attention, matches_float64)
{
    for (const char *const *isa = isas(); *isa; isa++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            const shape *s = &shapes[i];
            const int len = s->head_dim > 128 ? 75 : 150, id = 3;
            float *out = room(s, len);
            run(s, *isa, 2, 1, &id, &len, 64, &out);
            const double e = worst_error(s, id, len, out);
            /* float32 scores up to about 15 lose 1e-6 each before the exponential */
            cr_expect(e < 6e-6, "%s, shape %zu: error %.3g", *isa, i, e);
            free(out);
        }
}

Test(attention, same_bits_however_it_is_cut)
{
    static const int chunks[] = {1, 7, 33, 64};
    for (const char *const *isa = isas(); *isa; isa++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            const shape *s = &shapes[i];
            const int len[] = {101, 64, 1, 130}, ids[] = {0, 1, 2, 3};
            float *all[4], *one;
            for (int q = 0; q < 4; q++)
                all[q] = room(s, len[q]);
            run(s, *isa, 2, 4, ids, len, 37, all);
            for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
                const int q = k % 2 ? 0 : 3;
                one = room(s, len[q]);
                run(s, *isa, 1 + (int)k % 3, 1, &ids[q], &len[q], chunks[k], &one);
                cr_expect(same_bits(one, all[q], (int64_t)len[q] * s->n_heads * s->v_dim),
                          "%s, shape %zu, chunks of %d", *isa, i, chunks[k]);
                free(one);
            }
            for (int q = 0; q < 4; q++)
                free(all[q]);
        }
}

/* ---- rope_store ------------------------------------------------------------------------------ */

Test(rope_store, rotates_norms_and_stores)
{
    for (const char *const *isa = isas(); *isa; isa++)
        for (int variant = 0; variant < 4; variant++) {
            enum { HEADS = 3, KV = 2, DIM = 48, V = 24, BT = 16, ROWS = 37, POS0 = 1000 };
            const int n_rot = variant & 1 ? 20 : DIM;
            const bool neox = variant & 2;
            bg_backend_config config = config_of(*isa, 2);
            config.check = true;
            bg_backend *b = backend_of(&config);
            bg_cpu *c = (bg_cpu *)b;
            const bg_cache_spec spec = {.n_layers = 2,
                                        .n_blocks = 80,
                                        .block_tokens = BT,
                                        .n_kv_heads = KV,
                                        .k_dim = DIM,
                                        .v_dim = V,
                                        .type = BG_CACHE_F32};
            OK(b->ops->cache_new(b, &spec, err));
            bg_act qkv, q;
            const int64_t cols = HEADS * DIM + KV * (DIM + V);
            OK(b->ops->act_new(b, &qkv, "qkv", ROWS, cols, err));
            OK(b->ops->act_new(b, &q, "q", ROWS, HEADS * DIM, err));
            fill_normal(qkv.data, ROWS * cols, 5);
            float norm[2][DIM], freq[DIM / 2];
            fill_normal(norm[0], DIM, 6);
            fill_normal(norm[1], DIM, 7);
            for (int i = 0; i < n_rot / 2; i++)
                freq[i] = (float)pow(10000, -2.0 * i / n_rot);
            bg_vec q_norm, k_norm;
            OK(b->ops->vec_new(b, &q_norm, "q_norm", norm[0], DIM, err));
            OK(b->ops->vec_new(b, &k_norm, "k_norm", norm[1], DIM, err));
            const bg_rope rope = {freq, n_rot, neox, 1.25f};
            const bg_attn_in in = {1, HEADS, KV, DIM, V, &q_norm, &k_norm, 1e-5f, &rope};
            int32_t blocks[80];
            for (int i = 0; i < 80; i++)
                blocks[i] = 79 - i;
            seat(b, 0, POS0 + ROWS);
            const bg_seq_step step = {0, POS0, ROWS, 80, blocks, false};
            const bg_batch batch = {1, &step, false};
            OK(b->ops->begin_step(b, &batch, err));
            OK(bg_op_rope_store(b, &q, &qkv, &in, err));

            double worst = 0;
            for (int r = 0; r < ROWS; r++)
                for (int h = 0; h < HEADS + KV; h++) {
                    const float *x = (float *)qkv.data + r * cols + h * DIM;
                    const float *w = norm[h >= HEADS];
                    double y[DIM], z[DIM], ss = 0;
                    for (int i = 0; i < DIM; i++)
                        ss += (double)x[i] * (double)x[i];
                    for (int i = 0; i < DIM; i++)
                        y[i] = z[i] = (double)x[i] / sqrt(ss / DIM + 1e-5) * (double)w[i];
                    for (int i = 0; i < n_rot / 2; i++) {
                        const double angle = (double)((float)(POS0 + r) * freq[i]);
                        const int ia = neox ? i : 2 * i, ib = neox ? i + n_rot / 2 : 2 * i + 1;
                        z[ia] = 1.25 * (y[ia] * cos(angle) - y[ib] * sin(angle));
                        z[ib] = 1.25 * (y[ia] * sin(angle) + y[ib] * cos(angle));
                    }
                    const int pos = POS0 + r;
                    const size_t head = (size_t)(1 * 80 + blocks[pos / BT]) * KV;
                    for (int i = 0; i < DIM; i++) {
                        double got = (double)((float *)q.data)[r * HEADS * DIM + h * DIM + i];
                        if (h >= HEADS)
                            got = (double)*(float *)(void *)(c->cache.k +
                                                             (head + (size_t)(h - HEADS)) *
                                                                 c->cache.k_head_bytes +
                                                             (size_t)(i * BT + pos % BT) * 4);
                        const double e = fabs(got - z[i]);
                        if (!(e <= worst)) worst = e;
                    }
                }
            cr_expect(worst < 4e-6, "%s, variant %d: %.3g", *isa, variant, worst);
            for (int r = 0; r < ROWS; r++)
                for (int h = 0; h < KV; h++) {
                    const int pos = POS0 + r;
                    const size_t head = (size_t)(1 * 80 + blocks[pos / BT]) * KV + (size_t)h;
                    const char *v = c->cache.v + head * c->cache.v_head_bytes +
                                    (size_t)(pos % BT * c->cache.v_stride) * 4;
                    cr_assert_eq(memcmp(v,
                                        (float *)qkv.data + r * cols + (HEADS + KV) * DIM + h * V,
                                        V * sizeof(float)),
                                 0);
                }
            bg_backend_free(b);
        }
}

Test(attention, refuses_what_does_not_fit)
{
    bg_backend_config config = config_of(NULL, 1);
    bg_backend *b = backend_of(&config);
    const bg_cache_spec spec = {.n_layers = 2,
                                .n_blocks = 8,
                                .block_tokens = 16,
                                .n_kv_heads = 2,
                                .k_dim = 32,
                                .v_dim = 32,
                                .type = BG_CACHE_F16};
    OK(b->ops->cache_new(b, &spec, err));
    bg_act q, o;
    OK(b->ops->act_new(b, &q, "q", 4, 128, err));
    OK(b->ops->act_new(b, &o, "o", 4, 128, err));
    const int32_t blocks[] = {1};
    const bg_seq_step step = {0, 0, 5, 1, blocks, false};
    const bg_batch batch = {1, &step, false};
    seat(b, 0, 5);
    OK(b->ops->begin_step(b, &batch, err));
    bg_attn p = {
        .n_heads = 4, .n_kv_heads = 2, .group = 2, .head_dim = 32, .v_dim = 32, .scale = 1};
    FAILS(BG_INTERNAL, "5 rows", bg_op_attention(b, &o, &q, &p, err));
    p.layer = 2;
    FAILS(BG_INTERNAL, "layer 2", bg_op_attention(b, &o, &q, &p, err));
    p.layer = 0;
    p.head0 = 1;
    FAILS(BG_INTERNAL, "beyond", bg_op_attention(b, &o, &q, &p, err));
    bg_backend_free(b);
}
