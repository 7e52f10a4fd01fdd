/* The whole state through rank 0: gathered from any layout and scattered to any other, to the bit. */

#include "checkpoint_scene.h"
#include "wrap_calls.h"

enum { STORE_MOST = 64, STORE_BYTES = SCENE_MOST * 8 };

/* A state in memory of rank 0. */
typedef struct store {
    xd_state_tensor list[STORE_MOST];
    int64_t count, pieces, most; /* the most bytes in a piece */
    int64_t fails_at;            /* the piece that is refused; 0: none */
    char group[STORE_MOST][32], name[STORE_MOST][64];
    int64_t shape[STORE_MOST][XD_DIMS_MAX];
    unsigned char data[STORE_MOST][STORE_BYTES];
} store;

static int64_t numel_of(const xd_state_tensor *t) {
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) numel *= t->shape[d];
    return numel;
}

static xd_state_tensor *add(store *s, const char *group, const char *name, xd_dtype dtype, int ndim,
                            const int64_t *shape) {
    xd_state_tensor *t = &s->list[s->count];
    snprintf(s->group[s->count], sizeof s->group[0], "%s", group);
    snprintf(s->name[s->count], sizeof s->name[0], "%s", name);
    for (int d = 0; d < ndim; d++) s->shape[s->count][d] = shape[d];
    t->group = s->group[s->count];
    t->name = s->name[s->count];
    t->dtype = dtype;
    t->ndim = ndim;
    t->shape = s->shape[s->count];
    t->data = s->data[s->count];
    s->count++;
    return t;
}

static xd_result keep(void *user, const xd_state_tensor *tensor, xd_interval elements, const void *data) {
    store *s = (store *)user;
    const size_t size = xd_dtype_size(tensor->dtype);
    const size_t bytes = (size_t)(elements.end - elements.begin) * size;
    if (++s->pieces == s->fails_at) return XD_ERROR_IO;
    if (elements.begin == 0)
        (void)add(s, tensor->group, tensor->name, tensor->dtype, tensor->ndim, tensor->shape);
    const xd_state_tensor *last = &s->list[s->count - 1];
    CHECK_EQ_STR(last->name, tensor->name);
    CHECK(tensor->data == NULL);
    CHECK(elements.begin <= elements.end && elements.end <= numel_of(last));
    if ((int64_t)bytes > s->most) s->most = (int64_t)bytes;
    memcpy(s->data[s->count - 1] + (size_t)elements.begin * size, data, bytes);
    return XD_OK;
}

static int64_t find(const store *s, const char *group, const char *name) {
    for (int64_t i = 0; i < s->count; i++)
        if (strcmp(s->group[i], group) == 0 && strcmp(s->name[i], name) == 0) return i;
    return -1;
}

/* Equal lists, in any order. */
static void compare_stores(const store *a, const store *b) {
    CHECK_EQ_INT(a->count, b->count);
    for (int64_t i = 0; i < a->count; i++) {
        const int64_t k = find(b, a->group[i], a->name[i]);
        CHECK(k >= 0);
        if (k < 0) continue;
        CHECK_EQ_INT(a->list[i].dtype, b->list[k].dtype);
        CHECK_EQ_INT(a->list[i].ndim, b->list[k].ndim);
        CHECK(memcmp(a->shape[i], b->shape[k], sizeof a->shape[i]) == 0);
        CHECK(memcmp(a->data[i], b->data[k], STORE_BYTES) == 0);
    }
}

typedef struct job {
    int cut, steps;
    size_t staging_bytes;
    store *store;
    scene_whole *whole;
    xd_ema_record records[SCENE_AVERAGES];
} job;

static bool says(xd_ctx *ctx, const char *words) {
    return strstr(xd_last_error(ctx)->message, words) != NULL;
}

static scene *new_scene(xd_comm *world, int cut, int steps) {
    scene *s = (scene *)malloc(sizeof *s);
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), cut);
    for (int i = 1; i <= steps; i++) scene_step(s, i);
    return s;
}

