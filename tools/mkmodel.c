/* mkmodel - makes synthetic GGUF models for tests and benchmarks.
 *
 *     mkmodel --preset llama-3.1-8b --mix q4_k_m -o model.gguf
 *     mkmodel --arch qwen3 --layers 4 --vocab 2048 --split-max-tensors 10 -o small.gguf
 *
 * The same command gives the same bytes, and a tensor's bytes depend on its name, size, type and
 * the seed only: not on --shuffle, splits or threads. What such a model generates is noise. */
#include "mkmodel.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/rng.h"

enum { MAX_THREADS = 64, CHUNK_BYTES = 1 << 22 };

typedef struct options {
    shape shape;
    const mix *mix;
    uint64_t seed;
    int64_t split_max; /* tensors in a part; 0: one file */
    int threads;
    bool shuffle, list, vocab_only, header_only;
    const char *out;
} options;

/* ---- options --------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t at;
} numbers[] = {
    {"layers", offsetof(shape, n_layers)},
    {"d-model", offsetof(shape, d_model)},
    {"heads", offsetof(shape, n_heads)},
    {"kv-heads", offsetof(shape, n_kv_heads)},
    {"head-dim", offsetof(shape, head_dim)},
    {"d-ff", offsetof(shape, d_ff)},
    {"vocab", offsetof(shape, vocab)},
    {"context", offsetof(shape, context)},
    {"rope-dim", offsetof(shape, rope_dim)},
    {"window", offsetof(shape, window)},
    {"window-period", offsetof(shape, window_period)},
    {"experts", offsetof(shape, n_experts)},
    {"top-k", offsetof(shape, top_k)},
    {"d-ff-expert", offsetof(shape, d_ff_expert)},
    {"d-ff-shared", offsetof(shape, d_ff_shared)},
    {"shared-experts", offsetof(shape, n_shared)},
    {"dense-layers", offsetof(shape, n_dense)},
    {"expert-groups", offsetof(shape, n_groups)},
    {"expert-groups-used", offsetof(shape, n_groups_used)},
    {"qk-nope", offsetof(shape, qk_nope)},
    {"qk-rope", offsetof(shape, qk_rope)},
    {"v-dim", offsetof(shape, v_dim)},
    {"q-lora", offsetof(shape, q_lora)},
    {"kv-lora", offsetof(shape, kv_lora)},
    {"indexer-heads", offsetof(shape, idx_heads)},
    {"indexer-dim", offsetof(shape, idx_dim)},
    {"indexer-top-k", offsetof(shape, idx_top_k)},
    {"mtp-layers", offsetof(shape, n_mtp)},
};
enum { N_NUMBERS = sizeof numbers / sizeof *numbers };

enum {
    OPT_ARCH = 1000,
    OPT_PRESET,
    OPT_MIX,
    OPT_SEED,
    OPT_SPLIT,
    OPT_SHUFFLE,
    OPT_TOK,
    OPT_TIED,
    OPT_UNTIED,
    OPT_LEGACY_KV_B,
    OPT_THREADS,
    OPT_LIST,
    OPT_VOCAB_ONLY,
    OPT_HEADER_ONLY
};

static const struct option others[] = {
    {"arch", required_argument, NULL, OPT_ARCH},
    {"preset", required_argument, NULL, OPT_PRESET},
    {"mix", required_argument, NULL, OPT_MIX},
    {"seed", required_argument, NULL, OPT_SEED},
    {"split-max-tensors", required_argument, NULL, OPT_SPLIT},
    {"shuffle", no_argument, NULL, OPT_SHUFFLE},
    {"tok", required_argument, NULL, OPT_TOK},
    {"tied", no_argument, NULL, OPT_TIED},
    {"untied", no_argument, NULL, OPT_UNTIED},
    {"legacy-kv-b", no_argument, NULL, OPT_LEGACY_KV_B},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"list", no_argument, NULL, OPT_LIST},
    {"vocab-only", no_argument, NULL, OPT_VOCAB_ONLY},
    {"header-only", no_argument, NULL, OPT_HEADER_ONLY},
    {"help", no_argument, NULL, 'h'},
};
enum { N_OTHERS = sizeof others / sizeof *others };

static void usage(FILE *f)
{
    fputs("mkmodel [--preset NAME | --arch ARCH] [options] -o OUT.gguf\n"
          "Makes a synthetic model; the same command makes the same bytes.\n\n"
          "  --mix MIX              quantisation, default q4_k_m\n"
          "  --seed N               default 1\n"
          "  --tok NAME             another tokenizer than the preset's\n"
          "  --tied, --untied       the output matrix is the embedding, or is not\n"
          "  --legacy-kv-b          MLA: attn_kv_b, as old files have it\n"
          "  --shuffle              the same tensors in another order\n"
          "  --split-max-tensors N  several files OUT-00001-of-0000M.gguf\n"
          "  --threads N            default 2\n"
          "  --vocab-only           no tensors\n"
          "  --header-only          tensors without their data, for --load-format dummy\n"
          "  --list                 print the tensors, write nothing\n"
          "numbers of the shape, each overriding the preset's:\n ",
          f);
    for (int i = 0; i < N_NUMBERS; i++)
        fprintf(f, " --%s%s", numbers[i].name, i % 8 == 7 ? "\n " : "");
    fputs("\npresets (--arch alone takes the architecture's tiny one):\n ", f);
    for (int i = 0; i < n_presets; i++)
        fprintf(f, " %s%s", presets[i].name, i % 8 == 7 ? "\n " : "");
    fputs("\nmixes:\n ", f);
    for (int i = 0; mix_name(i); i++)
        fprintf(f, " %s%s", mix_name(i), i % 12 == 11 ? "\n " : "");
    fputs("\ntokenizers:\n ", f);
    for (int i = 0; tok_name(i); i++)
        fprintf(f, " %s", tok_name(i));
    fputs("\n", f);
}

static int64_t number(const char *name, const char *s)
{
    char *end;
    errno = 0;
    long long v = strtoll(s, &end, 10);
    if (errno || end == s || *end || v < 0) {
        fprintf(stderr, "mkmodel: --%s %s: a number is needed\n", name, s);
        exit(64);
    }
    return v;
}

static _Noreturn void bad(const char *what, const char *value)
{
    fprintf(stderr, "mkmodel: %s%s%s; see mkmodel --help\n", what, value ? ": " : "",
            value ? value : "");
    exit(64);
}

/* The preset must be known before numbers change it, so the options are read twice. */
static void parse_options(int argc, char **argv, options *o)
{
    struct option all[N_NUMBERS + N_OTHERS + 1] = {0};
    const char *arch = NULL, *preset = NULL;
    for (int i = 0; i < N_NUMBERS; i++)
        all[i] = (struct option){numbers[i].name, required_argument, NULL, 2000 + i};
    memcpy(all + N_NUMBERS, others, sizeof others);
    for (int c; (c = getopt_long(argc, argv, "o:h", all, NULL)) != -1;) {
        if (c == OPT_ARCH) arch = optarg;
        if (c == OPT_PRESET) preset = optarg;
        if (c == 'h') {
            usage(stdout);
            exit(0);
        }
        if (c == '?') exit(64);
    }
    if (optind != argc) bad("unexpected argument", argv[optind]);
    if (!preset) preset = "tiny";
    const shape *s = find_preset(preset, arch ? arch : "llama");
    if (!s) bad("no such preset or architecture", arch && !strcmp(preset, "tiny") ? arch : preset);
    if (arch && strcmp(arch, s->arch) != 0) bad("the preset has another architecture", s->arch);
    o->shape = *s;
    optind = 1;
    for (int c; (c = getopt_long(argc, argv, "o:h", all, NULL)) != -1;) {
        switch (c) {
        case 'o':
            o->out = optarg;
            break;
        case OPT_MIX:
            o->mix = find_mix(optarg);
            if (!o->mix) bad("no such mix", optarg);
            break;
        case OPT_SEED:
            o->seed = (uint64_t)number("seed", optarg);
            break;
        case OPT_SPLIT:
            o->split_max = number("split-max-tensors", optarg);
            break;
        case OPT_SHUFFLE:
            o->shuffle = true;
            break;
        case OPT_TOK:
            o->shape.tok = optarg;
            break;
        case OPT_TIED:
            o->shape.tied = true;
            break;
        case OPT_UNTIED:
            o->shape.tied = false;
            break;
        case OPT_LEGACY_KV_B:
            o->shape.legacy_kv_b = true;
            break;
        case OPT_THREADS:
            o->threads = (int)number("threads", optarg);
            break;
        case OPT_LIST:
            o->list = true;
            break;
        case OPT_VOCAB_ONLY:
            o->vocab_only = true;
            break;
        case OPT_HEADER_ONLY:
            o->header_only = true;
            break;
        default:
            if (c < 2000) break;
            int64_t v = number(numbers[c - 2000].name, optarg);
            if (v > 1 << 28) bad("the number is too large", optarg);
            *(int *)((char *)&o->shape + numbers[c - 2000].at) = (int)v;
        }
    }
    if (o->threads < 1 || o->threads > MAX_THREADS) bad("--threads is from 1 to 64", NULL);
    if (!o->out && !o->list) bad("-o FILE is needed", NULL);
}

