/* engine/engine_internal.h - knobs of the engine that only tests turn. */
#ifndef BG_ENGINE_ENGINE_INTERNAL_H
#define BG_ENGINE_ENGINE_INTERNAL_H

#include "engine/engine.h"

enum { BG_ENGINE_MAX_DEPTH = 2 };

typedef struct bg_engine_tuning {
    int depth;       /* steps in flight, 1 to BG_ENGINE_MAX_DEPTH */
    int64_t hang_ns; /* ranks that do not get on for so long count as dead */
    bool greedy;     /* see bg_sched_config */
} bg_engine_tuning;

/* NULL: the defaults, which bg_engine_new() takes. */
bg_status bg_engine_new_tuned(bg_engine **e, bg_ranks *r, const bg_engine_config *c,
                              const bg_engine_tuning *t, bg_error *err);

/* Checks the scheduler's invariants and, as nothing may be in flight then, that all blocks are
 * free. Only when drained. */
bg_status bg_engine_verify(bg_engine *e, bg_error *err);

#endif
