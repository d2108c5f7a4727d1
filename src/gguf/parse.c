/* The header of one GGUF file.
 *
 *     "GGUF", u32 version, u64 n_tensors, u64 n_kv
 *     n_kv times:       string key, u32 type, value
 *     n_tensors times:  string name, u32 n_dims, u64 ne[n_dims], u32 type, u64 offset
 *     zeros up to a multiple of the alignment; then the data, tensor i at offset_i
 *
 * A string is a u64 length and its bytes; an array a u32 element type, a u64 count and the
 * elements. Everything is little-endian and unpadded. The bytes come from a stranger: nothing is
 * believed before it was compared with what is left of the file, and arrays grow as entries are
 * really read, so that a large count in a small file costs nothing. */
#include "gguf/file.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF numbers are read as they lie");

enum {
    HEADER_BYTES = 24,
    MIN_TENSOR_BYTES = 24, /* name length, n_dims, type, offset */
    MIN_KV_BYTES = 13,     /* key length, type, one byte */
    MAX_KEY = 65535,
    MAX_ARRAY = 1 << 30,
    MAX_DEPTH = 4, /* of arrays in arrays */
};

typedef struct cursor {
    const char *file;
    const uint8_t *base;
    size_t size, at;
    bg_error *err;
} cursor;

static size_t left(const cursor *c)
{
    return c->size - c->at;
}

static bg_status cut_off(const cursor *c, const char *what)
{
    return bg_fail(c->err, BG_FORMAT,
                   "%s: the file ends at byte %zu inside %s; it is incomplete, fetch it again",
                   c->file, c->size, what);
}

static bg_status read_bytes(cursor *c, void *v, size_t n, const char *what)
{
    if (n > left(c)) return cut_off(c, what);
    memcpy(v, c->base + c->at, n);
    c->at += n;
    return BG_OK;
}

static bg_status read_u32(cursor *c, uint32_t *v, const char *what)
{
    return read_bytes(c, v, 4, what);
}

static bg_status read_u64(cursor *c, uint64_t *v, const char *what)
{
    return read_bytes(c, v, 8, what);
}

static bg_status read_str(cursor *c, bg_str *s, const char *what)
{
    uint64_t n = 0;
    size_t at = c->at;
    bg_status st = read_u64(c, &n, what);
    if (st) return st;
    if (n > left(c))
        return bg_fail(c->err, BG_FORMAT,
                       "%s: byte %zu: %s claims %llu bytes, but only %zu are left; the file is cut "
                       "off or damaged",
                       c->file, at, what, (unsigned long long)n, left(c));
    *s = (bg_str){(const char *)c->base + c->at, (size_t)n};
    c->at += (size_t)n;
    return BG_OK;
}

const char *gguf_show(bg_str s, char out[SHOWN_BYTES])
{
    size_t at = 0, i = 0;
    while (i < s.n && at < SHOWN_BYTES - 12) {
        uint32_t cp;
        size_t n = bg_utf8_next(s.p + i, s.n - i, &cp);
        if (cp == BG_UTF8_BAD || cp < 0x20 || (cp >= 0x7f && cp < 0xa0)) {
            out[at++] = '?';
        } else {
            memcpy(out + at, s.p + i, n);
            at += n;
        }
        i += n;
    }
    strcpy(out + at, i < s.n ? "..." : "");
    return out;
}

/* Names are used as C strings and shown in messages, so they must be text. */
static bool is_text(bg_str s)
{
    return bg_utf8_valid(s.p, s.n) && !memchr(s.p, 0, s.n);
}

/* ---- metadata ------------------------------------------------------------------------------ */

static bg_status bad_type(const cursor *c, const char *key, uint32_t type)
{
    return bg_fail(c->err, BG_FORMAT,
                   "%s: byte %zu: key %s: unknown value type %u, 0 to 12 are known; the file is "
                   "damaged",
                   c->file, c->at - 4, key, type);
}

