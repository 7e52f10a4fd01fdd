/* The values of PTX instructions, worked out from PTX's manual. A row has a few statements between a prologue and an epilogue;
 * every lane runs them, in a whole warp and in a part of one. */
#include "test.h"
#include "test_ptx.h"
#include "ptx.h"

#include <math.h>

#if !defined(EMU_CHECK)

using namespace emu;

struct Row {
    char result;
    const char *body;
    uint64_t a, b, c, expected;
};

static uint64_t F(float x) {
    return ptx::bits_of(x);
}
static uint64_t D(double x) {
    return ptx::bits_of(x);
}
static const uint64_t nan32 = 0x7fffffff, qnan64 = 0x7ff8000000000000, least64 = 0x8000000000000000;

/* clang-format off: a line for each */
/* Integers wrap around, or do not. */
static const Row integers[] = {
    { 'r', "add.s32 %r0, %r1, %r2", 0x7fffffff, 1, 0, 0x80000000 },
    { 'r', "add.sat.s32 %r0, %r1, %r2", 0x7fffffff, 1, 0, 0x7fffffff },
    { 'r', "sub.sat.s32 %r0, %r1, %r2", 0x80000000, 1, 0, 0x80000000 },
    { 'h', "add.s16 %h0, %h1, %h2", 0xffff, 2, 0, 1 },
    { 'x', "add.s64 %x0, %x1, -3", 1, 0, 0, (uint64_t)-2 },
    { 'r', "sub.u32 %r0, %r1, %r2", 1, 2, 0, 0xffffffff },
    { 'x', "sub.s64 %x0, %x1, %x2", 1, 2, 0, (uint64_t)-1 },
    { 'r', "mul.lo.s32 %r0, %r1, %r2", 0x10001, 0x10001, 0, 0x20001 },
    { 'h', "mul.lo.s16 %h0, %h1, %h2", 0xffff, 0xffff, 0, 1 },
    { 'x', "mul.lo.s64 %x0, %x1, %x2", 0x100000001, 0x100000001, 0, 0x200000001 },
    { 'r', "mul.hi.s32 %r0, %r1, %r2", (uint32_t)-1, 2, 0, 0xffffffff },
    { 'r', "mul.hi.u32 %r0, %r1, %r2", 0xffffffff, 2, 0, 1 },
    { 'x', "mul.hi.u64 %x0, %x1, %x2", (uint64_t)-1, 2, 0, 1 },
    { 'x', "mul.hi.s64 %x0, %x1, %x2", (uint64_t)-1, 2, 0, (uint64_t)-1 },
    { 'x', "mul.wide.s32 %x0, %r1, %r2", (uint32_t)-3, 5, 0, (uint64_t)-15 },
    { 'x', "mul.wide.u32 %x0, %r1, %r2", 0xffffffff, 0xffffffff, 0, 0xfffffffe00000001 },
    { 'r', "mul.wide.u16 %r0, %h1, %h2", 0xffff, 0xffff, 0, 0xfffe0001 },
    { 'r', "mul.wide.s16 %r0, %h1, %h2", 0xffff, 2, 0, 0xfffffffe },
    { 'r', "mad.lo.s32 %r0, %r1, %r2, %r3", 3, 5, (uint32_t)-16, 0xffffffff },
    { 'r', "mad.hi.u32 %r0, %r1, %r2, %r3", 0xffffffff, 0xffffffff, 1, 0xffffffff },
    { 'r', "mad.hi.s32 %r0, %r1, %r2, %r3", (uint32_t)-1, 2, 5, 4 },
    { 'x', "mad.wide.s32 %x0, %r1, %r2, %x3", (uint32_t)-3, 5, 16, 1 },
    { 'x', "mad.wide.u32 %x0, %r1, %r2, %x3", 0xffffffff, 2, 1, 0x1ffffffff },
    { 'x', "mad.lo.s64 %x0, %x1, %x2, %x3", 3, 5, 16, 31 },
    { 'r', "div.s32 %r0, %r1, %r2", (uint32_t)-7, 2, 0, (uint32_t)-3 },
    { 'r', "div.u32 %r0, %r1, %r2", 7, 2, 0, 3 },
    { 'r', "div.u32 %r0, %r1, %r2", 7, 0, 0, 0xffffffff },
    { 'x', "div.s64 %x0, %x1, %x2", least64, (uint64_t)-1, 0, least64 },
    { 'x', "div.u64 %x0, %x1, %x2", (uint64_t)-1, 16, 0, 0x0fffffffffffffff },
    { 'r', "rem.s32 %r0, %r1, %r2", (uint32_t)-7, 2, 0, (uint32_t)-1 },
    { 'r', "rem.u32 %r0, %r1, %r2", 7, 4, 0, 3 },
    { 'x', "rem.s64 %x0, %x1, %x2", (uint64_t)-7, 4, 0, (uint64_t)-3 },
    { 'r', "neg.s32 %r0, %r1", 0x80000000, 0, 0, 0x80000000 },
    { 'x', "neg.s64 %x0, %x1", 5, 0, 0, (uint64_t)-5 },
    { 'r', "abs.s32 %r0, %r1", (uint32_t)-5, 0, 0, 5 },
    { 'x', "abs.s64 %x0, %x1", (uint64_t)-5, 0, 0, 5 },
    { 'r', "min.s32 %r0, %r1, %r2", (uint32_t)-1, 1, 0, 0xffffffff },
    { 'r', "min.u32 %r0, %r1, %r2", (uint32_t)-1, 1, 0, 1 },
    { 'r', "max.s32 %r0, %r1, %r2", (uint32_t)-1, 1, 0, 1 },
    { 'r', "max.u32 %r0, %r1, %r2", (uint32_t)-1, 1, 0, 0xffffffff },
    { 'x', "min.s64 %x0, %x1, %x2", (uint64_t)-1, 1, 0, (uint64_t)-1 },
    { 'x', "max.s64 %x0, %x1, %x2", (uint64_t)-1, 1, 0, 1 },
    { 'h', "max.u16 %h0, %h1, %h2", 0xffff, 1, 0, 0xffff },
};

