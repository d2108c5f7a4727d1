/* What attention costs, against counting key by key. */
#include "backend/cost.h"

#include <criterion/criterion.h>

static void check(int pos0, int n_tokens, int window)
{
    bg_step_seq seqs[2] = {{.pos0 = pos0, .n_tokens = n_tokens}, {.pos0 = 7, .n_tokens = 1}};
    const bg_steps s = {.n_seqs = 2, .seqs = seqs};
    const bg_attn p = {.n_heads = 6, .n_kv_heads = 2, .head_dim = 16, .v_dim = 8, .window = window};
    double read = 0, seen = 0;
    for (int i = 0; i < 2; i++)
        for (int key = 0; key < seqs[i].pos0 + seqs[i].n_tokens; key++) {
            int by = 0; /* rows that see this key */
            for (int pos = seqs[i].pos0; pos < seqs[i].pos0 + seqs[i].n_tokens; pos++)
                by += key <= pos && (!window || pos - key < window);
            read += by > 0;
            seen += by;
        }
    bg_cost c;
    bg_attention_cost(&s, &p, 2, &c);
    cr_expect_eq(c.bytes, read * 2 * (16 + 8) * 2, "pos0 %d, %d tokens, window %d: %g bytes", pos0,
                 n_tokens, window, c.bytes);
    cr_expect_eq(c.flops, seen * 6 * (16 + 8) * 2, "pos0 %d, %d tokens, window %d: %g FLOPs", pos0,
                 n_tokens, window, c.flops);
}

Test(cost, attention)
{
    for (int pos0 = 0; pos0 < 12; pos0++)
        for (int n = 1; n < 9; n++)
            for (int window = 0; window < 14; window++)
                check(pos0, n, window);
}
