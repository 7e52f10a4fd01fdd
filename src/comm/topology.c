/* The arrangement of ranks: axes, orders, experts. Pure functions of a desc. */

#include "comm/internal.h"
#include "comm/topology.h"

#include <string.h>

XD_PRIVATE bool xdi_topology_name_is_valid(const char *name) {
    const size_t length = strlen(name);
    if (length == 0 || length >= XD_AXIS_NAME_MAX) return false;
    for (size_t i = 0; i < length; i++) {
        const char c = name[i];
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(c >= '0' && c <= '9') && c != '_') return false;
    }
    return true;
}

static xd_result xdi_topology_check_names(xd_ctx *ctx, const xd_axis *axes, int axis_count) {
    for (int i = 0; i < axis_count; i++) {
        XD_REQUIRE(ctx, !axes[i].name == !axes[0].name, XD_ERROR_ARGUMENT,
                   "axis %d %s a name and axis 0 %s: name all of the %d axes or none", i,
                   axes[i].name ? "has" : "lacks", axes[0].name ? "has" : "lacks", axis_count);
        if (!axes[i].name) continue;
        XD_REQUIRE(ctx, xdi_topology_name_is_valid(axes[i].name), XD_ERROR_ARGUMENT,
                   "axis %d: \"%.40s\" is no name (letters, digits and '_', at most %d)", i, axes[i].name,
                   XD_AXIS_NAME_MAX - 1);
        for (int k = 0; k < i; k++)
            XD_REQUIRE(ctx, strcmp(axes[i].name, axes[k].name) != 0, XD_ERROR_ARGUMENT,
                       "axes %d and %d are both named \"%s\"", k, i, axes[i].name);
    }
    return XD_OK;
}

static xd_result xdi_topology_check_axes(xd_ctx *ctx, const xd_axis *axes, int axis_count) {
    int fills = 0;
    XD_REQUIRE(ctx, axes && axis_count >= 1 && axis_count <= XD_MESH_AXES_MAX, XD_ERROR_ARGUMENT,
               "%d axes given%s, 1 to %d are possible", axis_count, axes ? "" : " at NULL", XD_MESH_AXES_MAX);
    for (int i = 0; i < axis_count; i++) {
        XD_REQUIRE(ctx, axes[i].size >= 1 || axes[i].size == -1, XD_ERROR_ARGUMENT,
                   "axis %d has size %d, must be at least 1, or -1 to fill", i, axes[i].size);
        fills += axes[i].size == -1;
    }
    XD_REQUIRE(ctx, fills <= 1, XD_ERROR_ARGUMENT, "%d axes have size -1, at most 1 can fill", fills);
    return xdi_topology_check_names(ctx, axes, axis_count);
}

static xd_result xdi_topology_check_ranks(xd_ctx *ctx, const int *ranks, int rank_count, int world_size) {
    for (int i = 0; i < rank_count; i++) {
        XD_REQUIRE(ctx, ranks[i] >= 0 && ranks[i] < world_size, XD_ERROR_ARGUMENT,
                   "ranks[%d] is %d, the world has %d ranks", i, ranks[i], world_size);
        for (int k = 0; k < i; k++)
            XD_REQUIRE(ctx, ranks[i] != ranks[k], XD_ERROR_ARGUMENT, "ranks[%d] and ranks[%d] are both %d", k,
                       i, ranks[i]);
    }
    return XD_OK;
}

/* The topology of axes that are slowest first. */
static xd_result xdi_topology_lay_out(xd_ctx *ctx, const xdi_topology_desc *d, const xd_axis *axes,
                                      xd_topology *out) {
    xd_topology t;
    int64_t product = 1;
    const int axis_count = d->axis_count, available = d->ranks ? d->rank_count : d->world_size;
    XD_REQUIRE(ctx, d->rank_count >= 0, XD_ERROR_ARGUMENT, "a list of %d ranks", d->rank_count);
    XD_REQUIRE(ctx, available >= 1, XD_ERROR_ARGUMENT, "%d ranks given, at least 1 is needed", available);
    memset(&t, 0, sizeof t);
    for (int i = 0; i < axis_count; i++) {
        t.size[i] = axes[i].size;
        if (axes[i].name) memcpy(t.name[i], axes[i].name, strlen(axes[i].name) + 1);
        if (axes[i].size > 0) product *= axes[i].size;
        XD_REQUIRE(ctx, product <= INT32_MAX, XD_ERROR_TOPOLOGY,
                   "axis sizes multiply to more than 2^31 ranks");
    }
    for (int i = 0; i < axis_count; i++) {
        if (t.size[i] != -1) continue;
        XD_REQUIRE(ctx, available % product == 0, XD_ERROR_TOPOLOGY,
                   "axis %d is to fill %d ranks, but the other axes multiply to %d", i, available,
                   (int)product);
        t.size[i] = available / (int)product;
        product = available;
    }
    XD_REQUIRE(ctx, product == available, XD_ERROR_TOPOLOGY, "axis sizes multiply to %d but %s %d ranks",
               (int)product, d->ranks ? "the list has" : "the world has", available);
    if (d->ranks) XD_TRY(xdi_topology_check_ranks(ctx, d->ranks, d->rank_count, d->world_size));
    t.axis_count = axis_count;
    t.rank_count = available;
    t.ranks = d->ranks;
    *out = t;
    return XD_OK;
}

