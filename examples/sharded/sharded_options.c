/* sharded_options.c - the command line. */
#include "sharded.h"

#include "../common/options.h"
#include "../nn/nn_patch_positions.h"

#include <stdio.h>
#include <string.h>

static const char *const sharded_names[] = { "ddp", "sharded", "fsdp", "hsdp", "no wrapper" };

const char *sharded_wrap_name(sharded_wrap wrap) {
    return sharded_names[wrap];
}

static bool sharded_parse_wrap(const char *text, void *options) {
    for (int i = SHARDED_DDP; i < SHARDED_PLAIN; i++)
        if (strcmp(text, sharded_names[i]) == 0) {
            ((sharded_options *)options)->wrap = (sharded_wrap)i;
            return true;
        }
    return false;
}

static bool sharded_parse_mesh(const char *text, void *options) {
    return demo_parse_mesh(text, &((sharded_options *)options)->axes);
}

#define FIELD(name) offsetof(sharded_options, name)

static const option sharded_table[] = {
    { "--wrap", "NAME", OPTION_PARSED, 0, 0, 0,
      "how ranks hold the student before the interruption: ddp, sharded, fsdp, hsdp (fsdp)",
      "ddp, sharded (ddp with a sharded optimizer), fsdp or hsdp", sharded_parse_wrap },
    { "--mesh", "dp=N,tp=N", OPTION_PARSED, 0, 1, NN_MOST_RANKS,
      "what ranks of a stage split before the interruption: rows of a batch, weights (dp=4)",
      "dp=N, cp=N, tp=N with commas between them, once each, N", sharded_parse_mesh },
    { "--pp", "N", OPTION_INT, FIELD(pp), 1, SHARDED_MOST_RANKS,
      "ranks of a pipeline, each with some layers, before the interruption; dp=4 is divided by it (1)", NULL,
      NULL },
    { "--vpp", "N", OPTION_INT, FIELD(vpp), 1, SHARDED_MOST_STAGES,
      "stages of each of them, whose passes are interleaved (1)", NULL, NULL },
    { "--steps", "N", OPTION_INT, FIELD(steps), 4, 1000000, "of training (120)", NULL, NULL },
    { "--seed", "N", OPTION_UINT64, FIELD(seed), 0, 1000000000,
      "of the weights, of the rows and of the step of the interruption (1)", NULL, NULL },
    { "--data", "DIR", OPTION_PATH, FIELD(data), 0, 0, "as for build/demo (data)", NULL, NULL },
    { "--out", "DIR", OPTION_PATH, FIELD(out), 0, 0, "where results go (out/sharded)", NULL, NULL },
    { "--overwrite", "", OPTION_FLAG, FIELD(overwrite), 0, 0, "replace a finished student that is there",
      NULL, NULL },
    { "--heldout-bytes", "N", OPTION_SIZE, FIELD(heldout_bytes), 1, 1000000000,
      "measure on no more of the held-out text (all)", NULL, NULL },
    { "--mpi", "", OPTION_FLAG, FIELD(mpi), 0, 0,
      "processes of MPI jobs as ranks, of build/demo-sharded-mpi only: it calls mpirun", NULL, NULL },
    { "--launch", "", OPTION_FLAG, FIELD(launch), 0, 0,
      "processes of this machine as ranks, started by the xdrun beside this program; one of them is killed",
      NULL, NULL },
    { "--lose", "N", OPTION_INT, FIELD(lose), 1, SHARDED_MOST_RANKS - 1,
      "with --launch, or --mpi and an MPI that has recovery: so many of the processes are killed one after "
      "another, and the others go on at once in "
      "a smaller world, on the largest mesh that they fill (0)",
      NULL, NULL },
    { "--restart", "N", OPTION_INT, FIELD(restart), 1, SHARDED_MOST_RANKS,
      "with --launch or --mpi: so many times one of the processes is killed, the others end, and all are "
      "started again from what was saved last: by xdrun as many as before, under MPI one fewer (0)",
      NULL, NULL },
    { "--leg", "N", OPTION_INT, FIELD(leg), 0, SHARDED_LEGS - 1,
      "what --mpi and --launch tell the processes that they start: which part of the way is theirs", NULL,
      NULL },
    { "--help", "", OPTION_FLAG, FIELD(help), 0, 0, "print this", NULL, NULL },
};

enum { SHARDED_OPTIONS = sizeof sharded_table / sizeof sharded_table[0] };

