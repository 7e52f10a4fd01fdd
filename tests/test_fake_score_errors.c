/* Fake scores made of parts: what is missing, unexpected, computed and begun anew; what is refused on all ranks alike; memory and
 * bytes between ranks. */
#include "fake_scene.h"
#include "xd_test_topology.h"

/* ---- a teacher whose rows are cut over all ranks, or over some ---- */

typedef struct scene {
    xd_comm *world;
    xd_ctx *ctx;
    int rank, ranks;
    int64_t rows, columns;
    xd_topology topology;
    xd_layout *cut;
    xd_model *teacher;
    xd_fake_score_meta_desc desc;
    xd_fake_score_report report;
    xd_built *built;
} scene;

enum { SCENE_WEIGHTS = 4 };
static const char *const scene_names[SCENE_WEIGHTS] = { "w0", "w1", "w2", "w3" };

/* w0 .. w3 of [rows, columns], each cut by rows. */
static xd_model *scene_model(const scene *s, const xd_layout *cut, bool values) {
    xd_model *model = NULL;
    CHECK(xd_model_create(s->ctx, &(xd_model_desc){ .seed = 3, .rank = s->rank }, &model) == XD_OK);
    for (int i = 0; i < SCENE_WEIGHTS; i++) {
        const xd_weight_desc d = { .name = scene_names[i],
                                   .dtype = XD_DTYPE_F32,
                                   .ndim = 2,
                                   .shape = { s->rows, s->columns },
                                   .layout = cut };
        CHECK(xd_weight_add(xd_model_root(model), &d, NULL) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    if (!values) return model;
    CHECK(xd_model_allocate(model) == XD_OK);
    for (int i = 0; i < SCENE_WEIGHTS; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(model, i));
        const int64_t first = info.count ? info.region->interval[0][0].begin * s->columns : 0;
        for (int64_t k = 0; k < info.count; k++) ((float *)info.value)[k] = fake_number(info.name, first + k);
        CHECK(xd_weight_set_ready(xd_model_weight_at(model, i)) == XD_OK);
    }
    return model;
}

static xd_layout *scene_layout(const scene *s, const xd_topology *topology, int dim) {
    xd_layout_desc d = { .ndim = 2, .shape = { s->rows, s->columns }, .topology = topology };
    xd_layout *out = NULL;
    d.placement[0] = (xd_placement){ XD_SHARD, .dim = dim };
    CHECK(xd_layout_create(s->ctx, &d, &out) == XD_OK);
    return out;
}

static void scene_open(scene *s, xd_comm *world, int64_t rows, int64_t columns) {
    memset(s, 0, sizeof *s);
    s->world = world;
    s->ctx = xd_comm_ctx(world);
    s->rank = xd_comm_rank(world);
    s->ranks = xd_comm_size(world);
    s->rows = rows;
    s->columns = columns;
    s->topology = line_of("tp", s->ranks);
    s->cut = scene_layout(s, &s->topology, 0);
    s->teacher = scene_model(s, s->cut, true);
    s->desc.teacher = s->teacher;
}

static void scene_drop(scene *s) {
    xd_built_destroy(s->built);
    s->built = NULL;
}

static void scene_close(scene *s) {
    scene_drop(s);
    xd_model_destroy(s->teacher);
    xd_layout_destroy(s->cut);
}

static xd_result scene_make(scene *s) {
    s->desc.report = &s->report;
    return xd_fake_score_create_meta(s->world, &s->desc, &s->built);
}

static xd_weight_info scene_info(const scene *s, const char *name) {
    return xd_weight_describe(xd_model_find_weight(xd_built_stage(s->built, 0).model, name));
}

/* Elements of a weight that are not the teacher's; cut along dimension `dim`. */
static int64_t scene_wrong(const scene *s, const char *name) {
    const xd_weight_info info = scene_info(s, name);
    int64_t wrong = 0, i = 0;
    const xd_region *r = info.region;
    if (info.count == 0) return 0;
    for (int64_t a = r->interval[0][0].begin; a < r->interval[0][0].end; a++)
        for (int64_t b = r->interval[1][0].begin; b < r->interval[1][0].end; b++, i++)
            wrong += ((const float *)info.value)[i] != fake_number(name, a * s->columns + b);
    CHECK_EQ_INT(i, info.count);
    return wrong;
}

/* Every rank fails with this code alone and this text, has nothing, and the next call succeeds. */
static void scene_fails(scene *s, xd_result want, const char *text) {
    const xd_result result = scene_make(s);
    CHECK_EQ_INT(result, want);
    CHECK(fake_says(s->ctx, result, want, text));
    CHECK(!s->built);
    scene_drop(s);
}

/* Some ranks fail with this code, the others with PEER. */
static void scene_fails_somewhere(scene *s, xd_result want, const char *text) {
    CHECK(fake_says(s->ctx, scene_make(s), want, text));
    CHECK(!s->built);
    scene_drop(s);
}

/* ---- copies where everything is already ---- */

static xd_result send_nothing(xd_comm *world, void *argument) {
    uint64_t sent[2];
    (void)argument;
    for (int i = 0; i < 2; i++) {
        scene s;
        scene_open(&s, world, 8, i ? 1024 : 4);
        const uint64_t before = xd_comm_traffic(world).bytes_sent;
        CHECK(scene_make(&s) == XD_OK);
        sent[i] = xd_comm_traffic(world).bytes_sent - before;
        CHECK_EQ_INT(s.report.loaded, SCENE_WEIGHTS);
        CHECK_EQ_INT(s.report.local, SCENE_WEIGHTS);
        for (int k = 0; k < SCENE_WEIGHTS; k++) CHECK_EQ_INT(scene_wrong(&s, scene_names[k]), 0);
        scene_close(&s);
    }
    CHECK_EQ_INT(sent[1], sent[0]); /* metadata has no columns: no element was sent */
    return XD_OK;
}

XD_TEST(the_same_cut_is_a_local_copy_that_sends_no_element) {
    fake_ranks(4, send_nothing, NULL);
}

/* ---- memory ---- */

typedef struct budget {
    int64_t staging; /* bytes */
    bool across;     /* rows become columns */
    xd_fake_score_from from;
    int64_t reads;
} budget;

static xd_result to_columns(void *user, const char *name, xd_weight_desc *weight) {
    (void)name;
    weight->layout = (const xd_layout *)user;
    return XD_OK;
}

static xd_result read_number(void *user, const xd_weights_entry *entry, xd_interval elements, void *to) {
    ++*(int64_t *)user;
    for (int64_t i = elements.begin; i < elements.end; i++)
        ((float *)to)[i - elements.begin] = fake_number(entry->name, i);
    return XD_OK;
}

enum { WIDE_ROWS = 256, WIDE_COLUMNS = 512 };

static xd_result measure(xd_comm *world, void *argument) {
    const budget *b = (const budget *)argument;
    const int64_t shape[2] = { WIDE_ROWS, WIDE_COLUMNS };
    const int64_t tensor = WIDE_ROWS * WIDE_COLUMNS * 4, shard = SCENE_WEIGHTS * tensor / 4;
    xd_weights_entry entries[SCENE_WEIGHTS];
    int64_t reads = 0;
    scene s;
    scene_open(&s, world, WIDE_ROWS, WIDE_COLUMNS);
    xd_layout *columns = scene_layout(&s, &s.topology, 1);
    if (b->across) s.desc.fake = (xd_fake_score_desc){ .adapt = to_columns, .user = columns };
    s.desc.staging_bytes = (size_t)b->staging;
    s.desc.source.from = b->from;
    for (int i = 0; i < SCENE_WEIGHTS; i++)
        entries[i] = (xd_weights_entry){ scene_names[i], XD_DTYPE_F32, 2, shape };
    s.desc.source.reader = (xd_fake_score_reader){ entries, SCENE_WEIGHTS, read_number, &reads };
    const int64_t before = fake_bytes;
    fake_most = before;
    CHECK(scene_make(&s) == XD_OK);
    /* values and gradients of the shard, one tensor or less, and metadata: 17 KiB for each rank, and lists */
    const int64_t staging = b->staging && b->staging < tensor ? b->staging : tensor,
                  most = fake_most - before;
    CHECK(most <= 2 * shard + staging + (44 << 10) + 4 * (17 << 10));
    CHECK(most >= 2 * shard);
    CHECK(b->from != XD_FAKE_SCORE_FROM_READER || reads > 0);
    for (int k = 0; k < SCENE_WEIGHTS; k++) CHECK_EQ_INT(scene_wrong(&s, scene_names[k]), 0);
    scene_drop(&s);
    CHECK(fake_bytes - before < 4096);
    scene_close(&s);
    xd_layout_destroy(columns);
    return XD_OK;
}

XD_TEST(a_rank_takes_its_shard_and_at_most_one_tensor) {
    static const budget budgets[] = { { 0, false, XD_FAKE_SCORE_FROM_TEACHER, 0 },
                                      { 0, true, XD_FAKE_SCORE_FROM_TEACHER, 0 },
                                      { 4096, true, XD_FAKE_SCORE_FROM_TEACHER, 0 },
                                      { 65536, true, XD_FAKE_SCORE_FROM_READER, 0 },
                                      { 0, false, XD_FAKE_SCORE_FROM_READER, 0 } };
    for (size_t i = 0; i < sizeof budgets / sizeof budgets[0]; i++) {
        budget b = budgets[i];
        fake_ranks(4, measure, &b);
    }
}

/* ---- other descriptions than the teacher's ---- */

typedef struct changes {
    const xd_layout *cut;
    const xd_model *teacher;
    const char *add;        /* a weight more; NULL: none */
    const char *tie;        /* another name of w0; NULL: none */
    bool drop;              /* without w3 */
    bool buffer, transient; /* the added one is */
    int64_t rows;           /* of w2; 0: as it is */
    int64_t rank_adds;      /* the rank that adds alone; -1: all */
    int rank;
    xd_dtype dtype; /* of w1; NONE: F32 */
} changes;

static xd_result describe_changed(void *user, xd_ctx *ctx, const xd_stage_place *place, xd_model **out) {
    const changes *c = (const changes *)user;
    xd_model *model = NULL;
    (void)place;
    XD_TRY(xd_model_create(ctx, &(xd_model_desc){ .seed = 3, .rank = c->rank }, &model));
    for (int i = 0; i < SCENE_WEIGHTS - c->drop; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(c->teacher, i));
        xd_weight_desc d = { .name = info.name,
                             .dtype = XD_DTYPE_F32,
                             .ndim = 2,
                             .layout = c->cut,
                             .shape = { info.desc->shape[0], info.desc->shape[1] } };
        d.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 1.0f };
        if (i == 1 && c->dtype != XD_DTYPE_NONE)
            d.dtype = c->dtype, d.traits.frozen = true, d.init = (xd_init){ 0 };
        if (i == 2 && c->rows) d.shape[0] = c->rows, d.layout = NULL;
        XD_TRY(xd_weight_add(xd_model_root(model), &d, NULL));
    }
    xd_weight_desc d = { .name = c->add, .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 3 } };
    d.buffer = c->buffer;
    d.transient = c->transient;
    d.init = (xd_init){ XD_INIT_NORMAL, 0.0f, 1.0f };
    if (c->add && (c->rank_adds < 0 || c->rank_adds == c->rank))
        XD_TRY(xd_weight_add(xd_model_root(model), &d, NULL));
    const xd_weight_info first = xd_weight_describe(xd_model_weight_at(c->teacher, 0));
    xd_weight_desc t = { .name = c->tie,
                         .dtype = XD_DTYPE_F32,
                         .ndim = 2,
                         .tied_to = "w0",
                         .shape = { first.desc->shape[0], first.desc->shape[1] } };
    if (c->tie) XD_TRY(xd_weight_add(xd_model_root(model), &t, NULL));
    *out = model;
    return XD_OK;
}

