/* What may resume what: a flat object; two jobs with equal objects give equal results. */
#include "job/job.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/hash.h"
#include "base/io.h"
#include "base/json.h"

static void set(json_t *o, const char *key, json_t *v)
{
    json_object_set_new(o, key, v); /* a NULL v fails, and the count below tells */
}

static json_t *list_text(const bg_strings *s)
{
    json_t *a = json_array();
    bool ok = true;
    for (int i = 0; i < s->n; i++)
        ok = json_array_append_new(a, json_string(s->v[i])) == 0 && ok;
    char *text = ok ? bg_json_text(a, JSON_COMPACT) : NULL;
    json_t *out = text ? json_string(text) : NULL;
    free(text);
    json_decref(a);
    return out;
}

/* Size of each regular input file, in order: a grown or replaced file is another input. */
static json_t *input_sizes(const bg_job *job)
{
    bg_buf b = {0};
    for (int i = 0; i < job->inputs.n; i++) {
        struct stat sb;
        bool known = strcmp(job->inputs.v[i], "-") != 0 && stat(job->inputs.v[i], &sb) == 0 &&
                     S_ISREG(sb.st_mode);
        if (known)
            bg_buf_printf(&b, "%s%lld", i ? "+" : "", (long long)sb.st_size);
        else
            bg_buf_printf(&b, "%sstream", i ? "+" : "");
    }
    json_t *out = b.failed || !b.data ? NULL : json_string(b.data);
    bg_buf_release(&b);
    return out;
}

static json_t *template_hash(const bg_job *job, bg_error *err)
{
    char *src, hex[17];
    size_t n;
    if (bg_read_file(job->chat_template, 4 << 20, &src, &n, err)) return NULL;
    bg_hex64(bg_hash64(src, n, 0), hex);
    free(src);
    return json_string(hex);
}

static json_t *shard_name(const bg_job *job)
{
    char text[48] = "";
    if (job->shard_count)
        snprintf(text, sizeof text, "%lld/%lld", (long long)job->shard_index + 1,
                 (long long)job->shard_count);
    return json_string(text);
}

/* What sums in another order is another backend: a GPU's tiled form differs from the plain one. The
 * number is to change whenever its order does (how K is cut in parts: tune_table.c; units of keys).
 */
static const char *backend_name(const bg_memory_plan *p)
{
    return !p->gpu ? "cpu" : p->tiled ? "cuda, tiles 1" : "cuda";
}

json_t *bg_job_identity(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p,
                        bg_error *err)
{
    static const char *const cache_names[] = {"f16", "bf16", "f32", "q8"};
    json_t *o = json_object();
    set(o, "format", json_integer(1));
    set(o, "input_bytes", input_sizes(job));
    set(o, "model", json_string(m->fingerprint));
    set(o, "served_model_name", json_string(m->name));
    set(o, "strict_model", json_boolean(job->strict_model));
    set(o, "backend", json_string(backend_name(p)));
    set(o, "compute", json_string(job->compute == BG_COMPUTE_F32 ? "f32" : "native"));
    set(o, "kv_cache_dtype", json_string(cache_names[p->cache_type]));
    set(o, "tensor_parallel_size", json_integer(p->tp));
    set(o, "max_model_len", json_integer(p->max_model_len));
    set(o, "max_line", json_integer(job->max_line));
    set(o, "max_nesting", json_integer(job->max_nesting));
    set(o, "max_prompt_tokens", json_integer(job->max_prompt_tokens));
    set(o, "max_n", json_integer(job->max_n));
    set(o, "max_result", json_integer(job->max_result));
    set(o, "template_steps", json_integer(job->template_steps));
    set(o, "shard", shard_name(job));
    set(o, "chat_template",
        job->chat_template ? template_hash(job, err) : json_string("model's own"));
    set(o, "seed", json_integer(job->seed));
    set(o, "temperature", json_real(job->temperature));
    set(o, "top_k", json_integer(job->top_k));
    set(o, "top_p", json_real(job->top_p));
    set(o, "min_p", json_real(job->min_p));
    set(o, "repetition_penalty", json_real(job->repetition_penalty));
    set(o, "presence_penalty", json_real(job->presence_penalty));
    set(o, "frequency_penalty", json_real(job->frequency_penalty));
    set(o, "max_tokens", json_integer(job->max_tokens));
    set(o, "min_tokens", json_integer(job->min_tokens));
    set(o, "ignore_eos", json_boolean(job->ignore_eos));
    set(o, "stop", list_text(&job->stop));
    const bool dummy = job->load_format == BG_LOAD_DUMMY;
    if (dummy) set(o, "load_format", json_string("dummy"));
    if (job->fast_math) set(o, "fast_math", json_true());
    if (json_object_size(o) == (size_t)30 + dummy + job->fast_math) return o;
    bg_fail(err, BG_NOMEM, "out of memory for the job's identity");
    json_decref(o);
    return NULL;
}
