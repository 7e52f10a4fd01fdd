/* The file of a teacher's predictions: what is written is read, and nothing else is. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "vocab_calls.h"
#include "xd_test.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { VOCABULARY = 37, FIRST = 5, SECOND = 4, POSITIONS = FIRST + SECOND, HEADER = 160, DOCUMENT = 24 };

static const char text_one[] = "some text of 23 bytes ..", text_two[] = "another";

/* Two documents of 5 and 4 tokens, and logits that are multiples of 1/64. */
typedef struct fixture {
    xd_ctx *ctx;
    char path[64];
    float logits[POSITIONS * VOCABULARY];
    int32_t ids[POSITIONS], next[POSITIONS];
    xd_token_span spans[POSITIONS];
    xd_teacher_cache_desc desc;
} fixture;

static void open_fixture(fixture *f) {
    uint32_t seed = 11;
    memset(f, 0, sizeof *f);
    CHECK_EQ_INT(xd_ctx_create(NULL, &f->ctx), XD_OK);
    snprintf(f->path, sizeof f->path, "/tmp/xdistill-test-cache-%ld", (long)getpid());
    for (int i = 0; i < POSITIONS * VOCABULARY; i++) {
        seed = seed * 1664525u + 1013904223u;
        f->logits[i] = (float)(int)(seed >> 23) / 64.0f;
    }
    for (int i = 0; i < POSITIONS; i++) {
        f->ids[i] = (int32_t)(i * 7 % VOCABULARY);
        f->next[i] = i == FIRST - 1 || i == POSITIONS - 1 ? -1 : (int32_t)((i + 1) * 7 % VOCABULARY);
        f->spans[i].begin = i < FIRST ? 3 * i : i - FIRST;
        f->spans[i].end = f->spans[i].begin + (i < FIRST ? 3 : 1);
    }
    f->desc.vocabulary = VOCABULARY;
    f->desc.teacher_hash = 0x1122334455667788u;
    f->desc.student_hash = 0x99aabbccddeeff00u;
    f->desc.temperature = 1.5;
    f->desc.k = 4;
    f->desc.context = 512;
    f->desc.spans = true;
    f->desc.name = "a teacher";
}

static void close_fixture(fixture *f) {
    remove(f->path);
    xd_ctx_destroy(f->ctx);
}

static xd_teacher_cache_block block_of(fixture *f, int first, int count) {
    xd_teacher_cache_block b;
    memset(&b, 0, sizeof b);
    b.logits.data = f->logits + first * VOCABULARY;
    b.logits.dtype = XD_DTYPE_F32;
    b.logits.rows = count;
    b.logits.cols = VOCABULARY;
    b.ids = f->ids + first;
    b.next = f->next + first;
    b.spans = f->spans + first;
    return b;
}

/* Appends a document in pieces of at most `most` positions. */
static void append(fixture *f, xd_teacher_cache_writer *w, int first, int count, int most) {
    for (int at = first; at < first + count; at += most) {
        const int left = first + count - at;
        const xd_teacher_cache_block b = block_of(f, at, left < most ? left : most);
        CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_OK);
    }
}

static void write_cache(fixture *f, int most) {
    xd_teacher_cache_writer *w = NULL;
    CHECK_EQ_INT(cache_writer_create(f->ctx, f->path, &f->desc, &w), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_one, strlen(text_one)), XD_OK);
    append(f, w, 0, FIRST, most);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_two, strlen(text_two)), XD_OK);
    append(f, w, FIRST, SECOND, most);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
}

/* log softmax of one row at a temperature, in double. */
static void log_softmax(const fixture *f, int row, double temperature, double *out) {
    double sum = 0.0;
    for (int v = 0; v < VOCABULARY; v++) {
        out[v] = (double)f->logits[row * VOCABULARY + v] / temperature;
        sum += exp(out[v]);
    }
    for (int v = 0; v < VOCABULARY; v++) out[v] -= log(sum);
}

