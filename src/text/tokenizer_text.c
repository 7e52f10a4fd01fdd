/* Text before it is split: normalisation and rewrites, with the offset of every byte in the original. */

#include "text/internal.h"

#include <string.h>

/* Text that rewrites change, and the original bytes of each of its bytes. */

/* ---- buffers ---- */

/* Memory for `more` bytes and one more run. */
static xd_result xdi_text_reserve(xd_ctx *ctx, xdi_text *t, size_t more) {
    if (t->length + more > t->capacity) {
        const size_t capacity = t->length + more + t->capacity / 2 + 64;
        XD_REQUIRE(ctx, t->length + more < XDI_TOKENIZER_TEXT, XD_ERROR_ARGUMENT,
                   "a text of %llu bytes after normalisation; less than %d are supported",
                   (unsigned long long)(t->length + more), (int)XDI_TOKENIZER_TEXT);
        uint8_t *bytes = (uint8_t *)xd_allocate(ctx, capacity);
        XD_REQUIRE(ctx, bytes, XD_ERROR_MEMORY, "no room for a text of %llu bytes",
                   (unsigned long long)capacity);
        if (t->bytes) memcpy(bytes, t->bytes, t->length);
        xd_release(ctx, t->bytes);
        t->bytes = bytes;
        t->capacity = capacity;
    }
    if (t->run_count == t->run_capacity) {
        const size_t capacity = t->run_capacity ? 2 * t->run_capacity : 64;
        xdi_text_run *runs = (xdi_text_run *)xd_allocate(ctx, capacity * sizeof *runs);
        XD_REQUIRE(ctx, runs, XD_ERROR_MEMORY, "no room for %llu runs of text", (unsigned long long)capacity);
        if (t->runs) memcpy(runs, t->runs, t->run_count * sizeof *runs);
        xd_release(ctx, t->runs);
        t->runs = runs;
        t->run_capacity = capacity;
    }
    return XD_OK;
}

XD_PRIVATE void xdi_rewriter_release(xd_ctx *ctx, xdi_rewriter *r) {
    for (int i = 0; i < 4; i++) {
        xd_release(ctx, r->texts[i].bytes);
        xd_release(ctx, r->texts[i].runs);
    }
    xd_release(ctx, r->points);
    xdi_matcher_release(&r->matcher);
    memset(r, 0, sizeof *r);
}

/* ---- origins ---- */

/* Moves the cursor to the run that holds a byte. */
static void xdi_text_seek(const xdi_text_view *view, size_t *run, size_t at) {
    while (*run + 1 < view->run_count && view->runs[*run + 1].at <= at) (*run)++;
}

XD_PRIVATE xd_token_span xdi_text_origin(const xdi_text_view *view, size_t *run, size_t begin, size_t end) {
    xd_token_span span;
    xdi_text_seek(view, run, begin);
    const xdi_text_run *r = &view->runs[*run];
    span.begin = (int64_t)r->from + (r->linear ? (int64_t)(begin - r->at) : 0);
    size_t last = *run;
    if (end > begin) xdi_text_seek(view, &last, end - 1);
    r = &view->runs[last];
    span.end = r->linear ? (int64_t)(r->from + (end - r->at)) : (int64_t)r->to;
    return span;
}

XD_PRIVATE xdi_text_view xdi_text_part(const xdi_text_view *view, size_t *cursor, size_t begin, size_t end,
                                       xdi_text_run *runs) {
    xdi_text_view part;
    part.bytes = view->bytes + begin;
    part.length = end - begin;
    part.runs = runs;
    part.run_count = 0;
    xdi_text_seek(view, cursor, begin);
    size_t run = *cursor;
    do {
        xdi_text_run r = view->runs[run];
        const size_t cut = r.at < begin ? begin - r.at : 0;
        r.at = (uint32_t)(r.at + cut - begin);
        if (r.linear) r.from += (uint32_t)cut;
        runs[part.run_count++] = r;
        run++;
    } while (run < view->run_count && view->runs[run].at < end);
    return part;
}

/* ---- writing ---- */

/* Copies bytes [begin, end) of the input unchanged. */
static xd_result xdi_text_copy(xd_ctx *ctx, xdi_text *out, const xdi_text_view *in, size_t *run, size_t begin,
                               size_t end) {
    while (begin < end) {
        xdi_text_seek(in, run, begin);
        const xdi_text_run *r = &in->runs[*run];
        const size_t next = *run + 1 < in->run_count ? in->runs[*run + 1].at : in->length;
        const size_t stop = next < end ? next : end;
        XD_TRY(xdi_text_reserve(ctx, out, stop - begin));
        xdi_text_run *made = &out->runs[out->run_count];
        const xdi_text_run *last = out->run_count ? made - 1 : NULL;
        *made = *r;
        made->at = (uint32_t)out->length;
        if (r->linear) made->from += (uint32_t)(begin - r->at);
        /* Text that continues the last run extends it. */
        if (!last || !last->linear || !r->linear || made->from - last->from != made->at - last->at)
            out->run_count++;
        else
            out->runs[out->run_count - 1].to = made->to;
        memcpy(out->bytes + out->length, in->bytes + begin, stop - begin);
        out->length += stop - begin;
        begin = stop;
    }
    return XD_OK;
}

