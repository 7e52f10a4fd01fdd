#ifndef XDI_BASE_PARALLEL_H
#define XDI_BASE_PARALLEL_H

#include <stdint.h>

/* The caller's way to use more cores. `run` calls body(argument, piece) for every piece from 0 to pieces - 1, each once,
 * in any order and on any threads, and returns when all of them are done; an OpenMP loop over body is one. No piece waits
 * for another.
 *
 * Pieces are counted: of one that was run twice the second time does nothing, and one that was not run is made up for, so no
 * result is ever wrong by it. The call fails all the same, with STATE and the piece's number; where the context is one of
 * several ranks its next exchange with them fails instead, in the same call or a later one, so that all learn of it: this
 * rank gets STATE, the others PEER with its words, and nobody waits for a deadline. */
typedef struct xd_parallel_for {
    void (*run)(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece), void *argument);
    void *user;
} xd_parallel_for;

#endif
