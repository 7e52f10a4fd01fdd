/* Reading a teacher's cache. */

#include "base/crc.h"
#include "teacher/internal.h"

#include <math.h>
#include <string.h>

struct xd_teacher_cache {
    xd_ctx *ctx;
    char *path; /* for messages; after the struct, in the same allocation */
    const unsigned char *file;
    uint64_t bytes;
    intptr_t handle;
    bool open, mapped;
    void *owned; /* the file's bytes where it could not be mapped */
    xdi_cache_form form;
    xd_teacher_cache_info info;
    char name[XD_CACHE_NAME_BYTES];
};

/* ---- the format ---- */

XD_PRIVATE xdi_cache_form xdi_cache_form_of(const xd_teacher_cache_desc *desc) {
    xdi_cache_form f;
    f.coding = desc->coding;
    f.k = desc->k;
    f.draws = desc->draws;
    f.spans = desc->spans;
    f.id_bytes = desc->vocabulary <= 65536 ? 2 : 4;
    f.code_bytes = desc->coding == XD_CACHE_8_BITS ? 1 : desc->coding == XD_CACHE_16_BITS ? 2 : 4;
    f.wide_bytes = desc->coding == XD_CACHE_F32 ? 4 : 2;
    f.span = (size_t)f.id_bytes;
    f.next = f.span + (desc->spans ? 6 : 0);
    f.tail = f.next + (size_t)f.wide_bytes;
    f.ids = f.tail + (size_t)f.wide_bytes;
    f.codes = f.ids + (size_t)desc->k * (size_t)f.id_bytes;
    f.drawn = f.codes + (size_t)desc->k * (size_t)f.code_bytes;
    f.bytes = f.drawn + (size_t)desc->draws * (size_t)f.id_bytes;
    return f;
}

XD_PRIVATE xd_result xdi_cache_check_desc(xd_ctx *ctx, const char *path, const xd_teacher_cache_desc *d,
                                          xd_result code) {
    XD_REQUIRE(ctx, d->vocabulary >= 1 && d->vocabulary <= XD_PROJECTION_MAX_IDS, code,
               "%s: a vocabulary of %lld ids, allowed are 1 to %d", path, (long long)d->vocabulary,
               (int)XD_PROJECTION_MAX_IDS);
    XD_REQUIRE(
        ctx, d->k >= 1 && d->k <= XD_CACHE_MAX_K && d->k <= d->vocabulary, code,
        "%s: k is %lld, with a vocabulary of %lld allowed are 1 to %lld", path, (long long)d->k,
        (long long)d->vocabulary,
        (long long)(d->vocabulary < (int64_t)XD_CACHE_MAX_K ? d->vocabulary : (int64_t)XD_CACHE_MAX_K));
    XD_REQUIRE(ctx, d->draws >= 0 && d->draws <= XD_CACHE_MAX_K - d->k, code,
               "%s: %lld draws beside k of %lld, together at most %d are allowed", path, (long long)d->draws,
               (long long)d->k, (int)XD_CACHE_MAX_K);
    XD_REQUIRE(ctx, d->temperature > 0.0 && d->temperature <= 1e6, code,
               "%s: temperature %g is outside (0, 1e6]", path, d->temperature);
    XD_REQUIRE(ctx, d->context >= 0, code, "%s: a context of %lld tokens", path, (long long)d->context);
    XD_REQUIRE(ctx, (int)d->coding >= 0 && (int)d->coding <= (int)XD_CACHE_F32, code,
               "%s: coding %d, known are 0 to %d", path, (int)d->coding, (int)XD_CACHE_F32);
    return XD_OK;
}

XD_PRIVATE void xdi_cache_put(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i & 255);
}

