/* bpe.c - see bpe.h. */
#include "bpe.h"
#include "bpe_split.h"

#include <string.h>

#define BPE_FAIL(ctx, ...) xd_fail((ctx), XD_ERROR_FORMAT, __FILE__, __LINE__, __func__, __VA_ARGS__)
/* Joining entries `left` and `right` gives `entry`; of several possible joins the lowest rank comes first. */
typedef struct bpe_merge {
    int32_t left, right; /* left -1 = free slot */
    int32_t rank, entry;
} bpe_merge;

typedef struct bpe_entry {
    uint8_t *bytes; /* inside `spellings` */
    uint32_t length;
    bool known, special;
} bpe_entry;

struct bpe {
    int size;
    bpe_entry *entries;
    uint8_t *spellings;
    bpe_merge *merges; /* hash table of `slots`, a power of two, at most half full */
    uint32_t slots;
    int32_t byte_id[256];
};

/* ---- pieces of the file ---- */

/* The next code point of valid UTF-8 below U+0800, which is all a spelling may hold; -1 for anything above.
 */
static int32_t bpe_next_character(const char **at) {
    const uint8_t *s = (const uint8_t *)*at;
    if (s[0] < 0x80) {
        *at += 1;
        return s[0];
    }
    if (s[0] >= 0xe0) return -1;
    *at += 2;
    return (int32_t)((uint32_t)(s[0] & 0x1f) << 6 | (uint32_t)(s[1] & 0x3f));
}

/* Turns the characters of a spelling into the bytes they stand for; false when one stands for none. */
static bool bpe_unspell(const char *text, size_t length, uint8_t *out, uint32_t *out_length) {
    const char *end = text + length;
    uint32_t n = 0;
    while (text < end) {
        const int32_t character = bpe_next_character(&text);
        const int byte = character < 0 ? -1 : bpe_character_to_byte((uint32_t)character);
        if (byte < 0) return false;
        out[n++] = (uint8_t)byte;
    }
    *out_length = n;
    return true;
}

static bool bpe_is_string(const xd_json *value, const char *expected) {
    const char *text = xd_json_string(value, NULL);
    return text && strcmp(text, expected) == 0;
}

/* The file must cut text as bpe_split.c does: a sequence of that split and ByteLevel without one of its own.
 */
static xd_result bpe_check_split(xd_ctx *ctx, const xd_json *root) {
    const xd_json *list = xd_json_find(xd_json_find(root, "pre_tokenizer"), "pretokenizers");
    const xd_json *split = xd_json_at(list, 0), *bytes = xd_json_at(list, 1);
    bool own_split = true, prefix = true;
    (void)xd_json_bool(xd_json_find(bytes, "use_regex"), &own_split);
    (void)xd_json_bool(xd_json_find(bytes, "add_prefix_space"), &prefix);
    if (!bpe_is_string(xd_json_find(split, "type"), "Split") ||
        !bpe_is_string(xd_json_find(bytes, "type"), "ByteLevel") || xd_json_count(list) != 2 || own_split ||
        prefix)
        return BPE_FAIL(ctx, "pre_tokenizer is not Split followed by a plain ByteLevel");
    if (!bpe_is_string(xd_json_find(xd_json_find(split, "pattern"), "Regex"), BPE_SPLIT_PATTERN))
        return BPE_FAIL(ctx, "pre_tokenizer has a split pattern that is not built in");
    if (xd_json_kind_of(xd_json_find(root, "normalizer")) == XD_JSON_OBJECT)
        return BPE_FAIL(ctx, "a normalizer is not supported");
    return XD_OK;
}

/* ---- entries ---- */

/* The entry of a member's id, not yet taken; NULL when the id is wrong. */
static bpe_entry *bpe_new_entry(bpe *b, const xd_json *id_value) {
    int64_t id = -1;
    if (!xd_json_int64(id_value, &id) || id < 0 || id >= b->size || b->entries[id].known) return NULL;
    b->entries[id].known = true;
    return &b->entries[id];
}

/* Added tokens are spelled as they are, not as bytes. One that is in the vocabulary as well is the same
 * entry. */
