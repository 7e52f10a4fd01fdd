/* run.c - what the ranks do, and how two runs are compared. */
#include "role.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct run_state;

/* A network that notes what it is given, and passes it on. */
typedef struct run_witness {
    struct run_state *run;
    xd_dmd_role role;
    xd_network network;
} run_witness;

typedef struct run_state {
    const run_job *job;
    xd_ctx *ctx;
    role_ranks ranks;
    role roles[XD_DMD_ROLES];
    run_witness witnesses[XD_DMD_ROLES];
    xd_dmd_desc desc;
    xd_dmd *dmd;
    int64_t elements, first_element; /* of a sample, here */
    int step;
    int64_t first; /* number of the first sample that networks are called with */
    float real[RUN_SAMPLES * STRIP_ELEMENTS];
    int32_t labels[RUN_SAMPLES], none[RUN_SAMPLES];
    uint64_t drawn[RUN_STEPS], seen[RUN_STEPS], images; /* this rank's part of the sums */
} run_state;

/* ---- what is given to networks ---- */

static uint64_t run_mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ (b * 0xff51afd7ed558ccdu)) * 0x9e3779b97f4a7c15u + b;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ x >> 29;
}

/* Does not depend on which rank has which elements and samples. */
static uint64_t run_sum(const run_state *s, uint64_t what, int64_t number, const float *x) {
    const uint64_t place = run_mix(what, (uint64_t)number);
    uint64_t sum = 0;
    for (int64_t i = 0; i < s->elements; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        sum += run_mix(run_mix(place, (uint64_t)(s->first_element + i)), bits);
    }
    return sum;
}

static uint64_t run_sum_time(uint64_t what, int64_t number, double time) {
    uint64_t bits;
    memcpy(&bits, &time, sizeof bits);
    return run_mix(run_mix(what, (uint64_t)number), bits);
}

/* Times once for each sample, by the first of the ranks that share it. What the student has at the first rung is pure noise. */
static void run_note(run_state *s, const run_witness *w, const xd_network_call *call) {
    const uint64_t what = (uint64_t)w->role * 2 + call->keep + 1;
    const double first_rung = (double)(float)s->desc.rungs.list[0];
    if (s->step < 0 || !call->hidden) return;
    for (int64_t i = 0; i < call->samples; i++) {
        const float *x = (const float *)call->hidden + i * s->elements;
        const uint64_t bits = run_sum(s, what, s->first + i, x);
        const bool pure = w->role == XD_DMD_STUDENT && call->times[i] == first_rung;
        if (s->first_element == 0) s->drawn[s->step] += run_sum_time(what, s->first + i, call->times[i]);
        if (pure) s->drawn[s->step] += bits;
        s->seen[s->step] += bits;
    }
}

static xd_result run_forward(void *user, const xd_network_call *call) {
    const run_witness *w = (const run_witness *)user;
    run_note(w->run, w, call);
    return w->network.forward(w->network.user, call);
}

static xd_result run_backward(void *user, const xd_network_call *call) {
    const run_witness *w = (const run_witness *)user;
    return w->network.backward(w->network.user, call);
}

/* What a leaf holds depends on its number and the step alone. Real samples are read by the discriminator, so a NaN waits for its
 * turn. */
static xd_result run_batch(void *user, int64_t leaf, xd_dmd_batch *batch) {
    run_state *s = (run_state *)user;
    const bool sick = s->job->config->sick && s->step == 3 + (s->job->config->recipe == 1);
    xd_philox random;
    memset(&random, 0, sizeof random);
    random.seed = 3;
    random.stream = XD_STREAM_USER + 1;
    random.step = (uint32_t)s->step;
    batch->samples = RUN_SAMPLES / s->job->config->leaves;
    batch->first = s->first = leaf * batch->samples;
    for (int64_t i = 0; i < batch->samples; i++) {
        float *x = s->real + i * s->elements;
        random.sample = (uint32_t)(batch->first + i);
        xd_philox_fill_normal(&random, s->first_element, s->elements, x);
        if (sick && batch->first + i == 10 && s->first_element == 0) x[1] = NAN;
        s->labels[i] = (int32_t)((batch->first + i + s->step) % (PATCH_LABELS - 1));
        s->none[i] = PATCH_LABELS - 1;
    }
    batch->real = s->real;
    batch->condition = s->labels;
    batch->negative = s->none;
    return XD_OK;
}

