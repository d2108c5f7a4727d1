/* What the comparisons of this folder would see if a loader, a plan or a forward pass went wrong:
 * each known way to go wrong is done on purpose, between the model and its backend, and must show.
 * And an op that leaves its output unwritten must be named by --check. */
#include <criterion/criterion.h>

#include "harness.h"

#define DIR  "tests/golden/models/"
#define DSV3 DIR "tiny-dsv3.q8_0.gguf"
#define DSA  DIR "tiny-dsa.q8_0.gguf"
#define MOE  DIR "tiny-qwen3moe.q8_0.gguf"
#define GLM  DIR "tiny-glm4moe.q5_0.gguf"

enum { N_TOKENS = 90 };

/* The backend's functions as they are, and as a mutation leaves them. One rank is one thread. */
static _Thread_local struct {
    const bg_ops *real;
    bg_ops ops;
    int rank, calls, drop;
} t;

typedef struct mutation {
    const char *name, *path;
    int tp;
    void (*change)(bg_ops *ops);
    int drop;       /* the number of the call that is left out */
    const char *op; /* what --check must name; NULL: results must differ */
} mutation;

static void tamper(void *ctx, bg_backend *b, int rank)
{
    const mutation *m = ctx;
    t.real = b->ops;
    t.ops = *b->ops;
    t.rank = rank;
    t.calls = 0;
    t.drop = m->drop;
    if (m->change) m->change(&t.ops);
    b->ops = &t.ops;
}

/* ---- parts in a wrong order, or another rank's --------------------------------------------- */

static bool is_named(const bg_linear_spec *s, const char *end)
{
    const size_t n = strlen(s->name), k = strlen(end);
    return n >= k && strcmp(s->name + n - k, end) == 0;
}

/* Parts `first` and the one behind it. */
static bg_status swapped_parts(bg_backend *b, bg_linear **l, const bg_linear_spec *spec,
                               const char *name, int first, bg_error *err)
{
    bg_linear_spec s = *spec;
    if (is_named(spec, name) && first + 1 < spec->n_parts) {
        s.parts[first] = spec->parts[first + 1];
        s.parts[first + 1] = spec->parts[first];
    }
    return t.real->linear_new(b, l, &s, err);
}

static bg_status swap_qkv_a(bg_backend *b, bg_linear **l, const bg_linear_spec *s, bg_error *err)
{
    return swapped_parts(b, l, s, "attn_qkv_a", 0, err);
}

static bg_status swap_q_k(bg_backend *b, bg_linear **l, const bg_linear_spec *s, bg_error *err)
{
    return swapped_parts(b, l, s, "attn_qkv", 0, err);
}

static bg_status swap_index_k(bg_backend *b, bg_linear **l, const bg_linear_spec *s, bg_error *err)
{
    return swapped_parts(b, l, s, "attn_qkv_a", 2, err);
}

static bg_status swap_gate_up(bg_backend *b, bg_linear **l, const bg_linear_spec *s, bg_error *err)
{
    return swapped_parts(b, l, s, "ffn_gate_up", 0, err);
}

/* Two ranks: each takes the first or the last of what there is. */
static bg_status permute_o(bg_backend *b, bg_linear **l, const bg_linear_spec *spec, bg_error *err)
{
    bg_linear_spec s = *spec;
    if (is_named(spec, "attn_output"))
        s.parts[0].col0 = t.rank ? 0 : s.parts[0].k_total - s.parts[0].n_cols;
    return t.real->linear_new(b, l, &s, err);
}

static bg_status permute_v_b(bg_backend *b, bg_linear **l, const bg_linear_spec *spec,
                             bg_error *err)
{
    bg_linear_spec s = *spec;
    if (is_named(spec, "attn_v_b"))
        s.parts[0].row0 = t.rank ? 0 : s.parts[0].n_total - s.n_blocks * s.parts[0].n_rows;
    return t.real->linear_new(b, l, &s, err);
}

