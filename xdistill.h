/* xdistill.h - v0.1.0 - distributed distillation in one C99 header. License at the end of the file.

   In *one* C or C++ file:                          Everywhere else:
       #define XDISTILL_IMPLEMENTATION                  #include "xdistill.h"
       #include "xdistill.h"                        cc -std=c99 -O2 app.c -o app -lm -lpthread

   PURPOSE         Your trainer keeps its own model and its own loop. This header brings what a distributed
                   distillation needs around them: meshes, sharded tensors, losses over a vocabulary and a sequence
                   that are split over ranks, AdamW, EMA, safetensors files. Ranks are threads of one process, or
                   processes through a companion header (xdistill_mpi.h).

   BUILD OPTIONS   XDISTILL_STATIC, XD_API, XD_ASSERT; all else is a run-time field of a desc struct.
   SHAPES          T tokens, V vocabulary, H hidden, L layers; [T, V/tp] = columns split over axis "tp".
   ERRORS          Every function that can fail returns an xd_result; xd_last_error(ctx) has the message, the place
                   and the rank. Ranks fail alike: no rank is left waiting for one that has refused.
   CONTENTS        search for ">>": one marker a part, declarations first, then the implementation. */

/* Generated from src/xdistill.h by tools/amalgamate.py. Edit src/, then run `make amalgamate`. */
#ifndef XDISTILL_H
#define XDISTILL_H

/* ---- declarations, in the order of the layers ---- */
/* >>base/config */

/* The implementation needs POSIX clocks, files and threads. The names below must be set before the first libc header,
 * so the implementation sets them when it comes first; context.c stops with the line to add when it came too late. */
#if defined(XDISTILL_IMPLEMENTATION) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#if defined(__FAST_MATH__)
#error "xdistill promises bits: compile the file that defines XDISTILL_IMPLEMENTATION without -ffast-math"
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XD_VERSION_MAJOR 0
#define XD_VERSION_MINOR 1
#define XD_VERSION_PATCH 0

/* XDISTILL_STATIC makes every public function private to the one file that includes the implementation. */
#if !defined(XD_API)
#if defined(XDISTILL_STATIC) && defined(__GNUC__)
#define XD_API static __attribute__((unused))
#elif defined(XDISTILL_STATIC)
#define XD_API static
#elif defined(__cplusplus)
#define XD_API extern "C"
#else
#define XD_API extern
#endif
#endif

#if defined(__GNUC__)
#define XD_PRINTF(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))
#else
#define XD_PRINTF(format_index, first_argument)
#endif

/* Vector kernels by function attributes: gcc and clang on x86-64, not in the device passes of nvcc. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(__CUDA_ARCH__)
#define XDI_X86 1
#endif

#if !defined(XD_ASSERT)
#define XD_ASSERT(condition) ((void)0)
#endif

/* >>base/dtype */

/* Element types: name, bytes, is floating, safetensors spelling. Arithmetic exists for F32 F64 BF16 F16 I32 I64 U8;
 * the others can be stored, moved, loaded and saved. Order = ascending alignment rank of the safetensors format. */
#define XD_DTYPES(X)                   \
    X(BOOL, 1, false, "BOOL")          \
    X(U8, 1, false, "U8")              \
    X(I8, 1, false, "I8")              \
    X(F8_E5M2, 1, true, "F8_E5M2")     \
    X(F8_E4M3, 1, true, "F8_E4M3")     \
    X(I16, 2, false, "I16")            \
    X(U16, 2, false, "U16")            \
    X(F16, 2, true, "F16")             \
    X(BF16, 2, true, "BF16")           \
    X(I32, 4, false, "I32")            \
    X(U32, 4, false, "U32")            \
    X(F32, 4, true, "F32")             \
    X(F64, 8, true, "F64")             \
    X(I64, 8, false, "I64")            \
    X(U64, 8, false, "U64")

/* Tag of an element type; XD_DTYPES lists them. */
typedef enum xd_dtype {
    XD_DTYPE_NONE = 0, /* "not given": fields with a default read it as that default */
#define XDI_DTYPE_ENUM(name, bytes, floating, text) XD_DTYPE_##name,
    XD_DTYPES(XDI_DTYPE_ENUM)
#undef XDI_DTYPE_ENUM
    XD_DTYPE_COUNT
} xd_dtype;

/* Bytes of one element; 0 for XD_DTYPE_NONE and for values outside the enumeration. */
XD_API size_t xd_dtype_size(xd_dtype dtype);

/* True for F16 BF16 F32 F64 and the 8-bit floats. */
XD_API bool xd_dtype_is_floating(xd_dtype dtype);

/* Spelling used by safetensors ("BF16"); "NONE" when there is none. A constant string. */
XD_API const char *xd_dtype_name(xd_dtype dtype);

/* Inverse of xd_dtype_name; XD_DTYPE_NONE when the text names no dtype of ours. */
XD_API xd_dtype xd_dtype_from_name(const char *name);

/* >>base/result */

/* What went wrong, by kind; the message says what exactly. Errors found on one rank are agreed: every rank of the
 * group returns one (spec of the error classes: metadata, data, broken group). */
#define XD_RESULTS(X)                                                                                              \
    X(ERROR_ARGUMENT, "an argument is invalid on its own")                                                         \
    X(ERROR_TOPOLOGY, "sizes, axes or ranks do not fit together")                                                  \
    X(ERROR_SHAPE, "shapes disagree")                                                                              \
    X(ERROR_DTYPE, "element types disagree or are not supported here")                                             \
    X(ERROR_STATE, "the call is legal, but not now")                                                               \
    X(ERROR_MISMATCH, "ranks passed different things to one collective call")                                      \
    X(ERROR_PEER, "another rank failed or left")                                                                   \
    X(ERROR_TIMEOUT, "a rank did not arrive before the deadline")                                                  \
    X(ERROR_DATA, "a value in the data is out of range or not finite")                                             \
    X(ERROR_IO, "the operating system refused a file operation")                                                   \
    X(ERROR_FORMAT, "a file is malformed")                                                                         \
    X(ERROR_CORRUPT, "a checksum or coverage check failed")                                                        \
    X(ERROR_MISSING, "a required name is absent")                                                                  \
    X(ERROR_UNEXPECTED, "a name is present that was not asked for")                                                \
    X(ERROR_UNSUPPORTED, "not available in this build, on this device or in this mode")                            \
    X(ERROR_MEMORY, "no memory")

typedef enum xd_result {
    XD_OK = 0,
#define XDI_RESULT_ENUM(name, text) XD_##name,
    XD_RESULTS(XDI_RESULT_ENUM)
#undef XDI_RESULT_ENUM
    XD_RESULT_COUNT
} xd_result;

/* The last failure of a context: what, where in the source, on which rank, and who caused it. */
typedef struct xd_error {
    xd_result result;
    const char *file;     /* source position of the check that failed */
    int line;
    const char *function;
    int rank;             /* world rank of this context */
    int culprit;          /* world rank that caused it; -1 when unknown or this rank itself */
    char message[512];    /* what was got and what was expected, numbers included */
} xd_error;

/* "ERROR_SHAPE" and the like; "OK" for XD_OK, "ERROR_UNKNOWN" outside the enumeration. A constant string. */
XD_API const char *xd_result_name(xd_result result);

/* One line that explains the kind of error. A constant string. */
XD_API const char *xd_result_text(xd_result result);

/* >>base/memory */

/* Where memory comes from. Called from the thread that owns the context. */
typedef struct xd_allocator {
    void *(*allocate)(void *user, size_t bytes); /* aligned for any type; NULL when there is no room */
    void (*release)(void *user, void *memory);   /* NULL memory never arrives here */
    void *user;
} xd_allocator;

/* Offset allocator over an opaque base. The bookkeeping stands outside the memory, so the base may be device memory.
 * With base NULL it is a planning run: every take succeeds and `peak` is the size to provide. Never grows. */
typedef struct xd_arena {
    unsigned char *base; /* NULL -> planning run */
    size_t capacity;     /* bytes behind base; ignored when planning */
    size_t used;         /* bytes taken, alignment included */
    size_t peak;         /* high-water mark of used, to the byte */
    bool sealed;         /* after xd_arena_seal every take fails */
} xd_arena;

#define XD_ARENA_ALIGNMENT 64 /* of every block: one cache line, enough for every vector load */

/* An arena over capacity bytes at base; base NULL starts a planning run. Local, allocates nothing. */
XD_API xd_arena xd_arena_over(void *base, size_t capacity);

/* Takes bytes aligned to XD_ARENA_ALIGNMENT relative to base. *offset may be 0 bytes long. When planning, the offset
 * is still right and there is no memory behind it. False when the arena is full, sealed, or the size overflows;
 * the arena is then unchanged. */
XD_API bool xd_arena_take(xd_arena *arena, size_t bytes, size_t *offset);

/* As xd_arena_take, but gives the address; NULL when there is no room and always NULL when planning. */
XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes);

/* xd_arena_release(a, xd_arena_mark(a)) gives back everything taken in between. The peak stays. */
XD_API size_t xd_arena_mark(const xd_arena *arena);
XD_API void xd_arena_release(xd_arena *arena, size_t mark);

/* No more takes: what is planned is all there is. */
XD_API void xd_arena_seal(xd_arena *arena);

/* >>base/cpu */

/* Which instructions the CPU kernels use. Each level includes the ones before it. Elementwise operations
 * (AdamW, EMA, casts) give the same bits on every level; losses and norms agree to the bounds their
 * declarations state, so all ranks of a world must use one level: joining a world with another is a
 * MISMATCH, processes of an MPI world agree on the lowest. */
typedef enum xd_cpu_level {
    XD_CPU_BEST = 0,   /* the default: the highest level of this machine */
    XD_CPU_PLAIN,      /* plain loops, double inside: the specification of the others, and slow */
    XD_CPU_PORTABLE,   /* f32 vectors as the compiler makes them, any processor */
    XD_CPU_AVX2,       /* AVX2 and FMA */
    XD_CPU_AVX512,     /* AVX-512 F, BW, DQ, VL */
    XD_CPU_AVX512_BF16 /* and its bf16 dot product */
} xd_cpu_level;

/* The highest level that this machine and this compiler have; never XD_CPU_BEST or PLAIN. Local, pure. */
XD_API xd_cpu_level xd_cpu_best(void);

/* "best", "plain", "portable", "avx2", "avx512", "avx512_bf16"; "unknown" for other values. */
XD_API const char *xd_cpu_level_name(xd_cpu_level level);

/* The level of a name, e.g. from an environment variable. False, and *out untouched, for an unknown one. */
XD_API bool xd_cpu_level_parse(const char *name, xd_cpu_level *out);

/* >>base/file */

/* How a file is opened. */
typedef enum xd_file_mode {
    XD_FILE_READ = 1,
    XD_FILE_WRITE_NEW /* create; fail when the name exists */
} xd_file_mode;

/* Every file call the library makes. Each returns 0 on success or an errno value. Zero entries mean POSIX; tests
 * replace single entries to make each call fail. `file` is whatever open stored. */
typedef struct xd_files {
    int (*open)(void *user, const char *path, xd_file_mode mode, intptr_t *file);
    int (*size)(void *user, intptr_t file, uint64_t *bytes);
    int (*read)(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset);        /* all or error */
    int (*write)(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset); /* all or error */
    int (*resize)(void *user, intptr_t file, uint64_t bytes);
    int (*sync)(void *user, intptr_t file);
    int (*close)(void *user, intptr_t file);
    int (*map)(void *user, intptr_t file, uint64_t bytes, const void **address); /* private, read-only */
    int (*unmap)(void *user, const void *address, uint64_t bytes);
    int (*rename)(void *user, const char *from, const char *to); /* replaces `to` atomically */
    int (*remove)(void *user, const char *path);
    int (*make_directory)(void *user, const char *path); /* an existing directory is success */
    int (*sync_directory)(void *user, const char *path);
    void *user;
} xd_files;

/* >>base/context */

/* Everything hangs off a context: allocator, logger, clock, file calls, defaults of the collectives and the last
 * error. One context belongs to one thread at a time; two contexts share nothing mutable. */
typedef struct xd_ctx xd_ctx;

/* What the logger receives: the named level and everything graver. */
typedef enum xd_log_level {
    XD_LOG_WARN = 0, /* the default */
    XD_LOG_NONE,
    XD_LOG_ERROR,
    XD_LOG_INFO,
    XD_LOG_TRACE
} xd_log_level;

/* Receives one line without a newline. Called from the thread that owns the context. */
typedef struct xd_logger {
    void (*write)(void *user, xd_log_level level, const char *line);
    void *user;
} xd_logger;

/* Monotonic seconds. Deadlines are measured with it, so a test can make an hour pass without sleeping. */
typedef struct xd_clock {
    double (*now_seconds)(void *user);
    void *user;
} xd_clock;

/* How floating-point sums over ranks are formed.
 *   DETERMINISTIC  fixed rank order: the same bits on every run of the same mesh
 *   FAST           whatever the transport does best: agrees to rounding only
 *   INVARIANT      the same bits on every mesh: integer row sums for losses and norms, a canonical tree over
 *                  gradient leaves for parameter gradients (a float SUM without leaves is refused) */
typedef enum xd_reduction {
    XD_REDUCTION_DETERMINISTIC = 0, /* the default */
    XD_REDUCTION_FAST,
    XD_REDUCTION_INVARIANT
} xd_reduction;

struct xd_kernels;

/* Settings of a context. Zero is the default of every field. */
typedef struct xd_ctx_desc {
    xd_allocator allocator;      /* zero -> malloc and free */
    xd_logger logger;            /* zero -> silent */
    xd_log_level log_level;      /* lines above it are dropped; 0 -> XD_LOG_WARN */
    xd_clock clock;              /* zero -> CLOCK_MONOTONIC */
    xd_files files;              /* zero -> POSIX files */
    xd_reduction reduction;      /* 0 -> XD_REDUCTION_DETERMINISTIC */
    double timeout_seconds;      /* deadline of one collective; 0 -> 60 */
    double init_timeout_seconds; /* deadline of joining a world and of its first collective; 0 -> 600 */
    int rank;                    /* world rank, for messages; joining a world sets it */
    xd_cpu_level cpu;            /* 0 -> the best of this machine; one it lacks is UNSUPPORTED */
    const struct xd_kernels *kernels; /* another backend's table (xd_cuda_kernels); NULL -> the CPU's.
                                         Stays the caller's, outlives the context. */
    void *stream;                /* where a device backend's work is ordered; NULL -> its default stream */
} xd_ctx_desc;

/* Creates a context. desc is read during the call only; NULL -> all defaults.
 * Local. Errors: ARGUMENT for negative or non-finite timeouts, UNSUPPORTED for a CPU level this machine lacks,
 * MEMORY (then there is no context to ask). */
XD_API xd_result xd_ctx_create(const xd_ctx_desc *desc, xd_ctx **out);

/* Frees the context. Destroy everything made from it first. NULL is fine. */
XD_API void xd_ctx_destroy(xd_ctx *ctx);

/* The desc in force, every default filled in. */
XD_API const xd_ctx_desc *xd_ctx_settings(const xd_ctx *ctx);

/* From now on this context's device work goes to this stream. Local. */
XD_API void xd_ctx_set_stream(xd_ctx *ctx, void *stream);

/* The last failure of this context; result is XD_OK when none happened. Valid until the next failing call. */
XD_API const xd_error *xd_last_error(const xd_ctx *ctx);

/* Forgets the last failure. A broken world stays broken. */
XD_API void xd_clear_error(xd_ctx *ctx);

/* The "at" that the next error of this context reports as the caller's place; see XD_AT. */
XD_API xd_ctx *xd_at(xd_ctx *ctx, const char *file, int line);

/* Optional: xd_mesh_create(XD_AT(ctx), ...) adds the caller's file and line to an error's message. */
#define XD_AT(ctx) xd_at((ctx), __FILE__, __LINE__)

/* >>base/extend */

#include <stdarg.h>

/* For companion headers and backends of your own (a second translation unit sees nothing private). */

/* Records a failure in the context, sends it to the logger and returns `result`. Use the macros below. */
XD_API xd_result xd_fail(xd_ctx *ctx, xd_result result, const char *file, int line, const char *function,
                         const char *format, ...) XD_PRINTF(6, 7);

/* As xd_fail, naming the world rank that caused it. */
XD_API xd_result xd_fail_culprit(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                                 const char *function, const char *format, ...) XD_PRINTF(7, 8);

/* One line to the logger when level is enabled. */
XD_API void xd_log(xd_ctx *ctx, xd_log_level level, const char *format, ...) XD_PRINTF(3, 4);

/* Memory from the context's allocator, zero-filled; NULL when there is no room (report it yourself). */
XD_API void *xd_allocate(xd_ctx *ctx, size_t bytes);
XD_API void xd_release(xd_ctx *ctx, void *memory);

/* Seconds of the context's clock. */
XD_API double xd_now(const xd_ctx *ctx);

/* The world rank that this context's messages carry. */
XD_API void xd_ctx_set_rank(xd_ctx *ctx, int rank);

/* Lowers the CPU level to what the processes of a world have agreed on. */
XD_API void xd_ctx_set_cpu(xd_ctx *ctx, xd_cpu_level level);

#define XDI_FAIL(ctx, result, ...) xd_fail((ctx), (result), __FILE__, __LINE__, __func__, __VA_ARGS__)
#define XDI_FAIL_CULPRIT(ctx, result, culprit, ...) \
    xd_fail_culprit((ctx), (result), (culprit), __FILE__, __LINE__, __func__, __VA_ARGS__)

/* The only two macros that return. */
#define XDI_REQUIRE(ctx, condition, result, ...)                            \
    do {                                                                    \
        if (!(condition)) return XDI_FAIL((ctx), (result), __VA_ARGS__);    \
    } while (0)
#define XDI_TRY(expression)                                \
    do {                                                   \
        const xd_result xdi_try_result = (expression);     \
        if (xdi_try_result != XD_OK) return xdi_try_result;\
    } while (0)

/* >>base/half */

/* Storage conversions. To a narrower type: round to nearest, ties to even; overflow gives infinity; NaN stays a quiet
 * NaN with its sign; subnormals are kept. Integer arithmetic only, so the bits are the same on every machine. */
XD_API uint16_t xd_bf16_from_f32(float value);
XD_API float xd_f32_from_bf16(uint16_t bits);
XD_API uint16_t xd_f16_from_f32(float value);
XD_API float xd_f32_from_f16(uint16_t bits);

/* Element `index` of an array of any arithmetic dtype, widened to double; exact except for I64 beyond 2^53. */
XD_API double xd_load_f64(const void *data, xd_dtype dtype, int64_t index);

/* Stores a double into element `index`: floats by way of f32 rounding once per narrowing, integers by truncation. */
XD_API void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value);

/* >>base/philox */

/* Random numbers as a pure function of where they are used (Philox4x32-10; Salmon et al., "Parallel Random Numbers: As
 * Easy as 1, 2, 3", SC11). Any rank can make any element, so noise does not depend on the mesh, resuming needs no
 * state, and a value can be made again instead of stored.
 *
 *     xd_philox noise = { 0 };
 *     noise.seed = 42, noise.stream = XD_STREAM_INIT, noise.sample = row;
 *     xd_philox_fill_normal(&noise, shard_offset, shard_count, shard);
 *
 * The bits are the same on every machine, compiler and device: logarithm, sine and cosine are polynomials of our own in
 * explicit fused operations. */

/* What the numbers are for; two purposes never share one. */
enum {
    XD_STREAM_STUDENT_NOISE = 0,
    XD_STREAM_RUNG = 1,
    XD_STREAM_TIME = 2,
    XD_STREAM_EPSILON = 3,
    XD_STREAM_TIME_REAL = 4,
    XD_STREAM_EPSILON_REAL = 5,
    XD_STREAM_R1 = 6,
    XD_STREAM_ROLLOUT = 7, /* 8 + j: transition j */
    XD_STREAM_EMA = 64,    /* rounding */
    XD_STREAM_INIT = 96,
    XD_STREAM_USER = 128 /* to 255: the library uses none of these */
};

/* One sequence of numbers, indexed by the element's flat position in the global, unsharded sample. */
typedef struct xd_philox {
    uint64_t seed;
    uint8_t stream;  /* purpose, XD_STREAM_... */
    uint16_t micro;  /* micro-batch, or any second index of the purpose */
    uint32_t sample; /* global index of the sample in the step */
    uint32_t step;   /* optimizer step */
} xd_philox;

/* The block function: 128 random bits for each of 2^128 counters under a 64-bit key. Local. Deterministic. */
XD_API void xd_philox_block(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Counter of block `block` (elements 4 block .. 4 block + 3), in [0, 2^40):
 *   { low 32 bits of block, next 8 bits | stream << 8 | micro << 16, sample, step } */
XD_API void xd_philox_counter(const xd_philox *p, uint64_t block, uint32_t counter[4]);

/* 32 random bits of one element in [0, 2^42). */
XD_API uint32_t xd_philox_word(const xd_philox *p, int64_t element);

/* Uniform in (0, 1) with 53 bits, from words 0 and 1 of block `block`: for times and other scalar draws. */
XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block);

/* Elements [first, first + count) into out[0, count), f32.
 *   uniform   in (0, 1), ends excluded: odd multiples of 2^-24
 *   normal    mean 0, variance 1, by Box-Muller on the word pairs of a block; |x| <= 5.8
 * Filling in pieces gives the same values as filling at once. */
XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out);
XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out);

/* >>base/publish */

/* Whole files. A file that is being written has a temporary name beside its final one and appears under the final
 * name only when it is complete and on disk, so a reader never sees half of it and a mapping of the old one stays
 * valid. */

/* Reads a whole file. *data is NUL-terminated one byte after its end; free it with xd_release.
 *   max_bytes   0 -> 256 MiB
 * Local. Errors: IO; FORMAT when the file is longer than max_bytes; MEMORY. */
XD_API xd_result xd_file_load(xd_ctx *ctx, const char *path, size_t max_bytes, char **data, size_t *bytes);

/* Writes a whole file, replacing an old one of that name atomically. Local.
 * Errors: IO, MEMORY; then nothing is left behind and an old file is untouched. */
XD_API xd_result xd_file_save(xd_ctx *ctx, const char *path, const void *data, size_t bytes);

/* A file on its way to its name. */
typedef struct xd_publish xd_publish;

/* Starts one under a temporary name in the same directory. Local. Errors: IO, MEMORY. */
XD_API xd_result xd_publish_begin(xd_ctx *ctx, const char *path, xd_publish **out);

/* Writes bytes at an offset; ranges may come in any order. Errors: IO. */
XD_API xd_result xd_publish_write(xd_publish *file, const void *data, size_t bytes, uint64_t offset);

/* Sets the length, for instance to learn early that the disk is full. Errors: IO. */
XD_API xd_result xd_publish_resize(xd_publish *file, uint64_t bytes);

/* Syncs, renames to the final name, syncs the directory, and frees the object, whatever the result.
 * Errors: IO; the temporary file is then gone. When only the sync of the directory fails, the file is complete under
 * its name, but a power loss may still undo the rename. */
XD_API xd_result xd_publish_commit(xd_publish *file);

/* Gives up: removes the temporary file and frees the object. NULL is fine. */
XD_API void xd_publish_abort(xd_publish *file);

/* >>base/json */

/* JSON (RFC 8259), bounded: hostile text costs O(n log n) time and a fixed multiple of its size in memory.
 *
 *     xd_json *root = NULL;
 *     XDI_TRY(xd_json_parse(ctx, NULL, text, bytes, &root));
 *     int64_t layers = 0;
 *     if (!xd_json_int64(xd_json_find(root, "num_hidden_layers"), &layers)) ...
 *     for (const xd_json *item = xd_json_first(xd_json_find(root, "merges")); item; item = xd_json_next(item)) ...
 *     xd_json_destroy(ctx, root);
 *
 * Every question may be asked of NULL and of a value of another kind; the answer is then NULL, 0 or false. */

/* What a value is. */
typedef enum xd_json_kind {
    XD_JSON_NONE = 0, /* the kind of a NULL pointer: no such value */
    XD_JSON_NULL,
    XD_JSON_BOOL,
    XD_JSON_NUMBER,
    XD_JSON_STRING,
    XD_JSON_ARRAY,
    XD_JSON_OBJECT
} xd_json_kind;

/* One value of a document; the whole document is reached from, and owned by, its root. */
typedef struct xd_json xd_json;

/* Limits of a parse. Zero is the default of every field. */
typedef struct xd_json_desc {
    size_t max_bytes; /* of the text; 0 -> 256 MiB */
    size_t max_nodes; /* values of any kind; 0 -> 16 Mi (each takes 72 bytes) */
    int max_depth;    /* arrays and objects inside each other, at most 1000; 0 -> 64 */
} xd_json_desc;

/* Parses a text that holds exactly one value, white space around it allowed.
 *
 *   desc   limits; NULL -> defaults
 *   text   not NUL-terminated; not needed after the call
 *
 * Local. One allocation. Stricter than many readers: invalid UTF-8, a lone surrogate, \u0000, a repeated key in one
 * object and a number beyond the range of a double are refused.
 * Errors: FORMAT with the byte offset, also when a limit is exceeded; MEMORY; ARGUMENT for a depth above 1000. */
XD_API xd_result xd_json_parse(xd_ctx *ctx, const xd_json_desc *desc, const char *text, size_t bytes,
                               xd_json **root);

/* Reads and parses a file. Errors: as xd_json_parse, and IO; all of them name the file. */
XD_API xd_result xd_json_load(xd_ctx *ctx, const xd_json_desc *desc, const char *path, xd_json **root);

/* Frees a document. NULL is fine. */
XD_API void xd_json_destroy(xd_ctx *ctx, xd_json *root);

/* What a value is, and the byte of the text where it starts (for messages). */
XD_API xd_json_kind xd_json_kind_of(const xd_json *value);
XD_API size_t xd_json_offset(const xd_json *value);

/* Member of an object by key; the key is NUL-terminated, or has a length. O(log members). */
XD_API const xd_json *xd_json_find(const xd_json *object, const char *key);
XD_API const xd_json *xd_json_find_n(const xd_json *object, const char *key, size_t key_bytes);

/* Elements of an array or members of an object: how many, then one after the other in the order of the text. */
XD_API size_t xd_json_count(const xd_json *container);
XD_API const xd_json *xd_json_first(const xd_json *container);
XD_API const xd_json *xd_json_next(const xd_json *value);

/* Element `index` of an array. O(1). */
XD_API const xd_json *xd_json_at(const xd_json *array, size_t index);

/* Member `index` of an object when the members are sorted by the bytes of their keys. O(1). */
XD_API const xd_json *xd_json_by_key(const xd_json *object, size_t index);

/* UTF-8 of a member's key or of a string: NUL-terminated, no NUL inside. `bytes` may be NULL. */
XD_API const char *xd_json_key(const xd_json *member, size_t *bytes);
XD_API const char *xd_json_string(const xd_json *value, size_t *bytes);

/* Typed values: true and *out set when the value is of that type and fits, false and *out untouched otherwise.
 * The integers accept integer notation only: 1.0, 1e3 and -0 are doubles. */
XD_API bool xd_json_bool(const xd_json *value, bool *out);
XD_API bool xd_json_int64(const xd_json *value, int64_t *out);
XD_API bool xd_json_uint64(const xd_json *value, uint64_t *out);
XD_API bool xd_json_double(const xd_json *value, double *out);

/* Text being built. Errors stick: check the result of xd_json_writer_finish only. */
typedef struct xd_json_writer {
    xd_ctx *ctx;
    int indent;   /* spaces a level; 0 -> everything on one line. May be set before the first write */
    char *text;   /* from the context's allocator */
    size_t bytes; /* written so far */
    size_t capacity;
    int depth;      /* open containers, at most 63 */
    uint64_t array; /* bit d: the container at depth d is an array */
    uint64_t items; /* bit d: it has an item already */
    bool keyed;     /* a key waits for its value */
    xd_result result;
} xd_json_writer;

/* A writer with no text. Local; allocates nothing yet. */
XD_API xd_json_writer xd_json_writer_create(xd_ctx *ctx);

/* Containers. In an object every value follows its xd_json_write_key. */
XD_API void xd_json_write_object(xd_json_writer *w);
XD_API void xd_json_write_array(xd_json_writer *w);
XD_API void xd_json_write_end(xd_json_writer *w);
XD_API void xd_json_write_key(xd_json_writer *w, const char *key);

/* Values. Strings are UTF-8. Doubles are finite and read back to the same bits. */
XD_API void xd_json_write_null(xd_json_writer *w);
XD_API void xd_json_write_bool(xd_json_writer *w, bool value);
XD_API void xd_json_write_int64(xd_json_writer *w, int64_t value);
XD_API void xd_json_write_uint64(xd_json_writer *w, uint64_t value);
XD_API void xd_json_write_double(xd_json_writer *w, double value);
XD_API void xd_json_write_string(xd_json_writer *w, const char *value);
XD_API void xd_json_write_string_n(xd_json_writer *w, const char *value, size_t bytes);

/* The finished text, NUL-terminated, owned by the writer until xd_json_writer_destroy. `bytes` may be NULL.
 * Errors: MEMORY; ARGUMENT for a non-finite double or a string that is not UTF-8; STATE when containers are still
 * open, a key lacks its value or stands outside an object, or nothing was written. */
XD_API xd_result xd_json_writer_finish(xd_json_writer *w, const char **text, size_t *bytes);

/* Frees the text; the writer is then as new. */
XD_API void xd_json_writer_destroy(xd_json_writer *w);


/* >>kernel/table */

/* A borrowed matrix of rows: element (r, c) is data[r * stride + c]. */
typedef struct xd_rows {
    void *data;
    xd_dtype dtype; /* XD_DTYPE_F32 or XD_DTYPE_BF16 for logits */
    int64_t rows, cols;
    int64_t stride; /* elements between rows; 0 -> cols */
} xd_rows;

/* First data error of an operation and how many of each kind there were. Lives in memory of the tensors' device; rides in
 * the packed exchanges, so that all ranks agree. Zero = nothing happened. */
typedef struct xd_status {
    int64_t label_out_of_range; /* rows */
    int64_t not_finite;         /* rows with non-finite logits, or gradient elements that are not finite */
    int64_t nothing_counted;    /* losses whose denominator was zero */
    int64_t overflow;           /* integer accumulators of INVARIANT mode that ran over */
    int64_t first_row;          /* row of the first finding, global where the operation knows it */
    double first_value;         /* and its value */
} xd_status;

/* How every kernel is called. */
typedef struct xd_launch {
    xd_ctx *ctx;
    void *stream;     /* NULL on the CPU */
    void *workspace;  /* device memory for the operation's partials; size from the operation's _workspace query */
    size_t workspace_bytes;
    xd_status *status; /* may be NULL */
} xd_launch;

/* >>kernel/fixed */

/* A sum that does not depend on the order of its terms or on how they are cut over ranks: every term is
 * rounded once to a multiple of 2^-70 and added as integers, value = high * 2^-30 + low * 2^-70. Two sums are
 * joined by adding the limbs, so any integer all-reduce joins them too. Room: 2^22 a term, 2^21 terms a rank,
 * 128 ranks. */
typedef struct xd_fixed {
    int64_t high, low;
} xd_fixed;

/* Adds one term. False when the term is not finite or the sum runs over; the sum is then unchanged. */
XD_API bool xd_fixed_add(xd_fixed *sum, double term);

/* The sum as a double, rounded the same way for the same limbs' value. */
XD_API double xd_fixed_value(xd_fixed sum);

/* >>kernel/reduce */

/* Sums over ranks. Every transport brings the raw pieces together and calls these, so that the order of the
 * additions, and with it every bit, is decided here and nowhere else. */

/* How elements of several ranks become one. */
typedef enum xd_reduce_op {
    XD_SUM = 0,
    XD_MAX, /* NaN in, NaN out */
    XD_MIN, /* NaN in, NaN out */
    XD_AVG  /* sum, then one multiplication by 1/n in the accumulation type */
} xd_reduce_op;

/* Gradient leaves behind one rank's piece of a sum: the step has `total` leaves (micro-batches) and this
 * rank owns [first, first + count). total 0 -> no leaves given.
 *
 * The canonical tree over leaves [lo, hi) splits at lo + m, m the largest power of two below hi - lo, and
 * adds left to right; its shape depends on `total` alone, so neither the number of ranks nor the
 * accumulation steps change a bit. A rank's range is cut into aligned power-of-two blocks, each a node of
 * that tree: its forest. */
typedef struct xd_leaves {
    int64_t first, count, total;
} xd_leaves;

/* Leaves in the first node of the forest of [first, end): the largest power of two that divides first and
 * fits. Pure. */
XD_API int64_t xd_leaves_node_size(int64_t first, int64_t end);

/* Nodes in the forest of [first, first + count): 0 for an empty range, 1 for an aligned block. Pure. */
XD_API int64_t xd_leaves_nodes(int64_t first, int64_t count);

/* True for the dtypes that have arithmetic: F32 F64 BF16 F16 I32 I64 U8. AVG and leaves narrow it further. */
XD_API bool xd_reduce_supports(xd_dtype dtype, xd_reduce_op op);

/* out[i] = op over pieces[0][i], pieces[1][i], ... in that order.
 *
 *   out      [count]; may be one of the pieces
 *   pieces   `ranks` pointers to [count] elements
 *
 * F32, BF16 and F16 add in f32 and round once at the end, F64 in f64, integers wrap. Local, allocates
 * nothing, same bits everywhere. Errors: DTYPE when xd_reduce_supports is false. */
XD_API xd_result xd_reduce_pieces(xd_ctx *ctx, void *out, const void *const *pieces, int ranks, int64_t count,
                                  xd_dtype dtype, xd_reduce_op op);

/* out[i] = root of the canonical leaf tree over all ranks' forests; XD_AVG multiplies the root by 1/total.
 *
 *   out       [count]; may be the first node of a forest
 *   forests   `ranks` pointers; node k of rank r begins at element k * stride
 *   leaves    [ranks]; ranges in rank order that cover [0, total) without a gap (the caller has checked)
 *
 * Local, allocates nothing, same bits everywhere. Errors: DTYPE unless F32 or F64, ARGUMENT unless SUM or
 * AVG. */
XD_API xd_result xd_reduce_leaves(xd_ctx *ctx, void *out, const void *const *forests, const xd_leaves *leaves,
                                  int ranks, int64_t stride, int64_t count, xd_dtype dtype, xd_reduce_op op);

/* >>kernel/loss */

/* The losses over a row of logits, in pieces that a vocabulary shard can compute alone. x is the student, y
 * the teacher, tau the temperature; a row's shards are merged by the exchange between two calls:
 *
 *   references   per row and shard: largest x and where, y there, largest y
 *   stats        per row and shard: the sums below, taken relative to references
 *   combine      all shards' references and sums -> the scalars of the row, in rank order
 *   mixture      JSD only: two more sums, which need the normalisers of combine; mixture_combine merges them
 *   grad         the gradient of this shard's columns
 *
 * References may be each shard's own (one exchange: combine rescales) or merged first (INVARIANT: then every
 * term is the same wherever the row is cut, and sums are xd_fixed). Rows whose scale is 0 are passed over.
 *
 *   HARD     sum_v e^(x - M)                      CROSS  what the divergence needs, z = x/tau, u = y/tau:
 *   SOFT     sum_v e^((x - M)/tau)                         forward  sum e^(u - N) ((u - N) - (z - M))
 *   TEACHER  sum_v e^((y - N)/tau)                         reverse  sum e^(z - M) ((z - M) - (u - y_arg/tau))
 *   LINEAR   sum_v (x - M)                                 soft CE  sum e^(u - N) (z - M)
 *   TARGET   x_label - M, on the shard that owns it
 *   BAD      how many terms were not finite; xd_fixed: high counts those, low the terms that were too large
 *
 * The reverse form measures from the student's most probable id: on nearly one-hot rows the large term is
 * exactly 0 there, and nothing cancels. */

/* How far the student is from the teacher. */
typedef enum xd_divergence {
    XD_KL_FORWARD = 0, /* KL(teacher || student) */
    XD_KL_REVERSE,     /* KL(student || teacher) */
    XD_JSD, /* beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student */
    XD_SOFT_CE, /* -sum teacher ln student: the forward KL plus the teacher's entropy */
    XD_KL_MIXED /* (1 - beta) forward + beta reverse; top-k losses only */
} xd_divergence;

enum { XD_LOSS_MAX, XD_LOSS_ARG, XD_LOSS_TEACHER_AT_ARG, XD_LOSS_TEACHER_MAX, XD_LOSS_REFERENCES };
enum {
    XD_LOSS_HARD,
    XD_LOSS_SOFT,
    XD_LOSS_TEACHER,
    XD_LOSS_CROSS,
    XD_LOSS_LINEAR,
    XD_LOSS_TARGET,
    XD_LOSS_BAD,
    XD_LOSS_SUMS
};
enum { XD_LOSS_TEACHER_MIXTURE, XD_LOSS_STUDENT_MIXTURE, XD_LOSS_MIXTURES };

/* Why a row is left out. */
typedef enum xd_row_finding {
    XD_ROW_FINE = 0,
    XD_ROW_NOT_FINITE, /* NaN or +infinity in it, only -infinity, or an infinite loss */
    XD_ROW_OVERFLOW,   /* a term too large for xd_fixed */
    XD_ROW_LABEL       /* a label or id outside the vocabulary, or an id twice */
} xd_row_finding;

/* Scalars of one row after combine. */
typedef struct xd_loss_row {
    double max, teacher_max, teacher_at_arg; /* references over the whole row */
    double hard_log, soft_log, teacher_log;  /* logarithms of the HARD, SOFT and TEACHER sums */
    double top;                              /* JSD: ln(student/mixture) of the student's most probable id */
    double mean;   /* reverse: its CROSS per unit of mass; JSD: mean of ln(student/mixture) - top */
    double hard;   /* cross entropy of the row, nats */
    double soft;   /* divergence of the row, nats, without tau^2 */
    double argmax; /* the student's most probable id, lowest among equals */
    int finding;   /* xd_row_finding; loss and gradient are zero when it is not XD_ROW_FINE */
} xd_loss_row;

/* Inputs and outputs of the loss entries; each entry reads and writes what its comment above names. */
typedef struct xd_loss_args {
    xd_rows student;
    xd_rows teacher;         /* data NULL -> hard loss only */
    const int64_t *labels;   /* [rows] global ids; NULL -> soft loss only */
    const double *row_scale; /* [rows] factor of the row's gradient; 0 -> the row is passed over */
    const int64_t *offsets;  /* [shards + 1] first global column of each shard */
    int shard, shards;       /* this shard */
    double temperature;
    xd_divergence divergence;
    double beta;
    double target_weight; /* hard loss: target_weight * (-l_label) + uniform_weight * sum_v (-l_v) */
    double uniform_weight;
    double hard_weight, soft_weight; /* of the two losses in the gradient; 0 -> the loss is left out */
    bool fixed;                      /* sums are xd_fixed, references are those of the whole row */
    double *references;              /* [rows, XD_LOSS_REFERENCES] */
    void *sums;                      /* [rows, XD_LOSS_SUMS] double or xd_fixed */
    void *mixtures;                  /* [rows, XD_LOSS_MIXTURES] double or xd_fixed */
    const double *all_references;    /* [shards][rows, XD_LOSS_REFERENCES], in rank order */
    const void *all_sums;            /* [shards][rows, XD_LOSS_SUMS] */
    int64_t reference_stride;        /* elements from one shard to the next, of the two above */
    int64_t sums_stride;
    const void *all_mixtures; /* [shards, rows, XD_LOSS_MIXTURES] */
    xd_loss_row *row;         /* [rows] */
    xd_rows gradient;         /* may be the student's memory; columns past the shard's are set to zero */
} xd_loss_args;

/* Top-k losses: sums over the columns outside a row's ids, and the logits at them, in three steps like the
 * above: maxima and stats per shard, merge over shards in rank order, divergence of the merged sides. z =
 * x/tau:
 *   OUTSIDE  sum over v not in ids of e^(z - M)
 *   ENTROPY  sum over v not in ids of e^(z - M) (z - M) */
enum { XD_TOPK_MAX, XD_TOPK_OUTSIDE, XD_TOPK_ENTROPY, XD_TOPK_BAD, XD_TOPK_SUMS };

/* What becomes of the probability outside the k ids. */
typedef enum xd_topk_mode {
    XD_TOPK_RENORMALISE = 0, /* both distributions are renormalised over the ids; gradient inside them only */
    XD_TOPK_TAIL,            /* one more entry with the mass outside, on both sides */
    XD_TOPK_TRUNCATE,        /* true probabilities, the entries outside are left out of the sum */
    XD_TOPK_ZERO_OUTSIDE     /* teacher renormalised, its log -100 outside (NeMo-RL); no JSD */
} xd_topk_mode;

/* One side, student or teacher, of one row after the merge. */
typedef struct xd_topk_side {
    double max, outside, entropy; /* reference and the two sums relative to it */
    int finding;                  /* xd_row_finding */
} xd_topk_side;

/* The gradient of one row: at an id the slot's own value; at a column outside p_v (outside + entropy ln p_v),
 * with ln p_v = (x - max)/tau - log. All times scale. */
typedef struct xd_topk_row {
    double max, log;
    double outside, entropy;
    double loss; /* divergence of the row, nats */
    double student_mass, teacher_mass;
    int finding; /* xd_row_finding; loss and gradient are zero when it is not XD_ROW_FINE */
} xd_topk_row;

/* Inputs and outputs of the top-k entries. */
typedef struct xd_topk_args {
    xd_rows logits;
    const int64_t *ids; /* [rows, k] global; negative: no entry */
    int64_t k;
    const int64_t *offsets; /* [shards + 1] */
    int shard, shards;
    double temperature;
    bool fixed;              /* sums are xd_fixed, relative to maxima of the whole row */
    bool outside;            /* the two sums are wanted */
    const double *row_scale; /* [rows] factor of the row's gradient; 0 -> the row is passed over */
    double *maxima; /* [rows] largest logit of this shard; of the whole row when fixed. NaN: not finite. */
    void *sums;     /* [rows, XD_TOPK_SUMS] double or xd_fixed */
    double *values; /* [rows, k] stats: logits at this shard's ids; merge: at all ids */
    int64_t *order; /* [k] scratch */
    const int64_t *all; /* every shard's sums, then values, as 8-byte words in rank order */
    int64_t all_stride; /* words from one shard to the next */
    xd_topk_side *side; /* [rows] written by merge */
    /* divergence and grad: values and side are the student's */
    const double *teacher_values;     /* [rows, k] logits, or log-probabilities; -infinity: no entry */
    const xd_topk_side *teacher_side; /* [rows]; NULL -> teacher_log and log-probabilities */
    const float *teacher_log; /* [rows] logarithm of the teacher's whole sum; NULL -> values are log-probs */
    double teacher_temperature; /* that divides teacher_values; 1 for log-probabilities */
    xd_topk_mode mode;
    xd_divergence divergence;
    double beta;
    double weight;     /* of the gradient, beside row_scale */
    double *slots;     /* [rows, k] gradient at each id */
    double *log_probs; /* [rows, k] the student's, as the mode normalises them; or NULL */
    double *scratch;   /* [4 (k + 1)] */
    xd_topk_row *row;  /* [rows] */
    xd_rows gradient;
} xd_topk_args;

/* The k largest of each row, descending, lowest id first among equals; NaN is smaller than everything. Rows
 * with fewer columns are filled with -infinity and id -1. */
typedef struct xd_select_args {
    xd_rows logits;
    int64_t k, first, columns;
    double *values; /* [rows, k] */
    int64_t *ids;   /* [rows, k] global */
} xd_select_args;

/* Loss entries of the kernel table. All rows are independent; the same inputs give the same bits at any
 * position. */
typedef struct xd_loss_kernels {
    xd_result (*references)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*merge_references)(const xd_launch *launch,
                                  const xd_loss_args *args); /* all_references -> references */
    xd_result (*stats)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*combine)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*mixture)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*mixture_combine)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*grad)(const xd_launch *launch, const xd_loss_args *args);
    xd_result (*topk_maxima)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*topk_stats)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*topk_merge)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*topk_divergence)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*topk_grad)(const xd_launch *launch, const xd_topk_args *args);
    xd_result (*select)(const xd_launch *launch, const xd_select_args *args);
} xd_loss_kernels;

/* The plain CPU implementation: double inside, gradients rounded once. It is the specification of the
 * others. */
XD_API xd_loss_kernels xd_loss_kernels_cpu_plain(void);

/* >>kernel/optimizer */

/* What optimizer steps, gradient norms and averages do to arrays. Every entry takes a list of arrays, because
 * a model has a thousand small ones and a launch for each would cost more than the work. Arrays are aligned
 * for their dtype, may have zero elements, and do not overlap. Floats are F32, BF16 or F16 unless an entry
 * says otherwise; narrow storage is widened on load and rounded once, to nearest even, on store. Elements are
 * independent of each other, so the result does not depend on how an array is cut; every rounding is
 * explicit, so it does not depend on the compiler's flags either. */

/* One array of an optimizer step. The scalars are per array because the step count is: an array without a
 * gradient in some step falls behind the others. */
typedef struct xd_update_array {
    float *master; /* [count] parameter in f32 */
    float *first;  /* [count] Adam: running mean of gradients; SGD: momentum buffer */
    float *second; /* [count] Adam: running mean of squared gradients; SGD: not used */
    void *value;   /* [count] receives master rounded to value_dtype; NULL -> master is the parameter */
    const void *gradient; /* [count] */
    int64_t count;
    xd_dtype value_dtype;
    xd_dtype gradient_dtype;
    float decay;           /* AdamW: 1 - learning_rate * weight_decay; otherwise not used */
    float weight_decay;    /* Adam-L2 and SGD: added to the gradient as weight_decay * parameter */
    float step_size;       /* Adam: learning_rate / (1 - beta1^t); SGD: learning_rate */
    float root_correction; /* Adam: sqrt(1 - beta2^t) */
    bool fresh;            /* SGD: the first gradient this array gets; it starts the momentum buffer */
} xd_update_array;

/* Inputs and outputs of an optimizer entry. */
typedef struct xd_update_args {
    const xd_update_array *arrays;
    int64_t array_count;
    const float *gradient_scale; /* one value that multiplies every gradient first; NULL -> none */
    float one_minus_beta1;       /* Adam */
    float one_minus_beta2;       /* Adam */
    float beta2;                 /* Adam */
    float eps;                   /* Adam */
    float momentum;              /* SGD */
    bool couple_decay;           /* Adam: the L2 form, weight decay through the gradient */
    bool maximize;               /* turn the sign of every gradient */
} xd_update_args;

/* One array of an average: target <- target + weight * (source - target). */
typedef struct xd_lerp_array {
    void *target;
    const void *source;
    int64_t count;
    xd_dtype target_dtype; /* also F64: then the arithmetic is f64 */
    xd_dtype source_dtype; /* also F64 */
} xd_lerp_array;

/* Inputs and outputs of the EMA entry. */
typedef struct xd_lerp_args {
    const xd_lerp_array *arrays;
    int64_t array_count;
    double keep;       /* decay b; the weight is 1 - b, formed in double and rounded once */
    bool weighted_sum; /* fma(1 - b, source, b * target) instead, as CREDIT does */
} xd_lerp_args;

/* Converts between any two dtypes that have arithmetic, or copies bytes when they are the same. */
typedef struct xd_cast_array {
    void *target;
    const void *source;
    int64_t count;
    xd_dtype target_dtype;
    xd_dtype source_dtype;
} xd_cast_array;

/* One gradient of a norm. */
typedef struct xd_norm_array {
    const void *data;
    int64_t count;
    xd_dtype dtype;
    bool replica; /* somebody else adds these up; here they are only searched for NaN and infinities */
} xd_norm_array;

/* Order of a norm. */
typedef enum xd_norm_type {
    XD_NORM_L2 = 0, /* the default: square root of the sum of squares */
    XD_NORM_L1,     /* sum of magnitudes */
    XD_NORM_MAX     /* largest magnitude */
} xd_norm_type;

/* Limbs of an exact sum: limb k holds units of 2^(32 k - 320). The square of every f32 is a whole number of
 * 2^-298 and below 2^256, so the sum of up to 2^63 of them is exact: integer additions, free of order and of
 * every split. */
#define XD_NORM_LIMBS 20

/* What one rank adds to a norm. Finite elements only; the others are counted. */
typedef struct xd_norm_sum {
    double sum;                   /* of |x|^p in array order; unused when exact */
    double largest;               /* |x| */
    int64_t not_finite;           /* infinities and NaNs */
    int64_t nan;                  /* NaNs among them */
    int64_t limbs[XD_NORM_LIMBS]; /* when exact: carried, so that 2^31 ranks can be added */
} xd_norm_sum;

/* Inputs and outputs of the norm entry. */
typedef struct xd_norm_args {
    const xd_norm_array *arrays;
    int64_t array_count;
    xd_norm_type type;
    bool exact; /* sum in limbs instead of double */
} xd_norm_args;

/* Inputs and outputs of the scale entry. */
typedef struct xd_scale_args {
    void *data;
    int64_t count;
    xd_dtype dtype;
    float factor;
} xd_scale_args;

/* The entries of the table. The formulas stand above the CPU ones. All return XD_OK or DTYPE for an array
 * whose dtype has no place here; then nothing was written. */
typedef struct xd_optimizer_kernels {
    xd_result (*adam)(const xd_launch *launch, const xd_update_args *args);
    xd_result (*sgd)(const xd_launch *launch, const xd_update_args *args);
    xd_result (*lerp)(const xd_launch *launch, const xd_lerp_args *args);
    xd_result (*cast)(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count);
    xd_result (*scale)(const xd_launch *launch, const xd_scale_args *args);
    xd_result (*norm)(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum); /* adds to *sum */
} xd_optimizer_kernels;

/* The plain CPU entries: what the others are checked against. A constant table. */
XD_API const xd_optimizer_kernels *xd_optimizer_kernels_cpu(void);

/* The value of carried limbs, rounded to double once. Negative limbs do not occur. Local. */
XD_API double xd_norm_limbs_value(const int64_t limbs[XD_NORM_LIMBS]);

/* >>kernel/matmul */

/* A borrowed matrix, read only: element (r, c) is data[r * row_stride + c * col_stride], so the transposed
 * matrix is the same memory with the strides exchanged. */
typedef struct xd_matrix {
    const void *data;
    xd_dtype dtype; /* F32 or BF16 */
    int64_t rows, cols;
    int64_t row_stride, col_stride; /* elements */
} xd_matrix;

/* out = a b, or out += a b. */
typedef struct xd_matmul_args {
    xd_matrix a; /* [m, k] */
    xd_matrix b; /* [k, n] */
    float *out;  /* [m, n]; must not overlap a or b */
    int64_t out_stride;
    bool accumulate; /* add to what out holds */
    /* Both sides are rounded to bf16 as they are read, products and sums stay f32: for backends that multiply
     * bf16 faster. The others ignore it. */
    bool bf16;
} xd_matmul_args;

/* Bytes of workspace that one product needs, whatever its size. */
#define XD_MATMUL_WORKSPACE_BYTES ((size_t)(640 * 1024))

/* The rows as a matrix, and the transposed matrix; nothing moves. */
XD_API xd_matrix xd_matrix_of_rows(const xd_rows *rows);
XD_API xd_matrix xd_matrix_transposed(xd_matrix matrix);

/* The matrix product of a context's kernel table, one thread: the ranks are the parallelism.
 *
 *   workspace  XD_MATMUL_WORKSPACE_BYTES, aligned to 64; NULL -> taken from the context's allocator
 *
 * An element's sum runs over k in blocks of 256 terms, in an order that depends on k alone: a row of the
 * result has the same bits whichever rows and columns are computed with it, and `accumulate` over pieces of
 * k that are multiples of 256 gives the bits of one call. XD_SGEMM, when the implementation is compiled with
 * it (the argument list of cblas_sgemm without the leading order), is used for F32 by contexts that are not
 * INVARIANT. Local. Errors: ARGUMENT for shapes that do not fit, DTYPE, MEMORY. */
XD_API xd_result xd_matmul(xd_ctx *ctx, const xd_matmul_args *args, void *workspace);

/* >>kernel/kernels */

/* Whose memory the tensors of a context are. */
typedef enum xd_device_type { XD_DEVICE_CPU = 0, XD_DEVICE_CUDA } xd_device_type;

/* All that a context computes with. Losses, optimizers and transports call nothing else, so another
 * processor is another table. */
typedef struct xd_kernels {
    const char *name; /* "plain", "avx2", "cuda", ... */
    xd_device_type device;
    xd_loss_kernels loss;
    xd_optimizer_kernels optimizer;
    xd_result (*matmul)(const xd_launch *launch, const xd_matmul_args *args); /* validated by xd_matmul */
} xd_kernels;

/* The CPU's table of a level; XD_CPU_BEST is this machine's. The caller sees to it that the machine has the
 * level. Local. */
XD_API xd_kernels xd_kernels_cpu(xd_cpu_level level);

/* The table of a context: xd_ctx_desc.kernels, or that of its CPU level. Local. */
XD_API xd_kernels xd_ctx_kernels(const xd_ctx *ctx);


/* >>comm/collective */

/* One rank's handle on an ordered group of ranks. Made by a transport (xd_comm_self, xd_run_threads, the
 * companion headers), by xd_comm_split, or taken from a mesh. Belongs to the context, and so to the thread,
 * it was made with.
 *
 * Every call below is collective over the group unless it says otherwise: all ranks call it, in the same
 * order, with the same kind, dtype, op, root, reduction mode and fitting counts. What disagrees is found
 * before data moves, every rank returns MISMATCH, and the message names the ranks that differ from rank 0
 * of the group. A rank whose own arguments are wrong returns that error and the others PEER with its
 * message. After either the group goes on.
 *
 * No call waits past xd_ctx_desc.timeout_seconds (init_timeout_seconds for the first call on a world). A
 * rank that did not come makes the others return TIMEOUT, one that left PEER; then the group is broken,
 * with all groups that were split from the same world: every later call returns PEER at once with the
 * culprit's name.
 *
 * Counts are elements. Ranks in messages and errors are world ranks. Outputs are untouched on failure,
 * except by a group that breaks while data moves. recv may equal send where both have the same extent, and
 * in reduce_scatter, all_gather, gather and scatter the short one may be this rank's piece of the long one;
 * no other overlap. */
typedef struct xd_comm xd_comm;

/* What a collective does. AGREE and SPLIT have calls of their own and no record. */
typedef enum xd_collective_kind {
    XD_COLLECTIVE_BARRIER = 1,
    XD_COLLECTIVE_BROADCAST,
    XD_COLLECTIVE_ALL_REDUCE,
    XD_COLLECTIVE_REDUCE_SCATTER,
    XD_COLLECTIVE_ALL_GATHER,
    XD_COLLECTIVE_ALL_TO_ALL,
    XD_COLLECTIVE_GATHER,
    XD_COLLECTIVE_SCATTER,
    XD_COLLECTIVE_SEND, /* the last two concern two ranks only */
    XD_COLLECTIVE_RECV,
    XD_COLLECTIVE_AGREE,
    XD_COLLECTIVE_SPLIT
} xd_collective_kind;

/* The one record every collective becomes: checked, counted, traced and fault-injected in one place, then
 * handed to the transport's `execute`. Unused fields are zero. Counts and displacements are arrays of
 * `size` entries, in group rank order; displacements NULL -> pieces lie back to back. */
typedef struct xd_collective {
    xd_collective_kind kind;
    const void *send;
    void *recv;
    int64_t count;              /* elements: BROADCAST, ALL_REDUCE, SEND, RECV */
    const int64_t *send_counts; /* SCATTER, ALL_TO_ALL, REDUCE_SCATTER: elements for each rank */
    const int64_t *send_displacements;
    const int64_t *recv_counts; /* GATHER, ALL_GATHER, ALL_TO_ALL: elements from each rank */
    const int64_t *recv_displacements;
    xd_dtype dtype;
    xd_reduce_op op;
    int root; /* BROADCAST, GATHER, SCATTER: group rank; SEND, RECV: the other rank */
    /* ALL_REDUCE, REDUCE_SCATTER: send holds this rank's forest, one node of the whole extent after another,
     * and the sum follows the canonical tree. Needed by floating sums in INVARIANT mode. */
    xd_leaves leaves;
    void *stream;      /* device transports: the work is ordered on it; NULL on the CPU */
    uint64_t sequence; /* filled in by the library: calls so far on this group */
} xd_collective;

/* What one handle has moved so far. */
typedef struct xd_comm_counters {
    uint64_t calls;      /* collectives completed */
    uint64_t bytes_sent; /* payload bytes this rank gave to other ranks; what stays local does not count */
    uint64_t bytes_received; /* payload bytes this rank took from other ranks */
} xd_comm_counters;

/* Local facts. rank is in [0, size); xd_comm_world_rank maps a group rank to the world's. */
XD_API int xd_comm_rank(const xd_comm *comm);
XD_API int xd_comm_size(const xd_comm *comm);
XD_API int xd_comm_world_rank(const xd_comm *comm, int rank);
XD_API xd_ctx *xd_comm_ctx(const xd_comm *comm);
XD_API xd_comm_counters xd_comm_get_counters(const xd_comm *comm);

/* A group of one rank: every collective is a copy. Local. Destroy with xd_comm_destroy. Errors: MEMORY. */
XD_API xd_result xd_comm_self(xd_ctx *ctx, xd_comm **out);

/* Frees the handle; local. NULL is fine. Peers that still wait for this rank get PEER, or TIMEOUT at their
 * deadline where the transport cannot tell them (MPI): xd_comm_abort tells them at once. */
XD_API void xd_comm_destroy(xd_comm *comm);

/* This rank will take no further part, ever: peers that wait for it, now or later, get PEER naming it, in
 * every group of the world. Local; the handles stay valid until destroyed. A rank function that returns an
 * error does it for you. */
XD_API void xd_comm_abort(xd_comm *comm);

/* Returns on every rank after every rank has called. */
XD_API xd_result xd_barrier(xd_comm *comm);
/* Copies root's data into every rank's data; [count] elements. */
XD_API xd_result xd_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root);
/* recv = op over all ranks of send, element by element; [count] elements, the same bits on every rank. */
XD_API xd_result xd_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                               xd_reduce_op op);
/* send holds sum(counts) elements; this rank receives piece `rank`, counts[rank] elements. */
XD_API xd_result xd_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                                   xd_dtype dtype, xd_reduce_op op);
/* send holds counts[rank] elements; recv holds sum(counts), pieces in rank order. */
XD_API xd_result xd_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                               xd_dtype dtype);
/* counts[r] elements go to / come from rank r; pieces lie in rank order on both sides. */
XD_API xd_result xd_all_to_all(xd_comm *comm, const void *send, const int64_t *send_counts, void *recv,
                               const int64_t *recv_counts, xd_dtype dtype);
/* counts is read on every rank and must agree; recv (gather) and send (scatter) are used on root only. */
XD_API xd_result xd_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                           int root);
XD_API xd_result xd_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                            xd_dtype dtype, int root);
/* Two ranks only. A send returns when the receiver has the data. Not ordered against collectives of other
 * ranks. */
XD_API xd_result xd_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to);
XD_API xd_result xd_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from);

/* The general form: explicit displacements, leaves, stream. */
XD_API xd_result xd_collective_run(xd_comm *comm, const xd_collective *collective);

/* Agrees on a status: every rank passes its own; XD_OK everywhere -> XD_OK everywhere. Otherwise the ranks
 * that passed an error get it back and the others get PEER naming the lowest such rank and its message.
 * Call it after work that can fail on one rank alone (files, memory), before anyone communicates again. */
XD_API xd_result xd_agree(xd_comm *comm, xd_result mine);

/* As MPI_Comm_split: ranks with one color form a group, ordered by (key, rank). color < 0 -> no group, *out
 * = NULL. */
XD_API xd_result xd_comm_split(xd_comm *comm, int color, int key, xd_comm **out);

/* What each rank of xd_run_threads runs. world belongs to the runner; its context too. A rank that returns
 * an error, or returns while others wait for it, makes their calls return PEER. */
typedef xd_result (*xd_rank_function)(xd_comm *world, void *argument);

/* Runs `ranks` threads of this process as one world and waits for all of them.
 *
 *   desc    settings of every rank's context; NULL -> defaults. Allocator, logger, clock and files must be
 *           thread-safe.
 *   error   when not NULL: the error behind the result, the culprit's own where one is known
 *
 * Returns XD_OK when every rank returned XD_OK, else the first culprit's result. Rank 0 runs on the calling
 * thread. Errors of its own: ARGUMENT (ranks < 1), MEMORY. */
XD_API xd_result xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error);

/* The same world for threads the caller owns: create once, give it to n threads, each joins once with its
 * own context and destroys its comm when done; destroy the world after the last. xd_thread_world_create is
 * local; joining is collective and waits at most init_timeout_seconds. */
typedef struct xd_thread_world xd_thread_world;
XD_API xd_result xd_thread_world_create(xd_ctx *ctx, int ranks, xd_thread_world **out);
XD_API xd_result xd_thread_world_join(xd_thread_world *world, xd_ctx *ctx, int rank, xd_comm **out);
XD_API void xd_thread_world_destroy(xd_thread_world *world);

/* >>comm/transport */

/* For writers of transports. */

/* What ranks compare before data moves. 64 bytes; all-gathered by the control plane. */
typedef struct xd_control {
    uint64_t sequence;
    uint32_t kind;
    uint32_t dtype;
    uint32_t op;
    int32_t root;
    uint64_t count;  /* elements that must agree for this kind */
    uint64_t layout; /* hash of counts, leaves and plan */
    int32_t status;  /* xd_result of the local checks */
    int32_t mode;    /* xd_reduction and xd_cpu_level of the context */
    uint64_t extra;  /* split: color and key; reductions: first leaf */
    uint64_t leaves; /* reductions: number of leaves */
} xd_control;

typedef struct xd_transport xd_transport;

/* One rank's end of a group. The meaning of each call is what comm/threads.c does. All calls but destroy
 * and abort may wait, never past `deadline` (seconds of the context's clock). A transport reports a broken
 * group with PEER or TIMEOUT through xd_fail_culprit. */
typedef struct xd_transport_ops {
    const char *name;
    /* All-gathers one record a rank. `next` is what this rank will execute when all agree (NULL: nothing):
     * a transport may publish its buffers along with the record. It stays valid until execute returns. */
    xd_result (*control)(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                         xd_control *all, double deadline);
    /* Moves and reduces the data of a record that every rank has agreed on: the control call just before
     * had it as `next`. SEND and RECV come without a control call; they compare count and dtype themselves,
     * and a MISMATCH on both sides does not break the group. Other errors do. */
    xd_result (*execute)(xd_transport *transport, const xd_collective *collective, double deadline);
    /* A sub-group; the members in order are given, this rank is among them. members are ranks of
     * `transport`. Only the members call it, right after a control call. */
    xd_result (*split)(xd_transport *transport, const int *members, int size, int rank, double deadline,
                       xd_transport **out);
    void (*abort)(xd_transport *transport); /* wake peers that wait for this rank: it will not come */
    void (*destroy)(xd_transport *transport);
} xd_transport_ops;

/* Every transport begins with this. */
struct xd_transport {
    const xd_transport_ops *ops;
    xd_ctx *ctx;
    int rank, size;
    const int *world_ranks; /* [size] */
};

/* Wraps a transport into a handle, which then owns it (destroyed with it, also on failure). Local. */
XD_API xd_result xd_comm_create(xd_ctx *ctx, xd_transport *transport, xd_comm **out);

/* >>comm/leaves */

/* Accumulates one rank's gradient leaves the way the canonical tree of xd_leaves adds them: a stack on
 * which equal neighbours that form an aligned block merge. A plain running sum would tie the bits to the
 * number of leaves a rank has. Belongs to its context. */
typedef struct xd_leaf_stack xd_leaf_stack;

/* A stack for the leaves [leaves.first, + leaves.count), each of `elements` f32. Memory: at most 2
 * log2(count) + 1 leaves; one when count is 1. Local. Errors: ARGUMENT (a range outside [0, total)),
 * MEMORY. */
XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, xd_leaves leaves, int64_t elements, xd_leaf_stack **out);

/* Adds the next leaf, [elements], copied. Local, allocates nothing. Errors: STATE when all leaves are
 * there. */
XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *stack, const float *leaf);

/* The forest so far, [nodes, elements] in the order of the leaves: what xd_collective.send wants once every
 * leaf is there. NULL for NULL. Valid until the next push, reset or destroy. */
XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack);

/* Forgets all leaves: the next step begins. NULL is fine. */
XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack);

/* Frees the stack. NULL is fine. */
XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack);

/* >>comm/topology */

/* Where ranks stand: named axes over a list of ranks. Pure metadata: no call here communicates, so any
 * topology can be computed and tested on one machine for any number of ranks. A rank is a position in the
 * group a mesh is made over.
 *
 * Row-major: the last axis varies fastest. The rank at coordinate c is
 *     ranks[(c[0] * size[1] + c[1]) * size[2] + c[2] ...] */

#define XD_MESH_AXES_MAX 8
#define XD_AXIS_NAME_MAX 32 /* with its terminator; letters, digits and '_' */

/* One named axis of a mesh. */
typedef struct xd_axis {
    const char *name; /* NULL -> no name; either all axes of a mesh have one or none */
    int size;         /* -1 on at most one axis -> what the other axes leave of the world */
} xd_axis;

/* A value; copies share `ranks`, which the owner of the topology keeps alive. */
typedef struct xd_topology {
    int axis_count; /* 0 -> no mesh at all (see xd_topology_from_config) */
    int size[XD_MESH_AXES_MAX];
    char name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX]; /* "" -> no name */
    int rank_count;                                /* product of the sizes */
    const int *ranks;                              /* [rank_count], row-major; NULL -> 0, 1, 2, ... */
} xd_topology;

/* Axes over a world of world_size ranks.
 *
 *   axes    axis_count of them, slowest first
 *   ranks   [rank_count] distinct ranks below world_size; NULL -> all of the world in order
 *
 * Borrows ranks. Errors: ARGUMENT (names, sizes, two axes of -1, repeated or unknown ranks), TOPOLOGY (the
 * sizes do not multiply to the number of ranks, or do not divide it for -1). */
XD_API xd_result xd_topology_create(xd_ctx *ctx, const xd_axis *axes, int axis_count, const int *ranks,
                                    int rank_count, int world_size, xd_topology *out);

/* The order-string form: axis names joined by '-', the leftmost with stride 1 ("tp-cp-ep-dp-pp"). The axes
 * come in any order. An axis of size 1 that the string leaves out becomes the slowest; a larger one is an
 * error, and so are unknown and repeated names in the string, and "cp" and "ep" both above 1.
 * Errors: ARGUMENT, TOPOLOGY as above. */
XD_API xd_result xd_topology_from_order(xd_ctx *ctx, const char *order, const xd_axis *axes, int axis_count,
                                        int world_size, xd_topology *out);

/* What happens over the data axis in the configuration form. */
typedef enum xd_data_parallel {
    XD_DATA_PARALLEL_NONE = 0,
    XD_DATA_PARALLEL_DDP,
    XD_DATA_PARALLEL_FSDP2
} xd_data_parallel;

/* The configuration form: axes (dp, tp, domain), domain fastest. */
typedef struct xd_parallelism {
    xd_data_parallel data; /* what happens over dp */
    int tensor;            /* 0 -> 1 */
    int domain;            /* 0 -> 1 */
    bool replicas;         /* allow data NONE with dp > 1: replicas that never meet */
} xd_parallelism;

/* Keeps the active axes only: dp when data is not NONE or dp > 1 (even at size 1 beside another axis), tp and
 * domain when > 1. When nothing is left, or a single axis of size 1, there is no mesh: axis_count is 0.
 * Errors: ARGUMENT (sizes below 0), TOPOLOGY (does not divide the world; data NONE with dp > 1 and not
 * `replicas`). */
XD_API xd_result xd_topology_from_config(xd_ctx *ctx, const xd_parallelism *desc, int world_size,
                                         xd_topology *out);

/* The two grids of a mixture-of-experts run over one world. */
typedef struct xd_expert_desc {
    int world_size;
    int tp, cp, ep, pp;      /* 0 -> 1 */
    int expert_tp;           /* 0 -> tp */
    int optimizer_instances; /* 0 -> 1; must divide dp * cp */
    int virtual_pipeline;    /* 0 -> none; needs pp > 1 */
    const char *order;       /* NULL -> "tp-cp-ep-dp-pp" */
} xd_expert_desc;

/* dense: tp cp ep=1 dp pp with dp = world / (tp cp pp); expert: tp=expert_tp cp=1 ep dp pp with
 * dp = world / (expert_tp ep pp). Both outputs are untouched on failure.
 * Errors: ARGUMENT (sizes, order, virtual pipeline without pp), TOPOLOGY (not divisible; the pipeline groups
 * of the two grids differ). */
XD_API xd_result xd_topology_experts(xd_ctx *ctx, const xd_expert_desc *desc, xd_topology *dense,
                                     xd_topology *expert);

/* Splits one axis into several with the same product, row-major; the rank list stays. Errors: ARGUMENT,
 * TOPOLOGY. */
XD_API xd_result xd_topology_unflatten(xd_ctx *ctx, const xd_topology *topology, const char *axis,
                                       const xd_axis *parts, int part_count, xd_topology *out);

/* Index of the axis of that name; -1 when there is none. */
XD_API int xd_topology_axis(const xd_topology *topology, const char *name);

/* The set of axes in a list of names joined by ',' or '-', bit i for axis i; the order inside the list does
 * not matter. Errors: ARGUMENT (unnamed axes, unknown, empty or repeated name). */
XD_API xd_result xd_topology_axes(xd_ctx *ctx, const xd_topology *topology, const char *names,
                                  unsigned *mask);

/* Rank at a coordinate, and the inverse: false when the rank is no member (coordinate is then untouched). */
XD_API int xd_topology_rank(const xd_topology *topology, const int *coordinate);
XD_API bool xd_topology_coordinate(const xd_topology *topology, int rank, int *coordinate);

/* All groups over the named axes: every other axis fixed, the named ones varying, members and groups in
 * row-major order.
 *
 *   ranks        [rank_count]: group after group
 *   group_size   ranks in each group
 *
 * Errors: as xd_topology_axes. */
XD_API xd_result xd_topology_groups(xd_ctx *ctx, const xd_topology *topology, const char *names, int *ranks,
                                    int *group_size);

/* As above with the axes as bits. Returns the group size. */
XD_API int xd_topology_groups_of(const xd_topology *topology, unsigned mask, int *ranks);

/* Same axes, names and rank list. */
XD_API bool xd_topology_equal(const xd_topology *a, const xd_topology *b);

/* 64-bit FNV-1a, continued from seed (0 starts), and the hash of a topology that ranks compare. */
XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes);
XD_API uint64_t xd_topology_hash(const xd_topology *topology);

/* >>comm/mesh */

/* Named axes over the ranks of a world, with a communicator for every axis and set of axes that is asked for.
 *
 * One table holds the communicators of a mesh and of all meshes derived from it or made with `share`: a
 * partition of the ranks that was once made into groups is never made twice. A mesh refers to its world,
 * which must outlive it; meshes may be destroyed in any order. */
typedef struct xd_mesh xd_mesh;

/* What to build a mesh from. Read during the call only. */
typedef struct xd_mesh_desc {
    xd_axis axes[XD_MESH_AXES_MAX]; /* slowest first; ends at the first entry without name and size */
    const int *ranks; /* [rank_count] of the world; NULL -> all in order. Fewer than all is legal */
    int rank_count;
    int world_size;              /* what the sizes must multiply to; 0 -> no such check */
    const xd_topology *topology; /* instead of axes and ranks; NULL -> use those */
    xd_mesh *share; /* another mesh over the same world, whose communicators are used too; may be NULL */
} xd_mesh_desc;

/* A mesh. desc is read during the call only; ranks are those of `world`, whether it has all ranks of the job
 * or not.
 *
 * Collective over the world, outsiders of the mesh included: descs are compared, and the groups of the single
 * axes made, axes left to right. The mesh that spans the world in order uses the world's communicator, an
 * axis of size 1 needs none of its own.
 * Errors: those of xd_topology_create; ARGUMENT ("axis sizes multiply to 8 but world_size is 6"; share of
 * another world), MISMATCH naming the ranks that passed something else, MEMORY. *out is untouched on
 * failure. */
XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out);

/* Local; NULL is fine. Communicators taken from the mesh live until the last mesh of their table goes. */
XD_API void xd_mesh_destroy(xd_mesh *mesh);

/* Local facts. A derived mesh's topology lists its own axes and ranks. */
XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh);
XD_API xd_comm *xd_mesh_world(const xd_mesh *mesh);
XD_API bool xd_mesh_is_member(const xd_mesh *mesh);

/* This rank's coordinate on one axis, and the size of that axis; axis NULL -> the only axis of a one-axis
 * mesh. Local. Errors: ARGUMENT (no such axis), STATE (this rank is not in the mesh). */
XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate);
XD_API xd_result xd_mesh_axis_size(const xd_mesh *mesh, const char *axis, int *size);

/* The communicator over the named axes through this rank: "tp", "dp,cp" (order inside the list does not
 * matter, the last axis of the mesh is fastest), or a name given by xd_mesh_flatten. axes NULL -> the only
 * axis of a one-axis mesh.
 *
 * Names are those of the root mesh, also on a slice. The first call for a set of several axes makes the
 * groups and is collective over all members of the root mesh; later calls, and calls for one axis, are local.
 * The mesh owns the communicator. Errors: ARGUMENT, STATE (not a member), MISMATCH, MEMORY. */
XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out);

/* The sub-mesh of the named axes through this rank, in the order of the root, against which names are
 * resolved even when `mesh` is itself a slice. Flattened names may be used. Local.
 * Errors: ARGUMENT (unknown or overlapping names, not in the order of the root), STATE (not a member),
 * MEMORY. */
XD_API xd_result xd_mesh_slice(xd_mesh *mesh, const char *axes, xd_mesh **out);

/* A one-axis mesh over the named root axes, adjacent or not, row-major; its name can be used in slices and
 * groups later. name NULL -> the names joined with '_'. The same name again must mean the same axes; the name
 * of a root axis only itself. First use is collective as in xd_mesh_group. Errors: ARGUMENT, STATE, MISMATCH,
 * MEMORY. */
XD_API xd_result xd_mesh_flatten(xd_mesh *mesh, const char *axes, const char *name, xd_mesh **out);

/* The root mesh with one axis replaced by several of the same product, row-major. Collective over the root's
 * members. Errors: ARGUMENT, TOPOLOGY, STATE, MEMORY. */
XD_API xd_result xd_mesh_unflatten(xd_mesh *mesh, const char *axis, const xd_axis *parts, int part_count,
                                   xd_mesh **out);

/* Puts slices of one root together, in ascending order of the root's axes. Local.
 * Errors: ARGUMENT (other roots, overlapping, not ascending), MEMORY. */
XD_API xd_result xd_mesh_concatenate(xd_mesh *const *slices, int count, xd_mesh **out);

/* Compares a hash over the group. Collective. `what` names the thing in the message.
 * Errors: MISMATCH on every rank, naming those that differ from rank 0. */
XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what);


/* >>tensor/interval */

/* Which indices somebody holds. Everything that moves data between layouts is made of these: intersect what
 * one holds with what another wants, get a list of strided copies. Pure: no call communicates or allocates
 * unless it says so. */

#define XD_DIMS_MAX 8

/* The indices begin <= i < end. */
typedef struct xd_interval {
    int64_t begin, end;
} xd_interval;

/* Lists of intervals are sorted, disjoint and without empty members; they may touch. A result never has
 * touching neighbours. `out` must have room for na + nb entries and may not overlap an input; the number
 * written is returned. */
XD_API int xd_intervals_unite(const xd_interval *a, int na, const xd_interval *b, int nb, xd_interval *out);
XD_API int xd_intervals_intersect(const xd_interval *a, int na, const xd_interval *b, int nb,
                                  xd_interval *out);
XD_API int xd_intervals_subtract(const xd_interval *a, int na, const xd_interval *b, int nb,
                                 xd_interval *out);

/* Number of indices in a list. */
XD_API int64_t xd_intervals_extent(const xd_interval *list, int count);

/* Sorted, disjoint, none empty, all within [0, extent). */
XD_API bool xd_intervals_are_valid(const xd_interval *list, int count, int64_t extent);

/* The part of `list` whose positions (0 = its first index, counted over all members) lie in [begin, end).
 * Room for `count` entries. */
XD_API int xd_intervals_select(const xd_interval *list, int count, int64_t begin, int64_t end,
                               xd_interval *out);

/* Do the lists together hold every index of [0, extent) exactly once?
 *
 *   lists, counts   `owners` lists
 *   first           when false is returned: the lowest index held not once
 *   holders         and how many hold it
 *
 * Time grows with owners x intervals for each interval. */
XD_API bool xd_intervals_cover_once(const xd_interval *const *lists, const int *counts, int owners,
                                    int64_t extent, int64_t *first, int *holders);

/* The rule for splitting n indices over `parts`: pieces of ceil(n / parts), the last ones shorter or
 * empty. */
XD_API xd_interval xd_chunk(int64_t n, int parts, int part);

/* A product of lists, one per dimension: what a rank holds of a tensor. Stored densely in ascending order of
 * the indices, last dimension fastest. Layouts have at most XD_LAYOUT_INTERVALS_MAX intervals a dimension, so
 * that the common part of two of them always fits. */
#define XD_LAYOUT_INTERVALS_MAX 16
#define XD_REGION_INTERVALS_MAX (2 * XD_LAYOUT_INTERVALS_MAX)

/* A product of interval lists, one for each dimension. */
typedef struct xd_region {
    int ndim;
    int count[XD_DIMS_MAX];
    xd_interval interval[XD_DIMS_MAX][XD_REGION_INTERVALS_MAX];
} xd_region;

/* The region that is the whole of a shape. */
XD_API xd_region xd_region_whole(int ndim, const int64_t *shape);

/* Local extents, and their product (1 for ndim 0). */
XD_API void xd_region_shape(const xd_region *region, int64_t *shape);
XD_API int64_t xd_region_numel(const xd_region *region);

/* Indices held by both; false when there are none (out is then empty in some dimension). ndim must agree and
 * neither may be a result of intersecting two regions of more than XD_LAYOUT_INTERVALS_MAX intervals a
 * dimension. */
XD_API bool xd_region_intersect(const xd_region *a, const xd_region *b, xd_region *out);

/* True when both regions hold the same indices. Local. */
XD_API bool xd_region_equal(const xd_region *a, const xd_region *b);

/* One strided block: extent[i] steps of src_stride[i] and dst_stride[i] elements. Neighbouring dimensions
 * that are contiguous on both sides are folded, so a contiguous piece has ndim 1 and strides 1. */
typedef struct xd_copy {
    int ndim;
    int64_t src_offset, dst_offset; /* elements */
    int64_t extent[XD_DIMS_MAX], src_stride[XD_DIMS_MAX], dst_stride[XD_DIMS_MAX];
} xd_copy;

/* The copies that bring the indices in both regions from the storage of src to that of dst.
 *
 *   src_stride, dst_stride   [ndim] in elements; NULL -> dense
 *   copies                   room for `capacity`; may be NULL with capacity 0 to count
 *
 * Returns the number of copies, which may be above capacity. Copies are disjoint on both sides and cover each
 * common index once, in ascending order. */
XD_API int64_t xd_region_copies(const xd_region *src, const int64_t *src_stride, const xd_region *dst,
                                const int64_t *dst_stride, xd_copy *copies, int64_t capacity);

/* Performs one copy between two arrays of elements of `size` bytes. */
XD_API void xd_copy_run(const xd_copy *copy, const void *src, void *dst, size_t size);

/* >>tensor/layout */

/* How a tensor lies on a mesh: a pure function of metadata that every rank holds, so any rank's part can be
 * asked for without communication. */

/* What one mesh axis does with a tensor. */
typedef enum xd_placement_kind {
    XD_REPLICATE = 0, /* every rank of the axis holds the same */
    XD_SHARD,         /* the ranks of the axis split a dimension */
    XD_PARTIAL        /* the value is `op` over what the ranks of the axis hold */
} xd_placement_kind;

/* What one mesh axis does to a tensor. A split acts on what earlier splits of the same dimension have left:
 * pieces by xd_chunk unless one of the other forms is chosen. */
typedef struct xd_placement {
    xd_placement_kind kind;
    int dim;                      /* SHARD: tensor dimension; negative counts from the end */
    xd_reduce_op op;              /* PARTIAL */
    const int64_t *offsets;       /* SHARD: [axis size + 1] from 0 to the extent, ascending; NULL -> chunks */
    int sections;                 /* SHARD: fused parts one after another, each split by itself; 0 -> 1 */
    const int64_t *section_sizes; /* [sections], their sum is the extent; NULL -> equal */
    bool balanced; /* SHARD: 2n equal pieces, coordinate r holds pieces r and 2n-1-r (causal attention) */
} xd_placement;

/* What to build a layout from. Read during the call only. */
typedef struct xd_layout_desc {
    int ndim;                                 /* 0 is a scalar */
    int64_t shape[XD_DIMS_MAX];               /* of the whole tensor */
    const xd_topology *topology;              /* required; xd_mesh_topology(mesh) */
    xd_placement placement[XD_MESH_AXES_MAX]; /* one for each mesh axis; zero -> REPLICATE */
    /* Mesh axes in the order in which they split; all zero -> left to right. FSDP over TP: TP first. */
    int order[XD_MESH_AXES_MAX];
} xd_layout_desc;

typedef struct xd_layout xd_layout; /* immutable */

/* A layout. desc and all it points to are copied.
 *
 * Local. Errors: ARGUMENT (dimensions, order, offsets not ascending, two forms of one split), SHAPE (offsets
 * or sections that do not end at the extent, an extent that `balanced` or equal sections do not divide, more
 * than 2^62 elements), UNSUPPORTED (two different partial ops; more than XD_LAYOUT_INTERVALS_MAX intervals),
 * MEMORY. */
XD_API xd_result xd_layout_create(xd_ctx *ctx, const xd_layout_desc *desc, xd_layout **out);
XD_API void xd_layout_destroy(xd_layout *layout);

/* The desc with defaults filled in and pointers to the layout's own copies. */
XD_API const xd_layout_desc *xd_layout_settings(const xd_layout *layout);

/* What a rank holds; false for a rank outside the mesh, whose region is empty. A split of nothing gives an
 * empty region, never an error. */
XD_API bool xd_layout_region(const xd_layout *layout, int rank, xd_region *out);

/* Elements of the whole tensor. */
XD_API int64_t xd_layout_numel(const xd_layout *layout);

/* The same shape on the same ranks with every axis REPLICATE, or on one rank alone. Errors: MEMORY. */
XD_API xd_result xd_layout_replicated(xd_ctx *ctx, const xd_layout *layout, xd_layout **out);
XD_API xd_result xd_layout_on_rank(xd_ctx *ctx, const xd_layout *layout, int rank, xd_layout **out);

/* Of everything that decides where an element lies; what ranks compare. */
XD_API uint64_t xd_layout_hash(const xd_layout *layout);

/* >>tensor/tensor */

/* One rank's part of a tensor: a view that owns nothing. The layout says which indices of the whole these
 * elements are: those of xd_layout_region, ascending in every dimension. */
typedef struct xd_tensor {
    void *data; /* may be NULL when the part is empty */
    xd_dtype dtype;
    int device; /* 0 is the CPU */
    int ndim;
    int64_t shape[XD_DIMS_MAX];  /* local */
    int64_t stride[XD_DIMS_MAX]; /* elements */
    const xd_layout *layout;     /* must outlive the view */
} xd_tensor;

/* A dense view of the part that `rank` holds; a rank outside the mesh gets data NULL and extents 0. Local. */
XD_API xd_tensor xd_tensor_view(const xd_layout *layout, int rank, void *data, xd_dtype dtype);

/* Elements of the local part; 0 for a rank outside the mesh, also of a scalar. */
XD_API int64_t xd_tensor_numel(const xd_tensor *tensor);

/* Bytes a dense part of that many elements takes on `rank`. */
XD_API size_t xd_tensor_bytes(const xd_layout *layout, int rank, xd_dtype dtype);

/* >>tensor/redistribute */

/* Moves a tensor from one layout to another, on the same mesh or on two meshes of one world.
 *
 * A plan is a pure function of the two layouts. Each rank takes what it needs from itself where it can, else
 * from one of the ranks that hold it, replicas taking turns; nothing passes through a third rank and padding
 * is never sent. A partial value is reduced where it arrives, pieces in the order of the ranks, by the
 * arithmetic of xd_reduce_pieces; when that moves fewer bytes, in two steps: reduce into equal parts, then
 * gather. */

/* What to build a plan from. Read during the call only. */
typedef struct xd_plan_desc {
    const xd_layout *from, *to; /* the same global shape; copied by reference: they must outlive the plan */
    xd_dtype dtype;
    int ranks;               /* of the world */
    int rank;                /* whose part of the plan this is */
    const xd_region *window; /* only these indices; the destination is dense over its part; NULL -> all */
    const int64_t *from_stride, *to_stride; /* [ndim] of the local parts, in elements; NULL -> dense */
} xd_plan_desc;

/* A redistribution worked out for one rank: immutable, reusable. */
typedef struct xd_plan xd_plan;

/* Local and pure: every rank's plan can be made anywhere.
 * Errors: ARGUMENT (dtype, ranks), SHAPE (the layouts' shapes differ), TOPOLOGY (a mesh has ranks outside the
 * world), DTYPE (cannot be reduced), UNSUPPORTED (a shard or another partial op made partial; partial on
 * another mesh; a float sum in INVARIANT mode, which needs leaves), MEMORY. */
XD_API xd_result xd_plan_create(xd_ctx *ctx, const xd_plan_desc *desc, xd_plan **out);
XD_API void xd_plan_destroy(xd_plan *plan);

/* One exchange of a plan: the arguments of an all-to-all over the world. Pieces lie in rank order without
 * gaps. */
typedef struct xd_plan_step {
    const int64_t *send_counts, *send_displacements; /* [ranks] elements; nothing goes to itself */
    const int64_t *recv_counts, *recv_displacements;
    int64_t send_count, recv_count; /* their sums */
    int64_t recv_capacity; /* elements the recv buffer must hold: own pieces of a reduction come last in it */
    int64_t copy_count;    /* strided blocks this rank packs, unpacks and moves locally */
    int64_t total_count;   /* elements between all ranks; 0 -> no rank communicates in this step */
    bool reduces;          /* partial pieces are combined on arrival */
} xd_plan_step;

/* How many steps the plan has, and step `index` of them. Local. */
XD_API int xd_plan_step_count(const xd_plan *plan);
/* Step `index` of the plan. Local. */
XD_API xd_plan_step xd_plan_get_step(const xd_plan *plan, int step);

/* Payload bytes this rank sends to others, over all steps: what the transport will count. */
XD_API uint64_t xd_plan_bytes_sent(const xd_plan *plan);

/* Extents of the destination on this rank: those of `to`, or of its part of the window. */
XD_API void xd_plan_shape(const xd_plan *plan, int64_t *shape);

/* Compares the plan's metadata over the world. mine: XD_OK, or the error xd_plan_create gave (plan is then
 * NULL). Collective. Errors: PEER, MISMATCH. */
XD_API xd_result xd_plan_agree(const xd_plan *plan, xd_comm *world, xd_result mine);

/* Executes a plan; source and destination may not overlap. A rank outside a layout passes NULL for it.
 * Collective over the world. Allocates nothing. Errors: those of xd_collective_run; the destination is then
 * undefined only where the error came after data had moved. */
XD_API xd_result xd_plan_execute(xd_plan *plan, xd_comm *world, const void *source, void *destination);

/* The two local halves of a step, for programs that move the bytes by other means. `source` is the plan's
 * source for step 0; later steps read what the plan kept. send and recv hold send_count and recv_capacity
 * elements; a step that reduces uses recv as scratch. */
XD_API void xd_plan_pack(const xd_plan *plan, int step, const void *source, void *send);
XD_API xd_result xd_plan_unpack(const xd_plan *plan, int step, const void *source, void *recv,
                                void *destination);

/* All of it in one call: plan, agree, execute. from and to are views with layouts; a rank outside the
 * source's layout passes the view that xd_tensor_view gives it. Collective over the world. Errors: as above;
 * SHAPE or DTYPE when a view does not fit its layout. `to` is untouched unless the exchange itself fails. */
XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to);

/* The whole tensor, dense, on every rank of the tensor's mesh; full holds xd_layout_numel elements (NULL
 * outside the mesh). Partial values are reduced. Collective over the world. */
XD_API xd_result xd_tensor_full(xd_comm *world, const xd_tensor *tensor, void *full);

/* The whole tensor, or begin <= index < end in every dimension (both NULL -> all), dense, on one rank of the
 * world.
 *
 *   out   on root: product of (end - begin) elements; NULL elsewhere
 *
 * Ranks outside the tensor's mesh call too, with their empty view. Collective over the world. Takes staging
 * memory on root for what arrives; gather ranges to bound it. Errors: as xd_redistribute; ARGUMENT for a
 * range outside the shape. */
XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const int64_t *begin,
                                  const int64_t *end, int root, void *out);


/* >>train/param */

/* A zero where 0 would mean "the default": small enough to act as zero in every formula of optimizers and
 * averages, bit for bit. Example: { .weight_decay = XD_ZERO }. */
#define XD_ZERO 1e-300

/* This rank's part of one named parameter or buffer. Optimizers, norms and averages take lists of them and
 * keep the pointer to the list: the caller owns it and may change `gradient` between steps, nothing else. All
 * ranks list the same names in the same order; a rank that holds no element of one lists it with count 0. */
typedef struct xd_param {
    const char *name;
    void *value;             /* [count] */
    void *gradient;          /* [count]; NULL -> none in this step, the parameter is passed over */
    xd_dtype dtype;          /* of value */
    xd_dtype gradient_dtype; /* NONE -> F32 */
    int64_t count;           /* elements here */
    const int64_t *shape;    /* [dims] local shape, compared when averages are loaded; NULL -> flat */
    int dims;
    int group;     /* index into the optimizer's groups */
    bool frozen;   /* never stepped, not in norms; averaged like the others */
    bool buffer;   /* not a parameter: never stepped, not in norms, copied instead of averaged */
    bool no_decay; /* no weight decay (biases, norms) */
    bool replica;  /* another rank holds the same elements and counts them in norms; exactly one rank of
                    * those that hold an element leaves this false */
} xd_param;

/* >>train/optimizer */

/* Steps the parameters of one rank. Works on shards as they are, needs no communication, and gives the same
 * bits however the parameters are cut. Master copies and moments are f32. */
typedef struct xd_optimizer xd_optimizer;

/* Which update. */
typedef enum xd_optimizer_kind {
    XD_OPTIMIZER_ADAMW = 0, /* the default: decoupled weight decay */
    XD_OPTIMIZER_ADAM_L2,   /* weight decay as an L2 term of the gradient */
    XD_OPTIMIZER_SGD        /* momentum, neither dampened nor Nesterov's; weight decay as in ADAM_L2 */
} xd_optimizer_kind;

/* What differs between groups of parameters; xd_param.group is the index. */
typedef struct xd_optimizer_group {
    double learning_rate_scale; /* factor on the learning rate; 0 -> 1 */
    double weight_decay;        /* 0 -> the optimizer's; XD_ZERO -> none */
} xd_optimizer_group;

/* Settings of an optimizer. Zero is the default of every field. */
typedef struct xd_optimizer_desc {
    const xd_param *params; /* required; [param_count]; borrowed until xd_optimizer_destroy, see xd_param */
    int64_t param_count;
    xd_optimizer_kind kind;
    double learning_rate;             /* 0 -> 1e-3 */
    double beta1;                     /* Adam; 0 -> 0.9; XD_ZERO for a true zero, here and below */
    double beta2;                     /* Adam; 0 -> 0.999 */
    double eps;                       /* Adam; 0 -> 1e-8 */
    double momentum;                  /* SGD; 0 -> none */
    double weight_decay;              /* 0 -> 1e-2 for ADAMW, none for the others */
    const xd_optimizer_group *groups; /* [group_count], read during creation; NULL -> one plain group */
    int group_count;
    bool maximize; /* climb instead of descend */
} xd_optimizer_desc;

/* What one parameter has gathered, to save and to restore in place. Pointers into the optimizer. */
typedef struct xd_optimizer_state {
    float *master;     /* [count]; the f32 parameter behind a bf16 or f16 value; NULL for f32 values */
    float *exp_avg;    /* [count]; Adam: mean of gradients; SGD: momentum buffer; NULL when never stepped */
    float *exp_avg_sq; /* [count]; Adam: mean of squared gradients; NULL for SGD */
    int64_t *step;     /* updates so far */
} xd_optimizer_state;

/* Modifiers of one step. */
typedef struct xd_optimizer_step_desc {
    const float *gradient_scale; /* every gradient is multiplied by it first, in f32; clipping passes
                                  * &norm.coefficient, which equals scaling f32 gradients beforehand to the
                                  * bit. NULL or 1 -> none */
    const xd_status *status; /* when it holds a finding the step does nothing at all; NULL -> always step */
} xd_optimizer_step_desc;

/* Creates an optimizer; masters start as the present values. One allocation holds everything.
 *
 *   desc   read during the call, except desc->params
 *
 * Local. Errors: ARGUMENT (learning rate, eps, weight decay or momentum negative or not finite, beta outside
 * [0, 1), group out of range), DTYPE (values and gradients are F32, BF16 or F16), MEMORY. */
XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out);

/* Frees the optimizer; values and gradients are the caller's. NULL is fine. */
XD_API void xd_optimizer_destroy(xd_optimizer *optimizer);

/* The desc in force, every default filled in. */
XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer);

/* The learning rate of the steps to come; here 0 means zero. Errors: ARGUMENT for a negative or non-finite
 * one. */
XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate);

/* One step of every parameter that has a gradient and is neither frozen nor a buffer; the others keep value,
 * state and step count. Formulas and rounding order: kernel/optimizer_cpu.c.
 *
 *   desc      NULL -> no modifiers
 *   skipped   when not NULL: receives whether desc->status stopped the step
 *
 * Local, allocates nothing, the same bits on every device and for every cut of the parameters.
 * Errors: STATE when the parameter list changed in more than gradients, DTYPE. Nothing is written then. */
XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped);

/* State of parameter `index` of the list; all NULL when it is out of range. */
XD_API xd_optimizer_state xd_optimizer_get_state(xd_optimizer *optimizer, int64_t index);

/* >>train/clip */

/* How a total norm becomes the factor on the gradients; c = max_norm / (norm + 1e-6). */
typedef enum xd_clip_form {
    XD_CLIP_ABOVE = 0,  /* the default: c when c < 1; 1 for a norm that is not finite: that step is skipped */
    XD_CLIP_ABOVE_NEMO, /* c when c < 1: an infinite norm gives 0, a NaN norm 1 */
    XD_CLIP_ALWAYS      /* PyTorch, FastGen: min(1, c), NaN for a NaN norm; multiply even by 1 */
} xd_clip_form;

/* What a gradient norm covers. Zero is the default of every field. */
typedef struct xd_gradient_norm_desc {
    const xd_param *params; /* required; [param_count]; without gradient, frozen or a buffer: adds nothing */
    int64_t param_count;
    xd_norm_type type; /* 0 -> XD_NORM_L2 */
    double max_norm;   /* 0 -> no clipping, the coefficient is 1 */
    xd_clip_form form;
    xd_status *status; /* receives the count of non-finite elements of all ranks; NULL -> not recorded */
} xd_gradient_norm_desc;

/* The norm and what follows from it, the same on every rank. */
typedef struct xd_gradient_norm {
    double norm;        /* infinity or NaN when an element is */
    int64_t not_finite; /* elements over all ranks, replicas counted each */
    float coefficient;  /* for xd_optimizer_step_desc.gradient_scale or xd_clip_gradients */
} xd_gradient_norm;

/* The norm of a whole model's gradient, each logical element counted once: shards add their elements, of
 * replicas only the one that does not say `replica`.
 *
 *   comm   every rank that shares the decision to step: all shards and, under pipelines, all stages;
 *          NULL -> this rank alone
 *
 * Collective over comm: one all-reduce of a few numbers, two for XD_NORM_MAX. Ranks may hold different lists
 * and empty shards. Allocates nothing. The same bits on every rank; in INVARIANT mode the same bits for every
 * split.
 * Errors, on every rank alike: ARGUMENT (max_norm negative or NaN, unknown type or form), DTYPE. */
XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out);

/* The factor for a norm that is known already. Pure. Here max_norm 0 means zero. */
XD_API float xd_clip_coefficient(xd_clip_form form, double max_norm, double norm);

/* Multiplies every gradient of the list by the coefficient in place; does nothing when it is 1. Local.
 * Errors: DTYPE, before anything is written. */
XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient);

/* >>train/ema */

/* Exponential moving average of a model: a shadow of every parameter of this rank's list, averaged, and of
 * every buffer, copied. The average of a shard is the shard of the average, to the bit, for every placement,
 * uneven and empty shards included; so nothing here communicates. */
typedef struct xd_ema xd_ema;

/* The decay b of iteration i; the shadow moves by (1 - b) of the difference. */
typedef enum xd_ema_schedule {
    XD_EMA_CONSTANT = 0, /* decay */
    XD_EMA_POWER,        /* (1 - 1 / max(i, 1))^(gamma + 1) */
    XD_EMA_HALFLIFE,     /* 2^(-batch_size / H), H = 1000 halflife_kimg, under the ramp at most
                          * i * batch_size * rampup_ratio */
    XD_EMA_RAMP          /* min(decay, (1 + i) / (10 + i)), as CREDIT counts from i = 1 */
} xd_ema_schedule;

/* Settings of an average. Zero is the default of every field. */
typedef struct xd_ema_desc {
    xd_ema_schedule schedule;
    double decay; /* CONSTANT, RAMP; in [0, 1]; 0 -> 0.9999; XD_ZERO for a true zero, here and below */
    double gamma; /* POWER; at least -1; 0 -> 16.97 */
    double halflife_kimg;    /* HALFLIFE; thousands of samples, above 0; 0 -> 500 */
    double rampup_ratio;     /* HALFLIFE; at least 0; 0 -> 0.05 */
    bool disable_rampup;     /* HALFLIFE */
    int64_t batch_size;      /* HALFLIFE; samples of all ranks in an iteration; 0 -> 1 */
    int64_t start_iteration; /* earlier updates do nothing; 0 -> the first update already counts */
    bool init_from_current;  /* average from creation on: without it the first update that counts copies */
    xd_dtype dtype;  /* of shadows of parameters: F32 BF16 F16 F64; NONE -> F32. A narrow shadow stops moving:
                      * bf16 at decay 0.9999 needs a difference of 39 to move a 1.0 */
    bool live_dtype; /* every shadow in its parameter's own dtype instead */
    bool compat_credit; /* b * shadow + (1 - b) * live with CREDIT's roundings instead of the lerp */
    const char *const *strip_tokens; /* [strip_count] substrings removed from names; must outlive the average;
                                      * NULL -> what wrappers add: "_checkpoint_wrapped_module.",
                                      * "_fsdp_wrapped_module.", "_orig_mod.", "module." */
    int strip_count;
} xd_ema_desc;

/* What is saved beside the shadows. */
typedef struct xd_ema_record {
    int format_version; /* 1 */
    int64_t iteration;  /* of the last update, effective or not */
    bool initialized;   /* the shadow holds an average, not just the weights of creation */
    xd_ema_desc config;
} xd_ema_record;

/* How two lists of names met. */
typedef struct xd_ema_match {
    int64_t matched;
    int64_t missing_in_shadow; /* in the caller's list only */
    int64_t missing_in_target; /* in the shadow only */
    int64_t wrong_shape;       /* in both, with other element counts or shapes */
    char names[200];           /* the first five that did not match, ", " between */
} xd_ema_match;

/* The iteration that xd_ema_update counts by itself: one after the last. */
#define XD_EMA_NEXT INT64_C(-1)

/* The decay at an iteration: pure, defaults filled in. Errors: ARGUMENT, as for xd_ema_create, or a negative
 * iteration. */
XD_API xd_result xd_ema_decay(xd_ctx *ctx, const xd_ema_desc *desc, int64_t iteration, double *decay);

/* Creates shadows holding the present values.
 *
 *   params   [count]; borrowed until xd_ema_destroy. Frozen ones are averaged too. Parameters are F32, BF16,
 *            F16 or F64; buffers of any dtype are copied as they are. Entries with one value pointer are
 *            tied: one shadow, under the first name, and both names find it
 *   desc     NULL -> defaults
 *
 * Local; one allocation. Errors: ARGUMENT (numbers outside the ranges above; two names that are equal once
 * stripped; no name), DTYPE, MEMORY. */
XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                               xd_ema **out);

/* Frees the shadows. NULL is fine. */
XD_API void xd_ema_destroy(xd_ema *ema);

/* Once after every step of the model's optimizer:
 *   iteration < start_iteration                            nothing
 *   iteration == start_iteration, or not initialized yet   shadow <- live; now initialized
 *   otherwise                                              parameters averaged, buffers copied
 *
 *   iteration   XD_EMA_NEXT, or any value, not necessarily growing; it is remembered
 *   status      when it holds a finding nothing happens, the counter stands still; NULL -> always update
 *
 * Local, allocates nothing; the same bits on every device and for every cut. NaN and infinities pass through.
 * Errors: ARGUMENT (iteration below -1), STATE when the list changed since creation; nothing is written. */
XD_API xd_result xd_ema_update(xd_ema *ema, int64_t iteration, const xd_status *status);

/* Number of shadows, tied names not counted, and a view of one: name, value, dtype, count, shape, flags. The
 * view is valid until xd_ema_destroy and changes with every update. An index out of range gives an empty
 * view. */
XD_API int64_t xd_ema_count(const xd_ema *ema);
XD_API xd_param xd_ema_view(const xd_ema *ema, int64_t index);

/* Writes shadows into a list of parameters and buffers by name, converted to their dtypes: to publish,
 * to evaluate, to save.
 *
 *   lenient   false -> every name must be in both lists, tied names apart
 *   match     when not NULL: receives the counts, also on failure
 *
 * Local. Errors: MISSING or UNEXPECTED (a name in one list only, strict), SHAPE (strict or not). Nothing is
 * written then. */
XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match);

/* Fills shadows from a list by name; arguments and errors as for xd_ema_copy_to, with the roles of the lists
 * changed.
 *
 *   record   what xd_ema_get_record gave when the values were saved; NULL -> the iteration stays. The average
 *            counts as initialized when every parameter was filled or the record says so
 *
 * Further errors: FORMAT for a record of another version. */
XD_API xd_result xd_ema_load(xd_ema *ema, const xd_param *sources, int64_t count, const xd_ema_record *record,
                             bool lenient, xd_ema_match *match);

/* The state to save beside the shadows; defaults are filled in. */
XD_API xd_ema_record xd_ema_get_record(const xd_ema *ema);


/* >>distill/vocab */

/* How the columns of the logits, the vocabulary, lie over the ranks of one group. Immutable, agreed once,
 * used by every loss. Logits handed to a loss have at least end - begin columns; columns beyond that are
 * padding of the projection: they take no part, and their gradient is zero. */
typedef struct xd_vocab xd_vocab;

/* Agrees on the columns [begin, end) of every rank.
 *
 *   tp     the group that shares the vocabulary; NULL -> this rank holds it all. Must outlive the object.
 *   begin, end   global columns of this rank; begin == end is legal
 *   size   true columns over all ranks
 *
 * Collective over tp. Errors, the same on every rank: SHAPE when shards, in rank order, leave a gap, overlap
 * or do not end at size (both numbers are in the message), MISMATCH when sizes differ, MEMORY. Destroy with
 * xd_vocab_destroy. */
XD_API xd_result xd_vocab_create(xd_ctx *ctx, xd_comm *tp, int64_t begin, int64_t end, int64_t size,
                                 xd_vocab **out);

/* As xd_vocab_create with the even cut: rank r of n holds ceil(size / n) columns from r * ceil(size / n). */
XD_API xd_result xd_vocab_create_even(xd_ctx *ctx, xd_comm *tp, int64_t size, xd_vocab **out);

/* Frees the object; local. NULL is fine. */
XD_API void xd_vocab_destroy(xd_vocab *vocab);

/* What was agreed, as this rank sees it. */
typedef struct xd_vocab_info {
    xd_comm *tp; /* NULL on one rank */
    int rank, ranks;
    int64_t begin, end; /* of this rank */
    int64_t size;
    const int64_t *offsets; /* [ranks + 1] */
} xd_vocab_info;

/* The agreed cut; the pointers live as long as the object. Local. */
XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab);

/* Turns what a status recorded into an error: OK when it is clean, else DATA with counts, row and value.
 * Local. */
XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status);

/* >>distill/denominator */

/* The default of ignore_index fields: rows with this label do not count. */
#define XD_IGNORE_INDEX (-100)

/* Positions of one micro-batch on one rank. A position counts when its label is not ignore_index and its mask
 * is not 0; what is not given does not exclude. A counted position weighs 1, or weights[i]. */
typedef struct xd_positions {
    int64_t count;
    const int64_t *labels; /* [count] or NULL */
    int64_t ignore_index;  /* 0 -> XD_IGNORE_INDEX; to leave out id 0 use the mask */
    const uint8_t *mask;   /* [count] or NULL */
    const float *weights;  /* [count] or NULL; finite, not negative */
} xd_positions;

/* What the mean of a loss divides by: made once per optimizer step, so that the loss and its gradient are
 * those of one rank with the whole batch, however it was split. A plain value; `inverse` is what kernels
 * read. */
typedef struct xd_denominator {
    double value;      /* sum of the weights of counted positions, all micro-batches, all ranks */
    double inverse;    /* 1 / value; 0 when nothing counted */
    int64_t positions; /* how many positions counted */
} xd_denominator;

/* Counts positions over all micro-batches of a step and all ranks of the data and sequence axes.
 *
 *   comm    those axes as one group; NULL -> this rank alone. Never the vocabulary axis: it holds copies.
 *   batches [batch_count] the micro-batches of this rank; the count may differ between ranks and be 0
 *
 * Collective over comm: one all-reduce of five integers. Allocates nothing. Exact and the same bits for every
 * split: weights are summed as integers. Errors: ARGUMENT for negative counts and weights that are negative,
 * not finite or too large. */
XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out);

/* >>distill/shift */

/* The label of position t is the id at t + 1; the last position of a sequence has none. Logits never move: a
 * rank gives the list of positions it holds, in any order (contiguous, or the load-balanced pieces r and
 * 2n-1-r). */
typedef struct xd_shift_desc {
    int64_t sequences;        /* B */
    int64_t length;           /* positions of a whole sequence */
    const int64_t *positions; /* [held] global positions of this rank, in the order of its logits rows */
    int64_t held;
    const int64_t *ids;  /* [B, length] when every rank has them all; [B, held] with comm */
    const uint8_t *mask; /* like ids: 0 -> nobody predicts this token; NULL -> all count */
    int64_t fill;        /* label of positions without one; 0 -> XD_IGNORE_INDEX */
    xd_comm *comm;       /* ranks that together hold each position once; NULL -> ids are whole */
} xd_shift_desc;

/* labels [B, held] for the positions held. With comm: one exchange of ids and positions, memory from the
 * context's allocator, collective. Errors: ARGUMENT (a position outside the sequence), SHAPE (a position that
 * two ranks or none hold, with its number), MEMORY. */
XD_API xd_result xd_next_token_labels(xd_ctx *ctx, const xd_shift_desc *desc, int64_t *labels);

/* The load-balanced order: rank r of n holds pieces r and 2n-1-r of 2n equal ones. positions [length / n].
 * Errors: SHAPE when length is not a multiple of 2n. For n = 1 any length. */
XD_API xd_result xd_load_balanced_positions(xd_ctx *ctx, int64_t length, int rank, int ranks,
                                            int64_t *positions);

/* >>distill/softmax */

/* Statistics of rows whose vocabulary is split, and what follows from them alone. All are collective over the
 * vocabulary's group, give the same bits on all its ranks, and take [T, tp] memory from the context's
 * allocator for the call. -infinity is a legal logit of probability zero; NaN and +infinity spread to the
 * row's results.
 * Errors: SHAPE, DTYPE, ARGUMENT (temperature not positive and finite), MEMORY; on every rank alike. */

/* log_sum_exp[T] of logits/temperature (temperature 0 -> 1) and argmax[T], the lowest id among equals; either
 * may be NULL. A row of only -infinity has log_sum_exp -infinity. */
XD_API xd_result xd_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                              double *log_sum_exp, int64_t *argmax);

/* out[t, c] = logits[t, c] / temperature - log_sum_exp[t] for this rank's columns; out may be logits; padding
 * columns of out are left alone. */
XD_API xd_result xd_log_softmax(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                xd_rows out);

/* The vector-Jacobian product of xd_log_softmax: gradient = (weight - softmax * sum_v weight) / temperature,
 * the sum over the whole vocabulary. weight and gradient are [T, V/tp]; gradient may be weight or logits. */
XD_API xd_result xd_log_softmax_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                         double temperature, xd_rows weight, xd_rows gradient);

/* log_probs[T] of the given ids under softmax(logits / temperature); an id outside the vocabulary gets
 * NaN. */
XD_API xd_result xd_target_log_probs(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                     const int64_t *ids, double *log_probs);

/* gradient = (onehot(id) - softmax) * weight[t] / temperature, for the log-probabilities above; rows whose id
 * is outside the vocabulary or whose weight is 0 get zero. gradient may be logits. */
XD_API xd_result xd_target_log_probs_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                              double temperature, const int64_t *ids, const float *weight,
                                              xd_rows gradient);

/* values[t, j] = logits[t, ids[t, j]], [T, n]. ids_stride is n for ids per position and 0 for one list for
 * all. An id outside the vocabulary: ARGUMENT error when the list is shared; NaN otherwise. */
XD_API xd_result xd_gather_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, const int64_t *ids,
                                   int64_t n, int64_t ids_stride, double *values);

/* Share of the counted positions' weight at which the argmax is the label, over the positions of all ranks of
 * comm (NULL -> this rank). positions is of the rows of logits, with labels. Nothing counted: 0. Also
 * collective over comm. */
XD_API xd_result xd_accuracy(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                             const xd_positions *positions, xd_comm *comm, double *out);

/* >>distill/loss */

/* Who shares the smoothed probability. */
typedef enum xd_smoothing {
    XD_SMOOTHING_TORCH = 0, /* epsilon / V to every class, the target included */
    XD_SMOOTHING_MEGATRON   /* epsilon / (V - 1) to every other class */
} xd_smoothing;

/* Whether the divergence is multiplied by tau^2, which keeps its gradient's size as the temperature grows. */
typedef enum xd_temperature_factor {
    XD_TEMPERATURE_FACTOR_DEFAULT = 0, /* SQUARED for forward and reverse KL, ONE for the others */
    XD_TEMPERATURE_FACTOR_SQUARED,
    XD_TEMPERATURE_FACTOR_ONE
} xd_temperature_factor;

/* Cross entropy against labels (hard), a divergence from a teacher (soft), or both with one gradient write:
 *
 *   loss = scale / D * sum over counted rows of
 *          w_row (hard_weight CE(x, label) + soft_weight tau^2 d(x/tau, y/tau))
 *
 * [T, V/tp]: T positions, this rank's columns of the vocabulary. Labels, mask, weights and row_loss are of
 * the same T positions on every rank of tp; which positions of the batch they are does not matter. A shard
 * without columns still gives non-NULL data for the rows it is part of. */
typedef struct xd_loss_desc {
    xd_rows student;       /* required; [T, >= end - begin], f32 or bf16 */
    xd_rows teacher;       /* [T, >= end - begin], f32 or bf16; data NULL -> hard loss only. Constant. */
    const int64_t *labels; /* [T] ids of the next token (see xd_next_token_labels); NULL -> soft loss only */
    const xd_vocab *vocab; /* required */
    int64_t ignore_index; /* 0 -> XD_IGNORE_INDEX; rows with this label do not count, for the soft loss too */
    const uint8_t *mask;  /* [T] 0 -> the row does not count; NULL -> all do */
    const float *row_weight; /* [T]; NULL -> 1 */
    double hard_weight; /* hard_weight and soft_weight both 0 -> 1 for each loss whose inputs are given */
    double soft_weight;
    double temperature;       /* of the soft loss; 0 -> 1 */
    xd_divergence divergence; /* 0 -> XD_KL_FORWARD */
    double beta; /* XD_JSD: weight of the teacher in the mixture; 0 -> 0.5; 1 is the reverse KL */
    xd_temperature_factor temperature_factor;
    double label_smoothing; /* epsilon in [0, 1] */
    xd_smoothing smoothing;
    const double *scale;               /* one value that multiplies loss and gradient; NULL -> 1 */
    const xd_denominator *denominator; /* NULL -> denominator_value */
    double denominator_value; /* D itself; 0 -> counted rows of this call over comm, one more exchange */
    xd_comm *comm;    /* data and sequence axes: `out` is summed over them; NULL -> this rank's rows only */
    xd_rows gradient; /* d loss / d student, f32 or bf16, may be the student's memory; data NULL -> none */
    float
        *row_loss; /* [T] hard and soft, weighted, without w_row, scale and D; 0 where not counted; or NULL */
    xd_status *status; /* data errors are added here; NULL -> they are returned as an error */
    void *workspace;   /* NULL -> taken from the context's allocator for this call */
    size_t workspace_bytes;
} xd_loss_desc;

/* Sums over all ranks of comm, divided by D and scaled. `loss` = hard_weight hard + soft_weight tau^2
 * soft. */
typedef struct xd_loss_values {
    double loss, hard, soft;
    int64_t counted; /* rows */
} xd_loss_values;

/* Bytes of workspace that xd_loss takes for this desc. [T, tp] partials; never [T, V]. 0 for an invalid desc.
 * Local. */
XD_API size_t xd_loss_workspace_bytes(const xd_loss_desc *desc);

/* Value and gradient. Gradients are those of the global loss: sum them over data ranks, do not average.
 *
 * Collective over the vocabulary's group and over comm; the same bits on all their ranks. One packed exchange
 * over the vocabulary (JSD: two; INVARIANT: one more, of the maxima) and one over comm. Allocates nothing
 * when workspace is given. Deterministic for a fixed mesh; in INVARIANT mode value and gradient have the same
 * bits for every split of vocabulary and positions.
 * Errors, the same on every rank, outputs untouched: ARGUMENT (weights, temperature, beta, smoothing, no
 * input, small workspace), SHAPE, DTYPE. Data errors: a label outside the vocabulary that is not
 * ignore_index; NaN or +infinity among the logits of a counted row, a row of only -infinity, or a loss that
 * is infinite: the row's loss and gradient are zero and status counts it, agreed over all ranks. No counted
 * row: everything is zero and status says so. Without a status the call returns DATA on every rank; the
 * gradient is then written all the same. */
XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out);

/* xd_loss as a float on the host, with the teacher left out (cross entropy) or the labels left to count only
 * (KL). */
XD_API xd_result xd_cross_entropy_loss(xd_ctx *ctx, const xd_loss_desc *desc, float *loss);
XD_API xd_result xd_kl_loss(xd_ctx *ctx, const xd_loss_desc *desc, float *loss);

/* >>distill/topk */

/* The k largest logits of each position over the whole vocabulary: values [T, k] descending, global ids [T,
 * k], lowest id first among equals. k may exceed a shard, not the vocabulary. Collective over the
 * vocabulary's group: one exchange of the shards' candidates. Takes [T, k, tp] from the context's allocator.
 * Errors: ARGUMENT (k), SHAPE, DTYPE, MEMORY. */
XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, double *values,
                               int64_t *ids);

/* The k ids whose largest logit over the counted positions is greatest, ascending: one list for all positions
 * (J).
 *
 *   mask        [T] 0 -> the position has no say; NULL -> all have
 *   comm        the ranks that hold other positions of the same sample (sequence axis); NULL -> none
 *   importance  [V/tp] the maxima of this rank's columns, over comm; may be NULL
 *
 * Collective over the vocabulary's group and comm. Ties: lowest id. Errors as xd_vocab_topk. */
XD_API xd_result xd_select_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, const uint8_t *mask,
                                   xd_comm *comm, int64_t k, int64_t *ids, float *importance);

/* What the teacher shipped for each id. */
typedef enum xd_topk_values {
    XD_TOPK_LOG_PROBS = 0, /* ln p at values_temperature; -infinity: the entry is absent */
    XD_TOPK_LOGITS         /* raw; log_normaliser makes them probabilities where the mode needs that */
} xd_topk_values;

/* Divergence from a teacher known at k ids per position. The teacher comes in one of two forms: `ids` and
 * `values` it shipped, or `teacher`, its logits over the same split vocabulary; then ids NULL takes the
 * student's own k largest (no gradient through the choice). Fields named as in xd_loss_desc mean the same. */
typedef struct xd_topk_desc {
    xd_rows student;       /* required */
    const xd_vocab *vocab; /* required */
    int64_t k;             /* required, 1 <= k <= V */
    const int64_t *ids;    /* [T, k] global, distinct where valid; ids of absent entries are not read */
    const float *values;   /* [T, k]; NULL -> teacher */
    xd_topk_values values_kind;
    double values_temperature;   /* of log-probabilities; 0 -> 1; must equal temperature */
    const float *log_normaliser; /* [T] ln sum_v e^(y_v/tau): for LOGITS in TAIL and TRUNCATE */
    xd_rows teacher;
    xd_topk_mode mode;
    xd_divergence divergence;                 /* FORWARD, REVERSE, JSD, MIXED */
    double beta;                              /* JSD, MIXED; 0 -> 0.5 */
    double temperature;                       /* 0 -> 1 */
    xd_temperature_factor temperature_factor; /* DEFAULT -> ONE */
    const int64_t *labels;                    /* [T] which rows count; NULL -> all */
    int64_t ignore_index;
    const uint8_t *mask;
    const float *row_weight;
    const double *scale;
    const xd_denominator *denominator;
    double denominator_value;
    xd_comm *comm;
    xd_rows gradient;
    float *row_loss;           /* [T] with the temperature factor, without w_row, scale and D; or NULL */
    float *student_mass;       /* [T] probability the student puts on the valid ids; or NULL */
    float *teacher_mass;       /* [T] the teacher's; 1 where only renormalised values are known; or NULL */
    double *student_log_probs; /* [T, k] of counted rows, as the mode normalises them; or NULL */
    xd_status *status;
} xd_topk_desc;

/* Value and gradient. Collectivity, bits and data errors as xd_loss (one exchange over the vocabulary, in
 * INVARIANT mode one more of the maxima); further data errors: an id outside the vocabulary, or twice in a
 * row, and a row without a valid entry counts with loss 0. Takes [T, k, tp] from the context's allocator.
 * The tail's mass is summed from the columns outside, never formed as 1 - P, and has the floor 1 - e^-1e-7.
 * Errors: ARGUMENT, SHAPE, DTYPE, MEMORY; UNSUPPORTED for modes and divergences that do not combine. */
XD_API xd_result xd_topk_kl_loss(xd_ctx *ctx, const xd_topk_desc *desc, xd_loss_values *out);

/* >>distill/compat */

/* Forms of other trainers that the library does not recommend, for comparing numbers with them. */

/* Generalised JSD between rows that already hold probabilities (TRL GOLD): entries below 1e-8 are raised to
 * it, nothing is renormalised, so rows that do not sum to 1 give no divergence and the value may be negative.
 *
 *   student, teacher  [T, V] f32 or bf16, on one rank
 *   beta              0 is the forward and 1 the reverse KL, exactly; otherwise the JSD of section 0
 *   denominator       what the sum is divided by; not 0
 *   gradient          d loss / d student; data NULL -> none; may be student's memory
 *
 * Local. Errors: SHAPE, DTYPE, ARGUMENT. */
XD_API xd_result xd_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher, double beta,
                                                double denominator, xd_rows gradient, double *loss);

/* The denominators of TRL's generalised JSD over [B, T, V] logits; the loss itself is xd_loss with
 * denominator_value.
 *   counted  positions whose label counts, or B * T without labels */
typedef enum xd_compat_reduction {
    XD_COMPAT_BATCHMEAN = 0, /* counted positions with labels; the first axis, B, without */
    XD_COMPAT_SUM,
    XD_COMPAT_MEAN /* elements: positions times V */
} xd_compat_reduction;
XD_API double xd_compat_jsd_denominator(xd_compat_reduction reduction, int64_t batch, int64_t counted,
                                        int64_t vocabulary, bool labels);

/* The denominators of Model-Optimizer's logits loss over [N, V]: batchmean N, mean N * V, sum 1. */
XD_API double xd_compat_modelopt_denominator(xd_compat_reduction reduction, int64_t rows, int64_t vocabulary);

/* >>distill/align */

/* Two tokenizations of one text, cut into chunks: the shortest runs of student and teacher tokens that cover
 * the same piece of it. Cross-tokenizer losses compare chunk with chunk. All calls are local. */

/* Bytes; not terminated. */
typedef struct xd_text {
    const char *data;
    int64_t size;
} xd_text;

enum {
    XD_CHUNK_EXACT = 1, /* both sides spell the same piece of text */
    XD_CHUNK_MASKED = 2 /* some token of it is masked out: the chunk does not count */
};

/* Tokens [student_begin, student_end) and [teacher_begin, teacher_end). An empty side has begin = end, the
 * place where its tokens would be. Chunks are in order on both sides and do not overlap. */
typedef struct xd_aligned_chunk {
    int32_t student_begin, student_end;
    int32_t teacher_begin, teacher_end;
    uint32_t flags;
} xd_aligned_chunk;

/* The chunks of one sequence. `chunks` belongs to the context that made it; free it with
 * xd_alignment_free. */
typedef struct xd_alignment {
    xd_aligned_chunk *chunks;
    int64_t count;
} xd_alignment;

/* What a token is besides its text: tokens with a role and no bytes are paired with the other side's of the
 * same role at the same place. */
typedef enum xd_token_role { XD_TOKEN_TEXT = 0, XD_TOKEN_BOS, XD_TOKEN_EOS, XD_TOKEN_SPECIAL } xd_token_role;

/* Where a token comes from: bytes [begin, end) of the original text. Tokens that share a character, or a
 * cluster that was normalised as a whole, may have the same span, or one that lies inside another's. */
typedef struct xd_token_span {
    int64_t begin, end;
} xd_token_span;

/* One side of a sequence for xd_align_bytes. */
typedef struct xd_align_side {
    const xd_token_span *spans; /* [count] begins do not decrease, ends do not decrease */
    const uint8_t *roles;       /* [count] xd_token_role, or NULL */
    const uint8_t *mask;        /* [count] 0: padding, or a prompt that is not trained on; NULL -> all count */
    const int32_t *documents;   /* [count] not decreasing; packed documents never share a chunk. NULL -> one */
    int64_t count;
} xd_align_side;

/* What did not align. */
typedef struct xd_align_report {
    int64_t chunks, exact;
    int64_t one_sided;   /* chunks with an empty side */
    int64_t masked;      /* chunks that do not count because of a mask */
    int64_t total_bytes; /* of the text covered by the student's tokens */
    int64_t lost_bytes;  /* of those in chunks that are not exact or are masked */
} xd_align_report;

/* The default aligner: both tokenizations cover one byte string, so a sweep over the places where both have a
 * boundary gives the chunks. Linear, no heuristics; split multi-byte characters, leading spaces and
 * insertions need no rules of their own.
 *
 *   report  may be NULL
 *
 * Padding does not matter: chunks of tokens past the last unmasked one come last. Errors: ARGUMENT for spans
 * that go backwards, documents that go backwards; MEMORY. */
XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report);

/* One pair of sequences of a batch, and where its chunks go. */
typedef struct xd_align_job {
    xd_align_side student, teacher;
    xd_alignment out;
    xd_align_report report;
} xd_align_job;

/* xd_align_bytes for every job, on `workers` threads of this process (0 or 1 -> on the calling one). The
 * result does not depend on the number. All or nothing: on failure no job has chunks. The context's allocator
 * must be thread-safe when workers > 1. Errors: as xd_align_bytes, of the first job that failed. */
XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count, int workers);

/* Settings of xd_align_dp. */
typedef struct xd_align_dp_desc {
    int max_combination; /* tokens that one token may match; 0 -> 4 */
} xd_align_dp_desc;

/* The aligner of NeMo-RL (nemo_rl/algorithms/x_token/token_aligner.py), bit for bit, for parity: a dynamic
 * programme over token surface strings as vocabularies store them ("Ġfox", "▁fox", "<0xE2>"), anchored by
 * unique triples and repaired afterwards. It runs on the padded sequences and its result depends on the
 * padding; use xd_align_bytes for anything else. Time O(n m K), memory O(n m) between anchors. No mask: see
 * xd_chunk_ids. Errors: ARGUMENT for max_combination outside 1 to 64, MEMORY. */
XD_API xd_result xd_align_dp(xd_ctx *ctx, const xd_text *student, int64_t student_count,
                             const xd_text *teacher, int64_t teacher_count, const xd_align_dp_desc *desc,
                             xd_alignment *out);

/* The dynamic programme of xd_align_dp alone, on the strings as they are: no canonical forms, anchors or
 * repairs. *score (may be NULL) in the reference's units: 3 a match, -3 a mismatch, -1.5 a token without
 * partner, 1.5 n for one token that matches n. Ties prefer, in this order, the diagonal, a student token
 * alone, a teacher token alone, one student token to n, one teacher token to n. */
XD_API xd_result xd_align_segment(xd_ctx *ctx, const xd_text *student, int64_t student_count,
                                  const xd_text *teacher, int64_t teacher_count, const xd_align_dp_desc *desc,
                                  xd_alignment *out, double *score);

/* Which side of a chunk. */
typedef enum xd_chunk_side { XD_CHUNK_STUDENT = 0, XD_CHUNK_TEACHER } xd_chunk_side;

/* ids[i] = number of the chunk that token i belongs to, -1 where there is none or mask (may be NULL) is 0;
 * exact (may be NULL): the token is the only one of its side in an exact chunk whose other side has one token
 * too. [count] each. Allocates nothing. */
XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const uint8_t *mask, int64_t *ids,
                         uint8_t *exact, int64_t count);

/* Frees the chunks; an empty alignment is fine. */
XD_API void xd_alignment_free(xd_ctx *ctx, xd_alignment *alignment);

/* >>distill/canonical */

/* The form in which xd_align_dp and the compat projection compare vocabulary strings of different tokenizers
 * (NeMo-RL, TokenAligner's canonical tokens): one marker for a leading space, one newline, characters for
 * byte tokens, a few repaired multi-byte characters. Its gaps are kept as they are, for parity. */

/* Writes the canonical form of one token into out, which has room for size + 2 bytes, and returns its length.
 * Pure. Not idempotent: "<0x5F>" gives "_", and that gives the space marker. */
XD_API int64_t xd_canonical_token(xd_text token, char *out);

/* A canonical sequence: token i is text[offsets[i] .. offsets[i + 1]) and stands for the original tokens
 * [origin[i], origin[i + 1]). One block of memory, `text`; free it with xd_canonical_free. */
typedef struct xd_canonical {
    char *text;
    int64_t *offsets; /* [count + 1] */
    int32_t *origin;  /* [count + 1] */
    int64_t count;
} xd_canonical;

/* Canonical forms of a whole sequence, where tokens that are pieces of one character become one. Local.
 * Errors: MEMORY. */
XD_API xd_result xd_canonical_sequence(xd_ctx *ctx, const xd_text *tokens, int64_t count, xd_canonical *out);
XD_API void xd_canonical_free(xd_ctx *ctx, xd_canonical *sequence);

/* >>distill/projection */

/* From a student's vocabulary to a teacher's: which teacher ids a student id stands for, and with what share.
 * Built once for a pair of tokenizers, offline: votes are counted (xd_votes), each student id keeps its best
 * (xd_projection_rows), and what losses use is a sparse matrix (xd_projection). Memory is that of the
 * votes, never [V_s, V_t]. All calls are local. */

/* ---- votes ---- */

/* A sparse sum of votes over (student id, teacher id). */
typedef struct xd_votes xd_votes;

/* Errors: ARGUMENT for a vocabulary of less than one id or more than 2^31 - 1, MEMORY. */
XD_API xd_result xd_votes_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size, xd_votes **out);
XD_API void xd_votes_destroy(xd_votes *votes);

/* Adds weight to one pair. Errors: ARGUMENT for an id outside its vocabulary, MEMORY. */
XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight);

/* A token of one vocabulary, and its text in the tokens of the other. */
typedef struct xd_pieces {
    xd_text text; /* "<|...|>" is a special token: it casts no votes here */
    const int64_t *ids;
    int64_t count;
} xd_pieces;

/* A pass over all tokens of one vocabulary. */
typedef struct xd_votes_pass {
    const xd_pieces *tokens; /* [count], by id */
    int64_t count;
    bool reverse;               /* the tokens are the teacher's and the pieces the student's */
    int64_t most_pieces;        /* later pieces are cut off; 0 -> 4 */
    const int64_t *skip;        /* [skip_count] tokens that cast no vote */
    int64_t skip_count;
    const int64_t *foreign_skip; /* [foreign_skip_count] a token with such a piece casts no vote */
    int64_t foreign_skip_count;
} xd_votes_pass;

/* Every token votes for its pieces with the weights of xd_piece_weights (NeMo-RL,
 * tools/x_token/minimal_projection_via_multitoken.py). Errors: as xd_votes_add; votes added before the
 * failure stay. */
XD_API xd_result xd_votes_add_pass(xd_votes *votes, const xd_votes_pass *pass);

/* Shares of a token's pieces: 0.9 * 0.1^i, scaled to sum 1. Pure. */
XD_API void xd_piece_weights(int64_t count, double *weights);

/* Votes for special tokens ("<...>") that look alike: similarity = 0.6 R + 0.4 J, R the Ratcliff-Obershelp
 * ratio of the strings, J the Jaccard index of their words longer than two letters. */
typedef struct xd_special_desc {
    const xd_text *student, *teacher; /* vocabulary strings, by id */
    int64_t student_count, teacher_count;
    double threshold;   /* 0 -> 0.3 */
    int64_t most_pairs; /* best pairs a student token keeps; 0 -> 32 */
} xd_special_desc;

/* One pair of similar special tokens. */
typedef struct xd_special_pair {
    int64_t student_id, teacher_id;
    double similarity;
} xd_special_pair;

/* The pairs, best first within a student token, lowest teacher id among equals. *pairs comes from the
 * context's allocator: xd_release. Errors: MEMORY. */
XD_API xd_result xd_special_pairs(xd_ctx *ctx, const xd_special_desc *desc, xd_special_pair **pairs,
                                  int64_t *count);

/* The student id keeps no vote but one of weight 1 for the teacher id. Errors: as xd_votes_add. */
XD_API xd_result xd_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id);

/* One cell of the votes. */
typedef struct xd_vote {
    int32_t student_id, teacher_id;
    double weight;
} xd_vote;

/* All cells, by student id, then teacher id; valid until the next call on votes. */
XD_API xd_result xd_votes_read(xd_votes *votes, const xd_vote **cells, int64_t *count);

/* ---- rows ---- */

/* The k best teacher ids of every student id, as the reference's files hold them. ids and weights are one
 * block from the context's allocator; free with xd_projection_rows_free. */
typedef struct xd_projection_rows {
    int32_t *ids;   /* [rows, k]; -1: no entry */
    float *weights; /* [rows, k] */
    int64_t rows, k;
} xd_projection_rows;

/* Settings of xd_projection_rows_from_votes. */
typedef struct xd_projection_rows_desc {
    int64_t k; /* 0 -> 32 */
    /* The reference's file to the last bit of its bf16 arithmetic: votes rounded to bf16, normalised, the
     * best k; slots without votes hold the lowest teacher ids that are free, with weight 0. */
    bool compat;
    bool scale_trick; /* compat only: the last slot's weight becomes 0.2, rows are normalised again */
} xd_projection_rows_desc;

/* Normalised votes, largest first, lowest id among equals. Errors: ARGUMENT for k < 1 or the scale trick
 * without compat, MEMORY. */
XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out);

/* Rows of student ids whose string the teacher has too become that id alone; of equal teacher strings the
 * highest id wins (reapply_exact_map.py). An empty string is nobody's. Errors: ARGUMENT when there are more
 * student strings than rows; MEMORY. */
XD_API xd_result xd_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, const xd_text *student,
                                                int64_t student_count, const xd_text *teacher,
                                                int64_t teacher_count);

/* Settings of xd_projection_rows_cut. */
typedef struct xd_projection_cut_desc {
    int64_t k; /* 0 -> 4 */
    /* As the reference does for files with the scale trick: the stored last entry is kept in the last slot;
     * in rows with free slots it also takes part in the sorting, and so appears twice. */
    bool preserve_last;
    bool compat; /* weights are bf16 numbers, and rounded to bf16 again */
} xd_projection_cut_desc;

/* Keeps the k largest weights of every row, normalised (sort_and_cut_projection_matrix.py). Entries without
 * id or weight fall. Errors: ARGUMENT for k < 1, MEMORY. */
XD_API xd_result xd_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                        const xd_projection_cut_desc *desc, xd_projection_rows *out);

/* Rows from similarities in [-1, 1], such as cosines of embeddings: |s| to the power of ten times the row's
 * largest, normalised, the best k; entries below threshold lose their id but keep their weight
 * (minimal_projection_generator.py).
 *
 *   similarities  [rows, columns]
 */
XD_API xd_result xd_projection_rows_from_similarities(xd_ctx *ctx, const float *similarities, int64_t rows,
                                                      int64_t columns, int64_t k, double threshold,
                                                      xd_projection_rows *out);

/* The same with the cosine similarities of two sets of embeddings, a row at a time.
 *
 *   student  [student_count, width]
 *   teacher  [teacher_count, width]
 */
XD_API xd_result xd_projection_rows_from_embeddings(xd_ctx *ctx, const float *student, int64_t student_count,
                                                    const float *teacher, int64_t teacher_count,
                                                    int64_t width, int64_t k, double threshold,
                                                    xd_projection_rows *out);

/* Divides every row by its sum; rows that sum to 0 stay. [rows, columns], in place. This is the whole of the
 * reference's one-sided Sinkhorn step: repeating it changes nothing. */
XD_API void xd_normalise_rows(double *matrix, int64_t rows, int64_t columns);

/* Frees the rows; empty ones are fine. */
XD_API void xd_projection_rows_free(xd_ctx *ctx, xd_projection_rows *rows);

/* ---- the matrix that losses use ---- */

/* Sparse [student_size, teacher_size], by rows and by columns. Immutable; may be shared by threads. */
typedef struct xd_projection {
    int64_t student_size, teacher_size, entries;
    const int64_t *row_begin; /* [student_size + 1] */
    const int32_t *teacher_id; /* [entries] ascending within a row */
    const float *weight;       /* [entries] */
    const int64_t *column_begin; /* [teacher_size + 1] the transposed matrix */
    const int32_t *student_id;   /* [entries] ascending within a column */
    const float *column_weight;  /* [entries] */
} xd_projection;

/* From rows: entries without id fall, equal ids of a row are added up. Sizes are those of the tokenizers, or
 * larger when the rows need it. Free with xd_projection_free. Errors: ARGUMENT for weights that are negative
 * or not finite, MEMORY. */
XD_API xd_result xd_projection_from_rows(xd_ctx *ctx, const xd_projection_rows *rows, int64_t student_size,
                                         int64_t teacher_size, xd_projection *out);

/* From a list of cells in any order; equal ones are added up. */
XD_API xd_result xd_projection_from_cells(xd_ctx *ctx, const xd_vote *cells, int64_t count,
                                          int64_t student_size, int64_t teacher_size, xd_projection *out);

/* Frees the matrix; an empty one is fine. */
XD_API void xd_projection_free(xd_ctx *ctx, xd_projection *projection);

/* ---- the exact map of gold losses ---- */

/* Student ids that are one teacher id and the other way round, and those that are not. One block; free with
 * xd_exact_map_free. */
typedef struct xd_exact_map {
    int32_t *student, *teacher; /* [pairs] by student id */
    int32_t *student_rest;      /* [student_rest_count] ascending */
    int32_t *teacher_rest;      /* [teacher_rest_count] ascending */
    int64_t pairs, student_rest_count, teacher_rest_count;
} xd_exact_map;

/* Strict: a row of weight 1 whose stored second id is -1. Relaxed: a largest weight of 0.6 or more. Two
 * student ids for one teacher id: strict keeps the lower, relaxed the one with the larger weight. Errors:
 * ARGUMENT for fewer than two columns when strict, MEMORY. */
XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size,
                                     bool relaxed, xd_exact_map *out);
XD_API void xd_exact_map_free(xd_ctx *ctx, xd_exact_map *map);


/* >>io/safetensors */

/* The safetensors format: 8 bytes header length, a JSON header, the tensors' bytes (little-endian, last dimension
 * fastest, back to back). Files come from strangers, so the reader checks everything the format promises before it
 * shows anything: lengths, UTF-8, types, that the tensors tile the data without hole or overlap, and that the file ends
 * where they end. The data start is 8-aligned in files of this writer; the format does not promise any alignment. */

/* An open file. */
typedef struct xd_safetensors xd_safetensors;

/* How the bytes of an open file are reached. */
typedef enum xd_safetensors_mode {
    XD_SAFETENSORS_MAP = 0, /* the default: memory-mapped, or read whole where files cannot be mapped */
    XD_SAFETENSORS_STREAM   /* keep the header only, read what is asked for */
} xd_safetensors_mode;

/* How to open a file. Zero is the default of every field. */
typedef struct xd_safetensors_desc {
    xd_safetensors_mode mode;
    size_t max_header_bytes; /* 0 -> 100,000,000, the format's own limit */
    bool skip_unknown;       /* leave out tensors whose dtype is none of ours, instead of refusing the file */
} xd_safetensors_desc;

/* One tensor of an open file; the pointers live as long as the file is open. */
typedef struct xd_safetensors_info {
    const char *name; /* UTF-8, without NUL inside */
    xd_dtype dtype;
    int ndim;             /* 0 to 64; 0 is a scalar */
    const int64_t *shape; /* [ndim]; sizes may be 0 */
    uint64_t begin, end;  /* bytes, relative to the data area */
} xd_safetensors_info;

/* Opens and checks a file. desc NULL -> defaults. Local.
 * Errors: IO, MEMORY; FORMAT for every broken promise of the format, naming file, tensor and numbers. */
XD_API xd_result xd_safetensors_open(xd_ctx *ctx, const char *path, const xd_safetensors_desc *desc,
                                     xd_safetensors **out);

/* The same over bytes in memory, which must outlive the object. Errors: FORMAT, MEMORY. */
XD_API xd_result xd_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                            const xd_safetensors_desc *desc, xd_safetensors **out);

/* Closes; everything obtained from the object is then invalid. NULL is fine. */
XD_API void xd_safetensors_close(xd_safetensors *file);

/* Tensors have the indexes 0 .. count - 1 in the order of their names' bytes. */
XD_API int64_t xd_safetensors_count(const xd_safetensors *file);
XD_API const xd_safetensors_info *xd_safetensors_at(const xd_safetensors *file, int64_t index);

/* Index of a name, -1 when there is none. O(log count). */
XD_API int64_t xd_safetensors_find(const xd_safetensors *file, const char *name);

/* Value of a key of the file's metadata, NULL when there is none. */
XD_API const char *xd_safetensors_metadata(const xd_safetensors *file, const char *key);

/* Pair `index` of the metadata in the order of the keys' bytes; false past the last. */
XD_API bool xd_safetensors_metadata_at(const xd_safetensors *file, int64_t index, const char **key,
                                       const char **value);

/* A tensor's bytes without a copy, possibly unaligned; NULL in stream mode. Faults may be lazy: a file that is
 * truncated by others while it is mapped raises SIGBUS. */
XD_API const void *xd_safetensors_data(const xd_safetensors *file, int64_t index);

/* Copies bytes [first_byte, first_byte + bytes) of a tensor. Errors: ARGUMENT outside the tensor, IO. */
XD_API xd_result xd_safetensors_read_range(xd_safetensors *file, int64_t index, uint64_t first_byte,
                                           size_t bytes, void *destination);

/* Copies the box [offset, offset + size) of a tensor, densely packed, reading little more than its bytes: in stream
 * mode pieces less than 256 KiB apart share a read.
 *   offset, size   [ndim] elements; ignored for a scalar
 * Errors: ARGUMENT outside the tensor, IO, MEMORY. */
XD_API xd_result xd_safetensors_read_box(xd_safetensors *file, int64_t index, const int64_t *offset,
                                         const int64_t *size, void *destination);

/* ---- writing ---- */

/* One tensor of a file to be written. */
typedef struct xd_safetensors_entry {
    const char *name; /* required; UTF-8, at most 64 KiB, not "__metadata__" */
    xd_dtype dtype;   /* required */
    int ndim;
    const int64_t *shape; /* [ndim] */
} xd_safetensors_entry;

/* One pair of the metadata of a file to be written. */
typedef struct xd_safetensors_pair {
    const char *key, *value; /* UTF-8 */
} xd_safetensors_pair;

/* Everything that decides the layout of a file. */
typedef struct xd_safetensors_writer_desc {
    const xd_safetensors_entry *entries; /* in any order; the file holds wide dtypes first, then by name */
    int64_t entry_count;
    const xd_safetensors_pair *metadata; /* beside "format" = "pt", which is always written */
    int64_t metadata_count;
    size_t alignment; /* of the data area, a power of two from 8 on; 0 -> 8 */
} xd_safetensors_writer_desc;

/* A file being written under a temporary name. */
typedef struct xd_safetensors_writer xd_safetensors_writer;

/* Plans the whole file and starts it under a temporary name. The desc is read during the call only. The layout depends
 * on nothing but the desc. Local.
 * Errors: ARGUMENT for bad names, sizes or dtypes and for a header beyond 100,000,000 bytes; IO, MEMORY. */
XD_API xd_result xd_safetensors_create(xd_ctx *ctx, const char *path, const xd_safetensors_writer_desc *desc,
                                       xd_safetensors_writer **out);

/* Writes a whole tensor, or bytes [first_byte, first_byte + bytes) of one; each byte exactly once, in any order.
 *   index   of the tensor in desc.entries
 * Errors: ARGUMENT outside the tensor, IO. */
XD_API xd_result xd_safetensors_write(xd_safetensors_writer *writer, int64_t index, const void *data);
XD_API xd_result xd_safetensors_write_range(xd_safetensors_writer *writer, int64_t index, uint64_t first_byte,
                                            size_t bytes, const void *data);

/* Syncs the file, gives it its name and frees the writer, whatever the result.
 * Errors: STATE when a tensor's bytes are not all written, IO; then nothing is left behind. */
XD_API xd_result xd_safetensors_commit(xd_safetensors_writer *writer);

/* Gives up: nothing is left behind. NULL is fine. */
XD_API void xd_safetensors_abort(xd_safetensors_writer *writer);

/* >>io/model_files */

/* A model directory as Hugging Face lays it out: model.safetensors, or model-00001-of-0000N.safetensors and so on with
 * model.safetensors.index.json saying which tensor lies in which file. */
typedef struct xd_model_files xd_model_files;

/* Opens the weights of a directory: model.safetensors when it is there, the index and all its files otherwise.
 *
 *   desc   for every file; NULL -> defaults
 *
 * Local. Errors: as xd_safetensors_open; FORMAT when the index is no index or names a file outside the directory;
 * MISSING when a file lacks a tensor that the index puts there; UNEXPECTED when a file holds a tensor that the index
 * does not put there. */
XD_API xd_result xd_model_files_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                     xd_model_files **out);

/* Closes all files. NULL is fine. */
XD_API void xd_model_files_close(xd_model_files *model);

/* The files, in the order of their names. */
XD_API int64_t xd_model_files_count(const xd_model_files *model);
XD_API xd_safetensors *xd_model_files_at(const xd_model_files *model, int64_t file);

/* Where a tensor is: its open file and its index in that file. Both outputs are untouched when there is none.
 * O(log tensors). Errors: MISSING. */
XD_API xd_result xd_model_files_find(const xd_model_files *model, const char *name, xd_safetensors **file,
                                     int64_t *index);

/* What to write and how to cut it into files. */
typedef struct xd_model_writer_desc {
    const xd_safetensors_entry *entries; /* files are filled in this order */
    int64_t entry_count;
    uint64_t
        max_shard_bytes; /* of tensors in one file; a larger tensor gets a file of its own; 0 -> 5,000,000,000 */
    const xd_safetensors_pair *metadata; /* of every file, beside "format" = "pt" */
    int64_t metadata_count;
} xd_model_writer_desc;

/* A model directory being written. */
typedef struct xd_model_writer xd_model_writer;

/* Plans the files of a model and starts them under temporary names in an existing directory. The desc is read during
 * the call only. Local. Errors: as xd_safetensors_create. */
XD_API xd_result xd_model_writer_create(xd_ctx *ctx, const char *directory, const xd_model_writer_desc *desc,
                                        xd_model_writer **out);

/* Writes bytes [first_byte, first_byte + bytes) of tensor `index` of desc.entries, as xd_safetensors_write_range: a
 * sharded tensor arrives piece by piece, and no one needs room for the whole. Errors: ARGUMENT, IO. */
XD_API xd_result xd_model_writer_write(xd_model_writer *writer, int64_t index, uint64_t first_byte,
                                       size_t bytes, const void *data);

/* Publishes the files, the index last, removes the single file or index of an older model in the directory, which
 * would contradict them, and frees the writer, whatever the result.
 * Each file is published atomically, several are not: a save that fails here may already have replaced files of an
 * older model in the same directory. Errors: as xd_safetensors_commit; then what was published is removed again. */
XD_API xd_result xd_model_writer_commit(xd_model_writer *writer);

/* Gives up: nothing is left behind. NULL is fine. */
XD_API void xd_model_writer_abort(xd_model_writer *writer);

/* >>io/gather */

/* One tensor of a model and the name it has in the file. */
typedef struct xd_named_tensor {
    const char *name;
    xd_tensor tensor; /* this rank's view; its layout tells the whole shape */
} xd_named_tensor;

/* What to gather and where to write it. */
typedef struct xd_model_gather_desc {
    const char *directory;          /* required; exists where root writes */
    const xd_named_tensor *tensors; /* the same names, dtypes and layouts in the same order on every rank */
    int64_t tensor_count;
    int root; /* world rank that writes */
    size_t
        staging_bytes; /* of a tensor in root's memory at once, one index of dimension 0 at least; 0 -> 16 MiB */
    uint64_t max_shard_bytes; /* as in xd_model_writer_desc */
    const xd_safetensors_pair *metadata;
    int64_t metadata_count;
} xd_model_gather_desc;

/* Saves a sharded model as one rank's model directory: tensor by tensor, slab by slab, so that no rank ever holds the
 * whole of it. Partial tensors are reduced on the way.
 *
 * Collective over the world. Errors: those of xd_tensor_gather and of xd_model_writer, agreed: when root cannot write,
 * every rank returns an error, and nothing is left behind. */
XD_API xd_result xd_model_gather(xd_comm *world, const xd_model_gather_desc *desc);


#endif /* XDISTILL_H */

#ifdef XDISTILL_IMPLEMENTATION
#ifndef XDISTILL_IMPLEMENTED
#define XDISTILL_IMPLEMENTED

/* ---- implementation ---- */
/* >>base/internal */

/* Functions that several parts use. Unused ones are no warning: a user may need half of the library. */
#if !defined(XD_PRIVATE)
#if defined(__GNUC__)
#define XD_PRIVATE static __attribute__((unused))
#else
#define XD_PRIVATE static
#endif
#endif

/* file.c: the POSIX entries where the caller gave none. */
XD_PRIVATE void xdi_files_defaults(xd_files *files);

/* context.c: a * b, false when it overflows. */
XD_PRIVATE bool xdi_size_multiply(size_t a, size_t b, size_t *product);

/* sort.c: sorts pointers in O(n log n) for every input; not stable. `order` is as for qsort, on the pointers. */
typedef int (*xdi_sort_order)(const void *a, const void *b);
XD_PRIVATE void xdi_sort(const void **items, size_t count, xdi_sort_order order);

/* >>base/dtype.c */

#include <string.h>

typedef struct xdi_dtype_row {
    size_t bytes;
    bool floating;
    const char *name;
} xdi_dtype_row;

static const xdi_dtype_row xdi_dtype_rows[XD_DTYPE_COUNT] = {
    { 0, false, "NONE" },
#define XDI_DTYPE_ROW(name, bytes, floating, text) { bytes, floating, text },
    XD_DTYPES(XDI_DTYPE_ROW)
#undef XDI_DTYPE_ROW
};

static const xdi_dtype_row *xdi_dtype_find(xd_dtype dtype) {
    const int index = (int)dtype;
    return &xdi_dtype_rows[index > 0 && index < (int)XD_DTYPE_COUNT ? index : 0];
}

XD_API size_t xd_dtype_size(xd_dtype dtype) {
    return xdi_dtype_find(dtype)->bytes;
}

XD_API bool xd_dtype_is_floating(xd_dtype dtype) {
    return xdi_dtype_find(dtype)->floating;
}

XD_API const char *xd_dtype_name(xd_dtype dtype) {
    return xdi_dtype_find(dtype)->name;
}

XD_API xd_dtype xd_dtype_from_name(const char *name) {
    for (int i = 1; i < (int)XD_DTYPE_COUNT; i++)
        if (strcmp(name, xdi_dtype_rows[i].name) == 0) return (xd_dtype)i;
    return XD_DTYPE_NONE;
}

/* >>base/result.c */

static const char *const xdi_result_names[XD_RESULT_COUNT] = {
    "OK",
#define XDI_RESULT_NAME(name, text) #name,
    XD_RESULTS(XDI_RESULT_NAME)
#undef XDI_RESULT_NAME
};

static const char *const xdi_result_texts[XD_RESULT_COUNT] = {
    "no error",
#define XDI_RESULT_TEXT(name, text) text,
    XD_RESULTS(XDI_RESULT_TEXT)
#undef XDI_RESULT_TEXT
};

XD_API const char *xd_result_name(xd_result result) {
    const int index = (int)result;
    return index >= 0 && index < (int)XD_RESULT_COUNT ? xdi_result_names[index] : "ERROR_UNKNOWN";
}

XD_API const char *xd_result_text(xd_result result) {
    const int index = (int)result;
    return index >= 0 && index < (int)XD_RESULT_COUNT ? xdi_result_texts[index] : "not a result of this library";
}

/* >>base/memory.c */

XD_API xd_arena xd_arena_over(void *base, size_t capacity) {
    xd_arena arena;
    arena.base = (unsigned char *)base;
    arena.capacity = capacity;
    arena.used = 0;
    arena.peak = 0;
    arena.sealed = false;
    return arena;
}

XD_API bool xd_arena_take(xd_arena *arena, size_t bytes, size_t *offset) {
    const size_t mask = (size_t)XD_ARENA_ALIGNMENT - 1;
    if (arena->sealed || arena->used > SIZE_MAX - mask) return false;
    const size_t begin = (arena->used + mask) & ~mask;
    if (bytes > SIZE_MAX - begin) return false;
    if (arena->base && begin + bytes > arena->capacity) return false;
    arena->used = begin + bytes;
    if (arena->used > arena->peak) arena->peak = arena->used;
    *offset = begin;
    return true;
}

XD_API void *xd_arena_take_pointer(xd_arena *arena, size_t bytes) {
    size_t offset;
    if (!xd_arena_take(arena, bytes, &offset) || !arena->base) return NULL;
    return arena->base + offset;
}

XD_API size_t xd_arena_mark(const xd_arena *arena) {
    return arena->used;
}

XD_API void xd_arena_release(xd_arena *arena, size_t mark) {
    if (mark < arena->used) arena->used = mark;
}

XD_API void xd_arena_seal(xd_arena *arena) {
    arena->sealed = true;
}

/* >>base/cpu.c */

#include <string.h>

/* Vector kernels are compiled by function attributes, so plain `cc -O2` has them all. */
XD_API xd_cpu_level xd_cpu_best(void) {
#if defined(XDI_X86)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return XD_CPU_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return XD_CPU_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? XD_CPU_AVX512_BF16 : XD_CPU_AVX512;
#else
    return XD_CPU_PORTABLE;
#endif
}

static const char *const xdi_cpu_names[] = { "best", "plain", "portable", "avx2", "avx512", "avx512_bf16" };

XD_API const char *xd_cpu_level_name(xd_cpu_level level) {
    return (int)level >= 0 && (int)level <= (int)XD_CPU_AVX512_BF16 ? xdi_cpu_names[(int)level] : "unknown";
}

XD_API bool xd_cpu_level_parse(const char *name, xd_cpu_level *out) {
    for (int i = 0; i <= (int)XD_CPU_AVX512_BF16; i++) {
        if (strcmp(name, xdi_cpu_names[i]) != 0) continue;
        *out = (xd_cpu_level)i;
        return true;
    }
    return false;
}

/* >>base/file.c */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* POSIX behind the file callbacks. Reads and writes are whole or fail: a short read is EIO, because every caller knows
 * from the file's size how much there must be. */

static int xdi_file_open(void *user, const char *path, xd_file_mode mode, intptr_t *file) {
    (void)user;
    const int flags = mode == XD_FILE_READ ? O_RDONLY : O_RDWR | O_CREAT | O_EXCL;
    const int descriptor = open(path, flags | O_CLOEXEC, 0666);
    if (descriptor < 0) return errno;
    *file = (intptr_t)descriptor;
    return 0;
}

static int xdi_file_size(void *user, intptr_t file, uint64_t *bytes) {
    (void)user;
    struct stat status;
    if (fstat((int)file, &status) != 0) return errno;
    *bytes = (uint64_t)status.st_size;
    return 0;
}

static int xdi_file_read(void *user, intptr_t file, void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    unsigned char *to = (unsigned char *)buffer;
    while (bytes > 0) {
        const ssize_t got = pread((int)file, to, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return EIO;
        to += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return 0;
}

static int xdi_file_write(void *user, intptr_t file, const void *buffer, size_t bytes, uint64_t offset) {
    (void)user;
    const unsigned char *from = (const unsigned char *)buffer;
    while (bytes > 0) {
        const ssize_t put = pwrite((int)file, from, bytes, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return errno;
        from += put;
        offset += (uint64_t)put;
        bytes -= (size_t)put;
    }
    return 0;
}

static int xdi_file_resize(void *user, intptr_t file, uint64_t bytes) {
    (void)user;
    return ftruncate((int)file, (off_t)bytes) == 0 ? 0 : errno;
}

static int xdi_file_sync(void *user, intptr_t file) {
    (void)user;
    return fsync((int)file) == 0 ? 0 : errno;
}

static int xdi_file_close(void *user, intptr_t file) {
    (void)user;
    return close((int)file) == 0 ? 0 : errno;
}

static int xdi_file_map(void *user, intptr_t file, uint64_t bytes, const void **address) {
    (void)user;
    void *mapping = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, (int)file, 0);
    if (mapping == MAP_FAILED) return errno;
    *address = mapping;
    return 0;
}

static int xdi_file_unmap(void *user, const void *address, uint64_t bytes) {
    (void)user;
    return munmap((void *)(uintptr_t)address, (size_t)bytes) == 0 ? 0 : errno;
}

static int xdi_file_rename(void *user, const char *from, const char *to) {
    (void)user;
    return rename(from, to) == 0 ? 0 : errno;
}

static int xdi_file_remove(void *user, const char *path) {
    (void)user;
    return remove(path) == 0 ? 0 : errno;
}

static int xdi_file_make_directory(void *user, const char *path) {
    (void)user;
    if (mkdir(path, 0777) == 0) return 0;
    if (errno != EEXIST) return errno;
    struct stat status;
    if (stat(path, &status) != 0) return errno;
    return S_ISDIR(status.st_mode) ? 0 : ENOTDIR;
}

static int xdi_file_sync_directory(void *user, const char *path) {
    (void)user;
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return errno;
    const int result = fsync(descriptor) == 0 ? 0 : errno;
    close(descriptor);
    return result;
}

/* Fills the empty entries of a caller's table. An entry the caller set stays, together with his user pointer. */
XD_PRIVATE void xdi_files_defaults(xd_files *files) {
    if (!files->open) files->open = xdi_file_open;
    if (!files->size) files->size = xdi_file_size;
    if (!files->read) files->read = xdi_file_read;
    if (!files->write) files->write = xdi_file_write;
    if (!files->resize) files->resize = xdi_file_resize;
    if (!files->sync) files->sync = xdi_file_sync;
    if (!files->close) files->close = xdi_file_close;
    if (!files->map) files->map = xdi_file_map;
    if (!files->unmap) files->unmap = xdi_file_unmap;
    if (!files->rename) files->rename = xdi_file_rename;
    if (!files->remove) files->remove = xdi_file_remove;
    if (!files->make_directory) files->make_directory = xdi_file_make_directory;
    if (!files->sync_directory) files->sync_directory = xdi_file_sync_directory;
}

/* >>base/context.c */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if !defined(CLOCK_MONOTONIC)
#error "add `#define _POSIX_C_SOURCE 200809L` above the first #include of this file, or include xdistill.h first"
#endif

struct xd_ctx {
    xd_ctx_desc settings; /* every default filled in */
    xd_error error;
    const char *caller_file; /* set by XD_AT until the next call that fails */
    int caller_line;
};

static void *xdi_ctx_allocate(void *user, size_t bytes) {
    (void)user;
    return malloc(bytes);
}

static void xdi_ctx_release(void *user, void *memory) {
    (void)user;
    free(memory);
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
    if (d->timeout_seconds == 0.0) d->timeout_seconds = 60.0;
    if (d->init_timeout_seconds == 0.0) d->init_timeout_seconds = 600.0;
    xdi_files_defaults(&d->files);
}

XD_API xd_result xd_ctx_create(const xd_ctx_desc *desc, xd_ctx **out) {
    xd_ctx_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    xdi_ctx_defaults(&d);
    /* The negated form also refuses NaN. */
    if (!(d.timeout_seconds > 0.0) || !(d.init_timeout_seconds > 0.0)) return XD_ERROR_ARGUMENT;
    if ((int)d.cpu < 0 || d.cpu > xd_cpu_best()) return XD_ERROR_UNSUPPORTED;
    xd_ctx *ctx = (xd_ctx *)d.allocator.allocate(d.allocator.user, sizeof *ctx);
    if (!ctx) return XD_ERROR_MEMORY;
    memset(ctx, 0, sizeof *ctx);
    ctx->settings = d;
    ctx->error.culprit = -1;
    *out = ctx;
    return XD_OK;
}

XD_API void xd_ctx_destroy(xd_ctx *ctx) {
    if (!ctx) return;
    const xd_allocator allocator = ctx->settings.allocator;
    allocator.release(allocator.user, ctx);
}

XD_API const xd_ctx_desc *xd_ctx_settings(const xd_ctx *ctx) {
    return &ctx->settings;
}

XD_API const xd_error *xd_last_error(const xd_ctx *ctx) {
    return &ctx->error;
}

XD_API void xd_clear_error(xd_ctx *ctx) {
    memset(&ctx->error, 0, sizeof ctx->error);
    ctx->error.culprit = -1;
    ctx->error.rank = ctx->settings.rank;
}

XD_API xd_ctx *xd_at(xd_ctx *ctx, const char *file, int line) {
    ctx->caller_file = file;
    ctx->caller_line = line;
    return ctx;
}

XD_API void xd_ctx_set_rank(xd_ctx *ctx, int rank) {
    ctx->settings.rank = rank;
}

XD_API void xd_ctx_set_cpu(xd_ctx *ctx, xd_cpu_level level) {
    ctx->settings.cpu = level;
}

XD_API void xd_ctx_set_stream(xd_ctx *ctx, void *stream) {
    ctx->settings.stream = stream;
}

XD_API double xd_now(const xd_ctx *ctx) {
    return ctx->settings.clock.now_seconds(ctx->settings.clock.user);
}

XD_API void *xd_allocate(xd_ctx *ctx, size_t bytes) {
    void *memory = ctx->settings.allocator.allocate(ctx->settings.allocator.user, bytes ? bytes : 1);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

XD_API void xd_release(xd_ctx *ctx, void *memory) {
    if (memory) ctx->settings.allocator.release(ctx->settings.allocator.user, memory);
}

static bool xdi_log_enabled(const xd_ctx *ctx, xd_log_level level) {
    /* The enumeration starts at the default, so that zero is a good setting; this is the order of loudness. */
    static const int loudness[] = { 2, 0, 1, 3, 4 };
    return ctx->settings.logger.write && loudness[level] <= loudness[ctx->settings.log_level];
}

XD_API void xd_log(xd_ctx *ctx, xd_log_level level, const char *format, ...) {
    if (!xdi_log_enabled(ctx, level)) return;
    char line[640];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    ctx->settings.logger.write(ctx->settings.logger.user, level, line);
}

static void xdi_ctx_record(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                           const char *function, const char *format, va_list arguments) {
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
    memcpy(error->message, message, sizeof message);
    if (ctx->caller_file) {
        const size_t used = strlen(error->message);
        snprintf(error->message + used, sizeof error->message - used, " (caller %s:%d)", ctx->caller_file,
                 ctx->caller_line);
        ctx->caller_file = NULL;
    }
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

XD_PRIVATE bool xdi_size_multiply(size_t a, size_t b, size_t *product) {
    if (b && a > SIZE_MAX / b) return false;
    *product = a * b;
    return true;
}

/* >>base/half.c */

#include <string.h>

static uint32_t xdi_half_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float xdi_half_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

XD_API uint16_t xd_bf16_from_f32(float value) {
    const uint32_t bits = xdi_half_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x0040u); /* NaN: keep it one, quiet */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

XD_API float xd_f32_from_bf16(uint16_t bits) {
    return xdi_half_float((uint32_t)bits << 16);
}

XD_API uint16_t xd_f16_from_f32(float value) {
    const uint32_t bits = xdi_half_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    const int exponent = (int)(magnitude >> 23) - 127;
    if (exponent < -25) return (uint16_t)sign; /* below half of the smallest subnormal */
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const int shift = exponent < -14 ? -1 - exponent : 13; /* subnormals lose more bits */
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rounded = kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u);
    /* A normal number's kept part carries the hidden bit, which adds one to the biased exponent. */
    const uint32_t base = exponent < -14 ? 0u : (uint32_t)(exponent + 14) << 10;
    return (uint16_t)(sign | (base + rounded));
}

XD_API float xd_f32_from_f16(uint16_t bits) {
    const uint32_t sign = ((uint32_t)bits & 0x8000u) << 16;
    const uint32_t exponent = ((uint32_t)bits >> 10) & 0x1fu;
    const uint32_t mantissa = (uint32_t)bits & 0x3ffu;
    if (exponent == 31u) return xdi_half_float(sign | 0x7f800000u | (mantissa ? 0x400000u | (mantissa << 13) : 0u));
    if (exponent) return xdi_half_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24: exact */
    return sign ? -magnitude : magnitude;
}

XD_API double xd_load_f64(const void *data, xd_dtype dtype, int64_t index) {
    switch (dtype) {
    case XD_DTYPE_F32: return (double)((const float *)data)[index];
    case XD_DTYPE_F64: return ((const double *)data)[index];
    case XD_DTYPE_BF16: return (double)xd_f32_from_bf16(((const uint16_t *)data)[index]);
    case XD_DTYPE_F16: return (double)xd_f32_from_f16(((const uint16_t *)data)[index]);
    case XD_DTYPE_I32: return (double)((const int32_t *)data)[index];
    case XD_DTYPE_I64: return (double)((const int64_t *)data)[index];
    case XD_DTYPE_U8:
    case XD_DTYPE_BOOL: return (double)((const uint8_t *)data)[index];
    default: return 0.0;
    }
}

XD_API void xd_store_f64(void *data, xd_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case XD_DTYPE_F32: ((float *)data)[index] = (float)value; break;
    case XD_DTYPE_F64: ((double *)data)[index] = value; break;
    case XD_DTYPE_BF16: ((uint16_t *)data)[index] = xd_bf16_from_f32((float)value); break;
    case XD_DTYPE_F16: ((uint16_t *)data)[index] = xd_f16_from_f32((float)value); break;
    case XD_DTYPE_I32: ((int32_t *)data)[index] = (int32_t)value; break;
    case XD_DTYPE_I64: ((int64_t *)data)[index] = (int64_t)value; break;
    case XD_DTYPE_U8: ((uint8_t *)data)[index] = (uint8_t)value; break;
    case XD_DTYPE_BOOL: ((uint8_t *)data)[index] = (uint8_t)(value != 0.0); break;
    default: break;
    }
}

/* >>base/sort.c */

/* Lets items[root] sink to its place in the heap items[0, count). */
static void xdi_sort_sift(const void **items, size_t root, size_t count, xdi_sort_order order) {
    const void *moving = items[root];
    for (size_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
        if (child + 1 < count && order(items[child], items[child + 1]) < 0) child++;
        if (order(moving, items[child]) >= 0) break;
        items[root] = items[child];
        root = child;
    }
    items[root] = moving;
}

/* Heap sort: no hostile order makes it quadratic, as it can some qsort, and it needs no memory. */
XD_PRIVATE void xdi_sort(const void **items, size_t count, xdi_sort_order order) {
    for (size_t i = count / 2; i-- > 0;) xdi_sort_sift(items, i, count, order);
    for (size_t end = count; end-- > 1;) {
        const void *largest = items[0];
        items[0] = items[end];
        items[end] = largest;
        xdi_sort_sift(items, 0, end, order);
    }
}

/* >>base/philox.c */

#include <math.h>
#include <string.h>

XD_API void xd_philox_block(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xd2511f53u * c0;
        const uint64_t b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u; /* golden ratio */
        k1 += 0xbb67ae85u; /* sqrt(3) - 1 */
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

XD_API void xd_philox_counter(const xd_philox *p, uint64_t block, uint32_t counter[4]) {
    counter[0] = (uint32_t)block;
    counter[1] = (uint32_t)(block >> 32 & 0xffu) | (uint32_t)p->stream << 8 | (uint32_t)p->micro << 16;
    counter[2] = p->sample;
    counter[3] = p->step;
}

static void xdi_philox_words(const xd_philox *p, int64_t block, uint32_t words[4]) {
    const uint32_t key[2] = { (uint32_t)p->seed, (uint32_t)(p->seed >> 32) };
    uint32_t counter[4];
    xd_philox_counter(p, (uint64_t)block, counter);
    xd_philox_block(counter, key, words);
}

XD_API uint32_t xd_philox_word(const xd_philox *p, int64_t element) {
    uint32_t words[4];
    xdi_philox_words(p, element / 4, words);
    return words[element % 4];
}

XD_API double xd_philox_uniform_f64(const xd_philox *p, int64_t block) {
    uint32_t words[4];
    xdi_philox_words(p, block, words);
    const uint64_t bits = (uint64_t)words[1] << 32 | words[0];
    /* Odd multiples of 2^-53: 52 bits and the one below them, exact, never 0 or 1. */
    return (double)((bits >> 12) * 2u + 1u) * (1.0 / 9007199254740992.0);
}

/* (r >> 9) 2^-23 + 2^-24, exact. */
static float xdi_philox_uniform(uint32_t word) {
    return (float)((word >> 9) * 2u + 1u) * (1.0f / 16777216.0f);
}

/* What follows gives bits: a product is never added to anything except inside fmaf, so no compiler can fuse, or leave
 * unfused, what another one does not. Coefficients: interpolation at Chebyshev nodes, rounded to f32. */

/* ln(x) for x in (0, 1), normal: x = 2^e m with m in [sqrt(1/2), sqrt(2)), f = m - 1,
 * ln(m) = f - f^2 / 2 + f^3 P(f). Error below 1 unit in the last place. */
static float xdi_philox_log(float x) {
    static const float p[] = { 0.333333313f,  -0.24999997f, 0.200007156f,  -0.166678026f, 0.142490581f,
                               -0.124256872f, 0.116854198f, -0.114797339f, 0.0697161183f };
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t shifted = bits - 0x3f3504f3u; /* sqrt(1/2): exponents now change there */
    const float e = (float)((int32_t)shifted >> 23);
    bits = (shifted & 0x7fffffu) + 0x3f3504f3u;
    float m;
    memcpy(&m, &bits, sizeof m);
    const float f = m - 1.0f;
    const float square = f * f;
    float poly = p[8];
    for (int i = 7; i >= 0; i--) poly = fmaf(poly, f, p[i]);
    float y = fmaf(square, f * poly, e * -1.90465421e-9f); /* ln 2 = 0.693147182f - 1.9e-9 */
    y = fmaf(-0.5f, square, y);
    return fmaf(e, 0.693147182f, f + y);
}

/* sin and cos of 2 pi u, u in (0, 1): 4u is exact, q the nearest quarter turn, r in [-1/2, 1/2] what is left. */
static void xdi_philox_sin_cos(float u, float *sine, float *cosine) {
    static const float s[] = { 1.57079637f, -0.645964086f, 0.0796925798f, -0.00468126638f, 0.000158206298f };
    static const float c[] = { -1.23370051f, 0.2536695f, -0.0208634753f, 0.000919196347f, -2.49092282e-05f };
    const float turns = 4.0f * u;
    const int quarter = (int)(turns + 0.5f);
    const float r = turns - (float)quarter;
    const float square = r * r;
    float a = s[4], b = c[4];
    for (int i = 3; i >= 0; i--) {
        a = fmaf(a, square, s[i]);
        b = fmaf(b, square, c[i]);
    }
    a = a * r;
    b = fmaf(b, square, 1.0f);
    const bool swapped = (quarter & 1) != 0;
    *sine = swapped ? b : a;
    *cosine = swapped ? a : b;
    if (quarter & 2) *sine = -*sine;
    if ((quarter + 1) & 2) *cosine = -*cosine;
}

static void xdi_philox_uniform_block(const uint32_t words[4], float lanes[4]) {
    for (int k = 0; k < 4; k++) lanes[k] = xdi_philox_uniform(words[k]);
}

static void xdi_philox_normal_block(const uint32_t words[4], float lanes[4]) {
    for (int k = 0; k < 4; k += 2) {
        float sine, cosine;
        const float radius = sqrtf(-2.0f * xdi_philox_log(xdi_philox_uniform(words[k])));
        xdi_philox_sin_cos(xdi_philox_uniform(words[k + 1]), &sine, &cosine);
        lanes[k] = radius * cosine;
        lanes[k + 1] = radius * sine;
    }
}

/* Walks the blocks that [first, first + count) touches; the outer ones may give only some of their lanes. */
static void xdi_philox_fill(const xd_philox *p, int64_t first, int64_t count, float *out,
                            void (*lanes_of)(const uint32_t words[4], float lanes[4])) {
    const int64_t end = first + count;
    for (int64_t block = first / 4; block * 4 < end; block++) {
        uint32_t words[4];
        float lanes[4];
        xdi_philox_words(p, block, words);
        lanes_of(words, lanes);
        const int64_t begin = block * 4 < first ? first : block * 4;
        for (int64_t i = begin; i < block * 4 + 4 && i < end; i++) out[i - first] = lanes[i % 4];
    }
}

XD_API void xd_philox_fill_uniform(const xd_philox *p, int64_t first, int64_t count, float *out) {
    xdi_philox_fill(p, first, count, out, xdi_philox_uniform_block);
}

XD_API void xd_philox_fill_normal(const xd_philox *p, int64_t first, int64_t count, float *out) {
    xdi_philox_fill(p, first, count, out, xdi_philox_normal_block);
}

/* >>base/publish.c */

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct xd_publish {
    xd_ctx *ctx;
    intptr_t file;
    bool open;
    char *temporary; /* both names stand behind the struct, in the same allocation */
    char *path;
};

enum { XDI_PUBLISH_SUFFIX = 24, XDI_PUBLISH_TRIES = 1000 };

XD_API xd_result xd_file_load(xd_ctx *ctx, const char *path, size_t max_bytes, char **data, size_t *bytes) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const size_t limit = max_bytes ? max_bytes : (size_t)256 << 20;
    intptr_t file;
    uint64_t size = 0;
    const int refused = files->open(files->user, path, XD_FILE_READ, &file);
    XDI_REQUIRE(ctx, refused == 0, XD_ERROR_IO, "%s: open: %s", path, strerror(refused));
    int error = files->size(files->user, file, &size);
    const bool fits = error == 0 && size <= limit && size < SIZE_MAX;
    char *text = fits ? (char *)xd_allocate(ctx, (size_t)size + 1) : NULL;
    if (text) error = files->read(files->user, file, text, (size_t)size, 0);
    files->close(files->user, file); /* nothing was written: a failure loses nothing */
    if (text && error == 0) {
        *data = text;
        *bytes = (size_t)size;
        return XD_OK;
    }
    xd_release(ctx, text);
    XDI_REQUIRE(ctx, error == 0, XD_ERROR_IO, "%s: read: %s", path, strerror(error));
    XDI_REQUIRE(ctx, fits, XD_ERROR_FORMAT, "%s has %llu bytes, allowed are %llu", path,
                (unsigned long long)size, (unsigned long long)limit);
    return XDI_FAIL(ctx, XD_ERROR_MEMORY, "%s: no room for %llu bytes", path, (unsigned long long)size);
}

XD_API xd_result xd_file_save(xd_ctx *ctx, const char *path, const void *data, size_t bytes) {
    xd_publish *file = NULL;
    XDI_TRY(xd_publish_begin(ctx, path, &file));
    const xd_result result = xd_publish_write(file, data, bytes, 0);
    if (result == XD_OK) return xd_publish_commit(file);
    xd_publish_abort(file);
    return result;
}

/* Creates the temporary file: the first free name of path.tmp-0, path.tmp-1, ... A crash may have left some. */
static int xdi_publish_open(xd_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const size_t length = strlen(p->path);
    int error = EEXIST;
    memcpy(p->temporary, p->path, length);
    for (int i = 0; i < XDI_PUBLISH_TRIES && error == EEXIST; i++) {
        snprintf(p->temporary + length, XDI_PUBLISH_SUFFIX, ".tmp-%d", i);
        error = files->open(files->user, p->temporary, XD_FILE_WRITE_NEW, &p->file);
    }
    p->open = error == 0;
    return error;
}

XD_API xd_result xd_publish_begin(xd_ctx *ctx, const char *path, xd_publish **out) {
    const size_t length = strlen(path);
    XDI_REQUIRE(ctx, length > 0, XD_ERROR_ARGUMENT, "the path is empty");
    xd_publish *p = (xd_publish *)xd_allocate(ctx, sizeof *p + 2 * length + 1 + XDI_PUBLISH_SUFFIX);
    XDI_REQUIRE(ctx, p, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    p->ctx = ctx;
    p->path = (char *)(p + 1);
    p->temporary = p->path + length + 1;
    memcpy(p->path, path, length + 1);
    const int error = xdi_publish_open(p);
    if (error == 0) {
        *out = p;
        return XD_OK;
    }
    xd_release(ctx, p);
    return XDI_FAIL(ctx, XD_ERROR_IO, "%s: create beside it: %s", path, strerror(error));
}

XD_API xd_result xd_publish_write(xd_publish *p, const void *data, size_t bytes, uint64_t offset) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const int error = bytes ? files->write(files->user, p->file, data, bytes, offset) : 0;
    XDI_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: write of %llu bytes at %llu: %s", p->path,
                (unsigned long long)bytes, (unsigned long long)offset, strerror(error));
    return XD_OK;
}

XD_API xd_result xd_publish_resize(xd_publish *p, uint64_t bytes) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    const int error = files->resize(files->user, p->file, bytes);
    XDI_REQUIRE(p->ctx, error == 0, XD_ERROR_IO, "%s: resize to %llu bytes: %s", p->path,
                (unsigned long long)bytes, strerror(error));
    return XD_OK;
}

/* Syncs the directory of the published file; a path without a separator lies in the current one. */
static int xdi_publish_sync_directory(xd_publish *p) {
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    char *slash = strrchr(p->path, '/');
    if (!slash) return files->sync_directory(files->user, ".");
    if (slash == p->path) return files->sync_directory(files->user, "/");
    *slash = '\0';
    const int error = files->sync_directory(files->user, p->path);
    *slash = '/';
    return error;
}

XD_API xd_result xd_publish_commit(xd_publish *p) {
    xd_ctx *ctx = p->ctx;
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    const char *step = "sync";
    int error = files->sync(files->user, p->file);
    if (error == 0) {
        step = "close";
        error = files->close(files->user, p->file);
        p->open = false;
    }
    if (error == 0) {
        step = "rename";
        error = files->rename(files->user, p->temporary, p->path);
    }
    if (error == 0) {
        step = "sync of the directory";
        error = xdi_publish_sync_directory(p);
        p->temporary[0] = '\0'; /* renamed: nothing to remove */
    }
    const xd_result result =
        error == 0 ? XD_OK : XDI_FAIL(ctx, XD_ERROR_IO, "%s: %s: %s", p->path, step, strerror(error));
    xd_publish_abort(p);
    return result;
}

XD_API void xd_publish_abort(xd_publish *p) {
    if (!p) return;
    const xd_files *files = &xd_ctx_settings(p->ctx)->files;
    if (p->open) files->close(files->user, p->file);
    if (p->temporary[0]) files->remove(files->user, p->temporary);
    xd_release(p->ctx, p);
}

/* >>base/json.c */

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct xd_json {
    xd_json_kind kind;
    bool negative;   /* of an integer: the value is -integer */
    bool exact;      /* of a number: integer notation that fits 64 bits */
    size_t offset;   /* in the text */
    const char *key; /* of a member; NULL for elements and the root */
    size_t key_bytes;
    const xd_json *next; /* sibling */
    union {
        bool truth;
        struct {
            double real;
            uint64_t integer; /* magnitude */
        } number;
        struct {
            const char *text;
            size_t bytes;
        } string;
        struct {
            const void **items; /* an array's elements in order; an object's members by key */
            size_t count;
        } container;
    } as;
};

/* A document is one block: the nodes (the root first), the items of all containers, the decoded strings. */
typedef struct xdi_json_parser {
    xd_ctx *ctx;
    const char *text;
    size_t bytes, at;
    int depth, max_depth;
    xd_json *nodes;
    const void **items;
    char *strings;
} xdi_json_parser;

enum { XDI_JSON_DEEPEST = 1000, XDI_JSON_LONGEST_NUMBER = 512 };

/* One rule of the grammar. */
static xd_result xdi_json_expect(const xdi_json_parser *p, bool condition, const char *what) {
    XDI_REQUIRE(p->ctx, condition, XD_ERROR_FORMAT, "JSON: %s at byte %llu", what, (unsigned long long)p->at);
    return XD_OK;
}

static xd_result xdi_json_parse_value(xdi_json_parser *p, xd_json **out);

/* ---- scanning ---- */

static void xdi_json_skip_space(xdi_json_parser *p) {
    while (p->at < p->bytes) {
        const char c = p->text[p->at];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
        p->at++;
    }
}

/* The next byte; NUL at the end, which no grammar rule accepts. */
static char xdi_json_peek(const xdi_json_parser *p) {
    return p->at < p->bytes ? p->text[p->at] : '\0';
}

static bool xdi_json_take(xdi_json_parser *p, char c) {
    if (xdi_json_peek(p) != c) return false;
    p->at++;
    return true;
}

static bool xdi_json_take_word(xdi_json_parser *p, const char *word) {
    const size_t length = strlen(word);
    if (p->bytes - p->at < length || memcmp(p->text + p->at, word, length) != 0) return false;
    p->at += length;
    return true;
}

/* Upper bound on the values of a text: one for the root, one for each opening bracket, one for each comma. */
static size_t xdi_json_count_nodes(const char *text, size_t bytes) {
    size_t count = 1;
    bool quoted = false;
    for (size_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c == '"')
            quoted = !quoted;
        else if (quoted && c == '\\')
            i++;
        else if (!quoted && (c == '[' || c == '{' || c == ','))
            count++;
    }
    return count;
}

/* ---- strings ---- */

/* Bytes of the UTF-8 sequence at s, 0 when it is not well formed (overlong, surrogate, above U+10FFFF, cut off). */
static size_t xdi_json_utf8(const unsigned char *s, size_t bytes) {
    const unsigned char first = s[0];
    if (first < 0x80) return 1;
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || length > bytes) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (first == 0xe0 && s[1] < 0xa0) return 0;
    if (first == 0xed && s[1] > 0x9f) return 0;
    if (first == 0xf0 && s[1] < 0x90) return 0;
    if (first == 0xf4 && s[1] > 0x8f) return 0;
    return length;
}

static xd_result xdi_json_parse_hex(xdi_json_parser *p, unsigned *unit) {
    unsigned value = 0;
    for (int i = 0; i < 4; i++) {
        const char c = xdi_json_peek(p);
        const bool digit = c >= '0' && c <= '9', lower = c >= 'a' && c <= 'f', upper = c >= 'A' && c <= 'F';
        XDI_TRY(xdi_json_expect(p, digit || lower || upper, "four hexadecimal digits expected"));
        value = value * 16u + (unsigned)(c - (digit ? '0' : lower ? 'a' - 10 : 'A' - 10));
        p->at++;
    }
    *unit = value;
    return XD_OK;
}

/* After "\u": one code point, which may take a second escape. */
static xd_result xdi_json_parse_unicode(xdi_json_parser *p, unsigned *point) {
    unsigned high, low;
    XDI_TRY(xdi_json_parse_hex(p, &high));
    XDI_TRY(xdi_json_expect(p, high != 0, "NUL in a string"));
    XDI_TRY(xdi_json_expect(p, high < 0xdc00 || high > 0xdfff, "lone surrogate"));
    *point = high;
    if (high < 0xd800 || high > 0xdbff) return XD_OK;
    XDI_TRY(xdi_json_expect(p, xdi_json_take_word(p, "\\u"), "lone surrogate"));
    XDI_TRY(xdi_json_parse_hex(p, &low));
    XDI_TRY(xdi_json_expect(p, low >= 0xdc00 && low <= 0xdfff, "lone surrogate"));
    *point = 0x10000u + ((high - 0xd800u) << 10) + (low - 0xdc00u);
    return XD_OK;
}

static void xdi_json_put_utf8(xdi_json_parser *p, unsigned point) {
    if (point < 0x80) {
        *p->strings++ = (char)point;
        return;
    }
    if (point < 0x800) {
        *p->strings++ = (char)(0xc0 | (point >> 6));
    } else {
        if (point < 0x10000) {
            *p->strings++ = (char)(0xe0 | (point >> 12));
        } else {
            *p->strings++ = (char)(0xf0 | (point >> 18));
            *p->strings++ = (char)(0x80 | ((point >> 12) & 0x3f));
        }
        *p->strings++ = (char)(0x80 | ((point >> 6) & 0x3f));
    }
    *p->strings++ = (char)(0x80 | (point & 0x3f));
}

static xd_result xdi_json_parse_escape(xdi_json_parser *p) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char c = xdi_json_peek(p);
    const char *name = c ? strchr(names, c) : NULL;
    XDI_TRY(xdi_json_expect(p, name || c == 'u', "unknown escape"));
    p->at++;
    if (name) {
        *p->strings++ = values[name - names];
        return XD_OK;
    }
    unsigned point;
    XDI_TRY(xdi_json_parse_unicode(p, &point));
    xdi_json_put_utf8(p, point);
    return XD_OK;
}

/* The text between quotes, decoded. It never grows: the shortest escape of a 3-byte character has 6 bytes, and the two
 * quotes pay for the NUL. */
static xd_result xdi_json_parse_string(xdi_json_parser *p, const char **text, size_t *bytes) {
    XDI_TRY(xdi_json_expect(p, xdi_json_take(p, '"'), "string expected"));
    char *const begin = p->strings;
    while (!xdi_json_take(p, '"')) {
        XDI_TRY(xdi_json_expect(p, p->at < p->bytes, "string without end"));
        const unsigned char *s = (const unsigned char *)p->text + p->at;
        XDI_TRY(xdi_json_expect(p, *s >= 0x20, "control character in a string"));
        if (*s == '\\') {
            p->at++;
            XDI_TRY(xdi_json_parse_escape(p));
            continue;
        }
        const size_t length = xdi_json_utf8(s, p->bytes - p->at);
        XDI_TRY(xdi_json_expect(p, length > 0, "invalid UTF-8"));
        memcpy(p->strings, s, length);
        p->strings += length;
        p->at += length;
    }
    *text = begin;
    *bytes = (size_t)(p->strings - begin);
    *p->strings++ = '\0';
    return XD_OK;
}

/* ---- numbers ---- */

static size_t xdi_json_skip_digits(xdi_json_parser *p) {
    const size_t begin = p->at;
    while (xdi_json_peek(p) >= '0' && xdi_json_peek(p) <= '9') p->at++;
    return p->at - begin;
}

/* Steps over a number; *integer tells whether it has neither fraction nor exponent. */
static xd_result xdi_json_scan_number(xdi_json_parser *p, bool *integer) {
    *integer = true;
    xdi_json_take(p, '-');
    if (!xdi_json_take(p, '0')) XDI_TRY(xdi_json_expect(p, xdi_json_skip_digits(p) > 0, "value expected"));
    if (xdi_json_take(p, '.')) {
        *integer = false;
        XDI_TRY(xdi_json_expect(p, xdi_json_skip_digits(p) > 0, "digit expected"));
    }
    if (xdi_json_peek(p) == 'e' || xdi_json_peek(p) == 'E') {
        *integer = false;
        p->at++;
        if (!xdi_json_take(p, '-')) xdi_json_take(p, '+');
        XDI_TRY(xdi_json_expect(p, xdi_json_skip_digits(p) > 0, "digit expected"));
    }
    return XD_OK;
}

/* Magnitude and sign when they fit int64 or uint64. "-0" is not an integer: it would lose its sign. */
static void xdi_json_set_integer(xd_json *value, const char *digits) {
    uint64_t magnitude = 0;
    value->negative = *digits == '-';
    for (const char *d = digits + (value->negative ? 1 : 0); *d; d++) {
        const uint64_t digit = (uint64_t)(*d - '0');
        if (magnitude > (UINT64_MAX - digit) / 10u) return;
        magnitude = magnitude * 10u + digit;
    }
    if (value->negative && (magnitude == 0 || magnitude > (uint64_t)INT64_MAX + 1u)) return;
    value->as.number.integer = magnitude;
    value->exact = true;
}

static xd_result xdi_json_parse_number(xdi_json_parser *p, xd_json *value) {
    char digits[XDI_JSON_LONGEST_NUMBER + 1];
    const size_t begin = p->at;
    bool integer;
    XDI_TRY(xdi_json_scan_number(p, &integer));
    const size_t length = p->at - begin;
    XDI_REQUIRE(p->ctx, length <= XDI_JSON_LONGEST_NUMBER, XD_ERROR_FORMAT,
                "JSON: number of %llu bytes at byte %llu", (unsigned long long)length,
                (unsigned long long)begin);
    memcpy(digits, p->text + begin, length);
    digits[length] = '\0';
    value->kind = XD_JSON_NUMBER;
    if (integer) xdi_json_set_integer(value, digits);
    char *point = strchr(digits, '.');
    if (point) *point = *localeconv()->decimal_point; /* strtod wants the one of the process's locale */
    value->as.number.real = strtod(digits, NULL);
    XDI_TRY(xdi_json_expect(p, isfinite(value->as.number.real), "number beyond the range of a double"));
    return XD_OK;
}

/* ---- containers ---- */

static int xdi_json_compare(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    const int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    if (order) return order;
    return a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

static int xdi_json_compare_keys(const void *a, const void *b) {
    const xd_json *x = (const xd_json *)a, *y = (const xd_json *)b;
    return xdi_json_compare(x->key, x->key_bytes, y->key, y->key_bytes);
}

/* Gathers the children of a closed container, which hang together by `next`. */
static xd_result xdi_json_close(xdi_json_parser *p, xd_json *container, const xd_json *first) {
    const void **items = p->items;
    size_t count = 0;
    for (; first; first = first->next) items[count++] = first;
    p->items += count;
    container->as.container.items = items;
    container->as.container.count = count;
    if (container->kind == XD_JSON_ARRAY) return XD_OK;
    xdi_sort(items, count, xdi_json_compare_keys);
    for (size_t i = 1; i < count; i++)
        XDI_REQUIRE(p->ctx, xdi_json_compare_keys(items[i - 1], items[i]) != 0, XD_ERROR_FORMAT,
                    "JSON: key \"%.80s\" stands twice in the object at byte %llu",
                    ((const xd_json *)items[i])->key, (unsigned long long)container->offset);
    return XD_OK;
}

static xd_result xdi_json_parse_member(xdi_json_parser *p, bool object, xd_json **out) {
    const char *key = NULL;
    size_t key_bytes = 0;
    if (object) {
        xdi_json_skip_space(p);
        XDI_TRY(xdi_json_parse_string(p, &key, &key_bytes));
        xdi_json_skip_space(p);
        XDI_TRY(xdi_json_expect(p, xdi_json_take(p, ':'), "':' expected"));
    }
    XDI_TRY(xdi_json_parse_value(p, out));
    (*out)->key = key;
    (*out)->key_bytes = key_bytes;
    return XD_OK;
}

static xd_result xdi_json_parse_container(xdi_json_parser *p, xd_json *container) {
    const bool object = p->text[p->at++] == '{';
    const char close = object ? '}' : ']';
    container->kind = object ? XD_JSON_OBJECT : XD_JSON_ARRAY;
    XDI_TRY(xdi_json_expect(p, p->depth < p->max_depth, "nested too deeply"));
    p->depth++;
    xd_json *first = NULL, *last = NULL;
    xdi_json_skip_space(p);
    if (!xdi_json_take(p, close)) {
        do {
            xd_json *item;
            XDI_TRY(xdi_json_parse_member(p, object, &item));
            if (last)
                last->next = item;
            else
                first = item;
            last = item;
            xdi_json_skip_space(p);
        } while (xdi_json_take(p, ','));
        XDI_TRY(xdi_json_expect(p, xdi_json_take(p, close),
                                object ? "',' or '}' expected" : "',' or ']' expected"));
    }
    p->depth--;
    return xdi_json_close(p, container, first);
}

static xd_result xdi_json_parse_value(xdi_json_parser *p, xd_json **out) {
    xdi_json_skip_space(p);
    xd_json *value = p->nodes++;
    value->offset = p->at;
    *out = value;
    switch (xdi_json_peek(p)) {
    case '{':
    case '[': return xdi_json_parse_container(p, value);
    case '"':
        value->kind = XD_JSON_STRING;
        return xdi_json_parse_string(p, &value->as.string.text, &value->as.string.bytes);
    case 'n':
        value->kind = XD_JSON_NULL;
        XDI_TRY(xdi_json_expect(p, xdi_json_take_word(p, "null"), "value expected"));
        return XD_OK;
    case 't':
        value->kind = XD_JSON_BOOL;
        value->as.truth = true;
        XDI_TRY(xdi_json_expect(p, xdi_json_take_word(p, "true"), "value expected"));
        return XD_OK;
    case 'f':
        value->kind = XD_JSON_BOOL;
        XDI_TRY(xdi_json_expect(p, xdi_json_take_word(p, "false"), "value expected"));
        return XD_OK;
    default: return xdi_json_parse_number(p, value);
    }
}

/* ---- documents ---- */

/* Divides one block into the three pools; their sizes are upper bounds counted from the text. */
static xd_result xdi_json_reserve(xdi_json_parser *p, size_t max_nodes, xd_json **block) {
    const size_t count = xdi_json_count_nodes(p->text, p->bytes);
    XDI_REQUIRE(p->ctx, count <= max_nodes, XD_ERROR_FORMAT, "JSON: up to %llu values, allowed are %llu",
                (unsigned long long)count, (unsigned long long)max_nodes);
    const size_t each = sizeof(xd_json) + sizeof(void *);
    XDI_REQUIRE(p->ctx, p->bytes < SIZE_MAX / 2 && count <= (SIZE_MAX / 2) / each, XD_ERROR_MEMORY,
                "JSON: %llu values do not fit the address space", (unsigned long long)count);
    const size_t total = count * each + p->bytes;
    *block = (xd_json *)xd_allocate(p->ctx, total);
    XDI_REQUIRE(p->ctx, *block, XD_ERROR_MEMORY, "JSON: no room for %llu bytes", (unsigned long long)total);
    p->nodes = *block;
    p->items = (const void **)(*block + count);
    p->strings = (char *)(p->items + count);
    return XD_OK;
}

static xd_json_desc xdi_json_limits(const xd_json_desc *desc) {
    xd_json_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!d.max_bytes) d.max_bytes = (size_t)256 << 20;
    if (!d.max_nodes) d.max_nodes = (size_t)16 << 20;
    if (!d.max_depth) d.max_depth = 64;
    return d;
}

XD_API xd_result xd_json_parse(xd_ctx *ctx, const xd_json_desc *desc, const char *text, size_t bytes,
                               xd_json **root) {
    const xd_json_desc d = xdi_json_limits(desc);
    xdi_json_parser p;
    xd_json *block = NULL;
    memset(&p, 0, sizeof p);
    p.ctx = ctx;
    p.text = text;
    p.bytes = bytes;
    p.max_depth = d.max_depth;
    XDI_REQUIRE(ctx, d.max_depth > 0 && d.max_depth <= XDI_JSON_DEEPEST, XD_ERROR_ARGUMENT,
                "max_depth is %d, allowed are 1 to %d", d.max_depth, (int)XDI_JSON_DEEPEST);
    XDI_REQUIRE(ctx, bytes <= d.max_bytes, XD_ERROR_FORMAT, "JSON: %llu bytes, allowed are %llu",
                (unsigned long long)bytes, (unsigned long long)d.max_bytes);
    XDI_TRY(xdi_json_reserve(&p, d.max_nodes, &block));
    xd_json *value;
    xd_result result = xdi_json_parse_value(&p, &value);
    if (result == XD_OK) {
        xdi_json_skip_space(&p);
        if (p.at < bytes)
            result = XDI_FAIL(ctx, XD_ERROR_FORMAT, "JSON: text after the value at byte %llu",
                              (unsigned long long)p.at);
    }
    if (result == XD_OK)
        *root = block;
    else
        xd_release(ctx, block);
    return result;
}

XD_API xd_result xd_json_load(xd_ctx *ctx, const xd_json_desc *desc, const char *path, xd_json **root) {
    char *text = NULL;
    size_t bytes = 0;
    XDI_TRY(xd_file_load(ctx, path, xdi_json_limits(desc).max_bytes, &text, &bytes));
    const xd_result result = xd_json_parse(ctx, desc, text, bytes, root);
    xd_release(ctx, text);
    XDI_REQUIRE(ctx, result == XD_OK, result, "%s: %s", path, xd_last_error(ctx)->message);
    return XD_OK;
}

XD_API void xd_json_destroy(xd_ctx *ctx, xd_json *root) {
    xd_release(ctx, root);
}

/* ---- questions ---- */

static bool xdi_json_is(const xd_json *value, xd_json_kind kind) {
    return value && value->kind == kind;
}

static bool xdi_json_is_container(const xd_json *value) {
    return xdi_json_is(value, XD_JSON_ARRAY) || xdi_json_is(value, XD_JSON_OBJECT);
}

XD_API xd_json_kind xd_json_kind_of(const xd_json *value) {
    return value ? value->kind : XD_JSON_NONE;
}

XD_API size_t xd_json_offset(const xd_json *value) {
    return value ? value->offset : 0;
}

XD_API const xd_json *xd_json_find(const xd_json *object, const char *key) {
    return xd_json_find_n(object, key, strlen(key));
}

XD_API const xd_json *xd_json_find_n(const xd_json *object, const char *key, size_t key_bytes) {
    if (!xdi_json_is(object, XD_JSON_OBJECT)) return NULL;
    size_t low = 0, high = object->as.container.count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const xd_json *item = (const xd_json *)object->as.container.items[middle];
        const int order = xdi_json_compare(key, key_bytes, item->key, item->key_bytes);
        if (order == 0) return item;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

XD_API size_t xd_json_count(const xd_json *container) {
    return xdi_json_is_container(container) ? container->as.container.count : 0;
}

XD_API const xd_json *xd_json_first(const xd_json *container) {
    /* Nodes lie in the order of the text, so the first child follows its parent. */
    return xd_json_count(container) > 0 ? container + 1 : NULL;
}

XD_API const xd_json *xd_json_next(const xd_json *value) {
    return value ? value->next : NULL;
}

XD_API const xd_json *xd_json_at(const xd_json *array, size_t index) {
    if (!xdi_json_is(array, XD_JSON_ARRAY) || index >= array->as.container.count) return NULL;
    return (const xd_json *)array->as.container.items[index];
}

XD_API const xd_json *xd_json_by_key(const xd_json *object, size_t index) {
    if (!xdi_json_is(object, XD_JSON_OBJECT) || index >= object->as.container.count) return NULL;
    return (const xd_json *)object->as.container.items[index];
}

XD_API const char *xd_json_key(const xd_json *member, size_t *bytes) {
    if (bytes) *bytes = member ? member->key_bytes : 0;
    return member ? member->key : NULL;
}

XD_API const char *xd_json_string(const xd_json *value, size_t *bytes) {
    const bool is = xdi_json_is(value, XD_JSON_STRING);
    if (bytes) *bytes = is ? value->as.string.bytes : 0;
    return is ? value->as.string.text : NULL;
}

XD_API bool xd_json_bool(const xd_json *value, bool *out) {
    if (!xdi_json_is(value, XD_JSON_BOOL)) return false;
    *out = value->as.truth;
    return true;
}

XD_API bool xd_json_int64(const xd_json *value, int64_t *out) {
    if (!xdi_json_is(value, XD_JSON_NUMBER) || !value->exact) return false;
    const uint64_t magnitude = value->as.number.integer;
    if (!value->negative && magnitude > (uint64_t)INT64_MAX) return false;
    *out =
        value->negative ? -(int64_t)(magnitude - 1u) - 1 : (int64_t)magnitude; /* INT64_MIN has no negative */
    return true;
}

XD_API bool xd_json_uint64(const xd_json *value, uint64_t *out) {
    if (!xdi_json_is(value, XD_JSON_NUMBER) || !value->exact || value->negative) return false;
    *out = value->as.number.integer;
    return true;
}

XD_API bool xd_json_double(const xd_json *value, double *out) {
    if (!xdi_json_is(value, XD_JSON_NUMBER)) return false;
    *out = value->as.number.real;
    return true;
}

/* ---- writer ---- */

static void xdi_json_stick(xd_json_writer *w, xd_result result, const char *message) {
    if (w->result == XD_OK) w->result = XDI_FAIL(w->ctx, result, "JSON writer: %s", message);
}

static bool xdi_json_grow(xd_json_writer *w, size_t bytes) {
    if (w->result != XD_OK) return false;
    if (bytes < w->capacity - w->bytes) return true; /* one byte is kept for the NUL */
    const bool fits = bytes < SIZE_MAX / 4 && w->bytes < SIZE_MAX / 4;
    const size_t capacity = fits ? 2 * (w->bytes + bytes) + 256 : 0;
    char *text = fits ? (char *)xd_allocate(w->ctx, capacity) : NULL;
    if (!text) {
        xdi_json_stick(w, XD_ERROR_MEMORY, "no room for the text");
        return false;
    }
    if (w->bytes) memcpy(text, w->text, w->bytes);
    xd_release(w->ctx, w->text);
    w->text = text;
    w->capacity = capacity;
    return true;
}

static void xdi_json_put(xd_json_writer *w, const char *text, size_t bytes) {
    if (!xdi_json_grow(w, bytes)) return;
    memcpy(w->text + w->bytes, text, bytes);
    w->bytes += bytes;
}

static void xdi_json_put_line(xd_json_writer *w) {
    if (!w->indent) return;
    xdi_json_put(w, "\n", 1);
    for (int i = 0; i < w->indent * w->depth; i++) xdi_json_put(w, " ", 1);
}

static void xdi_json_put_string(xd_json_writer *w, const char *value, size_t bytes) {
    const unsigned char *s = (const unsigned char *)value;
    xdi_json_put(w, "\"", 1);
    for (size_t i = 0; i < bytes && w->result == XD_OK;) {
        const size_t length = s[i] ? xdi_json_utf8(s + i, bytes - i) : 0;
        if (length == 0) {
            xdi_json_stick(w, XD_ERROR_ARGUMENT, "a string holds NUL or invalid UTF-8");
        } else if (s[i] < 0x20 || s[i] == '"' || s[i] == '\\') {
            static const char names[] = "\"\\\b\f\n\r\t", values[] = "\"\\bfnrt";
            const char *name = strchr(names, (char)s[i]);
            char escape[8];
            if (name)
                snprintf(escape, sizeof escape, "\\%c", values[name - names]);
            else
                snprintf(escape, sizeof escape, "\\u%04x", (unsigned)s[i]);
            xdi_json_put(w, escape, strlen(escape));
        } else {
            xdi_json_put(w, value + i, length);
        }
        i += length;
    }
    xdi_json_put(w, "\"", 1);
}

/* The separator before an element or a key. */
static void xdi_json_next_item(xd_json_writer *w) {
    const uint64_t bit = (uint64_t)1 << w->depth;
    if (w->items & bit) xdi_json_put(w, ",", 1);
    w->items |= bit;
    if (w->depth > 0) xdi_json_put_line(w);
}

/* Called before every value: is this a place for one? */
static void xdi_json_begin_value(xd_json_writer *w) {
    const uint64_t bit = (uint64_t)1 << w->depth;
    const bool element = (w->array & bit) != 0 || (w->depth == 0 && !(w->items & bit));
    if (!w->keyed && !element) xdi_json_stick(w, XD_ERROR_STATE, "a value where none may stand");
    if (!w->keyed) xdi_json_next_item(w);
    w->keyed = false;
}

static void xdi_json_open(xd_json_writer *w, bool array) {
    xdi_json_begin_value(w);
    if (w->depth >= 63) {
        xdi_json_stick(w, XD_ERROR_STATE, "more than 63 open containers");
        return;
    }
    xdi_json_put(w, array ? "[" : "{", 1);
    w->depth++;
    const uint64_t bit = (uint64_t)1 << w->depth;
    w->items &= ~bit;
    w->array = array ? w->array | bit : w->array & ~bit;
}

static void xdi_json_put_value(xd_json_writer *w, const char *text) {
    xdi_json_begin_value(w);
    xdi_json_put(w, text, strlen(text));
}

XD_API xd_json_writer xd_json_writer_create(xd_ctx *ctx) {
    xd_json_writer w;
    memset(&w, 0, sizeof w);
    w.ctx = ctx;
    return w;
}

XD_API void xd_json_write_object(xd_json_writer *w) {
    xdi_json_open(w, false);
}

XD_API void xd_json_write_array(xd_json_writer *w) {
    xdi_json_open(w, true);
}

XD_API void xd_json_write_end(xd_json_writer *w) {
    if (w->depth == 0 || w->keyed) {
        xdi_json_stick(w, XD_ERROR_STATE, "an end where none may stand");
        return;
    }
    const uint64_t bit = (uint64_t)1 << w->depth;
    w->depth--;
    if (w->items & bit) xdi_json_put_line(w);
    xdi_json_put(w, (w->array & bit) ? "]" : "}", 1);
}

XD_API void xd_json_write_key(xd_json_writer *w, const char *key) {
    const uint64_t bit = (uint64_t)1 << w->depth;
    if (w->depth == 0 || w->keyed || (w->array & bit)) {
        xdi_json_stick(w, XD_ERROR_STATE, "a key where none may stand");
        return;
    }
    xdi_json_next_item(w);
    xdi_json_put_string(w, key, strlen(key));
    xdi_json_put(w, ": ", w->indent ? 2 : 1);
    w->keyed = true;
}

XD_API void xd_json_write_null(xd_json_writer *w) {
    xdi_json_put_value(w, "null");
}

XD_API void xd_json_write_bool(xd_json_writer *w, bool value) {
    xdi_json_put_value(w, value ? "true" : "false");
}

XD_API void xd_json_write_int64(xd_json_writer *w, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    xdi_json_put_value(w, text);
}

XD_API void xd_json_write_uint64(xd_json_writer *w, uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    xdi_json_put_value(w, text);
}

XD_API void xd_json_write_double(xd_json_writer *w, double value) {
    char text[40];
    if (!isfinite(value)) {
        xdi_json_stick(w, XD_ERROR_ARGUMENT, "JSON has no infinity and no NaN");
        return;
    }
    snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) != value) snprintf(text, sizeof text, "%.17g", value);
    char *point = strchr(text, *localeconv()->decimal_point);
    if (point) *point = '.';
    /* A reader tells integers from doubles by their notation; so do we, and -0 keeps its sign. */
    if (!strpbrk(text, ".e")) strcat(text, ".0");
    xdi_json_put_value(w, text);
}

XD_API void xd_json_write_string(xd_json_writer *w, const char *value) {
    xd_json_write_string_n(w, value, strlen(value));
}

XD_API void xd_json_write_string_n(xd_json_writer *w, const char *value, size_t bytes) {
    xdi_json_begin_value(w);
    xdi_json_put_string(w, value, bytes);
}

XD_API xd_result xd_json_writer_finish(xd_json_writer *w, const char **text, size_t *bytes) {
    if (w->depth > 0 || w->bytes == 0) xdi_json_stick(w, XD_ERROR_STATE, "the text is not complete");
    if (w->result != XD_OK) return w->result;
    w->text[w->bytes] = '\0';
    *text = w->text;
    if (bytes) *bytes = w->bytes;
    return XD_OK;
}

XD_API void xd_json_writer_destroy(xd_json_writer *w) {
    xd_release(w->ctx, w->text);
    *w = xd_json_writer_create(w->ctx);
}


/* >>kernel/internal */

#include <math.h>

/* Elements of logits and gradients; f32 is the common case. */
static inline double xdi_loss_load(const xd_rows *x, int64_t row, int64_t column) {
    const int64_t i = row * (x->stride ? x->stride : x->cols) + column;
    if (x->dtype == XD_DTYPE_F32) return (double)((const float *)x->data)[i];
    return xd_load_f64(x->data, x->dtype, i);
}

static inline void xdi_loss_store(const xd_rows *x, int64_t row, int64_t column, double value) {
    const int64_t i = row * (x->stride ? x->stride : x->cols) + column;
    if (x->dtype == XD_DTYPE_F32)
        ((float *)x->data)[i] = (float)value;
    else
        xd_store_f64(x->data, x->dtype, i, value);
}

/* x - reference, where a shard of only -infinity has -infinity as its reference. */
static inline double xdi_loss_minus(double x, double reference) {
    return reference == -INFINITY ? -INFINITY : x - reference;
}

/* loss_cpu.c: largest element of the row's first `columns`, and the lowest column that has it; NaN when the
 * row has a NaN or +infinity. */
XD_PRIVATE double xdi_loss_row_max(const xd_rows *x, int64_t row, int64_t columns, int64_t *column);

/* loss_cpu.c: ln(student/mixture) and ln(teacher/mixture) from the two logarithms, without cancellation when
 * they are close. */
XD_PRIVATE void xdi_loss_log_ratios(double s, double t, double beta, double *student, double *teacher);

/* topk_cpu.c: puts a value into a descending list of n entries, behind its equals; when the list is full, at
 * k, the last one falls out. Returns the new length. */
XD_PRIVATE int64_t xdi_select_insert(double *values, int64_t *ids, int64_t n, int64_t k, double value,
                                     int64_t id);

/* topk_cpu.c: its entries of the plain table; loss_cpu.c fills the others. */
XD_PRIVATE void xdi_topk_kernels_fill(xd_loss_kernels *kernels);

/* matmul_cpu.c: the product on the level of the context; launch->workspace holds XD_MATMUL_WORKSPACE_BYTES. */
XD_PRIVATE xd_result xdi_matmul_cpu(const xd_launch *launch, const xd_matmul_args *args);

/* >>kernel/fixed.c */

#include <math.h>

XD_API bool xd_fixed_add(xd_fixed *sum, double term) {
    if (!(fabs(term) < 4194304.0)) return false; /* also NaN */
    const double scaled = term * 1073741824.0;   /* 2^30: exact */
    const double high = floor(scaled);
    const int64_t next = sum->high + (int64_t)high;
    if (next >= (int64_t)1 << 55 || next <= -((int64_t)1 << 55)) return false;
    sum->high = next;
    sum->low += (int64_t)rint((scaled - high) * 1099511627776.0); /* 2^40 */
    return true;
}

XD_API double xd_fixed_value(xd_fixed sum) {
    const int64_t carry =
        sum.low >> 40; /* whole units of the high limb: the value decides the bits, not the split */
    const int64_t rest = sum.low - carry * ((int64_t)1 << 40);
    return (double)(sum.high + carry) * (1.0 / 1073741824.0) +
           (double)rest * (1.0 / 1073741824.0 / 1099511627776.0);
}

/* >>kernel/reduce_cpu.c */

#include <string.h>

/* Elements are taken in tiles that stay in the first cache: all pieces of a tile are read before it is
 * written, so out may be one of them, and the loops over a tile are plain enough to become vector
 * instructions. */
enum { XDI_REDUCE_TILE = 512, XDI_REDUCE_LEAF_TILE = 64, XDI_REDUCE_LEVELS = 64 };

static int xdi_reduce_at_most(int64_t left, int tile) {
    return left < tile ? (int)left : tile;
}

#define XDI_REDUCE_SAME(x) (x)
#define XDI_REDUCE_ADD(a, b) ((a) + (b))
/* Through unsigned: signed overflow would be undefined, and it must wrap. */
#define XDI_REDUCE_ADD_I32(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define XDI_REDUCE_ADD_I64(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define XDI_REDUCE_ADD_U8(a, b) ((uint8_t)((a) + (b)))
#define XDI_REDUCE_NAN(x) ((x) != (x))
#define XDI_REDUCE_NEVER(x) false
/* Multiplied, not divided: 1/n is rounded once and is the same for every element. */
#define XDI_REDUCE_SCALE(type, x, n) ((type)((x) * ((type)1 / (type)(n))))
#define XDI_REDUCE_KEEP(type, x, n) (x)

/* One function a dtype. `type` is how elements are stored, `sum` what they are added in. */
#define XDI_REDUCE_DEFINE(name, type, sum, LOAD, STORE, ADD, IS_NAN, SCALE)                       \
    static void xdi_reduce_tile_##name(sum *acc, const type *x, int n, xd_reduce_op op) {         \
        if (op == XD_MAX) {                                                                       \
            for (int i = 0; i < n; i++) {                                                         \
                const sum v = LOAD(x[i]);                                                         \
                acc[i] = v > acc[i] || IS_NAN(v) ? v : acc[i];                                    \
            }                                                                                     \
        } else if (op == XD_MIN) {                                                                \
            for (int i = 0; i < n; i++) {                                                         \
                const sum v = LOAD(x[i]);                                                         \
                acc[i] = v < acc[i] || IS_NAN(v) ? v : acc[i];                                    \
            }                                                                                     \
        } else {                                                                                  \
            for (int i = 0; i < n; i++) acc[i] = ADD(acc[i], LOAD(x[i]));                         \
        }                                                                                         \
    }                                                                                             \
    static void xdi_reduce_##name(void *out, const void *const *pieces, int ranks, int64_t count, \
                                  xd_reduce_op op) {                                              \
        sum acc[XDI_REDUCE_TILE];                                                                 \
        for (int64_t begin = 0; begin < count; begin += XDI_REDUCE_TILE) {                        \
            const int n = xdi_reduce_at_most(count - begin, XDI_REDUCE_TILE);                     \
            const type *first = (const type *)pieces[0] + begin;                                  \
            for (int i = 0; i < n; i++) acc[i] = LOAD(first[i]);                                  \
            for (int r = 1; r < ranks; r++)                                                       \
                xdi_reduce_tile_##name(acc, (const type *)pieces[r] + begin, n, op);              \
            if (op == XD_AVG)                                                                     \
                for (int i = 0; i < n; i++) acc[i] = SCALE(sum, acc[i], ranks);                   \
            type *to = (type *)out + begin;                                                       \
            for (int i = 0; i < n; i++) to[i] = STORE(acc[i]);                                    \
        }                                                                                         \
    }

XDI_REDUCE_DEFINE(f32, float, float, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(f64, double, double, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(bf16, uint16_t, float, xd_f32_from_bf16, xd_bf16_from_f32, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(f16, uint16_t, float, xd_f32_from_f16, xd_f16_from_f32, XDI_REDUCE_ADD, XDI_REDUCE_NAN,
                  XDI_REDUCE_SCALE)
XDI_REDUCE_DEFINE(i32, int32_t, int32_t, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD_I32,
                  XDI_REDUCE_NEVER, XDI_REDUCE_KEEP)
XDI_REDUCE_DEFINE(i64, int64_t, int64_t, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD_I64,
                  XDI_REDUCE_NEVER, XDI_REDUCE_KEEP)
XDI_REDUCE_DEFINE(u8, uint8_t, uint8_t, XDI_REDUCE_SAME, XDI_REDUCE_SAME, XDI_REDUCE_ADD_U8, XDI_REDUCE_NEVER,
                  XDI_REDUCE_KEEP)

XD_API bool xd_reduce_supports(xd_dtype dtype, xd_reduce_op op) {
    switch (dtype) {
    case XD_DTYPE_F32:
    case XD_DTYPE_F64:
    case XD_DTYPE_BF16:
    case XD_DTYPE_F16: return true;
    case XD_DTYPE_I32:
    case XD_DTYPE_I64:
    case XD_DTYPE_U8: return op != XD_AVG;
    default: return false;
    }
}

XD_API xd_result xd_reduce_pieces(xd_ctx *ctx, void *out, const void *const *pieces, int ranks, int64_t count,
                                  xd_dtype dtype, xd_reduce_op op) {
    XDI_REQUIRE(ctx, xd_reduce_supports(dtype, op), XD_ERROR_DTYPE, "%s has no %s", xd_dtype_name(dtype),
                op == XD_AVG ? "average" : "arithmetic");
    switch (dtype) {
    case XD_DTYPE_F32: xdi_reduce_f32(out, pieces, ranks, count, op); break;
    case XD_DTYPE_F64: xdi_reduce_f64(out, pieces, ranks, count, op); break;
    case XD_DTYPE_BF16: xdi_reduce_bf16(out, pieces, ranks, count, op); break;
    case XD_DTYPE_F16: xdi_reduce_f16(out, pieces, ranks, count, op); break;
    case XD_DTYPE_I32: xdi_reduce_i32(out, pieces, ranks, count, op); break;
    case XD_DTYPE_I64: xdi_reduce_i64(out, pieces, ranks, count, op); break;
    default: xdi_reduce_u8(out, pieces, ranks, count, op); break;
    }
    return XD_OK;
}

XD_API int64_t xd_leaves_node_size(int64_t first, int64_t end) {
    int64_t size = 1;
    while (size <= (end - first) / 2 && first % (size * 2) == 0) size *= 2;
    return size;
}

XD_API int64_t xd_leaves_nodes(int64_t first, int64_t count) {
    const int64_t end = first + count;
    int64_t nodes = 0;
    for (; first < end; first += xd_leaves_node_size(first, end)) nodes++;
    return nodes;
}

/* A binary counter: nodes arrive from the left, equal neighbours merge, so sizes on the stack fall strictly
 * and 64 levels suffice. What is left is the right edge of the tree, folded from the right. */
#define XDI_REDUCE_DEFINE_LEAVES(name, type)                                                             \
    static void xdi_reduce_leaves_merge_##name(type(*stack)[XDI_REDUCE_LEAF_TILE], int top, int n) {     \
        for (int i = 0; i < n; i++) stack[top - 1][i] = stack[top - 1][i] + stack[top][i];               \
    }                                                                                                    \
    static void xdi_reduce_leaves_tile_##name(type *out, const void *const *forests,                     \
                                              const xd_leaves *leaves, int ranks, int64_t stride,        \
                                              int64_t begin, int n, xd_reduce_op op) {                   \
        type stack[XDI_REDUCE_LEVELS][XDI_REDUCE_LEAF_TILE];                                             \
        int64_t size[XDI_REDUCE_LEVELS];                                                                 \
        int top = -1;                                                                                    \
        for (int r = 0; r < ranks; r++) {                                                                \
            const int64_t end = leaves[r].first + leaves[r].count;                                       \
            if (leaves[r].count == 0) continue; /* its forest may be NULL */                             \
            const type *node = (const type *)forests[r] + begin;                                         \
            for (int64_t lo = leaves[r].first; lo < end;                                                 \
                 lo += xd_leaves_node_size(lo, end), node += stride) {                                   \
                memcpy(stack[++top], node, (size_t)n * sizeof(type));                                    \
                size[top] = xd_leaves_node_size(lo, end);                                                \
                for (; top > 0 && size[top - 1] == size[top]; size[--top] *= 2)                          \
                    xdi_reduce_leaves_merge_##name(stack, top, n);                                       \
            }                                                                                            \
        }                                                                                                \
        for (; top > 0; top--) xdi_reduce_leaves_merge_##name(stack, top, n);                            \
        const type scale = op == XD_AVG ? (type)1 / (type)leaves[0].total : (type)1;                     \
        for (int i = 0; i < n; i++) out[begin + i] = stack[0][i] * scale;                                \
    }                                                                                                    \
    static void xdi_reduce_leaves_##name(void *out, const void *const *forests, const xd_leaves *leaves, \
                                         int ranks, int64_t stride, int64_t count, xd_reduce_op op) {    \
        for (int64_t begin = 0; begin < count; begin += XDI_REDUCE_LEAF_TILE) {                          \
            const int n = xdi_reduce_at_most(count - begin, XDI_REDUCE_LEAF_TILE);                       \
            xdi_reduce_leaves_tile_##name((type *)out, forests, leaves, ranks, stride, begin, n, op);    \
        }                                                                                                \
    }

XDI_REDUCE_DEFINE_LEAVES(f32, float)
XDI_REDUCE_DEFINE_LEAVES(f64, double)

XD_API xd_result xd_reduce_leaves(xd_ctx *ctx, void *out, const void *const *forests, const xd_leaves *leaves,
                                  int ranks, int64_t stride, int64_t count, xd_dtype dtype, xd_reduce_op op) {
    XDI_REQUIRE(
        ctx, dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_F64, XD_ERROR_DTYPE,
        "a sum over leaves is F32 or F64, not %s: rounding a node would make its bits depend on the ranks",
        xd_dtype_name(dtype));
    XDI_REQUIRE(ctx, op == XD_SUM || op == XD_AVG, XD_ERROR_ARGUMENT,
                "leaves go with SUM and AVG, not operation %d", (int)op);
    if (dtype == XD_DTYPE_F32)
        xdi_reduce_leaves_f32(out, forests, leaves, ranks, stride, count, op);
    else
        xdi_reduce_leaves_f64(out, forests, leaves, ranks, stride, count, op);
    return XD_OK;
}

/* >>kernel/loss_cpu.c */

#include <math.h>
#include <string.h>

/* Plain loops, double inside; kernel/loss.h has the formulas. Logits are read once per entry and element. */

static int64_t xdi_loss_columns(const xd_loss_args *a) {
    return a->offsets[a->shard + 1] - a->offsets[a->shard];
}

static bool xdi_loss_has_soft(const xd_loss_args *a) {
    return a->teacher.data && a->soft_weight != 0.0;
}

static bool xdi_loss_has_hard(const xd_loss_args *a) {
    return a->labels && a->hard_weight != 0.0;
}

XD_PRIVATE double xdi_loss_row_max(const xd_rows *x, int64_t row, int64_t columns, int64_t *column) {
    double max = -INFINITY;
    bool finite = true;
    *column = -1;
    for (int64_t c = 0; c < columns; c++) {
        const double value = xdi_loss_load(x, row, c);
        if (!(value < INFINITY)) finite = false;
        if (value > max || *column < 0) {
            max = value;
            *column = c;
        }
    }
    return finite ? max : NAN;
}

static xd_result xdi_cpu_loss_references(const xd_launch *launch, const xd_loss_args *a) {
    const int64_t columns = xdi_loss_columns(a);
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        double *ref = a->references + r * XD_LOSS_REFERENCES;
        int64_t arg, teacher_arg;
        if (a->row_scale[r] == 0.0) {
            for (int i = 0; i < XD_LOSS_REFERENCES; i++) ref[i] = 0.0;
            continue;
        }
        ref[XD_LOSS_MAX] = xdi_loss_row_max(&a->student, r, columns, &arg);
        ref[XD_LOSS_ARG] = arg < 0 ? -1.0 : (double)(arg + a->offsets[a->shard]);
        ref[XD_LOSS_TEACHER_AT_ARG] = 0.0;
        ref[XD_LOSS_TEACHER_MAX] = 0.0;
        if (!xdi_loss_has_soft(a)) continue;
        ref[XD_LOSS_TEACHER_AT_ARG] = arg < 0 ? -INFINITY : xdi_loss_load(&a->teacher, r, arg);
        ref[XD_LOSS_TEACHER_MAX] = xdi_loss_row_max(&a->teacher, r, columns, &teacher_arg);
    }
    return XD_OK;
}

/* Joins one shard's references to those of the shards before it. */
static void xdi_loss_join_reference(double *ref, const double *shard) {
    const bool wins =
        shard[XD_LOSS_ARG] >= 0.0 && (ref[XD_LOSS_ARG] < 0.0 || shard[XD_LOSS_MAX] > ref[XD_LOSS_MAX]);
    const bool broken = isnan(ref[XD_LOSS_MAX]) || isnan(shard[XD_LOSS_MAX]);
    if (wins)
        for (int i = XD_LOSS_MAX; i <= XD_LOSS_TEACHER_AT_ARG; i++) ref[i] = shard[i];
    if (broken) ref[XD_LOSS_MAX] = NAN;
    if (isnan(shard[XD_LOSS_TEACHER_MAX]) || shard[XD_LOSS_TEACHER_MAX] > ref[XD_LOSS_TEACHER_MAX])
        ref[XD_LOSS_TEACHER_MAX] = shard[XD_LOSS_TEACHER_MAX];
}

/* References of the whole row from those of all shards. */
static void xdi_loss_whole_reference(const xd_loss_args *a, int64_t r, double *ref) {
    ref[XD_LOSS_MAX] = -INFINITY;
    ref[XD_LOSS_ARG] = -1.0;
    ref[XD_LOSS_TEACHER_AT_ARG] = -INFINITY;
    ref[XD_LOSS_TEACHER_MAX] = -INFINITY;
    for (int i = 0; i < a->shards; i++)
        xdi_loss_join_reference(ref, a->all_references + i * a->reference_stride + r * XD_LOSS_REFERENCES);
}

static xd_result xdi_cpu_loss_merge_references(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        double ref[XD_LOSS_REFERENCES]; /* one shard reads and writes the same memory */
        xdi_loss_whole_reference(a, r, ref);
        memcpy(a->references + r * XD_LOSS_REFERENCES, ref, sizeof ref);
    }
    return XD_OK;
}

/* The sums of one row, in either representation. */
typedef struct xdi_loss_sums {
    bool fixed;
    double plain[XD_LOSS_SUMS];
    xd_fixed exact[XD_LOSS_SUMS];
} xdi_loss_sums;

static inline void xdi_loss_add(xdi_loss_sums *sums, int which, double term) {
    if (!sums->fixed)
        sums->plain[which] += term;
    else if (!xd_fixed_add(&sums->exact[which], term)) {
        if (isfinite(term))
            sums->exact[XD_LOSS_BAD].low++;
        else
            sums->exact[XD_LOSS_BAD].high++;
    }
}

/* The term of CROSS at one column; 0 where the weighing probability is 0, so that 0 * infinity never
 * forms. */
static inline double xdi_loss_cross(const xd_loss_args *a, double e_s, double e_t, double z, double u,
                                    double at_arg) {
    switch (a->divergence) {
    case XD_KL_FORWARD: return e_t > 0.0 ? e_t * (u - z) : 0.0;
    case XD_SOFT_CE: return e_t > 0.0 ? e_t * z : 0.0;
    case XD_KL_REVERSE: return e_s > 0.0 ? e_s * (z - at_arg) : 0.0;
    default: return 0.0; /* JSD needs the normalisers first */
    }
}

static void xdi_loss_stats_row(const xd_loss_args *a, int64_t r, const double *ref, xdi_loss_sums *sums) {
    const bool hard = xdi_loss_has_hard(a), soft = xdi_loss_has_soft(a);
    const double max = ref[XD_LOSS_MAX], teacher_max = ref[XD_LOSS_TEACHER_MAX];
    const double scale = 1.0 / a->temperature;
    const int64_t columns = xdi_loss_columns(a);
    for (int64_t c = 0; c < columns; c++) {
        const double x = xdi_loss_minus(xdi_loss_load(&a->student, r, c), max);
        const double e = hard || a->temperature == 1.0 ? exp(x) : 0.0;
        if (hard) xdi_loss_add(sums, XD_LOSS_HARD, e);
        if (hard && a->uniform_weight != 0.0) xdi_loss_add(sums, XD_LOSS_LINEAR, x);
        if (!soft) continue;
        const double y = xdi_loss_load(&a->teacher, r, c);
        const double z = x * scale, u = xdi_loss_minus(y, teacher_max) * scale;
        const double e_s = a->temperature == 1.0 ? e : exp(z), e_t = exp(u);
        xdi_loss_add(sums, XD_LOSS_SOFT, e_s);
        xdi_loss_add(sums, XD_LOSS_TEACHER, e_t);
        xdi_loss_add(sums, XD_LOSS_CROSS,
                     xdi_loss_cross(a, e_s, e_t, z, u, (y - ref[XD_LOSS_TEACHER_AT_ARG]) * scale));
    }
    if (!hard) return;
    const int64_t target = a->labels[r] - a->offsets[a->shard];
    if (target >= 0 && target < columns)
        xdi_loss_add(sums, XD_LOSS_TARGET, xdi_loss_minus(xdi_loss_load(&a->student, r, target), max));
}

static xd_result xdi_cpu_loss_stats(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        const double *ref = a->references + r * XD_LOSS_REFERENCES;
        xdi_loss_sums sums;
        memset(&sums, 0, sizeof sums);
        sums.fixed = a->fixed;
        if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) {
            sums.plain[XD_LOSS_BAD] = 1.0;
            sums.exact[XD_LOSS_BAD].high = 1;
        } else if (a->row_scale[r] != 0.0) {
            xdi_loss_stats_row(a, r, ref, &sums);
        }
        if (a->fixed)
            memcpy((xd_fixed *)a->sums + r * XD_LOSS_SUMS, sums.exact, sizeof sums.exact);
        else
            memcpy((double *)a->sums + r * XD_LOSS_SUMS, sums.plain, sizeof sums.plain);
    }
    return XD_OK;
}

/* Whole-row sums from fixed ones: the limbs of all shards added. */
static void xdi_loss_total_fixed(const xd_loss_args *a, int64_t r, double *total, xd_loss_row *row) {
    const xd_fixed *all = (const xd_fixed *)a->all_sums;
    for (int i = 0; i < XD_LOSS_SUMS; i++) {
        xd_fixed sum = { 0, 0 };
        for (int shard = 0; shard < a->shards; shard++) {
            const xd_fixed *part = all + shard * a->sums_stride + r * XD_LOSS_SUMS + i;
            sum.high += part->high;
            sum.low += part->low;
        }
        if (i == XD_LOSS_BAD && sum.low > 0) row->finding = (int)XD_ROW_OVERFLOW;
        if (i == XD_LOSS_BAD && sum.high > 0) row->finding = (int)XD_ROW_NOT_FINITE;
        total[i] = xd_fixed_value(sum);
    }
}

/* Adds one shard's sums, taken relative to its own references, to those relative to the row's. A shard whose
 * factor is 0 has nothing to add, and its sums may be infinite. */
static void xdi_loss_rescale(const xd_loss_args *a, const double *ref, const double *own, const double *sums,
                             int64_t columns, double *total) {
    const double shift = own[XD_LOSS_MAX] - ref[XD_LOSS_MAX];
    const double teacher_shift = (own[XD_LOSS_TEACHER_MAX] - ref[XD_LOSS_TEACHER_MAX]) / a->temperature;
    const double f = exp(shift / a->temperature), g = exp(teacher_shift);
    const double z = shift / a->temperature;
    total[XD_LOSS_BAD] += sums[XD_LOSS_BAD];
    if (columns == 0) return;
    total[XD_LOSS_HARD] += exp(shift) * sums[XD_LOSS_HARD];
    total[XD_LOSS_LINEAR] +=
        sums[XD_LOSS_LINEAR] + (a->uniform_weight != 0.0 ? (double)columns * shift : 0.0);
    if (f > 0.0) total[XD_LOSS_SOFT] += f * sums[XD_LOSS_SOFT];
    if (g > 0.0) total[XD_LOSS_TEACHER] += g * sums[XD_LOSS_TEACHER];
    if (a->divergence == XD_KL_FORWARD && g > 0.0)
        total[XD_LOSS_CROSS] += g * (sums[XD_LOSS_CROSS] + sums[XD_LOSS_TEACHER] * (teacher_shift - z));
    if (a->divergence == XD_SOFT_CE && g > 0.0)
        total[XD_LOSS_CROSS] += g * (sums[XD_LOSS_CROSS] + sums[XD_LOSS_TEACHER] * z);
    if (a->divergence == XD_KL_REVERSE && f > 0.0) {
        const double u = (own[XD_LOSS_TEACHER_AT_ARG] - ref[XD_LOSS_TEACHER_AT_ARG]) / a->temperature;
        total[XD_LOSS_CROSS] += f * (sums[XD_LOSS_CROSS] + sums[XD_LOSS_SOFT] * (z - u));
    }
}

static void xdi_loss_total_plain(const xd_loss_args *a, int64_t r, const double *ref, double *total) {
    const double *all = (const double *)a->all_sums;
    for (int i = 0; i < XD_LOSS_SUMS; i++) total[i] = 0.0;
    for (int i = 0; i < a->shards; i++) {
        const double *own = a->all_references + i * a->reference_stride + r * XD_LOSS_REFERENCES;
        const double *sums = all + i * a->sums_stride + r * XD_LOSS_SUMS;
        xdi_loss_rescale(a, ref, own, sums, a->offsets[i + 1] - a->offsets[i], total);
        const bool owner =
            xdi_loss_has_hard(a) && a->labels[r] >= a->offsets[i] && a->labels[r] < a->offsets[i + 1];
        if (owner) total[XD_LOSS_TARGET] = sums[XD_LOSS_TARGET] + (own[XD_LOSS_MAX] - ref[XD_LOSS_MAX]);
    }
    if (isnan(ref[XD_LOSS_MAX]) || isnan(ref[XD_LOSS_TEACHER_MAX])) total[XD_LOSS_BAD] += 1.0;
}

XD_PRIVATE void xdi_loss_log_ratios(double s, double t, double beta, double *student, double *teacher) {
    const double d = t - s;
    if (fabs(d) < 1.0) {
        *student = -log1p(beta * expm1(d));
        *teacher = -log1p((1.0 - beta) * expm1(-d));
    } else if (d > 0.0) {
        *teacher = -log(beta + (1.0 - beta) * exp(-d));
        *student = *teacher - d;
    } else {
        *student = -log((1.0 - beta) + beta * exp(d));
        *teacher = *student + d;
    }
}

static void xdi_loss_combine_soft(const xd_loss_args *a, const double *total, xd_loss_row *row) {
    const double top_gap = (row->teacher_max - row->teacher_at_arg) / a->temperature;
    double unused;
    row->soft_log = log(total[XD_LOSS_SOFT]);
    row->teacher_log = log(total[XD_LOSS_TEACHER]);
    switch (a->divergence) {
    case XD_KL_FORWARD:
        row->soft =
            total[XD_LOSS_CROSS] / total[XD_LOSS_TEACHER] + log(total[XD_LOSS_SOFT] / total[XD_LOSS_TEACHER]);
        break;
    case XD_SOFT_CE: row->soft = row->soft_log - total[XD_LOSS_CROSS] / total[XD_LOSS_TEACHER]; break;
    case XD_KL_REVERSE:
        row->mean = total[XD_LOSS_CROSS] / total[XD_LOSS_SOFT];
        row->soft = row->mean + (log(total[XD_LOSS_TEACHER] / total[XD_LOSS_SOFT]) + top_gap);
        break;
    default:
        xdi_loss_log_ratios(-row->soft_log, -top_gap - row->teacher_log, a->beta, &row->top, &unused);
        break;
    }
}

static void xdi_loss_combine_row(const xd_loss_args *a, int64_t r, xd_loss_row *row) {
    double total[XD_LOSS_SUMS], ref[XD_LOSS_REFERENCES];
    xdi_loss_whole_reference(a, r, ref);
    row->max = ref[XD_LOSS_MAX];
    row->teacher_max = ref[XD_LOSS_TEACHER_MAX];
    row->teacher_at_arg = ref[XD_LOSS_TEACHER_AT_ARG];
    row->argmax = ref[XD_LOSS_ARG];
    if (a->labels && (a->labels[r] < 0 || a->labels[r] >= a->offsets[a->shards])) {
        row->finding = (int)XD_ROW_LABEL;
        return;
    }
    if (a->fixed)
        xdi_loss_total_fixed(a, r, total, row);
    else
        xdi_loss_total_plain(a, r, ref, total);
    if (!a->fixed && !(total[XD_LOSS_BAD] == 0.0)) row->finding = (int)XD_ROW_NOT_FINITE;
    if (xdi_loss_has_hard(a)) {
        row->hard_log = log(total[XD_LOSS_HARD]);
        row->hard = a->target_weight * (row->hard_log - total[XD_LOSS_TARGET]);
        if (a->uniform_weight != 0.0)
            row->hard +=
                a->uniform_weight * ((double)a->offsets[a->shards] * row->hard_log - total[XD_LOSS_LINEAR]);
    }
    if (xdi_loss_has_soft(a)) xdi_loss_combine_soft(a, total, row);
    if (row->finding == (int)XD_ROW_FINE &&
        !(isfinite(row->hard) && isfinite(row->soft) && isfinite(row->max)))
        row->finding = (int)XD_ROW_NOT_FINITE;
}

static void xdi_loss_clear_finding(xd_loss_row *row) {
    if (row->finding == (int)XD_ROW_FINE) return;
    row->hard = 0.0;
    row->soft = 0.0;
}

static xd_result xdi_cpu_loss_combine(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        xd_loss_row *row = a->row + r;
        memset(row, 0, sizeof *row);
        if (a->row_scale[r] == 0.0) continue;
        xdi_loss_combine_row(a, r, row);
        xdi_loss_clear_finding(row);
    }
    return XD_OK;
}

/* The student's and the teacher's log-probability at one column. */
static inline double xdi_loss_student_log(const xd_loss_args *a, const xd_loss_row *row, double x) {
    return (x - row->max) / a->temperature - row->soft_log;
}

static inline double xdi_loss_teacher_log(const xd_loss_args *a, const xd_loss_row *row, double y) {
    return (y - row->teacher_max) / a->temperature - row->teacher_log;
}

static void xdi_loss_mixture_row(const xd_loss_args *a, int64_t r, const xd_loss_row *row,
                                 xdi_loss_sums *sums) {
    const int64_t columns = xdi_loss_columns(a);
    for (int64_t c = 0; c < columns; c++) {
        const double s = xdi_loss_student_log(a, row, xdi_loss_load(&a->student, r, c));
        const double t = xdi_loss_teacher_log(a, row, xdi_loss_load(&a->teacher, r, c));
        const double p = exp(s), q = exp(t);
        double student, teacher;
        if (p == 0.0 && q == 0.0) continue;
        xdi_loss_log_ratios(s, t, a->beta, &student, &teacher);
        if (q > 0.0) xdi_loss_add(sums, XD_LOSS_TEACHER_MIXTURE, q * teacher);
        if (p > 0.0) xdi_loss_add(sums, XD_LOSS_STUDENT_MIXTURE, p * (student - row->top));
    }
}

static xd_result xdi_cpu_loss_mixture(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        xdi_loss_sums sums;
        memset(&sums, 0, sizeof sums);
        sums.fixed = a->fixed;
        if (a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE)
            xdi_loss_mixture_row(a, r, a->row + r, &sums);
        for (int i = 0; i < XD_LOSS_MIXTURES; i++) {
            if (a->fixed)
                ((xd_fixed *)a->mixtures)[r * XD_LOSS_MIXTURES + i] = sums.exact[i];
            else
                ((double *)a->mixtures)[r * XD_LOSS_MIXTURES + i] = sums.plain[i];
        }
    }
    return XD_OK;
}

static double xdi_loss_mixture_total(const xd_loss_args *a, int64_t r, int which) {
    double total = 0.0;
    xd_fixed exact = { 0, 0 };
    for (int i = 0; i < a->shards; i++) {
        const int64_t at = (i * a->student.rows + r) * XD_LOSS_MIXTURES + which;
        if (a->fixed) {
            exact.high += ((const xd_fixed *)a->all_mixtures)[at].high;
            exact.low += ((const xd_fixed *)a->all_mixtures)[at].low;
        } else {
            total += ((const double *)a->all_mixtures)[at];
        }
    }
    return a->fixed ? xd_fixed_value(exact) : total;
}

static xd_result xdi_cpu_loss_mixture_combine(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        xd_loss_row *row = a->row + r;
        if (a->row_scale[r] == 0.0 || row->finding != (int)XD_ROW_FINE) continue;
        row->mean = xdi_loss_mixture_total(a, r, XD_LOSS_STUDENT_MIXTURE);
        row->soft = a->beta * xdi_loss_mixture_total(a, r, XD_LOSS_TEACHER_MIXTURE) +
                    (1.0 - a->beta) * (row->mean + row->top);
        if (!isfinite(row->soft)) row->finding = (int)XD_ROW_NOT_FINITE;
        xdi_loss_clear_finding(row);
    }
    return XD_OK;
}

/* d soft / d (x / tau) at one column. */
static inline double xdi_loss_soft_gradient(const xd_loss_args *a, const xd_loss_row *row, double x,
                                            double y) {
    const double s = xdi_loss_student_log(a, row, x);
    double student, teacher;
    if (a->divergence == XD_KL_REVERSE) {
        const double p = exp(s);
        const double u = (y - row->teacher_at_arg) / a->temperature;
        return p > 0.0 ? p * (((x - row->max) / a->temperature - u) - row->mean) : 0.0;
    }
    const double t = xdi_loss_teacher_log(a, row, y);
    if (a->divergence != XD_JSD) return exp(s) - exp(t);
    const double p = exp(s);
    if (p == 0.0) return 0.0;
    xdi_loss_log_ratios(s, t, a->beta, &student, &teacher);
    return p * (1.0 - a->beta) * ((student - row->top) - row->mean);
}

static void xdi_loss_grad_row(const xd_loss_args *a, int64_t r, int64_t columns) {
    const bool hard = xdi_loss_has_hard(a), soft = xdi_loss_has_soft(a);
    const xd_loss_row *row = a->row + r;
    const double scale = a->row_scale[r], soft_weight = a->soft_weight / a->temperature;
    const int64_t target = hard ? a->labels[r] - a->offsets[a->shard] : -1;
    for (int64_t c = 0; c < columns; c++) {
        const double x = xdi_loss_load(&a->student, r, c);
        double g = 0.0;
        if (hard) {
            const double p = exp((x - row->max) - row->hard_log);
            g = a->hard_weight * (p - (c == target ? a->target_weight : 0.0) - a->uniform_weight);
        }
        if (soft) g += soft_weight * xdi_loss_soft_gradient(a, row, x, xdi_loss_load(&a->teacher, r, c));
        xdi_loss_store(&a->gradient, r, c, scale * g);
    }
}

static xd_result xdi_cpu_loss_grad(const xd_launch *launch, const xd_loss_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->student.rows; r++) {
        const bool counts = a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE;
        const int64_t columns = counts ? xdi_loss_columns(a) : 0;
        xdi_loss_grad_row(a, r, columns);
        for (int64_t c = columns; c < a->gradient.cols; c++) xdi_loss_store(&a->gradient, r, c, 0.0);
    }
    return XD_OK;
}

XD_API xd_loss_kernels xd_loss_kernels_cpu_plain(void) {
    xd_loss_kernels kernels;
    kernels.references = xdi_cpu_loss_references;
    kernels.merge_references = xdi_cpu_loss_merge_references;
    kernels.stats = xdi_cpu_loss_stats;
    kernels.combine = xdi_cpu_loss_combine;
    kernels.mixture = xdi_cpu_loss_mixture;
    kernels.mixture_combine = xdi_cpu_loss_mixture_combine;
    kernels.grad = xdi_cpu_loss_grad;
    xdi_topk_kernels_fill(&kernels);
    return kernels;
}

/* >>kernel/topk_cpu.c */

#include <math.h>
#include <string.h>

/* Top-k losses and selection. A row is seen as k + 1 entries: its ids, and everything outside as one. */

static xd_result xdi_cpu_topk_maxima(const xd_launch *launch, const xd_topk_args *a) {
    const int64_t columns = a->offsets[a->shard + 1] - a->offsets[a->shard];
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        int64_t unused;
        a->maxima[r] = a->row_scale[r] != 0.0 ? xdi_loss_row_max(&a->logits, r, columns, &unused) : 0.0;
    }
    return XD_OK;
}

/* Writes the slots whose id lies in [begin, end) to order[], by ascending id; returns how many. Shell sort: k
 * is small and the ids mostly are no worse than random. */
static int64_t xdi_topk_order(const int64_t *ids, int64_t k, int64_t begin, int64_t end, int64_t *order) {
    int64_t n = 0;
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= begin && ids[j] < end) order[n++] = j;
    for (int64_t gap = n / 2; gap > 0; gap /= 2)
        for (int64_t i = gap; i < n; i++) {
            const int64_t slot = order[i];
            int64_t at = i;
            for (; at >= gap && ids[order[at - gap]] > ids[slot]; at -= gap) order[at] = order[at - gap];
            order[at] = slot;
        }
    return n;
}

/* Adds to a double or to a fixed sum. BAD counts what does not fit: high for non-finite terms, low for large
 * ones. */
static inline void xdi_topk_add(const xd_topk_args *a, double *plain, xd_fixed *exact, int which,
                                double term) {
    if (!a->fixed)
        plain[which] += term;
    else if (!xd_fixed_add(&exact[which], term)) {
        if (isfinite(term))
            exact[XD_TOPK_BAD].low++;
        else
            exact[XD_TOPK_BAD].high++;
    }
}

static void xdi_topk_stats_row(const xd_topk_args *a, int64_t r, double *plain, xd_fixed *exact) {
    const int64_t begin = a->offsets[a->shard], end = a->offsets[a->shard + 1];
    const int64_t *ids = a->ids + r * a->k;
    const int64_t inside = xdi_topk_order(ids, a->k, begin, end, a->order);
    int64_t next = 0;
    plain[XD_TOPK_MAX] = a->maxima[r];
    for (int64_t j = 0; j < inside; j++)
        a->values[r * a->k + a->order[j]] = xdi_loss_load(&a->logits, r, ids[a->order[j]] - begin);
    if (!a->outside) return;
    for (int64_t c = begin; c < end; c++) {
        if (next < inside && ids[a->order[next]] == c) {
            while (next < inside && ids[a->order[next]] == c) next++;
            continue;
        }
        const double z =
            xdi_loss_minus(xdi_loss_load(&a->logits, r, c - begin), a->maxima[r]) / a->temperature;
        const double e = exp(z);
        xdi_topk_add(a, plain, exact, XD_TOPK_OUTSIDE, e);
        if (e > 0.0) xdi_topk_add(a, plain, exact, XD_TOPK_ENTROPY, e * z);
    }
}

static xd_result xdi_cpu_topk_stats(const xd_launch *launch, const xd_topk_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        double plain[XD_TOPK_SUMS] = { 0.0, 0.0, 0.0, 0.0 };
        xd_fixed exact[XD_TOPK_SUMS];
        memset(exact, 0, sizeof exact);
        for (int64_t j = 0; j < a->k; j++) a->values[r * a->k + j] = 0.0;
        if (isnan(a->maxima[r])) {
            plain[XD_TOPK_BAD] = 1.0;
            exact[XD_TOPK_BAD].high = 1;
        } else if (a->row_scale[r] != 0.0) {
            xdi_topk_stats_row(a, r, plain, exact);
        }
        if (a->fixed)
            memcpy((xd_fixed *)a->sums + r * XD_TOPK_SUMS, exact, sizeof exact);
        else
            memcpy((double *)a->sums + r * XD_TOPK_SUMS, plain, sizeof plain);
    }
    return XD_OK;
}

static void xdi_topk_merge_fixed(const xd_topk_args *a, int64_t r, xd_topk_side *side) {
    xd_fixed sum[XD_TOPK_SUMS];
    memset(sum, 0, sizeof sum);
    for (int i = 0; i < a->shards; i++)
        for (int which = 0; which < XD_TOPK_SUMS; which++) {
            const int64_t *part = a->all + i * a->all_stride + (r * XD_TOPK_SUMS + which) * 2;
            sum[which].high += part[0];
            sum[which].low += part[1];
        }
    side->max = a->maxima[r];
    side->outside = xd_fixed_value(sum[XD_TOPK_OUTSIDE]);
    side->entropy = xd_fixed_value(sum[XD_TOPK_ENTROPY]);
    if (sum[XD_TOPK_BAD].low > 0) side->finding = (int)XD_ROW_OVERFLOW;
    if (sum[XD_TOPK_BAD].high > 0) side->finding = (int)XD_ROW_NOT_FINITE;
}

static void xdi_topk_merge_plain(const xd_topk_args *a, int64_t r, xd_topk_side *side) {
    side->max = -INFINITY;
    for (int i = 0; i < a->shards; i++) {
        const double *part = (const double *)(const void *)(a->all + i * a->all_stride) + r * XD_TOPK_SUMS;
        if (part[XD_TOPK_BAD] != 0.0) side->finding = (int)XD_ROW_NOT_FINITE;
        if (part[XD_TOPK_MAX] > side->max) side->max = part[XD_TOPK_MAX];
    }
    for (int i = 0; i < a->shards; i++) {
        const double *part = (const double *)(const void *)(a->all + i * a->all_stride) + r * XD_TOPK_SUMS;
        const double shift = (part[XD_TOPK_MAX] - side->max) / a->temperature, f = exp(shift);
        if (!(f > 0.0)) continue;
        side->outside += f * part[XD_TOPK_OUTSIDE];
        side->entropy += f * (part[XD_TOPK_ENTROPY] + part[XD_TOPK_OUTSIDE] * shift);
    }
}

/* Brings the logits at all ids together, and finds ids that are out of range or twice in the row. */
static void xdi_topk_merge_values(const xd_topk_args *a, int64_t r, xd_topk_side *side) {
    const int64_t *ids = a->ids + r * a->k;
    const int64_t valid = xdi_topk_order(ids, a->k, 0, a->offsets[a->shards], a->order);
    const int64_t sums = a->logits.rows * XD_TOPK_SUMS * (a->fixed ? 2 : 1); /* words before the values */
    int64_t given = 0;
    int shard = 0;
    for (int64_t j = 0; j < a->k; j++) given += ids[j] >= 0 ? 1 : 0;
    if (given != valid) side->finding = (int)XD_ROW_LABEL;
    for (int64_t i = 0; i < valid; i++) {
        const int64_t j = a->order[i];
        while (ids[j] >= a->offsets[shard + 1]) shard++;
        memcpy(a->values + r * a->k + j, a->all + shard * a->all_stride + sums + r * a->k + j,
               sizeof(double));
        if (i > 0 && ids[a->order[i - 1]] == ids[j]) side->finding = (int)XD_ROW_LABEL;
    }
}

static xd_result xdi_cpu_topk_merge(const xd_launch *launch, const xd_topk_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        xd_topk_side *side = a->side + r;
        memset(side, 0, sizeof *side);
        if (a->row_scale[r] == 0.0) continue;
        if (a->fixed)
            xdi_topk_merge_fixed(a, r, side);
        else
            xdi_topk_merge_plain(a, r, side);
        xdi_topk_merge_values(a, r, side);
        if (side->max == -INFINITY) side->finding = (int)XD_ROW_NOT_FINITE;
    }
    return XD_OK;
}

/* One row as the divergence sees it: entries j < k are the ids, entry k is the outside. */
typedef struct xdi_topk_entries {
    double *s, *t; /* [k + 1] logarithms; an entry that is absent has valid[j] false */
    double *g;     /* [k + 1] gradient with respect to the entries' logits */
    const int64_t *ids;
    int64_t k;
    double log;                           /* of the student's sum over all columns */
    double outside_mass, outside_entropy; /* sum of p and of p ln p outside */
    bool tail;                            /* the outside is an entry of the divergence */
    bool tail_flows;                      /* and has a gradient: its mass is above the floor */
    double student_mass, teacher_mass;
} xdi_topk_entries;

/* Smallest tail: 1 - e^-1e-7. Below it the tail is a constant. */
static double xdi_topk_floor(void) {
    return -expm1(-1e-7);
}

/* values[] / temperature, normalised over the row's own entries. Returns ln of the sum, -infinity without
 * entries. */
static double xdi_topk_normalise(const double *values, const int64_t *ids, int64_t k, double temperature,
                                 double *out) {
    double max = -INFINITY, sum = 0.0;
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0 && values[j] > max) max = values[j];
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0 && max > -INFINITY) sum += exp((values[j] - max) / temperature);
    const double log_sum = log(sum);
    for (int64_t j = 0; j < k; j++)
        out[j] = ids[j] >= 0 ? (values[j] - max) / temperature - log_sum : -INFINITY;
    return max / temperature + log_sum;
}

static double xdi_topk_mass(const double *logs, const int64_t *ids, int64_t k) {
    double sum = 0.0;
    for (int64_t j = 0; j < k; j++) sum += ids[j] >= 0 ? exp(logs[j]) : 0.0;
    return sum;
}

static void xdi_topk_student_entries(const xd_topk_args *a, int64_t r, xdi_topk_entries *e) {
    const double *values = a->values + r * a->k;
    const xd_topk_side *side = a->side + r;
    double inside = 0.0;
    for (int64_t j = 0; j < a->k; j++)
        if (e->ids[j] >= 0) inside += exp((values[j] - side->max) / a->temperature);
    const double total = inside + side->outside;
    e->log = log(total);
    e->student_mass = inside / total;
    e->outside_mass = side->outside / total;
    e->outside_entropy = side->entropy / total - e->log * e->outside_mass;
    if (a->mode == XD_TOPK_RENORMALISE) {
        xdi_topk_normalise(values, e->ids, a->k, a->temperature, e->s);
    } else {
        for (int64_t j = 0; j < a->k; j++)
            e->s[j] = e->ids[j] >= 0 ? (values[j] - side->max) / a->temperature - e->log : -INFINITY;
    }
    e->tail_flows = e->tail && e->outside_mass >= xdi_topk_floor();
    e->s[a->k] = log(e->tail && !e->tail_flows ? xdi_topk_floor() : e->outside_mass);
}

static void xdi_topk_teacher_entries(const xd_topk_args *a, int64_t r, xdi_topk_entries *e) {
    const double *values = a->teacher_values + r * a->k;
    const double tau = a->teacher_temperature;
    const double sum = xdi_topk_normalise(values, e->ids, a->k, tau, e->t);
    double whole = 0.0, outside = 0.0; /* ln of the sum over all columns */
    if (a->teacher_side) {
        const xd_topk_side *side = a->teacher_side + r;
        const double inside = exp(sum - side->max / tau);
        whole = side->max / tau + log(inside + side->outside);
        outside = side->outside / (inside + side->outside);
    } else if (a->teacher_log) {
        whole = (double)a->teacher_log[r];
    }
    for (int64_t j = 0; j < a->k && a->mode != XD_TOPK_RENORMALISE && a->mode != XD_TOPK_ZERO_OUTSIDE; j++)
        e->t[j] = e->ids[j] >= 0 ? values[j] / tau - whole : -INFINITY;
    e->teacher_mass = exp(sum - whole);
    if (!a->teacher_side) outside = -expm1(sum - whole);
    e->t[a->k] = log(outside < xdi_topk_floor() ? xdi_topk_floor() : outside);
}

/* Forward KL of the entries: sum T (t - s), gradient S sum(T) - T. */
static void xdi_topk_forward(xdi_topk_entries *e, double weight, xd_topk_row *row) {
    const int64_t n = e->k + (e->tail ? 1 : 0);
    double mass = xdi_topk_mass(e->t, e->ids, e->k);
    if (e->tail_flows) mass += exp(e->t[e->k]);
    for (int64_t j = 0; j < n; j++) {
        if (j < e->k && e->ids[j] < 0) continue;
        const double t = exp(e->t[j]);
        if (t > 0.0) row->loss += weight * t * (e->t[j] - e->s[j]);
        e->g[j] += weight * (exp(e->s[j]) * mass - t);
    }
    row->outside += weight * (e->tail_flows ? mass - exp(e->t[e->k]) / e->outside_mass : mass);
}

/* The factor r in A = S r of the reverse KL (beta 1) and the JSD, and the entry's part of the loss. */
static double xdi_topk_ratio(const xdi_topk_entries *e, int64_t j, double beta, double *loss) {
    const double p = exp(e->s[j]), q = exp(e->t[j]);
    double student, teacher;
    *loss = 0.0;
    if (beta == 1.0) {
        if (p > 0.0) *loss = p * (e->s[j] - e->t[j]);
        return p > 0.0 ? e->s[j] - e->t[j] : 0.0;
    }
    if (p == 0.0 && q == 0.0) return 0.0;
    xdi_loss_log_ratios(e->s[j], e->t[j], beta, &student, &teacher);
    if (q > 0.0) *loss += beta * q * teacher;
    if (p > 0.0) *loss += (1.0 - beta) * p * student;
    return p > 0.0 ? (1.0 - beta) * student : 0.0;
}

/* Reverse KL and JSD: A = S r, gradient S ((r - c) - sum S (r - c)), with c the r of the entry with most
 * mass, so that nothing cancels on nearly one-hot rows. What is not an entry has A = 0: r = 0 beside r + 1 of
 * the entries. */
static void xdi_topk_backward(xdi_topk_entries *e, bool zero_outside, bool renormalised, double beta,
                              double weight, xd_topk_row *row) {
    const double one = beta == 1.0 && !zero_outside && !renormalised ? 1.0 : 0.0;
    double loss, outside = zero_outside ? 100.0 : 0.0, offset = outside, most = e->outside_mass, mean;
    if (e->tail) {
        const double r = xdi_topk_ratio(e, e->k, beta, &loss);
        row->loss += weight * loss;
        if (e->tail_flows) offset = outside = r + one;
    }
    if (renormalised) most = -1.0;
    for (int64_t j = 0; j < e->k; j++) {
        if (e->ids[j] < 0 || !(exp(e->s[j]) > most)) continue;
        most = exp(e->s[j]);
        offset = xdi_topk_ratio(e, j, beta, &loss) + one;
    }
    mean =
        renormalised ? 0.0 : (outside - offset) * e->outside_mass + (zero_outside ? e->outside_entropy : 0.0);
    for (int64_t j = 0; j < e->k; j++) {
        if (e->ids[j] < 0) continue;
        const double r = xdi_topk_ratio(e, j, beta, &loss) + one;
        row->loss += weight * loss;
        if (e->s[j] > -INFINITY) mean += exp(e->s[j]) * (r - offset);
    }
    for (int64_t j = 0; j < e->k; j++)
        if (e->ids[j] >= 0)
            e->g[j] += weight * exp(e->s[j]) * (xdi_topk_ratio(e, j, beta, &loss) + one - offset - mean);
    row->outside += renormalised ? 0.0 : weight * (outside - offset - mean);
    if (!zero_outside) return;
    row->entropy += weight;
    row->loss += weight * (e->outside_entropy + 100.0 * e->outside_mass);
}

static void xdi_topk_divergence_row(const xd_topk_args *a, int64_t r, xdi_topk_entries *e, xd_topk_row *row) {
    const bool renormalised = a->mode == XD_TOPK_RENORMALISE, zero = a->mode == XD_TOPK_ZERO_OUTSIDE;
    double beta = a->beta;
    if (a->divergence == XD_KL_FORWARD) beta = 0.0;
    if (a->divergence == XD_KL_REVERSE) beta = 1.0;
    xdi_topk_student_entries(a, r, e);
    xdi_topk_teacher_entries(a, r, e);
    if (a->divergence == XD_JSD) {
        xdi_topk_backward(e, false, renormalised, beta, 1.0, row);
    } else {
        if (beta != 1.0) xdi_topk_forward(e, 1.0 - beta, row);
        if (beta != 0.0) xdi_topk_backward(e, zero, renormalised, 1.0, beta, row);
    }
    if (renormalised) row->outside = 0.0;
    row->max = a->side[r].max;
    row->log = e->log;
    row->student_mass = e->student_mass;
    row->teacher_mass = e->teacher_mass;
    if (!isfinite(row->loss)) row->finding = (int)XD_ROW_NOT_FINITE;
}

static bool xdi_topk_has_entries(const int64_t *ids, int64_t k) {
    for (int64_t j = 0; j < k; j++)
        if (ids[j] >= 0) return true;
    return false;
}

static xd_result xdi_cpu_topk_divergence(const xd_launch *launch, const xd_topk_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        xd_topk_row *row = a->row + r;
        xdi_topk_entries e;
        memset(row, 0, sizeof *row);
        memset(&e, 0, sizeof e);
        e.s = a->scratch;
        e.t = e.s + a->k + 1;
        e.g = e.t + a->k + 1;
        e.ids = a->ids + r * a->k;
        e.k = a->k;
        e.tail = a->mode == XD_TOPK_TAIL;
        for (int64_t j = 0; j <= a->k; j++) e.g[j] = 0.0;
        for (int64_t j = 0; j <= a->k; j++) e.s[j] = -INFINITY;
        row->finding = a->side[r].finding;
        if (a->teacher_side && row->finding == (int)XD_ROW_FINE) row->finding = a->teacher_side[r].finding;
        if (a->row_scale[r] != 0.0 && row->finding == (int)XD_ROW_FINE && xdi_topk_has_entries(e.ids, a->k))
            xdi_topk_divergence_row(a, r, &e, row);
        if (row->finding != (int)XD_ROW_FINE) row->loss = 0.0;
        memcpy(a->slots + r * a->k, e.g, (size_t)a->k * sizeof *e.g);
        if (a->log_probs) memcpy(a->log_probs + r * a->k, e.s, (size_t)a->k * sizeof *e.s);
    }
    return XD_OK;
}

static void xdi_topk_grad_row(const xd_topk_args *a, int64_t r, double scale) {
    const int64_t begin = a->offsets[a->shard], end = a->offsets[a->shard + 1];
    const xd_topk_row *row = a->row + r;
    const int64_t *ids = a->ids + r * a->k;
    for (int64_t c = begin; c < end; c++) {
        double g = 0.0;
        if (row->outside != 0.0 || row->entropy != 0.0) {
            const double log_p =
                (xdi_loss_load(&a->logits, r, c - begin) - row->max) / a->temperature - row->log;
            const double p = exp(log_p);
            g = p > 0.0 ? p * (row->outside + (row->entropy != 0.0 ? row->entropy * log_p : 0.0)) : 0.0;
        }
        xdi_loss_store(&a->gradient, r, c - begin, scale * g);
    }
    for (int64_t j = 0; j < a->k; j++)
        if (ids[j] >= begin && ids[j] < end)
            xdi_loss_store(&a->gradient, r, ids[j] - begin, scale * a->slots[r * a->k + j]);
}

static xd_result xdi_cpu_topk_grad(const xd_launch *launch, const xd_topk_args *a) {
    const int64_t columns = a->offsets[a->shard + 1] - a->offsets[a->shard];
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        const bool counts = a->row_scale[r] != 0.0 && a->row[r].finding == (int)XD_ROW_FINE;
        if (counts) xdi_topk_grad_row(a, r, a->weight * a->row_scale[r] / a->temperature);
        for (int64_t c = counts ? columns : 0; c < a->gradient.cols; c++)
            xdi_loss_store(&a->gradient, r, c, 0.0);
    }
    return XD_OK;
}

XD_PRIVATE int64_t xdi_select_insert(double *values, int64_t *ids, int64_t n, int64_t k, double value,
                                     int64_t id) {
    int64_t at = n < k ? n : k - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
    return n < k ? n + 1 : k;
}

static xd_result xdi_cpu_select(const xd_launch *launch, const xd_select_args *a) {
    (void)launch;
    for (int64_t r = 0; r < a->logits.rows; r++) {
        double *values = a->values + r * a->k;
        int64_t *ids = a->ids + r * a->k, n = 0;
        for (int64_t c = 0; c < a->columns; c++) {
            double value = xdi_loss_load(&a->logits, r, c);
            if (isnan(value)) value = -INFINITY;
            if (n < a->k || value > values[a->k - 1])
                n = xdi_select_insert(values, ids, n, a->k, value, a->first + c);
        }
        for (; n < a->k; n++) {
            values[n] = -INFINITY;
            ids[n] = -1;
        }
    }
    return XD_OK;
}

/* The top-k entries of the plain table. */
XD_PRIVATE void xdi_topk_kernels_fill(xd_loss_kernels *kernels) {
    kernels->topk_maxima = xdi_cpu_topk_maxima;
    kernels->topk_stats = xdi_cpu_topk_stats;
    kernels->topk_merge = xdi_cpu_topk_merge;
    kernels->topk_divergence = xdi_cpu_topk_divergence;
    kernels->topk_grad = xdi_cpu_topk_grad;
    kernels->select = xdi_cpu_select;
}

/* >>kernel/optimizer_cpu.c */

#include <math.h>
#include <string.h>

/* Narrow arrays are widened and rounded back in chunks on the stack; f32 arrays are used where they lie. */
enum { XDI_UPDATE_CHUNK = 512 };

/* A product that is added to something later would be fused with the addition under -ffp-contract=fast, which
 * changes bits. Passing it through here ends the expression. */
static float xdi_update_rounded(float product) {
#if defined(__GNUC__) && defined(__x86_64__)
    __asm__("" : "+x"(product));
    return product;
#elif defined(__GNUC__) && defined(__aarch64__)
    __asm__("" : "+w"(product));
    return product;
#else
    volatile float stored = product;
    return stored;
#endif
}

static bool xdi_update_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

/* Elements [at, at + n) of an array as f32: the array itself, or `buffer` filled with widened copies. */
static const float *xdi_update_widen(const void *data, xd_dtype dtype, int64_t at, int64_t n, float *buffer) {
    if (dtype == XD_DTYPE_F32) return (const float *)data + at;
    const uint16_t *half = (const uint16_t *)data + at;
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) buffer[i] = xd_f32_from_bf16(half[i]);
    else
        for (int64_t i = 0; i < n; i++) buffer[i] = xd_f32_from_f16(half[i]);
    return buffer;
}

static void xdi_update_narrow(const float *values, void *data, xd_dtype dtype, int64_t at, int64_t n) {
    if (dtype == XD_DTYPE_F32) {
        memcpy((float *)data + at, values, (size_t)n * sizeof *values);
        return;
    }
    uint16_t *half = (uint16_t *)data + at;
    if (dtype == XD_DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) half[i] = xd_bf16_from_f32(values[i]);
    else
        for (int64_t i = 0; i < n; i++) half[i] = xd_f16_from_f32(values[i]);
}

static int64_t xdi_update_chunk(int64_t count, int64_t at) {
    const int64_t room = XDI_UPDATE_CHUNK;
    return count - at < room ? count - at : room;
}

static xd_result xdi_update_check(const xd_launch *launch, const xd_update_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        XDI_REQUIRE(launch->ctx, xdi_update_takes(a->gradient_dtype), XD_ERROR_DTYPE,
                    "array %lld: gradients are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->gradient_dtype));
        XDI_REQUIRE(launch->ctx, !a->value || xdi_update_takes(a->value_dtype), XD_ERROR_DTYPE,
                    "array %lld: parameters are F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(a->value_dtype));
    }
    return XD_OK;
}

/* The gradient an update works with: scaled and turned as asked. */
static float xdi_update_gradient(const xd_update_args *args, float gradient) {
    if (args->gradient_scale) gradient = xdi_update_rounded(gradient * *args->gradient_scale);
    return args->maximize ? -gradient : gradient;
}

/* adam: one step of AdamW or, with couple_decay, of Adam with L2 regularisation. All f32, in this order:
 *   g   = gradient * scale                        (no scale: no multiplication)
 *   P   = p * decay                               AdamW
 *   g   = fma(weight_decay, p, g),  P = p         L2 form
 *   m   = fma(1 - beta1, g - m, m)
 *   v   = fma(1 - beta2, g * g, beta2 * v)
 *   p   = fma(-step_size, m / (sqrt(v) / root_correction + eps), P) */
static void xdi_cpu_adam_chunk(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                               int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float p = a->master[at + i];
        float m = a->first[at + i], v = a->second[at + i];
        float g = xdi_update_gradient(args, gradient[i]);
        if (args->couple_decay) g = fmaf(a->weight_decay, p, g);
        const float kept = args->couple_decay ? p : p * a->decay;
        m = fmaf(args->one_minus_beta1, g - m, m);
        v = fmaf(args->one_minus_beta2, g * g, args->beta2 * v);
        const float denominator = sqrtf(v) / a->root_correction + args->eps;
        a->master[at + i] = fmaf(-a->step_size, m / denominator, kept);
        a->first[at + i] = m;
        a->second[at + i] = v;
    }
}

/* sgd: stochastic gradient descent with momentum, neither dampened nor Nesterov's. All f32, in this order:
 *   g      = gradient * scale,  then fma(weight_decay, p, g)
 *   buffer = g at the first gradient, afterwards fma(momentum, buffer, g)
 *   p      = fma(-step_size, buffer, p) */
static void xdi_cpu_sgd_chunk(const xd_update_args *args, const xd_update_array *a, const float *gradient,
                              int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float p = a->master[at + i];
        const float g = fmaf(a->weight_decay, p, xdi_update_gradient(args, gradient[i]));
        const float buffer = a->fresh ? g : fmaf(args->momentum, a->first[at + i], g);
        a->first[at + i] = buffer;
        a->master[at + i] = fmaf(-a->step_size, buffer, p);
    }
}

typedef void (*xdi_update_chunk_function)(const xd_update_args *, const xd_update_array *, const float *,
                                          int64_t, int64_t);

/* Runs a chunk function over every array and writes the narrow copies. */
static xd_result xdi_update_run(const xd_launch *launch, const xd_update_args *args,
                                xdi_update_chunk_function run) {
    float widened[XDI_UPDATE_CHUNK];
    XDI_TRY(xdi_update_check(launch, args));
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_update_array *a = &args->arrays[k];
        for (int64_t at = 0; at < a->count; at += XDI_UPDATE_CHUNK) {
            const int64_t n = xdi_update_chunk(a->count, at);
            run(args, a, xdi_update_widen(a->gradient, a->gradient_dtype, at, n, widened), at, n);
            if (a->value) xdi_update_narrow(a->master + at, a->value, a->value_dtype, at, n);
        }
    }
    return XD_OK;
}

static xd_result xdi_cpu_adam(const xd_launch *launch, const xd_update_args *args) {
    return xdi_update_run(launch, args, xdi_cpu_adam_chunk);
}

static xd_result xdi_cpu_sgd(const xd_launch *launch, const xd_update_args *args) {
    return xdi_update_run(launch, args, xdi_cpu_sgd_chunk);
}

/* lerp: target <- target + w (source - target), w = 1 - keep formed in double and rounded once to the
 * arithmetic's type (1.0f - keep would be off by 0.02 % for 0.9999). The source is rounded to the target's
 * dtype first.
 *   d = source - target
 *   |w| <  0.5   fma(w, d, target)          w = 0 keeps the target, to the bit
 *   |w| >= 0.5   fma(w - 1, d, source)      w = 1 yields the source, to the bit
 * weighted_sum: fma(1 - keep, source, keep * target), the factors rounded once. */
static float xdi_cpu_lerp_f32(const xd_lerp_args *args, float target, float source) {
    const float weight = (float)(1.0 - args->keep);
    if (args->weighted_sum) return fmaf(weight, source, (float)args->keep * target);
    const float difference = source - target;
    return fabsf(weight) < 0.5f ? fmaf(weight, difference, target) : fmaf(weight - 1.0f, difference, source);
}

static double xdi_cpu_lerp_f64(const xd_lerp_args *args, double target, double source) {
    const double weight = 1.0 - args->keep;
    if (args->weighted_sum) return fma(weight, source, args->keep * target);
    const double difference = source - target;
    return fabs(weight) < 0.5 ? fma(weight, difference, target) : fma(weight - 1.0, difference, source);
}

/* The source as the target's dtype would hold it, widened again. */
static float xdi_cpu_lerp_source(const xd_lerp_array *a, int64_t index) {
    const float value = (float)xd_load_f64(a->source, a->source_dtype, index);
    if (a->target_dtype == XD_DTYPE_BF16) return xd_f32_from_bf16(xd_bf16_from_f32(value));
    if (a->target_dtype == XD_DTYPE_F16) return xd_f32_from_f16(xd_f16_from_f32(value));
    return value;
}

static void xdi_cpu_lerp_array(const xd_lerp_args *args, const xd_lerp_array *a) {
    float values[XDI_UPDATE_CHUNK];
    if (a->target_dtype == XD_DTYPE_F64) {
        double *target = (double *)a->target;
        for (int64_t i = 0; i < a->count; i++)
            target[i] = xdi_cpu_lerp_f64(args, target[i], xd_load_f64(a->source, a->source_dtype, i));
        return;
    }
    for (int64_t at = 0; at < a->count; at += XDI_UPDATE_CHUNK) {
        const int64_t n = xdi_update_chunk(a->count, at);
        const float *target = xdi_update_widen(a->target, a->target_dtype, at, n, values);
        for (int64_t i = 0; i < n; i++)
            values[i] = xdi_cpu_lerp_f32(args, target[i], xdi_cpu_lerp_source(a, at + i));
        xdi_update_narrow(values, a->target, a->target_dtype, at, n);
    }
}

static xd_result xdi_cpu_lerp(const xd_launch *launch, const xd_lerp_args *args) {
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_lerp_array *a = &args->arrays[k];
        XDI_REQUIRE(launch->ctx,
                    (xdi_update_takes(a->target_dtype) || a->target_dtype == XD_DTYPE_F64) &&
                        (xdi_update_takes(a->source_dtype) || a->source_dtype == XD_DTYPE_F64),
                    XD_ERROR_DTYPE, "array %lld: cannot average %s into %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    for (int64_t k = 0; k < args->array_count; k++) xdi_cpu_lerp_array(args, &args->arrays[k]);
    return XD_OK;
}

static bool xdi_cpu_cast_takes(xd_dtype dtype) {
    return xdi_update_takes(dtype) || dtype == XD_DTYPE_F64 || dtype == XD_DTYPE_I32 ||
           dtype == XD_DTYPE_I64 || dtype == XD_DTYPE_U8 || dtype == XD_DTYPE_BOOL;
}

/* cast: target[i] = source[i], rounded to nearest even where the target is narrower. */
static xd_result xdi_cpu_cast(const xd_launch *launch, const xd_cast_array *arrays, int64_t array_count) {
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        XDI_REQUIRE(launch->ctx,
                    a->target_dtype == a->source_dtype ||
                        (xdi_cpu_cast_takes(a->target_dtype) && xdi_cpu_cast_takes(a->source_dtype)),
                    XD_ERROR_DTYPE, "array %lld: cannot convert %s to %s", (long long)k,
                    xd_dtype_name(a->source_dtype), xd_dtype_name(a->target_dtype));
    }
    for (int64_t k = 0; k < array_count; k++) {
        const xd_cast_array *a = &arrays[k];
        if (a->count == 0) continue; /* an empty array may be NULL */
        if (a->target_dtype == a->source_dtype)
            memcpy(a->target, a->source, (size_t)a->count * xd_dtype_size(a->target_dtype));
        else
            for (int64_t i = 0; i < a->count; i++)
                xd_store_f64(a->target, a->target_dtype, i, xd_load_f64(a->source, a->source_dtype, i));
    }
    return XD_OK;
}

/* scale: x <- x * factor, one f32 rounding and one more where x is narrower. */
static xd_result xdi_cpu_scale(const xd_launch *launch, const xd_scale_args *args) {
    float values[XDI_UPDATE_CHUNK];
    XDI_REQUIRE(launch->ctx, xdi_update_takes(args->dtype), XD_ERROR_DTYPE,
                "scaling takes F32, BF16 or F16, not %s", xd_dtype_name(args->dtype));
    for (int64_t at = 0; at < args->count; at += XDI_UPDATE_CHUNK) {
        const int64_t n = xdi_update_chunk(args->count, at);
        const float *x = xdi_update_widen(args->data, args->dtype, at, n, values);
        for (int64_t i = 0; i < n; i++) values[i] = x[i] * args->factor;
        xdi_update_narrow(values, args->data, args->dtype, at, n);
    }
    return XD_OK;
}

/* Adds mantissa * 2^(bit - 320) to the limbs. mantissa < 2^48, so a limb grows by less than 2^33 a call. */
static void xdi_norm_add(int64_t *limbs, uint64_t mantissa, int bit) {
    const int limb = bit / 32, shift = bit % 32;
    const uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    limbs[limb] += (int64_t)(low & 0xffffffffu);
    limbs[limb + 1] += (int64_t)(low >> 32) + (int64_t)(high & 0xffffffffu);
    limbs[limb + 2] += (int64_t)(high >> 32);
}

/* Leaves every limb but the last in [0, 2^32). The value stays the same. */
static void xdi_norm_carry(int64_t *limbs) {
    for (int k = 0; k + 1 < XD_NORM_LIMBS; k++) {
        limbs[k + 1] += limbs[k] >> 32; /* no limb is ever negative */
        limbs[k] &= 0xffffffff;
    }
}

/* |x| or its square, added exactly: the f32 is mantissa * 2^exponent with a 24-bit mantissa. */
static void xdi_norm_add_f32(int64_t *limbs, float x, bool square) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int biased = (int)((bits >> 23) & 0xffu);
    const uint64_t mantissa = (bits & 0x7fffffu) | (biased ? 0x800000u : 0u);
    const int exponent = (biased ? biased : 1) - 150;
    if (square)
        xdi_norm_add(limbs, mantissa * mantissa, 2 * exponent + 320);
    else
        xdi_norm_add(limbs, mantissa, exponent + 320);
}

/* A chunk of finite and other values. The square of an f32 is exact in double and can neither overflow nor
 * vanish there, so the plain sum needs no scaling. */
static double xdi_norm_chunk(const xd_norm_args *args, const float *x, int64_t n, bool replica,
                             xd_norm_sum *sum) {
    double subtotal = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            sum->not_finite++;
            sum->nan += isnan(x[i]) ? 1 : 0;
        } else if (!replica) {
            const double magnitude = fabs((double)x[i]);
            if (args->type == XD_NORM_MAX)
                sum->largest = magnitude > sum->largest ? magnitude : sum->largest;
            else if (args->exact)
                xdi_norm_add_f32(sum->limbs, x[i], args->type == XD_NORM_L2);
            else
                subtotal += args->type == XD_NORM_L2 ? magnitude * magnitude : magnitude;
        }
    }
    return subtotal;
}

/* norm: what these arrays add to (sum |x|^p)^(1/p), p = 1 or 2, or to max |x|. Either a double sum in array
 * order, which depends on how arrays are cut, or an exact one, which does not. */
static xd_result xdi_cpu_norm(const xd_launch *launch, const xd_norm_args *args, xd_norm_sum *sum) {
    float widened[XDI_UPDATE_CHUNK];
    for (int64_t k = 0; k < args->array_count; k++)
        XDI_REQUIRE(launch->ctx, xdi_update_takes(args->arrays[k].dtype), XD_ERROR_DTYPE,
                    "array %lld: norms take F32, BF16 or F16, not %s", (long long)k,
                    xd_dtype_name(args->arrays[k].dtype));
    for (int64_t k = 0; k < args->array_count; k++) {
        const xd_norm_array *a = &args->arrays[k];
        for (int64_t at = 0; at < a->count; at += XDI_UPDATE_CHUNK) {
            const int64_t n = xdi_update_chunk(a->count, at);
            const float *x = xdi_update_widen(a->data, a->dtype, at, n, widened);
            sum->sum += xdi_norm_chunk(args, x, n, a->replica, sum);
            xdi_norm_carry(sum->limbs);
        }
    }
    return XD_OK;
}

XD_API double xd_norm_limbs_value(const int64_t limbs[XD_NORM_LIMBS]) {
    int64_t carried[XD_NORM_LIMBS];
    memcpy(carried, limbs, sizeof carried);
    xdi_norm_carry(carried);
    int top = XD_NORM_LIMBS - 1;
    while (top > 1 && carried[top] == 0) top--; /* bit 64 and above: squares begin at bit 22 */
    uint64_t head = ((uint64_t)carried[top] << 32) | (uint64_t)carried[top - 1];
    if (head == 0) return 0.0;
    uint64_t below = top > 1 ? (uint64_t)carried[top - 2] : 0;
    int shift = 0; /* the leading bit to the top, so that 11 bits lie below a double's last */
    while (!(head >> 63)) {
        head = (head << 1) | ((below >> 31) & 1u);
        below = (below << 1) & 0xffffffffu;
        shift++;
    }
    bool rest = below != 0;
    for (int k = 0; k + 2 < top; k++) rest = rest || carried[k] != 0;
    return ldexp((double)(head | (rest ? 1u : 0u)), 32 * (top - 1) - shift - 320);
}

static const xd_optimizer_kernels xdi_cpu_optimizer_table = {
    xdi_cpu_adam, xdi_cpu_sgd, xdi_cpu_lerp, xdi_cpu_cast, xdi_cpu_scale, xdi_cpu_norm,
};

XD_API const xd_optimizer_kernels *xd_optimizer_kernels_cpu(void) {
    return &xdi_cpu_optimizer_table;
}

/* >>kernel/matmul_cpu.c */

#include <string.h>

#if defined(XDI_X86)
#include <immintrin.h>
#endif

/* The blocked matrix product. A processor multiplies much faster than it reads memory, so the product is cut
 * into tiles of `rows` x `cols` sums that stay in registers while k runs; what a tile reads is first copied
 * ("packed") into the order in which it is read:
 *
 *     for each block of BLOCK_N columns and BLOCK_K terms:
 *         pack that block of b                              (it stays in the L2 cache)
 *         for each group of `rows` rows:
 *             pack those rows of a                          (they stay in the L1 cache)
 *             for each group of `cols` columns:             one tile = one call of the kernel
 *
 * Packing pads with zeros, so a kernel never sees an odd size, and widens or narrows on the way. Kernels
 * differ in the tile's size and in the instructions; everything else is shared. */

enum {
    XDI_MATMUL_BLOCK_K = 256, /* terms that a packed block covers; even */
    XDI_MATMUL_BLOCK_N = 512, /* columns that it covers; a multiple of every kernel's cols */
    XDI_MATMUL_MOST_ROWS = 8,
    XDI_MATMUL_MOST_COLS = 32
};

/* The sums of a tile live in registers only if the short loops over them disappear. clang sees that by
 * itself, gcc must be asked. */
#if defined(__GNUC__) && !defined(__clang__)
#define XDI_MATMUL_UNROLL _Pragma("GCC unroll 8")
#else
#define XDI_MATMUL_UNROLL
#endif

/* tile[rows, cols] (+)= sum over p < k of a[p, i] b[p, j], both packed; pairs: terms 2p and 2p + 1 of a line
 * lie side by side as bf16. */
typedef void (*xdi_matmul_tile)(int64_t k, const void *a, const void *b, float *tile, int64_t stride,
                                bool accumulate);

typedef struct xdi_matmul_kernel {
    xdi_matmul_tile run;
    int64_t rows, cols;
    bool pairs;
} xdi_matmul_kernel;

/* ---- tiles ---- */

static void xdi_matmul_tile_portable(int64_t k, const void *packed_a, const void *packed_b, float *tile,
                                     int64_t stride, bool accumulate) {
    const float *a = (const float *)packed_a, *b = (const float *)packed_b;
    float sum[4][8];
    memset(sum, 0, sizeof sum);
    for (int64_t p = 0; p < k; p++, a += 4, b += 8) XDI_MATMUL_UNROLL
    for (int i = 0; i < 4; i++) XDI_MATMUL_UNROLL
    for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j++) {
            float *out = tile + i * stride + j;
            *out = accumulate ? *out + sum[i][j] : sum[i][j];
        }
}

#if defined(XDI_X86)
/* 6 x 16: twelve sums of eight lanes, two for b and one for a leave one of the sixteen registers free. */
__attribute__((target("avx2,fma"))) static void xdi_matmul_tile_avx2(int64_t k, const void *packed_a,
                                                                     const void *packed_b, float *tile,
                                                                     int64_t stride, bool accumulate) {
    const float *a = (const float *)packed_a, *b = (const float *)packed_b;
    __m256 sum[6][2];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 6; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += 6, b += 16) {
        const __m256 left = _mm256_loadu_ps(b), right = _mm256_loadu_ps(b + 8);
        XDI_MATMUL_UNROLL
        for (int i = 0; i < 6; i++) {
            const __m256 factor = _mm256_set1_ps(a[i]);
            sum[i][0] = _mm256_fmadd_ps(factor, left, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(factor, right, sum[i][1]);
        }
    }
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 6; i++) XDI_MATMUL_UNROLL
    for (int j = 0; j < 2; j++) {
        float *out = tile + i * stride + 8 * j;
        _mm256_storeu_ps(out, accumulate ? _mm256_add_ps(_mm256_loadu_ps(out), sum[i][j]) : sum[i][j]);
    }
}

__attribute__((target("avx512f"))) static inline void
xdi_matmul_store_avx512(__m512 (*sum)[2], float *tile, int64_t stride, bool accumulate) {
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i++) XDI_MATMUL_UNROLL
    for (int j = 0; j < 2; j++) {
        float *out = tile + i * stride + 16 * j;
        _mm512_storeu_ps(out, accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sum[i][j]) : sum[i][j]);
    }
}

/* 8 x 32: sixteen sums of sixteen lanes. */
__attribute__((target("avx512f"))) static void xdi_matmul_tile_avx512(int64_t k, const void *packed_a,
                                                                      const void *packed_b, float *tile,
                                                                      int64_t stride, bool accumulate) {
    const float *a = (const float *)packed_a, *b = (const float *)packed_b;
    __m512 sum[8][2];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++, a += 8, b += 32) {
        const __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + 16);
        XDI_MATMUL_UNROLL
        for (int i = 0; i < 8; i++) {
            const __m512 factor = _mm512_set1_ps(a[i]);
            sum[i][0] = _mm512_fmadd_ps(factor, left, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(factor, right, sum[i][1]);
        }
    }
    xdi_matmul_store_avx512(sum, tile, stride, accumulate);
}

/* The same tile in pairs of bf16: twice the terms an instruction. */
__attribute__((target("avx512f,avx512bf16"))) static void
xdi_matmul_tile_bf16(int64_t k, const void *packed_a, const void *packed_b, float *tile, int64_t stride,
                     bool accumulate) {
    const int32_t *a = (const int32_t *)packed_a, *b = (const int32_t *)packed_b;
    __m512 sum[8][2];
    XDI_MATMUL_UNROLL
    for (int i = 0; i < 8; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p += 2, a += 8, b += 32) {
        const __m512bh left = (__m512bh)_mm512_loadu_si512((const void *)b);
        const __m512bh right = (__m512bh)_mm512_loadu_si512((const void *)(b + 16));
        XDI_MATMUL_UNROLL
        for (int i = 0; i < 8; i++) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(a[i]);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], factor, left);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], factor, right);
        }
    }
    xdi_matmul_store_avx512(sum, tile, stride, accumulate);
}
#endif

static xdi_matmul_kernel xdi_matmul_kernel_of(xd_cpu_level level, bool bf16) {
    xdi_matmul_kernel kernel = { xdi_matmul_tile_portable, 4, 8, false };
#if defined(XDI_X86)
    if (level == XD_CPU_AVX2) {
        kernel.run = xdi_matmul_tile_avx2;
        kernel.rows = 6;
        kernel.cols = 16;
    } else if ((int)level >= (int)XD_CPU_AVX512) {
        kernel.pairs = bf16 && level == XD_CPU_AVX512_BF16;
        kernel.run = kernel.pairs ? xdi_matmul_tile_bf16 : xdi_matmul_tile_avx512;
        kernel.rows = 8;
        kernel.cols = 32;
    }
#else
    (void)level;
    (void)bf16;
#endif
    return kernel;
}

/* ---- packing ---- */

/* `lines` <= width lines of `terms` numbers each: a line is a row of a or a column of b. */
typedef struct xdi_matmul_lines {
    const void *data;
    xd_dtype dtype;
    int64_t lines, terms;
    int64_t line_stride, term_stride;
} xdi_matmul_lines;

static inline float xdi_matmul_widen(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t xdi_matmul_narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u); /* a NaN stays one */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* packed[p * width + line]. Lines that lie side by side are copied eight at a time, all others one after the
 * other, so that memory is read in its own order. */
static void xdi_matmul_pack_f32(const xdi_matmul_lines *x, int64_t width, float *packed) {
    const float *data = (const float *)x->data;
    int64_t line = 0;
    for (; x->line_stride == 1 && line + 8 <= x->lines; line += 8)
        for (int64_t p = 0; p < x->terms; p++)
            memcpy(packed + p * width + line, data + p * x->term_stride + line, 8 * sizeof *packed);
    for (; line < x->lines; line++)
        for (int64_t p = 0; p < x->terms; p++)
            packed[p * width + line] = data[line * x->line_stride + p * x->term_stride];
}

static void xdi_matmul_pack_widened(const xdi_matmul_lines *x, int64_t width, float *packed) {
    const uint16_t *data = (const uint16_t *)x->data;
    int64_t line = 0;
    for (; x->line_stride == 1 && line + 8 <= x->lines; line += 8)
        for (int64_t p = 0; p < x->terms; p++)
            for (int64_t i = 0; i < 8; i++)
                packed[p * width + line + i] = xdi_matmul_widen(data[p * x->term_stride + line + i]);
    for (; line < x->lines; line++)
        for (int64_t p = 0; p < x->terms; p++)
            packed[p * width + line] = xdi_matmul_widen(data[line * x->line_stride + p * x->term_stride]);
}

static inline uint32_t xdi_matmul_bf16(const void *data, bool narrow, int64_t at) {
    return narrow ? (uint32_t)((const uint16_t *)data)[at]
                  : (uint32_t)xdi_matmul_narrow(((const float *)data)[at]);
}

/* Terms p and p + 1 (`both`) of every line. `narrow`, the dtype, is a constant where this is called. */
static inline void xdi_matmul_pair_up(const xdi_matmul_lines *x, bool narrow, int64_t p, bool both,
                                      uint32_t *packed) {
    const int64_t first = p * x->term_stride, second = both ? first + x->term_stride : first;
    const uint32_t mask = both ? 0xffffffffu : 0xffffu;
    for (int64_t line = 0; line < x->lines; line++)
        packed[line] = (xdi_matmul_bf16(x->data, narrow, line * x->line_stride + first) |
                        xdi_matmul_bf16(x->data, narrow, line * x->line_stride + second) << 16) &
                       mask;
}

/* Pairs of bf16 numbers that lie side by side already: one copy of 32 bits each. */
static void xdi_matmul_pack_adjacent(const xdi_matmul_lines *x, int64_t width, uint32_t *packed) {
    for (int64_t line = 0; line < x->lines; line++) {
        const uint16_t *data = (const uint16_t *)x->data + line * x->line_stride;
        for (int64_t p = 0; p + 1 < x->terms; p += 2)
            memcpy(packed + p / 2 * width + line, data + p, sizeof *packed);
        if (x->terms % 2) packed[x->terms / 2 * width + line] = data[x->terms - 1];
    }
}

/* packed[p / 2 * width + line] holds terms p (low half) and p + 1 of a line; the term behind the last is
 * 0. */
static void xdi_matmul_pack_pairs(const xdi_matmul_lines *x, int64_t width, uint32_t *packed) {
    if (x->dtype == XD_DTYPE_BF16 && x->term_stride == 1) {
        xdi_matmul_pack_adjacent(x, width, packed);
        return;
    }
    for (int64_t p = 0; p < x->terms; p += 2, packed += width) {
        if (x->dtype == XD_DTYPE_BF16)
            xdi_matmul_pair_up(x, true, p, p + 1 < x->terms, packed);
        else
            xdi_matmul_pair_up(x, false, p, p + 1 < x->terms, packed);
    }
}

static void xdi_matmul_pack(const xdi_matmul_kernel *kernel, const xdi_matmul_lines *x, int64_t width,
                            void *packed) {
    if (x->lines < width) memset(packed, 0, (size_t)(x->terms + 1) * (size_t)width * (kernel->pairs ? 2 : 4));
    if (kernel->pairs)
        xdi_matmul_pack_pairs(x, width, (uint32_t *)packed);
    else if (x->dtype == XD_DTYPE_F32)
        xdi_matmul_pack_f32(x, width, (float *)packed);
    else
        xdi_matmul_pack_widened(x, width, (float *)packed);
}

static const void *xdi_matmul_at(const xd_matrix *x, int64_t row, int64_t col) {
    return (const char *)x->data +
           (row * x->row_stride + col * x->col_stride) * (x->dtype == XD_DTYPE_F32 ? 4 : 2);
}

static xdi_matmul_lines xdi_matmul_rows(const xd_matrix *a, int64_t i, int64_t rows, int64_t k0, int64_t k) {
    xdi_matmul_lines x = { xdi_matmul_at(a, i, k0), a->dtype, rows, k, a->row_stride, a->col_stride };
    return x;
}

static xdi_matmul_lines xdi_matmul_columns(const xd_matrix *b, int64_t j, int64_t cols, int64_t k0,
                                           int64_t k) {
    xdi_matmul_lines x = { xdi_matmul_at(b, k0, j), b->dtype, cols, k, b->col_stride, b->row_stride };
    return x;
}

/* ---- the product ---- */

static int64_t xdi_matmul_smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* One tile at the edge of the result: computed aside in full, then only what exists is copied. */
static void xdi_matmul_edge(const xdi_matmul_kernel *kernel, int64_t k, const void *a, const void *b,
                            float *out, int64_t stride, int64_t rows, int64_t cols, bool accumulate) {
    float tile[XDI_MATMUL_MOST_ROWS * XDI_MATMUL_MOST_COLS];
    kernel->run(k, a, b, tile, kernel->cols, false);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            const float value = tile[i * kernel->cols + j];
            out[i * stride + j] = accumulate ? out[i * stride + j] + value : value;
        }
}

/* Where the packed blocks lie; a panel is `cols` columns of the block of b, all its terms. */
typedef struct xdi_matmul_blocks {
    char *a, *b;
    int64_t panel_bytes;
    int64_t k0, k, n0, n;
} xdi_matmul_blocks;

/* All rows of the result for one block of b, which is packed already. */
static void xdi_matmul_block(const xdi_matmul_kernel *kernel, const xd_matmul_args *args,
                             const xdi_matmul_blocks *at, bool accumulate) {
    for (int64_t i = 0; i < args->a.rows; i += kernel->rows) {
        const int64_t rows = xdi_matmul_smaller(kernel->rows, args->a.rows - i);
        const xdi_matmul_lines lines = xdi_matmul_rows(&args->a, i, rows, at->k0, at->k);
        xdi_matmul_pack(kernel, &lines, kernel->rows, at->a);
        for (int64_t j = 0; j < at->n; j += kernel->cols) {
            const int64_t cols = xdi_matmul_smaller(kernel->cols, at->n - j);
            const char *b = at->b + j / kernel->cols * at->panel_bytes;
            float *tile = args->out + i * args->out_stride + at->n0 + j;
            if (rows == kernel->rows && cols == kernel->cols)
                kernel->run(at->k, at->a, b, tile, args->out_stride, accumulate);
            else
                xdi_matmul_edge(kernel, at->k, at->a, b, tile, args->out_stride, rows, cols, accumulate);
        }
    }
}

static void xdi_matmul_pack_b(const xdi_matmul_kernel *kernel, const xd_matrix *b,
                              const xdi_matmul_blocks *at) {
    for (int64_t j = 0; j < at->n; j += kernel->cols) {
        const xdi_matmul_lines lines =
            xdi_matmul_columns(b, at->n0 + j, xdi_matmul_smaller(kernel->cols, at->n - j), at->k0, at->k);
        xdi_matmul_pack(kernel, &lines, kernel->cols, at->b + j / kernel->cols * at->panel_bytes);
    }
}

static void xdi_matmul_clear(const xd_matmul_args *args) {
    for (int64_t i = 0; i < args->a.rows; i++)
        memset(args->out + i * args->out_stride, 0, (size_t)args->b.cols * sizeof *args->out);
}

static void xdi_matmul_run(const xdi_matmul_kernel *kernel, const xd_matmul_args *args, void *workspace) {
    const int64_t terms = args->a.cols, columns = args->b.cols;
    xdi_matmul_blocks at;
    at.a = (char *)workspace;
    at.b = at.a + (XDI_MATMUL_BLOCK_K + 1) * XDI_MATMUL_MOST_ROWS * sizeof(float);
    if (terms == 0 && !args->accumulate) xdi_matmul_clear(args);
    for (at.n0 = 0; at.n0 < columns; at.n0 += XDI_MATMUL_BLOCK_N) {
        at.n = xdi_matmul_smaller(XDI_MATMUL_BLOCK_N, columns - at.n0);
        for (at.k0 = 0; at.k0 < terms; at.k0 += XDI_MATMUL_BLOCK_K) {
            at.k = xdi_matmul_smaller(XDI_MATMUL_BLOCK_K, terms - at.k0);
            at.panel_bytes = (at.k + 1) * kernel->cols * (kernel->pairs ? 2 : 4);
            xdi_matmul_pack_b(kernel, &args->b, &at);
            xdi_matmul_block(kernel, args, &at, args->accumulate || at.k0 > 0);
        }
    }
}

#if defined(XD_SGEMM)
#include <limits.h>

enum { XDI_MATMUL_NO_TRANS = 111, XDI_MATMUL_TRANS = 112 }; /* the values of cblas.h */

/* True when the product could be given to XD_SGEMM: f32, one stride of each matrix is 1, sizes fit an int. */
static bool xdi_matmul_sgemm(const xd_launch *launch, const xd_matmul_args *p) {
    const bool a_plain = p->a.col_stride == 1, b_plain = p->b.col_stride == 1;
    const int64_t lda = a_plain ? p->a.row_stride : p->a.col_stride;
    const int64_t ldb = b_plain ? p->b.row_stride : p->b.col_stride;
    if (xd_ctx_settings(launch->ctx)->reduction == XD_REDUCTION_INVARIANT) return false;
    if (p->a.dtype != XD_DTYPE_F32 || p->b.dtype != XD_DTYPE_F32) return false;
    if ((!a_plain && p->a.row_stride != 1) || (!b_plain && p->b.row_stride != 1)) return false;
    if (p->a.rows == 0 || p->a.cols == 0 || p->b.cols == 0) return false;
    if (p->a.rows > INT_MAX || p->a.cols > INT_MAX || p->b.cols > INT_MAX || lda > INT_MAX || ldb > INT_MAX ||
        p->out_stride > INT_MAX)
        return false;
    XD_SGEMM(a_plain ? XDI_MATMUL_NO_TRANS : XDI_MATMUL_TRANS,
             b_plain ? XDI_MATMUL_NO_TRANS : XDI_MATMUL_TRANS, (int)p->a.rows, (int)p->b.cols,
             (int)p->a.cols, 1.0f, (const float *)p->a.data, (int)lda, (const float *)p->b.data, (int)ldb,
             p->accumulate ? 1.0f : 0.0f, p->out, (int)p->out_stride);
    return true;
}
#else
static bool xdi_matmul_sgemm(const xd_launch *launch, const xd_matmul_args *args) {
    (void)launch;
    (void)args;
    return false;
}
#endif

static bool xdi_matmul_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16;
}

static xd_result xdi_matmul_validate(xd_ctx *ctx, const xd_matmul_args *p) {
    XDI_REQUIRE(ctx, p->a.cols == p->b.rows, XD_ERROR_ARGUMENT,
                "a matrix of %lld columns times one of %lld rows", (long long)p->a.cols,
                (long long)p->b.rows);
    XDI_REQUIRE(ctx, p->a.rows >= 0 && p->a.cols >= 0 && p->b.cols >= 0, XD_ERROR_ARGUMENT,
                "a product of %lld x %lld x %lld elements", (long long)p->a.rows, (long long)p->a.cols,
                (long long)p->b.cols);
    XDI_REQUIRE(ctx, p->out_stride >= p->b.cols, XD_ERROR_ARGUMENT,
                "rows of the product are %lld elements apart and %lld long", (long long)p->out_stride,
                (long long)p->b.cols);
    XDI_REQUIRE(ctx, xdi_matmul_takes(p->a.dtype) && xdi_matmul_takes(p->b.dtype), XD_ERROR_DTYPE,
                "a product of %s and %s: F32 or BF16 is needed", xd_dtype_name(p->a.dtype),
                xd_dtype_name(p->b.dtype));
    return XD_OK;
}

XD_PRIVATE xd_result xdi_matmul_cpu(const xd_launch *launch, const xd_matmul_args *args) {
    const xdi_matmul_kernel kernel = xdi_matmul_kernel_of(xd_ctx_settings(launch->ctx)->cpu, args->bf16);
    if (kernel.pairs || !xdi_matmul_sgemm(launch, args))
        xdi_matmul_run(&kernel, args, launch->workspace);
    return XD_OK;
}

XD_API xd_matrix xd_matrix_of_rows(const xd_rows *rows) {
    xd_matrix matrix = { rows->data, rows->dtype, rows->rows, rows->cols,
                         rows->stride ? rows->stride : rows->cols, 1 };
    return matrix;
}

XD_API xd_matrix xd_matrix_transposed(xd_matrix m) {
    xd_matrix matrix = { m.data, m.dtype, m.cols, m.rows, m.col_stride, m.row_stride };
    return matrix;
}

XD_API xd_result xd_matmul(xd_ctx *ctx, const xd_matmul_args *args, void *workspace) {
    void *owned = NULL;
    xd_launch launch;
    XDI_TRY(xdi_matmul_validate(ctx, args));
    if (!workspace) workspace = owned = xd_allocate(ctx, XD_MATMUL_WORKSPACE_BYTES);
    XDI_REQUIRE(ctx, workspace, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes",
                XD_MATMUL_WORKSPACE_BYTES);
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    launch.stream = xd_ctx_settings(ctx)->stream;
    launch.workspace = workspace;
    launch.workspace_bytes = XD_MATMUL_WORKSPACE_BYTES;
    const xd_result result = xd_ctx_kernels(ctx).matmul(&launch, args);
    xd_release(ctx, owned);
    return result;
}

/* >>kernel/kernels.c */

/* A level overrides what it does better and leaves the rest as the level below has it. */
XD_API xd_kernels xd_kernels_cpu(xd_cpu_level level) {
    xd_kernels kernels;
    if (level == XD_CPU_BEST) level = xd_cpu_best();
    kernels.name = xd_cpu_level_name(level);
    kernels.device = XD_DEVICE_CPU;
    kernels.loss = xd_loss_kernels_cpu_plain();
    kernels.optimizer = *xd_optimizer_kernels_cpu();
    kernels.matmul = xdi_matmul_cpu;
    return kernels;
}

XD_API xd_kernels xd_ctx_kernels(const xd_ctx *ctx) {
    const xd_ctx_desc *settings = xd_ctx_settings(ctx);
    return settings->kernels ? *settings->kernels : xd_kernels_cpu(settings->cpu);
}


/* >>comm/internal */

/* collective.c: sum of n counts. */
XD_PRIVATE int64_t xdi_comm_total(const int64_t *counts, int n);

/* collective.c: where piece `rank` begins, in elements; displacements NULL -> back to back. */
XD_PRIVATE int64_t xdi_comm_offset(const int64_t *counts, const int64_t *displacements, int rank);

/* collective.c: elements of the group's rank `rank` out of `count` that it reduces in an all_reduce: piece
 * [*begin, *end) of `size` nearly equal ones. */
XD_PRIVATE void xdi_comm_piece(int64_t count, int size, int rank, int64_t *begin, int64_t *end);

/* collective.c: elements behind a record's `send` on this rank when pieces lie back to back. */
XD_PRIVATE int64_t xdi_comm_send_elements(const xd_collective *c, int rank, int size);

/* topology.c: cuts the next name off a list joined by ',' or '-' and returns its length; *list is NULL
 * after the last. */
XD_PRIVATE size_t xdi_topology_next(const char **list, const char **name);

/* topology.c: letters, digits and '_', not too long. */
XD_PRIVATE bool xdi_topology_name_is_valid(const char *name);

/* >>comm/collective.c */

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct xd_comm {
    xd_ctx *ctx;
    xd_transport *transport;
    xd_control *all;  /* [size], the records of the call in progress */
    uint64_t *values; /* [size], scratch of the comparison */
    int *members;     /* [size], scratch of split */
    xd_comm_counters counters;
    uint64_t sequence; /* collectives begun, send and recv not among them */
    bool is_world;     /* its first collective has the longer deadline */
    xd_result broken;  /* XD_OK, or what broke the group */
    int culprit;       /* world rank; -1 unknown */
};

static const char *const xdi_comm_kinds[] = { "nothing",        "barrier",    "broadcast",  "all_reduce",
                                              "reduce_scatter", "all_gather", "all_to_all", "gather",
                                              "scatter",        "send",       "recv",       "agree",
                                              "split" };
static const char *const xdi_comm_ops[] = { "SUM", "MAX", "MIN", "AVG" };
enum { XDI_COMM_MODES = 3 };
static const char *const xdi_comm_modes[] = { "DETERMINISTIC", "FAST", "INVARIANT" };

static const char *xdi_comm_text(const char *const *texts, size_t size, uint64_t index) {
    return index < size ? texts[index] : "(invalid)";
}

static const char *xdi_comm_kind(uint64_t kind) {
    return xdi_comm_text(xdi_comm_kinds, sizeof xdi_comm_kinds / sizeof *xdi_comm_kinds, kind);
}

/* ---- arithmetic of counts, shared with the transports ---- */

XD_PRIVATE int64_t xdi_comm_total(const int64_t *counts, int n) {
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += counts[i];
    return total;
}

XD_PRIVATE int64_t xdi_comm_offset(const int64_t *counts, const int64_t *displacements, int rank) {
    return displacements ? displacements[rank] : xdi_comm_total(counts, rank);
}

XD_PRIVATE void xdi_comm_piece(int64_t count, int size, int rank, int64_t *begin, int64_t *end) {
    const int64_t each = count / size, rest = count % size;
    *begin = rank * each + (rank < rest ? rank : rest);
    *end = *begin + each + (rank < rest ? 1 : 0);
}

static int64_t xdi_comm_nodes(const xd_leaves *leaves) {
    return leaves->total ? xd_leaves_nodes(leaves->first, leaves->count) : 1;
}

XD_PRIVATE int64_t xdi_comm_send_elements(const xd_collective *c, int rank, int size) {
    switch (c->kind) {
    case XD_COLLECTIVE_BROADCAST: return rank == c->root ? c->count : 0;
    case XD_COLLECTIVE_SEND: return c->count;
    case XD_COLLECTIVE_ALL_REDUCE: return c->count * xdi_comm_nodes(&c->leaves);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xdi_comm_total(c->send_counts, size) * xdi_comm_nodes(&c->leaves);
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_GATHER: return c->recv_counts[rank];
    case XD_COLLECTIVE_SCATTER: return rank == c->root ? xdi_comm_total(c->send_counts, size) : 0;
    case XD_COLLECTIVE_ALL_TO_ALL: return xdi_comm_total(c->send_counts, size);
    default: return 0;
    }
}

static int64_t xdi_comm_recv_elements(const xd_collective *c, int rank, int size) {
    switch (c->kind) {
    case XD_COLLECTIVE_BROADCAST: return rank == c->root ? 0 : c->count;
    case XD_COLLECTIVE_RECV:
    case XD_COLLECTIVE_ALL_REDUCE: return c->count;
    case XD_COLLECTIVE_REDUCE_SCATTER:
    case XD_COLLECTIVE_SCATTER: return c->send_counts[rank];
    case XD_COLLECTIVE_GATHER: return rank == c->root ? xdi_comm_total(c->recv_counts, size) : 0;
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_ALL_TO_ALL: return xdi_comm_total(c->recv_counts, size);
    default: return 0;
    }
}

static bool xdi_comm_reduces(xd_collective_kind kind) {
    return kind == XD_COLLECTIVE_ALL_REDUCE || kind == XD_COLLECTIVE_REDUCE_SCATTER;
}

/* The counts that must agree on all ranks; NULL for kinds that have none. */
static const int64_t *xdi_comm_shared_counts(const xd_collective *c) {
    if (c->kind == XD_COLLECTIVE_REDUCE_SCATTER || c->kind == XD_COLLECTIVE_SCATTER) return c->send_counts;
    if (c->kind == XD_COLLECTIVE_ALL_GATHER || c->kind == XD_COLLECTIVE_GATHER) return c->recv_counts;
    return NULL;
}

/* ---- local validation ---- */

static xd_result xdi_comm_validate_counts(const xd_comm *comm, const xd_collective *c, const int64_t *counts,
                                          const int64_t *displacements, const char *name) {
    const int64_t most = INT64_MAX / 64; /* room for every sum of extents in bytes */
    const int n = comm->transport->size;
    int64_t total = 0;
    XDI_REQUIRE(comm->ctx, counts, XD_ERROR_ARGUMENT, "%s: %s counts are NULL",
                xdi_comm_kind((uint64_t)c->kind), name);
    for (int r = 0; r < n; r++) {
        XDI_REQUIRE(comm->ctx, counts[r] >= 0 && counts[r] <= most - total, XD_ERROR_ARGUMENT,
                    "%s: %s count %" PRId64 " of rank %d is negative or too large",
                    xdi_comm_kind((uint64_t)c->kind), name, counts[r], r);
        total += counts[r];
        XDI_REQUIRE(comm->ctx, !displacements || (displacements[r] >= 0 && displacements[r] <= most),
                    XD_ERROR_ARGUMENT, "%s: %s displacement %" PRId64 " of rank %d is negative or too large",
                    xdi_comm_kind((uint64_t)c->kind), name, displacements[r], r);
    }
    return XD_OK;
}

static xd_result xdi_comm_validate_reduction(const xd_comm *comm, const xd_collective *c) {
    xd_ctx *ctx = comm->ctx;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const xd_leaves *l = &c->leaves;
    XDI_REQUIRE(ctx, (int)c->op >= 0 && (int)c->op <= (int)XD_AVG, XD_ERROR_ARGUMENT,
                "%s: operation %d does not exist", kind, (int)c->op);
    XDI_REQUIRE(ctx, xd_reduce_supports(c->dtype, c->op), XD_ERROR_DTYPE, "%s: %s of %s is not supported",
                kind, xdi_comm_ops[c->op], xd_dtype_name(c->dtype));
    const bool sum = c->op == XD_SUM || c->op == XD_AVG;
    if (l->total == 0) {
        const bool rounds = sum && xd_dtype_is_floating(c->dtype);
        XDI_REQUIRE(ctx, !rounds || xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT,
                    XD_ERROR_UNSUPPORTED,
                    "%s: INVARIANT mode needs the gradient leaves behind a floating-point %s of %s", kind,
                    xdi_comm_ops[c->op], xd_dtype_name(c->dtype));
        return XD_OK;
    }
    XDI_REQUIRE(ctx,
                l->first >= 0 && l->count >= 0 && l->first <= l->total && l->count <= l->total - l->first,
                XD_ERROR_ARGUMENT, "%s: leaves [%" PRId64 ", +%" PRId64 ") lie outside [0, %" PRId64 ")",
                kind, l->first, l->count, l->total);
    XDI_REQUIRE(ctx, sum && (c->dtype == XD_DTYPE_F32 || c->dtype == XD_DTYPE_F64), XD_ERROR_DTYPE,
                "%s: leaves go with SUM or AVG of F32 or F64, not %s of %s", kind, xdi_comm_ops[c->op],
                xd_dtype_name(c->dtype));
    return XD_OK;
}

/* True when this rank's buffers overlap other than recv = send or the short one = own piece of the long
 * one. */
static bool xdi_comm_overlaps(const xd_comm *comm, const xd_collective *c, uintptr_t send_bytes,
                              uintptr_t recv_bytes) {
    const uintptr_t send = (uintptr_t)c->send, recv = (uintptr_t)c->recv;
    if (!send_bytes || !recv_bytes || send >= recv + recv_bytes || recv >= send + send_bytes) return false;
    const int rank = comm->transport->rank;
    const size_t size = xd_dtype_size(c->dtype);
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return send != recv;
    case XD_COLLECTIVE_REDUCE_SCATTER:
    case XD_COLLECTIVE_SCATTER:
        return recv != send + (uintptr_t)xdi_comm_offset(c->send_counts, c->send_displacements, rank) * size;
    case XD_COLLECTIVE_ALL_GATHER:
    case XD_COLLECTIVE_GATHER:
        return send != recv + (uintptr_t)xdi_comm_offset(c->recv_counts, c->recv_displacements, rank) * size;
    default: return true;
    }
}

static xd_result xdi_comm_validate_buffers(const xd_comm *comm, const xd_collective *c) {
    const int rank = comm->transport->rank, n = comm->transport->size;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    const int64_t send = xdi_comm_send_elements(c, rank, n), recv = xdi_comm_recv_elements(c, rank, n);
    XDI_REQUIRE(comm->ctx, c->send || send == 0, XD_ERROR_ARGUMENT,
                "%s: send is NULL for %" PRId64 " elements", kind, send);
    XDI_REQUIRE(comm->ctx, c->recv || recv == 0, XD_ERROR_ARGUMENT,
                "%s: recv is NULL for %" PRId64 " elements", kind, recv);
    const size_t size = xd_dtype_size(c->dtype);
    XDI_REQUIRE(comm->ctx, !xdi_comm_overlaps(comm, c, (uintptr_t)send * size, (uintptr_t)recv * size),
                XD_ERROR_ARGUMENT, "%s: send and recv overlap, and not as one in-place call may", kind);
    return XD_OK;
}

static xd_result xdi_comm_validate(const xd_comm *comm, const xd_collective *c) {
    xd_ctx *ctx = comm->ctx;
    const xd_collective_kind k = c->kind;
    const char *kind = xdi_comm_kind((uint64_t)k);
    XDI_REQUIRE(ctx, k >= XD_COLLECTIVE_BARRIER && k <= XD_COLLECTIVE_RECV, XD_ERROR_ARGUMENT,
                "collective kind %d cannot be run", (int)k);
    if (k == XD_COLLECTIVE_BARRIER) return XD_OK;
    XDI_REQUIRE(ctx, xd_dtype_size(c->dtype) > 0, XD_ERROR_DTYPE, "%s: dtype %d does not exist", kind,
                (int)c->dtype);
    XDI_REQUIRE(ctx, c->count >= 0 && c->count <= INT64_MAX / 64, XD_ERROR_ARGUMENT,
                "%s: count %" PRId64 " is negative or too large", kind, c->count);
    const bool pair = k == XD_COLLECTIVE_SEND || k == XD_COLLECTIVE_RECV;
    const bool rooted =
        pair || k == XD_COLLECTIVE_BROADCAST || k == XD_COLLECTIVE_GATHER || k == XD_COLLECTIVE_SCATTER;
    XDI_REQUIRE(ctx, !rooted || (c->root >= 0 && c->root < comm->transport->size), XD_ERROR_ARGUMENT,
                "%s: rank %d is outside [0, %d)", kind, c->root, comm->transport->size);
    XDI_REQUIRE(ctx, !pair || c->root != comm->transport->rank, XD_ERROR_ARGUMENT,
                "%s: rank %d is this rank itself", kind, c->root);
    const bool to_all = k == XD_COLLECTIVE_ALL_TO_ALL;
    if (to_all || k == XD_COLLECTIVE_REDUCE_SCATTER || k == XD_COLLECTIVE_SCATTER)
        XDI_TRY(xdi_comm_validate_counts(comm, c, c->send_counts, c->send_displacements, "send"));
    if (to_all || k == XD_COLLECTIVE_ALL_GATHER || k == XD_COLLECTIVE_GATHER)
        XDI_TRY(xdi_comm_validate_counts(comm, c, c->recv_counts, c->recv_displacements, "recv"));
    if (xdi_comm_reduces(k)) XDI_TRY(xdi_comm_validate_reduction(comm, c));
    return xdi_comm_validate_buffers(comm, c);
}

/* ---- the control record ---- */

static uint64_t xdi_comm_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t xdi_comm_hash(int from, int to, int64_t count) {
    return xdi_comm_mix(xdi_comm_mix(((uint64_t)(uint32_t)from << 32) | (uint32_t)to) + (uint64_t)count);
}

/* Counts that all ranks share hash to the same value. In an all_to_all each count stands on two ranks, its
 * sender's and its receiver's: it enters one hash with plus and the other with minus, so the sum over all
 * ranks is zero. */
static uint64_t xdi_comm_layout(const xd_comm *comm, const xd_collective *c) {
    const int n = comm->transport->size, rank = comm->transport->rank;
    const int64_t *shared = xdi_comm_shared_counts(c);
    uint64_t layout = (uint64_t)c->leaves.total;
    for (int r = 0; shared && r < n; r++) layout = xdi_comm_mix(layout + 1) + xdi_comm_hash(0, r, shared[r]);
    if (c->kind == XD_COLLECTIVE_ALL_TO_ALL)
        for (int r = 0; r < n; r++)
            layout += xdi_comm_hash(rank, r, c->send_counts[r]) - xdi_comm_hash(r, rank, c->recv_counts[r]);
    return layout;
}

static xd_control xdi_comm_control(const xd_comm *comm, const xd_collective *c, xd_result status) {
    const xd_ctx_desc *settings = xd_ctx_settings(comm->ctx);
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.sequence = comm->sequence;
    mine.kind = (uint32_t)c->kind;
    mine.status = (int32_t)status;
    mine.mode = (int32_t)settings->reduction + XDI_COMM_MODES * (int32_t)settings->cpu;
    if (status != XD_OK) return mine;
    mine.dtype = (uint32_t)c->dtype;
    mine.op = xdi_comm_reduces(c->kind) ? (uint32_t)c->op : 0u;
    mine.root = c->root;
    mine.count = (uint64_t)c->count;
    mine.layout = xdi_comm_layout(comm, c);
    mine.extra = (uint64_t)c->leaves.first;
    mine.leaves = (uint64_t)c->leaves.count;
    return mine;
}

/* A transport's error breaks the group for good. */
static xd_result xdi_comm_break(xd_comm *comm, xd_result result) {
    if (result != XD_OK && comm->broken == XD_OK) {
        const xd_error *error = xd_last_error(comm->ctx);
        comm->broken = result;
        comm->culprit = error->result == result ? error->culprit : -1;
    }
    return result;
}

static double xdi_comm_deadline(const xd_comm *comm) {
    const xd_ctx_desc *settings = xd_ctx_settings(comm->ctx);
    const bool first = comm->is_world && comm->sequence <= 1;
    return xd_now(comm->ctx) + (first ? settings->init_timeout_seconds : settings->timeout_seconds);
}

static xd_result xdi_comm_exchange(xd_comm *comm, const xd_control *mine, const xd_collective *next,
                                   double deadline) {
    return xdi_comm_break(comm,
                          comm->transport->ops->control(comm->transport, mine, next, comm->all, deadline));
}

/* ---- agreement ---- */

/* "rank 2" or "ranks 2,3": those whose value is `value`, as world ranks. */
static void xdi_comm_list(const xd_comm *comm, uint64_t value, char *text, size_t size) {
    const uint64_t *values = comm->values;
    const int n = comm->transport->size;
    int found = 0;
    for (int r = 0; r < n; r++) found += values[r] == value;
    size_t used = (size_t)snprintf(text, size, found > 1 ? "ranks " : "rank ");
    for (int r = 0, listed = 0; r < n && used + 16 < size; r++)
        if (values[r] == value)
            used += (size_t)snprintf(text + used, size - used, "%s%d", listed++ ? "," : "",
                                     comm->transport->world_ranks[r]);
}

typedef enum xdi_comm_field {
    XDI_COMM_KIND,
    XDI_COMM_DTYPE,
    XDI_COMM_OP,
    XDI_COMM_ROOT,
    XDI_COMM_MODE,
    XDI_COMM_COUNT,
    XDI_COMM_LAYOUT,
    XDI_COMM_FIELDS
} xdi_comm_field;

static uint64_t xdi_comm_get(const xd_control *control, int field) {
    switch (field) {
    case XDI_COMM_KIND: return control->kind;
    case XDI_COMM_DTYPE: return control->dtype;
    case XDI_COMM_OP: return control->op;
    case XDI_COMM_ROOT: return (uint64_t)control->root;
    case XDI_COMM_MODE: return (uint64_t)control->mode;
    case XDI_COMM_COUNT: return control->count;
    default: return control->layout;
    }
}

static void xdi_comm_show(int field, uint64_t value, char *text, size_t size) {
    switch (field) {
    case XDI_COMM_KIND: snprintf(text, size, "called %s", xdi_comm_kind(value)); break;
    case XDI_COMM_DTYPE: snprintf(text, size, "passed dtype %s", xd_dtype_name((xd_dtype)value)); break;
    case XDI_COMM_OP:
        snprintf(text, size, "passed operation %s", xdi_comm_text(xdi_comm_ops, 4, value));
        break;
    case XDI_COMM_ROOT: snprintf(text, size, "passed root %d", (int)value); break;
    case XDI_COMM_MODE:
        snprintf(text, size, "runs in mode %s on %s",
                 xdi_comm_text(xdi_comm_modes, XDI_COMM_MODES, value % XDI_COMM_MODES),
                 xd_cpu_level_name((xd_cpu_level)(value / XDI_COMM_MODES)));
        break;
    default: snprintf(text, size, "passed count %" PRIu64, value); break;
    }
}

/* Compares comm->values with that of rank 0; on a difference both sides are shown by `show` of `field`, or
 * as the number `name` when there is a name. */
static xd_result xdi_comm_compare(const xd_comm *comm, const char *kind, int field, const char *name) {
    const uint64_t *values = comm->values;
    const int n = comm->transport->size;
    int other = 1;
    while (other < n && values[other] == values[0]) other++;
    if (other == n) return XD_OK;
    char ranks[160], theirs[64], ours[64];
    xdi_comm_list(comm, values[other], ranks, sizeof ranks);
    if (name) {
        snprintf(theirs, sizeof theirs, "passed %s %" PRIu64, name, values[other]);
        snprintf(ours, sizeof ours, "passed %" PRIu64, values[0]);
    } else {
        xdi_comm_show(field, values[other], theirs, sizeof theirs);
        xdi_comm_show(field, values[0], ours, sizeof ours);
    }
    return XDI_FAIL_CULPRIT(comm->ctx, XD_ERROR_MISMATCH, comm->transport->world_ranks[other],
                            "%s: %s %s, rank %d %s", kind, ranks, theirs, comm->transport->world_ranks[0],
                            ours);
}

/* One more round of control records that carry nothing but two numbers. */
static xd_result xdi_comm_tell(xd_comm *comm, uint64_t first, uint64_t second, double deadline) {
    xd_control mine;
    memset(&mine, 0, sizeof mine);
    mine.count = first;
    mine.extra = second;
    return xdi_comm_exchange(comm, &mine, NULL, deadline);
}

/* The hashes of shared counts differ: find the first count that does. Every rank sees the same rounds and
 * stops at the same one. */
static xd_result xdi_comm_explain_counts(xd_comm *comm, const xd_collective *c, const char *kind,
                                         double deadline) {
    const int n = comm->transport->size;
    const int64_t *shared = xdi_comm_shared_counts(c);
    for (int k = 0; k <= n; k++) {
        if (k < n && !shared) continue;
        char name[32];
        snprintf(name, sizeof name, k < n ? "counts[%d] =" : "leaves.total", k);
        XDI_TRY(xdi_comm_tell(comm, (uint64_t)(k < n ? shared[k] : c->leaves.total), 0, deadline));
        for (int r = 0; r < n; r++) comm->values[r] = comm->all[r].count;
        XDI_TRY(xdi_comm_compare(comm, kind, XDI_COMM_COUNT, name));
    }
    return XDI_FAIL(comm->ctx, XD_ERROR_MISMATCH, "%s: ranks passed different counts", kind);
}

/* Some count of an all_to_all differs between its two ends: round k compares each rank with its k-th right
 * neighbour. */
static xd_result xdi_comm_explain_pairs(xd_comm *comm, const xd_collective *c, double deadline) {
    const int n = comm->transport->size, rank = comm->transport->rank;
    const int *world = comm->transport->world_ranks;
    for (int k = 0; k < n; k++) {
        const int to = (rank + k) % n, from = (rank - k + n) % n;
        XDI_TRY(xdi_comm_tell(comm, (uint64_t)c->send_counts[to], (uint64_t)c->recv_counts[from], deadline));
        for (int r = 0; r < n; r++) {
            const int peer = (r + k) % n;
            if (comm->all[r].count != comm->all[peer].extra)
                return XDI_FAIL(comm->ctx, XD_ERROR_MISMATCH,
                                "all_to_all: rank %d sends count %" PRIu64
                                ", but rank %d receives count %" PRIu64,
                                world[r], comm->all[r].count, world[peer], comm->all[peer].extra);
        }
    }
    return XDI_FAIL(comm->ctx, XD_ERROR_MISMATCH, "all_to_all: counts do not fit");
}

/* The lowest rank whose status is not XD_OK tells the others its message, 32 bytes a round. */
static xd_result xdi_comm_refused(xd_comm *comm, const char *kind, int refuser, xd_result mine,
                                  double deadline) {
    enum { CHUNK = 32, ROUNDS = 8 };
    char message[CHUNK * ROUNDS + 1];
    const int culprit = comm->transport->world_ranks[refuser];
    const xd_result theirs = (xd_result)comm->all[refuser].status;
    memset(message, 0, sizeof message);
    for (int k = 0; k < ROUNDS; k++) {
        xd_control part;
        memset(&part, 0, sizeof part);
        const xd_error *error = xd_last_error(comm->ctx);
        if (mine != XD_OK && error->result == mine) memcpy(&part.count, error->message + k * CHUNK, CHUNK);
        XDI_TRY(xdi_comm_exchange(comm, &part, NULL, deadline));
        memcpy(message + k * CHUNK, &comm->all[refuser].count, CHUNK);
    }
    if (mine != XD_OK) return mine;
    return XDI_FAIL_CULPRIT(comm->ctx, XD_ERROR_PEER, culprit, "%s: rank %d failed with %s: %s", kind,
                            culprit, xd_result_name(theirs), message);
}

/* The leaves of the ranks, in rank order, must cover [0, total) without a gap. */
static xd_result xdi_comm_agree_leaves(const xd_comm *comm, const xd_collective *c, const char *kind) {
    const int n = comm->transport->size;
    uint64_t end = 0;
    for (int r = 0; r <= n; r++) {
        const uint64_t begins = r < n ? comm->all[r].extra : (uint64_t)c->leaves.total;
        if (begins != end)
            return XDI_FAIL_CULPRIT(
                comm->ctx, XD_ERROR_MISMATCH, comm->transport->world_ranks[r < n ? r : n - 1],
                "%s: leaves of rank %d end at %" PRIu64 ", and the next begin at %" PRIu64, kind,
                r ? comm->transport->world_ranks[r - 1] : -1, end, begins);
        if (r < n) end += comm->all[r].leaves;
    }
    return XD_OK;
}

/* The same verdict on every rank, from the same records. */
static xd_result xdi_comm_agreement(xd_comm *comm, const xd_collective *c, xd_result mine, double deadline) {
    const int n = comm->transport->size;
    const char *kind = xdi_comm_kind((uint64_t)c->kind);
    for (int r = 0; r < n; r++)
        if (comm->all[r].status != XD_OK) return xdi_comm_refused(comm, kind, r, mine, deadline);
    for (int field = 0; field < XDI_COMM_FIELDS; field++) {
        if (field == XDI_COMM_LAYOUT && c->kind == XD_COLLECTIVE_ALL_TO_ALL) break;
        bool same = true;
        for (int r = 0; r < n; r++) {
            comm->values[r] = xdi_comm_get(&comm->all[r], field);
            same = same && comm->values[r] == comm->values[0];
        }
        if (same) continue;
        if (field == XDI_COMM_LAYOUT) return xdi_comm_explain_counts(comm, c, kind, deadline);
        return xdi_comm_compare(comm, kind, field, NULL);
    }
    if (c->kind == XD_COLLECTIVE_ALL_TO_ALL) {
        uint64_t sum = 0;
        for (int r = 0; r < n; r++) sum += comm->all[r].layout;
        if (sum) return xdi_comm_explain_pairs(comm, c, deadline);
    }
    return c->leaves.total ? xdi_comm_agree_leaves(comm, c, kind) : XD_OK;
}

/* ---- the one path ---- */

/* Payload in elements. An all_reduce is counted as what it is everywhere but in one address space: pieces
 * to their owners, sums back. */
static void xdi_comm_count(xd_comm *comm, const xd_collective *c) {
    const int rank = comm->transport->rank, n = comm->transport->size;
    const uint64_t size = xd_dtype_size(c->dtype), others = (uint64_t)n - 1;
    const int64_t own_nodes = xdi_comm_nodes(&c->leaves);
    int64_t all_nodes = n, begin = 0, end = 0, sent = xdi_comm_send_elements(c, rank, n);
    int64_t received = xdi_comm_recv_elements(c, rank, n);
    comm->counters.calls++;
    for (int r = 0; c->leaves.total && r < n; r++)
        all_nodes += xd_leaves_nodes((int64_t)comm->all[r].extra, (int64_t)comm->all[r].leaves) - 1;
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE:
        xdi_comm_piece(c->count, n, rank, &begin, &end);
        sent = (c->count - (end - begin)) * own_nodes + (end - begin) * (n - 1);
        received = (end - begin) * (all_nodes - own_nodes) + c->count - (end - begin);
        break;
    case XD_COLLECTIVE_REDUCE_SCATTER:
        sent -= c->send_counts[rank] * own_nodes;
        received *= all_nodes - own_nodes;
        break;
    case XD_COLLECTIVE_BROADCAST: sent *= (int64_t)others; break;
    case XD_COLLECTIVE_ALL_GATHER:
        received -= c->recv_counts[rank];
        sent *= (int64_t)others;
        break;
    case XD_COLLECTIVE_GATHER:
        if (rank == c->root) received -= c->recv_counts[rank], sent = 0;
        break;
    case XD_COLLECTIVE_SCATTER:
        if (rank == c->root) sent -= c->send_counts[rank], received = 0;
        break;
    case XD_COLLECTIVE_ALL_TO_ALL:
        sent -= c->send_counts[rank];
        received -= c->recv_counts[rank];
        break;
    default: break;
    }
    comm->counters.bytes_sent += (uint64_t)sent * size;
    comm->counters.bytes_received += (uint64_t)received * size;
}

static xd_result xdi_comm_whole(const xd_comm *comm, const xd_collective *c) {
    if (comm->broken == XD_OK) return XD_OK;
    return XDI_FAIL_CULPRIT(comm->ctx, XD_ERROR_PEER, comm->culprit,
                            "%s: the group is broken: rank %d caused %s in an earlier call",
                            xdi_comm_kind((uint64_t)c->kind), comm->culprit, xd_result_name(comm->broken));
}

/* Two ranks only: the transport compares what both passed. */
static xd_result xdi_comm_run_pair(xd_comm *comm, const xd_collective *c) {
    XDI_TRY(xdi_comm_validate(comm, c));
    const double deadline = xd_now(comm->ctx) + xd_ctx_settings(comm->ctx)->timeout_seconds;
    const xd_result result = comm->transport->ops->execute(comm->transport, c, deadline);
    if (result == XD_OK) xdi_comm_count(comm, c);
    return result == XD_ERROR_MISMATCH ? result : xdi_comm_break(comm, result);
}

/* Validates, compares, moves, counts. `mine` is an error found before the call, which the peers must learn
 * of. */
static xd_result xdi_comm_run(xd_comm *comm, const xd_collective *c, xd_result mine, double *deadline) {
    comm->sequence++;
    *deadline = xdi_comm_deadline(comm);
    const xd_control control = xdi_comm_control(comm, c, mine);
    XDI_TRY(xdi_comm_exchange(comm, &control, mine == XD_OK ? c : NULL, *deadline));
    return xdi_comm_agreement(comm, c, mine, *deadline);
}

XD_API xd_result xd_collective_run(xd_comm *comm, const xd_collective *collective) {
    xd_collective c = *collective;
    if (!xdi_comm_reduces(c.kind)) memset(&c.leaves, 0, sizeof c.leaves);
    XDI_TRY(xdi_comm_whole(comm, &c));
    if (c.kind == XD_COLLECTIVE_SEND || c.kind == XD_COLLECTIVE_RECV) return xdi_comm_run_pair(comm, &c);
    double deadline;
    c.sequence = comm->sequence + 1;
    XDI_TRY(xdi_comm_run(comm, &c, xdi_comm_validate(comm, &c), &deadline));
    if (c.kind != XD_COLLECTIVE_BARRIER)
        XDI_TRY(xdi_comm_break(comm, comm->transport->ops->execute(comm->transport, &c, deadline)));
    xdi_comm_count(comm, &c);
    xd_log(comm->ctx, XD_LOG_TRACE, "%s %" PRIu64 " on %d ranks: %" PRIu64 " bytes sent so far",
           xdi_comm_kind((uint64_t)c.kind), c.sequence, comm->transport->size, comm->counters.bytes_sent);
    return XD_OK;
}

/* ---- calls of one kind ---- */

static xd_collective xdi_comm_record(xd_collective_kind kind, const void *send, void *recv, xd_dtype dtype) {
    xd_collective c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.send = send;
    c.recv = recv;
    c.dtype = dtype;
    return c;
}

XD_API xd_result xd_barrier(xd_comm *comm) {
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_BARRIER, NULL, NULL, XD_DTYPE_NONE);
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_broadcast(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int root) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_BROADCAST, data, data, dtype);
    c.count = count;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_reduce(xd_comm *comm, const void *send, void *recv, int64_t count, xd_dtype dtype,
                               xd_reduce_op op) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_REDUCE, send, recv, dtype);
    c.count = count;
    c.op = op;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_reduce_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                                   xd_dtype dtype, xd_reduce_op op) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_REDUCE_SCATTER, send, recv, dtype);
    c.send_counts = counts;
    c.op = op;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                               xd_dtype dtype) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_GATHER, send, recv, dtype);
    c.recv_counts = counts;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_all_to_all(xd_comm *comm, const void *send, const int64_t *send_counts, void *recv,
                               const int64_t *recv_counts, xd_dtype dtype) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_ALL_TO_ALL, send, recv, dtype);
    c.send_counts = send_counts;
    c.recv_counts = recv_counts;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_gather(xd_comm *comm, const void *send, void *recv, const int64_t *counts, xd_dtype dtype,
                           int root) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_GATHER, send, recv, dtype);
    c.recv_counts = counts;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_scatter(xd_comm *comm, const void *send, void *recv, const int64_t *counts,
                            xd_dtype dtype, int root) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_SCATTER, send, recv, dtype);
    c.send_counts = counts;
    c.root = root;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_send(xd_comm *comm, const void *data, int64_t count, xd_dtype dtype, int to) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_SEND, data, NULL, dtype);
    c.count = count;
    c.root = to;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_recv(xd_comm *comm, void *data, int64_t count, xd_dtype dtype, int from) {
    xd_collective c = xdi_comm_record(XD_COLLECTIVE_RECV, NULL, data, dtype);
    c.count = count;
    c.root = from;
    return xd_collective_run(comm, &c);
}

XD_API xd_result xd_agree(xd_comm *comm, xd_result mine) {
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_AGREE, NULL, NULL, XD_DTYPE_NONE);
    double deadline;
    XDI_TRY(xdi_comm_whole(comm, &c));
    XDI_TRY(xdi_comm_run(comm, &c, mine, &deadline));
    comm->counters.calls++;
    return XD_OK;
}

/* ---- handles ---- */

XD_API int xd_comm_rank(const xd_comm *comm) {
    return comm->transport->rank;
}

XD_API int xd_comm_size(const xd_comm *comm) {
    return comm->transport->size;
}

XD_API int xd_comm_world_rank(const xd_comm *comm, int rank) {
    return rank >= 0 && rank < comm->transport->size ? comm->transport->world_ranks[rank] : -1;
}

XD_API xd_ctx *xd_comm_ctx(const xd_comm *comm) {
    return comm->ctx;
}

XD_API xd_comm_counters xd_comm_get_counters(const xd_comm *comm) {
    return comm->counters;
}

XD_API xd_result xd_comm_create(xd_ctx *ctx, xd_transport *transport, xd_comm **out) {
    const size_t n = (size_t)transport->size;
    xd_comm *comm = (xd_comm *)xd_allocate(ctx, sizeof *comm);
    if (!comm) {
        transport->ops->destroy(transport);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a group handle");
    }
    comm->ctx = ctx;
    comm->transport = transport;
    comm->culprit = -1;
    comm->is_world = true;
    comm->all = (xd_control *)xd_allocate(ctx, n * sizeof *comm->all);
    comm->values = (uint64_t *)xd_allocate(ctx, n * sizeof *comm->values);
    comm->members = (int *)xd_allocate(ctx, n * sizeof *comm->members);
    if (!comm->all || !comm->values || !comm->members) {
        xd_comm_destroy(comm);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for the handle of a group of %d ranks", (int)n);
    }
    *out = comm;
    return XD_OK;
}

XD_API void xd_comm_destroy(xd_comm *comm) {
    if (!comm) return;
    comm->transport->ops->destroy(comm->transport);
    xd_release(comm->ctx, comm->members);
    xd_release(comm->ctx, comm->values);
    xd_release(comm->ctx, comm->all);
    xd_release(comm->ctx, comm);
}

XD_API void xd_comm_abort(xd_comm *comm) {
    comm->transport->ops->abort(comm->transport);
}

/* Group ranks of one color in the order of (key, rank); returns how many. */
static int xdi_comm_members(xd_comm *comm, int color) {
    int size = 0;
    for (int r = 0; r < comm->transport->size; r++) {
        if ((int32_t)(comm->all[r].extra >> 32) != color) continue;
        const int32_t key = (int32_t)(comm->all[r].extra & 0xffffffffu);
        int at = size++;
        for (; at > 0 && (int32_t)(comm->all[comm->members[at - 1]].extra & 0xffffffffu) > key; at--)
            comm->members[at] = comm->members[at - 1];
        comm->members[at] = r;
    }
    return size;
}

static xd_result xdi_comm_split_own(xd_comm *comm, int color, double deadline, xd_comm **child) {
    const int size = xdi_comm_members(comm, color);
    int rank = 0;
    while (comm->members[rank] != comm->transport->rank) rank++;
    xd_transport *transport = NULL;
    XDI_TRY(comm->transport->ops->split(comm->transport, comm->members, size, rank, deadline, &transport));
    XDI_TRY(xd_comm_create(comm->ctx, transport, child));
    (*child)->is_world = false;
    return XD_OK;
}

XD_API xd_result xd_comm_split(xd_comm *comm, int color, int key, xd_comm **out) {
    const xd_collective c = xdi_comm_record(XD_COLLECTIVE_SPLIT, NULL, NULL, XD_DTYPE_NONE);
    XDI_TRY(xdi_comm_whole(comm, &c));
    comm->sequence++;
    const double deadline = xdi_comm_deadline(comm);
    xd_control mine = xdi_comm_control(comm, &c, XD_OK);
    mine.extra = ((uint64_t)(uint32_t)color << 32) | (uint32_t)key;
    XDI_TRY(xdi_comm_exchange(comm, &mine, NULL, deadline));
    XDI_TRY(xdi_comm_agreement(comm, &c, XD_OK, deadline));
    xd_comm *child = NULL;
    const xd_result made = color < 0 ? XD_OK : xdi_comm_split_own(comm, color, deadline, &child);
    const xd_result agreed = xd_agree(comm, made); /* one rank without memory: no rank gets a group */
    if (agreed != XD_OK) {
        xd_comm_destroy(child);
        return agreed;
    }
    *out = child;
    return XD_OK;
}

/* >>comm/self.c */

#include <string.h>

/* A group of one: the piece that goes to this rank is the piece that came from it. */

static const int xdi_self_world_rank = 0;

static xd_result xdi_self_control(xd_transport *transport, const xd_control *mine, const xd_collective *next,
                                  xd_control *all, double deadline) {
    (void)transport, (void)next, (void)deadline;
    all[0] = *mine;
    return XD_OK;
}

/* The piece's place and length on both sides. */
static xd_result xdi_self_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    (void)deadline;
    if (c->kind == XD_COLLECTIVE_BROADCAST) return XD_OK;
    const bool scatters = c->kind == XD_COLLECTIVE_REDUCE_SCATTER || c->kind == XD_COLLECTIVE_ALL_TO_ALL ||
                          c->kind == XD_COLLECTIVE_SCATTER;
    const bool gathers = c->kind == XD_COLLECTIVE_ALL_GATHER || c->kind == XD_COLLECTIVE_ALL_TO_ALL ||
                         c->kind == XD_COLLECTIVE_GATHER;
    const size_t size = xd_dtype_size(c->dtype);
    const size_t from =
        scatters ? (size_t)xdi_comm_offset(c->send_counts, c->send_displacements, 0) * size : 0;
    const size_t to = gathers ? (size_t)xdi_comm_offset(c->recv_counts, c->recv_displacements, 0) * size : 0;
    const int64_t count = scatters ? c->send_counts[0] : gathers ? c->recv_counts[0] : c->count;
    if (count == 0) return XD_OK;
    const void *send = (const char *)c->send + from;
    void *recv = (char *)c->recv + to;
    if (c->leaves.total)
        return xd_reduce_leaves(transport->ctx, recv, &send, &c->leaves, 1, count, count, c->dtype, c->op);
    if (send != recv) memcpy(recv, send, (size_t)count * size);
    return XD_OK;
}

static xd_result xdi_self_create(xd_ctx *ctx, xd_transport **out);

static xd_result xdi_self_split(xd_transport *transport, const int *members, int size, int rank,
                                double deadline, xd_transport **out) {
    (void)members, (void)size, (void)rank, (void)deadline;
    return xdi_self_create(transport->ctx, out);
}

static void xdi_self_abort(xd_transport *transport) {
    (void)transport;
}

static void xdi_self_destroy(xd_transport *transport) {
    xd_release(transport->ctx, transport);
}

static const xd_transport_ops xdi_self_ops = { "self",         xdi_self_control, xdi_self_execute,
                                               xdi_self_split, xdi_self_abort,   xdi_self_destroy };

static xd_result xdi_self_create(xd_ctx *ctx, xd_transport **out) {
    xd_transport *self = (xd_transport *)xd_allocate(ctx, sizeof *self);
    XDI_REQUIRE(ctx, self, XD_ERROR_MEMORY, "no room for a group of one rank");
    self->ops = &xdi_self_ops;
    self->ctx = ctx;
    self->size = 1;
    self->world_ranks = &xdi_self_world_rank;
    *out = self;
    return XD_OK;
}

XD_API xd_result xd_comm_self(xd_ctx *ctx, xd_comm **out) {
    xd_transport *transport = NULL;
    XDI_TRY(xdi_self_create(ctx, &transport));
    return xd_comm_create(ctx, transport, out);
}

/* >>comm/threads.c */

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Ranks as threads of one process: the reference transport. Peers read each other's buffers in place.
 *
 * Every rank has a slot. To take part in round p it fills page p % 2 of its slot (control record, where its
 * data lies) and then raises `arrived` to p; a round is complete for a rank when it has seen all others
 * arrive. Nobody can be two rounds ahead, so two pages suffice and reading one needs no second barrier.
 * Short payloads are copied into the page and reduced by every rank for itself: one round. Longer ones stay
 * where they are: ranks read them between the control round and a closing round that says "I have read
 * yours".
 *
 * The first wait that fails breaks the world, once and for all groups split from it. A rank then leaves its
 * call, and its caller may free the buffers; so whoever touches the memory of peers says so in `busy` first
 * and looks whether the world is still whole, and whoever leaves a broken call waits until its peers are
 * not busy. Copying never waits for anything, so that is soon. */

enum {
    XDI_THREADS_INLINE = 4096,     /* bytes of a payload that travels in the page */
    XDI_THREADS_SPIN = 2000,       /* looks before giving up the core, when every rank can have one */
    XDI_THREADS_SPIN_CROWDED = 64, /* the same with more ranks than cores */
    XDI_THREADS_YIELD = 20000,     /* yields before short sleeps */
    XDI_THREADS_NAP = 50000        /* nanoseconds */
};

typedef struct xdi_threads_page {
    xd_control control;
    xd_collective record;
    const void *data; /* record.send, or payload below */
    int64_t *offsets; /* [size], where the piece for each rank begins in data */
    bool is_short;
    uint64_t payload[XDI_THREADS_INLINE / 8]; /* aligned for every dtype */
} xdi_threads_page;

typedef struct xdi_threads_group xdi_threads_group;

typedef struct xdi_threads_slot {
    uint64_t arrived;         /* rounds this rank has entered; atomic */
    uint32_t left;            /* this rank destroyed its handle; atomic */
    uint32_t busy;            /* this rank touches memory of peers; atomic */
    uint32_t joined;          /* world group: the rank has come; atomic */
    uint64_t child_round;     /* the round whose split produced `child`; atomic */
    xdi_threads_group *child; /* NULL: no memory */
    xdi_threads_page page[2];
} xdi_threads_slot;

/* A send waiting for its receiver, one for each ordered pair of ranks. */
typedef struct xdi_threads_mail {
    uint64_t posted; /* messages offered so far; atomic, written by the sender */
    uint64_t done;   /* messages looked at so far; atomic, written by the receiver */
    const void *data;
    int64_t count, wanted; /* the sender's and the receiver's */
    xd_dtype dtype, wanted_dtype;
} xdi_threads_mail;

struct xdi_threads_group {
    struct xd_thread_world *world;
    xdi_threads_group *next; /* in world->groups */
    int size;
    uint32_t holders;        /* handles that exist or may still be made; atomic */
    int *world_ranks;        /* [size] */
    xdi_threads_slot *slots; /* [size] */
    int64_t *offsets;        /* [size][2][size], for the pages */
    xdi_threads_mail *mail;  /* [from][to] */
};

struct xd_thread_world {
    xd_allocator allocator;
    uint64_t failure; /* 0, or what broke the world: result << 32 | (culprit + 1); atomic, written once */
    int spin;         /* looks before a yield */
    pthread_mutex_t lock;
    xdi_threads_group *groups; /* all that exist, the world's own last; under lock */
    xdi_threads_group *root;
    uint32_t *gone; /* [ranks], the rank has left the world; atomic */
};

typedef struct xdi_threads {
    xd_transport base;
    xdi_threads_group *group;
    xdi_threads_slot *slot; /* this rank's */
    uint64_t round;
    const void **pieces; /* [size], scratch */
    xd_leaves *leaves;   /* [size], scratch */
} xdi_threads;

/* ---- memory of a world ---- */

static void *xdi_threads_allocate(xd_thread_world *world, size_t bytes) {
    void *memory = world->allocator.allocate(world->allocator.user, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void xdi_threads_free(xd_thread_world *world, void *memory) {
    if (memory) world->allocator.release(world->allocator.user, memory);
}

static void xdi_threads_group_free(xdi_threads_group *group) {
    xd_thread_world *world = group->world;
    xdi_threads_free(world, group->mail);
    xdi_threads_free(world, group->offsets);
    xdi_threads_free(world, group->slots);
    xdi_threads_free(world, group->world_ranks);
    xdi_threads_free(world, group);
}

static xdi_threads_group *xdi_threads_group_create(xd_thread_world *world, int size) {
    const size_t n = (size_t)size;
    xdi_threads_group *group = (xdi_threads_group *)xdi_threads_allocate(world, sizeof *group);
    if (!group) return NULL;
    group->world = world;
    group->size = size;
    group->holders = (uint32_t)size;
    group->world_ranks = (int *)xdi_threads_allocate(world, n * sizeof *group->world_ranks);
    group->slots = (xdi_threads_slot *)xdi_threads_allocate(world, n * sizeof *group->slots);
    group->offsets = (int64_t *)xdi_threads_allocate(world, 2 * n * n * sizeof *group->offsets);
    group->mail = (xdi_threads_mail *)xdi_threads_allocate(world, n * n * sizeof *group->mail);
    if (!group->world_ranks || !group->slots || !group->offsets || !group->mail) {
        xdi_threads_group_free(group);
        return NULL;
    }
    for (size_t i = 0; i < 2 * n; i++) group->slots[i / 2].page[i % 2].offsets = group->offsets + i * n;
    pthread_mutex_lock(&world->lock);
    group->next = world->groups;
    world->groups = group;
    pthread_mutex_unlock(&world->lock);
    return group;
}

/* One handle less; the last one frees the group. The world's own group lives as long as the world. */
static void xdi_threads_group_leave(xdi_threads_group *group) {
    xd_thread_world *world = group->world;
    if (__atomic_sub_fetch(&group->holders, 1, __ATOMIC_ACQ_REL) > 0 || group == world->root) return;
    pthread_mutex_lock(&world->lock);
    xdi_threads_group **at = &world->groups;
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    pthread_mutex_unlock(&world->lock);
    xdi_threads_group_free(group);
}

/* ---- failure ---- */

/* The first failure counts; later ones are its echoes. */
static void xdi_threads_break(xd_thread_world *world, xd_result result, int culprit) {
    uint64_t healthy = 0;
    const uint64_t failure = ((uint64_t)result << 32) | (uint64_t)(uint32_t)(culprit + 1);
    __atomic_compare_exchange_n(&world->failure, &healthy, failure, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

static uint64_t xdi_threads_failure(const xd_thread_world *world) {
    return __atomic_load_n(&world->failure, __ATOMIC_SEQ_CST);
}

/* Waits until no peer touches this rank's memory: see the top of the file. */
static void xdi_threads_drain(const xdi_threads *t) {
    for (int r = 0; r < t->group->size; r++)
        while (r != t->base.rank && __atomic_load_n(&t->group->slots[r].busy, __ATOMIC_SEQ_CST))
            sched_yield();
}

/* "2" or "2,3": the world ranks that have not entered the round in which this rank waits; "" when that is
 * nobody. */
static void xdi_threads_missing(const xdi_threads *t, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int r = 0; r < t->group->size && used + 16 < size; r++)
        if (__atomic_load_n(&t->group->slots[r].arrived, __ATOMIC_ACQUIRE) < t->round)
            used += (size_t)snprintf(text + used, size - used, used ? ",%d" : "%d", t->group->world_ranks[r]);
}

/* Reports the broken world. A rank that was waiting for the one that did not come says TIMEOUT, like the
 * rank that looked at the clock first; the late one itself, and every later call, says PEER. */
static xd_result xdi_threads_report(const xdi_threads *t, bool waiting) {
    const uint64_t failure = xdi_threads_failure(t->group->world);
    const xd_result cause = (xd_result)(failure >> 32);
    const int culprit = (int)(failure & 0xffffffffu) - 1, me = t->group->world_ranks[t->base.rank];
    char missing[160];
    xdi_threads_drain(t);
    if (cause == XD_ERROR_TIMEOUT && culprit == me)
        return XDI_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit,
                                "rank %d came after the deadline: the world is broken", me);
    if (cause == XD_ERROR_TIMEOUT && waiting) {
        xdi_threads_missing(t, missing, sizeof missing);
        if (!missing[0]) snprintf(missing, sizeof missing, "%d", culprit);
        return XDI_FAIL_CULPRIT(t->base.ctx, XD_ERROR_TIMEOUT, culprit,
                                "rank%s %s did not arrive before the deadline",
                                strchr(missing, ',') ? "s" : "", missing);
    }
    return XDI_FAIL_CULPRIT(t->base.ctx, XD_ERROR_PEER, culprit, "rank %d %s: the world is broken", culprit,
                            cause == XD_ERROR_TIMEOUT ? "did not arrive before the deadline"
                                                      : "failed or left");
}

static bool xdi_threads_has_left(const xdi_threads_group *group, int rank) {
    return __atomic_load_n(&group->slots[rank].left, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&group->world->gone[group->world_ranks[rank]], __ATOMIC_ACQUIRE);
}

/* ---- waiting ---- */

/* Spin while a core is ours, then yield, then nap. True when the caller should look at the clock: not at
 * every turn of the spin, always after giving up the core. */
static bool xdi_threads_pause(const xd_thread_world *world, int turn) {
    if (turn < world->spin) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        return false;
    }
    if (turn < XDI_THREADS_YIELD) {
        sched_yield();
    } else {
        struct timespec nap = { 0, XDI_THREADS_NAP };
        nanosleep(&nap, NULL);
    }
    return true;
}

/* Waits until *counter, which `rank` raises, reaches `target`. */
static xd_result xdi_threads_wait(const xdi_threads *t, const uint64_t *counter, uint64_t target, int rank,
                                  double deadline) {
    const xdi_threads_group *group = t->group;
    for (int turn = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target;
         turn += turn < XDI_THREADS_YIELD) {
        if (xdi_threads_failure(group->world)) return xdi_threads_report(t, true);
        /* Its last act may have been to arrive: look again after seeing it gone. */
        if (xdi_threads_has_left(group, rank) && __atomic_load_n(counter, __ATOMIC_ACQUIRE) < target) {
            xdi_threads_break(group->world, XD_ERROR_PEER, group->world_ranks[rank]);
            return xdi_threads_report(t, true);
        }
        if (!xdi_threads_pause(group->world, turn) || xd_now(t->base.ctx) < deadline) continue;
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= target) break;
        xdi_threads_break(group->world, XD_ERROR_TIMEOUT, group->world_ranks[rank]);
        return xdi_threads_report(t, true);
    }
    return XD_OK;
}

/* Enters the next round and waits for all. */
static xd_result xdi_threads_round(xdi_threads *t, double deadline) {
    __atomic_store_n(&t->slot->arrived, ++t->round, __ATOMIC_RELEASE);
    for (int r = 0; r < t->group->size; r++)
        if (r != t->base.rank)
            XDI_TRY(xdi_threads_wait(t, &t->group->slots[r].arrived, t->round, r, deadline));
    return XD_OK;
}

static xdi_threads_page *xdi_threads_page_of(const xdi_threads *t, int rank) {
    return &t->group->slots[rank].page[t->round & 1];
}

/* ---- the vtable ---- */

static void xdi_threads_publish(const xdi_threads *t, xdi_threads_page *page, const xd_collective *c) {
    const int n = t->base.size;
    page->record = *c;
    page->data = c->send;
    for (int r = 0; c->send_counts && r < n; r++)
        page->offsets[r] = xdi_comm_offset(c->send_counts, c->send_displacements, r);
    const size_t bytes = (size_t)xdi_comm_send_elements(c, t->base.rank, n) * xd_dtype_size(c->dtype);
    page->is_short = bytes <= sizeof page->payload && !c->send_displacements;
    if (!page->is_short) return;
    if (bytes) memcpy(page->payload, c->send, bytes);
    page->data = page->payload;
}

static xd_result xdi_threads_control(xd_transport *transport, const xd_control *mine,
                                     const xd_collective *next, xd_control *all, double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    if (xdi_threads_failure(t->group->world)) return xdi_threads_report(t, false);
    xdi_threads_page *page = &t->slot->page[(t->round + 1) & 1];
    page->control = *mine;
    if (next) xdi_threads_publish(t, page, next);
    XDI_TRY(xdi_threads_round(t, deadline));
    for (int r = 0; r < t->base.size; r++) all[r] = xdi_threads_page_of(t, r)->control;
    return XD_OK;
}

/* Copies `count` elements from element `from` of a peer's data to element `to` of recv. */
static void xdi_threads_copy(const xd_collective *c, int64_t to, const xdi_threads_page *page, int64_t from,
                             int64_t count) {
    const size_t size = xd_dtype_size(c->dtype);
    char *target = (char *)c->recv + (size_t)to * size;
    const char *source = (const char *)page->data + (size_t)from * size;
    if (count > 0 && target != source) memcpy(target, source, (size_t)count * size);
}

/* Reduces `count` elements of all ranks' data into out, from element begin_own or, by_offset, from the piece that
 * each rank has for this one; `stride` elements from node to node. */
static xd_result xdi_threads_reduce(const xdi_threads *t, const xd_collective *c, void *out,
                                    int64_t begin_own, bool by_offset, int64_t stride, int64_t count) {
    const size_t size = xd_dtype_size(c->dtype);
    if (count == 0) return XD_OK;
    for (int r = 0; r < t->base.size; r++) {
        const xdi_threads_page *page = xdi_threads_page_of(t, r);
        const int64_t begin = by_offset ? page->offsets[t->base.rank] : begin_own;
        t->leaves[r] = page->record.leaves;
        t->pieces[r] = page->data ? (const char *)page->data + (size_t)begin * size : NULL;
    }
    if (c->leaves.total)
        return xd_reduce_leaves(t->base.ctx, out, t->pieces, t->leaves, t->base.size, stride, count, c->dtype,
                                c->op);
    return xd_reduce_pieces(t->base.ctx, out, t->pieces, t->base.size, count, c->dtype, c->op);
}

/* Each rank reduces its share and stores the sums into every rank's recv: in place is fine, since nobody
 * else reads that share. Short ones are reduced whole by everybody. */
static xd_result xdi_threads_all_reduce(const xdi_threads *t, const xd_collective *c, bool is_short) {
    const int64_t tile = 4096;
    const size_t size = xd_dtype_size(c->dtype);
    if (is_short) return xdi_threads_reduce(t, c, c->recv, 0, false, c->count, c->count);
    int64_t begin, end;
    xdi_comm_piece(c->count, t->base.size, t->base.rank, &begin, &end);
    for (int64_t at = begin; at < end; at += tile) {
        const int64_t n = end - at < tile ? end - at : tile;
        char *sums = (char *)c->recv + (size_t)at * size;
        XDI_TRY(xdi_threads_reduce(t, c, sums, at, false, c->count, n));
        for (int r = 0; r < t->base.size; r++)
            if (r != t->base.rank)
                memcpy((char *)xdi_threads_page_of(t, r)->record.recv + (size_t)at * size, sums,
                       (size_t)n * size);
    }
    return XD_OK;
}

static void xdi_threads_collect(const xdi_threads *t, const xd_collective *c) {
    for (int r = 0; r < t->base.size; r++) {
        const xdi_threads_page *page = xdi_threads_page_of(t, r);
        const int64_t from = c->kind == XD_COLLECTIVE_ALL_TO_ALL ? page->offsets[t->base.rank] : 0;
        xdi_threads_copy(c, xdi_comm_offset(c->recv_counts, c->recv_displacements, r), page, from,
                         c->recv_counts[r]);
    }
}

static xd_result xdi_threads_move(const xdi_threads *t, const xd_collective *c, bool is_short) {
    const int rank = t->base.rank;
    const xdi_threads_page *root = xdi_threads_page_of(t, c->root);
    switch (c->kind) {
    case XD_COLLECTIVE_ALL_REDUCE: return xdi_threads_all_reduce(t, c, is_short);
    case XD_COLLECTIVE_REDUCE_SCATTER:
        return xdi_threads_reduce(t, c, c->recv, 0, true, xdi_comm_total(c->send_counts, t->base.size),
                                  c->send_counts[rank]);
    case XD_COLLECTIVE_BROADCAST:
        if (rank != c->root) xdi_threads_copy(c, 0, root, 0, c->count);
        return XD_OK;
    case XD_COLLECTIVE_SCATTER:
        xdi_threads_copy(c, 0, root, root->offsets[rank], c->send_counts[rank]);
        return XD_OK;
    case XD_COLLECTIVE_GATHER:
        if (rank == c->root) xdi_threads_collect(t, c);
        return XD_OK;
    default: xdi_threads_collect(t, c); return XD_OK;
    }
}

/* Says that this rank touches memory of peers; false when the world is broken and they may be gone. */
static bool xdi_threads_enter(const xdi_threads *t) {
    __atomic_store_n(&t->slot->busy, 1u, __ATOMIC_SEQ_CST);
    if (!xdi_threads_failure(t->group->world)) return true;
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
    return false;
}

static void xdi_threads_exit(const xdi_threads *t) {
    __atomic_store_n(&t->slot->busy, 0u, __ATOMIC_SEQ_CST);
}

static xd_result xdi_threads_pair(xdi_threads *t, const xd_collective *c, double deadline);

static xd_result xdi_threads_execute(xd_transport *transport, const xd_collective *c, double deadline) {
    xdi_threads *t = (xdi_threads *)transport;
    if (c->kind == XD_COLLECTIVE_SEND || c->kind == XD_COLLECTIVE_RECV)
        return xdi_threads_pair(t, c, deadline);
    bool is_short = true;
    for (int r = 0; r < t->base.size; r++) is_short = is_short && xdi_threads_page_of(t, r)->is_short;
    if (is_short) return xdi_threads_move(t, c, true);
    if (!xdi_threads_enter(t)) return xdi_threads_report(t, true);
    const xd_result moved = xdi_threads_move(t, c, false);
    xdi_threads_exit(t);
    XDI_TRY(moved);
    return xdi_threads_round(t, deadline);
}

/* ---- two ranks ---- */

static xd_result xdi_threads_judge(const xdi_threads *t, const xdi_threads_mail *mail, int sender,
                                   int receiver) {
    const int *world = t->group->world_ranks;
    XDI_REQUIRE(t->base.ctx, mail->dtype == mail->wanted_dtype, XD_ERROR_MISMATCH,
                "rank %d sends %s, rank %d receives %s", world[sender], xd_dtype_name(mail->dtype),
                world[receiver], xd_dtype_name(mail->wanted_dtype));
    XDI_REQUIRE(t->base.ctx, mail->count == mail->wanted, XD_ERROR_MISMATCH,
                "rank %d sends count %lld, rank %d receives count %lld", world[sender],
                (long long)mail->count, world[receiver], (long long)mail->wanted);
    return XD_OK;
}

static xd_result xdi_threads_send(const xdi_threads *t, xdi_threads_mail *mail, const xd_collective *c,
                                  double deadline) {
    mail->data = c->send;
    mail->count = c->count;
    mail->dtype = c->dtype;
    const uint64_t number = mail->posted + 1; /* nobody else writes it */
    __atomic_store_n(&mail->posted, number, __ATOMIC_RELEASE);
    XDI_TRY(xdi_threads_wait(t, &mail->done, number, c->root, deadline));
    return xdi_threads_judge(t, mail, t->base.rank, c->root);
}

static xd_result xdi_threads_receive(const xdi_threads *t, xdi_threads_mail *mail, const xd_collective *c,
                                     double deadline) {
    const uint64_t number = mail->done + 1;
    XDI_TRY(xdi_threads_wait(t, &mail->posted, number, c->root, deadline));
    if (!xdi_threads_enter(t)) return xdi_threads_report(t, true);
    mail->wanted = c->count;
    mail->wanted_dtype = c->dtype;
    const xd_result verdict = xdi_threads_judge(t, mail, c->root, t->base.rank);
    if (verdict == XD_OK && c->count > 0)
        memcpy(c->recv, mail->data, (size_t)c->count * xd_dtype_size(c->dtype));
    __atomic_store_n(&mail->done, number, __ATOMIC_RELEASE);
    xdi_threads_exit(t);
    return verdict;
}

static xd_result xdi_threads_pair(xdi_threads *t, const xd_collective *c, double deadline) {
    xdi_threads_mail *mail = t->group->mail;
    const int me = t->base.rank, n = t->base.size;
    if (xdi_threads_failure(t->group->world)) return xdi_threads_report(t, false);
    if (c->kind == XD_COLLECTIVE_SEND) return xdi_threads_send(t, &mail[me * n + c->root], c, deadline);
    return xdi_threads_receive(t, &mail[c->root * n + me], c, deadline);
}

/* ---- handles ---- */

static xd_result xdi_threads_attach(xd_ctx *ctx, xdi_threads_group *group, int rank, xd_transport **out);

/* The first member makes the group and shows it in its slot of the parent; the others pick it up there. */
static xd_result xdi_threads_split(xd_transport *transport, const int *members, int size, int rank,
                                   double deadline, xd_transport **out) {
    xdi_threads *t = (xdi_threads *)transport;
    xdi_threads_slot *leader = &t->group->slots[members[0]];
    if (rank == 0) {
        xdi_threads_group *made = xdi_threads_group_create(t->group->world, size);
        for (int r = 0; made && r < size; r++) made->world_ranks[r] = t->group->world_ranks[members[r]];
        leader->child = made;
        __atomic_store_n(&leader->child_round, t->round, __ATOMIC_RELEASE);
    } else {
        XDI_TRY(xdi_threads_wait(t, &leader->child_round, t->round, members[0], deadline));
    }
    XDI_REQUIRE(transport->ctx, leader->child, XD_ERROR_MEMORY, "no room for a group of %d ranks", size);
    return xdi_threads_attach(transport->ctx, leader->child, rank, out);
}

static void xdi_threads_abort(xd_transport *transport) {
    xdi_threads *t = (xdi_threads *)transport;
    xdi_threads_break(t->group->world, XD_ERROR_PEER, t->group->world_ranks[t->base.rank]);
}

static void xdi_threads_destroy(xd_transport *transport) {
    xdi_threads *t = (xdi_threads *)transport;
    xdi_threads_group *group = t->group;
    __atomic_store_n(&t->slot->left, 1u, __ATOMIC_RELEASE);
    if (group == group->world->root)
        __atomic_store_n(&group->world->gone[transport->rank], 1u, __ATOMIC_RELEASE);
    xdi_threads_group_leave(group);
    xd_release(transport->ctx, t->leaves);
    xd_release(transport->ctx, (void *)t->pieces);
    xd_release(transport->ctx, t);
}

static const xd_transport_ops xdi_threads_ops = {
    "threads",         xdi_threads_control, xdi_threads_execute,
    xdi_threads_split, xdi_threads_abort,   xdi_threads_destroy
};

/* A handle on a group whose holders already count this rank; gives that place back on failure. */
static xd_result xdi_threads_attach(xd_ctx *ctx, xdi_threads_group *group, int rank, xd_transport **out) {
    const size_t n = (size_t)group->size;
    xdi_threads *t = (xdi_threads *)xd_allocate(ctx, sizeof *t);
    const void **pieces = (const void **)xd_allocate(ctx, n * sizeof *pieces);
    xd_leaves *leaves = (xd_leaves *)xd_allocate(ctx, n * sizeof *leaves);
    if (!t || !pieces || !leaves) {
        xd_release(ctx, leaves);
        xd_release(ctx, (void *)pieces);
        xd_release(ctx, t);
        xdi_threads_group_leave(group);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a handle on %d ranks", group->size);
    }
    t->base.ops = &xdi_threads_ops;
    t->base.ctx = ctx;
    t->base.rank = rank;
    t->base.size = group->size;
    t->base.world_ranks = group->world_ranks;
    t->group = group;
    t->slot = &group->slots[rank];
    t->pieces = pieces;
    t->leaves = leaves;
    *out = &t->base;
    return XD_OK;
}

/* ---- worlds ---- */

XD_API xd_result xd_thread_world_create(xd_ctx *ctx, int ranks, xd_thread_world **out) {
    XDI_REQUIRE(ctx, ranks >= 1, XD_ERROR_ARGUMENT, "a world of %d ranks", ranks);
    xd_thread_world *world = (xd_thread_world *)xd_allocate(ctx, sizeof *world);
    XDI_REQUIRE(ctx, world, XD_ERROR_MEMORY, "no room for a world of %d ranks", ranks);
    world->allocator = xd_ctx_settings(ctx)->allocator;
    if (pthread_mutex_init(&world->lock, NULL) != 0) {
        xd_release(ctx, world);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a lock");
    }
    world->spin = sysconf(_SC_NPROCESSORS_ONLN) >= ranks ? XDI_THREADS_SPIN : XDI_THREADS_SPIN_CROWDED;
    world->gone = (uint32_t *)xd_allocate(ctx, (size_t)ranks * sizeof *world->gone);
    world->root = xdi_threads_group_create(world, ranks);
    if (!world->gone || !world->root) {
        xd_thread_world_destroy(world);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a world of %d ranks", ranks);
    }
    for (int r = 0; r < ranks; r++) world->root->world_ranks[r] = r;
    *out = world;
    return XD_OK;
}

XD_API void xd_thread_world_destroy(xd_thread_world *world) {
    if (!world) return;
    while (world->groups) {
        xdi_threads_group *group = world->groups;
        world->groups = group->next;
        xdi_threads_group_free(group);
    }
    pthread_mutex_destroy(&world->lock);
    xdi_threads_free(world, world->gone);
    xdi_threads_free(world, world);
}

XD_API xd_result xd_thread_world_join(xd_thread_world *world, xd_ctx *ctx, int rank, xd_comm **out) {
    XDI_REQUIRE(ctx, rank >= 0 && rank < world->root->size, XD_ERROR_ARGUMENT, "rank %d is outside [0, %d)",
                rank, world->root->size);
    XDI_REQUIRE(ctx, __atomic_exchange_n(&world->root->slots[rank].joined, 1u, __ATOMIC_ACQ_REL) == 0,
                XD_ERROR_STATE, "rank %d has joined before", rank);
    xd_ctx_set_rank(ctx, rank);
    xd_transport *transport = NULL;
    xd_comm *comm = NULL;
    xd_result result = xdi_threads_attach(ctx, world->root, rank, &transport);
    if (result == XD_OK) result = xd_comm_create(ctx, transport, &comm);
    if (result != XD_OK) {
        xdi_threads_break(world, XD_ERROR_PEER, rank);
        return result;
    }
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    result = xdi_threads_round((xdi_threads *)transport, deadline);
    if (result != XD_OK) {
        xd_comm_destroy(comm);
        return result;
    }
    *out = comm;
    return XD_OK;
}

/* ---- the runner ---- */

typedef struct xdi_threads_run {
    xd_thread_world *world;
    const xd_ctx_desc *desc;
    xd_rank_function function;
    void *argument;
    int rank;
    pthread_t thread;
    xd_result result;
    xd_error error;
} xdi_threads_run;

static void xdi_threads_set_error(xdi_threads_run *run, const xd_error *error, const char *message) {
    run->error.rank = run->rank;
    run->error.culprit = -1;
    if (error && error->result == run->result)
        run->error = *error;
    else
        strncpy(run->error.message, message, sizeof run->error.message - 1);
    run->error.result = run->result;
}

static void *xdi_threads_main(void *argument) {
    xdi_threads_run *run = (xdi_threads_run *)argument;
    xd_ctx *ctx = NULL;
    xd_comm *comm = NULL;
    run->result = xd_ctx_create(run->desc, &ctx);
    if (run->result != XD_OK) {
        xdi_threads_set_error(run, NULL, "the context of a rank could not be created");
        xdi_threads_break(run->world, XD_ERROR_PEER, run->rank);
        return NULL;
    }
    run->result = xd_thread_world_join(run->world, ctx, run->rank, &comm);
    if (run->result == XD_OK) run->result = run->function(comm, run->argument);
    if (run->result != XD_OK) {
        xdi_threads_set_error(run, xd_last_error(ctx), "the rank function returned an error of its own");
        xdi_threads_break(run->world, XD_ERROR_PEER, run->rank);
    }
    xd_comm_destroy(comm);
    xd_ctx_destroy(ctx);
    return NULL;
}

/* PEER and TIMEOUT are echoes of another rank's failure when there is one. */
static const xdi_threads_run *xdi_threads_culprit(const xdi_threads_run *runs, int ranks) {
    const xdi_threads_run *found = NULL;
    int best = 0;
    for (int r = 0; r < ranks; r++) {
        const xd_result result = runs[r].result;
        const int weight = result == XD_OK              ? 0
                           : result == XD_ERROR_PEER    ? 1
                           : result == XD_ERROR_TIMEOUT ? 2
                                                        : 3;
        if (weight <= best) continue;
        best = weight;
        found = &runs[r];
    }
    return found;
}

static xd_result xdi_threads_run_all(xd_ctx *ctx, xdi_threads_run *runs, int ranks, xd_error *error) {
    int started = 1;
    while (started < ranks &&
           pthread_create(&runs[started].thread, NULL, xdi_threads_main, &runs[started]) == 0)
        started++;
    if (started < ranks) xdi_threads_break(runs[0].world, XD_ERROR_PEER, started);
    xdi_threads_main(&runs[0]);
    for (int r = 1; r < started; r++) pthread_join(runs[r].thread, NULL);
    if (started < ranks) {
        const xd_result result =
            XDI_FAIL(ctx, XD_ERROR_MEMORY, "the system has no thread for rank %d", started);
        if (error) *error = *xd_last_error(ctx);
        return result;
    }
    const xdi_threads_run *culprit = xdi_threads_culprit(runs, ranks);
    if (!culprit) return XD_OK;
    if (error) *error = culprit->error;
    return culprit->result;
}

XD_API xd_result xd_run_threads(int ranks, const xd_ctx_desc *desc, xd_rank_function function, void *argument,
                                xd_error *error) {
    xd_ctx *ctx = NULL;
    xd_thread_world *world = NULL;
    xdi_threads_run *runs = NULL;
    xd_result result = xd_ctx_create(desc, &ctx);
    if (result != XD_OK) return result;
    result = xd_thread_world_create(ctx, ranks, &world);
    if (result == XD_OK) {
        runs = (xdi_threads_run *)xd_allocate(ctx, (size_t)ranks * sizeof *runs);
        if (!runs) result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d ranks", ranks);
    }
    if (result != XD_OK && error) *error = *xd_last_error(ctx);
    for (int r = 0; runs && r < ranks; r++) {
        runs[r].world = world;
        runs[r].desc = desc;
        runs[r].function = function;
        runs[r].argument = argument;
        runs[r].rank = r;
    }
    if (runs) result = xdi_threads_run_all(ctx, runs, ranks, error);
    xd_release(ctx, runs);
    xd_thread_world_destroy(world);
    xd_ctx_destroy(ctx);
    return result;
}

/* >>comm/leaves.c */

#include <inttypes.h>
#include <string.h>

struct xd_leaf_stack {
    xd_ctx *ctx;
    xd_leaves leaves;
    int64_t elements;
    int64_t pushed; /* leaves so far */
    int64_t depth;  /* nodes on the stack */
    float *nodes;   /* [deepest, elements] */
};

/* Most nodes alive at once while `count` leaves are pushed: the forest of all but the last leaf, and that
 * leaf. Forests of shorter ranges are no larger than 2 log2(count) + 1, so the maximum is looked up, not
 * estimated. */
static int64_t xdi_leaf_stack_deepest(const xd_leaves *leaves) {
    int64_t deepest = 1;
    for (int64_t n = 1; n <= leaves->count; n++) {
        const int64_t depth = xd_leaves_nodes(leaves->first, n - 1) + 1;
        if (depth > deepest) deepest = depth;
    }
    return deepest;
}

XD_API xd_result xd_leaf_stack_create(xd_ctx *ctx, xd_leaves leaves, int64_t elements, xd_leaf_stack **out) {
    XDI_REQUIRE(ctx,
                leaves.first >= 0 && leaves.count >= 0 && leaves.first <= leaves.total &&
                    leaves.count <= leaves.total - leaves.first,
                XD_ERROR_ARGUMENT, "leaves [%" PRId64 ", +%" PRId64 ") lie outside [0, %" PRId64 ")",
                leaves.first, leaves.count, leaves.total);
    XDI_REQUIRE(ctx, elements >= 0, XD_ERROR_ARGUMENT, "%" PRId64 " elements in a leaf", elements);
    size_t bytes = 0;
    xd_leaf_stack *stack = (xd_leaf_stack *)xd_allocate(ctx, sizeof *stack);
    XDI_REQUIRE(ctx, stack, XD_ERROR_MEMORY, "no room for a stack of leaves");
    stack->ctx = ctx;
    stack->leaves = leaves;
    stack->elements = elements;
    if (xdi_size_multiply((size_t)elements * sizeof(float), (size_t)xdi_leaf_stack_deepest(&leaves), &bytes))
        stack->nodes = (float *)xd_allocate(ctx, bytes);
    if (!stack->nodes) {
        xd_leaf_stack_destroy(stack);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a stack of leaves of %" PRId64 " elements",
                        elements);
    }
    *out = stack;
    return XD_OK;
}

XD_API xd_result xd_leaf_stack_push(xd_leaf_stack *s, const float *leaf) {
    XDI_REQUIRE(s->ctx, s->pushed < s->leaves.count, XD_ERROR_STATE, "all %" PRId64 " leaves are there",
                s->leaves.count);
    float *top = s->nodes + s->depth++ * s->elements;
    memcpy(top, leaf, (size_t)s->elements * sizeof *top);
    const int64_t nodes = xd_leaves_nodes(s->leaves.first, ++s->pushed);
    for (; s->depth > nodes; s->depth--, top -= s->elements)
        for (int64_t i = 0; i < s->elements; i++) top[i - s->elements] = top[i - s->elements] + top[i];
    return XD_OK;
}

XD_API const float *xd_leaf_stack_forest(const xd_leaf_stack *stack) {
    return stack ? stack->nodes : NULL;
}

XD_API void xd_leaf_stack_reset(xd_leaf_stack *stack) {
    if (!stack) return;
    stack->pushed = 0;
    stack->depth = 0;
}

XD_API void xd_leaf_stack_destroy(xd_leaf_stack *stack) {
    if (!stack) return;
    xd_release(stack->ctx, stack->nodes);
    xd_release(stack->ctx, stack);
}

/* >>comm/topology.c */

#include <string.h>

XD_PRIVATE bool xdi_topology_name_is_valid(const char *name) {
    const size_t length = strlen(name);
    if (length == 0 || length >= XD_AXIS_NAME_MAX) return false;
    for (size_t i = 0; i < length; i++) {
        const char c = name[i];
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(c >= '0' && c <= '9') && c != '_') return false;
    }
    return true;
}

static xd_result xdi_topology_check_names(xd_ctx *ctx, const xd_axis *axes, int axis_count) {
    for (int i = 0; i < axis_count; i++) {
        XDI_REQUIRE(ctx, !axes[i].name == !axes[0].name, XD_ERROR_ARGUMENT,
                    "axis %d %s a name and axis 0 %s: name all of the %d axes or none", i,
                    axes[i].name ? "has" : "lacks", axes[0].name ? "has" : "lacks", axis_count);
        if (!axes[i].name) continue;
        XDI_REQUIRE(ctx, xdi_topology_name_is_valid(axes[i].name), XD_ERROR_ARGUMENT,
                    "axis %d: \"%.40s\" is no name (letters, digits and '_', at most %d)", i, axes[i].name,
                    XD_AXIS_NAME_MAX - 1);
        for (int k = 0; k < i; k++)
            XDI_REQUIRE(ctx, strcmp(axes[i].name, axes[k].name) != 0, XD_ERROR_ARGUMENT,
                        "axes %d and %d are both named \"%s\"", k, i, axes[i].name);
    }
    return XD_OK;
}

static xd_result xdi_topology_check_axes(xd_ctx *ctx, const xd_axis *axes, int axis_count) {
    int fills = 0;
    XDI_REQUIRE(ctx, axis_count >= 1 && axis_count <= XD_MESH_AXES_MAX, XD_ERROR_ARGUMENT,
                "%d axes given, 1 to %d are possible", axis_count, XD_MESH_AXES_MAX);
    for (int i = 0; i < axis_count; i++) {
        XDI_REQUIRE(ctx, axes[i].size >= 1 || axes[i].size == -1, XD_ERROR_ARGUMENT,
                    "axis %d has size %d, must be at least 1, or -1 to fill", i, axes[i].size);
        fills += axes[i].size == -1;
    }
    XDI_REQUIRE(ctx, fills <= 1, XD_ERROR_ARGUMENT, "%d axes have size -1, at most 1 can fill", fills);
    return xdi_topology_check_names(ctx, axes, axis_count);
}

static xd_result xdi_topology_check_ranks(xd_ctx *ctx, const int *ranks, int rank_count, int world_size) {
    for (int i = 0; i < rank_count; i++) {
        XDI_REQUIRE(ctx, ranks[i] >= 0 && ranks[i] < world_size, XD_ERROR_ARGUMENT,
                    "ranks[%d] is %d, the world has %d ranks", i, ranks[i], world_size);
        for (int k = 0; k < i; k++)
            XDI_REQUIRE(ctx, ranks[i] != ranks[k], XD_ERROR_ARGUMENT, "ranks[%d] and ranks[%d] are both %d",
                        k, i, ranks[i]);
    }
    return XD_OK;
}

XD_API xd_result xd_topology_create(xd_ctx *ctx, const xd_axis *axes, int axis_count, const int *ranks,
                                    int rank_count, int world_size, xd_topology *out) {
    xd_topology t;
    int64_t product = 1;
    XDI_TRY(xdi_topology_check_axes(ctx, axes, axis_count));
    const int available = ranks ? rank_count : world_size;
    XDI_REQUIRE(ctx, available >= 1, XD_ERROR_ARGUMENT, "%d ranks given, at least 1 is needed", available);
    memset(&t, 0, sizeof t);
    for (int i = 0; i < axis_count; i++) {
        t.size[i] = axes[i].size;
        if (axes[i].name) memcpy(t.name[i], axes[i].name, strlen(axes[i].name) + 1);
        if (axes[i].size > 0) product *= axes[i].size;
        XDI_REQUIRE(ctx, product <= INT32_MAX, XD_ERROR_TOPOLOGY,
                    "axis sizes multiply to more than 2^31 ranks");
    }
    for (int i = 0; i < axis_count; i++) {
        if (t.size[i] != -1) continue;
        XDI_REQUIRE(ctx, available % product == 0, XD_ERROR_TOPOLOGY,
                    "axis %d is to fill %d ranks, but the other axes multiply to %d", i, available,
                    (int)product);
        t.size[i] = available / (int)product;
        product = available;
    }
    XDI_REQUIRE(ctx, product == available, XD_ERROR_TOPOLOGY, "axis sizes multiply to %d but %s %d ranks",
                (int)product, ranks ? "the list has" : "the world has", available);
    if (ranks) XDI_TRY(xdi_topology_check_ranks(ctx, ranks, rank_count, world_size));
    t.axis_count = axis_count;
    t.rank_count = available;
    t.ranks = ranks;
    *out = t;
    return XD_OK;
}

XD_PRIVATE size_t xdi_topology_next(const char **list, const char **name) {
    *name = *list;
    const size_t length = strcspn(*list, ",-");
    *list = (*list)[length] ? *list + length + 1 : NULL;
    return length;
}

static int xdi_topology_find(const xd_axis *axes, int axis_count, const char *name, size_t length) {
    for (int i = 0; i < axis_count; i++)
        if (axes[i].name && strlen(axes[i].name) == length && memcmp(axes[i].name, name, length) == 0)
            return i;
    return -1;
}

/* The whole names of the string, in its order and then those it left out: leftmost = fastest. */
static xd_result xdi_topology_parse_order(xd_ctx *ctx, const char *order, const xd_axis *axes, int axis_count,
                                          int *sequence) {
    unsigned seen = 0;
    int count = 0;
    for (const char *rest = order, *name; rest;) {
        const size_t length = xdi_topology_next(&rest, &name);
        const int axis = xdi_topology_find(axes, axis_count, name, length);
        XDI_REQUIRE(ctx, axis >= 0, XD_ERROR_ARGUMENT, "order \"%s\": \"%.*s\" is none of the %d axes", order,
                    (int)length, name, axis_count);
        XDI_REQUIRE(ctx, !(seen >> axis & 1u), XD_ERROR_ARGUMENT, "order \"%s\" names \"%s\" twice", order,
                    axes[axis].name);
        seen |= 1u << axis;
        sequence[count++] = axis;
    }
    for (int i = 0; i < axis_count; i++) {
        if (seen >> i & 1u) continue;
        XDI_REQUIRE(ctx, axes[i].size == 1, XD_ERROR_ARGUMENT,
                    "order \"%s\" leaves out \"%s\", whose size is %d, not 1", order, axes[i].name,
                    axes[i].size);
        sequence[count++] = i;
    }
    return XD_OK;
}

XD_API xd_result xd_topology_from_order(xd_ctx *ctx, const char *order, const xd_axis *axes, int axis_count,
                                        int world_size, xd_topology *out) {
    int sequence[XD_MESH_AXES_MAX];
    xd_axis sorted[XD_MESH_AXES_MAX];
    XDI_TRY(xdi_topology_check_axes(ctx, axes, axis_count));
    XDI_REQUIRE(ctx, axes[0].name, XD_ERROR_ARGUMENT, "an order string needs named axes");
    XDI_TRY(xdi_topology_parse_order(ctx, order, axes, axis_count, sequence));
    for (int i = 0; i < axis_count; i++) sorted[axis_count - 1 - i] = axes[sequence[i]];
    xd_topology t;
    XDI_TRY(xd_topology_create(ctx, sorted, axis_count, NULL, 0, world_size, &t));
    const int cp = xd_topology_axis(&t, "cp"), ep = xd_topology_axis(&t, "ep");
    XDI_REQUIRE(ctx, cp < 0 || ep < 0 || t.size[cp] == 1 || t.size[ep] == 1, XD_ERROR_ARGUMENT,
                "cp is %d and ep is %d: one grid cannot have both above 1", t.size[cp], t.size[ep]);
    *out = t;
    return XD_OK;
}

XD_API xd_result xd_topology_from_config(xd_ctx *ctx, const xd_parallelism *desc, int world_size,
                                         xd_topology *out) {
    const int tensor = desc->tensor ? desc->tensor : 1, domain = desc->domain ? desc->domain : 1;
    xd_axis axes[3];
    int count = 0;
    XDI_REQUIRE(ctx, tensor >= 1 && domain >= 1, XD_ERROR_ARGUMENT,
                "tensor is %d and domain is %d, must be at least 1", tensor, domain);
    XDI_REQUIRE(ctx, world_size % ((int64_t)tensor * domain) == 0, XD_ERROR_TOPOLOGY,
                "tensor %d x domain %d does not divide a world of %d ranks", tensor, domain, world_size);
    const int dp = world_size / (tensor * domain);
    XDI_REQUIRE(ctx, desc->data != XD_DATA_PARALLEL_NONE || dp == 1 || desc->replicas, XD_ERROR_TOPOLOGY,
                "data is none but %d data ranks are left: their gradients would never meet (set replicas to "
                "allow it)",
                dp);
    const char *const names[3] = { "dp", "tp", "domain" };
    const int sizes[3] = { dp, tensor, domain };
    for (int i = 0; i < 3; i++) {
        if (sizes[i] == 1 && !(i == 0 && desc->data != XD_DATA_PARALLEL_NONE)) continue;
        axes[count].name = names[i];
        axes[count++].size = sizes[i];
    }
    if (count == 0 || (count == 1 && axes[0].size == 1)) {
        memset(out, 0, sizeof *out);
        return XD_OK;
    }
    return xd_topology_create(ctx, axes, count, NULL, 0, world_size, out);
}

static xd_result xdi_topology_expert_grid(xd_ctx *ctx, const xd_expert_desc *d, int tp, int cp, int ep,
                                          xd_topology *out) {
    const char *const names[5] = { "tp", "cp", "ep", "dp", "pp" };
    const int64_t taken = (int64_t)tp * cp * ep * d->pp;
    XDI_REQUIRE(ctx, d->world_size % taken == 0, XD_ERROR_TOPOLOGY,
                "tp %d x cp %d x ep %d x pp %d does not divide a world of %d ranks", tp, cp, ep, d->pp,
                d->world_size);
    const int sizes[5] = { tp, cp, ep, (int)(d->world_size / taken), d->pp };
    xd_axis axes[5];
    for (int i = 0; i < 5; i++) {
        axes[i].name = names[i];
        axes[i].size = sizes[i];
    }
    return xd_topology_from_order(ctx, d->order, axes, 5, d->world_size, out);
}

/* Position of a rank inside its pipeline group and the first rank of that group. */
static void xdi_topology_pipeline_place(const xd_topology *t, int rank, int *first, int *place) {
    const int pp = xd_topology_axis(t, "pp");
    int c[XD_MESH_AXES_MAX] = { 0 };
    xd_topology_coordinate(t, rank, c);
    *place = c[pp];
    c[pp] = 0;
    *first = xd_topology_rank(t, c);
}

static xd_result xdi_topology_check_pipelines(xd_ctx *ctx, const xd_topology *dense,
                                              const xd_topology *expert) {
    for (int rank = 0; rank < dense->rank_count; rank++) {
        int first[2], place[2];
        xdi_topology_pipeline_place(dense, rank, &first[0], &place[0]);
        xdi_topology_pipeline_place(expert, rank, &first[1], &place[1]);
        XDI_REQUIRE(ctx, first[0] == first[1] && place[0] == place[1], XD_ERROR_TOPOLOGY,
                    "rank %d is stage %d of the pipeline of rank %d in the dense grid, but stage %d of that "
                    "of rank %d in "
                    "the expert grid",
                    rank, place[0], first[0], place[1], first[1]);
    }
    return XD_OK;
}

XD_API xd_result xd_topology_experts(xd_ctx *ctx, const xd_expert_desc *desc, xd_topology *dense,
                                     xd_topology *expert) {
    xd_expert_desc d = *desc;
    if (!d.tp) d.tp = 1;
    if (!d.cp) d.cp = 1;
    if (!d.ep) d.ep = 1;
    if (!d.pp) d.pp = 1;
    if (!d.expert_tp) d.expert_tp = d.tp;
    if (!d.optimizer_instances) d.optimizer_instances = 1;
    if (!d.order) d.order = "tp-cp-ep-dp-pp";
    XDI_REQUIRE(ctx,
                d.tp > 0 && d.cp > 0 && d.ep > 0 && d.pp > 0 && d.expert_tp > 0 && d.optimizer_instances > 0,
                XD_ERROR_ARGUMENT,
                "sizes tp %d cp %d ep %d pp %d expert_tp %d optimizer_instances %d: none may be negative",
                d.tp, d.cp, d.ep, d.pp, d.expert_tp, d.optimizer_instances);
    XDI_REQUIRE(ctx, !d.virtual_pipeline || d.pp > 1, XD_ERROR_ARGUMENT,
                "virtual_pipeline is %d but pp is %d", d.virtual_pipeline, d.pp);
    xd_topology grids[2];
    XDI_TRY(xdi_topology_expert_grid(ctx, &d, d.tp, d.cp, 1, &grids[0]));
    XDI_TRY(xdi_topology_expert_grid(ctx, &d, d.expert_tp, 1, d.ep, &grids[1]));
    const int data_ranks = d.world_size / (d.tp * d.pp);
    XDI_REQUIRE(ctx, data_ranks % d.optimizer_instances == 0, XD_ERROR_TOPOLOGY,
                "dp x cp is %d, not a multiple of %d optimizer instances", data_ranks, d.optimizer_instances);
    XDI_TRY(xdi_topology_check_pipelines(ctx, &grids[0], &grids[1]));
    *dense = grids[0];
    *expert = grids[1];
    return XD_OK;
}

XD_API xd_result xd_topology_unflatten(xd_ctx *ctx, const xd_topology *topology, const char *axis,
                                       const xd_axis *parts, int part_count, xd_topology *out) {
    const int at = axis ? xd_topology_axis(topology, axis) : -1;
    xd_axis axes[XD_MESH_AXES_MAX];
    int64_t product = 1;
    int count = 0;
    XDI_REQUIRE(ctx, at >= 0, XD_ERROR_ARGUMENT, "there is no axis \"%s\" to unflatten", axis ? axis : "");
    XDI_REQUIRE(ctx, part_count >= 1 && topology->axis_count - 1 + part_count <= XD_MESH_AXES_MAX,
                XD_ERROR_ARGUMENT, "%d parts for one of %d axes, at most %d axes are possible", part_count,
                topology->axis_count, XD_MESH_AXES_MAX);
    XDI_TRY(xdi_topology_check_axes(ctx, parts, part_count));
    for (int i = 0; i < part_count; i++) product *= parts[i].size;
    XDI_REQUIRE(ctx, product == topology->size[at], XD_ERROR_TOPOLOGY,
                "the parts multiply to %lld but \"%s\" has size %d", (long long)product, axis,
                topology->size[at]);
    for (int i = 0; i < topology->axis_count; i++) {
        for (int k = 0; i == at && k < part_count; k++) axes[count++] = parts[k];
        if (i == at) continue;
        axes[count].name = topology->name[i];
        axes[count++].size = topology->size[i];
    }
    xd_topology t;
    XDI_TRY(xd_topology_create(ctx, axes, count, NULL, 0, topology->rank_count, &t));
    t.ranks = topology->ranks;
    *out = t;
    return XD_OK;
}

XD_API int xd_topology_axis(const xd_topology *topology, const char *name) {
    for (int i = 0; i < topology->axis_count; i++)
        if (name[0] && strcmp(topology->name[i], name) == 0) return i;
    return -1;
}

XD_API xd_result xd_topology_axes(xd_ctx *ctx, const xd_topology *topology, const char *names,
                                  unsigned *mask) {
    unsigned found = 0;
    XDI_REQUIRE(ctx, topology->axis_count > 0 && topology->name[0][0], XD_ERROR_ARGUMENT,
                "\"%s\" cannot be looked up: the mesh has no axis names", names);
    for (const char *rest = names, *name; rest;) {
        const size_t length = xdi_topology_next(&rest, &name);
        int axis = topology->axis_count - 1;
        while (axis >= 0 &&
               (strlen(topology->name[axis]) != length || memcmp(topology->name[axis], name, length) != 0))
            axis--;
        XDI_REQUIRE(ctx, axis >= 0, XD_ERROR_ARGUMENT, "\"%.*s\" in \"%s\" is none of the %d axes",
                    (int)length, name, names, topology->axis_count);
        XDI_REQUIRE(ctx, !(found >> axis & 1u), XD_ERROR_ARGUMENT, "\"%s\" names \"%s\" twice", names,
                    topology->name[axis]);
        found |= 1u << axis;
    }
    *mask = found;
    return XD_OK;
}

XD_API int xd_topology_rank(const xd_topology *topology, const int *coordinate) {
    int linear = 0;
    for (int i = 0; i < topology->axis_count; i++) linear = linear * topology->size[i] + coordinate[i];
    return topology->ranks ? topology->ranks[linear] : linear;
}

XD_API bool xd_topology_coordinate(const xd_topology *topology, int rank, int *coordinate) {
    int linear = rank;
    if (topology->ranks)
        for (linear = 0; linear < topology->rank_count && topology->ranks[linear] != rank;) linear++;
    if (linear < 0 || linear >= topology->rank_count) return false;
    for (int i = topology->axis_count - 1; i >= 0; i--) {
        coordinate[i] = linear % topology->size[i];
        linear /= topology->size[i];
    }
    return true;
}

/* Counts up one coordinate over the axes in mask, last axis fastest; false after the last one (all are 0
 * again). */
static bool xdi_topology_advance(const xd_topology *topology, unsigned mask, int *coordinate) {
    for (int i = topology->axis_count - 1; i >= 0; i--) {
        if (!(mask >> i & 1u)) continue;
        if (++coordinate[i] < topology->size[i]) return true;
        coordinate[i] = 0;
    }
    return false;
}

XD_API int xd_topology_groups_of(const xd_topology *topology, unsigned mask, int *ranks) {
    int coordinate[XD_MESH_AXES_MAX] = { 0 };
    int count = 0, size = 1;
    for (int i = 0; i < topology->axis_count; i++)
        if (mask >> i & 1u) size *= topology->size[i];
    do {
        do ranks[count++] = xd_topology_rank(topology, coordinate);
        while (xdi_topology_advance(topology, mask, coordinate));
    } while (xdi_topology_advance(topology, ~mask, coordinate));
    return size;
}

XD_API xd_result xd_topology_groups(xd_ctx *ctx, const xd_topology *topology, const char *names, int *ranks,
                                    int *group_size) {
    unsigned mask;
    XDI_TRY(xd_topology_axes(ctx, topology, names, &mask));
    *group_size = xd_topology_groups_of(topology, mask, ranks);
    return XD_OK;
}

XD_API bool xd_topology_equal(const xd_topology *a, const xd_topology *b) {
    if (a->axis_count != b->axis_count || a->rank_count != b->rank_count) return false;
    for (int i = 0; i < a->axis_count; i++)
        if (a->size[i] != b->size[i] || strcmp(a->name[i], b->name[i]) != 0) return false;
    for (int i = 0; i < a->rank_count; i++)
        if ((a->ranks ? a->ranks[i] : i) != (b->ranks ? b->ranks[i] : i)) return false;
    return true;
}

XD_API uint64_t xd_hash(uint64_t seed, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t hash = seed ? seed : 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

XD_API uint64_t xd_topology_hash(const xd_topology *topology) {
    uint64_t hash = xd_hash(0, &topology->axis_count, sizeof topology->axis_count);
    for (int i = 0; i < topology->axis_count; i++) {
        hash = xd_hash(hash, &topology->size[i], sizeof topology->size[i]);
        hash = xd_hash(hash, topology->name[i], strlen(topology->name[i]) + 1);
    }
    for (int i = 0; i < topology->rank_count; i++) {
        const int rank = topology->ranks ? topology->ranks[i] : i;
        hash = xd_hash(hash, &rank, sizeof rank);
    }
    return hash;
}

/* >>comm/mesh.c */

#include <stdio.h>
#include <string.h>

/* One partition of the world into ordered groups: for each rank the first member of its group and its place
 * there; leader -1 -> the rank stands outside. Known in full on every rank, so that all find it, or do not,
 * alike. */
typedef struct xdi_mesh_entry {
    int *leader, *place; /* [world size] each */
    xd_comm *comm;       /* this rank's group; NULL when it stands outside */
    bool owned;          /* false: the world itself */
    struct xdi_mesh_entry *next;
} xdi_mesh_entry;

typedef struct xdi_mesh_table {
    int references;
    xd_comm *world;
    xd_ctx *ctx;
    uint64_t created; /* meshes so far: part of what ranks compare */
    xdi_mesh_entry *entries;
} xdi_mesh_table;

/* The root that derived meshes refer to: axes over ranks, and the names that flatten gave. */
typedef struct xdi_mesh_root {
    int references;
    xdi_mesh_table *table;
    xd_topology topology; /* ranks owned */
    bool member;
    int coordinate[XD_MESH_AXES_MAX];
    xdi_mesh_entry *groups[1 << XD_MESH_AXES_MAX]; /* by set of axes; NULL -> not asked for yet */
    int flat_count;
    char flat_name[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    unsigned flat_axes[XD_MESH_AXES_MAX];
} xdi_mesh_root;

struct xd_mesh {
    xdi_mesh_root *root;
    unsigned axes[XD_MESH_AXES_MAX]; /* root axes behind each own axis */
    xd_topology topology;            /* own axes; ranks owned */
};

XD_API xd_result xd_agree_same(xd_comm *comm, uint64_t hash, const char *what) {
    xd_ctx *ctx = xd_comm_ctx(comm);
    const int size = xd_comm_size(comm);
    int64_t *counts = (int64_t *)xd_allocate(ctx, 2 * (size_t)size * sizeof *counts);
    const xd_result room =
        xd_agree(comm, counts ? XD_OK : XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %d hashes", size));
    if (room != XD_OK) {
        xd_release(ctx, counts);
        return room;
    }
    int64_t mine, *all = counts + size;
    memcpy(&mine, &hash, sizeof mine);
    for (int i = 0; i < size; i++) counts[i] = 1;
    xd_result result = xd_all_gather(comm, &mine, all, counts, XD_DTYPE_I64);
    char list[200];
    size_t used = 0;
    int differ = 0;
    for (int i = 1; result == XD_OK && i < size; i++) {
        if (all[i] == all[0]) continue;
        if (used + 16 < sizeof list)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", differ ? "," : "",
                                     xd_comm_world_rank(comm, i));
        differ++;
    }
    if (differ)
        result = XDI_FAIL(ctx, XD_ERROR_MISMATCH, "%s: rank%s %s passed something else than rank %d", what,
                          differ > 1 ? "s" : "", list, xd_comm_world_rank(comm, 0));
    xd_release(ctx, counts);
    return result;
}

static void xdi_mesh_entry_destroy(xd_ctx *ctx, xdi_mesh_entry *entry) {
    if (!entry) return;
    if (entry->owned) xd_comm_destroy(entry->comm);
    xd_release(ctx, entry->leader);
    xd_release(ctx, entry);
}

static void xdi_mesh_table_release(xdi_mesh_table *table) {
    if (!table || --table->references > 0) return;
    for (xdi_mesh_entry *next, *entry = table->entries; entry; entry = next) {
        next = entry->next;
        xdi_mesh_entry_destroy(table->ctx, entry);
    }
    xd_release(table->ctx, table);
}

static void xdi_mesh_root_release(xdi_mesh_root *root) {
    if (!root || --root->references > 0) return;
    xdi_mesh_table *table = root->table;
    xd_release(table->ctx, (void *)root->topology.ranks);
    xd_release(table->ctx, root);
    xdi_mesh_table_release(table);
}

XD_API void xd_mesh_destroy(xd_mesh *mesh) {
    if (!mesh) return;
    xd_ctx *ctx = mesh->root->table->ctx;
    xdi_mesh_root_release(mesh->root);
    xd_release(ctx, (void *)mesh->topology.ranks);
    xd_release(ctx, mesh);
}

/* The topology with a rank list of its own; false without memory. */
static bool xdi_mesh_own_ranks(xd_ctx *ctx, xd_topology *topology) {
    int *ranks = (int *)xd_allocate(ctx, (size_t)topology->rank_count * sizeof *ranks);
    for (int i = 0; ranks && i < topology->rank_count; i++)
        ranks[i] = topology->ranks ? topology->ranks[i] : i;
    topology->ranks = ranks;
    return ranks != NULL;
}

/* An entry for the groups over `mask`, without its communicator. NULL without memory. */
static xdi_mesh_entry *xdi_mesh_partition(xdi_mesh_table *table, const xd_topology *topology, unsigned mask) {
    xd_ctx *ctx = table->ctx;
    const int world_size = xd_comm_size(table->world);
    xdi_mesh_entry *entry = (xdi_mesh_entry *)xd_allocate(ctx, sizeof *entry);
    int *ranks = (int *)xd_allocate(ctx, (size_t)topology->rank_count * sizeof *ranks);
    if (entry) entry->leader = (int *)xd_allocate(ctx, 2 * (size_t)world_size * sizeof *entry->leader);
    if (!entry || !ranks || !entry->leader) {
        xdi_mesh_entry_destroy(ctx, entry);
        xd_release(ctx, ranks);
        return NULL;
    }
    entry->place = entry->leader + world_size;
    for (int i = 0; i < world_size; i++) entry->leader[i] = -1;
    const int size = xd_topology_groups_of(topology, mask, ranks);
    for (int i = 0; i < topology->rank_count; i++) {
        entry->leader[ranks[i]] = ranks[i - i % size];
        entry->place[ranks[i]] = i % size;
    }
    xd_release(ctx, ranks);
    return entry;
}

static xdi_mesh_entry *xdi_mesh_find(const xdi_mesh_table *table, const xdi_mesh_entry *like) {
    const size_t bytes = 2 * (size_t)xd_comm_size(table->world) * sizeof *like->leader;
    for (xdi_mesh_entry *entry = table->entries; entry; entry = entry->next)
        if (memcmp(entry->leader, like->leader, bytes) == 0) return entry;
    return NULL;
}

static bool xdi_mesh_is_identity(const xdi_mesh_entry *entry, int world_size) {
    for (int i = 0; i < world_size; i++)
        if (entry->leader[i] != 0 || entry->place[i] != i) return false;
    return true;
}

/* Makes this rank's communicator of a new entry by splitting `parent`. Collective over it. */
static xd_result xdi_mesh_connect(xdi_mesh_table *table, xdi_mesh_entry *entry, xd_comm *parent) {
    const int me = xd_comm_rank(table->world), world_size = xd_comm_size(table->world);
    int largest = 0;
    for (int i = 0; i < world_size; i++)
        if (entry->leader[i] >= 0 && entry->place[i] > largest) largest = entry->place[i];
    if (xdi_mesh_is_identity(entry, world_size)) {
        entry->comm = table->world;
        return XD_OK;
    }
    entry->owned = true;
    if (largest > 0) return xd_comm_split(parent, entry->leader[me], entry->place[me], &entry->comm);
    /* Groups of one rank need no peers; but all ranks must fail alike when one has no memory. */
    return xd_agree(parent, entry->leader[me] < 0 ? XD_OK : xd_comm_self(table->ctx, &entry->comm));
}

/* The entry for the groups over mask, made when it is new: then collective over parent. */
static xd_result xdi_mesh_entry_for(xdi_mesh_root *root, unsigned mask, xd_comm *parent,
                                    xdi_mesh_entry **out) {
    xdi_mesh_table *table = root->table;
    if (root->groups[mask]) {
        *out = root->groups[mask];
        return XD_OK;
    }
    xdi_mesh_entry *entry = xdi_mesh_partition(table, &root->topology, mask);
    xdi_mesh_entry *known = entry ? xdi_mesh_find(table, entry) : NULL;
    if (known) {
        xdi_mesh_entry_destroy(table->ctx, entry);
        *out = root->groups[mask] = known;
        return XD_OK;
    }
    xd_result result = XD_OK;
    if (!entry)
        result = XDI_FAIL(table->ctx, XD_ERROR_MEMORY, "no room for the groups of %d ranks",
                          root->topology.rank_count);
    result = xd_agree(parent, result);
    if (result == XD_OK) {
        const uint64_t hash =
            xd_hash(0, entry->leader, 2 * (size_t)xd_comm_size(table->world) * sizeof *entry->leader);
        result = xd_agree_same(parent, hash, "mesh groups");
    }
    if (result == XD_OK) result = xdi_mesh_connect(table, entry, parent);
    if (result != XD_OK) {
        xdi_mesh_entry_destroy(table->ctx, entry);
        return result;
    }
    entry->next = table->entries;
    table->entries = entry;
    *out = root->groups[mask] = entry;
    return XD_OK;
}

/* The members' communicator first, then every single axis from left to right. Outsiders take part in the
 * first. */
static xd_result xdi_mesh_connect_axes(xdi_mesh_root *root) {
    const unsigned all = (1u << root->topology.axis_count) - 1u;
    xdi_mesh_entry *members = NULL, *entry;
    XDI_TRY(xdi_mesh_entry_for(root, all, root->table->world, &members));
    xd_result result = XD_OK;
    for (int i = 0; root->member && result == XD_OK && i < root->topology.axis_count; i++)
        result = xdi_mesh_entry_for(root, 1u << i, members->comm, &entry);
    return result;
}

/* A mesh over some axes of a root, through this rank where it leaves axes out. Takes no reference on
 * failure. */
static xd_mesh *xdi_mesh_over(xdi_mesh_root *root, const unsigned *axes,
                              const char (*names)[XD_AXIS_NAME_MAX], int count) {
    xd_ctx *ctx = root->table->ctx;
    xd_mesh *mesh = (xd_mesh *)xd_allocate(ctx, sizeof *mesh);
    if (!mesh) return NULL;
    mesh->topology.axis_count = count;
    mesh->topology.rank_count = 1;
    for (int i = 0; i < count; i++) {
        mesh->axes[i] = axes[i];
        memcpy(mesh->topology.name[i], names[i], XD_AXIS_NAME_MAX);
        mesh->topology.size[i] = 1;
        for (int k = 0; k < root->topology.axis_count; k++)
            if (axes[i] >> k & 1u) mesh->topology.size[i] *= root->topology.size[k];
        mesh->topology.rank_count *= mesh->topology.size[i];
    }
    int *ranks = (int *)xd_allocate(ctx, (size_t)mesh->topology.rank_count * sizeof *ranks);
    if (!ranks) {
        xd_release(ctx, mesh);
        return NULL;
    }
    for (int r = 0; r < mesh->topology.rank_count; r++) {
        int coordinate[XD_MESH_AXES_MAX], rest = r;
        memcpy(coordinate, root->coordinate, sizeof coordinate);
        for (int i = count - 1; i >= 0; i--)
            for (int k = root->topology.axis_count - 1; k >= 0; k--) {
                if (!(axes[i] >> k & 1u)) continue;
                coordinate[k] = rest % root->topology.size[k];
                rest /= root->topology.size[k];
            }
        ranks[r] = xd_topology_rank(&root->topology, coordinate);
    }
    mesh->topology.ranks = ranks;
    mesh->root = root;
    root->references++;
    return mesh;
}

/* A root with its own copy of the topology and one reference, and the whole mesh over it. */
static xd_mesh *xdi_mesh_root_create(xdi_mesh_table *table, const xd_topology *topology) {
    xdi_mesh_root *root = (xdi_mesh_root *)xd_allocate(table->ctx, sizeof *root);
    unsigned axes[XD_MESH_AXES_MAX];
    if (!root) return NULL;
    root->references = 1;
    root->topology = *topology;
    root->table = table;
    table->references++;
    xd_mesh *mesh = NULL;
    for (int i = 0; i < topology->axis_count; i++) axes[i] = 1u << i;
    if (xdi_mesh_own_ranks(table->ctx, &root->topology)) {
        root->member = xd_topology_coordinate(topology, xd_comm_rank(table->world), root->coordinate);
        mesh =
            xdi_mesh_over(root, axes, (const char(*)[XD_AXIS_NAME_MAX])topology->name, topology->axis_count);
    }
    xdi_mesh_root_release(root); /* the mesh holds it now */
    return mesh;
}

static xd_result xdi_mesh_topology_of(xd_comm *world, const xd_mesh_desc *d, xd_topology *out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_axis axes[XD_MESH_AXES_MAX];
    int count = 0;
    int64_t product = 1;
    XDI_REQUIRE(ctx, !d->share || d->share->root->table->world == world, XD_ERROR_ARGUMENT,
                "share is a mesh over another world");
    memcpy(axes, d->axes, sizeof axes);
    for (; count < XD_MESH_AXES_MAX && (axes[count].name || axes[count].size); count++)
        product = product > 0 && product <= INT32_MAX ? product * axes[count].size : -1;
    if (d->topology) {
        count = d->topology->axis_count;
        product = d->topology->rank_count;
        for (int i = 0; i < count && i < XD_MESH_AXES_MAX; i++) {
            axes[i].name = d->topology->name[i][0] ? d->topology->name[i] : NULL;
            axes[i].size = d->topology->size[i];
        }
    }
    XDI_REQUIRE(ctx, !d->world_size || product <= 0 || product == d->world_size, XD_ERROR_ARGUMENT,
                "axis sizes multiply to %lld but world_size is %d", (long long)product, d->world_size);
    return xd_topology_create(ctx, axes, count, d->topology ? d->topology->ranks : d->ranks,
                              d->topology ? d->topology->rank_count : d->rank_count, xd_comm_size(world),
                              out);
}

static xd_result xdi_mesh_build(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_topology topology;
    XDI_TRY(xdi_mesh_topology_of(world, desc, &topology));
    xdi_mesh_table *table = desc->share ? desc->share->root->table : NULL;
    if (table)
        table->references++;
    else {
        table = (xdi_mesh_table *)xd_allocate(ctx, sizeof *table);
        XDI_REQUIRE(ctx, table, XD_ERROR_MEMORY, "no room for a mesh of %d ranks", topology.rank_count);
        table->references = 1;
        table->ctx = ctx;
        table->world = world;
    }
    xd_mesh *mesh = xdi_mesh_root_create(table, &topology);
    xdi_mesh_table_release(table); /* the mesh holds it now */
    XDI_REQUIRE(ctx, mesh, XD_ERROR_MEMORY, "no room for a mesh of %d ranks", topology.rank_count);
    *out = mesh;
    return XD_OK;
}

/* Agrees on what every rank built, compares it, and makes the communicators. Destroys mine on failure. */
static xd_result xdi_mesh_publish(xd_comm *comm, xd_result mine, xd_mesh *mesh, xd_mesh **out) {
    xd_result result = xd_agree(comm, mine);
    if (result == XD_OK) {
        const uint64_t hash = xd_topology_hash(&mesh->topology);
        const uint64_t number = ++mesh->root->table->created;
        result = xd_agree_same(comm, xd_hash(hash, &number, sizeof number), "mesh");
    }
    if (result == XD_OK) result = xdi_mesh_connect_axes(mesh->root);
    if (result != XD_OK) {
        xd_mesh_destroy(mesh);
        return result;
    }
    *out = mesh;
    return XD_OK;
}

XD_API xd_result xd_mesh_create(xd_comm *world, const xd_mesh_desc *desc, xd_mesh **out) {
    xd_mesh *mesh = NULL;
    const xd_result result = xdi_mesh_build(world, desc, &mesh);
    return xdi_mesh_publish(world, result, mesh, out);
}

XD_API const xd_topology *xd_mesh_topology(const xd_mesh *mesh) {
    return &mesh->topology;
}

XD_API xd_comm *xd_mesh_world(const xd_mesh *mesh) {
    return mesh->root->table->world;
}

XD_API bool xd_mesh_is_member(const xd_mesh *mesh) {
    return mesh->root->member;
}

static xd_result xdi_mesh_require_member(const xd_mesh *mesh) {
    XDI_REQUIRE(mesh->root->table->ctx, mesh->root->member, XD_ERROR_STATE,
                "rank %d is none of the %d ranks of the mesh", xd_comm_rank(mesh->root->table->world),
                mesh->root->topology.rank_count);
    return XD_OK;
}

/* Index of a mesh's own axis; name NULL -> the only one. */
static xd_result xdi_mesh_own_axis(const xd_mesh *mesh, const char *name, int *axis) {
    xd_ctx *ctx = mesh->root->table->ctx;
    XDI_REQUIRE(ctx, name || mesh->topology.axis_count == 1, XD_ERROR_ARGUMENT,
                "the mesh has %d axes: name one", mesh->topology.axis_count);
    *axis = name ? xd_topology_axis(&mesh->topology, name) : 0;
    XDI_REQUIRE(ctx, *axis >= 0, XD_ERROR_ARGUMENT, "\"%s\" is none of the %d axes of the mesh", name,
                mesh->topology.axis_count);
    return XD_OK;
}

XD_API xd_result xd_mesh_coordinate(const xd_mesh *mesh, const char *axis, int *coordinate) {
    int own[XD_MESH_AXES_MAX], index;
    XDI_TRY(xdi_mesh_require_member(mesh));
    XDI_TRY(xdi_mesh_own_axis(mesh, axis, &index));
    xd_topology_coordinate(&mesh->topology, xd_comm_rank(mesh->root->table->world), own);
    *coordinate = own[index];
    return XD_OK;
}

XD_API xd_result xd_mesh_axis_size(const xd_mesh *mesh, const char *axis, int *size) {
    int index;
    XDI_TRY(xdi_mesh_own_axis(mesh, axis, &index));
    *size = mesh->topology.size[index];
    return XD_OK;
}

/* One name of root axes or of a flattened set -> bits; 0 when unknown. */
static unsigned xdi_mesh_lookup(const xdi_mesh_root *root, const char *name) {
    const int axis = xd_topology_axis(&root->topology, name);
    if (axis >= 0) return 1u << axis;
    for (int i = 0; i < root->flat_count; i++)
        if (strcmp(root->flat_name[i], name) == 0) return root->flat_axes[i];
    return 0;
}

/* A list of names -> one set of root axes each, distinct. */
static xd_result xdi_mesh_parse(const xdi_mesh_root *root, const char *list, unsigned *sets,
                                char (*names)[XD_AXIS_NAME_MAX], int *count) {
    xd_ctx *ctx = root->table->ctx;
    unsigned seen = 0;
    XDI_REQUIRE(ctx, root->topology.name[0][0], XD_ERROR_ARGUMENT,
                "\"%s\" cannot be looked up: the mesh has no axis names", list);
    *count = 0;
    for (const char *rest = list, *name; rest; (*count)++) {
        const size_t length = xdi_topology_next(&rest, &name);
        XDI_REQUIRE(ctx, *count < XD_MESH_AXES_MAX && length < XD_AXIS_NAME_MAX, XD_ERROR_ARGUMENT,
                    "\"%s\" names more than %d axes or has a name above %d letters", list, XD_MESH_AXES_MAX,
                    XD_AXIS_NAME_MAX - 1);
        memset(names[*count], 0, XD_AXIS_NAME_MAX);
        memcpy(names[*count], name, length);
        sets[*count] = xdi_mesh_lookup(root, names[*count]);
        XDI_REQUIRE(ctx, sets[*count], XD_ERROR_ARGUMENT, "\"%s\" in \"%s\" is no axis of the mesh",
                    names[*count], list);
        XDI_REQUIRE(ctx, !(seen & sets[*count]), XD_ERROR_ARGUMENT, "\"%s\" names an axis twice", list);
        seen |= sets[*count];
    }
    return XD_OK;
}

/* Sets in ascending order of their first root axis. */
static xd_result xdi_mesh_require_ascending(xd_ctx *ctx, const unsigned *sets, int count) {
    for (int i = 1; i < count; i++)
        XDI_REQUIRE(ctx, (sets[i] & (0u - sets[i])) > (sets[i - 1] & (0u - sets[i - 1])), XD_ERROR_ARGUMENT,
                    "axes %d and %d of the list stand in the other order in the mesh", i - 1, i);
    return XD_OK;
}

static xd_result xdi_mesh_group_of(xdi_mesh_root *root, unsigned mask, xd_comm **out) {
    const unsigned all = (1u << root->topology.axis_count) - 1u;
    xdi_mesh_entry *entry = NULL;
    XDI_TRY(xdi_mesh_entry_for(root, mask, root->groups[all]->comm, &entry));
    *out = entry->comm;
    return XD_OK;
}

XD_API xd_result xd_mesh_group(xd_mesh *mesh, const char *axes, xd_comm **out) {
    unsigned sets[XD_MESH_AXES_MAX], mask = 0;
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    int count = 1;
    XDI_TRY(xdi_mesh_require_member(mesh));
    if (axes)
        XDI_TRY(xdi_mesh_parse(mesh->root, axes, sets, names, &count));
    else {
        XDI_TRY(xdi_mesh_own_axis(mesh, NULL, &count));
        sets[0] = mesh->axes[0];
        count = 1;
    }
    for (int i = 0; i < count; i++) mask |= sets[i];
    return xdi_mesh_group_of(mesh->root, mask, out);
}

static xd_result xdi_mesh_derive(xdi_mesh_root *root, const unsigned *sets,
                                 const char (*names)[XD_AXIS_NAME_MAX], int count, xd_mesh **out) {
    xd_mesh *mesh = xdi_mesh_over(root, sets, names, count);
    XDI_REQUIRE(root->table->ctx, mesh, XD_ERROR_MEMORY, "no room for a mesh of %d axes", count);
    *out = mesh;
    return XD_OK;
}

XD_API xd_result xd_mesh_slice(xd_mesh *mesh, const char *axes, xd_mesh **out) {
    unsigned sets[XD_MESH_AXES_MAX];
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    int count;
    XDI_TRY(xdi_mesh_require_member(mesh));
    XDI_TRY(xdi_mesh_parse(mesh->root, axes, sets, names, &count));
    XDI_TRY(xdi_mesh_require_ascending(mesh->root->table->ctx, sets, count));
    return xdi_mesh_derive(mesh->root, sets, (const char(*)[XD_AXIS_NAME_MAX])names, count, out);
}

/* The name a flattened set gets: the caller's, or its axes joined with '_'. */
static xd_result xdi_mesh_flat_name(xd_ctx *ctx, const char *axes, const char *name, char *out) {
    const char *source = name ? name : axes;
    XDI_REQUIRE(ctx, strlen(source) < XD_AXIS_NAME_MAX, XD_ERROR_ARGUMENT,
                "the name \"%s\" is longer than %d letters", source, XD_AXIS_NAME_MAX - 1);
    memset(out, 0, XD_AXIS_NAME_MAX);
    memcpy(out, source, strlen(source));
    for (char *c = out; !name && *c; c++)
        if (*c == ',' || *c == '-') *c = '_';
    XDI_REQUIRE(ctx, xdi_topology_name_is_valid(out), XD_ERROR_ARGUMENT, "\"%s\" is no name for an axis",
                out);
    return XD_OK;
}

XD_API xd_result xd_mesh_flatten(xd_mesh *mesh, const char *axes, const char *name, xd_mesh **out) {
    xdi_mesh_root *root = mesh->root;
    xd_ctx *ctx = root->table->ctx;
    unsigned sets[XD_MESH_AXES_MAX], mask = 0;
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX], flat[1][XD_AXIS_NAME_MAX];
    int count;
    xd_comm *comm;
    XDI_TRY(xdi_mesh_require_member(mesh));
    XDI_TRY(xdi_mesh_parse(root, axes, sets, names, &count));
    XDI_TRY(xdi_mesh_require_ascending(ctx, sets, count));
    XDI_TRY(xdi_mesh_flat_name(ctx, axes, name, flat[0]));
    for (int i = 0; i < count; i++) mask |= sets[i];
    const unsigned known = xdi_mesh_lookup(root, flat[0]);
    XDI_REQUIRE(ctx, !known || known == mask, XD_ERROR_ARGUMENT,
                "\"%s\" is already the name of other axes than \"%s\"", flat[0], axes);
    XDI_REQUIRE(ctx, known || root->flat_count < XD_MESH_AXES_MAX, XD_ERROR_ARGUMENT,
                "the mesh already has %d flattened names, the most there can be", root->flat_count);
    XDI_TRY(xdi_mesh_group_of(root, mask, &comm));
    XDI_TRY(xdi_mesh_derive(root, &mask, (const char(*)[XD_AXIS_NAME_MAX])flat, 1, out));
    if (!known) {
        memcpy(root->flat_name[root->flat_count], flat[0], XD_AXIS_NAME_MAX);
        root->flat_axes[root->flat_count++] = mask;
    }
    return XD_OK;
}

XD_API xd_result xd_mesh_unflatten(xd_mesh *mesh, const char *axis, const xd_axis *parts, int part_count,
                                   xd_mesh **out) {
    xdi_mesh_root *root = mesh->root;
    const unsigned all = (1u << root->topology.axis_count) - 1u;
    xd_topology topology;
    xd_mesh *fresh = NULL;
    xd_comm *members;
    XDI_TRY(xdi_mesh_require_member(mesh));
    XDI_TRY(xdi_mesh_group_of(root, all, &members));
    xd_result result =
        xd_topology_unflatten(root->table->ctx, &root->topology, axis, parts, part_count, &topology);
    if (result == XD_OK) {
        fresh = xdi_mesh_root_create(root->table, &topology);
        if (!fresh)
            result = XDI_FAIL(root->table->ctx, XD_ERROR_MEMORY, "no room for a mesh of %d axes",
                              topology.axis_count);
    }
    return xdi_mesh_publish(members, result, fresh, out);
}

XD_API xd_result xd_mesh_concatenate(xd_mesh *const *slices, int count, xd_mesh **out) {
    xdi_mesh_root *root = slices[0]->root;
    xd_ctx *ctx = root->table->ctx;
    unsigned sets[XD_MESH_AXES_MAX], seen = 0;
    char names[XD_MESH_AXES_MAX][XD_AXIS_NAME_MAX];
    int total = 0;
    XDI_TRY(xdi_mesh_require_member(slices[0]));
    for (int i = 0; i < count; i++) {
        XDI_REQUIRE(ctx, slices[i]->root == root, XD_ERROR_ARGUMENT,
                    "slice %d comes from another mesh than slice 0", i);
        for (int k = 0; k < slices[i]->topology.axis_count; k++, total++) {
            XDI_REQUIRE(ctx, total < XD_MESH_AXES_MAX && !(seen & slices[i]->axes[k]), XD_ERROR_ARGUMENT,
                        "slice %d repeats an axis of the %d slices", i, count);
            sets[total] = slices[i]->axes[k];
            seen |= sets[total];
            memcpy(names[total], slices[i]->topology.name[k], XD_AXIS_NAME_MAX);
        }
    }
    XDI_TRY(xdi_mesh_require_ascending(ctx, sets, total));
    return xdi_mesh_derive(root, sets, (const char(*)[XD_AXIS_NAME_MAX])names, total, out);
}


/* >>tensor/internal */

/* interval.c: appends [begin, end) to a list of `count`, joining it to the last entry when they touch, and
 * returns the new count. Empty intervals are dropped. */
XD_PRIVATE int xdi_interval_append(xd_interval *out, int count, int64_t begin, int64_t end);

/* >>tensor/interval.c */

#include <string.h>

XD_PRIVATE int xdi_interval_append(xd_interval *out, int count, int64_t begin, int64_t end) {
    if (begin >= end) return count;
    if (count > 0 && out[count - 1].end == begin) {
        out[count - 1].end = end;
        return count;
    }
    out[count].begin = begin;
    out[count].end = end;
    return count + 1;
}

XD_API int xd_intervals_unite(const xd_interval *a, int na, const xd_interval *b, int nb, xd_interval *out) {
    int count = 0;
    for (int i = 0, k = 0; i < na || k < nb;) {
        const xd_interval next = k >= nb || (i < na && a[i].begin <= b[k].begin) ? a[i++] : b[k++];
        const int64_t reached = count ? out[count - 1].end : next.begin;
        count = xdi_interval_append(out, count, next.begin > reached ? next.begin : reached, next.end);
    }
    return count;
}

XD_API int xd_intervals_intersect(const xd_interval *a, int na, const xd_interval *b, int nb,
                                  xd_interval *out) {
    int count = 0;
    for (int i = 0, k = 0; i < na && k < nb;) {
        const int64_t begin = a[i].begin > b[k].begin ? a[i].begin : b[k].begin;
        const int64_t end = a[i].end < b[k].end ? a[i].end : b[k].end;
        count = xdi_interval_append(out, count, begin, end);
        if (a[i].end < b[k].end)
            i++;
        else
            k++;
    }
    return count;
}

XD_API int xd_intervals_subtract(const xd_interval *a, int na, const xd_interval *b, int nb,
                                 xd_interval *out) {
    int count = 0, k = 0;
    for (int i = 0; i < na; i++) {
        int64_t begin = a[i].begin;
        while (k < nb && b[k].end <= begin) k++;
        /* b[k] may reach into a[i + 1] too, so k stays on it. */
        for (int j = k; j < nb && b[j].begin < a[i].end; j++) {
            count = xdi_interval_append(out, count, begin, b[j].begin);
            if (b[j].end > begin) begin = b[j].end;
        }
        count = xdi_interval_append(out, count, begin, a[i].end);
    }
    return count;
}

XD_API int64_t xd_intervals_extent(const xd_interval *list, int count) {
    int64_t extent = 0;
    for (int i = 0; i < count; i++) extent += list[i].end - list[i].begin;
    return extent;
}

XD_API bool xd_intervals_are_valid(const xd_interval *list, int count, int64_t extent) {
    int64_t reached = 0;
    for (int i = 0; i < count; i++) {
        if (list[i].begin < reached || list[i].end <= list[i].begin) return false;
        reached = list[i].end;
    }
    return reached <= extent;
}

XD_API int xd_intervals_select(const xd_interval *list, int count, int64_t begin, int64_t end,
                               xd_interval *out) {
    int selected = 0;
    int64_t position = 0;
    for (int i = 0; i < count; i++) {
        const int64_t extent = list[i].end - list[i].begin;
        const int64_t from = begin > position ? begin - position : 0;
        const int64_t to = end - position < extent ? end - position : extent;
        selected = xdi_interval_append(out, selected, list[i].begin + from, list[i].begin + to);
        position += extent;
    }
    return selected;
}

/* How many lists hold `index`, and the next index at which that number may change. */
static int xdi_interval_holders(const xd_interval *const *lists, const int *counts, int owners, int64_t index,
                                int64_t *next) {
    int holders = 0;
    for (int owner = 0; owner < owners; owner++)
        for (int i = 0; i < counts[owner]; i++) {
            const xd_interval v = lists[owner][i];
            if (v.begin <= index && index < v.end) holders++;
            if (v.begin > index && v.begin < *next) *next = v.begin;
            if (v.end > index && v.end < *next) *next = v.end;
        }
    return holders;
}

XD_API bool xd_intervals_cover_once(const xd_interval *const *lists, const int *counts, int owners,
                                    int64_t extent, int64_t *first, int *holders) {
    for (int64_t index = 0, next; index < extent; index = next) {
        next = extent;
        const int found = xdi_interval_holders(lists, counts, owners, index, &next);
        if (found == 1) continue;
        *first = index;
        *holders = found;
        return false;
    }
    return true;
}

XD_API xd_interval xd_chunk(int64_t n, int parts, int part) {
    const int64_t c = n / parts + (n % parts != 0);
    xd_interval piece;
    /* Compared by division, so that part * c cannot overflow. */
    piece.begin = c == 0 || part > n / c ? n : part * c;
    piece.end = n - piece.begin < c ? n : piece.begin + c;
    return piece;
}

XD_API xd_region xd_region_whole(int ndim, const int64_t *shape) {
    xd_region region;
    memset(&region, 0, sizeof region);
    region.ndim = ndim;
    for (int d = 0; d < ndim; d++) region.count[d] = xdi_interval_append(region.interval[d], 0, 0, shape[d]);
    return region;
}

XD_API void xd_region_shape(const xd_region *region, int64_t *shape) {
    for (int d = 0; d < region->ndim; d++)
        shape[d] = xd_intervals_extent(region->interval[d], region->count[d]);
}

XD_API int64_t xd_region_numel(const xd_region *region) {
    int64_t numel = 1;
    for (int d = 0; d < region->ndim; d++)
        numel *= xd_intervals_extent(region->interval[d], region->count[d]);
    return numel;
}

XD_API bool xd_region_intersect(const xd_region *a, const xd_region *b, xd_region *out) {
    bool common = true;
    out->ndim = a->ndim;
    for (int d = 0; d < a->ndim; d++) {
        out->count[d] = xd_intervals_intersect(a->interval[d], a->count[d], b->interval[d], b->count[d],
                                               out->interval[d]);
        common = common && out->count[d] > 0;
    }
    return common;
}

XD_API bool xd_region_equal(const xd_region *a, const xd_region *b) {
    if (a->ndim != b->ndim) return false;
    for (int d = 0; d < a->ndim; d++) {
        xd_interval rest[2 * XD_REGION_INTERVALS_MAX];
        const int only_a =
            xd_intervals_subtract(a->interval[d], a->count[d], b->interval[d], b->count[d], rest);
        const int only_b =
            xd_intervals_subtract(b->interval[d], b->count[d], a->interval[d], a->count[d], rest);
        if (only_a || only_b) return false;
    }
    return true;
}

/* A run of one dimension that is contiguous in both storages. */
typedef struct xdi_interval_run {
    int64_t src, dst, extent;
} xdi_interval_run;

/* Position of an index inside a list that holds it. */
static int64_t xdi_interval_position(const xd_interval *list, int64_t index) {
    int64_t position = 0;
    for (; list->end <= index; list++) position += list->end - list->begin;
    return position + index - list->begin;
}

/* Walks both lists together. Touching intervals of one side, and gaps that both sides skip, do not break a
 * run. */
static int xdi_interval_runs(const xd_region *a, const xd_region *b, int d, xdi_interval_run *runs) {
    xd_interval common[2 * XD_REGION_INTERVALS_MAX];
    const int n = xd_intervals_intersect(a->interval[d], a->count[d], b->interval[d], b->count[d], common);
    int count = 0;
    for (int i = 0; i < n; i++) {
        const int64_t src = xdi_interval_position(a->interval[d], common[i].begin);
        const int64_t dst = xdi_interval_position(b->interval[d], common[i].begin);
        const int64_t extent = common[i].end - common[i].begin;
        xdi_interval_run *last = count ? &runs[count - 1] : NULL;
        if (last && last->src + last->extent == src && last->dst + last->extent == dst) {
            last->extent += extent;
            continue;
        }
        runs[count].src = src;
        runs[count].dst = dst;
        runs[count++].extent = extent;
    }
    return count;
}

/* Drops dimensions of one step and folds a dimension into the next where both sides run on without a jump. */
static void xdi_interval_fold(xd_copy *copy) {
    int n = 0;
    for (int d = 0; d < copy->ndim; d++) {
        const int64_t extent = copy->extent[d], src = copy->src_stride[d], dst = copy->dst_stride[d];
        if (extent == 1) continue;
        const bool runs_on =
            n && copy->src_stride[n - 1] == src * extent && copy->dst_stride[n - 1] == dst * extent;
        if (!runs_on) n++;
        copy->extent[n - 1] = runs_on ? copy->extent[n - 1] * extent : extent;
        copy->src_stride[n - 1] = src;
        copy->dst_stride[n - 1] = dst;
    }
    if (n == 0) copy->extent[0] = copy->src_stride[0] = copy->dst_stride[0] = 1;
    copy->ndim = n ? n : 1;
}

static void xdi_interval_dense(const xd_region *region, const int64_t *given, int64_t *stride) {
    int64_t shape[XD_DIMS_MAX], next = 1;
    xd_region_shape(region, shape);
    for (int d = region->ndim - 1; d >= 0; d--) {
        stride[d] = given ? given[d] : next;
        next *= shape[d];
    }
}

XD_API int64_t xd_region_copies(const xd_region *src, const int64_t *src_stride, const xd_region *dst,
                                const int64_t *dst_stride, xd_copy *copies, int64_t capacity) {
    xdi_interval_run runs[XD_DIMS_MAX][2 * XD_REGION_INTERVALS_MAX];
    int64_t from[XD_DIMS_MAX], to[XD_DIMS_MAX], total = 1;
    int count[XD_DIMS_MAX], at[XD_DIMS_MAX] = { 0 };
    for (int d = 0; d < src->ndim; d++) {
        count[d] = xdi_interval_runs(src, dst, d, runs[d]);
        total *= count[d];
    }
    xdi_interval_dense(src, src_stride, from);
    xdi_interval_dense(dst, dst_stride, to);
    for (int64_t i = 0; i < total && i < capacity; i++) {
        xd_copy *copy = &copies[i];
        memset(copy, 0, sizeof *copy);
        copy->ndim = src->ndim;
        for (int d = 0; d < src->ndim; d++) {
            const xdi_interval_run run = runs[d][at[d]];
            copy->src_offset += run.src * from[d];
            copy->dst_offset += run.dst * to[d];
            copy->extent[d] = run.extent;
            copy->src_stride[d] = from[d];
            copy->dst_stride[d] = to[d];
        }
        xdi_interval_fold(copy);
        for (int d = src->ndim - 1; d >= 0 && ++at[d] == count[d]; d--) at[d] = 0;
    }
    return total;
}

XD_API void xd_copy_run(const xd_copy *copy, const void *src, void *dst, size_t size) {
    const int last = copy->ndim - 1;
    const bool dense = copy->src_stride[last] == 1 && copy->dst_stride[last] == 1;
    const int64_t inner = dense ? 1 : copy->extent[last];
    const size_t block = dense ? (size_t)copy->extent[last] * size : size;
    int64_t at[XD_DIMS_MAX] = { 0 }, s = copy->src_offset, d = copy->dst_offset;
    int dim;
    do {
        for (int64_t i = 0; i < inner; i++)
            memcpy((char *)dst + (size_t)(d + i * copy->dst_stride[last]) * size,
                   (const char *)src + (size_t)(s + i * copy->src_stride[last]) * size, block);
        for (dim = last - 1; dim >= 0; dim--) {
            s += copy->src_stride[dim];
            d += copy->dst_stride[dim];
            if (++at[dim] < copy->extent[dim]) break;
            s -= copy->src_stride[dim] * copy->extent[dim];
            d -= copy->dst_stride[dim] * copy->extent[dim];
            at[dim] = 0;
        }
    } while (dim >= 0);
}

/* >>tensor/layout.c */

#include <string.h>

struct xd_layout {
    xd_ctx *ctx;
    xd_layout_desc desc; /* pointers lead into the arrays below */
    xd_topology topology;
    int *ranks;
    int64_t *numbers[XD_MESH_AXES_MAX]; /* offsets or section sizes of each axis */
};

static xd_result xdi_layout_check_shape(xd_ctx *ctx, const xd_layout_desc *d) {
    int64_t room = (int64_t)1 << 62;
    bool empty = false;
    XDI_REQUIRE(ctx, d->ndim >= 0 && d->ndim <= XD_DIMS_MAX, XD_ERROR_ARGUMENT,
                "%d dimensions, 0 to %d are possible", d->ndim, XD_DIMS_MAX);
    XDI_REQUIRE(ctx, d->topology && d->topology->axis_count > 0, XD_ERROR_ARGUMENT,
                "a layout needs a topology with axes");
    for (int i = 0; i < d->ndim; i++) {
        XDI_REQUIRE(ctx, d->shape[i] >= 0, XD_ERROR_SHAPE, "dimension %d has extent %lld", i,
                    (long long)d->shape[i]);
        empty = empty || d->shape[i] == 0;
    }
    for (int i = 0; i < d->ndim && !empty; i++) {
        room /= d->shape[i];
        XDI_REQUIRE(ctx, room > 0, XD_ERROR_SHAPE,
                    "the shape has more than 2^62 elements (at dimension %d, extent %lld)", i,
                    (long long)d->shape[i]);
    }
    return XD_OK;
}

static xd_result xdi_layout_check_split(xd_ctx *ctx, const xd_layout_desc *d, int axis) {
    const xd_placement *p = &d->placement[axis];
    const int forms = (p->offsets != NULL) + (p->sections > 1) + p->balanced;
    XDI_REQUIRE(ctx, p->dim >= -d->ndim && p->dim < d->ndim, XD_ERROR_ARGUMENT,
                "axis %d splits dimension %d of a tensor of %d dimensions", axis, p->dim, d->ndim);
    XDI_REQUIRE(ctx, forms <= 1, XD_ERROR_ARGUMENT,
                "axis %d: choose one of offsets, sections and balanced, not %d", axis, forms);
    XDI_REQUIRE(ctx, p->sections >= 0 && p->sections <= XD_LAYOUT_INTERVALS_MAX, XD_ERROR_ARGUMENT,
                "axis %d has %d sections, at most %d are possible", axis, p->sections,
                XD_LAYOUT_INTERVALS_MAX);
    for (int i = 0; p->offsets && i < d->topology->size[axis]; i++)
        XDI_REQUIRE(ctx, p->offsets[0] == 0 && p->offsets[i] <= p->offsets[i + 1], XD_ERROR_ARGUMENT,
                    "axis %d: offsets[%d] is %lld and offsets[%d] is %lld: they must ascend from 0", axis, i,
                    (long long)p->offsets[i], i + 1, (long long)p->offsets[i + 1]);
    for (int i = 0; p->section_sizes && i < p->sections; i++)
        XDI_REQUIRE(ctx, p->section_sizes[i] >= 0, XD_ERROR_ARGUMENT, "axis %d: section %d has size %lld",
                    axis, i, (long long)p->section_sizes[i]);
    return XD_OK;
}

static xd_result xdi_layout_check(xd_ctx *ctx, const xd_layout_desc *d) {
    int first_partial = -1;
    unsigned seen = 0;
    for (int i = 0; i < d->topology->axis_count; i++) {
        const xd_placement *p = &d->placement[i];
        XDI_REQUIRE(ctx,
                    d->order[i] >= 0 && d->order[i] < d->topology->axis_count && !(seen >> d->order[i] & 1u),
                    XD_ERROR_ARGUMENT, "order[%d] is %d: the order must name each of the %d axes once", i,
                    d->order[i], d->topology->axis_count);
        seen |= 1u << d->order[i];
        XDI_REQUIRE(ctx, p->kind == XD_REPLICATE || p->kind == XD_SHARD || p->kind == XD_PARTIAL,
                    XD_ERROR_ARGUMENT, "axis %d has no such placement as %d", i, (int)p->kind);
        if (p->kind == XD_SHARD) XDI_TRY(xdi_layout_check_split(ctx, d, i));
        if (p->kind != XD_PARTIAL) continue;
        if (first_partial < 0) first_partial = i;
        XDI_REQUIRE(ctx, p->op == d->placement[first_partial].op, XD_ERROR_UNSUPPORTED,
                    "axes %d and %d are partial by different operations, %d and %d", first_partial, i,
                    (int)d->placement[first_partial].op, (int)p->op);
    }
    return XD_OK;
}

/* One split of what is left of a dimension, for one coordinate of the axis. `extent` is what is left; the
 * result is in positions of that. Returns the number of pieces; -1 when the numbers of the placement do not
 * fit the extent. */
static int xdi_layout_pieces(const xd_placement *p, int size, int coordinate, int64_t extent,
                             xd_interval *pieces) {
    if (p->offsets) {
        pieces[0].begin = p->offsets[coordinate];
        pieces[0].end = p->offsets[coordinate + 1];
        return p->offsets[size] == extent ? 1 : -1;
    }
    if (p->balanced) {
        const int64_t c = extent / (2 * (int64_t)size);
        pieces[0].begin = coordinate * c;
        pieces[0].end = pieces[0].begin + c;
        pieces[1].begin = (2 * (int64_t)size - 1 - coordinate) * c;
        pieces[1].end = pieces[1].begin + c;
        return extent % (2 * (int64_t)size) == 0 ? 2 : -1;
    }
    const int sections = p->sections ? p->sections : 1;
    int64_t begin = 0;
    for (int i = 0; i < sections; i++) {
        const int64_t n = p->section_sizes ? p->section_sizes[i] : extent / sections;
        pieces[i] = xd_chunk(n, size, coordinate);
        pieces[i].begin += begin;
        pieces[i].end += begin;
        begin += n;
    }
    return begin == extent ? sections : -1;
}

/* Applies the splits in their order. Returns -1, or the axis whose split does not fit, with the extent it was
 * given; an axis that would make too many intervals is returned with extent -1. */
static int xdi_layout_split(const xd_layout_desc *d, const int *coordinate, xd_region *region,
                            int64_t *extent) {
    *region = xd_region_whole(d->ndim, d->shape);
    for (int i = 0; i < d->topology->axis_count; i++) {
        const int axis = d->order[i];
        const xd_placement *p = &d->placement[axis];
        if (p->kind != XD_SHARD) continue;
        xd_interval pieces[XD_LAYOUT_INTERVALS_MAX], all[XD_REGION_INTERVALS_MAX],
            old[XD_REGION_INTERVALS_MAX];
        const int old_count = region->count[p->dim];
        int count = 0;
        memcpy(old, region->interval[p->dim], sizeof old);
        *extent = xd_intervals_extent(old, old_count);
        const int n = xdi_layout_pieces(p, d->topology->size[axis], coordinate[axis], *extent, pieces);
        if (n < 0) return axis;
        for (int k = 0; k < n; k++) {
            xd_interval part[XD_REGION_INTERVALS_MAX];
            const int found = xd_intervals_select(old, old_count, pieces[k].begin, pieces[k].end, part);
            for (int j = 0; j < found && count >= 0; j++) {
                count = xdi_interval_append(all, count, part[j].begin, part[j].end);
                if (count > XD_LAYOUT_INTERVALS_MAX) count = -1;
            }
            if (count < 0) break;
        }
        if (count < 0) *extent = -1;
        if (count < 0) return axis;
        memcpy(region->interval[p->dim], all, sizeof all);
        region->count[p->dim] = count;
    }
    return -1;
}

/* The numbers of a split must fit at every coordinate, because an earlier split can leave other extents to
 * others. */
static xd_result xdi_layout_check_regions(xd_ctx *ctx, const xd_layout_desc *d) {
    for (int r = 0; r < d->topology->rank_count; r++) {
        const int rank = d->topology->ranks ? d->topology->ranks[r] : r;
        int coordinate[XD_MESH_AXES_MAX];
        xd_region region;
        int64_t extent = 0;
        xd_topology_coordinate(d->topology, rank, coordinate);
        const int axis = xdi_layout_split(d, coordinate, &region, &extent);
        if (axis < 0) continue;
        XDI_REQUIRE(ctx, extent >= 0, XD_ERROR_UNSUPPORTED,
                    "axis %d cuts dimension %d into more than %d intervals on rank %d", axis,
                    d->placement[axis].dim, XD_LAYOUT_INTERVALS_MAX, rank);
        const xd_placement *p = &d->placement[axis];
        const long long given =
            p->offsets ? (long long)p->offsets[d->topology->size[axis]] : (long long)p->sections;
        return XDI_FAIL(ctx, XD_ERROR_SHAPE,
                        "axis %d splits %lld indices of dimension %d on rank %d, but its %s %lld", axis,
                        (long long)extent, p->dim, rank,
                        p->offsets    ? "offsets end at"
                        : p->balanced ? "balanced pieces need a multiple of 2 x"
                                      : "sections do not add up to that; there are",
                        p->balanced ? (long long)d->topology->size[axis] : given);
    }
    return XD_OK;
}

static void xdi_layout_defaults(xd_layout_desc *d) {
    bool given = false;
    for (int i = 0; i < XD_MESH_AXES_MAX; i++) given = given || d->order[i] != 0;
    for (int i = 0; i < XD_MESH_AXES_MAX && !given; i++) d->order[i] = i;
}

/* Points the copied desc at copies of what the caller's points to. False without memory. */
static bool xdi_layout_own(xd_layout *layout) {
    xd_layout_desc *d = &layout->desc;
    layout->topology = *d->topology;
    layout->ranks = (int *)xd_allocate(layout->ctx, (size_t)d->topology->rank_count * sizeof *layout->ranks);
    if (!layout->ranks) return false;
    for (int i = 0; i < d->topology->rank_count; i++)
        layout->ranks[i] = d->topology->ranks ? d->topology->ranks[i] : i;
    layout->topology.ranks = d->topology->ranks ? layout->ranks : NULL;
    for (int i = 0; i < d->topology->axis_count; i++) {
        xd_placement *p = &d->placement[i];
        const int64_t *from = p->offsets ? p->offsets : p->section_sizes;
        const int count = p->offsets ? d->topology->size[i] + 1 : p->sections;
        if (p->kind != XD_SHARD || !from) continue;
        layout->numbers[i] = (int64_t *)xd_allocate(layout->ctx, (size_t)count * sizeof *from);
        if (!layout->numbers[i]) return false;
        memcpy(layout->numbers[i], from, (size_t)count * sizeof *from);
        if (p->offsets)
            p->offsets = layout->numbers[i];
        else
            p->section_sizes = layout->numbers[i];
    }
    d->topology = &layout->topology;
    return true;
}

XD_API xd_result xd_layout_create(xd_ctx *ctx, const xd_layout_desc *desc, xd_layout **out) {
    xd_layout_desc d = *desc;
    xdi_layout_defaults(&d);
    XDI_TRY(xdi_layout_check_shape(ctx, &d));
    XDI_TRY(xdi_layout_check(ctx, &d));
    for (int i = 0; i < d.topology->axis_count; i++)
        if (d.placement[i].kind == XD_SHARD && d.placement[i].dim < 0) d.placement[i].dim += d.ndim;
    XDI_TRY(xdi_layout_check_regions(ctx, &d));
    xd_layout *layout = (xd_layout *)xd_allocate(ctx, sizeof *layout);
    if (layout) {
        layout->ctx = ctx;
        layout->desc = d;
    }
    if (!layout || !xdi_layout_own(layout)) {
        xd_layout_destroy(layout);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a layout over %d ranks", d.topology->rank_count);
    }
    *out = layout;
    return XD_OK;
}

XD_API void xd_layout_destroy(xd_layout *layout) {
    if (!layout) return;
    for (int i = 0; i < XD_MESH_AXES_MAX; i++) xd_release(layout->ctx, layout->numbers[i]);
    xd_release(layout->ctx, layout->ranks);
    xd_release(layout->ctx, layout);
}

XD_API const xd_layout_desc *xd_layout_settings(const xd_layout *layout) {
    return &layout->desc;
}

XD_API bool xd_layout_region(const xd_layout *layout, int rank, xd_region *out) {
    int coordinate[XD_MESH_AXES_MAX];
    int64_t extent;
    memset(out, 0, sizeof *out);
    out->ndim = layout->desc.ndim;
    if (!xd_topology_coordinate(&layout->topology, rank, coordinate)) return false;
    xdi_layout_split(&layout->desc, coordinate, out, &extent); /* fits: checked for every rank at creation */
    return true;
}

XD_API int64_t xd_layout_numel(const xd_layout *layout) {
    int64_t numel = 1;
    for (int i = 0; i < layout->desc.ndim; i++) numel *= layout->desc.shape[i];
    return numel;
}

static void xdi_layout_same_shape(const xd_layout *layout, const xd_topology *topology, xd_layout_desc *d) {
    memset(d, 0, sizeof *d);
    d->ndim = layout->desc.ndim;
    memcpy(d->shape, layout->desc.shape, sizeof d->shape);
    d->topology = topology;
}

XD_API xd_result xd_layout_replicated(xd_ctx *ctx, const xd_layout *layout, xd_layout **out) {
    xd_layout_desc d;
    xdi_layout_same_shape(layout, &layout->topology, &d);
    return xd_layout_create(ctx, &d, out);
}

XD_API xd_result xd_layout_on_rank(xd_ctx *ctx, const xd_layout *layout, int rank, xd_layout **out) {
    xd_topology alone;
    xd_layout_desc d;
    memset(&alone, 0, sizeof alone);
    alone.axis_count = 1;
    alone.size[0] = 1;
    alone.rank_count = 1;
    alone.ranks = &rank;
    xdi_layout_same_shape(layout, &alone, &d);
    return xd_layout_create(ctx, &d, out);
}

XD_API uint64_t xd_layout_hash(const xd_layout *layout) {
    const xd_layout_desc *d = &layout->desc;
    uint64_t hash = xd_topology_hash(&layout->topology);
    hash = xd_hash(hash, d->shape, (size_t)d->ndim * sizeof d->shape[0]);
    for (int i = 0; i < layout->topology.axis_count; i++) {
        const xd_placement *p = &d->placement[i];
        const bool shard = p->kind == XD_SHARD;
        const int count = !shard             ? 0
                          : p->offsets       ? layout->topology.size[i] + 1
                          : p->section_sizes ? p->sections
                                             : 0;
        const int facts[7] = { d->ndim,
                               (int)p->kind,
                               shard ? p->dim : 0,
                               p->kind == XD_PARTIAL ? (int)p->op : 0,
                               shard ? p->sections : 0,
                               shard && p->balanced,
                               d->order[i] };
        hash = xd_hash(hash, facts, sizeof facts);
        if (count) hash = xd_hash(hash, layout->numbers[i], (size_t)count * sizeof *layout->numbers[i]);
    }
    return hash;
}

/* >>tensor/tensor.c */

#include <string.h>

XD_API xd_tensor xd_tensor_view(const xd_layout *layout, int rank, void *data, xd_dtype dtype) {
    xd_tensor tensor;
    xd_region region;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = xd_layout_region(layout, rank, &region) ? data : NULL;
    tensor.dtype = dtype;
    tensor.ndim = region.ndim;
    tensor.layout = layout;
    xd_region_shape(&region, tensor.shape);
    int64_t stride = 1;
    for (int d = tensor.ndim - 1; d >= 0; d--) {
        tensor.stride[d] = stride;
        stride *= tensor.shape[d];
    }
    return tensor;
}

XD_API int64_t xd_tensor_numel(const xd_tensor *tensor) {
    int64_t numel = tensor->ndim || tensor->data ? 1 : 0;
    for (int d = 0; d < tensor->ndim; d++) numel *= tensor->shape[d];
    return numel;
}

XD_API size_t xd_tensor_bytes(const xd_layout *layout, int rank, xd_dtype dtype) {
    xd_region region;
    if (!xd_layout_region(layout, rank, &region)) return 0;
    return (size_t)xd_region_numel(&region) * xd_dtype_size(dtype);
}

/* >>tensor/redistribute.c */

#include <string.h>

/* Who holds what of a layout. A cell is one choice of coordinates on the axes that split (or stay partial);
 * inside it, `pieces` coordinates on the axes to be reduced, and `replicas` ranks that hold the same. */
typedef struct xdi_plan_holders {
    int cells, pieces, replicas;
    int *rank; /* [cells][pieces][replicas] */
    int *turn; /* [cells][pieces]: whose turn it is among the replicas */
} xdi_plan_holders;

typedef struct xdi_plan_exchange {
    const xd_layout *from, *to;
    unsigned kept, reduced, added; /* mesh axes: partial on both sides; reduced; newly partial by a sum */
    xd_reduce_op op;
    int cells, pieces;
    int *source; /* [cells][pieces]: the rank that gives me this piece; -1 -> none */
    int64_t *send_counts, *send_displacements, *recv_counts, *recv_displacements;
    int64_t send_count, recv_count, total_count;
    int64_t kept_count; /* elements from myself; they lie behind the received ones when they are reduced */
    bool zero;          /* my part is the zeros beside a newly partial sum */
    xd_region src, dst; /* mine; dst cut to the window */
    xd_copy *copies;    /* pack, then local, then unpack */
    int64_t pack_end, local_end, copy_end;
    void **pointers; /* [pieces] scratch for the reduction */
} xdi_plan_exchange;

struct xd_plan {
    xd_ctx *ctx;
    xd_plan_desc desc;
    xd_region window;
    int64_t stride[2][XD_DIMS_MAX];
    int step_count;
    xdi_plan_exchange step[2];
    xd_layout *middle; /* between two steps */
    void *middle_data, *send, *recv;
};

static unsigned xdi_plan_axes(const xd_layout *layout, xd_placement_kind kind) {
    const xd_layout_desc *d = xd_layout_settings(layout);
    unsigned mask = 0;
    for (int i = 0; i < d->topology->axis_count; i++)
        if (d->placement[i].kind == kind) mask |= 1u << i;
    return mask;
}

/* Row-major number of the coordinate over the axes in mask; *size is set to how many there are. */
static int xdi_plan_linear(const xd_topology *t, unsigned mask, const int *coordinate, int *size) {
    int linear = 0;
    *size = 1;
    for (int i = 0; i < t->axis_count; i++) {
        if (!(mask >> i & 1u)) continue;
        linear = linear * t->size[i] + coordinate[i];
        *size *= t->size[i];
    }
    return linear;
}

static bool xdi_plan_holders_create(xd_ctx *ctx, const xdi_plan_exchange *x, xdi_plan_holders *h) {
    const xd_topology *t = xd_layout_settings(x->from)->topology;
    const unsigned all = (1u << t->axis_count) - 1u, copies = xdi_plan_axes(x->from, XD_REPLICATE);
    memset(h, 0, sizeof *h);
    h->rank = (int *)xd_allocate(ctx, 2 * (size_t)t->rank_count * sizeof *h->rank);
    if (!h->rank) return false;
    h->turn = h->rank + t->rank_count;
    for (int i = 0; i < t->rank_count; i++) {
        const int rank = t->ranks ? t->ranks[i] : i;
        int coordinate[XD_MESH_AXES_MAX] = { 0 };
        xd_topology_coordinate(t, rank, coordinate);
        const int cell = xdi_plan_linear(t, all & ~copies & ~x->reduced, coordinate, &h->cells);
        const int piece = xdi_plan_linear(t, x->reduced, coordinate, &h->pieces);
        const int replica = xdi_plan_linear(t, copies, coordinate, &h->replicas);
        h->rank[(cell * h->pieces + piece) * h->replicas + replica] = rank;
    }
    return true;
}

/* The rank among the replicas of one piece that gives it to `taker`: itself, else they take turns. */
static int xdi_plan_giver(xdi_plan_holders *h, int cell, int piece, int taker) {
    const int slot = cell * h->pieces + piece;
    const int *ranks = h->rank + slot * h->replicas;
    for (int i = 0; i < h->replicas; i++)
        if (ranks[i] == taker) return taker;
    return ranks[h->turn[slot]++ % h->replicas];
}

/* What a rank is to have of the destination. False when that is nothing that moves. */
static bool xdi_plan_wanted(const xd_plan *plan, const xdi_plan_exchange *x, int rank, xd_region *wanted,
                            bool *zero) {
    const xd_topology *t = xd_layout_settings(x->to)->topology;
    int coordinate[XD_MESH_AXES_MAX] = { 0 }, ignored;
    xd_region whole;
    *zero = false;
    if (!xd_layout_region(x->to, rank, &whole)) {
        *wanted = whole;
        return false;
    }
    *wanted = whole;
    if (plan->desc.window) xd_region_intersect(&whole, &plan->window, wanted);
    xd_topology_coordinate(t, rank, coordinate);
    *zero = xdi_plan_linear(t, x->added, coordinate, &ignored) != 0;
    return !*zero && xd_region_numel(wanted) > 0;
}

/* On axes that stay partial a rank takes only from its own coordinate. */
static bool xdi_plan_same_partial(const xdi_plan_exchange *x, int a, int b) {
    const xd_topology *t = xd_layout_settings(x->from)->topology;
    int ca[XD_MESH_AXES_MAX], cb[XD_MESH_AXES_MAX], ignored;
    if (!x->kept) return true;
    xd_topology_coordinate(t, a, ca);
    xd_topology_coordinate(t, b, cb);
    return xdi_plan_linear(t, x->kept, ca, &ignored) == xdi_plan_linear(t, x->kept, cb, &ignored);
}

/* Decides for every rank who gives it what, and notes my part. The whole is walked because replicas take
 * turns. */
static void xdi_plan_assign(const xd_plan *plan, xdi_plan_exchange *x, xdi_plan_holders *h) {
    const xd_topology *t = xd_layout_settings(x->to)->topology;
    const int me = plan->desc.rank;
    for (int i = 0; i < t->rank_count; i++) {
        const int taker = t->ranks ? t->ranks[i] : i;
        xd_region wanted, held, common;
        bool zero;
        if (!xdi_plan_wanted(plan, x, taker, &wanted, &zero)) continue;
        for (int cell = 0; cell < h->cells; cell++) {
            const int first = h->rank[cell * h->pieces * h->replicas];
            xd_layout_region(x->from, first, &held);
            if (!xdi_plan_same_partial(x, first, taker) || !xd_region_intersect(&held, &wanted, &common))
                continue;
            const int64_t count = xd_region_numel(&common);
            for (int piece = 0; piece < h->pieces; piece++) {
                const int giver = xdi_plan_giver(h, cell, piece, taker);
                if (taker == me) x->source[cell * h->pieces + piece] = giver;
                if (giver == taker) {
                    if (taker == me) x->kept_count += count;
                    continue;
                }
                x->total_count += count;
                if (giver == me) x->send_counts[taker] = count;
                if (taker == me) x->recv_counts[giver] = count;
            }
        }
    }
}

/* The dense common part of what I hold and what `peer` wants, or the other way round. */
static bool xdi_plan_message(const xd_plan *plan, const xdi_plan_exchange *x, int peer, bool sending,
                             xd_region *message) {
    xd_region other;
    bool zero;
    if (sending) {
        xdi_plan_wanted(plan, x, peer, &other, &zero);
        return xd_region_intersect(&x->src, &other, message);
    }
    xd_layout_region(x->from, peer, &other);
    return xd_region_intersect(&other, &x->dst, message);
}

/* Appends the copies between two regions; with copies NULL it only counts. dense_offset shifts the side that
 * is a staging buffer: 1 the destination, -1 the source, 0 none. */
static void xdi_plan_append(xdi_plan_exchange *x, int64_t *end, int64_t capacity, const xd_region *src,
                            const int64_t *src_stride, const xd_region *dst, const int64_t *dst_stride,
                            int side, int64_t dense_offset) {
    const int64_t begin = *end;
    xd_copy *copies = x->copies ? x->copies + begin : NULL;
    *end += xd_region_copies(src, src_stride, dst, dst_stride, copies, x->copies ? capacity - begin : 0);
    for (int64_t i = begin; x->copies && i < *end; i++) {
        if (side > 0) x->copies[i].dst_offset += dense_offset;
        if (side < 0) x->copies[i].src_offset += dense_offset;
    }
}

/* The three lists of copies, in the order of the ranks. Called twice: to count, and to fill. */
static void xdi_plan_list(const xd_plan *plan, xdi_plan_exchange *x, const int64_t *from_stride,
                          const int64_t *to_stride) {
    const int64_t capacity = x->copy_end;
    int64_t end = 0;
    xd_region message;
    for (int r = 0; r < plan->desc.ranks; r++)
        if (x->send_counts[r] && xdi_plan_message(plan, x, r, true, &message))
            xdi_plan_append(x, &end, capacity, &x->src, from_stride, &message, NULL, 1,
                            x->send_displacements[r]);
    x->pack_end = end;
    if (x->kept_count && x->pieces == 1)
        xdi_plan_append(x, &end, capacity, &x->src, from_stride, &x->dst, to_stride, 0, 0);
    if (x->kept_count && x->pieces > 1 && xdi_plan_message(plan, x, plan->desc.rank, false, &message))
        xdi_plan_append(x, &end, capacity, &x->src, from_stride, &message, NULL, 1, x->recv_count);
    x->local_end = end;
    /* A reduction leaves its result where the first piece was; so only first pieces are unpacked. */
    for (int cell = 0; cell < x->cells; cell++) {
        const int giver = x->source[cell * x->pieces];
        if (giver < 0 || (giver == plan->desc.rank && x->pieces == 1)) continue;
        if (!xdi_plan_message(plan, x, giver, false, &message)) continue;
        const int64_t at = giver == plan->desc.rank ? x->recv_count : x->recv_displacements[giver];
        xdi_plan_append(x, &end, capacity, &message, NULL, &x->dst, to_stride, -1, at);
    }
    x->copy_end = end;
}

static bool xdi_plan_allocate(const xd_plan *plan, xdi_plan_exchange *x, const xdi_plan_holders *h) {
    const size_t ranks = (size_t)plan->desc.ranks, slots = (size_t)h->cells * (size_t)h->pieces;
    x->cells = h->cells;
    x->pieces = h->pieces;
    x->send_counts = (int64_t *)xd_allocate(plan->ctx, 4 * ranks * sizeof(int64_t));
    x->source = (int *)xd_allocate(plan->ctx, slots * sizeof(int));
    x->pointers = (void **)xd_allocate(plan->ctx, (size_t)h->pieces * sizeof(void *));
    if (!x->send_counts || !x->source || !x->pointers) return false;
    x->send_displacements = x->send_counts + ranks;
    x->recv_counts = x->send_displacements + ranks;
    x->recv_displacements = x->recv_counts + ranks;
    for (size_t i = 0; i < slots; i++) x->source[i] = -1;
    return true;
}

/* Fills one exchange whose layouts and axes are set. False without memory. */
static bool xdi_plan_build(const xd_plan *plan, xdi_plan_exchange *x, const int64_t *from_stride,
                           const int64_t *to_stride) {
    xdi_plan_holders holders;
    if (!xdi_plan_holders_create(plan->ctx, x, &holders)) return false;
    xd_layout_region(x->from, plan->desc.rank, &x->src);
    xdi_plan_wanted(plan, x, plan->desc.rank, &x->dst, &x->zero);
    const bool room = xdi_plan_allocate(plan, x, &holders);
    if (room) xdi_plan_assign(plan, x, &holders);
    xd_release(plan->ctx, holders.rank);
    if (!room) return false;
    for (int r = 0; r < plan->desc.ranks; r++) {
        x->send_displacements[r] = x->send_count;
        x->recv_displacements[r] = x->recv_count;
        x->send_count += x->send_counts[r];
        x->recv_count += x->recv_counts[r];
    }
    xdi_plan_list(plan, x, from_stride, to_stride);
    if (x->copy_end) x->copies = (xd_copy *)xd_allocate(plan->ctx, (size_t)x->copy_end * sizeof *x->copies);
    if (x->copy_end && !x->copies) return false;
    if (x->copies) xdi_plan_list(plan, x, from_stride, to_stride);
    return true;
}

/* How each mesh axis of the two layouts fits together, and which axes are reduced. */
static xd_result xdi_plan_match(xd_ctx *ctx, const xd_layout *from, const xd_layout *to,
                                xdi_plan_exchange *x) {
    const xd_layout_desc *f = xd_layout_settings(from), *t = xd_layout_settings(to);
    const bool same = xd_topology_equal(f->topology, t->topology);
    const unsigned partial = xdi_plan_axes(from, XD_PARTIAL);
    memset(x, 0, sizeof *x);
    x->from = from;
    x->to = to;
    for (int i = 0; i < t->topology->axis_count; i++) {
        if (t->placement[i].kind != XD_PARTIAL) continue;
        XDI_REQUIRE(ctx, same, XD_ERROR_UNSUPPORTED,
                    "axis %d of the destination is partial, but the source is on another mesh", i);
        XDI_REQUIRE(ctx, f->placement[i].kind != XD_SHARD, XD_ERROR_UNSUPPORTED,
                    "axis %d: a shard cannot become partial; replicate it first", i);
        XDI_REQUIRE(ctx, f->placement[i].kind != XD_PARTIAL || f->placement[i].op == t->placement[i].op,
                    XD_ERROR_UNSUPPORTED,
                    "axis %d: partial by operation %d cannot become partial by operation %d", i,
                    (int)f->placement[i].op, (int)t->placement[i].op);
        if (f->placement[i].kind == XD_PARTIAL) x->kept |= 1u << i;
        /* Averages and extrema of equal values are the value: only a sum needs zeros beside it. */
        if (f->placement[i].kind == XD_REPLICATE && t->placement[i].op == XD_SUM) x->added |= 1u << i;
    }
    x->reduced = partial & ~x->kept;
    for (int i = 0; i < f->topology->axis_count; i++)
        if (partial >> i & 1u) x->op = f->placement[i].op;
    return XD_OK;
}

static xd_result xdi_plan_validate(xd_ctx *ctx, const xd_plan_desc *d, xdi_plan_exchange *x) {
    const xd_layout_desc *side[2];
    XDI_REQUIRE(ctx, d->from && d->to, XD_ERROR_ARGUMENT, "a plan needs two layouts");
    XDI_REQUIRE(ctx, xd_dtype_size(d->dtype), XD_ERROR_ARGUMENT, "%d is no dtype", (int)d->dtype);
    XDI_REQUIRE(ctx, d->rank >= 0 && d->rank < d->ranks, XD_ERROR_ARGUMENT, "rank %d of %d ranks", d->rank,
                d->ranks);
    side[0] = xd_layout_settings(d->from);
    side[1] = xd_layout_settings(d->to);
    XDI_REQUIRE(ctx, side[0]->ndim == side[1]->ndim, XD_ERROR_SHAPE,
                "the source has %d dimensions, the destination %d", side[0]->ndim, side[1]->ndim);
    for (int i = 0; i < side[0]->ndim; i++)
        XDI_REQUIRE(ctx, side[0]->shape[i] == side[1]->shape[i], XD_ERROR_SHAPE,
                    "dimension %d: the source has extent %lld, the destination %lld", i,
                    (long long)side[0]->shape[i], (long long)side[1]->shape[i]);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < side[s]->topology->rank_count; i++) {
            const int rank = side[s]->topology->ranks ? side[s]->topology->ranks[i] : i;
            XDI_REQUIRE(ctx, rank < d->ranks, XD_ERROR_TOPOLOGY,
                        "the %s lies on rank %d, the world has %d ranks", s ? "destination" : "source", rank,
                        d->ranks);
        }
    XDI_TRY(xdi_plan_match(ctx, d->from, d->to, x));
    if (!x->reduced) return XD_OK;
    XDI_REQUIRE(ctx, xd_reduce_supports(d->dtype, x->op), XD_ERROR_DTYPE,
                "%s cannot be reduced by operation %d", xd_dtype_name(d->dtype), (int)x->op);
    XDI_REQUIRE(ctx,
                xd_ctx_settings(ctx)->reduction != XD_REDUCTION_INVARIANT ||
                    !xd_dtype_is_floating(d->dtype) || x->op == XD_MAX || x->op == XD_MIN,
                XD_ERROR_UNSUPPORTED,
                "a partial %s sum has no leaves, so it cannot be reduced in INVARIANT mode",
                xd_dtype_name(d->dtype));
    return XD_OK;
}

/* The source layout with the axes to be reduced splitting the dimension that leaves the largest pieces, after
 * all other splits. */
static xd_result xdi_plan_middle(xd_ctx *ctx, const xdi_plan_exchange *x, xd_layout **middle) {
    xd_layout_desc d = *xd_layout_settings(x->from);
    const int axes = d.topology->axis_count;
    int64_t extent[XD_DIMS_MAX];
    int best = 0, count = 0, order[XD_MESH_AXES_MAX] = { 0 };
    memcpy(extent, d.shape, sizeof extent);
    for (int i = 0; i < axes; i++)
        if (d.placement[i].kind == XD_SHARD) extent[d.placement[i].dim] /= d.topology->size[i];
    for (int i = 1; i < d.ndim; i++)
        if (extent[i] > extent[best]) best = i;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < axes; i++)
            if ((int)(x->reduced >> d.order[i] & 1u) == pass) order[count++] = d.order[i];
    memcpy(d.order, order, sizeof order);
    for (int i = 0; i < axes; i++) {
        if (!(x->reduced >> i & 1u)) continue;
        memset(&d.placement[i], 0, sizeof d.placement[i]);
        d.placement[i].kind = XD_SHARD;
        d.placement[i].dim = best;
    }
    return xd_layout_create(ctx, &d, middle);
}

static void xdi_plan_exchange_release(xd_ctx *ctx, xdi_plan_exchange *x) {
    xd_release(ctx, x->send_counts);
    xd_release(ctx, x->source);
    xd_release(ctx, x->pointers);
    xd_release(ctx, x->copies);
    x->send_counts = NULL;
    x->source = NULL;
    x->pointers = NULL;
    x->copies = NULL;
}

XD_API void xd_plan_destroy(xd_plan *plan) {
    if (!plan) return;
    for (int i = 0; i < 2; i++) xdi_plan_exchange_release(plan->ctx, &plan->step[i]);
    xd_layout_destroy(plan->middle);
    xd_release(plan->ctx, plan->middle_data);
    xd_release(plan->ctx, plan->send);
    xd_release(plan->ctx, plan->recv);
    xd_release(plan->ctx, plan);
}

/* Reduce into parts, then spread them: kept when that moves fewer elements than the one step that is already
 * built. */
static xd_result xdi_plan_try_two_steps(xd_plan *plan) {
    xd_plan two = *plan;
    xdi_plan_exchange *x = two.step;
    xd_ctx *ctx = plan->ctx;
    if (!plan->step[0].reduced || plan->desc.window || xd_layout_settings(plan->desc.from)->ndim == 0)
        return XD_OK;
    XDI_TRY(xdi_plan_middle(ctx, &plan->step[0], &two.middle));
    xd_result result = xdi_plan_match(ctx, plan->desc.from, two.middle, &x[0]);
    if (result == XD_OK) result = xdi_plan_match(ctx, two.middle, plan->desc.to, &x[1]);
    const bool room = result == XD_OK && xdi_plan_build(&two, &x[0], plan->desc.from_stride, NULL) &&
                      xdi_plan_build(&two, &x[1], NULL, plan->desc.to_stride);
    if (room && x[0].total_count + x[1].total_count < plan->step[0].total_count) {
        xdi_plan_exchange_release(ctx, &plan->step[0]);
        two.step_count = 2;
        *plan = two;
        return XD_OK;
    }
    for (int i = 0; i < 2; i++) xdi_plan_exchange_release(ctx, &x[i]);
    xd_layout_destroy(two.middle);
    XDI_TRY(result);
    XDI_REQUIRE(ctx, room, XD_ERROR_MEMORY, "no room for a plan over %d ranks", plan->desc.ranks);
    return XD_OK;
}

static bool xdi_plan_take_buffers(xd_plan *plan) {
    const size_t size = xd_dtype_size(plan->desc.dtype);
    int64_t send = 0, recv = 0;
    for (int i = 0; i < plan->step_count; i++) {
        const xd_plan_step s = xd_plan_get_step(plan, i);
        if (s.send_count > send) send = s.send_count;
        if (s.recv_capacity > recv) recv = s.recv_capacity;
    }
    plan->send = xd_allocate(plan->ctx, (size_t)send * size);
    plan->recv = xd_allocate(plan->ctx, (size_t)recv * size);
    if (plan->middle)
        plan->middle_data =
            xd_allocate(plan->ctx, xd_tensor_bytes(plan->middle, plan->desc.rank, plan->desc.dtype));
    return plan->send && plan->recv && (!plan->middle || plan->middle_data);
}

XD_API xd_result xd_plan_create(xd_ctx *ctx, const xd_plan_desc *desc, xd_plan **out) {
    xdi_plan_exchange x;
    XDI_TRY(xdi_plan_validate(ctx, desc, &x));
    xd_plan *plan = (xd_plan *)xd_allocate(ctx, sizeof *plan);
    XDI_REQUIRE(ctx, plan, XD_ERROR_MEMORY, "no room for a plan over %d ranks", desc->ranks);
    plan->ctx = ctx;
    plan->desc = *desc;
    plan->step_count = 1;
    plan->step[0] = x;
    const size_t strides = (size_t)xd_layout_settings(desc->from)->ndim * sizeof(int64_t);
    if (desc->window) {
        plan->window = *desc->window;
        plan->desc.window = &plan->window;
    }
    if (desc->from_stride)
        plan->desc.from_stride = (int64_t *)memcpy(plan->stride[0], desc->from_stride, strides);
    if (desc->to_stride) plan->desc.to_stride = (int64_t *)memcpy(plan->stride[1], desc->to_stride, strides);
    xd_result result = XD_OK;
    bool room = xdi_plan_build(plan, &plan->step[0], plan->desc.from_stride, plan->desc.to_stride);
    if (room) result = xdi_plan_try_two_steps(plan);
    room = room && result == XD_OK && xdi_plan_take_buffers(plan);
    if (!room) {
        xd_plan_destroy(plan);
        return result != XD_OK
                   ? result
                   : XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a plan over %d ranks", desc->ranks);
    }
    *out = plan;
    return XD_OK;
}

XD_API int xd_plan_step_count(const xd_plan *plan) {
    return plan->step_count;
}

XD_API xd_plan_step xd_plan_get_step(const xd_plan *plan, int step) {
    const xdi_plan_exchange *x = &plan->step[step];
    xd_plan_step s;
    s.send_counts = x->send_counts;
    s.send_displacements = x->send_displacements;
    s.recv_counts = x->recv_counts;
    s.recv_displacements = x->recv_displacements;
    s.send_count = x->send_count;
    s.recv_count = x->recv_count;
    s.reduces = x->pieces > 1;
    s.recv_capacity = x->recv_count + (s.reduces ? x->kept_count : 0);
    s.copy_count = x->copy_end;
    s.total_count = x->total_count;
    return s;
}

XD_API uint64_t xd_plan_bytes_sent(const xd_plan *plan) {
    int64_t count = 0;
    for (int i = 0; i < plan->step_count; i++) count += plan->step[i].send_count;
    return (uint64_t)count * xd_dtype_size(plan->desc.dtype);
}

XD_API void xd_plan_shape(const xd_plan *plan, int64_t *shape) {
    xd_region_shape(&plan->step[plan->step_count - 1].dst, shape);
}

XD_API xd_result xd_plan_agree(const xd_plan *plan, xd_comm *world, xd_result mine) {
    XDI_TRY(xd_agree(world, mine));
    uint64_t hash = xd_layout_hash(plan->desc.from);
    const uint64_t to = xd_layout_hash(plan->desc.to);
    const int facts[2] = { (int)plan->desc.dtype, plan->desc.ranks };
    hash = xd_hash(hash, &to, sizeof to);
    hash = xd_hash(hash, facts, sizeof facts);
    for (int i = 0; plan->desc.window && i < plan->window.ndim; i++)
        hash = xd_hash(hash, plan->window.interval[i], (size_t)plan->window.count[i] * sizeof(xd_interval));
    return xd_agree_same(world, hash, "redistribution");
}

XD_API void xd_plan_pack(const xd_plan *plan, int step, const void *source, void *send) {
    const xdi_plan_exchange *x = &plan->step[step];
    const void *src = step ? plan->middle_data : source;
    for (int64_t i = 0; i < x->pack_end; i++)
        xd_copy_run(&x->copies[i], src, send, xd_dtype_size(plan->desc.dtype));
}

/* Combines the pieces of every cell into the first of them. */
static xd_result xdi_plan_reduce(const xd_plan *plan, const xdi_plan_exchange *x, void *recv) {
    const size_t size = xd_dtype_size(plan->desc.dtype);
    for (int cell = 0; cell < x->cells; cell++) {
        const int *source = x->source + cell * x->pieces;
        int64_t count = 0;
        if (source[0] < 0) continue;
        for (int piece = 0; piece < x->pieces; piece++) {
            const bool own = source[piece] == plan->desc.rank;
            const int64_t at = own ? x->recv_count : x->recv_displacements[source[piece]];
            count = own ? x->kept_count : x->recv_counts[source[piece]];
            x->pointers[piece] = (char *)recv + (size_t)at * size;
        }
        XDI_TRY(xd_reduce_pieces(plan->ctx, x->pointers[0], (const void *const *)x->pointers, x->pieces,
                                 count, plan->desc.dtype, x->op));
    }
    return XD_OK;
}

XD_API xd_result xd_plan_unpack(const xd_plan *plan, int step, const void *source, void *recv,
                                void *destination) {
    const xdi_plan_exchange *x = &plan->step[step];
    const size_t size = xd_dtype_size(plan->desc.dtype);
    const void *src = step ? plan->middle_data : source;
    void *dst = step + 1 < plan->step_count ? plan->middle_data : destination;
    if (x->zero) {
        /* One element read again and again, by strides of 0: all bits zero is zero in every dtype. */
        const int64_t none[XD_DIMS_MAX] = { 0 };
        const uint64_t zero = 0;
        xd_copy copy;
        if (xd_region_copies(&x->dst, none, &x->dst, plan->desc.to_stride, &copy, 1))
            xd_copy_run(&copy, &zero, dst, size);
        return XD_OK;
    }
    for (int64_t i = x->pack_end; i < x->local_end; i++)
        xd_copy_run(&x->copies[i], src, x->pieces > 1 ? recv : dst, size);
    if (x->pieces > 1) XDI_TRY(xdi_plan_reduce(plan, x, recv));
    for (int64_t i = x->local_end; i < x->copy_end; i++) xd_copy_run(&x->copies[i], recv, dst, size);
    return XD_OK;
}

XD_API xd_result xd_plan_execute(xd_plan *plan, xd_comm *world, const void *source, void *destination) {
    for (int i = 0; i < plan->step_count; i++) {
        const xdi_plan_exchange *x = &plan->step[i];
        xd_collective c;
        memset(&c, 0, sizeof c);
        c.kind = XD_COLLECTIVE_ALL_TO_ALL;
        c.send = plan->send;
        c.recv = plan->recv;
        c.send_counts = x->send_counts;
        c.send_displacements = x->send_displacements;
        c.recv_counts = x->recv_counts;
        c.recv_displacements = x->recv_displacements;
        c.dtype = plan->desc.dtype;
        xd_plan_pack(plan, i, source, plan->send);
        if (x->total_count) XDI_TRY(xd_collective_run(world, &c));
        XDI_TRY(xd_plan_unpack(plan, i, source, plan->recv, destination));
    }
    return XD_OK;
}

static xd_result xdi_plan_run(xd_comm *world, const xd_plan_desc *desc, xd_result mine, const void *source,
                              void *destination) {
    xd_plan *plan = NULL;
    if (mine == XD_OK) mine = xd_plan_create(xd_comm_ctx(world), desc, &plan);
    mine = xd_plan_agree(plan, world, mine);
    if (mine == XD_OK) mine = xd_plan_execute(plan, world, source, destination);
    xd_plan_destroy(plan);
    return mine;
}

/* A view must have the extents that its layout gives this rank, and memory unless they are empty. */
static xd_result xdi_tensor_check(xd_comm *world, const xd_tensor *tensor, const char *which) {
    xd_ctx *ctx = xd_comm_ctx(world);
    XDI_REQUIRE(ctx, tensor->layout, XD_ERROR_ARGUMENT, "the %s has no layout", which);
    const int rank = xd_comm_rank(world);
    xd_region region;
    const bool member = xd_layout_region(tensor->layout, rank, &region);
    XDI_REQUIRE(ctx, tensor->ndim == region.ndim, XD_ERROR_SHAPE, "the %s has %d dimensions, its layout %d",
                which, tensor->ndim, region.ndim);
    for (int i = 0; i < region.ndim; i++) {
        const int64_t extent = xd_intervals_extent(region.interval[i], region.count[i]);
        XDI_REQUIRE(ctx, tensor->shape[i] == extent, XD_ERROR_SHAPE,
                    "dimension %d of the %s has extent %lld, its layout gives rank %d %lld", i, which,
                    (long long)tensor->shape[i], rank, (long long)extent);
    }
    XDI_REQUIRE(ctx, tensor->data || !member || xd_region_numel(&region) == 0, XD_ERROR_ARGUMENT,
                "the %s has no data", which);
    return XD_OK;
}

XD_API xd_result xd_redistribute(xd_comm *world, const xd_tensor *from, const xd_tensor *to) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_plan_desc d;
    memset(&d, 0, sizeof d);
    d.from = from->layout;
    d.to = to->layout;
    d.dtype = from->dtype;
    d.ranks = xd_comm_size(world);
    d.rank = xd_comm_rank(world);
    d.from_stride = from->stride;
    d.to_stride = to->stride;
    xd_result result = xdi_tensor_check(world, from, "source");
    if (result == XD_OK) result = xdi_tensor_check(world, to, "destination");
    if (result == XD_OK && from->dtype != to->dtype)
        result = XDI_FAIL(ctx, XD_ERROR_DTYPE, "the source is %s, the destination %s",
                          xd_dtype_name(from->dtype), xd_dtype_name(to->dtype));
    return xdi_plan_run(world, &d, result, from->data, to->data);
}

/* Moves a tensor, or a window of it, into a dense part under a layout that is destroyed here. */
static xd_result xdi_tensor_move(xd_comm *world, const xd_tensor *tensor, xd_layout *to,
                                 const xd_region *window, xd_result result, void *out) {
    xd_plan_desc d;
    memset(&d, 0, sizeof d);
    d.from = tensor->layout;
    d.to = to;
    d.dtype = tensor->dtype;
    d.ranks = xd_comm_size(world);
    d.rank = xd_comm_rank(world);
    d.window = window;
    d.from_stride = tensor->stride;
    result = xdi_plan_run(world, &d, result, tensor->data, out);
    xd_layout_destroy(to);
    return result;
}

XD_API xd_result xd_tensor_full(xd_comm *world, const xd_tensor *tensor, void *full) {
    xd_layout *to = NULL;
    xd_result result = xdi_tensor_check(world, tensor, "source");
    if (result == XD_OK) result = xd_layout_replicated(xd_comm_ctx(world), tensor->layout, &to);
    return xdi_tensor_move(world, tensor, to, NULL, result, full);
}

static xd_result xdi_tensor_window(xd_ctx *ctx, const xd_tensor *tensor, const int64_t *begin,
                                   const int64_t *end, xd_region *window) {
    const xd_layout_desc *d = xd_layout_settings(tensor->layout);
    *window = xd_region_whole(d->ndim, d->shape);
    XDI_REQUIRE(ctx, !begin == !end, XD_ERROR_ARGUMENT, "a range needs both ends");
    for (int i = 0; begin && i < d->ndim; i++) {
        XDI_REQUIRE(ctx, begin[i] >= 0 && begin[i] <= end[i] && end[i] <= d->shape[i], XD_ERROR_ARGUMENT,
                    "range [%lld, %lld) of dimension %d, whose extent is %lld", (long long)begin[i],
                    (long long)end[i], i, (long long)d->shape[i]);
        window->count[i] = begin[i] < end[i];
        window->interval[i][0].begin = begin[i];
        window->interval[i][0].end = end[i];
    }
    return XD_OK;
}

XD_API xd_result xd_tensor_gather(xd_comm *world, const xd_tensor *tensor, const int64_t *begin,
                                  const int64_t *end, int root, void *out) {
    xd_ctx *ctx = xd_comm_ctx(world);
    xd_layout *to = NULL;
    xd_region window;
    xd_result result = xdi_tensor_check(world, tensor, "source");
    if (result == XD_OK) result = xdi_tensor_window(ctx, tensor, begin, end, &window);
    if (result == XD_OK) result = xd_layout_on_rank(ctx, tensor->layout, root, &to);
    return xdi_tensor_move(world, tensor, to, begin ? &window : NULL, result, out);
}


/* >>train/internal */

/* optimizer.c: true when some operation of this step found bad data, so that the step must not happen. NULL
 * is fine. */
XD_PRIVATE bool xdi_train_refused(const xd_status *status);

/* optimizer.c: a launch on the CPU without workspace. */
XD_PRIVATE xd_launch xdi_train_launch(xd_ctx *ctx);

/* optimizer.c: a parameter's gradient dtype with its default filled in. */
XD_PRIVATE xd_dtype xdi_train_gradient_dtype(const xd_param *param);

/* optimizer.c: true for the dtypes of parameters and gradients: F32, BF16, F16. */
XD_PRIVATE bool xdi_train_takes(xd_dtype dtype);

/* >>train/optimizer.c */

#include <math.h>
#include <string.h>

struct xd_optimizer {
    xd_ctx *ctx;
    xd_optimizer_desc desc;
    xd_optimizer_group *groups; /* [desc.group_count], defaults filled in; at least one */
    xd_optimizer_state *states; /* [desc.param_count] */
    int64_t *steps;             /* [desc.param_count] */
    xd_param *created;          /* [desc.param_count]; the list at creation, to notice changes */
    xd_update_array *updates;   /* [desc.param_count]; filled anew in every step */
};

XD_PRIVATE bool xdi_train_refused(const xd_status *status) {
    return status && (status->label_out_of_range != 0 || status->not_finite != 0 ||
                      status->nothing_counted != 0 || status->overflow != 0);
}

XD_PRIVATE xd_launch xdi_train_launch(xd_ctx *ctx) {
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    return launch;
}

XD_PRIVATE xd_dtype xdi_train_gradient_dtype(const xd_param *param) {
    return param->gradient_dtype == XD_DTYPE_NONE ? XD_DTYPE_F32 : param->gradient_dtype;
}

XD_PRIVATE bool xdi_train_takes(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16;
}

static bool xdi_optimizer_owns(const xd_param *param) {
    return !param->frozen && !param->buffer;
}

static void xdi_optimizer_defaults(xd_optimizer_desc *d) {
    if (d->learning_rate == 0.0) d->learning_rate = 1e-3;
    if (d->beta1 == 0.0) d->beta1 = 0.9;
    if (d->beta2 == 0.0) d->beta2 = 0.999;
    if (d->eps == 0.0) d->eps = 1e-8;
    if (d->weight_decay == 0.0 && d->kind == XD_OPTIMIZER_ADAMW) d->weight_decay = 1e-2;
    if (!d->groups) d->group_count = 0;
}

/* False for NaN too. */
static bool xdi_optimizer_at_least_zero(double value) {
    return value >= 0.0 && value < HUGE_VAL;
}

static xd_result xdi_optimizer_validate_numbers(xd_ctx *ctx, const xd_optimizer_desc *d) {
    XDI_REQUIRE(ctx, (int)d->kind >= 0 && d->kind <= XD_OPTIMIZER_SGD, XD_ERROR_ARGUMENT,
                "optimizer kind %d is unknown", (int)d->kind);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->learning_rate), XD_ERROR_ARGUMENT,
                "learning_rate %g is negative or not finite", d->learning_rate);
    XDI_REQUIRE(ctx, d->beta1 >= 0.0 && d->beta1 < 1.0, XD_ERROR_ARGUMENT, "beta1 %g is outside [0, 1)",
                d->beta1);
    XDI_REQUIRE(ctx, d->beta2 >= 0.0 && d->beta2 < 1.0, XD_ERROR_ARGUMENT, "beta2 %g is outside [0, 1)",
                d->beta2);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->eps), XD_ERROR_ARGUMENT,
                "eps %g is negative or not finite", d->eps);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->momentum), XD_ERROR_ARGUMENT,
                "momentum %g is negative or not finite", d->momentum);
    XDI_REQUIRE(ctx, xdi_optimizer_at_least_zero(d->weight_decay), XD_ERROR_ARGUMENT,
                "weight_decay %g is negative or not finite", d->weight_decay);
    for (int i = 0; i < d->group_count; i++) {
        const xd_optimizer_group *g = &d->groups[i];
        XDI_REQUIRE(ctx,
                    xdi_optimizer_at_least_zero(g->learning_rate_scale) &&
                        xdi_optimizer_at_least_zero(g->weight_decay),
                    XD_ERROR_ARGUMENT,
                    "group %d: learning_rate_scale %g or weight_decay %g is negative or not finite", i,
                    g->learning_rate_scale, g->weight_decay);
    }
    return XD_OK;
}

static xd_result xdi_optimizer_validate(xd_ctx *ctx, const xd_optimizer_desc *d) {
    XDI_TRY(xdi_optimizer_validate_numbers(ctx, d));
    XDI_REQUIRE(ctx, d->param_count >= 0 && (d->params || d->param_count == 0), XD_ERROR_ARGUMENT,
                "%lld parameters at %p", (long long)d->param_count, (const void *)d->params);
    const int groups = d->group_count > 0 ? d->group_count : 1;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        const char *name = p->name ? p->name : "(unnamed)";
        if (!xdi_optimizer_owns(p)) continue;
        XDI_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                    "%s: %lld elements at %p", name, (long long)p->count, p->value);
        XDI_REQUIRE(ctx, xdi_train_takes(p->dtype), XD_ERROR_DTYPE,
                    "%s: parameters are F32, BF16 or F16, not %s", name, xd_dtype_name(p->dtype));
        XDI_REQUIRE(ctx, p->group >= 0 && p->group < groups, XD_ERROR_ARGUMENT,
                    "%s: group %d, but there are %d", name, p->group, groups);
    }
    return XD_OK;
}

/* Takes n floats; an array of none gets an address all the same, or NULL in the planning run. */
static float *xdi_optimizer_take(xd_arena *arena, int64_t n) {
    return (float *)xd_arena_take_pointer(arena, (size_t)n * sizeof(float));
}

static void xdi_optimizer_take_state(xd_arena *arena, const xd_optimizer_desc *d, const xd_param *p,
                                     xd_optimizer_state *state) {
    xd_optimizer_state taken;
    memset(&taken, 0, sizeof taken);
    if (xdi_optimizer_owns(p)) {
        if (p->dtype != XD_DTYPE_F32) taken.master = xdi_optimizer_take(arena, p->count);
        taken.exp_avg = xdi_optimizer_take(arena, p->count);
        if (d->kind != XD_OPTIMIZER_SGD) taken.exp_avg_sq = xdi_optimizer_take(arena, p->count);
    }
    if (state) *state = taken;
}

/* Lays everything out behind the optimizer itself. Run once without memory for the size, once with it. */
static void xdi_optimizer_lay_out(xd_arena *arena, const xd_optimizer_desc *d, xd_optimizer *o) {
    const size_t n = (size_t)d->param_count, groups = d->group_count > 0 ? (size_t)d->group_count : 1;
    void *self = xd_arena_take_pointer(arena, sizeof *o);
    void *group = xd_arena_take_pointer(arena, groups * sizeof *o->groups);
    void *states = xd_arena_take_pointer(arena, n * sizeof *o->states);
    void *steps = xd_arena_take_pointer(arena, n * sizeof *o->steps);
    void *created = xd_arena_take_pointer(arena, n * sizeof *o->created);
    void *updates = xd_arena_take_pointer(arena, n * sizeof *o->updates);
    if (o) {
        XD_ASSERT(self == (void *)o);
        (void)self;
        o->groups = (xd_optimizer_group *)group;
        o->states = (xd_optimizer_state *)states;
        o->steps = (int64_t *)steps;
        o->created = (xd_param *)created;
        o->updates = (xd_update_array *)updates;
    }
    for (int64_t i = 0; i < d->param_count; i++)
        xdi_optimizer_take_state(arena, d, &d->params[i], o ? &o->states[i] : NULL);
}

static void xdi_optimizer_fill(xd_optimizer *o) {
    const xd_optimizer_desc *d = &o->desc;
    o->groups[0].learning_rate_scale = 1.0;
    o->groups[0].weight_decay = d->weight_decay;
    for (int i = 0; i < d->group_count; i++) {
        o->groups[i] = d->groups[i];
        if (o->groups[i].learning_rate_scale == 0.0) o->groups[i].learning_rate_scale = 1.0;
        if (o->groups[i].weight_decay == 0.0) o->groups[i].weight_decay = d->weight_decay;
    }
    if (d->group_count == 0) o->desc.group_count = 1;
    o->desc.groups = o->groups;
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        o->created[i] = *p;
        o->states[i].step = &o->steps[i];
        if (o->states[i].master)
            for (int64_t k = 0; k < p->count; k++)
                o->states[i].master[k] = (float)xd_load_f64(p->value, p->dtype, k);
    }
}

XD_API xd_result xd_optimizer_create(xd_ctx *ctx, const xd_optimizer_desc *desc, xd_optimizer **out) {
    xd_optimizer_desc d = *desc;
    xdi_optimizer_defaults(&d);
    XDI_TRY(xdi_optimizer_validate(ctx, &d));
    xd_arena plan = xd_arena_over(NULL, 0);
    xdi_optimizer_lay_out(&plan, &d, NULL);
    xd_optimizer *o = (xd_optimizer *)xd_allocate(ctx, plan.peak);
    if (!o)
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for the state of %lld parameters: %zu bytes",
                        (long long)d.param_count, plan.peak);
    xd_arena arena = xd_arena_over(o, plan.peak);
    xdi_optimizer_lay_out(&arena, &d, o);
    o->ctx = ctx;
    o->desc = d;
    xdi_optimizer_fill(o);
    *out = o;
    return XD_OK;
}

XD_API void xd_optimizer_destroy(xd_optimizer *optimizer) {
    if (optimizer) xd_release(optimizer->ctx, optimizer);
}

XD_API const xd_optimizer_desc *xd_optimizer_settings(const xd_optimizer *optimizer) {
    return &optimizer->desc;
}

XD_API xd_result xd_optimizer_set_learning_rate(xd_optimizer *optimizer, double learning_rate) {
    XDI_REQUIRE(optimizer->ctx, xdi_optimizer_at_least_zero(learning_rate), XD_ERROR_ARGUMENT,
                "learning_rate %g is negative or not finite", learning_rate);
    optimizer->desc.learning_rate = learning_rate;
    return XD_OK;
}

XD_API xd_optimizer_state xd_optimizer_get_state(xd_optimizer *optimizer, int64_t index) {
    xd_optimizer_state none;
    memset(&none, 0, sizeof none);
    return index >= 0 && index < optimizer->desc.param_count ? optimizer->states[index] : none;
}

static bool xdi_optimizer_same(const xd_param *now, const xd_param *created) {
    return now->value == created->value && now->dtype == created->dtype && now->count == created->count &&
           now->frozen == created->frozen && now->buffer == created->buffer && now->group == created->group;
}

/* Product and difference are rounded separately, whatever the compiler would like to fuse. */
static float xdi_optimizer_decay(double learning_rate, double weight_decay) {
    volatile double product = learning_rate * weight_decay;
    return (float)(1.0 - product);
}

/* The update of parameter `index` for its next step, t. Scalars are formed in double and rounded once. */
static xd_update_array xdi_optimizer_update(const xd_optimizer *o, int64_t index) {
    const xd_optimizer_desc *d = &o->desc;
    const xd_param *p = &d->params[index];
    const xd_optimizer_state *state = &o->states[index];
    const xd_optimizer_group *group = &o->groups[p->group];
    const double learning_rate = d->learning_rate * group->learning_rate_scale;
    const double weight_decay = p->no_decay ? 0.0 : group->weight_decay;
    const double t = (double)(*state->step + 1);
    xd_update_array u;
    memset(&u, 0, sizeof u);
    u.master = state->master ? state->master : (float *)p->value;
    u.first = state->exp_avg;
    u.second = state->exp_avg_sq;
    u.value = state->master ? p->value : NULL;
    u.value_dtype = p->dtype;
    u.gradient = p->gradient;
    u.gradient_dtype = xdi_train_gradient_dtype(p);
    u.count = p->count;
    u.decay = xdi_optimizer_decay(learning_rate, weight_decay);
    u.weight_decay = (float)weight_decay;
    u.fresh = *state->step == 0;
    u.step_size = (float)learning_rate;
    if (d->kind != XD_OPTIMIZER_SGD) {
        u.step_size = (float)(learning_rate / (1.0 - pow(d->beta1, t)));
        u.root_correction = (float)sqrt(1.0 - pow(d->beta2, t));
    }
    return u;
}

static xd_update_args xdi_optimizer_args(const xd_optimizer *o, const float *gradient_scale) {
    const xd_optimizer_desc *d = &o->desc;
    xd_update_args args;
    memset(&args, 0, sizeof args);
    args.arrays = o->updates;
    args.gradient_scale = gradient_scale && *gradient_scale != 1.0f ? gradient_scale : NULL;
    args.one_minus_beta1 = (float)(1.0 - d->beta1);
    args.one_minus_beta2 = (float)(1.0 - d->beta2);
    args.beta2 = (float)d->beta2;
    args.eps = (float)d->eps;
    args.momentum = (float)d->momentum;
    args.couple_decay = d->kind == XD_OPTIMIZER_ADAM_L2;
    args.maximize = d->maximize;
    return args;
}

XD_API xd_result xd_optimizer_step(xd_optimizer *optimizer, const xd_optimizer_step_desc *desc,
                                   bool *skipped) {
    const xd_optimizer_desc *d = &optimizer->desc;
    const xd_launch launch = xdi_train_launch(optimizer->ctx);
    const xd_optimizer_kernels kernels = xd_ctx_kernels(optimizer->ctx).optimizer;
    if (desc && xdi_train_refused(desc->status)) {
        if (skipped) *skipped = true;
        return XD_OK;
    }
    xd_update_args args = xdi_optimizer_args(optimizer, desc ? desc->gradient_scale : NULL);
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        XDI_REQUIRE(optimizer->ctx, xdi_optimizer_same(p, &optimizer->created[i]), XD_ERROR_STATE,
                    "%s: value, dtype, count or flags changed since creation",
                    p->name ? p->name : "(unnamed)");
        if (p->gradient && xdi_optimizer_owns(p))
            optimizer->updates[args.array_count++] = xdi_optimizer_update(optimizer, i);
    }
    XDI_TRY(d->kind == XD_OPTIMIZER_SGD ? kernels.sgd(&launch, &args) : kernels.adam(&launch, &args));
    for (int64_t i = 0; i < d->param_count; i++)
        if (d->params[i].gradient && xdi_optimizer_owns(&d->params[i])) optimizer->steps[i]++;
    if (skipped) *skipped = false;
    return XD_OK;
}

/* >>train/clip.c */

#include <math.h>
#include <string.h>

/* What ranks exchange: the sum, or the limbs of the exact one, then three counts. */
enum { XDI_CLIP_COUNTS = 3, XDI_CLIP_NOT_FINITE = 0, XDI_CLIP_NAN = 1, XDI_CLIP_FAILED = 2 };

static bool xdi_clip_has_gradient(const xd_param *p) {
    return p->gradient && !p->frozen && !p->buffer && p->count > 0;
}

static xd_result xdi_clip_validate(xd_ctx *ctx, const xd_gradient_norm_desc *d) {
    XDI_REQUIRE(ctx, d->param_count >= 0 && (d->params || d->param_count == 0), XD_ERROR_ARGUMENT,
                "%lld parameters at %p", (long long)d->param_count, (const void *)d->params);
    XDI_REQUIRE(ctx, (int)d->type >= 0 && d->type <= XD_NORM_MAX, XD_ERROR_ARGUMENT,
                "norm type %d is unknown", (int)d->type);
    XDI_REQUIRE(ctx, (int)d->form >= 0 && d->form <= XD_CLIP_ALWAYS, XD_ERROR_ARGUMENT,
                "clip form %d is unknown", (int)d->form);
    XDI_REQUIRE(ctx, d->max_norm >= 0.0, XD_ERROR_ARGUMENT, "max_norm %g is negative or not a number",
                d->max_norm);
    return XD_OK;
}

/* This rank's part. One array at a time, so that the list needs no memory of its own. */
static xd_result xdi_clip_local(xd_ctx *ctx, const xd_gradient_norm_desc *d, bool exact, xd_norm_sum *sum) {
    const xd_launch launch = xdi_train_launch(ctx);
    const xd_optimizer_kernels kernels = xd_ctx_kernels(ctx).optimizer;
    XDI_TRY(xdi_clip_validate(ctx, d));
    for (int64_t i = 0; i < d->param_count; i++) {
        const xd_param *p = &d->params[i];
        if (!xdi_clip_has_gradient(p)) continue;
        xd_norm_array array;
        array.data = p->gradient;
        array.count = p->count;
        array.dtype = xdi_train_gradient_dtype(p);
        array.replica = p->replica;
        xd_norm_args args;
        args.arrays = &array;
        args.array_count = 1;
        args.type = d->type;
        args.exact = exact;
        XDI_TRY(kernels.norm(&launch, &args, sum));
    }
    return XD_OK;
}

/* Counts stay exact in double up to 2^53. */
static xd_result xdi_clip_exchange_sum(xd_comm *comm, xd_norm_sum *sum, int64_t *counts) {
    double pack[1 + XDI_CLIP_COUNTS];
    pack[0] = sum->sum;
    for (int i = 0; i < XDI_CLIP_COUNTS; i++) pack[1 + i] = (double)counts[i];
    XDI_TRY(xd_all_reduce(comm, pack, pack, 1 + XDI_CLIP_COUNTS, XD_DTYPE_F64, XD_SUM));
    sum->sum = pack[0];
    for (int i = 0; i < XDI_CLIP_COUNTS; i++) counts[i] = (int64_t)pack[1 + i];
    return XD_OK;
}

/* No one reduction takes the maximum of a value and the sum of the counts. */
static xd_result xdi_clip_exchange_largest(xd_comm *comm, xd_norm_sum *sum, int64_t *counts) {
    XDI_TRY(xd_all_reduce(comm, &sum->largest, &sum->largest, 1, XD_DTYPE_F64, XD_MAX));
    return xd_all_reduce(comm, counts, counts, XDI_CLIP_COUNTS, XD_DTYPE_I64, XD_SUM);
}

static xd_result xdi_clip_exchange_exact(xd_comm *comm, xd_norm_sum *sum, int64_t *counts) {
    int64_t pack[XD_NORM_LIMBS + XDI_CLIP_COUNTS];
    memcpy(pack, sum->limbs, sizeof sum->limbs);
    memcpy(pack + XD_NORM_LIMBS, counts, XDI_CLIP_COUNTS * sizeof *counts);
    XDI_TRY(xd_all_reduce(comm, pack, pack, XD_NORM_LIMBS + XDI_CLIP_COUNTS, XD_DTYPE_I64, XD_SUM));
    memcpy(sum->limbs, pack, sizeof sum->limbs);
    memcpy(counts, pack + XD_NORM_LIMBS, XDI_CLIP_COUNTS * sizeof *counts);
    return XD_OK;
}

/* Adds the ranks up. A rank whose arguments were refused takes part all the same and says so in its counts;
 * only then is there a second exchange, which names it. */
static xd_result xdi_clip_exchange(xd_comm *comm, xd_norm_type type, bool exact, xd_result mine,
                                   xd_norm_sum *sum) {
    int64_t counts[XDI_CLIP_COUNTS];
    counts[XDI_CLIP_NOT_FINITE] = sum->not_finite;
    counts[XDI_CLIP_NAN] = sum->nan;
    counts[XDI_CLIP_FAILED] = mine != XD_OK;
    if (comm && exact)
        XDI_TRY(xdi_clip_exchange_exact(comm, sum, counts));
    else if (comm)
        XDI_TRY(type == XD_NORM_MAX ? xdi_clip_exchange_largest(comm, sum, counts)
                                    : xdi_clip_exchange_sum(comm, sum, counts));
    if (counts[XDI_CLIP_FAILED] > 0) return comm ? xd_agree(comm, mine) : mine;
    sum->not_finite = counts[XDI_CLIP_NOT_FINITE];
    sum->nan = counts[XDI_CLIP_NAN];
    return XD_OK;
}

static double xdi_clip_norm(const xd_norm_sum *sum, xd_norm_type type, bool exact) {
    if (sum->nan > 0) return (double)NAN;
    if (sum->not_finite > 0) return (double)INFINITY;
    if (type == XD_NORM_MAX) return sum->largest;
    const double total = exact ? xd_norm_limbs_value(sum->limbs) : sum->sum;
    return type == XD_NORM_L2 ? sqrt(total) : total;
}

XD_API xd_result xd_gradient_norm_compute(xd_ctx *ctx, xd_comm *comm, const xd_gradient_norm_desc *desc,
                                          xd_gradient_norm *out) {
    const bool exact = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT && desc->type != XD_NORM_MAX;
    xd_norm_sum sum;
    memset(&sum, 0, sizeof sum);
    const xd_result mine = xdi_clip_local(ctx, desc, exact, &sum);
    XDI_TRY(xdi_clip_exchange(comm, desc->type, exact, mine, &sum));
    out->norm = xdi_clip_norm(&sum, desc->type, exact);
    out->not_finite = sum.not_finite;
    out->coefficient =
        desc->max_norm > 0.0 ? xd_clip_coefficient(desc->form, desc->max_norm, out->norm) : 1.0f;
    if (desc->status) desc->status->not_finite += sum.not_finite;
    return XD_OK;
}

XD_API float xd_clip_coefficient(xd_clip_form form, double max_norm, double norm) {
    const double c = max_norm / (norm + 1e-6);
    if (form == XD_CLIP_ALWAYS) return isnan(c) ? NAN : (float)(c < 1.0 ? c : 1.0);
    if (form == XD_CLIP_ABOVE && !isfinite(norm)) return 1.0f;
    return c < 1.0 ? (float)c : 1.0f;
}

XD_API xd_result xd_clip_gradients(xd_ctx *ctx, const xd_param *params, int64_t param_count,
                                   float coefficient) {
    const xd_launch launch = xdi_train_launch(ctx);
    const xd_optimizer_kernels kernels = xd_ctx_kernels(ctx).optimizer;
    for (int64_t i = 0; i < param_count; i++)
        XDI_REQUIRE(
            ctx, !xdi_clip_has_gradient(&params[i]) || xdi_train_takes(xdi_train_gradient_dtype(&params[i])),
            XD_ERROR_DTYPE, "%s: gradients are F32, BF16 or F16, not %s",
            params[i].name ? params[i].name : "(unnamed)", xd_dtype_name(params[i].gradient_dtype));
    for (int64_t i = 0; i < param_count && coefficient != 1.0f; i++) {
        if (!xdi_clip_has_gradient(&params[i])) continue;
        xd_scale_args args;
        args.data = params[i].gradient;
        args.count = params[i].count;
        args.dtype = xdi_train_gradient_dtype(&params[i]);
        args.factor = coefficient;
        XDI_TRY(kernels.scale(&launch, &args));
    }
    return XD_OK;
}

/* >>train/ema.c */

#include <math.h>
#include <string.h>

enum { XDI_EMA_NAME_ROOM = 1024 }; /* names are stripped on the stack */

/* One shadow, and the entry of the caller's list it follows. */
typedef struct xdi_ema_shadow {
    void *value;
    const char *name; /* stripped */
    int64_t source;   /* index into the caller's list */
    xd_dtype dtype;
} xdi_ema_shadow;

/* One name of the caller's list; tied entries point to one shadow. */
typedef struct xdi_ema_name {
    const char *text;
    int64_t shadow;
} xdi_ema_name;

struct xd_ema {
    xd_ctx *ctx;
    xd_ema_desc desc;
    const xd_param *params; /* the caller's */
    int64_t param_count;
    xd_param *created;       /* [param_count]; the list at creation, to notice changes */
    xdi_ema_name *names;     /* [param_count] */
    int64_t *slots;          /* [slot_count]; hash table of names: 1 + index into names, 0 = free */
    int64_t slot_count;      /* a power of two, at least twice param_count */
    xdi_ema_shadow *shadows; /* [shadow_count], room for param_count */
    int64_t shadow_count;
    xd_lerp_array *lerps; /* [param_count]; filled anew in every update */
    xd_cast_array *casts; /* [param_count] */
    int64_t iteration;
    bool initialized;
};

static const char *const xdi_ema_wrappers[] = { "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.",
                                                "_orig_mod.", "module." };

/* ---- configuration and schedules ---- */

static void xdi_ema_defaults(xd_ema_desc *d) {
    if (d->decay == 0.0) d->decay = 0.9999;
    if (d->gamma == 0.0) d->gamma = 16.97;
    if (d->halflife_kimg == 0.0) d->halflife_kimg = 500.0;
    if (d->rampup_ratio == 0.0) d->rampup_ratio = 0.05;
    if (d->batch_size == 0) d->batch_size = 1;
    if (d->dtype == XD_DTYPE_NONE) d->dtype = XD_DTYPE_F32;
    if (!d->strip_tokens) {
        d->strip_tokens = xdi_ema_wrappers;
        d->strip_count = (int)(sizeof xdi_ema_wrappers / sizeof *xdi_ema_wrappers);
    }
}

static bool xdi_ema_averages(xd_dtype dtype) {
    return dtype == XD_DTYPE_F32 || dtype == XD_DTYPE_BF16 || dtype == XD_DTYPE_F16 || dtype == XD_DTYPE_F64;
}

/* Written so that NaN fails each of them. */
static xd_result xdi_ema_validate(xd_ctx *ctx, const xd_ema_desc *d) {
    XDI_REQUIRE(ctx, (int)d->schedule >= 0 && d->schedule <= XD_EMA_RAMP, XD_ERROR_ARGUMENT,
                "average schedule %d is unknown", (int)d->schedule);
    XDI_REQUIRE(ctx, d->decay >= 0.0 && d->decay <= 1.0, XD_ERROR_ARGUMENT, "decay %g is outside [0, 1]",
                d->decay);
    XDI_REQUIRE(ctx, d->gamma >= -1.0 && d->gamma < HUGE_VAL, XD_ERROR_ARGUMENT,
                "gamma %g is below -1 or not finite", d->gamma);
    XDI_REQUIRE(ctx, d->halflife_kimg > 0.0 && d->halflife_kimg < HUGE_VAL, XD_ERROR_ARGUMENT,
                "halflife_kimg %g is not above 0 or not finite", d->halflife_kimg);
    XDI_REQUIRE(ctx, d->rampup_ratio >= 0.0 && d->rampup_ratio < HUGE_VAL, XD_ERROR_ARGUMENT,
                "rampup_ratio %g is negative or not finite", d->rampup_ratio);
    XDI_REQUIRE(ctx, d->batch_size > 0, XD_ERROR_ARGUMENT, "batch_size %lld is negative",
                (long long)d->batch_size);
    XDI_REQUIRE(ctx, d->start_iteration >= 0, XD_ERROR_ARGUMENT, "start_iteration %lld is negative",
                (long long)d->start_iteration);
    XDI_REQUIRE(ctx, xdi_ema_averages(d->dtype), XD_ERROR_DTYPE, "shadows are F32, BF16, F16 or F64, not %s",
                xd_dtype_name(d->dtype));
    return XD_OK;
}

static double xdi_ema_decay_at(const xd_ema_desc *d, int64_t iteration) {
    const double i = (double)iteration;
    switch (d->schedule) {
    case XD_EMA_POWER: return pow(1.0 - 1.0 / (i > 1.0 ? i : 1.0), d->gamma + 1.0);
    case XD_EMA_HALFLIFE: {
        const double ramp = i * (double)d->batch_size * d->rampup_ratio;
        double halflife = 1000.0 * d->halflife_kimg;
        if (!d->disable_rampup && ramp < halflife) halflife = ramp;
        return pow(2.0, -(double)d->batch_size / (halflife > 1e-8 ? halflife : 1e-8));
    }
    case XD_EMA_RAMP: {
        const double ramp = (1.0 + i) / (10.0 + i);
        return ramp < d->decay ? ramp : d->decay;
    }
    default: return d->decay;
    }
}

XD_API xd_result xd_ema_decay(xd_ctx *ctx, const xd_ema_desc *desc, int64_t iteration, double *decay) {
    xd_ema_desc d = *desc;
    xdi_ema_defaults(&d);
    XDI_TRY(xdi_ema_validate(ctx, &d));
    XDI_REQUIRE(ctx, iteration >= 0, XD_ERROR_ARGUMENT, "iteration %lld is negative", (long long)iteration);
    *decay = xdi_ema_decay_at(&d, iteration);
    return XD_OK;
}

/* ---- names ---- */

/* Writes `name` without any strip token to `out`, which has room for all of it. Returns the length. */
static size_t xdi_ema_strip(const xd_ema_desc *d, const char *name, char *out) {
    size_t length = 0;
    while (*name) {
        size_t skip = 0;
        for (int i = 0; i < d->strip_count && skip == 0; i++) {
            const size_t n = strlen(d->strip_tokens[i]);
            if (strncmp(name, d->strip_tokens[i], n) == 0) skip = n;
        }
        if (skip == 0) out[length++] = *name;
        name += skip > 0 ? skip : 1;
    }
    out[length] = '\0';
    return length;
}

/* The slot that holds a name, or the free one where it belongs. FNV-1a over the stripped text. */
static int64_t xdi_ema_slot(const xd_ema *ema, const char *stripped) {
    uint64_t hash = UINT64_C(14695981039346656037);
    for (const char *c = stripped; *c; c++)
        hash = (hash ^ (uint64_t)(unsigned char)*c) * UINT64_C(1099511628211);
    const uint64_t mask = (uint64_t)ema->slot_count - 1;
    uint64_t slot = hash & mask;
    while (ema->slots[slot] && strcmp(ema->names[ema->slots[slot] - 1].text, stripped) != 0)
        slot = (slot + 1) & mask;
    return (int64_t)slot;
}

/* The shadow behind a caller's name, -1 when there is none. `room` holds the stripped name. */
static int64_t xdi_ema_find(const xd_ema *ema, const char *name, char *room, size_t room_bytes) {
    if (!name || strlen(name) >= room_bytes) return -1;
    xdi_ema_strip(&ema->desc, name, room);
    const int64_t entry = ema->slots[xdi_ema_slot(ema, room)];
    return entry ? ema->names[entry - 1].shadow : -1;
}

/* ---- life ---- */

static xd_result xdi_ema_validate_params(xd_ctx *ctx, const xd_param *params, int64_t count) {
    XDI_REQUIRE(ctx, count >= 0 && (params || count == 0), XD_ERROR_ARGUMENT, "%lld parameters at %p",
                (long long)count, (const void *)params);
    for (int64_t i = 0; i < count; i++) {
        const xd_param *p = &params[i];
        XDI_REQUIRE(ctx, p->name && strlen(p->name) < XDI_EMA_NAME_ROOM, XD_ERROR_ARGUMENT,
                    "parameter %lld has no name, or one of more than %d bytes", (long long)i,
                    XDI_EMA_NAME_ROOM - 1);
        XDI_REQUIRE(ctx, p->count >= 0 && (p->value || p->count == 0), XD_ERROR_ARGUMENT,
                    "%s: %lld elements at %p", p->name, (long long)p->count, p->value);
        XDI_REQUIRE(ctx, p->buffer ? xd_dtype_size(p->dtype) > 0 : xdi_ema_averages(p->dtype), XD_ERROR_DTYPE,
                    "%s: %s cannot be averaged; buffers say so with the flag", p->name,
                    xd_dtype_name(p->dtype));
    }
    return XD_OK;
}

/* Index of the first entry with the same memory, or i itself. */
static int64_t xdi_ema_tie(const xd_param *params, int64_t i) {
    if (params[i].value)
        for (int64_t k = 0; k < i; k++)
            if (params[k].value == params[i].value && params[k].count == params[i].count) return k;
    return i;
}

static xd_dtype xdi_ema_shadow_dtype(const xd_ema_desc *d, const xd_param *p) {
    return p->buffer || d->live_dtype ? p->dtype : d->dtype;
}

/* Lays everything out behind the object itself. Run once without memory for the size, once with it. */
static void xdi_ema_lay_out(xd_arena *arena, const xd_ema_desc *d, const xd_param *params, int64_t count,
                            xd_ema *ema) {
    const size_t n = (size_t)count;
    size_t slots = 2;
    while (slots < 2 * n) slots *= 2;
    xd_ema laid;
    memset(&laid, 0, sizeof laid);
    xd_arena_take_pointer(arena, sizeof laid);
    laid.created = (xd_param *)xd_arena_take_pointer(arena, n * sizeof *laid.created);
    laid.names = (xdi_ema_name *)xd_arena_take_pointer(arena, n * sizeof *laid.names);
    laid.slots = (int64_t *)xd_arena_take_pointer(arena, slots * sizeof *laid.slots);
    laid.slot_count = (int64_t)slots;
    laid.shadows = (xdi_ema_shadow *)xd_arena_take_pointer(arena, n * sizeof *laid.shadows);
    laid.lerps = (xd_lerp_array *)xd_arena_take_pointer(arena, n * sizeof *laid.lerps);
    laid.casts = (xd_cast_array *)xd_arena_take_pointer(arena, n * sizeof *laid.casts);
    for (int64_t i = 0; i < count; i++) {
        const xd_param *p = &params[i];
        const xd_dtype dtype = xdi_ema_shadow_dtype(d, p);
        const int64_t tie = xdi_ema_tie(params, i);
        char *text = (char *)xd_arena_take_pointer(arena, strlen(p->name) + 1);
        int64_t *shape = NULL;
        if (p->shape) shape = (int64_t *)xd_arena_take_pointer(arena, (size_t)p->dims * sizeof *shape);
        void *value = NULL;
        if (tie == i) value = xd_arena_take_pointer(arena, (size_t)p->count * xd_dtype_size(dtype));
        if (!ema) continue;
        xdi_ema_strip(d, p->name, text);
        if (shape) memcpy(shape, p->shape, (size_t)p->dims * sizeof *shape);
        laid.created[i] = *p;
        laid.created[i].shape = shape;
        laid.names[i].text = text;
        laid.names[i].shadow = tie == i ? laid.shadow_count : laid.names[tie].shadow;
        if (tie != i) continue;
        xdi_ema_shadow *shadow = &laid.shadows[laid.shadow_count++];
        shadow->value = value;
        shadow->name = text;
        shadow->source = i;
        shadow->dtype = dtype;
    }
    if (ema) *ema = laid;
}

static xd_result xdi_ema_index(xd_ema *ema) {
    for (int64_t i = 0; i < ema->param_count; i++) {
        const int64_t slot = xdi_ema_slot(ema, ema->names[i].text);
        XDI_REQUIRE(ema->ctx, ema->slots[slot] == 0, XD_ERROR_ARGUMENT,
                    "%s and %s are both \"%s\" without wrappers", ema->params[ema->slots[slot] - 1].name,
                    ema->params[i].name, ema->names[i].text);
        ema->slots[slot] = i + 1;
    }
    return XD_OK;
}

/* shadow <- live, parameters too when `all`, else buffers only. */
static xd_result xdi_ema_copy(xd_ema *ema, bool all) {
    const xd_launch launch = xdi_train_launch(ema->ctx);
    int64_t n = 0;
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        if (!all && !p->buffer) continue;
        xd_cast_array *cast = &ema->casts[n++];
        cast->target = s->value;
        cast->target_dtype = s->dtype;
        cast->source = p->value;
        cast->source_dtype = p->dtype;
        cast->count = p->count;
    }
    return xd_ctx_kernels(ema->ctx).optimizer.cast(&launch, ema->casts, n);
}

XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                               xd_ema **out) {
    xd_ema_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    xdi_ema_defaults(&d);
    XDI_TRY(xdi_ema_validate(ctx, &d));
    XDI_TRY(xdi_ema_validate_params(ctx, params, count));
    xd_arena plan = xd_arena_over(NULL, 0);
    xdi_ema_lay_out(&plan, &d, params, count, NULL);
    xd_ema *ema = (xd_ema *)xd_allocate(ctx, plan.peak);
    if (!ema)
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for the average of %lld parameters: %zu bytes",
                        (long long)count, plan.peak);
    xd_arena arena = xd_arena_over(ema, plan.peak);
    xdi_ema_lay_out(&arena, &d, params, count, ema);
    ema->ctx = ctx;
    ema->desc = d;
    ema->params = params;
    ema->param_count = count;
    ema->initialized = d.init_from_current;
    xd_result result = xdi_ema_index(ema);
    if (result == XD_OK) result = xdi_ema_copy(ema, true);
    if (result == XD_OK)
        *out = ema;
    else
        xd_ema_destroy(ema);
    return result;
}

XD_API void xd_ema_destroy(xd_ema *ema) {
    if (ema) xd_release(ema->ctx, ema);
}

/* ---- updates ---- */

static xd_result xdi_ema_average(xd_ema *ema, int64_t iteration) {
    const xd_launch launch = xdi_train_launch(ema->ctx);
    xd_lerp_args args;
    args.arrays = ema->lerps;
    args.array_count = 0;
    args.keep = xdi_ema_decay_at(&ema->desc, iteration);
    args.weighted_sum = ema->desc.compat_credit;
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        const xdi_ema_shadow *s = &ema->shadows[i];
        const xd_param *p = &ema->created[s->source];
        if (p->buffer) continue;
        xd_lerp_array *lerp = &ema->lerps[args.array_count++];
        lerp->target = s->value;
        lerp->target_dtype = s->dtype;
        lerp->source = p->value;
        lerp->source_dtype = p->dtype;
        lerp->count = p->count;
    }
    XDI_TRY(xd_ctx_kernels(ema->ctx).optimizer.lerp(&launch, &args));
    return xdi_ema_copy(ema, false);
}

static xd_result xdi_ema_unchanged(const xd_ema *ema) {
    for (int64_t i = 0; i < ema->param_count; i++) {
        const xd_param *now = &ema->params[i], *then = &ema->created[i];
        XDI_REQUIRE(ema->ctx,
                    now->value == then->value && now->count == then->count && now->dtype == then->dtype &&
                        now->buffer == then->buffer,
                    XD_ERROR_STATE, "%s: value, dtype, count or flags changed since creation",
                    ema->names[i].text);
    }
    return XD_OK;
}

XD_API xd_result xd_ema_update(xd_ema *ema, int64_t iteration, const xd_status *status) {
    XDI_REQUIRE(ema->ctx, iteration >= XD_EMA_NEXT, XD_ERROR_ARGUMENT, "iteration %lld is negative",
                (long long)iteration);
    XDI_TRY(xdi_ema_unchanged(ema));
    if (xdi_train_refused(status)) return XD_OK;
    const int64_t i = iteration == XD_EMA_NEXT ? ema->iteration + 1 : iteration;
    ema->iteration = i;
    if (i < ema->desc.start_iteration) return XD_OK;
    /* Under init_from_current with start 0 the iterations begin at 1, so the equality never strikes. */
    if (i != ema->desc.start_iteration && ema->initialized) return xdi_ema_average(ema, i);
    XDI_TRY(xdi_ema_copy(ema, true));
    ema->initialized = true;
    return XD_OK;
}

/* ---- in and out ---- */

XD_API int64_t xd_ema_count(const xd_ema *ema) {
    return ema->shadow_count;
}

XD_API xd_param xd_ema_view(const xd_ema *ema, int64_t index) {
    xd_param view;
    memset(&view, 0, sizeof view);
    if (index < 0 || index >= ema->shadow_count) return view;
    const xdi_ema_shadow *s = &ema->shadows[index];
    view = ema->created[s->source];
    view.name = s->name;
    view.value = s->value;
    view.dtype = s->dtype;
    view.gradient = NULL;
    return view;
}

XD_API xd_ema_record xd_ema_get_record(const xd_ema *ema) {
    xd_ema_record record;
    memset(&record, 0, sizeof record);
    record.format_version = 1;
    record.iteration = ema->iteration;
    record.initialized = ema->initialized;
    record.config = ema->desc;
    return record;
}

/* Adds a name to the list of those that did not match, while there is room and there are fewer than five. */
static void xdi_ema_note(xd_ema_match *match, const char *name) {
    const int64_t noted = match->missing_in_shadow + match->missing_in_target + match->wrong_shape;
    const size_t used = strlen(match->names), length = strlen(name), comma = used ? 2 : 0;
    if (noted > 5 || used + comma + length + 1 > sizeof match->names) return;
    if (comma) memcpy(match->names + used, ", ", 2);
    memcpy(match->names + used + comma, name, length + 1);
}

static bool xdi_ema_same_shape(const xd_param *a, const xd_param *b) {
    if (a->count != b->count) return false;
    if (!a->shape || !b->shape) return true;
    return a->dims == b->dims && memcmp(a->shape, b->shape, (size_t)a->dims * sizeof *a->shape) == 0;
}

/* Compares a caller's list with the shadows. Shadows that were met are marked by casts[shadow].count >= 0:
 * the array is free between updates. */
static void xdi_ema_compare(const xd_ema *ema, const xd_param *list, int64_t count, xd_ema_match *match) {
    char room[XDI_EMA_NAME_ROOM];
    memset(match, 0, sizeof *match);
    for (int64_t i = 0; i < ema->shadow_count; i++) ema->casts[i].count = -1;
    for (int64_t i = 0; i < count; i++) {
        const char *name = list[i].name ? list[i].name : "(unnamed)";
        const int64_t s = xdi_ema_find(ema, name, room, sizeof room);
        if (s < 0) {
            match->missing_in_shadow++;
            xdi_ema_note(match, name);
            continue;
        }
        ema->casts[s].count = 0;
        if (xdi_ema_same_shape(&list[i], &ema->created[ema->shadows[s].source])) {
            match->matched++;
        } else {
            match->wrong_shape++;
            xdi_ema_note(match, name);
        }
    }
    for (int64_t i = 0; i < ema->shadow_count; i++) {
        if (ema->casts[i].count == 0) continue;
        match->missing_in_target++;
        xdi_ema_note(match, ema->shadows[i].name);
    }
}

static xd_result xdi_ema_judge(const xd_ema *ema, const xd_ema_match *m, bool lenient, bool loading) {
    XDI_REQUIRE(ema->ctx, m->wrong_shape == 0, XD_ERROR_SHAPE, "%lld of %lld tensors have another shape: %s",
                (long long)m->wrong_shape, (long long)(m->matched + m->wrong_shape), m->names);
    if (lenient) return XD_OK;
    /* what the receiving side lacks is missing, what it does not know is unexpected */
    XDI_REQUIRE(ema->ctx, m->missing_in_target == 0, loading ? XD_ERROR_MISSING : XD_ERROR_UNEXPECTED,
                "%lld shadows of %lld have no counterpart: %s", (long long)m->missing_in_target,
                (long long)ema->shadow_count, m->names);
    XDI_REQUIRE(ema->ctx, m->missing_in_shadow == 0, loading ? XD_ERROR_UNEXPECTED : XD_ERROR_MISSING,
                "%lld names have no shadow: %s", (long long)m->missing_in_shadow, m->names);
    return XD_OK;
}

static xd_result xdi_ema_move(const xd_ema *ema, const xd_param *list, int64_t count, bool loading,
                              bool write) {
    const xd_launch launch = xdi_train_launch(ema->ctx);
    char room[XDI_EMA_NAME_ROOM];
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = xdi_ema_find(ema, list[i].name, room, sizeof room);
        if (index < 0) continue;
        XDI_REQUIRE(ema->ctx, list[i].value || list[i].count == 0, XD_ERROR_ARGUMENT,
                    "%s: %lld elements at NULL", list[i].name, (long long)list[i].count);
        const xdi_ema_shadow *s = &ema->shadows[index];
        xd_cast_array cast;
        cast.target = loading ? s->value : list[i].value;
        cast.target_dtype = loading ? s->dtype : list[i].dtype;
        cast.source = loading ? list[i].value : s->value;
        cast.source_dtype = loading ? list[i].dtype : s->dtype;
        cast.count = write ? list[i].count : 0; /* an empty cast still checks its dtypes */
        XDI_TRY(xd_ctx_kernels(ema->ctx).optimizer.cast(&launch, &cast, 1));
    }
    return XD_OK;
}

/* Everything that can be refused is refused before the first element is written. */
static xd_result xdi_ema_exchange(const xd_ema *ema, const xd_param *list, int64_t count, bool lenient,
                                  bool loading, xd_ema_match *match) {
    xd_ema_match found;
    XDI_REQUIRE(ema->ctx, count >= 0 && (list || count == 0), XD_ERROR_ARGUMENT, "%lld tensors at %p",
                (long long)count, (const void *)list);
    xdi_ema_compare(ema, list, count, &found);
    if (match) *match = found;
    XDI_TRY(xdi_ema_judge(ema, &found, lenient, loading));
    XDI_TRY(xdi_ema_move(ema, list, count, loading, false));
    return xdi_ema_move(ema, list, count, loading, true);
}

XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match) {
    return xdi_ema_exchange(ema, targets, count, lenient, false, match);
}

/* Every parameter, that is every shadow that is no buffer, was met by the last comparison. */
static bool xdi_ema_complete(const xd_ema *ema) {
    for (int64_t i = 0; i < ema->shadow_count; i++)
        if (ema->casts[i].count < 0 && !ema->created[ema->shadows[i].source].buffer) return false;
    return ema->shadow_count > 0;
}

XD_API xd_result xd_ema_load(xd_ema *ema, const xd_param *sources, int64_t count, const xd_ema_record *record,
                             bool lenient, xd_ema_match *match) {
    XDI_REQUIRE(ema->ctx, !record || record->format_version == 1, XD_ERROR_FORMAT,
                "the record has format version %d, this library reads 1", record->format_version);
    XDI_TRY(xdi_ema_exchange(ema, sources, count, lenient, true, match));
    if (record) ema->iteration = record->iteration;
    if (xdi_ema_complete(ema) || (record && record->initialized)) ema->initialized = true;
    return XD_OK;
}


/* >>distill/internal */

/* vocab.c: are these logits rows of this vocabulary's shard? rows < 0 -> any number of them. */
XD_PRIVATE xd_result xdi_vocab_check_rows(xd_ctx *ctx, const xd_vocab *vocab, const char *name,
                                          const xd_rows *rows, int64_t count);
/* vocab.c: a gradient of the student's shape; over its memory only with its dtype and stride. */
XD_PRIVATE xd_result xdi_vocab_check_gradient(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *student,
                                              const xd_rows *gradient);
/* vocab.c: all-gathers count elements a rank. On one rank nothing moves and the result is `mine` itself. */
XD_PRIVATE xd_result xdi_vocab_gather(const xd_vocab *vocab, const void *mine, void *all, int64_t count,
                                      xd_dtype dtype, const void **result);
/* vocab.c: agrees on a local result over both groups (either may be NULL), so that all ranks go on or none
 * does. */
XD_PRIVATE xd_result xdi_vocab_agree(xd_comm *tp, xd_comm *comm, xd_result mine);

/* denominator.c: does position i count? */
XD_PRIVATE bool xdi_denominator_counts(const int64_t *labels, int64_t ignore_index, const uint8_t *mask,
                                       int64_t i);

/* reduction.c: which rows count, by what they are divided, and how their losses become one value. */
typedef struct xdi_reduction {
    int64_t rows;
    const int64_t *labels;
    int64_t ignore_index;
    const uint8_t *mask;
    const float *row_weight;
    const double *scale;
    const xd_denominator *denominator;
    double denominator_value;
    xd_comm *comm;
    xd_status *status;
    double hard_weight, soft_weight; /* soft_weight includes tau^2 */
} xdi_reduction;

/* One row's contribution. */
typedef struct xdi_row_value {
    double hard, soft;
    int finding;  /* xd_row_finding */
    double value; /* what the status shows of it */
} xdi_row_value;
typedef xdi_row_value (*xdi_row_reader)(const void *rows, int64_t row);

XD_PRIVATE xd_result xdi_reduction_check(xd_ctx *ctx, const xdi_reduction *in);
/* Fills row_scale[rows] = w scale / D, 0 for rows that do not count, and gives scale / D. */
XD_PRIVATE xd_result xdi_reduction_scales(xd_ctx *ctx, const xdi_reduction *in, double *row_scale,
                                          double *factor);
XD_PRIVATE int64_t
xdi_reduction_words(const xdi_reduction *in); /* int64 words of workspace that finish wants */
XD_PRIVATE xd_result xdi_reduction_finish(xd_ctx *ctx, const xdi_reduction *in, const double *row_scale,
                                          double factor, xdi_row_reader read, const void *rows,
                                          int64_t *words, xd_loss_values *out);

/* >>distill/vocab.c */

#include <string.h>

struct xd_vocab {
    xd_ctx *ctx;
    xd_comm *tp;
    int rank, ranks;
    int64_t *counts;  /* [ranks] scratch for gathers: the same count for every rank */
    int64_t *offsets; /* [ranks + 1] */
};

static xd_result xdi_vocab_validate(xd_ctx *ctx, const int64_t *all, int ranks, int64_t size) {
    int64_t at = 0;
    for (int i = 0; i < ranks; i++) {
        const int64_t begin = all[3 * i], end = all[3 * i + 1], total = all[3 * i + 2];
        XDI_REQUIRE(ctx, total == size, XD_ERROR_MISMATCH,
                    "vocabulary has %lld columns here but %lld on rank %d of the group", (long long)size,
                    (long long)total, i);
        XDI_REQUIRE(ctx, begin <= end, XD_ERROR_SHAPE,
                    "vocabulary shard %d begins at %lld after its end %lld", i, (long long)begin,
                    (long long)end);
        XDI_REQUIRE(ctx, begin <= at, XD_ERROR_SHAPE,
                    "vocabulary columns %lld to %lld are in no shard (gap before shard %d)", (long long)at,
                    (long long)begin, i);
        XDI_REQUIRE(
            ctx, begin == at, XD_ERROR_SHAPE,
            "vocabulary shard %d begins at column %lld but the shards before it end at %lld (overlap)", i,
            (long long)begin, (long long)at);
        at = end;
    }
    XDI_REQUIRE(ctx, at == size, XD_ERROR_SHAPE, "vocabulary shards end at column %lld but there are %lld",
                (long long)at, (long long)size);
    XDI_REQUIRE(ctx, size > 0, XD_ERROR_SHAPE, "vocabulary has %lld columns; at least 1 is needed",
                (long long)size);
    return XD_OK;
}

static xd_vocab *xdi_vocab_new(xd_ctx *ctx, xd_comm *tp) {
    xd_vocab *vocab = (xd_vocab *)xd_allocate(ctx, sizeof *vocab);
    if (!vocab) return NULL;
    vocab->ctx = ctx;
    vocab->tp = tp && xd_comm_size(tp) > 1 ? tp : NULL;
    vocab->rank = vocab->tp ? xd_comm_rank(tp) : 0;
    vocab->ranks = vocab->tp ? xd_comm_size(tp) : 1;
    vocab->counts = (int64_t *)xd_allocate(ctx, (size_t)vocab->ranks * sizeof *vocab->counts);
    vocab->offsets = (int64_t *)xd_allocate(ctx, (size_t)(vocab->ranks + 1) * sizeof *vocab->offsets);
    if (vocab->counts && vocab->offsets) return vocab;
    xd_vocab_destroy(vocab);
    return NULL;
}

/* Gathers {begin, end, size} of all ranks and checks them; every rank sees the same list and the same
 * error. */
static xd_result xdi_vocab_fill(xd_vocab *vocab, const int64_t mine[3], int64_t *all) {
    const void *result;
    XDI_TRY(xdi_vocab_gather(vocab, mine, all, 3, XD_DTYPE_I64, &result));
    if (result != (const void *)all) memcpy(all, result, 3 * sizeof *all);
    XDI_TRY(xdi_vocab_validate(vocab->ctx, all, vocab->ranks, mine[2]));
    for (int i = 0; i < vocab->ranks; i++) vocab->offsets[i] = all[3 * i];
    vocab->offsets[vocab->ranks] = mine[2];
    return XD_OK;
}

XD_API xd_result xd_vocab_create(xd_ctx *ctx, xd_comm *tp, int64_t begin, int64_t end, int64_t size,
                                 xd_vocab **out) {
    const int64_t mine[3] = { begin, end, size };
    xd_vocab *vocab = xdi_vocab_new(ctx, tp);
    int64_t *all = vocab ? (int64_t *)xd_allocate(ctx, (size_t)vocab->ranks * sizeof mine) : NULL;
    xd_result result = all ? XD_OK : XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a vocabulary");
    result = xdi_vocab_agree(tp, NULL, result);
    if (result == XD_OK) result = xdi_vocab_fill(vocab, mine, all);
    xd_release(ctx, all);
    if (result != XD_OK) {
        xd_vocab_destroy(vocab);
        return result;
    }
    *out = vocab;
    return XD_OK;
}

XD_API xd_result xd_vocab_create_even(xd_ctx *ctx, xd_comm *tp, int64_t size, xd_vocab **out) {
    const int64_t ranks = tp ? xd_comm_size(tp) : 1, rank = tp ? xd_comm_rank(tp) : 0;
    const int64_t piece = size > 0 ? (size + ranks - 1) / ranks : 0;
    const int64_t begin = rank * piece < size ? rank * piece : size;
    return xd_vocab_create(ctx, tp, begin, begin + piece < size ? begin + piece : size, size, out);
}

XD_API void xd_vocab_destroy(xd_vocab *vocab) {
    if (!vocab) return;
    xd_release(vocab->ctx, vocab->counts);
    xd_release(vocab->ctx, vocab->offsets);
    xd_release(vocab->ctx, vocab);
}

XD_API xd_vocab_info xd_vocab_describe(const xd_vocab *vocab) {
    xd_vocab_info info;
    info.tp = vocab->tp;
    info.rank = vocab->rank;
    info.ranks = vocab->ranks;
    info.begin = vocab->offsets[vocab->rank];
    info.end = vocab->offsets[vocab->rank + 1];
    info.size = vocab->offsets[vocab->ranks];
    info.offsets = vocab->offsets;
    return info;
}

XD_API xd_result xd_status_check(xd_ctx *ctx, const xd_status *status) {
    XDI_REQUIRE(ctx, status->nothing_counted == 0, XD_ERROR_DATA, "no counted position in %lld losses",
                (long long)status->nothing_counted);
    const bool clean = status->label_out_of_range == 0 && status->not_finite == 0 && status->overflow == 0;
    XDI_REQUIRE(
        ctx, clean, XD_ERROR_DATA,
        "%lld labels out of range, %lld rows not finite, %lld sums ran over; first: row %lld, value %g",
        (long long)status->label_out_of_range, (long long)status->not_finite, (long long)status->overflow,
        (long long)status->first_row, status->first_value);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocab_check_rows(xd_ctx *ctx, const xd_vocab *vocab, const char *name,
                                          const xd_rows *rows, int64_t count) {
    const int64_t columns = vocab->offsets[vocab->rank + 1] - vocab->offsets[vocab->rank];
    XDI_REQUIRE(ctx, rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                "%s is %s; F32 or BF16 is needed", name, xd_dtype_name(rows->dtype));
    XDI_REQUIRE(ctx, rows->rows >= 0 && (count < 0 || rows->rows == count), XD_ERROR_SHAPE,
                "%s has %lld rows but %lld are expected", name, (long long)rows->rows, (long long)count);
    XDI_REQUIRE(ctx, rows->cols >= columns, XD_ERROR_SHAPE, "%s has %lld columns but the shard has %lld",
                name, (long long)rows->cols, (long long)columns);
    XDI_REQUIRE(ctx, rows->stride == 0 || rows->stride >= rows->cols, XD_ERROR_SHAPE,
                "%s has stride %lld, less than its %lld columns", name, (long long)rows->stride,
                (long long)rows->cols);
    XDI_REQUIRE(ctx, rows->data || rows->rows == 0 || rows->cols == 0, XD_ERROR_ARGUMENT, "%s has no data",
                name);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocab_check_gradient(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *student,
                                              const xd_rows *gradient) {
    XDI_TRY(xdi_vocab_check_rows(ctx, vocab, "gradient", gradient, student->rows));
    const int64_t stride = student->stride ? student->stride : student->cols;
    const int64_t gradient_stride = gradient->stride ? gradient->stride : gradient->cols;
    const bool same = gradient->dtype == student->dtype && gradient_stride == stride;
    XDI_REQUIRE(ctx, gradient->data != student->data || same, XD_ERROR_SHAPE,
                "a gradient over the student needs its dtype and stride: %s and %lld against %s and %lld",
                xd_dtype_name(gradient->dtype), (long long)gradient_stride, xd_dtype_name(student->dtype),
                (long long)stride);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocab_gather(const xd_vocab *vocab, const void *mine, void *all, int64_t count,
                                      xd_dtype dtype, const void **result) {
    *result = vocab->tp ? all : mine;
    if (!vocab->tp) return XD_OK;
    for (int i = 0; i < vocab->ranks; i++) vocab->counts[i] = count;
    return xd_all_gather(vocab->tp, mine, all, vocab->counts, dtype);
}

XD_PRIVATE xd_result xdi_vocab_agree(xd_comm *tp, xd_comm *comm, xd_result mine) {
    if (tp && xd_comm_size(tp) > 1) mine = xd_agree(tp, mine);
    if (comm && xd_comm_size(comm) > 1) mine = xd_agree(comm, mine);
    return mine;
}

/* >>distill/denominator.c */

#include <math.h>

/* What one rank adds to the count; five integers, so that the sum over ranks is exact. */
typedef struct xdi_denominator_part {
    int64_t positions;
    xd_fixed weight;
    int64_t refused; /* weights that cannot be */
    int64_t reserved;
} xdi_denominator_part;

XD_PRIVATE bool xdi_denominator_counts(const int64_t *labels, int64_t ignore_index, const uint8_t *mask,
                                       int64_t i) {
    if (mask && !mask[i]) return false;
    return !labels || labels[i] != (ignore_index ? ignore_index : XD_IGNORE_INDEX);
}

static void xdi_denominator_batch(const xd_positions *batch, xdi_denominator_part *part) {
    for (int64_t i = 0; i < batch->count; i++) {
        if (!xdi_denominator_counts(batch->labels, batch->ignore_index, batch->mask, i)) continue;
        part->positions++;
        if (!batch->weights)
            part->weight.high += (int64_t)1 << 30;
        else if (!(batch->weights[i] >= 0.0f) || !xd_fixed_add(&part->weight, (double)batch->weights[i]))
            part->refused++;
    }
}

XD_API xd_result xd_denominator_count(xd_ctx *ctx, xd_comm *comm, const xd_positions *batches,
                                      int64_t batch_count, xd_denominator *out) {
    xdi_denominator_part part = { 0, { 0, 0 }, 0, 0 };
    for (int64_t b = 0; b < batch_count; b++) {
        if (batches[b].count < 0)
            part.refused++;
        else
            xdi_denominator_batch(&batches[b], &part);
    }
    if (comm && xd_comm_size(comm) > 1)
        XDI_TRY(xd_all_reduce(comm, &part, &part, (int64_t)(sizeof part / sizeof(int64_t)), XD_DTYPE_I64,
                              XD_SUM));
    XDI_REQUIRE(ctx, part.refused == 0, XD_ERROR_ARGUMENT,
                "%lld weights of positions are negative, not finite or too large (or counts negative)",
                (long long)part.refused);
    out->positions = part.positions;
    out->value = xd_fixed_value(part.weight);
    out->inverse = out->value > 0.0 ? 1.0 / out->value : 0.0;
    return XD_OK;
}

/* >>distill/shift.c */

#include <string.h>

/* labels[b, i] = the id after position positions[i], where next_id/next_mask are whole sequences. */
static void xdi_shift_fill(const xd_shift_desc *d, const int64_t *ids, const uint8_t *mask, int64_t *labels) {
    const int64_t fill = d->fill ? d->fill : XD_IGNORE_INDEX;
    for (int64_t b = 0; b < d->sequences; b++)
        for (int64_t i = 0; i < d->held; i++) {
            const int64_t next = d->positions[i] + 1, at = b * d->length + next;
            const bool counts = next < d->length && (!mask || mask[at]);
            labels[b * d->held + i] = counts ? ids[at] : fill;
        }
}

static xd_result xdi_shift_validate(xd_ctx *ctx, const xd_shift_desc *d) {
    XDI_REQUIRE(ctx, d->sequences >= 0 && d->length >= 0 && d->held >= 0, XD_ERROR_ARGUMENT,
                "%lld sequences of %lld positions, %lld held", (long long)d->sequences, (long long)d->length,
                (long long)d->held);
    for (int64_t i = 0; i < d->held; i++)
        XDI_REQUIRE(ctx, d->positions[i] >= 0 && d->positions[i] < d->length, XD_ERROR_ARGUMENT,
                    "position %lld is outside the sequence of %lld", (long long)d->positions[i],
                    (long long)d->length);
    return XD_OK;
}

/* Whole ids, mask and how often each position is held, summed over ranks: what nobody holds stays 0. One
 * exchange. */
typedef struct xdi_shift_whole {
    int64_t *ids;     /* [B, length] */
    int64_t *mask;    /* [B, length] */
    int64_t *holders; /* [length] */
    int64_t words;
} xdi_shift_whole;

static void xdi_shift_scatter(const xd_shift_desc *d, xdi_shift_whole *whole) {
    for (int64_t i = 0; i < d->held; i++) whole->holders[d->positions[i]]++;
    for (int64_t b = 0; b < d->sequences; b++)
        for (int64_t i = 0; i < d->held; i++) {
            const int64_t to = b * d->length + d->positions[i], from = b * d->held + i;
            whole->ids[to] = d->ids[from];
            whole->mask[to] = !d->mask || d->mask[from] ? 1 : 0;
        }
}

static xd_result xdi_shift_exchange(xd_ctx *ctx, const xd_shift_desc *d, xdi_shift_whole *whole) {
    XDI_TRY(xd_all_reduce(d->comm, whole->ids, whole->ids, whole->words, XD_DTYPE_I64, XD_SUM));
    for (int64_t p = 0; p < d->length; p++)
        XDI_REQUIRE(ctx, whole->holders[p] == 1, XD_ERROR_SHAPE,
                    "position %lld is held by %lld ranks, not by 1", (long long)p,
                    (long long)whole->holders[p]);
    return XD_OK;
}

XD_API xd_result xd_next_token_labels(xd_ctx *ctx, const xd_shift_desc *desc, int64_t *labels) {
    const int64_t total = desc->sequences * desc->length;
    xdi_shift_whole whole;
    xd_result result = xdi_shift_validate(ctx, desc);
    if (!desc->comm) {
        if (result == XD_OK) xdi_shift_fill(desc, desc->ids, desc->mask, labels);
        return result;
    }
    memset(&whole, 0, sizeof whole);
    if (result == XD_OK) {
        whole.words = 2 * total + desc->length;
        whole.ids = (int64_t *)xd_allocate(ctx, ((size_t)whole.words + 1) * sizeof(int64_t));
        if (!whole.ids)
            result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld ids", (long long)whole.words);
    }
    result = xdi_vocab_agree(desc->comm, NULL, result);
    if (result == XD_OK) {
        whole.mask = whole.ids + total;
        whole.holders = whole.mask + total;
        xdi_shift_scatter(desc, &whole);
        result = xdi_shift_exchange(ctx, desc, &whole);
    }
    if (result == XD_OK) {
        uint8_t *mask = (uint8_t *)whole.mask; /* narrowed in place: byte i is written after word i is read */
        for (int64_t i = 0; i < total; i++) mask[i] = whole.mask[i] != 0;
        xdi_shift_fill(desc, whole.ids, mask, labels);
    }
    xd_release(ctx, whole.ids);
    return result;
}

XD_API xd_result xd_load_balanced_positions(xd_ctx *ctx, int64_t length, int rank, int ranks,
                                            int64_t *positions) {
    XDI_REQUIRE(ctx, ranks > 0 && rank >= 0 && rank < ranks, XD_ERROR_ARGUMENT, "rank %d of %d", rank, ranks);
    XDI_REQUIRE(ctx, length >= 0 && (ranks == 1 || length % (2 * ranks) == 0), XD_ERROR_SHAPE,
                "length %lld is not a multiple of %d", (long long)length, 2 * ranks);
    const int64_t held = length / ranks, piece = held / 2, second = (2 * (int64_t)ranks - 1 - rank) * piece;
    for (int64_t i = 0; i < held; i++)
        positions[i] = ranks == 1 ? i : i < piece ? rank * piece + i : second + (i - piece);
    return XD_OK;
}

/* >>distill/softmax.c */

#include <math.h>
#include <string.h>

/* Partials of a row: largest element, its lowest id, sum of exponentials relative to it. */
enum { XDI_SOFTMAX_MAX, XDI_SOFTMAX_ARG, XDI_SOFTMAX_SUM, XDI_SOFTMAX_WORDS };

/* Memory of one call: mine[rows * words] and, on several ranks, everyone's. */
typedef struct xdi_softmax_exchange {
    double *mine, *all;
    const double *parts; /* [ranks, rows * words] after the exchange */
    int64_t words;
} xdi_softmax_exchange;

/* Checks and memory on this rank alone, then agreed: all ranks go on or none does. */
static xd_result xdi_softmax_open(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                  double temperature, int64_t words, xdi_softmax_exchange *x) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    xd_result result = xdi_vocab_check_rows(ctx, vocab, "logits", logits, -1);
    memset(x, 0, sizeof *x);
    x->words = result == XD_OK ? logits->rows * words : 0;
    if (result == XD_OK && !(temperature >= 0.0 && temperature < (double)INFINITY))
        result = XDI_FAIL(ctx, XD_ERROR_ARGUMENT, "temperature %g must be positive and finite", temperature);
    if (result == XD_OK) {
        const size_t bytes = (size_t)x->words * sizeof(double);
        x->mine = (double *)xd_allocate(ctx, bytes ? bytes : 1);
        x->all = info.ranks > 1 ? (double *)xd_allocate(ctx, bytes ? bytes * (size_t)info.ranks : 1) : NULL;
        if (!x->mine || (info.ranks > 1 && !x->all))
            result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld partials", (long long)x->words);
    }
    return xdi_vocab_agree(info.tp, NULL, result);
}

static xd_result xdi_softmax_swap(const xd_vocab *vocab, xdi_softmax_exchange *x) {
    const void *parts;
    XDI_TRY(xdi_vocab_gather(vocab, x->mine, x->all, x->words, XD_DTYPE_F64, &parts));
    x->parts = (const double *)parts;
    return XD_OK;
}

static void xdi_softmax_close(xd_ctx *ctx, xdi_softmax_exchange *x) {
    xd_release(ctx, x->mine);
    xd_release(ctx, x->all);
}

static double xdi_softmax_tau(double temperature) {
    return temperature == 0.0 ? 1.0 : temperature;
}

static void xdi_softmax_part(const xd_vocab_info *info, const xd_rows *logits, int64_t r, double tau,
                             double *part) {
    const int64_t columns = info->end - info->begin;
    int64_t arg;
    part[XDI_SOFTMAX_MAX] = xdi_loss_row_max(logits, r, columns, &arg);
    part[XDI_SOFTMAX_ARG] = arg < 0 ? -1.0 : (double)(arg + info->begin);
    part[XDI_SOFTMAX_SUM] = 0.0;
    for (int64_t c = 0; c < columns && part[XDI_SOFTMAX_MAX] > -INFINITY; c++)
        part[XDI_SOFTMAX_SUM] += exp((xdi_loss_load(logits, r, c) - part[XDI_SOFTMAX_MAX]) / tau);
}

/* Joins a row's partials in rank order. The result's sum is relative to its max; NaN spreads. */
static void xdi_softmax_join(const xdi_softmax_exchange *x, int ranks, int64_t row, double tau,
                             double *whole) {
    whole[XDI_SOFTMAX_MAX] = -INFINITY;
    whole[XDI_SOFTMAX_ARG] = -1.0;
    whole[XDI_SOFTMAX_SUM] = 0.0;
    for (int i = 0; i < ranks; i++) {
        const double *part = x->parts + i * x->words + row * XDI_SOFTMAX_WORDS;
        const bool first = whole[XDI_SOFTMAX_ARG] < 0.0 && part[XDI_SOFTMAX_ARG] >= 0.0;
        if (!first && !(part[XDI_SOFTMAX_MAX] > whole[XDI_SOFTMAX_MAX])) continue;
        whole[XDI_SOFTMAX_MAX] = part[XDI_SOFTMAX_MAX];
        whole[XDI_SOFTMAX_ARG] = part[XDI_SOFTMAX_ARG];
    }
    for (int i = 0; i < ranks; i++) {
        const double *part = x->parts + i * x->words + row * XDI_SOFTMAX_WORDS;
        if (isnan(part[XDI_SOFTMAX_MAX])) whole[XDI_SOFTMAX_SUM] = NAN;
        if (part[XDI_SOFTMAX_MAX] > -INFINITY)
            whole[XDI_SOFTMAX_SUM] +=
                part[XDI_SOFTMAX_SUM] * exp((part[XDI_SOFTMAX_MAX] - whole[XDI_SOFTMAX_MAX]) / tau);
    }
}

XD_API xd_result xd_row_stats(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                              double *log_sum_exp, int64_t *argmax) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const double tau = xdi_softmax_tau(temperature);
    xdi_softmax_exchange x;
    xd_result result = xdi_softmax_open(ctx, vocab, &logits, temperature, XDI_SOFTMAX_WORDS, &x);
    if (result == XD_OK) {
        for (int64_t r = 0; r < logits.rows; r++)
            xdi_softmax_part(&info, &logits, r, tau, x.mine + r * XDI_SOFTMAX_WORDS);
        result = xdi_softmax_swap(vocab, &x);
    }
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++) {
        double whole[XDI_SOFTMAX_WORDS];
        xdi_softmax_join(&x, info.ranks, r, tau, whole);
        if (log_sum_exp) log_sum_exp[r] = whole[XDI_SOFTMAX_MAX] / tau + log(whole[XDI_SOFTMAX_SUM]);
        if (argmax) argmax[r] = (int64_t)whole[XDI_SOFTMAX_ARG];
    }
    xdi_softmax_close(ctx, &x);
    return result;
}

/* log_sum_exp of every row in memory of the context, agreed. */
static xd_result xdi_softmax_lse(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits,
                                 double temperature, const xd_rows *other, const char *name, double **lse) {
    const size_t rows = logits->rows > 0 ? (size_t)logits->rows : 1;
    xd_result result = other ? xdi_vocab_check_rows(ctx, vocab, name, other, logits->rows) : XD_OK;
    *lse = result == XD_OK ? (double *)xd_allocate(ctx, rows * sizeof **lse) : NULL;
    if (result == XD_OK && !*lse) result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu rows", rows);
    result = xdi_vocab_agree(xd_vocab_describe(vocab).tp, NULL, result);
    if (result == XD_OK) result = xd_row_stats(ctx, vocab, *logits, temperature, *lse, NULL);
    if (result == XD_OK) return XD_OK;
    xd_release(ctx, *lse);
    *lse = NULL;
    return result;
}

XD_API xd_result xd_log_softmax(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                xd_rows out) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const double tau = xdi_softmax_tau(temperature);
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &out, "out", &lse));
    for (int64_t r = 0; r < logits.rows; r++)
        for (int64_t c = 0; c < info.end - info.begin; c++)
            xdi_loss_store(&out, r, c, xdi_loss_load(&logits, r, c) / tau - lse[r]);
    xd_release(ctx, lse);
    return XD_OK;
}

XD_API xd_result xd_log_softmax_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                         double temperature, xd_rows weight, xd_rows gradient) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;
    const double tau = xdi_softmax_tau(temperature);
    xdi_softmax_exchange x;
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &gradient, "gradient", &lse));
    xd_result result = xdi_softmax_open(ctx, vocab, &weight, temperature, 1, &x);
    for (int64_t r = 0; r < weight.rows && result == XD_OK; r++) {
        x.mine[r] = 0.0;
        for (int64_t c = 0; c < columns; c++) x.mine[r] += xdi_loss_load(&weight, r, c);
    }
    if (result == XD_OK) result = xdi_softmax_swap(vocab, &x);
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++) {
        double sum = 0.0;
        for (int i = 0; i < info.ranks; i++) sum += x.parts[i * x.words + r];
        for (int64_t c = 0; c < columns; c++) {
            const double p = exp(xdi_loss_load(&logits, r, c) / tau - lse[r]);
            xdi_loss_store(&gradient, r, c, (xdi_loss_load(&weight, r, c) - p * sum) / tau);
        }
        for (int64_t c = columns; c < gradient.cols; c++) xdi_loss_store(&gradient, r, c, 0.0);
    }
    xdi_softmax_close(ctx, &x);
    xd_release(ctx, lse);
    return result;
}

/* values[r, j] of this shard's ids, 0 elsewhere, then each taken from the rank that owns it. */
static void xdi_softmax_pick(const xd_vocab_info *info, const xd_rows *logits, const int64_t *ids, int64_t n,
                             int64_t stride, double *mine) {
    for (int64_t r = 0; r < logits->rows; r++)
        for (int64_t j = 0; j < n; j++) {
            const int64_t id = ids[r * stride + j];
            const bool owned = id >= info->begin && id < info->end;
            mine[r * n + j] = owned ? xdi_loss_load(logits, r, id - info->begin) : 0.0;
        }
}

static int xdi_softmax_owner(const xd_vocab_info *info, int64_t id) {
    int owner = 0;
    if (id < 0 || id >= info->size) return -1;
    while (id >= info->offsets[owner + 1]) owner++;
    return owner;
}

XD_API xd_result xd_gather_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, const int64_t *ids,
                                   int64_t n, int64_t ids_stride, double *values) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    xdi_softmax_exchange x;
    XDI_REQUIRE(ctx, n >= 0 && (ids_stride == 0 || ids_stride >= n), XD_ERROR_ARGUMENT,
                "%lld ids a row with stride %lld", (long long)n, (long long)ids_stride);
    for (int64_t j = 0; j < n && ids_stride == 0; j++)
        XDI_REQUIRE(ctx, xdi_softmax_owner(&info, ids[j]) >= 0, XD_ERROR_ARGUMENT,
                    "column %lld is outside the vocabulary of %lld", (long long)ids[j], (long long)info.size);
    xd_result result = xdi_softmax_open(ctx, vocab, &logits, 0.0, n, &x);
    if (result == XD_OK) {
        xdi_softmax_pick(&info, &logits, ids, n, ids_stride, x.mine);
        result = xdi_softmax_swap(vocab, &x);
    }
    for (int64_t i = 0; i < x.words && result == XD_OK; i++) {
        const int owner = xdi_softmax_owner(&info, ids[i / n * ids_stride + i % n]);
        values[i] = owner < 0 ? (double)NAN : x.parts[owner * x.words + i];
    }
    xdi_softmax_close(ctx, &x);
    return result;
}

XD_API xd_result xd_target_log_probs(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, double temperature,
                                     const int64_t *ids, double *log_probs) {
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, NULL, NULL, &lse));
    const xd_result result = xd_gather_columns(ctx, vocab, logits, ids, 1, 1, log_probs);
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++)
        log_probs[r] = log_probs[r] / xdi_softmax_tau(temperature) - lse[r];
    xd_release(ctx, lse);
    return result;
}

XD_API xd_result xd_target_log_probs_backward(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                                              double temperature, const int64_t *ids, const float *weight,
                                              xd_rows gradient) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const double tau = xdi_softmax_tau(temperature);
    double *lse;
    XDI_TRY(xdi_softmax_lse(ctx, vocab, &logits, temperature, &gradient, "gradient", &lse));
    for (int64_t r = 0; r < logits.rows; r++) {
        const bool counts = weight[r] != 0.0f && xdi_softmax_owner(&info, ids[r]) >= 0;
        const int64_t columns = counts ? info.end - info.begin : 0;
        for (int64_t c = 0; c < columns; c++) {
            const double p = exp(xdi_loss_load(&logits, r, c) / tau - lse[r]);
            xdi_loss_store(&gradient, r, c,
                           ((c + info.begin == ids[r] ? 1.0 : 0.0) - p) * (double)weight[r] / tau);
        }
        for (int64_t c = columns; c < gradient.cols; c++) xdi_loss_store(&gradient, r, c, 0.0);
    }
    xd_release(ctx, lse);
    return XD_OK;
}

static xd_result xdi_softmax_check_positions(xd_ctx *ctx, const xd_positions *positions, int64_t rows) {
    XDI_REQUIRE(ctx, positions->labels, XD_ERROR_ARGUMENT, "positions have no labels");
    XDI_REQUIRE(ctx, positions->count == rows, XD_ERROR_SHAPE, "%lld positions but logits have %lld rows",
                (long long)positions->count, (long long)rows);
    return XD_OK;
}

XD_API xd_result xd_accuracy(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits,
                             const xd_positions *positions, xd_comm *comm, double *out) {
    const size_t rows = logits.rows > 0 ? (size_t)logits.rows : 1;
    xd_positions right = *positions; /* those where the argmax is the label */
    xd_denominator counted, hit;
    int64_t *argmax = NULL;
    xd_result result = xdi_softmax_check_positions(ctx, positions, logits.rows);
    if (result == XD_OK) argmax = (int64_t *)xd_allocate(ctx, rows * (sizeof *argmax + 1));
    if (result == XD_OK && !argmax) result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %zu rows", rows);
    result = xdi_vocab_agree(xd_vocab_describe(vocab).tp, comm, result);
    if (result == XD_OK) result = xd_row_stats(ctx, vocab, logits, 0.0, NULL, argmax);
    result = xdi_vocab_agree(NULL, comm, result);
    if (result == XD_OK) {
        uint8_t *mask = (uint8_t *)(argmax + rows);
        for (int64_t r = 0; r < logits.rows; r++)
            mask[r] = argmax[r] == positions->labels[r] && (!positions->mask || positions->mask[r]);
        right.mask = mask;
        result = xd_denominator_count(ctx, comm, positions, 1, &counted);
    }
    if (result == XD_OK) result = xd_denominator_count(ctx, comm, &right, 1, &hit);
    if (result == XD_OK) *out = counted.value > 0.0 ? hit.value / counted.value : 0.0;
    xd_release(ctx, argmax);
    return result;
}

/* >>distill/reduction.c */

#include <math.h>
#include <string.h>

/* One rank's contribution to a loss as int64 words, so that doubles and limbs travel together. */
enum {
    XDI_REDUCTION_HARD, /* a double's bits, or two limbs in INVARIANT mode */
    XDI_REDUCTION_SOFT = 2,
    XDI_REDUCTION_COUNTED = 4,
    XDI_REDUCTION_LABEL,
    XDI_REDUCTION_NOT_FINITE,
    XDI_REDUCTION_OVERFLOW,
    XDI_REDUCTION_FIRST_ROW,
    XDI_REDUCTION_FIRST_VALUE,
    XDI_REDUCTION_WORDS
};

static bool xdi_reduction_invariant(xd_ctx *ctx) {
    return xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
}

static int xdi_reduction_ranks(const xdi_reduction *in) {
    return in->comm ? xd_comm_size(in->comm) : 1;
}

XD_PRIVATE xd_result xdi_reduction_check(xd_ctx *ctx, const xdi_reduction *in) {
    XDI_REQUIRE(ctx, isfinite(in->hard_weight) && isfinite(in->soft_weight), XD_ERROR_ARGUMENT,
                "loss weights %g and %g must be finite", in->hard_weight, in->soft_weight);
    XDI_REQUIRE(ctx, isfinite(in->denominator_value) && in->denominator_value >= 0.0, XD_ERROR_ARGUMENT,
                "denominator %g must be finite and not negative", in->denominator_value);
    XDI_REQUIRE(ctx, !in->scale || isfinite(*in->scale), XD_ERROR_ARGUMENT, "scale %g must be finite",
                *in->scale);
    for (int64_t r = 0; in->row_weight && r < in->rows; r++)
        XDI_REQUIRE(ctx, isfinite((double)in->row_weight[r]), XD_ERROR_ARGUMENT,
                    "weight %g of row %lld must be finite", (double)in->row_weight[r], (long long)r);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_reduction_scales(xd_ctx *ctx, const xdi_reduction *in, double *row_scale,
                                          double *factor) {
    double inverse = 0.0;
    if (in->denominator) {
        inverse = in->denominator->inverse;
    } else if (in->denominator_value > 0.0) {
        inverse = 1.0 / in->denominator_value;
    } else {
        xd_positions batch;
        xd_denominator counted;
        batch.count = in->rows;
        batch.labels = in->labels;
        batch.ignore_index = in->ignore_index;
        batch.mask = in->mask;
        batch.weights = NULL;
        XDI_TRY(xd_denominator_count(ctx, in->comm, &batch, 1, &counted));
        inverse = counted.inverse;
    }
    *factor = (in->scale ? *in->scale : 1.0) * inverse;
    for (int64_t r = 0; r < in->rows; r++) {
        const bool counts = xdi_denominator_counts(in->labels, in->ignore_index, in->mask, r);
        row_scale[r] = counts ? (in->row_weight ? (double)in->row_weight[r] : 1.0) * *factor : 0.0;
    }
    return XD_OK;
}

XD_PRIVATE int64_t xdi_reduction_words(const xdi_reduction *in) {
    return (int64_t)XDI_REDUCTION_WORDS * (xdi_reduction_ranks(in) + 1) + xdi_reduction_ranks(in);
}

static void xdi_reduction_put(int64_t *word, double value) {
    memcpy(word, &value, sizeof value);
}

static double xdi_reduction_get(const int64_t *word) {
    double value;
    memcpy(&value, word, sizeof value);
    return value;
}

static void xdi_reduction_find(int64_t *mine, int64_t row, xdi_row_value value) {
    const int which = value.finding == (int)XD_ROW_LABEL      ? XDI_REDUCTION_LABEL
                      : value.finding == (int)XD_ROW_OVERFLOW ? XDI_REDUCTION_OVERFLOW
                                                              : XDI_REDUCTION_NOT_FINITE;
    if (mine[XDI_REDUCTION_LABEL] + mine[XDI_REDUCTION_NOT_FINITE] + mine[XDI_REDUCTION_OVERFLOW] == 0) {
        mine[XDI_REDUCTION_FIRST_ROW] = row;
        xdi_reduction_put(mine + XDI_REDUCTION_FIRST_VALUE, value.value);
    }
    mine[which]++;
}

/* This rank's rows: weighted sums, findings, how many count. */
static void xdi_reduction_sum(const xdi_reduction *in, const double *row_scale, xdi_row_reader read,
                              const void *rows, bool invariant, int64_t *mine) {
    double hard = 0.0, soft = 0.0;
    xd_fixed fixed_hard = { 0, 0 }, fixed_soft = { 0, 0 };
    memset(mine, 0, XDI_REDUCTION_WORDS * sizeof *mine);
    for (int64_t r = 0; r < in->rows; r++) {
        const double weight = in->row_weight ? (double)in->row_weight[r] : 1.0;
        if (xdi_denominator_counts(in->labels, in->ignore_index, in->mask, r)) mine[XDI_REDUCTION_COUNTED]++;
        if (row_scale[r] == 0.0) continue;
        xdi_row_value value = read(rows, r);
        if (value.finding != (int)XD_ROW_FINE) {
            xdi_reduction_find(mine, r, value);
            continue;
        }
        hard += weight * value.hard;
        soft += weight * value.soft;
        if (!invariant) continue;
        value.finding = (int)XD_ROW_OVERFLOW;
        if (!xd_fixed_add(&fixed_hard, weight * value.hard) ||
            !xd_fixed_add(&fixed_soft, weight * value.soft))
            xdi_reduction_find(mine, r, value);
    }
    if (invariant) {
        memcpy(mine + XDI_REDUCTION_HARD, &fixed_hard, sizeof fixed_hard);
        memcpy(mine + XDI_REDUCTION_SOFT, &fixed_soft, sizeof fixed_soft);
    } else {
        xdi_reduction_put(mine + XDI_REDUCTION_HARD, hard);
        xdi_reduction_put(mine + XDI_REDUCTION_SOFT, soft);
    }
}

/* Sum of one loss over the ranks' records, in rank order or as limbs. */
static double xdi_reduction_total(const int64_t *all, int ranks, int which, bool invariant) {
    double sum = 0.0;
    xd_fixed fixed = { 0, 0 };
    for (int i = 0; i < ranks; i++) {
        const int64_t *word = all + i * XDI_REDUCTION_WORDS + which;
        if (invariant) {
            fixed.high += word[0];
            fixed.low += word[1];
        } else {
            sum += xdi_reduction_get(word);
        }
    }
    return invariant ? xd_fixed_value(fixed) : sum;
}

static int64_t xdi_reduction_count(const int64_t *all, int ranks, int which) {
    int64_t sum = 0;
    for (int i = 0; i < ranks; i++) sum += all[i * XDI_REDUCTION_WORDS + which];
    return sum;
}

/* Adds the findings of all ranks; the first one is that of the lowest rank. */
static void xdi_reduction_status(const int64_t *all, int ranks, bool nothing, xd_status *status) {
    const int64_t label = xdi_reduction_count(all, ranks, XDI_REDUCTION_LABEL);
    const int64_t not_finite = xdi_reduction_count(all, ranks, XDI_REDUCTION_NOT_FINITE);
    const int64_t overflow = xdi_reduction_count(all, ranks, XDI_REDUCTION_OVERFLOW);
    const bool clean = status->label_out_of_range + status->not_finite + status->overflow == 0;
    for (int i = 0; i < ranks && clean; i++) {
        const int64_t *part = all + i * XDI_REDUCTION_WORDS;
        if (part[XDI_REDUCTION_LABEL] + part[XDI_REDUCTION_NOT_FINITE] + part[XDI_REDUCTION_OVERFLOW] == 0)
            continue;
        status->first_row = part[XDI_REDUCTION_FIRST_ROW];
        status->first_value = xdi_reduction_get(part + XDI_REDUCTION_FIRST_VALUE);
        break;
    }
    status->label_out_of_range += label;
    status->not_finite += not_finite;
    status->overflow += overflow;
    if (nothing) status->nothing_counted++;
}

XD_PRIVATE xd_result xdi_reduction_finish(xd_ctx *ctx, const xdi_reduction *in, const double *row_scale,
                                          double factor, xdi_row_reader read, const void *rows,
                                          int64_t *words, xd_loss_values *out) {
    const int ranks = xdi_reduction_ranks(in);
    const bool invariant = xdi_reduction_invariant(ctx);
    int64_t *mine = words, *counts = words + XDI_REDUCTION_WORDS, *all = counts + ranks;
    xd_status found;
    memset(&found, 0, sizeof found);
    xdi_reduction_sum(in, row_scale, read, rows, invariant, mine);
    if (ranks > 1) {
        for (int i = 0; i < ranks; i++) counts[i] = (int64_t)XDI_REDUCTION_WORDS;
        XDI_TRY(xd_all_gather(in->comm, mine, all, counts, XD_DTYPE_I64));
    } else {
        all = mine;
    }
    out->hard = xdi_reduction_total(all, ranks, XDI_REDUCTION_HARD, invariant) * factor;
    out->soft = xdi_reduction_total(all, ranks, XDI_REDUCTION_SOFT, invariant) * factor;
    out->loss = in->hard_weight * out->hard + in->soft_weight * out->soft;
    out->counted = xdi_reduction_count(all, ranks, XDI_REDUCTION_COUNTED);
    const bool nothing =
        in->denominator ? in->denominator->inverse == 0.0 : out->counted == 0 && in->denominator_value == 0.0;
    xdi_reduction_status(all, ranks, nothing, in->status ? in->status : &found);
    return in->status ? XD_OK : xd_status_check(ctx, &found);
}

/* >>distill/loss.c */

#include <math.h>
#include <string.h>

/* Where everything of one call lies in the workspace. */
typedef struct xdi_loss_plan {
    xd_loss_desc d;
    xdi_reduction reduction;
    xd_loss_kernels kernels;
    xd_loss_args args;
    double *row_scale;
    double *all_partials; /* other shards' references and sums */
    void *all_mixtures;
    int64_t *words;
} xdi_loss_plan;

static xd_loss_desc xdi_loss_defaults(const xd_loss_desc *desc) {
    xd_loss_desc d = *desc;
    if (d.hard_weight == 0.0 && d.soft_weight == 0.0) {
        d.hard_weight = d.labels ? 1.0 : 0.0;
        d.soft_weight = d.teacher.data ? 1.0 : 0.0;
    }
    if (d.soft_weight == 0.0) memset(&d.teacher, 0, sizeof d.teacher);
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (d.beta == 0.0) d.beta = 0.5;
    if (d.divergence == XD_JSD && d.beta == 1.0) d.divergence = XD_KL_REVERSE;
    if (d.temperature_factor == XD_TEMPERATURE_FACTOR_DEFAULT)
        d.temperature_factor = d.divergence == XD_KL_FORWARD || d.divergence == XD_KL_REVERSE
                                   ? XD_TEMPERATURE_FACTOR_SQUARED
                                   : XD_TEMPERATURE_FACTOR_ONE;
    return d;
}

static xdi_reduction xdi_loss_reduction(const xd_loss_desc *d) {
    xdi_reduction in;
    in.rows = d->student.rows;
    in.labels = d->labels;
    in.ignore_index = d->ignore_index;
    in.mask = d->mask;
    in.row_weight = d->row_weight;
    in.scale = d->scale;
    in.denominator = d->denominator;
    in.denominator_value = d->denominator_value;
    in.comm = d->comm;
    in.status = d->status;
    in.hard_weight = d->hard_weight;
    in.soft_weight = d->soft_weight;
    if (d->temperature_factor == XD_TEMPERATURE_FACTOR_SQUARED)
        in.soft_weight *= d->temperature * d->temperature;
    return in;
}

static xd_result xdi_loss_validate_rows(xd_ctx *ctx, const xd_loss_desc *d) {
    XDI_TRY(xdi_vocab_check_rows(ctx, d->vocab, "student", &d->student, -1));
    if (d->teacher.data)
        XDI_TRY(xdi_vocab_check_rows(ctx, d->vocab, "teacher", &d->teacher, d->student.rows));
    return d->gradient.data ? xdi_vocab_check_gradient(ctx, d->vocab, &d->student, &d->gradient) : XD_OK;
}

static xd_result xdi_loss_validate(xd_ctx *ctx, const xd_loss_desc *d, const xdi_reduction *in) {
    XDI_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary");
    XDI_REQUIRE(ctx, d->labels || d->teacher.data, XD_ERROR_ARGUMENT,
                "the loss has neither labels nor a teacher");
    XDI_REQUIRE(ctx, d->labels || d->hard_weight == 0.0, XD_ERROR_ARGUMENT,
                "hard_weight is %g without labels", d->hard_weight);
    XDI_REQUIRE(ctx, d->teacher.data || d->soft_weight == 0.0 || d->student.rows == 0, XD_ERROR_ARGUMENT,
                "soft_weight is %g without a teacher", d->soft_weight);
    XDI_REQUIRE(ctx, d->temperature > 0.0 && isfinite(d->temperature), XD_ERROR_ARGUMENT,
                "temperature %g must be positive and finite", d->temperature);
    XDI_REQUIRE(ctx, d->beta > 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]",
                d->beta);
    XDI_REQUIRE(ctx, d->label_smoothing >= 0.0 && d->label_smoothing <= 1.0, XD_ERROR_ARGUMENT,
                "label smoothing %g is outside [0, 1]", d->label_smoothing);
    const int64_t size = xd_vocab_describe(d->vocab).size;
    XDI_REQUIRE(ctx, size > 1 || d->label_smoothing == 0.0 || d->smoothing == XD_SMOOTHING_TORCH,
                XD_ERROR_ARGUMENT, "Megatron smoothing needs 2 classes, the vocabulary has %lld",
                (long long)size);
    XDI_REQUIRE(ctx, (int)d->divergence >= 0 && (int)d->divergence <= (int)XD_SOFT_CE, XD_ERROR_UNSUPPORTED,
                "divergence %d is not available over the whole vocabulary", (int)d->divergence);
    XDI_TRY(xdi_loss_validate_rows(ctx, d));
    return xdi_reduction_check(ctx, in);
}

static void xdi_loss_smoothing(const xd_loss_desc *d, xd_loss_args *a) {
    const double size = (double)a->offsets[a->shards];
    const double mass = d->smoothing == XD_SMOOTHING_MEGATRON && d->label_smoothing > 0.0
                            ? d->label_smoothing * size / (size - 1.0)
                            : d->label_smoothing;
    a->target_weight = 1.0 - mass;
    a->uniform_weight = mass / size;
}

static void xdi_loss_fill_args(xd_ctx *ctx, xdi_loss_plan *plan) {
    const xd_loss_desc *d = &plan->d;
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    xd_loss_args *a = &plan->args;
    memset(a, 0, sizeof *a);
    a->student = d->student;
    a->teacher = d->teacher;
    a->labels = d->labels;
    a->offsets = info.offsets;
    a->shard = info.rank;
    a->shards = info.ranks;
    a->temperature = d->temperature;
    a->divergence = d->divergence;
    a->beta = d->beta;
    a->hard_weight = d->hard_weight;
    a->soft_weight = plan->reduction.soft_weight;
    a->gradient = d->gradient;
    a->fixed = ctx && xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    xdi_loss_smoothing(d, a);
}

/* Takes every block from the arena; with a planning arena this is the size query. False when it does not fit.
 * A row's partials are references and sums; the latter are doubles, or pairs of integers, so there is room
 * for the wider. */
static bool xdi_loss_layout(xdi_loss_plan *plan, xd_arena *arena) {
    const size_t rows = (size_t)plan->d.student.rows, ranks = (size_t)plan->args.shards;
    const size_t gathered = ranks > 1 ? ranks * rows : 0; /* one rank reads its own partials */
    const bool jsd = plan->d.teacher.data && plan->d.divergence == XD_JSD;
    const size_t partials = XD_LOSS_REFERENCES * sizeof(double) + XD_LOSS_SUMS * sizeof(xd_fixed);
    const size_t mixtures = jsd ? XD_LOSS_MIXTURES * sizeof(xd_fixed) : 0;
    const size_t words = (size_t)xdi_reduction_words(&plan->reduction) * sizeof(int64_t);
    const size_t sizes[7] = { rows * sizeof(double),
                              rows * partials,
                              rows * mixtures,
                              rows * sizeof(xd_loss_row),
                              gathered * partials,
                              gathered * mixtures,
                              words };
    size_t at[7];
    for (int i = 0; i < 7; i++)
        if (!xd_arena_take(arena, sizes[i], &at[i])) return false;
    if (!arena->base) return true;
    plan->row_scale = (double *)(void *)(arena->base + at[0]);
    plan->args.row_scale = plan->row_scale;
    plan->args.references = (double *)(void *)(arena->base + at[1]);
    plan->args.sums = plan->args.references + rows * XD_LOSS_REFERENCES;
    plan->args.mixtures = arena->base + at[2];
    plan->args.row = (xd_loss_row *)(void *)(arena->base + at[3]);
    plan->all_partials = (double *)(void *)(arena->base + at[4]);
    plan->all_mixtures = arena->base + at[5];
    plan->words = (int64_t *)(void *)(arena->base + at[6]);
    return true;
}

/* One exchange: each shard's own references and, behind them, its sums. */
static xd_result xdi_loss_gather(xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t rows = plan->d.student.rows, words = rows * (XD_LOSS_REFERENCES + XD_LOSS_SUMS);
    const void *all;
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, a->references, plan->all_partials, words, XD_DTYPE_F64, &all));
    a->all_references = (const double *)all;
    a->all_sums = (const double *)all + rows * XD_LOSS_REFERENCES;
    a->reference_stride = words;
    a->sums_stride = words;
    return XD_OK;
}

/* Two exchanges, so that sums are taken relative to the references of the whole row: the same terms on every
 * mesh. */
static xd_result xdi_loss_gather_fixed(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t rows = plan->d.student.rows, shards = a->shards;
    const void *all;
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, a->references, plan->all_partials, rows * XD_LOSS_REFERENCES,
                             XD_DTYPE_F64, &all));
    a->all_references = (const double *)all;
    a->reference_stride = rows * XD_LOSS_REFERENCES;
    a->sums_stride = rows * XD_LOSS_SUMS;
    XDI_TRY(plan->kernels.merge_references(launch, a));
    XDI_TRY(plan->kernels.stats(launch, a));
    return xdi_vocab_gather(plan->d.vocab, a->sums, plan->all_partials + shards * a->reference_stride,
                            rows * XD_LOSS_SUMS * 2, XD_DTYPE_I64, &a->all_sums);
}

static xd_result xdi_loss_mixture(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    const int64_t words = plan->d.student.rows * XD_LOSS_MIXTURES * (a->fixed ? 2 : 1);
    XDI_TRY(plan->kernels.mixture(launch, a));
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, a->mixtures, plan->all_mixtures, words,
                             a->fixed ? XD_DTYPE_I64 : XD_DTYPE_F64, &a->all_mixtures));
    return plan->kernels.mixture_combine(launch, a);
}

/* Logits to the scalars of every row. */
static xd_result xdi_loss_partials(const xd_launch *launch, xdi_loss_plan *plan) {
    xd_loss_args *a = &plan->args;
    XDI_TRY(plan->kernels.references(launch, a));
    if (a->fixed) {
        XDI_TRY(xdi_loss_gather_fixed(launch, plan));
    } else {
        XDI_TRY(plan->kernels.stats(launch, a));
        XDI_TRY(xdi_loss_gather(plan));
    }
    XDI_TRY(plan->kernels.combine(launch, a));
    return a->teacher.data && a->divergence == XD_JSD ? xdi_loss_mixture(launch, plan) : XD_OK;
}

/* What the reduction reads of a row. */
static xdi_row_value xdi_loss_read_row(const void *args, int64_t r) {
    const xd_loss_args *a = (const xd_loss_args *)args;
    xdi_row_value value;
    value.hard = a->row[r].hard;
    value.soft = a->row[r].soft;
    value.finding = a->row[r].finding;
    value.value = value.finding == (int)XD_ROW_LABEL ? (double)a->labels[r] : a->row[r].max;
    return value;
}

static xd_result xdi_loss_run(xd_ctx *ctx, xdi_loss_plan *plan, xd_loss_values *out) {
    const xd_loss_desc *d = &plan->d;
    double factor;
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    XDI_TRY(xdi_reduction_scales(ctx, &plan->reduction, plan->row_scale, &factor));
    XDI_TRY(xdi_loss_partials(&launch, plan));
    if (d->gradient.data) XDI_TRY(plan->kernels.grad(&launch, &plan->args));
    for (int64_t r = 0; d->row_loss && r < d->student.rows; r++)
        d->row_loss[r] = (float)(plan->reduction.hard_weight * plan->args.row[r].hard +
                                 plan->reduction.soft_weight * plan->args.row[r].soft);
    return xdi_reduction_finish(ctx, &plan->reduction, plan->row_scale, factor, xdi_loss_read_row,
                                &plan->args, plan->words, out);
}

/* Everything up to the first exchange, on this rank alone: checks, defaults, workspace. */
static xd_result xdi_loss_prepare(xd_ctx *ctx, const xd_loss_desc *desc, xdi_loss_plan *plan, void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0), arena;
    void *memory = desc->workspace;
    size_t bytes = desc->workspace_bytes;
    plan->d = xdi_loss_defaults(desc);
    plan->reduction = xdi_loss_reduction(&plan->d);
    plan->kernels = xd_ctx_kernels(ctx).loss;
    XDI_TRY(xdi_loss_validate(ctx, &plan->d, &plan->reduction));
    xdi_loss_fill_args(ctx, plan);
    XDI_REQUIRE(ctx, xdi_loss_layout(plan, &planning), XD_ERROR_ARGUMENT,
                "the workspace would not fit into memory");
    if (!memory) {
        bytes = planning.peak;
        memory = *owned = xd_allocate(ctx, bytes);
        XDI_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", bytes);
    }
    arena = xd_arena_over(memory, bytes);
    XDI_REQUIRE(ctx, xdi_loss_layout(plan, &arena), XD_ERROR_ARGUMENT,
                "workspace has %zu bytes but the loss needs %zu", bytes, planning.peak);
    return XD_OK;
}

XD_API size_t xd_loss_workspace_bytes(const xd_loss_desc *desc) {
    xdi_loss_plan plan;
    xd_arena arena = xd_arena_over(NULL, 0);
    if (!desc->vocab || desc->student.rows < 0) return 0;
    plan.d = xdi_loss_defaults(desc);
    plan.reduction = xdi_loss_reduction(&plan.d);
    xdi_loss_fill_args(NULL, &plan);
    return xdi_loss_layout(&plan, &arena) ? arena.peak : 0;
}

XD_API xd_result xd_loss(xd_ctx *ctx, const xd_loss_desc *desc, xd_loss_values *out) {
    xdi_loss_plan plan;
    xd_loss_values values = { 0.0, 0.0, 0.0, 0 };
    void *owned = NULL;
    xd_result result = xdi_loss_prepare(ctx, desc, &plan, &owned);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->comm, result);
    if (result == XD_OK) result = xdi_loss_run(ctx, &plan, &values);
    if (result == XD_OK) *out = values;
    xd_release(ctx, owned);
    return result;
}

XD_API xd_result xd_cross_entropy_loss(xd_ctx *ctx, const xd_loss_desc *desc, float *loss) {
    xd_loss_desc d = *desc;
    xd_loss_values values;
    memset(&d.teacher, 0, sizeof d.teacher);
    d.soft_weight = 0.0;
    XDI_TRY(xd_loss(ctx, &d, &values));
    *loss = (float)values.loss;
    return XD_OK;
}

XD_API xd_result xd_kl_loss(xd_ctx *ctx, const xd_loss_desc *desc, float *loss) {
    xd_loss_desc d = *desc;
    xd_loss_values values;
    d.hard_weight = 0.0;
    if (d.soft_weight == 0.0) d.soft_weight = 1.0;
    XDI_TRY(xd_loss(ctx, &d, &values));
    *loss = (float)values.loss;
    return XD_OK;
}

/* >>distill/topk.c */

#include <math.h>
#include <string.h>

/* This shard's candidates, and all shards': per row k values, then k ids as doubles (exact below 2^53). */
typedef struct xdi_topk_candidates {
    double *values, *packed, *all;
    int64_t *ids;
} xdi_topk_candidates;

static void xdi_topk_release(xd_ctx *ctx, xdi_topk_candidates *c) {
    xd_release(ctx, c->values);
    xd_release(ctx, c->packed);
    xd_release(ctx, c->all);
    xd_release(ctx, c->ids);
}

static xd_result xdi_topk_prepare(xd_ctx *ctx, const xd_vocab *vocab, const xd_rows *logits, int64_t k,
                                  xdi_topk_candidates *c) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    XDI_TRY(xdi_vocab_check_rows(ctx, vocab, "logits", logits, -1));
    XDI_REQUIRE(ctx, k >= 1 && k <= info.size, XD_ERROR_ARGUMENT,
                "k is %lld but the vocabulary has %lld columns", (long long)k, (long long)info.size);
    const size_t entries = (size_t)(logits->rows * k) + 1; /* never an empty block */
    c->values = (double *)xd_allocate(ctx, entries * sizeof(double));
    c->packed = (double *)xd_allocate(ctx, 2 * entries * sizeof(double));
    c->all = (double *)xd_allocate(ctx, 2 * entries * (size_t)info.ranks * sizeof(double));
    c->ids = (int64_t *)xd_allocate(ctx, entries * sizeof(int64_t));
    XDI_REQUIRE(ctx, c->values && c->packed && c->all && c->ids, XD_ERROR_MEMORY,
                "no room for %zu candidates", entries);
    return XD_OK;
}

static xd_result xdi_topk_local(xd_ctx *ctx, const xd_vocab_info *info, const xd_rows *logits, int64_t k,
                                xdi_topk_candidates *c) {
    const xd_loss_kernels kernels = xd_ctx_kernels(ctx).loss;
    xd_select_args args;
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    args.logits = *logits;
    args.k = k;
    args.first = info->begin;
    args.columns = info->end - info->begin;
    args.values = c->values;
    args.ids = c->ids;
    XDI_TRY(kernels.select(&launch, &args));
    for (int64_t i = 0; i < logits->rows * k; i++) {
        c->packed[2 * i] = c->values[i];
        c->packed[2 * i + 1] = (double)c->ids[i];
    }
    return XD_OK;
}

/* The k best of one row's candidates. Shards come in the order of their columns, so equals keep the lowest
 * id. */
static void xdi_topk_best(const double *all, int ranks, int64_t stride, int64_t k, double *values,
                          int64_t *ids) {
    int64_t n = 0;
    for (int i = 0; i < ranks; i++)
        for (int64_t j = 0; j < k; j++) {
            const double value = all[i * stride + 2 * j];
            const int64_t id = (int64_t)all[i * stride + 2 * j + 1];
            if (id >= 0 && (n < k || value > values[n - 1]))
                n = xdi_select_insert(values, ids, n, k, value, id);
        }
}

XD_API xd_result xd_vocab_topk(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, int64_t k, double *values,
                               int64_t *ids) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t words = logits.rows * k * 2;
    xdi_topk_candidates c;
    const void *all = NULL;
    memset(&c, 0, sizeof c);
    xd_result result = xdi_topk_prepare(ctx, vocab, &logits, k, &c);
    result = xdi_vocab_agree(info.tp, NULL, result);
    if (result == XD_OK) result = xdi_topk_local(ctx, &info, &logits, k, &c);
    if (result == XD_OK) result = xdi_vocab_gather(vocab, c.packed, c.all, words, XD_DTYPE_F64, &all);
    for (int64_t r = 0; r < logits.rows && result == XD_OK; r++)
        xdi_topk_best((const double *)all + r * k * 2, info.ranks, words, k, values + r * k, ids + r * k);
    xdi_topk_release(ctx, &c);
    return result;
}

/* Largest logit of each of this shard's columns over the counted positions. */
static void xdi_topk_importance(const xd_rows *logits, const uint8_t *mask, int64_t columns,
                                float *importance) {
    for (int64_t c = 0; c < columns; c++) importance[c] = -INFINITY;
    for (int64_t r = 0; r < logits->rows; r++)
        for (int64_t c = 0; c < columns && (!mask || mask[r]); c++) {
            const float value = (float)xdi_loss_load(logits, r, c);
            if (value > importance[c]) importance[c] = value;
        }
}

static void xdi_topk_sort_ids(int64_t *ids, int64_t k) {
    for (int64_t gap = k / 2; gap > 0; gap /= 2)
        for (int64_t i = gap; i < k; i++) {
            const int64_t id = ids[i];
            int64_t at = i;
            for (; at >= gap && ids[at - gap] > id; at -= gap) ids[at] = ids[at - gap];
            ids[at] = id;
        }
}

XD_API xd_result xd_select_columns(xd_ctx *ctx, const xd_vocab *vocab, xd_rows logits, const uint8_t *mask,
                                   xd_comm *comm, int64_t k, int64_t *ids, float *importance) {
    const xd_vocab_info info = xd_vocab_describe(vocab);
    const int64_t columns = info.end - info.begin;
    float *mine = (float *)xd_allocate(ctx, ((size_t)columns + 1) * sizeof *mine);
    double *values = (double *)xd_allocate(ctx, (size_t)(k > 0 ? k : 1) * sizeof *values);
    xd_result result = xdi_vocab_check_rows(ctx, vocab, "logits", &logits, -1);
    xd_rows row;
    if (result == XD_OK && !(mine && values))
        result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld columns", (long long)columns);
    result = xdi_vocab_agree(info.tp, comm, result);
    if (result == XD_OK) {
        xdi_topk_importance(&logits, mask, columns, mine);
        if (comm && xd_comm_size(comm) > 1)
            result = xd_all_reduce(comm, mine, mine, columns, XD_DTYPE_F32, XD_MAX);
    }
    row.data = mine;
    row.dtype = XD_DTYPE_F32;
    row.rows = 1;
    row.cols = columns;
    row.stride = 0;
    if (result == XD_OK) result = xd_vocab_topk(ctx, vocab, row, k, values, ids);
    if (result == XD_OK) xdi_topk_sort_ids(ids, k);
    if (result == XD_OK && importance && columns > 0)
        memcpy(importance, mine, (size_t)columns * sizeof *mine);
    xd_release(ctx, mine);
    xd_release(ctx, values);
    return result;
}

/* >>distill/topk_kl.c */

#include <math.h>
#include <string.h>

/* One call: defaults, and where everything lies. A side (student, or teacher logits) sends sums, then
 * values. */
typedef struct xdi_topk_kl_plan {
    xd_topk_desc d;
    xdi_reduction reduction;
    xd_loss_kernels kernels;
    xd_topk_args student, teacher;
    int64_t side_words; /* 8-byte words of one side */
    int64_t *send, *all;
    double *row_scale;
    double *teacher_values;
    int64_t *ids; /* absent entries are -1, wrong ones the vocabulary's size */
    int64_t *words;
} xdi_topk_kl_plan;

static xd_topk_desc xdi_topk_kl_defaults(const xd_topk_desc *desc) {
    xd_topk_desc d = *desc;
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (d.values_temperature == 0.0) d.values_temperature = 1.0;
    if (d.beta == 0.0) d.beta = 0.5;
    return d;
}

static xdi_reduction xdi_topk_kl_reduction(const xd_topk_desc *d) {
    const bool squared = d->temperature_factor == XD_TEMPERATURE_FACTOR_SQUARED;
    xdi_reduction in;
    in.rows = d->student.rows;
    in.labels = d->labels;
    in.ignore_index = d->ignore_index;
    in.mask = d->mask;
    in.row_weight = d->row_weight;
    in.scale = d->scale;
    in.denominator = d->denominator;
    in.denominator_value = d->denominator_value;
    in.comm = d->comm;
    in.status = d->status;
    in.hard_weight = 0.0;
    in.soft_weight = squared ? d->temperature * d->temperature : 1.0;
    return in;
}

static xd_result xdi_topk_kl_validate_teacher(xd_ctx *ctx, const xd_topk_desc *d) {
    const bool whole = d->mode == XD_TOPK_TAIL || d->mode == XD_TOPK_TRUNCATE;
    XDI_REQUIRE(ctx, (d->values != NULL) != (d->teacher.data != NULL), XD_ERROR_ARGUMENT,
                "give either the teacher's values at the ids or its logits");
    if (d->teacher.data) return xdi_vocab_check_rows(ctx, d->vocab, "teacher", &d->teacher, d->student.rows);
    XDI_REQUIRE(ctx, d->ids, XD_ERROR_ARGUMENT, "the teacher's values have no ids");
    if (d->values_kind == XD_TOPK_LOG_PROBS)
        XDI_REQUIRE(ctx, d->values_temperature == d->temperature, XD_ERROR_ARGUMENT,
                    "the teacher's log-probabilities are at temperature %g but the loss is at %g",
                    d->values_temperature, d->temperature);
    else
        XDI_REQUIRE(ctx, !whole || d->log_normaliser, XD_ERROR_ARGUMENT,
                    "teacher logits need log_normaliser in this mode");
    return XD_OK;
}

static xd_result xdi_topk_kl_validate(xd_ctx *ctx, const xd_topk_desc *d, const xdi_reduction *in) {
    XDI_REQUIRE(ctx, d->vocab, XD_ERROR_ARGUMENT, "the loss has no vocabulary");
    const int64_t size = xd_vocab_describe(d->vocab).size;
    XDI_REQUIRE(ctx, d->k >= 1 && d->k <= size, XD_ERROR_ARGUMENT,
                "k is %lld but the vocabulary has %lld columns", (long long)d->k, (long long)size);
    XDI_REQUIRE(ctx, d->temperature > 0.0 && isfinite(d->temperature), XD_ERROR_ARGUMENT,
                "temperature %g must be positive and finite", d->temperature);
    XDI_REQUIRE(ctx, d->beta > 0.0 && d->beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]",
                d->beta);
    XDI_REQUIRE(ctx, (int)d->mode >= 0 && (int)d->mode <= (int)XD_TOPK_ZERO_OUTSIDE, XD_ERROR_ARGUMENT,
                "top-k mode %d does not exist", (int)d->mode);
    const bool fits = d->divergence == XD_KL_FORWARD || d->divergence == XD_KL_REVERSE ||
                      d->divergence == XD_KL_MIXED ||
                      (d->divergence == XD_JSD && d->mode != XD_TOPK_ZERO_OUTSIDE);
    XDI_REQUIRE(ctx, fits, XD_ERROR_UNSUPPORTED, "divergence %d does not go with top-k mode %d",
                (int)d->divergence, (int)d->mode);
    XDI_TRY(xdi_vocab_check_rows(ctx, d->vocab, "student", &d->student, -1));
    XDI_TRY(xdi_topk_kl_validate_teacher(ctx, d));
    if (d->gradient.data) XDI_TRY(xdi_vocab_check_gradient(ctx, d->vocab, &d->student, &d->gradient));
    return xdi_reduction_check(ctx, in);
}

static void xdi_topk_kl_fill_args(xd_ctx *ctx, xdi_topk_kl_plan *plan) {
    const xd_topk_desc *d = &plan->d;
    const xd_vocab_info info = xd_vocab_describe(d->vocab);
    xd_topk_args *a = &plan->student;
    memset(a, 0, sizeof *a);
    a->logits = d->student;
    a->k = d->k;
    a->offsets = info.offsets;
    a->shard = info.rank;
    a->shards = info.ranks;
    a->temperature = d->temperature;
    a->fixed = xd_ctx_settings(ctx)->reduction == XD_REDUCTION_INVARIANT;
    a->outside = d->mode != XD_TOPK_RENORMALISE || d->student_mass || d->teacher_mass;
    a->mode = d->mode;
    a->divergence = d->divergence;
    a->beta = d->beta;
    a->weight = plan->reduction.soft_weight;
    a->gradient = d->gradient;
    a->teacher_temperature = d->teacher.data || d->values_kind == XD_TOPK_LOGITS ? d->temperature : 1.0;
    a->teacher_log = d->values_kind == XD_TOPK_LOGITS ? d->log_normaliser : NULL;
    plan->teacher = *a;
    plan->teacher.logits = d->teacher;
    plan->side_words = d->student.rows * (XD_TOPK_SUMS * (a->fixed ? 2 : 1) + d->k);
}

/* Takes every block from the arena; with a planning arena only sizes are counted. False when it does not
 * fit. */
static bool xdi_topk_kl_layout(xdi_topk_kl_plan *plan, xd_arena *arena) {
    const size_t word = sizeof(double), rows = (size_t)plan->d.student.rows, k = (size_t)plan->d.k;
    const size_t ranks = (size_t)plan->student.shards, sides = plan->d.teacher.data ? 2 : 1;
    const size_t sent = sides * (size_t)plan->side_words * word;
    const size_t sizes[12] = { rows * word,
                               sent,
                               ranks > 1 ? ranks * sent : 0,
                               rows * word,
                               rows * word,
                               rows * sizeof(xd_topk_side),
                               rows * sizeof(xd_topk_side),
                               rows * k * word,
                               rows * k * word,
                               rows * k * word,
                               k * word + 4 * (k + 1) * word,
                               rows * sizeof(xd_topk_row) +
                                   (size_t)xdi_reduction_words(&plan->reduction) * word };
    unsigned char *at[12];
    for (int i = 0; i < 12; i++) {
        size_t offset;
        if (!xd_arena_take(arena, sizes[i], &offset)) return false;
        at[i] = arena->base ? arena->base + offset : NULL;
    }
    if (!arena->base) return true;
    const int64_t sums = plan->d.student.rows * XD_TOPK_SUMS * (plan->student.fixed ? 2 : 1);
    plan->row_scale = (double *)(void *)at[0];
    plan->send = (int64_t *)(void *)at[1];
    plan->all = (int64_t *)(void *)at[2];
    plan->student.maxima = (double *)(void *)at[3];
    plan->teacher.maxima = (double *)(void *)at[4];
    plan->student.side = (xd_topk_side *)(void *)at[5];
    plan->teacher.side = (xd_topk_side *)(void *)at[6];
    plan->ids = (int64_t *)(void *)at[7];
    plan->teacher_values = (double *)(void *)at[8];
    plan->student.slots = (double *)(void *)at[9];
    plan->student.order = (int64_t *)(void *)at[10];
    plan->student.scratch = (double *)(void *)(at[10] + k * word);
    plan->student.row = (xd_topk_row *)(void *)at[11];
    plan->words = (int64_t *)(void *)(at[11] + rows * sizeof(xd_topk_row));
    plan->student.sums = plan->send;
    plan->student.values = (double *)(void *)(plan->send + sums);
    plan->student.row_scale = plan->teacher.row_scale = plan->row_scale;
    plan->student.ids = plan->teacher.ids = plan->ids;
    plan->teacher.order = plan->student.order;
    if (!plan->d.teacher.data) return true;
    plan->teacher.sums = plan->send + plan->side_words;
    plan->teacher.values = (double *)(void *)(plan->send + plan->side_words + sums);
    return true;
}

/* The ids as the kernels want them, and the teacher's values widened. */
static void xdi_topk_kl_take_entries(xdi_topk_kl_plan *plan) {
    const xd_topk_desc *d = &plan->d;
    const int64_t size = plan->student.offsets[plan->student.shards];
    for (int64_t i = 0; i < d->student.rows * d->k; i++) {
        const bool absent = d->values && d->values[i] == -INFINITY;
        if (d->ids) plan->ids[i] = absent ? -1 : d->ids[i] < 0 || d->ids[i] > size ? size : d->ids[i];
        plan->teacher_values[i] = d->values ? (double)d->values[i] : 0.0;
    }
}

static xd_result xdi_topk_kl_side(const xd_launch *launch, const xdi_topk_kl_plan *plan,
                                  const xd_topk_args *a) {
    xd_comm *tp = xd_vocab_describe(plan->d.vocab).tp;
    XDI_TRY(plan->kernels.topk_maxima(launch, a));
    if (a->fixed && tp)
        XDI_TRY(xd_all_reduce(tp, a->maxima, a->maxima, a->logits.rows, XD_DTYPE_F64, XD_MAX));
    return plan->kernels.topk_stats(launch, a);
}

/* Both sides' statistics in one exchange, then the divergence of every row. */
static xd_result xdi_topk_kl_rows(const xd_launch *launch, xdi_topk_kl_plan *plan) {
    const bool two = plan->d.teacher.data != NULL;
    const int64_t words = plan->side_words * (two ? 2 : 1);
    const void *all;
    XDI_TRY(xdi_topk_kl_side(launch, plan, &plan->student));
    if (two) XDI_TRY(xdi_topk_kl_side(launch, plan, &plan->teacher));
    XDI_TRY(xdi_vocab_gather(plan->d.vocab, plan->send, plan->all, words, XD_DTYPE_I64, &all));
    plan->student.all = (const int64_t *)all;
    plan->student.all_stride = plan->teacher.all_stride = words;
    XDI_TRY(plan->kernels.topk_merge(launch, &plan->student));
    plan->student.teacher_values = plan->teacher_values;
    if (two) {
        plan->teacher.all = (const int64_t *)all + plan->side_words;
        XDI_TRY(plan->kernels.topk_merge(launch, &plan->teacher));
        plan->student.teacher_values = plan->teacher.values;
        plan->student.teacher_side = plan->teacher.side;
    }
    plan->student.log_probs = plan->d.student_log_probs;
    return plan->kernels.topk_divergence(launch, &plan->student);
}

static xdi_row_value xdi_topk_kl_read_row(const void *rows, int64_t r) {
    const xd_topk_row *row = (const xd_topk_row *)rows + r;
    xdi_row_value value;
    value.hard = 0.0;
    value.soft = row->loss;
    value.finding = row->finding;
    value.value = row->max;
    return value;
}

static xd_result xdi_topk_kl_run(xd_ctx *ctx, xdi_topk_kl_plan *plan, xd_loss_values *out) {
    const xd_topk_desc *d = &plan->d;
    double factor;
    xd_launch launch;
    memset(&launch, 0, sizeof launch);
    launch.ctx = ctx;
    XDI_TRY(xdi_reduction_scales(ctx, &plan->reduction, plan->row_scale, &factor));
    if (!d->ids) XDI_TRY(xd_vocab_topk(ctx, d->vocab, d->student, d->k, plan->student.slots, plan->ids));
    xdi_topk_kl_take_entries(plan);
    XDI_TRY(xdi_topk_kl_rows(&launch, plan));
    if (d->gradient.data) XDI_TRY(plan->kernels.topk_grad(&launch, &plan->student));
    for (int64_t r = 0; r < d->student.rows; r++) {
        const xd_topk_row *row = plan->student.row + r;
        if (d->row_loss) d->row_loss[r] = (float)(plan->reduction.soft_weight * row->loss);
        if (d->student_mass) d->student_mass[r] = (float)row->student_mass;
        if (d->teacher_mass) d->teacher_mass[r] = (float)row->teacher_mass;
    }
    return xdi_reduction_finish(ctx, &plan->reduction, plan->row_scale, factor, xdi_topk_kl_read_row,
                                plan->student.row, plan->words, out);
}

static xd_result xdi_topk_kl_prepare(xd_ctx *ctx, const xd_topk_desc *desc, xdi_topk_kl_plan *plan,
                                     void **owned) {
    xd_arena planning = xd_arena_over(NULL, 0), arena;
    memset(plan, 0, sizeof *plan);
    plan->d = xdi_topk_kl_defaults(desc);
    plan->reduction = xdi_topk_kl_reduction(&plan->d);
    plan->kernels = xd_ctx_kernels(ctx).loss;
    XDI_TRY(xdi_topk_kl_validate(ctx, &plan->d, &plan->reduction));
    xdi_topk_kl_fill_args(ctx, plan);
    XDI_REQUIRE(ctx, xdi_topk_kl_layout(plan, &planning), XD_ERROR_ARGUMENT,
                "the workspace would not fit into memory");
    *owned = xd_allocate(ctx, planning.peak);
    XDI_REQUIRE(ctx, *owned, XD_ERROR_MEMORY, "no room for a workspace of %zu bytes", planning.peak);
    arena = xd_arena_over(*owned, planning.peak);
    xdi_topk_kl_layout(plan, &arena);
    return XD_OK;
}

XD_API xd_result xd_topk_kl_loss(xd_ctx *ctx, const xd_topk_desc *desc, xd_loss_values *out) {
    xdi_topk_kl_plan plan;
    xd_loss_values values = { 0.0, 0.0, 0.0, 0 };
    void *owned = NULL;
    xd_result result = xdi_topk_kl_prepare(ctx, desc, &plan, &owned);
    result = xdi_vocab_agree(desc->vocab ? xd_vocab_describe(desc->vocab).tp : NULL, desc->comm, result);
    if (result == XD_OK) result = xdi_topk_kl_run(ctx, &plan, &values);
    if (result == XD_OK) *out = values;
    xd_release(ctx, owned);
    return result;
}

/* >>distill/compat.c */

#include <math.h>

static xd_result xdi_compat_validate(xd_ctx *ctx, const xd_rows *rows, const char *name,
                                     const xd_rows *like) {
    XDI_REQUIRE(ctx, rows->dtype == XD_DTYPE_F32 || rows->dtype == XD_DTYPE_BF16, XD_ERROR_DTYPE,
                "%s is %s; F32 or BF16 is needed", name, xd_dtype_name(rows->dtype));
    XDI_REQUIRE(ctx, rows->rows == like->rows && rows->cols == like->cols, XD_ERROR_SHAPE,
                "%s is [%lld, %lld] but the student is [%lld, %lld]", name, (long long)rows->rows,
                (long long)rows->cols, (long long)like->rows, (long long)like->cols);
    return XD_OK;
}

/* One entry: its part of the loss, and A = d loss / d ln student. */
static double xdi_compat_entry(double s, double t, double beta, double *slope) {
    const double p = exp(s), q = exp(t);
    double student, teacher;
    if (beta == 0.0) {
        *slope = -q;
        return q * (t - s);
    }
    if (beta == 1.0) {
        *slope = p * (s - t + 1.0);
        return p * (s - t);
    }
    xdi_loss_log_ratios(s, t, beta, &student, &teacher);
    *slope = (1.0 - beta) * p * student;
    return beta * q * teacher + (1.0 - beta) * p * student;
}

XD_API xd_result xd_compat_jsd_of_probabilities(xd_ctx *ctx, xd_rows student, xd_rows teacher, double beta,
                                                double denominator, xd_rows gradient, double *loss) {
    const double floor = 1e-8;
    double sum = 0.0;
    XDI_REQUIRE(ctx, beta >= 0.0 && beta <= 1.0, XD_ERROR_ARGUMENT, "beta %g is outside [0, 1]", beta);
    XDI_REQUIRE(ctx, denominator > 0.0, XD_ERROR_ARGUMENT, "denominator %g is not positive", denominator);
    XDI_TRY(xdi_compat_validate(ctx, &student, "student", &student));
    XDI_TRY(xdi_compat_validate(ctx, &teacher, "teacher", &student));
    if (gradient.data) XDI_TRY(xdi_compat_validate(ctx, &gradient, "gradient", &student));
    for (int64_t r = 0; r < student.rows; r++)
        for (int64_t c = 0; c < student.cols; c++) {
            const double u = xdi_loss_load(&student, r, c), v = xdi_loss_load(&teacher, r, c);
            double slope;
            sum += xdi_compat_entry(log(u > floor ? u : floor), log(v > floor ? v : floor), beta, &slope);
            if (gradient.data) xdi_loss_store(&gradient, r, c, u >= floor ? slope / u / denominator : 0.0);
        }
    *loss = sum / denominator;
    return XD_OK;
}

XD_API double xd_compat_jsd_denominator(xd_compat_reduction reduction, int64_t batch, int64_t counted,
                                        int64_t vocabulary, bool labels) {
    if (reduction == XD_COMPAT_SUM) return 1.0;
    if (reduction == XD_COMPAT_MEAN) return (double)counted * (double)vocabulary;
    const int64_t rows = labels ? counted : batch;
    return rows > 0 ? (double)rows : 1.0;
}

XD_API double xd_compat_modelopt_denominator(xd_compat_reduction reduction, int64_t rows,
                                             int64_t vocabulary) {
    if (reduction == XD_COMPAT_SUM) return 1.0;
    return reduction == XD_COMPAT_MEAN ? (double)rows * (double)vocabulary : (double)rows;
}

/* >>distill/canonical.c */

#include <string.h>

/* Markers that tokenizers use for a leading space and for a newline, as UTF-8. */
#define XDI_CANONICAL_SPACE "\xC4\xA0"   /* U+0120, of byte-level vocabularies */
#define XDI_CANONICAL_NEWLINE "\xC4\x8A" /* U+010A */
#define XDI_CANONICAL_TAB "\xC4\x89"     /* U+0109 */
#define XDI_CANONICAL_BLOCK "\xE2\x96\x81" /* U+2581, of SentencePiece */

/* Characters that the reference repairs when it meets the byte-level spelling of their UTF-8 bytes, in its
 * order. The first six are spelled with the raw second byte; what follows "Ã" can never match, because that
 * rule has replaced their first character. */
static const char *const xdi_canonical_latin[] = { "ñ", "á", "é", "í", "ó", "ú" };
static const char *const xdi_canonical_words[] = { "中", "文", "日本", "語", "Рус", "ский", "العربية", "ह",
                                                   "िं",
                                                   "दी", "∑", "∏", "∂", "∇", "∞", "√", "∫", "≈", "≠", "≤", "≥" };
/* Characters of three bytes whose first two and last byte may come as two tokens. */
static const char *const xdi_canonical_artifacts[] = { "∑", "∏", "∂", "∇", "∞", "√", "∫", "≠", "中", "文" };

#define XDI_CANONICAL_COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* ---- code points ---- */

static int xdi_canonical_put(char *out, uint32_t point) {
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    out[0] = (char)(0xC0 | (point >> 6)); /* every point here is below U+0800 */
    out[1] = (char)(0x80 | (point & 0x3F));
    return 2;
}

/* The code point at text[*at], which moves behind it. Vocabulary strings are UTF-8; a stray byte counts as
 * one. */
static uint32_t xdi_canonical_next(const char *text, int64_t size, int64_t *at) {
    const unsigned char *p = (const unsigned char *)text + *at;
    const int more = p[0] >= 0xF0 ? 3 : p[0] >= 0xE0 ? 2 : p[0] >= 0xC0 ? 1 : 0;
    if (more == 0 || *at + more >= size) {
        *at += 1;
        return p[0];
    }
    uint32_t point = (uint32_t)p[0] & (0x3Fu >> more);
    for (int i = 1; i <= more; i++) point = point << 6 | (p[i] & 0x3Fu);
    *at += more + 1;
    return point;
}

/* The character by which byte-level vocabularies write a byte. */
static uint32_t xdi_canonical_visible(unsigned char byte) {
    if (byte <= 0x20) return 0x100u + byte;
    if (byte == 0x7F) return 0x121u;
    if (byte >= 0x80 && byte <= 0xA0) return 0x122u + (byte - 0x80u);
    return byte == 0xAD ? 0x143u : byte;
}

/* Byte-level spelling of a string. */
static int64_t xdi_canonical_spell(const char *text, size_t size, char *out) {
    int64_t n = 0;
    for (size_t i = 0; i < size; i++) n += xdi_canonical_put(out + n, xdi_canonical_visible((unsigned char)text[i]));
    return n;
}

/* ---- one token ---- */

static bool xdi_canonical_is(const char *text, int64_t size, const char *other) {
    return size == (int64_t)strlen(other) && memcmp(text, other, (size_t)size) == 0;
}

static bool xdi_canonical_begins(const char *text, int64_t size, const char *other) {
    const int64_t n = (int64_t)strlen(other);
    return size >= n && memcmp(text, other, (size_t)n) == 0;
}

/* Replaces every occurrence, left to right; `to` is not longer than `from`. Returns the new size. */
static int64_t xdi_canonical_replace(char *text, int64_t size, const char *from, int64_t from_size,
                                     const char *to) {
    const size_t to_size = strlen(to);
    int64_t n = 0;
    for (int64_t i = 0; i < size;) {
        if (i + from_size <= size && memcmp(text + i, from, (size_t)from_size) == 0) {
            memcpy(text + n, to, to_size);
            n += (int64_t)to_size;
            i += from_size;
        } else {
            text[n++] = text[i++];
        }
    }
    return n;
}

static int64_t xdi_canonical_newlines(char *text, int64_t size) {
    if (xdi_canonical_is(text, size, XDI_CANONICAL_NEWLINE) || xdi_canonical_is(text, size, "\\n") ||
        xdi_canonical_is(text, size, XDI_CANONICAL_TAB) ||
        xdi_canonical_is(text, size, XDI_CANONICAL_SPACE "\n")) {
        text[0] = '\n';
        return 1;
    }
    const int64_t replaced = xdi_canonical_replace(text, size, XDI_CANONICAL_NEWLINE, 2, "\n");
    return replaced != size ? replaced : xdi_canonical_replace(text, size, "\\n", 2, "\n");
}

static int xdi_canonical_hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The value of "<0xHH>", or -1. */
static int xdi_canonical_byte(const char *text, int64_t size) {
    if (size != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    const int high = xdi_canonical_hex(text[3]), low = xdi_canonical_hex(text[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}

static int64_t xdi_canonical_repair(char *text, int64_t size) {
    char from[64];
    if (!memchr(text, 0xC3, (size_t)size)) return size; /* the first byte of every spelling below */
    for (int i = 0; i < XDI_CANONICAL_COUNT(xdi_canonical_latin); i++) {
        const char *to = xdi_canonical_latin[i];
        int64_t n = xdi_canonical_put(from, 0xC3);
        n += xdi_canonical_put(from + n, (unsigned char)to[1]);
        size = xdi_canonical_replace(text, size, from, n, to);
    }
    size = xdi_canonical_replace(text, size, "\xC3\x83", 2, "\xC3\x80");
    for (int i = 0; i < XDI_CANONICAL_COUNT(xdi_canonical_words); i++) {
        const char *word = xdi_canonical_words[i];
        const int64_t n = xdi_canonical_spell(word, strlen(word), from);
        /* the one entry that is replaced by something else: two vowel signs gain their letter */
        size = xdi_canonical_replace(text, size, from, n, strcmp(word, "िं") == 0 ? "हिं" : word);
    }
    return size;
}

XD_API int64_t xd_canonical_token(xd_text token, char *out) {
    int64_t size = token.size, skip = 0;
    if (size <= 0) return 0;
    const bool marked = xdi_canonical_begins(token.data, size, XDI_CANONICAL_BLOCK);
    if (marked || token.data[0] == ' ' || token.data[0] == '_') {
        skip = marked ? 3 : 1;
        memcpy(out, XDI_CANONICAL_SPACE, 2);
        memcpy(out + 2, token.data + skip, (size_t)(size - skip));
        size += 2 - skip;
    } else {
        memcpy(out, token.data, (size_t)size);
    }
    size = xdi_canonical_newlines(out, size);
    if (size == 3 && xdi_canonical_begins(out, size, XDI_CANONICAL_SPACE) && strchr(",.;:", out[2])) {
        out[0] = out[2];
        size = 1;
    }
    const int byte = xdi_canonical_byte(out, size);
    if (byte >= 0) return xdi_canonical_put(out, (uint32_t)byte);
    size = xdi_canonical_repair(out, size);
    if (xdi_canonical_is(out, size, "<|begin_of_text|>")) size = (int64_t)strlen(strcpy(out, "<bos>"));
    return xdi_canonical_is(out, size, "<pad>") ? 0 : size;
}

/* ---- a sequence ---- */

/* A two-token spelling of one character: writes it, with the space marker that the first token may have, and
 * returns its length; 0 when these are not such tokens. */
static int64_t xdi_canonical_artifact(xd_text first, xd_text second, char *out) {
    const bool space = xdi_canonical_begins(first.data, first.size, XDI_CANONICAL_SPACE);
    const int64_t skip = space ? 2 : 0;
    for (int i = 0; i < XDI_CANONICAL_COUNT(xdi_canonical_artifacts); i++) {
        const char *ch = xdi_canonical_artifacts[i];
        char head[8], tail[4];
        const int64_t head_size = xdi_canonical_spell(ch, 2, head);
        const int64_t tail_size = xdi_canonical_spell(ch + 2, 1, tail);
        if (first.size - skip != head_size || second.size != tail_size) continue;
        if (memcmp(first.data + skip, head, (size_t)head_size) != 0) continue;
        if (memcmp(second.data, tail, (size_t)tail_size) != 0) continue;
        memcpy(out, XDI_CANONICAL_SPACE, (size_t)skip);
        memcpy(out + skip, ch, 3);
        return skip + 3;
    }
    return 0;
}

/* The byte that the reference takes a character for, or -1; its last two ranges are off by three, and stay
 * so. */
static int xdi_canonical_value(uint32_t point) {
    if (point < 256) return (int)point;
    if (point >= 0x11C && point <= 0x11F) return (int)point - 256;
    if (point == 0x122 || point == 0x123) return (int)point - 128;
    if ((point >= 0x125 && point <= 0x144) || (point >= 0x196 && point <= 0x1A4)) return (int)point - 165;
    return -1;
}

/* Tokens that may be pieces of one character. */
typedef struct xdi_canonical_run {
    unsigned char bytes[4];
    int64_t count; /* bytes so far, also beyond the four that are kept */
    bool space;    /* the first token has the marker */
} xdi_canonical_run;

/* Adds a token's bytes; false, and nothing added, when it is not byte-like. */
static bool xdi_canonical_collect(const char *text, int64_t size, bool first, xdi_canonical_run *run) {
    int64_t at = 0, n = 0;
    while (xdi_canonical_begins(text + at, size - at, XDI_CANONICAL_SPACE)) at += 2;
    const int64_t begin = at;
    if (at == size) return false;
    for (int64_t i = at; i < size; n++)
        if (xdi_canonical_value(xdi_canonical_next(text, size, &i)) < 0) return false;
    if (first) run->space = begin > 0;
    for (int64_t i = begin; i < size;) {
        const int value = xdi_canonical_value(xdi_canonical_next(text, size, &i));
        if (run->count < 4) run->bytes[run->count] = (unsigned char)value;
        run->count++;
    }
    return true;
}

/* True when the bytes are the strict UTF-8 of exactly one character above U+007F. */
static bool xdi_canonical_character(const xdi_canonical_run *run) {
    const unsigned char *b = run->bytes;
    const int64_t n = b[0] >= 0xF0 ? 4 : b[0] >= 0xE0 ? 3 : 2;
    if (run->count != n || b[0] < 0xC2 || b[0] > 0xF4) return false;
    for (int64_t i = 1; i < n; i++)
        if ((b[i] & 0xC0) != 0x80) return false;
    if (b[0] == 0xE0 && b[1] < 0xA0) return false;
    if (b[0] == 0xED && b[1] > 0x9F) return false; /* surrogates */
    if (b[0] == 0xF0 && b[1] < 0x90) return false;
    return b[0] != 0xF4 || b[1] < 0x90;
}

static void xdi_canonical_append(xd_canonical *s, const char *text, int64_t size, int32_t end) {
    memmove(s->text + s->offsets[s->count], text, (size_t)size);
    s->offsets[s->count + 1] = s->offsets[s->count] + size;
    s->origin[++s->count] = end;
}

/* Steps 1 and 2: pairs of tokens that spell one character, then every token's canonical form. */
static void xdi_canonical_tokens(const xd_text *tokens, int64_t count, xd_canonical *s) {
    for (int64_t i = 0; i < count;) {
        char *out = s->text + s->offsets[s->count], joined[8];
        const int64_t size = i + 1 < count ? xdi_canonical_artifact(tokens[i], tokens[i + 1], joined) : 0;
        xd_text token = tokens[i];
        if (size > 0) {
            token.data = joined;
            token.size = size;
        }
        i += size > 0 ? 2 : 1;
        xdi_canonical_append(s, out, xd_canonical_token(token, out), (int32_t)i);
    }
}

/* The longest run of byte-like tokens [i, end) of a sequence of `count`; token i begins at `start`. */
static int64_t xdi_canonical_gather(const xd_canonical *s, int64_t i, int64_t start, int64_t count,
                                    xdi_canonical_run *run) {
    int64_t end = i;
    memset(run, 0, sizeof *run);
    for (; end < count; end++) {
        const int64_t from = end == i ? start : s->offsets[end];
        if (!xdi_canonical_collect(s->text + from, s->offsets[end + 1] - from, end == i, run)) break;
    }
    return end;
}

/* Step 3, in place: maximal runs of byte-like tokens that spell one character become it. What is written lies
 * at or before what is read; only the place where the next token starts must be taken before writing. */
static void xdi_canonical_join(xd_canonical *s) {
    const int64_t count = s->count;
    int64_t start = 0;
    s->count = 0;
    for (int64_t i = 0; i < count;) {
        xdi_canonical_run run;
        int64_t end = xdi_canonical_gather(s, i, start, count, &run);
        const bool lone = end - i == 1 && run.count <= 1;
        if (end > i && !lone && run.count >= 2 && run.count <= 4 && xdi_canonical_character(&run)) {
            char joined[8] = XDI_CANONICAL_SPACE;
            memcpy(joined + (run.space ? 2 : 0), run.bytes, (size_t)run.count);
            start = s->offsets[end];
            xdi_canonical_append(s, joined, run.count + (run.space ? 2 : 0), s->origin[end]);
            i = end;
            continue;
        }
        for (end = end > i ? end : i + 1; i < end; i++) {
            const int64_t next = s->offsets[i + 1];
            xdi_canonical_append(s, s->text + start, next - start, s->origin[i + 1]);
            start = next;
        }
    }
}

XD_API xd_result xd_canonical_sequence(xd_ctx *ctx, const xd_text *tokens, int64_t count, xd_canonical *out) {
    size_t bytes = 8, entries = (size_t)count + 1;
    size_t at[3];
    xd_arena plan = xd_arena_over(NULL, 0);
    for (int64_t i = 0; i < count; i++) bytes += (size_t)tokens[i].size + 2;
    const size_t sizes[3] = { entries * sizeof *out->offsets, entries * sizeof *out->origin, bytes };
    for (int i = 0; i < 3; i++)
        XDI_REQUIRE(ctx, xd_arena_take(&plan, sizes[i], &at[i]), XD_ERROR_MEMORY,
                    "%lld tokens would not fit into memory", (long long)count);
    char *memory = (char *)xd_allocate(ctx, plan.peak);
    XDI_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for %lld canonical tokens: %zu bytes", (long long)count,
                plan.peak);
    out->offsets = (int64_t *)(void *)(memory + at[0]);
    out->origin = (int32_t *)(void *)(memory + at[1]);
    out->text = memory + at[2];
    out->count = 0;
    xdi_canonical_tokens(tokens, count, out);
    xdi_canonical_join(out);
    return XD_OK;
}

XD_API void xd_canonical_free(xd_ctx *ctx, xd_canonical *sequence) {
    xd_release(ctx, sequence->offsets);
    memset(sequence, 0, sizeof *sequence);
}

/* >>distill/align.c */

#include <string.h>

XD_API void xd_chunk_ids(const xd_alignment *alignment, xd_chunk_side side, const uint8_t *mask, int64_t *ids,
                         uint8_t *exact, int64_t count) {
    for (int64_t i = 0; i < count; i++) ids[i] = -1;
    if (exact) memset(exact, 0, (size_t)count);
    for (int64_t n = 0; n < alignment->count; n++) {
        const xd_aligned_chunk *c = &alignment->chunks[n];
        const bool student = side == XD_CHUNK_STUDENT;
        const int64_t begin = student ? c->student_begin : c->teacher_begin;
        const int64_t end = student ? c->student_end : c->teacher_end;
        const bool one = c->student_end - c->student_begin == 1 && c->teacher_end - c->teacher_begin == 1;
        for (int64_t i = begin; i < end && i < count; i++) {
            if (mask && !mask[i]) continue;
            ids[i] = n;
            if (exact) exact[i] = one && (c->flags & XD_CHUNK_EXACT) != 0;
        }
    }
}

XD_API void xd_alignment_free(xd_ctx *ctx, xd_alignment *alignment) {
    xd_release(ctx, alignment->chunks);
    memset(alignment, 0, sizeof *alignment);
}

/* >>distill/align_dp.c */

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* NeMo-RL's aligner: anchors, a dynamic programme between them, two repairs. Scores are its floating ones
 * divided by 1.5: all integers, the same comparisons. */

enum {
    XDI_DP_MATCH = 2,
    XDI_DP_GAP = -1,
    XDI_DP_ANCHOR = 3,  /* tokens of an anchor */
    XDI_DP_WINDOW = 10, /* pairs that a repair looks at */
    XDI_DP_MOST_COMBINATION = 64
};

/* How a cell of the table was reached; combinations of n tokens are XDI_DP_ONE_STUDENT + n and
 * XDI_DP_ONE_TEACHER + n. */
enum {
    XDI_DP_DIAGONAL,
    XDI_DP_UP,
    XDI_DP_LEFT,
    XDI_DP_ONE_STUDENT,
    XDI_DP_ONE_TEACHER = XDI_DP_ONE_STUDENT + XDI_DP_MOST_COMBINATION
};

/* One side: the canonical tokens, and their canonical forms again, by which pairs are judged. Tokens lie one
 * behind the other in memory, so a run of them is one string. */
typedef struct xdi_dp_side {
    xd_canonical tokens, again;
} xdi_dp_side;

/* A pair of runs of canonical tokens. */
typedef struct xdi_dp_pair {
    int32_t s0, s1, t0, t1;
} xdi_dp_pair;

typedef struct xdi_dp_list {
    xdi_dp_pair *pairs;
    int64_t count;
} xdi_dp_list;

typedef struct xdi_dp {
    xd_ctx *ctx;
    xdi_dp_side student, teacher;
    int combination;
    xdi_dp_list now, next; /* room for every pair there can be */
    unsigned char *trace;  /* [cells of the largest table so far] */
    int32_t *scores;       /* [combination + 1][teacher tokens + 1] */
    size_t trace_bytes;
} xdi_dp;

/* ---- strings ---- */

static bool xdi_dp_equal(const xd_canonical *a, int64_t a0, int64_t a1, const xd_canonical *b, int64_t b0,
                         int64_t b1) {
    const int64_t size = a->offsets[a1] - a->offsets[a0];
    return size == b->offsets[b1] - b->offsets[b0] &&
           memcmp(a->text + a->offsets[a0], b->text + b->offsets[b0], (size_t)size) == 0;
}

/* Do both sides of the pair spell the same? */
static bool xdi_dp_good(const xdi_dp *dp, const xdi_dp_pair *p) {
    return xdi_dp_equal(&dp->student.again, p->s0, p->s1, &dp->teacher.again, p->t0, p->t1);
}

static void xdi_dp_push(xdi_dp_list *list, int64_t s0, int64_t s1, int64_t t0, int64_t t1) {
    xdi_dp_pair *p = &list->pairs[list->count++];
    p->s0 = (int32_t)s0;
    p->s1 = (int32_t)s1;
    p->t0 = (int32_t)t0;
    p->t1 = (int32_t)t1;
}

/* ---- the table ---- */

/* Student tokens [s0, s0 + rows) and teacher tokens [t0, t0 + cols). */
typedef struct xdi_dp_table {
    int64_t s0, rows, t0, cols;
} xdi_dp_table;

static int32_t *xdi_dp_row(const xdi_dp *dp, const xdi_dp_table *x, int64_t i) {
    return dp->scores + i % (dp->combination + 1) * (x->cols + 1);
}

/* The best way into one cell; a later candidate must be strictly better. */
static void xdi_dp_cell(const xdi_dp *dp, const xdi_dp_table *x, int64_t i, int64_t j) {
    const xd_canonical *s = &dp->student.tokens, *t = &dp->teacher.tokens;
    const int64_t si = x->s0 + i, tj = x->t0 + j; /* behind the token of this cell */
    const int32_t *above = xdi_dp_row(dp, x, i - 1);
    int32_t *row = xdi_dp_row(dp, x, i);
    int how = XDI_DP_DIAGONAL;
    int32_t best =
        above[j - 1] + (xdi_dp_equal(s, si - 1, si, t, tj - 1, tj) ? XDI_DP_MATCH : -XDI_DP_MATCH);
    if (above[j] + XDI_DP_GAP > best) best = above[j] + XDI_DP_GAP, how = XDI_DP_UP;
    if (row[j - 1] + XDI_DP_GAP > best) best = row[j - 1] + XDI_DP_GAP, how = XDI_DP_LEFT;
    for (int n = 2; n <= dp->combination && n <= j; n++)
        if (above[j - n] + n > best && xdi_dp_equal(s, si - 1, si, t, tj - n, tj))
            best = above[j - n] + n, how = XDI_DP_ONE_STUDENT + n;
    for (int n = 2; n <= dp->combination && n <= i; n++) {
        const int32_t score = xdi_dp_row(dp, x, i - n)[j - 1] + n;
        if (score > best && xdi_dp_equal(t, tj - 1, tj, s, si - n, si))
            best = score, how = XDI_DP_ONE_TEACHER + n;
    }
    row[j] = best;
    dp->trace[(i - 1) * x->cols + j - 1] = (unsigned char)how;
}

/* Follows the trace from the last cell and writes the pairs in order. */
static void xdi_dp_follow(const xdi_dp *dp, const xdi_dp_table *x, xdi_dp_list *out) {
    const int64_t first = out->count;
    for (int64_t i = x->rows, j = x->cols; i > 0 || j > 0;) {
        int how = i == 0 ? (int)XDI_DP_LEFT : (int)XDI_DP_UP;
        if (i > 0 && j > 0) how = dp->trace[(i - 1) * x->cols + j - 1];
        int64_t rows = how == XDI_DP_LEFT ? 0 : 1, cols = how == XDI_DP_UP ? 0 : 1;
        if (how > XDI_DP_ONE_TEACHER)
            rows = how - XDI_DP_ONE_TEACHER;
        else if (how > XDI_DP_ONE_STUDENT)
            cols = how - XDI_DP_ONE_STUDENT;
        xdi_dp_push(out, x->s0 + i - rows, x->s0 + i, x->t0 + j - cols, x->t0 + j);
        i -= rows;
        j -= cols;
    }
    for (int64_t a = first, b = out->count - 1; a < b; a++, b--) {
        const xdi_dp_pair swap = out->pairs[a];
        out->pairs[a] = out->pairs[b];
        out->pairs[b] = swap;
    }
}

static xd_result xdi_dp_reserve(xdi_dp *dp, const xdi_dp_table *x) {
    const size_t cells = (size_t)x->rows * (size_t)x->cols;
    if (cells <= dp->trace_bytes) return XD_OK;
    xd_release(dp->ctx, dp->trace);
    dp->trace = (unsigned char *)xd_allocate(dp->ctx, cells);
    dp->trace_bytes = dp->trace ? cells : 0;
    XDI_REQUIRE(dp->ctx, dp->trace, XD_ERROR_MEMORY, "no room to align %lld with %lld tokens",
                (long long)x->rows, (long long)x->cols);
    return XD_OK;
}

/* Aligns a rectangle of tokens, appending its pairs. */
static xd_result xdi_dp_align(xdi_dp *dp, int64_t s0, int64_t s1, int64_t t0, int64_t t1, xdi_dp_list *out) {
    const xdi_dp_table x = { s0, s1 - s0, t0, t1 - t0 };
    XDI_TRY(xdi_dp_reserve(dp, &x));
    int32_t *top = xdi_dp_row(dp, &x, 0);
    for (int64_t j = 0; j <= x.cols; j++) top[j] = (int32_t)j * XDI_DP_GAP;
    for (int64_t i = 1; i <= x.rows; i++) {
        xdi_dp_row(dp, &x, i)[0] = (int32_t)i * XDI_DP_GAP;
        for (int64_t j = 1; j <= x.cols; j++) xdi_dp_cell(dp, &x, i, j);
    }
    xdi_dp_follow(dp, &x, out);
    return XD_OK;
}

/* ---- anchors: triples of tokens that occur once on each side ---- */

typedef struct xdi_dp_triple {
    const xd_canonical *side;
    int32_t at;
} xdi_dp_triple;

static int xdi_dp_compare_text(const void *left, const void *right) {
    const xdi_dp_triple *a = (const xdi_dp_triple *)left, *b = (const xdi_dp_triple *)right;
    for (int i = 0; i < XDI_DP_ANCHOR; i++) {
        const int64_t *x = a->side->offsets + a->at + i, *y = b->side->offsets + b->at + i;
        const int64_t n = x[1] - x[0], m = y[1] - y[0];
        if (n != m) return n < m ? -1 : 1;
        const int order = memcmp(a->side->text + x[0], b->side->text + y[0], (size_t)n);
        if (order != 0) return order;
    }
    return 0;
}

static int xdi_dp_compare(const void *left, const void *right) {
    const int order = xdi_dp_compare_text(left, right);
    const xdi_dp_triple *a = (const xdi_dp_triple *)left, *b = (const xdi_dp_triple *)right;
    return order != 0 ? order : (a->at > b->at) - (a->at < b->at);
}

/* Sorted triples of one side, each that occurs once; returns how many. */
static int64_t xdi_dp_unique(const xd_canonical *side, xdi_dp_triple *triples) {
    const int64_t count = side->count - XDI_DP_ANCHOR + 1;
    int64_t unique = 0;
    for (int64_t i = 0; i < count; i++) {
        triples[i].side = side;
        triples[i].at = (int32_t)i;
    }
    if (count > 0) qsort(triples, (size_t)count, sizeof *triples, xdi_dp_compare);
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + 1;
        while (end < count && xdi_dp_compare_text(&triples[i], &triples[end]) == 0) end++;
        if (end == i + 1) triples[unique++] = triples[i];
    }
    return unique;
}

/* match[i] = teacher place of the candidate that begins at student token i, or -1. */
static void xdi_dp_candidates(const xdi_dp *dp, xdi_dp_triple *s, xdi_dp_triple *t, int32_t *match) {
    const int64_t n = xdi_dp_unique(&dp->student.tokens, s), m = xdi_dp_unique(&dp->teacher.tokens, t);
    for (int64_t i = 0; i < dp->student.tokens.count; i++) match[i] = -1;
    for (int64_t i = 0, j = 0; i < n && j < m;) {
        const int order = xdi_dp_compare_text(&s[i], &t[j]);
        if (order == 0) match[s[i].at] = t[j].at;
        if (order <= 0) i++;
        if (order >= 0) j++;
    }
}

static bool xdi_dp_free_run(const unsigned char *used, int64_t at) {
    for (int i = 0; i < XDI_DP_ANCHOR; i++)
        if (used[at + i]) return false;
    return true;
}

/* Candidates in student order: one that overlaps a kept one falls, then one that goes back on the teacher's
 * side. Writes student and teacher places, returns how many. */
static int64_t xdi_dp_choose(const xdi_dp *dp, const int32_t *match, unsigned char *used_s,
                             unsigned char *used_t, xdi_dp_pair *anchors) {
    int64_t kept = 0, last = -1;
    for (int64_t i = 0; i + XDI_DP_ANCHOR <= dp->student.tokens.count; i++) {
        const int32_t j = match[i];
        if (j < 0 || !xdi_dp_free_run(used_s, i) || !xdi_dp_free_run(used_t, j)) continue;
        memset(used_s + i, 1, XDI_DP_ANCHOR);
        memset(used_t + j, 1, XDI_DP_ANCHOR);
        if (j <= last) continue;
        anchors[kept].s0 = (int32_t)i;
        anchors[kept++].t0 = j;
        last = j + XDI_DP_ANCHOR - 1;
    }
    return kept;
}

/* Memory of the search for anchors. */
typedef struct xdi_dp_search {
    xdi_dp_triple *s, *t;
    int32_t *match;
    unsigned char *used_s, *used_t;
    xdi_dp_pair *anchors;
} xdi_dp_search;

static bool xdi_dp_search_layout(xd_arena *arena, const xdi_dp *dp, xdi_dp_search *x) {
    const size_t n = (size_t)dp->student.tokens.count, m = (size_t)dp->teacher.tokens.count;
    const size_t sizes[6] = { n * sizeof *x->s, m * sizeof *x->t, n * sizeof *x->match, n, m,
                              n * sizeof *x->anchors };
    void **blocks[6] = { (void **)&x->s,      (void **)&x->t,      (void **)&x->match,
                         (void **)&x->used_s, (void **)&x->used_t, (void **)&x->anchors };
    for (int i = 0; i < 6; i++) {
        size_t at;
        if (!xd_arena_take(arena, sizes[i], &at)) return false;
        if (arena->base) *blocks[i] = arena->base + at;
    }
    return true;
}

/* Between two anchors, then the anchor itself as pairs of single tokens. */
static xd_result xdi_dp_gaps(xdi_dp *dp, const xdi_dp_pair *anchors, int64_t count) {
    const int64_t n = dp->student.tokens.count, m = dp->teacher.tokens.count;
    int64_t s = 0, t = 0;
    for (int64_t a = 0; a <= count; a++) {
        const int64_t s_end = a < count ? anchors[a].s0 : n, t_end = a < count ? anchors[a].t0 : m;
        if (s_end > s || t_end > t) XDI_TRY(xdi_dp_align(dp, s, s_end, t, t_end, &dp->now));
        for (int i = 0; i < XDI_DP_ANCHOR && a < count; i++)
            xdi_dp_push(&dp->now, s_end + i, s_end + i + 1, t_end + i, t_end + i + 1);
        s = s_end + XDI_DP_ANCHOR;
        t = t_end + XDI_DP_ANCHOR;
    }
    return XD_OK;
}

static xd_result xdi_dp_anchored(xdi_dp *dp) {
    xdi_dp_search x;
    xd_arena plan = xd_arena_over(NULL, 0);
    memset(&x, 0, sizeof x);
    const bool fits = xdi_dp_search_layout(&plan, dp, &x);
    void *memory = fits ? xd_allocate(dp->ctx, plan.peak) : NULL;
    XDI_REQUIRE(dp->ctx, memory, XD_ERROR_MEMORY, "no room to search %lld tokens for anchors",
                (long long)dp->student.tokens.count);
    xd_arena arena = xd_arena_over(memory, plan.peak);
    xdi_dp_search_layout(&arena, dp, &x);
    xdi_dp_candidates(dp, x.s, x.t, x.match);
    const int64_t kept = xdi_dp_choose(dp, x.match, x.used_s, x.used_t, x.anchors);
    const xd_result result = xdi_dp_gaps(dp, x.anchors, kept);
    xd_release(dp->ctx, memory);
    return result;
}

/* ---- repairs ---- */

static xdi_dp_pair xdi_dp_span(const xdi_dp_pair *first, const xdi_dp_pair *last) {
    xdi_dp_pair p = { first->s0, last->s1, first->t0, last->t1 };
    return p;
}

static void xdi_dp_swap(xdi_dp *dp) {
    const xdi_dp_list swap = dp->now;
    dp->now = dp->next;
    dp->next = swap;
    dp->next.count = 0;
}

/* Runs of bad pairs become one, except in the last fifth. */
static void xdi_dp_merge_bad(xdi_dp *dp) {
    const int64_t count = dp->now.count, boundary = (int64_t)(0.8 * (double)count);
    const xdi_dp_pair *pairs = dp->now.pairs;
    for (int64_t i = 0; i < count;) {
        int64_t end = i + 1;
        if (i < boundary && !xdi_dp_good(dp, &pairs[i]))
            while (end < boundary && !xdi_dp_good(dp, &pairs[end])) end++;
        dp->next.pairs[dp->next.count++] = xdi_dp_span(&pairs[i], &pairs[end - 1]);
        i = end;
    }
    xdi_dp_swap(dp);
}

/* Are both token lists the same, token by token, and longer than one? */
static bool xdi_dp_identical(const xdi_dp *dp, const xdi_dp_pair *p) {
    const int64_t n = p->s1 - p->s0;
    if (n < 2 || p->t1 - p->t0 != n) return false;
    for (int64_t i = 0; i < n; i++)
        if (!xdi_dp_equal(&dp->student.tokens, p->s0 + i, p->s0 + i + 1, &dp->teacher.tokens, p->t0 + i,
                          p->t0 + i + 1))
            return false;
    return true;
}

/* Aligns a window whose two sides spell the same again; keeps the result when all of it is good. */
static xd_result xdi_dp_realign(xdi_dp *dp, const xdi_dp_pair *window) {
    const int64_t first = dp->next.count;
    bool good = true;
    XDI_TRY(xdi_dp_align(dp, window->s0, window->s1, window->t0, window->t1, &dp->next));
    for (int64_t i = first; i < dp->next.count; i++) good = good && xdi_dp_good(dp, &dp->next.pairs[i]);
    if (good) return XD_OK;
    dp->next.count = first;
    dp->next.pairs[dp->next.count++] = *window;
    return XD_OK;
}

/* Bad pair b: the shortest window from it whose sides agree. Returns through *end where to go on. */
static xd_result xdi_dp_repair(xdi_dp *dp, int64_t b, int64_t *end) {
    const xdi_dp_pair *pairs = dp->now.pairs;
    for (int64_t w = 2; w <= XDI_DP_WINDOW && b + w <= dp->now.count; w++) {
        const xdi_dp_pair window = xdi_dp_span(&pairs[b], &pairs[b + w - 1]);
        if (!xdi_dp_good(dp, &window)) continue;
        *end = b + w;
        return xdi_dp_realign(dp, &window);
    }
    dp->next.pairs[dp->next.count++] = pairs[b];
    *end = b + 1;
    return XD_OK;
}

static xd_result xdi_dp_split(xdi_dp *dp) {
    const xdi_dp_pair *pairs = dp->now.pairs;
    const int64_t count = dp->now.count;
    for (int64_t i = 0; i < count;) {
        if (xdi_dp_identical(dp, &pairs[i])) {
            const xdi_dp_pair p = pairs[i++];
            for (int32_t k = 0; k < p.s1 - p.s0; k++)
                xdi_dp_push(&dp->next, p.s0 + k, p.s0 + k + 1, p.t0 + k, p.t0 + k + 1);
            continue;
        }
        while (i < count && xdi_dp_good(dp, &pairs[i])) dp->next.pairs[dp->next.count++] = pairs[i++];
        if (i < count) XDI_TRY(xdi_dp_repair(dp, i, &i));
    }
    xdi_dp_swap(dp);
    return XD_OK;
}

/* ---- the whole ---- */

/* Room behind one block of memory for `count` tokens of `bytes` bytes in all. */
static xd_result xdi_dp_strings(xd_ctx *ctx, int64_t count, size_t bytes, xd_canonical *out) {
    const size_t offsets = ((size_t)count + 1) * sizeof *out->offsets;
    const size_t origin = ((size_t)count + 1) * sizeof *out->origin;
    char *memory = (char *)xd_allocate(ctx, offsets + origin + bytes);
    XDI_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)count);
    out->offsets = (int64_t *)(void *)memory;
    out->origin = (int32_t *)(void *)(memory + offsets);
    out->text = memory + offsets + origin;
    out->count = count;
    return XD_OK;
}

/* Strings as they are. */
static xd_result xdi_dp_plain_side(xd_ctx *ctx, const xd_text *tokens, int64_t count, xdi_dp_side *side) {
    xd_canonical *s = &side->tokens;
    size_t bytes = 1;
    for (int64_t i = 0; i < count; i++) bytes += (size_t)tokens[i].size;
    XDI_TRY(xdi_dp_strings(ctx, count, bytes, s));
    for (int64_t i = 0; i < count; i++) {
        memcpy(s->text + s->offsets[i], tokens[i].data, (size_t)tokens[i].size);
        s->offsets[i + 1] = s->offsets[i] + tokens[i].size;
        s->origin[i + 1] = (int32_t)i + 1;
    }
    return XD_OK;
}

/* Canonical forms, and the canonical forms of those. */
static xd_result xdi_dp_canonical_side(xd_ctx *ctx, const xd_text *tokens, int64_t count,
                                       xdi_dp_side *side) {
    XDI_TRY(xd_canonical_sequence(ctx, tokens, count, &side->tokens));
    const int64_t n = side->tokens.count;
    xd_canonical *again = &side->again;
    XDI_TRY(xdi_dp_strings(ctx, n, (size_t)side->tokens.offsets[n] + 2 * (size_t)n + 8, again));
    for (int64_t i = 0; i < n; i++) {
        const int64_t *at = side->tokens.offsets + i;
        const xd_text token = { side->tokens.text + at[0], at[1] - at[0] };
        again->offsets[i + 1] = again->offsets[i] + xd_canonical_token(token, again->text + again->offsets[i]);
    }
    return XD_OK;
}

static xd_result xdi_dp_memory(xdi_dp *dp) {
    const size_t n = (size_t)dp->student.tokens.count, m = (size_t)dp->teacher.tokens.count;
    const size_t rows = (size_t)dp->combination + 1;
    dp->now.pairs = (xdi_dp_pair *)xd_allocate(dp->ctx, (n + m) * sizeof *dp->now.pairs);
    dp->next.pairs = (xdi_dp_pair *)xd_allocate(dp->ctx, (n + m) * sizeof *dp->next.pairs);
    dp->scores = (int32_t *)xd_allocate(dp->ctx, rows * (m + 1) * sizeof *dp->scores);
    XDI_REQUIRE(dp->ctx, dp->now.pairs && dp->next.pairs && dp->scores, XD_ERROR_MEMORY,
                "no room to align %zu with %zu tokens", n, m);
    return XD_OK;
}

/* Pairs as chunks of original tokens, judged by the spellings s and t. */
static xd_result xdi_dp_chunks(const xdi_dp *dp, const xd_canonical *student, const xd_canonical *teacher,
                               xd_alignment *out) {
    const int32_t *s = dp->student.tokens.origin, *t = dp->teacher.tokens.origin;
    out->chunks = (xd_aligned_chunk *)xd_allocate(dp->ctx, (size_t)dp->now.count * sizeof *out->chunks);
    XDI_REQUIRE(dp->ctx, out->chunks, XD_ERROR_MEMORY, "no room for %lld chunks", (long long)dp->now.count);
    out->count = dp->now.count;
    for (int64_t i = 0; i < out->count; i++) {
        const xdi_dp_pair *p = &dp->now.pairs[i];
        xd_aligned_chunk *c = &out->chunks[i];
        c->student_begin = s[p->s0];
        c->student_end = s[p->s1];
        c->teacher_begin = t[p->t0];
        c->teacher_end = t[p->t1];
        c->flags = xdi_dp_equal(student, p->s0, p->s1, teacher, p->t0, p->t1) ? (uint32_t)XD_CHUNK_EXACT : 0u;
    }
    return XD_OK;
}

static xd_result xdi_dp_open(xd_ctx *ctx, const xd_align_dp_desc *desc, int64_t student_count,
                             int64_t teacher_count, xdi_dp *dp) {
    memset(dp, 0, sizeof *dp);
    dp->ctx = ctx;
    dp->combination = desc && desc->max_combination ? desc->max_combination : 4;
    XDI_REQUIRE(ctx, dp->combination >= 1 && dp->combination <= XDI_DP_MOST_COMBINATION, XD_ERROR_ARGUMENT,
                "max_combination %d is outside [1, %d]", dp->combination, XDI_DP_MOST_COMBINATION);
    XDI_REQUIRE(ctx, student_count >= 0 && student_count < INT32_MAX / 4 && teacher_count >= 0 &&
                         teacher_count < INT32_MAX / 4,
                XD_ERROR_ARGUMENT, "sequences of %lld and %lld tokens", (long long)student_count,
                (long long)teacher_count);
    return XD_OK;
}

static void xdi_dp_close(xdi_dp *dp) {
    xd_canonical *strings[4] = { &dp->student.tokens, &dp->student.again, &dp->teacher.tokens,
                                 &dp->teacher.again };
    for (int i = 0; i < 4; i++) xd_canonical_free(dp->ctx, strings[i]);
    xd_release(dp->ctx, dp->now.pairs);
    xd_release(dp->ctx, dp->next.pairs);
    xd_release(dp->ctx, dp->scores);
    xd_release(dp->ctx, dp->trace);
}

static xd_result xdi_dp_run(xdi_dp *dp, const xd_text *student, int64_t student_count, const xd_text *teacher,
                            int64_t teacher_count, xd_alignment *out) {
    XDI_TRY(xdi_dp_canonical_side(dp->ctx, student, student_count, &dp->student));
    XDI_TRY(xdi_dp_canonical_side(dp->ctx, teacher, teacher_count, &dp->teacher));
    XDI_TRY(xdi_dp_memory(dp));
    XDI_TRY(xdi_dp_anchored(dp));
    xdi_dp_merge_bad(dp);
    XDI_TRY(xdi_dp_split(dp));
    return xdi_dp_chunks(dp, &dp->student.again, &dp->teacher.again, out);
}

XD_API xd_result xd_align_dp(xd_ctx *ctx, const xd_text *student, int64_t student_count,
                             const xd_text *teacher, int64_t teacher_count, const xd_align_dp_desc *desc,
                             xd_alignment *out) {
    xdi_dp dp;
    XDI_TRY(xdi_dp_open(ctx, desc, student_count, teacher_count, &dp));
    const xd_result result = xdi_dp_run(&dp, student, student_count, teacher, teacher_count, out);
    xdi_dp_close(&dp);
    return result;
}

static xd_result xdi_dp_run_segment(xdi_dp *dp, const xd_text *student, int64_t student_count,
                                    const xd_text *teacher, int64_t teacher_count, xd_alignment *out,
                                    double *score) {
    const xdi_dp_table x = { 0, student_count, 0, teacher_count };
    XDI_TRY(xdi_dp_plain_side(dp->ctx, student, student_count, &dp->student));
    XDI_TRY(xdi_dp_plain_side(dp->ctx, teacher, teacher_count, &dp->teacher));
    XDI_TRY(xdi_dp_memory(dp));
    XDI_TRY(xdi_dp_align(dp, 0, student_count, 0, teacher_count, &dp->now));
    if (score) *score = 1.5 * (double)xdi_dp_row(dp, &x, student_count)[teacher_count];
    return xdi_dp_chunks(dp, &dp->student.tokens, &dp->teacher.tokens, out);
}

XD_API xd_result xd_align_segment(xd_ctx *ctx, const xd_text *student, int64_t student_count,
                                  const xd_text *teacher, int64_t teacher_count, const xd_align_dp_desc *desc,
                                  xd_alignment *out, double *score) {
    xdi_dp dp;
    XDI_TRY(xdi_dp_open(ctx, desc, student_count, teacher_count, &dp));
    const xd_result result =
        xdi_dp_run_segment(&dp, student, student_count, teacher, teacher_count, out, score);
    xdi_dp_close(&dp);
    return result;
}

/* >>distill/align_bytes.c */

#include <pthread.h>
#include <string.h>

/* A sweep over both sides at once. A side stands behind a token; the bytes between what its tokens have
 * covered and where the next one begins belong to nobody, so any place in that gap is a boundary of the side.
 * Where the boundaries of both sides meet, a chunk ends. */
typedef struct xdi_sweep_side {
    const xd_align_side *in;
    int64_t first; /* first token of the open chunk */
    int64_t next;  /* first token that has not been taken */
    int64_t limit; /* end of the document */
    int64_t covered; /* end of the bytes covered in this document */
    int64_t begin;   /* where the open chunk's text begins; -1 while it has none */
    bool gap;        /* the open chunk has bytes inside that none of its tokens covers */
    bool masked;
} xdi_sweep_side;

typedef struct xdi_sweep {
    xdi_sweep_side side[2]; /* student, teacher */
    xd_alignment *out;
    xd_align_report *report;
} xdi_sweep;

static int xdi_sweep_role(const xdi_sweep_side *s) {
    if (s->next >= s->limit) return (int)XD_TOKEN_TEXT;
    const xd_token_span span = s->in->spans[s->next];
    return s->in->roles && span.begin == span.end ? s->in->roles[s->next] : (int)XD_TOKEN_TEXT;
}

/* Where the next token begins; the end of all text when the document has no more. */
static int64_t xdi_sweep_gap_end(const xdi_sweep_side *s) {
    return s->next < s->limit ? s->in->spans[s->next].begin : INT64_MAX;
}

/* True when no token that is still to come shares bytes with those taken. */
static bool xdi_sweep_at_boundary(const xdi_sweep_side *s) {
    return xdi_sweep_gap_end(s) >= s->covered;
}

static void xdi_sweep_take(xdi_sweep_side *s) {
    const xd_token_span span = s->in->spans[s->next];
    if (s->begin < 0)
        s->begin = span.begin;
    else if (span.begin > s->covered)
        s->gap = true;
    if (span.end > s->covered) s->covered = span.end;
    if (s->in->mask && !s->in->mask[s->next]) s->masked = true;
    s->next++;
}

static bool xdi_sweep_open(const xdi_sweep_side *s) {
    return s->next > s->first;
}

/* Do both sides of the open chunk cover the same bytes, all of them? */
static bool xdi_sweep_same(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    return xdi_sweep_open(s) && xdi_sweep_open(t) && !s->gap && !t->gap && s->begin == t->begin &&
           s->covered == t->covered;
}

/* Ends the open chunk, if it has a token. */
static void xdi_sweep_close(xdi_sweep *x, bool exact) {
    xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    if (xdi_sweep_open(s) || xdi_sweep_open(t)) {
        xd_aligned_chunk *c = &x->out->chunks[x->out->count++];
        const bool both = xdi_sweep_open(s) && xdi_sweep_open(t), masked = s->masked || t->masked;
        c->student_begin = (int32_t)s->first;
        c->student_end = (int32_t)s->next;
        c->teacher_begin = (int32_t)t->first;
        c->teacher_end = (int32_t)t->next;
        c->flags = (exact ? (uint32_t)XD_CHUNK_EXACT : 0u) | (masked ? (uint32_t)XD_CHUNK_MASKED : 0u);
        const int64_t bytes = xdi_sweep_open(s) ? s->covered - s->begin : 0;
        x->report->chunks++;
        x->report->exact += exact;
        x->report->one_sided += !both;
        x->report->masked += masked;
        x->report->total_bytes += bytes;
        if (!exact || masked) x->report->lost_bytes += bytes;
    }
    for (int i = 0; i < 2; i++) {
        x->side[i].first = x->side[i].next;
        x->side[i].begin = -1;
        x->side[i].gap = x->side[i].masked = false;
    }
}

/* Tokens without bytes at a common boundary: the same role on both sides is a pair, anything else stands
 * alone. */
static bool xdi_sweep_special(xdi_sweep *x) {
    const int s = xdi_sweep_role(&x->side[0]), t = xdi_sweep_role(&x->side[1]);
    if (s == (int)XD_TOKEN_TEXT && t == (int)XD_TOKEN_TEXT) return false;
    const bool pair = s == t;
    if (s != (int)XD_TOKEN_TEXT) xdi_sweep_take(&x->side[0]);
    if (pair || s == (int)XD_TOKEN_TEXT) xdi_sweep_take(&x->side[1]);
    xdi_sweep_close(x, pair);
    return true;
}

/* Both sides have a boundary, and the gaps behind what they cover have a place in common. */
static bool xdi_sweep_meet(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    return xdi_sweep_at_boundary(s) && xdi_sweep_at_boundary(t) && s->covered <= xdi_sweep_gap_end(t) &&
           t->covered <= xdi_sweep_gap_end(s);
}

/* One document: tokens up to each side's limit. */
static void xdi_sweep_document(xdi_sweep *x) {
    xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    for (int i = 0; i < 2; i++)
        x->side[i].covered = x->side[i].next < x->side[i].limit ? x->side[i].in->spans[x->side[i].next].begin : 0;
    while (s->next < s->limit || t->next < t->limit) {
        if (xdi_sweep_meet(x)) {
            xdi_sweep_close(x, xdi_sweep_same(x));
            if (xdi_sweep_special(x)) continue;
        }
        /* the side that is behind goes on; when it has no more, the other one */
        const bool student = t->next >= t->limit || (s->next < s->limit && s->covered <= t->covered);
        xdi_sweep_take(student ? s : t);
    }
    xdi_sweep_close(x, xdi_sweep_meet(x) && xdi_sweep_same(x));
}

static int32_t xdi_sweep_document_of(const xdi_sweep_side *s) {
    return s->in->documents ? s->in->documents[s->next] : 0;
}

static void xdi_sweep_limit(xdi_sweep_side *s, int32_t document) {
    s->limit = s->next;
    while (s->limit < s->in->count && (s->in->documents ? s->in->documents[s->limit] : 0) == document)
        s->limit++;
}

/* The lowest document that either side still has. */
static int32_t xdi_sweep_next_document(const xdi_sweep *x) {
    const xdi_sweep_side *s = &x->side[0], *t = &x->side[1];
    if (s->next >= s->in->count) return xdi_sweep_document_of(t);
    if (t->next >= t->in->count) return xdi_sweep_document_of(s);
    const int32_t a = xdi_sweep_document_of(s), b = xdi_sweep_document_of(t);
    return a < b ? a : b;
}

static void xdi_sweep_run(xdi_sweep *x) {
    xdi_sweep_close(x, false); /* nothing is open: sets both sides to the start */
    while (x->side[0].next < x->side[0].in->count || x->side[1].next < x->side[1].in->count) {
        const int32_t document = xdi_sweep_next_document(x);
        for (int i = 0; i < 2; i++) xdi_sweep_limit(&x->side[i], document);
        xdi_sweep_document(x);
    }
}

static xd_result xdi_sweep_check(xd_ctx *ctx, const char *name, const xd_align_side *side) {
    XDI_REQUIRE(ctx, side->count >= 0 && side->count < INT32_MAX, XD_ERROR_ARGUMENT, "%s has %lld tokens", name,
                (long long)side->count);
    for (int64_t i = 0; i < side->count; i++) {
        const xd_token_span now = side->spans[i];
        XDI_REQUIRE(ctx, now.begin >= 0 && now.begin <= now.end, XD_ERROR_ARGUMENT,
                    "%s token %lld covers bytes [%lld, %lld)", name, (long long)i, (long long)now.begin,
                    (long long)now.end);
        if (i == 0) continue;
        const xd_token_span before = side->spans[i - 1];
        const bool same = !side->documents || side->documents[i] == side->documents[i - 1];
        XDI_REQUIRE(ctx, !same || (now.begin >= before.begin && now.end >= before.end), XD_ERROR_ARGUMENT,
                    "%s token %lld covers bytes [%lld, %lld) behind [%lld, %lld)", name, (long long)i,
                    (long long)now.begin, (long long)now.end, (long long)before.begin, (long long)before.end);
        XDI_REQUIRE(ctx, same || side->documents[i] > side->documents[i - 1], XD_ERROR_ARGUMENT,
                    "%s token %lld is of document %d behind document %d", name, (long long)i,
                    (int)side->documents[i], (int)side->documents[i - 1]);
    }
    return XD_OK;
}

XD_API xd_result xd_align_bytes(xd_ctx *ctx, const xd_align_side *student, const xd_align_side *teacher,
                                xd_alignment *out, xd_align_report *report) {
    xdi_sweep x;
    xd_align_report unused;
    xd_alignment made;
    XDI_TRY(xdi_sweep_check(ctx, "student", student));
    XDI_TRY(xdi_sweep_check(ctx, "teacher", teacher));
    const size_t most = (size_t)student->count + (size_t)teacher->count; /* every chunk has a token */
    made.chunks = (xd_aligned_chunk *)xd_allocate(ctx, most * sizeof *made.chunks);
    made.count = 0;
    XDI_REQUIRE(ctx, made.chunks, XD_ERROR_MEMORY, "no room for %zu chunks", most);
    memset(&x, 0, sizeof x);
    x.side[0].in = student;
    x.side[1].in = teacher;
    x.out = &made;
    x.report = report ? report : &unused;
    memset(x.report, 0, sizeof *x.report);
    xdi_sweep_run(&x);
    *out = made;
    return XD_OK;
}

/* ---- a batch ---- */

/* One thread's jobs: every `workers`-th one, with a context of its own for its errors. */
typedef struct xdi_align_worker {
    xd_ctx *ctx;
    xd_align_job *jobs;
    int64_t first, count, step;
    int64_t failed; /* the job that failed, or count */
    xd_result result;
} xdi_align_worker;

static void *xdi_align_work(void *argument) {
    xdi_align_worker *w = (xdi_align_worker *)argument;
    w->failed = w->count;
    for (int64_t i = w->first; i < w->count && w->result == XD_OK; i += w->step) {
        xd_align_job *job = &w->jobs[i];
        w->result = xd_align_bytes(w->ctx, &job->student, &job->teacher, &job->out, &job->report);
        if (w->result != XD_OK) w->failed = i;
    }
    return NULL;
}

enum { XDI_ALIGN_MOST_WORKERS = 64 };

/* Starts the workers, does the first share itself, waits. A thread that cannot start leaves its share to the
 * caller. */
static void xdi_align_start(xdi_align_worker *workers, int count) {
    pthread_t threads[XDI_ALIGN_MOST_WORKERS];
    bool started[XDI_ALIGN_MOST_WORKERS];
    for (int i = 1; i < count; i++)
        started[i] = pthread_create(&threads[i], NULL, xdi_align_work, &workers[i]) == 0;
    xdi_align_work(&workers[0]);
    for (int i = 1; i < count; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        else
            xdi_align_work(&workers[i]);
    }
}

/* The error of the lowest job that failed, whichever worker had it. */
static xd_result xdi_align_first_error(xd_ctx *ctx, const xdi_align_worker *workers, int count) {
    const xdi_align_worker *worst = &workers[0];
    for (int i = 1; i < count; i++)
        if (workers[i].failed < worst->failed) worst = &workers[i];
    if (worst->result == XD_OK) return XD_OK;
    return XDI_FAIL(ctx, worst->result, "sequence %lld: %s", (long long)worst->failed,
                    xd_last_error(worst->ctx)->message);
}

XD_API xd_result xd_align_batch(xd_ctx *ctx, xd_align_job *jobs, int64_t count, int workers) {
    xdi_align_worker pool[XDI_ALIGN_MOST_WORKERS];
    xd_result result = XD_OK;
    if (workers > XDI_ALIGN_MOST_WORKERS) workers = XDI_ALIGN_MOST_WORKERS;
    if ((int64_t)workers > count) workers = (int)count;
    if (workers < 1) workers = 1;
    memset(pool, 0, sizeof pool);
    for (int64_t i = 0; i < count; i++) memset(&jobs[i].out, 0, sizeof jobs[i].out);
    for (int i = 0; i < workers; i++) {
        xdi_align_worker *w = &pool[i];
        w->jobs = jobs;
        w->first = i;
        w->count = count;
        w->step = workers;
        if (result == XD_OK) result = xd_ctx_create(xd_ctx_settings(ctx), &w->ctx);
    }
    if (result == XD_OK) {
        xdi_align_start(pool, workers);
        result = xdi_align_first_error(ctx, pool, workers);
    } else {
        result = XDI_FAIL(ctx, result, "no room for %d workers", workers);
    }
    for (int i = 0; i < workers; i++) xd_ctx_destroy(pool[i].ctx);
    for (int64_t i = 0; i < count && result != XD_OK; i++) xd_alignment_free(ctx, &jobs[i].out);
    return result;
}

/* >>distill/votes.c */

#include <string.h>

struct xd_votes {
    xd_ctx *ctx;
    int64_t student_size, teacher_size;
    xd_vote *cells; /* [capacity]; the first `read` are sorted and unique */
    int64_t count, capacity, read;
    int32_t *exact; /* [student_size] teacher id that has the student id for itself; -1: none */
};

XD_API xd_result xd_votes_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size, xd_votes **out) {
    XDI_REQUIRE(ctx,
                student_size > 0 && student_size <= INT32_MAX && teacher_size > 0 && teacher_size <= INT32_MAX,
                XD_ERROR_ARGUMENT, "votes between vocabularies of %lld and %lld ids", (long long)student_size,
                (long long)teacher_size);
    xd_votes *v = (xd_votes *)xd_allocate(ctx, sizeof *v);
    int32_t *exact = (int32_t *)xd_allocate(ctx, (size_t)student_size * sizeof *exact);
    if (!v || !exact) {
        xd_release(ctx, v);
        xd_release(ctx, exact);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for votes of %lld ids", (long long)student_size);
    }
    for (int64_t s = 0; s < student_size; s++) exact[s] = -1;
    v->ctx = ctx;
    v->student_size = student_size;
    v->teacher_size = teacher_size;
    v->exact = exact;
    *out = v;
    return XD_OK;
}

XD_API void xd_votes_destroy(xd_votes *votes) {
    if (!votes) return;
    xd_release(votes->ctx, votes->cells);
    xd_release(votes->ctx, votes->exact);
    xd_release(votes->ctx, votes);
}

static xd_result xdi_votes_check(const xd_votes *v, int64_t student_id, int64_t teacher_id) {
    XDI_REQUIRE(v->ctx, student_id >= 0 && student_id < v->student_size, XD_ERROR_ARGUMENT,
                "student id %lld is outside a vocabulary of %lld", (long long)student_id,
                (long long)v->student_size);
    XDI_REQUIRE(v->ctx, teacher_id >= 0 && teacher_id < v->teacher_size, XD_ERROR_ARGUMENT,
                "teacher id %lld is outside a vocabulary of %lld", (long long)teacher_id,
                (long long)v->teacher_size);
    return XD_OK;
}

static xd_result xdi_votes_grow(xd_votes *v) {
    const int64_t capacity = v->capacity ? 2 * v->capacity : 4096;
    xd_vote *cells = (xd_vote *)xd_allocate(v->ctx, (size_t)capacity * sizeof *cells);
    XDI_REQUIRE(v->ctx, cells, XD_ERROR_MEMORY, "no room for %lld votes", (long long)capacity);
    if (v->count) memcpy(cells, v->cells, (size_t)v->count * sizeof *cells);
    xd_release(v->ctx, v->cells);
    v->cells = cells;
    v->capacity = capacity;
    return XD_OK;
}

XD_API xd_result xd_votes_add(xd_votes *votes, int64_t student_id, int64_t teacher_id, double weight) {
    XDI_TRY(xdi_votes_check(votes, student_id, teacher_id));
    if (votes->count == votes->capacity) XDI_TRY(xdi_votes_grow(votes));
    xd_vote *cell = &votes->cells[votes->count++];
    cell->student_id = (int32_t)student_id;
    cell->teacher_id = (int32_t)teacher_id;
    cell->weight = weight;
    return XD_OK;
}

XD_API xd_result xd_votes_set_exact(xd_votes *votes, int64_t student_id, int64_t teacher_id) {
    XDI_TRY(xdi_votes_check(votes, student_id, teacher_id));
    votes->exact[student_id] = (int32_t)teacher_id;
    return XD_OK;
}

/* ---- passes ---- */

XD_API void xd_piece_weights(int64_t count, double *weights) {
    double sum = 0.0, weight = 0.9;
    for (int64_t i = 0; i < count; i++, weight *= 0.1) {
        weights[i] = weight;
        sum += weight;
    }
    for (int64_t i = 0; i < count; i++) weights[i] /= sum;
}

static bool xdi_votes_among(const int64_t *ids, int64_t count, int64_t id) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

static bool xdi_votes_special(xd_text text) {
    return text.size >= 4 && memcmp(text.data, "<|", 2) == 0 && memcmp(text.data + text.size - 2, "|>", 2) == 0;
}

static bool xdi_votes_silent(const xd_votes_pass *pass, int64_t id) {
    const xd_pieces *token = &pass->tokens[id];
    if (xdi_votes_special(token->text) || xdi_votes_among(pass->skip, pass->skip_count, id)) return true;
    for (int64_t i = 0; i < token->count; i++)
        if (xdi_votes_among(pass->foreign_skip, pass->foreign_skip_count, token->ids[i])) return true;
    return false;
}

enum { XDI_VOTES_MOST_PIECES = 32 };

XD_API xd_result xd_votes_add_pass(xd_votes *votes, const xd_votes_pass *pass) {
    const int64_t most = pass->most_pieces ? pass->most_pieces : 4;
    double weights[XDI_VOTES_MOST_PIECES];
    XDI_REQUIRE(votes->ctx, most >= 1 && most <= XDI_VOTES_MOST_PIECES, XD_ERROR_ARGUMENT,
                "most_pieces %lld is outside [1, %d]", (long long)most, XDI_VOTES_MOST_PIECES);
    for (int64_t id = 0; id < pass->count; id++) {
        const xd_pieces *token = &pass->tokens[id];
        const int64_t n = token->count < most ? token->count : most;
        if (xdi_votes_silent(pass, id)) continue;
        xd_piece_weights(n, weights);
        for (int64_t i = 0; i < n; i++) {
            const int64_t student = pass->reverse ? token->ids[i] : id;
            const int64_t teacher = pass->reverse ? id : token->ids[i];
            XDI_TRY(xd_votes_add(votes, student, teacher, weights[i]));
        }
    }
    return XD_OK;
}

/* ---- reading ---- */

static int64_t xdi_votes_key(const xd_vote *cell, bool by_student) {
    return by_student ? cell->student_id : cell->teacher_id;
}

/* Stable counting sort by one of the two ids. begin has room for its vocabulary + 1. */
static void xdi_votes_order(const xd_vote *from, xd_vote *to, int64_t count, bool by_student, int64_t size,
                            int64_t *begin) {
    memset(begin, 0, (size_t)(size + 1) * sizeof *begin);
    for (int64_t i = 0; i < count; i++) begin[xdi_votes_key(&from[i], by_student) + 1]++;
    for (int64_t i = 0; i < size; i++) begin[i + 1] += begin[i];
    for (int64_t i = 0; i < count; i++) to[begin[xdi_votes_key(&from[i], by_student)]++] = from[i];
}

/* Adds up equal cells of a sorted list in the order in which they were cast; exact ids have one cell. */
static int64_t xdi_votes_combine(const xd_votes *v, const xd_vote *from, xd_vote *to) {
    int64_t n = 0, at = 0;
    for (int32_t s = 0; s < (int32_t)v->student_size; s++) {
        if (v->exact[s] >= 0) {
            to[n].student_id = s;
            to[n].teacher_id = v->exact[s];
            to[n++].weight = 1.0;
        }
        for (; at < v->count && from[at].student_id == s; at++) {
            if (v->exact[s] >= 0) continue;
            if (n > 0 && to[n - 1].student_id == s && to[n - 1].teacher_id == from[at].teacher_id)
                to[n - 1].weight += from[at].weight;
            else
                to[n++] = from[at];
        }
    }
    return n;
}

XD_API xd_result xd_votes_read(xd_votes *votes, const xd_vote **cells, int64_t *count) {
    xd_votes *v = votes;
    const int64_t size = v->student_size > v->teacher_size ? v->student_size : v->teacher_size;
    const int64_t room = v->count + v->student_size; /* every id may be exact without a vote */
    int64_t *begin = (int64_t *)xd_allocate(v->ctx, (size_t)(size + 1) * sizeof *begin);
    xd_vote *one = (xd_vote *)xd_allocate(v->ctx, (size_t)room * sizeof *one);
    xd_vote *two = (xd_vote *)xd_allocate(v->ctx, (size_t)room * sizeof *two);
    const bool fits = begin && one && two;
    if (fits) {
        xdi_votes_order(v->cells, one, v->count, false, v->teacher_size, begin);
        xdi_votes_order(one, two, v->count, true, v->student_size, begin);
        v->count = xdi_votes_combine(v, two, one);
        v->capacity = room;
        xd_release(v->ctx, v->cells);
        v->cells = one;
        *cells = v->cells;
        *count = v->count;
    } else {
        xd_release(v->ctx, one);
    }
    xd_release(v->ctx, two);
    xd_release(v->ctx, begin);
    return fits ? XD_OK : XDI_FAIL(v->ctx, XD_ERROR_MEMORY, "no room to sort %lld votes", (long long)v->count);
}

/* >>distill/special_pairs.c */

#include <string.h>

/* ---- the Ratcliff-Obershelp ratio: twice the characters in common over all characters ---- */

enum { XDI_SPECIAL_MOST = 512 }; /* bytes of a special token that are looked at */

/* Part of one string against part of the other. */
typedef struct xdi_special_range {
    int a0, a1, b0, b1;
} xdi_special_range;

/* The longest run that both parts have, the first in a, then in b. Returns its length. */
static int xdi_special_longest(const char *a, const char *b, const xdi_special_range *r, int *a_at,
                               int *b_at) {
    int runs[2][XDI_SPECIAL_MOST + 1], best = 0;
    memset(runs, 0, sizeof runs);
    *a_at = r->a0;
    *b_at = r->b0;
    for (int i = r->a0; i < r->a1; i++) {
        int *now = runs[i & 1], *before = runs[(i + 1) & 1];
        for (int j = r->b0; j < r->b1; j++) {
            const int length = a[i] == b[j] ? 1 + (j > r->b0 ? before[j - r->b0 - 1] : 0) : 0;
            now[j - r->b0] = length;
            if (length <= best) continue;
            best = length;
            *a_at = i - length + 1;
            *b_at = j - length + 1;
        }
    }
    return best;
}

/* Characters in common: those of the longest run, and of what is left of it and right of it. The parts that
 * wait are disjoint and not empty, so there are never more of them than characters. */
static int xdi_special_common(const char *a, int n, const char *b, int m) {
    xdi_special_range waiting[XDI_SPECIAL_MOST + 2];
    int count = 1, common = 0;
    waiting[0].a0 = waiting[0].b0 = 0;
    waiting[0].a1 = n;
    waiting[0].b1 = m;
    while (count > 0) {
        const xdi_special_range r = waiting[--count];
        int i, j;
        if (r.a0 >= r.a1 || r.b0 >= r.b1) continue;
        const int length = xdi_special_longest(a, b, &r, &i, &j);
        if (length == 0) continue;
        common += length;
        const xdi_special_range left = { r.a0, i, r.b0, j }, right = { i + length, r.a1, j + length, r.b1 };
        waiting[count++] = left;
        waiting[count++] = right;
    }
    return common;
}

/* ---- keywords ---- */

static char xdi_special_letter(char c) {
    if (c == '<' || c == '>' || c == '|' || c == '_') return ' ';
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static bool xdi_special_blank(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Distinct words longer than two letters of an already lowered string; [begin, end) of each. */
static int xdi_special_words(const char *text, int size, int (*words)[2]) {
    int count = 0;
    for (int i = 0; i < size;) {
        while (i < size && xdi_special_blank(text[i])) i++;
        const int begin = i;
        while (i < size && !xdi_special_blank(text[i])) i++;
        bool fresh = i - begin > 2;
        for (int k = 0; k < count && fresh; k++)
            fresh = words[k][1] - words[k][0] != i - begin ||
                    memcmp(text + words[k][0], text + begin, (size_t)(i - begin)) != 0;
        if (!fresh) continue;
        words[count][0] = begin;
        words[count++][1] = i;
    }
    return count;
}

static double xdi_special_jaccard(const char *a, int n, const char *b, int m) {
    int a_words[XDI_SPECIAL_MOST / 3][2], b_words[XDI_SPECIAL_MOST / 3][2], both = 0;
    const int a_count = xdi_special_words(a, n, a_words), b_count = xdi_special_words(b, m, b_words);
    for (int i = 0; i < a_count; i++)
        for (int j = 0; j < b_count; j++) {
            const int length = a_words[i][1] - a_words[i][0];
            both += length == b_words[j][1] - b_words[j][0] &&
                    memcmp(a + a_words[i][0], b + b_words[j][0], (size_t)length) == 0;
        }
    const int any = a_count + b_count - both;
    return any > 0 ? (double)both / (double)any : 0.0;
}

static double xdi_special_similarity(xd_text a, xd_text b) {
    char low_a[XDI_SPECIAL_MOST], low_b[XDI_SPECIAL_MOST];
    const int n = (int)a.size, m = (int)b.size;
    for (int i = 0; i < n; i++) low_a[i] = xdi_special_letter(a.data[i]);
    for (int i = 0; i < m; i++) low_b[i] = xdi_special_letter(b.data[i]);
    const double ratio = 2.0 * xdi_special_common(a.data, n, b.data, m) / (double)(n + m);
    return 0.6 * ratio + 0.4 * xdi_special_jaccard(low_a, n, low_b, m);
}

/* ---- pairs ---- */

static bool xdi_special_is(xd_text text) {
    return text.size >= 2 && text.size <= XDI_SPECIAL_MOST && text.data[0] == '<' &&
           text.data[text.size - 1] == '>';
}

/* Puts a pair into the descending list of one student token, behind its equals. */
static int64_t xdi_special_insert(xd_special_pair *list, int64_t n, int64_t most, xd_special_pair pair) {
    int64_t at = n;
    while (at > 0 && list[at - 1].similarity < pair.similarity) at--;
    if (at == most) return n;
    const int64_t kept = n < most ? n : most - 1;
    memmove(list + at + 1, list + at, (size_t)(kept - at) * sizeof *list);
    list[at] = pair;
    return kept + 1;
}

static int64_t xdi_special_count(const xd_text *texts, int64_t count) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) n += xdi_special_is(texts[i]);
    return n;
}

XD_API xd_result xd_special_pairs(xd_ctx *ctx, const xd_special_desc *desc, xd_special_pair **pairs,
                                  int64_t *count) {
    const double threshold = desc->threshold != 0.0 ? desc->threshold : 0.3;
    const int64_t teachers = xdi_special_count(desc->teacher, desc->teacher_count);
    int64_t most = desc->most_pairs ? desc->most_pairs : 32, n = 0;
    if (most > teachers) most = teachers;
    const int64_t students = xdi_special_count(desc->student, desc->student_count);
    const size_t room = (size_t)students * (size_t)most;
    xd_special_pair *list = (xd_special_pair *)xd_allocate(ctx, room * sizeof *list);
    XDI_REQUIRE(ctx, list, XD_ERROR_MEMORY, "no room for %zu pairs of special tokens", room);
    for (int64_t s = 0; s < desc->student_count && most > 0; s++) {
        int64_t mine = 0;
        if (!xdi_special_is(desc->student[s])) continue;
        for (int64_t t = 0; t < desc->teacher_count; t++) {
            if (!xdi_special_is(desc->teacher[t])) continue;
            const xd_special_pair pair = { s, t, xdi_special_similarity(desc->student[s], desc->teacher[t]) };
            if (pair.similarity >= threshold) mine = xdi_special_insert(list + n, mine, most, pair);
        }
        n += mine;
    }
    *pairs = list;
    *count = n;
    return XD_OK;
}

/* >>distill/projection_rows.c */

#include <math.h>
#include <string.h>

/* ---- rows of the k best ---- */

static xd_result xdi_rows_create(xd_ctx *ctx, int64_t rows, int64_t k, xd_projection_rows *out) {
    XDI_REQUIRE(ctx, k >= 1 && k <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld entries a row", (long long)k);
    const size_t count = (size_t)rows * (size_t)k;
    out->ids = (int32_t *)xd_allocate(ctx, count * (sizeof *out->ids + sizeof *out->weights));
    XDI_REQUIRE(ctx, out->ids, XD_ERROR_MEMORY, "no room for %lld rows of %lld entries", (long long)rows,
                (long long)k);
    out->weights = (float *)(void *)(out->ids + count);
    out->rows = rows;
    out->k = k;
    for (size_t i = 0; i < count; i++) out->ids[i] = -1;
    return XD_OK;
}

XD_API void xd_projection_rows_free(xd_ctx *ctx, xd_projection_rows *rows) {
    xd_release(ctx, rows->ids);
    memset(rows, 0, sizeof *rows);
}

/* The number bf16 has for a value. */
static float xdi_rows_narrow(float value) {
    return xd_f32_from_bf16(xd_bf16_from_f32(value));
}

/* Divides a row by its sum; compat: the sum and the quotients are bf16. */
static void xdi_rows_normalise(float *weights, int64_t k, bool compat) {
    double sum = 0.0;
    float narrow = 0.0f;
    for (int64_t i = 0; i < k; i++) {
        sum += (double)weights[i];
        narrow += weights[i];
    }
    narrow = xdi_rows_narrow(narrow);
    if (sum == 0.0) return;
    for (int64_t i = 0; i < k; i++)
        weights[i] = compat ? xdi_rows_narrow(weights[i] / narrow) : (float)((double)weights[i] / sum);
}

XD_API void xd_normalise_rows(double *matrix, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++) {
        double *row = matrix + r * columns, sum = 0.0;
        for (int64_t c = 0; c < columns; c++) sum += row[c];
        for (int64_t c = 0; c < columns && sum != 0.0; c++) row[c] /= sum;
    }
}

/* One row's list of the best, by weight, then id. */
typedef struct xdi_rows_best {
    int32_t *ids;
    float *weights;
    int64_t count, k;
} xdi_rows_best;

static void xdi_rows_offer(xdi_rows_best *best, int32_t id, float weight) {
    int64_t at = best->count;
    while (at > 0 && best->weights[at - 1] < weight) at--;
    if (at == best->k) return;
    if (best->count < best->k) best->count++;
    for (int64_t i = best->count - 1; i > at; i--) {
        best->ids[i] = best->ids[i - 1];
        best->weights[i] = best->weights[i - 1];
    }
    best->ids[at] = id;
    best->weights[at] = weight;
}

/* ---- from votes ---- */

/* Free slots hold the lowest ids that the row does not have. */
static void xdi_rows_fill(xdi_rows_best *best, int64_t teacher_size) {
    for (int32_t id = 0; best->count < best->k && id < teacher_size; id++) {
        bool taken = false;
        for (int64_t i = 0; i < best->count && !taken; i++) taken = best->ids[i] == id;
        if (!taken) best->ids[best->count++] = id;
    }
}

/* Cells of one student id, ascending by teacher id, to its row. */
static void xdi_rows_from_cells(const xd_vote *cells, int64_t count, const xd_projection_rows_desc *desc,
                                int64_t teacher_size, xdi_rows_best *best) {
    double sum = 0.0;
    float narrow = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        sum += cells[i].weight;
        narrow += xdi_rows_narrow((float)cells[i].weight);
    }
    narrow = xdi_rows_narrow(narrow);
    for (int64_t i = 0; i < count && sum > 0.0; i++) {
        const float share = desc->compat ? xdi_rows_narrow(xdi_rows_narrow((float)cells[i].weight) / narrow)
                                         : (float)(cells[i].weight / sum);
        if (share > 0.0f) xdi_rows_offer(best, cells[i].teacher_id, share);
    }
    if (desc->compat) xdi_rows_fill(best, teacher_size);
    if (desc->scale_trick) best->weights[best->k - 1] = xdi_rows_narrow(0.2f);
    if (desc->scale_trick || !desc->compat) xdi_rows_normalise(best->weights, best->k, desc->compat);
}

XD_API xd_result xd_projection_rows_from_votes(xd_votes *votes, const xd_projection_rows_desc *desc,
                                               xd_projection_rows *out) {
    const xd_vote *cells = NULL;
    int64_t count = 0, at = 0;
    xd_projection_rows rows;
    XDI_REQUIRE(votes->ctx, desc->compat || !desc->scale_trick, XD_ERROR_ARGUMENT,
                "the scale trick exists in compat rows only");
    XDI_TRY(xd_votes_read(votes, &cells, &count));
    XDI_TRY(xdi_rows_create(votes->ctx, votes->student_size, desc->k ? desc->k : 32, &rows));
    for (int64_t s = 0; s < rows.rows; s++) {
        xdi_rows_best best = { rows.ids + s * rows.k, rows.weights + s * rows.k, 0, rows.k };
        const int64_t begin = at;
        while (at < count && cells[at].student_id == s) at++;
        xdi_rows_from_cells(cells + begin, at - begin, desc, votes->teacher_size, &best);
    }
    *out = rows;
    return XD_OK;
}

/* ---- exact strings ---- */

typedef struct xdi_rows_string {
    xd_text text;
    int64_t id;
} xdi_rows_string;

static int xdi_rows_compare_text(xd_text a, xd_text b) {
    const int64_t common = a.size < b.size ? a.size : b.size;
    const int order = common > 0 ? memcmp(a.data, b.data, (size_t)common) : 0;
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

/* By text, the highest id first. */
static int xdi_rows_compare(const void *left, const void *right) {
    const xdi_rows_string *a = (const xdi_rows_string *)left, *b = (const xdi_rows_string *)right;
    const int order = xdi_rows_compare_text(a->text, b->text);
    return order != 0 ? order : (a->id < b->id) - (a->id > b->id);
}

/* First of the sorted strings that is not before text. */
static int64_t xdi_rows_find(const void *const *sorted, int64_t count, xd_text text) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (xdi_rows_compare_text(((const xdi_rows_string *)sorted[middle])->text, text) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void xdi_rows_set_exact(xd_projection_rows *rows, int64_t student_id, int64_t teacher_id) {
    int32_t *ids = rows->ids + student_id * rows->k;
    float *weights = rows->weights + student_id * rows->k;
    for (int64_t i = 0; i < rows->k; i++) {
        ids[i] = i == 0 ? (int32_t)teacher_id : -1;
        weights[i] = i == 0 ? 1.0f : 0.0f;
    }
}

XD_API xd_result xd_projection_rows_apply_exact(xd_ctx *ctx, xd_projection_rows *rows, const xd_text *student,
                                                int64_t student_count, const xd_text *teacher,
                                                int64_t teacher_count) {
    XDI_REQUIRE(ctx, student_count <= rows->rows, XD_ERROR_ARGUMENT,
                "%lld student strings for a projection of %lld rows", (long long)student_count,
                (long long)rows->rows);
    const size_t n = (size_t)teacher_count;
    xdi_rows_string *strings = (xdi_rows_string *)xd_allocate(ctx, n * (sizeof *strings + sizeof(void *)));
    XDI_REQUIRE(ctx, strings, XD_ERROR_MEMORY, "no room to sort %zu strings", n);
    const void **sorted = (const void **)(void *)(strings + n);
    for (size_t i = 0; i < n; i++) {
        strings[i].text = teacher[i];
        strings[i].id = (int64_t)i;
        sorted[i] = &strings[i];
    }
    xdi_sort(sorted, n, xdi_rows_compare);
    for (int64_t s = 0; s < student_count; s++) {
        const int64_t at = xdi_rows_find(sorted, teacher_count, student[s]);
        if (student[s].size == 0 || at == teacher_count) continue;
        const xdi_rows_string *found = (const xdi_rows_string *)sorted[at];
        if (xdi_rows_compare_text(found->text, student[s]) == 0) xdi_rows_set_exact(rows, s, found->id);
    }
    xd_release(ctx, strings);
    return XD_OK;
}

/* ---- cutting ---- */

static bool xdi_rows_valid(const xd_projection_rows *rows, int64_t at) {
    return rows->ids[at] >= 0 && rows->weights[at] > 0.0f;
}

static void xdi_rows_cut_row(const xd_projection_rows *in, int64_t r, const xd_projection_cut_desc *desc,
                             xd_projection_rows *out) {
    const int64_t begin = r * in->k, last = begin + in->k - 1;
    const bool keeps_last = desc->preserve_last && xdi_rows_valid(in, last);
    xdi_rows_best best = { out->ids + r * out->k, out->weights + r * out->k, 0,
                           desc->preserve_last ? out->k - 1 : out->k };
    int64_t valid = 0;
    for (int64_t i = begin; i <= last; i++) valid += xdi_rows_valid(in, i);
    const int64_t most = desc->preserve_last && valid > in->k - 1 ? in->k - 1 : valid;
    for (int64_t i = begin, taken = 0; i <= last && taken < most; i++) {
        if (!xdi_rows_valid(in, i)) continue;
        if (best.k > 0) xdi_rows_offer(&best, in->ids[i], in->weights[i]);
        taken++;
    }
    if (keeps_last) {
        out->ids[r * out->k + out->k - 1] = in->ids[last];
        out->weights[r * out->k + out->k - 1] = in->weights[last];
    }
    xdi_rows_normalise(out->weights + r * out->k, out->k, desc->compat);
}

XD_API xd_result xd_projection_rows_cut(xd_ctx *ctx, const xd_projection_rows *rows,
                                        const xd_projection_cut_desc *desc, xd_projection_rows *out) {
    xd_projection_rows made;
    XDI_TRY(xdi_rows_create(ctx, rows->rows, desc->k ? desc->k : 4, &made));
    for (int64_t r = 0; r < rows->rows; r++) xdi_rows_cut_row(rows, r, desc, &made);
    *out = made;
    return XD_OK;
}

/* ---- similarities ---- */

static double xdi_rows_magnitude(float similarity) {
    const double value = fabs((double)similarity);
    return value > 0.999999999 ? 1.0 : value;
}

static void xdi_rows_similar_row(const float *similarities, int64_t columns, double threshold,
                                 xdi_rows_best *best) {
    double largest = 0.0, sum = 0.0;
    for (int64_t c = 0; c < columns; c++) {
        const double value = xdi_rows_magnitude(similarities[c]);
        if (value > largest) largest = value;
    }
    for (int64_t c = 0; c < columns; c++) sum += pow(xdi_rows_magnitude(similarities[c]), 10.0 * largest);
    for (int64_t c = 0; c < columns; c++) {
        const double power = pow(xdi_rows_magnitude(similarities[c]), 10.0 * largest);
        xdi_rows_offer(best, (int32_t)c, (float)(sum > 0.0 ? power / sum : power));
    }
    for (int64_t i = 0; i < best->count; i++)
        if ((double)best->weights[i] < threshold) best->ids[i] = -1;
}

static xd_result xdi_rows_check_columns(xd_ctx *ctx, int64_t columns) {
    XDI_REQUIRE(ctx, columns >= 0 && columns <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld teacher ids",
                (long long)columns);
    return XD_OK;
}

XD_API xd_result xd_projection_rows_from_similarities(xd_ctx *ctx, const float *similarities, int64_t rows,
                                                      int64_t columns, int64_t k, double threshold,
                                                      xd_projection_rows *out) {
    xd_projection_rows made;
    XDI_TRY(xdi_rows_check_columns(ctx, columns));
    XDI_TRY(xdi_rows_create(ctx, rows, k, &made));
    for (int64_t r = 0; r < rows; r++) {
        xdi_rows_best best = { made.ids + r * k, made.weights + r * k, 0, k };
        xdi_rows_similar_row(similarities + r * columns, columns, threshold, &best);
    }
    *out = made;
    return XD_OK;
}

static double xdi_rows_dot(const float *a, const float *b, int64_t width) {
    double sum = 0.0;
    for (int64_t i = 0; i < width; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

XD_API xd_result xd_projection_rows_from_embeddings(xd_ctx *ctx, const float *student, int64_t student_count,
                                                    const float *teacher, int64_t teacher_count,
                                                    int64_t width, int64_t k, double threshold,
                                                    xd_projection_rows *out) {
    xd_projection_rows made;
    XDI_TRY(xdi_rows_check_columns(ctx, teacher_count));
    float *cosines = (float *)xd_allocate(ctx, (size_t)teacher_count * sizeof *cosines);
    XDI_REQUIRE(ctx, cosines, XD_ERROR_MEMORY, "no room for %lld similarities", (long long)teacher_count);
    const xd_result result = xdi_rows_create(ctx, student_count, k, &made);
    for (int64_t r = 0; r < student_count && result == XD_OK; r++) {
        const float *row = student + r * width;
        const double length = sqrt(xdi_rows_dot(row, row, width));
        xdi_rows_best best = { made.ids + r * k, made.weights + r * k, 0, k };
        for (int64_t c = 0; c < teacher_count; c++) {
            const float *other = teacher + c * width;
            const double product = length * sqrt(xdi_rows_dot(other, other, width));
            cosines[c] = product > 0.0 ? (float)(xdi_rows_dot(row, other, width) / product) : 0.0f;
        }
        xdi_rows_similar_row(cosines, teacher_count, threshold, &best);
    }
    xd_release(ctx, cosines);
    if (result == XD_OK) *out = made;
    return result;
}

/* >>distill/projection.c */

#include <math.h>
#include <string.h>

/* ---- the sparse matrix ---- */

/* Memory of a projection with `entries` cells, in one block. */
static xd_result xdi_projection_create(xd_ctx *ctx, int64_t student_size, int64_t teacher_size,
                                       int64_t entries, xd_projection *out) {
    const size_t begins = (size_t)(student_size + teacher_size + 2) * sizeof(int64_t);
    const size_t cells = (size_t)entries * (2 * sizeof(int32_t) + 2 * sizeof(float));
    char *memory = (char *)xd_allocate(ctx, begins + cells);
    XDI_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for a projection of %lld entries", (long long)entries);
    int64_t *begin = (int64_t *)(void *)memory;
    int32_t *ids = (int32_t *)(void *)(memory + begins);
    float *weights = (float *)(void *)(ids + 2 * entries);
    out->student_size = student_size;
    out->teacher_size = teacher_size;
    out->entries = entries;
    out->row_begin = begin;
    out->column_begin = begin + student_size + 1;
    out->teacher_id = ids;
    out->student_id = ids + entries;
    out->weight = weights;
    out->column_weight = weights + entries;
    return XD_OK;
}

XD_API void xd_projection_free(xd_ctx *ctx, xd_projection *projection) {
    xd_release(ctx, (void *)projection->row_begin);
    memset(projection, 0, sizeof *projection);
}

/* From sorted cells without repetition: rows, then the transposed matrix by counting. */
static void xdi_projection_fill(const xd_vote *cells, xd_projection *p) {
    int64_t *row = (int64_t *)p->row_begin, *column = (int64_t *)p->column_begin;
    int32_t *teacher = (int32_t *)p->teacher_id, *student = (int32_t *)p->student_id;
    float *weight = (float *)p->weight, *column_weight = (float *)p->column_weight;
    for (int64_t i = 0; i < p->entries; i++) {
        row[cells[i].student_id + 1]++;
        column[cells[i].teacher_id + 1]++;
        teacher[i] = cells[i].teacher_id;
        weight[i] = (float)cells[i].weight;
    }
    for (int64_t s = 0; s < p->student_size; s++) row[s + 1] += row[s];
    for (int64_t t = 0; t < p->teacher_size; t++) column[t + 1] += column[t];
    for (int64_t i = 0; i < p->entries; i++) {
        const int64_t at = column[cells[i].teacher_id]++; /* begins move to ends ... */
        student[at] = cells[i].student_id;
        column_weight[at] = weight[i];
    }
    for (int64_t t = p->teacher_size; t > 0; t--) column[t] = column[t - 1]; /* ... and back */
    column[0] = 0;
}

XD_API xd_result xd_projection_from_cells(xd_ctx *ctx, const xd_vote *cells, int64_t count,
                                          int64_t student_size, int64_t teacher_size, xd_projection *out) {
    const xd_vote *sorted = NULL;
    xd_votes *votes = NULL;
    int64_t entries = 0;
    for (int64_t i = 0; i < count; i++) {
        XDI_REQUIRE(ctx, cells[i].weight >= 0.0 && cells[i].weight <= 3e38, XD_ERROR_ARGUMENT,
                    "weight %g of ids %d and %d is negative or not finite", cells[i].weight,
                    (int)cells[i].student_id, (int)cells[i].teacher_id);
        if (cells[i].student_id >= student_size) student_size = (int64_t)cells[i].student_id + 1;
        if (cells[i].teacher_id >= teacher_size) teacher_size = (int64_t)cells[i].teacher_id + 1;
    }
    XDI_TRY(xd_votes_create(ctx, student_size, teacher_size, &votes));
    xd_result result = XD_OK;
    for (int64_t i = 0; i < count && result == XD_OK; i++)
        result = xd_votes_add(votes, cells[i].student_id, cells[i].teacher_id, cells[i].weight);
    if (result == XD_OK) result = xd_votes_read(votes, &sorted, &entries);
    if (result == XD_OK) result = xdi_projection_create(ctx, student_size, teacher_size, entries, out);
    if (result == XD_OK) xdi_projection_fill(sorted, out);
    xd_votes_destroy(votes);
    return result;
}

XD_API xd_result xd_projection_from_rows(xd_ctx *ctx, const xd_projection_rows *rows, int64_t student_size,
                                         int64_t teacher_size, xd_projection *out) {
    const size_t most = (size_t)rows->rows * (size_t)rows->k;
    int64_t count = 0;
    xd_vote *cells = (xd_vote *)xd_allocate(ctx, most * sizeof *cells);
    XDI_REQUIRE(ctx, cells, XD_ERROR_MEMORY, "no room for %zu entries", most);
    for (int64_t r = 0; r < rows->rows; r++)
        for (int64_t i = r * rows->k; i < (r + 1) * rows->k; i++) {
            if (rows->ids[i] < 0) continue;
            cells[count].student_id = (int32_t)r;
            cells[count].teacher_id = rows->ids[i];
            cells[count++].weight = (double)rows->weights[i];
        }
    const xd_result result = xd_projection_from_cells(ctx, cells, count, student_size, teacher_size, out);
    xd_release(ctx, cells);
    return result;
}

/* ---- the exact map ---- */

/* Place of the row's largest weight, the first stored among equals. */
static int64_t xdi_exact_best(const xd_projection_rows *rows, int64_t r) {
    int64_t best = r * rows->k;
    for (int64_t i = best + 1; i < (r + 1) * rows->k; i++)
        if (rows->weights[i] > rows->weights[best]) best = i;
    return best;
}

static bool xdi_exact_candidate(const xd_projection_rows *rows, int64_t r, int64_t teacher_size,
                                bool relaxed) {
    const int64_t best = xdi_exact_best(rows, r);
    const int32_t id = rows->ids[best];
    if (id < 0 || id >= teacher_size) return false;
    if (relaxed) return rows->weights[best] >= 0.6f;
    return rows->weights[best] == 1.0f && rows->ids[r * rows->k + 1] == -1;
}

/* owner[t] = the student id that has teacher id t, or -1. */
static void xdi_exact_owners(const xd_projection_rows *rows, int64_t teacher_size, bool relaxed,
                             int32_t *owner) {
    for (int64_t t = 0; t < teacher_size; t++) owner[t] = -1;
    for (int64_t r = 0; r < rows->rows; r++) {
        if (!xdi_exact_candidate(rows, r, teacher_size, relaxed)) continue;
        const int64_t best = xdi_exact_best(rows, r);
        int32_t *mine = &owner[rows->ids[best]];
        if (*mine < 0 || (relaxed && rows->weights[best] > rows->weights[xdi_exact_best(rows, *mine)]))
            *mine = (int32_t)r;
    }
}

static void xdi_exact_fill(const xd_projection_rows *rows, int64_t teacher_size, bool relaxed,
                           const int32_t *owner, xd_exact_map *map) {
    for (int64_t r = 0; r < rows->rows; r++) {
        const int32_t id = rows->ids[xdi_exact_best(rows, r)];
        if (xdi_exact_candidate(rows, r, teacher_size, relaxed) && owner[id] == (int32_t)r) {
            map->student[map->pairs] = (int32_t)r;
            map->teacher[map->pairs++] = id;
        } else {
            map->student_rest[map->student_rest_count++] = (int32_t)r;
        }
    }
    for (int64_t t = 0; t < teacher_size; t++)
        if (owner[t] < 0) map->teacher_rest[map->teacher_rest_count++] = (int32_t)t;
}

XD_API xd_result xd_exact_map_create(xd_ctx *ctx, const xd_projection_rows *rows, int64_t teacher_size,
                                     bool relaxed, xd_exact_map *out) {
    XDI_REQUIRE(ctx, relaxed || rows->k >= 2, XD_ERROR_ARGUMENT,
                "the strict exact map needs 2 entries a row, the projection has %lld", (long long)rows->k);
    XDI_REQUIRE(ctx, teacher_size >= 0 && teacher_size <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld teacher ids",
                (long long)teacher_size);
    const size_t n = (size_t)rows->rows, m = (size_t)teacher_size;
    int32_t *memory = (int32_t *)xd_allocate(ctx, (3 * n + m) * sizeof *memory);
    int32_t *owner = (int32_t *)xd_allocate(ctx, m * sizeof *owner);
    if (memory && owner) {
        memset(out, 0, sizeof *out);
        out->student = memory;
        out->teacher = memory + n;
        out->student_rest = memory + 2 * n;
        out->teacher_rest = memory + 3 * n;
        xdi_exact_owners(rows, teacher_size, relaxed, owner);
        xdi_exact_fill(rows, teacher_size, relaxed, owner, out);
    } else {
        xd_release(ctx, memory);
        memory = NULL;
    }
    xd_release(ctx, owner);
    return memory ? XD_OK
                  : XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for a map of %zu and %zu ids", n, m);
}

XD_API void xd_exact_map_free(xd_ctx *ctx, xd_exact_map *map) {
    xd_release(ctx, map->student);
    memset(map, 0, sizeof *map);
}


/* >>io/internal */

/* safetensors.c: what a writer checks about one tensor; *bytes is its size. */
XD_PRIVATE xd_result xdi_safetensors_check_entry(xd_ctx *ctx, const xd_safetensors_entry *e, uint64_t *bytes);

/* safetensors.c: does a text that the JSON writer made read back? Finds repeated names and keys in O(n log n). */
XD_PRIVATE xd_result xdi_safetensors_check_header(xd_ctx *ctx, const char *text, size_t bytes);

/* >>io/safetensors.c */

#include <string.h>

enum {
    XDI_SAFETENSORS_LIMIT = 100000000, /* header bytes */
    XDI_SAFETENSORS_NAME = 65536,
    XDI_SAFETENSORS_DIMS = 64,
    XDI_SAFETENSORS_GAP = 256 * 1024, /* bytes between two pieces that are worth a second read */
    XDI_SAFETENSORS_STAGE = 1024 * 1024
};

#define XDI_SAFETENSORS_METADATA "__metadata__"

struct xd_safetensors {
    xd_ctx *ctx;
    char *path; /* for messages */
    xd_json *header;
    xd_safetensors_info *infos; /* [count], by name */
    int64_t *shapes;            /* of all tensors */
    int64_t count;
    uint64_t size, data;        /* of the file; where the data area starts */
    const unsigned char *bytes; /* the whole file; NULL in stream mode */
    void *owned;                /* bytes, when they were read into memory of ours */
    bool mapped, open, skip_unknown;
    intptr_t file;
};

/* ---- the header ---- */

static uint64_t xdi_safetensors_load_u64(const unsigned char *p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
    return value;
}

/* Bytes of a tensor; false when a size is negative or the product overflows. */
static bool xdi_safetensors_bytes(xd_dtype dtype, int ndim, const int64_t *shape, uint64_t *bytes) {
    uint64_t total = xd_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        const uint64_t size = (uint64_t)shape[i];
        if (shape[i] < 0 || (size > 0 && total > (uint64_t)INT64_MAX / size)) return false;
        total *= size;
    }
    *bytes = total;
    return true;
}

static xd_result xdi_safetensors_parse_shape(xd_safetensors *f, const xd_json *shape,
                                             xd_safetensors_info *info, int64_t *sizes) {
    const size_t ndim = xd_json_count(shape);
    XDI_REQUIRE(f->ctx, xd_json_kind_of(shape) == XD_JSON_ARRAY, XD_ERROR_FORMAT,
                "%s: tensor \"%.80s\" has no shape", f->path, info->name);
    XDI_REQUIRE(f->ctx, ndim <= XDI_SAFETENSORS_DIMS, XD_ERROR_FORMAT,
                "%s: tensor \"%.80s\" has %llu dimensions, allowed are %d", f->path, info->name,
                (unsigned long long)ndim, (int)XDI_SAFETENSORS_DIMS);
    info->ndim = (int)ndim;
    info->shape = sizes;
    for (size_t i = 0; i < ndim; i++)
        XDI_REQUIRE(f->ctx, xd_json_int64(xd_json_at(shape, i), &sizes[i]) && sizes[i] >= 0, XD_ERROR_FORMAT,
                    "%s: tensor \"%.80s\": size %llu of its shape is no non-negative integer", f->path,
                    info->name, (unsigned long long)i);
    return XD_OK;
}

/* Fills one info from its entry. An unknown dtype gives XD_DTYPE_NONE when such tensors are skipped. */
static xd_result xdi_safetensors_parse_entry(xd_safetensors *f, const xd_json *entry,
                                             xd_safetensors_info *info, int64_t *sizes) {
    size_t name_bytes;
    info->name = xd_json_key(entry, &name_bytes);
    XDI_REQUIRE(f->ctx, name_bytes <= XDI_SAFETENSORS_NAME, XD_ERROR_FORMAT,
                "%s: a name of %llu bytes, allowed are %d", f->path, (unsigned long long)name_bytes,
                (int)XDI_SAFETENSORS_NAME);
    const char *dtype = xd_json_string(xd_json_find(entry, "dtype"), NULL);
    XDI_REQUIRE(f->ctx, dtype, XD_ERROR_FORMAT, "%s: tensor \"%.80s\" has no dtype", f->path, info->name);
    info->dtype = strcmp(dtype, "NONE") == 0 ? XD_DTYPE_NONE : xd_dtype_from_name(dtype);
    XDI_REQUIRE(f->ctx, info->dtype != XD_DTYPE_NONE || f->skip_unknown, XD_ERROR_FORMAT,
                "%s: tensor \"%.80s\" has the unknown dtype \"%.20s\"", f->path, info->name, dtype);
    XDI_TRY(xdi_safetensors_parse_shape(f, xd_json_find(entry, "shape"), info, sizes));

    const xd_json *offsets = xd_json_find(entry, "data_offsets");
    XDI_REQUIRE(f->ctx,
                xd_json_kind_of(offsets) == XD_JSON_ARRAY && xd_json_count(offsets) == 2 &&
                    xd_json_uint64(xd_json_at(offsets, 0), &info->begin) &&
                    xd_json_uint64(xd_json_at(offsets, 1), &info->end),
                XD_ERROR_FORMAT, "%s: tensor \"%.80s\": data_offsets are not two non-negative integers",
                f->path, info->name);
    XDI_REQUIRE(f->ctx, info->begin <= info->end, XD_ERROR_FORMAT,
                "%s: tensor \"%.80s\" begins at %llu but ends at %llu", f->path, info->name,
                (unsigned long long)info->begin, (unsigned long long)info->end);
    uint64_t bytes = 0;
    if (info->dtype == XD_DTYPE_NONE) return XD_OK;
    XDI_REQUIRE(f->ctx, xdi_safetensors_bytes(info->dtype, info->ndim, info->shape, &bytes), XD_ERROR_FORMAT,
                "%s: the size of tensor \"%.80s\" overflows", f->path, info->name);
    XDI_REQUIRE(f->ctx, bytes == info->end - info->begin, XD_ERROR_FORMAT,
                "%s: tensor \"%.80s\" needs %llu bytes but its offsets span %llu", f->path, info->name,
                (unsigned long long)bytes, (unsigned long long)(info->end - info->begin));
    return XD_OK;
}

static xd_result xdi_safetensors_check_metadata(xd_safetensors *f, const xd_json *metadata) {
    const xd_json_kind kind = xd_json_kind_of(metadata);
    XDI_REQUIRE(f->ctx, kind == XD_JSON_NONE || kind == XD_JSON_NULL || kind == XD_JSON_OBJECT,
                XD_ERROR_FORMAT, "%s: __metadata__ is no object", f->path);
    for (const xd_json *pair = xd_json_first(metadata); pair; pair = xd_json_next(pair))
        XDI_REQUIRE(f->ctx, xd_json_string(pair, NULL), XD_ERROR_FORMAT,
                    "%s: metadata \"%.80s\" is no string", f->path, xd_json_key(pair, NULL));
    return XD_OK;
}

/* Room for the infos and for the sizes of all shapes. */
static xd_result xdi_safetensors_reserve(xd_safetensors *f) {
    size_t tensors = 0, sizes = 0;
    for (const xd_json *entry = xd_json_first(f->header); entry; entry = xd_json_next(entry)) {
        tensors++;
        sizes += xd_json_count(xd_json_find(entry, "shape"));
    }
    f->infos = (xd_safetensors_info *)xd_allocate(f->ctx, tensors * sizeof *f->infos);
    f->shapes = (int64_t *)xd_allocate(f->ctx, sizes * sizeof *f->shapes);
    XDI_REQUIRE(f->ctx, f->infos && f->shapes, XD_ERROR_MEMORY, "%s: no room for %llu tensors", f->path,
                (unsigned long long)tensors);
    return XD_OK;
}

static int xdi_safetensors_by_offset(const void *a, const void *b) {
    const xd_safetensors_info *x = (const xd_safetensors_info *)a, *y = (const xd_safetensors_info *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The tensors tile the data area: no hole, no overlap, no byte after the last one. */
static xd_result xdi_safetensors_check_tiles(xd_safetensors *f) {
    const size_t count = (size_t)f->count;
    const void **order = (const void **)xd_allocate(f->ctx, count * sizeof *order);
    XDI_REQUIRE(f->ctx, order, XD_ERROR_MEMORY, "%s: no room to sort %llu tensors", f->path,
                (unsigned long long)count);
    for (size_t i = 0; i < count; i++) order[i] = &f->infos[i];
    xdi_sort(order, count, xdi_safetensors_by_offset);
    uint64_t end = 0;
    xd_result result = XD_OK;
    for (size_t i = 0; i < count && result == XD_OK; i++) {
        const xd_safetensors_info *info = (const xd_safetensors_info *)order[i];
        if (info->begin != end)
            result = XDI_FAIL(f->ctx, XD_ERROR_FORMAT,
                              "%s: tensor \"%.80s\" begins at %llu, the one before ends at %llu", f->path,
                              info->name, (unsigned long long)info->begin, (unsigned long long)end);
        end = info->end;
    }
    xd_release(f->ctx, order);
    XDI_TRY(result);
    XDI_REQUIRE(f->ctx, end == f->size - f->data, XD_ERROR_FORMAT,
                "%s: the tensors end at %llu but there are %llu bytes", f->path, (unsigned long long)end,
                (unsigned long long)(f->size - f->data));
    return XD_OK;
}

/* Takes the tensors out of the parsed header, in the order of their names. */
static xd_result xdi_safetensors_collect(xd_safetensors *f) {
    XDI_REQUIRE(f->ctx, xd_json_kind_of(f->header) == XD_JSON_OBJECT, XD_ERROR_FORMAT,
                "%s: the header is no object", f->path);
    XDI_TRY(xdi_safetensors_check_metadata(f, xd_json_find(f->header, XDI_SAFETENSORS_METADATA)));
    XDI_TRY(xdi_safetensors_reserve(f));
    int64_t *sizes = f->shapes;
    for (size_t i = 0; i < xd_json_count(f->header); i++) {
        const xd_json *entry = xd_json_by_key(f->header, i);
        if (strcmp(xd_json_key(entry, NULL), XDI_SAFETENSORS_METADATA) == 0) continue;
        xd_safetensors_info *info = &f->infos[f->count++];
        XDI_TRY(xdi_safetensors_parse_entry(f, entry, info, sizes));
        sizes += info->ndim;
    }
    XDI_TRY(xdi_safetensors_check_tiles(f));
    int64_t kept = 0; /* skipped tensors were needed for the tiling only */
    for (int64_t i = 0; i < f->count; i++)
        if (f->infos[i].dtype != XD_DTYPE_NONE) f->infos[kept++] = f->infos[i];
    f->count = kept;
    return XD_OK;
}

static xd_result xdi_safetensors_parse(xd_safetensors *f, const char *header, size_t bytes) {
    xd_json_desc limits;
    memset(&limits, 0, sizeof limits);
    limits.max_bytes = bytes;
    limits.max_depth = 4;
    const xd_result result = xd_json_parse(f->ctx, &limits, header, bytes, &f->header);
    XDI_REQUIRE(f->ctx, result == XD_OK, result, "%s: header: %s", f->path, xd_last_error(f->ctx)->message);
    return xdi_safetensors_collect(f);
}

/* ---- opening ---- */

static xd_result xdi_safetensors_read(xd_safetensors *f, void *to, size_t bytes, uint64_t offset) {
    if (f->bytes) {
        if (bytes) memcpy(to, f->bytes + offset, bytes);
        return XD_OK;
    }
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    const int error = bytes ? files->read(files->user, f->file, to, bytes, offset) : 0;
    XDI_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: read of %llu bytes at %llu: %s", f->path,
                (unsigned long long)bytes, (unsigned long long)offset, strerror(error));
    return XD_OK;
}

/* The first checks, on numbers alone; then the header text, read or in place, goes to the parser. */
static xd_result xdi_safetensors_header(xd_safetensors *f, size_t max_header_bytes) {
    unsigned char prefix[8];
    XDI_REQUIRE(f->ctx, f->size >= 8, XD_ERROR_FORMAT, "%s has %llu bytes, the shortest file has 8", f->path,
                (unsigned long long)f->size);
    XDI_TRY(xdi_safetensors_read(f, prefix, sizeof prefix, 0));
    const uint64_t length = xdi_safetensors_load_u64(prefix);
    const uint64_t limit = max_header_bytes ? max_header_bytes : (uint64_t)XDI_SAFETENSORS_LIMIT;
    XDI_REQUIRE(f->ctx, length <= limit, XD_ERROR_FORMAT, "%s: a header of %llu bytes, allowed are %llu",
                f->path, (unsigned long long)length, (unsigned long long)limit);
    XDI_REQUIRE(f->ctx, length <= f->size - 8, XD_ERROR_FORMAT,
                "%s: a header of %llu bytes in a file of %llu", f->path, (unsigned long long)length,
                (unsigned long long)f->size);
    f->data = 8 + length;
    if (f->bytes) return xdi_safetensors_parse(f, (const char *)f->bytes + 8, (size_t)length);

    char *text = (char *)xd_allocate(f->ctx, (size_t)length);
    XDI_REQUIRE(f->ctx, text, XD_ERROR_MEMORY, "%s: no room for a header of %llu bytes", f->path,
                (unsigned long long)length);
    xd_result result = xdi_safetensors_read(f, text, (size_t)length, 8);
    if (result == XD_OK) result = xdi_safetensors_parse(f, text, (size_t)length);
    xd_release(f->ctx, text);
    return result;
}

/* Map mode: the file in memory, mapped where that works. */
static xd_result xdi_safetensors_map(xd_safetensors *f) {
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    const void *address = NULL;
    if (f->size < 8) return XD_OK; /* the header check says it better; and nothing maps an empty file */
    f->mapped = files->map && files->map(files->user, f->file, f->size, &address) == 0;
    if (f->mapped) {
        f->bytes = (const unsigned char *)address;
        return XD_OK;
    }
    void *memory = f->size < SIZE_MAX ? xd_allocate(f->ctx, (size_t)f->size) : NULL;
    XDI_REQUIRE(f->ctx, memory, XD_ERROR_MEMORY, "%s: no room for %llu bytes", f->path,
                (unsigned long long)f->size);
    f->owned = memory;
    XDI_TRY(xdi_safetensors_read(f, memory, (size_t)f->size, 0));
    f->bytes = (const unsigned char *)memory;
    return XD_OK;
}

static xd_result xdi_safetensors_open_file(xd_safetensors *f, const xd_safetensors_desc *d) {
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    int error = files->open(files->user, f->path, XD_FILE_READ, &f->file);
    XDI_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: open: %s", f->path, strerror(error));
    f->open = true;
    error = files->size(files->user, f->file, &f->size);
    XDI_REQUIRE(f->ctx, error == 0, XD_ERROR_IO, "%s: size: %s", f->path, strerror(error));
    if (d->mode == XD_SAFETENSORS_MAP) XDI_TRY(xdi_safetensors_map(f));
    return xdi_safetensors_header(f, d->max_header_bytes);
}

static xd_safetensors *xdi_safetensors_new(xd_ctx *ctx, const char *path, const xd_safetensors_desc *d) {
    const size_t length = strlen(path) + 1;
    xd_safetensors *f = (xd_safetensors *)xd_allocate(ctx, sizeof *f + length);
    if (!f) return NULL;
    f->ctx = ctx;
    f->path = (char *)(f + 1);
    f->skip_unknown = d->skip_unknown;
    memcpy(f->path, path, length);
    return f;
}

/* Publishes the object, or takes it down again. */
static xd_result xdi_safetensors_finish(xd_safetensors *f, xd_result result, xd_safetensors **out) {
    if (result == XD_OK)
        *out = f;
    else
        xd_safetensors_close(f);
    return result;
}

static xd_safetensors_desc xdi_safetensors_defaults(const xd_safetensors_desc *desc) {
    xd_safetensors_desc d;
    memset(&d, 0, sizeof d);
    return desc ? *desc : d;
}

XD_API xd_result xd_safetensors_open(xd_ctx *ctx, const char *path, const xd_safetensors_desc *desc,
                                     xd_safetensors **out) {
    const xd_safetensors_desc d = xdi_safetensors_defaults(desc);
    xd_safetensors *f = xdi_safetensors_new(ctx, path, &d);
    XDI_REQUIRE(ctx, f, XD_ERROR_MEMORY, "%s: no room for a file object", path);
    return xdi_safetensors_finish(f, xdi_safetensors_open_file(f, &d), out);
}

XD_API xd_result xd_safetensors_open_memory(xd_ctx *ctx, const void *data, size_t bytes,
                                            const xd_safetensors_desc *desc, xd_safetensors **out) {
    const xd_safetensors_desc d = xdi_safetensors_defaults(desc);
    xd_safetensors *f = xdi_safetensors_new(ctx, "memory", &d);
    XDI_REQUIRE(ctx, f, XD_ERROR_MEMORY, "no room for a file object");
    f->bytes = (const unsigned char *)data;
    f->size = bytes;
    return xdi_safetensors_finish(f, xdi_safetensors_header(f, d.max_header_bytes), out);
}

XD_API void xd_safetensors_close(xd_safetensors *f) {
    if (!f) return;
    const xd_files *files = &xd_ctx_settings(f->ctx)->files;
    if (f->mapped) files->unmap(files->user, f->bytes, f->size);
    if (f->open) files->close(files->user, f->file);
    xd_release(f->ctx, f->owned);
    xd_release(f->ctx, f->infos);
    xd_release(f->ctx, f->shapes);
    xd_json_destroy(f->ctx, f->header);
    xd_release(f->ctx, f);
}

/* ---- looking ---- */

XD_API int64_t xd_safetensors_count(const xd_safetensors *f) {
    return f->count;
}

XD_API const xd_safetensors_info *xd_safetensors_at(const xd_safetensors *f, int64_t index) {
    return index >= 0 && index < f->count ? &f->infos[index] : NULL;
}

XD_API int64_t xd_safetensors_find(const xd_safetensors *f, const char *name) {
    int64_t low = 0, high = f->count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int order = strcmp(name, f->infos[middle].name);
        if (order == 0) return middle;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}

XD_API const char *xd_safetensors_metadata(const xd_safetensors *f, const char *key) {
    return xd_json_string(xd_json_find(xd_json_find(f->header, XDI_SAFETENSORS_METADATA), key), NULL);
}

XD_API bool xd_safetensors_metadata_at(const xd_safetensors *f, int64_t index, const char **key,
                                       const char **value) {
    if (index < 0) return false;
    const xd_json *pair = xd_json_by_key(xd_json_find(f->header, XDI_SAFETENSORS_METADATA), (size_t)index);
    if (!pair) return false;
    *key = xd_json_key(pair, NULL);
    *value = xd_json_string(pair, NULL);
    return true;
}

XD_API const void *xd_safetensors_data(const xd_safetensors *f, int64_t index) {
    const xd_safetensors_info *info = xd_safetensors_at(f, index);
    return info && f->bytes ? f->bytes + f->data + info->begin : NULL;
}

/* ---- reading ---- */

XD_API xd_result xd_safetensors_read_range(xd_safetensors *f, int64_t index, uint64_t first_byte,
                                           size_t bytes, void *destination) {
    const xd_safetensors_info *info = xd_safetensors_at(f, index);
    XDI_REQUIRE(f->ctx, info, XD_ERROR_ARGUMENT, "%s: tensor %lld of %lld", f->path, (long long)index,
                (long long)f->count);
    const uint64_t length = info->end - info->begin;
    XDI_REQUIRE(f->ctx, first_byte <= length && bytes <= length - first_byte, XD_ERROR_ARGUMENT,
                "%s: %llu bytes from %llu of tensor \"%.80s\", which has %llu", f->path,
                (unsigned long long)bytes, (unsigned long long)first_byte, info->name,
                (unsigned long long)length);
    return xdi_safetensors_read(f, destination, bytes, f->data + info->begin + first_byte);
}

/* A box as pieces that are contiguous in the file, all of the same length, in ascending order. */
typedef struct xdi_safetensors_box {
    const xd_safetensors_info *info;
    const int64_t *offset, *size;
    int outer;      /* dimensions that are stepped through; the others lie inside one piece */
    uint64_t piece; /* bytes */
    uint64_t first; /* file offset of the first piece */
    int64_t pieces;
    uint64_t stride[64]; /* bytes between neighbours along a dimension */
} xdi_safetensors_box;

static xdi_safetensors_box xdi_safetensors_plan(const xd_safetensors *f, const xd_safetensors_info *info,
                                                const int64_t *offset, const int64_t *size) {
    xdi_safetensors_box box;
    uint64_t stride = xd_dtype_size(info->dtype);
    bool inside = true; /* everything from this dimension on is taken whole */
    memset(&box, 0, sizeof box);
    box.info = info;
    box.offset = offset;
    box.size = size;
    box.piece = stride;
    box.pieces = 1;
    box.first = f->data + info->begin;
    for (int i = info->ndim - 1; i >= 0; i--) {
        box.stride[i] = stride;
        box.first += stride * (uint64_t)offset[i];
        if (inside) {
            box.piece *= (uint64_t)size[i];
            box.outer = i;
        } else {
            box.pieces *= size[i];
        }
        inside = inside && size[i] == info->shape[i];
        stride *= (uint64_t)info->shape[i];
    }
    return box;
}

/* Where piece `number` starts in the file. */
static uint64_t xdi_safetensors_piece(const xdi_safetensors_box *box, int64_t number) {
    uint64_t at = box->first;
    for (int i = box->outer - 1; i >= 0; i--) {
        at += (uint64_t)(number % box->size[i]) * box->stride[i];
        number /= box->size[i];
    }
    return at;
}

/* Pieces first, first + 1, ... that one read through the staging buffer serves; *end is where that read ends. */
static int64_t xdi_safetensors_group(const xdi_safetensors_box *box, int64_t first, uint64_t *end) {
    const uint64_t begin = xdi_safetensors_piece(box, first);
    int64_t count = 1;
    *end = begin + box->piece;
    for (; first + count < box->pieces; count++) {
        const uint64_t at = xdi_safetensors_piece(box, first + count);
        if (at - *end >= XDI_SAFETENSORS_GAP || at + box->piece - begin > XDI_SAFETENSORS_STAGE) break;
        *end = at + box->piece;
    }
    return count;
}

static xd_result xdi_safetensors_gather(xd_safetensors *f, const xdi_safetensors_box *box, unsigned char *to,
                                        unsigned char *stage) {
    for (int64_t i = 0; i < box->pieces;) {
        const uint64_t begin = xdi_safetensors_piece(box, i);
        uint64_t end = begin + box->piece;
        const int64_t count = stage ? xdi_safetensors_group(box, i, &end) : 1;
        if (count == 1) {
            XDI_TRY(xdi_safetensors_read(f, to, (size_t)box->piece, begin));
            to += box->piece;
        } else {
            XDI_TRY(xdi_safetensors_read(f, stage, (size_t)(end - begin), begin));
            for (int64_t k = 0; k < count; k++, to += box->piece)
                memcpy(to, stage + (xdi_safetensors_piece(box, i + k) - begin), (size_t)box->piece);
        }
        i += count;
    }
    return XD_OK;
}

static xd_result xdi_safetensors_check_box(xd_safetensors *f, const xd_safetensors_info *info,
                                           const int64_t *offset, const int64_t *size, bool *empty) {
    *empty = info->begin == info->end;
    for (int i = 0; i < info->ndim; i++) {
        XDI_REQUIRE(f->ctx,
                    offset[i] >= 0 && size[i] >= 0 && offset[i] <= info->shape[i] &&
                        size[i] <= info->shape[i] - offset[i],
                    XD_ERROR_ARGUMENT,
                    "%s: tensor \"%.80s\": %lld elements from %lld along dimension %d of size %lld", f->path,
                    info->name, (long long)size[i], (long long)offset[i], i, (long long)info->shape[i]);
        if (size[i] == 0) *empty = true;
    }
    return XD_OK;
}

XD_API xd_result xd_safetensors_read_box(xd_safetensors *f, int64_t index, const int64_t *offset,
                                         const int64_t *size, void *destination) {
    const xd_safetensors_info *info = xd_safetensors_at(f, index);
    bool empty;
    XDI_REQUIRE(f->ctx, info, XD_ERROR_ARGUMENT, "%s: tensor %lld of %lld", f->path, (long long)index,
                (long long)f->count);
    XDI_TRY(xdi_safetensors_check_box(f, info, offset, size, &empty));
    if (empty) return XD_OK;
    const xdi_safetensors_box box = xdi_safetensors_plan(f, info, offset, size);
    unsigned char *stage = NULL;
    if (!f->bytes && box.pieces > 1) {
        stage = (unsigned char *)xd_allocate(f->ctx, XDI_SAFETENSORS_STAGE);
        XDI_REQUIRE(f->ctx, stage, XD_ERROR_MEMORY, "%s: no room for a staging buffer", f->path);
    }
    const xd_result result = xdi_safetensors_gather(f, &box, (unsigned char *)destination, stage);
    xd_release(f->ctx, stage);
    return result;
}

/* ---- writing ---- */

typedef struct xdi_safetensors_plan_item {
    const xd_safetensors_entry *entry; /* valid while planning only */
    uint64_t begin, end;               /* in the data area */
    uint64_t written;                  /* bytes so far */
} xdi_safetensors_plan_item;

struct xd_safetensors_writer {
    xd_ctx *ctx;
    xd_publish *file;
    xdi_safetensors_plan_item *items; /* [count], the caller's order */
    int64_t count;
    uint64_t data; /* where the data area starts */
};

XD_PRIVATE xd_result xdi_safetensors_check_entry(xd_ctx *ctx, const xd_safetensors_entry *e,
                                                 uint64_t *bytes) {
    XDI_REQUIRE(ctx, e->name && strcmp(e->name, XDI_SAFETENSORS_METADATA) != 0, XD_ERROR_ARGUMENT,
                "a tensor needs a name other than __metadata__");
    const size_t length = strlen(e->name);
    XDI_REQUIRE(ctx, length <= XDI_SAFETENSORS_NAME, XD_ERROR_ARGUMENT,
                "a name of %llu bytes, allowed are %d", (unsigned long long)length,
                (int)XDI_SAFETENSORS_NAME);
    XDI_REQUIRE(ctx, xd_dtype_size(e->dtype) > 0, XD_ERROR_ARGUMENT, "tensor \"%.80s\" has no dtype",
                e->name);
    XDI_REQUIRE(ctx, e->ndim >= 0 && e->ndim <= XDI_SAFETENSORS_DIMS, XD_ERROR_ARGUMENT,
                "tensor \"%.80s\" has %d dimensions, allowed are %d", e->name, e->ndim,
                (int)XDI_SAFETENSORS_DIMS);
    XDI_REQUIRE(ctx, xdi_safetensors_bytes(e->dtype, e->ndim, e->shape, bytes), XD_ERROR_ARGUMENT,
                "the size of tensor \"%.80s\" is negative or overflows", e->name);
    return XD_OK;
}

/* Wide elements first, so that every tensor is aligned to its own width; then by name. */
static int xdi_safetensors_by_rank(const void *a, const void *b) {
    const xd_safetensors_entry *x = ((const xdi_safetensors_plan_item *)a)->entry;
    const xd_safetensors_entry *y = ((const xdi_safetensors_plan_item *)b)->entry;
    if (x->dtype != y->dtype) return x->dtype > y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void xdi_safetensors_write_entry(xd_json_writer *w, const xdi_safetensors_plan_item *item) {
    xd_json_write_key(w, item->entry->name);
    xd_json_write_object(w);
    xd_json_write_key(w, "dtype");
    xd_json_write_string(w, xd_dtype_name(item->entry->dtype));
    xd_json_write_key(w, "shape");
    xd_json_write_array(w);
    for (int i = 0; i < item->entry->ndim; i++) xd_json_write_int64(w, item->entry->shape[i]);
    xd_json_write_end(w);
    xd_json_write_key(w, "data_offsets");
    xd_json_write_array(w);
    xd_json_write_uint64(w, item->begin);
    xd_json_write_uint64(w, item->end);
    xd_json_write_end(w);
    xd_json_write_end(w);
}

static void xdi_safetensors_write_metadata(xd_json_writer *w, const xd_safetensors_writer_desc *d) {
    xd_json_write_key(w, XDI_SAFETENSORS_METADATA);
    xd_json_write_object(w);
    xd_json_write_key(w, "format");
    xd_json_write_string(w, "pt");
    for (int64_t i = 0; i < d->metadata_count; i++) {
        xd_json_write_key(w, d->metadata[i].key);
        xd_json_write_string(w, d->metadata[i].value);
    }
    xd_json_write_end(w);
}

/* Gives every tensor its place and builds the header's text. */
static void xdi_safetensors_layout(xd_json_writer *w, const xd_safetensors_writer_desc *d,
                                   xdi_safetensors_plan_item *items, const void **order) {
    uint64_t end = 0;
    for (int64_t i = 0; i < d->entry_count; i++) order[i] = &items[i];
    xdi_sort(order, (size_t)d->entry_count, xdi_safetensors_by_rank);
    xd_json_write_object(w);
    xdi_safetensors_write_metadata(w, d);
    for (int64_t i = 0; i < d->entry_count; i++) {
        xdi_safetensors_plan_item *item = &items[(const xdi_safetensors_plan_item *)order[i] - items];
        item->begin = end;
        item->end = end += item->end; /* end held the tensor's bytes until now */
        xdi_safetensors_write_entry(w, item);
    }
    xd_json_write_end(w);
}

/* Writes length, header and padding, and gives the file its final size. */
static xd_result xdi_safetensors_start(xd_safetensors_writer *writer, const char *text, size_t bytes,
                                       size_t alignment, uint64_t data_bytes) {
    char spaces[64];
    unsigned char prefix[8];
    const uint64_t padded = ((8 + bytes + alignment - 1) & ~(uint64_t)(alignment - 1)) - 8;
    XDI_REQUIRE(writer->ctx, padded <= XDI_SAFETENSORS_LIMIT, XD_ERROR_ARGUMENT,
                "a header of %llu bytes, allowed are %d", (unsigned long long)padded,
                (int)XDI_SAFETENSORS_LIMIT);
    writer->data = 8 + padded;
    for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)(padded >> (8 * i));
    memset(spaces, ' ', sizeof spaces);
    XDI_TRY(xd_publish_resize(writer->file, writer->data + data_bytes));
    XDI_TRY(xd_publish_write(writer->file, prefix, sizeof prefix, 0));
    XDI_TRY(xd_publish_write(writer->file, text, bytes, 8));
    for (uint64_t at = 8 + bytes; at < writer->data; at += sizeof spaces) {
        const uint64_t rest = writer->data - at;
        XDI_TRY(
            xd_publish_write(writer->file, spaces, rest < sizeof spaces ? (size_t)rest : sizeof spaces, at));
    }
    return XD_OK;
}

static xd_result xdi_safetensors_plan_file(xd_safetensors_writer *writer, const xd_safetensors_writer_desc *d,
                                           xd_json_writer *header, const void **order, uint64_t *data_bytes) {
    *data_bytes = 0;
    for (int64_t i = 0; i < d->entry_count; i++) {
        uint64_t bytes = 0;
        XDI_TRY(xdi_safetensors_check_entry(writer->ctx, &d->entries[i], &bytes));
        XDI_REQUIRE(writer->ctx, bytes <= (uint64_t)INT64_MAX - *data_bytes, XD_ERROR_ARGUMENT,
                    "the file would exceed 2^63 bytes");
        writer->items[i].entry = &d->entries[i];
        writer->items[i].end = bytes;
        *data_bytes += bytes;
    }
    xdi_safetensors_layout(header, d, writer->items, order);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_safetensors_check_header(xd_ctx *ctx, const char *text, size_t bytes) {
    xd_json *root = NULL;
    const xd_result result = xd_json_parse(ctx, NULL, text, bytes, &root);
    xd_json_destroy(ctx, root);
    XDI_REQUIRE(ctx, result == XD_OK, result == XD_ERROR_FORMAT ? XD_ERROR_ARGUMENT : result,
                "the header does not read back: %s", xd_last_error(ctx)->message);
    return XD_OK;
}

static xd_result xdi_safetensors_build(xd_safetensors_writer *writer, const char *path,
                                       const xd_safetensors_writer_desc *d, xd_json_writer *header,
                                       const void **order) {
    const char *text = NULL;
    size_t bytes = 0;
    uint64_t data_bytes;
    const size_t alignment = d->alignment ? d->alignment : 8;
    XDI_REQUIRE(writer->ctx, alignment >= 8 && (alignment & (alignment - 1)) == 0, XD_ERROR_ARGUMENT,
                "alignment %llu is no power of two from 8 on", (unsigned long long)alignment);
    XDI_TRY(xdi_safetensors_plan_file(writer, d, header, order, &data_bytes));
    XDI_TRY(xd_json_writer_finish(header, &text, &bytes));
    XDI_TRY(xdi_safetensors_check_header(writer->ctx, text, bytes));
    XDI_TRY(xd_publish_begin(writer->ctx, path, &writer->file));
    return xdi_safetensors_start(writer, text, bytes, alignment, data_bytes);
}

XD_API xd_result xd_safetensors_create(xd_ctx *ctx, const char *path, const xd_safetensors_writer_desc *desc,
                                       xd_safetensors_writer **out) {
    const int64_t n = desc->entry_count;
    XDI_REQUIRE(ctx, n >= 0 && n <= XDI_SAFETENSORS_LIMIT / 32, XD_ERROR_ARGUMENT,
                "%lld tensors, allowed are %d", (long long)n, (int)XDI_SAFETENSORS_LIMIT / 32);
    xd_safetensors_writer *writer = (xd_safetensors_writer *)xd_allocate(ctx, sizeof *writer);
    XDI_REQUIRE(ctx, writer, XD_ERROR_MEMORY, "%s: no room for a writer", path);
    writer->ctx = ctx;
    writer->count = n;
    writer->items = (xdi_safetensors_plan_item *)xd_allocate(ctx, (size_t)n * sizeof *writer->items);
    const void **order = (const void **)xd_allocate(ctx, (size_t)n * sizeof *order);
    xd_json_writer header = xd_json_writer_create(ctx);
    xd_result result;
    if (!writer->items || !order)
        result = XDI_FAIL(ctx, XD_ERROR_MEMORY, "%s: no room to plan %lld tensors", path, (long long)n);
    else
        result = xdi_safetensors_build(writer, path, desc, &header, order);
    xd_json_writer_destroy(&header);
    xd_release(ctx, order);
    if (result == XD_OK)
        *out = writer;
    else
        xd_safetensors_abort(writer);
    return result;
}

XD_API xd_result xd_safetensors_write_range(xd_safetensors_writer *writer, int64_t index, uint64_t first_byte,
                                            size_t bytes, const void *data) {
    XDI_REQUIRE(writer->ctx, index >= 0 && index < writer->count, XD_ERROR_ARGUMENT, "tensor %lld of %lld",
                (long long)index, (long long)writer->count);
    xdi_safetensors_plan_item *item = &writer->items[index];
    const uint64_t length = item->end - item->begin;
    XDI_REQUIRE(writer->ctx, first_byte <= length && bytes <= length - first_byte, XD_ERROR_ARGUMENT,
                "%llu bytes from %llu of tensor %lld, which has %llu", (unsigned long long)bytes,
                (unsigned long long)first_byte, (long long)index, (unsigned long long)length);
    XDI_TRY(xd_publish_write(writer->file, data, bytes, writer->data + item->begin + first_byte));
    item->written += bytes;
    return XD_OK;
}

XD_API xd_result xd_safetensors_write(xd_safetensors_writer *writer, int64_t index, const void *data) {
    const bool known = index >= 0 && index < writer->count;
    const uint64_t bytes = known ? writer->items[index].end - writer->items[index].begin : 0;
    return xd_safetensors_write_range(writer, index, 0, (size_t)bytes, data);
}

XD_API xd_result xd_safetensors_commit(xd_safetensors_writer *writer) {
    xd_result result = XD_OK;
    for (int64_t i = 0; i < writer->count && result == XD_OK; i++) {
        const xdi_safetensors_plan_item *item = &writer->items[i];
        if (item->written != item->end - item->begin)
            result =
                XDI_FAIL(writer->ctx, XD_ERROR_STATE, "%llu of the %llu bytes of tensor %lld are written",
                         (unsigned long long)item->written, (unsigned long long)(item->end - item->begin),
                         (long long)i);
    }
    if (result == XD_OK) {
        result = xd_publish_commit(writer->file);
        writer->file = NULL;
    }
    xd_safetensors_abort(writer);
    return result;
}

XD_API void xd_safetensors_abort(xd_safetensors_writer *writer) {
    if (!writer) return;
    xd_publish_abort(writer->file);
    xd_release(writer->ctx, writer->items);
    xd_release(writer->ctx, writer);
}

/* >>io/model_files.c */

#include <stdio.h>
#include <string.h>

#define XDI_MODEL_SINGLE "model.safetensors"
#define XDI_MODEL_INDEX "model.safetensors.index.json"

enum { XDI_MODEL_NAME = 64 }; /* more than any file name of ours needs */

struct xd_model_files {
    xd_ctx *ctx;
    const char *directory; /* the caller's; valid while opening */
    xd_json *index;        /* NULL for a single file */
    const char **names;    /* [count], of the files, ascending; in the index's memory */
    xd_safetensors **files;
    int64_t count;
};

/* directory/name in new memory; NULL when there is no room, which the caller reports. */
static char *xdi_model_path(xd_ctx *ctx, const char *directory, const char *name) {
    const size_t bytes = strlen(directory) + 1 + strlen(name) + 1;
    char *path = (char *)xd_allocate(ctx, bytes);
    if (path) snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

/* ---- reading ---- */

static bool xdi_model_exists(xd_ctx *ctx, const char *path) {
    const xd_files *files = &xd_ctx_settings(ctx)->files;
    intptr_t file;
    if (files->open(files->user, path, XD_FILE_READ, &file) != 0) return false;
    files->close(files->user, file);
    return true;
}

static bool xdi_model_is_basename(const char *name) {
    return *name && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strpbrk(name, "/\\:");
}

static const xd_json *xdi_model_map(const xd_model_files *m) {
    return xd_json_find(m->index, "weight_map");
}

static int xdi_model_by_name(const void *a, const void *b) {
    return strcmp((const char *)a, (const char *)b);
}

/* The distinct file names of the index, sorted, in m->names; their number becomes the count. */
static xd_result xdi_model_collect(xd_model_files *m) {
    const xd_json *map = xdi_model_map(m);
    const size_t entries = xd_json_count(map);
    size_t used = 0;
    XDI_REQUIRE(m->ctx, xd_json_kind_of(map) == XD_JSON_OBJECT, XD_ERROR_FORMAT, "%s/%s has no weight_map",
                m->directory, XDI_MODEL_INDEX);
    m->names = (const char **)xd_allocate(m->ctx, entries * sizeof *m->names);
    XDI_REQUIRE(m->ctx, m->names, XD_ERROR_MEMORY, "no room for %llu names", (unsigned long long)entries);
    for (const xd_json *entry = xd_json_first(map); entry; entry = xd_json_next(entry)) {
        const char *name = xd_json_string(entry, NULL);
        XDI_REQUIRE(m->ctx, name && xdi_model_is_basename(name), XD_ERROR_FORMAT,
                    "%s/%s: tensor \"%.80s\" does not lie in a file of the directory", m->directory,
                    XDI_MODEL_INDEX, xd_json_key(entry, NULL));
        m->names[used++] = name;
    }
    xdi_sort((const void **)m->names, used, xdi_model_by_name);
    for (size_t i = 0; i < used; i++)
        if (m->count == 0 || strcmp(m->names[m->count - 1], m->names[i]) != 0)
            m->names[m->count++] = m->names[i];
    return XD_OK;
}

static xd_safetensors *xdi_model_file(const xd_model_files *m, const char *name) {
    int64_t low = 0, high = m->count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int order = strcmp(name, m->names[middle]);
        if (order == 0) return m->files[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static xd_result xdi_model_open_shard(xd_model_files *m, const xd_safetensors_desc *desc, int64_t i) {
    char *path = xdi_model_path(m->ctx, m->directory, m->names[i]);
    XDI_REQUIRE(m->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", m->directory, m->names[i]);
    const xd_result result = xd_safetensors_open(m->ctx, path, desc, &m->files[i]);
    xd_release(m->ctx, path);
    return result;
}

/* The index and the files must say the same, in both directions. */
static xd_result xdi_model_check(const xd_model_files *m) {
    const xd_json *map = xdi_model_map(m);
    for (const xd_json *entry = xd_json_first(map); entry; entry = xd_json_next(entry)) {
        const char *name = xd_json_key(entry, NULL), *file = xd_json_string(entry, NULL);
        XDI_REQUIRE(m->ctx, xd_safetensors_find(xdi_model_file(m, file), name) >= 0, XD_ERROR_MISSING,
                    "%s/%s holds no tensor \"%.80s\", where the index puts it", m->directory, file, name);
    }
    for (int64_t i = 0; i < m->count; i++)
        for (int64_t k = 0; k < xd_safetensors_count(m->files[i]); k++) {
            const char *name = xd_safetensors_at(m->files[i], k)->name;
            const char *file = xd_json_string(xd_json_find(map, name), NULL);
            XDI_REQUIRE(m->ctx, file && strcmp(file, m->names[i]) == 0, XD_ERROR_UNEXPECTED,
                        "%s/%s holds tensor \"%.80s\", which the index puts into %s", m->directory,
                        m->names[i], name, file ? file : "no file");
        }
    return XD_OK;
}

static xd_result xdi_model_open_index(xd_model_files *m, const xd_safetensors_desc *desc) {
    char *path = xdi_model_path(m->ctx, m->directory, XDI_MODEL_INDEX);
    XDI_REQUIRE(m->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", m->directory, XDI_MODEL_INDEX);
    const xd_result result = xd_json_load(m->ctx, NULL, path, &m->index);
    xd_release(m->ctx, path);
    XDI_TRY(result);
    XDI_TRY(xdi_model_collect(m));
    m->files = (xd_safetensors **)xd_allocate(m->ctx, (size_t)m->count * sizeof *m->files);
    XDI_REQUIRE(m->ctx, m->files, XD_ERROR_MEMORY, "no room for %lld files", (long long)m->count);
    for (int64_t i = 0; i < m->count; i++) XDI_TRY(xdi_model_open_shard(m, desc, i));
    return xdi_model_check(m);
}

static xd_result xdi_model_open_single(xd_model_files *m, const char *path, const xd_safetensors_desc *desc) {
    m->files = (xd_safetensors **)xd_allocate(m->ctx, sizeof *m->files);
    XDI_REQUIRE(m->ctx, m->files, XD_ERROR_MEMORY, "%s: no room for a file list", path);
    m->count = 1;
    return xd_safetensors_open(m->ctx, path, desc, m->files);
}

XD_API xd_result xd_model_files_open(xd_ctx *ctx, const char *directory, const xd_safetensors_desc *desc,
                                     xd_model_files **out) {
    char *single = xdi_model_path(ctx, directory, XDI_MODEL_SINGLE);
    xd_model_files *m = (xd_model_files *)xd_allocate(ctx, sizeof *m);
    xd_result result;
    if (!single || !m) {
        xd_release(ctx, single);
        xd_release(ctx, m);
        return XDI_FAIL(ctx, XD_ERROR_MEMORY, "%s: no room for a model", directory);
    }
    m->ctx = ctx;
    m->directory = directory;
    if (xdi_model_exists(ctx, single))
        result = xdi_model_open_single(m, single, desc);
    else
        result = xdi_model_open_index(m, desc);
    xd_release(ctx, single);
    if (result == XD_OK)
        *out = m;
    else
        xd_model_files_close(m);
    return result;
}

XD_API void xd_model_files_close(xd_model_files *m) {
    if (!m) return;
    if (m->files)
        for (int64_t i = 0; i < m->count; i++) xd_safetensors_close(m->files[i]);
    xd_release(m->ctx, m->files);
    xd_release(m->ctx, m->names);
    xd_json_destroy(m->ctx, m->index);
    xd_release(m->ctx, m);
}

XD_API int64_t xd_model_files_count(const xd_model_files *m) {
    return m->count;
}

XD_API xd_safetensors *xd_model_files_at(const xd_model_files *m, int64_t file) {
    return file >= 0 && file < m->count ? m->files[file] : NULL;
}

XD_API xd_result xd_model_files_find(const xd_model_files *m, const char *name, xd_safetensors **file,
                                     int64_t *index) {
    const char *where = xd_json_string(xd_json_find(xdi_model_map(m), name), NULL);
    xd_safetensors *holder = m->index ? (where ? xdi_model_file(m, where) : NULL) : m->files[0];
    const int64_t found = holder ? xd_safetensors_find(holder, name) : -1;
    XDI_REQUIRE(m->ctx, found >= 0, XD_ERROR_MISSING, "the model has no tensor \"%.80s\"", name);
    *file = holder;
    *index = found;
    return XD_OK;
}

/* ---- writing ---- */

struct xd_model_writer {
    xd_ctx *ctx;
    char *directory;                 /* behind the struct */
    xd_safetensors_writer **writers; /* [shards] */
    int64_t *first;                  /* [shards + 1]: shard s holds entries first[s] .. first[s + 1] - 1 */
    int64_t shards;
    uint64_t total_bytes;
    xd_json_writer index; /* text of the index */
};

static void xdi_model_shard_name(char name[XDI_MODEL_NAME], int64_t shard, int64_t shards) {
    if (shards == 1)
        snprintf(name, XDI_MODEL_NAME, "%s", XDI_MODEL_SINGLE);
    else
        snprintf(name, XDI_MODEL_NAME, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1,
                 (long long)shards);
}

/* Fills files greedily in the order of the entries. */
static xd_result xdi_model_split(xd_model_writer *w, const xd_model_writer_desc *d) {
    const uint64_t limit = d->max_shard_bytes ? d->max_shard_bytes : 5000000000u;
    uint64_t filled = 0;
    w->shards = 1;
    for (int64_t i = 0; i < d->entry_count; i++) {
        uint64_t bytes = 0;
        XDI_TRY(xdi_safetensors_check_entry(w->ctx, &d->entries[i], &bytes));
        if (i > w->first[w->shards - 1] && (bytes > limit || filled > limit - bytes)) {
            w->first[w->shards++] = i;
            filled = 0;
        }
        filled += bytes;
        w->total_bytes += bytes;
    }
    w->first[w->shards] = d->entry_count;
    return XD_OK;
}

static void xdi_model_write_index(xd_model_writer *w, const xd_model_writer_desc *d) {
    xd_json_writer *json = &w->index;
    json->indent = 2;
    xd_json_write_object(json);
    xd_json_write_key(json, "metadata");
    xd_json_write_object(json);
    xd_json_write_key(json, "total_size");
    xd_json_write_uint64(json, w->total_bytes);
    xd_json_write_end(json);
    xd_json_write_key(json, "weight_map");
    xd_json_write_object(json);
    for (int64_t s = 0; s < w->shards; s++) {
        char name[XDI_MODEL_NAME];
        xdi_model_shard_name(name, s, w->shards);
        for (int64_t i = w->first[s]; i < w->first[s + 1]; i++) {
            xd_json_write_key(json, d->entries[i].name);
            xd_json_write_string(json, name);
        }
    }
    xd_json_write_end(json);
    xd_json_write_end(json);
}

static xd_result xdi_model_start_shard(xd_model_writer *w, const xd_model_writer_desc *d, int64_t shard) {
    char name[XDI_MODEL_NAME];
    xd_safetensors_writer_desc file;
    memset(&file, 0, sizeof file);
    file.entries = d->entries + w->first[shard];
    file.entry_count = w->first[shard + 1] - w->first[shard];
    file.metadata = d->metadata;
    file.metadata_count = d->metadata_count;
    xdi_model_shard_name(name, shard, w->shards);
    char *path = xdi_model_path(w->ctx, w->directory, name);
    XDI_REQUIRE(w->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", w->directory, name);
    const xd_result result = xd_safetensors_create(w->ctx, path, &file, &w->writers[shard]);
    xd_release(w->ctx, path);
    return result;
}

static xd_result xdi_model_start(xd_model_writer *w, const xd_model_writer_desc *d) {
    w->first = (int64_t *)xd_allocate(w->ctx, ((size_t)d->entry_count + 2) * sizeof *w->first);
    XDI_REQUIRE(w->ctx, w->first, XD_ERROR_MEMORY, "no room to plan %lld tensors", (long long)d->entry_count);
    XDI_TRY(xdi_model_split(w, d));
    const char *text;
    size_t bytes;
    xdi_model_write_index(w, d);
    XDI_TRY(xd_json_writer_finish(&w->index, &text, &bytes));
    XDI_TRY(xdi_safetensors_check_header(w->ctx, text, bytes)); /* a name may stand in two shards */
    w->writers = (xd_safetensors_writer **)xd_allocate(w->ctx, (size_t)w->shards * sizeof *w->writers);
    XDI_REQUIRE(w->ctx, w->writers, XD_ERROR_MEMORY, "no room for %lld files", (long long)w->shards);
    for (int64_t s = 0; s < w->shards; s++) XDI_TRY(xdi_model_start_shard(w, d, s));
    return XD_OK;
}

XD_API xd_result xd_model_writer_create(xd_ctx *ctx, const char *directory, const xd_model_writer_desc *desc,
                                        xd_model_writer **out) {
    XDI_REQUIRE(ctx, desc->entry_count >= 0 && desc->entry_count <= INT32_MAX, XD_ERROR_ARGUMENT,
                "%lld tensors", (long long)desc->entry_count);
    const size_t length = strlen(directory) + 1;
    xd_model_writer *w = (xd_model_writer *)xd_allocate(ctx, sizeof *w + length);
    XDI_REQUIRE(ctx, w, XD_ERROR_MEMORY, "%s: no room for a model writer", directory);
    w->ctx = ctx;
    w->directory = (char *)(w + 1);
    memcpy(w->directory, directory, length);
    w->index = xd_json_writer_create(ctx);
    const xd_result result = xdi_model_start(w, desc);
    if (result == XD_OK)
        *out = w;
    else
        xd_model_writer_abort(w);
    return result;
}

XD_API xd_result xd_model_writer_write(xd_model_writer *w, int64_t index, uint64_t first_byte, size_t bytes,
                                       const void *data) {
    XDI_REQUIRE(w->ctx, index >= 0 && index < w->first[w->shards], XD_ERROR_ARGUMENT, "tensor %lld of %lld",
                (long long)index, (long long)w->first[w->shards]);
    int64_t low = 0, high = w->shards; /* the last shard that starts at or before index */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (w->first[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    return xd_safetensors_write_range(w->writers[low], index - w->first[low], first_byte, bytes, data);
}

/* Removes a file of the directory; that there is none, or no room for its path, is no failure of the save. */
static void xdi_model_remove(xd_model_writer *w, const char *name) {
    const xd_files *files = &xd_ctx_settings(w->ctx)->files;
    char *path = xdi_model_path(w->ctx, w->directory, name);
    if (path) files->remove(files->user, path);
    xd_release(w->ctx, path);
}

static xd_result xdi_model_save_index(xd_model_writer *w) {
    const char *text;
    size_t bytes;
    XDI_TRY(xd_json_writer_finish(&w->index, &text, &bytes));
    char *path = xdi_model_path(w->ctx, w->directory, XDI_MODEL_INDEX);
    XDI_REQUIRE(w->ctx, path, XD_ERROR_MEMORY, "%s/%s: no room for the path", w->directory, XDI_MODEL_INDEX);
    const xd_result result = xd_file_save(w->ctx, path, text, bytes);
    xd_release(w->ctx, path);
    return result;
}

XD_API xd_result xd_model_writer_commit(xd_model_writer *w) {
    xd_result result = XD_OK;
    int64_t published = 0;
    while (published < w->shards && result == XD_OK) {
        result = xd_safetensors_commit(w->writers[published]);
        w->writers[published] = NULL;
        if (result == XD_OK) published++;
    }
    if (result == XD_OK && w->shards > 1) result = xdi_model_save_index(w);
    char name[XDI_MODEL_NAME];
    for (int64_t s = 0; s < published && result != XD_OK; s++) {
        xdi_model_shard_name(name, s, w->shards);
        xdi_model_remove(w, name);
    }
    if (result == XD_OK) xdi_model_remove(w, w->shards > 1 ? XDI_MODEL_SINGLE : XDI_MODEL_INDEX);
    xd_model_writer_abort(w);
    return result;
}

XD_API void xd_model_writer_abort(xd_model_writer *w) {
    if (!w) return;
    if (w->writers)
        for (int64_t s = 0; s < w->shards; s++) xd_safetensors_abort(w->writers[s]);
    xd_json_writer_destroy(&w->index);
    xd_release(w->ctx, w->writers);
    xd_release(w->ctx, w->first);
    xd_release(w->ctx, w);
}

/* >>io/gather.c */

#include <string.h>

/* What one rank keeps during a save; writer and slab exist on root only. */
typedef struct xdi_gather {
    xd_comm *world;
    xd_ctx *ctx;
    const xd_model_gather_desc *desc;
    bool root;
    size_t staging;
    xd_model_writer *writer;
    unsigned char *slab;
} xdi_gather;

static const xd_layout_desc *xdi_gather_whole(const xdi_gather *g, int64_t i) {
    return xd_layout_settings(g->desc->tensors[i].tensor.layout);
}

/* Bytes of one index of dimension 0, and how many of them make a slab. A pure function of what all ranks know. */
static int64_t xdi_gather_rows(const xdi_gather *g, int64_t i, size_t *row_bytes) {
    const xd_layout_desc *whole = xdi_gather_whole(g, i);
    size_t bytes = xd_dtype_size(g->desc->tensors[i].tensor.dtype);
    for (int d = 1; d < whole->ndim; d++) bytes *= (size_t)whole->shape[d];
    *row_bytes = bytes;
    const int64_t rows = bytes > 0 ? (int64_t)(g->staging / bytes) : 1;
    const int64_t extent = whole->ndim > 0 ? whole->shape[0] : 1;
    if (rows < 1) return 1;
    return rows < extent ? rows : extent;
}

static xd_result xdi_gather_create_writer(xdi_gather *g, xd_safetensors_entry *entries) {
    xd_model_writer_desc d;
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < g->desc->tensor_count; i++) {
        const xd_layout_desc *whole = xdi_gather_whole(g, i);
        entries[i].name = g->desc->tensors[i].name;
        entries[i].dtype = g->desc->tensors[i].tensor.dtype;
        entries[i].ndim = whole->ndim;
        entries[i].shape = whole->shape;
    }
    d.entries = entries;
    d.entry_count = g->desc->tensor_count;
    d.max_shard_bytes = g->desc->max_shard_bytes;
    d.metadata = g->desc->metadata;
    d.metadata_count = g->desc->metadata_count;
    return xd_model_writer_create(g->ctx, g->desc->directory, &d, &g->writer);
}

/* Root: the files, and a slab that is large enough for every tensor. */
static xd_result xdi_gather_prepare(xdi_gather *g) {
    if (!g->root) return XD_OK;
    const size_t count = (size_t)g->desc->tensor_count;
    size_t largest = 0;
    xd_safetensors_entry *entries = (xd_safetensors_entry *)xd_allocate(g->ctx, count * sizeof *entries);
    XDI_REQUIRE(g->ctx, entries, XD_ERROR_MEMORY, "no room to plan %llu tensors", (unsigned long long)count);
    const xd_result result = xdi_gather_create_writer(g, entries);
    xd_release(g->ctx, entries);
    XDI_TRY(result); /* the writer has checked that no size overflows */
    for (int64_t i = 0; i < g->desc->tensor_count; i++) {
        size_t row_bytes;
        const size_t bytes = (size_t)xdi_gather_rows(g, i, &row_bytes) * row_bytes;
        if (bytes > largest) largest = bytes;
    }
    g->slab = (unsigned char *)xd_allocate(g->ctx, largest);
    XDI_REQUIRE(g->ctx, g->slab, XD_ERROR_MEMORY, "no room for a slab of %llu bytes",
                (unsigned long long)largest);
    return XD_OK;
}

/* One tensor. A root that cannot write goes on gathering until the ranks agree, so that none waits for it. */
static xd_result xdi_gather_tensor(xdi_gather *g, int64_t i) {
    const xd_layout_desc *whole = xdi_gather_whole(g, i);
    const int64_t extent = whole->ndim > 0 ? whole->shape[0] : 1;
    size_t row_bytes;
    const int64_t rows = xdi_gather_rows(g, i, &row_bytes);
    int64_t begin[XD_DIMS_MAX] = { 0 }, end[XD_DIMS_MAX] = { 0 };
    xd_result mine = XD_OK;
    for (int d = 1; d < whole->ndim; d++) end[d] = whole->shape[d];
    for (int64_t row = 0; row < extent && row_bytes > 0; row += rows) {
        const int64_t count = rows < extent - row ? rows : extent - row;
        const bool scalar = whole->ndim == 0;
        begin[0] = row;
        end[0] = row + count;
        XDI_TRY(xd_tensor_gather(g->world, &g->desc->tensors[i].tensor, scalar ? NULL : begin,
                                 scalar ? NULL : end, g->desc->root, g->slab));
        if (g->root && mine == XD_OK)
            mine = xd_model_writer_write(g->writer, i, (uint64_t)row * row_bytes, (size_t)count * row_bytes,
                                         g->slab);
    }
    return xd_agree(g->world, mine);
}

static xd_result xdi_gather_run(xdi_gather *g) {
    XDI_TRY(xd_agree(g->world, xdi_gather_prepare(g)));
    for (int64_t i = 0; i < g->desc->tensor_count; i++) XDI_TRY(xdi_gather_tensor(g, i));
    xd_model_writer *writer = g->writer;
    g->writer = NULL;
    return xd_agree(g->world, g->root ? xd_model_writer_commit(writer) : XD_OK);
}

XD_API xd_result xd_model_gather(xd_comm *world, const xd_model_gather_desc *desc) {
    xdi_gather g;
    memset(&g, 0, sizeof g);
    g.world = world;
    g.ctx = xd_comm_ctx(world);
    g.desc = desc;
    g.root = xd_comm_rank(world) == desc->root;
    g.staging = desc->staging_bytes ? desc->staging_bytes : (size_t)16 << 20;
    const bool valid = desc->root >= 0 && desc->root < xd_comm_size(world) && desc->tensor_count >= 0;
    XDI_TRY(xd_agree(world, valid
                                ? XD_OK
                                : XDI_FAIL(g.ctx, XD_ERROR_ARGUMENT, "root %d of %d ranks, %lld tensors",
                                           desc->root, xd_comm_size(world), (long long)desc->tensor_count)));
    const xd_result result = xdi_gather_run(&g);
    xd_model_writer_abort(g.writer);
    xd_release(g.ctx, g.slab);
    return result;
}


#endif /* XDISTILL_IMPLEMENTED */
#endif /* XDISTILL_IMPLEMENTATION */

/* MIT License

   Copyright (c) 2026 xdistill authors

   Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal
   in the Software without restriction, including without limitation the rights
   to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
   SOFTWARE. */
/* xdistill sha256 f5bdba63ef3cc83d567de20da85747689f5acda5e68b58af71cafd73f1364a7f */
