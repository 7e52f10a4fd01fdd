/* Arithmetic of the PTX interpreter, by opcode and type. Each operation is a small struct; templates make a handler of it that
 * runs over the lanes. */
#include "ptx.h"

#include <algorithm>
#include <fenv.h>
#include <math.h>
#include <type_traits>

namespace emu {
namespace ptx {

/* ---- handlers over lanes ---- */

template <typename R, typename A, typename Op> static void map1(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]);
    each(active, [=](unsigned lane) { to[lane] = bits_of<R>(Op::of(value_of<A>(a[lane]))); });
}

template <typename R, typename A, typename B, typename Op>
static void map2(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]);
    each(active, [=](unsigned lane) { to[lane] = bits_of<R>(Op::of(value_of<A>(a[lane]), value_of<B>(b[lane]))); });
}

template <typename R, typename A, typename B, typename C, typename Op>
static void map3(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]), *c = lanes.row(in.from[2]);
    each(active, [=](unsigned lane) {
        to[lane] = bits_of<R>(Op::of(value_of<A>(a[lane]), value_of<B>(b[lane]), value_of<C>(c[lane])));
    });
}

/* ---- another rounding, and saturation ---- */

static void adjusted(const Instruction &in, Lanes &lanes, unsigned active) {
    if (in.rounding != FE_TONEAREST) fesetround(in.rounding);
    in.inner(in, lanes, active);
    if (in.rounding != FE_TONEAREST) fesetround(FE_TONEAREST);
    if (!in.saturates) return;
    uint64_t *to = lanes.row(in.to[0]);
    each(active, [=](unsigned lane) {
        const float x = value_of<float>(to[lane]);
        to[lane] = bits_of(x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f);
    });
}

void adjust(Instruction *in, int rounding, bool saturates) {
    if (rounding == FE_TONEAREST && !saturates) return;
    in->inner = in->handler;
    in->handler = adjusted;
    in->rounding = rounding;
    in->saturates = saturates;
}

int Statement::take_rounding() {
    if (take("rz")) return FE_TOWARDZERO;
    if (take("rm")) return FE_DOWNWARD;
    if (take("rp")) return FE_UPWARD;
    take("rn");
    return FE_TONEAREST;
}

/* ---- integers ---- */

template <typename T> using Unsigned = typename std::make_unsigned<T>::type;
template <typename T> static T wrapped(unsigned long long value) {
    return (T)(Unsigned<T>)value;
}

#define OPERATION1(name, expression)  \
    template <typename T> struct name { \
        static T of(T a) {            \
            return expression;        \
        }                             \
    };
#define OPERATION2(name, expression)  \
    template <typename T> struct name { \
        static T of(T a, T b) {       \
            return expression;        \
        }                             \
    };

typedef unsigned long long Wide;

OPERATION2(Add, wrapped<T>((Wide)a + (Wide)b))
OPERATION2(Sub, wrapped<T>((Wide)a - (Wide)b))
OPERATION2(MulLow, wrapped<T>((Wide)a *(Wide)b))
OPERATION2(And, (T)(a & b))
OPERATION2(Or, (T)(a | b))
OPERATION2(Xor, (T)(a ^ b))
OPERATION1(Not, (T)~a)
OPERATION1(Neg, wrapped<T>(0 - (Wide)a))
OPERATION1(Abs, a < 0 ? wrapped<T>(0 - (Wide)a) : a)
OPERATION2(Min, b < a ? b : a)
OPERATION2(Max, a < b ? b : a)

/* What a GPU gives for a divisor of zero: all bits. */
template <typename T> struct Div {
    static T of(T a, T b) {
        if (b == 0) return (T)~(T)0;
        if (std::is_signed<T>::value && b == (T)-1) return wrapped<T>(0 - (Wide)a);
        return (T)(a / b);
    }
};

template <typename T> struct Rem {
    static T of(T a, T b) {
        if (b == 0) return a;
        return std::is_signed<T>::value && b == (T)-1 ? (T)0 : (T)(a % b);
    }
};

template <typename T> struct MulHigh {
    static T of(T a, T b) {
        typedef typename std::conditional<std::is_signed<T>::value, __int128, unsigned __int128>::type Product;
        return (T)(((Product)a * (Product)b) >> (8 * sizeof(T)));
    }
};

template <typename T> struct AddSaturated {
    static T of(T a, T b) {
        T sum;
        if (!__builtin_add_overflow(a, b, &sum)) return sum;
        return a < 0 ? (T)INT32_MIN : (T)INT32_MAX;
    }
};

template <typename T> struct SubSaturated {
    static T of(T a, T b) {
        T difference;
        if (!__builtin_sub_overflow(a, b, &difference)) return difference;
        return a < 0 ? (T)INT32_MIN : (T)INT32_MAX;
    }
};

