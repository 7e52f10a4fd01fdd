#ifndef XDI_BASE_INTERNAL_H
#define XDI_BASE_INTERNAL_H

#include "base/dtype.h"
#include "base/extend.h"
#include "base/live.h"
#include "base/plan.h"
#include "base/section.h"

/* A function that is called and never inlined, however small. */
#if defined(__GNUC__)
#    define XDI_NOINLINE __attribute__((noinline))
#else
#    define XDI_NOINLINE
#endif

/* file.c: fills in the POSIX entries where the caller gave none. */
XD_PRIVATE void xdi_files_defaults(xd_files *files);

/* lock.c: the folder of a path, "." for none; `folder` has room for the path and two more. */
XD_PRIVATE void xdi_path_folder(const char *path, char *folder);

/* lock.c: removes a temporary file unless its writer lives; and all whose names are path, suffix and a number. Where there are no
 * locks they stay, with one warning a context. */
XD_PRIVATE bool xdi_abandoned_remove(xd_ctx *ctx, const char *path);
XD_PRIVATE void xdi_abandoned_sweep(xd_ctx *ctx, const char *path, const char *suffix);
XD_PRIVATE void xdi_ctx_warn_of_locks(xd_ctx *ctx, const char *path, int error); /* context.c */

/* publish.c: syncs a directory: 0, also where the file system offers no such sync, with one INFO a context; or an errno value. */
XD_PRIVATE int xdi_directory_sync(xd_ctx *ctx, const char *path);
XD_PRIVATE void xdi_ctx_tell_of_syncs(xd_ctx *ctx, const char *path, int error); /* context.c */

/* publish.c: makes a directory and those above it that are missing: 0, also when it exists, or an errno value. */
XD_PRIVATE int xdi_directory_make_all(xd_ctx *ctx, const char *path);

/* lock.c: one writer at a time. The file `path` exists while the lock is held, or its holder died. Errors: STATE when another
 * writer of any process has it; IO. Where there are no locks nothing is taken. */
typedef struct xdi_lock {
    intptr_t file, held;
    int64_t process; /* that has it: one that is forked from it drops nothing */
    bool taken;
} xdi_lock;
XD_PRIVATE xd_result xdi_lock_take(xd_ctx *ctx, const char *path, xdi_lock *lock);
XD_PRIVATE void xdi_lock_drop(xd_ctx *ctx, const char *path, xdi_lock *lock);

/* publish.c: opens a file to be read: in its directory, or when that is missing, in the older one that a writer of the directory
 * put aside. */
#define XDI_DIRECTORY_OLD ".old-0"
XD_PRIVATE int xdi_file_open_read(xd_ctx *ctx, const char *path, intptr_t *file);

/* directory.c: removes a directory with all that is in it: 0, also when there is none, or an errno value. */
XD_PRIVATE int xdi_directory_remove(xd_ctx *ctx, const char *path);

/* publish.c: 0 when a file is there and can be read, otherwise why not: ENOENT when nothing has that name. */
XD_PRIVATE int xdi_file_probe(xd_ctx *ctx, const char *path);

/* file.c: why a file could not be opened. */
XD_PRIVATE const char *xdi_open_error(int error);

/* publish.c: FORMAT, naming `what`, when the bytes are a pointer of Git LFS instead of the file that it stands for. */
XD_PRIVATE xd_result xdi_refuse_pointer(xd_ctx *ctx, const char *what, const void *data, size_t bytes);

/* json.c: bytes of the byte-order mark of UTF-8 that the text begins with, 0 without one. */
XD_PRIVATE size_t xdi_json_mark_bytes(const char *text, size_t bytes);
/* json.c: the bytes at the beginning of a text that are well-formed UTF-8. */
XD_PRIVATE size_t xdi_json_valid_bytes(const char *text, size_t bytes);

/* json.c: xd_json_find of a key that has a length; and member `index` of an object when the members are sorted by the bytes of
 * their keys, in O(1). */
struct xd_json;
XD_PRIVATE const struct xd_json *xdi_json_find_n(const struct xd_json *object, const char *key,
                                                 size_t key_bytes);
XD_PRIVATE const struct xd_json *xdi_json_by_key(const struct xd_json *object, size_t index);

/* crc.c: xd_crc32c of a followed by b, from that of each (begun with 0) and the length of b in bytes. Ranks and threads with
 * parts of a file compute the checksum of the whole with it. About 31 steps for any length. Pure. */
XD_PRIVATE uint32_t xdi_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

