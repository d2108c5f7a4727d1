#include <errno.h>
#include <fcntl.h>
#include <sys/wait.h>

#include "base/rng.h"
#include "output/recover.h"
#include "support/schema.h"
#include "unit/output/job.h"

TestSuite(writer, .init = set_up, .fini = tear_down);

static bg_status open_job(job *j, json_t *identity, bool overwrite, bg_error *err)
{
    bg_writer_config c = config_of(j, identity);
    c.overwrite = overwrite;
    bg_status st = bg_writer_open(&j->w, &c, &j->rec, err);
    return st ? st : bg_writer_begin(j->w, err);
}

/* What is refused later, because its input is another one, must have changed nothing. */
Test(writer, opening_changes_nothing)
{
    job j = {.format = BG_OUT_LZ4, .n = 12};
    json_t *identity = identity_of();
    bg_error err = {0};
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_writer_add(j.w, &(bg_done){.record = 3}, "{\"line\":4}\n", 11, &err), BG_OK);
    cr_assert_eq(bg_writer_commit(j.w, &err), BG_OK, "%s", err.text);
    end_job(&j);
    bytes out = load(out_path), journal = load(journal_path);
    out.data = realloc(out.data, out.n + 9);
    journal.data = realloc(journal.data, journal.n + 9);
    memcpy(out.data + out.n, "torn tail", 9); /* what begin will cut */
    memcpy(journal.data + journal.n, "torn tail", 9);
    store(out_path, out.data, out.n + 9);
    store(journal_path, journal.data, journal.n + 9);
    bg_writer_config c = config_of(&j, identity);
    cr_assert_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.resumed && j.rec.n_records == 1 && j.rec.cut_bytes == 9);
    end_job(&j);
    bytes out2 = load(out_path), journal2 = load(journal_path);
    cr_expect(out2.n == out.n + 9 && memcmp(out2.data, out.data, out2.n) == 0);
    cr_expect(journal2.n == journal.n + 9 && memcmp(journal2.data, journal.data, journal2.n) == 0);
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    end_job(&j);
    free(out2.data);
    out2 = load(out_path);
    cr_expect_eq(out2.n, out.n);
    json_decref(identity);
    free(out.data);
    free(out2.data);
    free(journal.data);
    free(journal2.data);
}

/* Leaves an unfinished output: 8 records in 4 commits. */
static job unfinished(bg_out_format format)
{
    job j = {.format = format, .n = 12, .every = 2, .stop = 8, .partials = true};
    bg_error err = {0};
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s", err.text);
    end_job(&j);
    return j;
}

Test(writer, whole_run_on_a_real_disk)
{
    for (int f = 0; f < 2; f++) {
        job j = {.format = f ? BG_OUT_PLAIN : BG_OUT_LZ4, .n = 12, .every = 5};
        bg_error err = {0};
        cr_assert_eq(run_job(&j, &bg_out_real, &err), BG_OK, "%s", err.text);
        cr_expect_not(j.rec.resumed);
        uint64_t text, file, commits;
        bg_writer_sizes(j.w, &text, &file, &commits);
        cr_expect_eq(commits, 3);
        bytes b = load(out_path);
        cr_expect_eq(file, b.n);
        free(b.data);
        end_job(&j);
        expect_complete(&j, "run", f);
        unlink(out_path);
        unlink(journal_path);
    }
}

Test(writer, what_is_committed_is_readable_at_any_time)
{
    job j = {.format = BG_OUT_LZ4, .n = 12, .every = 100};
    json_t *identity = identity_of();
    bg_error err = {0};
    bg_buf text = {0};
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    bg_writer_add(j.w, &(bg_done){.record = 3, .failed = false}, "{\"line\":4}\n", 11, &err);
    read_output(j.format, &text);
    cr_expect_eq(text.len, 0);
    cr_expect(bg_writer_done(j.w, 3) && !bg_writer_done(j.w, 2));
    bg_writer_commit(j.w, &err);
    read_output(j.format, &text);
    cr_expect_str_eq(text.data, "{\"line\":4}\n");
    cr_expect_eq(bg_writer_add(j.w, &(bg_done){.record = 3, .failed = false}, "{}\n", 3, &err),
                 BG_INTERNAL, "a record twice");
    err = (bg_error){0};
    cr_expect_eq(bg_writer_add(j.w, &(bg_done){.record = 4, .failed = false}, "{}", 2, &err),
                 BG_INTERNAL, "half a line");
    err = (bg_error){0};
    cr_expect_eq(bg_writer_add(j.w, &(bg_done){.record = 4, .failed = true}, "{}\n", 3, &err),
                 BG_OK, "%s", err.text);
    end_job(&j); /* not committed: gone */
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.resumed && !j.rec.finished);
    cr_expect_eq(j.rec.n_records, 1);
    cr_expect(bg_writer_done(j.w, 3) && !bg_writer_done(j.w, 4));
    end_job(&j);
    bg_buf_release(&text);
    json_decref(identity);
}

