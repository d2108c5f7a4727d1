/* Weights on their way from the file to the device.
 *
 * Rows come in pieces of about 16 MiB through a ring of slots. Several threads bring a piece from
 * the mapped file into a slot's pinned memory; a stream of its own copies it to the slot's device
 * memory; what is to become of it is enqueued on the backend's stream behind that copy. So reading,
 * copying and repacking of consecutive pieces overlap, and the host waits only for a slot whose
 * copy is still under way. Types that the GPU does not read go as float32, dequantised by the
 * threads.
 *
 * Threads: one caller. Everything here is freed by bg_cuda_load_end(). */
#include "backend/cuda/cuda.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/cpu/pool.h"
#include "base/clock.h"
#include "base/hash.h"
#include "gguf/gguf.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum {
    SLOTS = 4,
    PIECE_BYTES = 16 << 20,
    UNIT_BYTES = 1 << 20, /* of one thread at a time */
    MAX_THREADS = 8,
    TILE = 64,
};

typedef struct slot {
    uint8_t *host, *device;
    cudaEvent_t copy_start, copied, used; /* in this order */
    bool busy;                            /* its events were recorded */
} slot;

struct bg_cuda_loader {
    size_t slot_bytes;
    slot slots[SLOTS];
    int at; /* the next piece's */
    cudaStream_t stream;
    bg_pool *pool;
    bg_load_times times;
    int64_t start_ns;
};

/* ---- the ring ---------------------------------------------------------------------------------
 */

static void free_slots(struct bg_cuda_loader *l)
{
    for (int i = 0; i < SLOTS; i++) {
        slot *s = &l->slots[i];
        if (s->copy_start) cudaEventDestroy(s->copy_start);
        if (s->copied) cudaEventDestroy(s->copied);
        if (s->used) cudaEventDestroy(s->used);
        if (s->host) cudaFreeHost(s->host);
        if (s->device) cudaFree(s->device);
        *s = (slot){0};
    }
    l->slot_bytes = 0;
}

static bg_status make_slots(bg_cuda *c, size_t bytes, bg_error *err)
{
    struct bg_cuda_loader *l = c->loader;
    l->slot_bytes = bytes;
    for (int i = 0; i < SLOTS; i++) {
        slot *s = &l->slots[i];
        cudaError_t e = cudaSuccess;
        if (!c->config.dummy) e = cudaMallocHost((void **)&s->host, bytes);
        if (e != cudaSuccess)
            return bg_fail(err, BG_NOMEM, "loading: %d x %zu bytes of pinned memory: %s", SLOTS,
                           bytes, cudaGetErrorString(e));
        e = cudaMalloc((void **)&s->device, bytes);
        if (e != cudaSuccess)
            return bg_fail(err, BG_NOMEM, "loading: %d x %zu bytes on GPU %d: %s", SLOTS, bytes,
                           c->device, cudaGetErrorString(e));
        e = cudaEventCreate(&s->copy_start);
        if (e == cudaSuccess) e = cudaEventCreate(&s->copied);
        if (e == cudaSuccess) e = cudaEventCreate(&s->used);
        if (e != cudaSuccess) return bg_cuda_fail(err, e, "loading");
    }
    return BG_OK;
}

/* A share of the processors that this process may use: other ranks load at the same time. */
static int reader_threads(const bg_cuda *c)
{
    cpu_set_t set;
    const int ranks = c->config.comm ? bg_comm_size(c->config.comm) : 1;
    const int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    const int n = cpus / ranks;
    return n < 1 ? 1 : n < MAX_THREADS ? n : MAX_THREADS;
}

static bg_status make_loader(bg_cuda *c, bg_error *err)
{
    struct bg_cuda_loader *l = calloc(1, sizeof *l);
    if (!l) return bg_fail(err, BG_NOMEM, "loading: out of memory");
    c->loader = l;
    l->start_ns = bg_now_ns();
    bg_status st =
        bg_cuda_done(err, cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking), "loading");
    if (!st) st = bg_pool_new(&l->pool, reader_threads(c), -1, err);
    return st;
}

/* The slot's last piece is through, and what it took is added up. */
static bg_status wait_slot(struct bg_cuda_loader *l, slot *s, bg_error *err)
{
    float copy_ms = 0, use_ms = 0;
    if (!s->busy) return BG_OK;
    s->busy = false;
    cudaError_t e = cudaEventSynchronize(s->used);
    if (e == cudaSuccess) e = cudaEventElapsedTime(&copy_ms, s->copy_start, s->copied);
    if (e == cudaSuccess) e = cudaEventElapsedTime(&use_ms, s->copied, s->used);
    l->times.copy_ns += (int64_t)((double)copy_ms * 1e6);
    l->times.repack_ns += (int64_t)((double)use_ms * 1e6);
    return bg_cuda_done(err, e, "loading");
}

