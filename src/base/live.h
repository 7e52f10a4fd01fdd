#ifndef XDI_BASE_LIVE_H
#define XDI_BASE_LIVE_H

#include "base/context.h"
#include "base/section.h"

/* With XDISTILL_DEBUG: which objects there are, so that a call refuses one that was destroyed, or is none, without reading it.
 * XDI_BORN and XDI_DEAD note one; without the option they are nothing. */
#if defined(XDISTILL_DEBUG)
#    define XDI_BORN(type, ctx, object) xdi_live_begin((ctx), (object), #    type)
#    define XDI_DEAD(object) xdi_live_end(object)

/* live.c: what is known of an object as one of a type; *other: the type that it has instead, NULL -> none. */
typedef enum xdi_life { XDI_LIFE_ALIVE, XDI_LIFE_DESTROYED, XDI_LIFE_UNKNOWN } xdi_life;
XD_PRIVATE xdi_life xdi_live_ask(const void *object, const char *type, const char **other);
XD_PRIVATE void xdi_live_begin(xd_ctx *ctx, const void *object, const char *type);
XD_PRIVATE void xdi_live_end(const void *object); /* also of other memory, which stays unknown */

/* live.c: notes that this thread uses a context, false when it is none; and the one that it has used last, NULL -> none. */
XD_PRIVATE bool xdi_live_use(const xd_ctx *ctx);
XD_PRIVATE xd_ctx *xdi_live_current(void);
#else
#    define XDI_BORN(type, ctx, object) ((void)0)
#    define XDI_DEAD(object) ((void)0)
#endif

#endif
