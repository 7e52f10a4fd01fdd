/* The special tokens that xd_encode_desc.add_special puts around a text, from each form of file. Ids over
 * real files are compared with the packages by tests/tokenizers/compare.py --add-special. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "tokenizer_make.h"

/* ---- reading an encoding ---- */

/* "id:begin-endR ...", R the role: b, e, s or nothing. The message when it fails. */
static const char *around_of(const fixture *f, const char *text, bool parse_special) {
    static char out[8192];
    static const char *const names[] = { "", "b", "e", "s" };
    const xd_encode_desc desc = { parse_special, false, true, false };
    xd_encoding e = { 0, NULL, NULL, NULL };
    size_t used = 0;
    out[0] = '\0';
    if (!f->encoder) return "no encoder";
    if (xd_encode(f->encoder, text, strlen(text), &desc, &e) != XD_OK) return xd_last_error(f->ctx)->message;
    CHECK(e.roles != NULL);
    for (int64_t i = 0; i < e.count && used < sizeof out - 64; i++)
        used += (size_t)snprintf(out + used, 64, "%s%d:%d-%d%s", i ? " " : "", (int)e.ids[i],
                                 (int)e.spans[i].begin, (int)e.spans[i].end, names[e.roles[i]]);
    return out;
}

static const char *around(const fixture *f, const char *text) {
    return around_of(f, text, false);
}

/* ---- making files ---- */

#define ENDS ADDED(300, "<s>", true, "") "," ADDED(301, "</s>", true, "") "," ADDED(302, "<n>", false, "")

/* A byte-level file with a post-processor; 256 is "ab". */
static const file *with_post(const char *post) {
    return with_post_processor(byte_level_with("null", PLAIN_BYTES, "", ENDS, "a b", false), post);
}

#define BOS_PIECE "{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}}"
#define EOS_PIECE "{\"SpecialToken\":{\"id\":\"</s>\",\"type_id\":0}}"
#define TEXT_PIECE "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}"
#define TABLE                                                                          \
    "\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[300],\"tokens\":[\"<s>\"]}," \
    "\"</s>\":{\"id\":\"</s>\",\"ids\":[301],\"tokens\":[\"</s>\"]},"                  \
    "\"three\":{\"id\":\"three\",\"ids\":[1,300,302],\"tokens\":[\"a\",\"b\",\"c\"]}}"
#define TEMPLATE(pieces) "{\"type\":\"TemplateProcessing\",\"single\":[" pieces "],\"pair\":[]," TABLE "}"
#define BYTES_POST \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true}"
#define POSTS(list) "{\"type\":\"Sequence\",\"processors\":[" list "]}"

/* ---- tokenizer.json ---- */

XD_TEST(a_template_puts_its_tokens_around_each_text) {
    fixture f = load(with_post(POSTS(BYTES_POST "," TEMPLATE(BOS_PIECE "," TEXT_PIECE))));
    CHECK_EQ_STR(around(&f, " ab"), "300:0-0b 32:0-1 256:1-3");
    CHECK_EQ_STR(around(&f, ""), "300:0-0b");
    CHECK_EQ_STR(around_of(&f, "<s>ab", true), "300:0-0b 300:0-3 256:3-5"); /* twice, as the package has it */
    CHECK_EQ_STR(spans(&f, "ab"), "256:0-2");                               /* not unless asked */
    CHECK_EQ_STR(spans(&f, ""), "");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).bos, 300);
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, -1);
    unload(&f);
    f = load(with_post(TEMPLATE(BOS_PIECE "," TEXT_PIECE "," EOS_PIECE)));
    CHECK_EQ_STR(around(&f, "abab"), "300:0-0b 256:0-2 256:2-4 301:4-4e");
    CHECK_EQ_STR(around(&f, ""), "300:0-0b 301:0-0e");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, 301);
    unload(&f);
    f = load(with_post(TEMPLATE(TEXT_PIECE)));
    CHECK_EQ_STR(around(&f, "ab"), "256:0-2");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).bos, -1);
    unload(&f);
}

