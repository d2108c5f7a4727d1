/* Statements, loops and macros.
 *
 * A scope is a jn_env: loops, macros, `with`, and the bodies of block set, filter and generation
 * open one. A macro keeps the scope that it was defined in, so it sees that scope's variables as
 * they are when it is called, and none of its caller's. */
#include <stdio.h>
#include <string.h>

#include "text/jinja_ast.h"
#include "text/jinja_env.h"

typedef enum outcome { FAILED, DONE, BREAK, CONTINUE } outcome;

struct jn_macro {
    const jn_params *params;
    jn_env *env;
};

struct jn_loop {
    const jn_node *node;
    jn_env *env; /* around the loop */
    jn_val *src; /* what is iterated over */
    size_t n_src;
    size_t next;  /* of src, the first that the filter has not seen */
    jn_val *kept; /* what the filter let through; src itself without one */
    size_t n_kept;
    jn_list *kept_list;
    size_t at;        /* of kept, the current one */
    int64_t depth;    /* of a recursive loop */
    jn_list *changed; /* last arguments of changed() */
};

static outcome run(jn_state *r, const jn_node *s);

/* ---- scopes ---- */

static jn_env *new_env(jn_state *r, jn_env *outer)
{
    jn_env *env = jn_new(r, sizeof *env);
    if (env) env->outer = outer;
    return env;
}

jn_val jn_lookup(const jn_state *r, int sym)
{
    for (const jn_env *env = r->env; env; env = env->outer)
        for (size_t i = 0; i < env->n; i++)
            if (env->vars[i].sym == sym) return env->vars[i].v;
    return r->context[sym];
}

static bool assign(jn_state *r, jn_env *env, int sym, jn_val v)
{
    for (size_t i = 0; i < env->n; i++) {
        if (env->vars[i].sym != sym) continue;
        env->vars[i].v = v;
        return true;
    }
    if (env->n == env->cap) {
        size_t cap = env->cap ? env->cap * 2 : 4;
        jn_var *vars =
            jn_arena_grow(r->arena, env->vars, env->n * sizeof *vars, cap * sizeof *vars);
        if (!vars) return jn_no_memory(r);
        env->vars = vars;
        env->cap = cap;
    }
    env->vars[env->n++] = (jn_var){.sym = sym, .v = v};
    return jn_work(r, env->n);
}

/* Binds a name, or a tuple of targets, in env. */
static bool bind(jn_state *r, jn_env *env, const jn_node *target, jn_val v)
{
    if (target->kind == JN_E_NAME) return assign(r, env, target->sym, v);
    jn_val *items;
    size_t n;
    if (v.kind == JN_UNDEF) return jn_undef_fail(r, v.undef);
    if (!jn_items(r, v, &items, &n)) return false;
    if (n != target->n)
        return jn_fail(r, "%zu values to unpack where %zu are expected", n, target->n);
    for (size_t i = 0; i < n; i++)
        if (!bind(r, env, target->list[i], items[i])) return false;
    return true;
}

static bool assign_to(jn_state *r, const jn_node *s, jn_val v)
{
    if (!s->ns_target) return bind(r, r->env, s->a, v);
    jn_val ns = jn_lookup(r, s->a->a->sym);
    if (ns.kind == JN_MISSING)
        return jn_fail(r, "'%.*s' is undefined", (int)s->a->a->str->n, jn_bytes(s->a->a->str));
    if (ns.kind != JN_NAMESPACE)
        return jn_fail(r, "cannot assign attribute on non-namespace object");
    return jn_dict_set(r, ns.dict, (jn_val){.kind = JN_STR, .s = s->a->str}, v);
}

static bool call_enter(jn_state *r)
{
    if (r->depth >= r->lim.depth)
        return jn_fail(r, "more than %d calls and loops inside each other", r->lim.depth);
    r->depth++;
    return true;
}

