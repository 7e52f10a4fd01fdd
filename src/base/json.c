/* A reader of JSON. */

#include "base/internal.h"
#include "base/json.h"
#include "base/publish.h"

#include <errno.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct xd_json {
    xd_json_kind kind;
    bool negative;   /* of an integer: the value is -integer */
    bool exact;      /* of a number: integer notation that fits 64 bits */
    size_t offset;   /* in the text */
    const char *key; /* of a member; NULL for elements and the root */
    size_t key_bytes;
    const xd_json *next; /* sibling */
    union {
        bool truth;
        struct {
            double real;
            uint64_t integer; /* magnitude */
        } number;
        struct {
            const char *text;
            size_t bytes;
        } string;
        struct {
            const void **items; /* an array's elements in order; an object's members by key */
            size_t count;
        } container;
    } as;
};

/* A document is one block: the nodes (the root first), the items of all containers, the decoded strings. */
typedef struct xdi_json_parser {
    xd_ctx *ctx;
    const char *text;
    size_t bytes, at;
    int depth, max_depth;
    bool allow_nul;
    xd_json *nodes;
    const void **items;
    char *strings;
} xdi_json_parser;

enum { XDI_JSON_DEEPEST = 1000, XDI_JSON_LONGEST_NUMBER = 512 };

/* One rule of the grammar. */
static xd_result xdi_json_expect(const xdi_json_parser *p, bool condition, const char *what) {
    XD_REQUIRE(p->ctx, condition, XD_ERROR_FORMAT, "JSON: %s at byte %llu", what, (unsigned long long)p->at);
    return XD_OK;
}

static xd_result xdi_json_parse_value(xdi_json_parser *p, xd_json **out);

/* ---- scanning ---- */

static void xdi_json_skip_space(xdi_json_parser *p) {
    while (p->at < p->bytes) {
        const char c = p->text[p->at];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
        p->at++;
    }
}

/* The next byte; NUL at the end, which no grammar rule accepts. */
static char xdi_json_peek(const xdi_json_parser *p) {
    return p->at < p->bytes ? p->text[p->at] : '\0';
}

static bool xdi_json_take(xdi_json_parser *p, char c) {
    if (xdi_json_peek(p) != c) return false;
    p->at++;
    return true;
}

static bool xdi_json_take_word(xdi_json_parser *p, const char *word) {
    const size_t length = strlen(word);
    if (p->bytes - p->at < length || memcmp(p->text + p->at, word, length) != 0) return false;
    p->at += length;
    return true;
}

/* Upper bound on the values of a text: one for the root, one for each opening bracket, one for each comma. */
static size_t xdi_json_count_nodes(const char *text, size_t bytes) {
    size_t count = 1;
    bool quoted = false;
    for (size_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c == '"')
            quoted = !quoted;
        else if (quoted && c == '\\')
            i++;
        else if (!quoted && (c == '[' || c == '{' || c == ','))
            count++;
    }
    return count;
}

/* ---- strings ---- */

/* Bytes of the UTF-8 sequence at s, 0 when it is not well formed (overlong, surrogate, above U+10FFFF, cut off). */
static size_t xdi_json_utf8(const unsigned char *s, size_t bytes) {
    const unsigned char first = s[0];
    if (first < 0x80) return 1;
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || length > bytes) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (first == 0xe0 && s[1] < 0xa0) return 0;
    if (first == 0xed && s[1] > 0x9f) return 0;
    if (first == 0xf0 && s[1] < 0x90) return 0;
    if (first == 0xf4 && s[1] > 0x8f) return 0;
    return length;
}

XD_PRIVATE size_t xdi_json_valid_bytes(const char *text, size_t bytes) {
    const unsigned char *s = (const unsigned char *)text;
    size_t at = 0;
    for (size_t length; at < bytes && (length = xdi_json_utf8(s + at, bytes - at)) > 0;) at += length;
    return at;
}

