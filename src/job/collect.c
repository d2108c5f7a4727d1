#include "job/collect.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "base/hash.h"
#include "base/queue.h"
#include "base/rng.h"

enum { QUEUE = 8192 };
static const long long TICK_NS = 500000000;

typedef struct record record;

typedef struct held { /* an announced record whose result is not written yet */
    bg_done what;
    char *line; /* NULL: not complete */
    size_t n;
    struct held *next;
} held;

typedef struct choice { /* one sequence of a record */
    record *rec;
    int index;
    bool open;   /* the engine still has it */
    bool closed; /* its text is complete */
    bg_finish finish;
    int stop_index; /* stop string that ended it, or -1 */
    int32_t stop_id;
    bg_detok *detok;
    bg_buf text;
    bg_ids ids;      /* output tokens so far */
    bg_probs *infos; /* one a token, when logprobs were asked for */
    size_t cap_infos;
} choice;

struct record {
    bg_feed_item *item;
    choice *choices;
    bg_seq_spec *specs;
    bg_logit_bias *bias;
    int32_t *stop_ids;
    int n_choices, n_open, n_closed;
    bool written, failed;
    char *refused;       /* a submit's message */
    held *place;         /* its turn, when results are written in order */
    record *prev, *next; /* of all records in flight */
};

typedef enum message_kind { MSG_RECORD, MSG_EVENTS, MSG_REFUSED } message_kind;

typedef struct message {
    message_kind kind;
    record *rec; /* RECORD */
    choice *ch;  /* REFUSED */
    char *text;  /* REFUSED */
    int n;       /* EVENTS */
    bg_token_event events[];
} message;

enum { MAX_CODES = 32 };

typedef struct code_count {
    const char *code;
    int64_t n;
} code_count;

struct bg_collect {
    bg_collect_config c;
    held *held_first, *held_last; /* in record order, when results are written in order */
    code_count codes[MAX_CODES];
    int n_codes;
    bool too_many;
    bg_replicas *engine;
    bg_queue *queue;
    pthread_t thread;
    bool started, joined;
    record *first;
    bool all_done; /* said before the queue was closed */
    bool broken;
    atomic_bool lost; /* a message could not be made: from there on nothing may be believed */
    bg_error err;
    bg_buf line;
    bg_partial *partials; /* what the last commit was told */
    int cap_partials;
    bg_collect_counts counts;
};

/* ---- records ------------------------------------------------------------------------------------
 */

static void record_free(record *r)
{
    if (!r) return;
    for (int i = 0; r->choices && i < r->n_choices; i++) {
        bg_detok_free(r->choices[i].detok);
        bg_buf_release(&r->choices[i].text);
        bg_ids_release(&r->choices[i].ids);
        free(r->choices[i].infos);
    }
    bg_feed_item_free(r->item);
    free(r->choices);
    free(r->specs);
    free(r->bias);
    free(r->stop_ids);
    free(r->refused);
    free(r);
}

/* A record's stream of random numbers hangs on its id (or its number, when it has none), so that it
 * does not change with the order of the input. */
static uint64_t choice_seed(const bg_collect *c, const bg_request *q, int prompt, int k)
{
    uint64_t base;
    if (q->gen.has_seed)
        base = bg_mix64(q->gen.seed);
    else if (q->id)
        base = bg_hash64(q->id, strlen(q->id), (uint64_t)c->c.job->seed);
    else
        base = bg_mix64((uint64_t)c->c.job->seed ^ bg_mix64((uint64_t)q->record + 1));
    return bg_mix64(base + bg_mix64(((uint64_t)prompt << 32) + (uint64_t)k + 1));
}

static bool gather_ids(const bg_collect *c, record *r)
{
    const bg_request *q = &r->item->req;
    size_t n_eog;
    const int32_t *eog = bg_vocab_eog(c->c.model->vocab, &n_eog);
    r->stop_ids = malloc((n_eog + (size_t)q->n_stop_ids + 1) * sizeof *r->stop_ids);
    r->bias = malloc(((size_t)q->n_bias + 1) * sizeof *r->bias);
    if (!r->stop_ids || !r->bias) return false;
    /* The request's own ids come first: they end a sequence; all of them are banned before
     * min_tokens. */
    for (int i = 0; i < q->n_stop_ids; i++)
        r->stop_ids[i] = q->stop_ids[i];
    if (n_eog) memcpy(r->stop_ids + q->n_stop_ids, eog, n_eog * sizeof *eog);
    for (int i = 0; i < q->n_bias; i++)
        r->bias[i] = (bg_logit_bias){q->bias[i].token, q->bias[i].bias};
    return true;
}