/* The next slot, with room for bytes and nothing under way in it. */
static bg_status next_slot(bg_cuda *c, size_t bytes, slot **out, bg_error *err)
{
    bg_status st = BG_OK;
    *out = NULL;
    if (!c->loader) st = make_loader(c, err);
    struct bg_cuda_loader *l = c->loader;
    if (st || !l) return st;
    if (bytes > l->slot_bytes) {
        for (int i = 0; !st && i < SLOTS; i++)
            st = wait_slot(l, &l->slots[i], err);
        free_slots(l);
        if (!st) st = make_slots(c, bytes > PIECE_BYTES ? bytes : PIECE_BYTES, err);
    }
    slot *s = &l->slots[l->at];
    const int64_t before = bg_now_ns();
    if (!st) st = wait_slot(l, s, err);
    l->times.wait_ns += bg_now_ns() - before;
    if (!st) *out = s;
    return st;
}

/* ---- filling a slot ---------------------------------------------------------------------------
 */

typedef struct fill { /* rows [row0, row0 + n) of each part, to places of their own */
    const bg_linear_part *parts[2];
    uint8_t *to[2];
    size_t to_row[2];
    int n_parts, units; /* units of each part */
    int64_t row0, n, unit_rows;
    size_t stride[2]; /* a stack of matrices of the parts' rows: from one to the next; else 0 */
    bg_pool *pool;
} fill;

/* Types that the GPU does not read come as float32. */
static int device_type(uint32_t type)
{
    return bgk_format_of((int)type) == BGK_FORMATS ? BGK_GGUF_F32 : (int)type;
}

static size_t device_row_bytes(const bg_linear_part *p)
{
    return bg_qtype_row_bytes((uint32_t)device_type(p->type), p->n_cols);
}

/* Asks for the pages in one call: faster than a fault each. Not every memory can, and none must. */
static void populate(const uint8_t *p, size_t n)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)p & ~(page - 1);
    madvise((void *)from, (uintptr_t)p + n - from, MADV_POPULATE_READ);
}

/* Rows of one matrix: the number-th of a stack. */
static void fill_run(const fill *f, int part, int64_t number, int64_t row, int64_t n, uint8_t *to)
{
    const bg_linear_part *p = f->parts[part];
    const bg_qtype_info *info = bg_qtype_get(p->type);
    const size_t row_bytes = bg_qtype_row_bytes(p->type, p->k_total),
                 share = bg_qtype_row_bytes(p->type, p->n_cols);
    const uint8_t *from = (const uint8_t *)p->data + (size_t)number * f->stride[part] +
                          (size_t)(p->row0 + row) * row_bytes +
                          (size_t)(p->col0 / info->block_values) * (size_t)info->block_bytes;
    if (!share || !n) return;
    populate(from, (size_t)(n - 1) * row_bytes + share);
    if (device_type(p->type) != (int)p->type) {
        for (int64_t i = 0; i < n; i++)
            bg_dequant_row(p->type, from + (size_t)i * row_bytes,
                           (float *)(void *)(to + (size_t)i * f->to_row[part]), p->n_cols);
    } else if (share == row_bytes) {
        memcpy(to, from, (size_t)n * row_bytes);
    } else {
        for (int64_t i = 0; i < n; i++)
            memcpy(to + (size_t)i * share, from + (size_t)i * row_bytes, share);
    }
}

static void fill_rows(const fill *f, int part, int64_t first, int64_t n)
{
    const bg_linear_part *p = f->parts[part];
    uint8_t *to = f->to[part] + (size_t)first * f->to_row[part];
    int64_t at = f->row0 + first;
    if (!f->stride[part]) {
        fill_run(f, part, 0, at, n, to);
        return;
    }
    while (n > 0) {
        const int64_t row = at % p->n_rows, left = p->n_rows - row, run = n < left ? n : left;
        fill_run(f, part, at / p->n_rows, row, run, to);
        at += run;
        n -= run;
        to += (size_t)run * f->to_row[part];
    }
}

static void fill_units(void *ctx, int thread, int n_threads)
{
    const fill *f = ctx;
    (void)thread;
    (void)n_threads;
    for (int i; (i = bg_pool_next(f->pool)) < f->units * f->n_parts;) {
        const int64_t first = i % f->units * f->unit_rows, left = f->n - first;
        fill_rows(f, i / f->units, first, left < f->unit_rows ? left : f->unit_rows);
    }
}

/* What random weights of a part depend on, besides their place. */
static uint64_t dummy_seed(const bg_linear_part *p)
{
    return bg_hash64(p->name, strlen(p->name), 0);
}

static cudaError_t fill_random(bg_cuda *c, const bg_linear_part *p, uint8_t *to, int64_t row0,
                               int64_t n)
{
    const int type = device_type(p->type);
    const bg_qtype_info *info = bg_qtype_get((uint32_t)type);
    const int64_t row_blocks = p->n_cols / info->block_values;
    /* 1 / sqrt(k), with which activations keep their size. */
    const float std = 1.0f / sqrtf((float)(p->k_total > 0 ? p->k_total : 1));
    return bgk_random_blocks(to, type, n * row_blocks, dummy_seed(p),
                             (uint64_t)((p->row0 + row0) * row_blocks), std, c->stream);
}

