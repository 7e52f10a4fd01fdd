/* The matcher of split patterns, which has no public face of its own: hence the private names. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#if defined(XD_TEST_LAYERS)
#    include "text/internal.h"
#endif
#include "xd_test.h"

static xd_ctx *ctx;
static xdi_unicode *unicode;
static bool end_lines; /* of the patterns to come */

static void begin(void) {
    CHECK_EQ_INT(xd_ctx_create(NULL, &ctx), XD_OK);
    unicode = xdi_unicode_create(ctx);
    CHECK(unicode != NULL);
}

static void end(void) {
    xdi_unicode_destroy(ctx, unicode);
    xd_ctx_destroy(ctx);
}

/* The text with every match in brackets. */
static const char *matches(const char *pattern, const char *text) {
    static char out[4096];
    xdi_pattern *p = NULL;
    xdi_matcher m;
    const size_t bytes = strlen(text);
    size_t used = 0, from, to;
    memset(&m, 0, sizeof m);
    m.ctx = ctx;
    if (xdi_pattern_create(ctx, pattern, strlen(pattern), unicode, &p) != XD_OK)
        return xd_last_error(ctx)->message;
    if (end_lines) CHECK(xdi_pattern_end_lines(p) == (strchr(pattern, '$') != NULL));
    xdi_matcher_start(&m, (const uint8_t *)text, bytes);
    for (size_t at = 0; at < bytes; at = to) {
        if (xdi_pattern_find(&m, p, at, bytes, &from, &to) != XD_OK) break;
        used += (size_t)sprintf(out + used, "%.*s", (int)(from - at), text + at);
        if (from < to) used += (size_t)sprintf(out + used, "[%.*s]", (int)(to - from), text + from);
    }
    out[used] = '\0';
    xdi_matcher_release(&m);
    xdi_pattern_destroy(ctx, p);
    return out;
}

XD_TEST(the_first_alternative_that_matches_wins) {
    begin();
    CHECK_EQ_STR(matches("a|ab", "ab"), "[a]b");
    CHECK_EQ_STR(matches("ab|a", "ab"), "[ab]");
    CHECK_EQ_STR(matches("x(?:a|ab)c", "xabc xac"), "[xabc] [xac]");
    CHECK_EQ_STR(matches("(a|b|)c", "ac bc c"), "[ac] [bc] [c]");
    CHECK_EQ_STR(matches("z", "abc"), "abc");
    end();
}

XD_TEST(quantifiers_are_greedy_and_give_back_unless_possessive) {
    begin();
    CHECK_EQ_STR(matches("a*ab", "aaab"), "[aaab]");
    CHECK_EQ_STR(matches("a*+ab", "aaab"), "aaab");
    CHECK_EQ_STR(matches("a++b|a", "aab aa"), "[aab] [a][a]");
    CHECK_EQ_STR(matches("a{2}", "aaaaa"), "[aa][aa]a");
    CHECK_EQ_STR(matches("a{2,3}", "aaaaa"), "[aaa][aa]");
    CHECK_EQ_STR(matches("a{2,}b?", "aaaab a"), "[aaaab] a");
    CHECK_EQ_STR(matches("(?:ab){2,3}", "ababababab"), "[ababab][abab]");
    CHECK_EQ_STR(matches("(?:ab)*c", "ababc c"), "[ababc] [c]");
    CHECK_EQ_STR(matches("(?:a|ab)++c", "abc"), "abc");
    CHECK_EQ_STR(matches("(?:ab|a)?+b", "abb ab"), "[abb] a[b]");
    CHECK_EQ_STR(matches("(?:a{0,2}b){2}", "aabab"), "[aabab]");
    end();
}

