/* Results taken out, renumbered and sorted, and lines that are given other numbers. */
#include "base/rng.h"
#include "output/journal.h"
#include "output/renumber.h"
#include "unit/output/job.h"

TestSuite(rewrite, .init = set_up, .fini = tear_down);

/* ---- lines
 * --------------------------------------------------------------------------------------------- */

static const char *const texts[] = {"",
                                    "plain",
                                    "a \"b\" \\ {}[],:",
                                    "\xe2\x80\xa8\n\t\x01",
                                    "\"usage\":{\"prompt_tokens\":7}},\"error\":null,\"line\":1}",
                                    "\xf0\x9f\x98\x80 \xff"};
static const char *const names[] = {NULL, "a.jsonl", "dir/\"q\"\\.jsonl", "\xc3\xa9,\"line\":3"};
static const char *const ids[] = {NULL, "\"x\"", "\"a \\\"b\\\" }\"", "12", "\"\""};
enum { N_TEXTS = 6, N_NAMES = 4, N_IDS = 5 };

static uint32_t pick(uint64_t seed, uint64_t what, uint32_t n)
{
    return bg_sample_word(seed, what, 4) % n;
}

/* A result of any kind, but for its numbers a function of the seed. */
static void any_line(uint64_t seed, int64_t record, int64_t number, const char *name, bg_buf *b)
{
    static const bg_top_text tops[] = {{"a\"", 2, 5, -0.25f}, {"\xe2\x80", 2, 6, -3}};
    const bg_token_info tokens[] = {{.chosen = {"}]", 2, 1, -1}, .top = tops, .n_top = 2},
                                    {.chosen = {"\xc3", 1, 7, -2}}};
    bg_choice c[3];
    int n = 1 + (int)pick(seed, 1, 3);
    for (int i = 0; i < n; i++) {
        const char *text = texts[pick(seed, 10 + (uint64_t)i, N_TEXTS)];
        bool stopped = pick(seed, 20 + (uint64_t)i, 2);
        c[i] = (bg_choice){.index = i,
                           .text = text,
                           .n_text = strlen(text),
                           .finish_reason = stopped ? "stop" : "length",
                           .stop_text = stopped ? texts[pick(seed, 30, N_TEXTS)] : NULL,
                           .stop_id = -1,
                           .tokens = pick(seed, 2, 2) ? tokens : NULL,
                           .n_tokens = pick(seed, 2, 2) ? 2 : 0};
    }
    bool failed = pick(seed, 3, 3) == 0;
    const bg_result r = {.record = record,
                         .line = number,
                         .file_name = name,
                         .openai = pick(seed, 4, 2),
                         .chat = pick(seed, 5, 2),
                         .id = ids[pick(seed, 6, N_IDS)],
                         .model = texts[pick(seed, 7, N_TEXTS)],
                         .fingerprint = "f",
                         .choices = c,
                         .n_choices = n,
                         .prompt_tokens = 3,
                         .completion_tokens = 4,
                         .error_code = !failed            ? NULL
                                       : pick(seed, 8, 2) ? "internal_error"
                                                          : "bad",
                         .error_message = pick(seed, 9, 3) ? texts[pick(seed, 9, N_TEXTS)] : NULL,
                         .error_param = pick(seed, 40, 2) ? "body.n" : NULL};
    bg_buf_clear(b);
    bg_result_line(&r, b);
}

/* A renumbered line is the one that would have been made with the new numbers. */
Test(rewrite, renumbered_lines)
{
    bg_buf old = {0}, want = {0}, got = {0};
    int kinds[2] = {0};
    for (uint64_t seed = 0; seed < 20000; seed++) {
        const char *from = names[pick(seed, 50, N_NAMES)], *to = names[pick(seed, 51, N_NAMES)];
        int64_t record = pick(seed, 52, 1000), number = record + 1 - pick(seed, 53, 2) * record / 2;
        int64_t record2 = (int64_t)pick(seed, 54, UINT32_MAX) << pick(seed, 55, 20);
        any_line(seed, record, number, from, &old);
        any_line(seed, record2, record2 + 1, to, &want);
        bg_result_parts parts;
        cr_assert(bg_result_take_apart(old.data, old.len, &parts), "%s", old.data);
        cr_assert_eq(parts.line, number);
        bg_buf_clear(&got);
        bg_result_renumber(&parts, record2, record2 + 1, to, &got);
        cr_assert_str_eq(got.data, want.data);
        bg_buf_clear(&got);
        bg_result_renumber(&parts, record, number, from, &got);
        cr_assert_str_eq(got.data, old.data);
        kinds[parts.openai]++;
        /* no other length is taken for a line */
        cr_assert_not(bg_result_take_apart(old.data, old.len - 1, &parts));
        cr_assert_not(bg_result_take_apart(old.data + 1, old.len - 1, &parts));
        if (seed < 200)
            for (size_t n = 0; n < old.len; n++) {
                bg_buf_clear(&got);
                bg_buf_add(&got, old.data, n);
                bg_buf_char(&got, '\n');
                if (n + 1 < old.len && parts.openai)
                    cr_assert_not(bg_result_take_apart(got.data, got.len, &parts), "%s", got.data);
            }
    }
    cr_expect(kinds[0] > 5000 && kinds[1] > 5000);
    bg_buf_release(&old);
    bg_buf_release(&want);
    bg_buf_release(&got);
}

