/* real_lesson.h - training a student on rows of a text, alone or from a teacher with another tokenizer. */
#ifndef REAL_LESSON_H
#define REAL_LESSON_H

#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A row: tokens of the student, and the most positions of the teacher beside them; and the most teacher ids
 * that a student's token stands for. */
enum { REAL_ROW = 128, REAL_TEACHER_ROW = 224, REAL_MOST_ENTRIES = 256 };

/* How often about REAL_GLANCE_ROWS rows of the held-out text, evenly spread, are measured on the way. */
enum { REAL_POINTS = 10, REAL_GLANCE_ROWS = 48 };

/* Where the teacher's probabilities come from. */
typedef enum real_source {
    REAL_ALONE = 0, /* nowhere: the text alone */
    REAL_LIVE,      /* the teacher runs on every row: XD_XTOKEN_PROJECTED */
    REAL_CACHED     /* a file: XD_XTOKEN_CACHED */
} real_source;

/* Everything ranks share; read only but for the results, which are rank 0's. */
typedef struct real_lesson {
    real_source source;
    nn_config student;
    const real_text *text;      /* in the student's tokens */
    const real_text *heldout;   /* NULL -> not measured */
    const xd_token_span *spans; /* [teacher_count] the same text in the teacher's */
    const int32_t *teacher_ids;
    int64_t teacher_count;
    xd_alignment chunks; /* of the two */
    int32_t *chunk_of;   /* [text->count] the chunk of a student's token */
    const xd_projection *projection;
    const xd_teacher_cache *cache;
    nn_config teacher; /* REAL_LIVE */
    const float *teacher_weights;
    int64_t columns;       /* of the losses; 0 -> default */
    bool split_vocabulary; /* ranks share each row and hold a part of the student's vocabulary; or they share
                              the rows */
    int rows;              /* of a step, over all ranks */
    int steps;
    uint64_t seed;
    const char *name;
    const char *save;              /* a folder for the model; NULL -> none */
    const model_extras *extras;    /* with it */
    const xd_tokenizer *tokenizer; /* with it, for the sample */

    float *losses;              /* [steps] cross entropy of each step, nats per token; NULL -> not wanted */
    double points[REAL_POINTS]; /* on the way */
    char sample[SAMPLE_BYTES];
    double bits_per_byte; /* of the held-out text, all of it */
    double seconds;
    double first_loss, last_loss, last_kd, last_ce;
} real_lesson;

/* The alignment of both tokenizations, and chunk_of. Errors: MEMORY. Free with real_lesson_free. */
xd_result real_lesson_align(xd_ctx *ctx, real_lesson *lesson, xd_align_report *report);

/* The projection that the text itself gives: a student's token stands for the teacher's tokens that begin
 * where it does, as often as they do so. After real_lesson_align. Errors: MEMORY. */
xd_result real_lesson_project(xd_ctx *ctx, const real_lesson *lesson, int64_t student_size,
                              int64_t teacher_size, xd_projection *out);
void real_lesson_free(xd_ctx *ctx, real_lesson *lesson);

/* Points of a run of so many steps, and after how many point `i` is. */
int real_point_count(int steps);
int real_point_step(int i, int steps);

/* What each rank runs; `lesson` is a real_lesson. */
xd_result real_lesson_rank(xd_comm *world, void *lesson);

#ifdef __cplusplus
}
#endif

#endif /* REAL_LESSON_H */
