/* Options, model and free memory to numbers. */
#include "job/job.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "backend/device.h"
#include "base/clock.h"
#include "job/devices.h"
#include "job/gpu_sizes.h"

enum { RANK_OVERHEAD = 64 << 20 }; /* code, stacks, tables, rings of a rank */
enum { MOST_BLOCKS = 1 << 24, MOST_GPU_BLOCKS = 1 << 20 }; /* tables have a price, too */
enum { CPU_SEQS = 64, CPU_TOKENS = 512, GPU_SEQS = 512, GPU_TOKENS = 8192 };

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
    case BG_KV_CHOICE_Q8:
        return BG_CACHE_Q8;
    default:
        return job->compute == BG_COMPUTE_F32 ? BG_CACHE_F32 : BG_CACHE_F16;
    }
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* What depends on the device when it was not asked for. */
static void set_limits(bg_memory_plan *p, const bg_job *job, bool gpu)
{
    p->max_num_seqs = (int)(job->max_num_seqs ? job->max_num_seqs : gpu ? GPU_SEQS : CPU_SEQS);
    p->max_batched_tokens = (int)(job->max_num_batched_tokens ? job->max_num_batched_tokens
                                  : gpu                       ? GPU_TOKENS
                                                              : CPU_TOKENS);
    p->max_step_tokens =
        p->max_batched_tokens > p->max_num_seqs ? p->max_batched_tokens : p->max_num_seqs;
}

void bg_gpu_limits(bg_memory_plan *p, const bg_job *job)
{
    set_limits(p, job, true);
}

/* Which device each rank gets: p->gpus, and *free_bytes of them for the keys and values of a
 * replica (0: it is the CPU). */
static bg_status choose_device(bg_memory_plan *p, const bg_job *job, const bg_text_model *m,
                               const bg_shard *shards, uint64_t *free_bytes, bg_error *err)
{
    int n;
    char why[400];
    bg_gpu list[BG_MAX_GPUS];
    bg_device_choice choice;
    bg_device_plan dp;
    *free_bytes = 0;
    snprintf(p->device, sizeof p->device, "CPU");
    bg_status st = bg_devices_parse(&choice, job->device ? job->device : "auto", err);
    if (st || choice.cpu || (choice.automatic && !bg_gpus_likely())) return st;
    st = bg_gpus_probe(list, &n, why, sizeof why, err);
    if (st || (!n && choice.automatic)) return st;
    if (!n) return bg_fail(err, BG_ARG, "--device %s: %s", job->device, why);

    uint64_t need[BG_MAX_RANKS], kv_sum = 0, kv_most = 0;
    p->tiled = bg_gpu_tiled(&list[0], (bg_compute)job->compute);
    if (job->fast_math && !p->tiled)
        return bg_fail(err, BG_ARG,
                       "--fast-math needs GPUs of compute capability 9.x and --compute native");
    set_limits(p, job, true);
    for (int i = 0; i < n; i++)
        list[i].free_bytes = bg_gpu_budget(&list[i], job->gpu_memory_utilization);
    for (int r = 0; r < p->tp; r++) {
        const bg_gpu_bytes b = bg_gpu_needs(m, p, job, &shards[r], p->tiled);
        const uint64_t kv = bg_kv_bytes_per_token(&m->desc, &shards[r], p->cache_type);
        need[r] = b.weights + b.buffers;
        if (r < 8) p->weights[r] = b.weights;
        if (r < 8) p->activations[r] = b.buffers;
        kv_sum += kv;
        kv_most = kv > kv_most ? kv : kv_most;
    }
    bg_error own = {0};
    st = bg_devices_assign(&dp, &choice, list, n, p->tp, p->dp, need, &own);
    if (st && choice.automatic && !job->fast_math) { /* as if there were none, but not silently */
        snprintf(p->device, sizeof p->device, "CPU (not on a GPU: %.280s)", own.text);
        p->tiled = false;
        return BG_OK;
    }
    if (st)
        return bg_fail(err, st, "%s%s", own.text,
                       job->fast_math ? "; --fast-math takes 2 bytes a weight of it" : "");
    for (int r = 0; r < p->tp * p->dp; r++)
        p->gpus[r] = 1 + list[dp.gpus[r]].device;
    p->gpu = p->gpus[0];
    const int ranks = p->tp * p->dp;
    if (ranks == 1)
        snprintf(p->device, sizeof p->device, "%s", list[dp.gpus[0]].name);
    else
        snprintf(p->device, sizeof p->device, "%d ranks on %s%s", ranks, list[dp.gpus[0]].name,
                 dp.shared == ranks ? "" : " and others");
    p->budget = list[dp.gpus[0]].free_bytes / (uint64_t)dp.shared;
    /* The rank with the most keys and values sets how many fit. */
    *free_bytes =
        (uint64_t)((double)dp.free_bytes * (double)kv_sum / (double)(kv_most ? kv_most : 1));
    return BG_OK;
}

