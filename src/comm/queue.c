/* Queues of collectives. A record has a slot from start to wait; slots are given out again in any order, and `line` keeps the
 * order in which they were started. The runner of the records is the caller, who may do it on a stream of the queue, or a
 * thread with a twin of the communicator. */

#include "comm/queue.h"
#include "comm/internal.h"
#include "kernel/kernels.h"

#include <pthread.h>
#include <string.h>

enum { XDI_QUEUE_CAPACITY = 16, XDI_QUEUE_CAPACITY_MOST = 4096, XDI_QUEUE_ARRAYS = 7 };

typedef struct xdi_queue_slot {
    uint64_t number; /* of its ticket; 0: free */
    bool done;
    xd_collective record;        /* its arrays lie in `counts` */
    xdi_queue_messages messages; /* instead of a record; without any in it: a record */
    int64_t *counts;             /* [XDI_QUEUE_ARRAYS][size]: four of counts, and one of leaves */
    void *moved;                 /* event: the queue's stream has done its part; NULL: no stream */
    xd_error error;              /* of the record that has been run; result XD_OK without one */
} xdi_queue_slot;

struct xd_queue {
    xd_comm *comm;   /* the caller's */
    xd_comm *runner; /* which runs the records: comm, or its twin */
    xd_ctx *ctx;     /* of the twin; NULL: the caller runs the records */
    void *stream;    /* on which they move data; NULL: on the caller's */
    void *ready;     /* event: the caller's stream has come to a start */
    int capacity;
    uint64_t started; /* records so far; what follows is under lock when there is a worker */
    uint64_t begun;   /* of them, taken from the line */
    bool leaving;
    xd_result broken; /* XD_OK, or what broke the world in a record */
    int culprit;
    xd_comm_counters traffic;
    int open;
    int *line;             /* [capacity], the slot of record n at n % capacity */
    xdi_queue_slot *slots; /* [capacity] */
    int64_t *counts;       /* of all slots */
    bool has_thread;
    int64_t process; /* that has the thread */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake, done; /* the worker: there is a record; the caller: one has been run */
};

/* ---- running ---- */

static xd_launch xdi_queue_launch(const xd_queue *queue, void *stream) {
    xd_launch launch = xd_ctx_launch(xd_comm_ctx(queue->comm));
    if (stream) launch.stream = stream;
    return launch;
}

static xd_result xdi_queue_move(xd_queue *queue, xdi_queue_slot *slot) {
    const xdi_queue_messages *m = &slot->messages;
    if (m->count == 0) return xd_collective_run(queue->runner, &slot->record);
    m->records[0].stream = slot->record.stream; /* of all */
    return xdi_comm_exchange_as(queue->runner, m->records, m->count, m->refuses, m->patience);
}

/* Runs a record, on the queue's stream if it has one. Peers count on the record, whatever becomes of the events. */
static xd_result xdi_queue_execute(xd_queue *queue, xdi_queue_slot *slot) {
    if (!queue->stream) return xdi_queue_move(queue, slot);
    const xd_device_ops *device = &xd_ctx_kernels(xd_comm_ctx(queue->comm))->memory;
    const xd_launch from = xdi_queue_launch(queue, slot->record.stream),
                    own = xdi_queue_launch(queue, queue->stream);
    xd_result order = device->event_record(&from, queue->ready);
    if (order == XD_OK) order = device->event_wait(&own, queue->ready);
    slot->record.stream = queue->stream;
    XD_TRY(xdi_queue_move(queue, slot));
    XD_TRY(order);
    return device->event_record(&own, slot->moved);
}

/* Makes the context's stream wait for a record that has been run. */
static xd_result xdi_queue_order(const xd_queue *queue, const xdi_queue_slot *slot) {
    const xd_launch launch = xdi_queue_launch(queue, NULL);
    if (!queue->stream) return XD_OK;
    return xd_ctx_kernels(xd_comm_ctx(queue->comm))->memory.event_wait(&launch, slot->moved);
}

