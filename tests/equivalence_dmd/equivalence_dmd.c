/* equivalence_dmd.c - ten steps of a distillation under every wrapper have the bits of one rank: a list of runs, one a line.
 *
 *     equivalence_dmd [--few]
 *
 * Student, fake score and discriminator train, a teacher guides; 16 samples in 8 leaves, or fewer. In INVARIANT mode the three
 * networks' weights, moments and averages, the values of each step, what each network was given, and images in the end must have the
 * bits of one rank; what is not so is named. */
#include "run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LIST_MOST = 200, LIST_RANKS = 8, ONE_MOST = 40 };

static run_config list[LIST_MOST];
static int listed;

/* ---- the list ---- */

static run_config *add(run_net net, int dp, int cp, int tp, run_wrap wrap) {
    static const xd_queue_form queues[] = { XD_QUEUE_INLINE, XD_QUEUE_WORKER };
    run_config *c = &list[listed];
    memset(c, 0, sizeof *c);
    c->net = net;
    c->recipe = listed % RUN_RECIPES;
    c->leaves = RUN_LEAVES;
    c->dp = dp;
    c->cp = cp;
    c->tp = tp;
    c->queues = queues[listed / 2 % 2];
    c->reduction = XD_REDUCTION_INVARIANT;
    for (int role = 0; role < XD_DMD_ROLES; role++) c->wraps[role] = wrap;
    listed++;
    return c;
}

static void add_plain(void) {
    for (int dp = 1; dp <= LIST_RANKS; dp++)
        for (int wrap = RUN_DDP; wrap <= RUN_WHOLE; wrap++) add(RUN_PATCH, dp, 1, 1, (run_wrap)wrap);
    for (int dp = 1; dp <= LIST_RANKS; dp *= 2)
        for (int wrap = RUN_DDP; wrap <= RUN_WHOLE; wrap++)
            add(RUN_PATCH, dp, 1, 1, (run_wrap)wrap)->queues = XD_QUEUE_AUTO;
}

/* Groups whose leaves are a power of two. */
static void add_hybrid(void) {
    static const int meshes[][2] = { { 2, 2 }, { 4, 2 }, { 4, 4 }, { 6, 2 }, { 8, 2 }, { 8, 4 } };
    for (int i = 0; i < 6; i++)
        for (int wrap = RUN_HSDP; wrap <= RUN_HSDP_WHOLE; wrap++)
            add(RUN_PATCH, meshes[i][0], 1, 1, (run_wrap)wrap)->groups = meshes[i][1];
    for (int i = 0; i < 2; i++) add(RUN_STRIP, 4, 1 + i, 2 - i, RUN_HSDP)->groups = 2;
}

/* One leaf for each data rank, so fewer and larger ones. */
static void add_single(void) {
    for (int dp = 2; dp <= 4; dp *= 2)
        for (int wrap = RUN_DDP; wrap <= RUN_WHOLE; wrap++)
            add(RUN_PATCH, dp, 1, 1, (run_wrap)wrap)->leaves = dp;
}

/* Hidden units, elements, or both are cut. */
static void add_cut(void) {
    static const int meshes[][3] = { { 1, 1, 2 }, { 1, 1, 3 }, { 2, 1, 2 }, { 2, 1, 4 }, { 4, 1, 2 },
                                     { 1, 1, 8 }, { 3, 1, 2 }, { 1, 2, 1 }, { 1, 3, 1 }, { 2, 2, 1 },
                                     { 2, 4, 1 }, { 4, 2, 1 }, { 1, 8, 1 }, { 2, 3, 1 }, { 1, 2, 2 },
                                     { 2, 2, 2 }, { 1, 2, 4 }, { 1, 3, 2 } };
    for (int i = 0; i < 18; i++)
        for (int k = 0; k < 2; k++) {
            const run_wrap wrap = (run_wrap)((i + 2 * k) % 4);
            add(RUN_STRIP, meshes[i][0], meshes[i][1], meshes[i][2], wrap);
        }
    add(RUN_STRIP, 2, 1, 2, RUN_FSDP)->leaves = 2;
    add(RUN_STRIP, 2, 2, 1, RUN_FSDP)->leaves = 2;
}

/* Ranks share the tokens of the patch transformer's images. */
static void add_shared_tokens(void) {
    static const int meshes[][2] = { { 1, 2 }, { 1, 3 }, { 1, 4 }, { 1, 8 }, { 2, 2 }, { 2, 4 }, { 4, 2 }, { 3, 2 } };
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 2; k++)
            add(RUN_PATCH, meshes[i][0], meshes[i][1], 1, (run_wrap)((i + 2 * k) % 4));
    add(RUN_PATCH, 4, 2, 1, RUN_HSDP)->groups = 2;
    add(RUN_PATCH, 2, 2, 1, RUN_FSDP)->leaves = 2;
    add(RUN_PATCH, 2, 3, 1, RUN_WHOLE)->sick = true;
}

