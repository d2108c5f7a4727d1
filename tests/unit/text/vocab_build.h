/* Builds small vocabularies as GGUF bytes in memory. */
#ifndef BG_TEST_VOCAB_BUILD_H
#define BG_TEST_VOCAB_BUILD_H

#include <criterion/criterion.h>
#include <string.h>

#include "base/buf.h"
#include "text/text.h"

typedef struct build {
    bg_buf kv;
    uint64_t n_kv;
} build;

static inline void put_le(bg_buf *b, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        bg_buf_char(b, (char)(v >> (8 * i)));
}

static inline void put_bytes(bg_buf *b, const char *s)
{
    put_le(b, strlen(s), 8);
    bg_buf_str(b, s);
}

static inline void begin_key(build *b, const char *key, bg_kv_type type)
{
    put_bytes(&b->kv, key);
    put_le(&b->kv, type, 4);
    b->n_kv++;
}

static inline void put_str(build *b, const char *key, const char *s)
{
    begin_key(b, key, BG_KV_STR);
    put_bytes(&b->kv, s);
}

static inline void put_u32(build *b, const char *key, uint32_t v)
{
    begin_key(b, key, BG_KV_U32);
    put_le(&b->kv, v, 4);
}

static inline void put_bool(build *b, const char *key, bool v)
{
    begin_key(b, key, BG_KV_BOOL);
    put_le(&b->kv, v, 1);
}

static inline void begin_array(build *b, const char *key, bg_kv_type elem, size_t n)
{
    begin_key(b, key, BG_KV_ARR);
    put_le(&b->kv, elem, 4);
    put_le(&b->kv, n, 8);
}

static inline void put_strs(build *b, const char *key, const char *const *s, size_t n)
{
    begin_array(b, key, BG_KV_STR, n);
    for (size_t i = 0; i < n; i++)
        put_bytes(&b->kv, s[i]);
}

static inline void put_i32s(build *b, const char *key, const int *v, size_t n)
{
    begin_array(b, key, BG_KV_I32, n);
    for (size_t i = 0; i < n; i++)
        put_le(&b->kv, (uint32_t)v[i], 4);
}

static inline void put_f32s(build *b, const char *key, const float *v, size_t n)
{
    begin_array(b, key, BG_KV_F32, n);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &v[i], 4);
        put_le(&b->kv, bits, 4);
    }
}

/* The vocabulary of what was put, and the build is over. err tells why it is NULL. */
static inline bg_vocab *make_vocab(build *b, bg_error *err)
{
    bg_buf file = {0};
    bg_buf_str(&file, "GGUF");
    put_le(&file, 3, 4);
    put_le(&file, 0, 8);
    put_le(&file, b->n_kv, 8);
    bg_buf_add(&file, b->kv.data, b->kv.len);
    bg_gguf *g = NULL;
    bg_vocab *v = NULL;
    bg_status st = bg_gguf_open_memory(&g, file.data, file.len, "test", err);
    cr_assert_eq(st, BG_OK, "%s", err->text);
    st = bg_vocab_new(&v, g, err);
    cr_assert_eq(st == BG_OK, v != NULL);
    bg_gguf_close(g);
    bg_buf_release(&file);
    bg_buf_release(&b->kv);
    *b = (build){0};
    return v;
}

#endif
