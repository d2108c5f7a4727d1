/* Metadata by key, whatever width the writer chose for a number. */
#include "gguf/file.h"

#include <stdlib.h>
#include <string.h>

#include "base/f16.h"

static bg_str key_of(const void *items, int64_t i)
{
    return ((const bg_kv *)items)[i].key;
}

const bg_kv *kv_set_find(const kv_set *s, const char *key)
{
    int64_t i = str_index_find(&s->index, s->kv, key_of, key);
    return i < 0 ? NULL : &s->kv[i];
}

void kv_set_release(kv_set *s)
{
    for (int64_t i = 0; i < s->n; i++)
        free((void *)s->kv[i].strs);
    free(s->kv);
    str_index_release(&s->index);
    *s = (kv_set){0};
}

const char *gguf_kv_type_name(uint32_t type)
{
    static const char *const names[] = {"u8",   "i8",  "u16", "i16", "u32", "i32", "f32",
                                        "bool", "str", "arr", "u64", "i64", "f64"};
    return type < sizeof names / sizeof *names ? names[type] : "?";
}

size_t gguf_kv_bytes(uint32_t type)
{
    static const uint8_t size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return size[type];
}

int64_t bg_gguf_n_kv(const bg_gguf *g)
{
    return g->meta.n;
}

const bg_kv *bg_gguf_kv(const bg_gguf *g, int64_t i)
{
    return &g->meta.kv[i];
}

const bg_kv *bg_gguf_find(const bg_gguf *g, const char *key)
{
    return kv_set_find(&g->meta, key);
}

/* ---- values -------------------------------------------------------------------------------- */

/* The type of value i, with *p at its bytes. False: there is no value i. */
static bool value_at(const bg_kv *kv, uint64_t i, uint32_t *type, const uint8_t **p)
{
    if (i >= kv->n) return false;
    *type = kv->type == BG_KV_ARR ? kv->elem_type : kv->type;
    *p = kv->raw + (size_t)i * gguf_kv_bytes(*type);
    return true;
}

/* The n bytes of a number, zero-extended. */
static uint64_t bits(const uint8_t *p, size_t n)
{
    uint64_t v = 0;
    memcpy(&v, p, n);
    return v;
}

bool bg_kv_int(const bg_kv *kv, uint64_t i, int64_t *v)
{
    uint32_t type;
    const uint8_t *p;
    if (!value_at(kv, i, &type, &p)) return false;
    switch (type) {
    case BG_KV_U8:
        *v = *p;
        return true;
    case BG_KV_I8:
        *v = (int8_t)*p; // NOLINT(bugprone-signed-char-misuse): a number, no character
        return true;
    case BG_KV_BOOL:
        *v = *p != 0;
        return true;
    case BG_KV_U16:
        *v = (uint16_t)bits(p, 2);
        return true;
    case BG_KV_I16:
        *v = (int16_t)bits(p, 2);
        return true;
    case BG_KV_U32:
        *v = (uint32_t)bits(p, 4);
        return true;
    case BG_KV_I32:
        *v = (int32_t)bits(p, 4);
        return true;
    case BG_KV_I64:
        *v = (int64_t)bits(p, 8);
        return true;
    case BG_KV_U64: {
        uint64_t u = bits(p, 8);
        if (u > INT64_MAX) return false;
        *v = (int64_t)u;
        return true;
    }
    default:
        return false;
    }
}

bool bg_kv_float(const bg_kv *kv, uint64_t i, double *v)
{
    uint32_t type;
    const uint8_t *p;
    int64_t n;
    if (!value_at(kv, i, &type, &p)) return false;
    switch (type) {
    case BG_KV_F32:
        *v = (double)bg_f32_from_bits((uint32_t)bits(p, 4));
        return true;
    case BG_KV_F64:
        memcpy(v, p, sizeof *v);
        return true;
    case BG_KV_U64:
        *v = (double)bits(p, 8);
        return true;
    case BG_KV_BOOL:
        return false;
    default:
        if (!bg_kv_int(kv, i, &n)) return false;
        *v = (double)n;
        return true;
    }
}

bool bg_kv_bool(const bg_kv *kv, uint64_t i, bool *v)
{
    uint32_t type;
    const uint8_t *p;
    if (!value_at(kv, i, &type, &p) || type != BG_KV_BOOL) return false;
    *v = *p != 0;
    return true;
}

bool bg_kv_str(const bg_kv *kv, uint64_t i, bg_str *v)
{
    if (i >= kv->n) return false;
    if (kv->strs) {
        *v = kv->strs[i];
        return true;
    }
    if (kv->type != BG_KV_STR) return false;
    *v = (bg_str){(const char *)kv->raw + 8, (size_t)bits(kv->raw, 8)};
    return true;
}

bool gguf_small_int(const kv_set *s, const char *key, int64_t *v)
{
    const bg_kv *kv = kv_set_find(s, key);
    return kv && kv->type != BG_KV_ARR && bg_kv_int(kv, 0, v);
}

/* ---- scalars by key ------------------------------------------------------------------------ */

static bg_status wrong_kind(const bg_gguf *g, const char *key, const bg_kv *kv, const char *want,
                            bg_error *err)
{
    const char *file = g->parts[0].path;
    if (kv->type == BG_KV_ARR)
        return bg_fail(err, BG_FORMAT, "%s: key %s: %s is needed, but it is an array of %llu %s",
                       file, key, want, (unsigned long long)kv->n,
                       gguf_kv_type_name(kv->elem_type));
    return bg_fail(err, BG_FORMAT,
                   kv->type == BG_KV_U64 ? "%s: key %s: %s is needed, the %s value does not fit"
                                         : "%s: key %s: %s is needed, but its type is %s",
                   file, key, want, gguf_kv_type_name(kv->type));
}

bg_status bg_gguf_get_int(const bg_gguf *g, const char *key, int64_t def, int64_t *v, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, key);
    *v = def;
    if (!kv || (kv->type != BG_KV_ARR && bg_kv_int(kv, 0, v))) return BG_OK;
    return wrong_kind(g, key, kv, "an integer", err);
}

bg_status bg_gguf_get_float(const bg_gguf *g, const char *key, double def, double *v, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, key);
    *v = def;
    if (!kv || (kv->type != BG_KV_ARR && bg_kv_float(kv, 0, v))) return BG_OK;
    return wrong_kind(g, key, kv, "a number", err);
}

bg_status bg_gguf_get_bool(const bg_gguf *g, const char *key, bool def, bool *v, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, key);
    *v = def;
    if (!kv || (kv->type != BG_KV_ARR && bg_kv_bool(kv, 0, v))) return BG_OK;
    return wrong_kind(g, key, kv, "true or false", err);
}

bg_status bg_gguf_get_str(const bg_gguf *g, const char *key, bg_str *v, bg_error *err)
{
    const bg_kv *kv = bg_gguf_find(g, key);
    *v = (bg_str){"", 0};
    if (!kv || (kv->type != BG_KV_ARR && bg_kv_str(kv, 0, v))) return BG_OK;
    return wrong_kind(g, key, kv, "a string", err);
}
