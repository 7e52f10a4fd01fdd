/* Rows of logits: the threads of a row, reading and writing its elements, and sums of terms.
 *
 * TEAM threads work on a row: a warp on short rows, so that a block has eight of them, and the whole block on long
 * ones. A thread processes eight columns at a time, 16 bytes per load where the row is aligned to 16 bytes; it adds
 * these eight in f32 and everything else in double. Every sum has one order, whatever the grid. */

enum { XDI_CUDA_TEAM_BLOCK = 256, XDI_CUDA_SHORT_ROW = 2048, XDI_CUDA_EIGHT = 8 };

#define XDI_CUDA_LOG2E 1.4426950408889634
#define XDI_CUDA_LN2 0.69314718055994531

/* Blocks of the kernels here. The bound lets ptxas use as many registers as a block can have; otherwise it spills some
 * to have more blocks on a multiprocessor. */
#define XDI_CUDA_KERNEL __launch_bounds__(XDI_CUDA_TEAM_BLOCK)
#define XDI_CUDA_WIDE_KERNEL __launch_bounds__(XDI_CUDA_TEAM_BLOCK, 1)

/* Runs the statements with TEAM as the number of threads for a row of `columns` columns. */
#define XDI_CUDA_TEAMS(columns, TEAM, ...)   \
    if ((columns) <= XDI_CUDA_SHORT_ROW) {   \
        enum { TEAM = XDI_CUDA_WARP };       \
        __VA_ARGS__                          \
    } else {                                 \
        enum { TEAM = XDI_CUDA_TEAM_BLOCK }; \
        __VA_ARGS__                          \
    }

/* Runs the statements with T as the storage type of logits; the caller has checked that it is F32 or BF16. */
#define XDI_CUDA_LOGITS(dtype, T, ...) \
    if ((dtype) == XD_DTYPE_F32) {     \
        typedef float T;               \
        __VA_ARGS__                    \
    } else {                           \
        typedef xdi_cuda_bf16 T;       \
        __VA_ARGS__                    \
    }

/* Runs the statements with the types of a call's logits, of which Y is none without a teacher, and TEAM. */
#define XDI_CUDA_LOSS_CASES(a, X, Y, TEAM, ...)                                                        \
    {                                                                                                  \
        const bool given = (a)->teacher.data && (a)->soft_weight != 0.0;                               \
        if ((a)->vocab.end - (a)->vocab.begin <= XDI_CUDA_SHORT_ROW) {                                 \
            enum { TEAM = XDI_CUDA_WARP };                                                             \
            XDI_CUDA_LOSS_ANY(given, X, Y, { __VA_ARGS__ })                                            \
        } else {                                                                                       \
            enum { TEAM = XDI_CUDA_TEAM_BLOCK };                                                       \
            if (!given) {                                                                              \
                XDI_CUDA_LOGITS((a)->student.dtype, X, { typedef xdi_cuda_none Y; __VA_ARGS__ })       \
            } else if ((a)->student.dtype == (a)->teacher.dtype) {                                     \
                XDI_CUDA_LOGITS((a)->student.dtype, X, { typedef X Y; __VA_ARGS__ })                   \
            } else {                                                                                   \
                typedef xdi_cuda_any X, Y;                                                             \
                __VA_ARGS__                                                                            \
            }                                                                                          \
        }                                                                                              \
    }
#define XDI_CUDA_LOSS_ANY(given, X, Y, ...) \
    typedef xdi_cuda_any X;                 \
    if (given) {                            \
        typedef xdi_cuda_any Y;             \
        __VA_ARGS__                         \
    } else {                                \
        typedef xdi_cuda_none Y;            \
        __VA_ARGS__                         \
    }

static xdi_cuda_grid xdi_cuda_team_grid(int64_t rows, int team) {
    const int64_t each = XDI_CUDA_TEAM_BLOCK / team;
    return xdi_cuda_grid_of((rows + each - 1) / each, XDI_CUDA_TEAM_BLOCK);
}

