/* Projections as files. */

#include "align/internal.h"
#include "align/rows.h"
#include "base/crc.h"
#include "base/publish.h"

#include <stdio.h>
#include <string.h>

enum {
    XDI_PROJFILE_VERSION = 1,  /* of the form, and of what the builder builds */
    XDI_PROJFILE_CHECKED = 16, /* the checksum's bytes begin here */
    XDI_PROJFILE_HEADER = 80,
    XDI_PROJFILE_MOST_PIECES = 32,
    XDI_PROJFILE_MOST_K = 1024,
    XDI_PROJFILE_NO_EXACT = 1,
    XDI_PROJFILE_REVERSE = 2,
    XDI_PROJFILE_SPECIAL = 4,
    XDI_PROJFILE_FLAGS = 7
};

#define XDI_PROJFILE_MAGIC "XDPROJ\r\n"
#define XDI_PROJFILE_MOST_BYTES ((size_t)1 << 30)

/* ---- options ---- */

XD_API xd_projection_options xd_projection_defaults(void) {
    xd_projection_options o;
    memset(&o, 0, sizeof o);
    o.max_pieces = 4;
    o.k = 4;
    o.special_threshold = 0.3;
    return o;
}

XD_PRIVATE xd_projection_options xdi_projection_resolve(const xd_projection_options *options) {
    xd_projection_options o = *options;
    if (!o.special_pairs) o.special_threshold = 0.0;
    return o;
}

XD_PRIVATE xd_result xdi_projection_check_options(xd_ctx *ctx, const xd_projection_options *o) {
    XD_REQUIRE(ctx, o->max_pieces >= 1 && o->max_pieces <= XDI_PROJFILE_MOST_PIECES, XD_ERROR_ARGUMENT,
               "max_pieces %lld is outside [1, %d]", (long long)o->max_pieces, (int)XDI_PROJFILE_MOST_PIECES);
    XD_REQUIRE(ctx, o->k >= 1 && o->k <= XDI_PROJFILE_MOST_K, XD_ERROR_ARGUMENT, "k %lld is outside [1, %d]",
               (long long)o->k, (int)XDI_PROJFILE_MOST_K);
    XD_REQUIRE(ctx, o->special_threshold >= 0.0 && o->special_threshold <= 1.0, XD_ERROR_ARGUMENT,
               "special_threshold %g is outside [0, 1]", o->special_threshold);
    return XD_OK;
}

static uint32_t xdi_projfile_flags(const xd_projection_options *o) {
    return (o->disable_exact ? (uint32_t)XDI_PROJFILE_NO_EXACT : 0u) |
           (o->reverse ? (uint32_t)XDI_PROJFILE_REVERSE : 0u) |
           (o->special_pairs ? (uint32_t)XDI_PROJFILE_SPECIAL : 0u);
}

static uint64_t xdi_projfile_double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

XD_API void xd_projection_cache_name(const xd_projection_origin *origin,
                                     char name[XD_PROJECTION_NAME_BYTES]) {
    const xd_projection_options o = xdi_projection_resolve(&origin->options);
    char special[24] = "";
    if (o.special_pairs) /* the threshold's bits: no two of them are one name */
        snprintf(special, sizeof special, "-s%016llx",
                 (unsigned long long)xdi_projfile_double_bits(o.special_threshold));
    snprintf(name, XD_PROJECTION_NAME_BYTES, "projection%d-%016llx-%016llx-p%d-k%d%s%s%s.xdproj",
             (int)XDI_PROJFILE_VERSION, (unsigned long long)origin->student_hash,
             (unsigned long long)origin->teacher_hash, (int)o.max_pieces, (int)o.k,
             o.disable_exact ? "-n" : "", o.reverse ? "-r" : "", special);
}

/* ---- bytes ---- */

static void xdi_projfile_put(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i & 255);
}

