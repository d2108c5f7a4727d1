/* The writer, read back; split models; and memory that runs out at every allocation. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "base/io.h"
#include "gguf/gguf.h"

/* ---- a directory for one test ------------------------------------------------------------------
 */

static char dir[64];

static void make_dir(void)
{
    snprintf(dir, sizeof dir, "/tmp/bg-gguf-XXXXXX");
    cr_assert(mkdtemp(dir));
}

static const char *in_dir(const char *name)
{
    static char path[4][512];
    static int turn;
    char *p = path[turn++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", dir, name);
    return p;
}

static void remove_dir(void)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        unlink(in_dir(e->d_name));
    if (d) closedir(d);
    rmdir(dir);
}

/* ---- making files ------------------------------------------------------------------------------
 */

/* Byte k of tensor i is 10 i + k, handed over in two pieces. */
static bg_status produce(void *ctx, int64_t i, size_t bytes, bg_gguf_emit *emit, void *sink,
                         bg_error *err)
{
    const int *skew = ctx; /* bytes too many */
    size_t n = bytes + (size_t)(skew ? *skew : 0);
    uint8_t *b = malloc(n);
    if (!b) return bg_fail(err, BG_NOMEM, "out of memory");
    for (size_t k = 0; k < n; k++)
        b[k] = (uint8_t)(10 * (size_t)i + k);
    bg_status st = emit(sink, b, n / 2, err);
    if (!st) st = emit(sink, b + n / 2, n - n / 2, err);
    free(b);
    return st;
}

static bg_status write_it(bg_gguf_writer *w, const char *path, int skew, bg_error *err)
{
    bg_status st = bg_gguf_write(w, path, produce, &skew, err);
    bg_gguf_writer_free(w);
    return st;
}

static bool holds_pattern(const bg_tensor *t, int64_t i)
{
    for (size_t k = 0; k < t->bytes; k++)
        if (((const uint8_t *)t->data)[k] != (uint8_t)(10 * (size_t)i + k)) return false;
    return true;
}

Test(write, what_is_written_is_read, .init = make_dir, .fini = remove_dir)
{
    bg_error err = {0};
    bg_gguf *g;
    bg_gguf_writer *w = bg_gguf_writer_new(64);
    const bg_str words[] = {{"a", 1}, {"", 0}, {"long one", 8}};
    const float floats[] = {0.5f, -1};
    const char *path = in_dir("w.gguf");
    cr_assert(w);
    bg_gguf_put_u16(w, "u16", 65535);
    bg_gguf_put_u32(w, "u32", UINT32_MAX);
    bg_gguf_put_u64(w, "u64", INT64_MAX);
    bg_gguf_put_i32(w, "i32", -5);
    bg_gguf_put_f32(w, "f32", 1.5f);
    bg_gguf_put_bool(w, "bool", true);
    bg_gguf_put_str(w, "str", "va\0lue", 6);
    bg_gguf_put_array(w, "words", BG_KV_STR, words, 3);
    bg_gguf_put_array(w, "floats", BG_KV_F32, floats, 2);
    bg_gguf_put_tensor(w, "first", BG_Q8_0, 2, (const int64_t[]){32, 3});
    bg_gguf_put_tensor(w, "second", BG_F32, 1, (const int64_t[]){5});
    bg_gguf_put_tensor(w, "third", BG_Q4_K, 3, (const int64_t[]){256, 2, 600});
    cr_assert_eq(write_it(w, path, 0, &err), BG_OK, "%s", err.text);

    cr_assert_eq(bg_gguf_open(&g, path, &err), BG_OK, "%s", err.text);
    int64_t v;
    double d;
    bool b;
    bg_str s;
    cr_expect(!bg_gguf_get_int(g, "general.alignment", 0, &v, &err) && v == 64);
    cr_expect(!bg_gguf_get_int(g, "u16", 0, &v, &err) && v == 65535);
    cr_expect(!bg_gguf_get_int(g, "u32", 0, &v, &err) && v == UINT32_MAX);
    cr_expect(!bg_gguf_get_int(g, "u64", 0, &v, &err) && v == INT64_MAX);
    cr_expect(!bg_gguf_get_int(g, "i32", 0, &v, &err) && v == -5);
    cr_expect(!bg_gguf_get_float(g, "f32", 0, &d, &err) && d == 1.5);
    cr_expect(!bg_gguf_get_bool(g, "bool", false, &b, &err) && b);
    cr_expect(!bg_gguf_get_str(g, "str", &s, &err) && s.n == 6 && !memcmp(s.p, "va\0lue", 6));
    cr_expect(bg_kv_str(bg_gguf_find(g, "words"), 2, &s) && s.n == 8);
    cr_expect(bg_kv_float(bg_gguf_find(g, "floats"), 1, &d) && d == -1);
    cr_assert_eq(bg_gguf_n_tensors(g), 3);
    for (int64_t i = 0; i < 3; i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        cr_expect_eq(t->offset % 64, 0);
        cr_expect(holds_pattern(t, i), "%s", t->cname);
    }
    cr_expect_eq(bg_gguf_tensor(g, 2)->bytes, 1200 * 144);
    cr_expect_eq(bg_gguf_file_bytes(g) % 64, 0);
    /* Pages that were dropped come back from the file. */
    const bg_tensor *t = bg_gguf_tensor(g, 2);
    bg_gguf_drop_pages(g, t->data, t->bytes);
    bg_gguf_drop_pages(g, &g, sizeof g); /* not in the mapping: nothing happens */
    cr_expect(holds_pattern(t, 2));
    bg_gguf_close(g);
}

