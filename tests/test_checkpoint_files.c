/* A save of a checkpoint is one transaction: killed at every file call, and with every call failing in turn, its root holds the
 * older checkpoints and, whole or not at all, the new one; and the next save leaves nothing but checkpoints. */

#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp, kill */
#endif

#include "checkpoint_files.h"
#include "checkpoint_scene.h"
#include "press_files.h"

#include <sys/wait.h>

/* ---- one rank: a tensor whose every element is the version ---- */

enum { ELEMENTS = 40 };

typedef struct saving {
    const char *root;
    int64_t step;
    int version, keep;
    bool overwrite;
} saving;

static xd_checkpoint_network one_tensor(xd_tensor_part *part, float *values) {
    xd_checkpoint_network network;
    memset(part, 0, sizeof *part);
    memset(&network, 0, sizeof network);
    part->name = "weight";
    part->dtype = XD_DTYPE_F32;
    part->ndim = 1;
    part->shape[0] = part->range.end = ELEMENTS;
    part->data = values;
    network.parts = part;
    network.part_count = 1;
    return network;
}

static xd_result save(xd_ctx *ctx, const saving *what) {
    float values[ELEMENTS];
    char state[40];
    xd_tensor_part part;
    xd_comm *self = NULL;
    const xd_checkpoint_network network = one_tensor(&part, values);
    xd_checkpoint_save_desc desc;
    for (int i = 0; i < ELEMENTS; i++) values[i] = (float)what->version;
    snprintf(state, sizeof state, "{\"version\":%d}", what->version);
    memset(&desc, 0, sizeof desc);
    desc.root = what->root;
    desc.step = what->step;
    desc.networks = &network;
    desc.network_count = 1;
    desc.state = state;
    desc.keep = what->keep;
    desc.overwrite = what->overwrite;
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    const xd_result result = xd_checkpoint_save(self, &desc);
    xd_comm_destroy(self);
    return result;
}

static xd_result save_step(xd_ctx *ctx, const char *root, int64_t step) {
    saving s;
    memset(&s, 0, sizeof s);
    s.root = root;
    s.step = step;
    s.version = (int)step;
    return save(ctx, &s);
}

/* The version of a step: -1 when it cannot be loaded, -2 when it is a mixture. */
static int version_of(xd_ctx *ctx, const char *root, int64_t step) {
    float values[ELEMENTS];
    char *state = NULL;
    int version = -1;
    xd_tensor_part part;
    xd_comm *self = NULL;
    const xd_checkpoint_network network = one_tensor(&part, values);
    xd_checkpoint_load_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.root = root;
    desc.step = step;
    desc.networks = &network;
    desc.network_count = 1;
    CHECK_EQ_INT(xd_comm_self(ctx, &self), XD_OK);
    if (xd_checkpoint_load(self, &desc, NULL, &state) == XD_OK) {
        CHECK(state && sscanf(state, "{\"version\":%d}", &version) == 1);
        for (int i = 0; i < ELEMENTS; i++)
            if (values[i] != (float)version) version = -2;
    }
    xd_release(ctx, state);
    xd_comm_destroy(self);
    return version;
}

static int64_t newest(xd_ctx *ctx, const char *root) {
    int64_t step = -1;
    return xd_checkpoint_find(ctx, root, &step) == XD_OK ? step : -1;
}

/* ---- each call in turn ---- */

/* As a process that is killed at its call n, or as one of which this call fails; whether that call came. */
static bool press_save(press *p, const saving *what, long n, bool kills) {
    int status = 0;
    p->calls = 0;
    p->kills = kills;
    p->failed = CALL_NONE;
    p->result = XD_OK;
    p->at = n;
    fflush(stdout);
    const pid_t child = kills ? fork() : -1;
    if (child == 0) _exit(save(p->ctx, what) == XD_OK ? 0 : 1);
    if (kills) {
        CHECK(waitpid(child, &status, 0) == child && (WIFSIGNALED(status) || status == 0));
    } else {
        p->result = save(p->ctx, what);
    }
    p->at = -1;
    return kills ? WIFSIGNALED(status) : p->calls > n;
}

XD_TEST(a_save_whose_every_call_is_the_last_or_fails_leaves_a_whole_checkpoint) {
    press p;
    press_start(&p);
    const char *root = new_root();
    for (int kills = 0; kills < 2; kills++) {
        int seen[3] = { 0, 0, 0 };
        long n = 0;
        saving what = { root, 2, 2, 0, false };
        for (bool met = true; met && n < 2000; n++) {
            CHECK_EQ_INT(save_step(p.ctx, root, 1), XD_OK);
            met = press_save(&p, &what, n, kills != 0);
            const bool told =
                p.result != XD_OK && strstr(xd_last_error(p.ctx)->message, "is complete") != NULL;
            const int64_t found = newest(p.ctx, root);
            CHECK(found == 1 || found == 2);
            CHECK(met || found == 2);
            if (!kills) CHECK_EQ_INT(found, p.result == XD_OK || told ? 2 : 1);
            if (!kills && found == 1 && p.failed != CALL_REMOVE) /* it has cleared up itself */
                CHECK_EQ_STR(names_in(p.ctx, root), "latest step-1 ");
            if (found > 0) seen[found]++;
            CHECK_EQ_INT(version_of(p.ctx, root, 1), 1);
            CHECK_EQ_INT(version_of(p.ctx, root, found), found);
            CHECK_EQ_INT(save_step(p.ctx, root, 3), XD_OK);
            CHECK_EQ_STR(names_in(p.ctx, root),
                         found == 1 ? "latest step-1 step-3 " : "latest step-1 step-2 step-3 ");
            remove_all(root);
        }
        printf("%ld calls: %d times the older one, %d times the new one\n", n - 1, seen[1], seen[2]);
        CHECK(n > 60 && seen[1] > 30 && seen[2] > 5);
    }
    xd_ctx_destroy(p.ctx);
}

