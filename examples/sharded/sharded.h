/* sharded.h - what the parts of the demonstration of sharded training share. sharded.c says what the program does. */
#ifndef SHARDED_H
#define SHARDED_H

#include "../demo/demo_data.h"
#include "../demo/demo_rank.h"
#include "../nn/nn_blocks.h"
#include "../nn/nn_describe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- options ---- */

/* How the ranks hold the student. */
typedef enum sharded_wrap {
    SHARDED_DDP = 0,
    SHARDED_OPTIMIZER, /* DDP whose optimizer is sharded */
    SHARDED_FSDP,
    SHARDED_HSDP,
    SHARDED_PLAIN /* no wrapper: one buffer of weights, one of gradients */
} sharded_wrap;

/* A run on one rank, and one that is interrupted, in two parts. */
enum { SHARDED_LEGS = 3 };

/* The command line, every default filled in. */
typedef struct sharded_options {
    demo_axes axes; /* of the ranks before the interruption */
    sharded_wrap wrap;
    int pp, vpp; /* ranks of a pipeline, before the interruption, and stages of each; 1 -> the whole model */
    int steps;
    uint64_t seed;
    size_t heldout_bytes; /* measure on no more than these; 0 -> all */
    bool overwrite;       /* a finished student in `out` may be replaced */
    bool mpi;             /* processes of an MPI job as ranks */
    bool launch;          /* processes that xdrun starts */
    int lose; /* how many of them are killed, one after another, while the others go on; 0 -> none: they go on in another leg */
    int restart; /* how often one of them is killed and all are started again; 0 -> never */
    int leg;     /* this process is a rank of that leg, in such a job; -1 -> of none */
    bool help;
    const char *data, *out;

    char problem[256]; /* what is wrong when sharded_parse says false */
} sharded_options;

bool sharded_parse(int argc, char **argv, sharded_options *out);
void sharded_print_help(void);

/* The name that --wrap takes, and what tables call it. */
const char *sharded_wrap_name(sharded_wrap wrap);

/* ---- one leg of the way ---- */

enum {
    SHARDED_GROUPS = 2, /* of HSDP */
    SHARDED_MOST_RANKS = DEMO_BATCH,
    SHARDED_MOST_STAGES = 4,
    SHARDED_MOST_CHUNKS = 4 * DEMO_BATCH
};

/* One of its processes is killed, and the others go on, or all are started again. */
typedef struct sharded_loss {
    int step;     /* done before */
    double delay; /* since then, in parts of a step */
    double which; /* of those that live, from 0 to 1 */
} sharded_loss;

/* Ranks of a process that train from the start, or from a checkpoint, to the end, or until they are killed. */
typedef struct sharded_leg {
    const char *title;     /* in tables */
    const char *directory; /* of checkpoints and metrics.jsonl */
    sharded_wrap wrap;
    demo_axes axes;
    int pp, vpp;    /* as in sharded_options */
    int ranks;      /* all together */
    int save_at;    /* steps after which they save, the end apart; 0 -> never */
    int save_every; /* so many steps they save; 0 -> never */
    int kill_at;    /* steps after which the process is killed; 0 -> never */
    int victim;     /* the rank whose process is killed; -1 -> all of them */
    bool resume;    /* from the newest checkpoint in the directory */
    bool keep;      /* the student becomes a model directory */
    sharded_loss losses[SHARDED_MOST_RANKS];
    int loss_count; /* 0 -> whoever is killed ends the leg */
    bool again;     /* after a loss the others end, and the job is started again */
    int fewer;      /* ranks by which a loss makes the world smaller */
} sharded_leg;

/* How the ranks of a world share the student. */
typedef struct sharded_place {
    sharded_wrap wrap;
    demo_axes axes;
    int pp;
} sharded_place;

/* What a rank tells after a step. */
typedef struct sharded_news {
    int rank;
    sharded_place place;
    bool inherited; /* it went on from what ranks had in memory */
    long process;
    int world;                       /* how often the ranks have become fewer, or were started again */
    int step;                        /* done in all */
    int steps;                       /* done in this leg, by these ranks, in: */
    double seconds, wrapper_seconds; /* the second within the first: gathering, sending and summing */
    uint64_t bytes_sent;
    uint64_t planned, counted; /* bytes of weights, gradients, optimizer and average, and of a
                                * pipeline's activations */
    double bits_per_byte;      /* at the end; 0 before */
} sharded_news;

/* What all ranks of a leg share. */
typedef struct sharded_job {
    demo_job demo;
    const sharded_leg *leg;
    const char *const *arguments; /* [argument_count] the command line; NULL -> ranks are threads, not
                                   * processes */
    int argument_count;
    const char *xdrun;     /* the program that starts processes; NULL -> mpirun */
    int number;            /* of the leg */
    int world;             /* sharded_news.world */
    const char *news_path; /* of the pipe, when ranks are processes */
    int news;              /* the pipe that sharded_news go into */
} sharded_job;