static const bg_partial *find_partial(const bg_collect *c, int64_t rec, int choice_index)
{
    for (int i = 0; i < c->c.n_partials; i++)
        if (c->c.partials[i].record == rec && c->c.partials[i].choice == choice_index)
            return &c->c.partials[i];
    return NULL;
}

static void fill_spec(const bg_collect *c, record *r, int i)
{
    const bg_request *q = &r->item->req;
    const bg_gen *g = &q->gen;
    int prompt = i / g->n;
    const bg_ids *ids = &r->item->ids[prompt];
    int room = c->c.model->max_model_len - (int)ids->n;
    size_t n_eog;
    bg_vocab_eog(c->c.model->vocab, &n_eog);
    bg_seq_spec *s = &r->specs[i];
    *s = (bg_seq_spec){.user = &r->choices[i],
                       .order = q->record,
                       .prompt = ids->v,
                       .n_prompt = (int)ids->n,
                       .max_tokens = g->max_tokens && g->max_tokens < room ? g->max_tokens : room,
                       .ignore_eos = g->ignore_eos};
    s->sampling = (bg_sampling){.temperature = (float)g->temperature,
                                .top_k = g->top_k,
                                .top_p = (float)g->top_p,
                                .min_p = (float)g->min_p,
                                .repetition_penalty = (float)g->repetition_penalty,
                                .presence_penalty = (float)g->presence_penalty,
                                .frequency_penalty = (float)g->frequency_penalty,
                                .n_logprobs = g->logprobs,
                                .min_tokens = g->min_tokens,
                                .seed = choice_seed(c, q, prompt, i % g->n),
                                .n_bias = q->n_bias,
                                .bias = r->bias,
                                .n_stop_ids = q->n_stop_ids + (int)n_eog,
                                .stop_ids = r->stop_ids};
    const bg_partial *p = find_partial(c, q->record, i);
    if (p && p->n_tokens < s->max_tokens && !p->probs == (g->logprobs < 0)) {
        s->regained = p->tokens;
        s->n_regained = p->n_tokens;
    }
}

/* Room for the info of each token, one more than there are. */
static bool room_for_infos(choice *ch, size_t n)
{
    if (n <= ch->cap_infos) return true;
    size_t cap = ch->cap_infos * 2 > n ? ch->cap_infos * 2 : n + 64;
    bg_probs *p = realloc(ch->infos, cap * sizeof *p);
    if (!p) return false;
    ch->infos = p;
    ch->cap_infos = cap;
    return true;
}

/* The infos of tokens that an earlier run had. */
static bool regain_infos(const bg_collect *c, choice *ch, int n)
{
    const bg_partial *p = n ? find_partial(c, ch->rec->item->req.record, ch->index) : NULL;
    if (!p || !p->probs) return true;
    if (!room_for_infos(ch, (size_t)n) || !ch->infos) return false;
    memcpy(ch->infos, p->probs, (size_t)n * sizeof *ch->infos);
    return true;
}

static bool init_choices(const bg_collect *c, record *r)
{
    const bg_request *q = &r->item->req;
    r->n_choices = r->item->n_prompts * q->gen.n;
    r->choices = calloc((size_t)r->n_choices, sizeof *r->choices);
    r->specs = calloc((size_t)r->n_choices, sizeof *r->specs);
    if (!r->choices || !r->specs || !gather_ids(c, r)) return false;
    r->n_open = r->n_choices;
    for (int i = 0; i < r->n_choices; i++) {
        choice *ch = &r->choices[i];
        *ch = (choice){.rec = r, .index = i, .open = true, .stop_index = -1, .stop_id = -1};
        ch->detok = bg_detok_new(c->c.model->vocab, (const char *const *)q->stops,
                                 (size_t)q->n_stops, q->gen.include_stop, q->gen.show_special);
        if (!ch->detok) return false;
        fill_spec(c, r, i);
        for (int k = 0; k < r->specs[i].n_regained; k++) {
            bg_ids_add(&ch->ids, r->specs[i].regained[k]);
            bg_detok_add(ch->detok, r->specs[i].regained[k], &ch->text);
        }
        if (ch->ids.failed || ch->text.failed || !regain_infos(c, ch, r->specs[i].n_regained))
            return false;
    }
    return true;
}

