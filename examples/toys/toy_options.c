/* toy_options.c - the command line. */
#include "toys.h"

#include "../common/options.h"

#include <stdio.h>
#include <string.h>

static bool toy_parse_kind(const char *text, void *options) {
    toy_options *o = (toy_options *)options;
    for (int kind = 0; kind < TOY_KINDS; kind++)
        if (strcmp(text, toy_names[kind]) == 0) o->toy = kind;
    if (strcmp(text, "all") == 0) o->toy = TOY_KINDS;
    return o->toy >= 0;
}

#define FIELD(name) offsetof(toy_options, name)

static const option toy_table[] = {
    { "--toy", "NAME", OPTION_PARSED, 0, 0, 0, "moons, gaussians or all (all)", "moons, gaussians or all",
      toy_parse_kind },
    { "--steps", "N", OPTION_INT, FIELD(steps), 1, 1000000, "of each student (600)", NULL, NULL },
    { "--teacher-steps", "N", OPTION_INT, FIELD(teacher_steps), 1, 1000000, "of the teacher (3000)", NULL,
      NULL },
    { "--ranks", "N", OPTION_INT, FIELD(ranks), 1, TOY_MICRO_BATCHES,
      "threads that share a batch, to the same bits (2)", NULL, NULL },
    { "--rate", "R", OPTION_DOUBLE, FIELD(rate), 0, 0, "learning rate of the students (0.0003)", NULL, NULL,
      1e-7, 1.0 },
    { "--fake-rate", "R", OPTION_DOUBLE, FIELD(fake_rate), 0, 0, "of their fake scores (0.002)", NULL, NULL,
      1e-7, 1.0 },
    { "--turn", "N", OPTION_INT, FIELD(turn), 2, 100,
      "one step of the student, and N - 1 of its fake score (5)", NULL, NULL },
    { "--seed", "N", OPTION_UINT64, FIELD(seed), 0, 1000000000, "of weights, data and noise (1)", NULL,
      NULL },
    { "--out", "DIR", OPTION_PATH, FIELD(out), 0, 0, "where table and plot go, over those before (out/toys)",
      NULL, NULL },
    { "--help", "", OPTION_FLAG, FIELD(help), 0, 0, "print this", NULL, NULL },
};

enum { TOY_OPTIONS = sizeof toy_table / sizeof toy_table[0] };

void toy_print_help(void) {
    printf("demo-toys: distils teachers of points in the plane into students of four steps and of one.\n\n");
    options_print(toy_table, TOY_OPTIONS);
    printf("\nFor example, seconds:\n  build/demo-toys --toy moons --steps 100\n");
}

bool toy_parse(int argc, char **argv, toy_options *o) {
    memset(o, 0, sizeof *o);
    o->toy = -1; /* what an unknown name leaves */
    o->steps = 600;
    o->teacher_steps = 3000;
    o->rate = 3e-4;
    o->fake_rate = 2e-3;
    o->turn = 5;
    o->ranks = 2;
    o->seed = 1;
    o->out = "out/toys";
    if (!options_parse(toy_table, TOY_OPTIONS, argc, argv, o, o->problem)) return false;
    if (o->toy < 0) o->toy = TOY_KINDS;
    return true;
}
