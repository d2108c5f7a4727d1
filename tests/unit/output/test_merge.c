#include "output/merge.h"
#include "output/view.h"
#include "unit/output/made.h"

TestSuite(merge, .init = set_up, .fini = tear_down);

enum { N = 50, SHARDS = 3 };

static char names[SHARDS][80];

static const char *const *make_shards(plan p)
{
    static const char *list[SHARDS];
    p.count = SHARDS;
    for (int i = 0; i < SHARDS; i++) {
        snprintf(names[i], sizeof names[i], "%s/shard%d", dir, i);
        p.index = i;
        make_output(names[i], &p);
        list[i] = names[i];
    }
    return list;
}

static void drop_shards(void)
{
    char command[120];
    snprintf(command, sizeof command, "rm -f %s/*", dir);
    cr_assert_eq(system(command), 0);
}

/* All records in order, with the keys that the shards had, and an identity of no shard. */
static void expect_merged(void)
{
    bg_view v;
    bg_error err = {0};
    bg_reader_config c;
    bg_reader_commit *commits;
    bg_reader *r;
    cr_assert_eq(bg_view_open(&v, out_path, true, &err), BG_OK, "%s", err.text);
    cr_assert(v.journal == BG_VIEW_GOOD && v.end, "%s", v.why.text);
    cr_expect_str_eq(json_string_value(json_object_get(bg_view_identity(&v), "shard")), "");
    cr_expect_not(bg_view_has_errors(&v));
    cr_expect_eq(json_integer_value(json_object_get(v.first, "started")), 1000);
    cr_expect(v.has_input && v.input.records == N && v.input.end == N * 10);
    cr_assert(bg_view_reader(&v, &c, &commits));
    cr_assert_eq(bg_reader_open(&r, &c, &err), BG_OK);
    int n = 0;
    for (;; n++) {
        bg_out_line line;
        bool got;
        bg_buf want = {0};
        cr_assert_eq(bg_reader_next(r, &line, &got, &err), BG_OK, "%s", err.text);
        if (!got) break;
        put_result(&want, n);
        cr_assert(line.n == want.len && memcmp(line.text, want.data, line.n) == 0, "%d: %.*s", n,
                  (int)line.n, line.text);
        cr_assert_eq(bg_keys_get(v.keys, n), key_of(n));
        bg_buf_release(&want);
    }
    cr_expect_eq(n, N);
    cr_expect(bg_ranges_count(v.done) == N && v.n_failed == N / 5);
    bg_reader_close(r);
    free(commits);
    bg_view_release(&v);
}

Test(merge, gives_the_whole_job)
{
    for (int f = 0; f < 4; f++) {
        plan p = {.n = N, .every = 4, .format = f & 1, .errors = f & 2};
        const char *const *list = make_shards(p);
        const char *other_way[SHARDS] = {list[2], list[0], list[1]};
        bg_merged m;
        bg_error err = {0};
        cr_assert_eq(bg_merge(other_way, SHARDS, out_path, &m, &err), BG_OK, "%s", err.text);
        cr_expect(m.n_records == N && m.n_failed == N / 5 && m.n_shards == SHARDS);
        cr_expect_eq(m.n_from_errors, p.errors ? N / 5 : 0);
        expect_merged();
        cr_expect_eq(bg_merge(other_way, SHARDS, out_path, &m, &err), BG_ARG);
        drop_shards();
    }
}

static void expect_refused(const char *const *list, int n, bg_status want, const char *text)
{
    bg_merged m;
    bg_error err = {0};
    cr_expect_eq(bg_merge(list, n, out_path, &m, &err), want, "%s", err.text);
    cr_expect(strstr(err.text, text), "%s: %s", text, err.text);
    cr_expect_neq(access(out_path, F_OK), 0);
    cr_expect_neq(access(name_in(".journal"), F_OK), 0);
}

Test(merge, refuses_what_does_not_belong_together)
{
    plan p = {.n = N, .every = 4};
    const char *const *list = make_shards(p);
    const char *twice[] = {list[0], list[1], list[2], list[1]}, *gap[] = {list[0], list[2]};
    expect_refused(twice, 4, BG_ARG, "both shard 2 of 3");
    expect_refused(gap, 2, BG_ARG, "shard 2 of 3 is missing");
    plan q = p;
    q.count = SHARDS;
    q.index = 1;
    q.temperature = 9;
    char other[96];
    snprintf(other, sizeof other, "%s/other", dir);
    make_output(other, &q);
    const char *differs[] = {list[0], other, list[2]};
    expect_refused(differs, 3, BG_ARG, "temperature is 0 and 9");
    for (int i = 0; i < 2; i++) { /* shards whose inputs were read up to the same byte */
        q = (plan){.n = i ? N - 1 : N, .every = 1, .count = 2, .index = 0, .input = i};
        snprintf(other, sizeof other, "%s/input%d", dir, i);
        make_output(other, &q);
    }
    char one[96];
    snprintf(one, sizeof one, "%s/input0", dir);
    const char *inputs[] = {one, other};
    expect_refused(inputs, 2, BG_ARG, "the inputs have other bytes");
    q = (plan){.n = N, .every = 4, .count = SHARDS, .index = 1, .unfinished = true};
    snprintf(other, sizeof other, "%s/half", dir);
    make_output(other, &q);
    const char *half[] = {list[0], other, list[2]};
    expect_refused(half, 3, BG_BUSY, "not finished");
}

/* An error file that is gone, or another one, is no reason to leave its results out. */
Test(merge, error_files_that_do_not_fit)
{
    plan p = {.n = N, .every = 4, .errors = true};
    const char *const *list = make_shards(p);
    char first[96], second[96];
    snprintf(first, sizeof first, "%s.errors", list[0]);
    snprintf(second, sizeof second, "%s.errors", list[1]);
    cr_assert_eq(rename(first, second), 0);
    expect_refused(list, SHARDS, BG_IO, first);
    bytes b = load(second);
    store(first, b.data, b.n);
    expect_refused(list, SHARDS, BG_FORMAT, second);
    free(b.data);
}

/* A shard with a record of another one: its identity lies. */
Test(merge, refuses_records_of_another_shard)
{
    plan p = {.n = N, .every = 4};
    const char *const *list = make_shards(p);
    char liar[96];
    snprintf(liar, sizeof liar, "%s/liar", dir);
    plan q = {.n = N, .every = 4, .count = SHARDS, .index = 1};
    bg_writer *w;
    bg_recovered rec;
    bg_error err = {0};
    cr_assert_eq(open_made(&w, liar, &q, &rec, &err), BG_OK);
    add_made(w, 1);
    add_made(w, 3); /* shard 1's */
    cr_assert_eq(bg_writer_finish(w, &err), BG_OK);
    bg_writer_close(w);
    const char *set[] = {list[0], liar, list[2]};
    expect_refused(set, 3, BG_FORMAT, "record 3, which is not in shard 2/3");
}

/* A shard of which a byte changed, anywhere. */
Test(merge, refuses_damage)
{
    plan p = {.n = 12, .every = 2};
    const char *const *list = make_shards(p);
    bytes b = load(list[1]);
    for (size_t i = 0; i < b.n; i += 7) {
        b.data[i] ^= 2;
        store(list[1], b.data, b.n);
        b.data[i] ^= 2;
        expect_refused(list, 3, BG_FORMAT, list[1]);
    }
    free(b.data);
}
