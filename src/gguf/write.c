/* Writing GGUF version 3: header, metadata, tensor infos, then the data in the announced order,
 * each tensor padded with zeros to the alignment. Layout: parse.c. */
#include "gguf/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/io.h"

typedef struct key_place { /* of a key in the metadata, for finding duplicates */
    size_t at, n;
} key_place;

typedef struct new_tensor {
    char *name;
    uint32_t type;
    int n_dims;
    int64_t ne[4];
    size_t bytes;
} new_tensor;

struct bg_gguf_writer {
    uint32_t alignment;
    bg_buf kv;
    key_place *keys;
    int64_t n_kv, cap_kv;
    new_tensor *tensors;
    int64_t n_tensors, cap_tensors;
    bool no_memory;
};

bg_gguf_writer *bg_gguf_writer_new(uint32_t alignment)
{
    bg_gguf_writer *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->alignment = alignment ? alignment : DEFAULT_ALIGN;
    if (w->alignment != DEFAULT_ALIGN) bg_gguf_put_u32(w, "general.alignment", w->alignment);
    return w;
}

void bg_gguf_writer_free(bg_gguf_writer *w)
{
    if (!w) return;
    for (int64_t i = 0; i < w->n_tensors; i++)
        free(w->tensors[i].name);
    free(w->tensors);
    free(w->keys);
    bg_buf_release(&w->kv);
    free(w);
}

/* Room for one more; on failure the writer remembers and bg_gguf_write() tells. */
static void *one_more(bg_gguf_writer *w, void *items, int64_t n, int64_t *cap, size_t size)
{
    if (n < *cap) return items;
    int64_t more = *cap ? 2 * *cap : 64;
    void *p = realloc(items, (size_t)more * size);
    if (p)
        *cap = more;
    else
        w->no_memory = true;
    return p;
}

static void add_u32(bg_buf *b, uint32_t v)
{
    bg_buf_add(b, &v, 4);
}

static void add_u64(bg_buf *b, uint64_t v)
{
    bg_buf_add(b, &v, 8);
}

static void add_str(bg_buf *b, const char *s, size_t n)
{
    add_u64(b, n);
    bg_buf_add(b, s, n);
}

static void put_key(bg_gguf_writer *w, const char *key, bg_kv_type type)
{
    void *p = one_more(w, w->keys, w->n_kv, &w->cap_kv, sizeof *w->keys);
    if (!p) return;
    w->keys = p;
    w->keys[w->n_kv++] = (key_place){w->kv.len + 8, strlen(key)};
    add_str(&w->kv, key, strlen(key));
    add_u32(&w->kv, type);
}

void bg_gguf_put_u32(bg_gguf_writer *w, const char *key, uint32_t v)
{
    put_key(w, key, BG_KV_U32);
    add_u32(&w->kv, v);
}

void bg_gguf_put_u64(bg_gguf_writer *w, const char *key, uint64_t v)
{
    put_key(w, key, BG_KV_U64);
    add_u64(&w->kv, v);
}

void bg_gguf_put_i32(bg_gguf_writer *w, const char *key, int32_t v)
{
    put_key(w, key, BG_KV_I32);
    bg_buf_add(&w->kv, &v, sizeof v);
}

void bg_gguf_put_u16(bg_gguf_writer *w, const char *key, uint16_t v)
{
    put_key(w, key, BG_KV_U16);
    bg_buf_add(&w->kv, &v, sizeof v);
}

void bg_gguf_put_f32(bg_gguf_writer *w, const char *key, float v)
{
    put_key(w, key, BG_KV_F32);
    bg_buf_add(&w->kv, &v, sizeof v);
}

void bg_gguf_put_bool(bg_gguf_writer *w, const char *key, bool v)
{
    put_key(w, key, BG_KV_BOOL);
    bg_buf_char(&w->kv, v ? 1 : 0);
}

void bg_gguf_put_str(bg_gguf_writer *w, const char *key, const char *s, size_t n)
{
    put_key(w, key, BG_KV_STR);
    add_str(&w->kv, s, n);
}

