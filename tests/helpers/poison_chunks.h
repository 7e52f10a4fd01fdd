/* poison_chunks.h - families of sums and averages of chunks, and of choices of columns. Sums and averages report nothing: what is
 * not finite goes into the results of its chunk, and no further. */
#ifndef XD_POISON_CHUNKS_H
#define XD_POISON_CHUNKS_H

#include "poison_loss.h"
#include "xd_private.h"
#include "loss_calls.h"

enum { POISON_CB = 2, POISON_CH = 6, POISON_CC = 3, POISON_CN = 7 };

typedef struct poison_chunks {
    xdi_chunk_map map;
    xd_rows values, gradient;
    double *sums, *averages, *weight;
    int64_t *sizes;
    int64_t ids[POISON_CB * POISON_CH];
    int row_unit[POISON_CB * POISON_CH];
} poison_chunks;

/* Rows split over ranks are positions of the same sequences, so that every rank has the sums. */
static inline bool poison_chunks_build(poison_scene *s) {
    static const int64_t ids[POISON_CH] = { 0, 0, 1, 1, 2, -1 };
    const xd_dtype dtype = s->variant ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    const int64_t rows = POISON_CB * POISON_CH, slots = POISON_CB * POISON_CC;
    poison_chunks *p = (poison_chunks *)(s->own = poison_take(s, sizeof *p));
    const bool sums = !strcmp(s->family->name, "xdi_chunk_sums"),
               averages = !strcmp(s->family->name, "xdi_chunk_averages");
    for (int r = 0; r < (int)rows; r++) {
        p->ids[r] = ids[r % POISON_CH];
        p->row_unit[r] = p->ids[r] < 0 ? 100 + r : r / POISON_CH * POISON_CC + (int)p->ids[r];
    }
    p->map.ids = p->ids;
    p->map.sequences = POISON_CB;
    p->map.held = POISON_CH;
    p->map.chunks = POISON_CC;
    p->map.comm = s->data;
    const int out = POISON_OUT | POISON_SAME;
    poison_part *part = poison_matrix(s, "sums",
                                      averages ? POISON_IN
                                      : sums   ? out
                                               : 0,
                                      XD_DTYPE_F64, slots, averages || sums ? POISON_CN : 1);
    p->sums = (double *)part->data;
    if (averages) poison_fill(part, 3, 0.0, 2.0);
    part = poison_matrix(s, "sizes", sums ? out : 0, XD_DTYPE_I64, slots, 1);
    p->sizes = (int64_t *)part->data;
    for (int64_t i = 0; i < slots; i++) p->sizes[i] = 2;
    if (sums) {
        part = poison_matrix(s, "values", POISON_IN, dtype, rows, POISON_CN);
        poison_fill(part, 1 + 100 * (uint64_t)s->rank, 0.0, 3.0);
        part->unit = p->row_unit;
        p->values = poison_rows(part);
    } else if (averages) {
        p->averages =
            (double *)poison_matrix(s, "averages", POISON_OUT, XD_DTYPE_F64, slots, POISON_CN)->data;
    } else {
        part = poison_matrix(s, "weight", POISON_IN, XD_DTYPE_F64, slots, POISON_CN);
        poison_fill(part, 5, 0.0, 1.0);
        p->weight = (double *)part->data;
        part = poison_matrix(s, "gradient", POISON_OUT, dtype, rows, POISON_CN);
        part->unit = p->row_unit;
        p->gradient = poison_rows(part);
    }
    s->unit = 1;
    return true;
}

/* Averages of a chunk without positions are 0, whatever its sums. */
static inline void poison_chunks_leave_out(poison_scene *s, int way) {
    poison_chunks *p = (poison_chunks *)s->own;
    (void)way;
    if (s->layout == POISON_ROWS_SPLIT && s->rank != 1) return;
    if (!p->values.data) p->sizes[s->unit] = 0;
    for (int r = 0; r < POISON_CB * POISON_CH; r++)
        if (p->row_unit[r] == s->unit) p->ids[r] = -1;
}

static inline xd_result poison_chunk_sums_call(poison_scene *s) {
    poison_chunks *p = (poison_chunks *)s->own;
    return xdi_chunk_sums(s->ctx, &p->map, p->values, p->sums, p->sizes);
}

static inline xd_result poison_chunk_averages_call(poison_scene *s) {
    poison_chunks *p = (poison_chunks *)s->own;
    return xdi_chunk_averages(s->ctx, p->sums, p->sizes, POISON_CB * POISON_CC, POISON_CN, p->averages);
}

static inline xd_result poison_chunk_backward_call(poison_scene *s) {
    poison_chunks *p = (poison_chunks *)s->own;
    return xdi_chunk_averages_backward(s->ctx, &p->map, p->sizes, p->weight, p->gradient);
}

