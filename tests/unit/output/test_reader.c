#include <fcntl.h>

#include "base/hash.h"
#include "output/frames.h"
#include "output/reader.h"
#include "unit/output/scratch.h"

TestSuite(reader, .init = set_up, .fini = tear_down);

enum { N = 6 };

typedef struct sample { /* an output of several commits of two lines each */
    bg_buf b;
    bg_reader_commit commits[N];
} sample;

/* Record r's line: some are errors, some OpenAI's, and no two are of one length. */
static void put_line(bg_buf *b, int r)
{
    if (r % 3 == 2)
        bg_buf_printf(b,
                      "{\"id\":\"batch_req_%d\",\"custom_id\":\"c%d\",\"response\":{\"status_code\""
                      ":200,\"body\":{\"choices\":[],\"usage\":{\"prompt_tokens\":%d,"
                      "\"completion_tokens\":2}}},\"error\":null,\"line\":%d}\n",
                      r, r, r + 1, r + 1);
    else if (r % 3 == 1)
        bg_buf_printf(b, "{\"line\":%d,\"id\":null,\"error\":{\"code\":\"x\"}}\n", r + 1);
    else
        bg_buf_printf(
            b,
            "{\"line\":%d,\"id\":\"i%d\",\"text\":\"%.*s\",\"usage\":{\"prompt_tokens\":%d,"
            "\"completion_tokens\":2}}\n",
            r + 1, r, r, "abcdefghijklmnop", r + 1);
}

static sample make(bg_out_format format)
{
    sample s = {0};
    bg_error err = {0};
    for (int i = 0; i < N; i++) {
        bg_buf text = {0};
        put_line(&text, 2 * i);
        put_line(&text, 2 * i + 1);
        s.commits[i].offset = s.b.len;
        if (format == BG_OUT_LZ4)
            cr_assert_eq(bg_frame_put(&s.b, text.data, text.len, 0, &err), BG_OK);
        else
            bg_buf_add(&s.b, text.data, text.len);
        s.commits[i].bytes = s.b.len - s.commits[i].offset;
        s.commits[i].hash = bg_hash64(s.b.data + s.commits[i].offset, s.commits[i].bytes, 0);
        bg_buf_release(&text);
    }
    return s;
}

typedef struct reading {
    bg_status st;
    int n;
    uint64_t whole, torn;
    bg_error err;
} reading;

/* Reads all lines, and checks each against the record it must be. */
static reading read_all(const bg_reader_config *c)
{
    reading got = {0};
    bg_reader *r;
    got.st = bg_reader_open(&r, c, &got.err);
    if (got.st) return got;
    for (;;) {
        bg_out_line line;
        bool more;
        got.st = bg_reader_next(r, &line, &more, &got.err);
        if (got.st || !more) break;
        bg_buf want = {0};
        put_line(&want, got.n);
        cr_assert(line.n == want.len && memcmp(line.text, want.data, want.len) == 0,
                  "record %d: %.*s", got.n, (int)line.n, line.text);
        cr_expect_eq(line.record, got.n);
        cr_expect_eq(line.failed, got.n % 3 == 1);
        cr_expect_eq(line.id.p != NULL, got.n % 3 != 1);
        cr_expect_eq(line.prompt_tokens, got.n % 3 == 1 ? 0 : got.n + 1);
        cr_expect_eq(line.output_tokens, got.n % 3 == 1 ? 0 : 2);
        bg_buf_release(&want);
        got.n++;
    }
    if (got.st) { /* and a failure stays one */
        bg_out_line line;
        bool more;
        bg_error again = {0};
        cr_expect_eq(bg_reader_next(r, &line, &more, &again), got.st);
        cr_expect_not(more);
    }
    got.whole = bg_reader_whole(r);
    got.torn = bg_reader_torn(r);
    bg_reader_close(r);
    return got;
}

static bg_reader_config config(bg_out_format format)
{
    return (bg_reader_config){
        .path = out_path, .fd = -1, .format = format, .end = BG_READER_NO_END};
}

Test(reader, whole_output)
{
    for (int f = 0; f < 2; f++) {
        sample s = make(f);
        store(out_path, s.b.data, s.b.len);
        bg_reader_config c = config(f);
        reading got = read_all(&c);
        cr_expect(!got.st && got.n == 2 * N && got.torn == 0 && got.whole == s.b.len, "%s",
                  got.err.text);
        c.end = s.b.len;
        c.commits = s.commits;
        c.n_commits = N;
        got = read_all(&c);
        cr_expect(!got.st && got.n == 2 * N, "%s", got.err.text);
        bg_reader_commit one = {0, s.b.len, bg_hash64(s.b.data, s.b.len, 0)};
        c.commits = &one; /* as a folded journal has it */
        c.n_commits = 1;
        got = read_all(&c);
        cr_expect(!got.st && got.n == 2 * N, "%s", got.err.text);
        one.hash ^= 1;
        got = read_all(&c);
        cr_expect_eq(got.st, BG_FORMAT);
        bg_buf_release(&s.b);
    }
}