/* Runs body in env with its output captured; a break or continue goes no further. */
static bool capture(jn_state *r, jn_env *env, const jn_node *body, jn_val *out)
{
    jn_env *outer = r->env;
    jn_buf *outer_out = r->out, *b = jn_buf_new(r);
    if (!b || !env) return false;
    r->env = env;
    r->out = b;
    outcome o = run(r, body);
    r->env = outer;
    r->out = outer_out;
    return o != FAILED && jn_finish(r, b, out);
}

/* ---- loops ---- */

/* Makes sure that kept has element i, if there is one. The filter runs only as far as asked,
 * because its condition may depend on what the body does. */
static bool keep_up_to(jn_state *r, jn_loop *loop, size_t i, bool *have)
{
    const jn_node *s = loop->node;
    while (loop->n_kept <= i && loop->next < loop->n_src) {
        jn_val item = loop->src[loop->next++], yes;
        jn_env *outer = r->env, *env = new_env(r, loop->env);
        if (!env || !bind(r, env, s->a, item)) return false;
        r->env = env;
        bool ok = jn_eval(r, s->c, &yes);
        r->env = outer;
        if (!ok) return false;
        if (!jn_truth(yes)) continue;
        if (!jn_list_add(r, loop->kept_list, item)) return false;
        loop->kept = loop->kept_list->v;
        loop->n_kept = loop->kept_list->n;
    }
    *have = i < loop->n_kept;
    return true;
}

static jn_loop *new_loop(jn_state *r, const jn_node *s, jn_env *env, jn_val iterable)
{
    jn_loop *loop = jn_new(r, sizeof *loop);
    jn_val kept;
    if (!loop) return NULL;
    *loop = (jn_loop){.node = s, .env = env};
    if (!jn_items(r, iterable, &loop->src, &loop->n_src)) return NULL;
    if (s->c) {
        if (!jn_list_new(r, JN_LIST, 0, &kept)) return NULL;
        loop->kept_list = kept.list;
    } else {
        loop->kept = loop->src;
        loop->n_kept = loop->next = loop->n_src;
    }
    return loop;
}

static outcome __attribute__((noinline)) iterate(jn_state *r, jn_loop *loop)
{
    const jn_node *s = loop->node;
    jn_env *outer = r->env, *env = new_env(r, loop->env);
    static const char name[] = "loop";
    int loop_sym = jn_symbol(r->prog, name, sizeof name - 1);
    outcome o = env ? DONE : FAILED;
    bool have = false, ran = false; /* ran: some turn reached the end of the body */
    while (o == DONE || o == CONTINUE) {
        o = FAILED;
        if (!keep_up_to(r, loop, loop->at, &have)) break;
        o = DONE;
        if (!have) break;
        env->n = 0;
        o = FAILED;
        if (loop_sym >= 0 && !assign(r, env, loop_sym, (jn_val){.kind = JN_LOOP, .loop = loop}))
            break;
        if (!bind(r, env, s->a, loop->kept[loop->at])) break;
        r->env = env;
        o = run(r, s->list[0]);
        r->env = outer;
        ran |= o == DONE;
        if (o != BREAK) loop->at++;
    }
    r->env = outer;
    if (o != FAILED && !ran && s->list[1]) {
        if (!(r->env = new_env(r, loop->env))) {
            r->env = outer;
            return FAILED;
        }
        o = run(r, s->list[1]);
        r->env = outer;
        return o;
    }
    return o == FAILED ? FAILED : DONE;
}

static outcome for_loop(jn_state *r, const jn_node *s)
{
    jn_val v;
    if (!jn_eval(r, s->b, &v) || !call_enter(r)) return FAILED;
    jn_loop *loop = new_loop(r, s, r->env, v);
    outcome o = loop ? iterate(r, loop) : FAILED;
    r->depth--;
    return o;
}

