/* What a save or a load is about: all tensors of all networks, optimizers and averages, in one list. */

#include "base/json.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "comm/topology.h"
#include "tensor/internal.h"
#include "train/internal.h"

#include <stdio.h>
#include <string.h>

/* ---- checks ---- */

static xd_result xdi_content_check_parts(xd_ctx *ctx, const xd_checkpoint_network *n) {
    XD_REQUIRE(ctx, n->part_count >= 0 && (n->parts || n->part_count == 0), XD_ERROR_ARGUMENT,
               "%lld parts at %p", (long long)n->part_count, (const void *)n->parts);
    for (int64_t i = 0; i < n->part_count; i++) {
        const xd_tensor_part *p = &n->parts[i];
        xd_weights_entry entry;
        uint64_t bytes;
        entry.name = p->name;
        entry.dtype = p->dtype;
        entry.ndim = p->ndim;
        entry.shape = p->shape;
        XD_REQUIRE(ctx, p->ndim >= 0 && p->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
                   "tensor %lld has %d dimensions, allowed are %d", (long long)i, p->ndim, (int)XD_DIMS_MAX);
        XD_TRY(xdi_safetensors_check_entry(ctx, &entry, i, &bytes));
        XD_TRY(xdi_part_check_region(ctx, p));
    }
    return XD_OK;
}

/* A list of parameters is that of the parts. Rows of padding are behind a part that ends its region. */
static xd_result xdi_content_check_param(xd_ctx *ctx, const char *what, const xd_tensor_part *part,
                                         const xd_param *param) {
    const int64_t count = part->range.end - part->range.begin;
    XD_REQUIRE(ctx, xdi_part_fits(part, param->count), XD_ERROR_SHAPE,
               "tensor \"%.80s\" has %lld elements here, the %s has %lld", part->name, (long long)count, what,
               (long long)param->count);
    XD_REQUIRE(ctx, param->dtype == part->dtype, XD_ERROR_DTYPE, "tensor \"%.80s\" is %s, the %s has %s",
               part->name, xd_dtype_name(part->dtype), what, xd_dtype_name(param->dtype));
    return XD_OK;
}

static xd_param xdi_content_updated(const void *desc, int64_t i) {
    return ((const xd_optimizer_desc *)desc)->params[i];
}

static xd_param xdi_content_averaged(const void *ema, int64_t i) {
    return xdi_ema_entry((const xd_ema *)ema, i);
}

/* The list has the order of the parts: the first name that is not the part's own is no other part's either. Names that are no
 * part's are the caller's. */
static xd_result xdi_content_check_order(xd_ctx *ctx, const char *what, const xd_checkpoint_network *n,
                                         xd_param (*entry)(const void *list, int64_t i), const void *list) {
    for (int64_t i = 0; i < n->part_count; i++) {
        const char *name = entry(list, i).name;
        if (!name || strcmp(name, n->parts[i].name) == 0) continue;
        for (int64_t k = 0; k < n->part_count; k++)
            XD_REQUIRE(ctx, strcmp(name, n->parts[k].name) != 0, XD_ERROR_ARGUMENT,
                       "tensor %lld of the %s is \"%.80s\", that of the network is \"%.80s\"", (long long)i,
                       what, name, n->parts[i].name);
        return XD_OK;
    }
    return XD_OK;
}

static xd_result xdi_content_check_optimizer(xd_ctx *ctx, const xd_checkpoint_network *n) {
    if (!n->optimizer) return XD_OK;
    const xd_optimizer_desc *d = xd_optimizer_settings(n->optimizer);
    XD_REQUIRE(ctx, d->param_count == n->part_count, XD_ERROR_ARGUMENT,
               "the optimizer has %lld parameters, the network %lld parts", (long long)d->param_count,
               (long long)n->part_count);
    for (int64_t i = 0; i < n->part_count; i++)
        XD_TRY(xdi_content_check_param(ctx, "optimizer", &n->parts[i], &d->params[i]));
    return xdi_content_check_order(ctx, "optimizer", n, xdi_content_updated, d);
}

