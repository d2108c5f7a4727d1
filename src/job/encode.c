/* A model's text side, and requests as token ids. */
#include "job/job.h"

#include <libgen.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/io.h"
#include "base/utf8.h"

enum { MAX_TEMPLATE = 4 << 20 };

static bg_status token_text(const bg_vocab *v, int32_t id, char **out, bg_error *err)
{
    bg_str s = id >= 0 ? bg_vocab_text(v, id) : (bg_str){"", 0};
    *out = strndup(s.p, s.n);
    return *out ? BG_OK : bg_fail(err, BG_NOMEM, "out of memory");
}

static bg_status own_template(bg_text_model *m, const char *key, bg_template **t, bg_error *err)
{
    bg_str src;
    bg_status st = bg_gguf_get_str(m->gguf, key, &src, err);
    if (!st && src.n) st = bg_template_new(t, src.p, src.n, key, err);
    return st;
}

static bg_status open_template(bg_text_model *m, const bg_job *job, bg_error *err)
{
    if (job->chat_template) {
        char *src;
        size_t n;
        bg_status st = bg_read_file(job->chat_template, MAX_TEMPLATE, &src, &n, err);
        if (!st) st = bg_template_new(&m->chat, src, n, job->chat_template, err);
        free(src);
        return st;
    }
    bg_status st = own_template(m, "tokenizer.chat_template", &m->chat, err);
    if (!st) st = own_template(m, "tokenizer.chat_template.tool_use", &m->chat_tools, err);
    if (st) return bg_wrap(err, "%s", job->model);
    if (!m->chat) { /* a model that has only the other one */
        m->chat = m->chat_tools;
        m->chat_tools = NULL;
    }
    return BG_OK;
}

/* "SmolLM2-135M-Instruct.Q4_1" of ".../SmolLM2-135M-Instruct.Q4_1.gguf", without a split's number.
 */
static bg_status model_name(bg_text_model *m, const bg_job *job, bg_error *err)
{
    if (job->served_name) {
        m->name = strdup(job->served_name);
    } else {
        char *copy = strdup(bg_gguf_part_path(m->gguf, 0));
        if (copy) {
            char *base = basename(copy);
            size_t n = strlen(base);
            if (n > 5 && strcmp(base + n - 5, ".gguf") == 0) base[n - 5] = 0;
            char *split = strstr(base, "-00001-of-");
            if (split) *split = 0;
            m->name = strdup(base);
        }
        free(copy);
    }
    if (m->name) bg_utf8_mend(m->name); /* it goes into results */
    return m->name ? BG_OK : bg_fail(err, BG_NOMEM, "out of memory");
}

bg_status bg_text_model_open(bg_text_model *m, const bg_job *job, bg_error *err)
{
    *m = (bg_text_model){0};
    if (!job->model)
        return bg_fail(err, BG_ARG,
                       "no model: give -m FILE, set BATCHGEN_MODEL, or name it in the job file");
    const bool dummy = job->load_format == BG_LOAD_DUMMY;
    bg_status st = (dummy ? bg_gguf_open_header : bg_gguf_open)(&m->gguf, job->model, err);
    if (!st) st = bg_desc_read(&m->desc, m->gguf, err);
    if (!st) st = bg_vocab_new(&m->vocab, m->gguf, err);
    if (!st && bg_vocab_size(m->vocab) > m->desc.vocab_size)
        st = bg_fail(err, BG_FORMAT, "%s: %d tokens in the vocabulary, but %d rows in token_embd",
                     job->model, bg_vocab_size(m->vocab), m->desc.vocab_size);
    if (!st) st = open_template(m, job, err);
    if (!st) st = token_text(m->vocab, bg_vocab_bos(m->vocab), &m->bos, err);
    if (!st) st = token_text(m->vocab, bg_vocab_eos(m->vocab), &m->eos, err);
    if (!st) st = model_name(m, job, err);
    if (!st) bg_hex64(bg_gguf_fingerprint(m->gguf), m->fingerprint);
    if (st) bg_text_model_close(m);
    return st;
}

void bg_text_model_close(bg_text_model *m)
{
    bg_template_free(m->chat);
    bg_template_free(m->chat_tools);
    bg_vocab_free(m->vocab);
    bg_gguf_close(m->gguf);
    free(m->bos);
    free(m->eos);
    free(m->name);
    *m = (bg_text_model){0};
}

int bg_job_n_prompts(const bg_request *r)
{
    return r->api == BG_API_CHAT ? 1 : r->n_prompts;
}

/* A field's full name: batch lines have theirs in the body. */
static const char *field(const bg_request *r, const char *name, const char *in_body)
{
    return r->openai ? in_body : name;
}

static const char *prompt_field(const bg_request *r)
{
    return r->api == BG_API_CHAT ? field(r, "messages", "body.messages")
                                 : field(r, "prompt", "body.prompt");
}

