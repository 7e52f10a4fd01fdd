#ifndef XDI_CHECKPOINT_CHECKPOINT_H
#define XDI_CHECKPOINT_CHECKPOINT_H

#include "comm/collective.h"
#include "tensor/part.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* Checkpoints of a run's weights, optimizer states and averages: docs/checkpoints.md has files, memory and errors.
 *
 *     root/step-200/{model,optim,ema-NAME}.safetensors, state.json, manifest.json
 *     root/latest
 *
 * All ranks save, any number of ranks loads. The bytes of a file do not depend on ranks or layouts. A directory without a valid
 * manifest is no checkpoint. Tensors are in memory of the context's device. */

/* One average of a network. */
typedef struct xd_checkpoint_average {
    const char *name; /* required; letters, digits and '_'; part of the file's name */
    xd_ema *ema;      /* created over a list whose entry i is parts[i] */
} xd_checkpoint_average;

/* One network. All ranks pass the same names, types, shapes and order. */
typedef struct xd_checkpoint_network {
    /* NULL: the model itself. Else letters, digits and '_': extra-NAME, optim-NAME and ema-NAME-AVERAGE.safetensors. */
    const char *name;
    const xd_tensor_part *parts; /* [part_count] weights and buffers */
    int64_t part_count;
    /* Entry i is parts[i], then perhaps rows of padding, which are neither saved nor loaded. NULL -> no state is. */
    xd_optimizer *optimizer;
    const xd_checkpoint_average *averages; /* [average_count] */
    int average_count;
} xd_checkpoint_network;

/* An extra file, such as config.json. */
typedef struct xd_checkpoint_file {
    const char *name; /* plain, not one of the checkpoint's, without ".tmp-" */
    const void *data; /* [bytes] */
    size_t bytes;
} xd_checkpoint_file;

/* What to save; only root is required. */
typedef struct xd_checkpoint_save_desc {
    const char *root;                      /* required; made if missing; paths may differ between ranks */
    int64_t step;                          /* >= 0 */
    const xd_checkpoint_network *networks; /* [network_count] */
    int network_count;
    const char *state;               /* of rank 0: a JSON object of at most 48 levels; NULL -> none */
    const xd_checkpoint_file *files; /* [file_count] of rank 0 */
    int file_count;
    uint64_t max_shard_bytes; /* of tensors in one file; 0 -> 5,000,000,000 */
    int keep;                 /* at least 2: the newest and this one; 0 -> all */
    bool overwrite;           /* of a checkpoint of this step */
    size_t block_bytes;       /* of a checksum, a power of two from 4096 to 2^30; 0 -> 4 MiB */
    size_t staging_bytes;     /* of tensors in memory, at least 64; 0 -> 16 MiB */
} xd_checkpoint_save_desc;

/* Saves a checkpoint. Collective. On failure older checkpoints are unchanged, and the new one is removed unless the message
 * says that it is complete.
 * Errors: ARGUMENT, SHAPE, DTYPE (of an optimizer or average), MISMATCH (between ranks), STATE (the step or another save
 * exists), FORMAT (state), UNSUPPORTED (file calls), IO, MEMORY, PEER. */
XD_API xd_result xd_checkpoint_save(xd_comm *comm, const xd_checkpoint_save_desc *desc);

/* Finds the highest step in root whose manifest and file sizes are valid. Local.
 * Errors: MISSING (checkpoint or root), IO, MEMORY, UNSUPPORTED (no `list`). */
XD_API xd_result xd_checkpoint_find(xd_ctx *ctx, const char *root, int64_t *step);

/* Checksums to compare before a load changes anything. */
typedef enum xd_checkpoint_check {
    XD_CHECKPOINT_CHECK_TOUCHED = 0, /* of needed blocks, each by one rank; read twice */
    XD_CHECKPOINT_CHECK_ALL,         /* of all blocks, distributed over the ranks */
    XD_CHECKPOINT_CHECK_NONE         /* of manifest and state.json only */
} xd_checkpoint_check;

/* The step of xd_checkpoint_find. */
#define XD_CHECKPOINT_NEWEST INT64_C(-1)

/* What to load; only root is required. */
typedef struct xd_checkpoint_load_desc {
    const char *root;
    int64_t step;                          /* or XD_CHECKPOINT_NEWEST */
    const xd_checkpoint_network *networks; /* [network_count] destinations; others are not loaded */
    int network_count;
    xd_checkpoint_check check;
    bool lenient;         /* accept missing, unexpected, wrongly shaped; they stay unchanged */
    bool convert;         /* floating-point types, as xd_cast; false -> DTYPE */
    size_t staging_bytes; /* as for saves */
} xd_checkpoint_load_desc;

