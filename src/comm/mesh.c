/* Meshes: ranks by named axes, and the groups along them. */

#include "comm/internal.h"
#include "comm/mesh.h"

#include <stdio.h>
#include <string.h>

/* One partition of the world into ordered groups: for each rank the first member of its group and its index in the
 * group; leader -1 -> the rank is in no group. Every rank has all of it, so that lookups give the same result on all
 * ranks. */
typedef struct xdi_mesh_entry {
    int *leader, *place; /* [world size] each */
    xd_comm *comm;       /* this rank's group; NULL when it is in none */
    bool owned;          /* false: the world itself */
    struct xdi_mesh_entry *next;
} xdi_mesh_entry;

typedef struct xdi_mesh_table {
    int references;
    xd_comm *world;
    xd_ctx *ctx;
    uint64_t created; /* number of meshes so far, which ranks compare too */
    xdi_mesh_entry *entries;
} xdi_mesh_table;

/* The root that derived meshes refer to: axes over ranks, and the names that flatten gave. */
typedef struct xdi_mesh_root {
    int references;
    xdi_mesh_table *table;
    xd_topology topology; /* ranks owned */
    bool member;
    int coordinate[XD_MESH_AXES_MAX];
    xdi_mesh_entry *groups[1 << XD_MESH_AXES_MAX]; /* by set of axes; NULL -> not requested yet */
    int flat_count;
    char flat_name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    unsigned flat_axes[XD_MESH_AXES_MAX];
} xdi_mesh_root;

struct xd_mesh {
    xdi_mesh_root *root;
    unsigned axes[XD_MESH_AXES_MAX]; /* the root axes that form each axis of this mesh */
    xd_topology topology;            /* of this mesh; ranks owned */
};

/* Which ranks differ from rank 0. Collective. */
static xd_result xdi_agree_same_report(xd_comm *comm, uint64_t hash, const char *what) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const int size = xd_comm_size(comm);
    int64_t *counts = (int64_t *)xd_allocate(ctx, 2 * (size_t)size * sizeof *counts);
    const xd_result room =
        xd_agree(comm, counts ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d hashes", size));
    if (room != XD_OK) {
        xd_release(ctx, counts);
        return room;
    }
    int64_t mine, *all = counts + size;
    memcpy(&mine, &hash, sizeof mine);
    for (int i = 0; i < size; i++) counts[i] = 1;
    xd_result result = xd_all_gather(comm, &mine, all, counts, XD_DTYPE_I64);
    char list[200];
    size_t used = 0;
    int differ = 0, first = -1;
    for (int i = 1; result == XD_OK && i < size; i++) {
        if (all[i] == all[0]) continue;
        if (used + 16 < sizeof list)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", differ ? "," : "",
                                     xd_comm_world_rank(comm, i));
        if (differ++ == 0) first = xd_comm_world_rank(comm, i);
    }
    if (differ)
        result =
            XD_FAIL_CULPRIT(ctx, XD_ERROR_MISMATCH, first, "%s: rank%s %s passed something else than rank %d",
                            what, differ > 1 ? "s" : "", list, xd_comm_world_rank(comm, 0));
    xd_release(ctx, counts);
    return result;
}

XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what) {
    XDI_GIVEN_GROUP(comm);
    int64_t mine[2], most[2];
    memcpy(&mine[0], &hash, sizeof hash);
    mine[1] = ~mine[0]; /* its maximum tells the minimum of the hashes */
    XD_TRY(xd_all_reduce(comm, mine, most, 2, XD_DTYPE_I64, XD_MAX));
    return most[0] == ~most[1] ? XD_OK : xdi_agree_same_report(comm, hash, what);
}

static void xdi_mesh_entry_destroy(xd_ctx *ctx, xdi_mesh_entry *entry) {
    if (!entry) return;
    if (entry->owned) xd_comm_destroy(entry->comm);
    xd_release(ctx, entry->leader);
    xd_release(ctx, entry);
}

static void xdi_mesh_table_release(xdi_mesh_table *table) {
    if (!table || --table->references > 0) return;
    for (xdi_mesh_entry *next, *entry = table->entries; entry; entry = next) {
        next = entry->next;
        xdi_mesh_entry_destroy(table->ctx, entry);
    }
    xd_release(table->ctx, table);
}

