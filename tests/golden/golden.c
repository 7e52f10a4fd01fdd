/* golden [--cpu=LEVEL] [--invariant] DIR...: runs every vector file below the directories against the public API; see golden.h.
 * Ends with `N passed, N failed, N skipped`; skips are listed by reason and count. On a machine without the level the exit
 * status is 77. Built with GOLDEN_CUDA it runs on a GPU, or on its emulation, what golden_host_only does not list. */
#define _DEFAULT_SOURCE /* scandir */
#define XDISTILL_IMPLEMENTATION
#include "golden.h"

#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "xd_test_cpu.h"
#if defined(XD_EMU)
#    include "emu_api.h"
#endif

enum { GOLDEN_REASONS = 64, GOLDEN_BLOCKS = 4096 };

struct golden_case {
    xd_ctx *ctx;
    golden_loans loans;
    xd_safetensors *file;
    const char *path;
    double f32_error; /* check.f32_err: the peer's own float32 error */
    int failures;
    char skip[128];
    void *blocks[GOLDEN_BLOCKS]; /* memory to free after the case */
    int block_count;
};

typedef struct golden_reason {
    char text[128];
    int count;
} golden_reason;

typedef struct golden_totals {
    int passed, failed, skipped;
    golden_reason reasons[GOLDEN_REASONS];
    int reason_count;
} golden_totals;

static const struct {
    const char *area;
    const golden_kind *kinds;
} golden_areas[] = {
    { "ema", golden_kinds_ema },
    { "optim", golden_kinds_optim },
    { "shard", golden_kinds_shard },
    { "classic", golden_kinds_head },
    { "classic", golden_kinds_uld },
    { "classic", golden_kinds_classic },
    { "xtoken-parts", golden_kinds_sequence },
    { "xtoken-parts", golden_kinds_projection_parts },
    { "xtoken-parts", golden_kinds_chunks },
    { "xtoken-parts", golden_kinds_xtoken_parts },
    { "xtoken", golden_kinds_xtoken },
    { "align", golden_kinds_align },
    { "align", golden_kinds_projection },
};

/* Areas that belong to later parts of the library. */
static const char *const golden_areas_not_built[][2] = {
    { "dmd", "not built: DMD losses and schedules" },
};

/* What has no form on a GPU. Every other case has to run there by kernels: the answer "not supported" fails. A kind of NULL is
 * the whole area. */
static const struct {
    const char *area, *kind, *reason;
} golden_host_only[] = {
    { "align", NULL, "of the host: text, alignments, building of projections" },
    { "xtoken-parts", "exact map", "of the host: text, alignments, building of projections" },
    { "xtoken-parts", "sparse projection", "of the host: text, alignments, building of projections" },
    { "shard", NULL, "of the host: tables of positions and shards" },
    { "xtoken-parts", "sequence layouts", "of the host: tables of positions and shards" },
    { "xtoken-parts", "valid chunks", "of the host: tables of positions and shards" },
    { "ema", "ema decay table", "of the host: one number a step" },
};

/* What has no INVARIANT form on a device. */
static const struct {
    const char *area, *kind, *reason;
} golden_not_invariant[] = {
    { "classic", "fused linear JSD", "no INVARIANT form: the gradient of hidden states on a GPU" },
};

xd_ctx *golden_ctx(const golden_case *c) {
    return c->ctx;
}

golden_loans *golden_case_loans(golden_case *c) {
    return &c->loans;
}

/* ---- verdicts ---- */

void golden_fail(golden_case *c, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("FAILED %s: ", c->path);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    c->failures++;
}

void golden_skip(golden_case *c, const char *reason) {
    snprintf(c->skip, sizeof c->skip, "%s", reason);
}

bool golden_ok(golden_case *c, xd_result result) {
    if (result == XD_OK) return true;
    golden_fail(c, "%s: %s", xd_result_name(result), xd_last_error(c->ctx)->message);
    return false;
}

void *golden_memory(golden_case *c, size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory || c->block_count == GOLDEN_BLOCKS) {
        fprintf(stderr, "golden: no memory for %zu bytes in %s\n", bytes, c->path);
        exit(2);
    }
    c->blocks[c->block_count++] = memory;
    return memory;
}

/* ---- metadata ---- */

const char *golden_text(const golden_case *c, const char *key) {
    return xd_safetensors_metadata(c->file, key);
}

bool golden_is(const golden_case *c, const char *key, const char *value) {
    const char *text = golden_text(c, key);
    return text && strcmp(text, value) == 0;
}

bool golden_origin_has(const golden_case *c, const char *part) {
    const char *origin = golden_text(c, "origin");
    return origin && strstr(origin, part) != NULL;
}

