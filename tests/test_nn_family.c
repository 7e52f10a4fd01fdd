/* test_nn_family.c - models of the Llama family in examples/nn: what transformers 5.23 gives of the same weights, gradients by
 * differences, and their config.json. */
#define XDISTILL_IMPLEMENTATION
#if defined(XD_TEST_LAYERS)
#    include "base/internal.h"
#endif
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../examples/common/model_directory.c"
#include "../examples/nn/nn_exp.c"
#include "../examples/nn/nn_matmul.c"
#include "../examples/nn/nn_model.c"
#include "../examples/nn/nn_layers.c"
#include "../examples/nn/nn_patch_positions.c"
#include "../examples/nn/nn_patch_rows.c"
#include "../examples/nn/nn_sequence.c"
#include "../examples/nn/nn_transformer.c"

enum { VOCAB = 23, POSITIONS = 40 };

/* A model of transformers: what its config.json says beside the sizes, and what it gives. */
typedef struct family {
    const char *type, *rope, *more;
    double nats;      /* that ids 1 to 39 lose, each from those before it */
    double logits[3]; /* behind the last id: of 0, 5 and 22 */
} family;

static const family families[] = {
    { "llama",
      "{\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
      "\"original_max_position_embeddings\": 16, \"rope_theta\": 100.0}",
      "",
      115.05478762638617,
      { -1.396316, 0.868858, 0.730723 } },
    { "llama",
      "{\"rope_type\": \"linear\", \"factor\": 4.0, \"rope_theta\": 100.0}",
      "",
      118.08017313587314,
      { -0.789352, -0.197235, -0.289977 } },
    { "qwen2",
      "{\"rope_type\": \"default\", \"rope_theta\": 100.0}",
      "",
      130.3042627728651,
      { 0.626174, -0.92256, -0.871956 } },
    { "qwen3",
      "{\"rope_type\": \"default\", \"rope_theta\": 100.0}",
      "\"head_dim\": 8, \"attention_bias\": false, ",
      116.65891439616846,
      { -0.066653, 0.031307, 0.024497 } },
};

enum { FAMILIES = sizeof families / sizeof families[0] };

/* ---- files ---- */

static const char *config_text(const family *f, char out[1024]) {
    snprintf(out, 1024,
             "{\"model_type\": \"%s\", \"vocab_size\": 23, \"hidden_size\": 16, \"num_hidden_layers\": 2, "
             "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 24, "
             "\"rms_norm_eps\": 1e-5, "
             "\"hidden_act\": \"silu\", %s\"tie_word_embeddings\": true, \"rope_parameters\": %s}",
             f->type, f->more, f->rope);
    return out;
}

