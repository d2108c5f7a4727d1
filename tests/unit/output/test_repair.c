#include "base/hash.h"
#include "base/rng.h"
#include "output/frames.h"
#include "output/journal.h"
#include "output/repair.h"
#include "output/view.h"
#include "unit/output/made.h"

TestSuite(repair, .init = set_up, .fini = tear_down);

enum { N = 40, EVERY = 4 };

/* What is there now: journal and bytes fit, every line is the one it must be, none twice. Its
 * records into `got` (may be NULL); how many. */
static int64_t expect_sound(bg_ranges *got, bool known)
{
    bg_view v;
    bg_error err = {0};
    bg_reader_config c;
    bg_reader_commit *commits;
    bg_reader *r;
    cr_assert_eq(bg_view_open(&v, out_path, true, &err), BG_OK, "%s", err.text);
    cr_assert_eq(v.journal, BG_VIEW_GOOD, "%s", v.why.text);
    cr_assert_eq(bg_view_identity(&v) != NULL, known);
    cr_assert_eq(json_integer_value(json_object_get(v.first, "started")), known ? 1000 : 0);
    cr_assert_eq(v.out_size, v.out_end);
    cr_assert(bg_view_reader(&v, &c, &commits));
    cr_assert_eq(bg_reader_open(&r, &c, &err), BG_OK);
    bg_ranges *seen = bg_ranges_new();
    int64_t n = 0, failed = 0, tokens = 0;
    uint64_t text = 0;
    for (;; n++) {
        bg_out_line line;
        bool more;
        cr_assert_eq(bg_reader_next(r, &line, &more, &err), BG_OK, "%s", err.text);
        if (!more) break;
        bg_buf want = {0};
        put_result(&want, (int)line.record);
        cr_assert(line.n == want.len && memcmp(line.text, want.data, want.len) == 0, "%.*s",
                  (int)line.n, line.text);
        cr_assert_not(bg_ranges_has(seen, line.record), "record %ld twice", (long)line.record);
        bg_ranges_add(seen, line.record, line.record);
        cr_assert(bg_ranges_has(v.done, line.record));
        uint64_t key = bg_keys_get(v.keys, line.record), want_key = key_of((int)line.record);
        cr_assert_eq(key, known ? want_key : want_key >> 32 << 32, "record %ld: %lx",
                     (long)line.record, (unsigned long)key);
        failed += line.failed;
        tokens += line.output_tokens;
        text += line.n;
        if (got) bg_ranges_add(got, line.record, line.record);
        bg_buf_release(&want);
    }
    cr_assert_eq(bg_ranges_count(v.done), n);
    cr_assert_eq(v.n_failed, failed);
    cr_assert_eq(v.n_commits, 1);
    cr_assert_eq(v.commits[0].output_tokens, tokens);
    cr_assert_eq(v.text_bytes, text);
    bg_reader_close(r);
    free(commits);
    bg_ranges_free(seen);
    bg_view_release(&v);
    return n;
}

static bg_status repair(bg_repaired *r, bg_error *err)
{
    *err = (bg_error){0};
    return bg_repair(out_path, NULL, r, err);
}

Test(repair, a_good_one_is_left_alone)
{
    plan p = {.n = N, .every = EVERY};
    make_output(out_path, &p);
    bytes journal = load(name_in(".journal")), after;
    bg_repaired r;
    bg_error err;
    cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
    cr_expect(r.good && r.n_records == N && r.n_failed == N / 5);
    after = load(name_in(".journal"));
    cr_expect(after.n == journal.n && memcmp(after.data, journal.data, after.n) == 0);
    cr_expect_neq(access(name_in(".journal.bad"), F_OK), 0);
    free(journal.data);
    free(after.data);
    bg_repaired_release(&r);
}

