/* Saves beside training: a copy of everything that a save reads, and a thread that carries it out. */

#include "checkpoint/saver.h"
#include "checkpoint/internal.h"
#include "comm/internal.h"
#include "kernel/internal.h"

#include <pthread.h>
#include <string.h>

/* `save` belongs to the caller until start hands it over, and again from the end of the wait on. */
struct xd_checkpoint_saver {
    xd_comm *comm;   /* the caller's */
    xd_comm *runner; /* which carries saves out: comm, or its twin */
    xd_ctx *ctx;     /* of the twin; NULL: there is no thread */
    unsigned char *stage;
    void *locked; /* the same where it is page-locked memory; else NULL */
    size_t stage_bytes;
    void *kept; /* copies of what the desc points to */
    bool open;  /* between start and wait; the caller's alone */
    xdi_save save;
    xd_result result; /* of the save that is done; what follows is under lock when there is a thread */
    bool done, busy, leaving;
    bool has_thread;
    int64_t process; /* that saves, and has the thread */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake, finished; /* the thread: there is a save; the caller: it is done */
};

/* ---- copies ---- */

/* Runs twice, like the lists of a content: over an arena without memory, which tells the size, and over that size. */
static void *xdi_keep(xd_arena *arena, const void *data, size_t bytes) {
    void *copy = xd_arena_take_pointer(arena, bytes);
    if (copy && bytes) memcpy(copy, data, bytes);
    return copy;
}

static const char *xdi_keep_text(xd_arena *arena, const char *text) {
    return text ? (const char *)xdi_keep(arena, text, strlen(text) + 1) : NULL;
}

/* Optimizers and averages stay the caller's: they are read before start returns. */
static void xdi_keep_network(xd_arena *arena, const xd_checkpoint_network *from, xd_checkpoint_network *to) {
    xd_tensor_part *parts =
        (xd_tensor_part *)xdi_keep(arena, from->parts, (size_t)from->part_count * sizeof *parts);
    const char *name = xdi_keep_text(arena, from->name);
    for (int64_t i = 0; i < from->part_count; i++) {
        const xd_tensor_part *p = &from->parts[i];
        const char *part_name = xdi_keep_text(arena, p->name);
        const xd_region *region =
            p->region ? (const xd_region *)xdi_keep(arena, p->region, sizeof *region) : NULL;
        if (!parts) continue;
        parts[i].name = part_name;
        parts[i].region = region;
    }
    if (!to) return;
    to->name = name;
    to->parts = parts;
}

static void xdi_keep_files(xd_arena *arena, xd_checkpoint_save_desc *d) {
    const size_t bytes = (size_t)d->file_count * sizeof *d->files;
    xd_checkpoint_file *files = (xd_checkpoint_file *)xdi_keep(arena, d->files, bytes);
    for (int i = 0; i < d->file_count; i++) {
        const char *name = xdi_keep_text(arena, d->files[i].name);
        const void *data = xdi_keep(arena, d->files[i].data, d->files[i].bytes);
        if (!files) continue;
        files[i].name = name;
        files[i].data = data;
    }
    if (files) d->files = files;
}

/* Copies what a desc points to, and makes it point to the copies; a planning run leaves it as it is. */
static void xdi_keep_desc(xd_arena *arena, xd_checkpoint_save_desc *d, bool root) {
    const size_t bytes = (size_t)d->network_count * sizeof *d->networks;
    xd_checkpoint_network *networks = (xd_checkpoint_network *)xdi_keep(arena, d->networks, bytes);
    const char *path = xdi_keep_text(arena, d->root);
    for (int i = 0; i < d->network_count; i++)
        xdi_keep_network(arena, &d->networks[i], networks ? &networks[i] : NULL);
    if (root) xdi_keep_files(arena, d);
    if (!networks) return;
    d->networks = networks;
    d->root = path;
}

static xd_result xdi_saver_keep(xd_checkpoint_saver *s) {
    xd_arena arena = xd_arena_over(NULL, 0);
    xdi_keep_desc(&arena, &s->save.desc, s->save.root);
    const size_t bytes = arena.peak;
    s->kept = xd_allocate(s->save.ctx, bytes);
    XD_REQUIRE(s->save.ctx, s->kept, XD_ERROR_MEMORY, "no room for %llu bytes of names and regions",
               (unsigned long long)bytes);
    arena = xd_arena_over(s->kept, bytes);
    xdi_keep_desc(&arena, &s->save.desc, s->save.root);
    return XD_OK;
}