static xd_result compute_tens(void *user, xd_ctx *ctx, const xd_tensor_part *part) {
    (void)user;
    if (strcmp(part->name, "extra") != 0) return XD_FAIL(ctx, XD_ERROR_UNEXPECTED, "what is %s", part->name);
    for (int64_t i = part->range.begin; i < part->range.end; i++)
        ((float *)part->data)[i - part->range.begin] = 10.0f * (float)i;
    return XD_OK;
}

static changes changes_of(const scene *s) {
    return (changes){ .cut = s->cut, .teacher = s->teacher, .rank_adds = -1, .rank = s->rank };
}

/* First values of the weight "extra" of the same description, as a build forms them. */
static void extra_of_build(const scene *s, changes *c, float out[3]) {
    xd_built *built = NULL;
    const xd_build_desc d = { .provider = { describe_changed, c }, .storage = XD_STORAGE_META };
    CHECK(xd_build(s->world, &d, &built) == XD_OK);
    memcpy(out, xd_weight_describe(xd_model_find_weight(xd_built_stage(built, 0).model, "extra")).value, 12);
    xd_built_destroy(built);
}

static xd_result differ(xd_comm *world, void *argument) {
    static const char *const fresh[] = { "ext*", "w2" }, *const unknown[] = { "v9" };
    float formed[3];
    scene s;
    (void)argument;
    scene_open(&s, world, 6, 4);
    changes c = changes_of(&s);
    s.desc.provider = (xd_stage_provider){ describe_changed, &c };
    CHECK(scene_make(&s) == XD_OK);
    scene_drop(&s);

    c.add = "extra"; /* missing */
    scene_fails(&s, XD_ERROR_MISSING, "1 of 5 tensors of the fake score are not in the source: extra");
    CHECK_EQ_INT(s.report.missing, 1);
    s.desc.lenient = true;
    scene_fails(&s, XD_ERROR_MISSING, "neither computed nor `fresh`: extra");
    s.desc.fresh = unknown;
    s.desc.fresh_count = 1;
    scene_fails(&s, XD_ERROR_ARGUMENT, "\"v9\", number 0 of `fresh`, fits none of 5 weights");
    s.desc.fresh = fresh;
    extra_of_build(&s, &c, formed);
    CHECK(formed[0] != 0.0f && formed[0] != formed[1]);
    CHECK(scene_make(&s) == XD_OK);
    CHECK(s.report.formed == 1 && s.report.loaded == SCENE_WEIGHTS && s.report.missing == 0);
    CHECK(memcmp(scene_info(&s, "extra").value, formed, sizeof formed) == 0);
    for (int k = 0; k < SCENE_WEIGHTS; k++) CHECK_EQ_INT(scene_wrong(&s, scene_names[k]), 0);
    scene_drop(&s);
    s.desc.lenient = false;
    scene_fails(&s, XD_ERROR_ARGUMENT, "1 `fresh`, which are for `lenient`");
    s.desc.fresh = NULL;
    s.desc.fresh_count = 0;

    c.buffer = true; /* computed */
    s.desc.compute.call = compute_tens;
    scene_fails(&s, XD_ERROR_MISSING, "extra");
    s.desc.lenient = true;
    CHECK(scene_make(&s) == XD_OK);
    CHECK(s.report.computed == 1 && ((const float *)scene_info(&s, "extra").value)[2] == 20.0f);
    scene_drop(&s);
    s.desc.lenient = false;
    c.transient = true;
    CHECK(scene_make(&s) == XD_OK && ((const float *)scene_info(&s, "extra").value)[1] == 10.0f);
    CHECK_EQ_INT(s.report.computed, 1);
    scene_drop(&s);
    s.desc.compute.call = NULL; /* a table that nobody forms is missing, not zero */
    scene_fails(&s, XD_ERROR_MISSING, "extra");
    c.add = "what";
    s.desc.compute.call = compute_tens;
    scene_fails(&s, XD_ERROR_UNEXPECTED, "what is what");
    s.desc.compute.call = NULL;

    c = changes_of(&s);
    c.drop = true; /* unexpected */
    scene_fails(&s, XD_ERROR_UNEXPECTED, "the source has 1 of 4 tensors that the fake score lacks: w3");
    s.desc.lenient = true;
    CHECK(scene_make(&s) == XD_OK && s.report.unexpected == 1 && s.report.loaded == 3);
    CHECK_EQ_STR(s.report.names, "w3");
    scene_drop(&s);
    s.desc.lenient = false;

    c = changes_of(&s);
    c.rows = 7; /* another shape */
    scene_fails(&s, XD_ERROR_SHAPE, "1 of 4 tensors have another shape in the source: w2");
    s.desc.lenient = true;
    scene_fails(&s, XD_ERROR_SHAPE, "\"w2\" has another shape in the source, and `fresh` does not name it");
    s.desc.fresh = fresh + 1;
    s.desc.fresh_count = 1;
    CHECK(scene_make(&s) == XD_OK && s.report.formed == 1 && s.report.wrong_shape == 1);
    CHECK(((const float *)scene_info(&s, "w2").value)[27] != 0.0f);
    scene_drop(&s);
    s.desc.lenient = false;
    s.desc.fresh = NULL;
    s.desc.fresh_count = 0;

    c = changes_of(&s);
    c.dtype = XD_DTYPE_I32; /* another type */
    scene_fails(&s, XD_ERROR_DTYPE, "\"w1\" is F32 in the source and I32 here, which are not converted");
    c.dtype = XD_DTYPE_NONE;
    c.tie = "again";
    CHECK(scene_make(&s) == XD_OK && scene_info(&s, "again").value == scene_info(&s, "w0").value);
    scene_drop(&s);
    scene_close(&s);
    return XD_OK;
}

