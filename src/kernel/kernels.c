/* A level overrides what it does better and leaves the rest as the level below has it. */
XD_API xd_kernels xd_kernels_cpu(xd_cpu_level level) {
    xd_kernels kernels;
    if (level == XD_CPU_BEST) level = xd_cpu_best();
    kernels.name = xd_cpu_level_name(level);
    kernels.device = XD_DEVICE_CPU;
    kernels.loss = xd_loss_kernels_cpu_plain();
    kernels.optimizer = *xd_optimizer_kernels_cpu();
    kernels.matmul = xdi_matmul_cpu;
    return kernels;
}

XD_API xd_kernels xd_ctx_kernels(const xd_ctx *ctx) {
    const xd_ctx_desc *settings = xd_ctx_settings(ctx);
    return settings->kernels ? *settings->kernels : xd_kernels_cpu(settings->cpu);
}
