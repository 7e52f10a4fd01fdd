/* Conversions and moves of the PTX interpreter. */
#include "ptx.h"

#include <fenv.h>
#include <limits>
#include <math.h>
#include <type_traits>

namespace emu {
namespace ptx {

/* The bits of a result in its register: those of a signed integer are extended. */
template <typename T> static inline uint64_t result_of(T value) {
    if (std::is_integral<T>::value && std::is_signed<T>::value) return (uint64_t)(int64_t)value;
    return bits_of(value);
}

template <typename D, typename S, typename Op>
static void convert(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *from = lanes.row(in.from[0]);
    each(active, [=](unsigned lane) { to[lane] = result_of<D>(Op::of(value_of<S>(from[lane]))); });
}

/* ---- integers to integers ---- */

template <typename D, typename S> struct Narrow {
    static D of(S value) {
        return (D)value;
    }
};

template <typename D, typename S> struct NarrowSaturated {
    static D of(S value) {
        const __int128 wide = value;
        if (wide < (__int128)std::numeric_limits<D>::min()) return std::numeric_limits<D>::min();
        if (wide > (__int128)std::numeric_limits<D>::max()) return std::numeric_limits<D>::max();
        return (D)value;
    }
};

template <typename S, template <typename, typename> class Op> static Handler to_integer(Type to) {
    switch (to) {
    case kU8: return convert<uint8_t, S, Op<uint8_t, S>>;
    case kS8: return convert<int8_t, S, Op<int8_t, S>>;
    case kU16: return convert<uint16_t, S, Op<uint16_t, S>>;
    case kS16: return convert<int16_t, S, Op<int16_t, S>>;
    case kU32: return convert<uint32_t, S, Op<uint32_t, S>>;
    case kS32: return convert<int32_t, S, Op<int32_t, S>>;
    case kU64: return convert<uint64_t, S, Op<uint64_t, S>>;
    case kS64: return convert<int64_t, S, Op<int64_t, S>>;
    default: return nullptr;
    }
}

template <template <typename, typename> class Op> static Handler integer_to_integer(Type to, Type from) {
    switch (from) {
    case kU8: return to_integer<uint8_t, Op>(to);
    case kS8: return to_integer<int8_t, Op>(to);
    case kU16: return to_integer<uint16_t, Op>(to);
    case kS16: return to_integer<int16_t, Op>(to);
    case kU32: return to_integer<uint32_t, Op>(to);
    case kS32: return to_integer<int32_t, Op>(to);
    case kU64: return to_integer<uint64_t, Op>(to);
    case kS64: return to_integer<int64_t, Op>(to);
    default: return nullptr;
    }
}

/* ---- integers to floating point ---- */

template <typename D> static Handler integer_to_float(Type from) {
    switch (from) {
    case kU8: return convert<D, uint8_t, Narrow<D, uint8_t>>;
    case kS8: return convert<D, int8_t, Narrow<D, int8_t>>;
    case kU16: return convert<D, uint16_t, Narrow<D, uint16_t>>;
    case kS16: return convert<D, int16_t, Narrow<D, int16_t>>;
    case kU32: return convert<D, uint32_t, Narrow<D, uint32_t>>;
    case kS32: return convert<D, int32_t, Narrow<D, int32_t>>;
    case kU64: return convert<D, uint64_t, Narrow<D, uint64_t>>;
    case kS64: return convert<D, int64_t, Narrow<D, int64_t>>;
    default: return nullptr;
    }
}

/* ---- floating point to integers, in floating point and not ---- */

enum ToWhole { kNearest, kZeroward, kDown, kUp };

template <int how, typename T> static inline T whole(T x) {
    return how == kNearest ? nearbyint(x) : how == kZeroward ? trunc(x) : how == kDown ? floor(x) : ceil(x);
}

/* The nearest number that the integer has. NaN becomes 0, or the highest bit alone where either type is wide. */
template <typename D, typename S, int how> struct Whole {
    static D of(S value) {
        const int bits = 8 * sizeof(D);
        if (value != value) return sizeof(S) == 8 || sizeof(D) == 8 ? (D)((uint64_t)1 << (bits - 1)) : (D)0;
        const S rounded = whole<how>(value);
        const S end = (S)ldexp(1.0, std::is_signed<D>::value ? bits - 1 : bits);
        if (rounded >= end) return std::numeric_limits<D>::max();
        if (rounded < (std::is_signed<D>::value ? -end : (S)0)) return std::numeric_limits<D>::min();
        return (D)rounded;
    }
};

template <typename S, int how> static Handler float_to_integer(Type to) {
    switch (to) {
    case kU8: return convert<uint8_t, S, Whole<uint8_t, S, how>>;
    case kS8: return convert<int8_t, S, Whole<int8_t, S, how>>;
    case kU16: return convert<uint16_t, S, Whole<uint16_t, S, how>>;
    case kS16: return convert<int16_t, S, Whole<int16_t, S, how>>;
    case kU32: return convert<uint32_t, S, Whole<uint32_t, S, how>>;
    case kS32: return convert<int32_t, S, Whole<int32_t, S, how>>;
    case kU64: return convert<uint64_t, S, Whole<uint64_t, S, how>>;
    case kS64: return convert<int64_t, S, Whole<int64_t, S, how>>;
    default: return nullptr;
    }
}

template <typename S> static Handler float_to_integer(Type to, int how) {
    switch (how) {
    case kNearest: return float_to_integer<S, kNearest>(to);
    case kDown: return float_to_integer<S, kDown>(to);
    case kUp: return float_to_integer<S, kUp>(to);
    default: return float_to_integer<S, kZeroward>(to);
    }
}

template <typename T, int how> struct WholeFloat {
    static T of(T value) {
        return whole<how>(value);
    }
};

template <typename T> static Handler float_to_whole(int how) {
    switch (how) {
    case kNearest: return convert<T, T, WholeFloat<T, kNearest>>;
    case kDown: return convert<T, T, WholeFloat<T, kDown>>;
    case kUp: return convert<T, T, WholeFloat<T, kUp>>;
    default: return convert<T, T, WholeFloat<T, kZeroward>>;
    }
}

/* ---- 16 bits ---- */

template <typename S, bool is_bf16, bool zeroward> struct ToHalf {
    static uint16_t of(S value) {
        return half_of((double)value, is_bf16, zeroward);
    }
};

/* The one that kernels use most: the nearest bf16 of a float. */
template <> struct ToHalf<float, true, false> {
    static uint16_t of(float value) {
        const uint32_t bits = (uint32_t)bits_of(value);
        if (value != value) return 0x7fff;
        return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
};

template <typename D, bool is_bf16> struct FromHalf {
    static D of(uint16_t value) {
        return (D)half_value(value, is_bf16);
    }
};

template <typename S> static Handler float_to_half(Type to, bool zeroward) {
    if (to == kBf16 && zeroward) return convert<uint16_t, S, ToHalf<S, true, true>>;
    if (to == kBf16) return convert<uint16_t, S, ToHalf<S, true, false>>;
    if (zeroward) return convert<uint16_t, S, ToHalf<S, false, true>>;
    return convert<uint16_t, S, ToHalf<S, false, false>>;
}

/* The first operand becomes the upper half. */
template <bool is_bf16, bool zeroward>
static void pair_of_halves(const Instruction &in, Lanes &lanes, unsigned active) {
    typedef ToHalf<float, is_bf16, zeroward> Half;
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *high = lanes.row(in.from[0]), *low = lanes.row(in.from[1]);
    each(active, [=](unsigned lane) {
        to[lane] =
            (uint64_t)Half::of(value_of<float>(high[lane])) << 16 | Half::of(value_of<float>(low[lane]));
    });
}

/* ---- decoding ---- */

static bool is_integer(Type type) {
    return type >= kU8 && type <= kS64;
}

static bool is_half(Type type) {
    return type == kF16 || type == kBf16;
}

static Handler between_floats(Type to, Type from) {
    if (to == kF32 && from == kF64) return convert<float, double, Narrow<float, double>>;
    if (to == kF64 && from == kF32) return convert<double, float, Narrow<double, float>>;
    if (to == kF32 && from == kF32) return convert<float, float, Narrow<float, float>>;
    if (to == kF64 && from == kF64) return convert<double, double, Narrow<double, double>>;
    return nullptr;
}

static Handler from_half(Type to, Type from) {
    if (to == kF32 && from == kF16) return convert<float, uint16_t, FromHalf<float, false>>;
    if (to == kF32 && from == kBf16) return convert<float, uint16_t, FromHalf<float, true>>;
    if (to == kF64 && from == kF16) return convert<double, uint16_t, FromHalf<double, false>>;
    return to == kF64 && from == kBf16 ? convert<double, uint16_t, FromHalf<double, true>> : nullptr;
}

static Handler pair_handler(Type to, bool zeroward) {
    if (to == kBf16x2) return zeroward ? pair_of_halves<true, true> : pair_of_halves<true, false>;
    return zeroward ? pair_of_halves<false, true> : pair_of_halves<false, false>;
}

/* A rounding to whole numbers; -1: the statement has none. */
static int take_whole(Statement *statement) {
    if (statement->take("rni")) return kNearest;
    if (statement->take("rzi")) return kZeroward;
    if (statement->take("rmi")) return kDown;
    return statement->take("rpi") ? kUp : -1;
}

static Handler conversion(Type to, Type from, int how, int rounding, bool saturates) {
    const bool zeroward = rounding == FE_TOWARDZERO;
    if (is_integer(to) && is_integer(from))
        return saturates ? integer_to_integer<NarrowSaturated>(to, from)
                         : integer_to_integer<Narrow>(to, from);
    if (to == kF32 && is_integer(from)) return integer_to_float<float>(from);
    if (to == kF64 && is_integer(from)) return integer_to_float<double>(from);
    if (is_integer(to) && from == kF32) return float_to_integer<float>(to, how);
    if (is_integer(to) && from == kF64) return float_to_integer<double>(to, how);
    if (to == from && how >= 0)
        return to == kF32 ? float_to_whole<float>(how) : to == kF64 ? float_to_whole<double>(how) : nullptr;
    if (is_half(to) && from == kF32) return float_to_half<float>(to, zeroward);
    if (is_half(to) && from == kF64) return float_to_half<double>(to, zeroward);
    if (is_half(from)) return from_half(to, from);
    if (to == kBf16x2 || to == kF16x2) return from == kF32 ? pair_handler(to, zeroward) : nullptr;
    return between_floats(to, from);
}

/* Resizing an integer is a move for the report: most of them cost nothing. */
static Class conversion_class(Type to, Type from) {
    return is_integer(to) && is_integer(from) ? kMoveClass : kConversionClass;
}

static void decode_cvt(Statement &statement, Instruction *in) {
    const Type to = statement.take_type(), from = statement.take_type();
    const int how = take_whole(&statement);
    const int rounding = statement.take_rounding();
    const bool saturates = statement.take("sat");
    statement.operands(in, 1);
    in->kind = conversion_class(to, from);
    in->handler = conversion(to, from, how, rounding, saturates);
    if (!in->handler) return;
    const bool rounds_here = is_half(to) || to == kBf16x2 || to == kF16x2;
    if (saturates && !is_integer(to) && to != kF32) throw Unknown{ "saturation" };
    if (rounds_here && rounding != FE_TONEAREST && rounding != FE_TOWARDZERO) throw Unknown{ "rounding" };
    adjust(in, rounds_here ? FE_TONEAREST : rounding, saturates && to == kF32);
}

/* ---- moves ---- */

static void move(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *from = lanes.row(in.from[0]);
    each(active, [=](unsigned lane) { to[lane] = from[lane]; });
}

/* A number among predicates is true in every lane or in none. */
static void move_predicate(const Instruction &in, Lanes &lanes, unsigned active) {
    const bool constant = in.from[0].constant != 0;
    const unsigned mask = predicate_of(lanes, in.from[0]);
    set_predicate(lanes, in.to[0], active, constant && mask ? kEveryLane : mask);
}

/* A register from its parts, the lowest first. */
static void pack(const Instruction &in, Lanes &lanes, unsigned active) {
    const unsigned bits = in.mode;
    each(active, [&](unsigned lane) {
        uint64_t whole_value = 0;
        for (unsigned i = 0; i < in.count; i++)
            whole_value |= (lanes.row(in.from[i])[lane] & (((uint64_t)1 << bits) - 1)) << bits * i;
        lanes.row(in.to[0])[lane] = whole_value;
    });
}

static void unpack(const Instruction &in, Lanes &lanes, unsigned active) {
    const unsigned bits = in.mode;
    const uint64_t *from = lanes.row(in.from[0]);
    each(active, [&](unsigned lane) {
        const uint64_t whole_value = from[lane];
        for (unsigned i = 0; i < in.results; i++)
            lanes.row(in.to[i])[lane] = (whole_value >> bits * i) & (((uint64_t)1 << bits) - 1);
    });
}

static void decode_mov(Statement &statement, Instruction *in) {
    const Type type = statement.take_type();
    statement.operands(in, 1);
    in->kind = in->results > 1 || in->count > 1 ? kElementClass : kMoveClass;
    const unsigned parts = std::max(in->results, in->count);
    in->mode = (uint8_t)(8 * bytes_of(type) / parts);
    if (type == kNoType || (in->results > 1 && in->count > 1)) return;
    in->handler = type == kPredicate ? move_predicate
                  : in->results > 1  ? unpack
                  : in->count > 1    ? pack
                                     : move;
}

bool decode_conversion(Statement &statement, Instruction *in) {
    if (statement.opcode == "cvt")
        decode_cvt(statement, in);
    else if (statement.opcode == "mov")
        decode_mov(statement, in);
    else
        return false;
    return true;
}

} // namespace ptx
} // namespace emu
