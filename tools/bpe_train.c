/* bpe_train.c - trains a byte-level BPE vocabulary on a text and writes it as a tokenizer.json.
 *
 *   cc -std=c99 -O2 tools/bpe_train.c -o build/bpe_train -lm -lpthread
 *   build/bpe_train TEXT ENTRIES PIECES tokenizer.json
 *
 *   ENTRIES  257 to 65536
 *   PIECES   how text falls into pieces, which no entry crosses:
 *            ascii   words, numbers, other signs, each with a blank before it; classes of ASCII only
 *            gpt2    the same with the classes of Unicode
 *            smollm  gpt2, and every digit is a piece of its own
 *            llama3  the pattern of Llama 3: digits by threes, any sign may lead a word
 *
 * Entry 0 is <|endoftext|>, entries 1..256 are the bytes, every later entry joins two earlier ones: the pair
 * that occurs most often inside pieces of the text, the pair of lowest ids among equals. Same text, same
 * file. The pieces are cut by the library's own pattern matcher. */
#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPECIAL = 1, BYTES = 256, FIRST_MERGE = SPECIAL + BYTES, MOST_ENTRIES = 65536, MOST_STAGES = 2 };

static const char end_of_text[] = "<|endoftext|>";

/* What the stage ByteLevel splits by when it is told to. */
static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* A way to cut text: by a pattern or into digits, then perhaps by ByteLevel's own pattern. */
typedef struct preset {
    const char *name;
    const char *split; /* NULL -> no stage Split */
    bool digits;       /* a stage Digits */
    bool gpt2;         /* ByteLevel splits, too */
} preset;

static const preset presets[] = {
    { "ascii",
      "'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^ \\t\\n\\r\\fA-Za-z0-9]+|"
      "[ \\t\\n\\r\\f]+(?![^ \\t\\n\\r\\f])|[ \\t\\n\\r\\f]+",
      false, false },
    { "gpt2", NULL, false, true },
    { "smollm", NULL, true, true },
    { "llama3",
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
      "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
      false, false },
};

/* One distinct piece of the text, as the entries it is cut into so far. */
typedef struct word {
    const uint8_t *text;
    uint32_t length; /* bytes; `ids` has room for as many */
    uint32_t count;  /* occurrences */
    uint32_t size;   /* entries */
    int32_t *ids;
} word;

/* Two neighbours, how often they occur, and a list of words that hold them, or did. */
typedef struct pair {
    int32_t left, right;
    uint32_t count;
    uint32_t first; /* place, NONE = end of the list */
} pair;

typedef struct place {
    uint32_t word, next;
} place;

/* A pair that occurred so often when it was pushed. */
typedef struct candidate {
    uint32_t count, pair;
} candidate;

/* An array that grows, and a hash table of its indexes + 1 where it has one. */
typedef struct list {
    void *items;
    uint32_t count, capacity;
    uint32_t *slots;
    uint32_t slot_count;
} list;

enum { NONE = UINT32_MAX >> 1 };

typedef struct trainer {
    xd_ctx *ctx;
    const preset *how;
    xdi_pattern *patterns[MOST_STAGES];
    xdi_matcher matchers[MOST_STAGES];
    int stages;
    list words, pairs, places, heap;
    int32_t merges[MOST_ENTRIES][2];
    uint8_t *spelling[MOST_ENTRIES]; /* the bytes of each entry */
    uint32_t spelling_length[MOST_ENTRIES];
    int32_t entries;
} trainer;

static void stop(const char *what, const char *detail) {
    fprintf(stderr, "bpe_train: %s %s\n", what, detail);
    exit(1);
}

static void check(const trainer *t, xd_result result) {
    if (result != XD_OK) stop(xd_result_name(result), xd_last_error(t->ctx)->message);
}

static void *room(size_t count, size_t size) {
    void *p = calloc(count, size);
    if (!p) stop("out of memory", "");
    return p;
}

/* ---- lists ---- */

/* The index of one more item of `size` bytes. */
static uint32_t append(list *l, size_t size) {
    if (l->count == l->capacity) {
        l->capacity = l->capacity ? 2 * l->capacity : 1024;
        l->items = realloc(l->items, l->capacity * size);
        if (!l->items || l->capacity >= NONE) stop("out of memory", "");
    }
    memset((char *)l->items + l->count * size, 0, size);
    return l->count++;
}

/* True when the table of indexes must be made anew, for twice as many; it is empty then. */
static bool outgrown(list *l) {
    if (2 * l->count < l->slot_count) return false;
    free(l->slots);
    l->slot_count = l->slot_count ? 2 * l->slot_count : 4096;
    l->slots = (uint32_t *)room(l->slot_count, sizeof *l->slots);
    return true;
}