template <typename T> struct ShiftLeft {
    static T of(T a, uint32_t by) {
        return by < 8 * sizeof(T) ? wrapped<T>((Wide)a << by) : (T)0;
    }
};

template <typename T> struct ShiftRight {
    static T of(T a, uint32_t by) {
        const uint32_t bits = 8 * sizeof(T);
        return by < bits ? (T)(a >> by) : (T)(a < 0 ? -1 : 0);
    }
};

template <typename T> struct MadLow {
    static T of(T a, T b, T c) {
        return wrapped<T>((Wide)a * (Wide)b + (Wide)c);
    }
};

template <typename T> struct MadHigh {
    static T of(T a, T b, T c) {
        return wrapped<T>((Wide)MulHigh<T>::of(a, b) + (Wide)c);
    }
};

/* The product has twice the bits. */
template <typename T, typename W> struct MulWide {
    static W of(T a, T b) {
        return (W)((W)a * (W)b);
    }
};

template <typename T, typename W> struct MadWide {
    static W of(T a, T b, W c) {
        return wrapped<W>((Wide)MulWide<T, W>::of(a, b) + (Wide)c);
    }
};

template <template <typename> class Op> static Handler integer1(Type type) {
    switch (type) {
    case kS16: return map1<int16_t, int16_t, Op<int16_t>>;
    case kS32: return map1<int32_t, int32_t, Op<int32_t>>;
    case kS64: return map1<int64_t, int64_t, Op<int64_t>>;
    case kB16: return map1<uint16_t, uint16_t, Op<uint16_t>>;
    case kB32: return map1<uint32_t, uint32_t, Op<uint32_t>>;
    case kB64: return map1<uint64_t, uint64_t, Op<uint64_t>>;
    default: return nullptr;
    }
}

template <template <typename> class Op> static Handler integer2(Type type) {
    switch (type) {
    case kS16: return map2<int16_t, int16_t, int16_t, Op<int16_t>>;
    case kS32: return map2<int32_t, int32_t, int32_t, Op<int32_t>>;
    case kS64: return map2<int64_t, int64_t, int64_t, Op<int64_t>>;
    case kB16:
    case kU16: return map2<uint16_t, uint16_t, uint16_t, Op<uint16_t>>;
    case kB32:
    case kU32: return map2<uint32_t, uint32_t, uint32_t, Op<uint32_t>>;
    case kB64:
    case kU64: return map2<uint64_t, uint64_t, uint64_t, Op<uint64_t>>;
    default: return nullptr;
    }
}

template <template <typename> class Op> static Handler shift(Type type) {
    switch (type) {
    case kS16: return map2<int16_t, int16_t, uint32_t, Op<int16_t>>;
    case kS32: return map2<int32_t, int32_t, uint32_t, Op<int32_t>>;
    case kS64: return map2<int64_t, int64_t, uint32_t, Op<int64_t>>;
    case kB16:
    case kU16: return map2<uint16_t, uint16_t, uint32_t, Op<uint16_t>>;
    case kB32:
    case kU32: return map2<uint32_t, uint32_t, uint32_t, Op<uint32_t>>;
    case kB64:
    case kU64: return map2<uint64_t, uint64_t, uint32_t, Op<uint64_t>>;
    default: return nullptr;
    }
}

template <template <typename> class Op> static Handler integer3(Type type) {
    switch (type) {
    case kS16: return map3<int16_t, int16_t, int16_t, int16_t, Op<int16_t>>;
    case kU16: return map3<uint16_t, uint16_t, uint16_t, uint16_t, Op<uint16_t>>;
    case kS32: return map3<int32_t, int32_t, int32_t, int32_t, Op<int32_t>>;
    case kU32: return map3<uint32_t, uint32_t, uint32_t, uint32_t, Op<uint32_t>>;
    case kS64: return map3<int64_t, int64_t, int64_t, int64_t, Op<int64_t>>;
    case kU64: return map3<uint64_t, uint64_t, uint64_t, uint64_t, Op<uint64_t>>;
    default: return nullptr;
    }
}

static Handler wide_product(Type type) {
    switch (type) {
    case kS16: return map2<int32_t, int16_t, int16_t, MulWide<int16_t, int32_t>>;
    case kU16: return map2<uint32_t, uint16_t, uint16_t, MulWide<uint16_t, uint32_t>>;
    case kS32: return map2<int64_t, int32_t, int32_t, MulWide<int32_t, int64_t>>;
    case kU32: return map2<uint64_t, uint32_t, uint32_t, MulWide<uint32_t, uint64_t>>;
    default: return nullptr;
    }
}

