#ifndef XDI_COMM_MESH_H
#define XDI_COMM_MESH_H

#include "comm/collective.h"
#include "comm/topology.h"

/* Named axes over a world, with communicators for axes and, on request, sets of axes: docs/concepts.md. A mesh of
 * xd_mesh_create, or of a split, is a root; meshes derived from it use its names. Destroy meshes in any order, before
 * the world. */
typedef struct xd_mesh xd_mesh;

/* Axes and ranks. */
typedef struct xd_mesh_desc {
    xd_axis axes[XD_MESH_AXES_MAX]; /* slowest first, up to the first without name and size */
    const int *ranks;               /* [rank_count] of the world; NULL -> all in order */
    int rank_count;
    int world_size;              /* expected product of the sizes; 0 -> not checked */
    const xd_topology *topology; /* instead of axes and ranks; may be NULL */
    xd_mesh *share;              /* mesh of this world, to use its communicators; may be NULL */
    /* Axis names joined by '-', fastest first ("tp-cp-ep-dp-pp"), for `axes` in any order. Omitted axes of size 1
     * become slowest. NULL -> none; ignored with `topology`. */
    const char *order;
} xd_mesh_desc;

/* Creates a mesh over ranks of `world`, which may be a part of the job. Collective over the world: ranks outside the
 * mesh call too.
 *
 * Errors: ARGUMENT (names; sizes; two of -1; repeated or unknown ranks; world_size; share; order: unknown or repeated
 * names, omitted axes above 1, "cp" and "ep" above 1), TOPOLOGY (sizes do not fit the ranks), MISMATCH (names the
 * ranks), MEMORY. */
XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out);

/* Destroys the mesh. Local. Communicators live until the last mesh that shares them is destroyed. */
XD_API void xd_mesh_destroy(xd_mesh *mesh);

/* Returns the mesh's own axes and ranks. Local. */
XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh);

/* Returns this rank's coordinate on an axis; axis NULL -> the only axis. Local. Errors: ARGUMENT (axis), STATE (not
 * a member). */
XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate);

/* Returns this rank's communicator over the named axes: "tp", "dp,cp" in any order, or a derived name; axes NULL -> the
 * only axis. Names are the root's. Ranks have the root's order, its last axis fastest. The mesh owns the communicator.
 *
 * The first call for several axes is collective over the root's members; others are local. Errors: ARGUMENT, STATE (not
 * a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out);

/* Derived from the root. */
typedef struct xd_mesh_derive_desc {
    const char *axes;     /* required: names of the root, in its order: "dp,tp" */
    bool flatten;         /* one row-major axis over all */
    const char *name;     /* of that axis; NULL -> its axes joined by '_' */
    const xd_axis *parts; /* [part_count], slowest first, which split the one axis `axes`; NULL -> none */
    int part_count;
} xd_mesh_derive_desc;

/* Derives a mesh of the same ranks: some axes through this rank, several as one, or all with one split.
 *
 * A sub-mesh is local. A split, and the first use of a flattened name, is collective over the root's members.
 * Errors: ARGUMENT (unknown or overlapping names, not in root order; a name of other axes; a ninth flattened name;
 * parts with flatten or of several axes), TOPOLOGY (product of parts), STATE (not a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_derive(xd_mesh *mesh, const xd_mesh_derive_desc *desc, xd_mesh **out);

/* Compares a hash over the group. Collective. `what` names it in the message. Errors: MISMATCH on every rank, naming
 * those unlike rank 0; MEMORY. */
XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what);

#endif