XD_TEST(a_special_token_of_a_template_may_be_several_tokens) {
    fixture f = load(with_post(TEMPLATE("{\"SpecialToken\":{\"id\":\"three\"}}," BOS_PIECE "," TEXT_PIECE
                                        ",{\"SpecialToken\":{\"id\":\"three\"}}")));
    CHECK_EQ_STR(around(&f, "ab"), "1:0-0b 300:0-0s 302:0-0s 300:0-0s 256:0-2 1:2-2s 300:2-2s 302:2-2e");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).bos, 1);
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, 302);
    unload(&f);
}

XD_TEST(post_processors_of_bert_and_roberta_put_cls_and_sep) {
#define CLS_SEP(type) "{\"type\":\"" type "\",\"sep\":[\"</s>\",301],\"cls\":[\"<s>\",300]}"
    fixture f = load(with_post(CLS_SEP("RobertaProcessing")));
    fixture g = load(with_post(POSTS(CLS_SEP("BertProcessing") "," BYTES_POST)));
    CHECK_EQ_STR(around(&f, "a"), "300:0-0b 97:0-1 301:1-1e");
    CHECK_EQ_STR(around(&g, "a"), "300:0-0b 97:0-1 301:1-1e");
    unload(&f);
    unload(&g);
    f = load(with_post(BYTES_POST));
    CHECK_EQ_STR(around(&f, " a"), "32:0-1 97:1-2"); /* trim_offsets would make the first one empty */
    unload(&f);
}

XD_TEST(without_a_post_processor_nothing_is_added) {
    fixture f = load(with_post("null"));
    fixture g = load(byte_level(PLAIN_BYTES, "a b"));
    CHECK_EQ_STR(around(&f, "ab"), "256:0-2");
    CHECK_EQ_STR(around(&g, ""), "");
    CHECK(xd_tokenizer_describe(f.tokenizer).bos == -1 && xd_tokenizer_describe(f.tokenizer).eos == -1);
    unload(&f);
    unload(&g);
}

XD_TEST(the_hash_names_the_vocabulary_and_not_what_is_around_a_text) {
    fixture f = load(with_post("null"));
    fixture g = load(with_post(TEMPLATE(BOS_PIECE "," TEXT_PIECE)));
    CHECK(xd_tokenizer_describe(f.tokenizer).hash == xd_tokenizer_describe(g.tokenizer).hash);
    unload(&f);
    unload(&g);
}

XD_TEST(special_tokens_around_a_text_are_dropped_by_decoding) {
    fixture f = load(with_post(TEMPLATE(BOS_PIECE "," TEXT_PIECE "," EOS_PIECE)));
    const xd_encode_desc desc = { false, true, true, false };
    char out[32];
    size_t length = 0;
    xd_encoding e = { 0, NULL, NULL, NULL };
    CHECK_EQ_INT(xd_encode(f.encoder, "ab!", 3, &desc, &e), XD_OK);
    CHECK(e.count == 4 && e.spans == NULL && e.roles[0] == XD_TOKEN_BOS && e.roles[3] == XD_TOKEN_EOS);
    CHECK_EQ_INT(
        xd_tokenizer_decode(
            f.ctx, f.tokenizer,
            &(xd_decode_desc){
                .ids = e.ids, .count = e.count, .skip_special = true, .out = out, .capacity = sizeof out },
            &length),
        XD_OK);
    CHECK(length == 3 && memcmp(out, "ab!", 3) == 0);
    CHECK_EQ_INT(xd_tokenizer_decode(
                     f.ctx, f.tokenizer,
                     &(xd_decode_desc){ .ids = e.ids, .count = e.count, .out = out, .capacity = sizeof out },
                     &length),
                 XD_OK);
    CHECK(length == 10 && memcmp(out, "<s>ab!</s>", 10) == 0);
    unload(&f);
}

