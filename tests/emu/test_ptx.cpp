/* Tests of the PTX interpreter on small texts written by hand: threads together, memory, errors. The values of instructions
 * are in test_ptx_values.cpp. */
#include "test.h"
#include "test_ptx.h"
#include "exec.h"
#include "ptx.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test_kernels.h"

#if defined(EMU_CHECK)

void ptx_tests() {} /* the checker watches compiled kernels only */

#else

using namespace emu;

/* ---- running a text ---- */

static void give_pointers(const void *pointers, void (*take)(void *, const void *, size_t), void *user) {
    for (const uint64_t pointer : *static_cast<const Values *>(pointers)) take(user, &pointer, 8);
}

static void keep(void *) {}

std::string text_of(const char *before, const char *body, char result) {
    std::string text = ".version 8.0\n.target sm_90\n.address_size 64\n";
    text += before;
    text +=
        "\n.visible .entry row(.param .u64 in, .param .u64 out)\n{\n"
        ".reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .f64 %d<8>; .reg .b64 "
        "%x<16>;\n"
        ".reg .b64 %a<4>; .reg .b32 %t<4>;\n"
        "ld.param.u64 %a0, [in]; ld.param.u64 %a1, [out];\n"
        "mov.u32 %t1, %ctaid.x; mov.u32 %t2, %ntid.x; mov.u32 %t3, %tid.x; mad.lo.u32 %t0, %t1, %t2, %t3;\n";
    for (const char *i : { "1", "2", "3" }) {
        const std::string n = i;
        text += "ld.global.u64 %x" + n + ", [%a0+" + std::to_string(8 * (n[0] - '1')) + "];\n";
        text += "cvt.u32.u64 %r" + n + ", %x" + n + "; cvt.u16.u64 %h" + n + ", %x" + n + ";\n";
        text += "mov.b32 %f" + n + ", %r" + n + "; mov.b64 %d" + n + ", %x" + n + ";\n";
        text += "setp.ne.u64 %p" + n + ", %x" + n + ", 0;\n";
    }
    text += body;
    text += ";\n";
    if (result == 'h') text += "cvt.u64.u16 %x0, %h0;\n";
    if (result == 'f') text += "mov.b32 %r0, %f0;\n";
    if (result == 'r' || result == 'f') text += "cvt.u64.u32 %x0, %r0;\n";
    if (result == 'd') text += "mov.b64 %x0, %d0;\n";
    if (result == 'p') text += "selp.u64 %x0, 1, 0, %p0;\n";
    return text + "mul.wide.u32 %a2, %t0, 8; add.s64 %a2, %a1, %a2; st.global.u64 [%a2], %x0; ret;\n}\n";
}

Values run_text(const std::string &text, const Values &inputs, const Shape &shape) {
    ptx::Function *kernel = ptx::kernel_of_text(text.c_str(), "row");
    if (!kernel) return {};
    const size_t threads = (size_t)shape.blocks * shape.threads;
    Values outputs(threads), *pointers = new Values(2);
    void *in = nullptr, *out = nullptr;
    cudaMalloc(&in, inputs.size() * 8);
    cudaMalloc(&out, threads * 8);
    cudaMemcpy(in, inputs.data(), inputs.size() * 8, cudaMemcpyHostToDevice);
    *pointers = { (uint64_t)(uintptr_t)in, (uint64_t)(uintptr_t)out };
    Launch launch;
    launch.grid = shape.blocks;
    launch.block = shape.threads;
    launch.cluster = shape.cluster;
    launch.dynamic_bytes = shape.dynamic_bytes;
    launch.device = 0;
    launch.comparable = true;
    launch.call = std::make_shared<emu_kernel_call>();
    *launch.call = { nullptr, nullptr, keep, pointers, 16, give_pointers };
    launch.ptx = kernel;
    Lock lock(big_lock);
    const bool ok = execute(launch);
    cudaMemcpy(outputs.data(), out, threads * 8, cudaMemcpyDeviceToHost);
    cudaFree(in);
    cudaFree(out);
    delete pointers;
    return ok ? outputs : Values();
}

