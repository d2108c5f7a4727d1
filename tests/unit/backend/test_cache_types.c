/* Which KV caches the CPU makes. */
#include "cpu_fixture.h"

Test(cache_types, q8_needs_a_gpu)
{
    const bg_backend_config config = config_of(NULL, 1);
    bg_backend *b = backend_of(&config);
    bg_cache_spec spec = {.n_layers = 1,
                          .n_blocks = 2,
                          .block_tokens = 8,
                          .n_kv_heads = 1,
                          .k_dim = 64,
                          .v_dim = 64,
                          .type = BG_CACHE_Q8};
    FAILS(BG_ARG, "q8 needs a GPU", b->ops->cache_new(b, &spec, err));
    spec.type = BG_CACHE_BF16;
    OK(b->ops->cache_new(b, &spec, err));
    bg_backend_free(b);
}
