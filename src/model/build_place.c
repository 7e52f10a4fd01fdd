/* Where the stages of a pipeline are. */

#include "model/build_internal.h"

XD_PRIVATE int xdi_group_rank(const xd_comm *comm) {
    return comm ? xd_comm_rank(comm) : 0;
}

XD_PRIVATE int xdi_group_size(const xd_comm *comm) {
    return comm ? xd_comm_size(comm) : 1;
}

/* ---- places ---- */

XD_PRIVATE int xdi_pipeline_stages(int ranks, int virtual_stages) {
    return ranks > 1 && virtual_stages > 0 ? virtual_stages : 1;
}

static xd_result xdi_pipeline_check_sizes(xd_ctx *ctx, const xd_pipeline_desc *d) {
    XD_REQUIRE(ctx, d->ranks >= 0 && d->virtual_stages >= 0 && d->layer_count >= 0, XD_ERROR_ARGUMENT,
               "a pipeline of %d ranks, %d virtual stages and %lld layers: none may be negative", d->ranks,
               d->virtual_stages, (long long)d->layer_count);
    XD_REQUIRE(ctx, d->virtual_stages <= XD_STAGES_MAX, XD_ERROR_ARGUMENT,
               "%d virtual stages, at most %d are possible", d->virtual_stages, (int)XD_STAGES_MAX);
    return XD_OK;
}

/* Explicit counts must be those of all layers. */
static xd_result xdi_pipeline_check_chunks(xd_ctx *ctx, const xd_pipeline_desc *d, int64_t chunks) {
    int64_t left = d->layer_count;
    for (int64_t i = 0; i < chunks; i++) {
        XD_REQUIRE(ctx, d->chunk_layers[i] >= 0, XD_ERROR_ARGUMENT, "chunk %lld of %lld has %lld layers",
                   (long long)i, (long long)chunks, (long long)d->chunk_layers[i]);
        XD_REQUIRE(ctx, d->chunk_layers[i] <= left, XD_ERROR_ARGUMENT,
                   "the first %lld chunks have more than all %lld layers", (long long)i + 1,
                   (long long)d->layer_count);
        left -= d->chunk_layers[i];
    }
    XD_REQUIRE(ctx, left == 0, XD_ERROR_ARGUMENT, "the layers of %lld chunks add up to %lld, not to %lld",
               (long long)chunks, (long long)(d->layer_count - left), (long long)d->layer_count);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_pipeline_place(xd_ctx *ctx, const xd_pipeline_desc *desc, int rank,
                                        int virtual_stage, xd_stage_place *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XD_TRY(xdi_pipeline_check_sizes(ctx, desc));
    const int ranks = desc->ranks ? desc->ranks : 1;
    const int stages = xdi_pipeline_stages(ranks, desc->virtual_stages);
    const int64_t chunks = (int64_t)ranks * stages, chunk = (int64_t)virtual_stage * ranks + rank;
    const int64_t given = (int64_t)ranks * (desc->virtual_stages ? desc->virtual_stages : 1);
    XD_REQUIRE(ctx, rank >= 0 && rank < ranks && virtual_stage >= 0 && virtual_stage < stages,
               XD_ERROR_ARGUMENT, "rank %d of %d and virtual stage %d of %d", rank, ranks, virtual_stage,
               stages);
    XD_REQUIRE(ctx, desc->chunk_layers || desc->layer_count % chunks == 0, XD_ERROR_TOPOLOGY,
               "%lld layers do not divide into %d ranks x %d virtual stages", (long long)desc->layer_count,
               ranks, stages);
    if (desc->chunk_layers) XD_TRY(xdi_pipeline_check_chunks(ctx, desc, given));
    out->pipeline_rank = rank;
    out->pipeline_ranks = ranks;
    out->virtual_stage = virtual_stage;
    out->virtual_stages = stages;
    out->first = chunk == 0;
    out->last = chunk == chunks - 1;
    out->layer_count =
        desc->chunk_layers && given == chunks ? desc->chunk_layers[chunk] : desc->layer_count / chunks;
    out->first_layer = desc->chunk_layers ? 0 : chunk * out->layer_count;
    for (int64_t i = 0; i < chunk && desc->chunk_layers; i++) out->first_layer += desc->chunk_layers[i];
    return XD_OK;
}
