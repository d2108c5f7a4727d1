/* kernels/sample.cu - a token for each row of logits, as bg_sampling in backend/ops.h says it, and
 * its log-probabilities. The CPU backend's sampler is the reference.
 *
 *   scan_rows    slices of a row: biases, bans and penalties change the logits in place; then the
 *                largest logit of each chunk of 256 tokens is noted, so that later passes leave out
 *                chunks that cannot matter
 *   sample_rows  the race (Gumbel-max) and sums over a row, split over several blocks where rows
 *                are few; the block that comes last finishes the row
 *
 *   requires  vocab <= 2^21, n_rows <= 65535; scratch is zero before its first use
 *   launch    grids are set by n_rows and vocab alone; settings are read on the device
 *   order     sums of probabilities are whole numbers of 2^-42 of the best token's: no order at
 * all. Random numbers are functions of (seed, position, token). So blocks may share a row in any
 * way, and a row's token depends on its logits, settings and history alone. exact     a token is
 * left out of the race only where an upper bound of its score lies below a score already reached
 *   proof     tests/gpu/test_sample.c */
#include "bgk.h"
#include "launch.cuh"

namespace
{

typedef unsigned long long u64;

constexpr int CHUNK = 256;        /* tokens of one warp: two groups of four a lane */
constexpr int SLICE = 8192;       /* tokens of one block of scan_rows */
constexpr int SCAN_THREADS = 256; /* of scan_rows */
constexpr int THREADS = 512;      /* of sample_rows */
constexpr int WARPS = THREADS / 32;
constexpr int LIST = 2048;     /* tokens that can be sorted */
constexpr int MAX_BEST = 1024; /* best tokens asked of a sort; the list's other half is for sums */
constexpr int MAX_SPLITS = 32, WANTED_BLOCKS = 264;
constexpr unsigned IN_PROMPT = 1u << 31; /* the rest of a count: times in the output */

/* Slack covers the rounding of bounds in float32. Noise is at most -ln(-ln(1 - 2^-33)). */
constexpr float BOUND_SLACK = 1e-3f, MOST_NOISE = 22.9f;
constexpr float UNIT = 4398046511104.0f; /* 2^42: a probability as that of the best token */
constexpr float LEAST_Z = -31.0f;        /* exp of less is 0 in these units */

struct part { /* what one of a row's blocks found */
    double score;
    int id, unused;
    u64 tempered, plain; /* sums of probabilities */
};

/* Smaller is better: larger logits first, then lower ids. -0 counts as 0, NaN as -inf. */
__device__ u64 key_of(float logit, int id)
{
    if (!(logit >= -INFINITY)) logit = -INFINITY;
    unsigned u = __float_as_uint(logit + 0.0f);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (u64)~u << 32 | (unsigned)id;
}

struct row {
    const float *x, *chunk_max;
    int vocab, n_chunks;
    bool aligned; /* four at a time */
};

struct four {
    float v[4];
};

/* Logits of four tokens; NaN beyond the vocabulary. from is a multiple of four, below vocab. */
__device__ four load_four(const row &r, int from)
{
    four f;
    if (r.aligned) {
        const float4 v = *(const float4 *)(r.x + from);
        f.v[0] = v.x, f.v[1] = v.y, f.v[2] = v.z, f.v[3] = v.w;
        return f;
    }
    for (int i = 0; i < 4; i++)
        f.v[i] = from + i < r.vocab ? r.x[from + i] : NAN;
    return f;
}

/* The first of a lane's four tokens in group 0 or 1 of a chunk. */
__device__ int place(int chunk, int group)
{
    return chunk * CHUNK + group * (CHUNK / 2) + threadIdx.x % 32 * 4;
}

/* ---- biases, bans, penalties, chunk maxima ----------------------------------------------------
 */

__device__ bool penalised(const bgk_sampling &p)
{
    return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}

/* Changes x[begin, end). Rounded as the CPU does it: no fused multiply-add. */
__device__ void change_slice(unsigned *count, float *x, int begin, int end, const bgk_sampling &p,
                             const int *history, int len, int generated)
{
    for (int i = threadIdx.x; i < p.n_bias; i += SCAN_THREADS) {
        const int id = p.bias[i].token;
        if (id < begin || id >= end || (i > 0 && p.bias[i - 1].token == id)) continue;
        float v = x[id];
        for (int j = i; j < p.n_bias && p.bias[j].token == id; j++)
            v = p.bias[j].bias <= -100 ? -INFINITY : v + p.bias[j].bias;
        x[id] = v;
    }
    __syncthreads();
    if (generated < p.min_tokens)
        for (int i = threadIdx.x; i < p.n_stop; i += SCAN_THREADS)
            if (p.stop[i] >= begin && p.stop[i] < end) x[p.stop[i]] = -INFINITY;
    if (!penalised(p)) return;
    for (int i = threadIdx.x; i < end - begin; i += SCAN_THREADS)
        count[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < len; i += SCAN_THREADS) {
        const int at = history[i] - begin;
        if (at < 0 || at >= end - begin) continue;
        if (i < len - generated)
            atomicOr(&count[at], IN_PROMPT);
        else
            atomicAdd(&count[at], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < end - begin; i += SCAN_THREADS) {
        if (!count[i]) continue;
        float v = x[begin + i];
        v = v > 0 ? __fdiv_rn(v, p.repetition_penalty) : __fmul_rn(v, p.repetition_penalty);
        const unsigned n_output = count[i] & ~IN_PROMPT;
        if (n_output)
            v = __fsub_rn(
                v, __fadd_rn(p.presence_penalty, __fmul_rn(p.frequency_penalty, (float)n_output)));
        x[begin + i] = v;
    }
}

__global__ void __launch_bounds__(SCAN_THREADS)
    scan_rows(const bgk_sample_args a, float *chunk_max, int n_chunks)
{
    __shared__ unsigned count[SLICE];
    ptx_let_next_start();
    ptx_wait_prior();
    const int j = blockIdx.y, slot = a.slot[j], begin = blockIdx.x * SLICE;
    if (slot < 0) return;
    const int end = min(begin + SLICE, a.vocab);
    float *x = a.logits + (int64_t)j * a.vocab;
    {
        const bgk_sampling &p = a.settings[slot];
        if (p.n_bias > 0 || (p.n_stop > 0 && a.generated[j] < p.min_tokens) || penalised(p)) {
            change_slice(count, x, begin, end, p, a.history + slot * a.history_stride, a.len[j],
                         a.generated[j]);
            __syncthreads();
        }
    }
    const row r = {x, nullptr, a.vocab, n_chunks,
                   a.vocab % 4 == 0 && (uintptr_t)a.logits % 16 == 0};
    constexpr int PER_WARP = SLICE / CHUNK / (SCAN_THREADS / 32);
    const int first = begin / CHUNK + threadIdx.x / 32;
    float most[PER_WARP];
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        most[i] = -INFINITY;
#pragma unroll
        for (int g = 0; g < 2; g++) {
            const int from = place(first + i * (SCAN_THREADS / 32), g);
            if (from >= end) continue;
            const four f = load_four(r, from);
#pragma unroll
            for (int e = 0; e < 4; e++)
                most[i] = fmaxf(most[i], f.v[e]); /* a NaN is left out */
        }
    }
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
        for (int d = 16; d > 0; d /= 2)
            most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], d));
        const int c = first + i * (SCAN_THREADS / 32);
        if (threadIdx.x % 32 == 0 && c < n_chunks) chunk_max[(int64_t)j * n_chunks + c] = most[i];
    }
}

