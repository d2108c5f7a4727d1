/* job/gpu_sizes.h - what a rank takes of its GPU's memory beside keys and values. */
#ifndef BG_JOB_GPU_SIZES_H
#define BG_JOB_GPU_SIZES_H

#include "backend/device.h"
#include "job/job.h"

typedef struct bg_gpu_bytes {
    uint64_t weights; /* as the backend stores them */
    uint64_t buffers; /* activations, logits, the step, histories, sampling, graphs */
} bg_gpu_bytes;

/* For p's limits. tiled: compute capability 9.x in native arithmetic. */
bg_gpu_bytes bg_gpu_sizes(const bg_text_model *m, const bg_memory_plan *p, const bg_shard *s,
                          bg_compute compute, bool tiled);
/* What --fast-math takes besides, in the tiled mode. */
bg_gpu_bytes bg_gpu_fast_sizes(const bg_text_model *m, const bg_memory_plan *p, const bg_shard *s);
/* Both of them, and what ranks need to talk to each other: as the job asks. */
bg_gpu_bytes bg_gpu_needs(const bg_text_model *m, const bg_memory_plan *p, const bg_job *job,
                          const bg_shard *s, bool tiled);
/* Sets p's limits to what a job takes on a GPU. */
void bg_gpu_limits(bg_memory_plan *p, const bg_job *job);
bool bg_gpu_tiled(const bg_gpu *g, bg_compute compute);
/* What may be used of a GPU: this share of its memory, and of that what is free. */
uint64_t bg_gpu_budget(const bg_gpu *g, double utilization);

#endif
