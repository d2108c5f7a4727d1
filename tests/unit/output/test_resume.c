/* What a journal tells the next run: keys, numbers, whose results they are, and what is wrong with
 * them; and a journal that stays short. */
#include "output/journal.h"
#include "unit/output/job.h"

TestSuite(resume, .init = set_up, .fini = tear_down);

static job leave(job j)
{
    bg_error err = {0};
    j.n = 40;
    if (!j.every) j.every = 4;
    remove_files();
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s", err.text);
    end_job(&j);
    j.stop = 0;
    return j;
}

static bg_status reopen(job *j, bg_writer_config *change, bg_error *err)
{
    json_t *identity = identity_of();
    bg_writer_config c = change ? *change : config_of(j, identity);
    if (!c.identity) c.identity = identity;
    *err = (bg_error){0};
    bg_status st = bg_writer_open_on(&j->w, &c, &quick, &j->rec, err);
    if (!st) st = bg_writer_begin(j->w, err);
    if (st) end_job(j);
    json_decref(identity);
    return st;
}

/* The object of the i-th entry of that name, of the last one for -1. */
static json_t *entry(const char *name, int want)
{
    bytes b = load(journal_path);
    json_t *found = NULL;
    for (char *p = b.data, *lf; p && (lf = strchr(p, '\n')); p = lf + 1) {
        json_t *v = json_loadb(p, (size_t)(lf - 17 - p), 0, NULL);
        if (json_object_get(v, name) && want-- <= 0) {
            json_decref(found);
            found = json_incref(json_object_get(v, name));
            json_decref(v);
            if (want == -1) break;
            continue;
        }
        json_decref(v);
    }
    free(b.data);
    return found;
}

/* Takes a member out of every entry of a kind, as if an older program had written it. */
static void without(const char *kind, const char *const *names)
{
    bytes b = load(journal_path);
    bg_buf out = {0};
    for (char *p = b.data, *lf; p && (lf = strchr(p, '\n')); p = lf + 1) {
        json_t *v = json_loadb(p, (size_t)(lf - 17 - p), 0, NULL);
        for (int i = 0; names[i]; i++)
            json_object_del(json_object_get(v, kind), names[i]);
        char *text = json_dumps(v, JSON_COMPACT);
        size_t start = out.len;
        bg_buf_str(&out, text);
        bg_journal_seal(&out, start);
        free(text);
        json_decref(v);
    }
    store(journal_path, out.data, out.len);
    bg_buf_release(&out);
    free(b.data);
}

Test(resume, keys_and_numbers)
{
    job j = leave((job){.format = BG_OUT_LZ4, .stop = 30, .errors = ERRORS_PLAIN});
    json_t *c = entry("commit", 0);
    /* records 0, 7, 14 and 21; two of them have no key in this job */
    cr_expect_str_eq(json_string_value(json_object_get(c, "records")), "0,7,14,21");
    char want[65];
    int64_t tokens = 0;
    for (int i = 0; i < 4; i++) {
        snprintf(want + (size_t)i * 16, 17, "%016llx", (unsigned long long)key_for(7 * i));
        tokens += done_for(7 * i).prompt_tokens;
    }
    cr_expect_str_eq(json_string_value(json_object_get(c, "keys")), want);
    json_t *t = json_object_get(c, "tokens");
    cr_expect_eq(json_integer_value(json_array_get(t, 0)), tokens);
    cr_expect_eq(json_integer_value(json_array_get(t, 1)), 2 * tokens);
    cr_expect_eq(strlen(json_string_value(json_object_get(c, "at"))), 24);
    json_decref(c);
    bg_error err;
    cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
    for (int r = 0; r < 40; r++)
        cr_expect_eq(bg_writer_key(j.w, r), bg_writer_done(j.w, r) ? key_for(r) : 0, "%d", r);
    const bg_input_place place = {.end = 10, .hash = 5, .read = 6, .total = 7, .records = 3};
    bg_writer_input(j.w, &place);
    const bg_done d = {.record = 100, .key = 1, .prompt_tokens = 3, .output_tokens = 4};
    cr_expect_eq(bg_writer_add(j.w, &d, "{\"line\":101}\n", 13, &err), BG_OK);
    cr_expect_eq(bg_writer_commit(j.w, &err), BG_OK);
    end_job(&j);
    c = entry("commit", -1);
    char *text = json_dumps(json_object_get(c, "input"), JSON_COMPACT);
    cr_expect_str_eq(
        text, "{\"end\":10,\"hash\":\"0000000000000005\",\"read\":6,\"total\":7,\"records\":3}");
    free(text);
    json_decref(c);
}

