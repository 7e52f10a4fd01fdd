/* BF16 and F32 as doubles and back, in integers: a conversion to or from double takes as long as four other instructions or more.
 * What follows is exact in the range that it names; who calls it looks whether numbers were in it, and has another way. */

/* A lowered number is 2^-896 times the number: then the exponents of both types have the same bits. Subnormal numbers of F32 are
 * subnormal doubles. */
#define XDI_CUDA_RAISE 5.282945311356653e+269 /* 2^896 */

static __device__ inline double xdi_cuda_double_of(uint32_t high, uint32_t low) {
    return __hiloint2double((int)high, (int)low);
}

static __device__ inline uint32_t xdi_cuda_high_of(double value) {
    return (uint32_t)__double2hiint(value);
}

static __device__ inline uint32_t xdi_cuda_low_of(double value) {
    return (uint32_t)__double2loint(value);
}

/* Rounded to F32. gcc 12.2 makes copies of two neighbours that are rounded and widened again: hence "volatile" in the emulation. */
static __device__ inline double xdi_cuda_f32_of(double value) {
#if defined(XD_EMU)
    volatile float narrow = (float)value;
#else
    const float narrow = (float)value;
#endif
    return (double)narrow;
}

/* A finite F32 number of no sign, lowered. */
static __device__ inline double xdi_cuda_lowered(uint32_t bits) {
    return xdi_cuda_double_of(bits >> 3, bits << 29);
}

/* A finite BF16 number out of two, lowered. */
static __device__ inline double xdi_cuda_upper_half(uint32_t word) {
    return xdi_cuda_double_of((uint32_t)((int32_t)word >> 3) & 0x8fffe000u, 0);
}

static __device__ inline double xdi_cuda_lower_half(uint32_t word) {
    return xdi_cuda_upper_half(word << 16);
}

/* Bits of a where the mask has ones, and of b elsewhere. */
static __device__ inline uint32_t xdi_cuda_choose_bits(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
    return bits;
#else
    return (mask & a) | (~mask & b);
#endif
}

/* A lowered number, rounded to what F32 holds; the last 29 bits of the double do not count. */
static __device__ inline uint64_t xdi_cuda_as_f32_bits(double lowered) {
    const uint64_t bits = (uint64_t)__double_as_longlong(lowered);
    return bits + (0x0fffffffu + (bits >> 29 & 1u));
}

static __device__ inline double xdi_cuda_as_f32(double lowered) {
    return __longlong_as_double((long long)(xdi_cuda_as_f32_bits(lowered) & ~(uint64_t)0x1fffffffu));
}

/* The F32 number of a lowered one; bits that it has not are cut off. */
static __device__ inline float xdi_cuda_raised(double lowered) {
    const uint32_t low = xdi_cuda_low_of(lowered), high = xdi_cuda_high_of(lowered);
    return xd_float_of_bits(xdi_cuda_choose_bits(0x80000000u, high, __funnelshift_l(low, high, 3)));
}

/* Whether BF16 numbers, two in a word, are all finite; maybe not where products of them overflow. */
struct xdi_cuda_finite {
    uint32_t found = 0;

    /* 0 x, which is a NaN unless x is finite */
    __device__ void note(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(found) : "r"(x), "r"(0));
#else
        found |= (((x & 0x7f807f80u) + 0x00800080u) & 0x80008000u) >> 1;
#endif
    }
    __device__ void note(uint32_t x, uint32_t y, uint32_t z) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        uint32_t all;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(all) : "r"(x), "r"(y), "r"(z));
        note(all);
#else
        note(x), note(y), note(z);
#endif
    }
    __device__ bool holds() const {
        return (found & 0x7fff7fffu) == 0;
    }
};

/* The upper halves of two words in one. */
static __device__ inline uint32_t xdi_cuda_upper_halves(uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, 0x7632);
#else
    return low >> 16 | (high & 0xffff0000u);
#endif
}

/* Doubles that become BF16, rounded once, and whether all of them are zero or normal numbers of it. */
struct xdi_cuda_bf16_range {
    uint32_t least = 0xffffffffu, most = 0;

    /* In the upper half of a word. A double that is not exact in the upper word gets a last bit there, so that it is no tie. */
    __device__ uint32_t round(double value) {
        const uint32_t low = xdi_cuda_low_of(value), high = xdi_cuda_high_of(value) | (low < 1u ? low : 1u);
        const uint32_t rounded = high + (0xfffu + (high >> 13 & 1u)), magnitude = rounded << 1;
        least = magnitude - 0x1fffu < least ? magnitude - 0x1fffu : least; /* 0x1ffe is that of zero */
        most = magnitude > most ? magnitude : most;
        return xdi_cuda_choose_bits(0xc0000000u, rounded, rounded << 3);
    }
    __device__ bool holds() const {
        return least >= 0x70200000u - 0x1fffu && most < 0x8fe00000u;
    }
};