/* Shapes without bytes: refused as a model, readable as a header. */
Test(write, a_header_alone, .init = make_dir, .fini = remove_dir)
{
    bg_error err = {0};
    bg_gguf *g;
    bg_gguf_writer *w = bg_gguf_writer_new(64);
    const char *path = in_dir("h.gguf");
    bg_gguf_put_u32(w, "u32", 7);
    bg_gguf_put_tensor(w, "first", BG_F32, 1, (const int64_t[]){5});
    bg_gguf_put_tensor(w, "second", BG_Q4_K, 2, (const int64_t[]){256, 3});
    cr_assert_eq(bg_gguf_write(w, path, NULL, NULL, &err), BG_OK, "%s", err.text);
    bg_gguf_writer_free(w);
    cr_expect_eq(bg_gguf_open(&g, path, &err), BG_FORMAT);

    struct stat s;
    cr_assert_eq(stat(path, &s), 0);
    for (int more = 0; more < 2; more++) { /* then with the first tensor's bytes */
        err = (bg_error){0};
        cr_assert_eq(truncate(path, s.st_size + 64 * more), 0);
        cr_assert_eq(bg_gguf_open_header(&g, path, &err), BG_OK, "%s", err.text);
        const bg_tensor *a = bg_gguf_find_tensor(g, "first"), *b = bg_gguf_find_tensor(g, "second");
        cr_assert(a && b);
        cr_expect(more ? a->data != NULL : a->data == NULL);
        cr_expect(b->data == NULL && b->bytes == 3 * 144);
        (void)bg_gguf_fingerprint(g);
        bg_gguf_will_need(g, a->data, a->bytes);
        bg_gguf_drop_pages(g, b->data, b->bytes);
        bg_gguf_close(g);
    }
}

Test(write, memory_is_not_dropped)
{
    const size_t n = 1 << 16;
    bg_error err = {0};
    bg_gguf *g;
    char *data;
    size_t n_example;
    cr_assert_eq(bg_read_file("tests/golden/gguf/example.gguf", n, &data, &n_example, &err), BG_OK);
    char *big = aligned_alloc(4096, n);
    memset(big, 77, n);
    memcpy(big, data, n_example);
    cr_assert_eq(bg_gguf_open_memory(&g, big, n, "m", &err), BG_OK, "%s", err.text);
    bg_gguf_drop_pages(g, big, n);
    cr_expect(big[n - 1] == 77 && big[0] == 'G');
    bg_gguf_close(g);
    free(big);
    free(data);
}

