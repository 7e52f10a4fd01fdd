#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_private.h"
#include "tokenizer_make.h"

#include <stdlib.h>

/* ---- the reference's aligner ---- */

/* Splits "a|bc|d" at the bars; "" is no token. */
static int64_t split(const char *list, xd_text *out) {
    int64_t n = 0;
    for (const char *p = list; *list && p; n++) {
        const char *bar = strchr(p, '|');
        out[n].data = p;
        out[n].size = bar ? (int64_t)(bar - p) : (int64_t)strlen(p);
        p = bar ? bar + 1 : NULL;
    }
    return n;
}

/* Checks pairs written as "s0:s1-t0:t1+" (exact) or "...!" (not), separated by blanks. */
static void check_dp(const char *student, const char *teacher, const char *expected) {
    xd_text s[64], t[64];
    char text[1024] = "";
    xd_ctx *ctx = NULL;
    xd_alignment a;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const xdi_align_dp_desc desc = { .student = { s, split(student, s) },
                                     .teacher = { t, split(teacher, t) } };
    CHECK_EQ_INT(xdi_align_dp(ctx, &desc, &a), XD_OK);
    for (int64_t i = 0; i < a.count; i++) {
        const xd_aligned_chunk *c = &a.chunks[i];
        const size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%d:%d-%d:%d%s", i ? " " : "", (int)c->student_begin,
                 (int)c->student_end, (int)c->teacher_begin, (int)c->teacher_end,
                 c->flags & XD_CHUNK_EXACT ? "+" : "!");
    }
    CHECK(strcmp(text, expected) == 0);
    if (strcmp(text, expected) != 0) printf("        got %s\n        not %s\n", text, expected);
    xd_alignment_destroy(ctx, &a);
    xd_ctx_destroy(ctx);
}

XD_TEST(the_dynamic_programme_pairs_the_reference_cases) {
    check_dp("The|Ġquick|Ġbr|own|Ġfox", "The|Ġqu|ick|Ġbrown|Ġfox", "0:1-0:1+ 1:2-1:3+ 2:4-3:4+ 4:5-4:5+");
    check_dp("ab|cd|e", "a|bcd|e", "0:2-0:2+ 2:3-2:3+");
    check_dp("abcde|z", "a|b|c|d|e|z", "0:1-0:5+ 1:2-5:6+");
    check_dp("a|b|c|Q|W|E|a|b|c", "a|b|c|X|Y|a|b|c",
             "0:1-0:1+ 1:2-1:2+ 2:3-2:3+ 3:6-3:5! 6:7-5:6+ 7:8-6:7+ 8:9-7:8+");
    check_dp("a|b|c|d|Q|W", "a|b|c|d|X|Y", "0:1-0:1+ 1:2-1:2+ 2:3-2:3+ 3:4-3:4+ 4:5-4:5! 5:6-5:6!");
    check_dp("<pad>|<pad>|<pad>", "<pad>|<pad>|<pad>|<pad>|<pad>", "0:1-0:3+ 1:2-3:4+ 2:3-4:5+");
    check_dp("x|<pad>", "x|<pad>|<pad>", "0:1-0:2+ 1:2-2:3+");
    check_dp("", "a|b", "0:0-0:1! 0:0-1:2!");
    check_dp("", "", "");
}

/* The score of "ab|x" against "a|b|y", and how many pairs there are. */
static double segment(const xdi_align_scores *scores, int64_t *pairs) {
    xd_text s[8], t[8];
    xd_ctx *ctx = NULL;
    xd_alignment a = { NULL, 0 };
    double score = -1e300;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    const xdi_align_dp_desc desc = { .student = { s, split("ab|x", s) },
                                     .teacher = { t, split("a|b|y", t) },
                                     .scores = scores };
    CHECK_EQ_INT(xdi_align_segment(ctx, &desc, &a, &score), XD_OK);
    *pairs = a.count;
    xd_alignment_destroy(ctx, &a);
    xd_ctx_destroy(ctx);
    return score;
}

