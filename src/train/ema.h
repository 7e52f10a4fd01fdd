#ifndef XDI_TRAIN_EMA_H
#define XDI_TRAIN_EMA_H

#include "base/context.h"
#include "kernel/types.h"
#include "tensor/part.h"
#include "train/param.h"

/* Averages this rank's parameters and buffers into shadows, without communication. The average of a shard has the bits of
 * the shard of the average, for every placement, uneven and empty shards too. */
typedef struct xd_ema xd_ema;

/* The decay b of iteration i: shadow += (1 - b) (live - shadow). */
typedef enum xd_ema_schedule {
    XD_EMA_CONSTANT = 0, /* decay */
    XD_EMA_POWER,        /* (1 - 1 / max(i, 1))^(gamma + 1) */
    XD_EMA_HALFLIFE, /* 2^(-batch_size / H), H = 1000 halflife_kimg, at most i batch_size rampup_ratio with ramp-up */
    XD_EMA_RAMP /* min(decay, (1 + i) / (10 + i)), as CREDIT with i from 1 */
} xd_ema_schedule;

/* Settings of an average. Numbers are used as given, 0 too: start from xd_ema_defaults. */
typedef struct xd_ema_desc {
    /* [param_count] F32, BF16, F16 or F64, also frozen; buffers of any dtype; borrowed until xd_ema_destroy. Entries with one
     * value pointer are tied: one shadow with the first name, found by all. */
    const xd_param *params;
    int64_t param_count;
    xd_ema_schedule schedule;
    double decay;         /* CONSTANT, RAMP; in [0, 1]; 0: the average is the weights */
    double gamma;         /* POWER; at least -1 */
    double sigma_rel;     /* POWER; relative width, as in xd_post_hoc_profile, instead of gamma; 0 -> gamma */
    double halflife_kimg; /* HALFLIFE; thousands of samples, above 0 */
    double rampup_ratio;  /* HALFLIFE; at least 0 */
    bool disable_rampup;  /* HALFLIFE */
    int64_t batch_size;   /* HALFLIFE; samples of all ranks in an iteration; 0 -> 1 */
    int64_t start_iteration; /* earlier updates do nothing; 0 -> none is earlier */
    bool init_from_current;  /* the weights at creation count; false: the first update that counts copies */
    /* Of parameters' shadows: F32 BF16 F16 F64; NONE -> F32. A bf16 shadow of 1.0 at decay 0.9999 moves only by differences
     * from 39. */
    xd_dtype dtype;
    bool live_dtype;    /* each shadow has its parameter's dtype instead */
    bool compat_credit; /* b shadow + (1 - b) live, rounded as CREDIT does */
    /* [strip_count] substrings removed from names; must outlive the average; NULL -> "_checkpoint_wrapped_module.",
     * "_fsdp_wrapped_module.", "_orig_mod.", "module." */
    const char *const *strip_tokens;
    int strip_count;
    bool compensated;     /* parameters: F32 shadows with a BF16 term, see below */
    bool stochastic_bf16; /* parameters: BF16 shadows with stochastic rounding, see below */
    uint64_t seed;        /* of stochastic_bf16 */
    /* stochastic_bf16: [count], each entry's place in the whole parameter, without padding rows; must outlive the average;
     * NULL -> adjacent from xd_param.first. */
    const xd_tensor_part *parts;
    /* Shadows of a device in page-locked host memory: the same bits, but an update takes their transfer both ways. */
    bool host;
    /* Floating-point buffers are averaged, as in CREDIT. Integers and names in "_u" or "_v" (spectral norm) are copied.
     * false -> all are copied, as in ModelOpt and FastGen. */
    bool average_buffers;
} xd_ema_desc;

/* Formats for small differences. An f32 shadow s ignores differences below about 2^-24 |s| / (1 - b), 6e-3 |s| at decay
 * 0.99999.
 *
 *    compensated       The average is shadow + term; the BF16 term keeps the rounding error to 8 bits. 2 more bytes an element;
 *                      the limit is 2^-33 |s| / (1 - b). Only the shadow is published
 *    stochastic_bf16   2 bytes. The average is computed in f32 and rounded once, as in xd_optimizer_desc. Random bits depend
 *                      on (seed, stripped name, iteration, index in the whole parameter): the same on every device, after a
 *                      resume and, with `parts` or `first`, for every split
 *
 * dtype is NONE or the format's. live_dtype and compat_credit exclude both. Copies round to nearest. */

/* Returns ModelOpt's EMAConfig: decay 0.9999, gamma 16.97, halflife_kimg 500, rampup_ratio 0.05. Pure. */
XD_API xd_ema_desc xd_ema_defaults(xd_ema_schedule schedule);

/* The state to save with the shadows. */
typedef struct xd_ema_record {
    int format_version; /* 1 */
    int64_t iteration;  /* of the last update, effective or not */
    bool initialized;   /* the shadow is an average, not only the weights at creation */
    xd_ema_desc config;
} xd_ema_record;

