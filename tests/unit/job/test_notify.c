/* The sd_notify protocol against a socket of the test's own, and the command at the end. */
#include "job/notify.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "base/io.h"

#define ENV(...) ((char *const *)(const char *const[]){__VA_ARGS__, NULL})

static char dir[64];

static void make_dir(void)
{
    snprintf(dir, sizeof dir, "/tmp/batchgen-notify.XXXXXX");
    cr_assert(mkdtemp(dir));
}

static void remove_dir(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    if (system(command)) cr_log_warn("%s stays", dir);
}

TestSuite(notify, .init = make_dir, .fini = remove_dir);

static const char *in_dir(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

/* ---- the service manager
 * ----------------------------------------------------------------------------- */

static int server(const char *name)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(name);
    cr_assert_lt(n, sizeof a.sun_path);
    memcpy(a.sun_path, name, n);
    if (name[0] == '@') a.sun_path[0] = 0;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (name[0] != '@'));
    cr_assert_eq(bind(fd, (struct sockaddr *)&a, len), 0);
    return fd;
}

/* The next datagram, or "" when there is none. */
static const char *next(int fd)
{
    static char text[1024];
    ssize_t n = recv(fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    return text;
}

static bg_notify *opened(const char *socket, int64_t watchdog_us)
{
    bg_notify *n;
    bg_error err = {0};
    cr_assert(!bg_notify_open(&n, socket, watchdog_us, &err), "%s", err.text);
    return n;
}

Test(notify, the_life_of_a_job)
{
    int fd = server(in_dir("sock"));
    bg_notify *n = opened(in_dir("sock"), 0);
    bg_notify_tick(n, "loading");
    cr_expect_str_eq(next(fd), "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading\n");
    bg_notify_tick(n, "loading");
    cr_expect_str_eq(next(fd), "", "nothing new");
    bg_notify_ready(n, "running\nMAINPID=1");
    cr_expect_str_eq(next(fd), "READY=1\nSTATUS=running MAINPID=1\n");
    bg_notify_ready(n, NULL);
    cr_expect_str_eq(next(fd), "", "ready once");
    bg_notify_tick(n, "5%");
    cr_expect_str_eq(next(fd), "", "a status a second at most");
    bg_notify_stopping(n, 20000000000);
    cr_expect_str_eq(next(fd), "STOPPING=1\nEXTEND_TIMEOUT_USEC=30000000\n");
    bg_notify_stopping(n, 0);
    bg_notify_tick(n, NULL);
    cr_expect_str_eq(next(fd), "");
    bg_notify_close(n);
    close(fd);
}

Test(notify, watchdog_at_half_of_the_interval)
{
    int fd = server(in_dir("sock"));
    bg_notify *n = opened(in_dir("sock"), 1); /* every tick is late */
    bg_notify_ready(n, NULL);
    cr_expect_str_eq(next(fd), "READY=1\n");
    for (int i = 0; i < 3; i++) {
        bg_notify_tick(n, NULL);
        cr_expect_str_eq(next(fd), "WATCHDOG=1\n");
    }
    bg_notify_close(n);
    n = opened(in_dir("sock"), INT64_C(3600000000));
    bg_notify_ready(n, NULL);
    next(fd);
    bg_notify_tick(n, NULL);
    cr_expect_str_eq(next(fd), "WATCHDOG=1\n", "the first at once");
    bg_notify_tick(n, NULL);
    cr_expect_str_eq(next(fd), "", "the second in half an hour");
    bg_notify_close(n);
    close(fd);
}

Test(notify, abstract_socket)
{
    char name[64];
    snprintf(name, sizeof name, "@batchgen-test-%d", (int)getpid());
    int fd = server(name);
    bg_notify *n = opened(name, 0);
    bg_notify_ready(n, "x");
    cr_expect_str_eq(next(fd), "READY=1\nSTATUS=x\n");
    bg_notify_close(n);
    close(fd);
}

Test(notify, nobody_listens)
{
    bg_notify *n = opened(NULL, 1000);
    cr_expect_null(n);
    n = opened("", 1000);
    cr_expect_null(n);
    bg_notify_ready(n, "x");
    bg_notify_tick(n, "x");
    bg_notify_stopping(n, 1);
    bg_notify_close(n);
    n = opened(in_dir("missing"), 1);
    bg_notify_ready(n, "x");
    bg_notify_tick(n, "y");
    bg_notify_close(n);
    /* A manager that reads nothing does not hold the job up. */
    int fd = server(in_dir("full"));
    n = opened(in_dir("full"), 1);
    for (int i = 0; i < 5000; i++)
        bg_notify_tick(n, NULL);
    bg_notify_close(n);
    close(fd);
}

Test(notify, addresses_that_are_none)
{
    char longest[200];
    memset(longest, 'a', sizeof longest);
    longest[0] = '/';
    longest[sizeof longest - 1] = 0;
    const char *const wrong[] = {"relative", "@", "/", "vsock:2:1234", longest};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        bg_notify *n = (bg_notify *)1;
        bg_error err = {0};
        cr_expect_eq(bg_notify_open(&n, wrong[i], 0, &err), BG_ARG, "%s", wrong[i]);
        cr_expect(!n && strstr(err.text, "NOTIFY_SOCKET"), "%s", err.text);
    }
}

