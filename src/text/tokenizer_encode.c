/* Text to ids, and ids to text. */

#include "text/internal.h"
#include "text/unicode_tables.h"

#include <string.h>

/* From text to ids: added tokens are taken out first, the text between them is normalised and split into pieces,
 * and each piece is merged. A cache stores the tokens of short pieces. */

enum {
    XDI_ENCODER_CACHED = 1 << 14, /* entries of one cache line each */
    XDI_ENCODER_KEY = 24,         /* bytes of the longest piece that is cached */
    XDI_ENCODER_IDS = 7,          /* tokens of one */
    XDI_ENCODER_SHORT = 48        /* symbols up to which a plain search beats a heap */
};

/* A piece and its tokens; count 0: free. */
typedef struct xdi_cached {
    uint64_t key[3]; /* the bytes, filled up with zeros */
    uint8_t bytes, count;
    uint8_t lengths[XDI_ENCODER_IDS];
    int32_t ids[XDI_ENCODER_IDS];
} xdi_cached;

/* A part of a piece that is currently one token. */
typedef struct xdi_symbol {
    int32_t id;              /* -1: taken into the symbol before it */
    uint32_t previous, next; /* indexes; UINT32_MAX at the ends */
    uint32_t begin, end;     /* in the text */
} xdi_symbol;

/* A candidate merge; it may have become impossible since it was found. */
typedef struct xdi_candidate {
    int32_t rank;
    uint32_t at; /* the left symbol */
    int32_t left, right, id;
} xdi_candidate;

struct xd_encoder {
    xdi_batch_encoder *batch; /* for xd_encode_batch; NULL without batches */
    xd_ctx *ctx;
    const xd_tokenizer *tokenizer;
    xdi_cached *cache;
    void *cache_memory;
    xdi_rewriter rewriter;
    xdi_matcher matchers[XDI_TOKENIZER_STAGES];
    xdi_text_run *part_runs; /* of the piece between two added tokens */
    size_t part_capacity;
    xdi_symbol *symbols;
    size_t symbol_capacity;
    xdi_candidate *heap;
    size_t heap_count, heap_capacity;
    int32_t *ids;
    xd_token_span *spans;
    int64_t count, capacity;
    uint8_t *roles; /* made when an encoding has special tokens around it */
    size_t role_capacity;
    xd_encode_desc how;  /* of the text at hand */
    const uint8_t *text; /* the normalised text that is being split, and its length */
    size_t length;
};

XD_PRIVATE xd_result xdi_encoder_make(xd_ctx *ctx, const xd_tokenizer *tokenizer, xd_encoder **out) {
    xd_encoder *e = XDI_OBJECT(xd_encoder, ctx, sizeof *e);
    XD_REQUIRE(ctx, e, XD_ERROR_MEMORY, "no room for an encoder");
    e->ctx = ctx;
    e->tokenizer = tokenizer;
    e->rewriter.matcher.ctx = ctx;
    for (int i = 0; i < XDI_TOKENIZER_STAGES; i++) e->matchers[i].ctx = ctx;
    e->cache_memory = xd_allocate(ctx, (XDI_ENCODER_CACHED + 1) * sizeof(xdi_cached));
    const bool fits = e->cache_memory != NULL;
    if (!fits) xdi_encoder_free(e);
    XD_REQUIRE(ctx, fits, XD_ERROR_MEMORY, "no room for the cache of an encoder");
    const size_t line = sizeof(xdi_cached);
    e->cache = (xdi_cached *)(((uintptr_t)e->cache_memory + line - 1) / line * line);
    *out = e;
    return XD_OK;
}

XD_PRIVATE void xdi_encoder_free(xd_encoder *e) {
    if (!e) return;
    for (int i = 0; i < XDI_TOKENIZER_STAGES; i++) xdi_matcher_release(&e->matchers[i]);
    xdi_rewriter_release(e->ctx, &e->rewriter);
    xd_release(e->ctx, e->cache_memory);
    xd_release(e->ctx, e->part_runs);
    xd_release(e->ctx, e->symbols);
    xd_release(e->ctx, e->heap);
    xd_release(e->ctx, e->ids);
    xd_release(e->ctx, e->spans);
    xd_release(e->ctx, e->roles);
    xd_release(e->ctx, e);
}

XD_PRIVATE xd_ctx *xdi_encoder_ctx(const xd_encoder *e) {
    return e->ctx;
}

XD_PRIVATE xdi_batch_encoder **xdi_encoder_batch(xd_encoder *e) {
    return &e->batch;
}

