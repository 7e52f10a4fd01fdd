/* The access checker: exact bounds, unwritten memory, host memory in kernels, device memory in host code, and races, for every
 * load and store of the .cu.
 *
 * The .cu alone is compiled with -fsanitize=thread. Its callbacks are defined at the end of this file, in place of TSan's own
 * library. Each byte of device and shared memory has a cell: which thread wrote it last, which read it last, and when, counted
 * in barriers. Two accesses by different threads race when no barrier lies between them:
 *   same warp       __syncwarp or __syncthreads
 *   same block      __syncthreads
 *   same cluster    the cluster barrier
 *   else            __threadfence in the writer's block, then an atomic in the reader's
 * Approximations: fences count for a whole block, partial __syncwarp for a whole warp, an mbarrier orders bulk loads and
 * nothing else, and only paths that run are seen. */
#include "exec.h"

#ifndef EMU_CHECK

namespace emu {
void check_new_block(const Block &) {}
void check_free_block(const Block &) {}
void check_written(const void *, size_t) {}
void check_copied(void *, const void *, size_t) {}
void check_begin_launch(const Launch &) {}
void check_begin_team() {}
void check_end_launch() {}
void check_fence() {}
void check_access(const void *, size_t, bool, bool) {}
void check_bulk_written(const void *, size_t) {}
} // namespace emu

#else

#    include <algorithm>
#    include <sys/mman.h>

extern "C" char __executable_start, _end; /* defined by the linker */

