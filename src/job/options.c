#include "job/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/utf8.h"

enum {
    RUN = BG_CMD_RUN,
    CHECK = BG_CMD_CHECK,
    INSPECT = BG_CMD_INSPECT,
    BENCH = BG_CMD_BENCH,
    TOKENIZE = BG_CMD_TOKENIZE,
    RENDER = BG_CMD_RENDER,
    STATUS = BG_CMD_STATUS,
    CAT = BG_CMD_CAT,
    MERGE = BG_CMD_MERGE,
    REPAIR = BG_CMD_REPAIR,
    OUTPUTS = STATUS | CAT | MERGE | REPAIR,
    ENGINE = RUN | BENCH,
    SIZES = RUN | CHECK | INSPECT | BENCH,
    MODELS = RUN | CHECK | INSPECT | BENCH | TOKENIZE | RENDER,
    ALL = MODELS | OUTPUTS,
    TEXT = RUN | CHECK | TOKENIZE | RENDER,
};

#define F(field) offsetof(bg_job, field)
#define ANY      1, 0 /* no bounds */

/* name, aliases, letter, type, field, choices, min, max, default, commands, in files, group, arg,
 * help */
const bg_option bg_options[] = {
    {"input", NULL, 'i', BG_OPT_LIST, F(inputs), NULL, ANY, NULL, RUN | CHECK | RENDER | OUTPUTS,
     true, "Job", "FILE",
     "prompts, JSON lines, also .gz .zst .lz4; - is stdin; several are one job"},
    {"output", "output-file", 'o', BG_OPT_PATH, F(output), NULL, ANY, NULL, RUN | CAT | MERGE, true,
     "Job", "FILE",
     "results: NAME.lz4 as LZ4 frames, else plain text; - is stdout (no resume); %Y %m %d %H %M %S "
     "are the date, {shard} and {shards} the shard"},
    {"error-file", NULL, 0, BG_OPT_PATH, F(error_file), NULL, ANY, NULL, RUN, true, "Job", "FILE",
     "error results go to FILE instead of the output"},
    {"model", NULL, 'm', BG_OPT_PATH, F(model), NULL, ANY, NULL, MODELS, true, "Job", "FILE",
     "GGUF model; any part of a split one"},
    {"job", NULL, 'j', BG_OPT_PATH, F(job_file), NULL, ANY, NULL, SIZES, false, "Job", "FILE",
     "job file: JSON with these options as keys (schemas/job.schema.json)"},
    {"overwrite", NULL, 0, BG_OPT_BOOL, F(overwrite), NULL, ANY, NULL, RUN, true, "Job", NULL,
     "start anew even if the output exists"},
    {"retry-failed", NULL, 0, BG_OPT_BOOL, F(retry_failed), NULL, ANY, NULL, RUN, true, "Job", NULL,
     "take error results out of an existing output and run their records again"},
    {"on-input-change", NULL, 0, BG_OPT_CHOICE, F(on_input_change), "refuse,match", ANY, "refuse",
     RUN, true, "Job", "WHAT",
     "the input is not what the output was started with: refuse, or match: keep results of records "
     "whose id and content are still there, run the others"},
    {"ordered", NULL, 0, BG_OPT_BOOL, F(ordered), NULL, ANY, NULL, RUN | CAT, true, "Job", NULL,
     "results in the order of the input (run: sorted when the job is done)"},
    {"limit", NULL, 0, BG_OPT_INT, F(limit), NULL, 0, 9e15, "0", RUN | CHECK, true, "Job", "N",
     "only the first N records; 0: all"},
    {"sample", NULL, 0, BG_OPT_REAL, F(sample), NULL, 0, 1, "1", RUN | CHECK, true, "Job", "X",
     "only this share of the records, always the same ones"},
    {"shard", NULL, 0, BG_OPT_STR, F(shard), NULL, ANY, NULL, RUN | CHECK, true, "Job", "I/N",
     "only every N-th record, from the I-th; auto: from Slurm, Kubernetes or PBS variables"},
    {"max-failed", NULL, 0, BG_OPT_INT, F(max_failed), NULL, -1, 9e15, "-1", RUN, true, "Job", "N",
     "stop when more than N records have failed (exit 65); -1: never"},
    {"time-limit", NULL, 0, BG_OPT_TIME, F(time_limit), NULL, 0, 1e9, "0", RUN, true, "Job", "TIME",
     "end in order within TIME (8h, 90m, 3600), exit 75 if records are left; 0: no limit"},
    {"wait", NULL, 0, BG_OPT_TIME, F(wait), NULL, 0, 1e9, "0", RUN, true, "Job", "TIME",
     "wait this long for another run that holds the output; 0: exit 75 at once"},
    {"strict", NULL, 0, BG_OPT_BOOL, F(strict), NULL, ANY, NULL, RUN | CHECK, true, "Job", NULL,
     "check all input first and run nothing if a line is bad"},
    {"strict-model", NULL, 0, BG_OPT_BOOL, F(strict_model), NULL, ANY, NULL, RUN | CHECK, true,
     "Job", NULL, "a record that names another model is an error instead of one warning"},
    {"served-model-name", "alias", 0, BG_OPT_STR, F(served_name), NULL, ANY, NULL, RUN | CHECK,
     true, "Job", "NAME", "the model's name in results and for --strict-model [the file's name]"},

    {"temperature", "temp", 0, BG_OPT_REAL, F(temperature), NULL, 0, 100, "1", RUN, true,
     "Sampling (a record's own fields come first)", "X", "0: greedy"},
    {"top-k", NULL, 0, BG_OPT_INT, F(top_k), NULL, -1, 1e9, "0", RUN, true, NULL, "N",
     "keep the N most likely tokens; 0 or -1: all"},
    {"top-p", NULL, 0, BG_OPT_REAL, F(top_p), NULL, 0, 1, "1", RUN, true, NULL, "X",
     "keep the most likely tokens that hold X of the probability"},
    {"min-p", NULL, 0, BG_OPT_REAL, F(min_p), NULL, 0, 1, "0", RUN, true, NULL, "X",
     "drop tokens less likely than X times the best"},
    {"repetition-penalty", "repeat-penalty", 0, BG_OPT_REAL, F(repetition_penalty), NULL, 0.01, 100,
     "1", RUN, true, NULL, "X", "divide the logits of tokens seen in prompt and output"},
    {"presence-penalty", NULL, 0, BG_OPT_REAL, F(presence_penalty), NULL, -100, 100, "0", RUN, true,
     NULL, "X", "subtract from the logits of tokens seen in the output"},
    {"frequency-penalty", NULL, 0, BG_OPT_REAL, F(frequency_penalty), NULL, -100, 100, "0", RUN,
     true, NULL, "X", "the same, times how often they were seen"},
    {"max-tokens", "predict,max-completion-tokens", 'n', BG_OPT_INT, F(max_tokens), NULL, 0, 1e9,
     "0", RUN | CHECK, true, NULL, "N", "longest answer; 0: the rest of the context"},
    {"min-tokens", NULL, 0, BG_OPT_INT, F(min_tokens), NULL, 0, 1e9, "0", RUN, true, NULL, "N",
     "no end of the answer before N tokens"},
    {"stop", NULL, 0, BG_OPT_LIST, F(stop), NULL, ANY, NULL, RUN, true, NULL, "TEXT",
     "end an answer at TEXT (may be given several times)"},
    {"ignore-eos", NULL, 0, BG_OPT_BOOL, F(ignore_eos), NULL, ANY, NULL, RUN, true, NULL, NULL,
     "go on past the end-of-text token"},
    {"seed", NULL, 0, BG_OPT_INT, F(seed), NULL, 0, 9.2e18, "0", ENGINE, true, NULL, "N",
     "job seed; a record's seed comes from it and the record's id"},

    {"tensor-parallel-size", "tp", 0, BG_OPT_INT, F(tp), NULL, 1, 64, "1", SIZES, true, "Engine",
     "N", "ranks (worker processes) that share the model"},
    {"data-parallel-size", "dp", 0, BG_OPT_INT, F(dp), NULL, 1, 64, "1", RUN | CHECK | INSPECT,
     true, NULL, "N", "replicas of the model (of --tp ranks each) that work on the job together"},
    {"device", NULL, 0, BG_OPT_STR, F(device), NULL, ANY, "auto", SIZES, true, NULL, "NAME",
     "cpu, cuda, cuda:I,J,... (GPUs from 0, one a rank; one may be named several times), or auto: "
     "GPUs that hold the model, else the CPU"},
    {"hang-timeout", NULL, 0, BG_OPT_TIME, F(hang_timeout), NULL, 0, 1e6, "0", RUN, true, NULL,
     "TIME", "ranks that do not get on for TIME are started again; 0: 2m on GPUs, 10m on the CPU"},
    {"threads", NULL, 't', BG_OPT_INT, F(threads), NULL, 0, 1024, "0", SIZES, true, NULL, "N",
     "compute threads of all ranks; 0: one for each processor"},
    {"max-num-seqs", NULL, 0, BG_OPT_INT, F(max_num_seqs), NULL, 0, 4096, "0", SIZES, true, NULL,
     "N", "sequences decoded together; 0: 64, on a GPU 512"},
    {"max-num-batched-tokens", NULL, 0, BG_OPT_INT, F(max_num_batched_tokens), NULL, 0, 65536, "0",
     SIZES, true, NULL, "N",
     "prompt tokens of one prefill step, 16 or more; 0: 512, on a GPU 8192"},
    {"max-model-len", "ctx-size", 'c', BG_OPT_INT, F(max_model_len), NULL, 0, 16777216, "0", SIZES,
     true, NULL, "N",
     "longest prompt plus answer; 0: what the model was trained for, if memory allows"},
    {"kv-cache-memory", NULL, 0, BG_OPT_SIZE, F(kv_cache_memory), NULL, 0, 9e18, "0", SIZES, true,
     NULL, "SIZE",
     "memory for keys and values; 0: as max-num-seqs needs, a quarter of free memory at most; on a "
     "GPU what is left of it"},
    {"gpu-memory-utilization", NULL, 0, BG_OPT_REAL, F(gpu_memory_utilization), NULL, 0.05, 1,
     "0.92", SIZES, true, NULL, "X", "share of a GPU's memory that may be used, if it is free"},
    {"kv-cache-dtype", "cache-type", 0, BG_OPT_CHOICE, F(kv_cache_type), "auto,f16,bf16,f32,q8",
     ANY, "auto", SIZES, true, NULL, "TYPE",
     "auto (f16; f32 with --compute f32), f16, bf16, f32, or q8 (GPU: 8 bits and scales)"},
    {"block-size", NULL, 0, BG_OPT_INT, F(block_size), NULL, 8, 256, "32", SIZES, true, NULL, "N",
     "tokens of a KV block"},
    {"prefix-cache", "enable-prefix-caching", 0, BG_OPT_BOOL, F(prefix_cache), NULL, ANY, "true",
     ENGINE, true, NULL, NULL, "share the keys and values of equal prompt beginnings"},
    {"window", NULL, 0, BG_OPT_INT, F(window), NULL, 1, 1e6, "1024", RUN, true, NULL, "N",
     "sequences read ahead, to start long ones early"},
    {"compute", NULL, 0, BG_OPT_CHOICE, F(compute), "native,f32", ANY, "native", SIZES, true, NULL,
     "MODE", "native, or f32: exact weights and float32 throughout (slow; for proofs)"},
    {"fast-math", NULL, 0, BG_OPT_BOOL, F(fast_math), NULL, ANY, NULL, SIZES, true, NULL, NULL,
     "GPU: prompts and batches of 256 or more by a library's GEMM on a copy of the weights in half "
     "precision (cuBLASLt; results depend on the batch)"},
    {"load-format", NULL, 0, BG_OPT_CHOICE, F(load_format), "auto,dummy", ANY, "auto", SIZES, true,
     NULL, "HOW",
     "auto, or dummy: random weights of the model's shapes, whose file may end after its header "
     "(GPU; to measure speed)"},
    {"device-memory", NULL, 0, BG_OPT_SIZE, F(device_memory), NULL, 0, 9e18, "0", INSPECT, false,
     NULL, "SIZE", "also say what ranks on GPUs of this size would hold; 0: not"},
    {"check", NULL, 0, BG_OPT_BOOL, F(check_ops), NULL, ANY, NULL, ENGINE, true, NULL, NULL,
     "poison and verify every op's output (slow; for proofs)"},
    {"eager", "enforce-eager", 0, BG_OPT_BOOL, F(eager), NULL, ANY, NULL, ENGINE, true, NULL, NULL,
     "GPU: launch every op by itself instead of decode steps as graphs (slower, the same tokens)"},
    {"tune-table", NULL, 0, BG_OPT_PATH, F(tune_table), NULL, ANY, NULL, ENGINE, true, NULL, "FILE",
     "GPU: multiply linears as bench --tune-out found it fastest; the same results"},
    {"pin-threads", NULL, 0, BG_OPT_BOOL, F(pin_threads), NULL, ANY, NULL, ENGINE, true, NULL, NULL,
     "bind compute threads to processors"},
    {"cpu-isa", NULL, 0, BG_OPT_STR, F(isa), NULL, ANY, NULL, ENGINE, true, NULL, "NAME",
     "plain, avx2, avx512 or avx512vnni [the best there is]"},

    {"chat-template", NULL, 0, BG_OPT_PATH, F(chat_template), NULL, ANY, NULL, TEXT, true, "Text",
     "FILE", "Jinja template instead of the model's own"},
    {"max-line", NULL, 0, BG_OPT_SIZE, F(max_line), NULL, 1024, 1e12, "64MiB", RUN | CHECK | RENDER,
     true, NULL, "SIZE", "longest input line; a longer one is an error result"},
    {"max-nesting", NULL, 0, BG_OPT_INT, F(max_nesting), NULL, 4, 1024, "64", RUN | CHECK | RENDER,
     true, NULL, "N", "deepest nesting of a line's JSON"},
    {"max-prompt-tokens", NULL, 0, BG_OPT_INT, F(max_prompt_tokens), NULL, 0, 1e9, "0", RUN | CHECK,
     true, NULL, "N", "longest prompt; a longer one is an error result; 0: what the context holds"},
    {"max-n", NULL, 0, BG_OPT_INT, F(max_n), NULL, 1, 4096, "128", RUN | CHECK, true, NULL, "N",
     "most choices (n) that a record may ask for"},
    {"max-result", NULL, 0, BG_OPT_SIZE, F(max_result), NULL, 1024, 1e12, "256MiB", RUN, true, NULL,
     "SIZE", "longest result line; a longer one becomes an error result"},
    {"template-steps", NULL, 0, BG_OPT_INT, F(template_steps), NULL, 100, 1e12, "10000000", TEXT,
     true, NULL, "N", "most evaluations of a chat template for one record"},
    {"text-threads", NULL, 0, BG_OPT_INT, F(text_threads), NULL, 0, 256, "0", RUN | CHECK, true,
     NULL, "N", "threads that parse and tokenise; 0: one for each processor, 8 at most"},
    {"special", NULL, 0, BG_OPT_BOOL, F(special), NULL, ANY, "true", TOKENIZE, false, NULL, NULL,
     "text that spells a control token becomes it"},
    {"bos", NULL, 0, BG_OPT_BOOL, F(bos), NULL, ANY, "true", TOKENIZE, false, NULL, NULL,
     "add begin and end tokens as the model wants them"},
    {"ids", NULL, 0, BG_OPT_BOOL, F(ids), NULL, ANY, NULL, TOKENIZE | RENDER, false, NULL, NULL,
     "print ids only, on one line"},
    {"text", NULL, 0, BG_OPT_STR, F(text), NULL, ANY, NULL, TOKENIZE, false, NULL, "TEXT",
     "text to tokenise [standard input]"},

    {"batch", NULL, 0, BG_OPT_LIST, F(batch), NULL, ANY, NULL, BENCH, false, "Benchmark", "N,N,...",
     "batch sizes [1,8,32]"},
    {"prompt-tokens", "ctx", 'p', BG_OPT_INT, F(bench_prompt), NULL, 1, 1e6, "128", BENCH, false,
     NULL, "N", "tokens of a prefill, and context at which decoding starts"},
    {"gen-tokens", NULL, 'g', BG_OPT_INT, F(bench_tokens), NULL, 1, 1e6, "64", BENCH, false, NULL,
     "N", "tokens decoded at each batch size"},
    {"skip-prefill", NULL, 0, BG_OPT_BOOL, F(skip_prefill), NULL, ANY, NULL, BENCH, false, NULL,
     NULL, "decode on from a context that nothing was computed for (needs --load-format dummy)"},
    {"rank-of", NULL, 0, BG_OPT_INT, F(rank_of), NULL, 0, 64, "0", BENCH, false, NULL, "N",
     "measure rank 0 of --tp N alone; the sums over ranks are stand-ins; 0: all ranks"},
    {"all-reduce-us", NULL, 0, BG_OPT_REAL, F(all_reduce_us), NULL, 0, 1e6, "10", BENCH, false,
     NULL, "X", "with --rank-of: how long a stand-in takes"},
    {"profile", NULL, 0, BG_OPT_BOOL, F(profile), NULL, ANY, NULL, BENCH, false, NULL, NULL,
     "time, bytes and FLOPs by op and by kind, and their share of what the device can do"},
    {"tune", NULL, 0, BG_OPT_BOOL, F(tune), NULL, ANY, NULL, BENCH, false, NULL, NULL,
     "GPU: try how each linear is multiplied fastest, print that, and measure with it"},
    {"tune-out", NULL, 0, BG_OPT_PATH, F(tune_out), NULL, ANY, NULL, BENCH, false, NULL, "FILE",
     "write what --tune finds to FILE, for --tune-table"},

    {"commit-bytes", NULL, 0, BG_OPT_SIZE, F(commit_bytes), NULL, 1, 1e12, "512KiB", RUN, true,
     "Output and messages", "SIZE", "commit after this much text"},
    {"commit-interval", NULL, 0, BG_OPT_TIME, F(commit_interval), NULL, 0.01, 86400, "5", RUN, true,
     NULL, "TIME", "commit at least this often"},
    {"grace", NULL, 0, BG_OPT_TIME, F(grace), NULL, 0, 86400, "20", RUN, true, NULL, "TIME",
     "after a signal, time for records in flight to finish"},
    {"summary", NULL, 0, BG_OPT_PATH, F(summary), NULL, ANY, NULL, RUN | CHECK, true, NULL, "FILE",
     "write counts, usage and rates as JSON at the end"},
    {"metrics-file", NULL, 0, BG_OPT_PATH, F(metrics_file), NULL, ANY, NULL, RUN, true, NULL,
     "FILE", "write metrics in Prometheus' text format at each commit"},
    {"notify", NULL, 0, BG_OPT_STR, F(notify), NULL, ANY, NULL, RUN, true, NULL, "CMD",
     "run CMD by the shell at the end, with the summary on its stdin"},
    {"progress", NULL, 0, BG_OPT_TIME, F(progress), NULL, 0, 86400, "60", RUN, true, NULL, "TIME",
     "a progress line this often when stderr is no terminal; 0: none"},
    {"quiet", NULL, 'q', BG_OPT_BOOL, F(quiet), NULL, ANY, NULL, ALL, true, NULL, NULL,
     "print nothing unless something is wrong"},
    {"json", NULL, 0, BG_OPT_BOOL, F(json), NULL, ANY, NULL, CHECK | INSPECT | BENCH | OUTPUTS,
     false, NULL, NULL, "print JSON"},
    {"color", "colour", 0, BG_OPT_CHOICE, F(color), "auto,always,never", ANY, "auto", ALL, true,
     NULL, "WHEN", "auto, always or never"},
    {"log-level", NULL, 0, BG_OPT_CHOICE, F(log_level), "error,warn,info,debug", ANY, "warn",
     ENGINE | CHECK, true, NULL, "LEVEL", "error, warn, info or debug"},
    {"log-file", NULL, 0, BG_OPT_PATH, F(log_file), NULL, ANY, NULL, RUN, true, NULL, "FILE",
     "append log lines to FILE instead of stderr"},
    {"log-format", NULL, 0, BG_OPT_CHOICE, F(log_format), "logfmt,json", ANY, "logfmt",
     ENGINE | CHECK, true, NULL, "FORMAT", "logfmt or json"},
    {"fields", NULL, 0, BG_OPT_LIST, F(fields), NULL, ANY, NULL, CAT, false, NULL, "NAME,...",
     "print only these fields of each result: id, text, usage.completion_tokens"},
    {"help", NULL, 'h', BG_OPT_BOOL, F(help), NULL, ANY, NULL, ALL, false, NULL, NULL, "show this"},
};
const int bg_n_options = (int)(sizeof bg_options / sizeof *bg_options);