static word *word_at(const trainer *t, uint32_t i) {
    return (word *)t->words.items + i;
}

static pair *pair_at(const trainer *t, uint32_t i) {
    return (pair *)t->pairs.items + i;
}

static uint32_t hash_bytes(const uint8_t *text, size_t length) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < length; i++) h = (h ^ text[i]) * 16777619u;
    return h;
}

static uint32_t hash_pair(int32_t left, int32_t right) {
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32);
}

/* The slot of a piece of text, which holds 0 when it is new. */
static uint32_t *word_slot(const trainer *t, const uint8_t *text, size_t length) {
    const list *l = &t->words;
    uint32_t slot = hash_bytes(text, length) & (l->slot_count - 1);
    for (; l->slots[slot]; slot = (slot + 1) & (l->slot_count - 1)) {
        const word *w = word_at(t, l->slots[slot] - 1);
        if (w->length == length && memcmp(w->text, text, length) == 0) break;
    }
    return &l->slots[slot];
}

static uint32_t *pair_slot(const trainer *t, int32_t left, int32_t right) {
    const list *l = &t->pairs;
    uint32_t slot = hash_pair(left, right) & (l->slot_count - 1);
    for (; l->slots[slot]; slot = (slot + 1) & (l->slot_count - 1)) {
        const pair *p = pair_at(t, l->slots[slot] - 1);
        if (p->left == left && p->right == right) break;
    }
    return &l->slots[slot];
}

/* The index of a pair, which is made when it is new. */
static uint32_t find_pair(trainer *t, int32_t left, int32_t right) {
    if (outgrown(&t->pairs))
        for (uint32_t i = 0; i < t->pairs.count; i++)
            *pair_slot(t, pair_at(t, i)->left, pair_at(t, i)->right) = i + 1;
    uint32_t *slot = pair_slot(t, left, right);
    if (*slot) return *slot - 1;
    *slot = append(&t->pairs, sizeof(pair)) + 1;
    pair *p = pair_at(t, *slot - 1);
    p->left = left;
    p->right = right;
    p->first = NONE;
    return *slot - 1;
}

/* ---- words ---- */

static void count_piece(trainer *t, const uint8_t *text, size_t length) {
    if (outgrown(&t->words))
        for (uint32_t i = 0; i < t->words.count; i++)
            *word_slot(t, word_at(t, i)->text, word_at(t, i)->length) = i + 1;
    uint32_t *slot = word_slot(t, text, length);
    if (*slot) {
        word_at(t, *slot - 1)->count++;
        return;
    }
    *slot = append(&t->words, sizeof(word)) + 1;
    word *w = word_at(t, *slot - 1);
    w->text = text;
    w->count = 1;
    w->length = w->size = (uint32_t)length;
    w->ids = (int32_t *)room(length, sizeof *w->ids);
    for (size_t i = 0; i < length; i++) w->ids[i] = SPECIAL + text[i];
}

/* Cuts a part of the text by the patterns from `stage` on. */
static void count_words(trainer *t, int stage, const uint8_t *text, size_t from, size_t to) {
    if (from >= to) return;
    if (stage == t->stages) {
        count_piece(t, text + from, to - from);
        return;
    }
    while (from < to) {
        size_t begin = 0, end = 0;
        check(t, xdi_pattern_find(&t->matchers[stage], t->patterns[stage], from, to, &begin, &end));
        count_words(t, stage + 1, text, from, begin);
        count_words(t, stage + 1, text, begin, end);
        from = end;
    }
}

static void add_stage(trainer *t, const xdi_unicode *unicode, const char *pattern, const uint8_t *text,
                      size_t length) {
    xdi_matcher *m = &t->matchers[t->stages];
    check(t, xdi_pattern_create(t->ctx, pattern, strlen(pattern), unicode, &t->patterns[t->stages++]));
    m->ctx = t->ctx;
    xdi_matcher_start(m, text, length);
}

static void read_words(trainer *t, const uint8_t *text, size_t length) {
    const xdi_unicode *unicode = xdi_unicode_create(t->ctx);
    if (!unicode) stop("out of memory", "");
    if (t->how->split) add_stage(t, unicode, t->how->split, text, length);
    if (t->how->digits) add_stage(t, unicode, "\\p{N}", text, length);
    if (t->how->gpt2) add_stage(t, unicode, gpt2_pattern, text, length);
    count_words(t, 0, text, 0, length);
}

/* ---- merges ---- */

/* The pair that occurs more often goes first, the one of lower ids among equals. */
static bool goes_before(const trainer *t, candidate a, candidate b) {
    const pair *p = pair_at(t, a.pair), *q = pair_at(t, b.pair);
    if (a.count != b.count) return a.count > b.count;
    return p->left != q->left ? p->left < q->left : p->right < q->right;
}

