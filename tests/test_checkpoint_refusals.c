/* What checkpoints refuse, what they report, and what they keep. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"
#include "averages.h"
#include "weights_calls.h"

/* ---- one rank with a few tensors ---- */

enum { WIDE = 6 };

typedef struct little {
    xd_ctx *ctx;
    xd_comm *self;
    xd_tensor_part part[3];
    float values[3][WIDE];
    xd_checkpoint_network network;
    xd_checkpoint_save_desc save;
    xd_checkpoint_load_desc load;
    char root[64];
} little;

static void little_part(little *l, int i, const char *name, xd_dtype dtype) {
    memset(&l->part[i], 0, sizeof l->part[i]);
    l->part[i].name = name;
    l->part[i].dtype = dtype;
    l->part[i].ndim = 1;
    l->part[i].shape[0] = l->part[i].range.end = WIDE;
    l->part[i].data = l->values[i];
}

static void little_create(little *l) {
    static const char *const names[3] = { "a", "b", "c" };
    const xd_ctx_desc plain = scene_ctx_desc();
    memset(l, 0, sizeof *l);
    CHECK_EQ_INT(xd_ctx_create(&plain, &l->ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(l->ctx, &l->self), XD_OK);
    strcpy(l->root, new_root());
    for (int i = 0; i < 3; i++) {
        little_part(l, i, names[i], XD_DTYPE_F32);
        for (int k = 0; k < WIDE; k++) l->values[i][k] = (float)(10 * i + k);
    }
    l->network.parts = l->part;
    l->network.part_count = 3;
    l->save.root = l->load.root = l->root;
    l->save.networks = l->load.networks = &l->network;
    l->save.network_count = l->load.network_count = 1;
}

static void little_destroy(little *l) {
    remove_all(l->root);
    xd_comm_destroy(l->self);
    xd_ctx_destroy(l->ctx);
}

static void little_saves(little *l, int64_t step, xd_result expected, const char *says) {
    l->save.step = step;
    CHECK_EQ_INT(xd_checkpoint_save(l->self, &l->save), expected);
    if (!says || strstr(xd_last_error(l->ctx)->message, says)) return;
    CHECK_EQ_STR(xd_last_error(l->ctx)->message, says);
}

static xd_checkpoint_report little_loads(little *l, xd_result expected, const char *says) {
    xd_checkpoint_report report;
    CHECK_EQ_INT(xd_checkpoint_load(l->self, &l->load, &report, NULL), expected);
    if (says && !strstr(xd_last_error(l->ctx)->message, says))
        CHECK_EQ_STR(xd_last_error(l->ctx)->message, says);
    return report;
}

/* ---- settings ---- */

XD_TEST(settings_that_make_no_sense_are_refused_before_anything_is_written) {
    little l;
    xd_checkpoint_file file = { "config.json", "{}", 2 };
    little_create(&l);
    l.save.keep = 1;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "keep is 1");
    l.save.keep = 0;
    little_saves(&l, -1, XD_ERROR_ARGUMENT, "step -1");
    l.save.block_bytes = 5000;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "block_bytes 5000");
    l.save.block_bytes = 0;
    l.save.staging_bytes = 63;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "staging_bytes 63");
    l.save.staging_bytes = 0;
    l.save.state = "[1]";
    little_saves(&l, 1, XD_ERROR_FORMAT, "no JSON object");
    l.save.state = "{\"a\":1} {";
    little_saves(&l, 1, XD_ERROR_FORMAT, "the state: ");
    l.save.state = NULL;
    l.save.files = &file;
    l.save.file_count = 1;
    static const char *const names[] = { "../x", "",   "manifest.json",      ".hidden", "a/b",
                                         "a\\b", "\n", "manifest.json.tmp-1" };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        file.name = names[i];
        little_saves(&l, 1, XD_ERROR_ARGUMENT, "is no name for a file of a checkpoint");
    }
    CHECK_EQ_STR(names_in(l.ctx, l.root), "");
    static const char *const taken[] = { "state.json", "model.safetensors" };
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) {
        file.name = taken[i];
        little_saves(&l, 1, XD_ERROR_ARGUMENT, "already");
    }
    CHECK_EQ_STR(names_in(l.ctx, l.root), "");
    l.save.file_count = 0;
    l.save.root = NULL;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "no root");
    l.load.step = -2;
    (void)little_loads(&l, XD_ERROR_ARGUMENT, "step -2");
    little_destroy(&l);
}