static inline poison_verdict poison_expect_chunks(const poison_scene *s, const poison_part *part,
                                                  double value) {
    (void)s, (void)part, (void)value;
    return POISON_ALONE;
}

static const poison_family poison_family_chunk_sums = {
    .name = "xdi_chunk_sums",
    .variants = 2,
    .ways = 1,
    .layouts = { true, false, true },
    .build = poison_chunks_build,
    .call = poison_chunk_sums_call,
    .leave_out = poison_chunks_leave_out,
    .expect = poison_expect_chunks,
};
static const poison_family poison_family_chunk_averages = {
    .name = "xdi_chunk_averages",
    .variants = 1,
    .ways = 1,
    .layouts = { true, false, false },
    .build = poison_chunks_build,
    .call = poison_chunk_averages_call,
    .leave_out = poison_chunks_leave_out,
    .expect = poison_expect_chunks,
};
static const poison_family poison_family_chunk_averages_backward = {
    .name = "xdi_chunk_averages_backward",
    .variants = 2,
    .ways = 1,
    .layouts = { true, false, false },
    .build = poison_chunks_build,
    .call = poison_chunk_backward_call,
    .leave_out = poison_chunks_leave_out,
    .expect = poison_expect_chunks,
};

/* ---- xd_vocab_topk_columns, also with values: the row that is not finite has no vote, and its values are all NaN ---- */

enum { POISON_JB = 2, POISON_JH = 3, POISON_JK = 4 };

typedef struct poison_columns_call {
    xd_vocab_topk_desc desc;
    xd_status status;
    xd_rows values;
    int64_t *ids;
    float *importance;
    bool reported;
    uint8_t mask[POISON_JB * POISON_JH];
} poison_columns_call;

/* The rows of sequence 0 are unit 1, and its columns: one of them has the value. Variants: f32, bf16. */
static inline bool poison_columns_build(poison_scene *s) {
    static const int sequence_unit[POISON_JB] = { 1, 100 },
                     row_unit[POISON_JB * POISON_JH] = { 50, 1, 51, 52, 53, 54 };
    const bool gather = !strcmp(s->family->name, "xd_vocab_topk_columns of values");
    const int same = s->layout == POISON_VOCABULARY ? POISON_SAME : 0;
    const xd_dtype dtype = s->variant ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    poison_columns_call *p = (poison_columns_call *)(s->own = poison_take(s, sizeof *p));
    if (!poison_vocab(s, poison_size(s))) return false;
    const xd_interval columns = poison_columns(s);
    poison_part *logits =
        poison_shard(s, "logits", POISON_IN, dtype, POISON_JB * POISON_JH, columns, poison_size(s));
    poison_fill(logits, s->layout == POISON_ROWS_SPLIT ? 1 + 100 * (uint64_t)s->rank : 1, 0.0, 3.0);
    logits->unit = row_unit;
    p->desc.vocab = (const xd_vocab *)s->objects;
    p->desc.logits = poison_rows(logits);
    p->desc.sequences = POISON_JB;
    p->desc.mask = p->mask;
    p->desc.comm = s->data;
    p->desc.k = POISON_JK;
    memset(p->mask, 1, sizeof p->mask);
    poison_part *part = poison_matrix(s, "ids", POISON_OUT | POISON_SAME, XD_DTYPE_I64, POISON_JB, POISON_JK);
    part->unit = sequence_unit;
    p->ids = (int64_t *)part->data;
    if (gather) {
        part = poison_matrix(s, "values", POISON_OUT | POISON_OWN | POISON_LOG | same, dtype,
                             POISON_JB * POISON_JH, POISON_JK);
        part->unit = row_unit;
        p->values = poison_rows(part);
        s->status = &p->status;
        s->reported = &p->reported;
    } else {
        part = poison_matrix(s, "importance", POISON_OUT | (s->data ? POISON_SAME : 0), XD_DTYPE_F32,
                             POISON_JB, columns.end - columns.begin);
        part->unit = sequence_unit;
        p->importance = (float *)part->data;
    }
    s->unit = 1;
    s->weighed = gather; /* values are of columns that depend on the unit */
    return true;
}

static inline void poison_columns_leave_out(poison_scene *s, int way) {
    (void)way;
    if (s->layout != POISON_ROWS_SPLIT || s->rank == 1) ((poison_columns_call *)s->own)->mask[s->unit] = 0;
}

static inline xd_result poison_columns_run(poison_scene *s) {
    poison_columns_call *p = (poison_columns_call *)s->own;
    return vocab_topk_columns(s->ctx, &p->desc, p->ids, p->importance);
}