static Handler wide_sum(Type type) {
    switch (type) {
    case kS16: return map3<int32_t, int16_t, int16_t, int32_t, MadWide<int16_t, int32_t>>;
    case kU16: return map3<uint32_t, uint16_t, uint16_t, uint32_t, MadWide<uint16_t, uint32_t>>;
    case kS32: return map3<int64_t, int32_t, int32_t, int64_t, MadWide<int32_t, int64_t>>;
    case kU32: return map3<uint64_t, uint32_t, uint32_t, uint64_t, MadWide<uint32_t, uint64_t>>;
    default: return nullptr;
    }
}

void set_sum(Instruction *in, const Operand &to, const Operand &base, const Operand &number) {
    in->handler = map2<uint64_t, uint64_t, uint64_t, Add<uint64_t>>;
    in->to[0] = to;
    in->from[0] = base;
    in->from[1] = number;
}

/* ---- bits ---- */

template <typename T> struct CountOnes {
    static uint32_t of(T a) {
        return (uint32_t)__builtin_popcountll(a);
    }
};

template <typename T> struct CountZeros { /* from the top */
    static uint32_t of(T a) {
        const uint32_t bits = 8 * sizeof(T);
        return a ? (uint32_t)__builtin_clzll(a) - (64 - bits) : bits;
    }
};

template <typename T> struct Reverse {
    static T of(T a) {
        T reversed = 0;
        for (unsigned i = 0; i < 8 * sizeof(T); i++) reversed = (T)(reversed << 1 | (a >> i & 1));
        return reversed;
    }
};

/* The position of the highest bit that differs from the sign; all ones when there is none. */
template <typename T> struct FindHighest {
    static uint32_t of(T a) {
        const Unsigned<T> bits = (Unsigned<T>)(a < 0 ? ~a : a);
        return bits ? 63 - (uint32_t)__builtin_clzll(bits) : 0xffffffffu;
    }
};

template <typename T> struct Extract {
    static T of(T a, uint32_t position, uint32_t length) {
        const int bits = 8 * sizeof(T), from = (int)(position & 255), count = (int)(length & 255);
        if (count == 0) return 0;
        const bool is_signed = std::is_signed<T>::value;
        const int last = std::min(from + count - 1, bits - 1);
        const bool sign = is_signed && ((Unsigned<T>)a >> last & 1);
        Unsigned<T> field = from < bits ? (Unsigned<T>)((Unsigned<T>)a >> from) : 0;
        const int held = std::max(0, std::min(count, bits - from));
        if (held < bits) field &= (Unsigned<T>)(((Unsigned<T>)1 << held) - 1);
        if (sign && held < bits) field |= (Unsigned<T>)(~(Unsigned<T>)0 << held);
        return (T)field;
    }
};

template <typename T> struct Insert {
    static T of(T a, T b, uint32_t position, uint32_t length) {
        const unsigned bits = 8 * sizeof(T), from = position & 255, count = length & 255;
        if (from >= bits || count == 0) return b;
        const T ones = count >= bits ? (T)~(T)0 : (T)(((T)1 << count) - 1);
        const T field = (T)(ones << from);
        return (T)((b & ~field) | ((T)(a << from) & field));
    }
};

template <typename T> static void insert(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]);
    const uint64_t *position = lanes.row(in.from[2]), *length = lanes.row(in.from[3]);
    each(active, [=](unsigned lane) {
        to[lane] = Insert<T>::of((T)a[lane], (T)b[lane], (uint32_t)position[lane], (uint32_t)length[lane]);
    });
}

/* Bytes of two words in any order; the fourth bit of a choice spreads the byte's sign. */
struct Permute {
    static uint32_t of(uint32_t a, uint32_t b, uint32_t selector) {
        const uint64_t bytes = (uint64_t)b << 32 | a;
        uint32_t result = 0;
        for (unsigned i = 0; i < 4; i++) {
            const unsigned chosen = selector >> 4 * i & 15u;
            unsigned byte = (unsigned)(bytes >> 8 * (chosen & 7u)) & 255u;
            if (chosen & 8u) byte = byte & 128u ? 255u : 0u;
            result |= byte << 8 * i;
        }
        return result;
    }
};

struct BitMask {
    static uint32_t of(uint32_t position, uint32_t length) {
        if (position >= 32 || length == 0) return 0;
        return (length >= 32 ? 0xffffffffu : (1u << length) - 1) << position;
    }
};

template <bool left, bool wrap> struct Funnel {
    static uint32_t of(uint32_t low, uint32_t high, uint32_t by) {
        const unsigned shift = wrap ? by & 31u : std::min(by, 32u);
        const uint64_t both = (uint64_t)high << 32 | low;
        return left ? (uint32_t)(both << shift >> 32) : (uint32_t)(both >> shift);
    }
};

