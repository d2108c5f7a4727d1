/* Block-diagonal linears, latent attention and the indexer: against float64, and the same bits
 * however a sequence is cut into chunks, whatever else is in the step, on any number of threads. */
#include "unit/backend/cpu_fixture.h"

#include "base/f16.h"
#include "gguf/gguf.h"

/* Also "avx512vnni", where the processor has it. */
static const char *isa_at(int i)
{
    static const char *const names[] = {"plain", "avx2", "avx512", "avx512vnni"};
    bg_isa isa;
    if (i >= 4 || !bg_isa_by_name(names[i], &isa) || isa > bg_isa_best()) return NULL;
    return names[i];
}

/* Value i of some vector, between -size and size. */
static float value(uint64_t seed, int64_t i, double size)
{
    return (float)((uniform(seed, (uint64_t)i) - 0.5) * 2 * size);
}

/* rows in use, one more that stays NaN. */
static bg_act new_act(bg_backend *b, const char *name, int64_t rows, int64_t cols)
{
    bg_act a;
    OK(b->ops->act_new(b, &a, name, rows + 1, cols, err));
    b->ops->poison(b, &a, rows + 1);
    a.max_rows = rows;
    return a;
}

static void expect_guard(const bg_act *a)
{
    for (int64_t i = 0; i < a->cols; i++)
        cr_assert(isnan(((float *)a->data)[a->max_rows * a->cols + i]), "%s: wrote past the end",
                  a->name);
}

/* n matrices [rows, cols] in blocks, one after another, and their values. */
static uint8_t *make_weights(uint32_t type, int64_t n_rows, int64_t cols, float *values,
                             uint64_t seed)
{
    const size_t row_bytes = bg_qtype_row_bytes(type, cols);
    uint8_t *data = malloc((size_t)n_rows * row_bytes);
    float *row = malloc((size_t)cols * sizeof *row);
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t i = 0; i < cols; i++)
            row[i] = value(seed, r * cols + i, 2 / sqrt((double)cols));
        cr_assert(bg_quant_row(type, row, data + (size_t)r * row_bytes, cols));
        bg_dequant_row(type, data + (size_t)r * row_bytes, values + r * cols, cols);
    }
    free(row);
    return data;
}

/* ---- block-diagonal linears ------------------------------------------------------------------ */

typedef struct diagonal {
    uint32_t type;
    int n_heads, rows, row0, n_rows, cols, gap; /* gap: columns between heads' inputs */
} diagonal;

static const diagonal diagonals[] = {
    {BG_Q8_0, 3, 96, 0, 96, 32, 10},   {BG_Q4_0, 5, 17, 0, 17, 64, 3},
    {BG_F16, 3, 40, 4, 33, 24, 6},     {BG_Q4_K, 2, 50, 10, 20, 256, 0},
    {BG_BF16, 7, 16, 0, 16, 100, 1},   {BG_Q8_0, 20, 512, 0, 512, 192, 64},
    {BG_IQ4_NL, 1, 31, 0, 31, 96, 32}, {BG_F32, 4, 5, 0, 5, 30, 2},
};
enum { N_DIAGONALS = sizeof diagonals / sizeof *diagonals };

