/* Whatever happens to a run, the next one goes on and the output ends up whole: each record once.
 */
#include "unit/output/disk.h"

TestSuite(crash, .init = set_up, .fini = tear_down);

/* ---- every call, failing or the last
 * --------------------------------------------------------------------------------------- */

static long tried; /* simulated failures */

static void report(const char *name)
{
    printf("crash: %s: %ld simulated failures\n", name, tried);
}

/* Jobs of every kind. With .stop the run that is disturbed is the second: the first leaves so many
 * results. */
static const job shapes[] = {
    {.format = BG_OUT_LZ4},
    {.format = BG_OUT_PLAIN},
    {.format = BG_OUT_LZ4, .errors = ERRORS_PLAIN},
    {.format = BG_OUT_PLAIN, .errors = ERRORS_LZ4, .stop = 20},
    {.format = BG_OUT_LZ4, .fold_bytes = 1},
    {.format = BG_OUT_PLAIN, .errors = ERRORS_PLAIN, .fold_bytes = 1, .stop = 20},
    {.format = BG_OUT_LZ4, .ordered = true},
    {.format = BG_OUT_PLAIN, .errors = ERRORS_LZ4, .ordered = true, .fold_bytes = 1},
    {.format = BG_OUT_LZ4, .retry = true, .stop = 20},
    {.format = BG_OUT_LZ4, .errors = ERRORS_LZ4, .retry = true, .stop = 20, .ordered = true},
    {.format = BG_OUT_PLAIN, .errors = ERRORS_PLAIN, .retry = true, .stop = 20, .fold_bytes = 1},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct snapshot {
    char paths[8][96];
    bytes data[8];
    int n;
} snapshot;

static snapshot take_snapshot(void)
{
    snapshot s = {0};
    DIR *list = opendir(dir);
    for (struct dirent *e; (e = readdir(list));) {
        if (e->d_name[0] == '.') continue;
        cr_assert_lt(s.n, 8);
        snprintf(s.paths[s.n], sizeof s.paths[0], "%s/%.31s", dir, e->d_name);
        s.data[s.n] = load(s.paths[s.n]);
        s.n++;
    }
    closedir(list);
    return s;
}

static void put_snapshot(const snapshot *s)
{
    remove_files();
    for (int i = 0; i < s->n; i++)
        store(s->paths[i], s->data[i].data, s->data[i].n);
}

static void free_snapshot(snapshot *s)
{
    for (int i = 0; i < s->n; i++)
        free(s->data[i].data);
}

static void append(const char *path, const char *text)
{
    if (access(path, F_OK) != 0) return;
    FILE *f = fopen(path, "ab");
    cr_assert(f && fputs(text, f) >= 0);
    fclose(f);
}

/* The folder as the run finds it: empty, or what a crashed run has left. */
static snapshot beginning(job *j, bool tails)
{
    bg_error err = {0};
    remove_files();
    j->n = 40;
    j->every = 7;
    if (j->stop) {
        job first = *j;
        first.retry = false;
        first.partials = true;
        cr_assert_eq(run_job(&first, &quick, &err), BG_OK, "%s", err.text);
        end_job(&first);
        j->durable = first.durable;
        if (tails) {
            append(out_path, "\x04\x22\x4d\x18torn");
            append(errors_path, "{\"line\":");
            append(journal_path, "{\"commit\":{\"n\":");
        }
    }
    j->stop = 0;
    return take_snapshot();
}

/* Each call of a run fails in turn; the next run ends the job. */
static void each_call_fails(job j, bool half)
{
    static disk d;
    snapshot s = beginning(&j, true);
    for (long n = 0;; n++) {
        put_snapshot(&s);
        bg_error err = {0};
        j.partials = n % 2;
        job k = j;
        const bg_out_sys *sys = disk_begin(&d, n);
        d.half = half;
        bg_status st = run_job(&k, sys, &err);
        end_job(&k);
        bool failed = d.calls > n;
        int error = d.error;
        disk_end(&d);
        if (!failed) {
            cr_assert_eq(st, BG_OK, "%s", err.text);
            cr_assert_gt(n, 20);
            break;
        }
        tried++;
        cr_assert_eq(st, BG_IO, "call %ld: %s", n, err.text);
        cr_assert_eq(err.os, error);
        cr_assert(strstr(err.text, dir), "%s", err.text);
        finish_and_check(j, "after failed call", n);
    }
    free_snapshot(&s);
}

Test(crash, each_call_fails)
{
    for (int i = 0; i < N_SHAPES; i++) {
        each_call_fails(shapes[i], false);
        each_call_fails(shapes[i], true);
    }
    each_call_fails((job){.format = BG_OUT_LZ4, .stop = 20, .overwrite = true}, true);
    each_call_fails((job){.errors = ERRORS_PLAIN, .stop = 20, .overwrite = true}, false);
    report("each call fails");
}

static bg_status run_on_disk(job *j, disk *d, long fail_at, size_t piece, bg_error *err)
{
    const bg_out_sys *sys = disk_begin(d, fail_at);
    d->piece = piece;
    d->dead = true;
    bg_status st = run_job(j, sys, err);
    end_job(j);
    return st;
}

/* What was committed is there. */
static void expect_durable(job j, const char *what, long n)
{
    bg_error err = {0};
    int durable = j.durable;
    j.stop = 1;
    j.retry = false;
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s %ld: %s", what, n, err.text);
    end_job(&j);
    cr_assert_geq(j.rec.n_records, durable, "%s %ld: %d records of %d", what, n,
                  (int)j.rec.n_records, durable);
}

/* The power goes before each call, and what was not synced is kept, lost, torn or out of order.
 * What a commit has reported is there in every case. */
static void power_loss(job shape, size_t piece)
{
    static disk d;
    snapshot s = beginning(&shape, false);
    for (int f = 0; f <= N_FATES; f++) { /* the last is FATE_MIXED */
        bool over = false;
        for (long n = 0; !over; n++) {
            job j = shape;
            bg_error err = {0};
            fate now = f == N_FATES ? FATE_MIXED : (fate)f, then = (fate)((f + (int)n) % N_FATES);
            put_snapshot(&s);
            j.partials = f % 2;
            (void)run_on_disk(&j, &d, n, piece, &err);
            over = d.calls <= n;
            disk_crash(&d, now, (uint64_t)n);
            disk_end(&d);
            /* The second run is interrupted as well, somewhere in its beginning. */
            bg_error err2 = {0};
            int durable = j.durable;
            bg_status st = run_on_disk(&j, &d, n % 13, piece, &err2);
            cr_assert(!st || st == BG_IO, "fate %d, call %ld: %s", f, n, err2.text);
            if (!st) cr_assert_geq(j.rec.n_records, durable);
            disk_crash(&d, then, (uint64_t)n);
            disk_end(&d);
            tried += 2;
            snapshot after = take_snapshot();
            expect_durable(j, "after power loss", n);
            put_snapshot(&after);
            finish_and_check(j, "after power loss", n);
            free_snapshot(&after);
        }
    }
    free_snapshot(&s);
}

Test(crash, power_loss)
{
    for (int i = 0; i < N_SHAPES; i++)
        power_loss(shapes[i], 0);
    report("power loss");
}

Test(crash, power_loss_between_short_writes)
{
    power_loss(shapes[0], 100);
    power_loss(shapes[9], 300);
    report("power loss between short writes");
}

/* A run is killed at each call, which loses nothing yet; the power goes in the beginning of the
 * next one, with what both had not synced. */
static void killed_then_power_loss(job shape)
{
    static disk d;
    snapshot s = beginning(&shape, false);
    for (int f = 0; f < 2; f++) {
        bool over = false;
        for (long n = 0; !over; n++) {
            for (long m = 0; m < 10 && !over; m++) {
                job j = shape;
                bg_error err = {0}, err2 = {0};
                put_snapshot(&s);
                (void)run_on_disk(&j, &d, n, 0, &err);
                over = d.calls <= n;
                d.fail_at = d.calls + m;
                bg_status st = run_job(&j, &d.sys, &err2);
                end_job(&j);
                cr_assert(!st || st == BG_IO, "call %ld and %ld: %s", n, m, err2.text);
                disk_crash(&d, f ? FATE_LATE : FATE_DROP, 0);
                disk_end(&d);
                tried += 2;
                expect_durable(j, "after a kill and power loss", n);
            }
        }
    }
    free_snapshot(&s);
}

Test(crash, killed_then_power_loss)
{
    killed_then_power_loss(shapes[0]);
    killed_then_power_loss(shapes[8]);
    report("killed, then power loss");
}

/* Runs of random jobs, again and again cut off at a random call with random losses. */
Test(crash, random_rounds)
{
    static disk d;
    const char *text = getenv("BATCHGEN_CRASH_ROUNDS"), *seed_text = getenv("BATCHGEN_CRASH_SEED");
    long rounds = text ? atol(text) : 150;
    uint64_t first = seed_text ? strtoull(seed_text, NULL, 10) : 1;
    for (uint64_t seed = first; seed < first + (uint64_t)rounds; seed++) {
        uint32_t w = bg_sample_word(seed, 0, 0), v = bg_sample_word(seed, 0, 1);
        job j = {.format = w & 1 ? BG_OUT_PLAIN : BG_OUT_LZ4,
                 .errors = (int)(w >> 1) % 3,
                 .ordered = w & 16,
                 .fold_bytes = w & 32   ? 1
                               : w & 64 ? 500
                                        : 0,
                 .partials = w & 128,
                 .n = 9 + (int)(v % 60),
                 .every = 1 + (int)(v >> 8) % 12};
        if (j.n % 7 == 0) j.n++;
        remove_files();
        for (uint64_t run = 0; run < 2 + (v >> 16) % 5; run++) {
            uint32_t u = bg_sample_word(seed, run + 1, 0);
            bg_error err = {0};
            int durable = j.durable;
            j.retry = u & 1;
            bg_status st = run_on_disk(&j, &d, (long)((u >> 1) % (u & 0x10000 ? 20 : 150)),
                                       u & 0x20000 ? 0 : 50 + (u >> 20), &err);
            cr_assert(!st || st == BG_IO, "seed %d, run %d: %s", (int)seed, (int)run, err.text);
            if (st && (u & 0x40000)) { /* it was killed, and the power goes in the next one */
                err = (bg_error){0};
                durable = j.durable;
                d.fail_at = d.calls + (long)(u >> 19) % 60;
                st = run_job(&j, &d.sys, &err);
                end_job(&j);
                cr_assert(!st || st == BG_IO, "seed %d, run %d: %s", (int)seed, (int)run, err.text);
                tried++;
            }
            if (!st) cr_assert_geq(j.rec.n_records, durable, "seed %d", (int)seed);
            disk_crash(&d, FATE_MIXED, seed * 100 + run);
            disk_end(&d);
            tried++;
            snapshot after = take_snapshot();
            expect_durable(j, "seed", (long)seed);
            put_snapshot(&after);
            free_snapshot(&after);
        }
        finish_and_check(j, "seed", (long)seed);
    }
    report("random rounds");
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

/* Commits with bytes whose entries end behind byte `cut` of the journal. */
static int n_commits_behind(const torn *t, size_t cut)
{
    int n = 0;
    for (const char *p = t->journal.data, *lf; (lf = strchr(p, '\n')) != NULL; p = lf + 1)
        n += (size_t)(lf + 1 - t->journal.data) > cut && strncmp(p, "{\"commit\"", 9) == 0 &&
             strstr(p, "\"bytes\":0,") != strstr(p, "\"bytes\"");
    return n;
}

static void cut_everywhere(bg_out_format format)
{
    torn t = torn_begin(format, ERRORS_NONE);
    for (size_t cut = 0; cut < t.out.n; cut++) {
        store(out_path, t.out.data, cut);
        store(journal_path, t.journal.data, t.journal.n);
        if (cut == 0) { /* somebody has taken it away: nothing is silently begun again */
            bg_error err = {0};
            job j = t.j;
            cr_assert_eq(run_job(&j, &quick, &err), BG_FORMAT, "%s", err.text);
            continue;
        }
        finish_and_check(t.j, "output cut at", (long)cut);
    }
    for (size_t cut = 0; cut < t.journal.n; cut++) {
        store(out_path, t.out.data, t.out.n);
        store(journal_path, t.journal.data, cut);
        /* Of LZ4 commits no crash takes more than one entry back; then the journal is an older
         * one, and what it does not know must not be cut. */
        bool older = format == BG_OUT_LZ4 && n_commits_behind(&t, cut) > 1;
        if (cut >= t.first_entry && !older) {
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
    if (!st) st = bg_writer_begin(w, err);
    bg_writer_close(w);
    json_decref(identity);
    return st;
}

/* A changed byte in a committed result is damage, and nothing is cut: it was on disk before its
 * entry. In the journal's last entry it is a torn tail. */
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
        cr_expect(n_refused[0] == (int)t.out.n && n_cut[0] == 0);
        cr_expect(n_refused[1] > 20 && n_cut[1] > 20);
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
