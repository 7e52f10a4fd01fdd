#ifndef XDI_CHECKPOINT_INTERNAL_H
#define XDI_CHECKPOINT_INTERNAL_H

#include "base/internal.h"
#include "base/directory.h"
#include "base/json.h"
#include "base/publish_internal.h"
#include "checkpoint/checkpoint.h"
#include "io/internal.h"
#include "kernel/kernels.h"

#include <pthread.h>

#define XDI_MANIFEST_FILE "manifest.json"
#define XDI_STATE_FILE "state.json"

enum {
    XDI_GROUP_ROOM = 80,      /* "ema-", two names and a '-' */
    XDI_FILE_NAME_ROOM = 160, /* a group, two numbers and ".safetensors.index.json" */
    XDI_SHOWN = 80,           /* bytes of a name in a message */
    XDI_STAGING = 16 << 20,   /* bytes */
    XDI_ROUND = 256 << 20,    /* bytes that a rank moves before it agrees with the others again */
    XDI_PIECE = 256 << 10,    /* bytes that stay in a core's cache until they are checked; cuts no element */
    XDI_BLOCK = 4 << 20,      /* bytes that a checksum covers */
    XDI_BLOCK_LEAST = 4096,   /* and the least, */
    XDI_BLOCK_MOST = 1 << 30, /* and the most */
    XDI_STATE_DEPTH = 48      /* levels of the caller's state */
};

/* ---- content.c: what descs of saves and loads say, as one list of tensors ---- */

/* Tensors whose names differ, and their files. */
typedef struct xdi_group {
    char name[XDI_GROUP_ROOM]; /* of the file, without number and suffix */
    int64_t first, count;      /* of the content's tensors */
} xdi_group;

/* A tensor of a file, and what this rank has of it. */
typedef struct xdi_stored {
    const char *name;
    const xd_tensor_part *part; /* places and shape */
    xd_dtype dtype;
    void *data; /* [part->range] in memory of the device, or of the host when the content is `on_host` */
    /* instead: a scalar of the host, which all ranks have and rank 0 writes; NULL for the others */
    int64_t *step;
    int64_t *live; /* and where it lies on the device */
    int64_t group;
} xdi_stored;

typedef struct xdi_content {
    xd_ctx *ctx;
    const xd_checkpoint_network *networks;
    int network_count;
    xdi_group *groups;
    int64_t group_count;
    xdi_stored *tensors;
    int64_t tensor_count;
    int64_t *steps; /* of all parameters with a state */
    int64_t step_count;
    char *text; /* names that are not those of parts */
    size_t text_bytes;
    void *memory; /* all of it */
    bool filling; /* false: counting */
    bool on_host; /* the data of the tensors */
    bool thawed;  /* the states of frozen parameters that an optimizer has set aside are listed too */
} xdi_content;

/* Checks what one rank can see. Local. */
XD_PRIVATE xd_result xdi_content_check(xd_ctx *ctx, const xd_checkpoint_network *networks, int count);

/* The same, and lists it. Local. The content is to be freed whatever the result. */
XD_PRIVATE xd_result xdi_content_create(xd_ctx *ctx, const xd_checkpoint_network *networks, int count,
                                        xdi_content *out);

/* The same as it will be when every parameter has been thawed that its optimizer can thaw. */
XD_PRIVATE xd_result xdi_content_create_thawed(xd_ctx *ctx, const xd_checkpoint_network *networks, int count,
                                               xdi_content *out);
XD_PRIVATE void xdi_content_destroy(xdi_content *content);

/* MISMATCH, naming the first tensor, when ranks have other lists. Collective. */
XD_PRIVATE xd_result xdi_content_agree(const xdi_content *content, xd_comm *comm);

/* Brings the counts of steps to the host; and from there to the optimizers. */
XD_PRIVATE xd_result xdi_content_get_steps(xdi_content *content);
XD_PRIVATE xd_result xdi_content_put_steps(const xdi_content *content);

