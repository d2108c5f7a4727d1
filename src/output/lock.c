/* The output's lock: flock on the output itself, so that the kernel gives it back whatever becomes
 * of the process.
 *
 * A rewrite puts another file under the output's name. So whoever gets the lock looks again whether
 * the name still stands for what was locked; if not, it was the lock of a file that is gone, and
 * the name is opened anew. The new file is locked before it takes the name. */
#include "output/lock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/clock.h"
#include "output/recover.h"

enum { POLL_MS = 100 };

/* The process that has fd's file locked, as the kernel tells it; 0: it does not. */
static long lock_holder(int fd)
{
    struct stat sb;
    char line[256], want[64];
    long found = 0;
    if (fstat(fd, &sb) != 0) return 0;
    snprintf(want, sizeof want, " %02x:%02x:%llu ", major(sb.st_dev), minor(sb.st_dev),
             (unsigned long long)sb.st_ino);
    FILE *f = fopen("/proc/locks", "re");
    if (!f) return 0;
    while (!found && fgets(line, sizeof line, f)) {
        const char *kind = strstr(line, "FLOCK"), *place = strstr(line, want);
        if (!kind || !place || strstr(line, "->")) continue;
        const char *pid = place;
        while (pid > kind && pid[-1] != ' ')
            pid--;
        found = strtol(pid, NULL, 10);
    }
    (void)fclose(f);
    return found;
}

static bg_status busy(const bg_out_lock *l, const char *how, bg_error *err)
{
    char *journal = NULL, who[160] = "", pid[40];
    if (asprintf(&journal, "%s.journal", l->path) < 0) journal = NULL;
    if (journal) bg_recover_holder(journal, who, sizeof who);
    free(journal);
    long holder = lock_holder(l->fd);
    snprintf(pid, sizeof pid, "pid %ld", holder);
    /* One that is still at its beginning has not written who it is: the journal names another. */
    if (holder > 0 && (strncmp(who, pid, strlen(pid)) != 0 || who[strlen(pid)] != ' '))
        snprintf(who, sizeof who, "%s", pid);
    return bg_fail(
        err, BG_BUSY,
        "%s: another run is writing it%s%s%s%s; wait for it with --wait, or name another "
        "output",
        l->path, *who ? " (" : "", who, *who ? ")" : "", how);
}

/* Until it is ours. *again: of a file that the name no longer stands for. */
static bg_status wait_for(bg_out_lock *l, int64_t until, bool (*stop)(void *), void *ctx,
                          bool *again, bg_error *err)
{
    *again = false;
    while (flock(l->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EINTR) continue;
        if (errno != EWOULDBLOCK) return bg_fail_os(err, "%s: cannot lock", l->path);
        int64_t left = until - bg_now_ns();
        if (left <= 0) return busy(l, "", err);
        if (stop && stop(ctx)) return busy(l, "; stopped waiting", err);
        int64_t ms = left / 1000000 + 1;
        poll(NULL, 0, ms < POLL_MS ? (int)ms : POLL_MS);
        if (!bg_out_is(l->fd, l->real)) break; /* its holder has put another one there */
    }
    *again = !bg_out_is(l->fd, l->real);
    return BG_OK;
}

bg_status bg_out_lock_take_on(bg_out_lock **lock, const char *path, int64_t wait_ns,
                              bool (*stop)(void *), void *ctx, const bg_out_sys *sys, bg_error *err)
{
    *lock = NULL;
    int64_t now = bg_now_ns(), until = wait_ns < INT64_MAX - now ? now + wait_ns : INT64_MAX;
    bg_out_lock *l = calloc(1, sizeof *l);
    bg_status st = BG_OK;
    bool again = true;
    if (!l) return bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    *l = (bg_out_lock){.sys = sys, .fd = -1, .path = strdup(path)};
    if (!l->path) st = bg_fail(err, BG_NOMEM, "%s: out of memory", path);
    while (again && !st) {
        bg_out_opened o;
        if (l->fd >= 0) close(l->fd);
        free(l->real);
        l->fd = -1;
        l->real = NULL;
        st = bg_out_open(&o, path, true, sys, err);
        if (st) break;
        l->fd = o.fd;
        l->real = o.real;
        bool made = o.made;
        st = wait_for(l, until, stop, ctx, &again, err);
        l->made = !st && !again && made;
    }
    if (st) {
        bg_out_lock_free(l);
        return st;
    }
    *lock = l;
    return BG_OK;
}

bg_status bg_out_lock_take(bg_out_lock **lock, const char *path, int64_t wait_ns,
                           bool (*stop)(void *), void *ctx, bg_error *err)
{
    return bg_out_lock_take_on(lock, path, wait_ns, stop, ctx, &bg_out_real, err);
}

bg_status bg_out_flock(int fd, const char *name, bg_error *err)
{
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return BG_OK;
    if (errno == EWOULDBLOCK)
        return bg_fail(err, BG_BUSY, "%s: another run is writing it; name another file", name);
    return bg_fail_os(err, "%s: cannot lock", name);
}

void bg_out_lock_free(bg_out_lock *l)
{
    struct stat sb;
    if (!l) return;
    /* While it is still locked: so nobody else can have begun to write it. */
    if (l->made && fstat(l->fd, &sb) == 0 && sb.st_size == 0 && bg_out_is(l->fd, l->real))
        l->sys->unlink(l->sys->ctx, l->real);
    if (l->fd >= 0) close(l->fd);
    free(l->path);
    free(l->real);
    free(l);
}
