#include "output/keys.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/rng.h"
#include "output/ranges.h"

enum { SPAN = 512 }; /* records of a page */

typedef struct page { /* the known ones of SPAN records, ascending */
    int64_t no;
    uint32_t n, cap;
    uint64_t *keys;
    uint16_t *slots; /* record % SPAN of each */
} page;

struct bg_keys {
    page *table; /* open addressing; keys NULL: free */
    size_t cap, n;
};

bg_keys *bg_keys_new(void)
{
    return calloc(1, sizeof(bg_keys));
}

void bg_keys_free(bg_keys *k)
{
    if (!k) return;
    for (size_t i = 0; i < k->cap; i++) {
        free(k->table[i].keys);
        free(k->table[i].slots);
    }
    free(k->table);
    free(k);
}

static page *find(page *table, size_t cap, int64_t no)
{
    size_t i = (size_t)bg_mix64((uint64_t)no) & (cap - 1);
    while (table[i].keys && table[i].no != no)
        i = (i + 1) & (cap - 1);
    return &table[i];
}

static bool grow_table(bg_keys *k)
{
    size_t cap = k->cap ? k->cap * 2 : 16;
    page *table = calloc(cap, sizeof *table);
    if (!table) return false;
    for (size_t i = 0; i < k->cap; i++)
        if (k->table[i].keys) *find(table, cap, k->table[i].no) = k->table[i];
    free(k->table);
    k->table = table;
    k->cap = cap;
    return true;
}

static bool grow_page(page *p)
{
    uint32_t cap = p->cap ? p->cap * 2 : 2;
    uint16_t *slots = realloc(p->slots, cap * sizeof *slots);
    if (!slots) return false;
    p->slots = slots;
    uint64_t *keys = realloc(p->keys, cap * sizeof *keys);
    if (!keys) return false;
    p->keys = keys;
    p->cap = cap;
    return true;
}

/* The first place whose slot is not below. */
static uint32_t place(const page *p, uint16_t slot)
{
    uint32_t lo = 0, hi = p->n;
    if (hi && p->slots[hi - 1] < slot) return hi;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (p->slots[mid] < slot)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool bg_keys_set(bg_keys *k, int64_t record, uint64_t key)
{
    if (record < 0) return false;
    if (4 * (k->n + 1) > 3 * k->cap && !grow_table(k)) return false;
    int64_t no = record / SPAN;
    uint16_t slot = (uint16_t)(record % SPAN);
    page *p = find(k->table, k->cap, no);
    if (!p->keys) {
        if (!grow_page(p)) {
            free(p->slots);
            p->slots = NULL;
            return false;
        }
        p->no = no;
        p->slots[0] = slot;
        p->keys[0] = key;
        p->n = 1;
        k->n++;
        return true;
    }
    uint32_t at = place(p, slot);
    if (at < p->n && p->slots[at] == slot) {
        p->keys[at] = key;
        return true;
    }
    if (p->n == p->cap && !grow_page(p)) return false;
    memmove(p->slots + at + 1, p->slots + at, (p->n - at) * sizeof *p->slots);
    memmove(p->keys + at + 1, p->keys + at, (p->n - at) * sizeof *p->keys);
    p->slots[at] = slot;
    p->keys[at] = key;
    p->n++;
    return true;
}

uint64_t bg_keys_get(const bg_keys *k, int64_t record)
{
    if (record < 0 || !k->cap) return 0;
    const page *p = find(k->table, k->cap, record / SPAN);
    uint16_t slot = (uint16_t)(record % SPAN);
    uint32_t at = place(p, slot);
    return at < p->n && p->slots[at] == slot ? p->keys[at] : 0;
}

bool bg_keys_print(const bg_keys *k, const bg_ranges *records, bg_buf *out)
{
    int64_t first, last;
    char hex[17];
    bool any = false;
    for (size_t i = 0; !any && bg_ranges_at(records, i, &first, &last); i++)
        for (int64_t r = first; !any && r <= last; r++)
            any = bg_keys_get(k, r) != 0;
    for (size_t i = 0; any && bg_ranges_at(records, i, &first, &last); i++)
        for (int64_t r = first; r <= last; r++) {
            bg_hex64(bg_keys_get(k, r), hex);
            bg_buf_add(out, hex, 16);
        }
    return any;
}

static bool hex_digits(const char *s, uint64_t *out)
{
    uint64_t v = 0;
    for (int i = 0; i < 16; i++) {
        char c = s[i];
        unsigned d;
        if (c >= '0' && c <= '9')
            d = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f')
            d = (unsigned)(c - 'a') + 10;
        else
            return false;
        v = v << 4 | d;
    }
    *out = v;
    return true;
}

bool bg_keys_read(bg_keys *k, const bg_ranges *records, const char *text, size_t n, bool *nomem)
{
    int64_t first, last;
    *nomem = false;
    if (n % 16 || (uint64_t)bg_ranges_count(records) != n / 16) return false;
    for (size_t i = 0; bg_ranges_at(records, i, &first, &last); i++)
        for (int64_t r = first; r <= last; r++, text += 16) {
            uint64_t key;
            if (!hex_digits(text, &key)) return false;
            if (key && !bg_keys_set(k, r, key)) {
                *nomem = true;
                return false;
            }
        }
    return true;
}