/* The cache holds what the logits say, to the given number of nats. */
static void check_positions(fixture *f, const xd_teacher_cache *cache, double nats, double wide_nats) {
    xd_cached_position at[POSITIONS];
    CHECK_EQ_INT(cache_read(f->ctx, cache, 0, POSITIONS, at), XD_OK);
    for (int p = 0; p < POSITIONS; p++) {
        double hot[VOCABULARY], one[VOCABULARY], probabilities[VOCABULARY], sum = at[p].tail, tail = 1.0;
        int32_t ids[VOCABULARY];
        const int k = (int)xd_teacher_cache_describe(cache).desc.k;
        log_softmax(f, p, f->desc.temperature == 0.0 ? 1.0 : f->desc.temperature, hot);
        log_softmax(f, p, 1.0, one);
        CHECK_EQ_INT(at[p].id, f->ids[p]);
        CHECK_EQ_INT(at[p].next, f->next[p]);
        CHECK(f->next[p] >= 0 || at[p].next_log_prob == -INFINITY);
        if (f->next[p] >= 0) CHECK_NEAR(at[p].next_log_prob, one[f->next[p]], wide_nats);
        if (f->desc.spans) CHECK(at[p].span.begin == f->spans[p].begin && at[p].span.end == f->spans[p].end);
        CHECK_EQ_INT(cache_entries(f->ctx, cache, p, ids, probabilities), XD_OK);
        for (int j = 0; j < k; j++) {
            int better = 0;
            for (int v = 0; v < VOCABULARY; v++)
                better += hot[v] > hot[ids[j]] || (hot[v] == hot[ids[j]] && v < ids[j]);
            CHECK_EQ_INT(better, j);
            CHECK_NEAR(log(probabilities[j]), hot[ids[j]], 2.0 * nats + 1e-7);
            sum += probabilities[j];
            tail -= exp(hot[ids[j]]);
        }
        CHECK_NEAR(sum, 1.0, 1e-12);
        CHECK_NEAR(at[p].tail, tail, 2.0 * nats + 1e-7);
    }
}

XD_TEST(what_is_written_is_read_in_every_coding) {
    const double nats[] = { 1.0 / 32.0, 1.0 / 4096.0, 1e-6 }, wide[] = { 1.0 / 4096.0, 1.0 / 4096.0, 1e-6 };
    for (int coding = 0; coding < 3; coding++) {
        fixture f;
        xd_teacher_cache *cache = NULL;
        open_fixture(&f);
        f.desc.coding = (xd_cache_coding)coding;
        f.desc.spans = coding != 1;
        write_cache(&f, 3);
        CHECK_EQ_INT(cache_open(f.ctx, f.path, NULL, &cache), XD_OK);
        check_positions(&f, cache, nats[coding], wide[coding]);
        const xd_teacher_cache_info info = xd_teacher_cache_describe(cache);
        CHECK_EQ_INT(info.positions, POSITIONS);
        CHECK_EQ_INT(info.documents, 2);
        CHECK_EQ_INT(info.text_bytes, (int64_t)(strlen(text_one) + strlen(text_two)));
        CHECK(info.desc.teacher_hash == f.desc.teacher_hash && info.desc.student_hash == f.desc.student_hash);
        CHECK(info.desc.vocabulary == VOCABULARY && info.desc.k == 4 && info.desc.context == 512);
        CHECK(info.desc.temperature == 1.5 && info.desc.spans == f.desc.spans && !info.desc.vocab);
        CHECK(info.desc.coding == f.desc.coding);
        CHECK_EQ_STR(info.desc.name, "a teacher");
        xd_teacher_cache_close(cache);
        close_fixture(&f);
    }
}