/* Elements of a tensor, and whether this rank speaks for elements of it. */
XD_PRIVATE int64_t xdi_stored_numel(const xdi_stored *t);
XD_PRIVATE bool xdi_stored_speaks(const xdi_stored *t, int rank);

/* Bytes of what this rank has of a tensor. */
XD_PRIVATE size_t xdi_stored_bytes(const xdi_stored *t);

/* cover.c: what a rank has of a tensor as numbers, at most XDI_PART_NUMBERS, nothing unless it `holds`; returns how many. And from
 * there: name, type and shape are those of this rank's own part, `region` is where the part's is kept. */
enum { XDI_PART_NUMBERS = 3 + XD_DIMS_MAX * (1 + 2 * XD_REGION_INTERVALS_MAX) };
XD_PRIVATE int64_t xdi_part_write(const xd_tensor_part *part, bool holds, int64_t *message);
XD_PRIVATE int64_t xdi_part_read(const xd_tensor_part *own, const int64_t *message, xd_region *region,
                                 xd_tensor_part *part);

/* move.c: fills parts of tensors from parts that the ranks have of the same tensors in any other cut; floats of another type are
 * rounded to nearest even where they arrive. What a rank has itself it copies; the rest comes from the one rank that speaks for it,
 * in windows. Tensors of which every rank has itself what it wants are copied without an exchange: *local is their number.
 * `from` must have been covered (xdi_cover_check). Collective. Memory: staging_bytes, or those of the largest tensor when that is
 * less, on the device; 0 -> 16 MiB; and 17 KiB for each rank. */
typedef struct xdi_move {
    const xd_tensor_part *from, *to;
} xdi_move;
XD_PRIVATE xd_result xdi_move_parts(xd_comm *comm, const xdi_move *moves, int64_t count, size_t staging_bytes,
                                    int64_t *local);

/* rounds.c: work that is done in rounds, after each of which the ranks agree, so that none waits long for one that has more of it.
 * `work` does about `bytes` of its work, or what is left. Collective; `left`: this rank's bytes. */
typedef xd_result (*xdi_work)(void *argument, uint64_t bytes);
XD_PRIVATE xd_result xdi_rounds(xd_comm *comm, uint64_t left, xdi_work work, void *argument);
/* How many of them there are. Collective. */
XD_PRIVATE xd_result xdi_round_count(xd_comm *comm, uint64_t left, int64_t *rounds);

/* cover.c: MISMATCH unless every element is held once by ranks that speak for it. Collective. */
XD_PRIVATE xd_result xdi_cover_check(const xdi_content *content, xd_comm *comm);

/* cover.c: appends a box to a message, for each dimension the length of its list and the list, and returns the new length; `to`
 * NULL: only that. */
XD_PRIVATE int64_t xdi_cover_put_box(const xd_region *box, int64_t *to, int64_t at);

/* load.c: whether a type can be converted to others; and one more name after ", " where
 * there is room. */
XD_PRIVATE bool xdi_load_converts(xd_dtype dtype);
XD_PRIVATE void xdi_load_append(char *names, size_t room, const char *name);

/* cover.c: MISMATCH unless the ranks that hold elements of a parameter have counted the same steps, which all get. Collective. */
XD_PRIVATE xd_result xdi_cover_steps(const xdi_content *content, xd_comm *comm);

/* ---- fingerprint.c ---- */

/* The sum over elements whose indices begin at `first`. */
XD_PRIVATE uint64_t xdi_fingerprint(const void *data, size_t size, int64_t first, int64_t count);

/* The same by the code of one level, for tests; BEST is xdi_fingerprint. A level that the machine lacks is computed as PLAIN. */
XD_PRIVATE uint64_t xdi_fingerprint_level(xd_cpu_level level, const void *data, size_t size, int64_t first,
                                          int64_t count);