/* Bits. */
static const Row bits[] = {
    { 'r', "and.b32 %r0, %r1, %r2", 0xff00ff00, 0xf0f0f0f0, 0, 0xf000f000 },
    { 'r', "or.b32 %r0, %r1, %r2", 0xff00ff00, 0xf0f0f0f0, 0, 0xfff0fff0 },
    { 'x', "xor.b64 %x0, %x1, %x2", 0xff, 0xf0, 0, 0x0f },
    { 'h', "and.b16 %h0, %h1, %h2", 0xff0f, 0x0ff0, 0, 0x0f00 },
    { 'r', "not.b32 %r0, %r1", 0xff, 0, 0, 0xffffff00 },
    { 'x', "not.b64 %x0, %x1", 0xff, 0, 0, ~(uint64_t)0xff },
    { 'r', "shl.b32 %r0, %r1, %r2", 3, 31, 0, 0x80000000 },
    { 'r', "shl.b32 %r0, %r1, %r2", 3, 32, 0, 0 },
    { 'x', "shl.b64 %x0, %x1, %r2", 3, 63, 0, least64 },
    { 'x', "shl.b64 %x0, %x1, %r2", 3, 64, 0, 0 },
    { 'r', "shr.u32 %r0, %r1, %r2", 0x80000000, 31, 0, 1 },
    { 'r', "shr.s32 %r0, %r1, %r2", 0x80000000, 40, 0, 0xffffffff },
    { 'x', "shr.s64 %x0, %x1, %r2", least64, 63, 0, (uint64_t)-1 },
    { 'x', "shr.u64 %x0, %x1, %r2", least64, 64, 0, 0 },
    { 'h', "shr.u16 %h0, %h1, %r2", 0x8000, 15, 0, 1 },
    { 'h', "shr.s16 %h0, %h1, %r2", 0x8000, 15, 0, 0xffff },
    { 'r', "popc.b32 %r0, %r1", 0xf0f0f0f0, 0, 0, 16 },
    { 'r', "popc.b64 %r0, %x1", (uint64_t)-1, 0, 0, 64 },
    { 'r', "clz.b32 %r0, %r1", 0, 0, 0, 32 },
    { 'r', "clz.b64 %r0, %x1", 1, 0, 0, 63 },
    { 'r', "brev.b32 %r0, %r1", 1, 0, 0, 0x80000000 },
    { 'x', "brev.b64 %x0, %x1", 2, 0, 0, 0x4000000000000000 },
    { 'r', "bfind.u32 %r0, %r1", 0x00f0, 0, 0, 7 },
    { 'r', "bfind.s32 %r0, %r1", (uint32_t)-1, 0, 0, 0xffffffff },
    { 'r', "bfind.shiftamt.u32 %r0, %r1", 0x00f0, 0, 0, 24 },
    { 'r', "bfind.shiftamt.u32 %r0, %r1", 0, 0, 0, 0xffffffff },
    { 'r', "bfind.shiftamt.s64 %r0, %x1", (uint64_t)-256, 0, 0, 56 },
    { 'r', "bfe.u32 %r0, %r1, 8, 8", 0x12345678, 0, 0, 0x56 },
    { 'r', "bfe.s32 %r0, %r1, 4, 4", 0x000000f0, 0, 0, 0xffffffff },
    { 'x', "bfe.u64 %x0, %x1, 60, 8", 0xf000000000000000, 0, 0, 0xf },
    { 'x', "bfe.s64 %x0, %x1, 4, 4", 0xf0, 0, 0, (uint64_t)-1 },
    { 'r', "bfind.s64 %r0, %x1", (uint64_t)-256, 0, 0, 7 },
    { 'r', "bfi.b32 %r0, %r1, %r2, 8, 4", 0xff, 0, 0, 0xf00 },
    { 'x', "bfi.b64 %x0, %x1, %x2, 32, 32", 0x89abcdef, 0x01234567, 0, 0x89abcdef01234567 },
    { 'x', "bfi.b64 %x0, %x1, %x2, 0, 64", 7, 9, 0, 7 },
    { 'r', "prmt.b32 %r0, %r1, %r2, 4180", 0x33221100, 0x77665544, 0, 0x11005544 },
    { 'r', "prmt.b32 %r0, %r1, %r2, 0x000c", 0, 0x00000080, 0, 0x000000ff },
    { 'r', "bmsk.clamp.b32 %r0, %r1, %r2", 4, 8, 0, 0xff0 },
    { 'r', "shf.l.wrap.b32 %r0, %r1, %r2, 8", 0x11223344, 0x55667788, 0, 0x66778811 },
    { 'r', "shf.r.wrap.b32 %r0, %r1, %r2, 40", 0x11223344, 0x55667788, 0, 0x88112233 },
    { 'r', "shf.r.clamp.b32 %r0, %r1, %r2, 40", 0x11223344, 0x55667788, 0, 0x55667788 },
    { 'r', "shf.l.clamp.b32 %r0, %r1, %r2, 40", 0x11223344, 0x55667788, 0, 0x11223344 },
    { 'r', "lop3.b32 %r0, %r1, %r2, %r3, 0x96", 0xf0, 0xcc, 0xaa, 0x96 },
};