void sharded_print_help(void) {
    printf(
        "demo-sharded: trains a student on one rank, and again sharded over several, killed and resumed on "
        "others, and\ncompares the bits.\n\n");
    options_print(sharded_table, SHARDED_OPTIONS);
    printf("\nWith --pp the head is a weight of its own, not the embedding once more, and losses are sums of "
           "those of single "
           "rows,\non one rank too.\n");
    printf("\nWith tp or cp above 1 sums inside the model are made of pieces that do not depend on it, on "
           "one rank "
           "too.\n"
           "\nFor example, ranks in two groups that hold the student once each, a minute:\n"
           "  build/demo-sharded --wrap hsdp --steps 40 --out out/hsdp\n");
}

#if defined(SHARDED_MPI)
static const bool sharded_has_mpi = true;
#else
static const bool sharded_has_mpi = false;
#endif

/* What there is not yet is named; so is what cannot be. */
static bool sharded_check(sharded_options *o) {
    const demo_axes *a = &o->axes;
    const int ranks = a->dp * a->cp * a->tp * o->pp;
    if (o->launch && o->mpi)
        snprintf(o->problem, sizeof o->problem,
                 "--launch and --mpi: ranks are processes of one or the other");
    else if ((o->mpi || (o->leg >= 0 && !o->launch)) && !sharded_has_mpi)
        snprintf(o->problem, sizeof o->problem,
                 "--mpi needs build/demo-sharded-mpi: here ranks are threads of processes");
    else if (NN_POSITION_BLOCKS % a->cp != 0)
        snprintf(o->problem, sizeof o->problem,
                 "--mesh cp=%d: a sequence is %d blocks, and ranks have equally many", a->cp,
                 (int)NN_POSITION_BLOCKS);
    else if (a->cp > 1 && o->pp > 1)
        snprintf(o->problem, sizeof o->problem, "--mesh cp=%d and --pp %d: stages have whole sequences",
                 a->cp, o->pp);
    else if (ranks > SHARDED_MOST_RANKS)
        snprintf(o->problem, sizeof o->problem, "--mesh dp=%d,cp=%d,tp=%d%s has %d ranks, %d are the most",
                 a->dp, a->cp, a->tp, o->pp > 1 ? " in each stage" : "", ranks, SHARDED_MOST_RANKS);
    else if (o->vpp > 1 && o->pp == 1)
        snprintf(o->problem, sizeof o->problem, "--vpp %d without --pp: a pipeline of one rank has one stage",
                 o->vpp);
    else if (o->lose > 0 && o->mpi && !sharded_job_recovers())
        snprintf(o->problem, sizeof o->problem,
                 "--lose %d with --mpi: this MPI has no recovery, Open MPI 5 has; --restart %d starts the "
                 "job again",
                 o->lose, o->lose);
    else if (o->lose > 0 && !o->launch && !o->mpi)
        snprintf(o->problem, sizeof o->problem, "--lose %d without --launch or --mpi: threads end together",
                 o->lose);
    else if (o->lose >= ranks)
        snprintf(o->problem, sizeof o->problem, "--lose %d of %d ranks: nobody is left", o->lose, ranks);
    else if (o->restart > 0 && !o->launch && !o->mpi)
        snprintf(o->problem, sizeof o->problem,
                 "--restart %d without --launch or --mpi: threads end together", o->restart);
    else if (o->restart > 0 && o->lose > 0)
        snprintf(o->problem, sizeof o->problem,
                 "--lose %d and --restart %d: the others go on, or all are started again", o->lose,
                 o->restart);
    else if (o->mpi && o->restart >= ranks)
        snprintf(o->problem, sizeof o->problem, "--restart %d of %d ranks under MPI: nobody is left",
                 o->restart, ranks);
    else if (o->wrap == SHARDED_HSDP && (a->dp % 2 != 0 || DEMO_BATCH % 2 != 0))
        snprintf(o->problem, sizeof o->problem, "--wrap hsdp makes two groups: dp=%d is not even", a->dp);
    return !o->problem[0];
}

bool sharded_parse(int argc, char **argv, sharded_options *o) {
    memset(o, 0, sizeof *o);
    o->wrap = SHARDED_FSDP;
    o->pp = o->vpp = 1;
    o->steps = 120;
    o->seed = 1;
    o->leg = -1;
    o->data = "data";
    o->out = "out/sharded";
    if (!options_parse(sharded_table, SHARDED_OPTIONS, argc, argv, o, o->problem)) return false;
    if (o->axes.dp == 0) { /* no --mesh */
        o->axes.dp = o->pp < 4 ? 4 / o->pp : 1;
        o->axes.cp = o->axes.tp = 1;
    }
    return o->help || sharded_check(o);
}
