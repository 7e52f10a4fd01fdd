/* What tokenizers make of texts, with vocabularies made by hand. Real files are compared with the packages that own
 * them by tests/tokenizers/compare.py. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "tokenizer_make.h"

/* ---- byte level ---- */

XD_TEST(merges_go_by_rank_and_from_left_to_right) {
    fixture f = load(byte_level(PLAIN_BYTES, "b c|a b|ab c|a a"));
    CHECK_EQ_STR(ids(&f, "abc"), "97 256");
    CHECK_EQ_STR(ids(&f, "ab"), "257");
    CHECK_EQ_STR(ids(&f, "aaa"), "259 97");
    CHECK_EQ_STR(ids(&f, "aabab"), "97 257 257");
    CHECK_EQ_STR(ids(&f, ""), "");
    CHECK_EQ_STR(spans(&f, "aaabc"), "259:0-2 97:2-3 256:3-5");
    unload(&f);
}

XD_TEST(merges_as_texts_and_as_pairs_are_one_tokenizer) {
    fixture f = load(byte_level_with("null", PLAIN_BYTES, "", "", "b c|a b", false));
    fixture g = load(byte_level_with("null", PLAIN_BYTES, "", "", "b c|a b", true));
    fixture h = load(byte_level_with("null", PLAIN_BYTES, "", "", "a b|b c", true));
    CHECK(xd_tokenizer_describe(f.tokenizer).hash == xd_tokenizer_describe(g.tokenizer).hash);
    CHECK(xd_tokenizer_describe(f.tokenizer).hash != xd_tokenizer_describe(h.tokenizer).hash);
    CHECK_EQ_STR(ids(&g, "abc"), "97 256");
    CHECK_EQ_INT(xd_tokenizer_describe(g.tokenizer).size, 258);
    CHECK_EQ_INT(xd_tokenizer_describe(g.tokenizer).tokens, 258);
    unload(&f);
    unload(&g);
    unload(&h);
}

XD_TEST(ignore_merges_keeps_a_piece_that_is_a_token) {
    fixture f =
        load(byte_level_with("null", GPT2_BYTES, "\"ignore_merges\":true,", "", "b c|a b|ab c", false));
    CHECK_EQ_STR(ids(&f, "abc abc"), "258 32 97 256");
    unload(&f);
}

XD_TEST(any_bytes_survive_a_byte_level_tokenizer) {
    fixture f = load(byte_level(GPT2_BYTES, "t h|th e|\xc4\xa0 the|\xc3\x83 \xc2\xa9|1 2"));
    uint64_t state = 5;
    char text[300];
    CHECK(survives(&f, "caf\xc3\xa9 the 12", 13));
    for (int round = 0; round < 500; round++) {
        const size_t bytes = (size_t)(round % (int)sizeof text);
        for (size_t i = 0; i < bytes; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            text[i] = (char)(round % 2 ? state >> 40 : (uint64_t) " the12"[(state >> 40) % 6]);
        }
        CHECK(survives(&f, text, bytes));
    }
    unload(&f);
}

/* Merging by definition: again and again the pair of lowest rank, the leftmost of it. Merge ids grow with the
 * rank. */
static int naive(const char *text, const int merges[][2], int merge_count, int *out) {
    int count = (int)strlen(text);
    for (int i = 0; i < count; i++) out[i] = (unsigned char)text[i];
    for (int m = 0; m < merge_count; m++) {
        int at = -1;
        for (int i = 0; i + 1 < count && at < 0; i++)
            if (out[i] == merges[m][0] && out[i + 1] == merges[m][1]) at = i;
        if (at < 0) continue;
        out[at] = 256 + m;
        memmove(out + at + 1, out + at + 2, (size_t)(count - at - 2) * sizeof *out);
        count--;
        m = -1; /* a new pair may have a lower rank */
    }
    return count;
}

