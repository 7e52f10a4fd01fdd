/* html.h - one page without scripts, built in memory and written whole. */
#ifndef HTML_H
#define HTML_H

#include "xdistill.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct html {
    xd_ctx *ctx;
    char *data;
    size_t bytes, room;
    bool failed; /* no memory; told by html_save */
} html;

/* Begins a page with a title and the style. Errors: MEMORY. */
xd_result html_begin(xd_ctx *ctx, const char *title, html *out);

/* Append markup, markup by printf's rules, and a text whose special characters are escaped. */
void html_raw(html *h, const char *markup);
void html_raw_n(html *h, const char *markup, size_t bytes);
void html_format(html *h, const char *format, ...) XD_PRINTF(2, 3);
void html_text(html *h, const char *text);

/* Gives the page up. */
void html_free(html *h);

/* Ends the page, writes the file, frees the memory. Errors: MEMORY, IO. */
xd_result html_save(html *h, const char *path);

#ifdef __cplusplus
}
#endif

#endif /* HTML_H */
