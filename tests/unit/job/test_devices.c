/* --device to the GPU of each rank. */
#include "job/devices.h"

#include <stdio.h>
#include <string.h>

#include <criterion/criterion.h>

#define GB UINT64_C(1000000000)

Test(devices, parse)
{
    bg_device_choice d;
    bg_error err = {0};
    cr_assert_eq(bg_devices_parse(&d, "auto", &err), BG_OK);
    cr_assert(d.automatic && !d.cpu && d.n == 0);
    cr_assert_eq(bg_devices_parse(&d, "cpu", &err), BG_OK);
    cr_assert(d.cpu && !d.automatic);
    cr_assert_eq(bg_devices_parse(&d, "cuda", &err), BG_OK);
    cr_assert(!d.cpu && !d.automatic && d.n == 0);
    cr_assert_eq(bg_devices_parse(&d, "cuda:3", &err), BG_OK);
    cr_assert(d.n == 1 && d.named[0] == 3);
    cr_assert_eq(bg_devices_parse(&d, "cuda:0,0,12", &err), BG_OK);
    cr_assert(d.n == 3 && d.named[0] == 0 && d.named[1] == 0 && d.named[2] == 12);
    static const char *const bad[] = {"",        "gpu",     "cuda:",    "cuda:-1",   "cuda:1,",
                                      "cuda:,1", "cuda:1;", "cuda: 1",  "cuda:1,,2", "cuda1",
                                      "CPU",     "cuda:x",  "cuda:1 2", "cuda:99999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bg_error e = {0};
        cr_assert_eq(bg_devices_parse(&d, bad[i], &e), BG_ARG, "\"%s\"", bad[i]);
    }
    char many[400] = "cuda:0";
    for (int i = 0; i < BG_MAX_RANKS; i++)
        strcat(many, ",0");
    cr_assert_eq(bg_devices_parse(&d, many, &err), BG_ARG);
}

static const bg_gpu FOUR[] = {{.device = 0, .free_bytes = 20 * GB},
                              {.device = 1, .free_bytes = 3 * GB},
                              {.device = 2, .free_bytes = 30 * GB},
                              {.device = 3, .free_bytes = 24 * GB}};

/* Which GPUs, as text, or the error's. */
static const char *assign(const char *device, int n, int tp, int dp, const uint64_t *need,
                          uint64_t *left)
{
    static char text[300];
    bg_device_choice d;
    bg_device_plan p;
    bg_error err = {0};
    cr_assert_eq(bg_devices_parse(&d, device, &err), BG_OK);
    if (bg_devices_assign(&p, &d, FOUR, n, tp, dp, need, &err)) {
        cr_assert_eq(err.status, BG_ARG);
        snprintf(text, sizeof text, "%.290s", err.text);
        return text;
    }
    for (int r = 0; r < tp * dp; r++)
        snprintf(text + 2 * r, sizeof text - 2 * (size_t)r, "%d,", FOUR[p.gpus[r]].device);
    *left = p.free_bytes;
    return text;
}

Test(devices, assign)
{
    const uint64_t need[] = {10 * GB, 8 * GB};
    uint64_t left = 0;
    cr_assert_str_eq(assign("cuda", 4, 1, 1, need, &left), "0,");
    cr_assert_eq(left, 10 * GB);
    /* GPU 1 is too small */
    cr_assert_str_eq(assign("cuda", 4, 2, 1, need, &left), "0,2,");
    cr_assert_eq(left, 10 * GB);
    cr_assert_str_eq(assign("cuda", 4, 1, 3, need, &left), "0,2,3,");
    cr_assert_str_eq(assign("cuda:3,2", 4, 2, 1, need, &left), "3,2,");
    cr_assert_eq(left, 14 * GB);
    /* shared: each rank has its part of what is free */
    cr_assert_str_eq(assign("cuda:2", 4, 2, 1, need, &left), "2,2,");
    cr_assert_eq(left, 5 * GB);
    cr_assert_str_eq(assign("cuda:2,3", 4, 2, 2, need, &left), "2,3,2,3,");
    cr_assert_eq(left, 4 * GB);
}

Test(devices, what_does_not_go)
{
    const uint64_t need[] = {10 * GB, 8 * GB, 8 * GB, 8 * GB}, huge[] = {25 * GB, 25 * GB};
    uint64_t left;
    cr_assert(strstr(assign("cuda", 1, 2, 1, need, &left), "there is only 1 GPU;"));
    cr_assert(strstr(assign("cuda", 1, 2, 1, need, &left), "cuda:0,0"));
    cr_assert(strstr(assign("cuda", 4, 4, 2, need, &left), "--tp 4 --dp 2 (8 ranks)"));
    cr_assert(strstr(assign("cuda", 4, 2, 1, huge, &left), "1 of 4 GPUs"));
    cr_assert(strstr(assign("cuda:4", 4, 1, 1, need, &left), "no GPU 4"));
    cr_assert(strstr(assign("cuda:1", 4, 1, 1, need, &left), "GPU 1"));
    cr_assert(strstr(assign("cuda:0,2", 4, 1, 1, need, &left), "names 2 GPUs"));
    cr_assert(strstr(assign("cuda:0,2", 4, 1, 3, need, &left), "names 2 GPUs"));
    cr_assert(strstr(assign("cuda:0", 4, 2, 2, need, &left), "share of GPU 0"));
}
