/* Files and pipes: short counts, interruptions, errors. */
#include "base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <criterion/criterion.h>

static char dir[] = "/tmp/batchgen-io-XXXXXX";
static char path[64];

static void make_dir(void)
{
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/file", dir);
}

static void drop_dir(void)
{
    unlink(path);
    rmdir(dir);
}

TestSuite(io, .init = make_dir, .fini = drop_dir);

enum { BIG = 1 << 20 };

static char pattern(size_t i)
{
    return (char)(i * 7 + (i >> 11));
}

static int open_file(int flags)
{
    int fd = open(path, flags | O_CLOEXEC, 0600);
    cr_assert_geq(fd, 0);
    return fd;
}

/* ---- pipes with a timer's signals: write() and read() come back early, or with EINTR ---- */

typedef struct reader {
    int fd;
    char *data;
    size_t got;
    bg_error err;
} reader;

static void *read_slowly(void *arg)
{
    reader *r = arg;
    size_t got;
    do { /* an odd size, so that the writer's chunks and ours never match */
        if (bg_read_full(r->fd, r->data + r->got, 777, &got, "pipe", &r->err)) break;
        r->got += got;
    } while (got);
    return NULL;
}

static void nothing(int sig)
{
    (void)sig;
}

Test(io, short_and_interrupted_writes_lose_nothing)
{
    int fd[2];
    cr_assert_eq(pipe(fd), 0);
    struct sigaction act = {.sa_handler = nothing}; /* no SA_RESTART: calls end with EINTR */
    sigaction(SIGALRM, &act, NULL);
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    char *data = malloc(BIG);
    for (size_t i = 0; i < BIG; i++)
        data[i] = pattern(i);
    reader r = {.fd = fd[0], .data = malloc(BIG + 777)};
    pthread_t thread;
    setitimer(ITIMER_REAL, &often, NULL);
    cr_assert_eq(pthread_create(&thread, NULL, read_slowly, &r), 0);
    bg_error err = {0};
    cr_expect_eq(bg_write_all(fd[1], data, BIG, "pipe", &err), BG_OK, "%s", err.text);
    close(fd[1]);
    pthread_join(thread, NULL);
    setitimer(ITIMER_REAL, &never, NULL);
    close(fd[0]);
    cr_expect_eq(r.err.status, BG_OK, "%s", r.err.text);
    cr_expect_eq(r.got, BIG);
    cr_expect_eq(memcmp(r.data, data, BIG), 0);
    free(data);
    free(r.data);
}

Test(io, a_closed_pipe_is_an_error)
{
    int fd[2];
    cr_assert_eq(pipe(fd), 0);
    close(fd[0]);
    signal(SIGPIPE, SIG_IGN);
    bg_error err = {0};
    cr_expect_eq(bg_write_all(fd[1], "x", 1, "the pipe", &err), BG_IO);
    cr_expect_eq(err.os, EPIPE);
    cr_expect_not_null(strstr(err.text, "the pipe: cannot write"));
    close(fd[1]);
}

/* A file system that takes a part and then refuses: the size limit does the same. */
Test(io, a_write_that_stops_half_way_is_an_error)
{
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit = {1000, 1000};
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    char data[1500];
    memset(data, 'x', sizeof data);
    int fd = open_file(O_RDWR | O_CREAT);
    bg_error err = {0};
    cr_expect_eq(bg_write_all(fd, data, sizeof data, "f", &err), BG_IO);
    cr_expect_eq(err.os, EFBIG);
    err = (bg_error){0};
    cr_expect_eq(bg_pwrite_all(fd, data, 600, 700, "f", &err), BG_IO);
    struct stat st;
    fstat(fd, &st);
    cr_expect_eq(st.st_size, 1000);
    close(fd);
}

Test(io, full_device)
{
    int fd = open("/dev/full", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    bg_error err = {0};
    cr_expect_eq(bg_write_all(fd, "x", 1, "out", &err), BG_IO);
    cr_expect_eq(err.os, ENOSPC);
    cr_expect_eq(bg_write_all(fd, "", 0, "out", &err), BG_OK, "nothing to write, nothing to fail");
    close(fd);
}

/* ---- places in a file ---- */

Test(io, reads_and_writes_at_offsets)
{
    int fd = open_file(O_RDWR | O_CREAT);
    bg_error err = {0};
    char got[16];
    size_t n;
    cr_expect_eq(bg_pwrite_all(fd, "world", 5, 6, "f", &err), BG_OK);
    cr_expect_eq(bg_pwrite_all(fd, "hello ", 6, 0, "f", &err), BG_OK);
    cr_expect_eq(bg_pread_full(fd, got, sizeof got, 3, &n, "f", &err), BG_OK);
    cr_expect_eq(n, 8);
    cr_expect_eq(memcmp(got, "lo world", 8), 0);
    cr_expect_eq(bg_pread_full(fd, got, 4, 100, &n, "f", &err), BG_OK);
    cr_expect_eq(n, 0);
    cr_expect_eq(bg_read_full(fd, got, 5, &n, "f", &err), BG_OK);
    cr_expect(n == 5 && memcmp(got, "hello", 5) == 0);
    cr_expect_eq(bg_read_full(fd, got, 0, &n, "f", &err), BG_OK);
    cr_expect_eq(n, 0);
    cr_expect_eq(bg_sync_data(fd, "f", &err), BG_OK);
    close(fd);
    cr_expect_eq(bg_pread_full(fd, got, 1, 0, &n, "gone", &err), BG_IO);
    cr_expect_eq(err.os, EBADF);
}

Test(io, whole_files)
{
    bg_error err = {0};
    char *data, *big = malloc(200000);
    size_t n;
    int fd = open_file(O_WRONLY | O_CREAT);
    for (size_t i = 0; i < 200000; i++)
        big[i] = pattern(i);
    cr_assert_eq(bg_write_all(fd, big, 200000, "f", &err), BG_OK);
    close(fd);
    cr_assert_eq(bg_read_file(path, 200000, &data, &n, &err), BG_OK, "%s", err.text);
    cr_expect(n == 200000 && memcmp(data, big, n) == 0 && data[n] == 0);
    free(data);
    free(big);
    cr_expect_eq(bg_read_file(path, 199999, &data, &n, &err), BG_FORMAT);
    cr_expect(data == NULL && n == 0);
    err = (bg_error){0};
    cr_assert_eq(truncate(path, 0), 0);
    cr_assert_eq(bg_read_file(path, 0, &data, &n, &err), BG_OK, "%s", err.text);
    cr_expect(n == 0 && data && data[0] == 0, "an empty file is an empty string");
    free(data);
    cr_expect_eq(bg_read_file("/nowhere/at/all", 1, &data, &n, &err), BG_IO);
    cr_expect_eq(err.os, ENOENT);
    err = (bg_error){0};
    cr_expect_eq(bg_read_file(dir, 1000, &data, &n, &err), BG_IO, "a directory is no file");
    cr_expect_null(data);
}

Test(io, directories)
{
    bg_error err = {0};
    cr_expect_eq(bg_sync_dir_of(path, &err), BG_OK, "%s", err.text);
    cr_expect_eq(bg_sync_dir_of("name-without-a-directory", &err), BG_OK, "%s", err.text);
    cr_expect_eq(bg_sync_dir_of("/nowhere/at/all", &err), BG_IO);
    cr_expect_eq(err.os, ENOENT);
}
