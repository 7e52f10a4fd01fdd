/* sample_losses.h - the losses of samples against formulas written down independently: a batch, what a call makes of it alone
 * or cut over ranks, and what it should. */
#ifndef SAMPLE_LOSSES_H
#define SAMPLE_LOSSES_H

#include "parallel.h"
#include "xd_test.h"
#include "xd_test_cpu.h"
#include "xdistill.h"

#include <stdlib.h>

enum { SAMPLES = 5, MOST = 40000, CELLS = SAMPLES * MOST };

typedef enum loss_kind { VSD, DENOISE } loss_kind;

/* Three tensors of a loss, whole: x, T, F or p, x, eps. */
typedef struct problem {
    loss_kind kind;
    int64_t elements;
    xd_dtype dtype, gradient_dtype;
    int64_t gradient_stride; /* 0: its rows follow each other */
    bool masked, counted;    /* counted: N is what the call counts, else 1000 */
    xd_vsd_normaliser normaliser;
    xd_vsd_form form;
    float in[3][CELLS];
    uint8_t mask[CELLS];
    double scale[SAMPLES], chain[SAMPLES], factor;
    xd_denoise_term terms[SAMPLES];
} problem;

typedef struct outcome {
    xd_result result;
    xd_sample_values values;
    xd_status status;
    double sample_loss[SAMPLES], distance[SAMPLES];
    float gradient[CELLS];
} outcome;

static problem p;
static outcome first, second;

static float rounded(float x, xd_dtype dtype) {
    float room = 0.0f;
    xd_store_f64(&room, dtype, 0, (double)x);
    return (float)xd_load_f64(&room, dtype, 0);
}

static void fill(loss_kind kind, int64_t elements, xd_dtype dtype, bool masked) {
    uint64_t state = (uint64_t)(elements + dtype);
    memset(&p, 0, sizeof p);
    p.kind = kind;
    p.elements = elements;
    p.dtype = p.gradient_dtype = dtype;
    p.masked = masked;
    p.counted = true;
    p.factor = 0.75;
    for (int64_t i = 0; i < SAMPLES * elements; i++) {
        for (int k = 0; k < 3; k++) p.in[k][i] = rounded(number(&state), dtype);
        p.mask[i] = number(&state) > -0.4f;
    }
    for (int b = 0; b < SAMPLES; b++) {
        const double t = 0.1 + 0.15 * b;
        const xd_denoise_term term = { -t, -t * t, t, 1.0 + b };
        p.scale[b] = 0.5 + b;
        p.chain[b] = -0.9 + 0.1 * b;
        p.terms[b] = term;
    }
    for (int64_t i = 0; i < elements && masked; i++) p.mask[2 * elements + i] = 0; /* an empty sample */
}

/* ---- the formulas ---- */

static bool counts(int64_t i) {
    return !p.masked || p.mask[i];
}

static int64_t counted_in(int64_t begin, int64_t end) {
    int64_t n = 0;
    for (int64_t i = begin; i < end; i++) n += counts(i);
    return n;
}

static double distance_of(int b) {
    double sum = 0.0;
    const int64_t at = b * p.elements, n = counted_in(at, at + p.elements);
    for (int64_t i = at; i < at + p.elements; i++)
        if (counts(i)) sum += fabs((double)p.in[0][i] - (double)p.in[1][i]);
    return n ? sum / (double)n : 0.0;
}

static double weight_of(int b) {
    const double mean = distance_of(b);
    if (p.normaliser == XD_VSD_NONE) return p.scale[b];
    return p.scale[b] / (p.normaliser == XD_VSD_MEAN ? mean + 1e-6 : mean);
}

/* A residual and its sample's loss: sums of factor r^2. */
static double residual(int b, int64_t i, double moved) {
    const xd_denoise_term *t = &p.terms[b];
    if (p.kind == VSD) return (double)p.in[2][i] - (double)p.in[1][i] + moved;
    return (double)(float)t->prediction * ((double)p.in[0][i] + moved) +
           (double)(float)t->clean * (double)p.in[1][i] + (double)(float)t->noise * (double)p.in[2][i];
}

static double denominator_of(void) {
    return p.counted ? (double)counted_in(0, SAMPLES * p.elements) : 1000.0;
}

/* The expected value, and the gradient of element i of sample b. */
static double expected_loss(void) {
    double loss = 0.0;
    for (int b = 0; b < SAMPLES; b++) {
        const double w = p.kind == VSD ? weight_of(b) : 0.0,
                     factor = p.kind == VSD ? 0.5 * w * w : p.terms[b].weight;
        for (int64_t i = b * p.elements; i < (b + 1) * p.elements; i++)
            if (counts(i)) loss += factor * residual(b, i, 0.0) * residual(b, i, 0.0);
    }
    return 1.5 * p.factor * loss / denominator_of();
}

