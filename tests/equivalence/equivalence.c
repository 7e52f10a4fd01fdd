/* equivalence.c - the transformer of examples/nn under every wrapper has the bits of one rank: a list of runs, one a line.
 *
 *     equivalence [--few]
 *
 * Twenty steps of 24 micro-batches each. In INVARIANT mode weights, optimizer state, averages, losses and norms must have the
 * bits of one rank, and planned bytes must be those that the allocator counted; what is not so is named. Every
 * thirteenth configuration, of those whose ranks share sequences every fourth, runs in DETERMINISTIC mode as well, within bounds. */
#include "train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TRAIN_MOST = 800, EQUIVALENCE_RANKS = 8 };

static train_config list[TRAIN_MOST];
static int listed;
static train_result one[2], staged[3], other;    /* staged: as it is, with bf16, with copies */
static train_result blocks[4], staged_blocks[4]; /* with blocks of positions: bf16 + 2 * lengths */

static void add(train_wrap wrap, int dp, int tp, int groups, bool whole) {
    for (int variant = 0; variant < 4; variant++) {
        train_config c;
        memset(&c, 0, sizeof c);
        c.wrap = wrap;
        c.dp = dp;
        c.tp = tp;
        c.groups = groups;
        c.whole = whole;
        c.bf16 = variant % 2 == 1;
        c.workers = variant >= 2;
        c.reduction = XD_REDUCTION_INVARIANT;
        c.steps = TRAIN_STEPS;
        list[listed++] = c;
    }
}

/* Groups whose leaves are a power of two: of 24, three groups of 8, or six of 4. */
static void add_mesh(int dp, int tp) {
    add(TRAIN_DDP, dp, tp, 0, false);
    add(TRAIN_SHARDED, dp, tp, 0, false);
    add(TRAIN_FSDP, dp, tp, 0, false);
    add(TRAIN_FSDP, dp, tp, 0, true);
    for (int groups = 3; groups <= 6; groups += 3)
        if (dp % groups == 0) {
            add(TRAIN_HSDP, dp, tp, groups, false);
            add(TRAIN_HSDP, dp, tp, groups, true);
        }
}

/* Pipelines: of two ranks, of four, and of two with two virtual stages; uneven ones, and with copies of the embedding. */
static void add_pipeline(train_wrap wrap, int pp, int virtual_stages, int dp, int tp) {
    train_config c;
    memset(&c, 0, sizeof c);
    c.wrap = wrap;
    c.pp = pp;
    c.virtual_stages = virtual_stages;
    c.dp = dp;
    c.tp = tp;
    c.bf16 = listed % 2 == 1;
    c.workers = listed % 3 == 1;
    c.uneven = pp * virtual_stages > 2 && listed % 4 >= 2;
    c.copies = wrap != TRAIN_FSDP && !c.bf16 && listed % 3 != 0;
    c.reduction = XD_REDUCTION_INVARIANT;
    c.steps = TRAIN_STEPS;
    list[listed++] = c;
}

static void add_pipelines(void) {
    static const train_wrap wraps[] = { TRAIN_DDP, TRAIN_SHARDED, TRAIN_FSDP };
    for (int i = 0; i < 3; i++) {
        for (int dp = 1; dp <= 3; dp++) {
            add_pipeline(wraps[i], 2, 1, dp, 1);
            add_pipeline(wraps[i], 2, 2, dp, 1);
        }
        add_pipeline(wraps[i], 4, 1, 2, 1);
        add_pipeline(wraps[i], 2, 2, 2, 2);
    }
}

/* Pipelines whose ranks share sequences. */
static void add_shared_pipeline(train_wrap wrap, int pp, int virtual_stages, int cp, int dp) {
    add_pipeline(wrap, pp, virtual_stages, dp, 1);
    train_config *c = &list[listed - 1];
    c->cp = cp;
    c->lengths = listed % 2 == 1;
    c->copies = false;
}

static void add_shared_pipelines(void) {
    static const train_wrap wraps[] = { TRAIN_DDP, TRAIN_SHARDED, TRAIN_FSDP };
    for (int i = 0; i < 3; i++) {
        add_shared_pipeline(wraps[i], 2, 1, 2, 1);
        add_shared_pipeline(wraps[i], 2, 2, 2, 2);
        add_shared_pipeline(wraps[i], 2, 1, 3, 1);
    }
    add_shared_pipeline(TRAIN_FSDP, 4, 1, 2, 1);
}

/* Ranks that share sequences, of eleven positions, or of three to thirteen. */
static void add_sequences(train_wrap wrap, int dp, int cp, int tp, int groups) {
    train_config c;
    memset(&c, 0, sizeof c);
    c.wrap = wrap;
    c.dp = dp;
    c.cp = cp;
    c.tp = tp;
    c.groups = groups;
    c.lengths = listed % 2 == 1;
    c.whole = wrap >= TRAIN_FSDP && listed % 4 < 2;
    c.bf16 = listed % 5 == 1;
    c.workers = listed % 3 == 1;
    c.recompute = listed % 7 == 3;
    c.reduction = XD_REDUCTION_INVARIANT;
    c.steps = TRAIN_STEPS;
    list[listed++] = c;
}