/* What a load found; the same on every rank. */
typedef struct xd_checkpoint_report {
    int64_t step;
    int64_t loaded;      /* tensors, states of optimizers and averages included */
    int64_t missing;     /* only requested */
    int64_t unexpected;  /* only in a requested file */
    int64_t wrong_shape; /* in both, with other shapes */
    int64_t converted;   /* of those loaded */
    char names[200];     /* first five of these three; ", " between */
} xd_checkpoint_report;

/* Loads parts, optimizers (states, step counts, learning rates) and averages (with counters). Collective.
 *
 *   report   also filled in when its counts make the load fail; may be NULL
 *   state    the saved state, trimmed, NUL-terminated, for xd_release; NULL if there is none; may be NULL
 *
 * A wrapper's parts need xd_parallel_publish afterwards. Nothing changes before all ranks agree; IO while data moves leaves the
 * arrays partly loaded.
 * Errors: ARGUMENT, MISMATCH, SHAPE, DTYPE (as for saves), MISSING, UNEXPECTED, STATE (another kind of optimizer), FORMAT,
 * CORRUPT (names file, block and tensors), UNSUPPORTED (as for xd_checkpoint_find), IO, MEMORY, PEER. */
XD_API xd_result xd_checkpoint_load(xd_comm *comm, const xd_checkpoint_load_desc *desc,
                                    xd_checkpoint_report *report, char **state);

/* Compares every checksum, fingerprint and safetensors header with the manifest. Local.
 * Errors: FORMAT, CORRUPT (names file, block and tensors), MISSING (a file), IO, MEMORY. */
XD_API xd_result xd_checkpoint_verify(xd_ctx *ctx, const char *directory);

/* ---- looking into one ---- */

/* An open manifest. */
typedef struct xd_checkpoint xd_checkpoint;

/* Facts of a checkpoint. */
typedef struct xd_checkpoint_info {
    int64_t step, file_count, tensor_count;
    size_t block_bytes;
} xd_checkpoint_info;

/* One file; the checkpoint owns the memory. */
typedef struct xd_checkpoint_file_info {
    const char *name;
    const char *group; /* name without number and suffix; NULL without tensors */
    uint64_t bytes;
    uint32_t crc32c;
} xd_checkpoint_file_info;

/* One tensor; the checkpoint owns the memory. */
typedef struct xd_checkpoint_tensor_info {
    const char *group, *name; /* a name is unique in its group */
    int64_t file;
    xd_dtype dtype;
    int ndim;
    const int64_t *shape; /* [ndim] */
    uint64_t begin, end;  /* bytes in the file */
    uint64_t fingerprint; /* sum modulo 2^64 of a hash of each element's bits and index */
} xd_checkpoint_tensor_info;

/* What to open: one of directory and text. */
typedef struct xd_checkpoint_desc {
    const char *directory;
    const char *text; /* [bytes] of a manifest, read during the call only */
    size_t bytes;
} xd_checkpoint_desc;

/* Reads and checks a manifest, no other file. Local. Errors: ARGUMENT (none or both of directory and text), IO, MEMORY,
 * FORMAT, CORRUPT (its checksum). */
XD_API xd_result xd_checkpoint_open(xd_ctx *ctx, const xd_checkpoint_desc *desc, xd_checkpoint **out);

/* Frees the object. NULL is fine. */
XD_API void xd_checkpoint_close(xd_checkpoint *checkpoint);

/* Return facts. Local. Order: files as in the manifest, tensors by bytes of group and name. NULL for an index out of range. */
XD_API xd_checkpoint_info xd_checkpoint_describe(const xd_checkpoint *checkpoint);
XD_API const xd_checkpoint_file_info *xd_checkpoint_file_at(const xd_checkpoint *checkpoint, int64_t index);
XD_API const xd_checkpoint_tensor_info *xd_checkpoint_tensor_at(const xd_checkpoint *checkpoint,
                                                                int64_t index);

/* Returns the index of a tensor, -1 if unknown. O(log tensors). */
XD_API int64_t xd_checkpoint_tensor_find(const xd_checkpoint *checkpoint, const char *group,
                                         const char *name);

#endif