Test(resume, of_an_older_journal)
{
    static const char *const newer[] = {"keys", "tokens", "at", NULL};
    job j = leave((job){.format = BG_OUT_PLAIN, .stop = 30, .partials = true});
    without("commit", newer);
    bg_error err;
    cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.n_records == 28 && j.rec.n_partials > 0 && j.rec.input_end > 0);
    cr_expect_eq(bg_writer_key(j.w, 7), 0);
    bg_buf line = {0};
    for (int r = 0; r < 40; r++) {
        if (bg_writer_done(j.w, r)) continue;
        const bg_done d = done_for(r);
        line_for(r, &line);
        cr_assert_eq(bg_writer_add(j.w, &d, line.data, line.len, &err), BG_OK);
    }
    cr_assert_eq(bg_writer_finish(j.w, &err), BG_OK, "%s", err.text);
    end_job(&j);
    expect_complete(&j, "older", 0);
    bg_buf_release(&line);
}

Test(resume, wrong_keys_and_tokens)
{
    static const struct {
        const char *name;
        const char *json, *says;
    } list[] = {{"keys", "\"0123\"", "keys are malformed"},
                {"keys", "\"x123456789abcdef\"", "keys are malformed"},
                {"keys", "5", "contradicts"},
                {"tokens", "[1]", "numbers of tokens are malformed"},
                {"tokens", "[1,-2]", "numbers of tokens are malformed"},
                {"folded", "true", "contradicts"},
                {"errors", "{\"offset\":0}", "contradicts"},
                {"errors", "{\"offset\":5,\"bytes\":0,\"text\":0,\"hash\":\"0000000000000000\"}",
                 "contradicts"}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        job j = leave((job){.format = BG_OUT_PLAIN, .stop = 30});
        bytes b = load(journal_path);
        bg_buf out = {0};
        int n = 0;
        for (char *p = b.data, *lf; (lf = strchr(p, '\n')); p = lf + 1) {
            json_t *v = json_loadb(p, (size_t)(lf - 17 - p), 0, NULL);
            json_t *c = json_object_get(v, "commit");
            if (c && n++ == 2)
                json_object_set_new(c, list[i].name,
                                    json_loads(list[i].json, JSON_DECODE_ANY, NULL));
            char *text = json_dumps(v, JSON_COMPACT);
            size_t start = out.len;
            bg_buf_str(&out, text);
            bg_journal_seal(&out, start);
            free(text);
            json_decref(v);
        }
        store(journal_path, out.data, out.len);
        bytes results = load(out_path);
        bg_error err;
        cr_expect_eq(reopen(&j, NULL, &err), BG_FORMAT, "%zu", i);
        cr_expect(strstr(err.text, list[i].says) && strstr(err.text, journal_path), "%s", err.text);
        bytes results2 = load(out_path), b2 = load(journal_path);
        cr_expect(same(results, results2) && b2.n == out.len);
        free(results.data);
        free(results2.data);
        free(b.data);
        free(b2.data);
        bg_buf_release(&out);
    }
}

/* ---- whose results they are
 * ------------------------------------------------------------------------------------- */

Test(resume, another_selection_is_unfinished)
{
    job j = leave((job){.format = BG_OUT_LZ4, .errors = ERRORS_LZ4});
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_error err;
    static const struct {
        const char *selection;
        bool finished;
    } steps[] = {{"", true},   {"limit 5", false}, {NULL, false},
                 {NULL, true}, {"a", false},       {"a", true}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        c.selection = steps[i].selection;
        cr_assert_eq(reopen(&j, &c, &err), BG_OK, "%s", err.text);
        cr_expect(j.rec.finished == steps[i].finished && j.rec.n_records == 40, "%zu", i);
        cr_expect_eq(j.rec.resumed, !steps[i].finished);
        cr_assert_eq(bg_writer_finish(j.w, &err), BG_OK, "%s", err.text);
        end_job(&j);
        json_t *end = entry("end", 0);
        const char *said = json_string_value(json_object_get(end, "selection"));
        cr_expect_str_eq(said ? said : "", c.selection ? c.selection : "");
        cr_expect_eq(json_integer_value(json_object_get(end, "records")), 40);
        cr_expect_not_null(json_object_get(end, "errors"));
        json_decref(end);
    }
    json_decref(identity);
    expect_complete(&j, "selections", 0);
}

