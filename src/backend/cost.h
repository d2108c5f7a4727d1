/* backend/cost.h - what attention over a step's sequences cannot do without; the same for every
 * backend. */
#ifndef BG_BACKEND_COST_H
#define BG_BACKEND_COST_H

#include "backend/steps.h"

/* Of the present step: keys and values that some row of a sequence sees are read once for each of
 * the rank's KV heads, value_bytes a value; two products a query head and visible key. */
void bg_attention_cost(const bg_steps *s, const bg_attn *p, double value_bytes, bg_cost *cost);
/* The same of latent attention: a row of kv_rank + n_rot values, read once as key and value. top_k:
 * the keys that a row sees at most, if they are selected. */
void bg_mla_cost(const bg_steps *s, const bg_mla *p, int top_k, double value_bytes, bg_cost *cost);

#endif
