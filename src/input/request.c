/* A line to a request.
 *
 * Which form a line has: an OpenAI batch line has body, url or method, or a custom_id without
 * prompt and messages; every other object is a plain line. A key given twice in one object is
 * refused as invalid JSON: readers disagree on which one counts, so neither may be picked silently.
 * A BOM at the start of a later line (two files joined) is accepted. */
#include "input/input.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/utf8.h"
#include "input/parts.h"
#include "input/quick.h"
#include "input/scan.h"

void bg_gen_defaults(bg_gen *g)
{
    *g = (bg_gen){.temperature = 1, .top_p = 1, .repetition_penalty = 1, .n = 1, .logprobs = -1};
}

static void reject(bg_request *r, const char *code, const char *param, const char *fmt, va_list ap)
{
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    size_t n_text = n < 0 ? 0 : (size_t)n, n_param = param ? strlen(param) : 0;
    /* One block, so that a name made up here lives as long as the message. param may point into the
     * old one. */
    char *text = malloc(n_text + 1 + n_param + 1);
    r->error_code = code;
    if (text) {
        text[0] = 0;
        vsnprintf(text, n_text + 1, fmt, again);
        memcpy(text + n_text + 1, param ? param : "", n_param + 1);
        bg_utf8_mend(text); /* the user's texts may be cut inside a character */
        bg_utf8_mend(text + n_text + 1);
    }
    va_end(again);
    free(r->error_message);
    r->error_message = text;
    r->error_param = text && param ? text + n_text + 1 : NULL;
}

void bg_request_reject(bg_request *r, const char *code, const char *param, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    reject(r, code, param, fmt, ap);
    va_end(ap);
}

json_t *bg_parse_field(const bg_parse *c, const char *name)
{
    json_t *v = json_object_get(c->body, name);
    return json_is_null(v) ? NULL : v;
}

bool bg_parse_nomem(bg_parse *c)
{
    c->nomem = true;
    return false;
}

bool bg_parse_bad(bg_parse *c, const char *code, const char *name, const char *fmt, ...)
{
    char param[224];
    snprintf(param, sizeof param, "%s%s", c->prefix, name);
    va_list ap;
    va_start(ap, fmt);
    reject(c->r, code, param, fmt, ap);
    va_end(ap);
    return c->r->error_message ? false : bg_parse_nomem(c);
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_NULL:
        return "null";
    default:
        return json_is_true(v) ? "true" : "false";
    }
}

bool bg_parse_bad_value(bg_parse *c, const char *name, const json_t *value, const char *must)
{
    char seen[64];
    if (json_is_integer(value))
        snprintf(seen, sizeof seen, "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        snprintf(seen, sizeof seen, "%.9g", json_real_value(value));
    else
        snprintf(seen, sizeof seen, "%s", type_name(value));
    return bg_parse_bad(c, BG_CODE_FIELD, name, "%s%s is %s; it must be %s", c->prefix, name, seen,
                        must);
}

bool bg_json_is(const json_t *v, const char *text)
{
    return json_is_string(v) && json_string_length(v) == strlen(text) &&
           memcmp(json_string_value(v), text, strlen(text)) == 0;
}

bool bg_json_whole(const json_t *v, int64_t *out)
{
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return true;
    }
    double d = json_is_real(v) ? json_real_value(v) : 0.5;
    if (!(d > -9007199254740992.0 && d < 9007199254740992.0) || d != (double)(int64_t)d)
        return false;
    *out = (int64_t)d;
    return true;
}

/* An id as JSON text, escaped in one way whatever way the line used. NULL: not a string or whole
 * number. */
static bool id_text(bg_parse *c, const json_t *v)
{
    bg_buf b = {0};
    if (json_is_string(v))
        bg_buf_json(&b, json_string_value(v), json_string_length(v));
    else if (json_is_integer(v))
        bg_buf_printf(&b, "%lld", (long long)json_integer_value(v));
    else
        return true;
    c->r->id = bg_buf_take(&b);
    return c->r->id ? true : bg_parse_nomem(c);
}

/* The id of a line that is not valid up to `end`. */
static bool salvage_id(bg_parse *c, const char *s, size_t n, const bg_scan *scan)
{
    c->r->openai = scan->batch; /* so that the error takes the form that its neighbours have */
    if (!scan->id_n || scan->id_at + scan->id_n > n) return true;
    bool nomem;
    json_t *v =
        bg_json_load(s + scan->id_at, scan->id_n, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL, &nomem);
    bool ok = v ? id_text(c, v) : nomem ? bg_parse_nomem(c) : true;
    json_decref(v);
    return ok;
}

