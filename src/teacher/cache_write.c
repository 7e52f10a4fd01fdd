/* Writing a teacher's cache. */

#include "base/crc.h"
#include "base/publish_internal.h"
#include "loss/softmax.h"
#include "loss/topk.h"
#include "teacher/internal.h"

#include <math.h>
#include <string.h>

struct xd_teacher_cache_writer {
    xd_ctx *ctx;
    xd_teacher_cache_desc d; /* defaults filled in */
    xdi_cache_form form;
    const xd_vocab *vocab;
    xd_vocab *own_vocab; /* where the caller gave none */
    xd_comm *tp;
    char *path; /* after the struct, in the same allocation */
    char name[XD_CACHE_NAME_BYTES];
    xdi_publish *file; /* rank 0 of tp */
    uint64_t offset;
    uint32_t crc;
    int64_t positions, document_count, document_room;
    xd_cached_document *documents;
    int32_t expected;   /* id of the next position, -1 when the document is complete, -2 at its beginning */
    xd_token_span span; /* of the last position of the document */
};

enum { XDI_CACHE_COMPLETE = -1, XDI_CACHE_BEGIN = -2 };

/* What a block's positions are computed from, besides the block. */
typedef struct xdi_cache_rows {
    double *values;               /* [n, k] the largest logits */
    int64_t *ids;                 /* [n, k] theirs */
    double *lse, *lse_one, *next; /* [n] at the temperature and at 1; logit of the next token */
    xd_fixed *tail;               /* [n] */
    unsigned char *file;          /* [n] positions as the file has them */
    xdi_cache_draws draws;
} xdi_cache_rows;

/* ---- creating ---- */

static xd_teacher_cache_desc xdi_cache_defaults(const xd_teacher_cache_desc *desc) {
    xd_teacher_cache_desc d = *desc;
    if (d.temperature == 0.0) d.temperature = 1.0;
    if (!d.name) d.name = "";
    return d;
}

static xd_result xdi_cache_validate(xd_ctx *ctx, const char *path, const xd_teacher_cache_desc *d) {
    XD_TRY(xdi_cache_check_desc(ctx, path, d, XD_ERROR_ARGUMENT));
    XD_REQUIRE(ctx, strlen(d->name) < XD_CACHE_NAME_BYTES, XD_ERROR_ARGUMENT,
               "%s: a name of %zu bytes, a file holds %d", path, strlen(d->name),
               (int)XD_CACHE_NAME_BYTES - 1);
    if (!d->vocab) return XD_OK;
    const int64_t size = xd_vocab_describe(d->vocab).size;
    XD_REQUIRE(ctx, size == d->vocabulary, XD_ERROR_ARGUMENT,
               "%s: a vocabulary of %lld ids, but its cut has %lld", path, (long long)d->vocabulary,
               (long long)size);
    return XD_OK;
}

static xd_result xdi_cache_begin(xd_teacher_cache_writer *w) {
    const xd_vocab_desc whole = { w->d.vocabulary, NULL, NULL };
    if (!w->d.vocab) XD_TRY(xd_vocab_create(w->ctx, &whole, &w->own_vocab));
    w->vocab = w->d.vocab ? w->d.vocab : w->own_vocab;
    w->form = xdi_cache_form_of(&w->d);
    w->offset = XDI_CACHE_HEADER;
    w->expected = XDI_CACHE_COMPLETE;
    if (w->tp && xd_comm_rank(w->tp) != 0) return XD_OK;
    return xdi_publish_create(w->ctx, w->path, &w->file);
}

