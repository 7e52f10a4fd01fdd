/* bpe.c - counts the pieces of a text, and joins the pair that occurs most often until the vocabulary is full. */
#include "bpe_inside.h"

#include <stdlib.h>
#include <string.h>

/* One distinct piece of the text, as the entries it is cut into so far. */
typedef struct bpe_word {
    const uint8_t *text;
    uint32_t length; /* bytes; `ids` has room for as many */
    uint32_t count;  /* occurrences */
    uint32_t size;   /* entries */
    int32_t *ids;
} bpe_word;

/* Two neighbours, how often they occur, and a list of words that hold them, or did. */
typedef struct bpe_pair {
    int32_t left, right;
    uint32_t count;
    uint32_t first; /* place, BPE_NONE = end of the list */
} bpe_pair;

typedef struct bpe_place {
    uint32_t word, next;
} bpe_place;

/* A pair that occurred so often when it was pushed. */
typedef struct bpe_candidate {
    uint32_t count, pair;
} bpe_candidate;

/* An array that grows, and a hash table of its indexes + 1 where it has one. */
typedef struct bpe_list {
    void *items;
    uint32_t count, capacity;
    uint32_t *slots;
    uint32_t slot_count;
} bpe_list;

enum { BPE_NONE = UINT32_MAX >> 1 };

typedef struct bpe_trainer {
    bpe_list words, pairs, places, heap;
    int32_t *ids; /* of all words */
    bpe_vocabulary vocabulary;
} bpe_trainer;

/* ---- lists ---- */

/* Room for `more` items of `size` bytes; false -> there is none. */
static bool bpe_reserve(bpe_list *l, uint64_t more, size_t size) {
    uint64_t capacity = l->capacity ? l->capacity : 1024;
    while (capacity < l->count + more) capacity *= 2;
    if (capacity >= BPE_NONE) return false;
    if (capacity == l->capacity) return true;
    void *items = realloc(l->items, capacity * size);
    if (!items) return false;
    l->items = items;
    l->capacity = (uint32_t)capacity;
    return true;
}

/* Room for `more` indexes in the table, half of which stays empty. *renewed: it is empty now. */
static bool bpe_reserve_slots(bpe_list *l, uint64_t more, bool *renewed) {
    uint64_t count = l->slot_count ? l->slot_count : 4096;
    while (count < 2 * (l->count + more)) count *= 2;
    *renewed = count != l->slot_count;
    if (!*renewed) return true;
    uint32_t *slots = (uint32_t *)calloc(count, sizeof *slots);
    if (!slots) return false;
    free(l->slots);
    l->slots = slots;
    l->slot_count = (uint32_t)count;
    return true;
}

/* The index of one more item, for which there is room. */
static uint32_t bpe_append(bpe_list *l, size_t size) {
    memset((char *)l->items + l->count * size, 0, size);
    return l->count++;
}

static void bpe_list_free(bpe_list *l) {
    free(l->items);
    free(l->slots);
}

static bpe_word *bpe_word_at(const bpe_trainer *t, uint32_t i) {
    return (bpe_word *)t->words.items + i;
}

static bpe_pair *bpe_pair_at(const bpe_trainer *t, uint32_t i) {
    return (bpe_pair *)t->pairs.items + i;
}

static uint32_t bpe_hash_bytes(const uint8_t *text, size_t length) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < length; i++) h = (h ^ text[i]) * 16777619u;
    return h;
}

static uint32_t bpe_hash_pair(int32_t left, int32_t right) {
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32);
}

/* The slot of a piece of text, which holds 0 when it is new. */
static uint32_t *bpe_word_slot(const bpe_trainer *t, const uint8_t *text, size_t length) {
    const bpe_list *l = &t->words;
    uint32_t slot = bpe_hash_bytes(text, length) & (l->slot_count - 1);
    for (; l->slots[slot]; slot = (slot + 1) & (l->slot_count - 1)) {
        const bpe_word *w = bpe_word_at(t, l->slots[slot] - 1);
        if (w->length == length && memcmp(w->text, text, length) == 0) break;
    }
    return &l->slots[slot];
}

static uint32_t *bpe_pair_slot(const bpe_trainer *t, int32_t left, int32_t right) {
    const bpe_list *l = &t->pairs;
    uint32_t slot = bpe_hash_pair(left, right) & (l->slot_count - 1);
    for (; l->slots[slot]; slot = (slot + 1) & (l->slot_count - 1)) {
        const bpe_pair *p = bpe_pair_at(t, l->slots[slot] - 1);
        if (p->left == left && p->right == right) break;
    }
    return &l->slots[slot];
}

