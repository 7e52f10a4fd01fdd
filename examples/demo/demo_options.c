/* demo_options.c - the command line of the demonstration. */
#include "demo.h"

#include <stddef.h>
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

/* ---- the options ---- */

typedef enum demo_kind {
    DEMO_FLAG,
    DEMO_INT,
    DEMO_UINT64,
    DEMO_SIZE,
    DEMO_PATH,
    DEMO_NAMES,
    DEMO_REDUCTION,
    DEMO_MESH
} demo_kind;

typedef struct demo_option {
    const char *name, *value; /* as --help shows them */
    demo_kind kind;
    size_t field; /* of demo_options */
    long least, most;
    const char *help;
} demo_option;

/* Names of files are put after folders, in buffers that leave room for this much. */
enum { DEMO_MOST_PATH = 400 };

#define FIELD(name) offsetof(demo_options, name)

static const demo_option demo_option_table[] = {
    { "--arms", "NAME,NAME", DEMO_NAMES, FIELD(arms), 0, 0,
      "which of the students below (all there are data for)" },
    { "--steps", "N", DEMO_INT, FIELD(steps), 1, 1000000, "of training (240; 1500 with --train-teacher)" },
    { "--seed", "N", DEMO_UINT64, FIELD(seed), 0, 1000000000, "of the first run (1)" },
    { "--data", "DIR", DEMO_PATH, FIELD(data), 0, 0,
      "text.txt to learn, heldout.txt to measure on; data/README.md says what else it may hold (data)" },
    { "--out", "DIR", DEMO_PATH, FIELD(out), 0, 0, "where results go (out)" },
    { "--overwrite", "", DEMO_FLAG, FIELD(overwrite), 0, 0, "replace a finished student that is there" },
    { "--save-every", "N", DEMO_INT, FIELD(save_every), 1, 1000000,
      "steps between states to go on from (never)" },
    { "--resume", "", DEMO_FLAG, FIELD(resume), 0, 0, "go on from the last state, with the same bits" },
    { "--ranks", "N", DEMO_INT, FIELD(ranks), 1, NN_MOST_RANKS, "threads (2, or what --mesh needs)" },
    { "--mesh", "dp=N,cp=N,tp=N", DEMO_MESH, 0, 1, NN_MOST_RANKS,
      "what ranks split: rows of a batch, positions of a row, weights (dp = all ranks)" },
    { "--reduction", "MODE", DEMO_REDUCTION, FIELD(reduction), 0, 0,
      "deterministic, fast, or invariant: the same bits on every dp mesh (deterministic)" },
    { "--heldout-bytes", "N", DEMO_SIZE, FIELD(heldout_bytes), 1, 1000000000,
      "measure on no more of the held-out text (all)" },
    { "--train-teacher", "TEXT", DEMO_PATH, FIELD(teacher_text), 0, 0,
      "train the teacher itself, into DATA/teacher" },
    { "--eval", "DIR", DEMO_PATH, FIELD(eval), 0, 0, "measure a model directory and stop" },
    { "--encode", "FILE", DEMO_PATH, FIELD(encode), 0, 0, "print the ids of a text, one a line, and stop" },
    { "--help", "", DEMO_FLAG, FIELD(help), 0, 0, "print this" },
};

enum { DEMO_OPTIONS = sizeof demo_option_table / sizeof demo_option_table[0] };

static const demo_option *demo_find_option(const char *name) {
    for (int i = 0; i < DEMO_OPTIONS; i++)
        if (strcmp(name, demo_option_table[i].name) == 0) return &demo_option_table[i];
    return NULL;
}