XD_TEST(the_scores_of_the_dynamic_programme_are_used_as_they_are) {
    const xdi_align_scores defaults = xdi_align_scores_defaults();
    const xdi_align_scores other = { 0.7, 0.3, -0.1 }, zero = { 0.0, 0.0, 0.0 }, costly = { 3.0, 0.0, -1.5 };
    int64_t pairs;
    CHECK(defaults.match == 3.0 && defaults.combination == 1.5 && defaults.gap == -1.5);
    CHECK(segment(NULL, &pairs) == 0.0 && pairs == 2); /* 2 * 1.5 - 3 */
    CHECK(segment(&defaults, &pairs) == 0.0 && pairs == 2);
    CHECK(segment(&other, &pairs) == 2 * 0.3 + -0.1 + -0.1 && pairs == 3); /* two gaps rather than -0.7 */
    CHECK(segment(&zero, &pairs) == 0.0 &&
          pairs == 3); /* ties prefer the diagonal, then a student token alone */
    CHECK(segment(&costly, &pairs) == -3.0);
}

XD_TEST(scores_that_are_not_finite_are_refused) {
    const xdi_align_scores bad = { 3.0, NAN, -1.5 };
    xd_ctx *ctx = NULL;
    xd_alignment a = { NULL, 0 };
    const xdi_align_dp_desc desc = { .scores = &bad };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xdi_align_dp(ctx, &desc, &a), XD_ERROR_ARGUMENT);
    CHECK(a.chunks == NULL);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_combination_that_cannot_be_is_refused) {
    xd_ctx *ctx = NULL;
    xd_alignment a = { NULL, 0 };
    xd_text token = { "a", 1 };
    const xdi_align_dp_desc desc = { .student = { &token, 1 },
                                     .teacher = { &token, 1 },
                                     .max_combination = 65 };
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xdi_align_dp(ctx, &desc, &a), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "65") && strstr(xd_last_error(ctx)->message, "64"));
    CHECK(a.chunks == NULL);
    xd_ctx_destroy(ctx);
}

/* ---- byte spans ---- */

enum { MOST = 64 };

typedef struct side {
    xd_token_span spans[MOST];
    uint8_t roles[MOST], mask[MOST];
    int32_t documents[MOST];
    xd_align_side in;
} side;

/* Tokens that end at the given bytes, from 0; a negative entry -r is a token of role r without bytes. */
static void spell(side *s, const int *ends, int count) {
    int64_t at = 0;
    memset(s, 0, sizeof *s);
    for (int i = 0; i < count; i++) {
        s->spans[i].begin = at;
        if (ends[i] >= 0) at = ends[i];
        s->spans[i].end = at;
        s->roles[i] = (uint8_t)(ends[i] < 0 ? -ends[i] : 0);
        s->mask[i] = 1;
    }
    s->in.spans = s->spans;
    s->in.roles = s->roles;
    s->in.mask = s->mask;
    s->in.documents = s->documents;
    s->in.count = count;
}

static void check_chunks(const side *s, const side *t, const int (*expected)[5], int count) {
    xd_ctx *ctx = NULL;
    xd_alignment a;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_align_bytes(ctx, &s->in, &t->in, &a, NULL), XD_OK);
    CHECK_EQ_INT(a.count, count);
    for (int i = 0; i < count && i < a.count; i++) {
        CHECK_EQ_INT(a.chunks[i].student_begin, expected[i][0]);
        CHECK_EQ_INT(a.chunks[i].student_end, expected[i][1]);
        CHECK_EQ_INT(a.chunks[i].teacher_begin, expected[i][2]);
        CHECK_EQ_INT(a.chunks[i].teacher_end, expected[i][3]);
        CHECK_EQ_INT(a.chunks[i].flags, expected[i][4]);
    }
    xd_alignment_destroy(ctx, &a);
    xd_ctx_destroy(ctx);
}

