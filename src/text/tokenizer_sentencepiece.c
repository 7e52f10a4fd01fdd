/* Tokenizers from SentencePiece models. */

#include "text/internal.h"

#include <string.h>

/* SentencePiece models of type BPE: a protobuf of pieces with scores, and the settings of trainer and normaliser.
 * Merges are by score: the two neighbours whose concatenation is the piece with the highest score. */

/* ---- protobuf ---- */

typedef struct xdi_protobuf {
    xd_ctx *ctx;
    const uint8_t *start, *at, *end; /* start: of the file, for messages */
} xdi_protobuf;

/* One field: a number, or bytes. */
typedef struct xdi_protobuf_field {
    uint32_t number;
    unsigned wire; /* 0 varint, 1 eight bytes, 2 bytes, 5 four bytes */
    uint64_t value;
    const uint8_t *bytes;
    size_t length;
} xdi_protobuf_field;

static xd_result xdi_protobuf_refuse(const xdi_protobuf *p, const char *what) {
    return XD_FAIL(p->ctx, XD_ERROR_FORMAT, "SentencePiece model: %s at byte %llu", what,
                   (unsigned long long)(p->at - p->start));
}

static xd_result xdi_protobuf_varint(xdi_protobuf *p, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (p->at == p->end) return xdi_protobuf_refuse(p, "a number without end");
        const uint8_t byte = *p->at++;
        *value |= (uint64_t)(byte & 0x7fu) << shift;
        if (byte < 0x80) return XD_OK;
    }
    return xdi_protobuf_refuse(p, "a number of more than 64 bits");
}

/* The next field; false at the end of the message. */
static xd_result xdi_protobuf_next(xdi_protobuf *p, xdi_protobuf_field *f, bool *found) {
    uint64_t key;
    *found = p->at < p->end;
    if (!*found) return XD_OK;
    XD_TRY(xdi_protobuf_varint(p, &key));
    memset(f, 0, sizeof *f);
    f->wire = (unsigned)(key & 7u);
    if (key >> 3 == 0 || key >> 3 > 0x1fffffff) return xdi_protobuf_refuse(p, "a field number out of range");
    f->number = (uint32_t)(key >> 3);
    if (f->wire == 0) return xdi_protobuf_varint(p, &f->value);
    uint64_t length = f->wire == 1 ? 8 : 4;
    if (f->wire == 2) XD_TRY(xdi_protobuf_varint(p, &length));
    if (f->wire != 1 && f->wire != 2 && f->wire != 5)
        return xdi_protobuf_refuse(p, "an unknown kind of field");
    if (length > (uint64_t)(p->end - p->at))
        return xdi_protobuf_refuse(p, "a field that is longer than its message");
    f->bytes = p->at;
    f->length = (size_t)length;
    p->at += length;
    return XD_OK;
}

static xdi_protobuf xdi_protobuf_inside(const xdi_protobuf *p, const xdi_protobuf_field *f) {
    xdi_protobuf inside = *p;
    inside.at = f->bytes;
    inside.end = f->bytes + f->length;
    return inside;
}

/* ---- the model ---- */

/* Kinds of pieces in the file. */
enum {
    XDI_SENTENCEPIECE_NORMAL = 1,
    XDI_SENTENCEPIECE_UNKNOWN,
    XDI_SENTENCEPIECE_CONTROL,
    XDI_SENTENCEPIECE_USER,
    XDI_SENTENCEPIECE_UNUSED,
    XDI_SENTENCEPIECE_BYTE
};

/* A piece that the trainer names. */
typedef struct xdi_sentencepiece_name {
    const char *text;
    size_t bytes;
} xdi_sentencepiece_name;

typedef struct xdi_sentencepiece {
    xdi_protobuf file;
    int64_t pieces;
    size_t bytes; /* of all pieces */
    uint64_t model_type;
    bool prefix, remove_spaces, escape_spaces, byte_fallback, spaces_behind;
    size_t character_map, rules;
    xdi_sentencepiece_name bos, eos;
} xdi_sentencepiece;

