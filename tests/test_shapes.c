/* ndim beside shape: entries from ndim on are 0, in every desc that has both. A shape without its ndim is no scalar. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "planned.h"
#include "xd_test.h"

typedef struct scene {
    xd_ctx *ctx;
    xd_comm *self;
    xd_mesh *mesh;
    xd_model *model;
    float data[400], full[400];
    int number; /* of a weight, for its name */
} scene;

typedef xd_result (*shaped)(scene *s, int ndim, const int64_t *shape);

static xd_result call_weight(scene *s, int ndim, const int64_t *shape) {
    char name[16];
    snprintf(name, sizeof name, "w%d", s->number++);
    xd_weight_desc d = { .name = name, .dtype = XD_DTYPE_F32, .ndim = ndim };
    memcpy(d.shape, shape, sizeof d.shape);
    return xd_weight_add(xd_model_root(s->model), &d, NULL);
}

static xd_result call_layout(scene *s, int ndim, const int64_t *shape) {
    xd_layout *layout = NULL;
    xd_layout_desc d = { .ndim = ndim, .topology = xd_mesh_topology(s->mesh) };
    memcpy(d.shape, shape, sizeof d.shape);
    const xd_result result = xd_layout_create(s->ctx, &d, &layout);
    CHECK((result == XD_OK) == (layout != NULL));
    xd_layout_destroy(layout);
    return result;
}

static xd_result call_fill(scene *s, int ndim, const int64_t *shape) {
    const xd_init zeros = { .kind = XD_INIT_ZERO };
    xd_tensor_part part = { .name = "part", .dtype = XD_DTYPE_F32, .ndim = ndim, .data = s->data };
    memcpy(part.shape, shape, sizeof part.shape);
    part.range.end = 1;
    for (int d = 0; d < ndim; d++) part.range.end *= shape[d];
    return xd_tensor_part_fill(s->ctx, &part, &zeros, NULL);
}

static xd_result call_crossing(scene *s, int ndim, const int64_t *shape) {
    xd_crossing *none = NULL;
    xd_planned planned;
    xd_crossing_desc d = { .kind = XD_CROSSING_COPY, .ndim = ndim, .dtype = XD_DTYPE_F32 };
    memcpy(d.shape, shape, sizeof d.shape);
    return PLANNED(s->ctx, xd_crossing_create(s->self, &d, &none), &planned);
}

static xd_result call_tensor(scene *s, int ndim, const int64_t *shape) {
    xd_layout *layout = NULL;
    xd_layout_desc d = { .ndim = 2, .shape = { 8, 50 }, .topology = xd_mesh_topology(s->mesh) };
    CHECK_EQ_INT(xd_layout_create(s->ctx, &d, &layout), XD_OK);
    xd_tensor tensor = xd_tensor_view(layout, 0, s->data, XD_DTYPE_F32);
    tensor.ndim = ndim;
    memcpy(tensor.shape, shape, sizeof tensor.shape);
    const xd_result result = xd_tensor_gather(s->self, &tensor, NULL, -1, s->full);
    xd_layout_destroy(layout);
    return result;
}

static void open_scene(scene *s) {
    const xd_ctx_desc quiet = { .log_level = XD_LOG_NONE };
    const xd_mesh_desc one = { .axes = { { "dp", 1 } } };
    memset(s, 0, sizeof *s);
    CHECK_EQ_INT(xd_ctx_create(&quiet, &s->ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(s->ctx, &s->self), XD_OK);
    CHECK_EQ_INT(xd_mesh_create(s->self, &one, &s->mesh), XD_OK);
    CHECK_EQ_INT(xd_model_create(s->ctx, NULL, &s->model), XD_OK);
}

static void close_scene(scene *s) {
    xd_model_destroy(s->model);
    xd_mesh_destroy(s->mesh);
    xd_comm_destroy(s->self);
    xd_ctx_destroy(s->ctx);
}

XD_TEST(a_shape_that_ndim_does_not_cover_is_refused_and_the_next_call_works) {
    static const shaped calls[] = { call_weight, call_layout, call_fill, call_crossing };
    static const int64_t shape[XD_DIMS_MAX] = { 8, 50 };
    char words[48];
    scene s;
    open_scene(&s);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int ndim = 0; ndim < 2; ndim++) {
            CHECK_EQ_INT(calls[i](&s, ndim, shape), XD_ERROR_ARGUMENT);
            snprintf(words, sizeof words, "shape[1] is 50 and ndim %d", ndim);
            CHECK(strstr(xd_last_error(s.ctx)->message, words) != NULL);
        }
        CHECK_EQ_INT(calls[i](&s, 2, shape), XD_OK);
    }
    close_scene(&s);
}

XD_TEST(a_weight_whose_ndim_counts_a_size_that_was_left_out_is_refused) {
    static const int64_t shape[XD_DIMS_MAX] = { 8, 50 };
    scene s;
    open_scene(&s);
    CHECK_EQ_INT(call_weight(&s, 3, shape), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(s.ctx)->message, "shape[2] is 0 and ndim 3") != NULL);
    CHECK_EQ_INT(call_weight(&s, 2, shape), XD_OK);
    CHECK_EQ_INT(xd_model_seal(s.model), XD_OK);
    close_scene(&s);
}

XD_TEST(activations_of_a_pipeline_and_views_of_tensors_have_shapes_of_their_ndim) {
    scene s;
    open_scene(&s);
    xd_pipeline *none = NULL;
    xd_planned planned;
    xd_pipeline_run_desc d = {
        .schedule = { .ranks = 2, .micro_batches = 2 }, .ndim = 1, .shape = { 8, 50 }, .dtype = XD_DTYPE_F32
    };
    CHECK_EQ_INT(PLANNED_FOR(s.ctx, 0, 2, xd_pipeline_create(s.self, &d, &none), &planned),
                 XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(s.ctx)->message, "shape[1] is 50 and ndim 1") != NULL);
    d.ndim = 2;
    CHECK_EQ_INT(PLANNED_FOR(s.ctx, 0, 2, xd_pipeline_create(s.self, &d, &none), &planned), XD_OK);
    const int64_t shape[XD_DIMS_MAX] = { 8, 50 }, longer[XD_DIMS_MAX] = { 8, 50, 3 };
    CHECK_EQ_INT(call_tensor(&s, 2, longer), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(s.ctx)->message, "shape[2] is 3 and ndim 2") != NULL);
    CHECK_EQ_INT(call_tensor(&s, 2, shape), XD_OK);
    close_scene(&s);
}

XD_TEST_MAIN()