/* Floating point: each rounding, NaN, signs of zero. */
static const Row floats[] = {
    { 'f', "add.f32 %f0, %f1, %f2", F(1), F(0x1p-24f), 0, F(1) },
    { 'f', "add.rn.f32 %f0, %f1, %f2", F(1), F(0x1.000002p-24f), 0, F(1.0000001f) },
    { 'f', "add.rz.f32 %f0, %f1, %f2", F(1), F(0x1.8p-24f), 0, F(1) },
    { 'f', "add.rp.f32 %f0, %f1, %f2", F(1), F(0x1p-40f), 0, F(1.0000001f) },
    { 'f', "sub.rm.f32 %f0, %f1, %f2", F(1), F(0x1p-40f), 0, F(0x1.fffffep-1f) },
    { 'f', "sub.rn.f32 %f0, %f1, %f2", F(INFINITY), F(INFINITY), 0, nan32 },
    { 'f', "mul.rn.f32 %f0, %f1, %f2", F(1.5f), F(-2), 0, F(-3) },
    { 'f', "mul.ftz.f32 %f0, %f1, %f2", F(0x1p-100f), F(-0x1p-30f), 0, F(-0.0f) },
    { 'f', "mul.f32 %f0, %f1, %f2", F(0x1p-100f), F(0x1p-30f), 0, F(0x1p-130f) },
    { 'f', "mul.rz.f32 %f0, %f1, %f2", F(0x1.000002p0f), F(0x1.000002p0f), 0, F(0x1.000004p0f) },
    { 'f', "add.sat.f32 %f0, %f1, %f2", F(1), F(1), 0, F(1) },
    { 'f', "fma.rn.f32 %f0, %f1, %f2, %f3", F(0x1.000002p0f), F(0x1.000002p0f), F(-0x1.000004p0f),
      F(0x1p-46f) },
    { 'f', "fma.rm.f32 %f0, %f1, %f2, %f3", F(1), F(1), F(-0x1p-40f), F(0x1.fffffep-1f) },
    { 'f', "div.rn.f32 %f0, %f1, %f2", F(1), F(3), 0, F(1.0f / 3) },
    { 'f', "div.rz.f32 %f0, %f1, %f2", F(1), F(3), 0, F(0x1.555554p-2f) },
    { 'f', "div.full.f32 %f0, %f1, %f2", F(6), F(3), 0, F(2) },
    { 'f', "neg.f32 %f0, %f1", F(0), 0, 0, F(-0.0f) },
    { 'f', "abs.f32 %f0, %f1", F(-2), 0, 0, F(2) },
    { 'f', "min.f32 %f0, %f1, %f2", F(0), F(-0.0f), 0, F(-0.0f) },
    { 'f', "max.f32 %f0, %f1, %f2", F(-0.0f), F(0), 0, F(0) },
    { 'f', "max.f32 %f0, %f1, %f2", F(NAN), F(2), 0, F(2) },
    { 'f', "min.f32 %f0, %f1, %f2", F(NAN), F(NAN), 0, nan32 },
    { 'f', "max.NaN.f32 %f0, %f1, %f2", F(NAN), F(2), 0, nan32 },
    { 'f', "copysign.f32 %f0, %f1, %f2", F(-1), F(2), 0, F(-2) },
    { 'f', "sqrt.rn.f32 %f0, %f1", F(2), 0, 0, F(1.41421356f) },
    { 'f', "rcp.rn.f32 %f0, %f1", F(4), 0, 0, F(0.25f) },
    { 'f', "rcp.approx.ftz.f32 %f0, %f1", F(0x1p-130f), 0, 0, F(INFINITY) },
    { 'f', "rsqrt.approx.f32 %f0, %f1", F(4), 0, 0, F(0.5f) },
    { 'f', "ex2.approx.ftz.f32 %f0, %f1", F(-3), 0, 0, F(0.125f) },
    { 'f', "ex2.approx.ftz.f32 %f0, %f1", F(-130), 0, 0, F(0) },
    { 'f', "ex2.approx.f32 %f0, %f1", F(-130), 0, 0, F(0x1p-130f) },
    { 'f', "lg2.approx.ftz.f32 %f0, %f1", F(0x1p-130f), 0, 0, F(-INFINITY) },
    { 'f', "lg2.approx.f32 %f0, %f1", F(8), 0, 0, F(3) },
    { 'f', "sin.approx.f32 %f0, %f1", F(0), 0, 0, F(0) },
    { 'f', "cos.approx.f32 %f0, %f1", F(0), 0, 0, F(1) },
    { 'f', "tanh.approx.f32 %f0, %f1", F(0), 0, 0, F(0) },
    { 'd', "add.f64 %d0, %d1, %d2", D(1), D(2), 0, D(3) },
    { 'd', "add.rp.f64 %d0, %d1, %d2", D(1), D(0x1p-80), 0, D(0x1.0000000000001p0) },
    { 'd', "sub.rn.f64 %d0, %d1, %d2", D(1), D(3), 0, D(-2) },
    { 'd', "mul.rn.f64 %d0, %d1, %d2", D(1.5), D(2), 0, D(3) },
    { 'd', "fma.rn.f64 %d0, %d1, %d1, %d3", D(0x1.0000000000001p0), 0, D(-0x1.0000000000002p0),
      D(0x1p-104) },
    { 'd', "div.rn.f64 %d0, %d1, %d2", D(1), D(3), 0, D(1.0 / 3) },
    { 'd', "min.f64 %d0, %d1, %d2", D(NAN), D(2), 0, D(2) },
    { 'd', "max.f64 %d0, %d1, %d2", D(1), D(2), 0, D(2) },
    { 'd', "neg.f64 %d0, %d1", D(1), 0, 0, D(-1) },
    { 'd', "abs.f64 %d0, %d1", D(-1), 0, 0, D(1) },
    { 'd', "sqrt.rn.f64 %d0, %d1", D(9), 0, 0, D(3) },
    { 'd', "rcp.rn.f64 %d0, %d1", D(8), 0, 0, D(0.125) },
    { 'd', "rcp.approx.ftz.f64 %d0, %d1", D(3), 0, 0, D(1.0 / 3) & 0xffffffff00000000 },
    { 'f', "add.ftz.f32 %f0, %f1, %f2", F(0x1p-130f), F(1), 0, F(1) },
    { 'f', "sub.ftz.f32 %f0, %f1, %f2", F(0x1.8p-126f), F(0x1p-126f), 0, F(0) },
    { 'f', "fma.rn.ftz.f32 %f0, %f1, %f2, %f3", F(0x1p-130f), F(0x1p100f), F(1), F(1) },
    { 'f', "div.approx.ftz.f32 %f0, %f1, %f2", F(0x1p-130f), F(0x1p-100f), 0, F(0) },
    { 'f', "min.ftz.f32 %f0, %f1, %f2", F(0x1p-130f), F(1), 0, F(0) },
    { 'f', "max.ftz.f32 %f0, %f1, %f2", F(0x1p-130f), F(-1), 0, F(0) },
    { 'f', "min.NaN.f32 %f0, %f1, %f2", F(1), F(NAN), 0, nan32 },
    { 'f', "sqrt.approx.ftz.f32 %f0, %f1", F(0x1p-130f), 0, 0, F(0) },
    { 'f', "sqrt.rp.f32 %f0, %f1", F(2), 0, 0, F(0x1.6a09e8p0f) },
    { 'f', "rsqrt.approx.ftz.f32 %f0, %f1", F(0x1p-130f), 0, 0, F(INFINITY) },
    { 'd', "div.rz.f64 %d0, %d1, %d2", D(2), D(3), 0, D(0x1.5555555555555p-1) },
    { 'd', "rsqrt.approx.ftz.f64 %d0, %d1", D(4), 0, 0, D(0.5) },
    { 'f', "mad.rn.f32 %f0, %f1, %f2, %f3", F(2), F(3), F(1), F(7) },
    { 'd', "copysign.f64 %d0, %d1, %d2", D(-1), D(2), 0, D(-2) },
};