static bool send(bg_collect *c, message *m)
{
    if (bg_queue_push(c->queue, m)) return true;
    if (m->kind == MSG_RECORD) record_free(m->rec);
    free(m->text);
    free(m);
    return false;
}

bg_status bg_collect_announce(bg_collect *c, bg_feed_item *item, bg_seq_spec **specs, int *n_specs,
                              bg_error *err)
{
    *specs = NULL;
    *n_specs = 0;
    record *r = calloc(1, sizeof *r);
    message *m = calloc(1, sizeof *m);
    bool ok = r && m;
    if (r) r->item = item;
    if (ok && !item->done && !item->req.error_code) ok = init_choices(c, r);
    if (!ok) {
        int64_t line = item->req.line;
        if (!r) bg_feed_item_free(item);
        record_free(r);
        free(m);
        return bg_fail(err, BG_NOMEM, "line %lld: out of memory", (long long)line);
    }
    /* Once sent, the record is the collector's; but it lives while sequences are open, and the
     * caller submits each before it can end. */
    *specs = r->specs;
    *n_specs = r->specs ? r->n_choices : 0;
    *m = (message){.kind = MSG_RECORD, .rec = r};
    if (!send(c, m)) {
        *specs = NULL;
        *n_specs = 0;
    }
    return BG_OK;
}

void bg_collect_events(void *p, const bg_token_event *events, int n)
{
    bg_collect *c = p;
    message *m = malloc(sizeof *m + (size_t)n * sizeof *events);
    if (!m) {
        atomic_store(&c->lost, true);
        return;
    }
    *m = (message){.kind = MSG_EVENTS, .n = n};
    memcpy(m->events, events, (size_t)n * sizeof *events);
    send(c, m);
}

void bg_collect_refused(bg_collect *c, const bg_seq_spec *spec, const char *text)
{
    message *m = calloc(1, sizeof *m);
    char *copy = m && text ? strdup(text) : NULL;
    if (!m || (text && !copy)) {
        free(m);
        atomic_store(&c->lost, true);
        return;
    }
    *m = (message){.kind = MSG_REFUSED, .ch = spec->user, .text = copy};
    send(c, m);
}

void bg_collect_end(bg_collect *c, bool all_done)
{
    c->all_done = all_done; /* the collector looks once it finds the queue closed */
    bg_queue_close(c->queue);
}

/* ---- results
 * ------------------------------------------------------------------------------------- */

static bg_top_text token_text(const bg_collect *c, int32_t id, float logprob)
{
    bg_str s = bg_token_bytes(c->c.model->vocab, id, true);
    return (bg_top_text){.text = s.p, .n = s.n, .token = id, .logprob = logprob};
}

/* Alternatives of all tokens of a choice in two arrays; false: out of memory. */
static bool token_infos(const bg_collect *c, const choice *ch, bg_token_info **infos,
                        bg_top_text **tops)
{
    size_t n = ch->ids.n, n_tops = 0;
    for (size_t i = 0; i < n; i++)
        n_tops += (size_t)ch->infos[i].n_top;
    *infos = calloc(n + 1, sizeof **infos);
    *tops = calloc(n_tops + 1, sizeof **tops);
    if (!*infos || !*tops) return false;
    bg_top_text *t = *tops;
    for (size_t i = 0; i < n; i++) {
        const bg_probs *s = &ch->infos[i];
        (*infos)[i] = (bg_token_info){
            .chosen = token_text(c, ch->ids.v[i], s->logprob), .top = t, .n_top = s->n_top};
        for (int k = 0; k < s->n_top; k++)
            *t++ = token_text(c, s->top[k].token, s->top[k].logprob);
    }
    return true;
}

