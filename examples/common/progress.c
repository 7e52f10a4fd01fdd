/* progress.c - the line of progress.h. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* ioctl and the size of a terminal */
#endif
#include "progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { PROGRESS_ROOM = 256 };

static const double progress_interval = 30.0;

static int progress_columns(void) {
    struct winsize size;
    const char *said = getenv("COLUMNS");
    memset(&size, 0, sizeof size);
    if (ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
    const int columns = said ? atoi(said) : 0;
    return columns > 0 ? columns : 80;
}

progress progress_begin(void) {
    progress p;
    memset(&p, 0, sizeof p);
    p.terminal = isatty(1) != 0;
    p.columns = progress_columns();
    return p;
}

const char *progress_time(char out[32], double seconds) {
    const long whole = seconds > 0.0 ? (long)(seconds + 0.5) : 0;
    if (whole >= 3600)
        snprintf(out, 32, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
    else
        snprintf(out, 32, "%ld:%02ld", whole / 60, whole % 60);
    return out;
}

int progress_fit(char *out, int room, int columns, const char *const *parts, int count) {
    const int tail = count > 0 ? (int)strlen(parts[count - 1]) : 0;
    int used = 0;
    out[0] = 0;
    for (int i = 0; i < count; i++) {
        const int length = (int)strlen(parts[i]), between = used ? 3 : 0;
        const int after = i + 1 < count ? 3 + tail : 0;
        if (i + 1 < count && columns > 0 && used + between + length + after > columns) continue;
        if (used + between + length >= room) break;
        used += snprintf(out + used, (size_t)(room - used), "%s%s", between ? " | " : "", parts[i]);
    }
    if (columns > 0 && used > columns) out[used = columns] = 0;
    return used;
}

void progress_show(progress *p, double now, const char *const *parts, int count, bool last) {
    char line[PROGRESS_ROOM];
    if (!p->begun) p->written = now;
    p->begun = true;
    if (!p->terminal && !last && now - p->written < progress_interval) return;
    p->written = now;
    if (p->terminal) {
        p->columns = progress_columns(); /* windows change */
        (void)progress_fit(line, PROGRESS_ROOM, p->columns - 1, parts, count);
        printf("\r%-*s%s", p->columns - 1, line, last ? "\n" : "");
    } else {
        (void)progress_fit(line, PROGRESS_ROOM, 0, parts, count);
        printf("%s\n", line);
    }
    fflush(stdout);
}
