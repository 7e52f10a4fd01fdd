/* Model files from tensors that are distributed over ranks. */

#include "base/extend.h"
#include "comm/internal.h"
#include "io/gather.h"

#include <string.h>

/* The state of one rank during a save; writer and slab exist on root only. */
typedef struct xdi_gather {
    xd_comm *world;
    xd_ctx *ctx;
    const xd_weights_gather_desc *desc;
    bool root;
    size_t staging;
    xd_weights_writer *writer;
    unsigned char *slab;
} xdi_gather;

static const xd_layout_desc *xdi_gather_whole(const xdi_gather *g, int64_t i) {
    return xd_layout_settings(g->desc->tensors[i].tensor.layout);
}

/* Bytes of one index of dimension 0; returns the indices in a slab. Pure, so the same on all ranks. */
static int64_t xdi_gather_rows(const xdi_gather *g, int64_t i, size_t *row_bytes) {
    const xd_layout_desc *whole = xdi_gather_whole(g, i);
    size_t bytes = xd_dtype_size(g->desc->tensors[i].tensor.dtype);
    for (int d = 1; d < whole->ndim; d++) bytes *= (size_t)whole->shape[d];
    *row_bytes = bytes;
    const int64_t rows = bytes > 0 ? (int64_t)(g->staging / bytes) : 1;
    const int64_t extent = whole->ndim > 0 ? whole->shape[0] : 1;
    if (rows < 1) return 1;
    return rows < extent ? rows : extent;
}

static xd_result xdi_gather_create_writer(xdi_gather *g, xd_weights_entry *entries) {
    xd_weights_writer_desc d;
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < g->desc->tensor_count; i++) {
        const xd_layout_desc *whole = xdi_gather_whole(g, i);
        entries[i].name = g->desc->tensors[i].name;
        entries[i].dtype = g->desc->tensors[i].tensor.dtype;
        entries[i].ndim = whole->ndim;
        entries[i].shape = whole->shape;
    }
    d.directory = g->desc->directory;
    d.entries = entries;
    d.entry_count = g->desc->tensor_count;
    d.max_shard_bytes = g->desc->max_shard_bytes;
    d.metadata = g->desc->metadata;
    d.metadata_count = g->desc->metadata_count;
    return xd_weights_writer_create(g->ctx, &d, &g->writer);
}

/* Root: the files, and a slab that is large enough for every tensor. */
static xd_result xdi_gather_prepare(xdi_gather *g) {
    if (!g->root) return XD_OK;
    const size_t count = (size_t)g->desc->tensor_count;
    size_t largest = 0;
    xd_weights_entry *entries = (xd_weights_entry *)xd_allocate(g->ctx, count * sizeof *entries);
    XD_REQUIRE(g->ctx, entries, XD_ERROR_MEMORY, "no room to plan %llu tensors", (unsigned long long)count);
    const xd_result result = xdi_gather_create_writer(g, entries);
    xd_release(g->ctx, entries);
    XD_TRY(result); /* the writer has checked that no size overflows */
    for (int64_t i = 0; i < g->desc->tensor_count; i++) {
        size_t row_bytes;
        const size_t bytes = (size_t)xdi_gather_rows(g, i, &row_bytes) * row_bytes;
        if (bytes > largest) largest = bytes;
    }
    g->slab = (unsigned char *)xd_allocate(g->ctx, largest);
    XD_REQUIRE(g->ctx, g->slab, XD_ERROR_MEMORY, "no room for a slab of %llu bytes",
               (unsigned long long)largest);
    return XD_OK;
}

/* One tensor. A root that cannot write continues to gather until the ranks agree, so that none waits for it. */
static xd_result xdi_gather_tensor(xdi_gather *g, int64_t i) {
    const xd_layout_desc *whole = xdi_gather_whole(g, i);
    const int64_t extent = whole->ndim > 0 ? whole->shape[0] : 1;
    size_t row_bytes;
    const int64_t rows = xdi_gather_rows(g, i, &row_bytes);
    xd_interval window[XD_DIMS_MAX];
    xd_result mine = XD_OK;
    memset(window, 0, sizeof window);
    for (int d = 1; d < whole->ndim; d++) window[d].end = whole->shape[d];
    for (int64_t row = 0; row < extent && row_bytes > 0; row += rows) {
        const int64_t count = rows < extent - row ? rows : extent - row;
        window[0].begin = row;
        window[0].end = row + count;
        XD_TRY(xd_tensor_gather(g->world, &g->desc->tensors[i].tensor, whole->ndim ? window : NULL,
                                g->desc->root, g->slab));
        if (g->root && mine == XD_OK)
            mine = xd_weights_writer_write(g->writer, i, (uint64_t)row * row_bytes, (size_t)count * row_bytes,
                                           g->slab);
    }
    return xd_agree(g->world, mine);
}

static xd_result xdi_gather_run(xdi_gather *g) {
    XD_TRY(xd_agree(g->world, xdi_gather_prepare(g)));
    for (int64_t i = 0; i < g->desc->tensor_count; i++) XD_TRY(xdi_gather_tensor(g, i));
    xd_weights_writer *writer = g->writer;
    g->writer = NULL;
    return xd_agree(g->world, g->root ? xd_weights_writer_commit(writer) : XD_OK);
}

/* What decides how many slabs each rank takes part in. */
static xd_result xdi_gather_agree_settings(const xdi_gather *g) {
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "root", g->desc->root);
    xdi_fact_integer(&facts, "tensor_count", g->desc->tensor_count);
    xdi_fact_integer(&facts, "staging_bytes", (int64_t)g->staging);
    return xdi_agree_facts(g->world, &facts, "settings of a gather");
}

/* What one rank can find wrong with its settings. */
static xd_result xdi_gather_check(const xdi_gather *g) {
    const xd_weights_gather_desc *desc = g->desc;
    const int ranks = xd_comm_size(g->world);
    XD_REQUIRE(g->ctx, desc->root >= 0 && desc->root < ranks && desc->tensor_count >= 0, XD_ERROR_ARGUMENT,
               "root %d of %d ranks, %lld tensors", desc->root, ranks, (long long)desc->tensor_count);
    XDI_GIVEN_LIST(g->ctx, desc->tensors, desc->tensor_count);
    for (int64_t i = 0; i < desc->tensor_count; i++)
        XD_REQUIRE(g->ctx, desc->tensors[i].tensor.layout, XD_ERROR_ARGUMENT, "tensors[%lld] has no layout",
                   (long long)i);
    return XD_OK;
}

XD_API xd_result xd_weights_gather(xd_comm *world, const xd_weights_gather_desc *desc) {
    XDI_GIVEN_COMM(world, desc);
    xdi_gather g;
    memset(&g, 0, sizeof g);
    g.world = world;
    g.ctx = xd_comm_ctx(world);
    g.desc = desc;
    g.root = xd_comm_rank(world) == desc->root;
    g.staging = desc->staging_bytes ? desc->staging_bytes : (size_t)16 << 20;
    XD_TRY(xd_agree(world, xdi_gather_check(&g)));
    XD_TRY(xdi_gather_agree_settings(&g));
    const xd_result result = xdi_gather_run(&g);
    xd_weights_writer_abort(g.writer);
    xd_release(g.ctx, g.slab);
    return result;
}
