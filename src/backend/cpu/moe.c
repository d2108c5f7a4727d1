#include "backend/cpu/moe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/linear_run.h"
#include "gguf/gguf.h"

enum {
    ROWS = 512,           /* tokens worked on together at most */
    MID_COLS = 64,        /* of an expert's inner width: an item of the first half */
    OUT_COLS = 128,       /* of d_model: an item of the second half */
    SUM_COLS = 512,       /* of a row of out */
    SOLO_MACS = 1 << 16,  /* below this the other threads are not worth waking */
    SOLO_QUANT = 1 << 13, /* values that the caller quantises alone, sparing two barriers */
    ALIGN = 64,
};

typedef struct ffn {
    bg_linear *gate, *up, *down; /* a block an expert */
} ffn;

struct bg_experts {
    int n_experts, n_used, n_shared;
    int64_t d_model, d_ff; /* of this rank */
    bg_act_fn fn;
    ffn routed, shared; /* the latter's are NULL without shared experts */
    lin_kinds in, mid;  /* quantised activations: of h, and of what goes to down */
    bool gather;        /* the routed experts read h as it is: rows are copied together */
    bool keep_mid;      /* some down reads its input as it is */
};

/* ---- making ------------------------------------------------------------------------------------
 */

/* One linear of n blocks, block_bytes apart. */
static bg_status make(bg_linear **l, const char *name, const bg_linear_part *part, int n,
                      size_t block_bytes, const float *bias, bg_compute compute, bg_isa isa,
                      bg_pool *pool, bg_error *err)
{
    bg_linear_spec spec = {.name = name,
                           .n_parts = 1,
                           .parts = {*part},
                           .n_blocks = n,
                           .block_bytes = (int64_t)block_bytes};
    spec.parts[0].bias = bias;
    return bg_cpu_linear_new(l, &spec, compute, isa, pool, err);
}

static bool integer(const bg_linear *l)
{
    return l->parts[0].integer;
}

static bg_status check_shapes(const bg_experts_spec *s, bg_error *err)
{
    const int64_t f = s->gate.n_rows, d = s->gate.n_cols;
    if (s->n_experts < 1 || s->n_used < 1 || s->n_used > s->n_experts || s->n_shared < 0 ||
        s->fn < BG_SILU || s->fn > BG_SWIGLU_CLAMP)
        return bg_fail(err, BG_ARG, "%s: %d of %d experts, %d shared, function %d", s->name,
                       s->n_used, s->n_experts, s->n_shared, s->fn);
    if (s->up.n_rows != f || s->up.n_cols != d || s->down.n_cols != f || s->down.n_rows != d)
        return bg_fail(
            err, BG_ARG, "%s: gate [%lld, %lld], up [%lld, %lld] and down [%lld, %lld] are no FFN",
            s->name, (long long)f, (long long)d, (long long)s->up.n_rows, (long long)s->up.n_cols,
            (long long)s->down.n_rows, (long long)s->down.n_cols);
    if (!s->n_shared) return BG_OK;
    const bg_linear_part *gate = &s->shared_gate, *up = &s->shared_up, *down = &s->shared_down;
    const int64_t last = (s->n_shared - 1) * s->shared_step;
    const int block = bg_qtype_get(down->type)->block_values;
    if (gate->n_rows != f || gate->n_cols != d || up->n_rows != f || up->n_cols != d ||
        down->n_cols != f || down->n_rows != d)
        return bg_fail(err, BG_ARG, "%s: shared experts of another shape", s->name);
    if (s->shared_step < 0 || gate->row0 + last > gate->n_total - f ||
        up->row0 + last > up->n_total - f || down->col0 + last > down->k_total - f || block < 1 ||
        s->shared_step % block)
        return bg_fail(err, BG_ARG, "%s: %d shared experts, %lld apart: not inside", s->name,
                       s->n_shared, (long long)s->shared_step);
    return BG_OK;
}