static bool broken_json(bg_parse *c, const char *s, size_t n, const json_error_t *e, size_t bom)
{
    size_t end = e->position > 0 ? (size_t)e->position : 0;
    if (end > n) end = n;
    enum json_error_code code = json_error_code(e);
    bg_scan scan;
    bg_scan_line(s, n, end, &scan);
    /* Of two objects on one line neither is the record. */
    if (code != json_error_end_of_input_expected && !salvage_id(c, s, n, &scan)) return false;
    bg_request *r = c->r;
    const char *param = scan.path[0] ? scan.path : NULL;
    if (code == json_error_numeric_overflow) {
        bg_request_reject(r, BG_CODE_FIELD, param, "%s is out of range near byte %zu",
                          param ? param : "a number", end + bom);
    } else if (!bg_utf8_valid(s, n)) {
        size_t at = 0, len;
        uint32_t cp;
        while (len = bg_utf8_next(s + at, n - at, &cp), cp != BG_UTF8_BAD)
            at += len;
        bool utf16 = n >= 2 && (!memcmp(s, "\xff\xfe", 2) || !memcmp(s, "\xfe\xff", 2));
        bg_request_reject(r, BG_CODE_JSON, NULL, "not UTF-8 at byte %zu%s", at + bom,
                          utf16 ? "; it looks like UTF-16: convert the file to UTF-8" : "");
    } else if (code == json_error_end_of_input_expected && memmem(s, n, "}\r{", 3)) {
        bg_request_reject(r, BG_CODE_JSON, NULL,
                          "several objects with CR between them, near byte %zu; only LF ends a "
                          "line",
                          end + bom);
    } else if (code == json_error_end_of_input_expected) {
        bg_request_reject(
            r, BG_CODE_JSON, NULL,
            "more follows the first JSON value near byte %zu; a line holds one object", end + bom);
    } else if (code == json_error_duplicate_key) {
        bg_request_reject(r, BG_CODE_JSON, param, "%s is given twice, near byte %zu",
                          param ? param : "a key", end + bom);
    } else {
        const char *near = strstr(e->text, " near ");
        int len = near ? (int)(near - e->text) : (int)strlen(e->text);
        bg_request_reject(r, BG_CODE_JSON, NULL, "not JSON: %.*s near byte %zu", len, e->text,
                          end + bom);
    }
    return r->error_message ? false : bg_parse_nomem(c);
}

/* The bracket at `at` is one too many. Said before a parser, which recurses, sees the line. */
static bool too_deep(bg_parse *c, const char *s, size_t n, size_t at, size_t bom)
{
    bg_scan scan;
    bg_scan_line(s, n, at, &scan);
    if (!salvage_id(c, s, n, &scan)) return false;
    bg_request_reject(c->r, BG_CODE_DEEP, scan.path[0] ? scan.path : NULL,
                      "%s%snested deeper than the %d levels allowed at byte %zu", scan.path,
                      scan.path[0] ? " is " : "", c->limits.max_nesting, at + bom);
    return c->r->error_message ? false : bg_parse_nomem(c);
}

static bool openai_line(bg_parse *c)
{
    bg_request *r = c->r;
    const json_t *id = bg_parse_field(c, "custom_id");
    if (!id)
        return bg_parse_bad(c, BG_CODE_MISSING, "custom_id",
                            "custom_id is missing; every batch line needs one");
    if (!id_text(c, id)) return false;
    if (!json_is_string(id)) return bg_parse_bad_value(c, "custom_id", id, "a string");

    const json_t *method = bg_parse_field(c, "method"), *url = bg_parse_field(c, "url");
    if (!method) return bg_parse_bad(c, BG_CODE_MISSING, "method", "method is missing; it is POST");
    if (!bg_json_is(method, "POST")) return bg_parse_bad_value(c, "method", method, "\"POST\"");
    if (!url)
        return bg_parse_bad(c, BG_CODE_MISSING, "url",
                            "url is missing; /v1/chat/completions and /v1/completions are known");
    if (!json_is_string(url)) return bg_parse_bad_value(c, "url", url, "a string");
    if (bg_json_is(url, "/v1/chat/completions"))
        r->api = BG_API_CHAT;
    else if (bg_json_is(url, "/v1/completions"))
        r->api = BG_API_COMPLETION;
    else
        return bg_parse_bad(c, BG_CODE_URL, "url",
                            "url is %.80s; /v1/chat/completions and /v1/completions are known",
                            json_string_value(url));
    json_t *body = bg_parse_field(c, "body");
    if (!body) return bg_parse_bad(c, BG_CODE_MISSING, "body", "body is missing");
    if (!json_is_object(body)) return bg_parse_bad_value(c, "body", body, "an object");
    c->body = body;
    c->prefix = "body.";
    return true;
}