XD_TEST(documents_are_found_and_their_texts_known) {
    fixture f;
    xd_teacher_cache *cache = NULL;
    xd_cached_document d;
    xd_cached_position at[2];
    open_fixture(&f);
    write_cache(&f, 100);
    CHECK_EQ_INT(cache_open(f.ctx, f.path, NULL, &cache), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_find_document(f.ctx, cache, 0, &d), XD_OK);
    CHECK(d.first == 0 && d.count == FIRST && d.text_bytes == (int64_t)strlen(text_one));
    CHECK(d.text_checksum == xd_crc32c(0, text_one, strlen(text_one)));
    CHECK_EQ_INT(xd_teacher_cache_find_document(f.ctx, cache, 1, &d), XD_OK);
    CHECK(d.first == FIRST && d.count == SECOND &&
          d.text_checksum == xd_crc32c(0, text_two, strlen(text_two)));
    CHECK_EQ_INT(cache_read(f.ctx, cache, FIRST - 1, 2, at), XD_OK);
    CHECK(at[0].next == -1 && at[1].next == f.next[FIRST]);
    CHECK_EQ_INT(xd_teacher_cache_find_document(f.ctx, cache, 2, &d), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_teacher_cache_find_document(f.ctx, cache, -1, &d), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(cache_read(f.ctx, cache, POSITIONS, 0, at), XD_OK);
    CHECK_EQ_INT(cache_read(f.ctx, cache, POSITIONS - 1, 2, at), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(cache_read(f.ctx, cache, -1, 1, at), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(cache_read(f.ctx, cache, 1, INT64_MAX, at), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(cache_entries(f.ctx, cache, POSITIONS, &f.ids[0], NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "1 positions from 9 on, it has 9") != NULL);
    xd_teacher_cache_close(cache);
    xd_teacher_cache_close(NULL);
    close_fixture(&f);
}

static char *load(fixture *f, size_t *bytes) {
    char *data = NULL;
    CHECK_EQ_INT(xd_file_load(f->ctx, f->path, 0, &data, bytes), XD_OK);
    return data;
}

XD_TEST(the_file_does_not_depend_on_how_it_was_appended) {
    fixture f;
    size_t bytes = 0, again = 0;
    open_fixture(&f);
    write_cache(&f, 100);
    char *whole = load(&f, &bytes);
    CHECK_EQ_INT(bytes, HEADER + POSITIONS * (2 + 6 + 2 + 2 + 4 * 3) + 2 * DOCUMENT);
    for (int most = 1; most < 4; most++) {
        write_cache(&f, most);
        char *pieces = load(&f, &again);
        CHECK(again == bytes && memcmp(whole, pieces, bytes) == 0);
        xd_release(f.ctx, pieces);
    }
    xd_release(f.ctx, whole);
    close_fixture(&f);
}

/* Columns beyond the vocabulary are padding: nobody looks at them. */
XD_TEST(padded_rows_of_bf16_give_the_file_of_their_values) {
    enum { WIDE = VOCABULARY + 3 };
    fixture f;
    xd_teacher_cache_writer *w = NULL;
    uint16_t narrow[POSITIONS * WIDE];
    size_t bytes = 0, again = 0;
    open_fixture(&f);
    for (int i = 0; i < POSITIONS * WIDE; i++) {
        const int row = i / WIDE, v = i % WIDE;
        narrow[i] = xd_bf16_from_f32(v < VOCABULARY ? f.logits[row * VOCABULARY + v] : (float)NAN);
        if (v < VOCABULARY) f.logits[row * VOCABULARY + v] = xd_f32_from_bf16(narrow[i]);
    }
    write_cache(&f, 100);
    char *whole = load(&f, &bytes);
    CHECK_EQ_INT(cache_writer_create(f.ctx, f.path, &f.desc, &w), XD_OK);
    for (int d = 0; d < 2; d++) {
        xd_teacher_cache_block b = block_of(&f, d ? FIRST : 0, d ? SECOND : FIRST);
        b.logits.data = narrow + (d ? FIRST * WIDE : 0);
        b.logits.dtype = XD_DTYPE_BF16;
        b.logits.cols = WIDE - 1;
        b.logits.stride = WIDE;
        CHECK_EQ_INT(
            xd_teacher_cache_writer_document(w, d ? text_two : text_one, strlen(d ? text_two : text_one)),
            XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_OK);
    }
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
    char *pieces = load(&f, &again);
    CHECK(again == bytes && memcmp(whole, pieces, bytes) == 0);
    xd_release(f.ctx, whole);
    xd_release(f.ctx, pieces);
    close_fixture(&f);
}

XD_TEST(defaults_are_filled_in_and_a_large_vocabulary_has_wide_ids) {
    enum { LARGE = 65537 };
    fixture f;
    xd_teacher_cache_desc desc;
    xd_teacher_cache_writer *w = NULL;
    xd_teacher_cache *cache = NULL;
    xd_teacher_cache_block b;
    double probabilities[16];
    int32_t ids[16];
    const int32_t id = LARGE - 1, next = -1;
    open_fixture(&f);
    memset(&desc, 0, sizeof desc);
    desc.vocabulary = LARGE;
    desc.k = 16;
    b = block_of(&f, 0, 1);
    b.logits.cols = LARGE;
    b.logits.data = calloc(LARGE, sizeof(float));
    ((float *)b.logits.data)[LARGE - 2] = 20.0f;
    b.ids = &id;
    b.next = &next;
    CHECK_EQ_INT(cache_writer_create(f.ctx, f.path, &desc, &w), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, NULL, 0), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
    CHECK_EQ_INT(cache_open(f.ctx, f.path, NULL, &cache), XD_OK);
    const xd_teacher_cache_info info = xd_teacher_cache_describe(cache);
    CHECK(info.desc.k == 16 && info.desc.temperature == 1.0 && info.desc.coding == XD_CACHE_8_BITS);
    CHECK_EQ_INT(info.bytes, HEADER + 4 + 2 + 2 + 16 * 5 + DOCUMENT);
    CHECK_EQ_INT(cache_entries(f.ctx, cache, 0, ids, probabilities), XD_OK);
    CHECK(ids[0] == LARGE - 2 && ids[1] == 0 && ids[15] == 14); /* the lowest ids among equals */
    free(b.logits.data);
    xd_teacher_cache_close(cache);
    close_fixture(&f);
}

/* Logits of minus infinity have probability 0; k may be all there is, and then nothing is left for the tail. */
XD_TEST(a_whole_vocabulary_leaves_no_tail) {
    fixture f;
    xd_teacher_cache *cache = NULL;
    xd_cached_position at;
    double probabilities[VOCABULARY];
    int32_t ids[VOCABULARY];
    open_fixture(&f);
    f.desc.k = VOCABULARY;
    f.logits[3] = -INFINITY;
    f.logits[8] = -1e4f;
    write_cache(&f, 100);
    CHECK_EQ_INT(cache_open(f.ctx, f.path, NULL, &cache), XD_OK);
    CHECK_EQ_INT(cache_read(f.ctx, cache, 0, 1, &at), XD_OK);
    CHECK(at.tail == 0.0);
    CHECK_EQ_INT(cache_entries(f.ctx, cache, 0, ids, probabilities), XD_OK);
    CHECK(ids[VOCABULARY - 1] == 3 && probabilities[VOCABULARY - 1] == 0.0);
    CHECK(ids[VOCABULARY - 2] == 8 && probabilities[VOCABULARY - 2] > 1e-8); /* as small as 8 bits can say */
    xd_teacher_cache_close(cache);
    close_fixture(&f);
}

/* ---- refusals ---- */

XD_TEST(a_cache_is_for_its_tokenizers_only) {
    fixture f;
    xd_projection_origin origin;
    xd_teacher_cache *cache = NULL;
    open_fixture(&f);
    write_cache(&f, 100);
    memset(&origin, 0, sizeof origin);
    origin.teacher_hash = f.desc.teacher_hash;
    origin.student_hash = f.desc.student_hash + 1;
    CHECK_EQ_INT(cache_open(f.ctx, f.path, &origin, &cache), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "99aabbccddeeff01") != NULL);
    origin.student_hash--;
    CHECK_EQ_INT(cache_open(f.ctx, f.path, &origin, &cache), XD_OK);
    xd_teacher_cache_close(cache);
    f.desc.student_hash = 0; /* any student */
    origin.student_hash = 5;
    write_cache(&f, 100);
    CHECK_EQ_INT(cache_open(f.ctx, f.path, &origin, &cache), XD_OK);
    xd_teacher_cache_close(cache);
    origin.teacher_hash++;
    CHECK_EQ_INT(cache_open(f.ctx, f.path, &origin, &cache), XD_ERROR_ARGUMENT);
    close_fixture(&f);
}

static void put(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i & 255);
}

static void put_checksum(unsigned char *file, size_t bytes) {
    if (bytes < HEADER) return;
    put(file + 12, xd_crc32c(xd_crc32c(0, file + HEADER, bytes - HEADER), file + 16, HEADER - 16), 4);
}

static xd_result parse(fixture *f, const unsigned char *file, size_t bytes) {
    xd_teacher_cache *cache = NULL;
    const xd_result result = cache_open_memory(f->ctx, file, bytes, NULL, &cache);
    CHECK((result == XD_OK) == (cache != NULL));
    xd_teacher_cache_close(cache);
    return result;
}

XD_TEST(cut_and_flipped_files_are_refused) {
    fixture f;
    size_t bytes = 0;
    open_fixture(&f);
    write_cache(&f, 100);
    unsigned char *file = (unsigned char *)load(&f, &bytes);
    CHECK_EQ_INT(parse(&f, file, bytes), XD_OK);
    for (size_t cut = 0; cut < bytes; cut++) CHECK(parse(&f, file, cut) != XD_OK);
    for (size_t at = 0; at < bytes; at++) {
        file[at] ^= (unsigned char)(1 << at % 8);
        CHECK(parse(&f, file, bytes) != XD_OK);
        put_checksum(file, bytes); /* still no crash */
        parse(&f, file, bytes);
        file[at] ^= (unsigned char)(1 << at % 8);
        put_checksum(file, bytes);
    }
    CHECK_EQ_INT(parse(&f, file, bytes), XD_OK);
    xd_release(f.ctx, file);
    close_fixture(&f);
}

/* Wrong values under a right checksum. */
XD_TEST(a_file_that_lies_is_refused_with_both_numbers) {
    static const struct lie {
        int at, bytes;
        uint64_t value;
        xd_result result;
        const char *says;
    } lies[] = {
        { 0, 1, 'Y', XD_ERROR_FORMAT, "other bytes" },
        { 8, 4, 2, XD_ERROR_UNSUPPORTED, "version 2, known is 1" },
        { 16, 8, POSITIONS + 1, XD_ERROR_FORMAT, "10 positions" },
        { 16, 8, (uint64_t)1 << 62, XD_ERROR_FORMAT, "positions" },
        { 24, 8, 0, XD_ERROR_FORMAT, "0 documents" },
        { 24, 8, UINT64_MAX, XD_ERROR_FORMAT, "documents" },
        { 32, 8, 3, XD_ERROR_FORMAT, "k is 4, with a vocabulary of 3" },
        { 32, 8, (uint64_t)1 << 40, XD_ERROR_FORMAT, "allowed are 1 to" },
        { 32, 8, 0, XD_ERROR_FORMAT, "allowed are 1 to" },
        { 56, 8, 0x7ff8000000000000u, XD_ERROR_FORMAT, "temperature" },
        { 56, 8, 0, XD_ERROR_FORMAT, "temperature 0" },
        { 64, 8, UINT64_MAX, XD_ERROR_FORMAT, "context" },
        { 72, 4, 0, XD_ERROR_FORMAT, "k is 0" },
        { 72, 4, 5, XD_ERROR_FORMAT, "positions of" },
        { 76, 4, 7, XD_ERROR_FORMAT, "coding" },
        { 80, 4, 2, XD_ERROR_FORMAT, "flags 00000002" },
        { 84, 4, 2, XD_ERROR_FORMAT, "positions of" },
        { 84, 4, 1021, XD_ERROR_FORMAT, "1021 draws beside k of 4" },
        { 88, 8, 1, XD_ERROR_FORMAT, "a seed of 0000000000000001 and no draws" },
        { 120, 1, 1, XD_ERROR_FORMAT, "zeros" },
        { HEADER, 2, VOCABULARY, XD_ERROR_FORMAT, "position 0 has id 37 of 37" },
        { HEADER + 2, 4, 100, XD_ERROR_FORMAT, "position 0 is bytes 100 to 103 of 24" },
        { HEADER + 12, 2, VOCABULARY, XD_ERROR_FORMAT, "position 0 has entry 37 of 37" },
        { HEADER + 20, 1, 255, XD_ERROR_FORMAT, "log-probability" },
        { HEADER + 21, 1, 0, XD_ERROR_FORMAT, "log-probability" },
        { HEADER + 20, 1, 0, XD_ERROR_FORMAT, "probabilities of position 0 sum to" },
        { HEADER + 10, 2, 0, XD_ERROR_FORMAT, "probabilities of position 0 sum to" },
        { HEADER + (FIRST - 1) * 24 + 8, 2, 7, XD_ERROR_FORMAT, "document 0 ends" },
        { HEADER + POSITIONS * 24, 8, 1, XD_ERROR_FORMAT, "document 0 is positions 1 to" },
        { HEADER + POSITIONS * 24 + DOCUMENT, 8, POSITIONS, XD_ERROR_FORMAT, "position 5 is bytes" },
        { HEADER + POSITIONS * 24 + DOCUMENT, 8, UINT64_MAX, XD_ERROR_FORMAT, "document 0" },
        { HEADER + POSITIONS * 24 + 8, 8, UINT64_MAX, XD_ERROR_FORMAT, "bytes of text" },
        { HEADER + POSITIONS * 24 + 8, 8, 3, XD_ERROR_FORMAT, "bytes 3 to 6 of 3" },
        { HEADER + POSITIONS * 24 + 20, 1, 1, XD_ERROR_FORMAT, "at its end" },
    };
    fixture f;
    size_t bytes = 0;
    open_fixture(&f);
    write_cache(&f, 100);
    unsigned char *file = (unsigned char *)load(&f, &bytes), *copy = (unsigned char *)malloc(bytes);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        memcpy(copy, file, bytes);
        put(copy + lies[i].at, lies[i].value, lies[i].bytes);
        put_checksum(copy, bytes);
        CHECK_EQ_INT(parse(&f, copy, bytes), lies[i].result);
        CHECK(strstr(xd_last_error(f.ctx)->message, lies[i].says) != NULL);
    }
    free(copy);
    xd_release(f.ctx, file);
    close_fixture(&f);
}

static bool exists(const char *path) {
    return access(path, F_OK) == 0;
}

/* Whatever goes wrong, there is no file and the block was not added. */
XD_TEST(a_refused_block_adds_nothing) {
    fixture f, good;
    xd_teacher_cache_writer *w = NULL;
    size_t bytes = 0, again = 0;
    open_fixture(&good);
    write_cache(&good, 100);
    char *whole = load(&good, &bytes);
    open_fixture(&f);
    remove(f.path);
    CHECK_EQ_INT(cache_writer_create(f.ctx, f.path, &f.desc, &w), XD_OK);
    xd_teacher_cache_block b = block_of(&f, 0, FIRST);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "without a document") != NULL);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, NULL, 3), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_one, strlen(text_one)), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_one, strlen(text_one)), XD_ERROR_ARGUMENT);
    b.logits.cols = VOCABULARY - 1;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_SHAPE);
    b = block_of(&f, 0, FIRST);
    b.logits.dtype = XD_DTYPE_I32;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_DTYPE);
    b = block_of(&f, 0, FIRST);
    b.ids = NULL;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    b = block_of(&f, 0, FIRST + 1); /* over the end of the document */
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "row 5 comes after the end of document 0") != NULL);
    b = block_of(&f, 0, FIRST);
    b.spans = NULL;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    f.ids[1] = VOCABULARY;
    b = block_of(&f, 0, FIRST);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    f.ids[1] = 9;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(f.ctx)->message, "row 1 has id 9, but the row before says 7") != NULL);
    f.ids[1] = 7;
    f.spans[2].begin = 1;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    f.spans[2].begin = 6;
    f.logits[2 * VOCABULARY + 5] = (float)NAN;
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_DATA);
    memcpy(f.logits, good.logits, sizeof f.logits);
    append(&f, w, 0, FIRST, 2);
    b = block_of(&f, 0, 1);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), XD_ERROR_ARGUMENT);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_two, strlen(text_two)), XD_OK);
    append(&f, w, FIRST, SECOND, 2);
    CHECK(!exists(f.path));
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_OK);
    char *pieces = load(&f, &again);
    CHECK(again == bytes && memcmp(whole, pieces, bytes) == 0);
    xd_release(f.ctx, pieces);
    xd_release(good.ctx, whole);
    close_fixture(&f);
    close_fixture(&good);
}