/* Runs the next record of the line. Called and left with the lock held. */
static void xdi_queue_run(xd_queue *queue) {
    xdi_queue_slot *slot = &queue->slots[queue->line[queue->begun++ % (uint64_t)queue->capacity]];
    pthread_mutex_unlock(&queue->lock);
    const xd_comm_counters before = xd_comm_traffic(queue->runner);
    const xd_result result = xdi_queue_execute(queue, slot);
    const xd_comm_counters after = xd_comm_traffic(queue->runner);
    pthread_mutex_lock(&queue->lock);
    slot->error.result = XD_OK;
    if (result != XD_OK) slot->error = *xd_last_error(xd_comm_ctx(queue->runner));
    queue->traffic.calls += after.calls - before.calls;
    queue->traffic.bytes_sent += after.bytes_sent - before.bytes_sent;
    queue->traffic.bytes_received += after.bytes_received - before.bytes_received;
    queue->broken = xdi_comm_broken(queue->runner);
    queue->culprit = xdi_comm_culprit(queue->runner);
    slot->done = true;
    pthread_cond_broadcast(&queue->done);
}

static void *xdi_queue_work(void *argument) {
    xd_queue *queue = (xd_queue *)argument;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (queue->begun == queue->started && !queue->leaving)
            pthread_cond_wait(&queue->wake, &queue->lock);
        if (queue->begun == queue->started) break;
        xdi_queue_run(queue);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* ---- records ---- */

static void xdi_queue_keep(const int64_t **array, int64_t *room, int size) {
    if (!*array) return;
    memcpy(room, *array, (size_t)size * sizeof *room);
    *array = room;
}

static void xdi_queue_copy(const xd_queue *queue, xdi_queue_slot *slot, const xd_collective *record) {
    const int n = xd_comm_size(queue->comm);
    slot->record = *record;
    xdi_queue_keep(&slot->record.send_counts, slot->counts, n);
    xdi_queue_keep(&slot->record.send_displacements, slot->counts + n, n);
    xdi_queue_keep(&slot->record.recv_counts, slot->counts + 2 * n, n);
    xdi_queue_keep(&slot->record.recv_displacements, slot->counts + 3 * n, n);
    if (!record->known_leaves) return;
    xd_leaves *leaves = (xd_leaves *)(void *)(slot->counts + 4 * n);
    memcpy(leaves, record->known_leaves, (size_t)n * sizeof *leaves);
    slot->record.known_leaves = leaves;
}

static xd_result xdi_queue_check(const xd_queue *queue) {
    xd_ctx *ctx = xd_comm_ctx(queue->comm);
    const bool here = queue->broken != XD_OK;
    const xd_result cause = here ? queue->broken : xdi_comm_broken(queue->comm);
    const int culprit = here ? queue->culprit : xdi_comm_culprit(queue->comm);
    if (cause != XD_OK)
        return XD_FAIL_CULPRIT(ctx, XD_ERROR_PEER, culprit,
                               "queue: the group is broken: rank %d caused %s in an earlier call", culprit,
                               xd_result_name(cause));
    XD_REQUIRE(ctx, queue->open < queue->capacity, XD_ERROR_STATE,
               "queue: %d records are open, and the capacity is %d", queue->open, queue->capacity);
    return XD_OK;
}

/* A ticket's number tells its slot: it is (records before it + 1) * capacity + slot. */
static uint64_t xdi_queue_append(xd_queue *queue, const xd_collective *record,
                                 const xdi_queue_messages *messages) {
    int at = 0;
    while (queue->slots[at].number) at++;
    xdi_queue_slot *slot = &queue->slots[at];
    xdi_queue_copy(queue, slot, record);
    slot->messages = *messages;
    slot->done = false;
    slot->number = (queue->started + 1) * (uint64_t)queue->capacity + (uint64_t)at;
    queue->line[queue->started++ % (uint64_t)queue->capacity] = at;
    queue->open++;
    return slot->number;
}

/* A process that was forked has no worker, and the lock may be held for ever. */
static bool xdi_queue_is_forked(const xd_queue *queue) {
    return queue->has_thread && xdi_ctx_is_elsewhere(xd_comm_ctx(queue->comm), queue->process);
}

static xd_result xdi_queue_own(const xd_queue *queue) {
    XD_REQUIRE(xd_comm_ctx(queue->comm), !xdi_queue_is_forked(queue), XD_ERROR_STATE,
               "queue: process %lld was forked from process %lld, which alone has the queue's thread",
               (long long)xdi_process(), (long long)queue->process);
    return XD_OK;
}

static xd_result xdi_queue_begin(xd_queue *queue, const xd_collective *record,
                                 const xdi_queue_messages *messages, xd_ticket *ticket) {
    XD_TRY(xdi_queue_own(queue));
    pthread_mutex_lock(&queue->lock);
    const xd_result result = xdi_queue_check(queue);
    if (result == XD_OK) {
        const uint64_t number = xdi_queue_append(queue, record, messages);
        if (ticket) ticket->number = number;
        if (queue->ctx)
            pthread_cond_signal(&queue->wake);
        else
            xdi_queue_run(queue);
    }
    pthread_mutex_unlock(&queue->lock);
    return result;
}

XD_API xd_result xd_queue_start(xd_queue *queue, const xd_collective *record, xd_ticket *ticket) {
    XDI_LIVE(xd_queue, queue);
    XDI_GIVEN(queue ? xd_comm_ctx(queue->comm) : NULL, queue, record);
    xdi_queue_messages none;
    memset(&none, 0, sizeof none);
    return xdi_queue_begin(queue, record, &none, ticket);
}

XD_PRIVATE xd_result xdi_queue_exchange(xd_queue *queue, const xdi_queue_messages *messages,
                                        xd_ticket *ticket) {
    xd_collective none;
    memset(&none, 0, sizeof none);
    return xdi_queue_begin(queue, &none, messages, ticket);
}

XD_PRIVATE xd_result xdi_queue_broken(xd_queue *queue) {
    XD_TRY(xdi_queue_own(queue));
    pthread_mutex_lock(&queue->lock);
    const xd_result broken = queue->broken;
    pthread_mutex_unlock(&queue->lock);
    return broken != XD_OK ? broken : xdi_comm_broken(queue->comm);
}

/* NULL when no open record has this ticket. */
static xdi_queue_slot *xdi_queue_find(const xd_queue *queue, xd_ticket ticket) {
    xdi_queue_slot *slot = &queue->slots[ticket.number % (uint64_t)queue->capacity];
    return ticket.number && slot->number == ticket.number ? slot : NULL;
}

XD_API bool xd_queue_done(xd_queue *queue, xd_ticket ticket) {
    XD_ASSERT(queue);
    if (xdi_queue_is_forked(queue)) return true; /* nothing will change any more */
    pthread_mutex_lock(&queue->lock);
    const xdi_queue_slot *slot = xdi_queue_find(queue, ticket);
    const bool done = !slot || slot->done;
    pthread_mutex_unlock(&queue->lock);
    return done;
}

/* Waits for the record of a slot and frees it. Called and left with the lock held. */
static xd_result xdi_queue_take(xd_queue *queue, xdi_queue_slot *slot) {
    while (!slot->done) pthread_cond_wait(&queue->done, &queue->lock);
    slot->number = 0;
    queue->open--;
    return slot->error.result;
}

XD_API xd_result xd_queue_wait(xd_queue *queue, xd_ticket ticket) {
    XDI_LIVE(xd_queue, queue);
    XDI_GIVEN(queue ? xd_comm_ctx(queue->comm) : NULL, queue);
    xd_ctx *ctx = xd_comm_ctx(queue->comm);
    XD_TRY(xdi_queue_own(queue));
    pthread_mutex_lock(&queue->lock);
    xdi_queue_slot *slot = xdi_queue_find(queue, ticket);
    const xd_result result = slot ? xdi_queue_take(queue, slot) : XD_OK;
    pthread_mutex_unlock(&queue->lock);
    XD_REQUIRE(ctx, slot, XD_ERROR_STATE, "queue: ticket %llu belongs to none of the %d open records",
               (unsigned long long)ticket.number, queue->open);
    return result == XD_OK ? xdi_queue_order(queue, slot)
                           : xdi_ctx_adopt(ctx, &slot->error); /* this thread's */
}

/* The open record that was started first; NULL without any. */
static xdi_queue_slot *xdi_queue_oldest(const xd_queue *queue) {
    xdi_queue_slot *oldest = NULL;
    for (int i = 0; i < queue->capacity; i++) {
        xdi_queue_slot *slot = &queue->slots[i];
        if (slot->number && (!oldest || slot->number < oldest->number)) oldest = slot;
    }
    return oldest;
}

XD_API xd_result xd_queue_wait_all(xd_queue *queue) {
    XDI_LIVE(xd_queue, queue);
    XDI_GIVEN(queue ? xd_comm_ctx(queue->comm) : NULL, queue);
    const xdi_queue_slot *failed = NULL;
    xd_result order = XD_OK;
    XD_TRY(xdi_queue_own(queue));
    pthread_mutex_lock(&queue->lock);
    for (xdi_queue_slot *slot; (slot = xdi_queue_oldest(queue)) != NULL;) {
        const bool fine = xdi_queue_take(queue, slot) == XD_OK;
        if (fine && order == XD_OK) order = xdi_queue_order(queue, slot);
        if (!fine && !failed) failed = slot;
    }
    pthread_mutex_unlock(&queue->lock);
    return failed ? xdi_ctx_adopt(xd_comm_ctx(queue->comm), &failed->error) : order;
}

XD_API xd_queue_info xd_queue_describe(xd_queue *queue) {
    XD_ASSERT(queue);
    xd_queue_info facts;
    const bool here = !xdi_queue_is_forked(queue);
    if (here) pthread_mutex_lock(&queue->lock);
    facts.form = queue->ctx ? XD_QUEUE_WORKER : queue->stream ? XD_QUEUE_STREAM : XD_QUEUE_INLINE;
    facts.capacity = queue->capacity;
    facts.open = queue->open;
    facts.traffic = queue->traffic;
    if (here) pthread_mutex_unlock(&queue->lock);
    return facts;
}

XD_PRIVATE xd_comm *xdi_queue_comm(const xd_queue *queue) {
    return queue->comm;
}

/* ---- life ---- */

static xd_result xdi_queue_validate(xd_ctx *ctx, const xd_queue_desc *d) {
    XD_REQUIRE(ctx, (int)d->form >= 0 && d->form <= XD_QUEUE_STREAM, XD_ERROR_ARGUMENT,
               "queue: form %d does not exist", (int)d->form);
    XD_REQUIRE(ctx, d->capacity >= 1 && d->capacity <= XDI_QUEUE_CAPACITY_MOST, XD_ERROR_ARGUMENT,
               "queue: capacity %d is outside [1, %d]", d->capacity, (int)XDI_QUEUE_CAPACITY_MOST);
    return XD_OK;
}

static bool xdi_queue_has_device(const xd_comm *comm) {
    const xd_kernels *kernels = xd_ctx_settings(xd_comm_ctx(comm))->kernels; /* NULL: the CPU's */
    return kernels && kernels->device != XD_DEVICE_CPU;
}

static bool xdi_queue_wants_stream(const xd_comm *comm, xd_queue_form form) {
    return (form == XD_QUEUE_AUTO || form == XD_QUEUE_STREAM) && xdi_queue_has_device(comm) &&
           xdi_comm_moves_device(comm);
}

/* Whether a worker is wanted, and may be had as far as this rank alone can tell. */
static bool xdi_queue_wants_worker(const xd_comm *comm, xd_queue_form form) {
    if (form == XD_QUEUE_STREAM || xdi_queue_has_device(comm)) return false;
    if (form == XD_QUEUE_INLINE || !xdi_comm_forks_for_threads(comm)) return false;
    return form == XD_QUEUE_WORKER || (xd_comm_size(comm) > 1 && !xdi_threads_has(comm));
}

static xd_result xdi_queue_make(xd_comm *comm, int capacity, xd_queue **out) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const size_t slots = (size_t)capacity, arrays = (size_t)xd_comm_size(comm) * XDI_QUEUE_ARRAYS;
    xd_queue *queue = XDI_OBJECT(xd_queue, ctx, sizeof *queue);
    XD_REQUIRE(ctx, queue, XD_ERROR_MEMORY, "no room for a queue of %d records", capacity);
    queue->comm = queue->runner = comm;
    queue->process = xdi_process();
    queue->capacity = capacity;
    queue->culprit = -1;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->wake, NULL);
    pthread_cond_init(&queue->done, NULL);
    queue->slots = (xdi_queue_slot *)xd_allocate(ctx, slots * sizeof *queue->slots);
    queue->line = (int *)xd_allocate(ctx, slots * sizeof *queue->line);
    queue->counts = (int64_t *)xd_allocate(ctx, slots * arrays * sizeof *queue->counts);
    *out = queue;
    XD_REQUIRE(ctx, queue->slots && queue->line && queue->counts, XD_ERROR_MEMORY,
               "no room for a queue of %d records", capacity);
    for (size_t i = 0; i < slots; i++) queue->slots[i].counts = queue->counts + i * arrays;
    return XD_OK;
}

