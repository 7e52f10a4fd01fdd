/* demo_flat.c - gradients where a rank has all weights in one buffer: leaves in INVARIANT mode, plain sums in the others. */
#include "demo_rank.h"

#include <string.h>

static xd_result demo_make_leaves(demo_rank *r) {
    if (!demo_is_invariant(r)) return XD_OK;
    r->leaves.first = r->sequences[0];
    r->leaves.count = r->batch.sequences;
    r->leaves.total = DEMO_BATCH;
    const xd_leaf_stack_desc leaves = { .leaves = r->leaves, .elements = r->model.float_count };
    return xd_leaf_stack_create(r->ctx, &leaves, &r->stack);
}

xd_result demo_flat_open(demo_rank *r) {
    bool failed = false;
    r->gradient = demo_floats(r, r->model.float_count, &failed);
    if (failed)
        return XD_FAIL(r->ctx, XD_ERROR_MEMORY, "no room for %lld gradients",
                       (long long)r->model.float_count);
    return demo_make_leaves(r);
}

void demo_flat_close(demo_rank *r) {
    xd_release(r->ctx, r->gradient);
    xd_leaf_stack_destroy(r->stack);
}

void demo_flat_list_params(const demo_rank *r, float *weights, xd_param *params) {
    for (int i = 0; i < r->model.param_count; i++) {
        const nn_param *p = &r->model.params[i];
        xd_param *out = &params[i];
        memset(out, 0, sizeof *out);
        out->name = p->name;
        out->value = weights + p->offset;
        out->gradient = r->gradient + p->offset;
        out->dtype = XD_DTYPE_F32;
        out->count = nn_param_count(p);
        out->no_decay = !nn_param_decays(p);
        out->replica =
            p->dims == 1 && r->tp_rank > 0; /* norms: every tensor-parallel rank holds them whole */
    }
}

xd_result demo_flat_backward(demo_rank *r, const float *weights) {
    nn_flat flat = { &r->model, weights, r->gradient };
    const nn_source source = nn_flat_source(&flat);
    if (r->stack) xd_leaf_stack_reset(r->stack);
    for (int pass = 0; pass < r->passes; pass++) {
        memset(r->gradient, 0, (size_t)r->model.float_count * sizeof *r->gradient);
        XD_TRY(demo_backward(r, &source, pass));
        if (r->stack) XD_TRY(xd_leaf_stack_push(r->stack, r->gradient));
    }
    return XD_OK;
}

xd_result demo_flat_sum(demo_rank *r) {
    xd_collective sum;
    if (!r->rows) return XD_OK;
    memset(&sum, 0, sizeof sum);
    sum.kind = XD_COLLECTIVE_ALL_REDUCE;
    sum.send = r->stack ? xd_leaf_stack_forest(r->stack) : r->gradient;
    sum.recv = r->gradient;
    sum.count = r->model.float_count;
    sum.dtype = XD_DTYPE_F32;
    sum.op = XD_SUM;
    sum.leaves = r->leaves; /* all zero without a stack: a plain sum */
    return xd_collective_run(r->rows, &sum);
}
