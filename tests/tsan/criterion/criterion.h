/* A stand-in for Criterion where its own processes cannot be started or are in the way
 * (ThreadSanitizer, compute-sanitizer): the same macros, those that the tests of threads and of
 * GPUs use; tests run one after another in one process. */
#ifndef BG_TESTS_TSAN_CRITERION_H
#define BG_TESTS_TSAN_CRITERION_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tsan_test {
    const char *name;
    void (*run)(void);
    struct tsan_test *next;
} tsan_test;

void tsan_register(tsan_test *t);
void tsan_fail(const char *file, int line, const char *what, int fatal);

#define Test(suite, name, ...)                                                                 \
    static void suite##_##name##_impl(void);                                                   \
    static tsan_test suite##_##name##_test = {#suite "::" #name, suite##_##name##_impl, NULL}; \
    __attribute__((constructor)) static void suite##_##name##_add(void)                        \
    {                                                                                          \
        tsan_register(&suite##_##name##_test);                                                 \
    }                                                                                          \
    static void suite##_##name##_impl(void)

#define TSAN_CHECK(fatal, cond, what)                            \
    do {                                                         \
        if (!(cond)) tsan_fail(__FILE__, __LINE__, what, fatal); \
    } while (0)

#define cr_assert(c, ...)              TSAN_CHECK(1, (c), #c)
#define cr_assert_not(c, ...)          TSAN_CHECK(1, !(c), "!" #c)
#define cr_assert_eq(a, b, ...)        TSAN_CHECK(1, (a) == (b), #a " == " #b)
#define cr_assert_neq(a, b, ...)       TSAN_CHECK(1, (a) != (b), #a " != " #b)
#define cr_assert_lt(a, b, ...)        TSAN_CHECK(1, (a) < (b), #a " < " #b)
#define cr_assert_leq(a, b, ...)       TSAN_CHECK(1, (a) <= (b), #a " <= " #b)
#define cr_assert_gt(a, b, ...)        TSAN_CHECK(1, (a) > (b), #a " > " #b)
#define cr_assert_geq(a, b, ...)       TSAN_CHECK(1, (a) >= (b), #a " >= " #b)
#define cr_assert_null(a, ...)         TSAN_CHECK(1, (a) == NULL, #a " is NULL")
#define cr_assert_not_null(a, ...)     TSAN_CHECK(1, (a) != NULL, #a " is not NULL")
#define cr_assert_str_eq(a, b, ...)    TSAN_CHECK(1, strcmp((a), (b)) == 0, #a " equals " #b)
#define cr_assert_arr_eq(a, b, n, ...) TSAN_CHECK(1, memcmp((a), (b), (n)) == 0, #a " equals " #b)
#define cr_expect(c, ...)              TSAN_CHECK(0, (c), #c)
#define cr_expect_not(c, ...)          TSAN_CHECK(0, !(c), "!" #c)
#define cr_expect_eq(a, b, ...)        TSAN_CHECK(0, (a) == (b), #a " == " #b)
#define cr_expect_null(a, ...)         TSAN_CHECK(0, (a) == NULL, #a " is NULL")
#define cr_expect_neq(a, b, ...)       TSAN_CHECK(0, (a) != (b), #a " != " #b)
#define cr_expect_lt(a, b, ...)        TSAN_CHECK(0, (a) < (b), #a " < " #b)
#define cr_expect_leq(a, b, ...)       TSAN_CHECK(0, (a) <= (b), #a " <= " #b)
#define cr_expect_gt(a, b, ...)        TSAN_CHECK(0, (a) > (b), #a " > " #b)
#define cr_expect_geq(a, b, ...)       TSAN_CHECK(0, (a) >= (b), #a " >= " #b)
#define cr_expect_arr_eq(a, b, n, ...) TSAN_CHECK(0, memcmp((a), (b), (n)) == 0, #a " equals " #b)
#define cr_expect_float_eq(a, b, e, ...) \
    TSAN_CHECK(0, (a) - (b) <= (e) && (b) - (a) <= (e), #a " is near " #b)
#define cr_assert_float_eq(a, b, e, ...) \
    TSAN_CHECK(1, (a) - (b) <= (e) && (b) - (a) <= (e), #a " is near " #b)
#define cr_fail(...)        tsan_fail(__FILE__, __LINE__, "fail", 0)
#define cr_fatal(...)       tsan_fail(__FILE__, __LINE__, "fail", 1)
#define cr_assert_fail(...) tsan_fail(__FILE__, __LINE__, "fail", 1)
#define cr_log_info(...)    (void)0
#define cr_skip(...)        return
#define cr_skip_test(...)   return

#endif