/* Ranks share its heads and inner width, and tokens too. */
static void add_pieces(void) {
    static const int meshes[][3] = { { 1, 1, 2 }, { 1, 1, 4 }, { 2, 1, 2 }, { 3, 1, 2 }, { 2, 1, 4 },
                                     { 1, 2, 2 }, { 2, 2, 2 }, { 1, 2, 4 }, { 1, 3, 2 } };
    for (int i = 0; i < 9; i++)
        for (int k = 0; k < 2; k++)
            add(RUN_PIECES, meshes[i][0], meshes[i][1], meshes[i][2], (run_wrap)((i + 2 * k + 1) % 4));
    add(RUN_PIECES, 4, 1, 2, RUN_HSDP)->groups = 2;
    add(RUN_PIECES, 2, 2, 2, RUN_WHOLE)->sick = true;
}

static void wrap_as(run_config *c, run_wrap fake, run_wrap judge, run_wrap teacher) {
    c->wraps[XD_DMD_FAKE_SCORE] = fake;
    c->wraps[XD_DMD_DISCRIMINATOR] = judge;
    c->wraps[XD_DMD_TEACHER] = teacher;
}

/* Roles under different wrappers. Those that train have their leaves in one order, a teacher has none. */
static void add_mixed(void) {
    run_config *c;
    wrap_as(add(RUN_PATCH, 4, 1, 1, RUN_DDP), RUN_DDP, RUN_DDP, RUN_FSDP);
    wrap_as(add(RUN_PATCH, 3, 1, 1, RUN_DDP), RUN_WHOLE, RUN_DDP, RUN_FSDP);
    wrap_as(add(RUN_PATCH, 5, 1, 1, RUN_SHARDED), RUN_FSDP, RUN_DDP, RUN_WHOLE);
    wrap_as(add(RUN_PATCH, 8, 1, 1, RUN_WHOLE), RUN_DDP, RUN_SHARDED, RUN_FSDP);
    wrap_as(c = add(RUN_PATCH, 6, 1, 1, RUN_DDP), RUN_WHOLE, RUN_DDP, RUN_FSDP);
    c->queues = XD_QUEUE_AUTO;
    wrap_as(add(RUN_PATCH, 2, 1, 1, RUN_FSDP), RUN_FSDP, RUN_FSDP, RUN_DDP);
    wrap_as(add(RUN_STRIP, 2, 2, 2, RUN_DDP), RUN_WHOLE, RUN_DDP, RUN_FSDP);
    wrap_as(add(RUN_STRIP, 3, 1, 2, RUN_WHOLE), RUN_DDP, RUN_SHARDED, RUN_DDP);
    wrap_as(add(RUN_STRIP, 3, 2, 1, RUN_DDP), RUN_SHARDED, RUN_WHOLE, RUN_FSDP);
    wrap_as(c = add(RUN_PATCH, 4, 1, 1, RUN_DDP), RUN_HSDP_WHOLE, RUN_DDP, RUN_HSDP);
    c->groups = 2;
    wrap_as(c = add(RUN_STRIP, 4, 2, 1, RUN_HSDP_WHOLE), RUN_WHOLE, RUN_SHARDED, RUN_FSDP);
    c->groups = 2;
}

static void add_sick(void) {
    add(RUN_PATCH, 4, 1, 1, RUN_DDP)->sick = true;
    add(RUN_PATCH, 3, 1, 1, RUN_FSDP)->sick = true;
    add(RUN_STRIP, 2, 2, 2, RUN_WHOLE)->sick = true;
    add(RUN_STRIP, 2, 3, 1, RUN_FSDP)->sick = true;
}

static void fill_list(void) {
    add_plain();
    add_hybrid();
    add_single();
    add_cut();
    add_shared_tokens();
    add_pieces();
    add_mixed();
    add_sick();
}

/* ---- one rank ---- */

typedef struct one_run {
    run_config config;
    run_result result;
} one_run;

static one_run ones[ONE_MOST];
static int one_count;

/* The run of one rank with the same settings; NULL with a message. */
static const run_result *find_one(const run_config *of, char message[512]) {
    run_config c;
    run_job job;
    memset(&c, 0, sizeof c);
    memset(&job, 0, sizeof job);
    c.net = of->net;
    c.recipe = of->recipe;
    c.leaves = of->leaves;
    c.dp = c.cp = c.tp = 1;
    c.sick = of->sick;
    c.reduction = XD_REDUCTION_INVARIANT;
    for (int i = 0; i < one_count; i++)
        if (memcmp(&ones[i].config, &c, sizeof c) == 0) return &ones[i].result;
    if (one_count == ONE_MOST) return snprintf(message, 512, "no room for another run of one rank"), NULL;
    ones[one_count].config = c;
    job.config = &c;
    job.out = &ones[one_count].result;
    job.news = -1;
    return run_on_threads(&job, message) ? &ones[one_count++].result : NULL;
}

