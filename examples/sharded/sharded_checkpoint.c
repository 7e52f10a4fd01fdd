/* sharded_checkpoint.c - saving by all ranks together, and loading on any others. */
#include "sharded.h"

#include <stdio.h>
#include <string.h>

/* The list that saves and loads have in common: the student, its optimizer, its average. */
static xd_checkpoint_network sharded_network(const sharded_student *s, xd_checkpoint_average *average) {
    xd_checkpoint_network network;
    memset(&network, 0, sizeof network);
    average->name = SHARDED_AVERAGE_NAME;
    average->ema = s->average;
    network.parts = s->parts;
    network.part_count = s->count;
    network.optimizer = s->optimizer;
    network.averages = average;
    network.average_count = 1;
    return network;
}

xd_result sharded_save(const sharded_student *s, const char *directory, int step) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = sharded_network(s, &average);
    xd_checkpoint_save_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.root = directory;
    desc.step = step;
    desc.networks = &network;
    desc.network_count = 1;
    desc.overwrite = true;
    return xd_checkpoint_save(s->world, &desc);
}

xd_result sharded_load(sharded_student *s, const char *directory) {
    xd_checkpoint_average average;
    const xd_checkpoint_network network = sharded_network(s, &average);
    xd_checkpoint_load_desc desc;
    xd_checkpoint_report report;
    memset(&desc, 0, sizeof desc);
    desc.root = directory;
    desc.step = XD_CHECKPOINT_NEWEST;
    desc.networks = &network;
    desc.network_count = 1;
    XD_TRY(xd_checkpoint_load(s->world, &desc, &report, NULL));
    s->done = (int)report.step;
    return XD_OK;
}

/* ---- what ranks hold ---- */

static const char *const sharded_numbers[] = { "loss", "soft", "hard", "gradient_norm", "learning_rate" };
enum { SHARDED_NUMBERS = sizeof sharded_numbers / sizeof sharded_numbers[0] };

/* In their order. */
static void sharded_list_numbers(demo_step *step, double *out[SHARDED_NUMBERS]) {
    out[0] = &step->loss;
    out[1] = &step->soft;
    out[2] = &step->hard;
    out[3] = &step->gradient_norm;
    out[4] = &step->learning_rate;
}

static xd_result sharded_read_numbers(xd_ctx *ctx, const char *text, demo_step *last) {
    double *numbers[SHARDED_NUMBERS];
    xd_json *root = NULL;
    bool well = true;
    sharded_list_numbers(last, numbers);
    XD_TRY(xd_json_load_memory(ctx, NULL, text, strlen(text), &root));
    for (int i = 0; i < SHARDED_NUMBERS; i++)
        well = xd_json_double(xd_json_find(root, sharded_numbers[i]), numbers[i]) && well;
    xd_json_destroy(ctx, root);
    return well ? XD_OK : XD_FAIL(ctx, XD_ERROR_FORMAT, "a step came to \"%.80s\"", text);
}

/* Seventeen digits tell every double from every other. */
static void sharded_write_numbers(demo_step *last, char text[256]) {
    double *numbers[SHARDED_NUMBERS];
    int used = 0;
    sharded_list_numbers(last, numbers);
    for (int i = 0; i < SHARDED_NUMBERS; i++)
        used += snprintf(text + used, 256 - (size_t)used, "%s\"%s\": %.17g", i ? ", " : "{",
                         sharded_numbers[i], *numbers[i]);
    snprintf(text + used, 256 - (size_t)used, "}");
}

xd_result sharded_inherit(sharded_student *s, const sharded_student *held, demo_step *last) {
    xd_checkpoint_average averages[2];
    const xd_checkpoint_network network = sharded_network(s, &averages[0]),
                                before = sharded_network(held ? held : s, &averages[1]);
    xd_state_inherit_desc desc;
    char own[256], *text = NULL;
    int64_t step = 0;
    memset(&desc, 0, sizeof desc);
    sharded_write_numbers(last, own);
    desc.from = held ? &before : NULL;
    desc.networks = &network;
    desc.network_count = 1;
    desc.step = held ? held->done : 0;
    desc.state = own;
    XD_TRY(xd_state_inherit(s->world, &desc, &step, &text));
    const xd_result result = sharded_read_numbers(s->rank->ctx, text, last);
    xd_release(s->rank->ctx, text);
    s->done = (int)step;
    return xd_agree(s->world, result);
}