XD_TEST(long_and_short_pieces_merge_as_the_definition_says) {
    static const int merges[][2] = { { 'a', 'b' }, { 'b', 'a' }, { 256, 'a' }, { 'a', 'a' },
                                     { 256, 256 }, { 257, 'b' }, { 258, 259 }, { 260, 'b' } };
    fixture f = load(byte_level(PLAIN_BYTES, "a b|b a|ab a|a a|ab ab|ba b|aba aa|abab b"));
    char text[200];
    int expected[200];
    uint64_t state = 3;
    for (int round = 0; round < 400; round++) {
        const int bytes = round % 199;
        for (int i = 0; i < bytes; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            text[i] = (state >> 60) % 3 ? 'a' : 'b';
        }
        text[bytes] = '\0';
        const int count = naive(text, merges, 8, expected);
        xd_encoding e;
        CHECK_EQ_INT(xd_encode(f.encoder, text, (size_t)bytes, NULL, &e), XD_OK);
        CHECK_EQ_INT(e.count, count);
        for (int i = 0; i < count && e.count == count; i++) CHECK_EQ_INT(e.ids[i], expected[i]);
    }
    unload(&f);
}

XD_TEST(a_long_piece_takes_no_square_time) {
    const size_t bytes = 2000000;
    fixture f = load(byte_level(PLAIN_BYTES, "a a|aa aa|aaaa aaaa"));
    char *text = (char *)malloc(bytes);
    xd_encoding e;
    memset(text, 'a', bytes);
    CHECK_EQ_INT(xd_encode(f.encoder, text, bytes, NULL, &e), XD_OK);
    CHECK_EQ_INT(e.count, bytes / 8);
    CHECK_EQ_INT(e.spans[e.count - 1].end, bytes);
    free(text);
    unload(&f);
}

XD_TEST(missing_bytes_and_gaps_are_legal) {
    static const char text[] =
        "{\"pre_tokenizer\":" PLAIN_BYTES ",\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":3,\"b\":7,\"ab\":9},"
        "\"merges\":[\"a b\"]}}";
    fixture f = load_with(text, sizeof text - 1, NULL);
    const xd_tokenizer_info info = xd_tokenizer_describe(f.tokenizer);
    size_t length;
    const int32_t gap[] = { 3, 4 };
    CHECK_EQ_INT(info.size, 10);
    CHECK_EQ_INT(info.tokens, 3);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 4).kind, XD_TOKEN_KIND_NONE);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, -1).kind, XD_TOKEN_KIND_NONE);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 10).kind, XD_TOKEN_KIND_NONE);
    CHECK_EQ_STR(spans(&f, "abxa"), "9:0-2 3:3-4");
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "ab", 2), 9);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "x", 1), -1);
    CHECK_EQ_INT(
        xd_tokenizer_decode(f.ctx, f.tokenizer, &(xd_decode_desc){ .ids = gap, .count = 2 }, &length),
        XD_ERROR_DATA);
    CHECK(strstr(xd_last_error(f.ctx)->message, "id 4 at position 1") != NULL);
    unload(&f);
}

XD_TEST(decoding_tells_the_length_it_needs) {
    fixture f = load(byte_level(PLAIN_BYTES, "a b"));
    const int32_t some[] = { 256, 'c', 256 };
    char out[4] = "zzz";
    size_t length = 0;
    CHECK_EQ_INT(
        xd_tokenizer_decode(f.ctx, f.tokenizer, &(xd_decode_desc){ .ids = some, .count = 3 }, &length),
        XD_OK);
    CHECK_EQ_INT(length, 5);
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer,
                                     &(xd_decode_desc){ .ids = some, .count = 3, .out = out, .capacity = 3 },
                                     &length),
                 XD_OK);
    CHECK_EQ_INT(length, 5);
    CHECK_EQ_STR(out, "abc");
    unload(&f);
}

/* ---- added tokens ---- */

