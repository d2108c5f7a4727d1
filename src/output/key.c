#include <string.h>

#include "base/hash.h"
#include "output/output.h"

uint64_t bg_result_key(const char *id, uint64_t content_hash)
{
    if (!id) return content_hash;
    return (bg_hash64(id, strlen(id), 0) & UINT64_C(0xffffffff00000000)) |
           (content_hash & UINT64_C(0xffffffff));
}
