/* options.h - a command line as a table: what each option takes, what --help says of it, and what somebody is told who gave it
 * something else. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum option_kind {
    OPTION_FLAG,   /* bool; nothing follows it */
    OPTION_INT,    /* int */
    OPTION_UINT64, /* uint64_t */
    OPTION_SIZE,   /* size_t */
    OPTION_DOUBLE, /* double, in [from, to] */
    OPTION_PATH,   /* const char *, of OPTIONS_MOST_PATH bytes at most */
    OPTION_TEXT,   /* const char *, not empty */
    OPTION_PARSED  /* what `parse` makes of it */
} option_kind;

/* Names of files are put after folders, in buffers that leave room for this much. */
enum { OPTIONS_MOST_PATH = 400 };

typedef struct option {
    const char *name, *value; /* as --help shows them */
    option_kind kind;
    size_t field;     /* offset in the caller's struct */
    long least, most; /* of numbers; 0 and 0 -> there are none */
    const char *help;
    const char *takes; /* TEXT, PARSED: in words; numbers follow it */
    bool (*parse)(const char *text, void *options);
    double from, to; /* OPTION_DOUBLE */
} option;

/* Reads the command line into `options`; false, and what is wrong in `problem`, otherwise. */
bool options_parse(const option *table, int count, int argc, char **argv, void *options, char problem[256]);

/* Each option with its help and range, in at most 80 columns. */
void options_print(const option *table, int count);

/* A whole number in [least, most], and nothing else. */
bool options_number(const char *text, long least, long most, long *out);

#ifdef __cplusplus
}
#endif

#endif /* OPTIONS_H */
