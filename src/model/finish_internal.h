#ifndef XDI_MODEL_FINISH_INTERNAL_H
#define XDI_MODEL_FINISH_INTERNAL_H

#include "base/internal.h"
#include "model/build.h"
#include "model/describe_internal.h"

/* Sums that traits of weights ask for; and all weights that train. */
typedef enum xdi_finish_kind {
    XDI_FINISH_OVER_STAGES = 0,
    XDI_FINISH_OVER_TENSORS,
    XDI_FINISH_EMBEDDING,
    XDI_FINISH_ALL
} xdi_finish_kind;

/* The end of a step: of all stages of a rank, or of one that is reduced by itself. */
typedef struct xdi_finish {
    const char *call;
    xd_groups groups;
    const xd_built *built; /* NULL -> `one` is all */
    xd_stage one;
} xdi_finish;

/* parallel_reduce.c: its stages. */
XD_PRIVATE int xdi_finish_stage_count(const xdi_finish *f);
XD_PRIVATE xd_stage xdi_finish_stage(const xdi_finish *f, int index);
/* parallel_reduce.c: weights of one stage whose sum of a kind is not made: the one with this number, or NULL; `count`
 * receives their number, `elements` those of this rank's parts. */
XD_PRIVATE const xd_weight *xdi_finish_find(const xd_stage *stage, xdi_finish_kind kind, int64_t number,
                                            int64_t *count, int64_t *elements);
/* parallel_reduce.c: whether the ranks of a group have the same weights of a kind, where none has failed before; and
 * whether the embedding's copies fit. Collective. */
XD_PRIVATE xd_result xdi_finish_compare(xd_comm *comm, const xdi_finish *f, xdi_finish_kind kind,
                                        xd_result mine);
XD_PRIVATE xd_result xdi_finish_compare_copies(xd_ctx *ctx, const xdi_finish *f, xd_result before);
/* parallel_reduce.c: the sums of all kinds; and every weight of one, over a group, times a factor. */
XD_PRIVATE xd_result xdi_finish_traits(const xdi_finish *f);
XD_PRIVATE xd_result xdi_finish_each(xd_comm *tp, const xdi_finish *f, xdi_finish_kind kind, float factor);

#endif