Test(write, nonsense_is_refused, .init = make_dir, .fini = remove_dir)
{
    static const int64_t one[4] = {32, 1, 1, 1}, odd[4] = {33, 1, 1, 1}, none[4] = {0, 1, 1, 1};
    const char *path = in_dir("w.gguf");
    for (int i = 0; i < 12; i++) {
        static const char *const expect[] = {"key k was given twice",  "tensor t was given twice",
                                             "no possible tensor",     "no possible tensor",
                                             "no possible tensor",     "no possible tensor",
                                             "alignment 12",           "got more bytes than it has",
                                             "1 bytes were not given", "No such file or directory",
                                             "an empty key",           "no possible tensor"};
        bg_error err = {0};
        bg_gguf_writer *w = bg_gguf_writer_new(i == 6 ? 12 : 0);
        cr_assert(w);
        bg_gguf_put_u32(w, i == 10 ? "" : "k", 1);
        if (i == 0) bg_gguf_put_f32(w, "k", 1);
        bg_gguf_put_tensor(w, "t", BG_Q8_0, 1, one);
        if (i == 1) bg_gguf_put_tensor(w, "t", BG_F32, 1, one);
        if (i == 2) bg_gguf_put_tensor(w, "u", BG_Q8_0, 1, odd);
        if (i == 3) bg_gguf_put_tensor(w, "u", 4, 1, one);
        if (i == 4) bg_gguf_put_tensor(w, "u", BG_F32, 5, one);
        if (i == 5) bg_gguf_put_tensor(w, "u", BG_F32, 1, none);
        if (i == 11)
            bg_gguf_put_tensor(w,
                               "0123456789012345678901234567890123456789012345678901234567890123",
                               BG_F32, 1, one);
        bg_status st = write_it(w, i == 9 ? in_dir("no/w.gguf") : path,
                                i == 7   ? 1
                                : i == 8 ? -1
                                         : 0,
                                &err);
        cr_expect_eq(st, i == 9 ? BG_IO : BG_ARG, "%d: %s", i, err.text);
        cr_expect(strstr(err.text, expect[i]), "%d: %s", i, err.text);
    }
}

/* ---- split models ------------------------------------------------------------------------------
 */

typedef struct part { /* what a part says about itself */
    int no, count, total;
    const char *tensor; /* NULL: none */
} part;

static const char *part_name(int no, int count)
{
    static char name[4][64];
    static int turn;
    char *p = name[turn++ % 4];
    snprintf(p, sizeof name[0], "m-%05d-of-%05d.gguf", no + 1, count);
    return p;
}

static void write_part(const char *name, part p)
{
    bg_error err = {0};
    bg_gguf_writer *w = bg_gguf_writer_new(0);
    cr_assert(w);
    if (p.no == 0) bg_gguf_put_str(w, "general.architecture", "llama", 5);
    bg_gguf_put_u16(w, "split.no", (uint16_t)p.no);
    bg_gguf_put_u16(w, "split.count", (uint16_t)p.count);
    bg_gguf_put_i32(w, "split.tensors.count", p.total);
    if (p.tensor) bg_gguf_put_tensor(w, p.tensor, BG_F32, 1, (const int64_t[]){8});
    cr_assert_eq(write_it(w, in_dir(name), 0, &err), BG_OK, "%s", err.text);
}

static void write_three(void)
{
    write_part(part_name(0, 3), (part){0, 3, 2, NULL});
    write_part(part_name(1, 3), (part){1, 3, 2, "t"});
    write_part(part_name(2, 3), (part){2, 3, 2, "u"});
}

static void refused(const char *name, bg_status want, const char *expect)
{
    bg_error err = {0};
    bg_gguf *g;
    cr_expect_eq(bg_gguf_open(&g, in_dir(name), &err), want, "%s", err.text);
    cr_expect(strstr(err.text, expect), "'%s' does not say '%s'", err.text, expect);
    cr_expect_null(g);
}