Test(writer, commits_by_size_and_by_time)
{
    job j = {.format = BG_OUT_PLAIN, .n = 12};
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_error err = {0};
    uint64_t text, file, commits;
    c.commit_bytes = 25;
    cr_assert_eq(bg_writer_open_on(&j.w, &c, &quick, &j.rec, &err), BG_OK);
    bg_writer_add(j.w, &(bg_done){.record = 0, .failed = false}, "{\"line\":1}\n", 11, &err);
    bg_writer_add(j.w, &(bg_done){.record = 1, .failed = false}, "{\"line\":2}\n", 11, &err);
    bg_writer_tick(j.w, &err);
    bg_writer_sizes(j.w, &text, &file, &commits);
    cr_expect_eq(commits, 0);
    bg_writer_add(j.w, &(bg_done){.record = 2, .failed = false}, "{\"line\":3}\n", 11, &err);
    bg_writer_sizes(j.w, &text, &file, &commits);
    cr_expect(commits == 1 && text == 33 && file == 33);
    end_job(&j);
    c.commit_ns = 1;
    cr_assert_eq(bg_writer_open_on(&j.w, &c, &quick, &j.rec, &err), BG_OK);
    bg_writer_add(j.w, &(bg_done){.record = 3, .failed = false}, "{\"line\":4}\n", 11, &err);
    bg_writer_tick(j.w, &err);
    bg_writer_tick(j.w, &err);
    bg_writer_sizes(j.w, &text, &file, &commits);
    cr_expect(commits == 2 && text == 44, "%d", (int)commits);
    end_job(&j);
    json_decref(identity);
}

Test(writer, finished_job_is_left_alone)
{
    job j = {.format = BG_OUT_LZ4, .n = 12, .every = 5};
    bg_error err = {0};
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s", err.text);
    end_job(&j);
    bytes out = load(out_path), journal = load(journal_path);
    json_t *identity = identity_of();
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.finished && !j.rec.resumed && j.rec.n_records == 12 && j.rec.n_failed == 3);
    cr_expect_eq(bg_writer_commit(j.w, &err), BG_OK);
    cr_expect_eq(bg_writer_finish(j.w, &err), BG_OK);
    cr_expect_eq(bg_writer_add(j.w, &(bg_done){.record = 50, .failed = false}, "{}\n", 3, &err),
                 BG_INTERNAL);
    end_job(&j);
    bytes out2 = load(out_path), journal2 = load(journal_path);
    cr_expect(same(out, out2) && same(journal, journal2));
    free(out.data);
    free(out2.data);
    free(journal.data);
    free(journal2.data);
    json_decref(identity);
}

Test(writer, second_writer_is_busy)
{
    job j = {.format = BG_OUT_LZ4, .n = 12}, k = j;
    json_t *identity = identity_of();
    bg_error err = {0};
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    bytes journal = load(journal_path);
    cr_expect_eq(open_job(&k, identity, false, &err), BG_BUSY);
    char pid[32];
    snprintf(pid, sizeof pid, "pid %ld on", (long)getpid());
    cr_expect(strstr(err.text, out_path) && strstr(err.text, pid), "%s", err.text);
    err = (bg_error){0};
    cr_expect_eq(open_job(&k, identity, true, &err), BG_BUSY, "not even to overwrite");
    bytes journal2 = load(journal_path);
    cr_expect(same(journal, journal2));
    end_job(&j);
    err = (bg_error){0};
    cr_expect_eq(open_job(&k, identity, false, &err), BG_OK, "%s", err.text);
    end_job(&k);
    free(journal.data);
    free(journal2.data);
    json_decref(identity);
}

