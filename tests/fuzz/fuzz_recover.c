/* Any bytes as an output, its error file, its journal and what a rewrite has left: never a crash;
 * what is accepted is whole lines, and a job goes on from it, perhaps by a rewrite, to a clean end
 * that the next start accepts as finished.
 *
 * Input: a byte with the output's format; one with the error file's (0 to 2: none, plain, LZ4, in
 * the two lowest bits), and bits 2 to 5: ordered, fold always, take results out, sort; two bytes
 * with the output's length; the output; the journal. Lines "=E", "=O", "=J" and "=N" in the journal
 * begin the error file, OUT.rewrite, OUT.journal.rewrite and OUT.journal.new. In the outputs and
 * the error file a stretch "<F text >" becomes an LZ4 frame of the text; in the journals a line
 * without a hash gets its own, and "@N" (N a digit) in it becomes the place and hash of the
 * output's N-th frame, "#N" those of the error file's. Without that no input would ever get past
 * the checksums.
 */
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

static void make_journal(const image *out, const image *errors, const char *s, size_t n, bg_buf *b)
{
    for (size_t i = 0; i < n; i++) {
        const char *lf = memchr(s + i, '\n', n - i);
        size_t stop = lf ? (size_t)(lf - s) : n, start = b->len;
        for (; i < stop; i++) {
            const image *from = s[i] == '@' ? out : s[i] == '#' ? errors : NULL;
            int k = from && i + 1 < stop ? s[i + 1] - '0' : -1;
            if (k < 0 || k >= from->n_frames) {
                bg_buf_char(b, s[i]);
                continue;
            }
            char hex[17];
            bg_hex64(bg_hash64(from->b.data + from->frames[k].at, from->frames[k].n, 0), hex);
            bg_buf_printf(b, "\"offset\":%zu,\"bytes\":%zu,\"hash\":\"%s\"", from->frames[k].at,
                          from->frames[k].n, hex);
            i++;
        }
        if (lf && b->len > start && b->data[b->len - 1] == '}')
            bg_journal_seal(b, start);
        else if (lf)
            bg_buf_char(b, '\n');
    }
}

typedef struct slice {
    const char *p;
    size_t n;
} slice;

enum { JOURNAL, ERRORS, NEW_OUT, NEW_JOURNAL, RUBBISH, N_PARTS };

/* Cuts the journal's text where lines say that another file begins. */
static void split(const char *s, size_t n, slice parts[N_PARTS])
{
    static const char marks[] = "-EOJN";
    int now = JOURNAL;
    parts[now].p = s;
    for (size_t i = 0; i < n;) {
        const char *lf = memchr(s + i, '\n', n - i);
        size_t next = lf ? (size_t)(lf + 1 - s) : n;
        const char *mark = next - i == 3 && s[i] == '=' ? strchr(marks + 1, s[i + 1]) : NULL;
        if (mark && *mark) {
            now = (int)(mark - marks);
            parts[now] = (slice){s + next, 0};
        } else {
            parts[now].n = (size_t)(s + next - parts[now].p);
        }
        i = next;
    }
}

static void put_file(const char *path, const bg_buf *b)
{
    FILE *f = fopen(path, "wb");
    check(f && fwrite(b->data ? b->data : "", 1, b->len, f) == b->len);
    fclose(f);
}