/* Reads a text as the config.json of a directory. */
static xd_result read_config(xd_ctx *ctx, const char *text, nn_config *out) {
    char directory[] = "/tmp/xdistill-family-XXXXXX", path[64];
    CHECK(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/config.json", directory);
    CHECK_EQ_INT(xd_file_save(ctx, path, text, strlen(text)), XD_OK);
    const xd_result result = model_directory_config(ctx, directory, out);
    CHECK(remove(path) == 0 && rmdir(directory) == 0);
    return result;
}

/* ---- models ---- */

/* The weights that the reference had: sines, about one for norms. */
static void fill(const nn_model *model, float *weights) {
    for (int i = 0; i < model->param_count; i++) {
        const nn_param *p = &model->params[i];
        int sum = 0;
        for (const char *c = p->name; *c; c++) sum += *c;
        for (int64_t j = 0; j < nn_param_count(p); j++) {
            const double value = 0.3 * sin(0.37 * (double)j + sum % 97);
            weights[p->offset + j] = (float)(strstr(p->name, "norm") ? 1.0 + value : value);
        }
    }
}

typedef struct run {
    nn_model model;
    nn_batch batch;
    int32_t ids[POSITIONS];
    float *weights, *gradient, *workspace, *logits, *d_logits;
} run;

static void open_run(const nn_config *config, run *r) {
    memset(r, 0, sizeof *r);
    const char *problem = nn_model_init(config, NULL, NULL, &r->model);
    CHECK(problem == NULL);
    for (int i = 0; i < POSITIONS; i++) r->ids[i] = (7 * i + 3) % VOCAB;
    r->batch.sequences = 1;
    r->batch.positions = POSITIONS;
    r->batch.ids = r->ids;
    r->weights = (float *)calloc((size_t)r->model.float_count, sizeof(float));
    r->gradient = (float *)calloc((size_t)r->model.float_count, sizeof(float));
    r->workspace = (float *)calloc((size_t)nn_workspace_floats(&r->model, &r->batch, true), sizeof(float));
    r->logits = (float *)calloc(POSITIONS * VOCAB, sizeof(float));
    r->d_logits = (float *)calloc(POSITIONS * VOCAB, sizeof(float));
    fill(&r->model, r->weights);
}

static void close_run(run *r) {
    free(r->weights);
    free(r->gradient);
    free(r->workspace);
    free(r->logits);
    free(r->d_logits);
    nn_model_free(&r->model);
}

/* The nats that the ids lose; their slope into d_logits. */
static double loss(run *r) {
    double nats = 0.0;
    CHECK_EQ_INT(nn_forward(&r->model, r->weights, &r->batch, true, r->workspace, r->logits), 0);
    memset(r->d_logits, 0, POSITIONS * VOCAB * sizeof(float));
    for (int i = 0; i + 1 < POSITIONS; i++) {
        const float *z = r->logits + i * VOCAB;
        double sum = 0.0;
        for (int v = 0; v < VOCAB; v++) sum += exp((double)z[v]);
        nats += log(sum) - (double)z[r->ids[i + 1]];
        for (int v = 0; v < VOCAB; v++)
            r->d_logits[i * VOCAB + v] = (float)(exp((double)z[v]) / sum - (v == r->ids[i + 1]));
    }
    return nats;
}

XD_TEST(models_give_what_transformers_gives) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int i = 0; i < FAMILIES; i++) {
        const family *f = &families[i];
        char text[1024];
        nn_config config;
        run r;
        CHECK_EQ_INT(read_config(ctx, config_text(f, text), &config), XD_OK);
        open_run(&config, &r);
        CHECK_NEAR(loss(&r), f->nats, 2e-3);
        const float *last = r.logits + (POSITIONS - 1) * VOCAB;
        CHECK_NEAR((double)last[0], f->logits[0], 1e-4);
        CHECK_NEAR((double)last[5], f->logits[1], 1e-4);
        CHECK_NEAR((double)last[22], f->logits[2], 1e-4);
        close_run(&r);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(gradients_of_every_weight_are_slopes) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int i = 0; i < FAMILIES; i++) {
        char text[1024];
        nn_config config;
        run r;
        CHECK_EQ_INT(read_config(ctx, config_text(&families[i], text), &config), XD_OK);
        open_run(&config, &r);
        (void)loss(&r);
        CHECK_EQ_INT(nn_backward(&r.model, r.weights, &r.batch, r.workspace, r.d_logits, r.gradient), 0);
        for (int p = 0; p < r.model.param_count; p++) {
            const int64_t at = r.model.params[p].offset + nn_param_count(&r.model.params[p]) / 2;
            const float kept = r.weights[at], step = 4e-3f;
            r.weights[at] = kept + step;
            const double more = loss(&r);
            r.weights[at] = kept - step;
            const double slope = (more - loss(&r)) / (2.0 * (double)step);
            r.weights[at] = kept;
            CHECK_NEAR((double)r.gradient[at], slope, 2e-2 + 1e-2 * fabs(slope));
        }
        close_run(&r);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST(frozen_ends_have_no_gradient_and_the_rest_has_the_same) {
    char text[1024];
    xd_ctx *ctx = NULL;
    nn_config config;
    run whole, frozen;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(read_config(ctx, config_text(&families[2], text), &config), XD_OK);
    open_run(&config, &whole);
    open_run(&config, &frozen);
    frozen.model.frozen_ends = true;
    (void)loss(&whole), (void)loss(&frozen);
    CHECK_EQ_INT(nn_backward(&whole.model, whole.weights, &whole.batch, whole.workspace, whole.d_logits,
                             whole.gradient),
                 0);
    CHECK_EQ_INT(nn_backward(&frozen.model, frozen.weights, &frozen.batch, frozen.workspace, frozen.d_logits,
                             frozen.gradient),
                 0);
    for (int64_t i = 0; i < whole.model.float_count; i++)
        CHECK(frozen.gradient[i] == (i < VOCAB * 16 ? 0.0f : whole.gradient[i]));
    close_run(&whole);
    close_run(&frozen);
    xd_ctx_destroy(ctx);
}

XD_TEST(what_is_written_is_read_again_and_the_unknown_is_refused_by_name) {
    static const char *const unknown[][2] = {
        { "{\"model_type\": \"gemma3\"}", "gemma3" },
        { "{\"model_type\": \"llama\", \"hidden_act\": \"gelu\"}", "gelu" },
        { "{\"model_type\": \"llama\", \"attention_bias\": true}", "attention_bias" },
        { "{\"model_type\": \"qwen2\", \"use_sliding_window\": true}", "use_sliding_window" },
        { "{\"model_type\": \"llama\", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0}}", "yarn" },
        { "{\"model_type\": \"llama\", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 0.5}}",
          "factor of 0.5" },
        { "{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}}",
          "four numbers" },
        { "{\"model_type\": \"llama\"}", "lacks a size" },
    };
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    for (int i = 0; i < FAMILIES; i++) {
        char text[1024];
        const char *written = NULL;
        size_t bytes = 0;
        nn_config config, again;
        const model_extras extras = { .positions = 64 };
        xd_json_writer w = xd_json_writer_create(ctx);
        CHECK_EQ_INT(read_config(ctx, config_text(&families[i], text), &config), XD_OK);
        xd_json_write_object(&w);
        model_write_config(&w, &config, &extras);
        xd_json_write_end(&w);
        CHECK_EQ_INT(xd_json_writer_text(&w, &written, &bytes), XD_OK);
        snprintf(text, sizeof text, "%.*s", (int)bytes, written);
        CHECK_EQ_INT(read_config(ctx, text, &again), XD_OK);
        CHECK(memcmp(&config, &again, sizeof config) == 0);
        xd_json_writer_destroy(&w);
    }
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        nn_config config;
        CHECK(read_config(ctx, unknown[i][0], &config) != XD_OK);
        CHECK(strstr(xd_last_error(ctx)->message, unknown[i][1]) != NULL);
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