void bg_gguf_put_array(bg_gguf_writer *w, const char *key, bg_kv_type elem, const void *v,
                       uint64_t n)
{
    put_key(w, key, BG_KV_ARR);
    add_u32(&w->kv, elem);
    add_u64(&w->kv, n);
    if (elem != BG_KV_STR) {
        bg_buf_add(&w->kv, v, (size_t)n * gguf_kv_bytes(elem));
        return;
    }
    for (uint64_t i = 0; i < n; i++) {
        const bg_str *s = (const bg_str *)v + i;
        add_str(&w->kv, s->p, s->n);
    }
}

void bg_gguf_put_tensor(bg_gguf_writer *w, const char *name, uint32_t type, int n_dims,
                        const int64_t *ne)
{
    void *p = one_more(w, w->tensors, w->n_tensors, &w->cap_tensors, sizeof *w->tensors);
    if (!p) return;
    w->tensors = p;
    new_tensor *t = &w->tensors[w->n_tensors++];
    *t = (new_tensor){.name = strdup(name), .type = type, .n_dims = n_dims, .ne = {1, 1, 1, 1}};
    if (!t->name) w->no_memory = true;
    for (int i = 0; i < n_dims && i < 4; i++)
        t->ne[i] = ne[i];
}

/* ---- checks: what is written must be what the reader accepts --------------------------------- */

static bg_str key_of(const void *items, int64_t i)
{
    const bg_gguf_writer *w = items;
    return (bg_str){w->kv.data + w->keys[i].at, w->keys[i].n};
}

static bg_str name_of(const void *items, int64_t i)
{
    const bg_gguf_writer *w = items;
    return (bg_str){w->tensors[i].name, strlen(w->tensors[i].name)};
}

static bg_status check_unique(const bg_gguf_writer *w, int64_t n, str_index_get *get,
                              const char *what, const char *path, bg_error *err)
{
    str_index x;
    int64_t a, b;
    char shown[SHOWN_BYTES];
    if (!str_index_build(&x, w, n, get, &a, &b))
        return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    str_index_release(&x);
    if (a < 0) return BG_OK;
    return bg_fail(err, BG_ARG, "%s: %s %s was given twice", path, what,
                   gguf_show(get(w, a), shown));
}

static bg_status check_tensor(new_tensor *t, const char *path, bg_error *err)
{
    const bg_qtype_info *q = bg_qtype_get(t->type);
    size_t len = strlen(t->name);
    int64_t n = 1;
    bool ok = len >= 1 && len <= MAX_NAME && q->name && t->n_dims >= 1 && t->n_dims <= 4;
    for (int i = 0; ok && i < 4; i++) {
        ok = t->ne[i] >= 1 && n <= INT64_MAX / 8 / t->ne[i];
        if (ok) n *= t->ne[i];
    }
    if (!ok || t->ne[0] % q->block_values)
        return bg_fail(err, BG_ARG,
                       "%s: tensor %s, type %u, %d dimensions, rows of %lld: no possible tensor",
                       path, t->name, t->type, t->n_dims, (long long)t->ne[0]);
    t->bytes = bg_qtype_row_bytes(t->type, n);
    return BG_OK;
}

static bg_status check(bg_gguf_writer *w, const char *path, bg_error *err)
{
    if (w->no_memory || w->kv.failed) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    if (w->alignment < 8 || w->alignment > MAX_ALIGN || (w->alignment & (w->alignment - 1)))
        return bg_fail(err, BG_ARG, "%s: alignment %u is no power of two from 8 to %d", path,
                       w->alignment, MAX_ALIGN);
    for (int64_t i = 0; i < w->n_kv; i++)
        if (w->keys[i].n == 0) return bg_fail(err, BG_ARG, "%s: an empty key", path);
    bg_status st = check_unique(w, w->n_kv, key_of, "key", path, err);
    if (!st) st = check_unique(w, w->n_tensors, name_of, "tensor", path, err);
    for (int64_t i = 0; i < w->n_tensors && !st; i++)
        st = check_tensor(&w->tensors[i], path, err);
    return st;
}

