/* --shard: I/N, and auto from each scheduler's variables. */
#include "job/shard.h"

#include <string.h>

#include <criterion/criterion.h>

#define ENV(...) ((char *const *)(const char *const[]){__VA_ARGS__, NULL})

static void good(const char *text, char *const *env, int64_t index, int64_t count)
{
    int64_t i = -1, n = -1;
    bg_error err = {0};
    bg_status st = bg_shard_resolve(text, env, &i, &n, &err);
    cr_expect(!st && i == index && n == count, "%s %s: got %lld of %lld (%s)",
              text ? text : "(none)", env ? env[0] : "", (long long)i, (long long)n, err.text);
}

static void bad(const char *text, char *const *env, const char *why)
{
    int64_t i, n;
    bg_error err = {0};
    bg_status st = bg_shard_resolve(text, env, &i, &n, &err);
    cr_expect(st == BG_ARG && strstr(err.text, why), "%s %s: status %d, \"%s\" lacks \"%s\"", text,
              env ? env[0] : "", st, err.text, why);
    cr_expect(i == 0 && n == 0, "a failure leaves no shard");
}

Test(shard, none)
{
    good(NULL, NULL, 0, 0);
    good("", ENV("SLURM_ARRAY_TASK_ID=1"), 0, 0);
}

Test(shard, given)
{
    good("1/1", NULL, 0, 1);
    good("2/4", NULL, 1, 4);
    good("4/4", ENV("SLURM_ARRAY_TASK_ID=1", "SLURM_ARRAY_TASK_COUNT=9"), 3, 4);
    good("1000000/1000000", NULL, 999999, 1000000);
    bad("0/4", NULL, "from 1 to 4");
    bad("5/4", NULL, "from 1 to 4");
    bad("1/0", NULL, "must be 1 to 1000000");
    bad("1/1000001", NULL, "must be 1 to 1000000");
    const char *const malformed[] = {"2",     "/",     "2/",    "/4",
                                     "-1/4",  "1/4/4", " 1/4",  "1/4 ",
                                     "1.0/4", "Auto",  "0x1/4", "1/99999999999999999999"};
    for (size_t k = 0; k < sizeof malformed / sizeof *malformed; k++)
        bad(malformed[k], NULL, "give I/N");
}

Test(shard, slurm)
{
    good("auto",
         ENV("SLURM_ARRAY_TASK_ID=3", "SLURM_ARRAY_TASK_COUNT=4", "SLURM_ARRAY_TASK_MIN=1",
             "SLURM_ARRAY_TASK_MAX=4", "SLURM_ARRAY_TASK_STEP=1"),
         2, 4);
    good("auto",
         ENV("SLURM_ARRAY_TASK_ID=0", "SLURM_ARRAY_TASK_COUNT=4", "SLURM_ARRAY_TASK_MIN=0",
             "SLURM_ARRAY_TASK_MAX=3"),
         0, 4);
    /* --array=10-30:10 */
    good("auto",
         ENV("SLURM_ARRAY_TASK_ID=30", "SLURM_ARRAY_TASK_COUNT=3", "SLURM_ARRAY_TASK_MIN=10",
             "SLURM_ARRAY_TASK_MAX=30", "SLURM_ARRAY_TASK_STEP=10"),
         2, 3);
    good("auto", ENV("SLURM_ARRAY_TASK_ID=2", "SLURM_ARRAY_TASK_COUNT=2"), 1, 2);
    /* --array=1,2,7: also its first tasks say so. */
    bad("auto",
        ENV("SLURM_ARRAY_TASK_ID=1", "SLURM_ARRAY_TASK_COUNT=3", "SLURM_ARRAY_TASK_MIN=1",
            "SLURM_ARRAY_TASK_MAX=7", "SLURM_ARRAY_TASK_STEP=1"),
        "--array=1-N");
    bad("auto", ENV("SLURM_ARRAY_TASK_ID=1"), "set BATCHGEN_SHARD_COUNT");
    bad("auto", ENV("SLURM_ARRAY_TASK_ID=x", "SLURM_ARRAY_TASK_COUNT=3"),
        "SLURM_ARRAY_TASK_ID is \"x\"");
    bad("auto", ENV("SLURM_ARRAY_TASK_ID=1", "SLURM_ARRAY_TASK_COUNT=-3"),
        "SLURM_ARRAY_TASK_COUNT is \"-3\"");
    bad("auto",
        ENV("SLURM_ARRAY_TASK_ID=15", "SLURM_ARRAY_TASK_COUNT=3", "SLURM_ARRAY_TASK_MIN=10",
            "SLURM_ARRAY_TASK_MAX=30", "SLURM_ARRAY_TASK_STEP=10"),
        "none of 3 tasks");
}

