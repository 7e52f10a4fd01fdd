/* This example distils a diffusion model of your own data by a network of your own. A teacher learns the
 * flow from noise to data, and needs 50 steps. A student starts as its copy and learns, without data, to
 * generate in 4.
 *
 *     cc -std=c99 -O3 -I. examples/29_own_diffusion.c -o own -lm -lpthread
 *     ./own points.txt own.svg run  D numbers a row; without files: an open ring, and no picture.
 *                                   With a third name it saves there, and goes on from what it finds. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "29_own_network.h"
#include "29_own_figures.h"
#include "29_own_teacher.h"
#include "29_own_checkpoint.h"

enum { STEPS = 4, TURNS = 576, TURN = 5 }; /* a turn: one step of the student, 4 of the fake score */
enum { HOLD = 8, SHOWN = 6 * HOLD * STEPS }; /* turns at a rung; between lines of the report, and saves */

/* The library draws noise and times: a batch is its number. */
static xd_result batch(void *user, int64_t micro_batch, xd_dmd_batch *out) {
    (void)user;
    out->samples = BATCH;
    out->first = micro_batch * BATCH;
    return XD_OK;
}

static xd_dmd_desc settings(xd_comm *world, net *nets, const double *list) {
    xd_dmd_desc d = xd_dmd_defaults(XD_DMD_DATA_FREE);
    d.rungs.steps = STEPS;
    d.rungs.list = list;
    d.rungs.roll_out = true; /* STEPS > 1: train on what the steps before make */
    d.rungs.hold = HOLD;     /* turns at a rung */
    d.frequency = TURN;
    d.data = world;
    d.sizes.samples = d.sizes.step_samples = BATCH;
    d.sizes.elements = D;
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        net *n = &nets[role];
        if (role == XD_DMD_DISCRIMINATOR) continue;
        d.networks[role] = (xd_network){ .user = n->model, .predicts = XD_PREDICT_FLOW };
        d.networks[role].forward = d.networks[role].backward = pass;
        d.trainers[role] = (xd_dmd_trainer){ .parallel = n->parallel, .optimizer = n->optimizer };
        d.trainers[role].averages = &n->average;
        d.trainers[role].average_count = 1;
    }
    return d;
}

/* Means at each rung. A role without a turn has added 0. */
static void show(int turn, double sums[2][STEPS]) {
    printf("turn %d: fake_score", turn);
    for (int r = 0; r < STEPS; r++) printf(" %.2f", sums[0][r] * STEPS / (SHOWN * (TURN - 1)));
    printf(", distance");
    for (int r = 0; r < STEPS; r++) printf(" %.2f", sums[1][r] * STEPS / SHOWN);
    printf(" at the rungs\n");
    memset(sums, 0, 2 * sizeof *sums);
}

static xd_result distil(xd_comm *world, xd_dmd *dmd, net *nets, int step, const char *folder) {
    double sums[2][STEPS] = { { 0 } };
    xd_dmd_values values;
    for (; step < TURNS * TURN; step++) {
        const int turn = step / TURN, rung = turn / HOLD % STEPS;
        XD_TRY(set_rate(&nets[XD_DMD_STUDENT], 3e-4, (double)step / (TURNS * TURN)));
        XD_TRY(xd_dmd_step(dmd, batch, NULL, &values));
        sums[0][rung] += values.fake_score;
        sums[1][rung] += values.distance;
        if ((step + 1) % (SHOWN * TURN) > 0) continue;
        show(turn + 1, sums);
        if (folder) XD_TRY(save_run(world, nets, dmd, folder, step + 1));
    }
    return use_average(&nets[XD_DMD_STUDENT]);
}

/* Euler steps along the teacher's flow, or the student's: predict, add new noise, predict. */
static xd_result sample(xd_ctx *ctx, const xd_dmd_desc *d, xd_dmd_role role, int steps, float *points) {
    double list[64];
    xd_sampler *sampler;
    xd_sampler_desc s = xd_sampler_of_student(d);
    XD_TRY(xd_noise_steps(ctx, &d->schedule, steps, list));
    s.network = d->networks[role];
    if (role == XD_DMD_TEACHER) s.kind = XD_SAMPLER_EULER;
    s.steps = steps;
    s.list = list;
    s.samples = POINTS;
    s.seed = 2;
    XD_TRY(xd_sampler_create(ctx, &s, &sampler));
    const xd_result made = xd_sampler_run(sampler, &(xd_dmd_batch){ .samples = POINTS }, points);
    xd_sampler_destroy(sampler);
    return made;
}

