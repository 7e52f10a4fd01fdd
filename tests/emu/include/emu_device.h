/* Device functions of CUDA, for the emulation: synchronisation, warp exchange, atomics, arithmetic.
 *
 * Calls that wait have default arguments for the caller's file and line, so that a report can name them. */
#ifndef EMU_DEVICE_H
#define EMU_DEVICE_H

/* clang-format off: a line for each function */

#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* ---- block and warp barriers ---- */

enum emu_block_op { EMU_BLOCK_SYNC, EMU_BLOCK_OR, EMU_BLOCK_AND, EMU_BLOCK_COUNT, EMU_CLUSTER_SYNC };

enum emu_warp_op {
    EMU_WARP_SYNC,
    EMU_SHFL,
    EMU_SHFL_UP,
    EMU_SHFL_DOWN,
    EMU_SHFL_XOR,
    EMU_BALLOT,
    EMU_ANY,
    EMU_ALL,
    EMU_MATCH_ANY,
    EMU_MATCH_ALL,
    EMU_REDUCE_ADD,
    EMU_REDUCE_MIN,
    EMU_REDUCE_MAX,
    EMU_REDUCE_IMIN,
    EMU_REDUCE_IMAX,
    EMU_REDUCE_AND,
    EMU_REDUCE_OR,
    EMU_REDUCE_XOR
};

int emu_block_barrier(emu_block_op op, int predicate, const char *file, int line);
/* Input: the lane's own value and parameter; output: the result for this lane. */
uint64_t emu_warp(emu_warp_op op, unsigned mask, uint64_t value, int parameter, int width, const char *file,
                  int line);
void emu_fence(void);
[[noreturn]] void emu_trap(const char *file, int line);
/* Reports a 16-byte access that is not aligned; for the load16 and store16 helpers of the unit. */
void emu_require_aligned(const void *address, size_t alignment, const char *file, int line);

