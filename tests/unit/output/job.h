/* A made-up job for the tests of the writer: a line for each record, in an order that is not the
 * records', and the means to read its output back. Every program that includes this uses all of it
 * or marks it so. */
#ifndef BG_TEST_OUTPUT_JOB_H
#define BG_TEST_OUTPUT_JOB_H

#include <criterion/criterion.h>

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/io.h"
#include "output/files.h"
#include "output/frames.h"

#define UNUSED __attribute__((unused))

static char dir[40];
static char out_path[64], journal_path[80], errors_path[80];

UNUSED static void set_up(void)
{
    /* in memory where there is such a folder: these tests make and remove many files */
    snprintf(dir, sizeof dir, "%s/bg-output-XXXXXX",
             access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    cr_assert(mkdtemp(dir));
    snprintf(out_path, sizeof out_path, "%s/out", dir);
    snprintf(journal_path, sizeof journal_path, "%s.journal", out_path);
    snprintf(errors_path, sizeof errors_path, "%s/errors", dir);
}

/* Everything in the folder. */
UNUSED static void remove_files(void)
{
    DIR *list = opendir(dir);
    cr_assert(list);
    for (struct dirent *e; (e = readdir(list));)
        if (e->d_name[0] != '.') unlinkat(dirfd(list), e->d_name, 0);
    closedir(list);
}

UNUSED static void tear_down(void)
{
    remove_files();
    rmdir(dir);
}

/* ---- files
 * ------------------------------------------------------------------------------------------- */

typedef struct bytes {
    char *data;
    size_t n;
} bytes;

UNUSED static bytes load(const char *path)
{
    bytes b = {0};
    bg_error err = {0};
    if (access(path, F_OK) == 0)
        cr_assert_eq(bg_read_file(path, 1 << 28, &b.data, &b.n, &err), BG_OK, "%s", err.text);
    return b;
}

UNUSED static void store(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    cr_assert(f);
    if (n) cr_assert_eq(fwrite(data, 1, n, f), n);
    cr_assert_eq(fclose(f), 0);
}

UNUSED static bool same(bytes a, bytes b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.data, b.data, a.n) == 0);
}

/* ---- system calls without the disk's slowness
 * ---------------------------------------------------------- */

static ssize_t quick_write(void *ctx, int fd, const void *data, size_t n, int64_t offset)
{
    (void)ctx;
    return offset < 0 ? write(fd, data, n) : pwrite(fd, data, n, offset);
}

static int quick_sync(void *ctx, int fd)
{
    (void)ctx;
    (void)fd;
    return 0;
}

static int quick_truncate(void *ctx, int fd, int64_t size)
{
    (void)ctx;
    return ftruncate(fd, size);
}

static int quick_make(void *ctx, const char *path, mode_t mode)
{
    (void)ctx;
    return open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
}

static int quick_rename(void *ctx, const char *from, const char *to)
{
    (void)ctx;
    return rename(from, to);
}

static int quick_unlink(void *ctx, const char *path)
{
    (void)ctx;
    return unlink(path);
}

static int quick_sync_dir(void *ctx, const char *path)
{
    (void)ctx;
    (void)path;
    return 0;
}

UNUSED static const bg_out_sys quick = {.write = quick_write,
                                        .sync = quick_sync,
                                        .truncate = quick_truncate,
                                        .make = quick_make,
                                        .rename = quick_rename,
                                        .unlink = quick_unlink,
                                        .sync_dir = quick_sync_dir};

/* ---- the job
 * --------------------------------------------------------------------------------------------- */

typedef struct job {
    bg_out_format format;
    int n;     /* records */
    int every; /* records a commit */
    int stop;  /* ends without finishing after so many more records; 0: never */
    bool partials;
    enum { ERRORS_NONE, ERRORS_PLAIN, ERRORS_LZ4 } errors; /* the error file */
    bool ordered;
    bool retry;       /* takes failed results out when it goes on */
    bool other_input; /* retried records may be other ones: partial tokens go */
    bool overwrite;
    uint64_t fold_bytes;
    /* out */
    bg_recovered rec;
    int durable; /* records of which a commit has said that they are on disk */
    int now;     /* the record being made, for partials */
    bg_partial list[3];
    int32_t tokens[3][64];
    bg_probs probs[3][64];
    bg_writer *w;
} job;