/* By central differences. The student's term is 1/2 (x - constant)^2 by x, and x moves by chain. */
static double expected_gradient(int b, int64_t i) {
    const double step = 1e-3;
    if (!counts(i)) return 0.0;
    double ends[2];
    for (int k = 0; k < 2; k++) {
        const double moved = k ? step : -step;
        if (p.kind == DENOISE) {
            ends[k] = p.terms[b].weight * residual(b, i, moved) * residual(b, i, moved);
        } else {
            const double g = weight_of(b) * residual(b, i, 0.0) + p.chain[b] * moved;
            ends[k] = 0.5 * g * g;
        }
    }
    return 1.5 * p.factor * (ends[1] - ends[0]) / (2.0 * step) / denominator_of();
}

/* ---- calls ---- */

/* A rank's part: columns [begin, end) of samples [from, to). */
typedef struct part {
    int64_t from, to, begin, end;
    void *in[3], *gradient;
    uint8_t *mask;
    double distance[SAMPLES]; /* of the part's own samples */
    bool again;               /* another rank tells of the same samples */
} part;

static void *room_for(int64_t count) {
    void *room = malloc((size_t)count * 4 + 64);
    if (!room) abort();
    return room;
}

static void part_open(part *s) {
    const int64_t width = s->end - s->begin, count = (s->to - s->from) * width;
    for (int k = 0; k < 3; k++) s->in[k] = room_for(count);
    s->gradient = room_for(count);
    s->mask = (uint8_t *)room_for(count);
    for (int64_t r = 0; r < s->to - s->from; r++)
        for (int64_t c = 0; c < width; c++) {
            const int64_t i = (s->from + r) * p.elements + s->begin + c;
            for (int k = 0; k < 3; k++) xd_store_f64(s->in[k], p.dtype, r * width + c, (double)p.in[k][i]);
            s->mask[r * width + c] = p.mask[i];
            xd_store_f64(s->gradient, p.gradient_dtype, r * width + c, 77.0);
        }
}

static void part_close(part *s, outcome *out) {
    const int64_t width = s->end - s->begin;
    for (int64_t r = 0; r < s->to - s->from; r++)
        for (int64_t c = 0; c < width; c++)
            out->gradient[(s->from + r) * p.elements + s->begin + c] =
                (float)xd_load_f64(s->gradient, p.gradient_dtype, r * width + c);
    if (!s->again) memcpy(out->distance + s->from, s->distance, (size_t)(s->to - s->from) * sizeof(double));
    for (int k = 0; k < 3; k++) free(s->in[k]);
    free(s->gradient);
    free(s->mask);
}

static xd_sample_common common_of(outcome *out, const part *s, xd_comm *split, xd_comm *comm) {
    xd_sample_common common;
    memset(&common, 0, sizeof common);
    common.weight = 1.5;
    common.scale = &p.factor;
    common.denominator_value = p.counted ? 0.0 : 1000.0;
    common.split = split;
    common.comm = comm;
    common.sample_loss = out->sample_loss + s->from;
    common.status = &out->status;
    return common;
}

static xd_result vsd_of(xd_ctx *ctx, part *s, const xd_sample_common *common, xd_sample_values *values) {
    const int64_t rows = s->to - s->from, width = s->end - s->begin;
    xd_vsd_desc d = xd_vsd_defaults();
    d.generated = xd_rows_of(s->in[0], p.dtype, rows, width);
    d.teacher = xd_rows_of(s->in[1], p.dtype, rows, width);
    d.fake = xd_rows_of(s->in[2], p.dtype, rows, width);
    d.gradient = xd_rows_of(s->gradient, p.gradient_dtype, rows, width);
    d.gradient.stride = p.gradient_stride;
    d.mask = p.masked ? s->mask : NULL;
    d.sample_scale = p.scale + s->from;
    d.chain = p.chain + s->from;
    d.distance = s->distance;
    d.normaliser = p.normaliser;
    d.form = p.form;
    d.common = *common;
    return xd_vsd_loss(ctx, &d, values);
}

static xd_result denoise_of(xd_ctx *ctx, const part *s, const xd_sample_common *common,
                            xd_sample_values *values) {
    const int64_t rows = s->to - s->from, width = s->end - s->begin;
    xd_denoise_desc d = xd_denoise_defaults();
    d.prediction = xd_rows_of(s->in[0], p.dtype, rows, width);
    d.clean = xd_rows_of(s->in[1], p.dtype, rows, width);
    d.noise = xd_rows_of(s->in[2], p.dtype, rows, width);
    d.gradient = xd_rows_of(s->gradient, p.gradient_dtype, rows, width);
    d.gradient.stride = p.gradient_stride;
    d.mask = p.masked ? s->mask : NULL;
    d.terms = p.terms + s->from;
    d.common = *common;
    return xd_denoise_loss(ctx, &d, values);
}

static void call(xd_ctx *ctx, part *s, xd_comm *split, xd_comm *comm, outcome *out) {
    const xd_sample_common common = common_of(out, s, split, comm);
    part_open(s);
    out->result =
        p.kind == VSD ? vsd_of(ctx, s, &common, &out->values) : denoise_of(ctx, s, &common, &out->values);
    part_close(s, out);
}

