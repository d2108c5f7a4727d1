/* tools/bench_linear.c - how fast the CPU's quantised matrix products are.
 *
 *   bench_linear kernels [threads [isa]]    GMAC/s by type and number of rows, one 4096 x 4096
 * matrix bench_linear smollm2 [threads [isa [type]]]    tokens/s of a step of SmolLM2-135M's
 * matrices alone bench_linear llama8b [threads [isa]]    the same for one layer of Llama-3.1-8B,
 * scaled to 32
 *
 * Each figure is the best of several runs. Weights are random; in the model modes all layers are
 * separate matrices, so that caches help no more than they would in the model. Build with
 *   gcc -O2 -D_GNU_SOURCE -Isrc tools/bench_linear.c build/lib/{backend,gguf,base}.a -pthread -lm
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/cpu/linear.h"
#include "base/clock.h"

static bg_pool *pool;
static bg_isa isa;

static uint64_t random_word(void)
{
    static uint64_t s = 1;
    s ^= s << 13;
    s ^= s >> 7;
    return s ^= s << 17;
}

static void fatal(const bg_error *err)
{
    fprintf(stderr, "%s\n", err->text);
    exit(1);
}

/* Parts of a linear: types[i] with rows[i] rows. The bits are random; what they mean does not
 * matter. */
static bg_linear *make(int64_t k, int n, const uint32_t *types, const int64_t *rows,
                       bg_compute compute)
{
    bg_error err = {0};
    bg_linear_spec spec = {.name = "bench", .n_parts = n};
    for (int i = 0; i < n; i++) {
        const size_t bytes = (size_t)rows[i] * bg_qtype_row_bytes(types[i], k);
        uint64_t *data = malloc(bytes + 8);
        for (size_t j = 0; j < bytes / 8 + 1; j++)
            data[j] =
                (random_word() & 0x3f3f3f3f3f3f3f3f) |
                (types[i] == BG_MXFP4 ? 0x4040404040404040
                                      : 0); /* no NaN, no subnormal exponents among the scales */
        spec.parts[i] = (bg_linear_part){.type = types[i],
                                         .data = data,
                                         .k_total = k,
                                         .n_total = rows[i],
                                         .n_rows = rows[i],
                                         .n_cols = k};
    }
    bg_linear *l;
    if (bg_cpu_linear_new(&l, &spec, compute, isa, pool, &err)) fatal(&err);
    for (int i = 0; i < n; i++)
        free((void *)(uintptr_t)spec.parts[i].data);
    return l;
}

static void *aligned(size_t n)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, n + 64)) exit(1);
    memset(p, 0, n + 64);
    return p;
}

/* One thread: its own processor time, so that other work on the machine disturbs less. */
static int64_t clock_ns(void)
{
    struct timespec t;
    if (bg_pool_threads(pool) > 1) return bg_now_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Seconds of one pass over the linears with m rows: the best of `tries`. */
static double time_pass(bg_linear *const *l, int n, int m, int tries)
{
    size_t rows = 0, cols = 0, scratch_bytes = 0;
    for (int i = 0; i < n; i++) {
        const size_t s = bg_cpu_linear_scratch(l[i], m);
        scratch_bytes = s > scratch_bytes ? s : scratch_bytes;
        if ((size_t)bg_cpu_linear_rows(l[i]) > rows) rows = (size_t)bg_cpu_linear_rows(l[i]);
        if ((size_t)bg_cpu_linear_cols(l[i]) > cols) cols = (size_t)bg_cpu_linear_cols(l[i]);
    }
    float *x = aligned((size_t)m * cols * 4), *out = aligned((size_t)m * rows * 4);
    void *scratch = aligned(scratch_bytes);
    for (size_t i = 0; i < (size_t)m * cols; i++)
        x[i] = (float)(int32_t)random_word() * 0x1p-31f;
    double best = 1e9;
    for (int i = 0; i < tries; i++) {
        const int64_t t0 = clock_ns();
        for (int j = 0; j < n; j++)
            bg_cpu_linear_run(l[j], out, bg_cpu_linear_rows(l[j]), x, bg_cpu_linear_cols(l[j]), m,
                              scratch, pool);
        const double t = (double)(clock_ns() - t0) * 1e-9;
        best = t < best ? t : best;
    }
    free(x);
    free(out);
    free(scratch);
    return best;
}

static void kernels(const char *only, int64_t k, int64_t n)
{
    static const uint32_t types[] = {BG_Q4_0,   BG_Q4_1,  BG_Q5_0, BG_Q5_1, BG_Q8_0,
                                     BG_IQ4_NL, BG_MXFP4, BG_Q4_K, BG_Q5_K, BG_Q6_K,
                                     BG_IQ4_XS, BG_F16,   BG_Q3_K, BG_Q2_K, BG_IQ3_S};
    static const int ms[] = {1, 2, 4, 8, 16, 32, 128, 512};
    for (int mode = BG_COMPUTE_NATIVE; mode <= BG_COMPUTE_F32; mode++) {
        printf("%s GMAC/s\n%-8s", mode == BG_COMPUTE_F32 ? "float32" : "native", "M");
        for (size_t j = 0; j < sizeof ms / sizeof *ms; j++)
            printf("%7d", ms[j]);
        printf("\n");
        for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
            if (only && strcmp(bg_qtype_get(types[i])->name, only) != 0) continue;
            bg_linear *l = make(k, 1, &types[i], &n, (bg_compute)mode);
            printf("%-8s", bg_qtype_get(types[i])->name);
            for (size_t j = 0; j < sizeof ms / sizeof *ms; j++) {
                const double macs = (double)ms[j] * (double)(n * k);
                const int tries = macs > 1e9 ? 5 : macs > 1e8 ? 20 : 100;
                printf("%7.1f", macs / time_pass(&l, 1, ms[j], tries) * 1e-9);
                fflush(stdout);
            }
            printf("\n");
            bg_cpu_linear_free(l);
        }
    }
}

