/* Canonical forms of vocabulary strings, as NeMo-RL has them. */

#include "base/internal.h"
#include "compat/canonical.h"

#include <string.h>

/* Markers that tokenizers use for a leading space and for a newline, as UTF-8. */
#define XDI_CANONICAL_SPACE "\xC4\xA0"     /* U+0120, of byte-level vocabularies */
#define XDI_CANONICAL_NEWLINE "\xC4\x8A"   /* U+010A */
#define XDI_CANONICAL_TAB "\xC4\x89"       /* U+0109 */
#define XDI_CANONICAL_BLOCK "\xE2\x96\x81" /* U+2581, of SentencePiece */

/* Characters that the reference repairs when it meets the byte-level spelling of their UTF-8 bytes, in its
 * order. The first six are spelled with the raw second byte; what follows "Ã" can never match, because that
 * rule has replaced their first character. */
static const char *const xdi_canonical_latin[] = { "ñ", "á", "é", "í", "ó", "ú" };
static const char *const xdi_canonical_words[] = { "中", "文", "日本", "語", "Рус", "ский", "العربية",
                                                   "ह",  "िं",  "दी",   "∑",  "∏",   "∂",    "∇",
                                                   "∞",  "√",  "∫",    "≈",  "≠",   "≤",    "≥" };
/* Characters of three bytes whose first two and last byte may come as two tokens. */
static const char *const xdi_canonical_artifacts[] = { "∑", "∏", "∂", "∇", "∞", "√", "∫", "≠", "中", "文" };

#define XDI_CANONICAL_COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* ---- code points ---- */

static int xdi_canonical_put(char *out, uint32_t point) {
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    out[0] = (char)(0xC0 | (point >> 6)); /* every point here is below U+0800 */
    out[1] = (char)(0x80 | (point & 0x3F));
    return 2;
}

/* The code point at text[*at]; *at moves after it. Vocabulary strings are UTF-8; an invalid byte counts as
 * a code point. */
static uint32_t xdi_canonical_next(const char *text, int64_t size, int64_t *at) {
    const unsigned char *p = (const unsigned char *)text + *at;
    const int more = p[0] >= 0xF0 ? 3 : p[0] >= 0xE0 ? 2 : p[0] >= 0xC0 ? 1 : 0;
    if (more == 0 || *at + more >= size) {
        *at += 1;
        return p[0];
    }
    uint32_t point = (uint32_t)p[0] & (0x3Fu >> more);
    for (int i = 1; i <= more; i++) point = point << 6 | (p[i] & 0x3Fu);
    *at += more + 1;
    return point;
}

/* The character by which byte-level vocabularies write a byte. */
static uint32_t xdi_canonical_visible(unsigned char byte) {
    if (byte <= 0x20) return 0x100u + byte;
    if (byte == 0x7F) return 0x121u;
    if (byte >= 0x80 && byte <= 0xA0) return 0x122u + (byte - 0x80u);
    return byte == 0xAD ? 0x143u : byte;
}

/* Byte-level spelling of a string. */
static int64_t xdi_canonical_spell(const char *text, size_t size, char *out) {
    int64_t n = 0;
    for (size_t i = 0; i < size; i++)
        n += xdi_canonical_put(out + n, xdi_canonical_visible((unsigned char)text[i]));
    return n;
}

/* ---- one token ---- */

static bool xdi_canonical_is(const char *text, int64_t size, const char *other) {
    return size == (int64_t)strlen(other) && memcmp(text, other, (size_t)size) == 0;
}

static bool xdi_canonical_begins(const char *text, int64_t size, const char *other) {
    const int64_t n = (int64_t)strlen(other);
    return size >= n && memcmp(text, other, (size_t)n) == 0;
}

/* Replaces every occurrence, left to right; `to` is not longer than `from`. Returns the new size. */
static int64_t xdi_canonical_replace(char *text, int64_t size, const char *from, int64_t from_size,
                                     const char *to) {
    const size_t to_size = strlen(to);
    int64_t n = 0;
    for (int64_t i = 0; i < size;) {
        if (i + from_size <= size && memcmp(text + i, from, (size_t)from_size) == 0) {
            memcpy(text + n, to, to_size);
            n += (int64_t)to_size;
            i += from_size;
        } else {
            text[n++] = text[i++];
        }
    }
    return n;
}