static void xdi_mesh_root_release(xdi_mesh_root *root) {
    if (!root || --root->references > 0) return;
    xdi_mesh_table *table = root->table;
    xd_release(table->ctx, (void *)root->topology.ranks);
    xd_release(table->ctx, root);
    xdi_mesh_table_release(table);
}

XD_API void xd_mesh_destroy(xd_mesh *mesh) {
    if (!mesh || XDI_IS_GONE(xd_mesh, mesh)) return;
    xd_ctx *ctx = mesh->root->table->ctx;
    xdi_mesh_root_release(mesh->root);
    xd_release(ctx, (void *)mesh->topology.ranks);
    xd_release(ctx, mesh);
}

/* Replaces the rank list by a copy that the topology owns; false without memory. */
static bool xdi_mesh_own_ranks(xd_ctx *ctx, xd_topology *topology) {
    int *ranks = (int *)xd_allocate(ctx, (size_t)topology->rank_count * sizeof *ranks);
    for (int i = 0; ranks && i < topology->rank_count; i++)
        ranks[i] = topology->ranks ? topology->ranks[i] : i;
    topology->ranks = ranks;
    return ranks != NULL;
}

/* The first rank of a rank's group over `mask`, and the rank's index in it; leader -1 -> not a member. */
static void xdi_mesh_seat(const xd_topology *topology, unsigned mask, int rank, int *leader, int *place) {
    int coordinate[XD_MESH_AXES_MAX];
    *leader = -1;
    *place = 0;
    if (!xdi_topology_coordinate(topology, rank, coordinate)) return;
    for (int i = 0; i < topology->axis_count; i++) {
        if (!(mask >> i & 1u)) continue;
        *place = *place * topology->size[i] + coordinate[i];
        coordinate[i] = 0;
    }
    *leader = xdi_topology_rank(topology, coordinate);
}

/* The entry that has the groups over `mask`, or NULL. Needs no memory: whether groups must be created may not depend on
 * one rank running out of memory. */
static xdi_mesh_entry *xdi_mesh_find(const xdi_mesh_table *table, const xd_topology *topology,
                                     unsigned mask) {
    const int world_size = xd_comm_size(table->world);
    for (xdi_mesh_entry *entry = table->entries; entry; entry = entry->next) {
        int rank = 0;
        for (int leader, place; rank < world_size; rank++) {
            xdi_mesh_seat(topology, mask, rank, &leader, &place);
            if (entry->leader[rank] != leader || entry->place[rank] != place) break;
        }
        if (rank == world_size) return entry;
    }
    return NULL;
}

/* An entry for the groups over `mask`, without its communicator. NULL without memory. */
static xdi_mesh_entry *xdi_mesh_partition(xdi_mesh_table *table, const xd_topology *topology, unsigned mask) {
    xd_ctx *ctx = table->ctx;
    const int world_size = xd_comm_size(table->world);
    xdi_mesh_entry *entry = (xdi_mesh_entry *)xd_allocate(ctx, sizeof *entry);
    if (entry) entry->leader = (int *)xd_allocate(ctx, 2 * (size_t)world_size * sizeof *entry->leader);
    if (!entry || !entry->leader) {
        xdi_mesh_entry_destroy(ctx, entry);
        return NULL;
    }
    entry->place = entry->leader + world_size;
    for (int i = 0; i < world_size; i++)
        xdi_mesh_seat(topology, mask, i, &entry->leader[i], &entry->place[i]);
    return entry;
}

static bool xdi_mesh_is_identity(const xdi_mesh_entry *entry, int world_size) {
    for (int i = 0; i < world_size; i++)
        if (entry->leader[i] != 0 || entry->place[i] != i) return false;
    return true;
}

static int xdi_mesh_largest(const xdi_mesh_entry *entry, int world_size) {
    int most = 0;
    for (int i = 0; i < world_size; i++)
        if (entry->leader[i] >= 0 && entry->place[i] >= most) most = entry->place[i] + 1;
    return most;
}

