/* output/cat.h - the verified results of outputs as text, in their order or by record. */
#ifndef BG_OUTPUT_CAT_H
#define BG_OUTPUT_CAT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "output/sink.h"

typedef struct bg_cat_config {
    const char *const *paths; /* outputs, or error files */
    int n_paths;
    bool ordered; /* by record, over all of them */
    /* Each line becomes an object with these dotted paths as names, null where there is no such
     * value. 0: lines stay as they are. */
    const char *const *fields;
    int n_fields;
    /* What is good to know of a file: an uncommitted tail was left out, its journal cannot be used.
     * May be NULL. */
    void (*note)(void *ctx, const char *text);
    void *ctx;
} bg_cat_config;

/* BG_FORMAT: damaged; what comes before the damage was written, unless ordered. The sink is not
 * finished. BG_ARG, BG_IO, BG_NOMEM. */
bg_status bg_cat(const bg_cat_config *c, bg_sink *sink, int64_t *n_lines, bg_error *err);

#endif