static bg_status swap_expert_halves(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                                    bg_error *err)
{
    bg_experts_spec s = *spec;
    s.gate = spec->up;
    s.up = spec->gate;
    return t.real->experts_new(b, e, &s, err);
}

static bg_status swap_shared_halves(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                                    bg_error *err)
{
    bg_experts_spec s = *spec;
    s.shared_gate = spec->shared_up;
    s.shared_up = spec->shared_gate;
    return t.real->experts_new(b, e, &s, err);
}

static bg_status permute_experts(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                                 bg_error *err)
{
    bg_experts_spec s = *spec;
    s.down.col0 = t.rank ? 0 : s.down.k_total - s.down.n_cols;
    return t.real->experts_new(b, e, &s, err);
}

static bg_status shared_everywhere(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                                   bg_error *err)
{
    bg_experts_spec s = *spec;
    s.shared_gate.row0 = s.shared_up.row0 = s.shared_down.col0 = 0;
    return t.real->experts_new(b, e, &s, err);
}

static bg_status without_shared(bg_backend *b, bg_experts **e, const bg_experts_spec *spec,
                                bg_error *err)
{
    bg_experts_spec s = *spec;
    s.n_shared = 0;
    return t.real->experts_new(b, e, &s, err);
}

static bg_status own_router(bg_backend *b, bg_router **r, const bg_router_spec *spec, bg_error *err)
{
    bg_router_spec s = *spec;
    if (t.rank) s.choice_bias = NULL;
    return t.real->router_new(b, r, &s, err);
}

static bg_status no_groups(bg_backend *b, bg_router **r, const bg_router_spec *spec, bg_error *err)
{
    bg_router_spec s = *spec;
    s.n_groups = s.n_groups_used = 1;
    return t.real->router_new(b, r, &s, err);
}

static void do_swap_qkv_a(bg_ops *o)
{
    o->linear_new = swap_qkv_a;
}
static void do_swap_q_k(bg_ops *o)
{
    o->linear_new = swap_q_k;
}
static void do_swap_index_k(bg_ops *o)
{
    o->linear_new = swap_index_k;
}
static void do_swap_gate_up(bg_ops *o)
{
    o->linear_new = swap_gate_up;
}
static void do_permute_o(bg_ops *o)
{
    o->linear_new = permute_o;
}
static void do_permute_v_b(bg_ops *o)
{
    o->linear_new = permute_v_b;
}
static void do_swap_expert_halves(bg_ops *o)
{
    o->experts_new = swap_expert_halves;
}
static void do_swap_shared_halves(bg_ops *o)
{
    o->experts_new = swap_shared_halves;
}
static void do_permute_experts(bg_ops *o)
{
    o->experts_new = permute_experts;
}
static void do_shared_everywhere(bg_ops *o)
{
    o->experts_new = shared_everywhere;
}
static void do_without_shared(bg_ops *o)
{
    o->experts_new = without_shared;
}
static void do_own_router(bg_ops *o)
{
    o->router_new = own_router;
}
static void do_no_groups(bg_ops *o)
{
    o->router_new = no_groups;
}

/* ---- sums that are not made, keys that are not chosen ---------------------------------------- */

static bg_status drop_one_all_reduce(bg_backend *b, bg_act *x, bg_error *err)
{
    return t.calls++ == t.drop ? BG_OK : t.real->all_reduce(b, x, err);
}

static bg_status all_keys(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                          const bg_mla *p, bg_error *err)
{
    bg_mla all = *p;
    all.selected = false;
    return t.real->mla_attention(b, out, q_lat, q, &all, err);
}

static bg_status other_keys(bg_backend *b, const bg_act *iq, const bg_act *ik, const bg_index *p,
                            bg_error *err)
{
    bg_index less = *p;
    if (t.rank) less.scale = -p->scale;
    return t.real->index(b, iq, ik, &less, err);
}

static void do_drop_one_all_reduce(bg_ops *o)
{
    o->all_reduce = drop_one_all_reduce;
}
static void do_all_keys(bg_ops *o)
{
    o->mla_attention = all_keys;
}
static void do_other_keys(bg_ops *o)
{
    o->index = other_keys;
}