/* ---- the block's shared memory, reductions ----------------------------------------------------
 */

struct block {
    u64 list[LIST];
    unsigned hist[256];
    u64 sums[WARPS];
    double scores[WARPS];
    int ids[WARPS];
    int bar; /* the best score so far, rounded down, as order_of() it */
    int first;
    unsigned n;
    int digit;
    unsigned before, inside;
    bool last;
};

/* Ascending with the float. */
__device__ int order_of(float f)
{
    const int i = __float_as_int(f);
    return i < 0 ? i ^ 0x7fffffff : i;
}

__device__ float of_order(int i)
{
    return __int_as_float(i < 0 ? i ^ 0x7fffffff : i);
}

/* All threads call these, and all get the result. */
__device__ u64 block_sum(block &s, u64 v)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < WARPS; i++)
        v += s.sums[i];
    return v;
}

__device__ u64 block_least(block &s, u64 v)
{
    for (int d = 16; d > 0; d /= 2)
        v = min(v, __shfl_xor_sync(0xffffffffu, v, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        v = min(v, s.sums[i]);
    return v;
}

struct lead {
    double score;
    int id;
};

__device__ void enter(lead &l, double score, int id)
{
    if (score > l.score || (score == l.score && id < l.id)) {
        l.score = score;
        l.id = id;
    }
}

__device__ lead block_lead(block &s, lead l)
{
    for (int d = 16; d > 0; d /= 2) {
        const double score = __shfl_xor_sync(0xffffffffu, l.score, d);
        const int id = __shfl_xor_sync(0xffffffffu, l.id, d);
        enter(l, score, id);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        s.scores[threadIdx.x / 32] = l.score;
        s.ids[threadIdx.x / 32] = l.id;
    }
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        enter(l, s.scores[i], s.ids[i]);
    return l;
}

/* ---- the race ---------------------------------------------------------------------------------
 */

struct race {
    double max, inv_t; /* a token's tempered logit is (x - max) * inv_t */
    double min_p;      /* 0: off; the best token has probability 1 here */
    float max_f, inv_t_f, log_min_p;
    u64 seed, pos;
    int best; /* the first largest */
};

__device__ uint4 philox(u64 seed, u64 low, u64 high)
{
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
    unsigned c0 = (unsigned)low, c1 = (unsigned)(low >> 32);
    unsigned c2 = (unsigned)high, c3 = (unsigned)(high >> 32);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        c0 = (unsigned)(p1 >> 32) ^ c1 ^ k0;
        c2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
        c1 = (unsigned)p1;
        c3 = (unsigned)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

__device__ unsigned word_of(const race &r, int id)
{
    const uint4 w = philox(r.seed, (u64)(id >> 2), r.pos);
    return id & 2 ? (id & 1 ? w.w : w.z) : (id & 1 ? w.y : w.x);
}

__device__ double tempered(const race &r, float logit)
{
    return __dmul_rn((double)logit - r.max, r.inv_t);
}

__device__ double score_of(double z, unsigned word)
{
    const double u = ((double)word + 0.5) * 0x1p-32;
    return __dadd_rn(z, -log(-log(u)));
}

/* With u the uniform number of a word and z = 2^32 - 1 - word: -ln(-ln u) <= -ln(1 - u), and 1 - u
 * is (z + 0.5) / 2^32. The bits of a float read as an integer are a lower bound of its log2. */
__device__ float noise_bound(unsigned word)
{
    const float half = (float)(int)(~word >> 1) + 0.25f;
    return 0.69314718f * 158.0f - 0.69314718f * 0x1p-23f * (float)__float_as_int(half);
}

__device__ u64 units(float z)
{
    return z >= LEAST_Z ? __float2ull_rn(expf(z) * UNIT) : 0; /* 0 for NaN */
}

struct found {
    lead l;
    u64 tempered, plain;
};

enum { RACE = 1, SUM_TEMPERED = 2, SUM_PLAIN = 4 };

/* Over tokens with keys up to limit, those of every step-th group of chunks: which of race and sums
 * `what` names. What one thread found; before a race start_race() is called. */
__device__ found pass(block &s, const row &x, const race &r, u64 limit, int what, int first,
                      int step)
{
    found f = {{-INFINITY, INT32_MAX}, 0, 0};
    const float too_small = r.log_min_p;
    for (int c = first * WARPS + threadIdx.x / 32; c < x.n_chunks; c += step * WARPS) {
        const float most = x.chunk_max[c];
        if (key_of(most, c * CHUNK) > limit) continue;
        const float z_most = (most - r.max_f) * r.inv_t_f;
        float bar = of_order(*(volatile int *)&s.bar);
        const bool races =
            what & RACE && z_most + MOST_NOISE + BOUND_SLACK >= bar && z_most >= too_small;
        const bool sums = what & SUM_TEMPERED && z_most >= LEAST_Z;
        const bool sums_plain = what & SUM_PLAIN && most - r.max_f >= LEAST_Z;
        if (!races && !sums && !sums_plain) continue;
#pragma unroll
        for (int g = 0; g < 2; g++) {
            const int from = place(c, g);
            if (from >= x.vocab) continue;
            const four v = load_four(x, from);
            if (sums_plain)
                for (int i = 0; i < 4; i++)
                    f.plain += units(v.v[i] - r.max_f);
            float z[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                z[i] = (v.v[i] - r.max_f) * r.inv_t_f;
            if (sums)
                for (int i = 0; i < 4; i++)
                    if (limit == ~0ull || key_of(v.v[i], from + i) <= limit)
                        f.tempered += units(z[i]);
            if (!races) continue;
            const float z_four = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
            bar = of_order(*(volatile int *)&s.bar);
            if (!(z_four + MOST_NOISE + BOUND_SLACK >= bar)) continue;
            const uint4 w4 = philox(r.seed, (u64)(from >> 2), r.pos);
            const unsigned w[4] = {w4.x, w4.y, w4.z, w4.w};
            unsigned hopeful = 0;
#pragma unroll
            for (int i = 0; i < 4; i++)
                hopeful |= z[i] + noise_bound(w[i]) + BOUND_SLACK >= bar ? 1u << i : 0;
            while (hopeful) {
                const int i = __ffs(hopeful) - 1;
                hopeful &= hopeful - 1;
                const float logit = i & 2 ? (i & 1 ? v.v[3] : v.v[2]) : (i & 1 ? v.v[1] : v.v[0]);
                const unsigned word = i & 2 ? (i & 1 ? w[3] : w[2]) : (i & 1 ? w[1] : w[0]);
                if (key_of(logit, from + i) > limit) continue;
                const double zd = tempered(r, logit);
                if (r.min_p > 0 && !(exp(zd) >= r.min_p)) continue;
                const double score = score_of(zd, word);
                enter(f.l, score, from + i);
                atomicMax(&s.bar, order_of(__double2float_rd(score)));
            }
        }
    }
    return f;
}

/* The best token has entered. */
__device__ lead start_race(block &s, const race &r)
{
    lead l = {-INFINITY, INT32_MAX};
    __syncthreads();
    if (threadIdx.x == 0) {
        l.score = score_of(0, word_of(r, r.best));
        l.id = r.best;
        s.bar = order_of(__double2float_rd(l.score));
    }
    __syncthreads();
    return l;
}

/* The winner among all tokens with keys up to limit. *sum: their probabilities, if asked for. */
__device__ int race_alone(block &s, const row &x, const race &r, u64 limit, u64 *sum)
{
    const lead l = start_race(s, r);
    found f = pass(s, x, r, limit, sum ? RACE | SUM_TEMPERED : RACE, 0, 1);
    enter(f.l, l.score, l.id);
    if (sum) *sum = block_sum(s, f.tempered);
    return block_lead(s, f.l).id;
}

/* Tokens that top_p keeps are those for which the better ones together stay below top_p of the
 * total. Instead of sorting, the winner of all is asked whether it is kept; if not, the race is run
 * again among the better ones. A winner among more tokens than are kept has beaten all of those. */
__device__ int race_top_p(block &s, const row &x, const race &r, int winner, double least)
{
    if (least <= (double)UNIT) return r.best; /* which alone is so much */
    while (winner != r.best) {
        const u64 better = key_of(x.x[winner], winner) - 1;
        const found f = pass(s, x, r, better, SUM_TEMPERED, 0, 1);
        if ((double)block_sum(s, f.tempered) < least) break;
        winner = race_alone(s, x, r, better, nullptr);
    }
    return winner;
}

/* ---- the best n tokens -------------------------------------------------------------------------
 */

/* Calls fn(key) for tokens, at least those whose keys are up to limit. */
template <typename F> __device__ void each_key(const row &x, u64 limit, F fn)
{
    for (int c = threadIdx.x / 32; c < x.n_chunks; c += WARPS) {
        if (key_of(x.chunk_max[c], c * CHUNK) > limit) continue;
        for (int g = 0; g < 2; g++) {
            const int from = place(c, g);
            if (from >= x.vocab) continue;
            const four f = load_four(x, from);
            for (int i = 0; i < 4; i++)
                if (from + i < x.vocab) fn(key_of(f.v[i], from + i));
        }
    }
}

/* A limit up to which there are k keys exactly; each(limit, fn) calls fn for all keys up to it. The
 * keys differ, there are k or more. By digits of eight bits, from the top. */
template <typename E> __device__ u64 kth_key(block &s, unsigned k, E each)
{
    u64 prefix = 0, known = 0; /* the limit's upper bits, and which they are */
    for (int shift = 56;; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += THREADS)
            s.hist[i] = 0;
        __syncthreads();
        each(prefix | ~known, [&](u64 key) {
            if ((key & known) != prefix) return;
            const unsigned digit = (unsigned)(key >> shift) & 255;
            const unsigned same = __match_any_sync(__activemask(), digit);
            if ((int)threadIdx.x % 32 == __ffs(same) - 1)
                atomicAdd(&s.hist[digit], (unsigned)__popc(same));
        });
        __syncthreads();
        if (threadIdx.x < 32) {
            unsigned sum = 0, mine = 0;
            for (int i = 0; i < 8; i++)
                mine += s.hist[threadIdx.x * 8 + i];
            sum = mine;
            for (int d = 1; d < 32; d *= 2) {
                const unsigned other = __shfl_up_sync(0xffffffffu, sum, d);
                if ((int)threadIdx.x >= d) sum += other;
            }
            unsigned before = sum - mine;
            for (int i = 0; i < 8; i++) {
                const unsigned n = s.hist[threadIdx.x * 8 + i];
                if (before < k && k <= before + n) {
                    s.digit = (int)threadIdx.x * 8 + i;
                    s.before = before;
                    s.inside = n;
                }
                before += n;
            }
        }
        __syncthreads();
        prefix |= (u64)s.digit << shift;
        known |= (u64)255 << shift;
        k -= s.before;
        if (k == s.inside || shift == 0) return prefix | ~known;
    }
}

__device__ u64 kth_of_row(block &s, const row &x, int k)
{
    return kth_key(s, (unsigned)k, [&](u64 limit, auto fn) { each_key(x, limit, fn); });
}

/* All keys up to limit into the list, as far as there is room; how many there are. */
__device__ unsigned list_keys(block &s, const row &x, u64 limit)
{
    __syncthreads();
    if (threadIdx.x == 0) s.n = 0;
    __syncthreads();
    each_key(x, limit, [&](u64 key) {
        if (key > limit) return;
        const unsigned at = atomicAdd(&s.n, 1u);
        if (at < LIST) s.list[at] = key;
    });
    __syncthreads();
    return s.n;
}

/* The k best tokens' keys, sorted, at the front of the list. 1 <= k <= MAX_BEST, k <= vocab. The
 * k-th of the chunks' largest bounds the k-th of all, mostly closely. */
__device__ void best_tokens(block &s, const row &x, int k)
{
    u64 limit = ~0ull;
    if (x.vocab > LIST && k <= x.n_chunks) {
        limit = kth_key(s, (unsigned)k, [&](u64, auto fn) {
            for (int i = threadIdx.x; i < x.n_chunks; i += THREADS)
                fn(key_of(x.chunk_max[i], i));
        });
        u64 least = ~0ull; /* ~ of the last key up to it */
        for (int i = threadIdx.x; i < x.n_chunks; i += THREADS) {
            const u64 key = key_of(x.chunk_max[i], i);
            if (key <= limit) least = min(least, ~key);
        }
        limit = ~block_least(s, least) | 0xffffffffu;
    } else if (x.vocab > LIST)
        limit = kth_of_row(s, x, k);
    unsigned n = list_keys(s, x, limit);
    if (n > LIST) n = list_keys(s, x, kth_of_row(s, x, k));
    unsigned size = 2;
    while (size < n)
        size *= 2;
    for (unsigned i = n + threadIdx.x; i < size; i += THREADS)
        s.list[i] = ~0ull;
    for (unsigned run = 2; run <= size; run *= 2)
        for (unsigned d = run / 2; d > 0; d /= 2) {
            __syncthreads();
            for (unsigned t = threadIdx.x; t < size / 2; t += THREADS) {
                const unsigned i = (t & ~(d - 1)) << 1 | (t & (d - 1)), j = i | d;
                const u64 a = s.list[i], b = s.list[j];
                if ((a > b) == ((i & run) == 0)) {
                    s.list[i] = b;
                    s.list[j] = a;
                }
            }
        }
    __syncthreads();
}

/* The best k of a row, of which top_p keeps a prefix; then min_p and the race. */
__device__ int race_listed(block &s, const row &x, const race &r, int k, float top_p)
{
    best_tokens(s, x, k);
    u64 *sum = s.list + MAX_BEST; /* [k]: of the tokens up to this one */
    double least = INFINITY;
    if (top_p < 1) {
        for (int i = threadIdx.x; i < k; i += THREADS)
            sum[i] =
                __double2ull_rn(exp(tempered(r, x.x[(int)(unsigned)s.list[i]])) * (double)UNIT);
        constexpr int EACH = MAX_BEST / THREADS;
        for (int d = 1; d < k; d *= 2) {
            u64 add[EACH];
            __syncthreads();
            for (int e = 0; e < EACH; e++) {
                const int i = threadIdx.x + e * THREADS;
                add[e] = i < k && i >= d ? sum[i - d] : 0;
            }
            __syncthreads();
            for (int e = 0; e < EACH; e++) {
                const int i = threadIdx.x + e * THREADS;
                if (i < k) sum[i] += add[e];
            }
        }
        __syncthreads();
        least = (double)top_p * (double)sum[k - 1];
    }
    lead l = {-INFINITY, INT32_MAX};
    for (int i = threadIdx.x; i < k; i += THREADS) {
        if (i > 0 && top_p < 1 && !((double)sum[i - 1] < least)) break;
        const int id = (int)(unsigned)s.list[i];
        const double z = tempered(r, x.x[id]);
        if (i > 0 && r.min_p > 0 && !(exp(z) >= r.min_p)) break;
        enter(l, score_of(z, word_of(r, id)), id);
    }
    const int id = block_lead(s, l).id;
    return id == INT32_MAX ? r.best : id;
}

/* ---- a row ------------------------------------------------------------------------------------
 */

/* The first of x[begin, end) that equals v; INT32_MAX: none. */
__device__ int first_equal(block &s, const float *x, int begin, int end, float v)
{
    __syncthreads();
    if (threadIdx.x == 0) s.first = INT32_MAX;
    __syncthreads();
    for (int i = begin + threadIdx.x; i < end; i += THREADS)
        if (x[i] == v) {
            atomicMin(&s.first, i);
            break;
        }
    __syncthreads();
    return s.first;
}

/* One block's share of the work that a row's blocks do together, put down; true in the block that
 * comes last, with everything added up in *f. */
__device__ bool share(block &s, const row &x, const race &r, int what, part *parts,
                      unsigned *arrived, found *f)
{
    lead l = {-INFINITY, INT32_MAX};
    if (what & RACE) l = start_race(s, r);
    *f = pass(s, x, r, ~0ull, what, blockIdx.x, gridDim.x);
    enter(f->l, l.score, l.id);
    f->l = block_lead(s, f->l);
    f->tempered = block_sum(s, f->tempered);
    f->plain = block_sum(s, f->plain);
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = {f->l.score, f->l.id, 0, f->tempered, f->plain};
        __threadfence();
        s.last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        if (s.last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (!s.last) return false;
    f->tempered = f->plain = 0;
    for (unsigned i = 0; i < gridDim.x; i++) {
        enter(f->l, __ldcg(&parts[i].score), __ldcg(&parts[i].id));
        f->tempered += __ldcg(&parts[i].tempered);
        f->plain += __ldcg(&parts[i].plain);
    }
    return true;
}

__global__ void __launch_bounds__(THREADS, 2)
    sample_rows(const bgk_sample_args a, const float *chunk_max, int n_chunks, part *parts,
                unsigned *arrived)
{
    __shared__ block s;
    ptx_let_next_start();
    ptx_wait_prior();
    const int j = blockIdx.y, slot = a.slot[j];
    if (slot < 0) return;
    const bgk_sampling &p = a.settings[slot];
    const row x = {a.logits + (int64_t)j * a.vocab, chunk_max + (int64_t)j * n_chunks, a.vocab,
                   n_chunks, a.vocab % 4 == 0 && (uintptr_t)a.logits % 16 == 0};
    const bool top_k = p.top_k > 0 && p.top_k < a.vocab;
    int what = p.temperature > 0 && !top_k ? RACE | (p.top_p < 1 ? SUM_TEMPERED : 0) : 0;
    if (p.n_logprobs >= 0) what |= SUM_PLAIN;
    if (!what && blockIdx.x > 0) return; /* nothing to share */

    u64 least = ~0ull;
    for (int c = threadIdx.x; c < n_chunks; c += THREADS)
        least = min(least, key_of(x.chunk_max[c], c));
    least = block_least(s, least);
    const int c_best = (int)(unsigned)least;
    const float most = x.chunk_max[c_best];
    const bool any = most > -INFINITY;
    int best = any ? first_equal(s, x.x, c_best * CHUNK, min((c_best + 1) * CHUNK, a.vocab), most)
                   : first_equal(s, x.x, 0, a.vocab, most);
    if (best == INT32_MAX) best = 0;
    if (!any) what &= ~(RACE | SUM_TEMPERED);

    const double inv_t = p.temperature > 0 ? 1 / (double)p.temperature : 1;
    const race r = {.max = (double)most,
                    .inv_t = inv_t,
                    .min_p = p.min_p > 0 ? (double)p.min_p : 0,
                    .max_f = most,
                    .inv_t_f = inv_t < 1e30 ? (float)inv_t : 1e30f,
                    .log_min_p = p.min_p > 0 ? logf(p.min_p) - BOUND_SLACK : -INFINITY,
                    .seed = p.seed,
                    .pos = (u64)a.generated[j],
                    .best = best};
    found f = {{0, best}, 0, 0};
    if (what && !share(s, x, r, what, parts + (int64_t)j * MAX_SPLITS, arrived + j, &f)) return;
    if (!what && blockIdx.x > 0) return; /* no number above -inf, no log-probabilities */

    int token = best;
    if (p.temperature > 0 && any) {
        if (top_k && p.top_k <= MAX_BEST)
            token = race_listed(s, x, r, p.top_k, p.top_p);
        else {
            u64 total = f.tempered;
            token = top_k ? race_alone(s, x, r, kth_of_row(s, x, p.top_k), &total) : f.l.id;
            if (p.top_p < 1) token = race_top_p(s, x, r, token, (double)p.top_p * (double)total);
        }
    }
    const double log_total = r.max + log((double)f.plain / (double)UNIT);
    const int n_top = max(0, min(min(p.n_logprobs, (int)BGK_MAX_TOP), a.vocab));
    if (n_top > 0) {
        best_tokens(s, x, n_top);
        if ((int)threadIdx.x < n_top) {
            const int id = (int)(unsigned)s.list[threadIdx.x];
            a.tops[(int64_t)j * BGK_MAX_TOP + threadIdx.x] = {id,
                                                              (float)((double)x.x[id] - log_total)};
        }
    }
    if (threadIdx.x == 0) {
        const float logprob = p.n_logprobs >= 0 ? (float)((double)x.x[token] - log_total) : NAN;
        a.sampled[j] = {slot, token, logprob, n_top};
        a.history[slot * a.history_stride + a.len[j]] = token;
    }
}

/* ---- scratch: arrived [max_rows], parts, chunk_max --------------------------------------------
 */

int chunks_of(int vocab)
{
    return (vocab + CHUNK - 1) / CHUNK;
}

size_t arrived_bytes(int max_rows)
{
    return ((size_t)max_rows * sizeof(unsigned) + 255) / 256 * 256;
}

size_t parts_bytes(int max_rows)
{
    return (size_t)max_rows * MAX_SPLITS * sizeof(part);
}

} // namespace

size_t bgk_sample_scratch(int max_rows, int vocab)
{
    return arrived_bytes(max_rows) + parts_bytes(max_rows) +
           (size_t)max_rows * (size_t)chunks_of(vocab) * sizeof(float);
}

cudaError_t bgk_sample(const bgk_sample_args *a, cudaStream_t stream)
{
    if (a->n_rows < 0 || a->n_rows > a->max_rows || a->n_rows > 65535 || a->vocab < 1 ||
        a->vocab > 1 << 21 || !a->logits || !a->scratch)
        return cudaErrorInvalidValue;
    if (!a->n_rows) return cudaSuccess;
    char *at = (char *)a->scratch;
    unsigned *arrived = (unsigned *)at;
    part *parts = (part *)(at + arrived_bytes(a->max_rows));
    float *chunk_max = (float *)((char *)parts + parts_bytes(a->max_rows));
    const int n_chunks = chunks_of(a->vocab);
    const dim3 slices((unsigned)((a->vocab + SLICE - 1) / SLICE), (unsigned)a->n_rows);
    const cudaError_t e =
        launch_after(scan_rows, slices, dim3(SCAN_THREADS), 0, stream, *a, chunk_max, n_chunks);
    if (e != cudaSuccess) return e;
    int splits = WANTED_BLOCKS / a->n_rows;
    splits = splits > MAX_SPLITS ? MAX_SPLITS : splits;
    splits = splits > (n_chunks + WARPS - 1) / WARPS ? (n_chunks + WARPS - 1) / WARPS : splits;
    splits = splits < 1 ? 1 : splits;
    return launch_after(sample_rows, dim3((unsigned)splits, (unsigned)a->n_rows), dim3(THREADS), 0,
                        stream, *a, (const float *)chunk_max, n_chunks, parts, arrived);
}
