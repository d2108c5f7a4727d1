/* Whatever happens to a run, the next one goes on and the output ends up whole: each record once.
 */
#include "unit/output/disk.h"

TestSuite(crash, .init = set_up, .fini = tear_down);

/* Every call of a run fails in turn; the next run ends the job. */
static void each_call_fails(bg_out_format format, bool half, bool second)
{
    static disk d;
    for (long n = 0;; n++) {
        remove_files();
        job j = {.format = format, .n = 40, .every = 7, .partials = n % 2, .stop = second ? 20 : 0};
        bg_error err = {0};
        if (second) { /* fail in a run that recovers a torn tail first */
            cr_assert_eq(run_job(&j, &quick, &err), BG_OK);
            end_job(&j);
            bytes out = load(out_path), journal = load(journal_path);
            store(out_path, out.data, out.n - 3);
            bg_buf b = {0};
            bg_buf_add(&b, journal.data, journal.n);
            bg_buf_str(&b, "{\"commit\":{\"n\":");
            store(journal_path, b.data, b.len);
            bg_buf_release(&b);
            free(out.data);
            free(journal.data);
        }
        j.stop = 0;
        const bg_out_sys *sys = disk_begin(&d, n);
        d.half = half;
        bg_status st = run_job(&j, sys, &err);
        end_job(&j);
        bool failed = d.calls > n;
        int error = d.error;
        disk_end(&d);
        if (!failed) {
            cr_assert_eq(st, BG_OK, "%s", err.text);
            cr_assert_gt(n, 20);
            break;
        }
        cr_assert_eq(st, BG_IO, "call %ld: %s", n, err.text);
        cr_assert_eq(err.os, error);
        cr_assert(strstr(err.text, out_path), "%s", err.text);
        finish_and_check(j, "after failed call", n);
    }
    remove_files();
}

Test(crash, each_call_fails_lz4)
{
    each_call_fails(BG_OUT_LZ4, false, false);
    each_call_fails(BG_OUT_LZ4, true, false);
}

Test(crash, each_call_fails_plain)
{
    each_call_fails(BG_OUT_PLAIN, false, false);
    each_call_fails(BG_OUT_PLAIN, true, false);
}

Test(crash, each_call_fails_while_recovering)
{
    each_call_fails(BG_OUT_LZ4, false, true);
    each_call_fails(BG_OUT_PLAIN, true, true);
}

/* The power goes before each call, and what was not synced is kept, lost, torn or out of order.
 * What a commit has reported is there in every case. */
static void power_loss(bg_out_format format, size_t piece)
{
    static disk d;
    for (int f = 0; f < N_FATES; f++) {
        bool over = false;
        for (long n = 0; !over; n++) {
            remove_files();
            job j = {.format = format, .n = 40, .every = 9, .partials = f % 2};
            bg_error err = {0};
            const bg_out_sys *sys = disk_begin(&d, n);
            d.piece = piece;
            (void)run_job(&j, sys, &err);
            end_job(&j);
            over = d.calls <= n;
            disk_crash(&d, (fate)f, 0);
            disk_end(&d);
            int durable = j.durable;
            /* The second run is interrupted as well, somewhere in its beginning. */
            job k = j;
            bg_error err2 = {0};
            sys = disk_begin(&d, n % 7);
            d.piece = piece;
            (void)run_job(&k, sys, &err2);
            end_job(&k);
            cr_assert(!err2.status || err2.status == BG_IO, "fate %d, call %ld: %s", f, n,
                      err2.text);
            if (!err2.status) cr_assert_geq(k.rec.n_records, durable);
            disk_crash(&d, (fate)((f + (int)n) % N_FATES), 0);
            disk_end(&d);
            j.stop = 1;
            bg_error err3 = {0};
            cr_assert_eq(run_job(&j, &quick, &err3), BG_OK, "fate %d, call %ld: %s", f, n,
                         err3.text);
            end_job(&j);
            cr_assert_geq(j.rec.n_records, durable, "fate %d, call %ld: %d records of %d", f, n,
                          (int)j.rec.n_records, durable);
            finish_and_check(j, "after power loss", n);
        }
    }
}

