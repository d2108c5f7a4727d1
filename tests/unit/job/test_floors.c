/* Where weights lie and what a step takes at least, against sums by hand. */
#include "job/floors.h"

#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

static bg_text_model opened(const char *path)
{
    bg_text_model m = {0};
    bg_error err = {0};
    cr_assert_eq(bg_gguf_open_header(&m.gguf, path, &err), BG_OK, "%s", err.text);
    cr_assert_eq(bg_desc_read(&m.desc, m.gguf, &err), BG_OK, "%s", err.text);
    return m;
}

static bg_shard shard(const bg_text_model *m, int rank, int tp)
{
    bg_shard s;
    bg_error err = {0};
    cr_assert_eq(bg_shard_plan(&s, &m->desc, m->gguf, rank, tp, &err), BG_OK, "%s", err.text);
    return s;
}

static const char dsa[] = "tests/golden/headers/tiny-glm-dsa.gguf";
static const char kv_b[] = "tests/golden/headers/tiny-v2-lite.kv_b.gguf";
static const char oss[] = "tests/golden/headers/tiny-gpt-oss.gguf";
static const bg_roof roof = {1e9, 1e9};

/* d 256, 4 heads of 128 + 64 and 128, ranks 256 and 512, d_ff 512 in layer 0; in layer 1 8 experts
 * of 256 columns, 2 a token, and a shared one; an indexer of 16 heads of 128; a third block that is
 * not used. */
Test(floors, kinds)
{
    bg_text_model m = opened(dsa);
    const bg_shard s = shard(&m, 0, 1);
    bg_kind_sums k;
    bg_kinds_sum(&k, &m, &s);
    const uint64_t attention =
        256 * 256 + 256 * 4 * 192 + 256 * 576 + 4 * 512 * (128 + 128) + 4 * 128 * 256;
    cr_expect_eq(k.params[BG_KIND_ATTENTION], 2 * attention);
    cr_expect_eq(k.params[BG_KIND_INDEXER], 2 * (2 * 128 + 256 * 16 + 256 * 128 + 256 * 16 * 128));
    cr_expect_eq(k.params[BG_KIND_FFN], 3 * 256 * 512);
    cr_expect_eq(k.params[BG_KIND_ROUTER], 8 * 256 + 8);
    cr_expect_eq(k.bytes[BG_KIND_ROUTER], 4 * (8 * 256 + 8));
    cr_expect_eq(k.params[BG_KIND_EXPERTS], 8 * 3 * 256 * 256);
    cr_expect_eq(k.params[BG_KIND_SHARED], 3 * 256 * 256);
    cr_expect_eq(k.params[BG_KIND_EMBEDDING], 256 * 1024);
    cr_expect_eq(k.params[BG_KIND_HEAD], 256 * 1024);
    cr_expect_eq(k.params[BG_KIND_OTHER], 256 + 2 * (256 + 512 + 256 + 256));
    uint64_t params = 0, bytes = 0, all = 0;
    for (int i = 0; i < BG_N_KINDS; i++) {
        params += i == BG_KIND_SKIPPED ? 0 : k.params[i];
        bytes += i == BG_KIND_SKIPPED ? 0 : k.bytes[i];
        all += k.bytes[i];
    }
    cr_expect_eq(params, m.desc.n_params);
    cr_expect_eq(bytes, s.weight_bytes);
    uint64_t file = 0;
    for (int64_t i = 0; i < bg_gguf_n_tensors(m.gguf); i++)
        file += bg_gguf_tensor(m.gguf, i)->bytes;
    cr_expect_eq(all, file);
    cr_expect_eq(bg_active_params(&m.desc, &k), (double)(2 * attention + 3 * 256 * 512 + 8 * 256 +
                                                         8 + 3 * 3 * 256 * 256 + 256 * 1024));
    bg_gguf_close(m.gguf);
}

