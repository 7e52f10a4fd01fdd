/* Defaults and checks of a desc of losses across tokenizers. */

#include "kernel/ids.h"
#include "teacher/internal.h"
#include "xtoken/internal.h"

#include <math.h>

/* Averaging needs logits of equal shape; else the teachers are summed. */
static bool xdi_xtoken_can_average(const xd_xtoken_desc *d) {
    for (int i = 0; i < d->teacher_count; i++)
        if (d->teachers[i].kind != XD_XTOKEN_SAME || d->teachers[i].logits.cols != d->teachers[0].logits.cols)
            return false;
    return true;
}

XD_API xd_xtoken_desc xd_xtoken_defaults(void) {
    xd_xtoken_desc d;
    memset(&d, 0, sizeof d);
    d.sequences = 1;
    d.alpha = 1.0;
    d.temperature = 1.0;
    d.columns = 8192;
    d.tail = 8192;
    d.kd_weight = 1.0;
    d.ce_weight = 0.1;
    return d;
}

XD_API xd_xtoken_teacher xd_xtoken_teacher_defaults(xd_xtoken_kind kind) {
    xd_xtoken_teacher t;
    memset(&t, 0, sizeof t);
    t.kind = kind;
    t.weight = 1.0;
    return t;
}

static bool xdi_xtoken_any(const xd_xtoken_desc *d, xd_xtoken_kind kind) {
    for (int i = 0; i < d->teacher_count && d->teachers; i++)
        if (d->teachers[i].kind == kind) return true;
    return false;
}

/* Defaults of fields where 0 has no meaning; sizes that no teacher needs are 1. */
XD_PRIVATE xd_xtoken_desc xdi_xtoken_resolve(const xd_xtoken_desc *desc) {
    xd_xtoken_desc d = *desc;
    if (d.sequences == 0) d.sequences = 1;
    if (!d.common.comm) d.common.comm = d.sequence_comm;
    if (!d.common.has_ignore_index) d.common.ignore_index = XD_IGNORE_INDEX;
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (d.columns == 0 && !xdi_xtoken_any(&d, XD_XTOKEN_PROJECTED) && !xdi_xtoken_any(&d, XD_XTOKEN_SAME))
        d.columns = 1;
    if (d.mode == XD_XTOKEN_AVERAGED_LOGITS && d.teachers && !xdi_xtoken_can_average(&d))
        d.mode = XD_XTOKEN_SUM;
    return d;
}

static xd_result xdi_xtoken_check_chunks(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    XD_REQUIRE(ctx, t->chunks >= 0 && t->chunks <= INT32_MAX, XD_ERROR_ARGUMENT, "teacher %d has %lld chunks",
               index, (long long)t->chunks);
    XD_REQUIRE(ctx, (t->student_chunks || d->student.rows == 0) && (t->teacher_chunks || t->logits.rows == 0),
               XD_ERROR_ARGUMENT, "teacher %d has no chunk ids", index);
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, d->student.rows); i++)
        XD_REQUIRE(ctx, t->student_chunks[i] >= -1 && t->student_chunks[i] < t->chunks, XD_ERROR_ARGUMENT,
                   "teacher %d: chunk id %lld of student row %lld is outside [-1, %lld)", index,
                   (long long)t->student_chunks[i], (long long)i, (long long)t->chunks);
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, t->logits.rows); i++)
        XD_REQUIRE(ctx, t->teacher_chunks[i] >= -1 && t->teacher_chunks[i] < t->chunks, XD_ERROR_ARGUMENT,
                   "teacher %d: chunk id %lld of teacher row %lld is outside [-1, %lld)", index,
                   (long long)t->teacher_chunks[i], (long long)i, (long long)t->chunks);
    XD_REQUIRE(ctx, !d->exact_only || t->chunk_exact, XD_ERROR_ARGUMENT,
               "exact_only, but teacher %d does not say which chunks are exact", index);
    return XD_OK;
}

static xd_result xdi_xtoken_check_column_ids(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const int64_t size = xdi_xtoken_vocabulary(t), k = xdi_xtoken_columns(d, t, size);
    XD_REQUIRE(ctx,
               t->kind == XD_XTOKEN_PROJECTED && !d->compat && d->score == XD_XTOKEN_SCORE_NONE &&
                   d->mode != XD_XTOKEN_SELECT,
               XD_ERROR_ARGUMENT,
               "teacher %d has chosen columns alone: not with kind %d, scores, SELECT or compat", index,
               (int)t->kind);
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, d->sequences * k); i++) {
        const int64_t last = i % k == 0 ? -1 : t->projected.column_ids[i - 1];
        XD_REQUIRE(ctx, t->projected.column_ids[i] > last && t->projected.column_ids[i] < size,
                   XD_ERROR_ARGUMENT, "teacher %d has column %lld after %lld, of %lld", index,
                   (long long)t->projected.column_ids[i], (long long)last, (long long)size);
    }
    return XD_OK;
}

