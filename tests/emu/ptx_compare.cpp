/* Comparison, choice, and logic on predicates, for the PTX interpreter. */
#include "ptx_map.h"

namespace emu {
namespace ptx {

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

template <typename T, int comparison>
static void set_predicates(const Instruction &in, Lanes &lanes, unsigned active) {
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
    in->mode = statement.take("and")   ? kJoinAnd
               : statement.take("or")  ? kJoinOr
               : statement.take("xor") ? kJoinXor
                                       : 0;
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

enum Logic { kLogicAnd, kLogicOr, kLogicXor, kLogicNot };

/* Logic on predicates, all lanes at once. */
template <int how> static void logic(const Instruction &in, Lanes &lanes, unsigned active) {
    const unsigned a = predicate_of(lanes, in.from[0]), b = predicate_of(lanes, in.from[1]);
    const unsigned mask = how == kLogicAnd ? a & b : how == kLogicOr ? a | b : how == kLogicXor ? a ^ b : ~a;
    set_predicate(lanes, in.to[0], active, mask);
}

static Handler logic_handler(const std::string &opcode) {
    if (opcode == "and") return logic<kLogicAnd>;
    if (opcode == "or") return logic<kLogicOr>;
    if (opcode == "xor") return logic<kLogicXor>;
    return opcode == "not" ? logic<kLogicNot> : nullptr;
}

static void decode_selp(Statement &statement, Instruction *in) {
    const Type type = statement.take_type();
    statement.operands(in, 1);
    if (type != kNoType && type != kPredicate) in->handler = choose;
}

static bool decode_logic(Statement &statement, Instruction *in) {
    if (!logic_handler(statement.opcode) || !statement.take("pred")) return false;
    statement.operands(in, 1);
    in->handler = logic_handler(statement.opcode);
    return true;
}

bool decode_comparison(Statement &statement, Instruction *in) {
    if (statement.opcode == "setp")
        decode_setp(statement, in);
    else if (statement.opcode == "selp")
        decode_selp(statement, in);
    else
        return decode_logic(statement, in);
    return true;
}

} // namespace ptx
} // namespace emu
