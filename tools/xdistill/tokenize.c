/* tokenize.c - `xdistill tokenize train` and `tokenize encode`. */
#include "bpe.h"
#include "command.h"
#include "text.h"
#include "vocabulary.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tokenize_options {
    const char *text, *out, *pieces, *tokenizer;
    int entries;
    xd_tokenizer_preset preset;
    bool special;
} tokenize_options;

#define TOKENIZE_FIELD(field) offsetof(tokenize_options, field)

static bool tokenize_parse_pieces(const char *text, void *options) {
    for (int i = 0; bpe_pieces(i); i++)
        if (strcmp(text, bpe_pieces(i)) == 0) return (((tokenize_options *)options)->pieces = text) != NULL;
    return false;
}

static bool tokenize_parse_preset(const char *text, void *options) {
    return vocabulary_preset(text, &((tokenize_options *)options)->preset);
}

/* ---- train ---- */

static const option train_table[] = {
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = TOKENIZE_FIELD(text),
      .help = "UTF-8 text to learn from" },
    { .name = "--out",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = TOKENIZE_FIELD(out),
      .help = "the tokenizer.json; a file that is there is replaced" },
    { .name = "--entries",
      .value = "N",
      .kind = OPTION_INT,
      .field = TOKENIZE_FIELD(entries),
      .least = BPE_LEAST_ENTRIES,
      .most = BPE_MOST_ENTRIES,
      .help = "of the vocabulary (4096); fewer when no pair of them occurs twice" },
    { .name = "--pieces",
      .value = "NAME",
      .kind = OPTION_PARSED,
      .takes = "ascii, gpt2, smollm or llama3",
      .parse = tokenize_parse_pieces,
      .help = "how text falls into pieces, which no entry crosses: ascii, gpt2, smollm or llama3 (gpt2)" },
};

static const command_line train_command = {
    "tokenize train",
    "--text FILE --out FILE [options]",
    "Trains a byte-level BPE vocabulary on a text and writes it as a tokenizer.json.\n"
    "The same text gives the same file.",
    "xdistill tokenize train --text mine.txt --entries 4096 --out tokenizer.json",
    train_table,
    (int)(sizeof train_table / sizeof train_table[0])
};

static xd_result train_run(xd_ctx *ctx, const tokenize_options *o) {
    char *text = NULL, *json = NULL;
    size_t bytes = 0, json_bytes = 0;
    bpe_report report;
    XD_TRY(command_check_output(ctx, o->out, "tokenizer.json", "{"));
    XD_TRY(text_load(ctx, o->text, &text, &bytes));
    const bpe_desc desc = { text, bytes, o->entries, o->pieces };
    xd_result result = bpe_train(ctx, &desc, &json, &json_bytes, &report);
    if (result == XD_OK) result = xd_file_save(ctx, o->out, json, json_bytes);
    if (result == XD_OK)
        printf("%d entries from %zu bytes, %lld different pieces\n", report.entries, bytes,
               (long long)report.pieces);
    free(json);
    xd_release(ctx, text);
    return result;
}

static int train_command_run(xd_ctx *ctx, int count, char **words) {
    tokenize_options o;
    int status;
    memset(&o, 0, sizeof o);
    o.entries = 4096;
    o.pieces = "gpt2";
    if (!command_parse(&train_command, count, words, &o, &status)) return status;
    if (!o.text || !o.out) return command_lacks(&train_command, !o.text ? "--text" : "--out");
    return command_end(ctx, "tokenize train", train_run(ctx, &o));
}

/* ---- encode ---- */

static const option encode_table[] = {
    { .name = "--tokenizer",
      .value = "PATH",
      .kind = OPTION_PATH,
      .field = TOKENIZE_FIELD(tokenizer),
      .help = "a tokenizer.json, a model directory, a GGUF file, a SentencePiece model, or a rank file" },
    { .name = "--text",
      .value = "FILE",
      .kind = OPTION_PATH,
      .field = TOKENIZE_FIELD(text),
      .help = "UTF-8 text" },
    { .name = "--preset",
      .value = "NAME",
      .kind = OPTION_PARSED,
      .takes = VOCABULARY_PRESETS,
      .parse = tokenize_parse_preset,
      .help = "rules of a rank file: " VOCABULARY_PRESETS },
    { .name = "--special",
      .value = "",
      .kind = OPTION_FLAG,
      .field = TOKENIZE_FIELD(special),
      .help = "names of special tokens in the text become tokens" },
};

static const command_line encode_command = {
    "tokenize encode",
    "--tokenizer PATH --text FILE [options]",
    "Prints the ids of a text, one a line.",
    "xdistill tokenize encode --tokenizer run/student --text mine.txt",
    encode_table,
    (int)(sizeof encode_table / sizeof encode_table[0])
};

static xd_result encode_print(xd_ctx *ctx, const tokenize_options *o, const xd_tokenizer *tokenizer,
                              const char *text, size_t bytes) {
    xd_encoder *encoder = NULL;
    xd_encoding e;
    const xd_encode_desc desc = { .parse_special = o->special, .skip_spans = true };
    XD_TRY(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder));
    const xd_result result = xd_encode(encoder, text, bytes, &desc, &e);
    for (int64_t i = 0; result == XD_OK && i < e.count; i++) printf("%d\n", (int)e.ids[i]);
    xd_encoder_destroy(encoder);
    return result;
}

static xd_result encode_run(xd_ctx *ctx, const tokenize_options *o) {
    char *text = NULL;
    size_t bytes = 0;
    xd_tokenizer *tokenizer = NULL;
    XD_TRY(text_load(ctx, o->text, &text, &bytes));
    xd_result result = vocabulary_open(ctx, o->tokenizer, o->preset, &tokenizer);
    if (result == XD_OK) result = encode_print(ctx, o, tokenizer, text, bytes);
    xd_tokenizer_destroy(tokenizer);
    xd_release(ctx, text);
    return result;
}

static int encode_command_run(xd_ctx *ctx, int count, char **words) {
    tokenize_options o;
    int status;
    memset(&o, 0, sizeof o);
    if (!command_parse(&encode_command, count, words, &o, &status)) return status;
    if (!o.tokenizer || !o.text)
        return command_lacks(&encode_command, !o.tokenizer ? "--tokenizer" : "--text");
    return command_end(ctx, "tokenize encode", encode_run(ctx, &o));
}

int command_tokenize(xd_ctx *ctx, int count, char **words) {
    static const command_verb verbs[] = { { "train", train_command_run, &train_command },
                                          { "encode", encode_command_run, &encode_command } };
    return command_of_verbs("tokenize", verbs, 2, ctx, count, words);
}