Test(crash, power_loss_lz4)
{
    power_loss(BG_OUT_LZ4, 0);
}

Test(crash, power_loss_plain)
{
    power_loss(BG_OUT_PLAIN, 0);
}

Test(crash, power_loss_between_short_writes)
{
    power_loss(BG_OUT_LZ4, 100);
}

/* ---- files cut and soiled
 * -------------------------------------------------------------------------------- */

typedef struct torn {
    job j;
    bytes out, journal;
    size_t first_entry; /* bytes of the journal's first entry */
} torn;

static torn torn_begin(bg_out_format format, int errors)
{
    torn t = {
        .j = {
            .format = format, .errors = errors, .n = 12, .every = 3, .stop = 8, .partials = true}};
    bg_error err = {0};
    remove_files();
    cr_assert_eq(run_job(&t.j, &quick, &err), BG_OK, "%s", err.text);
    end_job(&t.j);
    t.out = load(out_path);
    t.journal = load(journal_path);
    t.first_entry = (size_t)(strchr(t.journal.data, '\n') - t.journal.data) + 1;
    return t;
}

static void torn_end(torn *t)
{
    free(t->out.data);
    free(t->journal.data);
}

static void cut_everywhere(bg_out_format format)
{
    torn t = torn_begin(format, ERRORS_NONE);
    for (size_t cut = 0; cut < t.out.n; cut++) {
        store(out_path, t.out.data, cut);
        store(journal_path, t.journal.data, t.journal.n);
        finish_and_check(t.j, "output cut at", (long)cut);
    }
    for (size_t cut = 0; cut < t.journal.n; cut++) {
        store(out_path, t.out.data, t.out.n);
        store(journal_path, t.journal.data, cut);
        if (cut >= t.first_entry) {
            finish_and_check(t.j, "journal cut at", (long)cut);
            continue;
        }
        bg_error err = {0}; /* whose results these are is not known: nothing is touched */
        job j = t.j;
        cr_assert_eq(run_job(&j, &quick, &err), BG_FORMAT, "%zu", cut);
        bytes out = load(out_path), journal = load(journal_path);
        cr_assert(same(out, t.out) && journal.n == cut);
        free(out.data);
        free(journal.data);
        store(out_path, "", 0); /* without results it is an unfinished start */
        finish_and_check(t.j, "journal cut, no output, at", (long)cut);
    }
    torn_end(&t);
}

Test(crash, cut_everywhere_lz4)
{
    cut_everywhere(BG_OUT_LZ4);
}

Test(crash, cut_everywhere_plain)
{
    cut_everywhere(BG_OUT_PLAIN);
}

Test(crash, zeros_and_noise_behind)
{
    for (int format = 0; format < 2; format++) {
        torn t = torn_begin(format ? BG_OUT_PLAIN : BG_OUT_LZ4, ERRORS_NONE);
        for (int n = 1; n <= 64; n++) {
            for (int noise = 0; noise < 2; noise++) {
                for (int which = 1; which < 4; which++) {
                    bg_buf out = {0}, journal = {0};
                    bg_buf_add(&out, t.out.data, t.out.n);
                    bg_buf_add(&journal, t.journal.data, t.journal.n);
                    for (int i = 0; i < n; i++) {
                        uint32_t w = noise ? bg_sample_word((uint64_t)n, (uint64_t)i, 1) : 0;
                        if (which & 1) bg_buf_char(&out, (char)w);
                        if (which & 2) bg_buf_char(&journal, (char)(w >> 8));
                    }
                    store(out_path, out.data, out.len);
                    store(journal_path, journal.data, journal.len);
                    finish_and_check(t.j, noise ? "noise" : "zeros", n);
                    bg_buf_release(&out);
                    bg_buf_release(&journal);
                }
            }
        }
        torn_end(&t);
    }
}

static bg_status open_again(const torn *t, bg_recovered *rec, bg_error *err)
{
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&t->j, identity);
    bg_writer *w;
    bg_status st = bg_writer_open_on(&w, &c, &quick, rec, err);
    bg_writer_close(w);
    json_decref(identity);
    return st;
}

