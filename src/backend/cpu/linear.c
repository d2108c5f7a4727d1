#include "backend/cpu/linear.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/cpu/linear_repack.h"
#include "backend/cpu/linear_run.h"

enum {
    ALIGN = 64,
    HUGE = 2 << 20,
    SOLO_MACS = 1 << 16,  /* below this the other threads are not worth waking */
    SOLO_QUANT = 1 << 13, /* values that the caller quantises alone, sparing a barrier */
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
static void share_groups(const bg_linear *l, const lin_part *p, int i, int of, int64_t *first,
                         int64_t *last)
{
    const int64_t begin = share(l->n_groups, i, of) - p->group0;
    const int64_t end = share(l->n_groups, i + 1, of) - p->group0;
    *first = begin > 0 ? begin : 0;
    *last = end < p->n_groups ? end : p->n_groups;
}

static int64_t rows_of_group(const lin_part *p, int64_t g)
{
    const int64_t left = p->n_rows - g % p->block_groups * LIN_ROWS;
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
        lin_part *p = &job->l->parts[i];
        const bg_linear_part *s = &job->spec->parts[i];
        const size_t src_bytes = bg_qtype_row_bytes(p->type, s->k_total);
        const uint8_t *src = (const uint8_t *)s->data + bg_qtype_row_bytes(p->type, s->col0);
        int64_t first, last;
        share_groups(job->l, p, thread, n_threads, &first, &last);
        for (int64_t g = first; g < last; g++) {
            const int64_t n = rows_of_group(p, g), block = g / p->block_groups;
            const uint8_t *from_block = src + block * job->spec->block_bytes;
            uint8_t *dst = p->data + (size_t)g * p->group_bytes;
            if (p->format != LIN_RAW && n < LIN_ROWS) memset(dst, 0, p->group_bytes);
            for (int r = 0; r < n; r++) {
                const int64_t row = g % p->block_groups * LIN_ROWS + r;
                const uint8_t *from = from_block + (size_t)(s->row0 + row) * src_bytes;
                if (p->format == LIN_RAW)
                    memcpy(dst + (size_t)r * p->row_bytes, from, p->row_bytes);
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
    if (spec->n_blocks < 0 || (spec->n_blocks && spec->n_parts > 1))
        return bg_fail(err, BG_ARG, "%s: %d blocks of %d parts", spec->name, spec->n_blocks,
                       spec->n_parts);
    for (int i = 0; i < spec->n_parts; i++) {
        st = check_part(spec, i, err);
        if (st) return st;
    }
    bg_linear *l = calloc(1, sizeof *l);
    if (!l) return bg_fail(err, BG_NOMEM, "%s: out of memory", spec->name);
    l->n_cols = spec->parts[0].n_cols;
    l->n_blocks = spec->n_blocks ? spec->n_blocks : 1;
    l->x_stride = spec->x_stride;
    l->n_parts = spec->n_parts;
    l->isa = isa_kernels(isa);
    l->bytes = sizeof *l;
    for (int i = 0; i < spec->n_parts; i++) {
        lin_part *p = &l->parts[i];
        const bg_linear_part *s = &spec->parts[i];
        p->type = s->type;
        p->n_rows = s->n_rows;
        p->block_groups = (s->n_rows + LIN_ROWS - 1) / LIN_ROWS;
        p->n_groups = p->block_groups * l->n_blocks;
        p->col0 = l->n_rows;
        p->group0 = l->n_groups;
        p->format = lin_format_of(p->type);
        p->integer = compute == BG_COMPUTE_NATIVE && l->isa->tile[p->format];
        if (p->integer) l->kinds.integer = l->kinds.starts[lin_formats[p->format].start] = true;
        if (p->integer && p->format == LIN_Q2_K) l->kinds.ds_halves = true;
        p->row_bytes = bg_qtype_row_bytes(p->type, l->n_cols);
        p->group_bytes = LIN_ROWS * p->row_bytes;
        if (p->format != LIN_RAW) {
            p->group_bytes = lin_group_bytes(p->format, l->n_cols);
            p->scales_offset = lin_quants_bytes(p->format, l->n_cols);
        }
        l->n_rows += p->n_rows * l->n_blocks;
        l->n_groups += p->n_groups;
        const size_t bytes = (size_t)p->n_groups * p->group_bytes;
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
            for (int block = 0; block < l->n_blocks; block++)
                memcpy(p->bias + block * p->block_groups * LIN_ROWS, s->bias + block * s->n_rows,
                       (size_t)s->n_rows * sizeof *p->bias);
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

int64_t bg_cpu_linear_reach(const bg_linear *l)
{
    return (l->n_blocks - 1) * l->x_stride + l->n_cols;
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

void lin_add_kinds(lin_kinds *to, const lin_kinds *more)
{
    to->integer |= more->integer;
    to->ds_halves |= more->ds_halves;
    for (int s = 0; s < LIN_STARTS; s++)
        to->starts[s] |= more->starts[s];
}

size_t lin_lay_out(const lin_kinds *k, int64_t n_cols, lin_acts *a, uintptr_t base, int64_t n_rows)
{
    const size_t n = (size_t)n_rows * (size_t)(n_cols / LIN_BLOCK);
    size_t at = 0;
    memset(a, 0, sizeof *a);
    if (!k->integer) return 0;
    a->q = (int8_t *)base;
    at += pad(n * LIN_BLOCK);
    a->d = (float *)(base + at);
    at += pad(n * sizeof(float));
    a->ds = (float *)(base + at);
    at += pad(n * sizeof(float));
    if (k->ds_halves) {
        a->ds_halves = (float *)(base + at);
        at += pad(2 * n * sizeof(float));
    }
    for (int s = LIN_START_NONE + 1; s < LIN_STARTS; s++) {
        if (!k->starts[s]) continue;
        a->start[s] = (int32_t *)(base + at);
        at += pad(n * sizeof(int32_t) * (is_halves(s) ? 2 : 1));
    }
    return at;
}

lin_acts lin_tile_acts(const lin_acts *all, int64_t n_cols, int64_t t)
{
    const int64_t at = t * (n_cols / LIN_BLOCK);
    lin_acts a = {.q = all->q + at * LIN_BLOCK, .d = all->d + at, .ds = all->ds + at};
    if (all->ds_halves) a.ds_halves = all->ds_halves + 2 * at;
    for (int s = 0; s < LIN_STARTS; s++)
        if (all->start[s]) a.start[s] = all->start[s] + at * (is_halves(s) ? 2 : 1);
    return a;
}

size_t bg_cpu_linear_scratch(const bg_linear *l, int64_t max_rows)
{
    lin_acts a;
    return lin_lay_out(&l->kinds, l->n_cols, &a, 0, max_rows * l->n_blocks);
}

/* ---- running -----------------------------------------------------------------------------------
 */

static int tile_width(int n_rows, int t)
{
    return n_rows - t < LIN_MAX_TILE ? n_rows - t : LIN_MAX_TILE;
}

/* Columns [c0, c0 + n) of group g as float, transposed: panel[k][r]. */
static void unpack(const bg_linear *l, float (*panel)[LIN_ROWS], const lin_part *p, int64_t g,
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
            const size_t at = (size_t)g * p->group_bytes + (size_t)r * p->row_bytes;
            bg_dequant_row(p->type, p->data + at + skip, row, n);
        } else {
            memset(row, 0, sizeof row);
        }
        for (int k = 0; k < n; k++)
            panel[k][r] = row[k];
    }
}

/* Each chunk of columns is summed from 0 and then added to out, which starts as the bias: the order
 * of the sums is a matter of the columns alone, and short chains keep the rounding error small. */
static void run_float(const bg_linear *l, const lin_part *p, int64_t g, float *out,
                      int64_t out_stride, const float *x, int64_t x_stride, int n_rows)
{
    _Alignas(ALIGN) float panel[LIN_CHUNK][LIN_ROWS];
    _Alignas(ALIGN) float sum[LIN_MAX_TILE][LIN_ROWS];
    const int64_t n_out = rows_of_group(p, g);
    for (int t = 0; t < n_rows; t++)
        for (int64_t r = 0; r < n_out; r++)
            out[t * out_stride + r] = p->bias ? p->bias[g * LIN_ROWS + r] : 0.0f;
    for (int64_t c = 0; c < l->n_cols; c += LIN_CHUNK) {
        const int64_t left = l->n_cols - c;
        const int n = left < LIN_CHUNK ? (int)left : LIN_CHUNK;
        unpack(l, panel, p, g, c, n);
        for (int t = 0; t < n_rows; t += LIN_MAX_TILE) {
            const int w = tile_width(n_rows, t);
            l->isa->fma(sum, (const float(*)[LIN_ROWS])panel, x + t * x_stride + c, x_stride, w, n);
            for (int i = 0; i < w; i++) {
                float *o = out + (t + i) * out_stride;
                for (int64_t r = 0; r < n_out; r++)
                    o[r] += sum[i][r];
            }
        }
    }
}

static void run_integer(const bg_linear *l, const lin_part *p, int64_t g, float *out,
                        int64_t out_stride, const lin_acts *all, int64_t acts_row, int n_rows)
{
    _Alignas(ALIGN) static const float no_bias[LIN_ROWS];
    const uint8_t *group = p->data + (size_t)g * p->group_bytes;
    const lin_start start = lin_formats[p->format].start;
    lin_tile a = {.quants = group,
                  .scales = group + p->scales_offset,
                  .n_blocks = l->n_cols / LIN_BLOCK,
                  .out_stride = out_stride,
                  .n_rows = (int)rows_of_group(p, g),
                  .bias = p->bias ? p->bias + g * LIN_ROWS : no_bias};
    for (int t = 0; t < n_rows; t += LIN_MAX_TILE) {
        const lin_acts acts = lin_tile_acts(all, l->n_cols, acts_row + t);
        a.q = acts.q;
        a.d = acts.d;
        a.ds = acts.ds;
        a.ds_halves = acts.ds_halves;
        a.start = acts.start[start];
        a.out = out + t * out_stride;
        l->isa->tile[p->format](&a, tile_width(n_rows, t));
    }
}

void lin_run_group(const bg_linear *l, const lin_part *p, int64_t g, float *out, int64_t out_stride,
                   const lin_acts *acts, int64_t acts_row, const float *x, int64_t x_stride,
                   int n_rows)
{
    if (p->integer)
        run_integer(l, p, g, out, out_stride, acts, acts_row, n_rows);
    else
        run_float(l, p, g, out, out_stride, x, x_stride, n_rows);
}

struct run_job {
    const bg_linear *l;
    float *out;
    int64_t out_stride;
    const float *x;
    int64_t x_stride;
    int n_rows;
    bg_pool *pool;
    lin_acts acts;  /* those of block 0 in n_rows rows, then block 1's, ... */
    bool quantised; /* acts are ready */
};

/* Thread i's share: a range of the blocks of all tiles, so that few tokens are shared out too and
 * threads do not write to the same cache lines. */
static void quantize(const struct run_job *job, int thread, int n_threads)
{
    const bg_linear *l = job->l;
    const int64_t n_blocks = l->n_cols / LIN_BLOCK;
    const int64_t n_tiles = (job->n_rows + LIN_MAX_TILE - 1) / LIN_MAX_TILE,
                  all = n_tiles * l->n_blocks;
    const int64_t begin = share(all * n_blocks, thread, n_threads);
    const int64_t end = share(all * n_blocks, thread + 1, n_threads);
    for (int64_t at = begin; at < end;) {
        const int64_t head = at / n_blocks / n_tiles;
        const int t = (int)(at / n_blocks % n_tiles) * LIN_MAX_TILE;
        const int64_t b0 = at % n_blocks;
        const int64_t b1 = n_blocks - b0 < end - at ? n_blocks : b0 + (end - at);
        const lin_acts a = lin_tile_acts(&job->acts, l->n_cols, head * job->n_rows + t);
        l->isa->quantize(&a, job->x + t * job->x_stride + head * l->x_stride + b0 * LIN_BLOCK,
                         job->x_stride, tile_width(job->n_rows, t), b0, b1);
        at += b1 - b0;
    }
}

static void run_thread(void *ctx, int thread, int n_threads)
{
    const struct run_job *job = ctx;
    const bg_linear *l = job->l;
    if (l->kinds.integer && !job->quantised) {
        quantize(job, thread, n_threads);
        if (n_threads > 1) bg_pool_barrier(job->pool);
    }
    for (int i = 0; i < l->n_parts; i++) {
        const lin_part *p = &l->parts[i];
        int64_t first, last;
        share_groups(l, p, thread, n_threads, &first, &last);
        for (int64_t g = first; g < last; g++) {
            const int64_t block = g / p->block_groups;
            float *out = job->out + p->col0 + block * p->n_rows + g % p->block_groups * LIN_ROWS;
            lin_run_group(l, p, g, out, job->out_stride, &job->acts, block * job->n_rows,
                          job->x + block * l->x_stride, job->x_stride, job->n_rows);
        }
    }
}

void bg_cpu_linear_run(const bg_linear *l, float *out, int64_t out_stride, const float *x,
                       int64_t x_stride, int n_rows, void *scratch, bg_pool *pool)
{
    if (n_rows <= 0 || !l->n_rows) return;
    struct run_job job = {l, out, out_stride, x, x_stride, n_rows, pool, {0}, false};
    if (l->kinds.integer)
        lin_lay_out(&l->kinds, l->n_cols, &job.acts, (uintptr_t)scratch,
                    (int64_t)n_rows * l->n_blocks);
    if (l->n_rows * (l->n_cols + 1) <= SOLO_MACS / n_rows) {
        run_thread(&job, 0, 1);
        return;
    }
    if (l->kinds.integer && l->n_cols * l->n_blocks <= SOLO_QUANT / n_rows) {
        quantize(&job, 0, 1);
        job.quantised = true;
    }
    bg_pool_run(pool, run_thread, &job);
}