static void push(trainer *t, uint32_t pair_index) {
    const candidate c = { pair_at(t, pair_index)->count, pair_index };
    uint32_t at = append(&t->heap, sizeof c);
    candidate *heap = (candidate *)t->heap.items;
    for (; at > 0 && goes_before(t, c, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = c;
}

static candidate pop(trainer *t) {
    candidate *heap = (candidate *)t->heap.items;
    const candidate top = heap[0], moving = heap[--t->heap.count];
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < t->heap.count; at = child) {
        if (child + 1 < t->heap.count && goes_before(t, heap[child + 1], heap[child])) child++;
        if (!goes_before(t, heap[child], moving)) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
    return top;
}

/* The pair that occurs most often, NONE when none occurs twice. A pair's count never grows after the step that
 * made it, so what was pushed is at least what it is now. */
static uint32_t best_pair(trainer *t) {
    while (t->heap.count) {
        const candidate c = pop(t);
        const uint32_t count = pair_at(t, c.pair)->count;
        if (count == c.count) return c.pair;
        if (count > 1) push(t, c.pair);
    }
    return NONE;
}

/* Counts the pairs of one word. Those of entries from `first_new` on list the word, the others do already. */
static void add_pairs(trainer *t, uint32_t word_index, int32_t first_new) {
    const word *w = word_at(t, word_index);
    for (uint32_t i = 0; i + 1 < w->size; i++) {
        pair *p = pair_at(t, find_pair(t, w->ids[i], w->ids[i + 1]));
        p->count += w->count;
        if (w->ids[i] < first_new && w->ids[i + 1] < first_new) continue;
        const uint32_t listed = append(&t->places, sizeof(place));
        place *here = (place *)t->places.items + listed;
        here->word = word_index;
        here->next = p->first;
        p->first = listed;
    }
}

static void take_pairs(trainer *t, const word *w) {
    for (uint32_t i = 0; i + 1 < w->size; i++)
        pair_at(t, find_pair(t, w->ids[i], w->ids[i + 1]))->count -= w->count;
}

static bool word_has(const word *w, int32_t left, int32_t right) {
    for (uint32_t i = 0; i + 1 < w->size; i++)
        if (w->ids[i] == left && w->ids[i + 1] == right) return true;
    return false;
}

/* Replaces the pair by `entry` in one word, from left to right. */
static void merge_word(word *w, int32_t left, int32_t right, int32_t entry) {
    uint32_t size = 0;
    for (uint32_t i = 0; i < w->size; i++) {
        const bool joins = i + 1 < w->size && w->ids[i] == left && w->ids[i + 1] == right;
        w->ids[size++] = joins ? entry : w->ids[i];
        if (joins) i++;
    }
    w->size = size;
}

static void spell(trainer *t, int32_t entry, const uint8_t *a, uint32_t a_length, const uint8_t *b,
                  uint32_t b_length) {
    t->spelling_length[entry] = a_length + b_length;
    t->spelling[entry] = (uint8_t *)room(a_length + b_length, 1);
    memcpy(t->spelling[entry], a, a_length);
    if (b_length) memcpy(t->spelling[entry] + a_length, b, b_length);
}

static void push_pairs(trainer *t, uint32_t first) {
    for (uint32_t i = first; i < t->pairs.count; i++)
        if (pair_at(t, i)->count > 1) push(t, i);
}

static void add_merge(trainer *t, uint32_t pair_index) {
    const pair p = *pair_at(t, pair_index);
    const int32_t entry = t->entries++;
    const uint32_t known = t->pairs.count;
    t->merges[entry][0] = p.left;
    t->merges[entry][1] = p.right;
    spell(t, entry, t->spelling[p.left], t->spelling_length[p.left], t->spelling[p.right],
          t->spelling_length[p.right]);
    for (uint32_t i = p.first; i != NONE; i = ((place *)t->places.items + i)->next) {
        const uint32_t index = ((place *)t->places.items + i)->word;
        if (!word_has(word_at(t, index), p.left, p.right)) continue; /* listed twice, or no longer */
        take_pairs(t, word_at(t, index));
        merge_word(word_at(t, index), p.left, p.right, entry);
        add_pairs(t, index, entry);
    }
    push_pairs(t, known);
}

static void train(trainer *t, int32_t size) {
    uint32_t best = NONE;
    for (int b = 0; b < BYTES; b++) {
        const uint8_t byte = (uint8_t)b;
        spell(t, SPECIAL + b, &byte, 1, NULL, 0);
    }
    t->entries = FIRST_MERGE;
    for (uint32_t i = 0; i < t->words.count; i++) add_pairs(t, i, 0);
    push_pairs(t, 0);
    while (t->entries < size && (best = best_pair(t)) != NONE) add_merge(t, best);
}

/* ---- the file ---- */

/* A tokenizer.json spells each byte as one character: a printable one of Latin-1 by itself, the others, in
 * order, by U+0100 and what follows. */
static uint32_t character_of(int byte) {
    uint32_t next = 256;
    for (int b = 0; b <= byte; b++) {
        const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte) return printable ? (uint32_t)byte : next;
        next += !printable;
    }
    return next;
}

/* An entry's bytes as the characters of a JSON string. All of them are below U+0800. */
static void write_spelling(FILE *out, const trainer *t, int32_t entry) {
    for (uint32_t i = 0; i < t->spelling_length[entry]; i++) {
        const uint32_t c = character_of(t->spelling[entry][i]);
        if (c == '"' || c == '\\') fputc('\\', out);
        if (c < 0x80) {
            fputc((int)c, out);
        } else {
            fputc((int)(0xc0 | c >> 6), out);
            fputc((int)(0x80 | (c & 0x3f)), out);
        }
    }
}

/* A C string as the contents of a JSON string. */
static void write_escaped(FILE *out, const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', out);
        fputc(*text, out);
    }
}