static void free_scene(scene *s) {
    scene_destroy(s);
    free(s);
}

static xd_state_gather_desc gather_desc(const scene *s, store *to, size_t staging_bytes) {
    xd_state_gather_desc d;
    memset(&d, 0, sizeof d);
    d.networks = &s->network;
    d.network_count = 1;
    d.staging_bytes = staging_bytes;
    d.take = s->rank == 0 ? keep : NULL;
    d.user = to;
    return d;
}

static xd_state_scatter_desc scatter_desc(const scene *s, const store *from, size_t staging_bytes) {
    xd_state_scatter_desc d;
    memset(&d, 0, sizeof d);
    d.networks = &s->network;
    d.network_count = 1;
    d.staging_bytes = staging_bytes;
    if (s->rank == 0) {
        d.tensors = from->list;
        d.tensor_count = from->count;
    }
    return d;
}

static xd_result gather_scene(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, j->cut, j->steps);
    const xd_state_gather_desc d = gather_desc(s, j->store, j->staging_bytes);
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_OK);
    if (s->rank == 0)
        for (int k = 0; k < SCENE_AVERAGES; k++) j->records[k] = xd_ema_describe(s->ema[k]).record;
    free_scene(s);
    return XD_OK;
}

/* Loads into a network with other values; the averages a second time, for their counters. */
static xd_result scatter_scene(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, j->cut, 1);
    xd_state_report report;
    const xd_state_scatter_desc d = scatter_desc(s, j->store, j->staging_bytes);
    scene_fill(s, 99);
    CHECK_EQ_INT(xd_state_scatter(world, &d, &report), XD_OK);
    CHECK_EQ_INT(report.loaded, 3 * SCENE_TENSORS + 6 * 3 + 2);
    CHECK_EQ_INT(report.missing + report.unexpected + report.wrong_shape + report.wrong_type, 0);
    CHECK_EQ_INT(report.converted + report.synthesised, 0);
    for (int k = 0; k < SCENE_AVERAGES; k++) {
        xd_checkpoint_network one = s->network;
        xd_state_scatter_desc e = d;
        one.averages = &s->averages[k];
        one.average_count = 1;
        e.networks = &one;
        e.lenient = true; /* the list has other groups */
        e.average = true;
        e.record = s->rank == 0 ? &j->records[k] : NULL;
        CHECK_EQ_INT(xd_state_scatter(world, &e, &report), XD_OK);
        CHECK_EQ_INT(report.loaded, SCENE_TENSORS);
        CHECK_EQ_INT(report.missing, 0);
    }
    for (int i = 1; i <= 2; i++) scene_step(s, j->steps + i);
    for (int r = 0; r < s->ranks; r++) { /* one after the other: they write the same memory */
        if (r == s->rank) scene_collect(s, j->whole);
        CHECK_EQ_INT(xd_barrier(world), XD_OK);
    }
    free_scene(s);
    return XD_OK;
}