/* Two halves in a register, and one. */
static const Row halves[] = {
    { 'r', "add.rn.f16x2 %r0, %r1, %r2", 0x3c004000, 0x3c003c00, 0, 0x40004200 },
    { 'r', "fma.rn.f16x2 %r0, %r1, %r2, %r3", 0x40004000, 0x3c004000, 0x3c003c00, 0x42004500 },
    { 'r', "mul.rn.bf16x2 %r0, %r1, %r2", 0x3f804000, 0x40004000, 0, 0x40004080 },
    { 'r', "max.bf16x2 %r0, %r1, %r2", 0x3f80ffff, 0x40003f80, 0, 0x40003f80 },
    { 'r', "max.NaN.bf16x2 %r0, %r1, %r2", 0x3f80ffff, 0x40003f80, 0, 0x40007fff },
    { 'r', "min.f16x2 %r0, %r1, %r2", 0x3c00c000, 0x4000bc00, 0, 0x3c00c000 },
    { 'r', "neg.bf16x2 %r0, %r1", 0x3f80c000, 0, 0, 0xbf804000 },
    { 'r', "abs.f16x2 %r0, %r1", 0xbc004000, 0, 0, 0x3c004000 },
    { 'r', "max.f16x2 %r0, %r1, %r2", 0x3c00c000, 0x4000bc00, 0, 0x4000bc00 },
    { 'r', "min.NaN.f16x2 %r0, %r1, %r2", 0x3c007e00, 0x40003c00, 0, 0x3c007fff },
    { 'h', "sub.rn.f16 %h0, %h1, %h2", 0x4000, 0x3c00, 0, 0x3c00 },
    { 'h', "fma.rn.bf16 %h0, %h1, %h2, %h3", 0x4000, 0x4000, 0x3f80, 0x40a0 },
};