/* ---- words ---- */

static bool bpe_reserve_words(bpe_trainer *t, uint64_t more) {
    bool renewed = false;
    if (!bpe_reserve(&t->words, more, sizeof(bpe_word)) || !bpe_reserve_slots(&t->words, more, &renewed))
        return false;
    for (uint32_t i = 0; renewed && i < t->words.count; i++)
        *bpe_word_slot(t, bpe_word_at(t, i)->text, bpe_word_at(t, i)->length) = i + 1;
    return true;
}

static bool bpe_count_piece(bpe_trainer *t, const uint8_t *text, size_t length) {
    if (!bpe_reserve_words(t, 1)) return false;
    uint32_t *slot = bpe_word_slot(t, text, length);
    if (!*slot) {
        *slot = bpe_append(&t->words, sizeof(bpe_word)) + 1;
        bpe_word_at(t, *slot - 1)->text = text;
        bpe_word_at(t, *slot - 1)->length = (uint32_t)length;
    }
    bpe_word_at(t, *slot - 1)->count++;
    return true;
}

/* Cuts every word into its bytes. */
static bool bpe_spread_words(bpe_trainer *t) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < t->words.count; i++) bytes += bpe_word_at(t, i)->length;
    int32_t *ids = t->ids = (int32_t *)malloc((bytes + 1) * sizeof *ids);
    for (uint32_t i = 0; ids && i < t->words.count; i++) {
        bpe_word *w = bpe_word_at(t, i);
        w->ids = ids;
        w->size = w->length;
        for (uint32_t b = 0; b < w->length; b++) *ids++ = BPE_SPECIAL + w->text[b];
    }
    return t->ids != NULL;
}

/* A tokenizer without merges cuts the text. */
static xd_result bpe_read_words(xd_ctx *ctx, bpe_trainer *t, const bpe_desc *d) {
    char *json = NULL;
    size_t bytes = 0;
    xd_tokenizer *tokenizer = NULL;
    xd_encoder *encoder = NULL;
    const xd_encode_desc how = { .pieces = true };
    xd_encoding e = { 0, NULL, NULL, NULL };
    bool fits = true;
    XD_TRY(bpe_write(ctx, &t->vocabulary, &json, &bytes));
    xd_result result =
        xd_tokenizer_load(ctx, &(xd_tokenizer_desc){ .data = json, .data_bytes = bytes }, &tokenizer);
    if (result == XD_OK)
        result = xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder);
    if (result == XD_OK) result = xd_encode(encoder, d->text, d->bytes, &how, &e);
    for (int64_t i = 0; result == XD_OK && fits && i < e.count; i++)
        fits = bpe_count_piece(t, (const uint8_t *)d->text + e.spans[i].begin,
                               (size_t)(e.spans[i].end - e.spans[i].begin));
    xd_encoder_destroy(encoder);
    xd_tokenizer_destroy(tokenizer);
    free(json);
    if (result == XD_OK && !(fits && bpe_spread_words(t)))
        result = XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for the pieces of a text of %zu bytes", d->bytes);
    return result;
}

/* ---- pairs ---- */

/* Room for the pairs of a word, and for its places in their lists. */
static bool bpe_reserve_pairs(bpe_trainer *t, uint64_t more) {
    bool renewed = false;
    if (!bpe_reserve(&t->pairs, more, sizeof(bpe_pair)) ||
        !bpe_reserve(&t->places, more, sizeof(bpe_place)) || !bpe_reserve_slots(&t->pairs, more, &renewed))
        return false;
    for (uint32_t i = 0; renewed && i < t->pairs.count; i++)
        *bpe_pair_slot(t, bpe_pair_at(t, i)->left, bpe_pair_at(t, i)->right) = i + 1;
    return true;
}

/* A pair, which is made when it is new. */
static bpe_pair *bpe_find_pair(bpe_trainer *t, int32_t left, int32_t right) {
    uint32_t *slot = bpe_pair_slot(t, left, right);
    if (!*slot) {
        *slot = bpe_append(&t->pairs, sizeof(bpe_pair)) + 1;
        bpe_pair *made = bpe_pair_at(t, *slot - 1);
        made->left = left;
        made->right = right;
        made->first = BPE_NONE;
    }
    return bpe_pair_at(t, *slot - 1);
}

