/* xdistill.c - looks into checkpoints, and brings those of others.
 *
 *   cc -std=c99 -O2 tools/xdistill.c -o xdistill -lm -lpthread
 *   ./xdistill inspect DIR       files and tensors of a checkpoint (ROOT/step-N), as its manifest lists them, or of a Hugging Face
 *                                directory (model.safetensors, or model.safetensors.index.json and its shards), as its headers do
 *   ./xdistill verify DIR        reads and compares every byte of a checkpoint, and names the files that its manifest does not know
 *   ./xdistill diff DIR DIR      the first tensors that differ: by the fingerprints of two manifests, or by their bytes where one
 *                                is a Hugging Face directory, which has the group "model" alone
 *   ./xdistill convert DIR NEW   what PyTorch's torch.distributed.checkpoint has left in DIR becomes NEW, a model directory of
 *                                whole tensors in safetensors files. DIR has .metadata and *.distcp, whose pickles are read as
 *                                data (dcp_pickle.h: nothing of them is executed), and what is no tensor goes to objects.json;
 *                                or it has safetensors files with the pieces of ranks, as xd_weights_export writes them too;
 *                                or it is a file of torch.save, or has pytorch_model.bin or its index
 *
 * Options of convert, before DIR:
 *   --select PREFIX      only tensors whose names begin so, under names without it: --select model.
 *   --without PREFIX     nothing whose name begins so: --without optimizer.
 *   --tensors-only       without objects.json
 *   --max-shard-bytes N  of tensors in one file (5,000,000,000)
 *
 * --help prints this in short and ends with 0. Otherwise the tool ends with 0; with 1 when `diff` finds a difference; with 2 and a line
 * that says why when something is damaged or missing, when `verify` finds a half-written file, or when what the tool prints cannot be
 * written. Names are printed with their control characters as \xNN. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "listing.h"

enum { SAME = 0, DIFFERENT = 1, BROKEN = 2, SHOWN = 10 };

/* ---- inspect ---- */

static int inspect(const listing *l) {
    if (l->checkpoint)
        printf("step %lld, ", (long long)xd_checkpoint_describe(l->checkpoint).step);
    else
        printf("a Hugging Face directory, ");
    printf("%lld files, %lld tensors\n", (long long)l->file_count, (long long)l->tensor_count);
    for (int64_t i = 0; i < l->file_count; i++) listing_print_file(l, i);
    for (int64_t i = 0; i < l->tensor_count; i++) listing_print_tensor(l, &l->tensors[i]);
    return SAME;
}

/* ---- diff ---- */

typedef struct difference {
    const listing *one, *other;
    bool by_bytes; /* no fingerprints on one side */
    int64_t found;
} difference;

/* Compares a tensor with that of the same name; *first is the first byte that differs, -1 when that is not known. */
static xd_result compare_tensor(const difference *d, const listing_tensor *a, const listing_tensor *b,
                                bool *same, int64_t *first) {
    const size_t bytes = (size_t)a->info.ndim * sizeof *a->info.shape;
    uint64_t at = 0;
    *first = -1;
    *same = strcmp(a->type, b->type) == 0 && a->info.ndim == b->info.ndim &&
            (bytes == 0 || memcmp(a->info.shape, b->info.shape, bytes) == 0);
    if (*same && !d->by_bytes) *same = a->info.fingerprint == b->info.fingerprint;
    if (!*same || !d->by_bytes) return XD_OK;
    XD_TRY(listing_compare_bytes(d->one, a, d->other, b, &at, same));
    if (!*same) *first = (int64_t)at;
    return XD_OK;
}

static bool is_compared(const difference *d, const listing_tensor *t) {
    return !d->by_bytes || strcmp(t->info.group, "model") == 0;
}

