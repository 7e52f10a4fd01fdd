#ifndef XDI_COMM_MESH_H
#define XDI_COMM_MESH_H

#include "comm/collective.h"
#include "comm/topology.h"

/* Named axes over the ranks of a world, with a communicator for every axis, and for sets of axes on request.
 *
 * One table holds the communicators of a mesh and of all meshes derived from it or made with `share`: the groups
 * of one partition of the ranks are created only once. A mesh refers to its world, which must outlive it;
 * meshes may be destroyed in any order. */
typedef struct xd_mesh xd_mesh;

/* What to build a mesh from. Read during the call only. */
typedef struct xd_mesh_desc {
    xd_axis axes[XD_MESH_AXES_MAX]; /* slowest first; ends at the first entry without name and size */
    const int *ranks; /* [rank_count] of the world; NULL -> all in order. Fewer than all is legal */
    int rank_count;
    int world_size;              /* required product of the sizes; 0 -> not checked */
    const xd_topology *topology; /* instead of axes and ranks; NULL -> axes and ranks */
    xd_mesh *share; /* another mesh over the same world, whose communicators are used too; may be NULL */
} xd_mesh_desc;

/* Creates a mesh. desc is read during the call only; ranks are those of `world`, even where that is only a part
 * of the job.
 *
 * Collective over the world, ranks outside the mesh included: the ranks compare their descs and create the groups
 * of the single axes, from left to right. A mesh that spans the world in order uses the world's communicator; an
 * axis of size 1 needs no communicator of its own.
 * Errors: those of xd_topology_create; ARGUMENT ("axis sizes multiply to 8 but world_size is 6"; share of
 * another world), MISMATCH naming the ranks whose desc differs, MEMORY. *out is untouched on failure. */
XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out);

/* Local; NULL is fine. Communicators taken from the mesh live until the last mesh of their table is destroyed. */
XD_API void xd_mesh_destroy(xd_mesh *mesh);

/* Local facts. A derived mesh's topology lists its own axes and ranks. */
XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh);
XD_API xd_comm *xd_mesh_world(const xd_mesh *mesh);
XD_API bool xd_mesh_is_member(const xd_mesh *mesh);

/* This rank's coordinate on one axis, and the size of that axis; axis NULL -> the only axis of a one-axis
 * mesh. Local. Errors: ARGUMENT (no such axis), STATE (this rank is not in the mesh, so it has no coordinate). */
XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate);
XD_API xd_result xd_mesh_axis_size(const xd_mesh *mesh, const char *axis, int *size);

/* The communicator over the named axes that contains this rank: "tp", "dp,cp" (the order inside the list does
 * not matter; the last axis of the mesh is fastest), or a name given by xd_mesh_flatten. axes NULL -> the only
 * axis of a one-axis mesh.
 *
 * Names are those of the root mesh, also on a slice. The first call for a set of several axes makes the
 * groups and is collective over all members of the root mesh; later calls, and calls for one axis, are local.
 * The mesh owns the communicator. Errors: ARGUMENT, STATE (not a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out);

/* The sub-mesh of the named axes that contains this rank, in the order of the root mesh. Names are those of the
 * root, even when `mesh` is itself a slice; names given by xd_mesh_flatten may be used. Local.
 * Errors: ARGUMENT (unknown or overlapping names, not in the order of the root), STATE (not a member),
 * MEMORY. */
XD_API xd_result xd_mesh_slice(xd_mesh *mesh, const char *axes, xd_mesh **out);

/* A one-axis mesh over the named root axes, adjacent or not, row-major; its name can be used in slices and
 * groups later. name NULL -> the names joined with '_'. A name that is used again must mean the same axes, and
 * the name of a root axis only that axis. First use is collective as in xd_mesh_group. Errors: ARGUMENT, STATE,
 * MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_flatten(xd_mesh *mesh, const char *axes, const char *name, xd_mesh **out);

/* The root mesh with one axis replaced by several of the same product, row-major. Collective over the root's
 * members. Errors: ARGUMENT, TOPOLOGY, STATE, MEMORY. */
XD_API xd_result xd_mesh_unflatten(xd_mesh *mesh, const xd_unflatten_desc *desc, xd_mesh **out);

/* Puts slices of one root together, at least one, in ascending order of the root's axes. Local.
 * Errors: ARGUMENT (a count below 1, different roots, overlapping, not ascending), MEMORY. */
XD_API xd_result xd_mesh_concatenate(xd_mesh *const *slices, int count, xd_mesh **out);

/* Compares a hash over the group. Collective. `what` names the thing in the message.
 * Errors: MISMATCH on every rank, naming those that differ from rank 0. */
XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what);

#endif
