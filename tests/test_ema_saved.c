/* Averages of every format in checkpoints and exports: from any layout to any other, and on to the same bits. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp */

#include "checkpoint_files.h"
#include "checkpoint_scene.h"
#include "averages.h"

enum { STEPS = 4, MORE = 3, LISTED = 2 * SCENE_TENSORS };

/* What the ranks have of both averages, each element in its place of the whole. */
typedef struct averages {
    unsigned char shadow[SCENE_AVERAGES][SCENE_TENSORS][SCENE_MOST][8];
    uint16_t term[SCENE_TENSORS][SCENE_MOST];
} averages;

/* A weight that does not train, which some runs make a buffer in the list of the averages. */
enum { FROZEN = 7 };

static scene *allocate_scene(void) {
    return (scene *)malloc(sizeof(scene) + SCENE_TENSORS * sizeof(xd_param));
}

/* The averages of a scene become one that is compensated and one that is rounded at random. */
static void change_formats(scene *s, bool buffers) {
    xd_param *list = (xd_param *)(void *)(s + 1);
    memcpy(list, s->param, sizeof s->param);
    list[FROZEN].buffer = buffers;
    for (int k = 0; k < SCENE_AVERAGES; k++) {
        xd_ema_desc d = xd_ema_defaults(XD_EMA_CONSTANT);
        d.decay = 0.99;
        d.compensated = k == 0;
        d.stochastic_bf16 = k == 1;
        d.seed = 5;
        d.parts = s->part;
        d.average_buffers = buffers;
        xd_ema_destroy(s->ema[k]);
        s->ema[k] = NULL;
        CHECK_EQ_INT(average_create(s->ctx, buffers ? list : s->param, SCENE_TENSORS, &d, &s->ema[k]), XD_OK);
        s->averages[k].ema = s->ema[k];
    }
}

/* With other values of what does not train. */
static void step_all(scene *s, int step) {
    for (int64_t e = 0; e < s->param[FROZEN].count; e++)
        scene_store(s->value[FROZEN], scene_tensors[FROZEN].dtype, e, FROZEN, s->index[FROZEN][e], step);
    scene_step(s, step);
}

static scene *new_scene(xd_comm *world, int cut, int steps, bool buffers) {
    scene *s = allocate_scene();
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), cut);
    change_formats(s, buffers);
    for (int i = 1; i <= steps; i++) step_all(s, i);
    return s;
}

static void free_scene(scene *s) {
    scene_destroy(s);
    free(s);
}

static void collect(const scene *s, averages *to) {
    for (int i = 0; i < SCENE_TENSORS; i++)
        for (int k = 0; k < SCENE_AVERAGES; k++) {
            const xd_param shadow = xd_ema_view(s->ema[k], i).shadow,
                           term = xd_ema_view(s->ema[k], i).compensation;
            const size_t size = xd_dtype_size(shadow.dtype);
            CHECK((term.dtype == XD_DTYPE_BF16) == (k == 0 && !scene_tensors[i].buffer));
            for (int64_t e = 0; e < s->param[i].count; e++) {
                const int64_t at = s->index[i][e];
                memcpy(to->shadow[k][i][at], (const char *)shadow.value + (size_t)e * size, size);
                if (term.dtype) to->term[i][at] = ((const uint16_t *)term.value)[e];
            }
        }
}

/* The list of an export, in memory of rank 0. */
typedef struct list {
    xd_state_tensor tensors[LISTED];
    int64_t count, shape[LISTED][3];
    char names[LISTED][64];
    unsigned char data[LISTED][SCENE_MOST * 8];
} list;

