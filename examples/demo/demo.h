/* demo.h - what the parts of the demonstration share. demo.c says what the program does. */
#ifndef DEMO_H
#define DEMO_H

#include "../common/sample.h"
#include "../nn/nn_transformer.h"
#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens of a row and rows of a batch; a test compiles a smaller run. */
#if !defined(DEMO_ROW)
#    define DEMO_ROW 128
#    define DEMO_BATCH 16
#endif

/* Points at which the held-out text is measured, the end among them. */
/* What samples begin with. */
#define DEMO_BEGINNING "And it came to pass"

enum { DEMO_MOST_SEEDS = 8, DEMO_MOST_ARMS = 8, DEMO_POINTS = 10 };

/* ---- options ---- */

/* A mesh: what ranks split, rows of a batch, positions of a row, weights. */
typedef struct demo_axes {
    int dp, cp, tp;
} demo_axes;

/* The command line, every default filled in. */
typedef struct demo_options {
    int ranks;
    demo_axes axes;
    int steps;
    int seeds;
    uint64_t seed;
    size_t heldout_bytes; /* measure on no more than these; 0 -> all */
    xd_reduction reduction;
    int save_every; /* 0 -> never */
    bool resume;
    bool overwrite;           /* a finished student in `out` may be replaced */
    bool help;                /* print what there is and stop */
    const char *arms;         /* names with commas between them; NULL -> all there are data for */
    const char *teacher_text; /* train the teacher on it instead */
    const char *eval;         /* measure this model directory instead */
    const char *encode;       /* print this file's ids instead */
    const char *data;         /* folder with the texts and the teacher; see demo_data.h */
    const char *out;

    char problem[256]; /* what is wrong when demo_parse says false */
} demo_options;

/* world_ranks: the processes there are, which --ranks must equal; 0 -> as many threads as asked for. */
bool demo_parse(int argc, char **argv, int world_ranks, demo_options *out);

/* The text of --help. */
void demo_print_help(void);

/* "dp=2,tp=2": each axis once at most; those that are not named have one rank. False for anything else. */
bool demo_parse_mesh(const char *text, demo_axes *out);

/* The name that --reduction takes. */
const char *demo_reduction_name(xd_reduction reduction);

/* ---- texts ---- */

/* True when the file can be read. */
bool demo_is_file(const char *path);

/* A text as ids; read only once loaded, so all ranks share it. */
typedef struct demo_text {
    int32_t *ids;
    xd_token_span *spans; /* [count] the bytes of each token */
    int64_t count;
    int64_t bytes; /* of all but the first token: what bits per byte are counted over */
} demo_text;

/* Loads the first `most_bytes` bytes of a file, or all of it when that is 0. */
xd_result demo_text_load(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *path, size_t most_bytes,
                         demo_text *out);
void demo_text_free(xd_ctx *ctx, demo_text *text);

/* Errors: DATA for a text that has no whole row. */
xd_result demo_text_check(xd_ctx *ctx, const demo_text *text, const char *path);

/* The start of row `row` of the batch of step `step`: a place in the first `share` of the text with DEMO_ROW tokens
 * and one more after it. The same on every mesh. */
int64_t demo_row_start(const demo_text *text, double share, uint64_t seed, int step, int row);

/* ---- two tokenizers ---- */

/* One text as the student and as the teacher read it, and how their vocabularies belong together; read only
 * once made. */
typedef struct demo_bridge {
    const demo_text *student, *teacher;
    xd_alignment alignment;
    int64_t *first_chunk; /* [student->count] the first chunk that begins at that token or after it */
    xd_projection projection;
    xd_exact_map strict, relaxed;
} demo_bridge;

/* A teacher that is not here: what it said about the text, and how its tokens lie beside the student's. */
typedef struct demo_record {
    xd_teacher_cache *cache;
    /* [tokens of the student's text] the position that predicts the teacher's token which begins where this one
     * does; -1 where none does */
    int64_t *places;
    xd_projection projection;
} demo_record;

xd_result demo_bridge_make(xd_ctx *ctx, const xd_tokenizer *student_tokenizer, const demo_text *student,
                           const xd_tokenizer *teacher_tokenizer, const demo_text *teacher, demo_bridge *out);
void demo_bridge_free(xd_ctx *ctx, demo_bridge *bridge);

/* `path` is a cache of the student's text, with spans. The projection is counted: a student's token stands for
 * the teacher's tokens that begin where it does, as often as they do so in the text. Errors: as
 * xd_teacher_cache_open; DATA for the cache of another text. */
xd_result demo_record_open(xd_ctx *ctx, const char *path, const xd_tokenizer *student_tokenizer,
                           const demo_text *student, demo_record *out);
void demo_record_close(xd_ctx *ctx, demo_record *record);

