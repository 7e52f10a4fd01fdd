/* A small backtracking matcher for the patterns that split text before BPE: alternation, groups, (?i:...),
 * greedy and possessive ? * + {m,n}, (?!...), $, and classes. A pattern is parsed to a tree, the tree compiled to a list of
 * operations; a loop over one class is a single operation, and these patterns consist of little else. */

#include "text/internal.h"
#include "text/unicode_tables.h"

#include <string.h>

enum {
    XDI_PATTERN_BYTES = 16384,
    XDI_PATTERN_DEPTH = 32,
    XDI_PATTERN_MOST = 1000,
    XDI_PATTERN_OPS = 1 << 16,
    XDI_PATTERN_STACK = 1 << 20,
    XDI_PATTERN_ALTERNATIVES = 32
};

#define XDI_PATTERN_NONE UINT32_MAX

/* Characters: ASCII by bit, others by category or range. */
typedef struct xdi_pattern_set {
    uint32_t ascii[4];
    uint32_t categories;
    uint32_t first_range, ranges; /* ascending, apart; code points from 128 on */
    bool negated;                 /* of what is not ASCII: the bits are final */
} xdi_pattern_set;

typedef struct xdi_pattern_range {
    uint32_t low, high;
} xdi_pattern_range;

typedef enum xdi_pattern_kind {
    XDI_PATTERN_SET = 0,   /* tree: one character; list: a loop over a class */
    XDI_PATTERN_SEQUENCE,  /* tree: children one after the other */
    XDI_PATTERN_CHOICE,    /* tree: one of the children; list: try the next operation, then `target` */
    XDI_PATTERN_REPEAT,    /* tree only */
    XDI_PATTERN_JUMP,      /* list only */
    XDI_PATTERN_ATOMIC,    /* list: match up to `target` without later backtracking, then continue after it */
    XDI_PATTERN_NOT_AHEAD, /* list: continue at `target` if the operations before it do not match here */
    XDI_PATTERN_END,       /* $ */
    XDI_PATTERN_LINE_END,  /* list only: $ that matches before a line feed too */
    XDI_PATTERN_DONE       /* list only: of the pattern or of an inner match */
} xdi_pattern_kind;

/* A node of the tree. Siblings are linked by `next`. */
typedef struct xdi_pattern_node {
    xdi_pattern_kind kind;
    bool possessive;
    uint32_t child, next, set;
    uint32_t min, max; /* max UINT32_MAX: no bound */
} xdi_pattern_node;

/* An operation of the list. */
typedef struct xdi_pattern_op {
    xdi_pattern_kind kind;
    bool possessive;
    uint32_t set, target;
    uint32_t min, max;
} xdi_pattern_op;

struct xdi_pattern {
    const xdi_unicode *unicode;
    xdi_pattern_set *sets;
    xdi_pattern_range *ranges;
    xdi_pattern_op *ops;
    uint32_t set_count, range_count, op_count, op_capacity;
    uint32_t alternatives; /* at the top level; 1 when there are too many for the bits of `first` */
    uint32_t starts[XDI_PATTERN_ALTERNATIVES];
    uint32_t first[256]; /* alternatives that can begin with a byte, as bits */
};

typedef struct xdi_pattern_parser {
    xd_ctx *ctx;
    xdi_pattern *pattern;
    const uint8_t *text;
    size_t bytes, at;
    int depth;
    bool fold; /* inside (?i:...) */
    xdi_pattern_node *nodes;
    uint32_t node_count, node_capacity;
} xdi_pattern_parser;

/* ---- parsing ---- */

static xd_result xdi_pattern_refuse(const xdi_pattern_parser *p, size_t at, const char *what) {
    return XD_FAIL(p->ctx, XD_ERROR_FORMAT, "pattern: %s at byte %llu of %llu", what, (unsigned long long)at,
                   (unsigned long long)p->bytes);
}

static bool xdi_pattern_take(xdi_pattern_parser *p, const char *word) {
    const size_t length = strlen(word);
    if (p->bytes - p->at < length || memcmp(p->text + p->at, word, length) != 0) return false;
    p->at += length;
    return true;
}

/* A byte makes at most two nodes and two more for each opened group, so the arrays sized by the text never
 * run out. */
static uint32_t xdi_pattern_node_new(xdi_pattern_parser *p, xdi_pattern_kind kind) {
    const uint32_t index = p->node_count++;
    xdi_pattern_node *node = &p->nodes[index];
    memset(node, 0, sizeof *node);
    node->kind = kind;
    node->child = node->next = XDI_PATTERN_NONE;
    return index;
}

