/* A distillation as one record: what a checkpoint has to hold, what it refuses to go on from, and what is missing. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp */
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "dmd/state.h"
#endif

#include "checkpoint_files.h"
#include "dmd_scene.h"

enum { BINS = 4, STEPS = 8, SAVED_AT = 3, MOST_TEXT = 2048 };

/* ---- a whole run through files ---- */

typedef struct trial {
    dmd_run run;
    const char *root; /* of checkpoints */
    int from, to;
    bool saves, leave_averages, leave_judge;
    xd_result result; /* of the load */
    char message[512];
    char text[MOST_TEXT]; /* what was saved, or loaded */
} trial;

static int trial_networks(const trial *t, dmd_net *nets, xd_checkpoint_network *networks,
                          xd_checkpoint_average *averages) {
    const int roles = dmd_records(nets, networks, averages);
    for (int role = 0; role < roles && t->saves && t->leave_averages; role++)
        networks[role].average_count = 0;
    return t->saves && t->leave_judge ? roles - 1 : roles;
}

static xd_result trial_save(xd_comm *world, trial *t, dmd_net *nets, xd_dmd *dmd) {
    xd_checkpoint_network networks[3];
    xd_checkpoint_average averages[3];
    xd_checkpoint_save_desc save = { .root = t->root, .step = t->to, .networks = networks };
    char *text = NULL;
    save.network_count = trial_networks(t, nets, networks, averages);
    XD_TRY(xd_dmd_state_save(dmd, &text));
    save.state = text;
    const xd_result result = xd_checkpoint_save(world, &save);
    if (xd_comm_rank(world) == 0) snprintf(t->text, sizeof t->text, "%s", text);
    xd_release(xd_comm_ctx(world), text);
    return result;
}

static xd_result trial_load(xd_comm *world, trial *t, dmd_net *nets, xd_dmd *dmd) {
    xd_checkpoint_network networks[3];
    xd_checkpoint_average averages[3];
    xd_checkpoint_load_desc load = { .root = t->root, .step = XD_CHECKPOINT_NEWEST, .networks = networks };
    char *text = NULL;
    load.network_count = trial_networks(t, nets, networks, averages);
    XD_TRY(xd_checkpoint_load(world, &load, NULL, &text));
    xd_result result = xd_dmd_state_load(dmd, text, NULL);
    if (xd_comm_rank(world) == 0 && text) snprintf(t->text, sizeof t->text, "%s", text);
    xd_release(xd_comm_ctx(world), text);
    for (int role = 0; role < XD_DMD_TEACHER && result == XD_OK; role++)
        result = xd_parallel_publish(nets[role].parallel);
    return result;
}

static xd_result trial_steps(xd_comm *world, trial *t, dmd_net *nets, xd_dmd *dmd) {
    dmd_rank rank = { .run = &t->run };
    if (t->from > 0) {
        const xd_result loaded = trial_load(world, t, nets, dmd);
        if (xd_comm_rank(world) == 0 && loaded != XD_OK) {
            t->result = loaded;
            snprintf(t->message, sizeof t->message, "%s", xd_last_error(xd_comm_ctx(world))->message);
        }
        XD_TRY(loaded);
        CHECK_EQ_INT(xd_dmd_describe(dmd).step, t->from);
    }
    for (rank.step = t->from; rank.step < t->to; rank.step++) {
        xd_dmd_values values;
        XD_TRY(xd_dmd_step(dmd, dmd_batch, &rank, &values));
        if (xd_comm_rank(world) == 0) t->run.values[rank.step] = values;
    }
    if (t->saves) XD_TRY(trial_save(world, t, nets, dmd));
    return dmd_hash_all(world, nets, &t->run);
}

static xd_result trial_rank(xd_comm *world, void *argument) {
    trial *t = (trial *)argument;
    dmd_net nets[XD_DMD_ROLES];
    xd_dmd_desc desc;
    xd_dmd *dmd = NULL;
    xd_result result = dmd_make_all(world, &t->run, NULL, nets, &desc);
    if (result == XD_OK) result = xd_dmd_create(xd_comm_ctx(world), &desc, &dmd);
    if (result == XD_OK) result = trial_steps(world, t, nets, dmd);
    xd_dmd_destroy(dmd);
    dmd_free_all(nets);
    return result;
}

