/* Losses of rows that stay on the chip: what they have in common. See loss_ring.cu.
 *
 * BF16 and F32 differ in how a gradient is computed. BF16: an exponent is one product-sum, x s + c, in units of 2, and the weight
 * of the gradient is part of c. F32: its bytes take twice as long, and its gradients would show that c is rounded, so powers are
 * relative to the largest element and multiplied by what their sum and weight are. */

enum xdi_cuda_ring_kind {
    XDI_CUDA_RING_HARD,
    XDI_CUDA_RING_SMOOTH, /* hard, with a smoothed label */
    XDI_CUDA_RING_FORWARD,
    XDI_CUDA_RING_REVERSE,
    XDI_CUDA_RING_JSD,
    XDI_CUDA_RING_BOTH,   /* hard and forward */
    XDI_CUDA_RING_SHARED, /* the same at temperature 1: one exponential */
    XDI_CUDA_RING_KINDS
};
static_assert((int)XDI_CUDA_RING_KINDS == (int)XDI_CUDA_RING_MOST_KINDS, "see xd_cuda");

template <int KIND> struct xdi_cuda_ring_is {
    static constexpr bool BOTH = KIND == XDI_CUDA_RING_BOTH || KIND == XDI_CUDA_RING_SHARED;
    static constexpr bool SMOOTH = KIND == XDI_CUDA_RING_SMOOTH, SHARED = KIND == XDI_CUDA_RING_SHARED;
    static constexpr bool HARD = KIND == XDI_CUDA_RING_HARD || SMOOTH || BOTH, SOFT = !(HARD && !BOTH);
    static constexpr bool FORWARD = KIND == XDI_CUDA_RING_FORWARD || BOTH;
    static constexpr bool REVERSE = KIND == XDI_CUDA_RING_REVERSE, JSD = KIND == XDI_CUDA_RING_JSD;
    static constexpr bool ALONE = HARD && !SOFT; /* the only exponential is the hard loss's */
    static constexpr int TENSORS = SOFT ? 2 : 1;
};

/* Sums of a thread or a block: those of kernel/loss.h, then what is counted apart. */
enum {
    XDI_CUDA_RING_ONES = XDI_CUDA_LOSS_TERMS, /* the student's columns that have its largest element, */
    XDI_CUDA_RING_TEACHER_ONES,               /* and the teacher's */
    XDI_CUDA_RING_APART,                      /* forward: sum of (x - M) s at the latter; reverse: of y at the former */
    XDI_CUDA_RING_SUMS
};

/* Of a warp: four of kernel/loss.h, and four apart. */
enum { XDI_CUDA_RING_FOUR = 4, XDI_CUDA_RING_TOTALS = 2 * XDI_CUDA_RING_FOUR };

template <int KIND> static __host__ __device__ constexpr bool xdi_cuda_ring_sums_up(int i) {
    typedef xdi_cuda_ring_is<KIND> is;
    return i == XD_LOSS_HARD          ? is::HARD && !is::SHARED
           : i == XD_LOSS_SOFT        ? is::SOFT
           : i == XD_LOSS_TEACHER     ? is::SOFT
           : i == XD_LOSS_CROSS       ? is::FORWARD || is::REVERSE
           : i == XD_LOSS_LINEAR      ? is::SMOOTH
           : i == XDI_CUDA_RING_APART ? is::FORWARD || is::REVERSE
           : i == XDI_CUDA_RING_ONES  ? true
                                      : is::SOFT;
}

/* Which of a warp's sums is sum i of a thread. */
template <int KIND> static __host__ __device__ constexpr int xdi_cuda_ring_total_of(int i) {
    return i >= XDI_CUDA_RING_ONES ? XDI_CUDA_RING_FOUR + i - XDI_CUDA_RING_ONES
                                   : (i > 0 && xdi_cuda_ring_sums_up<KIND>(0)) + (i > 1 && xdi_cuda_ring_sums_up<KIND>(1)) +
                                         (i > 2 && xdi_cuda_ring_sums_up<KIND>(2)) + (i > 3 && xdi_cuda_ring_sums_up<KIND>(3));
}

/* What is known of the whole row before its gradient. */
struct xdi_cuda_ring_row {
    float max, teacher_max, beside; /* beside: the teacher's logit at arg */
    float hard, soft, teacher;      /* sums of powers relative to the largest */
    float top, mean;                /* as in xd_loss_row, in nats */
    int arg;                        /* in this block's columns; may lie outside */
};