/* loop(children) inside {% for ... recursive %} */
bool jn_call_loop(jn_state *r, jn_loop *loop, const jn_args *a, jn_val *out)
{
    jn_val v;
    if (!loop->node->recursive) return jn_fail(r, "loop() needs a loop that is marked 'recursive'");
    if (!jn_bind(r, "loop", a, "iterable", 1, &v) || !jn_enter(r)) return false;
    if (!call_enter(r)) return false;
    jn_buf *outer = r->out, *b = jn_buf_new(r);
    jn_loop *inner = b ? new_loop(r, loop->node, loop->env, v) : NULL;
    if (!inner) return false;
    inner->depth = loop->depth + 1;
    r->out = b;
    outcome o = iterate(r, inner);
    r->out = outer;
    r->depth--;
    jn_leave(r);
    return o != FAILED && jn_finish(r, b, out);
}

static bool cycle(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    if (a->n == 0) return jn_fail(r, "no items for cycling given");
    *out = a->v[self.loop->at % a->n];
    return true;
}

static bool changed(jn_state *r, jn_val self, const jn_args *a, jn_val *out)
{
    jn_list *last = self.loop->changed;
    bool same = last && last->n == a->n;
    for (size_t i = 0; same && i < a->n; i++)
        if (!jn_equal(r, last->v[i], a->v[i], &same)) return false;
    *out = jn_bool(!same);
    if (same) return true;
    jn_val list;
    if (!jn_list_new(r, JN_LIST, a->n, &list)) return false;
    for (size_t i = 0; i < a->n; i++)
        if (!jn_list_add(r, list.list, a->v[i])) return false;
    self.loop->changed = list.list;
    return true;
}

static bool neighbour(jn_state *r, jn_loop *loop, size_t i, const char *name, jn_val *out)
{
    bool have = false;
    if (i != SIZE_MAX && !keep_up_to(r, loop, i, &have)) return false;
    if (have) {
        *out = loop->kept[i];
        return true;
    }
    jn_val text;
    return jn_str_text(r, name, &text) &&
           jn_undef_attr(r, (jn_val){.kind = JN_MISSING}, text.s, out);
}

static bool loop_method(jn_state *r, jn_loop *loop, const jn_func *f, jn_val *out)
{
    jn_method *m = jn_new(r, sizeof *m);
    if (!m) return false;
    *m = (jn_method){.self = {.kind = JN_LOOP, .loop = loop}, .func = f};
    *out = (jn_val){.kind = JN_METHOD, .method = m};
    return true;
}

bool jn_loop_attr(jn_state *r, jn_loop *loop, const jn_str *name, jn_val *out)
{
    static const jn_func cycle_func = {"cycle", cycle}, changed_func = {"changed", changed};
    int64_t at = (int64_t)loop->at;
    bool have;
    if (jn_str_is(name, "index0")) *out = jn_int(at);
    if (jn_str_is(name, "index")) *out = jn_int(at + 1);
    if (jn_str_is(name, "first")) *out = jn_bool(at == 0);
    if (jn_str_is(name, "depth0")) *out = jn_int(loop->depth);
    if (jn_str_is(name, "depth")) *out = jn_int(loop->depth + 1);
    if (jn_str_is(name, "cycle")) return loop_method(r, loop, &cycle_func, out);
    if (jn_str_is(name, "changed")) return loop_method(r, loop, &changed_func, out);
    if (jn_str_is(name, "previtem"))
        return neighbour(r, loop, at ? loop->at - 1 : SIZE_MAX, "there is no previous item", out);
    if (jn_str_is(name, "nextitem"))
        return neighbour(r, loop, loop->at + 1, "there is no next item", out);
    if (jn_str_is(name, "last")) {
        if (!keep_up_to(r, loop, loop->at + 1, &have)) return false;
        *out = jn_bool(!have);
    }
    bool rev = jn_str_is(name, "revindex"), rev0 = jn_str_is(name, "revindex0");
    if (rev || rev0 || jn_str_is(name, "length")) {
        if (!keep_up_to(r, loop, SIZE_MAX, &have)) return false;
        int64_t n = (int64_t)loop->n_kept;
        *out = jn_int(rev ? n - at : rev0 ? n - at - 1 : n);
    }
    return true;
}