/* repair writes an identity of null: it is taken for the job's when it is told so. */
Test(resume, rebuilt_journal_is_adopted)
{
    job j = leave((job){.format = BG_OUT_LZ4, .stop = 30});
    bytes b = load(journal_path);
    char *lf = strchr(b.data, '\n');
    bg_buf out = {0};
    bg_buf_str(&out, "{\"batchgen\":1,\"format\":\"lz4\",\"identity\":null}");
    bg_journal_seal(&out, 0);
    bg_buf_add(&out, lf + 1, b.n - (size_t)(lf + 1 - b.data));
    store(journal_path, out.data, out.len);
    bg_error err;
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
        cr_expect(j.rec.adopted && j.rec.resumed && j.rec.n_records == 28 && !j.rec.differs);
        end_job(&j);
    }
    cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
    const bg_rewrite how = {0};
    int64_t kept, dropped;
    cr_assert_eq(bg_writer_rewrite(j.w, &how, &kept, &dropped, &err), BG_OK, "%s", err.text);
    end_job(&j);
    cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
    cr_expect(!j.rec.adopted && j.rec.n_records == 28);
    end_job(&j);
    json_t *other = json_pack("{s:i}", "n", 9);
    bg_writer_config c = config_of(&j, other);
    cr_expect_eq(reopen(&j, &c, &err), BG_ARG);
    json_decref(other);
    finish_and_check(j, "adopted", 0);
    bg_buf_release(&out);
    free(b.data);
}