/* A changed byte in the last commit is a torn tail; before whole commits it is damage, and nothing
 * is cut. */
Test(crash, every_byte_changed)
{
    for (int format = 0; format < 2; format++) {
        torn t = torn_begin(format ? BG_OUT_PLAIN : BG_OUT_LZ4, ERRORS_NONE);
        bg_recovered rec;
        int n_refused[2] = {0}, n_cut[2] = {0};
        for (int which = 0; which < 2; which++) {
            bytes *b = which ? &t.journal : &t.out;
            for (size_t at = 0; at < b->n; at++) {
                bg_error err = {0};
                b->data[at] ^= 1;
                store(out_path, t.out.data, t.out.n);
                store(journal_path, t.journal.data, t.journal.n);
                bg_status st = open_again(&t, &rec, &err);
                if (st) {
                    cr_assert_eq(st, BG_FORMAT, "%s", err.text);
                    bytes out = load(out_path), journal = load(journal_path);
                    cr_assert(same(out, t.out) && same(journal, t.journal), "byte %zu", at);
                    free(out.data);
                    free(journal.data);
                    n_refused[which]++;
                } else {
                    cr_assert_eq(rec.n_records, 3, "file %d, byte %zu of %zu: %d, %.60s", which, at,
                                 b->n, (int)rec.n_records, b->data + (at > 30 ? at - 30 : 0));
                    finish_and_check(t.j, "byte changed", (long)at);
                    n_cut[which]++;
                }
                b->data[at] ^= 1;
            }
        }
        for (int i = 0; i < 2; i++)
            cr_expect(n_refused[i] > 20 && n_cut[i] > 20);
        torn_end(&t);
    }
}

/* What a folded commit names was on disk before it was written: no crash takes that back, so it is
 * damage, and nothing is cut. */
Test(crash, finished_output_that_was_damaged)
{
    for (int errors = 0; errors < 3; errors++) {
        torn t = torn_begin(BG_OUT_LZ4, errors);
        finish_and_check(t.j, "whole", 0);
        bytes journal = load(journal_path);
        for (int side = 0; side <= (errors > 0); side++) {
            const char *path = side ? errors_path : out_path;
            bytes whole = load(path);
            for (size_t at = 0; at < 2 * whole.n; at++) { /* a byte changed, and cut there */
                bytes now = {memcpy(malloc(whole.n), whole.data, whole.n), whole.n};
                if (at < whole.n)
                    now.data[at] ^= 1;
                else
                    now.n = at - whole.n;
                store(path, now.data, now.n);
                bg_recovered rec;
                bg_error err = {0};
                cr_assert_eq(open_again(&t, &rec, &err), BG_FORMAT, "byte %zu", at);
                cr_assert(strstr(err.text, path) && strstr(err.text, "nothing was changed"), "%s",
                          err.text);
                bytes after = load(path), journal2 = load(journal_path);
                cr_assert(same(now, after) && same(journal, journal2));
                free(now.data);
                free(after.data);
                free(journal2.data);
            }
            store(path, whole.data, whole.n);
            free(whole.data);
        }
        finish_and_check(t.j, "whole again", 0);
        free(journal.data);
        torn_end(&t);
    }
}

/* The power goes while commits are being taken back, because the output lost their bytes. */
Test(crash, power_loss_while_cutting)
{
    static disk d;
    job j = {.format = BG_OUT_PLAIN, .n = 12, .every = 1, .stop = 8};
    bg_error err = {0};
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK);
    end_job(&j);
    bytes out = load(out_path), journal = load(journal_path);
    for (int f = 0; f < N_FATES; f++) {
        for (long n = 0; n < 8; n++) {
            store(out_path, out.data, out.n / 3);
            store(journal_path, journal.data, journal.n);
            const bg_out_sys *sys = disk_begin(&d, n);
            err = (bg_error){0};
            cr_assert_eq(run_job(&j, sys, &err), BG_IO);
            end_job(&j);
            disk_crash(&d, (fate)f, 0);
            disk_end(&d);
            finish_and_check(j, "power loss while cutting", n);
        }
    }
    free(out.data);
    free(journal.data);
}