inline void __syncthreads(EMU_HERE) { emu_block_barrier(EMU_BLOCK_SYNC, 0, file, line); }
inline int __syncthreads_or(int predicate, EMU_HERE) {
    return emu_block_barrier(EMU_BLOCK_OR, predicate, file, line);
}
inline int __syncthreads_and(int predicate, EMU_HERE) {
    return emu_block_barrier(EMU_BLOCK_AND, predicate, file, line);
}
inline int __syncthreads_count(int predicate, EMU_HERE) {
    return emu_block_barrier(EMU_BLOCK_COUNT, predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) {
    emu_warp(EMU_WARP_SYNC, mask, 0, 0, 32, file, line);
}
inline void __threadfence() { emu_fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { emu_fence(); }
#define __trap() emu_trap(__FILE__, __LINE__)
inline void __nanosleep(unsigned) {}

/* ---- warp exchange ---- */

template <typename T> inline uint64_t emu_to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a warp exchanges at most 8 bytes a lane");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <typename T> inline T emu_from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_HERE) {
    return emu_from_bits<T>(emu_warp(EMU_SHFL, mask, emu_to_bits(value), lane, width, file, line));
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    return emu_from_bits<T>(emu_warp(EMU_SHFL_UP, mask, emu_to_bits(value), (int)delta, width, file, line));
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    return emu_from_bits<T>(emu_warp(EMU_SHFL_DOWN, mask, emu_to_bits(value), (int)delta, width, file, line));
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_HERE) {
    return emu_from_bits<T>(emu_warp(EMU_SHFL_XOR, mask, emu_to_bits(value), lanes, width, file, line));
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_HERE) {
    return (unsigned)emu_warp(EMU_BALLOT, mask, predicate != 0, 0, 32, file, line);
}
inline int __any_sync(unsigned mask, int predicate, EMU_HERE) {
    return (int)emu_warp(EMU_ANY, mask, predicate != 0, 0, 32, file, line);
}
inline int __all_sync(unsigned mask, int predicate, EMU_HERE) {
    return (int)emu_warp(EMU_ALL, mask, predicate != 0, 0, 32, file, line);
}
template <typename T> inline unsigned __match_any_sync(unsigned mask, T value, EMU_HERE) {
    return (unsigned)emu_warp(EMU_MATCH_ANY, mask, emu_to_bits(value), 0, 32, file, line);
}
template <typename T> inline unsigned __match_all_sync(unsigned mask, T value, int *all, EMU_HERE) {
    const unsigned lanes = (unsigned)emu_warp(EMU_MATCH_ALL, mask, emu_to_bits(value), 0, 32, file, line);
    *all = lanes != 0;
    return lanes;
}

#define EMU_REDUCE(name, type, op)                                                        \
    inline type name(unsigned mask, type value, EMU_HERE) {                               \
        return (type)emu_warp(op, mask, (uint64_t)(unsigned)value, 0, 32, file, line);    \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, EMU_REDUCE_ADD)
EMU_REDUCE(__reduce_add_sync, int, EMU_REDUCE_ADD)
EMU_REDUCE(__reduce_min_sync, unsigned, EMU_REDUCE_MIN)
EMU_REDUCE(__reduce_min_sync, int, EMU_REDUCE_IMIN)
EMU_REDUCE(__reduce_max_sync, unsigned, EMU_REDUCE_MAX)
EMU_REDUCE(__reduce_max_sync, int, EMU_REDUCE_IMAX)
EMU_REDUCE(__reduce_and_sync, unsigned, EMU_REDUCE_AND)
EMU_REDUCE(__reduce_or_sync, unsigned, EMU_REDUCE_OR)
EMU_REDUCE(__reduce_xor_sync, unsigned, EMU_REDUCE_XOR)
#undef EMU_REDUCE

/* ---- atomics: one block runs at a time, so plain operations suffice; they are reported to the checker (atomic.cpp) ---- */

typedef unsigned long long emu_ull;

int atomicAdd(int *address, int value);
unsigned atomicAdd(unsigned *address, unsigned value);
emu_ull atomicAdd(emu_ull *address, emu_ull value);
float atomicAdd(float *address, float value);
double atomicAdd(double *address, double value);
int atomicSub(int *address, int value);
unsigned atomicSub(unsigned *address, unsigned value);
int atomicMax(int *address, int value);
unsigned atomicMax(unsigned *address, unsigned value);
long long atomicMax(long long *address, long long value);
emu_ull atomicMax(emu_ull *address, emu_ull value);
int atomicMin(int *address, int value);
unsigned atomicMin(unsigned *address, unsigned value);
long long atomicMin(long long *address, long long value);
emu_ull atomicMin(emu_ull *address, emu_ull value);
int atomicExch(int *address, int value);
unsigned atomicExch(unsigned *address, unsigned value);
emu_ull atomicExch(emu_ull *address, emu_ull value);
float atomicExch(float *address, float value);
int atomicCAS(int *address, int compare, int value);
unsigned atomicCAS(unsigned *address, unsigned compare, unsigned value);
emu_ull atomicCAS(emu_ull *address, emu_ull compare, emu_ull value);
int atomicAnd(int *address, int value);
unsigned atomicAnd(unsigned *address, unsigned value);
emu_ull atomicAnd(emu_ull *address, emu_ull value);
int atomicOr(int *address, int value);
unsigned atomicOr(unsigned *address, unsigned value);
emu_ull atomicOr(emu_ull *address, emu_ull value);
int atomicXor(int *address, int value);
unsigned atomicXor(unsigned *address, unsigned value);
emu_ull atomicXor(emu_ull *address, emu_ull value);
unsigned atomicInc(unsigned *address, unsigned limit);
unsigned atomicDec(unsigned *address, unsigned limit);

/* ---- clusters: twins of %cluster_ctarank, barrier.cluster and mapa ---- */

unsigned emu_cluster_rank(void);
unsigned emu_cluster_size(void);
void *emu_cluster_map(const void *shared, unsigned rank, const char *file, int line);

inline void emu_cluster_sync(EMU_HERE) { emu_block_barrier(EMU_CLUSTER_SYNC, 0, file, line); }
/* The same in two halves. */
void emu_cluster_arrive();
void emu_cluster_wait(EMU_HERE);
/* The address in block `rank` of this cluster that corresponds to `shared` in this block. */
template <typename T> inline T *emu_map_shared(T *shared, unsigned rank, EMU_HERE) {
    return static_cast<T *>(emu_cluster_map(shared, rank, file, line));
}

/* ---- twins of mbarrier and of 1-D bulk copies (bulk.cpp) ----
 *
 * A copy to shared memory is executed when a thread waits for its barrier, a copy from shared memory when its group is waited
 * for: code that does not wait reads NaN, or leaves memory unwritten. */

void emu_mbarrier_init(uint64_t *barrier, unsigned arrivals, EMU_HERE);
void emu_mbarrier_arrive(uint64_t *barrier, EMU_HERE);
/* An arrival that also announces bytes of bulk copies. */
void emu_mbarrier_expect(uint64_t *barrier, unsigned bytes, EMU_HERE);
/* Blocks until the phase of this parity has completed. */
void emu_mbarrier_wait(uint64_t *barrier, unsigned parity, EMU_HERE);
/* The same; 0 when it waits for a copy that a test has lost (emu_lose_bulk_load). */
int emu_mbarrier_try(uint64_t *barrier, unsigned parity, EMU_HERE);
void emu_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *barrier, EMU_HERE);
/* A store of 16 bytes into shared memory of any block of the cluster, which counts at an mbarrier of that block. */
void emu_store_async(void *shared, uint64_t first, uint64_t second, uint64_t *barrier, EMU_HERE);
void emu_bulk_store(void *global, const void *shared, unsigned bytes, EMU_HERE);
void emu_bulk_commit(EMU_HERE);
/* Waits until at most `pending` groups of this thread are left. */
void emu_bulk_wait(unsigned pending, EMU_HERE);