static xd_result xdi_cache_make(xd_ctx *ctx, const char *path, const xd_teacher_cache_desc *d,
                                xd_teacher_cache_writer **out) {
    XD_REQUIRE(ctx, xd_ctx_kernels(ctx)->device == XD_DEVICE_CPU, XD_ERROR_UNSUPPORTED,
               "teacher caches are written from logits on the CPU only");
    XD_TRY(xdi_cache_validate(ctx, path, d));
    const size_t length = strlen(path) + 1;
    xd_teacher_cache_writer *w = XDI_OBJECT(xd_teacher_cache_writer, ctx, sizeof *w + length);
    XD_REQUIRE(ctx, w, XD_ERROR_MEMORY, "%s: no room for a writer", path);
    *out = w;
    w->ctx = ctx;
    w->d = *d;
    w->tp = d->vocab ? xd_vocab_describe(d->vocab).tp : NULL;
    w->path = (char *)(w + 1);
    memcpy(w->path, path, length);
    memcpy(w->name, d->name, strlen(d->name));
    w->d.name = w->name;
    return xdi_cache_begin(w);
}

XD_API xd_result xd_teacher_cache_writer_create(xd_ctx *ctx, const xd_teacher_cache_desc *desc,
                                                xd_teacher_cache_writer **out) {
    XDI_GIVEN(ctx, ctx, desc);
    const xd_teacher_cache_desc d = xdi_cache_defaults(desc);
    xd_teacher_cache_writer *w = NULL;
    xd_result result = XDI_CHECK_GIVEN(ctx, out, desc->path);
    if (result == XD_OK) result = xdi_cache_make(ctx, d.path, &d, &w);
    result = xdi_vocab_agree(d.vocab ? xd_vocab_describe(d.vocab).tp : NULL, NULL, result);
    if (result == XD_OK)
        *out = w;
    else
        xd_teacher_cache_writer_abort(w);
    return result;
}

XD_API void xd_teacher_cache_writer_abort(xd_teacher_cache_writer *w) {
    if (!w || XDI_IS_GONE(xd_teacher_cache_writer, w)) return;
    xdi_publish_abort(w->file);
    xd_vocab_destroy(w->own_vocab);
    xd_release(w->ctx, w->documents);
    xd_release(w->ctx, w);
}

/* ---- documents ---- */

static xd_result xdi_cache_add_document(xd_teacher_cache_writer *w, const void *text, size_t bytes) {
    XD_REQUIRE(w->ctx, w->expected == XDI_CACHE_COMPLETE, XD_ERROR_ARGUMENT,
               "%s: a new document, but document %lld is not complete", w->path,
               (long long)(w->document_count - 1));
    XD_REQUIRE(w->ctx, text || bytes == 0, XD_ERROR_ARGUMENT, "%s: no text of %zu bytes", w->path, bytes);
    if (w->document_count == w->document_room) {
        const int64_t room = w->document_room ? 2 * w->document_room : 16;
        xd_cached_document *more = (xd_cached_document *)xd_allocate(w->ctx, (size_t)room * sizeof *more);
        XD_REQUIRE(w->ctx, more, XD_ERROR_MEMORY, "%s: no room for %lld documents", w->path, (long long)room);
        if (w->document_count) memcpy(more, w->documents, (size_t)w->document_count * sizeof *more);
        xd_release(w->ctx, w->documents);
        w->documents = more;
        w->document_room = room;
    }
    return XD_OK;
}

XD_API xd_result xd_teacher_cache_writer_document(xd_teacher_cache_writer *w, const void *text,
                                                  size_t bytes) {
    XDI_LIVE(xd_teacher_cache_writer, w);
    XDI_GIVEN(w ? w->ctx : NULL, w);
    XD_TRY(xdi_vocab_agree(w->tp, NULL, xdi_cache_add_document(w, text, bytes)));
    xd_cached_document *document = &w->documents[w->document_count++];
    memset(document, 0, sizeof *document);
    document->first = w->positions;
    document->text_bytes = (int64_t)bytes;
    document->text_checksum = xd_crc32c(0, text, bytes);
    memset(&w->span, 0, sizeof w->span);
    w->expected = XDI_CACHE_BEGIN;
    return XD_OK;
}

/* ---- checks of a block ---- */

