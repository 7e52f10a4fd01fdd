/* Whether all ranks describe the same model. */

#include "comm/internal.h"
#include "comm/mesh.h"
#include "model/describe_internal.h"

#include <stdio.h>
#include <string.h>

static uint64_t xdi_hash_int(uint64_t hash, int64_t value) {
    return xd_hash(hash, &value, sizeof value);
}

static uint64_t xdi_traits_hash(uint64_t hash, const xd_weight_traits *t) {
    const bool flags[] = { t->frozen,
                           t->expert,
                           t->tensor_parallel,
                           t->expert_tensor_parallel,
                           t->sequence_parallel,
                           t->averaged_over_tensor_parallel,
                           t->pipeline_parallel,
                           t->shared,
                           t->shared_embedding,
                           t->keep_f32 };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) hash = xdi_hash_int(hash, flags[i]);
    hash = xdi_hash_int(hash, t->partition_dim);
    hash = xdi_hash_int(hash, t->partition_stride);
    return xdi_hash_int(hash, (int64_t)t->decay);
}

static uint64_t xdi_block_hash(uint64_t hash, const xd_block *block) {
    const xd_block_desc *d = &block->desc;
    hash = xd_hash(hash, block->name, strlen(block->name) + 1);
    if (d->type) hash = xd_hash(hash, d->type, strlen(d->type) + 1);
    return xdi_hash_int(hash, (int64_t)d->unit + 4 * d->recompute + 8 * d->spectral_norm);
}

/* Of what all ranks know of a weight: the numbers one by one, since structs have padding. */
static uint64_t xdi_weight_hash(const xd_weight *weight) {
    const xd_weight_desc *d = &weight->desc;
    uint64_t hash = xd_hash(0, weight->name, strlen(weight->name) + 1);
    hash = xd_hash(hash, weight->owner->name, strlen(weight->owner->name) + 1);
    hash = xdi_hash_int(hash, (int64_t)d->dtype);
    hash = xdi_hash_int(hash, d->ndim);
    for (int i = 0; i < d->ndim; i++) hash = xdi_hash_int(hash, d->shape[i]);
    hash = xdi_hash_int(hash, d->stored_rows);
    hash = xdi_hash_int(hash, d->buffer + 2 * d->transient);
    hash = xdi_hash_int(hash, d->group);
    hash = xdi_hash_int(hash, (int64_t)d->gradient_dtype);
    hash = xdi_hash_int(hash, (int64_t)d->init.kind);
    hash = xd_hash(hash, &d->init.center, sizeof d->init.center);
    hash = xd_hash(hash, &d->init.scale, sizeof d->init.scale);
    hash = xdi_block_hash(hash, weight->block);
    return xdi_traits_hash(hash, &d->traits);
}

/* What ranks compare: all weights, or those that are no expert's, which only the ranks of the same experts have alike. */
typedef struct xdi_model_part {
    const xd_model *model;
    bool shared; /* the latter */
    int64_t count;
} xdi_model_part;

static bool xdi_model_part_has(const xdi_model_part *part, int64_t index) {
    return !part->shared || !part->model->weights[index]->owner->desc.traits.expert;
}

static xdi_model_part xdi_model_part_of(const xd_model *model, bool shared) {
    xdi_model_part part;
    part.model = model;
    part.shared = shared;
    part.count = 0;
    for (int64_t i = 0; i < xdi_model_weight_count(model); i++) part.count += xdi_model_part_has(&part, i);
    return part;
}

/* Number i of these; NULL past the last. */
static const xd_weight *xdi_model_part_at(const xdi_model_part *part, int64_t i) {
    for (int64_t w = 0; w < part->model->weight_count && i < part->count; w++)
        if (xdi_model_part_has(part, w) && i-- == 0) return part->model->weights[w];
    return NULL;
}

static uint64_t xdi_model_part_hash(const xdi_model_part *part) {
    const xd_model *model = part->model;
    uint64_t hash = xd_hash(0, &model->desc.seed, sizeof model->desc.seed);
    if (!model->sealed) return 0;
    for (int64_t i = 0; i < model->weight_count; i++) {
        if (!xdi_model_part_has(part, i)) continue;
        const uint64_t weight = xdi_weight_hash(model->weights[i]);
        hash = xd_hash(hash, &weight, sizeof weight);
    }
    return hash;
}

XD_PRIVATE uint64_t xdi_model_hash(const xd_model *model) {
    const xdi_model_part all = xdi_model_part_of(model, false);
    return xdi_model_part_hash(&all);
}

/* Entry i of what is compared one by one: the hashes of the weights, 0 past the last, and at `total` the seed. */
static int64_t xdi_model_entry(const xdi_model_part *part, int64_t i, int64_t total) {
    const xd_weight *weight = xdi_model_part_at(part, i);
    const uint64_t hash = weight ? xdi_weight_hash(weight) : 0;
    int64_t entry;
    memcpy(&entry, i < total ? &hash : &part->model->desc.seed, sizeof entry);
    return entry;
}

