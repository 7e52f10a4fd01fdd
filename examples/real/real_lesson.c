/* real_lesson.c - what each rank of a training run does.
 *
 * The text is aligned once, as a whole. A row is REAL_ROW student tokens from a random place; its chunks are
 * those that lie inside it. Of a chunk its first tokens count: there both models have read the same text and
 * say what comes next, and where a student's token begins is what the counted projection knows of it. Live,
 * the teacher reads its part of the row alone; a cache has read what stands before, too. */
#include "real_lesson.h"

#include <math.h>
#include <string.h>

/* ---- alignment ---- */

xd_result real_lesson_align(xd_ctx *ctx, real_lesson *lesson, xd_align_report *report) {
    xd_align_side student, teacher;
    bool failed = false;
    memset(&student, 0, sizeof student);
    memset(&teacher, 0, sizeof teacher);
    student.spans = lesson->text->spans;
    student.count = lesson->text->count;
    teacher.spans = lesson->spans;
    teacher.count = lesson->teacher_count;
    XD_TRY(xd_align_bytes(ctx, &student, &teacher, &lesson->chunks, report));
    lesson->chunk_of = (int32_t *)real_room(ctx, student.count, sizeof *lesson->chunk_of, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)student.count);
    for (int64_t c = 0; c < lesson->chunks.count; c++) {
        const xd_aligned_chunk *chunk = &lesson->chunks.chunks[c];
        for (int32_t i = chunk->student_begin; i < chunk->student_end; i++) lesson->chunk_of[i] = (int32_t)c;
    }
    return XD_OK;
}

xd_result real_lesson_project(xd_ctx *ctx, const real_lesson *lesson, int64_t student_size,
                              int64_t teacher_size, xd_projection *out) {
    xd_votes *votes = NULL;
    xd_projection_rows rows;
    xd_projection_rows_desc desc;
    memset(&rows, 0, sizeof rows);
    memset(&desc, 0, sizeof desc);
    desc.k = REAL_MOST_ENTRIES;
    XD_TRY(xd_votes_create(ctx, &(xd_votes_desc){ student_size, teacher_size }, &votes));
    xd_result result = XD_OK;
    for (int64_t c = 0; c < lesson->chunks.count && result == XD_OK; c++) {
        const xd_aligned_chunk *chunk = &lesson->chunks.chunks[c];
        if (chunk->student_begin == chunk->student_end || chunk->teacher_begin == chunk->teacher_end)
            continue;
        result = xd_votes_add(votes, lesson->text->ids[chunk->student_begin],
                              lesson->teacher_ids[chunk->teacher_begin], 1.0);
    }
    if (result == XD_OK) result = xd_projection_rows_from_votes(votes, &desc, &rows);
    if (result == XD_OK) result = xd_projection_from_rows(ctx, &rows, student_size, teacher_size, out);
    xd_projection_rows_destroy(ctx, &rows);
    xd_votes_destroy(votes);
    return result;
}

void real_lesson_free(xd_ctx *ctx, real_lesson *lesson) {
    xd_alignment_destroy(ctx, &lesson->chunks);
    xd_release(ctx, lesson->chunk_of);
    lesson->chunk_of = NULL;
}

/* ---- a rank ---- */

typedef struct real_pupil {
    real_lesson *lesson;
    xd_ctx *ctx;
    xd_comm *world;
    xd_comm *rows;  /* ranks with other rows, or NULL */
    xd_comm *vocab; /* ranks with other columns, or NULL */
    nn_model model;
    nn_batch batch;
    int first_row;
    xd_vocab *columns;
    xd_param *params;
    xd_optimizer *optimizer;
    float *weights, *gradient, *workspace, *logits;
    int32_t *ids;
    int64_t *labels, *student_chunks;          /* [rows, REAL_ROW] */
    int64_t *teacher_chunks, *cache_positions; /* [rows, REAL_TEACHER_ROW] */
    uint8_t *chunk_mask;                       /* [rows, REAL_ROW]: a row has at most as many chunks */
    real_runner teacher;                       /* REAL_LIVE */
    float *teacher_logits;                     /* [rows, REAL_TEACHER_ROW, vocabulary] */
    void *loss_workspace;
    size_t loss_bytes;
} real_pupil;

