/* Layouts of gradient buckets: the rules by hand, and what holds for every layout. Golden vectors have Megatron's own. */
#if defined(XD_TEST_LAYERS)
#    include "model/buckets_internal.h"
#endif
#include "xdistill.h"

#include "xd_test.h"

enum { PARAMS_MAX = 12 };

typedef struct scene {
    xd_ctx *ctx;
    xdi_bucket_param params[PARAMS_MAX];
    xdi_bucket_plan_desc desc;
    xdi_bucket_plan *plan;
} scene;

static void open_scene(scene *s, const int64_t *numel, int count) {
    memset(s, 0, sizeof *s);
    CHECK(xd_ctx_create(NULL, &s->ctx) == XD_OK);
    for (int i = 0; i < count; i++) s->params[i].numel = numel[i];
    s->desc.params = s->params;
    s->desc.param_count = count;
}

static void lay_out(scene *s) {
    xdi_bucket_plan_destroy(s->plan);
    s->plan = NULL;
    CHECK(xdi_bucket_plan_create(s->ctx, &s->desc, &s->plan) == XD_OK);
}

static void close_scene(scene *s) {
    xdi_bucket_plan_destroy(s->plan);
    xd_ctx_destroy(s->ctx);
}

/* Begins of the parameters, then ends and unpadded sizes of the buckets. */
static void check_layout(scene *s, const int64_t *begins, int buckets, const int64_t *ends,
                         const int64_t *unpadded) {
    lay_out(s);
    CHECK_EQ_INT(xdi_bucket_plan_count(s->plan), buckets);
    for (int i = 0; i < (int)s->desc.param_count; i++)
        CHECK_EQ_INT(xdi_bucket_plan_param(s->plan, i, NULL).begin, begins[i]);
    for (int b = 0; b < buckets; b++) {
        const xdi_planned_bucket bucket = xdi_bucket_plan_at(s->plan, b);
        CHECK_EQ_INT(bucket.buffer.begin, b ? ends[b - 1] : 0);
        CHECK_EQ_INT(bucket.buffer.end, ends[b]);
        CHECK_EQ_INT(bucket.unpadded, unpadded[b]);
    }
    CHECK_EQ_INT(xdi_bucket_plan_numel(s->plan), ends[buckets - 1]);
}

static const int64_t four[4] = { 100, 50, 200, 64 };

XD_TEST(parameters_are_laid_out_in_reverse_and_buckets_end_when_they_are_full) {
    static const int64_t padded[4] = { 448, 384, 64, 0 }, padded_ends[2] = { 384, 640 },
                         padded_sizes[2] = { 264, 164 };
    static const int64_t plain[4] = { 314, 264, 64, 0 }, plain_ends[2] = { 264, 414 },
                         plain_sizes[2] = { 264, 150 };
    static const int64_t one[4] = { 384, 320, 64, 0 }, one_end[1] = { 768 }, one_size[1] = { 484 };
    scene s;
    open_scene(&s, four, 4);
    s.desc.overlap = true;
    s.desc.bucket_size = 150;
    check_layout(&s, plain, 2, plain_ends, plain_sizes);
    s.desc.ranks = 4;
    s.desc.sharded = true;
    check_layout(&s, padded, 2, padded_ends, padded_sizes);
    s.desc.ranks = 6;
    s.desc.overlap = false;
    check_layout(&s, one, 1, one_end, one_size);
    close_scene(&s);
}

XD_TEST(a_shared_embedding_has_a_bucket_of_its_own_when_the_optimizer_is_sharded) {
    static const int64_t alone[4] = { 512, 384, 64, 0 }, ends[3] = { 384, 512, 640 },
                         sizes[3] = { 264, 64, 100 };
    static const int64_t plain[4] = { 314, 264, 64, 0 }, plain_ends[2] = { 264, 414 },
                         plain_sizes[2] = { 264, 150 };
    scene s;
    open_scene(&s, four, 4);
    s.params[0].shared_embedding = true;
    s.desc.overlap = s.desc.sharded = true;
    s.desc.bucket_size = 150;
    s.desc.ranks = 4;
    check_layout(&s, alone, 3, ends, sizes);
    s.desc.sharded = false;
    check_layout(&s, plain, 2, plain_ends, plain_sizes);
    close_scene(&s);
}

XD_TEST(wide_padding_and_odd_groups_round_to_common_multiples) {
    static const int64_t two[2] = { 1000, 1 }, begins[2] = { 64, 0 }, ends[1] = { 196608 },
                         sizes[1] = { 1064 };
    scene s;
    open_scene(&s, two, 2);
    s.desc.ranks = 3;
    s.desc.sharded = s.desc.wide_padding = true;
    check_layout(&s, begins, 1, ends, sizes);
    close_scene(&s);
}

