/* The reader: an example file to the byte, and files that are damaged in every way a file can be.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/buf.h"
#include "base/io.h"
#include "gguf/gguf.h"

/* 416 bytes, accepted by the reference reader; header up to 310, data from 320.
 *     general.architecture = "llama"   general.alignment = u32 32   x.list = i32 [1, -2, 3]
 *     x.words = ["ab", "é"]            x.flag = true
 *     a.weight F32 [3, 2] at 0, values 1..6     b.weight Q8_0 [32, 1] at 32, d = 0.5, 0..31 */
#define EXAMPLE "tests/golden/gguf/example.gguf"
enum { EXAMPLE_BYTES = 416, EXAMPLE_HEADER = 310, EXAMPLE_USED = 320 + 32 + 34 };

static uint8_t *example(void)
{
    char *data;
    size_t n;
    bg_error err = {0};
    cr_assert_eq(bg_read_file(EXAMPLE, 4096, &data, &n, &err), BG_OK, "%s", err.text);
    cr_assert_eq(n, EXAMPLE_BYTES);
    return (uint8_t *)data;
}

/* Everything that a reader may touch, so that a sanitizer sees what lies outside. */
static double touch(const bg_gguf *g)
{
    double sum = 0;
    for (int64_t i = 0; i < bg_gguf_n_kv(g); i++) {
        const bg_kv *kv = bg_gguf_kv(g, i);
        for (uint64_t k = 0; k < kv->n && k < 1000; k++) {
            int64_t v;
            double d;
            bool b;
            bg_str s;
            if (bg_kv_int(kv, k, &v)) sum += (double)v;
            if (bg_kv_float(kv, k, &d)) sum += d;
            if (bg_kv_bool(kv, k, &b)) sum += b;
            if (bg_kv_str(kv, k, &s))
                for (size_t c = 0; c < s.n; c++)
                    sum += s.p[c];
        }
    }
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        cr_expect_eq(bg_gguf_find_tensor(g, t->cname), t);
        for (size_t c = 0; c < t->bytes; c++)
            sum += ((const uint8_t *)t->data)[c];
    }
    return sum + (double)bg_gguf_fingerprint(g);
}

/* Opens a copy that ends where the bytes end. The text of a failure goes to text[512]. */
static bg_status open_bytes(const void *data, size_t n, char *text)
{
    bg_error err = {0};
    bg_gguf *g;
    void *copy = malloc(n ? n : 1);
    memcpy(copy, data, n);
    bg_status st = bg_gguf_open_memory(&g, copy, n, "f.gguf", &err);
    if (!st) {
        touch(g);
        bg_gguf_close(g);
    } else {
        cr_expect_null(g);
        cr_expect(strstr(err.text, "f.gguf"), "no file name: %s", err.text);
        for (const char *p = err.text; *p; p++)
            cr_expect((unsigned char)*p >= 32, "control characters: %s", err.text);
    }
    if (text) strcpy(text, err.text);
    free(copy);
    return st;
}

static void refused(const void *data, size_t n, const char *what, const char *expect)
{
    char text[512];
    cr_expect_eq(open_bytes(data, n, text), BG_FORMAT, "%s", what);
    cr_expect(strstr(text, expect), "%s: '%s' does not say '%s'", what, text, expect);
}

