/* role.h - a network of a run: its model, wrapper, optimizer and average. */
#ifndef EQUIVALENCE_DMD_ROLE_H
#define EQUIVALENCE_DMD_ROLE_H

#include "run.h"
#include "strip.h"

#include "../../examples/nn/nn_patch.h"

enum { ROLE_WEIGHTS = 40, ROLE_QUEUES = 2, PATCH_SIDE = 4, PATCH_LABELS = 3 };

/* The groups of a run's ranks. */
typedef struct role_ranks {
    xd_comm *world, *data; /* ranks with other samples */
    xd_comm *group,
        *replicas; /* HSDP: data ranks of this one's group, and those with the same part in others */
    strip_cut cut;
    nn_split *split; /* RUN_PIECES */
    xd_queue *queues[2][ROLE_QUEUES]; /* over data and over group: gathers, reductions; NULL without */
} role_ranks;

typedef struct role {
    xd_model *model;
    nn_patch *patch;
    strip *strip;
    judge *judge;
    xd_network network;
    xd_parallel *parallel;
    xd_param params[ROLE_WEIGHTS];
    xd_tensor_part parts[ROLE_WEIGHTS];
    int64_t count;
    xd_optimizer *optimizer; /* NULL, as the average: the teacher's */
    xd_ema *average;
} role;

xd_result role_ranks_open(xd_comm *world, const run_config *config, role_ranks *out);
void role_ranks_close(role_ranks *ranks);

/* The pixels of a sample that this rank has with RUN_PATCH. */
xd_interval role_pixels(const role_ranks *ranks);

/* Makes and wraps a network, and what trains it. `fresh`: it gets its first values; otherwise a checkpoint is loaded next. role_close
 * in any case, of a role that was zero before. Collective. */
xd_result role_open(const role_ranks *ranks, const run_config *config, xd_dmd_role which, bool fresh,
                    role *out);
void role_close(role *r);

/* What a checkpoint holds of a role. */
xd_checkpoint_network role_saved(const role *r, xd_dmd_role which, xd_checkpoint_average *average);

#endif