/* Result of matching two lists of names. */
typedef struct xd_ema_match {
    int64_t matched;
    int64_t missing_in_shadow; /* only in the caller's list */
    int64_t missing_in_target; /* only in the shadow */
    int64_t wrong_shape;       /* in both, with different counts or shapes */
    char names[200];           /* the first five without a match, ", " between */
} xd_ema_match;

/* Makes xd_ema_update use the last iteration plus one. */
#define XD_EMA_NEXT INT64_C(-1)

/* Creates shadows of desc->params with the current values.
 *
 * Local. One allocation; on a device one there with 64 KiB of counters, one on the host, and one more with `host`.
 * Errors: ARGUMENT (number out of range; stripped names equal; name missing or above 1023 bytes; formats excluded; `first`
 * negative), SHAPE (count of a part), DTYPE, MEMORY, UNSUPPORTED (`host` without page-locked memory). */
XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_ema_desc *desc, xd_ema **out);

/* Frees the shadows; host shadows after their launched work. NULL is fine. */
XD_API void xd_ema_destroy(xd_ema *ema);

/* Updates the average; call once after each optimizer step.
 *
 *    iteration < start_iteration               no change
 *    iteration == start_iteration, or first    shadow <- live; the average is then initialized
 *    otherwise                                 parameters are averaged, buffers copied or averaged
 *
 *    iteration   XD_EMA_NEXT or any value, in any order; it is stored
 *    status      an error prevents the update; NULL -> always update. On a device kernels read it and count iterations. After
 *                4096 refused steps since creation or load, XD_EMA_NEXT takes decays as if no step were refused
 *
 * Local, allocates nothing, does not wait. The same bits on every device and for every split. NaN and infinities propagate.
 * Errors, nothing written: ARGUMENT (iteration below -1; NEXT after INT64_MAX), STATE (list changed; swapped). */
XD_API xd_result xd_ema_update(xd_ema *ema, int64_t iteration, const xd_status *status);

/* Counts at each update the parameter elements whose average keeps all bits, compensation included, although the weight
 * differs. Frozen weights do not count; NaN shadows do.
 *
 *    unmoved   device memory, set by each update and each step with the average; this rank's elements and replicas: sum it over
 *              ranks. 0 if it copies or does nothing. NULL -> stops counting
 *
 * Each update then is a separate pass. Local, allocates nothing; the same count on every device. */
XD_API void xd_ema_count_unmoved(xd_ema *ema, int64_t *unmoved);

/* Swaps shadows with values in place, to evaluate the average. A second call restores every bit. Views and gathered copies
 * of a wrapper follow when formed again.
 *
 * While swapped, xd_ema_update, xd_ema_copy_to, xd_ema_load, steps with this average, saves and exports return STATE; views
 * show the weights. Make no other step: it is not refused. xd_ema_destroy does not swap back.
 *
 * Local, allocates nothing. Errors, nothing swapped: DTYPE (shadow and parameter differ: use xd_ema_copy_to), STATE (list
 * changed). */
XD_API xd_result xd_ema_swap(xd_ema *ema);

/* One average: name, value, dtype, count, shape, flags. */
typedef struct xd_ema_entry {
    xd_param shadow;
    /* BF16, to save or restore in place: the average is shadow + compensation. Empty for copies and without `compensated`. */
    xd_param compensation;
} xd_ema_entry;

/* Returns average `index`, valid until xd_ema_destroy, following updates; empty out of range. */
XD_API xd_ema_entry xd_ema_view(const xd_ema *ema, int64_t index);

/* Writes shadows to parameters and buffers by name, converted to their dtypes.
 *
 *    targets   [count]; values in device memory; gradients and flags are not read
 *    lenient   false -> every name must be in both lists, except tied ones
 *    match     when not NULL: receives the counts, also on failure
 *
 * Local. Errors, nothing written: MISSING, UNEXPECTED (a name in one list only; strict), SHAPE, ARGUMENT (elements at NULL),
 * DTYPE (no such cast), STATE (swapped). */
XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match);

/* How to load saved values. */
typedef struct xd_ema_load_desc {
    const xd_param *sources; /* [source_count] values in device memory, by name */
    int64_t source_count;
    /* From xd_ema_describe; NULL -> the iteration stays. The average is then initialized if the record is or every parameter
     * was filled. */
    const xd_ema_record *record;
    bool lenient; /* as in xd_ema_copy_to */
} xd_ema_load_desc;

/* Fills shadows by name; match and errors as xd_ema_copy_to, lists exchanged. Filled compensations become zero.
 *
 *    match  may be NULL
 *
 * Local. Further errors: FORMAT (record of another version). */
XD_API xd_result xd_ema_load(xd_ema *ema, const xd_ema_load_desc *desc, xd_ema_match *match);

/* Facts of an average. */
typedef struct xd_ema_info {
    xd_ema_record record; /* to save; config has defaults filled in and no list */
    int64_t count;        /* shadows; tied names not counted */
    double decay;         /* of the schedule at record.iteration */
    bool swapped;         /* shadows and values are swapped */
} xd_ema_info;

/* Returns the facts. On a device it waits for updates if one had a status. */
XD_API xd_ema_info xd_ema_describe(const xd_ema *ema);

#endif