Test(parse, example)
{
    bg_error err = {0};
    bg_gguf *g;
    cr_assert_eq(bg_gguf_open(&g, EXAMPLE, &err), BG_OK, "%s", err.text);
    cr_expect_eq(bg_gguf_n_parts(g), 1);
    cr_expect_str_eq(bg_gguf_part_path(g, 0), EXAMPLE);
    cr_expect_eq(bg_gguf_file_bytes(g), EXAMPLE_BYTES);
    cr_expect_eq(bg_gguf_n_kv(g), 5);
    cr_expect_eq(bg_gguf_n_tensors(g), 2);
    bg_str s;
    int64_t v;
    bool b;
    cr_expect_eq(bg_gguf_get_str(g, "general.architecture", &s, &err), BG_OK);
    cr_expect(s.n == 5 && memcmp(s.p, "llama", 5) == 0);
    const bg_kv *list = bg_gguf_find(g, "x.list"), *words = bg_gguf_find(g, "x.words");
    cr_assert(list && words);
    cr_expect(list->n == 3 && list->type == BG_KV_ARR && list->elem_type == BG_KV_I32);
    cr_expect(bg_kv_int(list, 1, &v) && v == -2);
    cr_expect_not(bg_kv_int(list, 3, &v));
    cr_expect_not(bg_kv_str(list, 0, &s));
    cr_expect(words->n == 2 && words->elem_type == BG_KV_STR);
    cr_expect(bg_kv_str(words, 1, &s) && s.n == 2 && memcmp(s.p, "é", 2) == 0);
    cr_expect_not(bg_kv_str(words, 2, &s));
    cr_expect(bg_kv_bool(bg_gguf_find(g, "x.flag"), 0, &b) && b);
    cr_expect_null(bg_gguf_find(g, "x.fla"));
    cr_expect_null(bg_gguf_find(g, ""));

    const bg_tensor *t = bg_gguf_find_tensor(g, "a.weight");
    cr_assert(t);
    cr_expect(t->type == BG_F32 && t->n_dims == 2 && t->ne[0] == 3 && t->ne[1] == 2);
    cr_expect(t->ne[2] == 1 && t->ne[3] == 1 && t->bytes == 24 && t->offset == 320);
    cr_expect(t->part == 0 && strcmp(t->cname, "a.weight") == 0 && t->name.n == 8);
    float y[32];
    bg_dequant_row(t->type, (const char *)t->data + 12, y, 3);
    cr_expect(y[0] == 4 && y[1] == 5 && y[2] == 6);
    t = bg_gguf_find_tensor(g, "b.weight");
    cr_assert(t);
    bg_dequant_row(t->type, t->data, y, 32);
    cr_expect(y[0] == 0 && y[31] == 15.5f);
    cr_expect_null(bg_gguf_find_tensor(g, "c.weight"));
    bg_gguf_drop_pages(g, t->data, t->bytes);
    bg_gguf_close(g);
    bg_gguf_close(NULL);
}

