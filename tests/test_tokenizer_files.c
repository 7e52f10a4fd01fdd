/* Each form of tokenizer file, files that lie, and what threads and a lack of memory do. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "makers.h"
#include "tokenizer_make.h"

/* ---- rank files ---- */

/* Every byte, then "ab" (256), "bc" (257), "abc" (258), " a" (259). */
static const file *rank_file(const char *more) {
    static file f;
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char line[32];
    f.bytes = 0;
    for (int i = 0; i < 256; i++) {
        snprintf(line, sizeof line, "%c%c== %d\n", digits[i >> 2], digits[(i & 3) << 4], i);
        put(&f, line);
    }
    put(&f, "YWI= 256\nYmM= 257\nYWJj 258\nIGE= 259\n");
    put(&f, more);
    return &f;
}

/* Whisper's vocabularies have an entry without text, which may also be the unknown token or an added one. No text becomes it but
 * what is unknown; ids are those of the package tokenizers. */
XD_TEST(an_entry_without_text_loads_and_no_text_becomes_it) {
    static const struct {
        const char *added, *unknown, *ids;
    } cases[] = { { "", "null", "2 3 2" },
                  { "", "\"\"", "2 4 9 1 9" },
                  { "{\"id\":10,\"content\":\"<|e|>\",\"special\":true}", "\"\"", "2 4 10 1 9" },
                  { "{\"id\":10,\"content\":\"<|e|>\"},{\"id\":9,\"content\":\"\"}", "null", "2 4 10 1" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static file f;
        f.bytes = 0;
        put(&f, "\xef\xbb\xbf{\"added_tokens\":[");
        put(&f, cases[i].added);
        put(&f, "],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{\"type\":"
                "\"BPE\","
                "\"unk_token\":");
        put(&f, cases[i].unknown);
        put(&f, ",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\xc4\xa0\":3,\"\xc4\xa0"
                "a\":4,\"\":9},"
                "\"merges\":[\"a b\",\"\xc4\xa0 a\"]}}");
        fixture t = load(&f);
        CHECK_EQ_STR(ids_of(&t, i < 2 ? "ab acbc" : "ab a<|e|>bc", true, false), cases[i].ids);
        CHECK_EQ_INT(xd_tokenizer_token(t.tokenizer, 9).length, 0);
        CHECK_EQ_INT(xd_tokenizer_find(t.tokenizer, "", 0), -1);
        const int32_t some[3] = { 2, 9, 1 };
        char out[8];
        size_t length = 0;
        CHECK_EQ_INT(xd_tokenizer_decode(
                         t.ctx, t.tokenizer,
                         &(xd_decode_desc){ .ids = some, .count = 3, .out = out, .capacity = 8 }, &length),
                     XD_OK);
        CHECK(length == 3 && memcmp(out, "abb", 3) == 0);
        unload(&t);
    }
}

/* The file without the token of a byte: its id belongs to the spelling twice. */
static file without_byte(const file *from, int byte) {
    file out, name;
    name.bytes = out.bytes = 0;
    put(&name, "\"");
    put_spelling(&name, byte);
    put(&name, "\":");
    const char *at = strstr(from->text, name.text);
    CHECK(at != NULL);
    memcpy(out.text, from->text, (size_t)(at - from->text));
    out.bytes = (size_t)(at - from->text);
    put(&out, "\"");
    put_spelling(&out, byte);
    put_spelling(&out, byte);
    put(&out, at + strlen(name.text) - 2);
    return out;
}

static bool says_byte_level(const file *data) {
    fixture f = load(data);
    const bool says = xd_tokenizer_describe(f.tokenizer).byte_level;
    unload(&f);
    return says;
}

XD_TEST(byte_level_is_true_only_where_any_bytes_survive) {
    const char *removed =
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},"
        "\"behavior\":\"Removed\",\"invert\":false}," PLAIN_BYTES "]}";
    const char *prefix = "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"use_regex\":false}";
    const file whole = *byte_level(PLAIN_BYTES, "a b"), less = without_byte(&whole, 0xf5);
    CHECK(says_byte_level(&whole));
    CHECK(!says_byte_level(&less));
    CHECK(says_byte_level(byte_level(prefix, "a b")));
    CHECK(!says_byte_level(byte_level_with("{\"type\":\"NFC\"}", PLAIN_BYTES, "", "", "a b", false)));
    CHECK(!says_byte_level(byte_level(removed, "a b")));
}

