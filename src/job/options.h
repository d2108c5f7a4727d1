/* job/options.h - the one table of options. */
#ifndef BG_JOB_OPTIONS_H
#define BG_JOB_OPTIONS_H

#include "job/job.h"

typedef enum bg_option_type {
    BG_OPT_STR,    /* char * */
    BG_OPT_PATH,   /* char *; in a job file, relative to the file's folder */
    BG_OPT_INT,    /* int64_t */
    BG_OPT_SIZE,   /* int64_t bytes: 512KiB, 2G, 100MB */
    BG_OPT_REAL,   /* double */
    BG_OPT_TIME,   /* double seconds: 90, 1.5h, 1h30m, 02:30:00 */
    BG_OPT_BOOL,   /* bool: --name, --no-name; in files true or false */
    BG_OPT_CHOICE, /* int: index into choices */
    BG_OPT_LIST,   /* bg_strings: may be given several times; an array in files */
} bg_option_type;

typedef struct bg_option {
    const char *name;    /* "max-num-seqs"; env BATCHGEN_MAX_NUM_SEQS; key "max_num_seqs" */
    const char *aliases; /* other long names, comma-separated; NULL: none */
    char letter;         /* 0: none */
    bg_option_type type;
    size_t offset;       /* of the field in bg_job */
    const char *choices; /* BG_OPT_CHOICE: comma-separated */
    double min, max;     /* numbers; max < min: no bounds */
    const char *def;     /* default as text; NULL: unset (NULL, 0, false, empty) */
    int commands;        /* BG_CMD_ bits */
    bool in_files;       /* allowed in job and config files and in the environment */
    const char *group;   /* heading in --help */
    const char *arg;     /* what follows, in --help */
    const char *help;
} bg_option;

extern const bg_option bg_options[];
extern const int bg_n_options;

const bg_option *bg_option_find(const char *name, size_t n); /* long name or alias, '-' or '_' */
const bg_option *bg_option_by_letter(char letter);
/* Sets the field from text, or from a JSON value; where names the source in messages ("--top-k",
 * "job.json: top_k"); base_dir (NULL: none) is put before relative paths. BG_ARG, BG_NOMEM. */
bg_status bg_option_set_text(bg_job *job, const bg_option *o, const char *text, const char *where,
                             bg_error *err);
bg_status bg_option_set_json(bg_job *job, const bg_option *o, const json_t *v, const char *where,
                             const char *base_dir, bg_error *err);

#endif