static int run(int ranks, xd_rank_function function, void *argument) {
    xd_error error;
    memset(&error, 0, sizeof error);
    const int result = xd_run_threads(ranks, NULL, function, argument, &error);
    if (result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    return result;
}

XD_TEST(a_state_goes_from_any_layout_to_any_other) {
    static const int ranks[] = { 1, 2, 3, 8 };
    scene_whole *expected = (scene_whole *)malloc(sizeof *expected);
    scene_whole *found = (scene_whole *)malloc(sizeof *found);
    store *first = (store *)calloc(1, sizeof *first), *s = (store *)malloc(sizeof *s);
    scene_expected(7, expected);
    for (int i = 0; i < 16; i++) {
        job j;
        memset(&j, 0, sizeof j);
        memset(s, 0, sizeof *s);
        memset(found, 0, sizeof *found);
        j.cut = i % SCENE_CUTS;
        j.steps = 5;
        j.staging_bytes = i % 3 == 0 ? 0 : 64;
        j.store = s;
        j.whole = found;
        CHECK_EQ_INT(run(ranks[i / 4], gather_scene, &j), XD_OK);
        CHECK(s->most <= (j.staging_bytes ? 64 : 8 * SCENE_MOST));
        CHECK(j.staging_bytes == 0 || s->pieces > s->count);
        if (i == 0) *first = *s;
        compare_stores(first, s);
        j.cut = (i + 2) % SCENE_CUTS;
        CHECK_EQ_INT(run(ranks[i % 4], scatter_scene, &j), XD_OK);
        CHECK(memcmp(found->bytes, expected->bytes, sizeof found->bytes) == 0);
        CHECK(memcmp(found->steps, expected->steps, sizeof found->steps) == 0);
        CHECK(memcmp(found->iteration, expected->iteration, sizeof found->iteration) == 0);
        CHECK(memcmp(found->initialized, expected->initialized, sizeof found->initialized) == 0);
    }
    free(s);
    free(first);
    free(found);
    free(expected);
}

/* ---- one group ---- */

static xd_result export_average(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, 0, 5);
    xd_checkpoint_network one = s->network;
    xd_state_gather_desc d = gather_desc(s, j->store, 64);
    xd_ema_record record;
    memset(&record, 0, sizeof record);
    d.average = true;
    d.record = &record;
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_ERROR_ARGUMENT); /* two averages */
    CHECK(says(s->ctx, "2 averages"));
    one.averages = &s->averages[1];
    one.average_count = 1;
    d.networks = &one;
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_OK);
    CHECK_EQ_INT(record.iteration, 5);
    CHECK(record.initialized);
    /* An average filled without a record is initialized, and its iteration its own. */
    scene *fresh = new_scene(world, 3, 0);
    xd_state_report report;
    xd_state_scatter_desc e = scatter_desc(fresh, j->store, 0);
    one = fresh->network;
    one.averages = &fresh->averages[1];
    one.average_count = 1;
    e.networks = &one;
    e.average = true;
    CHECK_EQ_INT(xd_state_scatter(world, &e, &report), XD_OK);
    CHECK_EQ_INT(report.loaded, SCENE_TENSORS);
    CHECK_EQ_INT(xd_ema_describe(fresh->ema[1]).record.iteration,
                 xd_ema_describe(s->ema[1]).record.iteration - 5);
    CHECK(xd_ema_describe(fresh->ema[1]).record.initialized);
    record.format_version = 2;
    e.record = &record;
    CHECK(xd_state_scatter(world, &e, NULL) == (s->rank == 0 ? XD_ERROR_FORMAT : XD_ERROR_PEER));
    free_scene(fresh);
    free_scene(s);
    return XD_OK;
}

XD_TEST(one_average_is_exported_and_imported) {
    store *s = (store *)calloc(1, sizeof *s);
    job j;
    memset(&j, 0, sizeof j);
    j.store = s;
    CHECK_EQ_INT(run(3, export_average, &j), XD_OK);
    CHECK_EQ_INT(s->count, SCENE_TENSORS);
    for (int64_t i = 0; i < s->count; i++) CHECK_EQ_STR(s->group[i], "ema-fast_2");
    free(s);
}

/* Hash of moments and shadows: what a scatter of weights alone leaves. */
static uint64_t hash_of_the_rest(const scene *s) {
    uint64_t hash = 0;
    for (int i = 0; i < SCENE_TENSORS; i++) {
        const xd_optimizer_state state = xd_optimizer_state_at(s->optimizer, i);
        const size_t count = (size_t)s->param[i].count;
        const xd_param shadow = xd_ema_view(s->ema[0], i).shadow;
        if (state.exp_avg) hash = xd_hash(hash, state.exp_avg, count * sizeof(float));
        hash = xd_hash(hash, state.step, sizeof *state.step);
        hash = xd_hash(hash, shadow.value, count * xd_dtype_size(shadow.dtype));
    }
    return hash;
}

