#ifndef XDI_ALIGN_PROJECT_H
#define XDI_ALIGN_PROJECT_H

#include "align/projection.h"
#include "loss/vocab.h"

/* The vocabularies, and the teacher ids to compute. */
typedef struct xd_project_desc {
    const xd_vocab *vocab;           /* required; the student's */
    const xd_projection *projection; /* required; M below */
    const int64_t *columns;          /* [k] teacher ids, ascending; NULL -> all of them */
    int64_t k;                       /* without columns: 0 or M's teacher_size */
} xd_project_desc;

/* Computes a student's probabilities in the teacher's vocabulary: out = P M, M the projection.
 *
 *   probs  [T, V/tp] f32 or bf16
 *   out    [T, k], the same on every rank of the vocabulary
 *
 * Collective over the vocabulary: one all-reduce. Allocates nothing. Sums in double, in rank order. INVARIANT: exact, the same
 * bits for every split and device. That takes 2 MB, or [k] words of 16 bytes, and an all-reduce for the rows that fit.
 *
 * On a GPU probs and out are device memory. With projection and columns there too the host neither waits nor checks columns: a
 * wrong one gives zeros, a wrong order a wrong gradient. Errors: SHAPE, MISMATCH (rows; nothing is written), DTYPE, ARGUMENT
 * (columns), MEMORY. */
XD_API xd_result xd_project(xd_ctx *ctx, const xd_project_desc *desc, xd_rows probs, double *out);

/* Computes the vector-Jacobian product of xd_project: gradient = weight M^T, for this rank's columns.
 *
 *   weight    [T, k], gradient [T, V/tp]; on the context's device
 *
 * Collective over the vocabulary in its checks only. Allocates nothing; on a GPU as xd_project. The same bits for every split
 * and device. Errors as xd_project. */
XD_API xd_result xd_project_backward(xd_ctx *ctx, const xd_project_desc *desc, const double *weight,
                                     xd_rows gradient);

/* Copies a projection to the context's device, so that losses need not copy it in each call. Local.
 *
 *   projection  in host memory
 *   out         for this context, not for the host; free with xd_projection_unload before the device leaves the context
 *
 * Takes 16 bytes of device memory per entry and 8 per row and column, and waits for the device. Errors, *out untouched:
 * ARGUMENT (already on the device), MEMORY, DEVICE. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out);

/* Frees such a copy; may be empty. */
XD_API void xd_projection_unload(xd_ctx *ctx, xd_projection *projection);

#endif
