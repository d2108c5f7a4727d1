/* job/job.h - what a job is, and running it.
 *
 * A bg_job is the resolved answer to "what was asked": every field comes from one table of options
 * (options.c), which gives the flags, the BATCHGEN_* variables, the keys of the job file, the
 * user's config file and --help. Precedence: flag > environment > job file > user's config >
 * default. */
#ifndef BG_JOB_JOB_H
#define BG_JOB_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "base/error.h"
#include "base/log.h"
#include "engine/engine.h"
#include "gguf/gguf.h"
#include "input/input.h"
#include "model/model.h"
#include "output/output.h"
#include "text/text.h"

/* ---- the resolved job
 * ---------------------------------------------------------------------------- */

typedef struct bg_strings { /* growable list, owned */
    char **v;
    int n;
} bg_strings;

bool bg_strings_add(bg_strings *s, const char *text); /* false: out of memory */
void bg_strings_release(bg_strings *s);

/* Values of choice options, as indices into the table's choice lists. */
enum { BG_KV_CHOICE_AUTO, BG_KV_CHOICE_F16, BG_KV_CHOICE_BF16, BG_KV_CHOICE_F32, BG_KV_CHOICE_Q8 };
enum { BG_LOAD_AUTO, BG_LOAD_DUMMY };
enum { BG_COLOR_AUTO, BG_COLOR_ALWAYS, BG_COLOR_NEVER };
enum { BG_INPUT_REFUSE, BG_INPUT_MATCH };

typedef struct bg_job {
    /* what to do */
    bg_strings inputs;
    char *output, *model, *job_file, *served_name, *chat_template, *summary, *log_file;
    char *error_file;    /* error results go there; NULL: into the output */
    int64_t limit;       /* only the first records; 0: all */
    double sample;       /* share of the records to run */
    char *shard;         /* "2/4", "auto", or NULL: as given */
    int64_t shard_index; /* from it: records r with r % shard_count == shard_index */
    int64_t shard_count; /* 0: no shards */
    /* generation defaults for records that say nothing */
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int64_t top_k, max_tokens, min_tokens, seed;
    bool ignore_eos;
    bg_strings stop;
    /* engine */
    int64_t tp, dp, threads, max_num_seqs, max_num_batched_tokens, max_model_len, block_size,
        window;
    int64_t kv_cache_memory;       /* bytes over all ranks; 0: automatic */
    double gpu_memory_utilization; /* share of a GPU's memory */
    int64_t device_memory;         /* inspect: bytes of a GPU that may not be there; 0: not asked */
    int kv_cache_type, compute, load_format;
    bool prefix_cache, check_ops, pin_threads, eager, fast_math;
    char *isa, *device;
    double hang_timeout; /* seconds; 0: automatic */
    /* input and output */
    int64_t max_line, text_threads;
    int64_t max_nesting, max_prompt_tokens, max_n, max_result, template_steps; /* 0: no limit */
    bool overwrite, strict, strict_model, retry_failed, ordered;
    int on_input_change;
    int64_t max_failed; /* -1: any number */
    int64_t commit_bytes;
    double commit_interval, grace, time_limit, wait; /* seconds; time_limit 0: none */
    /* talking to people */
    bool quiet, json;
    double progress;
    int color, log_level, log_format; /* bg_log_format */
    char *metrics_file, *notify;
    char *notify_socket; /* systemd's NOTIFY_SOCKET; NULL: none */
    int64_t watchdog_us; /* its WATCHDOG_USEC; 0: none */
    /* other commands */
    bg_strings batch;
    int64_t bench_prompt, bench_tokens;
    int64_t rank_of;      /* bench: this process is rank 0 of so many; 0: no */
    double all_reduce_us; /* then: a stand-in's */
    bool skip_prefill;
    bool profile, tune;
    char *tune_out, *tune_table;
    bool special, ids, bos;
    char *text;
    bg_strings fields;
    bool help;
} bg_job;

/* Which commands an option belongs to. */
enum {
    BG_CMD_RUN = 1,
    BG_CMD_CHECK = 2,
    BG_CMD_INSPECT = 4,
    BG_CMD_BENCH = 8,
    BG_CMD_TOKENIZE = 16,
    BG_CMD_RENDER = 32,
    BG_CMD_STATUS = 64,
    BG_CMD_CAT = 128,
    BG_CMD_MERGE = 256,
    BG_CMD_REPAIR = 512,
};

void bg_job_init(bg_job *job); /* {0} */
void bg_job_release(bg_job *job);

