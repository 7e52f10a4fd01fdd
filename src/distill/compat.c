#include <math.h>

static xd_result xdi_compat_validate(xd_ctx *ctx, const xd_rows *rows, const char *name,
                                     const xd_rows *like) {
    XDI_REQUIRE(ctx, rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                "%s is %s; F32 or BF16 is needed", name, xd_dtype_name(rows->dtype));
    XDI_REQUIRE(ctx, rows->rows == like->rows && rows->cols == like->cols, XD_ERROR_SHAPE,
                "%s is [%lld, %lld] but the student is [%lld, %lld]", name, (long long)rows->rows,
                (long long)rows->cols, (long long)like->rows, (long long)like->cols);
    return XD_OK;
}

XD_PRIVATE double xdi_compat_entry(double s, double t, double beta, double *slope) {
    const double p = exp(s), q = exp(t);
    double student, teacher;
    if (beta == 0.0) {
        *slope = -q;
        return q * (t - s);
    }
    if (beta == 1.0) {
        *slope = p * (s - t + 1.0);
        return p * (s - t);
    }
    xdi_loss_log_ratios(s, t, beta, &student, &teacher);
    *slope = (1.0 - beta) * p * student;
    return beta * q * teacher + (1.0 - beta) * p * student;
}

XD_API xd_result xd_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher, double beta,
                                                double denominator, xd_rows gradient, double *loss) {
    const double floor = 1e-8;
    double sum = 0.0;
    XDI_REQUIRE(ctx, beta >= 0.0 && beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]", beta);
    XDI_REQUIRE(ctx, denominator > 0.0, XD_ERROR_ARGUMENT, "denominator %g is not positive", denominator);
    XDI_REQUIRE(ctx, xd_ctx_kernels(ctx).device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
                "this form is for numbers on the host, not for a GPU");
    XDI_TRY(xdi_compat_validate(ctx, &student, "student", &student));
    XDI_TRY(xdi_compat_validate(ctx, &teacher, "teacher", &student));
    if (gradient.data) XDI_TRY(xdi_compat_validate(ctx, &gradient, "gradient", &student));
    for (int64_t r = 0; r < student.rows; r++)
        for (int64_t c = 0; c < student.cols; c++) {
            const double u = xdi_loss_load(&student, r, c), v = xdi_loss_load(&teacher, r, c);
            double slope;
            sum += xdi_compat_entry(log(u > floor ? u : floor), log(v > floor ? v : floor), beta, &slope);
            if (gradient.data) xdi_loss_store(&gradient, r, c, u >= floor ? slope / u / denominator : 0.0);
        }
    *loss = sum / denominator;
    return XD_OK;
}

XD_API double xd_compat_jsd_denominator(xd_compat_reduction reduction, int64_t batch, int64_t counted,
                                        int64_t vocabulary, bool labels) {
    if (reduction == XD_COMPAT_SUM) return 1.0;
    if (reduction == XD_COMPAT_MEAN) return (double)counted * (double)vocabulary;
    const int64_t rows = labels ? counted : batch;
    return rows > 0 ? (double)rows : 1.0;
}

XD_API double xd_compat_modelopt_denominator(xd_compat_reduction reduction, int64_t rows,
                                             int64_t vocabulary) {
    if (reduction == XD_COMPAT_SUM) return 1.0;
    return reduction == XD_COMPAT_MEAN ? (double)rows * (double)vocabulary : (double)rows;
}