static void xdi_pattern_add_range(xdi_pattern *p, xdi_pattern_set *set, uint32_t low, uint32_t high) {
    for (uint32_t c = low; c < 128 && c <= high; c++) set->ascii[c >> 5] |= 1u << (c & 31u);
    if (high < 128) return;
    if (low < 128) low = 128;
    uint32_t at = set->first_range + set->ranges;
    while (at > set->first_range && p->ranges[at - 1].low > low) {
        p->ranges[at] = p->ranges[at - 1];
        at--;
    }
    p->ranges[at].low = low;
    p->ranges[at].high = high;
    set->ranges++;
    p->range_count++;
}

/* One character of a set, and inside (?i:...) those that fold to the same. */
static void xdi_pattern_add_point(xdi_pattern_parser *p, xdi_pattern_set *set, uint32_t point) {
    uint32_t mates[4];
    const int count = p->fold ? xdi_unicode_fold_mates(point, mates) : 0;
    xdi_pattern_add_range(p->pattern, set, point, point);
    for (int i = 0; i < count; i++) xdi_pattern_add_range(p->pattern, set, mates[i], mates[i]);
}

/* Joins ranges that overlap and completes the ASCII bits. */
static void xdi_pattern_close_set(xdi_pattern *p, xdi_pattern_set *set, bool negated) {
    xdi_pattern_range *ranges = p->ranges + set->first_range;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < set->ranges; i++) {
        if (kept > 0 && ranges[i].low <= ranges[kept - 1].high) {
            if (ranges[i].high > ranges[kept - 1].high) ranges[kept - 1].high = ranges[i].high;
        } else {
            ranges[kept++] = ranges[i];
        }
    }
    p->range_count -= set->ranges - kept;
    set->ranges = kept;
    set->negated = negated;
    for (uint32_t c = 0; c < 128; c++)
        if (set->categories >> (xdi_unicode_property(p->unicode, c) & XDI_UNICODE_CATEGORY) & 1u)
            set->ascii[c >> 5] |= 1u << (c & 31u);
    for (int i = 0; i < 4 && negated; i++) set->ascii[i] = ~set->ascii[i];
}

static xdi_pattern_set *xdi_pattern_new_set(xdi_pattern *p) {
    xdi_pattern_set *set = &p->sets[p->set_count++];
    memset(set, 0, sizeof *set);
    set->first_range = p->range_count;
    return set;
}

/* After "\p" or "\P": the categories. */
static xd_result xdi_pattern_parse_property(xdi_pattern_parser *p, bool negated, uint32_t *categories) {
    const size_t begin = p->at - 2;
    const uint8_t *name = p->text + p->at + 1;
    size_t length = 0;
    if (!xdi_pattern_take(p, "{")) return xdi_pattern_refuse(p, begin, "\\p without {");
    while (p->at < p->bytes && p->text[p->at] != '}') p->at++, length++;
    const bool known = xdi_unicode_mask((const char *)name, length, categories);
    if (!xdi_pattern_take(p, "}") || !known)
        return xdi_pattern_refuse(p, begin, "a property that is not supported");
    if (p->fold) return xdi_pattern_refuse(p, begin, "a property inside (?i:");
    if (negated) *categories = ~*categories;
    return XD_OK;
}

/* After a backslash: categories, or one character. */
static xd_result xdi_pattern_parse_escape(xdi_pattern_parser *p, uint32_t *categories, uint32_t *point) {
    static const char names[] = "rntfv0", values[] = "\r\n\t\f\v";
    const size_t begin = p->at - 1;
    const uint8_t c = p->at < p->bytes ? p->text[p->at++] : 0;
    *categories = 0;
    *point = c;
    if (c == 'p' || c == 'P') return xdi_pattern_parse_property(p, c == 'P', categories);
    if (c == 's' || c == 'S') *categories = xdi_unicode_space_mask();
    if (c == 'd' || c == 'D') *categories = 1u << XDI_UNICODE_ND;
    if (c == 'S' || c == 'D') *categories = ~*categories;
    if (*categories) return XD_OK;
    const char *name = c ? strchr(names, c) : NULL;
    if (name) *point = (uint8_t)values[name - names];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (c <= ' ' || c >= 127 || (letter && !name) || c == '0')
        return xdi_pattern_refuse(p, begin, "an escape that is not supported");
    return XD_OK;
}

/* A character of a class or an escape; *categories is 0 for a character. */
static xd_result xdi_pattern_parse_item(xdi_pattern_parser *p, uint32_t *categories, uint32_t *point) {
    *categories = 0;
    if (xdi_pattern_take(p, "\\")) return xdi_pattern_parse_escape(p, categories, point);
    const size_t length = xdi_utf8_decode(p->text + p->at, p->text + p->bytes, point);
    if (*point == XDI_UNICODE_INVALID) return xdi_pattern_refuse(p, p->at, "a byte that is not UTF-8");
    p->at += length;
    return XD_OK;
}