Test(resume, what_may_differ_is_told)
{
    job j = leave((job){.format = BG_OUT_LZ4});
    json_t *other = json_pack("{s:s, s:f, s:i}", "model", "tiny", "temperature", 0.25, "seed", 1);
    bg_writer_config c = config_of(&j, other);
    bg_error err;
    c.may_differ = "n"; /* it is gone now, but seed is new too */
    cr_expect_eq(reopen(&j, &c, &err), BG_ARG);
    cr_expect(strstr(err.text, "seed was not set") && !strstr(err.text, "n was"), "%s", err.text);
    json_object_del(other, "seed");
    json_object_set_new(other, "model", json_string("huge"));
    cr_expect_eq(reopen(&j, &c, &err), BG_ARG);
    cr_expect(strstr(err.text, "model was") && !strstr(err.text, "n was"), "%s", err.text);
    json_object_set_new(other, "model", json_string("tiny"));
    bytes out = load(out_path), journal = load(journal_path);
    cr_expect_eq(reopen(&j, &c, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.differs && !j.rec.finished && j.rec.n_records == 40);
    end_job(&j);
    /* not rewritten: it is the old job's still */
    finish_and_check(j, "the old one", 0);
    bytes out2 = load(out_path);
    cr_expect(same(out, out2));
    free(out.data);
    free(out2.data);
    free(journal.data);
    json_decref(other);
}

/* ---- the error file
 * ------------------------------------------------------------------------------------- */

Test(resume, error_file_that_is_wrong)
{
    for (int lz4 = 0; lz4 < 2; lz4++) {
        job j = leave((job){.format = BG_OUT_LZ4, .errors = ERRORS_PLAIN + lz4, .stop = 30});
        bytes bad = load(errors_path), out = load(out_path), journal = load(journal_path);
        bg_error err;
        for (size_t n = 0; n <= bad.n; n++) { /* n bytes of it; at the end: none at all */
            if (n < bad.n)
                store(errors_path, bad.data, n);
            else
                unlink(errors_path);
            cr_assert_eq(reopen(&j, NULL, &err), BG_FORMAT, "%zu", n);
            cr_assert(strstr(err.text, errors_path) &&
                          strstr(err.text, n < bad.n ? "bytes long" : "is missing") &&
                          strstr(err.text, "put it back"),
                      "%s", err.text);
            bytes out2 = load(out_path), journal2 = load(journal_path);
            cr_assert(same(out, out2) && same(journal, journal2));
            free(out2.data);
            free(journal2.data);
        }
        /* more than there should be is a torn tail */
        bg_buf more = {0};
        bg_buf_add(&more, bad.data, bad.n);
        bg_buf_str(&more, "{\"line\":1");
        store(errors_path, more.data, more.len);
        cr_expect_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
        cr_expect_eq(j.rec.cut_bytes, 9);
        end_job(&j);
        finish_and_check(j, "put back", lz4);
        bg_buf_release(&more);
        free(bad.data);
        free(out.data);
        free(journal.data);
    }
}

Test(resume, error_file_belongs_to_the_job)
{
    job j = leave((job){.format = BG_OUT_LZ4, .errors = ERRORS_PLAIN, .stop = 30}), k = j;
    bg_error err;
    k.errors = ERRORS_NONE;
    cr_expect_eq(reopen(&k, NULL, &err), BG_ARG);
    cr_expect(strstr(err.text, "error file was \"errors\", is now not set"), "%s", err.text);
    k.errors = ERRORS_LZ4;
    cr_expect_eq(reopen(&k, NULL, &err), BG_ARG);
    cr_expect(strstr(err.text, "format of the error file was \"plain\", is now \"lz4\""), "%s",
              err.text);
    /* another job writes it now */
    cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
    bg_writer_config c = {.path = "other"};
    char path[96];
    snprintf(path, sizeof path, "%s/other", dir);
    c.path = path;
    c.error_path = errors_path;
    cr_expect_eq(reopen(&k, &c, &err), BG_BUSY);
    cr_expect(strstr(err.text, errors_path), "%s", err.text);
    end_job(&j);
    /* and what is in it is not overwritten by a new one */
    cr_expect_eq(reopen(&k, &c, &err), BG_FORMAT);
    cr_expect(strstr(err.text, errors_path) && strstr(err.text, "in the way"), "%s", err.text);
    cr_expect_neq(access(path, F_OK), 0);
    finish_and_check(j, "left alone", 0);
    c.overwrite = true;
    cr_expect_eq(reopen(&k, &c, &err), BG_OK, "%s", err.text);
    end_job(&k);
    bytes bad = load(errors_path);
    cr_expect_eq(bad.n, 0);
    free(bad.data);
}

Test(resume, nothing_but_errors)
{
    job j = {.format = BG_OUT_LZ4, .errors = ERRORS_PLAIN, .n = 40};
    bg_error err;
    for (int run = 0; run < 3; run++) {
        cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
        cr_expect_eq(j.rec.n_records, 2 * run);
        cr_expect_eq(j.rec.n_failed, 2 * run);
        for (int i = 0; i < 2; i++) {
            const bg_done d = {.record = 10 * run + i, .failed = true};
            cr_expect_eq(bg_writer_add(j.w, &d, "{\"line\":1}\n", 11, &err), BG_OK);
            cr_expect_eq(bg_writer_commit(j.w, &err), BG_OK, "%s", err.text);
        }
        if (run == 2) cr_expect_eq(bg_writer_finish(j.w, &err), BG_OK, "%s", err.text);
        end_job(&j);
    }
    bytes out = load(out_path), bad = load(errors_path);
    cr_expect(out.n == 0 && bad.n == 66);
    cr_assert_eq(reopen(&j, NULL, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.finished && j.rec.n_failed == 6);
    end_job(&j);
    free(out.data);
    free(bad.data);
}

Test(resume, standard_output_has_neither)
{
    job j = {0};
    bg_error err;
    bg_writer_config c = {.path = "-", .error_path = errors_path};
    cr_expect_eq(reopen(&j, &c, &err), BG_ARG);
    cr_expect_neq(access(errors_path, F_OK), 0);
    c = (bg_writer_config){.path = "-", .ordered = true};
    cr_expect_eq(reopen(&j, &c, &err), BG_ARG);
}

/* ---- a short journal
 * ------------------------------------------------------------------------------------- */

static size_t journal_size(void)
{
    bytes b = load(journal_path);
    free(b.data);
    return b.n;
}

/* A thousand commits of one line each: the journal never grows beyond twice what it must be, and is
 * not written again and again either. */
static void fold_as_it_grows(bool keys, size_t limit, size_t least_folds, size_t most_folds)
{
    enum { N = 1000 };
    job j = {.format = BG_OUT_PLAIN, .n = N, .errors = ERRORS_PLAIN};
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_error err;
    bg_buf line = {0};
    c.fold_bytes = 2000;
    cr_assert_eq(reopen(&j, &c, &err), BG_OK, "%s", err.text);
    size_t most = 0, folds = 0, before = 0;
    for (int r = 0; r < N; r++) {
        const bg_done d = {.record = r,
                           .key = keys ? (uint64_t)r + 1 : 0,
                           .failed = fails_for(r),
                           .prompt_tokens = 1};
        line_for(r, &line);
        cr_assert_eq(bg_writer_add(j.w, &d, line.data, line.len, &err), BG_OK);
        cr_assert_eq(bg_writer_commit(j.w, &err), BG_OK, "%s", err.text);
        size_t now = journal_size();
        if (now > most) most = now;
        folds += now < before;
        before = now;
    }
    cr_expect_lt(most, limit, "%zu", most);
    cr_expect(folds >= least_folds && folds <= most_folds, "%zu", folds);
    uint64_t text, file, commits;
    bg_writer_sizes(j.w, &text, &file, &commits);
    cr_expect_eq(commits, N);
    end_job(&j);
    cr_assert_eq(reopen(&j, &c, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.n_records == N && j.rec.n_failed == N / 5);
    bg_writer_sizes(j.w, &text, &file, &commits);
    cr_expect_eq(commits, N, "%d", (int)commits);
    cr_assert_eq(bg_writer_finish(j.w, &err), BG_OK, "%s", err.text);
    end_job(&j);
    json_t *e = entry("commit", 0), *end = entry("end", 0);
    cr_expect(json_is_true(json_object_get(e, "folded")));
    cr_expect_eq(json_integer_value(json_object_get(e, "n")), N - 1);
    cr_expect_eq(json_integer_value(json_array_get(json_object_get(e, "tokens"), 0)), N);
    cr_expect_str_eq(json_string_value(json_object_get(e, "records")), "0-999");
    cr_expect_eq(json_integer_value(json_object_get(end, "commits")), N);
    json_decref(e);
    json_decref(end);
    bg_buf_release(&line);
    json_decref(identity);
}

Test(resume, journal_is_folded_as_it_grows)
{
    fold_as_it_grows(false, 4000, 50, 300);
    remove_files();
    fold_as_it_grows(true, 2 * (1000 * 16 + 1000), 5, 60);
}

/* A start folds what a crashed run has left, tokens in flight included. */
Test(resume, start_folds_a_long_journal)
{
    job j = leave((job){.format = BG_OUT_LZ4, .every = 1, .stop = 30, .partials = true});
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_error err;
    cr_assert_eq(reopen(&j, &c, &err), BG_OK, "%s", err.text);
    size_t whole = journal_size();
    int n = j.rec.n_partials;
    cr_assert_gt(n, 0);
    int64_t tokens = 0;
    for (int i = 0; i < n; i++)
        tokens += j.rec.partials[i].n_tokens;
    end_job(&j);
    c.fold_bytes = 100;
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(reopen(&j, &c, &err), BG_OK, "%s", err.text);
        cr_expect_lt(journal_size(), whole / 2);
        cr_expect_eq(j.rec.n_records, 30);
        cr_expect_eq(j.rec.n_partials, n);
        int64_t now = 0;
        for (int k = 0; k < j.rec.n_partials; k++) {
            const bg_partial *p = &j.rec.partials[k];
            now += p->n_tokens;
            for (int t = 0; t < p->n_tokens; t++)
                cr_assert_eq(p->tokens[t], token_of(p->record, p->choice, t));
        }
        cr_expect_eq(now, tokens);
        end_job(&j);
    }
    json_decref(identity);
    finish_and_check(j, "folded", 0);
}
