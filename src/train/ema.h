#ifndef XDI_TRAIN_EMA_H
#define XDI_TRAIN_EMA_H

#include "base/context.h"
#include "kernel/types.h"
#include "tensor/part.h"
#include "train/param.h"

/* Exponential moving average of a model: shadows of this rank's parameters, which are averaged, and of its buffers,
 * which are copied unless average_buffers says otherwise. The average of a shard has the same bits as the shard of the
 * average, for every placement, uneven and empty shards included; so nothing here communicates. */
typedef struct xd_ema xd_ema;

/* The decay b of iteration i; the shadow moves by (1 - b) of the difference. */
typedef enum xd_ema_schedule {
    XD_EMA_CONSTANT = 0, /* decay */
    XD_EMA_POWER,        /* (1 - 1 / max(i, 1))^(gamma + 1) */
    XD_EMA_HALFLIFE,     /* 2^(-batch_size / H), H = 1000 halflife_kimg; with the ramp-up H is at most
                          * i * batch_size * rampup_ratio */
    XD_EMA_RAMP          /* min(decay, (1 + i) / (10 + i)), as CREDIT counts from i = 1 */
} xd_ema_schedule;

/* Settings of an average. Numbers are used as given, 0 too, so start from xd_ema_defaults. */
typedef struct xd_ema_desc {
    xd_ema_schedule schedule;
    double decay;            /* CONSTANT, RAMP; in [0, 1]; 0: the average is the weights themselves */
    double gamma;            /* POWER; at least -1 */
    double halflife_kimg;    /* HALFLIFE; thousands of samples, above 0 */
    double rampup_ratio;     /* HALFLIFE; at least 0 */
    bool disable_rampup;     /* HALFLIFE */
    int64_t batch_size;      /* HALFLIFE; samples of all ranks in an iteration; 0 -> 1 */
    int64_t start_iteration; /* earlier updates do nothing; 0 -> the first update already counts */
    bool init_from_current;  /* the weights at creation count; without it the first update that counts
                              * copies */
    xd_dtype dtype;          /* of shadows of parameters: F32 BF16 F16 F64; NONE -> F32. A narrow shadow stops
                              * changing: bf16 at decay 0.9999 needs a difference of 39 to change a 1.0 */
    bool live_dtype;         /* every shadow in its parameter's own dtype instead */
    bool compat_credit;      /* b * shadow + (1 - b) * live, rounded as CREDIT does, instead of the lerp */
    const char *const *strip_tokens; /* [strip_count] substrings removed from names; must outlive the average;
                                      * NULL -> what wrappers add: "_checkpoint_wrapped_module.",
                                      * "_fsdp_wrapped_module.", "_orig_mod.", "module." */
    int strip_count;
    bool compensated; /* F32 shadows of parameters with a BF16 term for what they cannot hold, see below */
    bool stochastic_bf16;        /* BF16 shadows of parameters, rounded up or down at random, see below */
    uint64_t seed;               /* of that rounding */
    const xd_tensor_part *parts; /* stochastic_bf16: [count], where the elements of each entry are in the
                                  * whole parameter, rows of padding behind it apart; must outlive the
                                  * average; NULL -> adjacent, from xd_param.first on */
    /* On a device: shadows in page-locked memory of the host, which kernels reach by the link to it, so that an update takes as
     * long as this carries them both ways; the same bits. Elsewhere nothing changes. */
    bool host;
    /* Buffers of floating types, running statistics of norms for example, are averaged as parameters are: as CREDIT's tracker
     * does. Those whose names end in "_u" or "_v", the vectors of spectral norm, are copied, for an average of them has not
     * length 1; so are integers, which that tracker averages. false -> every buffer is copied, as ModelOpt and FastGen do */
    bool average_buffers;
} xd_ema_desc;

