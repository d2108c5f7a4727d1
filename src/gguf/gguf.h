/* gguf/gguf.h - GGUF files: metadata, tensors, quant types, split files, and a writer.
 *
 * A bg_gguf is one model: one file, or all parts of a split one, mapped read-only. A GGUF is
 * untrusted: every count, offset and size is checked against the file before it is used, and memory
 * taken while parsing is bounded by the file's size. After a successful open every string, array
 * and tensor below lies wholly inside its mapping. Source: the GGUF v2/v3 format (ggml
 * docs/gguf.md). Threads: read-only after open; any number of readers. A mapping may be used after
 * fork(). */
#ifndef BG_GGUF_GGUF_H
#define BG_GGUF_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* ---- quant types (ids as stored in files) ------------------------------------------------- */

typedef enum bg_qtype {
    BG_F32 = 0,
    BG_F16 = 1,
    BG_Q4_0 = 2,
    BG_Q4_1 = 3,
    BG_Q5_0 = 6,
    BG_Q5_1 = 7,
    BG_Q8_0 = 8,
    BG_Q8_1 = 9,
    BG_Q2_K = 10,
    BG_Q3_K = 11,
    BG_Q4_K = 12,
    BG_Q5_K = 13,
    BG_Q6_K = 14,
    BG_Q8_K = 15,
    BG_IQ2_XXS = 16,
    BG_IQ2_XS = 17,
    BG_IQ3_XXS = 18,
    BG_IQ1_S = 19,
    BG_IQ4_NL = 20,
    BG_IQ3_S = 21,
    BG_IQ2_S = 22,
    BG_IQ4_XS = 23,
    BG_I8 = 24,
    BG_I16 = 25,
    BG_I32 = 26,
    BG_I64 = 27,
    BG_F64 = 28,
    BG_IQ1_M = 29,
    BG_BF16 = 30,
    BG_TQ1_0 = 34,
    BG_TQ2_0 = 35,
    BG_MXFP4 = 39,
    BG_NVFP4 = 40,
    BG_Q1_0 = 41,
    BG_Q2_0 = 42,
    BG_QTYPE_COUNT = 64 /* ids from here on are unknown */
} bg_qtype;

typedef struct bg_qtype_info {
    const char *name;     /* "Q4_K"; NULL: this id is not a type we know */
    int32_t block_values; /* weights in a block: 1, 16, 32 or 256 */
    int32_t block_bytes;
    bool dequant; /* bg_dequant_row() can decode it */
} bg_qtype_info;

const bg_qtype_info *bg_qtype_get(uint32_t id); /* never NULL; .name is NULL when unknown */
uint32_t bg_qtype_by_name(const char *name);    /* BG_QTYPE_COUNT: no such name; case ignored */
/* Bytes of a row of n values; n must be a multiple of block_values. */
size_t bg_qtype_row_bytes(uint32_t id, int64_t n);
/* Decodes n values (a multiple of block_values) into float32 exactly as quants.md defines the type.
 * src needs no alignment. The plain reference: no SIMD, no tables beyond the format's. */
void bg_dequant_row(uint32_t id, const void *src, float *dst, int64_t n);
/* The reverse for the types the writer supports (F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K
 * Q6_K ...): simple round-to-nearest quantisation. False: not supported. */
bool bg_quant_row(uint32_t id, const float *src, void *dst, int64_t n);

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct bg_gguf bg_gguf;

typedef struct bg_str { /* bytes inside the mapping, no NUL */
    const char *p;
    size_t n;
} bg_str;

typedef struct bg_tensor {
    bg_str name;
    char *cname;      /* the same with a NUL, owned by the bg_gguf */
    uint32_t type;    /* bg_qtype */
    int32_t n_dims;   /* 1..4 */
    int64_t ne[4];    /* ne[0] is contiguous; unused dims are 1 */
    const void *data; /* in the mapping of part `part` */
    size_t bytes;
    int32_t part;    /* file of a split model, from 0 */
    uint64_t offset; /* of data from the start of that file */
} bg_tensor;

/* Opens the model at path; any part of a split model opens them all (parts must be complete and
 * consistent: split.no, split.count, split.tensors.count, the file names). *g is the caller's,
 * NULL on failure. BG_IO, BG_FORMAT (text names file, place, value, remedy), BG_NOMEM. */
bg_status bg_gguf_open(bg_gguf **g, const char *path, bg_error *err);
/* The same for a model whose data may be missing, for what needs names, types and shapes alone:
 * tensors whose bytes are not all in the file have data NULL. */
bg_status bg_gguf_open_header(bg_gguf **g, const char *path, bg_error *err);
/* As bg_gguf_open() for bytes already in memory (tests, fuzzers); they must outlive g. */
bg_status bg_gguf_open_memory(bg_gguf **g, const void *data, size_t n, const char *name,
                              bg_error *err);
void bg_gguf_close(bg_gguf *g); /* NULL is allowed */

int bg_gguf_n_parts(const bg_gguf *g);
const char *bg_gguf_part_path(const bg_gguf *g, int part);
uint64_t bg_gguf_file_bytes(const bg_gguf *g); /* all parts */
/* Hash over all parts' sizes, headers, and a sample of the data: what identifies the model for
 * resuming. Cheap (reads a few MiB). */
