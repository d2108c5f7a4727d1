/* The ring between threads and between processes: every message whole, in order, whatever the
 * sizes. */
#include "base/ring.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "base/rng.h"

static bg_ring *new_ring(size_t capacity)
{
    size_t bytes = bg_ring_bytes(capacity);
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(m, MAP_FAILED);
    memset(m, 0xa5, bytes); /* init must not rely on zeroes */
    return bg_ring_init(m, capacity);
}

/* Message i of a stream: its length and bytes follow from (seed, i). */
static size_t message(uint64_t seed, uint64_t i, unsigned char *out, size_t max)
{
    size_t n = (size_t)(bg_mix64(seed ^ bg_mix64(i)) % (max + 1));
    for (size_t k = 0; k < n; k++)
        out[k] = (unsigned char)bg_mix64(seed + i * 1000003 + k);
    return n;
}

typedef struct stream {
    bg_ring *ring;
    uint64_t seed, count;
    size_t max;
} stream;

static void *write_stream(void *arg)
{
    stream *s = arg;
    unsigned char buf[4096];
    for (uint64_t i = 0; i < s->count; i++) {
        size_t n = message(s->seed, i, buf, s->max);
        if (bg_ring_write(s->ring, buf, n, -1)) return NULL;
    }
    bg_ring_close(s->ring);
    return NULL;
}

static void check_stream(stream *s)
{
    unsigned char got[4096], want[4096];
    for (uint64_t i = 0; i < s->count; i++) {
        size_t n, m = message(s->seed, i, want, s->max);
        bg_ring_result res;
        while ((res = bg_ring_read(s->ring, got, sizeof got, &n, -1)) == BG_RING_KICKED) {
        }
        cr_assert_eq(res, BG_RING_OK, "message %zu: result %d", (size_t)i, res);
        cr_assert_eq(n, m, "message %zu: %zu bytes, want %zu", (size_t)i, n, m);
        cr_assert(memcmp(got, want, n) == 0, "message %zu differs", (size_t)i);
    }
    size_t n;
    cr_assert_eq(bg_ring_read(s->ring, got, sizeof got, &n, -1), BG_RING_CLOSED);
}

Test(ring, one_message_at_a_time)
{
    bg_ring *r = new_ring(100); /* 128 */
    unsigned char buf[128] = {1, 2, 3}, got[128];
    size_t n = 7;
    cr_assert_eq(bg_ring_read(r, got, sizeof got, &n, 0), BG_RING_TIMEOUT);
    cr_assert_eq(n, 0);
    cr_assert_eq(bg_ring_read(r, got, sizeof got, &n, 1000), BG_RING_TIMEOUT);
    for (size_t len = 0; len <= 112; len++) { /* 112 = capacity - 16 fills it */
        cr_assert_eq(bg_ring_write(r, buf, len, 0), BG_RING_OK, "%zu bytes", len);
        cr_assert_eq(bg_ring_read(r, got, sizeof got, &n, 0), BG_RING_OK);
        cr_assert_eq(n, len);
        cr_assert(memcmp(got, buf, len) == 0);
    }
    cr_assert_eq(bg_ring_write(r, buf, 113, -1), BG_RING_TOO_BIG);
}

Test(ring, full_and_too_small_a_buffer)
{
    bg_ring *r = new_ring(64);
    unsigned char buf[48] = {9}, got[48];
    size_t n;
    cr_assert_eq(bg_ring_write(r, buf, 40, 0), BG_RING_OK);
    cr_assert_eq(bg_ring_write(r, buf, 9, 0), BG_RING_TIMEOUT); /* 48 + 24 > 64 */
    cr_assert_eq(bg_ring_write(r, buf, 9, 50000), BG_RING_TIMEOUT);
    cr_assert_eq(bg_ring_write(r, buf, 8, 0), BG_RING_OK); /* exactly full */
    cr_assert_eq(bg_ring_read(r, got, 39, &n, 0), BG_RING_TOO_BIG);
    cr_assert_eq(n, 40);
    cr_assert_eq(bg_ring_read(r, got, 40, &n, 0), BG_RING_OK); /* it was still there */
    cr_assert_eq(n, 40);
    cr_assert_eq(bg_ring_read(r, got, 40, &n, 0), BG_RING_OK);
    cr_assert_eq(n, 8);
}

