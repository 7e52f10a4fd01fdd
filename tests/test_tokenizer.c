/* Tokenizers made by hand: every form of file, every stage, and files that lie. Real files are compared with
 * the packages that own them by tests/tokenizers/compare.py. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

#include <stdlib.h>

static xd_ctx *new_ctx(void) {
    xd_ctx *ctx = NULL;
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    return ctx;
}

/* ---- making files ---- */

/* Text that is put together; the longest file of this suite has 20 kB. */
typedef struct file {
    char text[65536];
    size_t bytes;
} file;

static void put(file *f, const char *text) {
    const size_t length = strlen(text);
    memcpy(f->text + f->bytes, text, length + 1);
    f->bytes += length;
}

/* The spelling of a byte in a byte-level vocabulary, as UTF-8. */
static void put_spelling(file *f, int byte) {
    char utf8[3] = { 0, 0, 0 };
    int point = byte;
    if (byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)
        point = 256 + (byte <= 32 ? byte : byte <= 160 ? byte - 127 + 33 : 67);
    if (byte == '"' || byte == '\\') put(f, "\\");
    if (point < 128) {
        utf8[0] = (char)point;
    } else {
        utf8[0] = (char)(0xc0 | point >> 6);
        utf8[1] = (char)(0x80 | (point & 63));
    }
    put(f, utf8);
}

/* Takes "left right" and the bar after it from a list. */
static bool next_merge(const char **list, char left[64], char right[64]) {
    int read = 0;
    if (sscanf(*list, "%63[^ ] %63[^|]%n", left, right, &read) != 2) return false;
    *list += read;
    if (**list == '|') (*list)++;
    return true;
}

/* Ids 0 to 255 are the bytes; merge i of the list (in its spelling, "a b|ab c|...") makes id 256 + i. */
static const file *byte_level_with(const char *normalizer, const char *pre_tokenizer, const char *model,
                                   const char *added, const char *merges, bool pairs) {
    static file f;
    char number[32], left[64], right[64];
    int id = 256;
    f.bytes = 0;
    put(&f, "{\"version\":\"1.0\",\"added_tokens\":[");
    put(&f, added);
    put(&f, "],\"normalizer\":");
    put(&f, normalizer);
    put(&f, ",\"pre_tokenizer\":");
    put(&f, pre_tokenizer);
    put(&f, ",\"model\":{\"type\":\"BPE\",");
    put(&f, model);
    put(&f, "\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        put(&f, byte ? ",\"" : "\"");
        put_spelling(&f, byte);
        snprintf(number, sizeof number, "\":%d", byte);
        put(&f, number);
    }
    for (const char *m = merges; next_merge(&m, left, right);) {
        put(&f, ",\"");
        put(&f, left);
        put(&f, right);
        snprintf(number, sizeof number, "\":%d", id++);
        put(&f, number);
    }
    put(&f, "},\"merges\":[");
    const char *comma = "";
    for (const char *m = merges; next_merge(&m, left, right); comma = ",") {
        put(&f, comma);
        put(&f, pairs ? "[\"" : "\"");
        put(&f, left);
        put(&f, pairs ? "\",\"" : " ");
        put(&f, right);
        put(&f, pairs ? "\"]" : "\"");
    }
    put(&f, "]}}");
    return &f;
}

#define PLAIN_BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define GPT2_BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"

static const file *byte_level(const char *pre_tokenizer, const char *merges) {
    return byte_level_with("null", pre_tokenizer, "", "", merges, false);
}

/* ---- using them ---- */

typedef struct fixture {
    xd_ctx *ctx;
    xd_tokenizer *tokenizer;
    xd_encoder *encoder;
} fixture;

static fixture load_with(const void *data, size_t bytes, const xd_tokenizer_desc *desc) {
    fixture f = { new_ctx(), NULL, NULL };
    if (xd_tokenizer_parse(f.ctx, data, bytes, desc, &f.tokenizer) != XD_OK)
        CHECK_EQ_STR(xd_last_error(f.ctx)->message, "");
    else
        CHECK_EQ_INT(xd_encoder_create(f.ctx, f.tokenizer, &f.encoder), XD_OK);
    return f;
}

static fixture load(const file *data) {
    return load_with(data->text, data->bytes, NULL);
}

static void unload(fixture *f) {
    xd_encoder_destroy(f->encoder);
    xd_tokenizer_destroy(f->tokenizer);
    xd_ctx_destroy(f->ctx);
}

