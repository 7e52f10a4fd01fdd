/* Gradient norms and clipping: one rank, many ranks, uneven and empty shards, replicas, extremes, non-finite
 * values. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

static xd_param clip_param(float *gradient, int64_t count) {
    xd_param p;
    memset(&p, 0, sizeof p);
    p.name = "w";
    p.gradient = gradient;
    p.dtype = XD_DTYPE_F32;
    p.count = count;
    return p;
}

static xd_gradient_norm_desc clip_desc(const xd_param *params, int64_t count, xd_norm_type type) {
    xd_gradient_norm_desc d;
    memset(&d, 0, sizeof d);
    d.params = params;
    d.param_count = count;
    d.type = type;
    return d;
}

static xd_ctx *clip_ctx(xd_reduction reduction) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = reduction;
    xd_ctx *ctx = NULL;
    CHECK(xd_ctx_create(&desc, &ctx) == XD_OK);
    return ctx;
}

/* Norm of one array on one rank. */
static double clip_norm(float *gradient, int64_t count, xd_norm_type type, xd_reduction reduction) {
    xd_ctx *ctx = clip_ctx(reduction);
    const xd_param param = clip_param(gradient, count);
    const xd_gradient_norm_desc desc = clip_desc(&param, 1, type);
    xd_gradient_norm norm;
    memset(&norm, 0, sizeof norm);
    CHECK(xd_gradient_norm_compute(ctx, NULL, &desc, &norm) == XD_OK);
    xd_ctx_destroy(ctx);
    return norm.norm;
}

XD_TEST(norms_of_a_small_vector_are_exact) {
    float g[3] = { 3.0f, -4.0f, 12.0f };
    for (int mode = 0; mode < 2; mode++) {
        const xd_reduction reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        CHECK(clip_norm(g, 3, XD_NORM_L2, reduction) == 13.0);
        CHECK(clip_norm(g, 3, XD_NORM_L1, reduction) == 19.0);
        CHECK(clip_norm(g, 3, XD_NORM_MAX, reduction) == 12.0);
        CHECK(clip_norm(g, 0, XD_NORM_L2, reduction) == 0.0);
    }
}

XD_TEST(the_largest_and_the_smallest_floats_neither_overflow_nor_vanish) {
    const float largest = ldexpf(16777215.0f, 104), smallest = ldexpf(1.0f, -149);
    float big[2], small[4];
    big[0] = largest;
    big[1] = -largest;
    for (int i = 0; i < 4; i++) small[i] = smallest;
    for (int mode = 0; mode < 2; mode++) {
        const xd_reduction reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        CHECK_NEAR(clip_norm(big, 2, XD_NORM_L2, reduction) / (sqrt(2.0) * (double)largest), 1.0, 1e-15);
        CHECK(clip_norm(big, 2, XD_NORM_L1, reduction) == 2.0 * (double)largest);
        CHECK(clip_norm(small, 4, XD_NORM_L2, reduction) == 2.0 * (double)smallest);
        CHECK(clip_norm(small, 4, XD_NORM_L1, reduction) == 4.0 * (double)smallest);
    }
}

/* Half a unit in the last place, with and without something below it. */
XD_TEST(the_exact_sum_is_rounded_once_to_nearest_even) {
    int64_t limbs[XD_NORM_LIMBS];
    memset(limbs, 0, sizeof limbs);
    limbs[10] = 1; /* 2^0 */
    limbs[9] = 0;
    limbs[8] = INT64_C(1) << 11; /* 2^-53: a tie */
    CHECK(xd_norm_limbs_read(limbs) == 1.0);
    limbs[0] = 1;
    CHECK(xd_norm_limbs_read(limbs) == 1.0 + ldexp(1.0, -52));
    limbs[0] = 0;
    limbs[8] = INT64_C(3) << 11; /* a tie above an odd last bit */
    CHECK(xd_norm_limbs_read(limbs) == 1.0 + ldexp(1.0, -51));
    limbs[8] = INT64_C(1) << 40; /* not carried yet: 2^-24 */
    CHECK(xd_norm_limbs_read(limbs) == 1.0 + ldexp(1.0, -24));
}

enum { CLIP_N = 301, CLIP_RANKS = 5 };

