#ifndef XDI_DMD_FAKE_SCORE_H
#define XDI_DMD_FAKE_SCORE_H

#include "checkpoint/full.h"
#include "io/safetensors.h"
#include "model/build.h"

/* A fake score begins as its teacher: the same blocks, weights, ties and buffers with the same values, but trained. It is
 * made in one of three ways:
 *
 *     xd_fake_score_create        one rank's teacher is copied, or its values are shared; refuses a teacher in parts
 *     xd_fake_score_create_meta   described on all ranks first, without memory for weights; then each rank gets storage for its part,
 *                                 cut and wrapped as the fake score is to be, and the values: from the teacher's own parts in any
 *                                 cut on any ranks, from one rank, or from a function that reads
 *     xd_fake_score_describe      the description alone, to be changed before the second
 *
 * A model is weights and buffers: it has no mode of training or evaluation and no hooks, so there is none to set or to leave
 * behind; what a network records of its features is the caller's. Accumulated gradients, wrappers and optimizers are not copied.
 * Every weight of the fake score trains, also those that the teacher has frozen, unless `frozen` names it. */

/* How the fake score differs from its teacher. Zero is the default of every field. */
typedef struct xd_fake_score_desc {
    bool shared;    /* xd_fake_score_create: values are the teacher's storage, so whatever trains the fake
                     * score changes the teacher. For one network in both roles see xd_dmd_desc.allow_shared.
                     * Without dtype and adapt */
    xd_dtype dtype; /* F32, BF16 or F16: of all weights and buffers of F32, BF16 and F16; those with
                     * keep_f32 do not become half types. NONE -> each as it is */
    const char *const *frozen; /* [frozen_count] full names, in which '*' stands for any run of
                                * characters: weights that do not train. Those that cannot (integers,
                                * types of 8 bits) must be named; a pattern that fits no weight is an
                                * error */
    int frozen_count;
    /* Called for each weight that is no tie, as it will be added: may change its dtype, layout, init and traits, not its name and
     * shape. The same on all ranks. NULL -> none. */
    xd_result (*adapt)(void *user, const char *name, xd_weight_desc *weight);
    void *user;
} xd_fake_score_desc;

/* Describes a fake score: a model that is not sealed, in the teacher's context, to which blocks and weights may be added. It
 * needs no values and takes no memory for weights. Layouts are the teacher's, borrowed, unless `adapt` gives others.
 *
 *   teacher   sealed; with or without storage, with or without a wrapper. Not needed afterwards
 *   desc      NULL -> defaults; `shared` is not read
 *
 * Local. Errors: STATE (not sealed), ARGUMENT (a pattern that fits no weight; a dtype that is none of the three; an `adapt` that
 * has changed name, shape or kind), DTYPE (a weight that cannot train and is not named, with its type), those of `adapt` and of
 * xd_weight_add, MEMORY. */
XD_API xd_result xd_fake_score_describe(const xd_model *teacher, const xd_fake_score_desc *desc,
                                        xd_model **out);

/* Makes a fake score on this rank alone: described as above, sealed, with storage and gradients, or with the teacher's values.
 *
 *   teacher   sealed, with values in all weights; between steps. It is not changed, but for what training does when it is shared: then
 *             it must outlive the fake score
 *   desc      NULL -> defaults
 *   out       the caller's to destroy, or to wrap
 *
 * Local. Memory: that of a second model; when shared, gradients alone. Values keep their bits, or are rounded to nearest even
 * in a new dtype; buffers that are not saved are copied too. Errors: as above; STATE (a weight without values, by name; shared
 * with a wrapped teacher, whose values are the wrapper's), UNSUPPORTED, naming the first weight of which this rank has a part
 * alone: xd_fake_score_create_meta takes such teachers; ARGUMENT (shared with dtype or adapt; an `adapt` that has cut a
 * weight).
 * Source: Model-Optimizer, create_fake_score; looking at every tensor is ours. */
XD_API xd_result xd_fake_score_create(const xd_model *teacher, const xd_fake_score_desc *desc,
                                      xd_model **out);

/* ---- made of parts ---- */

/* Where values come from. */
typedef enum xd_fake_score_from {
    XD_FAKE_SCORE_FROM_TEACHER = 0, /* the storage or the wrapper of desc.teacher */
    XD_FAKE_SCORE_FROM_PARTS,       /* parts of whole tensors, as for a checkpoint */
    XD_FAKE_SCORE_FROM_ROOT,        /* whole tensors of rank 0, which sends each rank what it holds */
    XD_FAKE_SCORE_FROM_READER       /* a function that each rank calls for what it holds */
} xd_fake_score_from;

/* Reads elements of tensors, from a file for example. */
typedef struct xd_fake_score_reader {
    const xd_safetensors_entry *entries; /* [entry_count] what there is, the same list on every rank */
    int64_t entry_count;
    /* Writes the elements of a tensor whose numbers are in `elements`, in ascending order, in the entry's dtype, to memory of the
     * host. Called on each rank for what it holds alone; whatever is not XD_OK ends the call. */
    xd_result (*read)(void *user, const xd_safetensors_entry *entry, xd_interval elements, void *to);
    void *user;
} xd_fake_score_reader;

