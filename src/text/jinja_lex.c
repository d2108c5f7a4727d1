#include "text/jinja_lex.h"

#include <string.h>

#include "base/utf8.h"
#include "text/jinja_unicode.h"

void jn_lex_init(jn_lexer *lx, const char *src, size_t n)
{
    *lx = (jn_lexer){.src = src, .end = src + n, .at = src, .line_start = true};
}

static bool starts(const jn_lexer *lx, const char *p, const char *text)
{
    size_t n = strlen(text);
    return (size_t)(lx->end - p) >= n && memcmp(p, text, n) == 0;
}

static jn_token error(jn_lexer *lx, const char *at, const char *message)
{
    lx->at = at;
    return (jn_token){.kind = JN_T_ERROR, .p = message, .n = strlen(message)};
}

/* ---- text between tags ---- */

static size_t space_at(const jn_lexer *lx, const char *p)
{
    uint32_t cp;
    size_t n = bg_utf8_next(p, (size_t)(lx->end - p), &cp);
    return cp != BG_UTF8_BAD && jn_is_space(cp) ? n : 0;
}

static const char *skip_space(const jn_lexer *lx, const char *p)
{
    for (size_t k; p < lx->end && (k = space_at(lx, p)); p += k) {
    }
    return p;
}

/* The end of from..to without the white space before it. */
static const char *strip_right(const jn_lexer *lx, const char *from, const char *to)
{
    const char *end = from;
    for (const char *p = from; p < to;) {
        size_t k = space_at(lx, p);
        if (k) {
            p += k;
            continue;
        }
        uint32_t cp;
        p += bg_utf8_next(p, (size_t)(to - p), &cp);
        end = p;
    }
    return end;
}

/* The text from..tag without what the tag's sign, or lstrip_blocks, takes off its end. */
static const char *strip_before(const jn_lexer *lx, const char *from, const char *tag, char sign,
                                bool is_var)
{
    if (sign == '-') return strip_right(lx, from, tag);
    if (sign == '+' || is_var || tag == from) return tag;
    const char *nl = memrchr(from, '\n', (size_t)(tag - from));
    if (!nl && !lx->line_start) return tag;
    const char *line = nl ? nl + 1 : from;
    return skip_space(lx, line) >= tag ? line : tag;
}

/* After a block tag or comment: its newline (trim_blocks), or with `-` all white space. */
static void after_tag(jn_lexer *lx, const char *p, char sign, bool trim)
{
    if (sign == '-') {
        const char *q = skip_space(lx, p);
        lx->line_start = q > p && q[-1] == '\n';
        lx->at = q;
        return;
    }
    bool newline = trim && sign != '+' && p < lx->end && *p == '\n';
    lx->at = p + newline;
    lx->line_start = newline;
}

static char sign_at(const jn_lexer *lx, const char *p)
{
    return p < lx->end && (*p == '-' || *p == '+') ? *p : 0;
}

/* If p..., just after `{%` and its sign, is WORD and then the end of the tag, that end; else NULL.
 */
static const char *whole_tag(const jn_lexer *lx, const char *p, const char *word, char *sign)
{
    p = skip_space(lx, p);
    if (!starts(lx, p, word)) return NULL;
    p = skip_space(lx, p + strlen(word));
    *sign = sign_at(lx, p);
    if (*sign) p++;
    return starts(lx, p, "%}") ? p + 2 : NULL;
}

static jn_token data(const char *from, const char *to)
{
    return (jn_token){.kind = JN_T_DATA, .p = from, .n = (size_t)(to - from)};
}

/* From just behind {% raw %} to behind {% endraw %}. */
static jn_token raw(jn_lexer *lx, const char *from)
{
    for (const char *p = from; (p = memmem(p, (size_t)(lx->end - p), "{%", 2)); p++) {
        char sign = sign_at(lx, p + 2), end_sign;
        const char *end = whole_tag(lx, p + 2 + (sign != 0), "endraw", &end_sign);
        if (!end) continue;
        const char *to = strip_before(lx, from, p, sign, false);
        after_tag(lx, end, end_sign, true);
        return data(from, to);
    }
    return error(lx, from, "missing end of raw directive");
}