XD_TEST(rank_files_merge_by_the_rank_of_the_result) {
    const xd_tokenizer_special specials[] = { { "<|x|>", 270 } };
    xd_tokenizer_desc desc = { .pattern = " ?[a-z]+|\\s+|[^a-z\\s]+",
                               .specials = specials,
                               .special_count = 1 };
    const file *data = rank_file("=");
    fixture f = load_with(data->text, data->bytes - 1, &desc);
    CHECK_EQ_STR(spans(&f, "abc xabcd"), "258:0-3 32:3-4 120:4-5 258:5-8 100:8-9");
    CHECK_EQ_STR(ids(&f, "bc a"), "257 259");
    CHECK_EQ_STR(ids_of(&f, "a<|x|>", true, false), "97 270");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).size, 271);
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).tokens, 261);
    CHECK(xd_tokenizer_describe(f.tokenizer).byte_level);
    unload(&f);
    desc.preset = XD_TOKENIZER_PRESET_LLAMA3;
    desc.pattern = NULL;
    f = load_with(data->text, data->bytes - 1, &desc);
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "<|begin_of_text|>"), 128000);
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "<|reserved_special_token_2|>"), 128012);
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "<|reserved_special_token_245|>"), 128255);
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).size, 128256);
    CHECK_EQ_STR(ids(&f, "don'T 1234"), "100 111 110 39 84 32 49 50 51 52");
    unload(&f);
}

XD_TEST(rank_files_that_lie_are_refused) {
    const xd_tokenizer_desc any = { .preset = XD_TOKENIZER_PRESET_GPT2 };
    const xd_tokenizer_desc wrong = { .preset = (xd_tokenizer_preset)99 };
    const xd_tokenizer_desc bad = { .pattern = "a(" };
    const xd_tokenizer_special taken[] = { { "x", 97 } };
    const xd_tokenizer_desc conflict = { .preset = XD_TOKENIZER_PRESET_GPT2,
                                         .specials = taken,
                                         .special_count = 1 };
    refuse_with("YQ== 0", 6, NULL, XD_ERROR_ARGUMENT, "needs a preset or a pattern");
    refuse_with("YQ== 0", 6, &wrong, XD_ERROR_ARGUMENT, "preset 99");
    refuse_with("YQ== 0", 6, &bad, XD_ERROR_FORMAT, "a group without end at byte 1");
    refuse_with("YQ== 0\nYQ== 1\n", 14, &any, XD_ERROR_FORMAT, "ids 0 and 1 have the same text");
    refuse_with("YQ== 0\nYg== 0\n", 14, &any, XD_ERROR_FORMAT, "id 0 stands twice");
    refuse_with("YQ== 0\nY?== 1\n", 14, &any, XD_ERROR_FORMAT, "line 2 is not base64");
    refuse_with("YQ== 0\nYg==\n", 12, &any, XD_ERROR_FORMAT, "line 2 is not base64 and a rank");
    refuse_with("YQ== 0\nYg== 1x\n", 15, &any, XD_ERROR_FORMAT, "line 2 is not base64 and a rank");
    refuse_with("YQ== 99999999999999999999\n", 26, &any, XD_ERROR_FORMAT, "line 1 is not base64 and a rank");
    refuse_with("YQ== 2097152\n", 13, &any, XD_ERROR_FORMAT, "ids up to 2097152");
    refuse_with("", 0, &any, XD_ERROR_FORMAT, "is empty");
    const file *data = rank_file("");
    refuse_with(data->text, data->bytes, &conflict, XD_ERROR_ARGUMENT, "id 97 is taken");
    cut_everywhere(data->text, data->bytes, &any, 97);
}

/* ---- SentencePiece ---- */

/* A protobuf field of bytes shorter than 128. */
static void put_field(file *f, int number, const char *bytes, size_t length) {
    f->text[f->bytes++] = (char)(number << 3 | 2);
    f->text[f->bytes++] = (char)length;
    memcpy(f->text + f->bytes, bytes, length);
    f->bytes += length;
}

static void put_piece(file *f, const char *text, float score, int kind) {
    file piece;
    piece.bytes = 0;
    put_field(&piece, 1, text, strlen(text));
    piece.text[piece.bytes++] = 0x15;
    memcpy(piece.text + piece.bytes, &score, 4); /* tests run on little-endian machines */
    piece.bytes += 4;
    piece.text[piece.bytes++] = 0x18;
    piece.text[piece.bytes++] = (char)kind;
    put_field(f, 1, piece.text, piece.bytes);
}