typedef struct clip_job {
    float gradient[CLIP_N];
    int cut[CLIP_RANKS + 1]; /* rank r holds [cut[r], cut[r + 1]) */
    xd_norm_type type;
    bool narrow; /* bf16 gradients */
    xd_gradient_norm result[CLIP_RANKS];
} clip_job;

/* Each rank lists its shard and a replica of the first ten elements, which only rank 0 counts. */
static xd_result clip_rank(xd_comm *world, void *argument) {
    clip_job *job = (clip_job *)argument;
    const int rank = xd_comm_rank(world), begin = job->cut[rank], n = job->cut[rank + 1] - begin;
    uint16_t half[CLIP_N + 1];
    float shared[10];
    memcpy(shared, job->gradient, sizeof shared);
    for (int i = 0; i < n; i++) half[i] = xd_bf16_from_f32(job->gradient[begin + i]);
    xd_param params[3];
    params[0] = clip_param(job->gradient + begin, n);
    if (job->narrow) {
        params[0].gradient = half;
        params[0].gradient_dtype = XD_DTYPE_BF16;
    }
    params[1] = clip_param(shared, 10);
    params[1].replica = rank != 0;
    params[2] = clip_param(shared, 10);
    params[2].frozen = true;
    xd_gradient_norm_desc desc = clip_desc(params, 3, job->type);
    desc.max_norm = 1.0;
    return xd_gradient_norm_compute(xd_comm_ctx(world), world, &desc, &job->result[rank]);
}

/* Deals the elements to ranks unevenly; with more than two, rank 1 gets none. */
static double clip_world(clip_job *job, int ranks, xd_reduction reduction) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reduction = reduction;
    for (int r = 0; r <= ranks; r++) job->cut[r] = r == ranks ? CLIP_N : CLIP_N * r * r / (ranks * ranks);
    if (ranks > 2) job->cut[1] = job->cut[2];
    CHECK(xd_run_threads(ranks, &desc, clip_rank, job, NULL) == XD_OK);
    for (int r = 1; r < ranks; r++)
        CHECK(memcmp(&job->result[r].norm, &job->result[0].norm, sizeof(double)) == 0);
    return job->result[0].norm;
}

static void clip_job_fill(clip_job *job, xd_norm_type type) {
    memset(job, 0, sizeof *job);
    job->type = type;
    uint32_t seed = 17u;
    for (int i = 0; i < CLIP_N; i++) {
        seed = seed * 1664525u + 1013904223u;
        job->gradient[i] = ldexpf((float)((double)(seed >> 8) / 8388608.0 - 1.0), (int)(seed % 41u) - 20);
    }
}

XD_TEST(norms_count_each_logical_element_once_on_any_number_of_ranks) {
    static const int worlds[4] = { 1, 2, 3, 5 };
    for (int type = 0; type < 3; type++) {
        clip_job job;
        clip_job_fill(&job, (xd_norm_type)type);
        double sum = 0.0, largest = 0.0;
        for (int i = 0; i < CLIP_N + 10; i++) {
            const double x = fabs((double)job.gradient[i < CLIP_N ? i : i - CLIP_N]);
            sum += type == 0 ? x * x : x;
            largest = x > largest ? x : largest;
        }
        const double expected = type == 0 ? sqrt(sum) : type == 1 ? sum : largest;
        for (int w = 0; w < 4; w++) {
            CHECK_NEAR(clip_world(&job, worlds[w], XD_REDUCTION_DETERMINISTIC), expected, 1e-12 * expected);
            CHECK_NEAR(job.result[0].coefficient, 1.0 / (expected + 1e-6), 1e-6);
        }
    }
}

XD_TEST(invariant_norms_have_the_same_bits_for_every_split) {
    static const int worlds[4] = { 1, 2, 3, 5 };
    for (int k = 0; k < 6; k++) {
        clip_job job;
        clip_job_fill(&job, (xd_norm_type)(k / 2));
        job.narrow = k % 2 == 1;
        const double one = clip_world(&job, 1, XD_REDUCTION_INVARIANT);
        for (int w = 1; w < 4; w++) {
            const double other = clip_world(&job, worlds[w], XD_REDUCTION_INVARIANT);
            CHECK(memcmp(&one, &other, sizeof one) == 0);
        }
    }
}

