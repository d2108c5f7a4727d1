#include "job/shard.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

enum { MAX_SHARDS = 1000000 };

/* What is set but empty counts as not set. */
static const char *env_get(char *const *env, const char *name)
{
    size_t n = strlen(name);
    for (int i = 0; env && env[i]; i++)
        if (strncmp(env[i], name, n) == 0 && env[i][n] == '=' && env[i][n + 1])
            return env[i] + n + 1;
    return NULL;
}

/* A whole number of at most 15 digits and nothing else; s[0..n). */
static bool parse(const char *s, size_t n, int64_t *v)
{
    if (!n || n > 15) return false;
    *v = 0;
    for (size_t i = 0; i < n; i++) {
        if (s[i] < '0' || s[i] > '9') return false;
        *v = *v * 10 + (s[i] - '0');
    }
    return true;
}

/* The number in a variable; *v keeps its value when that is not set. */
static bg_status number(char *const *env, const char *name, int64_t *v, bg_error *err)
{
    const char *text = env_get(env, name);
    if (!text || parse(text, strlen(text), v)) return BG_OK;
    return bg_fail(err, BG_ARG, "--shard auto: %s is \"%.40s\", not a whole number", name, text);
}

static bg_status explicit_shard(const char *text, int64_t *index, int64_t *count, bg_error *err)
{
    const char *slash = strchr(text, '/');
    int64_t i = 0, n = 0;
    if (!slash || !parse(text, (size_t)(slash - text), &i) ||
        !parse(slash + 1, strlen(slash + 1), &n))
        return bg_fail(err, BG_ARG, "--shard %.40s: give I/N, such as 2/4, or auto", text);
    if (n < 1 || n > MAX_SHARDS)
        return bg_fail(err, BG_ARG, "--shard %.40s: the number of shards must be 1 to %d", text,
                       MAX_SHARDS);
    if (i < 1 || i > n)
        return bg_fail(err, BG_ARG, "--shard %.40s: shards are numbered from 1 to %lld", text,
                       (long long)n);
    *index = i - 1;
    *count = n;
    return BG_OK;
}

/* One scheduler's array: how its variables are called, and where numbering starts. */
typedef struct array {
    const char *id, *count, *first, *last, *step; /* NULL: it has no such variable */
    int64_t base;                                 /* first task when no variable says */
    const char *remedy;
} array;

static const array arrays[] = {
    {"BATCHGEN_SHARD_INDEX", NULL, NULL, NULL, NULL, 1, "set BATCHGEN_SHARD_COUNT"},
    {"SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN",
     "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP", 1,
     "use sbatch --array=1-N, or set BATCHGEN_SHARD_COUNT"},
    {"JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", NULL, NULL, NULL, 0,
     "set JOB_COMPLETIONS to the Job's completions"},
    {"PBS_ARRAY_INDEX", NULL, NULL, NULL, NULL, 1, "set BATCHGEN_SHARD_COUNT to the array's size"},
    {"PBS_ARRAYID", NULL, NULL, NULL, NULL, 1, "set BATCHGEN_SHARD_COUNT to the array's size"},
    {"SGE_TASK_ID", NULL, "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE", 1,
     "use qsub -t 1-N, or set BATCHGEN_SHARD_COUNT"},
};

static bg_status optional(char *const *env, const char *name, int64_t *v, bg_error *err)
{
    return name ? number(env, name, v, err) : BG_OK;
}

static bg_status from_array(const array *a, char *const *env, int64_t *index, int64_t *count,
                            bg_error *err)
{
    int64_t id = -1, n = 0, first = a->base, last = -1, step = 1;
    bg_status st = number(env, a->id, &id, err);
    if (!st) st = number(env, "BATCHGEN_SHARD_COUNT", &n, err);
    if (!st && !n) {
        st = optional(env, a->count, &n, err);
        if (!st) st = optional(env, a->first, &first, err);
        if (!st) st = optional(env, a->last, &last, err);
        if (!st) st = optional(env, a->step, &step, err);
        if (!step) step = 1;
        if (!n && last >= first) n = (last - first) / step + 1;
    }
    if (st) return st;
    if (n < 1)
        return bg_fail(err, BG_ARG, "--shard auto: %s is %lld, but nothing says of how many: %s",
                       a->id, (long long)id, a->remedy);
    if (n > MAX_SHARDS)
        return bg_fail(err, BG_ARG, "--shard auto: %lld shards, at most %d are allowed",
                       (long long)n, MAX_SHARDS);
    /* A list such as 1,2,7 has holes: its tasks would not be shards 1 to N. Every one says so, and
     * not only those beyond the end. */
    bool holes = last >= 0 && last != first + (n - 1) * step;
    if (holes || id < first || (id - first) % step != 0 || (id - first) / step >= n)
        return bg_fail(err, BG_ARG,
                       "--shard auto: %s is %lld, which is none of %lld tasks from %lld in steps "
                       "of %lld: %s",
                       a->id, (long long)id, (long long)n, (long long)first, (long long)step,
                       a->remedy);
    *index = (id - first) / step;
    *count = n;
    return BG_OK;
}

bg_status bg_shard_resolve(const char *text, char *const *env, int64_t *index, int64_t *count,
                           bg_error *err)
{
    *index = *count = 0;
    if (!text || !*text) return BG_OK;
    if (strcmp(text, "auto") != 0) return explicit_shard(text, index, count, err);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        const char *id = env_get(env, arrays[i].id);
        /* Grid Engine says "undefined" to jobs that are no arrays. */
        if (id && strcmp(id, "undefined") != 0)
            return from_array(&arrays[i], env, index, count, err);
    }
    return bg_fail(err, BG_ARG,
                   "--shard auto: this is no task of an array: none of SLURM_ARRAY_TASK_ID, "
                   "JOB_COMPLETION_INDEX, PBS_ARRAY_INDEX, PBS_ARRAYID, SGE_TASK_ID and "
                   "BATCHGEN_SHARD_INDEX is set; give --shard I/N");
}
