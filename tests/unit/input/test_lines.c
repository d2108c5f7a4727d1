#include <criterion/criterion.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <lz4frame.h>
#include <zlib.h>
#include <zstd.h>

#include "base/buf.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/rng.h"
#include "input/input.h"

static char dir[] = "/tmp/bg-lines-XXXXXX";
static char path_a[64], path_b[64];

static void set_up(void)
{
    cr_assert(mkdtemp(dir));
    snprintf(path_a, sizeof path_a, "%s/a", dir);
    snprintf(path_b, sizeof path_b, "%s/b", dir);
}

static void tear_down(void)
{
    unlink(path_a);
    unlink(path_b);
    rmdir(dir);
}

TestSuite(lines, .init = set_up, .fini = tear_down);

static void put(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    cr_assert(f);
    cr_assert_eq(fwrite(data, 1, n, f), n);
    cr_assert_eq(fclose(f), 0);
}

static void gz(bg_buf *out, const void *data, size_t n)
{
    z_stream z = {0};
    cr_assert_eq(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    size_t bound = deflateBound(&z, n);
    bg_buf_reserve(out, bound);
    z.next_in = (Bytef *)(uintptr_t)data;
    z.avail_in = (uInt)n;
    z.next_out = (Bytef *)out->data + out->len;
    z.avail_out = (uInt)bound;
    cr_assert_eq(deflate(&z, Z_FINISH), Z_STREAM_END);
    out->len += z.total_out;
    deflateEnd(&z);
}

static void zst(bg_buf *out, const void *data, size_t n)
{
    bg_buf_reserve(out, ZSTD_compressBound(n));
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
    size_t w = ZSTD_compress2(c, out->data + out->len, ZSTD_compressBound(n), data, n);
    cr_assert_not(ZSTD_isError(w));
    out->len += w;
    ZSTD_freeCCtx(c);
}

static void lz4(bg_buf *out, const void *data, size_t n)
{
    LZ4F_preferences_t p = {.frameInfo = {.contentChecksumFlag = LZ4F_contentChecksumEnabled,
                                          .blockSizeID = LZ4F_max64KB}};
    bg_buf_reserve(out, LZ4F_compressFrameBound(n, &p));
    size_t w =
        LZ4F_compressFrame(out->data + out->len, LZ4F_compressFrameBound(n, &p), data, n, &p);
    cr_assert_not(LZ4F_isError(w));
    out->len += w;
}

static void skippable(bg_buf *out, size_t n)
{
    unsigned char head[8] = {0x53, 0x2a, 0x4d, 0x18, (unsigned char)n, (unsigned char)(n >> 8),
                             0,    0};
    bg_buf_add(out, head, 8);
    for (size_t i = 0; i < n; i++)
        bg_buf_char(out, '{');
}

static void plain(bg_buf *out, const void *data, size_t n)
{
    bg_buf_add(out, data, n);
}

static void (*const packers[])(bg_buf *, const void *, size_t) = {plain, gz, zst, lz4};

/* Everything that a reader of these inputs is told, as text; ends with the status. */
static void transcript(const char *const *paths, int n_paths, size_t max_line, bg_buf *out,
                       bg_error *err)
{
    bg_input *in;
    bg_status st = bg_input_open(&in, paths, n_paths, max_line, err);
    cr_assert_eq(st, BG_OK, "%s", err->text);
    bg_line l;
    bool got = true;
    while (!(st = bg_input_next(in, &l, &got, err)) && got) {
        bg_buf_printf(out, "%d:%lld:%lld @%llu-%llu #%016llx%s ", l.file, (long long)l.line,
                      (long long)l.record, (unsigned long long)l.offset, (unsigned long long)l.end,
                      (unsigned long long)l.hash, l.too_long ? " long" : "");
        bg_buf_json(out, l.data, l.n);
        bg_buf_char(out, '\n');
    }
    bg_error again = {0};
    cr_expect_eq(bg_input_next(in, &l, &got, &again), st, "the end must stay the end");
    cr_expect_not(got);
    bg_buf_printf(out, "%s %lld #%016llx\n", bg_status_name(st), (long long)bg_input_records(in),
                  (unsigned long long)bg_input_hash(in));
    bg_input_close(in);
}

/* The same from the contract: one file, all of it in memory. */
static void model(const char *data, size_t n, size_t max_line, bg_buf *out)
{
    uint64_t hash = 0;
    int64_t line = 0;
    for (size_t at = 0; at < n;) {
        const char *lf = memchr(data + at, '\n', n - at);
        size_t end = lf ? (size_t)(lf - data) + 1 : n, from = at, to = lf ? end - 1 : n;
        hash = bg_hash64(data + at, end - at, hash);
        if (at == 0 && n >= 3 && !memcmp(data, "\xef\xbb\xbf", 3)) from = 3;
        if (to > from && data[to - 1] == '\r') to--;
        bool is_long = to - from > max_line;
        if (is_long) to = from + max_line;
        line++;
        if (is_long || strspn(data + from, " \t\r") < to - from) {
            bg_buf_printf(out, "0:%lld:%lld @%zu-%zu #%016llx%s ", (long long)line,
                          (long long)line - 1, from, end, (unsigned long long)hash,
                          is_long ? " long" : "");
            bg_buf_json(out, data + from, to - from);
            bg_buf_char(out, '\n');
        }
        at = end;
    }
    bg_buf_printf(out, "BG_OK %lld #%016llx\n", (long long)line, (unsigned long long)hash);
}

static void expect_model(const char *data, size_t n, size_t max_line)
{
    bg_buf want = {0}, file = {0};
    char *copy = strndup(data, n); /* NUL-terminated for strspn; no NUL inside */
    model(copy, n, max_line, &want);
    const char *paths[] = {path_a};
    for (size_t k = 0; k < sizeof packers / sizeof *packers; k++) {
        bg_buf got = {0};
        bg_error err = {0};
        bg_buf_clear(&file);
        packers[k](&file, data, n);
        put(path_a, file.data, file.len);
        transcript(paths, 1, max_line, &got, &err);
        cr_expect_str_eq(got.data, want.data, "packer %zu, max_line %zu, %zu bytes", k, max_line,
                         n);
        bg_buf_release(&got);
    }
    free(copy);
    bg_buf_release(&want);
    bg_buf_release(&file);
}

Test(lines, ends_blanks_and_mark)
{
    static const char *const texts[] = {"",
                                        "\n",
                                        "a",
                                        "a\n",
                                        "a\r\nb\r\n",
                                        "a\n\n \t\r\nb",
                                        "\r\n",
                                        "\r",
                                        "a\rb\nc\r\r",
                                        "\xef\xbb\xbf",
                                        "\xef\xbb\xbf"
                                        "a\n\xef\xbb\xbf"
                                        "b",
                                        "\xef\xbb\n",
                                        "\xef\xbb\xbf\r\nx\n",
                                        "   \n\n\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        expect_model(texts[i], strlen(texts[i]), 1 << 20);
}

Test(lines, long_lines)
{
    bg_buf b = {0};
    static const size_t sizes[] = {9, 10, 11, 12, 13, 20, 21, 30, 100, 5, 40, 0, 10};
    for (int bom = 0; bom < 2; bom++) {
        for (int crlf = 0; crlf < 2; crlf++) {
            for (int last = 0; last < 2; last++) {
                bg_buf_clear(&b);
                if (bom) bg_buf_str(&b, "\xef\xbb\xbf");
                for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                    for (size_t k = 0; k < sizes[i]; k++)
                        bg_buf_char(&b, (char)('a' + k % 26));
                    bg_buf_str(&b, crlf ? "\r\n" : "\n");
                }
                if (last) bg_buf_str(&b, "0123456789abcdefghijklmnopqrstuvwxyz");
                expect_model(b.data, b.len, 10);
                expect_model(b.data, b.len, 20);
            }
        }
    }
    bg_buf_release(&b);
}

/* Lines of all sizes across the reader's buffer borders, some far over the limit. */
Test(lines, random_sizes)
{
    bg_buf b = {0};
    for (uint64_t seed = 0; seed < 3; seed++) {
        bg_buf_clear(&b);
        for (uint64_t i = 0; b.len < 3000000; i++) {
            uint32_t r = bg_sample_word(seed, i, 0);
            size_t n = r % 16 == 0 ? r % 700000 : r % 16 < 4 ? 0 : r % 5000;
            for (size_t k = 0; k < n; k++)
                bg_buf_char(&b, (char)(' ' + (k * 7 + r) % 90));
            bg_buf_str(&b, r & 64 ? "\r\n" : "\n");
        }
        expect_model(b.data, b.len, 100000);
        expect_model(b.data, b.len, 1 << 20);
    }
    bg_buf_release(&b);
}

Test(lines, several_files_are_one_job)
{
    put(path_a,
        "\xef\xbb\xbf"
        "a\n\nb",
        7);
    bg_buf b = {0}, got = {0};
    lz4(&b,
        "\xef\xbb\xbf"
        "c\nd\n",
        7);
    put(path_b, b.data, b.len);
    const char *paths[] = {path_a, path_b, path_a};
    bg_error err = {0};
    bg_input *in;
    cr_assert_eq(bg_input_open(&in, paths, 3, 0, &err), BG_OK);
    static const struct {
        const char *text;
        int file;
        int64_t line, record;
        uint64_t offset, end;
    } want[] = {{"a", 0, 1, 0, 3, 5},  {"b", 0, 3, 2, 6, 7},  {"c", 1, 1, 3, 3, 12},
                {"d", 1, 2, 4, 5, 14}, {"a", 2, 1, 5, 3, 19}, {"b", 2, 3, 7, 6, 21}};
    bg_line l;
    bool more;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        cr_assert_eq(bg_input_next(in, &l, &more, &err), BG_OK);
        cr_assert(more);
        cr_expect(l.n == 1 && l.data[0] == want[i].text[0], "line %zu", i);
        cr_expect_eq(l.file, want[i].file);
        cr_expect_eq(l.line, want[i].line);
        cr_expect_eq(l.record, want[i].record);
        cr_expect_eq(l.offset, want[i].offset);
        cr_expect_eq(l.end, want[i].end, "line %zu: end %llu", i, (unsigned long long)l.end);
    }
    cr_assert_eq(bg_input_next(in, &l, &more, &err), BG_OK);
    cr_expect_not(more);
    uint64_t read, total;
    bg_input_progress(in, &read, &total);
    cr_expect_eq(read, total);
    cr_expect_eq(total, 14 + b.len);
    bg_input_close(in);
    bg_buf_release(&b);
    bg_buf_release(&got);
}