XD_TEST(chunks_end_where_both_sides_have_a_boundary) {
    const int student[] = { 3, 5, 9, 12 }, teacher[] = { 3, 4, 9, 10, 12 };
    const int expected[][5] = { { 0, 1, 0, 1, 1 }, { 1, 3, 1, 3, 1 }, { 3, 4, 3, 5, 1 } };
    side s, t;
    spell(&s, student, 4);
    spell(&t, teacher, 5);
    check_chunks(&s, &t, expected, 3);
}

XD_TEST(tokens_that_share_a_character_stay_together) {
    const int student[] = { 1, 2, 3, 4 }, teacher[] = { 4 };
    const int expected[][5] = { { 0, 4, 0, 1, 1 } };
    side s, t;
    spell(&s, student, 4);
    for (int i = 0; i < 4; i++) s.spans[i].begin = 0, s.spans[i].end = 4; /* one cluster */
    spell(&t, teacher, 1);
    check_chunks(&s, &t, expected, 1);
    spell(&s, student, 4); /* four bytes of one character, each with its own span */
    check_chunks(&s, &t, expected, 1);
}

/* One character that normalisation changed is one token here and three there, in the middle of a text: "ab", the character, "cd". */
XD_TEST(a_character_of_several_tokens_on_either_side_ends_where_it_ends) {
    const int few[] = { 2, 3, 5 }, many[] = { 2, 3, 3, 3, 5 };
    const int expected[][5] = { { 0, 1, 0, 1, 1 }, { 1, 2, 1, 4, 1 }, { 2, 3, 4, 5, 1 } };
    const int mirrored[][5] = { { 0, 1, 0, 1, 1 }, { 1, 4, 1, 2, 1 }, { 4, 5, 2, 3, 1 } };
    side s, t;
    spell(&s, few, 3);
    spell(&t, many, 5);
    for (int i = 1; i < 4; i++) t.spans[i] = s.spans[1];
    check_chunks(&s, &t, expected, 3);
    check_chunks(&t, &s, mirrored, 3);
}

XD_TEST(special_tokens_pair_by_role_and_stand_alone_otherwise) {
    const int student[] = { -XD_TOKEN_BOS, 3, 6, -XD_TOKEN_EOS }, teacher[] = { 6, -XD_TOKEN_EOS };
    const int expected[][5] = { { 0, 1, 0, 0, 0 }, { 1, 3, 0, 1, 1 }, { 3, 4, 1, 2, 1 } };
    side s, t;
    spell(&s, student, 4);
    spell(&t, teacher, 2);
    check_chunks(&s, &t, expected, 3);
}

XD_TEST(bytes_that_one_side_dropped_make_the_chunk_inexact_and_no_more) {
    const int student[] = { 3, 4, 7 }, teacher[] = { 3, 4, 7 };
    const int expected[][5] = { { 0, 1, 0, 1, 1 }, { 1, 2, 1, 1, 0 }, { 2, 3, 1, 2, 1 } };
    side s, t;
    spell(&s, student, 3);
    spell(&t, teacher, 3);
    t.spans[1] = t.spans[2]; /* the teacher's tokenizer removed byte 3 */
    t.in.count = 2;
    check_chunks(&s, &t, expected, 3);
}

XD_TEST(a_truncated_side_leaves_the_rest_unpaired) {
    const int student[] = { 3, 6, 9, 12 }, teacher[] = { 3, 8 };
    const int expected[][5] = { { 0, 1, 0, 1, 1 }, { 1, 3, 1, 2, 0 }, { 3, 4, 2, 2, 0 } };
    side s, t;
    spell(&s, student, 4);
    spell(&t, teacher, 2);
    check_chunks(&s, &t, expected, 3);
}

