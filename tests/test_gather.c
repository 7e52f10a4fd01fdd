#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"
#include "weights_calls.h"

#include <stdlib.h>
#include <unistd.h>

enum { ROWS = 13, COLUMNS = 5 };

static const xd_weights_pair pairs[2] = { { "step", "12" }, { "lesson", "of the fox" } };

typedef struct gather_case {
    char directory[64];
    size_t staging_bytes;
    int root;
    bool bad_directory;
    int pairs; /* of metadata */
} gather_case;

/* A matrix split by rows, one split by columns, a replicated scalar, an empty tensor; element k holds k. */
static xd_result save(xd_comm *world, void *argument) {
    const gather_case *c = (const gather_case *)argument;
    xd_ctx *ctx = xd_comm_ctx(world);
    const int me = xd_comm_rank(world);
    static const char *const names[4] = { "rows", "columns", "scalar", "empty" };
    xd_topology t;
    memset(&t, 0, sizeof t);
    t.axis_count = 1;
    strcpy(t.name[0], "dp");
    t.size[0] = t.rank_count = xd_comm_size(world);
    xd_layout *layouts[4] = { NULL, NULL, NULL, NULL };
    xd_named_tensor tensors[4];
    float *data[4];
    for (int i = 0; i < 4; i++) {
        xd_layout_desc d;
        memset(&d, 0, sizeof d);
        d.topology = &t;
        d.ndim = i == 2 ? 0 : 2;
        if (d.ndim > 0) d.shape[0] = i == 3 ? 0 : ROWS;
        if (d.ndim > 0) d.shape[1] = COLUMNS;
        d.placement[0].kind = i == 2 ? XD_REPLICATE : XD_SHARD;
        d.placement[0].dim = i == 1 ? 1 : 0;
        CHECK_EQ_INT(xd_layout_create(ctx, &d, &layouts[i]), XD_OK);
        data[i] = (float *)calloc(ROWS * COLUMNS, sizeof **data);
        tensors[i].name = names[i];
        tensors[i].tensor = xd_tensor_view(layouts[i], me, data[i], XD_DTYPE_F32);
        const int64_t chunk = ((i == 1 ? COLUMNS : ROWS) + t.size[0] - 1) / t.size[0];
        const int64_t width = d.ndim ? tensors[i].tensor.shape[1] : 1;
        for (int64_t k = 0; k < xd_tensor_numel(&tensors[i].tensor) && i < 2; k++)
            data[i][k] = i == 0 ? (float)(me * chunk * COLUMNS + k)
                                : (float)(k / width * COLUMNS + me * chunk + k % width);
        if (i == 2) data[i][0] = 42.0f;
    }
    xd_weights_gather_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.directory = c->bad_directory ? "/tmp/no such directory" : c->directory;
    desc.tensors = tensors;
    desc.tensor_count = 4;
    desc.root = c->root;
    desc.staging_bytes = c->staging_bytes;
    desc.metadata = c->pairs ? pairs : NULL;
    desc.metadata_count = c->pairs;
    const xd_result result = xd_weights_gather(world, &desc);
    if (c->bad_directory)
        CHECK_EQ_INT(result, me == c->root ? XD_ERROR_IO : XD_ERROR_PEER);
    else
        CHECK_EQ_INT(result, XD_OK);
    for (int i = 0; i < 4; i++) {
        xd_layout_destroy(layouts[i]);
        free(data[i]);
    }
    return XD_OK;
}

static void check_saved(const gather_case *c) {
    xd_ctx *ctx = NULL;
    xd_weights *model = NULL;
    float value = 0.0f;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    CHECK_EQ_INT(weights_open_directory(ctx, c->directory, NULL, &model), XD_OK);
    for (int i = 0; i < 2 && model; i++) {
        float values[ROWS * COLUMNS];
        const int64_t index = xd_weights_find(model, i ? "columns" : "rows");
        CHECK_EQ_INT(weights_read_bytes(model, index, 0, sizeof values, values), XD_OK);
        for (int k = 0; k < ROWS * COLUMNS; k++) CHECK_NEAR(values[k], k, 0);
    }
    CHECK_EQ_INT(xd_weights_read(model, xd_weights_find(model, "scalar"), NULL, &value), XD_OK);
    CHECK_NEAR(value, 42.0, 0);
    CHECK(xd_weights_find(model, "empty") >= 0);
    CHECK_EQ_STR(xd_weights_metadata(model, "format"), "pt");
    for (int i = 0; i < 2; i++) {
        const char *found = xd_weights_metadata(model, pairs[i].key);
        if (i < c->pairs)
            CHECK_EQ_STR(found ? found : "", pairs[i].value);
        else
            CHECK(found == NULL);
    }
    xd_weights_close(model);
    xd_ctx_destroy(ctx);
}

XD_TEST(a_sharded_model_is_saved_slab_by_slab_from_any_number_of_ranks) {
    static const size_t staging[] = { 0, 1, 50, 64 };
    gather_case c;
    char path[128];
    memset(&c, 0, sizeof c);
    strcpy(c.directory, "/tmp/xdistill-gather-XXXXXX");
    CHECK(mkdtemp(c.directory) != NULL);
    snprintf(path, sizeof path, "%s/model.safetensors", c.directory);
    for (int ranks = 1; ranks <= 6; ranks++) {
        c.staging_bytes = staging[ranks % 4];
        c.root = ranks / 2;
        c.pairs = ranks % 3;
        CHECK_EQ_INT(xd_run_threads(ranks, NULL, save, &c, NULL), XD_OK);
        check_saved(&c);
        CHECK(remove(path) == 0);
    }
    CHECK(rmdir(c.directory) == 0); /* nothing else was left there */
}

XD_TEST(when_root_cannot_write_every_rank_returns_an_error) {
    gather_case c;
    memset(&c, 0, sizeof c);
    c.bad_directory = true;
    c.root = 1;
    CHECK_EQ_INT(xd_run_threads(3, NULL, save, &c, NULL), XD_OK);
}

XD_TEST_MAIN()