/* What two ranks have adds up to the model; what both have whole is there twice. */
static void check_ranks(const char *path, int tp)
{
    bg_text_model m = opened(path);
    const bg_shard whole = shard(&m, 0, 1);
    bg_kind_sums all, sum = {0};
    bg_kinds_sum(&all, &m, &whole);
    uint64_t replicated = 0;
    for (int r = 0; r < tp; r++) {
        const bg_shard s = shard(&m, r, tp);
        bg_kind_sums k;
        bg_kinds_sum(&k, &m, &s);
        uint64_t bytes = 0;
        for (int i = 0; i < BG_N_KINDS; i++) {
            sum.bytes[i] += k.bytes[i];
            bytes += i == BG_KIND_SKIPPED ? 0 : k.bytes[i];
        }
        cr_expect_eq(bytes, s.weight_bytes, "%s: rank %d", path, r);
        cr_expect_eq(bytes, k.replicated + k.sharded + k.bytes[BG_KIND_EXPERTS] +
                                k.bytes[BG_KIND_EMBEDDING]);
        cr_expect(r == 0 || k.replicated == replicated, "%s: rank %d of %d", path, r, tp);
        replicated = k.replicated;
    }
    const bg_kind once[] = {BG_KIND_FFN, BG_KIND_SHARED, BG_KIND_HEAD};
    for (int i = 0; i < 3; i++)
        cr_expect_eq(sum.bytes[once[i]], all.bytes[once[i]], "%s: %s", path, bg_kind_name(once[i]));
    cr_expect_geq(sum.bytes[BG_KIND_EXPERTS], all.bytes[BG_KIND_EXPERTS]);
    cr_expect_eq(sum.bytes[BG_KIND_ROUTER], (uint64_t)tp * all.bytes[BG_KIND_ROUTER]);
    cr_expect_eq(sum.bytes[BG_KIND_INDEXER], (uint64_t)tp * all.bytes[BG_KIND_INDEXER]);
    bg_gguf_close(m.gguf);
}

Test(floors, ranks)
{
    for (int tp = 2; tp <= 4; tp++) {
        check_ranks(dsa, tp);
        check_ranks(kv_b, tp);
        check_ranks(oss, tp);
    }
}

Test(floors, of_a_step)
{
    bg_text_model m = opened(dsa);
    const bg_shard s = shard(&m, 0, 1);
    bg_kind_sums k;
    bg_kinds_sum(&k, &m, &s);
    const double all = (double)k.bytes[BG_KIND_EXPERTS];
    const double others = (double)(s.weight_bytes - k.bytes[BG_KIND_EMBEDDING] -
                                   k.bytes[BG_KIND_INDEXER] - k.bytes[BG_KIND_EXPERTS]);
    const double active = bg_active_params(&m.desc, &k);
    /* Up to 64 keys without the indexer. */
    bg_floor f = bg_floor_of(&m.desc, &s, &k, BG_CACHE_F16, &roof, 1, 64);
    cr_expect_float_eq(f.experts, 2, 1e-9);
    cr_expect_float_eq(f.weight_bytes, others + all / 4, 1e-3);
    cr_expect_float_eq(f.kv_bytes, 64 * 2 * 576 * 2, 1e-6);
    cr_expect_float_eq(f.flops, 2 * (active + 64 * 2 * 4 * (2 * 512 + 64)), 1e-3);
    cr_expect_float_eq(f.seconds, f.flops / 1e9, 1e-9);
    /* From 65 on it chooses, and reads its keys. */
    f = bg_floor_of(&m.desc, &s, &k, BG_CACHE_F16, &roof, 3, 100);
    const double index = (double)k.params[BG_KIND_INDEXER];
    cr_expect_float_eq(f.experts, 8 * (1 - pow(0.75, 3)), 1e-9);
    cr_expect_float_eq(f.weight_bytes,
                       others + (double)k.bytes[BG_KIND_INDEXER] + all * f.experts / 8, 1e-3);
    cr_expect_float_eq(f.kv_bytes, 3 * (64 * 2 * 576 * 2 + 100 * 2 * 128 * 2), 1e-6);
    cr_expect_float_eq(
        f.flops, 3 * 2 * (active + index + 64 * 2 * 4 * (2 * 512 + 64) + 100 * 2 * 16 * 128), 1e-3);
    const bg_roof fast = {1e9, 1e18};
    f = bg_floor_of(&m.desc, &s, &k, BG_CACHE_F16, &fast, 3, 100);
    cr_expect_float_eq(f.seconds, (f.weight_bytes + f.kv_bytes) / 1e9, 1e-9);
    bg_gguf_close(m.gguf);
}

/* Every other layer sees 64 keys. */
Test(floors, windows)
{
    bg_text_model m = opened(oss);
    const bg_shard s = shard(&m, 0, 1);
    bg_kind_sums k;
    bg_kinds_sum(&k, &m, &s);
    const bg_floor f = bg_floor_of(&m.desc, &s, &k, BG_CACHE_F16, &roof, 2, 1000);
    cr_expect_float_eq(f.kv_bytes, 2 * (64 + 1000) * 2 * (64 + 64) * 2, 1e-6);
    cr_expect_float_eq(f.flops, 2 * 2 * (bg_active_params(&m.desc, &k) + 1064 * 8 * 128), 1e-3);
    bg_gguf_close(m.gguf);
}