/* What a sample draws depends on its number, not on its leaf: runs in fewer leaves have the draws of those in more. */
static int count_draws_apart(void) {
    int apart = 0;
    for (int i = 0; i < one_count; i++)
        for (int k = 0; k < i; k++) {
            const run_config *a = &ones[i].config, *b = &ones[k].config;
            if (a->net != b->net || a->recipe != b->recipe || a->sick || b->sick) continue;
            apart += memcmp(ones[i].result.drawn, ones[k].result.drawn, sizeof ones[i].result.drawn) != 0;
        }
    return apart;
}

/* Every role trains, rungs and noise are drawn, one step is skipped where one is to be. */
static bool check_ones(void) {
    int bad = count_draws_apart();
    for (int i = 0; i < one_count; i++) {
        const run_result *r = &ones[i].result;
        const int64_t *updates = r->record.updates;
        int skipped = 0, clipped = 0;
        for (int step = 0; step < RUN_STEPS; step++) {
            skipped += r->values[step].skipped;
            clipped += r->values[step].norms[XD_DMD_STUDENT] > 0.05;
            bad += r->drawn[0][step] == 0 || r->seen[0][step] == 0;
        }
        bad += skipped != ones[i].config.sick || clipped == 0 || r->images[0] == 0;
        bad += updates[XD_DMD_STUDENT] < 4 || updates[XD_DMD_FAKE_SCORE] < 4;
        bad += updates[XD_DMD_DISCRIMINATOR] != updates[XD_DMD_FAKE_SCORE];
    }
    printf("%-6s %d runs of one rank: all roles train, %s\n", bad ? "FAILED" : "ok", one_count,
           "a skipped step where there is a NaN, clipping, the same draws in any leaves");
    return bad == 0;
}

/* ---- runs ---- */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool run_line(const run_config *c) {
    char name[160], message[512] = "the bits of one rank";
    const bool invariant = c->reduction == XD_REDUCTION_INVARIANT;
    static run_result other;
    run_job job;
    memset(&job, 0, sizeof job);
    job.config = c;
    job.out = &other;
    job.news = -1;
    const run_result *one = find_one(c, message);
    const double begin = seconds_now();
    const bool ok =
        one && run_on_threads(&job, message) && (invariant ? run_equal : run_close)(one, &other, message);
    run_name(c, name);
    printf("%-6s %s  %.2f s  %s%s\n", ok ? "ok" : "FAILED", name, seconds_now() - begin,
           invariant ? "" : "DETERMINISTIC: the draws of one rank, ", message);
    return ok;
}

static bool kill_line(const run_config *first, const run_config *second, uint64_t draw) {
    char name[160], message[512] = "the bits of one rank";
    static run_result other;
    const run_result *one = find_one(first, message);
    const double begin = seconds_now();
    const bool ok =
        one && run_killed(first, second, draw, &other, message) && run_equal(one, &other, message);
    run_name(first, name);
    printf("%-6s killed: %s\n", ok ? "ok" : "FAILED", name);
    run_name(second, name);
    printf("       goes on from step %d: %s  %.2f s  %s\n", other.begun, name, seconds_now() - begin,
           message);
    return ok;
}

/* Pairs of meshes, one for the process that is killed and one for what goes on. */
static int run_kills(int *runs) {
    static const int meshes[][8] = { { RUN_PATCH, 2, 2, 1, RUN_FSDP, 3, 1, 1 },
                                     { RUN_PATCH, 2, 1, 1, RUN_SHARDED, 8, 1, 1 },
                                     { RUN_STRIP, 2, 1, 2, RUN_FSDP, 1, 4, 1 },
                                     { RUN_STRIP, 1, 3, 1, RUN_DDP, 2, 2, 2 } };
    static const run_wrap then[] = { RUN_DDP, RUN_WHOLE, RUN_DDP, RUN_FSDP };
    int failed = 0;
    for (int i = 0; i < 4; i++) {
        const int *m = meshes[i];
        listed = LIST_MOST - 2;
        run_config *first = add((run_net)m[0], m[1], m[2], m[3], (run_wrap)m[4]);
        run_config *second = add((run_net)m[0], m[5], m[6], m[7], then[i]);
        first->recipe = second->recipe = i % 2; /* not the one that trains on earlier samples */
        if (i == 2) second->queues = XD_QUEUE_WORKER;
        failed += !kill_line(first, second, (uint64_t)(i * 37 + 11));
        (*runs)++;
    }
    return failed;
}

int main(int argc, char **argv) {
    const bool few = argc > 1 && strcmp(argv[1], "--few") == 0;
    const double begin = seconds_now();
    int runs = 0, failed = 0;
    if (argc > 2 || (argc == 2 && !few)) return fprintf(stderr, "equivalence_dmd [--few]\n"), 2;
    fill_list();
    for (int i = 0; i < listed; i += few ? 7 : 1) {
        failed += !run_line(&list[i]);
        runs++;
        if (i % 26 != 7) continue;
        run_config c = list[i];
        c.reduction = XD_REDUCTION_DETERMINISTIC;
        failed += !run_line(&c);
        runs++;
    }
    failed += run_kills(&runs);
    failed += !check_ones();
    printf("%d runs, %d failed, %.1f s\n", runs, failed, seconds_now() - begin);
    return failed > 0;
}
