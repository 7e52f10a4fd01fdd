/* gguf_pieces.c - the merges that scores of pieces stand for. */
#include "gguf_pieces.h"

#include <stdlib.h>
#include <string.h>

/* The pieces, and a hash table of those that are plain text. */
typedef struct gguf_pieces {
    xd_text *text; /* [count] */
    double *score; /* [count] */
    int64_t *kind; /* [count] */
    int64_t count;
    int32_t *slots; /* [slot_count] ids + 1 */
    size_t slot_count;
} gguf_pieces;

/* ---- the table ---- */

static size_t gguf_pieces_hash(const char *data, size_t bytes) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < bytes; i++) h = (h ^ (unsigned char)data[i]) * 16777619u;
    return h;
}

/* The slot of a piece, which holds 0 when there is none. */
static int32_t *gguf_pieces_slot(const gguf_pieces *p, const char *data, size_t bytes) {
    size_t slot = gguf_pieces_hash(data, bytes) & (p->slot_count - 1);
    for (; p->slots[slot]; slot = (slot + 1) & (p->slot_count - 1)) {
        const xd_text *text = &p->text[p->slots[slot] - 1];
        if ((size_t)text->size == bytes && memcmp(text->data, data, bytes) == 0) break;
    }
    return &p->slots[slot];
}

static xd_result gguf_pieces_read(xd_ctx *ctx, const gguf *file, gguf_pieces *p) {
    gguf_array tokens, scores, kinds;
    const bool whole = gguf_strings(file, "tokenizer.ggml.tokens", &tokens) &&
                       gguf_doubles(file, "tokenizer.ggml.scores", &scores) &&
                       gguf_ints(file, "tokenizer.ggml.token_type", &kinds);
    XD_REQUIRE(ctx, whole, XD_ERROR_FORMAT, "a tokenizer without tokens, their scores or their types");
    XD_REQUIRE(ctx, tokens.left == scores.left && tokens.left == kinds.left && tokens.left < INT32_MAX / 4,
               XD_ERROR_FORMAT, "%lld tokens with %lld scores and %lld types", (long long)tokens.left,
               (long long)scores.left, (long long)kinds.left);
    p->count = tokens.left;
    for (p->slot_count = 64; p->slot_count < 2 * (size_t)p->count;) p->slot_count *= 2;
    p->text = (xd_text *)xd_allocate(ctx, ((size_t)p->count + 1) * sizeof *p->text);
    p->score = (double *)xd_allocate(ctx, ((size_t)p->count + 1) * sizeof *p->score);
    p->kind = (int64_t *)xd_allocate(ctx, ((size_t)p->count + 1) * sizeof *p->kind);
    p->slots = (int32_t *)xd_allocate(ctx, p->slot_count * sizeof *p->slots);
    XD_REQUIRE(ctx, p->text && p->score && p->kind && p->slots, XD_ERROR_MEMORY, "no room for %lld tokens",
               (long long)p->count);
    memset(p->slots, 0, p->slot_count * sizeof *p->slots);
    for (int64_t i = 0; i < p->count; i++) {
        if (!gguf_next_string(&tokens, &p->text[i]) || !gguf_next_double(&scores, &p->score[i]) ||
            !gguf_next_int(&kinds, &p->kind[i]))
            break;
        if (p->kind[i] == GGUF_TOKEN_NORMAL)
            *gguf_pieces_slot(p, p->text[i].data, (size_t)p->text[i].size) = (int32_t)i + 1;
    }
    return XD_OK;
}

static void gguf_pieces_free(xd_ctx *ctx, gguf_pieces *p) {
    xd_release(ctx, p->text);
    xd_release(ctx, p->score);
    xd_release(ctx, p->kind);
    xd_release(ctx, p->slots);
}

/* ---- merges ---- */

static bool gguf_pieces_starts(char byte) {
    return ((unsigned char)byte & 0xc0) != 0x80;
}

/* The ways to cut piece `whole`, into `out` unless that is NULL; returns how many there are. */
static int64_t gguf_pieces_cut(const gguf_pieces *p, int32_t whole, gguf_merge *out) {
    const xd_text text = p->text[whole];
    int64_t found = 0, characters = 0;
    int32_t before = 1;
    for (int64_t i = 0; i < text.size; i++) characters += gguf_pieces_starts(text.data[i]);
    for (int64_t at = 1; at < text.size; at++) {
        if (!gguf_pieces_starts(text.data[at])) continue;
        const int32_t left = *gguf_pieces_slot(p, text.data, (size_t)at);
        const int32_t right = left ? *gguf_pieces_slot(p, text.data + at, (size_t)(text.size - at)) : 0;
        const gguf_merge merge = { p->score[whole], whole,  left - 1,
                                   right - 1,       before, (int32_t)characters - before };
        before++;
        if (!left || !right) continue;
        if (out) out[found] = merge;
        found++;
    }
    return found;
}

/* The order in which the converter of transformers lists them. */
static int gguf_pieces_compare(const void *a, const void *b) {
    const gguf_merge *x = (const gguf_merge *)a, *y = (const gguf_merge *)b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    if (x->left_length != y->left_length) return x->left_length > y->left_length ? -1 : 1;
    if (x->right_length != y->right_length) return x->right_length > y->right_length ? -1 : 1;
    if (x->whole != y->whole) return x->whole < y->whole ? -1 : 1;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return (x->right > y->right) - (x->right < y->right);
}

static xd_result gguf_pieces_list(xd_ctx *ctx, const gguf_pieces *p, gguf_merge **out, int64_t *count) {
    int64_t filled = 0;
    *count = 0;
    for (int64_t i = 0; i < p->count; i++)
        if (p->kind[i] == GGUF_TOKEN_NORMAL) *count += gguf_pieces_cut(p, (int32_t)i, NULL);
    *out = (gguf_merge *)xd_allocate(ctx, ((size_t)*count + 1) * sizeof **out);
    XD_REQUIRE(ctx, *out, XD_ERROR_MEMORY, "no room for %lld merges", (long long)*count);
    for (int64_t i = 0; i < p->count; i++)
        if (p->kind[i] == GGUF_TOKEN_NORMAL) filled += gguf_pieces_cut(p, (int32_t)i, *out + filled);
    qsort(*out, (size_t)*count, sizeof **out, gguf_pieces_compare);
    return XD_OK;
}

xd_result gguf_pieces_merges(xd_ctx *ctx, const gguf *file, gguf_merge **out, int64_t *count) {
    gguf_pieces p;
    memset(&p, 0, sizeof p);
    xd_result result = gguf_pieces_read(ctx, file, &p);
    if (result == XD_OK) result = gguf_pieces_list(ctx, &p, out, count);
    gguf_pieces_free(ctx, &p);
    return result;
}