static xd_result bpe_read_added(xd_ctx *ctx, bpe *b, const xd_json *added, uint8_t **room) {
    for (const xd_json *item = xd_json_first(added); item; item = xd_json_next(item)) {
        size_t bytes = 0;
        const char *text = xd_json_string(xd_json_find(item, "content"), &bytes);
        bpe_entry *entry = text && bytes ? bpe_new_entry(b, xd_json_find(item, "id")) : NULL;
        if (!entry)
            return BPE_FAIL(ctx, "added token at byte %zu has a bad content or id", xd_json_offset(item));
        memcpy(*room, text, bytes);
        entry->bytes = *room;
        entry->length = (uint32_t)bytes;
        entry->special = true;
        *room += bytes;
    }
    return XD_OK;
}

static bool bpe_is_added(const bpe *b, const char *text, size_t bytes, const xd_json *id_value) {
    int64_t id = -1;
    if (!xd_json_int64(id_value, &id) || id < 0 || id >= b->size || !b->entries[id].special) return false;
    return b->entries[id].length == bytes && memcmp(b->entries[id].bytes, text, bytes) == 0;
}

static xd_result bpe_read_vocabulary(xd_ctx *ctx, bpe *b, const xd_json *vocab, uint8_t **room) {
    for (const xd_json *item = xd_json_first(vocab); item; item = xd_json_next(item)) {
        size_t bytes = 0;
        const char *text = xd_json_key(item, &bytes);
        if (bpe_is_added(b, text, bytes, item)) continue;
        bpe_entry *entry = bpe_new_entry(b, item);
        if (!entry) return BPE_FAIL(ctx, "entry \"%s\" has a bad or repeated id", text);
        if (!bpe_unspell(text, bytes, *room, &entry->length) || entry->length == 0)
            return BPE_FAIL(ctx, "entry \"%s\" is not spelled in the byte alphabet", text);
        entry->bytes = *room;
        *room += entry->length;
        if (entry->length == 1) b->byte_id[entry->bytes[0]] = (int32_t)(entry - b->entries);
    }
    for (int i = 0; i < b->size; i++)
        if (!b->entries[i].known) return BPE_FAIL(ctx, "id %d of %d has no entry", i, b->size);
    for (int i = 0; i < 256; i++)
        if (b->byte_id[i] < 0) return BPE_FAIL(ctx, "byte %d has no entry", i);
    return XD_OK;
}

/* ---- merges ---- */

