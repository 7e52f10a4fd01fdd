/* Golden cases of the area align: token alignment as NeMo-RL does it. */
#include "golden.h"

#include <stdlib.h>
#include <string.h>

/* ---- lists of strings in the metadata ---- */

/* NULL for a key that the file lacks. */
static xd_json *parse_result(golden_case *c, const char *key) {
    const char *text = golden_text(c, key);
    xd_json *root = NULL;
    if (text) golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, text, strlen(text), &root));
    if (root) golden_compared(c);
    return root;
}

static xd_json *parse(golden_case *c, const char *key) {
    const char *text = golden_text(c, key);
    xd_json *root = NULL;
    if (!text)
        golden_fail(c, "no metadata %s", key);
    else
        golden_ok(c, xd_json_load_memory(golden_ctx(c), NULL, text, strlen(text), &root));
    return root;
}

static xd_text text_of(const xd_json *value) {
    xd_text text;
    size_t bytes = 0;
    text.data = xd_json_string(value, &bytes);
    text.size = (int64_t)bytes;
    return text;
}

static xd_text *texts_of(golden_case *c, const xd_json *list, int64_t *count) {
    int64_t n = 0;
    xd_text *texts = (xd_text *)golden_memory(c, (xd_json_count(list) + 1) * sizeof *texts);
    for (const xd_json *item = xd_json_first(list); item; item = xd_json_next(item))
        texts[n++] = text_of(item);
    *count = n;
    return texts;
}

static bool equals(xd_text text, xd_text other) {
    return text.size == other.size && memcmp(text.data, other.data, (size_t)text.size) == 0;
}

/* ---- pairs ---- */

/* The reference implementation writes an empty side as (-1, -1). */
static int64_t pair_value(const xd_aligned_chunk *c, int which) {
    const bool student = which < 2;
    const int32_t begin = student ? c->student_begin : c->teacher_begin;
    const int32_t end = student ? c->student_end : c->teacher_end;
    if (which == 4) return (c->flags & XD_CHUNK_EXACT) != 0;
    if (begin == end) return -1;
    return which % 2 == 0 ? begin : end;
}

/* Compares chunks with a list of lists of `entries` numbers. */
static void check_pairs(golden_case *c, const xd_json *expected, int64_t row, const xd_alignment *made,
                        int entries) {
    const int64_t count = (int64_t)xd_json_count(expected);
    if (!expected) return;
    if (made->count != count)
        golden_fail(c, "row %lld has %lld pairs, expected %lld", (long long)row, (long long)made->count,
                    (long long)count);
    for (int64_t i = 0; i < made->count && i < count; i++)
        for (int which = 0; which < entries; which++) {
            const int64_t got = pair_value(&made->chunks[i], which);
            int64_t value = -2;
            xd_json_int64(xd_json_at(xd_json_at(expected, (size_t)i), (size_t)which), &value);
            if (got != value)
                golden_fail(c, "row %lld pair %lld entry %d is %lld, expected %lld", (long long)row,
                            (long long)i, which, (long long)got, (long long)value);
        }
}

/* ---- canonical tokens ---- */

static void check_canonical(golden_case *c, const xd_text *tokens, int64_t count, const xd_json *expected,
                            const xd_json *ranges) {
    xdi_canonical made;
    if (!expected && !ranges) return;
    if (!golden_ok(c, xdi_canonical_sequence(golden_ctx(c), tokens, count, &made))) return;
    const int64_t count_expected = (int64_t)xd_json_count(expected ? expected : ranges);
    if (made.count != count_expected)
        golden_fail(c, "%lld canonical tokens, expected %lld", (long long)made.count,
                    (long long)count_expected);
    for (int64_t i = 0; i < made.count && i < count_expected; i++) {
        const xd_text token = { made.text + made.offsets[i], made.offsets[i + 1] - made.offsets[i] };
        const xd_json *range = xd_json_at(ranges, (size_t)i);
        int64_t begin = -1, end = -1;
        xd_json_int64(xd_json_at(range, 0), &begin);
        xd_json_int64(xd_json_at(range, 1), &end);
        if (expected && !equals(token, text_of(xd_json_at(expected, (size_t)i))))
            golden_fail(c, "canonical token %lld is \"%.*s\"", (long long)i, (int)token.size, token.data);
        if (ranges && (begin != made.origin[i] || end != made.origin[i + 1]))
            golden_fail(c, "canonical token %lld comes from [%d, %d), expected [%lld, %lld)", (long long)i,
                        (int)made.origin[i], (int)made.origin[i + 1], (long long)begin, (long long)end);
    }
    xdi_canonical_destroy(golden_ctx(c), &made);
}