/* ---- the file -------------------------------------------------------------------------------- */

enum { CHUNK = 1 << 18 }; /* smaller pieces are collected to this size */

typedef struct sink {
    int fd;
    const char *path;
    bg_buf pending;
    size_t left; /* of the tensor that is being produced */
} sink;

static bg_status flush(sink *s, bg_error *err)
{
    bg_status st = BG_OK;
    if (s->pending.failed) return bg_fail(err, BG_NOMEM, "%s: out of memory", s->path);
    if (s->pending.len) st = bg_write_all(s->fd, s->pending.data, s->pending.len, s->path, err);
    bg_buf_clear(&s->pending);
    return st;
}

static bg_status put(sink *s, const void *data, size_t n, bg_error *err)
{
    bg_status st = BG_OK;
    if (s->pending.len + n > CHUNK) st = flush(s, err);
    if (st) return st;
    if (n > CHUNK) return bg_write_all(s->fd, data, n, s->path, err);
    bg_buf_add(&s->pending, data, n);
    return BG_OK;
}

static bg_status emit(void *ctx, const void *data, size_t n, bg_error *err)
{
    sink *s = ctx;
    if (n > s->left)
        return bg_fail(err, BG_ARG, "%s: a tensor got more bytes than it has", s->path);
    s->left -= n;
    return put(s, data, n, err);
}

static size_t padding(const bg_gguf_writer *w, uint64_t n)
{
    return (size_t)(-n & (w->alignment - 1));
}

static bg_status pad(sink *s, size_t n, bg_error *err)
{
    static const char zeros[4096];
    bg_status st = BG_OK;
    for (; n && !st; n -= n < sizeof zeros ? n : sizeof zeros)
        st = put(s, zeros, n < sizeof zeros ? n : sizeof zeros, err);
    return st;
}

static bg_status write_header(const bg_gguf_writer *w, sink *s, bg_error *err)
{
    bg_buf b = {0};
    uint64_t offset = 0;
    bg_buf_add(&b, "GGUF", 4);
    add_u32(&b, 3);
    add_u64(&b, (uint64_t)w->n_tensors);
    add_u64(&b, (uint64_t)w->n_kv);
    bg_buf_add(&b, w->kv.data, w->kv.len);
    for (int64_t i = 0; i < w->n_tensors; i++) {
        const new_tensor *t = &w->tensors[i];
        add_str(&b, t->name, strlen(t->name));
        add_u32(&b, (uint32_t)t->n_dims);
        for (int k = 0; k < t->n_dims; k++)
            add_u64(&b, (uint64_t)t->ne[k]);
        add_u32(&b, t->type);
        add_u64(&b, offset);
        offset += t->bytes + padding(w, t->bytes);
    }
    bg_status st = b.failed ? bg_fail(err, BG_NOMEM, "%s: out of memory", s->path)
                            : put(s, b.data, b.len, err);
    if (!st) st = pad(s, padding(w, b.len), err);
    bg_buf_release(&b);
    return st;
}

bg_status bg_gguf_write(bg_gguf_writer *w, const char *path, bg_gguf_produce *produce, void *ctx,
                        bg_error *err)
{
    bg_status st = check(w, path, err);
    if (st) return st;
    sink s = {.path = path};
    s.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (s.fd < 0) return bg_fail_os(err, "%s: cannot open for writing", path);
    st = write_header(w, &s, err);
    for (int64_t i = 0; produce && i < w->n_tensors && !st; i++) {
        s.left = w->tensors[i].bytes;
        st = produce(ctx, i, w->tensors[i].bytes, emit, &s, err);
        if (!st && s.left)
            st = bg_fail(err, BG_ARG, "%s: tensor %s: %zu bytes were not given", path,
                         w->tensors[i].name, s.left);
        if (!st) st = pad(&s, padding(w, w->tensors[i].bytes), err);
    }
    if (!st) st = flush(&s, err);
    if (close(s.fd) != 0 && !st) st = bg_fail_os(err, "%s: cannot write", path);
    bg_buf_release(&s.pending);
    return st;
}