std::string reports() {
    char text[2000] = "";
    emu_take_reports(text, sizeof text);
    return text;
}

std::string hexadecimal(uint64_t value) {
    char text[32];
    snprintf(text, sizeof text, "0x%llx", (unsigned long long)value);
    return text;
}

/* ---- threads together ---- */

struct Group {
    const char *name, *before, *body;
    char result;
    Shape shape;
    uint64_t (*expected)(unsigned thread);
};

static const char square[] =
    ".func (.param .b32 got) square(.param .b32 of)\n{\n.reg .b32 %r<3>; ld.param.u32 %r1, [of]; mul.lo.s32 "
    "%r2, %r1, %r1;\n"
    "st.param.b32 [got+0], %r2; ret;\n}\n"
    ".func (.param .b64 both) sum_of_squares(.param .b32 a, .param .align 8 .b8 b[8])\n{\n"
    ".reg .b32 %r<6>; .reg .b64 %x<3>;\nld.param.u32 %r1, [a]; ld.param.u32 %r2, [b+4];\n"
    "{ .param .b32 param0; st.param.b32 [param0+0], %r1; .param .b32 retval0;\n"
    "call.uni (retval0), square, (param0); ld.param.b32 %r3, [retval0+0]; }\n"
    "{ .param .b32 param0; st.param.b32 [param0+0], %r2; .param .b32 retval0;\n"
    "call.uni (retval0), square, (param0); ld.param.b32 %r4, [retval0+0]; }\n"
    "add.s32 %r5, %r3, %r4; cvt.u64.u32 %x1, %r5; st.param.b64 [both+0], %x1; ret;\n}\n";

static const char call_both[] =
    "mov.u32 %r4, 1000; setp.gt.u32 %p4, %t0, 3; @%p4 bra CALL; mov.u64 %x0, 5; bra JOIN;\nCALL:\n"
    "{ .param .b32 param0; st.param.b32 [param0+0], %t0; .param .align 8 .b8 param1[8]; st.param.b32 "
    "[param1+0], 99;\n"
    "st.param.b32 [param1+4], %r4; .param .b64 retval0; call.uni (retval0), sum_of_squares, (param0, "
    "param1);\n"
    "ld.param.b64 %x0, [retval0+0]; }\nJOIN:\nadd.s64 %x0, %x0, 1";

static const char through_local[] =
    ".local .align 8 .b8 depot[32]; .reg .b64 %SP, %SPL;\n"
    "mov.u64 %SPL, depot; cvta.local.u64 %SP, %SPL; and.b32 %r4, %t0, 3; mul.wide.u32 %x4, %r4, 8;\n"
    "add.s64 %x5, %SPL, %x4; add.s64 %x6, %SP, %x4; cvt.u64.u32 %x7, %t0; st.local.u64 [%x5], %x7; ld.u64 "
    "%x0, [%x6];\n"
    "st.local.v2.u32 [depot+16], {%t0, %r4}; ld.local.u64 %x8, [depot+16]; shr.u64 %x8, %x8, 32; add.s64 "
    "%x0, %x0, %x8";

static const char bulk_body[] =
    "mov.u32 %r4, bar; setp.ne.u32 %p4, %t3, 0; @%p4 bra WAIT;\n"
    "mbarrier.init.shared::cta.b64 [%r4], 1; fence.mbarrier_init.release.cluster;\n"
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 32; mov.u32 %r5, tile;\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5+16], [%a0+16], 16, [%r4];\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%a0], 16, "
    "[%r4];\nWAIT:\nbar.sync 0;\nAGAIN:\n"
    "mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4], 0; @!%p5 bra AGAIN;\n"
    "and.b32 %r6, %t3, 3; mul.wide.u32 %x4, %r6, 8; mov.u64 %x5, tile; add.s64 %x4, %x4, %x5; ld.shared.u64 "
    "%x0, [%x4]";

