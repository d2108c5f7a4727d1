/* Collectives between the GPUs of a replica: NCCL moves values, our kernels add them.
 *
 * NCCL's own sums have an order of their own; here every rank gets all parts and adds them in rank
 * order in float32, as comm/shm.c does, so that the result is the same on every rank, for every
 * size, and on the CPU.
 *
 * Between GPUs that can read each other's memory kernels of ours do both, 8 MB at a time, without
 * NCCL. Else, what is short: everyone's values to everyone, then the sum; what is long: slice r of
 * everyone's values to rank r, which adds them, then the sums to everyone.
 *
 * All goes out on the backend's stream and can be captured. NCCL is looked for when it is needed: a
 * machine with one GPU need not have it. Several ranks may share a GPU, which NCCL only allows to
 * ranks of different hosts: so they say that they are on different ones, and talk through sockets;
 * a sum of ours takes until the GPU has come round to all of them (slow, both: for tests).
 *
 * With a stand-in for a comm this rank is alone: sums take the time that the comm says, and its own
 * share of the logits is taken for everyone's. */
#include "backend/cuda/cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is used of nccl.h, which need not be there; tests/gpu/test_comm.c compares. */
typedef struct nccl_id {
    char internal[128];
} nccl_id;
typedef struct nccl_comm nccl_comm;
enum { NCCL_FLOAT32 = 7, NCCL_SUM = 0 };

typedef struct nccl {
    int (*get_version)(int *);
    int (*get_unique_id)(nccl_id *);
    int (*init_rank)(nccl_comm **, int, nccl_id, int);
    int (*all_gather)(const void *, void *, size_t, int, nccl_comm *, cudaStream_t);
    int (*all_reduce)(const void *, void *, size_t, int, int, nccl_comm *, cudaStream_t);
    int (*send)(const void *, size_t, int, int, nccl_comm *, cudaStream_t);
    int (*recv)(void *, size_t, int, int, nccl_comm *, cudaStream_t);
    int (*group_start)(void);
    int (*group_end)(void);
    const char *(*error_string)(int);
    const char *(*last_error)(nccl_comm *);
} nccl;

struct bg_cuda_comm {
    nccl f;
    nccl_comm *nccl;
    int rank, n;
    int64_t shard; /* columns of the widest share of the vocabulary */
    float *work;
    size_t work_floats;
    bgk_peers peers; /* n_ranks 0: not in use */
    bg_cuda_sums sums;
    int64_t standin_ns; /* of a sum, where this rank is alone; -1: it is not */
};

enum {
    WORK_FLOATS = 4 << 20,   /* at least: pieces of a long sum */
    LOGIT_FLOATS = 16 << 20, /* at most: rows of logits gathered at a time */
    SHORT_FLOATS = 1 << 18,  /* up to here, or with two ranks, a sum is short */
    SLICE = 4,               /* slices are multiples of so many floats */
};

/* ---- the library ----------------------------------------------------------------------------- */

static bool symbol(void *library, const char *name, void *fn)
{
    void *at = dlsym(library, name);
    memcpy(fn, &at, sizeof at); /* ISO C has no cast from it to a function's */
    return at != NULL;
}

static bg_status load_nccl(nccl *f, bg_error *err)
{
    static const char *const places[] = {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2",
                                         "/usr/local/cuda/lib/libnccl.so.2"};
    void *l = NULL;
    for (size_t i = 0; !l && i < sizeof places / sizeof *places; i++)
        l = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
    if (!l)
        return bg_fail(err, BG_DEVICE,
                       "--tensor-parallel-size above 1 on GPUs needs NCCL, and libnccl.so.2 is not "
                       "found: install it (libnccl2), or name its folder in LD_LIBRARY_PATH");
    if (symbol(l, "ncclGetVersion", &f->get_version) &&
        symbol(l, "ncclGetUniqueId", &f->get_unique_id) &&
        symbol(l, "ncclCommInitRank", &f->init_rank) &&
        symbol(l, "ncclAllGather", &f->all_gather) && symbol(l, "ncclAllReduce", &f->all_reduce) &&
        symbol(l, "ncclSend", &f->send) && symbol(l, "ncclRecv", &f->recv) &&
        symbol(l, "ncclGroupStart", &f->group_start) && symbol(l, "ncclGroupEnd", &f->group_end) &&
        symbol(l, "ncclGetErrorString", &f->error_string)) {
        symbol(l, "ncclGetLastError", &f->last_error);
        return BG_OK;
    }
    return bg_fail(err, BG_DEVICE, "libnccl.so.2 is too old: 2.7 or later is needed");
}

