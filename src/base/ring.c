#include "base/ring.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

enum {
    SPIN_NS = 4000,
    HEADER = 8, /* bytes before each message */
};

typedef struct bell { /* where one side sleeps */
    _Alignas(64) _Atomic uint32_t rings;
    _Atomic uint32_t sleeping;
} bell;

struct bg_ring {
    uint64_t capacity; /* a power of two */
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint64_t tail;
    bell reader, writer;
    _Alignas(64) _Atomic uint32_t closed;
    _Atomic uint32_t kicked;
    _Alignas(64) unsigned char data[];
};

static uint64_t round_capacity(size_t capacity)
{
    uint64_t c = 64;
    while (c < capacity)
        c *= 2;
    return c;
}

size_t bg_ring_bytes(size_t capacity)
{
    return sizeof(bg_ring) + (size_t)round_capacity(capacity);
}

bg_ring *bg_ring_init(void *memory, size_t capacity)
{
    bg_ring *r = memory;
    memset(r, 0, sizeof *r);
    r->capacity = round_capacity(capacity);
    return r;
}

/* Shared futexes: the two sides may be processes. */
static void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns)
{
    struct timespec t = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout_ns < 0 ? NULL : &t, NULL, 0);
}

static void ring_bell(bell *b)
{
    if (!atomic_load(&b->sleeping)) return;
    atomic_fetch_add(&b->rings, 1);
    syscall(SYS_futex, &b->rings, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until ready(r, need). False: timeout. ready() uses sequentially consistent loads. */
static bool wait_until(bg_ring *r, bell *b, bool (*ready)(bg_ring *, uint64_t), uint64_t need,
                       int64_t timeout_ns)
{
    if (ready(r, need)) return true;
    if (timeout_ns == 0) return false;
    int64_t start = bg_now_ns(), now = start;
    int64_t spin_ns = timeout_ns > 0 && timeout_ns < SPIN_NS ? timeout_ns : SPIN_NS;
    while (now - start < spin_ns) {
        for (int i = 0; i < 16; i++) {
            pause_cpu();
            if (ready(r, need)) return true;
        }
        now = bg_now_ns();
    }
    bool ok;
    atomic_fetch_add(&b->sleeping, 1);
    for (;;) {
        uint32_t seen = atomic_load(&b->rings);
        ok = ready(r, need);
        int64_t left = timeout_ns < 0 ? -1 : timeout_ns - (bg_now_ns() - start);
        if (ok || (timeout_ns > 0 && left <= 0)) break;
        futex_wait(&b->rings, seen, left);
    }
    atomic_fetch_sub(&b->sleeping, 1);
    return ok;
}

static uint64_t padded(uint64_t n)
{
    return HEADER + ((n + 7) & ~(uint64_t)7);
}

static void copy_in(bg_ring *r, uint64_t at, const void *data, size_t n)
{
    size_t pos = (size_t)(at & (r->capacity - 1)), first = (size_t)r->capacity - pos;
    if (first > n) first = n;
    memcpy(r->data + pos, data, first);
    if (n > first) memcpy(r->data, (const char *)data + first, n - first);
}

static void copy_out(const bg_ring *r, uint64_t at, void *data, size_t n)
{
    size_t pos = (size_t)(at & (r->capacity - 1)), first = (size_t)r->capacity - pos;
    if (first > n) first = n;
    memcpy(data, r->data + pos, first);
    if (n > first) memcpy((char *)data + first, r->data, n - first);
}

static bool writer_ready(bg_ring *r, uint64_t need)
{
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed); /* the caller's own */
    return atomic_load(&r->closed) || r->capacity - (head - atomic_load(&r->tail)) >= need;
}

bg_ring_result bg_ring_write(bg_ring *r, const void *data, size_t n, int64_t timeout_ns)
{
    if (n > r->capacity - 2 * HEADER) return BG_RING_TOO_BIG;
    uint64_t need = padded(n);
    if (!wait_until(r, &r->writer, writer_ready, need, timeout_ns)) return BG_RING_TIMEOUT;
    if (atomic_load(&r->closed)) return BG_RING_CLOSED;
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed), length = n;
    copy_in(r, head, &length, sizeof length);
    if (n) copy_in(r, head + HEADER, data, n);
    atomic_store(&r->head, head + need);
    ring_bell(&r->reader);
    return BG_RING_OK;
}

static bool reader_ready(bg_ring *r, uint64_t need)
{
    (void)need;
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed); /* the caller's own */
    return atomic_load(&r->head) != tail || atomic_load(&r->kicked) || atomic_load(&r->closed);
}

bg_ring_result bg_ring_read(bg_ring *r, void *buf, size_t cap, size_t *n, int64_t timeout_ns)
{
    *n = 0;
    if (!wait_until(r, &r->reader, reader_ready, 0, timeout_ns)) return BG_RING_TIMEOUT;
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    /* closed is read before head: what was written before the close is still seen. */
    bool closed = atomic_load(&r->closed);
    uint64_t head = atomic_load(&r->head), length;
    if (head == tail) {
        if (atomic_exchange(&r->kicked, 0)) return BG_RING_KICKED;
        return closed ? BG_RING_CLOSED : BG_RING_TIMEOUT;
    }
    if (head - tail > r->capacity || head - tail < HEADER) return BG_RING_BROKEN;
    copy_out(r, tail, &length, sizeof length);
    if (length > r->capacity || padded(length) > head - tail) return BG_RING_BROKEN;
    *n = (size_t)length;
    if (length > cap) return BG_RING_TOO_BIG;
    if (length) copy_out(r, tail + HEADER, buf, (size_t)length);
    atomic_store(&r->tail, tail + padded(length));
    ring_bell(&r->writer);
    return BG_RING_OK;
}

void bg_ring_kick(bg_ring *r)
{
    atomic_store(&r->kicked, 1);
    ring_bell(&r->reader);
}

void bg_ring_close(bg_ring *r)
{
    atomic_store(&r->closed, 1);
    ring_bell(&r->reader);
    ring_bell(&r->writer);
}