Test(writer, another_jobs_output_is_refused)
{
    job j = unfinished(BG_OUT_LZ4);
    bytes out = load(out_path), journal = load(journal_path);
    static const struct {
        const char *json, *says[3];
        bg_out_format format;
    } list[] = {
        {"{\"model\":\"other\",\"n\":3,\"temperature\":0.25}",
         {"model was \"tiny\", is now \"other\""},
         BG_OUT_LZ4},
        {"{\"model\":\"tiny\",\"n\":4,\"temperature\":0.5}",
         {"n was 3, is now 4", "temperature was 0.25, is now 0.5"},
         BG_OUT_LZ4},
        {"{\"model\":\"tiny\",\"temperature\":0.25}", {"n was 3, is now not set"}, BG_OUT_LZ4},
        {"{\"model\":\"tiny\",\"n\":3,\"temperature\":0.25,\"seed\":1}",
         {"seed was not set, is now 1"},
         BG_OUT_LZ4},
        {"{\"model\":\"tiny\",\"n\":3,\"temperature\":0.25}",
         {"output format was \"lz4\", is now \"plain\""},
         BG_OUT_PLAIN},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        json_t *identity = json_loads(list[i].json, 0, NULL);
        bg_error err = {0};
        j.format = list[i].format;
        cr_expect_eq(open_job(&j, identity, false, &err), BG_ARG, "%zu: %s", i, err.text);
        cr_expect(strstr(err.text, out_path) && strstr(err.text, "--overwrite"), "%s", err.text);
        for (int k = 0; k < 3 && list[i].says[k]; k++)
            cr_expect(strstr(err.text, list[i].says[k]), "%s", err.text);
        bytes out2 = load(out_path), journal2 = load(journal_path);
        cr_expect(same(out, out2) && same(journal, journal2), "%zu: bytes changed", i);
        free(out2.data);
        free(journal2.data);
        json_decref(identity);
    }
    /* asked for, it starts anew */
    json_t *identity = json_loads(list[0].json, 0, NULL);
    bg_error err = {0};
    j.format = BG_OUT_LZ4;
    cr_assert_eq(open_job(&j, identity, true, &err), BG_OK, "%s", err.text);
    cr_expect(!j.rec.resumed && j.rec.n_records == 0);
    end_job(&j);
    bytes out2 = load(out_path);
    cr_expect_eq(out2.n, 0);
    free(out2.data);
    free(out.data);
    free(journal.data);
    json_decref(identity);
}

Test(writer, what_is_not_ours_is_refused)
{
    static const struct {
        const char *out, *journal; /* NULL: no such file */
        bg_status st;
        const char *says;
    } list[] = {
        {"precious text\n", NULL, BG_FORMAT, "no journal"},
        {"precious text\n", "", BG_FORMAT, "missing"},
        {"precious text\n", "precious too\n", BG_FORMAT, "damaged"},
        {"", "precious text\n", BG_FORMAT, "in the way"},
        {NULL, "precious text\n", BG_FORMAT, "in the way"},
        {"", NULL, BG_OK, NULL},
        {"", "", BG_OK, NULL},
        {NULL, "{\"batchgen\":1,\"iden", BG_OK, NULL},
        {NULL, "{\"ba", BG_OK, NULL},
    };
    json_t *identity = identity_of();
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        job j = {.format = BG_OUT_LZ4, .n = 12};
        bg_error err = {0};
        unlink(out_path);
        unlink(journal_path);
        if (list[i].out) store(out_path, list[i].out, strlen(list[i].out));
        if (list[i].journal) store(journal_path, list[i].journal, strlen(list[i].journal));
        cr_expect_eq(open_job(&j, identity, false, &err), list[i].st, "%zu: %s", i, err.text);
        if (list[i].st) {
            cr_expect(strstr(err.text, list[i].says), "%zu: %s", i, err.text);
            bytes out = load(out_path), journal = load(journal_path);
            cr_expect_eq(out.n, list[i].out ? strlen(list[i].out) : 0);
            cr_expect_eq(journal.n, list[i].journal ? strlen(list[i].journal) : 0);
            free(out.data);
            free(journal.data);
        } else {
            end_job(&j);
        }
    }
    json_decref(identity);
    bg_error err = {0};
    job j = {.format = BG_OUT_LZ4};
    bg_writer_config c = config_of(&j, NULL);
    c.path = "/dev/null";
    cr_expect_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_ARG, "%s", err.text);
    err = (bg_error){0};
    c.path = "/no/such/folder/out";
    cr_expect_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_IO);
    cr_expect(err.os == ENOENT && strstr(err.text, c.path), "%s", err.text);
}