uint64_t bg_gguf_fingerprint(const bg_gguf *g);
/* Tells the kernel that bytes [p, p+n) of the mapping will be read soon. */
void bg_gguf_will_need(const bg_gguf *g, const void *p, size_t n);
/* Tells the kernel that bytes [p, p+n) of the mapping are not needed in memory for now. */
void bg_gguf_drop_pages(const bg_gguf *g, const void *p, size_t n);

int64_t bg_gguf_n_tensors(const bg_gguf *g);
const bg_tensor *bg_gguf_tensor(const bg_gguf *g, int64_t i);
const bg_tensor *bg_gguf_find_tensor(const bg_gguf *g, const char *name); /* NULL: none; O(1) */

/* ---- metadata: lookups by key. Integers of any width and sign are read into int64. --------- */

typedef enum bg_kv_type {
    BG_KV_U8,
    BG_KV_I8,
    BG_KV_U16,
    BG_KV_I16,
    BG_KV_U32,
    BG_KV_I32,
    BG_KV_F32,
    BG_KV_BOOL,
    BG_KV_STR,
    BG_KV_ARR,
    BG_KV_U64,
    BG_KV_I64,
    BG_KV_F64
} bg_kv_type;

typedef struct bg_kv {
    bg_str key;
    bg_kv_type type;      /* of the value */
    bg_kv_type elem_type; /* BG_KV_ARR only */
    uint64_t n;           /* elements of an array, else 1 */
    const uint8_t *raw;   /* the value (array: its first element) as stored */
    const bg_str *strs;   /* array of strings: n of them, else NULL */
} bg_kv;

int64_t bg_gguf_n_kv(const bg_gguf *g);
const bg_kv *bg_gguf_kv(const bg_gguf *g, int64_t i);
const bg_kv *bg_gguf_find(const bg_gguf *g, const char *key); /* NULL: absent */

/* Value i of a scalar (i = 0) or array, converted. False: out of range or of another kind. */
bool bg_kv_int(const bg_kv *kv, uint64_t i, int64_t *v);  /* any integer type, or bool as 0/1 */
bool bg_kv_float(const bg_kv *kv, uint64_t i, double *v); /* F32, F64 or any integer */
bool bg_kv_bool(const bg_kv *kv, uint64_t i, bool *v);    /* BOOL only */
bool bg_kv_str(const bg_kv *kv, uint64_t i, bg_str *v);

/* Scalars with a default for an absent key. A key of the wrong kind: BG_FORMAT, naming it. */
bg_status bg_gguf_get_int(const bg_gguf *g, const char *key, int64_t def, int64_t *v,
                          bg_error *err);
bg_status bg_gguf_get_float(const bg_gguf *g, const char *key, double def, double *v,
                            bg_error *err);
bg_status bg_gguf_get_bool(const bg_gguf *g, const char *key, bool def, bool *v, bg_error *err);
bg_status bg_gguf_get_str(const bg_gguf *g, const char *key, bg_str *v,
                          bg_error *err); /* n=0 absent */

/* ---- writing ------------------------------------------------------------------------------- */

typedef struct bg_gguf_writer bg_gguf_writer;

/* Collects metadata and tensor infos, then writes header and data in order to path. */
bg_gguf_writer *bg_gguf_writer_new(uint32_t alignment); /* NULL: out of memory; 0 = 32 */
void bg_gguf_writer_free(bg_gguf_writer *w);
void bg_gguf_put_u32(bg_gguf_writer *w, const char *key, uint32_t v);
void bg_gguf_put_u64(bg_gguf_writer *w, const char *key, uint64_t v);
void bg_gguf_put_i32(bg_gguf_writer *w, const char *key, int32_t v);
void bg_gguf_put_u16(bg_gguf_writer *w, const char *key, uint16_t v);
void bg_gguf_put_f32(bg_gguf_writer *w, const char *key, float v);
void bg_gguf_put_bool(bg_gguf_writer *w, const char *key, bool v);
void bg_gguf_put_str(bg_gguf_writer *w, const char *key, const char *s, size_t n);
/* n values of an array; for strings, v is an array of bg_str, for numbers the packed values. */
void bg_gguf_put_array(bg_gguf_writer *w, const char *key, bg_kv_type elem, const void *v,
                       uint64_t n);
/* Announces a tensor; its data follows later, in the order of the announcements. */
void bg_gguf_put_tensor(bg_gguf_writer *w, const char *name, uint32_t type, int n_dims,
                        const int64_t *ne);
/* Writes the file. produce() is called for each tensor in order and must hand all its bytes to
 * emit() (in any number of calls, in order); NULL: the header alone (bg_gguf_open_header()).
 * Errors: BG_IO, BG_NOMEM (also of the puts), BG_ARG. */
typedef bg_status bg_gguf_emit(void *sink, const void *data, size_t n, bg_error *err);
typedef bg_status bg_gguf_produce(void *ctx, int64_t tensor, size_t bytes, bg_gguf_emit *emit,
                                  void *sink, bg_error *err);
bg_status bg_gguf_write(bg_gguf_writer *w, const char *path, bg_gguf_produce *produce, void *ctx,
                        bg_error *err);

#endif