/* ---- settings ---- */

/* Rungs in turn with new noise and guidance; one drawn rung, with the noise that is implied; rungs in turn, on the student's own
 * samples and after a lead. */
static xd_dmd_desc run_recipe(int recipe) {
    static const double two[] = { 0.999, 0.5, 0.0 }, three[] = { 0.999, 0.7, 0.3, 0.0 },
                        four[] = { 0.999, 0.8, 0.5, 0.25, 0.0 };
    static const double *const lists[RUN_RECIPES] = { three, two, four };
    static const xd_dmd_recipe recipes[RUN_RECIPES] = { XD_DMD_MODELOPT, XD_DMD_FASTGEN, XD_DMD_ORIGINAL };
    static const int steps[RUN_RECIPES] = { 3, 2, 4 };
    xd_dmd_desc d = xd_dmd_defaults(recipes[recipe]);
    d.frequency = 2;
    d.seed = 19;
    d.rungs.steps = steps[recipe];
    d.rungs.list = lists[recipe];
    d.rungs.roll_out = true;
    d.rungs.deal = recipe == 1 ? XD_DMD_ONE_RUNG : XD_DMD_RUNGS_IN_TURN;
    d.rungs.fresh_noise = recipe == 0;
    d.guided = recipe == 0;
    d.guidance_scale = 1.5;
    d.gan.weight = 0.2;
    d.gan.r1_weight = recipe == 0 ? 2.0 : 0.0;
    d.gan.same_noise = recipe == 1;
    d.gan.kind = recipe == 2 ? XD_GAN_HINGE : XD_GAN_SOFTPLUS;
    d.lead = recipe == 2 ? 1 : 0;
    return d;
}

static void run_settings(run_state *s) {
    const run_config *c = s->job->config;
    const bool strips = c->net == RUN_STRIP;
    const xd_interval own = strips ? strip_elements(&s->ranks.cut) : role_pixels(&s->ranks);
    xd_dmd_desc *d = &s->desc;
    s->elements = own.end - own.begin;
    s->first_element = own.begin;
    *d = run_recipe(c->recipe);
    d->data = s->ranks.data;
    d->sizes.samples = RUN_SAMPLES / c->leaves;
    d->sizes.step_samples = RUN_SAMPLES;
    d->sizes.elements = s->elements;
    d->sizes.whole_elements = strips ? STRIP_ELEMENTS : PATCH_SIDE * PATCH_SIDE;
    d->sizes.first_element = s->first_element;
    d->sizes.split = c->cp > 1 ? s->ranks.cut.cp : NULL;
    for (int which = 0; which < XD_DMD_ROLES; which++) {
        role *r = &s->roles[which];
        xd_dmd_trainer *trainer = &d->trainers[which];
        s->witnesses[which].run = s;
        s->witnesses[which].role = (xd_dmd_role)which;
        s->witnesses[which].network = d->networks[which] = r->network;
        d->networks[which].user = &s->witnesses[which];
        d->networks[which].forward = run_forward;
        d->networks[which].backward = run_backward;
        trainer->parallel = r->parallel;
        trainer->optimizer = r->optimizer;
        trainer->averages = &r->average;
        trainer->average_count = r->average ? 1 : 0;
        trainer->max_norm = 0.05;
        trainer->norm = s->ranks.world;
    }
}

/* ---- checkpoints ---- */

static void run_saved(const run_state *s, xd_checkpoint_network networks[XD_DMD_TEACHER],
                      xd_checkpoint_average averages[XD_DMD_TEACHER]) {
    for (int which = 0; which < XD_DMD_TEACHER; which++)
        networks[which] = role_saved(&s->roles[which], (xd_dmd_role)which, &averages[which]);
}

static xd_result run_save(const run_state *s) {
    const xd_dmd_record record = xd_dmd_describe(s->dmd);
    xd_checkpoint_network networks[XD_DMD_TEACHER];
    xd_checkpoint_average averages[XD_DMD_TEACHER];
    xd_checkpoint_save_desc save;
    char state[128];
    run_saved(s, networks, averages);
    snprintf(state, sizeof state, "{\"student\": %lld, \"fake\": %lld, \"judge\": %lld}",
             (long long)record.updates[XD_DMD_STUDENT], (long long)record.updates[XD_DMD_FAKE_SCORE],
             (long long)record.updates[XD_DMD_DISCRIMINATOR]);
    memset(&save, 0, sizeof save);
    save.root = s->job->root;
    save.step = record.step;
    save.networks = networks;
    save.network_count = XD_DMD_TEACHER;
    save.state = state;
    save.keep = 2;
    return xd_checkpoint_save(s->ranks.world, &save);
}