enum { UNIGRAM = 1, BPE = 2 };

static const file *sentencepiece(int type, const char *map, bool remove_spaces) {
    static file f;
    file part;
    char name[8];
    f.bytes = 0;
    put_piece(&f, "<unk>", 0, 2);
    put_piece(&f, "<s>", 0, 3);
    put_piece(&f, "[user]", 0, 4);
    for (int i = 0; i < 256; i++) {
        snprintf(name, sizeof name, "<0x%02X>", i);
        put_piece(&f, name, 0, 6);
    }
    put_piece(&f, MARK "h", -1, 1);  /* 259 */
    put_piece(&f, "hi", -2, 1);      /* 260 */
    put_piece(&f, MARK "hi", -3, 1); /* 261 */
    put_piece(&f, MARK, -4, 1);      /* 262 */
    put_piece(&f, "h", -5, 1);       /* 263 */
    put_piece(&f, "i", -6, 1);       /* 264 */
    part.bytes = 0;
    part.text[part.bytes++] = 0x18;
    part.text[part.bytes++] = (char)type;
    part.text[part.bytes++] = (char)0x98; /* field 35: byte_fallback */
    part.text[part.bytes++] = 0x02;
    part.text[part.bytes++] = 1;
    put_field(&f, 2, part.text, part.bytes);
    part.bytes = 0;
    put_field(&part, 1, "identity", 8);
    if (*map) put_field(&part, 2, map, strlen(map));
    part.text[part.bytes++] = 0x20;
    part.text[part.bytes++] = remove_spaces ? 1 : 0;
    put_field(&f, 3, part.text, part.bytes);
    return &f;
}

XD_TEST(sentencepiece_merges_by_score) {
    fixture f = load(sentencepiece(BPE, "", false));
    CHECK_EQ_STR(spans(&f, "hi"), "261:0-2");
    CHECK_EQ_STR(spans(&f, "hii hi"), "261:0-2 264:2-3 261:3-6");
    CHECK_EQ_STR(spans(&f, "i[user]z"), "262:0-0 264:0-1 2:1-7 125:7-8"); /* one prefix for the text */
    CHECK_EQ_STR(spans(&f, "[user] hi"), "262:0-0 2:0-6 261:6-9");
    CHECK_EQ_STR(spans(&f, "<s>"), "262:0-0 63:0-1 118:1-2 65:2-3");
    CHECK_EQ_STR(ids_of(&f, "<s>hi", true, false), "1 261");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).unknown, 0);
    CHECK(xd_tokenizer_describe(f.tokenizer).adds_prefix && !xd_tokenizer_describe(f.tokenizer).byte_level);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, " h", 2), 259);
    unload(&f);
}

/* The package writes U+2581 for each blank of a text before it looks for its own symbols. The ids and pieces are the package's. */
XD_TEST(sentencepiece_symbols_with_a_blank_are_never_found) {
    static const struct {
        const char *symbol, *name, *ids;
    } cases[] = {
        { "  ", "  ", "259:0-1 262:1-2 259:2-4" },      { MARK " ", "  ", "259:0-1 262:1-2 259:2-4" },
        { "h  h", "h  h", "259:0-1 262:1-2 259:2-4" },  { "h" MARK " h", "h  h", "259:0-1 262:1-2 259:2-4" },
        { MARK MARK, "  ", "259:0-1 265:1-3 263:3-4" }, { "h" MARK MARK "h", "h  h", "262:0-0 265:0-4" }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static file with;
        with = *sentencepiece(BPE, "", false);
        put_piece(&with, cases[i].symbol, 0, 4);
        fixture f = load(&with);
        CHECK_EQ_STR(spans(&f, "h  h"), cases[i].ids);
        CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, cases[i].name), 265);
        unload(&f);
    }
}

/* The file with one more part of the trainer's settings: field 46 names BOS, 47 EOS. */
static const file *with_name(int number, const char *name) {
    static file f;
    file part;
    part.bytes = 0;
    part.text[part.bytes++] = (char)(((number << 3 | 2) & 127) | 128);
    part.text[part.bytes++] = (char)(number >> 4);
    part.text[part.bytes++] = (char)strlen(name);
    memcpy(part.text + part.bytes, name, strlen(name));
    f = *sentencepiece(BPE, "", false);
    put_field(&f, 2, part.text, part.bytes + strlen(name));
    return &f;
}

