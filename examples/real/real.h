/* real.h - what the parts of the demonstration on real models and vocabularies share. real.c says what the
 * program does. */
#ifndef REAL_H
#define REAL_H

#include "../common/model_directory.h"
#include "../common/progress.h"
#include "../common/sample.h"
#include "../nn/nn_transformer.h"
#include "../common/gguf_model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { REAL_MOST_PATHS = 40 }; /* a figure of many students */

/* The command line. */
typedef struct real_options {
    const char *command;
    const char *path[REAL_MOST_PATHS]; /* what stands behind the command and is no option */
    int paths;
    int ranks;     /* threads; 0 -> 2 */
    int64_t bytes; /* of a text; 0 -> all */
    int steps;     /* of training; 0 -> the command's own number */
    uint64_t seed;
    const char *save;              /* a folder for the model and its curve; NULL -> none */
    bool overwrite;                /* a finished model that is there */
    const char *out;               /* a file that gets the result as one line of JSON; NULL -> none */
    xd_tokenizer_preset preset[2]; /* of rank files: student, teacher */
} real_options;

/* ---- small things ---- */

/* How far something is. */
typedef struct real_stand {
    const char *what;
    int64_t done, total; /* in some unit */
} real_stand;

void real_progress(progress *line, const real_stand *at, const char *unit, double seconds);

/* A path without its folders: results tell nothing of the machine. */
const char *real_name(const char *path);

/* What all threads of this process have computed for, in seconds: on a busy machine the honest clock. */
double real_processor_seconds(void);

/* The most memory this process has had, in MiB. */
double real_peak_mib(void);

/* Adds one line to the result file; nothing without one. `format` is printf's. */
xd_result real_record(xd_ctx *ctx, const real_options *o, const char *format, ...) XD_PRINTF(3, 4);

/* A group for nn_model over a communicator; NULL -> one rank. */
nn_group real_group(xd_comm *comm);

/* Takes zeroed memory for `count` things of `size` bytes; *failed remembers that some could not be had. */
void *real_room(xd_ctx *ctx, int64_t count, size_t size, bool *failed);

/* Runs `function` on o->ranks threads; the error of the rank that failed first is the context's. */
xd_result real_run(xd_ctx *ctx, const real_options *o, xd_rank_function function, void *argument);

/* ---- texts ---- */

/* A text and its tokens. */
typedef struct real_text {
    char *data;
    size_t bytes;
    int32_t *ids;         /* [count] */
    xd_token_span *spans; /* [count] */
    int64_t count;
} real_text;

/* The first `most` bytes of a file (0: all of it). Errors: those of xd_file_load and xd_encode. */
xd_result real_text_load(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *path, int64_t most,
                         real_text *out);
void real_text_free(xd_ctx *ctx, real_text *text);

/* ---- the teacher ---- */

/* A model read from a GGUF file; read only, so all ranks share it. */
typedef struct real_teacher {
    gguf *file;
    nn_config config;
    nn_model model; /* of one rank alone */
    float *weights; /* NULL after real_teacher_open */
    xd_tokenizer *tokenizer;
} real_teacher;

xd_result real_teacher_load(xd_ctx *ctx, const char *path, real_teacher *out);

/* The same without the weights, half a gigabyte of memory less: its sizes and its tokenizer. */
xd_result real_teacher_open(xd_ctx *ctx, const char *path, real_teacher *out);
void real_teacher_free(xd_ctx *ctx, real_teacher *teacher);

/* One rank's room for running a model over a context of at most `positions` tokens, without a gradient. */
typedef struct real_runner {
    nn_model model;
    nn_batch batch;
    float *workspace, *logits; /* logits [positions, vocabulary] */
} real_runner;

/* Local. Errors: MEMORY. */
xd_result real_runner_create(xd_ctx *ctx, const nn_config *config, int positions, real_runner *out);
void real_runner_free(xd_ctx *ctx, real_runner *runner);

/* runner->logits = what follows each of `count` tokens, from these tokens alone. */
xd_result real_runner_forward(real_runner *runner, const float *weights, const int32_t *ids, int count);

/* ---- what stays ---- */

/* A model that was measured; curve.json in its folder. */
typedef struct real_curve {
    const char *name;
    int vocabulary;      /* entries */
    const float *losses; /* [steps] nats per token; NULL for a teacher */
    int steps;
    const double *heldout; /* [points] bits per byte */
    const int *heldout_at; /* [points] */
    int points;
    double end;         /* bits per byte of all of the held-out text */
    const char *sample; /* what it wrote by itself */
} real_curve;

/* Makes the folder. Errors: STATE when it holds a finished model that is not to be replaced; IO. */
xd_result real_keep_begin(xd_ctx *ctx, const real_options *o);

/* Writes curve.json there. */
xd_result real_keep_curve(xd_ctx *ctx, const char *directory, const real_curve *curve);

/* ---- commands; see real.c ---- */

xd_result real_check(xd_ctx *ctx, const real_options *o);
xd_result real_cache(xd_ctx *ctx, const real_options *o);
xd_result real_student(xd_ctx *ctx, const real_options *o);
xd_result real_pair(xd_ctx *ctx, const real_options *o);
xd_result real_judge(xd_ctx *ctx, const real_options *o);
xd_result real_figure(xd_ctx *ctx, const real_options *o);

#ifdef __cplusplus
}
#endif

#endif /* REAL_H */
