/* demo_data.h - which files of a folder of data a run reads. */
#ifndef DEMO_DATA_H
#define DEMO_DATA_H

#include "demo.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef char demo_path[512];

/* The layout that data/README.md tells. What may be missing is taken from the folder `data` of the repository, whose
 * names for the texts are known here, too. */
typedef struct demo_data {
    demo_path text;      /* text.txt: what students read */
    demo_path heldout;   /* heldout.txt: what all are measured on */
    demo_path tokenizer; /* student/: the folder of their tokenizer.json; may be missing */
    demo_path teacher;   /* teacher/: a model directory; may be missing */
    demo_path cache;     /* teacher.xdcache: what a teacher said about text.txt; may be missing, "" then */
} demo_data;

/* trains -> text.txt is needed, too. Errors: MISSING for a text, with both names that it may have. */
xd_result demo_data_find(xd_ctx *ctx, const char *directory, bool trains, demo_data *out);

/* A text for one tokenizer, and what was held out of it. */
typedef struct demo_reader {
    xd_tokenizer *tokenizer;
    demo_text text, heldout;
    char path[512]; /* of the tokenizer.json */
} demo_reader;

/* The tokenizer of a directory; with it a text, NULL -> none, and the first `heldout_bytes` bytes of the held-out one, 0 ->
 * all. Errors: DATA for texts that have no whole row. */
xd_result demo_reader_open_tokenizer(xd_ctx *ctx, const char *directory, demo_reader *reader);
xd_result demo_reader_open(xd_ctx *ctx, const char *directory, const char *text, const char *heldout,
                           size_t heldout_bytes, demo_reader *reader);

/* What students learn from. */
typedef struct demo_lesson {
    demo_data data; /* of demo_data_find */
    demo_reader student, teacher;
    demo_bridge bridge;
    nn_model model; /* the teacher */
    float *model_weights;
} demo_lesson;

/* Reads all of what `data` names; demo_lesson_free in any case. The lesson is zero but for that. */
xd_result demo_lesson_load(xd_ctx *ctx, size_t heldout_bytes, demo_lesson *lesson);
void demo_lesson_free(xd_ctx *ctx, demo_lesson *lesson);

/* Fills in what a job takes of it, as far as it was read. */
void demo_lesson_tell(const demo_lesson *lesson, demo_job *job);

/* The sizes of the teacher or a student. */
nn_config demo_config(int vocab, bool teacher);

#ifdef __cplusplus
}
#endif

#endif /* DEMO_DATA_H */