XD_TEST(parts_that_make_no_sense_are_refused) {
    little l;
    little_create(&l);
    l.part[1].name = "a";
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "two tensors of model are named \"a\"");
    l.part[1].name = "__metadata__";
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "__metadata__");
    l.part[1].name = "b";
    l.part[1].ndim = 9;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "tensor 1 has 9 dimensions, allowed are 8");
    l.part[1].ndim = -1;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "tensor 1 has -1 dimensions");
    l.part[1].ndim = 1;
    l.part[1].range.end = WIDE + 1;
    little_saves(&l, 1, XD_ERROR_SHAPE, "positions [0, 7) of a region of 6 elements");
    l.part[1].range.end = WIDE;
    l.part[1].data = NULL;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "6 elements at NULL");
    l.part[1].data = l.values[1];
    xd_region region = region_whole(1, l.part[1].shape);
    region.interval[0][0].end = WIDE + 2;
    l.part[1].region = &region;
    little_saves(&l, 1, XD_ERROR_SHAPE, "not within the size 6 of dimension 0");
    region.ndim = 2;
    little_saves(&l, 1, XD_ERROR_SHAPE, "has 1 dimensions, its region 2");
    l.part[1].region = NULL;
    l.network.name = "no-name";
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "\"no-name\" is no name");
    CHECK_EQ_STR(names_in(l.ctx, l.root), "");
    little_destroy(&l);
}

/* Tensors of one type and length: only names tell that an optimizer or an average lists them otherwise. */
XD_TEST(lists_of_the_same_names_in_another_order_are_refused) {
    little l;
    xd_optimizer *adam = NULL;
    xd_checkpoint_average average = { "slow", NULL };
    xd_param params[3];
    little_create(&l);
    for (int i = 0; i < 3; i++) {
        static const char *const swapped[3] = { "a", "c", "b" };
        memset(&params[i], 0, sizeof params[i]);
        params[i].name = swapped[i];
        params[i].value = l.values[i == 0 ? 0 : 3 - i];
        params[i].dtype = XD_DTYPE_F32;
        params[i].count = WIDE;
    }
    const xd_optimizer_desc desc = xd_adamw_defaults(params, 3);
    CHECK_EQ_INT(xd_optimizer_create(l.ctx, &desc, &adam), XD_OK);
    CHECK_EQ_INT(average_create(l.ctx, params, 3, NULL, &average.ema), XD_OK);
    l.network.optimizer = adam;
    little_saves(&l, 1, XD_ERROR_ARGUMENT,
                 "tensor 1 of the optimizer is \"c\", that of the network is \"b\"");
    l.network.optimizer = NULL;
    l.network.averages = &average;
    l.network.average_count = 1;
    little_saves(&l, 1, XD_ERROR_ARGUMENT, "tensor 1 of the average is \"c\", that of the network is \"b\"");
    CHECK_EQ_STR(names_in(l.ctx, l.root), "");
    l.part[0].name = "mine.a", l.part[1].name = "mine.b", l.part[2].name = "mine.c"; /* names of its own */
    little_saves(&l, 1, XD_OK, NULL);
    xd_ema_destroy(average.ema);
    xd_optimizer_destroy(adam);
    little_destroy(&l);
}

/* ---- looking into one ---- */

/* By the definition: the sum of a finaliser of each element's bits and its index. */
static uint64_t fingerprint_of(const float *values, int count) {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        uint64_t x = bits + UINT64_C(0x9e3779b97f4a7c15) * ((uint64_t)i + 1);
        x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
        sum += x ^ (x >> 31);
    }
    return sum;
}

