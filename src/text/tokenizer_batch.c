/* Texts to ids on the threads of a context. */

#include "text/internal.h"

#include <pthread.h>
#include <string.h>

/* Tokens of texts, one after the other. */
typedef struct xdi_batch_tokens {
    int32_t *ids;
    xd_token_span *spans;
    uint8_t *roles;
    int64_t count, capacity;
} xdi_batch_tokens;

/* What one thread uses: a context and an encoder of its own, and the tokens of its texts. */
typedef struct xdi_batch_slot {
    xd_ctx *ctx;
    xd_encoder *encoder;
    xdi_batch_tokens tokens;
    int64_t failed; /* the lowest index of a text that failed; INT64_MAX: none */
    xd_result result;
} xdi_batch_slot;

/* Where the tokens of one text are until all texts are done. */
typedef struct xdi_batch_text {
    int64_t at;
    int slot;
} xdi_batch_text;

struct xdi_batch_encoder {
    xd_ctx *ctx;
    pthread_mutex_t lock; /* of the context's allocator, which need not be made for several threads */
    int slots;
    xdi_batch_slot *slot; /* [slots] */
    const xd_texts *in;   /* of the call, and the next */
    const xd_encode_desc *desc;
    xdi_batch_text *text; /* [text_capacity] */
    int64_t *offset;      /* [text_capacity + 1] sizes at first, then where each text begins */
    int64_t text_capacity;
    xdi_batch_tokens tokens; /* of all texts, in order */
};

/* ---- memory ---- */

static void *xdi_batch_allocate(void *user, size_t bytes) {
    xdi_batch_encoder *b = (xdi_batch_encoder *)user;
    const xd_allocator *allocator = &xd_ctx_settings(b->ctx)->allocator;
    pthread_mutex_lock(&b->lock);
    void *memory = allocator->allocate(allocator->user, bytes);
    pthread_mutex_unlock(&b->lock);
    return memory;
}

static void xdi_batch_release(void *user, void *memory) {
    xdi_batch_encoder *b = (xdi_batch_encoder *)user;
    const xd_allocator *allocator = &xd_ctx_settings(b->ctx)->allocator;
    pthread_mutex_lock(&b->lock);
    allocator->release(allocator->user, memory);
    pthread_mutex_unlock(&b->lock);
}

/* Replaces an array by one of `capacity` elements with the same first `count` ones. */
static xd_result xdi_batch_grow(xd_ctx *ctx, void **memory, size_t size, int64_t count, int64_t capacity) {
    void *larger = xd_allocate(ctx, (size_t)capacity * size);
    XD_REQUIRE(ctx, larger, XD_ERROR_MEMORY, "no room for %lld elements of a batch", (long long)capacity);
    if (count > 0) memcpy(larger, *memory, (size_t)count * size);
    xd_release(ctx, *memory);
    *memory = larger;
    return XD_OK;
}

static xd_result xdi_batch_reserve(xd_ctx *ctx, xdi_batch_tokens *t, int64_t needed) {
    const int64_t capacity = needed + needed / 2 + 1024;
    void *ids = t->ids, *spans = t->spans, *roles = t->roles;
    if (needed <= t->capacity) return XD_OK;
    XD_TRY(xdi_batch_grow(ctx, &ids, sizeof *t->ids, t->count, capacity));
    t->ids = (int32_t *)ids;
    XD_TRY(xdi_batch_grow(ctx, &spans, sizeof *t->spans, t->count, capacity));
    t->spans = (xd_token_span *)spans;
    XD_TRY(xdi_batch_grow(ctx, &roles, sizeof *t->roles, t->count, capacity));
    t->roles = (uint8_t *)roles;
    t->capacity = capacity;
    return XD_OK;
}

static void xdi_batch_forget(xd_ctx *ctx, xdi_batch_tokens *t) {
    xd_release(ctx, t->ids);
    xd_release(ctx, t->spans);
    xd_release(ctx, t->roles);
}

static xd_result xdi_batch_reserve_texts(xdi_batch_encoder *b, int64_t count) {
    const int64_t capacity = count + count / 2 + 64;
    void *text = b->text, *offset = b->offset;
    if (count <= b->text_capacity && b->offset) return XD_OK;
    XD_TRY(xdi_batch_grow(b->ctx, &text, sizeof *b->text, 0, capacity));
    b->text = (xdi_batch_text *)text;
    XD_TRY(xdi_batch_grow(b->ctx, &offset, sizeof *b->offset, 0, capacity + 1));
    b->offset = (int64_t *)offset;
    b->text_capacity = capacity;
    return XD_OK;
}