static xd_result xdi_mesh_agree_groups(const xdi_mesh_table *table, const xdi_mesh_entry *entry,
                                       xd_comm *parent) {
    const int world_size = xd_comm_size(table->world);
    xdi_facts facts;
    xdi_facts_begin(&facts);
    xdi_fact_integer(&facts, "ranks of a group", xdi_mesh_largest(entry, world_size));
    xdi_fact_bytes(&facts, "list of ranks", entry->leader, 2 * (size_t)world_size * sizeof *entry->leader);
    return xdi_agree_facts(parent, &facts, "mesh groups");
}

/* Makes this rank's communicator of a new entry by splitting `parent`. Collective over it. */
static xd_result xdi_mesh_connect(xdi_mesh_table *table, xdi_mesh_entry *entry, xd_comm *parent) {
    const int me = xd_comm_rank(table->world), world_size = xd_comm_size(table->world);
    if (xdi_mesh_is_identity(entry, world_size)) {
        entry->comm = table->world;
        return XD_OK;
    }
    entry->owned = true;
    if (xdi_mesh_largest(entry, world_size) > 1)
        return xd_comm_split(parent, entry->leader[me], entry->place[me], &entry->comm);
    /* Groups of one rank need no peers; but all ranks must fail alike when one has no memory. */
    return xd_agree(parent, entry->leader[me] < 0 ? XD_OK : xd_comm_self(table->ctx, &entry->comm));
}

/* The entry for the groups over mask, created when it is new: then collective over parent. */
static xd_result xdi_mesh_entry_for(xdi_mesh_root *root, unsigned mask, xd_comm *parent,
                                    xdi_mesh_entry **out) {
    xdi_mesh_table *table = root->table;
    if (root->groups[mask]) {
        *out = root->groups[mask];
        return XD_OK;
    }
    xdi_mesh_entry *entry = xdi_mesh_find(table, &root->topology, mask);
    if (entry) {
        *out = root->groups[mask] = entry;
        return XD_OK;
    }
    entry = xdi_mesh_partition(table, &root->topology, mask);
    xd_result result = XD_OK;
    if (!entry)
        result = XD_FAIL(table->ctx, XD_ERROR_MEMORY, "no room for the groups of %d ranks",
                         root->topology.rank_count);
    result = xd_agree(parent, result);
    if (result == XD_OK) result = xdi_mesh_agree_groups(table, entry, parent);
    if (result == XD_OK) result = xdi_mesh_connect(table, entry, parent);
    if (result != XD_OK) {
        xdi_mesh_entry_destroy(table->ctx, entry);
        return result;
    }
    entry->next = table->entries;
    table->entries = entry;
    *out = root->groups[mask] = entry;
    return XD_OK;
}

/* First the members' communicator, then every single axis from left to right. Ranks of `comm` outside the mesh take part
 * in the first step and get its result. */
static xd_result xdi_mesh_connect_axes(xdi_mesh_root *root, xd_comm *comm) {
    const unsigned all = (1u << root->topology.axis_count) - 1u;
    xdi_mesh_entry *members = NULL, *entry;
    XD_TRY(xdi_mesh_entry_for(root, all, root->table->world, &members));
    xd_result result = XD_OK;
    for (int i = 0; root->member && result == XD_OK && i < root->topology.axis_count; i++)
        result = xdi_mesh_entry_for(root, 1u << i, members->comm, &entry);
    return root->topology.rank_count < xd_comm_size(comm) ? xd_agree(comm, result) : result;
}

