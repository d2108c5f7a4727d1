#include "job/job.h"

#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/io.h"
#include "base/json.h"
#include "job/names.h"
#include "job/notify.h"
#include "job/options.h"
#include "job/shard.h"

/* Where a field's value came from, in rising precedence. */
typedef enum source { FROM_DEFAULT, FROM_CONFIG, FROM_JOB, FROM_ENV, FROM_FLAG } source;

enum { MAX_FILE = 4 << 20 };

bool bg_strings_add(bg_strings *s, const char *text)
{
    char **v = realloc(s->v, (size_t)(s->n + 1) * sizeof *v);
    if (!v) return false;
    s->v = v;
    v[s->n] = strdup(text);
    if (!v[s->n]) return false;
    s->n++;
    return true;
}

void bg_strings_release(bg_strings *s)
{
    for (int i = 0; i < s->n; i++)
        free(s->v[i]);
    free(s->v);
    *s = (bg_strings){0};
}

void bg_job_init(bg_job *job)
{
    *job = (bg_job){0};
}

void bg_job_release(bg_job *job)
{
    for (int i = 0; i < bg_n_options; i++) {
        void *p = (char *)job + bg_options[i].offset;
        if (bg_options[i].type == BG_OPT_STR || bg_options[i].type == BG_OPT_PATH) {
            free(*(char **)p);
            *(char **)p = NULL;
        }
        if (bg_options[i].type == BG_OPT_LIST) bg_strings_release(p);
    }
    free(job->notify_socket);
    *job = (bg_job){0};
}

/* A list given again by a stronger source replaces what a weaker one said. */
static void claim(bg_job *job, const bg_option *o, source *from, source s)
{
    source *f = &from[o - bg_options];
    if (o->type == BG_OPT_LIST && *f != s)
        bg_strings_release((bg_strings *)((char *)job + o->offset));
    *f = s;
}

/* ---- flags
 * ----------------------------------------------------------------------------------------- */

static bg_status set_flag(bg_job *job, const bg_option *o, const char *value, bool negated,
                          const char *where, source *from, bg_error *err)
{
    claim(job, o, from, FROM_FLAG);
    if (o->type == BG_OPT_BOOL && !value) {
        *(bool *)((char *)job + o->offset) = !negated;
        return BG_OK;
    }
    return bg_option_set_text(job, o, value, where, err);
}

static bg_status usable(const bg_option *o, int command, const char *where, bg_error *err)
{
    if (!o) return bg_fail(err, BG_ARG, "%s: no such option; --help lists them", where);
    if (!(o->commands & command))
        return bg_fail(err, BG_ARG, "%s: this command has no such option; --help lists them",
                       where);
    return BG_OK;
}

static bg_status parse_long(bg_job *job, int command, const char *arg, int argc, char *const *argv,
                            int *i, source *from, bg_error *err)
{
    const char *name = arg + 2, *eq = strchr(name, '=');
    size_t n = eq ? (size_t)(eq - name) : strlen(name);
    char where[80];
    snprintf(where, sizeof where, "--%.*s", (int)(n < 64 ? n : 64), name);
    const bg_option *o = bg_option_find(name, n);
    bool negated = false;
    if (!o && n > 3 && strncmp(name, "no-", 3) == 0) {
        o = bg_option_find(name + 3, n - 3);
        if (o && o->type != BG_OPT_BOOL) o = NULL;
        negated = o != NULL;
    }
    bg_status st = usable(o, command, where, err);
    if (st || !o) return st;
    const char *value = eq ? eq + 1 : NULL;
    if (o->type == BG_OPT_BOOL) {
        if (value && negated) return bg_fail(err, BG_ARG, "%s: takes no value", where);
    } else if (!value) {
        if (*i + 1 >= argc) return bg_fail(err, BG_ARG, "%s: a value must follow", where);
        value = argv[++*i];
    }
    return set_flag(job, o, value, negated, where, from, err);
}

