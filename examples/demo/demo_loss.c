/* demo_loss.c - a step's rows, and what each arm makes of them. */
#include "demo_rank.h"

#include <string.h>

/* ---- the batch ---- */

/* The teacher's side of one row; what lies past the end of its text is never in a chunk. */
static void demo_read_teacher(demo_rank *r, int64_t start, int64_t at) {
    const demo_bridge *bridge = r->job->bridge;
    const demo_window window = demo_bridge_window(bridge, start);
    int64_t chunks[DEMO_ROW], heads[DEMO_ROW], teacher_chunks[DEMO_ROW], teacher_heads[DEMO_ROW];
    demo_bridge_chunks(bridge, &window, XD_CHUNK_STUDENT, chunks, heads);
    demo_bridge_chunks(bridge, &window, XD_CHUNK_TEACHER, teacher_chunks, teacher_heads);
    for (int i = 0; i < r->batch.positions; i++, at++) {
        const int position = r->position[i];
        const int64_t place = window.teacher_start + position;
        const bool inside = place + 1 < bridge->teacher->count;
        r->teacher_ids[at] = inside ? bridge->teacher->ids[place] : 0;
        r->teacher_labels[at] = inside ? bridge->teacher->ids[place + 1] : XD_IGNORE_INDEX;
        r->chunks[at] = chunks[position];
        r->heads[at] = heads[position];
        r->teacher_chunks[at] = teacher_chunks[position];
        r->teacher_heads[at] = teacher_heads[position];
    }
}

/* What was recorded at the positions of one row; each is a chunk of its own. */
static void demo_read_record(demo_rank *r, int64_t start, int64_t at) {
    for (int i = 0; i < r->batch.positions; i++, at++) {
        r->places[at] = r->job->record->places[start + r->position[i] + 1];
        r->place_chunks[at] = r->places[at] < 0 ? -1 : r->position[i];
    }
}

void demo_read_batch(demo_rank *r, double share, uint64_t seed, int step) {
    const demo_text *text = r->job->text;
    int64_t at = 0;
    for (int s = 0; s < r->batch.sequences; s++) {
        const int64_t start = demo_row_start(text, share, seed, step, (int)r->sequences[s]);
        if (r->asks_teacher) demo_read_teacher(r, start, at);
        if (r->job->record) demo_read_record(r, start, at);
        for (int i = 0; i < r->batch.positions; i++, at++) {
            r->ids[at] = text->ids[start + r->position[i]];
            r->labels[at] = text->ids[start + r->position[i] + 1];
        }
    }
}

/* ---- the teacher's rows ---- */

/* Puts what the ranks of tp hold of `rows` rows side by side. */
static void demo_place_columns(const demo_rank *r, const float *gathered, const int64_t *counts, int64_t rows,
                               float *whole) {
    const int vocab = r->teacher.config.vocab;
    for (int rank = 0, begin = 0; rank < xd_comm_size(r->tp); rank++) {
        const int cols = (int)(counts[rank] / rows);
        for (int64_t row = 0; row < rows; row++, gathered += cols)
            memcpy(whole + row * vocab + begin, gathered, (size_t)cols * sizeof *whole);
        begin += cols;
    }
}

/* A sequence at a time, so that the buffer of the exchange stays small. */
xd_result demo_complete_teacher(demo_rank *r) {
    const int64_t rows = r->batch.positions, vocab = r->teacher.config.vocab;
    int64_t counts[NN_MOST_RANKS];
    if (!r->tp) return XD_OK;
    for (int rank = 0; rank < xd_comm_size(r->tp); rank++) counts[rank] = 0;
    counts[r->tp_rank] = rows * r->teacher.share.vocab_count;
    XD_TRY(xd_all_reduce(r->tp, counts, counts, xd_comm_size(r->tp), XD_DTYPE_I64, XD_SUM));
    for (int s = 0; s < r->batch.sequences; s++) {
        const float *own = r->teacher_logits.own + s * counts[r->tp_rank];
        XD_TRY(xd_all_gather(r->tp, own, r->exchange, counts, XD_DTYPE_F32));
        demo_place_columns(r, r->exchange, counts, rows, r->teacher_logits.whole + s * rows * vocab);
    }
    return XD_OK;
}

