/* Tests of what the report of the PTX interpreter counts: bytes on their way at a wait, sectors of memory, clocks, sections. Each
 * case is compared with the same kernel without its statements. */
#include "test.h"
#include "test_ptx.h"
#include "ptx_flight.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#if !defined(EMU_CHECK)

using namespace emu;
using ptx::Watched;

/* What a grid has done with these statements; `in` has so many words. */
static Watched watched(const char *body, const char *before = "", Shape shape = { 1, 32, 1, 0 }, size_t words = 64) {
    setenv("EMU_PTX_REPORT", "/dev/null", 1);
    const Values outputs = run_text(text_of(before, body, 'x'), Values(words, 1), shape);
    CHECK_WITH(!outputs.empty(), reports());
    unsetenv("EMU_PTX_REPORT");
    return ptx::flights_of_grid();
}

/* ---- bytes on their way ---- */

struct Case {
    const char *body;
    uint64_t waits; /* more than without the body */
    double bytes, squares;
};

/* A load of 8 bytes is 256 of a warp. The first loads of a kernel have been waited for before the body. */
static const Case cases[] = {
    { "ld.global.u64 %x4, [%a0]; ld.global.u64 %x5, [%a0+8]; add.s64 %x0, %x4, %x5", 1, 512, 512 * 512 },
    { "ld.global.u64 %x4, [%a0]; add.s64 %x0, %x4, 1; ld.global.u64 %x5, [%a0+8]; add.s64 %x0, %x5, 1", 2, 512, 2 * 256 * 256 },
    /* a move is no use; nor is taking a register apart */
    { "ld.global.u64 %x4, [%a0]; mov.u64 %x6, %x4; ld.global.u64 %x5, [%a0+8]; add.s64 %x0, %x6, %x5", 1, 512, 512 * 512 },
    { "ld.global.u64 %x4, [%a0]; mov.b64 {%r4, %r5}, %x4; ld.global.u64 %x5, [%a0+8]; add.s32 %r6, %r4, %r5", 1, 512, 512 * 512 },
    /* one after another: what was on its way at a wait has come with it */
    { "ld.global.u64 %x4, [%a0]; ld.global.u64 %x5, [%a0+8]; add.s64 %x0, %x4, 1; ld.global.u64 %x6, [%a0+16];\n"
      "add.s64 %x0, %x5, 1; add.s64 %x0, %x6, 1",
      2, 512 + 256, 512 * 512 + 256 * 256 },
    /* an address, a guard, and a register that is written again are uses */
    { "ld.global.u64 %x4, [%a0]; and.b64 %x5, %a0, -1; add.s64 %x4, %x5, 0", 1, 256, 256 * 256 },
    { "ld.global.v2.u64 {%x4, %x5}, [%a0]; st.global.u64 [%a1], %x5", 1, 512, 512 * 512 },
    { "ld.global.u32 %r4, [%a0]; ld.global.u32 %r5, [%a0+4]; setp.ne.s32 %p4, %r4, 0; @%p4 add.s32 %r6, %r5, 1", 1, 256, 256 * 256 },
    /* generic addresses count by where they lead; what comes from shared memory does not */
    { "ld.u64 %x4, [%a0]; add.s64 %x0, %x4, 1", 1, 256, 256 * 256 },
    { ".shared .align 8 .b8 part[8]; st.shared.u64 [part], %x1; ld.shared.u64 %x4, [part]; add.s64 %x0, %x4, 1", 0, 0, 0 },
    /* half of the lanes */
    { "setp.lt.u32 %p4, %t0, 16; @%p4 ld.global.u64 %x4, [%a0]; @%p4 add.s64 %x0, %x4, 1", 1, 128, 128 * 128 },
    /* an atomic has no bytes */
    { "mov.u32 %r4, 1; atom.global.add.u32 %r5, [%a0], %r4; add.s32 %r6, %r5, 1", 0, 0, 0 },
};

static void check_cases() {
    const Watched base = watched("mov.u64 %x0, 0");
    CHECK_WITH(base.waits.count == 3 && base.waits.bytes == 3 * 256, std::to_string(base.waits.count));
    for (const Case &c : cases) {
        const Watched w = watched(c.body);
        const std::string found = std::to_string(w.waits.count - base.waits.count) + " waits, " +
                                  std::to_string(w.waits.bytes - base.waits.bytes) + " bytes";
        CHECK_WITH(w.waits.count == base.waits.count + c.waits, std::string(c.body) + ": " + found);
        CHECK_WITH(w.waits.bytes == base.waits.bytes + c.bytes, std::string(c.body) + ": " + found);
        CHECK_WITH(w.waits.squares == base.waits.squares + c.squares, std::string(c.body) + ": " + found);
    }
}