Test(parse, files_that_are_none)
{
    static const struct {
        const char *path, *expect;
        bg_status st;
    } cases[] = {
        {"tests/golden/gguf/no-such.gguf", "No such file", BG_IO},
        {"tests/golden/gguf", "a directory", BG_FORMAT},
        {"/dev/null", "a pipe or device", BG_FORMAT},
        {"Makefile", "not a GGUF file", BG_FORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bg_error err = {0};
        bg_gguf *g;
        cr_expect_eq(bg_gguf_open(&g, cases[i].path, &err), cases[i].st, "%s", err.text);
        cr_expect_null(g);
        cr_expect(strstr(err.text, cases[i].expect) && strstr(err.text, cases[i].path), "%s",
                  err.text);
    }
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:12\n";
    refused(lfs, sizeof lfs - 1, "a pointer file", "git lfs pull");
    refused("", 0, "no bytes", "not a GGUF file");
}

Test(parse, cut_at_every_byte)
{
    uint8_t *d = example();
    for (size_t n = 0; n < EXAMPLE_BYTES; n++) {
        char text[512];
        bg_status st = open_bytes(d, n, text);
        if (n < EXAMPLE_USED) {
            cr_expect_eq(st, BG_FORMAT, "%zu bytes were accepted", n);
            if (n >= 4)
                cr_expect(strstr(text, "cut off") || strstr(text, "incomplete"), "%s", text);
        } else {
            cr_expect_eq(st, BG_OK, "%zu bytes: %s", n, text); /* only padding is missing */
        }
    }
    free(d);
}

Test(parse, every_bit_flipped)
{
    uint8_t *d = example();
    int accepted = 0;
    for (size_t i = 0; i < EXAMPLE_HEADER * 8; i++) {
        d[i / 8] ^= (uint8_t)(1 << i % 8);
        bg_status st = open_bytes(d, EXAMPLE_BYTES, NULL);
        cr_expect(st == BG_OK || st == BG_FORMAT);
        accepted += st == BG_OK;
        d[i / 8] ^= (uint8_t)(1 << i % 8);
    }
    /* Names, values and the like may change unseen; structure may not. */
    cr_expect(accepted > 100 && accepted < EXAMPLE_HEADER * 8 / 2, "%d", accepted);
    free(d);
}

static size_t place_of(const uint8_t *d, const char *text)
{
    const uint8_t *p = memmem(d, EXAMPLE_BYTES, text, strlen(text));
    cr_assert(p, "%s", text);
    return (size_t)(p - d) + strlen(text);
}

/* One field of the example replaced. */
Test(parse, fields_with_wrong_values)
{
    uint8_t *d = example();
    const size_t list = place_of(d, "x.list"), align = place_of(d, "general.alignment");
    const size_t a = place_of(d, "a.weight"), b = place_of(d, "b.weight");
    const size_t key = place_of(d, "general.arch") - 12, words = place_of(d, "x.words");
    const struct {
        const char *what;
        size_t at, n;
        uint64_t v;
        const char *expect; /* NULL: accepted */
    } cases[] = {
        {"magic", 3, 1, 'G', "does not start with"},
        {"version 1", 4, 4, 1, "version 1"},
        {"version 2", 4, 4, 2, NULL},
        {"version 4", 4, 4, 4, "version 4"},
        {"big-endian", 4, 4, 0x03000000, "big-endian"},
        {"2^63 tensors", 8, 8, UINT64_C(1) << 63, "tensors do not fit"},
        {"many tensors", 8, 8, 17, "tensors do not fit"},
        {"too many tensors", 8, 8, 16, "tensor"},
        {"2^64-1 keys", 16, 8, UINT64_MAX, "keys do not fit"},
        {"one key more", 16, 8, 6, "byte "},
        {"one key less", 16, 8, 4, "tensor"},
        {"length of a key", key - 8, 8, UINT64_MAX, "claims 18446744073709551615 bytes"},
        {"length of a key", key - 8, 8, 400, "claims 400 bytes"},
        {"empty key", key - 8, 8, 0, "a key of 0 bytes"},
        {"value type", list, 4, 13, "unknown value type 13"},
        {"element type", list + 4, 4, 99, "unknown value type 99"},
        {"array in array", list + 4, 4, 9, "key x.list"},
        {"2^64-1 elements", list + 8, 8, UINT64_MAX, "array of 18446744073709551615"},
        {"2^30 elements", list + 8, 8, 1 << 30, "does not fit"},
        {"elements just over", list + 8, 8, 80, "does not fit"},
        {"strings just over", words + 8, 8, 33, "does not fit"},
        {"length of a string", words + 16, 8, 1000, "claims 1000 bytes"},
        {"alignment 24", align + 4, 4, 24, "24 is no power of two"},
        {"alignment 0", align + 4, 4, 0, "no power of two"},
        {"alignment 4", align + 4, 4, 4, "no power of two"},
        {"alignment 2^31", align + 4, 4, UINT64_C(1) << 31, "no power of two"},
        {"alignment i32", align, 4, 5, "general.alignment: a u32 is needed, it is i32"},
        {"alignment 64", align + 4, 4, 64, "offset 32 is no multiple of the alignment 64"},
        {"flag 2", place_of(d, "x.flag") + 4, 1, 2, NULL},
        {"tensor twice", b - 8, 1, 'a', "tensor a.weight occurs twice"},
        {"5 dimensions", b, 4, 5, "5 dimensions"},
        {"row of 33", b + 4, 8, 33, "rows of 33 values are no whole Q8_0 blocks of 32"},
        {"row of 0", b + 4, 8, 0, "dimension 0 is 0"},
        {"negative", a + 12, 8, UINT64_MAX, "dimension 1 is -1"},
        {"product over 2^63", a + 12, 8, UINT64_C(1) << 62, "no possible size"},
        {"bytes over 2^64", a + 12, 8, (UINT64_C(1) << 61) - 1, "tensor a.weight"},
        {"type 200", b + 20, 4, 200, "unknown type 200"},
        {"type 4", b + 20, 4, 4, "removed"},
        {"type 36", b + 20, 4, 36, "removed"},
        {"type 137", b + 20, 4, 137, "ik_llama.cpp"},
        {"type 202", b + 20, 4, 202, "ik_llama.cpp"},
        {"type 63", b + 20, 4, 63, "unknown type 63"},
        {"type 2^32-1", b + 20, 4, UINT32_MAX, "unknown type 4294967295"},
        {"larger type", b + 20, 4, BG_F32, "cut off"},
        {"offset 33", b + 24, 8, 33, "no multiple of the alignment"},
        {"offset 64", b + 24, 8, 64, "at offset 64"},
        {"offset 2^63", b + 24, 8, UINT64_C(1) << 63, "at offset 9223372036854775808"},
        {"offset 2^64-32", b + 24, 8, UINT64_MAX - 31, "at offset 18446744073709551584"},
        {"overlap", b + 24, 8, 0, NULL},
        {"name 0x80", b - 8, 1, 0x80, "tensor name '?.weight'"},
        {"name with NUL", b - 8, 1, 0, "tensor name '?.weight'"},
        {"key 0xff", key, 1, 0xff, "not UTF-8"},
        {"key with NUL", key, 1, 0, "not UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t bad[EXAMPLE_BYTES];
        memcpy(bad, d, sizeof bad);
        memcpy(bad + cases[i].at, &cases[i].v, cases[i].n);
        if (cases[i].expect)
            refused(bad, sizeof bad, cases[i].what, cases[i].expect);
        else
            cr_expect_eq(open_bytes(bad, sizeof bad, NULL), BG_OK, "%s", cases[i].what);
    }
    free(d);
}

/* ---- files built here --------------------------------------------------------------------------
 */

static void u32(bg_buf *b, uint32_t v)
{
    bg_buf_add(b, &v, 4);
}

static void u64(bg_buf *b, uint64_t v)
{
    bg_buf_add(b, &v, 8);
}

static void str(bg_buf *b, const char *s)
{
    u64(b, strlen(s));
    bg_buf_str(b, s);
}

static void head(bg_buf *b, uint64_t n_tensors, uint64_t n_kv)
{
    bg_buf_str(b, "GGUF");
    u32(b, 3);
    u64(b, n_tensors);
    u64(b, n_kv);
}

static void expect_opens(bg_buf *b, const char *what)
{
    char text[512];
    cr_expect_eq(open_bytes(b->data, b->len, text), BG_OK, "%s: %s", what, text);
    bg_buf_release(b);
}

static void expect_refused(bg_buf *b, const char *what, const char *expect)
{
    refused(b->data, b->len, what, expect);
    bg_buf_release(b);
}

Test(parse, without_tensors)
{
    bg_buf b = {0};
    head(&b, 0, 0);
    expect_opens(&b, "nothing in it");
    head(&b, 0, 1);
    str(&b, "k");
    u32(&b, BG_KV_U8);
    bg_buf_char(&b, 7);
    expect_opens(&b, "no padding at the end");
    head(&b, 0, 1);
    str(&b, "k");
    u32(&b, BG_KV_ARR);
    u32(&b, BG_KV_STR);
    u64(&b, 0);
    expect_opens(&b, "an empty array");
}

Test(parse, key_twice)
{
    bg_buf b = {0};
    head(&b, 0, 3);
    for (int i = 0; i < 3; i++) {
        str(&b, i == 1 ? "other" : "same");
        u32(&b, BG_KV_U32);
        u32(&b, 1);
    }
    expect_refused(&b, "key twice", "key same occurs twice");
}

static void nested(bg_buf *b, int depth)
{
    head(b, 0, 1);
    str(b, "n");
    u32(b, BG_KV_ARR);
    for (int i = 1; i < depth; i++) {
        u32(b, BG_KV_ARR);
        u64(b, 1);
    }
    u32(b, BG_KV_STR);
    u64(b, 1);
    str(b, "x");
}

Test(parse, nested_arrays)
{
    bg_buf b = {0};
    nested(&b, 1);
    expect_opens(&b, "1 deep");
    nested(&b, 4);
    expect_opens(&b, "4 deep");
    nested(&b, 5);
    expect_refused(&b, "5 deep", "nested more than 4 deep");
    nested(&b, 1000);
    expect_refused(&b, "1000 deep", "nested more than 4 deep");
    /* Counts multiply: the inner one must be checked each time. */
    head(&b, 0, 1);
    str(&b, "n");
    u32(&b, BG_KV_ARR);
    u32(&b, BG_KV_ARR);
    u64(&b, 2);
    for (int i = 0; i < 2; i++) {
        u32(&b, BG_KV_U64);
        u64(&b, i ? 100 : 0);
    }
    expect_refused(&b, "second inner array", "does not fit");
}

static void tensor(bg_buf *b, const char *name, int n_dims, const uint64_t *ne, uint32_t type,
                   uint64_t offset)
{
    str(b, name);
    u32(b, (uint32_t)n_dims);
    for (int i = 0; i < n_dims; i++)
        u64(b, ne[i]);
    u32(b, type);
    u64(b, offset);
}

static void data_section(bg_buf *b, size_t n)
{
    while (b->len % 32)
        bg_buf_char(b, 0);
    for (size_t i = 0; i < n; i++)
        bg_buf_char(b, (char)i);
}

Test(parse, tensor_names_and_dimensions)
{
    bg_buf b = {0};
    char name[80] = {0};
    memset(name, 'n', 63);
    head(&b, 1, 0);
    tensor(&b, name, 0, NULL, BG_F32, 0);
    data_section(&b, 4);
    expect_opens(&b, "63 bytes, no dimensions");
    name[63] = 'n';
    head(&b, 1, 0);
    tensor(&b, name, 0, NULL, BG_F32, 0);
    data_section(&b, 4);
    expect_refused(&b, "64 bytes", "of 64 bytes");
    head(&b, 1, 0);
    tensor(&b, "", 0, NULL, BG_F32, 0);
    data_section(&b, 4);
    expect_refused(&b, "no name", "of 0 bytes");
    head(&b, 1, 0);
    tensor(&b, "t", 4, (const uint64_t[]){256, 2, 3, 4}, BG_Q6_K, 0);
    data_section(&b, 24 * 210);
    expect_opens(&b, "four dimensions");
    head(&b, 1, 0);
    tensor(&b, "t", 4, (const uint64_t[]){256, 2, 3, 4}, BG_Q6_K, 0);
    data_section(&b, 24 * 210 - 1);
    expect_refused(&b, "a byte too few", "5040 bytes at offset 0 of the data, which has 5039");
    /* Out of order, with a gap. */
    head(&b, 2, 0);
    tensor(&b, "t", 1, (const uint64_t[]){8}, BG_F32, 96);
    tensor(&b, "u", 1, (const uint64_t[]){8}, BG_F32, 0);
    data_section(&b, 128);
    expect_opens(&b, "order");
    /* 32 x 2^58 = 2^63: one too many. 31 x 2^58 values of 8 bytes: more than 2^64 bytes. */
    head(&b, 1, 0);
    tensor(&b, "t", 2, (const uint64_t[]){32, UINT64_C(1) << 58}, BG_F32, 0);
    data_section(&b, 32);
    expect_refused(&b, "2^63 values", "no possible size");
    head(&b, 1, 0);
    tensor(&b, "t", 2, (const uint64_t[]){31, UINT64_C(1) << 58}, BG_F64, 0);
    data_section(&b, 32);
    expect_refused(&b, "2^66 bytes", "larger than any memory");
}

Test(parse, long_names_are_cut_in_messages)
{
    bg_buf b = {0};
    char key[2000];
    memset(key, 'k', sizeof key);
    key[1999] = 0;
    key[5] = '\n';
    head(&b, 0, 2);
    for (int i = 0; i < 2; i++) {
        str(&b, key);
        u32(&b, BG_KV_U8);
        bg_buf_char(&b, 0);
    }
    expect_refused(&b, "long key", "kkkkk?kkk");
}

/* ---- values
 * -------------------------------------------------------------------------------------- */

Test(values, every_width_reads_as_int64)
{
    bg_buf b = {0};
    bg_gguf *g;
    bg_error err = {0};
    static const uint8_t ones[8] = {255, 255, 255, 255, 255, 255, 255, 255};
    static const uint8_t width[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    head(&b, 0, 11);
    for (uint32_t t = 0; t <= BG_KV_F64; t++) {
        char key[8];
        if (t == BG_KV_STR || t == BG_KV_ARR) continue;
        snprintf(key, sizeof key, "k%u", t);
        str(&b, key);
        u32(&b, t);
        bg_buf_add(&b, ones, width[t]);
    }
    cr_assert_eq(bg_gguf_open_memory(&g, b.data, b.len, "m", &err), BG_OK, "%s", err.text);
    static const struct {
        const char *key;
        bool is_int;
        int64_t v;
    } want[] = {{"k0", true, 255},        {"k1", true, -1},  {"k2", true, 65535}, {"k3", true, -1},
                {"k4", true, UINT32_MAX}, {"k5", true, -1},  {"k6", false, 0},    {"k7", true, 1},
                {"k10", false, 0},        {"k11", true, -1}, {"k12", false, 0}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        int64_t v = 0;
        double d;
        const bg_kv *kv = bg_gguf_find(g, want[i].key);
        cr_assert(kv, "%s", want[i].key);
        cr_expect_eq(bg_kv_int(kv, 0, &v), want[i].is_int, "%s", want[i].key);
        cr_expect_eq(v, want[i].v, "%s: %lld", want[i].key, (long long)v);
        cr_expect_eq(bg_kv_float(kv, 0, &d), kv->type != BG_KV_BOOL, "%s", want[i].key);
        if (kv->type == BG_KV_F32 || kv->type == BG_KV_F64) cr_expect(isnan(d));
        if (kv->type == BG_KV_U64) cr_expect(d == 0x1p64);
    }
    bg_gguf_close(g);
    bg_buf_release(&b);
}

Test(values, defaults_and_wrong_kinds)
{
    bg_gguf *g;
    bg_error err = {0};
    int64_t v;
    double d;
    bool b;
    bg_str s;
    cr_assert_eq(bg_gguf_open(&g, EXAMPLE, &err), BG_OK);
    cr_expect(!bg_gguf_get_int(g, "none", 7, &v, &err) && v == 7);
    cr_expect(!bg_gguf_get_float(g, "none", 0.5, &d, &err) && d == 0.5);
    cr_expect(!bg_gguf_get_bool(g, "none", true, &b, &err) && b);
    cr_expect(!bg_gguf_get_str(g, "none", &s, &err) && s.n == 0);
    cr_expect(!bg_gguf_get_int(g, "general.alignment", 0, &v, &err) && v == 32);
    cr_expect(!bg_gguf_get_float(g, "general.alignment", 0, &d, &err) && d == 32);
    cr_expect(!bg_gguf_get_int(g, "x.flag", 0, &v, &err) && v == 1);

    cr_expect_eq(bg_gguf_get_int(g, "x.list", 0, &v, &err), BG_FORMAT);
    cr_expect(strstr(err.text, "key x.list: an integer is needed, but it is an array of 3 i32"),
              "%s", err.text);
    err = (bg_error){0};
    cr_expect_eq(bg_gguf_get_str(g, "x.flag", &s, &err), BG_FORMAT);
    cr_expect(strstr(err.text, "key x.flag: a string is needed, but its type is bool"), "%s",
              err.text);
    err = (bg_error){0};
    cr_expect_eq(bg_gguf_get_bool(g, "general.alignment", true, &b, &err), BG_FORMAT);
    err = (bg_error){0};
    cr_expect_eq(bg_gguf_get_float(g, "x.words", 0, &d, &err), BG_FORMAT);
    bg_gguf_close(g);
}

Test(values, many_keys_are_all_found)
{
    enum { N = 20000 };
    bg_buf b = {0};
    bg_gguf *g;
    bg_error err = {0};
    char key[32];
    head(&b, 0, N);
    for (int i = 0; i < N; i++) {
        snprintf(key, sizeof key, "key.%d", i);
        str(&b, key);
        u32(&b, BG_KV_U32);
        u32(&b, (uint32_t)i);
    }
    cr_assert_eq(bg_gguf_open_memory(&g, b.data, b.len, "m", &err), BG_OK, "%s", err.text);
    for (int i = 0; i < N; i++) {
        int64_t v;
        snprintf(key, sizeof key, "key.%d", i);
        cr_expect(!bg_gguf_get_int(g, key, -1, &v, &err) && v == i, "%s", key);
    }
    bg_gguf_close(g);
    bg_buf_release(&b);
}
