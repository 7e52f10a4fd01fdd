/* What golden.c, vector.c and worker.c share and the kinds do not see. */
#ifndef GOLDEN_RUNNER_H
#define GOLDEN_RUNNER_H

#include "golden.h"

enum { GOLDEN_REASON = 160 };

struct golden_case {
    xd_ctx *ctx;
    golden_loans loans;
    xd_weights *file;
    const char *path;
    double f32_error; /* check.f32_err: the peer's own float32 error */
    int failures, compared;
    char skip[GOLDEN_REASON];
    void **blocks; /* memory to free after the case */
    int block_count, block_room;
    bool *key_read, *tensor_read; /* by index in the file's metadata and tensors */
};

/* Opens the file of the case and makes the lists of what has been read; close frees everything of the case. */
bool golden_case_open(golden_case *c, xd_ctx *ctx, const char *path);
void golden_case_close(golden_case *c);
/* Nothing counts as read that was read before, to find a kind. */
void golden_read_nothing(golden_case *c);
/* Fails the case for every key of its configuration, and every result, that its kind did not look at; and where there was no
 * result at all. */
void golden_judge_unread(golden_case *c);

/* ---- one process for each file: worker.c ---- */

typedef enum golden_verdict { GOLDEN_PASSED, GOLDEN_FAILED, GOLDEN_SKIPPED, GOLDEN_STOP } golden_verdict;

typedef struct golden_outcome {
    golden_verdict verdict; /* STOP: nothing can run, for example without a device */
    char reason[GOLDEN_REASON];
} golden_outcome;

/* What a worker runs: opens what files need, calls golden_worker_tell after each of the files and returns. */
typedef void (*golden_worker)(const xd_ctx_desc *desc, const char *const *paths, int count);
void golden_worker_tell(const golden_outcome *outcome);

/* Has workers run the files, each in a process of its own, and writes the outcome of each. A worker that dies or hangs is
 * a failure of the file it was at. False after STOP. */
bool golden_workers_run(golden_worker worker, const xd_ctx_desc *desc, const char *const *paths, int count,
                        golden_outcome *outcomes);

#endif