static xd_result xdi_json_parse_hex(xdi_json_parser *p, unsigned *unit) {
    unsigned value = 0;
    for (int i = 0; i < 4; i++) {
        const char c = xdi_json_peek(p);
        const bool digit = c >= '0' && c <= '9', lower = c >= 'a' && c <= 'f', upper = c >= 'A' && c <= 'F';
        XD_TRY(xdi_json_expect(p, digit || lower || upper, "four hexadecimal digits expected"));
        value = value * 16u + (unsigned)(c - (digit ? '0' : lower ? 'a' - 10 : 'A' - 10));
        p->at++;
    }
    *unit = value;
    return XD_OK;
}

/* After "\u": one code point, which may need a second escape. */
static xd_result xdi_json_parse_unicode(xdi_json_parser *p, unsigned *point) {
    unsigned high, low;
    XD_TRY(xdi_json_parse_hex(p, &high));
    XD_TRY(xdi_json_expect(p, high != 0 || p->allow_nul, "NUL in a string"));
    XD_TRY(xdi_json_expect(p, high < 0xdc00 || high > 0xdfff, "lone surrogate"));
    *point = high;
    if (high < 0xd800 || high > 0xdbff) return XD_OK;
    XD_TRY(xdi_json_expect(p, xdi_json_take_word(p, "\\u"), "lone surrogate"));
    XD_TRY(xdi_json_parse_hex(p, &low));
    XD_TRY(xdi_json_expect(p, low >= 0xdc00 && low <= 0xdfff, "lone surrogate"));
    *point = 0x10000u + ((high - 0xd800u) << 10) + (low - 0xdc00u);
    return XD_OK;
}

static void xdi_json_put_utf8(xdi_json_parser *p, unsigned point) {
    if (point < 0x80) {
        *p->strings++ = (char)point;
        return;
    }
    if (point < 0x800) {
        *p->strings++ = (char)(0xc0 | (point >> 6));
    } else {
        if (point < 0x10000) {
            *p->strings++ = (char)(0xe0 | (point >> 12));
        } else {
            *p->strings++ = (char)(0xf0 | (point >> 18));
            *p->strings++ = (char)(0x80 | ((point >> 12) & 0x3f));
        }
        *p->strings++ = (char)(0x80 | ((point >> 6) & 0x3f));
    }
    *p->strings++ = (char)(0x80 | (point & 0x3f));
}

static xd_result xdi_json_parse_escape(xdi_json_parser *p) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char c = xdi_json_peek(p);
    const char *name = c ? strchr(names, c) : NULL;
    XD_TRY(xdi_json_expect(p, name || c == 'u', "unknown escape"));
    p->at++;
    if (name) {
        *p->strings++ = values[name - names];
        return XD_OK;
    }
    unsigned point;
    XD_TRY(xdi_json_parse_unicode(p, &point));
    xdi_json_put_utf8(p, point);
    return XD_OK;
}

/* The text between quotes, decoded. It never becomes longer: the shortest escape of a 3-byte character has 6 bytes, and
 * the NUL needs less than the two quotes. */
static xd_result xdi_json_parse_string(xdi_json_parser *p, const char **text, size_t *bytes) {
    XD_TRY(xdi_json_expect(p, xdi_json_take(p, '"'), "string expected"));
    char *const begin = p->strings;
    while (!xdi_json_take(p, '"')) {
        XD_TRY(xdi_json_expect(p, p->at < p->bytes, "string without end"));
        const unsigned char *s = (const unsigned char *)p->text + p->at;
        XD_TRY(xdi_json_expect(p, *s >= 0x20, "control character in a string"));
        if (*s == '\\') {
            p->at++;
            XD_TRY(xdi_json_parse_escape(p));
            continue;
        }
        const size_t length = xdi_json_utf8(s, p->bytes - p->at);
        XD_TRY(xdi_json_expect(p, length > 0, "invalid UTF-8"));
        memcpy(p->strings, s, length);
        p->strings += length;
        p->at += length;
    }
    *text = begin;
    *bytes = (size_t)(p->strings - begin);
    *p->strings++ = '\0';
    return XD_OK;
}