XD_TEST(sentencepiece_models_put_the_control_piece_that_is_bos) {
    static const struct {
        const char *name;
        int number, bos, eos;
    } cases[] = { { "", 46, 1, -1 },        { "", 47, 1, -1 },       { "<s>", 47, 1, 1 },
                  { "[user]", 46, -1, -1 }, { "<unk>", 46, -1, -1 }, { "hi", 46, -1, -1 },
                  { "none", 46, -1, -1 } };
    const xd_encode_desc add = { false, false, true, false };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f = load(with_name(cases[i].number, cases[i].name));
        xd_encoding e = { 0, NULL, NULL, NULL };
        const int bos = cases[i].bos >= 0 ? 1 : 0;
        CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).bos, cases[i].bos);
        CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, cases[i].eos);
        CHECK_EQ_INT(xd_encode(f.encoder, "hi", 2, &add, &e), XD_OK);
        CHECK_EQ_INT(e.count, 1 + bos); /* never EOS */
        CHECK_EQ_INT(e.ids[0], bos ? 1 : 261);
        CHECK_EQ_INT(e.ids[bos], 261);
        CHECK(e.spans[0].end == (bos ? 0 : 2) && e.roles[bos] == XD_TOKEN_TEXT);
        unload(&f);
    }
}

XD_TEST(sentencepiece_models_of_other_kinds_are_refused_by_name) {
    const xd_tokenizer_desc preset = { .preset = XD_TOKENIZER_PRESET_GPT2 };
    const file *f = sentencepiece(UNIGRAM, "", false);
    refuse(f, XD_ERROR_UNSUPPORTED, "type Unigram");
    f = sentencepiece(BPE, "abcd", false);
    refuse(f, XD_ERROR_UNSUPPORTED, "character map of 4 bytes");
    f = sentencepiece(BPE, "", true);
    refuse(f, XD_ERROR_UNSUPPORTED, "remove_extra_whitespaces");
    f = sentencepiece(BPE, "", false);
    refuse_with(f->text, f->bytes, &preset, XD_ERROR_ARGUMENT, "SentencePiece model has its own pattern");
    refuse_with("\n\x7f", 2, NULL, XD_ERROR_FORMAT, "longer than its message");
    cut_everywhere(f->text, f->bytes, NULL, 41);
}

/* ---- Tekken ---- */

static const char tekken_text[] =
    "{\"config\":{\"pattern\":\"[a-z]+|[^a-z]+\",\"num_vocab_tokens\":9,\"default_vocab_size\":7,"
    "\"default_num_special_tokens\":2,\"version\":\"v3\"},\"vocab\":["
    "{\"rank\":0,\"token_bytes\":\"YQ==\",\"token_str\":\"a\"},{\"rank\":1,\"token_bytes\":\"Yg==\",\"token_"
    "str\":\"b\"},"
    "{\"rank\":2,\"token_bytes\":\"AA==\",\"token_str\":\"\\u0000\"},{\"rank\":3,\"token_bytes\":\"YWI=\","
    "\"token_str\":null},"
    "{\"rank\":4,\"token_bytes\":\"/"
    "w==\",\"token_str\":null},{\"rank\":5,\"token_bytes\":\"YWJh\",\"token_str\":\"aba\"}],"
    "\"special_tokens\":[{\"rank\":1,\"token_str\":\"<s>\",\"is_control\":true}]}";

XD_TEST(tekken_files_put_special_tokens_first) {
    fixture f = load_with(tekken_text, sizeof tekken_text - 1, NULL);
    CHECK_EQ_STR(ids(&f, "abab"), "5 5");
    CHECK_EQ_STR(ids(&f, "aba"), "5 2"); /* its rank is beyond the vocabulary */
    CHECK_EQ_STR(ids_of(&f, "<s>a", true, false), "1 2");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).size, 7);
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "<SPECIAL_0>"), 0);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 4).length, 1);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "\0", 1), 4);
    unload(&f);
    cut_everywhere(tekken_text, sizeof tekken_text - 1, NULL, 13);
}

/* ---- tokenizer.json that cannot be ---- */

#define MODEL(inside) "{\"model\":{" inside "}}"
#define AB "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2}"

