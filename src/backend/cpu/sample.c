/* Sampling one row of logits, in the order that ops.h gives at bg_sampling.
 *
 * A row is worked on by one thread and every sum has one order, so a token depends on its logits,
 * its slot's settings and history, and nothing else. What is skipped is skipped exactly: a token is
 * left out of the Gumbel race only where an upper bound of its score lies below a score already
 * reached. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/f16.h"
#include "base/rng.h"

/* ---- the best n tokens ----------------------------------------------------------------------- */

/* Smaller is better: larger logits first, then lower ids. -0 counts as 0, NaN as -inf. */
static uint64_t key_of(float logit, int32_t id)
{
    if (!(logit >= -INFINITY)) logit = -INFINITY;
    uint32_t u = bg_f32_bits(logit + 0.0f);
    u = u & 0x80000000u ? ~u : u | 0x80000000u; /* ascending with the value */
    return (uint64_t)~u << 32 | (uint32_t)id;
}

static int32_t id_of(uint64_t key)
{
    return (int32_t)(uint32_t)key;
}

static void swap_keys(uint64_t *a, uint64_t *b)
{
    const uint64_t t = *a;
    *a = *b;
    *b = t;
}

/* Splits keys[0..n), n >= 2, around a median of three: those before the returned place are smaller
 * than the key there, those behind it larger. Keys differ, as ids do. */
static int64_t split_keys(uint64_t *keys, int64_t n)
{
    uint64_t *first = keys, *mid = keys + n / 2, *last = keys + n - 1;
    if (*mid < *first) swap_keys(mid, first);
    if (*last < *first) swap_keys(last, first);
    if (*last < *mid) swap_keys(last, mid);
    swap_keys(mid, last); /* the median, out of the way */
    int64_t at = 0;
    for (int64_t i = 0; i < n - 1; i++)
        if (keys[i] < *last) swap_keys(&keys[i], &keys[at++]);
    swap_keys(&keys[at], last);
    return at;
}

/* Brings the n_best smallest to the front, in any order. */
static void select_keys(uint64_t *keys, int64_t n, int64_t n_best)
{
    while (n > 1 && n_best > 0 && n_best < n) {
        const int64_t at = split_keys(keys, n);
        if (at >= n_best)
            n = at;
        else {
            keys += at + 1;
            n -= at + 1;
            n_best -= at + 1;
        }
    }
}

static void sort_keys(uint64_t *keys, int64_t n)
{
    while (n > 16) {
        const int64_t at = split_keys(keys, n);
        if (at < n - at) { /* recursion on the shorter side: depth stays below log2 n */
            sort_keys(keys, at);
            keys += at + 1;
            n -= at + 1;
        } else {
            sort_keys(keys + at + 1, n - at - 1);
            n = at;
        }
    }
    for (int64_t i = 1; i < n; i++) {
        const uint64_t k = keys[i];
        int64_t j = i;
        for (; j > 0 && keys[j - 1] > k; j--)
            keys[j] = keys[j - 1];
        keys[j] = k;
    }
}

/* The n_best best tokens of a row, sorted, in s->keys; chunk_max must be filled in. */
static void best_tokens(bg_sampler *s, const float *x, int64_t vocab, int64_t n_best)
{
    const int64_t cap = 2 * n_best + 1024 < vocab ? 2 * n_best + 1024 : vocab;
    uint64_t limit = UINT64_MAX;   /* n_best better keys than this one are already held */
    float limit_logit = -INFINITY; /* its logit; later chunks without a larger one have lost */
    bool limited = false;
    int64_t n = 0;
    for (int64_t c = 0; c * BG_CHUNK_TOKENS < vocab; c++) {
        if (limited && !(s->chunk_max[c] > limit_logit)) continue;
        const int64_t from = c * BG_CHUNK_TOKENS;
        const int64_t to = from + BG_CHUNK_TOKENS < vocab ? from + BG_CHUNK_TOKENS : vocab;
        for (int64_t i = from; i < to; i++) {
            const uint64_t key = key_of(x[i], (int32_t)i);
            if (key > limit) continue;
            if (n == cap) { /* cap < vocab here: at cap == vocab it never fills up early */
                select_keys(s->keys, n, n_best);
                n = n_best;
                limit = 0;
                for (int64_t j = 0; j < n; j++)
                    limit = s->keys[j] > limit ? s->keys[j] : limit;
                limit_logit = x[id_of(limit)];
                limited = true;
                if (key > limit) continue;
            }
            s->keys[n++] = key;
        }
    }
    select_keys(s->keys, n, n_best);
    sort_keys(s->keys, n_best);
}

/* ---- bias, bans, penalties ------------------------------------------------------------------- */

static bool changes_logits(const bg_sampling *p, int n_generated)
{
    return p->n_bias > 0 || (n_generated < p->min_tokens && p->n_stop_ids > 0) ||
           p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
}