static xd_result keep(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    list *l = (list *)user;
    const size_t size = xd_dtype_size(tensor->dtype);
    if (elements.begin == 0) {
        const int64_t n = l->count++;
        CHECK(n < LISTED);
        snprintf(l->names[n], sizeof l->names[n], "%s", tensor->name);
        for (int d = 0; d < tensor->ndim; d++) l->shape[n][d] = tensor->shape[d];
        l->tensors[n] = *tensor;
        l->tensors[n].group = "ema-slow";
        l->tensors[n].name = l->names[n];
        l->tensors[n].shape = l->shape[n];
        l->tensors[n].data = l->data[n];
    }
    memcpy(l->data[l->count - 1] + (size_t)elements.begin * size, data,
           (size_t)(elements.end - elements.begin) * size);
    return XD_OK;
}

typedef struct job {
    int cut;
    bool buffers; /* averaged ones */
    const char *root;
    list exported;
    xd_ema_record record;
    averages *found;
} job;

/* Saves a checkpoint of everything, and exports the compensated average. */
static xd_result save(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, j->cut, STEPS, j->buffers);
    const xd_checkpoint_save_desc desc = {
        .root = j->root, .step = STEPS, .networks = &s->network, .network_count = 1
    };
    xd_checkpoint_network one = s->network;
    xd_ema_record record;
    one.average_count = 1;
    const xd_state_gather_desc gather = { .networks = &one,
                                          .network_count = 1,
                                          .average = true,
                                          .record = &record,
                                          .staging_bytes = 64,
                                          .take = s->rank == 0 ? keep : NULL,
                                          .user = &j->exported };
    CHECK_EQ_INT(xd_checkpoint_save(world, &desc), XD_OK);
    CHECK_EQ_INT(xd_state_gather(world, &gather), XD_OK);
    CHECK_EQ_INT(xd_ema_swap(s->ema[0]), XD_ERROR_DTYPE); /* the weights are not all f32 */
    if (s->rank == 0) j->record = record;
    free_scene(s);
    return XD_OK;
}

/* Loads on another layout, with an average from the export where `import`, and trains on. */
static xd_result load(xd_comm *world, job *j, bool import) {
    scene *s = new_scene(world, j->cut, 1, j->buffers);
    const xd_checkpoint_load_desc desc = {
        .root = j->root, .step = STEPS, .networks = &s->network, .network_count = 1
    };
    xd_checkpoint_network one = s->network;
    xd_state_report report;
    CHECK_EQ_INT(xd_checkpoint_load(world, &desc, NULL, NULL), XD_OK);
    if (import) {
        one.average_count = 1;
        for (int i = 0; i < 2; i++)
            step_all(s, 50 + i); /* spoilt, then imported; the others are loaded again */
        CHECK_EQ_INT(xd_checkpoint_load(world, &desc, NULL, NULL), XD_OK);
        for (int i = 0; i < SCENE_TENSORS; i++) {
            const xd_param shadow = xd_ema_view(s->ema[0], i).shadow,
                           term = xd_ema_view(s->ema[0], i).compensation;
            for (int64_t e = 0; e < term.count; e++) {
                ((float *)shadow.value)[e] = 3.0f;
                ((uint16_t *)term.value)[e] = 0x1234;
            }
        }
        xd_state_scatter_desc scatter = { .networks = &one, .network_count = 1, .staging_bytes = 64 };
        if (s->rank == 0) scatter.tensors = j->exported.tensors;
        if (s->rank == 0) scatter.tensor_count = j->exported.count;
        scatter.average = true;
        if (s->rank == 0) scatter.record = &j->record;
        CHECK_EQ_INT(xd_state_scatter(world, &scatter, &report), XD_OK);
        CHECK_EQ_INT(report.loaded, SCENE_TENSORS + SCENE_TENSORS - 2);
        CHECK_EQ_INT(report.missing + report.unexpected + report.wrong_shape + report.wrong_type, 0);
    }
    for (int i = 1; i <= MORE; i++) step_all(s, STEPS + i);
    for (int r = 0; r < s->ranks; r++) { /* one after the other: they write the same memory */
        if (r == s->rank) collect(s, j->found);
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
    }
    free_scene(s);
    return XD_OK;
}