static bpe_merge *bpe_slot(const bpe *b, int32_t left, int32_t right) {
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint32_t slot = (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (b->slots - 1);
    while (b->merges[slot].left >= 0 && (b->merges[slot].left != left || b->merges[slot].right != right))
        slot = (slot + 1) & (b->slots - 1);
    return &b->merges[slot];
}

static int32_t bpe_id_of(const xd_json *vocab, const char *text, size_t bytes) {
    int64_t id = -1;
    (void)xd_json_int64(xd_json_find_n(vocab, text, bytes), &id);
    return (int32_t)id;
}

/* The two halves of a merge: "a b", or ["a", "b"] in newer files. */
static bool bpe_halves(const xd_json *item, const char *text[2], size_t bytes[2]) {
    size_t whole = 0;
    const char *line = xd_json_string(item, &whole);
    if (!line) {
        text[0] = xd_json_string(xd_json_at(item, 0), &bytes[0]);
        text[1] = xd_json_string(xd_json_at(item, 1), &bytes[1]);
        return text[0] && text[1];
    }
    const char *blank = strchr(line, ' ');
    if (!blank) return false;
    text[0] = line;
    bytes[0] = (size_t)(blank - line);
    text[1] = blank + 1;
    bytes[1] = whole - bytes[0] - 1;
    return true;
}

static xd_result bpe_read_merges(xd_ctx *ctx, bpe *b, const xd_json *vocab, const xd_json *merges) {
    const char *text[2];
    size_t bytes[2] = { 0, 0 };
    char joined[512];
    int32_t rank = 0;
    for (const xd_json *item = xd_json_first(merges); item; item = xd_json_next(item), rank++) {
        if (!bpe_halves(item, text, bytes) || bytes[0] + bytes[1] > sizeof joined)
            return BPE_FAIL(ctx, "merge %d is not two spellings", rank);
        memcpy(joined, text[0], bytes[0]);
        memcpy(joined + bytes[0], text[1], bytes[1]);
        const int32_t left = bpe_id_of(vocab, text[0], bytes[0]), right = bpe_id_of(vocab, text[1], bytes[1]);
        const int32_t entry = bpe_id_of(vocab, joined, bytes[0] + bytes[1]);
        if (left < 0 || right < 0 || entry < 0) return BPE_FAIL(ctx, "merge %d names an unknown entry", rank);
        bpe_merge *slot = bpe_slot(b, left, right);
        if (slot->left >= 0) continue; /* said before, with a lower rank */
        slot->left = left;
        slot->right = right;
        slot->rank = rank;
        slot->entry = entry;
    }
    return XD_OK;
}

/* ---- loading ---- */

/* Bytes that all spellings together can take: never more than their characters do. */
static size_t bpe_spelling_room(const xd_json *vocab, const xd_json *added) {
    size_t total = 0, bytes = 0;
    for (const xd_json *item = xd_json_first(vocab); item; item = xd_json_next(item), total += bytes)
        (void)xd_json_key(item, &bytes);
    for (const xd_json *item = xd_json_first(added); item; item = xd_json_next(item), total += bytes)
        if (!xd_json_string(xd_json_find(item, "content"), &bytes)) bytes = 0;
    return total;
}

/* How many entries: the vocabulary, and what is added beyond it. */
static int bpe_count_entries(const xd_json *vocab, const xd_json *added) {
    size_t count = xd_json_count(vocab), bytes = 0;
    for (const xd_json *item = xd_json_first(added); item; item = xd_json_next(item)) {
        const char *text = xd_json_string(xd_json_find(item, "content"), &bytes);
        if (text && !xd_json_find_n(vocab, text, bytes)) count++;
    }
    return count < 1 << 24 ? (int)count : 0;
}

static xd_result bpe_fill(xd_ctx *ctx, bpe *b, const xd_json *root) {
    const xd_json *model = xd_json_find(root, "model"), *added = xd_json_find(root, "added_tokens");
    const xd_json *vocab = xd_json_find(model, "vocab"), *merges = xd_json_find(model, "merges");
    if (!bpe_is_string(xd_json_find(model, "type"), "BPE") || xd_json_kind_of(vocab) != XD_JSON_OBJECT ||
        xd_json_kind_of(merges) != XD_JSON_ARRAY)
        return BPE_FAIL(ctx, "the model is not BPE with a vocab and merges");
    XDI_TRY(bpe_check_split(ctx, root));
    b->size = bpe_count_entries(vocab, added);
    for (b->slots = 16; b->slots < 2 * xd_json_count(merges); b->slots *= 2) {
    }
    b->entries = (bpe_entry *)xd_allocate(ctx, ((size_t)b->size + 1) * sizeof *b->entries);
    b->spellings = (uint8_t *)xd_allocate(ctx, bpe_spelling_room(vocab, added) + 1);
    b->merges = (bpe_merge *)xd_allocate(ctx, b->slots * sizeof *b->merges);
    if (!b->entries || !b->spellings || !b->merges)
        return xd_fail(ctx, XD_ERROR_MEMORY, __FILE__, __LINE__, __func__, "no room for %d entries", b->size);
    for (uint32_t i = 0; i < b->slots; i++) b->merges[i].left = -1;
    for (int i = 0; i < 256; i++) b->byte_id[i] = -1;

    uint8_t *room = b->spellings;
    XDI_TRY(bpe_read_added(ctx, b, added, &room));
    XDI_TRY(bpe_read_vocabulary(ctx, b, vocab, &room));
    return bpe_read_merges(ctx, b, vocab, merges);
}

xd_result bpe_load(xd_ctx *ctx, const char *path, bpe **out) {
    xd_json *root = NULL;
    XDI_TRY(xd_json_load(ctx, NULL, path, &root));
    bpe *b = (bpe *)xd_allocate(ctx, sizeof *b);
    xd_result result =
        b ? bpe_fill(ctx, b, root)
          : xd_fail(ctx, XD_ERROR_MEMORY, __FILE__, __LINE__, __func__, "no room for a vocabulary");
    xd_json_destroy(ctx, root);
    if (result == XD_OK)
        *out = b;
    else
        bpe_destroy(ctx, b);
    return result;
}

void bpe_destroy(xd_ctx *ctx, bpe *vocabulary) {
    if (!vocabulary) return;
    xd_release(ctx, vocabulary->entries);
    xd_release(ctx, vocabulary->spellings);
    xd_release(ctx, vocabulary->merges);
    xd_release(ctx, vocabulary);
}

int bpe_size(const bpe *vocabulary) {
    return vocabulary->size;
}

int32_t bpe_special(const bpe *vocabulary, const char *token) {
    const size_t length = strlen(token);
    for (int i = 0; i < vocabulary->size; i++) {
        const bpe_entry *e = &vocabulary->entries[i];
        if (e->special && e->length == length && memcmp(e->bytes, token, length) == 0) return i;
    }
    return -1;
}

const uint8_t *bpe_spelling(const bpe *vocabulary, int32_t id, size_t *bytes) {
    if (id < 0 || id >= vocabulary->size) return NULL;
    *bytes = vocabulary->entries[id].length;
    return vocabulary->entries[id].bytes;
}

/* ---- encoding ---- */

/* Merges `count` byte entries in place, the lowest rank first, leftmost first among equals; returns how many
 * remain. */
static int64_t bpe_merge_piece(const bpe *b, int32_t *ids, int64_t count) {
    for (;;) {
        const bpe_merge *best = NULL;
        for (int64_t i = 0; i + 1 < count; i++) {
            const bpe_merge *m = bpe_slot(b, ids[i], ids[i + 1]);
            if (m->left >= 0 && (!best || m->rank < best->rank)) best = m;
        }
        if (!best) return count;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const bool joins = i + 1 < count && ids[i] == best->left && ids[i + 1] == best->right;
            ids[kept++] = joins ? best->entry : ids[i];
            if (joins) i++;
        }
        count = kept;
    }
}

