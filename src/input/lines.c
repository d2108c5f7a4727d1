/* Lines from bytes.
 *
 * The running hash is a chain: h(0) = 0, h(k) = XXH3-64 of line k's bytes, line end and BOM
 * included, with h(k-1) as the seed. So it costs one short hash a line, can be asked for after any
 * line, and does not depend on how the bytes came in or were compressed. */
#include "input/input.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/hash.h"
#include "input/source.h"

enum {
    CHUNK = 1 << 18,
    SLACK = 8,                   /* a BOM and CR LF beside a line's own bytes, and one more */
    DEFAULT_MAX_LINE = 64 << 20, /* bytes */
};

struct bg_input {
    char **paths;
    int n_paths;
    size_t max_line;
    bg_source *source; /* of paths[file]; NULL: not opened yet */
    int file;
    uint64_t stored_before; /* bytes as stored of the files that are done */
    uint64_t total;
    char *buf;
    size_t cap, pos, len; /* buf[pos..len) is not handed out yet */
    bool source_ended;
    uint64_t offset;     /* decompressed offset of buf[pos] in its file */
    uint64_t all_before; /* decompressed bytes of the files that are done */
    int64_t records, line;
    uint64_t hash;
    bg_status failed; /* sticky; reported once the whole lines in front of it are out */
    bg_error why;
};

static bg_status check_path(bg_input *in, const char *path, bool *size_known, bg_error *err)
{
    struct stat sb;
    if (stat(path, &sb) != 0) return bg_fail_os(err, "%s: cannot open", path);
    if (S_ISDIR(sb.st_mode)) {
        errno = EISDIR;
        return bg_fail_os(err, "%s: cannot read", path);
    }
    if (access(path, R_OK) != 0) return bg_fail_os(err, "%s: cannot open", path);
    if (S_ISREG(sb.st_mode))
        in->total += (uint64_t)sb.st_size;
    else
        *size_known = false;
    return BG_OK;
}

bg_status bg_input_open(bg_input **out, const char *const *paths, int n_paths, size_t max_line,
                        bg_error *err)
{
    *out = NULL;
    if (n_paths < 1) return bg_fail(err, BG_ARG, "no input is named; give a file, or - for stdin");
    bg_status st = BG_OK;
    bool size_known = true, stdin_used = false;
    bg_input *in = calloc(1, sizeof *in);
    if (!in) return bg_fail(err, BG_NOMEM, "input: out of memory");
    in->max_line = max_line ? max_line : DEFAULT_MAX_LINE;
    in->cap = (in->max_line < CHUNK ? in->max_line : CHUNK) + SLACK + CHUNK;
    in->buf = malloc(in->cap);
    in->paths = calloc((size_t)n_paths, sizeof *in->paths);
    if (!in->buf || !in->paths) {
        st = bg_fail(err, BG_NOMEM, "input: out of memory");
        goto out;
    }
    for (int i = 0; i < n_paths; i++) {
        in->paths[in->n_paths] = strdup(paths[i]);
        if (!in->paths[in->n_paths++]) {
            st = bg_fail(err, BG_NOMEM, "input: out of memory");
            goto out;
        }
        if (strcmp(paths[i], "-") == 0) {
            if (stdin_used) {
                st = bg_fail(err, BG_ARG, "standard input (-) is named twice; it can be read once");
                goto out;
            }
            stdin_used = true;
            size_known = false;
            continue;
        }
        st = check_path(in, paths[i], &size_known, err);
        if (st) goto out;
    }
    if (!size_known) in->total = 0;
    *out = in;
    in = NULL;
out:
    bg_input_close(in);
    return st;
}

void bg_input_close(bg_input *in)
{
    if (!in) return;
    bg_source_close(in->source);
    for (int i = 0; i < in->n_paths; i++)
        free(in->paths[i]);
    free(in->paths);
    free(in->buf);
    free(in);
}

void bg_input_progress(const bg_input *in, uint64_t *read, uint64_t *total)
{
    *read = in->stored_before + (in->source ? bg_source_stored(in->source) : 0);
    *total = in->total;
}

int64_t bg_input_records(const bg_input *in)
{
    return in->records;
}

bool bg_input_ready(const bg_input *in)
{
    return in->source && memchr(in->buf + in->pos, '\n', in->len - in->pos);
}

uint64_t bg_input_hash(const bg_input *in)
{
    return in->hash;
}

static bool fail_later(bg_input *in, bg_status st)
{
    in->failed = st;
    in->source_ended = true;
    return false;
}

/* Reads more behind buf[len], with `keep` bytes from pos on kept in place relative to each other.
 * False: nothing more comes (the end, or in->failed). */
static bool more(bg_input *in)
{
    if (in->source_ended) return false;
    if (in->pos) {
        memmove(in->buf, in->buf + in->pos, in->len - in->pos);
        in->len -= in->pos;
        in->pos = 0;
    }
    if (in->cap - in->len < CHUNK) {
        size_t cap = in->cap * 2;
        if (cap > in->max_line + SLACK + CHUNK) cap = in->max_line + SLACK + CHUNK;
        if (cap > in->cap) {
            char *p = realloc(in->buf, cap);
            if (!p)
                return fail_later(in, bg_fail(&in->why, BG_NOMEM, "%s: no memory for a long line",
                                              in->paths[in->file]));
            in->buf = p;
            in->cap = cap;
        }
    }
    size_t got;
    bg_status st = bg_source_read(in->source, in->buf + in->len, in->cap - in->len, &got, &in->why);
    in->len += got;
    if (st)
        fail_later(in, st);
    else if (!got)
        in->source_ended = true;
    return got > 0;
}

