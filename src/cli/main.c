#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "cli/cli.h"

static const bg_command commands[] = {
    {"run", BG_CMD_RUN, "INPUT... -o OUTPUT -m MODEL",
     "generate for every line; resumes what was started", bg_cmd_run,
     "Start the same command again after any stop, kill or crash: it goes on where it was.\n"
     "Every option can stand in the environment (BATCHGEN_MAX_NUM_SEQS=32), in a job file or in\n"
     "the user's config file; flag > environment > job file > config file.\n\n"
     "Exit status: 0 all records done; 1 done, some have error results; 64 usage; 65 bad data;\n"
     "66 no input; 69 a rank failed for good; 73 cannot create; 74 I/O error, disk full;\n"
     "75 not finished, start again; 78 bad configuration or model.\n"},
    {"check", BG_CMD_CHECK, "INPUT... [-m MODEL]",
     "list all bad lines, count tokens, estimate; runs nothing", bg_cmd_check,
     "Exit status: 0 all lines are good, 65 some are bad.\n"},
    {"inspect", BG_CMD_INSPECT, "MODEL", "show a model's metadata, tensors, memory and TP plan",
     bg_cmd_inspect, NULL},
    {"bench", BG_CMD_BENCH, "-m MODEL", "measure prefill and decode rates, time by op",
     bg_cmd_bench, NULL},
    {"tokenize", BG_CMD_TOKENIZE, "-m MODEL [TEXT]", "text to token ids", bg_cmd_tokenize, NULL},
    {"render", BG_CMD_RENDER, "INPUT -m MODEL",
     "messages to prompt text, through the chat template", bg_cmd_render, NULL},
    {"status", BG_CMD_STATUS, "OUTPUT...", "how far a job is, by its output and journal",
     bg_cmd_status,
     "Reads while a run writes, and never disturbs it.\n"
     "Exit status: 0 finished; 75 running or unfinished; 65 damaged or without a journal;\n"
     "66 not there.\n"},
    {"cat", BG_CMD_CAT, "OUTPUT... [-o FILE]", "verified results as text, also of a running job",
     bg_cmd_cat,
     "FILE is compressed by its name: .gz, .zst, .lz4. It appears when it is complete.\n"
     "Exit status: 0 all results are good; 65 damaged: what is before the damage was printed.\n"},
    {"merge", BG_CMD_MERGE, "SHARD... -o OUTPUT", "the outputs of all shards of a job as one",
     bg_cmd_merge,
     "All shards must be finished. Results come in the order of the input, with a journal: run of\n"
     "the whole job finds it done.\n"},
    {"repair", BG_CMD_REPAIR, "OUTPUT [ERRORFILE]", "rebuild a lost or damaged journal",
     bg_cmd_repair,
     "Exit status: 0 no result was lost; 65 some were: run the job again to make them.\n"},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void usage(FILE *out)
{
    fputs("batchgen " BG_VERSION ": offline batch generation with GGUF models\n\n"
          "  batchgen run prompts.jsonl -o out.jsonl.lz4 -m model.gguf\n\nCommands:\n",
          out);
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-10s %-30s %s\n", commands[i].name, commands[i].arguments,
                commands[i].help);
    fputs("\nbatchgen COMMAND --help shows a command's options.\n", out);
}

static void help(const bg_command *c)
{
    printf("batchgen %s %s\n  %s\n", c->name, c->arguments, c->help);
    bg_job_print_options(stdout, c->bit);
    if (c->more) printf("\n%s", c->more);
}

/* A standard stream that was closed would be the number of the next file opened, and messages would
 * go into the results. Each gets a descriptor on which its use fails, as it does on a closed one.
 */
static bool hold_standard_streams(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd)
            return false;
    return true;
}

/* A mapped file that was cut short has no bytes to give. Results that were committed stay. */
static void on_lost_page(int sig)
{
    static const char text[] = "batchgen: the model became shorter, or its device failed, while it "
                               "was read\n";
    (void)sig;
    ssize_t n = write(STDERR_FILENO, text, sizeof text - 1);
    (void)n;
    _exit(BG_EXIT_IO);
}

static int flushed(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    fprintf(stderr, "batchgen: standard output: cannot write: %s\n", strerror(errno));
    return BG_EXIT_IO;
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return BG_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        usage(stdout);
        return 0;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        puts("batchgen " BG_VERSION);
        return 0;
    }
    if (strcmp(name, "--job-schema") == 0) { /* makes schemas/job.schema.json */
        json_t *s = bg_job_schema();
        char *text = s ? bg_json_text(s, JSON_INDENT(2)) : NULL;
        if (text) puts(text);
        free(text);
        json_decref(s);
        return text ? 0 : BG_EXIT_SOFTWARE;
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        const bg_command *c = &commands[i];
        if (strcmp(name, c->name) != 0) continue;
        bg_job job;
        bg_error err = {0};
        bg_job_init(&job);
        int code;
        if (bg_job_resolve(&job, c->bit, argc - 2, argv + 2, environ, &err)) {
            code = bg_report_config(&err);
        } else if (job.help) {
            help(c);
            code = 0;
        } else {
            code = c->run(&job);
        }
        bg_job_release(&job);
        return code;
    }
    fprintf(stderr, "batchgen: %s: no such command; batchgen --help lists them\n", name);
    return BG_EXIT_USAGE;
}

int main(int argc, char **argv)
{
    if (!hold_standard_streams()) return BG_EXIT_SOFTWARE;
    signal(SIGBUS, on_lost_page);
    return flushed(dispatch(argc, argv));
}