/* The stream and all events that starts need. */
static xd_result xdi_queue_lay_stream(xd_queue *queue) {
    xd_ctx *ctx = xd_comm_ctx(queue->comm);
    const xd_device_ops *device = &xd_ctx_kernels(ctx)->memory;
    queue->stream = device->stream_create(ctx);
    queue->ready = queue->stream ? device->event_create(ctx) : NULL;
    bool fine = queue->ready != NULL;
    for (int i = 0; fine && i < queue->capacity; i++) {
        queue->slots[i].moved = device->event_create(ctx);
        fine = queue->slots[i].moved != NULL;
    }
    XD_REQUIRE(ctx, fine, XD_ERROR_DEVICE,
               "the device has no stream, or no events, for a queue of %d records", queue->capacity);
    return XD_OK;
}

/* The context's stream follows the queue's: buffers of records that nobody has waited for are then in order too. */
static void xdi_queue_take_up_stream(xd_queue *queue) {
    xd_ctx *ctx = xd_comm_ctx(queue->comm);
    const xd_device_ops *device = &xd_ctx_kernels(ctx)->memory;
    const xd_launch own = xdi_queue_launch(queue, queue->stream), theirs = xdi_queue_launch(queue, NULL);
    if (!queue->stream) return;
    if (queue->ready && device->event_record(&own, queue->ready) == XD_OK)
        device->event_wait(&theirs, queue->ready);
    for (int i = 0; i < queue->capacity; i++) device->event_destroy(queue->slots[i].moved);
    device->event_destroy(queue->ready);
    device->stream_destroy(ctx, queue->stream);
}