static bool echo_prompt(const bg_collect *c, const record *r, const choice *ch, bg_buf *out)
{
    int p = ch->index / r->item->req.gen.n;
    if (r->item->req.api == BG_API_COMPLETION && r->item->req.prompts[p].text) {
        bg_buf_add(out, r->item->req.prompts[p].text, r->item->req.prompts[p].n_text);
    } else {
        bg_detok *d = bg_detok_new(c->c.model->vocab, NULL, 0, false, false);
        if (!d) return false;
        for (size_t i = 0; i < r->item->ids[p].n; i++)
            bg_detok_add(d, r->item->ids[p].v[i], out);
        bg_detok_finish(d, out);
        bg_detok_free(d);
    }
    bg_buf_add(out, ch->text.data ? ch->text.data : "", ch->text.len);
    return !out->failed;
}

static void fail(bg_collect *c, bg_status st, const bg_error *e)
{
    if (c->broken) return;
    c->broken = true;
    bg_fail_at(&c->err, st, 0, e->file, e->line, "%s", e->text);
    c->err.os = e->os;
    c->c.on_failure(c->c.ctx);
}

static void result_head(const bg_collect *c, const record *r, bg_result *out)
{
    const bg_request *q = &r->item->req;
    *out = (bg_result){.record = q->record,
                       .line = q->line,
                       .file = q->file,
                       .file_name = c->c.job->inputs.n > 1 ? c->c.job->inputs.v[q->file] : NULL,
                       .openai = q->openai,
                       .chat = q->api == BG_API_CHAT,
                       .id = q->id,
                       .model = c->c.model->name,
                       .fingerprint = c->c.model->fingerprint,
                       .error_code = q->error_code,
                       .error_message = q->error_message,
                       .error_param = q->error_param};
}

static bool fill_choices(bg_collect *c, record *r, bg_result *res, bg_choice *out,
                         bg_token_info **infos, bg_top_text **tops, bg_buf *echoes)
{
    const bg_request *q = &r->item->req;
    for (int i = 0; i < r->n_choices; i++) {
        choice *ch = &r->choices[i];
        out[i] = (bg_choice){.index = i,
                             .text = ch->text.data ? ch->text.data : "",
                             .n_text = ch->text.len,
                             .finish_reason = ch->finish == BG_FINISH_LENGTH ? "length" : "stop",
                             .stop_text = ch->stop_index >= 0 ? q->stops[ch->stop_index] : NULL,
                             .stop_id = ch->stop_id};
        if (ch->text.failed) return false;
        if (q->gen.echo) {
            if (!echo_prompt(c, r, ch, &echoes[i])) return false;
            out[i].text = echoes[i].data;
            out[i].n_text = echoes[i].len;
        }
        if (q->gen.logprobs >= 0) {
            if (!token_infos(c, ch, &infos[i], &tops[i])) return false;
            out[i].tokens = infos[i];
            out[i].n_tokens = (int)ch->ids.n;
        }
        res->completion_tokens += (int64_t)ch->ids.n;
    }
    res->choices = out;
    res->n_choices = r->n_choices;
    return true;
}

static void count_failure(bg_collect *c, const bg_result *r)
{
    int64_t n = atomic_fetch_add(&c->counts.failed, 1) + 1;
    int i = 0;
    while (i < c->n_codes && strcmp(c->codes[i].code, r->error_code) != 0)
        i++;
    if (i == c->n_codes && i < MAX_CODES) c->codes[c->n_codes++].code = r->error_code;
    if (i < MAX_CODES) c->codes[i].n++;
    if (c->c.max_failed >= 0 && n > c->c.max_failed && !c->too_many) {
        c->too_many = true;
        c->c.on_too_many(c->c.ctx);
    }
}

void bg_collect_failures(const bg_collect *c, char *out, size_t size)
{
    size_t at = 0;
    *out = 0;
    for (int i = 0; i < c->n_codes && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%s %lld", i ? ", " : "", c->codes[i].code,
                               (long long)c->codes[i].n);
}

/* The line of what is known so far, or of a record that cannot have one. False: out of memory. */
static bool make_line(bg_collect *c, record *r, bg_result *res)
{
    int n = r->n_choices;
    bg_choice *out = calloc((size_t)n + 1, sizeof *out);
    bg_token_info **infos = calloc((size_t)n + 1, sizeof *infos);
    bg_top_text **tops = calloc((size_t)n + 1, sizeof *tops);
    bg_buf *echoes = calloc((size_t)n + 1, sizeof *echoes);
    bool ok = out && infos && tops && echoes;
    if (ok && !res->error_code) ok = fill_choices(c, r, res, out, infos, tops, echoes);
    for (int i = 0; i < r->item->n_prompts && !res->error_code; i++)
        res->prompt_tokens += (int64_t)r->item->ids[i].n;
    bg_buf_clear(&c->line);
    if (ok) bg_result_line(res, &c->line);
    for (int i = 0; i < n; i++) {
        if (infos) free(infos[i]);
        if (tops) free(tops[i]);
        if (echoes) bg_buf_release(&echoes[i]);
    }
    free(out);
    free(infos);
    free(tops);
    free(echoes);
    return ok && !c->line.failed;
}