static xd_result load_saved(xd_comm *world, void *argument) {
    return load(world, (job *)argument, false);
}

static xd_result load_imported(xd_comm *world, void *argument) {
    return load(world, (job *)argument, true);
}

static xd_result train(xd_comm *world, void *argument) {
    const job *j = (const job *)argument;
    scene *s = new_scene(world, 0, STEPS + MORE, j->buffers);
    collect(s, j->found);
    free_scene(s);
    return XD_OK;
}

static xd_result run(int ranks, xd_rank_function function, void *argument) {
    const xd_ctx_desc desc = scene_ctx_desc();
    xd_error error;
    memset(&error, 0, sizeof error);
    const xd_result result = xd_run_threads(ranks, &desc, function, argument, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    return result;
}

XD_TEST(averages_of_every_format_are_saved_on_any_layout_and_go_on_to_the_same_bits_on_any_other) {
    static const int ranks[] = { 1, 2, 3, 8 };
    averages *expected = (averages *)calloc(1, sizeof *expected);
    averages *found = (averages *)calloc(1, sizeof *found);
    job *j = (job *)malloc(sizeof *j);
    long terms = 0;
    memset(j, 0, sizeof *j);
    j->found = expected;
    CHECK_EQ_INT(run(1, train, j), XD_OK);
    j->found = found;
    j->buffers = true; /* a buffer that is averaged has the bits of a weight */
    CHECK_EQ_INT(run(1, train, j), XD_OK);
    CHECK(memcmp(found, expected, sizeof *found) == 0);
    for (int i = 0; i < SCENE_MOST; i++) terms += expected->term[0][i] % 0x8000 != 0;
    CHECK(terms > 50);
    for (int i = 0; i < 8; i++) {
        memset(j, 0, sizeof *j);
        j->root = new_root();
        j->found = found;
        j->cut = i % SCENE_CUTS;
        j->buffers = i % 2 == 1;
        CHECK_EQ_INT(run(ranks[i % 4], save, j), XD_OK);
        CHECK_EQ_INT(j->exported.count, 2 * SCENE_TENSORS - 2);
        CHECK_EQ_STR(j->exported.names[1], "ema.compensation.embed.weight");
        CHECK(j->record.config.compensated);
        j->cut = (i + 2) % SCENE_CUTS;
        for (int k = 0; k < 2; k++) {
            memset(found, 0, sizeof *found);
            CHECK_EQ_INT(run(ranks[(i + i / 4 + 1) % 4], k ? load_imported : load_saved, j), XD_OK);
            CHECK(memcmp(found, expected, sizeof *found) == 0);
        }
        remove_all(j->root);
    }
    free(j);
    free(found);
    free(expected);
}

/* A checkpoint of a plain average has no compensation to load. */
static xd_result load_plain(xd_comm *world, void *argument) {
    const char *root = (const char *)argument;
    scene *s = allocate_scene();
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), 1);
    const xd_checkpoint_save_desc out = {
        .root = root, .step = 1, .networks = &s->network, .network_count = 1
    };
    CHECK_EQ_INT(xd_checkpoint_save(world, &out), XD_OK);
    change_formats(s, false);
    s->network.average_count = 1;
    const xd_checkpoint_load_desc in = {
        .root = root, .step = 1, .networks = &s->network, .network_count = 1
    };
    CHECK_EQ_INT(xd_checkpoint_load(world, &in, NULL, NULL), XD_ERROR_MISSING);
    CHECK(strstr(xd_last_error(s->ctx)->message, "ema.compensation.") != NULL);
    free_scene(s);
    return XD_OK;
}

XD_TEST(a_plain_average_is_no_compensated_one) {
    char root[64];
    snprintf(root, sizeof root, "%s", new_root());
    CHECK_EQ_INT(run(2, load_plain, root), XD_OK);
    remove_all(root);
}

XD_TEST_MAIN()