XD_TEST(what_the_source_lacks_or_has_besides_is_the_same_error_on_every_rank_and_can_be_allowed) {
    for (int ranks = 1; ranks <= 3; ranks += 2) fake_ranks(ranks, differ, NULL);
}

/* ---- ranks that do not say the same ---- */

static xd_result disagree(xd_comm *world, void *argument) {
    static const char *const frozen[] = { "w1" };
    scene s;
    (void)argument;
    scene_open(&s, world, 6, 4);
    changes c = changes_of(&s);
    s.desc.provider = (xd_stage_provider){ describe_changed, &c };
    c.add = "extra";
    c.rank_adds = 2;
    scene_fails(&s, XD_ERROR_MISMATCH, "\"extra\" on rank 2");
    c = changes_of(&s);
    xd_layout *columns = scene_layout(&s, &s.topology, 1);
    if (s.rank == 1) c.cut = columns;
    scene_fails(&s, XD_ERROR_MISMATCH, "layouts of the fake score's weights");
    s.desc.provider.describe = NULL;
    s.desc.staging_bytes = s.rank == 1 ? 64 : 0;
    scene_fails(&s, XD_ERROR_MISMATCH,
                "settings of a fake score: rank 1 passed staging_bytes = 64, rank 0 passed 0");
    s.desc.staging_bytes = 0;
    if (s.rank == 0) s.desc.fake = (xd_fake_score_desc){ .frozen = frozen, .frozen_count = 1 };
    scene_fails(&s, XD_ERROR_MISMATCH,
                "settings of a fake score: rank 1 passed fake.frozen_count = 0, rank 0 passed 1");
    s.desc.fake = (xd_fake_score_desc){ 0 };
    if (s.rank == 1) s.desc.fake = (xd_fake_score_desc){ .frozen = NULL, .frozen_count = 3 };
    scene_fails_somewhere(&s, XD_ERROR_ARGUMENT, "3 `frozen` at");
    if (s.rank == 1) s.desc.fake = (xd_fake_score_desc){ .frozen = frozen };
    scene_fails_somewhere(&s, XD_ERROR_ARGUMENT, "a list of names, and frozen_count 0, fresh_count 0");
    s.desc.fake = (xd_fake_score_desc){ 0 };
    CHECK(scene_make(&s) == XD_OK); /* the world goes on */
    xd_layout_destroy(columns);
    scene_close(&s);
    return XD_OK;
}

