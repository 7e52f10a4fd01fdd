/* The context: settings, errors, log, memory for the length of a call. */

#include "base/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* A block of memory that a call uses or a later one can reuse. Larger blocks are freed after the call. */
enum { XDI_SCRATCH_BLOCKS = 8, XDI_SCRATCH_KEPT = 64 << 20 };

typedef struct xdi_scratch_block {
    void *memory;
    size_t bytes;
    bool taken;
} xdi_scratch_block;

struct xd_ctx {
    xd_ctx_desc settings; /* every default filled in */
    xd_error error;
    const char *caller_file; /* of XD_AT: for the call in progress, or the next one */
    int caller_line;
    const char *call; /* the public function that the caller is in; NULL -> none */
    xdi_scratch_block scratch[XDI_SCRATCH_BLOCKS];
    xdi_call_room room;
    xdi_pool *pool;        /* NULL: one thread */
    unsigned char *origin; /* see xdi_origin_create */
    int groups;            /* communicators of several ranks */
    int world_rank;        /* in the first of them, which is the world */
    int world_size;        /* 0 -> none was joined */
    bool told_of_locks;
    bool told_of_syncs;
    bool told_of_floats;
    bool is_faulty; /* the other ranks do not know of the fault yet */
    xdi_pool_fault fault;
    bool plans; /* a plan is open */
    xd_plan_desc plan;
    xd_planned planned;
};

/* Large blocks ask for large pages: a pass over them then has far fewer TLB misses, and hardware prefetching stops at
 * the end of a page. Only a hint: nothing else depends on it. */
enum { XDI_CTX_LARGE_PAGE = 2 << 20 };

static void *xdi_ctx_allocate(void *user, size_t bytes) {
    (void)user;
#if defined(MADV_HUGEPAGE)
    const size_t page = XDI_CTX_LARGE_PAGE;
    void *memory = NULL;
    if (bytes >= 2 * page && posix_memalign(&memory, page, bytes) == 0) {
        madvise(memory, bytes / page * page, MADV_HUGEPAGE);
        return memory;
    }
#endif
    return malloc(bytes);
}

static void xdi_ctx_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

/* The first pages of memory from xdi_ctx_allocate, as zeros; how many bytes. Pages given back are zeros when they are next
 * written, which then costs one pass instead of two, and none for what is never written. Some emulators say yes and do
 * nothing, hence the look: a page that is gone was given back, and one that is there is tried with a byte in it. */
enum { XDI_CTX_GIVEN_BACK = 16 << 20 };

static size_t xdi_ctx_give_back(unsigned char *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE) && defined(MADV_DONTNEED)
    const size_t whole = bytes / XDI_CTX_LARGE_PAGE * XDI_CTX_LARGE_PAGE;
    volatile unsigned char *first = (volatile unsigned char *)memory;
    unsigned char there = 1;
    if (bytes < XDI_CTX_GIVEN_BACK || madvise(memory, whole, MADV_DONTNEED) != 0) return 0;
    if (mincore(memory, 1, &there) == 0 && !(there & 1)) return whole;
    *first = 1;
    return madvise(memory, XDI_CTX_LARGE_PAGE, MADV_DONTNEED) == 0 && *first == 0 ? whole : 0;
#else
    (void)memory, (void)bytes;
    return 0;
#endif
}