XD_TEST(one_bad_element_is_known_to_every_rank) {
    clip_job job;
    for (int mode = 0; mode < 2; mode++) {
        const xd_reduction reduction = mode ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC;
        for (int type = 0; type < 3; type++) {
            clip_job_fill(&job, (xd_norm_type)type);
            job.gradient[200] = -INFINITY;
            CHECK(isinf(clip_world(&job, 3, reduction)));
            for (int r = 0; r < 3; r++)
                CHECK(job.result[r].not_finite == 1 && job.result[r].coefficient == 1.0f);
            job.gradient[100] = NAN;
            clip_world(&job, 3, reduction);
            for (int r = 0; r < 3; r++) CHECK(isnan(job.result[r].norm) && job.result[r].not_finite == 2);
        }
    }
}

static xd_result clip_rank_refused(xd_comm *world, void *argument) {
    xd_result *results = (xd_result *)argument;
    const int rank = xd_comm_rank(world);
    float gradient[2] = { 1.0f, 2.0f };
    xd_param param = clip_param(gradient, 2);
    if (rank == 1) param.gradient_dtype = XD_DTYPE_F64;
    const xd_gradient_norm_desc desc = clip_desc(&param, 1, XD_NORM_L2);
    xd_gradient_norm norm;
    norm.norm = -1.0;
    results[rank] = xd_gradient_norm_compute(xd_comm_ctx(world), world, &desc, &norm);
    CHECK(norm.norm == -1.0);
    return XD_OK;
}

XD_TEST(what_one_rank_refuses_fails_on_all) {
    xd_result results[3];
    CHECK(xd_run_threads(3, NULL, clip_rank_refused, results, NULL) == XD_OK);
    CHECK_EQ_INT(results[0], XD_ERROR_PEER);
    CHECK_EQ_INT(results[1], XD_ERROR_DTYPE);
    CHECK_EQ_INT(results[2], XD_ERROR_PEER);
}

/* Ranks that clip otherwise would scale their parts of one gradient by different factors. */
static xd_result clip_rank_differs(xd_comm *world, void *argument) {
    const int which = *(const int *)argument;
    float gradient[2] = { 1.0f, 2.0f };
    const xd_param param = clip_param(gradient, 2);
    xd_gradient_norm_desc desc = clip_desc(&param, 1, which == 3 ? XD_NORM_MAX : XD_NORM_L2);
    xd_gradient_norm norm;
    desc.max_norm = 1.0;
    CHECK(xd_gradient_norm_compute(xd_comm_ctx(world), world, &desc, &norm) == XD_OK);
    if (xd_comm_rank(world) == 2) {
        if (which == 0 || which == 3) desc.max_norm = 2.0;
        if (which == 1) desc.refuse_above = 9.0;
        if (which == 2) desc.form = XD_CLIP_ALWAYS;
    }
    norm.norm = -1.0;
    CHECK(xd_gradient_norm_compute(xd_comm_ctx(world), world, &desc, &norm) == XD_ERROR_MISMATCH);
    static const char *const says[] = { "rank 2 passed max_norm = 2, rank 0 passed 1",
                                        "rank 2 passed refuse_above = 9, rank 0 passed 0",
                                        "rank 2 passed form = 2, rank 0 passed 0",
                                        "rank 2 passed max_norm = 2, rank 0 passed 1" };
    CHECK(strstr(xd_last_error(xd_comm_ctx(world))->message, says[which]) && norm.norm == -1.0);
    return XD_OK;
}

XD_TEST(ranks_that_clip_otherwise_are_told) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++)
        for (int which = 0; which < 4; which++) {
            const xd_ctx_desc desc = { .reduction = (xd_reduction)mode };
            CHECK(xd_run_threads(3, &desc, clip_rank_differs, &which, NULL) == XD_OK);
        }
}