/* Record of the i-th result: a fixed shuffle. */
UNUSED static int64_t record_at(int n, int i)
{
    return (int64_t)i * 7 % n; /* n is no multiple of 7 */
}

UNUSED static bool fails_for(int64_t record)
{
    return record % 5 == 0;
}

UNUSED static uint64_t key_for(int64_t record)
{
    return record % 11 == 3 ? 0 : (uint64_t)record * UINT64_C(0x9e3779b97f4a7c15) + 1;
}

UNUSED static void line_for(int64_t record, bg_buf *b)
{
    char text[48];
    int n = (int)(record * 13 % 40);
    for (int i = 0; i < n; i++)
        text[i] = (char)('a' + (record + i) % 26);
    const bg_choice c = {.text = text, .n_text = (size_t)n, .finish_reason = "stop", .stop_id = -1};
    const bg_result r = {.record = record,
                         .line = record + 1,
                         .choices = &c,
                         .n_choices = 1,
                         .prompt_tokens = record,
                         .completion_tokens = 2 * record,
                         .error_code = fails_for(record) ? "empty_prompt" : NULL,
                         .error_message = "there is \"nothing\""};
    bg_buf_clear(b);
    bg_result_line(&r, b);
}

UNUSED static bg_done done_for(int64_t record)
{
    bool failed = fails_for(record);
    return (bg_done){.record = record,
                     .key = key_for(record),
                     .failed = failed,
                     .prompt_tokens = failed ? 0 : record,
                     .output_tokens = failed ? 0 : 2 * record};
}

UNUSED static int32_t token_of(int64_t record, int choice, int i)
{
    return (int32_t)(record * 1000 + choice * 100 + i);
}

/* Log-probabilities of a token, of every third record: odd floats, none, and infinity. */
UNUSED static bg_probs probs_of(int64_t record, int t)
{
    static const float odd[] = {-0.0f, 0.0f,         -1.17549435e-38f, -3.40282347e+38f,
                                -0.1f, -16777217.0f, -INFINITY,        -5.0f};
    bg_probs p = {.logprob = odd[(t + record) % 8], .n_top = (t + (int)record) % 4 * 5};
    for (int k = 0; k < p.n_top; k++) {
        p.top[k].token = k * 7 + t;
        p.top[k].logprob = odd[(t + k) % 8] / (float)(k + 1);
    }
    if (p.n_top > BG_PROBS_TOP) p.n_top = BG_PROBS_TOP;
    return p;
}

UNUSED static bool same_probs(const bg_probs *a, const bg_probs *b)
{
    bool same = !memcmp(&a->logprob, &b->logprob, sizeof a->logprob) && a->n_top == b->n_top;
    for (int k = 0; same && k < a->n_top; k++)
        same = a->top[k].token == b->top[k].token &&
               !memcmp(&a->top[k].logprob, &b->top[k].logprob, sizeof a->top[k].logprob);
    return same;
}

/* Sequences of records still to come, each longer than the last time it was asked for. */
UNUSED static const bg_partial *in_flight(void *ctx, int *n)
{
    job *j = ctx;
    *n = 0;
    for (int k = 1; k <= 3; k++) {
        int i = j->now + 2 * k;
        if (i >= j->n) continue;
        int len = 60 - 3 * k - (i % 5);
        if (len > 4 * (j->now + 1)) len = 4 * (j->now + 1);
        bg_partial *p = &j->list[*n];
        *p = (bg_partial){.record = record_at(j->n, i),
                          .choice = i % 2,
                          .tokens = j->tokens[*n],
                          .n_tokens = len};
        if (p->record % 3 == 0) p->probs = j->probs[*n];
        for (int t = 0; t < len; t++) {
            p->tokens[t] = token_of(p->record, p->choice, t);
            if (p->probs) p->probs[t] = probs_of(p->record, t);
        }
        (*n)++;
    }
    return j->list;
}