/* Replaces a buffer by a larger one with the same first bytes. */
static xd_result xdi_encoder_grow(xd_encoder *e, void **memory, size_t kept, size_t bytes) {
    void *larger = xd_allocate(e->ctx, bytes);
    XD_REQUIRE(e->ctx, larger, XD_ERROR_MEMORY, "no room for %llu bytes of an encoding",
               (unsigned long long)bytes);
    if (kept) memcpy(larger, *memory, kept);
    xd_release(e->ctx, *memory);
    *memory = larger;
    return XD_OK;
}

/* ---- tokens out ---- */

/* Memory for `more` tokens, and for a few more that a fixed-size copy from the cache writes. */
static xd_result xdi_encoder_reserve(xd_encoder *e, size_t more) {
    const int64_t needed = e->count + (int64_t)more + XDI_ENCODER_IDS;
    if (needed <= e->capacity) return XD_OK;
    const int64_t capacity = needed + e->capacity / 2 + 256;
    const size_t kept = (size_t)e->count;
    void *ids = e->ids, *spans = e->spans;
    XD_TRY(xdi_encoder_grow(e, &ids, kept * sizeof *e->ids, (size_t)capacity * sizeof *e->ids));
    e->ids = (int32_t *)ids;
    XD_TRY(xdi_encoder_grow(e, &spans, kept * sizeof *e->spans, (size_t)capacity * sizeof *e->spans));
    e->spans = (xd_token_span *)spans;
    e->capacity = capacity;
    return XD_OK;
}

/* Appends one token of bytes [begin, end) of the current text; the memory is there. */
static void xdi_encoder_put(xd_encoder *e, int32_t id, size_t begin, size_t end) {
    e->ids[e->count] = id;
    e->spans[e->count].begin = (int64_t)begin;
    e->spans[e->count++].end = (int64_t)end;
}

/* ---- the cache ---- */

/* The bytes of a short piece as three words, without the bytes after it. */
static void xdi_encoder_key(const xd_encoder *e, size_t begin, size_t bytes, uint64_t key[3]) {
    static const uint8_t mask[2 * XDI_ENCODER_KEY] = { 255, 255, 255, 255, 255, 255, 255, 255,
                                                       255, 255, 255, 255, 255, 255, 255, 255,
                                                       255, 255, 255, 255, 255, 255, 255, 255 };
    uint64_t keep[3];
    key[0] = key[1] = key[2] = 0;
    if (e->length - begin < XDI_ENCODER_KEY) {
        memcpy(key, e->text + begin, bytes);
        return;
    }
    memcpy(key, e->text + begin, XDI_ENCODER_KEY);
    memcpy(keep, mask + XDI_ENCODER_KEY - bytes, XDI_ENCODER_KEY);
    for (int i = 0; i < 3; i++) key[i] &= keep[i];
}

static xdi_cached *xdi_encoder_entry(xd_encoder *e, const uint64_t key[3], size_t bytes) {
    uint64_t hash = (key[0] ^ bytes) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
    hash = (hash ^ key[1] ^ (key[2] << 17 | key[2] >> 47)) * 0xff51afd7ed558ccdu;
    return &e->cache[hash >> 50];
}

static bool xdi_encoder_recall(xd_encoder *e, const xdi_cached *c, const uint64_t key[3], size_t begin,
                               size_t bytes) {
    if (c->count == 0 || c->bytes != bytes) return false;
    if (c->key[0] != key[0] || c->key[1] != key[1] || c->key[2] != key[2]) return false;
    memcpy(e->ids + e->count, c->ids, sizeof c->ids);
    for (int i = 0; i < c->count; i++) {
        e->spans[e->count + i].begin = (int64_t)begin;
        begin += c->lengths[i];
        e->spans[e->count + i].end = (int64_t)begin;
    }
    e->count += c->count;
    return true;
}

/* Caches the tokens from `first` on, if they cover the piece without gap or overlap. */
static void xdi_encoder_remember(const xd_encoder *e, xdi_cached *c, const uint64_t key[3], size_t begin,
                                 size_t bytes, int64_t first) {
    const int64_t count = e->count - first;
    int64_t at = (int64_t)begin;
    if (count < 1 || count > XDI_ENCODER_IDS) return;
    c->count = 0;
    for (int64_t i = 0; i < count; i++) {
        const xd_token_span *span = &e->spans[first + i];
        if (span->begin != at) return;
        c->ids[i] = e->ids[first + i];
        c->lengths[i] = (uint8_t)(span->end - at);
        at = span->end;
    }
    if (at != (int64_t)(begin + bytes)) return;
    memcpy(c->key, key, sizeof c->key);
    c->bytes = (uint8_t)bytes;
    c->count = (uint8_t)count;
}