bg_status bg_cpu_experts_new(bg_experts **experts, const bg_experts_spec *s, bg_compute compute,
                             bg_isa isa, bg_pool *pool, bg_error *err)
{
    *experts = NULL;
    bg_status st = check_shapes(s, err);
    if (st) return st;
    bg_experts *e = calloc(1, sizeof *e);
    if (!e) return bg_fail(err, BG_NOMEM, "%s: out of memory", s->name);
    e->n_experts = s->n_experts;
    e->n_used = s->n_used;
    e->n_shared = s->n_shared;
    e->d_model = s->gate.n_cols;
    e->d_ff = s->gate.n_rows;
    e->fn = (bg_act_fn)s->fn;
    st = make(&e->routed.gate, s->name, &s->gate, s->n_experts, s->gate_stride, s->gate_bias,
              compute, isa, pool, err);
    if (!st)
        st = make(&e->routed.up, s->name, &s->up, s->n_experts, s->up_stride, s->up_bias, compute,
                  isa, pool, err);
    if (!st)
        st = make(&e->routed.down, s->name, &s->down, s->n_experts, s->down_stride, s->down_bias,
                  compute, isa, pool, err);
    if (!st && s->n_shared) {
        const int n = s->n_shared;
        const bg_linear_part *gate = &s->shared_gate, *up = &s->shared_up, *down = &s->shared_down;
        const size_t step = (size_t)s->shared_step;
        st = make(&e->shared.gate, s->name, gate, n,
                  step * bg_qtype_row_bytes(gate->type, gate->k_total), NULL, compute, isa, pool,
                  err);
        if (!st)
            st = make(&e->shared.up, s->name, up, n,
                      step * bg_qtype_row_bytes(up->type, up->k_total), NULL, compute, isa, pool,
                      err);
        if (!st)
            st =
                make(&e->shared.down, s->name, down, n,
                     bg_qtype_row_bytes(down->type, s->shared_step), NULL, compute, isa, pool, err);
    }
    if (st) {
        bg_cpu_experts_free(e);
        return st;
    }
    const ffn *const both[] = {&e->routed, &e->shared};
    for (int i = 0; i < (s->n_shared ? 2 : 1); i++) {
        lin_add_kinds(&e->in, &both[i]->gate->kinds);
        lin_add_kinds(&e->in, &both[i]->up->kinds);
        lin_add_kinds(&e->mid, &both[i]->down->kinds);
        if (!integer(both[i]->down)) e->keep_mid = true;
    }
    e->gather = !integer(e->routed.gate) || !integer(e->routed.up);
    *experts = e;
    return BG_OK;
}

void bg_cpu_experts_free(bg_experts *e)
{
    if (!e) return;
    const ffn *const both[] = {&e->routed, &e->shared};
    for (int i = 0; i < 2; i++) {
        bg_cpu_linear_free(both[i]->gate);
        bg_cpu_linear_free(both[i]->up);
        bg_cpu_linear_free(both[i]->down);
    }
    free(e);
}

static uint64_t ffn_bytes(const ffn *f)
{
    return f->gate ? bg_cpu_linear_bytes(f->gate) + bg_cpu_linear_bytes(f->up) +
                         bg_cpu_linear_bytes(f->down)
                   : 0;
}

uint64_t bg_cpu_experts_bytes(const bg_experts *e)
{
    return sizeof *e + ffn_bytes(&e->routed) + ffn_bytes(&e->shared);
}

int64_t bg_cpu_experts_cols(const bg_experts *e)
{
    return e->d_model;
}

int bg_cpu_experts_used(const bg_experts *e)
{
    return e->n_used;
}

void bg_cpu_experts_cost(const bg_experts *e, int64_t n_rows, bg_cost *cost)
{
    const double unread = pow(1 - (double)e->n_used / e->n_experts, (double)n_rows);
    cost->bytes = (double)ffn_bytes(&e->routed) * (1 - unread) + (double)ffn_bytes(&e->shared);
    cost->flops = 2.0 * (double)n_rows * (e->n_used + e->n_shared) * 3.0 * (double)e->d_model *
                  (double)e->d_ff;
}

/* ---- a run --------------------------------------------------------------------------------------
 */

/* An expert that some token goes to, and its entries: pairs with a token. */
typedef struct active {
    const ffn *ffn;
    int block;    /* which expert */
    int first, n; /* entries */
} active;

/* Entries that a kernel works on together: consecutive ones of an expert. */
typedef struct tile {
    int first, n;
} tile;

typedef struct job {
    const bg_moe_run *run;
    int row0, n_rows; /* the tokens worked on now */
    int n_entries, n_active, n_tiles;
    int n_mid, n_out;  /* items an expert, in the halves */
    bool prepared;     /* activations are quantised and gathered */
    int32_t *row;      /* [n_entries] token of an entry, from 0 */
    int32_t *entry;    /* [n_rows, n_used + n_shared] entry of a token's slot */
    int32_t *place;    /* [n_experts] next entry of each expert, while sorting */
    active *active;    /* shared experts first: they have the most entries */
    tile *tiles;       /* [n_entries] at most */
    lin_acts h;        /* [n_rows] in tiles of one */
    lin_acts in, mid;  /* [n_entries] in tiles */
    float *x;          /* [n_entries, d_model] copies of rows of h; with gather */
    float *act;        /* [n_entries, d_ff]; with keep_mid */
    float *y;          /* [n_entries, d_model] */
    float *per_thread; /* gate and up, [n_rows, MID_COLS] each, a thread */
} job;

