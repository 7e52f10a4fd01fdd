/* Writes and reads tensors whose elements everybody can compute, on ranks that hold ranges which ignore rows:
 *     dcp_ranks pieces DIR RANKS    each rank its own files (xd_weights_export)
 *     dcp_ranks whole DIR RANKS     one model
 *     dcp_ranks read DIR RANKS      reads either (xd_weights_import); ends with 1 unless every element is right */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 5, MOST = 128 };

typedef struct made {
    const char *name;
    xd_dtype dtype;
    int ndim;
    int64_t shape[3];
} made;

static const made tensors[TENSORS] = {
    { "embed.weight", XD_DTYPE_F32, 2, { 13, 5, 0 } },  { "layers.0.w", XD_DTYPE_BF16, 3, { 6, 4, 3 } },
    { "layers.0.count", XD_DTYPE_I64, 1, { 7, 0, 0 } }, { "layers.1.half", XD_DTYPE_F16, 2, { 2, 9, 0 } },
    { "layers.1.wide", XD_DTYPE_F64, 2, { 5, 8, 0 } },
};

typedef struct job {
    const char *what, *directory;
    int64_t wrong;
} job;

/* Element k of tensor t: a small integer, the same in every type. */
static double value(int t, int64_t k) {
    return (double)((k * 7 + t * 31) % 201 - 100);
}

static void store(void *to, xd_dtype dtype, int64_t at, double number) {
    if (dtype == XD_DTYPE_I64)
        ((int64_t *)to)[at] = (int64_t)number;
    else
        xd_store_f64(to, dtype, at, number);
}

static xd_result run(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    const int64_t rank = xd_comm_rank(world), ranks = xd_comm_size(world);
    static __thread double data[TENSORS][MOST];
    xd_tensor_part parts[TENSORS];
    xd_mapped_weights weights;
    xd_result result;
    memset(parts, 0, sizeof parts);
    memset(&weights, 0, sizeof weights);
    const bool reads = strcmp(j->what, "read") == 0;
    for (int t = 0; t < TENSORS; t++) {
        xd_tensor_part *p = &parts[t];
        int64_t numel = 1;
        p->name = tensors[t].name;
        p->dtype = tensors[t].dtype;
        p->ndim = tensors[t].ndim;
        for (int d = 0; d < p->ndim; d++) numel *= p->shape[d] = tensors[t].shape[d];
        p->range.begin = numel * rank / ranks;
        p->range.end = numel * (rank + 1) / ranks;
        p->data = data[t];
        for (int64_t k = p->range.begin; k < p->range.end && !reads; k++)
            store(data[t], p->dtype, k - p->range.begin, value(t, k));
    }
    weights.parts = parts;
    weights.part_count = TENSORS;
    if (!reads) {
        xd_weights_export_desc d;
        memset(&d, 0, sizeof d);
        d.directory = j->directory;
        d.weights = weights;
        d.pieces = strcmp(j->what, "pieces") == 0;
        return xd_weights_export(world, &d);
    }
    xd_weights_import_desc d;
    memset(&d, 0, sizeof d);
    d.directory = j->directory;
    d.weights = weights;
    result = xd_weights_import(world, &d, NULL);
    for (int t = 0; t < TENSORS && result == XD_OK; t++)
        for (int64_t k = parts[t].range.begin; k < parts[t].range.end; k++) {
            double want;
            const size_t size = xd_dtype_size(parts[t].dtype);
            store(&want, parts[t].dtype, 0, value(t, k));
            if (memcmp(&want, (char *)data[t] + (size_t)(k - parts[t].range.begin) * size, size) != 0)
                __atomic_add_fetch(&j->wrong, 1, __ATOMIC_RELAXED);
        }
    return result;
}

int main(int argc, char **argv) {
    job j;
    xd_error error;
    memset(&j, 0, sizeof j);
    if (argc != 4) return 2;
    j.what = argv[1];
    j.directory = argv[2];
    const xd_result result = xd_run_threads(atoi(argv[3]), NULL, run, &j, &error);
    if (result != XD_OK) fprintf(stderr, "%s\n", error.message);
    if (j.wrong) fprintf(stderr, "%lld elements are wrong\n", (long long)j.wrong);
    return result != XD_OK || j.wrong ? 1 : 0;
}
