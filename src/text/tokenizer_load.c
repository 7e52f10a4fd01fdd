/* From a file to a tokenizer: the formats, and which one a file has. */

#include "base/publish.h"
#include "text/internal.h"

#include <string.h>

static bool xdi_format_is_tekken(const xdi_tokenizer_file *file) {
    return file->root && xd_json_kind_of(xd_json_find(file->root, "vocab")) == XD_JSON_ARRAY;
}

static bool xdi_format_is_json(const xdi_tokenizer_file *file) {
    return file->root != NULL;
}

/* A SentencePiece model begins with the tag of its first field, which is a line's end. */
static bool xdi_format_is_sentencepiece(const xdi_tokenizer_file *file) {
    return file->text[0] == '\n';
}

static bool xdi_format_is_ranks(const xdi_tokenizer_file *file) {
    (void)file;
    return true;
}

typedef struct xdi_tokenizer_format {
    const char *name;
    bool has_pattern; /* it has a pattern: the desc's preset and pattern are for other formats */
    bool (*is)(const xdi_tokenizer_file *file);
    xdi_tokenizer_loader load;
} xdi_tokenizer_format;

/* The first format that recognises the file. */
static const xdi_tokenizer_format xdi_tokenizer_formats[] = {
    { "Tekken file", true, xdi_format_is_tekken, xdi_tokenizer_load_tekken },
    { "tokenizer.json", true, xdi_format_is_json, xdi_tokenizer_load_json },
    { "SentencePiece model", true, xdi_format_is_sentencepiece, xdi_tokenizer_load_sentencepiece },
    { "rank file", false, xdi_format_is_ranks, xdi_tokenizer_load_ranks },
};

static xd_result xdi_format_load(xd_ctx *ctx, const xdi_tokenizer_file *file, const xd_tokenizer_desc *d,
                                 xd_tokenizer **out) {
    const xdi_tokenizer_format *format = xdi_tokenizer_formats;
    while (!format->is(file)) format++;
    XD_REQUIRE(ctx, !format->has_pattern || (d->preset == XD_TOKENIZER_PRESET_NONE && !d->pattern),
               XD_ERROR_ARGUMENT, "a %s has its own pattern; preset and pattern are for rank files",
               format->name);
    return format->load(ctx, file, d, out);
}

/* JSON is recognised by the first byte that is not white space, behind a byte-order mark when there is one. */
static xd_result xdi_format_open(xd_ctx *ctx, const char *text, size_t bytes, xd_json **root) {
    size_t at = xdi_json_mark_bytes(text, bytes);
    xd_json_desc limits;
    XD_TRY(xdi_refuse_pointer(ctx, "the tokenizer file", text, bytes));
    while (at < bytes && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t')) at++;
    XD_REQUIRE(ctx, at < bytes, XD_ERROR_FORMAT, "a tokenizer file of %llu bytes is empty",
               (unsigned long long)bytes);
    if (text[at] != '{') return XD_OK;
    memset(&limits, 0, sizeof limits);
    limits.max_bytes = bytes;
    limits.allow_nul = true;
    return xd_json_load_memory(ctx, &limits, text, bytes, root);
}

static xd_result xdi_tokenizer_load_bytes(xd_ctx *ctx, const void *data, size_t bytes,
                                          const xd_tokenizer_desc *d, xd_tokenizer **out) {
    xd_tokenizer *t = NULL;
    xd_json *root = NULL;
    xdi_tokenizer_file file;
    XD_TRY(xdi_format_open(ctx, (const char *)data, bytes, &root));
    file.text = (const char *)data;
    file.bytes = bytes;
    file.root = root;
    xd_result result = xdi_format_load(ctx, &file, d, &t);
    xd_json_destroy(ctx, root);
    if (result == XD_OK) result = xdi_tokenizer_replace_ends(t, d);
    if (result == XD_OK)
        *out = t;
    else
        xd_tokenizer_destroy(t);
    return result;
}

XD_API xd_result xd_tokenizer_load(xd_ctx *ctx, const xd_tokenizer_desc *desc, xd_tokenizer **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    char *data = NULL;
    size_t bytes = 0;
    if (!desc->path) {
        XDI_GIVEN(ctx, desc->data);
        return xdi_tokenizer_load_bytes(ctx, desc->data, desc->data_bytes, desc, out);
    }
    XD_TRY(xd_file_load(ctx, desc->path, desc->max_bytes, &data, &bytes));
    const xd_result result = xdi_tokenizer_load_bytes(ctx, data, bytes, desc, out);
    xd_release(ctx, data);
    XD_REQUIRE(ctx, result == XD_OK, result, "%s: %s", desc->path, xd_last_error(ctx)->message);
    return XD_OK;
}
