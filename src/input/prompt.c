/* What a record asks: messages with their tools, or prompts. */
#include "input/parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Answers of one record, prompts times n: all of them are one result line. */
enum { MAX_ANSWERS = 64 << 10 };

static bool one_of(const json_t *v, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bg_json_is(v, names[i])) return true;
    return false;
}

static bool content_part(bg_parse *c, const char *where, const json_t *part)
{
    static const char *const media[] = {"image_url", "image",     "input_image", "input_audio",
                                        "audio",     "audio_url", "video",       "video_url",
                                        "file",      "input_file"};
    char name[96];
    if (!json_is_object(part)) return bg_parse_bad_value(c, where, part, "an object with a type");
    const json_t *type = json_object_get(part, "type");
    snprintf(name, sizeof name, "%s.type", where);
    if (!type || json_is_null(type))
        return bg_parse_bad(c, BG_CODE_MISSING, name, "%s%s is missing", c->prefix, name);
    if (!json_is_string(type)) return bg_parse_bad_value(c, name, type, "a string");
    const char *t = json_string_value(type);
    if (one_of(type, media, sizeof media / sizeof *media))
        return bg_parse_bad(c, BG_CODE_UNSUPPORTED, where,
                            "%s%s is of type %s; only text can be given to the model", c->prefix,
                            where, t);
    if (!bg_json_is(type, "text"))
        return bg_parse_bad(c, BG_CODE_FIELD, name, "%s%s is %.40s; only text is known", c->prefix,
                            name, t);
    const json_t *text = json_object_get(part, "text");
    snprintf(name, sizeof name, "%s.text", where);
    if (!text) return bg_parse_bad(c, BG_CODE_MISSING, name, "%s%s is missing", c->prefix, name);
    if (!json_is_string(text)) return bg_parse_bad_value(c, name, text, "a string");
    return true;
}

static bool tool_calls(bg_parse *c, const char *where, const json_t *calls)
{
    char name[192];
    if (!json_is_array(calls)) return bg_parse_bad_value(c, where, calls, "an array");
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i), *f = json_object_get(call, "function");
        snprintf(name, sizeof name, "%s[%zu]", where, i);
        if (!json_is_object(call)) return bg_parse_bad_value(c, name, call, "an object");
        snprintf(name, sizeof name, "%s[%zu].function", where, i);
        if (!json_is_object(f) || !json_is_string(json_object_get(f, "name")))
            return bg_parse_bad(c, BG_CODE_FIELD, name, "%s%s must be an object with a name",
                                c->prefix, name);
        const json_t *arguments = json_object_get(f, "arguments");
        if (arguments && !json_is_string(arguments) && !json_is_object(arguments)) {
            snprintf(name, sizeof name, "%s[%zu].function.arguments", where, i);
            return bg_parse_bad_value(c, name, arguments, "a string or an object");
        }
    }
    return true;
}

static bool content(bg_parse *c, const char *where, const json_t *message, bool may_be_null)
{
    char name[80];
    snprintf(name, sizeof name, "%s.content", where);
    const json_t *v = json_object_get(message, "content");
    if (!v || json_is_null(v)) {
        if (may_be_null) return true;
        return bg_parse_bad(c, v ? BG_CODE_FIELD : BG_CODE_MISSING, name, "%s%s is %s", c->prefix,
                            name, v ? "null" : "missing");
    }
    if (json_is_string(v)) return true;
    if (!json_is_array(v)) return bg_parse_bad_value(c, name, v, "a string or an array of parts");
    if (json_array_size(v) == 0)
        return bg_parse_bad(c, BG_CODE_EMPTY, name, "%s%s has no parts", c->prefix, name);
    for (size_t i = 0; i < json_array_size(v); i++) {
        snprintf(name, sizeof name, "%s.content[%zu]", where, i);
        if (!content_part(c, name, json_array_get(v, i))) return false;
    }
    return true;
}

/* Clients write out every field they know, with null for those not used. A template that asks "is
 * it defined" must not see them. content stays: null has a meaning there. */
