/* 29_own_teacher.h - a teacher of your data by flow matching. If you have one, load its weights. */
enum { BATCH = 128, TEACHER_STEPS = 3000 };

typedef struct net {
    xd_model *model;
    xd_parallel *parallel;
    xd_optimizer *optimizer;
    xd_ema *average;
    xd_param params[LAYERS];
} net;

/* A network with its optimizer and average; a copy of another, if there is one. */
static xd_result make_net(xd_comm *world, const net *copied, double rate, net *n) {
    xd_ctx *ctx = xd_comm_ctx(world);
    int64_t count;
    XD_TRY(describe(ctx, &n->model));
    XD_TRY(xd_ddp_create(n->model, &(xd_ddp_desc){ .data = world }, &n->parallel));
    XD_TRY(xd_parallel_params(n->parallel, LAYERS, n->params, &count));
    for (int l = 0; copied && l < LAYERS; l++)
        memcpy(n->params[l].value, copied->params[l].value, (size_t)n->params[l].count * sizeof(float));
    xd_optimizer_desc adam = xd_adam_defaults(n->params, count);
    adam.learning_rate = rate;
    adam.beta1 = copied ? 0 : 0.9; /* no momentum where one network follows another */
    adam.beta2 = 0.99;
    XD_TRY(xd_optimizer_create(ctx, &adam, &n->optimizer));
    xd_ema_desc ema = xd_ema_defaults(XD_EMA_RAMP);
    ema.decay = 0.99;
    ema.params = n->params;
    ema.param_count = count;
    XD_TRY(xd_ema_create(ctx, &ema, &n->average));
    return xd_parallel_publish(n->parallel);
}

static void free_net(net *n) {
    xd_ema_destroy(n->average);
    xd_optimizer_destroy(n->optimizer);
    xd_parallel_destroy(n->parallel);
    xd_model_destroy(n->model);
}

/* Half a cosine, to a twentieth. */
static xd_result set_rate(net *n, double rate, double done) {
    return xd_optimizer_set_learning_rate(n->optimizer, rate * (0.525 + 0.475 * cos(3.14159 * done)));
}

static xd_result use_average(net *n) {
    XD_TRY(xd_ema_copy_to(n->average, n->params, LAYERS, false, NULL));
    return xd_parallel_publish(n->parallel);
}

/* Flow matching: at (1 - t) x + t noise the network is to say noise - x. */
static xd_result teacher_step(net *n, int step) {
    const xd_optimizer_step_desc averaged = { .averages = &n->average, .average_count = 1 };
    float x[BATCH * D], target[BATCH * D], raw[BATCH * D];
    double t[BATCH];
    xd_philox random = { .seed = 1, .stream = XD_STREAM_USER, .step = (uint32_t)step };
    for (int j = 0; j < BATCH * D; j += D, random.sample++) {
        const float *row = data + D * xd_draw_index(&random, 0, rows);
        t[j / D] = xd_philox_uniform_f64(&random, 1);
        xd_philox_fill_normal(&random, 8, D, x + j);
        for (int k = 0; k < D; k++) {
            target[j + k] = x[j + k] - row[k];
            x[j + k] = row[k] + (float)t[j / D] * target[j + k];
        }
    }
    xd_network_call call = { .samples = BATCH, .hidden = x, .times = t, .raw = raw, .keep = true };
    XD_TRY(pass(n->model, &call));
    for (int j = 0; j < BATCH * D; j++) raw[j] = 2.0f / (BATCH * D) * (raw[j] - target[j]);
    call.raw_gradient = raw;
    XD_TRY(pass(n->model, &call));
    XD_TRY(set_rate(n, 4e-3, (double)step / TEACHER_STEPS));
    XD_TRY(xd_parallel_reduce(n->parallel));
    XD_TRY(xd_optimizer_step(n->optimizer, &averaged, NULL));
    return xd_parallel_publish(n->parallel);
}