static Handler funnel(Statement *statement) {
    const bool left = statement->take("l"), wrap = statement->take("wrap");
    if (!left) statement->take("r");
    if (!wrap) statement->take("clamp");
    if (left && wrap) return map3<uint32_t, uint32_t, uint32_t, uint32_t, Funnel<true, true>>;
    if (left) return map3<uint32_t, uint32_t, uint32_t, uint32_t, Funnel<true, false>>;
    if (wrap) return map3<uint32_t, uint32_t, uint32_t, uint32_t, Funnel<false, true>>;
    return map3<uint32_t, uint32_t, uint32_t, uint32_t, Funnel<false, false>>;
}

/* Any function of three bits: the table has its value for each. */
static void lookup3(const Instruction &in, Lanes &lanes, unsigned active) {
    each(active, [&](unsigned lane) {
        const uint32_t a = (uint32_t)lanes.row(in.from[0])[lane], b = (uint32_t)lanes.row(in.from[1])[lane];
        const uint32_t c = (uint32_t)lanes.row(in.from[2])[lane], table = (uint32_t)lanes.row(in.from[3])[lane];
        uint32_t result = 0;
        for (unsigned k = 0; k < 8; k++)
            if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        lanes.row(in.to[0])[lane] = result;
    });
}

/* ---- floating point ---- */

