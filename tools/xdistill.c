/* xdistill.c - looks into checkpoints, and brings those of others.
 *
 *   cc -std=c99 -O2 tools/xdistill.c -o xdistill -lm -lpthread
 *   ./xdistill inspect DIR       files and tensors of a checkpoint (ROOT/step-N), as its manifest lists them
 *   ./xdistill verify DIR        reads and compares every byte
 *   ./xdistill diff DIR DIR      the first tensors that differ, by the fingerprints of the manifests
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
 * Ends with 0; with 1 when checkpoints differ; with 2 and a line that says why when something is damaged or missing, or when what it
 * prints cannot be written. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "dcp_join.h"

enum { SAME = 0, DIFFERENT = 1, BROKEN = 2, SHOWN = 10 };

static void print_tensor(const xd_checkpoint_tensor_info *t) {
    printf("  %-8s %s %s [", t->group, t->name, xd_dtype_name(t->dtype));
    for (int i = 0; i < t->ndim; i++) printf("%s%lld", i ? "," : "", (long long)t->shape[i]);
    printf("] %016" PRIx64 "\n", t->fingerprint);
}

static int inspect(const xd_checkpoint *c) {
    const xd_checkpoint_info info = xd_checkpoint_describe(c);
    printf("step %lld, %lld files, %lld tensors\n", (long long)info.step, (long long)info.file_count,
           (long long)info.tensor_count);
    for (int64_t i = 0; i < info.file_count; i++) {
        const xd_checkpoint_file_info *f = xd_checkpoint_file_at(c, i);
        printf("  %12llu %08" PRIx32 " %s\n", (unsigned long long)f->bytes, f->crc32c, f->name);
    }
    for (int64_t i = 0; i < info.tensor_count; i++) print_tensor(xd_checkpoint_tensor_at(c, i));
    return SAME;
}

static bool same_tensor(const xd_checkpoint_tensor_info *a, const xd_checkpoint_tensor_info *b) {
    return a->dtype == b->dtype && a->ndim == b->ndim && a->fingerprint == b->fingerprint &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Prints the tensors of one that the other has not, or has otherwise when `values`; returns their number. */
static int64_t print_differences(const xd_checkpoint *one, const xd_checkpoint *other, bool values,
                                 int64_t shown) {
    const int64_t count = xd_checkpoint_describe(one).tensor_count;
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        const xd_checkpoint_tensor_info *t = xd_checkpoint_tensor_at(one, i);
        const int64_t at = xd_checkpoint_tensor_find(other, t->group, t->name);
        if (at >= 0 && (!values || same_tensor(t, xd_checkpoint_tensor_at(other, at)))) continue;
        if (shown + found++ >= SHOWN) continue;
        if (at < 0) printf("%s:\n", values ? "only the first has" : "only the second has");
        print_tensor(t);
        if (at >= 0) print_tensor(xd_checkpoint_tensor_at(other, at));
    }
    return found;
}

static int diff(const xd_checkpoint *one, const xd_checkpoint *other) {
    int64_t found = print_differences(one, other, true, 0);
    found += print_differences(other, one, false, found);
    if (found == 0) return SAME;
    printf("%lld tensors differ\n", (long long)found);
    return DIFFERENT;
}

static int usage(void) {
    fprintf(stderr, "usage: xdistill inspect DIR | verify DIR | diff DIR DIR |\n"
                    "       convert [--select PREFIX] [--without PREFIX] [--tensors-only] [--max-shard-bytes "
                    "N] DIR NEW\n");
    return BROKEN;
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
    int64_t step;
    if (xd_checkpoint_find(ctx, directory, &step) == XD_OK)
        fprintf(stderr, "%s is the root of checkpoints: name one, such as %s/step-%lld\n", directory,
                directory, (long long)step);
}

static int run(xd_ctx *ctx, int count, char **arguments) {
    xd_checkpoint *one = NULL, *other = NULL;
    int status = BROKEN;
    const bool verifies = count == 2 && strcmp(arguments[0], "verify") == 0;
    if (verifies && xd_checkpoint_verify(ctx, arguments[1]) == XD_OK) status = SAME;
    if (count > 0 && strcmp(arguments[0], "convert") == 0) {
        status = convert(ctx, count - 1, arguments + 1);
    } else if (count == 2 && strcmp(arguments[0], "inspect") == 0) {
        if (xd_checkpoint_open(ctx, arguments[1], &one) == XD_OK) status = inspect(one);
    } else if (count == 3 && strcmp(arguments[0], "diff") == 0) {
        if (xd_checkpoint_open(ctx, arguments[1], &one) == XD_OK &&
            xd_checkpoint_open(ctx, arguments[2], &other) == XD_OK)
            status = diff(one, other);
    } else if (!verifies) {
        usage();
    }
    const xd_result result = xd_last_error(ctx)->result;
    if (result != XD_OK) fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
    for (int i = 1; i < count && result == XD_ERROR_IO && strcmp(arguments[0], "convert") != 0; i++)
        hint(ctx, arguments[i]);
    xd_checkpoint_close(other);
    xd_checkpoint_close(one);
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