UNUSED static bg_writer_config config_of(const job *j, json_t *identity)
{
    snprintf(errors_path, sizeof errors_path, "%s/errors%s", dir,
             j->errors == ERRORS_LZ4 ? ".lz4" : "");
    return (bg_writer_config){.path = out_path,
                              .format = j->format,
                              .identity = identity,
                              .error_path = j->errors ? errors_path : NULL,
                              .ordered = j->ordered,
                              .overwrite = j->overwrite,
                              .fold_bytes = j->fold_bytes,
                              .commit_bytes = 1 << 20,
                              .commit_ns = INT64_MAX / 4};
}

UNUSED static json_t *identity_of(void)
{
    return json_pack("{s:s, s:i, s:f}", "model", "tiny", "n", 3, "temperature", 0.25);
}

UNUSED static bool keep_good(void *ctx, const bg_done *old, int64_t *record, int64_t *line,
                             const char **file_name)
{
    (void)ctx, (void)file_name;
    cr_assert(*record == old->record && *line == old->record + 1);
    cr_assert_eq(old->failed, fails_for(old->record));
    cr_assert_eq(old->key, key_for(old->record));
    bg_done is = done_for(old->record);
    cr_assert(is.prompt_tokens == old->prompt_tokens && is.output_tokens == old->output_tokens);
    return !old->failed;
}

UNUSED static bg_status retry_failed(job *j, bg_error *err)
{
    const bg_rewrite how = {.keep = keep_good, .same_input = !j->other_input};
    int64_t kept, dropped, failed, n = j->rec.n_records;
    j->durable = (int)(n - j->rec.n_failed); /* the others may go */
    bg_status st = bg_writer_rewrite(j->w, &how, &kept, &dropped, err);
    if (st) return st;
    cr_assert_eq(kept, n - j->rec.n_failed);
    cr_assert_eq(dropped, j->rec.n_failed);
    cr_assert_eq(bg_writer_count(j->w, &failed), kept);
    cr_assert_eq(failed, 0);
    return BG_OK;
}

/* Opens, does what is left, and finishes; stops at the first failure. */
UNUSED static bg_status run_job(job *j, const bg_out_sys *sys, bg_error *err)
{
    json_t *identity = identity_of();
    bg_writer_config c = config_of(j, identity);
    bg_buf line = {0};
    int fresh = 0;
    bg_status st = bg_writer_open_on(&j->w, &c, sys, &j->rec, err);
    if (!st) st = bg_writer_begin(j->w, err);
    if (st) goto out;
    j->durable = (int)j->rec.n_records;
    for (int k = 0; k < j->rec.n_partials; k++) { /* what comes back is what was given */
        const bg_partial *p = &j->rec.partials[k];
        cr_assert_not(bg_writer_done(j->w, p->record));
        for (int t = 0; t < p->n_tokens; t++)
            cr_assert_eq(p->tokens[t], token_of(p->record, p->choice, t));
        cr_assert_eq(!p->probs, p->record % 3 != 0);
        for (int t = 0; p->probs && t < p->n_tokens; t++) {
            const bg_probs want = probs_of(p->record, t);
            cr_assert(same_probs(&p->probs[t], &want), "record %d, token %d", (int)p->record, t);
        }
    }
    if (j->partials) bg_writer_on_partials(j->w, in_flight, j);
    if (j->retry && j->rec.n_failed) st = retry_failed(j, err);
    for (int i = 0; i < j->n && !st; i++) {
        int64_t r = record_at(j->n, i);
        j->now = i;
        if (bg_writer_done(j->w, r)) {
            cr_assert_eq(bg_writer_key(j->w, r), key_for(r));
            continue;
        }
        line_for(r, &line);
        const bg_done what = done_for(r);
        st = bg_writer_add(j->w, &what, line.data, line.len, err);
        bg_writer_input(j->w,
                        &(bg_input_place){.end = (uint64_t)(i + 1) * 10, .hash = (uint64_t)i * 77});
        fresh++;
        if (!st && fresh % j->every == 0) {
            st = bg_writer_commit(j->w, err);
            int64_t failed;
            if (!st) j->durable = (int)bg_writer_count(j->w, &failed);
        }
        if (j->stop && fresh == j->stop) goto out;
    }
    if (!st) st = bg_writer_finish(j->w, err);
    if (!st) {
        int64_t failed;
        cr_assert_eq(bg_writer_count(j->w, &failed), j->n);
        cr_assert_eq(failed, (j->n + 4) / 5);
        j->durable = j->n;
    }
out:
    if (st && j->w) { /* it stays failed, in the same way */
        bg_error again = {0};
        cr_assert_eq(bg_writer_commit(j->w, &again), st);
        cr_assert_str_eq(again.text, err->text);
        again = (bg_error){0};
        cr_assert_eq(
            bg_writer_add(j->w, &(bg_done){.record = 1000, .failed = false}, "{}\n", 3, &again),
            st);
        again = (bg_error){0};
        cr_assert_eq(bg_writer_finish(j->w, &again), st);
    }
    bg_buf_release(&line);
    json_decref(identity);
    return st;
}

