/* Any job file, command line and environment: a resolved job within its options' bounds, or an
 * error with a text; the same both times.
 *
 * Input: a byte that picks the command; the job file up to a byte 1 (or the end); then words, one a
 * line. "@NAME=VALUE" goes into the environment, every other word is an argument. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "job/job.h"
#include "job/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_WORDS = 64 };

static void check(int ok)
{
    if (!ok) abort();
}

static void check_option(const bg_job *job, const bg_option *o)
{
    const char *p = (const char *)job + o->offset;
    double v = 0;
    switch (o->type) {
    case BG_OPT_INT:
    case BG_OPT_SIZE:
        v = (double)*(const int64_t *)(const void *)p;
        break;
    case BG_OPT_REAL:
    case BG_OPT_TIME:
        v = *(const double *)(const void *)p;
        check(v == v);
        break;
    case BG_OPT_BOOL:
        check(*(const unsigned char *)p <= 1);
        return;
    case BG_OPT_CHOICE: {
        int n = 1;
        for (const char *c = o->choices; *c; c++)
            n += *c == ',';
        check(*(const int *)(const void *)p >= 0 && *(const int *)(const void *)p < n);
        return;
    }
    case BG_OPT_LIST: {
        const bg_strings *s = (const bg_strings *)(const void *)p;
        for (int i = 0; i < s->n; i++)
            check(s->v[i] != NULL);
        return;
    }
    default:
        return;
    }
    /* An option of another command keeps its default, which is within its bounds, too. */
    check(o->max < o->min || (v >= o->min && v <= o->max));
}

static bg_status resolve(int command, int argc, char **argv, char **env, bg_error *err)
{
    bg_job job;
    bg_job_init(&job);
    bg_status st = bg_job_resolve(&job, command, argc, argv, env, err);
    if (st == BG_OK && !job.help)
        for (int i = 0; i < bg_n_options; i++)
            check_option(&job, &bg_options[i]);
    bg_job_release(&job);
    return st;
}

/* Words must not name files that block or never end: only the job file lies in a folder. */
static int harmless(const char *word)
{
    return strchr(word, '/') == NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64], job_word[80];
    if (fd < 0) {
        fd = memfd_create("job", 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        snprintf(job_word, sizeof job_word, "--job=%s", path);
    }
    if (fd < 0 || size < 1) return 0;
    const uint8_t *file = data + 1, *end = memchr(file, 1, size - 1);
    size_t n_file = end ? (size_t)(end - file) : size - 1, n_words = size - 1 - n_file;
    check(ftruncate(fd, 0) == 0 && pwrite(fd, file, n_file, 0) == (ssize_t)n_file);

    char *words = strndup(end ? (const char *)end + 1 : "", n_words ? n_words - 1 : 0),
         *next = words;
    char *argv[MAX_WORDS + 2] = {NULL}, *env[MAX_WORDS + 2] = {NULL};
    int argc = 0, n_env = 0;
    check(words != NULL);
    int command = 1 << data[0] % 10;
    if (n_file && command & (BG_CMD_RUN | BG_CMD_CHECK | BG_CMD_INSPECT | BG_CMD_BENCH))
        argv[argc++] = job_word;
    for (char *w; (w = strsep(&next, "\n")) && argc < MAX_WORDS && n_env < MAX_WORDS;) {
        if (!*w || !harmless(w)) continue;
        if (*w == '@')
            env[n_env++] = w + 1;
        else
            argv[argc++] = w;
    }
    bg_error err = {0}, again = {0};
    bg_status st = resolve(command, argc, argv, env, &err);
    check(st == BG_OK || (err.status == st && err.text[0]));
    check(resolve(command, argc, argv, env, &again) == st && strcmp(err.text, again.text) == 0);
    free(words);
    return 0;
}
