/* Options, model and free memory to numbers. */
#include "job/job.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "backend/device.h"
#include "base/clock.h"

enum { RANK_OVERHEAD = 64 << 20 }; /* code, stacks, tables, rings of a rank */

/* Memory a new process could take, as the kernel and the limit of addresses (ulimit -v) have it; 0
 * when they do not say. */
static uint64_t available_memory(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[256];
    unsigned long long kb = 0;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kb) == 1) break;
    if (f && fclose(f) != 0) return 0;
    uint64_t bytes = (uint64_t)kb * 1024;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        (!bytes || limit.rlim_cur < bytes))
        bytes = limit.rlim_cur;
    return bytes;
}

static int processors(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

static bg_cache_type cache_type(const bg_job *job)
{
    switch (job->kv_cache_type) {
    case BG_KV_CHOICE_F16:
        return BG_CACHE_F16;
    case BG_KV_CHOICE_BF16:
        return BG_CACHE_BF16;
    case BG_KV_CHOICE_F32:
        return BG_CACHE_F32;
    default:
        return job->compute == BG_COMPUTE_F32 ? BG_CACHE_F32 : BG_CACHE_F16;
    }
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* On a GPU weights are half floats (float32 in proof mode), whatever the file has. */
static uint64_t gpu_weight_bytes(const bg_job *job, const bg_text_model *m)
{
    uint64_t values = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(m->gguf); i++) {
        const bg_tensor *t = bg_gguf_tensor(m->gguf, i);
        values += (uint64_t)t->ne[0] * (uint64_t)t->ne[1] * (uint64_t)t->ne[2] * (uint64_t)t->ne[3];
    }
    return values * (job->compute == BG_COMPUTE_F32 ? 4 : 2);
}

/* Which device: p->gpu, and *free_bytes of it for keys and values (0: it is the CPU). */
static bg_status choose_device(bg_memory_plan *p, const bg_job *job, const bg_text_model *m,
                               uint64_t *free_bytes, bg_error *err)
{
    const char *name = job->device ? job->device : "auto";
    int wanted = -1, n;
    char why[400], tail;
    bg_gpu list[BG_MAX_GPUS];
    *free_bytes = 0;
    snprintf(p->device, sizeof p->device, "CPU");
    bool automatic = strcmp(name, "auto") == 0, any = automatic || strcmp(name, "cuda") == 0;
    if (strcmp(name, "cpu") == 0 || (automatic && !bg_gpus_likely())) return BG_OK;
    if (!any && (sscanf(name, "cuda:%d%c", &wanted, &tail) != 1 || wanted < 0))
        return bg_fail(err, BG_ARG, "--device: \"%s\" is none of auto, cpu, cuda, cuda:I", name);
    if (job->tp > 1) { /* collectives between GPUs are not there yet */
        if (automatic) return BG_OK;
        return bg_fail(err, BG_ARG, "--device %s: one GPU only for now, not --tp %lld", name,
                       (long long)job->tp);
    }
    bg_status st = bg_gpus_probe(list, &n, why, sizeof why, err);
    if (st) return st;
    const uint64_t weights = gpu_weight_bytes(job, m), reserve = (uint64_t)1 << 30;
    for (int i = 0; i < n; i++) {
        if (wanted >= 0 && list[i].device != wanted) continue;
        if (list[i].free_bytes < weights + reserve) {
            if (any) continue;
            return bg_fail(err, BG_ARG,
                           "--device %s: %.1f GB of weights do not fit into %.1f GB free", name,
                           (double)weights * 1e-9, (double)list[i].free_bytes * 1e-9);
        }
        p->gpu = 1 + list[i].device;
        snprintf(p->device, sizeof p->device, "%s", list[i].name);
        *free_bytes = (list[i].free_bytes - weights - reserve) / 10 * 9;
        return BG_OK;
    }
    if (automatic) return BG_OK;
    return bg_fail(err, BG_ARG, "--device %s: %s", name,
                   n ? "no such GPU has memory enough for the model" : why);
}

static bg_status plan_kv(bg_memory_plan *p, const bg_job *job, uint64_t gpu_bytes, bg_error *err)
{
    int64_t per_block = (int64_t)p->kv_bytes_per_token * p->block_tokens;
    int64_t per_seq = (p->max_model_len + p->block_tokens - 1) / p->block_tokens;
    int64_t wanted = per_seq * p->max_num_seqs, blocks;
    char have[32], need[32];
    if (per_block < 1) per_block = 1;
    if (job->kv_cache_memory) {
        blocks = least(job->kv_cache_memory / per_block, wanted);
        bg_format_bytes((uint64_t)job->kv_cache_memory, have, sizeof have);
    } else {
        uint64_t free_bytes = gpu_bytes ? gpu_bytes : available_memory() / 4;
        blocks = free_bytes ? least((int64_t)free_bytes / per_block, wanted) : wanted;
        bg_format_bytes(free_bytes, have, sizeof have);
    }
    blocks = least(blocks, 1 << 24);
    bg_format_bytes((uint64_t)(per_seq * per_block), need, sizeof need);
    if (blocks < per_seq && job->max_model_len == 0 && !job->kv_cache_memory && blocks >= 1) {
        /* The context was not asked for: take what memory allows. */
        p->max_model_len = (int)(blocks * p->block_tokens);
    } else if (blocks < per_seq) {
        return bg_fail(err, BG_ARG,
                       "one sequence of %d tokens needs %s of KV cache and there are %s: lower "
                       "--max-model-len or raise --kv-cache-memory",
                       p->max_model_len, need, have);
    }
    p->n_blocks = (int)blocks + 1; /* and the scratch block */
    return BG_OK;
}

bg_status bg_plan_memory(bg_memory_plan *p, const bg_job *job, const bg_text_model *m,
                         bg_error *err)
{
    *p = (bg_memory_plan){0};
    int n_cpus = processors();
    p->tp = (int)job->tp;
    int64_t threads = job->threads ? job->threads : n_cpus;
    p->threads_per_rank = (int)(threads / p->tp > 0 ? threads / p->tp : 1);
    p->max_num_seqs = (int)job->max_num_seqs;
    p->block_tokens = (int)job->block_size;
    p->max_model_len = (int)(job->max_model_len ? job->max_model_len : m->desc.n_ctx_train);
    p->max_step_tokens =
        (int)(job->max_num_batched_tokens > job->max_num_seqs ? job->max_num_batched_tokens
                                                              : job->max_num_seqs);
    p->cache_type = cache_type(job);
    bg_shard shards[64] = {0};
    for (int r = 0; r < p->tp; r++) {
        bg_status st = bg_shard_plan(&shards[r], &m->desc, m->gguf, r, p->tp, err);
        if (st) return st;
        p->kv_bytes_per_token += bg_kv_bytes_per_token(&m->desc, &shards[r], p->cache_type);
    }
    uint64_t gpu_bytes;
    bg_status st = choose_device(p, job, m, &gpu_bytes, err);
    if (!st) st = plan_kv(p, job, gpu_bytes, err);
    if (st) return st;
    const bg_backend_config bc = {.max_tokens = p->max_step_tokens,
                                  .max_seqs = p->max_num_seqs,
                                  .max_out = p->max_num_seqs,
                                  .max_ctx = p->max_model_len,
                                  .vocab_size = m->desc.vocab_size};
    for (int r = 0; r < p->tp; r++) {
        uint64_t kv = bg_kv_bytes_per_token(&m->desc, &shards[r], p->cache_type) *
                      (uint64_t)p->block_tokens * (uint64_t)p->n_blocks;
        uint64_t acts = bg_act_bytes(&m->desc, &shards[r], &bc) + RANK_OVERHEAD;
        p->total += shards[r].weight_bytes + kv + acts;
        if (r >= 8) continue;
        p->weights[r] = shards[r].weight_bytes;
        p->kv[r] = kv;
        p->activations[r] = acts;
    }
    return BG_OK;
}

void bg_rank_config_fill(bg_rank_config *c, const bg_job *job, const bg_memory_plan *p)
{
    *c = (bg_rank_config){.model_path = job->model,
                          .tp = p->tp,
                          .gpu = p->gpu,
                          .compute = (bg_compute)job->compute,
                          .cache_type = p->cache_type,
                          .threads_per_rank = p->threads_per_rank,
                          .pin_threads = job->pin_threads,
                          .check = job->check_ops,
                          .isa = job->isa,
                          .n_blocks = p->n_blocks,
                          .block_tokens = p->block_tokens,
                          .max_num_seqs = p->max_num_seqs,
                          .max_step_tokens = p->max_step_tokens,
                          .max_model_len = p->max_model_len};
}
