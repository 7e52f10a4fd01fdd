/* Projections built from two tokenizers, and their files. In the byte-level vocabularies made here ids 0 to
 * 255 are the bytes, and merge i is id 256 + i. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "xd_private.h"
#include "tokenizer_make.h"

#include <unistd.h>

/* ---- building ---- */

/* Two tokenizers and what was built from them. */
typedef struct made {
    fixture student, teacher;
    xd_projection matrix;
    xd_projection_report report;
} made;

static made make(fixture student, fixture teacher, const xd_projection_options *options) {
    made m;
    memset(&m, 0, sizeof m);
    m.student = student;
    m.teacher = teacher;
    const xd_projection_desc desc = { student.tokenizer, teacher.tokenizer, options, NULL };
    CHECK_EQ_INT(xd_projection_build(student.ctx, &desc, &m.matrix, &m.report), XD_OK);
    CHECK_EQ_INT(m.report.entries, m.matrix.entries);
    return m;
}

static void unmake(made *m) {
    xd_projection_destroy(m->student.ctx, &m->matrix);
    unload(&m->teacher);
    unload(&m->student);
}

/* "id:weight id:weight" of one row. */
static const char *row(const xd_projection *p, int64_t s) {
    static char out[256];
    size_t used = 0;
    out[0] = '\0';
    for (int64_t i = p->row_begin[s]; i < p->row_begin[s + 1] && used < sizeof out - 32; i++)
        used += (size_t)snprintf(out + used, 32, "%s%d:%.4f", used ? " " : "", (int)p->teacher_id[i],
                                 (double)p->weight[i]);
    return out;
}

static fixture plain(const char *merges) {
    return load(byte_level(PLAIN_BYTES, merges));
}

static fixture with_added(const char *merges, const char *added) {
    return load(byte_level_with("null", PLAIN_BYTES, "", added, merges, false));
}

XD_TEST(tokens_that_both_have_map_to_each_other_and_the_others_to_their_pieces) {
    made m = make(plain("a b|ab c|ab ab"), plain("c a|a b"), NULL);
    CHECK_EQ_INT(m.matrix.student_size, 259);
    CHECK_EQ_INT(m.matrix.teacher_size, 258);
    CHECK_EQ_STR(row(&m.matrix, 'a'), "97:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 256), "257:1.0000");           /* ab */
    CHECK_EQ_STR(row(&m.matrix, 257), "99:0.0909 257:0.9091"); /* abc = ab c */
    CHECK_EQ_STR(row(&m.matrix, 258), "257:1.0000");           /* abab: both votes for ab */
    CHECK_EQ_INT(m.report.tokens, 259);
    CHECK_EQ_INT(m.report.covered, 259);
    CHECK_EQ_INT(m.report.exact, 257);
    CHECK_EQ_INT(m.report.cut, 0);
    CHECK_NEAR(m.report.mean_pieces, (257 + 2 + 2) / 259.0, 1e-12);
    CHECK_NEAR(m.report.lost_bytes, 0.0, 0.0);
    CHECK_NEAR(m.report.lost_mass, 0.0, 0.0);
    unmake(&m);
}

XD_TEST(bytes_that_are_no_text_are_not_lost) {
    /* C3 A9 is a character; A9 C3 and E4 B8 are parts of two and of one. */
    made m = make(plain("\xc3\x83 \xc2\xa9|\xc2\xa9 \xc3\x83|\xc3\xa4 \xc2\xb8|\xc3\xa4\xc2\xb8 \xc3\x83"),
                  plain("\xc2\xa9 \xc3\x83|\xc3\xa4 \xc2\xb8"), NULL);
    CHECK_EQ_STR(row(&m.matrix, 256), "169:0.0909 195:0.9091");
    CHECK_EQ_STR(row(&m.matrix, 257), "256:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 258), "257:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 259), "195:0.0909 257:0.9091");
    CHECK_EQ_STR(row(&m.matrix, 0xff), "255:1.0000");
    CHECK_EQ_INT(m.report.covered, m.report.tokens);
    CHECK_NEAR(m.report.lost_bytes, 0.0, 0.0);
    unmake(&m);
}

