#include "job/notify.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/io.h"

#define SECOND INT64_C(1000000000)

enum {
    EXTEND_S = 30,       /* what one EXTEND_TIMEOUT_USEC asks for */
    EXTEND_EVERY_S = 10, /* and how often */
    COMMIT_S = 60,       /* after the grace time */
    LIMIT_S = 60,
    POLL_MS = 20,
};

extern char **environ;

struct bg_notify {
    int fd;
    struct sockaddr_un addr;
    socklen_t addr_len;
    int64_t watchdog_ns; /* half of the interval; 0: none */
    int64_t watchdog_last, status_last, extend_last;
    int64_t stop_end; /* until when to ask for more time; 0: not stopping */
    bool ready;
    char status[256]; /* what was sent last */
};

/* ---- the service manager
 * ----------------------------------------------------------------------------- */

static const char *env_get(char *const *env, const char *name)
{
    size_t n = strlen(name);
    for (int i = 0; env && env[i]; i++)
        if (strncmp(env[i], name, n) == 0 && env[i][n] == '=' && env[i][n + 1])
            return env[i] + n + 1;
    return NULL;
}

void bg_notify_env(char *const *env, const char **socket, int64_t *watchdog_us)
{
    *socket = env_get(env, "NOTIFY_SOCKET");
    const char *us = env_get(env, "WATCHDOG_USEC"), *pid = env_get(env, "WATCHDOG_PID");
    *watchdog_us = us ? strtoll(us, NULL, 10) : 0;
    if (*watchdog_us < 0 || (pid && strtoll(pid, NULL, 10) != getpid())) *watchdog_us = 0;
}

bg_status bg_notify_open(bg_notify **out, const char *path, int64_t watchdog_us, bg_error *err)
{
    *out = NULL;
    if (!path || !*path) return BG_OK;
    bg_notify *n = calloc(1, sizeof *n);
    if (!n) return bg_fail(err, BG_NOMEM, "out of memory");
    n->addr.sun_family = AF_UNIX;
    size_t len = strlen(path);
    bool abstract = path[0] == '@';
    if ((!abstract && path[0] != '/') || len < 2 || len >= sizeof n->addr.sun_path) {
        free(n);
        return bg_fail(err, BG_ARG, "NOTIFY_SOCKET is \"%.120s\", which names no local socket",
                       path);
    }
    memcpy(n->addr.sun_path, path, len);
    if (abstract) n->addr.sun_path[0] = 0;
    n->addr_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len + !abstract);
    n->watchdog_ns = watchdog_us > 0 && watchdog_us < INT64_MAX / 500 ? watchdog_us * 500 : 0;
    n->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (n->fd < 0) {
        free(n);
        return bg_fail_os(err, "cannot make a socket for NOTIFY_SOCKET");
    }
    /* READY and STOPPING wait a little for a manager that is behind; the others do not. */
    struct timeval patience = {.tv_sec = 1};
    setsockopt(n->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    *out = n;
    return BG_OK;
}

void bg_notify_close(bg_notify *n)
{
    if (!n) return;
    close(n->fd);
    free(n);
}

static void send_text(bg_notify *n, const bg_buf *b, int flags)
{
    if (b->failed || !b->len) return;
    ssize_t sent = sendto(n->fd, b->data, b->len, MSG_NOSIGNAL | flags,
                          (const struct sockaddr *)&n->addr, n->addr_len);
    (void)sent; /* best effort */
}

/* A line break would begin another assignment. */
static void add_status(bg_notify *n, bg_buf *b, const char *status)
{
    size_t len = strlen(status);
    if (len >= sizeof n->status) len = sizeof n->status - 1;
    memcpy(n->status, status, len);
    n->status[len] = 0;
    for (char *c = n->status; *c; c++)
        if (*c == '\n') *c = ' ';
    n->status_last = bg_now_ns();
    bg_buf_printf(b, "STATUS=%s\n", n->status);
}

static void add_extension(bg_notify *n, bg_buf *b, int64_t ns)
{
    n->extend_last = bg_now_ns();
    bg_buf_printf(b, "EXTEND_TIMEOUT_USEC=%lld\n", (long long)(ns / 1000));
}

void bg_notify_ready(bg_notify *n, const char *status)
{
    if (!n || n->ready) return;
    bg_buf b = {0};
    n->ready = true;
    bg_buf_str(&b, "READY=1\n");
    if (status) add_status(n, &b, status);
    send_text(n, &b, 0);
    bg_buf_release(&b);
}

void bg_notify_stopping(bg_notify *n, int64_t grace_ns)
{
    if (!n || n->stop_end) return;
    bg_buf b = {0};
    n->stop_end = bg_now_ns() + grace_ns + COMMIT_S * SECOND;
    bg_buf_str(&b, "STOPPING=1\n");
    add_extension(n, &b, EXTEND_S * SECOND);
    send_text(n, &b, 0);
    bg_buf_release(&b);
}

void bg_notify_tick(bg_notify *n, const char *status)
{
    if (!n) return;
    int64_t now = bg_now_ns();
    bg_buf b = {0};
    if (n->watchdog_ns && (!n->watchdog_last || now - n->watchdog_last >= n->watchdog_ns)) {
        n->watchdog_last = now;
        bg_buf_str(&b, "WATCHDOG=1\n");
    }
    bool waited_for = !n->ready || n->stop_end;
    if (waited_for && (!n->stop_end || now < n->stop_end) &&
        (!n->extend_last || now - n->extend_last >= EXTEND_EVERY_S * SECOND))
        add_extension(n, &b, EXTEND_S * SECOND);
    if (status && strcmp(status, n->status) != 0 &&
        (!n->status_last || now - n->status_last >= SECOND))
        add_status(n, &b, status);
    send_text(n, &b, MSG_DONTWAIT);
    bg_buf_release(&b);
}