static uint64_t xdi_projfile_get(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

static float xdi_projfile_get_float(const unsigned char *at) {
    const uint32_t bits = (uint32_t)xdi_projfile_get(at, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- writing ---- */

static void xdi_projfile_put_header(unsigned char *file, const xd_projection *p) {
    const xd_projection_options o = xdi_projection_resolve(&p->origin.options);
    memcpy(file, XDI_PROJFILE_MAGIC, 8);
    xdi_projfile_put(file + 8, XDI_PROJFILE_VERSION, 4);
    xdi_projfile_put(file + 16, (uint64_t)p->student_size, 8);
    xdi_projfile_put(file + 24, (uint64_t)p->teacher_size, 8);
    xdi_projfile_put(file + 32, (uint64_t)p->entries, 8);
    xdi_projfile_put(file + 40, p->origin.student_hash, 8);
    xdi_projfile_put(file + 48, p->origin.teacher_hash, 8);
    xdi_projfile_put(file + 56, (uint64_t)o.max_pieces, 4);
    xdi_projfile_put(file + 60, (uint64_t)o.k, 4);
    xdi_projfile_put(file + 64, xdi_projfile_flags(&o), 4);
    xdi_projfile_put(file + 72, xdi_projfile_double_bits(o.special_threshold), 8);
}

static void xdi_projfile_put_rows(unsigned char *at, const xd_projection *p) {
    for (int64_t s = 0; s <= p->student_size; s++, at += 8)
        xdi_projfile_put(at, (uint64_t)p->row_begin[s], 8);
    for (int64_t i = 0; i < p->entries; i++, at += 4) xdi_projfile_put(at, (uint64_t)p->teacher_id[i], 4);
    for (int64_t i = 0; i < p->entries; i++, at += 4) {
        uint32_t bits;
        memcpy(&bits, &p->weight[i], sizeof bits);
        xdi_projfile_put(at, bits, 4);
    }
}

XD_API xd_result xd_projection_save(xd_ctx *ctx, const char *path, const xd_projection *projection) {
    XDI_GIVEN(ctx, ctx, path, projection);
    XD_TRY(xdi_projection_given(ctx, projection));
    const xd_projection *p = projection;
    const xd_projection_options options = xdi_projection_resolve(&p->origin.options);
    XD_TRY(xdi_projection_check_options(ctx, &options));
    XD_REQUIRE(ctx,
               p->student_size >= 1 && p->student_size <= XD_PROJECTION_MAX_IDS && p->teacher_size >= 1 &&
                   p->teacher_size <= XD_PROJECTION_MAX_IDS,
               XD_ERROR_ARGUMENT, "%s: a projection between %lld and %lld ids, a file holds 1 to %d", path,
               (long long)p->student_size, (long long)p->teacher_size, (int)XD_PROJECTION_MAX_IDS);
    XD_REQUIRE(ctx, p->entries == p->row_begin[p->student_size], XD_ERROR_ARGUMENT,
               "%s: a projection of %lld entries whose rows end at %lld", path, (long long)p->entries,
               (long long)p->row_begin[p->student_size]);
    for (int64_t i = 0; i < p->entries; i++)
        XD_REQUIRE(ctx, p->weight[i] >= 0.0f && p->weight[i] <= 3e38f, XD_ERROR_ARGUMENT,
                   "%s: entry %lld, for teacher id %d, has weight %g", path, (long long)i,
                   (int)p->teacher_id[i], (double)p->weight[i]);
    const size_t bytes = XDI_PROJFILE_HEADER + 8 * ((size_t)p->student_size + 1) + 8 * (size_t)p->entries;
    XD_REQUIRE(ctx, bytes <= XDI_PROJFILE_MOST_BYTES, XD_ERROR_ARGUMENT, "%s: %zu bytes, allowed are %zu",
               path, bytes, XDI_PROJFILE_MOST_BYTES);
    unsigned char *file = (unsigned char *)xd_allocate(ctx, bytes);
    XD_REQUIRE(ctx, file, XD_ERROR_MEMORY, "%s: no room for %zu bytes", path, bytes);
    xdi_projfile_put_header(file, p);
    xdi_projfile_put_rows(file + XDI_PROJFILE_HEADER, p);
    xdi_projfile_put(file + 12, xd_crc32c(0, file + XDI_PROJFILE_CHECKED, bytes - XDI_PROJFILE_CHECKED), 4);
    const xd_result result = xd_file_save(ctx, path, file, bytes);
    xd_release(ctx, file);
    return result;
}

/* ---- reading ---- */

/* A file whose sizes are known to fit. */
typedef struct xdi_projfile {
    const char *path; /* for messages */
    const unsigned char *row_begin, *teacher_id, *weight;
    int64_t student_size, teacher_size, entries;
    xd_projection_origin origin;
} xdi_projfile;

static int64_t xdi_projfile_begin(const xdi_projfile *f, int64_t s) {
    return (int64_t)xdi_projfile_get(f->row_begin + 8 * s, 8);
}

/* Format, version, checksum, and sizes that add up to the file's length. */
static xd_result xdi_projfile_open(xd_ctx *ctx, const unsigned char *file, size_t bytes, xdi_projfile *f) {
    XD_REQUIRE(ctx, bytes >= XDI_PROJFILE_HEADER, XD_ERROR_FORMAT, "%s: %zu bytes, its header has %d",
               f->path, bytes, (int)XDI_PROJFILE_HEADER);
    XD_REQUIRE(ctx, memcmp(file, XDI_PROJFILE_MAGIC, 8) == 0, XD_ERROR_FORMAT,
               "%s: no projection: it begins with other bytes", f->path);
    const unsigned version = (unsigned)xdi_projfile_get(file + 8, 4);
    XD_REQUIRE(ctx, version == XDI_PROJFILE_VERSION, XD_ERROR_UNSUPPORTED, "%s: version %u, known is %d",
               f->path, version, (int)XDI_PROJFILE_VERSION);
    const uint64_t student = xdi_projfile_get(file + 16, 8), teacher = xdi_projfile_get(file + 24, 8);
    const uint64_t entries = xdi_projfile_get(file + 32, 8);
    XD_REQUIRE(ctx,
               student >= 1 && student <= XD_PROJECTION_MAX_IDS && teacher >= 1 &&
                   teacher <= XD_PROJECTION_MAX_IDS,
               XD_ERROR_FORMAT, "%s: between %llu and %llu ids, allowed are 1 to %d", f->path,
               (unsigned long long)student, (unsigned long long)teacher, (int)XD_PROJECTION_MAX_IDS);
    const uint64_t rest = (uint64_t)bytes - XDI_PROJFILE_HEADER, begins = 8 * (student + 1);
    XD_REQUIRE(ctx, rest >= begins && (rest - begins) % 8 == 0 && entries == (rest - begins) / 8,
               XD_ERROR_FORMAT, "%s: %zu bytes for %llu student ids and %llu entries", f->path, bytes,
               (unsigned long long)student, (unsigned long long)entries);
    const uint32_t stored = (uint32_t)xdi_projfile_get(file + 12, 4);
    const uint32_t crc = xd_crc32c(0, file + XDI_PROJFILE_CHECKED, bytes - XDI_PROJFILE_CHECKED);
    XD_REQUIRE(ctx, crc == stored, XD_ERROR_CORRUPT, "%s: checksum %08x, stored is %08x", f->path,
               (unsigned)crc, (unsigned)stored);
    f->student_size = (int64_t)student;
    f->teacher_size = (int64_t)teacher;
    f->entries = (int64_t)entries;
    f->row_begin = file + XDI_PROJFILE_HEADER;
    f->teacher_id = f->row_begin + begins;
    f->weight = f->teacher_id + 4 * entries;
    return XD_OK;
}

static xd_result xdi_projfile_read_origin(xd_ctx *ctx, const unsigned char *file, xdi_projfile *f) {
    xd_projection_origin *out = &f->origin;
    const uint32_t flags = (uint32_t)xdi_projfile_get(file + 64, 4),
                   zero = (uint32_t)xdi_projfile_get(file + 68, 4);
    const uint64_t threshold = xdi_projfile_get(file + 72, 8);
    XD_REQUIRE(ctx, flags <= XDI_PROJFILE_FLAGS && zero == 0, XD_ERROR_FORMAT, "%s: unknown flags %08x %08x",
               f->path, (unsigned)flags, (unsigned)zero);
    memset(out, 0, sizeof *out);
    out->student_hash = xdi_projfile_get(file + 40, 8);
    out->teacher_hash = xdi_projfile_get(file + 48, 8);
    out->options.max_pieces = (int64_t)xdi_projfile_get(file + 56, 4);
    out->options.k = (int64_t)xdi_projfile_get(file + 60, 4);
    out->options.disable_exact = (flags & XDI_PROJFILE_NO_EXACT) != 0;
    out->options.reverse = (flags & XDI_PROJFILE_REVERSE) != 0;
    out->options.special_pairs = (flags & XDI_PROJFILE_SPECIAL) != 0;
    memcpy(&out->options.special_threshold, &threshold, sizeof threshold);
    if (xdi_projection_check_options(ctx, &out->options) != XD_OK)
        return XD_FAIL(ctx, XD_ERROR_FORMAT, "%s: options of %lld pieces, k %lld, threshold %g", f->path,
                       (long long)out->options.max_pieces, (long long)out->options.k,
                       out->options.special_threshold);
    return XD_OK;
}

static xd_result xdi_projfile_check_origin(xd_ctx *ctx, const xdi_projfile *f,
                                           const xd_projection_origin *expected) {
    const xd_projection_origin *is = &f->origin;
    XD_REQUIRE(ctx,
               !expected ||
                   (is->student_hash == expected->student_hash && is->teacher_hash == expected->teacher_hash),
               XD_ERROR_ARGUMENT,
               "%s: made for the tokenizers %016llx and %016llx, wanted are %016llx and %016llx", f->path,
               (unsigned long long)is->student_hash, (unsigned long long)is->teacher_hash,
               (unsigned long long)expected->student_hash, (unsigned long long)expected->teacher_hash);
    return XD_OK;
}

static xd_result xdi_projfile_check_row(xd_ctx *ctx, const xdi_projfile *f, int64_t s) {
    const int64_t begin = xdi_projfile_begin(f, s), end = xdi_projfile_begin(f, s + 1);
    int64_t before = -1;
    XD_REQUIRE(ctx, begin >= 0 && begin <= end && end <= f->entries, XD_ERROR_FORMAT,
               "%s: row %lld has entries %lld to %lld of %lld", f->path, (long long)s, (long long)begin,
               (long long)end, (long long)f->entries);
    for (int64_t i = begin; i < end; i++) {
        const int64_t id = (int64_t)xdi_projfile_get(f->teacher_id + 4 * i, 4);
        const float weight = xdi_projfile_get_float(f->weight + 4 * i);
        XD_REQUIRE(ctx, id > before && id < f->teacher_size, XD_ERROR_FORMAT,
                   "%s: row %lld has teacher id %lld of %lld after %lld", f->path, (long long)s,
                   (long long)id, (long long)f->teacher_size, (long long)before);
        XD_REQUIRE(ctx, weight >= 0.0f && weight <= 3e38f, XD_ERROR_FORMAT,
                   "%s: row %lld has weight %g for teacher id %lld", f->path, (long long)s, (double)weight,
                   (long long)id);
        before = id;
    }
    return XD_OK;
}

static xd_result xdi_projfile_check_rows(xd_ctx *ctx, const xdi_projfile *f) {
    const int64_t first = xdi_projfile_begin(f, 0), last = xdi_projfile_begin(f, f->student_size);
    XD_REQUIRE(ctx, first == 0 && last == f->entries, XD_ERROR_FORMAT,
               "%s: rows are entries %lld to %lld of %lld", f->path, (long long)first, (long long)last,
               (long long)f->entries);
    for (int64_t s = 0; s < f->student_size; s++) XD_TRY(xdi_projfile_check_row(ctx, f, s));
    return XD_OK;
}

static xd_result xdi_projfile_build(xd_ctx *ctx, const xdi_projfile *f, xd_projection *out) {
    const size_t n = (size_t)f->entries;
    xdi_vote *cells = (xdi_vote *)xd_allocate(ctx, n * sizeof *cells);
    XD_REQUIRE(ctx, cells, XD_ERROR_MEMORY, "no room for %zu entries", n);
    for (int64_t s = 0; s < f->student_size; s++)
        for (int64_t i = xdi_projfile_begin(f, s); i < xdi_projfile_begin(f, s + 1); i++) {
            cells[i].student_id = (int32_t)s;
            cells[i].teacher_id = (int32_t)xdi_projfile_get(f->teacher_id + 4 * i, 4);
            cells[i].weight = (double)xdi_projfile_get_float(f->weight + 4 * i);
        }
    const xdi_projection_cells list = { cells, f->entries, f->student_size, f->teacher_size };
    const xd_result result = xdi_projection_from_cells(ctx, &list, out);
    if (result == XD_OK) out->origin = f->origin;
    xd_release(ctx, cells);
    return result;
}

static xd_result xdi_projfile_read(xd_ctx *ctx, const char *path, const void *data, size_t bytes,
                                   const xd_projection_origin *expected, xd_projection *out) {
    const unsigned char *file = (const unsigned char *)data;
    xdi_projfile f;
    f.path = path;
    XD_TRY(xdi_refuse_pointer(ctx, path, data, bytes));
    XD_TRY(xdi_projfile_open(ctx, file, bytes, &f));
    XD_TRY(xdi_projfile_read_origin(ctx, file, &f));
    XD_TRY(xdi_projfile_check_origin(ctx, &f, expected));
    XD_TRY(xdi_projfile_check_rows(ctx, &f));
    return xdi_projfile_build(ctx, &f, out);
}

XD_API xd_result xd_projection_load(xd_ctx *ctx, const xd_projection_load_desc *desc, xd_projection *out) {
    XDI_GIVEN(ctx, ctx, desc, out);
    char *data = NULL;
    size_t bytes = 0;
    if (!desc->path) {
        XDI_GIVEN(ctx, desc->data);
        return xdi_projfile_read(ctx, "projection", desc->data, desc->data_bytes, desc->expected, out);
    }
    XD_TRY(xd_file_load(ctx, desc->path, XDI_PROJFILE_MOST_BYTES, &data, &bytes));
    const xd_result result = xdi_projfile_read(ctx, desc->path, data, bytes, desc->expected, out);
    xd_release(ctx, data);
    return result;
}

/* ---- rows ---- */

/* Inserts an entry after those of equal or larger weight, into a list of at most k; unused entries have id -1. */
static void xdi_projfile_insert(int32_t *ids, float *weights, int64_t k, int32_t id, float weight) {
    int64_t at = 0;
    while (at < k && ids[at] >= 0 && weights[at] >= weight) at++;
    for (; at < k; at++) {
        const int32_t next_id = ids[at];
        const float next_weight = weights[at];
        ids[at] = id;
        weights[at] = weight;
        if (next_id < 0) return;
        id = next_id;
        weight = next_weight;
    }
}

XD_API xd_result xd_projection_to_rows(xd_ctx *ctx, const xd_projection *projection, int64_t k,
                                       xd_projection_rows *out) {
    XDI_GIVEN(ctx, ctx, projection, out);
    XD_TRY(xdi_projection_given(ctx, projection));
    const xd_projection *p = projection;
    int64_t longest = 2;
    for (int64_t s = 0; s < p->student_size; s++)
        if (p->row_begin[s + 1] - p->row_begin[s] > longest) longest = p->row_begin[s + 1] - p->row_begin[s];
    if (k == 0) k = longest;
    XD_REQUIRE(ctx, k >= 1 && k <= INT32_MAX, XD_ERROR_ARGUMENT, "%lld entries a row", (long long)k);
    const size_t count = (size_t)p->student_size * (size_t)k;
    int32_t *ids = (int32_t *)xd_allocate(ctx, count * (sizeof *ids + sizeof(float)));
    XD_REQUIRE(ctx, ids, XD_ERROR_MEMORY, "no room for %lld rows of %lld entries", (long long)p->student_size,
               (long long)k);
    float *weights = (float *)(void *)(ids + count);
    for (size_t i = 0; i < count; i++) ids[i] = -1;
    for (int64_t s = 0; s < p->student_size; s++)
        for (int64_t i = p->row_begin[s]; i < p->row_begin[s + 1]; i++)
            xdi_projfile_insert(ids + s * k, weights + s * k, k, p->teacher_id[i], p->weight[i]);
    out->ids = ids;
    out->weights = weights;
    out->rows = p->student_size;
    out->k = k;
    return XD_OK;
}
