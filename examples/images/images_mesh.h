/* images_mesh.h - the ranks of the demonstration of image distillation, by what they share. */
#ifndef IMAGES_MESH_H
#define IMAGES_MESH_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IMAGES_MOST_RANKS = 8 };

/* data * cp ranks, those of cp side by side. */
typedef struct images_mesh {
    int data;   /* ranks with other pictures */
    int cp;     /* ranks with other parts of the same pictures: 1, 2 or 4 */
    bool fsdp;  /* networks are held in parts by data ranks; otherwise whole, DDP */
    int groups; /* with fsdp: of data ranks, each of which holds networks anew (HSDP); 0 -> one */
} images_mesh;

/* What --mesh says, as "fsdp=2" or "hsdp=2x1,cp=2"; false when that is none of at most IMAGES_MOST_RANKS ranks. */
bool images_mesh_parse(const char *text, images_mesh *out);

/* A rank's groups. Comms are NULL where they would be of one rank, but for `data`. */
typedef struct images_ranks {
    xd_comm *world;
    xd_comm *data;             /* of whoever has the same part of pictures */
    xd_comm *group, *replicas; /* HSDP: data ranks of one group, and those at the same place in others */
    xd_comm *cp;
    bool fsdp;
} images_ranks;

/* images_ranks_close in any case, of ranks that were zero before. Collective. */
xd_result images_ranks_open(xd_comm *world, const images_mesh *mesh, images_ranks *out);
void images_ranks_close(images_ranks *ranks);

#ifdef __cplusplus
}
#endif

#endif /* IMAGES_MESH_H */
