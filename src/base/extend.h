#ifndef XDI_BASE_EXTEND_H
#define XDI_BASE_EXTEND_H

#include <stdarg.h>

#include "base/context.h"

/* For companion headers and back ends of your own: another translation unit cannot use what is private. */

/* Records a failure in the context, sends it to the logger and returns `result`. Use the macros below. */
XD_API xd_result xd_fail(xd_ctx *ctx, xd_result result, const char *file, int line, const char *function,
                         const char *format, ...) XD_PRINTF(6, 7);

/* As xd_fail, naming the world rank that caused it. */
XD_API xd_result xd_fail_culprit(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                                 const char *function, const char *format, ...) XD_PRINTF(7, 8);

/* Writes one line to the logger when the level is enabled. */
XD_API void xd_log(xd_ctx *ctx, xd_log_level level, const char *format, ...) XD_PRINTF(3, 4);

/* Memory from the context's allocator, zero-filled; NULL when there is none, which the caller reports. */
XD_API void *xd_allocate(xd_ctx *ctx, size_t bytes);
XD_API void xd_release(xd_ctx *ctx, void *memory);

/* Seconds of the context's clock. */
XD_API double xd_now(const xd_ctx *ctx);

/* Sets the world rank in this context's messages. */
XD_API void xd_ctx_set_rank(xd_ctx *ctx, int rank);

/* Lowers the CPU level to what the processes of a world have agreed on. */
XD_API void xd_ctx_set_cpu(xd_ctx *ctx, xd_cpu_level level);

/* Sets another backend's table of kernels, which must outlive its use; NULL -> the CPU's again. */
XD_API void xd_ctx_set_kernels(xd_ctx *ctx, const struct xd_kernels *kernels);

#define XD_FAIL(ctx, result, ...) xd_fail((ctx), (result), __FILE__, __LINE__, __func__, __VA_ARGS__)
#define XD_FAIL_CULPRIT(ctx, result, culprit, ...) \
    xd_fail_culprit((ctx), (result), (culprit), __FILE__, __LINE__, __func__, __VA_ARGS__)

/* The only two macros that return. */
#define XD_REQUIRE(ctx, condition, result, ...)                         \
    do {                                                                \
        if (!(condition)) return XD_FAIL((ctx), (result), __VA_ARGS__); \
    } while (0)
#define XD_TRY(expression)                                  \
    do {                                                    \
        const xd_result xdi_try_result = (expression);      \
        if (xdi_try_result != XD_OK) return xdi_try_result; \
    } while (0)

#endif