/* Gives every tensor that this rank writes its place, which holds no data yet. */
static size_t xdi_saver_lay_out(const xdi_content *c, int rank, unsigned char *stage) {
    xd_arena arena = xd_arena_over(NULL, 0);
    for (int64_t i = 0; i < c->tensor_count; i++) {
        size_t offset = 0;
        if (!xdi_stored_speaks(&c->tensors[i], rank) || c->tensors[i].step) continue;
        (void)xdi_arena_take(&arena, xdi_stored_bytes(&c->tensors[i]), &offset);
        if (stage) c->tensors[i].data = stage + offset;
    }
    return arena.peak;
}

static xd_result xdi_saver_stage(xd_checkpoint_saver *s) {
    xd_ctx *ctx = s->save.ctx;
    const xd_launch launch = xd_ctx_launch(ctx);
    const xd_device_ops *memory = &xd_ctx_kernels(ctx)->memory;
    const xdi_content *c = &s->save.content;
    const int rank = xd_comm_rank(s->comm);
    const size_t needed = xdi_saver_lay_out(c, rank, NULL);
    xd_arena arena = xd_arena_over(s->stage, s->stage_bytes);
    XD_REQUIRE(ctx, needed <= s->stage_bytes, XD_ERROR_STATE,
               "step %lld: %llu bytes are to be copied, the saver was created for %llu",
               (long long)s->save.desc.step, (unsigned long long)needed, (unsigned long long)s->stage_bytes);
    for (int64_t i = 0; i < c->tensor_count; i++) {
        xdi_stored *t = &c->tensors[i];
        if (t->step) continue;
        const size_t bytes = xdi_stored_speaks(t, rank) ? xdi_stored_bytes(t) : 0;
        void *copy = bytes ? xd_arena_take_pointer(&arena, bytes) : NULL;
        if (bytes) XD_TRY(memory->copy(&launch, copy, t->data, bytes, XD_COPY_TO_HOST));
        t->data = copy;
    }
    return memory->synchronize(&launch);
}

/* Nothing of the caller's is reached from here on. */
static void xdi_saver_cut_loose(xd_checkpoint_saver *s) {
    xd_checkpoint_network *networks = (xd_checkpoint_network *)(uintptr_t)s->save.desc.networks;
    for (int i = 0; i < s->save.desc.network_count; i++) {
        networks[i].optimizer = NULL;
        networks[i].averages = NULL;
        networks[i].average_count = 0;
    }
    s->save.desc.state = NULL;
    s->save.comm = s->runner;
    s->save.ctx = s->save.content.ctx = xd_comm_ctx(s->runner);
    s->save.content.on_host = true;
}

static xd_result xdi_saver_take(xd_checkpoint_saver *s, const xd_checkpoint_save_desc *desc) {
    xd_ctx *ctx = xd_comm_ctx(s->comm);
    XD_REQUIRE(ctx, !s->open, XD_ERROR_STATE,
               "step %lld: the save of step %lld was started and has not been waited for",
               (long long)desc->step, (long long)s->save.desc.step);
    xdi_save_open(&s->save, s->comm, desc);
    XD_TRY(xdi_save_check(&s->save));
    XD_TRY(xdi_content_check(ctx, desc->networks, desc->network_count));
    XD_TRY(xdi_saver_keep(s));
    XD_TRY(xdi_save_list(&s->save));
    XD_TRY(xdi_saver_stage(s));
    xdi_saver_cut_loose(s);
    return XD_OK;
}

static void xdi_saver_drop(xd_checkpoint_saver *s) {
    xdi_save_end(&s->save);
    xd_release(xd_comm_ctx(s->comm), s->kept);
    s->kept = NULL;
    s->open = false;
}

/* ---- saves ---- */