/* context.c: objects, which calls refuse by name with XDISTILL_DEBUG. NULL passes. Without it nothing is known of them.
 *
 *   XDI_OBJECT    zeroed memory of an object, as xd_allocate
 *   XDI_LIVE      returns STATE for one that was destroyed, ARGUMENT for one of another type, or none
 *   XDI_IS_GONE   the same for a destroy: true, and the error is recorded */
XD_PRIVATE void *xdi_object_allocate(xd_ctx *ctx, size_t bytes, const char *type);
#define XDI_OBJECT(type, ctx, bytes) ((type *)xdi_object_allocate((ctx), (bytes), #type))
#if defined(XDISTILL_DEBUG)
XD_PRIVATE xd_result xdi_object_check(const void *object, const char *type, const char *name,
                                      const char *file, int line, const char *function);
#    define XDI_CHECK_LIVE(type, object) \
        xdi_object_check((object), #type, #object, __FILE__, __LINE__, __func__)
#    define XDI_LIVE(type, object) XD_TRY(XDI_CHECK_LIVE(type, object))
#    define XDI_IS_GONE(type, object) (XDI_CHECK_LIVE(type, object) != XD_OK)
#else
#    define XDI_LIVE(type, object) ((void)0)
#    define XDI_IS_GONE(type, object) false
#endif

/* context.c: the call of a public function, from XDI_CALL to the end of its block: errors between ranks name it, and XD_AT is of
 * it. The outermost call counts, not those that the library makes within. The macros for arguments below begin with it. Without
 * GNU C no error names its call. */
XD_PRIVATE xd_ctx *xdi_call_begin(xd_ctx *ctx, const char *function);
XD_PRIVATE void xdi_call_end(xd_ctx **outermost);
#define XDI_JOIN_AS(a, b) a##b
#define XDI_JOIN(a, b) XDI_JOIN_AS(a, b)
#if defined(__GNUC__)
#    define XDI_CALL(ctx)                                                                         \
        xd_ctx *XDI_JOIN(xdi_call_at_, __LINE__) __attribute__((cleanup(xdi_call_end), unused)) = \
            xdi_call_begin((ctx), __func__)
#else
#    define XDI_CALL(ctx) ((void)0)
#endif

/* context.c: ARGUMENT, naming the first of `names` whose pointer is NULL. The macros write the names and count them, eight at
 * most: XDI_GIVEN(ctx, desc, out) returns the error, XDI_CHECK_GIVEN gives it, XDI_GIVEN_OF has the context of the object that
 * comes first. No context: no message. XDI_GIVEN_LIST refuses a count without its list. While a plan is open they refuse the call,
 * but XDI_GIVEN_IN_PLAN does not: it is for calls that a plan measures, and for those that only compute numbers. */
XD_PRIVATE xd_result xdi_given(xd_ctx *ctx, bool in_plan, const char *file, int line, const char *function,
                               const char *names, int count, ...);
#define XDI_NINTH(a, b, c, d, e, f, g, h, ninth, ...) ninth
#define XDI_CHECK_GIVEN_AS(ctx, in_plan, ...)                               \
    xdi_given((ctx), (in_plan), __FILE__, __LINE__, __func__, #__VA_ARGS__, \
              XDI_NINTH(__VA_ARGS__, 8, 7, 6, 5, 4, 3, 2, 1, 0), __VA_ARGS__)
#define XDI_CHECK_GIVEN(ctx, ...) XDI_CHECK_GIVEN_AS(ctx, false, __VA_ARGS__)
#define XDI_GIVEN(ctx, ...) \
    XDI_CALL(ctx);          \
    XD_TRY(XDI_CHECK_GIVEN(ctx, __VA_ARGS__))
#define XDI_GIVEN_IN_PLAN(ctx, ...) \
    XDI_CALL(ctx);                  \
    XD_TRY(XDI_CHECK_GIVEN_AS(ctx, true, __VA_ARGS__))
#define XDI_GIVEN_OF(object, ...) XDI_GIVEN((object) ? (object)->ctx : NULL, object, __VA_ARGS__)
#define XDI_GIVEN_LIST(ctx, list, count)                                                                \
    XD_REQUIRE(ctx, (list) != NULL || (count) <= 0, XD_ERROR_ARGUMENT, "%s is NULL and %s %lld", #list, \
               #count, (long long)(count))

/* context.c: whether a plan is open; the rank that it is for, false for the caller's own; the error of a call that cannot be
 * planned; and what calls add. kernels.c has xdi_plan_take. */
XD_PRIVATE bool xdi_plan_is_open(const xd_ctx *ctx);
XD_PRIVATE bool xdi_plan_place(const xd_ctx *ctx, int *rank, int *ranks);
XD_PRIVATE xd_result xdi_plan_refuse(xd_ctx *ctx, const char *file, int line, const char *function);
XD_PRIVATE xd_result xdi_plan_add(xd_ctx *ctx, xd_memory_bytes bytes);
XD_PRIVATE void xdi_plan_add_sent(xd_ctx *ctx, uint64_t forward, uint64_t backward);
XD_PRIVATE xd_result xdi_plan_add_workspace(xd_ctx *ctx, xd_result checked,
                                            size_t bytes); /* returns `checked` */

/* context.c: refuses declarations of another major or minor version. */
XD_PRIVATE xd_result xdi_ctx_check_version(int version, const xd_ctx_desc *desc);
/* context.c: a context followed by `room` zero bytes, for the tables that the kernel layer fills in (xd_ctx_create); the
 * address of these bytes, aligned for pointers; and a change of the CPU level, whose tables the caller fills in again. */
XD_PRIVATE xd_result xdi_ctx_make(const xd_ctx_desc *desc, size_t room, xd_ctx **out);
XD_PRIVATE void *xdi_ctx_room(const xd_ctx *ctx);
XD_PRIVATE void xdi_ctx_set_level(xd_ctx *ctx, xd_cpu_level level);

/* context.c: the error of another context, which has logged it, becomes the last one of this; returns its result. */
XD_PRIVATE xd_result xdi_ctx_adopt(xd_ctx *ctx, const xd_error *error);

/* half.c: as xd_bf16_from_f32. */
XD_PRIVATE uint16_t xdi_f16_from_f32(float value);

/* dtype.c: inverse of xd_dtype_name; XD_DTYPE_NONE for an unknown name. */
XD_PRIVATE xd_dtype xdi_dtype_from_name(const char *name);

/* context.c: forgets the last failure of a context. A broken world stays broken. */
XD_PRIVATE void xdi_clear_error(xd_ctx *ctx);

/* context.c: a * b, false when it overflows. */
XD_PRIVATE bool xdi_size_multiply(size_t a, size_t b, size_t *product);

/* floats.c: the processor's own word for the floating-point state of this thread, and a state for it from another thread. */
XD_PRIVATE uint64_t xdi_float_word(void);
XD_PRIVATE void xdi_float_set(uint64_t word);

/* floats.c: the name of an xd_float_state, a constant string. */
XD_PRIVATE const char *xdi_float_state_name(unsigned state);

/* context.c: the floating-point state of this thread, with one warning a context when it is not that of a C program. */
XD_PRIVATE unsigned xdi_ctx_float_state(xd_ctx *ctx);

/* parallel.c: threads that run the pieces of a round of work, each with private memory for its length. Slots are below
 * settings->threads; pieces that run at the same time have different slots, and where the pool runs them, slot 0 is the
 * calling thread's. */
enum { XDI_THREADS = 1024, XDI_PIECES = 1024 };
#define XDI_POOL_SCRATCH ((size_t)1 << 21)
typedef void (*xdi_piece)(void *argument, int64_t piece, int slot);
typedef struct xdi_pool xdi_pool;
typedef struct xdi_pool_fault {
    /* the piece that parallel_for did not run exactly once, or that does not exist; their number */
    int64_t piece, pieces;
    int runs;
} xdi_pool_fault;
XD_PRIVATE xdi_pool *xdi_pool_create(const xd_ctx_desc *settings,
                                     const unsigned char *origin); /* NULL when there is no room */
XD_PRIVATE void xdi_pool_destroy(xdi_pool *pool, const xd_allocator *allocator); /* NULL is fine */
XD_PRIVATE void *xdi_pool_scratch(const xdi_pool *pool, int slot);
XD_PRIVATE bool xdi_pool_run(xdi_pool *pool, int64_t pieces, xdi_piece body, void *argument,
                             xdi_pool_fault *fault);

/* fork.c: the number of this process; and whether this process was forked from that one: then the threads, locks and names in
 * the file system that belong to the other are left alone. */
XD_PRIVATE int64_t xdi_process(void);
XD_PRIVATE bool xdi_is_forked(int64_t process);

/* fork.c: what tells the same without a system call, for objects of one context: a byte that is 0 in a forked process. NULL where
 * the system has no such memory. */
XD_PRIVATE unsigned char *xdi_origin_create(void);
XD_PRIVATE void xdi_origin_destroy(unsigned char *origin);
XD_PRIVATE bool xdi_origin_is_elsewhere(const unsigned char *origin, int64_t process);
/* context.c: whether this process was forked from the one that made an object of the context. */
XD_PRIVATE bool xdi_ctx_is_elsewhere(const xd_ctx *ctx, int64_t process);

/* parallel.c: starts a thread of the library, which leaves the program's signals alone. `thread` is a pthread_t. */
XD_PRIVATE bool xdi_thread_create(void *thread, void *(*run)(void *argument), void *argument);

/* context.c: calls body for every piece, at most XDI_PIECES of them, on the threads of the context, and waits. With one
 * thread, for one piece, or when called from within a piece, all run on the calling thread, in order, with slot 0. A body
 * neither fails nor allocates from this context, and uses no scratch when it may itself be called from a piece. The split
 * into pieces must not depend on the number of threads unless each piece writes only its own elements. Errors: STATE when
 * parallel_for did not run each piece once; all pieces have been run even so, and a rank of several gets XD_OK here and the
 * error from xdi_ctx_settle. */
XD_PRIVATE xd_result xdi_parallel(xd_ctx *ctx, int64_t pieces, xdi_piece body, void *argument);

/* context.c: the same over the items [0, count), about `grain` of them in a piece; one piece with one thread. */
typedef void (*xdi_range)(void *argument, int64_t begin, int64_t end, int slot);
XD_PRIVATE xd_result xdi_parallel_range(xd_ctx *ctx, int64_t count, int64_t grain, xdi_range body,
                                        void *argument);

/* context.c: counts communicators of several ranks, created and destroyed; the first is the world. xdi_ctx_world returns its size,
 * 0 without one. */
XD_PRIVATE void xdi_ctx_join(xd_ctx *ctx, int rank, int size);
XD_PRIVATE void xdi_ctx_leave(xd_ctx *ctx, int size);
XD_PRIVATE int xdi_ctx_world(const xd_ctx *ctx, int *rank);

/* context.c: STATE when a parallel_for failed and the other ranks have not been informed; XD_OK the next time. */
XD_PRIVATE xd_result xdi_ctx_settle(xd_ctx *ctx);

/* context.c: XDI_POOL_SCRATCH bytes for the length of a piece, for a slot other than 0; slot 0 uses memory of the call,
 * with one thread too. */
XD_PRIVATE void *xdi_parallel_scratch(const xd_ctx *ctx, int slot);

/* memory.c: as xd_arena_take_pointer, but gives the offset, also in a planning run; false without room. */
XD_PRIVATE bool xdi_arena_take(xd_arena *arena, size_t bytes, size_t *offset);

/* memory.c: a block of count elements; NULL in a planning run. *fits becomes false when there is no room. */
XD_PRIVATE void *xdi_arena_array(xd_arena *arena, int64_t count, size_t size, bool *fits);

/* context.c: bytes of a context with one thread and this room (xdi_ctx_make), before it has scratch memory. */
XD_PRIVATE size_t xdi_ctx_bytes(size_t room);

/* context.c: xd_allocate in two parts: memory with undefined contents, and zeros in some of it, where large ranges cost nothing
 * before they are written. What is overwritten at once needs no zeros. */
XD_PRIVATE void *xdi_allocate_unwritten(xd_ctx *ctx, size_t bytes);
XD_PRIVATE void xdi_clear(const xd_ctx *ctx, void *memory, size_t bytes);

/* context.c: memory for the length of a call, aligned for any type, not zeroed; NULL when there is no room. The
 * context caches what is returned to it, so that repeated calls allocate nothing. */
/* context.c: the caller's memory for the call that runs: what kernels.c gives out of it. base NULL: none. */
typedef struct xdi_call_room {
    unsigned char *base;
    size_t bytes, used;
} xdi_call_room;
XD_PRIVATE xdi_call_room *xdi_ctx_call_room(xd_ctx *ctx);
XD_PRIVATE void *xdi_scratch_take(xd_ctx *ctx, size_t bytes);
XD_PRIVATE void xdi_scratch_give(xd_ctx *ctx, void *memory); /* NULL is fine */

/* sort.c: sorts pointers in O(n log n) for every input; not stable. `order` is as for qsort, on the pointers. */
typedef int (*xdi_sort_order)(const void *a, const void *b);
XD_PRIVATE void xdi_sort(const void **items, size_t count, xdi_sort_order order);
/* sort.c: the number of an item in an array that is sorted by `order`, of items of `each` bytes; -1. `order` gets the key first. */
XD_PRIVATE int64_t xdi_find(const void *key, const void *items, size_t each, int64_t count,
                            xdi_sort_order order);

#endif