Test(lines, members_and_skippable_frames)
{
    static const char text[] = "one\ntwo\nthree\nfour\n";
    const char *paths[] = {path_a};
    bg_buf want = {0};
    model(text, sizeof text - 1, 1000, &want);
    for (size_t k = 1; k < sizeof packers / sizeof *packers; k++) {
        for (size_t k2 = 1; k2 < sizeof packers / sizeof *packers; k2++) {
            bg_buf file = {0}, got = {0};
            bg_error err = {0};
            skippable(&file, 300);
            packers[k](&file, text, 6);
            packers[k2](&file, text + 6, 0);
            skippable(&file, 0);
            packers[k2](&file, text + 6, sizeof text - 1 - 6);
            skippable(&file, 1);
            put(path_a, file.data, file.len);
            transcript(paths, 1, 1000, &got, &err);
            cr_expect_str_eq(got.data, want.data, "%zu %zu", k, k2);
            bg_buf_release(&file);
            bg_buf_release(&got);
        }
    }
    bg_buf_release(&want);
}

/* Cut at every byte: whole lines come first, then BG_FORMAT unless the cut is between two frames.
 */
Test(lines, cut_short)
{
    bg_buf text = {0};
    for (int i = 0; i < 60; i++)
        bg_buf_printf(&text, "{\"id\": %d, \"prompt\": \"x%d\"}\n", i, i * i);
    const char *paths[] = {path_a};
    for (size_t k = 1; k < sizeof packers / sizeof *packers; k++) {
        bg_buf file = {0};
        skippable(&file, 5);
        size_t border1 = file.len;
        packers[k](&file, text.data, text.len / 2);
        size_t border2 = file.len;
        packers[k](&file, text.data + text.len / 2, text.len - text.len / 2);
        /* fewer bytes than a magic number are taken for text */
        for (size_t cut = 4; cut < file.len; cut++) {
            put(path_a, file.data, cut);
            bg_error err = {0};
            bg_input *in;
            cr_assert_eq(bg_input_open(&in, paths, 1, 0, &err), BG_OK);
            bg_line l;
            bool got;
            size_t at = 0;
            bg_status st;
            while (!(st = bg_input_next(in, &l, &got, &err)) && got) {
                bool whole = l.offset == at && text.data[at + l.n] == '\n';
                bool last =
                    l.offset == at && at + l.n == text.len / 2; /* the end of the first half */
                cr_assert(!memcmp(l.data, text.data + at, l.n) && (whole || last), "cut %zu", cut);
                at += l.n + 1;
            }
            bool clean = cut == border1 || cut == border2;
            cr_expect_eq(st, clean ? BG_OK : BG_FORMAT, "packer %zu, cut %zu: %s", k, cut,
                         err.text);
            if (st) cr_expect(strstr(err.text, path_a) && strstr(err.text, "byte"), "%s", err.text);
            bg_input_close(in);
        }
        bg_buf_release(&file);
    }
    bg_buf_release(&text);
}

