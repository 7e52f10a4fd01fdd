#ifndef XDI_DMD_RECORD_H
#define XDI_DMD_RECORD_H

#include "dmd/dmd.h"

/* The state of a distillation as JSON for xd_checkpoint_save_desc.state: docs/diffusion.md. A caller with a state of its own
 * adds this object as the member "dmd". */

/* Parts that a load may do without. */
typedef enum xd_dmd_state_part {
    XD_DMD_STATE_WARM_UP = 1,  /* the warm-up counter */
    XD_DMD_STATE_BINS = 2,     /* of f-distill */
    XD_DMD_STATE_SETTINGS = 4, /* the hash of all settings */
    XD_DMD_STATE_PARTS = 8     /* above every sum */
} xd_dmd_state_part;

/* How strict a load is; all zero by default. */
typedef struct xd_dmd_state_desc {
    int allow_missing; /* sum of parts; a missing part stays as it is */
    /* Settings that the text does not name may differ: clips, losses, weights, guidance, times, bins without f-distill. */
    bool allow_settings;
} xd_dmd_state_desc;

/* Writes the state between two steps.
 *
 *   text   out; NUL-terminated, to be released with xd_release; bins and times keep their bits
 *
 * Local, the same on every rank; waits for a GPU if there are bins. Errors: MEMORY, those of xd_dmd_bins. */
XD_API xd_result xd_dmd_state_save(xd_dmd *dmd, char **text);

/* Sets counters and bins after xd_checkpoint_load. A refused text changes nothing.
 *
 *   text   from xd_checkpoint_load; NULL is MISSING
 *   desc   NULL -> everything must be there
 *
 * Local. Errors: FORMAT (no such object, unknown member, contradictory numbers), UNSUPPORTED (version), MISSING (a part), MISMATCH
 * (seed, schedule, rungs, ratio of steps, roles, averages, settings, bins), MEMORY, those of xd_dmd_resume and
 * xd_dmd_set_bins. */
XD_API xd_result xd_dmd_state_load(xd_dmd *dmd, const char *text, const xd_dmd_state_desc *desc);

#endif
