/* Canonical forms of vocabulary strings, where the golden vectors have no case. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_private.h"
#include "xd_test.h"

/* The canonical form of `size` bytes is `expected`, of expected_size bytes. */
static void expect(const char *token, int64_t size, const char *expected, int64_t expected_size) {
    char out[64];
    memset(out, '#', sizeof out);
    CHECK_EQ_INT(xdi_canonical_token((xd_text){ token, size }, out), expected_size);
    CHECK(memcmp(out, expected, (size_t)expected_size) == 0);
    if (memcmp(out, expected, (size_t)expected_size) != 0)
        printf("  \"%s\" became \"%.*s\"\n", token, (int)expected_size, out);
}

#define EXPECT(token, expected) \
    expect(token, (int64_t)sizeof(token) - 1, expected, (int64_t)sizeof(expected) - 1)

XD_TEST(a_space_before_four_marks_of_punctuation_is_dropped_and_before_no_other_character) {
    EXPECT("\xc4\xa0,", ",");
    EXPECT("\xc4\xa0.", ".");
    EXPECT("\xc4\xa0;", ";");
    EXPECT("\xc4\xa0:", ":");
    EXPECT("\xc4\xa0\0", "\xc4\xa0\0");
    EXPECT("\xc4\xa0!", "\xc4\xa0!");
    EXPECT(" \0", "\xc4\xa0\0");
}

/* Two characters between "<0x" and ">" are what Python's int(..., 16) takes them for. */
XD_TEST(byte_tokens_are_read_as_pythons_int_reads_them) {
    EXPECT("<0x41>", "A");
    EXPECT("<0xfF>", "\xc3\xbf");
    EXPECT("<0x+1>", "\x01");
    EXPECT("<0x 1>", "\x01");
    EXPECT("<0x1 >", "\x01");
    EXPECT("<0xb\t>", "\x0b");
    EXPECT("<0x\x1f"
           "c>",
           "\x0c");
    EXPECT("<0x-0>", "\0");
    EXPECT("<0x\xc2\xa0"
           "7>",
           "\x07"); /* six characters, seven bytes */
    EXPECT("<0x7\xe3\x80\x80>", "\x07");
}

XD_TEST(what_is_no_number_to_pythons_int_stays_as_it_is) {
    EXPECT("<0x-1>", "<0x-1>");
    EXPECT("<0x++>", "<0x++>");
    EXPECT("<0x1+>", "<0x1+>");
    EXPECT("<0x_1>", "<0x_1>");
    EXPECT("<0x1_>", "<0x1_>");
    EXPECT("<0x  >", "<0x  >");
    EXPECT("<0xg1>", "<0xg1>");
    EXPECT("<0x1>", "<0x1>");
    EXPECT("<0x001>", "<0x001>");
    EXPECT("<0x\xc3\xa9>", "<0x\xc3\xa9>"); /* one character of two bytes */
}

XD_TEST_MAIN()