/* Reads type and count of an array, and checks the count against what is left. */
static bg_status read_array_head(cursor *c, const char *key, uint32_t *type, uint64_t *n)
{
    bg_status st = read_u32(c, type, "an array");
    if (st) return st;
    if (*type > BG_KV_F64) return bad_type(c, key, *type);
    st = read_u64(c, n, "an array");
    if (st) return st;
    size_t least = gguf_kv_bytes(*type);
    if (*type == BG_KV_STR) least = 8;
    if (*type == BG_KV_ARR) least = 12;
    if (*n > MAX_ARRAY || *n > left(c) / least)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: byte %zu: key %s: an array of %llu %s does not fit into the %zu bytes "
                       "left; the file is cut off or damaged",
                       c->file, c->at - 8, key, (unsigned long long)*n, gguf_kv_type_name(*type),
                       left(c));
    return BG_OK;
}

/* Passes over n elements, checking them. */
static bg_status skip_elements(cursor *c, const char *key, uint32_t type, uint64_t n, int depth)
{
    if (type != BG_KV_STR && type != BG_KV_ARR) {
        c->at += (size_t)n * gguf_kv_bytes(type); /* checked by read_array_head() */
        return BG_OK;
    }
    bg_status st = BG_OK;
    for (uint64_t i = 0; i < n && !st; i++) {
        if (type == BG_KV_STR) {
            bg_str s;
            st = read_str(c, &s, "an element of a string array");
            continue;
        }
        uint32_t sub;
        uint64_t n_sub;
        if (depth >= MAX_DEPTH)
            return bg_fail(c->err, BG_FORMAT,
                           "%s: byte %zu: key %s: arrays nested more than %d deep", c->file, c->at,
                           key, MAX_DEPTH);
        st = read_array_head(c, key, &sub, &n_sub);
        if (!st) st = skip_elements(c, key, sub, n_sub, depth + 1);
    }
    return st;
}

static bg_status read_array(cursor *c, const char *key, bg_kv *kv)
{
    uint32_t type = 0;
    bg_status st = read_array_head(c, key, &type, &kv->n);
    if (st) return st;
    kv->elem_type = (bg_kv_type)type;
    kv->raw = c->base + c->at;
    cursor again = *c;
    st = skip_elements(c, key, type, kv->n, 1);
    if (st || type != BG_KV_STR || kv->n == 0) return st;
    /* The elements were walked: they are there, so memory for them is in proportion to the file. */
    bg_str *strs = malloc((size_t)kv->n * sizeof *strs);
    if (!strs) return bg_fail(c->err, BG_NOMEM, "%s: out of memory", c->file);
    kv->strs = strs;
    for (uint64_t i = 0; i < kv->n && !st; i++)
        st = read_str(&again, &strs[i], "an element of a string array");
    return st;
}

static bg_status read_key(cursor *c, bg_str *key)
{
    size_t at = c->at;
    char shown[SHOWN_BYTES];
    bg_status st = read_str(c, key, "a key");
    if (st) return st;
    if (key->n == 0 || key->n > MAX_KEY)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: byte %zu: a key of %zu bytes, 1 to %d are allowed; the file is damaged",
                       c->file, at, key->n, MAX_KEY);
    if (!is_text(*key))
        return bg_fail(c->err, BG_FORMAT,
                       "%s: byte %zu: key %s is not UTF-8 text; the file is damaged", c->file, at,
                       gguf_show(*key, shown));
    return BG_OK;
}

/* kv's strs are the caller's to free also on failure. */
static bg_status read_kv(cursor *c, bg_kv *kv)
{
    uint32_t type = 0;
    char key[SHOWN_BYTES];
    bg_status st = read_key(c, &kv->key);
    if (!st) st = read_u32(c, &type, "a key's value");
    if (st) return st;
    gguf_show(kv->key, key);
    if (type > BG_KV_F64) return bad_type(c, key, type);
    kv->type = (bg_kv_type)type;
    kv->n = 1;
    kv->raw = c->base + c->at;
    if (type == BG_KV_ARR) return read_array(c, key, kv);
    if (type == BG_KV_STR) {
        bg_str s;
        return read_str(c, &s, "a string value");
    }
    if (gguf_kv_bytes(type) > left(c)) return cut_off(c, "a key's value");
    c->at += gguf_kv_bytes(type);
    return BG_OK;
}

/* Makes room for one more of size bytes. */
static bool grow(void **items, int64_t n, int64_t *cap, size_t size)
{
    if (n < *cap) return true;
    int64_t more = *cap ? 2 * *cap : 64;
    void *p = realloc(*items, (size_t)more * size);
    if (!p) return false;
    *items = p;
    *cap = more;
    return true;
}