static uint64_t xdi_cache_get(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

/* Steps per nat, and the code of probability 0. */
static double xdi_cache_steps(const xdi_cache_form *form, bool wide, uint64_t *none) {
    const bool narrow = !wide && form->coding == XD_CACHE_8_BITS;
    *none = narrow ? 255 : 65535;
    return narrow ? 16.0 : 2048.0;
}

XD_PRIVATE uint64_t xdi_cache_encode(const xdi_cache_form *form, bool wide, double log_prob) {
    const double l = log_prob < 0.0 ? log_prob : 0.0; /* rounding may have left a little more than 1 */
    if (form->coding == XD_CACHE_F32) {
        const float value = (float)l;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    uint64_t none;
    const double steps = xdi_cache_steps(form, wide, &none);
    if (l == -INFINITY) return none;
    const double code = rint(-l * steps);
    return code < (double)(none - 1) ? (uint64_t)code : none - 1;
}

/* NaN only from a file that was not checked. */
static double xdi_cache_decode(const xdi_cache_form *form, bool wide, uint64_t code) {
    if (form->coding == XD_CACHE_F32) {
        const uint32_t bits = (uint32_t)code;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    uint64_t none;
    const double steps = xdi_cache_steps(form, wide, &none);
    return code == none ? -INFINITY : -(double)code / steps;
}

/* ---- parts of a checked file ---- */

static const unsigned char *xdi_cache_position(const xd_teacher_cache *c, int64_t position) {
    return c->file + XDI_CACHE_HEADER + (size_t)position * c->form.bytes;
}

static int64_t xdi_cache_id(const xd_teacher_cache *c, const unsigned char *at) {
    return (int64_t)xdi_cache_get(at, c->form.id_bytes);
}

static int64_t xdi_cache_entry_id(const xd_teacher_cache *c, const unsigned char *position, int64_t j) {
    return xdi_cache_id(c, position + c->form.ids + j * c->form.id_bytes);
}

static int64_t xdi_cache_drawn_id(const xd_teacher_cache *c, const unsigned char *position, int64_t j) {
    return xdi_cache_id(c, position + c->form.drawn + j * c->form.id_bytes);
}

static double xdi_cache_entry(const xd_teacher_cache *c, const unsigned char *position, int64_t j) {
    const unsigned char *at = position + c->form.codes + j * c->form.code_bytes;
    return xdi_cache_decode(&c->form, false, xdi_cache_get(at, c->form.code_bytes));
}

static double xdi_cache_wide(const xd_teacher_cache *c, const unsigned char *at) {
    return xdi_cache_decode(&c->form, true, xdi_cache_get(at, c->form.wide_bytes));
}

static xd_token_span xdi_cache_span(const xd_teacher_cache *c, const unsigned char *position) {
    xd_token_span span = { 0, 0 };
    if (!c->form.spans) return span;
    span.begin = (int64_t)xdi_cache_get(position + c->form.span, 4);
    span.end = span.begin + (int64_t)xdi_cache_get(position + c->form.span + 4, 2);
    return span;
}

static const unsigned char *xdi_cache_document_entry(const xd_teacher_cache *c, int64_t d) {
    return xdi_cache_position(c, c->info.positions) + d * XDI_CACHE_DOCUMENT;
}

/* Document d; one past the last begins where the positions end. */
static xd_cached_document xdi_cache_document_of(const xd_teacher_cache *c, int64_t d) {
    const unsigned char *at = xdi_cache_document_entry(c, d);
    const bool last = d + 1 == c->info.documents;
    xd_cached_document out;
    out.first = (int64_t)xdi_cache_get(at, 8);
    out.count = (last ? c->info.positions : (int64_t)xdi_cache_get(at + XDI_CACHE_DOCUMENT, 8)) - out.first;
    out.text_bytes = (int64_t)xdi_cache_get(at + 8, 8);
    out.text_checksum = (uint32_t)xdi_cache_get(at + 16, 4);
    return out;
}

/* ---- opening ---- */

static double xdi_cache_get_double(const unsigned char *at) {
    const uint64_t bits = xdi_cache_get(at, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static xd_result xdi_cache_read_header(xd_teacher_cache *c) {
    const unsigned char *file = c->file;
    xd_teacher_cache_desc *d = &c->info.desc;
    XD_TRY(xdi_refuse_pointer(c->ctx, c->path, file, (size_t)c->bytes));
    XD_REQUIRE(c->ctx, c->bytes >= XDI_CACHE_HEADER, XD_ERROR_FORMAT, "%s: %llu bytes, its header has %d",
               c->path, (unsigned long long)c->bytes, (int)XDI_CACHE_HEADER);
    XD_REQUIRE(c->ctx, memcmp(file, XDI_CACHE_MAGIC, 8) == 0, XD_ERROR_FORMAT,
               "%s: no teacher cache: it begins with other bytes", c->path);
    const unsigned version = (unsigned)xdi_cache_get(file + 8, 4);
    XD_REQUIRE(c->ctx, version == XDI_CACHE_VERSION, XD_ERROR_UNSUPPORTED, "%s: version %u, known is %d",
               c->path, version, (int)XDI_CACHE_VERSION);
    const uint64_t vocabulary = xdi_cache_get(file + 32, 8), context = xdi_cache_get(file + 64, 8);
    const unsigned flags = (unsigned)xdi_cache_get(file + 80, 4),
                   coding = (unsigned)xdi_cache_get(file + 76, 4);
    d->vocabulary = vocabulary <= XD_PROJECTION_MAX_IDS ? (int64_t)vocabulary : -1;
    d->student_hash = xdi_cache_get(file + 40, 8);
    d->teacher_hash = xdi_cache_get(file + 48, 8);
    d->temperature = xdi_cache_get_double(file + 56);
    d->context = context <= (uint64_t)INT64_MAX ? (int64_t)context : -1;
    d->k = (int64_t)xdi_cache_get(file + 72, 4);
    d->coding = (xd_cache_coding)(coding <= (unsigned)XD_CACHE_F32 ? coding : (unsigned)XD_CACHE_F32 + 1u);
    d->spans = (flags & XDI_CACHE_SPANS) != 0;
    d->draws = (int64_t)xdi_cache_get(file + XDI_CACHE_DRAWS, 4);
    d->seed = xdi_cache_get(file + XDI_CACHE_DRAWS + 4, 8);
    XD_TRY(xdi_cache_check_desc(c->ctx, c->path, d, XD_ERROR_FORMAT));
    XD_REQUIRE(c->ctx, flags <= XDI_CACHE_SPANS, XD_ERROR_FORMAT, "%s: unknown flags %08x", c->path, flags);
    XD_REQUIRE(c->ctx, d->draws > 0 || d->seed == 0, XD_ERROR_FORMAT, "%s: a seed of %016llx and no draws",
               c->path, (unsigned long long)d->seed);
    memcpy(c->name, file + XDI_CACHE_NAME, sizeof c->name);
    const char *end = (const char *)memchr(c->name, 0, sizeof c->name);
    for (const char *at = end; at && at < c->name + sizeof c->name; at++)
        if (*at) end = NULL;
    XD_REQUIRE(c->ctx, end, XD_ERROR_FORMAT, "%s: the name does not end in zeros", c->path);
    d->name = c->name;
    return XD_OK;
}

/* Counts that make up exactly the file's length, and the checksum. */
static xd_result xdi_cache_check_size(xd_teacher_cache *c) {
    const uint64_t positions = xdi_cache_get(c->file + 16, 8), documents = xdi_cache_get(c->file + 24, 8);
    const uint64_t room = c->bytes - XDI_CACHE_HEADER;
    c->form = xdi_cache_form_of(&c->info.desc);
    XD_REQUIRE(c->ctx,
               positions >= 1 && documents >= 1 && documents <= positions &&
                   positions <= room / c->form.bytes &&
                   documents == (room - positions * c->form.bytes) / XDI_CACHE_DOCUMENT &&
                   (room - positions * c->form.bytes) % XDI_CACHE_DOCUMENT == 0,
               XD_ERROR_FORMAT, "%s: %llu bytes for %llu positions of %zu and %llu documents", c->path,
               (unsigned long long)c->bytes, (unsigned long long)positions, c->form.bytes,
               (unsigned long long)documents);
    c->info.positions = (int64_t)positions;
    c->info.documents = (int64_t)documents;
    c->info.bytes = (size_t)c->bytes;
    c->info.checksum = (uint32_t)xdi_cache_get(c->file + 12, 4);
    uint32_t crc = xd_crc32c(0, c->file + XDI_CACHE_HEADER, (size_t)room);
    crc = xd_crc32c(crc, c->file + XDI_CACHE_CHECKED, XDI_CACHE_HEADER - XDI_CACHE_CHECKED);
    XD_REQUIRE(c->ctx, crc == c->info.checksum, XD_ERROR_CORRUPT, "%s: checksum %08x, stored is %08x",
               c->path, (unsigned)crc, (unsigned)c->info.checksum);
    return XD_OK;
}

/* Ids, log-probabilities and their order at one position. */
static xd_result xdi_cache_check_entries(const xd_teacher_cache *c, int64_t p) {
    const unsigned char *at = xdi_cache_position(c, p);
    const int64_t id = xdi_cache_id(c, at), vocabulary = c->info.desc.vocabulary;
    const double next = xdi_cache_wide(c, at + c->form.next), tail = xdi_cache_wide(c, at + c->form.tail);
    double before = 0.0, total = exp(tail);
    XD_REQUIRE(c->ctx, id < vocabulary, XD_ERROR_FORMAT, "%s: position %lld has id %lld of %lld", c->path,
               (long long)p, (long long)id, (long long)vocabulary);
    XD_REQUIRE(c->ctx, next <= 0.0 && tail <= 0.0, XD_ERROR_FORMAT,
               "%s: position %lld has log-probability %g of its next token and %g of the tail", c->path,
               (long long)p, next, tail);
    for (int64_t j = 0; j < c->form.k; j++) {
        const int64_t entry = xdi_cache_entry_id(c, at, j);
        const double l = xdi_cache_entry(c, at, j);
        XD_REQUIRE(c->ctx, entry < vocabulary, XD_ERROR_FORMAT, "%s: position %lld has entry %lld of %lld",
                   c->path, (long long)p, (long long)entry, (long long)vocabulary);
        XD_REQUIRE(c->ctx, l <= before && (j > 0 || l > -INFINITY), XD_ERROR_FORMAT,
                   "%s: position %lld has log-probability %g after %g", c->path, (long long)p, l, before);
        before = l;
        total += exp(l);
    }
    XD_REQUIRE(c->ctx, fabs(total - 1.0) < XDI_CACHE_SLACK, XD_ERROR_FORMAT,
               "%s: probabilities of position %lld sum to %g", c->path, (long long)p, total);
    return XD_OK;
}

/* Drawn ids rise, and are none of the k. Without a tail nothing was drawn. */
static xd_result xdi_cache_check_drawn(const xd_teacher_cache *c, int64_t p) {
    const unsigned char *at = xdi_cache_position(c, p);
    const bool none = xdi_cache_wide(c, at + c->form.tail) == -INFINITY;
    int64_t before = 0;
    for (int64_t j = 0; j < c->form.draws; j++) {
        const int64_t id = xdi_cache_drawn_id(c, at, j);
        XD_REQUIRE(c->ctx, id >= before && id < c->info.desc.vocabulary && (!none || id == 0),
                   XD_ERROR_FORMAT, "%s: position %lld has drawn id %lld of %lld after %lld", c->path,
                   (long long)p, (long long)id, (long long)c->info.desc.vocabulary, (long long)before);
        for (int64_t i = 0; i < c->form.k && !none && (j == 0 || id > before); i++)
            XD_REQUIRE(c->ctx, xdi_cache_entry_id(c, at, i) != id, XD_ERROR_FORMAT,
                       "%s: position %lld has id %lld among the %lld likeliest and drawn", c->path,
                       (long long)p, (long long)id, (long long)c->form.k);
        before = id;
    }
    return XD_OK;
}

static xd_result xdi_cache_check_span(const xd_teacher_cache *c, const xd_cached_document *document,
                                      int64_t p, xd_token_span *before) {
    const xd_token_span span = xdi_cache_span(c, xdi_cache_position(c, p));
    XD_REQUIRE(c->ctx,
               span.begin >= before->begin && span.end >= before->end && span.end <= document->text_bytes,
               XD_ERROR_FORMAT, "%s: position %lld is bytes %lld to %lld of %lld, after %lld to %lld",
               c->path, (long long)p, (long long)span.begin, (long long)span.end,
               (long long)document->text_bytes, (long long)before->begin, (long long)before->end);
    *before = span;
    return XD_OK;
}

static xd_result xdi_cache_check_document(xd_teacher_cache *c, int64_t d) {
    const unsigned char *at = xdi_cache_document_entry(c, d);
    const uint64_t positions = (uint64_t)c->info.positions, first = xdi_cache_get(at, 8);
    const uint64_t end = d + 1 < c->info.documents ? xdi_cache_get(at + XDI_CACHE_DOCUMENT, 8) : positions;
    const uint64_t text = xdi_cache_get(at + 8, 8), zero = xdi_cache_get(at + 20, 4);
    xd_token_span before = { 0, 0 };
    XD_REQUIRE(c->ctx, first < end && end <= positions && (d > 0 || first == 0), XD_ERROR_FORMAT,
               "%s: document %lld is positions %llu to %llu of %llu", c->path, (long long)d,
               (unsigned long long)first, (unsigned long long)end, (unsigned long long)positions);
    XD_REQUIRE(c->ctx, text <= (uint64_t)(INT64_MAX - c->info.text_bytes) && zero == 0, XD_ERROR_FORMAT,
               "%s: document %lld has %llu bytes of text and %08x at its end", c->path, (long long)d,
               (unsigned long long)text, (unsigned)zero);
    const xd_cached_document document = xdi_cache_document_of(c, d);
    const int64_t last = document.first + document.count - 1;
    c->info.text_bytes += document.text_bytes;
    for (int64_t p = document.first; p <= last; p++) {
        XD_TRY(xdi_cache_check_entries(c, p));
        XD_TRY(xdi_cache_check_drawn(c, p));
        XD_TRY(xdi_cache_check_span(c, &document, p, &before));
    }
    const double next = xdi_cache_wide(c, xdi_cache_position(c, last) + c->form.next);
    XD_REQUIRE(c->ctx, next == -INFINITY, XD_ERROR_FORMAT,
               "%s: document %lld ends, but its last token has a next one of log-probability %g", c->path,
               (long long)d, next);
    return XD_OK;
}

XD_PRIVATE xd_result xdi_cache_check_origin(xd_ctx *ctx, const xd_teacher_cache *cache,
                                            const xd_projection_origin *expected) {
    const xd_teacher_cache_desc *d = &cache->info.desc;
    XD_REQUIRE(ctx,
               !expected || (d->teacher_hash == expected->teacher_hash &&
                             (d->student_hash == 0 || d->student_hash == expected->student_hash)),
               XD_ERROR_ARGUMENT,
               "%s: made for the tokenizers %016llx and %016llx, wanted are %016llx and %016llx", cache->path,
               (unsigned long long)d->student_hash, (unsigned long long)d->teacher_hash,
               (unsigned long long)expected->student_hash, (unsigned long long)expected->teacher_hash);
    return XD_OK;
}

static xd_result xdi_cache_check(xd_teacher_cache *c, const xd_projection_origin *expected) {
    XD_TRY(xdi_cache_read_header(c));
    XD_TRY(xdi_cache_check_size(c));
    XD_TRY(xdi_cache_check_origin(c->ctx, c, expected));
    for (int64_t d = 0; d < c->info.documents; d++) XD_TRY(xdi_cache_check_document(c, d));
    return XD_OK;
}

static xd_teacher_cache *xdi_cache_new(xd_ctx *ctx, const char *path) {
    const size_t length = strlen(path) + 1;
    xd_teacher_cache *c = XDI_OBJECT(xd_teacher_cache, ctx, sizeof *c + length);
    if (!c) return NULL;
    c->ctx = ctx;
    c->path = (char *)(c + 1);
    memcpy(c->path, path, length);
    return c;
}

/* Returns the object to the caller, or frees it. */
static xd_result xdi_cache_publish(xd_teacher_cache *c, xd_result result, xd_teacher_cache **out) {
    if (result == XD_OK)
        *out = c;
    else
        xd_teacher_cache_close(c);
    return result;
}

static xd_result xdi_cache_load(xd_teacher_cache *c, const xd_projection_origin *expected) {
    const xd_files *files = &xd_ctx_settings(c->ctx)->files;
    const void *address = NULL;
    int error = xdi_file_open_read(c->ctx, c->path, &c->handle);
    XD_REQUIRE(c->ctx, error == 0, XD_ERROR_IO, "%s: open: %s", c->path, xdi_open_error(error));
    c->open = true;
    error = files->size(files->user, c->handle, &c->bytes);
    XD_REQUIRE(c->ctx, error == 0, XD_ERROR_IO, "%s: size: %s", c->path, strerror(error));
    XD_REQUIRE(c->ctx, c->bytes > 0, XD_ERROR_FORMAT, "%s: 0 bytes, its header has %d", c->path,
               (int)XDI_CACHE_HEADER); /* an empty file cannot be mapped */
    c->mapped = files->map && files->map(files->user, c->handle, c->bytes, &address) == 0;
    c->file = (const unsigned char *)address;
    if (c->mapped) return xdi_cache_check(c, expected);
    c->owned = c->bytes < SIZE_MAX ? xd_allocate(c->ctx, (size_t)c->bytes) : NULL;
    XD_REQUIRE(c->ctx, c->owned, XD_ERROR_MEMORY, "%s: no room for %llu bytes", c->path,
               (unsigned long long)c->bytes);
    error = files->read(files->user, c->handle, c->owned, (size_t)c->bytes, 0);
    XD_REQUIRE(c->ctx, error == 0, XD_ERROR_IO, "%s: read: %s", c->path, strerror(error));
    c->file = (const unsigned char *)c->owned;
    return xdi_cache_check(c, expected);
}

XD_API xd_result xd_teacher_cache_open(xd_ctx *ctx, const xd_teacher_cache_open_desc *desc,
                                       xd_teacher_cache **out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    if (!desc->path) XD_TRY(XDI_CHECK_GIVEN(ctx, desc->data));
    const char *name = desc->path ? desc->path : "teacher cache";
    xd_teacher_cache *c = xdi_cache_new(ctx, name);
    XD_REQUIRE(ctx, c, XD_ERROR_MEMORY, "%s: no room for a cache object", name);
    if (desc->path) return xdi_cache_publish(c, xdi_cache_load(c, desc->expected), out);
    c->file = (const unsigned char *)desc->data;
    c->bytes = desc->data_bytes;
    return xdi_cache_publish(c, xdi_cache_check(c, desc->expected), out);
}

XD_API void xd_teacher_cache_close(xd_teacher_cache *cache) {
    if (!cache || XDI_IS_GONE(xd_teacher_cache, cache)) return;
    const xd_files *files = &xd_ctx_settings(cache->ctx)->files;
    if (cache->mapped) files->unmap(files->user, cache->file, cache->bytes);
    if (cache->open) files->close(files->user, cache->handle); /* nothing was written */
    xd_release(cache->ctx, cache->owned);
    xd_release(cache->ctx, cache);
}

/* ---- reading ---- */

XD_API xd_teacher_cache_info xd_teacher_cache_describe(const xd_teacher_cache *cache) {
    XD_ASSERT(cache);
    return cache->info;
}

XD_API xd_result xd_teacher_cache_find_document(xd_ctx *ctx, const xd_teacher_cache *cache, int64_t d,
                                                xd_cached_document *out) {
    XDI_LIVE(xd_teacher_cache, cache);
    XDI_GIVEN(ctx, ctx, cache, out);
    XD_REQUIRE(ctx, d >= 0 && d < cache->info.documents, XD_ERROR_ARGUMENT, "%s: document %lld of %lld",
               cache->path, (long long)d, (long long)cache->info.documents);
    *out = xdi_cache_document_of(cache, d);
    return XD_OK;
}

/* The sum to normalise by: of the k probabilities and the tail as they are stored. */
static double xdi_cache_total(const xd_teacher_cache *c, const unsigned char *position) {
    double total = exp(xdi_cache_wide(c, position + c->form.tail));
    for (int64_t j = 0; j < c->form.k; j++) total += exp(xdi_cache_entry(c, position, j));
    return total;
}

/* The document of a position. */
static int64_t xdi_cache_find(const xd_teacher_cache *c, int64_t position) {
    int64_t low = 0, high = c->info.documents;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if ((int64_t)xdi_cache_get(xdi_cache_document_entry(c, middle), 8) <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Each draw has the same share; those of one id, which are neighbours, are added up at the first of them. */
static void xdi_cache_drawn(const xd_teacher_cache *c, const unsigned char *at, double share, int32_t *ids,
                            double *probabilities) {
    int64_t first = 0;
    for (int64_t j = 0; j < c->form.draws; j++) {
        const int64_t id = xdi_cache_drawn_id(c, at, j);
        if (j == 0 || id != xdi_cache_drawn_id(c, at, first)) first = j;
        if (ids) ids[j] = (int32_t)id;
        if (probabilities) probabilities[j] = 0.0;
        if (probabilities) probabilities[first] += share;
    }
}

XD_PRIVATE void xdi_cache_entries(const xd_teacher_cache *c, int64_t position, int32_t *ids,
                                  double *probabilities) {
    const unsigned char *at = xdi_cache_position(c, position);
    const double total = probabilities ? xdi_cache_total(c, at) : 1.0;
    for (int64_t j = 0; j < c->form.k; j++) {
        if (ids) ids[j] = (int32_t)xdi_cache_entry_id(c, at, j);
        if (probabilities) probabilities[j] = exp(xdi_cache_entry(c, at, j)) / total;
    }
    if (c->form.draws == 0) return;
    const double share = exp(xdi_cache_wide(c, at + c->form.tail)) / total / (double)c->form.draws;
    xdi_cache_drawn(c, at, share, ids ? ids + c->form.k : NULL,
                    probabilities ? probabilities + c->form.k : NULL);
}

XD_API xd_result xd_teacher_cache_read(xd_ctx *ctx, const xd_teacher_cache *cache,
                                       const xd_teacher_cache_read_desc *desc) {
    XDI_LIVE(xd_teacher_cache, cache);
    XDI_GIVEN(ctx, ctx, cache, desc);
    const xd_teacher_cache *c = cache;
    const int64_t first = desc->first, count = desc->count;
    xd_cached_position *out = desc->positions;
    XD_REQUIRE(ctx,
               first >= 0 && count >= 0 && first <= c->info.positions && count <= c->info.positions - first,
               XD_ERROR_ARGUMENT, "%s: %lld positions from %lld on, it has %lld", c->path, (long long)count,
               (long long)first, (long long)c->info.positions);
    const int64_t entries = c->form.k + c->form.draws;
    for (int64_t i = 0; i < count && (desc->ids || desc->probabilities); i++)
        xdi_cache_entries(c, first + i, desc->ids ? desc->ids + i * entries : NULL,
                          desc->probabilities ? desc->probabilities + i * entries : NULL);
    int64_t d = count ? xdi_cache_find(c, first) : 0, end = 0;
    for (int64_t p = first; out && p < first + count; p++) {
        const unsigned char *at = xdi_cache_position(c, p);
        xd_cached_position *one = &out[p - first];
        if (p == first || p == end) {
            const xd_cached_document document = xdi_cache_document_of(c, d++);
            end = document.first + document.count;
        }
        one->id = (int32_t)xdi_cache_id(c, at);
        one->next = p + 1 < end ? (int32_t)xdi_cache_id(c, at + c->form.bytes) : -1;
        one->span = xdi_cache_span(c, at);
        one->next_log_prob = xdi_cache_wide(c, at + c->form.next);
        one->tail = exp(xdi_cache_wide(c, at + c->form.tail)) / xdi_cache_total(c, at);
    }
    return XD_OK;
}

XD_PRIVATE double xdi_cache_next(const xd_teacher_cache *cache, int64_t position) {
    return xdi_cache_wide(cache, xdi_cache_position(cache, position) + cache->form.next);
}
