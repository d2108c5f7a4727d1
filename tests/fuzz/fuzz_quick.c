/* The fast JSON reader: whatever it reads, jansson reads as the same value. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "input/quick.h"
#include "input/scan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *s = (const char *)data;
    bool nomem;
    if (bg_scan_too_deep(s, size, 64)) return 0;
    json_t *got = bg_quick_load(s, size, &nomem);
    if (!got) return 0;
    json_t *want =
        json_loadb(s, size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    if (!want || !json_equal(got, want)) abort();
    char *x = json_dumps(got, JSON_ENCODE_ANY), *y = json_dumps(want, JSON_ENCODE_ANY);
    if (!x || !y || strcmp(x, y) != 0) abort();
    free(x);
    free(y);
    json_decref(got);
    json_decref(want);
    return 0;
}