UNUSED static void end_job(job *j)
{
    bg_writer_close(j->w);
    j->w = NULL;
}

/* The text that a file holds; every byte of it must be whole frames. */
UNUSED static void read_file(const char *path, bg_out_format format, bg_buf *text)
{
    bytes b = load(path);
    size_t used;
    bg_error err = {0};
    bg_buf_clear(text);
    if (format == BG_OUT_PLAIN) bg_buf_add(text, b.data, b.n);
    for (size_t at = 0; format == BG_OUT_LZ4 && at < b.n; at += used)
        cr_assert_eq(bg_frame_get(text, b.data + at, b.n - at, 1 << 26, &used, &err), BG_OK,
                     "byte %zu: %s", at, err.text);
    bg_buf_add(text, "", 0);
    free(b.data);
}

UNUSED static void read_output(bg_out_format format, bg_buf *text)
{
    read_file(out_path, format, text);
}

/* Output and error file hold each of the job's lines once and nothing else. */
UNUSED static void expect_complete(const job *j, const char *what, long n)
{
    bg_buf text = {0}, line = {0};
    int seen[256] = {0};
    for (int side = 0; side < (j->errors ? 2 : 1); side++) {
        int64_t before = -1;
        if (side)
            read_file(errors_path, j->errors == ERRORS_LZ4 ? BG_OUT_LZ4 : BG_OUT_PLAIN, &text);
        else
            read_output(j->format, &text);
        for (const char *p = text.data; *p;) {
            const char *lf = strchr(p, '\n');
            cr_assert(lf, "%s %ld: a line has no end", what, n);
            int64_t r = strtoll(p + 8, NULL, 10) - 1;
            cr_assert(r >= 0 && r < j->n, "%s %ld: %.60s", what, n, p);
            line_for(r, &line);
            cr_assert(line.len == (size_t)(lf + 1 - p) && !memcmp(line.data, p, line.len),
                      "%s %ld: %.60s", what, n, p);
            cr_assert_eq(++seen[r], 1, "%s %ld: record %d twice", what, n, (int)r);
            if (j->errors) cr_assert_eq(side, fails_for(r), "%s %ld: the wrong file", what, n);
            if (j->ordered) cr_assert_gt(r, before, "%s %ld: not in order", what, n);
            before = r;
            p = lf + 1;
        }
    }
    for (int r = 0; r < j->n; r++)
        cr_assert_eq(seen[r], 1, "%s %ld: record %d is missing", what, n, r);
    bg_buf_release(&text);
    bg_buf_release(&line);
}

/* Runs the job to its end and checks the result. */
UNUSED static void finish_and_check(job j, const char *what, long n)
{
    bg_error err = {0};
    j.stop = 0;
    bg_status st = run_job(&j, &quick, &err);
    cr_assert_eq(st, BG_OK, "%s %ld: %s", what, n, err.text);
    end_job(&j);
    expect_complete(&j, what, n);
}

#endif