static void trial_run(trial *t, int ranks) {
    const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
    xd_error error = { 0 };
    const xd_result result = xd_run_threads(ranks, &desc, trial_rank, t, &error);
    if (t->result == XD_OK) CHECK_EQ_INT(result, XD_OK);
    if (t->result == XD_OK && result != XD_OK) printf("rank %d: %s\n", error.rank, error.message);
    if (t->result == XD_OK) t->result = result;
}

static xd_dmd_desc trial_settings(void) {
    xd_dmd_desc d = dmd_settings(XD_DMD_MODELOPT, 3);
    d.frequency = 3;
    d.gan.weight = 0.5;
    d.gan.fdistill.on = true;
    d.gan.fdistill.bins = BINS;
    d.gan.fdistill.rate = 0.75;
    return d;
}

static trial *new_trial(const char *root, int from, int to) {
    trial *t = (trial *)calloc(1, sizeof *t);
    t->run.desc = trial_settings();
    t->run.gan = true;
    t->run.poisoned = -1;
    t->root = root;
    t->from = from;
    t->to = to;
    return t;
}

XD_TEST(a_run_goes_on_from_one_checkpoint_on_another_layout_to_the_same_bits) {
    const char *root = new_root();
    trial *whole = new_trial(root, 0, STEPS), *first = new_trial(root, 0, SAVED_AT + 1),
          *second = new_trial(root, SAVED_AT + 1, STEPS);
    first->saves = true;
    second->run.fsdp = true;
    trial_run(whole, 1);
    trial_run(first, 3);
    trial_run(second, 2);
    CHECK(whole->run.hash != 0 && whole->run.hash == second->run.hash);
    for (int step = SAVED_AT + 1; step < STEPS; step++)
        CHECK(memcmp(&whole->run.values[step], &second->run.values[step], sizeof(xd_dmd_values)) == 0);
    CHECK(strcmp(first->text, second->text) == 0);
    CHECK(strstr(first->text, "\"phase\":\"others\""));
    free(whole);
    free(first);
    free(second);
    remove_all(root);
}

XD_TEST(a_checkpoint_without_an_average_or_the_discriminator_is_an_error_that_names_it) {
    for (int variant = 0; variant < 2; variant++) {
        const char *root = new_root();
        trial *first = new_trial(root, 0, 2), *second = new_trial(root, 2, 4);
        first->saves = true;
        first->leave_averages = variant == 0;
        first->leave_judge = variant == 1;
        second->result = XD_OK;
        trial_run(first, 2);
        const xd_ctx_desc desc = { .reduction = XD_REDUCTION_INVARIANT };
        CHECK_EQ_INT(xd_run_threads(2, &desc, trial_rank, second, NULL), XD_ERROR_MISSING);
        CHECK_EQ_INT(second->result, XD_ERROR_MISSING);
        CHECK(strstr(second->message, variant == 0 ? "average \"slow\"" : "judge"));
        if (!strstr(second->message, variant == 0 ? "average \"slow\"" : "judge"))
            printf("%s\n", second->message);
        free(first);
        free(second);
        remove_all(root);
    }
}

/* ---- the text ---- */

typedef struct made {
    xd_ctx *ctx;
    xd_dmd *dmd;
    dmd_net nets[XD_DMD_ROLES];
} made;

/* A distillation of these settings, of networks that are never called. */
static made make(const xd_dmd_desc *settings, bool judged) {
    made m;
    xd_dmd_desc d = *settings;
    memset(&m, 0, sizeof m);
    CHECK_EQ_INT(xd_ctx_create(NULL, &m.ctx), XD_OK);
    for (int role = 0; role < XD_DMD_ROLES; role++) {
        if (role == XD_DMD_DISCRIMINATOR && !judged) continue;
        d.networks[role] = dmd_network(&m.nets[role], (xd_dmd_role)role);
        d.networks[role].user = NULL;
    }
    const xd_result result = xd_dmd_create(m.ctx, &d, &m.dmd);
    CHECK_EQ_INT(result, XD_OK);
    if (result != XD_OK) printf("%s\n", xd_last_error(m.ctx)->message);
    return m;
}

static void unmake(made *m) {
    xd_dmd_destroy(m->dmd);
    xd_ctx_destroy(m->ctx);
}