Test(mla, block_diagonal_is_a_linear_of_each_block)
{
    enum { ROWS = 13 };
    static const bg_compute modes[] = {BG_COMPUTE_NATIVE, BG_COMPUTE_F32};
    for (int i = 0; i < N_DIAGONALS; i++)
        for (int at = 0; isa_at(at); at++)
            for (int m = 0; m < 2; m++) {
                const diagonal *s = &diagonals[i];
                const int64_t stride = s->cols + s->gap, out_cols = s->n_heads * s->n_rows;
                bg_backend_config config = config_of(isa_at(at), 3);
                config.compute = modes[m];
                config.max_tokens = ROWS;
                config.check = true;
                bg_backend *b = backend_of(&config);
                float *w = malloc((size_t)(s->n_heads * s->rows * s->cols) * sizeof *w);
                uint8_t *data = make_weights(s->type, (int64_t)s->n_heads * s->rows, s->cols, w, 7);
                const size_t bytes = (size_t)s->rows * bg_qtype_row_bytes(s->type, s->cols);
                bg_linear_spec spec = {.name = "k_b",
                                       .n_parts = 1,
                                       .parts = {{.name = "k_b",
                                                  .type = s->type,
                                                  .data = data,
                                                  .k_total = s->cols,
                                                  .n_total = s->rows,
                                                  .row0 = s->row0,
                                                  .n_rows = s->n_rows,
                                                  .n_cols = s->cols}},
                                       .n_blocks = s->n_heads,
                                       .block_bytes = (int64_t)bytes,
                                       .x_stride = stride};
                bg_linear *all;
                OK(b->ops->linear_new(b, &all, &spec, err));
                cr_assert_eq(b->ops->linear_rows(all), out_cols);
                /* The last head's input ends with the row: its gap is not there. */
                bg_act x = new_act(b, "x", ROWS, s->n_heads * stride - s->gap);
                bg_act out = new_act(b, "out", ROWS, out_cols), one = new_act(b, "one", ROWS, 600);
                for (int64_t k = 0; k < ROWS * x.cols; k++)
                    ((float *)x.data)[k] =
                        k % x.cols % stride < s->cols ? value(i, k, 2) : NAN; /* not read */
                step_of(b, ROWS);
                OK(bg_op_mla_query(b, &out, all, &x, err));
                expect_guard(&out);
                spec.n_blocks = 0;
                for (int h = 0; h < s->n_heads; h++) {
                    spec.parts[0].data = data + (size_t)h * bytes;
                    bg_linear *l;
                    OK(b->ops->linear_new(b, &l, &spec, err));
                    bg_act part = x;
                    part.data = (float *)x.data + h * stride;
                    OK(b->ops->linear(b, &one, l, &part, ROWS, err));
                    for (int t = 0; t < ROWS; t++) {
                        const float *got = (float *)out.data + t * out_cols + h * s->n_rows;
                        const float *want = (float *)one.data + t * one.cols;
                        cr_assert(same_bits(got, want, s->n_rows), "%s, %d: head %d row %d",
                                  isa_at(at), i, h, t);
                        for (int r = 0; modes[m] == BG_COMPUTE_F32 && r < s->n_rows; r++) {
                            double sum = 0, size = 0;
                            for (int k = 0; k < s->cols; k++) {
                                const double p =
                                    (double)((float *)part.data)[t * x.cols + k] *
                                    (double)w[((int64_t)h * s->rows + s->row0 + r) * s->cols + k];
                                sum += p;
                                size += fabs(p);
                            }
                            cr_assert(fabs((double)got[r] - sum) <= 2e-5 * size);
                        }
                    }
                }
                bg_act small = x;
                small.cols--;
                FAILS(BG_INTERNAL, "op linear", b->ops->linear(b, &out, all, &small, 1, err));
                free(w);
                free(data);
                bg_backend_free(b);
            }
}

/* ---- latent attention ------------------------------------------------------------------------ */

typedef struct shape {
    int n_heads, q_rank, kv_rank, nope, n_rot, block_tokens;
    bg_cache_type type;
    bool neox;
    /* The indexer; top_k 0: none. */
    int top_k, index_heads, index_dim, index_rot;
} shape;

static const shape shapes[] = {
    {3, 48, 96, 32, 10, 16, BG_CACHE_F32, false, 0, 0, 0, 0},
    {5, 0, 512, 64, 64, 32, BG_CACHE_F16, false, 0, 0, 0, 0},
    {70, 33, 40, 32, 6, 5, BG_CACHE_BF16, true, 0, 0, 0, 0}, /* more heads than a tile has rows */
    {3, 48, 96, 32, 10, 16, BG_CACHE_F32, false, 9, 3, 32, 16},
    {4, 31, 48, 32, 8, 5, BG_CACHE_F32, true, 40, 27, 20, 20}, /* more than are rotated at once */
    {2, 16, 64, 32, 16, 64, BG_CACHE_F16, false, 33, 8, 128, 64},
    {66, 0, 24, 32, 4, 16, BG_CACHE_F32, false, 1, 1, 8, 2},
};
enum {
    N_SHAPES = sizeof shapes / sizeof *shapes,
    MAX_SEQS = 3,
    LAYERS = 2,
    LAYER = 1,
    BLOCKS = 90
};

static int k_dim(const shape *s)
{
    return s->kv_rank + s->n_rot;
}

/* What stands at column i of one of a row's inputs. */
enum { IN, Q, IQ, IK };
static float input(int seq, int pos, int what, int64_t i)
{
    return value((uint64_t)(seq * 977 + what + 11), pos * 65536 + i, what == IN ? 1.3 : 1.8);
}

/* Weights of the model, the same for all runs of a shape. */
typedef struct model {
    shape s;
    uint8_t *k_b;
    float *k_b_value; /* [n_heads, kv_rank, nope] */
    float *q_norm, *kv_norm, *k_norm, *k_norm_b, *freq, *index_freq;
    bg_rope rope, index_rope;
} model;

static float *vector(int64_t n, uint64_t seed, double around)
{
    float *x = malloc((size_t)(n + 1) * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)around + value(seed, i, 0.5);
    return x;
}