XD_PRIVATE xd_result xdi_queue_context(xd_comm *comm, const char *what, xd_ctx **out) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    xd_ctx_desc settings = *xd_ctx_settings(ctx);
    settings.threads = 1;
    settings.parallel_for.run = NULL;
    settings.stream = NULL;
    if (xdi_queue_has_device(comm)) settings.kernels = NULL;
    if (xd_ctx_create(&settings, out) == XD_OK) return XD_OK;
    return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the context of %s on %d ranks", what,
                   xd_comm_size(comm));
}

static xd_result xdi_queue_employ(xd_queue *queue, xd_ctx *ctx, xd_comm *twin) {
    queue->ctx = ctx;
    queue->runner = twin;
    queue->has_thread = xdi_thread_create(&queue->thread, xdi_queue_work, queue);
    XD_REQUIRE(xd_comm_ctx(queue->comm), queue->has_thread, XD_ERROR_MEMORY,
               "the system has no thread for a queue of %d records", queue->capacity);
    return XD_OK;
}

/* Every step is agreed, so that no rank waits for one that has failed. */
static xd_result xdi_queue_hire(xd_queue *queue) {
    xd_comm *twin = NULL;
    xd_ctx *ctx = NULL;
    xd_result result = xd_agree(queue->comm, xdi_queue_context(queue->comm, "a queue", &ctx));
    if (result == XD_OK) result = xdi_comm_fork(queue->comm, ctx, &twin);
    if (twin) return xd_agree(queue->comm, xdi_queue_employ(queue, ctx, twin));
    xd_ctx_destroy(ctx);
    return result;
}