/* One thread for each of count things. */
static xdi_cuda_grid xdi_cuda_flat_grid(int64_t count) {
    return xdi_cuda_grid_of((count + XDI_CUDA_TEAM_BLOCK - 1) / XDI_CUDA_TEAM_BLOCK, XDI_CUDA_TEAM_BLOCK);
}

static __device__ inline int64_t xdi_cuda_flat_index() {
    return (int64_t)blockIdx.x * XDI_CUDA_TEAM_BLOCK + (int64_t)threadIdx.x;
}

/* Of a block of whole teams, which has XDI_CUDA_TEAM_BLOCK threads, or of one team. */
template <int TEAM> static __device__ inline int64_t xdi_cuda_team_row() {
    enum { TEAMS = TEAM < XDI_CUDA_TEAM_BLOCK ? XDI_CUDA_TEAM_BLOCK / TEAM : 1 };
    return (int64_t)blockIdx.x * TEAMS + (int64_t)threadIdx.x / TEAM;
}

template <int TEAM> static __device__ inline int xdi_cuda_team_thread() {
    return (int)threadIdx.x % TEAM;
}

template <int TEAM> static __device__ inline void xdi_cuda_team_sync() {
    if (TEAM == XDI_CUDA_WARP)
        __syncwarp();
    else
        __syncthreads();
}

template <int TEAM, typename T, typename Merge>
static __device__ inline T xdi_cuda_team_reduce(T value, T identity, Merge merge) {
    return TEAM == XDI_CUDA_WARP ? xdi_cuda_warp_reduce(value, merge)
                                 : xdi_cuda_block_reduce(value, identity, merge);
}

/* ---- elements ---- */

/* Eight elements of a row. */
struct xdi_cuda_eight {
    float at[XDI_CUDA_EIGHT];
};

static __host__ __device__ inline int64_t xdi_cuda_stride(const xd_rows &x) {
    return x.stride ? x.stride : x.cols;
}

template <typename T> static __device__ inline T *xdi_cuda_row(const xd_rows &x, int64_t row) {
    return static_cast<T *>(x.data) + row * xdi_cuda_stride(x);
}

/* Eight elements as they lie in memory: a load that is under way takes few registers, and nothing waits for it before they
 * are widened. `from` is a multiple of 16 bytes. */
template <typename T> struct xdi_cuda_raw {
    static_assert(sizeof(T) == 2, "eight elements are 16 bytes");
    xdi_cuda_pack<T> pack;

    __device__ void load(const T *from) {
        pack = xdi_cuda_load16(from);
    }
    __device__ xdi_cuda_eight widened() const {
        xdi_cuda_eight chunk;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) chunk.at[i] = xdi_cuda_widen(pack.at[i]);
        return chunk;
    }
};

template <> struct xdi_cuda_raw<float> {
    xdi_cuda_pack<float> low, high;

    __device__ void load(const float *from) {
        low = xdi_cuda_load16(from);
        high = xdi_cuda_load16(from + 4);
    }
    __device__ xdi_cuda_eight widened() const {
        return { { low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3] } };
    }
};

template <> struct xdi_cuda_raw<xdi_cuda_bf16> {
    xdi_cuda_pack<uint32_t> pairs;

    __device__ void load(const xdi_cuda_bf16 *from) {
        pairs = xdi_cuda_load16(reinterpret_cast<const uint32_t *>(from));
    }
    __device__ xdi_cuda_eight widened() const {
        xdi_cuda_eight chunk;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i += 2) {
            chunk.at[i] = xd_float_of_bits(pairs.at[i / 2] << 16);
            chunk.at[i + 1] = xd_float_of_bits(pairs.at[i / 2] & 0xffff0000u);
        }
        return chunk;
    }
};

