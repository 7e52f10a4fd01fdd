/* progress.h - how far a long run is: one line that is redrawn on a terminal and fits it, a plain line every 30
 * seconds where there is none. */
#ifndef PROGRESS_H
#define PROGRESS_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct progress {
    bool terminal;
    int columns;    /* of the terminal; 80 when it does not say */
    double written; /* when the last line was, in the caller's seconds */
    bool begun;
} progress;

/* Of standard output. */
progress progress_begin(void);

/* Shows `count` parts with " | " between them, as many of the first as fit; the last one is always there. `last` ends
 * the line. */
void progress_show(progress *p, double now, const char *const *parts, int count, bool last);

/* What progress_show prints, without the end of the line; `columns` 0 -> everything. Returns its length. */
int progress_fit(char *out, int room, int columns, const char *const *parts, int count);

/* "4:05", "1:02:03". */
const char *progress_time(char out[32], double seconds);

#ifdef __cplusplus
}
#endif

#endif /* PROGRESS_H */
