#ifndef XDI_BASE_FAIL_H
#define XDI_BASE_FAIL_H

#include "base/context.h"

/* For programs and companion headers. */

/* Records and logs a failure; returns `result`. Local. */
XD_API xd_result xd_fail(xd_ctx *ctx, xd_result result, const char *file, int line, const char *function,
                         const char *format, ...) XD_PRINTF(6, 7);

/* As xd_fail, with the culprit's world rank. */
XD_API xd_result xd_fail_culprit(xd_ctx *ctx, xd_result result, int culprit, const char *file, int line,
                                 const char *function, const char *format, ...) XD_PRINTF(7, 8);

#define XD_FAIL(ctx, result, ...) xd_fail((ctx), (result), __FILE__, __LINE__, __func__, __VA_ARGS__)
#define XD_FAIL_CULPRIT(ctx, result, culprit, ...) \
    xd_fail_culprit((ctx), (result), (culprit), __FILE__, __LINE__, __func__, __VA_ARGS__)

/* Macros that return: XD_REQUIRE (printf message) if its condition is false, XD_TRY if a call failed. */
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

/* xd_allocate returns zeroed memory of the context's allocator, or NULL without an error. xd_release frees it, and what
 * calls return; NULL is legal. Local. */
XD_API void *xd_allocate(xd_ctx *ctx, size_t bytes);
XD_API void xd_release(xd_ctx *ctx, void *memory);

#endif