/* ---- life ---- */

static xd_result xdi_batch_open_slot(xdi_batch_encoder *b, xdi_batch_slot *s, const xd_tokenizer *tokenizer) {
    xd_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = xdi_batch_allocate;
    desc.allocator.release = xdi_batch_release;
    desc.allocator.user = b;
    XD_REQUIRE(b->ctx, xd_ctx_create(&desc, &s->ctx) == XD_OK, XD_ERROR_MEMORY,
               "no room for encoder %d of %d of a batch", (int)(s - b->slot), b->slots);
    XD_REQUIRE(b->ctx, xdi_encoder_make(s->ctx, tokenizer, &s->encoder) == XD_OK, XD_ERROR_MEMORY,
               "no room for encoder %d of %d of a batch", (int)(s - b->slot), b->slots);
    return XD_OK;
}

static void xdi_batch_encoder_destroy(xdi_batch_encoder *b) {
    if (!b) return;
    for (int i = 0; i < b->slots; i++) {
        xdi_batch_slot *s = &b->slot[i];
        if (!s->ctx) continue;
        xdi_batch_forget(s->ctx, &s->tokens);
        xdi_encoder_free(s->encoder);
        xd_ctx_destroy(s->ctx);
    }
    pthread_mutex_destroy(&b->lock);
    xdi_batch_forget(b->ctx, &b->tokens);
    xd_release(b->ctx, b->text);
    xd_release(b->ctx, b->offset);
    xd_release(b->ctx, b);
}

static xd_result xdi_batch_encoder_create(xd_ctx *ctx, const xd_tokenizer *tokenizer,
                                          xdi_batch_encoder **out) {
    const int slots = xd_ctx_settings(ctx)->threads;
    xd_result result = XD_OK;
    xdi_batch_encoder *b =
        (xdi_batch_encoder *)xd_allocate(ctx, sizeof *b + (size_t)slots * sizeof(xdi_batch_slot));
    XD_REQUIRE(ctx, b, XD_ERROR_MEMORY, "no room for %d encoders of a batch", slots);
    b->ctx = ctx;
    b->slots = slots;
    b->slot = (xdi_batch_slot *)(void *)(b + 1);
    pthread_mutex_init(&b->lock, NULL);
    for (int i = 0; i < slots && result == XD_OK; i++)
        result = xdi_batch_open_slot(b, &b->slot[i], tokenizer);
    if (result == XD_OK)
        *out = b;
    else
        xdi_batch_encoder_destroy(b);
    return result;
}

/* ---- a batch ---- */

/* The memory is there. */
static void xdi_batch_append(xdi_batch_tokens *t, const xd_encoding *e) {
    memcpy(t->ids + t->count, e->ids, (size_t)e->count * sizeof *e->ids);
    if (e->spans) memcpy(t->spans + t->count, e->spans, (size_t)e->count * sizeof *e->spans);
    if (e->roles) memcpy(t->roles + t->count, e->roles, (size_t)e->count);
    t->count += e->count;
}

static xd_result xdi_batch_one(xdi_batch_encoder *b, int64_t i, int slot) {
    const xd_text *text = &b->in->texts[i];
    xdi_batch_slot *s = &b->slot[slot];
    xdi_batch_tokens *t = &s->tokens;
    xd_encoding e;
    XD_REQUIRE(s->ctx, text->size >= 0, XD_ERROR_ARGUMENT, "%lld bytes", (long long)text->size);
    XD_TRY(xd_encode(s->encoder, text->data, (size_t)text->size, b->desc, &e));
    XD_TRY(xdi_batch_reserve(s->ctx, t, t->count + e.count));
    if (e.count > 0) xdi_batch_append(t, &e);
    b->text[i].at = t->count - e.count;
    b->text[i].slot = slot;
    b->offset[i] = e.count;
    return XD_OK;
}

/* Texts before one that failed are still encoded: which failure is reported does not depend on the threads. */
static void xdi_batch_encode(void *argument, int64_t begin, int64_t end, int slot) {
    xdi_batch_encoder *b = (xdi_batch_encoder *)argument;
    xdi_batch_slot *s = &b->slot[slot];
    for (int64_t i = begin; i < end && i < s->failed; i++) {
        const xd_result result = xdi_batch_one(b, i, slot);
        if (result == XD_OK) continue;
        s->result = result;
        s->failed = i;
    }
}