Test(lines, damage_and_foreign_formats)
{
    static const struct {
        const char *data;
        size_t n;
        const char *says;
    } bad[] = {{"\xfd"
                "7zXZ\0\0",
                7, "xz"},
               {"BZh91AY", 7, "bzip2"},
               {"PK\3\4zip", 7, "zip"}};
    const char *paths[] = {path_a};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bg_buf got = {0};
        bg_error err = {0};
        put(path_a, bad[i].data, bad[i].n);
        transcript(paths, 1, 0, &got, &err);
        cr_expect_eq(err.status, BG_FORMAT);
        cr_expect(strstr(err.text, bad[i].says), "%s", err.text);
        bg_buf_release(&got);
    }
    for (size_t k = 1; k < sizeof packers / sizeof *packers; k++) {
        bg_buf file = {0}, got = {0};
        bg_error err = {0};
        packers[k](&file, "first\n", 6);
        bg_buf_str(&file, "{\"prompt\": \"not compressed\"}\n");
        put(path_a, file.data, file.len);
        transcript(paths, 1, 0, &got, &err);
        cr_expect_eq(err.status, BG_FORMAT, "packer %zu", k);
        cr_expect(strstr(got.data, "\"first\""), "the line before the damage is there: %s",
                  got.data);
        bg_buf_clear(&got);
        /* a flipped bit in the second of two frames: its checksum tells */
        bg_buf_clear(&file);
        packers[k](&file, "first\n", 6);
        size_t half = file.len;
        packers[k](&file, "second line which is a little longer\n", 37);
        file.data[half + (file.len - half) / 2] ^= 4;
        put(path_a, file.data, file.len);
        err = (bg_error){0};
        transcript(paths, 1, 0, &got, &err);
        cr_expect_eq(err.status, BG_FORMAT, "packer %zu", k);
        cr_expect(strstr(got.data, "\"first\""), "%s", got.data);
        bg_buf_release(&file);
        bg_buf_release(&got);
    }
}

