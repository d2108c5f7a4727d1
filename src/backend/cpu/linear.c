#include "backend/cpu/linear.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/linear_repack.h"

enum {
    ALIGN = 64,
    HUGE = 2 << 20,
    SOLO_MACS = 1 << 16,  /* below this the other threads are not worth waking */
    SOLO_QUANT = 1 << 13, /* values that the caller quantises alone, sparing a barrier */
};

struct part {
    uint32_t type;
    lin_format format;
    bool integer; /* runs on quantised activations */
    int64_t n_rows, n_groups;
    int64_t col0;         /* first output column */
    int64_t group0;       /* number of the first group, over all parts */
    size_t row_bytes;     /* LIN_RAW */
    size_t group_bytes;   /* the other formats */
    size_t scales_offset; /* in a group */
    uint8_t *data;
    float *bias; /* n_groups * LIN_ROWS values, padded with 0; NULL: none */
};

struct bg_linear {
    int64_t n_rows, n_cols, n_groups;
    int n_parts;
    struct part parts[4];
    const lin_isa *isa;
    uint64_t bytes;
    bool integer;            /* some part is */
    bool ds_halves;          /* some part needs them */
    bool starts[LIN_STARTS]; /* which kinds the parts need */
};

/* ---- making ------------------------------------------------------------------------------------
 */

static const lin_isa *isa_kernels(bg_isa isa)
{
    switch (isa) {
#if defined(__x86_64__)
    case BG_ISA_AVX512_VNNI:
        return lin_isa_vnni();
    case BG_ISA_AVX512:
        return lin_isa_avx512();
    case BG_ISA_AVX2:
        return lin_isa_avx2();
#endif
    default:
        return lin_isa_plain();
    }
}

static void *alloc_aligned(size_t n)
{
    const size_t align = n >= HUGE ? HUGE : ALIGN;
    n = (n + ALIGN - 1) / ALIGN * ALIGN;
    void *p = NULL;
    if (posix_memalign(&p, align, n ? n : ALIGN) != 0) return NULL;
    if (n >= HUGE) madvise(p, n, MADV_HUGEPAGE); /* only a hint */
    return p;
}

static bg_status check_part(const bg_linear_spec *spec, int i, bg_error *err)
{
    const bg_linear_part *p = &spec->parts[i];
    const char *name = p->name ? p->name : spec->name;
    const bg_qtype_info *q = bg_qtype_get(p->type);
    if (!q->name || !q->dequant)
        return bg_fail(err, BG_ARG, "tensor %s: no kernel for type %s (%u)", name,
                       q->name ? q->name : "?", p->type);
    const int64_t b = q->block_values;
    if (p->k_total < 0 || p->n_total < 0 || p->row0 < 0 || p->n_rows < 0 || p->col0 < 0 ||
        p->n_cols < 0 || p->row0 > p->n_total - p->n_rows || p->col0 > p->k_total - p->n_cols)
        return bg_fail(err, BG_ARG,
                       "tensor %s: rows %lld+%lld of %lld, columns %lld+%lld of %lld: not inside",
                       name, (long long)p->row0, (long long)p->n_rows, (long long)p->n_total,
                       (long long)p->col0, (long long)p->n_cols, (long long)p->k_total);
    if (p->k_total % b || p->col0 % b || p->n_cols % b)
        return bg_fail(
            err, BG_ARG,
            "tensor %s: columns %lld+%lld of %lld are not multiples of the %s block, %lld", name,
            (long long)p->col0, (long long)p->n_cols, (long long)p->k_total, q->name, (long long)b);
    if (p->n_cols != spec->parts[0].n_cols)
        return bg_fail(err, BG_ARG, "tensor %s: %lld columns, %lld in the first part of %s", name,
                       (long long)p->n_cols, (long long)spec->parts[0].n_cols, spec->name);
    if (!p->data && p->n_rows && p->n_cols) return bg_fail(err, BG_ARG, "tensor %s: no data", name);
    return BG_OK;
}

