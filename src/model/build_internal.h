#ifndef XDI_MODEL_BUILD_INTERNAL_H
#define XDI_MODEL_BUILD_INTERNAL_H

#include "base/internal.h"
#include "model/build.h"
#include "model/describe_internal.h"

XD_PRIVATE xd_ctx *xdi_built_ctx(const xd_built *built); /* build.c */

/* A build that is going on. */
typedef struct xdi_builder {
    xd_ctx *ctx;
    xd_comm *world;
    const xd_build_desc *desc;
    xd_groups groups;
    xd_comm *data; /* the data ranks; NULL -> one */
    bool experts;  /* some rank has weights of experts */
    xd_built *built;
    xd_stages *list; /* of it */
} xdi_builder;

/* build.c: a callback's result, with a message if it left none, and of the codes that there are. */
XD_PRIVATE xd_result xdi_builder_called(xd_ctx *ctx, xd_result result, const char *what, int index);

/* build_place.c: a rank and a size; of no group 0 and 1. */
XD_PRIVATE int xdi_group_rank(const xd_comm *comm);
XD_PRIVATE int xdi_group_size(const xd_comm *comm);

/* build_place.c: the virtual stages of each rank; one rank has no others than one. */
XD_PRIVATE int xdi_pipeline_stages(int ranks, int virtual_stages);

/* build_settings.c: what can be refused before anything is built; and whether all ranks have said alike what they must. */
XD_PRIVATE xd_result xdi_builder_validate(const xdi_builder *b, const xd_stages *existing);
XD_PRIVATE xd_result xdi_builder_agree_settings(const xdi_builder *b, bool existing);
/* build_settings.c: the hooks that are called; NULL for none. */
XD_PRIVATE const xd_stage_hooks *xdi_builder_hooks(const xd_build_desc *d, bool after);

/* build_precision.c: gives a sealed model the half type of step 5. Errors: as in xd_build; the model is unchanged then. */
XD_PRIVATE xd_result xdi_model_lower(xd_model *model, const xd_precision *precision);

/* build_casts.c: in which types a stage takes and puts out values. */
XD_PRIVATE void xdi_stage_set_casts(const xd_build_desc *d, xd_stage *stage);

/* build_precision.c: whether a name fits a pattern, in which '*' stands for any run of characters. */
XD_PRIVATE bool xdi_name_fits(const char *pattern, const char *name);

/* build_values.c: broadcasts the seeds; makes values equal over the data ranks or compares them, as the settings say.
 * Collective. */
XD_PRIVATE xd_result xdi_builder_seeds(const xdi_builder *b);
XD_PRIVATE xd_result xdi_builder_equalise(const xdi_builder *b);

/* build_place.c: returns the place of a stage of a rank. Pure.
 * Errors: ARGUMENT (negative numbers; no such rank or stage; above XD_STAGES_MAX; chunk_layers do not add up to
 * layer_count), TOPOLOGY (layers do not divide).
 * Source: Megatron-Core's interleaved pipeline; explicit counts are ours. */
XD_PRIVATE xd_result xdi_pipeline_place(xd_ctx *ctx, const xd_pipeline_desc *desc, int rank,
                                        int virtual_stage, xd_stage_place *out);

#endif