/* After "[". */
static xd_result xdi_pattern_parse_class(xdi_pattern_parser *p, uint32_t *node) {
    const size_t begin = p->at - 1;
    xdi_pattern_set *set = xdi_pattern_new_set(p->pattern);
    const bool negated = xdi_pattern_take(p, "^");
    bool empty = true;
    for (; !xdi_pattern_take(p, "]"); empty = false) {
        const size_t at = p->at;
        uint32_t categories, more, low, high;
        if (at >= p->bytes) return xdi_pattern_refuse(p, begin, "a class without end");
        if (p->text[at] == '[') return xdi_pattern_refuse(p, at, "a class inside a class");
        if (p->text[at] == '&' && at + 1 < p->bytes && p->text[at + 1] == '&')
            return xdi_pattern_refuse(p, at, "an intersection of classes");
        XD_TRY(xdi_pattern_parse_item(p, &categories, &low));
        set->categories |= categories;
        if (categories) continue;
        const bool range = p->at + 1 < p->bytes && p->text[p->at] == '-' && p->text[p->at + 1] != ']';
        if (!range) {
            xdi_pattern_add_point(p, set, low);
            continue;
        }
        p->at++;
        XD_TRY(xdi_pattern_parse_item(p, &more, &high));
        if (more || high < low) return xdi_pattern_refuse(p, at, "a range that runs backwards");
        if (p->fold && high >= 128) return xdi_pattern_refuse(p, at, "a range beyond ASCII inside (?i:");
        if (!p->fold) xdi_pattern_add_range(p->pattern, set, low, high);
        for (uint32_t c = low; c <= high && p->fold; c++) xdi_pattern_add_point(p, set, c);
    }
    if (empty) return xdi_pattern_refuse(p, begin, "an empty class");
    xdi_pattern_close_set(p->pattern, set, negated);
    *node = xdi_pattern_node_new(p, XDI_PATTERN_SET);
    p->nodes[*node].set = p->pattern->set_count - 1;
    return XD_OK;
}

static xd_result xdi_pattern_parse_choice(xdi_pattern_parser *p, uint32_t *node);

/* After "(". */
static xd_result xdi_pattern_parse_group(xdi_pattern_parser *p, uint32_t *node) {
    const size_t begin = p->at - 1;
    const bool fold = p->fold, fold_here = xdi_pattern_take(p, "?i:"), ahead = xdi_pattern_take(p, "?!");
    if (!fold_here && !ahead && !xdi_pattern_take(p, "?:") && p->at < p->bytes && p->text[p->at] == '?')
        return xdi_pattern_refuse(p, begin, "a kind of group that is not supported");
    if (++p->depth > XDI_PATTERN_DEPTH) return xdi_pattern_refuse(p, begin, "groups nested too deeply");
    p->fold = fold || fold_here;
    XD_TRY(xdi_pattern_parse_choice(p, node));
    if (!xdi_pattern_take(p, ")")) return xdi_pattern_refuse(p, begin, "a group without end");
    p->fold = fold;
    p->depth--;
    if (!ahead) return XD_OK;
    const uint32_t inner = *node;
    *node = xdi_pattern_node_new(p, XDI_PATTERN_NOT_AHEAD);
    p->nodes[*node].child = inner;
    return XD_OK;
}

/* One character, class, group or $. */
static xd_result xdi_pattern_parse_atom(xdi_pattern_parser *p, uint32_t *node) {
    if (xdi_pattern_take(p, "(")) return xdi_pattern_parse_group(p, node);
    if (xdi_pattern_take(p, "[")) return xdi_pattern_parse_class(p, node);
    if (xdi_pattern_take(p, "$")) {
        *node = xdi_pattern_node_new(p, XDI_PATTERN_END);
        return XD_OK;
    }
    if (strchr("^.*+?{", p->text[p->at]) && p->text[p->at])
        return xdi_pattern_refuse(p, p->at, "an operator that is not supported here");
    uint32_t categories, point;
    XD_TRY(xdi_pattern_parse_item(p, &categories, &point));
    xdi_pattern_set *set = xdi_pattern_new_set(p->pattern);
    set->categories = categories;
    if (!categories) xdi_pattern_add_point(p, set, point);
    xdi_pattern_close_set(p->pattern, set, false);
    *node = xdi_pattern_node_new(p, XDI_PATTERN_SET);
    p->nodes[*node].set = p->pattern->set_count - 1;
    return XD_OK;
}

static bool xdi_pattern_parse_number(xdi_pattern_parser *p, uint32_t *number) {
    const size_t begin = p->at;
    uint32_t value = 0;
    for (; p->at < p->bytes && p->text[p->at] >= '0' && p->text[p->at] <= '9'; p->at++)
        if (value <= XDI_PATTERN_MOST) value = value * 10 + (uint32_t)(p->text[p->at] - '0');
    *number = value;
    return p->at > begin;
}

