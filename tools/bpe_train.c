/* bpe_train.c - trains a byte-level BPE vocabulary on a text and writes it as a tokenizer.json.
 *
 *   cc -std=c99 -O2 tools/bpe_train.c examples/demo/bpe_split.c -o build/bpe_train
 *   build/bpe_train TEXT VOCABULARY_SIZE tokenizer.json
 *
 * Entry 0 is <|endoftext|>, entries 1..256 are the bytes, every later entry joins two earlier ones: the pair
 * that occurs most often inside pieces of the text, the pair of lowest ids among equals. Same text, same
 * file. */
#include "../examples/demo/bpe_split.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPECIAL = 1, BYTES = 256, FIRST_MERGE = SPECIAL + BYTES, MOST_ENTRIES = 2048, SLOTS = 1 << 18 };

static const char end_of_text[] = "<|endoftext|>";

/* One distinct piece of the text, as the entries it is cut into so far. */
typedef struct word {
    const uint8_t *text;
    uint32_t length; /* bytes; `ids` has room for as many */
    uint32_t count;  /* occurrences */
    uint32_t size;   /* entries */
    uint16_t *ids;
} word;

typedef struct trainer {
    word *words; /* hash table of SLOTS; text NULL = free */
    uint32_t used;
    uint32_t *pairs; /* [MOST_ENTRIES][MOST_ENTRIES] occurrences of each pair of neighbours */
    uint16_t merges[MOST_ENTRIES][2];
    uint8_t *spelling[MOST_ENTRIES]; /* the bytes of each entry */
    uint32_t spelling_length[MOST_ENTRIES];
    int entries;
} trainer;

static void stop(const char *what, const char *detail) {
    fprintf(stderr, "bpe_train: %s %s\n", what, detail);
    exit(1);
}

static void *room(size_t count, size_t size) {
    void *p = calloc(count, size);
    if (!p) stop("out of memory", "");
    return p;
}

static uint8_t *read_file(const char *path, size_t *length) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0) stop("cannot read", path);
    const long size = ftell(file);
    if (size < 0 || fseek(file, 0, SEEK_SET) != 0) stop("cannot read", path);
    uint8_t *data = (uint8_t *)room((size_t)size + 1, 1);
    if (fread(data, 1, (size_t)size, file) != (size_t)size) stop("cannot read", path);
    fclose(file);
    *length = (size_t)size;
    return data;
}

/* ---- words ---- */

static uint32_t hash_bytes(const uint8_t *text, size_t length) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < length; i++) h = (h ^ text[i]) * 16777619u;
    return h;
}

static void count_piece(trainer *t, const uint8_t *text, size_t length) {
    uint32_t slot = hash_bytes(text, length) % SLOTS;
    word *w = &t->words[slot];
    while (w->text && !(w->length == length && memcmp(w->text, text, length) == 0))
        w = &t->words[slot = (slot + 1) % SLOTS];
    w->count++;
    if (w->text) return;
    if (++t->used > SLOTS / 2) stop("too many different words", "");
    w->text = text;
    w->length = w->size = (uint32_t)length;
    w->ids = (uint16_t *)room(length, sizeof *w->ids);
    for (size_t i = 0; i < length; i++) w->ids[i] = (uint16_t)(SPECIAL + text[i]);
}

static void count_words(trainer *t, const uint8_t *text, size_t length) {
    for (size_t at = 0; at < length;) {
        const size_t piece = bpe_piece_length(text + at, length - at);
        count_piece(t, text + at, piece);
        at += piece;
    }
}

/* ---- merges ---- */

static uint32_t *pair_count(trainer *t, int left, int right) {
    return &t->pairs[(size_t)left * MOST_ENTRIES + (size_t)right];
}

/* Adds (or, with a wrapped negative count, takes away) the pairs of one word. */
static void count_pairs(trainer *t, const word *w, uint32_t count) {
    for (uint32_t i = 0; i + 1 < w->size; i++) *pair_count(t, w->ids[i], w->ids[i + 1]) += count;
}

/* The pair that occurs most often; false when none occurs twice. */
static bool best_pair(trainer *t, int best[2]) {
    uint32_t most = 1;
    for (int a = 0; a < t->entries; a++)
        for (int b = 0; b < t->entries; b++) {
            const uint32_t count = *pair_count(t, a, b);
            if (count <= most) continue;
            most = count;
            best[0] = a;
            best[1] = b;
        }
    return most > 1;
}

static bool word_has(const word *w, const int pair[2]) {
    for (uint32_t i = 0; i + 1 < w->size; i++)
        if (w->ids[i] == pair[0] && w->ids[i + 1] == pair[1]) return true;
    return false;
}