static bg_status done(const struct bg_cuda_comm *m, int result, const char *what, bg_error *err)
{
    if (!result) return BG_OK;
    const char *more = m->f.last_error ? m->f.last_error(NULL) : "";
    return bg_fail(err, BG_DEVICE, "%s: NCCL: %s%s%.200s", what, m->f.error_string(result),
                   more && *more ? ": " : "", more ? more : "");
}

/* ---- joining --------------------------------------------------------------------------------- */

typedef struct hello {
    unsigned char gpu[16];
    nccl_id id;
} hello;

_Static_assert(sizeof(hello) % sizeof(float) == 0, "it travels as floats");

/* Through the ranks' shared memory. One that never comes has died, and the coordinator, which sees
 * that, ends the others. */
static bg_status exchange(bg_cuda *c, const hello *mine, hello *all, bg_error *err)
{
    float in[sizeof *mine / sizeof(float)];
    memcpy(in, mine, sizeof in);
    return bg_comm_all_gather(c->config.comm, in, sizeof in / sizeof *in, (float *)all, err);
}

/* Whether all ranks say yes. */
static bg_status all_agree(bg_cuda *c, bool mine, bool *all, bg_error *err)
{
    float said[BGK_MAX_RANKS], own = mine;
    bg_status st = bg_comm_all_gather(c->config.comm, &own, 1, said, err);
    *all = !st;
    for (int r = 0; !st && r < bg_comm_size(c->config.comm); r++)
        *all = *all && said[r] != 0;
    return st;
}

static bool gpus_shared(const hello *all, int n)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (memcmp(all[i].gpu, all[j].gpu, sizeof all[i].gpu) == 0) return true;
    return false;
}

/* NCCL reads its environment at its first call. */
static void set_environment(bool shared, int rank)
{
    setenv("NCCL_NVLS_ENABLE", "0", 1); /* NVLink multicast: never */
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    if (!shared) return;
    char host[32];
    snprintf(host, sizeof host, "batchgen-rank-%d", rank);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_IB_DISABLE", "1", 1);
}

/* Connections are made by the first calls, which allocate: none may be left to a step. */
static bg_status warm_up(bg_cuda *c, bg_error *err)
{
    struct bg_cuda_comm *m = c->ranks;
    const size_t most = m->work_floats / (size_t)m->n;
    bg_status st = bg_cuda_done(
        err, cudaMemsetAsync(m->work, 0, m->work_floats * sizeof(float), c->stream), "NCCL");
    for (size_t n = 64; !st && n <= most; n *= 16) {
        st = done(m,
                  m->f.all_gather(m->work + (size_t)m->rank * n, m->work, n, NCCL_FLOAT32, m->nccl,
                                  c->stream),
                  "first use", err);
    }
    if (!st) st = done(m, m->f.group_start(), "first use", err);
    for (int r = 0; !st && r < m->n; r++) {
        if (r == m->rank) continue;
        st = done(m, m->f.send(m->work, SLICE, NCCL_FLOAT32, r, m->nccl, c->stream), "first use",
                  err);
        if (!st)
            st = done(
                m, m->f.recv(m->work + SLICE * (1 + r), SLICE, NCCL_FLOAT32, r, m->nccl, c->stream),
                "first use", err);
    }
    if (!st) st = done(m, m->f.group_end(), "first use", err);
    if (!st) st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), "NCCL: first use");
    return st;
}

/* ---- peers ----------------------------------------------------------------------------------- */