static void penalise(bg_sampler *s, float *x, const bg_slot *slot)
{
    const bg_sampling *p = &slot->sampling;
    const int n_prompt = slot->n_tokens - slot->n_generated;
    enum { IN_PROMPT = 1u << 31 }; /* the rest of a count: times in the output */
    for (int i = 0; i < slot->n_tokens; i++) {
        uint32_t *count = &s->count[slot->tokens[i]];
        *count = i < n_prompt ? *count | (uint32_t)IN_PROMPT : *count + 1;
    }
    for (int i = 0; i < slot->n_tokens; i++) {
        const int32_t id = slot->tokens[i];
        const uint32_t count = s->count[id];
        if (!count) continue; /* done at an earlier place */
        s->count[id] = 0;
        float v = x[id];
        v = v > 0 ? v / p->repetition_penalty : v * p->repetition_penalty;
        const uint32_t n_output = count & ~(uint32_t)IN_PROMPT;
        if (n_output) v -= p->presence_penalty + p->frequency_penalty * (float)n_output;
        x[id] = v;
    }
}

/* The row as the rest sees it: logits itself, or a changed copy. */
static const float *changed_logits(bg_sampler *s, const float *logits, int vocab,
                                   const bg_slot *slot)
{
    const bg_sampling *p = &slot->sampling;
    if (!changes_logits(p, slot->n_generated)) return logits;
    float *x = s->logits;
    memcpy(x, logits, (size_t)vocab * sizeof *x);
    for (int i = 0; i < p->n_bias; i++) {
        if (p->bias[i].bias <= -100)
            x[p->bias[i].token] = -INFINITY;
        else
            x[p->bias[i].token] += p->bias[i].bias;
    }
    if (slot->n_generated < p->min_tokens)
        for (int i = 0; i < p->n_stop_ids; i++)
            x[p->stop_ids[i]] = -INFINITY;
    if (p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0)
        penalise(s, x, slot);
    return x;
}

/* ---- the race -------------------------------------------------------------------------------- */

typedef struct race {
    double max, inv_t; /* a token's tempered logit is (x - max) * inv_t */
    double min_p;      /* 0: off; the best token has probability 1 here */
    uint64_t seed, pos;
    float floor; /* tokens below this one, which is (floor, floor_id), take no part */
    int32_t floor_id;
    double score; /* of the leader */
    int32_t leader;
} race;

static double gumbel(uint32_t word)
{
    return -log(-log(bg_uniform(word)));
}

static void enter(race *r, double tempered, int32_t id, uint32_t word)
{
    const double score = tempered + gumbel(word);
    if (score > r->score || (score == r->score && id < r->leader)) {
        r->score = score;
        r->leader = id;
    }
}

/* All tokens above the floor that pass min_p. leader is the best token. */
static void race_all(race *r, bg_sampler *s, const bg_kernels *kernels, const float *x, int vocab)
{
    /* SLACK covers the rounding of the kernel's bound. Noise is at most -ln(-ln(1 - 2^-33)). */
    const double SLACK = 1e-3, MOST_NOISE = 22.9;
    const float max = (float)r->max, inv_t = r->inv_t < 1e30 ? (float)r->inv_t : 1e30f;
    const double log_min_p = r->min_p > 0 ? log(r->min_p) - SLACK : -INFINITY;
    enter(r, 0, r->leader, bg_sample_word(r->seed, r->pos, (uint32_t)r->leader));
    for (int from = 0, c = 0; from < vocab; from += BG_CHUNK_TOKENS, c++) {
        const double best = ((double)s->chunk_max[c] - r->max) * r->inv_t;
        if (!(best + MOST_NOISE >= r->score) || !(best >= log_min_p)) continue;
        if (s->chunk_max[c] < r->floor) continue;
        const int n = vocab - from < BG_CHUNK_TOKENS ? vocab - from : BG_CHUNK_TOKENS;
        uint32_t word[BG_CHUNK_TOKENS];
        float bound[BG_CHUNK_TOKENS];
        kernels->words(word, r->seed, r->pos, (uint32_t)from / 4);
        if (!((double)kernels->gumbel_bound(bound, x + from, word, n, max, inv_t) + SLACK >=
              r->score))
            continue;
        for (int i = 0; i < n; i++) {
            if (!((double)bound[i] + SLACK >= r->score)) continue;
            const float logit = x[from + i];
            if (logit < r->floor || (logit == r->floor && from + i >= r->floor_id)) continue;
            const double z = ((double)logit - r->max) * r->inv_t;
            if (r->min_p > 0 && !(exp(z) >= r->min_p)) continue;
            enter(r, z, from + i, word[i]);
        }
    }
}

