/* nn_call.c - see nn_call.h. */
#include "nn_call.h"

#include <string.h>

xd_pass nn_pass_of(const xd_network_call *call, bool backward) {
    xd_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.kind = XD_PASS_INFERENCE;
    if (backward ? call->weights : call->keep) pass.kind = backward ? XD_PASS_BACKWARD : XD_PASS_FORWARD;
    if (pass.kind == XD_PASS_BACKWARD) pass.micro_batch = call->micro_batch, pass.more = call->more;
    return pass;
}

xd_result nn_call_check(xd_ctx *ctx, const xd_network_call *call, int64_t samples, int slots, bool slot) {
    XD_REQUIRE(ctx, call->samples >= 0 && call->samples <= samples, XD_ERROR_ARGUMENT,
               "%lld samples where there is room for %lld", (long long)call->samples, (long long)samples);
    XD_REQUIRE(ctx, !slot || (call->slot >= 0 && call->slot < slots), XD_ERROR_ARGUMENT, "slot %d of %d",
               call->slot, slots);
    return XD_OK;
}

xd_result nn_call_check_kept(xd_ctx *ctx, const xd_network_call *call, int64_t kept) {
    XD_REQUIRE(ctx, kept >= 0, XD_ERROR_STATE, "backward of %lld samples where slot %d holds none",
               (long long)call->samples, call->slot);
    XD_REQUIRE(ctx, kept == call->samples, XD_ERROR_STATE,
               "backward of %lld samples where slot %d holds %lld", (long long)call->samples, call->slot,
               (long long)kept);
    return XD_OK;
}

void nn_call_weights(const xd_block_view *view, int count, const float **values, float **gradients) {
    for (int i = 0; i < count; i++) {
        values[i] = (const float *)view->values[i];
        gradients[i] = (float *)view->gradients[i];
    }
}