static model make_model(const shape *s, uint64_t seed)
{
    model m = {.s = *s};
    m.k_b_value = malloc((size_t)(s->n_heads * s->kv_rank * s->nope) * sizeof(float));
    m.k_b = make_weights(BG_Q8_0, (int64_t)s->n_heads * s->kv_rank, s->nope, m.k_b_value, seed);
    m.q_norm = vector(s->q_rank, seed + 1, 1);
    m.kv_norm = vector(s->kv_rank, seed + 2, 1);
    m.k_norm = vector(s->index_dim, seed + 3, 1);
    m.k_norm_b = vector(s->index_dim, seed + 4, 0);
    m.freq = malloc((size_t)(s->n_rot / 2) * sizeof(float));
    m.index_freq = malloc((size_t)(s->index_rot / 2 + 1) * sizeof(float));
    for (int i = 0; i < s->n_rot / 2; i++)
        m.freq[i] = (float)pow(100, -2.0 * i / s->n_rot);
    for (int i = 0; i < s->index_rot / 2; i++)
        m.index_freq[i] = (float)pow(1000, -2.0 * i / s->index_rot);
    m.rope = (bg_rope){m.freq, s->n_rot, s->neox, 1.25f};
    m.index_rope = (bg_rope){m.index_freq, s->index_rot, !s->neox, 1};
    return m;
}

static void free_model(model *m)
{
    float *const all[] = {m->k_b_value, m->q_norm, m->kv_norm,   m->k_norm,
                          m->k_norm_b,  m->freq,   m->index_freq};
    for (int i = 0; i < 7; i++)
        free(all[i]);
    free(m->k_b);
}

typedef struct results {
    float *qa, *out;    /* [len, q_rank] and [len, n_heads * kv_rank] */
    int32_t *selection; /* [len, top_k] */
} results;

static results new_results(const shape *s, int len)
{
    const size_t n = (size_t)len;
    return (results){malloc((n * (size_t)s->q_rank + 1) * sizeof(float)),
                     malloc(n * (size_t)(s->n_heads * s->kv_rank) * sizeof(float)),
                     malloc((n * (size_t)s->top_k + 1) * sizeof(int32_t))};
}

static void free_results(results *r)
{
    free(r->qa);
    free(r->out);
    free(r->selection);
}

static void fill_row(bg_act *a, int row, int64_t n, int seq, int pos, int what)
{
    float *x = (float *)a->data + row * a->cols;
    for (int64_t i = 0; i < n; i++)
        x[i] = input(seq, pos, what, i);
}

/* Runs sequences of the given lengths, chunk positions of each a step, in block tables that are all
 * mixed up; caches start as NaN. */