/* "id id ..." or, with spans, "id:begin-end ...". */
static const char *ids_of(const fixture *f, const char *text, bool special, bool spans) {
    static char out[8192];
    const xd_encode_desc desc = { special, !spans };
    xd_encoding e = { 0, NULL, NULL };
    size_t used = 0;
    out[0] = '\0';
    if (!f->encoder) return "no encoder";
    if (xd_encode(f->encoder, text, strlen(text), &desc, &e) != XD_OK) return xd_last_error(f->ctx)->message;
    CHECK((e.spans != NULL) == spans);
    for (int64_t i = 0; i < e.count && used < sizeof out - 64; i++) {
        used += (size_t)snprintf(out + used, 64, i ? " %d" : "%d", (int)e.ids[i]);
        if (spans)
            used += (size_t)snprintf(out + used, 48, ":%d-%d", (int)e.spans[i].begin, (int)e.spans[i].end);
    }
    return out;
}

static const char *ids(const fixture *f, const char *text) {
    return ids_of(f, text, false, false);
}
static const char *spans(const fixture *f, const char *text) {
    return ids_of(f, text, false, true);
}

/* Encodes and decodes: the same bytes again? Spans must tile the text. */
static bool survives(const fixture *f, const char *text, size_t bytes) {
    char back[4096];
    xd_encoding e;
    size_t length = 0;
    int64_t at = 0;
    if (xd_encode(f->encoder, text, bytes, NULL, &e) != XD_OK) return false;
    for (int64_t i = 0; i < e.count; at = e.spans[i++].end)
        if (e.spans[i].begin != at || e.spans[i].end < at) return false;
    if (at != (int64_t)bytes) return false;
    if (xd_tokenizer_decode(f->ctx, f->tokenizer, e.ids, e.count, false, back, sizeof back, &length) != XD_OK)
        return false;
    return length == bytes && memcmp(back, text, bytes) == 0;
}

/* The file is refused with this result and a message that holds `expected`. It stands in memory of its exact
 * size. */
static void refuse_with(const void *data, size_t bytes, const xd_tokenizer_desc *desc, xd_result result,
                        const char *expected) {
    xd_ctx *ctx = new_ctx();
    xd_tokenizer *tokenizer = NULL;
    void *copy = malloc(bytes + 1);
    memcpy(copy, data, bytes);
    CHECK_EQ_INT(xd_tokenizer_parse(ctx, copy, bytes, desc, &tokenizer), result);
    CHECK(tokenizer == NULL);
    if (!strstr(xd_last_error(ctx)->message, expected)) CHECK_EQ_STR(xd_last_error(ctx)->message, expected);
    free(copy);
    xd_ctx_destroy(ctx);
}

static void refuse(const file *f, xd_result result, const char *expected) {
    refuse_with(f->text, f->bytes, NULL, result, expected);
}

/* Every beginning of a file is refused, or is a file too; nothing worse happens. */
static void cut_everywhere(const void *data, size_t bytes, const xd_tokenizer_desc *desc, size_t step) {
    xd_ctx *ctx = new_ctx();
    for (size_t length = 0; length < bytes; length += step) {
        xd_tokenizer *tokenizer = NULL;
        void *copy = malloc(length + 1);
        memcpy(copy, data, length);
        if (xd_tokenizer_parse(ctx, copy, length, desc, &tokenizer) != XD_OK) CHECK(tokenizer == NULL);
        xd_tokenizer_destroy(tokenizer);
        free(copy);
    }
    xd_ctx_destroy(ctx);
}

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
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, gap, 2, false, NULL, 0, &length), XD_ERROR_DATA);
    CHECK(strstr(xd_last_error(f.ctx)->message, "id 4 at position 1") != NULL);
    unload(&f);
}

XD_TEST(decoding_tells_the_length_it_needs) {
    fixture f = load(byte_level(PLAIN_BYTES, "a b"));
    const int32_t some[] = { 256, 'c', 256 };
    char out[4] = "zzz";
    size_t length = 0;
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, some, 3, false, NULL, 0, &length), XD_OK);
    CHECK_EQ_INT(length, 5);
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, some, 3, false, out, 3, &length), XD_OK);
    CHECK_EQ_INT(length, 5);
    CHECK_EQ_STR(out, "abc");
    unload(&f);
}

/* ---- added tokens ---- */

#define ADDED(id, content, special, flags) \
    "{\"id\":" #id ",\"content\":\"" content "\",\"special\":" #special ",\"normalized\":false" flags "}"

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
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, some, 3, true, out, sizeof out, &length), XD_OK);
    CHECK_EQ_INT(length, 4);
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, some, 3, false, out, sizeof out, &length), XD_OK);
    CHECK(length == 7 && memcmp(out, "<s>a<n>", 7) == 0);
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
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, some, 2, false, out, sizeof out, &length), XD_OK);
    CHECK(length == 2 && memcmp(out, "ab", 2) == 0);
    unload(&f);
}

/* ---- characters as symbols ---- */

#define MARK "\xe2\x96\x81"

