/* A projection from two tokenizers: every token's bytes are encoded by the other tokenizer. */

#include "align/internal.h"
#include "align/projection_build.h"
#include "align/rows.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum {
    XDI_BUILD_STUDENT = 0,
    XDI_BUILD_TEACHER = 1,
    XDI_BUILD_MOST_PIECES = 32,
    XDI_BUILD_MOST_NAME = 512, /* bytes of a special token's name that is looked for */
    XDI_BUILD_GUARD = 1        /* a byte that no text has and no token begins with */
};

typedef struct xdi_build {
    xd_ctx *ctx;
    const xd_tokenizer *tokenizer[2];
    xd_tokenizer_info info[2];
    xd_encoder *encoder[2]; /* the student's for the reverse pass only */
    char *text;             /* room for a guard and the longest token */
    xd_votes *votes;
    xd_projection_options options;
    xd_projection_report report; /* the doubles are sums until xdi_build_finish */
    int64_t mapped;              /* tokens that are exact or went through their pieces */
    double bytes;                /* of all tokens that are text */
} xdi_build;

/* A token's bytes in the other tokenizer's pieces. */
typedef struct xdi_build_pieces {
    const int32_t *ids;
    const xd_token_span *spans;
    int64_t count;
    int64_t origin; /* where the bytes begin in the spans */
} xdi_build_pieces;

/* ---- the other tokenizer's view of a token ---- */

static bool xdi_build_is_text(xd_token token) {
    return token.length > 0 && token.kind != XD_TOKEN_KIND_NONE && token.kind != XD_TOKEN_KIND_SPECIAL &&
           token.kind != XD_TOKEN_KIND_UNKNOWN;
}

/* The teacher's token that equals a student's; -1 when not found. */
static int32_t xdi_build_equal(const xd_tokenizer *teacher, xd_token token) {
    char name[XDI_BUILD_MOST_NAME];
    if (token.length == 0) return -1;
    const int32_t id = xdi_build_is_text(token) ? xd_tokenizer_find(teacher, token.bytes, token.length) : -1;
    if (id >= 0 || (token.kind != XD_TOKEN_KIND_SPECIAL && token.kind != XD_TOKEN_KIND_ADDED)) return id;
    if (token.length >= sizeof name || memchr(token.bytes, 0, token.length)) return -1;
    memcpy(name, token.bytes, token.length);
    name[token.length] = '\0';
    return xd_tokenizer_find_special(teacher, name);
}

/* Pieces after a guard byte, so that anything a tokenizer puts before a text is put before the guard. False when a
 * piece includes both the guard and a byte of the token. */
static bool xdi_build_behind_guard(const xd_encoding *e, xdi_build_pieces *out) {
    int64_t first = 0;
    while (first < e->count && e->spans[first].begin < 1) {
        if (e->spans[first].end > 1) return false;
        first++;
    }
    out->ids = e->ids + first;
    out->spans = e->spans + first;
    out->count = e->count - first;
    out->origin = 1;
    return true;
}

static xd_result xdi_build_encode(xdi_build *b, int by, xd_token token, xdi_build_pieces *out) {
    xd_encoding e;
    b->text[0] = (char)XDI_BUILD_GUARD;
    memcpy(b->text + 1, token.bytes, token.length);
    if (b->info[by].adds_prefix) {
        XD_TRY(xd_encode(b->encoder[by], b->text, token.length + 1, NULL, &e));
        if (xdi_build_behind_guard(&e, out)) return XD_OK;
    }
    XD_TRY(xd_encode(b->encoder[by], b->text + 1, token.length, NULL, &e));
    out->ids = e.ids;
    out->spans = e.spans;
    out->count = e.count;
    out->origin = 0;
    return XD_OK;
}

/* ---- votes ---- */

/* The first pieces that can get votes, and the number of the token's bytes in them. */
static int64_t xdi_build_keep(const xdi_build *b, int by, const xdi_build_pieces *pieces, int32_t *ids,
                              int64_t *bytes) {
    int64_t n = 0, end = pieces->origin;
    *bytes = 0;
    for (int64_t i = 0; i < pieces->count && n < b->options.max_pieces; i++) {
        const xd_token_span span = pieces->spans[i];
        const int64_t begin = span.begin > end ? span.begin : end;
        if (pieces->ids[i] == b->info[by].unknown) continue;
        ids[n++] = pieces->ids[i];
        if (span.end <= begin) continue; /* a piece of a character that was counted already */
        *bytes += span.end - begin;
        end = span.end;
    }
    return n;
}

