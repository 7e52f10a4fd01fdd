/* main.c - the tool: distils a model from a text, runs models, looks into checkpoints and brings those of others.
 *
 *   make build/xdistill          or, from the root:
 *   cc -std=c99 -O2 -I. tools/xdistill/[a-z]*.c examples/common/[a-z]*.c examples/nn/[a-z]*.c -o xdistill -lm -lpthread
 *
 *   distil                       trains a student from a teacher on a text
 *   compare PICTURE.svg RUN...   a table, a picture and samples of what distil left
 *   eval                         bits per byte of a model on a text
 *   generate                     what a model writes behind a prompt
 *   tokenize train|encode        trains a tokenizer on a text; the ids of a text
 *   pair                         what two tokenizers share, and the projection between them
 *   cache write|inspect          what a teacher says about a text, in files
 *   bench                        what each operation takes on this machine
 *   inspect DIR                  files and tensors of a checkpoint (ROOT/step-N), as its manifest lists them, or of a Hugging Face
 *                                directory (model.safetensors, or model.safetensors.index.json and its shards), as its headers do
 *   verify DIR                   reads and compares every byte of a checkpoint, and names the files that its manifest does not know
 *   diff DIR DIR                 the first tensors that differ: by the fingerprints of two manifests, or by their bytes where one is
 *                                a Hugging Face directory, which has the group "model" alone
 *   convert DIR NEW              what PyTorch's torch.distributed.checkpoint has left in DIR becomes NEW, a model directory of whole
 *                                tensors in safetensors files. DIR has .metadata and *.distcp, whose pickles are read as data
 *                                (dcp_pickle.h: nothing of them is executed), and what is no tensor goes to objects.json; or it has
 *                                safetensors files with the pieces of ranks, as xd_weights_export writes them too; or it is a file of
 *                                torch.save, or has pytorch_model.bin or its index
 *
 * Every command ends with 0; diff with 1 when it finds a difference; with 2 and a line that says why when something is damaged,
 * missing, half-written or wrong on the command line, or when what the tool prints cannot be written. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "command.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

typedef struct command {
    const char *name;
    int (*run)(xd_ctx *ctx, int count, char **words);
    const char *usage;   /* what stands behind the name */
    const char *help[5]; /* lines of at most 68 columns */
} command;

static const command commands[] = {
    { "distil",
      command_distil,
      "--teacher PATH --text FILE --out DIR [options]",
      { "trains a small student from a teacher on your text; the teacher is a",
        "GGUF file or a Hugging Face directory" } },
    { "compare",
      command_compare,
      "PICTURE.svg RUN...",
      { "a table and a picture of folders that distil left, and what the",
        "students write; RUN-1 and RUN-2, with seeds 1 and 2, are one student" } },
    { "eval", command_eval, "--model PATH --text FILE [options]", { "bits per byte of a model on a text" } },
    { "generate",
      command_generate,
      "--model PATH --prompt TEXT [options]",
      { "what a model writes behind a prompt" } },
    { "tokenize",
      command_tokenize,
      "train|encode [options]",
      { "trains a tokenizer on a text; prints the ids of a text" } },
    { "pair",
      command_pair,
      "--student PATH --teacher PATH [options]",
      { "what two tokenizers share, and the projection between them" } },
    { "cache", command_cache, "write|inspect [options]", { "what a teacher says about a text, in files" } },
    { "bench", command_bench, "[-J FILE]", { "what each operation takes on this machine; half a minute" } },
    { "inspect",
      command_inspect,
      "DIR",
      { "lists files and tensors: of a checkpoint (ROOT/step-N) as its",
        "manifest has them, of a Hugging Face directory as its headers do" } },
    { "verify",
      command_verify,
      "DIR",
      { "reads and compares every byte of a checkpoint. A file that the",
        "manifest does not know is a line of the output and no error; one",
        "that is half-written (NAME.tmp-N) is an error" } },
    { "diff",
      command_diff,
      "DIR DIR",
      { "prints the first tensors that differ: by the fingerprints of two",
        "manifests, or by their bytes where one is a Hugging Face directory,",
        "which is compared with the group \"model\" of a checkpoint" } },
    { "convert",
      command_convert,
      "[--select PREFIX] [--without PREFIX] [--tensors-only]\n"
      "                        [--max-shard-bytes N] DIR NEW",
      { "makes NEW, a model directory, of a checkpoint of PyTorch.",
        "--select: only names that begin so, without it; --without: none of",
        "those; --tensors-only: no objects.json;",
        "--max-shard-bytes: of tensors in one file (5,000,000,000)" } },
};

enum { COMMANDS = sizeof commands / sizeof commands[0] };

static const command *find(const char *name) {
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

int command_usage(const char *name) {
    const command *c = find(name);
    for (int i = 0; i < COMMANDS; i++)
        if (!c || c == &commands[i])
            fprintf(stderr, "%s xdistill %s %s\n", c || i == 0 ? "usage:" : "      ", commands[i].name,
                    commands[i].usage);
    return COMMAND_BROKEN;
}

static int help(void) {
    printf("usage: xdistill COMMAND ...; xdistill COMMAND --help says more of one\n\n");
    for (int i = 0; i < COMMANDS; i++)
        for (int line = 0; line < 5 && commands[i].help[line]; line++)
            printf("%-9s %s\n", line == 0 ? commands[i].name : "", commands[i].help[line]);
    printf("\nEnds with 0; with 1 when diff finds a difference; with 2 when something is\n"
           "damaged, missing, half-written or wrong on the command line.\n");
    return COMMAND_OK;
}

/* The commands without a table of options. */
static int help_of(const command *c) {
    printf("usage: xdistill %s %s\n\n", c->name, c->usage);
    for (int line = 0; line < 5 && c->help[line]; line++) printf("%s\n", c->help[line]);
    return COMMAND_OK;
}

/* Those of checkpoints and compare take none; the others print them by themselves. */
static bool has_options(const command *c) {
    return c->run != command_compare && c->run != command_inspect && c->run != command_verify &&
           c->run != command_diff && c->run != command_convert;
}

static int run(xd_ctx *ctx, int count, char **words) {
    if (count == 1 && strcmp(words[0], "--help") == 0) return help();
    const command *c = count > 0 ? find(words[0]) : NULL;
    if (!c && count > 0) fprintf(stderr, "xdistill: there is no command %.60s\n", words[0]);
    if (!c) return command_usage("");
    if (count == 2 && strcmp(words[1], "--help") == 0 && !has_options(c)) return help_of(c);
    return c->run(ctx, count - 1, words + 1);
}

/* A list that a full disk has cut off is no result. */
static bool has_written(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return true;
    fprintf(stderr, "standard output: %s\n", strerror(errno));
    return false;
}

int main(int argc, char **argv) {
    xd_ctx *ctx = NULL;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return COMMAND_BROKEN;
    const int status = run(ctx, argc - 1, argv + 1);
    xd_ctx_destroy(ctx);
    return has_written() ? status : COMMAND_BROKEN;
}