/* The journal is lost, and the output torn at every length: what is whole comes back. */
Test(repair, lost_journal_and_every_tail)
{
    for (int f = 0; f < 2; f++) {
        plan p = {.n = 12, .every = 3, .format = f, .unfinished = true};
        make_output(out_path, &p);
        bytes out = load(out_path);
        uint64_t before = 0;
        for (size_t cut = 0; cut <= out.n; cut++) {
            bg_repaired r;
            bg_error err;
            store(out_path, out.data, cut);
            unlink(name_in(".journal"));
            bg_status st = repair(&r, &err);
            if (st) { /* not even the first one is there */
                cr_assert(st == BG_FORMAT && before == 0, "cut at %zu: %s", cut, err.text);
                bytes same = load(out_path);
                cr_assert_eq(same.n, cut);
                free(same.data);
                continue;
            }
            uint64_t n = (uint64_t)expect_sound(NULL, false);
            cr_assert(n >= before && n == (uint64_t)r.n_records);
            cr_assert_not(r.good || r.known || r.damaged_bytes || r.n_lost);
            before = n;
            bytes now = load(out_path);
            cr_assert_eq(now.n + r.cut_bytes, cut);
            free(now.data);
            bg_repaired_release(&r);
        }
        cr_expect_eq(before, 12);
        free(out.data);
        unlink(out_path);
        unlink(name_in(".journal"));
    }
}

/* A byte of an LZ4 output flipped: without the journal and with it. Only the frame it is in is
 * lost, the damage is kept in a file, and the old journal tells which records are gone. */
Test(repair, damage_anywhere)
{
    plan p = {.n = N, .every = EVERY, .unfinished = true};
    make_output(out_path, &p);
    bytes out = load(out_path), journal = load(name_in(".journal"));
    bg_view v;
    bg_error err = {0};
    cr_assert_eq(bg_view_open(&v, out_path, false, &err), BG_OK);
    cr_assert_eq(v.n_commits, N / EVERY);
    for (size_t at = 0; at < out.n; at += 3) {
        bool with = at % 2 == 0;
        bg_repaired r;
        size_t k = 0;
        while (v.commits[k].out.offset + v.commits[k].out.bytes <= at)
            k++;
        bool last = k == v.n_commits - 1;
        out.data[at] ^= 0x20;
        store(out_path, out.data, out.n);
        out.data[at] ^= 0x20;
        unlink(name_in(".journal"));
        unlink(name_in(".damaged"));
        if (with) store(name_in(".journal"), journal.data, journal.n);
        cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
        bg_ranges *got = bg_ranges_new();
        cr_assert_eq(expect_sound(got, with), N - EVERY, "byte %zu", at);
        for (int64_t i = 0; i < N; i++)
            cr_assert_eq(bg_ranges_has(got, i), (size_t)i / EVERY != k);
        uint64_t bytes_lost = v.commits[k].out.bytes;
        cr_assert_eq(last ? r.cut_bytes : r.damaged_bytes, bytes_lost);
        cr_assert_eq(r.n_lost, with ? EVERY : 0);
        if (with) {
            bg_buf want = {0};
            bg_buf_printf(&want, "%zu-%zu", k * EVERY, k * EVERY + EVERY - 1);
            cr_assert_str_eq(r.lost.data, want.data);
            bg_buf_release(&want);
            bytes bad = load(r.bad_path.data);
            cr_assert(bad.n == journal.n && memcmp(bad.data, journal.data, bad.n) == 0);
            free(bad.data);
            unlink(r.bad_path.data);
        }
        if (!last) {
            bytes damaged = load(name_in(".damaged"));
            cr_assert_eq(damaged.n, bytes_lost);
            free(damaged.data);
        }
        bg_ranges_free(got);
        bg_repaired_release(&r);
        bg_repaired again; /* and what was repaired is good */
        cr_assert_eq(repair(&again, &err), BG_OK, "%s", err.text);
        cr_assert(again.good);
        bg_repaired_release(&again);
    }
    bg_view_release(&v);
    free(out.data);
    free(journal.data);
}

