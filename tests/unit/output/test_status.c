#include <fcntl.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "output/journal.h"
#include "output/status.h"
#include "output/view.h"
#include "support/schema.h"
#include "unit/output/made.h"

TestSuite(status, .init = set_up, .fini = tear_down);

static bg_job_status look(void)
{
    bg_job_status s;
    bg_error err = {0};
    cr_assert_eq(bg_job_status_read(&s, out_path, bg_wall_ns(), &err), BG_OK, "%s", err.text);
    char why[256] = "", *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    cr_assert(bg_job_status_json(&s, out_path, f));
    fclose(f);
    json_t *schema = json_load_file("schemas/status.schema.json", 0, NULL);
    json_t *v = json_loads(text, 0, NULL);
    cr_assert(schema && v, "%s", text);
    cr_expect(schema_fits(schema, v, why, sizeof why), "%s: %s", why, text);
    json_object_del(v, "state");
    cr_expect_not(schema_fits(schema, v, why, sizeof why));
    json_decref(v);
    json_decref(schema);
    free(text);
    f = open_memstream(&text, &n);
    bg_job_status_print(&s, out_path, f);
    fclose(f);
    cr_expect(strstr(text, out_path) == text && text[n - 1] == '\n');
    free(text);
    return s;
}

static void expect_state(bg_state want)
{
    bg_job_status s = look();
    cr_expect_eq(s.state, want, "%s, want %s: %s", bg_state_name(s.state), bg_state_name(want),
                 s.why);
}

Test(status, missing_and_empty)
{
    expect_state(BG_STATE_MISSING);
    store(out_path, "", 0);
    expect_state(BG_STATE_NOT_STARTED);
    store(out_path, "x", 1);
    expect_state(BG_STATE_NEEDS_REPAIR);
}

Test(status, running_then_unfinished_then_finished)
{
    for (int f = 0; f < 2; f++) {
        plan p = {.n = 20, .every = 5, .unfinished = true, .format = f, .errors = f};
        bg_writer *w;
        bg_recovered rec;
        bg_error err = {0};
        cr_assert_eq(open_made(&w, out_path, &p, &rec, &err), BG_OK, "%s", err.text);
        bg_job_status s = look();
        cr_expect_eq(s.state, BG_STATE_RUNNING);
        cr_expect_eq(s.lock, BG_LOCK_HELD);
        cr_expect_eq(s.holder, getpid());
        cr_expect(s.holder_alive && s.run_here && s.run_pid == getpid());
        for (int r = 0; r < 10; r++)
            add_made(w, r);
        bg_writer_input(w, &(bg_input_place){.end = 100, .read = 100, .total = 200, .records = 10});
        cr_assert_eq(bg_writer_commit(w, &err), BG_OK);
        add_made(w, 10); /* not committed, not told */
        s = look();
        cr_expect_eq(s.state, BG_STATE_RUNNING);
        cr_expect(s.n_done == 10 && s.n_failed == 2, "%ld done", (long)s.n_done);
        cr_expect_eq(s.n_total, 20);
        cr_expect_eq(s.output_tokens, 16);
        cr_expect(s.share > 0.49 && s.share < 0.51, "%g", s.share);
        cr_expect(s.commit_age_s >= 0);
        cr_expect_eq(s.error_bytes >= 0, f == 1);
        bg_writer_close(w);
        s = look();
        cr_expect_eq(s.state, BG_STATE_UNFINISHED);
        cr_expect_eq(s.lock, BG_LOCK_FREE);
        cr_assert_eq(open_made(&w, out_path, &p, &rec, &err), BG_OK, "%s", err.text);
        cr_assert_eq(bg_writer_finish(w, &err), BG_OK);
        bg_writer_close(w);
        s = look();
        cr_expect_eq(s.state, BG_STATE_FINISHED);
        cr_expect_eq(s.n_total, 10);
        unlink(out_path);
        unlink(name_in(".journal"));
    }
}

/* Never a moment in which a starting run finds the lock taken by one that only looks. */
Test(status, never_takes_the_lock)
{
    plan p = {.n = 6, .every = 2, .unfinished = true};
    make_output(out_path, &p);
    int go[2];
    cr_assert_eq(pipe(go), 0);
    pid_t child = fork();
    if (child == 0) {
        close(go[1]);
        char c;
        bg_job_status s;
        bg_error err = {0};
        int flags = fcntl(go[0], F_GETFL);
        fcntl(go[0], F_SETFL, flags | O_NONBLOCK);
        while (read(go[0], &c, 1) != 0) /* until the other end is closed */
            if (bg_job_status_read(&s, out_path, 0, &err)) _exit(1);
        _exit(0);
    }
    close(go[0]);
    for (int i = 0; i < 3000; i++) {
        bg_out_lock *lock;
        bg_error err = {0};
        cr_assert_eq(bg_out_lock_take(&lock, out_path, 0, NULL, NULL, &err), BG_OK, "%d: %s", i,
                     err.text);
        bg_out_lock_free(lock);
    }
    close(go[1]);
    int rc;
    cr_assert_eq(waitpid(child, &rc, 0), child);
    cr_expect_eq(rc, 0);
}