Test(split, opens_from_any_part, .init = make_dir, .fini = remove_dir)
{
    uint64_t print = 0;
    write_three();
    for (int i = 0; i < 3; i++) {
        bg_error err = {0};
        bg_gguf *g;
        cr_assert_eq(bg_gguf_open(&g, in_dir(part_name(i, 3)), &err), BG_OK, "%s", err.text);
        cr_expect_eq(bg_gguf_n_parts(g), 3);
        cr_expect_str_eq(bg_gguf_part_path(g, 2), in_dir(part_name(2, 3)));
        cr_expect(bg_gguf_find(g, "general.architecture"));
        cr_expect_eq(bg_gguf_n_tensors(g), 2);
        const bg_tensor *u = bg_gguf_find_tensor(g, "u");
        cr_assert(u);
        cr_expect(u->part == 2 && holds_pattern(u, 0));
        if (i) cr_expect_eq(bg_gguf_fingerprint(g), print);
        print = bg_gguf_fingerprint(g);
        bg_gguf_close(g);
    }
}

Test(split, broken_sets_are_refused, .init = make_dir, .fini = remove_dir)
{
    write_three();
    cr_assert_eq(unlink(in_dir(part_name(1, 3))), 0);
    refused(part_name(2, 3), BG_IO, "part 2 of 3 of a split model");
    refused(part_name(0, 3), BG_IO, "m-00002-of-00003.gguf: cannot open the model: No such file");

    write_part(part_name(1, 3), (part){2, 3, 2, "t"});
    refused(part_name(0, 3), BG_FORMAT, "says it is part 3 of 3, its name says 2 of 3");
    write_part(part_name(1, 3), (part){1, 4, 2, "t"});
    refused(part_name(0, 3), BG_FORMAT, "says it is part 2 of 4, its name says 2 of 3");
    write_part(part_name(1, 3), (part){1, 3, 2, "u"});
    refused(part_name(0, 3), BG_FORMAT, "tensor u is also in");
    write_part(part_name(1, 3), (part){1, 3, 2, NULL});
    refused(part_name(0, 3), BG_FORMAT, "split.tensors.count is 2, but the 3 parts have 1");
    write_part(part_name(1, 3), (part){3, 3, 2, "t"});
    refused(part_name(1, 3), BG_FORMAT, "split.no is not a number from 0 to 2");
    write_part("renamed.gguf", (part){1, 3, 2, "t"});
    refused("renamed.gguf", BG_FORMAT, "does not end in '-00002-of-00003.gguf'");
    /* A count of 0 or 1 is no split: whatever the name is. */
    write_part("whole.gguf", (part){0, 0, 1, "t"});
    bg_error err = {0};
    bg_gguf *g;
    cr_expect_eq(bg_gguf_open(&g, in_dir("whole.gguf"), &err), BG_OK, "%s", err.text);
    bg_gguf_close(g);
}

Test(split, one_part_in_memory_is_refused, .init = make_dir, .fini = remove_dir)
{
    bg_error err = {0};
    bg_gguf *g;
    char *data;
    size_t n;
    write_three();
    cr_assert_eq(bg_read_file(in_dir(part_name(0, 3)), 1 << 20, &data, &n, &err), BG_OK);
    cr_expect_eq(bg_gguf_open_memory(&g, data, n, "m", &err), BG_FORMAT);
    cr_expect(strstr(err.text, "one of 3 parts"), "%s", err.text);
    free(data);
}

static uint64_t print_of(const void *data, size_t n)
{
    bg_error err = {0};
    bg_gguf *g;
    cr_assert_eq(bg_gguf_open_memory(&g, data, n, "m", &err), BG_OK, "%s", err.text);
    uint64_t h = bg_gguf_fingerprint(g);
    bg_gguf_close(g);
    return h;
}

