#ifndef XDI_BASE_PARALLEL_H
#define XDI_BASE_PARALLEL_H

#include <stdint.h>

/* Calls body(argument, piece) for each piece in [0, pieces) on the caller's threads; returns when all are done. Any
 * thread may run any piece, in any order; pieces do not wait for each other.
 *
 * A repeated piece does nothing. A missing one runs afterwards: results are right, but the call fails with STATE and its
 * number. With several ranks the next exchange of any call fails instead: STATE here, PEER elsewhere, without a deadline. */
typedef struct xd_parallel_for {
    void (*run)(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece), void *argument);
    void *user;
} xd_parallel_for;

#endif