/* The fingerprint of elements, and *crc continued by their bytes as by xd_crc32c: both in one pass. */
typedef struct xdi_checked_data {
    const void *data;
    size_t size; /* of an element */
    int64_t first, count;
} xdi_checked_data;
XD_PRIVATE uint64_t xdi_checked(const xdi_checked_data *data, uint32_t *crc);

/* The same by the code of one level, for tests. */
XD_PRIVATE uint64_t xdi_checked_level(xd_cpu_level level, const xdi_checked_data *data, uint32_t *crc);

/* ---- plan.c: the files of a save ---- */

typedef struct xdi_planned_file {
    char name[XDI_FILE_NAME_ROOM];
    int64_t group, first, count; /* of the content's tensors */
    xd_weights_layout *layout;
    int64_t first_block; /* among those of all files */
} xdi_planned_file;

typedef struct xdi_plan {
    const xdi_content *content;
    size_t block_bytes;
    xdi_planned_file *files;
    int64_t file_count, block_count;
} xdi_plan;

XD_PRIVATE xd_result xdi_plan_create(const xdi_content *content, uint64_t max_shard_bytes, size_t block_bytes,
                                     xdi_plan *out);
XD_PRIVATE void xdi_plan_destroy(xdi_plan *plan);

/* Blocks of a file of so many bytes. */
XD_PRIVATE int64_t xdi_block_count(uint64_t bytes, size_t block_bytes);

/* ---- hand.c: a second thread ---- */

/* Begins as zero; the thread is created when there is work for it. */
typedef struct xdi_hand {
    bool tried, has_thread;
    int64_t process; /* that has the thread */
    pthread_t thread;
    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t change;
    bool busy, leaving;
    void (*work)(void *argument);
    void *argument;
} xdi_hand;

/* Has work done beside the caller, who waits for its end before anything else; false where the system has no thread: then
 * nothing was started. The end is fine where it has begun nothing. */
XD_PRIVATE bool xdi_hand_start(xdi_hand *h, void (*work)(void *argument), void *argument);
XD_PRIVATE void xdi_hand_wait(xdi_hand *h);
XD_PRIVATE void xdi_hand_end(xdi_hand *h);

/* ---- write.c: the tensors of a save ---- */

/* Elements of a tensor, in memory of the host, that belong at an offset of its file. */
typedef struct xdi_writer_piece {
    const void *data;
    uint64_t offset;
    int64_t index, count; /* of the whole tensor */
} xdi_writer_piece;

typedef struct xdi_writer {
    const xdi_plan *plan;
    xd_comm *comm;
    const char *directory;
    uint64_t *blocks; /* [block_count]; those of all ranks, combined by exclusive or, are the checksums */
    uint64_t *fingerprints; /* [tensor_count]; those of all ranks are added */
    unsigned char *stage;   /* on a device */
    size_t stage_bytes;
    int64_t tensor, position; /* what comes next */
    int64_t file;             /* that is open */
    xdi_publish *open;
    bool cached;            /* the last piece that was to go past the page cache went through it */
    xdi_writer_piece piece; /* that is being counted beside writing */
    xdi_hand hand;
} xdi_writer;

/* Bytes of this rank, and an xdi_work with a writer that writes them. */
XD_PRIVATE uint64_t xdi_writer_bytes(const xdi_writer *w);
XD_PRIVATE xd_result xdi_writer_work(void *writer, uint64_t bytes);

/* Counts bytes at an offset of a file into its blocks. */
XD_PRIVATE void xdi_writer_note(xdi_writer *w, int64_t file, uint64_t offset, const void *data, size_t bytes);

/* Brings everybody's blocks and fingerprints together on rank 0. Collective. */
XD_PRIVATE xd_result xdi_writer_merge(xdi_writer *w);

/* ---- save.c: one save, by whoever carries it out: the caller, or the thread of a saver ---- */

