/* demo_options.c - the command line of the demonstration. */
#include "demo.h"

#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    xd_reduction mode;
} demo_reductions[] = { { "deterministic", XD_REDUCTION_DETERMINISTIC },
                        { "fast", XD_REDUCTION_FAST },
                        { "invariant", XD_REDUCTION_INVARIANT } };

enum { DEMO_REDUCTIONS = sizeof demo_reductions / sizeof demo_reductions[0] };

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

/* "dp=2,tp=2"; axes that are not named have one rank. */
static bool demo_parse_mesh(const char *text, demo_options *o) {
    o->dp = o->cp = o->tp = 1;
    while (*text) {
        char *end = NULL;
        int *axis = strncmp(text, "dp=", 3) == 0   ? &o->dp
                    : strncmp(text, "cp=", 3) == 0 ? &o->cp
                    : strncmp(text, "tp=", 3) == 0 ? &o->tp
                                                   : NULL;
        const long size = axis ? strtol(text + 3, &end, 10) : 0;
        if (!axis || end == text + 3 || size < 1 || size > NN_MOST_RANKS) return false;
        *axis = (int)size;
        if (*end && *end != ',') return false;
        text = *end ? end + 1 : end;
    }
    return true;
}

/* Names of files are put after folders, in buffers that leave room for this much. */
static bool demo_parse_path(const char *name, const char *value, demo_options *o) {
    const char **path = strcmp(name, "--data") == 0            ? &o->data
                        : strcmp(name, "--out") == 0           ? &o->out
                        : strcmp(name, "--arms") == 0          ? &o->arms
                        : strcmp(name, "--train-teacher") == 0 ? &o->teacher_text
                        : strcmp(name, "--eval") == 0          ? &o->eval
                        : strcmp(name, "--encode") == 0        ? &o->encode
                                                               : NULL;
    if (!path || strlen(value) > 400) return false;
    *path = value;
    return true;
}

static bool demo_parse_one(const char *name, const char *value, demo_options *o) {
    long number = 0;
    if (strcmp(name, "--ranks") == 0 && demo_number(value, 1, 64, &number))
        o->ranks = (int)number;
    else if (strcmp(name, "--steps") == 0 && demo_number(value, 1, 1000000, &number))
        o->steps = (int)number;
    else if (strcmp(name, "--seed") == 0 && demo_number(value, 0, 1000000000, &number))
        o->seed = (uint64_t)number;
    else if (strcmp(name, "--save-every") == 0 && demo_number(value, 1, 1000000, &number))
        o->save_every = (int)number;
    else if (strcmp(name, "--heldout-bytes") == 0 && demo_number(value, 1, 1000000000, &number))
        o->heldout_bytes = (size_t)number;
    else if (strcmp(name, "--reduction") == 0)
        return demo_parse_reduction(value, &o->reduction);
    else if (strcmp(name, "--mesh") == 0)
        return demo_parse_mesh(value, o);
    else
        return demo_parse_path(name, value, o);
    return true;
}

static bool demo_refuse(demo_options *o, const char *problem, const char *detail) {
    o->problem = problem;
    o->detail = detail;
    return false;
}

/* Fills in the mesh, and the number of ranks or processes. */
static bool demo_settle_mesh(demo_options *o, int world_ranks) {
    if (o->dp == 0) { /* no --mesh: all ranks split the batch */
        if (o->ranks == 0) o->ranks = world_ranks ? world_ranks : 2;
        o->dp = o->ranks;
        o->cp = o->tp = 1;
    }
    if (o->ranks == 0) o->ranks = o->dp * o->cp * o->tp;
    if (o->ranks != o->dp * o->cp * o->tp)
        return demo_refuse(o, "the mesh does not have as many ranks as --ranks", "");
    if (world_ranks && o->ranks != world_ranks)
        return demo_refuse(o, "the mesh does not have as many ranks as there are processes", "");
    if (o->dp > DEMO_BATCH || o->cp > DEMO_ROW)
        return demo_refuse(o, "an axis of the mesh is longer than what it splits", "");
    /* Sums inside the model have no leaves: a rank's part of a row or of a weight is no fixed unit. */
    if (o->reduction == XD_REDUCTION_INVARIANT && o->cp * o->tp > 1)
        return demo_refuse(o, "--reduction invariant works on dp meshes only", "");
    return true;
}

bool demo_parse(int argc, char **argv, int world_ranks, demo_options *o) {
    long seeds = 1;
    const char *wanted = getenv("SEEDS");
    memset(o, 0, sizeof *o);
    o->seed = 1;
    o->data = "data";
    o->out = "out";
    if (wanted && *wanted && !demo_number(wanted, 1, DEMO_MOST_SEEDS, &seeds))
        return demo_refuse(o, "SEEDS must be 1 to 8, not ", wanted);
    for (int i = 1; i < argc; i += 2) {
        if (strcmp(argv[i], "--resume") == 0) {
            o->resume = true;
            i--; /* it has no value */
            continue;
        }
        if (i + 1 == argc) return demo_refuse(o, "no value after ", argv[i]);
        if (!demo_parse_one(argv[i], argv[i + 1], o)) return demo_refuse(o, "cannot use ", argv[i]);
    }
    o->seeds = o->teacher_text ? 1 : (int)seeds;
    if (o->steps == 0) o->steps = o->teacher_text ? 1500 : 240;
    return demo_settle_mesh(o, world_ranks);
}