static xd_result xdi_cache_check_spans(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b) {
    const int64_t text = w->documents[w->document_count - 1].text_bytes;
    xd_token_span before = w->span;
    XD_REQUIRE(w->ctx, b->spans, XD_ERROR_ARGUMENT, "%s: the cache has spans, the block has none", w->path);
    for (int64_t i = 0; i < b->logits.rows; i++) {
        const xd_token_span s = b->spans[i];
        XD_REQUIRE(w->ctx,
                   s.begin >= before.begin && s.end >= before.end && s.end >= s.begin && s.end <= text,
                   XD_ERROR_ARGUMENT, "%s: row %lld is bytes %lld to %lld of %lld, after %lld to %lld",
                   w->path, (long long)i, (long long)s.begin, (long long)s.end, (long long)text,
                   (long long)before.begin, (long long)before.end);
        XD_REQUIRE(w->ctx, s.end - s.begin <= XDI_CACHE_MOST_SPAN && s.begin <= (int64_t)UINT32_MAX,
                   XD_ERROR_ARGUMENT, "%s: row %lld is %lld bytes from %lld on, a file holds %d and %lld",
                   w->path, (long long)i, (long long)(s.end - s.begin), (long long)s.begin,
                   (int)XDI_CACHE_MOST_SPAN, (long long)UINT32_MAX);
        before = s;
    }
    return XD_OK;
}

static xd_result xdi_cache_check_ids(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b) {
    int32_t expected = w->expected;
    XDI_GIVEN(w->ctx, b->ids, b->next);
    for (int64_t i = 0; i < b->logits.rows; i++) {
        XD_REQUIRE(w->ctx, expected != XDI_CACHE_COMPLETE, XD_ERROR_ARGUMENT,
                   "%s: row %lld comes after the end of document %lld", w->path, (long long)i,
                   (long long)(w->document_count - 1));
        XD_REQUIRE(w->ctx,
                   b->ids[i] >= 0 && b->ids[i] < w->d.vocabulary && b->next[i] >= -1 &&
                       b->next[i] < w->d.vocabulary,
                   XD_ERROR_ARGUMENT, "%s: row %lld has id %d and next %d, the vocabulary %lld", w->path,
                   (long long)i, (int)b->ids[i], (int)b->next[i], (long long)w->d.vocabulary);
        XD_REQUIRE(w->ctx, expected == XDI_CACHE_BEGIN || b->ids[i] == expected, XD_ERROR_ARGUMENT,
                   "%s: row %lld has id %d, but the row before says %d comes next", w->path, (long long)i,
                   (int)b->ids[i], (int)expected);
        expected = b->next[i];
    }
    return XD_OK;
}

static xd_result xdi_cache_check_block(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b) {
    XD_TRY(xdi_vocab_check_rows(w->ctx, w->vocab, "logits", &b->logits, -1));
    XD_REQUIRE(w->ctx, w->document_count > 0, XD_ERROR_ARGUMENT, "%s: positions without a document", w->path);
    XD_TRY(xdi_cache_check_ids(w, b));
    return w->d.spans ? xdi_cache_check_spans(w, b) : XD_OK;
}

/* ---- positions ---- */

static void xdi_cache_layout_draws(const xd_teacher_cache_writer *w, int64_t rows, xd_arena *arena,
                                   xdi_cache_draws *d, bool *fits) {
    const xd_vocab_info info = xd_vocab_describe(w->vocab);
    const int64_t blocks = xdi_cache_blocks(info.end - info.begin), ranks = w->tp ? xd_comm_size(w->tp) : 1;
    d->blocks = (uint64_t *)xdi_arena_array(arena, rows * blocks, sizeof(uint64_t), fits);
    d->masses = (uint64_t *)xdi_arena_array(arena, rows * ranks, sizeof(uint64_t), fits);
    d->counts = (int64_t *)xdi_arena_array(arena, ranks, sizeof(int64_t), fits);
    d->drawn = (int64_t *)xdi_arena_array(arena, rows * w->d.draws, sizeof(int64_t), fits);
}