XD_TEST(special_tokens_are_parsed_only_when_asked) {
    fixture f = load(byte_level_with(
        "null", PLAIN_BYTES, "",
        ADDED(300, "<s>", true, "") "," ADDED(301, "<s>!", true, "") "," ADDED(302, "<n>", false, ""), "",
        false));
    char out[32];
    size_t length = 0;
    const int32_t some[] = { 300, 'a', 302 };
    CHECK_EQ_STR(ids(&f, "a<s>"), "97 60 115 62");
    CHECK_EQ_STR(ids_of(&f, "a<s><s>!<s", true, true), "97:0-1 300:1-4 301:4-8 60:8-9 115:9-10");
    CHECK_EQ_STR(ids(&f, "<n>a"), "302 97");
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "<s>"), 300);
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "<n>"), 302);
    CHECK_EQ_INT(xd_tokenizer_find_special(f.tokenizer, "a"), -1);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 300).kind, XD_TOKEN_KIND_SPECIAL);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 302).kind, XD_TOKEN_KIND_ADDED);
    CHECK_EQ_INT(xd_tokenizer_decode(
                     f.ctx, f.tokenizer,
                     &(xd_decode_desc){
                         .ids = some, .count = 3, .skip_special = true, .out = out, .capacity = sizeof out },
                     &length),
                 XD_OK);
    CHECK_EQ_INT(length, 4);
    CHECK_EQ_INT(
        xd_tokenizer_decode(f.ctx, f.tokenizer,
                            &(xd_decode_desc){ .ids = some, .count = 3, .out = out, .capacity = sizeof out },
                            &length),
        XD_OK);
    CHECK(length == 7 && memcmp(out, "<s>a<n>", 7) == 0);
    unload(&f);
}

XD_TEST(a_special_token_that_is_not_parsed_hides_what_is_inside_it) {
    fixture f = load(byte_level_with("null", PLAIN_BYTES, "",
                                     ADDED(300, "xyz", true, "") "," ADDED(301, "yz", false, ""), "", false));
    CHECK_EQ_STR(ids(&f, "xyzyz"), "120 121 122 301");
    CHECK_EQ_STR(ids_of(&f, "xyzyz", true, false), "300 301");
    unload(&f);
}

XD_TEST(added_tokens_may_strip_and_may_want_whole_words) {
    fixture f = load(byte_level_with(
        "null", PLAIN_BYTES, "",
        ADDED(300, "<l>", true, ",\"lstrip\":true") "," ADDED(301, "<r>", true, ",\"rstrip\":true") "," ADDED(
            302, "wo", false, ",\"single_word\":true"),
        "", false));
    CHECK_EQ_STR(ids_of(&f, "a  <l> b", true, true), "97:0-1 300:1-6 32:6-7 98:7-8");
    CHECK_EQ_STR(ids_of(&f, "a <r>\n b", true, true), "97:0-1 32:1-2 301:2-7 98:7-8");
    CHECK_EQ_STR(ids_of(&f, "<r>  <l>", true, true), "301:0-5 300:5-8");
    CHECK_EQ_STR(ids(&f, "wo"), "302");
    CHECK_EQ_STR(ids(&f, "(wo)"), "40 302 41");
    CHECK_EQ_STR(ids(&f, "wow"), "119 111 119");
    CHECK_EQ_STR(ids(&f, "two"), "116 119 111");
    unload(&f);
}

XD_TEST(normalized_added_tokens_are_found_after_normalisation) {
    fixture f = load(byte_level_with(
        "{\"type\":\"NFKC\"}", PLAIN_BYTES, "",
        "{\"id\":300,\"content\":\"\xef\xac\x81n\",\"special\":false,\"normalized\":true}", "", false));
    CHECK_EQ_STR(spans(&f, "afin"), "97:0-1 300:1-4");
    CHECK_EQ_STR(spans(&f, "a\xef\xac\x81n!"), "97:0-1 300:1-5 33:5-6");
    unload(&f);
}

/* ---- normalizers ---- */

