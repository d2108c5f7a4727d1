#include "job/options.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "job/job.h"

static char *const no_env[] = {NULL};

static bg_status resolve(bg_job *job, bg_error *err, int command, char *const *env,
                         const char *words)
{
    char *copy = strdup(words), *argv[32];
    int n = 0;
    for (char *save, *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save))
        argv[n++] = w;
    bg_job_init(job);
    bg_status st = bg_job_resolve(job, command, n, argv, env, err);
    free(copy);
    return st;
}

Test(options, table_is_consistent)
{
    for (int i = 0; i < bg_n_options; i++) {
        const bg_option *o = &bg_options[i];
        cr_expect_eq(bg_option_find(o->name, strlen(o->name)), o, "%s is found", o->name);
        if (o->letter) cr_expect_eq(bg_option_by_letter(o->letter), o, "-%c is unique", o->letter);
        cr_expect((o->type == BG_OPT_CHOICE) == (o->choices != NULL), "%s", o->name);
        cr_expect(o->help && *o->help && o->commands, "%s", o->name);
        for (int k = 0; k < i; k++)
            cr_expect_neq(bg_options[k].offset, o->offset, "%s and %s share a field", o->name,
                          bg_options[k].name);
    }
}

/* Off unless asked for, everywhere; a name in the job's identity only then; no CPU has it. */
Test(options, fast_math)
{
    bg_job j;
    bg_error e = {0};
    char yes[] = "BATCHGEN_FAST_MATH=true", name[] = "m";
    char *const env[] = {yes, NULL};
    const struct {
        char *const *env;
        const char *words;
        bool want;
    } list[] = {{no_env, "a.jsonl -o out -m m", false},
                {no_env, "a.jsonl -o out -m m --fast-math", true},
                {env, "a.jsonl -o out -m m", true},
                {env, "a.jsonl -o out -m m --no-fast-math", false}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        cr_assert_eq(resolve(&j, &e, BG_CMD_RUN, list[i].env, list[i].words), BG_OK, "%s", e.text);
        cr_expect_eq(j.fast_math, list[i].want, "%s", list[i].words);
        bg_text_model m = {.name = name};
        const bg_memory_plan p = {.gpu = 1, .tp = 1};
        json_t *identity = bg_job_identity(&j, &m, &p, &e);
        cr_assert_not_null(identity, "%s", e.text);
        cr_expect_eq(json_is_true(json_object_get(identity, "fast_math")), list[i].want);
        cr_expect_eq(json_object_get(identity, "fast_math") != NULL, list[i].want);
        json_decref(identity);
        bg_job_release(&j);
    }
    cr_assert_eq(
        resolve(&j, &e, BG_CMD_RUN, no_env, "a.jsonl -o out -m m --fast-math --device cpu"), BG_OK);
    bg_text_model m = {.desc = {0}};
    cr_assert_eq(bg_gguf_open(&m.gguf, "tests/golden/models/tiny-qwen3.f16.gguf", &e), BG_OK);
    cr_assert_eq(bg_desc_read(&m.desc, m.gguf, &e), BG_OK, "%s", e.text);
    bg_memory_plan p;
    cr_expect_eq(bg_plan_memory(&p, &j, &m, &e), BG_ARG);
    cr_expect_not_null(strstr(e.text, "--fast-math"), "%s", e.text);
    j.fast_math = false;
    cr_expect_eq(bg_plan_memory(&p, &j, &m, &e), BG_OK, "%s", e.text);
    bg_gguf_close(m.gguf);
    bg_job_release(&j);
}

Test(options, flags_in_all_spellings)
{
    bg_job j;
    bg_error e = {0};
    cr_assert_eq(
        resolve(&j, &e, BG_CMD_RUN, no_env,
                "a.jsonl -o out --max-num-seqs=7 --temp 0.5 -n 12 --no-prefix-cache b.jsonl "
                "--stop x --stop y --commit-bytes 2KiB --compute f32 --tp 2 -q"),
        BG_OK, "%s", e.text);
    cr_expect_eq(j.inputs.n, 2);
    cr_expect_str_eq(j.inputs.v[1], "b.jsonl");
    cr_expect_eq(j.max_num_seqs, 7);
    cr_expect_eq(j.temperature, 0.5);
    cr_expect_eq(j.max_tokens, 12);
    cr_expect_not(j.prefix_cache);
    cr_expect_eq(j.stop.n, 2);
    cr_expect_eq(j.commit_bytes, 2048);
    cr_expect_eq(j.compute, BG_COMPUTE_F32);
    cr_expect_eq(j.tp, 2);
    cr_expect(j.quiet);
    bg_job_release(&j);
}

