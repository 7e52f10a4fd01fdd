/* Unicode properties, case folding and normal forms, from the generated tables. */

#include "text/internal.h"
#include "text/unicode_tables.h"

#include <string.h>

enum {
    XDI_UNICODE_LIMIT = 0x110000,
    XDI_UNICODE_PAIRS = (int)(sizeof xdi_unicode_pairs / sizeof xdi_unicode_pairs[0]) / 3,
    XDI_UNICODE_COMPATS = (int)(sizeof xdi_unicode_compat / sizeof xdi_unicode_compat[0]),
    XDI_UNICODE_CLASSES = (int)(sizeof xdi_unicode_classes / sizeof xdi_unicode_classes[0]),
    XDI_UNICODE_FOLDS = (int)(sizeof xdi_unicode_folds / sizeof xdi_unicode_folds[0]) / 2,
    XDI_UNICODE_SLOTS = 4096 /* of the compositions */
};

/* Hangul syllables are composed by arithmetic: leading consonants, vowels, trailing consonants (the first is
 * none). */
enum {
    XDI_HANGUL_L = 0x1100,
    XDI_HANGUL_V = 0x1161,
    XDI_HANGUL_T = 0x11a7,
    XDI_HANGUL_S = 0xac00,
    XDI_HANGUL_LS = 19,
    XDI_HANGUL_VS = 21,
    XDI_HANGUL_TS = 28,
    XDI_HANGUL_COUNT = 11172
};

/* ---- categories ---- */

XD_PRIVATE bool xdi_unicode_mask(const char *name, size_t bytes, uint32_t *mask) {
    static const struct {
        char name[3];
        int first, last;
    } groups[] = {
        { "L", XDI_UNICODE_LU, XDI_UNICODE_LO },  { "M", XDI_UNICODE_MN, XDI_UNICODE_ME },
        { "N", XDI_UNICODE_ND, XDI_UNICODE_NO },  { "P", XDI_UNICODE_PC, XDI_UNICODE_PO },
        { "S", XDI_UNICODE_SM, XDI_UNICODE_SO },  { "Z", XDI_UNICODE_ZS, XDI_UNICODE_ZP },
        { "Lu", XDI_UNICODE_LU, XDI_UNICODE_LU }, { "Ll", XDI_UNICODE_LL, XDI_UNICODE_LL },
        { "Lt", XDI_UNICODE_LT, XDI_UNICODE_LT }, { "Lm", XDI_UNICODE_LM, XDI_UNICODE_LM },
        { "Lo", XDI_UNICODE_LO, XDI_UNICODE_LO }, { "Mn", XDI_UNICODE_MN, XDI_UNICODE_MN },
        { "Nd", XDI_UNICODE_ND, XDI_UNICODE_ND }, { "Pc", XDI_UNICODE_PC, XDI_UNICODE_PC },
    };
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        if (strlen(groups[i].name) != bytes || memcmp(groups[i].name, name, bytes) != 0) continue;
        *mask = (2u << groups[i].last) - (1u << groups[i].first);
        return true;
    }
    return false;
}

XD_PRIVATE uint32_t xdi_unicode_space_mask(void) {
    return 1u << XDI_UNICODE_ZS | 1u << XDI_UNICODE_ZL | 1u << XDI_UNICODE_ZP | 1u << XDI_UNICODE_XX;
}

/* ---- building the look-up tables ---- */

static bool xdi_unicode_recomposes(int pair) {
    return xdi_unicode_pairs[3 * pair] & 1u;
}

/* A character also gets the flags of the characters that it decomposes into. A first of a pair that is itself a pair has a
 * lower code point or no flags, so one pass is enough. */
static void xdi_unicode_inherit(const xdi_unicode *u, uint8_t *flat) {
    for (int i = 0; i < XDI_UNICODE_COMPATS; i++) {
        const uint32_t first = xdi_unicode_pool[u->compat_points[XDI_UNICODE_COMPATS + i]];
        flat[u->compat_points[i]] |= (uint8_t)(flat[first] & XDI_UNICODE_JOINS);
    }
    for (int i = 0; i < XDI_UNICODE_PAIRS; i++)
        flat[u->pair_points[i]] |=
            (uint8_t)(flat[xdi_unicode_pairs[3 * i + 1]] & (XDI_UNICODE_NFKC | XDI_UNICODE_JOINS));
}

