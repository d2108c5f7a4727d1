#include "base/ordered.h"

#include <stdint.h>
#include <stdlib.h>

#include <criterion/criterion.h>

#include <pthread.h>

typedef struct item {
    int in, out;
} item;

/* Uneven work, so that later items overtake earlier ones inside. */
static void work(void *ctx, void *p)
{
    item *it = p;
    unsigned x = (unsigned)it->in * 2654435761u;
    volatile unsigned spin = x % 20000;
    while (spin)
        spin--;
    it->out = it->in * 3 + *(int *)ctx;
}

typedef struct producer {
    bg_ordered *o;
    int n, pushed;
} producer;

static void *produce(void *p)
{
    producer *pr = p;
    for (int i = 0; i < pr->n; i++) {
        item *it = malloc(sizeof *it);
        *it = (item){.in = i};
        if (!bg_ordered_push(pr->o, it)) {
            free(it);
            break;
        }
        pr->pushed++;
    }
    bg_ordered_end(pr->o);
    return NULL;
}

Test(ordered, keeps_order_for_any_threads_and_window)
{
    for (int threads = 1; threads <= 4; threads++) {
        for (size_t window = 1; window <= 64; window *= 8) {
            bg_error err = {0};
            bg_ordered *o;
            int add = threads;
            cr_assert_eq(bg_ordered_new(&o, threads, window, work, &add, &err), BG_OK);
            producer pr = {o, 500, 0};
            pthread_t t;
            pthread_create(&t, NULL, produce, &pr);
            int n = 0;
            for (item *it; (it = bg_ordered_pop(o)); n++) {
                cr_assert_eq(it->in, n);
                cr_assert_eq(it->out, n * 3 + add);
                free(it);
            }
            pthread_join(t, NULL);
            cr_assert_eq(n, 500);
            bg_ordered_free(o, NULL);
        }
    }
}

Test(ordered, stop_wakes_both_ends_and_free_drops_the_rest)
{
    bg_error err = {0};
    bg_ordered *o;
    int add = 0;
    cr_assert_eq(bg_ordered_new(&o, 2, 4, work, &add, &err), BG_OK);
    producer pr = {o, 1000000, 0};
    pthread_t t;
    pthread_create(&t, NULL, produce, &pr);
    for (int i = 0; i < 10; i++)
        free(bg_ordered_pop(o));
    bg_ordered_stop(o);
    pthread_join(t, NULL);
    cr_assert_null(bg_ordered_pop(o));
    cr_assert_lt(pr.pushed, 20);
    bg_ordered_free(o, free);
}
