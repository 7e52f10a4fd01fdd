#ifndef XDI_DMD_RECORD_H
#define XDI_DMD_RECORD_H

#include "dmd/dmd.h"

/* JSON for xd_checkpoint_save_desc.state: docs/diffusion.md. It may be a larger object's member "dmd". */

/* Parts of the state. */
typedef enum xd_dmd_state_part {
    XD_DMD_STATE_WARM_UP = 1,  /* its counter */
    XD_DMD_STATE_BINS = 2,     /* of f-distill */
    XD_DMD_STATE_SETTINGS = 4, /* the hash of all settings */
    XD_DMD_STATE_PARTS = 8     /* above every sum */
} xd_dmd_state_part;

/* How strict a load is. Zero: nothing is allowed. */
typedef struct xd_dmd_state_desc {
    int allow_missing;   /* sum of parts, which then stay as they are */
    bool allow_settings; /* clips, losses, weights, guidance, times and absent bins may differ */
} xd_dmd_state_desc;

/* Writes the state between two steps.
 *
 *   text   out; NUL-terminated, free with xd_release; bins and times keep their bits
 *
 * Local, the same on every rank; waits for a GPU if there are bins. Errors: MEMORY, those of the device. */
XD_API xd_result xd_dmd_state_save(xd_dmd *dmd, char **text);

/* Sets counters and bins after xd_checkpoint_load. A failure changes nothing.
 *
 *   text   from xd_checkpoint_load; NULL is MISSING
 *   desc   NULL -> everything must be there
 *
 * Local. Errors: FORMAT (object, member, numbers), UNSUPPORTED (version), MISSING (a part), MISMATCH (seed, schedule, rungs,
 * ratio, roles, averages, settings, bins), MEMORY, those of xd_dmd_resume; ARGUMENT (bins). */
XD_API xd_result xd_dmd_state_load(xd_dmd *dmd, const char *text, const xd_dmd_state_desc *desc);

#endif