/* The next `{{`, `{%` or `{#`, or the end. */
static const char *find_tag(const jn_lexer *lx, const char *p)
{
    while ((p = memchr(p, '{', (size_t)(lx->end - p)))) {
        if (p + 1 < lx->end && (p[1] == '{' || p[1] == '%' || p[1] == '#')) return p;
        p++;
    }
    return lx->end;
}

static jn_token comment(jn_lexer *lx, const char *from)
{
    const char *end = memmem(from, (size_t)(lx->end - from), "#}", 2);
    if (!end) return error(lx, from, "missing end of comment tag");
    char sign = end > from && (end[-1] == '-' || end[-1] == '+') ? end[-1] : 0;
    after_tag(lx, end + 2, sign, true);
    return data(from, from);
}

static jn_token lex_data(jn_lexer *lx)
{
    const char *from = lx->at, *tag = find_tag(lx, from);
    if (tag == lx->end) {
        lx->at = tag;
        return tag == from ? (jn_token){.kind = JN_T_EOF, .p = tag} : data(from, tag);
    }
    char kind = tag[1], sign = sign_at(lx, tag + 2);
    const char *inside = tag + 2 + (sign != 0);
    jn_token text = data(from, strip_before(lx, from, tag, sign, kind == '{'));
    jn_token next = {.p = tag, .n = 2};
    char end_sign;
    const char *raw_body = kind == '%' ? whole_tag(lx, inside, "raw", &end_sign) : NULL;
    lx->line_start = false;
    if (raw_body && end_sign != '+') {
        if (end_sign == '-') {
            const char *q = skip_space(lx, raw_body);
            lx->line_start = q > raw_body && q[-1] == '\n';
            raw_body = q;
        }
        next = raw(lx, raw_body);
    } else if (kind == '#') {
        next = comment(lx, inside);
    } else {
        next.kind = kind == '{' ? JN_T_VAR_BEGIN : JN_T_BLOCK_BEGIN;
        lx->in = kind == '{' ? JN_IN_VAR : JN_IN_BLOCK;
        lx->at = inside;
    }
    if (text.n == 0) return next;
    lx->queued = next;
    lx->has_queued = true;
    return text;
}

/* ---- inside a tag ---- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_name(const jn_lexer *lx, const char *p, size_t *n)
{
    uint32_t cp;
    *n = bg_utf8_next(p, (size_t)(lx->end - p), &cp);
    return cp != BG_UTF8_BAD && (cp == '_' || jn_is_letter(cp) || jn_digit(cp) >= 0);
}

/* Digits with single underscores between them. */
static const char *digits(const jn_lexer *lx, const char *p, const char *set)
{
    const char *q = p;
    while (q < lx->end && *q && strchr(set, *q)) {
        p = ++q;
        if (q < lx->end && *q == '_') q++;
    }
    return p;
}

static jn_token number(jn_lexer *lx)
{
    static const char dec[] = "0123456789";
    const char *p = lx->at;
    jn_token t = {.kind = JN_T_INT, .p = p};
    const char *q = digits(lx, p, dec), *frac = q;
    bool after_dot = p > lx->src && p[-1] == '.';
    if (!after_dot && starts(lx, q, ".") && digits(lx, q + 1, dec) > q + 1)
        frac = digits(lx, q + 1, dec);
    if (!after_dot && frac < lx->end && (*frac | 32) == 'e') {
        const char *exp = frac + 1;
        if (exp < lx->end && (*exp == '+' || *exp == '-')) exp++;
        if (digits(lx, exp, dec) > exp) frac = digits(lx, exp, dec);
    }
    if (frac > q) {
        t.kind = JN_T_FLOAT;
        q = frac;
    } else if (*p == '0') {
        char base = p + 1 < lx->end ? (char)(p[1] | 32) : 0;
        const char *set = base == 'x'   ? "0123456789abcdefABCDEF"
                          : base == 'o' ? "01234567"
                          : base == 'b' ? "01"
                                        : NULL;
        q = set ? p + 2 + (starts(lx, p + 2, "_")) : p;
        const char *e = digits(lx, q, set ? set : "0");
        q = e > q ? e : p + 1;
    }
    t.n = (size_t)(q - p);
    lx->at = q;
    return t;
}