static bool xdi_cache_layout(const xd_teacher_cache_writer *w, int64_t rows, xd_arena *arena,
                             xdi_cache_rows *r) {
    size_t entries, bytes; /* no size wraps if these do not */
    bool fits = true;
    memset(r, 0, sizeof *r);
    if (!xdi_size_multiply((size_t)rows, 8 * (size_t)w->d.k, &entries) ||
        !xdi_size_multiply((size_t)rows, w->form.bytes, &bytes))
        return false;
    r->values = (double *)xdi_arena_array(arena, rows * w->d.k, sizeof(double), &fits);
    r->ids = (int64_t *)xdi_arena_array(arena, rows * w->d.k, sizeof(int64_t), &fits);
    r->lse = (double *)xdi_arena_array(arena, rows, sizeof(double), &fits);
    r->lse_one = (double *)xdi_arena_array(arena, rows, sizeof(double), &fits);
    r->next = (double *)xdi_arena_array(arena, rows, sizeof(double), &fits);
    r->tail = (xd_fixed *)xdi_arena_array(arena, rows, sizeof(xd_fixed), &fits);
    r->file = (unsigned char *)xdi_arena_array(arena, rows, w->form.bytes, &fits);
    if (w->d.temperature == 1.0) r->lse_one = r->lse;
    if (w->d.draws) xdi_cache_layout_draws(w, rows, arena, &r->draws, &fits);
    return fits;
}

/* The contribution to the tails of this shard's columns outside the k: those after the last of the k in their order. */
static void xdi_cache_add_tails(const xd_teacher_cache_writer *w, const xd_rows *logits, xdi_cache_rows *r) {
    const xd_vocab_info info = xd_vocab_describe(w->vocab);
    const int64_t blocks = xdi_cache_blocks(info.end - info.begin);
    for (int64_t row = 0; row < logits->rows; row++) {
        const double *values = r->values + row * w->d.k;
        const int64_t *ids = r->ids + row * w->d.k;
        for (int64_t id = info.begin; id < info.end; id++) {
            const double z = xdi_loss_load(logits, row, id - info.begin);
            if (!xdi_cache_is_other(values, ids, w->d.k, z, id)) continue;
            const double p = exp(z / w->d.temperature - r->lse[row]);
            xdi_fixed_add(&r->tail[row], p);
            if (w->d.draws) xdi_cache_add_block(r->draws.blocks + row * blocks, id - info.begin, p);
        }
    }
}

static xd_result xdi_cache_draw_rows(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b,
                                     const xdi_cache_rows *r) {
    xdi_cache_draws d = r->draws;
    d.vocab = w->vocab;
    d.logits = &b->logits;
    d.lse = r->lse;
    d.last = r->values;
    d.last_ids = r->ids;
    d.temperature = w->d.temperature;
    d.k = w->d.k;
    d.count = w->d.draws;
    d.random.seed = w->d.seed;
    d.random.stream = XD_STREAM_CACHE;
    d.first = w->positions;
    return xdi_cache_draw(&d);
}

/* Statistics of every row over all shards. */
static xd_result xdi_cache_statistics(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b,
                                      xdi_cache_rows *r) {
    const int64_t rows = b->logits.rows;
    XD_TRY(xdi_vocab_topk(w->ctx, w->vocab, &b->logits, w->d.k, r->values, r->ids));
    XD_TRY(xdi_row_stats(w->ctx, w->vocab, b->logits, w->d.temperature, r->lse, NULL));
    if (w->d.temperature != 1.0) XD_TRY(xdi_row_stats(w->ctx, w->vocab, b->logits, 1.0, r->lse_one, NULL));
    XD_TRY(xdi_vocab_at_ids(w->ctx, w->vocab, &b->logits, xd_ids_of(b->next, XD_DTYPE_I32), r->next));
    for (int64_t i = 0; i < rows; i++)
        XD_REQUIRE(w->ctx, isfinite(r->lse[i]) && isfinite(r->lse_one[i]), XD_ERROR_DATA,
                   "%s: the logits of row %lld have log-sum-exp %g", w->path, (long long)i, r->lse[i]);
    xdi_cache_add_tails(w, &b->logits, r);
    if (w->tp && rows) XD_TRY(xd_all_reduce(w->tp, r->tail, r->tail, 2 * rows, XD_DTYPE_I64, XD_SUM));
    return w->d.draws && rows ? xdi_cache_draw_rows(w, b, r) : XD_OK;
}

