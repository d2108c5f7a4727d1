/* Chat templates: template source, a NUL, then the messages as JSON (a JSON object is the whole
 * context instead). Limits are low so that each run is short. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja_ast.h"
#include "text/text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void render_object(const char *source, size_t n, json_t *context)
{
    const jn_limits limits = {.output_bytes = 1 << 16, .memory_bytes = 4 << 20, .steps = 20000};
    jn_program *p;
    jn_state r;
    bg_error err = {0};
    if (jn_parse(&p, source, n, "t", 0, &err)) return;
    bg_status st = jn_render_begin(&r, p, &limits, 1741529106, &err);
    for (void *it = json_object_iter(context); !st && it; it = json_object_iter_next(context, it)) {
        const char *name = json_object_iter_key(it);
        jn_val v;
        if (!jn_from_json(&r, json_object_iter_value(it), false, false, &v)) st = err.status;
        if (!st) jn_set_var(&r, name, strlen(name), v);
    }
    if (!st) jn_render_run(&r);
    jn_render_end(&r);
    jn_program_free(p);
}

static void render_messages(const char *source, size_t n, const json_t *messages)
{
    const bg_chat_limits limits = {.output_bytes = 1 << 16, .steps = 20000};
    bg_template *t;
    bg_error err = {0};
    if (bg_template_new(&t, source, n, "t", &err)) return;
    const bg_chat_input in = {.messages = messages, .tools = messages, .bos = "<s>", .eos = "</s>"};
    bg_rendered out;
    bg_status st = bg_chat_render(t, &in, &limits, &out, &err);
    size_t covered = 0;
    for (size_t i = 0; i < out.n_segs; i++) {
        if (out.segs[i].p != out.text.data + covered || out.segs[i].n == 0) abort();
        covered += out.segs[i].n;
    }
    if (covered != out.text.len || (st && out.segs)) abort();
    bg_rendered_release(&out);
    bg_template_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char fallback[] = "[{\"role\":\"user\",\"content\":\"Hi <|x|> \"}]";
    const uint8_t *nul = size ? memchr(data, 0, size) : NULL;
    size_t n = nul ? (size_t)(nul - data) : size;
    json_error_t why;
    json_t *j = nul ? json_loadb((const char *)nul + 1, size - n - 1, 0, &why) : NULL;
    if (!j) j = json_loads(fallback, 0, &why);
    if (json_is_object(j))
        render_object((const char *)data, n, j);
    else
        render_messages((const char *)data, n, j);
    json_decref(j);
    return 0;
}