XD_TEST(a_cluster_that_normalisation_changes_is_atomic) {
    fixture f = load(byte_level_with("{\"type\":\"NFC\"}", PLAIN_BYTES, "", "", "\xc3\x83 \xc2\xa9", false));
    CHECK_EQ_STR(spans(&f, "e\xcc\x81!"), "256:0-3 33:3-4");
    CHECK_EQ_STR(spans(&f, "\xc3\xa9!"), "256:0-2 33:2-3");
    CHECK_EQ_STR(spans(&f, "xa\xcc\x81y"),
                 "120:0-1 195:1-4 161:1-4 121:4-5");                     /* U+00E1: two tokens, one cluster */
    CHECK_EQ_STR(spans(&f, "x\xe2\x84\xab"), "120:0-1 195:1-4 133:1-4"); /* Angstrom sign */
    CHECK_EQ_STR(spans(&f, "\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab"), "237:0-9 149:0-9 156:0-9"); /* Hangul */
    CHECK_EQ_STR(spans(&f, "a\xcc\x87\xcc\xa3"), "225:0-5 186:0-5 161:0-5 204:0-5 135:0-5"); /* reordered */
    CHECK_EQ_STR(spans(&f, "\xcc\x81z\xff\xcc\x81"), "204:0-1 129:1-2 122:2-3 255:3-4 204:4-5 129:5-6");
    unload(&f);
}

XD_TEST(nfkc_unfolds_what_nfc_keeps) {
    fixture f = load(byte_level_with("{\"type\":\"NFKC\"}", PLAIN_BYTES, "", "", "f i", false));
    fixture g = load(byte_level_with("{\"type\":\"NFC\"}", PLAIN_BYTES, "", "", "f i", false));
    CHECK_EQ_STR(spans(&f, "\xef\xac\x81n"), "256:0-3 110:3-4");
    CHECK_EQ_STR(ids(&g, "\xef\xac\x81n"), "239 172 129 110");
    CHECK_EQ_STR(spans(&f, "f\xef\xac\x81"), "102:0-1 256:1-4");
    CHECK_EQ_STR(spans(&f, "\xef\xbe\x8a\xef\xbe\x9e"),
                 "227:0-6 131:0-6 144:0-6"); /* half-width HA and voicing: BA */
    CHECK_EQ_STR(spans(&f, "\xc2\xbd"), "49:0-2 226:0-2 129:0-2 132:0-2 50:0-2");
    CHECK_EQ_STR(spans(&f, "\xe1\xba\x9b\xcc\xa3"), "225:0-5 185:0-5 169:0-5"); /* long s, two dots: U+1E69 */
    unload(&f);
    unload(&g);
}

XD_TEST(replacing_goes_by_text_or_by_pattern) {
    fixture f =
        load(byte_level_with("{\"type\":\"Sequence\",\"normalizers\":["
                             "{\"type\":\"Replace\",\"pattern\":{\"String\":\".*\"},\"content\":\"x\"},"
                             "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"[0-9]+\"},\"content\":\"12\"},"
                             "{\"type\":\"Replace\",\"pattern\":{\"String\":\"-\"},\"content\":\"\"}]}",
                             PLAIN_BYTES, "", "", "", false));
    CHECK_EQ_STR(spans(&f, "a.*b"), "97:0-1 120:1-3 98:3-4");
    CHECK_EQ_STR(spans(&f, "7007a"), "49:0-4 50:0-4 97:4-5");
    CHECK_EQ_STR(spans(&f, "a--b"), "97:0-1 98:3-4");
    CHECK_EQ_STR(spans(&f, "--"), "");
    unload(&f);
}

/* ---- pre-tokenizers ---- */

#define SPLIT(pattern, behavior) \
    "{\"type\":\"Split\",\"pattern\":" pattern ",\"behavior\":\"" behavior "\",\"invert\":false}"
#define STAGES(first) "{\"type\":\"Sequence\",\"pretokenizers\":[" first "," PLAIN_BYTES "]}"
#define DASH "{\"String\":\"-\"}"

