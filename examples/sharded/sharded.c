/* sharded.c - trains a student twice, on one rank alone and sharded over ranks that are killed half way, and shows that both have
 * the same bits.
 *
 *   make demo-sharded
 *   build/demo-sharded --wrap hsdp --mesh dp=8 --steps 40
 *   build/demo-sharded --pp 2 --steps 40
 *   build/demo-sharded --launch --lose 2 --steps 40
 *   build/demo-sharded --launch --restart 2 --steps 40
 *   build/demo-sharded --help          all options
 *
 * The student of build/demo that learns by P-KL is described with the library's model object (nn_describe.h), so a wrapper can
 * hold it: 4 ranks share it by FSDP, save a checkpoint together at half time, and are killed by SIGKILL at a step drawn at
 * random after that. 3 ranks, which hold it whole under DDP, go on from the checkpoint and finish. In INVARIANT mode all
 * this changes no bit of the weights, the optimizer, the average and the losses; the program says so, or fails.
 *
 * Every sequence of a batch is a leaf: it goes through the model alone, on whichever rank, and the leaves' gradients are summed
 * along one tree.
 *
 * With --pp the ranks before the interruption are a pipeline, beside others when there are more (sharded_stages.c): each has some
 * layers, wrapped by themselves, and rows go through all of them one after another, by 1F1B or, with --vpp, interleaved. They save
 * the whole student together, and those that go on have no pipeline.
 *
 * Told --launch, the ranks are processes of this machine that build/xdrun starts, and one of them, drawn at random, is killed:
 * the others end with it. Told --lose too, they do not: they make a world of those that are left, on the largest mesh that these
 * fill, take the last step that they still have whole in memory, or what was saved last, and go on, with the same bits
 * (sharded_survive.c). Told --restart, all end, and xdrun starts them again: they take what was saved last.
 *
 * Compiled by mpicc with -DSHARDED_MPI, and told --mpi, they are processes of MPI jobs: make demo-sharded ARGS=--mpi. Such a job
 * dies as a whole, so with --restart this program starts it again, on one rank fewer each time; where the MPI has recovery,
 * --lose is possible too.
 *
 * Writes out/sharded/student, a Hugging Face model directory; out/sharded/plain and out/sharded/wrapped hold the checkpoints
 * and metrics.jsonl of the two, out/sharded/sharded.json the table with more digits. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(SHARDED_MPI)
#    include "xdistill_mpi.h"
#endif

#include "sharded.h"

#include "../common/folder_lock.h"
#include "../common/folders.h"
#include "../common/model_directory.h"

#include <stdio.h>
#include <string.h>

enum {
    SHARDED_LATER_RANKS = 3,
    SHARDED_SAVES = 6, /* at most, where ranks are lost */
    SHARDED_PLACE_ROOM = 96
};

/* Everything main owns. */
typedef struct sharded_world {
    xd_ctx *ctx;
    folder_lock *lock;
    demo_lesson lesson;
    nn_config config;
    sharded_job job;
    char student[480], plain[480], wrapped[480], news[480], xdrun[480],
        titles[SHARDED_LEGS][SHARDED_PLACE_ROOM];
    sharded_run run;
} sharded_world;

/* ---- set-up ---- */

/* Any step after the checkpoint and before the end. */
static int sharded_draw_step(const sharded_options *o) {
    const int half = o->steps / 2, later = o->steps - half - 1;
    return half + 1 + (int)(sample_random(o->seed, 3, 0) * later);
}

/* "pp=2,dp=2,tp=1": stages and cp only where there are several. */
static void sharded_name_axes(int pp, int vpp, const demo_axes *a, char out[64]) {
    char stages[32] = "", rounds[16] = "", sequences[16] = "";
    if (vpp > 1) snprintf(rounds, sizeof rounds, "vpp=%d,", vpp);
    if (pp > 1) snprintf(stages, sizeof stages, "pp=%d,%s", pp, rounds);
    if (a->cp > 1) snprintf(sequences, sizeof sequences, "cp=%d,", a->cp);
    snprintf(out, 64, "%sdp=%d,%stp=%d", stages, a->dp, sequences, a->tp);
}