static xd_result run_resume(run_state *s, int64_t step, const char *state) {
    long long updates[XD_DMD_TEACHER];
    xd_dmd_record record = xd_dmd_describe(s->dmd);
    const int read = sscanf(state, "{\"student\": %lld, \"fake\": %lld, \"judge\": %lld}", &updates[0],
                            &updates[1], &updates[2]);
    XD_REQUIRE(s->ctx, read == XD_DMD_TEACHER, XD_ERROR_FORMAT, "the state of step %lld is %s",
               (long long)step, state);
    record.step = step;
    for (int which = 0; which < XD_DMD_TEACHER; which++) record.updates[which] = updates[which];
    return xd_dmd_resume(s->dmd, &record);
}

static xd_result run_load(run_state *s) {
    xd_checkpoint_network networks[XD_DMD_TEACHER];
    xd_checkpoint_average averages[XD_DMD_TEACHER];
    xd_checkpoint_load_desc load;
    xd_checkpoint_report report;
    char *state = NULL;
    run_saved(s, networks, averages);
    memset(&load, 0, sizeof load);
    load.root = s->job->root;
    load.step = XD_CHECKPOINT_NEWEST;
    load.networks = networks;
    load.network_count = XD_DMD_TEACHER;
    XD_TRY(xd_checkpoint_load(s->ranks.world, &load, &report, &state));
    const xd_result result = run_resume(s, report.step, state ? state : "");
    if (state) xd_release(s->ctx, state);
    XD_TRY(result);
    s->step = (int)report.step;
    for (int which = 0; which < XD_DMD_TEACHER; which++)
        XD_TRY(xd_parallel_publish(s->roles[which].parallel));
    return XD_OK;
}

/* ---- steps ---- */

static xd_result run_tell(const run_state *s) {
    const unsigned char made = (unsigned char)s->step;
    if (s->job->news < 0 || xd_comm_rank(s->ranks.world) != 0) return XD_OK;
    XD_REQUIRE(s->ctx, write(s->job->news, &made, 1) == 1, XD_ERROR_IO, "nobody hears of step %d", s->step);
    return XD_OK;
}

/* The same values on every rank, those of tp and cp too. */
static xd_result run_step(run_state *s) {
    xd_dmd_values values;
    memset(&values, 0, sizeof values);
    XD_TRY(xd_dmd_step(s->dmd, run_batch, s, &values));
    XD_TRY(xd_agree_same(s->ranks.world, xd_hash(1, &values.vsd, 5 * sizeof(double)), "values of a step"));
    XD_TRY(xd_agree_same(s->ranks.world, xd_hash(1, values.norms, sizeof values.norms), "norms of a step"));
    if (xd_comm_rank(s->ranks.world) == 0) s->job->out->values[s->step] = values;
    s->step++;
    XD_TRY(s->job->root && !s->job->resumes ? run_save(s) : XD_OK);
    return run_tell(s);
}

/* The data ranks share what is generated in the end, and some may have nothing. */
static xd_result run_images(run_state *s) {
    const xd_interval own = xd_chunk(RUN_IMAGES, xd_comm_size(s->ranks.data), xd_comm_rank(s->ranks.data));
    const int64_t most = RUN_SAMPLES / s->job->config->leaves;
    float out[RUN_SAMPLES * STRIP_ELEMENTS];
    int32_t labels[RUN_SAMPLES];
    xd_sampler_desc d = xd_sampler_of_student(&s->desc);
    xd_sampler *sampler;
    xd_result result = XD_OK;
    d.step = 1000;
    s->step = -1;
    memset(labels, 0, sizeof labels);
    XD_TRY(xd_sampler_create(s->ctx, &d, &sampler));
    for (int64_t begin = 0; begin < RUN_IMAGES && result == XD_OK; begin += most) {
        const int64_t left = own.end - own.begin - begin;
        xd_dmd_batch batch;
        memset(&batch, 0, sizeof batch);
        batch.samples = left < 0 ? 0 : left < most ? left : most;
        batch.first = batch.samples ? own.begin + begin : 0;
        batch.condition = labels;
        result = xd_sampler_run(sampler, &batch, out);
        for (int64_t i = 0; i < batch.samples && result == XD_OK; i++)
            s->images += run_sum(s, 1, batch.first + i, out + i * s->elements);
    }
    xd_sampler_destroy(sampler);
    return result;
}