/* A repeatable number in [0, 1) for (seed, step, row). */
static double real_draw(uint64_t seed, int step, int row) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + (uint64_t)step * 1000003u + (uint64_t)row;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
}

static xd_result real_pupil_rooms(real_pupil *p) {
    const real_lesson *lesson = p->lesson;
    bool failed = false;
    const int64_t rows = p->batch.sequences, held = rows * REAL_ROW, beside = rows * REAL_TEACHER_ROW;
    p->weights = (float *)real_room(p->ctx, p->model.float_count, sizeof(float), &failed);
    p->gradient = (float *)real_room(p->ctx, p->model.float_count, sizeof(float), &failed);
    p->params = (xd_param *)real_room(p->ctx, p->model.param_count, sizeof *p->params, &failed);
    p->workspace =
        (float *)real_room(p->ctx, nn_workspace_floats(&p->model, &p->batch, true), sizeof(float), &failed);
    p->logits = (float *)real_room(p->ctx, held * p->model.share.vocab_count, sizeof(float), &failed);
    p->ids = (int32_t *)real_room(p->ctx, held, sizeof(int32_t), &failed);
    p->labels = (int64_t *)real_room(p->ctx, held, sizeof(int64_t), &failed);
    p->student_chunks = (int64_t *)real_room(p->ctx, held, sizeof(int64_t), &failed);
    p->teacher_chunks = (int64_t *)real_room(p->ctx, beside, sizeof(int64_t), &failed);
    p->cache_positions = (int64_t *)real_room(p->ctx, beside, sizeof(int64_t), &failed);
    p->chunk_mask = (uint8_t *)real_room(p->ctx, held, 1, &failed);
    if (lesson->source == REAL_LIVE)
        p->teacher_logits =
            (float *)real_room(p->ctx, beside * lesson->teacher.vocab, sizeof(float), &failed);
    XD_REQUIRE(p->ctx, !failed, XD_ERROR_MEMORY, "no room for %lld rows", (long long)rows);
    p->batch.ids = p->ids;
    return XD_OK;
}

static void real_list_params(real_pupil *p) {
    for (int i = 0; i < p->model.param_count; i++) {
        const nn_param *from = &p->model.params[i];
        xd_param *to = &p->params[i];
        to->name = from->name;
        to->value = p->weights + from->offset;
        to->gradient = p->gradient + from->offset;
        to->dtype = XD_DTYPE_F32;
        to->count = nn_param_count(from);
        to->no_decay = !nn_param_decays(from);
        to->replica = p->vocab && from->dims == 1 && xd_comm_rank(p->vocab) > 0;
    }
}

static xd_result real_pupil_create(real_pupil *p) {
    const real_lesson *lesson = p->lesson;
    const int ranks = xd_comm_size(p->world), rank = xd_comm_rank(p->world);
    const nn_group tp = real_group(p->vocab);
    xd_optimizer_desc desc;
    const char *problem = nn_model_init(&lesson->student, &tp, NULL, &p->model);
    XD_REQUIRE(p->ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    p->first_row = p->rows ? lesson->rows * rank / ranks : 0;
    p->batch.sequences = p->rows ? lesson->rows * (rank + 1) / ranks - p->first_row : lesson->rows;
    p->batch.positions = REAL_ROW;
    XD_TRY(real_pupil_rooms(p));
    nn_model_randomize(&p->model, lesson->seed, p->weights);
    real_list_params(p);
    desc = xd_adamw_defaults(p->params, p->model.param_count);
    desc.beta2 = 0.95;
    desc.weight_decay = 0.1;
    XD_TRY(xd_optimizer_create(p->ctx, &desc, &p->optimizer));
    if (lesson->source != REAL_LIVE) return XD_OK;
    return real_runner_create(p->ctx, &lesson->teacher, REAL_TEACHER_ROW, &p->teacher);
}

static void real_pupil_free(real_pupil *p) {
    void *rooms[] = { p->weights,         p->gradient,       p->params,
                      p->workspace,       p->logits,         p->ids,
                      p->labels,          p->student_chunks, p->teacher_chunks,
                      p->cache_positions, p->chunk_mask,     p->teacher_logits,
                      p->loss_workspace };
    xd_optimizer_destroy(p->optimizer);
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) xd_release(p->ctx, rooms[i]);
    real_runner_free(p->ctx, &p->teacher);
    xd_vocab_destroy(p->columns);
    nn_model_free(&p->model);
}