/* What a row of the student's text is for the teacher: its row begins at the first place from the start on
 * where both have a boundary. The chunks that count are those of which both predict every token: they lie
 * behind the first token of either row and not behind the one after its last. */
typedef struct demo_window {
    int64_t student_start, teacher_start;
    int64_t first, end; /* chunks */
} demo_window;

demo_window demo_bridge_window(const demo_bridge *bridge, int64_t student_start);

/* chunks[i] = number of the chunk, within its window, of the token that place i of the row predicts; -1
 * outside of the chunks that count. heads[i]: the same for the first token of each chunk alone. What both
 * sides expect to come next can be compared there; in the middle of the other's token it cannot. [DEMO_ROW] */
void demo_bridge_chunks(const demo_bridge *bridge, const demo_window *window, xd_chunk_side side,
                        int64_t *chunks, int64_t *heads);

/* ---- shares ---- */

/* This rank's part of whole weights. */
void demo_take_share(const nn_model *whole, const float *whole_weights, const nn_model *part, float *weights);

/* The inverse on rank 0 of the tensor-parallel group: whole weights from everybody's parts. Collective over
 * tp, which may be NULL; `whole_weights` is written on its rank 0 only. */
xd_result demo_gather_shares(xd_ctx *ctx, xd_comm *tp, const nn_model *part, const float *weights,
                             const nn_model *whole, float *whole_weights);

/* ---- training ---- */

/* What an arm learns from, besides the text. */
typedef enum demo_signal {
    DEMO_TEXT_ALONE = 0,
    DEMO_PROJECTED,  /* P-KL: the teacher's distribution of a chunk against the student's, projected */
    DEMO_GOLD,       /* tokens that both have by KL, the others by their sorted probabilities */
    DEMO_HYBRID,     /* H-KL: gold, with the likeliest piece of a token counted as the same token */
    DEMO_LIKELIHOOD, /* how likely each finds the chunk that is there */
    DEMO_RECORDED    /* what a larger teacher once said about the text, by P-KL over its likeliest tokens */
} demo_signal;

/* One training run: from random weights to a model, a figure and a sample. */
typedef struct demo_arm {
    const char *key, *name; /* on the command line; in the table */
    demo_signal signal;
    double kd_weight; /* of the loss against the teacher */
    double ce_weight; /* of the cross entropy against the text, where the teacher says something, too */
    double temperature;
    double learning_rate;
    double share; /* of the text, from its beginning; 1 for arms that ask a teacher who runs */
} demo_arm;

/* What came out. */
typedef struct demo_result {
    double bits_per_byte;        /* of the held-out text */
    double seconds;              /* of its part of every step */
    float *losses;               /* [steps] cross entropy against the text, nats per token */
    double heldout[DEMO_POINTS]; /* bits per byte on the way: see demo_point_step */
    char sample[SAMPLE_BYTES];   /* UTF-8 text the model wrote */
} demo_result;

/* Points of a run of so many steps. */
int demo_point_count(int steps);

/* After how many steps point `i` is; the last one is the end. Points are of rows spread evenly over the held-out text,
 * about DEMO_GLANCE_ROWS of them, because all of it would take a quarter of the time; the table's number is of all. */
int demo_point_step(int i, int steps);

/* The point after `done` steps, or -1. */
int demo_point_at(int done, int steps);

enum { DEMO_GLANCE_ROWS = 4 * DEMO_BATCH };

/* Everything ranks share. Rank 0 alone writes results and the report. */
typedef struct demo_job {
    const xd_tokenizer *tokenizer, *teacher_tokenizer;
    const demo_text *text, *heldout, *teacher_heldout;
    const demo_bridge *bridge; /* NULL without a teacher to learn from */
    const demo_record *record; /* NULL without a cache */
    const nn_config *config;   /* of the model that is trained */
    const nn_model *teacher;   /* whole; NULL without one */
    const float *teacher_weights;
    int dp, cp, tp;    /* the mesh */
    bool fixed_sums;   /* in INVARIANT mode: sums inside the models have the same bits for every tp. Slower */
    bool fixed_blocks; /* likewise for every cp: sums over positions are made of those of eight blocks of
                        * them */
    bool by_leaf; /* in INVARIANT mode: losses of single sequences, added up in their order, as a pipeline
                   * has them */
    xd_reduction reduction;
    const char *ranks_are; /* "threads" or "processes" */
    int steps;
    uint64_t seed; /* of the first run; the others count up */
    int seeds, arm_count;
    demo_arm arms[DEMO_MOST_ARMS];
    demo_result *results;        /* [seeds][arm_count] */
    demo_result *teacher_result; /* NULL -> not asked for */
    struct demo_report *report;
    const char *resume_directory; /* states of runs, <seed>.safetensors */
    int save_every;               /* steps between states; 0 -> none */
    bool resume;                  /* go on from the states */
    bool overwrite;               /* over what a finished run left there */
    const char *save_directory;   /* where a model of the first run goes */
    int saved_arm;                /* and which */
    const char *tokenizer_path;   /* of the tokenizer.json that goes with it */
} demo_job;

