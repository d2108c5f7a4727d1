/* A folder and an output's name in it, for the tests of what only reads outputs. */
#ifndef BG_TEST_OUTPUT_SCRATCH_H
#define BG_TEST_OUTPUT_SCRATCH_H

#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char dir[] = "/tmp/bg-read-XXXXXX";
static char out_path[64];

static void set_up(void)
{
    cr_assert(mkdtemp(dir));
    snprintf(out_path, sizeof out_path, "%s/out", dir);
}

static void tear_down(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    cr_expect_eq(system(command), 0);
}

static void store(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    cr_assert(f);
    if (n) cr_assert_eq(fwrite(data, 1, n, f), n);
    cr_assert_eq(fclose(f), 0);
}

#endif
