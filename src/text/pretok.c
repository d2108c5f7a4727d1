#include "text/pretok.h"

#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/buf.h"

struct bg_pretok {
    int n;
    pcre2_code *code[BG_PRETOK_STAGES];
    bg_pretok_cut cut[BG_PRETOK_STAGES];
    pcre2_match_context *limits;
};

struct bg_pretok_scratch {
    int n;
    pcre2_match_data *match[BG_PRETOK_STAGES];
};

/* Unicode White_Space as the insides of a class. PCRE2's own \s also takes U+180E. */
#define SPACES                                                                                  \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{" \
    "205f}"                                                                                     \
    "\\x{3000}"

static void translate(bg_buf *out, const char *re)
{
    bool in_class = false;
    for (; *re; re++) {
        if (*re == '[' && !in_class) {
            in_class = true;
            bg_buf_char(out, '[');
            if (re[1] == '^') bg_buf_char(out, *++re);
        } else if (*re == ']') {
            in_class = false;
            bg_buf_char(out, ']');
        } else if (*re != '\\') {
            bg_buf_char(out, *re);
        } else {
            const char c = *++re;
            if (c == 's')
                bg_buf_str(out, in_class ? SPACES : "[" SPACES "]");
            else if (c == 'S') /* in the listings never inside a class */
                bg_buf_str(out, "[^" SPACES "]");
            else if (c == 'd')
                bg_buf_str(out, in_class ? "0-9" : "[0-9]");
            else if (c == 'u' || c == 'U') {
                const int digits = c == 'u' ? 4 : 8;
                bg_buf_printf(out, "\\x{%.*s}", digits, re + 1);
                re += digits;
            } else {
                bg_buf_char(out, '\\');
                bg_buf_char(out, c);
            }
        }
    }
}

static bg_status compile(pcre2_code **code, const bg_pre *pre, const char *regex, bg_error *err)
{
    bg_buf re = {0};
    translate(&re, regex);
    if (re.failed) {
        bg_buf_release(&re);
        return bg_fail(err, BG_NOMEM, "pre-tokeniser %s: out of memory", pre->name);
    }
    int number;
    PCRE2_SIZE where;
    *code = pcre2_compile((PCRE2_SPTR)re.data, re.len, PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK,
                          &number, &where, NULL);
    bg_buf_release(&re);
    if (!*code) {
        if (number == PCRE2_ERROR_HEAP_FAILED)
            return bg_fail(err, BG_NOMEM, "pre-tokeniser %s: out of memory", pre->name);
        char text[128] = "";
        pcre2_get_error_message(number, (PCRE2_UCHAR *)text, sizeof text);
        return bg_fail(err, BG_INTERNAL, "pre-tokeniser %s: %s at %zu of \"%s\"", pre->name, text,
                       (size_t)where, regex);
    }
    /* Where PCRE2 was built without JIT, or the system forbids it, matching is only slower. */
    pcre2_jit_compile(*code, PCRE2_JIT_COMPLETE);
    return BG_OK;
}

bg_status bg_pretok_new(bg_pretok **t, const bg_pre *pre, bg_error *err)
{
    bg_status st = BG_OK;
    *t = NULL;
    bg_pretok *p = calloc(1, sizeof *p);
    if (p) p->limits = pcre2_match_context_create(NULL);
    if (!p || !p->limits) {
        st = bg_fail(err, BG_NOMEM, "pre-tokeniser %s: out of memory", pre->name);
        goto out;
    }
    /* Each regex needs a number of steps in proportion to the text; PCRE2's default limit would
     * refuse long lines. */
    pcre2_set_match_limit(p->limits, UINT32_MAX);
    for (; p->n < BG_PRETOK_STAGES && pre->stages[p->n].regex; p->n++) {
        p->cut[p->n] = pre->stages[p->n].cut;
        st = compile(&p->code[p->n], pre, pre->stages[p->n].regex, err);
        if (st) goto out;
    }
    *t = p;
    p = NULL;
out:
    bg_pretok_free(p);
    return st;
}

void bg_pretok_free(bg_pretok *t)
{
    if (!t) return;
    for (int i = 0; i < BG_PRETOK_STAGES; i++)
        pcre2_code_free(t->code[i]);
    pcre2_match_context_free(t->limits);
    free(t);
}