/* A mesh over some axes of a root, with this rank's coordinates on the other axes. Takes no reference on failure. */
static xd_mesh *xdi_mesh_over(xdi_mesh_root *root, const unsigned *axes,
                              const char (*names)[XD_AXIS_NAME_MAX], int count) {
    xd_ctx *ctx = root->table->ctx;
    xd_mesh *mesh = XDI_OBJECT(xd_mesh, ctx, sizeof *mesh);
    if (!mesh) return NULL;
    mesh->topology.axis_count = count;
    mesh->topology.rank_count = 1;
    for (int i = 0; i < count; i++) {
        mesh->axes[i] = axes[i];
        memcpy(mesh->topology.name[i], names[i], XD_AXIS_NAME_MAX);
        mesh->topology.size[i] = 1;
        for (int k = 0; k < root->topology.axis_count; k++)
            if (axes[i] >> k & 1u) mesh->topology.size[i] *= root->topology.size[k];
        mesh->topology.rank_count *= mesh->topology.size[i];
    }
    int *ranks = (int *)xd_allocate(ctx, (size_t)mesh->topology.rank_count * sizeof *ranks);
    if (!ranks) {
        xd_release(ctx, mesh);
        return NULL;
    }
    for (int r = 0; r < mesh->topology.rank_count; r++) {
        int coordinate[XD_MESH_AXES_MAX], rest = r;
        memcpy(coordinate, root->coordinate, sizeof coordinate);
        for (int i = count - 1; i >= 0; i--)
            for (int k = root->topology.axis_count - 1; k >= 0; k--) {
                if (!(axes[i] >> k & 1u)) continue;
                coordinate[k] = rest % root->topology.size[k];
                rest /= root->topology.size[k];
            }
        ranks[r] = xdi_topology_rank(&root->topology, coordinate);
    }
    mesh->topology.ranks = ranks;
    mesh->root = root;
    root->references++;
    return mesh;
}

/* A root with its own copy of the topology and one reference, and the whole mesh over it. */
static xd_mesh *xdi_mesh_root_create(xdi_mesh_table *table, const xd_topology *topology) {
    xdi_mesh_root *root = (xdi_mesh_root *)xd_allocate(table->ctx, sizeof *root);
    unsigned axes[XD_MESH_AXES_MAX];
    if (!root) return NULL;
    root->references = 1;
    root->topology = *topology;
    root->table = table;
    table->references++;
    xd_mesh *mesh = NULL;
    for (int i = 0; i < topology->axis_count; i++) axes[i] = 1u << i;
    if (xdi_mesh_own_ranks(table->ctx, &root->topology)) {
        root->member = xdi_topology_coordinate(topology, xd_comm_rank(table->world), root->coordinate);
        mesh =
            xdi_mesh_over(root, axes, (const char(*)[XD_AXIS_NAME_MAX])topology->name, topology->axis_count);
    }
    xdi_mesh_root_release(root); /* the mesh holds it now */
    return mesh;
}

static xd_result xdi_mesh_topology_of(xd_comm *world, const xd_mesh_desc *d, xd_topology *out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_axis axes[XD_MESH_AXES_MAX];
    xdi_topology_desc made;
    int count = 0;
    int64_t product = 1;
    XD_REQUIRE(ctx, !d->share || d->share->root->table->world == world, XD_ERROR_ARGUMENT,
               "share is a mesh over another world");
    memcpy(axes, d->axes, sizeof axes);
    for (; count < XD_MESH_AXES_MAX && (axes[count].name || axes[count].size); count++)
        product = product > 0 && product <= INT32_MAX ? product * axes[count].size : -1;
    if (d->topology) {
        count = d->topology->axis_count;
        product = d->topology->rank_count;
        for (int i = 0; i < count && i < XD_MESH_AXES_MAX; i++) {
            axes[i].name = d->topology->name[i][0] ? d->topology->name[i] : NULL;
            axes[i].size = d->topology->size[i];
        }
    }
    XD_REQUIRE(ctx, !d->world_size || product <= 0 || product == d->world_size, XD_ERROR_ARGUMENT,
               "axis sizes multiply to %lld but world_size is %d", (long long)product, d->world_size);
    memset(&made, 0, sizeof made);
    made.axes = axes;
    made.axis_count = count;
    made.ranks = d->topology ? d->topology->ranks : d->ranks;
    made.rank_count = d->topology ? d->topology->rank_count : d->rank_count;
    made.order = d->topology ? NULL : d->order;
    made.world_size = xd_comm_size(world);
    return xdi_topology_create(ctx, &made, out);
}

static xd_result xdi_mesh_build(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_topology topology;
    XD_TRY(xdi_mesh_topology_of(world, desc, &topology));
    xdi_mesh_table *table = desc->share ? desc->share->root->table : NULL;
    if (table)
        table->references++;
    else {
        table = (xdi_mesh_table *)xd_allocate(ctx, sizeof *table);
        XD_REQUIRE(ctx, table, XD_ERROR_MEMORY, "no room for a mesh of %d ranks", topology.rank_count);
        table->references = 1;
        table->ctx = ctx;
        table->world = world;
    }
    xd_mesh *mesh = xdi_mesh_root_create(table, &topology);
    xdi_mesh_table_release(table); /* the mesh holds it now */
    XD_REQUIRE(ctx, mesh, XD_ERROR_MEMORY, "no room for a mesh of %d ranks", topology.rank_count);
    *out = mesh;
    return XD_OK;
}