/* Of a queue with or without a worker. */
static xd_memory_bytes xdi_queue_memory_of(const xd_comm *comm, int capacity, bool worker) {
    const size_t slots = (size_t)capacity, arrays = (size_t)xd_comm_size(comm) * XDI_QUEUE_ARRAYS;
    xd_memory_bytes bytes;
    bytes.device = 0;
    bytes.host = sizeof(xd_queue) + slots * (sizeof(xdi_queue_slot) + sizeof(int) + arrays * sizeof(int64_t));
    if (worker) bytes.host += xdi_ctx_bytes(sizeof(xd_kernels)) + xdi_comm_fork_bytes(comm);
    return bytes;
}

XD_PRIVATE xd_memory_bytes xdi_queue_memory(const xd_queue *queue) {
    return xdi_queue_memory_of(queue->comm, queue->capacity, queue->ctx != NULL);
}

static xd_result xdi_queue_add_to_plan(xd_comm *comm, const xd_queue_desc *d, xd_result valid) {
    const bool worker = xdi_queue_wants_worker(comm, d->form) && xdi_comm_fork_bytes(comm) > 0;
    return valid == XD_OK ? xdi_plan_add(xd_comm_ctx(comm), xdi_queue_memory_of(comm, d->capacity, worker))
                          : valid;
}