/* Groups of copies of 16 and 4 bytes a lane: the wait that leaves one on its way, and that for all. */
static void check_copies() {
    static const char body[] =
        "mov.u32 %r4, tile; mad.lo.u32 %r4, %t3, 16, %r4; cp.async.cg.shared.global [%r4], [%a0], 16; cp.async.commit_group;\n"
        "cp.async.ca.shared.global [%r4+1024], [%a0], 4; cp.async.commit_group; cp.async.wait_group 1; cp.async.wait_group 0;\n"
        "cp.async.ca.shared.global [%r4+1024], [%a0], 8; cp.async.wait_all; mov.u64 %x0, 0";
    const Watched base = watched("mov.u64 %x0, 0"), w = watched(body, ".shared .align 16 .b8 tile[2048];\n");
    CHECK_WITH(w.waits.count == base.waits.count + 2, std::to_string(w.waits.count));
    CHECK_WITH(w.waits.bytes == base.waits.bytes + (512 + 128) + 256, std::to_string(w.waits.bytes));
    CHECK(w.loaded == base.loaded + 512 + 128 + 256);
}

/* Two stages of a ring, each with a barrier: at the first wait both are on their way, at the second nothing new is. */
static void check_bulk() {
    static const char body[] =
        "mov.u32 %r4, bars; mov.u32 %r5, tile; setp.ne.u32 %p4, %t3, 0; @%p4 bra WAIT;\n"
        "mbarrier.init.shared::cta.b64 [%r4], 1; mbarrier.init.shared::cta.b64 [%r4+8], 1;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4+8], 32;\n"
        "add.s32 %r6, %r4, 8;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%a0], 16, [%r4];\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5+16], [%a0+16], 32, [%r6];\nWAIT:\nbar.sync 0;\n"
        "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4], 0; @!%p5 bra AGAIN;\n"
        "MORE:\nmbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4+8], 0; @!%p5 bra MORE; mov.u64 %x0, 0";
    const Shape two_warps = { 1, 64, 1, 0 };
    const Watched base = watched("mov.u64 %x0, 0", "", two_warps);
    const Watched w = watched(body, ".shared .align 16 .b8 tile[64];\n.shared .align 8 .b64 bars[2];\n", two_warps);
    CHECK_WITH(w.bulk.count == 1 && w.bulk.bytes == 48, std::to_string(w.bulk.count) + ", " + std::to_string(w.bulk.bytes));
    CHECK(w.loaded == base.loaded + 48 && w.waits.count == base.waits.count);
    CHECK_WITH(w.waited > base.waited + 2 * 200, std::to_string(w.waited - base.waited)); /* both warps */
}

/* ---- memory ---- */

/* Every thread stores 8 bytes of its own. The inputs are in one sector; a walk over more than L2 has for a block comes back to
 * where it began. */
static void check_sectors() {
    const Watched base = watched("mov.u64 %x0, 0");
    CHECK_WITH(base.read == 32 && base.written == 256 && base.again == 0 && base.loaded == 3 * 256, std::to_string(base.read));
    const Watched near = watched("ld.global.u64 %x4, [%a0]; add.s64 %x0, %x4, 1; ld.global.u64 %x4, [%a0+32]; add.s64 %x0, %x4, 1");
    CHECK_WITH(near.read == 64 && near.again == 0, std::to_string(near.read));
    const Watched over = watched("mov.u64 %x4, 5; st.global.u64 [%a1], %x4; mov.u64 %x0, 0");
    CHECK_WITH(over.written == base.written, std::to_string(over.written));
    static const char walk[] =
        "mul.wide.u32 %x4, %t0, 8; add.s64 %x5, %a0, %x4; mov.u64 %x6, %x5; mov.u32 %r4, 0;\nSTEP:\nld.global.u64 %x7, [%x6];\n"
        "add.s64 %x0, %x7, 1; add.s64 %x6, %x6, 256; add.s32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 600; @%p4 bra STEP;\n"
        "ld.global.u64 %x7, [%x5]; add.s64 %x0, %x7, 1";
    const Watched far = watched(walk, "", { 1, 32, 1, 0 }, 600 * 32);
    CHECK_WITH(far.read == 600 * 256 + 256 && far.again == 256, std::to_string(far.read) + ", " + std::to_string(far.again));
    const Watched updated = watched("mov.u32 %r4, 1; red.global.add.u32 [%a0], %r4; mov.u64 %x0, 0");
    CHECK_WITH(updated.written == base.written + 32, std::to_string(updated.written));
}

/* ---- clocks ---- */

