#ifndef XDI_COMM_MESH_H
#define XDI_COMM_MESH_H

#include "comm/collective.h"
#include "comm/topology.h"

/* Named axes over a world, with communicators for every axis and, on request, for sets of axes.
 *
 * Derived meshes and those created with `share` use one table: each partition into groups exists once. The world outlives its
 * meshes; destroy these in any order. */
typedef struct xd_mesh xd_mesh;

/* Axes and ranks of a mesh. */
typedef struct xd_mesh_desc {
    xd_axis axes[XD_MESH_AXES_MAX]; /* slowest first, up to the first entry without name and size */
    const int *ranks;               /* [rank_count] of the world; NULL -> all in order; may be fewer */
    int rank_count;
    int world_size;              /* product of the sizes; 0 -> not checked */
    const xd_topology *topology; /* instead of axes and ranks; NULL -> these */
    xd_mesh *share;              /* mesh of the same world that shares communicators; may be NULL */
} xd_mesh_desc;

/* Creates a mesh over ranks of `world`, which may be a part of the job.
 *
 * Collective over the world, also for other ranks. Compares descs, then creates the groups of single axes from left to right.
 * The whole world in order uses its communicator; an axis of size 1 has none of its own.
 * Errors: those of xd_topology_create; ARGUMENT ("axis sizes multiply to 8 but world_size is 6"; share of another world),
 * MISMATCH (names the ranks), MEMORY. *out is untouched on failure. */
XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out);

/* Destroys the mesh; NULL is legal. Local. Its communicators live as long as the last mesh of their table. */
XD_API void xd_mesh_destroy(xd_mesh *mesh);

/* Local facts. A derived mesh lists its own axes and ranks. */
XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh);
XD_API xd_comm *xd_mesh_world(const xd_mesh *mesh);
XD_API bool xd_mesh_is_member(const xd_mesh *mesh);

/* Return this rank's coordinate on an axis and the axis size; axis NULL -> the only axis. Local. Errors: ARGUMENT (no such
 * axis), STATE (not a member). */
XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate);
XD_API xd_result xd_mesh_axis_size(const xd_mesh *mesh, const char *axis, int *size);

/* Returns this rank's communicator over the named axes: "tp", "dp,cp" in any order, or a name of xd_mesh_flatten; axes NULL
 * -> the only axis. The mesh's last axis is fastest. Names are the root's, also on a slice.
 *
 * The first call for several axes is collective over the root's members; others are local. The mesh owns the communicator.
 * Errors: ARGUMENT, STATE (not a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out);

/* Creates this rank's sub-mesh of the named axes, in root order. Names are the root's, also on a slice, or from
 * xd_mesh_flatten. Local.
 * Errors: ARGUMENT (unknown or overlapping names, not in root order), STATE (not a member), MEMORY. */
XD_API xd_result xd_mesh_slice(xd_mesh *mesh, const char *axes, xd_mesh **out);

/* Creates a one-axis mesh over named root axes, adjacent or not, row-major. Slices and groups can use its name. name NULL ->
 * names joined by '_'. A name always means the same axes, a root name its axis. First use is collective as in xd_mesh_group.
 * Errors: ARGUMENT, STATE, MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_flatten(xd_mesh *mesh, const char *axes, const char *name, xd_mesh **out);

/* Creates the root mesh with one axis split into several, row-major. Collective over the root's members. Errors: ARGUMENT,
 * TOPOLOGY, STATE, MEMORY. */
XD_API xd_result xd_mesh_unflatten(xd_mesh *mesh, const xd_unflatten_desc *desc, xd_mesh **out);

/* Joins slices of one root, at least one, in ascending order of root axes. Local.
 * Errors: ARGUMENT (count < 1, different roots, overlapping, not ascending), MEMORY. */
XD_API xd_result xd_mesh_concatenate(xd_mesh *const *slices, int count, xd_mesh **out);

/* Compares a hash over the group. Collective. `what` names it in the message.
 * Errors: MISMATCH on every rank, naming those that differ from rank 0. */
XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what);

#endif
