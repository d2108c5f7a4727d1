/* KV block pool and prefix cache: what is free, what is found again, and in which order it is lost.
 */
#include "engine/kv_pool.h"
#include "engine/prefix.h"

#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/rng.h"

static bg_kv_pool *new_pool(int n)
{
    bg_kv_pool *p;
    bg_error err = {0};
    cr_assert_eq(bg_kv_new(&p, n, &err), BG_OK);
    return p;
}

static void check(const bg_kv_pool *p)
{
    bg_error err = {0};
    cr_assert_eq(bg_kv_check(p, &err), BG_OK, "%s", err.text);
}

Test(kv, refuses_too_few)
{
    bg_kv_pool *p;
    bg_error err = {0};
    cr_assert_eq(bg_kv_new(&p, 1, &err), BG_ARG);
    cr_assert_null(p);
}

Test(kv, takes_all_or_none_and_never_scratch)
{
    bg_kv_pool *p = new_pool(8);
    int32_t b[8];
    cr_assert_not(bg_kv_take(p, 8, b));
    cr_assert_eq(bg_kv_n_free(p), 7);
    cr_assert(bg_kv_take(p, 7, b));
    bool seen[8] = {0};
    for (int i = 0; i < 7; i++) {
        cr_assert(b[i] > 0 && b[i] < 8 && !seen[b[i]]);
        seen[b[i]] = true;
    }
    cr_assert_not(bg_kv_take(p, 1, b + 7));
    cr_assert(bg_kv_take(p, 0, b + 7));
    check(p);
    bg_kv_hold(p, b[0]);
    bg_kv_drop(p, b[0], false);
    cr_assert_eq(bg_kv_n_free(p), 0);
    for (int i = 0; i < 7; i++)
        bg_kv_drop(p, b[i], i % 2);
    cr_assert_eq(bg_kv_n_free(p), 7);
    check(p);
    bg_kv_free(p);
}

Test(kv, kept_blocks_are_handed_out_last_and_in_order)
{
    bg_kv_pool *p = new_pool(6);
    int32_t b[5], c[5];
    cr_assert(bg_kv_take(p, 5, b));
    bg_kv_drop(p, b[3], true);
    bg_kv_drop(p, b[1], true);
    bg_kv_drop(p, b[4], false);
    bg_kv_drop(p, b[0], true);
    bg_kv_drop(p, b[2], false);
    bg_kv_hold(p, b[1]); /* found again while free */
    cr_assert_eq(bg_kv_n_free(p), 4);
    check(p);
    cr_assert(bg_kv_take(p, 4, c));
    cr_assert(c[0] == b[2] && c[1] == b[4]); /* nobody wants these back */
    cr_assert(c[2] == b[3] && c[3] == b[0]); /* least recently dropped first */
    check(p);
    bg_kv_free(p);
}

Test(kv, random_use_keeps_the_books)
{
    enum { N = 40 };
    bg_kv_pool *p = new_pool(N);
    int refs[N] = {0}, n_held = 0;
    for (uint64_t i = 0; i < 20000; i++) {
        uint64_t r = bg_mix64(i);
        int32_t b = (int32_t)(r >> 8) % N, got[4];
        if (b < 0) b = -b;
        int want = (int)(r & 3);
        if (r & 4) {
            bool ok = bg_kv_take(p, want, got);
            cr_assert_eq(ok, want <= N - 1 - n_held);
            for (int k = 0; ok && k < want; k++, n_held++) {
                cr_assert_eq(refs[got[k]], 0);
                refs[got[k]] = 1;
            }
        } else if (b > 0 && (r & 8)) {
            bg_kv_hold(p, b);
            n_held += refs[b]++ == 0;
        } else if (b > 0 && refs[b]) {
            bg_kv_drop(p, b, r & 16);
            n_held -= --refs[b] == 0;
        }
        cr_assert_eq(bg_kv_n_free(p), N - 1 - n_held);
        if (i % 100 == 0) check(p);
    }
    bg_kv_reset(p);
    cr_assert_eq(bg_kv_n_free(p), N - 1);
    check(p);
    bg_kv_free(p);
}

