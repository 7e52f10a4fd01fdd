/* Losses over samples: the student's term and the denoising term against plain loops in double and finite differences, over
 * dtypes, masks, CPU levels, threads and splits; what they refuse and what they find. */
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
    bool masked, counted; /* counted: N is what the call counts, else 1000 */
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

static void same_as_formulas(const outcome *out, double tolerance) {
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

/* ---- values and gradients ---- */

XD_TEST(the_students_term_has_the_numbers_of_the_specification) {
    static float x[8] = { 1, 2, -1, .5f, .25f, -.75f, 1.5f, -2 },
                 t[8] = { .5f, 2.5f, -1.5f, 0, .3f, -.8f, 1.4f, -1.9f },
                 f[8] = { .75f, 2, -1, .25f, .28f, -.7f, 1.45f, -1.95f };
    static const double expected[8] = { 0.06249987500025,    -0.1249997500005,     0.1249997500005,
                                        0.06249987500025,    -0.03333288889481465, 0.16666444447407372,
                                        0.08333222223703686, -0.08333222223703686 };
    for (int form = 0; form < 2; form++) {
        float gradient[8];
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        xd_vsd_desc d = xd_vsd_defaults();
        xd_sample_values values;
        d.generated = xd_rows_of(x, XD_DTYPE_F32, 2, 4);
        d.teacher = xd_rows_of(t, XD_DTYPE_F32, 2, 4);
        d.fake = xd_rows_of(f, XD_DTYPE_F32, 2, 4);
        d.gradient = xd_rows_of(gradient, XD_DTYPE_F32, 2, 4);
        d.form = (xd_vsd_form)form;
        CHECK_EQ_INT(xd_vsd_loss(ctx, &d, &values), XD_OK);
        CHECK_NEAR(values.loss, 0.3273559232412808, 1e-6 * 0.33);
        for (int i = 0; i < 8; i++)
            CHECK_NEAR(gradient[i], expected[i],
                       (4 * ldexp(1.0, -24) * (fabs((double)x[i]) + fabs(8 * expected[i])) +
                        1e-5 * fabs(8 * expected[i])) /
                           8);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(values_and_gradients_are_those_of_the_formulas) {
    static const int64_t sizes[] = { 1, 7, 255, 256, 257, 2048, 2049, 16384, 16385, 40000 };
    for (int mode = 0; mode < 2; mode++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            for (int variant = 0; variant < 8; variant++) {
                xd_ctx *ctx = context(mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
                fill((loss_kind)(variant & 1), sizes[k], XD_DTYPE_F32, (variant & 2) != 0);
                p.counted = !(variant & 4);
                p.normaliser = (xd_vsd_normaliser)(sizes[k] < 7 ? 0 : (int)k % 3);
                if (p.masked && p.normaliser == XD_VSD_ORIGINAL)
                    p.normaliser = XD_VSD_MEAN; /* the empty sample */
                call_alone(ctx, &first);
                same_as_formulas(&first, 2e-6);
                xd_ctx_destroy(ctx);
            }
}

XD_TEST(narrow_types_are_widened_and_gradients_rounded_once) {
    static const xd_dtype types[] = { XD_DTYPE_BF16, XD_DTYPE_F16 };
    for (int k = 0; k < 2; k++)
        for (int variant = 0; variant < 4; variant++) {
            xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
            fill((loss_kind)(variant & 1), 3001, types[k], (variant & 2) != 0);
            p.counted = false; /* gradients of a size that F16 holds */
            p.gradient_dtype = XD_DTYPE_F32;
            call_alone(ctx, &first);
            same_as_formulas(&first, 2e-6);
            p.gradient_dtype = types[k];
            call_alone(ctx, &second);
            for (int64_t i = 0; i < SAMPLES * p.elements; i++)
                if (second.gradient[i] != rounded(first.gradient[i], types[k]))
                    CHECK_NEAR(second.gradient[i], rounded(first.gradient[i], types[k]), 0.0);
            CHECK(memcmp(&first.values, &second.values, sizeof first.values) == 0);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(the_peers_roundings_are_near_the_exact_form) {
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    fill(VSD, 5000, XD_DTYPE_BF16, true);
    call_alone(ctx, &first);
    p.form = XD_VSD_COMPAT;
    call_alone(ctx, &second);
    double error = 0.0, size = 0.0;
    for (int64_t i = 0; i < SAMPLES * p.elements; i++) {
        error += pow((double)second.gradient[i] - (double)first.gradient[i], 2.0);
        size += pow((double)first.gradient[i], 2.0);
    }
    CHECK(sqrt(error / size) > 1e-3); /* they do round */
    CHECK(sqrt(error / size) < 3.5e-2);
    CHECK_NEAR(second.values.loss, first.values.loss, 2e-2 * first.values.loss);
    xd_ctx_destroy(ctx);
}

/* ---- bits ---- */

XD_TEST(every_level_and_number_of_threads_has_the_same_bits) {
    static const xd_dtype types[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16 };
    for (int variant = 0; variant < 24; variant++) {
        const xd_reduction mode = variant & 4 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        fill((loss_kind)(variant & 1), variant & 8 ? 39987 : 2311, types[variant % 3], (variant & 2) != 0);
        p.form = variant & 16 ? XD_VSD_COMPAT : XD_VSD_EXACT;
        xd_ctx *plain = open_ctx(1, NULL, mode, XD_CPU_PLAIN);
        call_alone(plain, &first);
        xd_ctx_destroy(plain);
        XD_TEST_LEVELS(level, XD_CPU_PLAIN)
        for (int threads = 1; threads <= 3; threads += 2) {
            xd_ctx *ctx = open_ctx(threads, NULL, mode, (xd_cpu_level)level);
            call_alone(ctx, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
    }
}

/* Tiles of one type without a mask are formed apart from others; 6160 elements are three and sixteen. */
XD_TEST(whole_tiles_have_the_same_bits_on_every_level_with_numbers_that_are_not_finite_too) {
    static const float found[] = { 0.0f, INFINITY, NAN };
    for (int variant = 0; variant < 12; variant++) {
        const int special = variant / 4;
        fill((loss_kind)(variant & 1), 6160, variant & 2 ? XD_DTYPE_BF16 : XD_DTYPE_F32, false);
        if (special) p.in[special - 1][p.elements + 4099] = found[special];
        xd_ctx *plain = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_PLAIN);
        call_alone(plain, &first);
        xd_ctx_destroy(plain);
        CHECK_EQ_INT(first.status.not_finite, special ? 1 : 0);
        XD_TEST_LEVELS(level, XD_CPU_PORTABLE) {
            xd_ctx *ctx = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, (xd_cpu_level)level);
            call_alone(ctx, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
    }
}

/* A mask makes N unknown until all samples were measured, so gradients come after all sums. */
XD_TEST(one_sample_after_the_other_has_the_bits_of_all_sums_before_all_gradients) {
    static const int64_t lengths[] = { 1, 300, 16391, 40000 };
    for (int k = 0; k < 16; k++) {
        xd_ctx *ctx = context(k % 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC);
        fill(k < 8 ? VSD : DENOISE, lengths[k % 8 / 2], k % 4 < 2 ? XD_DTYPE_F32 : XD_DTYPE_BF16, false);
        call_alone(ctx, &first);
        p.masked = true;
        memset(p.mask, 1, sizeof p.mask);
        call_alone(ctx, &second);
        CHECK_EQ_INT(first.result, XD_OK);
        same_bits(&first, &second);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(invariant_mode_has_the_same_bits_for_every_split_of_samples_and_batch) {
    static const int grids[][2] = { { 1, 1 }, { 1, 2 }, { 1, 3 }, { 1, 4 },
                                    { 2, 1 }, { 4, 1 }, { 2, 2 }, { 3, 2 } };
    for (int variant = 0; variant < 8; variant++)
        for (size_t k = 0; k < sizeof grids / sizeof *grids; k++) {
            fill((loss_kind)(variant & 1), variant & 4 ? 20011 : 3, XD_DTYPE_F32, (variant & 2) != 0);
            p.form = variant == 6 ? XD_VSD_COMPAT : XD_VSD_EXACT;
            xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
            call_alone(ctx, &first);
            call_grid(XD_REDUCTION_INVARIANT, grids[k][0], grids[k][1], &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(deterministic_mode_agrees_to_rounding_over_splits) {
    for (int variant = 0; variant < 4; variant++) {
        fill((loss_kind)(variant & 1), 9001, XD_DTYPE_F32, (variant & 2) != 0);
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        call_alone(ctx, &first);
        call_grid(XD_REDUCTION_DETERMINISTIC, 2, 3, &second);
        CHECK_EQ_INT(second.result, XD_OK);
        CHECK_NEAR(first.values.loss, second.values.loss, 1e-13 * first.values.loss);
        for (int64_t i = 0; i < SAMPLES * p.elements; i++)
            CHECK_NEAR(first.gradient[i], second.gradient[i], 2e-7 * fabs((double)first.gradient[i]));
        xd_ctx_destroy(ctx);
    }
}

/* Counts what is allocated. */
static void *counted_allocate(void *user, size_t bytes) {
    ++*(int *)user;
    return malloc(bytes);
}

static void counted_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

XD_TEST(a_workspace_of_the_size_asked_is_enough_and_nothing_is_allocated) {
    for (int variant = 0; variant < 8; variant++) {
        const int kind = variant & 1;
        int allocations = 0;
        xd_ctx_desc desc;
        xd_ctx *ctx = NULL;
        xd_vsd_desc vsd = xd_vsd_defaults();
        xd_denoise_desc denoise = xd_denoise_defaults();
        memset(&desc, 0, sizeof desc);
        desc.allocator.allocate = counted_allocate;
        desc.allocator.release = counted_release;
        desc.allocator.user = &allocations;
        desc.reduction = variant & 2 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        fill((loss_kind)kind, variant & 4 ? 33333 : 20, XD_DTYPE_F32, false);
        call_alone(ctx, &first);
        part s;
        memset(&s, 0, sizeof s);
        memset(&second, 0, sizeof second);
        s.to = SAMPLES;
        s.end = p.elements;
        xd_sample_common common = common_of(&second, &s, NULL, NULL);
        vsd.generated.rows = denoise.prediction.rows = SAMPLES;
        vsd.generated.cols = denoise.prediction.cols = p.elements;
        common.workspace_bytes =
            kind ? xd_denoise_workspace_bytes(ctx, &denoise) : xd_vsd_workspace_bytes(ctx, &vsd);
        common.workspace = malloc(common.workspace_bytes);
        part_open(&s);
        const int before = allocations;
        second.result = kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                    : denoise_of(ctx, &s, &common, &second.values);
        CHECK_EQ_INT(allocations, before);
        same_bits(&first, (part_close(&s, &second), &second));
        part_open(&s);
        common.workspace_bytes--;
        second.result = kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                    : denoise_of(ctx, &s, &common, &second.values);
        CHECK_EQ_INT(second.result, XD_ERROR_ARGUMENT);
        part_close(&s, &second);
        free(common.workspace);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(a_gradient_may_lie_over_an_input) {
    for (int k = 0; k < 3; k++)
        for (int kind = 0; kind < 2; kind++) {
            xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
            fill((loss_kind)kind, 4321, XD_DTYPE_F32, false);
            call_alone(ctx, &first);
            part s;
            memset(&s, 0, sizeof s);
            memset(&second, 0, sizeof second);
            s.to = SAMPLES;
            s.end = p.elements;
            const xd_sample_common common = common_of(&second, &s, NULL, NULL);
            part_open(&s);
            void *apart = s.gradient;
            s.gradient = s.in[k];
            second.result = kind == VSD ? vsd_of(ctx, &s, &common, &second.values)
                                        : denoise_of(ctx, &s, &common, &second.values);
            memcpy(apart, s.in[k], (size_t)(SAMPLES * p.elements) * sizeof(float));
            s.gradient = apart;
            part_close(&s, &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
}

/* ---- findings ---- */

XD_TEST(what_is_not_finite_makes_its_sample_zero_and_no_bit_of_another_differs) {
    static const float values[] = { NAN, HUGE_VALF, -HUGE_VALF };
    for (int variant = 0; variant < 36; variant++) {
        const int k = variant % 3, kind = variant / 18;
        const xd_reduction mode = variant & 1 ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        xd_ctx *ctx = context(mode);
        fill((loss_kind)kind, 2500, XD_DTYPE_F32, true);
        p.form = kind == VSD && variant % 4 == 0 ? XD_VSD_COMPAT : XD_VSD_EXACT;
        int64_t at = 3 * p.elements + 17;
        while (!p.mask[at]) at++;
        const float before = p.in[k][at];
        p.in[k][at] = values[variant / 3 % 3];
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.result, XD_OK);
        CHECK_EQ_INT(first.status.not_finite, 1);
        CHECK_EQ_INT(first.status.first_row, 3);
        CHECK(!isfinite(first.status.first_value));
        CHECK_NEAR(first.sample_loss[3], 0.0, 0.0);
        for (int64_t i = 0; i < p.elements; i++) CHECK(first.gradient[3 * p.elements + i] == 0.0f);
        call_grid(mode, 1, 2, &second);
        CHECK_EQ_INT(second.status.not_finite, 1);
        p.in[k][at] = before;
        call_alone(ctx, &second);
        CHECK_EQ_INT(second.status.not_finite, 0);
        for (int b = 0; b < SAMPLES; b++) CHECK(b == 3 || first.sample_loss[b] == second.sample_loss[b]);
        CHECK(memcmp(first.gradient, second.gradient, (size_t)(3 * p.elements) * sizeof(float)) == 0);
        CHECK(memcmp(first.gradient + 4 * p.elements, second.gradient + 4 * p.elements,
                     (size_t)p.elements * sizeof(float)) == 0);
        p.in[k][at] = values[variant / 3 % 3];
        p.mask[at] = 0; /* a masked element may be anything */
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.not_finite, 0);
        CHECK(isfinite(first.values.loss) && first.gradient[at] == 0.0f);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(factors_that_are_not_finite_are_findings_of_their_sample) {
    for (int variant = 0; variant < 6; variant++) {
        xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
        fill(variant < 3 ? VSD : DENOISE, 100, XD_DTYPE_F32, false);
        if (variant == 0) p.scale[1] = NAN;
        if (variant == 1) p.scale[1] = -1.0;
        if (variant == 2) p.chain[1] = HUGE_VAL;
        if (variant == 3) p.terms[1].prediction = 1e300; /* not in f32 */
        if (variant == 4) p.terms[1].weight = -0.5;
        if (variant == 5) p.terms[1].noise = NAN;
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.not_finite, 1);
        CHECK_EQ_INT(first.status.first_row, 1);
        CHECK_NEAR(first.sample_loss[1], 0.0, 0.0);
        CHECK(isfinite(first.values.loss) && first.values.loss > 0.0);
        p.factor = NAN;
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.not_finite, 2);
        CHECK_NEAR(first.values.loss, 0.0, 0.0);
        for (int64_t i = 0; i < SAMPLES * p.elements; i++) CHECK(first.gradient[i] == 0.0f);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(the_weight_overflows_in_f16_as_the_peers_do_and_not_in_the_exact_form) {
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    fill(VSD, 64, XD_DTYPE_F16, false);
    for (int64_t i = 0; i < p.elements; i++) p.in[0][i] = p.in[1][i]; /* m = 0, w = 1e6 / 2 */
    call_alone(ctx, &first);
    CHECK_EQ_INT(first.status.not_finite, 0);
    CHECK(first.sample_loss[0] > 0.0);
    p.form = XD_VSD_COMPAT;
    call_alone(ctx, &first);
    CHECK_EQ_INT(first.status.not_finite, 1);
    CHECK_EQ_INT(first.status.first_row, 0);
    CHECK_NEAR(first.sample_loss[0], 0.0, 0.0);
    CHECK(first.sample_loss[1] > 0.0);
    p.form = XD_VSD_EXACT;
    p.normaliser = XD_VSD_ORIGINAL; /* x equal to T: such a sample contributes nothing */
    call_alone(ctx, &first);
    CHECK_EQ_INT(first.status.not_finite, 0);
    CHECK_NEAR(first.sample_loss[0], 0.0, 0.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(where_nothing_counts_all_is_zero_and_the_status_says_so) {
    for (int kind = 0; kind < 2; kind++) {
        xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
        fill((loss_kind)kind, 33, XD_DTYPE_F32, true);
        memset(p.mask, 0, sizeof p.mask);
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.nothing_counted, 1);
        CHECK_NEAR(first.values.loss, 0.0, 0.0);
        for (int64_t i = 0; i < SAMPLES * p.elements; i++) CHECK(first.gradient[i] == 0.0f);
        p.counted = false; /* N is given: nothing to report */
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.status.nothing_counted, 0);
        p.elements = 0;
        call_alone(ctx, &first);
        CHECK_EQ_INT(first.result, XD_OK);
        CHECK_EQ_INT(first.values.counted, 0);
        xd_ctx_destroy(ctx);
    }
}

XD_TEST(an_empty_batch_is_no_error_when_others_have_samples) {
    static const int grids[][2] = { { 7, 1 }, { 6, 1 } }; /* more ranks than samples */
    for (int kind = 0; kind < 2; kind++)
        for (int k = 0; k < 2; k++) {
            fill((loss_kind)kind, 300, XD_DTYPE_F32, false);
            xd_ctx *ctx = context(XD_REDUCTION_INVARIANT);
            call_alone(ctx, &first);
            call_grid(XD_REDUCTION_INVARIANT, grids[k][0], grids[k][1], &second);
            same_bits(&first, &second);
            xd_ctx_destroy(ctx);
        }
}

XD_TEST(without_a_status_findings_are_errors_and_the_value_is_untouched) {
    float x[4] = { 1, NAN, 2, 3 }, t[4] = { 0, 0, 0, 0 }, f[4] = { 1, 1, 1, 1 }, g[4] = { 9, 9, 9, 9 };
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_vsd_desc d = xd_vsd_defaults();
    xd_sample_values values = { 5.0, 5.0, 5 };
    d.generated = xd_rows_of(x, XD_DTYPE_F32, 2, 2);
    d.teacher = xd_rows_of(t, XD_DTYPE_F32, 2, 2);
    d.fake = xd_rows_of(f, XD_DTYPE_F32, 2, 2);
    d.gradient = xd_rows_of(g, XD_DTYPE_F32, 2, 2);
    CHECK_EQ_INT(xd_vsd_loss(ctx, &d, &values), XD_ERROR_DATA);
    CHECK_NEAR(values.loss, 5.0, 0.0);
    CHECK(g[0] == 0.0f && g[1] == 0.0f && g[2] > 0.0f);
    xd_ctx_destroy(ctx);
}

/* ---- refusals ---- */

static void refuse_vsd(xd_ctx *ctx, const xd_vsd_desc *d, xd_result expected, const char *says) {
    xd_sample_values values = { 5.0, 5.0, 5 };
    CHECK_EQ_INT(xd_vsd_loss(ctx, d, &values), expected);
    CHECK_NEAR(values.loss, 5.0, 0.0);
    CHECK(strstr(xd_last_error(ctx)->message, says) != NULL);
    if (!strstr(xd_last_error(ctx)->message, says)) printf("%s\n", xd_last_error(ctx)->message);
}

XD_TEST(the_students_term_refuses_what_it_cannot_read) {
    static float room[3][12];
    char memory[64];
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_vsd_desc good = xd_vsd_defaults(), d;
    good.generated = xd_rows_of(room[0], XD_DTYPE_F32, 2, 4);
    good.teacher = xd_rows_of(room[1], XD_DTYPE_F32, 2, 4);
    good.fake = xd_rows_of(room[2], XD_DTYPE_F32, 2, 4);
    good.gradient = xd_rows_of(room[0], XD_DTYPE_F32, 2, 4);
    d = good, d.teacher.cols = 3;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "teacher is [2, 3] but [2, 4] is expected");
    d = good, d.fake.rows = 3;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "fake is [3, 4]");
    d = good, d.generated.rows = -1;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "-1 samples");
    d = good, d.generated.stride = 2;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "stride 2");
    d = good, d.fake.dtype = XD_DTYPE_F64;
    refuse_vsd(ctx, &d, XD_ERROR_DTYPE, "fake is F64");
    d = good, d.teacher.data = NULL;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "teacher has no data");
    d = good, d.gradient.dtype = XD_DTYPE_BF16;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "gradient over an input");
    d = good, d.gradient.cols = 5;
    refuse_vsd(ctx, &d, XD_ERROR_SHAPE, "gradient is [2, 5]");
    d = good, d.normaliser = (xd_vsd_normaliser)9;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "normaliser 9");
    d = good, d.form = (xd_vsd_form)-1;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "form -1");
    d = good, d.common.weight = 0.0;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "weight 0");
    d = good, d.common.weight = NAN;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "weight");
    d = good, d.common.denominator_value = -2.0;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "denominator -2");
    d = good, d.common.workspace = memory, d.common.workspace_bytes = sizeof memory;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "workspace has 64 bytes but the loss needs");
    d = good, d.generated.rows = d.teacher.rows = d.fake.rows = INT64_MAX / 4, d.gradient.data = NULL;
    refuse_vsd(ctx, &d, XD_ERROR_ARGUMENT, "would not fit");
    CHECK_EQ_INT(xd_vsd_workspace_bytes(ctx, &d), 0);
    xd_ctx_destroy(ctx);
}

static void refuse_denoise(xd_ctx *ctx, const xd_denoise_desc *d, xd_result expected, const char *says) {
    xd_sample_values values = { 5.0, 5.0, 5 };
    CHECK_EQ_INT(xd_denoise_loss(ctx, d, &values), expected);
    CHECK_NEAR(values.loss, 5.0, 0.0);
    CHECK(strstr(xd_last_error(ctx)->message, says) != NULL);
}

XD_TEST(the_denoising_term_refuses_what_it_cannot_read) {
    static float room[3][12];
    static const xd_denoise_term terms[2] = { { 1, 1, 1, 1 }, { 1, 1, 1, 1 } };
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    xd_denoise_desc good = xd_denoise_defaults(), d;
    good.prediction = xd_rows_of(room[0], XD_DTYPE_F32, 2, 4);
    good.clean = xd_rows_of(room[1], XD_DTYPE_F32, 2, 4);
    good.noise = xd_rows_of(room[2], XD_DTYPE_F32, 2, 4);
    good.terms = terms;
    d = good, d.terms = NULL;
    refuse_denoise(ctx, &d, XD_ERROR_ARGUMENT, "no terms for 2 samples");
    d = good, d.noise.cols = 3;
    refuse_denoise(ctx, &d, XD_ERROR_SHAPE, "noise is [2, 3]");
    d = good, d.clean.dtype = XD_DTYPE_I32;
    refuse_denoise(ctx, &d, XD_ERROR_DTYPE, "clean is I32");
    d = good, d.common.weight = -1.0;
    refuse_denoise(ctx, &d, XD_ERROR_ARGUMENT, "weight -1");
    xd_ctx_destroy(ctx);
}

/* One rank refuses, or ranks have different numbers of samples: all return an error. */
static xd_result uneven_rank(xd_comm *world, void *argument) {
    static float room[2][3][12];
    const int rank = xd_comm_rank(world), *variant = (const int *)argument;
    xd_vsd_desc d = xd_vsd_defaults();
    xd_sample_values values = { 5.0, 5.0, 5 };
    const int64_t rows = *variant == 0 ? 2 - rank : 2;
    d.generated = xd_rows_of(room[rank][0], XD_DTYPE_F32, rows, 4);
    d.teacher = xd_rows_of(room[rank][1], XD_DTYPE_F32, rows, 4);
    d.fake = xd_rows_of(room[rank][2], XD_DTYPE_F32, rows, 4);
    if (*variant == 1 && rank == 1) d.common.weight = -3.0;
    if (*variant == 2) d.common.comm = world;
    if (*variant == 2 && rank == 0) d.fake.cols = 9;
    if (*variant != 2) d.common.split = world;
    const xd_result result = xd_vsd_loss(xd_comm_ctx(world), &d, &values);
    const xd_result own = *variant == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_SHAPE;
    const bool mine = rank == (*variant == 1); /* the others are told whose */
    CHECK_EQ_INT(result, *variant == 0 ? XD_ERROR_MISMATCH : mine ? own : XD_ERROR_PEER);
    CHECK(*variant == 0 ||
          strstr(xd_last_error(xd_comm_ctx(world))->message, *variant == 1 ? "weight -3" : "[2, 9]"));
    CHECK_NEAR(values.loss, 5.0, 0.0);
    return XD_OK;
}

XD_TEST(all_ranks_refuse_alike) {
    for (int variant = 0; variant < 3; variant++)
        CHECK_EQ_INT(xd_run_threads(2, NULL, uneven_rank, &variant, NULL), XD_OK);
}

/* ---- terms of the denoising loss ---- */

XD_TEST(terms_are_those_of_the_table_for_rectified_flow) {
    static const double t = 0.3;
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW);
    const double factor[] = { -t, 1.0 - t, 0.0, 1.0 }; /* of r = v - (eps - x), by space */
    static const xd_prediction spaces[] = { XD_PREDICT_X0, XD_PREDICT_EPS, XD_PREDICT_FLOW };
    for (int k = 0; k < 3; k++) {
        xd_denoise_form form;
        xd_denoise_term term;
        memset(&form, 0, sizeof form);
        form.native = XD_PREDICT_FLOW;
        form.space = spaces[k];
        CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &form, t, &term), XD_OK);
        const double a = factor[(int)spaces[k]];
        CHECK_NEAR(term.prediction, a, 1e-12);
        CHECK_NEAR(term.clean, a, 1e-12);
        CHECK_NEAR(term.noise, -a, 1e-12);
        CHECK_NEAR(term.weight, 1.0, 0.0);
    }
    xd_ctx_destroy(ctx);
}

/* A prediction made from x and eps leaves no residual, whatever is predicted and wherever it is compared. */
XD_TEST(a_perfect_prediction_leaves_no_residual_in_any_space) {
    static const xd_noise_kind kinds[] = { XD_NOISE_FLOW, XD_NOISE_EDM, XD_NOISE_TRIG };
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    for (int k = 0; k < 3; k++)
        for (int native = 0; native <= (int)XD_PREDICT_SCORE; native++)
            for (int space = 0; space <= (int)XD_PREDICT_SCORE; space++) {
                const xd_noise_schedule schedule = xd_noise_defaults(kinds[k]);
                xd_denoise_form form;
                xd_denoise_term term;
                xd_mix target;
                xd_conversion predicted;
                memset(&form, 0, sizeof form);
                memset(&predicted, 0, sizeof predicted);
                predicted.to = (xd_prediction)native;
                form.native = (xd_prediction)native;
                form.space = (xd_prediction)space;
                const bool has_v = kinds[k] == XD_NOISE_TRIG;
                if (!has_v && (native == (int)XD_PREDICT_V || space == (int)XD_PREDICT_V)) {
                    CHECK_EQ_INT(xd_denoise_term_at(ctx, &schedule, &form, 0.7, &term), XD_ERROR_ARGUMENT);
                    continue;
                }
                CHECK_EQ_INT(xd_denoise_term_at(ctx, &schedule, &form, 0.7, &term), XD_OK);
                CHECK_EQ_INT(xd_target_mix(ctx, &schedule, &predicted, 0.7, &target), XD_OK);
                CHECK_NEAR(term.prediction * target.c0 + term.clean, 0.0, 1e-12);
                CHECK_NEAR(term.prediction * target.c1 + term.noise, 0.0, 1e-12);
            }
    xd_ctx_destroy(ctx);
}

XD_TEST(weights_of_terms_are_those_of_the_ratio) {
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    const xd_noise_schedule edm = xd_noise_defaults(XD_NOISE_EDM);
    xd_denoise_form form;
    xd_denoise_term term = { 9, 9, 9, 9 };
    memset(&form, 0, sizeof form);
    form.weight = XD_DENOISE_EDM;
    form.sigma_data = 0.5;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 2.0, &term), XD_OK);
    CHECK_NEAR(term.weight, 0.25 + 4.0, 1e-12);
    form.weight = XD_DENOISE_SNR_MIN;
    form.gamma = 5.0;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 2.0, &term), XD_OK);
    CHECK_NEAR(term.weight, 0.25, 1e-12);
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 0.1, &term), XD_OK);
    CHECK_NEAR(term.weight, 5.0, 0.0);
    form.weight = XD_DENOISE_USER;
    form.user = 0.0;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &edm, &form, 0.1, &term), XD_OK);
    CHECK_NEAR(term.weight, 0.0, 0.0);
    xd_ctx_destroy(ctx);
}