/* The next piece of the save; true when that was the last. What the save holds is then free: others may have the root's lock. */
static bool xdi_saver_advance(xd_checkpoint_saver *s) {
    s->result = xdi_save_advance(&s->save);
    if (s->result == XD_OK && s->save.phase != XDI_SAVE_DONE) return false;
    s->result = xdi_save_close(&s->save, s->result);
    return true;
}

static void *xdi_saver_work(void *argument) {
    xd_checkpoint_saver *s = (xd_checkpoint_saver *)argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->busy && !s->leaving) pthread_cond_wait(&s->wake, &s->lock);
        if (!s->busy) break;
        pthread_mutex_unlock(&s->lock);
        while (!xdi_saver_advance(s)) {
        }
        pthread_mutex_lock(&s->lock);
        s->busy = false;
        s->done = true;
        pthread_cond_broadcast(&s->finished);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static xd_result xdi_saver_own(const xd_checkpoint_saver *s) {
    XD_REQUIRE(xd_comm_ctx(s->comm), !xdi_is_forked(s->process), XD_ERROR_STATE,
               "process %lld was forked from process %lld, which alone saves with this saver",
               (long long)xdi_process(), (long long)s->process);
    return XD_OK;
}

XD_API xd_result xd_checkpoint_save_start(xd_checkpoint_saver *s, const xd_checkpoint_save_desc *desc) {
    XDI_LIVE(xd_checkpoint_saver, s);
    XDI_GIVEN_TO_ALL(s ? xd_comm_ctx(s->comm) : NULL, s ? s->comm : NULL, s, desc);
    XD_TRY(xdi_saver_own(s));
    const bool was_open = s->open;
    const xd_result result = xd_agree(s->comm, xdi_saver_take(s, desc));
    if (result != XD_OK) {
        if (!was_open) xdi_saver_drop(s);
        return result;
    }
    s->open = true;
    pthread_mutex_lock(&s->lock);
    s->done = false;
    s->busy = s->has_thread;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    return XD_OK;
}

XD_API bool xd_checkpoint_save_poll(xd_checkpoint_saver *s) {
    if (!s->open || xdi_is_forked(s->process)) return true;
    if (!s->has_thread) {
        s->done = s->done || xdi_saver_advance(s);
        return s->done;
    }
    pthread_mutex_lock(&s->lock);
    const bool done = s->done;
    pthread_mutex_unlock(&s->lock);
    return done;
}

XD_API xd_result xd_checkpoint_save_wait(xd_checkpoint_saver *s) {
    XDI_LIVE(xd_checkpoint_saver, s);
    XDI_GIVEN(s ? xd_comm_ctx(s->comm) : NULL, s);
    if (!s->open) return XD_OK;
    XD_TRY(xdi_saver_own(s));
    pthread_mutex_lock(&s->lock);
    while (s->has_thread && !s->done) pthread_cond_wait(&s->finished, &s->lock);
    pthread_mutex_unlock(&s->lock);
    while (!s->done) s->done = xdi_saver_advance(s);
    const xd_result result = s->result;
    xdi_saver_drop(s);
    return result != XD_OK && s->ctx ? xdi_ctx_adopt(xd_comm_ctx(s->comm), xd_last_error(s->ctx)) : result;
}

/* ---- life ---- */

/* Bytes of the staging block: all elements that this rank writes, states of frozen parameters included. */
static xd_result xdi_saver_bytes(xd_comm *comm, const xd_checkpoint_network *networks, int network_count,
                                 size_t *bytes) {
    XDI_GIVEN_LIST(xd_comm_ctx(comm), networks, network_count);
    xdi_content content;
    const xd_result result = xdi_content_create_thawed(xd_comm_ctx(comm), networks, network_count, &content);
    if (result == XD_OK) *bytes = xdi_saver_lay_out(&content, xd_comm_rank(comm), NULL);
    xdi_content_destroy(&content);
    return result;
}

