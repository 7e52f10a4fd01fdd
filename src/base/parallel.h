#ifndef XDI_BASE_PARALLEL_H
#define XDI_BASE_PARALLEL_H

#include <stdint.h>

/* Runs pieces on the caller's threads. `run` calls body(argument, piece) once for each piece from 0 to pieces - 1. It returns
 * when all are done. Order and threads are free, as in an OpenMP loop; no piece waits for another.
 *
 * A repeated piece does nothing. A missing one runs afterwards: results are right, but the call fails with STATE and the
 * piece's number. With several ranks the next exchange fails instead, in this call or a later one. This rank gets STATE, the
 * others PEER with its message, without a deadline. */
typedef struct xd_parallel_for {
    void (*run)(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece), void *argument);
    void *user;
} xd_parallel_for;

#endif