template <typename T> static __device__ inline xdi_cuda_eight xdi_cuda_read_whole(const T *from) {
    xdi_cuda_raw<T> raw;
    raw.load(from);
    return raw.widened();
}

/* Elements [column, column + 8) of a row; `beyond` for those at `end` and beyond. */
template <typename T>
static __device__ inline xdi_cuda_eight xdi_cuda_read(const T *row, int64_t column, int64_t end,
                                                      float beyond = 0.0f) {
    xdi_cuda_eight chunk;
    if (xdi_cuda_is_aligned16(row) && column + XDI_CUDA_EIGHT <= end) return xdi_cuda_read_whole(row + column);
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++)
        chunk.at[i] = column + i < end ? xdi_cuda_widen(row[column + i]) : beyond;
    return chunk;
}

/* A row of logits of a type, whose elements are read by address; xdi_cuda_any is a type that only the call knows. One kernel for
 * any type serves rows whose time is not in reading: short ones, and those whose teacher has another type. */
struct xdi_cuda_any {
    float widest;
};

template <typename T> struct xdi_cuda_line {
    const T *at;

    static __device__ xdi_cuda_line of(const xd_rows &x, int64_t row) {
        return { xdi_cuda_row<T>(x, row) };
    }
    __device__ xdi_cuda_line from(int64_t column) const {
        return { at + column };
    }
    __device__ float element(int64_t column) const {
        return xdi_cuda_widen(at[column]);
    }
    __device__ xdi_cuda_eight eight(int64_t column, int64_t end, float beyond) const {
        return xdi_cuda_read(at, column, end, beyond);
    }
};

template <> struct xdi_cuda_line<xdi_cuda_none> {
    const xdi_cuda_none *at;

    static __device__ xdi_cuda_line of(const xd_rows &, int64_t) {
        return { NULL };
    }
    __device__ xdi_cuda_line from(int64_t) const {
        return { NULL };
    }
    __device__ float element(int64_t) const {
        return 0.0f;
    }
    __device__ xdi_cuda_eight eight(int64_t, int64_t, float) const {
        return {};
    }
};

template <> struct xdi_cuda_line<xdi_cuda_any> {
    const char *at;
    bool wide;

    static __device__ xdi_cuda_line of(const xd_rows &x, int64_t row) {
        const bool wide = x.dtype == XD_DTYPE_F32;
        return { static_cast<const char *>(x.data) + row * xdi_cuda_stride(x) * (wide ? 4 : 2), wide };
    }
    __device__ xdi_cuda_line from(int64_t column) const {
        return { at + column * (wide ? 4 : 2), wide };
    }
    __device__ const float *floats() const {
        return reinterpret_cast<const float *>(at);
    }
    __device__ const xdi_cuda_bf16 *halves() const {
        return reinterpret_cast<const xdi_cuda_bf16 *>(at);
    }
    __device__ float element(int64_t column) const {
        return wide ? floats()[column] : xdi_cuda_widen(halves()[column]);
    }
    __device__ xdi_cuda_eight eight(int64_t column, int64_t end, float beyond) const {
        return wide ? xdi_cuda_read(floats(), column, end, beyond) : xdi_cuda_read(halves(), column, end, beyond);
    }
};

