#ifndef XDI_ALIGN_INTERNAL_H
#define XDI_ALIGN_INTERNAL_H

#include "align/projection_file.h"
#include "base/internal.h"

/* projection_file.c: the options as a file has them: the threshold is 0 when nothing uses it. */
XD_PRIVATE xd_projection_options xdi_projection_resolve(const xd_projection_options *options);
/* projection_file.c: are the options in range? */
XD_PRIVATE xd_result xdi_projection_check_options(xd_ctx *ctx, const xd_projection_options *options);

/* votes.c: the context and the sizes of both vocabularies. */
XD_PRIVATE xd_ctx *xdi_votes_describe(const xd_votes *votes, int64_t *student_size, int64_t *teacher_size);

/* project.c: the matrix in the columns ids[0 .. k) for student ids [begin, end). The blocks of out are given:
 * begin [end - begin + 1], student, slot and weight as many as these rows of m have. slots[teacher_size] is
 * scratch. */
XD_PRIVATE void xdi_projection_restrict(const xd_projection *m, const int64_t *ids, int64_t k, int64_t begin,
                                        int64_t end, int32_t *slots, int64_t *row_begin, int32_t *student,
                                        int32_t *slot, float *weight);

/* project.c: may the kernels of the context read the matrix? */
XD_PRIVATE bool xdi_projection_is_near(xd_ctx *ctx, const xd_projection *m);

/* chunks.c: exact cells as doubles, all of it in memory of the context's device; on a CPU the cells are spent. */
XD_PRIVATE xd_result xdi_xtoken_settle(xd_ctx *ctx, double *cells, int64_t count, double *out);

#endif
