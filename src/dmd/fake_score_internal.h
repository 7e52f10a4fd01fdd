#ifndef XDI_DMD_FAKE_SCORE_INTERNAL_H
#define XDI_DMD_FAKE_SCORE_INTERNAL_H

#include "checkpoint/internal.h"
#include "dmd/fake_score.h"
#include "model/build_internal.h"
#include "model/parallel_internal.h"

/* ---- fake_score.c ---- */

/* This rank's part of a weight that is no tie: what it holds of it, or, of a wrapped one, what it keeps; `whole`: of what
 * every data rank keeps, all of it. */
XD_PRIVATE xd_tensor_part xdi_fake_part(const xd_weight *weight, bool whole);

/* Whether a name fits one of the patterns; and ARGUMENT for negative counts and for a pattern that fits no weight. */
XD_PRIVATE bool xdi_fake_fits(const char *const *patterns, int count, const char *name);
XD_PRIVATE xd_result xdi_fake_check_patterns(const xd_model *model, const char *const *patterns, int count,
                                             const char *what);

/* Patterns, in a hash of what ranks must have said alike. */
XD_PRIVATE uint64_t xdi_fake_hash_patterns(uint64_t hash, const char *const *patterns, int count);

/* ---- one fake score that is being made of parts ---- */

/* A tensor that the source has. */
typedef struct xdi_fake_key {
    const char *name;
    xd_dtype dtype;
    int ndim;
    int64_t shape[XD_DIMS_MAX];
    int64_t index; /* in the source's own list */
    bool used;
} xdi_fake_key;

/* Where the values of a weight come from. */
typedef enum xdi_fake_origin { XDI_FAKE_LOADED = 0, XDI_FAKE_COMPUTED, XDI_FAKE_FORMED } xdi_fake_origin;

/* A weight of the fake score that is no tie. */
typedef struct xdi_fake_tensor {
    xd_weight *weight;
    xdi_fake_origin origin;
    int64_t key;  /* of the source's list, when loaded */
    xd_init init; /* the weight's own */
    xd_tensor_part part;
} xdi_fake_tensor;

typedef struct xdi_fake {
    xd_comm *world;
    xd_ctx *ctx;
    const xd_fake_score_meta_desc *desc;
    xd_fake_score_report report;
    xd_model *model;               /* the build's */
    xdi_fake_key *keys;            /* [key_count] in the source's order, the same on all ranks */
    const void **order;            /* [key_count] by name */
    char *text;                    /* their names, where rank 0 alone has the list */
    xd_tensor_part *teacher_parts; /* [part_count] from the teacher */
    const xd_tensor_part *parts;   /* [part_count] what this rank has of the source, of kinds with parts */
    int64_t key_count, part_count;
    xdi_fake_tensor *tensors; /* [tensor_count] */
    int64_t tensor_count;
} xdi_fake;

/* fake_score_source.c: the source's list on every rank; of parts, also that some rank holds each element. Collective. */
XD_PRIVATE xd_result xdi_fake_list(xdi_fake *f);
XD_PRIVATE void xdi_fake_list_release(xdi_fake *f);

/* fake_score_source.c: the key of that name; NULL when there is none. */
XD_PRIVATE xdi_fake_key *xdi_fake_find(const xdi_fake *f, const char *name);

/* fake_score_source.c: the values of what is loaded. Collective. */
XD_PRIVATE xd_result xdi_fake_load(xdi_fake *f);

#endif
