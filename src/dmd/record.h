#ifndef XDI_DMD_RECORD_H
#define XDI_DMD_RECORD_H

#include "dmd/dmd.h"

/* JSON for xd_checkpoint_save_desc.state, or its member "dmd": docs/diffusion.md. */

/* Parts. */
typedef enum xd_dmd_state_part {
    XD_DMD_STATE_WARM_UP = 1,  /* counter */
    XD_DMD_STATE_BINS = 2,     /* of f-distill */
    XD_DMD_STATE_SETTINGS = 4, /* hash */
    XD_DMD_STATE_PARTS = 8     /* above every sum */
} xd_dmd_state_part;

/* What a load allows. */
typedef struct xd_dmd_state_desc {
    int allow_missing;   /* sum of parts that may be absent; they stay as they are */
    bool allow_settings; /* other clips, losses, weights, guidance, times; absent bins */
} xd_dmd_state_desc;

/* Writes the state between two steps, NUL-terminated, to free with xd_release; the same on every rank. Local; waits for
 * a GPU if there are bins. Errors: MEMORY, those of the device. */
XD_API xd_result xd_dmd_state_save(xd_dmd *dmd, char **text);

/* Sets counters and bins.
 *
 *   text   from xd_checkpoint_load; NULL is MISSING
 *   desc   NULL -> nothing allowed
 *
 * Local. Errors: FORMAT (object, member, numbers), UNSUPPORTED (version), MISSING (a part), MISMATCH (seed, schedule,
 * rungs, ratio, roles, averages, settings, bins), MEMORY, those of xd_dmd_resume; ARGUMENT (bins). */
XD_API xd_result xd_dmd_state_load(xd_dmd *dmd, const char *text, const xd_dmd_state_desc *desc);

#endif