XD_TEST(an_open_checkpoint_lists_files_and_tensors) {
    little l;
    xd_checkpoint *c = NULL;
    little_create(&l);
    l.save.state = " {\"a\":[{}]} ";
    little_saves(&l, 12, XD_OK, NULL);
    const char *directory = path_in(l.root, "step-12");
    CHECK_EQ_INT(
        xd_checkpoint_open(l.ctx, &(xd_checkpoint_desc){ .directory = path_in(l.root, "step-13") }, &c),
        XD_ERROR_IO);
    CHECK_EQ_INT(xd_checkpoint_open(l.ctx, &(xd_checkpoint_desc){ .directory = directory }, &c), XD_OK);
    const xd_checkpoint_info info = xd_checkpoint_describe(c);
    CHECK(info.step == 12 && info.file_count == 2 && info.tensor_count == 3 && info.block_bytes == 4 << 20);
    for (int i = 0; i < 3; i++) {
        const xd_checkpoint_tensor_info *t = xd_checkpoint_tensor_at(c, i);
        CHECK_EQ_STR(t->name, l.part[i].name);
        CHECK(strcmp(t->group, "model") == 0 && t->file == 0 && t->dtype == XD_DTYPE_F32);
        CHECK(t->ndim == 1 && t->shape[0] == WIDE && t->end - t->begin == WIDE * sizeof(float));
        CHECK_EQ_INT(t->begin, 4096 + (size_t)i * WIDE * sizeof(float));
        CHECK(t->fingerprint == fingerprint_of(l.values[i], WIDE));
        CHECK_EQ_INT(xd_checkpoint_tensor_find(c, "model", t->name), i);
        CHECK_EQ_INT(xd_checkpoint_tensor_find(c, "optim", t->name), -1);
    }
    for (int i = 0; i < 2; i++) { /* the checksum of a whole file is that of its bytes */
        const xd_checkpoint_file_info *f = xd_checkpoint_file_at(c, i);
        char *data = NULL;
        size_t bytes = 0;
        CHECK_EQ_STR(f->name, i ? "state.json" : "model.safetensors");
        CHECK_EQ_STR(f->group, i ? NULL : "model");
        CHECK_EQ_INT(xd_file_load(l.ctx, path_in(directory, f->name), 0, &data, &bytes), XD_OK);
        CHECK(f->bytes == bytes && f->crc32c == xd_crc32c(0, data, bytes));
        xd_release(l.ctx, data);
    }
    CHECK(!xd_checkpoint_file_at(c, 2) && !xd_checkpoint_file_at(c, -1));
    CHECK(!xd_checkpoint_tensor_at(c, 3) && !xd_checkpoint_tensor_at(c, -1));
    xd_checkpoint_close(c);
    char *state = NULL;
    l.load.step = 12;
    CHECK_EQ_INT(xd_checkpoint_load(l.self, &l.load, NULL, &state), XD_OK);
    CHECK_EQ_STR(state, "{\"a\":[{}]}"); /* without the spaces around it */
    xd_release(l.ctx, state);
    little_destroy(&l);
}

XD_TEST(files_of_a_limited_size_are_a_model_directory_of_hugging_face) {
    little l;
    xd_weights *files = NULL;
    little_create(&l);
    l.save.max_shard_bytes = WIDE * sizeof(float) + 1; /* one tensor each */
    little_saves(&l, 1, XD_OK, NULL);
    const char *directory = path_in(l.root, "step-1");
    CHECK_EQ_STR(names_in(l.ctx, directory),
                 "manifest.json model-00001-of-00003.safetensors model-00002-of-00003.safetensors "
                 "model-00003-of-00003.safetensors model.safetensors.index.json state.json ");
    CHECK_EQ_INT(weights_open_directory(l.ctx, directory, NULL, &files), XD_OK);
    for (int i = 0; i < 3; i++) {
        float values[WIDE];
        const int64_t index = xd_weights_find(files, l.part[i].name);
        CHECK_EQ_INT(weights_read_bytes(files, index, 0, sizeof values, values), XD_OK);
        CHECK(memcmp(values, l.values[i], sizeof values) == 0);
    }
    xd_weights_close(files);
    memset(l.values, 0, sizeof l.values);
    l.load.step = 1;
    (void)little_loads(&l, XD_OK, NULL);
    CHECK_NEAR(l.values[2][5], 25, 0);
    CHECK_EQ_INT(xd_checkpoint_verify(l.ctx, directory), XD_OK);
    little_destroy(&l);
}

