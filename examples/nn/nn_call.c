/* nn_call.c - see nn_call.h. */
#include "nn_call.h"

#include <string.h>

xd_pass nn_pass_of(const xd_network_call *call, bool backward) {
    xd_pass pass;
    memset(&pass, 0, sizeof pass);
    pass.kind = XD_PASS_INFERENCE;
    if (backward ? call->weights : call->keep) pass.kind = backward ? XD_PASS_BACKWARD : XD_PASS_FORWARD;
    if (pass.kind == XD_PASS_BACKWARD) pass.leaf = call->leaf, pass.more = call->more;
    return pass;
}

xd_result nn_call_check(xd_ctx *ctx, const xd_network_call *call, int64_t samples, int slots, bool slot) {
    XD_REQUIRE(ctx, call->samples >= 0 && call->samples <= samples, XD_ERROR_ARGUMENT,
               "%lld samples where there is room for %lld", (long long)call->samples, (long long)samples);
    XD_REQUIRE(ctx, !slot || (call->slot >= 0 && call->slot < slots), XD_ERROR_ARGUMENT, "slot %d of %d",
               call->slot, slots);
    return XD_OK;
}
