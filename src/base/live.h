#ifndef XDI_BASE_LIVE_H
#define XDI_BASE_LIVE_H

#include "base/fail.h"
#include "base/section.h"

/* With XDISTILL_DEBUG: which objects there are, so that a call refuses one that was destroyed, or is none, without reading it. Without
 * it these macros are nothing.
 *
 *   XDI_OBJECT    zeroed memory of an object, which is alive until it is released; as xd_allocate
 *   XDI_LIVE      returns STATE for one that was destroyed, ARGUMENT for one of another type or of nobody; NULL passes
 *   XDI_IS_GONE   the same for a destroy: true, and the error is recorded
 *   XDI_BORN, XDI_DEAD   objects within other memory */
#if defined(XDISTILL_DEBUG)
#    define XDI_OBJECT(type, ctx, bytes) ((type *)xdi_live_allocate((ctx), (bytes), #type))
#    define XDI_LIVE(type, object) XD_TRY(xdi_live_check((object), #type, #object, __FILE__, __LINE__, __func__))
#    define XDI_IS_GONE(type, object) \
        (xdi_live_check((object), #type, #object, __FILE__, __LINE__, __func__) != XD_OK)
#    define XDI_BORN(type, ctx, object) xdi_live_begin((ctx), (object), #type)
#    define XDI_DEAD(object) xdi_live_end(object)

/* live.c */
XD_PRIVATE void *xdi_live_allocate(xd_ctx *ctx, size_t bytes, const char *type);
XD_PRIVATE void xdi_live_begin(xd_ctx *ctx, const void *object, const char *type);
XD_PRIVATE void xdi_live_end(const void *object);
XD_PRIVATE xd_result xdi_live_check(const void *object, const char *type, const char *name, const char *file,
                                    int line, const char *function);
/* live.c: whether it is a context; `used` by this thread from now on. And the one that this thread has used last, NULL -> none. */
XD_PRIVATE bool xdi_live_context(const xd_ctx *ctx, bool used);
XD_PRIVATE xd_ctx *xdi_live_current(void);
#else
#    define XDI_OBJECT(type, ctx, bytes) ((type *)xd_allocate((ctx), (bytes)))
#    define XDI_LIVE(type, object) ((void)0)
#    define XDI_IS_GONE(type, object) false
#    define XDI_BORN(type, ctx, object) ((void)0)
#    define XDI_DEAD(object) ((void)0)
#endif

#endif