/* Text without added tokens. */
static int64_t bpe_encode_plain(const bpe *b, const uint8_t *text, size_t bytes, int32_t *ids) {
    int64_t count = 0;
    while (bytes > 0) {
        const size_t piece = bpe_piece_length(text, bytes);
        for (size_t i = 0; i < piece; i++) ids[count + (int64_t)i] = b->byte_id[text[i]];
        count += bpe_merge_piece(b, ids + count, (int64_t)piece);
        text += piece;
        bytes -= piece;
    }
    return count;
}

/* Where the first added token of the text begins, and which; `bytes` when there is none. */
static size_t bpe_find_special(const bpe *b, const uint8_t *text, size_t bytes, int32_t *id) {
    size_t first = bytes;
    for (int i = 0; i < b->size; i++) {
        const bpe_entry *e = &b->entries[i];
        for (size_t at = 0; e->special && at < first && at + e->length <= bytes; at++) {
            if (memcmp(text + at, e->bytes, e->length) != 0) continue;
            first = at;
            *id = i;
        }
    }
    return first;
}

int64_t bpe_encode(const bpe *vocabulary, const char *text, size_t bytes, int32_t *ids) {
    const uint8_t *at = (const uint8_t *)text;
    int64_t count = 0;
    while (bytes > 0) {
        int32_t special = -1;
        const size_t plain = bpe_find_special(vocabulary, at, bytes, &special);
        count += bpe_encode_plain(vocabulary, at, plain, ids + count);
        const size_t skip = special < 0 ? 0 : vocabulary->entries[special].length;
        if (special >= 0) ids[count++] = special;
        at += plain + skip;
        bytes -= plain + skip;
    }
    return count;
}
