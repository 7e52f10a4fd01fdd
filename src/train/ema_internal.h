#ifndef XDI_TRAIN_EMA_INTERNAL_H
#define XDI_TRAIN_EMA_INTERNAL_H

#include "train/internal.h"

/* What the files of the averages share. */

enum { XDI_EMA_NAME_ROOM = 1024 }; /* names of some calls are on the stack */

/* One shadow, and the entry of the caller's list it follows. */
typedef struct xdi_ema_shadow {
    void *value;
    uint16_t *compensation; /* NULL -> none */
    const char *name;       /* stripped */
    int64_t source;         /* index into the caller's list */
    xd_dtype dtype;
    uint64_t key; /* of its random bits */
    bool tied;    /* several entries of the list */
    bool copied;  /* not averaged: of a buffer */
} xdi_ema_shadow;

/* One name of the caller's list; tied entries point to one shadow. */
typedef struct xdi_ema_name {
    const char *text;
    int64_t shadow;
} xdi_ema_name;

/* The last update, so that the next one need not do the same again. */
typedef struct xdi_ema_last {
    const void *optimizer; /* of the last step that the average joined */
    int64_t lerp_count;    /* of an update of all shadows; 0 after another one */
    bool none_left;        /* that step has updated every shadow */
} xdi_ema_last;

struct xd_ema {
    xd_ctx *ctx;
    xd_ema_desc desc;
    const xd_param *params; /* the caller's */
    int64_t param_count;
    xd_param *created;       /* [param_count]; the list at creation, to notice changes */
    xdi_ema_name *names;     /* [param_count] */
    int64_t *slots;          /* [slot_count]; hash table of names: 1 + index into names, 0 = free */
    int64_t slot_count;      /* a power of two, at least twice param_count */
    xdi_ema_shadow *shadows; /* [shadow_count], room for param_count */
    int64_t shadow_count;
    xd_lerp_array *lerps; /* [param_count] */
    xdi_ema_last last;
    xd_average_array *moves; /* [param_count]; filled in by a step that updates the average beside others */
    xd_cast_array *casts;    /* [param_count] */
    int64_t iteration;
    bool initialized;
    bool swapped;
    int64_t *unmoved;      /* the caller's; NULL -> not counted */
    void *device_memory;   /* of the device: the counters, and the shadows unless they are on the host */
    void *locked;          /* page-locked, of the shadows then; NULL otherwise */
    xd_array_list *list;   /* of the lerps, on a device; NULL on the CPU */
    xd_average_turn *turn; /* counters in memory of the device; NULL on the CPU */
    /* the device has the counters, since some step may have been refused; `iteration` is as if none had */
    bool counts_there;
    int64_t most; /* then: no iteration is above it */
};

/* ema.c: the shadow of a caller's name, -1 for an unknown name. `room` receives the stripped name. */
XD_PRIVATE int64_t xdi_ema_find(const xd_ema *ema, const char *name, char *room, size_t room_bytes);

/* ema.c: the decay of an iteration. */
XD_PRIVATE double xdi_ema_decay_at(const xd_ema_desc *d, int64_t iteration);

/* ema.c: the counters as they are, wherever. On a device this waits. After recall the host has them again. */
XD_PRIVATE void xdi_ema_read_counters(const xd_ema *ema, int64_t *iteration, bool *initialized);
XD_PRIVATE void xdi_ema_recall_counters(xd_ema *ema);

#endif
