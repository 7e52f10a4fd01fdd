/* A process that is forked from one with contexts, ranks and savers: what it destroys ends at once and harms nothing of the other,
 * what it calls for other ranks is refused at once. Alarms end children that hang. */
#if !defined(_GNU_SOURCE)
#    define _GNU_SOURCE /* mkdtemp */
#endif
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "base/publish_internal.h"
#endif
#include "makers.h"
#include "vocab_calls.h"
#include "checkpoint_files.h"
#include "checkpoint_scene.h"
#include "node_world.h"
#include "parallel.h"
#include "xd_test.h"

#include <sys/stat.h>

enum { SECONDS = 10, FORKS = 30 };

/* Forks; the child runs the function under an alarm. Counts its failed checks here. */
static void in_child(void (*run)(void *argument), void *argument) {
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(SECONDS);
        xd_test_failures = 0;
        run(argument);
        fflush(stdout);
        _exit(xd_test_failures > 0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ_INT(status, 0);
}

static void refused(xd_ctx *ctx, xd_result result, const char *words) {
    CHECK_EQ_INT(result, XD_ERROR_STATE);
    const char *message = xd_last_error(ctx)->message;
    if (!strstr(message, words)) CHECK_EQ_STR(message, words);
}

/* ---- pools ---- */

enum { TOKENS = 8, VOCABULARY = 30001 };

typedef struct pooled {
    xd_ctx *ctx;
    xd_vocab *vocab;
    xd_loss_desc d;
    xd_loss_values values;
    const float *gradient;
} pooled;

static float logits[TOKENS * VOCABULARY], gradient[TOKENS * VOCABULARY], first[TOKENS * VOCABULARY];

static void use_and_destroy(void *argument) {
    pooled *p = (pooled *)argument;
    xd_loss_values values;
    memset(gradient, 0, sizeof gradient);
    CHECK_EQ_INT(xd_loss(p->ctx, &p->d, &values), XD_OK);
    CHECK(values.loss == p->values.loss && memcmp(gradient, first, sizeof first) == 0);
    xd_vocab_destroy(p->vocab);
    xd_ctx_destroy(p->ctx);
}

static void destroy_only(void *argument) {
    pooled *p = (pooled *)argument;
    xd_vocab_destroy(p->vocab);
    xd_ctx_destroy(p->ctx);
}

XD_TEST(a_forked_child_computes_on_its_one_thread_and_destroys_a_context_with_a_pool) {
    static int32_t labels[TOKENS];
    pooled p;
    uint64_t state = 3;
    memset(&p, 0, sizeof p);
    p.ctx = open_ctx(2, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    for (int i = 0; i < TOKENS * VOCABULARY; i++) logits[i] = 4.0f * number(&state);
    CHECK_EQ_INT(vocab_even(p.ctx, NULL, VOCABULARY, &p.vocab), XD_OK);
    p.d.student = xd_rows_of(logits, XD_DTYPE_F32, TOKENS, VOCABULARY);
    p.d.common.gradient = xd_rows_of(gradient, XD_DTYPE_F32, TOKENS, VOCABULARY);
    p.d.common.labels = xd_ids_of(labels, XD_DTYPE_I32);
    p.d.vocab = p.vocab;
    p.d.hard_weight = 1.0;
    CHECK_EQ_INT(xd_loss(p.ctx, &p.d, &p.values), XD_OK);
    memcpy(first, gradient, sizeof first);
    for (int i = 0; i < FORKS; i++) { /* at any moment of the threads' way to sleep */
        CHECK_EQ_INT(xd_loss(p.ctx, &p.d, &p.values), XD_OK);
        in_child(i % 2 ? use_and_destroy : destroy_only, &p);
    }
    use_and_destroy(&p); /* the pool here is whole */
}

/* ---- ranks that are threads ---- */

static xd_result forking_rank(xd_comm *world, void *argument) {
    const pid_t *parent = (const pid_t *)argument;
    if (xd_comm_rank(world) > 0) return xd_barrier(world);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        float one = 1.0f;
        alarm(SECONDS);
        xd_test_failures = 0;
        refused(xd_comm_ctx(world), xd_all_reduce(world, &one, &one, 1, XD_DTYPE_F32, XD_SUM),
                "was forked from process ");
        return XD_OK; /* to xd_run_threads, which has no threads here */
    }
    int status = -1;
    CHECK(child > 0 && *parent == getpid());
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ_INT(status, 0);
    return xd_barrier(world);
}

XD_TEST(ranks_that_are_threads_are_not_waited_for_in_a_child) {
    const pid_t parent = getpid();
    xd_error error = { XD_OK, NULL, 0, NULL, 0, 0, "" };
    const xd_result result = xd_run_threads(3, NULL, forking_rank, (void *)(uintptr_t)&parent, &error);
    if (getpid() != parent) {
        CHECK_EQ_INT(result, XD_ERROR_STATE);
        CHECK(strstr(error.message, "rank 0 returned in process ") != NULL);
        fflush(stdout);
        _exit(xd_test_failures > 0);
    }
    CHECK_EQ_INT(result, XD_OK);
}

/* ---- ranks that are processes ---- */

typedef struct noded {
    xd_comm *world;
    xd_queue *queue;
    xd_ticket ticket;
    xd_route *route;
    float sent, received;
} noded;

static xd_collective sum_of(noded *n) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = XD_COLLECTIVE_ALL_REDUCE;
    c.send = &n->sent;
    c.recv = &n->received;
    c.count = 1;
    c.dtype = XD_DTYPE_F32;
    c.op = XD_SUM;
    return c;
}