/* What a call's rows have in common: how they are cut, and factors, which the host computes. */
struct xdi_cuda_ring_call {
    int64_t slice; /* columns of a block */
    int stages;
    float hard_factor, soft_factor, per_tau; /* log2(e), log2(e) / tau, 1 / tau */
    float beta, uniform;                     /* uniform: weight of every column's label */
    double hard_weight, soft_weight;         /* of the gradient; soft / tau */
};

/* With a row's scale. */
struct xdi_cuda_ring_weights {
    float hard, soft;
};

/* ---- pairs of 16-bit numbers ---- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

/* The larger of each half, and the smaller; a NaN counts as missing. */
static __device__ inline uint32_t xdi_cuda_pair_max(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

static __device__ inline uint32_t xdi_cuda_pair_min(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

static __device__ inline uint32_t xdi_cuda_bf16_pair(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

static __device__ inline uint32_t xdi_cuda_f16_pair(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

static __device__ inline float xdi_cuda_log_in(uint32_t pair, int half) {
    float y;
    const uint16_t bits = (uint16_t)(half ? pair >> 16 : pair & 0xffffu);
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

#else

static __device__ inline float xdi_cuda_half_of(uint32_t pair, int half) {
    return xd_bits_from_bf16((uint16_t)(half ? pair >> 16 : pair & 0xffffu));
}

static __device__ inline uint32_t xdi_cuda_pair_max(uint32_t a, uint32_t b) {
    const float low = fmaxf(xdi_cuda_half_of(a, 0), xdi_cuda_half_of(b, 0));
    return xd_bits_to_bf16(low) | (uint32_t)xd_bits_to_bf16(fmaxf(xdi_cuda_half_of(a, 1), xdi_cuda_half_of(b, 1))) << 16;
}

static __device__ inline uint32_t xdi_cuda_pair_min(uint32_t a, uint32_t b) {
    const float low = fminf(xdi_cuda_half_of(a, 0), xdi_cuda_half_of(b, 0));
    return xd_bits_to_bf16(low) | (uint32_t)xd_bits_to_bf16(fminf(xdi_cuda_half_of(a, 1), xdi_cuda_half_of(b, 1))) << 16;
}

static __device__ inline uint32_t xdi_cuda_bf16_pair(float low, float high) {
    return xd_bits_to_bf16(low) | (uint32_t)xd_bits_to_bf16(high) << 16;
}

static __device__ inline uint32_t xdi_cuda_f16_pair(float low, float high) {
    return xd_bits_to_f16(low) | (uint32_t)xd_bits_to_f16(high) << 16;
}

static __device__ inline float xdi_cuda_log_in(uint32_t pair, int half) {
    return xd_bits_from_f16((uint16_t)(half ? pair >> 16 : pair & 0xffffu));
}

#endif

static __device__ inline float xdi_cuda_pair_low(uint32_t pair) {
    return xd_float_of_bits(pair << 16);
}

static __device__ inline float xdi_cuda_pair_high(uint32_t pair) {
    return xd_float_of_bits(pair & 0xffff0000u);
}

typedef xdi_cuda_pack<uint32_t> xdi_cuda_words;

static __device__ inline xdi_cuda_eight xdi_cuda_words_widened(const xdi_cuda_words &words) {
    xdi_cuda_raw<xdi_cuda_bf16> raw;
    raw.pairs = words;
    return raw.widened();
}

static __device__ inline uint32_t xdi_cuda_words_max(const xdi_cuda_words &w) {
    return xdi_cuda_pair_max(xdi_cuda_pair_max(w.at[0], w.at[1]), xdi_cuda_pair_max(w.at[2], w.at[3]));
}

static __device__ inline uint32_t xdi_cuda_words_min(const xdi_cuda_words &w) {
    return xdi_cuda_pair_min(xdi_cuda_pair_min(w.at[0], w.at[1]), xdi_cuda_pair_min(w.at[2], w.at[3]));
}

/* ---- where a thread's columns lie in a stage: four packs, of one tensor or two of each of two, each a part from the next ---- */

template <typename X, int TENSORS> struct xdi_cuda_ring_form;

/* Eight columns a pack. `left`: how many packs of the tensor the block has from this thread's first one of the stage on. */
template <int TENSORS> struct xdi_cuda_ring_form<xdi_cuda_bf16, TENSORS> {
    enum {
        FINE = 0,
        PARTS = 4 / TENSORS, /* times that a thread has eight columns */
        BYTES = XDI_CUDA_RING_STAGE / TENSORS,
        PACKS = BYTES / 16,
        COLUMNS = BYTES / 2
    };
    static __device__ bool has(int part, int left) {
        return part == 0 || left > part * XDI_CUDA_RING_LANES;
    }
    static __device__ bool has_second(int, int) {
        return true;
    }
    static __device__ xdi_cuda_words words(const unsigned char *at, int part) {
        return xdi_cuda_load16(reinterpret_cast<const uint32_t *>(at + part * XDI_CUDA_RING_PART));
    }
    static __device__ xdi_cuda_eight read(const unsigned char *at, int part, int) {
        return xdi_cuda_words_widened(words(at, part));
    }
    static __device__ int column(int part, int i) {
        return part * (XDI_CUDA_RING_PART / 2) + i;
    }
};

/* Four columns a pack; -infinity where there is no second one. */
template <int TENSORS> struct xdi_cuda_ring_form<float, TENSORS> {
    enum { FINE = 1, PARTS = 2 / TENSORS, BYTES = XDI_CUDA_RING_STAGE / TENSORS, PACKS = BYTES / 16, COLUMNS = BYTES / 4 };

    static __device__ bool has(int part, int left) {
        return part == 0 || left > 2 * part * XDI_CUDA_RING_LANES;
    }
    static __device__ bool has_second(int part, int left) {
        return left > (2 * part + 1) * XDI_CUDA_RING_LANES;
    }
    static __device__ xdi_cuda_eight read(const unsigned char *at, int part, int left) {
        const float none = -INFINITY;
        const float *const from = reinterpret_cast<const float *>(at + 2 * part * XDI_CUDA_RING_PART);
        const xdi_cuda_pack<float> low = xdi_cuda_load16(from);
        xdi_cuda_pack<float> high = { { none, none, none, none } };
        if (has_second(part, left)) high = xdi_cuda_load16(from + XDI_CUDA_RING_PART / 4);
        return { { low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3] } };
    }
    static __device__ int column(int part, int i) {
        return (2 * part + i / 4) * (XDI_CUDA_RING_PART / 4) + i % 4;
    }
};

/* 16 bytes to shared memory. */
template <typename T> static __device__ inline void xdi_cuda_put16(void *to, const xdi_cuda_pack<T> &pack) {
    XDI_CUDA_ALIGNED16(to);
    memcpy(static_cast<xdi_cuda_bits16 *>(to), &pack, sizeof pack);
}

/* ---- over the lanes of a warp, the same on every lane ---- */

template <int LANES, typename T> static __device__ inline T xdi_cuda_ring_add_lanes(T value) {
    XD_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) value = xdi_cuda_add()(value, xdi_cuda_shuffle_xor(value, mask));
    return value;
}

template <int LANES> static __device__ inline float xdi_cuda_ring_max_lanes(float value) {
    XD_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}

/* An integer in the order of the numbers, which are no NaN, and back. */
static __device__ inline int xdi_cuda_ring_order(float value) {
    const int bits = (int)xd_bits_of_float(value);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

static __device__ inline float xdi_cuda_ring_ordered(int order) {
    return xd_float_of_bits((uint32_t)(order ^ (order >> 31 & 0x7fffffff)));
}

/* Adds two sums over pairs of lanes: a lane whose number has `bit` gets that of b, the others that of a. */
static __device__ inline float xdi_cuda_ring_add_two(float a, float b, int bit) {
    const bool odd = (threadIdx.x & (unsigned)bit) != 0;
    const float own = odd ? b : a, other = odd ? a : b;
    return __fadd_rn(own, __shfl_xor_sync(0xffffffffu, other, bit));
}

/* Adds up COUNT sums over a warp: lane k has that of value k, k < COUNT. */
template <int COUNT> static __device__ inline float xdi_cuda_ring_add_four(float a, float b, float c, float d) {
    float sum = a;
    if (COUNT > 1) sum = xdi_cuda_ring_add_two(a, b, 1);
    if (COUNT > 2) sum = xdi_cuda_ring_add_two(sum, xdi_cuda_ring_add_two(c, d, 1), 2);
    XD_UNROLL
    for (int mask = COUNT > 2 ? 4 : COUNT; mask < XDI_CUDA_WARP; mask *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
    return sum;
}
