/* The files of a save: a pure function of the list of tensors, so that every rank knows where every byte goes. */

#include "checkpoint/internal.h"

#include <stdio.h>
#include <string.h>

XD_PRIVATE int64_t xdi_block_count(uint64_t bytes, size_t block_bytes) {
    return (int64_t)(bytes / block_bytes + (bytes % block_bytes != 0));
}

static uint64_t xdi_plan_bytes(const xdi_stored *t) {
    return (uint64_t)xdi_stored_numel(t) * xd_dtype_size(t->dtype);
}

/* Tensors from `first` of a group that share a file: as many as fit, at least one where there is one. */
static int64_t xdi_plan_fill(const xdi_content *c, const xdi_group *group, int64_t first, uint64_t limit) {
    const int64_t end = group->first + group->count;
    int64_t at = first;
    for (uint64_t used = 0; at < end; at++) {
        const uint64_t bytes = xdi_plan_bytes(&c->tensors[at]);
        if (at > first && (used > limit || bytes > limit - used)) break;
        used += bytes;
    }
    return at - first;
}

/* Deals the tensors to files; without files it counts them. */
static int64_t xdi_plan_deal(const xdi_content *c, uint64_t limit, xdi_planned_file *files) {
    int64_t count = 0;
    for (int64_t g = 0; g < c->group_count; g++) {
        const xdi_group *group = &c->groups[g];
        int64_t first = group->first, shards = 0;
        do {
            const int64_t n = xdi_plan_fill(c, group, first, limit);
            if (files) {
                files[count].group = g;
                files[count].first = first;
                files[count].count = n;
            }
            first += n;
            count++;
            shards++;
        } while (first < group->first + group->count);
        for (int64_t s = 0; files && s < shards; s++) {
            xdi_planned_file *f = &files[count - shards + s];
            if (shards == 1)
                snprintf(f->name, sizeof f->name, "%s.safetensors", group->name);
            else
                snprintf(f->name, sizeof f->name, "%s-%05lld-of-%05lld.safetensors", group->name,
                         (long long)s + 1, (long long)shards);
        }
    }
    return count;
}

static xd_result xdi_plan_file(xdi_plan *p, xdi_planned_file *f, xd_weights_entry *entries) {
    xd_weights_writer_desc d;
    for (int64_t i = 0; i < f->count; i++) {
        const xdi_stored *t = &p->content->tensors[f->first + i];
        entries[i].name = t->name;
        entries[i].dtype = t->dtype;
        entries[i].ndim = t->step ? 0 : t->part->ndim;
        entries[i].shape = t->part->shape;
    }
    memset(&d, 0, sizeof d);
    d.entries = entries;
    d.entry_count = f->count;
    d.alignment = XDI_BLOCK_LEAST;
    XD_TRY(xd_weights_plan(p->content->ctx, &d, &f->layout));
    f->first_block = p->block_count;
    p->block_count += xdi_block_count(f->layout->file_bytes, p->block_bytes);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_plan_create(const xdi_content *content, uint64_t max_shard_bytes, size_t block_bytes,
                                     xdi_plan *out) {
    const uint64_t limit = max_shard_bytes ? max_shard_bytes : UINT64_C(5000000000);
    xd_ctx *ctx = content->ctx;
    memset(out, 0, sizeof *out);
    out->content = content;
    out->block_bytes = block_bytes;
    out->file_count = xdi_plan_deal(content, limit, NULL);
    out->files = (xdi_planned_file *)xd_allocate(ctx, (size_t)out->file_count * sizeof *out->files);
    xd_weights_entry *entries =
        (xd_weights_entry *)xd_allocate(ctx, (size_t)content->tensor_count * sizeof *entries);
    xd_result result = XD_OK;
    if (!out->files || !entries)
        result =
            XD_FAIL(ctx, XD_ERROR_MEMORY, "no room to plan %lld tensors", (long long)content->tensor_count);
    if (out->files) (void)xdi_plan_deal(content, limit, out->files);
    for (int64_t i = 0; i < out->file_count && result == XD_OK; i++)
        result = xdi_plan_file(out, &out->files[i], entries);
    xd_release(ctx, entries);
    return result;
}

XD_PRIVATE void xdi_plan_destroy(xdi_plan *plan) {
    if (!plan->content) return;
    for (int64_t i = 0; plan->files && i < plan->file_count; i++)
        xd_release(plan->content->ctx, plan->files[i].layout);
    xd_release(plan->content->ctx, plan->files);
    memset(plan, 0, sizeof *plan);
}