static const char atomics_body[] =
    ".shared .align 8 .b8 cell[64]; setp.ne.u32 %p4, %t0, 0; mov.u32 %r4, 0; mov.u32 %r5, -1; mov.u64 %x4, "
    "0;\n"
    "@%p4 bra READY; st.shared.u32 [cell], 100; st.shared.u32 [cell+4], %r4; st.shared.u32 [cell+8], 5; "
    "st.shared.u32 "
    "[cell+12], %r5;\n"
    "st.shared.u64 [cell+16], %x4; st.shared.u64 [cell+24], %x4; st.shared.u64 [cell+32], 5;\nREADY:\n"
    "bar.warp.sync -1; atom.shared.min.s32 %r6, [cell], %t0; atom.shared.inc.u32 %r6, [cell+4], 9;\n"
    "red.shared.dec.u32 [cell+8], 9; atom.shared.and.b32 %r6, [cell+12], 0xf0; atom.shared.xor.b32 %r6, "
    "[cell+16], %t0;\n"
    "atom.shared.add.f64 %d4, [cell+24], 0d3FF0000000000000; cvt.u64.u32 %x5, %t0;\n"
    "red.shared.max.u64 [cell+32], %x5; bar.warp.sync -1; ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [cell];\n"
    "add.s32 %r4, %r4, %r5; add.s32 %r6, %r6, %r7; add.s32 %r4, %r4, %r6; ld.shared.u32 %r5, [cell+16];\n"
    "ld.shared.f64 %d5, [cell+24]; cvt.rzi.s32.f64 %r6, %d5; ld.shared.u32 %r7, [cell+32]; add.s32 %r5, %r5, "
    "%r6;\n"
    "add.s32 %r0, %r4, %r5; add.s32 %r0, %r0, %r7";

static const char bulk_store_body[] =
    ".shared .align 16 .b8 tile[32]; setp.ne.u32 %p4, %t0, 0; mov.u32 %r0, 7; @%p4 bra OUT; mov.u32 %r4, "
    "tile;\n"
    "st.shared.u32 [tile], 40; st.shared.u32 [tile+4], 2; fence.proxy.async.shared::cta;\n"
    "cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r4], 16; cp.async.bulk.commit_group;\n"
    "cp.async.bulk.wait_group.read 0; ld.global.v2.u32 {%r5, %r6}, [%a0]; add.s32 %r0, %r5, "
    "%r6;\nOUT:\nbar.warp.sync -1";

static const char arrivals_body[] =
    ".shared .align 8 .b64 bar; mov.u32 %r4, bar; setp.ne.u32 %p4, %t3, 0; @%p4 bra READY;\n"
    "mbarrier.init.shared::cta.b64 [bar], 64;\nREADY:\nbar.sync 0; mbarrier.arrive.shared::cta.b64 _, "
    "[%r4];\nAGAIN:\n"
    "mbarrier.test_wait.parity.shared::cta.b64 %p5, [%r4], 0; @!%p5 bra AGAIN; mov.u32 %r0, 1";

/* The first wait leaves the latest group on its way, so its place still has what was there. */
static const char late_copies_body[] =
    "mov.u32 %r4, tile; mad.lo.u32 %r4, %t3, 16, %r4; and.b32 %r5, %t3, 1; mul.wide.u32 %x4, %r5, 16; add.s64 %x4, %a0, %x4;\n"
    "mov.u32 %r6, 70; st.shared.v4.u32 [%r4], {%r6, %r6, %r6, %r6}; st.shared.u32 [%r4+1024], %r6;\n"
    "cp.async.cg.shared.global [%r4], [%x4], 16; cp.async.commit_group;\n"
    "cp.async.ca.shared.global [%r4+1024], [%x4], 4; cp.async.commit_group; cp.async.wait_group 1;\n"
    "ld.shared.u32 %r7, [%r4]; ld.shared.u32 %r5, [%r4+1024]; cp.async.wait_group 0; ld.shared.u32 %r6, [%r4+1024];\n"
    "mad.lo.u32 %r5, %r5, 100, %r6; mad.lo.u32 %r0, %r7, 10000, %r5";