static size_t take(size_t *at, size_t bytes)
{
    const size_t from = *at;
    *at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return from;
}

/* Cuts the job's arrays for n_rows tokens from memory at base; returns their bytes. */
static size_t lay_out(job *j, const bg_experts *e, uintptr_t base, int64_t n_rows, int n_threads)
{
    const size_t rows = (size_t)n_rows, slots = (size_t)e->n_used + (size_t)e->n_shared;
    const size_t n = rows * slots, d = (size_t)e->d_model, f = (size_t)e->d_ff;
    size_t at = 0;
    j->row = (int32_t *)(base + take(&at, n * sizeof *j->row));
    j->entry = (int32_t *)(base + take(&at, n * sizeof *j->entry));
    j->place = (int32_t *)(base + take(&at, (size_t)e->n_experts * sizeof *j->place));
    const size_t most = (size_t)e->n_experts + (size_t)e->n_shared;
    j->active = (active *)(base + take(&at, most * sizeof *j->active));
    j->tiles = (tile *)(base + take(&at, n * sizeof *j->tiles));
    at += lin_lay_out(&e->in, e->d_model, &j->h, base + at, n_rows);
    at += lin_lay_out(&e->in, e->d_model, &j->in, base + at, (int64_t)n);
    at += lin_lay_out(&e->mid, e->d_ff, &j->mid, base + at, (int64_t)n);
    j->x = (float *)(base + take(&at, e->gather ? n * d * sizeof(float) : 0));
    j->act = (float *)(base + take(&at, e->keep_mid ? n * f * sizeof(float) : 0));
    j->y = (float *)(base + take(&at, n * d * sizeof(float)));
    j->per_thread =
        (float *)(base + take(&at, (size_t)n_threads * 2 * rows * MID_COLS * sizeof(float)));
    return at;
}

size_t bg_cpu_experts_scratch(const bg_experts *e, int64_t max_rows, int n_threads)
{
    job j = {0};
    return lay_out(&j, e, 0, max_rows < ROWS ? max_rows : ROWS, n_threads);
}

static const float *route_of(const job *j, int row)
{
    return j->run->route + (j->row0 + row) * j->run->route_stride;
}

static void add_active(job *j, const ffn *f, int block, int first, int n)
{
    j->active[j->n_active++] = (active){f, block, first, n};
    for (int i = 0; i < n; i += LIN_MAX_TILE)
        j->tiles[j->n_tiles++] = (tile){first + i, n - i < LIN_MAX_TILE ? n - i : LIN_MAX_TILE};
}

/* Sorts the entries by expert, each one's by token. */
static void sort_entries(job *j)
{
    const bg_experts *e = j->run->e;
    const int slots = e->n_used + e->n_shared;
    int at = 0;
    for (int s = 0; s < e->n_shared; s++) {
        for (int t = 0; t < j->n_rows; t++) {
            j->entry[t * slots + e->n_used + s] = at + t;
            j->row[at + t] = t;
        }
        add_active(j, &e->shared, s, at, j->n_rows);
        at += j->n_rows;
    }
    memset(j->place, 0, (size_t)e->n_experts * sizeof *j->place);
    for (int t = 0; t < j->n_rows; t++)
        for (int s = 0; s < e->n_used; s++)
            j->place[(int)route_of(j, t)[s]]++;
    for (int i = 0; i < e->n_experts; i++) {
        const int n = j->place[i];
        j->place[i] = at;
        if (n) add_active(j, &e->routed, i, at, n);
        at += n;
    }
    for (int t = 0; t < j->n_rows; t++)
        for (int s = 0; s < e->n_used; s++) {
            const int i = j->place[(int)route_of(j, t)[s]]++;
            j->entry[t * slots + s] = i;
            j->row[i] = t;
        }
    j->n_entries = at;
}