static bool keep_even(void *ctx, const bg_done *old, int64_t *record, int64_t *line,
                      const char **file_name)
{
    check(old->record == *record && *line >= 0);
    if (*file_name) check(strlen(*file_name) < 1 << 20);
    return *(int *)ctx && old->record % 2 == 0;
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

typedef struct paths {
    char dir[64], out[96], journal[112], errors[2][96], new_out[112], new_journal[128],
        rubbish[128];
} paths;

static const paths *names(void)
{
    static paths p;
    if (p.dir[0]) return &p;
    strcpy(p.dir,
           access("/dev/shm", W_OK) == 0 ? "/dev/shm/bg-fuzz-XXXXXX" : "/tmp/bg-fuzz-XXXXXX");
    check(mkdtemp(p.dir) != NULL);
    snprintf(p.out, sizeof p.out, "%s/out", p.dir);
    snprintf(p.journal, sizeof p.journal, "%s.journal", p.out);
    snprintf(p.errors[0], sizeof p.errors[0], "%s/errors", p.dir);
    snprintf(p.errors[1], sizeof p.errors[1], "%s/errors.lz4", p.dir);
    snprintf(p.new_out, sizeof p.new_out, "%s.rewrite", p.out);
    snprintf(p.new_journal, sizeof p.new_journal, "%s.rewrite", p.journal);
    snprintf(p.rubbish, sizeof p.rubbish, "%s.new", p.journal);
    return &p;
}

static void put_part(const char *path, const slice *part, const bg_buf *b)
{
    unlink(path);
    if (part->p) put_file(path, b);
}

static void put_files(const paths *p, const uint8_t *data, size_t size, bool lz4, int errors_mode)
{
    size_t n_out = (size_t)data[2] | (size_t)data[3] << 8;
    if (n_out > size - 4) n_out = size - 4;
    const char *text = (const char *)data + 4;
    slice parts[N_PARTS] = {{0}};
    image out = {0}, errors = {0}, new_out = {0};
    bg_buf journal = {0}, new_journal = {0}, rubbish = {0};
    split(text + n_out, size - 4 - n_out, parts);
    make_output(&out, text, n_out, lz4);
    make_output(&errors, parts[ERRORS].p, parts[ERRORS].n, errors_mode == 2);
    make_output(&new_out, parts[NEW_OUT].p, parts[NEW_OUT].n, lz4);
    make_journal(&out, &errors, parts[JOURNAL].p, parts[JOURNAL].n, &journal);
    make_journal(&new_out, &errors, parts[NEW_JOURNAL].p, parts[NEW_JOURNAL].n, &new_journal);
    bg_buf_add(&rubbish, parts[RUBBISH].p, parts[RUBBISH].n);
    put_file(p->out, &out.b);
    put_file(p->journal, &journal);
    put_part(p->errors[errors_mode == 2], &parts[ERRORS], &errors.b);
    put_part(p->new_out, &parts[NEW_OUT], &new_out.b);
    put_part(p->new_journal, &parts[NEW_JOURNAL], &new_journal);
    put_part(p->rubbish, &parts[RUBBISH], &rubbish);
    bg_buf_release(&out.b);
    bg_buf_release(&errors.b);
    bg_buf_release(&new_out.b);
    bg_buf_release(&journal);
    bg_buf_release(&new_journal);
    bg_buf_release(&rubbish);
}

static void check_files(const paths *p, const bg_writer_config *c)
{
    check_output(p->out, c->format == BG_OUT_LZ4);
    if (c->error_path) check_output(c->error_path, bg_out_format_of(c->error_path) == BG_OUT_LZ4);
    check(access(p->new_out, F_OK) != 0 && access(p->new_journal, F_OK) != 0 &&
          access(p->rubbish, F_OK) != 0);
}

static void check_partials(const bg_writer *w, const bg_recovered *rec)
{
    for (int i = 0; i < rec->n_partials; i++) {
        check(!bg_writer_done(w, rec->partials[i].record) && rec->partials[i].n_tokens > 0);
        for (int t = 0; t < rec->partials[i].n_tokens; t++)
            check(rec->partials[i].tokens[t] >= 0);
    }
}

/* Lines that are no results are found out here: then nothing has changed. */
static bool rewrites(bg_writer *w, const bg_rewrite *how, int64_t *count)
{
    bg_error err = {0};
    int64_t kept, dropped, failed, before = bg_writer_count(w, &failed);
    bg_status st = bg_writer_rewrite(w, how, &kept, &dropped, &err);
    check(st == BG_OK || st == BG_FORMAT);
    *count = before;
    if (st) return false;
    *count = bg_writer_count(w, &failed);
    check(kept == *count && kept + dropped == before);
    return true;
}

static void go_on(const paths *p, bg_writer_config *c, const bg_out_sys *sys, bg_writer *w,
                  const bg_recovered *was, uint8_t what)
{
    bg_error err = {0};
    bg_recovered rec = *was;
    int64_t count = rec.n_records;
    int some = 1;
    check(!bg_writer_begin(w, &err));
    check_files(p, c);
    if (what & 0x30) {
        const bg_rewrite how = {
            .keep = what & 0x10 ? keep_even : NULL, .ctx = &some, .sort = what & 0x20};
        bool done = rewrites(w, &how, &count);
        bg_writer_close(w);
        if (!done) c->ordered = false; /* nor could it be sorted at the end */
        check(!bg_writer_open_on(&w, c, sys, &rec, &err) && rec.n_records == count &&
              rec.cut_bytes == 0 && !rec.adopted == (!was->adopted || done));
        check(!bg_writer_begin(w, &err));
        check_files(p, c);
    }
    for (int64_t r = 0; r < 3 && !rec.finished; r++) {
        static const char line[] = "{\"line\":1,\"id\":null,\"error\":{\"code\":\"c\","
                                   "\"message\":\"\",\"param\":null}}\n";
        if (bg_writer_done(w, r)) continue;
        char text[128];
        int n = snprintf(text, sizeof text, "%s", line);
        text[8] = (char)('1' + r);
        check(!bg_writer_add(w, &(bg_done){.record = r, .failed = r == 1, .key = 5}, text,
                             (size_t)n, &err));
        check(!bg_writer_commit(w, &err));
        count++;
    }
    bg_status st = bg_writer_finish(w, &err);
    check(!st || (st == BG_FORMAT && c->ordered));
    bg_writer_close(w);
    err = (bg_error){0};
    check(!bg_writer_open_on(&w, c, sys, &rec, &err) && rec.finished == !st &&
          rec.n_records == count && rec.cut_bytes == 0);
    check(!bg_writer_begin(w, &err));
    check_files(p, c);
    bg_writer_close(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const paths *p = names();
    if (size < 4) return 0;
    bool lz4 = data[0] & 1;
    int errors_mode = (data[1] & 3) % 3;
    put_files(p, data, size, lz4, errors_mode);

    bg_out_sys sys = bg_out_real; /* names as they are, and nothing is synced */
    sys.write = do_write;
    sys.sync = do_sync;
    sys.truncate = do_truncate;
    sys.sync_dir = do_sync_dir;
    json_t *identity = json_pack("{s:i}", "a", 1);
    bg_writer_config c = {.path = p->out,
                          .error_path = errors_mode ? p->errors[errors_mode == 2] : NULL,
                          .format = lz4 ? BG_OUT_LZ4 : BG_OUT_PLAIN,
                          .identity = identity,
                          .ordered = data[1] & 4,
                          .fold_bytes = data[1] & 8 ? 1 : 0};
    bg_writer *w;
    bg_recovered rec;
    bg_error err = {0};
    bg_status st = bg_writer_open_on(&w, &c, &sys, &rec, &err);
    check(st == BG_OK || st == BG_FORMAT || st == BG_ARG);
    check(!st || err.text[0]);
    if (!st) {
        check_partials(w, &rec);
        go_on(p, &c, &sys, w, &rec, data[1]);
    }
    json_decref(identity);
    return 0;
}