/* The share of thread i in n things, in order. */
static int64_t share(int64_t n, int i, int of)
{
    return n * i / of;
}

/* The groups [*first, *last) of part p that are thread i's: the same when repacking as when
 * running, so that each thread's weights lie near it. */
static void share_groups(const bg_linear *l, const struct part *p, int i, int of, int64_t *first,
                         int64_t *last)
{
    const int64_t begin = share(l->n_groups, i, of) - p->group0;
    const int64_t end = share(l->n_groups, i + 1, of) - p->group0;
    *first = begin > 0 ? begin : 0;
    *last = end < p->n_groups ? end : p->n_groups;
}

static int64_t rows_of_group(const struct part *p, int64_t g)
{
    const int64_t left = p->n_rows - g * LIN_ROWS;
    return left < LIN_ROWS ? left : LIN_ROWS;
}

struct repack_job {
    bg_linear *l;
    const bg_linear_spec *spec;
};

static void repack_thread(void *ctx, int thread, int n_threads)
{
    const struct repack_job *job = ctx;
    const int64_t n_cols = job->l->n_cols;
    for (int i = 0; i < job->l->n_parts; i++) {
        struct part *p = &job->l->parts[i];
        const bg_linear_part *s = &job->spec->parts[i];
        const size_t src_bytes = bg_qtype_row_bytes(p->type, s->k_total);
        const uint8_t *src = (const uint8_t *)s->data + bg_qtype_row_bytes(p->type, s->col0);
        int64_t first, last;
        share_groups(job->l, p, thread, n_threads, &first, &last);
        for (int64_t g = first; g < last; g++) {
            const int64_t n = rows_of_group(p, g);
            uint8_t *dst = p->data + (size_t)g * p->group_bytes;
            if (p->format != LIN_RAW && n < LIN_ROWS) memset(dst, 0, p->group_bytes);
            for (int r = 0; r < n; r++) {
                const int64_t row = g * LIN_ROWS + r;
                const uint8_t *from = src + (size_t)(s->row0 + row) * src_bytes;
                if (p->format == LIN_RAW)
                    memcpy(p->data + (size_t)row * p->row_bytes, from, p->row_bytes);
                else
                    lin_repack_row(p->format, dst, r, from, n_cols);
            }
        }
    }
}

