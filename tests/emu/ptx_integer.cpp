/* Arithmetic on integers and on bits, for the PTX interpreter. */
#include "ptx_map.h"

#include <algorithm>
#include <type_traits>

namespace emu {
namespace ptx {

/* ---- integers ---- */

template <typename T> using Unsigned = typename std::make_unsigned<T>::type;
template <typename T> static T wrapped(unsigned long long value) {
    return (T)(Unsigned<T>)value;
}

typedef unsigned long long Wide;

OPERATION2(Add, wrapped<T>((Wide)a + (Wide)b))
OPERATION2(Sub, wrapped<T>((Wide)a - (Wide)b))
OPERATION2(MulLow, wrapped<T>((Wide)a *(Wide)b))
OPERATION2(And, (T)(a &b))
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
        if (b == 0) return (T) ~(T)0;
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
        typedef
            typename std::conditional<std::is_signed<T>::value, __int128, unsigned __int128>::type Product;
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

/* What brings that bit to the top. */
template <typename T> struct ShiftToTop {
    static uint32_t of(T a) {
        const uint32_t position = FindHighest<T>::of(a);
        return position == 0xffffffffu ? position : 8 * (uint32_t)sizeof(T) - 1 - position;
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
        const T ones = count >= bits ? (T) ~(T)0 : (T)(((T)1 << count) - 1);
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
        const uint32_t c = (uint32_t)lanes.row(in.from[2])[lane],
                       table = (uint32_t)lanes.row(in.from[3])[lane];
        uint32_t result = 0;
        for (unsigned k = 0; k < 8; k++)
            if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        lanes.row(in.to[0])[lane] = result;
    });
}

/* ---- decoding ---- */

static Handler integer_handler(Statement &statement, const std::string &opcode, Type type) {
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

static bool decode_arithmetic(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = { "add", "sub", "mul", "mad", "div",
                                                   "rem", "min", "max", "neg", "abs" };
    if (!opcodes.count(statement.opcode)) return false;
    const Type type = statement.take_type();
    statement.operands(in, 1);
    in->handler = integer_handler(statement, statement.opcode, type);
    return true;
}

static Handler bit_handler(const std::string &opcode, Type type) {
    const bool wide = bytes_of(type) == 8;
    if (opcode == "and") return integer2<And>(type);
    if (opcode == "or") return integer2<Or>(type);
    if (opcode == "xor") return integer2<Xor>(type);
    if (opcode == "not") return integer1<Not>(type);
    if (opcode == "shl") return shift<ShiftLeft>(type);
    if (opcode == "shr") return shift<ShiftRight>(type);
    if (opcode == "popc")
        return wide ? map1<uint32_t, uint64_t, CountOnes<uint64_t>>
                    : map1<uint32_t, uint32_t, CountOnes<uint32_t>>;
    if (opcode == "clz")
        return wide ? map1<uint32_t, uint64_t, CountZeros<uint64_t>>
                    : map1<uint32_t, uint32_t, CountZeros<uint32_t>>;
    if (opcode == "brev") return integer1<Reverse>(type);
    if (opcode == "bfi") return wide ? insert<uint64_t> : insert<uint32_t>;
    if (opcode == "bmsk") return map2<uint32_t, uint32_t, uint32_t, BitMask>;
    if (opcode == "prmt") return map3<uint32_t, uint32_t, uint32_t, uint32_t, Permute>;
    return opcode == "lop3" ? lookup3 : nullptr;
}

template <typename T> static Handler find_handler(bool shift) {
    return shift ? map1<uint32_t, T, ShiftToTop<T>> : map1<uint32_t, T, FindHighest<T>>;
}

static Handler field_handler(Statement &statement, Type type) {
    const bool extract = statement.opcode == "bfe", shift = statement.take("shiftamt");
    switch (type) {
    case kU32:
        return extract ? map3<uint32_t, uint32_t, uint32_t, uint32_t, Extract<uint32_t>> : find_handler<uint32_t>(shift);
    case kS32: return extract ? map3<int32_t, int32_t, uint32_t, uint32_t, Extract<int32_t>> : find_handler<int32_t>(shift);
    case kU64:
        return extract ? map3<uint64_t, uint64_t, uint32_t, uint32_t, Extract<uint64_t>> : find_handler<uint64_t>(shift);
    case kS64: return extract ? map3<int64_t, int64_t, uint32_t, uint32_t, Extract<int64_t>> : find_handler<int64_t>(shift);
    default: return nullptr;
    }
}

static bool decode_bits(Statement &statement, Instruction *in) {
    static const std::set<std::string> opcodes = { "and",  "or",   "xor",  "not", "shl", "shr",
                                                   "popc", "clz",  "brev", "bfi", "bfe", "bfind",
                                                   "bmsk", "prmt", "lop3", "shf" };
    const std::string &opcode = statement.opcode;
    if (!opcodes.count(opcode)) return false;
    const Type type = statement.take_type();
    statement.operands(in, 1);
    in->kind = kIntegerClass;
    if (opcode == "bmsk" && !statement.take("clamp")) throw Unknown{ "mode" };
    if (opcode == "bfe" || opcode == "bfind")
        in->handler = field_handler(statement, type);
    else if (opcode == "shf")
        in->handler = funnel(&statement);
    else
        in->handler = bit_handler(opcode, type);
    return true;
}

bool decode_integer(Statement &statement, Instruction *in) {
    return decode_arithmetic(statement, in) || decode_bits(statement, in);
}

} // namespace ptx
} // namespace emu
