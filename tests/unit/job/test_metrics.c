/* The metrics file against the rules of the text format and of `promtool check metrics`, read by a
 * small parser of its own. */
#include "job/metrics.h"

#include <ctype.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "base/io.h"

static char dir[64];

static void make_dir(void)
{
    snprintf(dir, sizeof dir, "/tmp/batchgen-metrics.XXXXXX");
    cr_assert(mkdtemp(dir));
}

static void remove_dir(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    if (system(command)) cr_log_warn("%s stays", dir);
}

TestSuite(metrics, .init = make_dir, .fini = remove_dir);

static const char *in_dir(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static bg_metrics full(void)
{
    return (bg_metrics){.version = "0.1.0",
                        .model = "tiny",
                        .output = "/data/answers.jsonl.lz4",
                        .shard = "2/4",
                        .state = BG_RUN_RUNNING,
                        .start_wall_ns = INT64_C(1798859045123000000),
                        .last_commit_wall_ns = INT64_C(1798859050000000000),
                        .records_done = 9007199254740992,
                        .records_failed = 7,
                        .records_in_flight = 12,
                        .running = 8,
                        .waiting = 4,
                        .prompt_tokens = 12345,
                        .cached_tokens = 45,
                        .output_tokens = 6789,
                        .output_tokens_per_second = 1234.5,
                        .commits = 3,
                        .text_bytes = 1 << 20,
                        .file_bytes = 1 << 18,
                        .restarts = 1,
                        .preemptions = 2,
                        .kv_blocks_used = 100,
                        .kv_blocks = 200,
                        .input_share = 0.25};
}

static char *written(const bg_metrics *m)
{
    bg_error err = {0};
    char *text;
    size_t n;
    const char *path = in_dir("job.prom");
    cr_assert(!bg_metrics_write(path, m, &err), "%s", err.text);
    cr_assert(!bg_read_file(path, 1 << 20, &text, &n, &err), "%s", err.text);
    cr_assert_eq(strlen(text), n);
    return text;
}

/* ---- the rules
 * --------------------------------------------------------------------------------------- */

typedef struct family {
    char name[100], type[16];
    int n_samples;
} family;

static bool is_name(const char *s, size_t n, bool colon)
{
    for (size_t i = 0; i < n; i++)
        if (!isalpha((unsigned char)s[i]) && s[i] != '_' && !(colon && s[i] == ':') &&
            !(i && isdigit((unsigned char)s[i])))
            return false;
    return n > 0;
}

static bool ends_in(const char *s, const char *end)
{
    size_t a = strlen(s), b = strlen(end);
    return a >= b && strcmp(s + a - b, end) == 0;
}

/* promtool's lint: a counter ends in _total and nothing else does; no type, no abbreviated unit, no
 * capital in a name. */
static const char *lint(const char *name, const char *type)
{
    bool counter = strcmp(type, "counter") == 0;
    if (!counter && strcmp(type, "gauge") != 0) return "unknown type";
    if (counter != ends_in(name, "_total")) return "_total";
    if (strstr(name, "_gauge") || strstr(name, "_counter")) return "type in the name";
    if (ends_in(name, "_ms") || ends_in(name, "_ns") || ends_in(name, "_mb")) return "unit";
    if (ends_in(name, "_count") || ends_in(name, "_sum") || ends_in(name, "_bucket"))
        return "reserved ending";
    for (const char *c = name; *c; c++)
        if (isupper((unsigned char)*c)) return "capital";
    return NULL;
}

/* {name="value",...}; NULL: malformed, else what follows. */
static const char *labels(const char *s)
{
    if (*s != '{') return s;
    s++;
    for (;;) {
        size_t n = strcspn(s, "=,}\n");
        if (!is_name(s, n, false) || s[n] != '=' || s[n + 1] != '"') return NULL;
        for (s += n + 2; *s != '"'; s++) {
            if (!*s || *s == '\n') return NULL;
            if (*s == '\\' && !strchr("\\\"n", *++s)) return NULL;
        }
        if (*++s == '}') return s + 1;
        if (*s++ != ',') return NULL;
    }
}

/* NULL: all is well, else what is wrong. */
static const char *check(const char *text)
{
    static family known[64];
    static char why[200], seen[200][400];
    int n = 0, n_seen = 0;
    char help[100] = "";
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        if (!strchr(line, '\n')) return "the last line is not whole";
        size_t len = strcspn(line, "\n");
        char name[100], type[16];
        if (sscanf(line, "# HELP %99s %*[^\n]", name) == 1) {
            snprintf(help, sizeof help, "%s", name);
            if (len < strlen("# HELP  ") + strlen(name) + 3) return "no help text";
            continue;
        }
        if (sscanf(line, "# TYPE %99s %15s", name, type) == 2) {
            snprintf(why, sizeof why, "%s: %s", name, lint(name, type) ? lint(name, type) : "");
            if (lint(name, type)) return why;
            if (strcmp(help, name) != 0) return "TYPE without HELP before it";
            for (int i = 0; i < n; i++)
                if (strcmp(known[i].name, name) == 0) return "TYPE twice";
            snprintf(known[n].name, sizeof known[n].name, "%s", name);
            snprintf(known[n].type, sizeof known[n].type, "%s", type);
            known[n++].n_samples = 0;
            continue;
        }
        size_t k = strcspn(line, "{ ");
        snprintf(why, sizeof why, "%.*s", (int)(len < 150 ? len : 150), line);
        if (!is_name(line, k, true) || !n) return why;
        if (strlen(known[n - 1].name) != k || strncmp(known[n - 1].name, line, k) != 0)
            return "a sample away from its TYPE";
        known[n - 1].n_samples++;
        const char *after = labels(line + k);
        if (!after || *after != ' ') return why;
        for (int i = 0; i < n_seen; i++)
            if (strncmp(seen[i], line, (size_t)(after - line)) == 0 && !seen[i][after - line])
                return "a sample twice";
        snprintf(seen[n_seen++], sizeof seen[0], "%.*s", (int)(after - line), line);
        char *end;
        double v = strtod(after + 1, &end);
        if (end != line + len || !isfinite(v)) return why;
        if (strcmp(known[n - 1].type, "counter") == 0 && v < 0) return "a counter below 0";
    }
    for (int i = 0; i < n; i++)
        if (!known[i].n_samples) return "TYPE without a sample";
    return n ? NULL : "nothing";
}