/* One piece of the vocabulary. */
typedef struct xdi_sentencepiece_piece {
    const uint8_t *text;
    size_t length;
    float score;
    uint64_t kind;
} xdi_sentencepiece_piece;

static xd_result xdi_sentencepiece_read_piece(const xdi_protobuf *file, const xdi_protobuf_field *field,
                                              xdi_sentencepiece_piece *piece) {
    xdi_protobuf p = xdi_protobuf_inside(file, field);
    xdi_protobuf_field f;
    bool found;
    memset(piece, 0, sizeof *piece);
    piece->kind = XDI_SENTENCEPIECE_NORMAL;
    for (;;) {
        XD_TRY(xdi_protobuf_next(&p, &f, &found));
        if (!found) break;
        if (f.number == 1 && f.wire == 2) {
            piece->text = f.bytes;
            piece->length = f.length;
        } else if (f.number == 2 && f.wire == 5) {
            const uint32_t bits = f.bytes[0] | (uint32_t)f.bytes[1] << 8 | (uint32_t)f.bytes[2] << 16 |
                                  (uint32_t)f.bytes[3] << 24;
            memcpy(&piece->score, &bits, sizeof piece->score);
        } else if (f.number == 3 && f.wire == 0) {
            piece->kind = f.value;
        }
    }
    if (piece->length == 0) return xdi_protobuf_refuse(&p, "a piece without text");
    if (!(piece->score - piece->score == 0.0f)) return xdi_protobuf_refuse(&p, "a score that is not finite");
    return XD_OK;
}

static void xdi_sentencepiece_read_name(xdi_sentencepiece_name *name, const xdi_protobuf_field *f) {
    if (f->length == 0) return; /* the default stands */
    name->text = (const char *)f->bytes;
    name->bytes = f->length;
}

static xd_result xdi_sentencepiece_read_trainer(xdi_sentencepiece *m, const xdi_protobuf_field *field) {
    xdi_protobuf p = xdi_protobuf_inside(&m->file, field);
    xdi_protobuf_field f;
    bool found;
    for (;;) {
        XD_TRY(xdi_protobuf_next(&p, &f, &found));
        if (!found) return XD_OK;
        if (f.number == 3 && f.wire == 0) m->model_type = f.value;
        if (f.number == 24 && f.wire == 0) m->spaces_behind = f.value != 0;
        if (f.number == 35 && f.wire == 0) m->byte_fallback = f.value != 0;
        if (f.number == 46 && f.wire == 2) xdi_sentencepiece_read_name(&m->bos, &f);
        if (f.number == 47 && f.wire == 2) xdi_sentencepiece_read_name(&m->eos, &f);
    }
}

static xd_result xdi_sentencepiece_read_normalizer(xdi_sentencepiece *m, const xdi_protobuf_field *field) {
    xdi_protobuf p = xdi_protobuf_inside(&m->file, field);
    xdi_protobuf_field f;
    bool found;
    for (;;) {
        XD_TRY(xdi_protobuf_next(&p, &f, &found));
        if (!found) return XD_OK;
        if (f.number == 2 && f.wire == 2) m->character_map = f.length;
        if (f.number == 3 && f.wire == 0) m->prefix = f.value != 0;
        if (f.number == 4 && f.wire == 0) m->remove_spaces = f.value != 0;
        if (f.number == 5 && f.wire == 0) m->escape_spaces = f.value != 0;
        if (f.number == 6 && f.wire == 2) m->rules = f.length;
    }
}

/* Everything but the pieces, which are counted. */
static xd_result xdi_sentencepiece_measure(xdi_sentencepiece *m) {
    xdi_protobuf p = m->file;
    xdi_protobuf_field f;
    xdi_sentencepiece_piece piece;
    bool found;
    m->model_type = 1; /* the defaults of the format */
    m->prefix = m->remove_spaces = m->escape_spaces = true;
    m->bos.text = "<s>";
    m->bos.bytes = 3;
    m->eos.text = "</s>";
    m->eos.bytes = 4;
    for (;;) {
        XD_TRY(xdi_protobuf_next(&p, &f, &found));
        if (!found) return XD_OK;
        if (f.wire != 2) continue;
        if (f.number == 1) {
            XD_TRY(xdi_sentencepiece_read_piece(&m->file, &f, &piece));
            m->pieces++;
            m->bytes += (piece.kind == XDI_SENTENCEPIECE_USER ? 4 : 2) * piece.length;
        }
        if (f.number == 2) XD_TRY(xdi_sentencepiece_read_trainer(m, &f));
        if (f.number == 3) XD_TRY(xdi_sentencepiece_read_normalizer(m, &f));
    }
}