XD_TEST(a_step_that_is_replaced_is_the_older_one_or_the_new_one_whatever_call_is_the_last_or_fails) {
    press p;
    press_start(&p);
    const char *root = new_root();
    for (int way = 0; way < 4; way++) { /* killed or failing, with an exchange of names or without */
        int seen[3] = { 0, 0, 0 };
        long n = 0;
        saving what = { root, 1, 2, 0, true };
        p.no_exchange = way >= 2;
        for (bool met = true; met && n < 2000; n++) {
            CHECK_EQ_INT(save_step(p.ctx, root, 1), XD_OK);
            met = press_save(&p, &what, n, way % 2 == 0);
            CHECK_EQ_INT(newest(p.ctx, root), 1);
            const int version = version_of(p.ctx, root, 1);
            CHECK(version == 1 || version == 2);
            CHECK(met || version == 2);
            if (version > 0) seen[version]++;
            CHECK_EQ_INT(save_step(p.ctx, root, 3), XD_OK);
            CHECK_EQ_INT(version_of(p.ctx, root, 1), version);
            CHECK_EQ_STR(names_in(p.ctx, root), "latest step-1 step-3 ");
            remove_all(root);
        }
        CHECK(n > 60 && seen[1] > 30 && seen[2] > 5);
    }
    xd_ctx_destroy(p.ctx);
}

XD_TEST(of_the_checkpoints_that_go_none_is_left_in_part_whatever_call_is_the_last_or_fails) {
    press p;
    press_start(&p);
    const char *root = new_root();
    for (int kills = 0; kills < 2; kills++) {
        int gone = 0;
        long n = 0;
        saving what = { root, 4, 4, 2, false };
        for (bool met = true; met && n < 2000; n += n < 60 ? 30 : 1) { /* the end is what differs */
            for (int step = 1; step <= 3; step++) CHECK_EQ_INT(save_step(p.ctx, root, step), XD_OK);
            met = press_save(&p, &what, n, kills != 0);
            const int64_t found = newest(p.ctx, root);
            CHECK(found == 3 || found == 4);
            CHECK_EQ_INT(version_of(p.ctx, root, 3), 3);
            if (found == 3) CHECK_EQ_INT(version_of(p.ctx, root, 2), 2);
            gone += version_of(p.ctx, root, 2) < 0;
            saving last = { root, 5, 5, 2, false };
            CHECK_EQ_INT(save(p.ctx, &last), XD_OK);
            CHECK_EQ_STR(names_in(p.ctx, root),
                         found == 4 ? "latest step-4 step-5 " : "latest step-3 step-5 ");
            remove_all(root);
        }
        CHECK(gone > 3);
    }
    xd_ctx_destroy(p.ctx);
}

/* ---- several ranks ---- */

typedef struct together {
    const char *root;
    xd_result result[3];
} together;

static xd_result save_together(xd_comm *world, void *argument) {
    together *t = (together *)argument;
    scene *s = (scene *)malloc(sizeof *s);
    xd_checkpoint_save_desc desc;
    scene_create(s, xd_comm_ctx(world), xd_comm_rank(world), xd_comm_size(world), 0);
    memset(&desc, 0, sizeof desc);
    desc.root = t->root;
    desc.step = 2;
    desc.networks = &s->network;
    desc.network_count = 1;
    t->result[s->rank] = xd_checkpoint_save(world, &desc);
    scene_destroy(s);
    free(s);
    return XD_OK;
}

XD_TEST(when_a_call_of_one_rank_fails_all_ranks_return_an_error_and_nothing_is_left) {
    press p;
    press_start(&p);
    const xd_ctx_desc desc = *xd_ctx_settings(p.ctx);
    const char *root = new_root();
    together t;
    int failed = 0;
    memset(&t, 0, sizeof t);
    t.root = root;
    bool met = true;
    for (long n = 0; met && n < 3000; n += 5) {
        CHECK_EQ_INT(save_step(p.ctx, root, 1), XD_OK);
        p.calls = 0;
        p.failed = CALL_NONE;
        p.at = n;
        CHECK_EQ_INT(xd_run_threads(3, &desc, save_together, &t, NULL), XD_OK);
        p.at = -1;
        met = p.calls > n;
        for (int r = 1; r < 3; r++) CHECK_EQ_INT(t.result[r] == XD_OK, t.result[0] == XD_OK);
        const int64_t found = newest(p.ctx, root);
        CHECK(found == 2 || (found == 1 && t.result[0] != XD_OK));
        if (found == 1 && p.failed != CALL_REMOVE) CHECK_EQ_STR(names_in(p.ctx, root), "latest step-1 ");
        failed += t.result[0] != XD_OK;
        remove_all(root);
    }
    CHECK(failed > 20);
    xd_ctx_destroy(p.ctx);
}

XD_TEST_MAIN()
