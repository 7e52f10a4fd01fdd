/* dmd_failures.h - a distillation on two ranks of which one rank's requests for memory fail, those of its networks too. */
#ifndef DMD_FAILURES_H
#define DMD_FAILURES_H

#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "dmd_scene.h"
#include "failing_heap.h"
#include "xd_test.h"

enum {
    RANKS = 2,
    BINS = 4,
    WARM_UPS = 1, /* a step of warm-up, before those of the recipe: */
    STEPS = 4,    /* all roles, the critics, and once more */
    ALL_STEPS = WARM_UPS + STEPS,
    MOST = 2000 /* failures of a call */
};

/* ---- a distillation whose networks and batches take memory each time ---- */

/* A network, asked through a function that needs memory of its own. */
typedef struct worker {
    xd_network network;
    xd_ctx *ctx;
} worker;

/* What one rank has. */
typedef struct part {
    xd_comm *world;
    xd_ctx *ctx;
    int rank;
    bool works; /* networks and batches take memory */
    dmd_net nets[XD_DMD_ROLES];
    worker workers[XD_DMD_ROLES];
    xd_dmd_desc desc;
    xd_dmd *dmd;
    dmd_rank batches;
} part;

/* What all ranks are to do, and how that went. */
typedef struct job {
    dmd_run run;
    bool works;
    int victim;       /* the rank whose requests fail */
    int64_t at;       /* the one that does, where a job has one of them */
    int64_t failures; /* of the victim */
    xd_result results[RANKS], last[RANKS];
    const char *root; /* of checkpoints */
} job;

static xd_result take(xd_ctx *ctx, void **memory) {
    *memory = xd_allocate(ctx, 32);
    XD_REQUIRE(ctx, *memory, XD_ERROR_MEMORY, "no room for 32 bytes of a network");
    return XD_OK;
}

typedef xd_result (*network_function)(void *user, const xd_network_call *call);

static xd_result work(const worker *w, network_function function, const xd_network_call *call) {
    void *memory;
    XD_TRY(take(w->ctx, &memory));
    const xd_result result = function(w->network.user, call);
    xd_release(w->ctx, memory);
    return result;
}

static xd_result work_forward(void *user, const xd_network_call *call) {
    return work((const worker *)user, ((const worker *)user)->network.forward, call);
}

static xd_result work_backward(void *user, const xd_network_call *call) {
    return work((const worker *)user, ((const worker *)user)->network.backward, call);
}

static xd_result work_penalty(void *user, const xd_network_call *call) {
    return work((const worker *)user, ((const worker *)user)->network.penalty, call);
}

static xd_result work_batch(void *user, int64_t leaf, xd_dmd_batch *batch) {
    part *p = (part *)user;
    void *memory;
    if (!p->works) return dmd_batch(&p->batches, leaf, batch);
    XD_TRY(take(p->ctx, &memory));
    const xd_result result = dmd_batch(&p->batches, leaf, batch);
    xd_release(p->ctx, memory);
    return result;
}

static void put_to_work(part *p) {
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        worker *w = &p->workers[role];
        xd_network *network = &p->desc.networks[role];
        w->network = *network;
        w->ctx = p->ctx;
        network->user = w;
        network->forward = work_forward;
        network->backward = work_backward;
        if (network->penalty) network->penalty = work_penalty;
    }
}

/* Roles and nets; not yet what is to be tested. */
static void open_part(part *p, xd_comm *world, job *j) {
    memset(p, 0, sizeof *p);
    p->world = world;
    p->ctx = xd_comm_ctx(world);
    p->rank = xd_comm_rank(world);
    p->works = j->works;
    p->batches.run = &j->run;
    CHECK_EQ_INT(dmd_make_all(world, &j->run, NULL, p->nets, &p->desc), XD_OK);
    if (j->works) put_to_work(p);
}

static void close_part(part *p) {
    xd_dmd_destroy(p->dmd);
    dmd_free_all(p->nets);
}

static inline job *new_job(bool works, bool fsdp) {
    job *j = (job *)calloc(1, sizeof *j);
    xd_dmd_desc *d = &j->run.desc;
    *d = dmd_settings(XD_DMD_ORIGINAL, 3);
    d->gan.weight = 0.5;
    d->gan.r1_weight = 2.0;
    d->gan.fdistill.on = true;
    d->gan.fdistill.bins = BINS;
    d->gan.fdistill.rate = 0.75;
    d->guided = true;
    d->guidance_scale = 1.5;
    d->rungs.roll_out = true;
    d->regression.substeps = 2;
    j->run.gan = true;
    j->run.fsdp = fsdp;
    j->run.poisoned = -1;
    j->works = works;
    return j;
}

/* Step s of a run: its steps of warm-up come first. */
static xd_result make_step(part *p, int s) {
    dmd_run *run = p->batches.run;
    xd_dmd_values values;
    memset(&values, 0, sizeof values);
    p->batches.step = s;
    const xd_result result = s < WARM_UPS ? xd_dmd_warm_up_step(p->dmd, work_batch, p, &values)
                                          : xd_dmd_step(p->dmd, work_batch, p, &values);
    if (result == XD_OK && p->rank == 0) run->values[s] = values;
    return result;
}

/* What is left of a run on all ranks, a hash on rank 0. */
static void note_end(part *p) {
    dmd_run *run = p->batches.run;
    CHECK_EQ_INT(dmd_hash_all(p->world, p->nets, run), XD_OK);
    if (p->rank == 0) run->record = xd_dmd_describe(p->dmd);
    if (p->rank == 0) CHECK_EQ_INT(xdi_dmd_bins(p->dmd, run->bins), XD_OK);
}

static inline bool same_end(const dmd_run *a, const dmd_run *b) {
    return a->hash == b->hash && memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(&a->record, &b->record, sizeof a->record) == 0 &&
           memcmp(a->bins, b->bins, sizeof a->bins) == 0;
}

/* ---- the same call again and again, with the next request failing ---- */

/* Notes what a rank's call has come to; true when the victim's has not failed. */
static inline bool note_result(part *p, job *j, int64_t n, xd_result result) {
    const xd_error *error = xd_last_error(p->ctx);
    heap_fails_in = 0;
    j->results[p->rank] = result;
    CHECK_EQ_INT(xd_barrier(p->world), XD_OK);
    const bool over = j->results[j->victim] == XD_OK;
    const xd_result wanted = over ? XD_OK : p->rank == j->victim ? XD_ERROR_MEMORY : XD_ERROR_PEER;
    if (result != wanted)
        printf("rank %d, request %lld of rank %d: %s\n", p->rank, (long long)n, j->victim,
               xd_result_name(result));
    CHECK_EQ_INT(result, wanted);
    if (!over && p->rank != j->victim) CHECK(error && error->culprit == j->victim);
    if (!over && p->rank == j->victim) j->failures++;
    CHECK_EQ_INT(xd_barrier(p->world), XD_OK);
    return over;
}

static inline void fail_in(const part *p, const job *j, int64_t n) {
    heap_fails_in = p->rank == j->victim ? n : 0;
}

#endif