static xd_result xdi_xtoken_check_logits(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const xd_rows *y = &t->logits;
    const bool scores = d->score == XD_XTOKEN_SCORE_CE || d->mode == XD_XTOKEN_SELECT;
    const bool positions = (xdi_xtoken_kind_of(t->kind)->traits & XDI_KIND_POSITIONS) != 0;
    XD_REQUIRE(ctx, y->dtype == XD_DTYPE_F32 || y->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
               "teacher %d is %s; F32 or BF16 is needed", index, xd_dtype_name(y->dtype));
    XD_REQUIRE(ctx, y->rows >= 0 && y->rows % d->sequences == 0 && (y->data || y->rows == 0), XD_ERROR_SHAPE,
               "teacher %d has %lld rows for %lld sequences", index, (long long)y->rows,
               (long long)d->sequences);
    const int64_t vocabulary = xdi_xtoken_vocabulary(t);
    const int64_t columns = t->projected.column_ids ? xdi_xtoken_columns(d, t, vocabulary) : vocabulary;
    XD_REQUIRE(ctx, vocabulary > 0 && y->cols >= columns, XD_ERROR_SHAPE,
               "teacher %d has %lld columns but %s %lld", index, (long long)y->cols,
               t->projected.column_ids ? "those chosen are" : "its vocabulary is", (long long)columns);
    if (t->projected.column_ids) XD_TRY(xdi_xtoken_check_column_ids(ctx, d, index));
    XD_REQUIRE(ctx, y->stride == 0 || y->stride >= y->cols, XD_ERROR_SHAPE,
               "teacher %d has stride %lld, less than its %lld columns", index, (long long)y->stride,
               (long long)y->cols);
    XD_TRY(xdi_vocab_check_ids(ctx, "labels of a teacher", &t->labels));
    XD_REQUIRE(ctx, !scores || t->labels.data || (positions && d->common.labels.data), XD_ERROR_ARGUMENT,
               "teacher %d has no labels to be scored by", index);
    return XD_OK;
}

/* The cache of a teacher without logits. */
static xd_result xdi_xtoken_check_cache(xd_ctx *ctx, const xd_xtoken_teacher *t, int index) {
    const xd_teacher_cache_info info = xd_teacher_cache_describe(t->cached.cache);
    XD_REQUIRE(ctx, t->cached.positions || t->logits.rows == 0, XD_ERROR_ARGUMENT,
               "teacher %d has a cache but no positions", index);
    XD_TRY(xdi_cache_check_origin(ctx, t->cached.cache, t->cached.origin));
    XD_REQUIRE(ctx, t->vocabulary == 0 || t->vocabulary == info.desc.vocabulary, XD_ERROR_SHAPE,
               "teacher %d has a vocabulary of %lld ids but its cache %lld", index, (long long)t->vocabulary,
               (long long)info.desc.vocabulary);
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, t->logits.rows); i++) {
        const int64_t at = t->cached.positions[i];
        const bool chunk = t->teacher_chunks && t->teacher_chunks[i] >= 0;
        XD_REQUIRE(ctx, at >= (chunk ? 0 : -1) && at < info.positions, XD_ERROR_ARGUMENT,
                   "teacher %d: row %lld is position %lld of a cache of %lld", index, (long long)i,
                   (long long)at, (long long)info.positions);
    }
    return XD_OK;
}

/* A teacher without logits. */
static xd_result xdi_xtoken_check_known(xd_ctx *ctx, const xd_xtoken_desc *d, int index) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const bool scored = d->score != XD_XTOKEN_SCORE_NONE && d->score != XD_XTOKEN_SCORE_CE;
    XD_REQUIRE(ctx, t->logits.rows >= 0 && t->logits.rows % d->sequences == 0 && !t->logits.data,
               XD_ERROR_SHAPE, "teacher %d has %lld rows%s for %lld sequences", index,
               (long long)t->logits.rows, t->logits.data ? " of logits beside its cache" : "",
               (long long)d->sequences);
    XD_REQUIRE(ctx, !scored, XD_ERROR_UNSUPPORTED, "teacher %d has no logits to be scored by %s", index,
               d->score == XD_XTOKEN_SCORE_ENTROPY ? "entropy" : "its largest probability");
    return t->cached.cache ? xdi_xtoken_check_cache(ctx, t, index) : XD_OK;
}

