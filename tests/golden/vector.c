/* A vector: its metadata and tensors, the book of what a kind has read of them, and the comparisons. */
#include "runner.h"
#include "weights_calls.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

xd_ctx *golden_ctx(const golden_case *c) {
    return c->ctx;
}

golden_loans *golden_case_loans(golden_case *c) {
    return &c->loans;
}

/* ---- verdicts ---- */

void golden_fail(golden_case *c, const char *format, ...) {
    va_list arguments;
    if (c->skip[0]) return; /* what is skipped may go on, and is not judged */
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

void golden_compared(golden_case *c) {
    c->compared++;
}

bool golden_ok(golden_case *c, xd_result result) {
    if (result == XD_OK) return true;
    golden_fail(c, "%s: %s", xd_result_name(result), xd_last_error(c->ctx)->message);
    return false;
}

void *golden_memory(golden_case *c, size_t bytes) {
    if (c->block_count == c->block_room) {
        const int room = 2 * c->block_room + 64;
        void **blocks = (void **)realloc(c->blocks, (size_t)room * sizeof *blocks);
        if (blocks) c->blocks = blocks, c->block_room = room;
    }
    void *memory = c->block_count < c->block_room ? calloc(1, bytes ? bytes : 1) : NULL;
    if (!memory) {
        fprintf(stderr, "golden: no memory for %zu bytes in %s\n", bytes, c->path);
        exit(2);
    }
    c->blocks[c->block_count++] = memory;
    return memory;
}

/* ---- the book of what was read ---- */

bool golden_case_open(golden_case *c, xd_ctx *ctx, const char *path) {
    int64_t keys = 0;
    const char *key, *value;
    memset(c, 0, sizeof *c);
    c->ctx = ctx;
    c->path = path;
    golden_loans_open(&c->loans, ctx);
    if (!golden_ok(c, weights_open_file(ctx, path, NULL, &c->file))) return false;
    while (weights_metadata_at(c->file, keys, &key, &value)) keys++;
    c->key_read = (bool *)golden_memory(c, (size_t)keys * sizeof(bool));
    c->tensor_read = (bool *)golden_memory(c, (size_t)golden_tensor_count(c) * sizeof(bool));
    c->f32_error = golden_number(c, "check.f32_err", 0.0);
    return true;
}

void golden_case_close(golden_case *c) {
    golden_back(&c->loans, XD_ERROR_STATE); /* what a failed case still has lent */
    for (int i = 0; i < c->block_count; i++) free(c->blocks[i]);
    free(c->blocks);
    xd_weights_close(c->file);
}

void golden_read_nothing(golden_case *c) {
    const char *key, *value;
    for (int64_t i = 0; weights_metadata_at(c->file, i, &key, &value); i++) c->key_read[i] = false;
    for (int i = 0; i < golden_tensor_count(c); i++) c->tensor_read[i] = false;
}

static bool golden_begins(const char *name, const char *prefix) {
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

static bool golden_matches(const char *name, const char *pattern) {
    const size_t length = strlen(pattern);
    if (length > 0 && pattern[length - 1] == '*') return strncmp(name, pattern, length - 1) == 0;
    return strcmp(name, pattern) == 0;
}

void golden_inert(golden_case *c, const char *pattern) {
    const char *key, *value;
    for (int64_t i = 0; weights_metadata_at(c->file, i, &key, &value); i++)
        if (golden_matches(key, pattern)) c->key_read[i] = true;
    for (int i = 0; i < golden_tensor_count(c); i++)
        if (golden_matches(golden_tensor_name(c, i), pattern)) c->tensor_read[i] = true;
}

/* Does the file have the tensor of this name under another prefix? Then one of the two is enough. */
static bool golden_has_twin(const golden_case *c, const char *prefix, const char *rest) {
    char name[512];
    snprintf(name, sizeof name, "%s%s", prefix, rest);
    return golden_has(c, name);
}

static bool golden_has_number(const golden_case *c, const char *prefix, const char *rest) {
    const size_t length = strlen(prefix);
    for (int i = 0; golden_key(c, i); i++)
        if (golden_begins(golden_key(c, i), prefix) && strcmp(golden_key(c, i) + length, rest) == 0)
            return true;
    return false;
}

static bool golden_must_read_key(const golden_case *c, const char *key) {
    if (strcmp(key, "cfg.seed") == 0) return false; /* how the inputs were made */
    if (golden_begins(key, "expect.")) return !golden_has_twin(c, "out.", key + 7);
    if (golden_begins(key, "expect32."))
        return !golden_has_twin(c, "out.", key + 9) && !golden_has_twin(c, "out32.", key + 9) &&
               !golden_has_number(c, "expect.", key + 9);
    return golden_begins(key, "cfg.");
}

static bool golden_must_read_tensor(const golden_case *c, const char *name) {
    if (golden_begins(name, "out32.")) return !golden_has_twin(c, "out.", name + 6);
    if (golden_begins(name, "grad32.")) return !golden_has_twin(c, "grad.", name + 7);
    return golden_begins(name, "out.") || golden_begins(name, "grad.");
}

void golden_judge_unread(golden_case *c) {
    const char *key, *value;
    for (int64_t i = 0; weights_metadata_at(c->file, i, &key, &value); i++)
        if (!c->key_read[i] && golden_must_read_key(c, key))
            golden_fail(c, "%s = %.60s: this kind does not know the key", key, value);
    for (int i = 0; i < golden_tensor_count(c); i++)
        if (!c->tensor_read[i] && golden_must_read_tensor(c, golden_tensor_name(c, i)))
            golden_fail(c, "%s: this kind compares nothing with it", golden_tensor_name(c, i));
    if (!c->compared) golden_fail(c, "the file has no result: nothing was compared");
}

/* ---- metadata ---- */

const char *golden_text(const golden_case *c, const char *key) {
    const char *name, *value;
    for (int64_t i = 0; weights_metadata_at(c->file, i, &name, &value); i++)
        if (strcmp(name, key) == 0) {
            c->key_read[i] = true;
            return value;
        }
    return NULL;
}

const char *golden_key(const golden_case *c, int index) {
    const char *key, *value;
    return weights_metadata_at(c->file, index, &key, &value) ? key : NULL;
}

bool golden_is(const golden_case *c, const char *key, const char *value) {
    const char *text = golden_text(c, key);
    return text && strcmp(text, value) == 0;
}

bool golden_origin_has(const golden_case *c, const char *part) {
    const char *origin = golden_text(c, "origin");
    return origin && strstr(origin, part) != NULL;
}

/* The text of a key; NULL when it is absent or null. */
static const char *golden_given(const golden_case *c, const char *key) {
    const char *text = golden_text(c, key);
    return text && strcmp(text, "null") != 0 ? text : NULL;
}

double golden_number(golden_case *c, const char *key, double absent) {
    const char *text = golden_given(c, key);
    char *end;
    if (!text) return absent;
    const double value = strtod(text, &end);
    if (end != text && *end == '\0') return value;
    golden_fail(c, "%s = %.60s is not a number", key, text);
    return absent;
}

int golden_integer(golden_case *c, const char *key, int absent, int least, int most) {
    const double value = golden_number(c, key, (double)absent);
    if (value >= (double)least && value <= (double)most && value == floor(value)) return (int)value;
    golden_fail(c, "%s = %g is not an integer from %d to %d", key, value, least, most);
    return absent;
}

bool golden_flag(golden_case *c, const char *key, bool absent) {
    const char *text = golden_given(c, key);
    if (!text) return absent;
    if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
        golden_fail(c, "%s = %.60s is neither true nor false", key, text);
    return strcmp(text, "true") == 0;
}

int golden_choice(golden_case *c, const char *key, const char *const *choices, int absent) {
    const char *text = golden_given(c, key);
    if (!text) return absent;
    for (int i = 0; choices[i]; i++)
        if (strcmp(text, choices[i]) == 0) return i;
    golden_fail(c, "%s = %.60s is not one of those that this kind knows", key, text);
    return absent;
}

void golden_only(golden_case *c, const char *key, double value) {
    const char *text = golden_given(c, key);
    if (!text) return;
    const bool flag = strcmp(text, "true") == 0 || strcmp(text, "false") == 0;
    const double given = flag ? (double)golden_flag(c, key, false) : golden_number(c, key, value);
    if (given != value) golden_fail(c, "%s = %.60s: only %g can be computed", key, text, value);
}

void golden_lacks(golden_case *c, const char *key, const char *only) {
    const char *text = golden_given(c, key);
    char *end, *other, reason[GOLDEN_REASON];
    if (!text) return;
    const double value = strtod(text, &end), wanted = strtod(only, &other);
    if (strcmp(text, only) == 0 || (*end == '\0' && *other == '\0' && value == wanted)) return;
    snprintf(reason, sizeof reason, "not built: %s = %.40s, only %.40s", key, text, only);
    golden_skip(c, reason);
}

int golden_numbers(golden_case *c, const char *key, double *values, int room) {
    const char *text = golden_given(c, key);
    if (!text) return -1;
    int count = 0;
    const char *at = text + (text[0] == '[');
    at += strspn(at, " ");
    while (text[0] == '[' && *at && *at != ']' && count < room) {
        char *end;
        values[count] = strtod(at, &end);
        if (end == at) break;
        count++;
        at = end + strspn(end, ", ");
    }
    if (text[0] == '[' && *at == ']') return count;
    golden_fail(c, "%s = %.60s is not a list of at most %d numbers", key, text, room);
    return -1;
}

/* ---- tensors ---- */

bool golden_has(const golden_case *c, const char *name) {
    return xd_weights_find(c->file, name) >= 0;
}

int golden_tensor_count(const golden_case *c) {
    return (int)weights_count(c->file);
}

const char *golden_tensor_name(const golden_case *c, int index) {
    return xd_weights_at(c->file, index)->name;
}

golden_array golden_tensor(golden_case *c, const char *name) {
    golden_array a;
    memset(&a, 0, sizeof a);
    const int64_t index = xd_weights_find(c->file, name);
    if (index < 0) {
        golden_fail(c, "the file has no tensor %s", name);
        return a;
    }
    c->tensor_read[index] = true;
    const xd_weights_tensor *info = xd_weights_at(c->file, index);
    const size_t bytes = (size_t)(info->end - info->begin);
    if (info->ndim > 8) {
        golden_fail(c, "%s has %d dimensions, at most 8 are expected", name, info->ndim);
        return a;
    }
    void *bits = golden_memory(c, bytes); /* aligned, which the mapping need not be */
    memcpy(bits, xd_weights_data(c->file, index), bytes);
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

/* Where nothing counted the library has zeros and says so in the status; peers have those, or 0 / 0. */
static void golden_compare(golden_case *c, const char *name, const golden_array *expected, const double *got,
                           int64_t count, double bound) {
    if (count != expected->count) {
        golden_fail(c, "%s: %lld elements, expected %lld", name, (long long)count,
                    (long long)expected->count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        if (golden_same(got[i], expected->values[i], bound)) continue;
        if (c->loans.nothing_counted && got[i] == 0.0 && isnan(expected->values[i])) continue;
        golden_fail(c, "%s[%lld]: got %.17g, expected %.17g, bound %.3g", name, (long long)i, got[i],
                    expected->values[i], bound);
        return; /* the first difference of a tensor is enough */
    }
}

/* What a file may call a result, the most exact first: a tensor, or a number of its metadata. */
static const char *const golden_forms[][4] = {
    { "out.", "expect.", "out32.", "expect32." },
    { "out32.", "expect32.", NULL, NULL },
    { "grad.", "grad32.", NULL, NULL },
};

static bool golden_find_number(const golden_case *c, const char *key, double *value) {
    const char *text = golden_given(c, key);
    char *end = NULL;
    if (!text) return false;
    *value = strtod(text, &end);
    return end != text && *end == '\0';
}

/* The form of a result that the file has, in found, and whether it is of float32; false without one. */
static bool golden_find_result(const golden_case *c, const char *name, char found[512], bool *f32) {
    const char *const *forms = NULL;
    double value;
    for (size_t i = 0; i < sizeof golden_forms / sizeof *golden_forms; i++)
        if (golden_begins(name, golden_forms[i][0])) forms = golden_forms[i];
    snprintf(found, 512, "%s", name);
    *f32 = false;
    if (golden_has(c, name) || !forms) return golden_has(c, name);
    for (int i = 0; i < 4 && forms[i]; i++) {
        snprintf(found, 512, "%s%s", forms[i], name + strlen(forms[0]));
        *f32 = strstr(forms[i], "32") != NULL && strstr(forms[0], "32") == NULL;
        if (golden_has(c, found) || golden_find_number(c, found, &value)) return true;
    }
    return false;
}

/* The result, counted as compared; false when the file has it in no form. */
static bool golden_result(golden_case *c, const char *name, golden_array *expected, bool *f32) {
    char found[512];
    if (!golden_find_result(c, name, found, f32)) return false;
    golden_compared(c);
    if (golden_has(c, found)) {
        *expected = golden_tensor(c, found);
        return true;
    }
    memset(expected, 0, sizeof *expected);
    expected->values = (double *)golden_memory(c, sizeof(double));
    expected->bits = expected->values;
    expected->dtype = XD_DTYPE_F64;
    expected->count = 1;
    return golden_find_number(c, found, expected->values);
}

bool golden_wants(const golden_case *c, const char *name) {
    char found[512];
    bool f32;
    return golden_find_result(c, name, found, &f32);
}

int64_t golden_result_count(const golden_case *c, const char *name) {
    char found[512];
    bool f32;
    if (!golden_find_result(c, name, found, &f32)) return -1;
    const int64_t index = xd_weights_find(c->file, found);
    int64_t count = 1;
    if (index < 0) return count;
    const xd_weights_tensor *info = xd_weights_at(c->file, index);
    for (int d = 0; d < info->ndim; d++) count *= info->shape[d];
    return count;
}

void golden_within(golden_case *c, const char *name, const double *got, int64_t count, double bound) {
    golden_array expected;
    bool f32;
    if (golden_result(c, name, &expected, &f32)) golden_compare(c, name, &expected, got, count, bound);
}

void golden_exact(golden_case *c, const char *name, const double *got, int64_t count) {
    golden_within(c, name, got, count, 0.0);
}

static void golden_relative(golden_case *c, const char *name, const double *got, int64_t count,
                            double least) {
    golden_array expected;
    bool f32;
    if (!golden_result(c, name, &expected, &f32)) return;
    const double relative = fmax(least, 8.0 * c->f32_error);
    golden_compare(c, name, &expected, got, count, relative * golden_maximum(&expected) + 1e-6);
}

void golden_double(golden_case *c, const char *name, const double *got, int64_t count) {
    golden_array expected;
    char found[512];
    bool f32;
    if (!golden_find_result(c, name, found, &f32)) return;
    if (f32) {
        golden_relative(c, name, got, count, 1e-5);
        return;
    }
    golden_result(c, name, &expected, &f32);
    golden_compare(c, name, &expected, got, count, 1e-9 * golden_maximum(&expected) + 1e-9);
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

void golden_ulps(golden_case *c, const char *name, const void *got, xd_dtype dtype, int64_t count, int ulps) {
    golden_array expected;
    bool f32;
    if (!golden_result(c, name, &expected, &f32)) return;
    if (count != expected.count) {
        golden_fail(c, "%s: %lld elements, expected %lld", name, (long long)count, (long long)expected.count);
        return;
    }
    void *bits = golden_memory(c, (size_t)count * xd_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) xd_store_f64(bits, dtype, i, expected.values[i]);
    for (int64_t i = 0; i < count; i++) {
        const int64_t a = golden_order(got, dtype, i), b = golden_order(bits, dtype, i);
        if (a - b <= ulps && b - a <= ulps) continue;
        golden_fail(c, "%s[%lld]: got %.9g, expected %.9g, bound %d ulp", name, (long long)i,
                    xd_load_f64(got, dtype, i), expected.values[i], ulps);
        return;
    }
}