/* Plain text: the old journal's hashes say which lines are not to be believed. */
Test(repair, plain_text_by_the_journals_hashes)
{
    plan p = {.n = N, .every = EVERY, .unfinished = true, .format = BG_OUT_PLAIN};
    make_output(out_path, &p);
    bytes out = load(out_path), journal = load(name_in(".journal"));
    char *text = memmem(out.data, out.n, "abcdefgh", 8);
    cr_assert(text);
    bg_repaired r;
    bg_error err;
    *text = 'X'; /* still JSON */
    store(out_path, out.data, out.n);
    cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
    cr_expect_eq(r.n_lost, EVERY);
    cr_expect_not(r.unverified);
    cr_expect_eq(expect_sound(NULL, true), N - EVERY);
    bg_repaired_release(&r);
    *text = 'a';
    char *middle = memchr(out.data + out.n / 2, '\n', out.n / 2);
    middle[2] = 'x'; /* no JSON, and no journal: one line is lost */
    store(out_path, out.data, out.n);
    unlink(name_in(".journal"));
    unlink(name_in(".damaged"));
    cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
    cr_expect(r.unverified && r.n_damaged == 1);
    cr_expect_eq(expect_sound(NULL, false), N - 1);
    bg_repaired_release(&r);
    free(out.data);
    free(journal.data);
}

/* A journal damaged at each of its bytes: nothing of the output is lost. */
Test(repair, damaged_journal)
{
    plan p = {.n = 12, .every = 3};
    make_output(out_path, &p);
    bytes out = load(out_path), journal = load(name_in(".journal"));
    for (size_t at = 0; at < journal.n; at += 2) {
        bg_repaired r;
        bg_error err;
        journal.data[at] ^= 0x11;
        store(name_in(".journal"), journal.data, journal.n);
        journal.data[at] ^= 0x11;
        bg_status st = repair(&r, &err);
        cr_assert_eq(st, BG_OK, "byte %zu: %s", at, err.text);
        cr_assert_eq(r.n_records, 12);
        cr_assert_eq(r.n_lost, 0);
        bytes now = load(out_path);
        cr_assert(now.n == out.n && memcmp(now.data, out.data, now.n) == 0);
        if (!r.good) expect_sound(NULL, r.known);
        if (r.bad_path.len) unlink(r.bad_path.data);
        free(now.data);
        bg_repaired_release(&r);
    }
    free(out.data);
    free(journal.data);
}

Test(repair, twice_the_same_and_twice_another)
{
    for (int f = 0; f < 2; f++) {
        plan p = {.n = 12, .every = 3, .format = f};
        make_output(out_path, &p);
        bytes out = load(out_path);
        bg_buf two = {0};
        bg_repaired r;
        bg_error err = {0};
        bg_buf_add(&two, out.data, out.n);
        bg_buf extra = {0};
        put_result(&extra, 5); /* there already */
        put_result(&extra, 12);
        put_result(&extra, 5);
        if (f == BG_OUT_LZ4)
            bg_frame_put(&two, extra.data, extra.len, 0, &err);
        else
            bg_buf_add(&two, extra.data, extra.len);
        bg_buf_add(&two, out.data, out.n); /* all of it again */
        store(out_path, two.data, two.len);
        unlink(name_in(".journal"));
        cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
        cr_expect_eq(r.n_duplicates, 14);
        cr_expect_eq(expect_sound(NULL, false), 13);
        bg_repaired_release(&r);
        static const char other[] = "{\"line\":4,\"id\":\"id3\",\"text\":\"another\"}\n";
        two.len = out.n;
        if (f == BG_OUT_LZ4)
            bg_frame_put(&two, other, sizeof other - 1, 0, &err);
        else
            bg_buf_add(&two, other, sizeof other - 1);
        store(out_path, two.data, two.len);
        unlink(name_in(".journal"));
        cr_expect_eq(repair(&r, &err), BG_FORMAT);
        cr_expect(strstr(err.text, "record 3") && strstr(err.text, "two different"), "%s",
                  err.text);
        bytes same = load(out_path);
        cr_expect(same.n == two.len && access(name_in(".journal"), F_OK) != 0);
        free(same.data);
        bg_buf_release(&extra);
        bg_buf_release(&two);
        free(out.data);
        unlink(out_path);
    }
}

/* A folded journal has one hash for all, which damage anywhere makes wrong: the keys show that it
 * is this output's. */
Test(repair, damage_under_a_folded_journal)
{
    plan p = {.n = N, .every = EVERY};
    make_output(out_path, &p);
    bytes out = load(out_path);
    out.data[out.n / 2] ^= 1;
    store(out_path, out.data, out.n);
    bg_repaired r;
    bg_error err;
    cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
    cr_expect(r.known && r.n_lost == EVERY && r.n_damaged == 1);
    cr_expect_eq(expect_sound(NULL, true), N - EVERY);
    bg_repaired_release(&r);
    free(out.data);
}

