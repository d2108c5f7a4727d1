/* Opening and closing: a model is one mapped file or all parts of a split one. */
#include "gguf/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"

static void unmap(gguf_part *p)
{
    if (p->mapped) munmap((void *)p->map, p->size);
    free(p->path);
    *p = (gguf_part){0};
}

void gguf_clear(bg_gguf *g)
{
    for (int i = 0; i < g->n_parts; i++)
        unmap(&g->parts[i]);
    free(g->parts);
    free(g->tensors);
    kv_set_release(&g->meta);
    str_index_release(&g->index);
    *g = (bg_gguf){.header_only = g->header_only};
}

void bg_gguf_close(bg_gguf *g)
{
    if (!g) return;
    gguf_clear(g);
    free(g);
}

/* A new part with its name and nothing mapped yet; NULL: out of memory. */
static gguf_part *add_part(bg_gguf *g, const char *path)
{
    gguf_part *parts = realloc(g->parts, ((size_t)g->n_parts + 1) * sizeof *parts);
    if (!parts) return NULL;
    g->parts = parts;
    gguf_part *p = &parts[g->n_parts];
    *p = (gguf_part){.path = strdup(path)};
    if (!p->path) return NULL;
    g->n_parts++;
    return p;
}

bg_status gguf_map_part(bg_gguf *g, const char *path, bg_error *err)
{
    gguf_part *p = add_part(g, path);
    if (!p) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    /* O_NONBLOCK: a named pipe must be refused, not waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return bg_fail_os(err, "%s: cannot open the model", path);
    struct stat s;
    bg_status st = BG_OK;
    if (fstat(fd, &s) != 0) {
        st = bg_fail_os(err, "%s: cannot get the size", path);
    } else if (!S_ISREG(s.st_mode)) {
        st = bg_fail(err, BG_FORMAT, "%s: not a file but %s; name the GGUF file itself", path,
                     S_ISDIR(s.st_mode) ? "a directory" : "a pipe or device");
    } else if (s.st_size == 0) {
        st = bg_fail(err, BG_FORMAT, "%s: the file is empty", path);
    } else {
        void *map = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) {
            st = bg_fail_os(err, "%s: cannot map %lld bytes", path, (long long)s.st_size);
        } else {
            p->map = map;
            p->size = (size_t)s.st_size;
            p->mapped = true;
        }
    }
    close(fd);
    return st;
}

static bg_status open_model(bg_gguf **out, const char *path, bool header_only, bg_error *err)
{
    *out = NULL;
    bg_gguf *g = calloc(1, sizeof *g);
    if (!g) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    g->header_only = header_only;
    bg_status st = gguf_map_part(g, path, err);
    if (!st) st = gguf_parse_part(g, 0, &g->meta, err);
    if (!st) st = gguf_open_siblings(g, err);
    if (!st) st = gguf_finish_tensors(g, err);
    if (!st) {
        *out = g;
        g = NULL;
    }
    bg_gguf_close(g);
    return st;
}

bg_status bg_gguf_open(bg_gguf **g, const char *path, bg_error *err)
{
    return open_model(g, path, false, err);
}

bg_status bg_gguf_open_header(bg_gguf **g, const char *path, bg_error *err)
{
    return open_model(g, path, true, err);
}

bg_status bg_gguf_open_memory(bg_gguf **out, const void *data, size_t n, const char *name,
                              bg_error *err)
{
    *out = NULL;
    bg_status st = BG_OK;
    int64_t count;
    bg_gguf *g = calloc(1, sizeof *g);
    gguf_part *p = g ? add_part(g, name) : NULL;
    if (!p) {
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", name);
        goto out;
    }
    p->map = data;
    p->size = n;
    st = gguf_parse_part(g, 0, &g->meta, err);
    if (!st && gguf_small_int(&g->meta, "split.count", &count) && count > 1)
        st = bg_fail(err, BG_FORMAT, "%s: one of %lld parts of a split model; open it by its path",
                     name, (long long)count);
    if (!st) st = gguf_finish_tensors(g, err);
    if (st) goto out;
    *out = g;
    g = NULL;
out:
    bg_gguf_close(g);
    return st;
}

/* ---- the parts ------------------------------------------------------------------------------ */

int bg_gguf_n_parts(const bg_gguf *g)
{
    return g->n_parts;
}

const char *bg_gguf_part_path(const bg_gguf *g, int part)
{
    return g->parts[part].path;
}

uint64_t bg_gguf_file_bytes(const bg_gguf *g)
{
    uint64_t n = 0;
    for (int i = 0; i < g->n_parts; i++)
        n += g->parts[i].size;
    return n;
}

/* Samples of the data: enough places that another quantisation or fine-tune of the same shape
 * differs in one of them. */
enum { SAMPLES = 256, SAMPLE_BYTES = 4096 };

uint64_t bg_gguf_fingerprint(const bg_gguf *g)
{
    uint64_t h = (uint64_t)g->n_parts;
    for (int i = 0; i < g->n_parts; i++) {
        const gguf_part *p = &g->parts[i];
        size_t start = (size_t)p->data_start, data = p->size - start;
        h = bg_hash64(p->map, start, h ^ p->size);
        if (data <= (size_t)SAMPLES * SAMPLE_BYTES) {
            h = bg_hash64(p->map + start, data, h);
            continue;
        }
        for (size_t k = 0; k < SAMPLES; k++) { /* the first and the last bytes are among them */
            size_t at = (data - SAMPLE_BYTES) / (SAMPLES - 1) * k;
            if (k == SAMPLES - 1) at = data - SAMPLE_BYTES;
            h = bg_hash64(p->map + start + at, SAMPLE_BYTES, h);
        }
    }
    return h;
}

/* Whole pages of a mapped file around or inside [ptr, ptr + n). */
static void advise(const bg_gguf *g, const void *ptr, size_t n, bool inside, int advice)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)ptr;
    for (int i = 0; i < g->n_parts; i++) {
        const gguf_part *p = &g->parts[i];
        const uintptr_t base = (uintptr_t)p->map;
        if (!p->mapped || at < base || at - base > p->size || n > p->size - (at - base)) continue;
        const uintptr_t from = (at + (inside ? page - 1 : 0)) & ~(page - 1),
                        to = inside ? (at + n) & ~(page - 1) : at + n;
        if (from < to) madvise((void *)from, to - from, advice);
        return;
    }
}

void bg_gguf_will_need(const bg_gguf *g, const void *p, size_t n)
{
    advise(g, p, n, false, MADV_WILLNEED);
}

/* The neighbours' bytes may be in use; and of bytes that are not a file's, dropping would lose
 * them. */
void bg_gguf_drop_pages(const bg_gguf *g, const void *p, size_t n)
{
    advise(g, p, n, true, MADV_DONTNEED);
}

int64_t bg_gguf_n_tensors(const bg_gguf *g)
{
    return g->n_tensors;
}

const bg_tensor *bg_gguf_tensor(const bg_gguf *g, int64_t i)
{
    return &g->tensors[i].t;
}
