#ifndef XDI_BASE_PARALLEL_H
#define XDI_BASE_PARALLEL_H

#include <stdint.h>

/* The caller's way to use more cores. `run` calls body(argument, piece) for every piece from 0 to pieces - 1, each once,
 * in any order and on any threads, and returns when all of them are done; an OpenMP loop over body is one. No piece waits
 * for another. Pieces are counted: the call in which one was run twice or not at all fails with STATE and
 * names it. */
typedef struct xd_parallel_for {
    void (*run)(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece), void *argument);
    void *user;
} xd_parallel_for;

#endif
