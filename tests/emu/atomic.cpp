/* Atomics. One thread runs at a time and nothing switches inside these functions, so plain operations are atomic; they are only
 * reported to the checker. */
#include "exec.h"

#include <algorithm>

using namespace emu;

template <typename T, typename Function> static T update(T *address, Function function) {
    check_access(address, sizeof(T), true, true);
    const T old = *address;
    *address = function(old);
    return old;
}

#define ATOMIC(name, type, expression)                     \
    type name(type *address, type value) {                 \
        return update(address, [value](type old) -> type { \
            (void)old;                                     \
            return expression;                             \
        });                                                \
    }

ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
ATOMIC(atomicAdd, unsigned, old + value)
ATOMIC(atomicAdd, emu_ull, old + value)
ATOMIC(atomicAdd, float, old + value)
ATOMIC(atomicAdd, double, old + value)
ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)value))
ATOMIC(atomicSub, unsigned, old - value)
ATOMIC(atomicMax, int, std::max(old, value))
ATOMIC(atomicMax, unsigned, std::max(old, value))
ATOMIC(atomicMax, long long, std::max(old, value))
ATOMIC(atomicMax, emu_ull, std::max(old, value))
ATOMIC(atomicMin, int, std::min(old, value))
ATOMIC(atomicMin, unsigned, std::min(old, value))
ATOMIC(atomicMin, long long, std::min(old, value))
ATOMIC(atomicMin, emu_ull, std::min(old, value))
ATOMIC(atomicExch, int, value)
ATOMIC(atomicExch, unsigned, value)
ATOMIC(atomicExch, emu_ull, value)
ATOMIC(atomicExch, float, value)
ATOMIC(atomicAnd, int, old &value)
ATOMIC(atomicAnd, unsigned, old &value)
ATOMIC(atomicAnd, emu_ull, old &value)
ATOMIC(atomicOr, int, old | value)
ATOMIC(atomicOr, unsigned, old | value)
ATOMIC(atomicOr, emu_ull, old | value)
ATOMIC(atomicXor, int, old ^ value)
ATOMIC(atomicXor, unsigned, old ^ value)
ATOMIC(atomicXor, emu_ull, old ^ value)
ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)

template <typename T> static T compare_and_swap(T *address, T compare, T value) {
    return update(address, [=](T old) { return old == compare ? value : old; });
}

int atomicCAS(int *address, int compare, int value) {
    return compare_and_swap(address, compare, value);
}

unsigned atomicCAS(unsigned *address, unsigned compare, unsigned value) {
    return compare_and_swap(address, compare, value);
}

emu_ull atomicCAS(emu_ull *address, emu_ull compare, emu_ull value) {
    return compare_and_swap(address, compare, value);
}
