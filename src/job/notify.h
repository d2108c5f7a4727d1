/* job/notify.h - telling others: the service manager while a job runs, a command when it ended.
 *
 * The first part is systemd's sd_notify protocol, spoken without its library: datagrams of
 * NAME=VALUE lines to the socket that NOTIFY_SOCKET names (a path, or "@name" in the abstract
 * space). Sending is best effort: no failure of it reaches the job. One thread. */
#ifndef BG_JOB_NOTIFY_H
#define BG_JOB_NOTIFY_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

typedef struct bg_notify bg_notify;

/* NOTIFY_SOCKET (NULL: none) and WATCHDOG_USEC (0: none, or meant for another process:
 * WATCHDOG_PID) of an environment; the text is the environment's. */
void bg_notify_env(char *const *env, const char **socket, int64_t *watchdog_us);

/* Without a socket (NULL or "") *n is NULL, which every function here takes and ignores. BG_ARG: an
 * address that no socket can have. BG_IO. BG_NOMEM. */
bg_status bg_notify_open(bg_notify **n, const char *socket, int64_t watchdog_us, bg_error *err);
void bg_notify_close(bg_notify *n);

/* READY=1: the model is loaded and the job runs. */
void bg_notify_ready(bg_notify *n, const char *status);
/* STOPPING=1, once: the job winds down and needs up to grace_ns, and then some time to commit. */
void bg_notify_stopping(bg_notify *n, int64_t grace_ns);
/* To be called several times a second, also while the model loads. Sends what is due: WATCHDOG=1 at
 * half of the watchdog's interval; STATUS= when it changed, once a second at most (NULL: no
 * change); EXTEND_TIMEOUT_USEC before READY, and from STOPPING on until grace and a minute are
 * over. */
void bg_notify_tick(bg_notify *n, const char *status);

typedef struct bg_notify_command {
    const char *command; /* for /bin/sh -c */
    const char *summary; /* its standard input: JSON */
    size_t n_summary;
    const char *status, *output; /* BATCHGEN_STATUS, BATCHGEN_OUTPUT */
    int exit_status;             /* BATCHGEN_EXIT */
    char *const *env;            /* the rest of its environment; NULL: this process's */
    int64_t limit_ns;            /* then SIGKILL to it and all it started; 0: 60 s */
    bg_notify *manager;          /* ticks meanwhile; or NULL */
} bg_notify_command;

/* Runs it and waits. Its standard output is this process's standard error (standard output may be
 * the results), no signal is blocked or ignored in it, no other descriptor is open in it, and it
 * does not see NOTIFY_SOCKET. BG_IO: it could not be started, ended otherwise than with 0, or took
 * too long; the text says which: worth a warning, and no reason for the job to fail. BG_NOMEM. */
bg_status bg_notify_run(const bg_notify_command *c, bg_error *err);

#endif
