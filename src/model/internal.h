#ifndef XDI_MODEL_INTERNAL_H
#define XDI_MODEL_INTERNAL_H

#include "base/internal.h"
#include "kernel/kernels.h"
#include "model/model.h"
#include "tensor/internal.h"

struct xd_weight {
    xd_model *model;
    xd_block *block;
    xd_weight *next;  /* of its block */
    xd_weight *owner; /* itself, or what it is tied to */
    char *name;       /* full; belongs to the table of names */
    xd_weight_desc desc;
    xd_region region;
    int64_t index; /* in the model's order, once sealed */
    int64_t count;
    int64_t shape[XD_DIMS_MAX]; /* of the region */
    void *value, *gradient;
    bool ready;
};

struct xd_block {
    xd_model *model;
    xd_block *parent, *next, *first_child, *last_child; /* next: the parent's next child */
    xd_weight *first_weight, *last_weight;
    const char *name; /* full; belongs to the table of names */
    xd_block_desc desc;
    char *type; /* the desc's, copied */
};

/* An entry of the table of names: a block or a weight. */
typedef struct xdi_model_named {
    const char *name;
    xd_block *block;
    xd_weight *weight;
} xdi_model_named;

struct xd_model {
    xd_ctx *ctx;
    xd_model_desc desc;
    xd_block root;
    xdi_model_named *names; /* [name_room], open addressing; a power of two */
    size_t name_count, name_room;
    int64_t weight_count;
    xd_weight **weights; /* [weight_count] in order, once sealed */
    void *storage;       /* of the library's values and gradients */
    bool sealed;
};

/* model.c: the stored shape: that of the desc, with the rows that are stored. */
XD_PRIVATE void xdi_weight_stored_shape(const xd_weight_desc *d, int64_t shape[XD_DIMS_MAX]);

/* model.c: whether a weight has a gradient. */
XD_PRIVATE bool xdi_weight_is_trained(const xd_weight *weight);

#endif