XD_PRIVATE size_t xdi_topology_next(const char **list, const char **name) {
    *name = *list;
    const size_t length = strcspn(*list, ",-");
    *list = (*list)[length] ? *list + length + 1 : NULL;
    return length;
}

static int xdi_topology_find(const xd_axis *axes, int axis_count, const char *name, size_t length) {
    for (int i = 0; i < axis_count; i++)
        if (axes[i].name && strlen(axes[i].name) == length && memcmp(axes[i].name, name, length) == 0)
            return i;
    return -1;
}

/* The axes named in the string, in its order, then those it leaves out: leftmost = fastest. */
static xd_result xdi_topology_parse_order(xd_ctx *ctx, const char *order, const xd_axis *axes, int axis_count,
                                          int *sequence) {
    unsigned seen = 0;
    int count = 0;
    for (const char *rest = order, *name; rest;) {
        const size_t length = xdi_topology_next(&rest, &name);
        const int axis = xdi_topology_find(axes, axis_count, name, length);
        XD_REQUIRE(ctx, axis >= 0, XD_ERROR_ARGUMENT, "order \"%s\": \"%.*s\" is none of the %d axes", order,
                   (int)length, name, axis_count);
        XD_REQUIRE(ctx, !(seen >> axis & 1u), XD_ERROR_ARGUMENT, "order \"%s\" names \"%s\" twice", order,
                   axes[axis].name);
        seen |= 1u << axis;
        sequence[count++] = axis;
    }
    for (int i = 0; i < axis_count; i++) {
        if (seen >> i & 1u) continue;
        XD_REQUIRE(ctx, axes[i].size == 1, XD_ERROR_ARGUMENT,
                   "order \"%s\" leaves out \"%s\", whose size is %d, not 1", order, axes[i].name,
                   axes[i].size);
        sequence[count++] = i;
    }
    return XD_OK;
}

/* The axes in the order of the string, slowest first. */
static xd_result xdi_topology_sort(xd_ctx *ctx, const xdi_topology_desc *d, xd_axis *sorted) {
    int sequence[XD_MESH_AXES_MAX];
    XD_REQUIRE(ctx, d->axes[0].name, XD_ERROR_ARGUMENT, "an order string needs named axes");
    XD_TRY(xdi_topology_parse_order(ctx, d->order, d->axes, d->axis_count, sequence));
    for (int i = 0; i < d->axis_count; i++) sorted[d->axis_count - 1 - i] = d->axes[sequence[i]];
    return XD_OK;
}

/* Context and expert parallelism use the same ranks: a grid can have only one of them. */
static xd_result xdi_topology_check_order(xd_ctx *ctx, const xd_topology *t) {
    const int cp = xdi_topology_axis(t, "cp"), ep = xdi_topology_axis(t, "ep");
    XD_REQUIRE(ctx, cp < 0 || ep < 0 || t->size[cp] == 1 || t->size[ep] == 1, XD_ERROR_ARGUMENT,
               "cp is %d and ep is %d: one grid cannot have both above 1", t->size[cp], t->size[ep]);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_topology_create(xd_ctx *ctx, const xdi_topology_desc *desc, xd_topology *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, out);
    xd_axis sorted[XD_MESH_AXES_MAX];
    xd_topology t;
    XD_TRY(xdi_topology_check_axes(ctx, desc->axes, desc->axis_count));
    if (desc->order) XD_TRY(xdi_topology_sort(ctx, desc, sorted));
    XD_TRY(xdi_topology_lay_out(ctx, desc, desc->order ? sorted : desc->axes, &t));
    if (desc->order) XD_TRY(xdi_topology_check_order(ctx, &t));
    *out = t;
    return XD_OK;
}

