/* options.c - the command line of the demonstrations. */
#include "options.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPTIONS_PROBLEM = 256 };

bool options_number(const char *text, long least, long most, long *out) {
    char *end = NULL;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) return false;
    *out = value;
    return true;
}

static const option *options_find(const option *table, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (strcmp(name, table[i].name) == 0) return &table[i];
    return NULL;
}

/* Prints words in columns [31, 79], on as many lines as they need; the first one has begun there. */
static void options_wrap(const char *text) {
    enum { FIRST = 31, LAST = 79 };
    int at = FIRST;
    while (*text) {
        const int length = (int)strcspn(text, " ");
        if (at > FIRST && at + 1 + length > LAST) {
            printf("\n%*s", (int)FIRST, "");
            at = FIRST;
        } else if (at > FIRST) {
            putchar(' ');
            at++;
        }
        printf("%.*s", length, text);
        at += length;
        text += length;
        while (*text == ' ') text++;
    }
    putchar('\n');
}

void options_print(const option *table, int count) {
    for (int i = 0; i < count; i++) {
        const option *o = &table[i];
        char text[512], range[96] = "";
        if (o->kind == OPTION_DOUBLE)
            snprintf(range, sizeof range, "; %g to %g", o->from, o->to);
        else if (o->most)
            snprintf(range, sizeof range, "; %ld to %ld", o->least, o->most);
        snprintf(text, sizeof text, "%s%s", o->help, range);
        const int width = printf("  %s %s", o->name, o->value);
        if (width > 30) printf("\n%*s", 31, "");
        if (width <= 30) printf("%*s", 31 - width, "");
        options_wrap(text);
    }
}

/* What the option takes, for somebody who gave it something else, or nothing: `value` is NULL then. */
static bool options_refuse(const option *o, const char *value, char problem[OPTIONS_PROBLEM]) {
    char range[120];
    if (o->kind == OPTION_PATH)
        snprintf(range, sizeof range, "a path of 1 to %d bytes that does not begin with --",
                 (int)OPTIONS_MOST_PATH);
    else if (o->kind == OPTION_DOUBLE)
        snprintf(range, sizeof range, "a number from %g to %g", o->from, o->to);
    else if (o->most)
        snprintf(range, sizeof range, "%s %ld to %ld", o->takes ? o->takes : "a number from", o->least,
                 o->most);
    else
        snprintf(range, sizeof range, "%s", o->takes);
    if (value)
        snprintf(problem, OPTIONS_PROBLEM, "%s takes %s, not \"%.60s\"", o->name, range, value);
    else
        snprintf(problem, OPTIONS_PROBLEM, "%s takes %s; nothing follows it", o->name, range);
    return false;
}

static bool options_double(const char *text, double from, double to, double *out) {
    char *end = NULL;
    const double value = strtod(text, &end);
    if (end == text || *end || !(value >= from && value <= to)) return false;
    *out = value;
    return true;
}

/* `value` is NULL for a flag. */
static bool options_set(const option *o, const char *value, void *options) {
    void *const field = (char *)options + o->field;
    long n = 0;
    switch (o->kind) {
    case OPTION_FLAG: *(bool *)field = true; return true;
    case OPTION_TEXT: *(const char **)field = value; return *value != 0;
    case OPTION_PARSED: return o->parse(value, options);
    case OPTION_DOUBLE: return options_double(value, o->from, o->to, (double *)field);
    case OPTION_PATH:
        *(const char **)field = value;
        return *value && strncmp(value, "--", 2) != 0 && strlen(value) <= OPTIONS_MOST_PATH;
    default: break;
    }
    if (!options_number(value, o->least, o->most, &n)) return false;
    if (o->kind == OPTION_INT) *(int *)field = (int)n;
    if (o->kind == OPTION_UINT64) *(uint64_t *)field = (uint64_t)n;
    if (o->kind == OPTION_SIZE) *(size_t *)field = (size_t)n;
    return true;
}

bool options_parse(const option *table, int count, int argc, char **argv, void *options,
                   char problem[OPTIONS_PROBLEM]) {
    for (int i = 1; i < argc; i++) {
        const option *o = options_find(table, count, argv[i]);
        const char *value = NULL;
        if (!o) {
            snprintf(problem, OPTIONS_PROBLEM, "there is no option %.60s", argv[i]);
            return false;
        }
        if (o->kind != OPTION_FLAG) {
            value = argv[++i];
            if (!value) return options_refuse(o, NULL, problem);
        }
        if (!options_set(o, value, options)) return options_refuse(o, value, problem);
    }
    return true;
}