void demo_print_help(void) {
    printf("demo: distils a teacher into small students with another tokenizer, and compares them.\n\n");
    for (int i = 0; i < DEMO_OPTIONS; i++) {
        const demo_option *o = &demo_option_table[i];
        printf("  %s %s%*s %s", o->name, o->value, 29 - (int)(strlen(o->name) + strlen(o->value)), "",
               o->help);
        if (o->most) printf("; %ld to %ld", o->least, o->most);
        putchar('\n');
    }
    printf("\nStudents, and what each learns from:\n");
    demo_print_students();
    printf("\nThe environment's SEEDS is the number of seeds, 1 to %d (1): the table has their mean and "
           "spread.\n\n"
           "For example, three students of 60 steps on two ranks that share the vocabulary, about half a "
           "minute:\n"
           "  build/demo --arms text,pkl,smollm2 --steps 60 --mesh tp=2 --out out/short\n",
           DEMO_MOST_SEEDS);
}

/* ---- values ---- */

const char *demo_reduction_name(xd_reduction reduction) {
    int i = 0; /* what is no mode means the default, which stands first */
    for (int j = 0; j < DEMO_REDUCTIONS; j++)
        if (demo_reductions[j].mode == reduction) i = j;
    return demo_reductions[i].name;
}

static bool demo_parse_reduction(const char *text, xd_reduction *out) {
    for (int i = 0; i < DEMO_REDUCTIONS; i++)
        if (strcmp(text, demo_reductions[i].name) == 0) {
            *out = demo_reductions[i].mode;
            return true;
        }
    return false;
}

static bool demo_number(const char *text, long least, long most, long *out) {
    char *end = NULL;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) return false;
    *out = value;
    return true;
}

/* "dp=2,tp=2": each axis once at most; those that are not named have one rank. */
static bool demo_parse_mesh(const char *text, demo_options *o) {
    o->dp = o->cp = o->tp = 0;
    for (;;) {
        char *end = NULL;
        int *axis = strncmp(text, "dp=", 3) == 0   ? &o->dp
                    : strncmp(text, "cp=", 3) == 0 ? &o->cp
                    : strncmp(text, "tp=", 3) == 0 ? &o->tp
                                                   : NULL;
        const long size = axis ? strtol(text + 3, &end, 10) : 0;
        if (!axis || *axis || end == text + 3 || size < 1 || size > NN_MOST_RANKS) return false;
        *axis = (int)size;
        if (*end == 0) break;
        if (*end != ',') return false;
        text = end + 1;
    }
    o->dp += o->dp == 0;
    o->cp += o->cp == 0;
    o->tp += o->tp == 0;
    return true;
}

static bool demo_refuse(demo_options *o, const char *problem) {
    snprintf(o->problem, sizeof o->problem, "%s", problem);
    return false;
}

/* What the option takes, for somebody who gave it something else, or nothing: `value` is NULL then. */
static bool demo_refuse_value(demo_options *o, const demo_option *option, const char *value) {
    char range[96];
    switch (option->kind) {
    case DEMO_PATH:
        snprintf(range, sizeof range, "a path of 1 to %d bytes that does not begin with --", DEMO_MOST_PATH);
        break;
    case DEMO_NAMES: snprintf(range, sizeof range, "names of students with commas between them"); break;
    case DEMO_REDUCTION: snprintf(range, sizeof range, "deterministic, fast or invariant"); break;
    case DEMO_MESH:
        snprintf(range, sizeof range, "dp=N, cp=N, tp=N with commas between them, once each, N %ld to %ld",
                 option->least, option->most);
        break;
    default: snprintf(range, sizeof range, "a number from %ld to %ld", option->least, option->most); break;
    }
    if (value)
        snprintf(o->problem, sizeof o->problem, "%s takes %s, not \"%.60s\"", option->name, range, value);
    else
        snprintf(o->problem, sizeof o->problem, "%s takes %s; nothing follows it", option->name, range);
    return false;
}