static bool same_name(const char *a, const char *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char x = b[i] == '_' ? '-' : b[i];
        if (a[i] != x) return false;
    }
    return true;
}

const bg_option *bg_option_find(const char *name, size_t n)
{
    for (int i = 0; i < bg_n_options; i++) {
        const bg_option *o = &bg_options[i];
        if (strlen(o->name) == n && same_name(o->name, name, n)) return o;
        for (const char *a = o->aliases; a && *a;) {
            size_t len = strcspn(a, ",");
            if (len == n && same_name(a, name, n)) return o;
            a += len + (a[len] == ',');
        }
    }
    return NULL;
}

const bg_option *bg_option_by_letter(char letter)
{
    for (int i = 0; i < bg_n_options; i++)
        if (bg_options[i].letter && bg_options[i].letter == letter) return &bg_options[i];
    return NULL;
}

static void *field(bg_job *job, const bg_option *o)
{
    return (char *)job + o->offset;
}

static bg_status set_string(bg_job *job, const bg_option *o, const char *text, const char *where,
                            bg_error *err)
{
    char **p = field(job, o), *copy = strdup(text);
    if (!copy) return bg_fail(err, BG_NOMEM, "%s: out of memory", where);
    free(*p);
    *p = copy;
    return BG_OK;
}

