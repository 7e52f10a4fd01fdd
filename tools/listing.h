/* listing.h - what `xdistill inspect` and `xdistill diff` look at: a checkpoint by its manifest, or a Hugging Face directory by the
 * headers of its files, which are model.safetensors, or model.safetensors.index.json and its shards. */
#ifndef LISTING_H
#define LISTING_H

#include "dcp_join.h"

#include <inttypes.h>

#define LISTING_MANIFEST "manifest.json"
#define LISTING_SINGLE "model.safetensors"
#define LISTING_INDEX "model.safetensors.index.json"

enum {
    LISTING_SHOWN = 4096,    /* bytes of a name */
    LISTING_WINDOW = 1 << 20 /* bytes of a tensor in memory */
};

typedef struct listing_tensor {
    xd_checkpoint_tensor_info info; /* its place is counted from the beginning of the file */
    const char *type; /* what the file calls it; info.dtype is NONE for one that nothing reads */
} listing_tensor;

typedef struct listing {
    xd_ctx *ctx;
    const char *directory;
    xd_checkpoint *checkpoint; /* NULL: a Hugging Face directory, */
    xd_weights *weights;       /* and what it has */
    const char **names;        /* [file_count] */
    int64_t file_count;
    listing_tensor *tensors; /* [tensor_count] in the order of their groups' and names' bytes */
    int64_t tensor_count;
} listing;

/* ---- bytes of files ---- */

static xd_result listing_open_file(const listing *l, int64_t file, intptr_t *out, uint64_t *bytes) {
    const xd_files *files = &xd_ctx_settings(l->ctx)->files;
    char *path = file_path(l->ctx, l->directory, l->names[file]);
    XD_REQUIRE(l->ctx, path, XD_ERROR_MEMORY, "%s: no room for a path", l->directory);
    int error = files->open(files->user, path, XD_FILE_READ, out);
    xd_release(l->ctx, path);
    XD_REQUIRE(l->ctx, error == 0, XD_ERROR_IO, "%s/%s: open: %s", l->directory, l->names[file],
               strerror(error));
    error = files->size(files->user, *out, bytes);
    if (error) files->close(files->user, *out);
    XD_REQUIRE(l->ctx, error == 0, XD_ERROR_IO, "%s/%s: size: %s", l->directory, l->names[file],
               strerror(error));
    return XD_OK;
}

static xd_result listing_read(const listing *l, int64_t file, intptr_t handle, uint64_t offset, size_t bytes,
                              void *out) {
    const xd_files *files = &xd_ctx_settings(l->ctx)->files;
    const int error = files->read(files->user, handle, out, bytes, offset);
    XD_REQUIRE(l->ctx, error == 0, XD_ERROR_IO, "%s/%s: read: %s", l->directory, l->names[file],
               strerror(error));
    return XD_OK;
}

/* ---- opening ---- */

static int listing_order(const void *a, const void *b) {
    const xd_checkpoint_tensor_info *x = &((const listing_tensor *)a)->info;
    const xd_checkpoint_tensor_info *y = &((const listing_tensor *)b)->info;
    const int group = strcmp(x->group, y->group);
    return group ? group : strcmp(x->name, y->name);
}

static xd_result listing_reserve(listing *l, int64_t files, int64_t tensors) {
    l->names = (const char **)xd_allocate(l->ctx, (size_t)(files + 1) * sizeof *l->names);
    l->tensors = (listing_tensor *)xd_allocate(l->ctx, (size_t)(tensors + 1) * sizeof *l->tensors);
    XD_REQUIRE(l->ctx, l->names && l->tensors, XD_ERROR_MEMORY, "%s: no room for a list of %lld tensors",
               l->directory, (long long)tensors);
    return XD_OK;
}

static xd_result listing_open_checkpoint(listing *l) {
    XD_TRY(xd_checkpoint_open(l->ctx, &(xd_checkpoint_desc){ .directory = l->directory }, &l->checkpoint));
    const xd_checkpoint_info info = xd_checkpoint_describe(l->checkpoint);
    XD_TRY(listing_reserve(l, info.file_count, info.tensor_count));
    for (; l->file_count < info.file_count; l->file_count++)
        l->names[l->file_count] = xd_checkpoint_file_at(l->checkpoint, l->file_count)->name;
    for (; l->tensor_count < info.tensor_count; l->tensor_count++) {
        listing_tensor *t = &l->tensors[l->tensor_count];
        t->info = *xd_checkpoint_tensor_at(l->checkpoint, l->tensor_count);
        t->type = xd_dtype_name(t->info.dtype);
    }
    return XD_OK;
}

static xd_result listing_open_model(listing *l) {
    xd_weights_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = l->directory;
    desc.mode = XD_WEIGHTS_STREAM;
    XD_TRY(xd_weights_open(l->ctx, &desc, &l->weights));
    const xd_weights_info info = xd_weights_describe(l->weights);
    XD_TRY(listing_reserve(l, info.file_count, info.tensor_count));
    for (; l->file_count < info.file_count; l->file_count++)
        l->names[l->file_count] = xd_weights_file_at(l->weights, l->file_count)->name;
    for (; l->tensor_count < info.tensor_count; l->tensor_count++) {
        const xd_weights_tensor *from = xd_weights_at(l->weights, l->tensor_count);
        listing_tensor *t = &l->tensors[l->tensor_count];
        memset(t, 0, sizeof *t);
        t->info.group = "model";
        t->info.name = from->name;
        t->info.file = from->file;
        t->info.dtype = from->dtype;
        t->info.ndim = from->ndim;
        t->info.shape = from->shape;
        t->info.begin = from->begin;
        t->info.end = from->end;
        t->type = from->type;
    }
    return XD_OK;
}