static void run(const model *m, const char *isa, int n_threads, int n_seqs, const int *ids,
                const int *len, int chunk, results *res)
{
    enum { MORE = 3 };
    const shape *s = &m->s;
    bg_backend_config config = config_of(isa, n_threads);
    config.check = true;
    config.max_tokens = MAX_SEQS * chunk;
    bg_backend *b = backend_of(&config);
    bg_cpu *c = (bg_cpu *)b;
    const bg_cache_spec spec = {.n_layers = LAYERS,
                                .n_blocks = BLOCKS,
                                .block_tokens = s->block_tokens,
                                .n_kv_heads = 1,
                                .k_dim = k_dim(s),
                                .v_dim = s->kv_rank,
                                .type = s->type,
                                .latent = s->kv_rank,
                                .n_index = s->top_k ? 2 : 0,
                                .index_dim = s->index_dim,
                                .index_top_k = s->top_k};
    OK(b->ops->cache_new(b, &spec, err));
    memset(c->cache.k, 0xff, c->cache.k_head_bytes * LAYERS * BLOCKS);
    memset(c->cache.v, 0xff, c->cache.v_head_bytes * LAYERS * BLOCKS);
    if (s->top_k) memset(c->cache.index, 0xff, c->cache.index_block_bytes * 2 * BLOCKS);

    const bg_linear_spec k_b = {.name = "k_b",
                                .n_parts = 1,
                                .parts = {{.name = "k_b",
                                           .type = BG_Q8_0,
                                           .data = m->k_b,
                                           .k_total = s->nope,
                                           .n_total = s->kv_rank,
                                           .n_rows = s->kv_rank,
                                           .n_cols = s->nope}},
                                .n_blocks = s->n_heads,
                                .block_bytes =
                                    s->kv_rank * (int64_t)bg_qtype_row_bytes(BG_Q8_0, s->nope),
                                .x_stride = s->nope + s->n_rot};
    bg_linear *linear;
    OK(b->ops->linear_new(b, &linear, &k_b, err));
    bg_vec q_norm, kv_norm, k_norm, k_norm_b;
    OK(b->ops->vec_new(b, &q_norm, "q_norm", m->q_norm, s->q_rank, err));
    OK(b->ops->vec_new(b, &kv_norm, "kv_norm", m->kv_norm, s->kv_rank, err));
    OK(b->ops->vec_new(b, &k_norm, "k_norm", m->k_norm, s->index_dim, err));
    OK(b->ops->vec_new(b, &k_norm_b, "k_norm_b", m->k_norm_b, s->index_dim, err));
    const bg_mla_in store = {LAYER,    s->q_rank, s->kv_rank, s->q_rank ? &q_norm : NULL,
                             &kv_norm, 1e-5f,     &m->rope};
    const bg_mla attend = {LAYER,    s->n_heads, s->kv_rank, s->nope,
                           s->n_rot, 0.4f,       &m->rope,   s->top_k > 0};
    enum { OTHERS = 5 }; /* columns before the key */
    const bg_index index = {.index_layer = 1,
                            .n_heads = s->index_heads,
                            .dim = s->index_dim,
                            .top_k = s->top_k,
                            .ik_col0 = OTHERS,
                            .k_norm = &k_norm,
                            .k_norm_b = &k_norm_b,
                            .norm_eps = 1e-6f,
                            .rope = &m->index_rope,
                            .scale = 0.3f};

    const int64_t q_cols = (int64_t)s->n_heads * (s->nope + s->n_rot);
    const int64_t out_cols = (int64_t)s->n_heads * s->kv_rank;
    const int64_t in_cols = s->q_rank + k_dim(s), rows = config.max_tokens;
    bg_act in = new_act(b, "in", rows, in_cols + MORE),
           qa = new_act(b, "qa", rows, s->q_rank + MORE);
    bg_act q = new_act(b, "q", rows, q_cols + MORE),
           q_lat = new_act(b, "q_lat", rows, out_cols + 1);
    bg_act out = new_act(b, "out", rows, out_cols + MORE);
    bg_act iq = new_act(b, "iq", rows, s->index_heads * s->index_dim + MORE);
    bg_act ik = new_act(b, "ik", rows, OTHERS + s->index_heads + s->index_dim + MORE);
    bg_act key = ik; /* its columns from there on */
    key.data = (float *)ik.data + OTHERS;

    const int per_seq = (BLOCKS - 1) / MAX_SEQS;
    int32_t tables[MAX_SEQS][BLOCKS];
    for (int i = 0; i < n_seqs; i++) {
        seat(b, i, len[i]);
        for (int k = 0; k < per_seq; k++)
            tables[i][k] =
                1 + (int32_t)(((ids[i] + n_seqs) % MAX_SEQS * per_seq + k) * 37 % (BLOCKS - 1));
    }
    for (int from = 0, most = 1; most; from += chunk) {
        bg_seq_step steps[MAX_SEQS];
        int n = 0, which[MAX_SEQS];
        most = 0;
        for (int i = 0; i < n_seqs; i++) {
            if (from >= len[i]) continue;
            const int n_tokens = len[i] - from < chunk ? len[i] - from : chunk;
            const int blocks = (from + n_tokens + s->block_tokens - 1) / s->block_tokens;
            cr_assert_leq(blocks, per_seq);
            which[n] = i;
            steps[n++] = (bg_seq_step){i, from, n_tokens, blocks, tables[i], false};
            most = 1;
        }
        if (!most) break;
        const bg_batch batch = {n, steps, false};
        OK(b->ops->begin_step(b, &batch, err));
        for (int k = 0, row = 0; k < n; k++)
            for (int p = 0; p < steps[k].n_tokens; p++, row++) {
                fill_row(&in, row, in_cols, ids[which[k]], from + p, IN);
                fill_row(&q, row, q_cols, ids[which[k]], from + p, Q);
                fill_row(&iq, row, s->index_heads * s->index_dim, ids[which[k]], from + p, IQ);
                fill_row(&key, row, s->index_heads + s->index_dim, ids[which[k]], from + p, IK);
            }
        OK(bg_op_mla_store(b, s->q_rank ? &qa : NULL, &in, &store, err));
        if (s->top_k) OK(bg_op_index(b, &iq, &ik, &index, err));
        OK(bg_op_mla_query(b, &q_lat, linear, &q, err));
        OK(bg_op_mla_attention(b, &out, &q_lat, &q, &attend, err));
        for (int k = 0, row = 0; k < n; k++)
            for (int p = from; p < from + steps[k].n_tokens; p++, row++) {
                results *r = &res[which[k]];
                memcpy(r->qa + (int64_t)p * s->q_rank, (float *)qa.data + row * qa.cols,
                       (size_t)s->q_rank * sizeof(float));
                memcpy(r->out + p * out_cols, (float *)out.data + row * out.cols,
                       (size_t)out_cols * sizeof(float));
                if (p >= s->top_k && s->top_k)
                    memcpy(r->selection + p * s->top_k, c->selection + row * s->top_k,
                           (size_t)s->top_k * sizeof(int32_t));
            }
        expect_guard(&out);
        expect_guard(&q_lat);
    }
    bg_backend_free(b);
}