XD_TEST(ranks_with_other_descriptions_layouts_or_settings_fail_alike_before_memory_is_taken) {
    fake_ranks(3, disagree, NULL);
}

static xd_result refuse_cheaply(xd_comm *world, void *argument) {
    scene s;
    (void)argument;
    scene_open(&s, world, WIDE_ROWS, WIDE_COLUMNS);
    changes c = changes_of(&s);
    s.desc.provider = (xd_stage_provider){ describe_changed, &c };
    const int64_t before = fake_bytes;
    fake_most = before;
    c.add = "extra";
    scene_fails(&s, XD_ERROR_MISSING, "extra");
    c.rank_adds = 1;
    scene_fails(&s, XD_ERROR_MISMATCH, "\"extra\" on rank 1");
    CHECK(fake_most - before < 131072); /* a shard has a million bytes */
    scene_close(&s);
    return XD_OK;
}

XD_TEST(a_fake_score_that_is_refused_has_taken_no_memory_for_weights) {
    fake_ranks(2, refuse_cheaply, NULL);
}

/* ---- sources that do not cover, or fail ---- */

static xd_result read_badly(void *user, const xd_weights_entry *entry, xd_interval elements, void *to) {
    const int rank = *(const int *)user;
    if (rank == 1 && strcmp(entry->name, "w2") == 0) return XD_ERROR_IO;
    for (int64_t i = 0; i < elements.end - elements.begin; i++) ((float *)to)[i] = 1.0f;
    return XD_OK;
}