Test(fingerprint, sees_every_byte_of_a_small_file)
{
    bg_error err = {0};
    char *data;
    size_t n;
    cr_assert_eq(bg_read_file("tests/golden/gguf/example.gguf", 4096, &data, &n, &err), BG_OK);
    const uint64_t h = print_of(data, n);
    cr_expect_eq(print_of(data, n), h);
    cr_expect_neq(print_of(data, n - 1), h);
    for (size_t i = 312; i < n; i++) { /* padding and data; all before it is the header */
        data[i] ^= 1;
        cr_expect_neq(print_of(data, n), h, "byte %zu", i);
        data[i] ^= 1;
    }
    data[4] = 2; /* the version */
    cr_expect_neq(print_of(data, n), h);
    free(data);
}

Test(fingerprint, samples_large_data, .init = make_dir, .fini = remove_dir)
{
    bg_error err = {0};
    bg_gguf_writer *w = bg_gguf_writer_new(0);
    char *data;
    size_t n;
    cr_assert(w);
    bg_gguf_put_tensor(w, "t", BG_F32, 2, (const int64_t[]){1024, 2048});
    cr_assert_eq(write_it(w, in_dir("f.gguf"), 0, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_read_file(in_dir("f.gguf"), 1 << 24, &data, &n, &err), BG_OK);
    const uint64_t h = print_of(data, n);
    for (size_t at = 4096; at + 65536 <= n; at += 1 << 20) { /* some rows changed */
        for (size_t i = at; i < at + 65536; i++)
            data[i] ^= 1;
        cr_expect_neq(print_of(data, n), h, "bytes from %zu", at);
        for (size_t i = at; i < at + 65536; i++)
            data[i] ^= 1;
    }
    data[n - 1] ^= 1;
    cr_expect_neq(print_of(data, n), h);
    free(data);
}

/* ---- memory ------------------------------------------------------------------------------------
 */

#ifndef __SANITIZE_ADDRESS__
/* Allocation number fail_at of this process fails; glibc's own entry points do the rest. */
static long fail_at = -1;

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);

static bool fails(void)
{
    return fail_at >= 0 && fail_at-- == 0;
}

void *malloc(size_t n)
{
    return fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return fails() ? NULL : __libc_realloc(p, n);
}

Test(memory, every_allocation_fails_once, .init = make_dir, .fini = remove_dir)
{
    write_three();
    char first[512];
    snprintf(first, sizeof first, "%s", in_dir(part_name(1, 3)));
    int failed = 0;
    for (long i = 0; i < 1000; i++) {
        bg_error err = {0};
        bg_gguf *g;
        fail_at = i;
        bg_status st = bg_gguf_open(&g, first, &err);
        bool reached = fail_at < 0;
        fail_at = -1;
        bg_gguf_close(g);
        if (!reached) break;
        cr_expect_eq(st, BG_NOMEM, "allocation %ld: %s", i, err.text);
        failed++;
    }
    cr_expect(failed > 10 && failed < 1000, "%d", failed);
}

Test(memory, the_writer_says_so_at_the_end, .init = make_dir, .fini = remove_dir)
{
    char path[512];
    snprintf(path, sizeof path, "%s", in_dir("w.gguf"));
    int failed = 0;
    for (long i = 0; i < 1000; i++) {
        bg_error err = {0};
        fail_at = i;
        bg_gguf_writer *w = bg_gguf_writer_new(0);
        bg_status st = BG_NOMEM;
        if (w) {
            bg_gguf_put_str(w, "key", "value", 5);
            bg_gguf_put_tensor(w, "t", BG_F32, 1, (const int64_t[]){8});
            st = write_it(w, path, 0, &err);
        }
        bool reached = fail_at < 0;
        fail_at = -1;
        if (!reached) break;
        cr_expect_eq(st, BG_NOMEM, "allocation %ld: %s", i, err.text);
        failed++;
    }
    cr_expect(failed > 5 && failed < 1000, "%d", failed);
}
#endif
