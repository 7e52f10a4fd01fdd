#ifndef XDI_CHECKPOINT_CHECKPOINT_H
#define XDI_CHECKPOINT_CHECKPOINT_H

#include "comm/collective.h"
#include "tensor/part.h"
#include "train/ema.h"
#include "train/optimizer.h"

/* Checkpoints: weights, states of optimizers and averages of a run, saved by all ranks together and loaded on any other number
 * of ranks, each of which holds any part of any tensor.
 *
 *     root/step-200/model.safetensors        weights and buffers, as Hugging Face reads them
 *                   optim.safetensors        optim.exp_avg.NAME, optim.exp_avg_sq.NAME, optim.master.NAME, optim.step.NAME
 *                   ema-slow.safetensors     an average, under the names of the weights
 *                                            and ema.compensation.NAME, where it has one
 *                   state.json               step, settings of optimizers and averages, the caller's own state
 *                   manifest.json            sizes and checksums of all files, places and fingerprints of all tensors
 *     root/latest                            "step-200", a hint for people
 *
 * Beyond max_shard_bytes a file becomes model-00001-of-00002.safetensors and so on, with model.safetensors.index.json. Files
 * are logical: every tensor is there once, whole, in global order, however many ranks wrote it, so equal content gives equal
 * bytes of every file on every layout. A directory appears under its name when all of its files are on disk; one without a
 * valid manifest is no checkpoint, whatever its name. Elements lie in memory of the context's device.
 *
 * A save takes the lock root/checkpoint.lock, so there is one at a time, and removes what killed ones have left. */

/* One average of a network. */
typedef struct xd_checkpoint_average {
    const char *name; /* required; letters, digits and '_': part of the file's name. The file has the names
                       * and shapes of the weights: called model.safetensors, it is the averaged model */
    xd_ema *ema;      /* created over a list whose entry i is parts[i] */
} xd_checkpoint_average;

/* What is saved and loaded of one network. All ranks have the same list: names, types, shapes, order. */
typedef struct xd_checkpoint_network {
    const char *name; /* NULL: the model itself; otherwise letters, digits and '_': its weights are in
                       * extra-NAME.safetensors, its optimizer in optim-NAME.safetensors, its averages in
                       * ema-NAME-AVERAGE.safetensors */
    const xd_tensor_part *parts; /* [part_count] weights and buffers */
    int64_t part_count;
    xd_optimizer *optimizer; /* entry i of its list is parts[i], where that ends its region with any rows
                              * of padding behind it, which are neither saved nor loaded; NULL -> its
                              * state is neither saved nor loaded */
    const xd_checkpoint_average *averages; /* [average_count] */
    int average_count;
} xd_checkpoint_network;

/* A file of its own in the checkpoint: config.json, tokenizer.json. */
typedef struct xd_checkpoint_file {
    const char *name; /* a plain name that the checkpoint does not use itself, without ".tmp-" */
    const void *data; /* [bytes] */
    size_t bytes;
} xd_checkpoint_file;

/* What to save and where. Zero is the default of every field but root. */
typedef struct xd_checkpoint_save_desc {
    const char *root; /* required; the directory of all checkpoints of a run, made when it is missing. Ranks
                       * may reach it by different paths */
    int64_t step;     /* from 0 on */
    const xd_checkpoint_network *networks; /* [network_count] */
    int network_count;
    const char *state; /* of rank 0: a JSON object of at most 48 levels that loads hand back as it is; NULL
                        * -> none */
    const xd_checkpoint_file *files; /* [file_count], of rank 0 */
    int file_count;
    uint64_t max_shard_bytes; /* of tensors in one file; 0 -> 5,000,000,000 */
    int keep;                 /* checkpoints that stay, at least 2: the newest ones and this one; 0 -> all */
    bool overwrite;           /* replace a checkpoint of this step */
    size_t block_bytes;   /* a checksum covers so many bytes of a file, a power of two from 4096 to 2^30; 0
                           * -> 4 MiB */
    size_t staging_bytes; /* of tensors in memory of this rank at once, at least 64; 0 -> 16 MiB */
} xd_checkpoint_save_desc;

