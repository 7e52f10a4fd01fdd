/* events.h - curves as a file that TensorBoard reads. */
#ifndef EVENTS_H
#define EVENTS_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file in memory: records of events, each with a step and one number under a tag. */
typedef struct events {
    xd_ctx *ctx;
    unsigned char *data;
    size_t bytes, room;
    double wall; /* seconds since 1970, of all of them */
    bool failed; /* no memory; told by events_save */
} events;

/* `wall`: when the curves were made. */
events events_begin(xd_ctx *ctx, double wall);
void events_add(events *e, const char *tag, int64_t step, float value);

/* Writes the file, whose name must hold "tfevents", and frees the memory. Errors: MEMORY, IO. */
xd_result events_save(events *e, const char *path);

#ifdef __cplusplus
}
#endif

#endif /* EVENTS_H */