XD_TEST(terms_that_mean_nothing_are_refused) {
    xd_ctx *ctx = context(XD_REDUCTION_DETERMINISTIC);
    const xd_noise_schedule flow = xd_noise_defaults(XD_NOISE_FLOW);
    xd_denoise_form good, f;
    xd_denoise_term term = { 9, 9, 9, 9 };
    memset(&good, 0, sizeof good);
    f = good, f.weight = (xd_denoise_weight)7;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_EDM; /* sigma_data 0 */
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_SNR_MIN, f.gamma = -1.0;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_SNR_MIN, f.gamma = 5.0, f.space = XD_PREDICT_EPS;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.weight = XD_DENOISE_USER, f.user = NAN;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.native = XD_PREDICT_V, f.space = XD_PREDICT_V; /* under rectified flow */
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    f = good, f.native = XD_PREDICT_FLOW, f.v_of_any_schedule = true;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.5, &term), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &good, NAN, &term), XD_ERROR_ARGUMENT);
    CHECK_NEAR(term.weight, 9.0, 0.0);
    f = good, f.native = XD_PREDICT_V, f.space = XD_PREDICT_V, f.v_of_any_schedule = true;
    CHECK_EQ_INT(xd_denoise_term_at(ctx, &flow, &f, 0.25, &term), XD_OK);
    CHECK_NEAR(term.clean, 0.25, 0.0);
    CHECK_NEAR(term.noise, -0.75, 0.0);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
