#ifndef XDI_BASE_CONTEXT_H
#define XDI_BASE_CONTEXT_H

#include "base/cpu.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "base/result.h"

/* Everything hangs off a context: allocator, logger, clock, file calls, defaults of the collectives and the last
 * error. One context belongs to one thread at a time; two contexts share nothing mutable. */
typedef struct xd_ctx xd_ctx;

/* What the logger receives: the named level and everything more severe. */
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

/* A ready-made logger: each line on standard error, by one call. It shows what log_level lets through: with XD_LOG_INFO also the
 * number of parameters that xd_build reports. Pure. */
XD_API xd_logger xd_stderr_logger(void);

/* Monotonic seconds. Deadlines are measured with it, so a test can let an hour pass without sleeping. */
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
    /* Zero -> malloc and free. On Linux blocks of 4 MiB and more then begin at multiples of 2 MiB and ask for large pages, and
     * ranges of 16 MiB and more that must be zeros are given back to the system: they take memory and time only when they are
     * written. An allocator of the caller's gets neither. */
    xd_allocator allocator;
    xd_logger logger;                 /* zero -> silent */
    xd_log_level log_level;           /* less severe lines are dropped; 0 -> XD_LOG_WARN */
    xd_clock clock;                   /* zero -> CLOCK_MONOTONIC */
    xd_files files;                   /* zero -> POSIX files */
    xd_reduction reduction;           /* 0 -> XD_REDUCTION_DETERMINISTIC */
    double timeout_seconds;           /* deadline of one collective; 0 -> 60 */
    double init_timeout_seconds;      /* deadline of joining a world and of its first collective; 0 -> 600 */
    int rank;                         /* world rank, for messages; joining a world sets it */
    xd_cpu_level cpu;                 /* 0 -> the best of this machine; UNSUPPORTED if the machine lacks it */
    const struct xd_kernels *kernels; /* another backend's table; NULL -> the CPU's (xd_cuda_create sets it).
                                         Stays the caller's, outlives the context. */
    /* Cores for each call on a CPU, the calling thread's core included; 0 -> 1. Results have the same bits for any number,
     * in every mode. The context creates a pool of threads - 1 threads, each with 2 MB of private memory; they sleep when
     * there is nothing to do and never spin, so an idle context takes no time from other threads of the program. Every
     * rank has a pool: ranks in one process use ranks x threads cores. */
    int threads;
    /* Runs the work on the caller's threads instead, at most `threads` of them at a time; no pool is created. Zero -> the
     * pool. */
    xd_parallel_for parallel_for;
    void *stream; /* on which a device backend orders its work; NULL -> its default stream */
} xd_ctx_desc;

/* XD_VERSION of the implementation that is linked. Pure. */
XD_API int xd_version(void);

/* Creates a context: xd_ctx_create(const xd_ctx_desc *desc, xd_ctx **out). desc is read during the call only; NULL -> all
 * defaults. The macro passes the version of the declarations that the caller was compiled with.
 *
 * Local. Errors, whose messages go to the desc's logger, since there is no context to ask: MISMATCH for declarations
 * of another major or minor version, ARGUMENT for negative or non-finite timeouts and for threads
 * below 0 or above 1024, UNSUPPORTED for a CPU level this machine lacks, MEMORY, also when a thread does not start. */
#define xd_ctx_create(desc, out) xd_ctx_create_versioned(XD_VERSION, (desc), (out))
XD_API xd_result xd_ctx_create_versioned(int version, const xd_ctx_desc *desc, xd_ctx **out);

/* Frees the context. Destroy everything made from it first. NULL is fine; so is a process that was forked from the context's: it
 * has none of the pool's threads, computes on its own and destroys its copy without waiting for them. */
XD_API void xd_ctx_destroy(xd_ctx *ctx);

/* The desc in force, every default filled in. */
XD_API const xd_ctx_desc *xd_ctx_settings(const xd_ctx *ctx);

/* From now on this context's device work goes to this stream. Local. */
XD_API void xd_ctx_set_stream(xd_ctx *ctx, void *stream);

/* The last failure of this context; result is XD_OK when there was no failure. Valid until the next failing call. */
XD_API const xd_error *xd_last_error(const xd_ctx *ctx);

/* Forgets the last failure. A broken world stays broken. */
XD_API void xd_clear_error(xd_ctx *ctx);

/* Sets the source position that the next error of this context reports as the caller's; returns ctx. See XD_AT. */
XD_API xd_ctx *xd_at(xd_ctx *ctx, const char *file, int line);

/* Optional: xd_mesh_create(XD_AT(ctx), ...) adds the caller's file and line to an error's message. */
#define XD_AT(ctx) xd_at((ctx), __FILE__, __LINE__)

#endif