/* ---- losses ---- */

/* What a loss is of: all sequences of this rank, or one of them. */
typedef struct demo_extent {
    int first, count; /* sequences */
    float *logits;    /* [rows, own columns] the student's */
    xd_comm *comm;    /* over which values are sums; NULL -> of these rows */
    double chunks;    /* the divisor of the teacher's term; 0 -> the chunks that are counted over comm */
} demo_extent;

static demo_extent demo_all_of(const demo_rank *r) {
    const demo_extent all = { 0, r->batch.sequences, r->logits.own, r->rows, 0.0 };
    return all;
}

/* The first of its rows among those of the rank. */
static int64_t demo_first_row(const demo_rank *r, const demo_extent *of) {
    return (int64_t)of->first * r->batch.positions;
}

static xd_rows demo_rows(const demo_rank *r, const demo_extent *of, float *data, int64_t cols) {
    xd_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.data = data;
    rows.dtype = XD_DTYPE_F32;
    rows.rows = (int64_t)of->count * r->batch.positions;
    rows.cols = cols;
    return rows;
}

/* From the text alone. */
static xd_loss_desc demo_text_loss(const demo_rank *r, const demo_extent *of) {
    xd_loss_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.student = demo_rows(r, of, of->logits, r->model.share.vocab_count);
    desc.common.gradient = desc.student;
    desc.common.labels.data = r->labels + demo_first_row(r, of);
    desc.vocab = r->logits.vocab;
    desc.common.denominator_value = (double)DEMO_BATCH * DEMO_ROW;
    desc.hard_weight = 1.0;
    desc.common.comm = of->comm;
    desc.common.workspace = r->loss_workspace;
    desc.common.workspace_bytes = r->loss_workspace_bytes;
    return desc;
}

static xd_xtoken_kind demo_kind_of(demo_signal signal) {
    switch (signal) {
    case DEMO_PROJECTED: return XD_XTOKEN_PROJECTED;
    case DEMO_LIKELIHOOD: return XD_XTOKEN_LIKELIHOOD;
    default: return XD_XTOKEN_GOLD;
    }
}

/* Likelihoods are those of whole chunks; distributions are compared where chunks begin. */
static xd_xtoken_teacher demo_teacher_of(const demo_rank *r, const demo_arm *arm, const demo_extent *of) {
    const bool whole = arm->signal == DEMO_LIKELIHOOD;
    const int64_t vocab = r->teacher.config.vocab, row = demo_first_row(r, of);
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(demo_kind_of(arm->signal));
    teacher.logits =
        demo_rows(r, of, r->teacher_logits.whole ? r->teacher_logits.whole + row * vocab : NULL, vocab);
    teacher.labels.data = r->teacher_labels + row;
    teacher.student_chunks = (whole ? r->chunks : r->heads) + row;
    teacher.teacher_chunks = (whole ? r->teacher_chunks : r->teacher_heads) + row;
    teacher.denominator_value = of->chunks;
    teacher.chunks = DEMO_ROW; /* of a row, at most; the numbers behind its last have no tokens */
    teacher.projected.projection = &r->job->bridge->projection;
    teacher.gold.map = arm->signal == DEMO_HYBRID ? &r->job->bridge->relaxed : &r->job->bridge->strict;
    teacher.likelihood.form = XD_LIKELIHOOD_KL;
    return teacher;
}

static xd_xtoken_teacher demo_recorded_teacher(const demo_rank *r, const demo_extent *of) {
    const int64_t row = demo_first_row(r, of);
    xd_xtoken_teacher teacher = xd_xtoken_teacher_defaults(XD_XTOKEN_CACHED);
    teacher.logits.rows = (int64_t)of->count * r->batch.positions;
    teacher.student_chunks = teacher.teacher_chunks = r->place_chunks + row;
    teacher.denominator_value = of->chunks;
    teacher.chunks = DEMO_ROW;
    teacher.cached.projection = &r->job->record->projection;
    teacher.cached.cache = r->job->record->cache;
    teacher.cached.positions = r->places + row;
    return teacher;
}