static xd_result xdi_content_check_averages(xd_ctx *ctx, const xd_checkpoint_network *n) {
    XD_REQUIRE(ctx, n->average_count >= 0 && (n->averages || n->average_count == 0), XD_ERROR_ARGUMENT,
               "%d averages at %p", n->average_count, (const void *)n->averages);
    for (int k = 0; k < n->average_count; k++) {
        const xd_checkpoint_average *a = &n->averages[k];
        XD_REQUIRE(ctx, a->name && xdi_topology_name_is_valid(a->name), XD_ERROR_ARGUMENT,
                   "average %d: \"%.40s\" is no name (letters, digits and '_', at most %d)", k,
                   a->name ? a->name : "", XD_AXIS_NAME_MAX - 1);
        for (int i = 0; i < k; i++)
            XD_REQUIRE(ctx, strcmp(a->name, n->averages[i].name) != 0, XD_ERROR_ARGUMENT,
                       "averages %d and %d are both named \"%s\"", i, k, a->name);
        XD_REQUIRE(ctx, a->ema, XD_ERROR_ARGUMENT, "average %d, \"%s\", is NULL", k, a->name);
        XD_REQUIRE(ctx, xdi_ema_entries(a->ema) == n->part_count, XD_ERROR_ARGUMENT,
                   "average \"%s\" has %lld parameters, the network %lld parts", a->name,
                   (long long)xdi_ema_entries(a->ema), (long long)n->part_count);
        XD_TRY(xdi_ema_in_place(a->ema));
        for (int64_t i = 0; i < n->part_count; i++) {
            xd_param shadow = xdi_ema_entry(a->ema, i);
            shadow.dtype = n->parts[i].dtype; /* shadows have types of their own */
            XD_TRY(xdi_content_check_param(ctx, "average", &n->parts[i], &shadow));
        }
        XD_TRY(xdi_content_check_order(ctx, "average", n, xdi_content_averaged, a->ema));
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_content_check(xd_ctx *ctx, const xd_checkpoint_network *networks, int count) {
    XD_REQUIRE(ctx, count >= 0 && (networks || count == 0), XD_ERROR_ARGUMENT, "%d networks at %p", count,
               (const void *)networks);
    for (int i = 0; i < count; i++) {
        const char *name = networks[i].name;
        XD_REQUIRE(ctx, !name || xdi_topology_name_is_valid(name), XD_ERROR_ARGUMENT,
                   "network %d: \"%.40s\" is no name (letters, digits and '_', at most %d)", i, name,
                   XD_AXIS_NAME_MAX - 1);
        for (int k = 0; k < i; k++)
            XD_REQUIRE(ctx, strcmp(name ? name : "", networks[k].name ? networks[k].name : "") != 0,
                       XD_ERROR_ARGUMENT, "networks %d and %d are both named \"%s\"", k, i, name ? name : "");
        XD_TRY(xdi_content_check_parts(ctx, &networks[i]));
        XD_TRY(xdi_content_check_optimizer(ctx, &networks[i]));
        XD_TRY(xdi_content_check_averages(ctx, &networks[i]));
    }
    return XD_OK;
}

/* ---- the list: each function runs twice, to count and to fill in ---- */

static void xdi_content_add_group(xdi_content *c, const char *kind, const char *network,
                                  const char *average) {
    const bool dash = network != NULL;
    if (c->filling) {
        xdi_group *g = &c->groups[c->group_count];
        snprintf(g->name, sizeof g->name, "%s%s%s%s%s", kind, dash ? "-" : "", dash ? network : "",
                 average ? "-" : "", average ? average : "");
        g->first = c->tensor_count;
        g->count = 0;
    }
    c->group_count++;
}

/* A tensor of the current group whose name is that of the part after a prefix. */
static xdi_stored *xdi_content_add(xdi_content *c, const char *prefix, const xd_tensor_part *part,
                                   xd_dtype dtype, void *data) {
    const size_t bytes = prefix ? strlen(prefix) + strlen(part->name) + 1 : 0;
    char *text = c->filling ? c->text + c->text_bytes : NULL; /* there is none while sizes are counted */
    c->text_bytes += bytes;
    c->tensor_count++;
    if (!c->filling) return NULL;
    xdi_stored *t = &c->tensors[c->tensor_count - 1];
    if (prefix) snprintf(text, bytes, "%s%s", prefix, part->name);
    t->name = prefix ? text : part->name;
    t->part = part;
    t->dtype = dtype;
    t->data = data;
    t->group = c->group_count - 1;
    c->groups[t->group].count++;
    return t;
}

static void xdi_content_add_state(xdi_content *c, const xd_tensor_part *part,
                                  const xd_optimizer_state *state) {
    if (!state->exp_avg) return; /* frozen, or a buffer */
    (void)xdi_content_add(c, "optim.exp_avg.", part, XD_DTYPE_F32, state->exp_avg);
    if (state->exp_avg_sq)
        (void)xdi_content_add(c, "optim.exp_avg_sq.", part, XD_DTYPE_F32, state->exp_avg_sq);
    if (state->master) (void)xdi_content_add(c, "optim.master.", part, XD_DTYPE_F32, state->master);
    xdi_stored *t = xdi_content_add(c, "optim.step.", part, XD_DTYPE_I64, NULL);
    if (t) {
        t->step = &c->steps[c->step_count];
        t->live = state->step;
    }
    c->step_count++;
}

static void xdi_content_add_network(xdi_content *c, const xd_checkpoint_network *n) {
    xdi_content_add_group(c, n->name ? "extra" : "model", n->name, NULL);
    for (int64_t i = 0; i < n->part_count; i++)
        (void)xdi_content_add(c, NULL, &n->parts[i], n->parts[i].dtype, n->parts[i].data);
    if (n->optimizer) {
        xdi_content_add_group(c, "optim", n->name, NULL);
        for (int64_t i = 0; i < n->part_count; i++) {
            const xd_optimizer_state state =
                c->thawed ? xdi_optimizer_thawed_at(n->optimizer, i) : xd_optimizer_state_at(n->optimizer, i);
            xdi_content_add_state(c, &n->parts[i], &state);
        }
    }
    for (int k = 0; k < n->average_count; k++) {
        xdi_content_add_group(c, "ema", n->name, n->averages[k].name);
        for (int64_t i = 0; i < n->part_count; i++) {
            const xd_param shadow = xdi_ema_entry(n->averages[k].ema, i);
            const xd_param lacked = xdi_ema_entry_compensation(n->averages[k].ema, i);
            (void)xdi_content_add(c, NULL, &n->parts[i], shadow.dtype, shadow.value);
            if (lacked.dtype != XD_DTYPE_NONE)
                (void)xdi_content_add(c, "ema.compensation.", &n->parts[i], lacked.dtype, lacked.value);
        }
    }
}

static void xdi_content_list(xdi_content *c, bool filling) {
    c->filling = filling;
    c->group_count = c->tensor_count = c->step_count = 0;
    c->text_bytes = 0;
    for (int i = 0; i < c->network_count; i++) xdi_content_add_network(c, &c->networks[i]);
}

static int xdi_content_by_name(const void *a, const void *b) {
    return strcmp(((const xdi_stored *)a)->name, ((const xdi_stored *)b)->name);
}

/* Names within a group differ when those of its parts do. */
static xd_result xdi_content_check_repeats(const xdi_content *c) {
    const void **order = (const void **)xd_allocate(c->ctx, (size_t)c->tensor_count * sizeof *order);
    xd_result result = XD_OK;
    XD_REQUIRE(c->ctx, order, XD_ERROR_MEMORY, "no room to sort %lld tensors", (long long)c->tensor_count);
    for (int64_t g = 0; g < c->group_count && result == XD_OK; g++) {
        const xdi_group *group = &c->groups[g];
        for (int64_t i = 0; i < group->count; i++) order[i] = &c->tensors[group->first + i];
        xdi_sort(order, (size_t)group->count, xdi_content_by_name);
        for (int64_t i = 1; i < group->count && result == XD_OK; i++)
            if (xdi_content_by_name(order[i - 1], order[i]) == 0)
                result = XD_FAIL(c->ctx, XD_ERROR_ARGUMENT, "two tensors of %s are named \"%.80s\"",
                                 group->name, ((const xdi_stored *)order[i])->name);
    }
    xd_release(c->ctx, order);
    return result;
}

static xd_result xdi_content_make(xd_ctx *ctx, const xd_checkpoint_network *networks, int count, bool thawed,
                                  xdi_content *out) {
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    out->thawed = thawed;
    out->on_host = xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU;
    XD_TRY(xdi_content_check(ctx, networks, count));
    out->networks = networks;
    out->network_count = count;
    xdi_content_list(out, false);
    const size_t groups = (size_t)out->group_count * sizeof *out->groups;
    const size_t tensors = (size_t)out->tensor_count * sizeof *out->tensors;
    const size_t steps = (size_t)out->step_count * sizeof *out->steps;
    char *memory = (char *)xd_allocate(ctx, tensors + steps + groups + out->text_bytes);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a list of %lld tensors",
               (long long)out->tensor_count);
    out->memory = memory;
    out->tensors = (xdi_stored *)(void *)memory;
    out->steps = (int64_t *)(void *)(memory + tensors);
    out->groups = (xdi_group *)(void *)(memory + tensors + steps);
    out->text = memory + tensors + steps + groups;
    xdi_content_list(out, true);
    return xdi_content_check_repeats(out);
}

XD_PRIVATE xd_result xdi_content_create(xd_ctx *ctx, const xd_checkpoint_network *networks, int count,
                                        xdi_content *out) {
    return xdi_content_make(ctx, networks, count, false, out);
}

XD_PRIVATE xd_result xdi_content_create_thawed(xd_ctx *ctx, const xd_checkpoint_network *networks, int count,
                                               xdi_content *out) {
    return xdi_content_make(ctx, networks, count, true, out);
}

XD_PRIVATE void xdi_content_destroy(xdi_content *content) {
    if (content->ctx) xd_release(content->ctx, content->memory);
    memset(content, 0, sizeof *content);
}

/* ---- what ranks have in common ---- */

static uint64_t xdi_stored_hash(const xdi_content *c, int64_t index) {
    if (index >= c->tensor_count) return 0;
    const xdi_stored *t = &c->tensors[index];
    const char *group = c->groups[t->group].name;
    const int64_t numbers[2] = { (int64_t)t->dtype, t->part->ndim };
    uint64_t hash = xd_hash(0, t->name, strlen(t->name) + 1);
    hash = xd_hash(hash, group, strlen(group) + 1);
    hash = xd_hash(hash, numbers, sizeof numbers);
    return xd_hash(hash, t->part->shape, (size_t)t->part->ndim * sizeof *t->part->shape);
}

/* Groups without tensors are in the hash too. */
static uint64_t xdi_content_hash(const xdi_content *c) {
    uint64_t hash = xd_hash(0, &c->tensor_count, sizeof c->tensor_count);
    for (int64_t i = 0; i < c->tensor_count; i++) {
        const uint64_t one = xdi_stored_hash(c, i);
        hash = xd_hash(hash, &one, sizeof one);
    }
    for (int64_t i = 0; i < c->group_count; i++)
        hash = xd_hash(hash, c->groups[i].name, strlen(c->groups[i].name) + 1);
    return hash;
}

/* The first tensor in which some rank differs from rank 0, and the lowest such rank; `most` when none does. Collective. */
static xd_result xdi_content_locate(const xdi_content *c, xd_comm *comm, int64_t most, int64_t *index,
                                    int *rank) {
    enum { AT_ONCE = 512 };
    uint64_t hashes[AT_ONCE];
    const int size = xd_comm_size(comm);
    int64_t same = 0;
    for (int64_t first = 0; first < most; first += AT_ONCE) {
        const int64_t n = most - first < AT_ONCE ? most - first : (int64_t)AT_ONCE;
        for (int64_t i = 0; i < n; i++) hashes[i] = xdi_stored_hash(c, first + i);
        XD_TRY(xd_broadcast(comm, hashes, n, XD_DTYPE_U64, 0));
        for (int64_t i = 0; i < n && same == first + i; i++) same += hashes[i] == xdi_stored_hash(c, same);
    }
    int64_t found = same * size + xd_comm_rank(comm);
    XD_TRY(xd_all_reduce(comm, &found, &found, 1, XD_DTYPE_I64, XD_MIN));
    *index = found / size;
    *rank = (int)(found % size);
    return XD_OK;
}

/* What a rank has at an index: its name, and behind that the file's group, type and shape. */
typedef struct xdi_content_shown {
    char name[XDI_SHOWN], what[XDI_SHOWN];
} xdi_content_shown;

static void xdi_stored_print(const xdi_content *c, const xdi_stored *t, char *text, size_t size) {
    int used = snprintf(text, size, "%.30s, %s [", c->groups[t->group].name, xd_dtype_name(t->dtype));
    for (int i = 0; i < t->part->ndim && used >= 0 && (size_t)used < size; i++)
        used +=
            snprintf(text + used, size - (size_t)used, "%s%lld", i ? ", " : "", (long long)t->part->shape[i]);
    if (used >= 0 && (size_t)used < size) snprintf(text + used, size - (size_t)used, "]");
}

static xd_result xdi_content_show(const xdi_content *c, xd_comm *comm, int64_t index, int rank,
                                  xdi_content_shown *out) {
    const bool has = index < c->tensor_count;
    memset(out, 0, sizeof *out);
    if (xd_comm_rank(comm) == rank) {
        snprintf(out->name, sizeof out->name, "%s", has ? c->tensors[index].name : "nothing");
        snprintf(out->what, sizeof out->what, "the end of the list");
        if (has) xdi_stored_print(c, &c->tensors[index], out->what, sizeof out->what);
    }
    return xd_broadcast(comm, out, (int64_t)sizeof *out, XD_DTYPE_U8, rank);
}

XD_PRIVATE xd_result xdi_content_agree(const xdi_content *c, xd_comm *comm) {
    const uint64_t hash = xdi_content_hash(c);
    int64_t sent[3], most[3], index = 0;
    xdi_content_shown here, there;
    int rank = 0;
    memcpy(&sent[0], &hash, sizeof hash);
    sent[1] = ~sent[0]; /* its maximum tells the minimum of the hashes */
    sent[2] = c->tensor_count;
    XD_TRY(xd_all_reduce(comm, sent, most, 3, XD_DTYPE_I64, XD_MAX));
    if (most[0] == ~most[1]) return XD_OK;
    XD_TRY(xdi_content_locate(c, comm, most[2], &index, &rank));
    XD_TRY(xdi_content_show(c, comm, index, 0, &here));
    XD_TRY(xdi_content_show(c, comm, index, rank, &there));
    const int root = xd_comm_world_rank(comm, 0), culprit = xd_comm_world_rank(comm, rank);
    return XD_FAIL_CULPRIT(
        c->ctx, XD_ERROR_MISMATCH, culprit,
        "the lists differ first at tensor %lld: \"%s\" on rank %d, \"%s\" on rank %d%s: %s against %s",
        (long long)index, here.name, root, there.name, culprit,
        strcmp(here.name, there.name) == 0 ? " in another file or with another type or shape" : "", here.what,
        there.what);
}

/* ---- steps ---- */

XD_PRIVATE xd_result xdi_content_get_steps(xdi_content *c) {
    const xd_launch launch = xd_ctx_launch(c->ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(c->ctx)->memory;
    for (int64_t i = 0; i < c->tensor_count; i++) {
        const xdi_stored *t = &c->tensors[i];
        if (t->step) XD_TRY(memory->copy(&launch, t->step, t->live, sizeof *t->step, XD_COPY_TO_HOST));
    }
    return memory->synchronize(&launch);
}

XD_PRIVATE xd_result xdi_content_put_steps(const xdi_content *c) {
    const xd_launch launch = xd_ctx_launch(c->ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(c->ctx)->memory;
    for (int64_t i = 0; i < c->tensor_count; i++) {
        const xdi_stored *t = &c->tensors[i];
        if (t->step) XD_TRY(memory->copy(&launch, t->live, t->step, sizeof *t->step, XD_COPY_TO_DEVICE));
    }
    return memory->synchronize(&launch);
}

/* ---- one tensor ---- */

XD_PRIVATE int64_t xdi_stored_numel(const xdi_stored *t) {
    int64_t numel = 1;
    for (int d = 0; !t->step && d < t->part->ndim; d++) numel *= t->part->shape[d];
    return numel;
}

XD_PRIVATE bool xdi_stored_speaks(const xdi_stored *t, int rank) {
    if (t->step) return rank == 0;
    return !t->part->replica && t->part->range.begin < t->part->range.end;
}

XD_PRIVATE size_t xdi_stored_bytes(const xdi_stored *t) {
    const int64_t count = t->step ? 1 : t->part->range.end - t->part->range.begin;
    return (size_t)count * xd_dtype_size(t->dtype);
}