/* What each rank runs; `job` is a sharded_job. */
xd_result sharded_run_rank(xd_comm *world, void *job);

/* What a rank has of a world. */
typedef struct sharded_rank sharded_rank;

/* The same, and *held stays open: the rank as it is, or, if it has not come so far that it had all that it wants of that, as
 * it was in the world before; NULL -> there was none. */
xd_result sharded_run_on(xd_comm *world, const sharded_job *job, sharded_rank **held);
void sharded_rank_close(sharded_rank *r);

/* ---- processes ---- */

/* How those that were left went on. */
typedef struct sharded_recovery {
    int rank, step; /* who was killed, by his first rank; steps that were done */
    int from;       /* steps that were done in what they went on from */
    bool inherited; /* which was in memory */
    sharded_place place;
    double killed;  /* when */
    double seconds; /* from there to the end of their first step; 0 -> they had come to the end */
} sharded_recovery; /* or those that were started again */

/* What came of a leg. */
typedef struct sharded_outcome {
    sharded_news ranks[SHARDED_MOST_RANKS]; /* the last that each told */
    bool killed;
    long processes
        [SHARDED_MOST_RANKS]; /* by first ranks, or those of the last start; 0 -> not known, or killed */
    sharded_recovery recoveries[SHARDED_MOST_RANKS];
    int lost;
} sharded_outcome;

/* Runs a leg in a process of its own, or in those of a job, and kills its ranks, or one of them, when the leg says so.
 * Errors: STATE when it ended in another way than it should; IO, MEMORY. */
xd_result sharded_run_leg(xd_ctx *ctx, sharded_job *job, sharded_outcome *out);

/* ---- processes of a job: of xdrun, or of MPI in build/demo-sharded-mpi ---- */

/* A named pipe for the news, from both ends. Errors: IO. */
xd_result sharded_job_open_news(xd_ctx *ctx, const sharded_job *job, int ends[2]);

/* This process becomes xdrun or mpirun, which starts the ranks of the leg: this program with its command line and --leg. Ranks
 * find in XDRUN_RESTARTS how often they were started before, as xdrun tells it. Returns its exit status, when there is no
 * such program. */
int sharded_job_launch(const sharded_job *job);

/* Whether those that are left of a job of MPI can go on. */
bool sharded_job_recovers(void);

/* This process is a rank. Returns its exit status. */
int sharded_job_live(xd_ctx *ctx, sharded_job *job);

/* It leaves MPI, and ends with the status itself when that takes too long, as it may after ranks were lost. */
void sharded_job_end(int status, bool may_wait);

/* ---- ranks that are lost ---- */

/* Which, and when. */
void sharded_draw_losses(sharded_leg *leg, uint64_t seed, int steps);

/* Hears news, kills who is to be lost, and notes how the others go on. */
void sharded_watch(const sharded_leg *leg, const sharded_news *news, sharded_outcome *out);

/* sharded_run_rank of a rank that goes on without those that are lost, or that may have been started again. */
xd_result sharded_survive(xd_comm *world, const sharded_job *job);

/* ---- memory ---- */

/* An allocator of all ranks that counts what is in use, for each thread that has asked for it. */
xd_allocator sharded_counting_allocator(void);

/* Bytes that the calling thread has taken and not given back, from its first call on. */
int64_t sharded_counted(void);

/* ---- the student ---- */

struct sharded_student;

/* Blocks whose opening and closing is timed. */
typedef struct sharded_blocks {
    nn_blocks blocks;
    struct sharded_student *student;
} sharded_blocks;
nn_source sharded_blocks_source(sharded_blocks *blocks);

/* One stage of a pipeline. */
typedef struct sharded_stage {
    nn_model model; /* the rank's, cut; its table is the rank's */
    nn_description description;
    sharded_blocks blocks;
    nn_source source;
} sharded_stage;

/* Those of a rank; all zero without a pipeline. */
typedef struct sharded_stages {
    xd_grid *grid;
    const xd_groups *groups;
    uint64_t seed; /* of first values */
    sharded_stage stage[SHARDED_MOST_STAGES];
    int count;
    int64_t described; /* bytes of descriptions */
    xd_built *built;
    xd_pipeline *pipeline;
    xd_queue *sends; /* of activations and their gradients */
    int64_t slots;   /* forwards in flight */
    int64_t workspace_floats, logit_floats;
    float *workspace, *logits; /* [slots] */
} sharded_stages;