static const Group groups[] = {
    { "shfl up",
      "",
      "shfl.sync.up.b32 %r0|%p4, %t0, 4, 0, -1; @!%p4 add.s32 %r0, %r0, 100",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t >= 4 ? t - 4 : t + 100; } },
    { "shfl down in halves",
      "",
      "shfl.sync.down.b32 %r0|%p4, %t0, 4, 0x100f, -1; @!%p4 add.s32 %r0, %r0, 100",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t % 16 < 12 ? t + 4 : t + 100; } },
    { "shfl bfly",
      "",
      "shfl.sync.bfly.b32 %r0, %t0, 5, 31, 0xffffffff",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t ^ 5; } },
    { "shfl idx",
      "",
      "add.s32 %r4, %t0, 1; shfl.sync.idx.b32 %r0, %t0, %r4, 0x181f, -1",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return (t & 24) | ((t + 1) & 7); } },
    { "vote ballot",
      "",
      "and.b32 %r4, %t0, 1; setp.eq.s32 %p4, %r4, 1; vote.sync.ballot.b32 %r0, %p4, -1",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 0xaaaaaaaa; } },
    { "vote any, all, uni",
      "",
      "setp.eq.s32 %p4, %t0, 3; vote.sync.any.pred %p5, %p4, -1; vote.sync.all.pred %p6, !%p4, -1;"
      "vote.sync.uni.pred %p7, %p5, -1; not.pred %p6, %p6; and.pred %p0, %p5, %p6; and.pred %p0, %p0, %p7",
      'p',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 1; } },
    { "vote in a branch",
      "",
      "setp.lt.u32 %p4, %t0, 8; mov.u32 %r0, 0; @!%p4 bra OUT; vote.sync.ballot.b32 %r0, %p4, 255;\nOUT:\n"
      "bar.warp.sync -1",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t < 8 ? 255 : 0; } },
    { "match any",
      "",
      "shr.u32 %r4, %t0, 4; match.any.sync.b32 %r0, %r4, -1",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t < 16 ? 0xffff : 0xffff0000; } },
    { "match all",
      "",
      "match.all.sync.b64 %r0|%p4, %x1, -1; @%p4 add.s32 %r0, %r0, 2",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 1; } },
    { "redux",
      "",
      "redux.sync.add.u32 %r4, %t0, -1; redux.sync.max.s32 %r5, %t0, -1; add.s32 %r0, %r4, %r5",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 496 + 31; } },
    { "other reductions",
      "",
      "redux.sync.min.u32 %r4, %t0, -1; redux.sync.max.u32 %r5, %t0, -1; redux.sync.and.b32 %r6, %t0, -1;\n"
      "redux.sync.or.b32 %r7, %t0, -1; redux.sync.xor.b32 %r8, %t0, -1; not.b32 %r9, %t0;\n"
      "redux.sync.min.s32 %r10, %r9, -1; add.s32 %r0, %r4, %r5; add.s32 %r0, %r0, %r6; add.s32 %r0, %r0, "
      "%r7;\n"
      "add.s32 %r0, %r0, %r8; add.s32 %r0, %r0, %r10",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 0 + 31 + 0 + 31 + 0 - 32; } },
    { "match any of wide values",
      "",
      "cvt.u64.u32 %x5, %t0; shr.u64 %x5, %x5, 3;\n"
      "shl.b64 %x5, %x5, 40; match.any.sync.b64 %r0, %x5, -1",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return (uint64_t)0xff << t / 8 * 8; } },
    { "activemask",
      "",
      "mov.u32 %r0, 0; setp.lt.u32 %p4, %t0, 4; @%p4 activemask.b32 %r0",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t < 4 ? 15 : 0; } },
    { "a loop of different lengths",
      "",
      "mov.u32 %r4, 0; mov.u32 %r0, 0;\nTURN:\nsetp.ge.u32 %p4, %r4, %t0; @%p4 bra END;\n"
      "add.s32 %r0, %r0, %r4; add.s32 %r4, %r4, 1; bra.uni TURN;\nEND:\nactivemask.b32 %r5; and.b32 %r5, "
      "%r5, 1024; add.s32 %r0, %r0, %r5",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return (uint64_t)t * (t - 1) / 2 + 1024; } },
    { "lanes that end",
      "",
      "setp.lt.u32 %p4, %t0, 3; mov.u64 %x4, 7; mul.wide.u32 %x5, %t0, 8; add.s64 %x5, %a1, %x5;\n"
      "@%p4 st.global.u64 [%x5], %x4; @%p4 exit; activemask.b32 %r0",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t < 3 ? 7 : 0xfffffff8; } },
    { "calls in a branch",
      square,
      call_both,
      'x',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t > 3 ? t * t + 1000001 : 6; } },
    { "local memory",
      "",
      through_local,
      'x',
      { 2, 64, 1, 0 },
      [](unsigned t) -> uint64_t { return t + t % 4; } },
    { "shared memory and a barrier",
      "",
      ".shared .align 4 .b8 part[512]; mul.lo.s32 %r4, %t3, 4; mov.u32 %r5, part;\n"
      "add.s32 %r6, %r5, %r4; st.shared.u32 [%r6], %t0; bar.sync 0; xor.b32 %r4, %r4, 508; add.s32 %r6, %r5, "
      "%r4;\n"
      "ld.shared.u32 %r0, [%r6]",
      'r',
      { 2, 128, 1, 0 },
      [](unsigned t) -> uint64_t { return t / 128 * 128 + 127 - t % 128; } },
    { "dynamic shared memory, generic",
      ".extern .shared .align 16 .b8 dyn[];\n",
      "mov.u64 %x4, dyn; cvta.shared.u64 %x5, %x4;\n"
      "mul.wide.u32 %x6, %t3, 4; add.s64 %x5, %x5, %x6; st.u32 [%x5], %t0; bar.sync 0; cvta.to.shared.u64 "
      "%x7, %x5;\n"
      "ld.shared.u32 %r0, [%x7]",
      'r',
      { 2, 64, 1, 256 },
      [](unsigned t) -> uint64_t { return t; } },
    { "barriers that collect",
      "",
      "setp.eq.s32 %p4, %t3, 5; bar.red.or.pred %p5, 0, %p4; bar.red.and.pred %p6, 0, !%p4;\n"
      "bar.red.popc.u32 %r0, 0, !%p4; @%p5 add.s32 %r0, %r0, 1000; @%p6 add.s32 %r0, %r0, 5000",
      'r',
      { 1, 64, 1, 0 },
      [](unsigned) -> uint64_t { return 1063; } },
    { "atomics in shared memory",
      "",
      ".shared .align 8 .u64 total; .shared .align 4 .u32 most; mov.u64 %x4, 0;\n"
      "setp.eq.s32 %p4, %t3, 0; @%p4 st.shared.u64 [total], %x4; @%p4 st.shared.u32 [most], %t3; bar.sync "
      "0;\n"
      "cvt.u64.u32 %x5, %t3; atom.shared.add.u64 %x6, [total], %x5; red.shared.max.u32 [most], %t3; bar.sync "
      "0;\n"
      "ld.shared.u64 %x0, [total]; ld.shared.u32 %r4, [most]; cvt.u64.u32 %x6, %r4; add.s64 %x0, %x0, %x6",
      'x',
      { 1, 64, 1, 0 },
      [](unsigned) -> uint64_t { return 2016 + 63; } },
    { "atomics in global memory",
      "",
      "mov.u32 %r4, 1; mov.u64 %x9, %a0; atom.global.add.u32 %r5, [%x9], %r4;\n"
      "atom.global.exch.b32 %r6, [%x9+8], 5; atom.global.cas.b32 %r6, [%x9+8], 5, 6; red.global.or.b32 "
      "[%x9+16], %t0;\n"
      "atom.add.f32 %f4, [%x9+4], 0f3F800000; bar.sync 0; ld.global.v2.u32 {%r0, %r7}, [%x9]; ld.global.u32 "
      "%r8, [%x9+16];\n"
      "add.s32 %r0, %r0, %r8; cvt.rzi.u32.f32 %r7, %f4; sub.u32 %r7, %r7, %t0; add.s32 %r0, %r0, %r7",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 1 + 32 + 31; } },
    { "constants of the module",
      ".const .align 4 .b32 table[4] = {10, 20, 30, 0x28};\n.global .align 8 .b8 bytes[8] = {1, 2, 3, 4, 5, "
      "6, 7, 8};\n",
      "and.b32 %r4, %t0, 3; mul.wide.u32 %x4, %r4, 4; mov.u64 %x5, table; add.s64 %x5, %x5, %x4; "
      "ld.const.u32 %r0, [%x5];\n"
      "ld.global.u8 %r5, [bytes+2]; add.s32 %r0, %r0, %r5",
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return (t % 4 + 1) * 10 + 3; } },
    { "vectors",
      "",
      "ld.global.v4.u16 {%h4, %h5, %h6, %h7}, [%a0]; ld.global.s8 %h0, [%a0+7]; add.s16 %h0, %h0, %h7",
      'h',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 0; } },
    { "parameters by address",
      "",
      "mov.b64 %x4, out; cvta.param.u64 %x5, %x4; ld.param.u64 %x6, [%x4]; ld.u64 %x7, [%x5];\n"
      "sub.s64 %x0, %x6, %a1; sub.s64 %x7, %x7, %a1; or.b64 %x0, %x0, %x7",
      'x',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 0; } },
    { "a cluster",
      "",
      ".shared .align 4 .u32 mine; st.shared.u32 [mine], %t0; barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned; mov.u32 %r4, %cluster_ctarank; xor.b32 %r4, %r4, 1; mov.u64 "
      "%x4, mine;\n"
      "cvta.shared.u64 %x4, %x4; mapa.u64 %x5, %x4, %r4; ld.u32 %r0, [%x5]; "
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned; mov.u32 %r5, %cluster_nctarank; mul.lo.s32 %r5, %r5, 100; "
      "add.s32 %r0, %r0, %r5",
      'r',
      { 4, 1, 2, 0 },
      [](unsigned t) -> uint64_t { return (t ^ 1) + 200; } },
    { "other atomics",
      "",
      atomics_body,
      'r',
      { 1, 32, 1, 0 },
      [](unsigned) -> uint64_t { return 0 + 2 + 3 + 0xf0 + 0 + 32 + 31; } },
    { "addresses in a cluster",
      "",
      ".shared .align 4 .u32 mine; st.shared.u32 [mine], %t0; barrier.cluster.arrive.aligned; "
      "barrier.cluster.wait.aligned;\n"
      "mov.u32 %r4, mine; mapa.shared::cluster.u32 %r5, %r4, 0; ld.shared::cluster.u32 %r0, [%r5];\n"
      "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned",
      'r',
      { 4, 1, 2, 0 },
      [](unsigned t) -> uint64_t { return t & 2; } },
    { "stores that a barrier of another block counts",
      ".shared .align 16 .b8 place[16];\n.shared .align 8 .b64 told;\n",
      "mov.u32 %r4, told; mov.u32 %r5, place; mbarrier.init.shared::cta.b64 [%r4], 1; fence.mbarrier_init.release.cluster;\n"
      "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 %r6, %cluster_ctarank; xor.b32 %r6, %r6, 1;\n"
      "mapa.shared::cluster.u32 %r7, %r4, %r6; mapa.shared::cluster.u32 %r8, %r5, %r6; cvt.u64.u32 %x4, %t0; mov.u64 %x5, 100;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r8], {%x4, %x5}, [%r7];\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r4], 0; @!%p4 bra WAIT;\n"
      "ld.shared.u64 %x6, [%r5]; ld.shared.u64 %x7, [%r5+8]; add.s64 %x0, %x6, %x7; barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned",
      'x',
      { 4, 1, 2, 0 },
      [](unsigned t) -> uint64_t { return (t ^ 1) + 100; } },
    { "copies that a thread waits for",
      ".shared .align 16 .b8 tile[2048];\n",
      late_copies_body,
      'r',
      { 1, 64, 1, 0 },
      [](unsigned t) -> uint64_t { return (t % 2 ? 20 : 1) * 10001u + 7000u; } },
    { "bulk stores",
      "",
      bulk_store_body,
      'r',
      { 1, 32, 1, 0 },
      [](unsigned t) -> uint64_t { return t ? 7 : 42; } },
    { "an mbarrier of all threads",
      "",
      arrivals_body,
      'r',
      { 1, 64, 1, 0 },
      [](unsigned) -> uint64_t { return 1; } },
    { "bulk copies",
      ".shared .align 16 .b8 tile[32];\n.shared .align 8 .b64 bar;\n",
      bulk_body,
      'x',
      { 2, 64, 1, 0 },
      [](unsigned t) -> uint64_t { return t % 4 == 0   ? 1
                                          : t % 4 == 1 ? 0
                                                       : 10 * (t % 4); } },
};