/* ---- what comes out ---- */

static xd_result run_hash(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    uint64_t *hash = (uint64_t *)user;
    *hash = xd_hash(*hash, data, (size_t)(elements.end - elements.begin) * xd_dtype_size(tensor->dtype));
    return XD_OK;
}

static xd_result run_keep(run_state *s) {
    const int tp = xd_comm_rank(s->ranks.cut.tp);
    const bool first = xd_comm_rank(s->ranks.world) == 0;
    run_result *out = s->job->out;
    for (int which = 0; which < XD_DMD_TEACHER; which++) {
        xd_checkpoint_average average;
        const xd_checkpoint_network network = role_saved(&s->roles[which], (xd_dmd_role)which, &average);
        xd_state_gather_desc d;
        uint64_t hash = 1;
        memset(&d, 0, sizeof d);
        d.networks = &network;
        d.network_count = 1;
        d.take = first ? run_hash : NULL;
        d.user = &hash;
        XD_TRY(xd_state_gather(s->ranks.world, &d));
        if (first) out->state[which] = hash;
    }
    for (int i = 0; i < RUN_STEPS; i++) {
        __atomic_add_fetch(&out->drawn[tp][i], s->drawn[i], __ATOMIC_RELAXED);
        __atomic_add_fetch(&out->seen[tp][i], s->seen[i], __ATOMIC_RELAXED);
    }
    __atomic_add_fetch(&out->images[tp], s->images, __ATOMIC_RELAXED);
    if (first) out->record = xd_dmd_describe(s->dmd);
    return XD_OK;
}

static xd_result run_all(run_state *s, xd_comm *world) {
    XD_TRY(role_ranks_open(world, s->job->config, &s->ranks));
    for (int which = 0; which < XD_DMD_ROLES; which++)
        XD_TRY(xd_agree(world, role_open(&s->ranks, s->job->config, (xd_dmd_role)which, !s->job->resumes,
                                         &s->roles[which])));
    run_settings(s);
    XD_TRY(xd_agree(world, xd_dmd_create(s->ctx, &s->desc, &s->dmd)));
    if (s->job->resumes) XD_TRY(run_load(s));
    if (xd_comm_rank(world) == 0) s->job->out->begun = s->step;
    if (xd_comm_rank(world) == 0) s->job->out->columns = s->job->config->tp;
    while (s->step < RUN_STEPS) XD_TRY(run_step(s));
    XD_TRY(run_images(s));
    return run_keep(s);
}

static xd_result run_rank(xd_comm *world, void *job) {
    run_state *s = (run_state *)calloc(1, sizeof *s);
    s->job = (const run_job *)job;
    s->ctx = xd_comm_ctx(world);
    const xd_result result = run_all(s, world);
    xd_dmd_destroy(s->dmd);
    for (int which = 0; which < XD_DMD_ROLES; which++) role_close(&s->roles[which]);
    role_ranks_close(&s->ranks);
    free(s);
    return result;
}

bool run_on_threads(const run_job *job, char message[512]) {
    const run_config *c = job->config;
    xd_ctx_desc d;
    xd_error error;
    memset(&d, 0, sizeof d);
    memset(&error, 0, sizeof error);
    memset(job->out, 0, sizeof *job->out);
    d.reduction = c->reduction;
    d.timeout_seconds = 60;
    if (xd_run_threads(c->dp * c->cp * c->tp, &d, run_rank, (void *)job, &error) == XD_OK) return true;
    snprintf(message, 512, "rank %d: %.480s", error.rank, error.message);
    return false;
}

/* ---- comparison ---- */

static bool run_differs(const char *what, int step, double a, double b, char message[512]) {
    if (memcmp(&a, &b, sizeof a) == 0) return false;
    snprintf(message, 512, "%s of step %d: %.17g, one rank has %.17g", what, step, b, a);
    return true;
}

