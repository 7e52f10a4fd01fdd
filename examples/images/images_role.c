/* images_role.c - networks as the library wraps, steps and stores them. */
#include "images_role.h"

#include <math.h>
#include <string.h>

/* ---- making ---- */

static nn_patch_config images_config(const images_ranks *ranks) {
    nn_patch_config config = nn_patch_defaults();
    config.cp = ranks->cp;
    return config;
}

xd_interval images_pixels(const images_ranks *ranks) {
    const nn_patch_config config = images_config(ranks);
    return nn_patch_pixels(&config);
}

static xd_result images_wrap(images_role *role, const images_shape *shape) {
    static const char *const units[] = { "layer", "head" };
    xd_ddp_desc ddp;
    xd_fsdp_desc fsdp;
    const images_ranks *ranks = shape->ranks;
    memset(&ddp, 0, sizeof ddp);
    memset(&fsdp, 0, sizeof fsdp);
    ddp.data = ranks->data;
    fsdp.data = ranks->group ? ranks->group : ranks->data;
    ddp.micro_batches = fsdp.micro_batches = shape->micro_batches;
    fsdp.unit_types = units;
    fsdp.unit_type_count = 2;
    fsdp.accumulate_whole =
        true; /* warm-up has a backward for each rung of a micro-batch, a discriminator two */
    fsdp.replicas = ranks->replicas;
    return ranks->fsdp ? xd_fsdp_create(role->model, &fsdp, &role->parallel)
                       : xd_ddp_create(role->model, &ddp, &role->parallel);
}

/* Ranks with other parts of the same pictures have the same weights: the first of them speaks for all. */
static xd_result images_list(images_role *role, const images_ranks *ranks) {
    const bool replica = ranks->cp && xd_comm_rank(ranks->cp) > 0;
    xd_ctx *ctx = xd_comm_ctx(role->world);
    XD_TRY(xd_parallel_params(role->parallel, 0, NULL, &role->count));
    role->params = (xd_param *)xd_allocate(ctx, (size_t)role->count * sizeof *role->params);
    role->parts = (xd_tensor_part *)xd_allocate(ctx, (size_t)role->count * sizeof *role->parts);
    XD_REQUIRE(ctx, role->params && role->parts, XD_ERROR_MEMORY, "no room for a list of %lld weights",
               (long long)role->count);
    XD_TRY(xd_parallel_params(role->parallel, role->count, role->params, &role->count));
    XD_TRY(xd_parallel_parts(role->parallel, role->count, role->parts, &role->count));
    for (int64_t i = 0; i < role->count && replica; i++)
        role->params[i].replica = role->parts[i].replica = true;
    return XD_OK;
}

xd_result images_role_open(const images_shape *shape, uint64_t seed, images_role *out) {
    const nn_patch_config config = images_config(shape->ranks);
    xd_ctx *ctx = xd_comm_ctx(shape->ranks->world);
    memset(out, 0, sizeof *out);
    out->world = shape->ranks->world;
    XD_TRY(nn_patch_describe(ctx, &config, seed, &out->model));
    XD_TRY(images_wrap(out, shape));
    XD_TRY(images_list(out, shape->ranks));
    XD_TRY(nn_patch_create(ctx, &config, out->model, shape->samples, shape->slots, &out->passes));
    out->network = nn_patch_network(out->passes);
    return XD_OK;
}

/* One head, over the stream in the middle of the other networks. */
xd_result images_role_open_judge(const images_shape *shape, uint64_t seed, images_role *out) {
    const nn_patch_config of = nn_patch_defaults();
    const nn_disc_config config = { 1, { { of.width, of.side / of.patch, of.side / of.patch } } };
    xd_ctx *ctx = xd_comm_ctx(shape->ranks->world);
    memset(out, 0, sizeof *out);
    out->world = shape->ranks->world;
    XD_TRY(nn_disc_describe(ctx, &config, seed, &out->model));
    XD_TRY(images_wrap(out, shape));
    XD_TRY(images_list(out, shape->ranks));
    XD_TRY(nn_disc_create(ctx, &config, out->model, shape->samples, shape->slots, &out->judge));
    out->network = nn_disc_network(out->judge);
    return XD_OK;
}

