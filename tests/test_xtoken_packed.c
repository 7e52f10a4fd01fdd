/* Packed documents and prompt masks, from the alignment to the loss: one sequence of two documents has the loss
 * and gradient of the two as sequences of their own. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "vocab_calls.h"
#include "xd_test.h"
#include "xtoken_rows.h"

enum { DOCUMENTS = 2, STUDENTS = 7, TEACHERS = 6, STUDENT_SIZE = 9, TEACHER_SIZE = 8, CHUNKS = 16 };

/* Ends of the tokens of each document, in bytes of its text; 0: no more. The first token is the prompt's. */
static const int64_t student_ends[DOCUMENTS][STUDENTS] = { { 2, 5, 7, 9, 12, 15, 0 },
                                                           { 3, 4, 6, 9, 11, 14, 17 } };
static const int64_t teacher_ends[DOCUMENTS][TEACHERS] = { { 2, 7, 9, 11, 15, 0 }, { 3, 6, 7, 9, 14, 17 } };

/* One side of a sequence. */
typedef struct tokens {
    xd_token_span spans[2 * STUDENTS];
    uint8_t mask[2 * STUDENTS], starts[2 * STUDENTS]; /* starts: 0 for the first token of a document */
    int32_t documents[2 * STUDENTS];
    int64_t count, ids[2 * STUDENTS], shifted[2 * STUDENTS];
} tokens;

static void add_document(tokens *t, const int64_t *ends, int most, int document, int64_t text, bool prompt) {
    int64_t begin = 0;
    for (int i = 0; i < most && ends[i] > 0; i++) {
        t->spans[t->count].begin = text + begin;
        t->spans[t->count].end = text + ends[i];
        t->mask[t->count] = (uint8_t)(!prompt || i > 1);
        t->starts[t->count] = (uint8_t)(i > 0);
        t->documents[t->count++] = document;
        begin = ends[i];
    }
}

static xd_align_side side_of(const tokens *t) {
    xd_align_side side;
    memset(&side, 0, sizeof side);
    side.spans = t->spans;
    side.mask = t->mask;
    side.documents = t->documents;
    side.count = t->count;
    return side;
}

/* Position i predicts token i + 1, but no first token of a document. */
static void shift(xd_ctx *ctx, tokens *t, int64_t *positions) {
    xd_shift_desc d;
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < t->count; i++) positions[i] = i;
    d.sequences = 1;
    d.length = d.held = t->count;
    d.positions = positions;
    d.ids = xd_ids_of(t->ids, XD_DTYPE_I64);
    d.mask = t->starts;
    d.has_ignore_index = true;
    d.ignore_index = -1;
    CHECK(xd_next_token_labels(ctx, &d, t->shifted) == XD_OK);
}

/* Logits belong to a token of a document, wherever it lies. */
static void fill_rows(const tokens *t, int64_t columns, double salt, float *rows) {
    for (int64_t i = 0; i < t->count; i++)
        for (int64_t v = 0; v < columns; v++)
            rows[i * columns + v] =
                (float)(2.0 * sin(salt + 0.7 * (double)(t->documents[i] * 50 + v * 9) +
                                  1.3 * (double)(t->spans[i].end - 100 * t->documents[i])));
}

/* The loss over documents [first, end) as one sequence, divided by a fixed denominator; gradients go to
 * gradient[document][token of it]. Returns its chunks that count. */