/* A pack of eight elements, rounded; a NaN loses its payload. */
template <typename T> static __device__ inline xdi_cuda_pack<T> xdi_cuda_rounded(const float *from) {
    xdi_cuda_pack<T> pack;
    XD_UNROLL
    for (int i = 0; i < xdi_cuda_pack<T>::COUNT; i++) xdi_cuda_narrow(from[i], &pack.at[i]);
    return pack;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ inline xdi_cuda_pack<xdi_cuda_bf16> xdi_cuda_rounded(const float *from) {
    unsigned words[4];
    xdi_cuda_pack<xdi_cuda_bf16> pack;
    XD_UNROLL
    for (int i = 0; i < 4; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
    memcpy(&pack, words, sizeof pack);
    return pack;
}
#endif

/* Eight elements, rounded, to a multiple of 16 bytes. */
template <typename T> static __device__ inline void xdi_cuda_write_whole(T *to, const xdi_cuda_eight &chunk) {
    enum { PACK = xdi_cuda_pack<T>::COUNT };
    XD_UNROLL
    for (int k = 0; k < XDI_CUDA_EIGHT; k += PACK) xdi_cuda_store16(to + k, xdi_cuda_rounded<T>(chunk.at + k));
}

/* Writes them, rounded; those at `end` and beyond are not changed. */
template <typename T>
static __device__ inline void xdi_cuda_write(T *row, int64_t column, int64_t end,
                                             const xdi_cuda_eight &chunk) {
    if (xdi_cuda_is_aligned16(row) && column + XDI_CUDA_EIGHT <= end) {
        xdi_cuda_write_whole(row + column, chunk);
    } else {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (column + i < end) xdi_cuda_narrow(chunk.at[i], &row[column + i]);
    }
}

/* The same for rows whose type only the call knows. */
static __device__ inline xdi_cuda_eight xdi_cuda_read_any(const xd_rows &x, int64_t row, int64_t column,
                                                          int64_t end) {
    if (x.dtype == XD_DTYPE_F32) return xdi_cuda_read(xdi_cuda_row<float>(x, row), column, end);
    return xdi_cuda_read(xdi_cuda_row<xdi_cuda_bf16>(x, row), column, end);
}

static __device__ inline void xdi_cuda_write_any(const xd_rows &x, int64_t row, int64_t column, int64_t end,
                                                 const xdi_cuda_eight &chunk) {
    if (x.dtype == XD_DTYPE_F32)
        xdi_cuda_write(xdi_cuda_row<float>(x, row), column, end, chunk);
    else
        xdi_cuda_write(xdi_cuda_row<xdi_cuda_bf16>(x, row), column, end, chunk);
}

/* Where a row begins on 16 bytes; else NULL. */
static __device__ inline void *xdi_cuda_aligned_row(const xd_rows &x, int64_t row) {
    void *at = x.dtype == XD_DTYPE_F32 ? (void *)xdi_cuda_row<float>(x, row) : (void *)xdi_cuda_row<xdi_cuda_bf16>(x, row);
    return xdi_cuda_is_aligned16(at) ? at : NULL;
}

static __device__ inline float xdi_cuda_element(const xd_rows &x, int64_t row, int64_t column) {
    if (x.dtype == XD_DTYPE_F32) return xdi_cuda_row<float>(x, row)[column];
    return xdi_cuda_widen(xdi_cuda_row<xdi_cuda_bf16>(x, row)[column]);
}

static __device__ inline void xdi_cuda_set_element(const xd_rows &x, int64_t row, int64_t column,
                                                   float value) {
    if (x.dtype == XD_DTYPE_F32)
        xdi_cuda_row<float>(x, row)[column] = value;
    else
        xdi_cuda_narrow(value, &xdi_cuda_row<xdi_cuda_bf16>(x, row)[column]);
}

/* 1 / tau or log2(e) / tau. Where tau is so small that f32 cannot hold it, about the largest f32: with infinity the largest
 * element, whose difference is 0, would have the power NaN. */
static __host__ __device__ inline float xdi_cuda_factor(double factor) {
    return (float)fmin(factor, 3.4e38);
}

/* ---- functions, by the instructions that a GPU has for them: a few units of the last place ---- */

#if defined(__CUDA_ARCH__)

/* 2^x; 0 below 2^-126. */
static __device__ inline float xdi_cuda_power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The logarithm to base 2 of what is not below 2^-126; its error near 1 is 2^-22. */
static __device__ inline float xdi_cuda_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* a / b, b in [2^-126, 2^126]. */
static __device__ inline float xdi_cuda_ratio(float a, float b) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    return __fmul_rn(a, y);
}

#else

static __device__ inline float xdi_cuda_power(float x) {
    return x < -126.0f ? 0.0f : exp2f(x);
}

static __device__ inline float xdi_cuda_log2(float x) {
    return log2f(x);
}

static __device__ inline float xdi_cuda_ratio(float a, float b) {
    return a / b;
}

#endif

/* e^(difference / tau), factor = log2(e) / tau; 0 for -infinity. */
static __device__ inline float xdi_cuda_exp_of(float difference, float factor) {
    return xdi_cuda_power(__fmul_rn(difference, factor));
}

/* x - reference, where a shard of only -infinity has -infinity as its reference. */
static __device__ inline float xdi_cuda_minus(float x, float reference) {
    return reference == -INFINITY ? -INFINITY : __fsub_rn(x, reference);
}

/* The sum of eight terms, as a tree. */
static __device__ inline float xdi_cuda_sum_of(const xdi_cuda_eight &x) {
    return __fadd_rn(__fadd_rn(__fadd_rn(x.at[0], x.at[1]), __fadd_rn(x.at[2], x.at[3])),
                     __fadd_rn(__fadd_rn(x.at[4], x.at[5]), __fadd_rn(x.at[6], x.at[7])));
}

/* The largest of eight elements that is not NaN, else -infinity. */
static __device__ inline float xdi_cuda_max_of(const xdi_cuda_eight &x) {
    float max = -INFINITY;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) max = fmaxf(max, x.at[i]);
    return max;
}

