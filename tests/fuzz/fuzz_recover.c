/* Any bytes as an output and its journal: never a crash; what is accepted is whole lines, and a job
 * goes on from it to a clean end that the next start accepts as finished.
 *
 * Input: two bytes of settings, two bytes with the output's length, the output, the journal. In the
 * output a stretch "<F text >" becomes an LZ4 frame of the text; in the journal a line without a
 * hash gets its own, and "@N" (N a digit) in it becomes the hash of the output's N-th frame.
 * Without that no input would ever get past the checksums. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/io.h"
#include "output/files.h"
#include "output/frames.h"
#include "output/journal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int ok)
{
    if (!ok) abort();
}

static ssize_t do_write(void *ctx, int fd, const void *data, size_t n, int64_t offset)
{
    (void)ctx;
    return pwrite(fd, data, n, offset);
}

static int do_sync(void *ctx, int fd)
{
    (void)ctx;
    (void)fd;
    return 0;
}

static int do_sync_dir(void *ctx, const char *path)
{
    (void)ctx;
    (void)path;
    return 0;
}

static int do_truncate(void *ctx, int fd, int64_t size)
{
    (void)ctx;
    return ftruncate(fd, size);
}

typedef struct image {
    bg_buf b;
    struct {
        size_t at, n;
    } frames[10];
    int n_frames;
} image;

static void make_output(image *out, const char *s, size_t n, bool lz4)
{
    bg_error err = {0};
    for (size_t i = 0; i < n;) {
        const char *end =
            n - i >= 3 && s[i] == '<' && s[i + 1] == 'F' ? memchr(s + i + 2, '>', n - i - 2) : NULL;
        if (!end || out->n_frames == 10) {
            bg_buf_char(&out->b, s[i++]);
            continue;
        }
        size_t len = (size_t)(end - (s + i + 2)), at = out->b.len;
        if (lz4 && len)
            check(!bg_frame_put(&out->b, s + i + 2, len, 0, &err));
        else
            bg_buf_add(&out->b, s + i + 2, len);
        out->frames[out->n_frames].at = at;
        out->frames[out->n_frames++].n = out->b.len - at;
        i = (size_t)(end - s) + 1;
    }
}

static void make_journal(const image *out, const char *s, size_t n, bg_buf *b)
{
    for (size_t i = 0; i < n; i++) {
        const char *lf = memchr(s + i, '\n', n - i);
        size_t stop = lf ? (size_t)(lf - s) : n, start = b->len;
        for (; i < stop; i++) {
            int k = s[i] == '@' && i + 1 < stop ? s[i + 1] - '0' : -1;
            if (k < 0 || k >= out->n_frames) {
                bg_buf_char(b, s[i]);
                continue;
            }
            char hex[17];
            bg_hex64(bg_hash64(out->b.data + out->frames[k].at, out->frames[k].n, 0), hex);
            bg_buf_printf(b, "\"offset\":%zu,\"bytes\":%zu,\"hash\":\"%s\"", out->frames[k].at,
                          out->frames[k].n, hex);
            i++;
        }
        if (lf && b->len > start && b->data[b->len - 1] == '}')
            bg_journal_seal(b, start);
        else if (lf)
            bg_buf_char(b, '\n');
    }
}

static void put_file(const char *path, const bg_buf *b)
{
    FILE *f = fopen(path, "wb");
    check(f && fwrite(b->data ? b->data : "", 1, b->len, f) == b->len);
    fclose(f);
}

static const bg_partial *none(void *ctx, int *n)
{
    (void)ctx;
    *n = 0;
    return NULL;
}

/* The output must be nothing but whole frames (or bytes) of whole lines. */
static void check_output(const char *path, bool lz4)
{
    bg_error err = {0};
    char *data;
    size_t n, used;
    check(!bg_read_file(path, 1 << 24, &data, &n, &err));
    bg_buf text = {0};
    if (lz4) { /* the last frame is decoded by recovery; earlier ones are known by their hash */
        for (size_t at = 0;
             at < n && !bg_frame_get(&text, data + at, n - at, 1 << 24, &used, &err);)
            at += used;
    } else {
        check(n == 0 || data[n - 1] == '\n');
    }
    bg_buf_release(&text);
    free(data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char dir[64], path[96], journal_path[112];
    if (!dir[0]) {
        strcpy(dir,
               access("/dev/shm", W_OK) == 0 ? "/dev/shm/bg-fuzz-XXXXXX" : "/tmp/bg-fuzz-XXXXXX");
        check(mkdtemp(dir) != NULL);
        snprintf(path, sizeof path, "%s/out", dir);
        snprintf(journal_path, sizeof journal_path, "%s.journal", path);
    }
    if (size < 4) return 0;
    bool lz4 = data[0] & 1;
    size_t n_out = (size_t)data[2] | (size_t)data[3] << 8;
    if (n_out > size - 4) n_out = size - 4;
    image out = {0};
    bg_buf journal = {0};
    make_output(&out, (const char *)data + 4, n_out, lz4);
    make_journal(&out, (const char *)data + 4 + n_out, size - 4 - n_out, &journal);
    put_file(path, &out.b);
    put_file(journal_path, &journal);

    bg_out_sys sys = bg_out_real; /* names as they are, and nothing is synced */
    sys.write = do_write;
    sys.sync = do_sync;
    sys.truncate = do_truncate;
    sys.sync_dir = do_sync_dir;
    json_t *identity = json_pack("{s:i}", "a", 1);
    bg_writer_config c = {
        .path = path, .format = lz4 ? BG_OUT_LZ4 : BG_OUT_PLAIN, .identity = identity};
    bg_writer *w;
    bg_recovered rec;
    bg_error err = {0};
    bg_status st = bg_writer_open_on(&w, &c, &sys, &rec, &err);
    check(st == BG_OK || st == BG_FORMAT || st == BG_ARG);
    check(!st || err.text[0]);
    if (!st) {
        for (int i = 0; i < rec.n_partials; i++) {
            check(!bg_writer_done(w, rec.partials[i].record) && rec.partials[i].n_tokens > 0);
            for (int t = 0; t < rec.partials[i].n_tokens; t++)
                check(rec.partials[i].tokens[t] >= 0);
        }
        check(!bg_writer_begin(w, &err));
        check_output(path, lz4);
        int64_t count = rec.n_records;
        bg_writer_on_partials(w, none, NULL);
        if (!rec.finished)
            for (int64_t r = 0; r < 3; r++)
                if (!bg_writer_done(w, r)) {
                    check(!bg_writer_add(w, &(bg_done){.record = r, .failed = false}, "{}\n", 3,
                                         &err));
                    count++;
                }
        check(!bg_writer_finish(w, &err));
        bg_writer_close(w);
        check(!bg_writer_open_on(&w, &c, &sys, &rec, &err) && rec.finished &&
              rec.n_records == count && rec.cut_bytes == 0);
        bg_writer_close(w);
    }
    json_decref(identity);
    bg_buf_release(&out.b);
    bg_buf_release(&journal);
    return 0;
}
