/* job/devices.h - from --device and the GPUs that there are to the GPU of each rank.
 *
 * Numbers only: who asks the machine is job/sizes.c. */
#ifndef BG_JOB_DEVICES_H
#define BG_JOB_DEVICES_H

#include "backend/device.h"
#include "engine/engine.h"

typedef struct bg_device_choice {
    bool cpu, automatic;
    int n; /* GPUs named, repeated ones counted; 0: any */
    int named[BG_MAX_RANKS];
} bg_device_choice;

/* "auto", "cpu", "cuda", "cuda:1", "cuda:0,1,1". BG_ARG. */
bg_status bg_devices_parse(bg_device_choice *d, const char *text, bg_error *err);

typedef struct bg_device_plan {
    int gpus[BG_MAX_RANKS]; /* of each rank, replica by replica: index in the list of GPUs */
    int shared;             /* ranks of the fullest GPU */
    uint64_t free_bytes;    /* the least that a rank has left of its share of its GPU */
} bg_device_plan;

/* Gives each of tp * dp ranks a GPU of list[0..n): named ones in turn, else one of its own, taking
 * the first that hold enough. Rank r of a replica needs need[r] bytes for all but keys and values.
 * BG_ARG: there are too few, or too small ones; the text says what to do. */
bg_status bg_devices_assign(bg_device_plan *p, const bg_device_choice *d, const bg_gpu *list, int n,
                            int tp, int dp, const uint64_t *need, bg_error *err);

#endif