XD_TEST(splits_do_with_their_matches_what_they_say) {
    /* Tokens: -- 256, a- 257, -b 258, a-- 259, --b 260, ab 261. */
    static const char merges[] = "- -|a -|- b|a- -|- -b|a b";
    static const char whole[] = "\"ignore_merges\":true,";
    fixture f = load(byte_level_with("null", STAGES(SPLIT(DASH, "Isolated")), whole, "", merges, false));
    CHECK_EQ_STR(ids(&f, "a--b"), "97 45 45 98");
    unload(&f);
    f = load(byte_level_with("null", STAGES(SPLIT(DASH, "Removed")), whole, "", merges, false));
    CHECK_EQ_STR(spans(&f, "a--b"), "97:0-1 98:3-4");
    unload(&f);
    f = load(byte_level_with("null", STAGES(SPLIT(DASH, "Contiguous")), whole, "", merges, false));
    CHECK_EQ_STR(ids(&f, "a--b-"), "97 256 98 45");
    unload(&f);
    f = load(byte_level_with("null", STAGES(SPLIT(DASH, "MergedWithPrevious")), whole, "", merges, false));
    CHECK_EQ_STR(ids(&f, "a--ba"), "257 45 98 97");
    unload(&f);
    f = load(byte_level_with("null", STAGES(SPLIT(DASH, "MergedWithNext")), whole, "", merges, false));
    CHECK_EQ_STR(ids(&f, "a--b-"), "97 45 258 45");
    unload(&f);
    f = load(byte_level_with(
        "null", STAGES("{\"type\":\"Split\",\"pattern\":" DASH ",\"behavior\":\"Removed\",\"invert\":true}"),
        whole, "", merges, false));
    CHECK_EQ_STR(ids(&f, "a--b"), "45 45");
    unload(&f);
    f = load(byte_level_with("null",
                             STAGES("{\"type\":\"Split\",\"pattern\":{\"String\":\"ab\"},"
                                    "\"behavior\":\"MergedWithPrevious\",\"invert\":true}"),
                             whole, "", "a b|ab ab|b -|ab -", false));
    CHECK_EQ_STR(ids(&f, "abab-"), "256 259"); /* "ab", "ab-" */
    unload(&f);
    f = load(
        byte_level_with("null", STAGES(SPLIT("{\"Regex\":\"b$\"}", "Removed")), whole, "", "a b", false));
    CHECK_EQ_STR(spans(&f, "ab\nab"), "97:0-1 10:2-3 97:3-4"); /* each line has an end */
    unload(&f);
}

XD_TEST(stages_cut_the_pieces_of_the_stage_before) {
    fixture f = load(byte_level("{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_"
                                "digits\":true}," GPT2_BYTES "]}",
                                "1 2|a b|\xc4\xa0 a"));
    fixture g = load(byte_level("{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_"
                                "digits\":false}," PLAIN_BYTES "]}",
                                "1 2|a 1|\xc4\xa0 a"));
    CHECK_EQ_STR(ids(&f, "12ab"), "49 50 257");
    CHECK_EQ_STR(ids(&f, " a 1"), "258 32 49");
    CHECK_EQ_STR(ids(&g, "12a12"), "256 97 256");
    unload(&f);
    unload(&g);
}

XD_TEST(a_byte_level_prefix_is_a_blank_that_is_not_in_the_text) {
    fixture f = load(byte_level("{\"type\":\"ByteLevel\",\"add_prefix_space\":true}", "\xc4\xa0 a"));
    char out[16];
    size_t length = 0;
    const int32_t some[] = { 256, 'b' };
    CHECK(xd_tokenizer_describe(f.tokenizer).adds_prefix);
    CHECK_EQ_STR(spans(&f, "ab"), "256:0-1 98:1-2");
    CHECK_EQ_STR(spans(&f, " a"), "256:0-2");
    CHECK_EQ_STR(spans(&f, "b"), "32:0-0 98:0-1");
    CHECK_EQ_INT(
        xd_tokenizer_decode(f.ctx, f.tokenizer,
                            &(xd_decode_desc){ .ids = some, .count = 2, .out = out, .capacity = sizeof out },
                            &length),
        XD_OK);
    CHECK(length == 2 && memcmp(out, "ab", 2) == 0);
    unload(&f);
}

