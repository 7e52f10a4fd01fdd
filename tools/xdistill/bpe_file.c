/* bpe_file.c - a trained vocabulary as a tokenizer.json. */
#define _POSIX_C_SOURCE 200809L /* open_memstream */
#include "bpe_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char end_of_text[] = "<|endoftext|>";

static const bpe_preset presets[] = {
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

const char *bpe_pieces(int i) {
    return i < (int)(sizeof presets / sizeof presets[0]) ? presets[i].name : NULL;
}

const bpe_preset *bpe_find_preset(const char *name) {
    for (int i = 0; bpe_pieces(i); i++)
        if (strcmp(name, presets[i].name) == 0) return &presets[i];
    return NULL;
}

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
static void write_spelling(FILE *out, const bpe_vocabulary *v, int32_t entry) {
    for (uint32_t i = 0; i < v->length[entry]; i++) {
        const uint32_t c = character_of(v->spelling[entry][i]);
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

static void write_model(FILE *out, const bpe_vocabulary *v) {
    fprintf(out, "    \"vocab\": {\n      \"%s\": 0", end_of_text);
    for (int32_t i = BPE_SPECIAL; i < v->entries; i++) {
        fprintf(out, ",\n      \"");
        write_spelling(out, v, i);
        fprintf(out, "\": %d", (int)i);
    }
    fprintf(out, "\n    },\n    \"merges\": [");
    for (int32_t i = BPE_FIRST_MERGE; i < v->entries; i++) {
        fprintf(out, "%s\n      \"", i > BPE_FIRST_MERGE ? "," : "");
        write_spelling(out, v, v->merges[i][0]);
        fputc(' ', out);
        write_spelling(out, v, v->merges[i][1]);
        fputc('"', out);
    }
    fprintf(out, "\n    ]\n");
}

static void write_pieces(FILE *out, const bpe_preset *how) {
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

xd_result bpe_write(xd_ctx *ctx, const bpe_vocabulary *v, char **json, size_t *bytes) {
    FILE *out = open_memstream(json, bytes);
    XD_REQUIRE(ctx, out, XD_ERROR_MEMORY, "no room for a tokenizer of %d entries", (int)v->entries);
    fprintf(out,
            "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n"
            "  \"added_tokens\": [\n    { \"id\": 0, \"content\": \"%s\", \"single_word\": false, "
            "\"lstrip\": false, "
            "\"rstrip\": false, \"normalized\": false, \"special\": true }\n  ],\n  \"normalizer\": null,\n",
            end_of_text);
    write_pieces(out, v->how);
    fprintf(out,
            "  \"post_processor\": null,\n"
            "  \"decoder\": { \"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
            "\"use_regex\": false },\n"
            "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
            "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n"
            "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n");
    write_model(out, v);
    fprintf(out, "  }\n}\n");
    const bool whole = !ferror(out);
    if (fclose(out) == 0 && whole) return XD_OK;
    free(*json);
    *json = NULL;
    return XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a tokenizer of %d entries", (int)v->entries);
}