/* Counts the pairs of one word. Those of entries from `first_new` on list the word, the others do already. */
static bool bpe_add_pairs(bpe_trainer *t, uint32_t word_index, int32_t first_new) {
    const bpe_word *w = bpe_word_at(t, word_index);
    if (!bpe_reserve_pairs(t, w->size)) return false;
    for (uint32_t i = 0; i + 1 < w->size; i++) {
        bpe_pair *p = bpe_find_pair(t, w->ids[i], w->ids[i + 1]);
        p->count += w->count;
        if (w->ids[i] < first_new && w->ids[i + 1] < first_new) continue;
        const uint32_t listed = bpe_append(&t->places, sizeof(bpe_place));
        bpe_place *here = (bpe_place *)t->places.items + listed;
        here->word = word_index;
        here->next = p->first;
        p->first = listed;
    }
    return true;
}

static void bpe_take_pairs(bpe_trainer *t, const bpe_word *w) {
    for (uint32_t i = 0; i + 1 < w->size; i++) bpe_find_pair(t, w->ids[i], w->ids[i + 1])->count -= w->count;
}

/* ---- the heap ---- */

/* The pair that occurs more often goes first, the one of lower ids among equals. */
static bool bpe_goes_before(const bpe_trainer *t, bpe_candidate a, bpe_candidate b) {
    const bpe_pair *p = bpe_pair_at(t, a.pair), *q = bpe_pair_at(t, b.pair);
    if (a.count != b.count) return a.count > b.count;
    return p->left != q->left ? p->left < q->left : p->right < q->right;
}