static void call_everything(noded *n) {
    xd_ctx *ctx = xd_comm_ctx(n->world);
    const xd_collective c = sum_of(n);
    xd_comm *made = NULL;
    xd_rows rows;
    xd_route_window window;
    xd_queue *queue = NULL;
    refused(ctx, xd_collective_run(n->world, &c), "which alone is rank ");
    refused(ctx, xd_send(n->world, &n->sent, 1, XD_DTYPE_F32, 0), "was forked from process ");
    refused(ctx, xd_exchange(n->world, NULL, 0), "was forked from process ");
    refused(ctx, xd_agree(n->world, XD_OK), "was forked from process ");
    refused(ctx, xd_comm_split(n->world, 0, 0, &made), "was forked from process ");
    refused(ctx, xd_comm_shrink(n->world, 1.0, &made), "was forked from process ");
    refused(ctx, xd_queue_create(n->world, NULL, &queue), "was forked from process ");
    refused(ctx, xd_queue_start(n->queue, &c, NULL), "which alone has the queue's thread");
    refused(ctx, xd_queue_wait(n->queue, n->ticket), "which alone has the queue's thread");
    refused(ctx, xd_queue_wait_all(n->queue), "which alone has the queue's thread");
    CHECK(xd_queue_done(n->queue, n->ticket) && xd_queue_describe(n->queue).form == XD_QUEUE_WORKER);
    if (xd_comm_rank(n->world) == 0)
        refused(ctx, xd_route_slot(n->route, &rows, NULL), "was forked from process ");
    else
        refused(ctx, xd_route_take(n->route, &window), "was forked from process ");
    CHECK(made == NULL && queue == NULL);
    xd_comm_abort(n->world); /* the other rank must not be told that this one gives up */
}

static void call_and_destroy(void *argument) {
    noded *n = (noded *)argument;
    xd_ctx *ctx = xd_comm_ctx(n->world);
    call_everything(n);
    xd_route_destroy(n->route);
    xd_queue_destroy(n->queue);
    xd_comm_destroy(n->world);
    xd_ctx_destroy(ctx);
}

static xd_result forking_process(xd_comm *world, void *argument) {
    const int rank = xd_comm_rank(world);
    noded n = { world, NULL, { 0 }, NULL, 1.0f, 0.0f };
    xd_route_desc d;
    (void)argument;
    memset(&d, 0, sizeof d);
    d.samples = 4;
    d.length = 2;
    d.columns = 3;
    if (rank == 0) d.teacher.sample_count = 4, d.teacher.micro_batch = 1;
    if (rank == 1) d.student.sample_count = 4, d.student.micro_batch = 1;
    XD_TRY(xd_route_create(world, &d, &n.route));
    XD_TRY(xd_queue_create(world, NULL, &n.queue));
    CHECK(xd_route_describe(n.route).shared && xd_queue_describe(n.queue).form == XD_QUEUE_WORKER);
    for (int i = 0; i < 4; i++) {
        const xd_collective c = sum_of(&n);
        xd_rows rows;
        xd_route_window window;
        XD_TRY(xd_queue_start(n.queue, &c, &n.ticket)); /* under way while the child is made */
        in_child(call_and_destroy, &n);
        XD_TRY(xd_queue_wait(n.queue, n.ticket));
        CHECK(n.received == 2.0f);
        XD_TRY(xd_barrier(world));
        if (rank == 0) {
            XD_TRY(xd_route_slot(n.route, &rows, NULL));
            for (int64_t k = 0; k < rows.rows * rows.cols; k++) ((float *)rows.data)[k] = (float)i;
            XD_TRY(xd_route_post(n.route));
        } else {
            XD_TRY(xd_route_take(n.route, &window));
            CHECK(((const float *)window.rows.data)[0] == (float)i);
            XD_TRY(xd_route_release(n.route));
        }
    }
    xd_route_destroy(n.route);
    xd_queue_destroy(n.queue);
    return XD_OK;
}

XD_TEST(a_child_of_a_rank_is_refused_at_once_and_the_ranks_go_on) {
    const xd_ctx_desc desc = { .timeout_seconds = 60, .init_timeout_seconds = 60 };
    const node_start start = { .ranks = 2, .desc = &desc, .function = forking_process };
    char message[256];
    CHECK_EQ_INT(node_run(&start, message), XD_OK);
    CHECK_EQ_STR(message, "");
}

