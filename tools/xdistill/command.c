/* command.c - what all commands with options do. */
#include "command.h"

#include <stdio.h>
#include <string.h>

static void command_help(const command_line *c) {
    printf("usage: xdistill %s %s\n\n%s\n\n", c->name, c->usage, c->does);
    options_print(c->options, c->option_count);
    printf("\nexample:\n  %s\n", c->example);
}

bool command_parse(const command_line *c, int count, char **words, void *options, int *status) {
    char problem[256];
    *status = COMMAND_OK;
    for (int i = 0; i < count; i++)
        if (strcmp(words[i], "--help") == 0) {
            command_help(c);
            return false;
        }
    /* options_parse skips the name of a program. */
    if (options_parse(c->options, c->option_count, count + 1, words - 1, options, problem)) return true;
    fprintf(stderr, "xdistill %s: %s; xdistill %s --help lists all\n", c->name, problem, c->name);
    *status = COMMAND_BROKEN;
    return false;
}

int command_of_verbs(const char *name, const command_verb *verbs, int verb_count, xd_ctx *ctx, int count,
                     char **words) {
    const bool help = count > 0 && strcmp(words[0], "--help") == 0;
    FILE *out = help ? stdout : stderr;
    for (int i = 0; i < verb_count && count > 0; i++)
        if (strcmp(words[0], verbs[i].name) == 0) return verbs[i].run(ctx, count - 1, words + 1);
    if (count > 0 && !help) fprintf(out, "xdistill %s: there is no %.60s\n", name, words[0]);
    for (int i = 0; i < verb_count; i++)
        fprintf(out, "%s xdistill %s %s\n", i == 0 ? "usage:" : "      ", verbs[i].line->name,
                verbs[i].line->usage);
    return help ? COMMAND_OK : COMMAND_BROKEN;
}

xd_result command_check_output(xd_ctx *ctx, const char *path, const char *kind, const char *begins) {
    char head[16] = "";
    FILE *file = fopen(path, "rb");
    if (!file) return XD_OK;
    const size_t got = fread(head, 1, strlen(begins), file);
    fclose(file);
    XD_REQUIRE(ctx, got == 0 || strcmp(head, begins) == 0, XD_ERROR_STATE,
               "%s is there, and is no %s: name another file", path, kind);
    return XD_OK;
}

int command_lacks(const command_line *c, const char *option) {
    fprintf(stderr, "xdistill %s: %s is needed\nusage: xdistill %s %s\n", c->name, option, c->name, c->usage);
    return COMMAND_BROKEN;
}

int command_end(xd_ctx *ctx, const char *name, xd_result result) {
    if (result == XD_OK) return COMMAND_OK;
    fprintf(stderr, "xdistill %s: %s: %s\n", name, xd_result_name(result), xd_last_error(ctx)->message);
    return COMMAND_BROKEN;
}
