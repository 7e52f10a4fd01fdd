/* Pairs of special tokens of two vocabularies, by role and by likeness of their names. */

#include "align/rows.h"
#include "base/internal.h"

#include <math.h>
#include <string.h>

/* ---- the Ratcliff-Obershelp ratio: twice the characters in common over all characters ---- */

enum { XDI_SPECIAL_MOST = 512 }; /* bytes of a special token that are looked at */

/* Part of one string against part of the other. */
typedef struct xdi_special_range {
    int a0, a1, b0, b1;
} xdi_special_range;

/* The longest run that both parts have, the first in a, then in b. Returns its length. */
static int xdi_special_longest(const char *a, const char *b, const xdi_special_range *r, int *a_at,
                               int *b_at) {
    int runs[2][XDI_SPECIAL_MOST + 1], best = 0;
    memset(runs, 0, sizeof runs);
    *a_at = r->a0;
    *b_at = r->b0;
    for (int i = r->a0; i < r->a1; i++) {
        int *now = runs[i & 1], *before = runs[(i + 1) & 1];
        for (int j = r->b0; j < r->b1; j++) {
            const int length = a[i] == b[j] ? 1 + (j > r->b0 ? before[j - r->b0 - 1] : 0) : 0;
            now[j - r->b0] = length;
            if (length <= best) continue;
            best = length;
            *a_at = i - length + 1;
            *b_at = j - length + 1;
        }
    }
    return best;
}

/* Characters in common: those of the longest run, and of the parts left and right of it. The parts that
 * wait are disjoint and not empty, so there are at most as many as characters. */
static int xdi_special_common(const char *a, int n, const char *b, int m) {
    xdi_special_range waiting[XDI_SPECIAL_MOST + 2];
    int count = 1, common = 0;
    waiting[0].a0 = waiting[0].b0 = 0;
    waiting[0].a1 = n;
    waiting[0].b1 = m;
    while (count > 0) {
        const xdi_special_range r = waiting[--count];
        int i, j;
        if (r.a0 >= r.a1 || r.b0 >= r.b1) continue;
        const int length = xdi_special_longest(a, b, &r, &i, &j);
        if (length == 0) continue;
        common += length;
        const xdi_special_range left = { r.a0, i, r.b0, j }, right = { i + length, r.a1, j + length, r.b1 };
        waiting[count++] = left;
        waiting[count++] = right;
    }
    return common;
}

/* ---- keywords ---- */