/* Agrees on the ranks' results, compares the meshes, and creates the communicators. Destroys `mesh` on failure. */
static xd_result xdi_mesh_publish(xd_comm *comm, xd_result mine, xd_mesh *mesh, xd_mesh **out) {
    xd_result result = xd_agree(comm, mine);
    if (result == XD_OK) {
        xdi_facts facts;
        xdi_facts_begin(&facts);
        xdi_facts_topology(&facts, &mesh->topology);
        xdi_fact_integer(&facts, "number of meshes so far", (int64_t)++mesh->root->table->created);
        result = xdi_agree_facts(comm, &facts, "mesh");
    }
    if (result == XD_OK) result = xdi_mesh_connect_axes(mesh->root, comm);
    if (result != XD_OK) {
        xd_mesh_destroy(mesh);
        return result;
    }
    *out = mesh;
    return XD_OK;
}

XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out) {
    XDI_GIVEN_COMM(world, desc, out);
    xd_mesh *mesh = NULL;
    const xd_result result = xdi_mesh_build(world, desc, &mesh);
    return xdi_mesh_publish(world, result, mesh, out);
}

XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh) {
    XD_ASSERT(mesh);
    return &mesh->topology;
}

static xd_result xdi_mesh_require_member(const xd_mesh *mesh) {
    XD_REQUIRE(mesh->root->table->ctx, mesh->root->member, XD_ERROR_STATE,
               "rank %d is none of the %d ranks of the mesh", xd_comm_rank(mesh->root->table->world),
               mesh->root->topology.rank_count);
    return XD_OK;
}

/* Index of an axis of this mesh; name NULL -> the only one. */
static xd_result xdi_mesh_own_axis(const xd_mesh *mesh, const char *name, int *axis) {
    xd_ctx *ctx = mesh->root->table->ctx;
    XD_REQUIRE(ctx, name || mesh->topology.axis_count == 1, XD_ERROR_ARGUMENT,
               "the mesh has %d axes: name one", mesh->topology.axis_count);
    *axis = name ? xdi_topology_axis(&mesh->topology, name) : 0;
    XD_REQUIRE(ctx, *axis >= 0, XD_ERROR_ARGUMENT, "\"%s\" is none of the %d axes of the mesh", name,
               mesh->topology.axis_count);
    return XD_OK;
}

XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate) {
    XDI_LIVE(xd_mesh, mesh);
    XDI_GIVEN_IN_PLAN(mesh ? mesh->root->table->ctx : NULL, mesh, coordinate);
    int own[XD_MESH_AXES_MAX], index;
    XD_TRY(xdi_mesh_require_member(mesh));
    XD_TRY(xdi_mesh_own_axis(mesh, axis, &index));
    xdi_topology_coordinate(&mesh->topology, xd_comm_rank(mesh->root->table->world), own);
    *coordinate = own[index];
    return XD_OK;
}

/* One name of root axes or of a flattened set -> bits; 0 when unknown. */
static unsigned xdi_mesh_lookup(const xdi_mesh_root *root, const char *name) {
    const int axis = xdi_topology_axis(&root->topology, name);
    if (axis >= 0) return 1u << axis;
    for (int i = 0; i < root->flat_count; i++)
        if (strcmp(root->flat_name[i], name) == 0) return root->flat_axes[i];
    return 0;
}