XD_TEST(a_prefix_of_the_teachers_texts_is_none_of_its_tokens) {
    made m = make(plain("h i|hi h|\xc4\xa0 hi|\xc4\xa0hi h"),
                  load(sentence_like(LLAMA_NORMALIZER, FALLBACK, true)), NULL);
    CHECK_EQ_STR(row(&m.matrix, 256), "263:1.0000");            /* hi */
    CHECK_EQ_STR(row(&m.matrix, 257), "260:0.0909 263:0.9091"); /* hih */
    CHECK_EQ_STR(row(&m.matrix, 258), "264:1.0000");            /* " hi" */
    CHECK_EQ_STR(row(&m.matrix, 259), "260:0.0909 264:0.9091"); /* " hih" */
    CHECK_EQ_STR(row(&m.matrix, 0xc3), "198:1.0000");           /* <0xC3> */
    CHECK_EQ_INT(m.report.covered, 260);
    unmake(&m);
}

XD_TEST(a_student_with_a_prefix_is_read_by_the_bytes_of_its_tokens) {
    made m = make(load(sentence_like(LLAMA_NORMALIZER, FALLBACK, true)), plain("h i|\xc4\xa0 hi"), NULL);
    CHECK_EQ_STR(row(&m.matrix, 0), "");                  /* the unknown token */
    CHECK_EQ_STR(row(&m.matrix, 3 + 0x80), "128:1.0000"); /* a byte token */
    CHECK_EQ_STR(row(&m.matrix, 259), "32:1.0000");       /* the blank */
    CHECK_EQ_STR(row(&m.matrix, 262), "169:0.0909 195:0.9091");
    CHECK_EQ_STR(row(&m.matrix, 264), "257:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 265), "32:1.0000"); /* two blanks: two votes for one */
    unmake(&m);
}

XD_TEST(what_the_teacher_cannot_write_gets_no_vote_and_is_counted) {
    made m = make(plain("h x|x x"), load(sentence_like(LLAMA_NORMALIZER, "", false)), NULL);
    CHECK_EQ_STR(row(&m.matrix, 256), "260:1.0000"); /* hx: h alone */
    CHECK_EQ_STR(row(&m.matrix, 257), "");
    CHECK_EQ_STR(row(&m.matrix, 'x'), "");
    CHECK_EQ_INT(m.report.tokens, 258);
    CHECK_EQ_INT(m.report.covered, 4); /* h, i, the blank, hx */
    CHECK_EQ_INT(m.report.exact, 3);
    CHECK_NEAR(m.report.lost_bytes, (253 + 1 + 2) / 260.0, 1e-12);
    unmake(&m);
}

XD_TEST(pieces_are_cut_first_and_rows_last) {
    xd_projection_options options;
    options = xd_projection_defaults();
    made m = make(plain("a b|c d|ab cd|abcd e"), plain(""), NULL);
    CHECK_EQ_STR(row(&m.matrix, 259), "97:0.9001 98:0.0900 99:0.0090 100:0.0009"); /* e is the fifth piece */
    CHECK_EQ_INT(m.report.cut, 1);
    CHECK_NEAR(m.report.lost_bytes, 1 / 269.0, 1e-12);
    CHECK_NEAR(m.report.lost_mass, 0.0, 0.0);
    unmake(&m);
    options.max_pieces = 5;
    options.k = 2;
    m = make(plain("a b|c d|ab cd|abcd e"), plain(""), &options);
    CHECK_EQ_STR(row(&m.matrix, 259), "97:0.9091 98:0.0909");
    CHECK_EQ_INT(m.report.cut, 0);
    CHECK_NEAR(m.report.lost_bytes, 0.0, 0.0);
    CHECK_NEAR(m.report.lost_mass, (0.00999 / 0.99999 + 0.0099 / 0.9999) / 260, 1e-9);
    unmake(&m);
}

XD_TEST(without_exact_pairs_a_token_goes_the_way_of_the_others) {
    xd_projection_options options;
    options = xd_projection_defaults();
    options.disable_exact = true;
    made m =
        make(plain("a b|c d"), load(byte_level_with("null", PLAIN_BYTES, "", "", "a b|c d", true)), &options);
    CHECK_EQ_STR(row(&m.matrix, 257), "257:1.0000");
    CHECK_EQ_INT(m.report.exact, 0);
    CHECK_EQ_INT(m.report.covered, 258);
    unmake(&m);
}

XD_TEST(the_reverse_pass_votes_for_the_students_pieces) {
    xd_projection_options options;
    options = xd_projection_defaults();
    options.reverse = true;
    made m = make(plain("a b|ab a"), plain("b a|a ba"), &options);
    CHECK_EQ_STR(row(&m.matrix, 'a'), "97:1.0000"); /* exact rows hear nobody else */
    CHECK_EQ_STR(row(&m.matrix, 257), "257:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 256), "97:0.9091 98:0.0909");
    unmake(&m);
    m = make(plain("a b"), plain("a b|ab c|d d"), &options);
    CHECK_EQ_STR(row(&m.matrix, 256), "256:1.0000");
    unmake(&m);
    options.disable_exact = true;
    m = make(plain("a b"), plain("a b|ab c"), &options);
    CHECK_EQ_STR(row(&m.matrix, 256), "256:0.6875 257:0.3125"); /* 2 votes, and 10/11 of one */
    unmake(&m);
}

XD_TEST(special_tokens_map_by_name_and_on_request_by_likeness) {
    xd_projection_options options;
    options = xd_projection_defaults();
    const char *mine = ADDED(256, "<|end_of_text|>", true,
                             "") "," ADDED(257, "<pad>", true, "") "," ADDED(258, "<tool>", false, "");
    const char *theirs = ADDED(256, "<pad>", true, "") "," ADDED(257, "<|endoftext|>", true, "");
    made m = make(with_added("", mine), with_added("", theirs), NULL);
    CHECK_EQ_STR(row(&m.matrix, 256), "");
    CHECK_EQ_STR(row(&m.matrix, 257), "256:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 258),
                 "60:0.9001 111:0.0099 116:0.0900"); /* no special one: text, "<", "t", "o", "o" */
    CHECK_EQ_INT(m.report.covered, 258);
    unmake(&m);
    options.special_pairs = true;
    m = make(with_added("", mine), with_added("", theirs), &options);
    CHECK_EQ_STR(row(&m.matrix, 256), "257:1.0000");
    CHECK_EQ_STR(row(&m.matrix, 257), "256:1.0000");
    CHECK_EQ_INT(m.report.covered, 259);
    unmake(&m);
    options.special_threshold = 1.0;
    m = make(with_added("", mine), with_added("", theirs), &options);
    CHECK_EQ_STR(row(&m.matrix, 256), "");
    unmake(&m);
}

XD_TEST(options_out_of_range_build_nothing) {
    fixture f = plain("a b");
    const xd_projection_options bad[] = {
        { 33, 4, false, false, false, 0.0 },   { 0, 4, false, false, false, 0.0 },
        { 4, 1025, false, false, false, 0.0 }, { 4, 0, false, false, false, 0.0 },
        { 4, 4, false, false, true, 1.5 },     { 4, 4, false, false, true, NAN }
    };
    xd_projection p;
    memset(&p, 0, sizeof p);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_EQ_INT(xd_projection_build(
                         f.ctx, &(xd_projection_desc){ f.tokenizer, f.tokenizer, &bad[i], NULL }, &p, NULL),
                     XD_ERROR_ARGUMENT);
    CHECK(p.row_begin == NULL);
    unload(&f);
}

/* ---- files ---- */

enum { HEADER = 80 };

/* Of this process, so that two runs do not meet. */
static const char *file_path(void) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/xdistill-test-projection-%ld", (long)getpid());
    return path;
}

/* The bytes of a projection's file; xd_release. */
static unsigned char *bytes_of(const made *m, size_t *bytes) {
    char *data = NULL;
    CHECK_EQ_INT(xd_projection_save(m->student.ctx, file_path(), &m->matrix), XD_OK);
    CHECK_EQ_INT(xd_file_load(m->student.ctx, file_path(), 0, &data, bytes), XD_OK);
    CHECK_EQ_INT(unlink(file_path()), 0);
    return (unsigned char *)data;
}

static void put_number(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
}

/* Parses bytes in memory of their exact size. */
static xd_result parse(xd_ctx *ctx, const unsigned char *data, size_t bytes, xd_projection *p) {
    unsigned char *copy = (unsigned char *)malloc(bytes + (bytes == 0));
    memcpy(copy, data, bytes);
    const xd_result result = projection_load_memory(ctx, copy, bytes, NULL, p);
    free(copy);
    return result;
}

/* The file with one number changed and a right checksum is refused with this message. */
static void refuse_number(xd_ctx *ctx, const unsigned char *data, size_t bytes, size_t at, uint64_t value,
                          int width, const char *expected) {
    xd_projection p;
    memset(&p, 0, sizeof p);
    unsigned char *copy = (unsigned char *)malloc(bytes);
    memcpy(copy, data, bytes);
    put_number(copy + at, value, width);
    put_number(copy + 12, xd_crc32c(0, copy + 16, bytes - 16), 4);
    const xd_result result = parse(ctx, copy, bytes, &p);
    CHECK(result == XD_ERROR_FORMAT || result == XD_ERROR_UNSUPPORTED);
    CHECK(p.row_begin == NULL);
    if (!strstr(xd_last_error(ctx)->message, expected)) CHECK_EQ_STR(xd_last_error(ctx)->message, expected);
    free(copy);
}

XD_TEST(checksums_have_the_known_values_and_go_on) {
    static unsigned char data[20000];
    unsigned char zeros[32], ones[32], rising[32];
    memset(zeros, 0, sizeof zeros);
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++) rising[i] = (unsigned char)i;
    CHECK_EQ_INT(xd_crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ_INT(xd_crc32c(0, zeros, 32), 0x8a9136aau); /* these three: RFC 3720, B.4 */
    CHECK_EQ_INT(xd_crc32c(0, ones, 32), 0x62a8ab43u);
    CHECK_EQ_INT(xd_crc32c(0, rising, 32), 0x46dd794eu);
    CHECK_EQ_INT(xd_crc32c(0, NULL, 0), 0);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * i >> 3);
    for (size_t bytes = sizeof data - 7; bytes <= sizeof data; bytes++) {
        uint32_t pieces = 0;
        for (size_t at = 0; at < bytes; at += 1000)
            pieces = xd_crc32c(pieces, data + at, bytes - at < 1000 ? bytes - at : 1000);
        CHECK_EQ_INT(xd_crc32c(0, data, bytes), pieces);
    }
}

