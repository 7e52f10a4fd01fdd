/* kills.h - for tests that kill processes: numbers that the environment may give, a clock, and waiting. */
#ifndef KILLS_H
#define KILLS_H

#include <stdlib.h>
#include <time.h>

/* A positive number of the environment. */
static inline int given(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && atoi(text) > 0 ? atoi(text) : otherwise;
}

/* Seconds. */
static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void nap(int microseconds) {
    const struct timespec t = { microseconds / 1000000, microseconds % 1000000 * 1000L };
    nanosleep(&t, NULL);
}

#endif