static xd_result xdi_build_vote_pieces(xdi_build *b, int32_t id, xd_token token, bool reverse) {
    const int by = reverse ? XDI_BUILD_STUDENT : XDI_BUILD_TEACHER;
    double weights[XDI_BUILD_MOST_PIECES];
    int32_t ids[XDI_BUILD_MOST_PIECES];
    int64_t bytes = 0;
    xdi_build_pieces pieces;
    XD_TRY(xdi_build_encode(b, by, token, &pieces));
    const int64_t n = xdi_build_keep(b, by, &pieces, ids, &bytes);
    xdi_piece_weights(n, weights);
    for (int64_t i = 0; i < n; i++)
        XD_TRY(xd_votes_add(b->votes, reverse ? ids[i] : id, reverse ? id : ids[i], weights[i]));
    if (reverse) return XD_OK;
    b->report.cut += pieces.count > b->options.max_pieces;
    b->report.mean_pieces += (double)pieces.count;
    b->mapped++;
    b->report.lost_bytes += (double)((int64_t)token.length - bytes);
    return XD_OK;
}

/* Every student token: the same token, or its pieces. */
static xd_result xdi_build_forward(xdi_build *b) {
    for (int32_t id = 0; id < b->info[XDI_BUILD_STUDENT].size; id++) {
        const xd_token token = xd_tokenizer_token(b->tokenizer[XDI_BUILD_STUDENT], id);
        const int32_t equal =
            b->options.disable_exact ? -1 : xdi_build_equal(b->tokenizer[XDI_BUILD_TEACHER], token);
        b->report.tokens += token.kind != XD_TOKEN_KIND_NONE;
        if (xdi_build_is_text(token)) b->bytes += (double)token.length;
        if (equal >= 0) {
            XD_TRY(xdi_votes_set_exact(b->votes, id, equal));
            b->report.exact++;
            b->report.mean_pieces += 1.0;
            b->mapped++;
        } else if (xdi_build_is_text(token)) {
            XD_TRY(xdi_build_vote_pieces(b, id, token, false));
        }
    }
    return XD_OK;
}

static xd_result xdi_build_reverse(xdi_build *b) {
    for (int32_t id = 0; id < b->info[XDI_BUILD_TEACHER].size; id++) {
        const xd_token token = xd_tokenizer_token(b->tokenizer[XDI_BUILD_TEACHER], id);
        if (xdi_build_is_text(token)) XD_TRY(xdi_build_vote_pieces(b, id, token, true));
    }
    return XD_OK;
}

/* ---- special tokens that look alike ---- */

/* Names of the special tokens, by id; the other ids have none. */
static void xdi_build_names(const xd_tokenizer *tokenizer, int64_t size, xd_text *names) {
    for (int64_t id = 0; id < size; id++) {
        const xd_token token = xd_tokenizer_token(tokenizer, (int32_t)id);
        const bool named = token.kind == XD_TOKEN_KIND_SPECIAL || token.kind == XD_TOKEN_KIND_ADDED;
        names[id].data = (const char *)token.bytes;
        names[id].size = named ? (int64_t)token.length : 0;
    }
}

static xd_result xdi_build_special(xdi_build *b) {
    const int64_t students = b->info[XDI_BUILD_STUDENT].size, teachers = b->info[XDI_BUILD_TEACHER].size;
    xdi_special_pair *pairs = NULL;
    int64_t count = 0;
    xdi_special_desc desc;
    xd_text *names = (xd_text *)xd_allocate(b->ctx, (size_t)(students + teachers) * sizeof *names);
    XD_REQUIRE(b->ctx, names, XD_ERROR_MEMORY, "no room for %lld names", (long long)(students + teachers));
    xdi_build_names(b->tokenizer[XDI_BUILD_STUDENT], students, names);
    xdi_build_names(b->tokenizer[XDI_BUILD_TEACHER], teachers, names + students);
    memset(&desc, 0, sizeof desc);
    desc.student.texts = names;
    desc.student.count = students;
    desc.teacher.texts = names + students;
    desc.teacher.count = teachers;
    desc.threshold = b->options.special_threshold;
    desc.max_pairs = b->options.k;
    xd_result result = xdi_special_pairs(b->ctx, &desc, &pairs, &count);
    for (int64_t i = 0; i < count && result == XD_OK; i++)
        result = xd_votes_add(b->votes, pairs[i].student_id, pairs[i].teacher_id, 0.8 * pairs[i].similarity);
    xd_release(b->ctx, pairs);
    xd_release(b->ctx, names);
    return result;
}