namespace emu {

struct Stamp {
    uint64_t launch : 24, block : 24, thread : 10, atomic : 1;
    uint64_t other_lanes : 1, other_warps : 1, other_blocks : 1; /* other threads did the same since the same barriers */
    uint64_t complete : 1;                                       /* a bulk load, which its mbarrier orders */
    uint64_t : 1;
    uint64_t barrier : 22, warp : 22, cluster : 10, fence : 10; /* number of barriers passed */
};
static_assert(sizeof(Stamp) == 16, "two words");

struct Cell {
    Stamp writer, reader;
};

struct Shadow {
    const Block *block;
    Cell *cells;            /* one for each byte; pages exist only where kernels have accessed memory */
    unsigned char *written; /* 1: a kernel or a copy has written this byte */
};

static const uint64_t kStamps = 0xffffff; /* launches and teams are counted modulo this, from 1 */
static const unsigned kFences =
    1021; /* and fences modulo a prime: a block may make as many as it has threads */
static const size_t kPage = 4096;
static const int kReportsPerLaunch = 3;

static Shadow **page_shadow; /* by page of the device range */
static Cell *shared_cells;
static std::vector<uint16_t> fences;  /* by block of the launch */
static std::vector<uint8_t> acquired; /* the block has executed an atomic */
static uint64_t launch_stamp, team_stamp;
static int races_left, unwritten_left; /* reports of this launch */

static void *map_zeros(size_t bytes) {
    void *p =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return p;
}

/* ---- cells ---- */

static Shadow *shadow_of(const void *address) {
    if (!page_shadow || !in_device_range(address)) return nullptr;
    return page_shadow[(size_t)(static_cast<const char *>(address) - device_range) / kPage];
}

void check_new_block(const Block &block) {
    if (!page_shadow)
        page_shadow = static_cast<Shadow **>(map_zeros(device_range_bytes / kPage * sizeof(Shadow *)));
    Shadow *shadow =
        new Shadow{ find_block(block.base), static_cast<Cell *>(map_zeros(block.bytes * sizeof(Cell))),
                    static_cast<unsigned char *>(map_zeros(block.bytes)) };
    const size_t first = (size_t)(block.pages - device_range) / kPage;
    for (size_t page = 0; page < block.page_bytes / kPage; page++) page_shadow[first + page] = shadow;
}

void check_free_block(const Block &block) {
    Shadow *shadow = shadow_of(block.base);
    const size_t first = (size_t)(block.pages - device_range) / kPage;
    for (size_t page = 0; page < block.page_bytes / kPage; page++) page_shadow[first + page] = nullptr;
    munmap(shadow->cells, block.bytes * sizeof(Cell));
    munmap(shadow->written, block.bytes);
    delete shadow;
}

/* The cells of a range of device memory; NULL for other memory. */
static unsigned char *written_marks(const void *address) {
    const Shadow *shadow = shadow_of(address);
    return shadow ? shadow->written + (static_cast<const char *>(address) - shadow->block->base) : nullptr;
}

void check_written(const void *address, size_t bytes) {
    unsigned char *marks = written_marks(address);
    if (marks) memset(marks, 1, bytes);
}

void check_copied(void *to, const void *from, size_t bytes) {
    unsigned char *target = written_marks(to), *source = written_marks(from);
    if (target && source) memmove(target, source, bytes);
}

/* ---- the course of a launch ---- */

/* The index of a block in `fences` and `acquired`: its number, except for grids of more than 2^24 blocks. */
static inline size_t slot_of(uint64_t block) {
    return block < fences.size() ? block : block % fences.size();
}

void check_begin_launch(const Launch &launch) {
    if (!shared_cells)
        shared_cells = static_cast<Cell *>(map_zeros(kMaxClusterBlocks * kArenaBytes * sizeof(Cell)));
    const size_t blocks =
        std::min((uint64_t)launch.grid.x * launch.grid.y * launch.grid.z, (uint64_t)1 << 24);
    fences.assign(blocks, 0);
    acquired.assign(blocks, 0);
    launch_stamp = team.serial % kStamps + 1;
    races_left = unwritten_left = kReportsPerLaunch;
}

void check_begin_team() {
    team_stamp = team_stamp % kStamps + 1;
}

void check_end_launch() {}

void check_fence() {
    uint16_t &count = fences[slot_of(running->warp->block->linear)];
    count = (uint16_t)((count + 1) % kFences);
}

/* ---- who and when ---- */

static Stamp stamp_now(uint64_t launch, bool atomic) {
    const BlockState &block = *running->warp->block;
    /* In one expression: field by field the compiler would read back what it has just stored, which is slow. */
    const Stamp s = { launch & 0xffffff,
                      block.linear & 0xffffff,
                      running->linear & 1023u,
                      atomic,
                      0,
                      0,
                      0,
                      0,
                      (block.barrier.passed + team.cluster_barrier.passed) & 0x3fffffu,
                      running->warp->syncs & 0x3fffffu,
                      team.cluster_barrier.passed & 1023u,
                      fences[slot_of(block.linear)] & 1023u };
    return s;
}

static bool in_team(uint64_t block) {
    for (const BlockState &member : team.blocks)
        if ((member.linear & 0xffffff) == block) return true;
    return false;
}

/* True when a barrier orders the earlier access before this one, or none is needed. */
static bool ordered(const Stamp &before, const Stamp &now) {
    if (before.launch != now.launch || (before.atomic && now.atomic) || before.complete) return true;
    if (before.block != now.block) {
        if (team.blocks.size() > 1 && in_team(before.block)) return before.cluster != now.cluster;
        return acquired[slot_of(now.block)] && fences[slot_of(before.block)] != before.fence;
    }
    if (before.other_blocks && before.cluster == now.cluster && !acquired[slot_of(now.block)]) return false;
    if (before.barrier != now.barrier) return true;
    if (before.other_warps) return false;
    if (before.thread / 32 != now.thread / 32) return false;
    return before.warp != now.warp || (before.thread == now.thread && !before.other_lanes);
}

/* The new stamp of a kind of access, which records that other threads did the same in this phase. */
static Stamp merged(const Stamp &before, Stamp now) {
    if (before.launch != now.launch) return now;
    now.other_blocks = before.other_blocks || before.block != now.block;
    if (before.block != now.block || before.barrier != now.barrier) return now;
    const bool same_warp = before.thread / 32 == now.thread / 32;
    now.other_warps = before.other_warps || !same_warp;
    if (same_warp && before.warp == now.warp)
        now.other_lanes = before.other_lanes || before.thread != now.thread;
    return now;
}

static std::string name_of(const Stamp &stamp) {
    return "block " + std::to_string((unsigned)stamp.block) + " thread " +
           std::to_string((unsigned)stamp.thread);
}

static std::string place(const void *address) {
    return in_arenas(address) ? shared_describe(address) : describe(address);
}

static void report_race(const Stamp &before, const char *did, bool write, const void *address,
                        const void *pc) {
    if (races_left-- <= 0) return;
    const bool others = before.other_lanes || before.other_warps || before.other_blocks;
    kernel_report("race: %s %s, which %s%s %s with no barrier in between (%s)", write ? "writes" : "reads",
                  place(address).c_str(), name_of(before).c_str(), others ? " and others" : "", did,
                  source_of(pc).c_str());
}

static void report_unwritten(const void *address, const void *pc) {
    if (unwritten_left-- > 0)
        kernel_report("reads %s, which nobody has written (%s)", place(address).c_str(),
                      source_of(pc).c_str());
}

/* What has been reported of one access, and the last byte that was checked, before and after. */
struct Looked {
    bool reported;
    bool fresh;
    Cell before, after;
};

static void check_cell(Looked &looked, Cell &cell, const char *address, bool write, bool read,
                       const Stamp &now, const void *pc) {
    const bool after_write = ordered(cell.writer, now), after_read = !write || ordered(cell.reader, now);
    looked.before = cell;
    if (!looked.reported && read && looked.fresh) report_unwritten(address, pc);
    if (!looked.reported && !after_write)
        report_race(cell.writer, "wrote", write, address, pc);
    else if (!looked.reported && !after_read)
        report_race(cell.reader, "read", write, address, pc);
    looked.reported = looked.reported || (read && looked.fresh) || !after_write || !after_read;
    if (write)
        cell.writer = now.atomic ? merged(cell.writer, now) : now;
    else
        cell.reader = merged(cell.reader, now);
    looked.after = cell;
}

/* `marks` is NULL for shared memory, where a cell knows whether this block has written it. The bytes of one access mostly have
 * the same history: then the result for the first of them holds for all. */
static void check_cells(Cell *cells, unsigned char *marks, const char *address, size_t bytes, bool write,
                        bool read, const Stamp &now, const void *pc) {
    Looked looked;
    looked.reported = looked.fresh = false; /* one report per access */
    for (size_t i = 0; i < bytes; i++) {
        Cell &cell = cells[i];
        const bool fresh = marks ? !marks[i] : cell.writer.launch != now.launch;
        const bool as_before = i && fresh == looked.fresh && !memcmp(&cell, &looked.before, sizeof cell);
        looked.fresh = fresh;
        if (as_before)
            cell = looked.after;
        else
            check_cell(looked, cell, address + i, write, read, now, pc);
        if (write && marks) marks[i] = 1;
    }
}

/* ---- memory that a kernel may access ---- */

static bool within(const char *address, size_t bytes, const void *begin, size_t size) {
    const size_t offset = (size_t)(address - static_cast<const char *>(begin));
    return offset < size && bytes <= size - offset;
}

/* Its own stack, its arguments, constants of the program, and page-locked memory. */
static bool may_touch_host(const char *address, size_t bytes) {
    const emu_kernel_call &call = *team.launch->call;
    return within(address, bytes, running->fiber->bottom, running->fiber->bytes) ||
           within(address, bytes, call.arguments, call.argument_bytes) ||
           within(address, bytes, &__executable_start, (size_t)(&_end - &__executable_start)) ||
           is_pinned(address, bytes);
}

static void check_kernel(const char *address, size_t bytes, bool write, bool read, bool atomic,
                         const void *pc) {
    const char *const verb = write ? "writes" : "reads";
    if (in_arenas(address)) {
        if (!shared_holds(address, bytes))
            kernel_failed("%s %zu bytes at %s (%s)", verb, bytes, shared_describe(address).c_str(),
                          source_of(pc).c_str());
        check_cells(shared_cells + (address - arenas), nullptr, address, bytes, write, read,
                    stamp_now(team_stamp, atomic), pc);
        return;
    }
    if (!in_device_range(address)) {
        if (may_touch_host(address, bytes)) return;
        kernel_failed("%s host memory at %p (%s)", verb, static_cast<const void *>(address),
                      source_of(pc).c_str());
    }
    const Shadow *shadow = shadow_of(address);
    if (!shadow || address < shadow->block->base ||
        address + bytes > shadow->block->base + shadow->block->bytes)
        kernel_failed("%s %zu bytes at %s (%s)", verb, bytes, describe(address).c_str(),
                      source_of(pc).c_str());
    if (!may_access(team.launch->device, shadow->block->device))
        kernel_failed("%s memory of device %d on device %d without peer access (%s)", verb,
                      shadow->block->device, team.launch->device, source_of(pc).c_str());
    const size_t offset = (size_t)(address - shadow->block->base);
    check_cells(shadow->cells + offset, shadow->written + offset, address, bytes, write, read,
                stamp_now(launch_stamp, atomic), pc);
}

void check_access(const void *address, size_t bytes, bool write, bool atomic) {
    if (!running) return;
    check_kernel(static_cast<const char *>(address), bytes, write, atomic || !write, atomic, nullptr);
    if (atomic && write) acquired[slot_of(running->warp->block->linear)] = 1;
}

void check_bulk_written(const void *address, size_t bytes) {
    Stamp stamp = stamp_now(team_stamp, false);
    stamp.complete = 1;
    Cell *cells = shared_cells + (static_cast<const char *>(address) - arenas);
    for (size_t i = 0; i < bytes; i++) cells[i].writer = stamp;
}

static void on_access(const void *address, size_t bytes, bool write, bool read, bool aligned,
                      const void *pc) {
    const char *at = static_cast<const char *>(address);
    if (!running) {
        if (in_device_range(at) || (arenas && in_arenas(at)))
            report("host code %s %s (%s)", write ? "writes" : "reads", place(at).c_str(),
                   source_of(pc).c_str());
        return;
    }
    /* On a thread's own stack the compiler of this machine joins accesses; those of a GPU's are its own. */
    const bool own = within(at, bytes, running->fiber->bottom, running->fiber->bytes);
    if (aligned && (uintptr_t)at % bytes && !own)
        kernel_failed("access of %zu bytes at %p is not aligned (%s)", bytes, address, source_of(pc).c_str());
    check_kernel(at, bytes, write, read, false, pc);
}

} // namespace emu