static const double odd_bins[BINS] = { 1.0 / 3.0, 2.0, 1e-300, 0.1 };

/* The text of a run in its middle. */
static void middle(char *out) {
    const xd_dmd_desc d = trial_settings();
    const xd_dmd_record record = { .step = 7, .updates = { 3, 4, 4 }, .seed = 11, .warm_up = 5 };
    made m = make(&d, true);
    char *text = NULL;
    CHECK_EQ_INT(xd_dmd_resume(m.dmd, &record), XD_OK);
    CHECK_EQ_INT(xdi_dmd_set_bins(m.dmd, odd_bins, BINS), XD_OK);
    CHECK_EQ_INT(xd_dmd_state_save(m.dmd, &text), XD_OK);
    CHECK(strlen(text) < MOST_TEXT);
    snprintf(out, MOST_TEXT, "%s", text);
    xd_release(m.ctx, text);
    unmake(&m);
}

static void check_middle(const made *m) {
    const xd_dmd_record r = xd_dmd_describe(m->dmd);
    double bins[BINS];
    CHECK_EQ_INT(r.step, 7);
    CHECK_EQ_INT(r.updates[XD_DMD_STUDENT], 3);
    CHECK_EQ_INT(r.updates[XD_DMD_FAKE_SCORE], 4);
    CHECK_EQ_INT(r.updates[XD_DMD_DISCRIMINATOR], 4);
    CHECK_EQ_INT(r.warm_up, 5);
    CHECK_EQ_INT(xdi_dmd_bins(m->dmd, bins), XD_OK);
    CHECK(memcmp(bins, odd_bins, sizeof bins) == 0);
}

static void check_fresh(const made *m) {
    const xd_dmd_record r = xd_dmd_describe(m->dmd);
    double bins[BINS];
    CHECK(r.step == 0 && r.warm_up == 0 && r.updates[0] == 0 && r.updates[1] == 0 && r.updates[2] == 0);
    CHECK_EQ_INT(xdi_dmd_bins(m->dmd, bins), XD_OK);
    for (int k = 0; k < BINS; k++) CHECK(bins[k] == 1.0);
}

XD_TEST(a_state_is_read_to_the_same_bits_alone_and_within_the_callers) {
    const xd_dmd_desc d = trial_settings();
    char text[MOST_TEXT], within[MOST_TEXT + 64], *again = NULL;
    middle(text);
    snprintf(within, sizeof within, "{\"mine\": [1, 2], \"dmd\": %s, \"step\": -4}", text);
    for (int k = 0; k < 2; k++) {
        made m = make(&d, true);
        CHECK_EQ_INT(xd_dmd_state_load(m.dmd, k ? within : text, NULL), XD_OK);
        check_middle(&m);
        CHECK_EQ_INT(xd_dmd_state_save(m.dmd, &again), XD_OK);
        CHECK(strcmp(text, again) == 0);
        xd_release(m.ctx, again);
        unmake(&m);
    }
}

/* `now` instead of the first `was` of the text. */
static void replace(char *text, const char *was, const char *now) {
    char copy[MOST_TEXT];
    char *at = strstr(text, was);
    CHECK(at != NULL);
    if (!at) return;
    snprintf(copy, sizeof copy, "%.*s%s%s", (int)(at - text), text, now, at + strlen(was));
    memcpy(text, copy, sizeof copy);
}

static void refuse(const xd_dmd_desc *settings, bool judged, const char *text, const xd_dmd_state_desc *desc,
                   xd_result expected, const char *says) {
    made m = make(settings, judged);
    CHECK_EQ_INT(xd_dmd_state_load(m.dmd, text, desc), expected);
    const xd_error *error = xd_last_error(m.ctx);
    CHECK(error && strstr(error->message, says));
    if (error && !strstr(error->message, says)) printf("\"%s\" is not in: %s\n", says, error->message);
    if (judged && settings->gan.fdistill.bins == BINS) check_fresh(&m);
    unmake(&m);
}

