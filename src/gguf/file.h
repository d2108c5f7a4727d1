/* gguf/file.h - private to src/gguf: what an open model is made of. */
#ifndef BG_GGUF_FILE_H
#define BG_GGUF_FILE_H

#include "gguf/gguf.h"

enum {
    MAX_NAME = 63,       /* bytes of a tensor's name */
    DEFAULT_ALIGN = 32,  /* without general.alignment */
    MAX_ALIGN = 1 << 20, /* real files use 32 or 64 */
};

/* A hash set of positions into an array of strings that someone else keeps. */
typedef struct str_index {
    uint32_t *slot; /* position + 1; 0 is empty */
    uint64_t mask;
    uint64_t seed; /* so that a file cannot be made to collide */
} str_index;

typedef bg_str str_index_get(const void *items, int64_t i);

/* Indexes get(items, 0..n). False: out of memory. Two equal strings: *first and *second are their
 * positions and the index is not usable; else *first is -1. n < 2^31. */
bool str_index_build(str_index *x, const void *items, int64_t n, str_index_get *get, int64_t *first,
                     int64_t *second);
int64_t str_index_find(const str_index *x, const void *items, str_index_get *get, const char *key);
void str_index_release(str_index *x);

/* The metadata of one file. */
typedef struct kv_set {
    bg_kv *kv;
    int64_t n, cap;
    str_index index;
} kv_set;

void kv_set_release(kv_set *s);
const bg_kv *kv_set_find(const kv_set *s, const char *key);

/* A tensor with room for its NUL-terminated name. */
typedef struct tensor_slot {
    bg_tensor t;
    char name[MAX_NAME + 1];
} tensor_slot;

typedef struct gguf_part {
    char *path;
    const uint8_t *map;
    size_t size;
    bool mapped;         /* by mmap, so that it must be unmapped */
    uint64_t data_start; /* where the header and its padding end, at most size */
} gguf_part;

struct bg_gguf {
    gguf_part *parts;
    int n_parts;
    bool header_only; /* data may be missing */
    kv_set meta;      /* of part 0 */
    tensor_slot *tensors;
    int64_t n_tensors, cap_tensors;
    str_index index; /* of the tensors of all parts */
};

/* Reads the header of g->parts[part]: its metadata into *meta (the caller's, to be released also
 * on failure), its tensors appended to g->tensors. Checks everything but what lies in other parts.
 */
bg_status gguf_parse_part(bg_gguf *g, int part, kv_set *meta, bg_error *err);

/* After all parts are parsed: names, and the index over all tensors. */
bg_status gguf_finish_tensors(bg_gguf *g, bg_error *err);

/* Adds a part: maps the file at path. */
bg_status gguf_map_part(bg_gguf *g, const char *path, bg_error *err);

/* Part 0 is open and is one file of a split model (it may be any of them): opens all the others and
 * makes them parts 0..n-1 in order. For a model of one file, does nothing. */
bg_status gguf_open_siblings(bg_gguf *g, bg_error *err);

/* Forgets all parts, tensors and metadata. */
void gguf_clear(bg_gguf *g);

/* s for a message: at most some 80 bytes, control characters and bad UTF-8 replaced by '?'. */
enum { SHOWN_BYTES = 96 };
const char *gguf_show(bg_str s, char out[SHOWN_BYTES]);

const char *gguf_kv_type_name(uint32_t type);
/* Bytes of a value of the type; 0 for strings and arrays. type <= BG_KV_F64. */
size_t gguf_kv_bytes(uint32_t type);
/* A number over which a key's type is of no interest: any integer; false: absent or none. */
bool gguf_small_int(const kv_set *s, const char *key, int64_t *v);

#endif