/* A list of names -> a set of root axes for each, disjoint. */
static xd_result xdi_mesh_parse(const xdi_mesh_root *root, const char *list, unsigned *sets,
                                char (*names)[XD_AXIS_NAME_MAX], int *count) {
    xd_ctx *ctx = root->table->ctx;
    unsigned seen = 0;
    XD_REQUIRE(ctx, root->topology.name[0][0], XD_ERROR_ARGUMENT,
               "\"%s\" cannot be looked up: the mesh has no axis names", list);
    *count = 0;
    for (const char *rest = list, *name; rest; (*count)++) {
        const size_t length = xdi_topology_next(&rest, &name);
        XD_REQUIRE(ctx, *count < XD_MESH_AXES_MAX && length < XD_AXIS_NAME_MAX, XD_ERROR_ARGUMENT,
                   "\"%s\" names more than %d axes or has a name above %d letters", list, XD_MESH_AXES_MAX,
                   XD_AXIS_NAME_MAX - 1);
        memset(names[*count], 0, XD_AXIS_NAME_MAX);
        memcpy(names[*count], name, length);
        sets[*count] = xdi_mesh_lookup(root, names[*count]);
        XD_REQUIRE(ctx, sets[*count], XD_ERROR_ARGUMENT, "\"%s\" in \"%s\" is no axis of the mesh",
                   names[*count], list);
        XD_REQUIRE(ctx, !(seen & sets[*count]), XD_ERROR_ARGUMENT, "\"%s\" names an axis twice", list);
        seen |= sets[*count];
    }
    return XD_OK;
}

/* Sets in ascending order of their first root axis. */
static xd_result xdi_mesh_require_ascending(xd_ctx *ctx, const unsigned *sets, int count) {
    for (int i = 1; i < count; i++)
        XD_REQUIRE(ctx, (sets[i] & (0u - sets[i])) > (sets[i - 1] & (0u - sets[i - 1])), XD_ERROR_ARGUMENT,
                   "axes %d and %d of the list stand in the other order in the mesh", i - 1, i);
    return XD_OK;
}

static xd_result xdi_mesh_group_of(xdi_mesh_root *root, unsigned mask, xd_comm **out) {
    const unsigned all = (1u << root->topology.axis_count) - 1u;
    xdi_mesh_entry *entry = NULL;
    XD_TRY(xdi_mesh_entry_for(root, mask, root->groups[all]->comm, &entry));
    *out = entry->comm;
    return XD_OK;
}

XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out) {
    XDI_LIVE(xd_mesh, mesh);
    XDI_GIVEN(mesh ? mesh->root->table->ctx : NULL, mesh, out);
    unsigned sets[XD_MESH_AXES_MAX], mask = 0;
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    int count = 1;
    XD_TRY(xdi_mesh_require_member(mesh));
    if (axes)
        XD_TRY(xdi_mesh_parse(mesh->root, axes, sets, names, &count));
    else {
        XD_TRY(xdi_mesh_own_axis(mesh, NULL, &count));
        sets[0] = mesh->axes[0];
        count = 1;
    }
    for (int i = 0; i < count; i++) mask |= sets[i];
    return xdi_mesh_group_of(mesh->root, mask, out);
}

static xd_result xdi_mesh_make(xdi_mesh_root *root, const unsigned *sets,
                               const char (*names)[XD_AXIS_NAME_MAX], int count, xd_mesh **out) {
    xd_mesh *mesh = xdi_mesh_over(root, sets, names, count);
    XD_REQUIRE(root->table->ctx, mesh, XD_ERROR_MEMORY, "no room for a mesh of %d axes", count);
    *out = mesh;
    return XD_OK;
}

static xd_result xdi_mesh_slice(xd_mesh *mesh, const char *axes, xd_mesh **out) {
    unsigned sets[XD_MESH_AXES_MAX];
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    int count;
    XD_TRY(xdi_mesh_parse(mesh->root, axes, sets, names, &count));
    XD_TRY(xdi_mesh_require_ascending(mesh->root->table->ctx, sets, count));
    return xdi_mesh_make(mesh->root, sets, (const char(*)[XD_AXIS_NAME_MAX])names, count, out);
}

/* The name a flattened set gets: the caller's, or its axes joined with '_'. */
static xd_result xdi_mesh_flat_name(xd_ctx *ctx, const char *axes, const char *name, char *out) {
    const char *source = name ? name : axes;
    XD_REQUIRE(ctx, strlen(source) < XD_AXIS_NAME_MAX, XD_ERROR_ARGUMENT,
               "the name \"%s\" is longer than %d letters", source, XD_AXIS_NAME_MAX - 1);
    memset(out, 0, XD_AXIS_NAME_MAX);
    memcpy(out, source, strlen(source));
    for (char *c = out; !name && *c; c++)
        if (*c == ',' || *c == '-') *c = '_';
    XD_REQUIRE(ctx, xdi_topology_name_is_valid(out), XD_ERROR_ARGUMENT, "\"%s\" is no name for an axis", out);
    return XD_OK;
}