static bg_str key_of(const void *items, int64_t i)
{
    return ((const bg_kv *)items)[i].key;
}

static bg_status read_metadata(cursor *c, uint64_t n_kv, kv_set *meta)
{
    bg_status st = BG_OK;
    for (uint64_t i = 0; i < n_kv && !st; i++) {
        void *items = meta->kv;
        if (!grow(&items, meta->n, &meta->cap, sizeof *meta->kv))
            return bg_fail(c->err, BG_NOMEM, "%s: out of memory", c->file);
        meta->kv = items;
        bg_kv *kv = &meta->kv[meta->n++];
        *kv = (bg_kv){0};
        st = read_kv(c, kv);
    }
    if (st) return st;
    int64_t first, second;
    char shown[SHOWN_BYTES];
    if (!str_index_build(&meta->index, meta->kv, meta->n, key_of, &first, &second))
        return bg_fail(c->err, BG_NOMEM, "%s: out of memory", c->file);
    if (first >= 0)
        return bg_fail(c->err, BG_FORMAT, "%s: key %s occurs twice; the file is damaged", c->file,
                       gguf_show(meta->kv[first].key, shown));
    return BG_OK;
}

static bg_status get_alignment(const cursor *c, const kv_set *meta, uint64_t *align)
{
    const bg_kv *kv = kv_set_find(meta, "general.alignment");
    *align = DEFAULT_ALIGN;
    if (!kv) return BG_OK;
    int64_t v;
    if (kv->type != BG_KV_U32 || !bg_kv_int(kv, 0, &v))
        return bg_fail(c->err, BG_FORMAT, "%s: key general.alignment: a u32 is needed, it is %s",
                       c->file, gguf_kv_type_name(kv->type));
    if (v < 8 || v > MAX_ALIGN || (v & (v - 1)))
        return bg_fail(c->err, BG_FORMAT,
                       "%s: key general.alignment: %lld is no power of two from 8 to %d", c->file,
                       (long long)v, MAX_ALIGN);
    *align = (uint64_t)v;
    return BG_OK;
}

/* ---- tensors ------------------------------------------------------------------------------- */

static bg_status unknown_type(const cursor *c, const char *name, uint32_t type)
{
    if (type == 4 || type == 5 || (type >= 31 && type <= 38))
        return bg_fail(c->err, BG_FORMAT,
                       "%s: tensor %s: type %u was removed from the format (or is of the fork "
                       "ik_llama.cpp); use a newer file of this model",
                       c->file, name, type);
    if ((type >= 133 && type <= 158) || (type >= 202 && type <= 399))
        return bg_fail(c->err, BG_FORMAT,
                       "%s: tensor %s: type %u belongs to the fork ik_llama.cpp and is not "
                       "supported; use a file made for llama.cpp",
                       c->file, name, type);
    return bg_fail(c->err, BG_FORMAT,
                   "%s: tensor %s: unknown type %u; the file is damaged or newer than this program",
                   c->file, name, type);
}

/* Sizes in blocks, bytes: each product is checked before it is formed. */
static bg_status tensor_bytes(const cursor *c, const char *name, bg_tensor *t)
{
    const bg_qtype_info *q = bg_qtype_get(t->type);
    if (!q->name) return unknown_type(c, name, t->type);
    int64_t n = 1;
    for (int i = 0; i < 4; i++) {
        if (t->ne[i] < 1)
            return bg_fail(c->err, BG_FORMAT, "%s: tensor %s: dimension %d is %lld; damaged",
                           c->file, name, i, (long long)t->ne[i]);
        if (n > INT64_MAX / t->ne[i])
            return bg_fail(c->err, BG_FORMAT,
                           "%s: tensor %s: %lld x %lld x %lld x %lld is no possible size; damaged",
                           c->file, name, (long long)t->ne[0], (long long)t->ne[1],
                           (long long)t->ne[2], (long long)t->ne[3]);
        n *= t->ne[i];
    }
    if (t->ne[0] % q->block_values)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: tensor %s: rows of %lld values are no whole %s blocks of %d", c->file,
                       name, (long long)t->ne[0], q->name, q->block_values);
    uint64_t n_blocks = (uint64_t)(n / q->block_values);
    if (n_blocks > SIZE_MAX / (uint64_t)q->block_bytes)
        return bg_fail(c->err, BG_FORMAT, "%s: tensor %s: larger than any memory; damaged", c->file,
                       name);
    t->bytes = (size_t)(n_blocks * (uint64_t)q->block_bytes);
    return BG_OK;
}

