#ifndef XDI_BASE_PARALLEL_H
#define XDI_BASE_PARALLEL_H

#include <stdint.h>

/* The caller's way to use more cores. `run` calls body(argument, piece) for every piece from 0 to pieces - 1, each once,
 * in any order and on any threads, and returns when all of them are done; an OpenMP loop over body is one. No piece waits
 * for another.
 *
 * Pieces are counted: a second run of a piece does nothing, and a piece that `run` left out is run afterwards, so results
 * stay right. The call still fails, with STATE and the piece's number. Where the context is one of several ranks, its next
 * exchange with them fails instead, in the same call or a later one: this rank gets STATE, the others PEER with its
 * message, and no rank waits for a deadline. */
typedef struct xd_parallel_for {
    void (*run)(void *user, int64_t pieces, void (*body)(void *argument, int64_t piece), void *argument);
    void *user;
} xd_parallel_for;

#endif