static double xdi_ctx_clock(void *user) {
    (void)user;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void xdi_ctx_defaults(xd_ctx_desc *d) {
    if (!d->allocator.allocate || !d->allocator.release) {
        d->allocator.allocate = xdi_ctx_allocate;
        d->allocator.release = xdi_ctx_release;
        d->allocator.user = NULL;
    }
    if (d->cpu == XD_CPU_BEST) d->cpu = xd_cpu_best();
    if (!d->clock.now_seconds) d->clock.now_seconds = xdi_ctx_clock;
    if (d->threads == 0) d->threads = 1;
    if (d->timeout_seconds == 0.0) d->timeout_seconds = 60.0;
    if (d->init_timeout_seconds == 0.0) d->init_timeout_seconds = 600.0;
    xdi_files_defaults(&d->files);
}

/* There is no context yet, so the errors go to the logger through one on the stack. */
static xd_result xdi_ctx_check(const xd_ctx_desc *d) {
    xd_ctx nobody;
    memset(&nobody, 0, sizeof nobody);
    nobody.settings = *d;
    /* The negated form also refuses NaN. */
    XD_REQUIRE(&nobody, d->timeout_seconds > 0.0 && d->init_timeout_seconds > 0.0, XD_ERROR_ARGUMENT,
               "timeout_seconds %g and init_timeout_seconds %g must be positive", d->timeout_seconds,
               d->init_timeout_seconds);
    XD_REQUIRE(&nobody, d->threads >= 1 && d->threads <= XDI_THREADS, XD_ERROR_ARGUMENT,
               "%d threads: 1 to %d can be had", d->threads, (int)XDI_THREADS);
    XD_REQUIRE(&nobody, d->files.size && d->files.read && d->files.close, XD_ERROR_ARGUMENT,
               "the files have an open of their own, but no size, read or close");
    XD_REQUIRE(&nobody, !d->files.map || d->files.unmap, XD_ERROR_ARGUMENT,
               "the files have map, but no unmap");
    XD_REQUIRE(&nobody, xd_cpu_supports(d->cpu), XD_ERROR_UNSUPPORTED,
               "this machine or build has no level %s", xd_cpu_level_name(d->cpu));
    return XD_OK;
}

/* The logger and its level have the same offsets in the descs of all versions; nothing else of another version's desc is
 * read. */
XD_PRIVATE xd_result xdi_ctx_check_version(int version, const xd_ctx_desc *desc) {
    xd_ctx nobody;
    memset(&nobody, 0, sizeof nobody);
    if (desc) nobody.settings.logger = desc->logger;
    if (desc) nobody.settings.log_level = desc->log_level;
    XD_REQUIRE(&nobody, version / 100 == XD_VERSION / 100, XD_ERROR_MISMATCH,
               "declarations of version %d.%d.%d, but the implementation is %d.%d.%d", version / 10000,
               version / 100 % 100, version % 100, XD_VERSION_MAJOR, XD_VERSION_MINOR, XD_VERSION_PATCH);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_ctx_make(const xd_ctx_desc *desc, size_t room, xd_ctx **out) {
    xd_ctx_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    xdi_ctx_defaults(&d);
    XD_TRY(xdi_ctx_check(&d));
    xd_ctx *ctx = (xd_ctx *)d.allocator.allocate(d.allocator.user, sizeof *ctx + room);
    if (!ctx) return XD_ERROR_MEMORY;
    memset(ctx, 0, sizeof *ctx + room);
    XDI_BORN(xd_ctx, ctx, ctx);
    ctx->settings = d;
    ctx->error.culprit = -1;
    if (xd_cpu_best() == XD_CPU_PLAIN)
        xd_log(
            ctx, XD_LOG_WARN,
            "this processor has no AVX2: plain loops, which are slow; XDISTILL_PORTABLE brings faster ones");
    (void)xdi_ctx_float_state(ctx);
    ctx->origin = xdi_origin_create();
    if (d.threads > 1) {
        ctx->pool = xdi_pool_create(&ctx->settings, ctx->origin);
        if (!ctx->pool) {
            XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a pool of %d threads", d.threads);
            xd_ctx_destroy(ctx);
            return XD_ERROR_MEMORY;
        }
    }
    *out = ctx;
    return XD_OK;
}

XD_PRIVATE unsigned xdi_ctx_float_state(xd_ctx *ctx) {
    const unsigned state = xd_float_state();
    if (state != 0 && !ctx->told_of_floats)
        xd_log(ctx, XD_LOG_WARN,
               "this thread computes with %s: results have other bits than with rounding to nearest and all "
               "denormals",
               xdi_float_state_name(state));
    ctx->told_of_floats = ctx->told_of_floats || state != 0;
    return state;
}

XD_PRIVATE bool xdi_ctx_is_elsewhere(const xd_ctx *ctx, int64_t process) {
    return xdi_origin_is_elsewhere(ctx->origin, process);
}

XD_PRIVATE size_t xdi_ctx_bytes(size_t room) {
    return sizeof(xd_ctx) + room;
}

XD_PRIVATE void *xdi_ctx_room(const xd_ctx *ctx) {
    return (void *)(uintptr_t)(ctx + 1);
}

XD_API void xd_ctx_destroy(xd_ctx *ctx) {
    if (!ctx || XDI_IS_GONE(xd_ctx, ctx)) return;
    XDI_DEAD(ctx);
    const xd_allocator allocator = ctx->settings.allocator;
    xdi_pool_destroy(ctx->pool, &allocator);
    for (int i = 0; i < XDI_SCRATCH_BLOCKS; i++) xd_release(ctx, ctx->scratch[i].memory);
    xdi_origin_destroy(ctx->origin);
    allocator.release(allocator.user, ctx);
}

XD_API const xd_ctx_desc *xd_ctx_settings(const xd_ctx *ctx) {
    XD_ASSERT(ctx);
    return &ctx->settings;
}

XD_API const xd_error *xd_last_error(const xd_ctx *ctx) {
    XD_ASSERT(ctx);
    return &ctx->error;
}

XD_PRIVATE void xdi_clear_error(xd_ctx *ctx) {
    XD_ASSERT(ctx);
    memset(&ctx->error, 0, sizeof ctx->error);
    ctx->error.culprit = -1;
    ctx->error.rank = ctx->settings.rank;
}

XD_PRIVATE xd_ctx *xdi_call_begin(xd_ctx *ctx, const char *function) {
#if defined(XDISTILL_DEBUG)
    if (!ctx || !xdi_live_use(ctx)) return NULL;
#endif
    if (!ctx || ctx->call || strncmp(function, "xd_", 3) != 0) return NULL;
    ctx->call = function;
    return ctx;
}

XD_PRIVATE void xdi_call_end(xd_ctx **outermost) {
    if (!*outermost) return;
    (*outermost)->call = NULL;
    (*outermost)->caller_file = NULL;
}

/* An error between ranks names the public function that this rank is in: the text alone often names a step of it. */
static void xdi_ctx_name_call(xd_ctx *ctx) {
    xd_error *error = &ctx->error;
    char suffix[96];
    if (!ctx->call || (error->result != XD_ERROR_TIMEOUT && error->result != XD_ERROR_PEER &&
                       error->result != XD_ERROR_MISMATCH))
        return;
    const size_t bytes = (size_t)snprintf(suffix, sizeof suffix, " (in %s)", ctx->call);
    const size_t used = strlen(error->message), room = sizeof error->message - 1 - bytes;
    if (bytes < sizeof suffix && !strstr(error->message, suffix))
        memcpy(error->message + (used < room ? used : room), suffix, bytes + 1);
}

XD_PRIVATE xd_result xdi_ctx_adopt(xd_ctx *ctx, const xd_error *error) {
    ctx->error = *error;
    xdi_ctx_name_call(ctx);
    return error->result;
}

XD_API xd_ctx *xd_at(xd_ctx *ctx, const char *file, int line) {
    if (!ctx) return NULL; /* the call says so */
    ctx->caller_file = file;
    ctx->caller_line = line;
    return ctx;
}

XD_API void xd_ctx_set_rank(xd_ctx *ctx, int rank) {
    ctx->settings.rank = rank;
}

XD_PRIVATE void xdi_ctx_set_level(xd_ctx *ctx, xd_cpu_level level) {
    ctx->settings.cpu = level;
}

XD_API void xd_ctx_set_kernels(xd_ctx *ctx, const struct xd_kernels *kernels) {
    ctx->settings.kernels = kernels;
}

XD_API void xd_ctx_set_stream(xd_ctx *ctx, void *stream) {
    XD_ASSERT(ctx);
    ctx->settings.stream = stream;
}

XD_API double xd_now(const xd_ctx *ctx) {
    return ctx->settings.clock.now_seconds(ctx->settings.clock.user);
}

XD_PRIVATE void *xdi_allocate_unwritten(xd_ctx *ctx, size_t bytes) {
    const xd_allocator *a = &ctx->settings.allocator;
    return a->allocate(a->user, bytes ? bytes : 1);
}

XD_PRIVATE void xdi_clear(const xd_ctx *ctx, void *memory, size_t bytes) {
    const size_t page = XDI_CTX_LARGE_PAGE;
    unsigned char *begin = (unsigned char *)memory, *rest = begin;
    size_t before = (page - (uintptr_t)memory % page) % page; /* in a page that others share */
    if (before > bytes) before = bytes;
    if (ctx->settings.allocator.allocate == xdi_ctx_allocate)
        rest += before + xdi_ctx_give_back(begin + before, bytes - before);
    memset(begin, 0, rest == begin ? 0 : before);
    memset(rest, 0, bytes - (size_t)(rest - begin));
}

XD_API void *xd_allocate(xd_ctx *ctx, size_t bytes) {
    XD_ASSERT(ctx);
    void *memory = xdi_allocate_unwritten(ctx, bytes);
    if (memory) xdi_clear(ctx, memory, bytes);
    return memory;
}

XD_API void xd_release(xd_ctx *ctx, void *memory) {
    if (memory) XDI_DEAD(memory);
    if (memory) ctx->settings.allocator.release(ctx->settings.allocator.user, memory);
}

/* The smallest free block that is large enough; else the smallest free one, to be replaced. */
static xdi_scratch_block *xdi_scratch_find(xd_ctx *ctx, size_t bytes) {
    xdi_scratch_block *best = NULL;
    for (int i = 0; i < XDI_SCRATCH_BLOCKS; i++) {
        xdi_scratch_block *b = &ctx->scratch[i];
        if (b->taken) continue;
        const bool fits = b->bytes >= bytes, best_fits = best && best->bytes >= bytes;
        if (!best || (fits && !best_fits) || (fits == best_fits && b->bytes < best->bytes)) best = b;
    }
    return best;
}

XD_PRIVATE xdi_call_room *xdi_ctx_call_room(xd_ctx *ctx) {
    return &ctx->room;
}

XD_PRIVATE void *xdi_scratch_take(xd_ctx *ctx, size_t bytes) {
    const xd_allocator *allocator = &ctx->settings.allocator;
    xdi_scratch_block *b = bytes <= XDI_SCRATCH_KEPT ? xdi_scratch_find(ctx, bytes) : NULL;
    if (!b) return allocator->allocate(allocator->user, bytes ? bytes : 1);
    if (b->bytes < bytes || !b->memory) {
        xd_release(ctx, b->memory);
        b->memory = allocator->allocate(allocator->user, bytes ? bytes : 1);
        b->bytes = b->memory ? bytes : 0;
    }
    b->taken = b->memory != NULL;
    return b->memory;
}

XD_PRIVATE void xdi_scratch_give(xd_ctx *ctx, void *memory) {
    if (!memory) return;
    for (int i = 0; i < XDI_SCRATCH_BLOCKS; i++)
        if (ctx->scratch[i].memory == memory) {
            ctx->scratch[i].taken = false;
            return;
        }
    xd_release(ctx, memory);
}

/* ---- threads ---- */

XD_PRIVATE void xdi_ctx_join(xd_ctx *ctx, int rank, int size) {
    if (size < 2) return;
    ctx->groups++;
    if (ctx->world_size) return;
    ctx->world_rank = rank;
    ctx->world_size = size;
}

XD_PRIVATE void xdi_ctx_leave(xd_ctx *ctx, int size) {
    if (size > 1 && --ctx->groups == 0) ctx->world_size = 0;
}

XD_PRIVATE int xdi_ctx_world(const xd_ctx *ctx, int *rank) {
    *rank = ctx->world_rank;
    return ctx->world_size;
}

static xd_result xdi_ctx_fault(xd_ctx *ctx, const xdi_pool_fault *f) {
    XD_REQUIRE(ctx, f->piece >= 0 && f->piece < f->pieces, XD_ERROR_STATE,
               "parallel_for asked for piece %lld of %lld", (long long)f->piece, (long long)f->pieces);
    return XD_FAIL(ctx, XD_ERROR_STATE, "parallel_for ran piece %lld of %lld %d times instead of once",
                   (long long)f->piece, (long long)f->pieces, f->runs);
}

XD_PRIVATE void xdi_ctx_warn_of_locks(xd_ctx *ctx, const char *path, int error) {
    if (!ctx->told_of_locks)
        xd_log(ctx, XD_LOG_WARN, "%s: no locks here (%s): what writers that died have left stays", path,
               strerror(error));
    ctx->told_of_locks = true;
}

XD_PRIVATE void xdi_ctx_tell_of_syncs(xd_ctx *ctx, const char *path, int error) {
    if (!ctx->told_of_syncs)
        xd_log(ctx, XD_LOG_INFO, "%s: no sync of directories here (%s): a power loss may undo a rename", path,
               strerror(error));
    ctx->told_of_syncs = true;
}

XD_PRIVATE xd_result xdi_ctx_settle(xd_ctx *ctx) {
    if (!ctx->is_faulty) return XD_OK;
    ctx->is_faulty = false;
    return xdi_ctx_fault(ctx, &ctx->fault);
}

/* A rank of several must not return here: its peers would wait for it in their next exchange. */
XD_PRIVATE xd_result xdi_parallel(xd_ctx *ctx, int64_t pieces, xdi_piece body, void *argument) {
    xdi_pool_fault fault;
    if (xdi_pool_run(ctx->pool, pieces, body, argument, &fault)) return XD_OK;
    if (ctx->groups == 0) return xdi_ctx_fault(ctx, &fault);
    if (!ctx->is_faulty) ctx->fault = fault;
    ctx->is_faulty = true;
    xd_log(ctx, XD_LOG_WARN,
           "parallel_for did not run piece %lld of %lld once; the next exchange of ranks fails",
           (long long)fault.piece, (long long)pieces);
    return XD_OK;
}

/* A range and how it is split. */
typedef struct xdi_ctx_range {
    xdi_range body;
    void *argument;
    int64_t count, grain;
} xdi_ctx_range;

static void xdi_ctx_range_piece(void *argument, int64_t piece, int slot) {
    const xdi_ctx_range *r = (const xdi_ctx_range *)argument;
    const int64_t begin = piece * r->grain, left = r->count - begin;
    r->body(r->argument, begin, begin + (left < r->grain ? left : r->grain), slot);
}

XD_PRIVATE xd_result xdi_parallel_range(xd_ctx *ctx, int64_t count, int64_t grain, xdi_range body,
                                        void *argument) {
    const int64_t least = (count + XDI_PIECES - 1) / XDI_PIECES;
    xdi_ctx_range range = { body, argument, count, grain > least ? grain : least };
    if (count <= 0) return XD_OK;
    if (!ctx->pool) range.grain = count;
    return xdi_parallel(ctx, (count + range.grain - 1) / range.grain, xdi_ctx_range_piece, &range);
}

XD_PRIVATE void *xdi_parallel_scratch(const xd_ctx *ctx, int slot) {
    return xdi_pool_scratch(ctx->pool, slot);
}

/* Bytes at the text that are a control character: those of ASCII, DEL, and U+0080 to U+009F in UTF-8; 0 -> none. */
static size_t xdi_control_bytes(const unsigned char *text) {
    if (text[0] < 0x20 || text[0] == 0x7f) return 1;
    return text[0] == 0xc2 && text[1] >= 0x80 && text[1] < 0xa0 ? 2 : 0;
}

XD_API const char *xd_text_escape(const char *text, char *out, size_t size) {
    const unsigned char *from = (const unsigned char *)text;
    size_t used = 0;
    while (*from) {
        const size_t control = xdi_control_bytes(from), needed = control ? 4 * control : 1;
        if (used + needed >= size) break;
        if (!control) out[used++] = (char)*from++;
        for (size_t i = 0; i < control; i++, used += 4)
            snprintf(out + used, size - used, "\\x%02x", (unsigned)*from++);
    }
    out[used] = '\0';
    return out;
}

static void xdi_log_to_stderr(void *user, xd_log_level level, const char *line) {
    (void)user;
    (void)level;
    fprintf(stderr, "%s\n", line);
}

XD_API xd_logger xd_stderr_logger(void) {
    xd_logger logger;
    logger.write = xdi_log_to_stderr;
    logger.user = NULL;
    return logger;
}

static bool xdi_log_enabled(const xd_ctx *ctx, xd_log_level level) {
    /* The enumeration starts at the default, since zero must be one; this is the order of verbosity. */
    static const int loudness[] = { 2, 0, 1, 3, 4 };
    return ctx->settings.logger.write && loudness[level] <= loudness[ctx->settings.log_level];
}

XD_API void xd_log(xd_ctx *ctx, xd_log_level level, const char *format, ...) {
    if (!xdi_log_enabled(ctx, level)) return;
    char text[640], line[640];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    xd_text_escape(text, line, sizeof line);
    ctx->settings.logger.write(ctx->settings.logger.user, level, line);
}

static void xdi_ctx_record(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                           const char *function, const char *format, va_list arguments) {
    if (!ctx) return; /* nothing keeps the message */
    xd_error *error = &ctx->error;
    error->result = result;
    error->file = file;
    error->line = line;
    error->function = function;
    error->rank = ctx->settings.rank;
    error->culprit = culprit;
    /* Formatted beside the record first: an argument may be the previous message. */
    char message[sizeof error->message];
    vsnprintf(message, sizeof message, format, arguments);
    xd_text_escape(message, error->message, sizeof error->message);
    if (ctx->caller_file) {
        const size_t used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used, " (caller %s:%d)", ctx->caller_file,
                 ctx->caller_line);
        if (!ctx->call) ctx->caller_file = NULL; /* nothing else ends with its call */
    }
    xdi_ctx_name_call(ctx);
    xd_log(ctx, XD_LOG_ERROR, "%s:%d: [xd][rank %d] %s: %s: %s", file, line, error->rank, function,
           xd_result_name(result), error->message);
}

XD_API xd_result xd_fail(xd_ctx *ctx, xd_result result, const char *file, int line, const char *function,
                         const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    xdi_ctx_record(ctx, result, -1, file, line, function, format, arguments);
    va_end(arguments);
    return result;
}

XD_API xd_result xd_fail_culprit(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                                 const char *function, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    xdi_ctx_record(ctx, result, culprit, file, line, function, format, arguments);
    va_end(arguments);
    return result;
}

XD_PRIVATE void *xdi_object_allocate(xd_ctx *ctx, size_t bytes, const char *type) {
    void *object = xd_allocate(ctx, bytes);
#if defined(XDISTILL_DEBUG)
    if (object) xdi_live_begin(ctx, object, type);
#else
    (void)type;
#endif
    return object;
}

#if defined(XDISTILL_DEBUG)
/* The error goes to the context of this thread: the object's own may be gone, or another thread's. */
XD_PRIVATE xd_result xdi_object_check(const void *object, const char *type, const char *name,
                                      const char *file, int line, const char *function) {
    const char *other = NULL;
    const xdi_life life = object ? xdi_live_ask(object, type, &other) : XDI_LIFE_ALIVE;
    if (life == XDI_LIFE_ALIVE) return XD_OK;
    if (life == XDI_LIFE_DESTROYED)
        return xd_fail(xdi_live_current(), XD_ERROR_STATE, file, line, function,
                       "%s is an %s that was destroyed", name, type);
    return xd_fail(xdi_live_current(), XD_ERROR_ARGUMENT, file, line, function, "%s is no %s, but %s%s", name,
                   type, other ? "an " : "no object of the library", other ? other : "");
}
#endif

XD_PRIVATE xd_result xdi_given(xd_ctx *ctx, bool in_plan, const char *file, int line, const char *function,
                               const char *names, int count, ...) {
    va_list pointers;
    int given = 0;
#if defined(XDISTILL_DEBUG)
    XD_TRY(xdi_object_check(ctx, "xd_ctx", "the context", file, line, function));
#endif
    va_start(pointers, count);
    while (given < count && va_arg(pointers, const void *)) given++;
    va_end(pointers);
    if (given == count)
        return in_plan || !xdi_plan_is_open(ctx) ? XD_OK : xdi_plan_refuse(ctx, file, line, function);
    for (; given > 0; given--) names += strcspn(names, ",") + 1;
    names += strspn(names, " ");
#if defined(XDISTILL_DEBUG)
    if (!ctx) ctx = xdi_live_current(); /* of a NULL object: the message goes where this thread looks */
#endif
    (void)xd_fail(ctx, XD_ERROR_ARGUMENT, file, line, function, "%.*s is NULL", (int)strcspn(names, ","),
                  names);
    return XD_ERROR_ARGUMENT;
}

XD_PRIVATE bool xdi_size_multiply(size_t a, size_t b, size_t *product) {
    if (b && a > SIZE_MAX / b) return false;
    *product = a * b;
    return true;
}

/* ---- plans ---- */

XD_API xd_result xd_plan_begin(xd_ctx *ctx, const xd_plan_desc *desc) {
    XDI_GIVEN_IN_PLAN(ctx, ctx);
    const int ranks = desc ? desc->ranks : 0, rank = desc ? desc->rank : 0;
    XD_REQUIRE(ctx, !ctx->plans, XD_ERROR_STATE, "a plan is open for rank %d of %d: xd_plan_end ends it",
               ctx->plan.rank, ctx->plan.ranks);
    XD_REQUIRE(ctx, ranks >= 0 && rank >= 0 && rank < (ranks ? ranks : 1), XD_ERROR_ARGUMENT,
               "a plan for rank %d of %d", rank, ranks);
    memset(&ctx->planned, 0, sizeof ctx->planned);
    ctx->plans = true;
    ctx->plan.ranks = ranks;
    ctx->plan.rank = rank;
    return XD_OK;
}

XD_API xd_result xd_plan_end(xd_ctx *ctx, xd_planned *out) {
    XDI_GIVEN_IN_PLAN(ctx, ctx);
    XD_REQUIRE(ctx, ctx->plans, XD_ERROR_STATE, "no plan is open: xd_plan_begin opens one");
    ctx->plans = false;
    if (out) *out = ctx->planned;
    return XD_OK;
}

XD_PRIVATE bool xdi_plan_is_open(const xd_ctx *ctx) {
    return ctx && ctx->plans;
}

XD_PRIVATE bool xdi_plan_place(const xd_ctx *ctx, int *rank, int *ranks) {
    if (!ctx->plans || ctx->plan.ranks == 0) return false;
    *rank = ctx->plan.rank;
    *ranks = ctx->plan.ranks;
    return true;
}

XD_PRIVATE xd_result xdi_plan_refuse(xd_ctx *ctx, const char *file, int line, const char *function) {
    const bool makes = strstr(function, "_create") != NULL;
    const xd_result result = makes ? XD_ERROR_UNSUPPORTED : XD_ERROR_STATE;
    (void)xd_fail(ctx, result, file, line, function, "%s while a plan is open%s: xd_plan_end ends it",
                  function, makes ? ", which does not measure it" : "");
    return result;
}

XD_PRIVATE xd_result xdi_plan_add(xd_ctx *ctx, xd_memory_bytes bytes) {
    xd_memory_bytes *sum = &ctx->planned.memory;
    XD_REQUIRE(ctx, bytes.host <= SIZE_MAX - sum->host && bytes.device <= SIZE_MAX - sum->device,
               XD_ERROR_MEMORY, "a plan of %zu and %zu bytes of the host, %zu and %zu of the device",
               sum->host, bytes.host, sum->device, bytes.device);
    sum->host += bytes.host;
    sum->device += bytes.device;
    return XD_OK;
}

XD_PRIVATE void xdi_plan_add_sent(xd_ctx *ctx, uint64_t forward, uint64_t backward) {
    xd_planned *sum = &ctx->planned;
    sum->forward_sent += forward;
    sum->backward_sent += backward;
}

XD_PRIVATE xd_result xdi_plan_add_workspace(xd_ctx *ctx, xd_result checked, size_t bytes) {
    xd_planned *sum = &ctx->planned;
    if (checked == XD_OK && bytes > sum->workspace) sum->workspace = bytes;
    return checked;
}