static void fail_sources(scene *s, xd_tensor_part *parts, xd_weights_entry *entries,
                         xd_state_tensor *tensors) {
    xd_fake_score_source *source = &s->desc.source;
    source->from = (xd_fake_score_from)4;
    scene_fails(s, XD_ERROR_ARGUMENT, "a source of kind 4");
    source->from = XD_FAKE_SCORE_FROM_PARTS;
    source->part_count = -1;
    scene_fails(s, XD_ERROR_ARGUMENT, "the source has -1 parts");
    *source = (xd_fake_score_source){ XD_FAKE_SCORE_FROM_PARTS, .parts = parts, .part_count = SCENE_WEIGHTS };
    CHECK(scene_make(s) == XD_OK);
    scene_drop(s);
    const xd_interval range = parts[3].range;
    if (s->rank == 1) parts[3].range.end--; /* a hole */
    scene_fails_somewhere(s, XD_ERROR_MISMATCH, "tensor \"w3\": no rank holds element 15");
    parts[3].range = range;
    if (s->rank == 1) parts[3].replica = true;
    scene_fails_somewhere(s, XD_ERROR_MISMATCH, "tensor \"w3\": no rank holds element 8");
    parts[3].replica = false;
    if (s->rank == 2) parts[1].name = "other";
    scene_fails(s, XD_ERROR_MISMATCH, "differ first at tensor 1: \"w1\" on rank 0, \"other\" on rank 2");
    parts[1].name = "w1";

    source->from = XD_FAKE_SCORE_FROM_READER;
    scene_fails(s, XD_ERROR_ARGUMENT, "no function");
    source->reader = (xd_fake_score_reader){ entries, SCENE_WEIGHTS, read_badly, &s->rank };
    scene_fails_somewhere(s, XD_ERROR_IO, "the reader of tensor 2 returned 10");
    if (s->rank == 1) entries[0].dtype = XD_DTYPE_BF16;
    scene_fails(s, XD_ERROR_MISMATCH,
                "the list of the source's tensors: rank 1 passed another list than rank 0");
    entries[0].dtype = XD_DTYPE_F32;
    entries[1].name = "w0";
    scene_fails(s, XD_ERROR_ARGUMENT, "two tensors named \"w0\"");
    entries[1].name = NULL;
    scene_fails(s, XD_ERROR_ARGUMENT, "tensor 1 of the source: \"\"");
    entries[1].name = "w1";
    source->reader.entry_count = -2;
    scene_fails(s, XD_ERROR_ARGUMENT, "the reader has -2 entries");

    source->from = XD_FAKE_SCORE_FROM_ROOT;
    source->tensor_count = -1;
    scene_fails_somewhere(s, XD_ERROR_ARGUMENT, "the source has -1 tensors");
    source->tensors = tensors;
    source->tensor_count = SCENE_WEIGHTS;
    tensors[1].data = NULL;
    scene_fails_somewhere(s, XD_ERROR_STATE, "\"w1\" of rank 0 has no data");
    source->tensor_count = 1; /* three are missing, and every rank says so itself */
    scene_fails(s, XD_ERROR_MISSING, "3 of 4 tensors of the fake score are not in the source: w1, w2, w3");
    source->tensor_count = 0;
    scene_fails(s, XD_ERROR_MISSING, "4 of 4 tensors");
}