/* One message for the file, compressed or not; the files in front of it were read. */
Test(lines, text_that_is_not_utf8)
{
    static const struct {
        const char *data;
        size_t n;
        const char *says; /* NULL: the file is read */
    } files[] = {
        {"\xff\xfe{\0\"\0i\0\n\0", 10, "UTF-16"},
        {"\xfe\xff\0{\0\"\0\n", 8, "UTF-16"},
        {"\xff\xfe\0\0{\0\0\0\n\0\0\0", 12, "UTF-32"},
        {"\0\0\xfe\xff\0\0\0{\0\0\0\n", 12, "UTF-32"},
        {"{\0\"\0i\0d\0\n\0", 10, "UTF-16"},
        {"\0{\0\"\0i\0\n", 8, "UTF-16"},
        {"{\0\0\0\"\0\0\0", 8, "UTF-32"},
        {"\0\0\0{\0\0\0\"", 8, "UTF-32"},
        {"\xff\xfe", 2, "UTF-16"},
        {"\0\0\0\0\0\0\n", 7, NULL},
        {"\xff\n", 2, NULL},
        {"{\0}\n", 4, NULL},
        {"ok\n\xff\xfe{\0\n", 8, NULL}, /* not at its start: a bad line */
    };
    put(path_b, "before\n", 7);
    const char *paths[] = {path_b, path_a};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        for (size_t k = 0; k < sizeof packers / sizeof *packers; k++) {
            bg_buf file = {0}, got = {0};
            bg_error err = {0};
            packers[k](&file, files[i].data, files[i].n);
            put(path_a, file.data, file.len);
            transcript(paths, 2, 0, &got, &err);
            cr_expect(strstr(got.data, "\"before\""), "%zu", i);
            cr_expect_eq(err.status, files[i].says ? BG_FORMAT : BG_OK, "%zu: %s", i, err.text);
            if (files[i].says)
                cr_expect(strstr(err.text, files[i].says) && strstr(err.text, path_a), "%s",
                          err.text);
            bg_buf_release(&file);
            bg_buf_release(&got);
        }
}

