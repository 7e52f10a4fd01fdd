#ifndef XDI_DMD_FAKE_SCORE_H
#define XDI_DMD_FAKE_SCORE_H

#include "checkpoint/full.h"
#include "io/weights.h"
#include "model/build.h"

/* A fake score is a trainable copy of its teacher: docs/fake_score.md. */

/* Differences from the teacher. */
typedef struct xd_fake_score_desc {
    /* xd_fake_score_create: the teacher's storage, without dtype or adapt. */
    bool shared;
    /* F32, BF16 or F16, for tensors of these; keep_f32 ones never become half types. NONE -> as is. */
    xd_dtype dtype;
    /* [frozen_count] full names with '*' of weights that do not train, such as integers. Each must match. All others
     * train, also those that the teacher froze. */
    const char *const *frozen;
    int frozen_count;
    /* Changes dtype, layout, init, traits of each weight but ties; the same on all ranks. NULL -> none. */
    xd_result (*adapt)(void *user, const char *name, xd_weight_desc *weight);
    void *user;
} xd_fake_score_desc;

/* Describes a fake score: an unsealed model in the teacher's context, without storage. Borrows layouts that `adapt`
 * leaves. Local.
 *
 *   teacher   sealed; with or without storage or wrapper; not needed afterwards
 *   desc      NULL -> defaults; `shared` is not read
 *
 * Errors: STATE (not sealed), ARGUMENT (pattern, dtype; name, shape or kind from `adapt`), DTYPE (what cannot train),
 * those of `adapt` and xd_weight_add, MEMORY. */
XD_API xd_result xd_fake_score_describe(const xd_model *teacher, const xd_fake_score_desc *desc,
                                        xd_model **out);

/* Creates a sealed fake score on this rank, with gradients and the teacher's values: copied, or its storage. Local.
 *
 *   teacher   sealed, with values, between steps; if shared, it outlives the fake score
 *   desc      NULL -> defaults
 *
 * Keeps bits; a new dtype rounds to nearest even. Errors: as above; STATE (no values; shared and wrapped), UNSUPPORTED
 * (sharded), ARGUMENT (shared with dtype or adapt; `adapt` shards). */
XD_API xd_result xd_fake_score_create(const xd_model *teacher, const xd_fake_score_desc *desc,
                                      xd_model **out);

/* ---- from parts ---- */

/* Sources of values. */
typedef enum xd_fake_score_from {
    XD_FAKE_SCORE_FROM_TEACHER = 0, /* storage or wrapper */
    XD_FAKE_SCORE_FROM_PARTS,       /* as for a checkpoint */
    XD_FAKE_SCORE_FROM_ROOT,        /* of rank 0, whole */
    XD_FAKE_SCORE_FROM_READER       /* a function of each rank */
} xd_fake_score_from;

/* A reader. */
typedef struct xd_fake_score_reader {
    const xd_weights_entry *entries; /* [entry_count] the same on all ranks */
    int64_t entry_count;
    /* Writes this rank's elements to host memory, ascending, in the entry's dtype. An error ends the call. */
    xd_result (*read)(void *user, const xd_weights_entry *entry, xd_interval elements, void *to);
    void *user;
} xd_fake_score_reader;

/* A source; reads fields of `from`. */
typedef struct xd_fake_score_source {
    xd_fake_score_from from;
    const xd_tensor_part *parts; /* [part_count] of xd_parallel_parts; the same on all ranks */
    int64_t part_count;
    const xd_state_tensor *tensors; /* [tensor_count] of rank 0; without `group` */
    int64_t tensor_count;
    xd_fake_score_reader reader;
} xd_fake_score_source;

/* Computes missing buffers: elements of `part.range`, device memory. Fails for unknown names. */
typedef struct xd_fake_score_compute {
    xd_result (*call)(void *user, xd_ctx *ctx, const xd_tensor_part *part);
    void *user;
} xd_fake_score_compute;

/* Tensors without ties; the same on every rank. */
typedef struct xd_fake_score_report {
    int64_t loaded;      /* from the source */
    int64_t local;       /* of these without communication */
    int64_t converted;   /* of those loaded */
    int64_t computed;    /* by `compute` */
    int64_t formed;      /* by their init */
    int64_t missing;     /* an error */
    int64_t unexpected;  /* in the source only */
    int64_t wrong_shape; /* an error unless formed or computed */
    char names[200];     /* first five of these three, ", " between */
} xd_fake_score_report;

/* Settings, the same on every rank. Layouts and wrappers' names outlive the call. */
typedef struct xd_fake_score_meta_desc {
    /* Sealed; ranks without a part need no storage. Required unless provider and another source are set. */
    const xd_model *teacher;
    xd_fake_score_desc fake;    /* `shared` is refused */
    xd_stage_provider provider; /* replaces `fake`; zero -> none */
    xd_fake_score_source source;
    const xd_groups *groups; /* as in xd_build_desc; no pipeline stages */
    xd_wrap wrap;            /* zero -> none */
    /* Ignores unexpected tensors, computes missing buffers, initializes `fresh`. false -> these are errors, except
     * missing `transient` buffers, which are computed. */
    bool lenient;
    /* [fresh_count] as `frozen`: weights to initialize if missing or of another shape; needs `lenient`. */
    const char *const *fresh;
    int fresh_count;
    xd_fake_score_compute compute; /* zero -> none */
    xd_fake_score_report *report;  /* out, also if its counts fail the call; NULL -> none */
    size_t staging_bytes;          /* of elements, up to the largest tensor; 0 -> 16 MiB */
} xd_fake_score_meta_desc;

/* Creates a fake score on all ranks by xd_build and a source: xd_built_stage(built, 0). Compares before it allocates.
 * Deterministic; a new dtype rounds to nearest even. Collective over world. Errors: those of xd_fake_score_describe,
 * the provider and xd_build; ARGUMENT, MISMATCH, MISSING, UNEXPECTED, SHAPE, DTYPE, STATE (no values), UNSUPPORTED
 * (stages, a partial sum), MEMORY; a function's own (PEER on the others). */
XD_API xd_result xd_fake_score_create_meta(xd_comm *world, const xd_fake_score_meta_desc *desc,
                                           xd_built **out);

#endif