/* ---- files ---- */

typedef struct saved {
    xd_ctx *ctx;
    xd_checkpoint_saver *saver;
    xd_checkpoint_save_desc d;
} saved;

static void poll_and_destroy(void *argument) {
    saved *s = (saved *)argument;
    CHECK(xd_checkpoint_save_poll(s->saver));
    refused(s->ctx, xd_checkpoint_save_wait(s->saver), "which alone saves with this saver");
    refused(s->ctx, xd_checkpoint_save_start(s->saver, &s->d), "which alone saves with this saver");
    xd_checkpoint_saver_destroy(s->saver);
}

XD_TEST(a_child_leaves_a_save_of_its_origin_alone) {
    const char *root = new_root();
    saved s;
    xd_comm *self = NULL;
    memset(&s, 0, sizeof s);
    s.ctx = open_ctx(2, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    CHECK_EQ_INT(xd_comm_self(s.ctx, &self), XD_OK);
    static scene whole;
    scene *network = &whole;
    scene_create(network, s.ctx, 0, 1, CUT_FLAT);
    s.d.root = root;
    s.d.networks = &network->network;
    s.d.network_count = 1;
    s.d.block_bytes = 4096;
    CHECK_EQ_INT(
        xd_checkpoint_saver_create(self, &(xd_checkpoint_saver_desc){ &network->network, 1 }, &s.saver),
        XD_OK);
    for (s.d.step = 1; s.d.step <= 2; s.d.step++) {
        scene_step(network, (int)s.d.step);
        CHECK_EQ_INT(xd_checkpoint_save_start(s.saver, &s.d), XD_OK);
        in_child(poll_and_destroy, &s);
        CHECK_EQ_INT(xd_checkpoint_save_wait(s.saver), XD_OK);
    }
    CHECK_EQ_STR(names_in(s.ctx, root), "latest step-1 step-2 ");
    CHECK_EQ_INT(xd_checkpoint_verify(s.ctx, path_in(root, "step-2")), XD_OK);
    xd_checkpoint_saver_destroy(s.saver);
    scene_destroy(network);
    xd_comm_destroy(self);
    xd_ctx_destroy(s.ctx);
    remove_all(root);
}

typedef struct written {
    xdi_publish *file;
    xd_publish_directory *directory;
    xd_teacher_cache_writer *cache;
} written;

static void abort_all(void *argument) {
    written *w = (written *)argument;
    xdi_publish_abort(w->file);
    xd_publish_directory_abort(w->directory);
    xd_teacher_cache_writer_abort(w->cache);
}

XD_TEST(a_child_that_aborts_files_of_its_origin_leaves_them) {
    enum { POSITIONS = 3, VOCAB = 5 };
    static const int32_t ids[POSITIONS] = { 1, 2, 3 }, next[POSITIONS] = { 2, 3, -1 };
    static float rows[POSITIONS * VOCAB];
    const char *root = new_root();
    written w;
    xd_ctx *ctx = open_ctx(1, NULL, XD_REDUCTION_DETERMINISTIC, XD_CPU_BEST);
    xd_teacher_cache_desc d;
    xd_teacher_cache_block block;
    xdi_publish *again = NULL;
    memset(&d, 0, sizeof d);
    memset(&block, 0, sizeof block);
    d.vocabulary = VOCAB;
    d.k = 2;
    block.logits = xd_rows_of(rows, XD_DTYPE_F32, POSITIONS, VOCAB);
    block.ids = ids;
    block.next = next;
    CHECK_EQ_INT(xdi_publish_create(ctx, path_in(root, "file"), &w.file), XD_OK);
    CHECK_EQ_INT(xd_publish_directory_create(ctx, &(xd_publish_directory_desc){ path_in(root, "folder") },
                                             &w.directory),
                 XD_OK);
    CHECK_EQ_INT(cache_writer_create(ctx, path_in(root, "cache"), &d, &w.cache), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_document(w.cache, NULL, 0), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_append(w.cache, &block), XD_OK);
    in_child(abort_all, &w);
    CHECK_EQ_INT(xdi_publish_create(ctx, path_in(root, "file"), &again),
                 XD_OK); /* takes none for abandoned */
    CHECK(strcmp(xdi_publish_path(again), xdi_publish_path(w.file)) != 0);
    xdi_publish_abort(again);
    CHECK_EQ_INT(xdi_publish_write(w.file, "x", 1, 0), XD_OK);
    CHECK_EQ_INT(xdi_publish_commit(w.file), XD_OK);
    CHECK_EQ_INT(xd_publish_directory_commit(w.directory), XD_OK);
    CHECK_EQ_INT(xd_teacher_cache_writer_commit(w.cache), XD_OK);
    CHECK_EQ_STR(names_in(ctx, root), "cache file folder ");
    xd_ctx_destroy(ctx);
    remove_all(root);
}

XD_TEST_MAIN()