static xd_result xdi_topology_expert_grid(xd_ctx *ctx, const xd_expert_desc *d, int tp, int cp, int ep,
                                          xd_topology *out) {
    const char *const names[5] = { "tp", "cp", "ep", "dp", "pp" };
    const int64_t taken = (int64_t)tp * cp * ep * d->pp;
    XD_REQUIRE(ctx, d->world_size % taken == 0, XD_ERROR_TOPOLOGY,
               "tp %d x cp %d x ep %d x pp %d does not divide a world of %d ranks", tp, cp, ep, d->pp,
               d->world_size);
    const int sizes[5] = { tp, cp, ep, (int)(d->world_size / taken), d->pp };
    xd_axis axes[5];
    for (int i = 0; i < 5; i++) {
        axes[i].name = names[i];
        axes[i].size = sizes[i];
    }
    xdi_topology_desc grid;
    memset(&grid, 0, sizeof grid);
    grid.axes = axes;
    grid.axis_count = 5;
    grid.order = d->order;
    grid.world_size = d->world_size;
    return xdi_topology_create(ctx, &grid, out);
}

/* The index of a rank in its pipeline group and the first rank of that group. */
static void xdi_topology_pipeline_place(const xd_topology *t, int rank, int *first, int *place) {
    const int pp = xdi_topology_axis(t, "pp");
    int c[XD_MESH_AXES_MAX] = { 0 };
    xdi_topology_coordinate(t, rank, c);
    *place = c[pp];
    c[pp] = 0;
    *first = xdi_topology_rank(t, c);
}

static xd_result xdi_topology_check_pipelines(xd_ctx *ctx, const xd_topology *dense,
                                              const xd_topology *expert) {
    for (int rank = 0; rank < dense->rank_count; rank++) {
        int first[2], place[2];
        xdi_topology_pipeline_place(dense, rank, &first[0], &place[0]);
        xdi_topology_pipeline_place(expert, rank, &first[1], &place[1]);
        XD_REQUIRE(ctx, first[0] == first[1] && place[0] == place[1], XD_ERROR_TOPOLOGY,
                   "rank %d is stage %d of the pipeline of rank %d in the dense grid, but stage %d of that "
                   "of rank %d in "
                   "the expert grid",
                   rank, place[0], first[0], place[1], first[1]);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_topology_experts(xd_ctx *ctx, const xd_expert_desc *desc, xd_topology *dense,
                                          xd_topology *expert) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, desc, dense, expert);
    xd_expert_desc d = *desc;
    if (!d.tp) d.tp = 1;
    if (!d.cp) d.cp = 1;
    if (!d.ep) d.ep = 1;
    if (!d.pp) d.pp = 1;
    if (!d.expert_tp) d.expert_tp = d.tp;
    if (!d.optimizer_instances) d.optimizer_instances = 1;
    if (!d.order) d.order = "tp-cp-ep-dp-pp";
    XD_REQUIRE(ctx,
               d.tp > 0 && d.cp > 0 && d.ep > 0 && d.pp > 0 && d.expert_tp > 0 && d.optimizer_instances > 0,
               XD_ERROR_ARGUMENT,
               "sizes tp %d cp %d ep %d pp %d expert_tp %d optimizer_instances %d: none may be negative",
               d.tp, d.cp, d.ep, d.pp, d.expert_tp, d.optimizer_instances);
    XD_REQUIRE(ctx, !d.virtual_pipeline || d.pp > 1, XD_ERROR_ARGUMENT, "virtual_pipeline is %d but pp is %d",
               d.virtual_pipeline, d.pp);
    xd_topology grids[2];
    XD_TRY(xdi_topology_expert_grid(ctx, &d, d.tp, d.cp, 1, &grids[0]));
    XD_TRY(xdi_topology_expert_grid(ctx, &d, d.expert_tp, 1, d.ep, &grids[1]));
    const int data_ranks = d.world_size / (d.tp * d.pp);
    XD_REQUIRE(ctx, data_ranks % d.optimizer_instances == 0, XD_ERROR_TOPOLOGY,
               "dp x cp is %d, not a multiple of %d optimizer instances", data_ranks, d.optimizer_instances);
    XD_TRY(xdi_topology_check_pipelines(ctx, &grids[0], &grids[1]));
    *dense = grids[0];
    *expert = grids[1];
    return XD_OK;
}