static void write_model(FILE *out, const trainer *t) {
    fprintf(out, "    \"vocab\": {\n      \"%s\": 0", end_of_text);
    for (int32_t i = SPECIAL; i < t->entries; i++) {
        fprintf(out, ",\n      \"");
        write_spelling(out, t, i);
        fprintf(out, "\": %d", (int)i);
    }
    fprintf(out, "\n    },\n    \"merges\": [");
    for (int32_t i = FIRST_MERGE; i < t->entries; i++) {
        fprintf(out, "%s\n      \"", i > FIRST_MERGE ? "," : "");
        write_spelling(out, t, t->merges[i][0]);
        fputc(' ', out);
        write_spelling(out, t, t->merges[i][1]);
        fputc('"', out);
    }
    fprintf(out, "\n    ]\n");
}

static void write_pieces(FILE *out, const preset *how) {
    fprintf(out, "  \"pre_tokenizer\": {\n    \"type\": \"Sequence\",\n    \"pretokenizers\": [\n");
    if (how->split) {
        fprintf(out, "      { \"type\": \"Split\", \"pattern\": { \"Regex\": \"");
        write_escaped(out, how->split);
        fprintf(out, "\" }, \"behavior\": \"Isolated\", \"invert\": false },\n");
    }
    if (how->digits) fprintf(out, "      { \"type\": \"Digits\", \"individual_digits\": true },\n");
    fprintf(out,
            "      { \"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
            "\"use_regex\": %s }\n    ]\n  },\n",
            how->gpt2 ? "true" : "false");
}

static bool write_tokenizer(const trainer *t, const char *path) {
    FILE *out = fopen(path, "wb");
    if (!out) return false;
    fprintf(out,
            "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n"
            "  \"added_tokens\": [\n    { \"id\": 0, \"content\": \"%s\", \"single_word\": false, "
            "\"lstrip\": false, "
            "\"rstrip\": false, \"normalized\": false, \"special\": true }\n  ],\n  \"normalizer\": null,\n",
            end_of_text);
    write_pieces(out, t->how);
    fprintf(out,
            "  \"post_processor\": null,\n"
            "  \"decoder\": { \"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
            "\"use_regex\": false },\n"
            "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
            "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n"
            "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n");
    write_model(out, t);
    fprintf(out, "  }\n}\n");
    const bool written = !ferror(out);
    return fclose(out) == 0 && written;
}

static const preset *find_preset(const char *name) {
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (strcmp(name, presets[i].name) == 0) return &presets[i];
    stop("there are no such pieces:", name);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) stop("usage: bpe_train TEXT ENTRIES ascii|gpt2|smollm|llama3", "tokenizer.json");
    const int size = atoi(argv[2]);
    if (size < FIRST_MERGE || size > MOST_ENTRIES)
        stop("the vocabulary must have 257 to 65536 entries, not", argv[2]);

    trainer *t = (trainer *)room(1, sizeof *t);
    char *text = NULL;
    size_t length = 0;
    if (xd_ctx_create(NULL, &t->ctx) != XD_OK) stop("out of memory", "");
    t->how = find_preset(argv[3]);
    check(t, xd_file_load(t->ctx, argv[1], 0, &text, &length));
    read_words(t, (const uint8_t *)text, length);
    train(t, size);
    if (!write_tokenizer(t, argv[4])) stop("cannot write", argv[4]);
    printf("%d entries from %lu bytes, %u different pieces\n", (int)t->entries, (unsigned long)length,
           (unsigned)t->words.count);
    return 0; /* the system takes the memory back */
}
