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
    /* Axis names joined by '-', the leftmost with stride 1 ("tp-cp-ep-dp-pp"); `axes` may then have any order. Omitted axes
     * of size 1 become slowest. NULL -> none; ignored with `topology`. */
    const char *order;
} xd_mesh_desc;

/* Creates a mesh over ranks of `world`, which may be a part of the job. Collective over the world, also for other ranks.
 * Compares descs, then creates the groups of single axes from left to right. The whole world in order uses its communicator;
 * an axis of size 1 has none of its own.
 *
 * Errors: ARGUMENT (names; sizes; two of -1; repeated or unknown ranks; world_size; share of another world; order: unknown or
 * repeated names, omitted axes above 1, "cp" and "ep" above 1), TOPOLOGY (sizes do not fit the number of ranks), MISMATCH
 * (names the ranks), MEMORY. *out is untouched on failure. */
XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out);

/* Destroys the mesh; NULL is legal. Local. Its communicators live as long as the last mesh of their table. */
XD_API void xd_mesh_destroy(xd_mesh *mesh);

/* Returns axes and ranks, valid as long as the mesh. A derived mesh has its own. Local. */
XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh);

/* Returns this rank's coordinate on an axis; axis NULL -> the only axis. Local. Errors: ARGUMENT (no such axis), STATE (not a
 * member). */
XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate);

/* Returns this rank's communicator over the named axes: "tp", "dp,cp" in any order, or a name that xd_mesh_derive gave; axes
 * NULL -> the only axis. The mesh's last axis is fastest. Names are the root's, also on a derived mesh.
 *
 * The first call for several axes is collective over the root's members; others are local. The mesh owns the communicator.
 * Errors: ARGUMENT, STATE (not a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out);

/* What to make of a mesh's root. */
typedef struct xd_mesh_derive_desc {
    const char *axes; /* required: names of the root's axes, or given by `name`, in its order: "dp,tp" */
    bool flatten;     /* one axis over all of them, adjacent or not, row-major */
    const char *name; /* of that axis, for later calls too; NULL -> names joined by '_' */
    const xd_axis *
        parts; /* [part_count], slowest first, product as the one axis `axes`, which they split; NULL -> none */
    int part_count;
} xd_mesh_derive_desc;

/* Creates another mesh of the same ranks: of some axes through this rank, of several as one, or of all with one split into
 * parts. Partitions that exist keep their communicators. A name always means the same axes.
 *
 * A sub-mesh is local. A split, and the first use of a flattened name, is collective over the root's members.
 * Errors: ARGUMENT (unknown or overlapping names, not in root order; a name of other axes; parts with flatten or of several
 * axes), TOPOLOGY (product of parts), STATE (not a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_derive(xd_mesh *mesh, const xd_mesh_derive_desc *desc, xd_mesh **out);

/* Compares a hash over the group. Collective. `what` names it in the message.
 * Errors: MISMATCH on every rank, naming those that differ from rank 0. */
XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what);

#endif