/* Replaces the pair by `entry` in one word, from left to right. */
static void merge_word(word *w, const int pair[2], int entry) {
    uint32_t size = 0;
    for (uint32_t i = 0; i < w->size; i++) {
        const bool joins = i + 1 < w->size && w->ids[i] == pair[0] && w->ids[i + 1] == pair[1];
        w->ids[size++] = joins ? (uint16_t)entry : w->ids[i];
        if (joins) i++;
    }
    w->size = size;
}

static void spell(trainer *t, int entry, const uint8_t *a, uint32_t a_length, const uint8_t *b,
                  uint32_t b_length) {
    t->spelling_length[entry] = a_length + b_length;
    t->spelling[entry] = (uint8_t *)room(a_length + b_length, 1);
    memcpy(t->spelling[entry], a, a_length);
    if (b_length) memcpy(t->spelling[entry] + a_length, b, b_length);
}

static void add_merge(trainer *t, const int pair[2]) {
    const int entry = t->entries++;
    t->merges[entry][0] = (uint16_t)pair[0];
    t->merges[entry][1] = (uint16_t)pair[1];
    spell(t, entry, t->spelling[pair[0]], t->spelling_length[pair[0]], t->spelling[pair[1]],
          t->spelling_length[pair[1]]);
    for (uint32_t i = 0; i < SLOTS; i++) {
        word *w = &t->words[i];
        if (!w->text || !word_has(w, pair)) continue;
        count_pairs(t, w, 0u - w->count);
        merge_word(w, pair, entry);
        count_pairs(t, w, w->count);
    }
}

static void train(trainer *t, int size) {
    int pair[2] = { 0, 0 };
    for (int b = 0; b < BYTES; b++) {
        const uint8_t byte = (uint8_t)b;
        spell(t, SPECIAL + b, &byte, 1, NULL, 0);
    }
    t->entries = FIRST_MERGE;
    for (uint32_t i = 0; i < SLOTS; i++)
        if (t->words[i].text) count_pairs(t, &t->words[i], t->words[i].count);
    while (t->entries < size && best_pair(t, pair)) add_merge(t, pair);
}

/* ---- the file ---- */

/* An entry's bytes as the characters of a JSON string. All of them are below U+0800. */
static void write_spelling(FILE *out, const trainer *t, int entry) {
    for (uint32_t i = 0; i < t->spelling_length[entry]; i++) {
        const uint32_t c = bpe_byte_to_character(t->spelling[entry][i]);
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
    for (int i = SPECIAL; i < t->entries; i++) {
        fprintf(out, ",\n      \"");
        write_spelling(out, t, i);
        fprintf(out, "\": %d", i);
    }
    fprintf(out, "\n    },\n    \"merges\": [");
    for (int i = FIRST_MERGE; i < t->entries; i++) {
        fprintf(out, "%s\n      \"", i > FIRST_MERGE ? "," : "");
        write_spelling(out, t, t->merges[i][0]);
        fputc(' ', out);
        write_spelling(out, t, t->merges[i][1]);
        fputc('"', out);
    }
    fprintf(out, "\n    ]\n");
}

static bool write_tokenizer(const trainer *t, const char *path) {
    FILE *out = fopen(path, "wb");
    if (!out) return false;
    fprintf(out,
            "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n"
            "  \"added_tokens\": [\n    { \"id\": 0, \"content\": \"%s\", \"single_word\": false, "
            "\"lstrip\": false, "
            "\"rstrip\": false, \"normalized\": false, \"special\": true }\n  ],\n  \"normalizer\": null,\n"
            "  \"pre_tokenizer\": {\n    \"type\": \"Sequence\",\n    \"pretokenizers\": [\n"
            "      { \"type\": \"Split\", \"pattern\": { \"Regex\": \"",
            end_of_text);
    write_escaped(out, BPE_SPLIT_PATTERN);
    fprintf(out,
            "\" }, \"behavior\": \"Isolated\", \"invert\": false },\n"
            "      { \"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
            "\"use_regex\": false }\n    ]\n  },\n  \"post_processor\": null,\n"
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

int main(int argc, char **argv) {
    if (argc != 4) stop("usage: bpe_train TEXT VOCABULARY_SIZE", "tokenizer.json");
    const int size = atoi(argv[2]);
    if (size < FIRST_MERGE || size > MOST_ENTRIES)
        stop("the vocabulary must have 257 to 2048 entries, not", argv[2]);

    size_t length = 0;
    uint8_t *text = read_file(argv[1], &length);
    trainer *t = (trainer *)room(1, sizeof *t);
    t->words = (word *)room(SLOTS, sizeof *t->words);
    t->pairs = (uint32_t *)room((size_t)MOST_ENTRIES * MOST_ENTRIES, sizeof *t->pairs);
    count_words(t, text, length);
    train(t, size);
    if (!write_tokenizer(t, argv[3])) stop("cannot write", argv[3]);
    printf("%d entries from %lu bytes, %u different pieces\n", t->entries, (unsigned long)length, t->used);
    return 0; /* the system takes the memory back */
}
