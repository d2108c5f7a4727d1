/* Any bytes as a model: hyper-parameters, tensor checks and plans must hold whatever they claim. */
#include <stdlib.h>

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bg_error err = {0};
    bg_gguf *g = NULL;
    bg_desc d;
    if (bg_gguf_open_memory(&g, data, size, "fuzz", &err)) return 0;
    if (!bg_desc_read(&d, g, &err)) {
        for (int tp = 1; tp <= 5; tp += 2) {
            int heads = 0, ff = 0, experts = 0, shared = 0;
            int64_t vocab = 0;
            for (int r = 0; r < tp; r++) {
                bg_shard s;
                if (bg_shard_plan(&s, &d, g, r, tp, &err)) abort();
                if (s.head0 != heads || s.ff0 != ff || s.vocab0 != vocab) abort();
                heads += s.n_heads;
                ff += s.n_ff;
                vocab += s.n_vocab;
                if (s.ffe0 != experts || (!s.merged && s.ffs0 != shared)) abort();
                experts += s.n_ffe;
                shared += s.merged ? d.n_shared * s.n_ffe : s.n_ffs;
                for (int64_t i = 0; i < bg_gguf_n_tensors(g); i++) {
                    bg_part part = {0};
                    const bg_tensor *t = bg_gguf_tensor(g, i);
                    if (bg_shard_part(&s, &d, g, t, &part) &&
                        (part.rows > t->ne[1] || part.cols > t->ne[0] || part.n > t->ne[2]))
                        abort();
                }
                (void)bg_kv_bytes_per_token(&d, &s, BG_CACHE_F16);
            }
            if (experts != d.d_ff_expert || shared != d.d_ff_shared) abort();
            if (heads != d.n_heads || ff != d.d_ff || vocab != d.vocab_size) abort();
        }
        (void)bg_macs_per_token(&d);
        bg_desc_limit(&d, 64);
        (void)bg_macs_per_token(&d);
    }
    bg_gguf_close(g);
    return 0;
}