XD_TEST(a_leading_blank_goes_when_bos_stands_before_it) {
    fixture g = load(with_post_processor(sentence_like(LLAMA_NORMALIZER, FALLBACK, true),
                                         "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE
                                         "," TEXT_PIECE "],\"special_tokens\":{\"<s>\":{\"ids\":[1]}}}"));
    const xd_encode_desc desc = { false, false, true, false };
    char out[32];
    size_t length = 0;
    xd_encoding e = { 0, NULL, NULL, NULL };
    CHECK_EQ_STR(around(&g, "hi hi"), "1:0-0b 264:0-2 264:2-5");
    CHECK_EQ_INT(xd_encode(g.encoder, "hi hi", 5, &desc, &e), XD_OK);
    CHECK_EQ_INT(
        xd_tokenizer_decode(
            g.ctx, g.tokenizer,
            &(xd_decode_desc){
                .ids = e.ids, .count = e.count, .skip_special = true, .out = out, .capacity = sizeof out },
            &length),
        XD_OK);
    CHECK(length == 5 && memcmp(out, "hi hi", 5) == 0);
    unload(&g);
}

XD_TEST(post_processors_that_are_not_done_are_refused_by_name_when_they_are_asked_for) {
    const file *unknown = with_post(POSTS(BYTES_POST ",{\"type\":\"Whisperer\"}"));
    xd_tokenizer_desc desc;
    fixture f = load(unknown);
    xd_encoding e = { 7, NULL, NULL, NULL };
    const xd_encode_desc add = { false, false, true, false };
    CHECK_EQ_STR(spans(&f, "ab"), "256:0-2");
    CHECK_EQ_INT(xd_encode(f.encoder, "ab", 2, &add, &e), XD_ERROR_UNSUPPORTED);
    CHECK_EQ_STR(xd_last_error(f.ctx)->message, "add_special: unsupported post-processor Whisperer");
    CHECK(e.count == 7); /* outputs are untouched */
    unload(&f);
    memset(&desc, 0, sizeof desc);
    desc.bos = "<s>"; /* the caller's word stands in for it */
    f = load_with(unknown->text, unknown->bytes, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "300:0-0b 256:0-2");
    unload(&f);
    f = load(with_post(POSTS(TEMPLATE(BOS_PIECE "," TEXT_PIECE) "," CLS_SEP("BertProcessing"))));
    CHECK_EQ_STR(around(&f, "ab"), "add_special: post-processor behind another: BertProcessing");
    unload(&f);
}

XD_TEST(a_template_of_more_tokens_than_fit_is_refused_when_it_is_asked_for) {
    static file f;
    f.bytes = 0;
    put(&f, "{\"type\":\"TemplateProcessing\",\"single\":[");
    for (int i = 0; i < 64; i++) put(&f, BOS_PIECE ",");
    put(&f, TEXT_PIECE "]," TABLE "}");
    fixture g = load(with_post(f.text));
    xd_encoding e = { 0, NULL, NULL, NULL };
    const xd_encode_desc add = { false, false, true, false };
    CHECK_EQ_INT(xd_encode(g.encoder, "ab", 2, &add, &e), XD_OK);
    CHECK(e.count == 65 && e.roles[0] == XD_TOKEN_BOS && e.roles[63] == XD_TOKEN_SPECIAL);
    CHECK(e.roles[64] == XD_TOKEN_TEXT && e.spans[63].end == 0 && e.spans[64].end == 2);
    unload(&g);
    f.bytes -= strlen(TEXT_PIECE "]," TABLE "}");
    put(&f, BOS_PIECE "," TEXT_PIECE "]," TABLE "}");
    g = load(with_post(f.text));
    CHECK_EQ_STR(spans(&g, "ab"), "256:0-2");
    CHECK_EQ_STR(around(&g, "ab"), "add_special: more special tokens than are supported around a text");
    unload(&g);
}

/* Sequences inside each other, deeper than a JSON text may be. */
static const char *nested(int depth) {
    static file f;
    f.bytes = 0;
    for (int i = 0; i < depth; i++) put(&f, "{\"type\":\"Sequence\",\"processors\":[");
    for (int i = 0; i < depth; i++) put(&f, "]}");
    return f.text;
}