/* ---- the whole ---- */

static size_t xdi_build_longest(const xd_tokenizer *tokenizer, int32_t size) {
    size_t longest = 0;
    for (int32_t id = 0; id < size; id++) {
        const size_t length = xd_tokenizer_token(tokenizer, id).length;
        if (length > longest) longest = length;
    }
    return longest;
}

static xd_result xdi_build_begin(xdi_build *b) {
    size_t room = 0;
    for (int i = 0; i < 2; i++) {
        const size_t longest = xdi_build_longest(b->tokenizer[i], b->info[i].size);
        if (longest > room) room = longest;
    }
    b->text = (char *)xd_allocate(b->ctx, room + 1);
    XD_REQUIRE(b->ctx, b->text, XD_ERROR_MEMORY, "no room for a token of %zu bytes", room);
    for (int i = 0; i < 2; i++) {
        const xd_encoder_desc desc = { b->tokenizer[i], false };
        if (i == XDI_BUILD_TEACHER || b->options.reverse)
            XD_TRY(xd_encoder_create(b->ctx, &desc, &b->encoder[i]));
    }
    const xd_votes_desc sizes = { b->info[XDI_BUILD_STUDENT].size, b->info[XDI_BUILD_TEACHER].size };
    return xd_votes_create(b->ctx, &sizes, &b->votes);
}

static void xdi_build_end(xdi_build *b) {
    xd_votes_destroy(b->votes);
    xd_encoder_destroy(b->encoder[XDI_BUILD_STUDENT]);
    xd_encoder_destroy(b->encoder[XDI_BUILD_TEACHER]);
    xd_release(b->ctx, b->text);
}

/* Share of one row's votes for ids that its list does not have. */
static double xdi_build_row_loss(const xdi_vote *cells, int64_t count, const int32_t *ids, int64_t k) {
    double all = 0.0, lost = 0.0;
    for (int64_t c = 0; c < count; c++) {
        bool kept = false;
        for (int64_t i = 0; i < k && !kept; i++) kept = ids[i] == cells[c].teacher_id;
        all += cells[c].weight;
        if (!kept) lost += cells[c].weight;
    }
    return all > 0.0 ? lost / all : 0.0;
}

/* Divides the sums of the report. */
static xd_result xdi_build_finish(xdi_build *b, const xd_projection_rows *rows) {
    xd_projection_report *r = &b->report;
    const xdi_vote *cells = NULL;
    int64_t count = 0, at = 0;
    double lost = 0.0;
    XD_TRY(xdi_votes_read(b->votes, &cells, &count));
    for (int64_t s = 0; s < rows->rows; s++) {
        const int64_t begin = at;
        while (at < count && cells[at].student_id == s) at++;
        r->covered += at > begin;
        lost += xdi_build_row_loss(cells + begin, at - begin, rows->ids + s * rows->k, rows->k);
    }
    r->lost_mass = r->covered ? lost / (double)r->covered : 0.0;
    r->mean_pieces = b->mapped ? r->mean_pieces / (double)b->mapped : 0.0;
    r->lost_bytes = b->bytes > 0.0 ? r->lost_bytes / b->bytes : 0.0;
    return XD_OK;
}

static xd_result xdi_build_rows(xdi_build *b, xd_projection_rows *rows) {
    xd_projection_rows_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.k = b->options.k;
    XD_TRY(xdi_build_begin(b));
    XD_TRY(xdi_build_forward(b));
    if (b->options.reverse) XD_TRY(xdi_build_reverse(b));
    if (b->options.special_pairs) XD_TRY(xdi_build_special(b));
    XD_TRY(xd_projection_rows_from_votes(b->votes, &desc, rows));
    return xdi_build_finish(b, rows);
}