/* ---- a batch ---- */

/* The chunks of row `row`, which begins at student token `start`: the positions that predict their first
 * tokens, on both sides. Returns how many positions of the teacher's that takes, from token *from on. */
static int real_row_chunks(real_pupil *p, int row, int64_t start, int64_t *from) {
    const real_lesson *lesson = p->lesson;
    const xd_aligned_chunk *chunks = lesson->chunks.chunks;
    int64_t *student = p->student_chunks + (int64_t)row * REAL_ROW;
    int64_t *teacher = p->teacher_chunks + (int64_t)row * REAL_TEACHER_ROW;
    int64_t *places = p->cache_positions + (int64_t)row * REAL_TEACHER_ROW;
    uint8_t *mask = p->chunk_mask + (int64_t)row * REAL_ROW;
    int held = 0;
    memset(mask, 0, REAL_ROW);
    for (int i = 0; i < REAL_ROW; i++) student[i] = -1;
    for (int i = 0; i < REAL_TEACHER_ROW; i++) teacher[i] = places[i] = -1;
    /* Position i of the row predicts token start + 1 + i. */
    const int64_t last = start + REAL_ROW;
    int64_t c = lesson->chunk_of[start] + 1;
    if (c >= lesson->chunks.count) return 0;
    *from = chunks[c].teacher_begin - 1;
    for (int64_t n = 0; c < lesson->chunks.count && chunks[c].student_end <= last + 1 && n < REAL_ROW;
         c++, n++) {
        if (chunks[c].teacher_begin - *from > REAL_TEACHER_ROW) break;
        if (chunks[c].student_begin == chunks[c].student_end ||
            chunks[c].teacher_begin == chunks[c].teacher_end)
            continue;
        student[chunks[c].student_begin - start - 1] = n;
        teacher[chunks[c].teacher_begin - 1 - *from] = n;
        places[chunks[c].teacher_begin - 1 - *from] = chunks[c].teacher_begin - 1;
        mask[n] = 1;
        held = (int)(chunks[c].teacher_begin - *from);
    }
    return held;
}

static xd_result real_read_batch(real_pupil *p, int step) {
    const real_lesson *lesson = p->lesson;
    const int64_t places = lesson->text->count - REAL_ROW - 1;
    for (int row = 0; row < p->batch.sequences; row++) {
        const double drawn = real_draw(lesson->seed, step, p->first_row + row);
        const int64_t start = 1 + (int64_t)(drawn * (double)(places - 1));
        int64_t from = 0;
        for (int i = 0; i < REAL_ROW; i++) {
            p->ids[row * REAL_ROW + i] = lesson->text->ids[start + i];
            p->labels[row * REAL_ROW + i] = lesson->text->ids[start + i + 1];
        }
        if (lesson->source == REAL_ALONE) continue;
        const int held = real_row_chunks(p, row, start, &from);
        if (lesson->source != REAL_LIVE || held == 0) continue;
        XD_TRY(real_runner_forward(&p->teacher, lesson->teacher_weights, lesson->teacher_ids + from, held));
        memcpy(p->teacher_logits + (int64_t)row * REAL_TEACHER_ROW * lesson->teacher.vocab, p->teacher.logits,
               (size_t)held * (size_t)lesson->teacher.vocab * sizeof(float));
    }
    return XD_OK;
}

/* ---- losses ---- */