/* Like Llama 2: 0 unknown, 1 and 2 special, 3 to 258 bytes, then characters and merges. */
static const file *sentence_like(const char *stages, const char *flags, bool bytes) {
    static file f;
    char line[64];
    f.bytes = 0;
    put(&f, "{\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true,\"normalized\":false}],");
    put(&f, stages);
    put(&f, ",\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",");
    put(&f, flags);
    put(&f, "\"vocab\":{\"<unk>\":0,\"<s>\":1,\"</s>\":2");
    for (int i = 0; i < 256 && bytes; i++) {
        snprintf(line, sizeof line, ",\"<0x%02X>\":%d", i, 3 + i);
        put(&f, line);
    }
    put(&f, ",\"" MARK "\":259,\"h\":260,\"i\":261,\"\xc3\xa9\":262,\"hi\":263,\"" MARK
            "hi\":264,\"" MARK MARK "\":265},\"merges\":[\"h i\",\"" MARK " hi\",\"" MARK " " MARK "\"]}}");
    return &f;
}

#define LLAMA_NORMALIZER                                                                               \
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"" MARK \
    "\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"" MARK "\"}]}"
#define FALLBACK "\"byte_fallback\":true,\"fuse_unk\":true,"

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
    CHECK_EQ_INT(xd_tokenizer_decode(f.ctx, f.tokenizer, some, 4, true, out, sizeof out, &length), XD_OK);
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

XD_TEST(rank_files_merge_by_the_rank_of_the_result) {
    const xd_tokenizer_special specials[] = { { "<|x|>", 270 } };
    xd_tokenizer_desc desc = { XD_TOKENIZER_PRESET_NONE, " ?[a-z]+|\\s+|[^a-z\\s]+", specials, 1, 0 };
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
    const xd_tokenizer_desc any = { XD_TOKENIZER_PRESET_GPT2, NULL, NULL, 0, 0 };
    const xd_tokenizer_desc wrong = { (xd_tokenizer_preset)99, NULL, NULL, 0, 0 };
    const xd_tokenizer_desc bad = { XD_TOKENIZER_PRESET_NONE, "a(", NULL, 0, 0 };
    const xd_tokenizer_special taken[] = { { "x", 97 } };
    const xd_tokenizer_desc conflict = { XD_TOKENIZER_PRESET_GPT2, NULL, taken, 1, 0 };
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
    CHECK_EQ_STR(spans(&f, "i[user]z"), "262:0-0 264:0-1 2:1-7 262:7-7 125:7-8");
    CHECK_EQ_STR(spans(&f, "<s>"), "262:0-0 63:0-1 118:1-2 65:2-3");
    CHECK_EQ_STR(ids_of(&f, "<s>hi", true, false), "1 261");
    CHECK_EQ_INT(xd_tokenizer_describe(f.tokenizer).unknown, 0);
    CHECK(xd_tokenizer_describe(f.tokenizer).adds_prefix && !xd_tokenizer_describe(f.tokenizer).byte_level);
    CHECK_EQ_INT(xd_tokenizer_find(f.tokenizer, " h", 2), 259);
    unload(&f);
}

XD_TEST(sentencepiece_models_of_other_kinds_are_refused_by_name) {
    const xd_tokenizer_desc preset = { XD_TOKENIZER_PRESET_GPT2, NULL, NULL, 0, 0 };
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
        { MODEL("\"vocab\":{\"\":0},\"merges\":[]"), XD_ERROR_FORMAT, "id 0 has 0 bytes" },
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
    XDI_TRY(xd_encoder_create(xd_comm_ctx(world), (const xd_tokenizer *)argument, &encoder));
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
    const xd_encode_desc desc = { true, false };
    char text[400];
    memset(text, 'a', sizeof text);
    memcpy(text, "fi\xef\xac\x81 e\xcc\x81<s> bc", 15);
    xd_result result = xd_tokenizer_parse(ctx, f->text, f->bytes, NULL, &tokenizer);
    if (result == XD_OK) result = xd_encoder_create(ctx, tokenizer, &encoder);
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
    CHECK_EQ_INT(xd_tokenizer_load(ctx, "no/such/tokenizer.json", NULL, &tokenizer), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(ctx)->message, "no/such/tokenizer.json") != NULL);
    if (xd_tokenizer_load(ctx, "data/teacher/tokenizer.json", NULL, &tokenizer) == XD_OK) {
        fixture f = { ctx, tokenizer, NULL };
        CHECK_EQ_INT(xd_encoder_create(ctx, tokenizer, &f.encoder), XD_OK);
        CHECK_EQ_INT(xd_tokenizer_describe(tokenizer).size, 2048);
        CHECK(survives(&f, "And the Lord said unto Moses, 12 'tis\n\n  caf\xc3\xa9", 47));
        unload(&f);
        return;
    }
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