/* A GPU has one NaN of single precision as the result of arithmetic. */
static inline float settled(float x) {
    return x == x ? x : value_of<float>(0x7fffffff);
}
static inline double settled(double x) {
    return x;
}
static inline float no_subnormal(float x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

OPERATION2(FAdd, settled(a + b))
OPERATION2(FSub, settled(a - b))
OPERATION2(FMul, settled(a *b))
OPERATION2(FDiv, settled(a / b))
OPERATION1(FSqrt, settled((T)sqrt(a)))
OPERATION1(FInverse, settled(1 / a))
OPERATION1(FInverseRoot, settled((T)(1 / sqrt((double)a))))
OPERATION1(FNeg, -a)
OPERATION1(FAbs, (T)fabs(a))

template <> struct FSqrt<float> {
    static float of(float a) {
        return settled(sqrtf(a));
    }
};

template <typename T> struct Fma;
template <> struct Fma<float> {
    static float of(float a, float b, float c) {
        return settled(fmaf(a, b, c));
    }
};
template <> struct Fma<double> {
    static double of(double a, double b, double c) {
        return fma(a, b, c);
    }
};

/* A number wins over NaN; -0 is below +0. */
template <typename T> struct FMin {
    static T of(T a, T b) {
        if (a != a) return settled(b);
        if (b != b) return a;
        return a < b || (a == b && signbit(a)) ? a : b;
    }
};
template <typename T> struct FMax {
    static T of(T a, T b) {
        if (a != a) return settled(b);
        if (b != b) return a;
        return a > b || (a == b && signbit(b)) ? a : b;
    }
};
OPERATION2(FMinNan, a != a || b != b ? settled(a + b) : FMin<T>::of(a, b))
OPERATION2(FMaxNan, a != a || b != b ? settled(a + b) : FMax<T>::of(a, b))
OPERATION2(CopySign, (T)copysign(b, a))

OPERATION1(Ex2, settled(exp2f(a)))
OPERATION1(Lg2, settled(log2f(a)))
OPERATION1(Sine, settled(sinf(a)))
OPERATION1(Cosine, settled(cosf(a)))
OPERATION1(Tanh, settled(tanhf(a)))

/* Subnormal inputs and results count as zero. */
template <template <typename> class Op> struct Flushed1 {
    static float of(float a) {
        return no_subnormal(Op<float>::of(no_subnormal(a)));
    }
};
template <template <typename> class Op> struct Flushed2 {
    static float of(float a, float b) {
        return no_subnormal(Op<float>::of(no_subnormal(a), no_subnormal(b)));
    }
};
template <template <typename> class Op> struct Flushed3 {
    static float of(float a, float b, float c) {
        return no_subnormal(Op<float>::of(no_subnormal(a), no_subnormal(b), no_subnormal(c)));
    }
};

/* The upper halves of the approximate operations in double. */
template <template <typename> class Op> struct UpperHalf {
    static double of(double a) {
        const double upper = value_of<double>(bits_of(a) & 0xffffffff00000000u);
        return value_of<double>(bits_of(Op<double>::of(upper)) & 0xffffffff00000000u);
    }
};

/* ---- 16 bits, one or two in a register ---- */

float half_value(uint16_t bits, bool is_bf16) {
    if (is_bf16) return value_of<float>((uint64_t)bits << 16);
    const unsigned exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    const float sign = bits & 0x8000u ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? value_of<float>(0x7fffffff) : sign * INFINITY;
    return sign * ldexpf((float)(exponent ? fraction | 1024u : fraction), (int)std::max(exponent, 1u) - 25);
}

uint16_t half_of(double value, bool is_bf16, bool toward_zero) {
    if (value != value) return 0x7fff;
    const int fraction = is_bf16 ? 7 : 10, least = is_bf16 ? -126 : -14;
    const unsigned sign = signbit(value) ? 0x8000u : 0u, infinite = is_bf16 ? 0x7f80u : 0x7c00u;
    const double magnitude = fabs(value);
    if (magnitude == 0) return (uint16_t)sign;
    if (magnitude > 1e300) return (uint16_t)(sign | (toward_zero && !isinf(value) ? infinite - 1 : infinite));
    const int exponent = std::max(ilogb(magnitude), least);
    const double scaled = ldexp(magnitude, fraction - exponent);
    const unsigned digits = (unsigned)(toward_zero ? trunc(scaled) : nearbyint(scaled));
    const unsigned bits = ((unsigned)std::min(exponent - least, 300) << fraction) + digits;
    return (uint16_t)(sign | std::min(bits, toward_zero ? infinite - 1 : infinite));
}

template <bool is_bf16, unsigned parts, typename Op>
static void halves(const Instruction &in, Lanes &lanes, unsigned active) {
    each(active, [&](unsigned lane) {
        uint64_t result = 0;
        for (unsigned p = 0; p < parts; p++) {
            double value[3];
            for (unsigned i = 0; i < in.count; i++)
                value[i] = half_value((uint16_t)(lanes.row(in.from[i])[lane] >> 16 * p), is_bf16);
            result |= (uint64_t)half_of(Op::of(value), is_bf16, false) << 16 * p;
        }
        lanes.row(in.to[0])[lane] = result;
    });
}

#define HALF_OPERATION(name, expression)     \
    struct name {                            \
        static double of(const double *v) {  \
            return expression;               \
        }                                    \
    };
HALF_OPERATION(HalfAdd, v[0] + v[1])
HALF_OPERATION(HalfSub, v[0] - v[1])
HALF_OPERATION(HalfMul, v[0] * v[1])
HALF_OPERATION(HalfFma, fma(v[0], v[1], v[2]))
HALF_OPERATION(HalfMin, FMin<double>::of(v[0], v[1]))
HALF_OPERATION(HalfMax, FMax<double>::of(v[0], v[1]))
HALF_OPERATION(HalfMinNan, FMinNan<double>::of(v[0], v[1]))
HALF_OPERATION(HalfMaxNan, FMaxNan<double>::of(v[0], v[1]))
HALF_OPERATION(HalfNeg, -v[0])
HALF_OPERATION(HalfAbs, fabs(v[0]))

template <typename Op> static Handler half_handler(Type type) {
    switch (type) {
    case kF16: return halves<false, 1, Op>;
    case kF16x2: return halves<false, 2, Op>;
    case kBf16: return halves<true, 1, Op>;
    case kBf16x2: return halves<true, 2, Op>;
    default: return nullptr;
    }
}

/* ---- comparison and choice ---- */

enum Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <typename T, int comparison> static inline bool compare(T a, T b) {
    switch (comparison) {
    case kEq: return a == b;
    case kNe: return a < b || a > b;
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    case kGe: return a >= b;
    case kEqu: return !(a < b || a > b);
    case kNeu: return a != b;
    case kLtu: return !(a >= b);
    case kLeu: return !(a > b);
    case kGtu: return !(a <= b);
    case kGeu: return !(a < b);
    case kNum: return a == a && b == b;
    default: return a != a || b != b;
    }
}

enum Joining { kAlone, kJoinAnd, kJoinOr, kJoinXor };

static unsigned join(const Instruction &in, const Lanes &lanes, unsigned mask) {
    if (in.mode == kAlone) return mask;
    const unsigned other = maybe_negated(in, lanes, in.from[2]);
    return in.mode == kJoinAnd ? mask & other : in.mode == kJoinOr ? mask | other : mask ^ other;
}

template <typename T, int comparison> static void set_predicates(const Instruction &in, Lanes &lanes, unsigned active) {
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]);
    unsigned mask = 0;
    each(active, [&](unsigned lane) {
        mask |= (unsigned)compare<T, comparison>(value_of<T>(a[lane]), value_of<T>(b[lane])) << lane;
    });
    const unsigned first = join(in, lanes, mask), second = in.results > 1 ? join(in, lanes, ~mask) : 0;
    set_predicate(lanes, in.to[0], active, first);
    if (in.results > 1) set_predicate(lanes, in.to[1], active, second);
}

template <typename T> static Handler comparison_of(int comparison) {
    static const Handler handlers[] = {
        set_predicates<T, kEq>,  set_predicates<T, kNe>,  set_predicates<T, kLt>,  set_predicates<T, kLe>,
        set_predicates<T, kGt>,  set_predicates<T, kGe>,  set_predicates<T, kEqu>, set_predicates<T, kNeu>,
        set_predicates<T, kLtu>, set_predicates<T, kLeu>, set_predicates<T, kGtu>, set_predicates<T, kGeu>,
        set_predicates<T, kNum>, set_predicates<T, kNan>,
    };
    return handlers[comparison];
}

