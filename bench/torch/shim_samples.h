/* Losses and conversions of samples [samples, elements], for shim.c. */

static xd_rows shim_tensor(int dtype, int64_t samples, int64_t elements, void *data) {
    const xd_rows rows = { data, (xd_dtype)dtype, samples, elements, 0 };
    return rows;
}

static void *shim_memory(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) exit(2);
    return memory;
}

/* What a loss works in, out of the clock. */
static void shim_take_workspace(shim *s, xd_sample_common *common) {
    const size_t bytes = shim_planned(s);
    common->workspace = s->workspace = shim_memory(bytes);
    common->workspace_bytes = bytes;
}

static void shim_run_vsd(shim *s) {
    xd_sample_values values = { 0 };
    s->result = xd_vsd_loss(s->ctx, &s->samples.vsd, &values);
    s->value = values.loss;
}

/* The student's term; all four tensors of one dtype. */
shim *shim_vsd(int threads, int dtype, int64_t samples, int64_t elements, void *generated, void *teacher,
               void *fake, void *gradient) {
    shim *s = shim_open(threads, shim_run_vsd);
    xd_vsd_desc *d = &s->samples.vsd;
    *d = xd_vsd_defaults();
    d->generated = shim_tensor(dtype, samples, elements, generated);
    d->teacher = shim_tensor(dtype, samples, elements, teacher);
    d->fake = shim_tensor(dtype, samples, elements, fake);
    d->gradient = shim_tensor(dtype, samples, elements, gradient);
    shim_take_workspace(s, &d->common);
    shim_sweeps(s, gradient, samples * elements * (int64_t)xd_dtype_size((xd_dtype)dtype));
    return s;
}

static void shim_run_denoise(shim *s) {
    xd_sample_values values = { 0 };
    s->result = xd_denoise_loss(s->ctx, &s->samples.denoise, &values);
    s->value = values.loss;
}

/* The fake score's term of a flow network under rectified flow, compared in x0; times [samples]. */
shim *shim_denoise(int threads, int dtype, int64_t samples, int64_t elements, void *prediction, void *clean,
                   void *noise, void *gradient, const double *times) {
    shim *s = shim_open(threads, shim_run_denoise);
    xd_denoise_desc *d = &s->samples.denoise;
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    xd_denoise_form form;
    memset(&form, 0, sizeof form);
    form.native = XD_PREDICT_FLOW;
    form.space = XD_PREDICT_X0;
    xd_denoise_term *terms = (xd_denoise_term *)shim_memory((size_t)samples * sizeof *terms);
    for (int64_t i = 0; i < samples && s->result == XD_OK; i++)
        s->result = xd_denoise_term_at(s->ctx, &schedule, &form, times[i], &terms[i]);
    shim_check(s);
    *d = xd_denoise_defaults();
    d->prediction = shim_tensor(dtype, samples, elements, prediction);
    d->clean = shim_tensor(dtype, samples, elements, clean);
    d->noise = shim_tensor(dtype, samples, elements, noise);
    d->gradient = shim_tensor(dtype, samples, elements, gradient);
    d->terms = terms;
    s->factors = terms;
    shim_take_workspace(s, &d->common);
    shim_sweeps(s, gradient, samples * elements * (int64_t)xd_dtype_size((xd_dtype)dtype));
    return s;
}

static void shim_run_mix(shim *s) {
    s->result = xd_mix_rows(s->ctx, &s->samples.mix);
}

/* x0 from a flow network's prediction and x_t; times [samples]. */
shim *shim_convert(int threads, int dtype, int64_t samples, int64_t elements, void *prediction, void *noised,
                   void *out, const double *times) {
    shim *s = shim_open(threads, shim_run_mix);
    xd_mix_desc *d = &s->samples.mix;
    const xd_noise_schedule schedule = xd_noise_defaults(XD_NOISE_FLOW);
    xd_conversion conversion;
    memset(&conversion, 0, sizeof conversion);
    conversion.from = XD_PREDICT_FLOW;
    conversion.to = XD_PREDICT_X0;
    xd_mix *mixes = (xd_mix *)shim_memory((size_t)samples * sizeof *mixes);
    for (int64_t i = 0; i < samples && s->result == XD_OK; i++)
        s->result = xd_prediction_mix(s->ctx, &schedule, &conversion, times[i], &mixes[i]);
    shim_check(s);
    d->p = shim_tensor(dtype, samples, elements, prediction);
    d->q = shim_tensor(dtype, samples, elements, noised);
    d->out = shim_tensor(dtype, samples, elements, out);
    d->mix = mixes;
    s->factors = mixes;
    shim_sweeps(s, out, samples * elements * (int64_t)xd_dtype_size((xd_dtype)dtype));
    return s;
}

static void shim_run_gan(shim *s) {
    xd_sample_values values = { 0 };
    s->result = xd_gan_loss(s->ctx, &s->samples.gan, &values);
    s->value = values.loss;
}

/* The discriminator's term on f32 logits. */
shim *shim_gan(int threads, int64_t samples, int64_t heads, void *fake, void *real, void *fake_gradient,
               void *real_gradient) {
    shim *s = shim_open(threads, shim_run_gan);
    xd_gan_desc *d = &s->samples.gan;
    *d = xd_gan_defaults();
    d->role = XD_GAN_DISCRIMINATOR;
    d->fake = shim_tensor(XD_DTYPE_F32, samples, heads, fake);
    d->real = shim_tensor(XD_DTYPE_F32, samples, heads, real);
    d->fake_gradient = shim_tensor(XD_DTYPE_F32, samples, heads, fake_gradient);
    d->real_gradient = shim_tensor(XD_DTYPE_F32, samples, heads, real_gradient);
    shim_take_workspace(s, &d->common);
    return s;
}