static void call_alone(xd_ctx *ctx, outcome *out) {
    part s;
    memset(&s, 0, sizeof s);
    s.to = SAMPLES;
    s.end = p.elements;
    memset(out, 0, sizeof *out);
    call(ctx, &s, NULL, NULL, out);
}

/* Ranks in a grid: `data` of them have samples of their own, of which `cut` ranks have parts. */
typedef struct grid {
    int data, cut;
    outcome *out;
    xd_sample_values values[8];
    xd_status status[8];
    double losses[8][SAMPLES];
} grid;

static xd_result grid_rank(xd_comm *world, void *argument) {
    grid *g = (grid *)argument;
    const int rank = xd_comm_rank(world), d = rank / g->cut, k = rank % g->cut;
    xd_comm *split = NULL, *comm = NULL;
    outcome mine;
    part s;
    memset(&s, 0, sizeof s);
    memset(&mine, 0, offsetof(outcome, gradient));
    XD_TRY(xd_comm_split(world, d, k, &split));
    XD_TRY(xd_comm_split(world, k, d, &comm));
    s.from = SAMPLES * d / g->data; /* uneven */
    s.to = SAMPLES * (d + 1) / g->data;
    s.begin =
        k == 1 ? p.elements / g->cut / 2 : p.elements * k / g->cut; /* uneven too; rank 0's part is short */
    s.end = k == 0 && g->cut > 1 ? p.elements / g->cut / 2 : p.elements * (k + 1) / g->cut;
    s.again = k > 0;
    outcome *whole = g->out;
    const xd_sample_common common = common_of(&mine, &s, split, comm);
    part_open(&s);
    mine.result = p.kind == VSD ? vsd_of(xd_comm_ctx(world), &s, &common, &mine.values)
                                : denoise_of(xd_comm_ctx(world), &s, &common, &mine.values);
    part_close(&s, whole);
    g->values[rank] = mine.values;
    g->status[rank] = mine.status;
    memcpy(g->losses[rank], mine.sample_loss, sizeof mine.sample_loss);
    if (k == 0)
        memcpy(whole->sample_loss + s.from, mine.sample_loss + s.from,
               (size_t)(s.to - s.from) * sizeof(double));
    xd_comm_destroy(comm);
    xd_comm_destroy(split);
    return mine.result;
}

static void call_grid(xd_reduction reduction, int data, int cut, outcome *out) {
    grid g;
    xd_ctx_desc desc;
    memset(&g, 0, sizeof g);
    memset(&desc, 0, sizeof desc);
    memset(out, 0, sizeof *out);
    desc.reduction = reduction;
    desc.cpu = xd_test_cpu();
    g.data = data;
    g.cut = cut;
    g.out = out;
    out->result = xd_run_threads(data * cut, &desc, grid_rank, &g, NULL);
    out->values = g.values[0];
    out->status = g.status[0];
    for (int r = 1; r < data * cut; r++) {
        CHECK(memcmp(&g.values[r], &g.values[0], sizeof g.values[0]) == 0);
        CHECK_EQ_INT(g.status[r].not_finite, g.status[0].not_finite);
        CHECK_EQ_INT(g.status[r].nothing_counted, g.status[0].nothing_counted);
    }
}

static void same_bits(const outcome *a, const outcome *b) {
    CHECK_EQ_INT(a->result, b->result);
    CHECK(memcmp(&a->values, &b->values, sizeof a->values) == 0);
    CHECK(memcmp(a->sample_loss, b->sample_loss, sizeof a->sample_loss) == 0);
    CHECK(memcmp(a->distance, b->distance, sizeof a->distance) == 0);
    CHECK(memcmp(a->gradient, b->gradient, (size_t)(SAMPLES * p.elements) * sizeof(float)) == 0);
}

static inline void same_as_formulas(const outcome *out, double tolerance) {
    const double loss = expected_loss();
    CHECK_EQ_INT(out->result, XD_OK);
    CHECK_EQ_INT(out->status.not_finite, 0);
    CHECK_NEAR(out->values.loss, loss, 1e-6 * fabs(loss));
    CHECK_NEAR(out->values.denominator, denominator_of(), 0.0);
    CHECK_EQ_INT(out->values.counted, counted_in(0, SAMPLES * p.elements));
    for (int b = 0; b < SAMPLES && p.kind == VSD; b++)
        CHECK_NEAR(out->distance[b], distance_of(b), 1e-6 * distance_of(b));
    for (int b = 0; b < SAMPLES; b++)
        for (int64_t i = b * p.elements;
             i<(b + 1) * p.elements; i += p.elements> 4096 ? 997 : p.elements / 9 + 1) {
            const double expected = expected_gradient(b, i);
            CHECK_NEAR(out->gradient[i], expected, tolerance * fabs(expected) + tolerance * 1e-4);
        }
}

static xd_ctx *context(xd_reduction reduction) {
    return open_ctx(1, NULL, reduction, xd_test_cpu());
}

#endif