/* Maps the others' memory. Without, where some GPU cannot. */
static bg_status map_peers(bg_cuda *c, bg_error *err)
{
    struct bg_cuda_comm *m = c->ranks;
    cudaIpcMemHandle_t handle = {{0}}, all[BGK_MAX_PEERS];
    float in[sizeof handle / sizeof(float)];
    _Static_assert(sizeof handle % sizeof(float) == 0, "it travels as floats");
    bgk_peers p = {.rank = m->rank, .n_ranks = m->n};
    void *own = NULL;
    /* A handle names a whole allocation: of some megabytes this one is one. */
    bg_status st = bg_cuda_take(c, &own, bgk_peer_bytes(), "collectives", err);
    if (!st) st = bg_cuda_done(err, cudaMemset(own, 0, bgk_peer_bytes()), "collectives");
    if (!st) st = bg_cuda_done(err, cudaDeviceSynchronize(), "collectives");
    if (st) return st;
    bool good = cudaIpcGetMemHandle(&handle, own) == cudaSuccess;
    memcpy(in, &handle, sizeof in);
    st = bg_comm_all_gather(c->config.comm, in, sizeof in / sizeof *in, (float *)all, err);
    if (!st) st = all_agree(c, good, &good, err);
    for (int r = 0; !st && good && r < m->n; r++) {
        p.memory[r] = own;
        if (r != m->rank)
            good = cudaIpcOpenMemHandle(&p.memory[r], all[r], cudaIpcMemLazyEnablePeerAccess) ==
                   cudaSuccess;
    }
    (void)cudaGetLastError(); /* that GPUs cannot is no failure */
    if (!st) st = all_agree(c, good, &good, err);
    if (!st && good) m->peers = p;
    return st;
}

static bg_status sum_short(bg_cuda *c, float *x, size_t n, bg_error *err);

/* Both halves and one again, each way; the last counts. */
static bg_status sum_peers_often(bg_cuda *c, float *x, const float *host, int64_t n, bgk_sum way,
                                 bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; i < 3 && !st; i++) {
        st = bg_cuda_put(x, host, (size_t)n * sizeof *x, "collectives", err);
        /* The copy is not of the stream. */
        if (!st) st = bg_cuda_done(err, cudaDeviceSynchronize(), "peers");
        if (!st)
            st = bg_cuda_done(err, bgk_sum_peers(x, n, &c->ranks->peers, way, c->stream), "peers");
        if (!st) st = bg_cuda_done(err, cudaStreamSynchronize(c->stream), "peers");
    }
    return st;
}

/* Once against NCCL's way, before it is relied on. */
static bg_status prove_peers(bg_cuda *c, bg_error *err)
{
    enum { N = 20000, WAYS = 3 };
    struct bg_cuda_comm *m = c->ranks;
    float *x = NULL, *host = malloc((1 + WAYS) * N * sizeof *host);
    if (!host) return bg_fail(err, BG_NOMEM, "collectives: out of memory");
    for (int i = 0; i < N; i++)
        host[i] = (float)(i * 7 % 1013) * 0.37f + (float)m->rank * 1.01f;
    bg_status st = bg_cuda_take(c, &x, (1 + WAYS) * N * sizeof *x, "collectives", err);
    if (!st) st = bg_cuda_put(x, host, N * sizeof *x, "collectives", err);
    if (!st) st = bg_cuda_done(err, cudaDeviceSynchronize(), "peers");
    if (!st) st = sum_short(c, x, N, err);
    for (int way = 0; way < WAYS && !st; way++)
        st = sum_peers_often(c, x + (1 + way) * N, host, N, (bgk_sum)way, err);
    if (!st)
        st = bg_cuda_done(
            err, cudaMemcpy(host, x, (1 + WAYS) * N * sizeof *x, cudaMemcpyDeviceToHost), "peers");
    bool good = !st;
    for (int way = 0; way < WAYS; way++) {
        const void *want = host, *peers = host + (1 + way) * N; /* bits, not values */
        good = good && memcmp(want, peers, N * sizeof *x) == 0;
    }
    free(host);
    if (!st) st = all_agree(c, good, &good, err);
    if (!good) m->peers.n_ranks = 0;
    return st;
}

bool bg_cuda_comm_peers(const bg_cuda *c)
{
    return c->ranks && c->ranks->peers.n_ranks > 0;
}