static bg_status parse_short(bg_job *job, int command, const char *arg, int argc, char *const *argv,
                             int *i, source *from, bg_error *err)
{
    for (const char *c = arg + 1; *c; c++) {
        char where[] = {'-', *c, 0};
        const bg_option *o = bg_option_by_letter(*c);
        bg_status st = usable(o, command, where, err);
        if (st || !o) return st;
        const char *value = NULL;
        if (o->type != BG_OPT_BOOL) {
            value = c[1] ? c + 1 : NULL;
            if (!value && *i + 1 >= argc)
                return bg_fail(err, BG_ARG, "%s: a value must follow", where);
            if (!value) value = argv[++*i];
        }
        st = set_flag(job, o, value, false, where, from, err);
        if (st || value) return st;
    }
    return BG_OK;
}

static bg_status positional(bg_job *job, int command, const char *arg, source *from, bg_error *err)
{
    const char *name = command & (BG_CMD_INSPECT | BG_CMD_BENCH) ? "model"
                       : command & BG_CMD_TOKENIZE               ? "text"
                                                                 : "input";
    const bg_option *o = bg_option_find(name, strlen(name));
    if (o->type != BG_OPT_LIST && from[o - bg_options] == FROM_FLAG)
        return bg_fail(err, BG_ARG, "%s: one %s is enough", arg, name);
    claim(job, o, from, FROM_FLAG);
    return bg_option_set_text(job, o, arg, arg, err);
}

static bg_status parse_flags(bg_job *job, int command, int argc, char *const *argv, source *from,
                             bg_error *err)
{
    bg_status st = BG_OK;
    bool only_words = false;
    for (int i = 0; !st && i < argc; i++) {
        const char *a = argv[i];
        if (only_words || a[0] != '-' || !a[1])
            st = positional(job, command, a, from, err);
        else if (strcmp(a, "--") == 0)
            only_words = true;
        else if (a[1] == '-')
            st = parse_long(job, command, a, argc, argv, &i, from, err);
        else
            st = parse_short(job, command, a, argc, argv, &i, from, err);
    }
    return st;
}

/* ---- environment and files
 * --------------------------------------------------------------------------- */

static void env_name(const bg_option *o, char *out, size_t size)
{
    snprintf(out, size, "BATCHGEN_%s", o->name);
    for (char *c = out; *c; c++) {
        if (*c == '-') *c = '_';
        if (*c >= 'a' && *c <= 'z') *c = (char)(*c - 32);
    }
}

static const char *env_get(char *const *env, const char *name)
{
    size_t n = strlen(name);
    for (int i = 0; env && env[i]; i++)
        if (strncmp(env[i], name, n) == 0 && env[i][n] == '=') return env[i] + n + 1;
    return NULL;
}

static bg_status parse_env(bg_job *job, int command, char *const *env, source *from, bg_error *err)
{
    for (int i = 0; i < bg_n_options; i++) {
        const bg_option *o = &bg_options[i];
        bool wanted = o->in_files || strcmp(o->name, "job") == 0;
        if (!wanted || !(o->commands & command) || from[i] >= FROM_ENV) continue;
        char name[80];
        env_name(o, name, sizeof name);
        const char *v = env_get(env, name);
        if (!v || !*v) continue;
        claim(job, o, from, FROM_ENV);
        bg_status st = bg_option_set_text(job, o, v, name, err);
        if (st) return st;
    }
    return BG_OK;
}

