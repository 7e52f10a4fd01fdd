/* folders.h - making a folder with those that it lies in, and emptying one of a run's checkpoints. */
#ifndef FOLDERS_H
#define FOLDERS_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the folder, and those that it lies in; one that exists is fine. Errors: IO. */
xd_result folders_make(xd_ctx *ctx, const char *directory);

/* Removes the checkpoints of an older run, "step-N" with the files in it. Errors: IO. */
xd_result folders_forget_checkpoints(xd_ctx *ctx, const char *directory);

#ifdef __cplusplus
}
#endif

#endif /* FOLDERS_H */
