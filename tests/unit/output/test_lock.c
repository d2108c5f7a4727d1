/* The output's lock: who gets it, who waits, and which files are never opened for writing. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

#include "output/journal.h"
#include "output/lock.h"
#include "unit/output/job.h"

TestSuite(lock, .init = set_up, .fini = tear_down);

static bg_out_lock *take(void)
{
    bg_out_lock *l;
    bg_error err = {0};
    cr_assert_eq(bg_out_lock_take(&l, out_path, 0, NULL, NULL, &err), BG_OK, "%s", err.text);
    return l;
}

static bg_status try_take(const char *path, bg_error *err)
{
    bg_out_lock *l;
    *err = (bg_error){0};
    bg_status st = bg_out_lock_take(&l, path, 0, NULL, NULL, err);
    cr_expect((st == BG_OK) == (l != NULL));
    bg_out_lock_free(l);
    return st;
}

Test(lock, what_it_made_and_nobody_wrote_is_removed)
{
    bg_out_lock_free(take());
    cr_expect_neq(access(out_path, F_OK), 0);
    store(out_path, "", 0);
    bg_out_lock_free(take());
    cr_expect_eq(access(out_path, F_OK), 0, "was there before");
    unlink(out_path);
    /* a writer that has begun keeps it */
    job j = {.format = BG_OUT_LZ4, .n = 12};
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_error err = {0};
    c.take_lock = take();
    cr_assert_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_writer_begin(j.w, &err), BG_OK, "%s", err.text);
    end_job(&j);
    cr_expect(access(out_path, F_OK) == 0 && access(journal_path, F_OK) == 0);
    /* one that cannot begin does not */
    unlink(out_path);
    store(journal_path, "something else\n", 15);
    c.take_lock = take();
    cr_assert_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_FORMAT);
    cr_expect_neq(access(out_path, F_OK), 0);
    cr_expect_eq(access(journal_path, F_OK), 0);
    json_decref(identity);
    bg_out_lock_free(NULL);
}

Test(lock, second_is_told_who_has_it)
{
    bg_out_lock *l = take();
    bg_error err;
    char pid[32];
    snprintf(pid, sizeof pid, "(pid %ld)", (long)getpid());
    cr_expect_eq(try_take(out_path, &err), BG_BUSY);
    cr_expect(strstr(err.text, out_path) && strstr(err.text, pid) && strstr(err.text, "--wait"),
              "%s", err.text);
    /* the journal names who wrote before; it is not believed */
    bg_buf b = {0};
    bg_buf_str(&b, "{\"run\":{\"pid\":1,\"host\":\"h\",\"start\":\"then\"}}");
    bg_journal_seal(&b, 0);
    store(journal_path, b.data, b.len);
    cr_expect_eq(try_take(out_path, &err), BG_BUSY);
    cr_expect(strstr(err.text, pid) && !strstr(err.text, "then"), "%s", err.text);
    bg_buf_clear(&b);
    bg_buf_printf(&b, "{\"run\":{\"pid\":%ld,\"host\":\"h\",\"start\":\"now\"}}", (long)getpid());
    bg_journal_seal(&b, 0);
    store(journal_path, b.data, b.len);
    cr_expect_eq(try_take(out_path, &err), BG_BUSY);
    cr_expect(strstr(err.text, "since now"), "%s", err.text);
    bg_buf_release(&b);
    bg_out_lock_free(l);
    cr_expect_eq(try_take(out_path, &err), BG_OK, "%s", err.text);
}

typedef struct asked {
    int n, at;           /* times asked; what to do at which */
    bg_out_lock *give;   /* gives it back */
    const char *replace; /* puts another file in its place, as a rewrite does */
} asked;

static bool ask(void *ctx)
{
    asked *a = ctx;
    if (++a->n != a->at) return false;
    if (a->replace) cr_assert_eq(rename(a->replace, out_path), 0);
    if (a->give) {
        bg_out_lock_free(a->give);
        return false;
    }
    return true;
}

Test(lock, waits_until_it_is_free)
{
    bg_out_lock *l;
    bg_error err = {0};
    asked a = {.at = 2, .give = take()};
    cr_expect_eq(bg_out_lock_take(&l, out_path, INT64_MAX, ask, &a, &err), BG_OK, "%s", err.text);
    cr_expect_eq(a.n, 2);
    cr_expect(bg_out_is(l->fd, out_path));
    a = (asked){.at = 1};
    bg_out_lock *none;
    cr_expect_eq(bg_out_lock_take(&none, out_path, INT64_MAX, ask, &a, &err), BG_BUSY);
    cr_expect(a.n == 1 && strstr(err.text, "stopped"), "%s", err.text);
    err = (bg_error){0};
    a = (asked){.at = -1};
    cr_expect_eq(bg_out_lock_take(&none, out_path, 1, ask, &a, &err), BG_BUSY);
    cr_expect(!strstr(err.text, "stopped"), "%s", err.text);
    bg_out_lock_free(l);
}