/* The tensors that both have, otherwise, and those of the first alone. */
static xd_result print_differences(difference *d) {
    for (int64_t i = 0; i < d->one->tensor_count; i++) {
        const listing_tensor *t = &d->one->tensors[i], *other = listing_find(d->other, t);
        bool same = false;
        int64_t first = -1;
        if (!is_compared(d, t)) continue;
        if (other) XD_TRY(compare_tensor(d, t, other, &same, &first));
        if (same || d->found++ >= SHOWN) continue;
        if (!other) printf("only the first has:\n");
        listing_print_tensor(d->one, t);
        if (other) listing_print_tensor(d->other, other);
        if (first >= 0) printf("    first difference: byte %lld of the tensor\n", (long long)first);
    }
    return XD_OK;
}

static void print_others(difference *d) {
    for (int64_t i = 0; i < d->other->tensor_count; i++) {
        const listing_tensor *t = &d->other->tensors[i];
        if (!is_compared(d, t) || listing_find(d->one, t) || d->found++ >= SHOWN) continue;
        printf("only the second has:\n");
        listing_print_tensor(d->other, t);
    }
}

static int diff(const listing *one, const listing *other) {
    difference d = { one, other, !one->checkpoint || !other->checkpoint, 0 };
    if (print_differences(&d) != XD_OK) return BROKEN;
    print_others(&d);
    if (d.found == 0) return SAME;
    printf("%lld tensors differ\n", (long long)d.found);
    return DIFFERENT;
}

/* ---- verify ---- */

static bool is_known(const xd_checkpoint *c, const char *name) {
    const int64_t count = xd_checkpoint_describe(c).file_count;
    if (strcmp(name, LISTING_MANIFEST) == 0) return true;
    for (int64_t i = 0; i < count; i++)
        if (strcmp(xd_checkpoint_file_at(c, i)->name, name) == 0) return true;
    return false;
}

/* NAME.tmp-N: what a writer had not finished. */
static bool is_half_written(const char *name) {
    const char *end = NULL;
    for (const char *next = strstr(name, ".tmp-"); next; next = strstr(next + 1, ".tmp-")) end = next + 5;
    return end && *end && strspn(end, "0123456789") == strlen(end);
}

/* Names the files that the manifest does not know: a note, unless one is half written. */
static int print_unknown(xd_ctx *ctx, const char *directory, const xd_checkpoint *c) {
    const char **names = NULL;
    int64_t count = 0;
    int status = SAME;
    if (xd_file_list(ctx, directory, &names, &count) != XD_OK) return BROKEN;
    for (int64_t i = 0; i < count; i++) {
        char shown[LISTING_SHOWN];
        if (is_known(c, names[i])) continue;
        xd_text_escape(names[i], shown, sizeof shown);
        if (is_half_written(names[i])) {
            fprintf(stderr, "%s: half-written, left by a save that was cut off\n", shown);
            status = BROKEN;
        } else {
            printf("%s: not in the manifest\n", shown);
        }
    }
    xd_release(ctx, (void *)names);
    return status;
}

static int verify(xd_ctx *ctx, const char *directory) {
    xd_checkpoint *c = NULL;
    int status = BROKEN;
    if (xd_checkpoint_verify(ctx, directory) == XD_OK &&
        xd_checkpoint_open(ctx, &(xd_checkpoint_desc){ .directory = directory }, &c) == XD_OK)
        status = print_unknown(ctx, directory, c);
    xd_checkpoint_close(c);
    return status;
}

/* ---- convert, and the call ---- */

static void print_usage(FILE *file) {
    fprintf(file, "usage: xdistill inspect DIR\n"
                  "       xdistill verify DIR\n"
                  "       xdistill diff DIR DIR\n"
                  "       xdistill convert [--select PREFIX] [--without PREFIX] [--tensors-only]\n"
                  "                        [--max-shard-bytes N] DIR NEW\n");
}

static int usage(void) {
    print_usage(stderr);
    return BROKEN;
}