Test(notify, environment)
{
    char mine[40], other[40];
    snprintf(mine, sizeof mine, "WATCHDOG_PID=%d", (int)getpid());
    snprintf(other, sizeof other, "WATCHDOG_PID=%d", (int)getpid() + 1);
    const char *socket = "x";
    int64_t us = 7;
    bg_notify_env(ENV("HOME=/"), &socket, &us);
    cr_expect(!socket && us == 0);
    bg_notify_env(ENV("NOTIFY_SOCKET=@s", "WATCHDOG_USEC=5000000", mine), &socket, &us);
    cr_expect_str_eq(socket, "@s");
    cr_expect_eq(us, 5000000);
    bg_notify_env(ENV("NOTIFY_SOCKET=@s", "WATCHDOG_USEC=5000000"), &socket, &us);
    cr_expect_eq(us, 5000000);
    bg_notify_env(ENV("NOTIFY_SOCKET=@s", "WATCHDOG_USEC=5000000", other), &socket, &us);
    cr_expect_eq(us, 0, "another process's watchdog");
    bg_notify_env(ENV("WATCHDOG_USEC=-5", "NOTIFY_SOCKET="), &socket, &us);
    cr_expect(!socket && us == 0);
}

/* ---- the command
 * ------------------------------------------------------------------------------------- */

static bg_status command(const char *text, const char *summary, bg_error *err)
{
    const bg_notify_command c = {.command = text,
                                 .summary = summary,
                                 .n_summary = strlen(summary),
                                 .status = "completed",
                                 .output = "a b'\"$HOME\n.lz4",
                                 .exit_status = 1};
    *err = (bg_error){0};
    return bg_notify_run(&c, err);
}

static const char *file(const char *name)
{
    static char kept[1 << 16];
    char *data;
    size_t n;
    bg_error err = {0};
    cr_assert(!bg_read_file(in_dir(name), sizeof kept - 1, &data, &n, &err), "%s", err.text);
    memcpy(kept, data, n + 1);
    free(data);
    return kept;
}

Test(notify_command, gets_summary_and_variables, .init = make_dir, .fini = remove_dir)
{
    bg_error err;
    setenv("DIR", dir, 1);
    setenv("NOTIFY_SOCKET", "/x", 1);
    setenv("BATCHGEN_STATUS", "old", 1);
    bg_status st =
        command("cat > \"$DIR/in\"; printf '%s|%s|%s|%s' \"$BATCHGEN_STATUS\" "
                "\"$BATCHGEN_OUTPUT\" \"$BATCHGEN_EXIT\" \"$NOTIFY_SOCKET\" > \"$DIR/env\"",
                "{\"a\":1}\n", &err);
    cr_assert(!st, "%s", err.text);
    cr_expect_str_eq(file("in"), "{\"a\":1}\n");
    cr_expect_str_eq(file("env"), "completed|a b'\"$HOME\n.lz4|1|");
}

Test(notify_command, a_long_summary_that_nobody_reads, .init = make_dir, .fini = remove_dir)
{
    bg_error err;
    char *big = malloc((4 << 20) + 1);
    cr_assert(big);
    memset(big, 'x', 4 << 20);
    big[4 << 20] = 0;
    cr_expect(!command("true", big, &err), "%s", err.text);
    setenv("DIR", dir, 1);
    cr_expect(!command("wc -c > \"$DIR/n\"", big, &err), "%s", err.text);
    cr_expect_eq(atoi(file("n")), 4 << 20);
    free(big);
}

