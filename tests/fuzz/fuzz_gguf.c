/* Opens the bytes as a GGUF file; walks all keys and tensors and decodes a row of each tensor. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "gguf/gguf.h"

enum { ROW = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void walk_keys(const bg_gguf *g, volatile double *sink)
{
    for (int64_t i = 0; i < bg_gguf_n_kv(g); i++) {
        const bg_kv *kv = bg_gguf_kv(g, i);
        for (uint64_t k = 0; k <= kv->n; k++) {
            int64_t v;
            double d;
            bool b;
            bg_str s;
            if (bg_kv_int(kv, k, &v)) *sink += (double)v;
            if (bg_kv_float(kv, k, &d)) *sink += d;
            if (bg_kv_bool(kv, k, &b)) *sink += b;
            if (bg_kv_str(kv, k, &s) && s.n) *sink += s.p[0] + s.p[s.n - 1];
        }
    }
}

static void walk_tensors(const bg_gguf *g, volatile double *sink)
{
    static float row[ROW];
    for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
        const bg_tensor *t = bg_gguf_tensor(g, i);
        const int64_t n = t->ne[0] < ROW ? t->ne[0] : ROW;
        if (bg_gguf_find_tensor(g, t->cname) != t) abort();
        if (t->bytes) *sink += ((const uint8_t *)t->data)[t->bytes - 1];
        bg_dequant_row(t->type, t->data, row, n);
        *sink += row[0];
        if (bg_quant_row(t->type, row, (uint8_t[ROW * 8]){0}, n)) *sink += 1;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bg_error err = {0}, ignored = {0};
    bg_gguf *g;
    bg_str s;
    int64_t v;
    volatile double sink = 0;
    if (bg_gguf_open_memory(&g, data, size, "fuzz", &err)) {
        if (g || !err.text[0]) abort();
        return 0;
    }
    walk_keys(g, &sink);
    walk_tensors(g, &sink);
    bg_gguf_get_str(g, "general.architecture", &s, &ignored);
    bg_gguf_get_int(g, "x.list", 0, &v, &ignored);
    sink += (double)bg_gguf_fingerprint(g);
    bg_gguf_close(g);
    return 0;
}