/* What is told is left to the loss that takes the values: here to whoever looks for rows of NaN alone. */
static inline xd_result poison_gather_run(poison_scene *s) {
    poison_columns_call *p = (poison_columns_call *)s->own;
    int64_t told[2] = { 0, -1 };
    p->reported = true;
    const xd_result result = vocab_topk_gather(s->ctx, &p->desc, p->ids, p->values);
    for (int64_t r = 0; r < p->values.rows && result == XD_OK; r++) {
        int64_t bad = 0;
        for (int64_t j = 0; j < POISON_JK; j++)
            bad += isnan(xd_load_f64(p->values.data, p->values.dtype, r * POISON_JK + j)) != 0;
        CHECK(bad == 0 || bad == POISON_JK);
        if (bad == 0 || !p->mask[r]) continue;
        told[0]++;
        told[1] = r;
    }
    if (s->data) CHECK_EQ_INT(xd_all_reduce(s->data, told, told, 2, XD_DTYPE_I64, XD_MAX), XD_OK);
    p->status.not_finite = told[0];
    p->status.first_row = told[1];
    p->status.first_value = (double)NAN;
    return result;
}

static inline poison_verdict poison_expect_columns(const poison_scene *s, const poison_part *part,
                                                   double value) {
    const bool bad = isnan(value) || value == (double)INFINITY;
    (void)part;
    if (!strcmp(s->family->name, "xd_vocab_topk_columns of values")) return bad ? POISON_FOUND : POISON_FINE;
    return bad ? POISON_GONE : POISON_FINE;
}

static const poison_family poison_family_topk_columns = {
    .name = "xd_vocab_topk_columns",
    .variants = 2,
    .ways = 1,
    .layouts = { true, true, true },
    .build = poison_columns_build,
    .call = poison_columns_run,
    .leave_out = poison_columns_leave_out,
    .expect = poison_expect_columns,
    .release = poison_release_vocab,
};
static const poison_family poison_family_topk_gather = {
    .name = "xd_vocab_topk_columns of values",
    .variants = 2,
    .ways = 1,
    .layouts = { true, true, true },
    .build = poison_columns_build,
    .call = poison_gather_run,
    .leave_out = poison_columns_leave_out,
    .expect = poison_expect_columns,
    .release = poison_release_vocab,
};

/* ---- xdi_compat_jsd_of_probabilities: reports nothing, as its reference ---- */

typedef struct poison_jsd {
    xd_rows student, teacher, gradient;
    double beta, denominator, loss;
} poison_jsd;

static inline bool poison_jsd_build(poison_scene *s) {
    poison_jsd *p = (poison_jsd *)(s->own = poison_take(s, sizeof *p));
    const xd_dtype dtype = s->variant == 1 ? XD_DTYPE_BF16 : XD_DTYPE_F32;
    poison_part *student = poison_matrix(s, "student", POISON_IN, dtype, POISON_T, POISON_CN);
    poison_part *teacher = poison_matrix(s, "teacher", POISON_IN, dtype, POISON_T, POISON_CN);
    poison_part *gradient = poison_matrix(s, "gradient", POISON_OUT, dtype, POISON_T, POISON_CN);
    poison_fill(student, 1, 0.15, 0.1);
    poison_fill(teacher, 2, 0.15, 0.1);
    p->student = poison_rows(student);
    p->teacher = poison_rows(teacher);
    p->gradient = poison_rows(gradient);
    p->beta = s->variant == 2 ? 0.0 : 0.4;
    p->denominator = 5.0;
    poison_one(s, "beta", POISON_IN | POISON_ONE, &p->beta);
    poison_one(s, "denominator", POISON_IN | POISON_ONE, &p->denominator);
    poison_one(s, "loss", POISON_TOTAL, &p->loss);
    s->unit = POISON_UNIT;
    return true;
}

static inline xd_result poison_jsd_call(poison_scene *s) {
    poison_jsd *p = (poison_jsd *)s->own;
    return xdi_compat_jsd_of_probabilities(s->ctx, p->student, p->teacher, p->beta, p->denominator,
                                           p->gradient, &p->loss);
}

static inline poison_verdict poison_expect_jsd(const poison_scene *s, const poison_part *part, double value) {
    (void)s;
    if (!strcmp(part->name, "beta")) return value >= 0.0 && value <= 1.0 ? POISON_LEGAL : POISON_REFUSED;
    if (!strcmp(part->name, "denominator"))
        return isfinite(value) && value != 0.0 ? POISON_SKIP : POISON_REFUSED;
    return POISON_ALONE;
}

static const poison_family poison_family_jsd = {
    .name = "xdi_compat_jsd_of_probabilities",
    .variants = 3,
    .layouts = { true, false, false },
    .build = poison_jsd_build,
    .call = poison_jsd_call,
    .expect = poison_expect_jsd,
};

#endif
