/* engine/rank.h - what runs inside a rank: start, then messages until the stop.
 *
 * A slot here lies in shared memory: written by its rank (and by the nursery for what only a parent
 * can see), read by the coordinator. */
#ifndef BG_ENGINE_RANK_H
#define BG_ENGINE_RANK_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/error.h"
#include "base/ring.h"
#include "engine/engine.h"

enum { BG_RANK_COMM_FLOATS = 1 << 18 }; /* a collective is cut into pieces of this many */

typedef enum bg_rank_state {
    BG_RANK_NONE,     /* not started */
    BG_RANK_STARTING, /* loads the model */
    BG_RANK_READY,
    BG_RANK_FAILED,  /* err says why; the process ends or has ended */
    BG_RANK_STOPPED, /* did as it was asked */
} bg_rank_state;

typedef struct bg_rank_slot {
    _Alignas(64) _Atomic int32_t state; /* bg_rank_state; stored after err */
    _Atomic int32_t pid;                /* 0: no process */
    _Atomic int32_t exited;             /* 1: reaped; stored after wait_status */
    _Atomic int32_t wait_status;        /* as waitpid() gives it */
    _Atomic uint64_t beats;             /* grows as long as the rank gets on */
    _Atomic uint64_t done, total;       /* bytes of weights loaded */
    _Atomic uint64_t memory;            /* bytes on the device */
    _Atomic int64_t device_work_ns, device_idle_ns;
    bg_load_times load; /* stored before it is ready */
    int64_t start_ns;   /* how long all before took */
    bg_error err;
} bg_rank_slot;

typedef struct bg_rank_link { /* a rank's ends */
    int rank;
    bg_rank_slot *slot;
    bg_ring *down, *up; /* up is written by rank 0 only, and kicked by all */
    void *comm_memory;
    size_t max_message;
} bg_rank_link;

/* Runs the rank until a stop message or until `down` closes. BG_OK, or the failure, which is then
 * in the slot too. */
bg_status bg_rank_run(const bg_rank_config *c, const bg_rank_ops *ops, const bg_rank_link *link);

#endif
