#include "output/journal.h"

#include <string.h>

#include "base/hash.h"
#include "base/io.h"
#include "base/json.h"

enum { HASH_CHARS = 16, TAIL = 1 + HASH_CHARS, CHUNK = 1 << 16, MAX_ENTRY = 1 << 30 };

void bg_journal_seal(bg_buf *buf, size_t start)
{
    if (buf->failed) return;
    char hex[17];
    bg_hex64(bg_hash64(buf->data + start, buf->len - start, 0), hex);
    bg_buf_char(buf, ' ');
    bg_buf_add(buf, hex, HASH_CHARS);
    bg_buf_char(buf, '\n');
}

void bg_journal_reader_release(bg_journal_reader *r)
{
    bg_buf_release(&r->buf);
}

static bool has_hash(const char *s, size_t n)
{
    char hex[17];
    if (n < TAIL + 2 || s[n - TAIL] != ' ') return false;
    bg_hex64(bg_hash64(s, n - TAIL, 0), hex);
    return memcmp(hex, s + n - HASH_CHARS, HASH_CHARS) == 0;
}

/* Whether a whole entry ends the damaged line s[0..n). */
static bool hides_whole(const char *s, size_t n)
{
    static const char *const starts[] = {"{\"commit\":{", "{\"run\":{", "{\"end\":{",
                                         BG_JOURNAL_REWRITE};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        size_t n_start = strlen(starts[i]);
        for (const char *p = s; (p = memmem(p, n - (size_t)(p - s), starts[i], n_start)); p++)
            if (has_hash(p, n - (size_t)(p - s))) return true;
    }
    return false;
}

/* s[0..n) without its LF. NULL: damaged, unless *nomem. */
static json_t *entry_object(const char *s, size_t n, bool *nomem)
{
    if (!has_hash(s, n)) return NULL;
    json_t *v = bg_json_load(s, n - TAIL, JSON_REJECT_DUPLICATES, NULL, nomem);
    if (v && !json_is_object(v)) {
        json_decref(v);
        v = NULL;
    }
    return v;
}

bg_status bg_journal_next(bg_journal_reader *r, bg_journal_entry *e, bool *got, bg_error *err)
{
    *got = false;
    *e = (bg_journal_entry){0};
    size_t looked = 0;
    const char *lf = NULL;
    for (;;) {
        size_t n = r->buf.len - r->pos;
        if (n > looked) lf = memchr(r->buf.data + r->pos + looked, '\n', n - looked);
        looked = n;
        if (lf || r->eof || n > MAX_ENTRY) break;
        if (r->pos) {
            memmove(r->buf.data, r->buf.data + r->pos, n);
            r->buf.len = n;
            r->pos = 0;
        }
        size_t more;
        if (!bg_buf_reserve(&r->buf, CHUNK))
            return bg_fail(err, BG_NOMEM, "%s: out of memory", r->name);
        bg_status st = bg_pread_full(r->fd, r->buf.data + n, CHUNK, (int64_t)(r->offset + n), &more,
                                     r->name, err);
        if (st) return st;
        r->buf.len += more;
        r->eof = more < CHUNK;
    }
    size_t n = lf ? (size_t)(lf - (r->buf.data + r->pos)) : r->buf.len - r->pos;
    if (!lf && n == 0) return BG_OK;
    bool nomem = false;
    if (lf) e->object = entry_object(r->buf.data + r->pos, n, &nomem);
    if (lf && !e->object && !nomem) e->hides_whole = hides_whole(r->buf.data + r->pos, n);
    if (nomem) return bg_fail(err, BG_NOMEM, "%s: out of memory", r->name);
    if (lf) n++;
    e->start = r->offset;
    r->offset += n;
    r->pos += n;
    e->end = r->offset;
    *got = true;
    return BG_OK;
}