static bg_status too_small(const bg_memory_plan *p, const bg_job *job, const char *need,
                           const char *have, bg_error *err)
{
    char budget[32], weights[32], rest[32];
    bg_format_bytes(p->budget, budget, sizeof budget);
    bg_format_bytes(p->weights[0], weights, sizeof weights);
    bg_format_bytes(p->activations[0], rest, sizeof rest);
    return bg_fail(err, BG_ARG,
                   "one sequence of %d tokens needs %s of KV cache and there are %s: of the GPU's "
                   "memory %s may be used (--gpu-memory-utilization %g, and what is free), weights "
                   "take %s, buffers %s; lower --max-model-len, --max-num-seqs or "
                   "--max-num-batched-tokens%s%s",
                   p->max_model_len, need, have, budget, job->gpu_memory_utilization, weights, rest,
                   job->kv_cache_memory ? ", or raise --kv-cache-memory" : "",
                   job->fast_math ? ", or leave --fast-math out (2 bytes a weight)" : "");
}

static bg_status plan_kv(bg_memory_plan *p, const bg_job *job, uint64_t gpu_bytes, bg_error *err)
{
    int64_t per_block = (int64_t)p->kv_bytes_per_token * p->block_tokens;
    int64_t per_seq = (p->max_model_len + p->block_tokens - 1) / p->block_tokens;
    int64_t wanted = per_seq * p->max_num_seqs, blocks;
    char have[32], need[32];
    if (per_block < 1) per_block = 1;
    if (job->kv_cache_memory) {
        blocks = least(job->kv_cache_memory / p->dp / per_block, wanted);
        bg_format_bytes((uint64_t)job->kv_cache_memory, have, sizeof have);
        bg_format_bytes(gpu_bytes * (uint64_t)p->dp, need, sizeof need);
        if (p->gpu && (uint64_t)(job->kv_cache_memory / p->dp) > gpu_bytes)
            return bg_fail(
                err, BG_ARG,
                "--kv-cache-memory: %s, and %s are left beside weights and buffers (with "
                "--gpu-memory-utilization %g)",
                have, need, job->gpu_memory_utilization);
    } else {
        uint64_t free_bytes = p->gpu ? gpu_bytes : available_memory() / 4 / (uint64_t)p->dp;
        /* A GPU's memory is there to be used: what no running sequence needs keeps prefixes. */
        if (p->gpu) wanted *= 2;
        blocks = free_bytes || p->gpu ? least((int64_t)free_bytes / per_block, wanted) : wanted;
        bg_format_bytes(free_bytes, have, sizeof have);
    }
    blocks = least(blocks, p->gpu && per_seq < MOST_GPU_BLOCKS ? MOST_GPU_BLOCKS : MOST_BLOCKS);
    bg_format_bytes((uint64_t)(per_seq * per_block), need, sizeof need);
    if (blocks < per_seq && job->max_model_len == 0 && !job->kv_cache_memory && blocks >= 1) {
        /* The context was not asked for: take what memory allows. */
        p->max_model_len = (int)(blocks * p->block_tokens);
    } else if (blocks < per_seq && p->gpu) {
        return too_small(p, job, need, have, err);
    } else if (blocks < per_seq) {
        return bg_fail(err, BG_ARG,
                       "one sequence of %d tokens needs %s of KV cache and there are %s: lower "
                       "--max-model-len or raise --kv-cache-memory",
                       p->max_model_len, need, have);
    }
    p->n_blocks = (int)blocks + 1; /* and the scratch block */
    return BG_OK;
}