/* Seven for each wrapper, so that those of FSDP have either kind of sequences in turn. */
static void add_all_sequences(void) {
    static const train_wrap wraps[] = { TRAIN_DDP, TRAIN_SHARDED, TRAIN_FSDP, TRAIN_FSDP };
    for (int i = 0; i < 4; i++) {
        for (int dp = 1; dp <= 4; dp++) add_sequences(wraps[i], dp, 2, 1, 0);
        for (int dp = 1; dp <= 2; dp++) add_sequences(wraps[i], dp, 4, 1, 0);
        add_sequences(wraps[i], 2, 2, 2, 0);
    }
    add_sequences(TRAIN_HSDP, 3, 2, 1, 3);
    add_sequences(TRAIN_FSDP, 2, 3, 1, 0);
    add_sequences(TRAIN_FSDP, 1, 8, 1, 0);
}

static void fill_list(void) {
    add_pipelines();
    for (int dp = 1; dp <= EQUIVALENCE_RANKS; dp++) add_mesh(dp, 1);
    for (int tp = 2; tp <= EQUIVALENCE_RANKS; tp++)
        for (int dp = 1; dp * tp <= EQUIVALENCE_RANKS; dp++) add_mesh(dp, tp);
    add_all_sequences();
    add_shared_pipelines();
}

/* ---- runs ---- */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static train_config alone(bool bf16, xd_reduction reduction) {
    train_config c;
    memset(&c, 0, sizeof c);
    c.dp = c.tp = 1;
    c.bf16 = bf16;
    c.reduction = reduction;
    c.steps = TRAIN_STEPS;
    return c;
}

static const train_result *reference(const train_config *c) {
    if (c->cp) return &(c->pp ? staged_blocks : blocks)[c->bf16 + 2 * c->lengths];
    return c->pp ? &staged[c->bf16 + 2 * c->copies] : &one[c->bf16];
}

static bool run(const train_config *c) {
    char name[TRAIN_NAME], message[512] = "the bits of one rank";
    const double begin = seconds_now();
    const bool ok = train_on_threads(c, &other, message) && train_equal(reference(c), &other, message);
    train_name(c, name);
    printf("%-6s %s  %.2f s  %s\n", ok ? "ok" : "FAILED", name, seconds_now() - begin, message);
    return ok;
}

/* One rank of each kind. */
static bool run_references(void) {
    char message[512] = "";
    bool ok = true;
    for (int bf16 = 0; bf16 < 2 && ok; bf16++) {
        const train_config c = alone(bf16 != 0, XD_REDUCTION_INVARIANT);
        ok = train_on_threads(&c, &one[bf16], message);
    }
    for (int i = 0; i < 3 && ok; i++) {
        train_config c = alone(i == 1, XD_REDUCTION_INVARIANT);
        c.pp = 1;
        c.copies = i == 2;
        ok = train_on_threads(&c, &staged[i], message);
    }
    for (int i = 0; i < 8 && ok; i++) {
        train_config c = alone(i % 2 == 1, XD_REDUCTION_INVARIANT);
        c.cp = 1;
        c.lengths = i % 4 >= 2;
        c.pp = i >= 4;
        ok = train_on_threads(&c, i < 4 ? &blocks[i] : &staged_blocks[i - 4], message);
    }
    if (!ok) fprintf(stderr, "one rank: %s\n", message);
    return ok;
}

/* Sums in another order move a weight by less than 1e-2 in 20 steps, a loss by less than 1e-3. */
static bool run_closely(const train_config *invariant) {
    train_config c = *invariant;
    char name[TRAIN_NAME], message[512] = "";
    double losses = 0.0, weights = 0.0;
    c.reduction = XD_REDUCTION_DETERMINISTIC;
    bool ok = train_on_threads(&c, &other, message);
    if (ok) weights = train_apart(reference(&c), &other, &losses);
    ok = ok && weights <= 1e-2 && losses <= 1e-3;
    train_name(&c, name);
    printf("%-6s %s  DETERMINISTIC: weights within %.2g, losses within %.2g %s\n", ok ? "ok" : "FAILED", name,
           weights, losses, message);
    return ok;
}

int main(int argc, char **argv) {
    const bool few = argc > 1 && strcmp(argv[1], "--few") == 0;
    const double begin = seconds_now();
    int runs = 0, failed = 0;
    if (argc > 2 || (argc == 2 && !few)) return fprintf(stderr, "equivalence [--few]\n"), 2;
    fill_list();
    if (!run_references()) return 1;
    printf("one rank: loss %.6f to %.6f in f32, to %.6f in bf16\n", one[0].losses[0],
           one[0].losses[TRAIN_STEPS - 1], one[1].losses[TRAIN_STEPS - 1]);
    for (int i = 0; i < listed; i += few ? 7 : 1) {
        failed += !run(&list[i]);
        runs++;
        if (list[i].cp ? i % 4 != 1 : i % 13 != 5) continue;
        failed += !run_closely(&list[i]);
        runs++;
    }
    printf("%d runs, %d failed, %.1f s\n", runs, failed, seconds_now() - begin);
    return failed > 0;
}