/* ---- arithmetic ---- */

inline unsigned __float_as_uint(float x) { return emu_from_bits<unsigned>(emu_to_bits(x)); }
inline int __float_as_int(float x) { return emu_from_bits<int>(emu_to_bits(x)); }
inline float __uint_as_float(unsigned x) { return emu_from_bits<float>(x); }
inline float __int_as_float(int x) { return emu_from_bits<float>((unsigned)x); }
inline long long __double_as_longlong(double x) { return emu_from_bits<long long>(emu_to_bits(x)); }
inline double __longlong_as_double(long long x) { return emu_from_bits<double>((uint64_t)x); }
inline int __double2hiint(double x) { return (int)(emu_to_bits(x) >> 32); }
inline int __double2loint(double x) { return (int)(unsigned)emu_to_bits(x); }
inline double __hiloint2double(int high, int low) {
    return emu_from_bits<double>((uint64_t)(unsigned)high << 32 | (unsigned)low);
}

/* Keeps a product out of a later sum: "_rn" functions are never contracted. */
#if defined(__x86_64__)
#    define EMU_OPAQUE(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#    define EMU_OPAQUE(x) __asm__("" : "+w"(x))
#else
#    define EMU_OPAQUE(x) __asm__("" : "+m"(x))
#endif
#define EMU_ROUNDED(name, type, expression)     \
    inline type name(type a, type b) {          \
        type result = (expression);             \
        EMU_OPAQUE(result);                     \
        return result;                          \
    }
EMU_ROUNDED(__fadd_rn, float, a + b)
EMU_ROUNDED(__fsub_rn, float, a - b)
EMU_ROUNDED(__fmul_rn, float, a *b)
EMU_ROUNDED(__fdiv_rn, float, a / b)
EMU_ROUNDED(__fdividef, float, a / b)
EMU_ROUNDED(__dadd_rn, double, a + b)
EMU_ROUNDED(__dsub_rn, double, a - b)
EMU_ROUNDED(__dmul_rn, double, a *b)
EMU_ROUNDED(__ddiv_rn, double, a / b)
#undef EMU_ROUNDED

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
/* Twins of ex2.approx.ftz and lg2.approx.ftz. */
inline float emu_ex2(float x) { return exp2f(x); }
inline float emu_lg2(float x) { return log2f(x); }

inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
inline unsigned __float2uint_rz(float x) { return (unsigned)x; }
inline long long __float2ll_rn(float x) { return (long long)rintf(x); }
inline int __double2int_rn(double x) { return (int)rint(x); }
inline int __double2int_rz(double x) { return (int)x; }
inline long long __double2ll_rn(double x) { return (long long)rint(x); }
inline long long __double2ll_rz(double x) { return (long long)x; }
inline emu_ull __double2ull_rn(double x) { return (emu_ull)rint(x); }
inline float __double2float_rn(double x) { return (float)x; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(emu_ull x) { return (float)x; }
inline double __int2double_rn(int x) { return (double)x; }
inline double __ll2double_rn(long long x) { return (double)x; }
inline double __ull2double_rn(emu_ull x) { return (double)x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(emu_ull x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((emu_ull)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= ((x >> i) & 1u) << (31 - i);
    return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline int __mulhi(int a, int b) { return (int)(((int64_t)a * b) >> 32); }
inline emu_ull __umul64hi(emu_ull a, emu_ull b) { return (emu_ull)(((unsigned __int128)a * b) >> 64); }
inline long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31u));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned chosen = (selector >> (4 * i)) & 7u;
        result |= (unsigned)((bytes >> (8 * chosen)) & 255u) << (8 * i);
    }
    return result;
}

template <typename T> inline T __ldg(const T *address) { return *address; }
template <typename T> inline T __ldcg(const T *address) { return *address; }
template <typename T> inline T __ldcs(const T *address) { return *address; }
template <typename T> inline T __ldca(const T *address) { return *address; }
template <typename T> inline T __ldlu(const T *address) { return *address; }
template <typename T> inline void __stcg(T *address, T value) { *address = value; }
template <typename T> inline void __stcs(T *address, T value) { *address = value; }
template <typename T> inline void __stwt(T *address, T value) { *address = value; }

/* CUDA's global min and max, for the types that device code mixes. */
#define EMU_MIN_MAX(type)                                        \
    inline type min(type a, type b) { return b < a ? b : a; }    \
    inline type max(type a, type b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline long long clock64() { return 0; }

#endif