double golden_number(const golden_case *c, const char *key, double absent) {
    const char *text = golden_text(c, key);
    char *end;
    if (!text || strcmp(text, "null") == 0) return absent;
    const double value = strtod(text, &end);
    return end == text ? absent : value;
}

bool golden_flag(const golden_case *c, const char *key, bool absent) {
    const char *text = golden_text(c, key);
    if (!text || strcmp(text, "null") == 0) return absent;
    return strcmp(text, "true") == 0;
}

int golden_numbers(const golden_case *c, const char *key, double *values, int room) {
    const char *text = golden_text(c, key);
    if (!text || text[0] != '[') return -1;
    int count = 0;
    for (const char *at = text + 1; *at && *at != ']' && count < room;) {
        char *end;
        values[count] = strtod(at, &end);
        if (end == at) break;
        count++;
        at = end + strspn(end, ", ");
    }
    return count;
}

/* ---- tensors ---- */

bool golden_has(const golden_case *c, const char *name) {
    return xd_safetensors_find(c->file, name) >= 0;
}

int golden_tensor_count(const golden_case *c) {
    return (int)xd_safetensors_count(c->file);
}

const char *golden_tensor_name(const golden_case *c, int index) {
    return xd_safetensors_at(c->file, index)->name;
}

golden_array golden_tensor(golden_case *c, const char *name) {
    golden_array a;
    memset(&a, 0, sizeof a);
    const int64_t index = xd_safetensors_find(c->file, name);
    if (index < 0) {
        golden_fail(c, "the file has no tensor %s", name);
        return a;
    }
    const xd_safetensors_info *info = xd_safetensors_at(c->file, index);
    const size_t bytes = (size_t)(info->end - info->begin);
    if (info->ndim > 8) {
        golden_fail(c, "%s has %d dimensions, at most 8 are expected", name, info->ndim);
        return a;
    }
    void *bits = golden_memory(c, bytes); /* aligned, which the mapping need not be */
    memcpy(bits, xd_safetensors_data(c->file, index), bytes);
    a.bits = bits;
    a.dtype = info->dtype;
    a.ndim = info->ndim;
    a.count = 1;
    for (int d = 0; d < info->ndim; d++) a.count *= a.shape[d] = info->shape[d];
    a.values = golden_widen(c, bits, info->dtype, a.count);
    return a;
}