static int64_t xdi_canonical_newlines(char *text, int64_t size) {
    if (xdi_canonical_is(text, size, XDI_CANONICAL_NEWLINE) || xdi_canonical_is(text, size, "\\n") ||
        xdi_canonical_is(text, size, XDI_CANONICAL_TAB) ||
        xdi_canonical_is(text, size, XDI_CANONICAL_SPACE "\n")) {
        text[0] = '\n';
        return 1;
    }
    const int64_t replaced = xdi_canonical_replace(text, size, XDI_CANONICAL_NEWLINE, 2, "\n");
    return replaced != size ? replaced : xdi_canonical_replace(text, size, "\\n", 2, "\n");
}

static int xdi_canonical_hex(uint32_t c) {
    if (c >= '0' && c <= '9') return (int)c - '0';
    if (c >= 'A' && c <= 'F') return (int)c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? (int)c - 'a' + 10 : -1;
}

/* What Python's int() strips. */
static bool xdi_canonical_blank(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

/* Two characters as Python's int(text, 16) reads them: digits, or one digit with a sign or white space beside it; -1 where it
 * refuses them or the number is negative. Of its digits, those of ASCII. */
static int xdi_canonical_number(uint32_t first, uint32_t second) {
    const int high = xdi_canonical_hex(first), low = xdi_canonical_hex(second);
    if (high >= 0 && low >= 0) return 16 * high + low;
    if (high >= 0) return xdi_canonical_blank(second) ? high : -1;
    if (first == '-') return low == 0 ? 0 : -1;
    return first == '+' || xdi_canonical_blank(first) ? low : -1;
}

/* The value of "<0xHH>", six characters, or -1. */
static int xdi_canonical_byte(const char *text, int64_t size) {
    int64_t at = 3;
    if (size < 6 || memcmp(text, "<0x", 3) != 0 || text[size - 1] != '>') return -1;
    const uint32_t first = xdi_canonical_next(text, size, &at);
    if (at >= size - 1) return -1;
    const uint32_t second = xdi_canonical_next(text, size, &at);
    return at == size - 1 ? xdi_canonical_number(first, second) : -1;
}

static int64_t xdi_canonical_repair(char *text, int64_t size) {
    char from[64];
    if (!memchr(text, 0xC3, (size_t)size)) return size; /* the first byte of every spelling below */
    for (int i = 0; i < XDI_CANONICAL_COUNT(xdi_canonical_latin); i++) {
        const char *to = xdi_canonical_latin[i];
        int64_t n = xdi_canonical_put(from, 0xC3);
        n += xdi_canonical_put(from + n, (unsigned char)to[1]);
        size = xdi_canonical_replace(text, size, from, n, to);
    }
    size = xdi_canonical_replace(text, size, "\xC3\x83", 2, "\xC3\x80");
    for (int i = 0; i < XDI_CANONICAL_COUNT(xdi_canonical_words); i++) {
        const char *word = xdi_canonical_words[i];
        const int64_t n = xdi_canonical_spell(word, strlen(word), from);
        /* the one entry that is replaced by something else: two vowel signs gain their letter */
        size = xdi_canonical_replace(text, size, from, n, strcmp(word, "िं") == 0 ? "हिं" : word);
    }
    return size;
}

XD_PRIVATE int64_t xdi_canonical_token(xd_text token, char *out) {
    int64_t size = token.size, skip = 0;
    if (size <= 0) return 0;
    const bool marked = xdi_canonical_begins(token.data, size, XDI_CANONICAL_BLOCK);
    if (marked || token.data[0] == ' ' || token.data[0] == '_') {
        skip = marked ? 3 : 1;
        memcpy(out, XDI_CANONICAL_SPACE, 2);
        memcpy(out + 2, token.data + skip, (size_t)(size - skip));
        size += 2 - skip;
    } else {
        memcpy(out, token.data, (size_t)size);
    }
    size = xdi_canonical_newlines(out, size);
    if (size == 3 && xdi_canonical_begins(out, size, XDI_CANONICAL_SPACE) &&
        memchr(",.;:", out[2], 4)) { /* not strchr, which finds NUL too */
        out[0] = out[2];
        size = 1;
    }
    const int byte = xdi_canonical_byte(out, size);
    if (byte >= 0) return xdi_canonical_put(out, (uint32_t)byte);
    size = xdi_canonical_repair(out, size);
    if (xdi_canonical_is(out, size, "<|begin_of_text|>")) size = (int64_t)strlen(strcpy(out, "<bos>"));
    return xdi_canonical_is(out, size, "<pad>") ? 0 : size;
}

/* ---- a sequence ---- */

/* A two-token spelling of one character: writes it, with the space marker that the first token may have, and
 * returns its length; 0 when these are not such tokens. */
static int64_t xdi_canonical_artifact(xd_text first, xd_text second, char *out) {
    const bool space = xdi_canonical_begins(first.data, first.size, XDI_CANONICAL_SPACE);
    const int64_t skip = space ? 2 : 0;
    for (int i = 0; i < XDI_CANONICAL_COUNT(xdi_canonical_artifacts); i++) {
        const char *ch = xdi_canonical_artifacts[i];
        char head[8], tail[4];
        const int64_t head_size = xdi_canonical_spell(ch, 2, head);
        const int64_t tail_size = xdi_canonical_spell(ch + 2, 1, tail);
        if (first.size - skip != head_size || second.size != tail_size) continue;
        if (memcmp(first.data + skip, head, (size_t)head_size) != 0) continue;
        if (memcmp(second.data, tail, (size_t)tail_size) != 0) continue;
        memcpy(out, XDI_CANONICAL_SPACE, (size_t)skip);
        memcpy(out + skip, ch, 3);
        return skip + 3;
    }
    return 0;
}

/* The byte that the reference takes a character for, or -1; its last two ranges are off by three, for parity
 * here too. */
static int xdi_canonical_value(uint32_t point) {
    if (point < 256) return (int)point;
    if (point >= 0x11C && point <= 0x11F) return (int)point - 256;
    if (point == 0x122 || point == 0x123) return (int)point - 128;
    if ((point >= 0x125 && point <= 0x144) || (point >= 0x196 && point <= 0x1A4)) return (int)point - 165;
    return -1;
}

/* Tokens that may be pieces of one character. */
typedef struct xdi_canonical_run {
    unsigned char bytes[4];
    int64_t count; /* bytes so far, also those after the four that are stored */
    bool space;    /* the first token has the marker */
} xdi_canonical_run;

/* Adds a token's bytes; false, and nothing added, when it is not byte-like. */
static bool xdi_canonical_collect(const char *text, int64_t size, bool first, xdi_canonical_run *run) {
    int64_t at = 0;
    while (xdi_canonical_begins(text + at, size - at, XDI_CANONICAL_SPACE)) at += 2;
    const int64_t begin = at;
    if (at == size) return false;
    for (int64_t i = at; i < size;)
        if (xdi_canonical_value(xdi_canonical_next(text, size, &i)) < 0) return false;
    if (first) run->space = begin > 0;
    for (int64_t i = begin; i < size;) {
        const int value = xdi_canonical_value(xdi_canonical_next(text, size, &i));
        if (run->count < 4) run->bytes[run->count] = (unsigned char)value;
        run->count++;
    }
    return true;
}

/* True when the bytes are the strict UTF-8 of exactly one character above U+007F. */
static bool xdi_canonical_character(const xdi_canonical_run *run) {
    const unsigned char *b = run->bytes;
    const int64_t n = b[0] >= 0xF0 ? 4 : b[0] >= 0xE0 ? 3 : 2;
    if (run->count != n || b[0] < 0xC2 || b[0] > 0xF4) return false;
    for (int64_t i = 1; i < n; i++)
        if ((b[i] & 0xC0) != 0x80) return false;
    if (b[0] == 0xE0 && b[1] < 0xA0) return false;
    if (b[0] == 0xED && b[1] > 0x9F) return false; /* surrogates */
    if (b[0] == 0xF0 && b[1] < 0x90) return false;
    return b[0] != 0xF4 || b[1] < 0x90;
}

static void xdi_canonical_append(xdi_canonical *s, const char *text, int64_t size, int32_t end) {
    memmove(s->text + s->offsets[s->count], text, (size_t)size);
    s->offsets[s->count + 1] = s->offsets[s->count] + size;
    s->origin[++s->count] = end;
}

/* Steps 1 and 2: pairs of tokens that spell one character, then every token's canonical form. */
static void xdi_canonical_tokens(const xd_text *tokens, int64_t count, xdi_canonical *s) {
    for (int64_t i = 0; i < count;) {
        char *out = s->text + s->offsets[s->count], joined[8];
        const int64_t size = i + 1 < count ? xdi_canonical_artifact(tokens[i], tokens[i + 1], joined) : 0;
        xd_text token = tokens[i];
        if (size > 0) {
            token.data = joined;
            token.size = size;
        }
        i += size > 0 ? 2 : 1;
        xdi_canonical_append(s, out, xdi_canonical_token(token, out), (int32_t)i);
    }
}

/* The longest run of byte-like tokens [i, end) of a sequence of `count`; token i begins at `start`. */
static int64_t xdi_canonical_gather(const xdi_canonical *s, int64_t i, int64_t start, int64_t count,
                                    xdi_canonical_run *run) {
    int64_t end = i;
    memset(run, 0, sizeof *run);
    for (; end < count; end++) {
        const int64_t from = end == i ? start : s->offsets[end];
        if (!xdi_canonical_collect(s->text + from, s->offsets[end + 1] - from, end == i, run)) break;
    }
    return end;
}

/* Step 3, in place: maximal runs of byte-like tokens that spell one character become it. What is written lies
 * at or before what is read; only the place where the next token starts must be taken before writing. */
static void xdi_canonical_join(xdi_canonical *s) {
    const int64_t count = s->count;
    int64_t start = 0;
    s->count = 0;
    for (int64_t i = 0; i < count;) {
        xdi_canonical_run run;
        int64_t end = xdi_canonical_gather(s, i, start, count, &run);
        const bool lone = end - i == 1 && run.count <= 1;
        if (end > i && !lone && run.count >= 2 && run.count <= 4 && xdi_canonical_character(&run)) {
            char joined[8] = XDI_CANONICAL_SPACE;
            memcpy(joined + (run.space ? 2 : 0), run.bytes, (size_t)run.count);
            start = s->offsets[end];
            xdi_canonical_append(s, joined, run.count + (run.space ? 2 : 0), s->origin[end]);
            i = end;
            continue;
        }
        for (end = end > i ? end : i + 1; i < end; i++) {
            const int64_t next = s->offsets[i + 1];
            xdi_canonical_append(s, s->text + start, next - start, s->origin[i + 1]);
            start = next;
        }
    }
}

/* The first block is what xdi_canonical_destroy releases. */
static bool xdi_canonical_layout(xd_arena *arena, int64_t count, size_t bytes, xdi_canonical *out) {
    bool fits = true;
    out->offsets = (int64_t *)xdi_arena_array(arena, count + 1, sizeof *out->offsets, &fits);
    out->origin = (int32_t *)xdi_arena_array(arena, count + 1, sizeof *out->origin, &fits);
    out->text = (char *)xdi_arena_array(arena, 1, bytes, &fits);
    return fits;
}

XD_PRIVATE xd_result xdi_canonical_sequence(xd_ctx *ctx, const xd_text *tokens, int64_t count,
                                            xdi_canonical *out) {
    XDI_GIVEN(ctx, ctx, out);
    XDI_GIVEN_LIST(ctx, tokens, count);
    size_t bytes = 8;
    xd_arena plan = xd_arena_over(NULL, 0), arena;
    XD_REQUIRE(ctx, count >= 0, XD_ERROR_ARGUMENT, "%lld tokens", (long long)count);
    for (int64_t i = 0; i < count; i++)
        XD_REQUIRE(ctx, tokens[i].size >= 0, XD_ERROR_ARGUMENT, "token %lld has %lld bytes", (long long)i,
                   (long long)tokens[i].size);
    for (int64_t i = 0; i < count; i++)
        XD_REQUIRE(ctx, tokens[i].data || tokens[i].size == 0, XD_ERROR_ARGUMENT,
                   "token %lld: data is NULL and size %lld", (long long)i, (long long)tokens[i].size);
    for (int64_t i = 0; i < count; i++) bytes += (size_t)tokens[i].size + 2;
    XD_REQUIRE(ctx, xdi_canonical_layout(&plan, count, bytes, out), XD_ERROR_MEMORY,
               "%lld tokens would not fit into memory", (long long)count);
    void *memory = xd_allocate(ctx, plan.peak);
    XD_REQUIRE(ctx, memory, XD_ERROR_MEMORY, "no room for %lld canonical tokens: %zu bytes", (long long)count,
               plan.peak);
    arena = xd_arena_over(memory, plan.peak);
    xdi_canonical_layout(&arena, count, bytes, out);
    out->count = 0;
    xdi_canonical_tokens(tokens, count, out);
    xdi_canonical_join(out);
    return XD_OK;
}

XD_PRIVATE void xdi_canonical_destroy(xd_ctx *ctx, xdi_canonical *sequence) {
    xd_release(ctx, sequence->offsets);
    memset(sequence, 0, sizeof *sequence);
}