/* ---- what lies in a root ---- */

XD_TEST(only_exact_names_with_a_valid_manifest_are_checkpoints) {
    little l;
    int64_t step = -1;
    little_create(&l);
    CHECK_EQ_INT(xd_checkpoint_find(l.ctx, l.root, &step), XD_ERROR_MISSING);
    (void)little_loads(&l, XD_ERROR_MISSING, "step-0 is no checkpoint");
    little_saves(&l, 2, XD_OK, NULL);
    little_saves(&l, 10, XD_OK, NULL);
    static const char *const others[] = { "step-007",    "step-1.tmp",
                                          "old-step-99", "step-",
                                          "step-99x",    "step--5",
                                          "step-+5",     "step-99999999999999999999",
                                          "step-11.bak" };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        CHECK(rename(path_in(l.root, "step-10"), path_in(l.root, others[i])) == 0 &&
              xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == 2 &&
              rename(path_in(l.root, others[i]), path_in(l.root, "step-10")) == 0);
    CHECK(xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == 10);
    write_file(path_in(l.root, "latest"), "step-2\n", 7); /* a hint for people, nothing more */
    CHECK(xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == 10);
    CHECK(mkdir(path_in(l.root, "step-11"), 0777) == 0); /* without a manifest */
    CHECK(rename(path_in(l.root, "step-10"), path_in(l.root, "step-12")) ==
          0); /* with that of another step */
    CHECK(xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == 2);
    l.load.step = 12;
    (void)little_loads(&l, XD_ERROR_FORMAT, "the manifest is of step 10");
    little_saves(&l, 11, XD_ERROR_STATE, "step-11 exists");
    l.save.overwrite = true;
    little_saves(&l, 11, XD_OK, NULL);
    CHECK(xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == 11);
    little_destroy(&l);
}

XD_TEST(the_newest_stay_and_the_one_just_saved_and_what_is_no_checkpoint) {
    little l;
    little_create(&l);
    for (int step = 10; step <= 50; step += 10) little_saves(&l, step, XD_OK, NULL);
    CHECK(mkdir(path_in(l.root, "step-15"), 0777) == 0);
    l.save.keep = 3;
    little_saves(&l, 60, XD_OK, NULL);
    CHECK_EQ_STR(names_in(l.ctx, l.root), "latest step-15 step-40 step-50 step-60 ");
    l.save.keep = 2;
    little_saves(&l, 5, XD_OK, NULL); /* after going back */
    CHECK_EQ_STR(names_in(l.ctx, l.root), "latest step-15 step-5 step-60 ");
    char *latest = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_file_load(l.ctx, path_in(l.root, "latest"), 0, &latest, &bytes), XD_OK);
    CHECK_EQ_STR(latest, "step-5\n");
    xd_release(l.ctx, latest);
    little_destroy(&l);
}

XD_TEST(the_last_steps_that_there_can_be_are_found_and_go_as_others) {
    static const int64_t last[] = { INT64_MAX - 8, INT64_MAX - 7, INT64_MAX - 1, INT64_MAX };
    little l;
    int64_t step = -1;
    little_create(&l);
    for (size_t i = 0; i < sizeof last / sizeof last[0]; i++) {
        little_saves(&l, last[i], XD_OK, NULL);
        CHECK(xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == last[i]);
    }
    CHECK(rename(path_in(l.root, "step-9223372036854775807"), path_in(l.root, "step-9223372036854775808")) ==
          0);
    CHECK(xd_checkpoint_find(l.ctx, l.root, &step) == XD_OK && step == INT64_MAX - 1);
    l.save.keep = 2;
    little_saves(&l, 3, XD_OK, NULL);
    CHECK_EQ_STR(names_in(l.ctx, l.root), "latest step-3 step-9223372036854775806 step-9223372036854775808 ");
    little_destroy(&l);
}

/* A second save begins while the first one renames a file. */
static little *nested;
static xd_result nested_result;

static int rename_and_save(void *user, const char *from, const char *to) {
    (void)user;
    if (nested && nested_result == XD_OK) {
        little *other = nested;
        nested = NULL;
        other->save.step = 77;
        nested_result = xd_checkpoint_save(other->self, &other->save);
    }
    return rename(from, to);
}

