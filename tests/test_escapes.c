/* Control characters of names in files: messages, lines of the log and the tool show them as escapes. */
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"
#include "xd_test.h"

static void keep_line(void *user, xd_log_level level, const char *line) {
    (void)level;
    snprintf((char *)user, 700, "%s", line);
}

XD_TEST(control_characters_become_escapes_and_other_text_stays) {
    char out[64];
    CHECK_EQ_STR(xd_text_escape("a\033[2Jb\r\n\t\177c", out, sizeof out), "a\\x1b[2Jb\\x0d\\x0a\\x09\\x7fc");
    CHECK_EQ_STR(xd_text_escape("\xc2\x9b"
                                "31m",
                                out, sizeof out),
                 "\\xc2\\x9b31m");
    CHECK_EQ_STR(xd_text_escape("caf\xc3\xa9 \\x \xe2\x96\x81", out, sizeof out),
                 "caf\xc3\xa9 \\x \xe2\x96\x81");
    CHECK_EQ_STR(xd_text_escape("abc\001", out, 7), "abc"); /* an escape is whole or not there */
    CHECK_EQ_STR(xd_text_escape("abc", out, 1), "");
}

XD_TEST(messages_and_lines_of_the_log_have_no_control_characters) {
    char line[700] = "";
    const xd_ctx_desc desc = { .logger = { keep_line, line } };
    xd_ctx *ctx = NULL;
    char *data = NULL;
    size_t bytes = 0;
    CHECK_EQ_INT(xd_ctx_create(&desc, &ctx), XD_OK);
    CHECK_EQ_INT(xd_file_load(ctx, "/nowhere/\033]0;owned\007\n", 0, &data, &bytes), XD_ERROR_IO);
    CHECK(strstr(xd_last_error(ctx)->message, "/nowhere/\\x1b]0;owned\\x07\\x0a: open: ") != NULL);
    CHECK(strstr(line, "/nowhere/\\x1b]0;owned\\x07\\x0a: open: ") != NULL);
    xd_log(ctx, XD_LOG_WARN, "name %s", "a\033b");
    CHECK_EQ_STR(line, "name a\\x1bb");
    xd_ctx_destroy(ctx);
}

XD_TEST_MAIN()
