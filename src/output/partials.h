/* output/partials.h - tokens of sequences in flight: what the journal has of each.
 *
 * An entry of a commit's "partial" list holds the tokens that a sequence gained since the entry
 * before:
 * {"record":r,"choice":c,"from":k,"tokens":[...]}, where k tokens were there already. from may be
 * less than what was there: then the sequence was started again, and what is behind k is replaced.
 * With "logprobs":[[P,T,P,...],...] for a record that asks for them: of each token its own, then
 * each alternative with its; null is -inf. */
#ifndef BG_OUTPUT_PARTIALS_H
#define BG_OUTPUT_PARTIALS_H

#include "output/output.h"

typedef struct bg_partials bg_partials; /* by record and choice */

bg_partials *bg_partials_new(void);
void bg_partials_free(bg_partials *p);
/* Appends the list with what list[0..n) has beyond p, without brackets, and takes it into p.
 * Records in `done` are left out. *any: something was appended. False: no memory. */
bool bg_partials_gain(bg_partials *p, const bg_partial *list, int n, const bg_ranges *done,
                      bg_buf *out, bool *any);
/* Takes a commit's list in. False: malformed, or no memory. */
bool bg_partials_replay(bg_partials *p, const json_t *list, bool *nomem);
/* Appends all of it, as a list for bg_partials_replay(), without brackets. *any: there was
 * something. False: no memory. */
bool bg_partials_print(const bg_partials *p, bg_buf *out, bool *any);
/* Forgets what belongs to records in `done`. */
void bg_partials_drop(bg_partials *p, const bg_ranges *done);
void bg_partials_clear(bg_partials *p); /* forgets all */
/* Ends replaying: all of them, as an array that lives as long as p, whatever p forgets. Called
 * once. False: no memory. */
bool bg_partials_list(bg_partials *p, bg_partial **list, int *n);

#endif
