/* Equal values on all data ranks: broadcast, or compared. */

#include "comm/internal.h"
#include "kernel/kernels.h"
#include "model/build_internal.h"

#include <string.h>

/* Weights that one group shares: those of experts, or all others. */
typedef struct xdi_shared_values {
    xd_ctx *ctx;
    xd_comm *comm;
    const xd_stages *list;
    bool experts, buffers;
} xdi_shared_values;

/* The first weight of a stage from `index` on that the group shares and that holds values; NULL after the last. */
static xd_weight *xdi_values_from(const xdi_shared_values *v, int stage, int64_t index) {
    const xd_model *model = v->list->stages[stage].model;
    for (int64_t i = index; i < model->weight_count; i++) {
        xd_weight *w = model->weights[i];
        if (w->owner == w && w->ready && w->value && w->count > 0 && w->desc.traits.expert == v->experts &&
            (v->buffers || !w->desc.buffer))
            return w;
    }
    return NULL;
}

/* How many there are, and which. */
static int64_t xdi_values_count(const xdi_shared_values *v, uint64_t *hash) {
    int64_t n = 0;
    *hash = 0;
    for (int s = 0; s < v->list->count; s++)
        for (xd_weight *w = xdi_values_from(v, s, 0); w; w = xdi_values_from(v, s, w->index + 1), n++)
            *hash = xd_hash(*hash, w->name, strlen(w->name) + 1);
    return n;
}

static xd_result xdi_values_broadcast(const xdi_shared_values *v) {
    for (int s = 0; s < v->list->count; s++)
        for (xd_weight *w = xdi_values_from(v, s, 0); w; w = xdi_values_from(v, s, w->index + 1))
            XD_TRY(xd_broadcast(v->comm, w->value, w->count, w->desc.dtype, 0));
    return XD_OK;
}

/* ---- comparing ---- */

/* The hash of a weight's bytes, which come to the host in blocks. */
static xd_result xdi_values_hash(const xd_weight *w, int64_t *out) {
    unsigned char block[4096];
    const size_t bytes = (size_t)w->count * xd_dtype_size(w->desc.dtype);
    uint64_t hash = 0;
    for (size_t at = 0; at < bytes; at += sizeof block) {
        const size_t n = bytes - at < sizeof block ? bytes - at : sizeof block;
        XD_TRY(xd_read(w->model->ctx, block, (const unsigned char *)w->value + at, n));
        hash = xd_hash(hash, block, n);
    }
    memcpy(out, &hash, sizeof hash);
    return XD_OK;
}

static xd_result xdi_values_hash_all(const xdi_shared_values *v, int64_t *hashes) {
    int64_t n = 0;
    for (int s = 0; s < v->list->count; s++)
        for (xd_weight *w = xdi_values_from(v, s, 0); w; w = xdi_values_from(v, s, w->index + 1))
            XD_TRY(xdi_values_hash(w, &hashes[n++]));
    return XD_OK;
}

static const char *xdi_values_name(const xdi_shared_values *v, int64_t index) {
    for (int s = 0; s < v->list->count; s++)
        for (xd_weight *w = xdi_values_from(v, s, 0); w; w = xdi_values_from(v, s, w->index + 1))
            if (index-- == 0) return w->name;
    return "";
}

/* The first of n hashes that some rank has otherwise than rank 0, and the lowest such rank. */
static xd_result xdi_values_compare(const xdi_shared_values *v, const int64_t *mine, int64_t *root,
                                    int64_t n) {
    const int size = xd_comm_size(v->comm), rank = xd_comm_rank(v->comm);
    int64_t same = 0;
    memcpy(root, mine, (size_t)n * sizeof *root);
    XD_TRY(xd_broadcast(v->comm, root, n, XD_DTYPE_I64, 0));
    while (same < n && mine[same] == root[same]) same++;
    int64_t found = same * size + rank;
    XD_TRY(xd_all_reduce(v->comm, &found, &found, 1, XD_DTYPE_I64, XD_MIN));
    if (found / size == n) return XD_OK;
    const int culprit = xd_comm_world_rank(v->comm, (int)(found % size));
    return XD_FAIL_CULPRIT(v->ctx, XD_ERROR_MISMATCH, culprit,
                           "\"%.80s\" holds other values on rank %d than on rank %d",
                           xdi_values_name(v, found / size), culprit, xd_comm_world_rank(v->comm, 0));
}

static xd_result xdi_values_check(const xdi_shared_values *v, int64_t n) {
    int64_t *hashes = (int64_t *)xd_allocate(v->ctx, (size_t)n * 2 * sizeof *hashes);
    xd_result result = hashes ? xdi_values_hash_all(v, hashes)
                              : XD_FAIL(v->ctx, XD_ERROR_MEMORY, "no room for %lld hashes", (long long)n);
    result = xd_agree(v->comm, result);
    if (result == XD_OK) result = xdi_values_compare(v, hashes, hashes + n, n);
    xd_release(v->ctx, hashes);
    return result;
}

/* ---- a build's ---- */

static xd_result xdi_values_of_group(const xdi_builder *b, bool experts) {
    const xd_build_values *settings = &b->desc->values;
    xdi_shared_values v;
    uint64_t which;
    v.ctx = b->ctx;
    v.comm = experts ? b->groups.expert_dp : b->data;
    v.list = b->list;
    v.experts = experts;
    v.buffers = !settings->broadcast || !settings->without_buffers;
    const int64_t n = xdi_values_count(&v, &which);
    if (xdi_group_size(v.comm) == 1 || (!settings->broadcast && !settings->check)) return XD_OK;
    XD_TRY(xdi_agree_list(v.comm, n, which, "the list of weights that hold values"));
    if (n == 0) return XD_OK;
    if (settings->broadcast) return xdi_values_broadcast(&v);
    return xdi_values_check(&v, n);
}

XD_PRIVATE xd_result xdi_builder_equalise(const xdi_builder *b) {
    XD_TRY(xd_agree(b->world, xdi_values_of_group(b, false)));
    return b->experts ? xd_agree(b->world, xdi_values_of_group(b, true)) : XD_OK;
}

XD_PRIVATE xd_result xdi_builder_seeds(const xdi_builder *b) {
    if (!b->desc->values.broadcast || xdi_group_size(b->data) == 1) return XD_OK;
    for (int s = 0; s < b->list->count; s++)
        XD_TRY(xd_broadcast(b->data, &b->list->stages[s].model->desc.seed, 1, XD_DTYPE_U64, 0));
    return XD_OK;
}