XD_TEST(another_run_is_refused_with_both_values) {
    static const double other_rungs[] = { 0.999, 0.6, 0.3, 0.0 };
    const xd_dmd_desc good = trial_settings();
    xd_dmd_desc d;
    char text[MOST_TEXT];
    middle(text);
    d = good, d.seed = 12;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "the run has seed 11, the distillation 12");
    d = good, d.frequency = 5;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH,
           "ratio: the run has \"MODELOPT, 1 in 3 after 0\", the distillation \"MODELOPT, 1 in 5 after 0\"");
    d = good, d.lead = 2;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "the distillation \"MODELOPT, 1 in 3 after 2\"");
    d = good, d.alternation = XD_DMD_FASTGEN;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "the distillation \"FASTGEN, 1 in 3 after 0\"");
    d = good, d.schedule.clamp_min = 0.25;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "clamp_min 0.25\"");
    d = good, d.rungs.list = other_rungs;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "rungs: the run has \"3 steps from 0.999");
    d = good, d.gan.fdistill.on = false;
    refuse(&d, false, text, NULL, XD_ERROR_MISMATCH,
           "roles: the run has \"student with 0 averages, fake score with 0 averages, discriminator with 0 "
           "averages\", the distillation \"student with 0 averages, fake score with 0 averages\"");
    d = good, d.gan.fdistill.rate = 0.5;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "allow_settings permits others): the run has \"");
    d = good, d.rungs.hold = 4;
    refuse(&d, true, text, NULL, XD_ERROR_MISMATCH, "allow_settings permits others): the run has \"");
    d = good, d.gan.fdistill.bins = 5;
    refuse(&d, true, text, &(xd_dmd_state_desc){ .allow_settings = true }, XD_ERROR_MISMATCH,
           "the run has 4 bins of f-distill, the distillation 5");
}

XD_TEST(other_settings_pass_when_they_are_allowed) {
    xd_dmd_desc d = trial_settings();
    const xd_dmd_state_desc allow = { .allow_settings = true };
    char text[MOST_TEXT];
    middle(text);
    d.gan.weight = 2.0;
    d.gan.fdistill.rate = 0.5;
    made m = make(&d, true);
    CHECK_EQ_INT(xd_dmd_state_load(m.dmd, text, &allow), XD_OK);
    check_middle(&m);
    unmake(&m);
    d.gan.fdistill.on = false;
    m = make(&d, true);
    CHECK_EQ_INT(xd_dmd_state_load(m.dmd, text, &allow), XD_OK);
    CHECK_EQ_INT(xd_dmd_describe(m.dmd).step, 7);
    unmake(&m);
}

/* From `key` to the next comma, or for the last member from the comma before it. */
static void cut(char *text, const char *key) {
    char *at = strstr(text, key), *end = at ? strstr(at, ",\"") : NULL;
    CHECK(at != NULL);
    if (!at) return;
    if (end)
        memmove(at, end + 1, strlen(end + 1) + 1);
    else
        memcpy(at - 1, "}", 2);
}

XD_TEST(a_missing_part_is_an_error_that_names_it_unless_it_is_allowed) {
    static const char *const keys[] = { "version", "step",     "student", "fake_score", "discriminator",
                                        "warm_up", "phase",    "seed",    "schedule",   "rungs",
                                        "ratio",   "settings", "roles",   "bins" };
    const xd_dmd_desc d = trial_settings();
    for (int k = 0; k < (int)(sizeof keys / sizeof *keys); k++) {
        char text[MOST_TEXT], key[32], says[64];
        middle(text);
        snprintf(key, sizeof key, "\"%s\":", keys[k]);
        snprintf(says, sizeof says, "has no \"%s\"", keys[k]);
        cut(text, key);
        refuse(&d, true, text, NULL, XD_ERROR_MISSING, says);
        const int part = strcmp(keys[k], "warm_up") == 0    ? (int)XD_DMD_STATE_WARM_UP
                         : strcmp(keys[k], "bins") == 0     ? (int)XD_DMD_STATE_BINS
                         : strcmp(keys[k], "settings") == 0 ? (int)XD_DMD_STATE_SETTINGS
                                                            : 0;
        const xd_dmd_state_desc allow = { .allow_missing = part ? part : 7 };
        if (part == 0) {
            refuse(&d, true, text, &allow, XD_ERROR_MISSING, says);
            continue;
        }
        made m = make(&d, true);
        CHECK_EQ_INT(xd_dmd_state_load(m.dmd, text, &allow), XD_OK);
        CHECK_EQ_INT(xd_dmd_describe(m.dmd).step, 7);
        CHECK_EQ_INT(xd_dmd_describe(m.dmd).warm_up, part == (int)XD_DMD_STATE_WARM_UP ? 0 : 5);
        unmake(&m);
    }
    refuse(&d, true, NULL, NULL, XD_ERROR_MISSING,
           "the checkpoint has no state of a distillation of seed 11");
}

