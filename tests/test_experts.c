/* Experts under a wrapper: their own data group, and the bits of one rank that holds them all. */
#ifndef _XOPEN_SOURCE
#    define _XOPEN_SOURCE 700 /* mkdtemp */
#endif
#include "xdistill.h"

#include "expert_scene.h"

#include <stddef.h>

static expert_run *expert_new(expert_kind kind, int ranks, int ep, const expert_run *like) {
    expert_run *run = (expert_run *)calloc(1, sizeof *run);
    if (like) {
        memcpy(run, like, sizeof *run);
        memset(run->values, 0, sizeof *run - offsetof(expert_run, values));
    }
    run->kind = kind;
    run->ranks = ranks;
    run->ep = ep;
    run->reduction = XD_REDUCTION_INVARIANT;
    return run;
}

static bool expert_equal(const expert_run *a, const expert_run *b) {
    return a->count == b->count && a->written == b->written &&
           memcmp(a->values, b->values, sizeof a->values) == 0 &&
           memcmp(a->moments, b->moments, sizeof a->moments) == 0 &&
           memcmp(a->squares, b->squares, sizeof a->squares) == 0 &&
           memcmp(a->losses, b->losses, sizeof a->losses) == 0 &&
           memcmp(a->norms, b->norms, sizeof a->norms) == 0 &&
           memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0;
}

static expert_run *expert_alone(const expert_run *like) {
    expert_run *one = expert_new(EXPERT_DDP, 1, 1, like);
    one->groups = one->queues = one->prefetch = 0;
    one->offloaded = one->skips = false;
    one->kind = like->sent ? EXPERT_FSDP : EXPERT_DDP;
    one->save = one->load = false;
    CHECK(expert_execute(one) == XD_OK);
    CHECK(one->written == one->count && one->count > 100 && one->norms[2] > 0.5);
    return one;
}

/* Whether these settings train to the bits of `one`. */
static void expert_check(const expert_run *one, expert_kind kind, int ranks, int ep, const expert_run *like) {
    expert_run *run = expert_new(kind, ranks, ep, like);
    const bool ok = expert_execute(run) == XD_OK && expert_equal(one, run);
    if (!ok)
        printf("kind %d on %d ranks, ep %d, %d groups, %d experts, %lld leaves differ\n", kind, ranks, ep,
               like->groups, like->experts, (long long)like->leaves);
    CHECK(ok);
    free(run);
}

XD_TEST(experts_on_any_ranks_train_to_the_bits_of_one_rank) {
    static const int64_t leaves[] = { 4, 8, 11, 16 };
    static const int meshes[][2] = { { 1, 1 }, { 2, 1 }, { 2, 2 }, { 4, 2 }, { 4, 4 }, { 3, 3 }, { 4, 1 } };
    for (int l = 0; l < 4; l++) {
        const expert_run like = { .experts = 4, .leaves = leaves[l] };
        expert_run *one = expert_alone(&like);
        for (int m = 0; m < 7; m++)
            for (int kind = EXPERT_DDP; kind <= EXPERT_FSDP_WHOLE; kind++)
                expert_check(one, (expert_kind)kind, meshes[m][0], meshes[m][1], &like);
        free(one);
    }
}

XD_TEST(uneven_experts_and_those_without_a_token_train_to_the_bits_of_one_rank) {
    const expert_run uneven = { .experts = 5, .leaves = 8, .skips = true },
                     idle = { .experts = 3, .idle = 2, .leaves = 6 };
    expert_run *one = expert_alone(&uneven), *other = expert_alone(&idle);
    CHECK(other->tokens[0][2] == 0 && other->tokens[1][2] == 0 && other->tokens[0][0] > 0);
    for (int kind = EXPERT_DDP; kind <= EXPERT_FSDP_WHOLE; kind++) {
        expert_check(one, (expert_kind)kind, 2, 2, &uneven); /* 3 and 2 */
        expert_check(one, (expert_kind)kind, 8, 4, &uneven);
        expert_check(one, (expert_kind)kind, 4, 2, &uneven);
        expert_check(other, (expert_kind)kind, 4, 2, &idle);
        expert_check(other, (expert_kind)kind, 4, 4, &idle); /* one rank has none of three */
    }
    free(one);
    free(other);
}

XD_TEST(experts_of_groups_with_replicas_train_to_the_bits_of_one_rank) {
    const expert_run like = { .experts = 4, .leaves = 16, .groups = 2 };
    expert_run *one = expert_alone(&like);
    for (int kind = EXPERT_DDP; kind <= EXPERT_FSDP_WHOLE; kind++) {
        expert_check(one, (expert_kind)kind, 8, 2, &like);
        expert_check(one, (expert_kind)kind, 4, 2, &like);
    }
    free(one);
}