static bg_status read_tensor(cursor *c, uint64_t align, tensor_slot *slot)
{
    bg_tensor *t = &slot->t;
    char name[SHOWN_BYTES];
    size_t at = c->at;
    uint32_t n_dims = 0;
    bg_status st = read_str(c, &t->name, "a tensor's name");
    if (st) return st;
    gguf_show(t->name, name);
    if (t->name.n == 0 || t->name.n > MAX_NAME || !is_text(t->name))
        return bg_fail(c->err, BG_FORMAT,
                       "%s: byte %zu: tensor name '%s' of %zu bytes: 1 to %d bytes of UTF-8 text "
                       "are allowed; the file is damaged",
                       c->file, at, name, t->name.n, MAX_NAME);
    memcpy(slot->name, t->name.p, t->name.n);
    slot->name[t->name.n] = 0;
    st = read_u32(c, &n_dims, "a tensor's description");
    if (st) return st;
    if (n_dims > 4)
        return bg_fail(c->err, BG_FORMAT, "%s: tensor %s: %u dimensions, at most 4 are allowed",
                       c->file, name, n_dims);
    for (uint32_t i = 0; i < 4 && !st; i++) {
        uint64_t ne = 1;
        if (i < n_dims) st = read_u64(c, &ne, "a tensor's description");
        t->ne[i] = ne > INT64_MAX ? -1 : (int64_t)ne;
    }
    t->n_dims = n_dims ? (int32_t)n_dims : 1; /* without dimensions: one value */
    if (!st) st = read_u32(c, &t->type, "a tensor's description");
    if (!st) st = read_u64(c, &t->offset, "a tensor's description");
    if (!st) st = tensor_bytes(c, name, t);
    if (st) return st;
    if (t->offset % align)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: tensor %s: offset %llu is no multiple of the alignment %llu; damaged",
                       c->file, name, (unsigned long long)t->offset, (unsigned long long)align);
    return BG_OK;
}

/* Turns the offset into the data section into one into the file, and finds the data. */
static bg_status place_tensor(const cursor *c, uint64_t data_start, bool header_only,
                              tensor_slot *slot)
{
    bg_tensor *t = &slot->t;
    uint64_t room = c->size - data_start;
    if (t->offset > room || t->bytes > room - t->offset) {
        if (header_only) return BG_OK; /* without data */
        char name[SHOWN_BYTES];
        return bg_fail(c->err, BG_FORMAT,
                       "%s: tensor %s: %zu bytes at offset %llu of the data, which has %llu; the "
                       "file is cut off or damaged, fetch it again",
                       c->file, gguf_show(t->name, name), t->bytes, (unsigned long long)t->offset,
                       (unsigned long long)room);
    }
    t->offset += data_start;
    t->data = c->base + t->offset;
    return BG_OK;
}

static bg_status read_tensors(cursor *c, bg_gguf *g, int part, uint64_t n_tensors, uint64_t align)
{
    int64_t first = g->n_tensors;
    bg_status st = BG_OK;
    for (uint64_t i = 0; i < n_tensors && !st; i++) {
        void *items = g->tensors;
        if (g->n_tensors == INT32_MAX ||
            !grow(&items, g->n_tensors, &g->cap_tensors, sizeof *g->tensors))
            return bg_fail(c->err, BG_NOMEM, "%s: out of memory", c->file);
        g->tensors = items;
        tensor_slot *slot = &g->tensors[g->n_tensors++];
        *slot = (tensor_slot){.t = {.part = part}};
        st = read_tensor(c, align, slot);
    }
    if (st) return st;
    uint64_t start = (c->at + align - 1) / align * align;
    if (start > c->size) {
        if (n_tensors && !g->header_only) return cut_off(c, "the padding before the data");
        start = c->size; /* without tensors the data section, its padding included, may be absent */
    }
    g->parts[part].data_start = start;
    for (int64_t i = first; i < g->n_tensors && !st; i++)
        st = place_tensor(c, start, g->header_only, &g->tensors[i]);
    return st;
}