static void sharded_name_leg(sharded_world *w, int i) {
    sharded_leg *leg = &w->run.legs[i];
    char axes[64], split[72] = "";
    leg->victim = -1;
    if (leg->axes.cp == 0) leg->axes.cp = 1;
    if (leg->axes.tp == 0) leg->axes.tp = 1;
    if (leg->pp == 0) leg->pp = leg->vpp = 1;
    leg->ranks = leg->axes.dp * leg->axes.cp * leg->axes.tp * leg->pp;
    sharded_name_axes(leg->pp, leg->vpp, &leg->axes, axes);
    if (leg->ranks > leg->axes.dp) snprintf(split, sizeof split, " (%s)", axes);
    snprintf(w->titles[i], sizeof w->titles[i], "%d rank%s%s, %s", leg->ranks, leg->ranks > 1 ? "s" : "",
             split, sharded_wrap_name(leg->wrap));
    leg->title = w->titles[i];
    leg->directory = i == 0 ? w->plain : w->wrapped;
}

static void sharded_fill_legs(sharded_world *w, const sharded_options *o) {
    sharded_leg *legs = w->run.legs;
    memset(legs, 0, sizeof w->run.legs);
    w->run.leg_count = o->lose > 0 || o->restart > 0 ? SHARDED_LEGS - 1 : SHARDED_LEGS;
    legs[0].wrap = SHARDED_PLAIN;
    legs[0].axes.dp = 1;
    legs[1].wrap = o->wrap;
    legs[1].axes = o->axes;
    legs[1].pp = o->pp;
    legs[1].vpp = o->vpp;
    if (o->lose > 0 || o->restart > 0) {
        legs[1].save_every = o->steps / SHARDED_SAVES + 1;
        legs[1].again = o->restart > 0;
        legs[1].loss_count = legs[1].again ? o->restart : o->lose;
        legs[1].fewer = legs[1].again && o->launch ? 0 : 1; /* xdrun starts as many as before */
        legs[1].keep = true;
        sharded_draw_losses(&legs[1], o->seed, o->steps);
    } else {
        legs[1].save_at = o->steps / 2;
        legs[1].kill_at = sharded_draw_step(o);
    }
    legs[2].wrap = SHARDED_DDP;
    legs[2].axes.dp = SHARDED_LATER_RANKS;
    legs[2].resume = legs[2].keep = true;
    for (int i = 0; i < SHARDED_LEGS; i++) sharded_name_leg(w, i);
    if (o->launch && legs[1].kill_at > 0)
        legs[1].victim = (int)(sample_random(o->seed, 4, 0) * legs[1].ranks);
}

static xd_result sharded_load_lesson(sharded_world *w, const sharded_options *o) {
    demo_options arms;
    memset(&arms, 0, sizeof arms);
    arms.arms = "pkl";
    XD_TRY(demo_data_find(w->ctx, o->data, true, &w->lesson.data));
    XD_TRY(demo_lesson_load(w->ctx, o->heldout_bytes, &w->lesson));
    w->config = demo_config(xd_tokenizer_describe(w->lesson.student.tokenizer).size, false);
    if (o->pp > 1) w->config.tied = false; /* embedding and head are in different stages */
    demo_lesson_tell(&w->lesson, &w->job.demo);
    return demo_fill_arms(w->ctx, &arms, false, &w->job.demo);
}

static void sharded_fill_job(sharded_world *w, const sharded_options *o) {
    demo_job *job = &w->job.demo;
    w->run.options = o;
    job->config = &w->config;
    job->reduction = XD_REDUCTION_INVARIANT;
    job->fixed_sums = o->axes.tp > 1;
    job->fixed_blocks = o->axes.cp > 1;
    job->by_leaf = o->pp > 1;
    job->ranks_are = o->mpi || o->launch ? "processes" : "threads";
    w->job.news_path = w->news;
    job->steps = o->steps;
    job->seed = o->seed;
    job->seeds = 1;
    job->overwrite = true; /* sharded_open_output has looked */
    job->save_directory = w->student;
}

