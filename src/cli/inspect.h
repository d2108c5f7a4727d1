/* cli/inspect.h - what `inspect` says of a model that can run: who holds what, and what a step
 * takes at least. */
#ifndef BG_CLI_INSPECT_H
#define BG_CLI_INSPECT_H

#include "cli/cli.h"

void bg_inspect_print(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p);
int bg_inspect_json(const bg_job *job, const bg_text_model *m, const bg_memory_plan *p);

#endif