/* ---- ops that write nothing ------------------------------------------------------------------ */

static bg_status idle_route(bg_backend *b, bg_act *r, const bg_router *w, const bg_act *h,
                            bg_error *err)
{
    return (void)b, (void)r, (void)w, (void)h, (void)err, BG_OK;
}

static bg_status idle_moe(bg_backend *b, bg_act *out, const bg_experts *e, const bg_act *r,
                          const bg_act *h, const bg_act *add, bg_error *err)
{
    return (void)b, (void)out, (void)e, (void)r, (void)h, (void)add, (void)err, BG_OK;
}

static bg_status idle_store(bg_backend *b, bg_act *qa, const bg_act *in, const bg_mla_in *p,
                            bg_error *err)
{
    return (void)b, (void)qa, (void)in, (void)p, (void)err, BG_OK;
}

static bg_status idle_query(bg_backend *b, bg_act *q_lat, const bg_linear *k_b, const bg_act *q,
                            bg_error *err)
{
    return (void)b, (void)q_lat, (void)k_b, (void)q, (void)err, BG_OK;
}

static bg_status idle_mla(bg_backend *b, bg_act *out, const bg_act *q_lat, const bg_act *q,
                          const bg_mla *p, bg_error *err)
{
    return (void)b, (void)out, (void)q_lat, (void)q, (void)p, (void)err, BG_OK;
}

static bg_status idle_attention(bg_backend *b, bg_act *out, const bg_act *q, const bg_attn *p,
                                bg_error *err)
{
    return (void)b, (void)out, (void)q, (void)p, (void)err, BG_OK;
}

static void do_idle_route(bg_ops *o)
{
    o->route = idle_route;
}
static void do_idle_moe(bg_ops *o)
{
    o->moe = idle_moe;
}
static void do_idle_store(bg_ops *o)
{
    o->mla_store = idle_store;
}
static void do_idle_query(bg_ops *o)
{
    o->mla_query = idle_query;
}
static void do_idle_mla(bg_ops *o)
{
    o->mla_attention = idle_mla;
}
static void do_idle_attention(bg_ops *o)
{
    o->attention = idle_attention;
}

static const mutation none[] = {
    {"dsv3", DSV3, 1, NULL, 0, NULL}, {"dsv3 tp 2", DSV3, 2, NULL, 0, NULL},
    {"dsa", DSA, 1, NULL, 0, NULL},   {"dsa tp 2", DSA, 2, NULL, 0, NULL},
    {"moe", MOE, 1, NULL, 0, NULL},   {"moe tp 2", MOE, 2, NULL, 0, NULL},
    {"glm", GLM, 1, NULL, 0, NULL},   {"glm tp 2", GLM, 2, NULL, 0, NULL},
};

static const mutation wrong[] = {
    {"q_a and kv_a swapped", DSV3, 1, do_swap_qkv_a, 0, NULL},
    {"q and k swapped", MOE, 1, do_swap_q_k, 0, NULL},
    {"gate and up of a dense layer swapped", DSV3, 1, do_swap_gate_up, 0, NULL},
    {"gate and up of experts swapped", MOE, 1, do_swap_expert_halves, 0, NULL},
    {"gate and up of shared experts swapped", GLM, 1, do_swap_shared_halves, 0, NULL},
    {"the indexer's key and weights swapped", DSA, 1, do_swap_index_k, 0, NULL},
    {"columns of attn_output permuted", GLM, 2, do_permute_o, 0, NULL},
    {"columns of experts permuted", MOE, 2, do_permute_experts, 0, NULL},
    {"heads of v_b permuted", DSA, 2, do_permute_v_b, 0, NULL},
    {"the first all-reduce left out", DSV3, 2, do_drop_one_all_reduce, 0, NULL},
    {"the second all-reduce left out", DSV3, 2, do_drop_one_all_reduce, 1, NULL},
    {"the third all-reduce left out", MOE, 2, do_drop_one_all_reduce, 2, NULL},
    {"the fourth all-reduce left out", GLM, 2, do_drop_one_all_reduce, 3, NULL},
    {"shared experts on every rank", GLM, 2, do_shared_everywhere, 0, NULL},
    {"shared experts left out", GLM, 1, do_without_shared, 0, NULL},
    {"choice bias on one rank only", GLM, 2, do_own_router, 0, NULL},
    {"groups ignored", DSV3, 1, do_no_groups, 0, NULL},
    {"all keys seen", DSA, 1, do_all_keys, 0, NULL},
    {"other keys chosen on one rank", DSA, 2, do_other_keys, 0, NULL},
};

