/* images_say.c - what is told while the demonstration runs. */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include "images.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>

double images_seconds(void) {
    static struct timespec begin;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (begin.tv_sec == 0 && begin.tv_nsec == 0) begin = now;
    return (double)(now.tv_sec - begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - begin.tv_nsec);
}

void images_say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("%6.1f s  ", images_seconds());
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
}