static bg_status parse_file(bg_job *job, int command, const char *path, source s, source *from,
                            bg_error *err)
{
    char *data = NULL, *copy = strdup(path);
    size_t n;
    if (!copy) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    bg_status st = bg_read_file(path, MAX_FILE, &data, &n, err);
    json_t *root = NULL;
    if (!st) {
        json_error_t je;
        bool nomem;
        root = bg_json_load(data, n, JSON_REJECT_DUPLICATES, &je, &nomem);
        if (nomem)
            st = bg_fail(err, BG_NOMEM, "%s: out of memory", path);
        else if (!root)
            st = bg_fail(err, BG_FORMAT, "%s: line %d, column %d: %s", path, je.line, je.column,
                         je.text);
        else if (!json_is_object(root))
            st = bg_fail(err, BG_FORMAT, "%s: must hold one JSON object of options", path);
    }
    const char *dir = dirname(copy), *key;
    json_t *v;
    if (!st) json_object_foreach(root, key, v)
        {
            if (strcmp(key, "$schema") == 0) continue;
            char where[256];
            snprintf(where, sizeof where, "%s: %s", path, key);
            const bg_option *o = bg_option_find(key, strlen(key));
            if (!o || !o->in_files) {
                st = bg_fail(err, BG_FORMAT,
                             "%s: no such option; schemas/job.schema.json lists them", where);
                break;
            }
            if (!(o->commands & command) || from[o - bg_options] > s || json_is_null(v)) continue;
            claim(job, o, from, s);
            st = bg_option_set_json(job, o, v, where, dir, err);
            if (st) break;
        }
    if (st == BG_ARG) st = err->status = BG_FORMAT; /* a bad value in a file is a bad file */
    json_decref(root);
    free(data);
    free(copy);
    return st;
}

static bg_status parse_config(bg_job *job, int command, char *const *env, source *from,
                              bg_error *err)
{
    const char *xdg = env_get(env, "XDG_CONFIG_HOME"), *home = env_get(env, "HOME");
    bg_buf path = {0};
    if (xdg && *xdg)
        bg_buf_printf(&path, "%s/batchgen/config.json", xdg);
    else if (home && *home)
        bg_buf_printf(&path, "%s/.config/batchgen/config.json", home);
    bg_status st = BG_OK;
    if (path.data && access(path.data, F_OK) == 0)
        st = parse_file(job, command, path.data, FROM_CONFIG, from, err);
    bg_buf_release(&path);
    return st;
}

static bg_status set_defaults(bg_job *job, bg_error *err)
{
    bg_status st = BG_OK;
    for (int i = 0; !st && i < bg_n_options; i++)
        if (bg_options[i].def)
            st =
                bg_option_set_text(job, &bg_options[i], bg_options[i].def, bg_options[i].name, err);
    return st;
}

/* Shards, fields in names, and what the service manager says. */
static bg_status settle(bg_job *job, int command, char *const *env, bg_error *err)
{
    const char *socket;
    bg_status st = bg_shard_resolve(job->shard, env, &job->shard_index, &job->shard_count, err);
    if (st || command != BG_CMD_RUN) return st;
    char **names[] = {&job->output, &job->error_file, &job->summary, &job->log_file,
                      &job->metrics_file};
    int64_t now_s = bg_wall_ns() / 1000000000;
    for (size_t i = 0; !st && i < sizeof names / sizeof *names; i++) {
        char *name;
        st = bg_name_expand(*names[i], now_s, job->shard_index, job->shard_count, &name, err);
        if (st) break;
        free(*names[i]);
        *names[i] = name;
    }
    bg_notify_env(env, &socket, &job->watchdog_us);
    if (!st && socket) {
        job->notify_socket = strdup(socket);
        if (!job->notify_socket) st = bg_fail(err, BG_NOMEM, "out of memory");
    }
    return st;
}

bg_status bg_job_resolve(bg_job *job, int command, int argc, char *const *argv, char *const *env,
                         bg_error *err)
{
    source *from = calloc((size_t)bg_n_options, sizeof *from);
    if (!from) return bg_fail(err, BG_NOMEM, "out of memory");
    bg_status st = set_defaults(job, err);
    if (!st) st = parse_flags(job, command, argc, argv, from, err);
    if (!st && !job->help) {
        st = parse_env(job, command, env, from, err);
        if (!st && job->job_file) st = parse_file(job, command, job->job_file, FROM_JOB, from, err);
        if (!st) st = parse_config(job, command, env, from, err);
        if (!st) st = settle(job, command, env, err);
    }
    free(from);
    return st;
}