/* ---- the largest element of a row ---- */

struct xdi_cuda_largest {
    float max;
    int broken;  /* a NaN or +infinity in the row */
    int64_t arg; /* the lowest column that has max; INT64_MAX without columns */
};

struct xdi_cuda_largest_join {
    __device__ xdi_cuda_largest operator()(xdi_cuda_largest a, const xdi_cuda_largest &b) const {
        if (b.max > a.max || (b.max == a.max && b.arg < a.arg)) {
            a.max = b.max;
            a.arg = b.arg;
        }
        a.broken |= b.broken;
        return a;
    }
};

/* Adds eight elements to what a thread has seen of a row. */
static __device__ inline void xdi_cuda_see(const xdi_cuda_eight &x, int64_t column, int64_t columns,
                                           xdi_cuda_largest *best) {
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
        if (column + i >= columns) continue;
        const float value = isnan(x.at[i]) ? -INFINITY : x.at[i]; /* so that arg is a column in any case */
        if (!(x.at[i] < INFINITY)) best->broken = 1;
        if (value > best->max || best->arg == INT64_MAX) {
            best->max = value;
            best->arg = column + i;
        }
    }
}

/* Over the row's first `columns`, on every thread of the team: xdi_loss_row_max. */
template <int TEAM>
static __device__ inline xdi_cuda_largest xdi_cuda_row_largest(const xd_rows &x, int64_t row,
                                                               int64_t columns) {
    const xdi_cuda_largest none = { -INFINITY, 0, INT64_MAX };
    xdi_cuda_largest best = none;
    for (int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>(); c < columns; c += XDI_CUDA_EIGHT * TEAM)
        xdi_cuda_see(xdi_cuda_read_any(x, row, c, columns), c, columns, &best);
    return xdi_cuda_team_reduce<TEAM>(best, none, xdi_cuda_largest_join());
}

/* ---- sums ---- */

/* N sums of terms: doubles, or xd_fixed with the terms that do not fit counted. */
template <int N, bool FIXED> struct xdi_cuda_sums;

