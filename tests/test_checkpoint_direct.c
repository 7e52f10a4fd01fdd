/* Saves of tensors that are large enough to go past the page cache: the same files, and the same failures. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"

#include <errno.h>

/* Halves, neither of whole blocks, are beyond the size from which writes are direct; a piece is 4 MiB. */
enum { LARGE = 2500003, SMALL = 7, TENSORS = 3, SHIFT = 3 /* elements by which memory is not aligned */ };

typedef struct scene {
    char root[64];
    int64_t step;
} scene;

/* A rank's half of each tensor. Element i of tensor t is the same on any number of ranks. */
typedef struct rank_parts {
    xd_tensor_part part[TENSORS];
    float *memory[TENSORS];
} rank_parts;

static float element(int tensor, int64_t i) {
    return (float)(i % 65521) + 0.25f * (float)tensor;
}

static void parts_make(rank_parts *r, int rank, int ranks) {
    static const char *const names[TENSORS] = { "large", "larger", "small" };
    static const int64_t counts[TENSORS] = { LARGE, LARGE + 1, SMALL };
    memset(r, 0, sizeof *r);
    for (int t = 0; t < TENSORS; t++) {
        xd_tensor_part *p = &r->part[t];
        p->name = names[t];
        p->dtype = XD_DTYPE_F32;
        p->ndim = 1;
        p->shape[0] = counts[t];
        p->range = xd_chunk(counts[t], ranks, rank);
        const int64_t count = p->range.end - p->range.begin;
        r->memory[t] = (float *)malloc((size_t)(count + SHIFT) * sizeof(float));
        p->data = r->memory[t] + SHIFT;
        for (int64_t i = 0; i < count; i++) r->memory[t][SHIFT + i] = element(t, p->range.begin + i);
    }
}

static void parts_free(rank_parts *r) {
    for (int t = 0; t < TENSORS; t++) free(r->memory[t]);
}

static xd_result parts_save(xd_comm *comm, const rank_parts *r, const char *root, int64_t step) {
    xd_checkpoint_network network;
    xd_checkpoint_save_desc d;
    memset(&network, 0, sizeof network);
    memset(&d, 0, sizeof d);
    network.parts = r->part;
    network.part_count = TENSORS;
    d.root = root;
    d.step = step;
    d.networks = &network;
    d.network_count = 1;
    return xd_checkpoint_save(comm, &d);
}

static xd_result rank_saves(xd_comm *comm, void *argument) {
    const scene *s = (const scene *)argument;
    rank_parts r;
    parts_make(&r, xd_comm_rank(comm), xd_comm_size(comm));
    const xd_result result = parts_save(comm, &r, s->root, s->step);
    parts_free(&r);
    return result;
}

/* Files whose direct writing is counted, and done through the cache or refused: without a reason they say that it was not, so that
 * checksums are formed beside it. */
typedef struct direct_calls {
    int count, error, reason;
    int good; /* calls before those with the error */
} direct_calls;

static int direct_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset,
                        int *reason) {
    direct_calls *calls = (direct_calls *)user;
    calls->count++;
    *reason = calls->reason;
    if (calls->error && calls->count > calls->good) return calls->error;
    return pwrite((int)file, buffer, bytes, (off_t)offset) == (ssize_t)bytes ? 0 : EIO;
}

static xd_ctx_desc direct_desc(direct_calls *calls) {
    xd_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.files.write_direct = direct_write;
    d.files.user = calls;
    return d;
}

static void same_file(xd_ctx *ctx, const scene *s, const char *one, const char *other) {
    char *a = NULL, *b = NULL;
    size_t a_bytes = 0, b_bytes = 0;
    CHECK_EQ_INT(xd_file_load(ctx, path_in(s->root, one), 0, &a, &a_bytes), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, path_in(s->root, other), 0, &b, &b_bytes), XD_OK);
    CHECK(a && b && a_bytes == b_bytes && memcmp(a, b, a_bytes) == 0);
    xd_release(ctx, a);
    xd_release(ctx, b);
}

XD_TEST(direct_writes_of_two_ranks_give_the_file_of_one_through_the_cache) {
    direct_calls calls = { 0, 0, ENOSYS, 0 };
    const xd_ctx_desc desc = direct_desc(&calls);
    xd_error error;
    xd_ctx *ctx = NULL;
    scene s;
    memset(&s, 0, sizeof s);
    strcpy(s.root, new_root());
    s.step = 1;
    CHECK_EQ_INT(xd_run_threads(2, NULL, rank_saves, &s, &error), XD_OK);
    s.step = 2;
    CHECK_EQ_INT(xd_run_threads(1, &desc, rank_saves, &s, &error), XD_OK);
    CHECK_EQ_INT(calls.count, 6); /* of the large ones, 9.5 MiB each; the rest of 1.5 MiB too */
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    same_file(ctx, &s, "step-1/model.safetensors", "step-2/model.safetensors");
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(s.root, "step-1")), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(s.root, "step-2")), XD_OK);
    xd_ctx_destroy(ctx);
    remove_all(s.root);
}