static Handler comparison_handler(Type type, int comparison) {
    if (type == kF32) return comparison_of<float>(comparison);
    if (type == kF64) return comparison_of<double>(comparison);
    if (comparison > kGe) return nullptr;
    switch (type) {
    case kS16: return comparison_of<int16_t>(comparison);
    case kS32: return comparison_of<int32_t>(comparison);
    case kS64: return comparison_of<int64_t>(comparison);
    case kB16:
    case kU16: return comparison_of<uint16_t>(comparison);
    case kB32:
    case kU32: return comparison_of<uint32_t>(comparison);
    case kB64:
    case kU64: return comparison_of<uint64_t>(comparison);
    default: return nullptr;
    }
}

static void decode_setp(Statement &statement, Instruction *in) {
    static const char *const names[] = { "eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                         "neu", "ltu", "leu", "gtu", "geu", "num", "nan" };
    static const char *const unsigned_names[] = { "", "", "lo", "ls", "hi", "hs" };
    int comparison = -1;
    for (int i = 0; i < 14; i++)
        if (statement.take(names[i]) || (i < 6 && i > 1 && statement.take(unsigned_names[i]))) comparison = i;
    if (comparison < 0) throw Unknown{ "comparison" };
    in->mode = statement.take("and") ? kJoinAnd : statement.take("or") ? kJoinOr : statement.take("xor") ? kJoinXor : 0;
    const Type type = statement.take_type();
    in->handler = comparison_handler(type, comparison);
    in->kind = type == kF32 ? kFloatClass : type == kF64 ? kDoubleClass : kIntegerClass;
    statement.operands(in, 1);
}

static void choose(const Instruction &in, Lanes &lanes, unsigned active) {
    const unsigned mask = maybe_negated(in, lanes, in.from[2]);
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]);
    each(active, [=](unsigned lane) { to[lane] = mask >> lane & 1 ? a[lane] : b[lane]; });
}

/* Logic on predicates, all lanes at once. */
template <typename Op> static void logic(const Instruction &in, Lanes &lanes, unsigned active) {
    const unsigned a = predicate_of(lanes, in.from[0]), b = predicate_of(lanes, in.from[1]);
    set_predicate(lanes, in.to[0], active, Op::of(a, b));
}

static void logic_not(const Instruction &in, Lanes &lanes, unsigned active) {
    set_predicate(lanes, in.to[0], active, ~predicate_of(lanes, in.from[0]));
}

/* ---- decoding ---- */

static Class class_of(Type type) {
    return type == kF64 ? kDoubleClass : type >= kF16 ? kFloatClass : kIntegerClass;
}

static Handler flushed(const std::string &opcode, bool nan) {
    if (opcode == "add") return map2<float, float, float, Flushed2<FAdd>>;
    if (opcode == "sub") return map2<float, float, float, Flushed2<FSub>>;
    if (opcode == "mul") return map2<float, float, float, Flushed2<FMul>>;
    if (opcode == "fma") return map3<float, float, float, float, Flushed3<Fma>>;
    if (opcode == "min") return nan ? nullptr : map2<float, float, float, Flushed2<FMin>>;
    if (opcode == "max") return nan ? nullptr : map2<float, float, float, Flushed2<FMax>>;
    return nullptr;
}

template <typename T> static Handler float_handler(const std::string &opcode, bool nan) {
    if (opcode == "add") return map2<T, T, T, FAdd<T>>;
    if (opcode == "sub") return map2<T, T, T, FSub<T>>;
    if (opcode == "mul") return map2<T, T, T, FMul<T>>;
    if (opcode == "fma" || opcode == "mad") return map3<T, T, T, T, Fma<T>>;
    if (opcode == "min") return nan ? map2<T, T, T, FMinNan<T>> : map2<T, T, T, FMin<T>>;
    if (opcode == "max") return nan ? map2<T, T, T, FMaxNan<T>> : map2<T, T, T, FMax<T>>;
    if (opcode == "neg") return map1<T, T, FNeg<T>>;
    if (opcode == "abs") return map1<T, T, FAbs<T>>;
    if (opcode == "copysign") return map2<T, T, T, CopySign<T>>;
    return nullptr;
}

