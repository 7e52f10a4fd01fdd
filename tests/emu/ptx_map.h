/* Handlers of the PTX interpreter that compute each lane's result from its own values. An operation is a struct with a function
 * `of`; these templates make a handler of it. Private to tests/emu. */
#ifndef EMU_PTX_MAP_H
#define EMU_PTX_MAP_H

#include "ptx.h"

namespace emu {
namespace ptx {

template <typename R, typename A, typename Op>
void map1(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]);
    each(active, [=](unsigned lane) { to[lane] = bits_of<R>(Op::of(value_of<A>(a[lane]))); });
}

template <typename R, typename A, typename B, typename Op>
void map2(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]);
    each(active,
         [=](unsigned lane) { to[lane] = bits_of<R>(Op::of(value_of<A>(a[lane]), value_of<B>(b[lane]))); });
}

template <typename R, typename A, typename B, typename C, typename Op>
void map3(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *a = lanes.row(in.from[0]), *b = lanes.row(in.from[1]), *c = lanes.row(in.from[2]);
    each(active, [=](unsigned lane) {
        to[lane] = bits_of<R>(Op::of(value_of<A>(a[lane]), value_of<B>(b[lane]), value_of<C>(c[lane])));
    });
}

#define OPERATION1(name, expression)    \
    template <typename T> struct name { \
        static T of(T a) {              \
            return expression;          \
        }                               \
    };
#define OPERATION2(name, expression)    \
    template <typename T> struct name { \
        static T of(T a, T b) {         \
            return expression;          \
        }                               \
    };

} // namespace ptx
} // namespace emu

#endif