XD_TEST(texts_that_are_cut_or_garbled_are_refused_and_change_nothing) {
    const xd_dmd_desc d = trial_settings();
    char text[MOST_TEXT], bad[MOST_TEXT];
    made m = make(&d, true);
    middle(text);
    const size_t bytes = strlen(text);
    for (size_t i = 0; i < bytes; i++) {
        memcpy(bad, text, bytes + 1);
        bad[i] = 0;
        CHECK(xd_dmd_state_load(m.dmd, bad, NULL) != XD_OK);
        memcpy(bad, text, bytes + 1);
        bad[i] = '!';
        CHECK(xd_dmd_state_load(m.dmd, bad, NULL) != XD_OK);
    }
    check_fresh(&m);
    CHECK_EQ_INT(xd_dmd_state_load(m.dmd, text, NULL), XD_OK);
    check_middle(&m);
    unmake(&m);
}

XD_TEST(states_that_contradict_themselves_are_refused) {
    static const struct {
        const char *was, *now;
        xd_result result;
        const char *says;
    } cases[] = {
        { "\"xdistill.dmd\"", "\"other\"", XD_ERROR_FORMAT, "kind \"other\"" },
        { "\"version\":1", "\"version\":2", XD_ERROR_UNSUPPORTED, "version 2; 1 can be read" },
        { "\"step\":7", "\"step\":6", XD_ERROR_MISMATCH, "phase: the run has \"others\"" },
        { "\"step\":7", "\"step\":-2", XD_ERROR_MISMATCH, "phase" },
        { "\"step\":7", "\"step\":7.5", XD_ERROR_FORMAT, "\"step\"" },
        { "\"step\":7", "\"step\":4294967297", XD_ERROR_ARGUMENT, "step 4294967297" },
        { "\"student\":3", "\"student\":8", XD_ERROR_ARGUMENT, "8 updates of the student in 7 steps" },
        { "\"student\":3", "\"student\":true", XD_ERROR_FORMAT, "\"student\"" },
        { "\"warm_up\":5", "\"warm_up\":-5", XD_ERROR_ARGUMENT, "-5 of warm-up" },
        { "\"seed\":11", "\"seed\":-11", XD_ERROR_FORMAT, "\"seed\"" },
        { "\"warm_up\":5", "\"warm_up\":5,\"more\":1", XD_ERROR_FORMAT, "\"more\" is no part" },
        { "\"warm_up\":5", "\"warm_up\":5,\"kind version\":1", XD_ERROR_FORMAT,
          "\"kind version\" is no part" },
        { "\"warm_up\":5", "\"warm_up\":5,\"\":1", XD_ERROR_FORMAT, "\"\" is no part" },
        { "\"bins\":[", "\"bins\":[3,", XD_ERROR_MISMATCH, "the run has 5 bins of f-distill" },
        { "\"bins\":[", "\"bins\":[\"x\",", XD_ERROR_MISMATCH, "the run has 5 bins" },
        { "0.1]", "-0.1]", XD_ERROR_FORMAT, "bin 3 of 4 is no number above 0" },
        { "0.1]", "null]", XD_ERROR_FORMAT, "bin 3 of 4" },
        { "0.1]", "1e999]", XD_ERROR_FORMAT, "" },
    };
    const xd_dmd_desc d = trial_settings();
    for (int k = 0; k < (int)(sizeof cases / sizeof *cases); k++) {
        char text[MOST_TEXT];
        middle(text);
        replace(text, cases[k].was, cases[k].now);
        refuse(&d, true, text, NULL, cases[k].result, cases[k].says);
    }
    refuse(&d, true, "[1]", NULL, XD_ERROR_FORMAT, "kind \"\"");
    refuse(&d, true, "{}", &(xd_dmd_state_desc){ .allow_missing = 8 }, XD_ERROR_ARGUMENT,
           "allow_missing 8; sums up to 7");
}

XD_TEST_MAIN()
