/* bench_output - an unfinished output of any size, to measure how long going on with it takes.
 *
 *     batchgen run IN -o OUT -m MODEL --limit 1      # makes the journal with the job's identity
 *     bench_output IN OUT BYTES                      # fills OUT to BYTES of results
 *     batchgen run IN -o OUT -m MODEL                # goes on after all of them
 *
 * The results are made up: words that compress as text does. Each has its record's id and key, and
 * all but the last record of the input can get one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "input/input.h"
#include "output/output.h"

static void words(bg_buf *b, uint64_t seed, int n)
{
    for (int i = 0; i < n; i++) {
        uint32_t r = (uint32_t)bg_mix64(seed + (uint64_t)i);
        bg_buf_printf(b, "%s%x", i % 12 ? " " : ". ", r % (i % 3 ? 997 : 65521));
    }
}

static bg_status add(bg_writer *w, const bg_line *line, int n_words, bg_buf *text, bg_buf *out,
                     bg_error *err)
{
    bg_request req;
    bg_gen defaults;
    bg_gen_defaults(&defaults);
    bg_status st = bg_request_parse(&req, line, &defaults, NULL, err);
    if (!st) {
        bg_buf_clear(text);
        bg_buf_clear(out);
        words(text, (uint64_t)line->record << 20, n_words);
        const bg_choice choice = {
            .text = text->data, .n_text = text->len, .finish_reason = "stop", .stop_id = -1};
        const bg_result r = {.record = line->record,
                             .line = line->line,
                             .openai = req.openai,
                             .chat = req.api == BG_API_CHAT,
                             .id = req.id,
                             .model = "made up",
                             .fingerprint = "0",
                             .choices = &choice,
                             .n_choices = 1};
        bg_result_line(&r, out);
        const bg_done what = {.record = line->record,
                              .key = bg_result_key(req.id, req.content_hash),
                              .output_tokens = n_words};
        st = bg_writer_add(w, &what, out->data, out->len, err);
        bg_writer_input(w, &(bg_input_place){
                               .end = line->end, .hash = line->hash, .records = line->record + 1});
    }
    bg_request_release(&req);
    return st;
}

static bg_status fill(bg_input *in, bg_writer *w, uint64_t bytes, int n_words, bg_error *err)
{
    bg_buf text = {0}, out = {0};
    bg_status st = BG_OK;
    bool got = true;
    uint64_t text_bytes = 0, file_bytes = 0, commits;
    while (!st && got && file_bytes < bytes) {
        bg_line line;
        st = bg_input_next(in, &line, &got, err);
        if (!st && got && !bg_writer_done(w, line.record))
            st = add(w, &line, n_words, &text, &out, err);
        bg_writer_sizes(w, &text_bytes, &file_bytes, &commits);
    }
    int64_t failed, n = bg_writer_count(w, &failed);
    if (!st) st = bg_writer_commit(w, err);
    bg_writer_sizes(w, &text_bytes, &file_bytes, &commits);
    int64_t cpu_ns, ns = bg_writer_commit_ns(w, &cpu_ns);
    printf("%lld results, %llu bytes of text in %llu, %llu commits in %.2f s, %.2f s of it "
           "computing\n",
           (long long)n, (unsigned long long)text_bytes, (unsigned long long)file_bytes,
           (unsigned long long)commits, (double)ns * 1e-9, (double)cpu_ns * 1e-9);
    bg_buf_release(&text);
    bg_buf_release(&out);
    return st;
}

int main(int argc, char **argv)
{
    bg_error err = {0};
    json_t *identity = NULL;
    int64_t started;
    bg_input *in = NULL;
    bg_writer *w = NULL;
    if (argc < 4) {
        fputs("usage: bench_output IN OUT BYTES [WORDS]\n", stderr);
        return 64;
    }
    size_t n = strlen(argv[2]);
    bg_status st = bg_out_first(argv[2], &identity, &started, &err);
    if (!st && !identity) st = bg_fail(&err, BG_ARG, "%s: has no journal", argv[2]);
    const bg_writer_config c = {.path = argv[2],
                                .format = n > 4 && !strcmp(argv[2] + n - 4, ".lz4") ? BG_OUT_LZ4
                                                                                    : BG_OUT_PLAIN,
                                .identity = identity,
                                .started_s = started};
    bg_recovered rec;
    if (!st) st = bg_writer_open(&w, &c, &rec, &err);
    if (!st) st = bg_input_open(&in, (const char *const[]){argv[1]}, 1, 64 << 20, &err);
    if (!st) st = fill(in, w, strtoull(argv[3], NULL, 10), argc > 4 ? atoi(argv[4]) : 400, &err);
    if (st) fprintf(stderr, "bench_output: %s\n", err.text);
    bg_writer_close(w);
    bg_input_close(in);
    json_decref(identity);
    return st ? 70 : 0;
}