static jn_token string(jn_lexer *lx)
{
    const char *p = lx->at;
    for (const char *q = p + 1; q < lx->end; q++) {
        if (*q == '\\') {
            q++;
        } else if (*q == *p) {
            lx->at = q + 1;
            return (jn_token){.kind = JN_T_STRING, .p = p, .n = (size_t)(q + 1 - p)};
        }
    }
    return error(lx, p, "a string is not closed");
}

static jn_token punctuation(jn_lexer *lx)
{
    static const struct {
        char text[3];
        int op;
    } two[] = {{"==", JN_OP_EQ}, {"!=", JN_OP_NE},       {"<=", JN_OP_LE},
               {">=", JN_OP_GE}, {"//", JN_OP_FLOORDIV}, {"**", JN_OP_POW}};
    const char *p = lx->at;
    jn_token t = {.kind = JN_T_OP, .op = (unsigned char)*p, .p = p, .n = 1};
    for (size_t i = 0; i < sizeof two / sizeof *two; i++) {
        if (!starts(lx, p, two[i].text)) continue;
        t.op = two[i].op;
        t.n = 2;
    }
    if (!*p || !strchr("+-/*%~[](){}=<>.:|,;!", *p) || t.op == '!')
        return error(lx, p, "unexpected character");
    if (strchr("([{", *p)) {
        if (lx->n_open == JN_MAX_BRACKETS) return error(lx, p, "brackets are nested too deeply");
        lx->closers[lx->n_open++] = *p == '(' ? ')' : *p == '[' ? ']' : '}';
    } else if (strchr(")]}", *p)) {
        if (lx->n_open == 0) return error(lx, p, "a bracket closes what is not open");
        if (lx->closers[--lx->n_open] != *p) return error(lx, p, "brackets do not match");
    }
    lx->at = p + t.n;
    return t;
}

/* The end of the tag we are in, if it is here: `-}}`, `}}`, `-%}`, `+%}`, `%}`. */
static bool tag_end(jn_lexer *lx, jn_token *t)
{
    const char *p = lx->at;
    bool var = lx->in == JN_IN_VAR;
    char sign = sign_at(lx, p);
    if (lx->n_open || (var && sign == '+')) return false;
    const char *q = p + (sign != 0);
    if (!starts(lx, q, var ? "}}" : "%}")) return false;
    *t = (jn_token){.kind = var ? JN_T_VAR_END : JN_T_BLOCK_END, .p = p};
    t->n = (size_t)(q + 2 - p);
    lx->in = JN_IN_DATA;
    after_tag(lx, q + 2, sign, !var);
    return true;
}

static jn_token lex_tag(jn_lexer *lx)
{
    jn_token t;
    for (;;) { /* as the end of a tag is looked for at every token, so after white space too */
        if (lx->at == lx->end) return (jn_token){.kind = JN_T_EOF, .p = lx->end};
        if (tag_end(lx, &t)) return t;
        const char *p = skip_space(lx, lx->at);
        if (p == lx->at) break;
        lx->at = p;
    }
    const char *p = lx->at;
    size_t n;
    if (is_digit(*p)) return number(lx);
    if (*p == '\'' || *p == '"') return string(lx);
    if (!is_name(lx, p, &n)) return punctuation(lx);
    while (lx->at < lx->end && is_name(lx, lx->at, &n))
        lx->at += n;
    return (jn_token){.kind = JN_T_NAME, .p = p, .n = (size_t)(lx->at - p)};
}

jn_token jn_lex_next(jn_lexer *lx)
{
    if (lx->has_queued) {
        lx->has_queued = false;
        return lx->queued;
    }
    return lx->in == JN_IN_DATA ? lex_data(lx) : lex_tag(lx);
}
