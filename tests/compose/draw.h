/* draw.h - what a configuration is drawn from, and which pairs of features came together. */
#ifndef COMPOSE_DRAW_H
#define COMPOSE_DRAW_H

#include "run.h"

/* What is drawn: a number between two bounds; the lowest is the plainest. */
typedef struct feature {
    const char *name;
    int least, most;
} feature;

enum {
    RANKS,
    GROUPS,
    WRAP,
    NESTED,
    OWN,
    RESHARD,
    QUEUES,
    OFFLOAD,
    RANKS2,
    GROUPS2,
    WRAP2,
    NESTED2,
    OWN2,
    RESHARD2,
    QUEUES2,
    OFFLOAD2,
    STOP,
    STEPS,
    LEAVES,
    HIDDEN,
    INNER,
    LAYERS,
    VOCAB,
    ROWS,
    TIED,
    FROZEN,
    TOGETHER,
    RECOMPUTE,
    INFERENCE,
    CLIP,
    AVERAGES,
    OPTIMIZER,
    SOFT,
    SMOOTHING,
    IGNORED,
    HALF,
    SENT,
    SKIPS,
    THAW,
    DIVIDE,
    PP,
    STAGES,
    UNEVEN,
    PP2,
    STAGES2,
    UNEVEN2,
    COPIES,
    EXPERTS,
    EP,
    EP2,
    PUSHED,
    PUSHED2,
    NODE,
    NODE2,
    IMPORTS,
    DIVERGENCE,
    TP,
    CP,
    PADDED,
    TP2,
    CP2,
    PADDED2,
    FILLED,
    HOOKED,
    FEATURES
};

extern const feature features[FEATURES];

/* Makes what does not go together the nearest that does. */
void settle(int *f);

compose_config config_of(const int *f);
void print_config(const int *f);

/* The configuration of a seed; every second one, while some pair was drawn less than DRAW_GOAL times, is one with the rarest. */
enum { DRAW_GOAL = 20 };
void draw(uint64_t seed, int *f);

/* Counts the pairs of a configuration that is run. */
void count_pairs(const int *f);

/* How often the rarest pair was drawn, in words, and each pair with `table`. False when one that does not go together was drawn, or
 * less often than `goal` one that does. */
bool print_pairs(bool table, long goal);

#endif
