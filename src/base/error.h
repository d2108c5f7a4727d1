/* base/error.h - one status, one error struct.
 *
 * A function that can fail returns bg_status and takes `bg_error *err` last, never NULL. The first
 * failure wins: a failure met while cleaning up never hides it. Nothing below src/cli prints. */
#ifndef BG_BASE_ERROR_H
#define BG_BASE_ERROR_H

typedef enum bg_status {
    BG_OK = 0,   /* the only false value: `if (st)` reads "if it failed" */
    BG_NOMEM,    /* host or device memory */
    BG_IO,       /* the operating system refused; err->os has errno */
    BG_FORMAT,   /* a file or line is not what it claims to be */
    BG_ARG,      /* the user asked for something impossible */
    BG_BUSY,     /* someone else holds it; trying later can help */
    BG_DEVICE,   /* CUDA, NCCL or a dead rank; the rank must be started again */
    BG_INTERNAL, /* a bug here: an invariant did not hold */
} bg_status;

enum { BG_ERROR_TEXT = 512 };

typedef struct bg_error { /* starts as {0} */
    bg_status status;
    int os;           /* errno of BG_IO, else 0 */
    const char *file; /* where it was raised */
    int line;
    char text[BG_ERROR_TEXT]; /* one line, no newline: what, the value seen, what would do */
} bg_error;

/* Records a failure unless err holds one already, and returns st (the recorded status if one was
 * there). For BG_IO, strerror(os) is appended to the text. Text that does not fit ends in "...". */
bg_status bg_fail_at(bg_error *err, bg_status st, int os, const char *file, int line,
                     const char *fmt, ...) __attribute__((format(printf, 6, 7)));

#define bg_fail(err, st, ...) bg_fail_at((err), (st), 0, __FILE__, __LINE__, __VA_ARGS__)
#define bg_fail_os(err, ...)  bg_fail_at((err), BG_IO, errno, __FILE__, __LINE__, __VA_ARGS__)

/* Puts "prefix: " in front of the text: a name that the callee could not know. Returns the status.
 */
bg_status bg_wrap(bg_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

const char *bg_status_name(bg_status st); /* "BG_NOMEM" ... */

#endif