bg_status bg_cpu_linear_new(bg_linear **linear, const bg_linear_spec *spec, bg_compute compute,
                            bg_isa isa, bg_pool *pool, bg_error *err)
{
    bg_status st = BG_OK;
    *linear = NULL;
    if (spec->n_parts < 1 || spec->n_parts > 4)
        return bg_fail(err, BG_ARG, "%s: %d parts, 1 to 4 are allowed", spec->name, spec->n_parts);
    for (int i = 0; i < spec->n_parts; i++) {
        st = check_part(spec, i, err);
        if (st) return st;
    }
    bg_linear *l = calloc(1, sizeof *l);
    if (!l) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    l->n_cols = spec->parts[0].n_cols;
    l->n_parts = spec->n_parts;
    l->isa = isa_kernels(isa);
    l->bytes = sizeof *l;
    for (int i = 0; i < spec->n_parts; i++) {
        struct part *p = &l->parts[i];
        const bg_linear_part *s = &spec->parts[i];
        p->type = s->type;
        p->n_rows = s->n_rows;
        p->n_groups = (s->n_rows + LIN_ROWS - 1) / LIN_ROWS;
        p->col0 = l->n_rows;
        p->group0 = l->n_groups;
        p->format = lin_format_of(p->type);
        p->integer = compute == BG_COMPUTE_NATIVE && l->isa->tile[p->format];
        if (p->integer) l->integer = l->starts[lin_formats[p->format].start] = true;
        if (p->integer && p->format == LIN_Q2_K) l->ds_halves = true;
        p->row_bytes = bg_qtype_row_bytes(p->type, l->n_cols);
        if (p->format != LIN_RAW) {
            p->group_bytes = lin_group_bytes(p->format, l->n_cols);
            p->scales_offset = lin_quants_bytes(p->format, l->n_cols);
        }
        l->n_rows += p->n_rows;
        l->n_groups += p->n_groups;
        const size_t bytes = p->format == LIN_RAW ? (size_t)p->n_rows * p->row_bytes
                                                  : (size_t)p->n_groups * p->group_bytes;
        p->data = alloc_aligned(bytes);
        const size_t bias_n = (size_t)p->n_groups * LIN_ROWS;
        if (s->bias && s->n_rows) p->bias = alloc_aligned(bias_n * sizeof *p->bias);
        if (!p->data || (s->bias && s->n_rows && !p->bias)) {
            st = bg_fail(err, BG_NOMEM, "tensor %s: out of memory (%zu bytes)",
                         s->name ? s->name : spec->name, bytes);
            goto out;
        }
        if (p->bias) {
            memset(p->bias, 0, bias_n * sizeof *p->bias);
            memcpy(p->bias, s->bias, (size_t)s->n_rows * sizeof *p->bias);
        }
        l->bytes += bytes + (p->bias ? bias_n * sizeof *p->bias : 0);
    }
    struct repack_job job = {l, spec};
    if (l->n_cols) bg_pool_run(pool, repack_thread, &job);
    *linear = l;
    l = NULL;
out:
    bg_cpu_linear_free(l);
    return st;
}

void bg_cpu_linear_free(bg_linear *l)
{
    if (!l) return;
    for (int i = 0; i < l->n_parts; i++) {
        free(l->parts[i].data);
        free(l->parts[i].bias);
    }
    free(l);
}

int64_t bg_cpu_linear_rows(const bg_linear *l)
{
    return l->n_rows;
}

int64_t bg_cpu_linear_cols(const bg_linear *l)
{
    return l->n_cols;
}

uint64_t bg_cpu_linear_bytes(const bg_linear *l)
{
    return l->bytes;
}

/* ---- quantised activations ---------------------------------------------------------------------
 */