static double stored(const shape *s, double x)
{
    if (s->type == BG_CACHE_F16) return (double)bg_f16_to_f32(bg_f32_to_f16((float)x));
    if (s->type == BG_CACHE_BF16) return (double)bg_bf16_to_f32(bg_f32_to_bf16((float)x));
    return x;
}

static void rotate(double *x, const bg_rope *rope, int pos)
{
    const int half = rope->n_rot / 2;
    for (int i = 0; i < half; i++) {
        const double angle = (double)((float)pos * rope->freq[i]);
        const double c = cos(angle) * (double)rope->mscale, s = sin(angle) * (double)rope->mscale;
        double *a = &x[rope->neox ? i : 2 * i], *b = &x[rope->neox ? i + half : 2 * i + 1];
        const double p = *a, q = *b;
        *a = p * c - q * s;
        *b = p * s + q * c;
    }
}

static void rms(double *x, const float *w, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int i = 0; i < n; i++)
        x[i] *= (double)w[i] / sqrt(sum / n + 1e-5);
}

/* [latent | rope key] of each position, as the cache has it. */
static double *reference_keys(const model *m, int seq, int len)
{
    const shape *s = &m->s;
    double *keys = malloc((size_t)(len * k_dim(s)) * sizeof *keys);
    for (int p = 0; p < len; p++) {
        double *k = keys + p * k_dim(s);
        for (int i = 0; i < k_dim(s); i++)
            k[i] = (double)input(seq, p, IN, s->q_rank + i);
        rms(k, m->kv_norm, s->kv_rank);
        rotate(k + s->kv_rank, &m->rope, p);
        for (int i = 0; i < k_dim(s); i++)
            k[i] = stored(s, k[i]);
    }
    return keys;
}

/* out[h * kv_rank ..] of one row over n positions (NULL: 0, 1, ...). */
static void reference_row(double *out, const model *m, const double *keys, int seq, int pos,
                          const int32_t *chosen, int n)
{
    const shape *s = &m->s;
    double *query = malloc((size_t)k_dim(s) * sizeof *query), *p = malloc((size_t)n * sizeof *p);
    for (int h = 0; h < s->n_heads; h++) {
        const int64_t q0 = (int64_t)h * (s->nope + s->n_rot);
        double most = -INFINITY, sum = 0, *o = out + h * s->kv_rank;
        for (int i = 0; i < s->kv_rank; i++) {
            query[i] = 0;
            for (int k = 0; k < s->nope; k++)
                query[i] += (double)m->k_b_value[((int64_t)h * s->kv_rank + i) * s->nope + k] *
                            (double)input(seq, pos, Q, q0 + k);
            o[i] = 0;
        }
        for (int i = 0; i < s->n_rot; i++)
            query[s->kv_rank + i] = (double)input(seq, pos, Q, q0 + s->nope + i);
        rotate(query + s->kv_rank, &m->rope, pos);
        for (int j = 0; j < n; j++) {
            const double *key = keys + (chosen ? chosen[j] : j) * k_dim(s);
            p[j] = 0;
            for (int i = 0; i < k_dim(s); i++)
                p[j] += 0.4f * query[i] * key[i];
            most = fmax(most, p[j]);
        }
        for (int j = 0; j < n; j++)
            sum += p[j] = exp(p[j] - most);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < s->kv_rank; i++)
                o[i] += p[j] / sum * keys[(chosen ? chosen[j] : j) * k_dim(s) + i];
    }
    free(query);
    free(p);
}

static double *reference_index_keys(const model *m, int seq, int len)
{
    const shape *s = &m->s;
    const int dim = s->index_dim;
    double *keys = malloc((size_t)(len * dim + 1) * sizeof *keys);
    for (int p = 0; p < len && dim; p++) {
        double *k = keys + p * dim, mean = 0, var = 0;
        for (int i = 0; i < dim; i++)
            mean += k[i] = (double)input(seq, p, IK, i);
        mean /= dim;
        for (int i = 0; i < dim; i++)
            var += (k[i] - mean) * (k[i] - mean);
        for (int i = 0; i < dim; i++)
            k[i] = (k[i] - mean) / sqrt(var / dim + 1e-6) * (double)m->k_norm[i] +
                   (double)m->k_norm_b[i];
        rotate(k, &m->index_rope, p);
        for (int i = 0; i < dim; i++)
            k[i] = stored(s, k[i]);
    }
    return keys;
}