typedef enum xdi_save_phase {
    XDI_SAVE_AGREE = 0,
    XDI_SAVE_LAY_OUT,
    XDI_SAVE_WRITE, /* round by round */
    XDI_SAVE_PUBLISH,
    XDI_SAVE_DONE
} xdi_save_phase;

typedef struct xdi_save {
    xd_comm *comm;
    xd_ctx *ctx;
    xd_checkpoint_save_desc desc; /* defaults filled in */
    bool root;                    /* rank 0 */
    xdi_save_phase phase;         /* what comes next */
    int64_t rounds;               /* of writing, that are left */
    xdi_content content;
    char *state; /* of rank 0: state.json */
    size_t state_bytes;
    xdi_plan plan;
    xdi_writer writer;
    char *lock_path, *path; /* of rank 0: root/checkpoint.lock, root/step-N */
    xdi_lock lock;
    xd_publish_directory *directory;
    char *own;                        /* the temporary directory as this rank reaches it */
    struct xdi_manifest_file *others; /* of rank 0: files without tensors */
    int64_t other_count;
} xdi_save;

/* A save that has done nothing; whatever becomes of it, xdi_save_end ends it, and does nothing the second time. Local. */
XD_PRIVATE void xdi_save_open(xdi_save *s, xd_comm *comm, const xd_checkpoint_save_desc *desc);
XD_PRIVATE void xdi_save_end(xdi_save *s);
/* The end of a save that had this result, on all ranks: when it failed, every rank returns after rank 0 has removed its files.
 * Returns the result, whose error stays the last one. Collective. */
XD_PRIVATE xd_result xdi_save_close(xdi_save *s, xd_result result);

/* What this rank alone can check of a desc, its networks excepted; and the list of what is saved, with the state of rank 0,
 * after which optimizers and averages are not looked at again. Local: agree on the results before the first phase. */
XD_PRIVATE xd_result xdi_save_check(const xdi_save *s);
XD_PRIVATE xd_result xdi_save_list(xdi_save *s);

/* Carries out the next phase, or a round of it. Collective; the same result on every rank. */
XD_PRIVATE xd_result xdi_save_advance(xdi_save *s);

/* ---- state.c ---- */

/* The text of state.json, to be released with xd_release. */
XD_PRIVATE xd_result xdi_state_write(xd_ctx *ctx, const xd_checkpoint_save_desc *desc, char **text,
                                     size_t *bytes);

/* FORMAT unless a text can be the caller's state. */
XD_PRIVATE xd_result xdi_state_check(xd_ctx *ctx, const char *state);

/* What state.json says, applied: the settings must fit, before anything is loaded; and then the counters. */
XD_PRIVATE xd_result xdi_state_fits(xd_ctx *ctx, const xd_json *root, const xd_checkpoint_load_desc *desc);
XD_PRIVATE void xdi_state_apply(xd_ctx *ctx, const xd_json *root, const xd_checkpoint_load_desc *desc,
                                xd_checkpoint_report *report);

/* The caller's state in new memory; *state NULL when there is none. */
XD_PRIVATE xd_result xdi_state_take(xd_ctx *ctx, const xd_json *root, const char *text, size_t bytes,
                                    char **state);

/* ---- manifest.c ---- */

struct xd_checkpoint {
    xd_ctx *ctx;
    xd_json *root;
    xd_checkpoint_info info;
    xd_checkpoint_file_info *files; /* [file_count] */
    xd_checkpoint_tensor_info *tensors;
    int64_t *shapes;
    int64_t *first_block; /* [file_count + 1] */
    uint32_t *blocks;
    int64_t *first_tensor; /* [file_count + 1]: by_place is sorted by file and begin */
    const xd_checkpoint_tensor_info **by_place;
};

/* A plain name of the directory that can be printed, and is not that of the manifest. */
XD_PRIVATE bool xdi_manifest_is_name(const char *name);

/* A file of a manifest to be written. */
typedef struct xdi_manifest_file {
    const char *name, *group;
    uint64_t bytes;
    const uint64_t *blocks;
} xdi_manifest_file;