/* ---- tensor data ----------------------------------------------------------------------------- */

typedef struct job { /* a run of blocks for one thread */
    const tensor *t;
    uint64_t seed;
    int64_t first, n;
    uint8_t *out;
} job;

static void *work(void *arg)
{
    const job *j = arg;
    fill_blocks(j->t->type, j->t->size, j->seed, j->first, j->n, j->out);
    return NULL;
}

typedef struct maker {
    const options *o;
    const tensor *t; /* of the file being written */
    uint8_t *buf;    /* threads * CHUNK_BYTES */
} maker;

/* Norms: around their mean, all positive. Ramps: from 1 to size. */
static bg_status make_vector(const tensor *t, uint64_t seed, bg_gguf_emit *emit, void *sink,
                             bg_error *err)
{
    bg_status st = BG_OK;
    for (int64_t i = 0; i < t->ne[0] && !st; i++) {
        float r;
        if (t->fill == FILL_RAMP) {
            r = t->ne[0] > 1 ? 1 + (t->size - 1) * (float)i / (float)(t->ne[0] - 1) : 1;
        } else {
            fill_blocks(BG_F32, 0.2f, seed, i, 1, (uint8_t *)&r);
            r = t->size * (1 + r);
        }
        st = emit(sink, &r, sizeof r, err);
    }
    return st;
}

