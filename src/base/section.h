#ifndef XDI_BASE_SECTION_H
#define XDI_BASE_SECTION_H

#include "base/config.h"

/* Functions that several parts use: private to the unit, or hidden where sections are linked. Options may leave them unused. */
#if !defined(XD_PRIVATE)
#    if defined(XDISTILL_SECTION) && defined(__GNUC__)
#        define XD_PRIVATE extern __attribute__((visibility("hidden")))
#    elif defined(XDISTILL_SECTION)
#        define XD_PRIVATE extern
#    elif defined(__GNUC__)
#        define XD_PRIVATE static __attribute__((unused))
#    else
#        define XD_PRIVATE static
#    endif
#endif

/* Functions that only tie sections together. Each section calls the one of every other section. Their names contain the
 * version and the options, so linking fails if a section is missing or was compiled with others. */
#if defined(XDISTILL_SECTION)
#    if defined(XDISTILL_NO_ACROSS)
#        define XDI_OF_ACROSS _no_across
#    else
#        define XDI_OF_ACROSS
#    endif
#    if defined(XDISTILL_NO_MODELS)
#        define XDI_OF_MODELS _no_models
#    else
#        define XDI_OF_MODELS
#    endif
#    if defined(XDISTILL_NO_DIFFUSION)
#        define XDI_OF_DIFFUSION _no_diffusion
#    else
#        define XDI_OF_DIFFUSION
#    endif
#    if defined(XDI_PORTABLE)
#        define XDI_OF_PORTABLE _portable
#    else
#        define XDI_OF_PORTABLE
#    endif

#    define XDI_SECTION_PASTE(kind, n, major, minor, patch, across, models, diffusion, portable) \
        xdistill_##kind##_##n##_v##major##_##minor##_##patch##across##models##diffusion##portable
#    define XDI_SECTION_EXPAND(kind, n, major, minor, patch, across, models, diffusion, portable) \
        XDI_SECTION_PASTE(kind, n, major, minor, patch, across, models, diffusion, portable)
#    define XDI_SECTION_NAME(kind, n)                                                                    \
        XDI_SECTION_EXPAND(kind, n, XD_VERSION_MAJOR, XD_VERSION_MINOR, XD_VERSION_PATCH, XDI_OF_ACROSS, \
                           XDI_OF_MODELS, XDI_OF_DIFFUSION, XDI_OF_PORTABLE)

XD_PRIVATE void XDI_SECTION_NAME(section, 1)(void);
XD_PRIVATE void XDI_SECTION_NAME(section, 2)(void);
XD_PRIVATE void XDI_SECTION_NAME(section, 3)(void);
XD_PRIVATE void XDI_SECTION_NAME(section, 4)(void);
XD_PRIVATE void XDI_SECTION_NAME(section, 5)(void);
XD_PRIVATE void XDI_SECTION_NAME(section, 6)(void);
XD_PRIVATE void XDI_SECTION_NAME(sections_of, XDISTILL_SECTION)(void);

XD_PRIVATE void XDI_SECTION_NAME(section, XDISTILL_SECTION)(void) {}

XD_PRIVATE void XDI_SECTION_NAME(sections_of, XDISTILL_SECTION)(void) {
    XDI_SECTION_NAME(section, 1)();
    XDI_SECTION_NAME(section, 2)();
    XDI_SECTION_NAME(section, 3)();
#    if !defined(XDISTILL_NO_ACROSS)
    XDI_SECTION_NAME(section, 4)();
#    endif
#    if !defined(XDISTILL_NO_MODELS)
    XDI_SECTION_NAME(section, 5)();
#    endif
#    if !defined(XDISTILL_NO_DIFFUSION)
    XDI_SECTION_NAME(section, 6)();
#    endif
}
#endif

#endif
