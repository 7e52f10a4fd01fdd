/* This example imports a GPT-2 of Hugging Face into a model with other names and layouts, and
 * exports it again. Queries, keys and values are three weights here and one tensor in GPT-2. Two
 * ranks hold half of each weight and read little more. They multiply each weight by SCALE, in place
 * of training. FROM and TO are directories, and FROM must have the sizes below. Without arguments,
 * the example makes its own checkpoint.
 *
 *     cc -std=c99 -O2 examples/16_gpt2_names.c -o gpt2_names -lm -lpthread
 *     ./gpt2_names [FROM TO SCALE] */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LAYERS = 2, D = 8, TOKENS = 30, POSITIONS = 12 };

#define GPT2 "transformer.h.{}."
#define QKV GPT2 "attn.c_attn."
#define OURS "blocks.{}."
#define LINEAR .transpose = true /* [out, in] here, [in, out] in GPT-2 */
#define THIRD(i) .their_begin = (i) * D, .length = D

typedef struct line {
    xd_weight_map map;     /* the name in GPT-2, our name, and how the layouts differ */
    int64_t rows, columns; /* the shape of our weight */
} line;

/* The head of GPT-2 is its embedding, so no file contains it. */
static const line lines[] = {
    { { "transformer.wte.weight", "embed" }, TOKENS, D },
    { { "transformer.wpe.weight", "positions" }, POSITIONS, D },
    { { GPT2 "ln_1.weight", OURS "norm_1.weight" }, D, 0 },
    { { GPT2 "ln_1.bias", OURS "norm_1.bias" }, D, 0 },
    { { QKV "weight", OURS "q.weight", LINEAR, .dim = 1, THIRD(0) }, D, D },
    { { QKV "weight", OURS "k.weight", LINEAR, .dim = 1, THIRD(1) }, D, D },
    { { QKV "weight", OURS "v.weight", LINEAR, .dim = 1, THIRD(2) }, D, D },
    { { QKV "bias", OURS "q.bias", THIRD(0) }, D, 0 },
    { { QKV "bias", OURS "k.bias", THIRD(1) }, D, 0 },
    { { QKV "bias", OURS "v.bias", THIRD(2) }, D, 0 },
    { { GPT2 "attn.c_proj.weight", OURS "out.weight", LINEAR }, D, D },
    { { GPT2 "attn.c_proj.bias", OURS "out.bias" }, D, 0 },
    { { GPT2 "ln_2.weight", OURS "norm_2.weight" }, D, 0 },
    { { GPT2 "ln_2.bias", OURS "norm_2.bias" }, D, 0 },
    { { GPT2 "mlp.c_fc.weight", OURS "up.weight", LINEAR }, 4 * D, D },
    { { GPT2 "mlp.c_fc.bias", OURS "up.bias" }, 4 * D, 0 },
    { { GPT2 "mlp.c_proj.weight", OURS "down.weight", LINEAR }, D, 4 * D },
    { { GPT2 "mlp.c_proj.bias", OURS "down.bias" }, D, 0 },
    { { "transformer.ln_f.weight", "norm.weight" }, D, 0 },
    { { "transformer.ln_f.bias", "norm.bias" }, D, 0 },
};
enum { LINES = sizeof lines / sizeof *lines, MOST = LINES * LAYERS };

typedef struct run {
    const char *from, *to;
    float scale;
} run;

