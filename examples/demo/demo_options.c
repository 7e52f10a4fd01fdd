/* demo_options.c - the command line of the demonstration. */
#include "demo.h"

#include "../common/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    xd_reduction mode;
} demo_reductions[] = { { "deterministic", XD_REDUCTION_DETERMINISTIC },
                        { "fast", XD_REDUCTION_FAST },
                        { "invariant", XD_REDUCTION_INVARIANT } };

enum { DEMO_REDUCTIONS = sizeof demo_reductions / sizeof demo_reductions[0] };

/* ---- values ---- */

const char *demo_reduction_name(xd_reduction reduction) {
    int i = 0; /* what is no mode means the default, which stands first */
    for (int j = 0; j < DEMO_REDUCTIONS; j++)
        if (demo_reductions[j].mode == reduction) i = j;
    return demo_reductions[i].name;
}

static bool demo_parse_reduction(const char *text, void *options) {
    for (int i = 0; i < DEMO_REDUCTIONS; i++)
        if (strcmp(text, demo_reductions[i].name) == 0) {
            ((demo_options *)options)->reduction = demo_reductions[i].mode;
            return true;
        }
    return false;
}

bool demo_parse_mesh(const char *text, demo_axes *out) {
    memset(out, 0, sizeof *out);
    for (;;) {
        char *end = NULL;
        int *axis = strncmp(text, "dp=", 3) == 0   ? &out->dp
                    : strncmp(text, "cp=", 3) == 0 ? &out->cp
                    : strncmp(text, "tp=", 3) == 0 ? &out->tp
                                                   : NULL;
        const long size = axis ? strtol(text + 3, &end, 10) : 0;
        if (!axis || *axis || end == text + 3 || size < 1 || size > NN_MOST_RANKS) return false;
        *axis = (int)size;
        if (*end == 0) break;
        if (*end != ',') return false;
        text = end + 1;
    }
    out->dp += out->dp == 0;
    out->cp += out->cp == 0;
    out->tp += out->tp == 0;
    return true;
}

static bool demo_set_mesh(const char *text, void *options) {
    return demo_parse_mesh(text, &((demo_options *)options)->axes);
}

static bool demo_refuse(demo_options *o, const char *problem) {
    snprintf(o->problem, sizeof o->problem, "%s", problem);
    return false;
}

/* ---- the options ---- */

#define FIELD(name) offsetof(demo_options, name)

static const option demo_option_table[] = {
    { "--arms", "NAME,NAME", OPTION_TEXT, FIELD(arms), 0, 0,
      "which of the students below (all there are data for)", "names of students with commas between them",
      NULL },
    { "--steps", "N", OPTION_INT, FIELD(steps), 1, 1000000, "of training (240; 1500 with --train-teacher)",
      NULL, NULL },
    { "--seed", "N", OPTION_UINT64, FIELD(seed), 0, 1000000000, "of the first run (1)", NULL, NULL },
    { "--data", "DIR", OPTION_PATH, FIELD(data), 0, 0,
      "text.txt to learn, heldout.txt to measure on; data/README.md says what else it may hold (data)", NULL,
      NULL },
    { "--out", "DIR", OPTION_PATH, FIELD(out), 0, 0, "where results go (out)", NULL, NULL },
    { "--overwrite", "", OPTION_FLAG, FIELD(overwrite), 0, 0, "replace a finished student that is there",
      NULL, NULL },
    { "--save-every", "N", OPTION_INT, FIELD(save_every), 1, 1000000,
      "steps between states to go on from (never)", NULL, NULL },
    { "--resume", "", OPTION_FLAG, FIELD(resume), 0, 0, "go on from the last state, with the same bits", NULL,
      NULL },
    { "--ranks", "N", OPTION_INT, FIELD(ranks), 1, NN_MOST_RANKS, "threads (2, or what --mesh needs)", NULL,
      NULL },
    { "--mesh", "dp=N,cp=N,tp=N", OPTION_PARSED, 0, 1, NN_MOST_RANKS,
      "what ranks split: rows of a batch, positions of a row, weights (dp = all ranks)",
      "dp=N, cp=N, tp=N with commas between them, once each, N", demo_set_mesh },
    { "--reduction", "MODE", OPTION_PARSED, FIELD(reduction), 0, 0,
      "deterministic, fast, or invariant: the same bits on every dp mesh (deterministic)",
      "deterministic, fast or invariant", demo_parse_reduction },
    { "--heldout-bytes", "N", OPTION_SIZE, FIELD(heldout_bytes), 1, 1000000000,
      "measure on no more of the held-out text (all)", NULL, NULL },
    { "--train-teacher", "TEXT", OPTION_PATH, FIELD(teacher_text), 0, 0,
      "train the teacher itself, into DATA/teacher", NULL, NULL },
    { "--eval", "DIR", OPTION_PATH, FIELD(eval), 0, 0, "measure a model directory and stop", NULL, NULL },
    { "--encode", "FILE", OPTION_PATH, FIELD(encode), 0, 0, "print the ids of a text, one a line, and stop",
      NULL, NULL },
    { "--help", "", OPTION_FLAG, FIELD(help), 0, 0, "print this", NULL, NULL },
};