static bg_status check_range(const bg_option *o, double v, const char *where, bg_error *err)
{
    if (o->max < o->min || (v >= o->min && v <= o->max)) return BG_OK;
    return bg_fail(err, BG_ARG, "%s: %.15g is outside %.15g to %.15g", where, v, o->min, o->max);
}

/* "512", "512KiB", "2G", "1.5MB": K, M, G, T are powers of 1000 with B, of 1024 alone or with iB.
 */
static bool parse_size(const char *s, int64_t *v)
{
    char *end;
    errno = 0;
    double x = strtod(s, &end);
    if (end == s || errno || !(x >= 0)) return false;
    while (*end == ' ')
        end++;
    double unit = 1;
    if (*end) {
        const char *letters = "KMGT", *at = strchr(letters, toupper((unsigned char)*end));
        if (*end != 'B' && at) {
            bool decimal = (end[1] == 'B' || end[1] == 'b') && !end[2];
            if (!decimal && end[1] && strcmp(end + 1, "iB") != 0 && strcmp(end + 1, "ib") != 0)
                return false;
            for (const char *p = letters; p <= at; p++)
                unit *= decimal ? 1000 : 1024;
        } else if (strcmp(end, "B") != 0) {
            return false;
        }
    }
    if (!(x * unit < 9.2e18)) return false;
    *v = (int64_t)(x * unit);
    return true;
}