/* The journal's entries, each sealed again after a change. */
static void change_journal(void (*change)(char *entry))
{
    bytes journal = load(name_in(".journal"));
    bg_buf sealed = {0};
    char *end = journal.data + journal.n;
    for (char *s = journal.data, *lf; (lf = memchr(s, '\n', (size_t)(end - s))); s = lf + 1) {
        size_t start = sealed.len;
        bg_buf_add(&sealed, s, (size_t)(lf - s) - 17);
        change(sealed.data + start);
        bg_journal_seal(&sealed, start);
    }
    store(name_in(".journal"), sealed.data, sealed.len);
    bg_buf_release(&sealed);
    free(journal.data);
}

static void change_at(char *entry, const char *name)
{
    char *p = strstr(entry, name);
    if (p) p[strlen(name)] = p[strlen(name)] == '0' ? '1' : '0';
}

static void change_keys(char *entry)
{
    change_at(entry, "\"keys\":\"");
}

static void change_hash_and_keys(char *entry)
{
    change_at(entry, "\"hash\":\"");
    change_keys(entry);
}

static void change_nothing(char *entry)
{
    (void)entry;
}

static void change_records(char *entry) /* one that fits no more */
{
    change_at(entry, "\"records\":\"3");
}

/* A journal of other bytes or of other ids is another job's. */
Test(repair, a_foreign_journal)
{
    static void (*const changes[])(char *) = {change_nothing, change_hash_and_keys, change_keys};
    for (size_t i = 0; i < 3; i++) {
        plan p = {.n = N, .every = EVERY, .unfinished = true};
        make_output(out_path, &p);
        change_journal(changes[i]);
        change_journal(change_records); /* so that there is something to repair */
        bg_repaired r;
        bg_error err;
        cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
        cr_expect_eq(r.known, i == 0, "%zu", i);
        cr_expect_eq(r.n_lost, 0);
        if (i) cr_expect_eq(expect_sound(NULL, false), N);
        bg_repaired_release(&r);
        unlink(out_path);
        unlink(name_in(".journal"));
    }
}

/* An older copy of the journal: what it does not know is kept. */
Test(repair, an_older_journal)
{
    plan p = {.n = N, .every = EVERY, .unfinished = true};
    make_output(out_path, &p);
    bytes journal = load(name_in(".journal"));
    bg_repaired r;
    bg_error err;
    size_t lines = 0, cut = 0;
    for (size_t i = 0; i < journal.n && lines < 6; i++)
        if (journal.data[i] == '\n') {
            lines++;
            cut = i + 1;
        }
    store(name_in(".journal"), journal.data, cut); /* identity, run, and 4 commits */
    cr_assert_eq(repair(&r, &err), BG_OK, "%s", err.text);
    cr_expect(!r.good && r.known && r.n_records == N && r.n_lost == 0 && r.cut_bytes == 0);
    bg_view v;
    cr_assert_eq(bg_view_open(&v, out_path, true, &err), BG_OK);
    for (int i = 0; i < N; i++) { /* the keys that it has, and the ids of the others */
        uint64_t want = i < 4 * EVERY ? key_of(i) : key_of(i) >> 32 << 32;
        cr_expect_eq(bg_keys_get(v.keys, i), want, "record %d", i);
    }
    bg_view_release(&v);
    bg_repaired_release(&r);
    free(journal.data);
}

Test(repair, refuses_what_is_none_of_ours)
{
    static const char *const texts[] = {"hello\n", "{\"prompt\":\"x\"}\n{\"prompt\":\"y\"}\n", "",
                                        "\x04\x22\x4d\x18"};
    bg_repaired r;
    bg_error err = {0};
    for (size_t i = 0; i < 4; i++) {
        store(out_path, texts[i], strlen(texts[i]));
        cr_expect_eq(repair(&r, &err), BG_FORMAT, "%zu", i);
        bytes same = load(out_path);
        cr_expect_eq(same.n, strlen(texts[i]));
        cr_expect_neq(access(name_in(".journal"), F_OK), 0);
        free(same.data);
    }
    bg_buf b = {0}; /* a whole frame of other lines */
    bg_frame_put(&b, "{\"prompt\":1}\n", 13, 0, &err);
    store(out_path, b.data, b.len);
    cr_expect_eq(repair(&r, &err), BG_FORMAT);
    unlink(out_path);
    cr_expect_eq(repair(&r, &err), BG_IO);
    cr_expect_neq(access(out_path, F_OK), 0, "made a file");
    bg_buf_release(&b);
}