static bool run_same_step(const xd_dmd_values *a, const xd_dmd_values *b, int step, char message[512]) {
    static const char *const norms[] = { "the student's norm", "the fake score's norm",
                                         "the discriminator's norm" };
    for (int which = 0; which < XD_DMD_TEACHER; which++)
        if (run_differs(norms[which], step, a->norms[which], b->norms[which], message)) return false;
    if (a->skipped != b->skipped) return snprintf(message, 512, "step %d is skipped by one", step), false;
    return !run_differs("matching", step, a->vsd, b->vsd, message) &&
           !run_differs("distance", step, a->distance, b->distance, message) &&
           !run_differs("the generator's loss", step, a->generator, b->generator, message) &&
           !run_differs("the fake score's loss", step, a->fake_score, b->fake_score, message) &&
           !run_differs("the discriminator's loss", step, a->discriminator, b->discriminator, message) &&
           !run_differs("the penalty", step, a->r1, b->r1, message);
}

/* One rank has one column. */
static bool run_same_draws(const run_result *a, const run_result *b, bool all, char message[512]) {
    for (int tp = 0; tp < b->columns; tp++)
        for (int step = b->begun; step < RUN_STEPS; step++) {
            const bool drawn = a->drawn[0][step] == b->drawn[tp][step];
            if (drawn && (!all || a->seen[0][step] == b->seen[tp][step])) continue;
            snprintf(message, 512, "%s of step %d, rank %d of tp", drawn ? "inputs" : "noise and times", step,
                     tp);
            return false;
        }
    return true;
}

bool run_equal(const run_result *a, const run_result *b, char message[512]) {
    static const char *const names[] = { "student", "fake score", "discriminator" };
    if (!run_same_draws(a, b, false, message)) return false;
    for (int step = b->begun; step < RUN_STEPS; step++)
        if (!run_same_step(&a->values[step], &b->values[step], step, message)) return false;
    if (!run_same_draws(a, b, true, message)) return false;
    for (int which = 0; which < XD_DMD_TEACHER; which++)
        if (a->state[which] != b->state[which])
            return snprintf(message, 512, "weights, moments or averages of the %s", names[which]), false;
    for (int tp = 0; tp < b->columns; tp++)
        if (a->images[0] != b->images[tp])
            return snprintf(message, 512, "images of rank %d of tp", tp), false;
    if (memcmp(&a->record, &b->record, sizeof a->record) == 0) return true;
    snprintf(message, 512, "the record: %lld steps, %lld of the student; one rank has %lld and %lld",
             (long long)b->record.step, (long long)b->record.updates[0], (long long)a->record.step,
             (long long)a->record.updates[0]);
    return false;
}

bool run_close(const run_result *a, const run_result *b, char message[512]) {
    double most = 0.0;
    if (!run_same_draws(a, b, false, message)) return false;
    for (int step = 0; step < RUN_STEPS; step++) {
        const xd_dmd_values *x = &a->values[step], *y = &b->values[step];
        most = fmax(most, fabs(x->vsd - y->vsd) + fabs(x->fake_score - y->fake_score));
        most = fmax(most, fabs(x->generator - y->generator) + fabs(x->discriminator - y->discriminator));
    }
    snprintf(message, 512, "losses within %.2g", most);
    return most <= 1e-3;
}

void run_name(const run_config *c, char name[160]) {
    static const char *const wraps[] = { "DDP",  "DDP + sharded optimizer",
                                         "FSDP", "FSDP one-send",
                                         "HSDP", "HSDP one-send" };
    static const char *const queues[] = { "no queues", "inline", "workers" };
    static const char *const nets[] = { "patch", "strip", "pieces" };
    const run_wrap *w = c->wraps;
    bool mixed = false;
    for (int which = 1; which < XD_DMD_ROLES; which++) mixed = mixed || w[which] != w[0];
    int used = snprintf(name, 160, "%s recipe %d dp=%d cp=%d tp=%d groups=%d leaves=%d %s",
                        nets[c->net], c->recipe, c->dp, c->cp, c->tp,
                        c->groups > 1 ? c->groups : 1, c->leaves, wraps[w[0]]);
    if (mixed)
        used += snprintf(name + used, (size_t)(160 - used), " (others %s, %s, %s)", wraps[w[1]], wraps[w[2]],
                         wraps[w[3]]);
    if (used < 140)
        snprintf(name + used, (size_t)(160 - used), " %s%s", queues[c->queues], c->sick ? ", a NaN" : "");
}