/* All tokens that top_p keeps: those for which the better ones together stay below top_p of the
 * total. Instead of sorting, the winner of all is asked whether it is kept; if not, the race is run
 * again among the better ones. A winner among more tokens than are kept has beaten all of those. */
static void race_top_p(race *r, bg_sampler *s, const bg_kernels *kernels, const float *x, int vocab,
                       double top_p)
{
    const float max = (float)r->max, inv_t = r->inv_t < 1e30 ? (float)r->inv_t : 1e30f;
    const int32_t best = r->leader;
    const double limit = top_p * kernels->exp_sum(x, vocab, -INFINITY, max, inv_t);
    for (;;) {
        r->leader = best;
        r->score = -INFINITY;
        race_all(r, s, kernels, x, vocab);
        const int32_t id = r->leader;
        if (id == best) return; /* always kept */
        const double better =
            kernels->exp_sum(x, id, x[id], max, inv_t) +
            kernels->exp_sum(x + id, vocab - id, nextafterf(x[id], INFINITY), max, inv_t);
        if (better < limit) return;
        r->floor = x[id];
        r->floor_id = id;
    }
}

/* The best top_k, of which top_p keeps a prefix; then min_p and the race. */
static void race_top_k(race *r, bg_sampler *s, const float *x, int vocab, const bg_sampling *p)
{
    int64_t n = p->top_k;
    best_tokens(s, x, vocab, n);
    if (p->top_p < 1) {
        double total = 0, sum = 0;
        for (int64_t i = 0; i < n; i++)
            total += exp(((double)x[id_of(s->keys[i])] - r->max) * r->inv_t);
        for (int64_t i = 0; i < n; i++) {
            sum += exp(((double)x[id_of(s->keys[i])] - r->max) * r->inv_t);
            if (sum >= (double)p->top_p * total) n = i + 1;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = id_of(s->keys[i]);
        const double z = ((double)x[id] - r->max) * r->inv_t;
        if (i > 0 && r->min_p > 0 && !(exp(z) >= r->min_p)) break;
        enter(r, z, id, bg_sample_word(r->seed, r->pos, (uint32_t)id));
    }
}

/* ---- a row ----------------------------------------------------------------------------------- */

/* The first largest logit; 0 when there is no number above -inf. */
static int32_t first_largest(const bg_sampler *s, const float *x, int vocab)
{
    int64_t best = 0;
    for (int64_t c = 1; c * BG_CHUNK_TOKENS < vocab; c++)
        if (s->chunk_max[c] > s->chunk_max[best]) best = c;
    for (int64_t i = best * BG_CHUNK_TOKENS; i < vocab; i++)
        if (x[i] == s->chunk_max[best]) return (int32_t)i;
    return 0;
}

static void log_probabilities(bg_sampler *s, const bg_kernels *kernels, const float *x, int vocab,
                              float max, bg_sampled *out, int n_top)
{
    const double log_total = (double)max + log(kernels->exp_sum(x, vocab, -INFINITY, max, 1));
    out->logprob = (float)((double)x[out->token] - log_total);
    if (n_top > vocab) n_top = vocab;
    if (n_top > BG_MAX_TOP_LOGPROBS) n_top = BG_MAX_TOP_LOGPROBS;
    if (n_top > 0) best_tokens(s, x, vocab, n_top);
    for (int i = 0; i < n_top; i++) {
        out->top[i].token = id_of(s->keys[i]);
        out->top[i].logprob = (float)((double)x[out->top[i].token] - log_total);
    }
    out->n_top = n_top;
}

void bg_sample_row(bg_sampler *s, const bg_kernels *kernels, const float *logits, int vocab,
                   const bg_slot *slot, bg_sampled *out)
{
    const bg_sampling *p = &slot->sampling;
    const float *x = changed_logits(s, logits, vocab, slot);
    kernels->chunk_max(s->chunk_max, x, vocab);
    const int32_t best = first_largest(s, x, vocab);
    const float max = x[best];
    out->token = best;
    out->logprob = NAN;
    out->n_top = 0;
    if (p->temperature > 0 && max > -INFINITY) {
        race r = {.max = (double)max,
                  .inv_t = 1 / (double)p->temperature,
                  .min_p = p->min_p > 0 ? (double)p->min_p : 0,
                  .seed = p->seed,
                  .pos = (uint64_t)slot->n_generated,
                  .floor = -INFINITY,
                  .floor_id = vocab,
                  .score = -INFINITY,
                  .leader = best};
        if (p->top_k > 0 && p->top_k < vocab)
            race_top_k(&r, s, x, vocab, p);
        else if (p->top_p < 1)
            race_top_p(&r, s, kernels, x, vocab, (double)p->top_p);
        else
            race_all(&r, s, kernels, x, vocab);
        out->token = r.leader;
    }
    if (p->n_logprobs >= 0) log_probabilities(s, kernels, x, vocab, max, out, p->n_logprobs);
}
