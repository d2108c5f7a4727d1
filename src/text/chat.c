/* Chat templates: what a GGUF's template gets to see, and how its text is handed on.
 *
 * Variables are those of transformers. Messages are prepared for what the template can take, which
 * is found out once, by rendering a few made-up conversations:
 *
 *   parts       a content that is a list of text parts stays one if the template walks through it;
 *               else the texts are joined with a newline. For templates that take nothing but parts
 *               (of some vision models), a text becomes one.
 *   null        a content of null becomes "" unless the template asks whether content is none.
 *   arguments   of a tool call: an object, parsed from the string of JSON that requests have,
 * unless the template takes only the string.
 *
 * Everything from the request is untrusted. The one exception is a role with a well-known name:
 * some templates build a control token around it ('<|' + role + '|>'), and a name from a fixed list
 * cannot smuggle anything in. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "text/jinja_ast.h"
#include "text/jinja_builtin.h"
#include "text/text.h"

struct bg_template {
    jn_program *prog;
    bool takes_parts, needs_parts;
    bool args_as_text;
};

/* ---- preparing messages ---- */

static bool trust_known_role(jn_state *r, jn_dict *m)
{
    static const char *const known[] = {"system",   "user",  "assistant", "tool",       "developer",
                                        "function", "model", "ipython",   "observation"};
    jn_val role;
    if (!jn_dict_get_text(r, m, "role", &role)) return false;
    for (size_t i = 0; role.kind == JN_STR && i < sizeof known / sizeof *known; i++) {
        if (!jn_str_is(role.s, known[i])) continue;
        return jn_str_text(r, known[i], &role) && jn_dict_set_text(r, m, "role", role);
    }
    return true;
}

static bool bad_part(jn_state *r, size_t at, size_t part, const char *what)
{
    bg_fail(r->err, BG_ARG, "messages[%zu].content[%zu]: %s; only text parts are supported", at,
            part, what);
    return false;
}

/* The texts of a list of parts, joined with newlines. Other parts than text are refused, as there
 * is no model to see them. */
static bool join_parts(jn_state *r, size_t at, const jn_list *parts, jn_val *out)
{
    jn_val sep, texts;
    if (!jn_list_new(r, JN_LIST, parts->n, &texts) || !jn_str_text(r, "\n", &sep)) return false;
    for (size_t i = 0; i < parts->n; i++) {
        jn_val type = {0}, text = parts->v[i];
        if (text.kind == JN_DICT) {
            const jn_dict *part = text.dict;
            if (!jn_dict_get_text(r, part, "type", &type) ||
                !jn_dict_get_text(r, part, "text", &text))
                return false;
        }
        if (type.kind == JN_STR && !jn_str_is(type.s, "text")) {
            char what[80];
            snprintf(what, sizeof what, "a part of type '%.*s'",
                     (int)(type.s->n < 40 ? type.s->n : 40), jn_bytes(type.s));
            return bad_part(r, at, i, what);
        }
        if (text.kind != JN_STR) return bad_part(r, at, i, "a part without text");
        if (!jn_list_add(r, texts.list, text)) return false;
    }
    return jn_str_join(r, sep.s, texts.list->v, texts.list->n, out);
}

/* [{"type": "text", "text": text}] */
static bool make_part(jn_state *r, jn_val text, jn_val *out)
{
    jn_val part, type;
    return jn_dict_new(r, JN_DICT, &part) && jn_str_text(r, "text", &type) &&
           jn_dict_set_text(r, part.dict, "type", type) &&
           jn_dict_set_text(r, part.dict, "text", text) && jn_list_new(r, JN_LIST, 1, out) &&
           jn_list_add(r, out->list, part);
}

static bool prepare_content(jn_state *r, const bg_template *t, size_t at, jn_dict *m)
{
    jn_val content, calls, joined;
    if (!jn_dict_get_text(r, m, "content", &content) ||
        !jn_dict_get_text(r, m, "tool_calls", &calls))
        return false;
    if (content.kind == JN_MISSING && calls.kind == JN_LIST) content = jn_none();
    if (content.kind == JN_NONE) {
        if (!t->prog->tests_null_content && !jn_str_text(r, "", &content)) return false;
        return jn_dict_set_text(r, m, "content", content);
    }
    if (content.kind == JN_LIST) {
        if (!join_parts(r, at, content.list, &joined)) return false;
        return t->takes_parts || jn_dict_set_text(r, m, "content", joined);
    }
    if (content.kind == JN_STR && t->needs_parts)
        return make_part(r, content, &joined) && jn_dict_set_text(r, m, "content", joined);
    return true;
}

/* A string of JSON to the object that it spells; anything else stays. */
static bool parse_arguments(jn_state *r, jn_val *v)
{
    json_error_t why;
    size_t n = v->s->n;
    bool nomem;
    json_t *j = jn_json_load(jn_bytes(v->s), n, &why, &nomem);
    if (nomem) return jn_no_memory(r);
    bool ok = jn_work(r, n) && (!json_is_object(j) || jn_from_json(r, j, true, false, v));
    json_decref(j);
    return ok;
}

