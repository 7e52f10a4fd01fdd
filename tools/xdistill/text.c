/* text.c - reading, checking and cutting texts. */
#include "text.h"
#include "../../examples/common/utf8.h"
#include "ranks.h"

#include <string.h>

/* A hundredth of a text could be noise between lines; this little cannot be cut into forty pieces. */
enum { TEXT_LEAST = 4096 };

static xd_result text_check(xd_ctx *ctx, const char *path, const char *data, size_t bytes) {
    XD_REQUIRE(ctx, bytes > 0, XD_ERROR_DATA, "%s is empty", path);
    for (size_t i = 0; i < bytes;) {
        const size_t length = utf8_character((const unsigned char *)data + i, bytes - i);
        XD_REQUIRE(ctx, data[i] != 0, XD_ERROR_DATA, "%s is no text: byte %zu is zero", path, i);
        XD_REQUIRE(ctx, length > 0, XD_ERROR_DATA, "%s is not UTF-8: byte %zu is 0x%02x", path, i,
                   (unsigned)(unsigned char)data[i]);
        i += length;
    }
    return XD_OK;
}

xd_result text_load(xd_ctx *ctx, const char *path, char **data, size_t *bytes) {
    XD_TRY(xd_file_load(ctx, path, 0, data, bytes));
    const xd_result result = text_check(ctx, path, *data, *bytes);
    if (result == XD_OK) return XD_OK;
    xd_release(ctx, *data);
    *data = NULL;
    return result;
}

/* Where piece `i` begins: behind the line that its share of the bytes ends in, or at a character where there is no line. */
static size_t text_piece(const char *data, size_t bytes, int i) {
    size_t at = (size_t)((double)bytes * i / TEXT_PIECES);
    const size_t last = (size_t)((double)bytes * (i + 1) / TEXT_PIECES);
    if (i == 0 || i >= TEXT_PIECES) return i == 0 ? 0 : bytes;
    for (size_t end = at; end < last; end++)
        if (data[end] == '\n') return end + 1;
    while (at < bytes && ((unsigned char)data[at] & 0xc0) == 0x80) at++;
    return at;
}

/* Of `held` pieces that are spread evenly, the parts take turns. */
static text_part text_part_of(int piece, int held) {
    const int before = piece * held / TEXT_PIECES, after = (piece + 1) * held / TEXT_PIECES;
    if (before == after) return TEXT_TRAIN;
    return before % 2 ? TEXT_REPORT : TEXT_CHOOSE;
}

static xd_result text_cut(xd_ctx *ctx, const char *data, size_t bytes, const text_split_desc *desc,
                          text_split *out) {
    const int pieces = 2 * (int)(desc->held_out * TEXT_PIECES / 2.0 + 0.5), held = pieces < 2 ? 2 : pieces;
    bool failed = false;
    for (int p = 0; p < TEXT_PARTS; p++) out->data[p] = (char *)ranks_room(ctx, (int64_t)bytes, 1, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for a text of %zu bytes", bytes);
    for (int i = 0; i < TEXT_PIECES; i++) {
        const size_t begin = text_piece(data, bytes, i), end = text_piece(data, bytes, i + 1);
        const text_part given = text_part_of(i, held);
        const text_part part = given == TEXT_REPORT && desc->report ? TEXT_TRAIN : given;
        memcpy(out->data[part] + out->bytes[part], data + begin, end - begin);
        out->bytes[part] += end - begin;
    }
    return XD_OK;
}

xd_result text_split_load(xd_ctx *ctx, const text_split_desc *desc, text_split *out) {
    char *data = NULL;
    size_t bytes = 0;
    memset(out, 0, sizeof *out);
    XD_TRY(text_load(ctx, desc->path, &data, &bytes));
    xd_result result = XD_OK;
    if (bytes < TEXT_LEAST)
        result = XD_FAIL(ctx, XD_ERROR_DATA, "%s has %zu bytes, at least %d are needed to learn from",
                         desc->path, bytes, (int)TEXT_LEAST);
    if (result == XD_OK) result = text_cut(ctx, data, bytes, desc, out);
    xd_release(ctx, data);
    if (result == XD_OK && desc->report) {
        xd_release(ctx, out->data[TEXT_REPORT]);
        out->data[TEXT_REPORT] = NULL;
        result = text_load(ctx, desc->report, &out->data[TEXT_REPORT], &out->bytes[TEXT_REPORT]);
    }
    if (result != XD_OK) text_split_free(ctx, out);
    return result;
}

void text_split_free(xd_ctx *ctx, text_split *split) {
    for (int p = 0; p < TEXT_PARTS; p++) xd_release(ctx, split->data[p]);
    memset(split, 0, sizeof *split);
}

/* ---- tokens ---- */

static xd_result tokens_copy(xd_ctx *ctx, const xd_encoding *e, tokens *out) {
    bool failed = false;
    out->ids = (int32_t *)ranks_room(ctx, e->count, sizeof *out->ids, &failed);
    out->spans = (xd_token_span *)ranks_room(ctx, e->count, sizeof *out->spans, &failed);
    XD_REQUIRE(ctx, !failed, XD_ERROR_MEMORY, "no room for %lld tokens", (long long)e->count);
    if (e->count > 0) {
        memcpy(out->ids, e->ids, (size_t)e->count * sizeof *out->ids);
        memcpy(out->spans, e->spans, (size_t)e->count * sizeof *out->spans);
    }
    out->count = e->count;
    return XD_OK;
}

xd_result tokens_encode(xd_ctx *ctx, const xd_tokenizer *tokenizer, const char *data, size_t bytes,
                        tokens *out) {
    xd_encoder *encoder = NULL;
    xd_encoding e;
    memset(out, 0, sizeof *out);
    out->data = data;
    out->bytes = bytes;
    XD_TRY(xd_encoder_create(ctx, &(xd_encoder_desc){ .tokenizer = tokenizer }, &encoder));
    xd_result result = xd_encode(encoder, data, bytes, NULL, &e);
    if (result == XD_OK) result = tokens_copy(ctx, &e, out);
    xd_encoder_destroy(encoder);
    if (result != XD_OK) tokens_free(ctx, out);
    return result;
}

void tokens_free(xd_ctx *ctx, tokens *t) {
    xd_release(ctx, t->ids);
    xd_release(ctx, t->spans);
    memset(t, 0, sizeof *t);
}

void text_beginning(const char *data, size_t bytes, char out[TEXT_BEGINNING]) {
    size_t first = 0, length = 0;
    int words = 0;
    while (first < bytes && (unsigned char)data[first] <= ' ') first++;
    while (first + length < bytes) {
        const size_t next =
            utf8_character((const unsigned char *)data + first + length, bytes - first - length);
        const char c = data[first + length];
        if (next == 0 || length + next >= TEXT_BEGINNING || (c != ' ' && (unsigned char)c < ' ')) break;
        if (c == ' ' && ++words == 4) break;
        memcpy(out + length, data + first + length, next);
        length += next;
    }
    if (length == 0) out[length++] = 'A'; /* a text of blanks */
    out[length] = 0;
}
