#ifndef XDI_CHECKPOINT_CHECKPOINT_H
#define XDI_CHECKPOINT_CHECKPOINT_H

#include "comm/collective.h"
#include "tensor/part.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* Checkpoints of weights, optimizer states and averages, in device memory; any number of ranks loads them. Files, memory,
 * errors: docs/checkpoints.md. */

/* An average of a network. */
typedef struct xd_checkpoint_average {
    const char *name; /* required; letters, digits, '_' */
    xd_ema *ema;      /* over a list whose entry i is parts[i] */
} xd_checkpoint_average;

/* A network, with the same names, types, shapes and order on all ranks. */
typedef struct xd_checkpoint_network {
    /* NULL: the model itself. Otherwise letters, digits, '_', for files extra-NAME, optim-NAME, ema-NAME-AVERAGE. */
    const char *name;
    const xd_tensor_part *parts; /* [part_count] weights and buffers */
    int64_t part_count;
    /* Over a list whose entry i is parts[i], perhaps with padding rows behind it, which are neither saved nor loaded.
     * NULL -> no optimizer state. */
    xd_optimizer *optimizer;
    const xd_checkpoint_average *averages; /* [average_count] */
    int average_count;
} xd_checkpoint_network;

/* A file, such as config.json. */
typedef struct xd_checkpoint_file {
    const char *name; /* plain, not one of the checkpoint's, without ".tmp-" */
    const void *data; /* [bytes] */
    size_t bytes;
} xd_checkpoint_file;

/* What to save. */
typedef struct xd_checkpoint_save_desc {
    const char *root;                      /* required; made if missing; may differ between ranks */
    int64_t step;                          /* >= 0 */
    const xd_checkpoint_network *networks; /* [network_count] */
    int network_count;
    const char *state;               /* of rank 0: JSON object, at most 48 levels; NULL -> none */
    const xd_checkpoint_file *files; /* [file_count] of rank 0 */
    int file_count;
    uint64_t max_shard_bytes; /* of tensors in one file; 0 -> 5,000,000,000 */
    int keep;                 /* newest checkpoints to keep, at least 2; 0 -> all */
    bool overwrite;           /* replace this step's checkpoint; false -> STATE */
    size_t block_bytes;       /* of a checksum: power of two, 4096 to 2^30; 0 -> 4 MiB */
    size_t staging_bytes;     /* of tensors, at least 64; 0 -> 16 MiB */
} xd_checkpoint_save_desc;

/* Saves a checkpoint. Collective. On failure older ones are unchanged, and the new one is removed unless the message says that
 * it is complete.
 * Errors: ARGUMENT, SHAPE, DTYPE (optimizer, averages), MISMATCH (between ranks), STATE (step, or another save, exists), FORMAT
 * (state), UNSUPPORTED (file calls), IO, MEMORY. */
XD_API xd_result xd_checkpoint_save(xd_comm *comm, const xd_checkpoint_save_desc *desc);

/* Finds the highest step whose manifest and file sizes are valid. Local.
 * Errors: MISSING (checkpoint or root), IO, MEMORY, UNSUPPORTED (no `list`). */
XD_API xd_result xd_checkpoint_find(xd_ctx *ctx, const char *root, int64_t *step);

/* Checksums to compare before a load. */
typedef enum xd_checkpoint_check {
    XD_CHECKPOINT_CHECK_TOUCHED = 0, /* of needed blocks, each by one rank; reads them twice */
    XD_CHECKPOINT_CHECK_ALL,         /* of all blocks, distributed over ranks */
    XD_CHECKPOINT_CHECK_NONE         /* manifest, state.json */
} xd_checkpoint_check;

/* The step of xd_checkpoint_find. */
#define XD_CHECKPOINT_NEWEST INT64_C(-1)

/* What to load. */
typedef struct xd_checkpoint_load_desc {
    const char *root;
    int64_t step;                          /* or XD_CHECKPOINT_NEWEST */
    const xd_checkpoint_network *networks; /* [network_count] destinations */
    int network_count;
    xd_checkpoint_check check;
    bool lenient;            /* tensors that are missing, unexpected or of another shape are left out */
    bool convert;            /* floating point, by xd_cast; false -> DTYPE */
    size_t staging_bytes;    /* as for saves */
    bool keep_learning_rate; /* false -> optimizers take the saved one */
} xd_checkpoint_load_desc;

