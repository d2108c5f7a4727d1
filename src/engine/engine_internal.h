/* engine/engine_internal.h - knobs of the engine that only tests turn, and what replicas.c needs.
 */
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

/* For who shares sequences out among engines: any thread. */
typedef struct bg_engine_room {
    bool failed, full; /* full: a submit would wait */
    int64_t load;      /* tokens of those in flight, to be read or perhaps written */
} bg_engine_room;
bg_engine_room bg_engine_look(bg_engine *e);
/* In on_failed: calls give for each sequence that is not over, with the tokens it has. The engine
 * still owns what the specs point to. Cancelled ones end here. False as soon as give says so. */
bool bg_engine_hand_over(bg_engine *e, bool (*give)(void *ctx, const bg_seq_spec *spec), void *ctx);
/* The first half of bg_engine_stop(): does not wait for the thread. */
void bg_engine_ask_stop(bg_engine *e);

#endif
