/* Matrices and numbers of the losses over samples that belong together disagree: helpers/sizes.h says what is asked. */
#include "sizes.h"
#include "xd_test.h"
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/fdistill.h"
#endif

enum { SAMPLES = 3, ELEMENTS = 6 };

typedef struct stage {
    sizes_base base;
    xd_vsd_desc vsd;
    xd_denoise_desc denoise;
    xd_gan_desc gan;
    xdi_fdistill_desc ratios;
    xd_denoise_term terms[SAMPLES];
    float in[3][SAMPLES * ELEMENTS];
    char workspace[8];
    struct {
        float out[2][SAMPLES * ELEMENTS];
        double weights[SAMPLES], bins[4], times[SAMPLES];
        xd_sample_values values;
        xd_status status;
    } written;
} stage;

static xd_rows matrix(float *data) {
    return xd_rows_of(data, XD_DTYPE_F32, SAMPLES, ELEMENTS);
}

static void set_stage(void *memory) {
    stage *s = (stage *)memory;
    for (int i = 0; i < SAMPLES * ELEMENTS; i++)
        for (int k = 0; k < 3; k++) s->in[k][i] = 0.1f * (float)(i % 7) + 0.3f * (float)k;
    memset(&s->written, 0, sizeof s->written);
    s->vsd = xd_vsd_defaults();
    s->vsd.generated = matrix(s->in[0]);
    s->vsd.teacher = matrix(s->in[1]);
    s->vsd.fake = matrix(s->in[2]);
    s->vsd.gradient = matrix(s->written.out[0]);
    s->vsd.common.comm = s->base.world;
    s->vsd.common.status = &s->written.status;
    s->denoise = xd_denoise_defaults();
    s->denoise.prediction = matrix(s->in[0]);
    s->denoise.clean = matrix(s->in[1]);
    s->denoise.noise = matrix(s->in[2]);
    s->denoise.gradient = matrix(s->written.out[0]);
    s->denoise.terms = s->terms;
    s->denoise.common = s->vsd.common;
    s->gan = xd_gan_defaults();
    s->gan.role = XD_GAN_DISCRIMINATOR;
    s->gan.fake = matrix(s->in[0]);
    s->gan.real = matrix(s->in[1]);
    s->gan.fake_gradient = matrix(s->written.out[0]);
    s->gan.real_gradient = matrix(s->written.out[1]);
    s->gan.common = s->vsd.common;
    s->ratios = xdi_fdistill_defaults();
    s->ratios.logits = matrix(s->in[0]);
    s->ratios.bins = 4;
    s->ratios.bin_values = s->written.bins;
    s->ratios.times = s->written.times;
    s->ratios.comm = s->base.world;
    s->ratios.status = &s->written.status;
}

static void open_stage(void *memory) {
    stage *s = (stage *)memory;
    s->base.memory = &s->written;
    s->base.bytes = sizeof s->written;
}

static void close_stage(void *memory) {
    (void)memory;
}

static xd_result call_vsd(void *memory) {
    stage *s = (stage *)memory;
    if (s->vsd.common.workspace_bytes > 0) s->vsd.common.workspace = s->workspace;
    return xd_vsd_loss(s->base.ctx, &s->vsd, &s->written.values);
}

static xd_result call_denoise(void *memory) {
    stage *s = (stage *)memory;
    return xd_denoise_loss(s->base.ctx, &s->denoise, &s->written.values);
}

static xd_result call_gan(void *memory) {
    stage *s = (stage *)memory;
    return xd_gan_loss(s->base.ctx, &s->gan, &s->written.values);
}

static xd_result call_ratios(void *memory) {
    stage *s = (stage *)memory;
    if (s->ratios.workspace_bytes > 0) s->ratios.workspace = s->workspace;
    return xdi_fdistill_weights(s->base.ctx, &s->ratios, s->written.weights);
}

#define AT(field) offsetof(stage, field)
static const sizes_matrix matrices[] = {
    { "xd_vsd_desc.generated", AT(vsd.generated), call_vsd, true, true, 0, false, false },
    { "xd_vsd_desc.teacher", AT(vsd.teacher), call_vsd, true, true, 0, false, false },
    { "xd_vsd_desc.fake", AT(vsd.fake), call_vsd, true, true, 0, false, false },
    { "xd_vsd_desc.gradient", AT(vsd.gradient), call_vsd, true, true, 0, true, false },
    { "xd_denoise_desc.prediction", AT(denoise.prediction), call_denoise, true, true, 0, false, false },
    { "xd_denoise_desc.clean", AT(denoise.clean), call_denoise, true, true, 0, false, false },
    { "xd_denoise_desc.noise", AT(denoise.noise), call_denoise, true, true, 0, false, false },
    { "xd_denoise_desc.gradient", AT(denoise.gradient), call_denoise, true, true, 0, true, false },
    { "xd_gan_desc.fake", AT(gan.fake), call_gan, true, true, 0, false, false },
    { "xd_gan_desc.real", AT(gan.real), call_gan, true, true, 0, false, false },
    { "xd_gan_desc.fake_gradient", AT(gan.fake_gradient), call_gan, true, true, 0, true, false },
    { "xd_gan_desc.real_gradient", AT(gan.real_gradient), call_gan, true, true, 0, true, false },
    { "xdi_fdistill_desc.logits", AT(ratios.logits), call_ratios, false, false, 0, false,
      true }, /* ranks may have any number */
};
#undef AT

#define AT(name, field, wrong, call, result, text, local) \
    { name, offsetof(stage, field), sizeof(((stage *)0)->field), wrong, call, result, text, local },
static const sizes_count counts[] = {
    AT("xd_sample_common.workspace_bytes", vsd.common.workspace_bytes, 7, call_vsd, XD_ERROR_ARGUMENT,
       "workspace has 7 bytes but the loss needs", false) /**/
    AT("xdi_fdistill_desc.workspace_bytes", ratios.workspace_bytes, 7, call_ratios, XD_ERROR_ARGUMENT,
       "workspace has 7 bytes but f-distill needs", false)                                          /**/
    AT("xdi_fdistill_desc.bins", ratios.bins, -1, call_ratios, XD_ERROR_ARGUMENT, "-1 bins", false) /**/
    AT("xdi_fdistill_desc.bins", ratios.bins, 3, call_ratios, XD_ERROR_MISMATCH, "", false)         /**/
};
#undef AT

static const sizes_table table = {
    sizeof(stage), open_stage,
    set_stage,     close_stage,
    matrices,      sizeof matrices / sizeof *matrices,
    counts,        sizeof counts / sizeof *counts,
};

XD_TEST(sizes_of_losses_over_samples_that_disagree_are_refused_and_nothing_is_written) {
    for (int ranks = 1; ranks <= SIZES_RANKS; ranks++) CHECK(sizes_run_table(&table, ranks) > 30);
}

XD_TEST_MAIN()
