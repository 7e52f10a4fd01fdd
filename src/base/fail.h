#ifndef XDI_BASE_FAIL_H
#define XDI_BASE_FAIL_H

#include "base/context.h"

/* Reporting failures and passing them on, as the library itself does: for programs and companion headers. */

/* Records a failure in the context, sends it to the logger and returns `result`: the macros below call it. Local. */
XD_API xd_result xd_fail(xd_ctx *ctx, xd_result result, const char *file, int line, const char *function,
                         const char *format, ...) XD_PRINTF(6, 7);

/* As xd_fail, naming the world rank that caused it. */
XD_API xd_result xd_fail_culprit(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                                 const char *function, const char *format, ...) XD_PRINTF(7, 8);

#define XD_FAIL(ctx, result, ...) xd_fail((ctx), (result), __FILE__, __LINE__, __func__, __VA_ARGS__)
#define XD_FAIL_CULPRIT(ctx, result, culprit, ...) \
    xd_fail_culprit((ctx), (result), (culprit), __FILE__, __LINE__, __func__, __VA_ARGS__)

/* The only two macros that return: XD_REQUIRE when its condition does not hold, with a message in the manner of printf, and
 * XD_TRY when a call has failed. XD_REQUIRE returns what it was given and not what xd_fail returns, which is the same: so a
 * compiler that does not look into xd_fail still sees that outputs are unset on failure only. */
#define XD_REQUIRE(ctx, condition, result, ...)                    \
    do {                                                           \
        if (!(condition)) {                                        \
            const xd_result xdi_require_result = (result);         \
            (void)XD_FAIL((ctx), xdi_require_result, __VA_ARGS__); \
            return xdi_require_result;                             \
        }                                                          \
    } while (0)
#define XD_TRY(expression)                                  \
    do {                                                    \
        const xd_result xdi_try_result = (expression);      \
        if (xdi_try_result != XD_OK) return xdi_try_result; \
    } while (0)

/* Memory from the context's allocator, zero-filled; NULL when there is none, which the caller reports. xd_release frees it,
 * and the memory that calls return to be released; NULL is fine. Local. */
XD_API void *xd_allocate(xd_ctx *ctx, size_t bytes);
XD_API void xd_release(xd_ctx *ctx, void *memory);

#endif