/* Row i of the block as a position of the file. */
static void xdi_cache_put_position(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b,
                                   const xdi_cache_rows *r, int64_t i) {
    const xdi_cache_form *f = &w->form;
    unsigned char *at = r->file + (size_t)i * f->bytes;
    const double next = b->next[i] >= 0 ? r->next[i] - r->lse_one[i] : -INFINITY;
    xdi_cache_put(at, (uint64_t)b->ids[i], f->id_bytes);
    if (f->spans) {
        xdi_cache_put(at + f->span, (uint64_t)b->spans[i].begin, 4);
        xdi_cache_put(at + f->span + 4, (uint64_t)(b->spans[i].end - b->spans[i].begin), 2);
    }
    xdi_cache_put(at + f->next, xdi_cache_encode(f, true, next), f->wide_bytes);
    xdi_cache_put(at + f->tail, xdi_cache_encode(f, true, log(xdi_fixed_value(r->tail[i]))), f->wide_bytes);
    for (int64_t j = 0; j < f->k; j++) {
        const int64_t entry = i * f->k + j;
        const double l = r->values[entry] / w->d.temperature - r->lse[i];
        xdi_cache_put(at + f->ids + j * f->id_bytes, (uint64_t)r->ids[entry], f->id_bytes);
        xdi_cache_put(at + f->codes + j * f->code_bytes, xdi_cache_encode(f, false, l), f->code_bytes);
    }
    const bool none =
        xdi_cache_encode(f, true, log(xdi_fixed_value(r->tail[i]))) == xdi_cache_encode(f, true, -INFINITY);
    for (int64_t j = 0; j < f->draws; j++)
        xdi_cache_put(at + f->drawn + j * f->id_bytes, none ? 0 : (uint64_t)r->draws.drawn[i * f->draws + j],
                      f->id_bytes);
}

static xd_result xdi_cache_put_block(const xd_teacher_cache_writer *w, const xd_teacher_cache_block *b,
                                     const xdi_cache_rows *r) {
    const size_t bytes = (size_t)b->logits.rows * w->form.bytes;
    for (int64_t i = 0; i < b->logits.rows; i++) xdi_cache_put_position(w, b, r, i);
    return w->file ? xdi_publish_write(w->file, r->file, bytes, w->offset) : XD_OK;
}

static void xdi_cache_advance(xd_teacher_cache_writer *w, const xd_teacher_cache_block *b,
                              const xdi_cache_rows *r) {
    const int64_t rows = b->logits.rows;
    const size_t bytes = (size_t)rows * w->form.bytes;
    if (rows == 0) return;
    w->crc = xd_crc32c(w->crc, r->file, bytes);
    w->offset += bytes;
    w->positions += rows;
    w->expected = b->next[rows - 1];
    if (w->d.spans) w->span = b->spans[rows - 1];
}

XD_API xd_result xd_teacher_cache_writer_append(xd_teacher_cache_writer *w,
                                                const xd_teacher_cache_block *block) {
    XDI_LIVE(xd_teacher_cache_writer, w);
    XDI_GIVEN_OF(w, block);
    xd_arena arena = xd_arena_over(NULL, 0);
    xdi_cache_rows r;
    void *memory = NULL;
    xd_result result = xdi_cache_check_block(w, block);
    if (result == XD_OK && xdi_cache_layout(w, block->logits.rows, &arena, &r))
        memory = xd_allocate(w->ctx, arena.peak + 1);
    if (result == XD_OK && !memory)
        result = XD_FAIL(w->ctx, XD_ERROR_MEMORY, "%s: no room for %lld rows", w->path,
                         (long long)block->logits.rows);
    result = xdi_vocab_agree(w->tp, NULL, result);
    if (result == XD_OK) {
        arena = xd_arena_over(memory, arena.peak);
        xdi_cache_layout(w, block->logits.rows, &arena, &r);
        result = xdi_cache_statistics(w, block, &r);
    }
    if (result == XD_OK) result = xdi_vocab_agree(w->tp, NULL, xdi_cache_put_block(w, block, &r));
    if (result == XD_OK) xdi_cache_advance(w, block, &r);
    xd_release(w->ctx, memory);
    return result;
}