static Handler half_operation(const std::string &opcode, Type type, bool nan) {
    if (opcode == "add") return half_handler<HalfAdd>(type);
    if (opcode == "sub") return half_handler<HalfSub>(type);
    if (opcode == "mul") return half_handler<HalfMul>(type);
    if (opcode == "fma") return half_handler<HalfFma>(type);
    if (opcode == "min") return nan ? half_handler<HalfMinNan>(type) : half_handler<HalfMin>(type);
    if (opcode == "max") return nan ? half_handler<HalfMaxNan>(type) : half_handler<HalfMax>(type);
    if (opcode == "neg") return half_handler<HalfNeg>(type);
    if (opcode == "abs") return half_handler<HalfAbs>(type);
    return nullptr;
}

static Handler integer_operation(Statement &statement, const std::string &opcode, Type type) {
    if (statement.take("sat")) {
        if (type != kS32) return nullptr;
        if (opcode == "add") return map2<int32_t, int32_t, int32_t, AddSaturated<int32_t>>;
        return opcode == "sub" ? map2<int32_t, int32_t, int32_t, SubSaturated<int32_t>> : nullptr;
    }
    if (opcode == "add") return integer2<Add>(type);
    if (opcode == "sub") return integer2<Sub>(type);
    if (opcode == "min") return integer2<Min>(type);
    if (opcode == "max") return integer2<Max>(type);
    if (opcode == "div") return integer2<Div>(type);
    if (opcode == "rem") return integer2<Rem>(type);
    if (opcode == "neg") return integer1<Neg>(type);
    if (opcode == "abs") return integer1<Abs>(type);
    const bool product = opcode == "mul";
    if (!product && opcode != "mad") return nullptr;
    if (statement.take("wide")) return product ? wide_product(type) : wide_sum(type);
    if (statement.take("hi")) return product ? integer2<MulHigh>(type) : integer3<MadHigh>(type);
    statement.take("lo");
    return product ? integer2<MulLow>(type) : integer3<MadLow>(type);
}

/* Opcodes that integers and floating-point numbers share. */
static bool decode_shared_opcode(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = { "add", "sub", "mul", "mad", "fma",     "min",
                                                   "max", "neg", "abs", "rem", "copysign" };
    if (!opcodes.count(statement.opcode)) return false;
    const Type type = statement.take_type();
    const bool nan = statement.take("NaN");
    in->kind = class_of(type);
    statement.operands(in, 1);
    if (type < kF16) {
        in->handler = integer_operation(statement, statement.opcode, type);
        return true;
    }
    const int rounding = statement.take_rounding();
    const bool flushes = type == kF32 && statement.take("ftz");
    if (type == kF32)
        in->handler = flushes ? flushed(statement.opcode, nan) : float_handler<float>(statement.opcode, nan);
    else if (type == kF64)
        in->handler = float_handler<double>(statement.opcode, nan);
    else
        in->handler = half_operation(statement.opcode, type, nan);
    adjust(in, rounding, type == kF32 && statement.take("sat"));
    return true;
}

static Handler special_handler(const std::string &opcode, bool approximate, bool flushes) {
    if (opcode == "rcp") return flushes ? map1<float, float, Flushed1<FInverse>> : map1<float, float, FInverse<float>>;
    if (opcode == "sqrt") return flushes ? map1<float, float, Flushed1<FSqrt>> : map1<float, float, FSqrt<float>>;
    if (!approximate) return nullptr;
    if (opcode == "ex2") return flushes ? map1<float, float, Flushed1<Ex2>> : map1<float, float, Ex2<float>>;
    if (opcode == "lg2") return flushes ? map1<float, float, Flushed1<Lg2>> : map1<float, float, Lg2<float>>;
    if (opcode == "rsqrt")
        return flushes ? map1<float, float, Flushed1<FInverseRoot>> : map1<float, float, FInverseRoot<float>>;
    if (opcode == "sin") return map1<float, float, Sine<float>>;
    if (opcode == "cos") return map1<float, float, Cosine<float>>;
    return opcode == "tanh" ? map1<float, float, Tanh<float>> : nullptr;
}

static Handler special_double(const std::string &opcode, bool approximate) {
    if (opcode == "rcp") return approximate ? map1<double, double, UpperHalf<FInverse>> : map1<double, double, FInverse<double>>;
    if (opcode == "rsqrt") return approximate ? map1<double, double, UpperHalf<FInverseRoot>> : nullptr;
    return opcode == "sqrt" && !approximate ? map1<double, double, FSqrt<double>> : nullptr;
}

/* Reciprocals, roots, powers and logarithms. */
static bool decode_special(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = { "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh" };
    if (!opcodes.count(statement.opcode)) return false;
    const Type type = statement.take_type();
    const bool approximate = statement.take("approx"), flushes = statement.take("ftz");
    const int rounding = statement.take_rounding();
    statement.operands(in, 1);
    in->kind = kSpecialClass;
    if (type == kF32) in->handler = special_handler(statement.opcode, approximate, flushes);
    if (type == kF64) in->handler = special_double(statement.opcode, approximate);
    if (in->handler) adjust(in, rounding, false);
    return true;
}