/* Comparison and choice. */
static const Row choices[] = {
    { 'p', "setp.lt.s32 %p0, %r1, %r2", (uint32_t)-1, 1, 0, 1 },
    { 'p', "setp.lt.u32 %p0, %r1, %r2", (uint32_t)-1, 1, 0, 0 },
    { 'p', "setp.hi.u32 %p0, %r1, %r2", (uint32_t)-1, 1, 0, 1 },
    { 'p', "setp.lo.u32 %p0, %r1, %r2", 1, 1, 0, 0 },
    { 'p', "setp.ls.u64 %p0, %x1, %x2", 1, 1, 0, 1 },
    { 'p', "setp.hs.u16 %p0, %h1, %h2", 0xffff, 1, 0, 1 },
    { 'p', "setp.ge.s64 %p0, %x1, %x2", 5, 5, 0, 1 },
    { 'p', "setp.eq.s16 %p0, %h1, %h2", 0x10005, 5, 0, 1 },
    { 'p', "setp.gt.s16 %p0, %h1, -1", 0, 0, 0, 1 },
    { 'p', "setp.ne.b32 %p0, %r1, %r2", 5, 5, 0, 0 },
    { 'p', "setp.eq.f32 %p0, %f1, %f2", F(NAN), F(NAN), 0, 0 },
    { 'p', "setp.ne.f32 %p0, %f1, %f2", F(NAN), F(1), 0, 0 },
    { 'p', "setp.neu.f32 %p0, %f1, %f2", F(NAN), F(1), 0, 1 },
    { 'p', "setp.equ.f32 %p0, %f1, %f2", F(NAN), F(1), 0, 1 },
    { 'p', "setp.leu.f32 %p0, %f1, %f2", F(2), F(1), 0, 0 },
    { 'p', "setp.ltu.f64 %p0, %d1, %d2", D(NAN), D(1), 0, 1 },
    { 'p', "setp.geu.f64 %p0, %d1, %d2", D(1), D(1), 0, 1 },
    { 'p', "setp.gtu.f32 %p0, %f1, %f2", F(1), F(1), 0, 0 },
    { 'p', "setp.nan.f32 %p0, %f1, %f2", F(1), F(NAN), 0, 1 },
    { 'p', "setp.num.f64 %p0, %d1, %d2", D(1), D(1), 0, 1 },
    { 'p', "setp.eq.and.s32 %p0, %r1, %r2, !%p3", 5, 5, 0, 1 },
    { 'p', "setp.eq.or.s32 %p4|%p0, %r1, %r2, %p3", 5, 5, 0, 0 },
    { 'p', "setp.eq.xor.s32 %p0, %r1, %r2, %p3", 5, 5, 1, 0 },
    { 'p', "and.pred %p0, %p1, %p2", 1, 0, 0, 0 },
    { 'p', "or.pred %p0, %p1, %p2", 1, 0, 0, 1 },
    { 'p', "xor.pred %p0, %p1, %p2", 1, 1, 0, 0 },
    { 'p', "not.pred %p0, %p1", 1, 0, 0, 0 },
    { 'p', "mov.pred %p0, %p1", 1, 0, 0, 1 },
    { 'p', "mov.pred %p0, -1", 0, 0, 0, 1 },
    { 'r', "selp.b32 %r0, %r1, %r2, %p3", 7, 9, 1, 7 },
    { 'd', "selp.f64 %d0, %d1, %d2, %p3", D(1), D(2), 0, D(2) },
    { 'r', "mov.u32 %r0, 5; @%p1 mov.u32 %r0, 6; @!%p1 add.s32 %r0, %r0, 10", 0, 0, 0, 15 },
};

