#ifndef XDI_ALIGN_PROJECT_H
#define XDI_ALIGN_PROJECT_H

#include "align/projection.h"
#include "loss/vocab.h"

/* The vocabularies of a projection, and the teacher ids to compute. */
typedef struct xd_project_desc {
    const xd_vocab *vocab;           /* required; the student's */
    const xd_projection *projection; /* required; M below */
    const int64_t *columns;          /* [k] teacher ids, ascending; NULL -> all of them */
    int64_t k;                       /* without columns: M's teacher_size, or 0, which means the same */
} xd_project_desc;

/* A student's probabilities in the teacher's vocabulary: out = P M, M the projection, for some of M's
 * columns.
 *
 *   desc   read during the call
 *   probs  [T, V/tp] f32 or bf16; this rank's columns
 *   out    [T, k], the same on every rank of the vocabulary
 *
 * Collective over the vocabulary: one all-reduce of out. Allocates nothing. Sums in double, in rank order. In INVARIANT
 * mode they are exact, with the same bits for every split and on every device: this takes 2 MB of memory for the call, or
 * one row's [k] words of 16 bytes if that is more, and one all-reduce for as many rows as fit into it.
 *
 * On a GPU probs and out are device memory; the projection and columns may be in device or host memory. With both on the
 * device (xd_projection_upload, xd_vocab_topk_columns) the host does not wait, and outside INVARIANT mode nothing is
 * allocated; such columns are not checked: one outside M gives a column of zeros, and if they are not ascending the
 * gradient is wrong.
 *
 * Errors, the same on every rank: SHAPE (vocabulary and projection of different sizes), MISMATCH (ranks with different
 * numbers of rows; nothing is written then), DTYPE, ARGUMENT (a
 * column outside M, or out of order), MEMORY. */
XD_API xd_result xd_project(xd_ctx *ctx, const xd_project_desc *desc, xd_rows probs, double *out);

/* The vector-Jacobian product of xd_project: gradient = weight M^T, for this rank's columns. Collective
 * over the vocabulary in its checks only. Allocates nothing; on a GPU as xd_project, weight and gradient in device memory. The
 * same bits for every split and on every device. Errors as xd_project.
 *
 *   weight    [T, k]
 *   gradient  [T, V/tp] */
XD_API xd_result xd_project_backward(xd_ctx *ctx, const xd_project_desc *desc, const double *weight,
                                     xd_rows gradient);

/* Copies a projection to memory of the context's device, so that losses need not copy it in each call.
 *
 *   projection  in host memory; its arrays are read during the call
 *   out         for losses of this context only; the host cannot read its arrays. Free with
 *               xd_projection_unload, before the device is removed from the context
 *
 * Local. Takes 16 bytes per entry and 8 per row and column of device memory, and waits for the device. Errors, *out
 * untouched: ARGUMENT for a projection that is on the device already, MEMORY, DEVICE. */
XD_API xd_result xd_projection_upload(xd_ctx *ctx, const xd_projection *projection, xd_projection *out);

/* Frees such a copy; an empty one is fine. */
XD_API void xd_projection_unload(xd_ctx *ctx, xd_projection *projection);

#endif