static void check_group(const Group &group) {
    for (const emu_order order : { EMU_ASCENDING, EMU_DESCENDING, EMU_RANDOM }) {
        emu_set_order(order, 3);
        const Values outputs =
            run_text(text_of(group.before, group.body, group.result), { 1, 0, 20, 30 }, group.shape);
        const std::string said = reports();
        const unsigned threads = group.shape.blocks * group.shape.threads;
        CHECK_WITH(outputs.size() == threads && said.empty(), std::string(group.name) + ": " + said);
        for (unsigned t = 0; t < outputs.size(); t++) {
            const uint64_t expected = group.expected(t);
            if (outputs[t] == expected) continue;
            CHECK_WITH(false, std::string(group.name) + ", thread " + std::to_string(t) + ": " +
                                  hexadecimal(outputs[t]) + ", not " + hexadecimal(expected));
            break;
        }
    }
    emu_set_order(EMU_ASCENDING, 0);
}

/* ---- errors ---- */

struct Wrong {
    const char *before, *body, *says;
    Shape shape;
};

static const Wrong wrongs[] = {
    { "", "frob.u32 %r0, %r1", "opcode in frob.u32", { 1, 32, 1, 0 } },
    { "", "add.s8 %r0, %r1, %r2", "type in add.s8", { 1, 32, 1, 0 } },
    { "", "add.cc.u32 %r0, %r1, %r2", "suffix .cc in add.cc.u32", { 1, 32, 1, 0 } },
    { "", "add.u32 %r0, %r1, %r99", "operand %r99", { 1, 32, 1, 0 } },
    { "", "bra NOWHERE", "label NOWHERE", { 1, 32, 1, 0 } },
    { "",
      "mov.u64 %x4, 0; ld.global.u32 %r0, [%x4]",
      "ld.global.u32 touches no memory of its own: 4 bytes at address 0",
      { 1, 32, 1, 0 } },
    { "",
      "mov.u64 %x4, 0x7123456789a0; ld.u32 %r0, [%x4]",
      "at host address 0x7123456789a0",
      { 1, 32, 1, 0 } },
    { "", "ld.global.u64 %x4, [%a0+24]", "byte 24 of a block of 24 bytes", { 1, 32, 1, 0 } },
    { "", "ld.global.u32 %r0, [%a0+2]", "is not aligned", { 1, 32, 1, 0 } },
    { "",
      ".shared .align 4 .b8 part[8]; st.shared.u32 [part+8], %r1",
      "shared part (8 bytes)",
      { 1, 32, 1, 0 } },
    { "",
      ".local .align 4 .b8 depot[8]; ld.local.u32 %r0, [depot+4096]",
      "in local memory",
      { 1, 32, 1, 0 } },
    { "", "bar.sync 1", "is not barrier 0", { 1, 32, 1, 0 } },
    { "", "bar.sync 0, 32", "number of threads at a barrier in bar.sync", { 1, 32, 1, 0 } },
    { "", "trap", "trap ends the kernel", { 1, 32, 1, 0 } },
    { "",
      "setp.eq.s32 %p4, %t0, 3; @%p4 bra OUT; bar.sync 0;\nOUT:\nadd.s32 %r0, %r1, 1",
      "threads wait for each other",
      { 1, 64, 1, 0 } },
    { "",
      "setp.eq.s32 %p4, %t0, 3; @%p4 bra OUT; vote.sync.any.pred %p5, %p4, -1;\nOUT:\nadd.s32 %r0, %r1, 1",
      "threads wait for each other",
      { 1, 32, 1, 0 } },
    { "", "vote.sync.any.pred %p5, %p4, 1", "without this lane", { 1, 32, 1, 0 } },
    { "", "shfl.sync.idx.b32 %r0, %t0, 40, 31, 255", "which is not here", { 1, 8, 1, 0 } },
    { ".func f()\n{\ncall.uni f, (); ret;\n}\n", "call.uni f, ()", "recursion of f", { 1, 32, 1, 0 } },
    { ".shared .align 8 .b64 bar;\n",
      "mov.u32 %r4, bar; setp.ne.u32 %p4, %t3, 0; @%p4 bra WAIT;\n"
      "mbarrier.init.shared::cta.b64 [%r4], 1; mbarrier.arrive.shared::cta.b64 _, [%r4];\nWAIT:\nbar.sync "
      "0;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4], 1; @!%p5 bra AGAIN",
      "in mbarrier.try_wait",
      { 1, 64, 1, 0 } },
    { "", "mov.u32 %r0, 1", "no room for", { 1, 32, 1, 250000 } },
};