XD_TEST(classes_hold_ranges_escapes_and_properties) {
    begin();
    CHECK_EQ_STR(matches("[a-c]+", "abcd-a"), "[abc]d-[a]");
    CHECK_EQ_STR(matches("[^a-c]+", "abcd-a"), "abc[d-]a");
    CHECK_EQ_STR(matches("[a\\-\\]]+", "a-]b"), "[a-]]b");
    CHECK_EQ_STR(matches("[-a]+", "a-b"), "[a-]b");
    CHECK_EQ_STR(matches("[a-]+", "a-b"), "[a-]b");
    CHECK_EQ_STR(matches("[\xe4\xb8\x80-\xe9\xbe\xa5]+", "a\xe4\xb8\xad\xe6\x96\x87z"),
                 "a[\xe4\xb8\xad\xe6\x96\x87]z");
    CHECK_EQ_STR(matches("\\p{L}+", "na\xc3\xafve 12"), "[na\xc3\xafve] 12");
    CHECK_EQ_STR(matches("\\p{Lu}\\p{Ll}*", "AbC\xc3\x89\xc3\xa9"), "[Ab][C][\xc3\x89\xc3\xa9]");
    CHECK_EQ_STR(matches("\\P{L}+", "ab12c"), "ab[12]c");
    CHECK_EQ_STR(matches("[^\\s\\p{L}\\p{N}]+", "a?! 1"), "a[?!] 1");
    CHECK_EQ_STR(matches("[\\S]+", "a b"), "[a] [b]");
    CHECK_EQ_STR(matches("\\s+", "a\t\xc2\xa0\xe3\x80\x80z\x1c"), "a[\t\xc2\xa0\xe3\x80\x80]z\x1c");
    CHECK_EQ_STR(matches("\\d", "a1\xd9\xa3\xc2\xbd"), "a[1][\xd9\xa3]\xc2\xbd");
    CHECK_EQ_STR(matches("\\p{M}", "e\xcc\x81"), "e[\xcc\x81]");
    end();
}

XD_TEST(folding_is_that_of_unicode) {
    begin();
    CHECK_EQ_STR(matches("(?i:'s|k)", "'s'S'\xc5\xbf k K \xe2\x84\xaa"),
                 "['s]['S]['\xc5\xbf] [k] [K] [\xe2\x84\xaa]");
    CHECK_EQ_STR(matches("(?i:[a-c]x)", "Ax cX dX"), "[Ax] [cX] dX");
    CHECK_EQ_STR(matches("(?i:\xc3\xa9)a", "\xc3\x89"
                                           "a \xc3\xa9"
                                           "A"),
                 "[\xc3\x89"
                 "a] \xc3\xa9"
                 "A");
    end();
}

XD_TEST(look_ahead_and_end_see_the_rest_of_the_text) {
    begin();
    CHECK_EQ_STR(matches("\\s+(?!\\S)|\\s+", "a   b  "), "a[  ][ ]b[  ]");
    CHECK_EQ_STR(matches("a(?!b)", "abaca"), "ab[a]c[a]");
    CHECK_EQ_STR(matches("a(?!b|c)", "abacad"), "abac[a]d");
    CHECK_EQ_STR(matches("\\s++$|\\s", "a  b  "), "a[ ][ ]b[  ]");
    CHECK_EQ_STR(matches("a$", "aa"), "a[a]");
    end();
}

XD_TEST(the_end_of_a_line_is_an_end_where_a_pattern_is_told_so) {
    static const char text[] = "a  \n a\n\n";
    begin();
    CHECK_EQ_STR(matches("a$|\\s+$", text), "a  \n a[\n\n]");
    end_lines = true;
    CHECK_EQ_STR(matches("a$|\\s+$", text), "a[  ]\n [a][\n\n]");
    CHECK_EQ_STR(matches(" $\\n", text), "a [ \n] a\n\n");
    CHECK_EQ_STR(matches("a", text), "[a]  \n [a]\n\n");
    end_lines = false;
    end();
}

XD_TEST(bytes_that_are_not_utf8_are_characters_of_no_class) {
    begin();
    CHECK_EQ_STR(matches("\\p{L}+", "a\xff\xc3z\xe4\xb8"), "[a]\xff\xc3[z]\xe4\xb8");
    CHECK_EQ_STR(matches("[^\\s\\p{L}]+", "a\xff\xc3z\xe4\xb8"), "a[\xff\xc3]z[\xe4\xb8]");
    CHECK_EQ_STR(matches("[^x]*\xc3\xa9", "\xff\xc3\xa9\xc3\xa9\xff"), "[\xff\xc3\xa9\xc3\xa9]\xff");
    CHECK_EQ_STR(matches("[\xed\x80\x80-\xef\xbf\xbf]", "\xed\xa0\x80"), "\xed\xa0\x80");
    end();
}