/* Writes what is complete at the head of the row. */
static bg_status flush_held(bg_collect *c, bg_error *err)
{
    bg_status st = BG_OK;
    for (held *h; !st && (h = c->held_first) && h->line;) {
        st = bg_writer_add(c->c.writer, &h->what, h->line, h->n, err);
        c->held_first = h->next;
        if (!h->next) c->held_last = NULL;
        free(h->line);
        free(h);
    }
    return st;
}

static bg_status put_line(bg_collect *c, record *r, const bg_done *what, bg_error *err)
{
    if (!r->place) return bg_writer_add(c->c.writer, what, c->line.data, c->line.len, err);
    r->place->line = malloc(c->line.len);
    if (!r->place->line)
        return bg_fail(err, BG_NOMEM, "line %lld: out of memory for the result",
                       (long long)r->item->req.line);
    memcpy(r->place->line, c->line.data, c->line.len);
    r->place->n = c->line.len;
    r->place->what = *what;
    return flush_held(c, err);
}

static void write_result(bg_collect *c, record *r)
{
    bg_error e = {0};
    bg_result res;
    result_head(c, r, &res);
    bool ok = make_line(c, r, &res);
    int64_t limit = c->c.job->max_result;
    if (ok && limit && (int64_t)c->line.len > limit) {
        bg_request_reject(&r->item->req, BG_CODE_RESULT_LONG, NULL,
                          "the result has %zu bytes, %lld are allowed; see --max-result",
                          c->line.len, (long long)limit);
        result_head(c, r, &res);
        ok = make_line(c, r, &res);
    }
    const bg_request *q = &r->item->req;
    const bg_done what = {.record = res.record,
                          .key = bg_result_key(q->id, q->content_hash),
                          .failed = res.error_code != NULL,
                          .prompt_tokens = res.prompt_tokens,
                          .output_tokens = res.completion_tokens};
    bg_status st =
        ok ? put_line(c, r, &what, &e)
           : bg_fail(&e, BG_NOMEM, "line %lld: out of memory for the result", (long long)res.line);
    if (st) fail(c, st, &e);
    r->written = true;
    if (st) return;
    atomic_fetch_add(&c->counts.records, 1);
    if (res.error_code) {
        count_failure(c, &res);
        bg_log_repeat(c->c.log, BG_LOG_WARN, res.error_code, "line %lld: error result: %s",
                      (long long)res.line, res.error_code);
    }
    atomic_fetch_add(&c->counts.prompt_tokens, res.prompt_tokens);
}

/* ---- events
 * --------------------------------------------------------------------------------------- */

static void unlink_record(bg_collect *c, record *r)
{
    if (r->prev) r->prev->next = r->next;
    if (r->next) r->next->prev = r->prev;
    if (c->first == r) c->first = r->next;
    atomic_fetch_sub(&c->counts.in_flight, 1);
    record_free(r);
}

static void settle(bg_collect *c, record *r)
{
    bool complete = r->n_closed == r->n_choices;
    if (complete && !r->written && !c->broken) write_result(c, r);
    if (r->n_open == 0) unlink_record(c, r);
}

static void close_choice(choice *ch, bg_finish why)
{
    if (ch->closed) return;
    ch->closed = true;
    ch->finish = why;
    ch->rec->n_closed++;
}

/* Of the token just added. */
static bool keep_info(choice *ch, const bg_sampled *s)
{
    static_assert((int)BG_PROBS_TOP == (int)BG_MAX_TOP_LOGPROBS, "a sample's alternatives fit");
    if (!room_for_infos(ch, ch->ids.n)) return false;
    bg_probs *p = &ch->infos[ch->ids.n - 1];
    p->logprob = s->logprob;
    p->n_top = s->n_top;
    for (int k = 0; k < s->n_top; k++) {
        p->top[k].token = s->top[k].token;
        p->top[k].logprob = s->top[k].logprob;
    }
    return true;
}

