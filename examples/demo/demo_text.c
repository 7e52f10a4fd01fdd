/* demo_text.c - texts as ids, and which rows a step reads. */
#include "demo.h"

#include <string.h>

xd_result demo_text_load(xd_ctx *ctx, const bpe *vocabulary, const char *path, size_t most_bytes,
                         demo_text *out) {
    char *text = NULL;
    size_t bytes = 0, first = 0;
    XDI_TRY(xd_file_load(ctx, path, 0, &text, &bytes));
    if (most_bytes && bytes > most_bytes) bytes = most_bytes;
    int32_t *ids = (int32_t *)xd_allocate(ctx, (bytes + 1) * sizeof *ids);
    const int64_t count = ids ? bpe_encode(vocabulary, text, bytes, ids) : 0;
    xd_release(ctx, text);
    if (!ids) return XDI_FAIL(ctx, XD_ERROR_MEMORY, "no room for the %zu bytes of %s", bytes, path);
    if (count < DEMO_ROW + 2) {
        xd_release(ctx, ids);
        return XDI_FAIL(ctx, XD_ERROR_DATA, "%s has %lld tokens, at least %d are needed", path,
                        (long long)count, DEMO_ROW + 2);
    }
    (void)bpe_spelling(vocabulary, ids[0], &first);
    out->ids = ids;
    out->count = count;
    out->bytes = (int64_t)(bytes - first);
    return XD_OK;
}

void demo_text_free(xd_ctx *ctx, demo_text *text) {
    xd_release(ctx, text->ids);
    memset(text, 0, sizeof *text);
}

/* splitmix64 */
static uint64_t demo_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double demo_random(uint64_t seed, uint64_t stream, uint64_t counter) {
    return (double)(demo_mix(seed ^ demo_mix(stream ^ demo_mix(counter))) >> 11) / 9007199254740992.0;
}

int64_t demo_row_start(const demo_text *text, uint64_t seed, int step, int row) {
    const int64_t places = text->count - DEMO_ROW; /* the label of a row's last token is inside, too */
    return (int64_t)(demo_random(seed, 1, (uint64_t)step * DEMO_BATCH + (uint64_t)row) * (double)places);
}