static double run(xd_ctx *ctx, int first, int end, bool prompt, double *loss,
                  float gradient[DOCUMENTS][STUDENTS][STUDENT_SIZE]) {
    tokens student, teacher;
    xd_alignment alignment;
    xd_align_report report;
    xd_projection projection;
    xd_vocab *vocab = NULL;
    xd_xtoken_teacher kd;
    xd_xtoken_desc d;
    xd_xtoken_values values;
    xd_xtoken_teacher_values teacher_values;
    int32_t ids[STUDENT_SIZE];
    float weights[STUDENT_SIZE], x[2 * STUDENTS * STUDENT_SIZE], y[2 * STUDENTS * TEACHER_SIZE];
    float g[2 * STUDENTS * STUDENT_SIZE];
    int64_t positions[2 * STUDENTS];
    uint8_t exists[CHUNKS] = { 0 };
    memset(&student, 0, sizeof student);
    memset(&teacher, 0, sizeof teacher);
    for (int i = first; i < end; i++) { /* texts lie 100 bytes apart */
        add_document(&student, student_ends[i], STUDENTS, i, 100 * i, prompt);
        add_document(&teacher, teacher_ends[i], TEACHERS, i, 100 * i, prompt);
    }
    const xd_align_side sides[2] = { side_of(&student), side_of(&teacher) };
    CHECK(xd_align_bytes(ctx, &sides[0], &sides[1], &alignment, &report) == XD_OK);
    CHECK(alignment.count <= CHUNKS && (report.masked > 0) == prompt);
    for (int64_t c = 0; c < alignment.count; c++)
        exists[c] = (uint8_t)((alignment.chunks[c].flags & XD_CHUNK_MASKED) == 0);
    xd_chunk_ids(&alignment, XD_CHUNK_STUDENT, &sides[0], student.ids, NULL);
    xd_chunk_ids(&alignment, XD_CHUNK_TEACHER, &sides[1], teacher.ids, NULL);
    xd_alignment_destroy(ctx, &alignment);
    shift(ctx, &student, positions);
    shift(ctx, &teacher, positions);
    for (int v = 0; v < STUDENT_SIZE; v++) {
        ids[v] = (int32_t)(v * 3 % TEACHER_SIZE);
        weights[v] = 1.0f;
    }
    const xd_projection_rows entries = { ids, weights, STUDENT_SIZE, 1 };
    CHECK(xd_projection_from_rows(ctx, &entries, STUDENT_SIZE, TEACHER_SIZE, &projection) == XD_OK);
    CHECK(vocab_even(ctx, NULL, STUDENT_SIZE, &vocab) == XD_OK);
    fill_rows(&student, STUDENT_SIZE, 0.1, x);
    fill_rows(&teacher, TEACHER_SIZE, 0.4, y);
    kd = xd_xtoken_teacher_defaults(XD_XTOKEN_PROJECTED);
    d = xd_xtoken_defaults();
    kd.logits = rows_of(y, teacher.count, TEACHER_SIZE);
    kd.student_chunks = student.shifted;
    kd.teacher_chunks = teacher.shifted;
    kd.chunks = CHUNKS;
    kd.chunk_mask = exists;
    kd.projected.projection = &projection;
    kd.denominator_value = 10.0;
    d.student = rows_of(x, student.count, STUDENT_SIZE);
    d.common.gradient = rows_of(g, student.count, STUDENT_SIZE);
    d.vocab = vocab;
    d.teachers = &kd;
    d.teacher_count = 1;
    d.teacher_values = &teacher_values;
    d.columns = TEACHER_SIZE; /* J is chosen for a sequence: all columns are the same for both */
    CHECK(xd_xtoken_loss(ctx, &d, &values) == XD_OK);
    *loss += values.loss;
    for (int64_t i = 0, at = 0; i < student.count; i++) {
        if (i > 0 && student.documents[i] != student.documents[i - 1]) at = i;
        memcpy(gradient[student.documents[i]][i - at], g + i * STUDENT_SIZE, STUDENT_SIZE * sizeof *g);
    }
    xd_vocab_destroy(vocab);
    xd_projection_destroy(ctx, &projection);
    return teacher_values.compared;
}

XD_TEST(packed_documents_have_the_loss_of_documents_by_themselves) {
    for (int prompt = 0; prompt < 2; prompt++) {
        static float packed[DOCUMENTS][STUDENTS][STUDENT_SIZE], alone[DOCUMENTS][STUDENTS][STUDENT_SIZE];
        double whole = 0.0, parts = 0.0, chunks = 0.0;
        xd_ctx *ctx = NULL;
        memset(packed, 0, sizeof packed);
        memset(alone, 0, sizeof alone);
        CHECK(xd_ctx_create(NULL, &ctx) == XD_OK);
        const double counted = run(ctx, 0, DOCUMENTS, prompt == 1, &whole, packed);
        for (int i = 0; i < DOCUMENTS; i++) chunks += run(ctx, i, i + 1, prompt == 1, &parts, alone);
        CHECK(counted > 0.0 && whole > 0.0);
        CHECK_NEAR(counted, chunks, 0.0);
        CHECK_NEAR(whole, parts, 1e-12);
        for (int i = 0; i < DOCUMENTS * STUDENTS * STUDENT_SIZE; i++)
            CHECK_NEAR((&packed[0][0][0])[i], (&alone[0][0][0])[i], 1e-7);
        /* No one learns the first token of the second document, or what is in the prompt. */
        for (int v = 0; v < STUDENT_SIZE; v++) {
            CHECK(packed[0][5][v] == 0.0f);
            if (prompt) CHECK(packed[0][0][v] == 0.0f && packed[1][0][v] == 0.0f);
        }
        xd_ctx_destroy(ctx);
    }
}

XD_TEST_MAIN()