static bool plain_line(bg_parse *c)
{
    const char *name = bg_parse_field(c, "id") ? "id" : "custom_id";
    const json_t *id = bg_parse_field(c, name);
    if (id && !id_text(c, id)) return false;
    if (id && !c->r->id) return bg_parse_bad_value(c, name, id, "a string or a whole number");
    bool messages = bg_parse_field(c, "messages"), prompt = bg_parse_field(c, "prompt");
    if (messages && prompt)
        return bg_parse_bad(c, BG_CODE_FIELD, "prompt", "both prompt and messages are given");
    if (!messages && !prompt)
        return bg_parse_bad(c, BG_CODE_MISSING, "prompt",
                            "neither prompt nor messages is there, and no body");
    c->r->api = messages ? BG_API_CHAT : BG_API_COMPLETION;
    return true;
}

static bool model_name(bg_parse *c)
{
    const json_t *v = bg_parse_field(c, "model");
    if (!v) return true;
    if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v))
        return bg_parse_bad_value(c, "model", v, "a string without NUL");
    c->r->model = strdup(json_string_value(v));
    return c->r->model ? true : bg_parse_nomem(c);
}

static bool parse(bg_parse *c, const bg_line *line)
{
    bg_request *r = c->r;
    size_t bom = line->n >= 3 && memcmp(line->data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    const char *s = line->data + bom;
    size_t n = line->n - bom;
    if (line->too_long) {
        bg_scan scan;
        bg_scan_line(s, n, n, &scan);
        if (!salvage_id(c, s, n, &scan)) return false;
        bg_request_reject(r, BG_CODE_LINE_LONG, NULL,
                          "the line is longer than the %zu bytes allowed", line->n);
        return r->error_message ? false : bg_parse_nomem(c);
    }
    size_t deep = bg_scan_too_deep(s, n, c->limits.max_nesting);
    if (deep) return too_deep(c, s, n, deep - 1, bom);
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL;
    json_error_t e = {0};
    bool nomem;
    r->root = bg_quick_load(s, n, &nomem);
    if (!r->root && !nomem) r->root = bg_json_load(s, n, flags, &e, &nomem);
    if (nomem) return bg_parse_nomem(c);
    if (!r->root) return broken_json(c, s, n, &e, bom);
    if (!json_is_object(r->root)) {
        bg_request_reject(r, BG_CODE_JSON, NULL, "the line is %s; a request is a JSON object",
                          type_name(r->root));
        return r->error_message ? false : bg_parse_nomem(c);
    }
    c->body = r->root;
    r->openai = bg_parse_field(c, "body") || bg_parse_field(c, "url") ||
                bg_parse_field(c, "method") ||
                (bg_parse_field(c, "custom_id") && !bg_parse_field(c, "prompt") &&
                 !bg_parse_field(c, "messages"));
    if (!(r->openai ? openai_line(c) : plain_line(c))) return false;
    r->content_hash = bg_parse_content(c);
    return model_name(c) && bg_parse_settings(c) &&
           (r->api == BG_API_CHAT ? bg_parse_messages(c) : bg_parse_prompts(c));
}

/* Of a line that is no request: of its bytes, a BOM aside. */
static uint64_t hash_of_line(const bg_line *line)
{
    size_t bom = line->n >= 3 && memcmp(line->data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    uint64_t h = bg_hash64(line->data + bom, line->n - bom, 0);
    return h ? h : 1;
}

bg_status bg_request_parse(bg_request *r, const bg_line *line, const bg_gen *defaults,
                           const bg_request_limits *limits, bg_error *err)
{
    *r = (bg_request){.record = line->record,
                      .line = line->line,
                      .file = line->file,
                      .gen = *defaults,
                      .add_generation_prompt = true};
    bg_parse c = {.r = r,
                  .prefix = "",
                  .limits = {.max_n = 128, .max_stops = 64, .max_logprobs = 20, .max_nesting = 64}};
    if (limits && limits->max_n) c.limits.max_n = limits->max_n;
    if (limits && limits->max_stops) c.limits.max_stops = limits->max_stops;
    if (limits && limits->max_logprobs) c.limits.max_logprobs = limits->max_logprobs;
    if (limits && limits->max_nesting) c.limits.max_nesting = limits->max_nesting;
    (void)parse(&c, line); /* false is told by error_code or nomem */
    if (!r->content_hash) r->content_hash = hash_of_line(line);
    if (c.nomem) return bg_fail(err, BG_NOMEM, "line %lld: out of memory", (long long)line->line);
    return BG_OK;
}

void bg_request_release(bg_request *r)
{
    for (int i = 0; r->prompts && i < r->n_prompts; i++)
        free(r->prompts[i].ids);
    for (int i = 0; r->stops && i < r->n_stops; i++)
        free(r->stops[i]);
    free(r->prompts);
    free(r->stops);
    free(r->stop_ids);
    free(r->bias);
    free(r->id);
    free(r->model);
    free(r->error_message);
    json_decref(r->root);
    *r = (bg_request){0};
}
