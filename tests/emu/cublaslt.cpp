/* cuBLASLt: a separate library that the program loads, on top of the program's emulation. It accepts what the unit uses and
 * refuses everything else as the real one is documented to; what the real one would silently compute wrongly is reported. Sums
 * are in double, in the order of the terms: no test may rely on their bits.
 *
 * In the environment, read at each call: EMU_CUBLASLT_NONE=0 finds nothing for any product, 7 for those whose result has 7
 * columns, -1 returns "not supported" for all; EMU_CUBLASLT_FAIL=1 launches nothing. emu_cublaslt_asked: how often an algorithm
 * was looked for. */
#include "cublasLt.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "emu.h"

struct cublasLtContext {
    int device;
};
struct emu_cublaslt_operation {
    cublasComputeType_t compute;
    cudaDataType scale;
    int32_t turn[2]; /* cublasOperation_t of A and B */
};
struct emu_cublaslt_layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
};
struct emu_cublaslt_preference {
    uint64_t workspace_bytes;
    uint32_t alignment[4]; /* of A, B, C and D */
};

namespace emu {

static std::set<const void *> alive; /* handles and descriptors */
static std::atomic<long> asked_for;  /* algorithms */

/* ---- descriptors ---- */

static cublasStatus_t refuse(cublasStatus_t status, const char *function, const char *why) {
    report("%s: %s", function, why);
    return status;
}

static bool known(const void *object, const char *function) {
    Lock lock(big_lock);
    if (alive.count(object)) return true;
    report("%s: %p was not made by cuBLASLt, or was destroyed", function, object);
    return false;
}

template <typename T> static cublasStatus_t make(T **out, const T &value, Handle kind) {
    if (injected_fault()) return CUBLAS_STATUS_ALLOC_FAILED;
    Lock lock(big_lock);
    *out = new T(value);
    alive.insert(*out);
    count_handle(kind, 1);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T> static cublasStatus_t destroy(T *object, const char *function, Handle kind) {
    if (!known(object, function)) return CUBLAS_STATUS_INVALID_VALUE;
    Lock lock(big_lock);
    alive.erase(object);
    delete object;
    count_handle(kind, -1);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
static cublasStatus_t set(T *member, const void *value, size_t bytes, const char *function) {
    if (!value || bytes != sizeof *member)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, function, "no value, or not of the attribute's size");
    memcpy(member, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- problems ---- */

/* What an algorithm is found for: the operation and the four layouts. */
struct Problem {
    emu_cublaslt_operation operation;
    emu_cublaslt_layout a, b, c, d;
};

static size_t type_bytes(cudaDataType type) {
    return type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : type == CUDA_R_64F ? 8 : 4;
}

static bool same(const emu_cublaslt_layout &x, const emu_cublaslt_layout &y) {
    return x.type == y.type && x.rows == y.rows && x.columns == y.columns && x.ld == y.ld;
}

static uint64_t terms_of(const Problem &p) {
    return p.operation.turn[0] == CUBLAS_OP_N ? p.a.columns : p.a.rows;
}

/* Returns false, after a report, when the shapes do not fit. */
static bool fits(const Problem &p) {
    const bool turn_a = p.operation.turn[0] != CUBLAS_OP_N, turn_b = p.operation.turn[1] != CUBLAS_OP_N;
    const uint64_t m = turn_a ? p.a.columns : p.a.rows, n = turn_b ? p.b.rows : p.b.columns;
    const uint64_t terms = turn_b ? p.b.columns : p.b.rows;
    bool fit = m == p.d.rows && n == p.d.columns && terms == terms_of(p) && m && n && terms && same(p.c, p.d);
    for (const emu_cublaslt_layout *x : { &p.a, &p.b, &p.c, &p.d }) fit = fit && x->ld >= (int64_t)x->rows;
    if (!fit)
        report("cublasLt: layouts do not fit: %llu x %llu (ld %lld) and %llu x %llu (ld %lld), transposed %d "
               "and %d, "
               "make %llu x %llu (ld %lld)",
               (unsigned long long)p.a.rows, (unsigned long long)p.a.columns, (long long)p.a.ld,
               (unsigned long long)p.b.rows, (unsigned long long)p.b.columns, (long long)p.b.ld, turn_a,
               turn_b, (unsigned long long)p.d.rows, (unsigned long long)p.d.columns, (long long)p.d.ld);
    return fit;
}

static bool supported(const Problem &p) {
    const bool narrow = p.a.type == CUDA_R_16BF;
    return p.operation.compute == CUBLAS_COMPUTE_32F && p.operation.scale == CUDA_R_32F &&
           (p.d.type == CUDA_R_32F || (p.d.type == CUDA_R_16BF && narrow)) && p.a.type == p.b.type &&
           (p.a.type == CUDA_R_32F || narrow);
}

static uint64_t fingerprint(const Problem &p) {
    uint64_t hash = 14695981039346656037u;
    const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
    add((uint64_t)p.operation.turn[0]), add((uint64_t)p.operation.turn[1]);
    for (const emu_cublaslt_layout *x : { &p.a, &p.b, &p.c, &p.d })
        add((uint64_t)x->type), add(x->rows), add(x->columns), add((uint64_t)x->ld);
    return hash;
}

static bool take_problem(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                         cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                         const char *function, Problem *out) {
    for (const void *object : { (const void *)handle, (const void *)operation, (const void *)a,
                                (const void *)b, (const void *)c, (const void *)d })
        if (!known(object, function)) return false;
    *out = Problem{ *operation, *a, *b, *c, *d };
    return fits(*out);
}

/* ---- algorithms ---- */

/* The contents of an algorithm. */
struct Algorithm {
    uint64_t problem, workspace_bytes;
    uint32_t alignment[4];
};

/* As if sums were split: the workspace receives a partial sum, if there is room. */
static Algorithm algorithm_for(const Problem &p, const emu_cublaslt_preference &preference) {
    Algorithm algorithm = {};
    algorithm.problem = fingerprint(p);
    algorithm.workspace_bytes = std::min(preference.workspace_bytes, p.d.rows * p.d.columns * 4);
    memcpy(algorithm.alignment, preference.alignment, sizeof algorithm.alignment);
    return algorithm;
}

/* ---- products ---- */

struct Product {
    Problem problem;
    Algorithm algorithm;
    const char *a, *b;
    char *d; /* and C */
    float alpha, beta;
    char *workspace;
    int device;
};

static size_t bytes_of(const emu_cublaslt_layout &x) {
    return ((x.columns - 1) * (uint64_t)x.ld + x.rows) * type_bytes(x.type);
}

static bool is_inside(const char *at, size_t bytes, int device, const char *which) {
    const Block *block = find_block(at);
    if (block && block->device == device && at + bytes <= block->base + block->bytes) return true;
    report("cublasLtMatmul: %s, %zu bytes, does not lie in memory of device %d: %s", which, bytes, device,
           describe(at).c_str());
    return false;
}

static bool memory_is_right(const Product &p) {
    const size_t a = bytes_of(p.problem.a), b = bytes_of(p.problem.b), d = bytes_of(p.problem.d);
    if (!is_inside(p.a, a, p.device, "A") || !is_inside(p.b, b, p.device, "B") ||
        !is_inside(p.d, d, p.device, "D"))
        return false;
    const size_t needed = p.algorithm.workspace_bytes;
    if (needed && !is_inside(p.workspace, needed, p.device, "the workspace")) return false;
    const auto apart = [](const char *x, size_t x_bytes, const char *y, size_t y_bytes) {
        return x + x_bytes <= y || y + y_bytes <= x;
    };
    const char *w = p.workspace;
    if (apart(p.d, d, p.a, a) && apart(p.d, d, p.b, b) &&
        (!needed || (apart(w, needed, p.a, a) && apart(w, needed, p.b, b) && apart(w, needed, p.d, d))))
        return true;
    report("cublasLtMatmul: the result or the workspace overlaps what is read");
    return false;
}

static bool alignment_is_right(const Product &p) {
    const void *const at[4] = { p.a, p.b, p.d, p.d };
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)at[i] % p.algorithm.alignment[i]) {
            report("cublasLtMatmul: %c is not aligned to %u bytes, as the heuristic was told", "ABCD"[i],
                   p.algorithm.alignment[i]);
            return false;
        }
    if (p.algorithm.workspace_bytes == 0 || (uintptr_t)p.workspace % 16 == 0) return true;
    report("cublasLtMatmul: the workspace is not aligned to 16 bytes");
    return false;
}

static double element(const char *matrix, const emu_cublaslt_layout &x, uint64_t row, uint64_t column) {
    const char *at = matrix + (column * (uint64_t)x.ld + row) * type_bytes(x.type);
    float value = 0.0f;
    if (x.type == CUDA_R_32F)
        memcpy(&value, at, sizeof value);
    else /* the upper half of a float */
        memcpy(reinterpret_cast<char *>(&value) + 2, at, 2);
    return value;
}

/* To the nearest, of two as near to the even one. */
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static void perform(const Product &p) {
    DeviceAccess access;
    const Problem &q = p.problem;
    const bool turn_a = q.operation.turn[0] != CUBLAS_OP_N, turn_b = q.operation.turn[1] != CUBLAS_OP_N;
    memset(p.workspace, kFresh, p.algorithm.workspace_bytes);
    check_written(p.workspace, p.algorithm.workspace_bytes);
    for (uint64_t column = 0; column < q.d.columns; column++) {
        char *line = p.d + column * (uint64_t)q.d.ld * type_bytes(q.d.type);
        float *out = reinterpret_cast<float *>(line);
        uint16_t *narrow = reinterpret_cast<uint16_t *>(line);
        for (uint64_t row = 0; row < q.d.rows; row++) {
            double sum = 0.0;
            for (uint64_t t = 0; t < terms_of(q); t++)
                sum += (turn_a ? element(p.a, q.a, t, row) : element(p.a, q.a, row, t)) *
                       (turn_b ? element(p.b, q.b, column, t) : element(p.b, q.b, t, column));
            const double before = p.beta == 0.0f ? 0.0 : (double)p.beta * element(p.d, q.d, row, column);
            const float value = (float)(p.alpha * sum + before);
            if (q.d.type == CUDA_R_16BF)
                narrow[row] = to_bf16(value);
            else
                out[row] = value;
        }
        check_written(line, q.d.rows * type_bytes(q.d.type));
    }
}

/* Checks what the product needs, before it is put on the stream. */
static cublasStatus_t check_product(const Product &p, size_t workspace_bytes, const Stream &stream,
                                    int handle_device) {
    const char *function = "cublasLtMatmul";
    if (p.algorithm.problem != fingerprint(p.problem))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, function, "the algorithm was found for another problem");
    if (workspace_bytes < p.algorithm.workspace_bytes)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, function, "the workspace is smaller than the algorithm's");
    if (device_of(stream) != p.device || handle_device != p.device)
        return refuse(CUBLAS_STATUS_ARCH_MISMATCH, function,
                      "handle, stream and thread are of different devices");
    return memory_is_right(p) && alignment_is_right(p) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* Memory may have been freed when the stream, or a graph, executes the product. */
static cublasStatus_t submit_product(const std::shared_ptr<Stream> &stream, const Product &product) {
    const cudaError_t error = submit(stream, [product] {
        if (memory_is_right(product)) perform(product);
        return true;
    });
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

/* Whether the environment asks for no algorithm to be found. */
static bool is_hidden(const Problem &p, cublasStatus_t *status) {
    const char *setting = getenv("EMU_CUBLASLT_NONE");
    const long value = setting ? atol(setting) : 0;
    *status = value < 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
    return setting && (value <= 0 || (uint64_t)value == p.d.columns);
}

} // namespace emu

using namespace emu;

/* ---- the interface ---- */

extern "C" long emu_cublaslt_asked(void) {
    return asked_for;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (sealed("cublasLtCreate")) return CUBLAS_STATUS_NOT_INITIALIZED;
    return make(handle, cublasLtContext{ current_device }, kCublasLt);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    return destroy(handle, "cublasLtDestroy", kCublasLt);
}

size_t cublasLtGetVersion(void) {
    return EMU_CUBLASLT_VERSION;
}

cublasStatus_t cublasLtGetProperty(libraryPropertyType type, int *value) {
    const int parts[] = { EMU_CUBLASLT_VERSION / 10000, EMU_CUBLASLT_VERSION / 100 % 100,
                          EMU_CUBLASLT_VERSION % 100 };
    if (type > PATCH_LEVEL || !value) return CUBLAS_STATUS_INVALID_VALUE;
    *value = parts[type];
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED: return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the requested functionality is not supported";
    default: return "another error";
    }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *operation, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    return make(operation, emu_cublaslt_operation{ compute, scale, { CUBLAS_OP_N, CUBLAS_OP_N } },
                kCublasLtDescriptor);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    return destroy(operation, "cublasLtMatmulDescDestroy", kCublasLtDescriptor);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t which, const void *value,
                                              size_t bytes) {
    const char *function = "cublasLtMatmulDescSetAttribute";
    if (!known(operation, function)) return CUBLAS_STATUS_INVALID_VALUE;
    if (which != CUBLASLT_MATMUL_DESC_TRANSA && which != CUBLASLT_MATMUL_DESC_TRANSB)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, function, "an attribute that is not emulated");
    return set(&operation->turn[which - CUBLASLT_MATMUL_DESC_TRANSA], value, bytes, function);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    return make(layout, emu_cublaslt_layout{ type, rows, columns, ld }, kCublasLtDescriptor);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return destroy(layout, "cublasLtMatrixLayoutDestroy", kCublasLtDescriptor);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    return make(preference, emu_cublaslt_preference{ 0, { 256, 256, 256, 256 } }, kCublasLtDescriptor);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy(preference, "cublasLtMatmulPreferenceDestroy", kCublasLtDescriptor);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void *value, size_t bytes) {
    const char *function = "cublasLtMatmulPreferenceSetAttribute";
    if (!known(preference, function)) return CUBLAS_STATUS_INVALID_VALUE;
    if (which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return set(&preference->workspace_bytes, value, bytes, function);
    if (which < CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES ||
        which > CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, function, "an attribute that is not emulated");
    return set(&preference->alignment[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes,
               function);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
    const char *function = "cublasLtMatmulAlgoGetHeuristic";
    Problem problem;
    cublasStatus_t hidden;
    *found = 0;
    if (injected_fault()) return CUBLAS_STATUS_INTERNAL_ERROR;
    if (!take_problem(handle, operation, a, b, c, d, function, &problem) || !known(preference, function) ||
        asked < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    asked_for++;
    if (!supported(problem)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_hidden(problem, &hidden)) return hidden;
    static_assert(sizeof(Algorithm) <= sizeof results[0].algo, "it travels in there");
    const Algorithm algorithm = algorithm_for(problem, *preference);
    memset(&results[0], 0, sizeof results[0]);
    memcpy(&results[0].algo, &algorithm, sizeof algorithm);
    results[0].workspaceSize = algorithm.workspace_bytes;
    results[0].wavesCount = 1.0f;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream_handle) {
    const char *function = "cublasLtMatmul";
    Product p = {};
    if (injected_fault() || getenv("EMU_CUBLASLT_FAIL")) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!take_problem(handle, operation, a_layout, b_layout, c_layout, d_layout, function, &p.problem) ||
        !algo)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (c != d) return refuse(CUBLAS_STATUS_INVALID_VALUE, function, "C is not D, which is not emulated");
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(stream_handle, function);
    if (!stream) return CUBLAS_STATUS_EXECUTION_FAILED;
    memcpy(&p.algorithm, algo, sizeof p.algorithm);
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    p.a = static_cast<const char *>(a);
    p.b = static_cast<const char *>(b);
    p.d = static_cast<char *>(d);
    p.workspace = static_cast<char *>(workspace);
    p.device = current_device;
    const cublasStatus_t checked = check_product(p, workspace_bytes, *stream, handle->device);
    return checked ? checked : submit_product(stream, p);
}
