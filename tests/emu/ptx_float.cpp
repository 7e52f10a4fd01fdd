/* Arithmetic on floating-point numbers of 16, 32 and 64 bits, for the PTX interpreter. */
#include "ptx_map.h"

#include <algorithm>
#include <fenv.h>
#include <math.h>

namespace emu {
namespace ptx {

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

#define HALF_OPERATION(name, expression)    \
    struct name {                           \
        static double of(const double *v) { \
            return expression;              \
        }                                   \
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

/* ---- decoding ---- */

static Handler flushed(const std::string &opcode, bool nan) {
    if (opcode == "add") return map2<float, float, float, Flushed2<FAdd>>;
    if (opcode == "sub") return map2<float, float, float, Flushed2<FSub>>;
    if (opcode == "mul") return map2<float, float, float, Flushed2<FMul>>;
    if (opcode == "div") return map2<float, float, float, Flushed2<FDiv>>;
    if (opcode == "fma") return map3<float, float, float, float, Flushed3<Fma>>;
    if (opcode == "min") return nan ? nullptr : map2<float, float, float, Flushed2<FMin>>;
    if (opcode == "max") return nan ? nullptr : map2<float, float, float, Flushed2<FMax>>;
    return nullptr;
}

template <typename T> static Handler float_handler(const std::string &opcode, bool nan) {
    if (opcode == "add") return map2<T, T, T, FAdd<T>>;
    if (opcode == "sub") return map2<T, T, T, FSub<T>>;
    if (opcode == "mul") return map2<T, T, T, FMul<T>>;
    if (opcode == "div") return map2<T, T, T, FDiv<T>>;
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

static bool decode_arithmetic(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = { "add", "sub", "mul", "mad", "fma",     "div",
                                                   "min", "max", "neg", "abs", "copysign" };
    if (!opcodes.count(statement.opcode)) return false;
    const Type type = statement.take_type();
    const bool nan = statement.take("NaN"), flushes = type == kF32 && statement.take("ftz");
    const int rounding = statement.take_rounding();
    if (statement.opcode == "div" && !statement.take("approx")) statement.take("full");
    statement.operands(in, 1);
    in->kind = type == kF64 ? kDoubleClass : kFloatClass;
    if (type == kF32)
        in->handler = flushes ? flushed(statement.opcode, nan) : float_handler<float>(statement.opcode, nan);
    else if (type == kF64)
        in->handler = float_handler<double>(statement.opcode, nan);
    else if (rounding == FE_TONEAREST)
        in->handler = half_operation(statement.opcode, type, nan);
    if (in->handler) adjust(in, rounding, type == kF32 && statement.take("sat"));
    return true;
}

static Handler special_handler(const std::string &opcode, bool approximate, bool flushes) {
    if (opcode == "rcp")
        return flushes ? map1<float, float, Flushed1<FInverse>> : map1<float, float, FInverse<float>>;
    if (opcode == "sqrt")
        return flushes ? map1<float, float, Flushed1<FSqrt>> : map1<float, float, FSqrt<float>>;
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
    if (opcode == "rcp")
        return approximate ? map1<double, double, UpperHalf<FInverse>>
                           : map1<double, double, FInverse<double>>;
    if (opcode == "rsqrt") return approximate ? map1<double, double, UpperHalf<FInverseRoot>> : nullptr;
    return opcode == "sqrt" && !approximate ? map1<double, double, FSqrt<double>> : nullptr;
}

/* Reciprocals, roots, powers and logarithms. */
static bool decode_special(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = {
        "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"
    };
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

bool decode_float(Statement &statement, Instruction *in) {
    if (statement.first_type() < kF16) return false;
    return decode_arithmetic(statement, in) || decode_special(statement, in);
}

} // namespace ptx
} // namespace emu