/* Sums of INVARIANT mode take no term above XD_FIXED_LARGEST. */
static xd_result xdi_xtoken_check_weight(xd_ctx *ctx, const char *what, float weight, int64_t at) {
    const bool fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    const double most = fixed ? XD_FIXED_LARGEST : XDI_XTOKEN_MOST;
    XD_REQUIRE(ctx, weight >= 0.0f && (double)weight < most, XD_ERROR_ARGUMENT,
               "%s %g at %lld is negative, not finite or not below %g", what, (double)weight, (long long)at,
               most);
    return XD_OK;
}

static bool xdi_xtoken_row_counts(const xd_loss_common *c, int64_t row) {
    if (c->mask && !c->mask[row]) return false;
    return !c->labels.data || xd_id_at(c->labels, row) != c->ignore_index;
}

/* The weights by which a teacher is scored; those of rows that have no label are not read. */
static xd_result xdi_xtoken_check_score_weights(xd_ctx *ctx, const xd_xtoken_desc *d,
                                                const xd_xtoken_teacher *t) {
    const bool labels = d->score == XD_XTOKEN_SCORE_CE || d->mode == XD_XTOKEN_SELECT;
    const float *weights = labels ? t->label_weight : t->position_weight;
    if (!labels && d->score == XD_XTOKEN_SCORE_NONE) return XD_OK;
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, t->logits.rows) && weights; i++) {
        const bool ignored = labels && t->labels.data && xd_id_at(t->labels, i) == d->common.ignore_index;
        if (!ignored)
            XD_TRY(xdi_xtoken_check_weight(ctx, labels ? "label weight" : "position weight", weights[i], i));
    }
    return XD_OK;
}

static xd_result xdi_xtoken_check_teacher(xd_ctx *ctx, const xd_xtoken_desc *d, int index, int64_t size) {
    const xd_xtoken_teacher *t = &d->teachers[index];
    const xdi_xtoken_kind *kind = xdi_xtoken_kind_of(t->kind);
    XD_REQUIRE(ctx, kind, XD_ERROR_ARGUMENT, "teacher %d is of kind %d", index, (int)t->kind);
    XD_TRY(xdi_xtoken_reads_logits(t) ? xdi_xtoken_check_logits(ctx, d, index)
                                      : xdi_xtoken_check_known(ctx, d, index));
    XD_REQUIRE(ctx, isfinite(t->weight) && isfinite(t->denominator_value) && t->denominator_value >= 0.0,
               XD_ERROR_ARGUMENT, "teacher %d has weight %g and denominator %g", index, t->weight,
               t->denominator_value);
    XD_REQUIRE(ctx, !d->normalise_by_vocabulary || xdi_xtoken_vocabulary(t) > 1, XD_ERROR_ARGUMENT,
               "teacher %d has a vocabulary of 1: nothing to normalise by", index);
    XD_TRY(xdi_xtoken_check_score_weights(ctx, d, t));
    if (!(kind->traits & XDI_KIND_POSITIONS)) XD_TRY(xdi_xtoken_check_chunks(ctx, d, index));
    return kind->check(ctx, d, index, size);
}

static xd_result xdi_xtoken_check_numbers(xd_ctx *ctx, const xd_xtoken_desc *d) {
    XD_REQUIRE(ctx, d->temperature > 0.0 && isfinite(d->temperature), XD_ERROR_ARGUMENT,
               "temperature %g must be positive and finite", d->temperature);
    XD_REQUIRE(ctx, d->columns > 0 && d->tail >= 0 && d->tile >= 0 && d->tile <= XDI_XTOKEN_TILE_MAX,
               XD_ERROR_ARGUMENT, "%lld columns, a tail of %lld and tiles of %lld", (long long)d->columns,
               (long long)d->tail, (long long)d->tile);
    XD_REQUIRE(ctx, isfinite(d->kd_weight) && isfinite(d->ce_weight) && isfinite(d->alpha), XD_ERROR_ARGUMENT,
               "weights %g and %g and alpha %g must be finite", d->kd_weight, d->ce_weight, d->alpha);
    XD_REQUIRE(ctx, isfinite(d->common.denominator_value) && d->common.denominator_value >= 0.0,
               XD_ERROR_ARGUMENT, "denominator %g must be finite and not negative",
               d->common.denominator_value);
    XD_REQUIRE(ctx, !d->common.row_loss, XD_ERROR_ARGUMENT,
               "row_loss is asked for, but chunks have losses, not the %lld rows",
               (long long)d->student.rows);
    XD_TRY(xdi_vocab_check_ids(ctx, "labels", &d->common.labels));
    XD_REQUIRE(ctx, !d->balance || d->common.labels.data, XD_ERROR_ARGUMENT,
               "balance needs labels: there is no CE without");
    for (int64_t b = 0; b < xdi_xtoken_read(ctx, d->sequences) && d->sample_weight; b++)
        XD_TRY(xdi_xtoken_check_weight(ctx, "sample weight", d->sample_weight[b], b));
    for (int64_t i = 0; i < xdi_xtoken_read(ctx, d->student.rows) && d->common.row_weight; i++)
        if (xdi_xtoken_row_counts(&d->common, i))
            XD_TRY(xdi_xtoken_check_weight(ctx, "row weight", d->common.row_weight[i], i));
    return XD_OK;
}

