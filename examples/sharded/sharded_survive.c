/* sharded_survive.c - a leg whose processes are killed one after another, while the others go on, or all are started again:
 * what its ranks do then, and who kills them. */
#define _POSIX_C_SOURCE 200112L /* clock_gettime, kill */
#include "sharded.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the ranks ---- */

/* The largest mesh of the axes that a leg began with that as many ranks fill. Where their number does not divide, the pipeline is
 * given up first, tp then, cp last; HSDP becomes FSDP where there are no two groups. */
static void sharded_fit(sharded_leg *leg, const sharded_leg *begun, int ranks) {
    leg->pp = begun->pp;
    leg->vpp = begun->vpp;
    leg->wrap = begun->wrap;
    leg->axes = begun->axes;
    if (ranks % (leg->pp * leg->axes.cp * leg->axes.tp) != 0) leg->pp = leg->vpp = 1;
    if (ranks % (leg->axes.cp * leg->axes.tp) != 0) leg->axes.tp = 1;
    if (ranks % leg->axes.cp != 0) leg->axes.cp = 1;
    leg->ranks = ranks;
    leg->axes.dp = ranks / (leg->pp * leg->axes.cp * leg->axes.tp);
    if (leg->wrap == SHARDED_HSDP && leg->axes.dp % SHARDED_GROUPS != 0) leg->wrap = SHARDED_FSDP;
}

/* What a rank goes through. */
typedef struct sharded_life {
    sharded_job job;
    sharded_leg leg;
    sharded_rank *held;
    xd_comm *worlds[SHARDED_MOST_RANKS + 1]; /* each but the first its own */
    int count;
} sharded_life;

static xd_result sharded_run_as(sharded_life *life, const sharded_leg *leg) {
    life->job.leg = leg;
    life->job.demo.dp = leg->axes.dp;
    life->job.demo.cp = leg->axes.cp;
    life->job.demo.tp = leg->axes.tp;
    return sharded_run_on(life->worlds[life->count - 1], &life->job, &life->held);
}

/* Stages train only: at the end the same ranks take what they have come to, each the whole of it, and measure that. */
static xd_result sharded_run_world(sharded_life *life) {
    sharded_leg whole = life->leg;
    XD_TRY(sharded_run_as(life, &life->leg));
    if (whole.pp == 1) return XD_OK;
    whole.pp = whole.vpp = 1;
    whole.resume = true;
    sharded_fit(&whole, &whole, whole.ranks);
    return sharded_run_as(life, &whole);
}

/* The next world. Everything is made again over it, and ranks take more sequences each. They go on from the last step that
 * they have whole in memory, or else from the last checkpoint: then the steps since that are done again. */
static xd_result sharded_go_on(sharded_life *life, const sharded_leg *begun) {
    xd_comm *at = life->worlds[life->count - 1];
    const xd_error cause = *xd_last_error(xd_comm_ctx(at));
    const xd_result result = xd_comm_shrink(at, 0.0, &life->worlds[life->count]);
    if (result == XD_ERROR_STATE) /* nobody was lost: a rank has an error of its own */
        return XD_FAIL(xd_comm_ctx(at), cause.result, "%s", cause.message);
    XD_TRY(result);
    sharded_fit(&life->leg, begun, xd_comm_size(life->worlds[life->count++]));
    life->leg.resume = true;
    life->job.world++;
    return XD_OK;
}

/* All were started again, perhaps on fewer ranks. They have nothing in memory, and go on from the last checkpoint. */
static void sharded_begin_again(sharded_life *life, const sharded_leg *begun) {
    const char *restarts = getenv("XDRUN_RESTARTS");
    life->job.world = restarts ? atoi(restarts) : 0;
    life->leg.resume = life->job.world > 0;
    sharded_fit(&life->leg, begun, xd_comm_size(life->worlds[0]));
}

xd_result sharded_survive(xd_comm *world, const sharded_job *job) {
    sharded_life life;
    memset(&life, 0, sizeof life);
    life.job = *job;
    life.leg = *job->leg;
    life.worlds[life.count++] = world;
    if (life.leg.again) sharded_begin_again(&life, job->leg);
    xd_result result = sharded_run_world(&life);
    while (!life.leg.again && (result == XD_ERROR_PEER || result == XD_ERROR_TIMEOUT)) {
        result = sharded_go_on(&life, job->leg);
        if (result != XD_OK) break;
        result = sharded_run_world(&life);
    }
    if (result != XD_OK && life.count > 1) xd_comm_abort(life.worlds[life.count - 1]);
    sharded_rank_close(life.held);
    while (life.count > 1) xd_comm_destroy(life.worlds[--life.count]);
    return result;
}

/* ---- who kills them ---- */

static double sharded_clock(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sharded_wait(double seconds) {
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    (void)nanosleep(&t, NULL);
}

void sharded_draw_losses(sharded_leg *leg, uint64_t seed, int steps) {
    for (int i = 0; i < leg->loss_count; i++) {
        sharded_loss *loss = &leg->losses[i];
        loss->step = (int)(sample_random(seed, 3, (uint64_t)i) * steps);
        loss->which = sample_random(seed, 4, (uint64_t)i);
        loss->delay = sample_random(seed, 5, (uint64_t)i);
    }
}

/* The first rank of one of those that live; -1 while not all have told of themselves. */
static int sharded_choose(const sharded_leg *leg, const sharded_outcome *out, double which) {
    int living = 0;
    for (int r = 0; r < leg->ranks; r++) living += out->processes[r] > 0;
    if (living < leg->ranks - leg->fewer * out->lost) return -1;
    int k = (int)(which * living), rank = 0;
    while (out->processes[rank] == 0 || k-- > 0) rank++;
    return rank;
}

static void sharded_lose(const sharded_leg *leg, sharded_outcome *out) {
    const sharded_loss *loss = &leg->losses[out->lost];
    const sharded_news *first = &out->ranks[0];
    const int rank = sharded_choose(leg, out, loss->which);
    if (rank < 0) return;
    if (first->steps > 0) sharded_wait(loss->delay * first->seconds / first->steps);
    sharded_recovery *r = &out->recoveries[out->lost++];
    r->rank = rank;
    r->step = first->step;
    r->killed = sharded_clock();
    (void)kill((pid_t)out->processes[rank], SIGKILL);
    out->processes[rank] = 0;
    if (leg->again) memset(out->processes, 0, sizeof out->processes); /* the next have others */
}

void sharded_watch(const sharded_leg *leg, const sharded_news *news, sharded_outcome *out) {
    if (news->world == out->lost && (leg->again || out->lost == 0))
        out->processes[news->rank] = news->process;
    for (int i = 0; i < out->lost && i < news->world && news->steps > 0; i++) {
        sharded_recovery *r = &out->recoveries[i];
        if (r->seconds > 0.0) continue;
        r->seconds = sharded_clock() - r->killed;
        r->from = news->step - news->steps;
        r->place = news->place;
        r->inherited = news->inherited;
    }
    if (out->lost == leg->loss_count || out->ranks[0].world < out->lost) return;
    if (out->ranks[0].process > 0 && out->ranks[0].step >= leg->losses[out->lost].step)
        sharded_lose(leg, out);
}
