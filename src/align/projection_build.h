#ifndef XDI_ALIGN_PROJECTION_BUILD_H
#define XDI_ALIGN_PROJECTION_BUILD_H

#include "align/projection_file.h"
#include "text/tokenizer.h"

/* What a projection covers. */
typedef struct xd_projection_report {
    int64_t tokens;     /* student ids in use */
    int64_t covered;    /* of these with a teacher id */
    int64_t exact;      /* of these in both tokenizers */
    int64_t cut;        /* tokens with more than max_pieces pieces */
    int64_t entries;    /* of the matrix */
    double mean_pieces; /* of a token, without limit; an exact token has one */
    double lost_bytes;  /* share of bytes in ignored pieces, or without teacher tokens */
    double lost_mass;   /* share of votes outside the k best, mean of covered rows */
    bool read;          /* from the directory */
} xd_projection_report;

/* The settings of a build. */
typedef struct xd_projection_desc {
    const xd_tokenizer *student, *teacher;
    const xd_projection_options *options; /* NULL -> xd_projection_defaults() */
    /* A folder that keeps the projection under its cache name. A damaged file is replaced. Several processes may use it
     * at once. NULL -> always builds. */
    const char *directory;
} xd_projection_desc;

/* Builds the projection of two tokenizers from the bytes of their tokens (docs/xtoken.md). Local.
 *
 *   out      [student's size, teacher's size] with its origin; free with xd_projection_destroy
 *   report   NULL when not needed; of a projection that was read: `read` and `entries`
 *
 * Takes an encoder, 64 bytes per vote, 110 per entry and 60 per id. Errors: ARGUMENT (options), DATA (split pattern),
 * MEMORY; those of xd_projection_save. */
XD_API xd_result xd_projection_build(xd_ctx *ctx, const xd_projection_desc *desc, xd_projection *out,
                                     xd_projection_report *report);

#endif
