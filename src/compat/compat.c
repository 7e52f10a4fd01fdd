/* Divergences and denominators of other trainers. */

#include "compat/compat.h"
#include "kernel/internal.h"
#include "kernel/kernels.h"
#include "loss/internal.h"

#include <math.h>

static xd_result xdi_compat_validate(xd_ctx *ctx, const xd_rows *rows, const char *name,
                                     const xd_rows *like) {
    XD_TRY(xdi_rows_check(ctx, name, rows));
    XD_REQUIRE(ctx, rows->rows == like->rows && rows->cols == like->cols, XD_ERROR_SHAPE,
               "%s is [%lld, %lld] but the student is [%lld, %lld]", name, (long long)rows->rows,
               (long long)rows->cols, (long long)like->rows, (long long)like->cols);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher,
                                                     double beta, double denominator, xd_rows gradient,
                                                     double *loss) {
    XDI_GIVEN(ctx, ctx, loss);
    const xd_launch launch = xd_ctx_launch(ctx);
    xd_jsd_args a;
    xd_flagged_sum sum;
    XD_REQUIRE(ctx, beta >= 0.0 && beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]", beta);
    XD_REQUIRE(ctx, denominator > 0.0 && isfinite(denominator), XD_ERROR_ARGUMENT,
               "denominator %g is not positive and finite", denominator);
    XD_TRY(xdi_compat_validate(ctx, &student, "student", &student));
    XD_TRY(xdi_compat_validate(ctx, &teacher, "teacher", &student));
    if (gradient.data) XD_TRY(xdi_compat_validate(ctx, &gradient, "gradient", &student));
    a.student = student;
    a.teacher = teacher;
    a.gradient = gradient;
    a.beta = beta;
    a.denominator = denominator;
    a.out = (xd_flagged_sum *)xdi_call_memory(ctx, XD_FLAGGED_SUMS * sizeof *a.out);
    XD_REQUIRE(ctx, a.out, XD_ERROR_MEMORY, "no room for %d sums", (int)XD_FLAGGED_SUMS);
    xd_result result = xd_ctx_kernels(ctx)->uld.jsd(&launch, &a);
    if (result == XD_OK) result = xd_read(ctx, &sum, a.out, sizeof sum);
    xdi_call_memory_done(ctx, a.out);
    XD_TRY(result);
    *loss = sum.value / denominator;
    return XD_OK;
}

XD_PRIVATE double xdi_compat_jsd_denominator(xdi_compat_reduction reduction, int64_t batch, int64_t counted,
                                             int64_t vocabulary, bool labels) {
    if (reduction == XDI_COMPAT_SUM) return 1.0;
    if (reduction == XDI_COMPAT_MEAN) return (double)counted * (double)vocabulary;
    const int64_t rows = labels ? counted : batch;
    return rows > 0 ? (double)rows : 1.0;
}

XD_PRIVATE double xdi_compat_modelopt_denominator(xdi_compat_reduction reduction, int64_t rows,
                                                  int64_t vocabulary) {
    if (reduction == XDI_COMPAT_SUM) return 1.0;
    return reduction == XDI_COMPAT_MEAN ? (double)rows * (double)vocabulary : (double)rows;
}