/* The options with their defaults, checked, and the hashes of the tokenizers. */
static xd_result xdi_build_origin(xd_ctx *ctx, const xd_projection_desc *desc, xd_projection_origin *out) {
    const xd_projection_options usual = xd_projection_defaults();
    memset(out, 0, sizeof *out);
    out->options = xdi_projection_resolve(desc->options ? desc->options : &usual);
    XD_TRY(xdi_projection_check_options(ctx, &out->options));
    out->student_hash = xd_tokenizer_describe(desc->student).hash;
    out->teacher_hash = xd_tokenizer_describe(desc->teacher).hash;
    return XD_OK;
}

static xd_result xdi_build_fresh(xd_ctx *ctx, const xd_projection_desc *desc, xd_projection *out,
                                 xd_projection_report *report) {
    xd_projection_origin origin;
    xd_projection_rows rows;
    xdi_build b;
    memset(&rows, 0, sizeof rows);
    memset(&b, 0, sizeof b);
    XD_TRY(xdi_build_origin(ctx, desc, &origin));
    b.ctx = ctx;
    b.options = origin.options;
    b.tokenizer[XDI_BUILD_STUDENT] = desc->student;
    b.tokenizer[XDI_BUILD_TEACHER] = desc->teacher;
    for (int i = 0; i < 2; i++) b.info[i] = xd_tokenizer_describe(b.tokenizer[i]);
    xd_result result = xdi_build_rows(&b, &rows);
    xdi_build_end(&b); /* frees the votes before the matrix is allocated */
    if (result == XD_OK)
        result = xd_projection_from_rows(ctx, &rows, b.info[XDI_BUILD_STUDENT].size,
                                         b.info[XDI_BUILD_TEACHER].size, out);
    xd_projection_rows_destroy(ctx, &rows);
    if (result != XD_OK) return result;
    out->origin = origin;
    b.report.entries = out->entries;
    if (report) *report = b.report;
    return XD_OK;
}

/* ---- the cache ---- */

static xd_result xdi_build_at(xd_ctx *ctx, const char *path, const xd_projection_desc *desc,
                              const xd_projection_origin *origin, xd_projection *out,
                              xd_projection_report *report) {
    const xd_projection_load_desc load = { path, NULL, 0, origin };
    xd_projection_report counts;
    xd_projection made;
    memset(&counts, 0, sizeof counts);
    if (xdi_file_probe(ctx, path) != ENOENT) { /* a missing file is not logged as an error */
        const xd_result result = xd_projection_load(ctx, &load, out);
        counts.read = true;
        counts.entries = result == XD_OK ? out->entries : 0;
        if (result == XD_OK && report) *report = counts;
        if (result != XD_ERROR_FORMAT && result != XD_ERROR_CORRUPT) return result;
    }
    XD_TRY(xdi_build_fresh(ctx, desc, &made, &counts));
    const xd_result written = xd_projection_save(ctx, path, &made);
    if (written == XD_OK) {
        *out = made;
        if (report) *report = counts;
    } else {
        xd_projection_destroy(ctx, &made);
    }
    return written;
}

XD_API xd_result xd_projection_build(xd_ctx *ctx, const xd_projection_desc *desc, xd_projection *out,
                                     xd_projection_report *report) {
    XDI_GIVEN(ctx, ctx, desc, out);
    XDI_GIVEN(ctx, desc->student, desc->teacher);
    char name[XD_PROJECTION_NAME_BYTES];
    xd_projection_origin origin;
    if (!desc->directory) return xdi_build_fresh(ctx, desc, out, report);
    XD_TRY(xdi_build_origin(ctx, desc, &origin));
    xd_projection_cache_name(&origin, name);
    const size_t room = strlen(desc->directory) + sizeof name + 1;
    char *path = (char *)xd_allocate(ctx, room);
    XD_REQUIRE(ctx, path, XD_ERROR_MEMORY, "no room for a path of %zu bytes", room);
    snprintf(path, room, "%s/%s", desc->directory, name);
    const xd_result result = xdi_build_at(ctx, path, desc, &origin, out, report);
    xd_release(ctx, path);
    return result;
}