static xd_result describe(xd_model *model) {
    char name[64];
    for (int n = 0; n < MOST; n++) {
        const line *l = &lines[n / LAYERS];
        const int layer = n % LAYERS;
        const char *place = strstr(l->map.ours, "{}");
        if (!place && layer > 0) continue; /* the weight is not in a block */

        snprintf(name, sizeof name, "%s", l->map.ours);
        if (place) snprintf(name, sizeof name, "blocks.%d%s", layer, place + 2);
        const xd_weight_desc w = { .name = name, .dtype = XD_DTYPE_F32,
                                   .ndim = l->columns ? 2 : 1, .shape = { l->rows, l->columns },
                                   .init = { XD_INIT_NORMAL, .scale = 0.02f } };
        XD_TRY(xd_weight_add(xd_model_root(model), &w, NULL));
    }
    return xd_model_seal(model);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    const run *r = argument;
    xd_weight_map map[LINES];
    xd_tensor_part parts[MOST];
    xd_mapped_weights weights = { .parts = parts, .maps = map, .map_count = LINES };
    xd_model *model;
    xd_parallel *parallel;
    for (int i = 0; i < LINES; i++)
        map[i] = lines[i].map;
    XD_TRY(xd_model_create(xd_comm_ctx(world), NULL, &model));
    XD_TRY(describe(model));
    XD_TRY(xd_fsdp_create(model, &(xd_fsdp_desc){ .data = world }, &parallel));
    XD_TRY(xd_parallel_parts(parallel, MOST, parts, &weights.part_count));

    const xd_weights_import_desc reading = { .directory = r->from, .weights = weights };
    if (r->from) XD_TRY(xd_weights_import(world, &reading, NULL));
    for (int64_t i = 0; i < weights.part_count; i++)
        for (int64_t k = 0; k < parts[i].range.end - parts[i].range.begin; k++)
            ((float *)parts[i].data)[k] *= r->scale;
    /* Blocks show the new values after this call. */
    XD_TRY(xd_parallel_publish(parallel));
    const xd_weights_export_desc writing = { .directory = r->to, .weights = weights };
    XD_TRY(xd_weights_export(world, &writing));
    xd_parallel_destroy(parallel);
    xd_model_destroy(model);
    return XD_OK;
}

/* Checks that each element in directory `to` is the element in `from`, multiplied by the scale. */
static xd_result compare(xd_comm *self, void *argument) {
    const run *r = argument;
    xd_ctx *ctx = xd_comm_ctx(self);
    xd_weights *from, *to;
    int64_t elements = 0, wrong = 0;
    XD_TRY(xd_weights_open(ctx, &(xd_weights_desc){ .directory = r->from }, &from));
    XD_TRY(xd_weights_open(ctx, &(xd_weights_desc){ .directory = r->to }, &to));

    for (int64_t i = 0; i < xd_weights_describe(from).tensor_count; i++) {
        const xd_weights_tensor *info = xd_weights_at(from, i);
        const float *one = xd_weights_data(from, i);
        const float *two = xd_weights_data(to, xd_weights_find(to, info->name));
        const int64_t count = (int64_t)(info->end - info->begin) / 4;
        XD_REQUIRE(ctx, two, XD_ERROR_MISSING, "%s has no tensor %s", r->to, info->name);
        for (int64_t k = 0; k < count; k++)
            wrong += two[k] != r->scale * one[k];
        elements += count;
    }
    printf("%lld elements of GPT-2 read, multiplied and written; %lld are wrong\n",
           (long long)elements, (long long)wrong);

    xd_weights_close(from);
    xd_weights_close(to);
    return wrong ? XD_ERROR_DATA : XD_OK;
}

int main(int argc, char **argv) {
    run make = { .from = NULL, .to = "build/gpt2", .scale = 1.0f };
    run learn = { .from = "build/gpt2", .to = "build/gpt2-half", .scale = 0.5f };
    xd_result result = XD_OK;
    xd_error error = { 0 };
    mkdir("build", 0777);
    mkdir(make.to, 0777);
    mkdir(learn.to, 0777);

    if (argc > 3)
        learn = (run){ argv[1], argv[2], (float)atof(argv[3]) };
    else
        result = xd_run_threads(1, NULL, run_rank, &make, &error);
    if (result == XD_OK) result = xd_run_threads(2, NULL, run_rank, &learn, &error);
    if (result == XD_OK) result = xd_run_threads(1, NULL, compare, &learn, &error);
    if (result != XD_OK) fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
    return result != XD_OK;
}