/* ---- numbers ---- */

static size_t xdi_json_skip_digits(xdi_json_parser *p) {
    const size_t begin = p->at;
    while (xdi_json_peek(p) >= '0' && xdi_json_peek(p) <= '9') p->at++;
    return p->at - begin;
}

/* Skips a number; *integer receives whether it has neither fraction nor exponent. */
static xd_result xdi_json_scan_number(xdi_json_parser *p, bool *integer) {
    *integer = true;
    xdi_json_take(p, '-');
    if (!xdi_json_take(p, '0')) XD_TRY(xdi_json_expect(p, xdi_json_skip_digits(p) > 0, "value expected"));
    if (xdi_json_take(p, '.')) {
        *integer = false;
        XD_TRY(xdi_json_expect(p, xdi_json_skip_digits(p) > 0, "digit expected"));
    }
    if (xdi_json_peek(p) == 'e' || xdi_json_peek(p) == 'E') {
        *integer = false;
        p->at++;
        if (!xdi_json_take(p, '-')) xdi_json_take(p, '+');
        XD_TRY(xdi_json_expect(p, xdi_json_skip_digits(p) > 0, "digit expected"));
    }
    return XD_OK;
}

/* Magnitude and sign when they fit int64 or uint64. "-0" is not an integer: it would lose its sign. */
static void xdi_json_set_integer(xd_json *value, const char *digits) {
    uint64_t magnitude = 0;
    value->negative = *digits == '-';
    for (const char *d = digits + (value->negative ? 1 : 0); *d; d++) {
        const uint64_t digit = (uint64_t)(*d - '0');
        if (magnitude > (UINT64_MAX - digit) / 10u) return;
        magnitude = magnitude * 10u + digit;
    }
    if (value->negative && (magnitude == 0 || magnitude > (uint64_t)INT64_MAX + 1u)) return;
    value->as.number.integer = magnitude;
    value->exact = true;
}

static xd_result xdi_json_parse_number(xdi_json_parser *p, xd_json *value) {
    char digits[XDI_JSON_LONGEST_NUMBER + 1];
    const size_t begin = p->at;
    bool integer;
    XD_TRY(xdi_json_scan_number(p, &integer));
    const size_t length = p->at - begin;
    XD_REQUIRE(p->ctx, length <= XDI_JSON_LONGEST_NUMBER, XD_ERROR_FORMAT,
               "JSON: number of %llu bytes at byte %llu", (unsigned long long)length,
               (unsigned long long)begin);
    memcpy(digits, p->text + begin, length);
    digits[length] = '\0';
    value->kind = XD_JSON_NUMBER;
    if (integer) xdi_json_set_integer(value, digits);
    char *point = strchr(digits, '.');
    if (point) *point = *localeconv()->decimal_point; /* strtod expects that of the process's locale */
    value->as.number.real = strtod(digits, NULL);
    XD_TRY(xdi_json_expect(p, isfinite(value->as.number.real), "number beyond the range of a double"));
    return XD_OK;
}

/* ---- containers ---- */

