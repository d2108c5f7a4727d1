/* The CPU backend's lightning indexer: keys into a cache of their own, scores of all positions that
 * a row sees, and the best of them, in order of position, for mla_attention.
 *
 * Scores of as many rows as there are threads are held at a time. All threads work on the scores of
 * all these rows, in ranges of blocks; then each chooses for one of them. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"

enum { RANGE = 16 /* blocks of an item */, HEADS = 24 /* rotated at a time */ };

typedef struct index_job {
    bg_cpu *c;
    const bg_index *p;
    const bg_rope_table *table;
    const float *iq, *ik;
    int64_t iq_cols, ik_cols;
    int n_chosen_rows; /* in c->index_rows: rows that see more than top_k positions */
} index_job;

static char *index_block(const index_job *job, int32_t block)
{
    const bg_cache *cache = &job->c->cache;
    const size_t at = (size_t)job->p->index_layer * (size_t)cache->spec.n_blocks + (size_t)block;
    return cache->index + at * cache->index_block_bytes;
}

static void rotate(const index_job *job, float *x, int row)
{
    const size_t at = (size_t)row * (size_t)(job->p->rope->n_rot / 2);
    job->c->kernels->rotate(x, job->table->cosine + at, job->table->sine + at, job->p->rope->n_rot,
                            job->p->rope->neox);
}

