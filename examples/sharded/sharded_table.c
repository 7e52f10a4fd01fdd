/* sharded_table.c - the two runs side by side, and what each rank took. */
#include "sharded.h"

#include <stdio.h>

/* The mean over the ranks of a leg. */
static double sharded_mean_seconds(const sharded_leg *leg, const sharded_outcome *outcome) {
    double sum = 0.0;
    for (int r = 0; r < leg->ranks; r++)
        if (outcome->ranks[r].steps > 0) sum += outcome->ranks[r].seconds / outcome->ranks[r].steps;
    return sum / leg->ranks;
}

static void sharded_print_thing(const sharded_run *run, int i) {
    static const char *const names[SHARDED_THINGS] = { "weights", "optimizer", "average", "losses" };
    const sharded_comparison *c = &run->comparison;
    char told[64] = "bit-equal";
    if (!c->same_bits[i]) snprintf(told, sizeof told, "DIFFER, by up to %.3g", c->apart[i]);
    printf("  %-14s %16lld %s  %s\n", names[i], (long long)c->bytes[i],
           i == SHARDED_CURVE ? "steps" : "bytes", told);
}

/* Both runs side by side. */
static void sharded_print_runs(const sharded_run *run) {
    const sharded_leg *legs = run->legs;
    char ways[160];
    if (run->leg_count == SHARDED_LEGS)
        snprintf(ways, sizeof ways, "%s; then %s", legs[1].title, legs[2].title);
    else
        snprintf(ways, sizeof ways, "%s; then %d %s", legs[1].title, legs[1].ranks,
                 legs[1].again ? "started again" : "of them");
    printf("\n  %-14s %22s  %s\n", "", legs[0].title, ways);
    printf("  %-14s %22.6f  %.6f\n", "bits per byte", run->outcomes[0].ranks[0].bits_per_byte,
           run->outcomes[run->leg_count - 1].ranks[0].bits_per_byte);
    for (int i = 0; i < SHARDED_THINGS; i++) sharded_print_thing(run, i);
}

static void sharded_print_rank(const sharded_news *n) {
    const int steps = n->steps > 0 ? n->steps : 1;
    printf("  %4d %12.1f %12.1f %12.1f %10.3f %10.3f\n", n->rank, (double)n->planned / 1024.0,
           (double)n->counted / 1024.0, (double)n->bytes_sent / 1024.0 / steps, n->seconds / steps,
           n->wrapper_seconds / steps);
}

static void sharded_print_leg(const sharded_leg *leg, const sharded_outcome *outcome) {
    printf("\n%s, %d steps\n", leg->title, outcome->ranks[0].steps);
    printf("  %4s %12s %12s %12s %10s %10s\n", "rank", "planned KiB", "counted KiB", "sent KiB", "seconds",
           "in wrapper");
    for (int r = 0; r < leg->ranks; r++) sharded_print_rank(&outcome->ranks[r]);
}

void sharded_print_tables(const sharded_run *run) {
    const sharded_leg *legs = run->legs;
    const sharded_outcome *outcomes = run->outcomes;
    const double plain = sharded_mean_seconds(&legs[0], &outcomes[0]);
    sharded_print_runs(run);
    for (int i = 0; i < run->leg_count; i++) sharded_print_leg(&legs[i], &outcomes[i]);
    printf("\nBytes are those of weights, gradients, optimizer and average, and of what waits between the "
           "stages "
           "of a pipeline:\nas planned, and as the allocator counted them, with tables. Sent and seconds are "
           "of a "
           "step; \"in wrapper\" is the\npart in which weights were gathered and gradients summed, with the "
           "wait for "
           "others.\n\n");
    for (int i = 1; i < run->leg_count; i++)
        printf("%s: a step takes %.2f times that of one rank without a wrapper.\n", legs[i].title,
               sharded_mean_seconds(&legs[i], &outcomes[i]) / plain);
}