static void check_clocks() {
    const Watched base = watched("mov.u64 %x0, 0");
    const Watched pair = watched(cases[0].body);
    const double wait = ptx::kNearLatency - ptx::kInstruction; /* the second load was asked for meanwhile */
    CHECK_WITH(fabs(pair.waited - base.waited - wait) < 1e-6, std::to_string(pair.waited - base.waited));
    CHECK_WITH(fabs(pair.path - base.path - wait - 3 * ptx::kInstruction) < 1e-6, std::to_string(pair.path - base.path));
    /* The second warp waits for the first one's 50 turns of 4 instructions. */
    static const char meeting[] =
        "mov.u32 %r4, 0; setp.gt.u32 %p4, %t3, 31; @%p4 bra MEET;\nTURN:\nadd.s32 %r4, %r4, 1; add.s32 %r5, %r4, 1;\n"
        "setp.lt.u32 %p5, %r4, 50; @%p5 bra TURN;\nMEET:\nbar.sync 0; mov.u64 %x0, 0";
    const Watched met = watched(meeting, "", { 1, 64, 1, 0 });
    CHECK_WITH(met.stalled > 190 * ptx::kInstruction && met.stalled < 210 * ptx::kInstruction + ptx::kLatency,
               std::to_string(met.stalled));
    const Watched cluster = watched("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u64 %x0, 0", "", { 2, 32, 2, 0 });
    CHECK_WITH(fabs(cluster.crossed - 2 * ptx::kClusterLatency) < 4 * ptx::kInstruction, std::to_string(cluster.crossed));
    CHECK_WITH(cluster.stalled < ptx::kLatency, std::to_string(cluster.stalled));
    CHECK(cluster.blocks == 2 && cluster.warps == 2 && cluster.threads == 32);
}

/* Of two blocks each stores into the other. Between the halves of the cluster's barrier a warp works: it waits for less. */
static void check_cluster() {
    static const char body[] =
        "mov.u32 %r4, told; mov.u32 %r5, place; setp.ne.u32 %p4, %t3, 0; @%p4 bra MEET; mbarrier.init.shared::cta.b64 [%r4], 1;\n"
        "MEET:\nbarrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; @%p4 bra HEAR;\n"
        "mov.u32 %r6, %cluster_ctarank; xor.b32 %r6, %r6, 1; mapa.shared::cluster.u32 %r7, %r4, %r6;\n"
        "mapa.shared::cluster.u32 %r8, %r5, %r6; mov.u64 %x4, 1; mov.u64 %x5, 2; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r8], {%x4, %x5}, [%r7];\nHEAR:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p5, [%r4], 0; @!%p5 bra HEAR; ld.shared.u64 %x0, [%r5];\n"
        "barrier.cluster.arrive.aligned; ";
    static const char rest[] = "barrier.cluster.wait.aligned";
    static const char places[] = ".shared .align 16 .b8 place[16];\n.shared .align 8 .b64 told;\n";
    const Watched base = watched("mov.u64 %x0, 0", "", { 2, 32, 2, 0 });
    const Watched w = watched((std::string(body) + rest).c_str(), places, { 2, 32, 2, 0 });
    const double heard = w.waited - base.waited;
    CHECK_WITH(heard > 2 * (ptx::kRemoteLatency - 4 * ptx::kInstruction) && heard < 2 * ptx::kRemoteLatency, std::to_string(heard));
    std::string work;
    for (int i = 0; i < 20; i++) work += "add.s32 %r9, %r9, 1; ";
    const Watched busy = watched((std::string(body) + work + rest).c_str(), places, { 2, 32, 2, 0 });
    CHECK_WITH(fabs(w.crossed - busy.crossed - 40 * ptx::kInstruction) < 1, std::to_string(w.crossed - busy.crossed));
}

/* ---- the file ---- */

static void check_file() {
    char path[] = "/tmp/emu_flight_XXXXXX", text[8192] = "";
    const int file = mkstemp(path);
    CHECK(file >= 0);
    run_apart([&path]() -> int {
        setenv("EMU_PTX_REPORT", path, 1);
        const std::string kernel = text_of("", "mov.u64 %x0, 0", 'x');
        emu_ptx_section("another");
        run_text(kernel, { 1, 2, 3 }, { 1, 32, 1, 0 });
        emu_ptx_section("a part");
        run_text(kernel, { 1, 2, 3 }, { 2, 64, 1, 128 });
        run_text(kernel, { 1, 2, 3 }, { 2, 64, 1, 128 });
        exit(0);
    });
    CHECK(read(file, text, sizeof text - 1) > 0);
    CHECK_WITH(strncmp(text, "section\tkernel\tlaunches\tblocks\twarps\tthreads\tdynamic\tloaded", 55) == 0, text);
    CHECK_WITH(strstr(text, "\nanother\trow\t1\t1\t1\t32\t0\t768\t32\t0\t256\t3\t256.0\t"), text);
    CHECK_WITH(strstr(text, "\na part\trow\t2\t4\t8\t64\t128\t6144\t"), text);
    close(file);
    unlink(path);
}

static void check_architecture() {
    const Outcome other = run_apart([]() -> int {
        int major = 0, clusters = 1;
        setenv("EMU_ARCH", "80", 1);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
        cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, 0);
        return major != 8 || clusters != 0;
    });
    CHECK_WITH(other.clean, other.text);
}

void ptx_flight() {
    test("ptx_reports_count_bytes_on_their_way", check_cases);
    test("ptx_reports_count_copies_of_a_thread", check_copies);
    test("ptx_reports_count_bulk_copies", check_bulk);
    test("ptx_reports_count_sectors_of_memory", check_sectors);
    test("ptx_reports_have_clocks", check_clocks);
    test("ptx_reports_know_clusters", check_cluster);
    test("ptx_reports_have_sections", check_file);
    test("devices_are_of_another_architecture", check_architecture);
}

#endif