static xd_xtoken_teacher demo_arm_teacher(const demo_rank *r, const demo_arm *arm, const demo_extent *of) {
    return arm->signal == DEMO_RECORDED ? demo_recorded_teacher(r, of) : demo_teacher_of(r, arm, of);
}

/* From the teacher across tokenizers, and from the text, which counts fully where the teacher says nothing:
 * inside of its tokens. */
static xd_xtoken_desc demo_cross_loss(demo_rank *r, const demo_arm *arm, const demo_extent *of,
                                      const xd_xtoken_teacher *teacher) {
    const int64_t row = demo_first_row(r, of);
    xd_xtoken_desc desc = xd_xtoken_defaults();
    desc.student = demo_rows(r, of, of->logits, r->model.share.vocab_count);
    desc.common.gradient = desc.student;
    desc.vocab = r->logits.vocab;
    desc.sequences = of->count;
    desc.sequence_comm = r->cp;
    desc.common.comm = of->comm;
    desc.common.labels.data = r->labels + row;
    desc.common.row_weight = r->row_weight + row;
    desc.common.denominator_value = (double)DEMO_BATCH * DEMO_ROW;
    desc.teachers = teacher;
    desc.teacher_count = 1;
    desc.temperature = arm->temperature;
    desc.kd_weight = arm->kd_weight;
    desc.ce_weight = 1.0;
    desc.common.workspace = r->loss_workspace;
    desc.common.workspace_bytes = r->loss_workspace_bytes;
    for (int64_t i = 0; i < desc.student.rows; i++)
        r->row_weight[row + i] = teacher->student_chunks[i] < 0 ? 1.0f : (float)arm->ce_weight;
    return desc;
}

xd_result demo_make_loss_workspace(demo_rank *r) {
    bool failed = false;
    demo_extent all = demo_all_of(r);
    if (!all.logits)
        all.logits = r->row_weight; /* a pipeline has others: in a plan any address stands for an array */
    const xd_loss_desc text = demo_text_loss(r, &all);
    xd_loss_values text_values;
    xd_xtoken_values values;
    xd_planned planned;
    if (r->asks_nobody) return XD_OK;
    XD_TRY(xd_plan_begin(r->ctx, NULL));
    XD_TRY(xd_loss(r->ctx, &text, &text_values));
    for (int i = 0; i < r->job->arm_count; i++) {
        const demo_arm *arm = &r->job->arms[i];
        if (arm->signal == DEMO_TEXT_ALONE) continue;
        xd_xtoken_teacher teacher = demo_arm_teacher(r, arm, &all);
        if (arm->signal != DEMO_RECORDED && !teacher.logits.data) teacher.logits.data = r->row_weight;
        const xd_xtoken_desc desc = demo_cross_loss(r, arm, &all, &teacher);
        XD_TRY(xd_xtoken_loss(r->ctx, &desc, &values));
    }
    XD_TRY(xd_plan_end(r->ctx, &planned));
    r->loss_workspace_bytes = planned.workspace;
    r->loss_workspace = demo_room(r, (int64_t)r->loss_workspace_bytes, 1, &failed);
    return failed ? XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for the loss") : XD_OK;
}

/* The cross entropy of all tokens alike, by which arms are compared, and the gradient when there is one. */
static xd_result demo_learn_from_text(demo_rank *r, const demo_extent *of, bool gradient,
                                      demo_leaf_loss *out) {
    xd_loss_values values;
    xd_loss_desc desc = demo_text_loss(r, of);
    if (!gradient) memset(&desc.common.gradient, 0, sizeof desc.common.gradient);
    XD_TRY(xd_loss(r->ctx, &desc, &values));
    out->loss = out->hard = values.hard;
    out->soft = 0.0;
    return XD_OK;
}

static xd_result demo_learn_across(demo_rank *r, const demo_arm *arm, const demo_extent *of,
                                   demo_leaf_loss *out) {
    xd_xtoken_values values;
    const xd_xtoken_teacher teacher = demo_arm_teacher(r, arm, of);
    const xd_xtoken_desc desc = demo_cross_loss(r, arm, of, &teacher);
    XD_TRY(demo_learn_from_text(r, of, false, out));
    XD_TRY(xd_xtoken_loss(r->ctx, &desc, &values));
    out->loss = values.loss;
    out->soft = values.kd;
    return XD_OK;
}