size_t jn_loop_text(const jn_loop *loop, char *out, size_t size)
{
    int n = snprintf(out, size, "<LoopContext %zu/%zu>", loop->at + 1, loop->n_kept);
    return n < 0 ? 0 : (size_t)n;
}

/* ---- macros ---- */

const jn_str *jn_macro_name(const jn_macro *m)
{
    return m->params->name;
}

static bool macro_value(jn_state *r, const jn_params *params, jn_val *out)
{
    jn_macro *m = jn_new(r, sizeof *m);
    if (!m) return false;
    *m = (jn_macro){.params = params, .env = r->env};
    *out = (jn_val){.kind = JN_MACRO, .macro = m};
    return true;
}

static bool set_special(jn_state *r, jn_env *env, const char *name, jn_val v)
{
    int sym = jn_symbol(r->prog, name, strlen(name));
    return sym < 0 || assign(r, env, sym, v);
}

/* Keyword arguments that are no parameter: to `caller`, to kwargs, or an error. */
static bool other_keywords(jn_state *r, const jn_params *p, const jn_args *a, jn_env *env)
{
    static const char caller_name[] = "caller";
    jn_val kwargs, caller;
    bool has_caller = false;
    if (p->kwargs && !jn_dict_new(r, JN_DICT, &kwargs)) return false;
    for (size_t i = 0; i < a->n_kw; i++) {
        const jn_str *name = a->kw[i].name;
        bool known = false;
        for (size_t k = 0; !known && k < p->n; k++)
            known = jn_str_eq(name, p->names[k]);
        if (known) continue;
        if (p->caller && jn_str_is(name, caller_name)) {
            if (!set_special(r, env, caller_name, a->kw[i].v)) return false;
            has_caller = true;
        } else if (p->kwargs) {
            if (!jn_dict_set(r, kwargs.dict, (jn_val){.kind = JN_STR, .s = name}, a->kw[i].v))
                return false;
        } else {
            return jn_fail(r, "macro '%.*s' takes no keyword argument '%.*s'", (int)p->name->n,
                           jn_bytes(p->name), (int)name->n, jn_bytes(name));
        }
    }
    if (p->caller && !has_caller) {
        jn_val why;
        if (!jn_str_text(r, "caller", &why) ||
            !jn_undef_attr(r, (jn_val){.kind = JN_MISSING}, why.s, &caller) ||
            !set_special(r, env, caller_name, caller))
            return false;
    }
    return !p->kwargs || set_special(r, env, "kwargs", kwargs);
}

static bool other_positional(jn_state *r, const jn_params *p, const jn_args *a, jn_env *env)
{
    jn_val list;
    if (!p->varargs)
        return a->n <= p->n || jn_fail(r, "macro '%.*s' takes not more than %zu arguments",
                                       (int)p->name->n, jn_bytes(p->name), p->n);
    if (!jn_list_new(r, JN_TUPLE, 0, &list)) return false;
    for (size_t i = p->n; i < a->n; i++)
        if (!jn_list_add(r, list.list, a->v[i])) return false;
    return set_special(r, env, "varargs", list);
}

static bool parameters(jn_state *r, const jn_params *p, const jn_args *a, jn_env *env)
{
    if (!other_positional(r, p, a, env) || !other_keywords(r, p, a, env)) return false;
    for (size_t i = 0; i < p->n; i++) {
        jn_val v = {.kind = JN_MISSING};
        bool given = i < a->n;
        if (given) v = a->v[i];
        for (size_t k = 0; k < a->n_kw; k++) {
            if (!jn_str_eq(a->kw[k].name, p->names[i])) continue;
            if (given)
                return jn_fail(r, "argument '%.*s' is given twice", (int)p->names[i]->n,
                               jn_bytes(p->names[i]));
            v = a->kw[k].v;
            given = true;
        }
        if (!given && p->defaults[i]) {
            if (!jn_eval(r, p->defaults[i], &v)) return false;
        } else if (!given) {
            if (!jn_undef_attr(r, (jn_val){.kind = JN_MISSING}, p->names[i], &v)) return false;
        }
        if (!assign(r, env, p->syms[i], v)) return false;
    }
    return true;
}