static size_t pad(size_t n)
{
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static bool is_halves(int start)
{
    return start == LIN_START_32_HALVES || start == LIN_START_4_HALVES;
}

/* Lays the activations of n_rows rows out in memory at base; returns the bytes they take. */
static size_t lay_out(const bg_linear *l, lin_acts *a, uintptr_t base, int64_t n_rows)
{
    const size_t n = (size_t)n_rows * (size_t)(l->n_cols / LIN_BLOCK);
    size_t at = 0;
    memset(a, 0, sizeof *a);
    if (!l->integer) return 0;
    a->q = (int8_t *)base;
    at += pad(n * LIN_BLOCK);
    a->d = (float *)(base + at);
    at += pad(n * sizeof(float));
    a->ds = (float *)(base + at);
    at += pad(n * sizeof(float));
    if (l->ds_halves) {
        a->ds_halves = (float *)(base + at);
        at += pad(2 * n * sizeof(float));
    }
    for (int s = LIN_START_NONE + 1; s < LIN_STARTS; s++) {
        if (!l->starts[s]) continue;
        a->start[s] = (int32_t *)(base + at);
        at += pad(n * sizeof(int32_t) * (is_halves(s) ? 2 : 1));
    }
    return at;
}

/* The part of them that belongs to the tile from row t on. */
static lin_acts tile_acts(const bg_linear *l, const lin_acts *all, int64_t t)
{
    const int64_t at = t * (l->n_cols / LIN_BLOCK);
    lin_acts a = {.q = all->q + at * LIN_BLOCK, .d = all->d + at, .ds = all->ds + at};
    if (all->ds_halves) a.ds_halves = all->ds_halves + 2 * at;
    for (int s = 0; s < LIN_STARTS; s++)
        if (all->start[s]) a.start[s] = all->start[s] + at * (is_halves(s) ? 2 : 1);
    return a;
}

size_t bg_cpu_linear_scratch(const bg_linear *l, int64_t max_rows)
{
    lin_acts a;
    return lay_out(l, &a, 0, max_rows);
}

/* ---- running -----------------------------------------------------------------------------------
 */

struct run_job {
    const bg_linear *l;
    float *out;
    int64_t out_stride;
    const float *x;
    int64_t x_stride;
    int n_rows;
    bg_pool *pool;
    lin_acts acts;
    bool quantised; /* acts are ready */
};

static int tile_width(const struct run_job *job, int t)
{
    return job->n_rows - t < LIN_MAX_TILE ? job->n_rows - t : LIN_MAX_TILE;
}

/* Thread i's share: a range of the blocks of all tiles, so that few tokens are shared out too and
 * threads do not write to the same cache lines. */
static void quantize(const struct run_job *job, int thread, int n_threads)
{
    const bg_linear *l = job->l;
    const int64_t n_blocks = l->n_cols / LIN_BLOCK;
    const int64_t n_tiles = (job->n_rows + LIN_MAX_TILE - 1) / LIN_MAX_TILE;
    const int64_t begin = share(n_tiles * n_blocks, thread, n_threads);
    const int64_t end = share(n_tiles * n_blocks, thread + 1, n_threads);
    for (int64_t at = begin; at < end;) {
        const int t = (int)(at / n_blocks) * LIN_MAX_TILE;
        const int64_t b0 = at % n_blocks;
        const int64_t b1 = n_blocks - b0 < end - at ? n_blocks : b0 + (end - at);
        const lin_acts a = tile_acts(l, &job->acts, t);
        l->isa->quantize(&a, job->x + t * job->x_stride + b0 * LIN_BLOCK, job->x_stride,
                         tile_width(job, t), b0, b1);
        at += b1 - b0;
    }
}

/* Rows of one group: out = bias, or 0. */
static void start_out(const struct run_job *job, const struct part *p, int64_t g)
{
    const int64_t r0 = g * LIN_ROWS;
    const int64_t n = p->n_rows - r0 < LIN_ROWS ? p->n_rows - r0 : LIN_ROWS;
    for (int t = 0; t < job->n_rows; t++) {
        float *o = job->out + t * job->out_stride + p->col0 + r0;
        for (int64_t r = 0; r < n; r++)
            o[r] = p->bias ? p->bias[r0 + r] : 0.0f;
    }
}

/* Columns [c0, c0 + n) of group g as float, transposed: panel[k][r]. */
static void unpack(const bg_linear *l, float (*panel)[LIN_ROWS], const struct part *p, int64_t g,
                   int64_t c0, int n)
{
    if (p->format != LIN_RAW) {
        const lin_format_info *f = &lin_formats[p->format];
        const uint8_t *group = p->data + (size_t)g * p->group_bytes;
        l->isa->unpack(panel, p->format, group + c0 * f->quant_bytes / LIN_BLOCK,
                       group + p->scales_offset + c0 / f->scale_cols * f->scale_bytes, n);
        return;
    }
    float row[LIN_CHUNK];
    const size_t skip = bg_qtype_row_bytes(p->type, c0);
    const int64_t n_rows = rows_of_group(p, g);
    for (int r = 0; r < LIN_ROWS; r++) {
        if (r < n_rows) {
            const size_t at = (size_t)(g * LIN_ROWS + r) * p->row_bytes;
            bg_dequant_row(p->type, p->data + at + skip, row, n);
        } else {
            memset(row, 0, sizeof row);
        }
        for (int k = 0; k < n; k++)
            panel[k][r] = row[k];
    }
}

/* Each chunk of columns is summed from 0 and then added to out: the order of the sums is a matter
 * of the columns alone, and short chains keep the rounding error small. */
static void run_float(const struct run_job *job, const struct part *p, int64_t g)
{
    _Alignas(ALIGN) float panel[LIN_CHUNK][LIN_ROWS];
    _Alignas(ALIGN) float sum[LIN_MAX_TILE][LIN_ROWS];
    const bg_linear *l = job->l;
    const int64_t n_out = rows_of_group(p, g);
    start_out(job, p, g);
    for (int64_t c = 0; c < l->n_cols; c += LIN_CHUNK) {
        const int64_t left = l->n_cols - c;
        const int n = left < LIN_CHUNK ? (int)left : LIN_CHUNK;
        unpack(l, panel, p, g, c, n);
        for (int t = 0; t < job->n_rows; t += LIN_MAX_TILE) {
            const int w = tile_width(job, t);
            l->isa->fma(sum, (const float(*)[LIN_ROWS])panel, job->x + t * job->x_stride + c,
                        job->x_stride, w, n);
            for (int i = 0; i < w; i++) {
                float *o = job->out + (t + i) * job->out_stride + p->col0 + g * LIN_ROWS;
                for (int64_t r = 0; r < n_out; r++)
                    o[r] += sum[i][r];
            }
        }
    }
}

static void run_integer(const struct run_job *job, const struct part *p, int64_t g)
{
    _Alignas(ALIGN) static const float no_bias[LIN_ROWS];
    const bg_linear *l = job->l;
    const uint8_t *group = p->data + (size_t)g * p->group_bytes;
    const lin_start start = lin_formats[p->format].start;
    lin_tile a = {.quants = group,
                  .scales = group + p->scales_offset,
                  .n_blocks = l->n_cols / LIN_BLOCK,
                  .out_stride = job->out_stride,
                  .n_rows = (int)rows_of_group(p, g),
                  .bias = p->bias ? p->bias + g * LIN_ROWS : no_bias};
    for (int t = 0; t < job->n_rows; t += LIN_MAX_TILE) {
        const int w = tile_width(job, t);
        const lin_acts acts = tile_acts(l, &job->acts, t);
        a.q = acts.q;
        a.d = acts.d;
        a.ds = acts.ds;
        a.ds_halves = acts.ds_halves;
        a.start = acts.start[start];
        a.out = job->out + t * job->out_stride + p->col0 + g * LIN_ROWS;
        l->isa->tile[p->format](&a, w);
    }
}

static void run_thread(void *ctx, int thread, int n_threads)
{
    const struct run_job *job = ctx;
    const bg_linear *l = job->l;
    if (l->integer && !job->quantised) {
        quantize(job, thread, n_threads);
        if (n_threads > 1) bg_pool_barrier(job->pool);
    }
    for (int i = 0; i < l->n_parts; i++) {
        const struct part *p = &l->parts[i];
        int64_t first, last;
        share_groups(l, p, thread, n_threads, &first, &last);
        for (int64_t g = first; g < last; g++) {
            if (p->integer)
                run_integer(job, p, g);
            else
                run_float(job, p, g);
        }
    }
}

void bg_cpu_linear_run(const bg_linear *l, float *out, int64_t out_stride, const float *x,
                       int64_t x_stride, int n_rows, void *scratch, bg_pool *pool)
{
    if (n_rows <= 0 || !l->n_rows) return;
    struct run_job job = {l, out, out_stride, x, x_stride, n_rows, pool, {0}, false};
    if (l->integer) lay_out(l, &job.acts, (uintptr_t)scratch, n_rows);
    if (l->n_rows * (l->n_cols + 1) <= SOLO_MACS / n_rows) {
        run_thread(&job, 0, 1);
        return;
    }
    if (l->integer && l->n_cols <= SOLO_QUANT / n_rows) {
        quantize(&job, 0, 1);
        job.quantised = true;
    }
    bg_pool_run(pool, run_thread, &job);
}
