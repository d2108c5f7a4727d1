/* libfault.c - a preloadable libc that fails the n-th call.
 *
 *     cc -shared -fPIC -O1 -D_GNU_SOURCE -o libfault.so tests/faults/libfault.c -ldl
 *     FAULT_CALL=write,pwrite FAULT_PATH=out.jsonl FAULT_N=3 FAULT_HOW=ENOSPC LD_PRELOAD=...
 * batchgen
 *
 *   FAULT_CALL   what counts: names of calls, or the groups below, with commas between
 *                    write     write pwrite writev           sync   fsync fdatasync
 *                    read      read pread                    alloc  malloc calloc realloc
 *                    exec      execve posix_spawn system popen dlopen ...     posix_memalign ...
 *                others by their own names: open close ftruncate rename unlink link flock fstat
 * mmap fork pthread_create pipe2 eventfd signalfd fcntl FAULT_N      which matching call fails,
 * from 1; 0 or absent: none, all are only counted FAULT_FROM   "1": every one from there on
 *   FAULT_ONCE   "1": one failure in all processes together, whoever comes first to its n-th call
 *   FAULT_HOW    an errno name; "short": a write or read of half; "short+ENOSPC": half, and the
 *                calls after it fail; "eof": a read of nothing; "sig9": the process kills itself;
 *                "cut": an fstat that tells the size, after which the file has half of it
 *   FAULT_PATH   only calls on a file whose name (of today: /proc/self/fd) has this in it; several
 *                with | between
 *   FAULT_WHO    main (the first process), child (its children: the nursery), grandchild (ranks)
 *                or all, which is the default. Each process counts its own calls
 *   FAULT_COUNT  a file for the counts: four 64-bit numbers, calls that matched in main, in
 *                children, in grandchildren, and failures
 *
 * Calls that libc makes inside itself (stdio's writes, thread stacks) do not come through here;
 * its allocations do. close() closes before it fails, as the kernel's does. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum call {
    WRITE,
    PWRITE,
    WRITEV,
    FSYNC,
    FDATASYNC,
    READ,
    PREAD,
    MALLOC,
    CALLOC,
    REALLOC,
    MEMALIGN,
    EXEC,
    OPEN,
    CLOSE,
    FTRUNCATE,
    RENAME,
    UNLINK,
    LINK,
    FLOCK,
    FSTAT,
    MMAP,
    FORK,
    PTHREAD_CREATE,
    PIPE2,
    EVENTFD,
    SIGNALFD,
    FCNTL,
    N_CALLS
};

static const char *const names[N_CALLS] = {
    "write",     "pwrite",         "writev",  "fsync",    "fdatasync", "read",  "pread",
    "malloc",    "calloc",         "realloc", "memalign", "exec",      "open",  "close",
    "ftruncate", "rename",         "unlink",  "link",     "flock",     "fstat", "mmap",
    "fork",      "pthread_create", "pipe2",   "eventfd",  "signalfd",  "fcntl"};
static const char *const groups[N_CALLS] = {"write", "write", "write", "sync",  "sync", "read",
                                            "read",  "alloc", "alloc", "alloc", "alloc"};

enum how { FAIL, SHORT, SHORT_THEN_FAIL, END, SIGNAL, CUT };
enum { MAIN = 1, CHILD = 2, GRANDCHILD = 4 };

typedef struct counts { /* shared by all processes */
    _Atomic uint64_t matched[3], failed, taken;
} counts;

static bool on[N_CALLS];
static uint64_t nth;
static bool from, once;
static enum how how;
static int os_error = EIO;
static char path[256];
static int who = MAIN | CHILD | GRANDCHILD;
static counts private_counts, *shown = &private_counts;
static bool ready;
/* of this process */
static _Atomic uint64_t n_calls;
static int generation;

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static int error_by_name(const char *s)
{
    static const struct {
        const char *name;
        int value;
    } all[] = {{"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EFBIG", EFBIG},   {"EIO", EIO},
               {"EINTR", EINTR},   {"ENOMEM", ENOMEM}, {"EAGAIN", EAGAIN}, {"EROFS", EROFS},
               {"EACCES", EACCES}, {"EMFILE", EMFILE}, {"ENFILE", ENFILE}, {"EINVAL", EINVAL},
               {"ENOLCK", ENOLCK}, {"ESTALE", ESTALE}, {"EPIPE", EPIPE},   {"EPERM", EPERM}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(s, all[i].name) == 0) return all[i].value;
    fprintf(stderr, "libfault: %s: unknown\n", s);
    _exit(99);
}