/* ---- files
 * --------------------------------------------------------------------------------------------- */

static job unfinished(bg_out_format format, int errors, int n, int stop)
{
    job j = {
        .format = format, .n = n, .every = 4, .stop = stop, .errors = errors, .partials = true};
    bg_error err = {0};
    remove_files();
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s", err.text);
    end_job(&j);
    return j;
}

static void open_again(job *j, bg_error *err)
{
    json_t *identity = identity_of();
    bg_writer_config c = config_of(j, identity);
    cr_assert_eq(bg_writer_open(&j->w, &c, &j->rec, err), BG_OK, "%s", err->text);
    json_decref(identity);
}

static int count_files(void)
{
    int n = 0;
    DIR *list = opendir(dir);
    for (struct dirent *e; (e = readdir(list));)
        n += e->d_name[0] != '.';
    closedir(list);
    return n;
}

Test(rewrite, failed_results_are_taken_out)
{
    for (int format = 0; format < 2; format++) {
        for (int errors = 0; errors < 3; errors++) {
            for (int way = 0; way < 4; way++) {
                const int finished = way % 2;
                job j = unfinished(format ? BG_OUT_PLAIN : BG_OUT_LZ4, errors, 40, 30);
                bg_error err = {0};
                j.other_input = way / 2;
                if (finished) finish_and_check(j, "before", 0);
                open_again(&j, &err);
                int64_t failed, n = finished ? 40 : 28;
                cr_expect(j.rec.finished == finished && j.rec.n_records == n, "%d",
                          (int)j.rec.n_records);
                int64_t bad = j.rec.n_failed;
                cr_expect_gt(bad, 3);
                cr_assert_eq(retry_failed(&j, &err), BG_OK, "%s", err.text);
                cr_expect_eq(bg_writer_count(j.w, &failed), n - bad);
                int64_t kept, dropped;
                const bg_rewrite only_fold = {0};
                if (errors) /* or as the first rewrite left it */
                    cr_assert_eq(bg_writer_rewrite(j.w, &only_fold, &kept, &dropped, &err), BG_OK);
                cr_expect_not(bg_writer_done(j.w, 5));
                cr_expect(bg_writer_done(j.w, 7));
                end_job(&j);
                cr_expect_eq(count_files(), errors ? 3 : 2, "rubbish is left");
                open_again(&j, &err);
                cr_expect(!j.rec.finished && j.rec.resumed && j.rec.cut_bytes == 0);
                cr_expect(j.rec.n_records == n - bad && j.rec.n_failed == 0);
                cr_expect(j.rec.input_end == 0, "failed records lie before it");
                if (j.other_input || finished)
                    cr_expect_eq(j.rec.n_partials, 0, "perhaps of other records");
                else
                    cr_expect_gt(j.rec.n_partials, 0, "of the same records");
                end_job(&j);
                finish_and_check(j, "retried", 0);
            }
        }
    }
}

/* Kept as it is, only the journal becomes a short one of this job. */
Test(rewrite, nothing_to_do)
{
    job j = unfinished(BG_OUT_LZ4, ERRORS_PLAIN, 40, 30);
    bg_error err = {0};
    bytes out = load(out_path), bad = load(errors_path);
    for (int i = 0; i < 2; i++) {
        open_again(&j, &err);
        int64_t kept, dropped;
        const bg_rewrite how = {0};
        cr_expect_eq(j.rec.n_partials > 0, true);
        cr_assert_eq(bg_writer_rewrite(j.w, &how, &kept, &dropped, &err), BG_OK, "%s", err.text);
        cr_expect(kept == 28 && dropped == 0);
        end_job(&j);
    }
    bytes out2 = load(out_path), bad2 = load(errors_path), journal = load(journal_path);
    cr_expect(same(out, out2) && same(bad, bad2));
    cr_expect(strstr(journal.data, "\"folded\":true") && strstr(journal.data, "\"partial\":["));
    cr_expect_eq(strstr(strstr(journal.data, "{\"commit\"") + 1, "{\"commit\""), NULL);
    free(out.data);
    free(out2.data);
    free(bad.data);
    free(bad2.data);
    free(journal.data);
    finish_and_check(j, "as it was", 0);
}