static int xdi_json_compare(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    const int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    if (order) return order;
    return a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

static int xdi_json_compare_keys(const void *a, const void *b) {
    const xd_json *x = (const xd_json *)a, *y = (const xd_json *)b;
    return xdi_json_compare(x->key, x->key_bytes, y->key, y->key_bytes);
}

/* Collects the children of a closed container, which are linked by `next`. */
static xd_result xdi_json_close(xdi_json_parser *p, xd_json *container, const xd_json *first) {
    const void **items = p->items;
    size_t count = 0;
    for (; first; first = first->next) items[count++] = first;
    p->items += count;
    container->as.container.items = items;
    container->as.container.count = count;
    if (container->kind == XD_JSON_ARRAY) return XD_OK;
    xdi_sort(items, count, xdi_json_compare_keys);
    for (size_t i = 1; i < count; i++)
        XD_REQUIRE(p->ctx, xdi_json_compare_keys(items[i - 1], items[i]) != 0, XD_ERROR_FORMAT,
                   "JSON: key \"%.80s\" stands twice in the object at byte %llu",
                   ((const xd_json *)items[i])->key, (unsigned long long)container->offset);
    return XD_OK;
}

static xd_result xdi_json_parse_member(xdi_json_parser *p, bool object, xd_json **out) {
    const char *key = NULL;
    size_t key_bytes = 0;
    if (object) {
        xdi_json_skip_space(p);
        XD_TRY(xdi_json_parse_string(p, &key, &key_bytes));
        xdi_json_skip_space(p);
        XD_TRY(xdi_json_expect(p, xdi_json_take(p, ':'), "':' expected"));
    }
    XD_TRY(xdi_json_parse_value(p, out));
    (*out)->key = key;
    (*out)->key_bytes = key_bytes;
    return XD_OK;
}

static xd_result xdi_json_parse_container(xdi_json_parser *p, xd_json *container) {
    const bool object = p->text[p->at++] == '{';
    const char close = object ? '}' : ']';
    container->kind = object ? XD_JSON_OBJECT : XD_JSON_ARRAY;
    XD_TRY(xdi_json_expect(p, p->depth < p->max_depth, "nested too deeply"));
    p->depth++;
    xd_json *first = NULL, *last = NULL;
    xdi_json_skip_space(p);
    if (!xdi_json_take(p, close)) {
        do {
            xd_json *item;
            XD_TRY(xdi_json_parse_member(p, object, &item));
            if (last)
                last->next = item;
            else
                first = item;
            last = item;
            xdi_json_skip_space(p);
        } while (xdi_json_take(p, ','));
        XD_TRY(xdi_json_expect(p, xdi_json_take(p, close),
                               object ? "',' or '}' expected" : "',' or ']' expected"));
    }
    p->depth--;
    return xdi_json_close(p, container, first);
}

static xd_result xdi_json_parse_value(xdi_json_parser *p, xd_json **out) {
    xdi_json_skip_space(p);
    xd_json *value = p->nodes++;
    value->offset = p->at;
    *out = value;
    switch (xdi_json_peek(p)) {
    case '{':
    case '[': return xdi_json_parse_container(p, value);
    case '"':
        value->kind = XD_JSON_STRING;
        return xdi_json_parse_string(p, &value->as.string.text, &value->as.string.bytes);
    case 'n':
        value->kind = XD_JSON_NULL;
        XD_TRY(xdi_json_expect(p, xdi_json_take_word(p, "null"), "value expected"));
        return XD_OK;
    case 't':
        value->kind = XD_JSON_BOOL;
        value->as.truth = true;
        XD_TRY(xdi_json_expect(p, xdi_json_take_word(p, "true"), "value expected"));
        return XD_OK;
    case 'f':
        value->kind = XD_JSON_BOOL;
        XD_TRY(xdi_json_expect(p, xdi_json_take_word(p, "false"), "value expected"));
        return XD_OK;
    default: return xdi_json_parse_number(p, value);
    }
}

/* ---- documents ---- */

/* Divides one block into the three pools; their sizes are upper bounds counted from the text. */
static xd_result xdi_json_reserve(xdi_json_parser *p, size_t max_nodes, xd_json **block) {
    const size_t count = xdi_json_count_nodes(p->text, p->bytes);
    XD_REQUIRE(p->ctx, count <= max_nodes, XD_ERROR_FORMAT, "JSON: up to %llu values, allowed are %llu",
               (unsigned long long)count, (unsigned long long)max_nodes);
    const size_t each = sizeof(xd_json) + sizeof(void *);
    XD_REQUIRE(p->ctx, p->bytes < SIZE_MAX / 2 && count <= (SIZE_MAX / 2) / each, XD_ERROR_MEMORY,
               "JSON: %llu values do not fit the address space", (unsigned long long)count);
    const size_t total = count * each + p->bytes;
    *block = (xd_json *)xd_allocate(p->ctx, total);
    XD_REQUIRE(p->ctx, *block, XD_ERROR_MEMORY, "JSON: no room for %llu bytes", (unsigned long long)total);
    p->nodes = *block;
    p->items = (const void **)(*block + count);
    p->strings = (char *)(p->items + count);
    return XD_OK;
}

static xd_json_desc xdi_json_limits(const xd_json_desc *desc) {
    xd_json_desc d;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!d.max_bytes) d.max_bytes = (size_t)256 << 20;
    if (!d.max_nodes) d.max_nodes = (size_t)16 << 20;
    if (!d.max_depth) d.max_depth = 64;
    return d;
}