static void drop_nulls(json_t *message)
{
    const char *key;
    json_t *v;
    void *next;
    json_object_foreach_safe(message, next, key, v)
    {
        if (json_is_null(v) && strcmp(key, "content") != 0) json_object_del(message, key);
    }
}

static bool message(bg_parse *c, size_t i, json_t *m)
{
    static const char *const roles[] = {"system",   "developer", "user",        "assistant", "tool",
                                        "function", "ipython",   "observation", "document"};
    static const char *const texts[] = {"name", "tool_call_id", "reasoning_content", "reasoning"};
    char where[48], name[80];
    snprintf(where, sizeof where, "messages[%zu]", i);
    if (!json_is_object(m)) return bg_parse_bad_value(c, where, m, "an object");
    drop_nulls(m);
    const json_t *role = json_object_get(m, "role");
    snprintf(name, sizeof name, "%s.role", where);
    if (!role) return bg_parse_bad(c, BG_CODE_MISSING, name, "%s%s is missing", c->prefix, name);
    if (!json_is_string(role)) return bg_parse_bad_value(c, name, role, "a string");
    if (!one_of(role, roles, sizeof roles / sizeof *roles))
        return bg_parse_bad(c, BG_CODE_FIELD, name,
                            "%s%s is %.40s; system, developer, user, assistant and tool are known",
                            c->prefix, name, json_string_value(role));
    for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) {
        const json_t *v = json_object_get(m, texts[k]);
        snprintf(name, sizeof name, "%s.%s", where, texts[k]);
        if (v && !json_is_string(v)) return bg_parse_bad_value(c, name, v, "a string");
    }
    const json_t *calls = json_object_get(m, "tool_calls");
    snprintf(name, sizeof name, "%s.tool_calls", where);
    if (calls && !tool_calls(c, name, calls)) return false;
    bool may_be_null = bg_json_is(role, "assistant") &&
                       (json_array_size(calls) > 0 || json_object_get(m, "function_call"));
    return content(c, where, m, may_be_null);
}

/* Settings that servers hand on to the template under their own names. */
static bool template_settings(bg_parse *c)
{
    static const char *const handed_on[] = {"reasoning_effort", "enable_thinking", "documents"};
    bg_request *r = c->r;
    json_t *kwargs = bg_parse_field(c, "chat_template_kwargs");
    if (kwargs && !json_is_object(kwargs))
        return bg_parse_bad_value(c, "chat_template_kwargs", kwargs, "an object");
    for (size_t i = 0; i < sizeof handed_on / sizeof *handed_on; i++) {
        json_t *v = bg_parse_field(c, handed_on[i]);
        if (!v || json_object_get(kwargs, handed_on[i])) continue; /* the explicit one rules */
        if (!kwargs) {
            kwargs = json_object();
            if (!kwargs || json_object_set_new(c->body, "chat_template_kwargs", kwargs) != 0)
                return bg_parse_nomem(c);
        }
        if (json_object_set(kwargs, handed_on[i], v) != 0) return bg_parse_nomem(c);
    }
    r->template_kwargs = kwargs;
    const json_t *add = bg_parse_field(c, "add_generation_prompt");
    if (add && !json_is_boolean(add))
        return bg_parse_bad_value(c, "add_generation_prompt", add, "true or false");
    if (add) r->add_generation_prompt = json_is_true(add);
    return true;
}

static bool tools(bg_parse *c)
{
    json_t *v = bg_parse_field(c, "tools");
    if (!v) return true;
    if (!json_is_array(v)) return bg_parse_bad_value(c, "tools", v, "an array of objects");
    for (size_t i = 0; i < json_array_size(v); i++) {
        char name[48];
        snprintf(name, sizeof name, "tools[%zu]", i);
        if (!json_is_object(json_array_get(v, i)))
            return bg_parse_bad_value(c, name, json_array_get(v, i), "an object");
    }
    if (json_array_size(v)) c->r->tools = v;
    return true;
}