/* ---- merging ---- */

static xd_result xdi_encoder_reserve_symbols(xd_encoder *e, size_t count) {
    if (count <= e->symbol_capacity) return XD_OK;
    void *symbols = e->symbols;
    const size_t capacity = count + e->symbol_capacity / 2 + 64;
    e->symbol_capacity = 0;
    XD_TRY(xdi_encoder_grow(e, &symbols, 0, capacity * sizeof *e->symbols));
    e->symbols = (xdi_symbol *)symbols;
    e->symbol_capacity = capacity;
    return XD_OK;
}

static size_t xdi_encoder_symbol(xd_encoder *e, size_t count, int32_t id, size_t begin, size_t end) {
    xdi_symbol *s = &e->symbols[count];
    s->id = id;
    s->begin = (uint32_t)begin;
    s->end = (uint32_t)end;
    return count + 1;
}

/* One symbol a byte; bytes without a token are left out. */
static size_t xdi_encoder_byte_symbols(xd_encoder *e, size_t begin, size_t end) {
    const xd_tokenizer *t = e->tokenizer;
    size_t count = 0;
    for (size_t i = begin; i < end; i++) {
        const int32_t id =
            t->vocab.byte_id[e->text[i]] >= 0 ? t->vocab.byte_id[e->text[i]] : t->vocab.unknown;
        if (id >= 0) count = xdi_encoder_symbol(e, count, id, i, i + 1);
    }
    return count;
}

/* The tokens of a character without a token: its bytes, the unknown token, or none. */
static size_t xdi_encoder_unknown(xd_encoder *e, size_t count, size_t begin, size_t end) {
    const xd_tokenizer *t = e->tokenizer;
    bool bytes = t->byte_fallback;
    for (size_t i = begin; i < end && bytes; i++) bytes = t->vocab.byte_id[e->text[i]] >= 0;
    if (bytes) {
        for (size_t i = begin; i < end; i++)
            count = xdi_encoder_symbol(e, count, t->vocab.byte_id[e->text[i]], i, i + 1);
        return count;
    }
    if (t->vocab.unknown < 0) return count;
    const bool fuse = t->fuse_unknown && count > 0 && e->symbols[count - 1].id == t->vocab.unknown;
    if (!fuse) return xdi_encoder_symbol(e, count, t->vocab.unknown, begin, end);
    e->symbols[count - 1].end = (uint32_t)end;
    return count;
}

/* One symbol a character. */
static size_t xdi_encoder_character_symbols(xd_encoder *e, size_t begin, size_t end) {
    const xd_tokenizer *t = e->tokenizer;
    const uint8_t *text = e->text;
    size_t count = 0;
    for (size_t i = begin; i < end;) {
        uint32_t point;
        const size_t length = xdi_utf8_decode(text + i, text + end, &point);
        const int32_t id = point == XDI_UNICODE_INVALID ? -1 : xdi_vocabulary_character(&t->vocab, point);
        if (id >= 0)
            count = xdi_encoder_symbol(e, count, id, i, i + length);
        else
            count = xdi_encoder_unknown(e, count, i, i + length);
        i += length;
    }
    return count;
}

/* The merge of two neighbours: its rank, INT32_MAX when there is none, and its result. */
static void xdi_encoder_look(const xd_encoder *e, const xdi_symbol *left, int32_t *rank, int32_t *id) {
    const xdi_merge *merge = xdi_merges_find(&e->tokenizer->merges, left[0].id, left[1].id);
    *rank = merge ? merge->rank : INT32_MAX;
    *id = merge ? merge->id : -1;
}

/* The lowest of count > 0 ranks, the leftmost among equals. Two minima, of even and of odd indices, so that a comparison
 * need not wait for the one before. */
static size_t xdi_encoder_lowest(const int32_t *ranks, size_t count) {
    size_t even = 0, odd = count > 1 ? 1 : 0;
    for (size_t i = 2; i + 1 < count; i += 2) {
        if (ranks[i] < ranks[even]) even = i;
        if (ranks[i + 1] < ranks[odd]) odd = i + 1;
    }
    if (count % 2 == 1 && ranks[count - 1] < ranks[even]) even = count - 1;
    return ranks[odd] < ranks[even] || (ranks[odd] == ranks[even] && odd < even) ? odd : even;
}