/* The rest of a line of which buf[pos..len) is too long already, hashed and thrown away except its
 * first bytes, which stay at buf[0..keep). Sets *n_line to its bytes with the line end. False: it
 * has no end because the input failed. */
static bool skip_rest(bg_input *in, size_t keep, uint64_t *n_line)
{
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return fail_later(in,
                          bg_fail(&in->why, BG_NOMEM, "%s: out of memory", in->paths[in->file]));
    XXH3_64bits_reset_withSeed(state, in->hash);
    if (in->pos) {
        memmove(in->buf, in->buf + in->pos, in->len - in->pos);
        in->len -= in->pos;
        in->pos = 0;
    }
    XXH3_64bits_update(state, in->buf, in->len);
    *n_line = in->len;
    in->pos = in->len = keep;
    bool found = false;
    while (!found && !in->source_ended) {
        size_t got;
        bg_status st = bg_source_read(in->source, in->buf + keep, in->cap - keep, &got, &in->why);
        const char *lf = got ? memchr(in->buf + keep, '\n', got) : NULL;
        size_t part = lf ? (size_t)(lf - (in->buf + keep)) + 1 : got;
        XXH3_64bits_update(state, in->buf + keep, part);
        *n_line += part;
        in->pos = keep + part;
        in->len = keep + got;
        found = lf != NULL;
        if (st)
            fail_later(in, st);
        else if (!got)
            in->source_ended = true;
    }
    if (found || !in->failed) in->hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return found || !in->failed;
}

static bool blank(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r') return false;
    return true;
}

/* How a file begins that is text, but not UTF-8: by its mark, or by a brace or a quote among NULs.
 * Told once for the file: every line of it would be garbage. NULL: it may be UTF-8. */
static const char *other_encoding(const char *s, size_t n)
{
    static const struct {
        const char *start;
        size_t n;
        const char *name;
    } list[] = {{"\xff\xfe\0\0", 4, "UTF-32"}, {"\0\0\xfe\xff", 4, "UTF-32"},
                {"{\0\0\0", 4, "UTF-32"},      {"\0\0\0{", 4, "UTF-32"},
                {"\xff\xfe", 2, "UTF-16"},     {"\xfe\xff", 2, "UTF-16"},
                {"{\0\"\0", 4, "UTF-16"},      {"\0{\0\"", 4, "UTF-16"},
                {"{\0 \0", 4, "UTF-16"},       {"\0{\0 ", 4, "UTF-16"}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (n >= list[i].n && memcmp(s, list[i].start, list[i].n) == 0) return list[i].name;
    return NULL;
}

/* The next line of the current file, blank or not. False: there is none (or in->failed). */
static bool next_line(bg_input *in, bg_line *out)
{
    size_t looked = 0; /* bytes after pos known to hold no LF */
    const char *lf = NULL;
    for (;;) {
        size_t n = in->len - in->pos;
        if (n > looked) lf = memchr(in->buf + in->pos + looked, '\n', n - looked);
        looked = n;
        if (lf || n > in->max_line + SLACK || !more(in)) break;
    }
    const char *other = in->line == 0 ? other_encoding(in->buf + in->pos, in->len - in->pos) : NULL;
    if (other)
        return fail_later(in, bg_fail(&in->why, BG_FORMAT,
                                      "%s: this is %s text; convert it to UTF-8: iconv -f %s -t "
                                      "UTF-8",
                                      in->paths[in->file], other, other));
    size_t n_have = lf ? (size_t)(lf - (in->buf + in->pos)) + 1 : in->len - in->pos;
    if (!lf && (n_have == 0 || (in->failed && n_have <= in->max_line + SLACK))) return false;

    size_t bom =
        in->line == 0 && n_have >= 3 && !memcmp(in->buf + in->pos, "\xef\xbb\xbf", 3) ? 3 : 0;
    *out = (bg_line){
        .record = in->records, .line = in->line + 1, .file = in->file, .offset = in->offset + bom};
    uint64_t n_line = n_have;
    if (!lf && n_have > in->max_line + SLACK) {
        if (!skip_rest(in, bom + in->max_line, &n_line)) return false;
        out->data = in->buf + bom;
        out->n = in->max_line;
        out->too_long = true;
    } else {
        in->hash = bg_hash64(in->buf + in->pos, n_have, in->hash);
        out->data = in->buf + in->pos + bom;
        out->n = n_have - bom;
        if (lf) out->n--;
        if (out->n && out->data[out->n - 1] == '\r') out->n--;
        if (out->n > in->max_line) {
            out->n = in->max_line;
            out->too_long = true;
        }
        in->pos += n_have;
    }
    in->offset += n_line;
    in->records++;
    in->line++;
    out->end = in->all_before + in->offset;
    out->hash = in->hash;
    return true;
}

bg_status bg_input_next(bg_input *in, bg_line *line, bool *got, bg_error *err)
{
    *got = false;
    while (in->file < in->n_paths) {
        if (!in->source && !in->failed) {
            bg_status st = bg_source_open(&in->source, in->paths[in->file], &in->why);
            if (st) fail_later(in, st);
        }
        while (next_line(in, line)) {
            if (!line->too_long && blank(line->data, line->n)) continue;
            *got = true;
            return BG_OK;
        }
        if (in->failed) {
            if (!err->status) *err = in->why;
            return in->failed;
        }
        in->stored_before += bg_source_stored(in->source);
        in->all_before += in->offset;
        bg_source_close(in->source);
        in->source = NULL;
        in->file++;
        in->pos = in->len = 0;
        in->offset = 0;
        in->line = 0;
        in->source_ended = false;
    }
    return BG_OK;
}
