/* checkpoints.c - commands that look into checkpoints, and bring those of others: inspect, verify, diff, convert. main.c says what
 * they do. Names are printed with their control characters as \xNN. */
#include "command.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../listing.h"

enum { SAME = COMMAND_OK, DIFFERENT = COMMAND_DIFFERENT, BROKEN = COMMAND_BROKEN, SHOWN = 10 };

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

/* ---- convert, and the calls ---- */

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
            return command_usage("convert");
        if (end && (*end || arguments[1][0] == '-' || desc.max_shard_bytes == 0))
            return command_usage("convert");
        count -= 1 + value;
        arguments += 1 + value;
    }
    if (count != 2) return command_usage("convert");
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

/* Says what went wrong, and for directories what may have been meant. */
static int end(xd_ctx *ctx, int status, int count, char **directories) {
    const xd_result result = xd_last_error(ctx)->result;
    if (result != XD_OK) fprintf(stderr, "%s\n", xd_last_error(ctx)->message);
    for (int i = 0; i < count && result == XD_ERROR_IO; i++) hint(ctx, directories[i]);
    return status;
}

int command_inspect(xd_ctx *ctx, int count, char **words) {
    return count == 1 ? end(ctx, look(ctx, 1, words), 1, words) : command_usage("inspect");
}

int command_diff(xd_ctx *ctx, int count, char **words) {
    return count == 2 ? end(ctx, look(ctx, 2, words), 2, words) : command_usage("diff");
}

int command_verify(xd_ctx *ctx, int count, char **words) {
    return count == 1 ? end(ctx, verify(ctx, words[0]), 1, words) : command_usage("verify");
}

int command_convert(xd_ctx *ctx, int count, char **words) {
    return end(ctx, convert(ctx, count, words), 0, NULL);
}