static void check_wrong(const Wrong &wrong) {
    const Values outputs = run_text(text_of(wrong.before, wrong.body, 'r'), { 1, 2, 3 }, wrong.shape);
    const std::string said = reports();
    CHECK_WITH(outputs.empty(), std::string(wrong.body) + " passed");
    CHECK_WITH(said.find(wrong.says) != std::string::npos, std::string(wrong.body) + " said " + said);
}

/* What a launch and the kernel's header disagree about. */
static void check_headers() {
    static const char *const cases[][2] = {
        { ".visible .entry row(.param .u32 in, .param .u64 out)\n{\nret;\n}\n",
          "argument 0 has 8 bytes, in the PTX 4" },
        { ".visible .entry row(.param .u64 in)\n{\nret;\n}\n", "argument 1 has 8 bytes, in the PTX none" },
        { ".visible .entry row(.param .u64 a, .param .u64 b, .param .u64 c)\n{\nret;\n}\n",
          "has 2 arguments, in the PTX 3" },
        { ".visible .entry row(.param .u64 in, .param .u64 out)\n.maxntid 4, 4, 1\n{\nret;\n}\n",
          "32 threads, its PTX allows 16" },
    };
    for (const auto &header : cases) {
        CHECK(run_text(header[0], { 1, 2, 3 }, { 1, 32, 1, 0 }).empty());
        const std::string said = reports();
        CHECK_WITH(said.find(header[1]) != std::string::npos, said);
    }
}