XD_TEST(two_saves_at_once_and_a_root_that_is_a_file_are_refused) {
    little l, other;
    xd_ctx_desc hooked = scene_ctx_desc();
    xd_ctx *plain;
    little_create(&l);
    little_create(&other);
    plain = l.ctx;
    xd_comm_destroy(l.self);
    hooked.files.rename = rename_and_save;
    CHECK_EQ_INT(xd_ctx_create(&hooked, &l.ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(l.ctx, &l.self), XD_OK);
    other.save.root = l.root;
    nested = &other;
    little_saves(&l, 1, XD_OK, NULL);
    CHECK_EQ_INT(nested_result, XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(other.ctx)->message, "checkpoint.lock") != NULL);
    CHECK_EQ_STR(names_in(l.ctx, l.root), "latest step-1 ");
    write_file(path_in(l.root, "file"), "x", 1);
    l.save.root = path_in(l.root, "file");
    little_saves(&l, 1, XD_ERROR_IO, "file");
    l.save.root = path_in(l.root, "file/below");
    little_saves(&l, 1, XD_ERROR_IO, "file");
    l.save.root = path_in(l.root, "no/such"); /* folders above it are made */
    little_saves(&l, 1, XD_OK, NULL);
    xd_comm_destroy(l.self);
    xd_ctx_destroy(l.ctx);
    l.ctx = plain;
    CHECK_EQ_INT(xd_comm_self(l.ctx, &l.self), XD_OK);
    little_destroy(&l);
    little_destroy(&other);
}

/* ---- lists that differ from the checkpoint's ---- */

XD_TEST(missing_and_unexpected_tensors_and_other_shapes_are_refused_or_reported) {
    little l;
    xd_checkpoint_report r;
    little_create(&l);
    little_saves(&l, 0, XD_OK, NULL);
    memset(l.values, 0, sizeof l.values);
    l.part[0].name = "z";
    r = little_loads(&l, XD_ERROR_MISSING, "which has 1 that are not asked for: z, a");
    CHECK(r.missing == 1 && r.unexpected == 1 && r.loaded == 2);
    CHECK_EQ_STR(r.names, "z, a");
    CHECK_NEAR(l.values[1][3], 0, 0); /* nothing has been loaded */
    l.network.part_count = 2;
    l.network.parts = &l.part[1];
    r = little_loads(&l, XD_ERROR_UNEXPECTED, "1 tensors more: a");
    CHECK_EQ_INT(r.unexpected, 1);
    l.network.parts = l.part;
    l.network.part_count = 3;
    l.part[0].name = "a";
    l.part[2].shape[0] = l.part[2].range.end = WIDE - 1;
    r = little_loads(&l, XD_ERROR_SHAPE, "1 tensors have another shape");
    CHECK(r.wrong_shape == 1 && r.loaded == 2);
    CHECK_NEAR(l.values[1][3], 0, 0);
    l.load.lenient = true;
    l.part[0].name = "z";
    r = little_loads(&l, XD_OK, NULL);
    CHECK(r.missing == 1 && r.unexpected == 1 && r.wrong_shape == 1 && r.loaded == 1);
    CHECK_EQ_STR(r.names, "z, c, a");
    CHECK_NEAR(l.values[0][3], 0, 0);
    CHECK_NEAR(l.values[1][3], 13, 0);
    CHECK_NEAR(l.values[2][3], 0, 0);
    little_destroy(&l);
}

