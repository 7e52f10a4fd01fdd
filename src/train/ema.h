#ifndef XDI_TRAIN_EMA_H
#define XDI_TRAIN_EMA_H

#include "base/context.h"
#include "kernel/types.h"
#include "tensor/part.h"
#include "train/param.h"

/* Averages this rank's parameters and buffers into shadows, without communication. */
typedef struct xd_ema xd_ema;

/* The decay b of iteration i: shadow += (1 - b) (live - shadow). */
typedef enum xd_ema_schedule {
    XD_EMA_CONSTANT = 0, /* decay */
    XD_EMA_POWER,        /* (1 - 1 / max(i, 1))^(gamma + 1) */
    XD_EMA_HALFLIFE, /* 2^(-batch_size / H), H = 1000 halflife_kimg, at most i batch_size rampup_ratio with ramp-up */
    XD_EMA_RAMP /* min(decay, (1 + i) / (10 + i)); CREDIT counts i from 1 */
} xd_ema_schedule;

/* Settings; 0 is a number: start from xd_ema_defaults. */
typedef struct xd_ema_desc {
    /* [param_count] F32 BF16 F16 F64, also frozen; buffers of any dtype; borrowed until destruction. Entries with one value
     * are tied: they share a shadow with the first name, which each of their names finds. */
    const xd_param *params;
    int64_t param_count;
    xd_ema_schedule schedule;
    double decay;            /* CONSTANT, RAMP; in [0, 1] */
    double gamma;            /* POWER; at least -1 */
    double sigma_rel;        /* POWER; as in xd_post_hoc_profile; 0 -> gamma */
    double halflife_kimg;    /* HALFLIFE; thousands of samples, above 0 */
    double rampup_ratio;     /* HALFLIFE; at least 0 */
    bool disable_rampup;     /* HALFLIFE */
    int64_t batch_size;      /* HALFLIFE; samples of all ranks; 0 -> 1 */
    int64_t start_iteration; /* earlier updates do nothing */
    bool init_from_current;  /* average the weights at creation too; false: the first update copies */
    /* Of parameters' shadows: F32 BF16 F16 F64; NONE -> F32. */
    xd_dtype dtype;
    bool live_dtype;    /* each shadow has its parameter's dtype instead */
    bool compat_credit; /* b shadow + (1 - b) live, CREDIT's rounding */
    /* [strip_count] removed from names; must outlive the average; NULL -> "_checkpoint_wrapped_module.",
     * "_fsdp_wrapped_module.", "_orig_mod.", "module." */
    const char *const *strip_tokens;
    int strip_count;
    bool compensated;     /* F32 shadow + BF16 term: docs/questions.md */
    bool stochastic_bf16; /* BF16 shadows, stochastic rounding */
    uint64_t seed;        /* of its rounding */
    /* stochastic_bf16: [count] place in the whole parameter, without padding rows; must outlive the average; NULL ->
     * xd_param.first. */
    const xd_tensor_part *parts;
    /* A device's shadows in page-locked host memory: the same bits; updates transfer them both ways. */
    bool host;
    /* Average floating-point buffers, as CREDIT; copy integers and names that end in "_u", "_v". false -> copy all, as
     * ModelOpt, FastGen. */
    bool average_buffers;
} xd_ema_desc;

/* Returns ModelOpt's EMAConfig: decay 0.9999, gamma 16.97, halflife_kimg 500, rampup_ratio 0.05. Pure. */
XD_API xd_ema_desc xd_ema_defaults(xd_ema_schedule schedule);

/* To save with the shadows. */
typedef struct xd_ema_record {
    int format_version; /* 1 */
    int64_t iteration;  /* of the last update, effective or not */
    bool initialized;   /* an average, not only the weights at creation */
    xd_ema_desc config;
} xd_ema_record;

/* Counts of two lists of names. */
typedef struct xd_ema_match {
    int64_t matched;
    int64_t missing_in_shadow; /* in the caller's list only */
    int64_t missing_in_target; /* in the shadow only */
    int64_t wrong_shape;       /* in both; count or shape differs */
    char names[200];           /* first five without a match; ", " between */
} xd_ema_match;

/* The last iteration plus one. */
#define XD_EMA_NEXT INT64_C(-1)