/* A process with EMU_PTX that names this file, and that launches a kernel of the program. */
static Outcome launch_with(const char *path) {
    return run_apart([path] {
        setenv("EMU_PTX", path, 1);
        setenv("EMU_PTX_REQUIRE", "1", 1);
        return kernel_cases[0].run(0);
    });
}

static void check_files() {
    char path[] = "/tmp/emu_ptx_XXXXXX";
    const int file = mkstemp(path);
    CHECK(file >= 0);
    const Outcome lacks = launch_with(path), missing = launch_with("/nowhere/unit.ptx");
    CHECK_WITH(!lacks.clean && lacks.text.find("has no such kernel") != std::string::npos, lacks.text);
    CHECK_WITH(!missing.clean && missing.text.find("cannot read /nowhere/unit.ptx") != std::string::npos,
               missing.text);
    close(file);
    unlink(path);
}

void ptx_tests() {
    test("ptx_headers_agree_with_launches", check_headers);
    test("ptx_files_that_lack_a_kernel_are_named", check_files);
    test("ptx_instructions_have_the_values_of_the_manual", ptx_values);
    for (const Group &group : groups)
        test(("ptx_" + std::string(group.name)).c_str(), [&] { check_group(group); });
    ptx_flight();
    test("ptx_errors_are_named", [] {
        for (const Wrong &wrong : wrongs) check_wrong(wrong);
    });
}

#endif
