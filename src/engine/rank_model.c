/* What a rank process runs for real: a model on a backend. */
#include <stdlib.h>
#include <sys/prctl.h>

#include "backend/device.h"
#include "comm/comm.h"
#include "engine/rank.h"

typedef struct model_rank {
    bg_gguf *gguf; /* embedding rows are read from its mapping */
    bg_desc desc;
    bg_comm *comm;
    bg_backend *backend;
    bg_model *model;
} model_rank;

static void stop(void *state)
{
    model_rank *m = state;
    if (!m) return;
    bg_model_free(m->model);
    bg_backend_free(m->backend);
    bg_comm_free(m->comm);
    bg_gguf_close(m->gguf);
    free(m);
}

static bg_status open_backend(model_rank *m, const bg_rank_config *c, int rank,
                              void (*progress)(void *, uint64_t, uint64_t), void *ctx,
                              bg_error *err)
{
    const bg_backend_config bc = {
        .compute = c->compute,
        .n_threads = c->threads_per_rank,
        .first_cpu = c->pin_threads ? (c->first_rank + rank) * c->threads_per_rank : -1,
        .check = c->check,
        .eager = c->eager,
        .dummy = c->dummy,
        .fast_math = c->fast_math,
        .comm = m->comm,
        .tune_table = c->tune_table,
        .max_tokens = c->max_step_tokens,
        .max_seqs = c->max_num_seqs,
        .max_out = c->max_num_seqs,
        .max_ctx = c->max_model_len,
        .vocab_size = m->desc.vocab_size,
        .isa = c->isa};
    const bg_model_config mc = {.rank = rank,
                                .tp = c->tp,
                                .n_blocks = c->n_blocks,
                                .block_tokens = c->block_tokens,
                                .cache_type = c->cache_type,
                                .backend = &bc,
                                .progress = progress,
                                .ctx = ctx};
    bg_status st = bg_backend_new(&m->backend, c->gpus[rank] - 1, &bc, err);
    if (!st) st = bg_model_load(&m->model, m->gguf, &m->desc, m->backend, &mc, err);
    if (!st) st = bg_model_prepare(m->model, err);
    /* The rank's short waits for the device are to be short. */
    if (c->gpus[rank]) prctl(PR_SET_TIMERSLACK, 1000UL);
    return st;
}

static bg_status start(void **state, const bg_rank_config *c, int rank, void *comm_memory,
                       void (*progress)(void *, uint64_t, uint64_t), void *ctx, bg_error *err)
{
    *state = NULL;
    model_rank *m = calloc(1, sizeof *m);
    if (!m) return bg_fail(err, BG_NOMEM, "out of memory");
    bg_status st = (c->dummy ? bg_gguf_open_header : bg_gguf_open)(&m->gguf, c->model_path, err);
    if (!st) st = bg_desc_read(&m->desc, m->gguf, err);
    if (!st && c->tp > 1)
        st = bg_comm_shm_join(&m->comm, comm_memory, rank, c->tp, BG_RANK_COMM_FLOATS, err);
    if (!st) st = open_backend(m, c, rank, progress, ctx, err);
    if (st)
        stop(m);
    else
        *state = m;
    return st;
}

static bg_status seat(void *state, int slot, const bg_sampling *s, const int32_t *tokens,
                      int n_tokens, int n_generated, bg_error *err)
{
    model_rank *m = state;
    return m->backend->ops->slot_seat(m->backend, slot, s, tokens, n_tokens, n_generated, err);
}

static bg_status launch(void *state, const bg_batch *batch, bg_error *err)
{
    model_rank *m = state;
    return bg_model_step(m->model, batch, err);
}

static bool ready(void *state)
{
    model_rank *m = state;
    return bg_model_ready(m->model);
}

static bg_status fetch(void *state, bg_sampled *out, int *n, bg_error *err)
{
    model_rank *m = state;
    return bg_model_fetch(m->model, out, n, err);
}

static uint64_t memory(void *state)
{
    const model_rank *m = state;
    return m->backend->ops->memory(m->backend);
}

static void device_times(void *state, int64_t *work_ns, int64_t *idle_ns)
{
    const model_rank *m = state;
    if (m->backend->ops->device_times) m->backend->ops->device_times(m->backend, work_ns, idle_ns);
}

static const bg_load_times *load_times(void *state)
{
    const model_rank *m = state;
    return bg_model_load_times(m->model);
}

const bg_rank_ops bg_rank_ops_model = {.start = start,
                                       .seat = seat,
                                       .launch = launch,
                                       .ready = ready,
                                       .fetch = fetch,
                                       .stop = stop,
                                       .memory = memory,
                                       .load_times = load_times,
                                       .device_times = device_times};
