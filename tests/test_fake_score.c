/* Fake scores: copies on one rank, and made of parts on many, from any cut to any other, with the teacher's bits. */
#include "fake_scene.h"
#include "xd_test_topology.h"
#include "wrap_calls.h"

/* ---- on one rank ---- */

static xd_model *whole_teacher(xd_comm *world) {
    xd_model *teacher = fake_describe(world, NULL, NULL);
    fake_fill(teacher);
    return teacher;
}

static xd_result copy_whole(xd_comm *world, void *argument) {
    xd_model *teacher = whole_teacher(world), *fake = NULL;
    (void)argument;
    CHECK(xd_fake_score_create(teacher, NULL, &fake) == XD_OK);
    CHECK_EQ_INT(fake_wrong(fake, NULL), 0);
    CHECK_EQ_INT(xd_model_describe(fake).weight_count, FAKE_TENSORS);
    CHECK_EQ_STR(xd_block_describe(xd_model_find_block(fake, "blocks.1")).desc->type, "block");
    for (int64_t i = 0; i < FAKE_TENSORS; i++) {
        const xd_weight_info from = xd_weight_describe(xd_model_weight_at(teacher, i)),
                             to = xd_weight_describe(xd_model_weight_at(fake, i));
        CHECK_EQ_STR(to.name, from.name);
        CHECK(to.count == 0 || to.value != from.value);
        CHECK(!to.desc->traits.frozen);
        CHECK(to.desc->buffer == from.desc->buffer && to.desc->transient == from.desc->transient);
        CHECK(to.desc->buffer || to.count == 0 || to.gradient);
        if (to.count > 0) memset(to.value, 0, (size_t)to.count * xd_dtype_size(to.desc->dtype));
    }
    const xd_weight_info tie = xd_weight_describe(xd_model_find_weight(fake, "out.head"));
    CHECK(tie.owner == xd_model_find_weight(fake, "embed.weight") && tie.value != NULL);
    CHECK_EQ_INT(fake_wrong(teacher, NULL), 0); /* untouched */
    CHECK(xd_weight_describe(xd_model_find_weight(teacher, "blocks.0.cube")).desc->traits.frozen);
    xd_model_destroy(fake);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_copy_has_the_teachers_values_ties_and_buffers_and_every_weight_of_it_trains) {
    fake_ranks(1, copy_whole, NULL);
}

static xd_result keep_wide(void *user, const char *name, xd_weight_desc *weight) {
    (void)user;
    if (strcmp(name, "blocks.0.b") == 0) weight->dtype = XD_DTYPE_F32;
    return XD_OK;
}

static xd_result copy_rounded(xd_comm *world, void *argument) {
    static const char *const frozen[] = { "blocks.*.w", "embed.weight" };
    xd_model *teacher = whole_teacher(world), *fake = NULL;
    (void)argument;
    xd_fake_score_desc d = {
        .dtype = XD_DTYPE_BF16, .frozen = frozen, .frozen_count = 2, .adapt = keep_wide
    };
    CHECK(xd_fake_score_create(teacher, &d, &fake) == XD_OK);
    CHECK_EQ_INT(fake_wrong(fake, NULL), 0);
    for (int64_t i = 0; i < FAKE_TENSORS; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(fake, i));
        const bool kept = strcmp(info.name, "blocks.0.b") == 0, whole = info.desc->dtype == XD_DTYPE_I64;
        CHECK(whole || info.desc->dtype == (kept ? XD_DTYPE_F32 : XD_DTYPE_BF16));
        const bool named = strstr(info.name, ".w") || strcmp(info.name, "out.head") == 0;
        CHECK(info.desc->buffer || info.desc->traits.frozen == named);
        CHECK(!named || !info.gradient);
    }
    xd_model_destroy(fake);
    d = (xd_fake_score_desc){ .dtype = XD_DTYPE_F32 };
    CHECK(xd_fake_score_create(teacher, &d, &fake) == XD_OK);
    CHECK_EQ_INT(fake_wrong(fake, NULL), 0);
    CHECK(xd_weight_describe(xd_model_find_weight(fake, "blocks.1.w")).desc->dtype == XD_DTYPE_F32);
    xd_model_destroy(fake);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_copy_in_another_type_is_rounded_to_nearest_even_and_keeps_frozen_what_is_named) {
    fake_ranks(1, copy_rounded, NULL);
}