Test(status, a_holder_elsewhere)
{
    plan p = {.n = 6, .every = 2, .unfinished = true};
    make_output(out_path, &p);
    int ready[2], stop[2];
    cr_assert(pipe(ready) == 0 && pipe(stop) == 0);
    pid_t child = fork();
    if (child == 0) {
        bg_out_lock *lock;
        bg_error err = {0};
        char c = (char)bg_out_lock_take(&lock, out_path, 0, NULL, NULL, &err);
        close(stop[1]);
        if (write(ready[1], &c, 1) != 1 || read(stop[0], &c, 1) != 0) _exit(1);
        _exit(0);
    }
    char c;
    close(stop[0]);
    cr_assert(read(ready[0], &c, 1) == 1 && c == 0);
    bg_job_status s = look();
    cr_expect(s.lock == BG_LOCK_HELD && s.holder == child && s.holder_alive);
    cr_expect_eq(s.state, BG_STATE_RUNNING);
    close(stop[1]);
    waitpid(child, NULL, 0);
    s = look();
    cr_expect(s.lock == BG_LOCK_FREE && s.state == BG_STATE_UNFINISHED);
}

Test(status, tails_and_damage)
{
    plan p = {.n = 20, .every = 5, .unfinished = true};
    make_output(out_path, &p);
    bytes out = load(out_path), journal = load(name_in(".journal"));
    char *longer = malloc(out.n + 7);
    memcpy(longer, out.data, out.n);
    memset(longer + out.n, 0, 7);
    store(out_path, longer, out.n + 7);
    bg_job_status s = look();
    cr_expect(s.state == BG_STATE_UNFINISHED && s.tail_bytes == 7);
    store(out_path, out.data, out.n - 1);
    expect_state(BG_STATE_DAMAGED);
    out.data[out.n - 10] ^= 1;
    store(out_path, out.data, out.n);
    expect_state(BG_STATE_DAMAGED);
    out.data[out.n - 10] ^= 1;
    store(out_path, out.data, out.n);
    unlink(out_path);
    expect_state(BG_STATE_DAMAGED);
    store(out_path, out.data, out.n);
    for (size_t cut = 0; cut <= journal.n; cut++) { /* a journal that is torn, or an older copy */
        store(name_in(".journal"), journal.data, cut);
        s = look();
        cr_expect_eq(s.state, s.n_done >= 15 ? BG_STATE_UNFINISHED : BG_STATE_NEEDS_REPAIR,
                     "cut at %zu: %s", cut, bg_state_name(s.state));
        cr_expect_eq(s.n_done % 5, 0);
    }
    journal.data[journal.n / 2] ^= 1;
    store(name_in(".journal"), journal.data, journal.n);
    expect_state(BG_STATE_NEEDS_REPAIR);
    free(longer);
    free(out.data);
    free(journal.data);
}

Test(status, rates)
{
    static const char *const entries[] = {
        "{\"batchgen\":1,\"format\":\"plain\",\"identity\":{\"shard\":\"1/2\"}}",
        "{\"run\":{\"pid\":1,\"host\":\"elsewhere\",\"start\":\"2026-01-01T00:00:00.000Z\"}}",
        "{\"commit\":{\"n\":3,\"folded\":true,\"offset\":0,\"bytes\":0,\"text\":0,\"hash\":"
        "\"0000000000000000\",\"records\":\"0-99\",\"failed\":0,\"tokens\":[5,1000],\"at\":"
        "\"2026-01-01T01:00:00.000Z\"}}",
        "{\"commit\":{\"n\":4,\"offset\":0,\"bytes\":0,\"text\":0,\"hash\":\"0000000000000000\","
        "\"records\":\"100-119\",\"failed\":0,\"tokens\":[5,400],\"at\":"
        "\"2026-01-01T01:00:10.000Z\",\"input\":{\"end\":9,\"hash\":\"0000000000000000\","
        "\"read\":50,\"total\":100,\"records\":200},\"partial\":[{\"record\":500,\"choice\":0,"
        "\"from\":0,\"tokens\":[1,2,3]}]}}"};
    bg_buf b = {0};
    for (size_t i = 0; i < 4; i++) {
        size_t start = b.len;
        bg_buf_str(&b, entries[i]);
        bg_journal_seal(&b, start);
    }
    store(out_path, "", 0);
    store(name_in(".journal"), b.data, b.len);
    bg_job_status s;
    bg_error err = {0};
    int64_t now = bg_view_time("2026-01-01T01:00:12.500Z");
    cr_assert_eq(bg_job_status_read(&s, out_path, now, &err), BG_OK, "%s", err.text);
    cr_expect_eq(s.state, BG_STATE_UNFINISHED);
    cr_expect_eq(s.lock, BG_LOCK_UNKNOWN); /* on another host */
    cr_expect(s.record_rate > 1.99 && s.record_rate < 2.01, "%g", s.record_rate);
    cr_expect(s.token_rate > 39.9 && s.token_rate < 40.1, "%g", s.token_rate);
    cr_expect(s.commit_age_s > 2.49 && s.commit_age_s < 2.51, "%g", s.commit_age_s);
    cr_expect_eq(s.n_total, 200); /* half of 400 */
    cr_expect(s.eta_s > 39 && s.eta_s < 41, "%g", s.eta_s);
    cr_expect(s.partial_tokens == 3 && s.partial_sequences == 1);
    cr_expect_str_eq(s.shard, "1/2");
    bg_job_status_read(&s, out_path, now - INT64_C(3600000000000), &err); /* a clock set back */
    cr_expect(s.commit_age_s >= 0 && s.commit_age_s < 0.001);
    bg_buf_release(&b);
}

Test(status, times)
{
    cr_expect_eq(bg_view_time("1970-01-01T00:00:01.500Z"), 1500000000);
    cr_expect_eq(bg_view_time("1970-01-01T00:00:01"), 0);
    cr_expect_eq(bg_view_time("yesterday"), 0);
    cr_expect_eq(bg_view_time(NULL), 0);
}