/* Saves a checkpoint. Rank 0 makes root and the folders above it where they are missing. Each rank writes the byte ranges that it
 * holds into files that rank 0 has laid out. Rank 0 writes the rest, and gives the directory its name when everything is on
 * disk. Then root/latest is written, and checkpoints beyond `keep` are removed. Ranges of a MiB and more go past the page cache (xd_publish_write_direct), so a load right after reads the disk; while
 * they do, a thread of each rank forms their checksums, where the system has one: it allocates nothing and calls nothing of the
 * context.
 *
 * Collective. Memory: staging_bytes, 8 bytes for each block and each tensor, 16 for each parameter, and the headers of the
 * files. Equal content gives equal files on any number of ranks; a time, a process or a random number is in none of them.
 * Errors, on every rank, with all older checkpoints as they were. Every rank returns after rank 0 has removed what was begun. What
 * root or its disk refuses has one code and one text on all ranks; a rank's own mistake, or lack of memory, is PEER on the others. ARGUMENT (an optimizer or an average over the same names in
 * another order, too); SHAPE and DTYPE for one whose entry is not as its part; MISMATCH when ranks pass other lists, when an
 * element is held by no rank or by two that are no replicas, naming the tensor and the first such index, or when ranks count
 * other steps; STATE when the step exists and `overwrite` is false, or while another save is in root; FORMAT for a state that
 * is no JSON object; UNSUPPORTED when the context's file calls lack one that this needs; IO; MEMORY. When only what comes
 * after the publication has failed (latest, old checkpoints), the message says that the checkpoint is complete. */
XD_API xd_result xd_checkpoint_save(xd_comm *comm, const xd_checkpoint_save_desc *desc);

/* Finds the checkpoint of the highest step in root: one of that exact name whose manifest is valid and whose files have the
 * manifest's sizes. Its blocks are not read. Local. Errors: MISSING when there is none, or no root, with its name; IO, MEMORY,
 * UNSUPPORTED (file calls without `list`). */
XD_API xd_result xd_checkpoint_find(xd_ctx *ctx, const char *root, int64_t *step);

/* Which checksums a load compares before it changes anything. */
typedef enum xd_checkpoint_check {
    XD_CHECKPOINT_CHECK_TOUCHED = 0, /* of the blocks that ranks need, by one of them; read twice */
    XD_CHECKPOINT_CHECK_ALL,         /* of every block of every file, dealt to the ranks */
    XD_CHECKPOINT_CHECK_NONE         /* of the manifest and state.json only */
} xd_checkpoint_check;

/* The step of xd_checkpoint_find. */
#define XD_CHECKPOINT_NEWEST INT64_C(-1)

/* What to load. Zero is the default of every field but root. */
typedef struct xd_checkpoint_load_desc {
    const char *root;
    int64_t step;                          /* or XD_CHECKPOINT_NEWEST */
    const xd_checkpoint_network *networks; /* [network_count] where everything goes. Networks, optimizers
                                            * and averages that are not listed are left in the file */
    int network_count;
    xd_checkpoint_check check;
    bool lenient; /* tensors that are missing, unexpected or of another shape are reported, and what is
                   * here of them stays as it is; false -> they are errors */
    bool convert; /* floating-point tensors of another type are converted, as by xd_cast; false -> DTYPE */
    size_t staging_bytes; /* as for saves */
} xd_checkpoint_load_desc;

/* What a load found; the same on every rank. */
typedef struct xd_checkpoint_report {
    int64_t step;
    int64_t loaded;      /* tensors, states of optimizers and averages included */
    int64_t missing;     /* asked for, but not in the checkpoint */
    int64_t unexpected;  /* in a file that was asked for, but not asked for themselves */
    int64_t wrong_shape; /* in both, with other shapes */
    int64_t converted;   /* of those loaded */
    char names[200];     /* the first five that are missing, unexpected or of a wrong shape, ", " between */
} xd_checkpoint_report;

