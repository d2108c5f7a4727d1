#include "backend/device.h"

#include <dlfcn.h>
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/io.h"

typedef bg_status (*new_fn)(bg_backend **, const bg_backend_config *, int, bg_error *);
typedef bg_status (*gpus_fn)(bg_gpu *, int, int *, bg_error *);
typedef int (*abi_fn)(void);

/* dlsym() gives an object pointer; ISO C has no cast from it to a function's. */
static void *symbol(void *library, const char *name, void *fn)
{
    void *at = dlsym(library, name);
    memcpy(fn, &at, sizeof at);
    return at;
}

static void *open_library(bg_error *err)
{
    static const char *const places[] = {"", "/../lib/batchgen"};
    char self[4096], path[4200];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    const char *dir = dirname(self);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s%s/libbatchgen_cuda.so", dir, places[i]);
        if (access(path, F_OK) != 0) continue;
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        abi_fn abi;
        if (!library) {
            bg_fail(err, BG_DEVICE, "%s: %s", path, dlerror());
        } else if (!symbol(library, "bg_cuda_abi", &abi) || abi() != BG_CUDA_ABI) {
            bg_fail(err, BG_DEVICE, "%s: belongs to another version of batchgen", path);
            dlclose(library);
            library = NULL;
        }
        return library;
    }
    bg_fail(err, BG_DEVICE, "%s/libbatchgen_cuda.so: not there: this build has no CUDA backend",
            dir);
    return NULL;
}

bg_status bg_backend_new(bg_backend **b, int device, const bg_backend_config *config, bg_error *err)
{
    *b = NULL;
    if (device < 0 && config->dummy)
        return bg_fail(err, BG_ARG, "random weights (--load-format dummy) need a GPU");
    if (device < 0 && config->fast_math) return bg_fail(err, BG_ARG, "--fast-math needs a GPU");
    if (device < 0) return bg_cpu_backend_new(b, config, err);
    new_fn make;
    void *library = open_library(err); /* stays for the life of the process */
    if (!library) return err->status;
    if (!symbol(library, "bg_cuda_backend_new", &make))
        return bg_fail(err, BG_DEVICE, "libbatchgen_cuda.so: has no backend");
    return make(b, config, device, err);
}

bool bg_gpus_likely(void)
{
    return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

/* ---- the probe ---------------------------------------------------------------------------------
 */

typedef struct answer {
    int n;
    bg_gpu list[BG_MAX_GPUS];
    char why[400];
} answer;

static void probe(int fd)
{
    answer a = {0};
    bg_error err = {0};
    gpus_fn gpus;
    void *library = open_library(&err);
    if (library && symbol(library, "bg_cuda_gpus", &gpus)) gpus(a.list, BG_MAX_GPUS, &a.n, &err);
    snprintf(a.why, sizeof a.why, "%.390s", err.status ? err.text : a.n ? "" : "there is no GPU");
    bg_error ignored = {0};
    _exit(bg_write_all(fd, &a, sizeof a, "pipe", &ignored) ? 1 : 0);
}

/* In this process, which cannot be forked afterwards: for tools that do not follow forks. */
static void probe_here(bg_gpu *list, int *n)
{
    bg_error err = {0};
    gpus_fn gpus;
    void *library = open_library(&err);
    if (library && symbol(library, "bg_cuda_gpus", &gpus)) gpus(list, BG_MAX_GPUS, n, &err);
}

bg_status bg_gpus_probe(bg_gpu list[BG_MAX_GPUS], int *n, char *why, size_t why_size, bg_error *err)
{
    int fds[2];
    answer a;
    size_t got = 0;
    *n = 0;
    const char *where = getenv("BATCHGEN_TEST_GPU_PROBE");
    if (where && strcmp(where, "here") == 0) {
        if (why_size) *why = 0;
        probe_here(list, n);
        return BG_OK;
    }
    if (pipe(fds) != 0) return bg_fail_os(err, "cannot make a pipe");
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        probe(fds[1]);
    }
    close(fds[1]);
    bg_status st = pid < 0 ? bg_fail_os(err, "cannot start a process to ask for GPUs")
                           : bg_read_full(fds[0], &a, sizeof a, &got, "pipe", err);
    close(fds[0]);
    if (pid > 0)
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            continue;
    if (st) return st;
    bool whole = got == sizeof a && a.n >= 0 && a.n <= BG_MAX_GPUS;
    if (whole) memcpy(list, a.list, sizeof a.list);
    if (whole) *n = a.n;
    if (why_size) snprintf(why, why_size, "%s", whole ? a.why : "asking for GPUs ended in a crash");
    return BG_OK;
}