/* ---- finishing ---- */

static void xdi_cache_put_header(const xd_teacher_cache_writer *w, unsigned char *at) {
    const xd_teacher_cache_desc *d = &w->d;
    uint64_t temperature;
    memcpy(&temperature, &d->temperature, sizeof temperature);
    memset(at, 0, XDI_CACHE_HEADER);
    memcpy(at, XDI_CACHE_MAGIC, 8);
    xdi_cache_put(at + 8, XDI_CACHE_VERSION, 4);
    xdi_cache_put(at + 16, (uint64_t)w->positions, 8);
    xdi_cache_put(at + 24, (uint64_t)w->document_count, 8);
    xdi_cache_put(at + 32, (uint64_t)d->vocabulary, 8);
    xdi_cache_put(at + 40, d->student_hash, 8);
    xdi_cache_put(at + 48, d->teacher_hash, 8);
    xdi_cache_put(at + 56, temperature, 8);
    xdi_cache_put(at + 64, (uint64_t)d->context, 8);
    xdi_cache_put(at + 72, (uint64_t)d->k, 4);
    xdi_cache_put(at + 76, (uint64_t)d->coding, 4);
    xdi_cache_put(at + 80, d->spans ? XDI_CACHE_SPANS : 0, 4);
    xdi_cache_put(at + XDI_CACHE_DRAWS, (uint64_t)d->draws, 4);
    xdi_cache_put(at + XDI_CACHE_DRAWS + 4, d->draws ? d->seed : 0, 8);
    memcpy(at + XDI_CACHE_NAME, w->name, sizeof w->name);
}

/* The documents after the positions, then the header with the checksum of everything. */
static xd_result xdi_cache_write_ends(xd_teacher_cache_writer *w) {
    unsigned char header[XDI_CACHE_HEADER], entry[XDI_CACHE_DOCUMENT];
    for (int64_t i = 0; i < w->document_count; i++) {
        memset(entry, 0, sizeof entry);
        xdi_cache_put(entry, (uint64_t)w->documents[i].first, 8);
        xdi_cache_put(entry + 8, (uint64_t)w->documents[i].text_bytes, 8);
        xdi_cache_put(entry + 16, w->documents[i].text_checksum, 4);
        XD_TRY(xdi_publish_write(w->file, entry, sizeof entry, w->offset));
        w->crc = xd_crc32c(w->crc, entry, sizeof entry);
        w->offset += sizeof entry;
    }
    xdi_cache_put_header(w, header);
    w->crc = xd_crc32c(w->crc, header + XDI_CACHE_CHECKED, XDI_CACHE_HEADER - XDI_CACHE_CHECKED);
    xdi_cache_put(header + 12, w->crc, 4);
    return xdi_publish_write(w->file, header, sizeof header, 0);
}

static xd_result xdi_cache_end(xd_teacher_cache_writer *w) {
    XD_REQUIRE(w->ctx, w->positions > 0, XD_ERROR_ARGUMENT, "%s: a cache without positions", w->path);
    XD_REQUIRE(w->ctx, w->expected == XDI_CACHE_COMPLETE, XD_ERROR_ARGUMENT,
               "%s: document %lld is not complete", w->path, (long long)(w->document_count - 1));
    if (!w->file) return XD_OK;
    XD_TRY(xdi_cache_write_ends(w));
    const xd_result result = xdi_publish_commit(w->file);
    w->file = NULL; /* freed by the commit */
    return result;
}

XD_API xd_result xd_teacher_cache_writer_commit(xd_teacher_cache_writer *w) {
    XDI_LIVE(xd_teacher_cache_writer, w);
    XDI_CALL(w ? w->ctx : NULL);
    const xd_result given = XDI_CHECK_GIVEN(w ? w->ctx : NULL, w);
    if (!w) return given;
    const xd_result result = xdi_vocab_agree(w->tp, NULL, given == XD_OK ? xdi_cache_end(w) : given);
    xd_teacher_cache_writer_abort(w);
    return result;
}
