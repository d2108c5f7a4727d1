/* job/signals.h - signals as data: blocked in every thread, read from a descriptor.
 *
 * The first SIGTERM, SIGINT or SIGUSR1 asks for an orderly stop; a second SIGINT or SIGTERM ends
 * the process at once with 128 + its number (what was committed stays). SIGQUIT asks for a status
 * line, SIGHUP for the log file to be reopened; SIGPIPE and SIGXFSZ are ignored. Block before the
 * first thread or child exists. */
#ifndef BG_JOB_SIGNALS_H
#define BG_JOB_SIGNALS_H

#include <signal.h>

#include "base/error.h"

typedef struct bg_signals {
    int fd;
    sigset_t before;
} bg_signals;

bg_status bg_signals_block(bg_signals *s, bg_error *err);
void bg_signals_restore(bg_signals *s);
/* The next signal waiting in fd, or 0. */
int bg_signals_take(bg_signals *s);

#endif