/* Two formats whose shadows follow differences that others do not see. An f32 shadow s stands still while the weight is nearer
 * than about 2^-24 |s| / (1 - b): 6e-3 of it at decay 0.99999.
 *
 *   compensated       the average is shadow + term. Each update rounds the sum to the shadow and keeps what was lost, in 8 bits,
 *                     as the term: 2 bytes more an element, and it stands still 512 times nearer, 2^-33 |s| / (1 - b).
 *                     What is published is the shadow alone, which is the average rounded to f32
 *   stochastic_bf16   2 bytes instead of 4. The average of the shadow and the weight, which is not rounded first, is computed
 *                     in f32 and stored as the neighbour above or below, with the probabilities that make the mean exact (as
 *                     xd_optimizer_desc.stochastic_bf16). The random bits are a function of (seed, name without wrappers,
 *                     iteration, index in the whole parameter): the same on every device, after a resumed run and, with
 *                     `parts` or `first`, for every cut
 *
 * dtype is NONE or that of the format; live_dtype and compat_credit exclude both. Copies round to nearest. */

/* A desc with the references' numbers: decay 0.9999, gamma 16.97, halflife_kimg 500, rampup_ratio 0.05 (ModelOpt,
 * EMAConfig). Pure. */
XD_API xd_ema_desc xd_ema_defaults(xd_ema_schedule schedule);

/* What is saved beside the shadows. */
typedef struct xd_ema_record {
    int format_version; /* 1 */
    int64_t iteration;  /* of the last update, effective or not */
    bool initialized;   /* the shadow holds an average, not just the weights at creation */
    xd_ema_desc config;
} xd_ema_record;

/* How two lists of names match. */
typedef struct xd_ema_match {
    int64_t matched;
    int64_t missing_in_shadow; /* in the caller's list only */
    int64_t missing_in_target; /* in the shadow only */
    int64_t wrong_shape;       /* in both, with other element counts or shapes */
    char names[200];           /* the first five that did not match, ", " between */
} xd_ema_match;

/* The iteration that xd_ema_update counts by itself: one after the last. */
#define XD_EMA_NEXT INT64_C(-1)

/* The decay at an iteration. Pure. Errors: ARGUMENT as for xd_ema_create, or for a negative iteration. */
XD_API xd_result xd_ema_decay(xd_ctx *ctx, const xd_ema_desc *desc, int64_t iteration, double *decay);

/* Creates shadows holding the current values.
 *
 *   params   [count]; borrowed until xd_ema_destroy. Frozen ones are averaged too. Parameters are F32, BF16,
 *            F16 or F64; buffers are of any dtype. Entries with the same value pointer are
 *            tied: they have one shadow, under the first name, and every one of their names finds it
 *   desc     NULL -> xd_ema_defaults(XD_EMA_CONSTANT)
 *
 * Local; one allocation; on a device one there, with 64 KiB for counters, and one on the host, with xd_ema_desc.host one more.
 * Errors: ARGUMENT (numbers outside the ranges above; two names that are equal once stripped; no name, or one of
 * more than 1023 bytes; formats that exclude each other; first negative), SHAPE (a part of another count), DTYPE, MEMORY,
 * UNSUPPORTED (`host` on a device that offers no page-locked memory). */
XD_API xd_result xd_ema_create(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                               xd_ema **out);

/* What xd_ema_create takes with these arguments; desc NULL as there. Local, allocates nothing. Errors: as xd_ema_create, but
 * MEMORY and what is wrong with names. */
XD_API xd_result xd_ema_bytes(xd_ctx *ctx, const xd_param *params, int64_t count, const xd_ema_desc *desc,
                              xd_memory_bytes *out);

/* Frees the shadows, those on the host when what was launched on them is done. NULL is fine. */
XD_API void xd_ema_destroy(xd_ema *ema);

/* Once after every step of the model's optimizer:
 *   iteration < start_iteration                            no change
 *   iteration == start_iteration, or not initialized yet   shadow <- live; now initialized
 *   otherwise                                              parameters averaged, buffers copied, or averaged too
 *
 *   iteration   XD_EMA_NEXT, or any value, not necessarily increasing; it is stored
 *   status      when it holds an error neither values nor the iteration change; NULL -> always update. On a device the host
 *               does not read it: the device counts from then on, to the same values and the same iteration. It knows the decays
 *               of 4096 refused steps, since creation or the last load; beyond them those of XD_EMA_NEXT are as if only so many
 *               had been refused
 *
 * Local, allocates nothing, waits for nothing; the same bits on every device and for every split. NaN and infinities pass through.
 * Errors: ARGUMENT (iteration below -1; NEXT after INT64_MAX), STATE when the list changed since creation or is exchanged
 * with the shadows; nothing is written. */
