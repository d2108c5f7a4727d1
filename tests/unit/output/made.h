/* Outputs made by the writer, for the tests of what reads, merges and repairs them. */
#ifndef BG_TEST_OUTPUT_MADE_H
#define BG_TEST_OUTPUT_MADE_H

#include "base/io.h"
#include "output/output.h"
#include "unit/output/scratch.h"

#define UNUSED __attribute__((unused))

typedef struct plan {
    int n, every;     /* records 0 to n - 1, a commit after each `every` of them */
    int index, count; /* of them, only those of a shard; count 0: all */
    bool errors;      /* with an error file, PATH.errors */
    bool unfinished;  /* no end entry */
    int temperature;  /* something of the identity */
    int input;        /* which one */
    bg_out_format format;
} plan;

/* Record r's line; every fifth is an error. */
UNUSED static void put_result(bg_buf *b, int r)
{
    if (r % 5 == 4)
        bg_buf_printf(b, "{\"line\":%d,\"id\":\"id%d\",\"error\":{\"code\":\"x\"}}\n", r + 1, r);
    else
        bg_buf_printf(b,
                      "{\"line\":%d,\"id\":\"id%d\",\"text\":\"%.*s\",\"usage\":{\"prompt_tokens\":"
                      "%d,\"completion_tokens\":2}}\n",
                      r + 1, r, r % 17, "abcdefghijklmnop", r + 1);
}

UNUSED static uint64_t key_of(int r)
{
    char id[24];
    snprintf(id, sizeof id, "\"id%d\"", r);
    return bg_result_key(id, (uint64_t)r * UINT64_C(0x9e3779b97f4a7c15));
}

UNUSED static json_t *identity_of(const plan *p)
{
    char shard[32] = "";
    if (p->count) snprintf(shard, sizeof shard, "%d/%d", p->index + 1, p->count);
    return json_pack("{ss si}", "shard", shard, "temperature", p->temperature);
}

UNUSED static bg_status open_made(bg_writer **w, const char *path, const plan *p, bg_recovered *rec,
                                  bg_error *err)
{
    char errors[96];
    snprintf(errors, sizeof errors, "%s.errors", path);
    json_t *identity = identity_of(p);
    const bg_writer_config c = {.path = path,
                                .error_path = p->errors ? errors : NULL,
                                .format = p->format,
                                .identity = identity,
                                .started_s = 1000 + p->index,
                                .commit_bytes = 1 << 20,
                                .commit_ns = INT64_MAX};
    bg_status st = bg_writer_open(w, &c, rec, err);
    if (!st) st = bg_writer_begin(*w, err);
    json_decref(identity);
    return st;
}

UNUSED static void add_made(bg_writer *w, int r)
{
    bg_error err = {0};
    bg_buf b = {0};
    put_result(&b, r);
    const bg_done d = {.record = r,
                       .key = key_of(r),
                       .failed = r % 5 == 4,
                       .prompt_tokens = r % 5 == 4 ? 0 : r + 1,
                       .output_tokens = r % 5 == 4 ? 0 : 2};
    cr_assert_eq(bg_writer_add(w, &d, b.data, b.len, &err), BG_OK, "%s", err.text);
    bg_buf_release(&b);
}

UNUSED static void make_output(const char *path, const plan *p)
{
    bg_writer *w;
    bg_recovered rec;
    bg_error err = {0};
    cr_assert_eq(open_made(&w, path, p, &rec, &err), BG_OK, "%s", err.text);
    int n = 0;
    for (int r = 0; r < p->n; r++) {
        if (p->count && r % p->count != p->index) continue;
        add_made(w, r);
        const bg_input_place place = {.end = (uint64_t)r * 10 + 10,
                                      .hash = (uint64_t)(r + p->input),
                                      .read = (uint64_t)r * 10 + 10,
                                      .total = (uint64_t)p->n * 10,
                                      .records = r + 1};
        bg_writer_input(w, &place);
        if (++n % p->every == 0) cr_assert_eq(bg_writer_commit(w, &err), BG_OK, "%s", err.text);
    }
    cr_assert_eq(p->unfinished ? bg_writer_commit(w, &err) : bg_writer_finish(w, &err), BG_OK, "%s",
                 err.text);
    bg_writer_close(w);
}

typedef struct bytes {
    char *data;
    size_t n;
} bytes;

UNUSED static bytes load(const char *path)
{
    bytes b = {0};
    bg_error err = {0};
    cr_assert_eq(bg_read_file(path, 1 << 28, &b.data, &b.n, &err), BG_OK, "%s", err.text);
    return b;
}

UNUSED static const char *name_in(const char *suffix)
{
    static char name[4][128];
    static int i;
    i = (i + 1) % 4;
    snprintf(name[i], sizeof name[i], "%s%s", out_path, suffix);
    return name[i];
}

#endif