/* The quantifier at the parser's position; false when there is none. */
static xd_result xdi_pattern_parse_bounds(xdi_pattern_parser *p, uint32_t *min, uint32_t *max, bool *found) {
    const size_t begin = p->at;
    *found = true;
    *min = 0;
    *max = UINT32_MAX;
    if (xdi_pattern_take(p, "*")) return XD_OK;
    *min = 1;
    if (xdi_pattern_take(p, "+")) return XD_OK;
    *min = 0;
    *max = 1;
    if (xdi_pattern_take(p, "?")) return XD_OK;
    *found = xdi_pattern_take(p, "{");
    if (!*found) return XD_OK;
    bool good = xdi_pattern_parse_number(p, min);
    *max = *min;
    if (good && xdi_pattern_take(p, ",") && !xdi_pattern_parse_number(p, max)) *max = UINT32_MAX;
    good = good && xdi_pattern_take(p, "}") && *min <= *max && *max > 0 && *min <= XDI_PATTERN_MOST;
    if (!good || (*max > XDI_PATTERN_MOST && *max != UINT32_MAX))
        return xdi_pattern_refuse(p, begin, "a repetition that is not {m}, {m,} or {m,n} up to 1000");
    return XD_OK;
}

/* Can the tree below a node match the empty string? */
static bool xdi_pattern_is_empty(const xdi_pattern_parser *p, uint32_t index) {
    const xdi_pattern_node *node = &p->nodes[index];
    if (node->kind == XDI_PATTERN_SET) return false;
    if (node->kind == XDI_PATTERN_REPEAT) return node->min == 0 || xdi_pattern_is_empty(p, node->child);
    const bool all = node->kind == XDI_PATTERN_SEQUENCE;
    if (!all && node->kind != XDI_PATTERN_CHOICE) return true;
    for (uint32_t c = node->child; c != XDI_PATTERN_NONE; c = p->nodes[c].next)
        if (xdi_pattern_is_empty(p, c) != all) return !all;
    return all;
}

static xd_result xdi_pattern_parse_repeat(xdi_pattern_parser *p, uint32_t *node) {
    const size_t begin = p->at;
    uint32_t min, max;
    bool found;
    XD_TRY(xdi_pattern_parse_atom(p, node));
    const size_t operator_at = p->at;
    XD_TRY(xdi_pattern_parse_bounds(p, &min, &max, &found));
    if (!found) return XD_OK;
    const bool possessive = xdi_pattern_take(p, "+");
    if (p->at < p->bytes && strchr("?*+{", p->text[p->at]) && p->text[p->at])
        return xdi_pattern_refuse(p, operator_at, "a lazy or repeated quantifier");
    if (max == UINT32_MAX && xdi_pattern_is_empty(p, *node))
        return xdi_pattern_refuse(p, begin, "a loop over what can be empty");
    const uint32_t inner = *node;
    *node = xdi_pattern_node_new(p, XDI_PATTERN_REPEAT);
    p->nodes[*node].child = inner;
    p->nodes[*node].min = min;
    p->nodes[*node].max = max;
    p->nodes[*node].possessive = possessive;
    return XD_OK;
}

/* Atoms up to "|", ")" or the end. */
static xd_result xdi_pattern_parse_sequence(xdi_pattern_parser *p, uint32_t *node) {
    *node = xdi_pattern_node_new(p, XDI_PATTERN_SEQUENCE);
    uint32_t last = XDI_PATTERN_NONE, child;
    while (p->at < p->bytes && p->text[p->at] != '|' && p->text[p->at] != ')') {
        XD_TRY(xdi_pattern_parse_repeat(p, &child));
        if (last == XDI_PATTERN_NONE)
            p->nodes[*node].child = child;
        else
            p->nodes[last].next = child;
        last = child;
    }
    return XD_OK;
}

static xd_result xdi_pattern_parse_choice(xdi_pattern_parser *p, uint32_t *node) {
    *node = xdi_pattern_node_new(p, XDI_PATTERN_CHOICE);
    uint32_t last, child;
    XD_TRY(xdi_pattern_parse_sequence(p, &last));
    p->nodes[*node].child = last;
    while (xdi_pattern_take(p, "|")) {
        XD_TRY(xdi_pattern_parse_sequence(p, &child));
        p->nodes[last].next = child;
        last = child;
    }
    return XD_OK;
}

/* ---- from tree to list ---- */