Test(lines, open_checks_every_path)
{
    bg_input *in;
    bg_error err = {0};
    put(path_a, "a\n", 2);
    const char *missing[] = {path_a, path_b}, *folder[] = {dir}, *twice[] = {"-", "-"};
    cr_expect_eq(bg_input_open(&in, missing, 2, 0, &err), BG_IO);
    cr_expect_null(in);
    cr_expect_eq(err.os, ENOENT);
    cr_expect(strstr(err.text, path_b), "%s", err.text);
    err = (bg_error){0};
    cr_expect_eq(bg_input_open(&in, folder, 1, 0, &err), BG_IO);
    cr_expect_eq(err.os, EISDIR);
    err = (bg_error){0};
    cr_expect_eq(bg_input_open(&in, twice, 2, 0, &err), BG_ARG);
}

Test(lines, standard_input)
{
    bg_buf b = {0}, got = {0}, want = {0};
    bg_error err = {0};
    zst(&b, "one\ntwo\n", 8);
    put(path_a, b.data, b.len);
    cr_assert(freopen(path_a, "rb", stdin));
    const char *paths[] = {"-"};
    transcript(paths, 1, 100, &got, &err);
    model("one\ntwo\n", 8, 100, &want);
    cr_expect_str_eq(got.data, want.data);
    bg_buf_release(&b);
    bg_buf_release(&got);
    bg_buf_release(&want);
}

/* A line without end that is far larger than the limit does not take memory. */
Test(lines, endless_line_in_bounded_memory)
{
    int fd[2];
    cr_assert_eq(pipe(fd), 0);
    pid_t pid = fork();
    if (pid == 0) {
        static char chunk[1 << 16];
        memset(chunk, 'x', sizeof chunk);
        bg_error e = {0};
        for (int i = 0; i < 4096; i++)
            if (bg_write_all(fd[1], chunk, sizeof chunk, "pipe", &e)) _exit(1);
        (void)!write(fd[1], "\nlast\n", 6);
        _exit(0);
    }
    close(fd[1]);
    char path[32];
    snprintf(path, sizeof path, "/dev/fd/%d", fd[0]);
    const char *paths[] = {path};
    bg_error err = {0};
    bg_input *in;
    bg_line l;
    bool got;
    cr_assert_eq(bg_input_open(&in, paths, 1, 1000, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_input_next(in, &l, &got, &err), BG_OK);
    cr_expect(got && l.too_long && l.n == 1000);
    cr_expect_eq(l.end, 4096u * 65536 + 1);
    cr_assert_eq(bg_input_next(in, &l, &got, &err), BG_OK);
    cr_expect(got && l.n == 4 && l.line == 2);
    uint64_t read, total;
    bg_input_progress(in, &read, &total);
    cr_expect_eq(total, 0, "a pipe's size is not known");
    bg_input_close(in);
    close(fd[0]);
}

Test(ids, first_use_is_remembered)
{
    bg_id_set *s = bg_id_set_new();
    char id[32];
    for (int64_t i = 0; i < 100000; i++) {
        int n = snprintf(id, sizeof id, "\"id-%lld\"", (long long)i);
        cr_assert_eq(bg_id_set_add(s, id, (size_t)n, i), 0);
    }
    for (int64_t i = 0; i < 100000; i += 77) {
        int n = snprintf(id, sizeof id, "\"id-%lld\"", (long long)i);
        cr_assert_eq(bg_id_set_add(s, id, (size_t)n, 1000000 + i), i + 1);
    }
    cr_expect_eq(bg_id_set_add(s, "\"ID-1\"", 6, 5), 0);
    cr_expect_eq(bg_id_set_add(s, "", 0, 6), 0);
    cr_expect_eq(bg_id_set_add(s, "", 0, 7), 7);
    bg_id_set_free(s);
}