/* The text of a manifest, to be released with xd_release. `others` are the files without tensors. */
XD_PRIVATE xd_result xdi_manifest_write(const xdi_writer *w, int64_t step, const xdi_manifest_file *others,
                                        int64_t other_count, char **text, size_t *bytes);

/* CORRUPT, saying which block of which file it is and what lies in it. */
XD_PRIVATE xd_result xdi_manifest_damage(const xd_checkpoint *c, const char *directory, int64_t file,
                                         int64_t block, uint32_t found);

/* The bytes of a block in its file. */
XD_PRIVATE size_t xdi_manifest_block(const xd_checkpoint *c, int64_t file, int64_t block, uint64_t *offset);

/* Bytes of memory for reading: the limit, or those of the largest file when that is smaller. */
XD_PRIVATE size_t xdi_manifest_room(const xd_checkpoint *c, size_t limit);

/* Index of a file by its name, -1 for none. */
XD_PRIVATE int64_t xdi_manifest_find_file(const xd_checkpoint *c, const char *name);

/* ---- find.c: names ---- */

/* root/step-N in new memory; NULL when there is no room. */
XD_PRIVATE char *xdi_checkpoint_path(xd_ctx *ctx, const char *root, int64_t step);

/* find.c: "; there are steps 300, 200, 100", the newest with a manifest, or that there is none; "" where files cannot be
 * listed. Errors: IO, MEMORY. */
XD_PRIVATE xd_result xdi_checkpoint_list_steps(xd_ctx *ctx, const char *root, char *text, size_t size);

/* Whether a name is exactly that of a step; `suffix` is what must follow it. */
XD_PRIVATE bool xdi_checkpoint_is_step(const char *name, const char *suffix, int64_t *step);

/* manifest.c: the manifest of a directory, and a manifest's text. Errors: those of xd_checkpoint_open. */
XD_PRIVATE xd_result xdi_checkpoint_open_directory(xd_ctx *ctx, const char *directory, xd_checkpoint **out);
XD_PRIVATE xd_result xdi_checkpoint_open_text(xd_ctx *ctx, const char *text, size_t bytes,
                                              xd_checkpoint **out);

/* Opens the manifest and looks at the sizes of all files. Errors: those of xd_checkpoint_open, MISSING, CORRUPT. */
XD_PRIVATE xd_result xdi_checkpoint_open_whole(xd_ctx *ctx, const char *directory, xd_checkpoint **out);

/* Removes checkpoints older than the newest `keep`, but not `saved`; and what killed saves have left. The lock is held. */
XD_PRIVATE xd_result xdi_checkpoint_prune(xd_ctx *ctx, const char *root, int64_t saved, int keep);
XD_PRIVATE xd_result xdi_checkpoint_sweep(xd_ctx *ctx, const char *root);

/* ---- read.c: bytes of a checkpoint's files ---- */

typedef struct xdi_reader {
    const xd_checkpoint *checkpoint;
    const char *directory;
    char *path;   /* room for that of any file, so that nothing is allocated amid a load */
    int64_t file; /* that is open; -1: none */
    intptr_t handle;
} xdi_reader;

/* Both pointers are kept. Closing what was never created is fine, where it is zero. Error: MEMORY. */
XD_PRIVATE xd_result xdi_reader_create(xdi_reader *r, const xd_checkpoint *checkpoint, const char *directory);
XD_PRIVATE void xdi_reader_close(xdi_reader *r);
XD_PRIVATE xd_result xdi_reader_read(xdi_reader *r, int64_t file, uint64_t offset, size_t bytes, void *to);

/* Reads a block, a piece at a time, and returns CORRUPT when it does not have its checksum. */
XD_PRIVATE xd_result xdi_reader_block(xdi_reader *r, int64_t file, int64_t block, void *stage,
                                      size_t stage_bytes);

#endif
