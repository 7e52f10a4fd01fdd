/* Facts that follow from a teacher's desc: whether it has logits, and the sizes of its vocabulary and J. */

#include "teacher/internal.h"
#include "xtoken/internal.h"

#include <math.h>

XD_PRIVATE bool xdi_xtoken_reads_logits(const xd_xtoken_teacher *t) {
    if (t->kind == XD_XTOKEN_LIKELIHOOD) return !t->cached.cache && !t->likelihood.target_log_probs;
    return t->kind != XD_XTOKEN_CACHED;
}

XD_PRIVATE double xdi_xtoken_known(const xd_xtoken_teacher *t, int64_t row) {
    if (t->kind == XD_XTOKEN_LIKELIHOOD && t->likelihood.target_log_probs) {
        const double given = (double)t->likelihood.target_log_probs[row];
        return given > XDI_XTOKEN_LOG_MOST ? (double)NAN : given;
    }
    return t->cached.positions[row] < 0 ? -INFINITY
                                        : xdi_cache_next(t->cached.cache, t->cached.positions[row]);
}

XD_PRIVATE int64_t xdi_xtoken_vocabulary(const xd_xtoken_teacher *t) {
    if (t->vocabulary != 0) return t->vocabulary;
    if (t->cached.cache && !xdi_xtoken_reads_logits(t))
        return xd_teacher_cache_describe(t->cached.cache).desc.vocabulary;
    return t->kind == XD_XTOKEN_PROJECTED && t->projected.projection ? t->projected.projection->teacher_size
                                                                     : t->logits.cols;
}

XD_PRIVATE int64_t xdi_xtoken_columns(const xd_xtoken_desc *d, const xd_xtoken_teacher *t, int64_t size) {
    const int64_t most = t->kind == XD_XTOKEN_SAME ? size : xdi_xtoken_vocabulary(t);
    return d->mode == XD_XTOKEN_AVERAGED_LOGITS || d->columns > most ? most : d->columns;
}

XD_PRIVATE int64_t xdi_xtoken_fits(int64_t room, int64_t n) {
    return n < 1 || n > room ? 1 : room / n;
}

XD_PRIVATE xd_result xdi_xtoken_check_projection(xd_ctx *ctx, const xd_xtoken_teacher *t, int index,
                                                 int64_t size, const char *source) {
    const xd_projection *m = t->kind == XD_XTOKEN_CACHED ? t->cached.projection : t->projected.projection;
    if (!m) return XD_OK;
    XD_REQUIRE(ctx, m->student_size == size, XD_ERROR_SHAPE,
               "the projection of teacher %d has %lld rows but the student's vocabulary %lld ids", index,
               (long long)m->student_size, (long long)size);
    XD_REQUIRE(ctx, m->teacher_size == xdi_xtoken_vocabulary(t), XD_ERROR_SHAPE,
               "the projection of teacher %d has %lld columns but %s %lld ids", index,
               (long long)m->teacher_size, source, (long long)xdi_xtoken_vocabulary(t));
    return XD_OK;
}