static xd_result break_sources(xd_comm *world, void *argument) {
    static const int64_t shape[2] = { 6, 4 };
    float whole[24] = { 0 };
    xd_tensor_part parts[SCENE_WEIGHTS];
    xd_weights_entry entries[SCENE_WEIGHTS];
    xd_state_tensor tensors[SCENE_WEIGHTS];
    scene s;
    (void)argument;
    scene_open(&s, world, 6, 4);
    for (int i = 0; i < SCENE_WEIGHTS; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(s.teacher, i));
        parts[i] = (xd_tensor_part){ .name = info.name,
                                     .dtype = XD_DTYPE_F32,
                                     .ndim = 2,
                                     .shape = { 6, 4 },
                                     .region = info.region,
                                     .range = { 0, info.count },
                                     .data = info.value };
        entries[i] = (xd_weights_entry){ info.name, XD_DTYPE_F32, 2, shape };
        tensors[i] = (xd_state_tensor){ NULL, info.name, XD_DTYPE_F32, 2, shape, whole };
    }
    fail_sources(&s, parts, entries, tensors);
    s.desc.source = (xd_fake_score_source){ 0 };
    s.desc.teacher = NULL;
    scene_fails(&s, XD_ERROR_ARGUMENT, "there is no teacher");
    s.desc.teacher = s.teacher;
    s.desc.fake.shared = true;
    scene_fails(&s, XD_ERROR_ARGUMENT, "cannot share");
    s.desc.fake.shared = false;
    xd_model *bare = scene_model(&s, s.cut, false);
    s.desc.teacher = bare;
    scene_fails(&s, XD_ERROR_STATE, "no rank of 3 has values of the teacher");
    CHECK(s.rank == 2 || xd_model_allocate(bare) == XD_OK); /* storage without values, on some ranks */
    scene_fails_somewhere(&s, XD_ERROR_STATE, "\"w0\" of the teacher holds no values");
    s.desc.teacher = s.teacher;
    CHECK(scene_make(&s) == XD_OK);
    xd_model_destroy(bare);
    scene_close(&s);
    return XD_OK;
}