/* Quantised activations of a tile, from those of its rows. */
static void gather_tile(const job *j, const tile *t)
{
    const int64_t d = j->run->e->d_model, n_blocks = d / LIN_BLOCK;
    const lin_acts to = lin_tile_acts(&j->in, d, t->first);
    const int w = t->n;
    for (int i = 0; i < w; i++) {
        const lin_acts from = lin_tile_acts(&j->h, d, j->row[t->first + i]);
        for (int64_t b = 0; b < n_blocks; b++) {
            memcpy(to.q + (b * w + i) * LIN_BLOCK, from.q + b * LIN_BLOCK, LIN_BLOCK);
            to.d[b * w + i] = from.d[b];
            to.ds[b * w + i] = from.ds[b];
        }
        for (int64_t b = 0; to.ds_halves && b < 2 * n_blocks; b++)
            to.ds_halves[b * w + i] = from.ds_halves[b];
        for (int s = 0; s < LIN_STARTS; s++) {
            const bool halves = s == LIN_START_32_HALVES || s == LIN_START_4_HALVES;
            for (int64_t b = 0; to.start[s] && b < (halves ? 2 : 1) * n_blocks; b++)
                to.start[s][b * w + i] = from.start[s][b];
        }
    }
}

static const float *h_row(const job *j, int row)
{
    return j->run->h + (j->row0 + row) * j->run->h_stride;
}

static void quantize(const job *j, int thread, int n_threads)
{
    const bg_experts *e = j->run->e;
    if (!e->in.integer) return;
    for (int t = j->n_rows * thread / n_threads; t < j->n_rows * (thread + 1) / n_threads; t++) {
        const lin_acts a = lin_tile_acts(&j->h, e->d_model, t);
        e->routed.gate->isa->quantize(&a, h_row(j, t), j->run->h_stride, 1, 0,
                                      e->d_model / LIN_BLOCK);
    }
}

static void gather(const job *j, int thread, int n_threads)
{
    const bg_experts *e = j->run->e;
    for (int i = thread; e->in.integer && i < j->n_tiles; i += n_threads)
        gather_tile(j, &j->tiles[i]);
    for (int i = thread; e->gather && i < j->n_entries; i += n_threads)
        memcpy(j->x + i * e->d_model, h_row(j, j->row[i]), (size_t)e->d_model * sizeof(float));
}

/* fn(gate) * up of an expert's entries in MID_COLS columns, quantised for down. */
static void first_half(const job *j, const active *a, int64_t col0, float *gate)
{
    const bg_experts *e = j->run->e;
    const bool shared = a->ffn == &e->shared;
    const int64_t n_cols = e->d_ff - col0 < MID_COLS ? e->d_ff - col0 : MID_COLS;
    const float *x = shared ? h_row(j, 0) : j->x + a->first * e->d_model;
    const int64_t stride = shared ? j->run->h_stride : e->d_model;
    const bg_linear *const two[] = {a->ffn->gate, a->ffn->up};
    float *const out[] = {gate, gate + (size_t)j->n_rows * MID_COLS};
    for (int i = 0; i < 2; i++) {
        const lin_part *p = &two[i]->parts[0];
        const int64_t g0 = a->block * p->block_groups + col0 / LIN_ROWS;
        for (int64_t c = 0; c < n_cols; c += LIN_ROWS)
            lin_run_group(two[i], p, g0 + c / LIN_ROWS, out[i] + c, MID_COLS, &j->in, a->first, x,
                          stride, a->n);
    }
    for (int t = 0; t < a->n; t++) {
        float *g = gate + (size_t)t * MID_COLS;
        j->run->kernels->glu(g, g, out[1] + (size_t)t * MID_COLS, n_cols, e->fn);
    }
    if (!integer(a->ffn->down)) {
        for (int t = 0; t < a->n; t++)
            memcpy(j->act + (a->first + t) * e->d_ff + col0, gate + (size_t)t * MID_COLS,
                   (size_t)n_cols * sizeof(float));
        return;
    }
    for (int t = 0; t < a->n; t += LIN_MAX_TILE) {
        const lin_acts acts = lin_tile_acts(&j->mid, e->d_ff, a->first + t);
        a->ffn->down->isa->quantize(&acts, gate + (size_t)t * MID_COLS, MID_COLS,
                                    a->n - t < LIN_MAX_TILE ? a->n - t : LIN_MAX_TILE,
                                    col0 / LIN_BLOCK, (col0 + n_cols) / LIN_BLOCK);
    }
}