static xd_result xdi_pattern_emit(xdi_pattern_parser *p, xdi_pattern_kind kind, uint32_t *index) {
    xdi_pattern *pattern = p->pattern;
    if (pattern->op_count == pattern->op_capacity) {
        XD_REQUIRE(p->ctx, pattern->op_capacity < XDI_PATTERN_OPS, XD_ERROR_FORMAT,
                   "pattern: more than %d operations", (int)XDI_PATTERN_OPS);
        const uint32_t capacity = pattern->op_capacity ? 2 * pattern->op_capacity : 64;
        xdi_pattern_op *ops = (xdi_pattern_op *)xd_allocate(p->ctx, capacity * sizeof *ops);
        XD_REQUIRE(p->ctx, ops, XD_ERROR_MEMORY, "pattern: no room for %u operations", (unsigned)capacity);
        if (pattern->ops) memcpy(ops, pattern->ops, pattern->op_count * sizeof *ops);
        xd_release(p->ctx, pattern->ops);
        pattern->ops = ops;
        pattern->op_capacity = capacity;
    }
    *index = pattern->op_count++;
    memset(&pattern->ops[*index], 0, sizeof *pattern->ops);
    pattern->ops[*index].kind = kind;
    return XD_OK;
}

static xd_result xdi_pattern_emit_node(xdi_pattern_parser *p, uint32_t index);

/* The operations between one that matches separately and its target. */
static xd_result xdi_pattern_emit_inner(xdi_pattern_parser *p, xdi_pattern_kind kind, uint32_t child) {
    uint32_t head, done;
    XD_TRY(xdi_pattern_emit(p, kind, &head));
    XD_TRY(xdi_pattern_emit_node(p, child));
    XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_DONE, &done));
    p->pattern->ops[head].target = p->pattern->op_count;
    return XD_OK;
}

static xd_result xdi_pattern_emit_choice(xdi_pattern_parser *p, uint32_t child) {
    uint32_t split, jump,
        chain = XDI_PATTERN_NONE; /* jumps to the end, each storing the index of the one before */
    for (; p->nodes[child].next != XDI_PATTERN_NONE; child = p->nodes[child].next) {
        XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_CHOICE, &split));
        XD_TRY(xdi_pattern_emit_node(p, child));
        XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_JUMP, &jump));
        p->pattern->ops[jump].target = chain;
        chain = jump;
        p->pattern->ops[split].target = p->pattern->op_count;
    }
    XD_TRY(xdi_pattern_emit_node(p, child));
    while (chain != XDI_PATTERN_NONE) {
        const uint32_t before = p->pattern->ops[chain].target;
        p->pattern->ops[chain].target = p->pattern->op_count;
        chain = before;
    }
    return XD_OK;
}

static xd_result xdi_pattern_emit_loop(xdi_pattern_parser *p, const xdi_pattern_node *node) {
    uint32_t split, jump;
    for (uint32_t i = 0; i < node->min; i++) XD_TRY(xdi_pattern_emit_node(p, node->child));
    if (node->max == UINT32_MAX) {
        XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_CHOICE, &split));
        XD_TRY(xdi_pattern_emit_node(p, node->child));
        XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_JUMP, &jump));
        p->pattern->ops[jump].target = split;
        p->pattern->ops[split].target = p->pattern->op_count;
        return XD_OK;
    }
    uint32_t chain = XDI_PATTERN_NONE;
    for (uint32_t i = node->min; i < node->max; i++) {
        XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_CHOICE, &split));
        p->pattern->ops[split].target = chain;
        chain = split;
        XD_TRY(xdi_pattern_emit_node(p, node->child));
    }
    while (chain != XDI_PATTERN_NONE) {
        const uint32_t before = p->pattern->ops[chain].target;
        p->pattern->ops[chain].target = p->pattern->op_count;
        chain = before;
    }
    return XD_OK;
}

static xd_result xdi_pattern_emit_set(xdi_pattern_parser *p, uint32_t set, uint32_t min, uint32_t max,
                                      bool possessive) {
    uint32_t index;
    XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_SET, &index));
    xdi_pattern_op *op = &p->pattern->ops[index];
    op->set = set;
    op->min = min;
    op->max = max;
    op->possessive = possessive;
    return XD_OK;
}

/* The set that a node is, through groups around it; NONE when it is more than a set. */
static uint32_t xdi_pattern_sole_set(const xdi_pattern_parser *p, uint32_t index) {
    const xdi_pattern_node *node = &p->nodes[index];
    while (node->kind == XDI_PATTERN_SEQUENCE || node->kind == XDI_PATTERN_CHOICE) {
        if (node->child == XDI_PATTERN_NONE || p->nodes[node->child].next != XDI_PATTERN_NONE)
            return XDI_PATTERN_NONE;
        node = &p->nodes[node->child];
    }
    return node->kind == XDI_PATTERN_SET ? node->set : XDI_PATTERN_NONE;
}

