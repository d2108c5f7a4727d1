/* Any bytes as an output: read, put in order, and repaired, never a crash, and what is handed out
 * is whole result lines.
 *
 * Input: one byte of settings, then the output. In it a stretch "<F text >" becomes an LZ4 frame of
 * the text, so that inputs get past the checksums. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "output/frames.h"
#include "output/reader.h"
#include "output/repair.h"
#include "output/view.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int ok)
{
    if (!ok) abort();
}

static void make_output(bg_buf *out, const char *s, size_t n, bool lz4)
{
    bg_error err = {0};
    for (size_t i = 0; i < n;) {
        const char *end =
            n - i >= 3 && s[i] == '<' && s[i + 1] == 'F' ? memchr(s + i + 2, '>', n - i - 2) : NULL;
        if (!end) {
            bg_buf_char(out, s[i++]);
            continue;
        }
        size_t len = (size_t)(end - (s + i + 2));
        if (lz4 && len)
            check(!bg_frame_put(out, s + i + 2, len, 0, &err));
        else
            bg_buf_add(out, s + i + 2, len);
        i = (size_t)(end - s) + 1;
    }
}

static void put_file(const char *path, const bg_buf *b)
{
    FILE *f = fopen(path, "wb");
    check(f && fwrite(b->data ? b->data : "", 1, b->len, f) == b->len);
    fclose(f);
}

/* Reads all; *n lines. */
static bg_status read_all(const bg_reader_config *c, bg_order *o, int64_t *n)
{
    bg_reader *r;
    bg_error err = {0};
    int32_t file = bg_order_file(o, c->fd, c->path, c->format);
    check(!bg_reader_open(&r, c, &err));
    bg_status st;
    uint64_t last = 0;
    for (*n = 0;; ++*n) {
        bg_out_line line;
        bool got;
        st = bg_reader_next(r, &line, &got, &err);
        check(st == BG_OK || (st == BG_FORMAT && !got && err.text[0]));
        if (!got) break;
        check(line.n && line.text[line.n - 1] == '\n' && !memchr(line.text, '\n', line.n - 1));
        check(line.offset >= last && bg_reader_whole(r) <= bg_reader_size(r));
        last = line.offset;
        bg_slice v = bg_lens_path((bg_slice){line.text, line.n - 1}, "response.body.choices.0");
        check(!v.p || (v.p > line.text && v.p + v.n < line.text + line.n));
        check(bg_order_add(o, file, &line, 0));
    }
    check(bg_reader_whole(r) + bg_reader_torn(r) == bg_reader_size(r));
    bg_reader_close(r);
    return st;
}

static void check_order(bg_order *o)
{
    bg_order_sort(o);
    const bg_place *p = bg_order_places(o);
    for (size_t i = 0; i < bg_order_count(o); i++) {
        const char *text;
        bg_error err = {0};
        check(!i || p[i - 1].record <= p[i].record);
        check(!bg_order_text(o, &p[i], &text, &err) && text[p[i].n - 1] == '\n');
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char dir[64], path[96], more[4][112];
    static const char *const suffixes[4] = {".journal", ".damaged", ".journal.bad", ".repair"};
    if (!dir[0]) {
        strcpy(dir,
               access("/dev/shm", W_OK) == 0 ? "/dev/shm/bg-fuzz-XXXXXX" : "/tmp/bg-fuzz-XXXXXX");
        check(mkdtemp(dir) != NULL);
        snprintf(path, sizeof path, "%s/out", dir);
        for (int i = 0; i < 4; i++)
            snprintf(more[i], sizeof more[i], "%s%s", path, suffixes[i]);
    }
    if (size < 1) return 0;
    bool lz4 = data[0] & 1;
    bg_buf out = {0};
    make_output(&out, (const char *)data + 1, size - 1, lz4);
    unlink(path);
    for (int i = 0; i < 4; i++)
        unlink(more[i]);
    put_file(path, &out);

    bg_error err = {0};
    bg_order *o = bg_order_new(data[0] & 2 ? 1 : 0);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    check(o && fd >= 0);
    bg_reader_config c = {.path = path,
                          .fd = fd,
                          .format = lz4 ? BG_OUT_LZ4 : BG_OUT_PLAIN,
                          .end = BG_READER_NO_END,
                          .limit = data[0] & 4 ? 100 : 0};
    int64_t n, n_hashed;
    bg_status st = read_all(&c, o, &n);
    if (!c.limit) check_order(o);
    bg_order_free(o);
    o = bg_order_new(0);
    const bg_reader_commit all = {0, out.len, bg_hash64(out.data, out.len, 0)};
    c.end = out.len;
    c.commits = &all;
    c.n_commits = 1;
    check(read_all(&c, o, &n_hashed) == BG_FORMAT || n_hashed == n);
    check(n_hashed <= n || st);
    bg_order_free(o);
    close(fd);

    bg_repaired r;
    st = bg_repair(path, NULL, &r, &err);
    check(st == BG_OK || st == BG_FORMAT);
    bg_repaired_release(&r);
    if (!st) { /* and again there is nothing to do */
        check(!bg_repair(path, NULL, &r, &err) && r.good);
        bg_repaired_release(&r);
    }
    bg_buf_release(&out);
    return 0;
}