XD_TEST(descs_that_a_file_cannot_hold_are_refused) {
    fixture f;
    xd_teacher_cache_writer *w = NULL;
    open_fixture(&f);
    for (int i = 0; i < 8; i++) {
        xd_teacher_cache_desc d = f.desc;
        if (i == 0) d.vocabulary = 0;
        if (i == 1) d.k = VOCABULARY + 1;
        if (i == 2) d.temperature = -1.0;
        if (i == 3) d.temperature = (double)NAN;
        if (i == 4) d.coding = (xd_cache_coding)9;
        if (i == 5) d.name = "a name of sixty-four bytes ----------------------- and not one less";
        if (i == 6) d.context = -1;
        if (i == 7) d.vocabulary = (int64_t)1 << 40;
        CHECK_EQ_INT(cache_writer_create(f.ctx, f.path, &d, &w), XD_ERROR_ARGUMENT);
    }
    CHECK_EQ_INT(cache_writer_create(f.ctx, "/tmp/no such directory/x", &f.desc, &w), XD_ERROR_IO);
    CHECK(w == NULL);
    xd_teacher_cache_writer_abort(NULL);
    close_fixture(&f);
}

XD_TEST(an_unfinished_cache_leaves_no_file) {
    fixture f;
    xd_teacher_cache_writer *w = NULL;
    open_fixture(&f);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(cache_writer_create(f.ctx, f.path, &f.desc, &w), XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_one, strlen(text_one)), XD_OK);
        if (i > 0) append(&f, w, 0, FIRST - 1, 100);
        if (i < 2)
            CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), XD_ERROR_ARGUMENT);
        else
            xd_teacher_cache_writer_abort(w);
        CHECK(!exists(f.path));
    }
    close_fixture(&f);
}