bool jn_call_macro(jn_state *r, const jn_macro *m, const jn_args *a, jn_val *out)
{
    jn_env *outer = r->env, *env = new_env(r, m->env);
    int line = r->line;
    if (!env || !call_enter(r)) return false;
    r->env = env; /* defaults see the parameters before them */
    bool ok = parameters(r, m->params, a, env) && capture(r, env, m->params->body, out);
    r->env = outer;
    r->depth--;
    if (ok) r->line = line;
    return ok;
}

static outcome __attribute__((noinline)) call_block(jn_state *r, const jn_node *s)
{
    /* The call with one more keyword argument, `caller`. */
    jn_node call = *s->a, caller = {.kind = JN_E_CONST, .line = s->line};
    jn_val name, out;
    call.args = jn_new_array(r, s->a->n_args + 1, sizeof *call.args);
    if (!call.args || !jn_str_text(r, "caller", &name)) return FAILED;
    if (s->a->n_args) memcpy(call.args, s->a->args, s->a->n_args * sizeof *call.args);
    if (!macro_value(r, s->params, &caller.value)) return FAILED;
    call.args[call.n_args++] = (jn_arg){.value = &caller, .name = name.s};
    return jn_eval(r, &call, &out) && jn_print(r, r->out, out) ? DONE : FAILED;
}

/* ---- statements ---- */

static bool __attribute__((noinline)) filtered(jn_state *r, const jn_node *filter, jn_val *v)
{
    jn_val outer = r->hole;
    r->hole = *v;
    bool ok = jn_eval(r, filter, v);
    r->hole = outer;
    return ok;
}

static outcome __attribute__((noinline)) set_block(jn_state *r, const jn_node *s)
{
    jn_val v;
    if (!capture(r, new_env(r, r->env), s->list[0], &v)) return FAILED;
    if (s->b && !filtered(r, s->b, &v)) return FAILED;
    return assign_to(r, s, v) ? DONE : FAILED;
}

static outcome __attribute__((noinline)) filter_block(jn_state *r, const jn_node *s)
{
    jn_val v;
    if (!capture(r, new_env(r, r->env), s->list[0], &v)) return FAILED;
    return filtered(r, s->a, &v) && jn_print(r, r->out, v) ? DONE : FAILED;
}

static outcome __attribute__((noinline)) scope(jn_state *r, const jn_node *s)
{
    jn_env *outer = r->env, *env = new_env(r, outer);
    jn_val v;
    if (!env) return FAILED;
    for (size_t i = 0; i + 1 < s->n; i += 2) /* `with`: values are evaluated outside */
        if (!jn_eval(r, s->list[i + 1], &v) || !bind(r, env, s->list[i], v)) return FAILED;
    r->env = env;
    outcome o = run(r, s->list[s->n - 1]);
    r->env = outer;
    return o;
}

static outcome __attribute__((noinline)) if_block(jn_state *r, const jn_node *s)
{
    for (size_t i = 0; i < s->n; i += 2) {
        if (i + 1 == s->n) return run(r, s->list[i]); /* else */
        jn_val cond;
        if (!jn_eval(r, s->list[i], &cond)) return FAILED;
        if (jn_truth(cond)) return run(r, s->list[i + 1]);
    }
    return DONE;
}

