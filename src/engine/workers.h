/* engine/workers.h - the ranks as the engine's own files see them.
 *
 *     coordinator --fork--> nursery --fork--> rank 0 .. rank tp-1
 *
 * The nursery is forked before any thread exists and stays single-threaded, so it may fork again
 * when ranks must be started anew; the coordinator could not. It reaps ranks and records how they
 * ended. It gets one-byte commands through a pipe:
 *
 *     S  start all ranks (none is running)      K  kill all ranks      end of the pipe: kill, reap,
 * exit
 *
 * The end of the pipe also means that the coordinator is gone. PDEATHSIG says so a second time, for
 * nursery and ranks alike: whatever kills the coordinator, nothing outlives it. (The kernel
 * sends it when the *thread* that forked ends: bg_ranks_start() is for the main thread.)
 *
 * The shared map, made once: the header with a slot a rank, the ranks' communicator, a ring down to
 * each rank, one ring up. On a restart all but the header's lock-free words is made anew while no
 * rank lives.
 *
 * SIGINT, SIGTERM and SIGHUP reach a whole process group or service; nursery and ranks ignore them,
 * as the coordinator decides how the job ends. Their stdin and stdout are /dev/null and every other
 * inherited descriptor but stderr is closed: a rank holds no lock and no pipe of the job open.
 *
 * Everything here is for one thread, the one that drives the ranks, unless said. */
#ifndef BG_ENGINE_WORKERS_H
#define BG_ENGINE_WORKERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/ring.h"
#include "engine/engine.h"

enum { BG_RANKS_TICK_NS = 100 * 1000 * 1000 }; /* how long to wait before bg_ranks_watch() */

/* As bg_ranks_start(); threads: ranks are threads of this process (thread sanitizer; nothing can be
 * killed then, but a rank that fails can be started again). */
bg_status bg_ranks_start_as(bg_ranks **r, const bg_rank_config *c, const bg_rank_ops *ops,
                            bool threads, bg_log *log, bg_error *err);

const bg_rank_config *bg_ranks_config(const bg_ranks *r);
size_t bg_ranks_max_message(const bg_ranks *r);
bg_ring *bg_ranks_up(bg_ranks *r);
/* Makes the next wait on the ring up return at once. Any thread. */
void bg_ranks_kick(bg_ranks *r);

/* Sends a message to every rank. BG_DEVICE as from bg_ranks_watch(); BG_INTERNAL: it is too big. */
bg_status bg_ranks_send(bg_ranks *r, const void *msg, size_t n, bg_error *err);

/* Called about every tick while an answer is due: BG_OK, or how a rank failed, died, or that none
 * got on for hang_ns. Time in which this process itself did not run (stopped, suspended) does not
 * count. */
bg_status bg_ranks_watch(bg_ranks *r, bg_error *err);
void bg_ranks_set_hang(bg_ranks *r, int64_t hang_ns);
void bg_ranks_watch_reset(bg_ranks *r); /* from now on an answer is due */

/* Kills what still runs and starts all ranks again; does not wait for them to be ready. BG_DEVICE:
 * the nursery is gone, or a rank cannot be killed. */
bg_status bg_ranks_restart(bg_ranks *r, bg_error *err);

#endif
