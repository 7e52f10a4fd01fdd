/* images_options.c - the command line, and what follows from it for the recipes. */
#include "images.h"

#include "../common/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef IMAGES_LEAD
#    define IMAGES_LEAD 20 /* tests make it small */
#endif

static bool images_parse_mesh(const char *text, void *options) {
    return images_mesh_parse(text, &((images_options *)options)->mesh);
}

static bool images_parse_weight(const char *text, double *out) {
    char *end = NULL;
    *out = strtod(text, &end);
    return end != text && !*end && *out > 0.0 && *out <= 10.0;
}

static bool images_parse_gan(const char *text, void *options) {
    return images_parse_weight(text, &((images_options *)options)->gan);
}

static bool images_parse_gan_r1(const char *text, void *options) {
    return images_parse_weight(text, &((images_options *)options)->gan_r1);
}

#define FIELD(name) offsetof(images_options, name)

static const option images_table[] = {
    { "--mesh", "AXES", OPTION_PARSED, 0, 1, IMAGES_MOST_RANKS,
      "dp=N, fsdp=N or hsdp=GxN: ranks that hold networks whole, in parts, or in parts in each of G groups; "
      "cp=N, behind a comma or alone: ranks that share each picture (dp=2; under MPI: of all processes)",
      "dp=N, fsdp=N or hsdp=GxN with G a power of two, and cp=2 or cp=4 behind a comma, ranks in all",
      images_parse_mesh },
    { "--warm-up", "N", OPTION_INT, FIELD(warm_up), 1, 1000000,
      "steps of regression before the 4-step student (80)", NULL, NULL },
    { "--steps", "N", OPTION_INT, FIELD(steps), 1, 1000000, "of the 4-step student (40)", NULL, NULL },
    { "--one-steps", "N", OPTION_INT, FIELD(one_steps), 1, 1000000, "of the 1-step student (350)", NULL,
      NULL },
    { "--count", "N", OPTION_INT, FIELD(count), 100, 1000000, "images behind each distance (5000)", NULL,
      NULL },
    { "--generations", "N", OPTION_INT, FIELD(generations), 1, IMAGES_MOST_GENERATIONS,
      "seeds of noise that distances are means of (2)", NULL, NULL },
    { "--teacher-50", "", OPTION_FLAG, FIELD(teacher_50), 0, 0,
      "measure the teacher at 50 steps too, instead of telling the figure that came with it", NULL, NULL },
    { "--seed", "N", OPTION_UINT64, FIELD(seed), 0, 1000000000, "of training (1)", NULL, NULL },
    { "--gan", "W", OPTION_PARSED, 0, 0, 0,
      "add an adversarial term of this weight, with a discriminator that sees real pictures too",
      "a number above 0, at most 10", images_parse_gan },
    { "--gan-r1", "W", OPTION_PARSED, 0, 0, 0,
      "with --gan: penalty of this weight on the discriminator's slope at real pictures",
      "a number above 0, at most 10", images_parse_gan_r1 },
    { "--real", "DIR", OPTION_PATH, FIELD(real), 0, 0, "with --gan: the full set (build/images)", NULL,
      NULL },
    { "--save-every", "N", OPTION_INT, FIELD(save_every), 1, 1000000,
      "student's steps between checkpoints, in warm-up too (10)", NULL, NULL },
    { "--resume", "", OPTION_FLAG, FIELD(resume), 0, 0, "go on from the last checkpoints, with the same bits",
      NULL, NULL },
    { "--data", "DIR", OPTION_PATH, FIELD(data), 0, 0, "teacher, classifier and test pictures (data/images)",
      NULL, NULL },
    { "--out", "DIR", OPTION_PATH, FIELD(out), 0, 0, "where results go (out/images)", NULL, NULL },
    { "--overwrite", "", OPTION_FLAG, FIELD(overwrite), 0, 0, "replace an older run that is there", NULL,
      NULL },
    { "--train-teacher", "DIR", OPTION_PATH, FIELD(train_teacher), 0, 0,
      "train the teacher itself on the full set in DIR, into DATA/teacher, and stop", NULL, NULL },
    { "--teacher-steps", "N", OPTION_INT, FIELD(teacher_steps), 1, 1000000, "of that (1720)", NULL, NULL },
    { "--help", "", OPTION_FLAG, FIELD(help), 0, 0, "print this", NULL, NULL },
};