static const mutation idle[] = {
    {"route", MOE, 1, do_idle_route, 0, "op route: route["},
    {"moe", MOE, 1, do_idle_moe, 0, "op moe: y["},
    {"moe with shared experts", GLM, 2, do_idle_moe, 0, "op moe: y["},
    {"mla_store", DSV3, 1, do_idle_store, 0, "op mla_store: q_a["},
    {"mla_query", DSV3, 1, do_idle_query, 0, "op mla_query: q_lat["},
    {"mla_attention", DSV3, 2, do_idle_mla, 0, "op mla_attention: att_lat["},
    {"attention", GLM, 1, do_idle_attention, 0, "op attention: att["},
};

static bg_status run_mutated(const mutation *m, bool tampered, run *r, bg_error *err)
{
    static int32_t tokens[N_TOKENS];
    static seq s;
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = (int32_t)(bg_mix64((uint64_t)i) % 600);
    s = (seq){.name = "tokens", .n_prompt = N_TOKENS, .n = N_TOKENS, .tokens = tokens};
    *r = (run){.path = m->path,
               .compute = BG_COMPUTE_F32,
               .cache = BG_CACHE_F32,
               .tp = m->tp,
               .check = m->op != NULL,
               .plan = PLAN_CHUNKS,
               .n_seqs = 1,
               .seqs = &s,
               .tamper = tampered ? tamper : NULL,
               .tamper_ctx = (void *)(uintptr_t)m};
    return run_model(r, err);
}

Test(mutations, nothing_changed)
{
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        bg_error err = {0};
        run a, b;
        char where[64];
        cr_assert(!run_mutated(&none[i], false, &a, &err), "%s: %s", none[i].name, err.text);
        cr_assert(!run_mutated(&none[i], true, &b, &err), "%s: %s", none[i].name, err.text);
        cr_expect(!differ(&a, &b, where, sizeof where), "%s: other bits at %s", none[i].name,
                  where);
        run_free(&a);
        run_free(&b);
    }
}

Test(mutations, each_shows)
{
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const mutation *m = &wrong[i];
        bg_error err = {0};
        run a, b;
        cr_assert(!run_mutated(m, false, &a, &err), "%s: %s", m->name, err.text);
        cr_assert(!run_mutated(m, true, &b, &err), "%s: %s", m->name, err.text);
        const double e = nmse(b.logits[0], a.logits[0], N_TOKENS * a.desc.vocab_size);
        cr_expect(e > 1e-6, "%s: NMSE %.3g: the comparison with goldens would not see it", m->name,
                  e);
        if (getenv("BATCHGEN_GOLDEN")) fprintf(stderr, "%-40s NMSE %.1e\n", m->name, e);
        run_free(&a);
        run_free(&b);
    }
}

Test(mutations, check_names_the_op)
{
    for (size_t i = 0; i < sizeof idle / sizeof *idle; i++) {
        const mutation *m = &idle[i];
        bg_error err = {0};
        run r;
        const bg_status st = run_mutated(m, true, &r, &err);
        cr_expect(st == BG_INTERNAL && strstr(err.text, m->op), "%s: %s, \"%s\"; wanted \"%s\"",
                  m->name, bg_status_name(st), err.text, m->op);
        run_free(&r);
    }
}