static bool print_arguments(jn_state *r, jn_val *v)
{
    jn_val item, key;
    jn_json_style style = {0};
    if (!jn_str_text(r, ", ", &item) || !jn_str_text(r, ": ", &key)) return false;
    style.item_sep = item.s;
    style.key_sep = key.s;
    return jn_to_json(r, *v, &style, v);
}

static bool prepare_calls(jn_state *r, const bg_template *t, jn_dict *m)
{
    jn_val calls, function, args;
    if (!jn_dict_get_text(r, m, "tool_calls", &calls)) return false;
    for (size_t i = 0; calls.kind == JN_LIST && i < calls.list->n; i++) {
        if (calls.list->v[i].kind != JN_DICT) continue;
        if (!jn_dict_get_text(r, calls.list->v[i].dict, "function", &function)) return false;
        if (function.kind != JN_DICT) continue;
        if (!jn_dict_get_text(r, function.dict, "arguments", &args)) return false;
        bool change = t->args_as_text ? args.kind == JN_DICT : args.kind == JN_STR;
        if (!change) continue;
        if (!(t->args_as_text ? print_arguments(r, &args) : parse_arguments(r, &args)) ||
            !jn_dict_set_text(r, function.dict, "arguments", args))
            return false;
    }
    return true;
}

static bool prepare_messages(jn_state *r, const bg_template *t, const json_t *messages, bool raw,
                             jn_val *out)
{
    if (!json_is_array(messages)) {
        bg_fail(r->err, BG_ARG, "messages: an array is required");
        return false;
    }
    if (!jn_from_json(r, messages, false, false, out)) return false;
    for (size_t i = 0; i < out->list->n; i++) {
        jn_val m = out->list->v[i];
        if (m.kind != JN_DICT) {
            bg_fail(r->err, BG_ARG, "messages[%zu]: an object is required", i);
            return false;
        }
        if (!trust_known_role(r, m.dict)) return false;
        if (!raw && (!prepare_content(r, t, i, m.dict) || !prepare_calls(r, t, m.dict)))
            return false;
    }
    return true;
}

/* ---- variables ---- */

static bool set(jn_state *r, const char *name, jn_val v)
{
    jn_set_var(r, name, strlen(name), v);
    return true;
}

static bool set_text(jn_state *r, const char *name, const char *text)
{
    jn_val v;
    return jn_str_text(r, text ? text : "", &v) && set(r, name, v);
}

static bool set_json(jn_state *r, const char *name, size_t n, const json_t *j)
{
    jn_val v;
    if (jn_symbol(r->prog, name, n) < 0) return true; /* nothing of it is ever seen */
    if (!jn_from_json(r, j, false, false, &v)) return false;
    jn_set_var(r, name, n, v);
    return true;
}

static bool set_kwargs(jn_state *r, const json_t *kwargs)
{
    json_t *o = (json_t *)(uintptr_t)kwargs; /* only read */
    if (kwargs && !json_is_object(kwargs)) {
        bg_fail(r->err, BG_ARG, "chat_template_kwargs: an object is required");
        return false;
    }
    for (void *it = kwargs ? json_object_iter(o) : NULL; it; it = json_object_iter_next(o, it)) {
        const char *name = json_object_iter_key(it);
        if (strcmp(name, "messages") == 0) {
            bg_fail(r->err, BG_ARG, "chat_template_kwargs: 'messages' cannot be set there");
            return false;
        }
        if (!set_json(r, name, strlen(name), json_object_iter_value(it))) return false;
    }
    return true;
}

static bool set_variables(jn_state *r, const bg_template *t, const bg_chat_input *in, bool raw)
{
    jn_val messages;
    if (!prepare_messages(r, t, in->messages, raw, &messages)) return false;
    return set(r, "messages", messages) && set(r, "tools", jn_none()) &&
           set(r, "documents", jn_none()) &&
           (!in->tools || set_json(r, "tools", strlen("tools"), in->tools)) &&
           set(r, "add_generation_prompt", jn_bool(in->add_generation_prompt)) &&
           set_text(r, "bos_token", in->bos) && set_text(r, "eos_token", in->eos) &&
           set_kwargs(r, in->kwargs);
}

/* Renders into r->out; r ends with jn_render_end() whatever comes back. raw: messages as they are.
 */
static bg_status render(jn_state *r, const bg_template *t, const bg_chat_input *in,
                        const jn_limits *limits, bool raw, bg_error *err)
{
    bg_status st = jn_render_begin(r, t->prog, limits, in->wall_s, err);
    if (!st && !set_variables(r, t, in, raw)) st = err->status;
    return st ? st : jn_render_run(r);
}

/* ---- what the template can take ---- */

#define NEEDLE "bgneedle"

/* Renders a conversation; *yes: it worked, the text shows `want`, and none of the two others, which
 * tell that a value was printed as it lies in memory. */
