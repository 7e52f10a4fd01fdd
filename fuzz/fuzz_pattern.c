/* The first line of the input is a split pattern, the rest is text: the pattern is refused, or its matches go
 * on and are not empty; a hostile one is stopped. Patterns have no public face, so this program calls the matcher itself. It
 * carries its own implementation, unless it is linked with a library whose private functions are visible (XD_TEST_LAYERS). */
#if defined(XD_TEST_LAYERS)
#    include "text/internal.h"
#else
#    undef XDISTILL_IMPLEMENTED
#    define XDISTILL_STATIC
#    define XDISTILL_NO_MODELS
#    define XDISTILL_NO_DIFFUSION
#endif
#include "fuzz.h"

static xdi_unicode *fuzz_unicode(void) {
    static xdi_unicode *unicode;
    if (!unicode) FUZZ_CHECK((unicode = xdi_unicode_create(fuzz_ctx())) != NULL);
    return unicode;
}

/* The matches of a text from the beginning to the end. */
static void match(xdi_matcher *m, const xdi_pattern *pattern, const uint8_t *text, size_t bytes) {
    size_t from = 0, to = 0;
    xdi_matcher_start(m, text, bytes);
    for (size_t at = 0; at < bytes; at = to) {
        const xd_result result = xdi_pattern_find(m, pattern, at, bytes, &from, &to);
        FUZZ_CHECK(result == XD_OK || result == XD_ERROR_DATA);
        if (result != XD_OK) return;
        FUZZ_CHECK(from >= at && from <= to && to <= bytes);
        FUZZ_CHECK(from < to || to == bytes); /* no empty match before the end */
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static xdi_matcher matcher; /* its memory serves all inputs */
    const uint8_t *line = bytes ? (const uint8_t *)memchr(data, '\n', bytes) : NULL;
    if (!line || bytes > 4096) return 0;
    const size_t length = (size_t)(line - data), rest = bytes - length - 1;
    xdi_pattern *pattern = NULL;
    char *copy = (char *)malloc(bytes); /* of exactly these bytes, so that reading past them shows */
    uint8_t *text = (uint8_t *)malloc(rest ? rest : 1);
    matcher.ctx = fuzz_ctx();
    memcpy(copy, data, length);
    memcpy(text, line + 1, rest);
    if (xdi_pattern_create(fuzz_ctx(), copy, length, fuzz_unicode(), &pattern) == XD_OK)
        match(&matcher, pattern, text, rest);
    xdi_pattern_destroy(fuzz_ctx(), pattern);
    free(copy);
    free(text);
    return 0;
}