static xd_result scatter_group(xd_comm *world, void *argument) {
    const store *from = ((job *)argument)->store;
    scene *s = new_scene(world, 1, 1);
    xd_state_report report;
    xd_state_scatter_desc d = scatter_desc(s, from, 0);
    scene_fill(s, 99);
    const uint64_t before = hash_of_the_rest(s);
    d.group = "optim-other";
    CHECK_EQ_INT(xd_state_scatter(world, &d, NULL), XD_ERROR_MISSING);
    CHECK(says(s->ctx, "\"optim-other\""));
    d.group = s->rank == 1 ? NULL : "model";
    CHECK_EQ_INT(xd_state_scatter(world, &d, NULL), XD_ERROR_MISMATCH);
    d.group = "model";
    CHECK_EQ_INT(xd_state_scatter(world, &d, NULL), XD_ERROR_UNEXPECTED); /* the list has all groups */
    d.lenient = true;
    CHECK_EQ_INT(xd_state_scatter(world, &d, &report), XD_OK);
    CHECK_EQ_INT(report.loaded, SCENE_TENSORS);
    CHECK_EQ_INT(report.missing, 0);
    for (int i = 0; i < SCENE_TENSORS; i++) {
        const int64_t at = find(from, "model", scene_tensors[i].name);
        for (int64_t k = 0; k < s->param[i].count; k++)
            CHECK(xd_load_f64(s->value[i], s->param[i].dtype, k) ==
                  xd_load_f64(from->data[at], from->list[at].dtype, s->index[i][k]));
    }
    CHECK(hash_of_the_rest(s) == before);
    free_scene(s);
    return XD_OK;
}

XD_TEST(a_scatter_of_one_group_leaves_the_others) {
    store *s = (store *)calloc(1, sizeof *s);
    job j;
    memset(&j, 0, sizeof j);
    j.store = s;
    j.steps = 5;
    CHECK_EQ_INT(run(2, gather_scene, &j), XD_OK);
    CHECK_EQ_INT(run(3, scatter_group, &j), XD_OK);
    free(s);
}

/* ---- what is wrong ---- */

static xd_result gather_wrong(xd_comm *world, void *argument) {
    job *j = (job *)argument;
    scene *s = new_scene(world, 2, 2);
    xd_state_gather_desc d = gather_desc(s, j->store, 64);
    const bool root = s->rank == 0;
    xd_tensor_part *matrix = &s->part[1];
    const xd_tensor_part before = *matrix;
    d.group = "optim-other";
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_ERROR_MISSING);
    CHECK(says(s->ctx, "\"optim-other\""));
    d.group = NULL;
    /* the rank that speaks for its elements is silent */
    if (s->rank == 1) matrix->replica = true;
    CHECK(xd_state_gather(world, &d) != XD_OK);
    CHECK(says(s->ctx, "\"layer.0.weight\": no rank holds element"));
    *matrix = before;
    /* everybody has all of a tensor and says so */
    xd_tensor_part *copies = &s->part[2];
    const bool replica = copies->replica;
    copies->replica = false;
    CHECK(xd_state_gather(world, &d) != XD_OK);
    CHECK(says(s->ctx, "not as a replica"));
    copies->replica = replica;
    /* another list */
    if (s->rank == 2) matrix->name = "layer.1.weight";
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_ERROR_MISMATCH);
    CHECK(says(s->ctx, "\"layer.0.weight\" on rank 0, \"layer.1.weight\" on rank 2"));
    *matrix = before;
    d.network_count = -1;
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_ERROR_ARGUMENT);
    d.network_count = 1;
    d.staging_bytes += (size_t)s->rank * 64;
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_ERROR_MISMATCH);
    d.staging_bytes = 64;
    if (root) d.take = NULL;
    CHECK_EQ_INT(xd_state_gather(world, &d), root ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK_EQ_INT(j->store->pieces, 0);
    CHECK_EQ_INT(xd_barrier(world), XD_OK);
    /* the caller refuses a piece in the middle */
    if (root) d.take = keep;
    if (root) j->store->fails_at = 9;
    CHECK_EQ_INT(xd_state_gather(world, &d), root ? XD_ERROR_IO : XD_ERROR_PEER);
    CHECK(says(s->ctx, "were refused"));
    if (root) memset(j->store, 0, sizeof *j->store);
    CHECK_EQ_INT(xd_state_gather(world, &d), XD_OK);
    free_scene(s);
    return XD_OK;
}

