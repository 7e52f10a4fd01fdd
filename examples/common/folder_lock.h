/* folder_lock.h - one run at a time in a folder of results. */
#ifndef FOLDER_LOCK_H
#define FOLDER_LOCK_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A folder that one run at a time writes into. */
typedef struct folder_lock folder_lock;

/* Makes the folder and takes it until folder_lock_release or the end of the process, however it comes. Where the file
 * system has no locks, *out is NULL and a line on standard error says so.
 *
 *   advice   ends the message to whoever comes second; may be empty
 *
 * Errors: STATE when another process has it, with its id and what can be done; IO. */
xd_result folder_lock_take(xd_ctx *ctx, const char *directory, const char *advice, folder_lock **out);

/* NULL is fine. */
void folder_lock_release(xd_ctx *ctx, folder_lock *lock);

#ifdef __cplusplus
}
#endif

#endif /* FOLDER_LOCK_H */