static outcome __attribute__((noinline)) print(jn_state *r, const jn_node *s)
{
    jn_val v;
    return jn_eval(r, s->a, &v) && jn_print(r, r->out, v) ? DONE : FAILED;
}

static outcome __attribute__((noinline)) set(jn_state *r, const jn_node *s)
{
    jn_val v;
    return jn_eval(r, s->b, &v) && assign_to(r, s, v) ? DONE : FAILED;
}

static outcome __attribute__((noinline)) define_macro(jn_state *r, const jn_node *s)
{
    jn_val m;
    return macro_value(r, s->params, &m) && assign(r, r->env, s->sym, m) ? DONE : FAILED;
}

static outcome body(jn_state *r, const jn_node *s)
{
    outcome o = DONE;
    for (size_t i = 0; o == DONE && i < s->n; i++)
        o = run(r, s->list[i]);
    return o;
}

static outcome dispatch(jn_state *r, const jn_node *s)
{
    switch (s->kind) {
    case JN_S_BODY:
        return body(r, s);
    case JN_S_TEXT:
        return jn_put_str(r, r->out, s->value.s) ? DONE : FAILED;
    case JN_S_PRINT:
        return print(r, s);
    case JN_S_IF:
        return if_block(r, s);
    case JN_S_FOR:
        return for_loop(r, s);
    case JN_S_SET:
        return set(r, s);
    case JN_S_SET_BLOCK:
        return set_block(r, s);
    case JN_S_MACRO:
        return define_macro(r, s);
    case JN_S_CALL:
        return call_block(r, s);
    case JN_S_FILTER:
        return filter_block(r, s);
    case JN_S_WITH:
    case JN_S_SCOPE:
        return scope(r, s);
    case JN_S_BREAK:
        return BREAK;
    case JN_S_CONTINUE:
        return CONTINUE;
    default:
        bg_fail(r->err, BG_INTERNAL, "%s: an expression where a statement belongs", r->name);
        return FAILED;
    }
}

static outcome run(jn_state *r, const jn_node *s)
{
    if (!jn_work(r, 0) || !jn_enter(r)) return FAILED;
    r->line = s->line;
    outcome o = dispatch(r, s);
    jn_leave(r);
    return o;
}

/* ---- a render ---- */

bg_status jn_render_begin(jn_state *r, const jn_program *p, const jn_limits *limits, int64_t wall_s,
                          bg_error *err)
{
    *r = (jn_state){.err = err, .prog = p, .name = p->name, .line = 1, .wall_s = wall_s};
    r->fail_status = BG_ARG;
    if (limits) r->lim = *limits;
    if (!r->lim.output_bytes) r->lim.output_bytes = (size_t)64 << 20;
    if (r->lim.output_bytes > SIZE_MAX / 16) r->lim.output_bytes = SIZE_MAX / 16;
    if (!r->lim.memory_bytes) r->lim.memory_bytes = 4 * r->lim.output_bytes + ((size_t)64 << 20);
    if (!r->lim.steps) r->lim.steps = 10000000;
    if (!r->lim.depth) r->lim.depth = 200;
    r->own = (jn_arena){.limit = r->lim.memory_bytes, .fail_at = r->lim.fail_alloc};
    r->arena = &r->own;
    r->context = jn_new_array(r, p->syms->n + 1, sizeof *r->context);
    r->out = r->context ? jn_buf_new(r) : NULL;
    r->env = r->out ? new_env(r, NULL) : NULL;
    if (r->env && jn_globals(r)) return BG_OK;
    return err->status;
}

bool jn_set_var(jn_state *r, const char *name, size_t n, jn_val v)
{
    int sym = jn_symbol(r->prog, name, n);
    if (sym >= 0) r->context[sym] = v;
    return sym >= 0;
}

bg_status jn_render_run(jn_state *r)
{
    return run(r, r->prog->body) == FAILED ? r->err->status : BG_OK;
}

void jn_render_end(jn_state *r)
{
    jn_arena_release(&r->own);
}
