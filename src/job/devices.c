#include "job/devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bg_status bg_devices_parse(bg_device_choice *d, const char *text, bg_error *err)
{
    *d =
        (bg_device_choice){.cpu = strcmp(text, "cpu") == 0, .automatic = strcmp(text, "auto") == 0};
    if (d->cpu || d->automatic || strcmp(text, "cuda") == 0) return BG_OK;
    const char *p = strncmp(text, "cuda:", 5) == 0 ? text + 5 : NULL;
    while (p) {
        char *end;
        long v = *p >= '0' && *p <= '9' ? strtol(p, &end, 10) : -1;
        if (v < 0 || v > 9999 || d->n == BG_MAX_RANKS) break;
        d->named[d->n++] = (int)v;
        if (!*end) return BG_OK;
        p = *end == ',' ? end + 1 : NULL;
    }
    return bg_fail(err, BG_ARG,
                   "--device: \"%.80s\" is none of auto, cpu, cuda, cuda:I, cuda:I,J,...", text);
}

static int find(const bg_gpu *list, int n, int device)
{
    for (int i = 0; i < n; i++)
        if (list[i].device == device) return i;
    return -1;
}

/* What the ranks say about themselves in messages. */
static void ranks_text(int tp, int dp, char *out, size_t size)
{
    if (tp > 1 && dp > 1)
        snprintf(out, size, "--tp %d --dp %d (%d ranks)", tp, dp, tp * dp);
    else
        snprintf(out, size, "%s %d", dp > 1 ? "--dp" : "--tp", tp * dp);
}

static bg_status assign_named(bg_device_plan *p, const bg_device_choice *d, const bg_gpu *list,
                              int n, int ranks, const char *who, bg_error *err)
{
    if (d->n > ranks || ranks % d->n)
        return bg_fail(
            err, BG_ARG,
            "--device names %d GPUs for %s: name one for each rank (the same one several "
            "times, if they are to share it)",
            d->n, who);
    for (int r = 0; r < ranks; r++) {
        const int device = d->named[r % d->n];
        p->gpus[r] = find(list, n, device);
        if (p->gpus[r] < 0)
            return bg_fail(err, BG_ARG, "--device: there is no GPU %d; there are %d, from 0",
                           device, n);
    }
    return BG_OK;
}

static bg_status assign_any(bg_device_plan *p, const bg_gpu *list, int n, int ranks, int tp,
                            const uint64_t *need, const char *who, bg_error *err)
{
    int r = 0;
    for (int i = 0; i < n && r < ranks; i++)
        if (list[i].free_bytes >= need[r % tp]) p->gpus[r++] = i;
    if (r == ranks) return BG_OK;
    if (ranks > n)
        return bg_fail(
            err, BG_ARG,
            "%s: there %s only %d GPU%s; ask for fewer ranks, or name GPUs that ranks are "
            "to share: --device cuda:0,0 (slow, for tests)",
            who, n == 1 ? "is" : "are", n, n == 1 ? "" : "s");
    return bg_fail(err, BG_ARG,
                   "--device cuda: a rank needs %.1f GB beside keys and values, and %d of %d GPUs "
                   "have that free: more ranks (--tp) need less each; see also --max-num-seqs",
                   (double)need[r % tp] * 1e-9, r, n);
}

bg_status bg_devices_assign(bg_device_plan *p, const bg_device_choice *d, const bg_gpu *list, int n,
                            int tp, int dp, const uint64_t *need, bg_error *err)
{
    char who[64];
    int on[BG_MAX_GPUS] = {0};
    *p = (bg_device_plan){.free_bytes = UINT64_MAX};
    ranks_text(tp, dp, who, sizeof who);
    bg_status st = d->n ? assign_named(p, d, list, n, tp * dp, who, err)
                        : assign_any(p, list, n, tp * dp, tp, need, who, err);
    for (int r = 0; !st && r < tp * dp; r++)
        if (++on[p->gpus[r]] > p->shared) p->shared = on[p->gpus[r]];
    for (int r = 0; !st && r < tp * dp; r++) {
        const bg_gpu *g = &list[p->gpus[r]];
        const uint64_t share = g->free_bytes / (uint64_t)on[p->gpus[r]], wanted = need[r % tp];
        if (share < wanted)
            st = bg_fail(err, BG_ARG,
                         "--device: rank %d needs %.1f GB beside keys and values, and its share of "
                         "GPU %d is %.1f GB free: fewer ranks on it, or a smaller --max-num-seqs",
                         r, (double)wanted * 1e-9, g->device, (double)share * 1e-9);
        else if (share - wanted < p->free_bytes)
            p->free_bytes = share - wanted;
    }
    return st;
}