XD_TEST(a_matrix_that_does_not_say_what_it_is_made_of_is_not_saved) {
    xd_ctx *ctx = NULL;
    const xdi_vote cell = { 0, 1, 1.0 };
    const xdi_projection_cells list = { &cell, 1, 2, 3 };
    xd_projection p, back;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xdi_projection_from_cells(ctx, &list, &p), XD_OK);
    CHECK_EQ_INT(xd_projection_save(ctx, file_path(), &p), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "max_pieces 0 is outside [1, 32]") != NULL);
    p.origin.student_hash = 5;
    p.origin.options = xd_projection_defaults();
    CHECK_EQ_INT(xd_projection_save(ctx, file_path(), &p), XD_OK);
    CHECK_EQ_INT(projection_load(ctx, file_path(), NULL, &back), XD_OK);
    CHECK_EQ_INT(unlink(file_path()), 0);
    CHECK(back.origin.student_hash == 5 && back.student_size == 2 && back.teacher_size == 3 &&
          back.entries == 1);
    xd_projection_destroy(ctx, &back);
    xd_projection_destroy(ctx, &p);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_file_gives_back_the_matrix_and_where_it_is_from) {
    xd_projection_options options;
    xd_projection back;
    options = xd_projection_defaults();
    options.reverse = options.special_pairs = true;
    options.special_threshold = 0.37;
    made m = make(plain("a b|ab c|ab ab"), plain("c a|a b"), &options);
    CHECK_EQ_INT(xd_projection_save(m.student.ctx, file_path(), &m.matrix), XD_OK);
    CHECK_EQ_INT(projection_load(m.student.ctx, file_path(), &m.matrix.origin, &back), XD_OK);
    CHECK_EQ_INT(unlink(file_path()), 0);
    CHECK(back.origin.student_hash == xd_tokenizer_describe(m.student.tokenizer).hash);
    CHECK(back.origin.teacher_hash == xd_tokenizer_describe(m.teacher.tokenizer).hash);
    CHECK(back.origin.options.max_pieces == 4 && back.origin.options.k == 4 &&
          back.origin.options.special_threshold == 0.37);
    CHECK(back.origin.options.reverse && back.origin.options.special_pairs &&
          !back.origin.options.disable_exact);
    const size_t n = (size_t)m.matrix.entries;
    CHECK(back.student_size == m.matrix.student_size && back.teacher_size == m.matrix.teacher_size);
    CHECK_EQ_INT(back.entries, n);
    CHECK(memcmp(back.row_begin, m.matrix.row_begin, 8 * (size_t)(back.student_size + 1)) == 0);
    CHECK(memcmp(back.column_begin, m.matrix.column_begin, 8 * (size_t)(back.teacher_size + 1)) == 0);
    CHECK(memcmp(back.teacher_id, m.matrix.teacher_id, 4 * n) == 0);
    CHECK(memcmp(back.weight, m.matrix.weight, 4 * n) == 0);
    xd_projection_destroy(m.student.ctx, &back);
    unmake(&m);
}