static xd_result xdi_pattern_emit_node(xdi_pattern_parser *p, uint32_t index) {
    const xdi_pattern_node *node = &p->nodes[index];
    uint32_t unused;
    switch (node->kind) {
    case XDI_PATTERN_SET: return xdi_pattern_emit_set(p, node->set, 1, 1, false);
    case XDI_PATTERN_CHOICE: return xdi_pattern_emit_choice(p, node->child);
    case XDI_PATTERN_NOT_AHEAD: return xdi_pattern_emit_inner(p, node->kind, node->child);
    case XDI_PATTERN_SEQUENCE:
        for (uint32_t c = node->child; c != XDI_PATTERN_NONE; c = p->nodes[c].next)
            XD_TRY(xdi_pattern_emit_node(p, c));
        return XD_OK;
    case XDI_PATTERN_REPEAT: break;
    case XDI_PATTERN_END:
    default: return xdi_pattern_emit(p, node->kind, &unused);
    }
    const uint32_t set = xdi_pattern_sole_set(p, node->child);
    if (set != XDI_PATTERN_NONE) return xdi_pattern_emit_set(p, set, node->min, node->max, node->possessive);
    if (!node->possessive) return xdi_pattern_emit_loop(p, node);
    uint32_t head, done;
    XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_ATOMIC, &head));
    XD_TRY(xdi_pattern_emit_loop(p, node));
    XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_DONE, &done));
    p->pattern->ops[head].target = p->pattern->op_count;
    return XD_OK;
}

/* Marks the bytes that a match of a node can begin with; true when it can match the empty string. */
static bool xdi_pattern_first(const xdi_pattern_parser *p, uint32_t index, uint32_t bit) {
    const xdi_pattern_node *node = &p->nodes[index];
    uint32_t *first = p->pattern->first;
    if (node->kind == XDI_PATTERN_SET) {
        const xdi_pattern_set *set = &p->pattern->sets[node->set];
        for (uint32_t c = 0; c < 128; c++)
            if (set->ascii[c >> 5] >> (c & 31u) & 1u) first[c] |= bit;
        for (uint32_t c = 128; c < 256 && (set->categories || set->ranges || set->negated); c++)
            first[c] |= bit;
        return false;
    }
    if (node->kind == XDI_PATTERN_REPEAT) return xdi_pattern_first(p, node->child, bit) || node->min == 0;
    bool any = node->kind != XDI_PATTERN_CHOICE;
    for (uint32_t c = node->child; c != XDI_PATTERN_NONE && node->kind <= XDI_PATTERN_CHOICE;
         c = p->nodes[c].next) {
        const bool empty = xdi_pattern_first(p, c, bit);
        if (node->kind == XDI_PATTERN_SEQUENCE && !empty) return false;
        any = any || empty;
    }
    return any;
}

/* Each alternative at the top level gets separate code and a bit in the table of first bytes. */
static xd_result xdi_pattern_emit_top(xdi_pattern_parser *p, uint32_t root) {
    xdi_pattern *pattern = p->pattern;
    const uint32_t only = p->nodes[root].child;
    uint32_t count = 0, done;
    for (uint32_t c = only; c != XDI_PATTERN_NONE; c = p->nodes[c].next) count++;
    const bool apart = count <= XDI_PATTERN_ALTERNATIVES;
    for (uint32_t c = apart ? only : root; c != XDI_PATTERN_NONE; c = p->nodes[c].next) {
        const uint32_t bit = 1u << pattern->alternatives;
        pattern->starts[pattern->alternatives++] = pattern->op_count;
        if (xdi_pattern_first(p, c, bit))
            for (int i = 0; i < 256; i++) pattern->first[i] |= bit;
        XD_TRY(xdi_pattern_emit_node(p, c));
        XD_TRY(xdi_pattern_emit(p, XDI_PATTERN_DONE, &done));
    }
    return XD_OK;
}

static xd_result xdi_pattern_compile(xdi_pattern_parser *p) {
    const size_t room =
        p->bytes + 2; /* folding may add four characters to each: five ranges per byte are enough */
    p->pattern->sets = (xdi_pattern_set *)xd_allocate(p->ctx, room * sizeof *p->pattern->sets);
    p->pattern->ranges = (xdi_pattern_range *)xd_allocate(p->ctx, 5 * room * sizeof *p->pattern->ranges);
    p->nodes = (xdi_pattern_node *)xd_allocate(p->ctx, 4 * room * sizeof *p->nodes);
    XD_REQUIRE(p->ctx, p->pattern->sets && p->pattern->ranges && p->nodes, XD_ERROR_MEMORY,
               "no room for a pattern of %llu bytes", (unsigned long long)p->bytes);
    uint32_t root;
    XD_TRY(xdi_pattern_parse_choice(p, &root));
    if (p->at < p->bytes) return xdi_pattern_refuse(p, p->at, "a ) too many");
    /* The references cut a text at each empty match; here there is none of them. */
    if (xdi_pattern_is_empty(p, root)) return xdi_pattern_refuse(p, 0, "a match that can be empty");
    return xdi_pattern_emit_top(p, root);
}