XD_TEST(sources_that_have_holes_or_fail_end_the_call_on_every_rank) {
    fake_ranks(3, break_sources, NULL);
}

/* ---- failing allocations ---- */

static xd_result make_poorly(scene *s, int victim, int64_t n) {
    fake_fails_in = s->rank == victim ? n : 0;
    const xd_result result = scene_make(s);
    fake_fails_in = 0;
    CHECK((s->built != NULL) == (result == XD_OK));
    for (int k = 0; k < SCENE_WEIGHTS && s->built; k++) CHECK_EQ_INT(scene_wrong(s, scene_names[k]), 0);
    scene_drop(s);
    return result;
}

static xd_result starve(xd_comm *world, void *argument) {
    const xd_fake_score_from from = *(const xd_fake_score_from *)argument;
    static const int64_t shape[2] = { 5, 4 };
    static float whole[SCENE_WEIGHTS][20];
    xd_weights_entry entries[SCENE_WEIGHTS];
    xd_state_tensor tensors[SCENE_WEIGHTS];
    int64_t reads = 0, failed = 0;
    scene s;
    scene_open(&s, world, 5, 4);
    xd_layout *columns = scene_layout(&s, &s.topology, 1);
    for (int i = 0; i < SCENE_WEIGHTS; i++) {
        entries[i] = (xd_weights_entry){ scene_names[i], XD_DTYPE_F32, 2, shape };
        tensors[i] = (xd_state_tensor){ NULL, scene_names[i], XD_DTYPE_F32, 2, shape, whole[i] };
        for (int k = 0; k < 20 && s.rank == 0; k++) whole[i][k] = fake_number(scene_names[i], k);
    }
    CHECK(xd_barrier(world) == XD_OK);
    s.desc.fake = (xd_fake_score_desc){ .adapt = to_columns, .user = columns };
    s.desc.source = (xd_fake_score_source){ from, .tensors = tensors, .tensor_count = SCENE_WEIGHTS,
                                            .reader = { entries, SCENE_WEIGHTS, read_number, &reads } };
    for (int victim = 0; victim < 2; victim++)
        for (int64_t n = 1;; n++) {
            const xd_result result = make_poorly(&s, victim, n);
            if (result == XD_OK) break;
            CHECK(result == (s.rank == victim ? XD_ERROR_MEMORY : XD_ERROR_PEER));
            failed++;
        }
    CHECK(failed > 40);
    scene_close(&s);
    xd_layout_destroy(columns);
    return XD_OK;
}