XD_TEST(building_twice_gives_the_same_file) {
    size_t bytes[2];
    made m = make(plain("a b|ab c"), plain("c a"), NULL), n = make(plain("a b|ab c"), plain("c a"), NULL);
    unsigned char *one = bytes_of(&m, &bytes[0]), *two = bytes_of(&n, &bytes[1]);
    CHECK_EQ_INT(bytes[0], HEADER + 8 * 259 + 8 * (size_t)m.matrix.entries);
    CHECK(bytes[0] == bytes[1] && memcmp(one, two, bytes[0]) == 0);
    xd_release(m.student.ctx, one);
    xd_release(n.student.ctx, two);
    unmake(&n);
    unmake(&m);
}

XD_TEST(a_file_for_other_tokenizers_is_refused_with_all_hashes) {
    made m = make(plain("a b"), plain("c a"), NULL);
    xd_projection_origin other = m.matrix.origin;
    xd_projection p;
    memset(&p, 0, sizeof p);
    other.teacher_hash = 0x1234;
    CHECK_EQ_INT(xd_projection_save(m.student.ctx, file_path(), &m.matrix), XD_OK);
    CHECK_EQ_INT(projection_load(m.student.ctx, file_path(), &other, &p), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(unlink(file_path()), 0);
    char hashes[96];
    snprintf(hashes, sizeof hashes, "%016llx and %016llx, wanted are %016llx and 0000000000001234",
             (unsigned long long)m.matrix.origin.student_hash,
             (unsigned long long)m.matrix.origin.teacher_hash,
             (unsigned long long)m.matrix.origin.student_hash);
    CHECK(strstr(xd_last_error(m.student.ctx)->message, hashes) != NULL);
    CHECK(strstr(xd_last_error(m.student.ctx)->message, file_path()) != NULL);
    CHECK(p.row_begin == NULL);
    CHECK_EQ_INT(projection_load(m.student.ctx, "/tmp/xdistill-no-such-file", NULL, &p), XD_ERROR_IO);
    unmake(&m);
}

XD_TEST(every_changed_byte_and_every_length_is_refused) {
    made m = make(plain("a b"), plain("c a"), NULL);
    size_t bytes = 0;
    unsigned char *data = bytes_of(&m, &bytes);
    xd_projection p;
    memset(&p, 0, sizeof p);
    for (size_t at = 0; at < bytes; at++) {
        data[at] ^= (unsigned char)(1u << at % 8);
        const xd_result result = parse(m.student.ctx, data, bytes, &p);
        CHECK(result == XD_ERROR_FORMAT || result == XD_ERROR_UNSUPPORTED || result == XD_ERROR_CORRUPT);
        data[at] ^= (unsigned char)(1u << at % 8);
    }
    for (size_t length = 0; length < bytes; length++)
        CHECK_EQ_INT(parse(m.student.ctx, data, length, &p), XD_ERROR_FORMAT);
    unsigned char *longer = (unsigned char *)calloc(bytes + 8, 1);
    memcpy(longer, data, bytes);
    for (size_t more = 1; more <= 8; more++)
        CHECK_EQ_INT(parse(m.student.ctx, longer, bytes + more, &p), XD_ERROR_FORMAT);
    CHECK(p.row_begin == NULL);
    free(longer);
    xd_release(m.student.ctx, data);
    unmake(&m);
}

XD_TEST(numbers_that_make_no_sense_are_refused_under_a_right_checksum) {
    made m = make(plain("a b|ab c"), plain("c a"), NULL);
    xd_ctx *ctx = m.student.ctx;
    size_t bytes = 0;
    unsigned char *data = bytes_of(&m, &bytes);
    const size_t rows = HEADER, ids = rows + 8 * 259, weights = ids + 4 * (size_t)m.matrix.entries;
    refuse_number(ctx, data, bytes, 8, 2, 4, "version 2, known is 1");
    refuse_number(ctx, data, bytes, 16, 0, 8, "between 0 and 257 ids");
    refuse_number(ctx, data, bytes, 16, 1u << 25, 8, "between 33554432 and");
    refuse_number(ctx, data, bytes, 16, UINT64_MAX, 8, "between 18446744073709551615 and");
    refuse_number(ctx, data, bytes, 16, 259, 8, "for 259 student ids");
    refuse_number(ctx, data, bytes, 24, UINT64_MAX / 2, 8, "ids, allowed are 1 to 4194304");
    refuse_number(ctx, data, bytes, 24, 255, 8, "row 255 has teacher id 255 of 255 after -1");
    refuse_number(ctx, data, bytes, 32, UINT64_MAX, 8, "and 18446744073709551615 entries");
    refuse_number(ctx, data, bytes, 32, (uint64_t)1 << 61, 8, "entries");
    refuse_number(ctx, data, bytes, 56, 0, 4, "options of 0 pieces");
    refuse_number(ctx, data, bytes, 60, UINT32_MAX, 4, "k 4294967295");
    refuse_number(ctx, data, bytes, 64, 8, 4, "unknown flags 00000008 00000000");
    refuse_number(ctx, data, bytes, 68, 1, 4, "unknown flags 00000000 00000001");
    refuse_number(ctx, data, bytes, 72, 0x7ff8000000000000u, 8, "threshold nan");
    refuse_number(ctx, data, bytes, rows, 1, 8, "rows are entries 1 to");
    refuse_number(ctx, data, bytes, rows + 8, UINT64_MAX, 8, "row 0 has entries 0 to -1");
    refuse_number(ctx, data, bytes, rows + 8, 1000000, 8, "row 0 has entries 0 to 1000000");
    refuse_number(ctx, data, bytes, rows + 16, 0, 8, "row 1 has entries 1 to 0");
    refuse_number(ctx, data, bytes, rows + 8 * 258, 7, 8, "rows are entries 0 to 7");
    refuse_number(ctx, data, bytes, ids, 257, 4, "row 0 has teacher id 257 of 257 after -1");
    refuse_number(ctx, data, bytes, ids, UINT32_MAX, 4, "row 0 has teacher id 4294967295 of 257");
    refuse_number(ctx, data, bytes, ids + 4 * 257, 97, 4, "row 256 has teacher id 97 of 257 after 97");
    refuse_number(ctx, data, bytes, weights, 0x7fc00000u, 4, "row 0 has weight nan");
    refuse_number(ctx, data, bytes, weights, 0x7f800000u, 4, "row 0 has weight inf");
    refuse_number(ctx, data, bytes, weights, 0xbf800000u, 4, "row 0 has weight -1");
    xd_release(ctx, data);
    unmake(&m);
}

XD_TEST(names_of_caches_differ_where_projections_do) {
    xd_projection_origin o[9];
    char names[9][XD_PROJECTION_NAME_BYTES], again[XD_PROJECTION_NAME_BYTES];
    memset(o, 0, sizeof o);
    for (int i = 0; i < 9; i++) o[i].options = xd_projection_defaults();
    o[1].student_hash = UINT64_MAX;
    o[2].teacher_hash = UINT64_MAX;
    o[3].options.max_pieces = 32;
    o[4].options.k = 1024;
    o[5].options.disable_exact = true;
    o[6].options.reverse = true;
    o[7].options.special_pairs = true;
    o[8].options.special_pairs = true;
    o[8].options.special_threshold = 0.30000001;
    for (int i = 0; i < 9; i++) {
        xd_projection_cache_name(&o[i], names[i]);
        for (int k = 0; k < i; k++) CHECK(strcmp(names[i], names[k]) != 0);
        CHECK(strstr(names[i], ".xdproj") != NULL);
    }
    CHECK_EQ_STR(names[0], "projection1-0000000000000000-0000000000000000-p4-k4.xdproj");
    o[0].options.k = o[0].options.max_pieces = 4;
    o[0].options.special_threshold = 0.9; /* nothing uses it */
    xd_projection_cache_name(&o[0], again);
    CHECK_EQ_STR(again, names[0]);
    o[0] = o[8];
    o[0].student_hash = o[0].teacher_hash = UINT64_MAX;
    o[0].options.max_pieces = 32;
    o[0].options.k = 1024;
    o[0].options.reverse = o[0].options.disable_exact = true;
    xd_projection_cache_name(&o[0], again);
    CHECK(strstr(again, ".xdproj") != NULL); /* the longest name fits */
}

XD_TEST(a_cache_is_built_once_and_again_when_it_is_damaged) {
    made m = make(plain("a b|ab c"), plain("c a"), NULL);
    char directory[64] = "/tmp/xdistill-test-XXXXXX", path[256], name[XD_PROJECTION_NAME_BYTES];
    xd_ctx *ctx = m.student.ctx;
    const xd_projection_desc desc = { m.student.tokenizer, m.teacher.tokenizer, NULL, NULL };
    CHECK(mkdtemp(directory) != NULL);
    xd_projection_cache_name(&m.matrix.origin, name);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    for (int round = 0; round < 4; round++) {
        xd_projection p;
        bool built = round % 2 != 0;
        if (round == 2) CHECK_EQ_INT(xd_file_save(ctx, path, "XDPROJ", 6), XD_OK);
        CHECK_EQ_INT(projection_cached(ctx, directory, &desc, &p, &built), XD_OK);
        CHECK_EQ_INT(built, round % 2 == 0);
        CHECK_EQ_INT(p.entries, m.matrix.entries);
        CHECK(memcmp(p.weight, m.matrix.weight, 4 * (size_t)p.entries) == 0);
        xd_projection_destroy(ctx, &p);
    }
    xd_projection none;
    memset(&none, 0, sizeof none);
    CHECK_EQ_INT(projection_cached(ctx, "/tmp/no such directory", &desc, &none, NULL), XD_ERROR_IO);
    CHECK(none.row_begin == NULL);
    CHECK_EQ_INT(unlink(path), 0);
    CHECK_EQ_INT(rmdir(directory), 0);
    unmake(&m);
}

XD_TEST(rows_of_a_file_give_the_exact_map_of_gold_losses) {
    made m = make(plain("a b|ab c"), plain("c a|a b"), NULL);
    xd_projection_rows rows;
    xd_exact_map map;
    CHECK_EQ_INT(xd_projection_to_rows(m.student.ctx, &m.matrix, 0, &rows), XD_OK);
    CHECK_EQ_INT(rows.k, 2);
    CHECK(rows.ids[2 * 'a'] == 'a' && rows.ids[2 * 'a' + 1] == -1 && rows.weights[2 * 'a'] == 1.0f);
    CHECK(rows.ids[2 * 257] == 257 && rows.ids[2 * 257 + 1] == 'c'); /* the larger weight first */
    CHECK(rows.weights[2 * 257] > 0.9f);
    CHECK_EQ_INT(exact_map_create(m.student.ctx, &rows, m.matrix.teacher_size, false, &map), XD_OK);
    CHECK_EQ_INT(map.pairs, 257);
    CHECK_EQ_INT(map.student_rest_count, 1);
    CHECK_EQ_INT(map.teacher_rest_count, 1);
    xd_exact_map_destroy(m.student.ctx, &map);
    xd_projection_rows_destroy(m.student.ctx, &rows);
    CHECK_EQ_INT(xd_projection_to_rows(m.student.ctx, &m.matrix, 1, &rows), XD_OK);
    CHECK_EQ_INT(rows.ids[257], 257);
    xd_projection_rows_destroy(m.student.ctx, &rows);
    CHECK_EQ_INT(xd_projection_to_rows(m.student.ctx, &m.matrix, -1, &rows), XD_ERROR_ARGUMENT);
    unmake(&m);
}

/* ---- memory ---- */

typedef struct ration {
    long left, alive; /* allocations still granted; blocks not yet released */
} ration;

static void *ration_allocate(void *user, size_t bytes) {
    ration *r = (ration *)user;
    if (r->left-- <= 0) return NULL;
    r->alive++;
    return malloc(bytes);
}

static void ration_release(void *user, void *memory) {
    ((ration *)user)->alive--;
    free(memory);
}

/* Builds, writes, reads and sorts. */
static xd_result whole(xd_ctx *ctx, const made *m, const xd_projection_options *options) {
    xd_projection built, back;
    xd_projection_rows rows;
    const xd_projection_desc desc = { m->student.tokenizer, m->teacher.tokenizer, options, NULL };
    memset(&back, 0, sizeof back);
    xd_result result = xd_projection_build(ctx, &desc, &built, NULL);
    if (result != XD_OK) return result;
    result = xd_projection_save(ctx, file_path(), &built);
    if (result == XD_OK) result = projection_load(ctx, file_path(), &built.origin, &back);
    if (result == XD_OK) result = xd_projection_to_rows(ctx, &back, 0, &rows);
    if (result == XD_OK) xd_projection_rows_destroy(ctx, &rows);
    xd_projection_destroy(ctx, &back);
    xd_projection_destroy(ctx, &built);
    unlink(file_path());
    return result;
}

XD_TEST(memory_may_run_out_anywhere) {
    xd_projection_options options;
    options = xd_projection_defaults();
    options.reverse = options.special_pairs = true;
    made m = make(with_added("a b|ab c", ADDED(258, "<s>", true, "")),
                  with_added("c a", ADDED(257, "</s>", true, "")), NULL);
    bool granted = false;
    long point = 1;
    for (; !granted && point < 500; point++) {
        ration r = { point, 0 };
        xd_ctx_desc desc;
        xd_ctx *ctx = NULL;
        memset(&desc, 0, sizeof desc);
        desc.allocator.allocate = ration_allocate;
        desc.allocator.release = ration_release;
        desc.allocator.user = &r;
        if (xd_ctx_create(&desc, &ctx) != XD_OK) continue;
        const xd_result result = whole(ctx, &m, &options);
        granted = r.left >= 0;
        CHECK_EQ_INT(result, granted ? XD_OK : XD_ERROR_MEMORY);
        xd_ctx_destroy(ctx);
        CHECK_EQ_INT(r.alive, 0);
    }
    CHECK(granted && point > 15);
    unmake(&m);
}

XD_TEST_MAIN()
