#ifndef XDI_MODEL_DESCRIBE_INTERNAL_H
#define XDI_MODEL_DESCRIBE_INTERNAL_H

#include "base/internal.h"
#include "kernel/kernels.h"
#include "model/model.h"
#include "model/pass.h"
#include "model/recompute.h"
#include "tensor/internal.h"

struct xdi_flat; /* of a wrapper */
struct xdi_unit;
struct xd_parallel;

struct xd_weight {
    xd_model *model;
    xd_block *block;
    xd_weight *next;  /* of its block */
    xd_weight *owner; /* itself, or what it is tied to */
    char *name;       /* full; belongs to the table of names */
    xd_weight_desc desc;
    xd_region region;
    /* what of it is no padding, of a weight with stored rows that it does not have; NULL: all */
    xd_region *saved;
    int64_t index; /* in the model's order, once sealed */
    int64_t count;
    int64_t shape[XD_DIMS_MAX]; /* of the region */
    void *value, *gradient;
    bool ready;
    xd_gradient_state state; /* of the gradient of a wrapped model, in its lists too */
    bool used;               /* a backward of this step has opened a block with it, or with a tie to it */
    bool awaited;            /* values come as soon as there is memory for them: nothing forms first ones */
    xd_dtype declared;       /* the type before a wrapper gave it another one; NONE -> none did */
    void *own;               /* its storage in the model, of that type; NULL -> none */
    /* of a wrapper: where its values and gradients are, and which of that buffer's weights it is */
    struct xdi_flat *flat;
    int64_t flat_index;
};

enum { XDI_BLOCK_OPEN_MAX = 8 /* brackets of one block inside one another */ };

struct xd_block {
    xd_model *model;
    xd_block *parent, *next, *first_child, *last_child; /* next: the parent's next child */
    xd_weight *first_weight, *last_weight;
    const char *name; /* full; belongs to the table of names */
    xd_block_desc desc;
    char *type;           /* the desc's, copied */
    int64_t first, count; /* its own weights in the model's order, once sealed */
    bool expert;          /* its weights are those of experts, once wrapped */
    /* of a wrapper: in which the block is, or is around, for other weights and for those of experts */
    struct xdi_unit *units[2];
    xd_pass passes[XDI_BLOCK_OPEN_MAX];
    int open;            /* brackets that are open, and their passes */
    int64_t micro_batch; /* backwards of this step that have ended */
    int64_t input;       /* its number among the blocks whose inputs are kept */
};

/* Inputs of blocks whose forward runs again. */
struct xd_inputs {
    xd_model *model;
    size_t bytes, step; /* of the largest input; from one to the next */
    int64_t in_flight, count;
    unsigned char *memory;  /* [count][in_flight][step], of the device */
    int64_t *micro_batches; /* [count][in_flight] whose input is there; -1: free */
    const xd_block *last;   /* whose input was kept last, and of which micro-batch */
    int64_t last_micro_batch;
};

/* An entry of the table of names: a block or a weight. */
typedef struct xdi_model_named {
    const char *name;
    xd_block *block;
    xd_weight *weight;
} xdi_model_named;

struct xd_model {
    xd_ctx *ctx;
    xd_model_desc desc;
    xd_block root;
    xdi_model_named *names; /* [name_room], open addressing; a power of two */
    size_t name_count, name_room;
    int64_t weight_count;
    xd_weight **weights; /* [weight_count] in order, once sealed */
    void *storage;       /* of the library's values and gradients */
    bool buffers_alone;  /* of buffers, nothing else */
    bool yields;         /* a wrapper takes the values out of it and releases it, also DDP */
    bool sealed;
    void **values, **gradients, **nothing;                /* [weight_count] what views show; nothing: NULLs */
    xd_dtype *value_dtypes, *gradient_dtypes, *no_dtypes; /* [weight_count] of these; no_dtypes: NONE */
    struct xd_parallel *parallel;                         /* the wrapper, while there is one */
    struct xd_inputs *inputs; /* of blocks that are recomputed, while there are some */
};

/* model.c: the stored shape: that of the desc, with the rows that are stored. */
XD_PRIVATE void xdi_weight_stored_shape(const xd_weight_desc *d, int64_t shape[XD_DIMS_MAX]);

/* model_seal.c: the block after this one, a parent before its children; NULL after the last. */
XD_PRIVATE xd_block *xdi_block_after(const xd_block *block);

/* model_init.c: the first values of the positions `range` of a weight's region, into memory of the context's device. */
XD_PRIVATE xd_result xdi_weight_fill(xd_ctx *ctx, const xd_weight *weight, xd_interval range, void *to);

/* model_storage.c: STATE for a model that is not sealed, or has a weight without storage. */
XD_PRIVATE xd_result xdi_model_require_storage(const xd_model *model);

/* model_storage.c: xd_model_allocate: for buffers alone where a wrapper forms parts of weights, for values alone where it
 * will have the gradients, or for all. */
typedef enum xdi_take { XDI_TAKE_BUFFERS, XDI_TAKE_VALUES, XDI_TAKE_ALL } xdi_take;
XD_PRIVATE xd_result xdi_model_take(xd_model *model, xdi_take what);

/* model_storage.c: frees the library's storage; the weights that were there have none. */
XD_PRIVATE void xdi_model_release(xd_model *model);

/* model_storage.c: an entry of lists of parameters, without value, gradient and count. */
XD_PRIVATE xd_param xdi_weight_param(const xd_weight *weight);

/* pass.c: the values of a block that is open, or that has no wrapper. */
XD_PRIVATE xd_result xdi_block_show_values(xd_block *block, xd_block_view *view);

/* recompute.c: bytes of the inputs of a sealed model: 0 without blocks to recompute, half of SIZE_MAX if uncountable. */
XD_PRIVATE xd_memory_bytes xdi_inputs_bytes(const xd_model *model, const xd_inputs_desc *desc);

/* model.c: frees the places of all inputs; NULL is fine. */
XD_PRIVATE void xdi_inputs_forget(struct xd_inputs *inputs);

/* model.c: whether a weight has a gradient. */
XD_PRIVATE bool xdi_weight_is_trained(const xd_weight *weight);

/* model_agree.c: xdi_model_agree, of all weights but those of experts. */
XD_PRIVATE xd_result xdi_model_agree_shared(const xd_model *model, xd_comm *comm);

/* model_storage.c: elements of this rank's region that the whole weight has: rows that are stored beyond its shape come
 * last. */
XD_PRIVATE int64_t xdi_weight_true_count(const xd_weight *w);

/* model.c: the number of weights, buffers and ties; 0 before the seal. */
XD_PRIVATE int64_t xdi_model_weight_count(const xd_model *model);

/* model_storage.c: elements of this rank without buffers, ties once: all, or trained. */
XD_PRIVATE int64_t xdi_model_elements(const xd_model *model, bool trained);

/* model_agree.c: a hash of the description, and the comparison of all ranks' ones. Collective. Errors: MISMATCH (with weight and
 * rank), STATE (not sealed), MEMORY. */
XD_PRIVATE uint64_t xdi_model_hash(const xd_model *model);
XD_PRIVATE xd_result xdi_model_agree(const xd_model *model, xd_comm *comm);

#endif