static void second_half(const job *j, const active *a, int64_t col0)
{
    const bg_experts *e = j->run->e;
    const lin_part *p = &a->ffn->down->parts[0];
    const int64_t end = e->d_model - col0 < OUT_COLS ? e->d_model : col0 + OUT_COLS;
    for (int64_t c = col0; c < end; c += LIN_ROWS)
        lin_run_group(a->ffn->down, p, a->block * p->block_groups + c / LIN_ROWS,
                      j->y + a->first * e->d_model + c, e->d_model, &j->mid, a->first,
                      j->act + a->first * e->d_ff, e->d_ff, a->n);
}

/* Columns of one row of out: the chosen in the order of route, the shared, then add. */
static void sum_row(const job *j, int row, int64_t col0)
{
    const bg_moe_run *run = j->run;
    const bg_experts *e = run->e;
    const int slots = e->n_used + e->n_shared;
    const int64_t n = e->d_model - col0 < SUM_COLS ? e->d_model - col0 : SUM_COLS;
    const float *route = route_of(j, row);
    float sum[SUM_COLS];
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int s = 0; s < slots; s++)
        run->kernels->add_scaled(sum, j->y + j->entry[row * slots + s] * e->d_model + col0,
                                 s < e->n_used ? route[e->n_used + s] : 1.0f, n);
    if (run->add)
        run->kernels->add_scaled(sum, run->add + (j->row0 + row) * run->add_stride + col0,
                                 route[2 * e->n_used], n);
    memcpy(run->out + (j->row0 + row) * run->out_stride + col0, sum, (size_t)n * sizeof *sum);
}

/* The next item of a phase; *own counts where the caller is alone. */
static int next(const job *j, int n_threads, int *own)
{
    return n_threads > 1 ? bg_pool_next(j->run->pool) : (*own)++;
}

static void meet(const job *j, int n_threads)
{
    if (n_threads > 1) bg_pool_barrier_reset(j->run->pool);
}

static void run_thread(void *ctx, int thread, int n_threads)
{
    const job *j = ctx;
    const bg_experts *e = j->run->e;
    float *buffers = j->per_thread + (size_t)thread * 2 * (size_t)j->n_rows * MID_COLS;
    if (!j->prepared) {
        quantize(j, thread, n_threads);
        meet(j, n_threads);
        gather(j, thread, n_threads);
        meet(j, n_threads);
    }
    for (int i, own = 0; (i = next(j, n_threads, &own)) < j->n_active * j->n_mid;)
        first_half(j, &j->active[i / j->n_mid], (int64_t)(i % j->n_mid) * MID_COLS, buffers);
    meet(j, n_threads);
    for (int i, own = 0; (i = next(j, n_threads, &own)) < j->n_active * j->n_out;)
        second_half(j, &j->active[i / j->n_out], (int64_t)(i % j->n_out) * OUT_COLS);
    meet(j, n_threads);
    const int pieces = (int)((e->d_model + SUM_COLS - 1) / SUM_COLS), n = j->n_rows * pieces;
    for (int i = (int)((int64_t)n * thread / n_threads);
         i < (int)((int64_t)n * (thread + 1) / n_threads); i++)
        sum_row(j, i / pieces, (int64_t)(i % pieces) * SUM_COLS);
}

bool bg_cpu_experts_run(const bg_moe_run *run, int *bad_row)
{
    const bg_experts *e = run->e;
    const int n_threads = bg_pool_threads(run->pool);
    for (int t = 0; t < run->n_rows; t++)
        for (int s = 0; s < e->n_used; s++) {
            const float i = run->route[t * run->route_stride + s];
            if (!(i >= 0 && i < (float)e->n_experts)) {
                *bad_row = t;
                return false;
            }
        }
    for (int row0 = 0; row0 < run->n_rows; row0 += ROWS) {
        job j = {.run = run, .row0 = row0};
        j.n_rows = run->n_rows - row0 < ROWS ? run->n_rows - row0 : ROWS;
        j.n_mid = (int)((e->d_ff + MID_COLS - 1) / MID_COLS);
        j.n_out = (int)((e->d_model + OUT_COLS - 1) / OUT_COLS);
        lay_out(&j, e, (uintptr_t)run->scratch, j.n_rows, n_threads);
        sort_entries(&j);
        if (j.n_entries * e->d_model * (3 * e->d_ff + 1) <= SOLO_MACS) {
            run_thread(&j, 0, 1);
            continue;
        }
        if (j.n_rows * e->d_model <= SOLO_QUANT) {
            quantize(&j, 0, 1);
            gather(&j, 0, 1);
            j.prepared = true;
        }
        bg_pool_run(run->pool, run_thread, &j);
    }
    return true;
}
