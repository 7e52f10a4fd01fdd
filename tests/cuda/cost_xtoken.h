/* Losses across tokenizers, for cost.cpp: real vocabularies, and few rows. */
#include "cost.h"

enum { XTOKEN_ROWS = 32, STUDENT = 128256, TEACHER = 151936, PAIRS = 109000, ENTRIES = 4, SELECTED = 8192 };

/* The problem that times are predicted for: its chunks, and those of a tile (src/xtoken/projected.c and gold.c). */
enum { REAL_CHUNKS = 1639, PROJECTED_TILE = (1 << 23) / SELECTED, GOLD_TILE = (1 << 27) / STUDENT };

/* Most ids have one partner; the other ones are spelled with a few ids. */
struct Partners {
    xd_projection projection = {}, near = {};
    xd_exact_map map = {};

    Partners() {
        std::vector<int32_t> ids((size_t)STUDENT * ENTRIES);
        std::vector<float> weights(ids.size());
        const xd_projection_rows rows = { ids.data(), weights.data(), STUDENT, ENTRIES };
        for (int64_t v = 0; v < STUDENT; v++)
            for (int64_t e = 0; e < ENTRIES; e++) {
                const bool exact = v < PAIRS;
                ids[(size_t)(v * ENTRIES + e)] = (int32_t)(exact && e ? -1 : (v * 7 + e * 4099) % TEACHER);
                weights[(size_t)(v * ENTRIES + e)] = exact ? 1.0f : 0.25f;
            }
        const xd_exact_map_desc desc = { &rows, TEACHER, false };
        require(xd_exact_map_create(ctx, &desc, &map));
        require(xd_projection_from_rows(ctx, &rows, STUDENT, TEACHER, &projection));
        require(xd_projection_upload(ctx, &projection, &near));
    }
    ~Partners() {
        xd_projection_unload(ctx, &near);
        xd_projection_destroy(ctx, &projection);
        xd_exact_map_destroy(ctx, &map);
    }
};

/* Four positions of five are separate chunks. */
struct Chunks {
    int64_t student[XTOKEN_ROWS], teacher[XTOKEN_ROWS], labels[XTOKEN_ROWS], count = 0;

    Chunks() {
        for (int64_t i = 0; i < XTOKEN_ROWS; i++) {
            student[i] = i % 5 == 4 ? count - 1 : count++;
            labels[i] = i * 997 % STUDENT;
        }
        for (int64_t i = 0; i < XTOKEN_ROWS; i++) teacher[i] = i * count / XTOKEN_ROWS;
    }
};

/* Elements are the student's logits; the teacher's are read beside them. */
static void measure_teacher(const char *name, xd_xtoken_kind kind, const Partners &partners) {
    if (!is_wanted(name)) return;
    const Chunks chunks;
    xd_vocab *vocab = whole_vocabulary(STUDENT);
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(kind);
    xd_xtoken_desc d = xd_xtoken_defaults();
    xd_xtoken_values out;
    teacher.logits = noise_rows(XTOKEN_ROWS, TEACHER, XD_DTYPE_BF16, 3.0);
    teacher.student_chunks = chunks.student;
    teacher.teacher_chunks = chunks.teacher;
    teacher.chunks = chunks.count;
    teacher.projected.projection = &partners.near;
    teacher.gold.map = &partners.map;
    d.student = noise_rows(XTOKEN_ROWS, STUDENT, XD_DTYPE_BF16, 3.0);
    d.common.gradient = empty_rows(XTOKEN_ROWS, STUDENT, XD_DTYPE_BF16);
    d.common.labels.data = (void *)chunks.labels;
    d.vocab = vocab;
    d.teachers = &teacher;
    d.teacher_count = 1;
    d.columns = d.tail = SELECTED;
    const auto call = [&] { require(xd_xtoken_loss(ctx, &d, &out)); };
    call();
    const long tile = kind == XD_XTOKEN_GOLD ? GOLD_TILE : PROJECTED_TILE, one = launches_of(call);
    d.tile = (chunks.count + 1) / 2;
    const long another = launches_of(call) - one; /* of a second tile */
    d.tile = 0;
    measure({ name, XD_DTYPE_BF16, (double)XTOKEN_ROWS * STUDENT, 2.0 * (2.0 + (double)TEACHER / STUDENT) }, call,
            (REAL_CHUNKS + tile - 1) / tile * another - another);
    release(vocab);
}

static void measure_uld() {
    if (!is_wanted("uld")) return;
    const Chunks chunks;
    std::vector<xd_aligned_chunk> aligned;
    std::vector<int64_t> teacher_ids;
    xd_uld_desc d = {};
    xd_uld_values out;
    for (int32_t t = 1; t < XTOKEN_ROWS; t++) aligned.push_back({ t, t + 1, t, t + 1, 0 });
    for (int64_t t = 0; t < XTOKEN_ROWS; t++) teacher_ids.push_back(t * 991 % TEACHER);
    d.student.logits = noise_rows(XTOKEN_ROWS, STUDENT, XD_DTYPE_BF16, 3.0);
    d.teacher.logits = noise_rows(XTOKEN_ROWS, TEACHER, XD_DTYPE_BF16, 3.0);
    d.student.vocabulary = STUDENT;
    d.teacher.vocabulary = TEACHER;
    d.student.ids = chunks.labels;
    d.teacher.ids = teacher_ids.data();
    d.chunks = aligned.data();
    d.chunk_count = (int64_t)aligned.size();
    d.scale = 1.0;
    d.gradient = empty_rows(XTOKEN_ROWS, STUDENT, XD_DTYPE_BF16);
    measure({ "uld", XD_DTYPE_BF16, (double)XTOKEN_ROWS * STUDENT, 2.0 * (2.0 + (double)TEACHER / STUDENT) },
            [&] { require(xd_uld_loss(ctx, &d, &out)); });
    release(nullptr);
}

static void measure_xtoken() {
    const Partners partners;
    measure_teacher("p_kl", XD_XTOKEN_PROJECTED, partners);
    measure_teacher("gold", XD_XTOKEN_GOLD, partners);
    measure_uld();
}
