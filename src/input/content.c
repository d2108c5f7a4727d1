/* What pairs a record with an earlier result of the same content: a hash of everything asked.
 *
 * Fields that say null count as not given. The order of the body's fields, of a message's and of a
 * content part's does not matter, because they are looked up by name. Elsewhere, in tools, calls
 * and template variables, it does: a chat template may print them as they came. Batch lines and
 * plain lines differ: their results have other forms. */
#include "input/parts.h"

#include <string.h>

#include "base/hash.h"

enum {
    TAG_NULL = 1,
    TAG_FALSE,
    TAG_TRUE,
    TAG_INTEGER,
    TAG_REAL,
    TAG_STRING,
    TAG_ARRAY,
    TAG_OBJECT
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    const uint64_t pair[2] = {a, b};
    return bg_hash64(pair, sizeof pair, 0);
}

/* by_name: levels from here on whose objects have no order. Recursion: as deep as the line nests,
 * which the caller has limited. */
static uint64_t of_value(json_t *v, int by_name)
{
    uint64_t h;
    const char *key;
    size_t n_key;
    json_t *item;
    switch (json_typeof(v)) {
    case JSON_NULL:
        return TAG_NULL;
    case JSON_FALSE:
        return TAG_FALSE;
    case JSON_TRUE:
        return TAG_TRUE;
    case JSON_INTEGER:
        return mix(TAG_INTEGER, (uint64_t)json_integer_value(v));
    case JSON_REAL: {
        double d = json_real_value(v);
        memcpy(&h, &d, sizeof h);
        return mix(TAG_REAL, h);
    }
    case JSON_STRING:
        return bg_hash64(json_string_value(v), json_string_length(v), TAG_STRING);
    case JSON_ARRAY:
        h = TAG_ARRAY;
        for (size_t i = 0; i < json_array_size(v); i++)
            h = mix(h, of_value(json_array_get(v, i), by_name - 1));
        return h;
    case JSON_OBJECT:
        break;
    }
    h = TAG_OBJECT;
    json_object_keylen_foreach(v, key, n_key, item)
    {
        uint64_t field = mix(bg_hash64(key, n_key, TAG_STRING),
                             of_value(item, strcmp(key, "content") == 0 ? by_name - 1 : 0));
        h = by_name > 0 ? h + field : mix(h, field); /* a sum has no order */
    }
    return mix(h, TAG_OBJECT);
}

uint64_t bg_parse_content(const bg_parse *c)
{
    /* messages is an array of objects whose content may be an array of objects. */
    enum { MESSAGE_LEVELS = 4 };
    uint64_t sum = 0;
    const char *key;
    size_t n_key;
    json_t *item;
    json_object_keylen_foreach(c->body, key, n_key, item)
    {
        if (json_is_null(item)) continue;
        if (!c->r->openai && (strcmp(key, "id") == 0 || strcmp(key, "custom_id") == 0)) continue;
        int by_name = strcmp(key, "messages") == 0 ? MESSAGE_LEVELS : 0;
        sum += mix(bg_hash64(key, n_key, TAG_STRING), of_value(item, by_name));
    }
    uint64_t form = (c->r->api == BG_API_CHAT ? 2u : 0u) | (c->r->openai ? 1u : 0u);
    uint64_t h = mix(sum, form);
    return h ? h : 1;
}