XD_TEST(types_are_converted_only_when_that_is_asked_for) {
    little l;
    xd_checkpoint_report r;
    double wide[WIDE];
    uint16_t half[WIDE];
    int32_t whole[WIDE];
    little_create(&l);
    for (int k = 0; k < WIDE; k++) l.values[1][k] = 1.0f + 1.0f / 512.0f + (float)k; /* bf16 rounds it */
    little_saves(&l, 0, XD_OK, NULL);
    l.part[0].dtype = XD_DTYPE_F64;
    l.part[0].data = wide;
    l.part[1].dtype = XD_DTYPE_BF16;
    l.part[1].data = half;
    (void)little_loads(&l, XD_ERROR_DTYPE,
                       "\"a\" is F64 here and F32 in the checkpoint, and convert is false");
    l.load.convert = true;
    l.load.staging_bytes = 64;
    r = little_loads(&l, XD_OK, NULL);
    CHECK(r.converted == 2 && r.loaded == 3);
    for (int k = 0; k < WIDE; k++) {
        uint16_t expected = 0;
        xd_store_f64(&expected, XD_DTYPE_BF16, 0, (double)l.values[1][k]);
        CHECK_NEAR(wide[k], k, 0);
        CHECK_EQ_INT(half[k], expected);
    }
    l.part[0].dtype = XD_DTYPE_I32;
    l.part[0].data = whole;
    (void)little_loads(&l, XD_ERROR_DTYPE, "which are not converted");
    little_destroy(&l);
}

/* ---- optimizers, averages, networks ---- */

static xd_result load_parts(scene *s, xd_comm *self, const char *root, const xd_checkpoint_network *network,
                            xd_checkpoint_report *report) {
    xd_checkpoint_load_desc desc;
    (void)s;
    memset(&desc, 0, sizeof desc);
    desc.root = root;
    desc.step = XD_CHECKPOINT_NEWEST;
    desc.networks = network;
    desc.network_count = 1;
    return xd_checkpoint_load(self, &desc, report, NULL);
}

XD_TEST(weights_load_alone_and_two_networks_lie_side_by_side) {
    const xd_ctx_desc plain = scene_ctx_desc();
    xd_ctx *ctx = NULL;
    xd_comm *self = NULL;
    scene *one = (scene *)malloc(2 * sizeof *one), *two = one + 1;
    xd_checkpoint_network networks[2], alone;
    xd_checkpoint_save_desc save;
    xd_checkpoint_report report;
    const char *root = new_root(), *directory = path_in(root, "step-3");
    CHECK_EQ_INT(xd_ctx_create(&plain, &ctx), XD_OK);
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    scene_create(one, ctx, 0, 1, 0);
    scene_create(two, ctx, 0, 1, 0);
    scene_step(two, 1);
    networks[0] = one->network;
    networks[1] = two->network;
    networks[1].name = "fake";
    memset(&save, 0, sizeof save);
    save.root = root;
    save.step = 3;
    save.networks = networks;
    save.network_count = 2;
    CHECK_EQ_INT(xd_checkpoint_save(self, &save), XD_OK);
    CHECK_EQ_INT(xd_checkpoint_verify(ctx, directory), XD_OK);
    CHECK_EQ_STR(names_in(ctx, directory),
                 "ema-fake-fast_2.safetensors ema-fake-slow.safetensors ema-fast_2.safetensors "
                 "ema-slow.safetensors extra-fake.safetensors manifest.json model.safetensors "
                 "optim-fake.safetensors optim.safetensors state.json ");
    scene_fill(one, 55);
    alone = networks[1]; /* the second network's weights into the first one's memory */
    alone.parts = one->part;
    alone.optimizer = NULL;
    alone.average_count = 0;
    CHECK_EQ_INT(load_parts(one, self, root, &alone, &report), XD_OK);
    CHECK_EQ_INT(report.loaded, SCENE_TENSORS);
    for (int i = 0; i < SCENE_TENSORS; i++)
        CHECK(memcmp(one->value[i], two->value[i],
                     (size_t)one->param[i].count * xd_dtype_size(scene_tensors[i].dtype)) == 0);
    CHECK_EQ_INT(*xd_optimizer_state_at(one->optimizer, 0).step, 0);
    alone.name = "critic";
    CHECK_EQ_INT(load_parts(one, self, root, &alone, &report), XD_ERROR_MISSING);
    CHECK_EQ_INT(report.missing, SCENE_TENSORS);

    xd_optimizer_desc sgd = { .params = one->param, .param_count = SCENE_TENSORS, .learning_rate = 1e-3 };
    sgd.kind = XD_OPTIMIZER_SGD; /* another one than that of the checkpoint */
    alone = networks[0];
    alone.optimizer = NULL;
    CHECK_EQ_INT(xd_optimizer_create(ctx, &sgd, &alone.optimizer), XD_OK);
    CHECK_EQ_INT(load_parts(one, self, root, &alone, NULL), XD_ERROR_STATE);
    CHECK(strstr(xd_last_error(ctx)->message, "the optimizer is sgd") != NULL);
    xd_optimizer_destroy(alone.optimizer);

    alone.optimizer = one->optimizer; /* a list that is not that of the parts */
    alone.part_count--;
    CHECK_EQ_INT(load_parts(one, self, root, &alone, NULL), XD_ERROR_ARGUMENT);
    CHECK(strstr(xd_last_error(ctx)->message, "the optimizer has 9 parameters, the network 8 parts") != NULL);
    remove_all(root);
    scene_destroy(one);
    scene_destroy(two);
    free(one);
    xd_comm_destroy(self);
    xd_ctx_destroy(ctx);
}