static bg_status produce(void *ctx, int64_t i, size_t bytes, bg_gguf_emit *emit, void *sink,
                         bg_error *err)
{
    const maker *m = ctx;
    const tensor *t = &m->t[i];
    const uint64_t seed = bg_hash64(t->name, strlen(t->name), m->o->seed);
    if (t->fill != FILL_WEIGHT) return make_vector(t, seed, emit, sink, err);
    const int64_t block = bg_qtype_get(t->type)->block_bytes, n = (int64_t)bytes / block;
    const int64_t chunk = CHUNK_BYTES / block / 8 * 8;
    bg_status st = BG_OK;
    for (int64_t at = 0; at < n && !st;) {
        job jobs[MAX_THREADS];
        pthread_t ids[MAX_THREADS];
        bool started[MAX_THREADS] = {0};
        int n_jobs = 0;
        const int64_t first = at;
        for (; n_jobs < m->o->threads && at < n; n_jobs++) {
            int64_t len = n - at < chunk ? n - at : chunk;
            jobs[n_jobs] = (job){t, seed, at, len, m->buf + (at - first) * block};
            at += len;
        }
        for (int k = 1; k < n_jobs; k++)
            started[k] = pthread_create(&ids[k], NULL, work, &jobs[k]) == 0;
        for (int k = 0; k < n_jobs; k++)
            if (!started[k]) work(&jobs[k]);
        for (int k = 1; k < n_jobs; k++)
            if (started[k]) pthread_join(ids[k], NULL);
        st = emit(sink, m->buf, (size_t)((at - first) * block), err);
    }
    return st;
}

/* ---- files ----------------------------------------------------------------------------------- */

