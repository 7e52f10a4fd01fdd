#ifndef XDI_ALIGN_CHUNKS_H
#define XDI_ALIGN_CHUNKS_H

#include "base/internal.h"
#include "comm/collective.h"
#include "kernel/types.h"

/* The chunk of each position's next token, numbered from 0 in each sequence. Shift the ids of xd_chunk_ids first, by
 * xd_next_token_labels with ignore_index -1. Pass them in the order of a rank's rows.
 *
 * Packed documents and prompts: align with documents and masks, exclude XD_CHUNK_MASKED chunks by chunk_mask, and set the
 * shift's mask to 0 at first tokens. The loss then equals that of separate documents.
 *
 * On a GPU values, sums, averages, weights and gradients are device memory. Ids and sizes are host memory, passed as launch
 * arguments (200 a launch): the caller may change them at once. The bits are a CPU's. */
typedef struct xdi_chunk_map {
    const int64_t *ids; /* [sequences, held] chunk in [0, chunks), or -1 */
    int64_t sequences;  /* B */
    int64_t held;       /* positions of a sequence on this rank */
    int64_t chunks;     /* C, of every sequence */
    xd_comm *comm;      /* ranks with other positions; NULL -> none */
} xdi_chunk_map;

/* Counts the positions of each chunk, sizes[B, C]. Collective over comm: one all-reduce. Allocates nothing. Errors: ARGUMENT
 * (ids outside [-1, C)), MISMATCH (B or C differ). */
XD_PRIVATE xd_result xdi_chunk_sizes(xd_ctx *ctx, const xdi_chunk_map *map, int64_t *sizes);

/* Sums and counts the rows of each chunk. Collective over comm: two all-reduces. Allocates nothing. Sums in double, in rank
 * order.
 *
 *   values  [B * held, n] f32 or bf16
 *   sums    [B, C, n]
 *   sizes   [B, C]
 *
 * INVARIANT: exact, the same bits for every split, with twice the memory of sums for the call. A value of 2^22 or more gives
 * NaN;
 * -infinity is legal. NaN and infinity stay in their chunk and column, without an error. Errors: ARGUMENT (ids), SHAPE, DTYPE,
 * MEMORY. */
XD_PRIVATE xd_result xdi_chunk_sums(xd_ctx *ctx, const xdi_chunk_map *map, xd_rows values, double *sums,
                                    int64_t *sizes);

/* Divides: averages[chunks, n] = sums / sizes, chunks of all sequences; 0 for an empty chunk. averages may be the memory of
 * sums. Values that are not finite stay in place. Local. Allocates nothing. Errors: ARGUMENT (negative numbers). */
XD_PRIVATE xd_result xdi_chunk_averages(xd_ctx *ctx, const double *sums, const int64_t *sizes, int64_t chunks,
                                        int64_t n, double *averages);

/* Computes the vector-Jacobian product of averages: gradient[t] = weight[chunk of t] / size, 0 without a chunk.
 *
 *   weight    [B, C, n]; values that are not finite reach only the rows of their chunk
 *   gradient  [B * held, n] f32 or bf16
 *
 * Local. Allocates nothing. Errors: ARGUMENT, SHAPE, DTYPE. */
XD_PRIVATE xd_result xdi_chunk_averages_backward(xd_ctx *ctx, const xdi_chunk_map *map, const int64_t *sizes,
                                                 const double *weight, xd_rows gradient);

/* Marks the chunks that a loss counts: tokens on both sides, not masked. Local.
 *
 *   student_sizes, teacher_sizes  [count]
 *   mask                          [count] 0: no such chunk; NULL -> all exist
 *   exact                         [count] 0: leave it out, the sides differ; NULL -> they may differ
 *   valid                         [count]; as xd_positions.mask it gives xd_denominator_count a step's denominator */
XD_PRIVATE void xdi_valid_chunks(const int64_t *student_sizes, const int64_t *teacher_sizes,
                                 const uint8_t *mask, const uint8_t *exact, int64_t count, uint8_t *valid);

#endif