bg_pretok_scratch *bg_pretok_scratch_new(const bg_pretok *t)
{
    bg_pretok_scratch *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    for (; s->n < t->n; s->n++) {
        s->match[s->n] = pcre2_match_data_create(1, NULL);
        if (!s->match[s->n]) {
            bg_pretok_scratch_free(s);
            return NULL;
        }
    }
    return s;
}

void bg_pretok_scratch_free(bg_pretok_scratch *s)
{
    if (!s) return;
    for (int i = 0; i < s->n; i++)
        pcre2_match_data_free(s->match[i]);
    free(s);
}

typedef struct splitter {
    const bg_pretok *t;
    bg_pretok_scratch *s;
    bg_pretok_emit *emit;
    void *ctx;
    bg_error *err;
} splitter;

static bg_status split(const splitter *sp, int stage, const char *p, size_t n);

/* Ends the piece that began at *from. */
static bg_status cut_at(const splitter *sp, int stage, const char *p, size_t *from, size_t at)
{
    if (at == *from) return BG_OK;
    const char *piece = p + *from;
    const size_t n = at - *from;
    *from = at;
    return split(sp, stage + 1, piece, n);
}

static bool is_char_start(char c)
{
    return ((unsigned char)c & 0xc0) != 0x80;
}

/* Cuts inside the match [a, b) of a stage that forms groups of three from the right. */
static bg_status cut_thirds(const splitter *sp, int stage, const char *p, size_t *from, size_t a,
                            size_t b)
{
    const bg_pretok_cut how = sp->t->cut[stage];
    size_t left = 0; /* characters from i on */
    for (size_t i = a; i < b; i++)
        left += is_char_start(p[i]);
    bg_status st = BG_OK;
    if (how == BG_CUT_THIRDS || left % 3 == 0) st = cut_at(sp, stage, p, from, a);
    for (size_t i = a; i < b && !st; i++) {
        if (!is_char_start(p[i])) continue;
        if (left % 3 == 0 && i > a) st = cut_at(sp, stage, p, from, i);
        left--;
    }
    if (!st && how == BG_CUT_THIRDS) st = cut_at(sp, stage, p, from, b);
    return st;
}

static bg_status split(const splitter *sp, int stage, const char *p, size_t n)
{
    if (stage == sp->t->n) return sp->emit(sp->ctx, p, n, sp->err);
    pcre2_match_data *m = sp->s->match[stage];
    bg_status st = BG_OK;
    size_t from = 0, at = 0;
    while (!st && at < n) {
        int rc = pcre2_match(sp->t->code[stage], (PCRE2_SPTR)p, n, at, PCRE2_NO_UTF_CHECK, m,
                             sp->t->limits);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
            rc = pcre2_match(sp->t->code[stage], (PCRE2_SPTR)p, n, at,
                             PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, m, sp->t->limits);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) {
            char text[128] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)text, sizeof text);
            return bg_fail(sp->err, rc == PCRE2_ERROR_NOMEMORY ? BG_NOMEM : BG_INTERNAL,
                           "pre-tokeniser, stage %d, text of %zu bytes: %s", stage + 1, n, text);
        }
        const PCRE2_SIZE *v = pcre2_get_ovector_pointer(m);
        const size_t a = v[0], b = v[1];
        if (b <= at) /* no listing has a regex that matches nothing; do not loop on one */
            return bg_fail(sp->err, BG_INTERNAL, "pre-tokeniser, stage %d: empty match", stage + 1);
        at = b;
        if (sp->t->cut[stage] != BG_CUT_MATCH) {
            st = cut_thirds(sp, stage, p, &from, a, b);
        } else {
            st = cut_at(sp, stage, p, &from, a);
            if (!st) st = cut_at(sp, stage, p, &from, b);
        }
    }
    return st ? st : cut_at(sp, stage, p, &from, n);
}

bg_status bg_pretok_split(const bg_pretok *t, bg_pretok_scratch *s, const char *text, size_t n,
                          bg_pretok_emit *emit, void *ctx, bg_error *err)
{
    const splitter sp = {t, s, emit, ctx, err};
    return n == 0 ? BG_OK : split(&sp, 0, text, n);
}
