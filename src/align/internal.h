#ifndef XDI_ALIGN_INTERNAL_H
#define XDI_ALIGN_INTERNAL_H

#include "align/project.h"
#include "align/projection_file.h"
#include "base/internal.h"
#include "kernel/xtoken.h"
#include "loss/vocab.h"

/* projection_file.c: the options as a file has them: the threshold is 0 when nothing uses it. */
XD_PRIVATE xd_projection_options xdi_projection_resolve(const xd_projection_options *options);
/* projection_file.c: are the options in range? */
XD_PRIVATE xd_result xdi_projection_check_options(xd_ctx *ctx, const xd_projection_options *options);

/* votes.c: the context and the sizes of both vocabularies. */
XD_PRIVATE xd_ctx *xdi_votes_describe(const xd_votes *votes, int64_t *student_size, int64_t *teacher_size);
/* votes.c: whether xdi_votes_set_exact named the student id. */
XD_PRIVATE bool xdi_votes_is_exact(const xd_votes *votes, int64_t student_id);

/* projection.c: ARGUMENT when an array of the matrix is missing. */
XD_PRIVATE xd_result xdi_projection_given(xd_ctx *ctx, const xd_projection *projection);

/* votes.c: weights are not negative, and f32 holds them; those of rows where there is an id. */
XD_PRIVATE xd_result xdi_check_weight(xd_ctx *ctx, double weight, int64_t student_id, int64_t teacher_id);
XD_PRIVATE xd_result xdi_check_row_weights(xd_ctx *ctx, const xd_projection_rows *rows);

/* project.c: a projection as kernels take it. */
XD_PRIVATE xd_xtoken_projection xdi_projection_for_kernels(const xd_projection *m);

/* project.c: may the kernels of the context read the matrix? */
XD_PRIVATE bool xdi_projection_is_near(xd_ctx *ctx, const xd_projection *m);

/* project.c: the vocabularies, and the teacher ids to compute. */
typedef struct xdi_project_desc {
    const xd_vocab *vocab;           /* required; the student's */
    const xd_projection *projection; /* required; M below */
    const int64_t *columns;          /* [k] teacher ids, ascending; NULL -> all of them */
    int64_t k;                       /* without columns: 0 or M's teacher_size */
} xdi_project_desc;

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
XD_PRIVATE xd_result xdi_project(xd_ctx *ctx, const xdi_project_desc *desc, xd_rows probs, double *out);

/* Computes the vector-Jacobian product of xdi_project: gradient = weight M^T, for this rank's columns.
 *
 *   weight    [T, k], gradient [T, V/tp]; on the context's device
 *
 * Collective over the vocabulary in its checks only. Allocates nothing; on a GPU as xdi_project. The same bits for every split
 * and device. Errors as xdi_project. */
XD_PRIVATE xd_result xdi_project_backward(xd_ctx *ctx, const xdi_project_desc *desc, const double *weight,
                                          xd_rows gradient);

#endif