static bool listed(const char *list, const char *name)
{
    size_t n = name ? strlen(name) : 0;
    for (const char *s = list; n && s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL)
        if (strncmp(s, name, n) == 0 && (s[n] == ',' || !s[n])) return true;
    return false;
}

static bool is_set(const char *name)
{
    const char *v = getenv(name);
    return v && strcmp(v, "1") == 0;
}

__attribute__((constructor)) static void begin(void)
{
    const char *call = getenv("FAULT_CALL"), *s;
    for (int i = 0; call && i < N_CALLS; i++)
        on[i] = listed(call, names[i]) || listed(call, groups[i]);
    nth = (s = getenv("FAULT_N")) ? strtoull(s, NULL, 10) : 0;
    from = is_set("FAULT_FROM");
    once = is_set("FAULT_ONCE");
    if ((s = getenv("FAULT_PATH"))) snprintf(path, sizeof path, "%s", s);
    if ((s = getenv("FAULT_WHO")))
        who = (strstr(s, "main") ? MAIN : 0) | (strstr(s, "grandchild") ? GRANDCHILD : 0) |
              (strncmp(s, "child", 5) == 0 || strstr(s, ",child") ? CHILD : 0) |
              (strstr(s, "all") ? MAIN | CHILD | GRANDCHILD : 0);
    if ((s = getenv("FAULT_HOW"))) {
        if (strcmp(s, "short") == 0) {
            how = SHORT;
        } else if (strncmp(s, "short+", 6) == 0) {
            how = SHORT_THEN_FAIL;
            os_error = error_by_name(s + 6);
        } else if (strcmp(s, "eof") == 0) {
            how = END;
        } else if (strcmp(s, "cut") == 0) {
            how = CUT;
        } else if (strncmp(s, "sig", 3) == 0) {
            how = SIGNAL;
            os_error = atoi(s + 3);
        } else {
            os_error = error_by_name(s);
        }
    }
    int fd = -1;
    if ((s = getenv("FAULT_COUNT")))
        fd = (int)syscall(SYS_openat, AT_FDCWD, s, O_RDWR | O_CREAT, 0666);
    if (fd >= 0) syscall(SYS_ftruncate, fd, (long)sizeof(counts));
    void *map = (void *)syscall(SYS_mmap, NULL, sizeof(counts), PROT_READ | PROT_WRITE,
                                fd >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS, fd, 0L);
    if (fd >= 0) syscall(SYS_close, fd);
    if (map != MAP_FAILED) shown = map;
    ready = true;
}

static bool name_matches(const char *name)
{
    for (const char *s = path; *s;) {
        size_t n = strcspn(s, "|");
        if (memmem(name, strlen(name), s, n)) return true;
        s += n + (s[n] == '|');
    }
    return false;
}

static bool fd_matches(int fd)
{
    char link[40], name[PATH_MAX + 1];
    if (!path[0]) return true;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, name, sizeof name - 1);
    if (n < 0) return false;
    name[n] = 0;
    return name_matches(name);
}

/* Whether this call, which matches, is one that fails. */
static bool due(enum call c)
{
    int me = generation == 0 ? MAIN : generation == 1 ? CHILD : GRANDCHILD;
    if (!ready || !on[c] || !(who & me)) return false;
    uint64_t n = atomic_fetch_add(&n_calls, 1) + 1;
    atomic_fetch_add(&shown->matched[generation < 2 ? generation : 2], 1);
    if (!nth || n < nth || (n > nth && !from && how != SHORT_THEN_FAIL)) return false;
    if (once && atomic_exchange(&shown->taken, 1)) return false;
    atomic_fetch_add(&shown->failed, 1);
    if (how == SIGNAL) {
        syscall(SYS_kill, getpid(), os_error);
        for (;;)
            pause();
    }
    errno = os_error;
    return true;
}