static int failing_calls; /* of write, until the disk is full */

static int failing_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    if (failing_calls-- == 0) return ENOSPC;
    return pwrite((int)file, buffer, bytes, (off_t)offset) == (ssize_t)bytes ? 0 : EIO;
}

static int failing_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    (void)user;
    (void)file;
    (void)bytes;
    (void)address;
    return ENODEV;
}

XD_TEST(a_full_disk_leaves_no_file_and_no_map_is_no_hindrance) {
    fixture f;
    xd_ctx_desc settings;
    xd_teacher_cache *cache = NULL;
    open_fixture(&f);
    xd_ctx_destroy(f.ctx);
    memset(&settings, 0, sizeof settings);
    settings.files.write = failing_write;
    settings.files.map = failing_map;
    CHECK_EQ_INT(xd_ctx_create(&settings, &f.ctx), XD_OK);
    for (int calls = 0; calls < 3; calls++) {
        xd_teacher_cache_writer *w = NULL;
        xd_teacher_cache_block b = block_of(&f, 0, FIRST);
        failing_calls = calls;
        CHECK_EQ_INT(cache_writer_create(f.ctx, f.path, &f.desc, &w), XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_writer_document(w, text_one, strlen(text_one)), XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_writer_append(w, &b), calls == 0 ? XD_ERROR_IO : XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_writer_commit(w), calls == 0 ? XD_ERROR_ARGUMENT : XD_ERROR_IO);
        CHECK(!exists(f.path));
    }
    failing_calls = 1000;
    write_cache(&f, 100);
    CHECK_EQ_INT(cache_open(f.ctx, f.path, NULL, &cache), XD_OK);
    check_positions(&f, cache, 1.0 / 32.0, 1.0 / 4096.0);
    xd_teacher_cache_close(cache);
    CHECK_EQ_INT(cache_open(f.ctx, "/tmp/xdistill-no-such-file", NULL, &cache), XD_ERROR_IO);
    CHECK_EQ_INT(xd_file_save(f.ctx, f.path, "", 0), XD_OK);
    CHECK_EQ_INT(cache_open(f.ctx, f.path, NULL, &cache), XD_ERROR_FORMAT);
    close_fixture(&f);
}