static xd_result share(xd_comm *world, void *argument) {
    xd_model *teacher = whole_teacher(world), *fake = NULL;
    xd_fake_score_desc d = { .shared = true };
    (void)argument;
    CHECK(xd_fake_score_create(teacher, &d, &fake) == XD_OK);
    CHECK_EQ_INT(fake_wrong(fake, NULL), 0);
    for (int64_t i = 0; i < FAKE_TENSORS; i++) {
        const xd_weight_info from = xd_weight_describe(xd_model_weight_at(teacher, i)),
                             to = xd_weight_describe(xd_model_weight_at(fake, i));
        if (to.count == 0) continue;
        CHECK(to.value == from.value);
        CHECK(to.desc->buffer || (to.gradient && to.gradient != from.gradient));
    }
    d.dtype = XD_DTYPE_F32;
    xd_model_destroy(fake);
    fake = NULL;
    CHECK(fake_says(teacher ? xd_comm_ctx(world) : NULL, xd_fake_score_create(teacher, &d, &fake),
                    XD_ERROR_ARGUMENT, "no dtype (F32) and no adapt"));
    CHECK(!fake);
    CHECK_EQ_INT(fake_wrong(teacher, NULL), 0);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_shared_fake_score_has_the_teachers_storage_and_gradients_of_its_own) {
    fake_ranks(1, share, NULL);
}

/* ---- refusals on one rank ---- */

static void refuse(xd_model *teacher, xd_ctx *ctx, const xd_fake_score_desc *d, xd_result want,
                   const char *text) {
    xd_model *fake = NULL;
    CHECK(fake_says(ctx, xd_fake_score_create(teacher, d, &fake), want, text));
    CHECK(!fake);
}

static xd_result rename_weight(void *user, const char *name, xd_weight_desc *weight) {
    (void)user;
    if (strcmp(name, "blocks.0.b") == 0) weight->shape[0] = 5;
    return XD_OK;
}

static xd_result fail_to_adapt(void *user, const char *name, xd_weight_desc *weight) {
    (void)user, (void)weight;
    return strcmp(name, "blocks.0.b") == 0 ? XD_ERROR_DATA : XD_OK;
}