XD_TEST(tokenizer_json_that_lies_is_refused_with_its_place) {
    static const struct {
        const char *text;
        xd_result result;
        const char *message;
    } cases[] = {
        { "{}", XD_ERROR_FORMAT, "no model" },
        { "{\"model\":[]}", XD_ERROR_FORMAT, "no model" },
        { MODEL("\"type\":\"Unigram\",\"vocab\":[]"), XD_ERROR_UNSUPPORTED, "model Unigram" },
        { MODEL("\"type\":\"WordPiece\",\"vocab\":{}"), XD_ERROR_UNSUPPORTED, "model WordPiece" },
        { MODEL("\"type\":\"BPE\"," AB), XD_ERROR_FORMAT, "lacks vocab or merges" },
        { MODEL("\"dropout\":0.5," AB ",\"merges\":[]"), XD_ERROR_UNSUPPORTED, "dropout 0.5" },
        { MODEL("\"end_of_word_suffix\":\"</w>\"," AB ",\"merges\":[]"), XD_ERROR_UNSUPPORTED,
          "end_of_word_suffix" },
        { MODEL("\"vocab\":{\"a\":\"0\"},\"merges\":[]"), XD_ERROR_FORMAT, "\"a\" has no id at byte 23" },
        { MODEL("\"vocab\":{\"a\":1.5},\"merges\":[]"), XD_ERROR_FORMAT, "\"a\" has no id" },
        { MODEL("\"vocab\":{\"a\":-1,\"b\":0},\"merges\":[]"), XD_ERROR_FORMAT, "id -1 is not in 0 to 0" },
        { MODEL("\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]"), XD_ERROR_FORMAT, "id 0 stands twice" },
        { MODEL("\"vocab\":{\"a\":9999999999},\"merges\":[]"), XD_ERROR_FORMAT, "ids up to 9999999999" },
        { MODEL("\"vocab\":{\"\":0,\"a\":0},\"merges\":[]"), XD_ERROR_FORMAT, "id 0 stands twice" },
        { "{\"added_tokens\":[{\"content\":\"\"}],\"model\":{" AB ",\"merges\":[]}}", XD_ERROR_FORMAT,
          "added token at byte 17" },
        { MODEL("\"vocab\":{},\"merges\":[]"), XD_ERROR_FORMAT, "ids up to -1" },
        { MODEL(AB ",\"merges\":[\"ab\"]"), XD_ERROR_FORMAT, "merge 0 at byte 49 is not two texts" },
        { MODEL(AB ",\"merges\":[[\"a\"]]"), XD_ERROR_FORMAT, "is not two texts" },
        { MODEL(AB ",\"merges\":[7]"), XD_ERROR_FORMAT, "is not two texts" },
        { MODEL(AB ",\"merges\":[\"a b\",\"b a\"]"), XD_ERROR_FORMAT, "merge 1 at byte 55 (\"b a\", \"a\")" },
        { "{\"normalizer\":{\"type\":\"Lowercase\"},\"model\":{" AB ",\"merges\":[]}}", XD_ERROR_UNSUPPORTED,
          "normalizer Lowercase at byte 14" },
        { "{\"pre_tokenizer\":{\"type\":\"Whitespace\"},\"model\":{" AB ",\"merges\":[]}}",
          XD_ERROR_UNSUPPORTED, "pre-tokenizer Whitespace at byte 17" },
        { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a**\"},\"behavior\":\"Isolated\"},"
          "\"model\":{" AB ",\"merges\":[]}}",
          XD_ERROR_FORMAT, "a lazy or repeated quantifier" },
        { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"}},\"model\":{" AB
          ",\"merges\":[]}}",
          XD_ERROR_FORMAT, "no known behavior" },
        { "{\"pre_tokenizer\":{\"type\":\"Split\"},\"model\":{" AB ",\"merges\":[]}}", XD_ERROR_FORMAT,
          "has no pattern" },
        { "{\"added_tokens\":[{\"content\":\"x\"}],\"model\":{" AB ",\"merges\":[]}}", XD_ERROR_FORMAT,
          "added token at byte 17" },
        { "{\"added_tokens\":[{\"content\":\"x\",\"id\":1}],\"model\":{" AB ",\"merges\":[]}}",
          XD_ERROR_FORMAT, "\"x\" has id 1, which the vocabulary uses otherwise" },
        { "{\"added_tokens\":[{\"content\":\"a\",\"id\":5}],\"model\":{" AB ",\"merges\":[]}}",
          XD_ERROR_FORMAT, "\"a\" has id 5" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refuse_with(cases[i].text, strlen(cases[i].text), NULL, cases[i].result, cases[i].message);
}

XD_TEST(tokenizer_json_may_be_cut_anywhere) {
    const file *f =
        byte_level_with("{\"type\":\"NFC\"}", GPT2_BYTES, "", ADDED(300, "<s>", true, ""), "a b|ab c", true);
    cut_everywhere(f->text, f->bytes, NULL, 61);
    f = sentence_like(LLAMA_NORMALIZER, FALLBACK, false);
    cut_everywhere(f->text, f->bytes, NULL, 7);
}

/* ---- threads and memory ---- */

static xd_result encode_on_a_rank(xd_comm *world, void *argument) {
    xd_encoder *encoder = NULL;
    xd_encoding e;
    XD_TRY(encoder_create(xd_comm_ctx(world), (const xd_tokenizer *)argument, &encoder));
    for (int i = 0; i < 200; i++) {
        const xd_result result = xd_encode(encoder, "aabab abab", 10, NULL, &e);
        CHECK(result == XD_OK && e.count == 6 && e.ids[1] == 257 && e.ids[5] == 257);
    }
    xd_encoder_destroy(encoder);
    return XD_OK;
}

XD_TEST(threads_share_a_tokenizer) {
    fixture f = load(byte_level(GPT2_BYTES, "b c|a b|ab c|a a"));
    CHECK_EQ_INT(xd_run_threads(4, NULL, encode_on_a_rank, f.tokenizer, NULL), XD_OK);
    unload(&f);
}

typedef struct heap {
    long calls, fails_at, live;
} heap;

static void *heap_allocate(void *user, size_t bytes) {
    heap *h = (heap *)user;
    if (++h->calls == h->fails_at) return NULL;
    h->live++;
    return malloc(bytes);
}

static void heap_release(void *user, void *memory) {
    ((heap *)user)->live--;
    free(memory);
}

/* Loads and encodes; the first result that is not OK. */
static xd_result use(xd_ctx *ctx, const file *f) {
    xd_tokenizer *tokenizer = NULL;
    xd_encoder *encoder = NULL;
    xd_encoding e;
    const xd_encode_desc desc = { true, false, true, false };
    char text[400];
    memset(text, 'a', sizeof text);
    memcpy(text, "fi\xef\xac\x81 e\xcc\x81<s> bc", 15);
    xd_result result = tokenizer_load_memory(ctx, f->text, f->bytes, NULL, &tokenizer);
    if (result == XD_OK) result = encoder_create(ctx, tokenizer, &encoder);
    if (result == XD_OK) result = xd_encode(encoder, text, sizeof text, &desc, &e);
    xd_encoder_destroy(encoder);
    xd_tokenizer_destroy(tokenizer);
    return result;
}

XD_TEST(a_failing_allocation_leaves_nothing_behind) {
    const file *f =
        byte_level_with("{\"type\":\"NFKC\"}", GPT2_BYTES, "", ADDED(300, "<s>", true, ""), "a b|a a", true);
    for (long n = 1; n < 200; n++) {
        heap h = { 0, 0, 0 };
        xd_ctx_desc desc;
        xd_ctx *ctx = NULL;
        memset(&desc, 0, sizeof desc);
        desc.allocator.allocate = heap_allocate;
        desc.allocator.release = heap_release;
        desc.allocator.user = &h;
        CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
        const long before = h.live;
        h.calls = 0;
        h.fails_at = n;
        const xd_result result = use(ctx, f);
        CHECK(result == XD_ERROR_MEMORY || (result == XD_OK && h.calls < n));
        CHECK_EQ_INT(h.live, before);
        xd_ctx_destroy(ctx);
        if (result == XD_OK) return;
    }
    CHECK(!"more than 200 allocations");
}

XD_TEST(a_file_is_loaded_by_its_name) {
    xd_ctx *ctx = new_ctx();
    xd_tokenizer *tokenizer = NULL;
    CHECK_EQ_INT(tokenizer_load(ctx, "no/such/tokenizer.json", NULL, &tokenizer), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(ctx)->message, "no/such/tokenizer.json") != NULL);
    if (tokenizer_load(ctx, "data/teacher/tokenizer.json", NULL, &tokenizer) == XD_OK) {
        fixture f = { ctx, tokenizer, NULL };
        CHECK_EQ_INT(encoder_create(ctx, tokenizer, &f.encoder), XD_OK);
        CHECK_EQ_INT(xd_tokenizer_describe(tokenizer).size, 2048);
        CHECK(survives(&f, "And the Lord said unto Moses, 12 'tis\n\n  caf\xc3\xa9", 47));
        unload(&f);
        return;
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
