/* Failures on purpose, for tests of what follows them:
 *
 *     BATCHGEN_TEST_GPU_FAULT=step:N[,illegal-address|hang|oom|capture][,rank:R]
 *
 * In step N (from 1) of rank R's process (0) a kernel writes to an address that is none, or never
 * ends, or memory is asked for that no GPU has. capture: taking a graph fails. A rank that is
 * started again counts from 1 again. */
#include "backend/cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { ILLEGAL_ADDRESS, HANG, OOM, CAPTURE, KINDS };

static const char *const NAMES[KINDS] = {"illegal-address", "hang", "oom", "capture"};

struct bg_cuda_fault {
    enum kind kind;
    unsigned long long at, step;
    int *never; /* pinned; what a hanging kernel waits for */
};

bg_status bg_cuda_fault_new(bg_cuda *c, bg_error *err)
{
    const char *text = getenv("BATCHGEN_TEST_GPU_FAULT");
    if (!text || !*text) return BG_OK;
    unsigned long long at = 0;
    int rank = 0, kind = ILLEGAL_ADDRESS;
    bool good = sscanf(text, "step:%llu", &at) == 1;
    const char *p = strchr(text, ',');
    while (good && p) {
        const size_t n = strcspn(++p, ",");
        int k = 0;
        while (k < KINDS && !(strlen(NAMES[k]) == n && strncmp(NAMES[k], p, n) == 0))
            k++;
        if (k < KINDS)
            kind = k;
        else
            good = sscanf(p, "rank:%d", &rank) == 1;
        p = strchr(p, ',');
    }
    if (!good)
        return bg_fail(err, BG_ARG, "BATCHGEN_TEST_GPU_FAULT: \"%s\" is not step:N[,KIND][,rank:R]",
                       text);
    if (rank != (c->config.comm ? bg_comm_rank(c->config.comm) : 0)) return BG_OK;
    struct bg_cuda_fault *f = calloc(1, sizeof *f);
    if (!f) return bg_fail(err, BG_NOMEM, "out of memory");
    c->fault = f;
    f->kind = (enum kind)kind;
    f->at = at;
    bg_status st =
        bg_cuda_done(err, cudaMallocHost((void **)&f->never, sizeof *f->never), "pinned memory");
    if (!st) *f->never = 0;
    return st;
}

bg_status bg_cuda_fault_step(bg_cuda *c, bg_error *err)
{
    struct bg_cuda_fault *f = c->fault;
    if (!f || f->kind == CAPTURE || ++f->step != f->at) return BG_OK;
    if (f->kind == OOM) {
        void *p = NULL;
        return bg_cuda_done(err, cudaMalloc(&p, (size_t)1 << 50), "a fault for a test");
    }
    return bg_cuda_done(err, bgk_fault(f->kind == HANG, f->never, c->stream), "a fault for a test");
}

bool bg_cuda_fault_capture(const bg_cuda *c)
{
    return c->fault && c->fault->kind == CAPTURE;
}

void bg_cuda_fault_free(bg_cuda *c)
{
    if (c->fault && c->fault->never) cudaFreeHost(c->fault->never);
    free(c->fault);
    c->fault = NULL;
}
