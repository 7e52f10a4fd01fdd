/* Losses across tokenizers, for bench/gpu.cu. The CPU computes all rows: a chunk's part depends on the others. */
#ifndef XDISTILL_BENCH_GPU_XTOKEN_H
#define XDISTILL_BENCH_GPU_XTOKEN_H

#include "gpu_side.h"

/* Most ids have one partner; the other ones are spelled with a few ids. */
struct Partners {
    enum { ENTRIES = 4, PAIRS = XTOKEN_STUDENT / 20 * 17 };
    xd_ctx *ctx;
    xd_projection projection = {}, near = {};
    xd_exact_map map = {};

    explicit Partners(xd_ctx *given) : ctx(given) {
        std::vector<int32_t> ids((size_t)XTOKEN_STUDENT * ENTRIES);
        std::vector<float> weights(ids.size());
        const xd_projection_rows rows = { ids.data(), weights.data(), XTOKEN_STUDENT, ENTRIES };
        for (int64_t v = 0; v < XTOKEN_STUDENT; v++)
            for (int64_t e = 0; e < ENTRIES; e++) {
                const bool exact = v < PAIRS;
                ids[(size_t)(v * ENTRIES + e)] =
                    (int32_t)(exact && e ? -1 : (v * 7 + e * 4099) % XTOKEN_TEACHER);
                weights[(size_t)(v * ENTRIES + e)] = exact ? 1.0f : 0.25f;
            }
        const xd_exact_map_desc desc = { &rows, XTOKEN_TEACHER, false };
        require(ctx, xd_exact_map_create(ctx, &desc, &map));
        require(ctx, xd_projection_from_rows(ctx, &rows, XTOKEN_STUDENT, XTOKEN_TEACHER, &projection));
        require(ctx, xd_projection_upload(ctx, &projection, &near));
    }
    ~Partners() {
        xd_projection_unload(ctx, &near);
        xd_projection_destroy(ctx, &projection);
        xd_exact_map_destroy(ctx, &map);
    }
};

/* Four positions of five are separate chunks. */
struct Chunks {
    int64_t student[XTOKEN_ROWS], teacher[XTOKEN_ROWS], labels[XTOKEN_ROWS], teacher_labels[XTOKEN_ROWS],
        count = 0;

    Chunks() {
        for (int64_t i = 0; i < XTOKEN_ROWS; i++) {
            student[i] = i % 5 == 4 ? count - 1 : count++;
            labels[i] = i * 997 % XTOKEN_STUDENT;
            teacher_labels[i] = i * 991 % XTOKEN_TEACHER;
        }
        for (int64_t i = 0; i < XTOKEN_ROWS; i++) teacher[i] = i * count / XTOKEN_ROWS;
    }
    std::vector<int64_t> all_labels() const {
        return std::vector<int64_t>(labels, labels + XTOKEN_ROWS);
    }
};

static void finish_xtoken(const Case &c, const xd_rows &gradient, const std::vector<int64_t> &apart,
                          Operation *op) {
    op->outputs.push_back({ gradient.data, c.dtype, XTOKEN_STUDENT, apart, apart.empty() ? 0 : 1 });
    op->bytes = 2.0 * XTOKEN_ROWS * (2.0 * XTOKEN_STUDENT + XTOKEN_TEACHER);
    op->size = size_of(XTOKEN_ROWS, XTOKEN_STUDENT);
}

static void prepare_teacher(xd_xtoken_kind kind, const Case &c, Side &side, Operation *op) {
    Partners *partners = new Partners(side.ctx);
    op->own(partners, [](Partners *p) { delete p; });
    const Chunks *chunks = op->hold(Chunks());
    xd_xtoken_teacher *teacher = op->hold(xd_xtoken_teacher_defaults(kind));
    xd_xtoken_desc *d = op->hold(xd_xtoken_defaults());
    xd_xtoken_values *out = op->hold(xd_xtoken_values());
    xd_ctx *ctx = side.ctx;
    teacher->logits = side.noise_rows(XTOKEN_ROWS, XTOKEN_TEACHER, c.dtype, 8.0, 2);
    teacher->student_chunks = chunks->student;
    teacher->teacher_chunks = chunks->teacher;
    teacher->chunks = chunks->count;
    teacher->projected.projection = &partners->near;
    teacher->gold.map = &partners->map;
    d->student = side.noise_rows(XTOKEN_ROWS, XTOKEN_STUDENT, c.dtype, 8.0, 1);
    d->common.gradient = side.empty_rows(XTOKEN_ROWS, XTOKEN_STUDENT, c.dtype);
    d->common.labels.data = (void *)chunks->labels;
    d->vocab = whole_vocabulary(side, op, XTOKEN_STUDENT);
    d->teachers = teacher;
    d->teacher_count = 1;
    d->columns = d->tail = XTOKEN_COLUMNS;
    op->call = [=] { require(ctx, xd_xtoken_loss(ctx, d, out)); };
    finish_xtoken(c, d->common.gradient, chunks->all_labels(), op);
}

static void prepare_uld(const Case &c, Side &side, Operation *op) {
    const Chunks *chunks = op->hold(Chunks());
    std::vector<xd_aligned_chunk> *aligned = op->hold(std::vector<xd_aligned_chunk>());
    xd_uld_desc *d = op->hold(xd_uld_desc());
    xd_uld_values *out = op->hold(xd_uld_values());
    xd_ctx *ctx = side.ctx;
    for (int32_t t = 1; t < XTOKEN_ROWS; t++) aligned->push_back({ t, t + 1, t, t + 1, 0 });
    d->student.logits = side.noise_rows(XTOKEN_ROWS, XTOKEN_STUDENT, c.dtype, 8.0, 1);
    d->teacher.logits = side.noise_rows(XTOKEN_ROWS, XTOKEN_TEACHER, c.dtype, 8.0, 2);
    d->student.vocabulary = XTOKEN_STUDENT;
    d->teacher.vocabulary = XTOKEN_TEACHER;
    d->student.ids = chunks->labels;
    d->teacher.ids = chunks->teacher_labels;
    d->chunks = aligned->data();
    d->chunk_count = (int64_t)aligned->size();
    d->scale = 1.0;
    d->gradient = side.empty_rows(XTOKEN_ROWS, XTOKEN_STUDENT, c.dtype);
    op->call = [=] { require(ctx, xd_uld_loss(ctx, d, out)); };
    finish_xtoken(c, d->gradient, {}, op);
}

static void add_xtoken(std::vector<Case> *cases) {
    for (const xd_xtoken_kind kind : { XD_XTOKEN_PROJECTED, XD_XTOKEN_GOLD })
        cases->push_back({ kind == XD_XTOKEN_GOLD ? "gold" : "p_kl", XD_DTYPE_BF16, XTOKEN_ROWS, XTOKEN_ROWS,
                           4e-3, [=](const Case &c, Side &side, int64_t, Operation *op) {
                               prepare_teacher(kind, c, side, op);
                           } });
    cases->push_back({ "uld", XD_DTYPE_BF16, XTOKEN_ROWS, XTOKEN_ROWS, 4e-3,
                       [](const Case &c, Side &side, int64_t, Operation *op) { prepare_uld(c, side, op); } });
}

#endif
