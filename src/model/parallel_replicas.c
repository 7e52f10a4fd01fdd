/* Ranks that should hold the same values: a fingerprint of them is compared now and then, so that a load on one rank alone is
 * found. Values are read, and nothing else. */

#include "base/internal.h"
#include "comm/internal.h"
#include "base/crc.h"
#include "kernel/kernels.h"
#include "model/parallel_internal.h"

#include <string.h>

enum { XDI_REPLICAS_HOST = 256, XDI_REPLICAS_DEVICE = 4096, XDI_REPLICAS_BLOCK = 1 << 14 };

/* Whether the publish after so many others compares. */
static bool xdi_replicas_is_due(const xdi_place *place, int64_t published) {
    const bool host = xd_ctx_kernels(place->parts_ctx)->device == XD_DEVICE_CPU;
    const int64_t usual = host ? XDI_REPLICAS_HOST : XDI_REPLICAS_DEVICE;
    const int64_t steps = place->settings.compare_steps == 0 ? usual : place->settings.compare_steps;
    return steps > 0 && published % steps == 0;
}

/* Ranks that keep the same part of a weight: all data ranks, where none steps a part of it for the others; and the replicas. Buffers
 * may differ: each rank computes its own. */
static bool xdi_replicas_share(const xdi_place *place, const xd_weight *w, bool groups) {
    if (w->owner != w || !xdi_place_has(place, w) || w->desc.buffer) return false;
    return groups || (w->flat->whole && xdi_bucket_plan_settings(w->flat->plan)->ranks == 1);
}

static xd_result xdi_replicas_hash(const xd_weight *w, uint64_t *hash) {
    unsigned char block[XDI_REPLICAS_BLOCK];
    xdi_bucket_piece piece;
    uint32_t crc = 0;
    if (!xdi_flat_piece(w, &piece)) return XD_OK;
    const unsigned char *values = (const unsigned char *)xdi_flat_value(w, &piece);
    const size_t bytes = (size_t)(piece.param.end - piece.param.begin) * xd_dtype_size(w->desc.dtype);
    xd_ctx *parts = w->flat->place->parts_ctx;
    const bool host = xd_ctx_kernels(parts)->device == XD_DEVICE_CPU;
    if (host) crc = xd_crc32c(0, values, bytes);
    for (size_t at = 0; at < bytes && !host; at += sizeof block) {
        const size_t n = bytes - at < sizeof block ? bytes - at : sizeof block;
        XD_TRY(xd_read(parts, block, values + at, n));
        crc = xd_crc32c(crc, block, n);
    }
    *hash = xd_hash(*hash, &crc, sizeof crc);
    return XD_OK;
}

/* Whether all ranks have a hash. */
static xd_result xdi_replicas_same(xd_comm *comm, uint64_t hash, bool *same) {
    int64_t pair[] = { (int64_t)hash, ~(int64_t)hash }; /* the second is the minimum, upside down */
    XD_TRY(xd_all_reduce(comm, pair, pair, 2, XD_DTYPE_I64, XD_MAX));
    *same = pair[0] == ~pair[1];
    return XD_OK;
}

static xd_result xdi_replicas_report(const xdi_place *place, xd_comm *comm, const xd_weight *w,
                                     uint64_t hash) {
    uint64_t first = hash;
    XD_TRY(xd_broadcast(comm, &first, 1, XD_DTYPE_U64, 0));
    int other = first == hash ? xd_comm_size(comm) : xd_comm_rank(comm);
    XD_TRY(xd_all_reduce(comm, &other, &other, 1, XD_DTYPE_I32, XD_MIN));
    const int culprit = xd_comm_world_rank(comm, other);
    return XD_FAIL_CULPRIT(
        place->ctx, XD_ERROR_MISMATCH, culprit,
        "xd_parallel_publish: weight \"%.80s\" has other values on rank %d than on rank %d, "
        "which should be the same: load, or write, on all of them and publish again",
        w->name, culprit, xd_comm_world_rank(comm, 0));
}

/* Whether a group holds something alike. */
static bool xdi_replicas_has(const xdi_place *place, const xd_comm *comm, bool groups) {
    bool has = false;
    for (int64_t i = 0; i < place->model->weight_count && comm && xd_comm_size(comm) > 1; i++)
        has = has || xdi_replicas_share(place, place->model->weights[i], groups);
    return has;
}

/* All weights at once, and one after another where they differ. */
static xd_result xdi_replicas_compare(const xdi_place *place, xd_comm *comm, bool groups) {
    uint64_t all = 0;
    bool same = true;
    if (!xdi_replicas_has(place, comm, groups)) return XD_OK;
    for (int64_t i = 0; i < place->model->weight_count; i++)
        if (xdi_replicas_share(place, place->model->weights[i], groups))
            XD_TRY(xdi_replicas_hash(place->model->weights[i], &all));
    XD_TRY(xdi_replicas_same(comm, all, &same));
    for (int64_t i = 0; i < place->model->weight_count && !same; i++) {
        const xd_weight *w = place->model->weights[i];
        uint64_t hash = 0;
        bool here = true;
        if (!xdi_replicas_share(place, w, groups)) continue;
        XD_TRY(xdi_replicas_hash(w, &hash));
        XD_TRY(xdi_replicas_same(comm, hash, &here));
        if (!here) return xdi_replicas_report(place, comm, w, hash);
    }
    return XD_OK;
}

static bool xdi_replicas_has_any(const xd_parallel *p) {
    return xdi_replicas_has(&p->place, p->place.data, false) ||
           xdi_replicas_has(&p->place, p->place.replicas, true) ||
           (p->experts && xdi_replicas_has_any(p->experts));
}

static xd_result xdi_replicas_check_own(const xdi_place *place) {
    XD_TRY(xdi_replicas_compare(place, place->data, false));
    return xdi_replicas_compare(place, place->replicas, true);
}

/* A graph compares nothing and may be launched any number of times: the next call outside of it compares. */
XD_PRIVATE xd_result xdi_replicas_check(xd_parallel *p) {
    xd_result result = XD_OK;
    if (xdi_comm_is_recording(p->place.data)) {
        p->step.recorded = true;
        return XD_OK;
    }
    const bool due = p->place.settings.compare_steps >= 0 && p->step.recorded;
    if ((due || xdi_replicas_is_due(&p->place, p->step.published)) && xdi_replicas_has_any(p)) {
        if (p->experts) result = xdi_replicas_check_own(&p->experts->place);
        if (result == XD_OK) result = xdi_replicas_check_own(&p->place);
        result = xd_agree(p->place.data, result); /* parts of some ranks alone may differ */
    }
    p->step.published += result == XD_OK;
    return result;
}
