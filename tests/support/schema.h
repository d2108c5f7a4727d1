/* support/schema.h - checks a value against as much of JSON Schema as the files in schemas/ use. */
#ifndef BG_TESTS_SCHEMA_H
#define BG_TESTS_SCHEMA_H

#include <stdbool.h>
#include <stddef.h>

#include <jansson.h>

/* why: what does not fit, or which keyword of the schema is not known here (that never fits). */
bool schema_fits(json_t *schema, json_t *v, char *why, size_t size);

#endif