Test(metrics, the_checker_can_fail)
{
    cr_expect_null(check("# HELP a_total x y\n# TYPE a_total counter\na_total 1\n"));
    const char *const wrong[] = {
        "",
        "# HELP a x y\n# TYPE a counter\na 1\n",
        "# HELP a_total x y\n# TYPE a_total gauge\na_total 1\n",
        "# TYPE a gauge\na 1\n",
        "# HELP a x y\n# TYPE a gauge\nb 1\n",
        "# HELP a x y\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a x y\n# TYPE a gauge\na{l=\"x\"y\"} 2\n",
        "# HELP a x y\n# TYPE a gauge\na{l=\"\\x\"} 2\n",
        "# HELP a x y\n# TYPE a gauge\na 2",
        "# HELP a x y\n# TYPE a gauge\na two\n",
        "# HELP a x y\n# TYPE a gauge\n",
        "# HELP aB x y\n# TYPE aB gauge\naB 1\n",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_expect_not_null(check(wrong[i]), "%s", wrong[i]);
}

/* ---- what is written
 * --------------------------------------------------------------------------------- */

Test(metrics, follow_the_rules_and_say_all)
{
    bg_metrics m = full();
    char *text = written(&m);
    const char *why = check(text);
    cr_expect(!why, "%s\n%s", why, text);
#define ALL "{output=\"/data/answers.jsonl.lz4\",shard=\"2/4\""
    const char *const want[] = {
        "batchgen_build_info" ALL ",version=\"0.1.0\",model=\"tiny\"} 1\n",
        "batchgen_run_state" ALL ",state=\"loading\"} 0\n",
        "batchgen_run_state" ALL ",state=\"running\"} 1\n",
        "batchgen_run_state" ALL ",state=\"failed\"} 0\n",
        "batchgen_start_time_seconds" ALL "} 1798859045.123",
        "batchgen_records_done_total" ALL "} 9007199254740992\n",
        "batchgen_records_failed_total" ALL "} 7\n",
        "batchgen_records_in_flight" ALL "} 12\n",
        "batchgen_sequences_running" ALL "} 8\n",
        "batchgen_sequences_waiting" ALL "} 4\n",
        "batchgen_prompt_tokens_total" ALL "} 12345\n",
        "batchgen_cached_prompt_tokens_total" ALL "} 45\n",
        "batchgen_output_tokens_total" ALL "} 6789\n",
        "batchgen_output_tokens_per_second" ALL "} 1234.5\n",
        "batchgen_commits_total" ALL "} 3\n",
        "batchgen_last_commit_timestamp_seconds" ALL "} 1798859050\n",
        "batchgen_written_text_bytes_total" ALL "} 1048576\n",
        "batchgen_output_file_bytes" ALL "} 262144\n",
        "batchgen_rank_restarts_total" ALL "} 1\n",
        "batchgen_preemptions_total" ALL "} 2\n",
        "batchgen_kv_blocks" ALL "} 200\n",
        "batchgen_kv_blocks_used" ALL "} 100\n",
        "batchgen_input_read_ratio" ALL "} 0.25\n",
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        cr_expect(strstr(text, want[i]), "lacks %s\n%s", want[i], text);
    free(text);
}

Test(metrics, what_is_unknown_is_left_out)
{
    bg_metrics m = full();
    m.shard = NULL;
    m.last_commit_wall_ns = 0;
    m.kv_blocks = 0;
    m.input_share = NAN;
    char *text = written(&m);
    cr_expect_null(check(text));
    cr_expect(!strstr(text, "shard") && !strstr(text, "last_commit") &&
              !strstr(text, "kv_blocks") && !strstr(text, "input_read"));
    free(text);
    const double unknown[] = {-1, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        m.input_share = unknown[i];
        text = written(&m);
        cr_expect(!strstr(text, "input_read"));
        free(text);
    }
}

Test(metrics, each_state_is_the_only_one)
{
    for (int s = BG_RUN_LOADING; s <= BG_RUN_FAILED; s++) {
        bg_metrics m = full();
        m.state = (bg_run_state)s;
        char *text = written(&m);
        int ones = 0;
        for (const char *at = text; (at = strstr(at, "\nbatchgen_run_state{")); at++) {
            const char *end = strchr(at + 1, '\n');
            ones += end[-1] == '1';
        }
        cr_expect_eq(ones, 1);
        free(text);
    }
}

Test(metrics, labels_are_escaped)
{
    bg_metrics m = full();
    m.output = "a\"b\\c\nd{}=,é";
    m.model = "\\";
    char *text = written(&m);
    const char *why = check(text);
    cr_expect(!why, "%s\n%s", why, text);
    cr_expect(strstr(text, "{output=\"a\\\"b\\\\c\\nd{}=,é\","));
    cr_expect(strstr(text, ",model=\"\\\\\"} 1\n"));
    free(text);
}

/* ---- the file
 * ---------------------------------------------------------------------------------------- */

Test(metrics, the_file_is_replaced_and_nothing_is_left)
{
    bg_error err = {0};
    bg_metrics m = full();
    umask(022);
    free(written(&m));
    struct stat before, after;
    cr_assert_eq(stat(in_dir("job.prom"), &before), 0);
    cr_expect_eq(before.st_mode & 0777, 0644, "others may read it");
    int old = open(in_dir("job.prom"), O_RDONLY);
    cr_assert_geq(old, 0);
    m.records_failed = 8;
    free(written(&m));
    char had[8192] = "";
    cr_expect_gt(read(old, had, sizeof had - 1), 0);
    cr_expect(strstr(had, "records_failed_total" ALL "} 7\n"), "a reader keeps the whole old one");
    close(old);
    cr_assert_eq(stat(in_dir("job.prom"), &after), 0);
    cr_expect_eq(access(in_dir("job.prom.tmp"), F_OK), -1);
    /* A temporary file of a killed run, here a link, is neither in the way nor followed. */
    FILE *f = fopen(in_dir("victim"), "w");
    cr_assert(f);
    fclose(f);
    char target[128];
    snprintf(target, sizeof target, "%s", in_dir("victim"));
    cr_assert_eq(symlink(target, in_dir("job.prom.tmp")), 0);
    cr_expect(!bg_metrics_write(in_dir("job.prom"), &m, &err), "%s", err.text);
    cr_assert_eq(stat(target, &after), 0);
    cr_expect_eq(after.st_size, 0);
}

Test(metrics, failures_name_the_file)
{
    bg_error err = {0};
    bg_metrics m = full();
    cr_expect_eq(bg_metrics_write(in_dir("none/job.prom"), &m, &err), BG_IO);
    cr_expect(strstr(err.text, "none/job.prom"), "%s", err.text);
    /* A device is never replaced by a file. */
    cr_assert_eq(mkfifo(in_dir("fifo"), 0600), 0);
    err = (bg_error){0};
    cr_expect_eq(bg_metrics_write(in_dir("fifo"), &m, &err), BG_ARG);
    struct stat s;
    cr_expect(stat(in_dir("fifo"), &s) == 0 && S_ISFIFO(s.st_mode));
}