static void part_path(char *path, size_t cap, const options *o, int part, int n_parts)
{
    int len = (int)strlen(o->out);
    if (n_parts == 1) {
        snprintf(path, cap, "%s", o->out);
        return;
    }
    if (len > 5 && strcmp(o->out + len - 5, ".gguf") == 0) len -= 5;
    snprintf(path, cap, "%.*s-%05d-of-%05d.gguf", len, o->out, part + 1, n_parts);
}

static bg_status write_part(const options *o, maker *m, const tensor_list *list, int part,
                            int n_parts, bg_error *err)
{
    char path[4096];
    const int64_t per = n_parts == 1 ? list->n : o->split_max;
    const int64_t first = part * per, n = list->n - first < per ? list->n - first : per;
    part_path(path, sizeof path, o, part, n_parts);
    bg_status st = BG_OK;
    bg_gguf_writer *w = bg_gguf_writer_new(0);
    if (!w) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    if (part == 0) {
        put_metadata(w, &o->shape, o->mix);
        const char *wrong = put_vocab(w, o->shape.tok, o->shape.vocab);
        if (wrong)
            st = bg_fail(err, BG_ARG, "--tok %s --vocab %d: %s", o->shape.tok, o->shape.vocab,
                         wrong);
    }
    if (n_parts > 1) {
        bg_gguf_put_u16(w, "split.no", (uint16_t)part);
        bg_gguf_put_u16(w, "split.count", (uint16_t)n_parts);
        bg_gguf_put_i32(w, "split.tensors.count", (int32_t)list->n);
    }
    for (int64_t i = 0; i < n; i++) {
        const tensor *t = &list->t[first + i];
        bg_gguf_put_tensor(w, t->name, t->type, t->n_dims, t->ne);
    }
    m->t = list->t + first;
    if (!st) st = bg_gguf_write(w, path, o->header_only ? NULL : produce, m, err);
    bg_gguf_writer_free(w);
    return st;
}

static void shuffle(tensor_list *list, uint64_t seed)
{
    for (int64_t i = list->n - 1; i > 0; i--) {
        int64_t k = (int64_t)(bg_mix64(seed ^ (uint64_t)i) % (uint64_t)(i + 1));
        tensor t = list->t[i];
        list->t[i] = list->t[k];
        list->t[k] = t;
    }
}

static void print_list(const options *o, const tensor_list *list)
{
    double weights = 0, bytes = 0;
    for (int64_t i = 0; i < list->n; i++) {
        const tensor *t = &list->t[i];
        const int64_t n = t->ne[0] * t->ne[1] * t->ne[2];
        const size_t size = bg_qtype_row_bytes(t->type, n);
        if (o->list)
            printf("%-40s %-8s %7lld x %lld x %lld\n", t->name, bg_qtype_get(t->type)->name,
                   (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2]);
        weights += (double)n;
        bytes += (double)size;
    }
    if (list->n)
        printf("%s: %lld tensors, %.3f billion weights, %.3f GB, %.2f bits a weight\n",
               o->shape.name, (long long)list->n, weights / 1e9, bytes / 1e9, 8 * bytes / weights);
}

int main(int argc, char **argv)
{
    options o = {.mix = find_mix("q4_k_m"), .seed = 1, .threads = 2};
    bg_error err = {0};
    tensor_list list = {0};
    maker m = {.o = &o};
    parse_options(argc, argv, &o);
    const char *wrong = check_shape(&o.shape);
    if (wrong) bad(wrong, NULL);
    if (!o.vocab_only) list_tensors(&o.shape, o.mix, &list);
    if (o.shuffle) shuffle(&list, o.seed);
    print_list(&o, &list);
    const int64_t n_parts =
        o.split_max && list.n > o.split_max ? (list.n + o.split_max - 1) / o.split_max : 1;
    if (n_parts > 65535) bad("more than 65535 parts", NULL);
    m.buf = malloc((size_t)o.threads * CHUNK_BYTES);
    if (list.failed || !m.buf) bg_fail(&err, BG_NOMEM, "out of memory");
    for (int i = 0; i < n_parts && !err.status && !o.list; i++)
        write_part(&o, &m, &list, i, (int)n_parts, &err);
    free(m.buf);
    free(list.t);
    if (err.status) fprintf(stderr, "mkmodel: %s\n", err.text);
    return err.status ? 1 : 0;
}