/* A single task of a bigger array, submitted again, must not take the whole input. */
Test(shard, the_own_count_comes_first)
{
    good("auto",
         ENV("SLURM_ARRAY_TASK_ID=3", "SLURM_ARRAY_TASK_COUNT=1", "SLURM_ARRAY_TASK_MIN=3",
             "SLURM_ARRAY_TASK_MAX=3", "BATCHGEN_SHARD_COUNT=4"),
         2, 4);
    good("auto",
         ENV("BATCHGEN_SHARD_COUNT=5", "SGE_TASK_ID=5", "SGE_TASK_FIRST=5", "SGE_TASK_LAST=5"), 4,
         5);
    good("auto", ENV("BATCHGEN_SHARD_COUNT=5", "JOB_COMPLETION_INDEX=4", "JOB_COMPLETIONS=1"), 4,
         5);
}

Test(shard, kubernetes_counts_from_0)
{
    good("auto", ENV("JOB_COMPLETION_INDEX=0", "JOB_COMPLETIONS=4"), 0, 4);
    good("auto", ENV("JOB_COMPLETION_INDEX=3", "JOB_COMPLETIONS=4"), 3, 4);
    good("auto", ENV("JOB_COMPLETION_INDEX=3", "BATCHGEN_SHARD_COUNT=4"), 3, 4);
    bad("auto", ENV("JOB_COMPLETION_INDEX=4", "JOB_COMPLETIONS=4"), "none of 4 tasks");
    bad("auto", ENV("JOB_COMPLETION_INDEX=0"), "set JOB_COMPLETIONS");
}

Test(shard, pbs_and_grid_engine)
{
    good("auto", ENV("PBS_ARRAY_INDEX=1", "BATCHGEN_SHARD_COUNT=8"), 0, 8);
    good("auto", ENV("PBS_ARRAYID=8", "BATCHGEN_SHARD_COUNT=8"), 7, 8);
    bad("auto", ENV("PBS_ARRAY_INDEX=0", "BATCHGEN_SHARD_COUNT=8"), "PBS_ARRAY_INDEX is 0");
    bad("auto", ENV("PBS_ARRAYID=1"), "BATCHGEN_SHARD_COUNT");
    good("auto", ENV("SGE_TASK_ID=5", "SGE_TASK_FIRST=1", "SGE_TASK_LAST=7", "SGE_TASK_STEPSIZE=2"),
         2, 4);
    /* To jobs that are no arrays. */
    bad("auto", ENV("SGE_TASK_ID=undefined", "SGE_TASK_FIRST=undefined", "SGE_TASK_LAST=undefined"),
        "no task of an array");
}

Test(shard, plain_variables)
{
    good("auto", ENV("BATCHGEN_SHARD_INDEX=1", "BATCHGEN_SHARD_COUNT=3"), 0, 3);
    good("auto", ENV("BATCHGEN_SHARD_INDEX=3", "BATCHGEN_SHARD_COUNT=3", "SLURM_ARRAY_TASK_ID=1"),
         2, 3);
    bad("auto", ENV("BATCHGEN_SHARD_INDEX=0", "BATCHGEN_SHARD_COUNT=3"),
        "BATCHGEN_SHARD_INDEX is 0");
    bad("auto", ENV("BATCHGEN_SHARD_INDEX=1"), "BATCHGEN_SHARD_COUNT");
    bad("auto", ENV("BATCHGEN_SHARD_INDEX=1", "BATCHGEN_SHARD_COUNT=2000000"), "at most 1000000");
}

Test(shard, nothing_found_names_what_was_looked_for)
{
    bad("auto", ENV("HOME=/"), "SLURM_ARRAY_TASK_ID");
    bad("auto", ENV("SLURM_ARRAY_TASK_ID="), "no task of an array");
    good("auto", ENV("BATCHGEN_SHARD_INDEX=", "PBS_ARRAYID=2", "BATCHGEN_SHARD_COUNT=2"), 1, 2);
    bad("auto", ENV("XSLURM_ARRAY_TASK_ID=1"), "JOB_COMPLETION_INDEX");
    bad("auto", NULL, "give --shard I/N");
}