XD_TEST(queues_parts_on_the_host_and_sent_types_change_no_bit_of_experts) {
    expert_run like = { .experts = 4, .leaves = 8, .divide = { .average = true, .before = 4.0 } };
    expert_run *one = expert_alone(&like);
    for (int queues = 1; queues <= 2; queues++)
        for (int kind = EXPERT_DDP; kind <= EXPERT_FSDP_WHOLE; kind++) {
            like.queues = queues;
            like.prefetch = kind >= EXPERT_FSDP ? queues : 0;
            like.reshard = queues == 2;
            like.offloaded = kind >= EXPERT_FSDP && queues == 1;
            expert_check(one, (expert_kind)kind, 4, 2, &like);
            expert_check(one, (expert_kind)kind, 2, 2, &like);
        }
    free(one);
    like = (expert_run){ .experts = 4, .leaves = 8, .sent = XD_DTYPE_BF16 };
    one = expert_alone(&like);
    expert_check(one, EXPERT_FSDP, 4, 2, &like);
    expert_check(one, EXPERT_FSDP_WHOLE, 2, 2, &like);
    free(one);
}

/* A rank that has fewer leaves goes on with tokens of others: its sums wait for the end of the step. */
XD_TEST(queues_change_no_bit_of_experts_where_ranks_have_different_numbers_of_leaves) {
    expert_run like = { .experts = 4, .leaves = 7 };
    expert_run *one = expert_alone(&like);
    for (like.queues = 1; like.queues <= 2; like.queues++)
        for (int kind = EXPERT_DDP; kind <= EXPERT_SHARDED; kind++)
            for (int ep = 1; ep <= 4; ep *= 2) expert_check(one, (expert_kind)kind, 4, ep, &like);
    free(one);
}

XD_TEST(a_weight_of_experts_that_is_thawed_trains_to_the_bits_of_one_rank) {
    const expert_run like = { .experts = 4, .leaves = 8, .frozen = "layers.1.experts.up" };
    const expert_run trained = { .experts = 4, .leaves = 8 };
    expert_run *one = expert_alone(&like), *other = expert_alone(&trained);
    CHECK(!expert_equal(one, other));
    for (int kind = EXPERT_DDP; kind <= EXPERT_FSDP_WHOLE; kind++)
        expert_check(one, (expert_kind)kind, 4, 2, &like);
    free(one);
    free(other);
}

static double expert_distance(const expert_run *a, const expert_run *b) {
    double most = 0.0;
    for (int64_t i = 0; i < a->count; i++)
        if (fabs((double)a->values[i] - (double)b->values[i]) > most)
            most = fabs((double)a->values[i] - (double)b->values[i]);
    return most;
}

XD_TEST(other_modes_agree_to_rounding) {
    const expert_run like = { .experts = 5, .leaves = 11 };
    expert_run *one = expert_alone(&like);
    for (int mode = 0; mode < 2; mode++)
        for (int kind = EXPERT_DDP; kind <= EXPERT_FSDP_WHOLE; kind++)
            for (int ep = 1; ep <= 4; ep *= 2) {
                expert_run *run = expert_new((expert_kind)kind, 4, ep, &like);
                run->reduction = mode ? XD_REDUCTION_FAST : XD_REDUCTION_DETERMINISTIC;
                run->leaves = kind == EXPERT_FSDP ? 8 : 11;
                CHECK(expert_execute(run) == XD_OK && run->written == run->count);
                if (run->leaves == 11) CHECK(expert_distance(one, run) < 1e-4);
                free(run);
            }
    free(one);
}

/* ---- files ---- */

XD_TEST(a_checkpoint_goes_on_with_experts_on_other_ranks) {
    static const struct {
        expert_kind kind;
        int ranks, ep;
    } from[] = { { EXPERT_DDP, 1, 1 }, { EXPERT_FSDP, 4, 2 }, { EXPERT_SHARDED, 2, 2 } },
      to[] = { { EXPERT_FSDP, 4, 4 }, { EXPERT_DDP, 2, 2 }, { EXPERT_FSDP_WHOLE, 4, 1 } };
    char root[] = "/tmp/xd_experts_XXXXXX", command[64];
    const expert_run like = { .experts = 5, .leaves = 8 };
    expert_run *one = expert_alone(&like);
    CHECK(mkdtemp(root) != NULL);
    for (int i = 0; i < 3; i++) {
        char place[64];
        snprintf(place, sizeof place, "%s/%d", root, i);
        expert_run *saved = expert_new(from[i].kind, from[i].ranks, from[i].ep, &like);
        saved->root = place;
        saved->save = true;
        CHECK(expert_execute(saved) == XD_OK && expert_equal(one, saved));
        free(saved);
        for (int k = 0; k < 3; k++) {
            expert_run *run = expert_new(to[k].kind, to[k].ranks, to[k].ep, &like);
            run->root = place;
            run->load = true;
            CHECK(expert_execute(run) == XD_OK && memcmp(run->values, one->values, sizeof one->values) == 0 &&
                  memcmp(run->squares, one->squares, sizeof one->squares) == 0 &&
                  run->norms[2] == one->norms[2]);
            free(run);
        }
    }
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK(system(command) == 0);
    free(one);
}

XD_TEST_MAIN()