XD_TEST(documents_never_share_a_chunk_and_masks_are_kept) {
    const int ends[] = { 3, 6, 9, 12 };
    const int expected[][5] = { { 0, 1, 0, 1, 3 }, { 1, 2, 1, 2, 1 }, { 2, 3, 2, 2, 0 }, { 3, 4, 2, 3, 1 } };
    side s, t;
    spell(&s, ends, 4);
    spell(&t, ends, 3);
    s.mask[0] = 0;
    for (int i = 2; i < 4; i++) s.documents[i] = i;
    t.documents[2] = 3;
    t.spans[2] = s.spans[3];
    check_chunks(&s, &t, expected, 4);
}

XD_TEST(the_report_counts_bytes_that_do_not_align) {
    const int student[] = { 3, 6, 9 }, teacher[] = { 3, 8 };
    xd_ctx *ctx = NULL;
    xd_alignment a;
    xd_align_report report;
    side s, t;
    spell(&s, student, 3);
    spell(&t, teacher, 2);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_align_bytes(ctx, &s.in, &t.in, &a, &report), XD_OK);
    CHECK(report.chunks == 2 && report.exact == 1 && report.one_sided == 0 && report.masked == 0);
    CHECK(report.total_bytes == 9 && report.lost_bytes == 6);
    xd_alignment_destroy(ctx, &a);
    xd_ctx_destroy(ctx);
}

XD_TEST(chunk_ids_are_the_dense_form) {
    const int student[] = { -XD_TOKEN_BOS, 3, 6, 9 }, teacher[] = { 3, 9 };
    const uint8_t mask[] = { 1, 1, 1, 0 };
    int64_t ids[4];
    uint8_t exact[4];
    xd_ctx *ctx = NULL;
    xd_alignment a;
    side s, t;
    spell(&s, student, 4);
    spell(&t, teacher, 2);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_align_bytes(ctx, &s.in, &t.in, &a, NULL), XD_OK);
    s.in.mask = mask;
    xd_chunk_ids(&a, XD_CHUNK_STUDENT, &s.in, ids, exact);
    CHECK(ids[0] == 0 && ids[1] == 1 && ids[2] == 2 && ids[3] == -1);
    CHECK(!exact[0] && exact[1] && !exact[2] && !exact[3]);
    t.in.mask = NULL;
    xd_chunk_ids(&a, XD_CHUNK_TEACHER, &t.in, ids, NULL);
    CHECK(ids[0] == 1 && ids[1] == 2);
    xd_alignment_destroy(ctx, &a);
    xd_ctx_destroy(ctx);
}

XD_TEST(spans_that_go_backwards_are_refused_with_both) {
    const int ends[] = { 3, 6 };
    xd_ctx *ctx = NULL;
    xd_alignment a = { NULL, 0 };
    side s, t;
    spell(&s, ends, 2);
    spell(&t, ends, 2);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    t.spans[1].begin = 1;
    t.spans[1].end = 2;
    CHECK_EQ_INT(xd_align_bytes(ctx, &s.in, &t.in, &a, NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "teacher token 1 covers bytes [1, 2) behind [0, 3)") != NULL);
    t.spans[1].begin = 7;
    CHECK_EQ_INT(xd_align_bytes(ctx, &s.in, &t.in, &a, NULL), XD_ERROR_ARGUMENT);
    spell(&t, ends, 2);
    t.documents[0] = 1;
    CHECK_EQ_INT(xd_align_bytes(ctx, &s.in, &t.in, &a, NULL), XD_ERROR_ARGUMENT);
    CHECK(a.chunks == NULL);
    xd_ctx_destroy(ctx);
}

/* ---- encodings with special tokens ---- */

/* Byte-level, with the merges; `post` is the inside of a post-processor. <s> is 300, </s> 301. */
static fixture tokenizer_with(const char *merges, const char *post) {
    const char *added = ADDED(300, "<s>", true, "") "," ADDED(301, "</s>", true, "");
    return load(with_post_processor(byte_level_with("null", PLAIN_BYTES, "", added, merges, false), post));
}