/* "90", "1.5h", "1h30m", "2d", "500ms", "02:30:00", "90:00". */
static bool parse_time(const char *s, double *out)
{
    static const struct {
        const char *name;
        double seconds;
    } units[] = {{"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}};
    double sum = 0, v;
    char *end;
    if (!isdigit((unsigned char)*s) && *s != '.') return false;
    if (strchr(s, ':')) { /* H:M:S or M:S */
        for (int parts = 0; parts < 3; parts++) {
            if (!isdigit((unsigned char)*s)) return false;
            v = strtod(s, &end);
            sum = sum * 60 + v;
            if (!*end) break;
            if (*end != ':' || parts == 2) return false;
            s = end + 1;
        }
        *out = sum;
        return isfinite(sum);
    }
    do {
        if (!isdigit((unsigned char)*s) && *s != '.') return false;
        v = strtod(s, &end);
        if (end == s) return false;
        s = end;
        size_t n = strspn(s, "dhms"), i = 0;
        if (!n) { /* seconds, when it is all there is */
            if (*s || sum > 0) return false;
            n = 0;
            i = 1;
        } else {
            while (i < 5 && (strlen(units[i].name) != n || strncmp(units[i].name, s, n) != 0))
                i++;
            if (i == 5) return false;
        }
        sum += v * units[i].seconds;
        s += n;
    } while (*s);
    *out = sum;
    return isfinite(sum);
}

static bg_status set_choice(bg_job *job, const bg_option *o, const char *text, const char *where,
                            bg_error *err)
{
    int index = 0;
    for (const char *c = o->choices; *c; index++) {
        size_t n = strcspn(c, ",");
        if (strlen(text) == n && strncmp(c, text, n) == 0) {
            *(int *)field(job, o) = index;
            return BG_OK;
        }
        c += n + (c[n] == ',');
    }
    return bg_fail(err, BG_ARG, "%s: \"%s\" is none of %s", where, text, o->choices);
}

bg_status bg_option_set_text(bg_job *job, const bg_option *o, const char *text, const char *where,
                             bg_error *err)
{
    char *end;
    errno = 0;
    switch (o->type) {
    case BG_OPT_STR:
    case BG_OPT_PATH:
        if (o->offset == F(served_name) && !bg_utf8_valid(text, strlen(text)))
            return bg_fail(err, BG_ARG, "%s: not UTF-8", where);
        return set_string(job, o, text, where, err);
    case BG_OPT_LIST:
        if (o->offset == F(stop) && (!*text || !bg_utf8_valid(text, strlen(text))))
            return bg_fail(err, BG_ARG, "%s: %s", where,
                           *text ? "not UTF-8" : "an empty text would end every answer at once");
        if (!bg_strings_add(field(job, o), text))
            return bg_fail(err, BG_NOMEM, "%s: out of memory", where);
        return BG_OK;
    case BG_OPT_INT: {
        long long v = strtoll(text, &end, 10);
        if (end == text || *end || errno)
            return bg_fail(err, BG_ARG, "%s: \"%s\" is not a whole number", where, text);
        *(int64_t *)field(job, o) = v;
        return check_range(o, (double)v, where, err);
    }
    case BG_OPT_SIZE: {
        int64_t v;
        if (!parse_size(text, &v))
            return bg_fail(err, BG_ARG, "%s: \"%s\" is not a size; write 4096, 512KiB or 2G", where,
                           text);
        *(int64_t *)field(job, o) = v;
        return check_range(o, (double)v, where, err);
    }
    case BG_OPT_REAL: {
        double v = strtod(text, &end);
        if (end == text || *end || !isfinite(v))
            return bg_fail(err, BG_ARG, "%s: \"%s\" is not a number", where, text);
        *(double *)field(job, o) = v;
        return check_range(o, v, where, err);
    }
    case BG_OPT_TIME: {
        double v;
        if (!parse_time(text, &v))
            return bg_fail(err, BG_ARG,
                           "%s: \"%s\" is not a time; write 90, 15m, 1h30m or 02:30:00", where,
                           text);
        *(double *)field(job, o) = v;
        return check_range(o, v, where, err);
    }
    case BG_OPT_BOOL: {
        static const char *const yes[] = {"true", "1", "yes", "on"};
        static const char *const no[] = {"false", "0", "no", "off"};
        for (int i = 0; i < 4; i++) {
            if (strcasecmp(text, yes[i]) == 0 || strcasecmp(text, no[i]) == 0) {
                *(bool *)field(job, o) = strcasecmp(text, yes[i]) == 0;
                return BG_OK;
            }
        }
        return bg_fail(err, BG_ARG, "%s: \"%s\" is neither true nor false", where, text);
    }
    case BG_OPT_CHOICE:
        return set_choice(job, o, text, where, err);
    }
    return bg_fail(err, BG_INTERNAL, "%s: option without a type", where);
}

static bg_status set_path(bg_job *job, const bg_option *o, const char *text, const char *where,
                          const char *base_dir, bg_error *err)
{
    if (!base_dir || text[0] == '/' || strcmp(text, "-") == 0)
        return bg_option_set_text(job, o, text, where, err);
    bg_buf b = {0};
    bg_buf_printf(&b, "%s/%s", base_dir, text);
    bg_status st = b.failed ? bg_fail(err, BG_NOMEM, "%s: out of memory", where)
                            : bg_option_set_text(job, o, b.data, where, err);
    bg_buf_release(&b);
    return st;
}

bg_status bg_option_set_json(bg_job *job, const bg_option *o, const json_t *v, const char *where,
                             const char *base_dir, bg_error *err)
{
    switch (o->type) {
    case BG_OPT_LIST: {
        if (json_is_string(v))
            return o->offset == F(inputs)
                       ? set_path(job, o, json_string_value(v), where, base_dir, err)
                       : bg_option_set_text(job, o, json_string_value(v), where, err);
        if (!json_is_array(v))
            return bg_fail(err, BG_ARG, "%s: must be a string or an array of strings", where);
        bg_status st = BG_OK;
        for (size_t i = 0; !st && i < json_array_size(v); i++) {
            const json_t *e = json_array_get(v, i);
            if (!json_is_string(e))
                return bg_fail(err, BG_ARG, "%s[%zu]: must be a string", where, i);
            st = o->offset == F(inputs)
                     ? set_path(job, o, json_string_value(e), where, base_dir, err)
                     : bg_option_set_text(job, o, json_string_value(e), where, err);
        }
        return st;
    }
    case BG_OPT_STR:
    case BG_OPT_PATH:
    case BG_OPT_CHOICE:
        if (!json_is_string(v)) return bg_fail(err, BG_ARG, "%s: must be a string", where);
        if (o->type == BG_OPT_PATH)
            return set_path(job, o, json_string_value(v), where, base_dir, err);
        return bg_option_set_text(job, o, json_string_value(v), where, err);
    case BG_OPT_BOOL:
        if (!json_is_boolean(v)) return bg_fail(err, BG_ARG, "%s: must be true or false", where);
        *(bool *)field(job, o) = json_is_true(v);
        return BG_OK;
    case BG_OPT_INT:
    case BG_OPT_SIZE:
        if (o->type == BG_OPT_SIZE && json_is_string(v))
            return bg_option_set_text(job, o, json_string_value(v), where, err);
        if (!json_is_integer(v)) return bg_fail(err, BG_ARG, "%s: must be a whole number", where);
        *(int64_t *)field(job, o) = json_integer_value(v);
        return check_range(o, (double)json_integer_value(v), where, err);
    case BG_OPT_TIME:
        if (json_is_string(v)) return bg_option_set_text(job, o, json_string_value(v), where, err);
        /* fall through */
    case BG_OPT_REAL:
        if (!json_is_number(v)) return bg_fail(err, BG_ARG, "%s: must be a number", where);
        *(double *)field(job, o) = json_number_value(v);
        return check_range(o, json_number_value(v), where, err);
    }
    return bg_fail(err, BG_INTERNAL, "%s: option without a type", where);
}

/* ---- help and schema
 * ------------------------------------------------------------------------------- */

void bg_job_print_options(FILE *out, int command)
{
    const char *group = NULL, *shown = NULL;
    for (int i = 0; i < bg_n_options; i++) {
        const bg_option *o = &bg_options[i];
        if (o->group) group = o->group;
        if (!(o->commands & command)) continue;
        if (o->offset == F(inputs) && command & OUTPUTS) continue; /* words of the command say it */
        if (group != shown) fprintf(out, "\n%s:\n", group);
        shown = group;
        char left[64];
        bool on = o->type == BG_OPT_BOOL && o->def && strcmp(o->def, "true") == 0;
        snprintf(left, sizeof left, "%c%c%s --%s%s%s%s", o->letter ? '-' : ' ',
                 o->letter ? o->letter : ' ', o->letter ? "," : " ", on ? "no-" : "", o->name,
                 o->arg ? " " : "", o->arg ? o->arg : "");
        fprintf(out, "  %-33s %s%s", left, on ? "do not " : "", o->help);
        if (o->def && !on) fprintf(out, " [%s]", o->def);
        fputc('\n', out);
    }
}

static json_t *property(const bg_option *o)
{
    json_t *p = json_object();
    switch (o->type) {
    case BG_OPT_STR:
    case BG_OPT_PATH:
        json_object_set_new(p, "type", json_string("string"));
        break;
    case BG_OPT_LIST:
        json_object_set_new(p, "type", json_pack("[ss]", "string", "array"));
        json_object_set_new(p, "items", json_pack("{ss}", "type", "string"));
        break;
    case BG_OPT_BOOL:
        json_object_set_new(p, "type", json_string("boolean"));
        break;
    case BG_OPT_SIZE:
        json_object_set_new(p, "type", json_pack("[ss]", "integer", "string"));
        break;
    case BG_OPT_TIME:
        json_object_set_new(p, "type", json_pack("[ss]", "number", "string"));
        break;
    case BG_OPT_INT:
        json_object_set_new(p, "type", json_string("integer"));
        break;
    case BG_OPT_REAL:
        json_object_set_new(p, "type", json_string("number"));
        break;
    case BG_OPT_CHOICE: {
        json_t *list = json_array();
        for (const char *c = o->choices; *c;) {
            size_t n = strcspn(c, ",");
            json_array_append_new(list, json_stringn(c, n));
            c += n + (c[n] == ',');
        }
        json_object_set_new(p, "enum", list);
        break;
    }
    }
    bool numeric = o->type == BG_OPT_INT || o->type == BG_OPT_REAL;
    if (numeric && o->max >= o->min) {
        bool whole = o->type == BG_OPT_INT;
        json_object_set_new(p, "minimum",
                            whole ? json_integer((json_int_t)o->min) : json_real(o->min));
        json_object_set_new(p, "maximum",
                            whole ? json_integer((json_int_t)o->max) : json_real(o->max));
    }
    json_object_set_new(p, "description", json_string(o->help));
    if (o->def) {
        json_t *d = NULL;
        if (o->type == BG_OPT_INT) d = json_integer(strtoll(o->def, NULL, 10));
        if (o->type == BG_OPT_REAL || o->type == BG_OPT_TIME) d = json_real(strtod(o->def, NULL));
        if (o->type == BG_OPT_BOOL) d = json_boolean(strcmp(o->def, "true") == 0);
        if (!d) d = json_string(o->def);
        json_object_set_new(p, "default", d);
    }
    return p;
}

json_t *bg_job_schema(void)
{
    json_t *props = json_object();
    for (int i = 0; i < bg_n_options; i++) {
        const bg_option *o = &bg_options[i];
        if (!o->in_files) continue;
        char key[64];
        snprintf(key, sizeof key, "%s", o->name);
        for (char *c = key; *c; c++)
            if (*c == '-') *c = '_';
        json_object_set_new(props, key, property(o));
    }
    json_object_set_new(props, "$schema", json_pack("{ss}", "type", "string"));
    return json_pack(
        "{ss ss ss ss so sb}", "$schema", "https://json-schema.org/draft/2020-12/schema", "title",
        "batchgen job file", "description",
        "Options of batchgen run as JSON. A flag or a BATCHGEN_* variable comes before "
        "the job file, the job file before the user's config file. Relative paths are "
        "relative to the file's folder.",
        "type", "object", "properties", props, "additionalProperties", 0);
}