Test(repair, held_by_a_run)
{
    plan p = {.n = 6, .every = 2, .unfinished = true};
    bg_writer *w;
    bg_recovered rec;
    bg_repaired r;
    bg_error err = {0};
    cr_assert_eq(open_made(&w, out_path, &p, &rec, &err), BG_OK);
    cr_expect_eq(repair(&r, &err), BG_BUSY);
    bg_writer_close(w);
}

/* An error file: named by the old journal, or given when that is lost. */
Test(repair, error_file)
{
    for (int f = 0; f < 2; f++) {
        plan p = {.n = N, .every = EVERY, .errors = true, .format = f, .unfinished = true};
        make_output(out_path, &p);
        bg_repaired r;
        bg_error err = {0};
        char errors[96];
        snprintf(errors, sizeof errors, "%s", name_in(".errors"));
        bytes e = load(errors);
        cr_expect_gt(e.n, 0);
        cr_assert_eq(bg_repair(out_path, NULL, &r, &err), BG_OK, "%s", err.text);
        cr_expect(r.good && r.n_records == N); /* the journal names it */
        bg_repaired_release(&r);
        unlink(name_in(".journal"));
        cr_assert_eq(bg_repair(out_path, errors, &r, &err), BG_OK, "%s", err.text);
        cr_expect(r.n_records == N && r.n_failed == N / 5);
        bg_view v;
        cr_assert_eq(bg_view_open(&v, out_path, true, &err), BG_OK);
        cr_expect(v.errors_end == e.n && v.commits[0].errors.bytes == e.n);
        cr_expect_eq(v.text_bytes + e.n > v.out_end || f == BG_OUT_PLAIN, true);
        bg_view_release(&v);
        bg_repaired_release(&r);
        cr_assert_eq(bg_repair(out_path, errors, &r, &err), BG_OK, "%s", err.text);
        cr_expect(r.good);
        unlink(out_path);
        unlink(errors);
        unlink(name_in(".journal"));
        free(e.data);
    }
}

/* Any bytes changed, cut out, doubled: repair says no, or what it leaves is sound, and it is sound
 * again when it is asked once more. */
Test(repair, wild)
{
    plan p = {.n = 24, .every = 3};
    make_output(out_path, &p);
    bytes out = load(out_path), journal = load(name_in(".journal"));
    int repaired = 0;
    for (uint32_t seed = 0; seed < 300; seed++) {
        bg_buf b = {0};
        bg_repaired r;
        bg_error err;
        bg_buf_add(&b, out.data, out.n);
        for (uint32_t k = 0; k < 1 + seed % 3; k++) {
            bg_philox x = bg_philox4x32(seed, k, 0);
            size_t at = x.v[0] % b.len, n = 1 + x.v[1] % 200;
            if (n > b.len - at) n = b.len - at;
            if (x.v[2] % 3 == 0)
                memset(b.data + at, (int)x.v[3], n);
            else if (x.v[2] % 3 == 1) {
                memmove(b.data + at, b.data + at + n, b.len - at - n);
                b.len -= n;
            } else {
                bg_buf_add(&b, out.data + at % out.n, n < out.n - at % out.n ? n : 0);
            }
            if (!b.len) bg_buf_char(&b, 0);
        }
        store(out_path, b.data, b.len);
        unlink(name_in(".journal"));
        if (seed % 2) store(name_in(".journal"), journal.data, journal.n);
        if (!repair(&r, &err)) {
            if (!r.good) expect_sound(NULL, r.known);
            if (r.bad_path.len) unlink(r.bad_path.data);
            repaired++;
        } else {
            cr_assert_eq(err.status, BG_FORMAT, "%s", err.text);
        }
        bg_repaired_release(&r);
        bg_buf_release(&b);
    }
    cr_expect_gt(repaired, 250);
    free(out.data);
    free(journal.data);
}