/* The selection of a row is one by these scores, give or take their rounding. */
static void check_selection(const model *m, const double *keys, int seq, int pos,
                            const int32_t *chosen, const char *what)
{
    const shape *s = &m->s;
    const int dim = s->index_dim;
    double *score = calloc((size_t)pos + 1, sizeof *score), size = 0;
    double *query = malloc((size_t)dim * sizeof *query);
    for (int h = 0; h < s->index_heads; h++) {
        const double w = (double)(0.3f * input(seq, pos, IK, dim + h));
        for (int i = 0; i < dim; i++)
            query[i] = (double)input(seq, pos, IQ, h * dim + i);
        rotate(query, &m->index_rope, pos);
        for (int j = 0; j <= pos; j++) {
            double p = 0;
            for (int i = 0; i < dim; i++)
                p += query[i] * keys[j * dim + i];
            score[j] += w * fmax(p, 0);
            size = fmax(size, fabs(w * p));
        }
    }
    double least_in = INFINITY, most_out = -INFINITY;
    int k = 0;
    for (int j = 0; j <= pos; j++) {
        if (k < s->top_k && chosen[k] == j) {
            least_in = fmin(least_in, score[j]);
            k++;
        } else {
            most_out = fmax(most_out, score[j]);
        }
    }
    const double slack = size * (s->type == BG_CACHE_F32 ? 1e-5 : 2e-3) * s->index_heads;
    cr_assert_eq(k, s->top_k, "%s, position %d: not ascending, or not what it sees", what, pos);
    cr_assert(least_in >= most_out - slack, "%s, position %d: took %g, left %g", what, pos,
              least_in, most_out);
    free(score);
    free(query);
}

static const int lengths[MAX_SEQS] = {75, 41, 3}, ids[MAX_SEQS] = {0, 1, 2};

Test(mla, attention_matches_float64_over_all_or_the_chosen_keys)
{
    for (int i = 0; i < N_SHAPES; i++) {
        const shape *s = &shapes[i];
        model m = make_model(s, (uint64_t)(i * 31 + 3));
        const int64_t cols = (int64_t)s->n_heads * s->kv_rank;
        const double tolerance = s->type == BG_CACHE_F32   ? 2e-5
                                 : s->type == BG_CACHE_F16 ? 4e-3
                                                           : 3e-2;
        double *want = malloc((size_t)cols * sizeof *want);
        for (int at = 0; isas()[at]; at++) {
            results r[MAX_SEQS];
            for (int q = 0; q < MAX_SEQS; q++)
                r[q] = new_results(s, lengths[q]);
            run(&m, isas()[at], 2, MAX_SEQS, ids, lengths, 19, r);
            for (int q = 0; q < MAX_SEQS; q++) {
                double *keys = reference_keys(&m, q, lengths[q]);
                double *index_keys = reference_index_keys(&m, q, lengths[q]);
                for (int p = 0; p < lengths[q]; p += 1 + (s->n_heads > 20)) {
                    const bool chosen = s->top_k && p >= s->top_k;
                    const int32_t *sel = chosen ? r[q].selection + p * s->top_k : NULL;
                    if (chosen) check_selection(&m, index_keys, q, p, sel, isas()[at]);
                    reference_row(want, &m, keys, q, p, sel, chosen ? s->top_k : p + 1);
                    for (int64_t k = 0; k < cols; k++)
                        cr_assert(fabs((double)r[q].out[p * cols + k] - want[k]) <= tolerance,
                                  "%s, shape %d, sequence %d, position %d, column %d: %.9g, not "
                                  "%.9g",
                                  isas()[at], i, q, p, (int)k, (double)r[q].out[p * cols + k],
                                  want[k]);
                    double qa[64];
                    for (int k = 0; k < s->q_rank; k++)
                        qa[k] = (double)input(q, p, IN, k);
                    rms(qa, m.q_norm, s->q_rank);
                    for (int k = 0; k < s->q_rank; k++)
                        cr_assert(fabs((double)r[q].qa[p * s->q_rank + k] - qa[k]) <=
                                  1e-6 * fabs(qa[k]));
                }
                free(keys);
                free(index_keys);
                free_results(&r[q]);
            }
        }
        free(want);
        free_model(&m);
    }
}