typedef struct moves {
    int n, taken[64];
} moves;

/* Records 10 to 19 were taken from the input, the others moved up, and a file came first. */
static bool move(void *ctx, const bg_done *old, int64_t *record, int64_t *line, const char **name)
{
    moves *m = ctx;
    cr_assert_null(*name);
    cr_assert_eq(*line, *record + 1);
    cr_assert_eq(m->taken[old->record]++, 0);
    m->n++;
    if (old->failed || (*record >= 10 && *record < 20)) return false;
    int64_t r = *record < 10 ? *record : *record - 10;
    *record = r + 100;
    *line = r + 1;
    *name = "second \"one\"";
    return true;
}

Test(rewrite, renumbered_output)
{
    for (int errors = 0; errors < 2; errors++) {
        job j = unfinished(BG_OUT_LZ4, errors, 40, 40);
        bg_error err = {0};
        char dropped_path[80];
        snprintf(dropped_path, sizeof dropped_path, "%s/dropped", dir);
        store(dropped_path, "before\n", 7);
        json_t *identity =
            json_pack("{s:s, s:i, s:f}", "model", "tiny", "n", 4, "temperature", 0.25);
        bg_writer_config c = config_of(&j, identity);
        bg_recovered rec;
        cr_assert_eq(bg_writer_open(&j.w, &c, &rec, &err), BG_ARG);
        err = (bg_error){0};
        c.may_differ = "n";
        cr_assert_eq(bg_writer_open(&j.w, &c, &rec, &err), BG_OK, "%s", err.text);
        cr_expect(rec.differs && rec.resumed && rec.n_partials == 0 && rec.input_end == 0);
        cr_expect_eq(bg_writer_add(j.w, &(bg_done){.record = 90}, "{}\n", 3, &err), BG_INTERNAL);
        err = (bg_error){0};
        moves m = {0};
        int64_t kept, dropped, failed;
        const bg_rewrite how = {
            .keep = move, .ctx = &m, .dropped_path = dropped_path, .sort = true};
        cr_assert_eq(bg_writer_rewrite(j.w, &how, &kept, &dropped, &err), BG_OK, "%s", err.text);
        cr_expect(m.n == 40 && kept == 24 && dropped == 16, "%d", (int)kept);
        cr_expect_eq(bg_writer_count(j.w, &failed), 24);
        cr_expect(bg_writer_done(j.w, 101) && bg_writer_done(j.w, 111) && !bg_writer_done(j.w, 1));
        cr_expect(bg_writer_key(j.w, 111) == key_for(21) && bg_writer_key(j.w, 21) == 0);
        end_job(&j);
        bg_buf text = {0}, want = {0}, line = {0};
        bg_result_parts parts;
        read_output(j.format, &text);
        for (int64_t r = 0; r < 40; r++) {
            if (fails_for(r) || (r >= 10 && r < 20)) continue;
            int64_t now = r < 10 ? r : r - 10;
            line_for(r, &line);
            cr_assert(bg_result_take_apart(line.data, line.len, &parts));
            bg_result_renumber(&parts, now + 100, now + 1, "second \"one\"", &want);
        }
        cr_expect_str_eq(text.data, want.data);
        bytes d = load(dropped_path);
        int lines = 0;
        for (size_t i = 0; i < d.n; i++)
            lines += d.data[i] == '\n';
        cr_expect(!strncmp(d.data, "before\n", 7) && lines == 1 + 8, "%d", lines);
        free(d.data);
        /* it is the new job's now, and the old one's no more */
        c.may_differ = NULL;
        cr_assert_eq(bg_writer_open(&j.w, &c, &rec, &err), BG_OK, "%s", err.text);
        cr_expect(!rec.differs && rec.n_records == 24 && rec.n_failed == 0);
        cr_expect(rec.input_end == 0 && rec.n_partials == 0, "of the input before");
        end_job(&j);
        json_decref(identity);
        identity = identity_of();
        c.identity = identity;
        cr_expect_eq(bg_writer_open(&j.w, &c, &rec, &err), BG_ARG);
        json_decref(identity);
        bg_buf_release(&text);
        bg_buf_release(&want);
        bg_buf_release(&line);
    }
}

