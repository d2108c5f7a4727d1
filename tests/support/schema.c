#include "support/schema.h"

#include <stdio.h>
#include <string.h>

typedef struct check {
    json_t *root;
    char *why;
    size_t size;
} check;

static bool fits(const check *c, json_t *schema, json_t *v);

static bool no(const check *c, const char *what, const char *name)
{
    snprintf(c->why, c->size, "%s %s", what, name);
    return false;
}

static bool known(const char *key)
{
    static const char *const names[] = {
        "$schema",     "$defs",    "$ref",       "title",
        "description", "type",     "enum",       "const",
        "items",       "required", "properties", "additionalProperties",
        "oneOf",       "minimum",  "maximum",    "exclusiveMinimum",
        "minItems",    "maxItems", "minLength",  "pattern"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(key, names[i]) == 0) return true;
    return false;
}

static bool is_type(const char *t, const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return !strcmp(t, "object");
    case JSON_ARRAY:
        return !strcmp(t, "array");
    case JSON_STRING:
        return !strcmp(t, "string");
    case JSON_INTEGER:
        return !strcmp(t, "integer") || !strcmp(t, "number");
    case JSON_REAL: {
        double d = json_real_value(v);
        bool whole = d > -9e15 && d < 9e15 && d == (double)(long long)d;
        return !strcmp(t, "number") || (whole && !strcmp(t, "integer"));
    }
    case JSON_NULL:
        return !strcmp(t, "null");
    default:
        return !strcmp(t, "boolean");
    }
}

static bool type_fits(json_t *type, const json_t *v)
{
    json_t *t;
    size_t i;
    if (!type) return true;
    if (json_is_string(type)) return is_type(json_string_value(type), v);
    json_array_foreach(type, i, t)
    {
        if (is_type(json_string_value(t), v)) return true;
    }
    return false;
}

/* pattern is only ever the one of a hash */
static bool pattern_fits(const char *pattern, const char *s)
{
    return !strcmp(pattern, "^[0-9a-f]{16}$") && strlen(s) == 16 &&
           strspn(s, "0123456789abcdef") == 16;
}

static bool object_fits(const check *c, json_t *schema, json_t *v)
{
    json_t *props = json_object_get(schema, "properties"), *item;
    json_t *more = json_object_get(schema, "additionalProperties");
    const char *key;
    size_t i;
    json_array_foreach(json_object_get(schema, "required"), i, item)
    {
        if (!json_object_get(v, json_string_value(item)))
            return no(c, "missing:", json_string_value(item));
    }
    json_object_foreach(v, key, item)
    {
        json_t *s = json_object_get(props, key);
        if (!s && json_is_false(more)) return no(c, "not known:", key);
        if (!s) s = more;
        if (json_is_object(s) && !fits(c, s, item)) return false;
    }
    return true;
}

static bool simple_fits(const check *c, json_t *schema, json_t *v)
{
    json_t *s, *item;
    size_t i;
    if (!type_fits(json_object_get(schema, "type"), v)) return no(c, "type", "");
    if ((s = json_object_get(schema, "const")) && !json_equal(s, v)) return no(c, "const", "");
    if ((s = json_object_get(schema, "enum"))) {
        bool in = false;
        json_array_foreach(s, i, item) in = in || json_equal(item, v);
        if (!in) return no(c, "enum", "");
    }
    double d = json_number_value(v);
    if (json_is_number(v)) {
        if ((s = json_object_get(schema, "minimum")) && !(d >= json_number_value(s)))
            return no(c, "minimum", "");
        if ((s = json_object_get(schema, "maximum")) && !(d <= json_number_value(s)))
            return no(c, "maximum", "");
        if ((s = json_object_get(schema, "exclusiveMinimum")) && !(d > json_number_value(s)))
            return no(c, "exclusiveMinimum", "");
    }
    if (json_is_string(v)) {
        if ((s = json_object_get(schema, "minLength")) && json_integer_value(s) > 0 &&
            json_string_length(v) == 0)
            return no(c, "minLength", "");
        if ((s = json_object_get(schema, "pattern")) &&
            !pattern_fits(json_string_value(s), json_string_value(v)))
            return no(c, "pattern", "");
    }
    return true;
}

static bool array_fits(const check *c, json_t *schema, json_t *v)
{
    json_t *s, *item;
    size_t i;
    json_int_t n = (json_int_t)json_array_size(v);
    if ((s = json_object_get(schema, "minItems")) && n < json_integer_value(s))
        return no(c, "minItems", "");
    if ((s = json_object_get(schema, "maxItems")) && n > json_integer_value(s))
        return no(c, "maxItems", "");
    if ((s = json_object_get(schema, "items"))) {
        json_array_foreach(v, i, item)
        {
            if (!fits(c, s, item)) return false;
        }
    }
    return true;
}

static bool one_fits(const check *c, json_t *list, json_t *v)
{
    json_t *item;
    size_t i;
    int n = 0;
    char texts[400] = "", why[100] = "";
    check inner = {c->root, why, sizeof why};
    json_array_foreach(list, i, item)
    {
        if (fits(&inner, item, v))
            n++;
        else
            snprintf(texts + strlen(texts), sizeof texts - strlen(texts), " [%s]", why);
    }
    return n == 1 ? true : no(c, n ? "several of oneOf fit" : "oneOf:", texts);
}

static bool fits(const check *c, json_t *schema, json_t *v)
{
    const char *key;
    json_t *s;
    json_object_foreach(schema, key, s)
    {
        if (!known(key)) return no(c, "the schema uses", key);
    }
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    if (ref) {
        s = strncmp(ref, "#/$defs/", 8)
                ? NULL
                : json_object_get(json_object_get(c->root, "$defs"), ref + 8);
        return s ? fits(c, s, v) : no(c, "no such definition:", ref);
    }
    if (!simple_fits(c, schema, v)) return false;
    if (json_is_object(v) && !object_fits(c, schema, v)) return false;
    if (json_is_array(v) && !array_fits(c, schema, v)) return false;
    s = json_object_get(schema, "oneOf");
    return s ? one_fits(c, s, v) : true;
}

bool schema_fits(json_t *schema, json_t *v, char *why, size_t size)
{
    check c = {schema, why, size};
    why[0] = 0;
    return fits(&c, schema, v);
}
