#include "job/feed.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/ordered.h"
#include "base/rng.h"

/* Lines go through the map in batches: handing over each one alone costs more than parsing it. */
enum { BATCH = 16, BATCH_BYTES = 64 << 10, WINDOW = 32, WINDOW_BYTES = 64 << 20 };

typedef struct batch {
    bg_feed_item *items[BATCH]; /* items[next..n) are not handed out yet */
    int next, n;
    size_t bytes;
} batch;

struct bg_feed {
    bg_feed_config c;
    bg_gen defaults;
    bg_request_limits limits;
    int64_t wall_s;
    bg_input *in;
    bg_ordered *map; /* of batches */
    batch *now;      /* the consumer's */
    pthread_t reader;
    bool has_reader;
    bg_id_set *ids;
    atomic_bool warned_model;
    /* Bytes of lines inside the map: the reader waits while they are too many. */
    pthread_mutex_t lock;
    pthread_cond_t room;
    size_t bytes;
    bool stopped;
    bg_status read_st; /* written by the reader before it ends the map */
    bg_error read_err;
    atomic_ullong read, total;
    atomic_llong records;
};

void bg_feed_item_free(bg_feed_item *item)
{
    if (!item) return;
    bg_request_release(&item->req);
    for (int i = 0; item->ids && i < item->n_prompts; i++)
        bg_ids_release(&item->ids[i]);
    free(item->ids);
    free(item->data);
    free(item);
}

int64_t bg_job_wall_s(const bg_job *job)
{
    struct stat sb;
    if (job->inputs.n && strcmp(job->inputs.v[0], "-") != 0 && stat(job->inputs.v[0], &sb) == 0 &&
        S_ISREG(sb.st_mode))
        return sb.st_mtime;
    return bg_wall_ns() / 1000000000;
}

static const double TWO_64 = 18446744073709551616.0;

/* Of the record alone: so a smaller sample is part of a larger one, and a resumed job picks the
 * same. */
static bool wanted(const bg_job *job, int64_t record)
{
    if (job->shard_count && record % job->shard_count != job->shard_index) return false;
    if (job->sample >= 1) return true;
    return (double)bg_mix64((uint64_t)record + 0x5a3b1e) < job->sample * TWO_64;
}

char *bg_job_selection(const bg_job *job)
{
    bg_buf b = {0};
    bg_buf_str(&b, "");
    if (job->limit) bg_buf_printf(&b, "limit=%lld", (long long)job->limit);
    if (job->sample < 1) bg_buf_printf(&b, "%ssample=%.17g", b.len ? " " : "", job->sample);
    char *out = b.failed ? NULL : strdup(b.data ? b.data : "");
    bg_buf_release(&b);
    return out;
}

static void defaults_of(const bg_job *job, bg_gen *g)
{
    bg_gen_defaults(g);
    g->temperature = job->temperature;
    g->top_p = job->top_p;
    g->min_p = job->min_p;
    g->top_k = job->top_k > 0 ? (int)job->top_k : 0;
    g->repetition_penalty = job->repetition_penalty;
    g->presence_penalty = job->presence_penalty;
    g->frequency_penalty = job->frequency_penalty;
    g->max_tokens = (int)job->max_tokens;
    g->min_tokens = (int)job->min_tokens;
    g->ignore_eos = job->ignore_eos;
}

/* The job's stop strings go to records that name none. */
static bg_status default_stops(const bg_job *job, bg_request *r, bg_error *err)
{
    if (r->n_stops || !job->stop.n) return BG_OK;
    char **v = calloc((size_t)job->stop.n, sizeof *v);
    free(r->stops);
    r->stops = v;
    for (int i = 0; v && i < job->stop.n; i++) {
        v[i] = strdup(job->stop.v[i]);
        if (!v[i]) break;
        r->n_stops++;
    }
    if (r->n_stops == job->stop.n) return BG_OK;
    return bg_fail(err, BG_NOMEM, "out of memory for stop strings");
}

static void check_model(bg_feed *f, bg_request *r)
{
    const bg_text_model *m = f->c.model;
    if (!m || !r->model || r->error_code || strcmp(r->model, m->name) == 0) return;
    if (f->c.job->strict_model)
        bg_request_reject(r, BG_CODE_MODEL, "model",
                          "the record asks for model \"%s\", this job serves \"%s\"", r->model,
                          m->name);
    else if (!atomic_exchange(&f->warned_model, true))
        bg_log_at(f->c.log, BG_LOG_WARN,
                  "line %lld asks for another model than \"%s\": models named in records are "
                  "ignored (--strict-model makes them errors)",
                  (long long)r->line, m->name);
}