static bool bpe_push(bpe_trainer *t, uint32_t pair) {
    const bpe_candidate c = { bpe_pair_at(t, pair)->count, pair };
    if (!bpe_reserve(&t->heap, 1, sizeof c)) return false;
    uint32_t at = bpe_append(&t->heap, sizeof c);
    bpe_candidate *heap = (bpe_candidate *)t->heap.items;
    for (; at > 0 && bpe_goes_before(t, c, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = c;
    return true;
}

static bool bpe_push_pairs(bpe_trainer *t, uint32_t first) {
    for (uint32_t i = first; i < t->pairs.count; i++)
        if (bpe_pair_at(t, i)->count > 1 && !bpe_push(t, i)) return false;
    return true;
}

static bpe_candidate bpe_pop(bpe_trainer *t) {
    bpe_candidate *heap = (bpe_candidate *)t->heap.items;
    const bpe_candidate top = heap[0], moving = heap[--t->heap.count];
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < t->heap.count; at = child) {
        if (child + 1 < t->heap.count && bpe_goes_before(t, heap[child + 1], heap[child])) child++;
        if (!bpe_goes_before(t, heap[child], moving)) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
    return top;
}

/* The pair that occurs most often, BPE_NONE when none occurs twice. A pair's count never grows after the step that
 * made it, so what was pushed is at least what it is now; and what was popped fits in again. */
static uint32_t bpe_best_pair(bpe_trainer *t) {
    while (t->heap.count) {
        const bpe_candidate c = bpe_pop(t);
        const uint32_t count = bpe_pair_at(t, c.pair)->count;
        if (count == c.count) return c.pair;
        if (count > 1) (void)bpe_push(t, c.pair);
    }
    return BPE_NONE;
}

/* ---- merges ---- */

static bool bpe_word_has(const bpe_word *w, int32_t left, int32_t right) {
    for (uint32_t i = 0; i + 1 < w->size; i++)
        if (w->ids[i] == left && w->ids[i + 1] == right) return true;
    return false;
}

/* Replaces the pair by `entry` in one word, from left to right. */
static void bpe_merge_word(bpe_word *w, int32_t left, int32_t right, int32_t entry) {
    uint32_t size = 0;
    for (uint32_t i = 0; i < w->size; i++) {
        const bool joins = i + 1 < w->size && w->ids[i] == left && w->ids[i + 1] == right;
        w->ids[size++] = joins ? entry : w->ids[i];
        if (joins) i++;
    }
    w->size = size;
}

static bool bpe_spell(bpe_vocabulary *v, int32_t entry, int32_t left, int32_t right) {
    const uint32_t length = v->length[left] + v->length[right];
    uint8_t *spelling = v->spelling[entry] = (uint8_t *)malloc(length);
    if (!spelling) return false;
    memcpy(spelling, v->spelling[left], v->length[left]);
    memcpy(spelling + v->length[left], v->spelling[right], v->length[right]);
    v->length[entry] = length;
    return true;
}

static bool bpe_spell_bytes(bpe_vocabulary *v) {
    for (int32_t b = 0; b < BPE_BYTES; b++) {
        uint8_t *spelling = v->spelling[BPE_SPECIAL + b] = (uint8_t *)malloc(1);
        if (!spelling) return false;
        *spelling = (uint8_t)b;
        v->length[BPE_SPECIAL + b] = 1;
    }
    v->entries = BPE_FIRST_MERGE;
    return true;
}

static bool bpe_add_merge(bpe_trainer *t, uint32_t pair_index) {
    const bpe_pair p = *bpe_pair_at(t, pair_index);
    bpe_vocabulary *v = &t->vocabulary;
    const int32_t entry = v->entries;
    const uint32_t known = t->pairs.count;
    if (!bpe_spell(v, entry, p.left, p.right)) return false;
    v->merges[entry][0] = p.left;
    v->merges[entry][1] = p.right;
    v->entries++;
    for (uint32_t i = p.first; i != BPE_NONE; i = ((bpe_place *)t->places.items + i)->next) {
        const uint32_t index = ((bpe_place *)t->places.items + i)->word;
        bpe_word *w = bpe_word_at(t, index);
        if (!bpe_word_has(w, p.left, p.right)) continue; /* listed twice, or no longer */
        bpe_take_pairs(t, w);
        bpe_merge_word(w, p.left, p.right, entry);
        if (!bpe_add_pairs(t, index, entry)) return false;
    }
    return bpe_push_pairs(t, known);
}

static bool bpe_join(bpe_trainer *t, int entries) {
    uint32_t best = BPE_NONE;
    for (uint32_t i = 0; i < t->words.count; i++)
        if (!bpe_add_pairs(t, i, 0)) return false;
    if (!bpe_push_pairs(t, 0)) return false;
    while (t->vocabulary.entries < entries && (best = bpe_best_pair(t)) != BPE_NONE)
        if (!bpe_add_merge(t, best)) return false;
    return true;
}

/* ---- a training ---- */

static void bpe_trainer_free(bpe_trainer *t) {
    for (int i = 0; i < BPE_MOST_ENTRIES; i++) free(t->vocabulary.spelling[i]);
    bpe_list_free(&t->words);
    bpe_list_free(&t->pairs);
    bpe_list_free(&t->places);
    bpe_list_free(&t->heap);
    free(t->ids);
    free(t);
}

static xd_result bpe_run(xd_ctx *ctx, bpe_trainer *t, const bpe_desc *d) {
    XD_REQUIRE(ctx, bpe_spell_bytes(&t->vocabulary), XD_ERROR_MEMORY, "no room for %d entries", d->entries);
    XD_TRY(bpe_read_words(ctx, t, d));
    XD_REQUIRE(ctx, bpe_join(t, d->entries), XD_ERROR_MEMORY, "no room for %d entries of a text of %zu bytes",
               d->entries, d->bytes);
    return XD_OK;
}

xd_result bpe_train(xd_ctx *ctx, const bpe_desc *d, char **json, size_t *bytes, bpe_report *report) {
    const bpe_preset *how = bpe_find_preset(d->pieces);
    XD_REQUIRE(ctx, d->entries >= BPE_LEAST_ENTRIES && d->entries <= BPE_MOST_ENTRIES, XD_ERROR_ARGUMENT,
               "a vocabulary of %d entries; %d to %d are possible", d->entries, (int)BPE_LEAST_ENTRIES,
               (int)BPE_MOST_ENTRIES);
    XD_REQUIRE(ctx, how, XD_ERROR_ARGUMENT, "pieces %.40s; ascii, gpt2, smollm and llama3 are known",
               d->pieces);
    bpe_trainer *t = (bpe_trainer *)calloc(1, sizeof *t);
    XD_REQUIRE(ctx, t, XD_ERROR_MEMORY, "no room for a vocabulary");
    t->vocabulary.how = how;
    xd_result result = bpe_run(ctx, t, d);
    if (result == XD_OK) result = bpe_write(ctx, &t->vocabulary, json, bytes);
    if (report) {
        report->entries = t->vocabulary.entries;
        report->pieces = t->words.count;
    }
    bpe_trainer_free(t);
    return result;
}
