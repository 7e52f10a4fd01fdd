#ifndef XDI_DMD_RECORD_H
#define XDI_DMD_RECORD_H

#include "dmd/dmd.h"

/* The state of a distillation as a piece of a checkpoint. Weights, optimizers and averages of the roles are networks of
 * xd_checkpoint_save; what else resumes a run is a JSON object, made for xd_checkpoint_save_desc.state:
 *
 *     {"kind": "xdistill.dmd", "version": 1, "step": 12, "student": 3, "fake_score": 9, "discriminator": 9, "warm_up": 200,
 *      "phase": "others", "seed": 7, "schedule": "FLOW, t from 0 to 1, least 1e-06", "rungs": "4 steps from 0.999, times 90d1...",
 *      "ratio": "MODELOPT, 1 in 5 after 0", "roles": "student with 1 average, ...", "settings": "5be0...", "bins": [1.5, ...]}
 *
 * So one save is one record: it is there as a whole or not at all. Whoever has a state of his own puts this object into it as the
 * member "dmd". */

/* Parts of the text that a load may do without. */
typedef enum xd_dmd_state_part {
    XD_DMD_STATE_WARM_UP = 1,  /* the counter of warm-up */
    XD_DMD_STATE_BINS = 2,     /* of f-distill */
    XD_DMD_STATE_SETTINGS = 4, /* the hash of all settings */
    XD_DMD_STATE_PARTS = 8     /* above every sum */
} xd_dmd_state_part;

/* How strict a load is. Zero is the default of every field. */
typedef struct xd_dmd_state_desc {
    int allow_missing;   /* sum of parts; what is missing stays as it is in the distillation */
    bool allow_settings; /* settings that are not named in the text may be others: clips, losses, weights,
                          * guidance, times. Bins are not read by a distillation without f-distill */
} xd_dmd_state_desc;

/* The text, of the state between two steps.
 *
 *   text   out; NUL-terminated, to be released with xd_release. Bins and times are written so that they are read to the same bits
 *
 * Local, the same on every rank; waits for a GPU when there are bins. Errors: MEMORY, those of xd_dmd_bins. */
XD_API xd_result xd_dmd_state_save(xd_dmd *dmd, char **text);

/* Sets counters and bins from a text, after xd_checkpoint_load has loaded the rest.
 *
 *   text   as xd_checkpoint_load hands it back; NULL is MISSING
 *   desc   NULL -> everything must be there
 *
 * Local. Nothing is changed by a text that is refused. Errors: FORMAT (no such object, an unknown member, numbers that
 * contradict each other), UNSUPPORTED (another version); MISSING, naming the part; MISMATCH, with both values: another
 * seed, noise schedule, rungs, ratio of steps, set of roles and averages, hash of settings, number of bins; those of
 * xd_dmd_resume and xd_dmd_set_bins; MEMORY. */
XD_API xd_result xd_dmd_state_load(xd_dmd *dmd, const char *text, const xd_dmd_state_desc *desc);

#endif
