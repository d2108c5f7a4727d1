#include "base/json.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

/* jansson has one allocator for all, without a context; and a thread's calls are its own. */
static _Thread_local bool short_of_memory;

static void *watched_malloc(size_t n)
{
    void *p = malloc(n);
    if (!p) short_of_memory = true;
    return p;
}

static void watch(void)
{
    json_set_alloc_funcs(watched_malloc, free);
}

static void begin(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch);
    short_of_memory = false;
}

json_t *bg_json_load(const char *s, size_t n, size_t flags, json_error_t *why, bool *nomem)
{
    begin();
    json_t *v = json_loadb(s, n, flags, why);
    *nomem = short_of_memory;
    if (!*nomem) return v;
    json_decref(v);
    return NULL;
}

char *bg_json_text(const json_t *v, size_t flags)
{
    begin();
    char *text = json_dumps(v, flags);
    if (!short_of_memory) return text;
    free(text);
    return NULL;
}

json_t *bg_json_name(const char *s)
{
    char *copy = strdup(s);
    if (copy) bg_utf8_mend(copy);
    json_t *v = copy ? json_string(copy) : NULL;
    free(copy);
    return v;
}