/* rope(layer_norm(key)) of one row. */
static void store_key(const index_job *job, int row, float *key)
{
    bg_cpu *c = job->c;
    const bg_index *p = job->p;
    const bg_cache *cache = &c->cache;
    const float *x = job->ik + row * job->ik_cols;
    double sum = 0, squares = 0;
    for (int i = 0; i < p->dim; i++)
        sum += x[i];
    const double mean = sum / p->dim;
    for (int i = 0; i < p->dim; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    const double factor = 1 / sqrt(squares / p->dim + (double)p->norm_eps);
    for (int i = 0; i < p->dim; i++)
        key[i] = (float)((x[i] - mean) * factor) * p->k_norm->data[i] +
                 (p->k_norm_b ? p->k_norm_b->data[i] : 0.0f);
    rotate(job, key, row);
    const int bt = cache->spec.block_tokens, pos = c->s.row_pos[row];
    const size_t elem = cache->spec.type == BG_CACHE_F32 ? 4 : 2;
    char *block = index_block(job, c->s.seqs[c->s.row_seq[row]].blocks[pos / bt]);
    c->kernels->store_column(cache->spec.type, block + (size_t)(pos % bt) * elem, cache->lanes, key,
                             p->dim);
}

/* Scores of a row in blocks [b0, b1), at scores + block * lanes. */
static void score(const index_job *job, int row, int b0, int b1, float *scores, float *heads)
{
    float *scratch = heads + (size_t)HEADS * (size_t)job->p->dim;
    const bg_cpu *c = job->c;
    const bg_index *p = job->p;
    const bg_cache *cache = &c->cache;
    const int32_t *blocks = c->s.seqs[c->s.row_seq[row]].blocks;
    const int lanes = cache->lanes;
    const float *weights = job->ik + row * job->ik_cols + p->dim;
    memset(scores + (size_t)b0 * (size_t)lanes, 0,
           (size_t)(b1 - b0) * (size_t)lanes * sizeof *scores);
    for (int h0 = 0; h0 < p->n_heads; h0 += HEADS) {
        const int n = p->n_heads - h0 < HEADS ? p->n_heads - h0 : HEADS;
        float w[HEADS];
        memcpy(heads, job->iq + row * job->iq_cols + (int64_t)h0 * p->dim,
               (size_t)n * (size_t)p->dim * sizeof *heads);
        for (int h = 0; h < n; h++) {
            rotate(job, heads + (size_t)h * (size_t)p->dim, row);
            w[h] = p->scale * weights[h0 + h];
        }
        for (int b = b0; b < b1; b++)
            c->kernels->index_scores(scores + (size_t)b * (size_t)lanes, cache->spec.type, heads, n,
                                     p->dim, w, index_block(job, blocks[b]), lanes, scratch);
    }
}

/* A number whose order is that of the floats; 0 and -0 are equal. */
static uint32_t ordered(float x)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The top_k positions of n > top_k by score, equal ones by lower position, in ascending order. The
 * k-th largest key is found digit by digit, then all above it are taken, and as many equal to it as
 * are still wanted. scores are overwritten. */
static void choose(const bg_cache *cache, float *scores, int n, int top_k, int32_t *chosen)
{
    enum { DIGIT = 11, DIGITS = 1 << DIGIT };
    const int bt = cache->spec.block_tokens;
    uint32_t least = 0, mask = 0;
    int wanted = top_k;
    for (int i = 0; i < n;
         i++) { /* without the blocks' padding; i never runs ahead of its source */
        const uint32_t key =
            ordered(scores[(size_t)(i / bt) * (size_t)cache->lanes + (size_t)(i % bt)]);
        memcpy(&scores[i], &key, sizeof key);
    }
    for (int shift = 32 - DIGIT; mask != UINT32_MAX; shift = shift > DIGIT ? shift - DIGIT : 0) {
        int count[DIGITS] = {0}, d = DIGITS;
        const uint32_t digit = (shift ? (uint32_t)DIGITS : 1u << (32 - 2 * DIGIT)) - 1;
        for (int i = 0; i < n; i++) {
            uint32_t key;
            memcpy(&key, &scores[i], sizeof key);
            if ((key & mask) == least) count[key >> shift & digit]++;
        }
        while (count[--d] < wanted)
            wanted -= count[d];
        least |= (uint32_t)d << shift;
        mask |= digit << shift;
    }
    for (int i = 0, k = 0; k < top_k; i++) {
        uint32_t key;
        memcpy(&key, &scores[i], sizeof key);
        if (key > least || (key == least && wanted-- > 0)) chosen[k++] = i;
    }
}

static void index_thread(void *ctx, int thread, int n_threads)
{
    const index_job *job = ctx;
    bg_cpu *c = job->c;
    const bg_cache *cache = &c->cache;
    const int n_rows = c->s.n_rows, bt = cache->spec.block_tokens;
    float *heads = c->index_heads + (size_t)thread * c->index_head_floats;
    for (int r = (int)((int64_t)n_rows * thread / n_threads);
         r < (int)((int64_t)n_rows * (thread + 1) / n_threads); r++)
        store_key(job, r, heads);
    if (n_threads > 1) bg_pool_barrier(c->pool);
    for (int first = 0; first < job->n_chosen_rows; first += n_threads) {
        const int32_t *rows = c->index_rows + first;
        const int n =
            job->n_chosen_rows - first < n_threads ? job->n_chosen_rows - first : n_threads;
        int most = 0; /* blocks that the longest row sees */
        for (int i = 0; i < n; i++) {
            const int blocks = c->s.row_pos[rows[i]] / bt + 1;
            most = blocks > most ? blocks : most;
        }
        const int ranges = (most + RANGE - 1) / RANGE;
        for (int item = thread; item < n * ranges; item += n_threads) {
            const int i = item % n, b0 = item / n * RANGE;
            const int blocks = c->s.row_pos[rows[i]] / bt + 1;
            if (b0 < blocks)
                score(job, rows[i], b0, b0 + RANGE < blocks ? b0 + RANGE : blocks,
                      c->index_scores + (size_t)i * c->index_score_floats, heads);
        }
        if (n_threads > 1) bg_pool_barrier(c->pool);
        if (thread < n)
            choose(cache, c->index_scores + (size_t)thread * c->index_score_floats,
                   c->s.row_pos[rows[thread]] + 1, job->p->top_k,
                   c->selection + (size_t)rows[thread] * (size_t)job->p->top_k);
        if (n_threads > 1) bg_pool_barrier(c->pool);
    }
}

size_t bg_cpu_index_head_floats(const bg_cache *cache)
{
    return (size_t)HEADS * (size_t)cache->spec.index_dim +
           (size_t)BG_INDEX_ROWS * (size_t)cache->lanes;
}

bg_status bg_cpu_index(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                       bg_error *err)
{
    bg_cpu *c = (bg_cpu *)b;
    const bg_cache_spec *spec = &c->cache.spec;
    const int n_rows = c->s.n_rows;
    if (!c->has_cache || p->index_layer < 0 || p->index_layer >= spec->n_index ||
        p->dim != spec->index_dim || p->top_k < 1 || p->top_k > spec->index_top_k)
        return bg_fail(err, BG_INTERNAL,
                       "op index: layer %d, %d of keys of %d values do not fit the cache: %d "
                       "layers, %d of %d",
                       p->index_layer, p->top_k, p->dim, spec->n_index, spec->index_top_k,
                       spec->index_dim);
    if (!p->rope || p->rope->n_rot > p->dim || p->rope->n_rot % 2 || p->n_heads < 1 || !p->k_norm ||
        p->k_norm->n != p->dim || (p->k_norm_b && p->k_norm_b->n != p->dim))
        return bg_fail(err, BG_INTERNAL, "op index: %d heads of %d values, their rotation or norm",
                       p->n_heads, p->dim);
    if (n_rows > iq->max_rows || n_rows > ik->max_rows || iq->cols < (int64_t)p->n_heads * p->dim ||
        ik->cols < p->ik_col0 + p->dim + p->n_heads || p->ik_col0 < 0)
        return bg_fail(err, BG_INTERNAL,
                       "op index: %d rows of %d heads of %d; %s is [%lld, %lld], %s [%lld, %lld]",
                       n_rows, p->n_heads, p->dim, iq->name, (long long)iq->max_rows,
                       (long long)iq->cols, ik->name, (long long)ik->max_rows, (long long)ik->cols);
    index_job job = {c,
                     p,
                     bg_cpu_rope_table(c, p->rope),
                     iq->data,
                     (const float *)ik->data + p->ik_col0,
                     iq->cols,
                     ik->cols,
                     0};
    for (int r = 0; r < n_rows; r++)
        if (c->s.row_pos[r] >= p->top_k) c->index_rows[job.n_chosen_rows++] = r;
    if (n_rows >= 4 || job.n_chosen_rows)
        bg_pool_run(c->pool, index_thread, &job);
    else
        index_thread(&job, 0, 1);
    c->selection_top_k = p->top_k;
    c->has_selection = true;
    return BG_OK;
}
