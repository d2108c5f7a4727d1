/* Split models: PREFIX-00001-of-00003.gguf and so on, in one directory.
 *
 * Every part is a whole GGUF file with its own tensors and data, and says split.no (from 0) and
 * split.count. Part 0 also has the model's metadata and split.tensors.count, the total. */
#include "gguf/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARTS = 99999, SUFFIX_BYTES = 32 };

static void make_suffix(char out[SUFFIX_BYTES], int64_t no, int64_t count)
{
    snprintf(out, SUFFIX_BYTES, "-%05d-of-%05d.gguf", (int)no + 1, (int)count);
}

static bg_status get_split(const kv_set *meta, const char *file, int64_t *no, int64_t *count,
                           bg_error *err)
{
    *no = 0;
    *count = 1;
    const bg_kv *kv = kv_set_find(meta, "split.count");
    if (!kv) return BG_OK;
    if (!gguf_small_int(meta, "split.count", count) || *count < 0 || *count > MAX_PARTS)
        return bg_fail(err, BG_FORMAT, "%s: key split.count is no number of parts; damaged", file);
    if (*count <= 1) { /* what the merge tool leaves */
        *count = 1;
        return BG_OK;
    }
    if (!gguf_small_int(meta, "split.no", no) || *no < 0 || *no >= *count)
        return bg_fail(err, BG_FORMAT,
                       "%s: key split.no is not a number from 0 to %lld, as split.count asks", file,
                       (long long)*count - 1);
    return BG_OK;
}

/* Opens part i of n and checks that it says so itself. Part 0's metadata is the model's. */
static bg_status open_part(bg_gguf *g, const char *path, int64_t i, int64_t n, bg_error *err)
{
    kv_set meta = {0};
    int64_t no, count;
    bg_status st = gguf_map_part(g, path, err);
    if (!st) st = gguf_parse_part(g, (int)i, &meta, err);
    if (!st) st = get_split(&meta, path, &no, &count, err);
    if (!st && (no != i || count != n))
        st = bg_fail(err, BG_FORMAT,
                     "%s: says it is part %lld of %lld, its name says %lld of %lld; rename it or "
                     "fetch it again",
                     path, (long long)no + 1, (long long)count, (long long)i + 1, (long long)n);
    if (i == 0) {
        g->meta = meta;
        return st;
    }
    kv_set_release(&meta);
    if (st)
        bg_wrap(err, "part %lld of %lld of a split model, all of which must lie in one directory",
                (long long)i + 1, (long long)n);
    return st;
}

bg_status gguf_open_siblings(bg_gguf *g, bg_error *err)
{
    int64_t no, n, total;
    char suffix[SUFFIX_BYTES];
    char *path = NULL;
    bg_status st = get_split(&g->meta, g->parts[0].path, &no, &n, err);
    if (st || n == 1) return st;
    path = strdup(g->parts[0].path);
    if (!path) return bg_fail(err, BG_NOMEM, "%s: out of memory", g->parts[0].path);
    make_suffix(suffix, no, n);
    size_t len = strlen(path), tail = strlen(suffix);
    if (len < tail || strcmp(path + len - tail, suffix) != 0) {
        st =
            bg_fail(err, BG_FORMAT,
                    "%s: part %lld of %lld of a split model, but its name does not end in '%s', so "
                    "the other parts cannot be found; rename it",
                    path, (long long)no + 1, (long long)n, suffix);
        goto out;
    }
    gguf_clear(g); /* starts over with part 0 */
    for (int64_t i = 0; i < n && !st; i++) {
        make_suffix(suffix, i, n);
        memcpy(path + len - tail, suffix, tail);
        st = open_part(g, path, i, n, err);
    }
    if (!st && gguf_small_int(&g->meta, "split.tensors.count", &total) && total != g->n_tensors)
        st = bg_fail(err, BG_FORMAT,
                     "%s: split.tensors.count is %lld, but the %lld parts have %lld tensors; some "
                     "part is of another model",
                     g->parts[0].path, (long long)total, (long long)n, (long long)g->n_tensors);
out:
    free(path);
    return st;
}