/* Writes new bytes that replace `span` of the original. */
static xd_result xdi_text_put(xd_ctx *ctx, xdi_text *out, const void *bytes, size_t length,
                              xd_token_span span) {
    if (length == 0) return XD_OK;
    XD_TRY(xdi_text_reserve(ctx, out, length));
    xdi_text_run *run = &out->runs[out->run_count++];
    run->at = (uint32_t)out->length;
    run->from = (uint32_t)span.begin;
    run->to = (uint32_t)span.end;
    run->linear = false;
    memcpy(out->bytes + out->length, bytes, length);
    out->length += length;
    return XD_OK;
}

/* ---- NFC and NFKC ---- */

/* Decomposes one cluster into r->points and returns their number. Bytes that are not UTF-8 never reach this. */
static xd_result xdi_rewrite_decompose(xd_ctx *ctx, const xdi_unicode *u, bool compat, xdi_rewriter *r,
                                       const uint8_t *at, const uint8_t *end, size_t *count) {
    uint32_t point, one[XDI_UNICODE_LONGEST];
    size_t needed = 0;
    for (const uint8_t *p = at; p < end;) {
        p += xdi_utf8_decode(p, end, &point);
        needed += (size_t)xdi_unicode_decompose(u, point, compat, one);
    }
    if (needed > r->point_capacity) {
        xd_release(ctx, r->points);
        r->point_capacity = 0;
        r->points = (uint32_t *)xd_allocate(ctx, 2 * needed * sizeof *r->points);
        XD_REQUIRE(ctx, r->points, XD_ERROR_MEMORY, "no room for a cluster of %llu characters",
                   (unsigned long long)needed);
        r->point_capacity = needed;
    }
    *count = 0;
    while (at < end) {
        at += xdi_utf8_decode(at, end, &point);
        *count += (size_t)xdi_unicode_decompose(u, point, compat, r->points + *count);
    }
    return XD_OK;
}

/* Writes a cluster of the input normalised: as new bytes, or as a copy when nothing changed. */
static xd_result xdi_rewrite_cluster(xd_ctx *ctx, const xdi_unicode *u, bool compat, xdi_rewriter *r,
                                     const xdi_text_view *in, size_t *run, size_t begin, size_t end,
                                     xdi_text *out) {
    size_t count = 0;
    XD_TRY(xdi_rewrite_decompose(ctx, u, compat, r, in->bytes + begin, in->bytes + end, &count));
    count = xdi_unicode_compose(u, r->points, count, r->points + r->point_capacity);
    uint8_t *bytes = (uint8_t *)(r->points + r->point_capacity); /* the other half is free again */
    size_t length = 0;
    for (size_t i = 0; i < count; i++) length += xdi_utf8_encode(r->points[i], bytes + length);
    if (length == end - begin && memcmp(bytes, in->bytes + begin, length) == 0)
        return xdi_text_copy(ctx, out, in, run, begin, end);
    return xdi_text_put(ctx, out, bytes, length, xdi_text_origin(in, run, begin, end));
}

/* The properties that a normalisation depends on. */
static unsigned xdi_rewrite_flags(bool compat) {
    return XDI_UNICODE_JOINS | XDI_UNICODE_NFC | (compat ? (unsigned)XDI_UNICODE_NFKC : 0u);
}

/* A cluster is a character and those after it that may join it. */
static xd_result xdi_rewrite_normalize(xd_ctx *ctx, const xdi_unicode *u, bool compat, xdi_rewriter *r,
                                       xdi_text *out, const xdi_text_view *in) {
    const unsigned flags = xdi_rewrite_flags(compat);
    const uint8_t *text = in->bytes, *const end = text + in->length;
    size_t done = 0, before = 0,
           run = 0; /* written so far; where the character before begins, when it can be joined */
    for (size_t at = 0; at < in->length;) {
        uint32_t point;
        if (text[at] < 128) {
            before = at++;
            continue;
        }
        const size_t length = xdi_utf8_decode(text + at, end, &point);
        const unsigned found = xdi_unicode_property(u, point) & flags;
        if (!found) {
            before = point == XDI_UNICODE_INVALID ? at + 1 : at;
            at += length;
            continue;
        }
        const size_t start = found & XDI_UNICODE_JOINS ? before : at;
        size_t stop = at + length;
        while (stop < in->length) {
            const size_t next = xdi_utf8_decode(text + stop, end, &point);
            if (!(xdi_unicode_property(u, point) & XDI_UNICODE_JOINS)) break;
            stop += next;
        }
        XD_TRY(xdi_text_copy(ctx, out, in, &run, done, start));
        XD_TRY(xdi_rewrite_cluster(ctx, u, compat, r, in, &run, start, stop, out));
        done = at = before = stop;
    }
    return xdi_text_copy(ctx, out, in, &run, done, in->length);
}

