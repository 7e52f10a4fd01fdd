/* A matrix sharded over eight ranks, saved by all of them and loaded by three: any other number would do, with any other cut.
 *
 *     cc -std=c99 -O2 examples/14_save_on_eight.c -o save_on_eight -lm -lpthread
 *
 * The eight are a 4 x 2 mesh that cuts rows and columns, the three cut rows alone. A file of a checkpoint has whole tensors, each
 * once, so nobody needs to know who wrote it, and no rank ever has memory for all of it. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

enum { ROWS = 30, COLUMNS = 7, STEP = 12 }; /* 30 rows over 4, 7 columns over 2: nothing is even */

typedef struct run {
    int rows, columns; /* of the mesh */
    bool load;
    int64_t elements[8], wrong[8]; /* of each rank */
} run;

/* Writes the elements of a part, each of which tells where it is, or counts those that have a wrong value. */
static int64_t walk(const xd_region *region, float *x, bool write) {
    int64_t wrong = 0;
    for (int a = 0; a < region->count[0]; a++)
        for (int64_t r = region->interval[0][a].begin; r < region->interval[0][a].end; r++)
            for (int b = 0; b < region->count[1]; b++)
                for (int64_t c = region->interval[1][b].begin; c < region->interval[1][b].end; c++, x++) {
                    if (write) *x = (float)(r * COLUMNS + c);
                    wrong += *x != (float)(r * COLUMNS + c);
                }
    return wrong;
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int rank = xd_comm_rank(world);
    float data[ROWS * COLUMNS] = { 0 }; /* enough for any part */
    xd_mesh *mesh;
    xd_layout *layout;
    xd_region region;
    XD_TRY(xd_mesh_create(world, &(xd_mesh_desc){ .axes = { { "fsdp", r->rows }, { "tp", r->columns } } }, &mesh));
    XD_TRY(xd_layout_create(ctx, &(xd_layout_desc){
        .ndim = 2, .shape = { ROWS, COLUMNS }, .topology = xd_mesh_topology(mesh),
        .placement = { { XD_SHARD, .dim = 0 }, { XD_SHARD, .dim = 1 } },
    }, &layout));
    xd_layout_region(layout, rank, &region);
    const xd_tensor view = xd_tensor_view(layout, rank, data, XD_DTYPE_F32);
    const xd_tensor_part part = { .name = "weight", .dtype = XD_DTYPE_F32, .ndim = 2, .shape = { ROWS, COLUMNS },
                                  .region = &region, .range = { 0, xd_tensor_numel(&view) }, .data = data };
    const xd_checkpoint_network all = { .parts = &part, .part_count = 1 };
    if (r->load) {
        XD_TRY(xd_checkpoint_load(world, &(xd_checkpoint_load_desc){
            .root = "build/save-on-eight", .step = XD_CHECKPOINT_NEWEST, .networks = &all, .network_count = 1,
        }, NULL, NULL));
    } else {
        walk(&region, data, true);
        XD_TRY(xd_checkpoint_save(world, &(xd_checkpoint_save_desc){
            .root = "build/save-on-eight", .step = STEP, .networks = &all, .network_count = 1, .overwrite = true,
        }));
    }
    r->elements[rank] = xd_tensor_numel(&view);
    r->wrong[rank] = walk(&region, data, false);
    xd_layout_destroy(layout);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

int main(void) {
    run runs[] = { { .rows = 4, .columns = 2 }, { .rows = 3, .columns = 1, .load = true } };
    int64_t wrong = 0;
    for (int i = 0; i < 2; i++) {
        const int ranks = runs[i].rows * runs[i].columns;
        xd_error error = { 0 };
        if (xd_run_threads(ranks, NULL, run_rank, &runs[i], &error) != XD_OK) {
            fprintf(stderr, "rank %d: %s\n", error.rank, error.message);
            return 1;
        }
        printf("%s %d ranks, elements of each:", runs[i].load ? "loaded on" : "saved on", ranks);
        for (int rank = 0; rank < ranks; rank++) {
            printf(" %lld", (long long)runs[i].elements[rank]);
            wrong += runs[i].wrong[rank];
        }
        printf("\n");
    }
    printf("%lld elements are wrong\n", (long long)wrong);
    return wrong != 0;
}