XD_API xd_result xd_ema_update(xd_ema *ema, int64_t iteration, const xd_status *status);

/* Counts, in every update from now on, the elements of parameters that an average leaves to the bit as they were, a compensation
 * too, although their weights differ from them: those in the zone where nothing moves. Frozen weights do not differ and are not
 * counted; a shadow that is NaN is.
 *
 *   unmoved   in memory of the context's device; set by each update and by each step that updates the average, of the elements
 *             here alone, replicas too: sum it over ranks that hold different ones. 0 after an update that copies or does
 *             nothing. NULL -> not counted any more
 *
 * The update is then a pass over memory of its own. Local, allocates nothing; the same number on every device. */
XD_API void xd_ema_count_unmoved(xd_ema *ema, int64_t *unmoved);

/* Exchanges the shadows with the values of the parameters and buffers, in place: to evaluate the average with the model's own
 * memory. A second call exchanges them back; every bit is then as before. What the model computes with must be those values: a
 * wrapper's views and gathered copies follow when they are formed again.
 *
 * While they are exchanged xd_ema_update, xd_ema_copy_to, xd_ema_load, steps that name the average, saves and exports return
 * STATE, and views show the weights. Steps that do not name it cannot know: do not step. xd_ema_destroy does not exchange back.
 *
 * Local, allocates nothing, a block at a time. Errors: DTYPE when a shadow has another dtype than its parameter, since neither
 * could hold the other (publish with xd_ema_copy_to instead); STATE when the list changed since creation. Nothing is
 * exchanged then. */
XD_API xd_result xd_ema_swap(xd_ema *ema);

/* Whether shadows and values are exchanged now. */
XD_API bool xd_ema_is_swapped(const xd_ema *ema);

/* Number of shadows, tied names not counted, and a view of one: name, value, dtype, count, shape, flags. The
 * view is valid until xd_ema_destroy and changes with every update. An index out of range gives an empty
 * view. */
XD_API int64_t xd_ema_count(const xd_ema *ema);
XD_API xd_param xd_ema_view(const xd_ema *ema, int64_t index);

/* The compensation of a shadow, BF16, to save and to restore in place: the average of view i is xd_ema_view(ema, i) +
 * xd_ema_compensation(ema, i). An empty view for what is copied, and without xd_ema_desc.compensated. */
XD_API xd_param xd_ema_compensation(const xd_ema *ema, int64_t index);

/* Writes shadows into a list of parameters and buffers by name, converted to their dtypes: to publish,
 * to evaluate, to save.
 *
 *   targets   [count]; values in memory of the context's device; gradients and flags are not read
 *   lenient   false -> every name must be in both lists, tied names apart
 *   match     when not NULL: receives the counts, also on failure
 *
 * Local. Errors: MISSING or UNEXPECTED (a name in one list only, strict), SHAPE (strict or not), ARGUMENT (elements at
 * NULL), DTYPE (types that no cast converts), STATE while shadows and values are exchanged. Nothing is written then. */
XD_API xd_result xd_ema_copy_to(const xd_ema *ema, const xd_param *targets, int64_t count, bool lenient,
                                xd_ema_match *match);

/* How to fill an average from saved values. Zero is the default of every field. */
typedef struct xd_ema_load_desc {
    /* What xd_ema_describe returned when the values were saved; NULL -> the iteration does not change. The average is initialized
     * afterwards when every parameter was filled or the record is of an initialized one. */
    const xd_ema_record *record;
    bool lenient; /* false -> every name must be in both lists, tied names apart */
} xd_ema_load_desc;

/* Fills shadows from a list by name; match and errors as for xd_ema_copy_to, with the roles of the lists changed.
 * Compensations of what was filled are zero afterwards: restore them in place (xd_ema_compensation).
 *
 *   desc   NULL -> defaults
 *   match  may be NULL
 *
 * Local. Further errors: FORMAT for a record of another version. */
XD_API xd_result xd_ema_load(xd_ema *ema, const xd_param *sources, int64_t count,
                             const xd_ema_load_desc *desc, xd_ema_match *match);

/* The state to save beside the shadows; defaults are filled in. On a device it waits for the updates before, if one had a
 * status. */
XD_API xd_ema_record xd_ema_describe(const xd_ema *ema);

#endif