int64_t bg_cuda_load_piece(const bg_linear_part *a, const bg_linear_part *up)
{
    const size_t row = device_row_bytes(a) + (up ? device_row_bytes(up) : 0);
    const int64_t rows = row ? (int64_t)((size_t)PIECE_BYTES / row) : a->n_rows;
    return rows < 2 * TILE ? TILE : rows / TILE * TILE;
}

bg_status bg_cuda_load_rows(bg_cuda *c, const bg_linear_part *a, const bg_linear_part *up,
                            int64_t row0, int64_t n, bgk_source out[2], bg_error *err)
{
    return bg_cuda_load_stack(c, a, up, 0, 0, row0, n, out, err);
}

bg_status bg_cuda_load_stack(bg_cuda *c, const bg_linear_part *a, const bg_linear_part *up,
                             size_t a_stride, size_t up_stride, int64_t row0, int64_t n,
                             bgk_source out[2], bg_error *err)
{
    fill f = {.parts = {a, up},
              .n_parts = up ? 2 : 1,
              .row0 = row0,
              .n = n,
              .stride = {a_stride, up_stride}};
    size_t at[2] = {0, 0}, bytes = 0;
    slot *s = NULL;
    for (int i = 0; i < f.n_parts; i++) {
        f.to_row[i] = device_row_bytes(f.parts[i]);
        at[i] = bytes;
        bytes += ((size_t)n * f.to_row[i] + 255) / 256 * 256;
    }
    bg_status st = next_slot(c, bytes, &s, err);
    if (st || !s) return st;
    struct bg_cuda_loader *l = c->loader;
    cudaStream_t stream = c->config.dummy ? c->stream : l->stream;
    cudaError_t e = cudaSuccess;
    if (!c->config.dummy) {
        const int64_t before = bg_now_ns();
        const size_t row =
            f.to_row[0] > f.to_row[f.n_parts - 1] ? f.to_row[0] : f.to_row[f.n_parts - 1];
        f.pool = l->pool;
        f.unit_rows = row < UNIT_BYTES ? (int64_t)(UNIT_BYTES / (row ? row : 1)) : 1;
        f.units = (int)((n + f.unit_rows - 1) / f.unit_rows);
        for (int i = 0; i < f.n_parts; i++)
            f.to[i] = s->host + at[i];
        bg_pool_run(l->pool, fill_units, &f);
        l->times.read_ns += bg_now_ns() - before;
    }
    e = cudaEventRecord(s->copy_start, stream);
    if (!c->config.dummy) {
        if (e == cudaSuccess)
            e = cudaMemcpyAsync(s->device, s->host, bytes, cudaMemcpyHostToDevice, stream);
    } else {
        for (int i = 0; e == cudaSuccess && i < f.n_parts; i++)
            e = fill_random(c, f.parts[i], s->device + at[i], row0, n);
    }
    if (e == cudaSuccess) e = cudaEventRecord(s->copied, stream);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(c->stream, s->copied, 0);
    for (int i = 0; i < 2 && i < f.n_parts; i++)
        out[i] = (bgk_source){.rows = s->device + at[i],
                              .type = device_type(f.parts[i]->type),
                              .n_rows = (int)n,
                              .row_bytes = (int64_t)f.to_row[i]};
    l->times.bytes += (int64_t)bytes;
    return bg_cuda_done(err, e, a->name);
}

bg_status bg_cuda_load_used(bg_cuda *c, const char *what, bg_error *err)
{
    struct bg_cuda_loader *l = c->loader;
    slot *s = &l->slots[l->at];
    l->at = (l->at + 1) % SLOTS;
    s->busy = true;
    return bg_cuda_done(err, cudaEventRecord(s->used, c->stream), what);
}

void bg_cuda_load_free(bg_cuda *c)
{
    struct bg_cuda_loader *l = c->loader;
    if (!l) return;
    if (l->stream) cudaStreamSynchronize(l->stream);
    cudaStreamSynchronize(c->stream);
    free_slots(l);
    if (l->stream) cudaStreamDestroy(l->stream);
    bg_pool_free(l->pool);
    free(l);
    c->loader = NULL;
}

bg_status bg_cuda_load_end(bg_backend *b, bg_load_times *times, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    struct bg_cuda_loader *l = c->loader;
    *times = (bg_load_times){0};
    if (!l) return BG_OK;
    bg_status st = BG_OK;
    for (int i = 0; !st && i < SLOTS; i++)
        st = wait_slot(l, &l->slots[i], err);
    if (!st) st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), "loading");
    l->times.total_ns = bg_now_ns() - l->start_ns;
    *times = l->times;
    bg_cuda_load_free(c);
    return st;
}