/* The source of values; fields of other kinds are not read. */
typedef struct xd_fake_score_source {
    xd_fake_score_from from;
    const xd_tensor_part *parts; /* [part_count] of this rank: xd_parallel_parts; all ranks have the same
                                  * names in the same order, with an empty range where a rank holds
                                  * nothing */
    int64_t part_count;
    const xd_state_tensor *tensors; /* [tensor_count] of rank 0 alone; `group` is not read */
    int64_t tensor_count;
    xd_fake_score_reader reader;
} xd_fake_score_source;

/* Computes a buffer that the source lacks: tables of angles or times. Fills the elements of `part.range` in memory of the context's
 * device; the same function of their places on every rank. An error for a name that it does not know. */
typedef struct xd_fake_score_compute {
    xd_result (*call)(void *user, xd_ctx *ctx, const xd_tensor_part *part);
    void *user;
} xd_fake_score_compute;

/* What to make. Zero is the default of the fields that are not required. Read during the call only, but for layouts, and what a
 * wrapper's settings say must live longer. Every rank passes the same. */
typedef struct xd_fake_score_meta_desc {
    const xd_model *teacher;    /* its description on every rank, also on those that have none of it: there
                                 * without storage. Required unless there is a provider and another source */
    xd_fake_score_desc fake;    /* how the fake score differs from it; not `shared` */
    xd_stage_provider provider; /* describes the fake score instead, for extra heads for example: `fake`
                                 * is not read then. Zero -> none */
    xd_fake_score_source source;
    const xd_groups *groups; /* of the wrapper, as in xd_build_desc; without stages of a pipeline */
    xd_wrap wrap;            /* zero -> none: each rank has what the layouts say */
    bool lenient; /* tensors of the source that nothing asks for are left out; what it lacks is computed,
                   * or, where `fresh` names it, begins with its init. false -> both are errors, but for
                   * computed buffers that are not saved */
    const char *const *fresh; /* [fresh_count] full names with '*', with `lenient`: weights that begin
                               * with their init where the source has none, or none of their shape */
    int fresh_count;
    xd_fake_score_compute compute; /* zero -> none */
    size_t staging_bytes;          /* of elements in memory at once, besides the fake score; 0 -> 16 MiB. The
                                    * largest tensor is enough */
} xd_fake_score_meta_desc;

/* What was found; the same on every rank. Numbers of weights and buffers, ties not counted. */
typedef struct xd_fake_score_report {
    int64_t loaded;      /* from the source */
    int64_t local;       /* of these, copied on every rank from what it holds itself */
    int64_t converted;   /* of those loaded, from another type */
    int64_t computed;    /* by the function */
    int64_t formed;      /* by their init */
    int64_t missing;     /* nowhere to be had: an error */
    int64_t unexpected;  /* in the source, but not asked for */
    int64_t wrong_shape; /* in both, with other shapes: an error unless they are formed */
    char names[200];     /* the first five that are missing, unexpected or of a wrong shape, ", " between */
} xd_fake_score_report;

/* Makes a fake score on all ranks of a world: the steps of xd_build with the values of a source. The order is fixed:
 *
 *     describe    on every rank, without memory for weights
 *     agree       names, shapes, types, ties, traits and cuts of layouts are the same on the whole world
 *     compare     the source's list with these; all of the source's elements are held by some rank
 *     storage     of each rank's part, by layouts and wrapper; cleared but for what values are written into next
 *     values      each element from the rank itself where it has it, else from the one rank that speaks for it, or as the kind of
 *                 source says; then computed buffers. What begins anew has the bits of xd_model_init_weights
 *     show        xd_parallel_publish, with a wrapper
 *
 * A failure before `storage` has taken no memory for weights. No element stays as the allocator gave it.
 *
 *   report   filled in also when the source is refused for what it counts; may be NULL
 *   out      one stage: xd_built_stage(built, 0); untouched on failure
 *
 * Names are the source's own, without renaming (files of others: xd_weights_import, after the fake score was made from its
 * description). A tied weight is one tensor, under the name of its owner or of any tie. Buffers that are not saved are taken from
 * the source where it has them, and computed otherwise. The teacher is not changed. Where source and fake score have the same
 * cut, the ranks exchange metadata alone; under FSDP a teacher that is frozen as a whole has the cut of a fake score that
 * trains as a whole, in the same units.
 *
 * Collective over world. Memory: the fake score's, staging_bytes (twice from rank 0 on a device, there and by a reader also once
 * on the host), and 17 KiB and 8 bytes a weight for each rank. Deterministic; in a new dtype elements are rounded to nearest even.
 * Errors, on every rank: those of xd_fake_score_describe, of the provider and of xd_build; ARGUMENT (no teacher, or one of
 * another context; no list, no function; negative counts; an entry that describes no tensor, or a name twice; `fresh` without
 * lenient, or fitting nothing; shared), MISMATCH (settings, descriptions, layouts or lists that differ; an element that no
 * rank speaks for, or two do), MISSING, UNEXPECTED, SHAPE, DTYPE (types that are not converted), STATE (a teacher, or a tensor
 * of rank 0, without values), UNSUPPORTED (stages of a pipeline; a partial sum), what the functions returned, PEER on the
 * others; MEMORY.
 * Source: FastGen's meta initialisation; shares instead of broadcasts, and the agreement, are ours. */
XD_API xd_result xd_fake_score_create_meta(xd_comm *world, const xd_fake_score_meta_desc *desc,
                                           xd_fake_score_report *report, xd_built **out);

#endif