/* ---- many ranks ---- */

typedef struct shard_job {
    fixture *f;
    int spoilt;
} shard_job;

/* ---- draws ---- */

enum { DRAWS = 6 };

/* The cache of `seed` in memory; freed with xd_release. */
static char *drawn_file(fixture *f, uint64_t seed, size_t *bytes) {
    f->desc.draws = DRAWS;
    f->desc.seed = seed;
    write_cache(f, 3);
    char *file = load(f, bytes);
    remove(f->path);
    return file;
}

/* Adds a position's weights to `mean`, and checks what every one of them must be. */
static void add_drawn(fixture *f, const xd_teacher_cache *cache, int p, double *mean) {
    int32_t ids[4 + DRAWS];
    double weights[4 + DRAWS], sum = 0.0, hot[VOCABULARY];
    log_softmax(f, p, 1.5, hot);
    CHECK_EQ_INT(cache_entries(f->ctx, cache, p, ids, weights), XD_OK);
    for (int j = 0; j < 4 + DRAWS; j++) {
        sum += weights[j];
        mean[ids[j]] += weights[j];
        if (j < 4) CHECK_NEAR(weights[j], exp(hot[ids[j]]), 2e-3);
        if (j > 4) CHECK(ids[j] >= ids[j - 1] && (ids[j] > ids[j - 1] || weights[j] == 0.0));
    }
    CHECK_NEAR(sum, 1.0, 1e-12);
}

