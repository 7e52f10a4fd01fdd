/* A GPT-2 under the names and in the layouts that Hugging Face gives it, read into a model that has its own, and written
 * back: linear layers are [out, in] here and [in, out] there; queries, keys and values are three weights here and one tensor
 * there.
 *
 *     cc -std=c99 -O2 examples/16_gpt2_names.c -o gpt2_names -lm -lpthread
 *     ./gpt2_names [FROM TO SCALE]     directories; FROM has these sizes. Without them it makes its own
 * Two ranks hold half of each weight and read little more. They multiply it by SCALE, where a lesson would be. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
enum { LAYERS = 2, D = 8, TOKENS = 30, POSITIONS = 12 };
#define L "transformer.h.{}."
#define QKV L "attn.c_attn."

/* What is what, and the shapes of ours: all that is known here of GPT-2. Its head is the embedding, and in no file. */
static const struct line { xd_weight_map map; int64_t rows, columns; } lines[] = {
    { { "transformer.wte.weight", "embed" }, TOKENS, D }, { { "transformer.wpe.weight", "positions" }, POSITIONS, D },
    { { L "ln_1.weight", "blocks.{}.norm_1.weight" }, D, 0 }, { { L "ln_1.bias", "blocks.{}.norm_1.bias" }, D, 0 },
    { { QKV "weight", "blocks.{}.q.weight", .transpose = true, .dim = 1, .length = D }, D, D },
    { { QKV "weight", "blocks.{}.k.weight", .transpose = true, .dim = 1, .their_begin = D, .length = D }, D, D },
    { { QKV "weight", "blocks.{}.v.weight", .transpose = true, .dim = 1, .their_begin = 2 * D, .length = D }, D, D },
    { { QKV "bias", "blocks.{}.q.bias", .length = D }, D, 0 }, { { QKV "bias", "blocks.{}.k.bias", .their_begin = D, .length = D }, D, 0 },
    { { QKV "bias", "blocks.{}.v.bias", .their_begin = 2 * D, .length = D }, D, 0 },
    { { L "attn.c_proj.weight", "blocks.{}.out.weight", .transpose = true }, D, D },
    { { L "attn.c_proj.bias", "blocks.{}.out.bias" }, D, 0 },
    { { L "ln_2.weight", "blocks.{}.norm_2.weight" }, D, 0 }, { { L "ln_2.bias", "blocks.{}.norm_2.bias" }, D, 0 },
    { { L "mlp.c_fc.weight", "blocks.{}.up.weight", .transpose = true }, 4 * D, D },
    { { L "mlp.c_fc.bias", "blocks.{}.up.bias" }, 4 * D, 0 },
    { { L "mlp.c_proj.weight", "blocks.{}.down.weight", .transpose = true }, D, 4 * D },
    { { L "mlp.c_proj.bias", "blocks.{}.down.bias" }, D, 0 },
    { { "transformer.ln_f.weight", "norm.weight" }, D, 0 }, { { "transformer.ln_f.bias", "norm.bias" }, D, 0 },
};
enum { LINES = sizeof lines / sizeof *lines, MOST = LINES * LAYERS };
typedef struct run { const char *from, *to; float scale; } run;
static xd_result describe(xd_model *model) {
    char name[64];
    for (int n = 0; n < MOST; n++) {
        const struct line *l = &lines[n / LAYERS];
        const char *place = strstr(l->map.ours, "{}");
        xd_weight_desc w = { .name = name, .dtype = XD_DTYPE_F32, .ndim = l->columns ? 2 : 1, .shape = { l->rows, l->columns } };
        w.init = (xd_init){ XD_INIT_NORMAL, .scale = 0.02f };
        if (!place && n % LAYERS > 0) continue; /* there is one for all layers */
        snprintf(name, sizeof name, "%s", l->map.ours);
        if (place) snprintf(name, sizeof name, "blocks.%d%s", n % LAYERS, place + 2);
        XD_TRY(xd_weight_add(xd_model_root(model), &w, NULL));
    }
    return xd_model_seal(model);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    const run *r = argument;
    xd_weight_map map[LINES];
    xd_tensor_part parts[MOST];
    xd_mapped_weights weights = { parts, 0, map, LINES };
    xd_model *model;
    xd_parallel *parallel;
    for (int i = 0; i < LINES; i++) map[i] = lines[i].map;
    XD_TRY(xd_model_create(xd_comm_ctx(world), NULL, &model));
    XD_TRY(describe(model));
    XD_TRY(xd_fsdp_create(model, world, NULL, &parallel));
    XD_TRY(xd_parallel_parts(parallel, MOST, parts, &weights.part_count));
    if (r->from) XD_TRY(xd_weights_import(world, &(xd_weights_import_desc){ .directory = r->from, .weights = weights }, NULL));
    for (int64_t i = 0; i < weights.part_count; i++)
        for (int64_t k = 0; k < parts[i].range.end - parts[i].range.begin; k++) ((float *)parts[i].data)[k] *= r->scale;
    XD_TRY(xd_parallel_publish(parallel)); /* what blocks show from now on */
    XD_TRY(xd_weights_export(world, &(xd_weights_export_desc){ .directory = r->to, .weights = weights }));
    xd_parallel_destroy(parallel), xd_model_destroy(model);
    return XD_OK;
}

/* Reads both directories: every element of theirs is to have been multiplied, where it was. */
static xd_result compare(xd_comm *self, void *argument) {
    const run *r = argument;
    xd_weights_files *from, *to;
    xd_safetensors *file, *other;
    int64_t elements = 0, wrong = 0, at, count;
    XD_TRY(xd_weights_files_open(xd_comm_ctx(self), r->from, NULL, &from));
    XD_TRY(xd_weights_files_open(xd_comm_ctx(self), r->to, NULL, &to));
    for (int64_t f = 0; (file = xd_weights_files_at(from, f)) != NULL; f++)
        for (int64_t i = 0; i < xd_safetensors_count(file); i++, elements += count) {
            XD_TRY(xd_weights_files_find(to, xd_safetensors_at(file, i)->name, &other, &at));
            const float *one = xd_safetensors_data(file, i), *two = xd_safetensors_data(other, at);
            count = (int64_t)(xd_safetensors_at(file, i)->end - xd_safetensors_at(file, i)->begin) / 4;
            for (int64_t k = 0; k < count; k++) wrong += two[k] != r->scale * one[k];
        }
    printf("%lld elements of GPT-2 read, multiplied and written; %lld are wrong\n", (long long)elements, (long long)wrong);
    xd_weights_files_close(from), xd_weights_files_close(to);
    return wrong ? XD_ERROR_DATA : XD_OK;
}

int main(int argc, char **argv) {
    run make = { NULL, "build/gpt2", 1.0f }, learn = { "build/gpt2", "build/gpt2-half", 0.5f };
    xd_error error = { 0 };
    mkdir("build", 0777), mkdir(make.to, 0777), mkdir(learn.to, 0777);
    if (argc > 3) learn = (run){ argv[1], argv[2], (float)atof(argv[3]) };
    xd_result result = argc > 3 ? XD_OK : xd_run_threads(1, NULL, run_rank, &make, &error);
    if (result == XD_OK) result = xd_run_threads(2, NULL, run_rank, &learn, &error);
    if (result == XD_OK) result = xd_run_threads(1, NULL, compare, &learn, &error);
    if (result != XD_OK) fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
    return result != XD_OK;
}
