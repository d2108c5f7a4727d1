/* cli/cli.h - the subcommands: each parses, calls, prints, and returns the exit status. */
#ifndef BG_CLI_CLI_H
#define BG_CLI_CLI_H

#include "job/job.h"

/* sysexits(3), and what only this program says */
enum {
    BG_EXIT_OK = 0,
    BG_EXIT_SOME_FAILED = 1, /* all records done, some have error results */
    BG_EXIT_USAGE = 64,
    BG_EXIT_DATA = 65,
    BG_EXIT_NO_INPUT = 66,
    BG_EXIT_DEVICE = 69,
    BG_EXIT_SOFTWARE = 70,
    BG_EXIT_CANT_CREATE = 73,
    BG_EXIT_IO = 74,
    BG_EXIT_AGAIN = 75, /* not finished: start again to go on */
    BG_EXIT_CONFIG = 78,
};

typedef struct bg_command {
    const char *name;
    int bit; /* BG_CMD_ */
    const char *arguments, *help;
    int (*run)(const bg_job *job);
    const char *more; /* paragraphs after the options of --help */
} bg_command;

int bg_cmd_run(const bg_job *job);
int bg_cmd_check(const bg_job *job);
int bg_cmd_inspect(const bg_job *job);
int bg_cmd_bench(const bg_job *job);
int bg_cmd_tokenize(const bg_job *job);
int bg_cmd_render(const bg_job *job);
int bg_cmd_status(const bg_job *job);
int bg_cmd_cat(const bg_job *job);
int bg_cmd_merge(const bg_job *job);
int bg_cmd_repair(const bg_job *job);

/* Prints "batchgen: text" and returns the exit status that fits. */
int bg_report(const bg_error *err);
/* The same where the model or a job file failed: bad data there is bad configuration. */
int bg_report_config(const bg_error *err);
/* The same where the output could not be opened. */
int bg_report_output(const bg_error *err);

/* Prints a line (or lines) of JSON and gives BG_EXIT_OK; NULL, or no memory for its text, is told
 * as missing memory. */
int bg_print_json(FILE *out, json_t *take_v, size_t flags);

#endif
