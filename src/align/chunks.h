#ifndef XDI_ALIGN_CHUNKS_H
#define XDI_ALIGN_CHUNKS_H

#include "comm/collective.h"
#include "kernel/types.h"

/* The chunk that each position's next token belongs to. Position t predicts the token at t + 1, so the ids of
 * xd_chunk_ids are shifted first: xd_next_token_labels with ignore_index -1. Logits stay where they are; a rank
 * passes the ids of the positions it holds, in the order of its rows. Chunks are numbered in each
 * sequence from 0.
 *
 * Packed documents and prompts: pass documents and masks for both sides of the alignment, take
 * XD_CHUNK_MASKED chunks out of the loss with its chunk_mask, and set the mask of the shift to 0 at the first
 * token of every document, which no position predicts. Then a sequence of several documents has the same
 * loss and gradient as the documents one by one.
 *
 * On a GPU values, sums, averages, weights and gradients are device memory; ids and sizes are host memory. They are passed
 * as launch arguments, about two hundred rows or chunks in each launch, so nothing is copied or waited for, and the caller
 * may change them when a call has returned. The bits are those of a CPU. */
typedef struct xd_chunk_map {
    const int64_t *ids; /* [sequences, held] chunk in [0, chunks), or -1: none */
    int64_t sequences;  /* B */
    int64_t held;       /* positions of each sequence on this rank */
    int64_t chunks;     /* C, the same for every sequence and rank */
    xd_comm *comm;      /* ranks that hold other positions of the same sequences; NULL -> none */
} xd_chunk_map;

/* sizes[B, C] = positions of each chunk over all ranks of comm. Collective over comm: one all-reduce.
 * Allocates nothing. Errors, the same on every rank: ARGUMENT for ids outside [-1, C), MISMATCH
 * for ranks that disagree about B or C. */
XD_API xd_result xd_chunk_sizes(xd_ctx *ctx, const xd_chunk_map *map, int64_t *sizes);

/* sums[B, C, n] = sum of the rows of each chunk, n the columns of values, and its sizes.
 *
 *   values  [B * held, n] f32 or bf16
 *   sizes   [B, C]
 *
 * Collective over comm: two all-reduces. Allocates nothing. Sums in double, in rank order. In INVARIANT mode
 * they are exact, with the same bits for every split: takes twice the memory of sums for the call; NaN where a value is not
 * below 2^22 (-infinity is allowed). Nothing is told: NaN and infinity go into the sums of their chunk and column, no further.
 * Errors, the same on every rank: ARGUMENT as above, SHAPE and DTYPE for values,
 * MEMORY. */
XD_API xd_result xd_chunk_sums(xd_ctx *ctx, const xd_chunk_map *map, xd_rows values, double *sums,
                               int64_t *sizes);

/* averages[chunks, n] = sums / sizes, chunks those of all sequences; 0 where a chunk is empty, whatever its sums. averages
 * and sums may share memory. What is not finite stays in its place. Local. Allocates nothing. Errors: ARGUMENT for negative
 * numbers. */
XD_API xd_result xd_chunk_averages(xd_ctx *ctx, const double *sums, const int64_t *sizes, int64_t chunks,
                                   int64_t n, double *averages);

/* The vector-Jacobian product of sums and averages: gradient[t] = weight[chunk of t] / size, 0 for rows
 * without a chunk.
 *
 *   weight    [B, C, n]; what is not finite reaches the rows of its chunk alone
 *   gradient  [B * held, n] f32 or bf16
 *
 * Local. Allocates nothing. Errors: ARGUMENT, SHAPE, DTYPE. */
XD_API xd_result xd_chunk_averages_backward(xd_ctx *ctx, const xd_chunk_map *map, const int64_t *sizes,
                                            const double *weight, xd_rows gradient);

/* Chunks that a loss counts: tokens on both sides, and not masked.
 *
 *   student_sizes, teacher_sizes  [count]
 *   mask                          [count] 0: no such chunk (padding); NULL -> all exist
 *   exact                         [count] 0: the sides differ, leave it out; NULL -> the sides may differ
 *   valid                         [count]
 *
 * With it as xd_positions.mask, xd_denominator_count gives the denominator of a whole step. Local. */
XD_API void xd_valid_chunks(const int64_t *student_sizes, const int64_t *teacher_sizes, const uint8_t *mask,
                            const uint8_t *exact, int64_t count, uint8_t *valid);

#endif