static void xdi_batch_collect(void *argument, int64_t begin, int64_t end, int slot) {
    xdi_batch_encoder *b = (xdi_batch_encoder *)argument;
    xdi_batch_tokens *to = &b->tokens;
    (void)slot;
    for (int64_t i = begin; i < end; i++) {
        const xdi_batch_tokens *from = &b->slot[b->text[i].slot].tokens;
        const int64_t at = b->text[i].at, out = b->offset[i];
        const size_t count = (size_t)(b->offset[i + 1] - out);
        if (count == 0) continue;
        memcpy(to->ids + out, from->ids + at, count * sizeof *to->ids);
        memcpy(to->spans + out, from->spans + at, count * sizeof *to->spans);
        memcpy(to->roles + out, from->roles + at, count);
    }
}

/* The failure of the first text that failed, in the context of the call. */
static xd_result xdi_batch_failure(xdi_batch_encoder *b) {
    const xdi_batch_slot *first = &b->slot[0];
    for (int i = 1; i < b->slots; i++)
        if (b->slot[i].failed < first->failed) first = &b->slot[i];
    XD_REQUIRE(b->ctx, first->failed == INT64_MAX, first->result, "text %lld of %lld: %s",
               (long long)first->failed, (long long)b->in->count, xd_last_error(first->ctx)->message);
    return XD_OK;
}

/* Turns the sizes of the texts into offsets. */
static void xdi_batch_add_up(xdi_batch_encoder *b) {
    int64_t total = 0;
    for (int64_t i = 0; i < b->in->count; i++) {
        const int64_t size = b->offset[i];
        b->offset[i] = total;
        total += size;
    }
    b->offset[b->in->count] = total;
}

static xd_result xdi_batch_encode_texts(xdi_batch_encoder *b, const xd_texts *texts,
                                        const xd_encode_desc *desc, xd_encoding_batch *out) {
    const int64_t grain = texts->count / 256 + 1;
    XD_REQUIRE(b->ctx, texts->count >= 0, XD_ERROR_ARGUMENT, "%lld texts", (long long)texts->count);
    XD_TRY(xdi_batch_reserve_texts(b, texts->count));
    b->in = texts;
    b->desc = desc;
    for (int i = 0; i < b->slots; i++) {
        b->slot[i].tokens.count = 0;
        b->slot[i].failed = INT64_MAX;
    }
    XD_TRY(xdi_parallel_range(b->ctx, texts->count, grain, xdi_batch_encode, b));
    XD_TRY(xdi_batch_failure(b));
    xdi_batch_add_up(b);
    b->tokens.count = 0; /* nothing to move when the arrays grow */
    XD_TRY(xdi_batch_reserve(b->ctx, &b->tokens, b->offset[texts->count]));
    XD_TRY(xdi_parallel_range(b->ctx, texts->count, grain, xdi_batch_collect, b));
    out->count = texts->count;
    out->offset = b->offset;
    out->ids = b->tokens.ids;
    out->spans = desc && desc->skip_spans ? NULL : b->tokens.spans;
    out->roles = desc && desc->add_special ? b->tokens.roles : NULL;
    return XD_OK;
}

/* ---- the public calls ---- */

XD_API xd_result xd_encoder_create(xd_ctx *ctx, const xd_encoder_desc *desc, xd_encoder **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN(ctx, desc->tokenizer);
    xd_encoder *e = NULL;
    XD_TRY(xdi_encoder_make(ctx, desc->tokenizer, &e));
    const xd_result result =
        desc->batches ? xdi_batch_encoder_create(ctx, desc->tokenizer, xdi_encoder_batch(e)) : XD_OK;
    if (result == XD_OK)
        *out = e;
    else
        xd_encoder_destroy(e);
    return result;
}

XD_API void xd_encoder_destroy(xd_encoder *encoder) {
    if (!encoder || XDI_IS_GONE(xd_encoder, encoder)) return;
    xdi_batch_encoder_destroy(*xdi_encoder_batch(encoder));
    xdi_encoder_free(encoder);
}

XD_API xd_result xd_encode_batch(xd_encoder *encoder, const xd_texts *texts, const xd_encode_desc *desc,
                                 xd_encoding_batch *out) {
    XDI_LIVE(xd_encoder, encoder);
    xd_ctx *ctx = encoder ? xdi_encoder_ctx(encoder) : NULL;
    XDI_GIVEN(ctx, encoder, texts, out);
    XDI_GIVEN_LIST(ctx, texts->texts, texts->count);
    XD_REQUIRE(ctx, *xdi_encoder_batch(encoder), XD_ERROR_ARGUMENT,
               "%lld texts for an encoder that was created without batches", (long long)texts->count);
    return xdi_batch_encode_texts(*xdi_encoder_batch(encoder), texts, desc, out);
}