static bg_status encode_chat(const bg_text_model *m, const bg_job *job, bg_request *r,
                             int64_t wall_s, bg_ids *ids, bg_error *err)
{
    if (!m->chat) {
        bg_request_reject(r, BG_CODE_TEMPLATE, prompt_field(r),
                          "the model has no chat template; give --chat-template FILE, or a prompt "
                          "instead of messages");
        return BG_OK;
    }
    const bg_chat_input in = {.messages = r->messages,
                              .tools = r->tools,
                              .kwargs = r->template_kwargs,
                              .bos = m->bos,
                              .eos = m->eos,
                              .add_generation_prompt = r->add_generation_prompt,
                              .wall_s = wall_s};
    const bg_chat_limits limits = {.steps = job->template_steps};
    bg_rendered out = {0};
    bg_error e = {0};
    bg_status st =
        bg_chat_render(r->tools && m->chat_tools ? m->chat_tools : m->chat, &in, &limits, &out, &e);
    if (st == BG_NOMEM)
        bg_fail(err, st, "%s", e.text);
    else if (st)
        bg_request_reject(r, BG_CODE_TEMPLATE, prompt_field(r), "%s", e.text);
    else
        st = bg_tokenize(m->vocab, out.segs, out.n_segs, true, ids, err);
    bg_rendered_release(&out);
    return st == BG_NOMEM ? st : BG_OK;
}

static bg_status encode_prompt(const bg_text_model *m, bg_request *r, const bg_prompt *p,
                               bg_ids *ids, bg_error *err)
{
    if (p->text) { /* a raw prompt: who writes a control token there means it */
        const bg_segment seg = {p->text, p->n_text, true};
        return bg_tokenize(m->vocab, &seg, 1, true, ids, err);
    }
    for (size_t i = 0; i < p->n_ids; i++) {
        if (p->ids[i] < 0 || p->ids[i] >= m->desc.vocab_size) {
            bg_request_reject(r, BG_CODE_TOKEN, prompt_field(r),
                              "token id %d at place %zu; the model's ids are 0 to %d", p->ids[i], i,
                              m->desc.vocab_size - 1);
            return BG_OK;
        }
        if (!bg_ids_add(ids, p->ids[i])) break;
    }
    return ids->failed ? bg_fail(err, BG_NOMEM, "out of memory for a prompt") : BG_OK;
}

static void check_ids(const bg_text_model *m, const bg_job *job, bg_request *r, const bg_ids *ids)
{
    int64_t limit = m->max_model_len     ? m->max_model_len
                    : job->max_model_len ? job->max_model_len
                                         : m->desc.n_ctx_train;
    if (r->error_code) return;
    if (!ids->n)
        bg_request_reject(r, BG_CODE_EMPTY, prompt_field(r), "the prompt has no tokens");
    else if ((int64_t)ids->n >= limit)
        bg_request_reject(
            r, BG_CODE_TOO_LONG, prompt_field(r),
            "the prompt has %zu tokens and the context holds %lld: at most %lld leave "
            "room for an answer; see --max-model-len",
            ids->n, (long long)limit, (long long)limit - 1);
    else if (job->max_prompt_tokens && (int64_t)ids->n > job->max_prompt_tokens)
        bg_request_reject(r, BG_CODE_TOO_LONG, prompt_field(r),
                          "the prompt has %zu tokens and the job allows %lld; see "
                          "--max-prompt-tokens",
                          ids->n, (long long)job->max_prompt_tokens);
}

static void check_settings(const bg_text_model *m, bg_request *r)
{
    for (int i = 0; !r->error_code && i < r->n_bias; i++)
        if (r->bias[i].token < 0 || r->bias[i].token >= m->desc.vocab_size)
            bg_request_reject(r, BG_CODE_TOKEN, field(r, "logit_bias", "body.logit_bias"),
                              "token id %d; the model's ids are 0 to %d", r->bias[i].token,
                              m->desc.vocab_size - 1);
    for (int i = 0; !r->error_code && i < r->n_stop_ids; i++)
        if (r->stop_ids[i] < 0 || r->stop_ids[i] >= m->desc.vocab_size)
            bg_request_reject(r, BG_CODE_TOKEN, field(r, "stop_token_ids", "body.stop_token_ids"),
                              "token id %d; the model's ids are 0 to %d", r->stop_ids[i],
                              m->desc.vocab_size - 1);
}

bg_status bg_job_encode(const bg_text_model *m, const bg_job *job, bg_request *r, int64_t wall_s,
                        bg_ids **ids, int *n_prompts, bg_error *err)
{
    *ids = NULL;
    *n_prompts = 0;
    check_settings(m, r);
    if (r->error_code) return BG_OK;
    int n = bg_job_n_prompts(r);
    bg_ids *list = calloc((size_t)n, sizeof *list);
    if (!list) return bg_fail(err, BG_NOMEM, "out of memory for a prompt");
    bg_status st = BG_OK;
    for (int i = 0; !st && !r->error_code && i < n; i++) {
        st = r->api == BG_API_CHAT ? encode_chat(m, job, r, wall_s, &list[i], err)
                                   : encode_prompt(m, r, &r->prompts[i], &list[i], err);
        if (!st) check_ids(m, job, r, &list[i]);
    }
    *ids = list;
    *n_prompts = n;
    return st;
}