/* Every length: what is whole is read, the rest is torn, and where it must be whole it is damage.
 */
Test(reader, cut_everywhere)
{
    for (int f = 0; f < 2; f++) {
        sample s = make(f);
        for (size_t cut = 0; cut <= s.b.len; cut++) {
            store(out_path, s.b.data, cut);
            bg_reader_config c = config(f);
            reading got = read_all(&c);
            size_t whole = 0, boundary = 0;
            int lines = 0;
            for (int i = 0; i < N; i++)
                if (s.commits[i].offset + s.commits[i].bytes <= cut) {
                    whole = boundary = s.commits[i].offset + s.commits[i].bytes;
                    lines = 2 * (i + 1);
                }
            if (f == BG_OUT_PLAIN) {
                bg_buf half = {0};
                put_line(&half, lines);
                if (whole + half.len <= cut) {
                    whole += half.len;
                    lines++;
                }
                bg_buf_release(&half);
            }
            cr_assert(!got.st && got.n == lines && got.whole == whole && got.torn == cut - whole,
                      "format %d, cut at %zu: status %d, %d lines, %zu whole: %s", f, cut, got.st,
                      got.n, (size_t)got.whole, got.err.text);
            c.end = cut;
            c.commits = s.commits;
            c.n_commits = N;
            got = read_all(&c);
            cr_assert_eq(got.st, cut == boundary ? BG_OK : BG_FORMAT, "format %d, cut at %zu: %s",
                         f, cut, got.err.text);
            c.end = s.b.len;
            got = read_all(&c);
            cr_assert_eq(got.st, cut == s.b.len ? BG_OK : BG_FORMAT);
        }
        bg_buf_release(&s.b);
    }
}

/* A flipped bit is never a result: with the journal's hashes always damage, without them a torn
 * tail if it is in the last frame, else damage. Plain text alone cannot tell, so there only the
 * hashes count. */
Test(reader, flipped_bits)
{
    for (int f = 0; f < 2; f++) {
        sample s = make(f);
        for (size_t at = 0; at < s.b.len; at++) {
            char was = s.b.data[at];
            s.b.data[at] ^= (char)(1 << at % 8);
            store(out_path, s.b.data, s.b.len);
            bg_reader_config c = config(f);
            if (f == BG_OUT_LZ4) {
                reading got = read_all(&c);
                bool last = at >= s.commits[N - 1].offset;
                cr_assert_eq(got.st, last ? BG_OK : BG_FORMAT, "byte %zu: %s", at, got.err.text);
                cr_assert_leq(got.whole, at);
            }
            c.end = s.b.len;
            c.commits = s.commits;
            c.n_commits = N;
            reading got = read_all(&c);
            cr_assert_eq(got.st, BG_FORMAT, "format %d, byte %zu", f, at);
            cr_assert_leq(got.whole, at);
            cr_assert(strstr(got.err.text, out_path) && strstr(got.err.text, "byte "), "%s",
                      got.err.text);
            s.b.data[at] = was;
        }
        bg_buf_release(&s.b);
    }
}

Test(reader, noise_behind_is_a_torn_tail)
{
    static const char zeros[3000] = {0};
    static const char noise[] = "\x04\x22\x4d\x18\x04\x22\x4d\x18 no\n{\"frame\n\n";
    for (int f = 0; f < 2; f++) {
        sample s = make(f);
        size_t n = s.b.len;
        bg_buf_add(&s.b, zeros, sizeof zeros);
        bg_buf_add(&s.b, noise, sizeof noise - 1);
        store(out_path, s.b.data, s.b.len);
        bg_reader_config c = config(f);
        reading got = read_all(&c);
        cr_expect(!got.st && got.n == 2 * N && got.torn == s.b.len - n, "%s", got.err.text);
        c.end = n; /* the journal's end: nothing behind it is looked at */
        got = read_all(&c);
        cr_expect(!got.st && got.n == 2 * N && got.torn == s.b.len - n, "%s", got.err.text);
        bg_buf_release(&s.b);
    }
}