XD_TEST(each_allocation_may_fail_on_one_rank) {
    xd_fake_score_from kinds[] = { XD_FAKE_SCORE_FROM_TEACHER, XD_FAKE_SCORE_FROM_ROOT,
                                   XD_FAKE_SCORE_FROM_READER };
    for (int i = 0; i < 3; i++) fake_ranks(2, starve, &kinds[i]);
}

static xd_result starve_copies(xd_comm *world, void *argument) {
    xd_model *teacher = fake_describe(world, NULL, NULL), *fake = NULL;
    const bool shared = *(const bool *)argument;
    const xd_fake_score_desc d = { .shared = shared };
    xd_result result = XD_ERROR_MEMORY;
    int64_t n = 1;
    fake_fill(teacher);
    for (; result != XD_OK; n++) {
        fake_fails_in = n;
        result = xd_fake_score_create(teacher, &d, &fake);
        fake_fails_in = 0;
        CHECK(result == XD_OK ? fake != NULL : result == XD_ERROR_MEMORY && !fake);
    }
    CHECK(n > 30);
    CHECK_EQ_INT(fake_wrong(fake, NULL), 0);
    xd_model_destroy(fake);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(each_allocation_of_a_copy_may_fail) {
    for (int i = 0; i < 2; i++) {
        bool shared = i == 1;
        fake_ranks(1, starve_copies, &shared);
    }
}

XD_TEST_MAIN()