/* Appends a text as one document; spans begin again with each. */
static void append(side *s, const fixture *f, const char *text, int32_t document, bool add_special) {
    const xd_encode_desc desc = { false, false, add_special, false };
    xd_encoding e = { 0, NULL, NULL, NULL };
    CHECK_EQ_INT(xd_encode(f->encoder, text, strlen(text), &desc, &e), XD_OK);
    for (int64_t i = 0; i < e.count; i++) {
        const int64_t at = s->in.count++;
        s->spans[at] = e.spans[i];
        s->roles[at] = e.roles ? e.roles[i] : (uint8_t)XD_TOKEN_TEXT;
        s->documents[at] = document;
        s->mask[at] = 1;
    }
}

#define BOS_AND_EOS "{\"type\":\"BertProcessing\",\"cls\":[\"<s>\",300],\"sep\":[\"</s>\",301]}"
#define BOS_ALONE                                                                                      \
    "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{" \
    "\"id\":"                                                                                          \
    "\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[300]}}}"

XD_TEST(special_tokens_around_a_text_stand_alone_or_pair_and_leave_its_chunks_alone) {
    /* "abcab" is ab|c|ab and a|bc|a|b. */
    const int none[][5] = { { 0, 2, 0, 2, 1 }, { 2, 3, 2, 4, 1 } };
    const int student[][5] = { { 0, 1, 0, 0, 0 }, { 1, 3, 0, 2, 1 }, { 3, 4, 2, 4, 1 }, { 4, 5, 4, 4, 0 } };
    const int teacher[][5] = { { 0, 0, 0, 1, 0 }, { 0, 2, 1, 3, 1 }, { 2, 3, 3, 5, 1 } };
    const int both[][5] = { { 0, 1, 0, 1, 1 }, { 1, 3, 1, 3, 1 }, { 3, 4, 3, 5, 1 }, { 4, 5, 5, 5, 0 } };
    const struct {
        const int (*chunks)[5];
        int count;
    } expected[] = { { none, 2 }, { student, 4 }, { teacher, 3 }, { both, 4 } };
    fixture f = tokenizer_with("a b", BOS_AND_EOS), g = tokenizer_with("b c", BOS_ALONE);
    for (int i = 0; i < 4; i++) {
        side s, t;
        spell(&s, NULL, 0);
        spell(&t, NULL, 0);
        append(&s, &f, "abcab", 0, (i & 1) != 0);
        append(&t, &g, "abcab", 0, (i & 2) != 0);
        check_chunks(&s, &t, expected[i].chunks, expected[i].count);
    }
    unload(&f);
    unload(&g);
}

