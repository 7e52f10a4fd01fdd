/* xd_private.h - private functions (xdi_) of the upper layers, for tests that call them. Programs that contain the library have
 * them already. */
#ifndef XD_TEST_PRIVATE_H
#define XD_TEST_PRIVATE_H

#if defined(XD_TEST_LAYERS)
#    include "align/chunks.h"
#    include "align/internal.h"
#    include "align/rows.h"
#    include "compat/align_dp.h"
#    include "compat/canonical.h"
#    include "compat/compat.h"
#    include "compat/route_plan.h"
#    include "compat/uld_chunks.h"
#endif

#endif