static bool decode_division(Statement &statement, Instruction *in) {
    if (statement.opcode != "div") return false;
    const Type type = statement.take_type();
    in->kind = class_of(type);
    statement.operands(in, 1);
    if (type < kF16) {
        in->handler = integer2<Div>(type);
        return true;
    }
    const bool flushes = statement.take("ftz");
    if (!statement.take("approx")) statement.take("full");
    const int rounding = statement.take_rounding();
    if (type == kF32) in->handler = flushes ? map2<float, float, float, Flushed2<FDiv>> : map2<float, float, float, FDiv<float>>;
    if (type == kF64) in->handler = map2<double, double, double, FDiv<double>>;
    adjust(in, rounding, false);
    return true;
}

static Handler predicate_logic(const std::string &opcode) {
    if (opcode == "and") return logic<And<unsigned>>;
    if (opcode == "or") return logic<Or<unsigned>>;
    if (opcode == "xor") return logic<Xor<unsigned>>;
    return opcode == "not" ? logic_not : nullptr;
}

static Handler bit_handler(const std::string &opcode, Type type) {
    const bool wide = bytes_of(type) == 8;
    if (opcode == "and") return integer2<And>(type);
    if (opcode == "or") return integer2<Or>(type);
    if (opcode == "xor") return integer2<Xor>(type);
    if (opcode == "not") return integer1<Not>(type);
    if (opcode == "shl") return shift<ShiftLeft>(type);
    if (opcode == "shr") return shift<ShiftRight>(type);
    if (opcode == "popc") return wide ? map1<uint32_t, uint64_t, CountOnes<uint64_t>> : map1<uint32_t, uint32_t, CountOnes<uint32_t>>;
    if (opcode == "clz") return wide ? map1<uint32_t, uint64_t, CountZeros<uint64_t>> : map1<uint32_t, uint32_t, CountZeros<uint32_t>>;
    if (opcode == "brev") return integer1<Reverse>(type);
    if (opcode == "bfi") return wide ? insert<uint64_t> : insert<uint32_t>;
    if (opcode == "bmsk") return map2<uint32_t, uint32_t, uint32_t, BitMask>;
    if (opcode == "prmt") return map3<uint32_t, uint32_t, uint32_t, uint32_t, Permute>;
    return opcode == "lop3" ? lookup3 : nullptr;
}

static Handler field_handler(const std::string &opcode, Type type) {
    const bool extract = opcode == "bfe";
    switch (type) {
    case kU32:
        return extract ? map3<uint32_t, uint32_t, uint32_t, uint32_t, Extract<uint32_t>>
                       : map1<uint32_t, uint32_t, FindHighest<uint32_t>>;
    case kS32:
        return extract ? map3<int32_t, int32_t, uint32_t, uint32_t, Extract<int32_t>>
                       : map1<uint32_t, int32_t, FindHighest<int32_t>>;
    case kU64:
        return extract ? map3<uint64_t, uint64_t, uint32_t, uint32_t, Extract<uint64_t>>
                       : map1<uint32_t, uint64_t, FindHighest<uint64_t>>;
    case kS64:
        return extract ? map3<int64_t, int64_t, uint32_t, uint32_t, Extract<int64_t>>
                       : map1<uint32_t, int64_t, FindHighest<int64_t>>;
    default: return nullptr;
    }
}

static bool decode_bits(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = { "and",  "or",  "xor",  "not",  "shl", "shr", "popc", "clz", "brev",
                                                   "bfi",  "bfe", "bfind", "bmsk", "prmt", "lop3", "shf" };
    const std::string &opcode = statement.opcode;
    if (!opcodes.count(opcode)) return false;
    const Type type = statement.take_type();
    statement.operands(in, 1);
    in->kind = kIntegerClass;
    if (opcode == "bmsk" && !statement.take("clamp")) throw Unknown{ "mode" };
    if (opcode == "bfe" || opcode == "bfind")
        in->handler = field_handler(opcode, type);
    else if (opcode == "shf")
        in->handler = funnel(&statement);
    else if (type == kPredicate)
        in->handler = predicate_logic(opcode);
    else
        in->handler = bit_handler(opcode, type);
    return true;
}

bool decode_operation(Statement &statement, Instruction *in) {
    if (statement.opcode == "setp") {
        decode_setp(statement, in);
        return true;
    }
    if (statement.opcode == "selp") {
        const Type type = statement.take_type();
        statement.operands(in, 1);
        in->handler = type == kNoType || type == kPredicate ? nullptr : choose;
        in->kind = kIntegerClass;
        return true;
    }
    return decode_shared_opcode(statement, in) || decode_special(statement, in) || decode_division(statement, in) ||
           decode_bits(statement, in);
}

} // namespace ptx
} // namespace emu