static char xdi_special_letter(char c) {
    if (c == '<' || c == '>' || c == '|' || c == '_') return ' ';
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static bool xdi_special_blank(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Distinct words longer than two letters of an already lowered string; [begin, end) of each. */
static int xdi_special_words(const char *text, int size, int (*words)[2]) {
    int count = 0;
    for (int i = 0; i < size;) {
        while (i < size && xdi_special_blank(text[i])) i++;
        const int begin = i;
        while (i < size && !xdi_special_blank(text[i])) i++;
        bool fresh = i - begin > 2;
        for (int k = 0; k < count && fresh; k++)
            fresh = words[k][1] - words[k][0] != i - begin ||
                    memcmp(text + words[k][0], text + begin, (size_t)(i - begin)) != 0;
        if (!fresh) continue;
        words[count][0] = begin;
        words[count++][1] = i;
    }
    return count;
}

static double xdi_special_jaccard(const char *a, int n, const char *b, int m) {
    int a_words[XDI_SPECIAL_MOST / 3][2], b_words[XDI_SPECIAL_MOST / 3][2], both = 0;
    const int a_count = xdi_special_words(a, n, a_words), b_count = xdi_special_words(b, m, b_words);
    for (int i = 0; i < a_count; i++)
        for (int j = 0; j < b_count; j++) {
            const int length = a_words[i][1] - a_words[i][0];
            both += length == b_words[j][1] - b_words[j][0] &&
                    memcmp(a + a_words[i][0], b + b_words[j][0], (size_t)length) == 0;
        }
    const int any = a_count + b_count - both;
    return any > 0 ? (double)both / (double)any : 0.0;
}

static double xdi_special_similarity(xd_text a, xd_text b) {
    char low_a[XDI_SPECIAL_MOST], low_b[XDI_SPECIAL_MOST];
    const int n = (int)a.size, m = (int)b.size;
    for (int i = 0; i < n; i++) low_a[i] = xdi_special_letter(a.data[i]);
    for (int i = 0; i < m; i++) low_b[i] = xdi_special_letter(b.data[i]);
    const double ratio = 2.0 * xdi_special_common(a.data, n, b.data, m) / (double)(n + m);
    return 0.6 * ratio + 0.4 * xdi_special_jaccard(low_a, n, low_b, m);
}

/* ---- pairs ---- */

static bool xdi_special_is(xd_text text) {
    return text.size >= 2 && text.size <= XDI_SPECIAL_MOST && text.data[0] == '<' &&
           text.data[text.size - 1] == '>';
}

/* Inserts a pair into the descending list of one student token, after equal ones. */
static int64_t xdi_special_insert(xdi_special_pair *list, int64_t n, int64_t most, xdi_special_pair pair) {
    int64_t at = n;
    while (at > 0 && list[at - 1].similarity < pair.similarity) at--;
    if (at == most) return n;
    const int64_t kept = n < most ? n : most - 1;
    memmove(list + at + 1, list + at, (size_t)(kept - at) * sizeof *list);
    list[at] = pair;
    return kept + 1;
}

static int64_t xdi_special_count(xd_texts all) {
    int64_t n = 0;
    for (int64_t i = 0; i < all.count; i++) n += xdi_special_is(all.texts[i]);
    return n;
}

XD_PRIVATE xd_result xdi_special_pairs(xd_ctx *ctx, const xdi_special_desc *desc, xdi_special_pair **pairs,
                                       int64_t *count) {
    XDI_GIVEN(ctx, ctx, desc, pairs, count);
    XDI_GIVEN_LIST(ctx, desc->student.texts, desc->student.count);
    XDI_GIVEN_LIST(ctx, desc->teacher.texts, desc->teacher.count);
    const double threshold = desc->threshold;
    XD_REQUIRE(ctx, desc->max_pairs >= 0, XD_ERROR_ARGUMENT, "max_pairs %lld is negative",
               (long long)desc->max_pairs);
    XD_REQUIRE(ctx, desc->student.count >= 0 && desc->teacher.count >= 0, XD_ERROR_ARGUMENT,
               "vocabularies of %lld and %lld strings", (long long)desc->student.count,
               (long long)desc->teacher.count);
    XD_REQUIRE(ctx, isfinite(threshold), XD_ERROR_ARGUMENT, "threshold %g is not finite", threshold);
    const int64_t teachers = xdi_special_count(desc->teacher);
    int64_t most = desc->max_pairs, n = 0;
    if (most > teachers) most = teachers;
    const int64_t students = xdi_special_count(desc->student);
    const size_t room = (size_t)students * (size_t)most;
    xdi_special_pair *list = (xdi_special_pair *)xd_allocate(ctx, room * sizeof *list);
    XD_REQUIRE(ctx, list, XD_ERROR_MEMORY, "no room for %zu pairs of special tokens", room);
    for (int64_t s = 0; s < desc->student.count && most > 0; s++) {
        int64_t mine = 0;
        if (!xdi_special_is(desc->student.texts[s])) continue;
        for (int64_t t = 0; t < desc->teacher.count; t++) {
            if (!xdi_special_is(desc->teacher.texts[t])) continue;
            const xdi_special_pair pair = {
                s, t, xdi_special_similarity(desc->student.texts[s], desc->teacher.texts[t])
            };
            if (pair.similarity >= threshold) mine = xdi_special_insert(list + n, mine, most, pair);
        }
        n += mine;
    }
    *pairs = list;
    *count = n;
    return XD_OK;
}