struct shape {
    int64_t k;
    int n_parts;
    uint32_t types[3];
    int64_t rows[3];
};

static void model(const char *title, const struct shape *layer, int n_shapes, int n_layers,
                  int scale, const struct shape *head)
{
    static const int ms[] = {1, 2, 4, 8, 16, 32, 128, 512};
    bg_linear *l[128];
    int n = 0;
    uint64_t bytes = 0;
    for (int i = 0; i < n_layers; i++)
        for (int j = 0; j < n_shapes; j++)
            l[n++] = make(layer[j].k, layer[j].n_parts, layer[j].types, layer[j].rows,
                          BG_COMPUTE_NATIVE);
    bg_linear *h = make(head->k, 1, head->types, head->rows, BG_COMPUTE_NATIVE);
    for (int i = 0; i < n; i++)
        bytes += bg_cpu_linear_bytes(l[i]);
    printf("%s: %.1f MB, head %.1f MB; tokens/s with the head on every row (without)\n", title,
           (double)bytes * scale * 1e-6, (double)bg_cpu_linear_bytes(h) * 1e-6);
    for (size_t j = 0; j < sizeof ms / sizeof *ms; j++) {
        const int tries = ms[j] > 32 ? 3 : 10;
        const double t = time_pass(l, n, ms[j], tries) * scale;
        const double th = time_pass(&h, 1, ms[j], tries);
        printf("  M %3d: %8.1f (%.1f)\n", ms[j], ms[j] / (t + th), ms[j] / t);
        fflush(stdout);
    }
    for (int i = 0; i < n; i++)
        bg_cpu_linear_free(l[i]);
    bg_cpu_linear_free(h);
}

static void smollm2(uint32_t type, uint32_t head_type)
{
    const struct shape layer[] = {{576, 3, {type, type, type}, {576, 192, 192}},
                                  {576, 1, {type}, {576}},
                                  {576, 2, {type, type}, {1536, 1536}},
                                  {1536, 1, {type}, {576}}};
    const struct shape head = {576, 1, {head_type}, {49152}};
    char title[64];
    snprintf(title, sizeof title, "SmolLM2-135M %s", bg_qtype_get(type)->name);
    model(title, layer, 4, 30, 1, &head);
}

static void llama8b(void)
{
    const struct shape layer[] = {{4096, 3, {BG_Q4_K, BG_Q4_K, BG_Q6_K}, {4096, 1024, 1024}},
                                  {4096, 1, {BG_Q4_K}, {4096}},
                                  {4096, 2, {BG_Q4_K, BG_Q4_K}, {14336, 14336}},
                                  {14336, 1, {BG_Q6_K}, {4096}},
                                  {4096, 3, {BG_Q4_K, BG_Q4_K, BG_Q4_K}, {4096, 1024, 1024}},
                                  {4096, 1, {BG_Q4_K}, {4096}},
                                  {4096, 2, {BG_Q4_K, BG_Q4_K}, {14336, 14336}},
                                  {14336, 1, {BG_Q4_K}, {4096}}};
    const struct shape head = {4096, 1, {BG_Q6_K}, {128256}};
    model("Llama-3.1-8B Q4_K_M", layer, 8, 1, 16, &head);
}

int main(int argc, char **argv)
{
    bg_error err = {0};
    const int n_threads = argc > 2 ? atoi(argv[2]) : 1;
    isa = bg_isa_best();
    if (argc < 2 || (argc > 3 && !bg_isa_by_name(argv[3], &isa)) || isa > bg_isa_best()) {
        fprintf(
            stderr,
            "usage: bench_linear kernels|smollm2|llama8b [threads [isa [type [columns rows]]]]\n");
        return 2;
    }
    if (bg_pool_new(&pool, n_threads, -1, &err)) fatal(&err);
    printf("%d threads, %s\n", n_threads, bg_isa_name(isa));
    if (strcmp(argv[1], "kernels") == 0) {
        kernels(argc > 4 ? argv[4] : NULL, argc > 6 ? atol(argv[5]) : 2048,
                argc > 6 ? atol(argv[6]) : 2048);
    } else if (strcmp(argv[1], "smollm2") == 0) {
        const uint32_t type = argc > 4 ? bg_qtype_by_name(argv[4]) : BG_Q4_1;
        smollm2(type, type == BG_Q8_0 ? BG_Q8_0 : type);
    } else {
        llama8b();
    }
    bg_pool_free(pool);
    return 0;
}
