/* vocab_calls.h - xd_vocab_create with an even split, and with given columns. */
#ifndef XD_TEST_VOCAB_CALLS_H
#define XD_TEST_VOCAB_CALLS_H

static inline xd_result vocab_even(xd_ctx *ctx, xd_comm *tp, int64_t size, xd_vocab **out) {
    const xd_vocab_desc desc = { size, tp, NULL };
    return xd_vocab_create(ctx, &desc, out);
}

static inline xd_result vocab_of(xd_ctx *ctx, xd_comm *tp, xd_interval columns, int64_t size,
                                 xd_vocab **out) {
    const xd_vocab_desc desc = { size, tp, &columns };
    return xd_vocab_create(ctx, &desc, out);
}

#endif
