/* The exchange of the id from xdistill_nccl.h, which compiles without CUDA and NCCL, under names for tests. */
#ifndef NCCL_EXCHANGE_H
#define NCCL_EXCHANGE_H

#define XDISTILL_IMPLEMENTATION
#define XDISTILL_NCCL_EXCHANGE
#include "xdistill.h"
#include "../../xdistill_nccl.h"

enum {
    ID = XDI_NCCL_ID,
    NONCE = XDI_NCCL_NONCE,
    TAG = XDI_NCCL_TAG,
    HELLO = XDI_NCCL_HELLO,
    REPLY = XDI_NCCL_REPLY
};

/* As xd_comm_nccl does it: id is read on rank 0 and written on the others. */
static inline xd_result exchange(xd_ctx *ctx, const xd_nccl_desc *desc, void *id) {
    const double deadline = xd_now(ctx) + xd_ctx_settings(ctx)->init_timeout_seconds;
    return xdi_nccl_exchange(ctx, desc, id, deadline);
}

/* HMAC-SHA-256. */
static inline void keyed_hash(const char *secret, const void *data, size_t bytes, unsigned char tag[TAG]) {
    xdi_nccl_mac mac;
    xdi_nccl_mac_begin(&mac, secret);
    xdi_nccl_hash_add(&mac.inner, data, bytes);
    xdi_nccl_mac_end(&mac, tag);
}

/* A big-endian number, as messages have it. */
static inline uint32_t number_at(const unsigned char *at) {
    return xdi_nccl_load(at);
}

static inline void put_number(unsigned char *at, uint32_t value) {
    xdi_nccl_store(at, value);
}

#endif
