#include "cli/cli.h"

#include <errno.h>
#include <stdlib.h>

#include "base/json.h"

static int code_of(const bg_error *err)
{
    switch (err->status) {
    case BG_OK:
        return BG_EXIT_OK;
    case BG_NOMEM:
        return BG_EXIT_SOFTWARE;
    case BG_IO:
        if (err->os == ENOENT || err->os == EISDIR) return BG_EXIT_NO_INPUT;
        if (err->os == EACCES || err->os == EPERM || err->os == EROFS || err->os == ENOTDIR)
            return BG_EXIT_CANT_CREATE;
        return BG_EXIT_IO;
    case BG_FORMAT:
        return BG_EXIT_DATA;
    case BG_ARG:
        return BG_EXIT_USAGE;
    case BG_BUSY:
        return BG_EXIT_AGAIN;
    case BG_DEVICE:
        return BG_EXIT_DEVICE;
    case BG_INTERNAL:
        return BG_EXIT_SOFTWARE;
    }
    return BG_EXIT_SOFTWARE;
}

int bg_report(const bg_error *err)
{
    fflush(stdout);
    fprintf(stderr, "batchgen: %s\n", err->text);
    if (err->status == BG_INTERNAL)
        fprintf(stderr, "batchgen: this is a bug (%s:%d); please report it with the command\n",
                err->file, err->line);
    return code_of(err);
}

int bg_report_config(const bg_error *err)
{
    int code = bg_report(err);
    return err->status == BG_FORMAT ? BG_EXIT_CONFIG : code;
}

int bg_report_output(const bg_error *err)
{
    int code = bg_report(err);
    return code == BG_EXIT_NO_INPUT ? BG_EXIT_CANT_CREATE : code;
}

int bg_print_json(FILE *out, json_t *take_v, size_t flags)
{
    bg_error err = {0};
    char *text = take_v ? bg_json_text(take_v, flags) : NULL;
    json_decref(take_v);
    if (!text) {
        bg_fail(&err, BG_NOMEM, "out of memory for what is to be printed");
        return bg_report(&err);
    }
    fprintf(out, "%s\n", text);
    free(text);
    return BG_EXIT_OK;
}