static xd_rows real_rows(float *data, int64_t rows, int64_t cols) {
    xd_rows r;
    memset(&r, 0, sizeof r);
    r.data = data;
    r.dtype = XD_DTYPE_F32;
    r.rows = rows;
    r.cols = cols;
    return r;
}

/* Ends the plan of one loss, and makes its workspace when it is first needed. */
static xd_result real_loss_room(real_pupil *p) {
    xd_planned planned;
    XD_TRY(xd_plan_end(p->ctx, &planned));
    const size_t bytes = planned.workspace;
    if (bytes <= p->loss_bytes) return XD_OK;
    xd_release(p->ctx, p->loss_workspace);
    p->loss_workspace = xd_allocate(p->ctx, bytes);
    p->loss_bytes = p->loss_workspace ? bytes : 0;
    XD_REQUIRE(p->ctx, p->loss_workspace, XD_ERROR_MEMORY, "no room for a loss's %zu bytes", bytes);
    return XD_OK;
}

/* Cross entropy over the rows; `gradient` -> into the logits. */
static xd_result real_text_loss(real_pupil *p, double tokens, bool gradient, double *loss) {
    xd_loss_desc desc;
    xd_loss_values values;
    memset(&desc, 0, sizeof desc);
    desc.student = real_rows(p->logits, (int64_t)p->batch.sequences * REAL_ROW, p->model.share.vocab_count);
    desc.common.labels.data = p->labels;
    desc.vocab = p->columns;
    desc.hard_weight = 1.0;
    desc.common.comm = p->rows;
    desc.common.denominator_value = tokens;
    if (gradient) desc.common.gradient = desc.student;
    XD_TRY(xd_plan_begin(p->ctx, NULL));
    XD_TRY(xd_loss(p->ctx, &desc, &values));
    XD_TRY(real_loss_room(p));
    desc.common.workspace = p->loss_workspace;
    desc.common.workspace_bytes = p->loss_bytes;
    XD_TRY(xd_loss(p->ctx, &desc, &values));
    *loss = values.hard;
    return XD_OK;
}

static xd_result real_teacher_loss(real_pupil *p, xd_xtoken_values *values) {
    const real_lesson *lesson = p->lesson;
    const int64_t rows = p->batch.sequences;
    xd_xtoken_teacher teacher;
    xd_xtoken_desc desc;
    teacher =
        xd_xtoken_teacher_defaults(lesson->source == REAL_LIVE ? XD_XTOKEN_PROJECTED : XD_XTOKEN_CACHED);
    desc = xd_xtoken_defaults();
    teacher.logits = real_rows(p->teacher_logits, rows * REAL_TEACHER_ROW,
                               lesson->source == REAL_LIVE ? lesson->teacher.vocab : 0);
    teacher.student_chunks = p->student_chunks;
    teacher.teacher_chunks = p->teacher_chunks;
    teacher.chunks = REAL_ROW;
    teacher.chunk_mask = p->chunk_mask;
    teacher.projected.projection = teacher.cached.projection = lesson->projection;
    teacher.cached.cache = lesson->cache;
    teacher.cached.positions = p->cache_positions;
    desc.student = real_rows(p->logits, rows * REAL_ROW, p->model.share.vocab_count);
    desc.vocab = p->columns;
    desc.sequences = rows;
    desc.common.comm = p->rows;
    desc.common.labels.data = p->labels;
    desc.teachers = &teacher;
    desc.teacher_count = 1;
    if (lesson->columns) desc.columns = lesson->columns;
    desc.kd_weight = 0.5;
    desc.ce_weight = 0.5;
    desc.common.gradient = desc.student;
    XD_TRY(xd_plan_begin(p->ctx, NULL));
    XD_TRY(xd_xtoken_loss(p->ctx, &desc, values));
    XD_TRY(real_loss_room(p));
    desc.common.workspace = p->loss_workspace;
    desc.common.workspace_bytes = p->loss_bytes;
    return xd_xtoken_loss(p->ctx, &desc, values);
}