/* The lock of a file that lost its name is worth nothing. */
Test(lock, follows_the_name)
{
    bg_out_lock *l;
    bg_error err = {0};
    char other[80];
    snprintf(other, sizeof other, "%s.other", out_path);
    store(other, "new\n", 4);
    asked a = {.at = 2, .give = take(), .replace = other};
    cr_expect_eq(bg_out_lock_take(&l, out_path, INT64_MAX, ask, &a, &err), BG_OK, "%s", err.text);
    cr_expect(bg_out_is(l->fd, out_path));
    cr_expect_eq(try_take(out_path, &err), BG_BUSY);
    bg_out_lock_free(l);
    bytes b = load(out_path);
    cr_expect_eq(b.n, 4, "not the new file");
    free(b.data);
}

Test(lock, dies_with_its_process)
{
    int ready[2];
    char c;
    cr_assert_eq(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        bg_out_lock *l;
        bg_error err = {0};
        if (bg_out_lock_take(&l, out_path, 0, NULL, NULL, &err)) _exit(1);
        (void)!write(ready[1], "x", 1);
        for (;;)
            pause();
    }
    cr_assert_eq(read(ready[0], &c, 1), 1);
    bg_error err;
    cr_expect_eq(try_take(out_path, &err), BG_BUSY);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    cr_expect_eq(try_take(out_path, &err), BG_OK, "%s", err.text);
    close(ready[0]);
    close(ready[1]);
}

/* ---- links, and files of others
 * ----------------------------------------------------------------------------------------- */

static void remove_all(const char *const *names, int n)
{
    char path[128];
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
}

Test(lock, own_links_are_followed)
{
    char target[80], link2[80];
    bg_error err;
    snprintf(target, sizeof target, "%s/target", dir);
    snprintf(link2, sizeof link2, "%s/link2", dir);
    cr_assert_eq(symlink("link2", out_path), 0);
    cr_assert_eq(symlink(target, link2), 0);
    cr_expect_eq(try_take(out_path, &err), BG_ARG);
    cr_expect(strstr(err.text, out_path) && strstr(err.text, "not there"), "%s", err.text);
    cr_expect_neq(access(target, F_OK), 0, "made through a dangling link");
    store(target, "", 0);
    cr_expect_eq(try_take(out_path, &err), BG_OK, "%s", err.text);
    /* link and target are one output */
    bg_out_lock *l = take();
    cr_expect_eq(try_take(target, &err), BG_BUSY);
    bg_out_lock_free(l);
    job j = {.format = BG_OUT_LZ4, .n = 12, .every = 5};
    finish_and_check(j, "through a link", 0);
    struct stat sb;
    cr_expect(lstat(out_path, &sb) == 0 && S_ISLNK(sb.st_mode), "the link is gone");
    /* a dangling journal */
    unlink(journal_path);
    unlink(target);
    store(target, "", 0);
    cr_assert_eq(symlink("nowhere", journal_path), 0);
    err = (bg_error){0};
    cr_expect_eq(run_job(&j, &quick, &err), BG_ARG);
    cr_expect(strstr(err.text, journal_path), "%s", err.text);
    unlink(out_path);
    cr_assert_eq(symlink(out_path, out_path), 0);
    cr_expect_eq(try_take(out_path, &err), BG_ARG, "a link to itself");
    remove_all((const char *[]){"target", "link2", "out", "out.journal", "nowhere"}, 5);
}

Test(lock, other_owners_in_a_folder_for_all)
{
    if (geteuid() != 0) cr_skip_test("needs root to make files of others");
    char target[80];
    bg_error err;
    job j = {.format = BG_OUT_LZ4, .n = 12, .every = 5};
    snprintf(target, sizeof target, "%s/target", dir);
    for (int sticky = 0; sticky < 2; sticky++) {
        cr_assert_eq(chmod(dir, sticky ? 01777 : 0755), 0);
        for (int what = 0; what < 4; what++) {
            const char *name = what < 2 ? out_path : journal_path;
            store(target, "", 0);
            if (what & 1)
                store(name, "", 0);
            else
                cr_assert_eq(symlink(target, name), 0);
            cr_assert_eq(lchown(name, 1234, 1234), 0);
            err = (bg_error){0};
            bg_status st = run_job(&j, &quick, &err);
            end_job(&j);
            cr_expect_eq(st, sticky ? BG_ARG : BG_OK, "%d: %s", what, err.text);
            if (sticky)
                cr_expect(strstr(err.text, name) && strstr(err.text, "another user's"), "%s",
                          err.text);
            bytes b = load(target);
            if (sticky) cr_expect_eq(b.n, 0, "%d: written through", what);
            free(b.data);
            remove_all((const char *[]){"target", "out", "out.journal"}, 3);
        }
    }
}
