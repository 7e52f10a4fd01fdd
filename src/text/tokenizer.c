/* The tokenizer object: tokens, merges, special tokens, and the functions that loaders build it with. */

#include "text/internal.h"

#include <stdio.h>
#include <string.h>

enum {
    XDI_TOKENIZER_LONGEST = 1 << 16, /* bytes of one token */
    XDI_TOKENIZER_DERIVED = 1024,    /* ... whose merges are derived, which takes time by the square */
    XDI_TOKENIZER_ADDED = 512,       /* ... that is searched for at each offset of a text */
    XDI_TOKENIZER_MERGES = 1 << 23,  /* the largest files have half a million */
    XDI_TOKENIZER_PROBES = 4096      /* of a hash table; only a hostile file needs more */
};

/* ---- hash tables ---- */

static uint32_t xdi_tokenizer_hash_bytes(const uint8_t *bytes, size_t length) {
    uint64_t hash = 0x9e3779b97f4a7c15u ^ length;
    for (; length >= 8; bytes += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    uint64_t word = 0;
    memcpy(&word, bytes, length);
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
    hash *= 0xc4ceb9fe1a85ec53u;
    return (uint32_t)(hash >> 32);
}

static bool xdi_vocabulary_is_text(const xdi_vocabulary *v, bool raw, int32_t id, const uint8_t *text,
                                   size_t bytes) {
    const xdi_token *token = &v->tokens[id];
    const uint32_t at = raw ? token->raw : token->text, length = raw ? token->raw_bytes : token->text_bytes;
    return length == bytes && memcmp(v->blob + at, text, bytes) == 0;
}

/* The slot of a text: the one that has it, or a free one; NULL when a hostile file made the table slow. */
static xdi_slot *xdi_vocabulary_slot(const xdi_vocabulary *v, bool raw, const uint8_t *text, size_t bytes) {
    xdi_slot *table = raw ? v->raws : v->pieces;
    const uint32_t hash = xdi_tokenizer_hash_bytes(text, bytes);
    for (uint32_t i = 0; i < XDI_TOKENIZER_PROBES; i++) {
        xdi_slot *at = &table[(hash + i) & (v->piece_slots - 1)];
        if (at->id == 0) return at;
        if (at->hash == hash && xdi_vocabulary_is_text(v, raw, at->id - 1, text, bytes)) return at;
    }
    return NULL;
}

static void xdi_vocabulary_fill_slot(const xdi_vocabulary *v, xdi_slot *slot, bool raw, int32_t id) {
    const xdi_token *token = &v->tokens[id];
    slot->hash = xdi_tokenizer_hash_bytes(v->blob + (raw ? token->raw : token->text),
                                          raw ? token->raw_bytes : token->text_bytes);
    slot->id = id + 1;
}

XD_PRIVATE int32_t xdi_vocabulary_piece(const xdi_vocabulary *v, const uint8_t *text, size_t bytes) {
    const xdi_slot *slot = xdi_vocabulary_slot(v, false, text, bytes);
    return slot ? slot->id - 1 : -1;
}

/* ---- spellings ---- */

XD_PRIVATE size_t xdi_tokenizer_unmark(const uint8_t *text, size_t bytes, uint8_t *out) {
    size_t count = 0;
    for (size_t i = 0; i < bytes;) {
        const bool mark = bytes - i >= 3 && memcmp(text + i, XDI_TOKENIZER_MARK, 3) == 0;
        out[count++] = mark ? (uint8_t)' ' : text[i];
        i += mark ? 3 : 1;
    }
    return count;
}

static int xdi_tokenizer_hex(uint8_t c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

XD_PRIVATE int xdi_tokenizer_fallback_byte(const uint8_t *text, size_t bytes) {
    if (bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    const int high = xdi_tokenizer_hex(text[3]), low = xdi_tokenizer_hex(text[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* ---- building ---- */

XD_PRIVATE xd_result xdi_tokenizer_begin(xd_ctx *ctx, int64_t size, size_t blob_bytes, xd_tokenizer **out) {
    XD_REQUIRE(ctx, size > 0 && size <= XDI_TOKENIZER_IDS, XD_ERROR_FORMAT,
               "tokenizer: ids up to %lld; 0 to %d are supported", (long long)size - 1,
               XDI_TOKENIZER_IDS - 1);
    XD_REQUIRE(ctx, blob_bytes < UINT32_MAX, XD_ERROR_FORMAT, "tokenizer: %llu bytes of text are too many",
               (unsigned long long)blob_bytes);
    xd_tokenizer *t = XDI_OBJECT(xd_tokenizer, ctx, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a tokenizer");
    t->ctx = t->vocab.ctx = t->merges.ctx = ctx;
    t->vocab.size = (int32_t)size;
    t->vocab.unknown = t->bos = t->eos = -1;
    t->vocab.blob_capacity = blob_bytes;
    for (t->vocab.piece_slots = 16; t->vocab.piece_slots < 2 * (uint32_t)size;) t->vocab.piece_slots *= 2;
    for (int i = 0; i < 256; i++) t->vocab.byte_id[i] = -1;
    t->unicode = xdi_unicode_create(ctx);
    t->vocab.tokens = (xdi_token *)xd_allocate(ctx, (size_t)size * sizeof *t->vocab.tokens);
    t->vocab.blob = (uint8_t *)xd_allocate(ctx, blob_bytes + XDI_TOKENIZER_LONGEST);
    t->vocab.pieces = (xdi_slot *)xd_allocate(ctx, t->vocab.piece_slots * sizeof *t->vocab.pieces);
    const bool fits = t->unicode && t->vocab.tokens && t->vocab.blob && t->vocab.pieces;
    if (!fits) xd_tokenizer_destroy(t);
    XD_REQUIRE(ctx, fits, XD_ERROR_MEMORY, "no room for a tokenizer of %lld ids", (long long)size);
    *out = t;
    return XD_OK;
}

XD_API void xd_tokenizer_destroy(xd_tokenizer *t) {
    if (!t || XDI_IS_GONE(xd_tokenizer, t)) return;
    for (int i = 0; i < t->stages.rewrite_count; i++)
        xdi_pattern_destroy(t->ctx, t->stages.rewrites[i].pattern);
    for (int i = 0; i < t->stages.split_count; i++) xdi_pattern_destroy(t->ctx, t->stages.splits[i].pattern);
    for (int i = 0; i < 2; i++) {
        xd_release(t->ctx, t->added[i].items);
        xd_release(t->ctx, t->added[i].starts);
    }
    xdi_unicode_destroy(t->ctx, t->unicode);
    xd_release(t->ctx, t->vocab.tokens);
    xd_release(t->ctx, t->vocab.blob);
    xd_release(t->ctx, t->vocab.pieces);
    xd_release(t->ctx, t->vocab.raws);
    xd_release(t->ctx, t->merges.items);
    xd_release(t->ctx, t->merges.bits);
    xd_release(t->ctx, t->merges.merging);
    xd_release(t->ctx, t->vocab.character_pages);
    xd_release(t->ctx, t->vocab.character_ids);
    xd_release(t->ctx, t);
}

/* Appends bytes to the blob and returns where they begin. The loader has counted them. If its count is wrong, a text is
 * truncated, but nothing outside the blob is written: after its end there is memory for a whole token. */
static uint32_t xdi_vocabulary_store(xdi_vocabulary *v, const void *bytes, size_t length) {
    const size_t at = v->blob_bytes, left = v->blob_capacity - at;
    XD_ASSERT(length <= left);
    memcpy(v->blob + at, bytes, length <= left ? length : left);
    v->blob_bytes += length <= left ? length : left;
    return (uint32_t)at;
}

static xd_result xdi_vocabulary_check_free(const xdi_vocabulary *v, int64_t id) {
    XD_REQUIRE(v->ctx, id >= 0 && id < v->size, XD_ERROR_FORMAT, "tokenizer: id %lld is not in 0 to %d",
               (long long)id, (int)v->size - 1);
    XD_REQUIRE(v->ctx, v->tokens[id].kind == XD_TOKEN_KIND_NONE, XD_ERROR_FORMAT,
               "tokenizer: id %lld stands twice", (long long)id);
    return XD_OK;
}

static xd_result xdi_vocabulary_check_id(const xdi_vocabulary *v, int64_t id, size_t bytes) {
    XD_TRY(xdi_vocabulary_check_free(v, id));
    XD_REQUIRE(v->ctx, bytes > 0 && bytes <= XDI_TOKENIZER_LONGEST, XD_ERROR_FORMAT,
               "tokenizer: id %lld has %llu bytes; 1 to %d are supported", (long long)id,
               (unsigned long long)bytes, (int)XDI_TOKENIZER_LONGEST);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocabulary_set_empty(xdi_vocabulary *v, int64_t id) {
    XD_TRY(xdi_vocabulary_check_free(v, id));
    v->tokens[id].kind = XD_TOKEN_KIND_NORMAL;
    v->count++;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocabulary_set(xdi_vocabulary *v, int64_t id, xd_token_kind kind, const void *text,
                                        size_t text_bytes) {
    XD_TRY(xdi_vocabulary_check_id(v, id, text_bytes));
    xdi_token *token = &v->tokens[id];
    token->kind = kind;
    token->text = token->raw = xdi_vocabulary_store(v, text, text_bytes);
    token->text_bytes = token->raw_bytes = (uint32_t)text_bytes;
    v->count++;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_vocabulary_add(xdi_vocabulary *v, int64_t id, xd_token_kind kind, const void *text,
                                        size_t text_bytes, const void *raw, size_t raw_bytes) {
    xdi_slot *slot = xdi_vocabulary_slot(v, false, (const uint8_t *)text, text_bytes);
    XD_REQUIRE(v->ctx, slot, XD_ERROR_FORMAT, "tokenizer: more than %d texts share a hash",
               (int)XDI_TOKENIZER_PROBES);
    XD_REQUIRE(v->ctx, slot->id == 0, XD_ERROR_FORMAT, "tokenizer: ids %d and %lld have the same text",
               (int)slot->id - 1, (long long)id);
    XD_TRY(xdi_vocabulary_set(v, id, kind, text, text_bytes));
    xdi_vocabulary_fill_slot(v, slot, false, (int32_t)id);
    xdi_token *token = &v->tokens[id];
    if (raw) token->raw = xdi_vocabulary_store(v, raw, raw_bytes);
    if (raw) token->raw_bytes = (uint32_t)raw_bytes;
    if (kind == XD_TOKEN_KIND_BYTE ||
        (v->byte_level && kind == XD_TOKEN_KIND_NORMAL && token->raw_bytes == 1))
        v->byte_id[v->blob[token->raw]] = (int32_t)id;
    return XD_OK;
}

static xd_result xdi_merges_put(xdi_merges *m, const xdi_merge *merge) {
    const uint64_t pair = merge->pair;
    uint32_t slot = xdi_merge_hash(pair);
    for (int i = 0; i < XDI_TOKENIZER_PROBES; i++, slot++) {
        xdi_merge *at = &m->items[slot & (m->slots - 1)];
        if (at->pair != UINT64_MAX && at->pair != pair) continue;
        if (at->pair != pair) m->count++;
        *at = *merge;
        return XD_OK;
    }
    return XD_FAIL(m->ctx, XD_ERROR_FORMAT, "tokenizer: more than %d merges share a hash",
                   (int)XDI_TOKENIZER_PROBES);
}

/* Doubles the table of merges. */
static xd_result xdi_merges_grow(xdi_merges *m) {
    xdi_merge *old = m->items;
    const uint32_t old_slots = m->slots, slots = old_slots ? 2 * old_slots : 1024;
    XD_REQUIRE(m->ctx, slots <= 2 * XDI_TOKENIZER_MERGES, XD_ERROR_FORMAT, "tokenizer: more than %d merges",
               (int)XDI_TOKENIZER_MERGES);
    xdi_merge *merges = (xdi_merge *)xd_allocate(m->ctx, slots * sizeof *merges);
    XD_REQUIRE(m->ctx, merges, XD_ERROR_MEMORY, "no room for %u merges", (unsigned)slots / 2);
    for (uint32_t i = 0; i < slots; i++) merges[i].pair = UINT64_MAX;
    m->items = merges;
    m->slots = slots;
    m->count = 0;
    xd_result result = XD_OK;
    for (uint32_t i = 0; i < old_slots && result == XD_OK; i++)
        if (old[i].pair != UINT64_MAX) result = xdi_merges_put(m, &old[i]);
    xd_release(m->ctx, old);
    return result;
}

XD_PRIVATE xd_result xdi_merges_add(xdi_merges *m, int32_t left, int32_t right, int32_t rank, int32_t id) {
    if (2 * m->count >= m->slots) XD_TRY(xdi_merges_grow(m));
    xdi_merge merge;
    merge.pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    merge.rank = rank;
    merge.id = id;
    return xdi_merges_put(m, &merge);
}

XD_PRIVATE xd_result xdi_tokenizer_derive_merges(xd_tokenizer *t, const int32_t *ranks) {
    for (int32_t id = 0; id < t->vocab.size; id++) {
        const xdi_token *token = &t->vocab.tokens[id];
        if (token->kind != XD_TOKEN_KIND_NORMAL) continue;
        const uint8_t *text = t->vocab.blob + token->text;
        XD_REQUIRE(t->ctx, token->text_bytes <= XDI_TOKENIZER_DERIVED, XD_ERROR_UNSUPPORTED,
                   "tokenizer: id %d has %u bytes; at most %d are supported in this form", (int)id,
                   (unsigned)token->text_bytes, (int)XDI_TOKENIZER_DERIVED);
        for (uint32_t cut = 1; cut < token->text_bytes; cut++) {
            if (!t->vocab.byte_level && (text[cut] & 0xc0u) == 0x80u) continue;
            const int32_t left = xdi_vocabulary_piece(&t->vocab, text, cut);
            if (left < 0 || t->vocab.tokens[left].kind != XD_TOKEN_KIND_NORMAL) continue;
            const int32_t right = xdi_vocabulary_piece(&t->vocab, text + cut, token->text_bytes - cut);
            if (right < 0 || t->vocab.tokens[right].kind != XD_TOKEN_KIND_NORMAL) continue;
            XD_TRY(xdi_merges_add(&t->merges, left, right, ranks[id], id));
        }
    }
    return XD_OK;
}

/* Appends to a list that grows by doubling its memory. */
static xd_result xdi_tokenizer_append_added(xd_tokenizer *t, const xdi_added *added) {
    xdi_added_list *list = &t->added[added->normalized ? 1 : 0];
    if ((list->count & (list->count - 1)) == 0) { /* full: capacities are the powers of two */
        const size_t capacity = list->count ? 2 * (size_t)list->count : 1;
        xdi_added *items = (xdi_added *)xd_allocate(t->ctx, capacity * sizeof *items);
        XD_REQUIRE(t->ctx, items, XD_ERROR_MEMORY, "no room for %llu added tokens",
                   (unsigned long long)capacity);
        if (list->items) memcpy(items, list->items, list->count * sizeof *items);
        xd_release(t->ctx, list->items);
        list->items = items;
    }
    list->items[list->count++] = *added;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_tokenizer_add_special(xd_tokenizer *t, const xdi_added *added, const char *text,
                                               size_t bytes) {
    xdi_added item = *added;
    XD_REQUIRE(t->ctx, item.id >= 0 && item.id < t->vocab.size, XD_ERROR_FORMAT,
               "tokenizer: added token %d is not in 0 to %d", (int)item.id, (int)t->vocab.size - 1);
    XD_REQUIRE(t->ctx, bytes <= XDI_TOKENIZER_ADDED, XD_ERROR_UNSUPPORTED,
               "tokenizer: added token %d has %llu bytes; at most %d are supported", (int)item.id,
               (unsigned long long)bytes, (int)XDI_TOKENIZER_ADDED);
    xdi_token *token = &t->vocab.tokens[item.id];
    if (token->kind == XD_TOKEN_KIND_NONE)
        XD_TRY(xdi_vocabulary_set(&t->vocab, item.id, XD_TOKEN_KIND_ADDED, text, bytes));
    if (token->raw_bytes != bytes || memcmp(t->vocab.blob + token->raw, text, bytes) != 0) {
        token->text = token->raw = xdi_vocabulary_store(&t->vocab, text, bytes);
        token->text_bytes = token->raw_bytes = (uint32_t)bytes;
    }
    if (token->kind != XD_TOKEN_KIND_UNKNOWN)
        token->kind = item.special ? XD_TOKEN_KIND_SPECIAL : XD_TOKEN_KIND_ADDED;
    item.text = token->text;
    item.bytes = token->text_bytes;
    return xdi_tokenizer_append_added(t, &item);
}

XD_PRIVATE xd_result xdi_tokenizer_measure_specials(xd_ctx *ctx, const xd_tokenizer_desc *desc, int64_t *size,
                                                    size_t *bytes) {
    XD_REQUIRE(ctx, desc->special_count >= 0 && (desc->specials || desc->special_count == 0),
               XD_ERROR_ARGUMENT, "%lld special tokens, specials is %s", (long long)desc->special_count,
               desc->specials ? "given" : "NULL");
    for (int64_t i = 0; i < desc->special_count; i++) {
        const xd_tokenizer_special *s = &desc->specials[i];
        XD_REQUIRE(ctx, s->content && *s->content && s->id >= 0 && s->id < XDI_TOKENIZER_IDS,
                   XD_ERROR_ARGUMENT, "special token %lld has no content, or id %d is not in 0 to %d",
                   (long long)i, (int)s->id, XDI_TOKENIZER_IDS - 1);
        if (s->id >= *size) *size = (int64_t)s->id + 1;
        *bytes += strlen(s->content);
    }
    return XD_OK;
}

XD_PRIVATE xd_result xdi_tokenizer_add_specials(xd_tokenizer *t, const xd_tokenizer_desc *desc) {
    for (int64_t i = 0; i < desc->special_count; i++) {
        const char *content = desc->specials[i].content;
        xdi_added added;
        memset(&added, 0, sizeof added);
        added.id = desc->specials[i].id;
        added.special = true;
        XD_REQUIRE(t->ctx, t->vocab.tokens[added.id].kind == XD_TOKEN_KIND_NONE, XD_ERROR_ARGUMENT,
                   "special token \"%.80s\": id %d is taken", content, (int)added.id);
        XD_TRY(xdi_tokenizer_add_special(t, &added, content, strlen(content)));
    }
    return XD_OK;
}

/* ---- around a text ---- */

XD_PRIVATE void xdi_around_refuse(xdi_around *a, const char *what, const char *name) {
    if (!a->refusal[0]) snprintf(a->refusal, sizeof a->refusal, "%.40s %.40s", what, name);
}

XD_PRIVATE void xdi_around_put(xdi_around *a, int32_t id, bool behind) {
    const int count = a->before + a->behind;
    if (count == XDI_TOKENIZER_AROUND) {
        xdi_around_refuse(a, "more special tokens than are supported", "around a text");
        return;
    }
    a->ids[count] = id;
    if (behind)
        a->behind++;
    else
        a->before++;
}

XD_PRIVATE int32_t xdi_tokenizer_special(const xd_tokenizer *t, const char *name, size_t bytes) {
    for (int l = 0; l < 2; l++)
        for (uint32_t i = 0; i < t->added[l].count; i++) {
            const int32_t id = t->added[l].items[i].id;
            if (xdi_vocabulary_is_text(&t->vocab, false, id, (const uint8_t *)name, bytes)) return id;
        }
    return -1;
}

XD_PRIVATE void xdi_tokenizer_name_ends(xd_tokenizer *t, const char *bos, const char *eos) {
    t->bos = bos ? xdi_tokenizer_special(t, bos, strlen(bos)) : -1;
    t->eos = eos ? xdi_tokenizer_special(t, eos, strlen(eos)) : -1;
    if (t->bos >= 0)
        xdi_around_put(&t->around, t->bos, false);
    else if (bos)
        xdi_around_refuse(&t->around, "there is no special token", bos);
}

XD_PRIVATE xd_result xdi_tokenizer_replace_ends(xd_tokenizer *t, const xd_tokenizer_desc *desc) {
    const char *const names[] = { desc->bos, desc->eos };
    int32_t ids[] = { -1, -1 };
    if (!desc->bos && !desc->eos) return XD_OK;
    t->around.before = t->around.behind = 0;
    t->around.refusal[0] = '\0';
    for (int i = 0; i < 2; i++) {
        if (!names[i]) continue;
        ids[i] = xd_tokenizer_find_special(t, names[i]);
        XD_REQUIRE(t->ctx, ids[i] >= 0, XD_ERROR_ARGUMENT,
                   "tokenizer: no special token \"%.80s\" to %s a text", names[i], i ? "end" : "begin");
        xdi_around_put(&t->around, ids[i], i > 0);
    }
    t->bos = ids[0];
    t->eos = ids[1];
    return XD_OK;
}

/* ---- stages ---- */

static void xdi_tokenizer_mix(uint64_t *hash, uint64_t value) {
    uint64_t h = (*hash ^ value) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9u;
    *hash = h ^ h >> 32;
}

static void xdi_tokenizer_mix_bytes(uint64_t *hash, const uint8_t *bytes, size_t length) {
    xdi_tokenizer_mix(hash, length);
    for (size_t i = 0; i < length; i++) xdi_tokenizer_mix(hash, bytes[i]);
}

/* A pattern from its text, or from a literal by escaping what is not a letter or a digit. */
static xd_result xdi_tokenizer_compile(xd_tokenizer *t, const char *text, size_t bytes, bool literal,
                                       xdi_pattern **out) {
    xdi_tokenizer_mix_bytes(&t->hash, (const uint8_t *)text, bytes);
    if (!literal) {
        XD_TRY(xdi_pattern_create(t->ctx, text, bytes, t->unicode, out));
        if (t->ends_lines && xdi_pattern_end_lines(*out)) xdi_tokenizer_mix(&t->hash, 1);
        return XD_OK;
    }
    char *escaped = (char *)xd_allocate(t->ctx, 2 * bytes + 1);
    size_t length = 0;
    XD_REQUIRE(t->ctx, escaped, XD_ERROR_MEMORY, "no room for a pattern");
    for (size_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c > ' ' && c < 127 && strchr("$()*+.?[\\]^{|}", c)) escaped[length++] = '\\';
        escaped[length++] = c;
    }
    const xd_result result = xdi_pattern_create(t->ctx, escaped, length, t->unicode, out);
    xd_release(t->ctx, escaped);
    return result;
}

XD_PRIVATE xd_result xdi_tokenizer_add_split(xd_tokenizer *t, const char *pattern, size_t bytes, bool literal,
                                             xdi_split_behavior behavior, bool invert) {
    XD_REQUIRE(t->ctx, t->stages.split_count < XDI_TOKENIZER_STAGES, XD_ERROR_UNSUPPORTED,
               "tokenizer: more than %d pre-tokenizers", (int)XDI_TOKENIZER_STAGES);
    xdi_split *split = &t->stages.splits[t->stages.split_count];
    XD_TRY(xdi_tokenizer_compile(t, pattern, bytes, literal, &split->pattern));
    split->behavior = behavior;
    split->invert = invert;
    t->stages.split_count++;
    return XD_OK;
}

XD_PRIVATE xd_result xdi_tokenizer_add_rewrite(xd_tokenizer *t, xdi_rewrite_kind kind, const char *pattern,
                                               size_t bytes, bool literal, const char *to, size_t to_bytes) {
    XD_REQUIRE(t->ctx, t->stages.rewrite_count < XDI_TOKENIZER_STAGES, XD_ERROR_UNSUPPORTED,
               "tokenizer: more than %d normalizers", (int)XDI_TOKENIZER_STAGES);
    xdi_rewrite *rewrite = &t->stages.rewrites[t->stages.rewrite_count];
    if (pattern) XD_TRY(xdi_tokenizer_compile(t, pattern, bytes, literal, &rewrite->pattern));
    rewrite->kind = kind;
    rewrite->one = pattern && literal && bytes == 1 && (unsigned char)pattern[0] < 0x80 ? pattern[0] : '\0';
    rewrite->to = xdi_vocabulary_store(&t->vocab, to, to_bytes);
    rewrite->to_bytes = (uint32_t)to_bytes;
    t->stages.rewrite_count++;
    return XD_OK;
}

/* ---- finishing ---- */

static int xdi_tokenizer_compare(const uint8_t *a, size_t a_bytes, const uint8_t *b, size_t b_bytes) {
    const int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order ? order : a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

/* Sifts an item into a heap of added tokens, largest first. */
static void xdi_added_sift(const xdi_vocabulary *v, xdi_added *items, uint32_t root, uint32_t count) {
    const xdi_added moving = items[root];
    for (uint32_t child; (child = 2 * root + 1) < count; root = child) {
        const xdi_added *c = &items[child];
        if (child + 1 < count &&
            xdi_tokenizer_compare(v->blob + c->text, c->bytes, v->blob + c[1].text, c[1].bytes) < 0)
            c = &items[++child];
        if (xdi_tokenizer_compare(v->blob + moving.text, moving.bytes, v->blob + c->text, c->bytes) >= 0)
            break;
        items[root] = *c;
    }
    items[root] = moving;
}

static xd_result xdi_added_sort(xdi_vocabulary *v, xdi_added_list *list) {
    if (list->count == 0) return XD_OK;
    for (uint32_t i = list->count / 2; i-- > 0;) xdi_added_sift(v, list->items, i, list->count);
    for (uint32_t end = list->count; end-- > 1;) {
        const xdi_added largest = list->items[0];
        list->items[0] = list->items[end];
        list->items[end] = largest;
        xdi_added_sift(v, list->items, 0, end);
    }
    list->starts = (uint8_t *)xd_allocate(v->ctx, 8192);
    XD_REQUIRE(v->ctx, list->starts, XD_ERROR_MEMORY, "no room for added tokens");
    for (uint32_t i = 0; i < list->count; i++) {
        const uint8_t *text = v->blob + list->items[i].text;
        const unsigned first = text[0] * 256u, low = list->items[i].bytes > 1 ? text[1] : 0u;
        const unsigned high = list->items[i].bytes > 1 ? text[1] : 255u;
        for (unsigned s = low; s <= high; s++) list->starts[(first + s) >> 3] |= (uint8_t)(1u << (s & 7u));
    }
    list->first = v->blob[list->items[0].text];
    list->alike = v->blob[list->items[list->count - 1].text] == list->first;
    return XD_OK;
}

/* Added tokens that are matched after normalisation are normalised too. */
static xd_result xdi_tokenizer_normalize_added(xd_tokenizer *t) {
    xdi_added_list *list = &t->added[1];
    const int last = t->stages.normalizer_count - (t->text_prefix ? 1 : 0);
    if (last == 0) return XD_OK;
    xdi_rewriter rewriter;
    memset(&rewriter, 0, sizeof rewriter);
    rewriter.matcher.ctx = t->ctx;
    xd_result result = XD_OK;
    for (uint32_t i = 0; i < list->count && result == XD_OK; i++) {
        if (list->items[i].literal) continue;
        xdi_text_run run = { 0, 0, list->items[i].bytes, true };
        xdi_text_view in = { t->vocab.blob + list->items[i].text, list->items[i].bytes, &run, 1 }, out;
        result = xdi_rewrite_apply(t->ctx, t, 0, last, &rewriter, 0, in, &out);
        if (result != XD_OK || out.bytes == in.bytes) continue;
        if (out.length == 0 || out.length > XDI_TOKENIZER_ADDED ||
            t->vocab.blob_bytes + out.length > t->vocab.blob_capacity)
            result =
                XD_FAIL(t->ctx, XD_ERROR_UNSUPPORTED,
                        "tokenizer: added token %d normalises to %llu bytes; 1 to %d are supported",
                        (int)list->items[i].id, (unsigned long long)out.length, (int)XDI_TOKENIZER_ADDED);
        if (result != XD_OK) continue;
        list->items[i].text = xdi_vocabulary_store(&t->vocab, out.bytes, out.length);
        list->items[i].bytes = (uint32_t)out.length;
    }
    xdi_rewriter_release(t->ctx, &rewriter);
    return result;
}

/* Does a text contain a blank after another character? */
static bool xdi_tokenizer_crosses_mark(const uint8_t *text, size_t bytes) {
    bool other = false;
    for (size_t i = 0; i < bytes;) {
        const bool mark = bytes - i >= 3 && memcmp(text + i, XDI_TOKENIZER_MARK, 3) == 0;
        if (mark && other) return true;
        if (!mark) other = true;
        i += mark ? 3 : 1;
    }
    return false;
}

/* Without an unknown token a character may be dropped, and its neighbours could then merge across a split. */
static void xdi_tokenizer_find_cuts(xd_tokenizer *t) {
    const int32_t mark = xdi_vocabulary_piece(&t->vocab, (const uint8_t *)XDI_TOKENIZER_MARK, 3);
    t->cuts_at_mark = !t->vocab.byte_level && !t->ignore_merges && mark >= 0 && t->vocab.unknown >= 0;
    for (uint32_t i = 0; i < t->merges.slots && t->cuts_at_mark; i++) {
        if (t->merges.items[i].pair == UINT64_MAX) continue;
        const xdi_token *token = &t->vocab.tokens[t->merges.items[i].id];
        if (xdi_tokenizer_crosses_mark(t->vocab.blob + token->text, token->text_bytes))
            t->cuts_at_mark = false;
    }
}

static xd_result xdi_merges_fill_bits(xdi_merges *m, int32_t size) {
    const size_t bits = XDI_TOKENIZER_BITS * (size_t)m->slots;
    m->bits = (uint64_t *)xd_allocate(m->ctx, bits / 8);
    m->merging = (uint64_t *)xd_allocate(m->ctx, ((size_t)size + 63) / 64 * sizeof *m->merging);
    XD_REQUIRE(m->ctx, m->bits && m->merging, XD_ERROR_MEMORY, "no room for %u merges", (unsigned)m->count);
    for (uint32_t i = 0; i < m->slots; i++) {
        const uint64_t pair = m->items[i].pair;
        const size_t bit = xdi_merge_hash(pair) & (bits - 1);
        if (pair == UINT64_MAX) continue;
        m->bits[bit >> 6] |= (uint64_t)1 << (bit & 63u);
        m->merging[pair >> 38] |= (uint64_t)1 << (pair >> 32 & 63u);
        m->merging[(uint32_t)pair >> 6] |= (uint64_t)1 << (pair & 63u);
    }
    return XD_OK;
}

/* The code point of a token of one character, XDI_UNICODE_INVALID for others. */
static uint32_t xdi_vocabulary_point(const xdi_vocabulary *v, const xdi_token *token) {
    const uint8_t *text = v->blob + token->text;
    uint32_t point = XDI_UNICODE_INVALID;
    if (token->text_bytes == 0 || token->kind == XD_TOKEN_KIND_NONE) return point;
    const size_t length = xdi_utf8_decode(text, text + token->text_bytes, &point);
    return length == token->text_bytes ? point : (uint32_t)XDI_UNICODE_INVALID;
}

/* Block 0 is that of all pages without tokens. */
static xd_result xdi_vocabulary_fill_characters(xdi_vocabulary *v) {
    size_t blocks = 1;
    if (v->byte_level) return XD_OK;
    v->character_pages =
        (uint16_t *)xd_allocate(v->ctx, 0x110000 / XDI_TOKENIZER_PAGE * sizeof *v->character_pages);
    XD_REQUIRE(v->ctx, v->character_pages, XD_ERROR_MEMORY, "no room for a table of characters");
    for (int32_t id = 0; id < v->size; id++) {
        const uint32_t point = xdi_vocabulary_point(v, &v->tokens[id]);
        if (point == XDI_UNICODE_INVALID || v->character_pages[point / XDI_TOKENIZER_PAGE]) continue;
        v->character_pages[point / XDI_TOKENIZER_PAGE] = (uint16_t)blocks++;
    }
    v->character_ids = (int32_t *)xd_allocate(v->ctx, blocks * XDI_TOKENIZER_PAGE * sizeof *v->character_ids);
    XD_REQUIRE(v->ctx, v->character_ids, XD_ERROR_MEMORY, "no room for a table of characters");
    memset(v->character_ids, 0xff, blocks * XDI_TOKENIZER_PAGE * sizeof *v->character_ids);
    for (int32_t id = 0; id < v->size; id++) {
        const xdi_token *token = &v->tokens[id];
        const uint32_t point = xdi_vocabulary_point(v, token);
        if (point == XDI_UNICODE_INVALID) continue;
        const size_t block = v->character_pages[point / XDI_TOKENIZER_PAGE];
        v->character_ids[block * XDI_TOKENIZER_PAGE + point % XDI_TOKENIZER_PAGE] =
            xdi_vocabulary_piece(v, v->blob + token->text, token->text_bytes);
    }
    return XD_OK;
}

/* Which of several tokens with the same bytes is stored, the lowest first; 3: none of them. */
static int xdi_vocabulary_order(const xdi_vocabulary *v, int32_t id) {
    const xdi_token *token = &v->tokens[id];
    if (token->kind == XD_TOKEN_KIND_BYTE) return 2;
    if (token->kind != XD_TOKEN_KIND_NORMAL || token->raw_bytes == 0) return 3;
    return v->strays && xdi_vocabulary_piece(v, v->blob + token->text, token->text_bytes) != id ? 1 : 0;
}

/* The table by raw bytes; if the symbols are bytes it would equal the table by text, but for strays. Of two tokens with the
 * same bytes a NORMAL one is stored, one that texts become before a stray. */
static xd_result xdi_vocabulary_fill_raws(xdi_vocabulary *v) {
    if (v->byte_level && !v->strays) return XD_OK;
    v->raws = (xdi_slot *)xd_allocate(v->ctx, v->piece_slots * sizeof *v->raws);
    XD_REQUIRE(v->ctx, v->raws, XD_ERROR_MEMORY, "no room for a table of %u tokens",
               (unsigned)v->piece_slots);
    for (int pass = 0; pass < 3; pass++) {
        for (int32_t id = 0; id < v->size; id++) {
            const xdi_token *token = &v->tokens[id];
            if (xdi_vocabulary_order(v, id) != pass) continue;
            xdi_slot *slot = xdi_vocabulary_slot(v, true, v->blob + token->raw, token->raw_bytes);
            if (slot && slot->id == 0) xdi_vocabulary_fill_slot(v, slot, true, id);
        }
    }
    return XD_OK;
}

/* A hash that is equal for equal tokens, merges and added tokens, in any order in the file. Patterns were
 * hashed when they were added. */
static void xdi_tokenizer_fill_hash(xd_tokenizer *t) {
    uint64_t hash = t->hash, sum = 0;
    for (int32_t id = 0; id < t->vocab.size; id++) {
        const xdi_token *token = &t->vocab.tokens[id];
        xdi_tokenizer_mix(&hash, (uint64_t)token->kind);
        xdi_tokenizer_mix_bytes(&hash, t->vocab.blob + token->text, token->text_bytes);
        xdi_tokenizer_mix_bytes(&hash, t->vocab.blob + token->raw, token->raw_bytes);
    }
    for (uint32_t i = 0; i < t->merges.slots; i++) {
        uint64_t one = 0;
        if (t->merges.items[i].pair == UINT64_MAX) continue;
        xdi_tokenizer_mix(&one, t->merges.items[i].pair);
        xdi_tokenizer_mix(&one, (uint64_t)t->merges.items[i].rank << 32 | (uint32_t)t->merges.items[i].id);
        sum += one;
    }
    xdi_tokenizer_mix(&hash, sum);
    for (int l = 0; l < 2; l++) {
        for (uint32_t i = 0; i < t->added[l].count; i++) {
            const xdi_added *a = &t->added[l].items[i];
            xdi_tokenizer_mix(&hash, (uint64_t)a->id << 8 | (uint64_t)(a->special + 2 * a->strip_left) |
                                         (uint64_t)(4 * a->strip_right + 8 * a->single_word + 16 * l) |
                                         (uint64_t)(64 * a->literal));
        }
    }
    for (int i = 0; i < t->stages.rewrite_count; i++) {
        const xdi_rewrite *r = &t->stages.rewrites[i];
        xdi_tokenizer_mix(&hash, (uint64_t)r->kind + 8 * r->unless_there + 16 * r->only_first);
        xdi_tokenizer_mix_bytes(&hash, t->vocab.blob + r->to, r->to_bytes);
    }
    for (int i = 0; i < t->stages.split_count; i++)
        xdi_tokenizer_mix(&hash, (uint64_t)t->stages.splits[i].behavior + 8 * t->stages.splits[i].invert);
    xdi_tokenizer_mix(&hash, (uint64_t)(t->vocab.byte_level + 2 * t->ignore_merges + 4 * t->byte_fallback) |
                                 (uint64_t)(8 * t->fuse_unknown + 16 * t->adds_prefix));
    t->hash = hash;
}

XD_PRIVATE xd_result xdi_tokenizer_finish(xd_tokenizer *t) {
    if (!t->merges.items)
        XD_TRY(xdi_merges_grow(&t->merges)); /* an empty table, so that a look-up is always legal */
    XD_TRY(xdi_tokenizer_normalize_added(t));
    for (int i = 0; i < 2; i++) XD_TRY(xdi_added_sort(&t->vocab, &t->added[i]));
    xdi_tokenizer_find_cuts(t);
    XD_TRY(xdi_merges_fill_bits(&t->merges, t->vocab.size));
    XD_TRY(xdi_vocabulary_fill_raws(&t->vocab));
    XD_TRY(xdi_vocabulary_fill_characters(&t->vocab));
    xdi_tokenizer_fill_hash(t);
    return XD_OK;
}

/* ---- queries ---- */

/* Whether decoding gives back any bytes that were encoded: all 256 have a token, and nothing changes or drops text. */
static bool xdi_tokenizer_keeps_bytes(const xd_tokenizer *t) {
    if (!t->vocab.byte_level) return false;
    for (int i = 0; i < 256; i++)
        if (t->vocab.byte_id[i] < 0) return false;
    for (int i = 0; i < t->stages.rewrite_count; i++)
        if (t->stages.rewrites[i].kind != XDI_REWRITE_PREPEND || !t->adds_prefix) return false;
    for (int i = 0; i < t->stages.split_count; i++)
        if (t->stages.splits[i].behavior == XDI_SPLIT_REMOVED) return false;
    for (int l = 0; l < 2; l++)
        for (uint32_t i = 0; i < t->added[l].count; i++)
            if (!t->added[l].items[i].special &&
                (t->added[l].items[i].strip_left || t->added[l].items[i].strip_right))
                return false;
    return true;
}

XD_API xd_tokenizer_info xd_tokenizer_describe(const xd_tokenizer *t) {
    XD_ASSERT(t);
    xd_tokenizer_info info;
    info.size = t->vocab.size;
    info.tokens = t->vocab.count;
    info.hash = t->hash;
    info.byte_level = xdi_tokenizer_keeps_bytes(t);
    info.adds_prefix = t->adds_prefix;
    info.unknown = t->vocab.unknown;
    info.bos = t->bos;
    info.eos = t->eos;
    return info;
}

XD_API xd_token xd_tokenizer_token(const xd_tokenizer *t, int32_t id) {
    XD_ASSERT(t);
    xd_token token;
    memset(&token, 0, sizeof token);
    if (id < 0 || id >= t->vocab.size) return token;
    token.kind = t->vocab.tokens[id].kind;
    if (token.kind == XD_TOKEN_KIND_NONE || token.kind == XD_TOKEN_KIND_UNKNOWN) return token;
    token.bytes = t->vocab.blob + t->vocab.tokens[id].raw;
    token.length = t->vocab.tokens[id].raw_bytes;
    return token;
}

XD_API int32_t xd_tokenizer_find(const xd_tokenizer *t, const void *bytes, size_t length) {
    XD_ASSERT(t);
    const xdi_slot *slot =
        xdi_vocabulary_slot(&t->vocab, t->vocab.raws != NULL, (const uint8_t *)bytes, length);
    if (!slot || slot->id == 0) return -1;
    const xd_token_kind kind = t->vocab.tokens[slot->id - 1].kind;
    return kind == XD_TOKEN_KIND_NORMAL || kind == XD_TOKEN_KIND_BYTE ? slot->id - 1 : -1;
}

XD_API int32_t xd_tokenizer_find_special(const xd_tokenizer *t, const char *name) {
    XD_ASSERT(t);
    return xdi_tokenizer_special(t, name, strlen(name));
}

XD_API xd_result xd_tokenizer_decode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const xd_decode_desc *desc,
                                     size_t *length) {
    XDI_LIVE(xd_tokenizer, tokenizer);
    XDI_GIVEN(ctx, ctx, tokenizer, desc, length);
    XDI_GIVEN_LIST(ctx, desc->ids, desc->count);
    const size_t capacity = desc->capacity;
    size_t total = 0;
    bool first = tokenizer->adds_prefix;
    XD_REQUIRE(ctx, desc->count >= 0 && (desc->out || capacity == 0), XD_ERROR_ARGUMENT,
               "%lld ids%s, a capacity of %llu bytes", (long long)desc->count,
               desc->out ? "" : " without out", (unsigned long long)capacity);
    for (int64_t i = 0; i < desc->count; i++) {
        const xd_token token = xd_tokenizer_token(tokenizer, desc->ids[i]);
        XD_REQUIRE(ctx, token.kind != XD_TOKEN_KIND_NONE, XD_ERROR_DATA, "id %d at position %lld is no token",
                   (int)desc->ids[i], (long long)i);
        if (token.length == 0 || (desc->skip_special && token.kind == XD_TOKEN_KIND_SPECIAL)) continue;
        const size_t skip = first && token.kind == XD_TOKEN_KIND_NORMAL && token.bytes[0] == ' ' ? 1 : 0;
        const size_t bytes = token.length - skip, room = capacity > total ? capacity - total : 0;
        if (room > 0) memcpy(desc->out + total, token.bytes + skip, bytes < room ? bytes : room);
        total += bytes;
        if (token.kind != XD_TOKEN_KIND_SPECIAL) first = false;
    }
    *length = total;
    return XD_OK;
}