static xd_result xdi_saver_make(xd_comm *comm, const xd_checkpoint_network *networks, int network_count,
                                xd_checkpoint_saver **out) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    size_t bytes = 0;
    XD_TRY(xdi_saver_bytes(comm, networks, network_count, &bytes));
    xd_checkpoint_saver *s = XDI_OBJECT(xd_checkpoint_saver, ctx, sizeof *s);
    XD_REQUIRE(ctx, s, XD_ERROR_MEMORY, "no room for a saver of %llu bytes", (unsigned long long)bytes);
    s->comm = s->runner = comm;
    s->process = xdi_process();
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_cond_init(&s->finished, NULL);
    *out = s;
    s->stage_bytes = bytes;
    s->locked = xdi_locked_take(ctx, bytes);
    s->stage = (unsigned char *)(s->locked ? s->locked : xd_allocate(ctx, bytes));
    XD_REQUIRE(ctx, s->stage, XD_ERROR_MEMORY, "no room for copies of %llu bytes", (unsigned long long)bytes);
    return XD_OK;
}

static xd_result xdi_saver_employ(xd_checkpoint_saver *s) {
    s->has_thread = xdi_thread_create(&s->thread, xdi_saver_work, s);
    XD_REQUIRE(xd_comm_ctx(s->comm), s->has_thread, XD_ERROR_MEMORY,
               "the system has no thread for a saver of %llu bytes", (unsigned long long)s->stage_bytes);
    return XD_OK;
}

/* Every step is agreed, so that no rank waits for one that has failed. */
static xd_result xdi_saver_hire(xd_checkpoint_saver *s) {
    xd_comm *twin = NULL;
    xd_ctx *ctx = NULL;
    if (!xdi_comm_forks_for_threads(s->comm)) return XD_OK;
    xd_result result = xd_agree(s->comm, xdi_queue_context(s->comm, "a saver", &ctx));
    if (result == XD_OK) result = xdi_comm_fork(s->comm, ctx, &twin);
    if (!twin) {
        xd_ctx_destroy(ctx);
        return result;
    }
    s->ctx = ctx;
    s->runner = twin;
    return xd_agree(s->comm, xdi_saver_employ(s));
}

/* With the context and the communicator of its thread. */
static xd_result xdi_saver_add_to_plan(xd_comm *comm, const xd_checkpoint_saver_desc *desc) {
    size_t bytes = 0;
    XD_TRY(xdi_saver_bytes(comm, desc->networks, desc->network_count, &bytes));
    const size_t thread = xdi_comm_forks_for_threads(comm) && xdi_comm_fork_bytes(comm) > 0
                              ? xdi_ctx_bytes(sizeof(xd_kernels)) + xdi_comm_fork_bytes(comm)
                              : 0;
    return xdi_plan_take(xd_comm_ctx(comm), sizeof(xd_checkpoint_saver) + bytes + thread, 0);
}

XD_API xd_result xd_checkpoint_saver_create(xd_comm *comm, const xd_checkpoint_saver_desc *desc,
                                            xd_checkpoint_saver **out) {
    XDI_GIVEN_COMM_IN_PLAN(comm, desc, out);
    if (xdi_plan_is_open(xd_comm_ctx(comm))) {
        *out = NULL;
        return xdi_saver_add_to_plan(comm, desc);
    }
    xd_checkpoint_saver *s = NULL;
    xd_result result = xd_agree(comm, xdi_saver_make(comm, desc->networks, desc->network_count, &s));
    if (result == XD_OK) result = xdi_saver_hire(s);
    if (result == XD_OK)
        *out = s;
    else
        xd_checkpoint_saver_destroy(s);
    return result;
}

static void xdi_saver_stop(xd_checkpoint_saver *s) {
    pthread_mutex_lock(&s->lock);
    s->leaving = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    if (s->has_thread) pthread_join(s->thread, NULL);
    if (s->open) xdi_saver_drop(s);
    pthread_cond_destroy(&s->finished);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
}

/* In a process that was forked the save itself stays: its thread may have been in the middle of it. */
XD_API void xd_checkpoint_saver_destroy(xd_checkpoint_saver *s) {
    if (!s || XDI_IS_GONE(xd_checkpoint_saver, s)) return;
    xd_ctx *ctx = xd_comm_ctx(s->comm);
    if (!xdi_is_forked(s->process)) xdi_saver_stop(s);
    xd_release(ctx, s->kept);
    if (s->ctx) xd_comm_destroy(s->runner);
    xd_ctx_destroy(s->ctx);
    xdi_locked_give(ctx, s->locked);
    if (!s->locked) xd_release(ctx, s->stage);
    xd_release(ctx, s);
}