/* The arms of a run, and which of them is saved: the first with a teacher. Those that --arms names, or all; without a
 * cache those that need one are left out. Errors: ARGUMENT for a name that there is not, or that stands twice. */
xd_result demo_fill_arms(xd_ctx *ctx, const demo_options *o, bool has_cache, demo_job *job);

/* A line about each student. */
void demo_print_students(void);

/* What each rank runs; `job` is a demo_job. */
xd_result demo_run_rank(xd_comm *world, void *job);

/* ---- resuming ---- */

/* What an arm owns: everything that a step changes. */
typedef struct demo_learner {
    float *weights; /* laid out as the model */
    xd_param *params;
    xd_optimizer *optimizer;
    double seconds;
    float *losses;   /* [steps] rank 0's; NULL elsewhere */
    double *heldout; /* [DEMO_POINTS] rank 0's; NULL elsewhere */
} demo_learner;

/* Where a run stands. The first block says what and where, the second is saved and loaded. */
typedef struct demo_state {
    const demo_job *job;
    xd_comm *world, *tp;  /* tp NULL for a group of one */
    const nn_model *part; /* this rank's */
    const char *path;
    uint64_t seed;

    demo_learner *learners; /* [job->arm_count] */
    int done;               /* steps */
    double seconds;
    long metrics_bytes; /* of metrics.jsonl so far */
} demo_state;

/* Where the state of the run from `seed` is. */
void demo_state_path(const char *directory, uint64_t seed, char path[512]);

/* Replaces the file atomically. Collective over world. */
xd_result demo_state_save(xd_ctx *ctx, const demo_state *state);

/* Fills in the second block, or leaves it alone when there is no file. Collective over world.
 *
 * The run that goes on must have the arms, seed, steps, text, reduction mode and mesh of the one that saved, so
 * that it has its bits, too. In INVARIANT mode every mesh has the same bits, so another one may go on; whether
 * ranks are threads or processes never matters.
 *
 * Errors: DATA for a file of another run, with both values, SHAPE for one of another model, IO when some ranks
 * see the file and others do not. */
xd_result demo_state_load(xd_ctx *ctx, demo_state *state);

/* ---- report ---- */

/* out/metrics.jsonl. */
typedef struct demo_report demo_report;

/* resume -> metrics.jsonl is kept, up to where demo_report_go_to says. Errors: IO, MEMORY. */
xd_result demo_report_open(xd_ctx *ctx, const char *directory, bool resume, demo_report **out);

/* *bytes = the length of metrics.jsonl so far, all of it handed to the system. Errors: IO. */
xd_result demo_report_position(xd_ctx *ctx, demo_report *report, long *bytes);

/* The next line comes at that byte; what stood there from an interrupted run is cut off then.
 * Errors: IO; DATA when the file is shorter, with both lengths. */
xd_result demo_report_go_to(xd_ctx *ctx, demo_report *report, long bytes);

/* NULL is fine. Errors: IO when lines were lost. */
xd_result demo_report_close(xd_ctx *ctx, demo_report *report);

/* What one step of one arm came to. */
typedef struct demo_step {
    double loss, hard, soft; /* nats per token, soft per chunk; 0 without a teacher */
    double gradient_norm, learning_rate;
    double seconds; /* of this arm's part */
} demo_step;

/* Where a run is when it reports. */
typedef struct demo_moment {
    uint64_t seed;
    int step;       /* from 0 */
    double seconds; /* since the run began */
} demo_moment;

/* A line for each arm. Errors: IO. */
xd_result demo_report_step(xd_ctx *ctx, demo_report *report, const demo_job *job, const demo_moment *at,
                           const demo_step *arms);

/* A line of one arm with what the held-out text came to; `bytes` of it were measured. Errors: IO. */
xd_result demo_report_heldout(xd_ctx *ctx, demo_report *report, const demo_arm *arm, const demo_moment *at,
                              double bits_per_byte, int64_t bytes);

/* The line on the terminal. */
void demo_report_progress(demo_report *report, const demo_job *job, const demo_moment *at);

/* The table on the terminal, loss.svg, run.json, and where all of it is. */
xd_result demo_report_finish(xd_ctx *ctx, const demo_job *job, const char *directory);

/* Fields that say what the program is made of and runs on: the bits of a run depend on each of these. */
void demo_json_build(xd_json_writer *w, xd_ctx *ctx);

/* The parts of that. */
void demo_print_table(const demo_job *job);
xd_result demo_write_figure(xd_ctx *ctx, const demo_job *job, const char *directory);
xd_result demo_write_run(xd_ctx *ctx, const demo_job *job, const char *directory);

#ifdef __cplusplus
}
#endif

#endif /* DEMO_H */