/* The first entry, of total + 1, in which some rank differs from rank 0, and the lowest such rank. Collective. */
static xd_result xdi_model_locate(const xdi_model_part *part, xd_comm *comm, int64_t *entries, int64_t total,
                                  int64_t *index, int *rank) {
    const int size = xd_comm_size(comm);
    int64_t same = 0;
    for (int64_t i = 0; i <= total; i++) entries[i] = xdi_model_entry(part, i, total);
    XD_TRY(xd_broadcast(comm, entries, total + 1, XD_DTYPE_I64, 0));
    while (same <= total && xdi_model_entry(part, same, total) == entries[same]) same++;
    int64_t found = same * size + xd_comm_rank(comm);
    XD_TRY(xd_all_reduce(comm, &found, &found, 1, XD_DTYPE_I64, XD_MIN));
    *index = found / size;
    *rank = (int)(found % size);
    return XD_OK;
}

enum { XDI_MODEL_SHOWN = 80 /* bytes of a name in a message */ };

/* What a rank has at an index: its name, type and shape. */
typedef struct xdi_model_shown {
    char name[XDI_MODEL_SHOWN], what[XDI_MODEL_SHOWN];
} xdi_model_shown;

static void xdi_weight_print(const xd_weight_desc *d, char *text, size_t size) {
    int used = snprintf(text, size, "%s%s [", d->traits.frozen ? "frozen " : "", xd_dtype_name(d->dtype));
    for (int i = 0; i < d->ndim && used >= 0 && (size_t)used < size; i++)
        used += snprintf(text + used, size - (size_t)used, "%s%lld", i ? ", " : "", (long long)d->shape[i]);
    if (used >= 0 && (size_t)used < size) snprintf(text + used, size - (size_t)used, "]");
}

/* Collective. */
static xd_result xdi_model_show(const xdi_model_part *part, xd_comm *comm, int64_t index, int rank,
                                xdi_model_shown *out) {
    const xd_weight *weight = xdi_model_part_at(part, index);
    memset(out, 0, sizeof *out);
    if (xd_comm_rank(comm) == rank) {
        snprintf(out->name, sizeof out->name, "%s", weight ? weight->name : "nothing");
        if (weight) xdi_weight_print(&weight->desc, out->what, sizeof out->what);
    }
    return xd_broadcast(comm, out, (int64_t)sizeof *out, XD_DTYPE_U8, rank);
}

static xd_result xdi_model_report(const xdi_model_part *part, xd_comm *comm, int64_t *hashes, int64_t total) {
    xdi_model_shown first, other;
    int64_t index = 0;
    int rank = 0;
    XD_TRY(xdi_model_locate(part, comm, hashes, total, &index, &rank));
    XD_TRY(xdi_model_show(part, comm, index, 0, &first));
    XD_TRY(xdi_model_show(part, comm, index, rank, &other));
    const int root = xd_comm_world_rank(comm, 0), culprit = xd_comm_world_rank(comm, rank);
    if (index == total)
        return XD_FAIL_CULPRIT(xd_comm_ctx(comm), XD_ERROR_MISMATCH, culprit,
                               "the models have the same weights, but rank %d another seed than rank %d",
                               culprit, root);
    const bool same = strcmp(first.name, other.name) == 0;
    return XD_FAIL_CULPRIT(
        xd_comm_ctx(comm), XD_ERROR_MISMATCH, culprit,
        "the models differ first at weight %lld: \"%s\" on rank %d, \"%s\" on rank %d%s%s%s%s",
        (long long)index, first.name, root, other.name, culprit,
        same ? " with another shape, type, tie, init or trait: " : "", same ? first.what : "",
        same ? " against " : "", same ? other.what : "");
}

static xd_result xdi_model_part_agree(const xdi_model_part *part, xd_comm *comm) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const uint64_t hash = xdi_model_part_hash(part);
    int64_t sent[3], max[3];
    XD_TRY(xd_agree(
        comm, part->model->sealed
                  ? XD_OK
                  : XD_FAIL(ctx, XD_ERROR_STATE, "the model is not sealed: xd_model_seal comes first")));
    memcpy(&sent[0], &hash, sizeof hash);
    sent[1] = ~sent[0]; /* its maximum is the complement of the minimum of the hashes */
    sent[2] = part->count;
    XD_TRY(xd_all_reduce(comm, sent, max, 3, XD_DTYPE_I64, XD_MAX));
    if (max[0] == ~max[1]) return XD_OK;
    int64_t *hashes = (int64_t *)xd_allocate(ctx, ((size_t)max[2] + 1) * sizeof *hashes);
    xd_result result = xd_agree(
        comm, hashes ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld hashes", (long long)max[2]));
    if (result == XD_OK) result = xdi_model_report(part, comm, hashes, max[2]);
    xd_release(ctx, hashes);
    return result;
}

XD_PRIVATE xd_result xdi_model_agree(const xd_model *model, xd_comm *comm) {
    XDI_GIVEN_TO_ALL(model ? model->ctx : NULL, comm, model, comm);
    const xdi_model_part all = xdi_model_part_of(model, false);
    return xdi_model_part_agree(&all, comm);
}

XD_PRIVATE xd_result xdi_model_agree_shared(const xd_model *model, xd_comm *comm) {
    const xdi_model_part part = xdi_model_part_of(model, true);
    return xdi_model_part_agree(&part, comm);
}