static void batch_free(void *p)
{
    batch *b = p;
    for (int i = b ? b->next : 0; b && i < b->n; i++)
        bg_feed_item_free(b->items[i]);
    free(b);
}

static void work_on(bg_feed *f, bg_feed_item *item)
{
    item->line.data = item->data;
    item->st = bg_request_parse(&item->req, &item->line, &f->defaults, &f->limits, &item->err);
    if (!item->st) check_model(f, &item->req);
    item->uses_id = !item->st && item->req.id && !item->req.error_code;
    if (item->st || item->done || item->other || item->req.error_code) return;
    item->st = default_stops(f->c.job, &item->req, &item->err);
    if (!item->st && f->c.model)
        item->st = bg_job_encode(f->c.model, f->c.job, &item->req, f->wall_s, &item->ids,
                                 &item->n_prompts, &item->err);
}

static void work(void *ctx, void *p)
{
    batch *b = p;
    for (int i = 0; i < b->n; i++)
        work_on(ctx, b->items[i]);
}

static bool wait_for_room(bg_feed *f, size_t n)
{
    pthread_mutex_lock(&f->lock);
    while (f->bytes && f->bytes + n > WINDOW_BYTES && !f->stopped)
        pthread_cond_wait(&f->room, &f->lock);
    f->bytes += n;
    bool ok = !f->stopped;
    pthread_mutex_unlock(&f->lock);
    return ok;
}

static bg_status read_one(bg_feed *f, const bg_line *line, const bg_input_place *place, batch *b)
{
    bg_feed_item *item = calloc(1, sizeof *item);
    char *copy = malloc(line->n + 1);
    if (!item || !copy) {
        free(item);
        free(copy);
        return bg_fail(&f->read_err, BG_NOMEM, "line %lld: out of memory", (long long)line->line);
    }
    memcpy(copy, line->data, line->n);
    copy[line->n] = 0;
    item->data = copy;
    item->line = *line;
    item->place = *place;
    item->other = !wanted(f->c.job, line->record);
    item->done = !item->other && f->c.is_done && f->c.is_done(f->c.ctx, line->record);
    b->items[b->n++] = item;
    b->bytes += line->n;
    return BG_OK;
}

/* Reads lines into b until it is full, the input is at its end (*go_on false), or the next line has
 * not arrived. */
static bg_status read_batch(bg_feed *f, batch *b, int64_t *n_lines, bool *go_on)
{
    int64_t limit = f->c.job->limit;
    bg_status st = BG_OK;
    while (!st && b->n < BATCH && b->bytes < BATCH_BYTES && (!b->n || bg_input_ready(f->in))) {
        bg_line line;
        if (limit && *n_lines == limit)
            *go_on = false;
        else
            st = bg_input_next(f->in, &line, go_on, &f->read_err);
        if (st || !*go_on) break;
        ++*n_lines;
        bg_input_place at = {.end = line.end, .hash = line.hash, .records = line.record + 1};
        bg_input_progress(f->in, &at.read, &at.total);
        st = read_one(f, &line, &at, b);
        /* Files are read in large pieces; of a plain one the lines so far say it better. */
        atomic_store(&f->read, at.end < at.read ? at.end : at.read);
        atomic_store(&f->total, at.total);
        atomic_store(&f->records, at.records);
    }
    return st;
}

static void *reader(void *arg)
{
    bg_feed *f = arg;
    prctl(PR_SET_NAME, "bg-read"); /* as tools show it */
    bool go_on = true;
    int64_t n_lines = 0;
    while (go_on && !f->read_st) {
        batch *b = calloc(1, sizeof *b);
        if (!b) {
            f->read_st = bg_fail(&f->read_err, BG_NOMEM, "out of memory for lines");
            break;
        }
        f->read_st = read_batch(f, b, &n_lines, &go_on);
        /* What was whole before a failure still goes out. */
        if (!b->n || !wait_for_room(f, b->bytes) || !bg_ordered_push(f->map, b)) {
            go_on = go_on && !b->n;
            batch_free(b);
        }
    }
    bg_ordered_end(f->map);
    return NULL;
}

