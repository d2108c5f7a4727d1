/* The queue alone, and between threads. */
#include "base/queue.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include <criterion/criterion.h>

static void *item(uintptr_t v)
{
    return (void *)v;
}

Test(queue, first_in_first_out)
{
    bg_queue *q = bg_queue_new(3);
    cr_assert_not_null(q);
    cr_expect_null(bg_queue_try_pop(q));
    cr_expect_null(bg_queue_pop_within(q, 0));
    cr_expect_null(bg_queue_pop_within(q, 1000));
    for (uintptr_t round = 0; round < 5; round++) { /* around the ring's end */
        cr_expect(bg_queue_push(q, item(10 * round + 1)));
        cr_expect(bg_queue_push(q, item(10 * round + 2)));
        cr_expect_eq(bg_queue_len(q), 2);
        cr_expect_eq(bg_queue_pop(q), item(10 * round + 1));
        cr_expect_eq(bg_queue_pop_within(q, 1000000000), item(10 * round + 2));
    }
    bg_queue_free(q);
    bg_queue_free(NULL);
}

Test(queue, closing)
{
    bg_queue *q = bg_queue_new(4);
    bg_queue_push(q, item(1));
    bg_queue_push(q, item(2));
    cr_expect_not(bg_queue_closed(q));
    bg_queue_close(q);
    bg_queue_close(q);
    cr_expect_not(bg_queue_push(q, item(3)));
    cr_expect_not(bg_queue_closed(q), "what is inside can still be had");
    cr_expect_eq(bg_queue_pop(q), item(1));
    cr_expect_eq(bg_queue_try_pop(q), item(2));
    cr_expect(bg_queue_closed(q));
    cr_expect_null(bg_queue_pop(q));
    cr_expect_null(bg_queue_pop_within(q, INT64_C(1000000000)));
    bg_queue_free(q);
}

enum { PRODUCERS = 3, CONSUMERS = 3, EACH = 20000 };

typedef struct side {
    bg_queue *q;
    uintptr_t id;
    uint64_t sum, n;
    uintptr_t last[PRODUCERS]; /* each producer's items must come in order */
    int disorder;
} side;

static void *produce(void *arg)
{
    side *s = arg;
    for (uintptr_t i = 1; i <= EACH; i++)
        s->n += bg_queue_push(s->q, item(i << 4 | s->id));
    return NULL;
}

static void *consume(void *arg)
{
    side *s = arg;
    for (void *p;
         (p = s->n % 3 ? bg_queue_pop_within(s->q, INT64_C(60000000000)) : bg_queue_pop(s->q));) {
        uintptr_t v = (uintptr_t)p >> 4, who = (uintptr_t)p & 15;
        s->disorder += v <= s->last[who];
        s->last[who] = v;
        s->sum += v;
        s->n++;
    }
    return NULL;
}

Test(queue, many_threads)
{
    static const size_t capacities[] = {1, 7, 1000};
    for (size_t c = 0; c < 3; c++) {
        bg_queue *q = bg_queue_new(capacities[c]);
        side in[PRODUCERS] = {0}, out[CONSUMERS] = {0};
        pthread_t t[PRODUCERS + CONSUMERS];
        for (int i = 0; i < CONSUMERS; i++) {
            out[i].q = q;
            cr_assert_eq(pthread_create(&t[PRODUCERS + i], NULL, consume, &out[i]), 0);
        }
        for (int i = 0; i < PRODUCERS; i++) {
            in[i].q = q;
            in[i].id = (uintptr_t)i;
            cr_assert_eq(pthread_create(&t[i], NULL, produce, &in[i]), 0);
        }
        for (int i = 0; i < PRODUCERS; i++)
            pthread_join(t[i], NULL);
        bg_queue_close(q);
        uint64_t n = 0, sum = 0;
        for (int i = 0; i < CONSUMERS; i++) {
            pthread_join(t[PRODUCERS + i], NULL);
            n += out[i].n;
            sum += out[i].sum;
            cr_expect_eq(out[i].disorder, 0);
        }
        cr_expect_eq(n, PRODUCERS * EACH);
        cr_expect_eq(sum, (uint64_t)PRODUCERS * EACH * (EACH + 1) / 2);
        cr_expect(bg_queue_closed(q));
        bg_queue_free(q);
    }
}

/* Closing must free whoever waits, on either side. */
Test(queue, closing_wakes_all_waiters)
{
    bg_queue *empty = bg_queue_new(1), *full = bg_queue_new(1);
    bg_queue_push(full, item(1));
    side out[2] = {{.q = empty}, {.q = empty}}, in = {.q = full, .id = 0};
    pthread_t t[3];
    cr_assert_eq(pthread_create(&t[0], NULL, consume, &out[0]), 0);
    cr_assert_eq(pthread_create(&t[1], NULL, consume, &out[1]), 0);
    cr_assert_eq(pthread_create(&t[2], NULL, produce, &in), 0);
    bg_queue_close(empty);
    bg_queue_close(full);
    for (int i = 0; i < 3; i++)
        pthread_join(t[i], NULL);
    cr_expect_eq(out[0].n + out[1].n, 0);
    cr_expect_eq(in.n, 0);
    cr_expect_eq(bg_queue_len(full), 1);
    bg_queue_free(empty);
    bg_queue_free(full);
}