static void images_role_rest(images_role *role) {
    xd_ema_destroy(role->average);
    xd_optimizer_destroy(role->optimizer);
    role->average = NULL;
    role->optimizer = NULL;
}

void images_role_close(images_role *role) {
    if (!role->world) return;
    xd_ctx *ctx = xd_comm_ctx(role->world);
    images_role_rest(role);
    nn_patch_destroy(role->passes);
    nn_disc_destroy(role->judge);
    if (role->params) xd_release(ctx, role->params);
    if (role->parts) xd_release(ctx, role->parts);
    xd_parallel_destroy(role->parallel);
    xd_model_destroy(role->model);
    memset(role, 0, sizeof *role);
}

/* ---- training ---- */

double images_rate_at(const images_rate *rate, int step, int steps) {
    const double pi = 3.14159265358979323846, begun = steps * rate->flat;
    if (step < rate->rising) return rate->peak * (step + 1) / (rate->rising + 1);
    if (step <= begun) return rate->peak;
    const double fall = 0.5 * (1.0 + cos(pi * (step - begun) / (steps - begun)));
    return rate->peak * (rate->lowest + (1.0 - rate->lowest) * fall);
}

xd_result images_role_train(images_role *role, const images_trainer *trainer) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    xd_optimizer_desc adamw = xd_adamw_defaults(role->params, role->count);
    xd_ema_desc average = xd_ema_defaults(trainer->schedule);
    adamw.learning_rate = trainer->rate.peak;
    adamw.beta1 = trainer->beta1;
    adamw.beta2 = trainer->beta2;
    adamw.weight_decay = trainer->decay;
    average.decay = trainer->average;
    average.init_from_current = true;
    images_role_rest(role);
    XD_TRY(xd_optimizer_create(ctx, &adamw, &role->optimizer));
    if (trainer->average == 0.0) return XD_OK;
    average.params = role->params;
    average.param_count = role->count;
    return xd_ema_create(ctx, &average, &role->average);
}

xd_result images_role_step(images_role *role, double max_norm, double *norm) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    xd_gradient_norm_desc of;
    xd_gradient_norm found;
    xd_optimizer_step_desc step;
    xd_status status;
    memset(&of, 0, sizeof of);
    memset(&step, 0, sizeof step);
    memset(&status, 0, sizeof status);
    of.params = role->params;
    of.param_count = role->count;
    of.max_norm = max_norm;
    of.status = &status;
    step.gradient_scale = &found.coefficient;
    step.status = &status;
    step.averages = &role->average;
    step.average_count = 1;
    XD_TRY(xd_parallel_reduce(role->parallel));
    XD_TRY(xd_gradient_norm_compute(ctx, role->world, &of, &found));
    XD_TRY(xd_optimizer_step(role->optimizer, &step, NULL));
    if (norm) *norm = found.norm;
    return xd_parallel_publish(role->parallel);
}

/* ---- files ---- */

xd_result images_role_load(images_role *role, const char *directory) {
    xd_weights_import_desc import;
    memset(&import, 0, sizeof import);
    import.directory = directory;
    import.weights.parts = role->parts;
    import.weights.part_count = role->count;
    import.convert = true;
    XD_TRY(xd_weights_import(role->world, &import, NULL));
    return xd_parallel_publish(role->parallel);
}

xd_result images_role_save(const images_role *role, const char *directory) {
    xd_ctx *ctx = xd_comm_ctx(role->world);
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    xd_weights_export_desc out;
    xd_result made = XD_OK;
    memset(&out, 0, sizeof out);
    out.directory = directory;
    out.weights.parts = role->parts;
    out.weights.part_count = role->count;
    if (xd_comm_rank(role->world) == 0 && files->make_directory(files->user, directory) != 0)
        made = XD_FAIL(ctx, XD_ERROR_IO, "cannot make the directory %s", directory);
    XD_TRY(xd_agree(role->world, made));
    return xd_weights_export(role->world, &out);
}

xd_result images_role_take_average(images_role *role, const images_role *of) {
    XD_TRY(xd_ema_copy_to(of->average, role->params, role->count, false, NULL));
    return xd_parallel_publish(role->parallel);
}