Test(reader, a_bad_line_in_plain_text)
{
    sample s = make(BG_OUT_PLAIN);
    size_t at = s.commits[2].offset;
    s.b.data[at] = 'x';
    store(out_path, s.b.data, s.b.len);
    bg_reader_config c = config(BG_OUT_PLAIN);
    reading got = read_all(&c);
    char where[32];
    snprintf(where, sizeof where, "byte %zu:", at);
    cr_expect(got.st == BG_FORMAT && got.n == 4 && strstr(got.err.text, where), "%d lines: %s",
              got.n, got.err.text);
    store(out_path, s.b.data, s.commits[3].offset); /* with one line behind it */
    got = read_all(&c);
    cr_expect_eq(got.st, BG_FORMAT);
    bg_buf_release(&s.b);
}

/* Long runs of bytes without a line end are not held in memory. */
Test(reader, long_noise_in_plain_text)
{
    sample s = make(BG_OUT_PLAIN);
    size_t n = s.b.len;
    cr_assert(bg_buf_reserve(&s.b, 5 << 20));
    memset(s.b.data + n, 0, 5 << 20);
    s.b.len += 5 << 20;
    store(out_path, s.b.data, s.b.len);
    bg_reader_config c = config(BG_OUT_PLAIN);
    c.limit = 1 << 20;
    reading got = read_all(&c);
    cr_expect(!got.st && got.n == 2 * N && got.torn == 5 << 20, "%s", got.err.text);
    s.b.data[n] = '{'; /* a line, as far as one can see, but too long */
    store(out_path, s.b.data, s.b.len);
    got = read_all(&c);
    cr_expect_eq(got.st, BG_FORMAT);
    bg_buf_release(&s.b);
}

/* A header that claims a size out of reason is refused before memory is asked for. */
Test(reader, absurd_sizes)
{
    static const uint64_t sizes[] = {0, UINT64_MAX, UINT64_C(1) << 32, (UINT64_C(1) << 32) + 1,
                                     999};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        sample s = make(BG_OUT_LZ4);
        unsigned char *h = (unsigned char *)s.b.data + s.commits[1].offset;
        for (int k = 0; k < 8; k++)
            h[6 + k] = (unsigned char)(sizes[i] >> 8 * k);
        store(out_path, s.b.data, s.b.len);
        bg_reader_config c = config(BG_OUT_LZ4);
        reading got = read_all(&c);
        cr_expect(got.st == BG_FORMAT && got.n == 2, "%zu: %d lines", i, got.n);
        bg_buf_release(&s.b);
    }
    sample s = make(BG_OUT_LZ4);
    store(out_path, s.b.data, s.b.len);
    bg_reader_config c = config(BG_OUT_LZ4);
    c.limit = 100; /* below what the frames hold */
    reading got = read_all(&c);
    cr_expect_eq(got.st, BG_OK); /* none is believed, so all of it is a torn tail */
    cr_expect_eq(got.n, 0);
    c.end = s.b.len;
    got = read_all(&c);
    cr_expect_eq(got.st, BG_FORMAT);
    cr_expect(strstr(got.err.text, "claims"), "%s", got.err.text);
    bg_buf_release(&s.b);
}

Test(reader, resync_finds_the_next_whole_frame)
{
    sample s = make(BG_OUT_LZ4);
    s.b.data[s.commits[2].offset + 20] ^= 4;
    store(out_path, s.b.data, s.b.len);
    bg_error err = {0}, why = {0};
    bg_buf raw = {0}, text = {0};
    int fd = open(out_path, O_RDONLY);
    uint64_t at, n;
    bool got;
    bg_found found;
    bg_reader_frame(fd, "out", s.commits[2].offset, s.b.len, 0, &raw, &text, &n, &found, &why,
                    &err);
    cr_expect_eq(found, BG_FOUND_BAD);
    cr_assert_eq(bg_reader_resync(fd, "out", s.commits[2].offset + 1, s.b.len, 0, &raw, &text, &at,
                                  &n, &got, &err),
                 BG_OK);
    cr_expect(got && at == s.commits[3].offset && n == s.commits[3].bytes);
    bg_reader_resync(fd, "out", s.commits[N - 1].offset + 1, s.b.len, 0, &raw, &text, &at, &n, &got,
                     &err);
    cr_expect_not(got);
    close(fd);
    bg_buf_release(&raw);
    bg_buf_release(&text);
    bg_buf_release(&s.b);
}

