/* images_watch.c - how bright and how different the student's pictures are, how hard each term of its loss pulls at them, and
 * how much of its average stands still: what goes wrong first when a distillation does. */
#include "images_run.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int64_t images_watch_own(const images_run *run) {
    return run->pixels.end - run->pixels.begin;
}

/* The sums that pixel i of a micro-batch's, as this rank has them, belongs to. */
static double *images_watch_sums(images_run *run, int64_t i) {
    const int64_t pixel = run->pixels.begin + i % images_watch_own(run);
    return run->spread.sums[run->micro_batch][pixel / (IMAGE_PIXELS / IMAGES_PIECES)];
}

/* The student's forward that trains; what it draws is read off its prediction as the library reads it. */
static xd_result images_watch_forward(void *user, const xd_network_call *call) {
    images_run *run = (images_run *)user;
    const xd_network *student = &run->roles[XD_DMD_STUDENT].network;
    const float *hidden = (const float *)call->hidden, *flow = (const float *)call->raw;
    const int64_t own = images_watch_own(run);
    XD_TRY(student->forward(student->user, call));
    if (!call->keep || call->samples == 0) return XD_OK; /* none: a micro-batch beyond this rank's own */
    memset(run->spread.sums[run->micro_batch], 0, sizeof run->spread.sums[0]);
    memset(run->pull, 0, sizeof run->pull);
    for (int64_t i = 0; i < call->samples * own; i++) {
        double *sums = images_watch_sums(run, i);
        const double x = (double)hidden[i] - call->times[i / own] * (double)flow[i];
        sums[IMAGES_PIXELS] += x;
        sums[IMAGES_SQUARES] += x * x;
    }
    return XD_OK;
}

/* Its gradient is that of both terms; by x it is 1 / -t of that by the prediction v, for x = x_t - t v. */
static xd_result images_watch_backward(void *user, const xd_network_call *call) {
    images_run *run = (images_run *)user;
    const xd_network *student = &run->roles[XD_DMD_STUDENT].network;
    const int64_t own = images_watch_own(run);
    for (int64_t i = 0; i < call->samples * own; i++) {
        double *sums = images_watch_sums(run, i);
        const double both = (double)call->raw_gradient[i] / -call->times[i / own];
        const double pull = (double)run->pull[i];
        sums[IMAGES_VSD] += (both - pull) * (both - pull);
        sums[IMAGES_GENERATOR] += pull * pull;
    }
    return student->backward(student->user, call);
}

static xd_result images_watch_teacher_forward(void *user, const xd_network_call *call) {
    const xd_network *teacher = &((const images_run *)user)->roles[XD_DMD_TEACHER].network;
    return teacher->forward(teacher->user, call);
}

/* It goes backward for the discriminator's term alone, to x_t = (1 - t) x + t noise. */
static xd_result images_watch_teacher_backward(void *user, const xd_network_call *call) {
    images_run *run = (images_run *)user;
    const xd_network *teacher = &run->roles[XD_DMD_TEACHER].network;
    XD_TRY(teacher->backward(teacher->user, call));
    const int64_t own = images_watch_own(run);
    for (int64_t i = 0; i < call->samples * own; i++)
        run->pull[i] = (float)(1.0 - call->times[i / own]) * call->hidden_gradient[i];
    return XD_OK;
}

void images_watch(images_run *run) {
    xd_network *student = &run->desc.networks[XD_DMD_STUDENT];
    student->user = run;
    student->forward = images_watch_forward;
    student->backward = images_watch_backward;
    if (run->recipe->real) {
        xd_network *teacher = &run->desc.networks[XD_DMD_TEACHER];
        teacher->user = run;
        teacher->forward = images_watch_teacher_forward;
        teacher->backward = images_watch_teacher_backward;
    }
    xd_ema_count_unmoved(run->roles[XD_DMD_STUDENT].average, &run->spread.unmoved);
}

void images_keep_latest(images_run *run, int step, const xd_dmd_values *values) {
    if (xd_dmd_trains(&run->desc, XD_DMD_STUDENT, step)) run->latest.distance = values->distance;
    if (xd_dmd_trains(&run->desc, XD_DMD_FAKE_SCORE, step)) run->latest.fake_score = values->fake_score;
}

/* A number, or a dash for none. */
static const char *images_number(double value, char out[32]) {
    snprintf(out, 32, value < 0.0 ? "-" : "%.4f", value);
    return out;
}

void images_say_latest(const images_latest *latest, char out[96]) {
    char distance[32], error[32];
    snprintf(out, 96, "|x - T| %s, fake score's error %s", images_number(latest->distance, distance),
             images_number(latest->fake_score, error));
}

void images_watch_clear(images_run *run) {
    memset(run->spread.sums, 0, sizeof run->spread.sums);
}

/* A rank has the sums of its own micro-batches and pixels and zeros for the others', so adding ranks up rounds nothing. */
static xd_result images_watch_gather(images_run *run) {
    return xd_sum_values(run->world, run->spread.sums[0][0],
                         IMAGES_SUMS * IMAGES_MICRO_BATCHES * IMAGES_PIECES);
}

xd_result images_watch_read(images_run *run) {
    images_spread *s = &run->spread;
    const images_role *student = &run->roles[XD_DMD_STUDENT];
    double total[IMAGES_SUMS] = { 0.0 };
    int64_t counts[2] = { s->unmoved, 0 };
    for (int64_t i = 0; i < student->count; i++) counts[1] += student->params[i].count;
    XD_TRY(images_watch_gather(run));
    if (run->ranks.fsdp) XD_TRY(xd_all_reduce(run->world, counts, counts, 2, XD_DTYPE_I64, XD_SUM));
    for (int i = 0; i < IMAGES_MICRO_BATCHES * IMAGES_PIECES; i++)
        for (int k = 0; k < IMAGES_SUMS; k++) total[k] += s->sums[i / IMAGES_PIECES][i % IMAGES_PIECES][k];
    const double n = (double)run->recipe->batch * IMAGE_PIXELS;
    s->mean = total[IMAGES_PIXELS] / n;
    s->deviation = sqrt(total[IMAGES_SQUARES] / n - s->mean * s->mean);
    s->vsd_norm = sqrt(total[IMAGES_VSD]);
    s->generator_norm = sqrt(total[IMAGES_GENERATOR]);
    s->stuck = (double)counts[0] / (double)counts[1];
    return XD_OK;
}