enum { IMAGES_OPTIONS = sizeof images_table / sizeof images_table[0] };

void images_print_help(void) {
    printf("demo-images: distils a diffusion model of 50 steps into students of 4 steps and of 1 (DMD2), and "
           "compares "
           "their images.\n\n");
    options_print(images_table, IMAGES_OPTIONS);
    printf("\nFor example, a short form on two ranks that hold the networks in parts:\n"
           "  build/demo-images --mesh fsdp=2 --warm-up 5 --steps 5 --one-steps 5 --count 200 --out "
           "out/short\n");
}

static bool images_count_ranks(int processes, images_options *o) {
    if (o->mesh.data == 0) {
        o->mesh.data = processes > 0 ? processes : 2;
        o->mesh.cp = 1;
    }
    o->ranks = o->mesh.data * o->mesh.cp;
    if (processes == 0 || o->ranks == processes) return true;
    snprintf(o->problem, sizeof o->problem, "--mesh takes as many ranks as there are processes, %d, not %d",
             processes, o->ranks);
    return false;
}

static bool images_check_teacher(images_options *o) {
    if (!o->train_teacher || o->mesh.cp < 2) return true;
    snprintf(o->problem, sizeof o->problem, "--train-teacher takes whole pictures: --mesh without cp=%d",
             o->mesh.cp);
    return false;
}

static bool images_check_gan(images_options *o) {
    if (o->gan > 0.0 || o->gan_r1 == 0.0) return true;
    snprintf(o->problem, sizeof o->problem, "--gan-r1 %g is of a discriminator, which --gan adds", o->gan_r1);
    return false;
}

bool images_parse(int argc, char **argv, int processes, images_options *o) {
    memset(o, 0, sizeof *o);
    o->warm_up = 80;
    o->steps = 40;
    o->one_steps = 350;
    o->count = 5000;
    o->generations = 2;
    o->save_every = 10;
    o->seed = 1;
    o->teacher_steps = 1720;
    o->data = "data/images";
    o->out = "out/images";
    o->real = "build/images";
    return options_parse(images_table, IMAGES_OPTIONS, argc, argv, o, o->problem) && images_check_gan(o) &&
           images_check_teacher(o) && images_count_ranks(processes, o);
}

/* What was found to work on these images: rates of the student fall to a twentieth because long runs of several rungs drift. */
void images_recipes(const images_options *options, images_recipe out[IMAGES_STUDENTS]) {
    static const images_recipe four = {
        .name = "steps-4",
        .rungs = 4,
        .list = { 0.999, 0.74925, 0.4995, 0.24975, 0.0 },
        .lead = IMAGES_LEAD,
        .critics = 4,
        .batch = 128,
        .warming = { { 2e-4, 0, 0.0, 0.0 }, 0.9, 0.99, 0.0, XD_EMA_RAMP, 0.98 },
        .student = { { 2e-5, 20, 0.0, 0.05 }, 0.0, 0.999, 0.0, XD_EMA_RAMP, 0.99 },
        .fake = { { 2e-4, 0, 1.0, 1.0 }, 0.9, 0.999, 0.0, XD_EMA_RAMP, 0.99 },
        .judge = { { 2e-4, 0, 1.0, 1.0 }, 0.0, 0.99, 0.01, XD_EMA_RAMP, 0.0 },
    };
    static const images_recipe one = {
        .name = "steps-1",
        .rungs = 1,
        .list = { 0.999, 0.0 },
        .critics = 3,
        .batch = 64,
        .student = { { 2e-4, 0, 0.5, 0.05 }, 0.0, 0.99, 0.0, XD_EMA_RAMP, 0.99 },
        .fake = { { 8e-4, 0, 1.0, 1.0 }, 0.0, 0.99, 0.0, XD_EMA_RAMP, 0.99 },
        .judge = { { 2e-4, 0, 1.0, 1.0 }, 0.0, 0.99, 0.01, XD_EMA_RAMP, 0.0 },
    };
    out[IMAGES_FOUR] = four;
    out[IMAGES_FOUR].warm_up = options->warm_up;
    out[IMAGES_FOUR].steps = options->steps;
    out[IMAGES_ONE] = one;
    out[IMAGES_ONE].steps = options->one_steps;
    for (int i = 0; i < IMAGES_STUDENTS; i++) {
        out[i].gan = options->gan;
        out[i].gan_r1 = options->gan_r1;
    }
}
