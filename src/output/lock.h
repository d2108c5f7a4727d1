/* output/lock.h - what the writer needs of the output's lock. */
#ifndef BG_OUTPUT_LOCK_H
#define BG_OUTPUT_LOCK_H

#include "output/files.h"

struct bg_out_lock {
    const bg_out_sys *sys;
    char *path, *real; /* as given, and behind links */
    int fd;            /* the output, locked */
    bool made;         /* by us, and nothing that matters is in it yet */
};

bg_status bg_out_lock_take_on(bg_out_lock **lock, const char *path, int64_t wait_ns,
                              bool (*stop)(void *), void *ctx, const bg_out_sys *sys,
                              bg_error *err);
/* Takes the file's lock without waiting. BG_BUSY. */
bg_status bg_out_flock(int fd, const char *name, bg_error *err);

#endif
