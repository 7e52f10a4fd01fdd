/* demo_arms.c - the students there are, and which of them a run trains. */
#include "demo.h"

#include <stdio.h>
#include <string.h>

/* A student, and what --help says it learns from. */
typedef struct demo_choice {
    demo_arm arm;
    const char *help;
} demo_choice;

static const demo_choice demo_choices[] = {
    { { "text", "text alone", DEMO_TEXT_ALONE, 0.0, 1.0, 1.0, 3e-3, 1.0 }, "the text, without a teacher" },
    { { "pkl", "P-KL", DEMO_PROJECTED, 0.76, 0.1, 1.0, 3e-3, 1.0 },
      "the teacher's distribution, projected to the student's tokens" },
    { { "gold", "gold", DEMO_GOLD, 0.4, 0.5, 1.0, 3e-3, 1.0 },
      "the teacher: tokens that both have, the others by rank" },
    { { "hkl", "H-KL", DEMO_HYBRID, 0.4, 0.5, 1.0, 3e-3, 1.0 },
      "the same; a token's likeliest piece counts as the same token" },
    { { "chunk", "chunk likelihood", DEMO_LIKELIHOOD, 0.5, 1.0, 1.0, 3e-3, 1.0 },
      "the teacher, by how likely each finds the chunks of the text" },
    { { "smollm2", "SmolLM2's cache", DEMO_RECORDED, 0.68, 0.1, 1.0, 3e-3, 1.0 },
      "a file of what SmolLM2-135M said about the text" },
    /* Where text is scarce, what one learns from it alone is the text. */
    { { "text-fifth", "a fifth, alone", DEMO_TEXT_ALONE, 0.0, 1.0, 1.0, 3e-3, 0.2 },
      "the first fifth of the text, without a teacher" },
    { { "smollm2-fifth", "a fifth, SmolLM2", DEMO_RECORDED, 1.0, 0.1, 1.0, 3e-3, 0.2 },
      "the first fifth of the text, and that file" },
};

enum { DEMO_CHOICES = sizeof demo_choices / sizeof demo_choices[0] };

static const demo_arm demo_teacher_arm = { "teacher", "teacher", DEMO_TEXT_ALONE, 0.0, 1.0, 1.0, 2e-3, 1.0 };

void demo_print_students(void) {
    for (int i = 0; i < DEMO_CHOICES; i++)
        printf("  %-15s %s\n", demo_choices[i].arm.key, demo_choices[i].help);
}

/* The arm whose key is `length` bytes long, NULL when there is none. */
static const demo_arm *demo_find_arm(const char *key, size_t length) {
    for (int i = 0; i < DEMO_CHOICES; i++) {
        const demo_arm *arm = &demo_choices[i].arm;
        if (strlen(arm->key) == length && memcmp(arm->key, key, length) == 0) return arm;
    }
    return NULL;
}

/* Every key, as --arms takes them. */
static void demo_list_keys(char out[256]) {
    int used = 0;
    for (int i = 0; i < DEMO_CHOICES && used < 256; i++)
        used += snprintf(out + used, (size_t)(256 - used), "%s%s", i ? ", " : "", demo_choices[i].arm.key);
}

/* Metrics and states are told apart by the keys, so each stands once. */
static xd_result demo_add_arm(xd_ctx *ctx, const demo_arm *arm, demo_job *job) {
    for (int i = 0; i < job->arm_count; i++)
        XD_REQUIRE(ctx, strcmp(job->arms[i].key, arm->key) != 0, XD_ERROR_ARGUMENT, "--arms names %s twice",
                   arm->key);
    job->arms[job->arm_count++] = *arm;
    return XD_OK;
}

/* The arms that --arms names, in its order. */
static xd_result demo_choose_arms(xd_ctx *ctx, const char *names, demo_job *job) {
    char keys[256];
    demo_list_keys(keys);
    while (*names) {
        const size_t length = strcspn(names, ",");
        const demo_arm *arm = demo_find_arm(names, length);
        XD_REQUIRE(ctx, arm, XD_ERROR_ARGUMENT, "cannot run the arm \"%.*s\": there are %s", (int)length,
                   names, keys);
        XD_TRY(demo_add_arm(ctx, arm, job));
        names += length + (names[length] == ',');
    }
    return XD_OK;
}

xd_result demo_fill_arms(xd_ctx *ctx, const demo_options *o, bool has_cache, demo_job *job) {
    if (o->teacher_text) return demo_add_arm(ctx, &demo_teacher_arm, job);
    if (o->arms) XD_TRY(demo_choose_arms(ctx, o->arms, job));
    for (int i = 0; i < DEMO_CHOICES && !o->arms; i++)
        if (demo_choices[i].arm.signal != DEMO_RECORDED || has_cache)
            XD_TRY(demo_add_arm(ctx, &demo_choices[i].arm, job));
    for (int i = job->arm_count - 1; i >= 0; i--)
        if (job->arms[i].signal != DEMO_TEXT_ALONE) job->saved_arm = i;
    return XD_OK;
}