static bg_status probe(const bg_template *t, const char *messages, const char *want,
                       const char *not1, const char *not2, bool *yes, bg_error *err)
{
    const jn_limits limits = {.output_bytes = 1 << 20, .steps = 200000};
    json_error_t why;
    bool nomem;
    json_t *m = bg_json_load(messages, strlen(messages), 0, &why, &nomem);
    bg_error ignored = {0};
    *yes = false;
    if (!m) return bg_fail(err, BG_NOMEM, "%s: out of memory", t->prog->name);
    bg_chat_input in = {.messages = m, .bos = "", .eos = "", .add_generation_prompt = true};
    jn_state r;
    bg_status st = render(&r, t, &in, &limits, true, &ignored);
    if (!st && r.out->len) {
        const char *p = r.out->p;
        size_t n = r.out->len;
        *yes = jn_find(p, n, want, strlen(want), 0) != SIZE_MAX &&
               jn_find(p, n, not1, strlen(not1), 0) == SIZE_MAX &&
               jn_find(p, n, not2, strlen(not2), 0) == SIZE_MAX;
    }
    jn_render_end(&r);
    json_decref(m);
    return st == BG_NOMEM ? bg_fail(err, BG_NOMEM, "%s", ignored.text) : BG_OK;
}

/* A call of a tool whose arguments are `args`. */
static void call_probe(const bg_template *t, const char *args, char *out, size_t size)
{
    const char *content = t->prog->tests_null_content ? "null" : "\"\"";
    snprintf(out, size,
             "[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":%s,"
             "\"tool_calls\":[{\"id\":\"abcdef123\",\"type\":\"function\",\"function\":"
             "{\"name\":\"f\",\"arguments\":%s}}]}]",
             content, args);
}

static bg_status find_out(bg_template *t, bg_error *err)
{
    static const char parts[] = "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":"
                                "\"" NEEDLE "\"}]}]";
    static const char plain[] = "[{\"role\":\"user\",\"content\":\"" NEEDLE "\"}]";
    char object[400], text[400];
    bool takes_text = false, takes_object = false;
    bg_status st = probe(t, parts, NEEDLE, "'text'", "\"text\"", &t->takes_parts, err);
    if (!st) st = probe(t, plain, NEEDLE, "'text'", "\"text\"", &takes_text, err);
    t->needs_parts = t->takes_parts && !takes_text;
    call_probe(t, "{\"" NEEDLE "\":\"v\"}", object, sizeof object);
    call_probe(t, "\"{\\\"" NEEDLE "\\\": \\\"v\\\"}\"", text, sizeof text);
    if (!st) st = probe(t, object, NEEDLE, "'" NEEDLE "'", "\\\"" NEEDLE, &takes_object, err);
    if (!st && !takes_object)
        st = probe(t, text, "\"" NEEDLE "\"", "\\\"" NEEDLE, "'" NEEDLE "'", &t->args_as_text, err);
    return st;
}

bg_status bg_template_new(bg_template **out, const char *source, size_t n, const char *name,
                          bg_error *err)
{
    *out = NULL;
    bg_template *t = calloc(1, sizeof *t);
    if (!t) return bg_fail(err, BG_NOMEM, "%s: out of memory", name);
    bg_status st = jn_parse(&t->prog, source, n, name, 0, err);
    if (!st) st = find_out(t, err);
    if (st) {
        bg_template_free(t);
        return st;
    }
    *out = t;
    return BG_OK;
}

void bg_template_free(bg_template *t)
{
    if (!t) return;
    jn_program_free(t->prog);
    free(t);
}

/* ---- rendering ---- */

void bg_rendered_release(bg_rendered *r)
{
    bg_buf_release(&r->text);
    free(r->segs);
    *r = (bg_rendered){0};
}

static bool hand_over(const jn_buf *from, bg_rendered *out)
{
    bg_buf_add(&out->text, from->p, from->len);
    if (out->text.failed) return false;
    if (from->n_runs == 0) return true;
    out->segs = calloc(from->n_runs, sizeof *out->segs);
    if (!out->segs) return false;
    out->n_segs = from->n_runs;
    for (size_t i = 0, start = 0; i < from->n_runs; start = from->runs[i++].end)
        out->segs[i] = (bg_segment){.p = out->text.data + start,
                                    .n = from->runs[i].end - start,
                                    .parse_special = from->runs[i].trusted};
    return true;
}

bg_status bg_chat_render(const bg_template *t, const bg_chat_input *in,
                         const bg_chat_limits *limits, bg_rendered *out, bg_error *err)
{
    jn_limits lim = {0};
    if (limits) {
        lim.output_bytes = limits->output_bytes;
        lim.steps = limits->steps;
        lim.depth = limits->depth;
    }
    *out = (bg_rendered){0};
    jn_state r;
    bg_status st = render(&r, t, in, &lim, false, err);
    if (!st && !hand_over(r.out, out)) {
        bg_rendered_release(out);
        st = bg_fail(err, BG_NOMEM, "%s: out of memory", t->prog->name);
    }
    jn_render_end(&r);
    return st;
}