/* The code points, which the generated tables store as distances, and the flags of every code point. */
static void xdi_unicode_fill_normal(xdi_unicode *u, uint8_t *flat) {
    uint32_t point = 0, pool = 0;
    for (int i = 0; i < XDI_UNICODE_CLASSES; i++) {
        u->class_starts[i] = point;
        const uint32_t length = xdi_unicode_classes[i] >> 8;
        if (xdi_unicode_classes[i] & 255u)
            for (uint32_t k = 0; k < length; k++) flat[point + k] |= XDI_UNICODE_JOINS;
        point += length;
    }
    point = 0;
    for (int i = 0; i < XDI_UNICODE_COMPATS; i++) {
        point += xdi_unicode_compat[i] >> 5;
        u->compat_points[i] = point;
        u->compat_points[XDI_UNICODE_COMPATS + i] = pool;
        pool += xdi_unicode_compat[i] & 31u;
        flat[point] |= XDI_UNICODE_NFKC;
    }
    point = 0;
    for (int i = 0; i < XDI_UNICODE_PAIRS; i++) {
        point += xdi_unicode_pairs[3 * i] >> 1;
        u->pair_points[i] = point;
        if (xdi_unicode_recomposes(i))
            flat[xdi_unicode_pairs[3 * i + 2]] |= XDI_UNICODE_JOINS;
        else
            flat[point] |= XDI_UNICODE_NFC;
    }
    for (uint32_t i = 0; i < XDI_HANGUL_VS; i++) flat[XDI_HANGUL_V + i] |= XDI_UNICODE_JOINS;
    for (uint32_t i = 1; i < XDI_HANGUL_TS; i++) flat[XDI_HANGUL_T + i] |= XDI_UNICODE_JOINS;
    xdi_unicode_inherit(u, flat);
}

static uint32_t xdi_unicode_pair_slot(uint32_t first, uint32_t second) {
    return (first * 0x9e3779b1u ^ second * 0x85ebca6bu) >> 20;
}

static void xdi_unicode_fill_compositions(xdi_unicode *u) {
    for (int i = 0; i < XDI_UNICODE_PAIRS; i++) {
        if (!xdi_unicode_recomposes(i)) continue;
        uint32_t slot = xdi_unicode_pair_slot(xdi_unicode_pairs[3 * i + 1], xdi_unicode_pairs[3 * i + 2]);
        while (u->compositions[slot]) slot = (slot + 1) & (XDI_UNICODE_SLOTS - 1);
        u->compositions[slot] = (uint16_t)(i + 1);
    }
}

/* Stores each block of 256 properties that differs from the one before it. */
static bool xdi_unicode_fill_blocks(xd_ctx *ctx, xdi_unicode *u, const uint8_t *flat) {
    unsigned blocks = 1;
    for (uint32_t b = 1; b < 0x1100; b++) {
        if (memcmp(flat + b * 256, flat + (b - 1) * 256, 256) != 0) blocks++;
        u->block[b] = (uint16_t)(blocks - 1);
    }
    u->properties = (uint8_t *)xd_allocate(ctx, blocks * (size_t)256);
    if (!u->properties) return false;
    for (uint32_t b = 0; b < 0x1100; b++) memcpy(u->properties + u->block[b] * 256u, flat + b * 256, 256);
    return true;
}

XD_PRIVATE xdi_unicode *xdi_unicode_create(xd_ctx *ctx) {
    xdi_unicode *u = (xdi_unicode *)xd_allocate(ctx, sizeof *u);
    uint8_t *flat = (uint8_t *)xd_allocate(ctx, XDI_UNICODE_LIMIT);
    bool made = false;
    if (u && flat) {
        u->pair_points = (uint32_t *)xd_allocate(ctx, XDI_UNICODE_PAIRS * sizeof *u->pair_points);
        u->compat_points = (uint32_t *)xd_allocate(ctx, 2 * XDI_UNICODE_COMPATS * sizeof *u->compat_points);
        u->class_starts = (uint32_t *)xd_allocate(ctx, XDI_UNICODE_CLASSES * sizeof *u->class_starts);
        u->compositions = (uint16_t *)xd_allocate(ctx, XDI_UNICODE_SLOTS * sizeof *u->compositions);
        made = u->pair_points && u->compat_points && u->class_starts && u->compositions;
    }
    if (made) {
        uint32_t point = 0;
        for (size_t i = 0; i < sizeof xdi_unicode_categories / sizeof xdi_unicode_categories[0]; i++) {
            const uint32_t length = xdi_unicode_categories[i] >> 5;
            memset(flat + point, (int)(xdi_unicode_categories[i] & XDI_UNICODE_CATEGORY), length);
            point += length;
        }
        xdi_unicode_fill_normal(u, flat);
        xdi_unicode_fill_compositions(u);
        made = xdi_unicode_fill_blocks(ctx, u, flat);
    }
    xd_release(ctx, flat);
    if (made) return u;
    xdi_unicode_destroy(ctx, u);
    return NULL;
}