bg_status bg_cuda_comm_new(bg_cuda *c, bg_error *err)
{
    bg_comm *host = c->config.comm;
    if (!host || bg_comm_size(host) == 1) return BG_OK;
    struct bg_cuda_comm *m = calloc(1, sizeof *m);
    hello *all = calloc((size_t)bg_comm_size(host), sizeof *all);
    c->ranks = m;
    bg_status st = BG_OK;
    if (!m || !all) {
        st = bg_fail(err, BG_NOMEM, "NCCL: out of memory");
        goto out;
    }
    m->rank = bg_comm_rank(host);
    m->n = bg_comm_size(host);
    if (m->n > BGK_MAX_RANKS) {
        st = bg_fail(err, BG_ARG, "%d ranks: %d at most on GPUs", m->n, BGK_MAX_RANKS);
        goto out;
    }
    const int64_t vocab = c->config.vocab_size;
    m->shard = (vocab + m->n - 1) / m->n;
    m->standin_ns = bg_comm_standin_ns(host);
    uint64_t logits = (uint64_t)c->config.max_out * (uint64_t)m->shard * (uint64_t)m->n;
    if (logits > LOGIT_FLOATS) logits = LOGIT_FLOATS;
    m->work_floats = logits > WORK_FLOATS ? (size_t)logits : WORK_FLOATS;
    st = bg_cuda_take(c, &m->work, m->work_floats * sizeof(float), "collectives", err);
    if (st || m->standin_ns >= 0) goto out;
    st = load_nccl(&m->f, err);

    struct cudaDeviceProp p;
    hello mine = {{0}, {{0}}};
    if (!st) st = bg_cuda_done(err, cudaGetDeviceProperties(&p, c->device), "asking the GPU");
    if (!st) memcpy(mine.gpu, p.uuid.bytes, sizeof mine.gpu);
    if (!st) st = exchange(c, &mine, all, err);
    if (!st) set_environment(gpus_shared(all, m->n), m->rank);
    if (!st && m->rank == 0) st = done(m, m->f.get_unique_id(&mine.id), "rank 0", err);
    if (!st) st = exchange(c, &mine, all, err);
    if (!st) st = done(m, m->f.init_rank(&m->nccl, m->n, all[0].id, m->rank), "joining", err);
    if (!st) st = warm_up(c, err);
    if (!st && m->n <= BGK_MAX_PEERS) st = map_peers(c, err);
    if (!st && bg_cuda_comm_peers(c)) st = prove_peers(c, err);
out:
    free(all);
    return st;
}

void bg_cuda_comm_free(bg_cuda *c)
{
    /* The communicator is left to the end of the process: ending it waits for the other ranks,
     * which may be dead. */
    free(c->ranks);
    c->ranks = NULL;
}

/* ---- sums ------------------------------------------------------------------------------------ */

static bg_status sum_short(bg_cuda *c, float *x, size_t n, bg_error *err)
{
    const struct bg_cuda_comm *m = c->ranks;
    bg_status st = done(m, m->f.all_gather(x, m->work, n, NCCL_FLOAT32, m->nccl, c->stream),
                        "all-gather", err);
    if (st) return st;
    return bg_cuda_done(err, bgk_sum_ranks(x, m->work, (int64_t)n, m->n, (int64_t)n, c->stream),
                        "op all_reduce");
}

/* slice floats from each rank: x has n slices. Part r of the workspace is what rank r has of this
 * rank's slice. */
