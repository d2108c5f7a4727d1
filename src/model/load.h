/* model/load.h - what loads a rank's share of a layer: shared by load.c, experts.c and mla.c. */
#ifndef BG_MODEL_LOAD_H
#define BG_MODEL_LOAD_H

#include "model/arch.h"

typedef struct bg_loader {
    const bg_gguf *g;
    const bg_model_config *config;
    bg_model *m;
    uint64_t may;  /* roles that the layer may have (bg_layer_roles) */
    uint64_t done; /* bytes of weights, for the progress report */
} bg_loader;

void bg_load_progress(bg_loader *ld, uint64_t bytes);
/* The tensor of a role, if the layer may have it; NULL: it has none. */
const bg_tensor *bg_load_find(const bg_loader *ld, bg_role r, int layer);
/* n values of a small matrix from `at` on, as floats; *out is the caller's. Of random weights all
 * are `dummy`. */
bg_status bg_load_floats(const bg_loader *ld, const bg_tensor *t, int64_t at, int64_t n,
                         float dummy, float **out, bg_error *err);
/* This rank's share; v stays empty where the file has no such tensor. */
bg_status bg_load_vec(bg_loader *ld, bg_vec *v, bg_role r, int layer, bg_error *err);

/* A linear that is put together from parts, in the order in which they are added. */
typedef struct bg_builder {
    bg_linear_spec spec;
    char name[48];
    float *bias[4];
    const bg_tensor *tensors[4];
} bg_builder;

void bg_part_start(bg_builder *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Rows [row0, row0 + n_rows) of t. */
bg_status bg_part_add(const bg_loader *ld, bg_builder *b, const bg_tensor *t, int64_t row0,
                      int64_t n_rows, bg_range cols, const bg_tensor *bias, bg_error *err);
/* This rank's share of a matrix; bias_role N_ROLES: none. */
bg_status bg_part_add_role(bg_loader *ld, bg_builder *b, bg_role r, bg_role bias_role, int layer,
                           bg_error *err);
/* *l stays NULL without rows. */
bg_status bg_part_finish(bg_loader *ld, bg_builder *b, bg_linear **l, bg_error *err);
void bg_part_release(bg_builder *b);
/* A linear of one part. */
bg_status bg_load_linear(bg_loader *ld, bg_linear **out, const char *name, bg_role r, bg_role bias,
                         int l, bg_error *err);

bg_status bg_experts_load(bg_loader *ld, bg_layer *layer, int l, bg_error *err); /* experts.c */
bg_status bg_mla_load(bg_loader *ld, bg_layer *layer, int l, bg_error *err);     /* mla.c */

#endif