XD_PRIVATE void xdi_unicode_destroy(xd_ctx *ctx, xdi_unicode *u) {
    if (!u) return;
    xd_release(ctx, u->properties);
    xd_release(ctx, u->pair_points);
    xd_release(ctx, u->compat_points);
    xd_release(ctx, u->class_starts);
    xd_release(ctx, u->compositions);
    xd_release(ctx, u);
}

/* ---- case folding ---- */

static uint32_t xdi_unicode_fold(uint32_t point) {
    int low = 0, high = XDI_UNICODE_FOLDS;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (xdi_unicode_folds[2 * middle] == point) return xdi_unicode_folds[2 * middle + 1];
        if (xdi_unicode_folds[2 * middle] < point)
            low = middle + 1;
        else
            high = middle;
    }
    return point;
}

XD_PRIVATE int xdi_unicode_fold_mates(uint32_t point, uint32_t mates[4]) {
    const uint32_t folded = xdi_unicode_fold(point);
    int count = 0;
    if (folded != point) mates[count++] = folded;
    for (int i = 0; i < XDI_UNICODE_FOLDS && count < 4; i++)
        if (xdi_unicode_folds[2 * i + 1] == folded && xdi_unicode_folds[2 * i] != point)
            mates[count++] = xdi_unicode_folds[2 * i];
    return count;
}

/* ---- normalisation ---- */

/* Index of the last element of an ascending list that is not above `point`; the first element is not. */
static int xdi_unicode_search(const uint32_t *list, int count, uint32_t point) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (list[middle] <= point)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static unsigned xdi_unicode_class(const xdi_unicode *u, uint32_t point) {
    return xdi_unicode_classes[xdi_unicode_search(u->class_starts, XDI_UNICODE_CLASSES, point)] & 255u;
}

static int xdi_unicode_decompose_hangul(uint32_t index, uint32_t *out) {
    out[0] = XDI_HANGUL_L + index / (XDI_HANGUL_VS * XDI_HANGUL_TS);
    out[1] = XDI_HANGUL_V + index / XDI_HANGUL_TS % XDI_HANGUL_VS;
    out[2] = XDI_HANGUL_T + index % XDI_HANGUL_TS;
    return out[2] == XDI_HANGUL_T ? 2 : 3;
}

XD_PRIVATE int xdi_unicode_decompose(const xdi_unicode *u, uint32_t point, bool compat, uint32_t *out) {
    if (point - XDI_HANGUL_S < XDI_HANGUL_COUNT)
        return xdi_unicode_decompose_hangul(point - XDI_HANGUL_S, out);
    const int other = xdi_unicode_search(u->compat_points, XDI_UNICODE_COMPATS, point);
    if (compat && u->compat_points[other] == point) {
        const int length = (int)(xdi_unicode_compat[other] & 31u);
        const uint32_t *from = xdi_unicode_pool + u->compat_points[XDI_UNICODE_COMPATS + other];
        for (int i = 0; i < length; i++) out[i] = from[i];
        return length;
    }
    const int pair = xdi_unicode_search(u->pair_points, XDI_UNICODE_PAIRS, point);
    if (u->pair_points[pair] != point) {
        out[0] = point;
        return 1;
    }
    /* Only the first of a pair decomposes again, and not often: the depth is at most 3. */
    int count = xdi_unicode_decompose(u, xdi_unicode_pairs[3 * pair + 1], compat, out);
    const uint32_t second = xdi_unicode_pairs[3 * pair + 2];
    if (second) count += xdi_unicode_decompose(u, second, compat, out + count);
    return count;
}

/* Stable counting sort of one run of code points of non-zero class. */
static void xdi_unicode_sort_run(const xdi_unicode *u, uint32_t *points, size_t count, uint32_t *temp) {
    size_t place[257] = { 0 };
    for (size_t i = 0; i < count; i++) place[xdi_unicode_class(u, points[i]) + 1]++;
    for (int c = 0; c < 256; c++) place[c + 1] += place[c];
    for (size_t i = 0; i < count; i++) temp[place[xdi_unicode_class(u, points[i])]++] = points[i];
    memcpy(points, temp, count * sizeof *points);
}