XD_TEST(draws_have_the_probabilities_of_their_ids_on_average) {
    enum { SEEDS = 400 };
    static double mean[POSITIONS][VOCABULARY];
    fixture f;
    open_fixture(&f);
    f.desc.coding = XD_CACHE_16_BITS;
    memset(mean, 0, sizeof mean);
    for (int seed = 1; seed <= SEEDS; seed++) {
        size_t bytes = 0;
        xd_teacher_cache *cache = NULL;
        char *file = drawn_file(&f, (uint64_t)seed, &bytes);
        CHECK_EQ_INT(cache_open_memory(f.ctx, file, bytes, NULL, &cache), XD_OK);
        CHECK_EQ_INT(xd_teacher_cache_describe(cache).desc.draws, DRAWS);
        CHECK(xd_teacher_cache_describe(cache).desc.seed == (uint64_t)seed);
        for (int p = 0; p < POSITIONS; p++) add_drawn(&f, cache, p, mean[p]);
        xd_teacher_cache_close(cache);
        xd_release(f.ctx, file);
    }
    for (int p = 0; p < POSITIONS; p++) {
        double hot[VOCABULARY];
        log_softmax(&f, p, 1.5, hot);
        /* A weight is a multiple of a sixth of the tail: its deviation is below a twelfth, of a mean of 400 below .005. */
        for (int v = 0; v < VOCABULARY; v++) CHECK_NEAR(mean[p][v] / SEEDS, exp(hot[v]), 0.02);
    }
    close_fixture(&f);
}

XD_TEST(draws_of_one_seed_are_the_same_and_of_another_are_not) {
    fixture f;
    size_t bytes = 0, again = 0;
    open_fixture(&f);
    char *one = drawn_file(&f, 1, &bytes), *same = drawn_file(&f, 1, &again),
         *other = drawn_file(&f, 2, &again);
    CHECK(again == bytes && memcmp(one, same, bytes) == 0);
    CHECK(memcmp(one + HEADER, other + HEADER, bytes - HEADER) != 0);
    CHECK_EQ_INT(parse(&f, (const unsigned char *)one, bytes), XD_OK);
    /* The first draw becomes the likeliest id: bytes 12 and 24 of a position of 4 ids and 6 draws. */
    memcpy(one + HEADER + 24, one + HEADER + 12, 2);
    memcpy(one + HEADER + 26, one + HEADER + 12, 2);
    put_checksum((unsigned char *)one, bytes);
    CHECK_EQ_INT(parse(&f, (const unsigned char *)one, bytes), XD_ERROR_FORMAT);
    xd_release(f.ctx, one);
    xd_release(f.ctx, same);
    xd_release(f.ctx, other);
    close_fixture(&f);
}

/* All mass on the k likeliest: nothing is left to draw. Nearly all: what is left is drawn, however little. */
XD_TEST(draws_of_rows_without_a_rest_weigh_nothing) {
    for (int rest = 0; rest < 2; rest++) {
        fixture f;
        size_t bytes = 0;
        xd_teacher_cache *cache = NULL;
        int32_t ids[4 + DRAWS];
        double weights[4 + DRAWS], left = 0.0;
        open_fixture(&f);
        for (int i = 0; i < POSITIONS * VOCABULARY; i++)
            f.logits[i] = i % VOCABULARY < 4 ? 1.0f : rest ? -57.0f : -INFINITY;
        char *file = drawn_file(&f, 1, &bytes);
        CHECK_EQ_INT(cache_open_memory(f.ctx, file, bytes, NULL, &cache), XD_OK);
        CHECK_EQ_INT(cache_entries(f.ctx, cache, 0, ids, weights), XD_OK);
        for (int j = 4; j < 4 + DRAWS; j++) left += weights[j];
        CHECK(rest ? left > 0.0 && left < 1e-12 && ids[4] >= 4 : left == 0.0);
        xd_teacher_cache_close(cache);
        xd_release(f.ctx, file);
        close_fixture(&f);
    }
}

