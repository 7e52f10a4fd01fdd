#ifndef XDI_BASE_CONTEXT_H
#define XDI_BASE_CONTEXT_H

#include "base/cpu.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "base/result.h"

/* One thread uses it at a time; contexts share nothing mutable. */
typedef struct xd_ctx xd_ctx;

/* Lowest severity to log. */
typedef enum xd_log_level {
    XD_LOG_WARN = 0, /* the default */
    XD_LOG_NONE,
    XD_LOG_ERROR,
    XD_LOG_INFO,
    XD_LOG_TRACE
} xd_log_level;

/* Writes one line without newline, on the context's thread. */
typedef struct xd_logger {
    void (*write)(void *user, xd_log_level level, const char *line);
    void *user;
} xd_logger;

/* Returns a logger to standard error, one call a line. At XD_LOG_INFO xd_build logs the number of parameters. Pure. */
XD_API xd_logger xd_stderr_logger(void);

/* Monotonic seconds, for deadlines. */
typedef struct xd_clock {
    double (*now_seconds)(void *user);
    void *user;
} xd_clock;

/* Floating-point sums over ranks.
 *
 *   DETERMINISTIC  rank order: same bits on every run of a mesh
 *   FAST           the transport's order: equal up to rounding
 *   INVARIANT      same bits on every mesh: integer row sums for losses and norms, the canonical tree for parameter
 *                  gradients; refuses a float SUM without leaves */
typedef enum xd_reduction {
    XD_REDUCTION_DETERMINISTIC = 0, /* the default */
    XD_REDUCTION_FAST,
    XD_REDUCTION_INVARIANT
} xd_reduction;

struct xd_kernels;

/* Settings of a context. */
typedef struct xd_ctx_desc {
    /* Zero -> malloc and free; blocks of 4 MiB and more are large pages on Linux: docs/performance.md. */
    xd_allocator allocator;
    xd_logger logger;            /* zero -> silent */
    xd_log_level log_level;      /* 0 -> XD_LOG_WARN */
    xd_clock clock;              /* zero -> CLOCK_MONOTONIC */
    xd_files files;              /* zero -> POSIX files */
    xd_reduction reduction;      /* 0 -> XD_REDUCTION_DETERMINISTIC */
    double timeout_seconds;      /* of one collective; 0 -> 60 */
    double init_timeout_seconds; /* of joining a world and its first collective; 0 -> 600 */
    int rank;                    /* world rank in messages; joining sets it */
    xd_cpu_level cpu;            /* 0 -> the best; UNSUPPORTED if absent */
    /* Another backend's table, outlives the context; NULL -> the CPU's (xd_cuda_create sets it). */
    const struct xd_kernels *kernels;
    /* Cores of a CPU call; 0 -> 1. Bits do not depend on it. The context creates threads - 1 pool threads of 2 MB,
     * which sleep when idle. */
    int threads;
    /* The caller's threads, at most `threads` at once. Zero -> a pool. */
    xd_parallel_for parallel_for;
    void *stream; /* orders device work; NULL -> the default stream */
} xd_ctx_desc;

/* Creates a context, for the caller's XD_VERSION: xd_ctx_create(desc, &ctx); desc NULL -> defaults. Local.
 * Errors, to desc's logger: MISMATCH (major or minor version), ARGUMENT (timeouts negative or NaN; threads beyond 1024
 * or negative; files without a required entry), UNSUPPORTED (CPU level), MEMORY (also no thread). */
#define xd_ctx_create(desc, out) xd_ctx_create_versioned(XD_VERSION, (desc), (out))
XD_API xd_result xd_ctx_create_versioned(int version, const xd_ctx_desc *desc, xd_ctx **out);

/* Frees it. A forked process has no pool threads: it computes on one thread and destroys its copy without a wait. */
XD_API void xd_ctx_destroy(xd_ctx *ctx);

/* Returns the desc with defaults filled in. */
XD_API const xd_ctx_desc *xd_ctx_settings(const xd_ctx *ctx);

/* Orders later device work on this stream. Local. */
XD_API void xd_ctx_set_stream(xd_ctx *ctx, void *stream);

/* Returns the last failure, XD_OK if none. Valid until the next failure. */
XD_API const xd_error *xd_last_error(const xd_ctx *ctx);

/* Sets the caller's file and line, which an error of the next call names; returns ctx. */
XD_API xd_ctx *xd_at(xd_ctx *ctx, const char *file, int line);

/* Optional: xd_vocab_create(XD_AT(ctx), ...) adds file and line to the message. */
#define XD_AT(ctx) xd_at((ctx), __FILE__, __LINE__)

#endif