Test(mla, a_row_has_the_same_bits_however_its_sequence_is_cut)
{
    static const struct {
        int n_threads, chunk, n_seqs, ids[MAX_SEQS], len[MAX_SEQS];
    } ways[] = {
        {1, 1, 1, {0}, {75}},
        {3, 7, 2, {1, 0}, {41, 75}},
        {2, 75, 3, {2, 0, 1}, {60, 75, 20}},
    };
    for (int i = 0; i < N_SHAPES; i++) {
        const shape *s = &shapes[i];
        model m = make_model(s, (uint64_t)(i * 31 + 3));
        const int64_t n = 75 * (int64_t)s->n_heads * s->kv_rank;
        for (int at = 0; isas()[at]; at++) {
            results want = new_results(s, 75);
            run(&m, isas()[at], 2, 1, (int[]){0}, (int[]){75}, 19, &want);
            for (int w = 0; w < 3; w++) {
                results r[MAX_SEQS];
                for (int q = 0; q < ways[w].n_seqs; q++)
                    r[q] = new_results(s, ways[w].len[q]);
                run(&m, isas()[at], ways[w].n_threads, ways[w].n_seqs, ways[w].ids, ways[w].len,
                    ways[w].chunk, r);
                for (int q = 0; q < ways[w].n_seqs; q++) {
                    if (ways[w].ids[q] == 0) {
                        cr_expect(same_bits(r[q].out, want.out, n), "%s, shape %d, way %d",
                                  isas()[at], i, w);
                        cr_expect(same_bits(r[q].qa, want.qa, 75 * s->q_rank));
                    }
                    free_results(&r[q]);
                }
            }
            free_results(&want);
        }
        free_model(&m);
    }
}

/* ---- what is special in the indexer ---------------------------------------------------------- */

enum { DIM = 16, TOP = 6 };

typedef struct fixture {
    bg_backend *b;
    bg_act iq, ik;
    bg_vec k_norm;
    float freq[1];
    bg_rope rope;
    bg_index index;
    int32_t blocks[8];
} fixture;

static void make_fixture(fixture *f, const char *isa, int n_rows)
{
    const bg_backend_config config = config_of(isa, 2);
    const bg_cache_spec spec = {.n_layers = 1,
                                .n_blocks = 9,
                                .block_tokens = 8,
                                .n_kv_heads = 1,
                                .k_dim = 34,
                                .v_dim = 32,
                                .type = BG_CACHE_F32,
                                .latent = 32,
                                .n_index = 1,
                                .index_dim = DIM,
                                .index_top_k = 10};
    float ones[DIM];
    for (int i = 0; i < DIM; i++)
        ones[i] = 1;
    f->b = backend_of(&config);
    OK(f->b->ops->cache_new(f->b, &spec, err));
    OK(f->b->ops->vec_new(f->b, &f->k_norm, "k_norm", ones, DIM, err));
    f->iq = new_act(f->b, "iq", n_rows, 2 * DIM);
    f->ik = new_act(f->b, "ik", n_rows, DIM + 2);
    f->freq[0] = 0;
    f->rope = (bg_rope){f->freq, 2, true, 1};
    f->index = (bg_index){0, 2, DIM, TOP, 0, &f->k_norm, NULL, 1e-6f, &f->rope, 1};
    for (int i = 0; i < 8; i++)
        f->blocks[i] = 8 - i;
    const bg_seq_step q = {0, 0, n_rows, 8, f->blocks, false};
    const bg_batch batch = {1, &q, false};
    seat(f->b, 0, n_rows);
    OK(f->b->ops->begin_step(f->b, &batch, err));
}

Test(mla, equal_scores_are_chosen_by_lower_position)
{
    enum { ROWS = 40 };
    for (int at = 0; isas()[at]; at++) {
        fixture f;
        make_fixture(&f, isas()[at], ROWS);
        const int32_t *sel = ((bg_cpu *)f.b)->selection + (ROWS - 1) * TOP;
        float *q = (float *)f.iq.data + (ROWS - 1) * f.iq.cols;
        float *w = (float *)f.ik.data + (ROWS - 1) * f.ik.cols + DIM;
        for (int t = 0; t < ROWS; t++) {
            float *ik = (float *)f.ik.data + t * f.ik.cols,
                  *iq = (float *)f.iq.data + t * f.iq.cols;
            for (int i = 0; i < DIM; i++) /* keys: 1 and -1, 9, 20 and 31 the other way round */
                ik[i] = (i % 2 ? -1.0f : 1.0f) * (t == 9 || t == 20 || t == 31 ? -1 : 1);
            for (int i = 0; i < 2 * DIM; i++)
                iq[i] = i % 2 ? 1.0f : -1.0f; /* only 9, 20 and 31 score */
            ik[DIM] = ik[DIM + 1] = 1;
        }
        OK(bg_op_index(f.b, &f.iq, &f.ik, &f.index, err));
        static const int32_t best[] = {0, 1, 2, 9, 20, 31};
        cr_expect_arr_eq(sel, best, sizeof best, "%s: best three, then the first", isas()[at]);

        w[0] = w[1] = -1; /* now they are the worst, and the others' zeros come as -0 */
        OK(bg_op_index(f.b, &f.iq, &f.ik, &f.index, err));
        static const int32_t first[] = {0, 1, 2, 3, 4, 5};
        cr_expect_arr_eq(sel, first, sizeof first, "%s: the first of the equal", isas()[at]);

        w[0] = 1; /* + and -: all 0, of either sign */
        memcpy(q + DIM, q, DIM * sizeof *q);
        OK(bg_op_index(f.b, &f.iq, &f.ik, &f.index, err));
        cr_expect_arr_eq(sel, first, sizeof first, "%s: 0 and -0 are equal", isas()[at]);

        w[0] = w[1] = -1e-30f; /* products too small to be told from 0, but for their sign */
        for (int i = 0; i < 2 * DIM; i++)
            q[i] = i % 2 ? -1e-20f : 1e-20f; /* of all but 9, 20 and 31 */
        OK(bg_op_index(f.b, &f.iq, &f.ik, &f.index, err));
        cr_expect_arr_eq(sel, first, sizeof first, "%s: what rounds to -0 is 0", isas()[at]);
        bg_backend_free(f.b);
    }
}