static void take_token(bg_collect *c, choice *ch, const bg_token_event *ev)
{
    const bg_request *q = &ch->rec->item->req;
    int32_t id = ev->sampled.token;
    bool ok = bg_ids_add(&ch->ids, id);
    if (ok && q->gen.logprobs >= 0) ok = keep_info(ch, &ev->sampled);
    bool own_stop = false;
    if (ev->finish == BG_FINISH_STOP)
        for (int i = 0; i < q->n_stop_ids; i++)
            own_stop |= q->stop_ids[i] == id;
    if (own_stop) ch->stop_id = id;
    bool hidden =
        ev->finish == BG_FINISH_STOP && !(own_stop && q->gen.include_stop) && !q->gen.show_special;
    if (!hidden) ch->stop_index = bg_detok_add(ch->detok, id, &ch->text);
    if (!ok || ch->text.failed) {
        bg_error e = {0};
        bg_fail(&e, BG_NOMEM, "line %lld: out of memory for the answer", (long long)q->line);
        fail(c, BG_NOMEM, &e);
    }
    atomic_fetch_add(&c->counts.output_tokens, 1);
    if (ch->stop_index >= 0) {
        close_choice(ch, BG_FINISH_STOP);
        if (ev->finish == BG_FINISH_NONE) bg_replicas_cancel(c->engine, ev->seq);
    }
}

static void take_event(bg_collect *c, const bg_token_event *ev)
{
    choice *ch = ev->user;
    record *r = ch->rec;
    if (ev->has_token && !ch->closed) take_token(c, ch, ev);
    if (ev->finish == BG_FINISH_NONE) {
        if (r->n_closed == r->n_choices) settle(c, r);
        return;
    }
    ch->open = false;
    r->n_open--;
    if (!ch->closed && ev->finish != BG_FINISH_CANCEL) {
        /* The end of the text can decide a stop string that more text could have made part of
         * another. */
        ch->stop_index = bg_detok_finish(ch->detok, &ch->text);
        close_choice(ch, ch->stop_index >= 0 ? BG_FINISH_STOP : ev->finish);
    }
    settle(c, r);
}

static void refused(bg_collect *c, choice *ch, const char *text)
{
    record *r = ch->rec;
    if (text && !r->item->req.error_code)
        bg_request_reject(&r->item->req, BG_CODE_TOO_LONG, NULL, "%s", text);
    ch->open = false;
    r->n_open--;
    if (text) close_choice(ch, BG_FINISH_STOP);
    settle(c, r);
}

static const bg_partial *partials(void *p, int *n)
{
    bg_collect *c = p;
    *n = 0;
    for (record *r = c->first; r; r = r->next) {
        if (r->written) continue;
        for (int i = 0; i < r->n_choices; i++) {
            choice *ch = &r->choices[i];
            /* Of a complete choice that waits for the record's others, all but the last token: that
             * one is generated again, and ends it again. */
            int n_tokens = (int)ch->ids.n - ch->closed;
            if (n_tokens < 1) continue;
            if (*n == c->cap_partials) {
                int cap = c->cap_partials ? c->cap_partials * 2 : 64;
                bg_partial *v = realloc(c->partials, (size_t)cap * sizeof *v);
                if (!v) return c->partials; /* fewer than could be: they are only a saving */
                c->partials = v;
                c->cap_partials = cap;
            }
            c->partials[(*n)++] =
                (bg_partial){.record = r->item->req.record,
                             .choice = i,
                             .tokens = ch->ids.v,
                             .n_tokens = n_tokens,
                             .probs = r->item->req.gen.logprobs >= 0 ? ch->infos : NULL};
        }
    }
    return c->partials;
}

static bool take_turn(bg_collect *c, record *r)
{
    r->place = calloc(1, sizeof *r->place);
    if (!r->place) return false;
    if (c->held_last)
        c->held_last->next = r->place;
    else
        c->held_first = r->place;
    c->held_last = r->place;
    return true;
}