static bool table_claims(const golden_case *c) {
    return golden_origin_has(c, "::canonical_token");
}

static void table_run(golden_case *c) {
    xd_json *in = parse(c, "tokens"), *out = parse_result(c, "expect.canonical");
    const double count = (double)xd_json_count(in);
    for (size_t i = 0; out && i < xd_json_count(in); i++) {
        const xd_text token = text_of(xd_json_at(in, i));
        char *canonical = (char *)golden_memory(c, (size_t)token.size + 3);
        const xd_text made = { canonical, xdi_canonical_token(token, canonical) };
        if (!equals(made, text_of(xd_json_at(out, i))))
            golden_fail(c, "\"%s\" becomes \"%.*s\"", token.data, (int)made.size, made.data);
    }
    golden_exact(c, "in.count", &count, 1);
    xd_json_destroy(golden_ctx(c), in);
    xd_json_destroy(golden_ctx(c), out);
}

/* ---- the dynamic programme alone ---- */

static bool segment_claims(const golden_case *c) {
    return golden_origin_has(c, "TokenAligner._align_dp");
}

static xdi_align_scores scores_of(golden_case *c) {
    xdi_align_scores scores = xdi_align_scores_defaults();
    scores.match = golden_number(c, "cfg.exact_match_score", scores.match);
    scores.combination = golden_number(c, "cfg.combination_score_multiplier", scores.combination);
    scores.gap = golden_number(c, "cfg.gap_penalty", scores.gap);
    return scores;
}

static void segment_run(golden_case *c) {
    xd_json *student = parse(c, "tokens.student"), *teacher = parse(c, "tokens.teacher");
    xd_json *pairs = parse_result(c, "expect.pairs");
    const xdi_align_scores scores = scores_of(c);
    xdi_align_dp_desc desc = { .max_combination = golden_integer(c, "cfg.max_comb_len", 4, 1, 64),
                               .scores = &scores };
    desc.student.texts = texts_of(c, student, &desc.student.count);
    desc.teacher.texts = texts_of(c, teacher, &desc.teacher.count);
    xd_alignment made = { NULL, 0 };
    double score = 0.0;
    if (golden_ok(c, xdi_align_segment(golden_ctx(c), &desc, &made, &score))) {
        check_pairs(c, pairs, 0, &made, 4);
        golden_exact(c, "out.score", &score, 1);
        xd_alignment_destroy(golden_ctx(c), &made);
    }
    xd_json_destroy(golden_ctx(c), student);
    xd_json_destroy(golden_ctx(c), teacher);
    xd_json_destroy(golden_ctx(c), pairs);
}

/* ---- alignment ---- */

typedef struct batch {
    golden_case *c;
    xd_json *student, *teacher, *pairs, *canonical[2], *ranges[2];
    int64_t rows, chunks, tokens[2];
    double *ids[2], *exact[2], *correct, *valid, *counts;
    uint8_t *mask[2];
} batch;

static bool align_claims(const golden_case *c) {
    return golden_origin_has(c, "TokenAligner.align");
}

static double *room(golden_case *c, int64_t count) {
    return (double *)golden_memory(c, (size_t)(count + 1) * sizeof(double));
}

static void batch_open(golden_case *c, batch *b) {
    static const char *const masks[2] = { "in.student_attention_mask", "in.teacher_attention_mask" };
    memset(b, 0, sizeof *b);
    b->c = c;
    b->student = parse(c, "tokens.student");
    b->teacher = parse(c, "tokens.teacher");
    b->pairs = parse_result(c, "expect.pairs");
    b->canonical[0] = parse_result(c, "expect.canonical_student");
    b->canonical[1] = parse_result(c, "expect.canonical_teacher");
    b->ranges[0] = parse_result(c, "expect.ranges_student");
    b->ranges[1] = parse_result(c, "expect.ranges_teacher");
    for (int side = 0; side < 2; side++) {
        const golden_array mask = golden_tensor(c, masks[side]);
        b->mask[side] = golden_u8(c, &mask);
        b->rows = mask.shape[0];
        b->tokens[side] = mask.shape[1];
        b->ids[side] = room(c, mask.count);
        b->exact[side] = room(c, mask.count);
    }
    /* As many chunks in a row as the file's results have; without them there is room for any alignment. */
    const char *const shaped = golden_has(c, "out.pair_valid") ? "out.pair_valid" : "out.pair_is_correct";
    b->chunks = golden_has(c, shaped) ? golden_tensor(c, shaped).shape[1] : b->tokens[0] + b->tokens[1];
    const int64_t cells = b->rows * b->chunks;
    b->correct = room(c, cells);
    b->valid = room(c, cells);
    b->counts = room(c, b->rows);
}