static int help(void) {
    print_usage(stdout);
    printf("\n"
           "inspect  lists files and tensors: of a checkpoint (ROOT/step-N) as its manifest\n"
           "         has them, of a Hugging Face directory (model.safetensors, or\n"
           "         model.safetensors.index.json and its shards) as its headers have them\n"
           "verify   reads and compares every byte of a checkpoint. A file that the\n"
           "         manifest does not know is a line of the output and no error; one that\n"
           "         is half-written (NAME.tmp-N) is an error\n"
           "diff     prints the first tensors that differ: by the fingerprints of two\n"
           "         manifests, or by their bytes where one is a Hugging Face directory,\n"
           "         which is compared with the group \"model\" of a checkpoint\n"
           "convert  makes NEW, a model directory, of a checkpoint of PyTorch\n"
           "\n"
           "Ends with 0; with 1 when diff finds a difference; with 2 when something is\n"
           "damaged, missing or half-written.\n");
    return SAME;
}

static int convert(xd_ctx *ctx, int count, char **arguments) {
    dcp_convert_desc desc;
    memset(&desc, 0, sizeof desc);
    while (count > 2) {
        const bool value = strcmp(arguments[0], "--tensors-only") != 0;
        char *end = NULL;
        if (!value)
            desc.tensors_only = true;
        else if (strcmp(arguments[0], "--select") == 0)
            desc.select = arguments[1];
        else if (strcmp(arguments[0], "--without") == 0)
            desc.without = arguments[1];
        else if (strcmp(arguments[0], "--max-shard-bytes") == 0)
            desc.max_shard_bytes = strtoull(arguments[1], &end, 10);
        else
            return usage();
        if (end && (*end || arguments[1][0] == '-' || desc.max_shard_bytes == 0)) return usage();
        count -= 1 + value;
        arguments += 1 + value;
    }
    if (count != 2) return usage();
    desc.source = arguments[0];
    desc.target = arguments[1];
    return join_directory(ctx, &desc) == XD_OK ? SAME : BROKEN;
}

/* A run's root is named more often than one of its checkpoints. */
static void hint(xd_ctx *ctx, const char *directory) {
    char shown[LISTING_SHOWN];
    int64_t step;
    if (xd_checkpoint_find(ctx, directory, &step) != XD_OK) return;
    xd_text_escape(directory, shown, sizeof shown);
    fprintf(stderr, "%s is the root of checkpoints: name one, such as %s/step-%lld\n", shown, shown,
            (long long)step);
}

static int look(xd_ctx *ctx, int count, char **directories) {
    listing one, other;
    int status = BROKEN;
    memset(&other, 0, sizeof other);
    if (listing_open(ctx, directories[0], &one) == XD_OK) {
        if (count == 1)
            status = inspect(&one);
        else if (listing_open(ctx, directories[1], &other) == XD_OK)
            status = diff(&one, &other);
    }
    listing_close(&other);
    listing_close(&one);
    return status;
}

static int run(xd_ctx *ctx, int count, char **arguments) {
    const char *word = count > 0 ? arguments[0] : "";
    int status;
    if (count == 1 && strcmp(word, "--help") == 0) return help();
    if (strcmp(word, "convert") == 0)
        status = convert(ctx, count - 1, arguments + 1);
    else if (count == 2 && strcmp(word, "verify") == 0)
        status = verify(ctx, arguments[1]);
    else if ((count == 2 && strcmp(word, "inspect") == 0) || (count == 3 && strcmp(word, "diff") == 0))
        status = look(ctx, count - 1, arguments + 1);
    else
        return usage();
    const xd_result result = xd_last_error(ctx)->result;
    if (result != XD_OK) fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
    for (int i = 1; i < count && result == XD_ERROR_IO && strcmp(word, "convert") != 0; i++)
        hint(ctx, arguments[i]);
    return status;
}

/* A list that a full disk has cut off is no result. */
static bool has_written(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return true;
    fprintf(stderr, "standard output: %s\n", strerror(errno));
    return false;
}

int main(int argc, char **argv) {
    xd_ctx *ctx = NULL;
    if (xd_ctx_create(NULL, &ctx) != XD_OK) return BROKEN;
    const int status = run(ctx, argc - 1, argv + 1);
    xd_ctx_destroy(ctx);
    return has_written() ? status : BROKEN;
}
