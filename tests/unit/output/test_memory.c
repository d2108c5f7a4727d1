/* Each allocation of a run and of the recovery after it failing in turn: BG_NOMEM, and the next
 * start goes on. */
#include <errno.h>

#include "unit/output/job.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CAN_FAIL = 0 };
static long allocations_left = -1;
#else
enum { CAN_FAIL = 1 };
static long allocations_left = -1; /* -1: no end */

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

static bool refuse(void)
{
    if (allocations_left < 0) return false;
    if (allocations_left == 0) {
        errno = ENOMEM;
        return true;
    }
    allocations_left--;
    return false;
}

void *malloc(size_t n)
{
    return refuse() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return refuse() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return refuse() ? NULL : __libc_realloc(p, n);
}
#endif

TestSuite(memory, .init = set_up, .fini = tear_down);

typedef struct moment {
    bg_writer *w;
    bg_recovered rec;
} moment;

/* Opens, rewrites if the job says so, adds three results and commits each, with lines and identity
 * made beforehand. */
static bg_status short_run(const bg_writer_config *c, const bg_buf *lines, job *j, long limit,
                           bool *ran_out, bg_error *err)
{
    moment m = {0};
    const bg_rewrite how = {.keep = j->retry ? keep_good : NULL, .sort = true};
    int64_t kept, dropped;
    allocations_left = limit;
    bg_status st = bg_writer_open_on(&m.w, c, &quick, &m.rec, err);
    if (!st) st = bg_writer_begin(m.w, err);
    if (!st) bg_writer_on_partials(m.w, in_flight, j);
    if (!st && j->retry) st = bg_writer_rewrite(m.w, &how, &kept, &dropped, err);
    int added = 0;
    for (int i = 0; i < j->n && !st && added < 3; i++) {
        int64_t r = record_at(j->n, i);
        j->now = i;
        if (bg_writer_done(m.w, r)) continue;
        const bg_done what = done_for(r);
        st = bg_writer_add(m.w, &what, lines[r].data, lines[r].len, err);
        if (!st) st = bg_writer_commit(m.w, err);
        added++;
    }
    bg_writer_close(m.w);
    *ran_out = allocations_left == 0;
    allocations_left = -1;
    return st;
}

static void runs_out(job j, bool resumed)
{
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_buf lines[12] = {{0}};
    j.n = 12;
    j.every = 2;
    j.stop = 6;
    j.partials = true;
    for (int i = 0; i < 12; i++)
        line_for(i, &lines[i]);
    for (long n = 0;; n++) {
        remove_files();
        bg_error err = {0};
        if (resumed) {
            job first = j;
            first.retry = false;
            cr_assert_eq(run_job(&first, &quick, &err), BG_OK, "%s", err.text);
            end_job(&first);
        }
        bool ran_out;
        bg_status st = short_run(&c, lines, &j, n, &ran_out, &err);
        cr_assert(st == BG_OK || st == BG_NOMEM, "after %ld: %s", n, err.text);
        finish_and_check(j, "without memory", n);
        if (!ran_out) {
            cr_expect_eq(st, BG_OK);
            break;
        }
        cr_assert_lt(n, 5000);
    }
    for (int i = 0; i < 12; i++)
        bg_buf_release(&lines[i]);
    json_decref(identity);
}

Test(memory, runs_out)
{
    static const job jobs[] = {
        {.format = BG_OUT_LZ4},
        {.format = BG_OUT_PLAIN},
        {.format = BG_OUT_LZ4, .errors = ERRORS_PLAIN, .fold_bytes = 1},
        {.format = BG_OUT_PLAIN, .errors = ERRORS_LZ4, .retry = true},
        {.format = BG_OUT_LZ4, .retry = true, .fold_bytes = 1},
    };
    if (!CAN_FAIL) return;
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        runs_out(jobs[i], false);
        runs_out(jobs[i], true);
    }
}