static void sharded_name_output(sharded_world *w, const sharded_options *o) {
    snprintf(w->student, sizeof w->student, "%s/student", o->out);
    snprintf(w->plain, sizeof w->plain, "%s/plain", o->out);
    snprintf(w->wrapped, sizeof w->wrapped, "%s/wrapped", o->out);
    snprintf(w->news, sizeof w->news, "%s/news", o->out);
}

static xd_result sharded_open_output(sharded_world *w, const sharded_options *o) {
    XD_TRY(folder_lock_take(w->ctx, o->out, "; --resume goes on from where it was saved with --save-every",
                            &w->lock));
    if (!o->overwrite && model_directory_is_finished(w->student))
        return XD_FAIL(w->ctx, XD_ERROR_STATE,
                       "%s holds a finished model: --overwrite replaces it, --out names another folder",
                       w->student);
    const char *const folders[] = { w->plain, w->wrapped };
    for (int i = 0; i < 2; i++) {
        XD_TRY(folders_make(w->ctx, folders[i]));
        XD_TRY(folders_forget_checkpoints(w->ctx, folders[i]));
    }
    return XD_OK;
}

/* ---- the way ---- */

static void sharded_take_leg(sharded_world *w, int i) {
    const sharded_leg *leg = &w->run.legs[i];
    w->job.leg = leg;
    w->job.number = i;
    w->job.demo.dp = leg->axes.dp;
    w->job.demo.cp = leg->axes.cp;
    w->job.demo.tp = leg->axes.tp;
}

static void sharded_name_place(const sharded_place *p, char out[SHARDED_PLACE_ROOM]) {
    char axes[64];
    sharded_name_axes(p->pp, 1, &p->axes, axes);
    snprintf(out, SHARDED_PLACE_ROOM, "%s, %s", axes, sharded_wrap_name(p->wrap));
}

static void sharded_tell_losses(const sharded_leg *leg, const sharded_outcome *outcome) {
    for (int i = 0; i < outcome->lost; i++) {
        const sharded_recovery *r = &outcome->recoveries[i];
        const char *who = leg->again ? "those started again" : "the others";
        const char *source = r->inherited ? "memory" : r->from > 0 ? "what was saved" : "the start";
        char place[SHARDED_PLACE_ROOM];
        sharded_name_place(&r->place, place);
        printf("%s: rank %d killed by SIGKILL after step %d", leg->title, r->rank, r->step);
        if (r->seconds > 0.0)
            printf("; %.2f s later %s (%s) had made the step after step %d, taken from %s\n", r->seconds, who,
                   place, r->from, source);
        else
            printf("; %s had come to the end\n", who);
    }
}

static xd_result sharded_go(sharded_world *w, int i) {
    sharded_leg *leg = &w->run.legs[i];
    sharded_outcome *outcome = &w->run.outcomes[i];
    sharded_take_leg(w, i);
    if (leg->loss_count > 0)
        printf("%s: to be saved every %d steps, and to lose %d%s\n", leg->title, leg->save_every,
               leg->loss_count, leg->again ? ", one each time it is started" : "");
    if (leg->kill_at > 0)
        printf("%s: to be saved after step %d, and killed after step %d\n", leg->title, leg->save_at,
               leg->kill_at);
    XD_TRY(sharded_run_leg(w->ctx, &w->job, outcome));
    char who[32] = "";
    if (leg->victim >= 0) snprintf(who, sizeof who, "rank %d ", leg->victim);
    if (outcome->killed)
        printf("%s: %skilled by SIGKILL after step %d\n", leg->title, who, outcome->ranks[0].step);
    sharded_tell_losses(leg, outcome);
    if (leg->resume)
        printf("%s: went on after step %d\n", leg->title, outcome->ranks[0].step - outcome->ranks[0].steps);
    leg->ranks -= leg->fewer * outcome->lost; /* in tables */
    fflush(stdout);
    return XD_OK;
}

static xd_result sharded_decide(const sharded_world *w) {
    const sharded_comparison *c = &w->run.comparison;
    for (int i = 0; i < SHARDED_THINGS; i++)
        XD_REQUIRE(w->ctx, c->same_bits[i], XD_ERROR_MISMATCH,
                   "the sharded run does not have the bits of the plain one");
    return XD_OK;
}