XD_TEST(coefficients_follow_their_forms) {
    CHECK(xd_clip_factor(XD_CLIP_ABOVE, 1.0, 0.5) == 1.0f);
    CHECK(xd_clip_factor(XD_CLIP_ABOVE, 1.0, 1.0) < 1.0f);
    CHECK(xd_clip_factor(XD_CLIP_ABOVE, 1.0, 4.0) == (float)(1.0 / (4.0 + 1e-6)));
    CHECK(xd_clip_factor(XD_CLIP_ABOVE, 1.0, (double)INFINITY) == 1.0f);
    CHECK(xd_clip_factor(XD_CLIP_ABOVE, 1.0, (double)NAN) == 1.0f);
    CHECK(xd_clip_factor(XD_CLIP_ABOVE_NEMO, 1.0, (double)INFINITY) == 0.0f);
    CHECK(xd_clip_factor(XD_CLIP_ABOVE_NEMO, 1.0, (double)NAN) == 1.0f);
    CHECK(xd_clip_factor(XD_CLIP_ALWAYS, 1.0, (double)INFINITY) == 0.0f);
    CHECK(isnan(xd_clip_factor(XD_CLIP_ALWAYS, 1.0, (double)NAN)));
    CHECK(xd_clip_factor(XD_CLIP_ALWAYS, 0.0, 3.0) == 0.0f);
}

XD_TEST(the_status_records_bad_elements_so_that_the_step_is_skipped) {
    float gradient[2] = { 1.0f, INFINITY };
    xd_ctx *ctx = clip_ctx(XD_REDUCTION_DETERMINISTIC);
    const xd_param param = clip_param(gradient, 2);
    xd_status status;
    memset(&status, 0, sizeof status);
    xd_gradient_norm_desc desc = clip_desc(&param, 1, XD_NORM_L2);
    desc.status = &status;
    xd_gradient_norm norm;
    CHECK(xd_gradient_norm_compute(ctx, NULL, &desc, &norm) == XD_OK);
    CHECK_EQ_INT(status.not_finite, 1);
    desc.max_norm = -1.0;
    CHECK(xd_gradient_norm_compute(ctx, NULL, &desc, &norm) == XD_ERROR_ARGUMENT);
    desc.max_norm = (double)NAN;
    CHECK(xd_gradient_norm_compute(ctx, NULL, &desc, &norm) == XD_ERROR_ARGUMENT);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_replica_is_refused_in_a_norm_without_a_group) {
    xd_ctx *ctx = NULL;
    float gradient[2] = { 3.0f, 4.0f };
    xd_gradient_norm norm;
    CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
    xd_param params[1];
    params[0] = clip_param(gradient, 2);
    params[0].name = "w";
    params[0].replica = true;
    const xd_gradient_norm_desc desc = clip_desc(params, 1, XD_NORM_L2);
    CHECK(xd_gradient_norm_compute(ctx, NULL, &desc, &norm) == XD_ERROR_ARGUMENT);
    CHECK_EQ_STR(xd_last_error(ctx)->message, "comm is NULL, and parameter 0 of 1, \"w\", is a replica: pass "
                                              "the ranks that step together, or a group "
                                              "of this one if its list has the other copy");
    xd_comm *self = NULL;
    CHECK(xd_comm_self(ctx, &self) == XD_OK);
    CHECK(xd_gradient_norm_compute(ctx, self, &desc, &norm) == XD_OK && norm.norm == 0.0f);
    xd_comm_destroy(self);
    params[0].replica = false;
    CHECK(xd_gradient_norm_compute(ctx, NULL, &desc, &norm) == XD_OK && norm.norm == 5.0f);
    xd_ctx_destroy(ctx);
}

XD_TEST(clipping_in_place_passes_over_frozen_ones_and_buffers) {
    float a[2] = { 2.0f, -4.0f }, b = 2.0f;
    xd_ctx *ctx = clip_ctx(XD_REDUCTION_DETERMINISTIC);
    xd_param params[2];
    params[0] = clip_param(a, 2);
    params[1] = clip_param(&b, 1);
    params[1].frozen = true;
    CHECK(xd_clip_gradients(ctx, params, 2, 0.5f) == XD_OK);
    CHECK(a[0] == 1.0f && a[1] == -2.0f && b == 2.0f);
    params[0].gradient_dtype = XD_DTYPE_I32;
    CHECK(xd_clip_gradients(ctx, params, 2, 0.5f) == XD_ERROR_DTYPE);
    CHECK(a[0] == 1.0f);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