static xd_result refuse_copies(xd_comm *world, void *argument) {
    static const char *const wrong[] = { "blocks.0.w", "blocks.7.*" };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *teacher = fake_describe(world, NULL, NULL), *open = NULL;
    (void)argument;
    CHECK(xd_model_create(ctx, NULL, &open) == XD_OK);
    refuse(open, ctx, NULL, XD_ERROR_STATE, "the teacher is not sealed");
    refuse(teacher, ctx, NULL, XD_ERROR_STATE, "\"embed.weight\" of the teacher holds no values");
    fake_fill(teacher);
    xd_fake_score_desc d = { .frozen = wrong, .frozen_count = 2 };
    refuse(teacher, ctx, &d, XD_ERROR_ARGUMENT,
           "\"blocks.7.*\", number 1 of `frozen`, fits none of 11 weights");
    d.frozen_count = -1;
    refuse(teacher, ctx, &d, XD_ERROR_ARGUMENT, "-1 `frozen`");
    d = (xd_fake_score_desc){ .dtype = XD_DTYPE_I32 };
    refuse(teacher, ctx, &d, XD_ERROR_ARGUMENT, "a fake score of I32");
    d = (xd_fake_score_desc){ .adapt = rename_weight };
    refuse(teacher, ctx, &d, XD_ERROR_ARGUMENT, "changed name, shape or kind of \"blocks.0.b\"");
    d = (xd_fake_score_desc){ .adapt = fail_to_adapt };
    refuse(teacher, ctx, &d, XD_ERROR_DATA, "adapt of weight 2 returned 9");
    xd_model_destroy(open);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(copies_that_make_no_sense_are_refused_with_the_name) {
    fake_ranks(1, refuse_copies, NULL);
}

static xd_result copy_integers(xd_comm *world, void *argument) {
    static const char *const codes[] = { "codes" };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_model *teacher = NULL, *fake = NULL;
    (void)argument;
    CHECK(xd_model_create(ctx, NULL, &teacher) == XD_OK);
    xd_weight_desc d = { .name = "a", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 } };
    CHECK(xd_weight_add(xd_model_root(teacher), &d, NULL) == XD_OK);
    d = (xd_weight_desc){
        .name = "codes", .dtype = XD_DTYPE_I32, .ndim = 1, .shape = { 3 }, .traits.frozen = true
    };
    CHECK(xd_weight_add(xd_model_root(teacher), &d, NULL) == XD_OK);
    CHECK(xd_model_seal(teacher) == XD_OK && xd_model_allocate(teacher) == XD_OK);
    CHECK(xd_model_init_weights(teacher) == XD_OK);
    ((int32_t *)xd_weight_describe(xd_model_find_weight(teacher, "codes")).value)[2] = 77;
    refuse(teacher, ctx, NULL, XD_ERROR_DTYPE, "\"codes\" of I32 cannot train: name it in `frozen`");
    xd_fake_score_desc f = { .frozen = codes, .frozen_count = 1 };
    CHECK(xd_fake_score_create(teacher, &f, &fake) == XD_OK);
    const xd_weight_info info = xd_weight_describe(xd_model_find_weight(fake, "codes"));
    CHECK_EQ_INT(((const int32_t *)info.value)[2], 77);
    CHECK(info.desc->traits.frozen && !info.gradient);
    xd_model_destroy(fake);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(weights_of_integers_are_refused_unless_they_are_named_as_frozen) {
    fake_ranks(1, copy_integers, NULL);
}

/* A teacher of which one weight in the middle is cut. */
static xd_result copy_sharded(xd_comm *world, void *argument) {
    xd_ctx *ctx = xd_comm_ctx(world);
    fake_layouts l;
    memset(&l, 0, sizeof l);
    (void)argument;
    l.topology = line_of("tp", 2);
    xd_layout_desc d = { .ndim = 3, .shape = { 3, 2, 5 }, .topology = &l.topology };
    d.placement[0] = (xd_placement){ XD_SHARD, .dim = 2 };
    CHECK(xd_layout_create(ctx, &d, &l.layout[3]) == XD_OK);
    xd_model *teacher = fake_describe(world, &l, NULL);
    fake_fill(teacher);
    refuse(teacher, ctx, NULL, XD_ERROR_UNSUPPORTED,
           xd_comm_rank(world) ? "12 of 30 elements of \"blocks.0.cube\"; xd_fake_score_create_meta"
                               : "18 of 30 elements of \"blocks.0.cube\"; xd_fake_score_create_meta");
    xd_model_destroy(teacher);
    xd_layout_destroy(l.layout[3]);
    d.placement[0] = (xd_placement){ XD_PARTIAL, .op = XD_SUM };
    CHECK(xd_layout_create(ctx, &d, &l.layout[3]) == XD_OK);
    teacher = fake_describe(world, &l, NULL);
    fake_fill(teacher);
    refuse(teacher, ctx, NULL, XD_ERROR_UNSUPPORTED, "30 of 30 elements of \"blocks.0.cube\"");
    xd_model_destroy(teacher);
    fake_release_layouts(&l);
    teacher = whole_teacher(world);
    xd_parallel *parallel = NULL;
    CHECK(wrap_over_fsdp(teacher, world, NULL, &parallel) == XD_OK);
    refuse(teacher, ctx, NULL, XD_ERROR_UNSUPPORTED,
           "of 35 elements of \"embed.weight\"; xd_fake_score_create_meta");
    const xd_fake_score_desc shared = { .shared = true };
    refuse(teacher, ctx, &shared, XD_ERROR_STATE, "the teacher is wrapped: its 11 weights");
    xd_parallel_destroy(parallel);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_sharded_teacher_is_not_copied_and_the_first_weight_in_parts_is_named) {
    fake_ranks(2, copy_sharded, NULL);
}

static xd_result copy_wrapped(xd_comm *world, void *argument) {
    const xd_ddp_desc ddp = { .sharded_optimizer = *(const bool *)argument };
    xd_model *teacher = whole_teacher(world), *fake = NULL;
    xd_parallel *parallel = NULL;
    CHECK(wrap_over_ddp(teacher, world, &ddp, &parallel) == XD_OK);
    CHECK(xd_fake_score_create(teacher, NULL, &fake) == XD_OK);
    CHECK_EQ_INT(fake_wrong(fake, NULL), 0);
    xd_model_destroy(fake);
    xd_parallel_destroy(parallel);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_teacher_that_every_data_rank_has_whole_is_copied_on_each) {
    for (int i = 0; i < 2; i++) {
        bool sharded_optimizer = i == 1;
        fake_ranks(2, copy_wrapped, &sharded_optimizer);
    }
}

/* ---- descriptions ---- */

static xd_result describe_and_add(xd_comm *world, void *argument) {
    const xd_weight_desc head = { .name = "extra", .dtype = XD_DTYPE_F32, .ndim = 1, .shape = { 2 } };
    xd_model *teacher = fake_describe(world, NULL, NULL), *fake = NULL;
    (void)argument;
    CHECK(xd_fake_score_describe(teacher, NULL, &fake) == XD_OK); /* of a teacher without storage */
    CHECK(xd_weight_add(xd_model_find_block(fake, "out"), &head, NULL) == XD_OK);
    CHECK(xd_model_seal(fake) == XD_OK);
    CHECK_EQ_INT(xd_model_describe(fake).weight_count, FAKE_TENSORS + 1);
    CHECK(!xd_weight_describe(xd_model_find_weight(fake, "embed.weight")).value);
    CHECK(xd_model_allocate(fake) == XD_OK && xd_model_init_weights(fake) == XD_OK);
    fake_fill(teacher);
    xd_weight_info from = xd_weight_describe(xd_model_find_weight(teacher, "blocks.0.w")),
                   to = xd_weight_describe(xd_model_find_weight(fake, "blocks.0.w"));
    CHECK(to.desc->init.kind == XD_INIT_NORMAL && memcmp(from.value, to.value, 9 * 4 * 4) != 0);
    xd_model_destroy(fake);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(a_description_needs_no_values_and_takes_more_weights) {
    fake_ranks(1, describe_and_add, NULL);
}

/* ---- of parts: any cut to any other ---- */

typedef enum fake_form {
    FORM_LAYOUTS = 0,
    FORM_WHOLE,
    FORM_DDP,
    FORM_SHARDED_DDP,
    FORM_FSDP,
    FORMS
} fake_form;

/* A teacher or what a fake score is to be, in one form on some of the ranks. */
typedef struct fake_side {
    fake_form form;
    fake_cut cut;
    fake_layouts layouts;
    xd_comm *group; /* of the wrapper; NULL on ranks without it */
    xd_model *model;
    xd_parallel *parallel;
} fake_side;

typedef struct fake_case {
    uint64_t seed;
    fake_side from, to;
    xd_dtype dtype;
    xd_fake_score_from source;
    bool without_table;
} fake_case;

static const xd_ddp_desc plain_ddp, sharded_ddp = { .sharded_optimizer = true };
static const char *const unit_types[] = { "block" };
static const xd_fsdp_desc fsdp = { .unit_types = unit_types, .unit_type_count = 1 };

static xd_wrap wrap_of(fake_form form) {
    if (form == FORM_FSDP) return (xd_wrap){ XD_WRAP_FSDP, NULL, &fsdp };
    if (form == FORM_DDP) return (xd_wrap){ XD_WRAP_DDP, &plain_ddp, NULL };
    if (form == FORM_SHARDED_DDP) return (xd_wrap){ XD_WRAP_DDP, &sharded_ddp, NULL };
    return (xd_wrap){ XD_WRAP_NONE, NULL, NULL };
}

static void draw_side(uint64_t *state, int ranks, bool anywhere, fake_side *side) {
    memset(side, 0, sizeof *side);
    side->form = model_draw(state, 2) ? FORM_LAYOUTS : (fake_form)(1 + model_draw(state, FORMS - 1));
    const int most = 1 + model_draw(state, ranks);
    side->cut.a = 1 + model_draw(state, most);
    side->cut.b = most / side->cut.a;
    side->cut.first = model_draw(state, ranks - side->cut.a * side->cut.b + 1);
    side->cut.seed = *state;
    if (side->form == FORM_LAYOUTS) return;
    side->cut.a = ranks;
    side->cut.b = 1;
    side->cut.first = 0;
    if (!anywhere) return;
    side->cut.a = most;
    side->cut.first = model_draw(state, ranks - most + 1);
}

/* A teacher on its ranks, its description on the others. */
static void make_teacher(xd_comm *world, fake_side *side, bool values) {
    const int rank = xd_comm_rank(world), first = side->cut.first;
    const bool here = rank >= first && rank < first + side->cut.a * side->cut.b;
    const xd_wrap wrap = wrap_of(side->form);
    fake_cut none = { 0 };
    fake_cut_layouts(xd_comm_ctx(world), side->form == FORM_LAYOUTS ? &side->cut : &none, &side->layouts);
    side->model = fake_describe(world, &side->layouts, NULL);
    if (values && here) fake_fill(side->model);
    if (!values || wrap.kind == XD_WRAP_NONE) return;
    CHECK(xd_comm_split(world, here ? 0 : -1, rank, &side->group) == XD_OK);
    if (!here) return;
    CHECK((wrap.fsdp ? wrap_over_fsdp(side->model, side->group, wrap.fsdp, &side->parallel)
                     : wrap_over_ddp(side->model, side->group, wrap.ddp, &side->parallel)) == XD_OK);
}

static void drop_side(fake_side *side) {
    xd_parallel_destroy(side->parallel);
    xd_model_destroy(side->model);
    fake_release_layouts(&side->layouts);
    if (side->group) xd_comm_destroy(side->group);
}

/* Gives a fake score its cut. */
static xd_result cut_otherwise(void *user, const char *name, xd_weight_desc *weight) {
    const fake_side *to = (const fake_side *)user;
    weight->layout = to->layouts.layout[fake_find(name) - fake_tensors];
    return XD_OK;
}

/* ---- sources that are no teacher ---- */

typedef struct fake_list {
    xd_tensor_part parts[FAKE_TENSORS];
    xd_state_tensor tensors[FAKE_TENSORS];
    xd_weights_entry entries[FAKE_TENSORS];
    xd_region whole[FAKE_TENSORS];
    int64_t data[FAKE_TENSORS][64];
    int64_t count;
    int reads, fails_at; /* the call that fails; 0: none */
} fake_list;

static xd_result read_list(void *user, const xd_weights_entry *entry, xd_interval elements, void *to) {
    fake_list *list = (fake_list *)user;
    const fake_tensor *t = fake_find(entry->name);
    const size_t size = xd_dtype_size(entry->dtype);
    CHECK(elements.begin >= 0 && elements.begin < elements.end && elements.end <= fake_numel(t));
    if (++list->reads == list->fails_at) return XD_ERROR_IO;
    for (int64_t i = elements.begin; i < elements.end; i++)
        fake_put(t, i, entry->dtype, (unsigned char *)to + (size_t)(i - elements.begin) * size);
    return XD_OK;
}

/* Rank 0 has everything, the others nothing; the tied weight has the name of the tie. */
static void make_list(xd_comm *world, bool table, fake_list *list) {
    memset(list, 0, sizeof *list);
    for (int i = 0; i < FAKE_TENSORS - 1; i++) {
        const fake_tensor *t = &fake_tensors[i];
        const int64_t n = list->count;
        if (t->transient && !table) continue;
        list->whole[n] = region_whole(t->ndim, t->shape);
        for (int64_t k = 0; k < fake_numel(t); k++)
            fake_put(t, k, t->dtype, (unsigned char *)list->data[n] + (size_t)k * xd_dtype_size(t->dtype));
        const char *name = i == 0 ? "out.head" : t->full;
        list->parts[n] = (xd_tensor_part){ .name = name,
                                           .dtype = t->dtype,
                                           .ndim = t->ndim,
                                           .data = list->data[n],
                                           .range = { 0, xd_comm_rank(world) ? 0 : fake_numel(t) } };
        for (int d = 0; d < t->ndim; d++) list->parts[n].shape[d] = t->shape[d];
        list->tensors[n] = (xd_state_tensor){ NULL, name, t->dtype, t->ndim, t->shape, list->data[n] };
        list->entries[n] = (xd_weights_entry){ t->full, t->dtype, t->ndim, t->shape };
        list->count++;
    }
}

static void use_list(xd_fake_score_meta_desc *d, xd_fake_score_from from, fake_list *list) {
    d->source.from = from;
    d->source.parts = list->parts;
    d->source.part_count = list->count;
    d->source.tensors = list->tensors;
    d->source.tensor_count = list->count;
    d->source.reader = (xd_fake_score_reader){ list->entries, list->count, read_list, list };
}

static xd_result compute_table(void *user, xd_ctx *ctx, const xd_tensor_part *part) {
    int *calls = (int *)user;
    const fake_tensor *t = fake_find(part->name);
    if (!t || !t->buffer) return XD_FAIL(ctx, XD_ERROR_UNEXPECTED, "who is %s", part->name);
    CHECK(part->region && part->ndim == 1 && part->region->count[0] <= 1);
    for (int64_t i = part->range.begin; i < part->range.end; i++)
        fake_put(t, part->region->interval[0][0].begin + i, part->dtype,
                 (unsigned char *)part->data + (size_t)(i - part->range.begin) * xd_dtype_size(part->dtype));
    ++*calls;
    return XD_OK;
}

static xd_result move_case(xd_comm *world, void *argument) {
    fake_case c = *(const fake_case *)argument;
    const bool own = c.source == XD_FAKE_SCORE_FROM_TEACHER;
    const xd_groups groups = { .dp = world };
    xd_fake_score_report report;
    xd_built *built = NULL;
    int computed = 0;
    fake_list *list = (fake_list *)malloc(sizeof *list);
    make_list(world, !c.without_table, list);
    make_teacher(world, &c.from, own);
    fake_cut none = { 0 };
    fake_cut_layouts(xd_comm_ctx(world), c.to.form == FORM_LAYOUTS ? &c.to.cut : &none, &c.to.layouts);
    xd_fake_score_meta_desc d = { .teacher = c.from.model, .groups = &groups, .wrap = wrap_of(c.to.form) };
    d.report = &report;
    d.fake = (xd_fake_score_desc){ .dtype = c.dtype, .adapt = cut_otherwise, .user = &c.to };
    d.staging_bytes = c.seed % 3 == 0 ? 1 : c.seed % 3 == 1 ? 200 : 0;
    if (!own) use_list(&d, c.source, list);
    if (c.without_table) d.compute = (xd_fake_score_compute){ compute_table, &computed };
    const xd_result result = xd_fake_score_create_meta(world, &d, &built);
    CHECK(result == XD_OK);
    if (result != XD_OK)
        printf("seed %llu: %s\n", (unsigned long long)c.seed, xd_last_error(xd_comm_ctx(world))->message);
    const xd_stage stage = built ? xd_built_stage(built, 0) : (xd_stage){ 0 };
    if (built) CHECK_EQ_INT(fake_wrong(stage.model, stage.parallel), 0);
    if (built) CHECK((stage.parallel != NULL) == (c.to.form >= FORM_DDP));
    const bool computes = c.without_table && !own;
    CHECK_EQ_INT(report.loaded, FAKE_TENSORS - 1 - computes);
    CHECK_EQ_INT(report.computed, computes);
    CHECK(report.missing == 0 && report.unexpected == 0 && report.wrong_shape == 0 && report.formed == 0);
    CHECK_EQ_INT(report.converted, c.dtype == XD_DTYPE_F32 ? 1 : c.dtype == XD_DTYPE_BF16 ? 8 - computes : 0);
    if (built)
        for (int64_t i = 0; i < FAKE_TENSORS; i++) {
            const xd_weight_info info = xd_weight_describe(xd_model_weight_at(stage.model, i));
            CHECK(!info.desc->traits.frozen);
            CHECK(info.desc->init.kind ==
                  (info.desc->dtype == XD_DTYPE_I64 || info.desc->tied_to ? XD_INIT_ZERO : XD_INIT_NORMAL));
        }
    const bool has =
        c.from.parallel || xd_weight_describe(xd_model_find_weight(c.from.model, "embed.weight")).value;
    if (has) CHECK_EQ_INT(fake_wrong(c.from.model, c.from.parallel), 0); /* the teacher is as it was */
    xd_built_destroy(built);
    fake_release_layouts(&c.to.layouts);
    drop_side(&c.from);
    free(list);
    return XD_OK;
}

static void run_case(uint64_t seed, xd_fake_score_from source) {
    static const int sizes[] = { 1, 2, 3, 4, 8 };
    static const xd_dtype dtypes[] = { XD_DTYPE_NONE, XD_DTYPE_NONE, XD_DTYPE_BF16, XD_DTYPE_F32 };
    uint64_t state = seed * 977 + 5;
    fake_case c;
    memset(&c, 0, sizeof c);
    const int ranks = sizes[model_draw(&state, 5)];
    c.seed = seed;
    c.source = source;
    draw_side(&state, ranks, true, &c.from);
    draw_side(&state, ranks, false, &c.to);
    c.dtype = dtypes[model_draw(&state, 4)];
    c.without_table = model_draw(&state, 2) == 0 || c.from.form >= FORM_DDP;
    fake_ranks(ranks, move_case, &c);
}

XD_TEST(any_cut_on_any_ranks_becomes_any_other_with_the_teachers_bits) {
    for (uint64_t seed = 1; seed <= 150; seed++) run_case(seed, XD_FAKE_SCORE_FROM_TEACHER);
}

XD_TEST(any_cut_is_filled_from_parts_from_one_rank_and_by_a_function) {
    for (uint64_t seed = 1; seed <= 60; seed++) run_case(seed, (xd_fake_score_from)(1 + seed % 3));
}

/* ---- memory that values are written into without being cleared ---- */

static xd_model *describe_wide(xd_comm *world) {
    static const struct {
        const char *name;
        xd_dtype dtype;
        int64_t rows, columns, stored_rows;
        xd_init_kind init;
    } weights[] = { { "drawn", XD_DTYPE_F32, 101, 37, 0, XD_INIT_NORMAL },
                    { "padded", XD_DTYPE_F32, 67, 29, 72, XD_INIT_NORMAL },
                    { "zero", XD_DTYPE_F32, 31, 33, 0, XD_INIT_ZERO },
                    { "half", XD_DTYPE_BF16, 59, 7, 64, XD_INIT_NORMAL },
                    { "small", XD_DTYPE_BF16, 1, 3, 0, XD_INIT_ZERO } };
    const xd_block_desc b = { .name = "block", .type = "block" };
    xd_model *model = NULL;
    xd_block *block;
    CHECK(xd_model_create(xd_comm_ctx(world), NULL, &model) == XD_OK);
    CHECK(xd_block_add(xd_model_root(model), &b, &block) == XD_OK);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        xd_weight_desc d = { .name = weights[i].name, .dtype = weights[i].dtype, .ndim = 2 };
        d.shape[0] = weights[i].rows;
        d.shape[1] = weights[i].columns;
        d.stored_rows = weights[i].stored_rows;
        d.init.kind = weights[i].init;
        d.init.scale = 1.0f;
        CHECK(xd_weight_add(block, &d, NULL) == XD_OK);
    }
    CHECK(xd_model_seal(model) == XD_OK);
    return model;
}

static bool has_written(const xd_parallel *parallel) {
    const xd_parallel_bytes b = xd_parallel_memory(parallel);
    return fake_is_written(b.values + b.gradients + b.gathered + b.whole_gradients);
}

static xd_result build_over_dirt(xd_comm *world, void *argument) {
    const xd_groups groups = { .dp = world };
    xd_model *teacher = describe_wide(world);
    xd_parallel *parallel = NULL;
    xd_fake_score_report report;
    float data[5][5000];
    xd_state_tensor tensors[5];
    (void)argument;
    memset(fake_listed, 0, sizeof fake_listed);
    CHECK(wrap_over_fsdp(teacher, world, &fsdp, &parallel) == XD_OK);
    CHECK(has_written(parallel));
    memset(data, 0, sizeof data);
    for (int i = 0; i < 5; i++) {
        const xd_weight_info info = xd_weight_describe(xd_model_weight_at(teacher, i));
        tensors[i] = (xd_state_tensor){
            NULL, info.name, info.desc->dtype, info.desc->ndim, info.desc->shape, data[i]
        };
    }
    for (int way = 0; way < 2; way++) {
        xd_built *built = NULL;
        xd_fake_score_meta_desc d = { .teacher = teacher, .groups = &groups, .wrap = wrap_of(FORM_FSDP) };
        d.report = &report;
        d.source.from = way ? XD_FAKE_SCORE_FROM_ROOT : XD_FAKE_SCORE_FROM_TEACHER;
        d.source.tensors = tensors;
        d.source.tensor_count = 5;
        CHECK(xd_fake_score_create_meta(world, &d, &built) == XD_OK);
        CHECK_EQ_INT(report.loaded, 5);
        if (built) CHECK(has_written(xd_built_stage(built, 0).parallel));
        xd_built_destroy(built);
    }
    xd_parallel_destroy(parallel);
    xd_model_destroy(teacher);
    return XD_OK;
}

XD_TEST(no_byte_of_a_wrapper_stays_as_the_allocator_left_it) {
    for (int ranks = 1; ranks <= 3; ranks++) fake_ranks(ranks, build_over_dirt, NULL);
}

/* ---- columns over some ranks, shards over the others ---- */

/* Two tensor-parallel ranks beside each other, two data ranks across: layouts over a slice, which has other ranks on each. */
static xd_result two_ways(xd_comm *world, void *argument) {
    const bool wrapped = *(const bool *)argument;
    const int rank = xd_comm_rank(world), tp[2] = { rank / 2 * 2, rank / 2 * 2 + 1 };
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_comm *data = NULL;
    xd_fake_score_report report;
    fake_side from, whole;
    memset(&from, 0, sizeof from);
    memset(&whole, 0, sizeof whole);
    const xd_axis axis = { "tp", 2 };
    from.layouts.topology = grid_of(&axis, 1, tp);
    for (int i = 0; i < FAKE_TENSORS - 1; i++) {
        const fake_tensor *tensor = &fake_tensors[i];
        xd_layout_desc d = { .ndim = tensor->ndim, .topology = &from.layouts.topology };
        for (int k = 0; k < tensor->ndim; k++) d.shape[k] = tensor->shape[k];
        if (tensor->stored_rows) d.shape[0] = tensor->stored_rows;
        if (tensor->ndim > 1) d.placement[0] = (xd_placement){ XD_SHARD, .dim = 1 }; /* others are on both */
        CHECK(xd_layout_create(ctx, &d, &from.layouts.layout[i]) == XD_OK);
    }
    from.model = fake_describe(world, &from.layouts, NULL);
    fake_fill(from.model);
    CHECK(xd_comm_split(world, rank % 2, rank, &data) == XD_OK);
    if (wrapped) CHECK(wrap_over_fsdp(from.model, data, &fsdp, &from.parallel) == XD_OK);
    const xd_groups groups = { .dp = data }, all = { .dp = world };
    for (int way = 0; way < 3; way++) { /* the same two ways; columns alone; shards over all four */
        xd_fake_score_meta_desc d = { .teacher = from.model, .groups = way < 2 ? &groups : &all };
        d.report = &report;
        d.wrap = wrap_of(way == 1 ? FORM_LAYOUTS : FORM_FSDP);
        d.fake = (xd_fake_score_desc){ .adapt = cut_otherwise, .user = way < 2 ? &from : &whole };
        xd_built *built = NULL;
        CHECK(xd_fake_score_create_meta(world, &d, &built) == XD_OK);
        CHECK_EQ_INT(report.loaded, FAKE_TENSORS - 1);
        CHECK(way != (wrapped ? 0 : 1) || report.local == report.loaded);
        if (built)
            CHECK_EQ_INT(fake_wrong(xd_built_stage(built, 0).model, xd_built_stage(built, 0).parallel), 0);
        xd_built_destroy(built);
    }
    xd_parallel_destroy(from.parallel);
    xd_model_destroy(from.model);
    fake_release_layouts(&from.layouts);
    xd_comm_destroy(data);
    return XD_OK;
}

XD_TEST(columns_over_some_ranks_and_shards_over_others_stay_or_change) {
    fake_all_frozen = true; /* so that its wrapper, too, has one buffer for each type */
    for (int i = 0; i < 2; i++) {
        bool wrapped = i == 1;
        fake_ranks(4, two_ways, &wrapped);
    }
    fake_all_frozen = false;
}

XD_TEST_MAIN()