static xd_result xdi_sentencepiece_check(const xdi_sentencepiece *m) {
    static const char *const types[] = { "0", "Unigram", "BPE", "Word", "Character" };
    xd_ctx *ctx = m->file.ctx;
    XD_REQUIRE(ctx, m->pieces > 0, XD_ERROR_FORMAT, "SentencePiece model: there are no pieces");
    XD_REQUIRE(ctx, m->model_type == 2, XD_ERROR_UNSUPPORTED,
               "SentencePiece model of type %s: only BPE is supported",
               m->model_type < 5 ? types[m->model_type] : "unknown");
    XD_REQUIRE(ctx, m->character_map == 0 && m->rules == 0, XD_ERROR_UNSUPPORTED,
               "SentencePiece model: a normaliser's character map of %llu bytes is not supported",
               (unsigned long long)(m->character_map + m->rules));
    XD_REQUIRE(ctx, !m->remove_spaces, XD_ERROR_UNSUPPORTED,
               "SentencePiece model: remove_extra_whitespaces is not supported");
    XD_REQUIRE(ctx, m->escape_spaces && !m->spaces_behind, XD_ERROR_UNSUPPORTED,
               "SentencePiece model: blanks that are not escaped, or that end words, are not supported");
    return XD_OK;
}

static xd_result xdi_sentencepiece_add(xd_tokenizer *t, int32_t id, const xdi_sentencepiece_piece *piece,
                                       uint8_t *buffer) {
    xdi_added added;
    memset(&added, 0, sizeof added);
    added.id = id;
    added.special = piece->kind == XDI_SENTENCEPIECE_CONTROL;
    added.normalized = !added.special; /* the reference finds its own symbols behind the prefix too */
    /* ... in text without a blank: each is U+2581 before the reference looks, so this symbol is never found */
    added.literal = added.normalized && memchr(piece->text, ' ', piece->length);
    const int byte = xdi_tokenizer_fallback_byte(piece->text, piece->length);
    const uint8_t raw = (uint8_t)byte;
    const size_t length = xdi_tokenizer_unmark(piece->text, piece->length, buffer);
    switch (piece->kind) {
    case XDI_SENTENCEPIECE_NORMAL:
        return xdi_vocabulary_add(&t->vocab, id, XD_TOKEN_KIND_NORMAL, piece->text, piece->length, buffer,
                                  length);
    case XDI_SENTENCEPIECE_UNKNOWN:
        XD_REQUIRE(t->ctx, t->vocab.unknown < 0, XD_ERROR_FORMAT,
                   "SentencePiece model: pieces %d and %d are unknown", (int)t->vocab.unknown, (int)id);
        t->vocab.unknown = id;
        return xdi_vocabulary_set(&t->vocab, id, XD_TOKEN_KIND_UNKNOWN, piece->text, piece->length);
    case XDI_SENTENCEPIECE_CONTROL:
    case XDI_SENTENCEPIECE_USER: return xdi_tokenizer_add_special(t, &added, (const char *)buffer, length);
    case XDI_SENTENCEPIECE_BYTE:
        XD_REQUIRE(t->ctx, byte >= 0, XD_ERROR_FORMAT, "SentencePiece model: piece %d is no byte", (int)id);
        return xdi_vocabulary_add(&t->vocab, id, XD_TOKEN_KIND_BYTE, piece->text, piece->length, &raw, 1);
    default:
        return XD_FAIL(t->ctx, XD_ERROR_UNSUPPORTED, "SentencePiece model: piece %d is of kind %llu%s",
                       (int)id, (unsigned long long)piece->kind,
                       piece->kind == XDI_SENTENCEPIECE_UNUSED ? " (unused), which is not supported" : "");
    }
}

