/* Golden cases of losses from hidden states and the head (area classic). */
#include "golden.h"

#include <string.h>

static bool fused_claims(const golden_case *c) {
    return golden_origin_has(c, "LigerFusedLinearJSDFunction");
}

static xd_rows matrix(golden_case *c, const char *name) {
    const golden_array a = golden_tensor(c, name);
    const xd_rows rows = { golden_f32(c, &a), XD_DTYPE_F32, a.ndim == 2 ? a.shape[0] : 0,
                           a.ndim == 2 ? a.shape[1] : 0, 0 };
    return rows;
}

static float *bias(golden_case *c, const char *name) {
    if (!golden_has(c, name)) return NULL;
    const golden_array a = golden_tensor(c, name);
    return golden_f32(c, &a);
}

static void fused_desc(golden_case *c, xd_head_loss_desc *d) {
    const golden_array labels = golden_tensor(c, "in.labels");
    memset(d, 0, sizeof *d);
    d->student.hidden = matrix(c, "in.student_input");
    d->student.weight = matrix(c, "in.student_weight");
    d->student.bias = bias(c, "in.student_bias");
    d->teacher.hidden = matrix(c, "in.teacher_input");
    d->teacher.weight = matrix(c, "in.teacher_weight");
    d->teacher.bias = bias(c, "in.teacher_bias");
    d->loss.common.labels = xd_ids_of(golden_i64(c, &labels), XD_DTYPE_I64);
    d->loss.common.has_ignore_index = true;
    d->loss.common.ignore_index = (int64_t)golden_number(c, "cfg.ignore_index", XD_IGNORE_INDEX);
    d->loss.hard_weight = golden_number(c, "cfg.weight_hard_loss", 0.5);
    d->loss.soft_weight = golden_number(c, "cfg.weight_soft_loss", 0.5);
    d->loss.temperature = golden_number(c, "cfg.temperature", 1.0);
    d->loss.divergence = XD_JSD;
    d->loss.beta = golden_number(c, "cfg.beta", 0.5);
    golden_inert(c, "cfg.chunk_size"); /* rows that the peer takes at a time */
    if (d->loss.beta == 0.0) d->loss.divergence = XD_KL_FORWARD;
    d->loss.temperature_factor = XD_TEMPERATURE_FACTOR_ONE;
}

static void fused_run(golden_case *c) {
    xd_head_loss_desc d;
    xd_vocab *vocab = NULL;
    xd_loss_values values;
    fused_desc(c, &d);
    const int64_t rows = d.student.hidden.rows, width = d.student.hidden.cols, size = d.student.weight.rows;
    const xd_rows hidden = { golden_memory(c, (size_t)(rows * width + 1) * sizeof(float)), XD_DTYPE_F32, rows,
                             width, 0 };
    if (d.teacher.weight.rows != size) {
        golden_skip(c, "not built: a student vocabulary padded with logits of 0");
        return;
    }
    d.hidden_gradient = hidden;
    d.weight_gradient = (float *)golden_memory(c, (size_t)(size * width + 1) * sizeof(float));
    d.bias_gradient = (float *)golden_memory(c, (size_t)(size + 1) * sizeof(float));
    if (!golden_ok(c, vocab_even(golden_ctx(c), NULL, size, &vocab))) return;
    d.loss.vocab = vocab;
    if (golden_ok(c, golden_head_loss(golden_case_loans(c), &d, &values))) {
        golden_close(c, "out.loss", &values.loss, 1);
        golden_gradient(c, "grad.student_input", golden_widen(c, hidden.data, XD_DTYPE_F32, rows * width),
                        rows * width);
        golden_gradient(c, "grad.student_weight",
                        golden_widen(c, d.weight_gradient, XD_DTYPE_F32, size * width), size * width);
        if (d.student.bias)
            golden_gradient(c, "grad.student_bias", golden_widen(c, d.bias_gradient, XD_DTYPE_F32, size),
                            size);
    }
    xd_vocab_destroy(vocab);
}

const golden_kind golden_kinds_head[] = {
    { "fused linear JSD", fused_claims, fused_run },
    { NULL, NULL, NULL },
};
