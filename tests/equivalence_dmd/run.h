/* run.h - a distillation of small networks under wrappers, and all that came out of it, whole. */
#ifndef EQUIVALENCE_DMD_RUN_H
#define EQUIVALENCE_DMD_RUN_H

#include "xdistill.h"

enum { RUN_STEPS = 10, RUN_LEAVES = 8, RUN_SAMPLES = 16, RUN_RECIPES = 3, RUN_IMAGES = 8, RUN_RANKS = 8 };

typedef enum run_net {
    RUN_PATCH = 0, /* the patch transformer of examples/nn */
    RUN_STRIP,     /* strip.h */
    RUN_PIECES     /* the patch transformer with sums over heads and inner width in pieces, and more of both */
} run_net;

typedef enum run_wrap {
    RUN_DDP = 0,
    RUN_SHARDED, /* DDP with a sharded optimizer */
    RUN_FSDP,    /* each leaf is sent */
    RUN_WHOLE,   /* FSDP: a rank adds up its leaves and sends once */
    RUN_HSDP,
    RUN_HSDP_WHOLE
} run_wrap;

/* Settings of a distillation, `recipe`; and how the ranks hold its networks: dp * cp * tp of them, those of tp side by side. */
typedef struct run_config {
    run_net net;
    int recipe;
    int leaves; /* of a step: the samples are as many with all numbers */
    int dp, cp, tp;
    int groups; /* HSDP: groups of data ranks */
    run_wrap wraps[XD_DMD_ROLES];
    xd_queue_form queues;
    bool sick; /* a real sample of one step holds a NaN */
    xd_reduction reduction;
} run_config;

typedef struct run_result {
    uint64_t state[XD_DMD_TEACHER]; /* hashes of each role's weights, moments and averages */
    xd_dmd_values values[RUN_STEPS];
    /* Sums over all samples, elements and calls of networks, of numbers made from their places and bits: of pure noise and all
     * times; of all that networks are given. By rank of tp, which all see the same. */
    uint64_t drawn[RUN_RANKS][RUN_STEPS], seen[RUN_RANKS][RUN_STEPS];
    uint64_t images[RUN_RANKS]; /* of what the student generates afterwards */
    xd_dmd_record record;
    int columns; /* ranks of tp */
    int begun;   /* the first step; those before were another process's */
} run_result;

/* A run that ranks share. */
typedef struct run_job {
    const run_config *config;
    run_result *out;
    const char *root; /* of checkpoints; NULL -> none */
    bool resumes;     /* goes on from the newest of them; otherwise one is saved after each step */
    int news;         /* rank 0 writes the steps that it has made here, each a byte; -1 -> nowhere */
} run_job;

/* Runs on threads; false with a message. */
bool run_on_threads(const run_job *job, char message[512]);

/* Runs one configuration in a process of its own, which is killed after a drawn step, and goes on with the other one. */
bool run_killed(const run_config *first, const run_config *second, uint64_t draw, run_result *out,
                char message[512]);

/* Whether all is bit-equal from step b->begun on; if not, `message` says what differs first. In DETERMINISTIC mode what was drawn is,
 * and losses are close. */
bool run_equal(const run_result *a, const run_result *b, char message[512]);
bool run_close(const run_result *a, const run_result *b, char message[512]);

/* "strip recipe 0 dp=2 ..." */
void run_name(const run_config *config, char name[160]);

#endif