/* ---- ranks that disagree ---- */

typedef struct quarrel {
    char root[64];
    int which;
    const char *says;
    xd_result result[3];
} quarrel;

static void quarrel_begin(scene *s, const quarrel *q, xd_checkpoint_save_desc *d) {
    const bool me = s->rank == 1;
    switch (q->which) {
    case 0:
        if (me) s->part[2].name = "other";
        break;
    case 1:
        if (me) s->part[7].shape[0] = 10;
        break;
    case 2: d->step += me; break;
    case 3:
        if (me) s->network.average_count = 1;
        break;
    case 4: s->part[0].replica = true; break; /* nobody speaks */
    case 5:
        if (me) s->part[0].range.begin++;
        break;
    case 6: /* everybody speaks */ s->part[4 + 3].replica = false; break;
    case 7:
        if (me) *xd_optimizer_state_at(s->optimizer, 0).step += 1;
        break;
    default: d->overwrite = me; break;
    }
    if (q->which == 1 || q->which == 5) s->network.optimizer = NULL;
    if (q->which == 1 || q->which == 5) s->network.average_count = 0;
}

static xd_result quarrel_rank(xd_comm *world, void *argument) {
    quarrel *q = (quarrel *)argument;
    scene *s = (scene *)malloc(sizeof *s);
    xd_checkpoint_save_desc d;
    xd_ctx *ctx = xd_comm_ctx(world);
    memset(&d, 0, sizeof d);
    scene_create(s, ctx, xd_comm_rank(world), xd_comm_size(world), q->which == 6 ? 3 : 0);
    d.root = q->root;
    d.networks = &s->network;
    d.network_count = 1;
    quarrel_begin(s, q, &d);
    q->result[s->rank] = xd_checkpoint_save(world, &d);
    CHECK(q->result[s->rank] != XD_OK);
    if (!strstr(xd_last_error(ctx)->message, q->says)) CHECK_EQ_STR(xd_last_error(ctx)->message, q->says);
    scene_destroy(s);
    free(s);
    return XD_OK;
}

XD_TEST(ranks_that_disagree_all_return_an_error_that_says_where) {
    static const char *const says[] = {
        "differ first at tensor 2: \"layer.0.bias\" on rank 0, \"other\" on rank 1: model, F32 [",
        "differ first at tensor 7: \"frozen\" on rank 0, \"frozen\" on rank 1 in another file or with "
        "another type",
        "settings of a save: rank 1 passed",
        "on rank 1",
        "tensor \"embed.weight\": no rank holds element 0",
        "tensor \"embed.weight\": no rank holds element 34",
        "tensor \"frozen\": element 0 is held 3 times",
        "some rank has counted 0 steps, another 1",
        "overwrite",
    };
    const xd_ctx_desc desc = scene_ctx_desc();
    xd_ctx *ctx = NULL;
    quarrel q;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    memset(&q, 0, sizeof q);
    strcpy(q.root, new_root());
    for (q.which = 0; q.which < (int)(sizeof says / sizeof says[0]); q.which++) {
        q.says = says[q.which];
        CHECK_EQ_INT(xd_run_threads(3, &desc, quarrel_rank, &q, NULL), XD_OK);
        CHECK_EQ_STR(names_in(ctx, q.root), "");
    }
    remove_all(q.root);
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