XD_TEST(a_gather_that_cannot_be_is_refused_by_all_ranks) {
    store *s = (store *)calloc(1, sizeof *s);
    job j;
    memset(&j, 0, sizeof j);
    j.store = s;
    CHECK_EQ_INT(run(3, gather_wrong, &j), XD_OK);
    CHECK_EQ_INT(s->count, 3 * SCENE_TENSORS + 6 * 3 + 2);
    free(s);
}

/* The bytes of everything this rank has, by which a refused scatter is seen to have changed nothing. */
static uint64_t fingerprint(const scene *s) {
    uint64_t hash = hash_of_the_rest(s);
    for (int i = 0; i < SCENE_TENSORS; i++)
        hash = xd_hash(hash, s->value[i], (size_t)s->param[i].count * xd_dtype_size(s->param[i].dtype));
    return hash;
}

typedef struct refusal {
    xd_state_tensor list[STORE_MOST];
    int64_t count;
} refusal;

static xd_result scatter_list(xd_comm *world, const scene *s, const refusal *r, bool lenient, bool convert,
                              xd_state_report *report) {
    xd_state_scatter_desc d;
    memset(&d, 0, sizeof d);
    d.networks = &s->network;
    d.network_count = 1;
    d.lenient = lenient;
    d.convert = convert;
    d.tensors = s->rank == 0 ? r->list : NULL;
    d.tensor_count = s->rank == 0 ? r->count : 0;
    return xd_state_scatter(world, &d, report);
}