bool bg_parse_messages(bg_parse *c)
{
    json_t *v = bg_parse_field(c, "messages");
    if (!v) return bg_parse_bad(c, BG_CODE_MISSING, "messages", "%smessages is missing", c->prefix);
    if (!json_is_array(v)) return bg_parse_bad_value(c, "messages", v, "an array of messages");
    if (json_array_size(v) == 0)
        return bg_parse_bad(c, BG_CODE_EMPTY, "messages", "%smessages is empty", c->prefix);
    if (bg_parse_field(c, "prompt"))
        return bg_parse_bad(c, BG_CODE_FIELD, "prompt",
                            "%sprompt belongs to /v1/completions, not beside messages", c->prefix);
    for (size_t i = 0; i < json_array_size(v); i++)
        if (!message(c, i, json_array_get(v, i))) return false;
    c->r->messages = v;
    return tools(c) && template_settings(c);
}

static bool add_ids(bg_parse *c, const char *name, const json_t *ids)
{
    bg_request *r = c->r;
    size_t n = json_array_size(ids);
    if (n == 0) return bg_parse_bad(c, BG_CODE_EMPTY, name, "%s%s is empty", c->prefix, name);
    bg_prompt *p = &r->prompts[r->n_prompts++];
    p->ids = malloc(n * sizeof *p->ids);
    if (!p->ids) return bg_parse_nomem(c);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(ids, i);
        char at[64];
        snprintf(at, sizeof at, "%s[%zu]", name, i);
        int64_t t;
        if (!bg_json_whole(v, &t)) return bg_parse_bad_value(c, at, v, "a token id");
        if (t < 0 || t > INT32_MAX)
            return bg_parse_bad(c, BG_CODE_TOKEN, at, "%s%s is %lld, which is no token id",
                                c->prefix, at, (long long)t);
        p->ids[p->n_ids++] = (int32_t)t;
    }
    return true;
}

static bool add_text(bg_parse *c, const char *name, const json_t *v)
{
    if (json_string_length(v) == 0)
        return bg_parse_bad(c, BG_CODE_EMPTY, name, "%s%s is empty", c->prefix, name);
    c->r->prompts[c->r->n_prompts++] =
        (bg_prompt){.text = json_string_value(v), .n_text = json_string_length(v)};
    return true;
}

bool bg_parse_prompts(bg_parse *c)
{
    static const char must[] = "a string, token ids, or an array of either";
    bg_request *r = c->r;
    json_t *v = bg_parse_field(c, "prompt");
    if (!v) return bg_parse_bad(c, BG_CODE_MISSING, "prompt", "%sprompt is missing", c->prefix);
    if (bg_parse_field(c, "messages"))
        return bg_parse_bad(c, BG_CODE_FIELD, "messages",
                            "%smessages belongs to /v1/chat/completions, not beside prompt",
                            c->prefix);
    if (!json_is_string(v) && !json_is_array(v)) return bg_parse_bad_value(c, "prompt", v, must);
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    const json_t *first = json_is_array(v) ? json_array_get(v, 0) : v;
    if (n == 0) return bg_parse_bad(c, BG_CODE_EMPTY, "prompt", "%sprompt is empty", c->prefix);
    bool one = json_is_string(v) || json_is_number(first);
    if (!one && n > (size_t)(MAX_ANSWERS / r->gen.n))
        return bg_parse_bad(c, BG_CODE_FIELD, "prompt",
                            "%sprompt holds %zu prompts with %d answers each; at most %d answers "
                            "are allowed in one record",
                            c->prefix, n, r->gen.n, MAX_ANSWERS);
    r->prompts = calloc(one ? 1 : n, sizeof *r->prompts);
    if (!r->prompts) return bg_parse_nomem(c);
    if (json_is_string(v)) return add_text(c, "prompt", v);
    if (one) return add_ids(c, "prompt", v);
    for (size_t i = 0; i < n; i++) {
        const json_t *p = json_array_get(v, i);
        char name[32];
        snprintf(name, sizeof name, "prompt[%zu]", i);
        if ((!json_is_string(p) && !json_is_array(p)) || json_typeof(p) != json_typeof(first))
            return bg_parse_bad_value(c, name, p, i ? "like the prompts before it" : must);
        if (!(json_is_string(p) ? add_text(c, name, p) : add_ids(c, name, p))) return false;
    }
    return true;
}
