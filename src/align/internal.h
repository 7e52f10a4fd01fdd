#ifndef XDI_ALIGN_INTERNAL_H
#define XDI_ALIGN_INTERNAL_H

#include "align/projection_file.h"
#include "base/internal.h"
#include "kernel/xtoken.h"

/* projection_file.c: the options as a file has them: the threshold is 0 when nothing uses it. */
XD_PRIVATE xd_projection_options xdi_projection_resolve(const xd_projection_options *options);
/* projection_file.c: are the options in range? */
XD_PRIVATE xd_result xdi_projection_check_options(xd_ctx *ctx, const xd_projection_options *options);

/* votes.c: the context and the sizes of both vocabularies. */
XD_PRIVATE xd_ctx *xdi_votes_describe(const xd_votes *votes, int64_t *student_size, int64_t *teacher_size);
/* votes.c: whether xd_votes_set_exact named the student id. */
XD_PRIVATE bool xdi_votes_is_exact(const xd_votes *votes, int64_t student_id);

/* votes.c: weights are not negative, and f32 holds them; those of rows where there is an id. */
/* projection.c: ARGUMENT when an array of the matrix is missing. */
XD_PRIVATE xd_result xdi_projection_given(xd_ctx *ctx, const xd_projection *projection);

XD_PRIVATE xd_result xdi_check_weight(xd_ctx *ctx, double weight, int64_t student_id, int64_t teacher_id);
XD_PRIVATE xd_result xdi_check_row_weights(xd_ctx *ctx, const xd_projection_rows *rows);

/* project.c: a projection as kernels take it. */
XD_PRIVATE xd_xtoken_projection xdi_projection_for_kernels(const xd_projection *m);

/* project.c: may the kernels of the context read the matrix? */
XD_PRIVATE bool xdi_projection_is_near(xd_ctx *ctx, const xd_projection *m);

#endif