double *golden_widen(golden_case *c, const void *data, xd_dtype dtype, int64_t count) {
    double *values = (double *)golden_memory(c, (size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) values[i] = xd_load_f64(data, dtype, i);
    return values;
}

float *golden_f32(golden_case *c, const golden_array *a) {
    float *values = (float *)golden_memory(c, (size_t)a->count * sizeof *values);
    for (int64_t i = 0; i < a->count; i++) values[i] = (float)a->values[i];
    return values;
}

int64_t *golden_i64(golden_case *c, const golden_array *a) {
    int64_t *values = (int64_t *)golden_memory(c, (size_t)a->count * sizeof *values);
    for (int64_t i = 0; i < a->count; i++) values[i] = (int64_t)a->values[i];
    return values;
}

uint8_t *golden_u8(golden_case *c, const golden_array *a) {
    uint8_t *values = (uint8_t *)golden_memory(c, (size_t)a->count);
    for (int64_t i = 0; i < a->count; i++) values[i] = (uint8_t)(a->values[i] != 0.0);
    return values;
}

/* ---- comparisons ---- */

static double golden_maximum(const golden_array *a) {
    double maximum = 0.0;
    for (int64_t i = 0; i < a->count; i++)
        if (isfinite(a->values[i]) && fabs(a->values[i]) > maximum) maximum = fabs(a->values[i]);
    return maximum;
}

static bool golden_same(double got, double expected, double bound) {
    if (isnan(expected)) return isnan(got);
    if (isinf(expected)) return got == expected;
    return fabs(got - expected) <= bound; /* false for a NaN that was not expected */
}

static void golden_compare(golden_case *c, const char *name, const golden_array *expected, const double *got,
                           int64_t count, double bound) {
    if (count != expected->count) {
        golden_fail(c, "%s: %lld elements, expected %lld", name, (long long)count,
                    (long long)expected->count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        if (golden_same(got[i], expected->values[i], bound)) continue;
        golden_fail(c, "%s[%lld]: got %.17g, expected %.17g, bound %.3g", name, (long long)i, got[i],
                    expected->values[i], bound);
        return; /* the first difference of a tensor is enough */
    }
}

void golden_within(golden_case *c, const char *name, const double *got, int64_t count, double bound) {
    const golden_array expected = golden_tensor(c, name);
    golden_compare(c, name, &expected, got, count, bound);
}

void golden_exact(golden_case *c, const char *name, const double *got, int64_t count) {
    golden_within(c, name, got, count, 0.0);
}

void golden_double(golden_case *c, const char *name, const double *got, int64_t count) {
    const golden_array expected = golden_tensor(c, name);
    golden_compare(c, name, &expected, got, count, 1e-9 * golden_maximum(&expected) + 1e-9);
}

static void golden_relative(golden_case *c, const char *name, const double *got, int64_t count,
                            double least) {
    const golden_array expected = golden_tensor(c, name);
    const double relative = fmax(least, 8.0 * c->f32_error);
    golden_compare(c, name, &expected, got, count, relative * golden_maximum(&expected) + 1e-6);
}

void golden_close(golden_case *c, const char *name, const double *got, int64_t count) {
    golden_relative(c, name, got, count, 1e-5);
}

void golden_gradient(golden_case *c, const char *name, const double *got, int64_t count) {
    golden_relative(c, name, got, count, 2e-5);
}

/* Distance in representable values: the ordering of the bits with the sign folded in. */
static int64_t golden_order(const void *data, xd_dtype dtype, int64_t index) {
    if (dtype == XD_DTYPE_BF16) {
        const uint16_t bits = ((const uint16_t *)data)[index];
        return bits & 0x8000u ? -(int64_t)(bits & 0x7fffu) : (int64_t)bits;
    }
    uint32_t bits;
    memcpy(&bits, (const float *)data + index, sizeof bits);
    return bits & 0x80000000u ? -(int64_t)(bits & 0x7fffffffu) : (int64_t)bits;
}

void golden_ulps(golden_case *c, const char *name, const void *got, int64_t count, int ulps) {
    const golden_array expected = golden_tensor(c, name);
    if (expected.dtype != XD_DTYPE_F32 && expected.dtype != XD_DTYPE_BF16) {
        golden_fail(c, "%s: %s data cannot be compared by ulps", name, xd_dtype_name(expected.dtype));
        return;
    }
    if (count != expected.count) {
        golden_fail(c, "%s: %lld elements, expected %lld", name, (long long)count, (long long)expected.count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t a = golden_order(got, expected.dtype, i);
        const int64_t b = golden_order(expected.bits, expected.dtype, i);
        if (a - b <= ulps && b - a <= ulps) continue;
        golden_fail(c, "%s[%lld]: got %.9g, expected %.9g, bound %d ulp", name, (long long)i,
                    xd_load_f64(got, expected.dtype, i), expected.values[i], ulps);
        return;
    }
}

/* ---- running ---- */

/* Kernels launched so far on an emulated GPU; where they are not counted, one more in each call. */
static long golden_launches(void) {
#if defined(XD_EMU)
    return emu_launch_count();
#else
    static long calls;
    return ++calls;
#endif
}

static const char *golden_reason_for_host(const char *area, const char *kind) {
    for (size_t i = 0; i < sizeof golden_host_only / sizeof *golden_host_only; i++)
        if (strcmp(golden_host_only[i].area, area) == 0 &&
            (!golden_host_only[i].kind || strcmp(golden_host_only[i].kind, kind) == 0))
            return golden_host_only[i].reason;
    return NULL;
}

static const char *golden_reason_for_mode(const char *area, const char *kind) {
    for (size_t i = 0; i < sizeof golden_not_invariant / sizeof *golden_not_invariant; i++)
        if (strcmp(golden_not_invariant[i].area, area) == 0 &&
            strcmp(golden_not_invariant[i].kind, kind) == 0)
            return golden_not_invariant[i].reason;
    return NULL;
}

static void golden_run_kind(golden_case *c, const char *area, const golden_kind *kind) {
    const bool on_device = golden_on_device(c->ctx);
    const char *reason = on_device ? golden_reason_for_host(area, kind->name) : NULL;
    if (on_device && !reason && xd_ctx_settings(c->ctx)->reduction == XD_REDUCTION_INVARIANT)
        reason = golden_reason_for_mode(area, kind->name);
    const long before = golden_launches();
    if (reason) {
        golden_skip(c, reason);
        return;
    }
    kind->run(c);
    if (golden_launches() == before && !c->skip[0]) golden_fail(c, "ran without a kernel of the device");
}

static void golden_run_kinds(golden_case *c, const char *area) {
    bool known = false;
    for (size_t i = 0; i < sizeof golden_areas / sizeof *golden_areas; i++) {
        if (strcmp(golden_areas[i].area, area) != 0) continue;
        known = true;
        for (const golden_kind *kind = golden_areas[i].kinds; kind->name; kind++) {
            if (!kind->claims(c)) continue;
            golden_run_kind(c, area, kind);
            return;
        }
    }
    if (known) {
        golden_fail(c, "no kind of area %s knows origin %s", area, golden_text(c, "origin"));
        return;
    }
    for (size_t i = 0; i < sizeof golden_areas_not_built / sizeof *golden_areas_not_built; i++)
        if (strcmp(golden_areas_not_built[i][0], area) == 0) {
            golden_skip(c, golden_areas_not_built[i][1]);
            return;
        }
    golden_fail(c, "unknown area %s", area);
}

static void golden_count_skip(golden_totals *totals, const char *text) {
    totals->skipped++;
    int i = 0;
    while (i < totals->reason_count && strcmp(totals->reasons[i].text, text) != 0) i++;
    if (i == GOLDEN_REASONS) i = GOLDEN_REASONS - 1; /* counted under the last reason rather than lost */
    if (i == totals->reason_count) {
        snprintf(totals->reasons[i].text, sizeof totals->reasons[i].text, "%s", text);
        totals->reason_count++;
    }
    totals->reasons[i].count++;
}

static void golden_run_file(xd_ctx *ctx, const char *path, golden_totals *totals) {
    golden_case c;
    memset(&c, 0, sizeof c);
    c.ctx = ctx;
    c.path = path;
    golden_loans_open(&c.loans, ctx);
    if (golden_ok(&c, xd_safetensors_open(ctx, path, NULL, &c.file))) {
        const char *area = golden_text(&c, "area");
        c.f32_error = golden_number(&c, "check.f32_err", 0.0);
        if (!golden_is(&c, "format", "xdistill-golden-1") || !area)
            golden_fail(&c, "not a golden vector: no format xdistill-golden-1 or no area in its metadata");
        else
            golden_run_kinds(&c, area);
    }
    if (c.failures)
        totals->failed++;
    else if (c.skip[0])
        golden_count_skip(totals, c.skip);
    else
        totals->passed++;
    golden_back(&c.loans, XD_ERROR_STATE); /* what a failed case still has lent */
    for (int i = 0; i < c.block_count; i++) free(c.blocks[i]);
    xd_safetensors_close(c.file);
}

static int golden_by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int golden_visible(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

/* A file, or a directory with everything below it in the order of names. */
static void golden_walk(xd_ctx *ctx, const char *path, golden_totals *totals) {
    struct stat status;
    const size_t length = strlen(path);
    if (stat(path, &status) != 0) {
        printf("FAILED %s: cannot be read\n", path);
        totals->failed++;
        return;
    }
    if (!S_ISDIR(status.st_mode)) {
        if (length > 12 && strcmp(path + length - 12, ".safetensors") == 0)
            golden_run_file(ctx, path, totals);
        return;
    }
    struct dirent **entries;
    const int count = scandir(path, &entries, golden_visible, golden_by_name);
    for (int i = 0; i < count; i++) {
        char below[4096];
        snprintf(below, sizeof below, "%s/%s", path, entries[i]->d_name);
        golden_walk(ctx, below, totals);
        free(entries[i]);
    }
    if (count >= 0) free(entries);
}

static bool golden_option(const char *argument, xd_ctx_desc *desc) {
    if (strncmp(argument, "--cpu=", 6) == 0) return xd_cpu_level_from_name(argument + 6, &desc->cpu);
    desc->reduction = XD_REDUCTION_INVARIANT;
    return strcmp(argument, "--invariant") == 0;
}

int main(int argc, char **argv) {
    static golden_totals totals;
    xd_ctx_desc desc;
    xd_ctx *ctx = NULL;
    golden_device *device = NULL;
    int first = 1;
    memset(&desc, 0, sizeof desc);
    desc.cpu = xd_test_cpu();
    while (first < argc && argv[first][0] == '-' && golden_option(argv[first], &desc)) first++;
    if (first == argc || argv[first][0] == '-') {
        fprintf(stderr,
                "usage: golden [--cpu=plain|portable|avx2|avx512|avx512_bf16] [--invariant] DIR...\n");
        return 2;
    }
    if (xd_ctx_create(&desc, &ctx) == XD_ERROR_UNSUPPORTED) {
        printf("this machine has no %s\n", xd_cpu_level_name(desc.cpu));
        return 77;
    }
    if (!ctx) return 2;
    if (golden_device_open(ctx, &device) != XD_OK) {
        fprintf(stderr, "golden: %s\n", xd_last_error(ctx)->message);
        return 2;
    }
    for (int i = first; i < argc; i++) golden_walk(ctx, argv[i], &totals);
    golden_device_close(device);
    xd_ctx_destroy(ctx);
    for (int i = 0; i < totals.reason_count; i++)
        printf("skipped %d: %s\n", totals.reasons[i].count, totals.reasons[i].text);
    printf("%d passed, %d failed, %d skipped\n", totals.passed, totals.failed, totals.skipped);
    return totals.failed ? 1 : 0;
}