XD_TEST(post_processors_that_lie_are_refused_with_their_place) {
    static const struct {
        const char *post, *message;
    } cases[] = {
        { "7", "post-processor at byte 18 has no type" },
        { "\"x\"", "post-processor at byte 18 has no type" },
        { "[]", "post-processor at byte 18 has no type" },
        { "{}", "post-processor at byte 18 has no type" },
        { "{\"type\":[]}", "post-processor at byte 18 has no type" },
        { "{\"type\":\"Sequence\"}", "Sequence at byte 18 has no processors" },
        { "{\"type\":\"Sequence\",\"processors\":{}}", "Sequence at byte 18 has no processors" },
        { POSTS("null"), "post-processor at byte 51 has no type" },
        { POSTS(POSTS("1")), "post-processor at byte 84 has no type" },
        { "{\"type\":\"TemplateProcessing\"}", "byte 18 has no list of pieces called single" },
        { "{\"type\":\"TemplateProcessing\",\"single\":\"<s> $A\"}", "no list of pieces called single" },
        { "{\"type\":\"TemplateProcessing\",\"single\":{\"a\":" TEXT_PIECE "}}",
          "no list of pieces called single" },
        { TEMPLATE(""), "at byte 18 has no sequence A" },
        { TEMPLATE(BOS_PIECE), "at byte 18 has no sequence A" },
        { TEMPLATE(TEXT_PIECE "," TEXT_PIECE),
          "sequence A at byte 93 of a single template, which has A once" },
        { TEMPLATE("{\"Sequence\":{\"id\":\"B\",\"type_id\":0}}"),
          "sequence B at byte 57 of a single template" },
        { TEMPLATE("\"$A\""), "piece at byte 57 of a template is neither" },
        { TEMPLATE("{\"Sequence\":{\"id\":0}}"), "piece at byte 57 of a template is neither" },
        { TEMPLATE("{\"Sequence\":{\"id\":\"A\"},\"SpecialToken\":{\"id\":\"<s>\"}}"),
          "is neither a Sequence" },
        { TEMPLATE("{\"SpecialToken\":{\"id\":\"[CLS]\"}}," TEXT_PIECE),
          "special token \"[CLS]\" at byte 57" },
        { "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE "]}", "has no ids in its table" },
        { "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE
          "],\"special_tokens\":{\"<s>\":{\"ids\":300}}}",
          "has no ids in its table" },
        { "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE
          "],\"special_tokens\":{\"<s>\":{\"ids\":[\"300\"]}}}",
          "TemplateProcessing at byte 18 has a token without id" },
        { "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE
          "],\"special_tokens\":{\"<s>\":{\"ids\":[303]}}}",
          "adds id 303 at byte 132, which is no token; ids are in 0 to 302" },
        { "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE
          "],\"special_tokens\":{\"<s>\":{\"ids\":[-1]}}}",
          "adds id -1 at byte 132" },
        { "{\"type\":\"TemplateProcessing\",\"single\":[" BOS_PIECE
          "],\"special_tokens\":{\"<s>\":{\"ids\":[299]}}}",
          "adds id 299 at byte 132, which is no token; ids are in 0 to 302" },
        { "{\"type\":\"BertProcessing\"}", "BertProcessing at byte 18 has a token without id" },
        { "{\"type\":\"BertProcessing\",\"cls\":[\"<s>\",300],\"sep\":[\"</s>\"]}",
          "has a token without id" },
        { "{\"type\":\"RobertaProcessing\",\"cls\":{\"<s>\":300},\"sep\":[\"</s>\",301]}",
          "has a token without id" },
        { "{\"type\":\"RobertaProcessing\",\"cls\":[\"<s>\",99999999999],\"sep\":[\"</s>\",301]}",
          "adds id 99999999999" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refuse(with_post(cases[i].post), XD_ERROR_FORMAT, cases[i].message);
    refuse(with_post(nested(100)), XD_ERROR_FORMAT, "deep");
    fixture f = load(with_post(nested(20)));
    CHECK_EQ_STR(around(&f, "ab"), "256:0-2");
    unload(&f);
    const file *whole = with_post(POSTS(BYTES_POST "," TEMPLATE(BOS_PIECE "," TEXT_PIECE "," EOS_PIECE)));
    cut_everywhere(whole->text, whole->bytes, NULL, 23);
}

/* ---- the other forms ---- */

XD_TEST(the_caller_may_say_what_stands_around_a_text) {
    static const char *const message = "no special token \"<x>\" to end a text";
    const file *data = with_post(TEMPLATE(BOS_PIECE "," TEXT_PIECE));
    xd_tokenizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.eos = "</s>";
    fixture f = load_with(data->text, data->bytes, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "256:0-2 301:2-2e"); /* instead of all that the file says */
    CHECK(xd_tokenizer_describe(f.tokenizer).bos == -1 && xd_tokenizer_describe(f.tokenizer).eos == 301);
    unload(&f);
    desc.bos = "<n>";
    f = load_with(data->text, data->bytes, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "302:0-0b 256:0-2 301:2-2e");
    unload(&f);
    desc.eos = "<x>";
    refuse_with(data->text, data->bytes, &desc, XD_ERROR_ARGUMENT, message);
}

XD_TEST(presets_of_rank_files_know_their_bos) {
    const xd_tokenizer_special specials[] = { { "<|begin_of_text|>", 9 }, { "<|end_of_text|>", 10 } };
    static const char ranks[] = "YQ== 0\nYg== 1\n";
    xd_tokenizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.preset = XD_TOKENIZER_PRESET_LLAMA3;
    fixture f = load_with(ranks, sizeof ranks - 1, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "128000:0-0b 0:0-1 1:1-2");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).bos, 128000);
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, 128001);
    unload(&f);
    desc.preset = XD_TOKENIZER_PRESET_LLAMA4;
    f = load_with(ranks, sizeof ranks - 1, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "add_special: there is no special token <|begin_of_text|>");
    unload(&f);
    desc.specials = specials;
    desc.special_count = 2;
    f = load_with(ranks, sizeof ranks - 1, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "9:0-0b 0:0-1 1:1-2");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, 10);
    unload(&f);
    memset(&desc, 0, sizeof desc);
    desc.preset = XD_TOKENIZER_PRESET_CL100K;
    f = load_with(ranks, sizeof ranks - 1, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "0:0-1 1:1-2");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).bos, -1);
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, 100257);
    unload(&f);
    desc.preset = XD_TOKENIZER_PRESET_NONE;
    desc.pattern = "[a-z]";
    f = load_with(ranks, sizeof ranks - 1, &desc);
    CHECK_EQ_STR(around(&f, "ab"), "0:0-1 1:1-2");
    CHECK(xd_tokenizer_describe(f.tokenizer).bos == -1 && xd_tokenizer_describe(f.tokenizer).eos == -1);
    unload(&f);
}

XD_TEST(tekken_files_have_theirs_by_name) {
    static const char text[] = "{\"config\":{\"pattern\":\"[a-z]\",\"default_vocab_size\":5,\"default_num_"
                               "special_tokens\":%d},\"vocab\":"
                               "[{\"rank\":0,\"token_bytes\":\"YQ==\"}]%s}";
    char data[256];
    snprintf(data, sizeof data, text, 4, "");
    fixture f = load_with(data, strlen(data), NULL);
    CHECK_EQ_STR(around(&f, "a"), "1:0-0b 4:0-1");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, 2);
    unload(&f);
    snprintf(data, sizeof data, text, 4, ",\"special_tokens\":[{\"rank\":3,\"token_str\":\"<s>\"}]");
    f = load_with(data, strlen(data), NULL);
    CHECK_EQ_STR(around(&f, "a"), "3:0-0b 4:0-1");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).eos, -1);
    unload(&f);
    snprintf(data, sizeof data, text, 1, "");
    f = load_with(data, strlen(data), NULL);
    CHECK_EQ_STR(around(&f, "a"), "add_special: there is no special token <s>");
    unload(&f);
}

XD_TEST_MAIN()
