/* command.h - the commands of the tool. */
#ifndef COMMAND_H
#define COMMAND_H

#include "../../examples/common/options.h"
#include "xdistill.h"

/* What a command ends with: COMMAND_DIFFERENT is of diff alone. */
enum { COMMAND_OK = 0, COMMAND_DIFFERENT = 1, COMMAND_BROKEN = 2 };

/* A command with options. */
typedef struct command_line {
    const char *name;      /* "distil", "tokenize train" */
    const char *usage;     /* what is needed, as the first line shows it */
    const char *does;      /* what it does, in lines of at most 80 columns */
    const char *example;   /* a whole line */
    const option *options; /* [option_count] */
    int option_count;
} command_line;

/* A command that does several things: "tokenize train". */
typedef struct command_verb {
    const char *name;
    int (*run)(xd_ctx *ctx, int count, char **words);
    const command_line *line; /* for the list */
} command_verb;

/* Runs the verb that the first word names; without one says which there are. */
int command_of_verbs(const char *name, const command_verb *verbs, int verb_count, xd_ctx *ctx, int count,
                     char **words);

/* Reads the words behind the command. False: *status is what to end with, and everything is said. */
bool command_parse(const command_line *c, int count, char **words, void *options, int *status);

/* Says what an option that is needed would be, and returns COMMAND_BROKEN. */
int command_lacks(const command_line *c, const char *option);

/* Says what the context's last error is; returns COMMAND_BROKEN, or COMMAND_OK where there is none. */
int command_end(xd_ctx *ctx, const char *name, xd_result result);

/* STATE where a file is there that does not begin like one of this kind: "tokenizer.json", "{". */
xd_result command_check_output(xd_ctx *ctx, const char *path, const char *kind, const char *begins);

/* Prints how a command is called, to standard error; returns COMMAND_BROKEN. */
int command_usage(const char *name);

/* The commands: each gets the words behind its name. */
int command_inspect(xd_ctx *ctx, int count, char **words);
int command_verify(xd_ctx *ctx, int count, char **words);
int command_diff(xd_ctx *ctx, int count, char **words);
int command_convert(xd_ctx *ctx, int count, char **words);
int command_distil(xd_ctx *ctx, int count, char **words);
int command_compare(xd_ctx *ctx, int count, char **words);
int command_eval(xd_ctx *ctx, int count, char **words);
int command_generate(xd_ctx *ctx, int count, char **words);
int command_tokenize(xd_ctx *ctx, int count, char **words);
int command_pair(xd_ctx *ctx, int count, char **words);
int command_cache(xd_ctx *ctx, int count, char **words);
int command_bench(xd_ctx *ctx, int count, char **words);

#endif /* COMMAND_H */