/* For calls that move bytes: how many of n move (n: all), or -1 for a failure. */
static ssize_t allowed(enum call c, int fd, size_t n)
{
    if (!on[c] || !fd_matches(fd)) return (ssize_t)n;
    uint64_t before = atomic_load(&n_calls);
    if (!due(c)) return (ssize_t)n;
    if (how == SHORT || (how == SHORT_THEN_FAIL && before + 1 == nth))
        return n > 1 ? (ssize_t)(n / 2) : (ssize_t)n;
    return how == END ? 0 : -1;
}

#define MAYBE_FD(c, fd) \
    if (on[c] && fd_matches(fd) && due(c)) return -1
#define MAYBE_NAME(c, name) \
    if (on[c] && (!path[0] || name_matches(name)) && due(c)) return -1
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* ---- files ---------------------------------------------------------------------------------- */

ssize_t write(int fd, const void *p, size_t n)
{
    ssize_t k = allowed(WRITE, fd, n);
    return k < 0 ? -1 : syscall(SYS_write, fd, p, k);
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    ssize_t k = allowed(PWRITE, fd, n);
    return k < 0 ? -1 : syscall(SYS_pwrite64, fd, p, k, at);
}

ssize_t pwrite64(int fd, const void *p, size_t n, off_t at) __attribute__((alias("pwrite")));

ssize_t writev(int fd, const struct iovec *v, int n)
{
    MAYBE_FD(WRITEV, fd);
    return syscall(SYS_writev, fd, v, n);
}

ssize_t read(int fd, void *p, size_t n)
{
    ssize_t k = allowed(READ, fd, n);
    return k < 0 ? -1 : k == 0 ? 0 : syscall(SYS_read, fd, p, k);
}

ssize_t pread(int fd, void *p, size_t n, off_t at)
{
    ssize_t k = allowed(PREAD, fd, n);
    return k < 0 ? -1 : k == 0 ? 0 : syscall(SYS_pread64, fd, p, k, at);
}

ssize_t pread64(int fd, void *p, size_t n, off_t at) __attribute__((alias("pread")));

int fsync(int fd)
{
    MAYBE_FD(FSYNC, fd);
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    MAYBE_FD(FDATASYNC, fd);
    return (int)syscall(SYS_fdatasync, fd);
}

int ftruncate(int fd, off_t size)
{
    MAYBE_FD(FTRUNCATE, fd);
    return (int)syscall(SYS_ftruncate, fd, size);
}

int ftruncate64(int fd, off_t size) __attribute__((alias("ftruncate")));

int open(const char *name, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, unsigned) : 0;
    va_end(ap);
    MAYBE_NAME(OPEN, name);
    return (int)syscall(SYS_openat, AT_FDCWD, name, flags, mode);
}

int open64(const char *name, int flags, ...) __attribute__((alias("open")));

int openat(int dir, const char *name, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, unsigned) : 0;
    va_end(ap);
    MAYBE_NAME(OPEN, name);
    return (int)syscall(SYS_openat, dir, name, flags, mode);
}

int close(int fd)
{
    bool bad = on[CLOSE] && fd_matches(fd) && due(CLOSE);
    int rc = (int)syscall(SYS_close, fd);
    if (!bad) return rc;
    errno = os_error;
    return -1;
}

int rename(const char *a, const char *b)
{
    if (on[RENAME] && (!path[0] || name_matches(a) || name_matches(b)) && due(RENAME)) return -1;
    return (int)syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, 0);
}

int unlink(const char *name)
{
    MAYBE_NAME(UNLINK, name);
    return (int)syscall(SYS_unlinkat, AT_FDCWD, name, 0);
}

int link(const char *a, const char *b)
{
    MAYBE_NAME(LINK, b);
    return (int)syscall(SYS_linkat, AT_FDCWD, a, AT_FDCWD, b, 0);
}

int flock(int fd, int op)
{
    MAYBE_FD(FLOCK, fd);
    return (int)syscall(SYS_flock, fd, op);
}