static xd_result train(xd_comm *world, net *nets, const double *list, const char *folder) {
    net *teacher = &nets[XD_DMD_TEACHER];
    xd_dmd *dmd;
    int64_t newest;
    int step = 0;
    const bool found = folder && xd_checkpoint_find(xd_comm_ctx(world), folder, &newest) == XD_OK;
    XD_TRY(make_net(world, NULL, 4e-3, teacher));
    for (int i = 0; !found && i < TEACHER_STEPS; i++) XD_TRY(teacher_step(teacher, i));
    if (!found) XD_TRY(use_average(teacher));
    XD_TRY(make_net(world, teacher, 3e-4, &nets[XD_DMD_STUDENT]));
    XD_TRY(make_net(world, teacher, 2e-3, &nets[XD_DMD_FAKE_SCORE]));
    const xd_dmd_desc d = settings(world, nets, list);
    XD_TRY(xd_dmd_create(xd_comm_ctx(world), &d, &dmd));
    xd_result result = found ? load_run(world, nets, dmd, folder, &step) : XD_OK;
    if (found && result == XD_OK) printf("goes on after turn %d\n", step / TURN);
    if (result == XD_OK) result = distil(world, dmd, nets, step, folder);
    xd_dmd_destroy(dmd);
    return result;
}

/* Figures and a picture: the data and three samplers. */
static xd_result compare(xd_ctx *ctx, const xd_dmd_desc *d, const char *path) {
    static const char *const titles[] = { "teacher, 50 steps", "teacher, 4 steps", "student, 4 steps" };
    static float points[POINTS * D];
    double far[3];
    FILE *svg = fopen(path, "w");
    if (!svg) return XD_FAIL(ctx, XD_ERROR_IO, "cannot write %s", path);
    fprintf(svg, "<svg xmlns='http://www.w3.org/2000/svg' width='960' height='260' font-family='sans-serif' "
                 "font-size='12'><rect width='100%%' height='100%%' fill='white'/>\n");
    draw(svg, 0, "data", data, rows);
    for (int i = 0; i < 3; i++) {
        XD_TRY(sample(ctx, d, i < 2 ? XD_DMD_TEACHER : XD_DMD_STUDENT, i ? STEPS : 50, points));
        far[i] = distance_to_data(points);
        draw(svg, i + 1, titles[i], points, POINTS);
        printf("%s: %.2f from the data\n", titles[i], far[i]);
    }
    fprintf(svg, "</svg>\n");
    fclose(svg);
    if (far[2] < far[1]) return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_DATA, "the student is no better than its teacher in as many steps");
}

static xd_result run(xd_comm *world, void *argument) {
    const char *const *paths = argument; /* of data, picture and checkpoints */
    net nets[XD_DMD_ROLES] = { { 0 } };
    double list[STEPS + 1];
    xd_ctx *ctx = xd_comm_ctx(world);
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW);
    if (!read_data(paths[0])) return XD_FAIL(ctx, XD_ERROR_IO, "no rows of %d numbers in %s", D, paths[0]);
    XD_TRY(xd_noise_steps(ctx, &flow, STEPS, list));
    XD_TRY(train(world, nets, list, paths[2]));
    const xd_dmd_desc d = settings(world, nets, list);
    const xd_result compared = compare(ctx, &d, paths[1]);
    for (int role = 0; role < XD_DMD_ROLES; role++) free_net(&nets[role]);
    return compared;
}

int main(int argc, char **argv) {
    const char *paths[] = { argc > 1 ? argv[1] : NULL, argc > 2 ? argv[2] : "/dev/null",
                            argc > 3 ? argv[3] : NULL };
    xd_error error = { 0 };
    if (xd_run_threads(1, NULL, run, paths, &error) == XD_OK) return 0;
    fprintf(stderr, "%s\n", error.message);
    return 1;
}