/* Loads a checkpoint into the memory of the parts, the states of the optimizers with their step counts and learning rates, and
 * the averages with their counters. Reads only what this rank holds of each tensor, and the rest of the blocks that it compares;
 * ranges less than 256 KiB apart share a read. Any number of ranks, with any parts. What a wrapper's blocks show follows with
 * xd_parallel_publish, which every load into its parts needs.
 *
 *   report   filled in also when the load is refused for what it counts; may be NULL
 *   state    the caller's state as it was given to the save, without white space around it, NUL-terminated, to be released with
 *            xd_release; NULL when the checkpoint has none; may be NULL
 *
 * Collective. Memory: staging_bytes, twice that when types are converted, 9 bytes for each block, and the manifest. Nothing
 * is changed before all ranks have agreed on all of the metadata and on the checksums. Errors, on every rank. What follows
 * from the files has one code and one text on all of them, whoever has read it, so that all may decide alike what to do then,
 * to begin anew or to take an older step; a rank's own mistake, or lack of memory, is PEER on the others. ARGUMENT, MISMATCH,
 * SHAPE, DTYPE (as for saves); MISSING (no such checkpoint, with its root, or strict and tensors are missing), UNEXPECTED,
 * SHAPE (both strict), DTYPE (without `convert`); STATE when an optimizer is of another kind; FORMAT for a malformed manifest
 * or state; CORRUPT for one that does not have its own checksum, for files of other sizes, and for a block, naming file, block
 * and tensors; UNSUPPORTED (as for xd_checkpoint_find); IO, MEMORY. An IO error while data is moved leaves the arrays partly
 * loaded. */
XD_API xd_result xd_checkpoint_load(xd_comm *comm, const xd_checkpoint_load_desc *desc,
                                    xd_checkpoint_report *report, char **state);

/* Reads every byte of the checkpoint in a directory and compares every checksum, every fingerprint, and the headers of
 * its safetensors files with the manifest. Local. Errors: the first damage: FORMAT or CORRUPT, naming file, block and tensors;
 * MISSING for a file; IO, MEMORY. */
XD_API xd_result xd_checkpoint_verify(xd_ctx *ctx, const char *directory);

/* ---- looking into one ---- */

/* An open manifest. */
typedef struct xd_checkpoint xd_checkpoint;

/* What a checkpoint is. */
typedef struct xd_checkpoint_info {
    int64_t step, file_count, tensor_count;
    size_t block_bytes;
} xd_checkpoint_info;

/* One file of a checkpoint; pointers live as long as the object. */
typedef struct xd_checkpoint_file_info {
    const char *name;
    const char *group; /* the name without number and suffix, of a file with tensors: "model", "optim"; NULL
                        * for others */
    uint64_t bytes;
    uint32_t crc32c;
} xd_checkpoint_file_info;

/* One tensor of a checkpoint; pointers live as long as the object. */
typedef struct xd_checkpoint_tensor_info {
    const char *group, *name; /* names differ within a group */
    int64_t file;
    xd_dtype dtype;
    int ndim;
    const int64_t *shape; /* [ndim] */
    uint64_t begin, end;  /* bytes in the file */
    uint64_t fingerprint; /* sum over the elements, modulo 2^64, of a mixture of each one's bits and its
                           * index: equal tensors have equal ones, whoever wrote them */
} xd_checkpoint_tensor_info;

/* Reads and checks the manifest of a checkpoint, of which no other file is opened. Local. Errors: IO, MEMORY; FORMAT for
 * whatever it should not hold, with the numbers; CORRUPT when it does not have its own checksum. */
XD_API xd_result xd_checkpoint_open(xd_ctx *ctx, const char *directory, xd_checkpoint **out);

/* The same over the text of a manifest, which is not needed afterwards. Errors: FORMAT, CORRUPT, MEMORY. */
XD_API xd_result xd_checkpoint_open_memory(xd_ctx *ctx, const char *text, size_t bytes, xd_checkpoint **out);

/* Frees the object. NULL is fine. */
XD_API void xd_checkpoint_close(xd_checkpoint *checkpoint);

/* Local facts. Files are in the order in which the manifest lists them, tensors in the order of their groups' and names' bytes;
 * NULL for an index out of range. */
XD_API xd_checkpoint_info xd_checkpoint_describe(const xd_checkpoint *checkpoint);
XD_API const xd_checkpoint_file_info *xd_checkpoint_file_at(const xd_checkpoint *checkpoint, int64_t index);
XD_API const xd_checkpoint_tensor_info *xd_checkpoint_tensor_at(const xd_checkpoint *checkpoint,
                                                                int64_t index);

/* Index of a tensor, -1 for an unknown one. O(log tensors). */
XD_API int64_t xd_checkpoint_tensor_find(const xd_checkpoint *checkpoint, const char *group,
                                         const char *name);

#endif