using namespace emu;

/* ---- functions that the compiler calls ---- */

#    define PC __builtin_return_address(0)
#    define ACCESS(name, bytes, write, read, aligned)            \
        extern "C" void name(void *address) {                    \
            on_access(address, bytes, write, read, aligned, PC); \
        }
#    define ACCESSES(bytes)                                                      \
        ACCESS(__tsan_read##bytes, bytes, false, true, true)                     \
        ACCESS(__tsan_write##bytes, bytes, true, false, true)                    \
        ACCESS(__tsan_read_write##bytes, bytes, true, true, true)                \
        ACCESS(__tsan_unaligned_read##bytes, bytes, false, true, false)          \
        ACCESS(__tsan_unaligned_write##bytes, bytes, true, false, false)         \
        ACCESS(__tsan_unaligned_read_write##bytes, bytes, true, true, false)     \
        ACCESS(__tsan_volatile_read##bytes, bytes, false, true, true)            \
        ACCESS(__tsan_volatile_write##bytes, bytes, true, false, true)           \
        ACCESS(__tsan_unaligned_volatile_read##bytes, bytes, false, true, false) \
        ACCESS(__tsan_unaligned_volatile_write##bytes, bytes, true, false, false)

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_ignore_thread_begin() {}
void __tsan_ignore_thread_end() {}

void __tsan_read_range(void *address, size_t bytes) {
    on_access(address, bytes, false, true, false, PC);
}

void __tsan_write_range(void *address, size_t bytes) {
    on_access(address, bytes, true, false, false, PC);
}

void __tsan_vptr_read(void **address) {
    on_access(address, sizeof *address, false, true, true, PC);
}

void __tsan_vptr_update(void **address, void *) {
    on_access(address, sizeof *address, true, false, true, PC);
}

void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    if (bytes) on_access(from, bytes, false, true, false, PC);
    if (bytes) on_access(to, bytes, true, false, false, PC);
    return memcpy(to, from, bytes);
}

void *__tsan_memmove(void *to, const void *from, size_t bytes) {
    if (bytes) on_access(from, bytes, false, true, false, PC);
    if (bytes) on_access(to, bytes, true, false, false, PC);
    return memmove(to, from, bytes);
}

void *__tsan_memset(void *to, int value, size_t bytes) {
    if (bytes) on_access(to, bytes, true, false, false, PC);
    return memset(to, value, bytes);
}

} // extern "C"

/* Atomics of host code in the unit: compiler builtins and guards of static variables. */
#    define ATOMICS(bits, type)                                                                              \
        extern "C" type __tsan_atomic##bits##_load(const volatile type *p, int) {                            \
            return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                     \
        }                                                                                                    \
        extern "C" void __tsan_atomic##bits##_store(volatile type *p, type v, int) {                         \
            __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                        \
        }                                                                                                    \
        extern "C" type __tsan_atomic##bits##_exchange(volatile type *p, type v, int) {                      \
            return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                              \
        }                                                                                                    \
        extern "C" type __tsan_atomic##bits##_fetch_add(volatile type *p, type v, int) {                     \
            return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                               \
        }                                                                                                    \
        extern "C" type __tsan_atomic##bits##_fetch_sub(volatile type *p, type v, int) {                     \
            return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                               \
        }                                                                                                    \
        extern "C" type __tsan_atomic##bits##_fetch_or(volatile type *p, type v, int) {                      \
            return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                                \
        }                                                                                                    \
        extern "C" type __tsan_atomic##bits##_fetch_and(volatile type *p, type v, int) {                     \
            return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);                                               \
        }                                                                                                    \
        extern "C" int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *e, type v, int, \
                                                                     int) {                                  \
            return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);          \
        }                                                                                                    \
        extern "C" int __tsan_atomic##bits##_compare_exchange_weak(volatile type *p, type *e, type v, int,   \
                                                                   int) {                                    \
            return __atomic_compare_exchange_n(p, e, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);           \
        }                                                                                                    \
        extern "C" type __tsan_atomic##bits##_compare_exchange_val(volatile type *p, type e, type v, int,    \
                                                                   int) {                                    \
            __atomic_compare_exchange_n(p, &e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
            return e;                                                                                        \
        }

ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

extern "C" void __tsan_atomic_thread_fence(int) {}
extern "C" void __tsan_atomic_signal_fence(int) {}

#endif