/* A name with a blank spells no bytes, so no text becomes token 2 or 3; token 1 has the bytes of 3. */
XD_TEST(tokens_that_no_text_becomes_are_found_by_their_bytes) {
    static const char data[] = "{\"pre_tokenizer\":" PLAIN_BYTES ",\"model\":{\"type\":\"BPE\",\"vocab\":"
                               "{\"a\":0,\"\xc4\xa0"
                               "a\":1,\" b\":2,\" a\":3},\"merges\":[]}}";
    fixture f = load_with(data, sizeof data - 1, NULL);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "a", 1), 0);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, " a", 2), 1);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, " b", 2), 2);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "b", 1), -1);
    CHECK_EQ_STR(ids(&f, "a"), "0");
    unload(&f);
}

/* ---- characters as symbols ---- */

XD_TEST(characters_fall_back_to_bytes) {
    fixture f = load(sentence_like(LLAMA_NORMALIZER ",\"pre_tokenizer\":null", FALLBACK, true));
    char out[64];
    size_t length = 0;
    CHECK_EQ_STR(spans(&f, "hi hi"), "264:0-2 264:2-5");
    CHECK_EQ_STR(spans(&f, " hi"), "259:0-0 264:0-3");
    CHECK_EQ_STR(spans(&f, "\xc3\xa9z"), "259:0-0 262:0-2 125:2-3");
    CHECK_EQ_STR(spans(&f, "h\xe4\xb8\xad"), "259:0-0 260:0-1 231:1-2 187:2-3 176:3-4");
    CHECK_EQ_STR(spans(&f, "\xff"), "259:0-0 258:0-1");
    CHECK_EQ_STR(ids_of(&f, "<s>hi", true, true), "1:0-3 264:3-5");
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 264).length, 3);
    CHECK(memcmp(xd_tokenizer_token(f.tokenizer, 264).bytes, " hi", 3) == 0);
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 13).kind, XD_TOKEN_KIND_BYTE);
    CHECK_EQ_INT(*xd_tokenizer_token(f.tokenizer, 13).bytes, '\n');
    CHECK_EQ_INT(xd_tokenizer_token(f.tokenizer, 0).kind, XD_TOKEN_KIND_UNKNOWN);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, " hi", 3), 264);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "h", 1), 260);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, "z", 1), 125);
    const int32_t some[] = { 1, 264, 264, 125 };
    CHECK_EQ_INT(xd_tokenizer_decode(
                     f.ctx, f.tokenizer,
                     &(xd_decode_desc){
                         .ids = some, .count = 4, .skip_special = true, .out = out, .capacity = sizeof out },
                     &length),
                 XD_OK);
    CHECK(length == 6 && memcmp(out, "hi hiz", 6) == 0);
    unload(&f);
}

XD_TEST(without_fallback_characters_are_unknown_together_or_apart) {
    fixture f = load(sentence_like(LLAMA_NORMALIZER, "\"fuse_unk\":true,", false));
    fixture g = load(sentence_like(LLAMA_NORMALIZER, "", false));
    CHECK_EQ_STR(spans(&f, "hxyi"), "259:0-0 260:0-1 0:1-3 261:3-4");
    CHECK_EQ_STR(spans(&g, "hxyi"), "259:0-0 260:0-1 0:1-2 0:2-3 261:3-4");
    unload(&f);
    unload(&g);
}

XD_TEST(metaspace_prepends_always_first_or_never) {
#define METASPACE(scheme)                                                                                 \
    "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"" MARK "\",\"prepend_scheme\":\"" scheme \
    "\"}"
    fixture f = load(sentence_like(METASPACE("always"), FALLBACK, true));
    CHECK_EQ_STR(ids_of(&f, "hi<s>hi  hi", true, true), "264:0-2 1:2-5 264:5-7 259:7-8 264:8-11");
    unload(&f);
    f = load(sentence_like(METASPACE("first"), FALLBACK, true));
    CHECK_EQ_STR(ids_of(&f, "hi<s>hi", true, true), "264:0-2 1:2-5 263:5-7");
    unload(&f);
    f = load(sentence_like(METASPACE("never"), FALLBACK, true));
    CHECK_EQ_STR(ids_of(&f, "hi hi", true, true), "263:0-2 264:2-5");
    unload(&f);
}

XD_TEST_MAIN()
