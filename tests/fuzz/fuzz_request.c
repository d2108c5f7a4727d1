/* Any bytes as a line: never a crash, and what comes out keeps the promises of input/input.h. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "input/input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int ok)
{
    if (!ok) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    bg_gen gen;
    bg_gen_defaults(&gen);
    bg_error err = {0};
    bg_request r;
    bg_line line = {
        .line = 1, .data = (const char *)data + 1, .n = size - 1, .too_long = data[0] == '!'};
    check(bg_request_parse(&r, &line, &gen, NULL, &err) == BG_OK);
    if (r.id) {
        check(bg_utf8_valid(r.id, strlen(r.id)));
        json_t *id = json_loads(r.id, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        check(json_is_string(id) || json_is_integer(id));
        json_decref(id);
    }
    check(r.content_hash != 0);
    if (r.error_code) {
        check(r.error_message && *r.error_message);
    } else {
        check(r.gen.n >= 1 && r.gen.max_tokens >= 0 && r.gen.temperature >= 0 && r.gen.top_k >= 0);
        if (r.api == BG_API_CHAT)
            check(json_array_size(r.messages) > 0);
        else
            check(r.n_prompts > 0);
        for (int i = 0; i < r.n_prompts; i++)
            check(r.prompts[i].text ? r.prompts[i].n_text > 0 : r.prompts[i].n_ids > 0);
        for (int i = 0; i < r.n_stops; i++)
            check(r.stops[i][0] != 0);
    }
    bg_request_release(&r);
    return 0;
}