/* Conversions. */
static const Row conversions[] = {
    { 'x', "cvt.s64.s32 %x0, %r1", 0x80000000, 0, 0, 0xffffffff80000000 },
    { 'x', "cvt.u64.u32 %x0, %r1", 0xffffffff80000000, 0, 0, 0x80000000 },
    { 'r', "cvt.u32.u64 %r0, %x1", 0x1234567890, 0, 0, 0x34567890 },
    { 'r', "cvt.s32.s8 %r0, %r1", 0x180, 0, 0, 0xffffff80 },
    { 'r', "cvt.u32.u8 %r0, %r1", 0x180, 0, 0, 0x80 },
    { 'r', "cvt.s32.s16 %r0, %h1", 0x8000, 0, 0, 0xffff8000 },
    { 'h', "cvt.u16.u32 %h0, %r1", 0x12345, 0, 0, 0x2345 },
    { 'r', "cvt.sat.s8.s32 %r0, %r1", 1000, 0, 0, 127 },
    { 'r', "cvt.sat.u8.s32 %r0, %r1", (uint32_t)-5, 0, 0, 0 },
    { 'f', "cvt.rn.f32.s32 %f0, %r1", 0x7fffffff, 0, 0, F(0x1p31f) },
    { 'f', "cvt.rz.f32.s32 %f0, %r1", 0x7fffffff, 0, 0, F(0x1.fffffep30f) },
    { 'f', "cvt.rn.f32.u64 %f0, %x1", (uint64_t)-1, 0, 0, F(0x1p64f) },
    { 'f', "cvt.rn.f32.u16 %f0, %h1", 0xffff, 0, 0, F(65535) },
    { 'd', "cvt.rn.f64.s64 %d0, %x1", (uint64_t)-3, 0, 0, D(-3) },
    { 'd', "cvt.rn.f64.u64 %d0, %x1", least64, 0, 0, D(0x1p63) },
    { 'd', "cvt.f64.f32 %d0, %f1", F(1.5f), 0, 0, D(1.5) },
    { 'f', "cvt.rn.f32.f64 %f0, %d1", D(1 + 0x1p-24), 0, 0, F(1) },
    { 'f', "cvt.rp.f32.f64 %f0, %d1", D(1 + 0x1p-24), 0, 0, F(1.0000001f) },
    { 'f', "cvt.sat.f32.f32 %f0, %f1", F(NAN), 0, 0, F(0) },
    { 'f', "cvt.rmi.f32.f32 %f0, %f1", F(-1.5f), 0, 0, F(-2) },
    { 'd', "cvt.rni.f64.f64 %d0, %d1", D(2.5), 0, 0, D(2) },
    { 'd', "cvt.rpi.f64.f64 %d0, %d1", D(2.25), 0, 0, D(3) },
    { 'r', "cvt.rzi.s32.f32 %r0, %f1", F(-2.75f), 0, 0, (uint32_t)-2 },
    { 'r', "cvt.rni.s32.f32 %r0, %f1", F(3.5f), 0, 0, 4 },
    { 'r', "cvt.rzi.u32.f32 %r0, %f1", F(-1), 0, 0, 0 },
    { 'r', "cvt.rzi.s32.f32 %r0, %f1", F(1e20f), 0, 0, 0x7fffffff },
    { 'r', "cvt.rzi.s32.f32 %r0, %f1", F(NAN), 0, 0, 0 },
    { 'r', "cvt.rzi.s32.f64 %r0, %d1", qnan64, 0, 0, 0x80000000 },
    { 'x', "cvt.rmi.s64.f64 %x0, %d1", D(-1.5), 0, 0, (uint64_t)-2 },
    { 'x', "cvt.rpi.s64.f64 %x0, %d1", D(-1.5), 0, 0, (uint64_t)-1 },
    { 'x', "cvt.rzi.u64.f64 %x0, %d1", D(0x1p63), 0, 0, least64 },
    { 'x', "cvt.rzi.s64.f64 %x0, %d1", D(-INFINITY), 0, 0, least64 },
    { 'r', "cvt.rn.bf16x2.f32 %r0, %f1, %f2", F(1), F(2), 0, 0x3f804000 },
    { 'r', "cvt.rn.bf16x2.f32 %r0, %f1, %f2", 0x3f808000, 0x3f818000, 0, 0x3f803f82 },
    { 'r', "cvt.rz.bf16x2.f32 %r0, %f1, %f2", 0x3f80ffff, 0x3f81ffff, 0, 0x3f803f81 },
    { 'r', "cvt.rn.f16x2.f32 %r0, %f1, %f2", F(1), F(65520), 0, 0x3c007c00 },
    { 'h', "cvt.rn.bf16.f32 %h0, %f1", F(NAN), 0, 0, 0x7fff },
    { 'h', "cvt.rn.f16.f32 %h0, %f1", F(0x1p-24f), 0, 0, 1 },
    { 'h', "cvt.rn.f16.f32 %h0, %f1", F(0x1p-25f), 0, 0, 0 },
    { 'h', "cvt.rz.f16.f32 %h0, %f1", F(1e6f), 0, 0, 0x7bff },
    { 'f', "cvt.f32.f16 %f0, %h1", 0x0001, 0, 0, F(0x1p-24f) },
    { 'f', "cvt.f32.f16 %f0, %h1", 0xfc00, 0, 0, F(-INFINITY) },
    { 'f', "cvt.f32.bf16 %f0, %h1", 0x3fc0, 0, 0, F(1.5f) },
    { 'h', "cvt.rn.f16.f64 %h0, %d1", D(1), 0, 0, 0x3c00 },
    { 'd', "cvt.f64.f16 %d0, %h1", 0xbc00, 0, 0, D(-1) },
    { 'd', "cvt.f64.bf16 %d0, %h1", 0x3f80, 0, 0, D(1) },
};