static xd_result sharded_work(sharded_world *w, const sharded_options *o) {
    XD_TRY(sharded_open_output(w, o));
    XD_TRY(sharded_load_lesson(w, o));
    sharded_fill_job(w, o);
    sharded_fill_legs(w, o);
    printf("%lld tokens of text, %d steps of %d rows, seed %llu\n", (long long)w->lesson.student.text.count,
           o->steps, DEMO_BATCH, (unsigned long long)o->seed);
    for (int i = 0; i < w->run.leg_count; i++) XD_TRY(sharded_go(w, i));
    XD_TRY(sharded_compare(w->ctx, w->plain, w->wrapped, o->steps, &w->run.comparison));
    sharded_print_tables(&w->run);
    XD_TRY(sharded_write_run(w->ctx, &w->run));
    (void)remove(w->news); /* only jobs of processes have made it */
    printf("The sharded student is in %s: build/demo --eval %s measures it again.\n", w->student, w->student);
    return sharded_decide(w);
}

/* One rank of a leg, when ranks are processes. */
static xd_result sharded_be_rank(sharded_world *w, const sharded_options *o, int *status) {
    XD_TRY(sharded_load_lesson(w, o));
    sharded_fill_job(w, o);
    sharded_fill_legs(w, o);
    sharded_take_leg(w, o->leg);
    *status = sharded_job_live(w->ctx, &w->job);
    return XD_OK;
}

/* Contexts of ranks count what is taken; the one that starts them does not. */
static xd_result sharded_open_context(const sharded_options *o, xd_ctx **out) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    if (o->leg >= 0) {
        desc.reduction = XD_REDUCTION_INVARIANT;
        desc.allocator = sharded_counting_allocator();
    }
    return xd_ctx_create(&desc, out);
}

/* It lies beside this program. */
static void sharded_find_xdrun(sharded_world *w, const char *program) {
    const char *name = strrchr(program, '/');
    const int folder = name ? (int)(name + 1 - program) : 0;
    snprintf(w->xdrun, sizeof w->xdrun, "%.*sxdrun", folder, program);
    w->job.xdrun = w->xdrun;
}

static int sharded_main(const sharded_options *o, int argc, char **argv) {
    sharded_world *w = NULL;
    xd_ctx *ctx = NULL;
    int status = 0;
    if (sharded_open_context(o, &ctx) != XD_OK) return 1;
    w = (sharded_world *)xd_allocate(ctx, sizeof *w);
    xd_result result = w ? XD_OK : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a job");
    if (w) {
        memset(w, 0, sizeof *w);
        w->ctx = ctx;
        w->job.arguments = o->mpi || o->launch ? (const char *const *)argv : NULL;
        w->job.argument_count = argc;
        sharded_name_output(w, o);
        if (o->launch) sharded_find_xdrun(w, argv[0]);
        result = o->leg >= 0 ? sharded_be_rank(w, o, &status) : sharded_work(w, o);
        folder_lock_release(ctx, w->lock);
        demo_lesson_free(ctx, &w->lesson);
        xd_release(ctx, w);
    }
    if (result != XD_OK)
        fprintf(stderr, "demo-sharded: %s: %s\n", xd_result_name(result), xd_last_error(ctx)->message);
    xd_ctx_destroy(ctx);
    return result != XD_OK ? 1 : status;
}

/* The one that starts ranks is none itself, so MPI is theirs alone. */
static int sharded_main_of_rank(const sharded_options *o, int argc, char **argv) {
#if defined(SHARDED_MPI)
    if (o->mpi) MPI_Init(&argc, &argv);
#endif
    const int status = sharded_main(o, argc, argv);
    if (o->mpi) sharded_job_end(status, o->lose > 0);
    return status;
}

int main(int argc, char **argv) {
    sharded_options options;
    if (!sharded_parse(argc, argv, &options)) {
        fprintf(stderr, "demo-sharded: %s\nbuild/demo-sharded --help lists the options\n", options.problem);
        return 2;
    }
    if (options.help) {
        sharded_print_help();
        return 0;
    }
    return options.leg >= 0 ? sharded_main_of_rank(&options, argc, argv) : sharded_main(&options, argc, argv);
}
