/* Shapes that `bench --tune-out` wrote to a file: for the same sizes of linears they come before
 * the table. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/tune_table.h"

struct bg_cuda_pick {
    int tiles, chunks, parts, formats, token_class, shape;
};

/* NULL: it is one. */
static const char *read_pick(const json_t *row, struct bg_cuda_pick *p)
{
    const char *shape;
    int from;
    if (json_unpack((json_t *)row, "{si si si si si ss}", "tiles", &p->tiles, "chunks", &p->chunks,
                    "parts", &p->parts, "formats", &p->formats, "from", &from, "shape", &shape))
        return "whole numbers tiles, chunks, parts, formats and from, and a text shape are needed";
    p->token_class = bgk_token_class(from);
    if (from != (p->token_class ? bgk_class_most(p->token_class - 1) + 1 : 1))
        return "from: no class of steps begins there";
    for (p->shape = 0; p->shape < BGK_SHAPES; p->shape++)
        if (strcmp(shape, bg_cuda_shape_name((bgk_shape)p->shape)) == 0) return NULL;
    return "shape: there is no such one";
}

bg_status bg_cuda_picks_read(bg_cuda *c, const char *path, bg_error *err)
{
    json_error_t e;
    json_t *o = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    if (!o) return bg_fail(err, BG_ARG, "%s: %s", path, e.text);
    const json_t *rows = json_object_get(o, "rows");
    const size_t n = json_array_size(rows);
    bg_status st = BG_OK;
    if (!json_is_array(rows) || n > INT32_MAX)
        st = bg_fail(err, BG_ARG, "%s: no array \"rows\", as bench --tune-out writes it", path);
    c->picks = st ? NULL : calloc(n + 1, sizeof *c->picks);
    if (!st && !c->picks) st = bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    for (size_t i = 0; !st && c->picks && i < n; i++) {
        const char *wrong = read_pick(json_array_get(rows, i), &c->picks[i]);
        if (wrong) st = bg_fail(err, BG_ARG, "%s: rows[%zu]: %s", path, i, wrong);
        if (!wrong) c->n_picks++;
    }
    json_decref(o);
    return st;
}

int bg_cuda_picked(const bg_cuda *c, const bgk_weights *w, int token_class)
{
    for (int i = 0; i < c->n_picks; i++) {
        const struct bg_cuda_pick *p = &c->picks[i];
        if (p->tiles == w->n_tiles && p->chunks == w->n_chunks && p->parts == w->splits &&
            (unsigned)p->formats == w->formats && p->token_class == token_class)
            return 1 + p->shape;
    }
    return 0;
}