Test(writer, input_position_and_partials_come_back)
{
    job j = unfinished(BG_OUT_LZ4);
    json_t *identity = identity_of();
    bg_error err = {0};
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    cr_expect(j.rec.resumed && j.rec.n_records == 8 && j.rec.n_failed == 1);
    cr_expect_eq(j.rec.input_end, 80);
    cr_expect_eq(j.rec.input_hash, 7 * 77);
    /* the last commit was made at i = 7: of 9, 11 and (once) 8 and 10 tokens are known */
    int known[12] = {0};
    for (int k = 0; k < j.rec.n_partials; k++) {
        for (int i = 0; i < 12; i++)
            if (record_at(12, i) == j.rec.partials[k].record) known[i] = j.rec.partials[k].n_tokens;
    }
    for (int i = 0; i < 8; i++)
        cr_expect_eq(known[i], 0, "%d is done", i);
    cr_expect_eq(known[9], 60 - 3 - 4 < 32 ? 53 : 32, "%d", known[9]);
    cr_expect_eq(known[11], 32, "%d", known[11]);
    end_job(&j);
    json_decref(identity);
}

static bg_partial one;

static const bg_partial *get_one(void *ctx, int *n)
{
    *n = *(int *)ctx;
    return &one;
}

/* Only gained tokens are written; a sequence that starts again replaces what was there. */
Test(writer, partials_are_saved_as_they_grow)
{
    job j = {.format = BG_OUT_PLAIN, .n = 12};
    json_t *identity = identity_of();
    bg_error err = {0};
    int32_t tokens[100];
    int have = 1;
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    bg_writer_on_partials(j.w, get_one, &have);
    static const struct {
        int n, first;
        const char *entry;
    } steps[] = {{3, 0, "\"from\":0,\"tokens\":[0,1,2]"},
                 {3, 0, NULL},
                 {5, 0, "\"from\":3,\"tokens\":[3,4]"},
                 {4, 50, "\"from\":0,\"tokens\":[50,51,52,53]"},
                 {5, 50, "\"from\":4,\"tokens\":[54]"}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        one = (bg_partial){.record = 7, .choice = 1, .tokens = tokens, .n_tokens = steps[i].n};
        for (int t = 0; t < steps[i].n; t++)
            tokens[t] = steps[i].first + t;
        bytes before = load(journal_path);
        cr_assert_eq(bg_writer_commit(j.w, &err), BG_OK);
        bytes after = load(journal_path);
        cr_expect_eq(after.n > before.n, steps[i].entry != NULL, "step %zu", i);
        if (steps[i].entry) cr_expect(strstr(after.data + before.n, steps[i].entry), "step %zu", i);
        free(before.data);
        free(after.data);
    }
    end_job(&j);
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    cr_assert_eq(j.rec.n_partials, 1);
    const bg_partial *p = j.rec.partials;
    cr_expect(p->record == 7 && p->choice == 1 && p->n_tokens == 5 && p->tokens[4] == 54);
    /* the run goes on from them */
    bg_writer_on_partials(j.w, get_one, &have);
    one.n_tokens = 6;
    tokens[5] = 55;
    cr_assert_eq(bg_writer_commit(j.w, &err), BG_OK);
    bytes journal = load(journal_path);
    cr_expect(strstr(journal.data, "\"from\":5,\"tokens\":[55]"));
    free(journal.data);
    cr_expect_eq(
        bg_writer_add(j.w, &(bg_done){.record = 7, .failed = false}, "{\"line\":8}\n", 11, &err),
        BG_OK);
    cr_assert_eq(bg_writer_commit(j.w, &err), BG_OK);
    cr_expect_eq(p->tokens[4], 54, "still there for whoever holds it");
    end_job(&j);
    cr_assert_eq(open_job(&j, identity, false, &err), BG_OK, "%s", err.text);
    cr_expect_eq(j.rec.n_partials, 0, "the record is done");
    end_job(&j);
    json_decref(identity);
}

/* Each entry of the journal, against the schema; how many there were. */
static int entries_fit(void)
{
    json_t *schema = json_load_file("schemas/journal.schema.json", 0, NULL);
    cr_assert(schema);
    bytes b = load(journal_path);
    int n = 0;
    for (char *p = b.data; *p; n++) {
        char *lf = strchr(p, '\n'), why[256];
        cr_assert(lf && lf - p > 17 && lf[-17] == ' ');
        json_t *v = json_loadb(p, (size_t)(lf - 17 - p), 0, NULL);
        cr_assert(v);
        cr_expect(schema_fits(schema, v, why, sizeof why), "%s: %.*s", why, (int)(lf - p), p);
        json_object_set_new(v, "more", json_true());
        cr_expect_not(schema_fits(schema, v, why, sizeof why));
        json_object_del(v, "more");
        json_t *inner = json_object_iter_value(json_object_iter(v));
        if (json_object_get(v, "commit") || json_object_get(v, "end")) {
            json_object_set_new(inner, "more", json_true());
            cr_expect_not(schema_fits(schema, v, why, sizeof why));
        }
        json_decref(v);
        p = lf + 1;
    }
    free(b.data);
    json_decref(schema);
    return n;
}