/* The product of the sizes of the parts must be the size of the axis. */
static xd_result xdi_topology_check_parts(xd_ctx *ctx, const xd_topology *topology,
                                          const xdi_unflatten_desc *d, int at) {
    int64_t product = 1;
    XD_REQUIRE(ctx, at >= 0, XD_ERROR_ARGUMENT, "there is no axis \"%s\" to split", d->axis ? d->axis : "");
    XD_REQUIRE(ctx, d->part_count >= 1 && d->part_count <= XD_MESH_AXES_MAX + 1 - topology->axis_count,
               XD_ERROR_ARGUMENT, "%d parts for one of %d axes, at most %d axes are possible", d->part_count,
               topology->axis_count, XD_MESH_AXES_MAX);
    XD_TRY(xdi_topology_check_axes(ctx, d->parts, d->part_count));
    for (int i = 0; i < d->part_count && product <= INT32_MAX; i++) product *= d->parts[i].size;
    XD_REQUIRE(ctx, product == topology->size[at], XD_ERROR_TOPOLOGY,
               "the parts multiply to %lld but \"%s\" has size %d", (long long)product, d->axis,
               topology->size[at]);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_topology_unflatten(xd_ctx *ctx, const xd_topology *topology,
                                            const xdi_unflatten_desc *desc, xd_topology *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx, topology, desc, out);
    XDI_GIVEN_LIST(ctx, desc->parts, desc->part_count);
    const int at = desc->axis ? xdi_topology_axis(topology, desc->axis) : -1;
    xd_axis axes[XD_MESH_AXES_MAX];
    xdi_topology_desc d;
    xd_topology t;
    memset(&d, 0, sizeof d);
    XD_TRY(xdi_topology_check_parts(ctx, topology, desc, at));
    for (int i = 0; i < topology->axis_count; i++) {
        for (int k = 0; i == at && k < desc->part_count; k++) axes[d.axis_count++] = desc->parts[k];
        if (i == at) continue;
        axes[d.axis_count].name = topology->name[i];
        axes[d.axis_count++].size = topology->size[i];
    }
    d.axes = axes;
    d.world_size = topology->rank_count;
    XD_TRY(xdi_topology_create(ctx, &d, &t));
    t.ranks = topology->ranks;
    *out = t;
    return XD_OK;
}

XD_PRIVATE int xdi_topology_axis(const xd_topology *topology, const char *name) {
    for (int i = 0; i < topology->axis_count; i++)
        if (name[0] && strcmp(topology->name[i], name) == 0) return i;
    return -1;
}

XD_PRIVATE int xdi_topology_rank(const xd_topology *topology, const int *coordinate) {
    int linear = 0;
    for (int i = 0; i < topology->axis_count; i++) linear = linear * topology->size[i] + coordinate[i];
    return topology->ranks ? topology->ranks[linear] : linear;
}

XD_PRIVATE bool xdi_topology_coordinate(const xd_topology *topology, int rank, int *coordinate) {
    int linear = rank;
    if (topology->ranks)
        for (linear = 0; linear < topology->rank_count && topology->ranks[linear] != rank;) linear++;
    if (linear < 0 || linear >= topology->rank_count) return false;
    for (int i = topology->axis_count - 1; i >= 0; i--) {
        coordinate[i] = linear % topology->size[i];
        linear /= topology->size[i];
    }
    return true;
}

XD_PRIVATE bool xdi_topology_equal(const xd_topology *a, const xd_topology *b) {
    if (a->axis_count != b->axis_count || a->rank_count != b->rank_count) return false;
    for (int i = 0; i < a->axis_count; i++)
        if (a->size[i] != b->size[i] || strcmp(a->name[i], b->name[i]) != 0) return false;
    for (int i = 0; i < a->rank_count; i++)
        if ((a->ranks ? a->ranks[i] : i) != (b->ranks ? b->ranks[i] : i)) return false;
    return true;
}

XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t hash = seed ? seed : 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

XD_PRIVATE uint64_t xdi_topology_hash(const xd_topology *topology) {
    uint64_t hash = xd_hash(0, &topology->axis_count, sizeof topology->axis_count);
    for (int i = 0; i < topology->axis_count; i++) {
        hash = xd_hash(hash, &topology->size[i], sizeof topology->size[i]);
        hash = xd_hash(hash, topology->name[i], strlen(topology->name[i]) + 1);
    }
    for (int i = 0; i < topology->rank_count; i++) {
        const int rank = topology->ranks ? topology->ranks[i] : i;
        hash = xd_hash(hash, &rank, sizeof rank);
    }
    return hash;
}