Test(options, defaults)
{
    bg_job j;
    bg_error e = {0};
    cr_assert_eq(resolve(&j, &e, BG_CMD_RUN, no_env, ""), BG_OK);
    cr_expect_eq(j.temperature, 1);
    cr_expect_eq(j.max_num_seqs, 0); /* automatic */
    cr_expect(j.prefix_cache);
    cr_expect_eq(j.max_line, 64 << 20);
    cr_expect_null(j.model);
    bg_job_release(&j);
}

Test(options, what_is_refused)
{
    static const struct {
        const char *words, *says;
    } cases[] = {
        {"--nonsense", "--nonsense"},
        {"--top-p 1.5", "--top-p"},
        {"--top-p nan", "--top-p"},
        {"--top-k x", "whole number"},
        {"--max-line 3Q", "size"},
        {"--compute fast", "native,f32"},
        {"--tp", "must follow"},
        {"--no-tp", "--no-tp"},
        {"-z", "-z"},
        {"--batch 1", "no such"},
        {"--quiet=maybe", "neither"},
        {"--seed -1", "outside"},
        {"--max-num-seqs -1", "outside"},
        {"--no-quiet=true", "no value"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bg_job j;
        bg_error e = {0};
        cr_expect_eq(resolve(&j, &e, BG_CMD_RUN, no_env, cases[i].words), BG_ARG, "%s",
                     cases[i].words);
        cr_expect(strstr(e.text, cases[i].says), "%s: %s", cases[i].words, e.text);
        bg_job_release(&j);
    }
}

Test(options, flag_beats_environment_beats_file)
{
    char path[] = "/tmp/batchgen-job-XXXXXX";
    int fd = mkstemp(path);
    static const char text[] =
        "{\"top_k\": 1, \"min_p\": 0.25, \"seed\": 5, \"stop\": [\"a\", \"b\"], "
        "\"input\": \"in.jsonl\", \"max_line\": \"1MiB\"}";
    cr_assert_eq(write(fd, text, sizeof text - 1), (ssize_t)(sizeof text - 1));
    close(fd);
    char words[128], top_k[] = "BATCHGEN_TOP_K=2", seed[] = "BATCHGEN_SEED=6",
                     stop[] = "BATCHGEN_STOP=c";
    char *env[] = {top_k, seed, stop, NULL};
    snprintf(words, sizeof words, "--job %s --top-k 3", path);
    bg_job j;
    bg_error e = {0};
    cr_assert_eq(resolve(&j, &e, BG_CMD_RUN, env, words), BG_OK, "%s", e.text);
    cr_expect_eq(j.top_k, 3);
    cr_expect_eq(j.seed, 6);
    cr_expect_eq(j.min_p, 0.25);
    cr_expect_eq(j.max_line, 1 << 20);
    cr_expect_eq(j.stop.n, 1, "a list from a stronger source replaces a weaker one's");
    cr_expect_str_eq(j.stop.v[0], "c");
    cr_expect_str_eq(j.inputs.v[0], "/tmp/in.jsonl", "relative to the job file");
    bg_job_release(&j);
    unlink(path);
}

Test(options, bad_job_files)
{
    static const char *const texts[] = {"[]",
                                        "{\"nonsense\": 1}",
                                        "{\"top_k\": \"x\"}",
                                        "{\"top_p\": 7}",
                                        "{\"quiet\": 1}",
                                        "{\"stop\": [1]}",
                                        "{",
                                        "{\"seed\":1,\"seed\":2}",
                                        "{\"help\": true}",
                                        ""};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char path[] = "/tmp/batchgen-job-XXXXXX", words[128];
        int fd = mkstemp(path);
        cr_assert_eq(write(fd, texts[i], strlen(texts[i])), (ssize_t)strlen(texts[i]));
        close(fd);
        snprintf(words, sizeof words, "--job %s", path);
        bg_job j;
        bg_error e = {0};
        cr_expect_eq(resolve(&j, &e, BG_CMD_RUN, no_env, words), BG_FORMAT, "%s", texts[i]);
        cr_expect(strstr(e.text, path), "%s: %s", texts[i], e.text);
        bg_job_release(&j);
        unlink(path);
    }
}