/* Findings, the same on every rank. */
typedef struct xd_checkpoint_report {
    int64_t step;
    int64_t loaded;              /* tensors, of optimizers and averages too */
    int64_t missing;             /* only requested */
    int64_t unexpected;          /* only in requested files */
    int64_t wrong_shape;         /* in both */
    int64_t converted;           /* of loaded */
    char names[200];             /* first five of the three, ", " between */
    int64_t rates;               /* learning rates that the load replaced by other ones */
    double own_rate, saved_rate; /* of the first of them */
} xd_checkpoint_report;

/* Loads parts, optimizers (states, step counts, learning rates) and averages (with counters). Collective. For a wrapper call
 * xd_parallel_publish afterwards.
 *
 *   report   also filled in if its counts are the error; may be NULL
 *   state    out: the saved state, trimmed, NUL-terminated, for xd_release; NULL if none; may be NULL
 *
 * Nothing changes before all ranks agree; IO after that leaves the arrays partly loaded.
 * Errors: ARGUMENT, MISMATCH, SHAPE, DTYPE (as for saves), MISSING, UNEXPECTED, STATE (kind of optimizer), FORMAT, CORRUPT
 * (names file, block, tensors), UNSUPPORTED (no `list`), IO, MEMORY. */
XD_API xd_result xd_checkpoint_load(xd_comm *comm, const xd_checkpoint_load_desc *desc,
                                    xd_checkpoint_report *report, char **state);

/* Compares all checksums, fingerprints and safetensors headers with the manifest. Local.
 * Errors: FORMAT, CORRUPT (as xd_checkpoint_load), MISSING (a file), IO, MEMORY. */
XD_API xd_result xd_checkpoint_verify(xd_ctx *ctx, const char *directory);

/* ---- looking into one ---- */

/* An open manifest. */
typedef struct xd_checkpoint xd_checkpoint;

/* Its facts. */
typedef struct xd_checkpoint_info {
    int64_t step, file_count, tensor_count;
    size_t block_bytes;
} xd_checkpoint_info;

/* A file. */
typedef struct xd_checkpoint_file_info {
    const char *name;
    const char *group; /* name without number, suffix; NULL: no tensors */
    uint64_t bytes;
    uint32_t crc32c;
} xd_checkpoint_file_info;

/* A tensor. */
typedef struct xd_checkpoint_tensor_info {
    const char *group, *name; /* unique together */
    int64_t file;
    xd_dtype dtype;
    int ndim;
    const int64_t *shape; /* [ndim] */
    uint64_t begin, end;  /* bytes in the file */
    uint64_t fingerprint; /* sum modulo 2^64 of hashes of elements' bits and indices */
} xd_checkpoint_tensor_info;

/* One of directory and text. */
typedef struct xd_checkpoint_desc {
    const char *directory;
    const char *text; /* [bytes] of a manifest */
    size_t bytes;
} xd_checkpoint_desc;

/* Reads and checks a manifest. Local. Errors: ARGUMENT (none or both of directory and text), IO, MEMORY, FORMAT, CORRUPT
 * (checksum). */
XD_API xd_result xd_checkpoint_open(xd_ctx *ctx, const xd_checkpoint_desc *desc, xd_checkpoint **out);

/* Frees the object. NULL is fine. */
XD_API void xd_checkpoint_close(xd_checkpoint *checkpoint);

/* Return facts: files as in the manifest, tensors by bytes of group and name. NULL for an index out of range. Local. */
XD_API xd_checkpoint_info xd_checkpoint_describe(const xd_checkpoint *checkpoint);
XD_API const xd_checkpoint_file_info *xd_checkpoint_file_at(const xd_checkpoint *checkpoint, int64_t index);
XD_API const xd_checkpoint_tensor_info *xd_checkpoint_tensor_at(const xd_checkpoint *checkpoint,
                                                                int64_t index);

/* Returns an index, -1 if unknown. O(log tensors). */
XD_API int64_t xd_checkpoint_tensor_find(const xd_checkpoint *checkpoint, const char *group,
                                         const char *name);

#endif