static void xdi_unicode_order(const xdi_unicode *u, uint32_t *points, size_t count, uint32_t *temp) {
    for (size_t i = 0; i < count;) {
        unsigned last = 0;
        bool sorted = true;
        size_t end = i;
        for (; end < count; end++) {
            const unsigned value = xdi_unicode_class(u, points[end]);
            if (value == 0) break;
            if (value < last) sorted = false;
            last = value;
        }
        if (!sorted) xdi_unicode_sort_run(u, points + i, end - i, temp);
        i = end + 1;
    }
}

/* The composite of two code points, 0 when there is none. */
static uint32_t xdi_unicode_pair(const xdi_unicode *u, uint32_t first, uint32_t second) {
    const uint32_t l = first - XDI_HANGUL_L, v = second - XDI_HANGUL_V;
    const uint32_t s = first - XDI_HANGUL_S, t = second - XDI_HANGUL_T;
    if (l < XDI_HANGUL_LS && v < XDI_HANGUL_VS) return XDI_HANGUL_S + (l * XDI_HANGUL_VS + v) * XDI_HANGUL_TS;
    if (s < XDI_HANGUL_COUNT && s % XDI_HANGUL_TS == 0 && t > 0 && t < XDI_HANGUL_TS) return first + t;
    for (uint32_t slot = xdi_unicode_pair_slot(first, second); u->compositions[slot];
         slot = (slot + 1) & (XDI_UNICODE_SLOTS - 1)) {
        const int pair = u->compositions[slot] - 1;
        if (xdi_unicode_pairs[3 * pair + 1] == first && xdi_unicode_pairs[3 * pair + 2] == second)
            return u->pair_points[pair];
    }
    return 0;
}

XD_PRIVATE size_t xdi_unicode_compose(const xdi_unicode *u, uint32_t *points, size_t count, uint32_t *temp) {
    size_t starter = SIZE_MAX, kept = 0;
    unsigned last = 0; /* class of the code point before, when it stays after the starter */
    xdi_unicode_order(u, points, count, temp);
    for (size_t i = 0; i < count; i++) {
        const unsigned value = xdi_unicode_class(u, points[i]);
        const bool open = starter != SIZE_MAX && (kept == starter + 1 || (last != 0 && last < value));
        const uint32_t joined = open ? xdi_unicode_pair(u, points[starter], points[i]) : 0;
        if (joined) {
            points[starter] = joined;
            continue;
        }
        if (value == 0) starter = kept;
        last = value;
        points[kept++] = points[i];
    }
    return kept;
}

/* ---- UTF-8 ---- */

/* Is this a continuation byte of a character? */
static bool xdi_utf8_goes_on(uint8_t byte) {
    return (byte & 0xc0u) == 0x80u;
}

XD_PRIVATE size_t xdi_utf8_decode(const uint8_t *at, const uint8_t *end, uint32_t *point) {
    const unsigned first = at[0];
    const size_t left = (size_t)(end - at);
    uint32_t value = first;
    *point = first;
    if (first < 0x80) return 1;
    *point = XDI_UNICODE_INVALID;
    if (first < 0xc2 || first > 0xf4 || left < 2 || !xdi_utf8_goes_on(at[1])) return 1;
    value = value << 6 | (at[1] & 0x3fu);
    if (first < 0xe0) {
        *point = value & 0x7ffu;
        return 2;
    }
    if (left < 3 || !xdi_utf8_goes_on(at[2])) return 1;
    value = value << 6 | (at[2] & 0x3fu);
    if (first < 0xf0) {
        value &= 0xffffu;
        if (value < 0x800 || (value >= 0xd800 && value < 0xe000)) return 1;
        *point = value;
        return 3;
    }
    if (left < 4 || !xdi_utf8_goes_on(at[3])) return 1;
    value = (value << 6 | (at[3] & 0x3fu)) & 0x1fffffu;
    if (value < 0x10000 || value > 0x10ffff) return 1;
    *point = value;
    return 4;
}

XD_PRIVATE size_t xdi_utf8_before(const uint8_t *begin, const uint8_t *at) {
    uint32_t point;
    for (size_t length = 1; length <= 4 && length <= (size_t)(at - begin); length++)
        if ((at[-(ptrdiff_t)length] & 0xc0u) != 0x80u)
            return xdi_utf8_decode(at - length, at, &point) == length ? length : 1;
    return 1;
}

XD_PRIVATE size_t xdi_utf8_encode(uint32_t point, uint8_t out[4]) {
    if (point < 0x80) {
        out[0] = (uint8_t)point;
        return 1;
    }
    const size_t length = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, point >>= 6) out[i] = (uint8_t)(0x80u | (point & 0x3fu));
    out[0] = (uint8_t)((0xf00u >> length & 0xf0u) | point);
    return length;
}
