/* run.h - one training run of the toy under one configuration, and what came out of it. */
#ifndef COMPOSE_RUN_H
#define COMPOSE_RUN_H

#include "toy.h"

typedef enum compose_wrap {
    WRAP_DDP,
    WRAP_SHARDED,
    WRAP_FSDP,
    WRAP_FSDP_WHOLE,
    WRAP_HSDP,
    WRAP_COUNT
} compose_wrap;

/* How the ranks hold the model. */
typedef struct compose_layout {
    int ranks, groups; /* groups of HSDP, or of ranks that share an optimizer under DDP */
    int wrap;
    int nested;  /* units inside units */
    int own;     /* DDP: storage of the caller's; 2: leaves without brackets too */
    int reshard; /* xd_fsdp_desc.reshard_ranks */
    int queues;  /* 1 inline, 2 workers; under FSDP one or two units are gathered ahead then */
    int offload; /* FSDP: parts, and all that is made of them, in another context */
    int pp;      /* stages one after another, each with `ranks` ranks */
    int stages;  /* of each rank, interleaved */
    int ep;      /* ranks that share the experts; 1 without experts */
    int node;    /* ranks are processes */
    int uneven; /* how layers are dealt: 0 evenly; all 1 in the first chunk, 2 in the last; 3 none in either of them */
    int tp, cp; /* ranks that share a leaf: each of `ranks` is so many */
    int padded; /* rows that are stored beyond the vocabulary */
    int late;   /* values that models hold before the wrap come after it: of one rank alone */
} compose_layout;

/* Everything a run is made from. */
typedef struct compose_config {
    toy_sizes size;
    int leaves, steps;
    int together;  /* all forwards before the first backward */
    int recompute; /* layers once more in the backward */
    int inference; /* a pass without a backward after each step */
    int clip, averages, optimizer;
    int soft;       /* 0 labels; 1 a teacher; 2 both */
    int divergence; /* from the teacher: xd_divergence */
    int smoothing, ignored;
    int sent; /* values are sent as BF16, or F16 with 2, and shown as F32; FSDP on all layouts then, also of one rank */
    int thaw; /* before this step, counted from 1, all frozen weights but the shifts of later layers are thawed; 0 -> never */
    int divide; /* gradients: 1 averaged; 2 divided before and after the sums */
    int filled; /* models hold values when they are wrapped: 1 written, 2 inherited from other memory, 3
                * imported */
    int hooked; /* xd_build loads these values: 1 in a hook before the wrap, 2 in its init callback, 3 there into
                 * XD_STORAGE_META; under FSDP in the hook */
    compose_layout layout;
    int imports; /* weights go on in files of others: 1 a model directory, 2 pieces of all ranks */
    int stop;    /* after so many steps the run is saved, and goes on in the next layout; 0 -> never */
    compose_layout then;
} compose_config;

enum { COMPOSE_STEPS = 4, COMPOSE_ROOM = 6144, COMPOSE_AVERAGES = 2 };

/* Whole, in the order of the weights. */
typedef struct compose_result {
    int64_t count;
    float values[COMPOSE_ROOM], first[COMPOSE_ROOM], second[COMPOSE_ROOM];
    float averages[COMPOSE_AVERAGES][COMPOSE_ROOM];
    double norms[COMPOSE_STEPS], losses[COMPOSE_STEPS];
    double leaf_losses[COMPOSE_STEPS][TOY_MICRO_BATCHES]; /* unless all forwards come together */
    char message[600];                             /* of a run that failed */
} compose_result;

int compose_ranks(const compose_layout *layout);

/* False with a message when the run fails. `directory` is for its checkpoint. */
bool compose_run(const compose_config *config, const char *directory, compose_result *out);

/* What differs first, or NULL. */
const char *compose_compare(const compose_config *config, const compose_result *a, const compose_result *b);

#endif