Test(notify_command, failures_say_how)
{
    bg_error err;
    cr_expect_eq(command("exit 3", "", &err), BG_IO);
    cr_expect(strstr(err.text, "status 3"), "%s", err.text);
    cr_expect_eq(command("kill -9 $$", "", &err), BG_IO);
    cr_expect(strstr(err.text, "signal 9"), "%s", err.text);
    cr_expect_eq(command("/no/such/program 2>/dev/null", "", &err), BG_IO);
    cr_expect(strstr(err.text, "status 127"), "%s", err.text);
}

/* The limit ends what the shell started as well: the pipe's other end closes. */
Test(notify_command, the_limit, .timeout = 30)
{
    int p[2];
    bg_error err = {0};
    cr_assert_eq(pipe(p), 0);
    int keep = fcntl(p[1], F_DUPFD_CLOEXEC, 10);
    dup2(keep, STDERR_FILENO); /* the only descriptor that the command keeps */
    const bg_notify_command c = {
        .command = "sleep 600 & sleep 600; true", .summary = "", .limit_ns = 50000000};
    bg_status st = bg_notify_run(&c, &err);
    cr_expect_eq(st, BG_IO);
    cr_expect(strstr(err.text, "was killed"), "%s", err.text);
    close(p[1]);
    close(keep);
    close(STDERR_FILENO);
    char byte;
    cr_expect_eq(read(p[0], &byte, 1), 0, "somebody still holds it");
}

Test(notify_command, no_signals_and_no_descriptors_are_inherited, .init = make_dir,
     .fini = remove_dir)
{
    bg_error err;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    int leaky = open("/dev/null", O_RDONLY); /* without CLOEXEC */
    cr_assert_gt(leaky, 2);
    setenv("DIR", dir, 1);
    cr_expect(!command("grep -E '^Sig(Blk|Ign)' /proc/self/status > \"$DIR/sig\"", "", &err), "%s",
              err.text);
    /* 32 and 33 are the C library's own. */
    unsigned long long blocked, ignored;
    cr_assert_eq(sscanf(file("sig"), "SigBlk: %llx SigIgn: %llx", &blocked, &ignored), 2);
    cr_expect(!blocked && !(ignored & ~(3ULL << 31)), "%s", file("sig"));
    cr_expect(
        !command("exec > \"$DIR/fds\"; cd /proc/$$/fd; for f in *; do [ ! -e $f ] || echo $f; "
                 "done",
                 "", &err),
        "%s", err.text);
    cr_expect_str_eq(file("fds"), "0\n1\n2\n");
}

Test(notify_command, results_on_standard_output_stay_clean)
{
    bg_error err;
    int out[2], errs[2];
    char text[64] = "";
    cr_assert_eq(pipe(out), 0);
    cr_assert_eq(pipe(errs), 0);
    int old_out = dup(1), old_err = dup(2);
    dup2(out[1], 1);
    dup2(errs[1], 2);
    bg_status st = command("echo said", "", &err);
    dup2(old_out, 1);
    dup2(old_err, 2);
    close(out[1]);
    close(errs[1]);
    cr_expect(!st, "%s", err.text);
    cr_expect_eq(read(out[0], text, sizeof text - 1), 0);
    cr_expect_eq(read(errs[0], text, sizeof text - 1), 5);
    cr_expect_str_eq(text, "said\n");
}

/* While it runs the watchdog is fed. */
Test(notify_command, ticks, .init = make_dir, .fini = remove_dir)
{
    int fd = server(in_dir("sock"));
    bg_notify *n = opened(in_dir("sock"), 1);
    bg_error err = {0};
    const bg_notify_command c = {
        .command = "read x < \"$DIR/fifo\"", .summary = "", .limit_ns = 40000000, .manager = n};
    char fifo[128], make[160];
    snprintf(fifo, sizeof fifo, "%s", in_dir("fifo"));
    snprintf(make, sizeof make, "mkfifo %s", fifo);
    cr_assert_eq(system(make), 0);
    setenv("DIR", dir, 1);
    cr_expect_eq(bg_notify_run(&c, &err), BG_IO);
    cr_expect(strstr(next(fd), "WATCHDOG=1"));
    bg_notify_close(n);
    close(fd);
}