static bg_status sum_long(bg_cuda *c, float *x, size_t slice, bg_error *err)
{
    const struct bg_cuda_comm *m = c->ranks;
    const size_t own = (size_t)m->rank * slice;
    bg_status st = bg_cuda_done(err,
                                cudaMemcpyAsync(m->work + own, x + own, slice * sizeof *x,
                                                cudaMemcpyDeviceToDevice, c->stream),
                                "op all_reduce");
    if (st) return st;
    int e = m->f.group_start();
    for (int r = 0; !e && r < m->n; r++) {
        if (r == m->rank) continue;
        const size_t at = (size_t)r * slice;
        e = m->f.send(x + at, slice, NCCL_FLOAT32, r, m->nccl, c->stream);
        if (!e) e = m->f.recv(m->work + at, slice, NCCL_FLOAT32, r, m->nccl, c->stream);
    }
    const int end = m->f.group_end();
    st = done(m, e ? e : end, "exchange of slices", err);
    if (!st)
        st = bg_cuda_done(
            err, bgk_sum_ranks(x + own, m->work, (int64_t)slice, m->n, (int64_t)slice, c->stream),
            "op all_reduce");
    if (!st)
        st = done(m, m->f.all_gather(x + own, x, slice, NCCL_FLOAT32, m->nccl, c->stream),
                  "all-gather", err);
    /* Kernels that start before the one before has ended shall follow one of ours, which says so.
     * It copies a few values onto themselves. */
    if (!st)
        st = bg_cuda_done(err, bgk_sum_ranks(x, x, SLICE, 1, SLICE, c->stream), "op all_reduce");
    return st;
}

/* By peers, in pieces. */
static bg_status sum_by_peers(bg_cuda *c, float *x, size_t n, bg_error *err)
{
    const struct bg_cuda_comm *m = c->ranks;
    const size_t most = m->sums == BG_CUDA_SUMS_LINES ? BGK_LINE_FLOATS : BGK_PEER_FLOATS;
    bg_status st = BG_OK;
    for (size_t at = 0; !st && at < n; at += most) {
        const int64_t piece = (int64_t)(n - at < most ? n - at : most);
        const bgk_sum way = m->sums == BG_CUDA_SUMS_LINES   ? BGK_SUM_LINES
                            : m->sums == BG_CUDA_SUMS_ONCE  ? BGK_SUM_ONCE
                            : m->sums == BG_CUDA_SUMS_TWICE ? BGK_SUM_TWICE
                                                            : bgk_sum_way(piece, m->n);
        st = bg_cuda_done(err, bgk_sum_peers(x + at, piece, &m->peers, way, c->stream),
                          "op all_reduce");
    }
    return st;
}

static bg_status sum(bg_cuda *c, float *x, size_t n, bg_error *err)
{
    const struct bg_cuda_comm *m = c->ranks;
    const size_t ranks = (size_t)m->n, most = m->work_floats / ranks;
    if (m->standin_ns >= 0)
        return bg_cuda_done(err, bgk_stand_in(m->standin_ns, c->stream), "op all_reduce");
    if (m->sums == BG_CUDA_SUMS_LIBRARY)
        return done(m, m->f.all_reduce(x, x, n, NCCL_FLOAT32, NCCL_SUM, m->nccl, c->stream),
                    "all-reduce", err);
    if (m->peers.n_ranks && n % SLICE == 0 && n > 0 && m->sums != BG_CUDA_SUMS_NCCL)
        return sum_by_peers(c, x, n, err);
    bg_status st = BG_OK;
    size_t at = 0;
    while (!st && m->n > 2 && n - at > SHORT_FLOATS) {
        const size_t left = n - at < m->work_floats ? n - at : m->work_floats;
        const size_t slice = left / ranks / SLICE * SLICE;
        st = sum_long(c, x + at, slice, err);
        at += slice * ranks;
    }
    while (!st && at < n) {
        const size_t piece = n - at < most ? n - at : most / SLICE * SLICE;
        st = sum_short(c, x + at, piece, err);
        at += piece;
    }
    return st;
}

void bg_cuda_comm_force(bg_cuda *c, bg_cuda_sums sums)
{
    if (c->ranks) c->ranks->sums = sums;
}

bg_status bg_cuda_all_reduce_rows(bg_cuda *c, bg_act *x, int64_t rows, bg_error *err)
{
    if (!c->ranks) return BG_OK;
    if (x->layout != BGK_ROWS || rows > x->max_rows)
        return bg_fail(err, BG_INTERNAL, "op all_reduce: %s: %lld rows of layout %d", x->name,
                       (long long)rows, x->layout);
    return sum(c, x->data, (size_t)(rows * x->cols), err);
}