static void batch_close(batch *b) {
    xd_ctx *ctx = golden_ctx(b->c);
    xd_json *all[7] = { b->student,      b->teacher,   b->pairs,    b->canonical[0],
                        b->canonical[1], b->ranges[0], b->ranges[1] };
    for (int i = 0; i < 7; i++) xd_json_destroy(ctx, all[i]);
}

/* The dense form of one row. */
static void fill_row(batch *b, int64_t row, const xd_alignment *made) {
    for (int side = 0; side < 2; side++) {
        const int64_t n = b->tokens[side], at = row * n;
        int64_t *ids = (int64_t *)golden_memory(b->c, (size_t)(n + 1) * sizeof *ids);
        uint8_t *exact = (uint8_t *)golden_memory(b->c, (size_t)n + 1);
        const xd_align_side tokens = { .mask = b->mask[side] + at, .count = n };
        xd_chunk_ids(made, (xd_chunk_side)side, &tokens, ids, exact);
        for (int64_t i = 0; i < n; i++) {
            b->ids[side][at + i] = (double)ids[i];
            b->exact[side][at + i] = (double)exact[i];
        }
    }
    for (int64_t i = 0; i < made->count && i < b->chunks; i++) {
        b->valid[row * b->chunks + i] = 1.0;
        b->correct[row * b->chunks + i] = (double)(made->chunks[i].flags & XD_CHUNK_EXACT);
    }
    b->counts[row] = (double)made->count;
}

static void run_row(batch *b, int64_t row) {
    xd_ctx *ctx = golden_ctx(b->c);
    const size_t r = (size_t)row;
    int64_t n = 0, m = 0;
    const xd_text *student = texts_of(b->c, xd_json_at(b->student, r), &n);
    const xd_text *teacher = texts_of(b->c, xd_json_at(b->teacher, r), &m);
    xd_alignment made = { NULL, 0 };
    check_canonical(b->c, student, n, xd_json_at(b->canonical[0], r), xd_json_at(b->ranges[0], r));
    check_canonical(b->c, teacher, m, xd_json_at(b->canonical[1], r), xd_json_at(b->ranges[1], r));
    const xdi_align_scores scores = scores_of(b->c);
    const xdi_align_dp_desc desc = { .student = { student, n },
                                     .teacher = { teacher, m },
                                     .max_combination = golden_integer(b->c, "cfg.max_comb_len", 4, 1, 64),
                                     .scores = &scores };
    if (!golden_ok(b->c, xdi_align_dp(ctx, &desc, &made))) return;
    check_pairs(b->c, xd_json_at(b->pairs, r), row, &made, 5);
    fill_row(b, row, &made);
    xd_alignment_destroy(ctx, &made);
}

static void align_run(golden_case *c) {
    batch b;
    batch_open(c, &b);
    for (int64_t row = 0; row < b.rows; row++) run_row(&b, row);
    golden_exact(c, "out.student_chunk_id", b.ids[0], b.rows * b.tokens[0]);
    golden_exact(c, "out.teacher_chunk_id", b.ids[1], b.rows * b.tokens[1]);
    golden_exact(c, "out.student_exact_partition_mask", b.exact[0], b.rows * b.tokens[0]);
    golden_exact(c, "out.teacher_exact_partition_mask", b.exact[1], b.rows * b.tokens[1]);
    golden_exact(c, "out.pair_valid", b.valid, b.rows * b.chunks);
    golden_exact(c, "out.pair_is_correct", b.correct, b.rows * b.chunks);
    golden_exact(c, "out.num_chunks", b.counts, b.rows);
    batch_close(&b);
}

const golden_kind golden_kinds_align[] = { { "canonical tokens", table_claims, table_run },
                                           { "dynamic programme", segment_claims, segment_run },
                                           { "alignment", align_claims, align_run },
                                           { NULL, NULL, NULL } };
