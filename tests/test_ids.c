/* Labels and ids of 32 and of 64 bits give the same bits in every call that takes them. */

#include "ids_scene.h"
#include "xd_test_cpu.h"
#include "vocab_calls.h"

#include <stdlib.h>

/* ---- losses and pieces of them ---- */

typedef struct settings {
    xd_cpu_level cpu;
    xd_reduction reduction;
    int ranks;
} settings;

static xd_result both_widths(xd_comm *world, void *user) {
    const settings *s = (const settings *)user;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab = NULL;
    ids_memory *wide = (ids_memory *)malloc(2 * sizeof *wide), *narrow = wide + 1;
    CHECK(wide);
    if (!wide) return XD_ERROR_MEMORY;
    ids_fill(wide);
    ids_fill(narrow);
    CHECK(vocab_even(ctx, world, IDS_VOCAB, &vocab) == XD_OK);
    ids_calls(ctx, vocab, wide, XD_DTYPE_NONE);
    ids_calls(ctx, vocab, narrow, XD_DTYPE_I32);
    if (s->ranks == 1) ids_seen(wide);
    CHECK(memcmp(&wide->out, &narrow->out, sizeof wide->out) == 0);
    ids_refusals(ctx, vocab, wide);
    CHECK(memcmp(&wide->out, &narrow->out, sizeof wide->out) == 0); /* what was refused has written nothing */
    xd_vocab_destroy(vocab);
    free(wide);
    return XD_OK;
}

XD_TEST(losses_give_the_same_bits_for_ids_of_32_and_64_bits) {
    XD_TEST_LEVELS(level, XD_CPU_PLAIN)
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int invariant = 0; invariant < 2; invariant++) {
            settings s = { (xd_cpu_level)level,
                           invariant ? XD_REDUCTION_INVARIANT : XD_REDUCTION_DETERMINISTIC, ranks };
            xd_ctx_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.cpu = s.cpu;
            desc.reduction = s.reduction;
            CHECK(xd_run_threads(ranks, &desc, both_widths, &s, NULL) == XD_OK);
        }
}

/* One rank's mistake is its own error; the others learn that a batch was refused instead of waiting. */
static xd_result count_with_one_bad_rank(xd_comm *world, void *user) {
    static const int32_t labels[3] = { 1, 2, 3 };
    xd_ctx *ctx = xd_comm_ctx(world);
    const bool bad = xd_comm_rank(world) == 1;
    const xd_positions positions = { 3, { labels, bad ? XD_DTYPE_U32 : XD_DTYPE_I32 }, false, 0, NULL, NULL };
    xd_denominator out;
    (void)user;
    CHECK_EQ_INT(xd_denominator_count(ctx, world, &positions, 1, &out),
                 bad ? XD_ERROR_DTYPE : XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, bad ? "labels are U32" : "1 weights of positions"));
    return XD_OK;
}

XD_TEST(a_denominator_with_labels_of_a_wrong_type_on_one_rank_ends_on_all) {
    CHECK(xd_run_threads(3, NULL, count_with_one_bad_rank, NULL, NULL) == XD_OK);
}

/* ---- the next token ---- */

enum { SEQUENCES = 2, LENGTH = 8 };

/* Labels of the positions that a rank holds, by ids of both widths. */
static xd_result shift_both(xd_comm *world, void *user) {
    xd_ctx *ctx = xd_comm_ctx(world);
    const int ranks = xd_comm_size(world), held = LENGTH / ranks;
    int64_t positions[LENGTH], ids[SEQUENCES * LENGTH], labels[SEQUENCES * LENGTH];
    int32_t narrow_ids[SEQUENCES * LENGTH], narrow_labels[SEQUENCES * LENGTH];
    xd_shift_desc d;
    (void)user;
    memset(&d, 0, sizeof d);
    CHECK(xd_load_balanced_positions(ctx, LENGTH, xd_comm_rank(world), ranks, positions) == XD_OK);
    for (int b = 0; b < SEQUENCES; b++)
        for (int i = 0; i < held; i++) {
            ids[b * held + i] = 100 * b + 3 * positions[i];
            narrow_ids[b * held + i] = (int32_t)ids[b * held + i];
        }
    d.sequences = SEQUENCES;
    d.length = LENGTH;
    d.positions = positions;
    d.held = held;
    d.comm = ranks > 1 ? world : NULL;
    d.ids = xd_ids_of(ids, XD_DTYPE_I64);
    CHECK(xd_next_token_labels(ctx, &d, labels) == XD_OK);
    d.ids = xd_ids_of(narrow_ids, XD_DTYPE_I32);
    CHECK(xd_next_token_labels(ctx, &d, narrow_labels) == XD_OK);
    for (int i = 0; i < SEQUENCES * held; i++) {
        const int64_t next = positions[i % held] + 1;
        CHECK_EQ_INT(labels[i], next < LENGTH ? 100 * (i / held) + 3 * next : XD_IGNORE_INDEX);
        CHECK_EQ_INT(narrow_labels[i], labels[i]);
    }
    d.ids.dtype = XD_DTYPE_U32;
    CHECK_EQ_INT(xd_next_token_labels(ctx, &d, narrow_labels), XD_ERROR_DTYPE);
    CHECK(strstr(xd_last_error(ctx)->message, "ids are U32: I32 or I64 is needed"));
    d.ids.dtype = XD_DTYPE_I32;
    d.has_ignore_index = true;
    d.ignore_index = (int64_t)1 << 40;
    CHECK_EQ_INT(xd_next_token_labels(ctx, &d, narrow_labels), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message,
                 "ignore_index 1099511627776 does not fit into labels of 32 bits"));
    return XD_OK;
}

XD_TEST(next_token_labels_have_the_width_of_the_ids) {
    for (int ranks = 1; ranks <= 2; ranks++)
        CHECK(xd_run_threads(ranks, NULL, shift_both, NULL, NULL) == XD_OK);
}

XD_TEST_MAIN()
