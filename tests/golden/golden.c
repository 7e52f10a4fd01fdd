/* golden DIR...: runs every vector file below the directories against the public API; golden.h tells the rest.
 * Ends with `N passed, N failed, N skipped`; skips are listed by reason and count. */
#define XDISTILL_IMPLEMENTATION
#include "golden.h"

#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { GOLDEN_REASONS = 64, GOLDEN_BLOCKS = 4096 };

struct golden_case {
    xd_ctx *ctx;
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
    { "ema", golden_kinds_ema },         { "optim", golden_kinds_optim },
    { "shard", golden_kinds_shard },     { "classic", golden_kinds_classic },
    { "xtoken-parts", golden_kinds_xtoken_parts },
};

/* Areas that belong to later parts of the library. */
static const char *const golden_areas_not_built[][2] = {
    { "dmd", "not built: DMD losses and schedules" },
    { "xtoken", "not built: cross-tokenizer losses" },
    { "align", "not built: token alignment and projection" },
};

xd_ctx *golden_ctx(const golden_case *c) {
    return c->ctx;
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
        golden_fail(c, "%s: %lld elements, expected %lld", name, (long long)count, (long long)expected->count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        if (golden_same(got[i], expected->values[i], bound)) continue;
        golden_fail(c, "%s[%lld]: got %.17g, expected %.17g, bound %.3g", name, (long long)i, got[i],
                    expected->values[i], bound);
        return; /* the first difference of a tensor tells enough */
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

static void golden_relative(golden_case *c, const char *name, const double *got, int64_t count, double least) {
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