static xd_result xdi_xtoken_check_mode(xd_ctx *ctx, const xd_xtoken_desc *d) {
    double weights = 0.0;
    XD_REQUIRE(ctx, (int)d->mode >= 0 && (int)d->mode <= (int)XD_XTOKEN_SELECT, XD_ERROR_ARGUMENT, "mode %d",
               (int)d->mode);
    XD_REQUIRE(ctx, (int)d->score >= 0 && (int)d->score <= (int)XD_XTOKEN_SCORE_MAX_PROB, XD_ERROR_ARGUMENT,
               "score %d", (int)d->score);
    XD_REQUIRE(ctx,
               d->mode == XD_XTOKEN_SUM || (d->score == XD_XTOKEN_SCORE_NONE && !d->normalise_by_vocabulary),
               XD_ERROR_ARGUMENT, "scores and normalisation belong to mode SUM, not %d", (int)d->mode);
    for (int i = 0; i < d->teacher_count; i++) weights += d->teachers[i].weight;
    XD_REQUIRE(ctx, d->mode != XD_XTOKEN_AVERAGED_LOGITS || weights != 0.0, XD_ERROR_ARGUMENT,
               "the weights of averaged teachers sum to %g", weights);
    return XD_OK;
}

/* Some term must have a weight: the text's, or that of a teacher; dynamic weights and the selected one's are not 0. */
static xd_result xdi_xtoken_check_weights(xd_ctx *ctx, const xd_xtoken_desc *d) {
    bool teachers = d->mode == XD_XTOKEN_SELECT || d->score != XD_XTOKEN_SCORE_NONE;
    for (int i = 0; i < d->teacher_count; i++) teachers = teachers || d->teachers[i].weight != 0.0;
    XD_REQUIRE(ctx,
               d->balance || (d->common.labels.data && d->ce_weight != 0.0) ||
                   (teachers && d->kd_weight != 0.0),
               XD_ERROR_ARGUMENT, "no term of the loss has a weight: ce_weight is %g%s, kd_weight %g%s",
               d->ce_weight, d->common.labels.data ? "" : " without labels", d->kd_weight,
               teachers ? "" : " with teachers of weight 0");
    return XD_OK;
}

/* With several teachers a student row is read again after a gradient was written to it, and later ones are added. */
static xd_result xdi_xtoken_check_gradient(xd_ctx *ctx, const xd_xtoken_desc *d) {
    const bool several = d->teacher_count > 1;
    if (!d->common.gradient.data) return XD_OK;
    XD_TRY(xdi_vocab_check_gradient(ctx, d->vocab, &d->student, &d->common.gradient));
    XD_REQUIRE(ctx, !several || d->common.gradient.data != d->student.data, XD_ERROR_ARGUMENT,
               "%d teachers need a gradient apart from the student's logits", d->teacher_count);
    XD_REQUIRE(ctx, !several || d->common.gradient.dtype == XD_DTYPE_F32, XD_ERROR_DTYPE,
               "%d teachers add up in the gradient: it must be F32, not %s", d->teacher_count,
               xd_dtype_name(d->common.gradient.dtype));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_xtoken_validate(xd_ctx *ctx, const xd_xtoken_desc *d) {
    XD_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary: vocab is NULL");
    XD_REQUIRE(ctx, d->teachers && d->teacher_count > 0, XD_ERROR_ARGUMENT, "the loss has %d teachers",
               d->teacher_count);
    XD_TRY(xdi_vocab_check_rows(ctx, d->vocab, "student", &d->student, -1));
    XD_REQUIRE(ctx, d->sequences > 0 && d->sequences <= INT32_MAX && d->student.rows % d->sequences == 0,
               XD_ERROR_SHAPE, "student has %lld rows for %lld sequences", (long long)d->student.rows,
               (long long)d->sequences);
    XD_TRY(xdi_xtoken_check_numbers(ctx, d));
    XD_TRY(xdi_xtoken_check_mode(ctx, d));
    XD_TRY(xdi_xtoken_check_weights(ctx, d));
    const int64_t size = xd_vocab_describe(d->vocab).size;
    for (int i = 0; i < d->teacher_count; i++) XD_TRY(xdi_xtoken_check_teacher(ctx, d, i, size));
    return xdi_xtoken_check_gradient(ctx, d);
}