/* A rank that names no file fails the call of all of them. */
static xd_result nameless_body(xd_comm *world, void *argument) {
    fixture *f = (fixture *)argument;
    const int rank = xd_comm_rank(world);
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab = NULL;
    xd_teacher_cache_desc desc = f->desc;
    xd_teacher_cache_writer *w = NULL;
    XD_TRY(vocab_even(ctx, world, VOCABULARY, &vocab));
    desc.vocab = vocab;
    desc.path = rank == 1 ? NULL : f->path;
    CHECK_EQ_INT(xd_teacher_cache_writer_create(ctx, &desc, &w),
                 rank == 1 ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(w == NULL);
    xd_vocab_destroy(vocab);
    return xd_barrier(world);
}

XD_TEST(a_rank_without_a_path_is_refused_together_with_the_others) {
    fixture f;
    xd_error error;
    open_fixture(&f);
    CHECK_EQ_INT(xd_run_threads(2, NULL, nameless_body, &f, &error), XD_OK);
    CHECK(!exists(f.path));
    close_fixture(&f);
}

/* Uneven shards of the vocabulary, one of them empty, write one file. */
static xd_result shard_body(xd_comm *world, void *argument) {
    static const int64_t cuts[] = { 0, 10, 10, VOCABULARY };
    shard_job *job = (shard_job *)argument;
    fixture *f = job->f;
    const int rank = xd_comm_rank(world);
    const int64_t begin = cuts[rank], columns = cuts[rank + 1] - begin;
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_vocab *vocab = NULL;
    xd_teacher_cache_desc desc = f->desc;
    xd_teacher_cache_writer *w = NULL;
    float *mine = (float *)calloc(POSITIONS * VOCABULARY, sizeof *mine);
    for (int64_t p = 0; p < POSITIONS; p++)
        for (int64_t v = 0; v < columns; v++) mine[p * columns + v] = f->logits[p * VOCABULARY + begin + v];
    xd_result result = vocab_of(ctx, world, (xd_interval){ begin, begin + columns }, VOCABULARY, &vocab);
    desc.vocab = vocab;
    if (result == XD_OK) result = cache_writer_create(ctx, f->path, &desc, &w);
    for (int d = 0; d < 2 && result == XD_OK; d++) {
        xd_teacher_cache_block b = block_of(f, d ? FIRST : 0, d ? SECOND : FIRST);
        b.logits.data = mine + (d ? FIRST * columns : 0);
        b.logits.cols = columns;
        result =
            xd_teacher_cache_writer_document(w, d ? text_two : text_one, strlen(d ? text_two : text_one));
        if (job->spoilt == rank && d == 1) b.next = NULL;
        if (result == XD_OK) result = xd_teacher_cache_writer_append(w, &b);
    }
    if (job->spoilt >= 0) { /* all ranks heard of the one that failed */
        CHECK_EQ_INT(result, rank == job->spoilt ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
        xd_teacher_cache_writer_abort(w);
        result = xd_barrier(world);
    } else if (result == XD_OK) {
        result = xd_teacher_cache_writer_commit(w);
    }
    xd_vocab_destroy(vocab);
    free(mine);
    return result;
}

XD_TEST(shards_of_the_vocabulary_write_the_file_of_one_rank) {
    fixture f;
    shard_job job;
    xd_error error;
    size_t bytes = 0, again = 0;
    open_fixture(&f);
    write_cache(&f, 100);
    char *whole = load(&f, &bytes);
    remove(f.path);
    job.f = &f;
    job.spoilt = -1;
    CHECK_EQ_INT(xd_run_threads(3, NULL, shard_body, &job, &error), XD_OK);
    char *pieces = load(&f, &again);
    CHECK(again == bytes && memcmp(whole, pieces, bytes) == 0);
    remove(f.path);
    xd_release(f.ctx, whole);
    xd_release(f.ctx, pieces);
    whole = drawn_file(&f, 5, &bytes);
    CHECK_EQ_INT(xd_run_threads(3, NULL, shard_body, &job, &error), XD_OK);
    pieces = load(&f, &again);
    CHECK(again == bytes && memcmp(whole, pieces, bytes) == 0);
    remove(f.path);
    job.spoilt = 2;
    CHECK_EQ_INT(xd_run_threads(3, NULL, shard_body, &job, &error), XD_OK);
    CHECK(!exists(f.path));
    xd_release(f.ctx, whole);
    xd_release(f.ctx, pieces);
    close_fixture(&f);
}

XD_TEST_MAIN()