XD_TEST(the_first_chunk_of_the_first_stage_alone_is_cut) {
    scene s;
    open_scene(&s, four, 4);
    s.desc.bucket_size = 60;
    for (int k = 0; k < 5; k++) {
        s.desc.overlap = k != 1;
        s.desc.stage = k == 2;
        s.desc.chunk = k == 3;
        s.desc.gathers_in_step = k == 4;
        lay_out(&s);
        CHECK_EQ_INT(xdi_bucket_plan_count(s.plan), k == 0 ? 3 : 1);
        CHECK(xdi_bucket_plan_settings(s.plan)->bucket_size == (k == 0 ? 60 : INT64_MAX));
    }
    close_scene(&s);
}

XD_TEST(the_size_of_a_bucket_has_a_default_and_may_come_from_their_number) {
    scene s;
    open_scene(&s, four, 4);
    s.desc.overlap = true;
    lay_out(&s);
    CHECK_EQ_INT(xdi_bucket_plan_settings(s.plan)->bucket_size, 40000000);
    CHECK_EQ_INT(xdi_bucket_plan_settings(s.plan)->ranks, 1);
    CHECK_EQ_INT(xdi_bucket_plan_settings(s.plan)->instances, 1);
    CHECK(xdi_bucket_plan_settings(s.plan)->params != s.params);
    s.desc.ranks = 64;
    s.desc.instances = 2; /* the default counts all ranks */
    lay_out(&s);
    CHECK_EQ_INT(xdi_bucket_plan_settings(s.plan)->bucket_size, 64000000);
    s.desc.bucket_count = 4; /* 414 elements */
    lay_out(&s);
    CHECK_EQ_INT(xdi_bucket_plan_settings(s.plan)->bucket_size, 103);
    CHECK_EQ_INT(xdi_bucket_plan_count(s.plan), 2);
    CHECK_EQ_INT(xdi_bucket_plan_at(s.plan, 0).first, 2);
    CHECK_EQ_INT(xdi_bucket_plan_at(s.plan, 0).count, 2);
    CHECK_EQ_INT(xdi_bucket_plan_at(s.plan, 1).first, 0);
    s.desc.param_count = 0;
    s.desc.bucket_count = 0;
    s.desc.params = NULL;
    lay_out(&s);
    CHECK(xdi_bucket_plan_count(s.plan) == 0 && xdi_bucket_plan_numel(s.plan) == 0);
    close_scene(&s);
}

/* ---- what holds for every layout ---- */

static uint64_t random_state = 88172645463325252u;

static int below(int n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (int)(random_state % (uint64_t)n);
}

/* Buckets follow each other, and each holds a run of parameters, in reverse, that do not overlap. */
static long check_order(const scene *s) {
    int64_t end = 0, next = s->desc.param_count - 1;
    long wrong = 0;
    for (int64_t b = 0; b < xdi_bucket_plan_count(s->plan); b++) {
        const xdi_planned_bucket bucket = xdi_bucket_plan_at(s->plan, b);
        int64_t at = bucket.buffer.begin, home;
        wrong += bucket.buffer.begin != end || bucket.count < 1;
        for (int64_t i = bucket.first + bucket.count - 1; i >= bucket.first; i--) {
            const xd_interval place = xdi_bucket_plan_param(s->plan, i, &home);
            wrong += i != next-- || home != b || place.begin < at;
            wrong += place.end - place.begin != s->params[i].numel;
            wrong += s->desc.sharded ? place.begin % 64 != 0 : place.begin != at;
            at = place.end;
        }
        end = bucket.buffer.end;
        wrong += at > bucket.buffer.begin + bucket.unpadded || bucket.buffer.begin + bucket.unpadded > end;
        wrong += !s->desc.sharded && at != end;
    }
    return wrong + (next != -1);
}

/* In each instance the ranks own every bucket once, in order, and every element of every parameter once. */
static long check_owners(const scene *s) {
    const int instances = xdi_bucket_plan_settings(s->plan)->instances;
    const int shards = xdi_bucket_plan_settings(s->plan)->ranks / instances;
    long wrong = 0;
    for (int k = 0; k < instances; k++) {
        for (int64_t b = 0; b < xdi_bucket_plan_count(s->plan); b++) {
            int64_t at = xdi_bucket_plan_at(s->plan, b).buffer.begin;
            const int64_t length = xdi_bucket_plan_at(s->plan, b).buffer.end - at;
            for (int r = 0; r < shards; r++) {
                const xd_interval part = xdi_bucket_plan_shard(s->plan, b, k * shards + r);
                wrong += part.begin != at || part.end - part.begin != length / shards;
                at = part.end;
            }
            wrong += at != xdi_bucket_plan_at(s->plan, b).buffer.end;
        }
        for (int64_t i = 0; i < s->desc.param_count; i++) {
            int64_t held = 0;
            for (int r = 0; r < shards; r++) {
                xdi_bucket_piece p;
                if (!xdi_bucket_plan_piece(s->plan, i, k * shards + r, &p)) continue;
                wrong += p.param.begin != held;
                held = p.param.end;
                wrong += p.buffer.begin != xdi_bucket_plan_param(s->plan, i, NULL).begin + p.param.begin;
                wrong +=
                    p.buffer.begin - p.in_bucket.begin != xdi_bucket_plan_at(s->plan, p.bucket).buffer.begin;
                wrong += p.buffer.begin - p.shard.begin !=
                         xdi_bucket_plan_shard(s->plan, p.bucket, k * shards + r).begin;
                wrong += p.buffer.end - p.buffer.begin != p.param.end - p.param.begin ||
                         p.in_bucket.end - p.in_bucket.begin != p.shard.end - p.shard.begin ||
                         p.shard.end - p.shard.begin != p.param.end - p.param.begin;
            }
            wrong += held != s->params[i].numel;
        }
    }
    return wrong;
}