static void take_record(bg_collect *c, record *r)
{
    bg_writer_input(c->c.writer, &r->item->place);
    r->next = c->first;
    if (c->first) c->first->prev = r;
    c->first = r;
    atomic_fetch_add(&c->counts.in_flight, 1);
    if (r->item->done) {
        unlink_record(c, r);
        return;
    }
    if (c->c.ordered && !c->broken && !take_turn(c, r)) {
        bg_error e = {0};
        bg_fail(&e, BG_NOMEM, "line %lld: out of memory", (long long)r->item->req.line);
        fail(c, BG_NOMEM, &e);
    }
    if (r->item->req.error_code) settle(c, r); /* no choices: complete at once */
}

static void take_message(bg_collect *c, message *m)
{
    switch (m->kind) {
    case MSG_RECORD:
        take_record(c, m->rec);
        break;
    case MSG_EVENTS:
        for (int i = 0; i < m->n; i++)
            take_event(c, &m->events[i]);
        break;
    case MSG_REFUSED:
        refused(c, m->ch, m->text);
        break;
    }
    free(m->text);
    free(m);
}

static void check_lost(bg_collect *c)
{
    bg_error e = {0};
    if (!c->broken && atomic_load(&c->lost))
        fail(c, bg_fail(&e, BG_NOMEM, "out of memory for tokens on their way to results"), &e);
}

static void *collector(void *p)
{
    bg_collect *c = p;
    prctl(PR_SET_NAME, "bg-write"); /* as tools show it */
    bg_error e = {0};
    for (;;) {
        message *m = bg_queue_pop_within(c->queue, TICK_NS);
        check_lost(c); /* what was sent after a lost message finds it known */
        if (m)
            take_message(c, m);
        else if (bg_queue_closed(c->queue))
            break;
        if (!c->broken) {
            bg_status st = bg_writer_tick(c->c.writer, &e);
            if (st) fail(c, st, &e);
        }
    }
    check_lost(c);
    if (!c->broken) {
        bool complete = c->all_done && !c->first;
        bg_status st =
            complete ? bg_writer_finish(c->c.writer, &e) : bg_writer_commit(c->c.writer, &e);
        if (!st && c->all_done && c->first)
            st = bg_fail(&e, BG_INTERNAL, "line %lld has no result at the end of the job",
                         (long long)c->first->item->req.line);
        if (st) fail(c, st, &e);
    }
    c->c.on_finished(c->c.ctx);
    return NULL;
}

bg_status bg_collect_new(bg_collect **out, const bg_collect_config *config, bg_error *err)
{
    *out = NULL;
    bg_collect *c = calloc(1, sizeof *c);
    if (c) c->queue = bg_queue_new(QUEUE);
    if (!c || !c->queue) {
        free(c);
        return bg_fail(err, BG_NOMEM, "out of memory");
    }
    c->c = *config;
    bg_writer_on_partials(c->c.writer, partials, c);
    int rc = pthread_create(&c->thread, NULL, collector, c);
    c->started = rc == 0;
    if (rc) {
        bg_collect_free(c);
        return bg_fail_at(err, BG_IO, rc, __FILE__, __LINE__, "cannot start the collecting thread");
    }
    *out = c;
    return BG_OK;
}

void bg_collect_set_engine(bg_collect *c, bg_replicas *e)
{
    c->engine = e;
}

bg_status bg_collect_join(bg_collect *c, bg_error *err)
{
    bg_queue_close(c->queue);
    if (c->started && !c->joined) pthread_join(c->thread, NULL);
    c->joined = true;
    if (!c->err.status) return BG_OK;
    bg_fail_at(err, c->err.status, 0, c->err.file, c->err.line, "%s", c->err.text);
    err->os = c->err.os;
    return err->status;
}

void bg_collect_free(bg_collect *c)
{
    if (!c) return;
    bg_error ignored = {0};
    bg_collect_join(c, &ignored);
    for (message *m; (m = bg_queue_try_pop(c->queue));) {
        if (m->kind == MSG_RECORD) record_free(m->rec);
        free(m->text);
        free(m);
    }
    while (c->first)
        unlink_record(c, c->first);
    for (held *h; (h = c->held_first);) {
        c->held_first = h->next;
        free(h->line);
        free(h);
    }
    bg_queue_free(c->queue);
    bg_buf_release(&c->line);
    free(c->partials);
    free(c);
}

const bg_collect_counts *bg_collect_get_counts(const bg_collect *c)
{
    return &c->counts;
}