Test(ring, kicks_and_close)
{
    bg_ring *r = new_ring(256);
    char got[16];
    size_t n;
    bg_ring_kick(r);
    bg_ring_kick(r);
    cr_assert_eq(bg_ring_read(r, got, 16, &n, -1), BG_RING_KICKED);
    cr_assert_eq(bg_ring_read(r, got, 16, &n, 0), BG_RING_TIMEOUT); /* they do not add up */
    bg_ring_kick(r);
    cr_assert_eq(bg_ring_write(r, "abc", 3, 0), BG_RING_OK);
    cr_assert_eq(bg_ring_read(r, got, 16, &n, -1), BG_RING_OK); /* messages first */
    cr_assert_eq(bg_ring_read(r, got, 16, &n, -1), BG_RING_KICKED);
    cr_assert_eq(bg_ring_write(r, "de", 2, 0), BG_RING_OK);
    bg_ring_close(r);
    cr_assert_eq(bg_ring_write(r, "f", 1, -1), BG_RING_CLOSED);
    cr_assert_eq(bg_ring_read(r, got, 16, &n, -1), BG_RING_OK);
    cr_assert_eq(n, 2);
    cr_assert_eq(bg_ring_read(r, got, 16, &n, -1), BG_RING_CLOSED);
}

Test(ring, between_threads)
{
    static const size_t caps[] = {64, 128, 1024, 8192};
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
        stream s = {new_ring(caps[i]), i, 6000, caps[i] > 4112 ? 4096 : caps[i] - 16};
        if (s.max > 2000) s.count = 1500;
        pthread_t t;
        pthread_create(&t, NULL, write_stream, &s);
        check_stream(&s);
        pthread_join(t, NULL);
    }
}

static void *kick_often(void *arg)
{
    stream *s = arg;
    for (int i = 0; i < 20000; i++)
        bg_ring_kick(s->ring);
    return NULL;
}

Test(ring, kicks_from_a_third_thread)
{
    stream s = {new_ring(128), 77, 5000, 100};
    pthread_t t, k;
    pthread_create(&t, NULL, write_stream, &s);
    pthread_create(&k, NULL, kick_often, &s);
    unsigned char got[128], want[128];
    for (uint64_t i = 0; i < s.count;) {
        size_t n, m;
        bg_ring_result res = bg_ring_read(s.ring, got, sizeof got, &n, -1);
        if (res == BG_RING_KICKED) continue;
        cr_assert_eq(res, BG_RING_OK);
        m = message(s.seed, i++, want, s.max);
        cr_assert(n == m && memcmp(got, want, n) == 0);
    }
    pthread_join(t, NULL);
    pthread_join(k, NULL);
}

static void *close_it(void *arg)
{
    bg_ring_close(arg);
    return NULL;
}

Test(ring, close_wakes_both_sides)
{
    for (int i = 0; i < 50; i++) {
        bg_ring *r = new_ring(64);
        pthread_t t;
        char got[64] = {0};
        size_t n;
        if (i % 2) cr_assert_eq(bg_ring_write(r, got, 48, 0), BG_RING_OK);
        pthread_create(&t, NULL, close_it, r);
        if (i % 2)
            cr_assert_eq(bg_ring_write(r, got, 48, -1), BG_RING_CLOSED);
        else
            cr_assert_eq(bg_ring_read(r, got, 64, &n, -1), BG_RING_CLOSED);
        pthread_join(t, NULL);
    }
}

/* A writer process killed at any moment: what arrived is whole and in order. */
Test(ring, between_processes_with_a_killed_writer)
{
    for (int round = 0; round < 8; round++) {
        stream s = {new_ring(512), (uint64_t)round, UINT64_MAX, 300};
        pid_t pid = fork();
        cr_assert_geq(pid, 0);
        if (pid == 0) {
            write_stream(&s);
            _exit(0);
        }
        unsigned char got[512], want[512];
        uint64_t i = 0, stop = 50 + bg_mix64((uint64_t)round) % 500;
        bool killed = false;
        for (;;) {
            size_t n;
            bg_ring_result res = bg_ring_read(s.ring, got, sizeof got, &n, killed ? 0 : -1);
            if (res == BG_RING_TIMEOUT) break;
            cr_assert_eq(res, BG_RING_OK, "message %zu: %d", (size_t)i, res);
            size_t m = message(s.seed, i++, want, s.max);
            cr_assert(n == m && memcmp(got, want, n) == 0);
            if (i == stop) {
                kill(pid, SIGKILL);
                waitpid(pid, NULL, 0);
                killed = true;
            }
        }
        cr_assert(killed && i >= stop);
    }
}