static xd_result demo_learn(demo_rank *r, const demo_arm *arm, const demo_extent *of, demo_leaf_loss *out) {
    return arm->signal == DEMO_TEXT_ALONE ? demo_learn_from_text(r, of, true, out)
                                          : demo_learn_across(r, arm, of, out);
}

/* ---- losses of single sequences ---- */

xd_result demo_leaf_learn(demo_rank *r, const demo_arm *arm, int k, double chunks, float *logits,
                          demo_leaf_loss *out) {
    const demo_extent leaf = { k, 1, logits, NULL, chunks };
    return demo_learn(r, arm, &leaf, out);
}

/* Those of one sequence that have tokens on both sides. */
static int64_t demo_chunks_of(const demo_rank *r, const xd_xtoken_teacher *teacher, int64_t row) {
    bool student[DEMO_ROW], other[DEMO_ROW];
    int64_t count = 0;
    memset(student, 0, sizeof student);
    memset(other, 0, sizeof other);
    for (int64_t i = row; i < row + r->batch.positions; i++) {
        if (teacher->student_chunks[i] >= 0) student[teacher->student_chunks[i]] = true;
        if (teacher->teacher_chunks[i] >= 0) other[teacher->teacher_chunks[i]] = true;
    }
    for (int c = 0; c < DEMO_ROW; c++) count += student[c] && other[c];
    return count;
}

xd_result demo_count_chunks(demo_rank *r, const demo_arm *arm, double *chunks) {
    const demo_extent all = demo_all_of(r);
    const xd_xtoken_teacher teacher = demo_arm_teacher(r, arm, &all);
    int64_t count = 0;
    *chunks = 0.0;
    if (arm->signal == DEMO_TEXT_ALONE) return XD_OK;
    for (int s = 0; s < r->batch.sequences; s++)
        count += demo_chunks_of(r, &teacher, (int64_t)s * r->batch.positions);
    if (r->rows) XD_TRY(xd_all_reduce(r->rows, &count, &count, 1, XD_DTYPE_I64, XD_SUM));
    *chunks = count > 0 ? (double)count : 1.0; /* 0 would count again */
    return XD_OK;
}

xd_result demo_sum_leaves(demo_rank *r, const demo_leaf_loss *own, demo_step *out) {
    demo_leaf_loss all[DEMO_BATCH];
    int64_t bits[DEMO_BATCH * (sizeof *all / sizeof(int64_t))]; /* of one rank, and zero of the others */
    memset(all, 0, sizeof all);
    for (int s = 0; s < r->batch.sequences; s++) all[r->sequences[s]] = own[s];
    memcpy(bits, all, sizeof all);
    if (r->rows) XD_TRY(xd_all_reduce(r->rows, bits, bits, sizeof bits / sizeof *bits, XD_DTYPE_I64, XD_SUM));
    memcpy(all, bits, sizeof all);
    out->loss = out->hard = out->soft = 0.0;
    for (int s = 0; s < DEMO_BATCH; s++) {
        out->loss += all[s].loss;
        out->hard += all[s].hard;
        out->soft += all[s].soft;
    }
    return XD_OK;
}

static xd_result demo_leaves_loss(demo_rank *r, const demo_arm *arm, demo_step *out) {
    const int64_t each = (int64_t)r->batch.positions * r->model.share.vocab_count;
    demo_leaf_loss own[DEMO_BATCH];
    double chunks = 0.0;
    XD_TRY(demo_count_chunks(r, arm, &chunks));
    for (int s = 0; s < r->batch.sequences; s++)
        XD_TRY(demo_leaf_learn(r, arm, s, chunks, r->logits.own + s * each, &own[s]));
    return demo_sum_leaves(r, own, out);
}

xd_result demo_arm_loss(demo_rank *r, const demo_arm *arm, demo_step *out) {
    const demo_extent all = demo_all_of(r);
    demo_leaf_loss sum;
    if (r->job->by_leaf) return demo_leaves_loss(r, arm, out);
    XD_TRY(demo_learn(r, arm, &all, &sum));
    out->loss = sum.loss;
    out->hard = sum.hard;
    out->soft = sum.soft;
    return XD_OK;
}
