/* Runs the registered tests and closes with the line that tests/run.sh reads. Arguments: only those
 * with TEXT in their names; without those with TEXT: -TEXT. */
#include "criterion/criterion.h"

#include <pthread.h>

static tsan_test *first, **last = &first;
static int failing;

void tsan_register(tsan_test *t)
{
    *last = t;
    last = &t->next;
}

void tsan_fail(const char *file, int line, const char *what, int fatal)
{
    fprintf(stderr, "%s:%d: %s\n", file, line, what);
    __atomic_add_fetch(&failing, 1, __ATOMIC_RELAXED);
    if (fatal) {
        printf("Synthesis: Tested: 1 | Passing: 0 | Failing: 1 | Crashing: 0\n");
        fflush(stdout);
        _Exit(1);
    }
}

static int wanted(const char *name, char **args)
{
    int any = 0, found = 0;
    for (; *args; args++) {
        if (**args == '-' && strstr(name, *args + 1)) return 0;
        any |= **args != '-';
        found |= **args != '-' && strstr(name, *args) != NULL;
    }
    return !any || found;
}

int main(int argc, char **argv)
{
    int tested = 0, passing = 0;
    (void)argc;
    for (tsan_test *t = first; t; t = t->next) {
        if (!wanted(t->name, argv + 1)) continue;
        int before = failing;
        fprintf(stderr, "%s\n", t->name);
        t->run();
        tested++;
        passing += failing == before;
    }
    printf("Synthesis: Tested: %d | Passing: %d | Failing: %d | Crashing: 0\n", tested, passing,
           tested - passing);
    return failing != 0;
}