/* ---- the whole header ---------------------------------------------------------------------- */

static bg_status check_magic(const cursor *c)
{
    const char *p = (const char *)c->base;
    if (c->size >= 4 && memcmp(p, "GGUF", 4) == 0) {
        if (c->size >= HEADER_BYTES) return BG_OK;
        return cut_off(c, "the header");
    }
    if (c->size > 20 && memcmp(p, "version https://git-", 20) == 0)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: a Git LFS pointer, not the model; fetch it with 'git lfs pull'",
                       c->file);
    return bg_fail(c->err, BG_FORMAT,
                   "%s: not a GGUF file: it does not start with 'GGUF'; convert the model first",
                   c->file);
}

static bg_status check_version(const cursor *c, uint32_t version)
{
    if (version == 2 || version == 3) return BG_OK;
    if (version == 1)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: GGUF version 1 is too old; convert the model again (version 3)",
                       c->file);
    if ((version & 0xFFFF) == 0)
        return bg_fail(c->err, BG_FORMAT,
                       "%s: a big-endian GGUF file; convert the model for little-endian machines",
                       c->file);
    return bg_fail(c->err, BG_FORMAT, "%s: GGUF version %u is unknown, 2 and 3 are supported",
                   c->file, version);
}

bg_status gguf_parse_part(bg_gguf *g, int part, kv_set *meta, bg_error *err)
{
    const gguf_part *p = &g->parts[part];
    cursor c = {p->path, p->map, p->size, 4, err};
    uint32_t version = 0;
    uint64_t n_tensors = 0, n_kv = 0, align = DEFAULT_ALIGN;
    bg_status st = check_magic(&c);
    if (!st) st = read_u32(&c, &version, "the header");
    if (!st) st = check_version(&c, version);
    if (!st) st = read_u64(&c, &n_tensors, "the header");
    if (!st) st = read_u64(&c, &n_kv, "the header");
    if (st) return st;
    if (n_tensors > left(&c) / MIN_TENSOR_BYTES || n_tensors > INT32_MAX)
        return bg_fail(err, BG_FORMAT,
                       "%s: byte 8: %llu tensors do not fit into %zu bytes; the file is cut off or "
                       "damaged",
                       c.file, (unsigned long long)n_tensors, c.size);
    if (n_kv > left(&c) / MIN_KV_BYTES || n_kv > INT32_MAX)
        return bg_fail(err, BG_FORMAT,
                       "%s: byte 16: %llu keys do not fit into %zu bytes; the file is cut off or "
                       "damaged",
                       c.file, (unsigned long long)n_kv, c.size);
    st = read_metadata(&c, n_kv, meta);
    if (!st) st = get_alignment(&c, meta, &align);
    if (!st) st = read_tensors(&c, g, part, n_tensors, align);
    return st;
}

static bg_str name_of(const void *items, int64_t i)
{
    return ((const tensor_slot *)items)[i].t.name;
}

bg_status gguf_finish_tensors(bg_gguf *g, bg_error *err)
{
    for (int64_t i = 0; i < g->n_tensors; i++)
        g->tensors[i].t.cname = g->tensors[i].name;
    int64_t a, b;
    char name[SHOWN_BYTES];
    if (!str_index_build(&g->index, g->tensors, g->n_tensors, name_of, &a, &b))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", g->parts[0].path);
    if (a < 0) return BG_OK;
    const bg_tensor *ta = &g->tensors[a].t, *tb = &g->tensors[b].t;
    gguf_show(ta->name, name);
    if (ta->part == tb->part)
        return bg_fail(err, BG_FORMAT, "%s: tensor %s occurs twice; the file is damaged",
                       g->parts[ta->part].path, name);
    return bg_fail(err, BG_FORMAT, "%s: tensor %s is also in %s; parts of different models?",
                   g->parts[tb->part].path, name, g->parts[ta->part].path);
}

const bg_tensor *bg_gguf_find_tensor(const bg_gguf *g, const char *name)
{
    int64_t i = str_index_find(&g->index, g->tensors, name_of, name);
    return i < 0 ? NULL : &g->tensors[i].t;
}