/* `value` is NULL for a flag. */
static bool demo_set(demo_options *o, const demo_option *option, const char *value) {
    char *const field = (char *)o + option->field;
    const bool number = option->kind == DEMO_INT || option->kind == DEMO_UINT64 || option->kind == DEMO_SIZE;
    long n = 0;
    if (number && !demo_number(value, option->least, option->most, &n)) return false;
    switch (option->kind) {
    case DEMO_FLAG: *(bool *)(void *)field = true; return true;
    case DEMO_INT: *(int *)(void *)field = (int)n; return true;
    case DEMO_UINT64: *(uint64_t *)(void *)field = (uint64_t)n; return true;
    case DEMO_SIZE: *(size_t *)(void *)field = (size_t)n; return true;
    case DEMO_PATH:
        *(const char **)(void *)field = value;
        return *value && strncmp(value, "--", 2) != 0 && strlen(value) <= DEMO_MOST_PATH;
    case DEMO_NAMES: *(const char **)(void *)field = value; return *value != 0;
    case DEMO_REDUCTION: return demo_parse_reduction(value, (xd_reduction *)(void *)field);
    case DEMO_MESH: return demo_parse_mesh(value, o);
    }
    return false;
}

/* ---- all together ---- */

/* Fills in the mesh, and the number of ranks or processes. */
static bool demo_settle_mesh(demo_options *o, int world_ranks) {
    if (o->dp == 0) { /* no --mesh: all ranks split the batch */
        if (o->ranks == 0) o->ranks = world_ranks ? world_ranks : 2;
        o->dp = o->ranks;
        o->cp = o->tp = 1;
    }
    const int size = o->dp * o->cp * o->tp;
    if (o->ranks == 0) o->ranks = size;
    if (o->ranks != size || (world_ranks && size != world_ranks)) {
        const bool processes = o->ranks == size;
        snprintf(o->problem, sizeof o->problem,
                 "the mesh dp=%d,cp=%d,tp=%d does not have as many ranks as %s: %d, not %d", o->dp, o->cp,
                 o->tp, processes ? "there are processes" : "--ranks says", size,
                 processes ? world_ranks : o->ranks);
        return false;
    }
    if (size > NN_MOST_RANKS || o->dp > DEMO_BATCH || o->cp > DEMO_ROW) {
        snprintf(
            o->problem, sizeof o->problem,
            "the mesh dp=%d,cp=%d,tp=%d is too large: dp is %d at most, cp %d, and all ranks together %d",
            o->dp, o->cp, o->tp, DEMO_BATCH, DEMO_ROW, (int)NN_MOST_RANKS);
        return false;
    }
    /* Sums inside the model have no leaves: a rank's part of a row or of a weight is no fixed unit. */
    if (o->reduction == XD_REDUCTION_INVARIANT && o->cp * o->tp > 1)
        return demo_refuse(o, "--reduction invariant works on dp meshes only");
    return true;
}

static bool demo_parse_all(int argc, char **argv, demo_options *o) {
    for (int i = 1; i < argc; i++) {
        const demo_option *option = demo_find_option(argv[i]);
        const char *value = NULL;
        if (!option) {
            snprintf(o->problem, sizeof o->problem, "there is no option %.60s", argv[i]);
            return false;
        }
        if (option->kind != DEMO_FLAG) {
            value = argv[++i];
            if (!value) return demo_refuse_value(o, option, NULL);
        }
        if (!demo_set(o, option, value)) return demo_refuse_value(o, option, value);
    }
    return true;
}

bool demo_parse(int argc, char **argv, int world_ranks, demo_options *o) {
    long seeds = 1;
    const char *wanted = getenv("SEEDS");
    memset(o, 0, sizeof *o);
    o->seed = 1;
    o->data = "data";
    o->out = "out";
    if (wanted && *wanted && !demo_number(wanted, 1, DEMO_MOST_SEEDS, &seeds)) {
        snprintf(o->problem, sizeof o->problem, "SEEDS must be 1 to %d, not %.60s", DEMO_MOST_SEEDS, wanted);
        return false;
    }
    if (!demo_parse_all(argc, argv, o)) return false;
    o->seeds = o->teacher_text ? 1 : (int)seeds;
    if (o->steps == 0) o->steps = o->teacher_text ? 1500 : 240;
    return o->help || demo_settle_mesh(o, world_ranks);
}