/* Moves and parts. */
static const Row moves[] = {
    { 'x', "mov.b64 %x0, {%r1, %r2}", 0x11111111, 0x22222222, 0, 0x2222222211111111 },
    { 'r', "mov.b32 %r0, {%h1, %h2}", 0x1111, 0x2222, 0, 0x22221111 },
    { 'r', "mov.b64 {%r4, %r0}, %x1", 0x1122334455667788, 0, 0, 0x11223344 },
    { 'h', "mov.b32 {%h0, %h4}, %r1", 0x11223344, 0, 0, 0x3344 },
    { 'f', "mov.f32 %f0, 0f3FC00000", 0, 0, 0, F(1.5f) },
    { 'd', "mov.f64 %d0, 0d3FF8000000000000", 0, 0, 0, D(1.5) },
    { 'r', "mov.u32 %r0, %nctaid.x", 0, 0, 0, 1 },
    { 'r', "mov.u32 %r4, %laneid; mov.u32 %r5, %tid.x; sub.s32 %r0, %r4, %r5", 0, 0, 0, 0 },
    { 'r', "mov.u32 %r4, %lanemask_lt; mov.u32 %r5, %lanemask_ge; xor.b32 %r0, %r4, %r5", 0, 0, 0,
      0xffffffff },
    { 'r', "nanosleep.u32 20; prefetch.global.L2 [%a0]; membar.gl; fence.proxy.async; mov.u32 %r0, 3", 0,
      0, 0, 3 },
    { 'x', "cvta.to.global.u64 %x4, %a0; cvta.global.u64 %x5, %x4; sub.s64 %x0, %x5, %a0", 0, 0, 0, 0 },
    { 'r', "ld.volatile.global.u32 %r0, [%a0+8]", 0, 9, 0, 9 },
    { 'r', "ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%r4, %r0}, [%a0]", 0x700000001, 0, 0, 7 },
    { 'r', "{ .reg .b32 q; mov.b32 q, %r1; add.s32 %r0, q, 1; }", 6, 0, 0, 7 },
};

/* clang-format on */

static void check_row(const Row &row, unsigned threads) {
    const Values outputs =
        run_text(text_of("", row.body, row.result), { row.a, row.b, row.c }, { 1, threads, 1, 0 });
    const std::string said = reports();
    CHECK_WITH(outputs.size() == threads && said.empty(), std::string(row.body) + ": " + said);
    for (const uint64_t value : outputs)
        if (value != row.expected) {
            CHECK_WITH(false, std::string(row.body) + ": " + hexadecimal(value) + ", not " +
                                  hexadecimal(row.expected));
            return;
        }
}

template <size_t count> static void check_rows(const Row (&rows)[count]) {
    for (const Row &row : rows) {
        check_row(row, 32);
        check_row(row, 7);
    }
}

void ptx_values() {
    check_rows(integers);
    check_rows(bits);
    check_rows(floats);
    check_rows(halves);
    check_rows(choices);
    check_rows(conversions);
    check_rows(moves);
}

#endif
