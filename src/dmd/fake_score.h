#ifndef XDI_DMD_FAKE_SCORE_H
#define XDI_DMD_FAKE_SCORE_H

#include "checkpoint/full.h"
#include "io/weights.h"
#include "model/build.h"

/* A fake score is a trainable copy of its teacher: docs/fake_score.md.
 *
 *   xd_fake_score_create        copies or shares a teacher that is whole on this rank
 *   xd_fake_score_create_meta   describes it on all ranks, then fills each rank's part
 *   xd_fake_score_describe      only describes it
 *
 * All weights train, unless `frozen` names them. Gradients, wrappers and optimizers are not copied. */

/* Differences from the teacher. */
typedef struct xd_fake_score_desc {
    /* xd_fake_score_create: use the teacher's storage, so training changes it (xd_dmd_desc.allow_shared). No dtype or adapt. */
    bool shared;
    /* F32, BF16 or F16, for weights and buffers of these; keep_f32 ones never become half types. NONE -> as is. */
    xd_dtype dtype;
    /* [frozen_count] full names with '*': weights that do not train, among them integers and 8-bit types. Each must match. */
    const char *const *frozen;
    int frozen_count;
    /* Called for each weight but ties. May change dtype, layout, init and traits. The same on all ranks. NULL -> none. */
    xd_result (*adapt)(void *user, const char *name, xd_weight_desc *weight);
    void *user;
} xd_fake_score_desc;

/* Describes a fake score: an unsealed model in the teacher's context, without memory for weights. Borrows the teacher's layouts
 * unless `adapt` sets others. Local.
 *
 *   teacher   sealed; with or without storage or wrapper; not needed afterwards
 *   desc      NULL -> defaults; `shared` is not read
 *
 * Errors: STATE (not sealed), ARGUMENT (a pattern without a weight, dtype, name, shape or kind from `adapt`), DTYPE (a weight
 * that cannot train), those of `adapt` and xd_weight_add, MEMORY. */
XD_API xd_result xd_fake_score_describe(const xd_model *teacher, const xd_fake_score_desc *desc,
                                        xd_model **out);

/* Creates a sealed fake score on this rank, with gradients and copies of the teacher's values, or its storage. Local.
 *
 *   teacher   sealed, with values, between steps; if shared, it must outlive the fake score
 *   desc      NULL -> defaults
 *   out       the caller destroys or wraps it
 *
 * Keeps bits; a new dtype rounds to nearest even. Errors: as above; STATE (no values; shared with a wrapped teacher),
 * UNSUPPORTED (a sharded teacher), ARGUMENT (shared with dtype or adapt; `adapt` shards). Source: Model-Optimizer,
 * create_fake_score. */
XD_API xd_result xd_fake_score_create(const xd_model *teacher, const xd_fake_score_desc *desc,
                                      xd_model **out);

/* ---- from parts ---- */

/* Where values come from. */
typedef enum xd_fake_score_from {
    XD_FAKE_SCORE_FROM_TEACHER = 0, /* storage or wrapper of desc.teacher */
    XD_FAKE_SCORE_FROM_PARTS,       /* as for a checkpoint */
    XD_FAKE_SCORE_FROM_ROOT,        /* whole tensors of rank 0 */
    XD_FAKE_SCORE_FROM_READER       /* a function of each rank */
} xd_fake_score_from;

/* Reads elements, from a file for example. */
typedef struct xd_fake_score_reader {
    const xd_weights_entry *entries; /* [entry_count] the same list on every rank */
    int64_t entry_count;
    /* Writes elements in ascending order, in the entry's dtype, to host memory. Each rank calls it for its own elements. A
     * result other than XD_OK ends the call. */
    xd_result (*read)(void *user, const xd_weights_entry *entry, xd_interval elements, void *to);
    void *user;
} xd_fake_score_reader;

/* A source; only fields of `from` are read. `parts` are those of xd_parallel_parts. */
typedef struct xd_fake_score_source {
    xd_fake_score_from from;
    const xd_tensor_part *parts; /* [part_count] the same list on all ranks; ranges may be empty */
    int64_t part_count;
    const xd_state_tensor *tensors; /* [tensor_count] of rank 0 only; `group` is not read */
    int64_t tensor_count;
    xd_fake_score_reader reader;
} xd_fake_score_source;

/* Computes a missing buffer, such as a table of angles: fills the elements of `part.range` in device memory by their places.
 * Fails for an unknown name. */
typedef struct xd_fake_score_compute {
    xd_result (*call)(void *user, xd_ctx *ctx, const xd_tensor_part *part);
    void *user;
} xd_fake_score_compute;

/* Numbers of weights and buffers without ties; the same on every rank. */
typedef struct xd_fake_score_report {
    int64_t loaded;      /* from the source */
    int64_t local;       /* of these, without communication */
    int64_t converted;   /* of those loaded */
    int64_t computed;    /* by `compute` */
    int64_t formed;      /* by their init */
    int64_t missing;     /* without a source: an error */
    int64_t unexpected;  /* in the source only */
    int64_t wrong_shape; /* an error unless formed */
    char names[200];     /* first five of these three; ", " between */
} xd_fake_score_report;

/* What to make; the same on every rank. Layouts and the names in wrapper settings must outlive the call. */
typedef struct xd_fake_score_meta_desc {
    /* Sealed; without storage on ranks without a part. Required unless provider and another source are set. */
    const xd_model *teacher;
    xd_fake_score_desc fake;    /* not `shared` */
    xd_stage_provider provider; /* replaces `fake`, for example with extra heads; zero -> none */
    xd_fake_score_source source;
    const xd_groups *groups; /* as in xd_build_desc; no pipeline stages */
    xd_wrap wrap;            /* zero -> none */
    /* Ignores unexpected tensors; computes missing buffers, initializes `fresh`. false -> errors but for unsaved buffers. */
    bool lenient;
    /* [fresh_count] full names with '*': weights to initialize if missing or of another shape. Needs `lenient`. */
    const char *const *fresh;
    int fresh_count;
    xd_fake_score_compute compute; /* zero -> none */
    xd_fake_score_report *report;  /* out; also filled in when its counts make the call fail; NULL -> none */
    size_t staging_bytes;          /* of elements in memory; the largest tensor is enough; 0 -> 16 MiB */
} xd_fake_score_meta_desc;

/* Creates a fake score on all ranks by xd_build and a source. Collective over world.
 *
 *   out   one stage: xd_built_stage(built, 0); untouched on failure
 *
 * Deterministic; a new dtype rounds to nearest even. Compares names, shapes and types before it allocates.
 * Errors: those of xd_fake_score_describe, the provider and xd_build; ARGUMENT, MISMATCH, MISSING, UNEXPECTED, SHAPE, DTYPE,
 * STATE (no values), UNSUPPORTED (stages, a partial sum), MEMORY; a function's own (PEER on the others).
 * Source: FastGen's meta initialisation, with shares instead of broadcasts. */
XD_API xd_result xd_fake_score_create_meta(xd_comm *world, const xd_fake_score_meta_desc *desc,
                                           xd_built **out);

#endif