XD_TEST(what_is_not_supported_is_named_with_its_place) {
    static const struct {
        const char *pattern, *message;
    } cases[] = {
        { "\\p{Han}", "a property that is not supported at byte 0 of 7" },
        { "a\\pL", "\\p without { at byte 1" },
        { "[a&&b]", "an intersection of classes at byte 2" },
        { "[a[b]]", "a class inside a class at byte 2" },
        { "ab(?<=c)", "a kind of group that is not supported at byte 2" },
        { "(?=c)", "a kind of group" },
        { "(?i)a", "a kind of group" },
        { "a(", "a group without end at byte 1" },
        { "a)", "a ) too many at byte 1" },
        { "[ab", "a class without end at byte 0" },
        { "[]", "an empty class at byte 0" },
        { "[b-a]", "a range that runs backwards at byte 1" },
        { "*a", "an operator that is not supported here at byte 0" },
        { "a.b", "an operator that is not supported here at byte 1" },
        { "^a", "an operator that is not supported here at byte 0" },
        { "a+?", "a lazy or repeated quantifier at byte 1" },
        { "a**", "a lazy or repeated quantifier at byte 1" },
        { "a{2000}", "a repetition that is not" },
        { "a{3,2}", "a repetition that is not" },
        { "a{,2}", "a repetition that is not" },
        { "(?:a?)*", "a loop over what can be empty at byte 0" },
        { "(a*|b)+", "a loop over what can be empty at byte 0" },
        { "a*", "a match that can be empty at byte 0 of 2" },
        { "a+| ?b{0,2}", "a match that can be empty at byte 0 of 11" },
        { "a|", "a match that can be empty at byte 0 of 2" },
        { "a|$", "a match that can be empty at byte 0 of 3" },
        { "ab|(?!c)", "a match that can be empty at byte 0 of 8" },
        { "\\b", "an escape that is not supported at byte 0" },
        { "a\\", "an escape that is not supported at byte 1" },
        { "\\x41", "an escape that is not supported" },
        { "a\xff", "a byte that is not UTF-8 at byte 1" },
        { "(?i:\\p{L})", "a property inside (?i: at byte 4" },
        { "((((((((((((((((((((((((((((((((((a))))))))))))))))))))))))))))))))))", "nested too deeply" },
        { "(?:(?:(?:a{1000}){1000}){1000})", "more than 65536 operations" },
    };
    begin();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *message = matches(cases[i].pattern, "");
        if (!strstr(message, cases[i].message)) CHECK_EQ_STR(message, cases[i].message);
    }
    CHECK(strstr(matches("", ""), "pattern of 0 bytes") != NULL);
    end();
}

XD_TEST(a_pattern_that_explodes_is_stopped) {
    static char text[20000];
    xdi_pattern *p = NULL;
    xdi_matcher m;
    size_t from, to;
    begin();
    memset(text, 'a', sizeof text);
    memset(&m, 0, sizeof m);
    m.ctx = ctx;
    const char *const hostile[] = { "(?:a|aa)+b", "(?:a+)+b", "(?:a?){30}a{30}b", "a*a*a*a*b" };
    for (int i = 0; i < 4; i++) {
        CHECK_EQ_INT(xdi_pattern_create(ctx, hostile[i], strlen(hostile[i]), unicode, &p), XD_OK);
        xdi_matcher_start(&m, (const uint8_t *)text, sizeof text);
        CHECK_EQ_INT(xdi_pattern_find(&m, p, 0, sizeof text, &from, &to), XD_ERROR_DATA);
        CHECK(strstr(xd_last_error(ctx)->message, "the split pattern") != NULL);
        xdi_pattern_destroy(ctx, p);
    }
    xdi_matcher_release(&m);
    end();
}

XD_TEST(stepping_back_meets_the_borders_of_stepping_on) {
    uint8_t text[64];
    uint64_t state = 1;
    begin();
    for (int round = 0; round < 2000; round++) {
        static const uint8_t bytes[] = {
            'a', 0x80, 0xbf, 0xc3, 0xe0, 0xe4, 0xed, 0xf0, 0xf4, 0xff, 0x90, 0xa0
        };
        for (size_t i = 0; i < sizeof text; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            text[i] = bytes[(state >> 33) % sizeof bytes];
        }
        for (size_t at = 0; at < sizeof text;) {
            uint32_t point;
            const size_t length = xdi_utf8_decode(text + at, text + sizeof text, &point);
            at += length;
            CHECK_EQ_INT(xdi_utf8_before(text, text + at), length);
        }
    }
    end();
}

XD_TEST_MAIN()
