/* A made-up job for the tests of the writer: a line for each record, in an order that is not the
 * records', and the means to read its output back. Every program that includes this uses all of it
 * or marks it so. */
#ifndef BG_TEST_OUTPUT_JOB_H
#define BG_TEST_OUTPUT_JOB_H

#include <criterion/criterion.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/io.h"
#include "output/files.h"
#include "output/frames.h"

#define UNUSED __attribute__((unused))

static char dir[] = "/tmp/bg-output-XXXXXX";
static char out_path[64], journal_path[80];

UNUSED static void set_up(void)
{
    cr_assert(mkdtemp(dir));
    snprintf(out_path, sizeof out_path, "%s/out", dir);
    snprintf(journal_path, sizeof journal_path, "%s.journal", out_path);
}

UNUSED static void tear_down(void)
{
    unlink(out_path);
    unlink(journal_path);
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
    /* out */
    bg_recovered rec;
    int durable; /* records of which a commit has said that they are on disk */
    int now;     /* the record being made, for partials */
    bg_partial list[3];
    int32_t tokens[3][64];
    bg_writer *w;
} job;

/* Record of the i-th result: a fixed shuffle. */
UNUSED static int64_t record_at(int n, int i)
{
    return (int64_t)i * 7 % n; /* n is no multiple of 7 */
}

UNUSED static void line_for(int64_t record, bg_buf *b)
{
    bg_buf_clear(b);
    bg_buf_printf(b, "{\"line\":%lld,\"text\":\"", (long long)record + 1);
    for (int64_t i = 0; i < record * 13 % 40; i++)
        bg_buf_char(b, (char)('a' + (record + i) % 26));
    bg_buf_str(b, "\"}\n");
}

UNUSED static int32_t token_of(int64_t record, int choice, int i)
{
    return (int32_t)(record * 1000 + choice * 100 + i);
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
        *p = (bg_partial){record_at(j->n, i), i % 2, j->tokens[*n], len};
        for (int t = 0; t < len; t++)
            p->tokens[t] = token_of(p->record, p->choice, t);
        (*n)++;
    }
    return j->list;
}

UNUSED static bg_writer_config config_of(const job *j, json_t *identity)
{
    return (bg_writer_config){.path = out_path,
                              .format = j->format,
                              .identity = identity,
                              .commit_bytes = 1 << 20,
                              .commit_ns = INT64_MAX / 4};
}

UNUSED static json_t *identity_of(void)
{
    return json_pack("{s:s, s:i, s:f}", "model", "tiny", "n", 3, "temperature", 0.25);
}

/* Opens, does what is left, and finishes; stops at the first failure. */
UNUSED static bg_status run_job(job *j, const bg_out_sys *sys, bg_error *err)
{
    json_t *identity = identity_of();
    bg_writer_config c = config_of(j, identity);
    bg_buf line = {0};
    int fresh = 0;
    j->durable = 0;
    bg_status st = bg_writer_open_on(&j->w, &c, sys, &j->rec, err);
    if (st) goto out;
    j->durable = (int)j->rec.n_records;
    for (int k = 0; k < j->rec.n_partials; k++) { /* what comes back is what was given */
        const bg_partial *p = &j->rec.partials[k];
        cr_assert_not(bg_writer_done(j->w, p->record));
        for (int t = 0; t < p->n_tokens; t++)
            cr_assert_eq(p->tokens[t], token_of(p->record, p->choice, t));
    }
    if (j->partials) bg_writer_on_partials(j->w, in_flight, j);
    for (int i = 0; i < j->n && !st; i++) {
        int64_t r = record_at(j->n, i);
        j->now = i;
        if (bg_writer_done(j->w, r)) continue;
        line_for(r, &line);
        st = bg_writer_add(j->w, &(bg_done){.record = r, .failed = r % 5 == 0}, line.data, line.len,
                           err);
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

/* The text that the output holds; every byte of it must be whole frames. */
UNUSED static void read_output(bg_out_format format, bg_buf *text)
{
    bytes b = load(out_path);
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

/* The output holds each of the job's lines once and nothing else. */
UNUSED static void expect_complete(const job *j, const char *what, long n)
{
    bg_buf text = {0}, line = {0};
    int seen[256] = {0};
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
        p = lf + 1;
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
