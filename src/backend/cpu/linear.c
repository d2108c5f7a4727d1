#include "backend/cpu/linear.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/linear_kernels.h"

enum {
    ALIGN = 64,
    HUGE = 2 << 20,
    SOLO_MACS = 1 << 16, /* below this the other threads are not worth waking */
};

struct part {
    uint32_t type;
    int64_t n_rows, n_groups;
    int64_t col0;   /* first output column */
    int64_t group0; /* of the first group, over all parts */
    size_t row_bytes;
    uint8_t *data;
    float *bias; /* n_groups * LIN_ROWS values, padded with 0; NULL: none */
};

struct bg_linear {
    int64_t n_rows, n_cols, n_groups;
    int n_parts;
    struct part parts[4];
    const lin_isa *isa;
    uint64_t bytes;
    bg_compute compute;
};

/* ---- making ------------------------------------------------------------------------------------
 */

static const lin_isa *isa_kernels(bg_isa isa)
{
    switch (isa) {
#if defined(__x86_64__)
    case BG_ISA_AVX512_VNNI:
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

struct repack_job {
    bg_linear *l;
    const bg_linear_spec *spec;
};

/* The share of thread i in n things, in order. */
static int64_t share(int64_t n, int i, int of)
{
    return n * i / of;
}

static void repack_thread(void *ctx, int thread, int n_threads)
{
    const struct repack_job *job = ctx;
    for (int i = 0; i < job->l->n_parts; i++) {
        struct part *p = &job->l->parts[i];
        const bg_linear_part *s = &job->spec->parts[i];
        const size_t src_bytes = bg_qtype_row_bytes(p->type, s->k_total);
        const uint8_t *src = (const uint8_t *)s->data + bg_qtype_row_bytes(p->type, s->col0);
        const int64_t end = share(p->n_rows, thread + 1, n_threads);
        for (int64_t r = share(p->n_rows, thread, n_threads); r < end; r++)
            memcpy(p->data + (size_t)r * p->row_bytes, src + (size_t)(s->row0 + r) * src_bytes,
                   p->row_bytes);
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
    l->compute = compute;
    l->bytes = sizeof *l;
    for (int i = 0; i < spec->n_parts; i++) {
        struct part *p = &l->parts[i];
        const bg_linear_part *s = &spec->parts[i];
        p->type = s->type;
        p->n_rows = s->n_rows;
        p->n_groups = (s->n_rows + LIN_ROWS - 1) / LIN_ROWS;
        p->col0 = l->n_rows;
        p->group0 = l->n_groups;
        p->row_bytes = bg_qtype_row_bytes(p->type, l->n_cols);
        l->n_rows += p->n_rows;
        l->n_groups += p->n_groups;
        const size_t bytes = (size_t)p->n_rows * p->row_bytes;
        p->data = alloc_aligned(bytes);
        const size_t bias_n = (size_t)p->n_groups * LIN_ROWS;
        if (s->bias && s->n_rows) p->bias = calloc(bias_n, sizeof *p->bias);
        if (!p->data || (s->bias && s->n_rows && !p->bias)) {
            st = bg_fail(err, BG_NOMEM, "tensor %s: out of memory (%zu bytes)",
                         s->name ? s->name : spec->name, bytes);
            goto out;
        }
        if (p->bias) memcpy(p->bias, s->bias, (size_t)s->n_rows * sizeof *p->bias);
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

size_t bg_cpu_linear_scratch(const bg_linear *l, int64_t max_rows)
{
    (void)l;
    (void)max_rows;
    return 0;
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
};

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

/* Columns [c0, c0 + n) of group g as float, transposed: panel[k][r]. Rows past the last are 0. */
static void unpack(float (*panel)[LIN_ROWS], const struct part *p, int64_t g, int64_t c0, int n)
{
    float row[LIN_CHUNK];
    const int64_t r0 = g * LIN_ROWS;
    const size_t skip = bg_qtype_row_bytes(p->type, c0);
    for (int r = 0; r < LIN_ROWS; r++) {
        if (r0 + r < p->n_rows)
            bg_dequant_row(p->type, p->data + (size_t)(r0 + r) * p->row_bytes + skip, row, n);
        else
            memset(row, 0, sizeof row);
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
    const int64_t r0 = g * LIN_ROWS;
    const int64_t n_out = p->n_rows - r0 < LIN_ROWS ? p->n_rows - r0 : LIN_ROWS;
    start_out(job, p, g);
    for (int64_t c = 0; c < job->l->n_cols; c += LIN_CHUNK) {
        const int64_t left = job->l->n_cols - c;
        const int n = left < LIN_CHUNK ? (int)left : LIN_CHUNK;
        unpack(panel, p, g, c, n);
        for (int t = 0; t < job->n_rows; t += LIN_MAX_TILE) {
            const int w = job->n_rows - t < LIN_MAX_TILE ? job->n_rows - t : LIN_MAX_TILE;
            job->l->isa->fma(sum, (const float(*)[LIN_ROWS])panel, job->x + t * job->x_stride + c,
                             job->x_stride, w, n);
            for (int i = 0; i < w; i++) {
                float *o = job->out + (t + i) * job->out_stride + p->col0 + r0;
                for (int64_t r = 0; r < n_out; r++)
                    o[r] += sum[i][r];
            }
        }
    }
}

static void run_thread(void *ctx, int thread, int n_threads)
{
    const struct run_job *job = ctx;
    const bg_linear *l = job->l;
    const int64_t begin = share(l->n_groups, thread, n_threads);
    const int64_t end = share(l->n_groups, thread + 1, n_threads);
    for (int i = 0; i < l->n_parts; i++) {
        const struct part *p = &l->parts[i];
        const int64_t first = begin > p->group0 ? begin - p->group0 : 0;
        const int64_t last = end - p->group0 < p->n_groups ? end - p->group0 : p->n_groups;
        for (int64_t g = first; g < last; g++)
            run_float(job, p, g);
    }
}

void bg_cpu_linear_run(const bg_linear *l, float *out, int64_t out_stride, const float *x,
                       int64_t x_stride, int n_rows, void *scratch, bg_pool *pool)
{
    (void)scratch;
    if (n_rows <= 0 || !l->n_rows) return;
    struct run_job job = {l, out, out_stride, x, x_stride, n_rows, pool};
    if (l->n_rows * (l->n_cols + 1) <= SOLO_MACS / n_rows)
        run_thread(&job, 0, 1);
    else
        bg_pool_run(pool, run_thread, &job);
}