/* A rank's part of the student, its optimizer and its average. */
typedef struct sharded_student {
    xd_comm *world; /* all ranks; rank->world are those of the same stage */
    demo_rank *rank;
    nn_description description;
    xd_model *model;       /* of the description */
    xd_parallel *parallel; /* NULL without a wrapper */
    xd_comm *data;         /* the ranks that the wrapper is over; HSDP: this rank's group of them */
    xd_comm *replicas;     /* HSDP: the ranks of the same place in the other groups */
    bool owns_groups;
    float *weights; /* without a wrapper: all of them, laid out as rank->model */

    sharded_stages stages;
    nn_flat flat;
    sharded_blocks blocks;
    nn_source source; /* of its blocks, whichever of both */
    double wrapper_seconds;

    int done; /* steps that its state has made */
    int64_t count;
    xd_param *params;
    xd_tensor_part *parts;
    xd_optimizer *optimizer;
    xd_ema *average;
    uint64_t planned, counted; /* bytes of all this */
} sharded_student;

/* Describes the model, wraps it as the leg says, and gives the rank its sequences. s->world and, of a pipeline, s->stages are there
 * already, and the rest is zero. sharded_student_close in any case. Collective. */
xd_result sharded_student_open(sharded_student *s, demo_rank *rank, const sharded_leg *leg, uint64_t seed);
void sharded_student_close(sharded_student *s);

/* The gradient of the whole batch from the logits' gradients; then the step. Collective. */
xd_result sharded_student_backward(sharded_student *s);
xd_result sharded_student_update(sharded_student *s, demo_step *out);

/* Weights that were loaded are what blocks show. Collective. */
xd_result sharded_student_publish(sharded_student *s);

/* All weights, laid out as rank->model. Collective. Not of a pipeline. */
xd_result sharded_student_gather(sharded_student *s, float *weights);

/* Room for as many entries as the model has weights; and the sequences that a wrapper gives the rank. Local. */
xd_result sharded_make_lists(sharded_student *s);
void sharded_take_leaves(sharded_student *s, const xd_parallel *parallel);

/* ---- the student in stages: sharded_stages.c ---- */

/* The groups of a pipeline's ranks. Collective over world. */
xd_result sharded_stages_join(sharded_stages *stages, xd_comm *world, const sharded_leg *leg);

/* What sharded_student_open and _close do of it. */
xd_result sharded_stages_open(sharded_student *s, const sharded_leg *leg, uint64_t seed);
void sharded_stages_close(sharded_student *s);

/* Forwards, losses and backwards of a batch that was read; the gradients are complete then. Collective. */
xd_result sharded_stages_learn(sharded_student *s, const demo_arm *arm, demo_step *out);

xd_result sharded_stages_publish(sharded_student *s);

/* ---- checkpoints ---- */

/* The name that the average has in a checkpoint. */
#define SHARDED_AVERAGE_NAME "slow"

/* All that a step changes. Collective over world. */
xd_result sharded_save(const sharded_student *s, const char *directory, int step);
xd_result sharded_load(sharded_student *s, const char *directory);

/* The same from what ranks held of a student in the world before; NULL -> nothing. `last`: what came of the last step of
 * that, filled in. Errors: MISSING when some of it is lost, and those of xd_state_inherit. */
xd_result sharded_inherit(sharded_student *s, const sharded_student *held, demo_step *last);

/* ---- comparing ---- */

enum { SHARDED_WEIGHTS, SHARDED_MOMENTS, SHARDED_AVERAGE, SHARDED_CURVE, SHARDED_THINGS };

/* How two runs agree. */
typedef struct sharded_comparison {
    int64_t bytes[SHARDED_THINGS];  /* that were compared; of the curve: steps */
    double apart[SHARDED_THINGS];   /* the largest difference of two numbers */
    bool same_bits[SHARDED_THINGS]; /* all of them */
} sharded_comparison;

/* Their checkpoints of a step, and metrics.jsonl, in two directories. Errors: IO, MISSING; FORMAT for lines that no run wrote. */
xd_result sharded_compare(xd_ctx *ctx, const char *one, const char *other, int step, sharded_comparison *out);

/* Bytes of the first `lines` lines of metrics.jsonl. Errors: IO; DATA when there are fewer, with both numbers. */
xd_result sharded_metrics_bytes(xd_ctx *ctx, const char *directory, int lines, long *bytes);

/* ---- what is told ---- */

/* The whole way: a run on one rank, and one that was interrupted. */
typedef struct sharded_run {
    const sharded_options *options;
    int leg_count;
    sharded_leg legs[SHARDED_LEGS];
    sharded_outcome outcomes[SHARDED_LEGS];
    sharded_comparison comparison;
} sharded_run;

void sharded_print_tables(const sharded_run *run);

/* sharded.json. Errors: IO, MEMORY. */
xd_result sharded_write_run(xd_ctx *ctx, const sharded_run *run);

#ifdef __cplusplus
}
#endif

#endif /* SHARDED_H */
