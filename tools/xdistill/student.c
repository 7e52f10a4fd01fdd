/* student.c - students of a teacher's layers, of random weights, and from directories. */
#include "student.h"
#include "ranks.h"

#include <stdio.h>
#include <string.h>

/* ---- sizes ---- */

static xd_result student_of_layers(xd_ctx *ctx, const student_desc *desc, const lm *teacher, nn_config *out) {
    XD_REQUIRE(ctx, desc->layers <= teacher->config.layers, XD_ERROR_ARGUMENT,
               "--teacher-layers %d: %s has %d", desc->layers, teacher->name, teacher->config.layers);
    *out = teacher->config;
    out->layers = desc->layers;
    return XD_OK;
}

/* Two query heads on each of keys and values where that goes; the feed-forward part three times as wide. */
static xd_result student_of_random(xd_ctx *ctx, const student_desc *desc, const lm *teacher, nn_config *out) {
    XD_REQUIRE(
        ctx, desc->hidden % (2 * desc->heads) == 0, XD_ERROR_ARGUMENT,
        "--hidden %d with --heads %d: a head needs an even width, so %d would do", desc->hidden, desc->heads,
        2 * desc->heads * (desc->hidden / (2 * desc->heads) > 0 ? desc->hidden / (2 * desc->heads) : 1));
    memset(out, 0, sizeof *out);
    out->vocab = desc->vocabulary ? desc->vocabulary : teacher->config.vocab;
    out->hidden = desc->hidden;
    out->layers = desc->layers;
    out->heads = desc->heads;
    out->kv_heads = desc->heads % 2 ? desc->heads : desc->heads / 2;
    out->head_dim = desc->hidden / desc->heads;
    out->ffn = 3 * desc->hidden;
    out->rope_theta = 10000.0f;
    out->norm_eps = 1e-5f;
    out->tied = true;
    return XD_OK;
}

static xd_result student_of_directory(xd_ctx *ctx, const student_desc *desc, const lm *teacher,
                                      nn_config *out) {
    lm student;
    XD_TRY(lm_open(ctx, desc->from, &student));
    *out = student.config;
    xd_result result = XD_OK;
    if (!desc->own && student.config.vocab != teacher->config.vocab)
        result = XD_FAIL(ctx, XD_ERROR_DATA,
                         "--from %s has the tokenizer of %s, but %d columns of logits instead of %d",
                         desc->from, teacher->name, student.config.vocab, teacher->config.vocab);
    lm_free(ctx, &student);
    return result;
}

xd_result student_config(xd_ctx *ctx, const student_desc *desc, const lm *teacher, nn_config *out) {
    switch (desc->kind) {
    case STUDENT_LAYERS: return student_of_layers(ctx, desc, teacher, out);
    case STUDENT_RANDOM: return student_of_random(ctx, desc, teacher, out);
    default: return student_of_directory(ctx, desc, teacher, out);
    }
}

/* ---- weights ---- */

/* The teacher's weight of that name, with the last of the student's layers as the teacher's last. */
static int student_source(const nn_model *student, const nn_model *teacher, const nn_param *p) {
    char name[64];
    int layer = -1, stem = 0;
    if (sscanf(p->name, "model.layers.%d.%n", &layer, &stem) != 1 || stem == 0)
        return nn_param_find(teacher, p->name);
    if (layer == student->config.layers - 1) layer = teacher->config.layers - 1;
    snprintf(name, sizeof name, "model.layers.%d.%s", layer, p->name + stem);
    return nn_param_find(teacher, name);
}

static void student_copy_layers(const nn_model *student, const lm *teacher, float *weights) {
    for (int i = 0; i < student->param_count; i++) {
        const nn_param *p = &student->params[i];
        const nn_param *from = &teacher->model.params[student_source(student, &teacher->model, p)];
        memcpy(weights + p->offset, teacher->weights + from->offset,
               (size_t)nn_param_count(p) * sizeof *weights);
    }
}

static xd_result student_read(xd_ctx *ctx, const student_desc *desc, int64_t floats, float *weights) {
    lm student;
    XD_TRY(lm_open(ctx, desc->from, &student));
    const xd_result result = lm_load_weights(ctx, &student);
    if (result == XD_OK) memcpy(weights, student.weights, (size_t)floats * sizeof *weights);
    lm_free(ctx, &student);
    return result;
}

xd_result student_weights(xd_ctx *ctx, const student_desc *desc, const lm *teacher, const nn_config *config,
                          float **weights) {
    nn_model model;
    bool failed = false;
    xd_result result = XD_OK;
    const char *problem = nn_model_init(config, NULL, NULL, &model);
    XD_REQUIRE(ctx, !problem, XD_ERROR_ARGUMENT, "model: %s", problem);
    *weights = (float *)ranks_room(ctx, model.float_count, sizeof **weights, &failed);
    if (failed)
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld weights", (long long)model.float_count);
    else if (desc->kind == STUDENT_LAYERS)
        student_copy_layers(&model, teacher, *weights);
    else if (desc->kind == STUDENT_RANDOM)
        nn_model_randomize(&model, desc->seed, *weights);
    else
        result = student_read(ctx, desc, model.float_count, *weights);
    nn_model_free(&model);
    return result;
}
