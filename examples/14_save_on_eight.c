/* This example saves a sharded matrix from eight ranks and loads it on three ranks. Eight ranks
 * form a 4 x 2 mesh that shards rows and columns. Three ranks shard the rows only. Any other number
 * of ranks and any other sharding would work. A checkpoint file holds each whole tensor once, so a
 * load does not depend on the ranks that saved it. No rank needs memory for the whole file.
 *
 *     cc -std=c99 -O2 examples/14_save_on_eight.c -o save_on_eight -lm -lpthread
 */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdio.h>

/* 4 does not divide 30 rows, and 2 does not divide 7 columns. */
enum { ROWS = 30, COLUMNS = 7, STEP = 12 };

#define ROOT "build/save-on-eight"

typedef struct run {
    int rows, columns; /* of the mesh */
    bool load;
    int64_t elements[8]; /* of each rank */
    int64_t wrong[8];    /* of each rank */
} run;

/* Visits a part in the order of its storage. Element (r, c) must have the value r * COLUMNS + c.
 * The function optionally writes these values, then returns the number of wrong elements. */
static int64_t walk(const xd_region *region, float *x, bool write) {
    const xd_interval *rows = region->interval[0];
    const xd_interval *columns = region->interval[1];
    int64_t wrong = 0;
    for (int a = 0; a < region->count[0]; a++)
        for (int64_t r = rows[a].begin; r < rows[a].end; r++)
            for (int b = 0; b < region->count[1]; b++)
                for (int64_t c = columns[b].begin; c < columns[b].end; c++) {
                    if (write)
                        *x = (float)(r * COLUMNS + c);
                    wrong += *x != (float)(r * COLUMNS + c);
                    x++;
                }
    return wrong;
}

static xd_result save(xd_comm *world, const xd_checkpoint_network *network) {
    const xd_checkpoint_save_desc desc = {
        .root = ROOT,
        .step = STEP,
        .networks = network,
        .network_count = 1,
        .overwrite = true,
    };
    return xd_checkpoint_save(world, &desc);
}

static xd_result load(xd_comm *world, const xd_checkpoint_network *network) {
    const xd_checkpoint_load_desc desc = {
        .root = ROOT,
        .step = XD_CHECKPOINT_NEWEST,
        .networks = network,
        .network_count = 1,
    };
    return xd_checkpoint_load(world, &desc, NULL, NULL);
}

static xd_result run_rank(xd_comm *world, void *argument) {
    run *r = argument;
    const int rank = xd_comm_rank(world);
    float data[ROWS * COLUMNS] = { 0 }; /* enough for any part */
    xd_mesh *mesh;
    xd_layout *layout;
    xd_region region;

    const xd_mesh_desc grid = { .axes = { { "fsdp", r->rows }, { "tp", r->columns } } };
    XD_TRY(xd_mesh_create(world, &grid, &mesh));
    const xd_layout_desc sharded = {
        .ndim = 2,
        .shape = { ROWS, COLUMNS },
        .topology = xd_mesh_topology(mesh),
        .placement = { { XD_SHARD, .dim = 0 }, { XD_SHARD, .dim = 1 } },
    };
    XD_TRY(xd_layout_create(xd_comm_ctx(world), &sharded, &layout));

    xd_layout_region(layout, rank, &region);
    const xd_tensor view = xd_tensor_view(layout, rank, data, XD_DTYPE_F32);
    const xd_tensor_part part = {
        .name = "weight",
        .dtype = XD_DTYPE_F32,
        .ndim = 2,
        .shape = { ROWS, COLUMNS },
        .region = &region,
        .range = { 0, xd_tensor_numel(&view) },
        .data = data,
    };
    const xd_checkpoint_network network = { .parts = &part, .part_count = 1 };

    if (r->load) {
        XD_TRY(load(world, &network));
    } else {
        walk(&region, data, true);
        XD_TRY(save(world, &network));
    }
    r->elements[rank] = xd_tensor_numel(&view);
    r->wrong[rank] = walk(&region, data, false);

    xd_layout_destroy(layout);
    xd_mesh_destroy(mesh);
    return XD_OK;
}

int main(void) {
    run runs[] = {
        { .rows = 4, .columns = 2 },
        { .rows = 3, .columns = 1, .load = true },
    };
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