/* Creates shadows with the current values. Local. One allocation on the host; on a device one there too, with 64 KiB of
 * counters; with `host` one more, page-locked.
 * Errors: ARGUMENT (a number; names: none, equal, above 1023 bytes; formats; first), SHAPE (parts), DTYPE, MEMORY,
 * UNSUPPORTED (host). */
XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_ema_desc *desc, xd_ema **out);

/* Frees the shadows; those in page-locked memory after launched work has ended. NULL is fine. */
XD_API void xd_ema_destroy(xd_ema *ema);

/* Updates the average, once after each optimizer step. The update of start_iteration, or the first, copies; earlier ones do
 * nothing.
 *
 *    iteration   XD_EMA_NEXT or any, in any order; stored
 *    status      its errors prevent the update; NULL -> none do
 *
 * Local, allocates nothing, does not wait. The same bits on every device and for every split. NaN and infinities propagate.
 * Errors, nothing written: ARGUMENT (iteration below -1; NEXT after INT64_MAX), STATE (list changed; swapped). */
XD_API xd_result xd_ema_update(xd_ema *ema, int64_t iteration, const xd_status *status);

/* Counts at each update the parameter elements whose average, with compensation, keeps all bits although the weight differs.
 * Frozen weights do not count; NaN shadows do.
 *
 *    unmoved   device memory, set by each update: this rank's elements and replicas; 0 if it copies or does nothing.
 *              NULL -> stops counting
 *
 * Each update is then a separate pass. Local, allocates nothing; the same count on every device. */
XD_API void xd_ema_count_unmoved(xd_ema *ema, int64_t *unmoved);

/* Swaps shadows with values in place; a second call restores every bit. xd_parallel_publish afterwards.
 *
 * While swapped, xd_ema_update, xd_ema_copy_to, xd_ema_load, steps with this average, saves and exports return STATE, and
 * xd_ema_view shows the weights. Other steps are not refused: make none. xd_ema_destroy does not swap back.
 *
 * Local, allocates nothing. Errors, nothing swapped: DTYPE (differs: xd_ema_copy_to), STATE (list changed). */
XD_API xd_result xd_ema_swap(xd_ema *ema);

/* The average of one parameter or buffer. */
typedef struct xd_ema_entry {
    xd_param shadow;
    /* BF16, to save or restore in place; empty for copies and without `compensated`. */
    xd_param compensation;
} xd_ema_entry;

/* Returns an entry, which follows updates and is valid until destruction; empty out of range. */
XD_API xd_ema_entry xd_ema_view(const xd_ema *ema, int64_t index);

/* Writes shadows to parameters and buffers by name, converted to their dtypes.
 *
 *    targets   [count]; values in device memory; gradients and flags are not read
 *    lenient   false -> both lists have every name, except tied ones
 *    match     also filled in on failure; may be NULL
 *
 * Local. Errors, nothing written: MISSING, UNEXPECTED (unless lenient), SHAPE, ARGUMENT (elements at NULL), DTYPE (no such
 * cast), STATE (swapped). */
XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match);

/* Saved values. */
typedef struct xd_ema_load_desc {
    const xd_param *sources; /* [source_count], by name; values in device memory */
    int64_t source_count;
    /* NULL -> the iteration stays. The average is initialized if the record is or every parameter was filled. */
    const xd_ema_record *record;
    bool lenient; /* as in xd_ema_copy_to */
} xd_ema_load_desc;

/* Fills shadows by name, as xd_ema_copy_to with lists exchanged. Filled compensations become zero.
 *
 *    match   may be NULL
 *
 * Local. Errors: those of xd_ema_copy_to, FORMAT (version of record). */
XD_API xd_result xd_ema_load(xd_ema *ema, const xd_ema_load_desc *desc, xd_ema_match *match);

/* Facts of an average. */
typedef struct xd_ema_info {
    xd_ema_record record; /* config with defaults, without params */
    int64_t count;        /* of shadows */
    double decay;         /* at record.iteration */
    bool swapped;         /* with the values */
} xd_ema_info;

/* Returns the facts. Waits for a device's updates if one had a status. */
XD_API xd_ema_info xd_ema_describe(const xd_ema *ema);

#endif