bool bg_cuda_fuses_sum(const bg_backend *b, const bg_act *out, const bg_act *y)
{
    const bg_cuda *c = (const bg_cuda *)b;
    const struct bg_cuda_comm *m = c->ranks;
    if (!m) return false;
    /* A rank that is alone takes the road of one whose GPU reaches the others'. */
    const int peers = m->standin_ns < 0 ? m->peers.n_ranks : m->n <= BGK_MAX_PEERS ? m->n : 0;
    return peers > 1 && m->sums == BG_CUDA_SUMS_AUTO && out->layout == BGK_TILES &&
           y->layout == BGK_ROWS && bgk_sum_peers_norm_fits(c->s.n_rows, (int)y->cols);
}

bg_status bg_cuda_all_reduce_norm(bg_backend *b, bg_act *out, bg_act *x, const bg_act *y,
                                  const bg_vec *w, float eps, bg_error *err)
{
    bg_cuda *c = (bg_cuda *)b;
    const int rows = c->s.n_rows;
    if (rows > out->max_rows || rows > x->max_rows || rows > y->max_rows || out->cols < w->n ||
        x->cols != w->n || y->cols != w->n)
        return bg_fail(err, BG_INTERNAL, "op all_reduce_norm: %s, %s, %s and %lld weights",
                       out->name, x->name, y->name, (long long)w->n);
    const bg_status waits = bg_cuda_flush(c, err);
    if (waits) return waits;
    const bgk_out o = bg_cuda_out(out);
    const struct bg_cuda_comm *m = c->ranks;
    const cudaError_t e =
        m->standin_ns < 0 ? bgk_sum_peers_norm(&o, x->data, x->cols, y->data, y->cols, w->data, eps,
                                               rows, (int)w->n, &m->peers, c->stream)
                          : bgk_stand_in_norm(&o, x->data, x->cols, y->data, y->cols, w->data, eps,
                                              rows, (int)w->n, m->n, m->standin_ns, c->stream);
    return bg_cuda_done(err, e, "op all_reduce_norm");
}

/* ---- logits ---------------------------------------------------------------------------------- */

int64_t bg_cuda_shard_cols(const bg_cuda *c)
{
    return c->ranks ? c->ranks->shard : c->config.vocab_size;
}

/* Rows are gathered from the last on: row t of a share begins at t * shard, row t of the logits at
 * t * vocab, which is never before, so what is written never hits a share that is still to go. */
bg_status bg_cuda_gather_logits(bg_cuda *c, int n_out, const int64_t *rank_rows, bg_error *err)
{
    const struct bg_cuda_comm *m = c->ranks;
    if (!m) return BG_OK;
    const int64_t vocab = c->config.vocab_size, shard = m->shard;
    const bool alone = m->standin_ns >= 0;
    int64_t sum = 0;
    for (int r = 0; r < m->n; r++) {
        sum += rank_rows[r];
        if (rank_rows[r] < 0 || rank_rows[r] > shard) sum = -vocab;
    }
    if (sum != vocab)
        return bg_fail(err, BG_INTERNAL, "op logits: shares of the vocabulary do not make up %lld",
                       (long long)vocab);
    const int most = (int)((int64_t)m->work_floats / (shard * m->n));
    bg_status st = BG_OK;
    for (int end = n_out; !st && end > 0;) {
        const int rows = end < most ? end : most;
        end -= rows;
        const size_t n = (size_t)(rows * shard);
        st = alone ? bg_cuda_done(err,
                                  cudaMemcpyAsync(m->work, c->logits + end * shard,
                                                  n * sizeof *m->work, cudaMemcpyDeviceToDevice,
                                                  c->stream),
                                  "op logits")
                   : done(m,
                          m->f.all_gather(c->logits + end * shard, m->work, n, NCCL_FLOAT32,
                                          m->nccl, c->stream),
                          "all-gather", err);
        if (!st)
            st = bg_cuda_done(err,
                              bgk_place_shards(c->logits + end * vocab, vocab, m->work, shard,
                                               rank_rows, m->n, alone ? m->rank : -1, rows,
                                               c->stream),
                              "op logits");
    }
    return st;
}