/* Resolves argv (without program and command) for one command: flags, then env (NULL-terminated, as
 * environ), the job file named by --job or BATCHGEN_JOB, and the user's config file; then defaults.
 * Positional arguments become the model (INSPECT, BENCH), the text (TOKENIZE), else inputs.
 * BG_ARG: usage; BG_FORMAT: a job or config file is bad; BG_IO. The text names the option and its
 * place. */
bg_status bg_job_resolve(bg_job *job, int command, int argc, char *const *argv, char *const *env,
                         bg_error *err);
/* --help of a command: every option with its default and meaning. */
void bg_job_print_options(FILE *out, int command);
/* The JSON Schema of job files, made from the same table (schemas/job.schema.json is its output).
 */
json_t *bg_job_schema(void);

/* ---- a model opened for its text side and numbers
 * ---------------------------------------------------- */

typedef struct bg_text_model {
    bg_gguf *gguf;
    bg_desc desc;
    bg_vocab *vocab;
    bg_template *chat;       /* NULL: the model has none */
    bg_template *chat_tools; /* for requests with tools; NULL: the same one */
    char *bos, *eos;         /* their texts, "" when there are none */
    char fingerprint[17];
    char *name;        /* served name */
    int max_model_len; /* 0: n_ctx_train; set once memory is planned */
} bg_text_model;

bg_status bg_text_model_open(bg_text_model *m, const bg_job *job, bg_error *err);
void bg_text_model_close(bg_text_model *m);

/* A request's prompts as token ids: renders the chat template or tokenises the prompts. Rejects the
 * request (bg_request_reject) when a template refuses, an id does not exist or a prompt does not
 * fit into max_model_len. ids[0 .. n_prompts) are the caller's to free with bg_ids_release().
 * BG_NOMEM. */
bg_status bg_job_encode(const bg_text_model *m, const bg_job *job, bg_request *r, int64_t wall_s,
                        bg_ids **ids, int *n_prompts, bg_error *err);
int bg_job_n_prompts(const bg_request *r);

/* ---- sizes
 * --------------------------------------------------------------------------------------------- */

typedef struct bg_memory_plan {
    int gpu;                /* 0: the CPU; else 1 + the number of the first rank's GPU */
    int gpus[BG_MAX_RANKS]; /* the same of each rank, replica by replica */
    char device[320];       /* its name */
    bool tiled;             /* the GPU's own form of linears: bg_gpu_tiled() */
    int tp, dp;             /* ranks of a replica, replicas; numbers below are of one of each */
    int threads_per_rank, max_num_seqs, max_model_len, block_tokens, n_blocks;
    int max_batched_tokens; /* prompt tokens of a step */
    int max_step_tokens;    /* rows of the largest step */
    bg_cache_type cache_type;
    /* Bytes of each rank (the first 8), as its device stores them; activations: and all else. */
    uint64_t weights[8], kv[8], activations[8];
    uint64_t budget;             /* GPU: what a rank may use of its device; 0: CPU */
    uint64_t kv_bytes_per_token; /* all ranks of a replica */
    uint64_t total;              /* of all replicas */
} bg_memory_plan;

/* From options, model and free memory to numbers. BG_ARG: it cannot fit; the text says what would.
 */
bg_status bg_plan_memory(bg_memory_plan *p, const bg_job *job, const bg_text_model *m,
                         bg_error *err);
void bg_rank_config_fill(bg_rank_config *c, const bg_job *job, const bg_memory_plan *p,
                         int replica);

/* ---- running
 * ---------------------------------------------------------------------------------------------- */

/* Where a job was when it failed: exit statuses differ. */
typedef enum bg_stage { BG_STAGE_SETUP, BG_STAGE_MODEL, BG_STAGE_OUTPUT, BG_STAGE_RUN } bg_stage;

typedef struct bg_outcome {
    bg_stage stage;
    bool finished;               /* every record has its result */
    bool already;                /* it was finished before: nothing was done */
    bool locked;                 /* another run holds the output: nothing was done */
    bool too_many;               /* --max-failed was exceeded */
    bool time_up;                /* --time-limit was reached */
    int stopped_by;              /* signal number, or 0 */
    int64_t n_records, n_failed; /* results in the output */
    int64_t n_now;               /* of them written by this run */
    char *
        summary; /* JSON (schemas/summary.schema.json), the caller's to free; NULL: out of memory */
} bg_outcome;

/* Runs (or resumes) the job: returns when it has finished, was stopped or failed. Progress and
 * messages go to `messages` (stderr). */
bg_status bg_job_run(const bg_job *job, FILE *messages, bg_outcome *outcome, bg_error *err);

/* Everything that must be equal for an output to be resumed: a flat object, the caller's to decref.
 */
json_t *bg_job_identity(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p,
                        bg_error *err);

#endif