/* ---- training ---- */

/* Warm-up over the first fifteenth, then a cosine down to a twentieth. */
static double real_learning_rate(int step, int steps) {
    const double peak = 3e-3;
    const int warm = steps / 15 > 0 ? steps / 15 : 1;
    if (step < warm) return peak * (step + 1) / warm;
    return peak * (0.05 + 0.475 * (1.0 + cos(3.14159265358979 * (step - warm) / (steps - warm))));
}

static xd_result real_update(real_pupil *p, int step) {
    xd_gradient_norm norm;
    xd_gradient_norm_desc clip;
    xd_optimizer_step_desc desc;
    memset(&clip, 0, sizeof clip);
    memset(&desc, 0, sizeof desc);
    if (p->rows)
        XD_TRY(xd_all_reduce(p->rows, p->gradient, p->gradient, p->model.float_count, XD_DTYPE_F32, XD_SUM));
    clip.params = p->params;
    clip.param_count = p->model.param_count;
    clip.max_norm = 1.0;
    XD_TRY(xd_gradient_norm_compute(p->ctx, p->vocab, &clip, &norm));
    XD_TRY(xd_optimizer_set_learning_rate(p->optimizer, real_learning_rate(step, p->lesson->steps)));
    desc.gradient_scale = &norm.coefficient;
    return xd_optimizer_step(p->optimizer, &desc, NULL);
}

static xd_result real_step(real_pupil *p, int step, xd_xtoken_values *values) {
    XD_TRY(real_read_batch(p, step));
    XD_TRY((xd_result)nn_forward(&p->model, p->weights, &p->batch, true, p->workspace, p->logits));
    memset(values, 0, sizeof *values);
    if (p->lesson->source == REAL_ALONE) {
        XD_TRY(real_text_loss(p, (double)p->lesson->rows * REAL_ROW, true, &values->ce));
        values->loss = values->ce;
    } else {
        XD_TRY(real_teacher_loss(p, values));
    }
    memset(p->gradient, 0, (size_t)p->model.float_count * sizeof *p->gradient);
    XD_TRY((xd_result)nn_backward(&p->model, p->weights, &p->batch, p->workspace, p->logits, p->gradient));
    return real_update(p, step);
}

int real_point_count(int steps) {
    return steps < REAL_POINTS ? steps : REAL_POINTS;
}

int real_point_step(int i, int steps) {
    return (int)((int64_t)steps * (i + 1) / real_point_count(steps));
}

/* The rows from `first` on of the held-out text, of which every `stride`th is read. */
static void real_read_heldout(real_pupil *p, int64_t first, int64_t stride) {
    const real_text *text = p->lesson->heldout;
    for (int64_t at = 0; at < (int64_t)p->batch.sequences * REAL_ROW; at++) {
        const int64_t row = first + p->first_row + at / REAL_ROW;
        const int64_t place = row * stride * REAL_ROW + at % REAL_ROW;
        const bool inside = place + 1 < text->count;
        p->ids[at] = inside ? text->ids[place] : 0;
        p->labels[at] = inside ? text->ids[place + 1] : XD_IGNORE_INDEX;
    }
}

/* Every token of those rows once, from what precedes it in its row. */
static xd_result real_measure(real_pupil *p, int64_t stride, double *bits_per_byte) {
    const real_text *text = p->lesson->heldout;
    const int64_t apart = stride * REAL_ROW; /* tokens */
    double nats = 0.0;
    int64_t bytes = 0;
    for (int64_t first = 0; first * apart + 1 < text->count; first += p->lesson->rows) {
        double part = 0.0;
        real_read_heldout(p, first, stride);
        XD_TRY((xd_result)nn_forward(&p->model, p->weights, &p->batch, true, p->workspace, p->logits));
        XD_TRY(real_text_loss(p, 1.0, false, &part));
        nats += part;
    }
    for (int64_t start = 0; start + 1 < text->count; start += apart) {
        const int64_t last = start + REAL_ROW < text->count ? start + REAL_ROW : text->count - 1;
        bytes += text->spans[last].end - text->spans[start].end;
    }
    *bits_per_byte = nats / log(2.0) / (double)bytes;
    return XD_OK;
}