bg_status bg_feed_open(bg_feed **out, const bg_feed_config *c, bg_error *err)
{
    *out = NULL;
    bg_feed *f = calloc(1, sizeof *f);
    if (!f) return bg_fail(err, BG_NOMEM, "out of memory");
    f->c = *c;
    f->wall_s = c->wall_s ? c->wall_s : bg_job_wall_s(c->job);
    defaults_of(c->job, &f->defaults);
    f->limits =
        (bg_request_limits){.max_n = (int)c->job->max_n, .max_nesting = (int)c->job->max_nesting};
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->room, NULL);
    int threads = (int)c->job->text_threads;
    if (!threads) {
        cpu_set_t set;
        threads = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
        if (threads > 8) threads = 8;
    }
    f->ids = bg_id_set_new();
    bg_status st = f->ids ? BG_OK : bg_fail(err, BG_NOMEM, "out of memory");
    if (!st)
        st = bg_input_open(&f->in, (const char *const *)c->job->inputs.v, c->job->inputs.n,
                           (size_t)c->job->max_line, err);
    if (!st) st = bg_ordered_new(&f->map, threads, WINDOW, work, f, err);
    if (!st) {
        int rc = pthread_create(&f->reader, NULL, reader, f);
        f->has_reader = rc == 0;
        if (rc) st = bg_fail_at(err, BG_IO, rc, __FILE__, __LINE__, "cannot start the reader");
    }
    if (st)
        bg_feed_close(f);
    else
        *out = f;
    return st;
}

/* Which use of an id is the second depends on the lines alone, not on what tokenising finds: a
 * resumed run does not tokenise again what is done, and a check may have no model. */
static bg_status check_id(bg_feed *f, bg_feed_item *item, bg_error *err)
{
    bg_request *r = &item->req;
    if (!item->uses_id) return BG_OK;
    int64_t first = bg_id_set_add(f->ids, r->id, strlen(r->id), r->record);
    if (first < 0) return bg_fail(err, BG_NOMEM, "out of memory for record ids");
    const char *param = r->openai ? "custom_id" : "id";
    if (first > 0 && f->c.job->inputs.n > 1)
        bg_request_reject(r, BG_CODE_DUPLICATE, param, "the id was used before, by record %lld",
                          (long long)first - 1);
    else if (first > 0)
        bg_request_reject(r, BG_CODE_DUPLICATE, param, "the id was used before, on line %lld",
                          (long long)first);
    return BG_OK;
}

static bool is_stopped(bg_feed *f)
{
    pthread_mutex_lock(&f->lock);
    bool stopped = f->stopped;
    pthread_mutex_unlock(&f->lock);
    return stopped;
}

/* The consumer's batch, with an item left. False: there is none. */
static bool next_batch(bg_feed *f)
{
    if (f->now && f->now->next < f->now->n) return true;
    batch_free(f->now);
    f->now = bg_ordered_pop(f->map);
    if (!f->now) return false;
    pthread_mutex_lock(&f->lock);
    f->bytes -= f->now->bytes;
    pthread_cond_signal(&f->room);
    pthread_mutex_unlock(&f->lock);
    return true;
}

static bg_status next_item(bg_feed *f, bg_feed_item **out, bg_error *err)
{
    *out = NULL;
    if (is_stopped(f)) return BG_OK;
    if (!next_batch(f)) {
        if (is_stopped(f) || !f->read_st) return BG_OK;
        bg_fail_at(err, f->read_st, 0, f->read_err.file, f->read_err.line, "%s", f->read_err.text);
        err->os = f->read_err.os;
        return err->status;
    }
    bg_feed_item *item = f->now->items[f->now->next++];
    free(item->data);
    item->data = NULL;
    bg_status st = item->st ? bg_fail(err, item->st, "%s", item->err.text) : BG_OK;
    if (!st) st = check_id(f, item, err);
    if (st)
        bg_feed_item_free(item);
    else
        *out = item;
    return st;
}

bg_status bg_feed_next(bg_feed *f, bg_feed_item **item, bg_error *err)
{
    for (;;) {
        bg_status st = next_item(f, item, err);
        if (st || !*item || !(*item)->other) return st;
        bg_feed_item_free(*item);
    }
}

void bg_feed_stop(bg_feed *f)
{
    pthread_mutex_lock(&f->lock);
    f->stopped = true;
    pthread_cond_broadcast(&f->room);
    pthread_mutex_unlock(&f->lock);
    bg_ordered_stop(f->map);
}

void bg_feed_close(bg_feed *f)
{
    if (!f) return;
    if (f->map) bg_feed_stop(f);
    if (f->has_reader) pthread_join(f->reader, NULL);
    bg_ordered_free(f->map, batch_free);
    batch_free(f->now);
    bg_input_close(f->in);
    bg_id_set_free(f->ids);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->room);
    free(f);
}

void bg_feed_progress(bg_feed *f, uint64_t *read, uint64_t *total, int64_t *records)
{
    *read = atomic_load(&f->read);
    *total = atomic_load(&f->total);
    *records = atomic_load(&f->records);
}
