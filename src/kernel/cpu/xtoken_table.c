/* The plain table of losses across tokenizers. */

#include "kernel/cpu/xtoken.h"

XD_PRIVATE const xd_xtoken_kernels *xdi_xtoken_kernels_plain(void) {
    static const xd_xtoken_kernels kernels = {
        xdi_cpu_xtoken_matrix_bytes,  xdi_cpu_xtoken_project_scratch,
        xdi_cpu_xtoken_prepare,       xdi_cpu_xtoken_project,
        xdi_cpu_xtoken_target,        xdi_cpu_xtoken_divergence,
        xdi_cpu_xtoken_delta,         xdi_cpu_xtoken_row_deltas,
        xdi_cpu_xtoken_log_probs,     xdi_cpu_xtoken_pair,
        xdi_cpu_xtoken_tail,          xdi_cpu_xtoken_merge,
        xdi_cpu_xtoken_total,         xdi_cpu_xtoken_close,
        xdi_cpu_xtoken_moments,       xdi_cpu_xtoken_pick,
        xdi_cpu_xtoken_compare,       xdi_cpu_xtoken_slots,
        xdi_cpu_xtoken_list_project,  xdi_cpu_xtoken_list_divergence,
        xdi_cpu_xtoken_list_delta,    xdi_cpu_xtoken_pick_scratch,
        xdi_cpu_xtoken_list_bytes,    xdi_cpu_xtoken_project_gradient,
        xdi_cpu_xtoken_mean_gradient, xdi_cpu_xtoken_pick_gradient,
        xdi_cpu_xtoken_list_gradient, xdi_cpu_xtoken_label_gradient,
        xdi_cpu_xtoken_rest_gradient, xdi_cpu_chunk_sums,
        xdi_cpu_chunk_averages,       xdi_cpu_chunk_spread,
        xdi_cpu_xtoken_settle,        xdi_cpu_xtoken_row_sums,
        xdi_cpu_xtoken_row_logs,      xdi_cpu_xtoken_product,
        xdi_cpu_xtoken_product_back,
    };
    return &kernels;
}