/* ---- the command at the end
 * -------------------------------------------------------------------------- */

/* The environment with our variables first; strings of `from` are borrowed, own[] are ours. */
static char **child_env(char *const *from, char *const *own, size_t n_own)
{
    static const char *const hidden[] = {"NOTIFY_SOCKET=",   "WATCHDOG_USEC=",   "WATCHDOG_PID=",
                                         "BATCHGEN_STATUS=", "BATCHGEN_OUTPUT=", "BATCHGEN_EXIT="};
    size_t n = 0, k = 0;
    while (from && from[n])
        n++;
    char **env = calloc(n + n_own + 1, sizeof *env);
    for (size_t i = 0; env && i < n_own; i++)
        env[k++] = own[i];
    for (size_t i = 0; env && i < n; i++) {
        bool skip = false;
        for (size_t h = 0; h < sizeof hidden / sizeof *hidden; h++)
            skip = skip || strncmp(from[i], hidden[h], strlen(hidden[h])) == 0;
        if (!skip) env[k++] = from[i];
    }
    return env;
}

/* The summary as a file without a name: a command that reads none of it blocks nobody. */
static bg_status summary_file(const bg_notify_command *c, int *fd, bg_error *err)
{
    *fd = memfd_create("summary", MFD_CLOEXEC);
    if (*fd < 0) return bg_fail_os(err, "cannot hold the summary");
    bg_status st = bg_write_all(*fd, c->summary, c->n_summary, "the summary", err);
    if (!st && lseek(*fd, 0, SEEK_SET) < 0) st = bg_fail_os(err, "cannot rewind the summary");
    return st;
}

static int spawn(const char *command, int in, char *const *env, pid_t *pid)
{
    char sh[] = "sh", flag[] = "-c";
    char *copy = strdup(command);
    if (!copy) return ENOMEM;
    char *argv[] = {sh, flag, copy, NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    int rc = posix_spawn_file_actions_init(&files);
    if (rc) {
        free(copy);
        return rc;
    }
    rc = posix_spawnattr_init(&attr);
    if (!rc) {
        /* A group of its own, so that the limit ends what the shell started too. */
        rc = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                                 POSIX_SPAWN_SETPGROUP);
        if (!rc) rc = posix_spawnattr_setsigmask(&attr, &none);
        if (!rc) rc = posix_spawnattr_setsigdefault(&attr, &all);
        if (!rc) rc = posix_spawnattr_setpgroup(&attr, 0);
        if (!rc) rc = posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
        if (!rc) rc = posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
        if (!rc) rc = posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
        if (!rc) rc = posix_spawn(pid, "/bin/sh", &files, &attr, argv, env);
        posix_spawnattr_destroy(&attr);
    }
    posix_spawn_file_actions_destroy(&files);
    free(copy);
    return rc;
}

static bg_status wait_for(const bg_notify_command *c, pid_t pid, bg_error *err)
{
    int64_t limit = c->limit_ns > 0 ? c->limit_ns : LIMIT_S * SECOND, end = bg_now_ns() + limit;
    bool killed = false;
    int how, wait_ms = 1;
    pid_t got;
    while ((got = waitpid(pid, &how, killed ? 0 : WNOHANG)) == 0 || (got < 0 && errno == EINTR)) {
        if (!killed && bg_now_ns() >= end) {
            kill(-pid, SIGKILL);
            killed = true;
            continue;
        }
        bg_notify_tick(c->manager, NULL);
        poll(NULL, 0, wait_ms);
        if (wait_ms < POLL_MS) wait_ms *= 2;
    }
    if (got < 0) return bg_fail_os(err, "lost sight of the command");
    if (killed)
        return bg_fail(err, BG_IO, "the command took more than %.0f s and was killed",
                       (double)limit * 1e-9);
    if (WIFSIGNALED(how))
        return bg_fail(err, BG_IO, "the command was ended by signal %d (%s)", WTERMSIG(how),
                       strsignal(WTERMSIG(how)));
    if (WEXITSTATUS(how))
        return bg_fail(err, BG_IO, "the command exited with status %d%s", WEXITSTATUS(how),
                       WEXITSTATUS(how) == 127 ? " (not found?)" : "");
    return BG_OK;
}

bg_status bg_notify_run(const bg_notify_command *c, bg_error *err)
{
    bg_buf own[3] = {{0}};
    bg_buf_printf(&own[0], "BATCHGEN_STATUS=%s", c->status ? c->status : "");
    bg_buf_printf(&own[1], "BATCHGEN_OUTPUT=%s", c->output ? c->output : "");
    bg_buf_printf(&own[2], "BATCHGEN_EXIT=%d", c->exit_status);
    char *texts[3] = {own[0].data, own[1].data, own[2].data};
    bool failed = own[0].failed || own[1].failed || own[2].failed;
    char **env = failed ? NULL : child_env(c->env ? c->env : environ, texts, 3);
    bg_status st = env ? BG_OK : bg_fail(err, BG_NOMEM, "out of memory");
    int in = -1;
    pid_t pid = 0;
    if (!st) st = summary_file(c, &in, err);
    if (!st) {
        int rc = spawn(c->command, in, env, &pid);
        if (rc) st = bg_fail_at(err, BG_IO, rc, __FILE__, __LINE__, "cannot start /bin/sh");
    }
    if (in >= 0) close(in);
    if (!st) st = wait_for(c, pid, err);
    free(env);
    for (int i = 0; i < 3; i++)
        bg_buf_release(&own[i]);
    return st;
}