XD_PRIVATE xd_result xdi_pattern_create(xd_ctx *ctx, const char *text, size_t bytes, const xdi_unicode *u,
                                        xdi_pattern **out) {
    XD_REQUIRE(ctx, bytes > 0 && bytes <= XDI_PATTERN_BYTES, XD_ERROR_FORMAT,
               "pattern of %llu bytes; 1 to %d are supported", (unsigned long long)bytes,
               (int)XDI_PATTERN_BYTES);
    xdi_pattern_parser p;
    memset(&p, 0, sizeof p);
    p.ctx = ctx;
    p.text = (const uint8_t *)text;
    p.bytes = bytes;
    p.pattern = (xdi_pattern *)xd_allocate(ctx, sizeof *p.pattern);
    XD_REQUIRE(ctx, p.pattern, XD_ERROR_MEMORY, "no room for a pattern");
    p.pattern->unicode = u;
    const xd_result result = xdi_pattern_compile(&p);
    xd_release(ctx, p.nodes);
    if (result == XD_OK)
        *out = p.pattern;
    else
        xdi_pattern_destroy(ctx, p.pattern);
    return result;
}

XD_PRIVATE void xdi_pattern_destroy(xd_ctx *ctx, xdi_pattern *pattern) {
    if (!pattern) return;
    xd_release(ctx, pattern->sets);
    xd_release(ctx, pattern->ranges);
    xd_release(ctx, pattern->ops);
    xd_release(ctx, pattern);
}

XD_PRIVATE bool xdi_pattern_end_lines(xdi_pattern *pattern) {
    bool any = false;
    for (uint32_t i = 0; i < pattern->op_count; i++) {
        if (pattern->ops[i].kind != XDI_PATTERN_END) continue;
        pattern->ops[i].kind = XDI_PATTERN_LINE_END;
        any = true;
    }
    return any;
}

/* ---- matching ---- */

XD_PRIVATE void xdi_matcher_start(xdi_matcher *m, const uint8_t *text, size_t bytes) {
    m->text = text;
    m->bytes = bytes;
    m->used = 0;
    m->steps = 65536u + 256u * (uint64_t)bytes;
}

XD_PRIVATE void xdi_matcher_release(xdi_matcher *m) {
    xd_release(m->ctx, m->stack);
    m->stack = NULL;
    m->capacity = m->used = 0;
}

static bool xdi_pattern_in_ranges(const xdi_pattern_range *ranges, uint32_t count, uint32_t point) {
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (point < ranges[middle].low)
            high = middle;
        else if (point > ranges[middle].high)
            low = middle + 1;
        else
            return true;
    }
    return false;
}

/* Is a character that is not ASCII in the set? */
static bool xdi_pattern_has(const xdi_pattern *p, const xdi_pattern_set *set, uint32_t point) {
    bool in = set->categories >> (xdi_unicode_property(p->unicode, point) & XDI_UNICODE_CATEGORY) & 1u;
    if (!in && set->ranges) in = xdi_pattern_in_ranges(p->ranges + set->first_range, set->ranges, point);
    return in != set->negated;
}

/* The longest run of a set's characters, at most max; *enough is the offset where it reached min. False when it is
 * shorter. */
static bool xdi_pattern_run_set(const xdi_matcher *m, const xdi_pattern_op *op, size_t *at, size_t *enough) {
    const xdi_pattern_set *set = &m->pattern->sets[op->set];
    const uint8_t *text = m->text, *const end = text + m->bytes, *p = text + *at;
    uint32_t count = 0;
    *enough = *at;
    while (count < op->max && p < end) {
        const uint32_t c = *p;
        if (c < 128) {
            if (!(set->ascii[c >> 5] >> (c & 31u) & 1u)) break;
            p++;
        } else {
            uint32_t point;
            const size_t length = xdi_utf8_decode(p, end, &point);
            if (!xdi_pattern_has(m->pattern, set, point)) break;
            p += length;
        }
        if (++count == op->min) *enough = (size_t)(p - text);
    }
    *at = (size_t)(p - text);
    return count >= op->min;
}

