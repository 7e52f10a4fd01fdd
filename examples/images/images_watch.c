/* images_watch.c - how bright and how different the student's pictures are, and how much of its average stands still: what goes wrong first
 * when a distillation does. */
#include "images_run.h"

#include <math.h>
#include <string.h>

/* The student's forward that trains; what it draws is read off its prediction as the library reads it. */
static xd_result images_watch_forward(void *user, const xd_network_call *call) {
    images_run *run = (images_run *)user;
    const xd_network *student = &run->roles[XD_DMD_STUDENT].network;
    const float *hidden = (const float *)call->hidden, *flow = (const float *)call->raw;
    double(*sums)[2] = run->spread.sums[run->leaf];
    const int64_t own = run->pixels.end - run->pixels.begin;
    XD_TRY(student->forward(student->user, call));
    if (!call->keep) return XD_OK;
    memset(sums, 0, sizeof run->spread.sums[0]);
    for (int64_t i = 0; i < call->samples * own; i++) {
        double *sum = sums[(run->pixels.begin + i % own) / (IMAGE_PIXELS / IMAGES_PIECES)];
        const double x = (double)hidden[i] - call->times[i / own] * (double)flow[i];
        sum[0] += x;
        sum[1] += x * x;
    }
    return XD_OK;
}

static xd_result images_watch_backward(void *user, const xd_network_call *call) {
    const images_run *run = (const images_run *)user;
    const xd_network *student = &run->roles[XD_DMD_STUDENT].network;
    return student->backward(student->user, call);
}

void images_watch(images_run *run) {
    xd_network *student = &run->desc.networks[XD_DMD_STUDENT];
    student->user = run;
    student->forward = images_watch_forward;
    student->backward = images_watch_backward;
    xd_ema_count_unmoved(run->roles[XD_DMD_STUDENT].average, &run->spread.unmoved);
}

void images_watch_clear(images_run *run) {
    memset(run->spread.sums, 0, sizeof run->spread.sums);
}

/* A rank has the sums of its own leaves and pixels and zeros for the others', so adding ranks up rounds nothing. */
static xd_result images_watch_gather(images_run *run) {
    enum { SUMS = 2 * IMAGES_LEAVES * IMAGES_PIECES };
    double all[IMAGES_MOST_RANKS][SUMS], *sums = run->spread.sums[0][0];
    int64_t counts[IMAGES_MOST_RANKS];
    for (int r = 0; r < IMAGES_MOST_RANKS; r++) counts[r] = SUMS;
    XD_TRY(xd_all_gather(run->world, sums, all, counts, XD_DTYPE_F64));
    images_watch_clear(run);
    for (int r = 0; r < xd_comm_size(run->world); r++)
        for (int i = 0; i < SUMS; i++) sums[i] += all[r][i];
    return XD_OK;
}

xd_result images_watch_read(images_run *run) {
    images_spread *s = &run->spread;
    const images_role *student = &run->roles[XD_DMD_STUDENT];
    double sum = 0.0, square = 0.0;
    int64_t counts[2] = { s->unmoved, 0 };
    for (int64_t i = 0; i < student->count; i++) counts[1] += student->params[i].count;
    XD_TRY(images_watch_gather(run));
    if (run->ranks.fsdp) XD_TRY(xd_all_reduce(run->world, counts, counts, 2, XD_DTYPE_I64, XD_SUM));
    for (int i = 0; i < IMAGES_LEAVES * IMAGES_PIECES; i++) {
        sum += s->sums[i / IMAGES_PIECES][i % IMAGES_PIECES][0];
        square += s->sums[i / IMAGES_PIECES][i % IMAGES_PIECES][1];
    }
    const double n = (double)run->recipe->batch * IMAGE_PIXELS;
    s->mean = sum / n;
    s->deviation = sqrt(square / n - s->mean * s->mean);
    s->stuck = (double)counts[0] / (double)counts[1];
    return XD_OK;
}