enum { DEMO_OPTIONS = sizeof demo_option_table / sizeof demo_option_table[0] };

void demo_print_help(void) {
    printf("demo: distils a teacher into small students with another tokenizer.\n\n");
    options_print(demo_option_table, DEMO_OPTIONS);
    printf("\nStudents, and what each learns from:\n");
    demo_print_students();
    printf("\nThe environment's SEEDS is the number of seeds, 1 to %d (1): the table has their\n"
           "mean and spread.\n\n"
           "For example, three students of 60 steps on two ranks that share the\n"
           "vocabulary, about half a minute on a quiet machine:\n"
           "  build/demo --arms text,pkl,smollm2 --steps 60 --mesh tp=2 --out out/short\n",
           DEMO_MOST_SEEDS);
}

/* ---- all together ---- */

/* Fills in the mesh, and the number of ranks or processes. */
static bool demo_settle_mesh(demo_options *o, int world_ranks) {
    if (o->axes.dp == 0) { /* no --mesh: all ranks split the batch */
        if (o->ranks == 0) o->ranks = world_ranks ? world_ranks : 2;
        o->axes.dp = o->ranks;
        o->axes.cp = o->axes.tp = 1;
    }
    const int size = o->axes.dp * o->axes.cp * o->axes.tp;
    if (o->ranks == 0) o->ranks = size;
    if (o->ranks != size || (world_ranks && size != world_ranks)) {
        const bool processes = o->ranks == size;
        snprintf(o->problem, sizeof o->problem,
                 "the mesh dp=%d,cp=%d,tp=%d does not have as many ranks as %s: %d, not %d", o->axes.dp,
                 o->axes.cp, o->axes.tp, processes ? "there are processes" : "--ranks says", size,
                 processes ? world_ranks : o->ranks);
        return false;
    }
    if (size > NN_MOST_RANKS || o->axes.dp > DEMO_BATCH || o->axes.cp > DEMO_ROW) {
        snprintf(
            o->problem, sizeof o->problem,
            "the mesh dp=%d,cp=%d,tp=%d is too large: dp is %d at most, cp %d, and all ranks together %d",
            o->axes.dp, o->axes.cp, o->axes.tp, DEMO_BATCH, DEMO_ROW, (int)NN_MOST_RANKS);
        return false;
    }
    /* Sums inside the model have no leaves: a rank's part of a row or of a weight is no fixed unit. */
    if (o->reduction == XD_REDUCTION_INVARIANT && o->axes.cp * o->axes.tp > 1)
        return demo_refuse(o, "--reduction invariant works on dp meshes only");
    return true;
}

bool demo_parse(int argc, char **argv, int world_ranks, demo_options *o) {
    long seeds = 1;
    const char *wanted = getenv("SEEDS");
    memset(o, 0, sizeof *o);
    o->seed = 1;
    o->data = "data";
    o->out = "out";
    if (wanted && *wanted && !options_number(wanted, 1, DEMO_MOST_SEEDS, &seeds)) {
        snprintf(o->problem, sizeof o->problem, "SEEDS must be 1 to %d, not %.60s", DEMO_MOST_SEEDS, wanted);
        return false;
    }
    if (!options_parse(demo_option_table, DEMO_OPTIONS, argc, argv, o, o->problem)) return false;
    o->seeds = o->teacher_text ? 1 : (int)seeds;
    if (o->steps == 0) o->steps = o->teacher_text ? 1500 : 240;
    return o->help || demo_settle_mesh(o, world_ranks);
}