static xd_result xdi_matcher_push(xdi_matcher *m, size_t low, size_t high, uint32_t op) {
    if (m->used == m->capacity) {
        XD_REQUIRE(m->ctx, m->capacity < XDI_PATTERN_STACK, XD_ERROR_DATA,
                   "the split pattern needs more than %d choices at byte %llu of a text",
                   (int)XDI_PATTERN_STACK, (unsigned long long)high);
        const size_t capacity = m->capacity ? 4 * m->capacity : 256;
        xdi_pattern_choice *stack = (xdi_pattern_choice *)xd_allocate(m->ctx, capacity * sizeof *stack);
        XD_REQUIRE(m->ctx, stack, XD_ERROR_MEMORY, "no room for %llu choices", (unsigned long long)capacity);
        if (m->stack) memcpy(stack, m->stack, m->used * sizeof *stack);
        xd_release(m->ctx, m->stack);
        m->stack = stack;
        m->capacity = capacity;
    }
    m->stack[m->used].low = low;
    m->stack[m->used].high = high;
    m->stack[m->used++].op = op;
    return XD_OK;
}

/* Takes back the last choice made above `base`; false when there is none. */
static bool xdi_matcher_back(xdi_matcher *m, size_t base, uint32_t *op, size_t *at) {
    if (m->used == base) return false;
    xdi_pattern_choice *top = &m->stack[m->used - 1];
    if (top->low != SIZE_MAX) top->high -= xdi_utf8_before(m->text, m->text + top->high);
    *op = top->op;
    *at = top->high;
    if (top->low == SIZE_MAX || top->high <= top->low) m->used--;
    return true;
}

static xd_result xdi_pattern_spend(xdi_matcher *m, uint64_t steps, size_t at) {
    XD_REQUIRE(m->ctx, m->steps >= steps, XD_ERROR_DATA,
               "the split pattern takes too many steps at byte %llu of a text of %llu",
               (unsigned long long)at, (unsigned long long)m->bytes);
    m->steps -= steps;
    return XD_OK;
}

/* Runs the operations from `op` to their DONE. *end is the end of the match; *matched reports whether there is
 * one. Recursion: one level for each atomic group or look-ahead around the operation. */
static xd_result xdi_pattern_run(xdi_matcher *m, uint32_t op, size_t at, size_t *end, bool *matched) {
    const xdi_pattern_op *ops = m->pattern->ops;
    const size_t base = m->used;
    size_t enough, inner;
    bool good;
    for (;;) {
        const xdi_pattern_op *o = &ops[op];
        const size_t begin = at;
        good = true;
        switch (o->kind) {
        case XDI_PATTERN_SET:
            good = xdi_pattern_run_set(m, o, &at, &enough);
            if (good && at > enough && !o->possessive && ops[op + 1].kind != XDI_PATTERN_DONE)
                XD_TRY(xdi_matcher_push(m, enough, at, op + 1));
            op++;
            break;
        case XDI_PATTERN_CHOICE:
            XD_TRY(xdi_matcher_push(m, SIZE_MAX, at, o->target));
            op++;
            break;
        case XDI_PATTERN_JUMP: op = o->target; break;
        case XDI_PATTERN_ATOMIC:
            XD_TRY(xdi_pattern_run(m, op + 1, at, &at, &good));
            op = o->target;
            break;
        case XDI_PATTERN_NOT_AHEAD:
            XD_TRY(xdi_pattern_run(m, op + 1, at, &inner, &good));
            good = !good;
            op = o->target;
            break;
        case XDI_PATTERN_END:
            good = at == m->bytes;
            op++;
            break;
        case XDI_PATTERN_LINE_END:
            good = at == m->bytes || m->text[at] == '\n';
            op++;
            break;
        case XDI_PATTERN_DONE:
        default:
            m->used = base;
            *end = at;
            *matched = true;
            return XD_OK;
        }
        XD_TRY(xdi_pattern_spend(m, 1 + (at > begin ? at - begin : 0), begin));
        if (!good && !xdi_matcher_back(m, base, &op, &at)) {
            *matched = false;
            return XD_OK;
        }
    }
}

XD_PRIVATE xd_result xdi_pattern_find(xdi_matcher *m, const xdi_pattern *pattern, size_t from, size_t to,
                                      size_t *begin, size_t *end) {
    const size_t bytes = m->bytes;
    uint32_t point;
    xd_result result = XD_OK;
    m->pattern = pattern;
    m->bytes = to;
    for (size_t at = from; at < to && result == XD_OK;
         at += xdi_utf8_decode(m->text + at, m->text + to, &point)) {
        uint32_t left = pattern->first[m->text[at]];
        for (uint32_t i = 0; left && result == XD_OK; i++, left >>= 1) {
            bool matched = false;
            if (!(left & 1u)) continue;
            result = xdi_pattern_run(m, pattern->starts[i], at, end, &matched);
            if (result != XD_OK || !matched || *end == at) continue;
            *begin = at;
            m->bytes = bytes;
            return XD_OK;
        }
    }
    m->used = 0;
    m->bytes = bytes;
    *begin = *end = to;
    return result;
}