int fstat(int fd, struct stat *s)
{
    bool bad = on[FSTAT] && fd_matches(fd) && due(FSTAT);
    if (bad && how != CUT) return -1;
    int rc = REAL(fstat)(fd, s);
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return bad ? truncate(link, s->st_size / 2) : rc;
}

int fcntl(int fd, int cmd, ...)
{
    va_list ap;
    va_start(ap, cmd);
    void *arg = va_arg(ap, void *);
    va_end(ap);
    MAYBE_FD(FCNTL, fd);
    return (int)syscall(SYS_fcntl, fd, cmd, arg);
}

int fcntl64(int fd, int cmd, ...) __attribute__((alias("fcntl")));

int pipe2(int fds[2], int flags)
{
    if (due(PIPE2)) return -1;
    return (int)syscall(SYS_pipe2, fds, flags);
}

int eventfd(unsigned value, int flags)
{
    if (due(EVENTFD)) return -1;
    return (int)syscall(SYS_eventfd2, value, flags);
}

int signalfd(int fd, const sigset_t *mask, int flags)
{
    if (due(SIGNALFD)) return -1;
    return (int)syscall(SYS_signalfd4, fd, mask, (size_t)8, flags);
}

/* ---- memory -----------------------------------------------------------------------------------
 */

static bool no_memory(enum call c)
{
    if (!on[c] || !due(c)) return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t n)
{
    return no_memory(MALLOC) ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return no_memory(CALLOC) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return no_memory(REALLOC) ? NULL : __libc_realloc(p, n);
}

void *memalign(size_t align, size_t n)
{
    return no_memory(MEMALIGN) ? NULL : __libc_memalign(align, n);
}

void *aligned_alloc(size_t align, size_t n) __attribute__((alias("memalign")));

int posix_memalign(void **out, size_t align, size_t n)
{
    int before = errno;
    void *p = memalign(align, n);
    errno = before;
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    if (on[MMAP] && (fd < 0 || fd_matches(fd)) && due(MMAP)) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}

void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset)
    __attribute__((alias("mmap")));

/* ---- processes and threads --------------------------------------------------------------------
 */

pid_t fork(void)
{
    if (due(FORK)) return -1;
    pid_t pid = REAL(fork)();
    if (pid == 0) {
        generation++;
        atomic_store(&n_calls, 0);
    }
    return pid;
}

int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*run)(void *), void *arg)
{
    int before = errno;
    bool bad = due(PTHREAD_CREATE);
    errno = before;
    return bad ? os_error : REAL(pthread_create)(t, a, run, arg);
}

/* Counted when asked for, and refused when due. */
int execve(const char *file, char *const *argv, char *const *env)
{
    MAYBE_NAME(EXEC, file);
    return (int)syscall(SYS_execve, file, argv, env);
}

int execv(const char *file, char *const *argv)
{
    return execve(file, argv, environ);
}

int execvp(const char *file, char *const *argv)
{
    MAYBE_NAME(EXEC, file);
    return REAL(execvp)(file, argv);
}

int execvpe(const char *file, char *const *argv, char *const *env)
{
    MAYBE_NAME(EXEC, file);
    return REAL(execvpe)(file, argv, env);
}

int posix_spawn(pid_t *pid, const char *file, const posix_spawn_file_actions_t *fa,
                const posix_spawnattr_t *at, char *const *argv, char *const *env)
{
    if (on[EXEC] && due(EXEC)) return os_error;
    return REAL(posix_spawn)(pid, file, fa, at, argv, env);
}

int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *fa,
                 const posix_spawnattr_t *at, char *const *argv, char *const *env)
{
    if (on[EXEC] && due(EXEC)) return os_error;
    return REAL(posix_spawnp)(pid, file, fa, at, argv, env);
}

int system(const char *command)
{
    if (on[EXEC] && due(EXEC)) return -1;
    return REAL(system)(command);
}

FILE *popen(const char *command, const char *mode)
{
    if (on[EXEC] && due(EXEC)) return NULL;
    return REAL(popen)(command, mode);
}

void *dlopen(const char *file, int flags)
{
    if (on[EXEC] && due(EXEC)) return NULL;
    return REAL(dlopen)(file, flags);
}
