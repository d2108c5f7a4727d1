#include "text/tok.h"

#include <stdlib.h>
#include <string.h>

size_t bg_char_bytes(const char *p, size_t n)
{
    const unsigned char c = (unsigned char)*p;
    const size_t len = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    return len < n ? len : n;
}

static bg_status fragments(bg_tok *t, const char *text, const bg_fragments *f, bg_error *err)
{
    bg_status st = BG_OK;
    bool after_special = true; /* the text's beginning counts */
    for (size_t i = 0; i < f->n && !st; i++) {
        const bg_fragment x = f->v[i];
        if (x.id >= 0) {
            bg_ids_add(t->ids, x.id);
        } else if (t->v->spm) {
            st = bg_spm_text(t, text + x.at, x.n, t->v->space_prefix && after_special, err);
        } else {
            st = bg_bpe_text(t, text + x.at, x.n, err);
        }
        after_special = x.id >= 0;
    }
    return st;
}

bg_status bg_tokenize_count(const bg_vocab *v, const bg_segment *segs, size_t n_segs,
                            bool add_special, bg_ids *ids, uint64_t *steps, bg_error *err)
{
    bg_status st = BG_OK;
    bg_tok t = {.v = v, .ids = ids};
    bg_fragments frags = {0};
    bg_buf joined = {0};
    size_t n = 0;
    for (size_t i = 0; i < n_segs; i++) {
        if (segs[i].n > INT32_MAX - n)
            return bg_fail(err, BG_ARG, "text of over %d bytes: too long to tokenise", INT32_MAX);
        n += segs[i].n;
    }
    /* One text: where a segment ends decides what may be a control token, but words and merges run
     * across, as they do when the whole prompt is tokenised. */
    const char *text = n_segs == 1 ? segs[0].p : "";
    if (n_segs > 1) {
        if (!bg_buf_reserve(&joined, n + 1)) goto nomem;
        for (size_t i = 0; i < n_segs; i++)
            bg_buf_add(&joined, segs[i].p, segs[i].n);
        if (joined.failed) goto nomem;
        if (joined.data) text = joined.data;
    }
    st = bg_special_split(v->special, v, text, segs, n_segs, &frags, err);
    if (st) goto out;
    if (v->pretok) {
        t.pretok = bg_pretok_scratch_new(v->pretok);
        if (!t.pretok) goto nomem;
    }
    if (add_special && v->add_bos && v->bos >= 0 && (frags.n == 0 || frags.v[0].id != v->bos))
        bg_ids_add(ids, v->bos);
    st = fragments(&t, text, &frags, err);
    if (st) goto out;
    if (add_special && v->add_eos && v->eos >= 0) bg_ids_add(ids, v->eos);
    if (ids->failed) goto nomem;
    *steps += t.merger.steps;
    goto out;
nomem:
    st = bg_fail(err, BG_NOMEM, "tokenising %zu bytes: out of memory", n);
out:
    bg_merger_release(&t.merger);
    bg_pretok_scratch_free(t.pretok);
    bg_buf_release(&t.text);
    bg_buf_release(&joined);
    free(frags.v);
    return st;
}

bg_status bg_tokenize(const bg_vocab *v, const bg_segment *segs, size_t n_segs, bool add_special,
                      bg_ids *ids, bg_error *err)
{
    uint64_t steps = 0;
    return bg_tokenize_count(v, segs, n_segs, add_special, ids, &steps, err);
}