XD_TEST(every_element_has_one_place_and_one_owner_in_each_instance) {
    long wrong = 0;
    for (int form = 0; form < 400; form++) {
        int64_t numel[PARAMS_MAX];
        const int count = below(PARAMS_MAX + 1);
        scene s;
        for (int i = 0; i < count; i++) numel[i] = below(4) ? below(900) : below(3);
        open_scene(&s, numel, count);
        for (int i = 0; i < count; i++) s.params[i].shared_embedding = below(5) == 0;
        s.desc.instances = 1 + below(3);
        s.desc.ranks = s.desc.instances * (1 + below(9));
        s.desc.sharded = true;
        s.desc.wide_padding = below(8) == 0;
        s.desc.overlap = below(4) != 0;
        s.desc.bucket_size = 1 + below(1500);
        lay_out(&s);
        wrong += check_order(&s) + check_owners(&s);
        s.desc.sharded = false;
        lay_out(&s);
        wrong += check_order(&s);
        close_scene(&s);
    }
    CHECK_EQ_INT(wrong, 0);
}

XD_TEST(without_a_sharded_optimizer_every_rank_owns_whole_buckets) {
    xdi_bucket_piece piece;
    scene s;
    open_scene(&s, four, 4);
    s.desc.ranks = 4;
    lay_out(&s);
    CHECK(xdi_bucket_plan_shard(s.plan, 0, 3).begin == 0 && xdi_bucket_plan_shard(s.plan, 0, 3).end == 414);
    CHECK(xdi_bucket_plan_piece(s.plan, 1, 3, &piece) && piece.param.begin == 0 && piece.param.end == 50);
    close_scene(&s);
}

XD_TEST(plans_that_place_or_own_an_element_otherwise_have_other_hashes) {
    uint64_t hash[7];
    scene s;
    open_scene(&s, four, 4);
    s.desc.overlap = true;
    s.desc.bucket_size = 150;
    for (int k = 0; k < 7; k++) {
        s.desc.sharded = k > 1;
        s.desc.ranks = k > 2 ? 4 : 2; /* the ends are the same, the owners not */
        s.desc.wide_padding = k > 3;
        s.params[1].numel = k > 4 ? 51 : 50;
        if (k == 6) s.desc.bucket_size = 1;
        lay_out(&s);
        hash[k] = xdi_bucket_plan_hash(s.plan);
        for (int i = 1; i < k; i++) CHECK(hash[i] != hash[k]);
        if (k == 1) CHECK(hash[0] == hash[1]);
    }
    close_scene(&s);
}

XD_TEST(what_is_no_layout_is_refused_with_its_numbers) {
    static const char *const said[] = { "-7 elements",
                                        "6 ranks are not 4",
                                        "bucket_size 5 and bucket_count 2",
                                        "bucket_size -1",
                                        "stage -1",
                                        "415 buckets of 414",
                                        "2^62",
                                        "2^62" };
    for (int k = 0; k < 8; k++) {
        xdi_bucket_plan *plan = NULL;
        scene s;
        open_scene(&s, four, 4);
        s.desc.overlap = true;
        if (k == 0) s.params[2].numel = -7;
        if (k == 1) s.desc.ranks = 6, s.desc.instances = 4;
        if (k == 2) s.desc.bucket_size = 5, s.desc.bucket_count = 2;
        if (k == 3) s.desc.bucket_size = -1;
        if (k == 4) s.desc.stage = -1;
        if (k == 5) s.desc.bucket_count = 415;
        if (k == 6) s.params[1].numel = ((int64_t)1 << 62) - 300;
        if (k == 7)
            s.params[1].numel = ((int64_t)1 << 62) - 364, s.desc.sharded = true; /* with the padding */
        CHECK_EQ_INT(xdi_bucket_plan_create(s.ctx, &s.desc, &plan),
                     k < 6 ? XD_ERROR_ARGUMENT : XD_ERROR_SHAPE);
        CHECK(plan == NULL);
        CHECK(strstr(xd_last_error(s.ctx)->message, said[k]) != NULL);
        close_scene(&s);
    }
}

XD_TEST_MAIN()