static xd_result xdi_mesh_flatten(xd_mesh *mesh, const char *axes, const char *name, xd_mesh **out) {
    xdi_mesh_root *root = mesh->root;
    xd_ctx *ctx = root->table->ctx;
    unsigned sets[XD_MESH_AXES_MAX], mask = 0;
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX], flat[1][XD_AXIS_NAME_MAX];
    int count;
    xd_comm *comm;
    XD_TRY(xdi_mesh_parse(root, axes, sets, names, &count));
    XD_TRY(xdi_mesh_require_ascending(ctx, sets, count));
    XD_TRY(xdi_mesh_flat_name(ctx, axes, name, flat[0]));
    for (int i = 0; i < count; i++) mask |= sets[i];
    const unsigned known = xdi_mesh_lookup(root, flat[0]);
    XD_REQUIRE(ctx, !known || known == mask, XD_ERROR_ARGUMENT,
               "\"%s\" is already the name of other axes than \"%s\"", flat[0], axes);
    XD_REQUIRE(ctx, known || root->flat_count < XD_MESH_AXES_MAX, XD_ERROR_ARGUMENT,
               "the mesh already has %d flattened names, the most there can be", root->flat_count);
    XD_TRY(xdi_mesh_group_of(root, mask, &comm));
    xd_mesh *made = NULL;
    xd_result result = xdi_mesh_make(root, &mask, (const char(*)[XD_AXIS_NAME_MAX])flat, 1, &made);
    if (!known) result = xd_agree(root->groups[(1u << root->topology.axis_count) - 1u]->comm, result);
    if (result != XD_OK) {
        xd_mesh_destroy(made);
        return result;
    }
    if (!known) {
        memcpy(root->flat_name[root->flat_count], flat[0], XD_AXIS_NAME_MAX);
        root->flat_axes[root->flat_count++] = mask;
    }
    *out = made;
    return XD_OK;
}

/* The root with one axis as several. */
static xd_result xdi_mesh_split(xd_mesh *mesh, const xd_mesh_derive_desc *desc, xd_mesh **out) {
    xdi_mesh_root *root = mesh->root;
    const unsigned all = (1u << root->topology.axis_count) - 1u;
    const xdi_unflatten_desc split = { desc->axes, desc->parts, desc->part_count };
    xd_topology topology;
    xd_mesh *fresh = NULL;
    xd_comm *members;
    XD_TRY(xdi_mesh_group_of(root, all, &members));
    xd_result result = desc->flatten
                           ? XD_FAIL(root->table->ctx, XD_ERROR_ARGUMENT,
                                     "flatten and %d parts: derive two meshes", desc->part_count)
                           : xdi_topology_unflatten(root->table->ctx, &root->topology, &split, &topology);
    if (result == XD_OK) {
        fresh = xdi_mesh_root_create(root->table, &topology);
        if (!fresh)
            result = XD_FAIL(root->table->ctx, XD_ERROR_MEMORY, "no room for a mesh of %d axes",
                             topology.axis_count);
    }
    return xdi_mesh_publish(members, result, fresh, out);
}

XD_API xd_result xd_mesh_derive(xd_mesh *mesh, const xd_mesh_derive_desc *desc, xd_mesh **out) {
    XDI_LIVE(xd_mesh, mesh);
    xd_ctx *ctx = mesh ? mesh->root->table->ctx : NULL;
    XDI_GIVEN(ctx, mesh, desc, out);
    XDI_GIVEN(ctx, desc->axes);
    const bool split = desc->parts != NULL || desc->part_count != 0;
    XD_TRY(xdi_mesh_require_member(mesh));
    if (split) return xdi_mesh_split(mesh, desc, out);
    if (desc->flatten) return xdi_mesh_flatten(mesh, desc->axes, desc->name, out);
    return xdi_mesh_slice(mesh, desc->axes, out);
}