/* The control piece with a name, -1 when not found: the reference uses the names too, and ignores
 * the ids in the same message. */
static int32_t xdi_sentencepiece_control(const xd_tokenizer *t, const xdi_sentencepiece_name *name) {
    const int32_t id = xdi_tokenizer_special(t, name->text, name->bytes);
    return id >= 0 && t->vocab.tokens[id].kind == XD_TOKEN_KIND_SPECIAL ? id : -1;
}

/* A score as an integer that grows while the score falls. */
static int32_t xdi_sentencepiece_rank(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof bits);
    const uint32_t magnitude = (uint32_t)bits & 0x7fffffffu;
    return bits < 0 ? (int32_t)magnitude : -(int32_t)magnitude;
}

static xd_result xdi_sentencepiece_fill(const xdi_sentencepiece *m, xd_tokenizer *t,
                                        const xd_tokenizer_desc *desc, int32_t *ranks, uint8_t *buffer) {
    xdi_protobuf p = m->file;
    xdi_protobuf_field f;
    xdi_sentencepiece_piece piece;
    int32_t id = 0;
    bool found;
    for (;;) {
        XD_TRY(xdi_protobuf_next(&p, &f, &found));
        if (!found) break;
        if (f.wire != 2 || f.number != 1) continue;
        XD_TRY(xdi_sentencepiece_read_piece(&m->file, &f, &piece));
        ranks[id] = xdi_sentencepiece_rank(piece.score);
        XD_TRY(xdi_sentencepiece_add(t, id, &piece, buffer));
        id++;
    }
    t->byte_fallback = m->byte_fallback;
    t->fuse_unknown = true;
    t->bos = xdi_sentencepiece_control(t, &m->bos);
    t->eos = xdi_sentencepiece_control(t, &m->eos);
    if (t->bos >= 0) xdi_around_put(&t->around, t->bos, false);
    XD_TRY(xdi_tokenizer_derive_merges(t, ranks));
    XD_TRY(xdi_tokenizer_add_rewrite(t, XDI_REWRITE_REPLACE, " ", 1, true, XDI_TOKENIZER_MARK, 3));
    if (m->prefix) {
        XD_TRY(xdi_tokenizer_add_rewrite(t, XDI_REWRITE_PREPEND, NULL, 0, false, XDI_TOKENIZER_MARK, 3));
        t->adds_prefix = t->text_prefix = true;
    }
    t->stages.normalizer_count = t->stages.rewrite_count;
    XD_TRY(xdi_tokenizer_add_specials(t, desc));
    return xdi_tokenizer_finish(t);
}

XD_PRIVATE xd_result xdi_tokenizer_load_sentencepiece(xd_ctx *ctx, const xdi_tokenizer_file *file,
                                                      const xd_tokenizer_desc *desc, xd_tokenizer **out) {
    xdi_sentencepiece m;
    xd_tokenizer *t = NULL;
    memset(&m, 0, sizeof m);
    m.file.ctx = ctx;
    m.file.start = m.file.at = (const uint8_t *)file->text;
    m.file.end = m.file.start + file->bytes;
    XD_TRY(xdi_sentencepiece_measure(&m));
    XD_TRY(xdi_sentencepiece_check(&m));
    int64_t size = m.pieces;
    size_t blob = m.bytes + 16;
    XD_TRY(xdi_tokenizer_measure_specials(ctx, desc, &size, &blob));
    XD_TRY(xdi_tokenizer_begin(ctx, size, blob, &t));
    int32_t *ranks = (int32_t *)xd_allocate(ctx, (size_t)size * sizeof *ranks);
    uint8_t *buffer = (uint8_t *)xd_allocate(ctx, m.bytes + 1);
    xd_result result = ranks && buffer
                           ? xdi_sentencepiece_fill(&m, t, desc, ranks, buffer)
                           : XD_FAIL(ctx, XD_ERROR_MEMORY, "no room for %lld pieces", (long long)size);
    xd_release(ctx, ranks);
    xd_release(ctx, buffer);
    if (result == XD_OK)
        *out = t;
    else
        xd_tokenizer_destroy(t);
    return result;
}