/* Would normalisation leave the text unchanged? */
static bool xdi_rewrite_is_stable(const xdi_unicode *u, bool compat, const xdi_text_view *in) {
    const unsigned flags = xdi_rewrite_flags(compat);
    const uint8_t *at = in->bytes, *const end = at + in->length;
    while (at < end) {
        uint32_t point;
        if (*at < 128) {
            at++;
            continue;
        }
        at += xdi_utf8_decode(at, end, &point);
        if (xdi_unicode_property(u, point) & flags) return false;
    }
    return true;
}

/* ---- the other rewrites ---- */

static xd_result xdi_rewrite_prepend(xd_ctx *ctx, const uint8_t *to, size_t bytes, xdi_text *out,
                                     const xdi_text_view *in) {
    size_t run = 0;
    xd_token_span span = xdi_text_origin(in, &run, 0, 0);
    span.end = span.begin;
    XD_TRY(xdi_text_put(ctx, out, to, bytes, span));
    return xdi_text_copy(ctx, out, in, &run, 0, in->length);
}

/* The next match from `at` on, empty at the end of the text when there is none. */
static xd_result xdi_rewrite_find(const xdi_rewrite *w, xdi_rewriter *r, const xdi_text_view *in, size_t at,
                                  size_t *begin, size_t *end) {
    if (!w->one) return xdi_pattern_find(&r->matcher, w->pattern, at, in->length, begin, end);
    const uint8_t *found = (const uint8_t *)memchr(in->bytes + at, w->one, in->length - at);
    *begin = found ? (size_t)(found - in->bytes) : in->length;
    *end = found ? *begin + 1 : in->length;
    return XD_OK;
}

static xd_result xdi_rewrite_replace(xd_ctx *ctx, const xdi_rewrite *w, const uint8_t *to, xdi_rewriter *r,
                                     xdi_text *out, const xdi_text_view *in) {
    size_t begin, end, run = 0;
    xdi_matcher_start(&r->matcher, in->bytes, in->length);
    for (size_t at = 0; at < in->length; at = end) {
        XD_TRY(xdi_rewrite_find(w, r, in, at, &begin, &end));
        XD_TRY(xdi_text_copy(ctx, out, in, &run, at, begin));
        if (begin < end)
            XD_TRY(xdi_text_put(ctx, out, to, w->to_bytes, xdi_text_origin(in, &run, begin, end)));
    }
    return XD_OK;
}

/* Does this rewrite leave the text unchanged? Checks only what is cheap to check. */
static bool xdi_rewrite_is_idle(const xd_tokenizer *t, const xdi_rewrite *w, const xdi_text_view *in) {
    if (in->length == 0) return true;
    if (w->kind == XDI_REWRITE_NFC || w->kind == XDI_REWRITE_NFKC)
        return xdi_rewrite_is_stable(t->unicode, w->kind == XDI_REWRITE_NFKC, in);
    if (w->kind != XDI_REWRITE_PREPEND) return false;
    if (w->only_first && (in->runs[0].from > 0)) return true;
    return w->unless_there && in->length >= w->to_bytes &&
           memcmp(in->bytes, t->vocab.blob + w->to, w->to_bytes) == 0;
}

XD_PRIVATE xd_result xdi_rewrite_apply(xd_ctx *ctx, const xd_tokenizer *t, int first, int last,
                                       xdi_rewriter *r, int place, xdi_text_view in, xdi_text_view *out) {
    int use = place;
    for (int i = first; i < last; i++) {
        const xdi_rewrite *w = &t->stages.rewrites[i];
        const uint8_t *to = t->vocab.blob + w->to;
        xdi_text *text = &r->texts[use];
        if (xdi_rewrite_is_idle(t, w, &in)) continue;
        text->length = text->run_count = 0;
        XD_TRY(xdi_text_reserve(ctx, text, in.length));
        if (w->kind == XDI_REWRITE_PREPEND)
            XD_TRY(xdi_rewrite_prepend(ctx, to, w->to_bytes, text, &in));
        else if (w->kind == XDI_REWRITE_REPLACE)
            XD_TRY(xdi_rewrite_replace(ctx, w, to, r, text, &in));
        else
            XD_TRY(xdi_rewrite_normalize(ctx, t->unicode, w->kind == XDI_REWRITE_NFKC, r, text, &in));
        in.bytes = text->bytes;
        in.length = text->length;
        in.runs = text->runs;
        in.run_count = text->run_count;
        use = place + (use == place);
    }
    *out = in;
    return XD_OK;
}