XD_API xd_result xd_queue_create(xd_comm *comm, const xd_queue_desc *desc, xd_queue **out) {
    XDI_GIVEN_COMM_IN_PLAN(comm, out);
    xd_queue_desc d;
    xd_queue *queue = NULL;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!d.capacity) d.capacity = XDI_QUEUE_CAPACITY;
    const xd_result valid = xdi_queue_validate(xd_comm_ctx(comm), &d);
    if (xdi_plan_is_open(xd_comm_ctx(comm))) {
        *out = NULL;
        return xdi_queue_add_to_plan(comm, &d, valid);
    }
    XD_TRY(xdi_comm_agree_number(comm, valid, "queue", "form", (int64_t)d.form));
    XD_TRY(xdi_comm_agree_number(comm, XD_OK, "queue", "capacity", d.capacity));
    bool worker = false;
    XD_TRY(xdi_comm_all_can(comm, xdi_queue_wants_worker(comm, d.form), &worker));
    xd_result result = xdi_queue_make(comm, d.capacity, &queue);
    if (result == XD_OK && xdi_queue_wants_stream(comm, d.form)) result = xdi_queue_lay_stream(queue);
    result = xd_agree(comm, result);
    if (result == XD_OK && worker) result = xdi_queue_hire(queue);
    if (result != XD_OK) {
        xd_queue_destroy(queue);
        return result;
    }
    *out = queue;
    return XD_OK;
}

static void xdi_queue_stop(xd_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->leaving = true;
    pthread_cond_signal(&queue->wake);
    pthread_mutex_unlock(&queue->lock);
    if (queue->has_thread) pthread_join(queue->thread, NULL);
    pthread_cond_destroy(&queue->done);
    pthread_cond_destroy(&queue->wake);
    pthread_mutex_destroy(&queue->lock);
}

XD_API void xd_queue_destroy(xd_queue *queue) {
    if (!queue || XDI_IS_GONE(xd_queue, queue)) return;
    xd_ctx *ctx = xd_comm_ctx(queue->comm);
    if (!xdi_queue_is_forked(queue)) xdi_queue_stop(queue);
    xdi_queue_take_up_stream(queue);
    if (queue->ctx) xd_comm_destroy(queue->runner);
    xd_ctx_destroy(queue->ctx);
    xd_release(ctx, queue->counts);
    xd_release(ctx, queue->slots);
    xd_release(ctx, queue->line);
    xd_release(ctx, queue);
}
