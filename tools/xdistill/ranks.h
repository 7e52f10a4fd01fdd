/* ranks.h - what the commands that run models share: memory, ranks and progress. */
#ifndef RANKS_H
#define RANKS_H

#include "../../examples/common/progress.h"
#include "../../examples/nn/nn_model.h"
#include "xdistill.h"

/* Zeroed memory for `count` things of `size` bytes; *failed remembers that some could not be had. */
void *ranks_room(xd_ctx *ctx, int64_t count, size_t size, bool *failed);

/* Runs `function` on that many threads; the error of the rank that failed first is the context's. */
xd_result ranks_run(xd_ctx *ctx, int ranks, xd_rank_function function, void *argument);

/* A communicator as the group of a model. */
nn_group ranks_group(xd_comm *comm);

/* The most memory this process has had, in MiB. */
double ranks_peak_mib(void);

/* Memory that the system has left, in bytes; 0 -> it does not say. */
int64_t ranks_memory_left(void);

/* Room on the file system that a directory is on, in bytes; 0 -> it does not say. */
int64_t ranks_disk_left(const char *directory);

/* A file's name without its folders. */
const char *ranks_base_name(const char *path);

/* One line of progress. */
typedef struct meter {
    progress line;
    const char *what, *unit;
    int64_t total;
    double start;   /* seconds, of xd_now */
    int64_t before; /* done when it started: not of this rate */
} meter;

meter meter_begin(xd_ctx *ctx, const char *what, const char *unit, int64_t before, int64_t total);

/* `extra`: a part of the line; NULL -> none. */
void meter_show(xd_ctx *ctx, meter *m, int64_t done, const char *extra);

#endif /* RANKS_H */