Test(prefix, finds_only_the_same_tokens_after_the_same_prefix)
{
    bg_prefix *p;
    bg_error err = {0};
    cr_assert_eq(bg_prefix_new(&p, 16, 4, &err), BG_OK);
    const int32_t a[4] = {1, 2, 3, 4}, b[4] = {5, 6, 7, 8};
    uint64_t s, s1, s2;
    cr_assert_eq(bg_prefix_find(p, BG_PREFIX_ROOT, a, &s), -1);
    s1 = bg_prefix_add(p, BG_PREFIX_ROOT, a, 3);
    s2 = bg_prefix_add(p, s1, b, 5);
    cr_assert_eq(bg_prefix_find(p, BG_PREFIX_ROOT, a, &s), 3);
    cr_assert_eq(s, s1);
    cr_assert_eq(bg_prefix_find(p, s1, b, &s), 5);
    cr_assert_eq(s, s2);
    cr_assert_eq(bg_prefix_find(p, BG_PREFIX_ROOT, b, &s), -1); /* right tokens, wrong place */
    cr_assert_eq(bg_prefix_find(p, s2, b, &s), -1);
    cr_assert_eq(bg_prefix_find(p, s1, a, &s), -1);
    /* a second block with the same content is not taken in */
    cr_assert_eq(bg_prefix_add(p, BG_PREFIX_ROOT, a, 9), s1);
    cr_assert(bg_prefix_has(p, 3) && !bg_prefix_has(p, 9));
    bg_prefix_forget(p, 9);
    bg_prefix_forget(p, 3);
    cr_assert_eq(bg_prefix_find(p, BG_PREFIX_ROOT, a, &s), -1);
    /* the same tokens again are another parent: the old child does not come back under it */
    cr_assert_neq(bg_prefix_add(p, BG_PREFIX_ROOT, a, 9), s1);
    cr_assert_eq(bg_prefix_find(p, BG_PREFIX_ROOT, a, &s), 9);
    cr_assert_eq(bg_prefix_find(p, s, b, &s), -1);
    bg_prefix_reset(p);
    cr_assert_eq(bg_prefix_find(p, BG_PREFIX_ROOT, a, &s), -1);
    cr_assert_not(bg_prefix_has(p, 5));
    bg_prefix_free(p);
}

Test(prefix, against_a_plain_list)
{
    enum { N = 32 };
    bg_prefix *p;
    bg_error err = {0};
    cr_assert_eq(bg_prefix_new(&p, N, 2, &err), BG_OK);
    struct {
        bool in;
        uint64_t parent, serial;
        int32_t t[2];
    } list[N] = {0};
    uint64_t serials[8] = {BG_PREFIX_ROOT};
    for (uint64_t i = 0; i < 20000; i++) {
        uint64_t r = bg_mix64(i + 99), parent = serials[r & 7], s = 0;
        int32_t t[2] = {(int32_t)(r >> 8 & 1), (int32_t)(r >> 9 & 1)}, want = -1;
        for (int b = 0; b < N; b++)
            if (list[b].in && list[b].parent == parent && memcmp(list[b].t, t, sizeof t) == 0)
                want = b;
        cr_assert_eq(bg_prefix_find(p, parent, t, &s), want);
        if (want >= 0) cr_assert_eq(s, list[want].serial);
        int32_t b = (int32_t)(r >> 16 & (N - 1));
        if (list[b].in) {
            bg_prefix_forget(p, b);
            list[b].in = false;
        } else {
            uint64_t got = bg_prefix_add(p, parent, t, b);
            cr_assert_eq(bg_prefix_has(p, b), want < 0);
            if (want < 0) {
                list[b].in = true;
                list[b].parent = parent;
                list[b].serial = got;
                memcpy(list[b].t, t, sizeof t);
            } else {
                cr_assert_eq(got, list[want].serial);
            }
            serials[r >> 32 & 7] = r >> 35 & 1 ? got : BG_PREFIX_ROOT;
        }
    }
    bg_prefix_free(p);
}