Test(mla, what_does_not_fit_is_refused)
{
    fixture f;
    make_fixture(&f, NULL, 4);
    bg_backend *b = f.b;
    bg_act q = new_act(b, "q", 4, 200), lat = new_act(b, "lat", 4, 64),
           out = new_act(b, "out", 4, 64);
    bg_mla p = {.n_heads = 2, .kv_rank = 32, .nope = 8, .n_rot = 2, .scale = 1, .rope = &f.rope};
    for (int64_t i = 0; i < 4 * q.cols; i++)
        ((float *)q.data)[i] = 1;
    p.selected = true;
    FAILS(BG_INTERNAL, "no index", bg_op_mla_attention(b, &out, &lat, &q, &p, err));
    p.selected = false;
    p.kv_rank = 33;
    FAILS(BG_INTERNAL, "do not fit", bg_op_mla_attention(b, &out, &lat, &q, &p, err));
    p.kv_rank = 32;
    p.n_heads = 3;
    FAILS(BG_INTERNAL, "3 heads", bg_op_mla_attention(b, &out, &lat, &q, &p, err));
    p.n_heads = 0;
    OK(bg_op_mla_attention(b, &out, &lat, &q, &p, err));

    bg_vec norm;
    const float ones[32] = {0};
    OK(b->ops->vec_new(b, &norm, "norm", ones, 32, err));
    bg_mla_in in = {0, 0, 32, NULL, &norm, 1e-5f, &f.rope};
    OK(bg_op_mla_store(b, NULL, &q, &in, err));
    in.q_rank = 8;
    FAILS(BG_INTERNAL, "nothing", bg_op_mla_store(b, NULL, &q, &in, err));
    FAILS(BG_INTERNAL, "norms", bg_op_mla_store(b, &out, &q, &in, err));
    in.q_rank = 0;
    in.layer = 1;
    FAILS(BG_INTERNAL, "do not fit", bg_op_mla_store(b, NULL, &q, &in, err));

    f.index.top_k = 11;
    FAILS(BG_INTERNAL, "do not fit", bg_op_index(b, &f.iq, &f.ik, &f.index, err));
    f.index.top_k = TOP;
    f.index.n_heads = 3;
    FAILS(BG_INTERNAL, "3 heads", bg_op_index(b, &f.iq, &f.ik, &f.index, err));

    const bg_backend_config config = config_of(NULL, 1);
    bg_backend *other = backend_of(&config);
    bg_cache_spec spec = {.n_blocks = 4,
                          .n_layers = 1,
                          .block_tokens = 8,
                          .n_kv_heads = 2,
                          .k_dim = 34,
                          .v_dim = 32,
                          .type = BG_CACHE_F32,
                          .latent = 32};
    FAILS(BG_INTERNAL, "latent", other->ops->cache_new(other, &spec, err));
    spec.n_kv_heads = 1;
    spec.n_index = 1;
    FAILS(BG_INTERNAL, "index", other->ops->cache_new(other, &spec, err));
    bg_backend_free(other);
    bg_backend_free(b);
}

Test(mla, cost_counts_what_rows_see)
{
    fixture f;
    make_fixture(&f, NULL, 20);
    bg_mla p = {.n_heads = 3, .kv_rank = 32, .nope = 8, .n_rot = 2, .scale = 1, .rope = &f.rope};
    bg_cost all, some;
    f.b->ops->mla_cost(f.b, &p, &all);
    p.selected = true; /* 10 at most */
    f.b->ops->mla_cost(f.b, &p, &some);
    cr_expect_float_eq(all.bytes, 20 * 34 * 4, 1e-9);
    cr_expect_float_eq(all.flops, 2.0 * 210 * 3 * 66, 1e-9);
    cr_expect_float_eq(some.bytes, 20 * 34 * 4, 1e-9);
    cr_expect_float_eq(some.flops, 2.0 * (55 + 100) * 3 * 66, 1e-9);
    bg_backend_free(f.b);
}