Test(writer, journal_fits_the_schema)
{
    for (int errors = 0; errors < 3; errors++) {
        job j = {.format = BG_OUT_LZ4,
                 .n = 12,
                 .every = 2,
                 .stop = 8,
                 .partials = true,
                 .errors = errors};
        bg_error err = {0};
        remove_files();
        cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s", err.text);
        end_job(&j);
        cr_expect_eq(entries_fit(), 6); /* identity, run, 4 commits */
        job k = j;
        k.stop = 3;
        cr_assert_eq(run_job(&k, &quick, &err), BG_OK, "%s", err.text);
        end_job(&k);
        cr_expect_eq(entries_fit(), 8); /* run, a commit */
        finish_and_check(j, "schema", 0);
        cr_expect_eq(entries_fit(), 4); /* identity, run, one commit, end */
    }
}

static void to_stdout(bg_out_format format)
{
    pid_t pid = fork();
    if (pid == 0) {
        int fd = open(out_path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(fd, STDOUT_FILENO);
        bg_writer *w;
        bg_recovered rec;
        bg_error err = {0};
        bg_writer_config c = {.path = "-", .format = format};
        bg_buf line = {0};
        if (bg_writer_open(&w, &c, &rec, &err)) _exit(1);
        for (int i = 0; i < 12; i++) {
            line_for(i, &line);
            if (bg_writer_add(w, &(bg_done){.record = i, .failed = false}, line.data, line.len,
                              &err))
                _exit(2);
            if (i % 5 == 0 && bg_writer_commit(w, &err)) _exit(3);
        }
        if (!bg_writer_done(w, 3) || bg_writer_done(w, 12) || bg_writer_finish(w, &err)) _exit(4);
        bg_writer_close(w);
        bg_buf_release(&line);
        if (write(STDOUT_FILENO, "", 0) != 0) _exit(5); /* still open */
        _exit(access("-.journal", F_OK) == 0 ? 6 : 0);
    }
    int status;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(status, 0, "%d", status);
    job j = {.format = format, .n = 12};
    expect_complete(&j, "stdout", format);
}

Test(writer, standard_output)
{
    to_stdout(BG_OUT_PLAIN);
    to_stdout(BG_OUT_LZ4);
}

Test(frames, strict)
{
    bg_buf text = {0}, frame = {0}, out = {0};
    bg_error err = {0};
    size_t used;
    for (int i = 0; i < 3000; i++)
        bg_buf_printf(&text, "{\"line\":%d,\"r\":%u}\n", i, bg_sample_word(1, (uint64_t)i, 2));
    for (int level = 0; level <= 9; level += 9) {
        bg_buf_clear(&frame);
        bg_buf_clear(&out);
        cr_assert_eq(bg_frame_put(&frame, text.data, text.len, level, &err), BG_OK);
        size_t n = frame.len;
        bg_buf_str(&frame, "more");
        cr_assert_eq(bg_frame_get(&out, frame.data, frame.len, text.len, &used, &err), BG_OK);
        cr_expect(used == n && out.len == text.len && !memcmp(out.data, text.data, text.len));
        bg_error e = {0};
        cr_expect_eq(bg_frame_get(&out, frame.data, n, text.len - 1, &used, &e), BG_FORMAT,
                     "limit");
        for (size_t cut = 0; cut < n; cut += cut < 40 || cut > n - 40 ? 1 : 997) {
            bg_buf_clear(&out);
            e = (bg_error){0};
            cr_expect_eq(bg_frame_get(&out, frame.data, cut, 1 << 20, &used, &e), BG_FORMAT, "%zu",
                         cut);
        }
        for (size_t at = 0; at < n; at += at < 40 || at > n - 40 ? 1 : 997) {
            frame.data[at] ^= 0x10;
            bg_buf_clear(&out);
            e = (bg_error){0};
            cr_expect_eq(bg_frame_get(&out, frame.data, n, 1 << 20, &used, &e), BG_FORMAT, "%zu",
                         at);
            frame.data[at] ^= 0x10;
        }
    }
    bg_buf_release(&text);
    bg_buf_release(&frame);
    bg_buf_release(&out);
}
