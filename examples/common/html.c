/* html.c - a page in memory. */
#include "html.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char html_style[] =
    "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:1140px;margin:2em auto;padding:0 "
    "1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em 1em;text-align:right;border-bottom:1px "
    "solid #ddd}"
    "td:first-child{text-align:left}pre{white-space:pre-wrap;background:#f6f6f6;padding:1em}svg{max-width:"
    "100%;height:auto}"
    ".samples{display:flex;gap:1em;flex-wrap:wrap}.samples div{flex:1 1 400px}</style>";

static bool html_grow(html *h, size_t more) {
    if (h->failed || h->bytes + more + 1 <= h->room) return !h->failed;
    const size_t room = 2 * h->room + more + 4096;
    char *data = (char *)xd_allocate(h->ctx, room);
    if (!data) {
        h->failed = true;
        return false;
    }
    if (h->bytes) memcpy(data, h->data, h->bytes);
    xd_release(h->ctx, h->data);
    h->data = data;
    h->room = room;
    return true;
}

void html_raw_n(html *h, const char *markup, size_t bytes) {
    if (bytes == 0 || !html_grow(h, bytes)) return;
    memcpy(h->data + h->bytes, markup, bytes);
    h->bytes += bytes;
}

void html_raw(html *h, const char *markup) {
    html_raw_n(h, markup, strlen(markup));
}

void html_format(html *h, const char *format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (length > 0) html_raw_n(h, line, length < (int)sizeof line ? (size_t)length : sizeof line - 1);
}

void html_text(html *h, const char *text) {
    for (; *text; text++) {
        if (*text == '<')
            html_raw(h, "&lt;");
        else if (*text == '>')
            html_raw(h, "&gt;");
        else if (*text == '&')
            html_raw(h, "&amp;");
        else
            html_raw_n(h, text, 1);
    }
}

xd_result html_begin(xd_ctx *ctx, const char *title, html *out) {
    memset(out, 0, sizeof *out);
    out->ctx = ctx;
    html_raw(out, "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>");
    html_text(out, title);
    html_raw(out, "</title>");
    html_raw(out, html_style);
    html_raw(out, "</head><body>");
    return out->failed ? XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for a page") : XD_OK;
}

void html_free(html *h) {
    xd_release(h->ctx, h->data);
    memset(h, 0, sizeof *h);
}

xd_result html_save(html *h, const char *path) {
    html_raw(h, "</body></html>\n");
    const xd_result result = h->failed ? XD_FAIL(h->ctx, XD_ERROR_MEMORY, "no room for %s", path)
                                       : xd_file_save(h->ctx, path, h->data, h->bytes);
    html_free(h);
    return result;
}