/* After a step: what the student is worth, when a point is there. */
static xd_result real_glance(real_pupil *p, int done) {
    const real_lesson *lesson = p->lesson;
    const int points = real_point_count(lesson->steps);
    double bits = 0.0;
    if (!lesson->heldout || !lesson->save) return XD_OK;
    for (int i = 0; i < points; i++) {
        if (real_point_step(i, lesson->steps) != done) continue;
        const int64_t rows = (lesson->heldout->count + REAL_ROW - 2) / REAL_ROW;
        XD_TRY(real_measure(p, (rows + REAL_GLANCE_ROWS - 1) / REAL_GLANCE_ROWS, &bits));
        if (xd_comm_rank(p->world) == 0) p->lesson->points[i] = bits;
    }
    return XD_OK;
}

/* Rank 0 has all weights, because ranks that save share rows only. */
static xd_result real_save_student(real_pupil *p) {
    real_lesson *lesson = p->lesson;
    XD_TRY(model_directory_save(p->ctx, lesson->save, &p->model, p->weights, lesson->extras));
    return sample_write(p->ctx, &p->model, p->weights, lesson->tokenizer, lesson->seed, lesson->sample);
}

/* The end: what is saved is measured as it is saved, every weight rounded to bf16. */
static xd_result real_conclude(real_pupil *p) {
    real_lesson *lesson = p->lesson;
    const bool first = xd_comm_rank(p->world) == 0;
    xd_result result = XD_OK;
    double bits = 0.0;
    for (int64_t i = 0; lesson->save && i < p->model.float_count; i++)
        p->weights[i] = xd_f32_from_bf16(xd_bf16_from_f32(p->weights[i]));
    if (lesson->heldout) XD_TRY(real_measure(p, 1, &bits));
    if (first) lesson->bits_per_byte = bits;
    if (first && lesson->save) result = real_save_student(p);
    return xd_agree(p->world, result);
}

static xd_result real_teach(real_pupil *p) {
    real_lesson *lesson = p->lesson;
    const bool first = xd_comm_rank(p->world) == 0;
    const double start = xd_now(p->ctx);
    progress line = progress_begin();
    xd_xtoken_values values;
    memset(&values, 0, sizeof values);
    for (int step = 0; step < lesson->steps; step++) {
        const real_stand at = { lesson->name, step + 1, lesson->steps };
        XD_TRY(real_step(p, step, &values));
        XD_TRY(real_glance(p, step + 1));
        if (!first) continue;
        if (step == 0) lesson->first_loss = values.loss;
        if (lesson->losses) lesson->losses[step] = (float)values.ce;
        real_progress(&line, &at, "steps", xd_now(p->ctx) - start);
    }
    if (first) {
        lesson->seconds = xd_now(p->ctx) - start;
        lesson->last_loss = values.loss;
        lesson->last_kd = values.kd;
        lesson->last_ce = values.ce;
    }
    return real_conclude(p);
}

xd_result real_lesson_rank(xd_comm *world, void *lesson) {
    real_pupil p;
    memset(&p, 0, sizeof p);
    p.lesson = (real_lesson *)lesson;
    p.world = world;
    p.ctx = xd_comm_ctx(world);
    if (xd_comm_size(world) > 1) *(p.lesson->split_vocabulary ? &p.vocab : &p.rows) = world;
    xd_result result = xd_agree(world, real_pupil_create(&p));
    const int64_t begin = p.model.share.vocab_begin;
    const xd_interval columns = { begin, begin + p.model.share.vocab_count };
    const xd_vocab_desc split = { .size = p.lesson->student.vocab, .tp = p.vocab, .columns = &columns };
    if (result == XD_OK) result = xd_vocab_create(p.ctx, &split, &p.columns);
    if (result == XD_OK) result = real_teach(&p);
    real_pupil_free(&p);
    return result;
}