bg_status bg_plan_memory(bg_memory_plan *p, const bg_job *job, const bg_text_model *model,
                         bg_error *err)
{
    *p = (bg_memory_plan){0};
    bg_text_model limited = *model, *m = &limited;
    int n_cpus = processors();
    p->tp = (int)job->tp;
    int64_t threads = job->threads ? job->threads : n_cpus;
    p->dp = job->dp > 1 ? (int)job->dp : 1;
    const int ranks = p->tp * p->dp;
    if (ranks > BG_MAX_RANKS)
        return bg_fail(err, BG_ARG, "--tp %d --dp %d: %d ranks, %d at most", p->tp, p->dp, ranks,
                       BG_MAX_RANKS);
    p->threads_per_rank = (int)(threads / ranks > 0 ? threads / ranks : 1);
    if (job->max_num_batched_tokens && job->max_num_batched_tokens < 16)
        return bg_fail(err, BG_ARG, "--max-num-batched-tokens: %lld is outside 16 to 65536",
                       (long long)job->max_num_batched_tokens);
    p->block_tokens = (int)job->block_size;
    p->max_model_len = (int)(job->max_model_len ? job->max_model_len : m->desc.n_ctx_train);
    bg_desc_limit(&limited.desc, p->max_model_len);
    p->cache_type = cache_type(job);
    bg_shard shards[BG_MAX_RANKS] = {0};
    const int of =
        job->rank_of ? (int)job->rank_of : p->tp; /* bench: the first of so many, alone */
    for (int r = 0; r < p->tp; r++) {
        bg_status st = bg_shard_plan(&shards[r], &m->desc, m->gguf, r, of, err);
        if (st) return st;
        p->kv_bytes_per_token += bg_kv_bytes_per_token(&m->desc, &shards[r], p->cache_type);
    }
    uint64_t gpu_bytes;
    bg_status st = choose_device(p, job, m, shards, &gpu_bytes, err);
    if (!st && job->fast_math && !p->gpu)
        return bg_fail(err, BG_ARG,
                       "--fast-math needs a GPU, and this is to run on the CPU (--device %s); the "
                       "CPU has no such mode",
                       job->device ? job->device : "auto");
    if (!st) set_limits(p, job, p->gpu != 0);
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
        const int at = r < 8 ? r : 7;
        if (!p->gpu) {
            p->weights[at] = shards[r].weight_bytes;
            p->activations[at] = bg_act_bytes(&m->desc, &shards[r], &bc) + RANK_OVERHEAD;
        }
        p->total += (p->weights[at] + kv + p->activations[at]) * (uint64_t)p->dp;
        p->kv[at] = kv;
    }
    return BG_OK;
}

void bg_rank_config_fill(bg_rank_config *c, const bg_job *job, const bg_memory_plan *p, int replica)
{
    *c = (bg_rank_config){.model_path = job->model,
                          .tp = p->tp,
                          .first_rank = replica * p->tp,
                          .compute = (bg_compute)job->compute,
                          .cache_type = p->cache_type,
                          .threads_per_rank = p->threads_per_rank,
                          .pin_threads = job->pin_threads,
                          .check = job->check_ops,
                          .eager = job->eager,
                          .dummy = job->load_format == BG_LOAD_DUMMY,
                          .fast_math = job->fast_math,
                          .isa = job->isa,
                          .n_blocks = p->n_blocks,
                          .block_tokens = p->block_tokens,
                          .tune_table = job->tune_table,
                          .max_num_seqs = p->max_num_seqs,
                          .max_step_tokens = p->max_step_tokens,
                          .max_model_len = p->max_model_len};
    memcpy(c->gpus, &p->gpus[replica * p->tp], (size_t)p->tp * sizeof *c->gpus);
}