/* The lowest rank first, the leftmost among equals, by a scan of all pairs for each merge. */
static size_t xdi_encoder_merge_short(const xd_encoder *e, xdi_symbol *s, size_t count) {
    int32_t ranks[XDI_ENCODER_SHORT], ids[XDI_ENCODER_SHORT];
    for (size_t i = 0; i + 1 < count; i++) xdi_encoder_look(e, s + i, &ranks[i], &ids[i]);
    while (count > 1) {
        const size_t best = xdi_encoder_lowest(ranks, count - 1);
        if (ids[best] < 0) return count;
        s[best].id = ids[best];
        s[best].end = s[best + 1].end;
        count--;
        memmove(s + best + 1, s + best + 2, (count - best - 1) * sizeof *s);
        memmove(ranks + best, ranks + best + 1, (count - best - 1) * sizeof *ranks);
        memmove(ids + best, ids + best + 1, (count - best - 1) * sizeof *ids);
        if (best > 0) xdi_encoder_look(e, s + best - 1, &ranks[best - 1], &ids[best - 1]);
        if (best + 1 < count) xdi_encoder_look(e, s + best, &ranks[best], &ids[best]);
    }
    return count;
}

static bool xdi_candidate_before(const xdi_candidate *a, const xdi_candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void xdi_encoder_push(xd_encoder *e, const xdi_symbol *s, uint32_t at) {
    const xdi_symbol *left = &s[at];
    if (left->next == UINT32_MAX) return;
    const int32_t right = s[left->next].id;
    const xdi_merge *merge = xdi_merges_find(&e->tokenizer->merges, left->id, right);
    if (!merge) return;
    xdi_candidate c;
    c.rank = merge->rank;
    c.at = at;
    c.left = left->id;
    c.right = right;
    c.id = merge->id;
    size_t place = e->heap_count++;
    while (place > 0 && xdi_candidate_before(&c, &e->heap[(place - 1) / 2])) {
        e->heap[place] = e->heap[(place - 1) / 2];
        place = (place - 1) / 2;
    }
    e->heap[place] = c;
}

static xdi_candidate xdi_encoder_pop(xd_encoder *e) {
    const xdi_candidate top = e->heap[0], moving = e->heap[--e->heap_count];
    size_t place = 0;
    for (size_t child; (child = 2 * place + 1) < e->heap_count; place = child) {
        if (child + 1 < e->heap_count && xdi_candidate_before(&e->heap[child + 1], &e->heap[child])) child++;
        if (!xdi_candidate_before(&e->heap[child], &moving)) break;
        e->heap[place] = e->heap[child];
    }
    e->heap[place] = moving;
    return top;
}

/* The same by a heap: at most three candidates a symbol, each costs the logarithm of their number. */
static xd_result xdi_encoder_merge_long(xd_encoder *e, xdi_symbol *s, size_t count, size_t *kept) {
    if (3 * count > e->heap_capacity) {
        void *heap = e->heap;
        e->heap_capacity = 0;
        XD_TRY(xdi_encoder_grow(e, &heap, 0, 3 * count * sizeof *e->heap));
        e->heap = (xdi_candidate *)heap;
        e->heap_capacity = 3 * count;
    }
    for (size_t i = 0; i < count; i++) {
        s[i].previous = i ? (uint32_t)(i - 1) : UINT32_MAX;
        s[i].next = i + 1 < count ? (uint32_t)(i + 1) : UINT32_MAX;
    }
    e->heap_count = 0;
    for (size_t i = 0; i + 1 < count; i++) xdi_encoder_push(e, s, (uint32_t)i);
    while (e->heap_count) {
        const xdi_candidate c = xdi_encoder_pop(e);
        xdi_symbol *left = &s[c.at];
        if (left->id != c.left || left->next == UINT32_MAX || s[left->next].id != c.right)
            continue; /* is gone */
        xdi_symbol *right = &s[left->next];
        left->id = c.id;
        left->end = right->end;
        left->next = right->next;
        right->id = -1;
        if (left->next != UINT32_MAX) s[left->next].previous = c.at;
        if (left->previous != UINT32_MAX) xdi_encoder_push(e, s, left->previous);
        xdi_encoder_push(e, s, c.at);
    }
    *kept = 0;
    for (size_t i = 0; i < count; i++)
        if (s[i].id >= 0) s[(*kept)++] = s[i];
    return XD_OK;
}

/* Merges symbols, all of which may be part of a merge, and appends the resulting tokens. */
static xd_result xdi_encoder_merge_run(xd_encoder *e, xdi_symbol *s, size_t count) {
    if (count > XDI_ENCODER_SHORT)
        XD_TRY(xdi_encoder_merge_long(e, s, count, &count));
    else if (count > 1)
        count = xdi_encoder_merge_short(e, s, count);
    for (size_t i = 0; i < count; i++) xdi_encoder_put(e, s[i].id, s[i].begin, s[i].end);
    return XD_OK;
}

/* Merges a piece that is not in the cache: each run between symbols that are part of no merge, separately. */
static xd_result xdi_encoder_merge(xd_encoder *e, size_t begin, size_t end) {
    const xd_tokenizer *t = e->tokenizer;
    if (t->ignore_merges) {
        const int32_t whole = xdi_vocabulary_piece(&t->vocab, e->text + begin, end - begin);
        if (whole >= 0) {
            xdi_encoder_put(e, whole, begin, end);
            return XD_OK;
        }
    }
    XD_TRY(xdi_encoder_reserve_symbols(e, end - begin));
    const size_t count = t->vocab.byte_level ? xdi_encoder_byte_symbols(e, begin, end)
                                             : xdi_encoder_character_symbols(e, begin, end);
    for (size_t i = 0, from = 0; i < count; from = ++i) {
        while (i < count && xdi_merges_use(&t->merges, e->symbols[i].id)) i++;
        XD_TRY(xdi_encoder_merge_run(e, e->symbols + from, i - from));
        if (i < count) xdi_encoder_put(e, e->symbols[i].id, e->symbols[i].begin, e->symbols[i].end);
    }
    return XD_OK;
}

static xd_result xdi_encoder_piece(xd_encoder *e, size_t begin, size_t end) {
    const size_t bytes = end - begin;
    XD_TRY(xdi_encoder_reserve(e, bytes));
    if (bytes > XDI_ENCODER_KEY) return xdi_encoder_merge(e, begin, end);
    uint64_t key[3];
    xdi_encoder_key(e, begin, bytes, key);
    xdi_cached *entry = xdi_encoder_entry(e, key, bytes);
    if (xdi_encoder_recall(e, entry, key, begin, bytes)) return XD_OK;
    const int64_t first = e->count;
    XD_TRY(xdi_encoder_merge(e, begin, end));
    xdi_encoder_remember(e, entry, key, begin, bytes, first);
    return XD_OK;
}

/* A piece from the splits; if no merge crosses a blank it is divided before each blank, so that the cache holds
 * words. */
static xd_result xdi_encoder_cut(xd_encoder *e, size_t begin, size_t end) {
    if (e->how.pieces) {
        XD_TRY(xdi_encoder_reserve(e, 1));
        xdi_encoder_put(e, -1, begin, end);
        return XD_OK;
    }
    if (!e->tokenizer->cuts_at_mark) return xdi_encoder_piece(e, begin, end);
    const uint8_t *text = e->text;
    bool other = false;
    size_t from = begin;
    for (size_t i = begin; i < end;) {
        if (text[i] != 0xe2 || end - i < 3 || memcmp(text + i, XDI_TOKENIZER_MARK, 3) != 0) {
            other = true;
            i++;
            continue;
        }
        if (other) {
            XD_TRY(xdi_encoder_piece(e, from, i));
            from = i;
            other = false;
        }
        i += 3;
    }
    return from < end ? xdi_encoder_piece(e, from, end) : XD_OK;
}

/* ---- splitting ---- */

static xd_result xdi_encoder_split(xd_encoder *e, int stage, size_t begin, size_t end);

/* Passes a piece of a split to the next split; empty pieces are dropped. */
static xd_result xdi_encoder_next(xd_encoder *e, int stage, size_t begin, size_t end) {
    if (begin >= end) return XD_OK;
    if (stage + 1 < e->tokenizer->stages.split_count) return xdi_encoder_split(e, stage + 1, begin, end);
    return xdi_encoder_cut(e, begin, end);
}

/* Text that may be joined to its neighbour: from `at` on; SIZE_MAX: none. */
typedef struct xdi_held {
    size_t at;
    bool match;
} xdi_held;

/* The parts of a text in turn: matches, and what lies between them. What is held goes on, or is joined to the
 * part. */
static xd_result xdi_encoder_part(xd_encoder *e, int stage, size_t begin, size_t end, bool match,
                                  xdi_held *held) {
    const xdi_split_behavior behavior = e->tokenizer->stages.splits[stage].behavior;
    if (begin >= end || (match && behavior == XDI_SPLIT_REMOVED)) return XD_OK;
    if (behavior <= XDI_SPLIT_REMOVED) return xdi_encoder_next(e, stage, begin, end);
    bool joins = held->at != SIZE_MAX, waits = true;
    if (behavior == XDI_SPLIT_CONTIGUOUS) joins = joins && held->match == match;
    if (behavior == XDI_SPLIT_WITH_PREVIOUS) {
        joins = joins && match;
        waits = !match;
    }
    if (behavior == XDI_SPLIT_WITH_NEXT) {
        joins = joins && !match;
        waits = match;
    }
    if (held->at != SIZE_MAX && !joins) XD_TRY(xdi_encoder_next(e, stage, held->at, begin));
    const size_t from = joins ? held->at : begin;
    held->at = waits ? from : SIZE_MAX;
    held->match = match;
    return waits ? XD_OK : xdi_encoder_next(e, stage, from, end);
}

static xd_result xdi_encoder_split(xd_encoder *e, int stage, size_t begin, size_t end) {
    const xdi_split *split = &e->tokenizer->stages.splits[stage];
    xdi_held held = { SIZE_MAX, false };
    size_t from, to;
    for (size_t at = begin; at < end; at = to) {
        XD_TRY(xdi_pattern_find(&e->matchers[stage], split->pattern, at, end, &from, &to));
        XD_TRY(xdi_encoder_part(e, stage, at, from, split->invert, &held));
        XD_TRY(xdi_encoder_part(e, stage, from, to, !split->invert, &held));
    }
    return held.at == SIZE_MAX ? XD_OK : xdi_encoder_next(e, stage, held.at, end);
}

/* ---- a text without added tokens ---- */

/* Converts the spans of the tokens from `first` on from the changed text to the original. Most are in the same run as
 * the token before, which is a constant shift if the run is linear. */
static void xdi_encoder_origins(xd_encoder *e, const xdi_text_view *view, int64_t first) {
    size_t run = 0;
    for (int64_t i = first; i < e->count; i++) {
        const xdi_text_run *r = &view->runs[run];
        const int64_t begin = r->at, end = run + 1 < view->run_count ? (int64_t)r[1].at : INT64_MAX;
        const int64_t shift = (int64_t)r->from - begin;
        xd_token_span *span = &e->spans[i];
        if (r->linear && span->begin >= begin && span->begin < end && span->end <= end) {
            span->begin += shift;
            span->end += shift;
        } else {
            *span = xdi_text_origin(view, &run, (size_t)span->begin, (size_t)span->end);
        }
    }
}

static xd_result xdi_encoder_plain(xd_encoder *e, const xdi_text_view *normal) {
    const xd_tokenizer *t = e->tokenizer;
    const int64_t first = e->count;
    xdi_text_view view;
    if (normal->length == 0) return XD_OK;
    XD_TRY(xdi_rewrite_apply(e->ctx, t, t->stages.normalizer_count, t->stages.rewrite_count, &e->rewriter, 2,
                             *normal, &view));
    if (view.length == 0) return XD_OK;
    e->text = view.bytes;
    e->length = view.length;
    for (int i = 0; i < t->stages.split_count; i++)
        xdi_matcher_start(&e->matchers[i], view.bytes, view.length);
    if (t->stages.split_count)
        XD_TRY(xdi_encoder_split(e, 0, 0, view.length));
    else
        XD_TRY(xdi_encoder_cut(e, 0, view.length));
    if (!e->how.skip_spans) xdi_encoder_origins(e, &view, first);
    return XD_OK;
}

/* ---- added tokens ---- */

/* Index of the first item of [low, high) whose byte at `depth` is not below c. */
static uint32_t xdi_encoder_narrow(const xd_encoder *e, const xdi_added *items, uint32_t low, uint32_t high,
                                   size_t depth, unsigned c) {
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (e->tokenizer->vocab.blob[items[middle].text + depth] < c)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest added token at the beginning of a text, NULL when there is none. The sorted list is narrowed
 * byte by byte to the items that begin like the text. */
static const xdi_added *xdi_encoder_added_at(const xd_encoder *e, const xdi_added_list *list,
                                             const uint8_t *text, size_t bytes) {
    const xdi_added *found = NULL;
    uint32_t low = 0, high = list->count;
    for (size_t depth = 0; low < high; depth++) {
        for (; low < high && list->items[low].bytes == depth; low++) found = &list->items[low];
        if (depth == bytes) break;
        low = xdi_encoder_narrow(e, list->items, low, high, depth, text[depth]);
        high = xdi_encoder_narrow(e, list->items, low, high, depth, text[depth] + 1u);
    }
    return found;
}

/* Letters, marks, digits, connectors and joiners: what \w is in most patterns. */
static bool xdi_encoder_is_word(const xd_encoder *e, const uint8_t *at, const uint8_t *end) {
    uint32_t point;
    xdi_utf8_decode(at, end, &point);
    const unsigned category = xdi_unicode_property(e->tokenizer->unicode, point) & XDI_UNICODE_CATEGORY;
    const bool letter = category >= XDI_UNICODE_LU && category <= XDI_UNICODE_NL;
    return letter || category == XDI_UNICODE_PC || point == 0x200c || point == 0x200d;
}

static bool xdi_encoder_is_space(const xd_encoder *e, const uint8_t *at, const uint8_t *end) {
    uint32_t point;
    xdi_utf8_decode(at, end, &point);
    const unsigned category = xdi_unicode_property(e->tokenizer->unicode, point) & XDI_UNICODE_CATEGORY;
    return xdi_unicode_space_mask() >> category & 1u;
}

/* Is a token that must be a single word surrounded by no word characters? True for all other tokens. */
static bool xdi_encoder_is_apart(const xd_encoder *e, const xdi_added *added, const xdi_text_view *view,
                                 size_t begin, size_t end) {
    const uint8_t *text = view->bytes, *const stop = text + view->length;
    if (!added->single_word) return true;
    if (begin > 0 && xdi_encoder_is_word(e, text + begin - xdi_utf8_before(text, text + begin), stop))
        return false;
    return end == view->length || !xdi_encoder_is_word(e, text + end, stop);
}

/* Finds the first added token in [at, end of the view): its item and the bytes it takes, white space
 * included. */
static const xdi_added *xdi_encoder_find_added(const xd_encoder *e, const xdi_added_list *list,
                                               const xdi_text_view *view, size_t at, size_t *begin,
                                               size_t *end) {
    const uint8_t *text = view->bytes, *const stop = text + view->length;
    for (size_t i = at; i < view->length && list->count; i++) {
        const uint8_t *next =
            list->alike ? (const uint8_t *)memchr(text + i, list->first, view->length - i) : text + i;
        if (!next) break;
        i = (size_t)(next - text);
        const unsigned pair = text[i] * 256u + (i + 1 < view->length ? text[i + 1] : 0u);
        const bool starts = ((unsigned)list->starts[pair >> 3] >> (pair & 7u)) & 1u;
        if (!starts && i + 1 < view->length) continue;
        const xdi_added *found = xdi_encoder_added_at(e, list, text + i, view->length - i);
        if (!found) continue;
        *begin = i;
        *end = i + found->bytes;
        /* A match that does not count hides what begins inside it, as in the reference. */
        if ((found->special && !e->how.parse_special) ||
            !xdi_encoder_is_apart(e, found, view, *begin, *end)) {
            i = *end - 1;
            continue;
        }
        while (found->strip_left && *begin > at) {
            const size_t back = xdi_utf8_before(text + at, text + *begin);
            if (!xdi_encoder_is_space(e, text + *begin - back, stop)) break;
            *begin -= back;
        }
        while (found->strip_right && *end < view->length && xdi_encoder_is_space(e, text + *end, stop)) {
            uint32_t point;
            *end += xdi_utf8_decode(text + *end, stop, &point);
        }
        return found;
    }
    *begin = *end = view->length;
    return NULL;
}

static xd_result xdi_encoder_reserve_runs(xd_encoder *e, size_t count) {
    if (count <= e->part_capacity) return XD_OK;
    void *memory = e->part_runs;
    e->part_capacity = 0;
    XD_TRY(xdi_encoder_grow(e, &memory, 0, 2 * count * sizeof *e->part_runs));
    e->part_runs = (xdi_text_run *)memory;
    e->part_capacity = 2 * count;
    return XD_OK;
}

static xd_result xdi_encoder_added(xd_encoder *e, int list, const xdi_text_view *view, xdi_text_run *runs);

/* Text between added tokens of a list: it is normalised and searched for those of the second list, or is
 * plain. */
static xd_result xdi_encoder_between(xd_encoder *e, int list, const xdi_text_view *part) {
    const xd_tokenizer *t = e->tokenizer;
    xdi_text_view normal;
    if (list == 1) return xdi_encoder_plain(e, part);
    XD_TRY(xdi_rewrite_apply(e->ctx, t, 0, t->stages.normalizer_count, &e->rewriter, 0, *part, &normal));
    XD_TRY(xdi_encoder_reserve_runs(e, normal.run_count + 1));
    return xdi_encoder_added(e, 1, &normal, e->part_runs);
}

/* Takes added tokens out of a view and passes on the text between them: those of list 0 are matched in the original
 * text, those of list 1 in the normalised text. `runs` has memory for the runs of a part. */
static xd_result xdi_encoder_added(xd_encoder *e, int list, const xdi_text_view *view, xdi_text_run *runs) {
    size_t begin, end, run = 0;
    for (size_t at = 0; at < view->length; at = end) {
        const xdi_added *found =
            xdi_encoder_find_added(e, &e->tokenizer->added[list], view, at, &begin, &end);
        if (begin > at) {
            const xdi_text_view part = xdi_text_part(view, &run, at, begin, runs);
            XD_TRY(xdi_encoder_between(e, list, &part));
        }
        if (!found) continue;
        const xd_token_span span = xdi_text_origin(view, &run, begin, end);
        XD_TRY(xdi_encoder_reserve(e, 1));
        xdi_encoder_put(e, found->id, (size_t)span.begin, (size_t)span.end);
    }
    return XD_OK;
}

/* ---- around the text ---- */

/* Appends `count` special tokens with an empty span at offset `at` of the text. */
static xd_result xdi_encoder_put_around(xd_encoder *e, const int32_t *ids, int count, size_t at) {
    XD_TRY(xdi_encoder_reserve(e, (size_t)count));
    for (int i = 0; i < count; i++) xdi_encoder_put(e, ids[i], at, at);
    return XD_OK;
}

/* The roles of the tokens, when all of them are known. */
static xd_result xdi_encoder_fill_roles(xd_encoder *e) {
    const xd_tokenizer *t = e->tokenizer;
    const size_t count = (size_t)e->count, before = (size_t)t->around.before,
                 behind = (size_t)t->around.behind;
    if (!e->roles || count > e->role_capacity) {
        void *memory = e->roles;
        e->role_capacity = 0;
        XD_TRY(xdi_encoder_grow(e, &memory, 0, (size_t)e->capacity));
        e->roles = (uint8_t *)memory;
        e->role_capacity = (size_t)e->capacity;
    }
    if (count == 0) return XD_OK;
    memset(e->roles, (int)XD_TOKEN_SPECIAL, count);
    memset(e->roles + before, (int)XD_TOKEN_TEXT, count - before - behind);
    if (before) e->roles[0] = (uint8_t)XD_TOKEN_BOS;
    if (behind) e->roles[count - 1] = (uint8_t)XD_TOKEN_EOS;
    return XD_OK;
}

static xd_result xdi_encoder_check(const xd_encoder *e, size_t bytes, bool add_special) {
    XD_REQUIRE(e->ctx, bytes < XDI_TOKENIZER_TEXT, XD_ERROR_ARGUMENT,
               "a text of %llu bytes; less than %d are supported", (unsigned long long)bytes,
               (int)XDI_TOKENIZER_TEXT);
    XD_REQUIRE(e->ctx, !add_special || !e->tokenizer->around.refusal[0], XD_ERROR_UNSUPPORTED,
               "add_special: %s", e->tokenizer->around.refusal);
    return XD_OK;
}

XD_API xd_result xd_encode(xd_encoder *e, const char *text, size_t bytes, const xd_encode_desc *desc,
                           xd_encoding *out) {
    XDI_LIVE(xd_encoder, e);
    XDI_GIVEN_OF(e, out);
    XDI_GIVEN_LIST(e->ctx, text, bytes);
    const xd_tokenizer *t = e->tokenizer;
    const xd_encode_desc plain = { false, false, false, false };
    const bool add_special = desc && desc->add_special;
    XD_TRY(xdi_encoder_check(e, bytes, add_special));
    xdi_text_run whole = { 0, 0, (uint32_t)bytes, true }, part;
    const xdi_text_view view = { (const uint8_t *)text, bytes, &whole, 1 };
    e->count = 0;
    e->how = desc ? *desc : plain;
    XD_TRY(xdi_encoder_put_around(e, t->around.ids, add_special ? t->around.before : 0, 0));
    XD_TRY(xdi_encoder_added(e, 0, &view, &part));
    if (add_special) {
        XD_TRY(xdi_encoder_put_around(e, t->around.ids + t->around.before, t->around.behind, bytes));
        XD_TRY(xdi_encoder_fill_roles(e));
    }
    out->count = e->count;
    out->ids = e->ids;
    out->spans = e->how.skip_spans ? NULL : e->spans;
    out->roles = add_special ? e->roles : NULL;
    return XD_OK;
}