XD_PRIVATE size_t xdi_json_mark_bytes(const char *text, size_t bytes) {
    return bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

/* What is there instead of JSON, where its first bytes say so. */
static xd_result xdi_json_check_begin(xd_ctx *ctx, const char *text, size_t bytes) {
    const bool wide = bytes >= 2 && (memcmp(text, "\xff\xfe", 2) == 0 || memcmp(text, "\xfe\xff", 2) == 0);
    XD_REQUIRE(ctx, !wide, XD_ERROR_FORMAT,
               "JSON: the byte-order mark of UTF-16 or UTF-32; only UTF-8 is supported");
    return xdi_refuse_pointer(ctx, "JSON: the text", text, bytes);
}

XD_API xd_result xd_json_load_memory(xd_ctx *ctx, const xd_json_desc *desc, const char *text, size_t bytes,
                                     xd_json **root) {
    const xd_json_desc d = xdi_json_limits(desc);
    xdi_json_parser p;
    xd_json *block = NULL;
    memset(&p, 0, sizeof p);
    p.ctx = ctx;
    p.text = text;
    p.bytes = bytes;
    p.max_depth = d.max_depth;
    p.allow_nul = d.allow_nul;
    XD_REQUIRE(ctx, d.max_depth > 0 && d.max_depth <= XDI_JSON_DEEPEST, XD_ERROR_ARGUMENT,
               "max_depth is %d, allowed are 1 to %d", d.max_depth, (int)XDI_JSON_DEEPEST);
    XD_REQUIRE(ctx, bytes <= d.max_bytes, XD_ERROR_FORMAT, "JSON: %llu bytes, allowed are %llu",
               (unsigned long long)bytes, (unsigned long long)d.max_bytes);
    XD_TRY(xdi_json_check_begin(ctx, text, bytes));
    XD_TRY(xdi_json_reserve(&p, d.max_nodes, &block));
    p.at = xdi_json_mark_bytes(text, bytes);
    xd_json *value;
    xd_result result = xdi_json_parse_value(&p, &value);
    if (result == XD_OK) {
        xdi_json_skip_space(&p);
        if (p.at < bytes)
            result = XD_FAIL(ctx, XD_ERROR_FORMAT, "JSON: text after the value at byte %llu",
                             (unsigned long long)p.at);
    }
    if (result == XD_OK)
        *root = block;
    else
        xd_release(ctx, block);
    return result;
}

XD_API xd_result xd_json_load(xd_ctx *ctx, const xd_json_desc *desc, const char *path, xd_json **root) {
    char *text = NULL;
    size_t bytes = 0;
    XD_TRY(xd_file_load(ctx, path, xdi_json_limits(desc).max_bytes, &text, &bytes));
    const xd_result result = xd_json_load_memory(ctx, desc, text, bytes, root);
    xd_release(ctx, text);
    XD_REQUIRE(ctx, result == XD_OK, result, "%s: %s", path, xd_last_error(ctx)->message);
    return XD_OK;
}

XD_API void xd_json_destroy(xd_ctx *ctx, xd_json *root) {
    xd_release(ctx, root);
}

/* ---- queries ---- */

static bool xdi_json_is(const xd_json *value, xd_json_kind kind) {
    return value && value->kind == kind;
}

static bool xdi_json_is_container(const xd_json *value) {
    return xdi_json_is(value, XD_JSON_ARRAY) || xdi_json_is(value, XD_JSON_OBJECT);
}

XD_API xd_json_kind xd_json_kind_of(const xd_json *value) {
    return value ? value->kind : XD_JSON_NONE;
}

XD_API size_t xd_json_offset(const xd_json *value) {
    return value ? value->offset : 0;
}

XD_API const xd_json *xd_json_find(const xd_json *object, const char *key) {
    return xdi_json_find_n(object, key, strlen(key));
}

XD_PRIVATE const xd_json *xdi_json_find_n(const xd_json *object, const char *key, size_t key_bytes) {
    if (!xdi_json_is(object, XD_JSON_OBJECT)) return NULL;
    size_t low = 0, high = object->as.container.count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const xd_json *item = (const xd_json *)object->as.container.items[middle];
        const int order = xdi_json_compare(key, key_bytes, item->key, item->key_bytes);
        if (order == 0) return item;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

XD_API size_t xd_json_count(const xd_json *container) {
    return xdi_json_is_container(container) ? container->as.container.count : 0;
}

XD_API const xd_json *xd_json_first(const xd_json *container) {
    /* Nodes lie in the order of the text, so the first child follows its parent. */
    return xd_json_count(container) > 0 ? container + 1 : NULL;
}

XD_API const xd_json *xd_json_next(const xd_json *value) {
    return value ? value->next : NULL;
}

XD_API const xd_json *xd_json_at(const xd_json *array, size_t index) {
    if (!xdi_json_is(array, XD_JSON_ARRAY) || index >= array->as.container.count) return NULL;
    return (const xd_json *)array->as.container.items[index];
}

XD_PRIVATE const xd_json *xdi_json_by_key(const xd_json *object, size_t index) {
    if (!xdi_json_is(object, XD_JSON_OBJECT) || index >= object->as.container.count) return NULL;
    return (const xd_json *)object->as.container.items[index];
}

XD_API const char *xd_json_key(const xd_json *member, size_t *bytes) {
    if (bytes) *bytes = member ? member->key_bytes : 0;
    return member ? member->key : NULL;
}

XD_API const char *xd_json_string(const xd_json *value, size_t *bytes) {
    const bool is = xdi_json_is(value, XD_JSON_STRING);
    if (bytes) *bytes = is ? value->as.string.bytes : 0;
    return is ? value->as.string.text : NULL;
}

XD_API bool xd_json_bool(const xd_json *value, bool *out) {
    if (!xdi_json_is(value, XD_JSON_BOOL)) return false;
    *out = value->as.truth;
    return true;
}

XD_API bool xd_json_int64(const xd_json *value, int64_t *out) {
    if (!xdi_json_is(value, XD_JSON_NUMBER) || !value->exact) return false;
    const uint64_t magnitude = value->as.number.integer;
    if (!value->negative && magnitude > (uint64_t)INT64_MAX) return false;
    *out =
        value->negative ? -(int64_t)(magnitude - 1u) - 1 : (int64_t)magnitude; /* INT64_MIN has no negative */
    return true;
}

XD_API bool xd_json_uint64(const xd_json *value, uint64_t *out) {
    if (!xdi_json_is(value, XD_JSON_NUMBER) || !value->exact || value->negative) return false;
    *out = value->as.number.integer;
    return true;
}

XD_API bool xd_json_double(const xd_json *value, double *out) {
    if (!xdi_json_is(value, XD_JSON_NUMBER)) return false;
    *out = value->as.number.real;
    return true;
}

/* ---- writer ---- */

static void xdi_json_stick(xd_json_writer *w, xd_result result, const char *message) {
    if (w->result == XD_OK) w->result = XD_FAIL(w->ctx, result, "JSON writer: %s", message);
}

static bool xdi_json_grow(xd_json_writer *w, size_t bytes) {
    if (w->result != XD_OK) return false;
    if (bytes < w->capacity - w->bytes) return true; /* one byte is reserved for the NUL */
    const bool fits = bytes < SIZE_MAX / 4 && w->bytes < SIZE_MAX / 4;
    const size_t capacity = fits ? 2 * (w->bytes + bytes) + 256 : 0;
    char *text = fits ? (char *)xd_allocate(w->ctx, capacity) : NULL;
    if (!text) {
        xdi_json_stick(w, XD_ERROR_MEMORY, "no room for the text");
        return false;
    }
    if (w->bytes) memcpy(text, w->text, w->bytes);
    xd_release(w->ctx, w->text);
    w->text = text;
    w->capacity = capacity;
    return true;
}

static void xdi_json_put(xd_json_writer *w, const char *text, size_t bytes) {
    if (!xdi_json_grow(w, bytes)) return;
    memcpy(w->text + w->bytes, text, bytes);
    w->bytes += bytes;
}

static void xdi_json_put_line(xd_json_writer *w) {
    if (!w->indent) return;
    xdi_json_put(w, "\n", 1);
    for (int i = 0; i < w->indent * w->depth; i++) xdi_json_put(w, " ", 1);
}

static void xdi_json_put_string(xd_json_writer *w, const char *value, size_t bytes) {
    const unsigned char *s = (const unsigned char *)value;
    xdi_json_put(w, "\"", 1);
    for (size_t i = 0; i < bytes && w->result == XD_OK;) {
        const size_t length = s[i] ? xdi_json_utf8(s + i, bytes - i) : 0;
        if (length == 0) {
            xdi_json_stick(w, XD_ERROR_ARGUMENT, "a string holds NUL or invalid UTF-8");
        } else if (s[i] < 0x20 || s[i] == '"' || s[i] == '\\') {
            static const char names[] = "\"\\\b\f\n\r\t", values[] = "\"\\bfnrt";
            const char *name = strchr(names, (char)s[i]);
            char escape[8];
            if (name)
                snprintf(escape, sizeof escape, "\\%c", values[name - names]);
            else
                snprintf(escape, sizeof escape, "\\u%04x", (unsigned)s[i]);
            xdi_json_put(w, escape, strlen(escape));
        } else {
            xdi_json_put(w, value + i, length);
        }
        i += length;
    }
    xdi_json_put(w, "\"", 1);
}

/* The separator before an element or a key. */
static void xdi_json_next_item(xd_json_writer *w) {
    const uint64_t bit = (uint64_t)1 << w->depth;
    if (w->items & bit) xdi_json_put(w, ",", 1);
    w->items |= bit;
    if (w->depth > 0) xdi_json_put_line(w);
}

/* Called before every value: checks that one is allowed here. */
static void xdi_json_begin_value(xd_json_writer *w) {
    const uint64_t bit = (uint64_t)1 << w->depth;
    const bool element = (w->array & bit) != 0 || (w->depth == 0 && !(w->items & bit));
    if (!w->keyed && !element) xdi_json_stick(w, XD_ERROR_STATE, "a value where none may stand");
    if (!w->keyed) xdi_json_next_item(w);
    w->keyed = false;
}

static void xdi_json_open(xd_json_writer *w, bool array) {
    xdi_json_begin_value(w);
    if (w->depth >= 63) {
        xdi_json_stick(w, XD_ERROR_STATE, "more than 63 open containers");
        return;
    }
    xdi_json_put(w, array ? "[" : "{", 1);
    w->depth++;
    const uint64_t bit = (uint64_t)1 << w->depth;
    w->items &= ~bit;
    w->array = array ? w->array | bit : w->array & ~bit;
}

static void xdi_json_put_value(xd_json_writer *w, const char *text) {
    xdi_json_begin_value(w);
    xdi_json_put(w, text, strlen(text));
}

XD_API xd_json_writer xd_json_writer_create(xd_ctx *ctx) {
    xd_json_writer w;
    memset(&w, 0, sizeof w);
    w.ctx = ctx;
    return w;
}

XD_API void xd_json_write_object(xd_json_writer *w) {
    xdi_json_open(w, false);
}

XD_API void xd_json_write_array(xd_json_writer *w) {
    xdi_json_open(w, true);
}

XD_API void xd_json_write_end(xd_json_writer *w) {
    if (w->depth == 0 || w->keyed) {
        xdi_json_stick(w, XD_ERROR_STATE, "an end where none may stand");
        return;
    }
    const uint64_t bit = (uint64_t)1 << w->depth;
    w->depth--;
    if (w->items & bit) xdi_json_put_line(w);
    xdi_json_put(w, (w->array & bit) ? "]" : "}", 1);
}

XD_API void xd_json_write_key(xd_json_writer *w, const char *key) {
    const uint64_t bit = (uint64_t)1 << w->depth;
    if (w->depth == 0 || w->keyed || (w->array & bit)) {
        xdi_json_stick(w, XD_ERROR_STATE, "a key where none may stand");
        return;
    }
    xdi_json_next_item(w);
    xdi_json_put_string(w, key, strlen(key));
    xdi_json_put(w, ": ", w->indent ? 2 : 1);
    w->keyed = true;
}

XD_API void xd_json_write_null(xd_json_writer *w) {
    xdi_json_put_value(w, "null");
}

XD_API void xd_json_write_bool(xd_json_writer *w, bool value) {
    xdi_json_put_value(w, value ? "true" : "false");
}

XD_API void xd_json_write_int64(xd_json_writer *w, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    xdi_json_put_value(w, text);
}

XD_API void xd_json_write_uint64(xd_json_writer *w, uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    xdi_json_put_value(w, text);
}

XD_API void xd_json_write_double(xd_json_writer *w, double value) {
    char text[40];
    if (!isfinite(value)) {
        xdi_json_stick(w, XD_ERROR_ARGUMENT, "JSON has no infinity and no NaN");
        return;
    }
    snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) != value) snprintf(text, sizeof text, "%.17g", value);
    char *point = strchr(text, *localeconv()->decimal_point);
    if (point) *point = '.';
    /* Readers tell integers and doubles apart by their notation; with ".0" the sign of -0 is preserved too. */
    if (!strpbrk(text, ".e")) strcat(text, ".0");
    xdi_json_put_value(w, text);
}

XD_API void xd_json_write_string(xd_json_writer *w, const char *value) {
    xd_json_write_string_n(w, value, strlen(value));
}

XD_API void xd_json_write_string_n(xd_json_writer *w, const char *value, size_t bytes) {
    xdi_json_begin_value(w);
    xdi_json_put_string(w, value, bytes);
}

XD_API xd_result xd_json_writer_text(xd_json_writer *w, const char **text, size_t *bytes) {
    if (w->depth > 0 || w->bytes == 0) xdi_json_stick(w, XD_ERROR_STATE, "the text is not complete");
    if (w->result != XD_OK) return w->result;
    w->text[w->bytes] = '\0';
    *text = w->text;
    if (bytes) *bytes = w->bytes;
    return XD_OK;
}

XD_API void xd_json_writer_destroy(xd_json_writer *w) {
    xd_release(w->ctx, w->text);
    *w = xd_json_writer_create(w->ctx);
}