/* Blocks of 4 MiB are cut by pieces and shared by both ranks. */
XD_TEST(checksums_formed_beside_writing_are_those_formed_after_it) {
    direct_calls calls = { 0, 0, ENOSYS, 0 };
    const xd_ctx_desc desc = direct_desc(&calls);
    xd_error error;
    xd_ctx *ctx = NULL;
    scene s, beside;
    memset(&s, 0, sizeof s);
    strcpy(s.root, new_root());
    CHECK_EQ_INT(xd_run_threads(1, &desc, rank_saves, &s, &error), XD_OK);
    for (int ranks = 1; ranks <= 2; ranks++) {
        direct_calls each = { 0, 0, 0, 0 };
        const xd_ctx_desc own = direct_desc(&each);
        memset(&beside, 0, sizeof beside);
        strcpy(beside.root, new_root());
        CHECK_EQ_INT(xd_run_threads(ranks, ranks == 1 ? &own : NULL, rank_saves, &beside, &error), XD_OK);
        CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
        CHECK_EQ_INT(xd_checkpoint_verify(ctx, path_in(beside.root, "step-0")), XD_OK);
        char *a = NULL, *b = NULL;
        size_t a_bytes = 0, b_bytes = 0;
        CHECK_EQ_INT(xd_file_load(ctx, path_in(s.root, "step-0/manifest.json"), 0, &a, &a_bytes), XD_OK);
        CHECK_EQ_INT(xd_file_load(ctx, path_in(beside.root, "step-0/manifest.json"), 0, &b, &b_bytes), XD_OK);
        CHECK(a && b && a_bytes == b_bytes && memcmp(a, b, a_bytes) == 0);
        xd_release(ctx, a);
        xd_release(ctx, b);
        xd_ctx_destroy(ctx);
        remove_all(beside.root);
    }
    remove_all(s.root);
}

/* At the first write, counted afterwards; and at the third, counted beside it. */
XD_TEST(a_full_disk_at_a_direct_write_leaves_the_older_checkpoint) {
    direct_calls calls = { 0, 0, ENOSYS, 0 };
    const xd_ctx_desc desc = direct_desc(&calls);
    xd_error error;
    xd_ctx *ctx = NULL;
    scene s;
    int64_t step = 0;
    memset(&s, 0, sizeof s);
    strcpy(s.root, new_root());
    s.step = 1;
    CHECK_EQ_INT(xd_run_threads(1, &desc, rank_saves, &s, &error), XD_OK);
    s.step = 2;
    calls.error = ENOSPC;
    CHECK_EQ_INT(xd_run_threads(1, &desc, rank_saves, &s, &error), XD_ERROR_IO);
    CHECK(strstr(error.message, strerror(ENOSPC)) != NULL);
    calls.reason = calls.count = 0;
    calls.good = 2;
    CHECK_EQ_INT(xd_run_threads(1, &desc, rank_saves, &s, &error), XD_ERROR_IO);
    CHECK(strstr(error.message, strerror(ENOSPC)) != NULL);
    CHECK_EQ_INT(calls.count, 3);
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_find(ctx, s.root, &step), XD_OK);
    CHECK_EQ_INT(step, 1);
    CHECK_EQ_STR(names_in(ctx, s.root), "latest step-1 ");
    xd_ctx_destroy(ctx);
    remove_all(s.root);
}

/* ---- how much a load reads ---- */

typedef struct load_scene {
    scene s;
    xd_checkpoint_check check;
    int64_t read; /* atomic: bytes of all ranks */
} load_scene;

static int counted_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    if (bytes > 4096) __atomic_add_fetch((int64_t *)user, (int64_t)bytes, __ATOMIC_RELAXED);
    return pread((int)file, buffer, bytes, (off_t)offset) == (ssize_t)bytes ? 0 : EIO;
}

/* Every rank has all of the large tensors. */
static xd_result rank_loads_all(xd_comm *comm, void *argument) {
    load_scene *l = (load_scene *)argument;
    rank_parts r;
    xd_checkpoint_network network;
    xd_checkpoint_load_desc d;
    memset(&network, 0, sizeof network);
    memset(&d, 0, sizeof d);
    parts_make(&r, 0, 1);
    network.parts = r.part;
    network.part_count = TENSORS;
    d.root = l->s.root;
    d.networks = &network;
    d.network_count = 1;
    d.check = l->check;
    for (int t = 0; t < TENSORS; t++) memset(r.part[t].data, 0, (size_t)r.part[t].range.end * sizeof(float));
    const xd_result result = xd_checkpoint_load(comm, &d, NULL, NULL);
    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < r.part[t].range.end; i += 997)
            CHECK(((float *)r.part[t].data)[i] == element(t, i));
    parts_free(&r);
    return result;
}

XD_TEST(replicas_compare_each_block_once) {
    load_scene l;
    xd_ctx_desc desc;
    xd_error error;
    int64_t read[3];
    memset(&l, 0, sizeof l);
    memset(&desc, 0, sizeof desc);
    strcpy(l.s.root, new_root());
    CHECK_EQ_INT(xd_run_threads(2, NULL, rank_saves, &l.s, &error), XD_OK);
    desc.files.read = counted_read;
    desc.files.user = &l.read;
    for (int i = 0; i < 3; i++) {
        l.check = i == 2 ? XD_CHECKPOINT_CHECK_NONE : XD_CHECKPOINT_CHECK_TOUCHED;
        l.read = 0;
        CHECK_EQ_INT(xd_run_threads(i == 0 ? 1 : 3, &desc, rank_loads_all, &l, &error), XD_OK);
        read[i] = l.read;
    }
    const int64_t file = 4096 + ((int64_t)2 * LARGE + 1 + SMALL) * (int64_t)sizeof(float);
    const int64_t large = ((int64_t)2 * LARGE + 1) * (int64_t)sizeof(float);
    CHECK_EQ_INT(read[0], file + large);
    CHECK_EQ_INT(read[1], file + 3 * large);
    CHECK_EQ_INT(read[2], 3 * large);
    remove_all(l.s.root);
}

XD_TEST_MAIN()