/* Close it whatever the result. A directory with a manifest is a checkpoint, also where it has model.safetensors, as they all do. */
static xd_result listing_open(xd_ctx *ctx, const char *directory, listing *out) {
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    out->directory = directory;
    const bool model = !join_has(ctx, directory, LISTING_MANIFEST) &&
                       (join_has(ctx, directory, LISTING_SINGLE) || join_has(ctx, directory, LISTING_INDEX));
    return model ? listing_open_model(out) : listing_open_checkpoint(out);
}

static void listing_close(listing *l) {
    if (!l->ctx) return;
    xd_release(l->ctx, l->tensors);
    xd_release(l->ctx, (void *)l->names);
    xd_weights_close(l->weights);
    xd_checkpoint_close(l->checkpoint);
}

/* ---- comparing ---- */

/* NULL for a tensor that is not there. */
static const listing_tensor *listing_find(const listing *l, const listing_tensor *t) {
    return l->tensor_count ? (const listing_tensor *)bsearch(t, l->tensors, (size_t)l->tensor_count,
                                                             sizeof *l->tensors, listing_order)
                           : NULL;
}

/* Two places in files that should have the same bytes. */
typedef struct listing_pair {
    const listing *list[2];
    const listing_tensor *tensor[2];
    intptr_t file[2];
    unsigned char *window[2]; /* [LISTING_WINDOW] */
} listing_pair;

/* The first byte of the tensors that differs, or their number of bytes. */
static xd_result listing_compare_window(const listing_pair *p, uint64_t *first) {
    const uint64_t bytes = p->tensor[0]->info.end - p->tensor[0]->info.begin;
    size_t now;
    for (*first = 0; *first < bytes; *first += now) {
        now = bytes - *first < LISTING_WINDOW ? (size_t)(bytes - *first) : (size_t)LISTING_WINDOW;
        for (int i = 0; i < 2; i++)
            XD_TRY(listing_read(p->list[i], p->tensor[i]->info.file, p->file[i],
                                p->tensor[i]->info.begin + *first, now, p->window[i]));
        if (memcmp(p->window[0], p->window[1], now) == 0) continue;
        for (size_t at = 0; p->window[0][at] == p->window[1][at]; at++) ++*first;
        return XD_OK;
    }
    return XD_OK;
}

static xd_result listing_compare_files(listing_pair *p, uint64_t *first) {
    const xd_files *files = &xd_ctx_settings(p->list[0]->ctx)->files;
    uint64_t bytes;
    XD_TRY(listing_open_file(p->list[0], p->tensor[0]->info.file, &p->file[0], &bytes));
    xd_result result = listing_open_file(p->list[1], p->tensor[1]->info.file, &p->file[1], &bytes);
    if (result == XD_OK) {
        result = listing_compare_window(p, first);
        files->close(files->user, p->file[1]);
    }
    files->close(files->user, p->file[0]);
    return result;
}

/* The first byte at which two tensors of one type and shape differ; *same when there is none. */
static xd_result listing_compare_bytes(const listing *one, const listing_tensor *a, const listing *other,
                                       const listing_tensor *b, uint64_t *first, bool *same) {
    listing_pair p;
    memset(&p, 0, sizeof p);
    p.list[0] = one;
    p.list[1] = other;
    p.tensor[0] = a;
    p.tensor[1] = b;
    const uint64_t bytes = a->info.end - a->info.begin;
    XD_REQUIRE(one->ctx, bytes == b->info.end - b->info.begin, XD_ERROR_FORMAT,
               "tensor \"%s\" has %llu bytes in %s and %llu in %s", a->info.name, (unsigned long long)bytes,
               one->directory, (unsigned long long)(b->info.end - b->info.begin), other->directory);
    unsigned char *windows = (unsigned char *)xd_allocate(one->ctx, (size_t)2 * LISTING_WINDOW);
    XD_REQUIRE(one->ctx, windows, XD_ERROR_MEMORY, "no room for %d bytes", 2 * LISTING_WINDOW);
    p.window[0] = windows;
    p.window[1] = windows + LISTING_WINDOW;
    const xd_result result = listing_compare_files(&p, first);
    xd_release(one->ctx, windows);
    *same = *first == bytes;
    return result;
}

/* ---- printing ---- */

static void listing_print_tensor(const listing *l, const listing_tensor *t) {
    char group[LISTING_SHOWN], name[LISTING_SHOWN];
    printf("  %-8s %s %s [", xd_text_escape(t->info.group, group, sizeof group),
           xd_text_escape(t->info.name, name, sizeof name), t->type);
    for (int i = 0; i < t->info.ndim; i++) printf("%s%lld", i ? "," : "", (long long)t->info.shape[i]);
    if (l->checkpoint)
        printf("] %016" PRIx64 "\n", t->info.fingerprint);
    else
        printf("] -\n");
}

static void listing_print_file(const listing *l, int64_t file) {
    char name[LISTING_SHOWN], sum[16] = "-       ";
    uint64_t bytes;
    if (l->checkpoint) {
        const xd_checkpoint_file_info *f = xd_checkpoint_file_at(l->checkpoint, file);
        bytes = f->bytes;
        snprintf(sum, sizeof sum, "%08" PRIx32, f->crc32c);
    } else {
        bytes = xd_weights_file_at(l->weights, file)->bytes;
    }
    printf("  %12llu %s %s\n", (unsigned long long)bytes, sum,
           xd_text_escape(l->names[file], name, sizeof name));
}

#endif
