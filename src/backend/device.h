/* backend/device.h - which backends there are, and making one by the name of its device.
 *
 * CUDA lives in libbatchgen_cuda.so beside the program (or in ../lib/batchgen/), loaded when a GPU
 * is asked for: one program serves machines with and without. Only rank processes and a probe
 * process load it; the coordinator never does. */
#ifndef BG_BACKEND_DEVICE_H
#define BG_BACKEND_DEVICE_H

#include "backend/ops.h"

enum { BG_CUDA_ABI = 5, BG_MAX_GPUS = 16 };

typedef struct bg_gpu {
    int device;
    int capability; /* 90: compute capability 9.0 */
    uint64_t free_bytes, total_bytes;
    char name[96];
} bg_gpu;

/* Whether a GPU's driver seems to be there: without one nothing is worth asking. */
bool bg_gpus_likely(void);
/* The GPUs of this machine, asked by a process of its own (a driver that is loaded cannot be
 * forked). *n 0: none, or no library, and why (may be NULL, 0 size) says which. BG_IO: no process.
 */
bg_status bg_gpus_probe(bg_gpu list[BG_MAX_GPUS], int *n, char *why, size_t why_size,
                        bg_error *err);

/* device < 0: the CPU backend. In a rank's process. BG_DEVICE: no library or no such GPU. */
bg_status bg_backend_new(bg_backend **b, int device, const bg_backend_config *config,
                         bg_error *err);

#endif