template <int N> struct xdi_cuda_sums<N, false> {
    typedef double sum_type;
    struct totals {
        double sum[N];
    };
    struct join {
        __device__ totals operator()(totals a, const totals &b) const {
            XD_UNROLL
            for (int i = 0; i < N; i++) a.sum[i] = __dadd_rn(a.sum[i], b.sum[i]);
            return a;
        }
    };
    totals whole;
    float part[N]; /* of the eight columns at work */

    __device__ xdi_cuda_sums() {
        XD_UNROLL
        for (int i = 0; i < N; i++) {
            whole.sum[i] = 0.0;
            part[i] = 0.0f;
        }
    }
    __device__ void add(int which, float term) {
        part[which] = __fadd_rn(part[which], term);
    }
    __device__ void add_wide(int which, double term) {
        whole.sum[which] = __dadd_rn(whole.sum[which], term);
    }
    __device__ void end_eight() {
        XD_UNROLL
        for (int i = 0; i < N; i++) {
            add_wide(i, (double)part[i]);
            part[i] = 0.0f;
        }
    }
};

/* xd_fixed_put; a term or a sum that does not fit is counted instead. */
struct xdi_cuda_misfits {
    int64_t large, infinite;
};

static __device__ inline void xdi_cuda_fixed_add(xd_fixed *sum, double term, xdi_cuda_misfits *misfits) {
    if (xd_fixed_put(sum, term)) return;
    if (isfinite(term))
        misfits->large++;
    else
        misfits->infinite++;
}

/* Word by word: a sum in memory begins on any 8 bytes. */
static __device__ inline void xdi_cuda_fixed_put(xd_fixed *to, xd_fixed sum) {
    to->high = sum.high;
    to->low = sum.low;
}

template <int N> struct xdi_cuda_sums<N, true> {
    typedef xd_fixed sum_type;
    struct totals {
        xd_fixed sum[N];
        xdi_cuda_misfits misfits;
    };
    struct join {
        __device__ totals operator()(totals a, const totals &b) const {
            XD_UNROLL
            for (int i = 0; i < N; i++) {
                const int64_t next = a.sum[i].high + b.sum[i].high; /* both are below 2^55 */
                const bool fits = next < (int64_t)1 << 55 && next > -((int64_t)1 << 55);
                a.sum[i].high = fits ? next : 0;
                a.sum[i].low += b.sum[i].low;
                a.misfits.large += fits ? 0 : 1;
            }
            a.misfits.large += b.misfits.large;
            a.misfits.infinite += b.misfits.infinite;
            return a;
        }
    };
    totals whole;

    __device__ xdi_cuda_sums() {
        memset(&whole, 0, sizeof whole);
    }
    __device__ void add(int which, float term) {
        add_wide(which, (double)term);
    }
    __device__ void add_wide(int which, double term) {
        xdi_cuda_fixed_add(&whole.sum[which], term, &whole.misfits);
    }
    __device__ void end_eight() {}
};

/* The team's sums on every thread of it. */
template <int TEAM, int N, bool FIXED>
static __device__ inline typename xdi_cuda_sums<N, FIXED>::totals
xdi_cuda_team_totals(const xdi_cuda_sums<N, FIXED> &mine) {
    const xdi_cuda_sums<N, FIXED> none;
    return xdi_cuda_team_reduce<TEAM>(mine.whole, none.whole, typename xdi_cuda_sums<N, FIXED>::join());
}

/* ---- sorting ---- */

/* Sorts `count` items by the TEAM threads that call it: order(low, high) orders the items at two indices, low < high.
 * Bitonic, every step ascending, so that indices past the end need no items. The steps of a team see each other's
 * writes. */
template <int TEAM, typename Order>
static __device__ inline void xdi_cuda_bitonic(int64_t count, Order order) {
    for (int64_t size = 2; size / 2 < count; size *= 2)
        for (int64_t stride = size / 2; stride > 0; stride /= 2) {
            XD_UNROLL_N(1)
            for (int64_t i = xdi_cuda_team_thread<TEAM>(); i < count; i += TEAM) {
                const int64_t partner = stride == size / 2 ? i ^ (size - 1) : i ^ stride;
                if (partner > i && partner < count) order(i, partner);
            }
            xdi_cuda_team_sync<TEAM>();
        }
}
