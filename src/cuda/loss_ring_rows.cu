/* The second kernel of losses of rows that stay on the chip, a thread a row: what kernel/loss.h promises, from the records of
 * loss_ring.cu. */

/* The row from its record. */
static __device__ inline void xdi_cuda_ring_read(const xd_loss_args &a, int64_t r, xdi_cuda_ring_record *in, xd_loss_row *row) {
    const bool hard = xdi_cuda_loss_has_hard(a), soft = xdi_cuda_loss_has_soft(a);
    const bool bad = in->ref[XD_LOSS_MAX] == (double)INFINITY || (hard && isnan(in->total[XD_LOSS_HARD])) ||
                     (soft && isnan(in->total[XD_LOSS_SOFT]));
    const bool teacher_bad =
        soft && (in->ref[XD_LOSS_TEACHER_MAX] == (double)INFINITY || isnan(in->total[XD_LOSS_TEACHER]));
    if (bad) in->ref[XD_LOSS_MAX] = (double)NAN;
    if (teacher_bad) in->ref[XD_LOSS_TEACHER_MAX] = (double)NAN;
    in->total[XD_LOSS_TARGET] = in->label_x - in->ref[XD_LOSS_MAX];
    in->total[XD_LOSS_BAD] = bad || teacher_bad ? 1.0 : 0.0;
    xdi_cuda_loss_scalars(a, r, in->ref, in->total, row);
    xd_loss_settle(&a, r, row);
    if (!soft || a.divergence != XD_JSD || row->finding != (int)XD_ROW_FINE) return;
    double student, teacher; /* the term of the most probable column, which the sums lack */
    const double log = (in->ref[XD_LOSS_TEACHER_AT_ARG] - in->ref[XD_LOSS_TEACHER_MAX]) / a.temperature - row->teacher_log;
    xd_log_ratios(log + row->soft_log, a.beta, &student, &teacher);
    const double term = log == -(double)INFINITY ? 0.0 : exp(log) * teacher;
    xd_loss_mixture_scalars(&a, r, in->mixtures[XD_LOSS_TEACHER_MIXTURE] + term, in->mixtures[XD_LOSS_STUDENT_MIXTURE], row);
}

/* The gradient of the label's column and of the student's most probable one. */
static __device__ inline void xdi_cuda_ring_exact(const xd_loss_args &a, int64_t r, const xdi_cuda_ring_record &in,
                                                  const xd_loss_row &row) {
    const xdi_cuda_loss_column likely = { (int64_t)row.argmax, row.max, row.teacher_at_arg };
    xdi_cuda_set_element(a.gradient, r, likely.at, (float)xdi_cuda_loss_gradient_at(a, r, row, likely));
    if (!xdi_cuda_loss_has_hard(a)) return;
    const xdi_cuda_loss_column label = { xd_id_at(a.labels, r), in.label_x, in.label_y };
    xdi_cuda_set_element(a.gradient, r, label.at, (float)xdi_cuda_loss_gradient_at(a, r, row, label));
}

static __global__ void XDI_CUDA_KERNEL xdi_cuda_loss_ring_rows_kernel(const __grid_constant__ xd_loss_args a) {
    const int64_t r = xdi_cuda_flat_index(), first = r - (int64_t)(threadIdx.x % XDI_CUDA_WARP);
    bool zero = false;
    if (r < a.student.rows) {
        xd_loss_row row;
        memset(&row, 0, sizeof row);
        if (a.row_scale[r] != 0.0) {
            xdi_cuda_ring_record record = reinterpret_cast<const xdi_cuda_ring_record *>(a.references)[r];
            xdi_cuda_ring_read(a, r, &record, &row);
            zero = row.finding != (int)XD_ROW_FINE;
            if (a.gradient.data && !zero) xdi_cuda_ring_exact(a, r, record, row);
        }
        a.row[r] = row;
    }
    unsigned rows = __ballot_sync(0xffffffffu, zero && a.gradient.data != NULL);
    for (; rows != 0; rows &= rows - 1) { /* the warp zeroes what belongs to a finding */
        const int64_t found = first + __ffs((int)rows) - 1;
        for (int64_t c = (int64_t)(threadIdx.x % XDI_CUDA_WARP); c < a.gradient.cols; c += XDI_CUDA_WARP)
            xdi_cuda_set_element(a.gradient, found, c, 0.0f);
    }
}