/* A magic number across the border of two pieces of the search. */
Test(reader, resync_across_pieces)
{
    sample s = make(BG_OUT_LZ4);
    bg_error err = {0};
    bg_buf raw = {0}, text = {0};
    for (int shift = 0; shift < 6; shift++) {
        bg_buf b = {0};
        size_t n_pad = (1 << 16) - (size_t)shift;
        cr_assert(bg_buf_reserve(&b, n_pad));
        memset(b.data, 4, n_pad);
        b.len = n_pad;
        bg_buf_add(&b, s.b.data, s.commits[0].bytes);
        store(out_path, b.data, b.len);
        int fd = open(out_path, O_RDONLY);
        uint64_t at, n;
        bool got;
        bg_reader_resync(fd, "out", 0, b.len, 0, &raw, &text, &at, &n, &got, &err);
        cr_expect(got && at == n_pad, "shift %d", shift);
        close(fd);
        bg_buf_release(&b);
    }
    bg_buf_release(&raw);
    bg_buf_release(&text);
    bg_buf_release(&s.b);
}

Test(reader, records_of_lines)
{
    static const struct {
        const char *text;
        int64_t record;
        bool ok;
    } list[] = {
        {"{\"line\":7,\"id\":null}\n", 6, true},
        {"{\"line\":7,\"file\":\"a\",\"record\":40,\"id\":1}\n", 40, true},
        {"{\"line\":7,\"file\":\"a\",\"id\":1}\n", -1, true},
        {"{\"id\":\"batch_req_12\",\"custom_id\":\"x\",\"response\":{},\"line\":1}\n", 12, true},
        {"{\"id\":\"batch_req_x\",\"custom_id\":\"x\",\"response\":{},\"line\":1}\n", -1, true},
        {"{\"line\":0}\n", -1, false},
        {"{\"line\":1}", -1, false},
        {"[1]\n", -1, false},
        {"\n", -1, false},
        {"{\"line\":1}{\"line\":2}\n", -1, false}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        bg_out_line line = {.text = list[i].text, .n = strlen(list[i].text)};
        bool ok = bg_out_line_look(&line);
        cr_expect_eq(ok, list[i].ok, "%s", list[i].text);
        if (ok) cr_expect_eq(line.record, list[i].record, "%s", list[i].text);
    }
}

/* Lines by record out of two files, with a cache of one frame and of many. */
Test(reader, order)
{
    for (int f = 0; f < 2; f++) {
        sample s = make(f);
        store(out_path, s.b.data, s.b.len);
        for (size_t cache = 1; cache <= 1 << 20; cache <<= 20) {
            bg_order *o = bg_order_new(cache);
            bg_error err = {0};
            int fd = open(out_path, O_RDONLY);
            int32_t a = bg_order_file(o, fd, "a", f), b = bg_order_file(o, fd, "b", f);
            for (int pass = 0; pass < 2; pass++) {
                bg_reader *r;
                bg_reader_config c = config(f);
                cr_assert_eq(bg_reader_open(&r, &c, &err), BG_OK);
                bg_out_line line;
                bool got;
                while (!bg_reader_next(r, &line, &got, &err) && got)
                    cr_assert(bg_order_add(o, pass ? a : b, &line, (uint64_t)line.record * 3));
                bg_reader_close(r);
            }
            bg_order_sort(o);
            cr_assert_eq(bg_order_count(o), 4 * N);
            bg_place *p = bg_order_places(o);
            for (int i = 0; i < 4 * N; i++) {
                const char *text;
                bg_buf want = {0};
                put_line(&want, i / 2);
                cr_expect(p[i].record == i / 2 && p[i].file == (i % 2 ? b : a) &&
                          p[i].key == (uint64_t)(i / 2) * 3);
                cr_assert_eq(bg_order_text(o, &p[i], &text, &err), BG_OK, "%s", err.text);
                cr_expect(p[i].n == want.len && memcmp(text, want.data, want.len) == 0);
                bg_buf_release(&want);
            }
            bg_order_free(o);
            close(fd);
        }
        bg_buf_release(&s.b);
    }
}

Test(reader, guesses_the_format)
{
    bg_out_format f;
    bg_error err = {0};
    sample s = make(BG_OUT_LZ4);
    store(out_path, s.b.data, s.b.len);
    cr_expect(!bg_reader_guess(out_path, &f, &err) && f == BG_OUT_LZ4);
    store(out_path, "{\"line\":1}\n", 11);
    cr_expect(!bg_reader_guess(out_path, &f, &err) && f == BG_OUT_PLAIN);
    cr_expect_eq(bg_reader_guess("/nonexistent/x", &f, &err), BG_IO);
    bg_buf_release(&s.b);
}
