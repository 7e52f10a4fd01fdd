/* rank.h - what a rank of a run has, for run.c and, where the network is cut into stages, for stages.c. */
#ifndef COMPOSE_RANK_H
#define COMPOSE_RANK_H

#include "run.h"

enum { PARTS = 32, STAGES = 4 };

/* One rank of one part of a run: the steps [begin, end) under a layout. */
typedef struct rank_run {
    const compose_config *config;
    const compose_layout *layout;
    compose_result *out;
    const char *directory;
    int begin, end;
    bool last;
} job;

typedef struct rank {
    const job *job;
    xd_ctx *ctx;
    xd_comm *world, *data, *replicas;
    xd_comm *tp, *cp, *members; /* NULL -> this rank alone; the last share the experts */
    xd_comm *rows;              /* whoever has the same columns */
    xd_comm *self;
    bool
        cut; /* these, members and ranks of experts are cut from the grid's dp, where cp is not among data ranks */
    sharing *share;
    xd_ctx *home; /* of this rank's parts, and the world for it */
    xd_comm *over;
    toy toy;                    /* of a pipeline: the whole, for its names */
    float *storage, *gradients; /* the caller's */
    xd_parallel *parallel;      /* NULL of a pipeline */
    xd_grid *grid;              /* of a pipeline, of experts, of ranks that share leaves */
    xd_groups groups;           /* its, but that data ranks are dp alone */
    xd_expert_ranks experts;
    /* Of a pipeline: */
    toy stages[STAGES], sources[STAGES]; /* sources hold what the init callback of a build loads */
    int stage_count;
    xd_built *built;
    xd_pipeline *pipeline;
    int64_t slots;
    int step;
    xd_queue *gathers, *reductions, *sends;
    int64_t own, opened, most; /* leaves; more than are opened where rows come to experts */
    toy_kept *kept;            /* [most], or [slots] */
    int64_t rows_here, columns;
    float *logits, *teacher; /* [most, rows here, columns]; logits [slots, rows here, columns] */
    int64_t labels[TOY_MICRO_BATCHES * TOY_ROWS];
    xd_vocab *vocab;
    xd_param params[PARTS];
    xd_tensor_part parts[PARTS];
    int64_t count;
    xd_optimizer *optimizer;
    xd_ema *averages[COMPOSE_AVERAGES];
    double loss;
} rank;

/* The groups of this rank; data and rows are those of the world where nothing is shared. Collective over the world. */
xd_result groups_make(rank *r);
void groups_close(rank *r);

/* The wrappers' settings. */
typedef struct wrap_settings {
    xd_ddp_desc ddp;
    xd_fsdp_desc fsdp;
} wrap_settings;
wrap_settings settings_of(const rank *r);
bool is_fsdp(const compose_layout *layout);

/* The loss of leaves [k, k + n) and its gradient, over their logits; of those that share them, or of all ranks' leaves. */
xd_result take_loss(rank *r, int64_t k, int64_t n, float *logits, bool all);

/* Whether the network is in stages, perhaps of one rank, and then: */
bool is_staged(const rank *r);
xd_result stages_make(rank *r); /* groups and queues are there */
void stages_close(rank *r);
const xd_parallel *stages_lead(const rank *r); /* one of the wrappers: they deal leaves alike */
xd_result stages_list(rank *r);
xd_result stages_step(rank *r, int step); /* until gradients are complete */
xd_result stages_infer(rank *r, int step);
xd_result stages_publish(rank *r);
xd_result stages_thaw(rank *r, const char *name);

/* Values before the wrap, or after it: of a sealed model, and of this rank's parts. Collective over the world, or,
 * of stages, local. */
xd_result fill_model(const rank *r, xd_model *model);
xd_result fill_parts(rank *r);

/* Weights leave for files of others, and come back from there. Collective over r->over. */
xd_result travel_out(const rank *r);
xd_result travel_in(const rank *r);

#endif