Test(rewrite, ordered_output)
{
    for (int format = 0; format < 2; format++) {
        for (int errors = 0; errors < 3; errors++) {
            job j = {.format = format ? BG_OUT_PLAIN : BG_OUT_LZ4,
                     .n = 200,
                     .every = 9,
                     .errors = errors,
                     .ordered = true};
            remove_files();
            finish_and_check(j, "ordered", format);
            bytes out = load(out_path), bad = load(errors_path);
            /* cut into other commits, with a stop and a start: the same bytes */
            job k = j;
            k.every = 4;
            k.stop = 101;
            k.partials = true;
            bg_error err = {0};
            remove_files();
            cr_assert_eq(run_job(&k, &quick, &err), BG_OK, "%s", err.text);
            end_job(&k);
            finish_and_check(k, "ordered", format);
            bytes out2 = load(out_path), bad2 = load(errors_path);
            cr_expect(same(out, out2) && same(bad, bad2));
            /* finished stays finished, and one that is not sorted is not what is wanted */
            open_again(&k, &err);
            cr_expect(k.rec.finished && k.rec.n_records == 200);
            end_job(&k);
            remove_files();
            k.ordered = false;
            finish_and_check(k, "not ordered", format);
            k.ordered = true;
            open_again(&k, &err);
            cr_expect(!k.rec.finished && k.rec.n_records == 200);
            end_job(&k);
            finish_and_check(k, "ordered later", format);
            bytes out3 = load(out_path);
            cr_expect(same(out, out3));
            free(out.data);
            free(out2.data);
            free(out3.data);
            free(bad.data);
            free(bad2.data);
        }
    }
}

/* A second run that waits gets the lock of the new file, not of the one that lost its name. */
Test(rewrite, the_lock_stays)
{
    job j = unfinished(BG_OUT_LZ4, ERRORS_NONE, 40, 30), k = j;
    bg_error err = {0};
    open_again(&j, &err);
    cr_assert_eq(retry_failed(&j, &err), BG_OK, "%s", err.text);
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&k, identity);
    cr_expect_eq(bg_writer_open(&k.w, &c, &k.rec, &err), BG_BUSY);
    end_job(&j);
    err = (bg_error){0};
    cr_expect_eq(bg_writer_open(&k.w, &c, &k.rec, &err), BG_OK, "%s", err.text);
    end_job(&k);
    json_decref(identity);
}

/* Modes are kept, and a link stays one. */
Test(rewrite, through_a_link)
{
    char target[80];
    struct stat sb;
    bg_error err = {0};
    snprintf(target, sizeof target, "%s/target", dir);
    store(target, "", 0);
    cr_assert_eq(symlink("target", out_path), 0);
    cr_assert_eq(chmod(target, 0604), 0);
    job j = {.format = BG_OUT_LZ4, .n = 40, .every = 4, .stop = 30};
    cr_assert_eq(run_job(&j, &quick, &err), BG_OK, "%s", err.text);
    end_job(&j);
    cr_assert_eq(chmod(journal_path, 0640), 0);
    open_again(&j, &err);
    cr_assert_eq(retry_failed(&j, &err), BG_OK, "%s", err.text);
    end_job(&j);
    cr_expect(lstat(out_path, &sb) == 0 && S_ISLNK(sb.st_mode));
    cr_expect(stat(out_path, &sb) == 0 && (sb.st_mode & 0777) == 0604);
    cr_expect(stat(journal_path, &sb) == 0 && (sb.st_mode & 0777) == 0640);
    j.ordered = true;
    finish_and_check(j, "through a link", 0);
}

/* A rewrite that counts is ended whatever is there of it; its new journal must be. */
Test(rewrite, new_files_that_are_gone)
{
    job j = unfinished(BG_OUT_LZ4, ERRORS_NONE, 40, 30);
    bytes out = load(out_path), journal = load(journal_path);
    bg_buf b = {0};
    bg_buf_add(&b, journal.data, journal.n);
    size_t start = b.len;
    bg_buf_str(&b, "{\"rewrite\":{}}");
    bg_journal_seal(&b, start);
    store(journal_path, b.data, b.len);
    json_t *identity = identity_of();
    bg_writer_config c = config_of(&j, identity);
    bg_error err = {0};
    cr_expect_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_FORMAT);
    cr_expect(strstr(err.text, ".journal.rewrite") && strstr(err.text, "nothing was changed"), "%s",
              err.text);
    bytes out2 = load(out_path), journal2 = load(journal_path);
    cr_expect(same(out, out2) && journal2.n == b.len);
    /* without the entry such files are rubbish */
    char path[96];
    static const char *const suffixes[] = {".rewrite", ".journal.rewrite", ".journal.new"};
    store(journal_path, journal.data, journal.n);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s%s", out_path, suffixes[i]);
        store(path, "x", 1);
    }
    err = (bg_error){0};
    cr_expect_eq(bg_writer_open(&j.w, &c, &j.rec, &err), BG_OK, "%s", err.text);
    cr_expect_eq(bg_writer_begin(j.w, &err), BG_OK, "%s", err.text);
    cr_expect_eq(count_files(), 2);
    end_job(&j);
    finish_and_check(j, "with rubbish", 0);
    json_decref(identity);
    free(out.data);
    free(out2.data);
    free(journal.data);
    free(journal2.data);
    bg_buf_release(&b);
}