XD_TEST(each_packed_document_has_its_own_special_tokens_and_chunk_ids_follow) {
    fixture f = tokenizer_with("a b", BOS_AND_EOS), g = tokenizer_with("b c", BOS_ALONE);
    const int expected[][5] = { { 0, 1, 0, 1, 1 }, { 1, 2, 1, 3, 1 }, { 2, 3, 3, 3, 0 },
                                { 3, 4, 3, 4, 1 }, { 4, 6, 4, 6, 3 }, { 6, 7, 6, 8, 3 },
                                { 7, 8, 8, 8, 0 }, { 8, 9, 8, 9, 1 }, { 9, 10, 9, 9, 0 } };
    const int64_t student_ids[] = { 0, 1, 2, 3, -1, -1, -1, 6, 7, 8 },
                  teacher_ids[] = { 0, 1, 1, 3, 4, 4, 5, 5, 7 };
    const uint8_t alone[] = { 1, 0, 0, 1, 0, 0, 0, 0, 1, 0 };
    int64_t chunk[MOST];
    uint8_t exact[MOST];
    xd_ctx *ctx = new_ctx();
    xd_alignment a;
    side s, t;
    spell(&s, NULL, 0);
    spell(&t, NULL, 0);
    append(&s, &f, "ab", 0, true); /* <s> ab </s>, beside <s> a b */
    append(&t, &g, "ab", 0, true);
    append(&s, &f, "abcab", 1, true);
    append(&t, &g, "abcab", 1, true);
    append(&s, &f, "", 2, true); /* an empty document: <s> </s>, beside <s> */
    append(&t, &g, "", 2, true);
    for (int i = 4; i < 7; i++) s.mask[i] = 0; /* the text of the second document is a prompt */
    check_chunks(&s, &t, expected, 9);
    CHECK_EQ_INT(xd_align_bytes(ctx, &s.in, &t.in, &a, NULL), XD_OK);
    xd_chunk_ids(&a, XD_CHUNK_STUDENT, &s.in, chunk, exact);
    CHECK(s.in.count == 10 && memcmp(chunk, student_ids, sizeof student_ids) == 0);
    CHECK(memcmp(exact, alone, sizeof alone) == 0);
    xd_chunk_ids(&a, XD_CHUNK_TEACHER, &t.in, chunk, NULL);
    CHECK(t.in.count == 9 && memcmp(chunk, teacher_ids, sizeof teacher_ids) == 0);
    xd_alignment_destroy(ctx, &a);
    xd_ctx_destroy(ctx);
    unload(&f);
    unload(&g);
}

/* ---- batches ---- */

/* A pseudo-random cut of `bytes` bytes. */
static int64_t cut(unsigned seed, int64_t bytes, xd_token_span *spans) {
    int64_t n = 0, at = 0;
    while (at < bytes) {
        seed = seed * 1664525u + 1013904223u;
        spans[n].begin = at;
        at += 1 + (seed >> 24) % 6;
        spans[n++].end = at < bytes ? at : bytes;
    }
    return n;
}

XD_TEST(a_batch_gives_the_same_chunks_on_any_number_of_workers) {
    enum { JOBS = 7, BYTES = 500 };
    static xd_token_span spans[JOBS][2][BYTES];
    xd_align_job jobs[JOBS], again[JOBS];
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    memset(jobs, 0, sizeof jobs);
    for (int i = 0; i < JOBS; i++) {
        jobs[i].student.spans = spans[i][0];
        jobs[i].teacher.spans = spans[i][1];
        jobs[i].student.count = cut((unsigned)i, BYTES, spans[i][0]);
        jobs[i].teacher.count = cut((unsigned)i + 100, BYTES, spans[i][1]);
    }
    memcpy(again, jobs, sizeof jobs);
    const xd_ctx_desc three = { .threads = 3 };
    xd_ctx *pool = NULL;
    CHECK_EQ_INT(xd_ctx_create(&three, &pool), XD_OK);
    CHECK_EQ_INT(xd_align_batch(ctx, jobs, JOBS), XD_OK);
    CHECK_EQ_INT(xd_align_batch(pool, again, JOBS), XD_OK);
    for (int i = 0; i < JOBS; i++) {
        CHECK_EQ_INT(jobs[i].out.count, again[i].out.count);
        CHECK(memcmp(jobs[i].out.chunks, again[i].out.chunks,
                     (size_t)jobs[i].out.count * sizeof *jobs[i].out.chunks) == 0);
        CHECK(jobs[i].report.lost_bytes == 0 && jobs[i].report.total_bytes == BYTES);
        xd_alignment_destroy(ctx, &jobs[i].out);
        xd_alignment_destroy(pool, &again[i].out);
    }
    spans[4][1][9].begin = 0;
    CHECK_EQ_INT(xd_align_batch(pool, jobs, JOBS), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(pool)->message, "sequence 4: teacher token 9") != NULL);
    for (int i = 0; i < JOBS; i++) CHECK(jobs[i].out.chunks == NULL);
    xd_ctx_destroy(pool);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