static xd_result scatter_wrong(xd_comm *world, void *argument) {
    const store *from = ((job *)argument)->store;
    scene *s = new_scene(world, 1, 1);
    refusal *r = (refusal *)malloc(sizeof *r);
    static const int64_t other[] = { 12, 8 };
    const uint64_t before = fingerprint(s);
    const bool root = s->rank == 0;
    xd_state_report report;
    memcpy(r->list, from->list, sizeof r->list);
    r->count = from->count;
    const int64_t embed = find(from, "model", "embed.weight"), bias = find(from, "model", "layer.0.bias");
    const int64_t moment = find(from, "optim", "optim.exp_avg.embed.weight");
    /* missing */
    r->list[bias].name = "layer.0.bais";
    CHECK_EQ_INT(scatter_list(world, s, r, false, false, &report), XD_ERROR_MISSING);
    CHECK_EQ_INT(report.missing, 1);
    CHECK_EQ_INT(report.unexpected, 1);
    CHECK_EQ_STR(report.names, "layer.0.bias, layer.0.bais");
    r->list[bias] = from->list[bias];
    /* part of a state is none */
    r->list[moment].name = "optim.exp_avg.gone";
    CHECK_EQ_INT(scatter_list(world, s, r, false, false, &report), XD_ERROR_MISSING);
    CHECK_EQ_INT(report.synthesised, 0);
    r->list[moment] = from->list[moment];
    /* unexpected */
    r->list[r->count] = from->list[embed];
    r->list[r->count++].name = "extra";
    CHECK_EQ_INT(scatter_list(world, s, r, false, false, &report), XD_ERROR_UNEXPECTED);
    CHECK(says(s->ctx, "1 tensors more: extra"));
    /* twice */
    r->list[r->count - 1].name = "embed.weight";
    CHECK_EQ_INT(scatter_list(world, s, r, true, true, &report), root ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(says(s->ctx, "two tensors of model are named \"embed.weight\""));
    r->count--;
    /* shape, type, data, steps */
    r->list[embed].shape = other;
    CHECK_EQ_INT(scatter_list(world, s, r, false, true, &report), XD_ERROR_SHAPE);
    CHECK_EQ_STR(report.names, "embed.weight");
    r->list[embed] = from->list[embed];
    r->list[embed].dtype = XD_DTYPE_BF16;
    CHECK_EQ_INT(scatter_list(world, s, r, true, false, &report), XD_ERROR_DTYPE);
    CHECK(says(s->ctx, "embed.weight"));
    r->list[embed] = from->list[embed];
    r->list[embed].data = NULL;
    CHECK_EQ_INT(scatter_list(world, s, r, false, false, &report), root ? XD_ERROR_STATE : XD_ERROR_PEER);
    CHECK(says(s->ctx, "104 elements at NULL"));
    r->list[embed] = from->list[embed];
    const float half = 0.5f;
    const int64_t step = find(from, "optim", "optim.step.embed.weight");
    r->list[step].dtype = XD_DTYPE_F32;
    r->list[step].data = &half;
    CHECK_EQ_INT(scatter_list(world, s, r, false, true, &report), root ? XD_ERROR_DATA : XD_ERROR_PEER);
    r->list[step] = from->list[step];
    CHECK_EQ_INT(scatter_list(world, s, r, s->rank == 1, false, &report), XD_ERROR_MISMATCH);
    CHECK(fingerprint(s) == before);
    r->list[embed].ndim = XD_DIMS_MAX + 1;
    CHECK_EQ_INT(scatter_list(world, s, r, true, true, &report), root ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    r->list[embed] = from->list[embed];
    r->count = -1;
    CHECK_EQ_INT(scatter_list(world, s, r, true, true, &report), root ? XD_ERROR_ARGUMENT : XD_ERROR_PEER);
    CHECK(says(s->ctx, "-1 tensors"));
    r->count = from->count;
    CHECK(fingerprint(s) == before);
    /* lenient: what fits is taken */
    r->list[bias].name = "layer.0.bais";
    r->list[embed].shape = other;
    CHECK_EQ_INT(scatter_list(world, s, r, true, false, &report), XD_OK);
    CHECK_EQ_INT(report.missing, 1);
    CHECK_EQ_INT(report.unexpected, 1);
    CHECK_EQ_INT(report.wrong_shape, 1);
    CHECK_EQ_STR(report.names, "embed.weight, layer.0.bias, layer.0.bais");
    CHECK_EQ_INT(report.loaded, from->count - 2);
    CHECK(fingerprint(s) != before);
    free(r);
    free_scene(s);
    return XD_OK;
}

XD_TEST(a_list_that_does_not_fit_changes_nothing) {
    store *s = (store *)calloc(1, sizeof *s);
    job j;
    memset(&j, 0, sizeof j);
    j.store = s;
    j.steps = 5;
    CHECK_EQ_INT(run(2, gather_scene, &j), XD_OK);
    CHECK_EQ_INT(run(3, scatter_wrong, &j), XD_OK);
    free(s);
}

/* ---- states that nobody has formed, and other types ---- */

static xd_result scatter_weights(xd_comm *world, void *argument) {
    const store *from = ((job *)argument)->store;
    scene *s = new_scene(world, 2, 3);
    refusal *r = (refusal *)malloc(sizeof *r);
    xd_state_report report;
    float narrow[SCENE_MOST], steps = 3.0f;
    uint16_t wide[SCENE_MOST];
    const int64_t embed = find(from, "model", "embed.weight");
    r->count = 0;
    for (int64_t i = 0; i < from->count; i++) {
        const bool other = strcmp(from->group[i], "optim") == 0 && !strstr(from->name[i], ".half.weight");
        if (!other && !strstr(from->name[i], "optim.master")) r->list[r->count++] = from->list[i];
        if (strcmp(from->name[i], "optim.step.half.weight") == 0) {
            r->list[r->count - 1].dtype = XD_DTYPE_F32;
            r->list[r->count - 1].data = &steps;
        }
    }
    memcpy(narrow, from->data[embed], 104 * sizeof(float));
    for (int i = 0; i < 104; i++) xd_store_f64(wide, XD_DTYPE_BF16, i, narrow[i]);
    r->list[embed].dtype = XD_DTYPE_BF16;
    r->list[embed].data = wide;
    CHECK_EQ_INT(scatter_list(world, s, r, false, true, &report), XD_OK);
    CHECK_EQ_INT(report.converted, 2);
    CHECK_EQ_STR(report.converted_names, "embed.weight, optim.step.half.weight");
    CHECK_EQ_INT(report.missing, 0);
    /* five parameters without a state, one of them with a master, and the master of the sixth */
    CHECK_EQ_INT(report.synthesised, 5 * 3 + 1 + 1);
    for (int64_t k = 0; k < s->param[0].count; k++)
        CHECK(((float *)s->value[0])[k] == (float)xd_load_f64(wide, XD_DTYPE_BF16, s->index[0][k]));
    for (int i = 0; i < SCENE_TENSORS; i++) {
        const xd_optimizer_state state = xd_optimizer_state_at(s->optimizer, i);
        const bool formed = strcmp(scene_tensors[i].name, "half.weight") == 0;
        if (!state.exp_avg) continue;
        CHECK_EQ_INT(*state.step, formed ? 3 : 0);
        for (int64_t k = 0; k < s->param[i].count; k++) {
            if (!formed) CHECK(state.exp_avg[k] == 0.0f && state.exp_avg_sq[k] == 0.0f);
            if (state.master)
                CHECK(state.master[k] == (float)xd_load_f64(s->value[i], scene_tensors[i].dtype, k));
        }
    }
    free(r);
    free_scene(s);
    return XD_OK;
}

XD_TEST(states_that_are_not_in_the_list_begin_anew) {
    store *s = (store *)calloc(1, sizeof *s);
    job j;
    memset(&j, 0, sizeof j);
    j.store = s;
    j.steps = 5;
    CHECK_EQ_INT(run(3, gather_scene, &j), XD_OK);
    CHECK_EQ_INT(run(3, scatter_weights, &j), XD_OK);
    free(s);
}

/* ---- wrapped models ---- */

typedef struct wrapped {
    int kind; /* 0: DDP, 1: DDP with a sharded optimizer, 2: FSDP, 3: HSDP of two groups */
    const store *from;
    store *to;
} wrapped;

static xd_result through_wrapper(xd_comm *world, void *argument) {
    static const int64_t shapes[3][2] = { { 5, 3 }, { 7, 11 }, { 2, 1 } };
    static const char *const names[3] = { "a", "b.weight", "c" };
    const wrapped *w = (const wrapped *)argument;
    const int rank = xd_comm_rank(world), half = (xd_comm_size(world) + 1) / 2;
    xd_model *model = NULL;
    xd_parallel *parallel = NULL;
    xd_optimizer *adamw = NULL;
    xd_comm *group = NULL, *replicas = NULL;
    xd_param params[3];
    xd_tensor_part parts[3];
    int64_t count = 0;
    xd_ctx *ctx = xd_comm_ctx(world);
    XD_TRY(xd_model_create(ctx, NULL, &model));
    for (int i = 0; i < 3; i++) {
        xd_weight_desc d;
        memset(&d, 0, sizeof d);
        d.name = names[i];
        d.dtype = XD_DTYPE_F32;
        d.ndim = 2;
        memcpy(d.shape, shapes[i], sizeof shapes[i]);
        if (i == 1) d.stored_rows = shapes[i][0] + w->kind; /* padding, which is in no state */
        XD_TRY(xd_weight_add(xd_model_root(model), &d, NULL));
    }
    XD_TRY(xd_model_seal(model));
    xd_ddp_desc ddp;
    xd_fsdp_desc fsdp;
    memset(&ddp, 0, sizeof ddp);
    memset(&fsdp, 0, sizeof fsdp);
    ddp.sharded_optimizer = w->kind == 1;
    if (w->kind == 3) {
        XD_TRY(xd_comm_split(world, rank / half, rank, &group));
        XD_TRY(xd_comm_split(world, rank % half, rank, &replicas));
        fsdp.replicas = replicas;
    }
    if (w->kind < 2)
        XD_TRY(wrap_over_ddp(model, world, &ddp, &parallel));
    else
        XD_TRY(wrap_over_fsdp(model, group ? group : world, &fsdp, &parallel));
    XD_TRY(xd_parallel_params(parallel, 3, params, &count));
    XD_TRY(xd_parallel_parts(parallel, 3, parts, &count));
    xd_optimizer_desc o = xd_adamw_defaults(params, count);
    XD_TRY(xd_optimizer_create(ctx, &o, &adamw));
    xd_checkpoint_network network;
    xd_state_scatter_desc in;
    xd_state_gather_desc out;
    memset(&network, 0, sizeof network);
    memset(&in, 0, sizeof in);
    memset(&out, 0, sizeof out);
    network.parts = parts;
    network.part_count = count;
    network.optimizer = adamw;
    in.networks = out.networks = &network;
    in.network_count = out.network_count = 1;
    in.tensors = w->from->list;
    in.tensor_count = w->from->count;
    out.take = keep;
    out.user = w->to;
    out.staging_bytes = 64;
    XD_TRY(xd_state_scatter(world, &in, NULL));
    XD_TRY(xd_parallel_publish(parallel));
    XD_TRY(xd_state_gather(world, &out));
    xd_optimizer_destroy(adamw);
    xd_parallel_destroy(parallel);
    xd_comm_destroy(replicas);
    xd_comm_destroy(group);
    xd_model_destroy(model);
    return XD_OK;
}

XD_TEST(wrappers_hand_the_same_state_on) {
    static const int64_t shapes[3][2] = { { 5, 3 }, { 7, 11 }, { 2, 1 } };
    static const char *const names[3] = { "a", "b.weight", "c" }, *const kinds[] = { "exp_avg",
                                                                                     "exp_avg_sq" };
    static const int sizes[][2] = { { 0, 2 }, { 2, 3 }, { 3, 4 }, { 1, 3 }, { 2, 8 }, { 0, 1 } };
    store *first = (store *)calloc(1, sizeof *first), *now = (store *)malloc(sizeof *now),
          *next = (store *)malloc(sizeof *next);
    char name[64];
    for (int i = 0; i < 3; i++) {
        (void)add(first, "model", names[i], XD_DTYPE_F32, 2, shapes[i]);
        for (int k = 0; k < 2; k++) {
            snprintf(name, sizeof name, "optim.%s.%s", kinds[k], names[i]);
            (void)add(first, "optim", name, XD_DTYPE_F32, 2, shapes[i]);
        }
        snprintf(name, sizeof name, "optim.step.%s", names[i]);
        (void)add(first, "optim", name, XD_DTYPE_I64, 0, shapes[i]);
        const int64_t steps = 10 + i;
        memcpy(first->data[first->count - 1], &steps, sizeof steps);
        for (int64_t t = first->count - 4; t < first->count - 1; t++)
            for (int64_t e = 0; e < shapes[i][0] * shapes[i][1]; e++)
                ((float *)(void *)first->data[t])[e] = (float)(1000 * t + e) / 7.0f;
    }
    *now = *first;
    for (int64_t i = 0; i < now->count; i++) now->list[i] = first->list[i];
    for (int i = 0; i < 6; i++) {
        wrapped w = { sizes[i][0], now, next };
        memset(next, 0, sizeof *next);
        CHECK_EQ_INT(run(sizes[i][1], through_wrapper, &w), XD_OK);
        compare_stores(first, next);
        store *swap = now;
        now = next;
        next = swap;
    }
    free(next);
    free(now);
    free(first);
}

XD_TEST_MAIN()
