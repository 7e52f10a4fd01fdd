/* The executor: the threads of one block (or of the blocks of one cluster) as fibers, one running at a
 * time.
 *
 * A thread runs until it waits. It then picks the next ready lane of its warp, else of the warp that has waited longest, and
 * switches there directly. A thread that ends passes its stack, which is still in the cache, to the next one that has not
 * begun. The last to arrive at a barrier or warp operation completes it for all and queues itself with them: otherwise the next
 * phase would not follow the chosen order. */
#include "exec.h"
#include "ptx.h"

#include <algorithm>
#include <deque>
#include <map>
#include <stdarg.h>
#include <tuple>
#ifdef __BMI2__
#    include <immintrin.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {

Team team;
__thread Thread *running;

static Fiber main_fiber;
/* Never destroyed: leak checkers look for the stacks. */
static std::vector<Fiber *> &free_fibers = *new std::vector<Fiber *>;
static std::deque<Warp *> queue;
static Warp *current_warp;
static emu_order order;
static uint64_t random_state;
static uint64_t launches;
static ptx::Function *from_ptx; /* what runs instead of the program's own code, or NULL */

/* ---- orders ---- */

static unsigned next_random(unsigned bound) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % bound;
}

static inline unsigned choose_lane(unsigned ready) {
    if (order == EMU_ASCENDING) return (unsigned)__builtin_ctz(ready);
    if (order == EMU_DESCENDING) return 31u - (unsigned)__builtin_clz(ready);
    const unsigned skip = next_random((unsigned)__builtin_popcount(ready));
#ifdef __BMI2__
    return (unsigned)__builtin_ctz(_pdep_u32(1u << skip, ready));
#else
    for (unsigned i = 0; i < skip; i++) ready &= ready - 1;
    return (unsigned)__builtin_ctz(ready);
#endif
}

static void queue_warp(Warp *warp) {
    if (warp->queued || warp == current_warp) return;
    warp->queued = true;
    queue.push_back(warp);
}

const std::vector<unsigned> &phase_order(size_t count) {
    static std::vector<unsigned> numbers;
    numbers.resize(count);
    for (size_t i = 0; i < count; i++) numbers[i] = (unsigned)i;
    if (order == EMU_DESCENDING) std::reverse(numbers.begin(), numbers.end());
    if (order == EMU_RANDOM)
        for (size_t i = count; i > 1; i--) std::swap(numbers[i - 1], numbers[next_random((unsigned)i)]);
    return numbers;
}

/* Queues warps [first, first + count) in the order of this run. */
static void queue_warps(size_t first, size_t count) {
    current_warp = nullptr; /* the running warp starts the new phase at its position in the order */
    for (const unsigned number : phase_order(count)) queue_warp(&team.warps[first + number]);
}

static inline Thread *pick() {
    while (!current_warp || !current_warp->ready) {
        if (queue.empty()) return nullptr;
        current_warp = queue.front();
        current_warp->queued = false;
        queue.pop_front();
    }
    const unsigned lane = choose_lane(current_warp->ready);
    current_warp->ready &= ~(1u << lane);
    return &team.threads[current_warp->first + lane];
}

/* ---- switching ---- */

static void thread_entry();

static inline void set_running(Thread *thread) {
    running = thread;
    if (!thread) return;
    threadIdx = thread->index;
    if (team.blocks.size() > 1) blockIdx = thread->warp->block->index; /* else of run_team() */
}

static __attribute__((noinline)) Fiber *take_fiber(void (*entry)()) {
    if (free_fibers.empty()) {
        const size_t count = 32;
        Fiber *fibers = new Fiber[count];
        fiber_map(fibers, count);
        for (size_t i = 0; i < count; i++) free_fibers.push_back(&fibers[i]);
    }
    Fiber *fiber = free_fibers.back();
    free_fibers.pop_back();
    fiber_prepare(fiber, entry);
    return fiber;
}

static inline void switch_to(Fiber *from, Thread *next) {
    if (next && !next->fiber) next->fiber = take_fiber(thread_entry);
    set_running(next);
    fiber_switch(from, next ? next->fiber : &main_fiber);
}

/* Lets others run: wait_as() for the running thread. Inline, like all that it calls, because barriers and warp operations take
 * most of an emulation's time. */
static inline __attribute__((always_inline)) void wait_thread(Thread *self, const char *what,
                                                              const char *file, int line) {
    self->waits_for = what;
    self->file = file;
    self->line = line;
    Thread *next = pick();
    if (next != self) switch_to(self->fiber, next);
    self->waits_for = nullptr;
}

void wait_as(const char *what, const char *file, int line) {
    wait_thread(running, what, file, line);
}

void make_ready(Thread *thread) {
    thread->warp->ready |= 1u << thread->lane;
    queue_warp(thread->warp);
}

void wake_all(const char *what) {
    for (Thread &thread : team.threads)
        if (thread.waits_for == what) make_ready(&thread);
}

/* The life of a fiber: one thread after another, as long as the next one in the order has not begun. */
static void thread_entry() {
    fiber_entered();
    for (;;) {
        Thread *self = running;
        const emu_kernel_call &call = *team.launch->call;
        call.run(call.arguments);
        bulk_end_thread(self);
        self->warp->ended |= 1u << self->lane;
        team.alive--;
        Fiber *fiber = self->fiber;
        self->fiber = nullptr;
        Thread *next = pick();
        if (next && !next->fiber) {
            next->fiber = fiber;
            set_running(next);
            continue;
        }
        free_fibers.push_back(fiber);
        switch_to(fiber, next);
    }
}

/* The interpreter runs all threads of a team on one fiber, which belongs to the thread that is running. */
static void team_entry() {
    fiber_entered();
    ptx::run_team();
    Fiber *fiber = running->fiber;
    set_running(nullptr);
    fiber_switch(fiber, &main_fiber);
    abort(); /* it is not resumed */
}

static void interpret_team() {
    Thread *first = &team.threads[0];
    first->fiber = take_fiber(team_entry);
    set_running(first);
    fiber_switch(&main_fiber, first->fiber);
}

/* ---- reports ---- */

std::string running_kernel() {
    return from_ptx ? from_ptx->title : kernel_name(team.launch->call->kernel);
}

std::string where(const Thread &thread) {
    char text[160];
    const uint3 block = thread.warp->block->index, index = thread.index;
    if (blockDim.y == 1 && blockDim.z == 1 && gridDim.y == 1 && gridDim.z == 1)
        snprintf(text, sizeof text, "block %u thread %u", block.x, index.x);
    else
        snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u)", block.x, block.y, block.z, index.x,
                 index.y, index.z);
    return text;
}

static void kernel_message(const char *format, va_list arguments) {
    char line[700];
    vsnprintf(line, sizeof line, format, arguments);
    report("%s, %s: %s", running_kernel().c_str(), where(*running).c_str(), line);
}

void kernel_report(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    kernel_message(format, arguments);
    va_end(arguments);
}

void kernel_failed(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    kernel_message(format, arguments);
    va_end(arguments);
    team.failed = true;
    Fiber *fiber = running->fiber;
    set_running(nullptr);
    fiber_switch(fiber, &main_fiber);
    abort(); /* no thread of a failed kernel is resumed */
}

/* No thread is ready and some are alive: reports which threads wait where and which have ended, a few of each. */
static void report_deadlock() {
    std::string text;
    int listed = 0;
    const Thread *previous = nullptr;
    for (const Thread &thread : team.threads) {
        const bool ended = !thread.waits_for;
        if (previous && ended == !previous->waits_for &&
            (ended || (previous->file == thread.file && previous->line == thread.line)))
            continue; /* the same as the one before */
        previous = &thread;
        if (++listed > 6) break;
        text += (listed > 1 ? "; from " : "from ") + where(thread);
        if (ended)
            text += " on: ended";
        else
            text += std::string(" on: in ") + thread.waits_for + " at " + thread.file + ":" +
                    std::to_string(thread.line);
    }
    report("%s: threads wait for each other: %s", running_kernel().c_str(), text.c_str());
}

/* ---- one team ---- */

static void setup_team(const Launch &launch) {
    const unsigned blocks = launch.cluster.x * launch.cluster.y * launch.cluster.z;
    const unsigned threads = launch.block.x * launch.block.y * launch.block.z, warps = (threads + 31) / 32;
    team.launch = &launch;
    team.blocks.assign(blocks, BlockState());
    team.warps.assign((size_t)blocks * warps, Warp());
    team.threads.assign((size_t)blocks * threads, Thread());
    for (unsigned b = 0; b < blocks; b++) {
        team.blocks[b].rank = b;
        team.blocks[b].arena = arenas + b * kArenaBytes;
        for (unsigned w = 0; w < warps; w++) {
            Warp &warp = team.warps[(size_t)b * warps + w];
            const unsigned lanes = std::min(32u, threads - w * 32);
            warp.block = &team.blocks[b];
            warp.first = b * threads + w * 32;
            warp.exists = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
        }
        for (unsigned t = 0; t < threads; t++) {
            Thread &thread = team.threads[(size_t)b * threads + t];
            thread.warp = &team.warps[(size_t)b * warps + t / 32];
            thread.lane = t % 32;
            thread.linear = t;
            thread.index = { t % launch.block.x, t / launch.block.x % launch.block.y,
                             t / launch.block.x / launch.block.y };
        }
    }
}

/* Runs the cluster whose first block is `corner`. */
static bool run_team(uint3 corner) {
    const Launch &launch = *team.launch;
    const unsigned per_block = (unsigned)(team.threads.size() / team.blocks.size());
    for (BlockState &block : team.blocks) {
        const unsigned r = block.rank;
        block.index = { corner.x + r % launch.cluster.x, corner.y + r / launch.cluster.x % launch.cluster.y,
                        corner.z + r / launch.cluster.x / launch.cluster.y };
        block.linear = block.index.x +
                       (uint64_t)launch.grid.x * (block.index.y + (uint64_t)launch.grid.y * block.index.z);
        block.barrier = Barrier();
        block.barrier.expected = per_block;
        shared_begin_block(r);
    }
    team.cluster_barrier = Barrier();
    team.cluster_barrier.expected = team.alive = (unsigned)team.threads.size();
    for (Warp &warp : team.warps) {
        warp.ready = warp.exists;
        warp.waiting = warp.ended = warp.syncs = 0;
        warp.queued = false;
    }
    for (Thread &thread : team.threads) {
        thread.fiber = nullptr;
        thread.waits_for = nullptr;
        thread.groups = 0;
        thread.stores.clear();
    }
    blockIdx = team.blocks[0].index;
    bulk_begin_team();
    check_begin_team();
    queue.clear();
    if (from_ptx) {
        interpret_team();
    } else {
        queue_warps(0, team.warps.size());
        switch_to(&main_fiber, pick());
    }
    if (!team.failed && team.alive) {
        report_deadlock();
        team.failed = true;
    }
    for (Thread &thread : team.threads) { /* of a failed kernel: their stacks are reused */
        if (thread.fiber) free_fibers.push_back(thread.fiber);
        thread.fiber = nullptr;
    }
    if (!team.failed)
        for (BlockState &block : team.blocks) shared_end_block(block.rank);
    return !team.failed;
}

static bool run_grid(const Launch &launch) {
    const dim3 g(launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                 launch.grid.z / launch.cluster.z);
    const uint64_t count = (uint64_t)g.x * g.y * g.z;
    const uint64_t start =
        order == EMU_RANDOM ? next_random(count < 0x7fffffff ? (unsigned)count : 0x7fffffff) : 0;
    team.serial = ++launches;
    shared_begin_launch(from_ptx ? 0 : launch.dynamic_bytes);
    if (from_ptx) ptx::declare_shared(from_ptx, launch);
    if (from_ptx) ptx::begin_grid(from_ptx, launch);
    check_begin_launch(launch);
    bool ok = true;
    for (uint64_t i = 0; ok && i < count; i++) {
        uint64_t c = order == EMU_DESCENDING ? count - 1 - i : i;
        if (order == EMU_RANDOM)
            c = (start + (i & 1 ? count - 1 - i / 2 : i / 2)) % count; /* from both ends */
        ok = run_team({ (unsigned)(c % g.x) * launch.cluster.x, (unsigned)(c / g.x % g.y) * launch.cluster.y,
                        (unsigned)(c / g.x / g.y) * launch.cluster.z });
    }
    if (from_ptx) ptx::end_grid(from_ptx);
    check_end_launch();
    shared_end_launch();
    return ok;
}

static bool run_in_order(const Launch &launch, emu_order which, uint64_t seed) {
    order = which;
    random_state = seed * 2862933555777941757u + 3037000493u;
    return run_grid(launch);
}

static bool run_compared(const Launch &launch) {
    snapshot_begin();
    bool ok = run_in_order(launch, EMU_ASCENDING, 0);
    snapshot_keep_first();
    for (uint64_t seed = 0; ok && seed <= 2; seed++) { /* 0: descending */
        ok = run_in_order(launch, seed ? EMU_RANDOM : EMU_DESCENDING, seed);
        if (ok) snapshot_compare(seed ? "random" : "descending", launch.call->kernel);
    }
    snapshot_end();
    return ok;
}

/* Whether this launch is compared: the first ones of a kernel by each shape, then every 16th. */
static bool is_compared(const Launch &launch) {
    static std::map<std::tuple<const void *, unsigned, unsigned, unsigned, unsigned>, unsigned> seen;
    if (settings.order != EMU_COMPARE || !launch.comparable) return false;
    if (settings.compared == 0) return true;
    const unsigned n = seen[{ launch.call->kernel, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x }]++;
    return n < settings.compared || n % 16 == 0;
}

bool execute(const Launch &launch) {
    DeviceAccess access;
    bool failed = false;
    from_ptx = ptx::kernel_of(launch, &failed);
    if (failed || (from_ptx && !ptx::begin_launch(from_ptx, launch))) return false;
    fiber_adopt(&main_fiber);
    blockDim = launch.block;
    gridDim = launch.grid;
    team.failed = false;
    shared_map();
    setup_team(launch);
    if (is_compared(launch)) return run_compared(launch);
    return run_in_order(launch, settings.order == EMU_COMPARE ? EMU_RANDOM : settings.order,
                        settings.order == EMU_COMPARE ? launches : settings.seed);
}

} // namespace emu

/* ---- barriers and warp operations, called by device code ---- */

using namespace emu;

static const char *const block_op_names[] = { "__syncthreads", "__syncthreads_or", "__syncthreads_and",
                                              "__syncthreads_count", "the cluster barrier" };
static const char *const warp_op_names[] = {
    "__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",
    "__ballot_sync",     "__any_sync",        "__all_sync",        "__match_any_sync",  "__match_all_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync",
};

/* A file has one name in each unit that includes it, so comparing the pointers is nearly always enough. */
static inline bool same_file(const char *a, const char *b) {
    return a == b || !strcmp(a, b);
}

static void complete_barrier(Barrier &barrier, size_t first_warp, size_t warps) {
    barrier.result = barrier.op == EMU_BLOCK_COUNT ? barrier.accumulated
                     : barrier.op == EMU_BLOCK_AND ? barrier.accumulated == (int)barrier.expected
                                                   : barrier.accumulated != 0;
    barrier.arrived = 0;
    barrier.passed++;
    for (size_t w = first_warp; w < first_warp + warps; w++) team.warps[w].ready = team.warps[w].exists;
    queue_warps(first_warp, warps);
}

int emu_block_barrier(emu_block_op op, int predicate, const char *file, int line) {
    Thread *self = running;
    Warp &warp = *self->warp;
    const bool of_cluster = op == EMU_CLUSTER_SYNC;
    Barrier &barrier = of_cluster ? team.cluster_barrier : warp.block->barrier;
    if (barrier.arrived == 0) {
        barrier.op = op;
        barrier.file = file;
        barrier.line = line;
        barrier.accumulated = 0;
    } else if (barrier.op != op || barrier.line != line || !same_file(barrier.file, file)) {
        kernel_failed("divergent barrier: is in %s at %s:%d, others of the block in %s at %s:%d",
                      block_op_names[op], file, line, block_op_names[barrier.op], barrier.file, barrier.line);
    }
    barrier.accumulated += predicate != 0;
    if (++barrier.arrived == barrier.expected) {
        const size_t per_block = team.warps.size() / team.blocks.size();
        if (of_cluster)
            complete_barrier(barrier, 0, team.warps.size());
        else
            complete_barrier(barrier, warp.block->rank * per_block, per_block);
    }
    wait_thread(self, block_op_names[op], file, line);
    return barrier.result;
}

/* The two halves of the cluster's barrier: a thread that has arrived goes on until it waits. */
void emu_cluster_arrive() {
    Barrier &barrier = team.cluster_barrier;
    running->cluster_phase = barrier.passed;
    if (++barrier.arrived < barrier.expected) return;
    barrier.arrived = 0;
    barrier.passed++;
    wake_all(block_op_names[EMU_CLUSTER_SYNC]);
}

void emu_cluster_wait(const char *file, int line) {
    while (team.cluster_barrier.passed == running->cluster_phase) wait_as(block_op_names[EMU_CLUSTER_SYNC], file, line);
}

/* The lane that a shuffle reads, as the PTX manual defines shfl.sync: the lane itself when the source is out of range. */
static inline unsigned shuffle_source(emu_warp_op op, unsigned width, unsigned delta, unsigned lane) {
    const unsigned base = lane & ~(width - 1);
    switch (op) {
    case EMU_SHFL: return base + (delta & (width - 1));
    case EMU_SHFL_UP: return lane - base >= delta ? lane - delta : lane;
    case EMU_SHFL_DOWN: return lane - base + delta < width ? lane + delta : lane;
    default: return (lane ^ delta) < base + width ? lane ^ delta : lane;
    }
}

static uint64_t reduce_two(emu_warp_op op, uint64_t a, uint64_t b) {
    const unsigned x = (unsigned)a, y = (unsigned)b;
    switch (op) {
    case EMU_REDUCE_ADD: return x + y;
    case EMU_REDUCE_MIN: return std::min(x, y);
    case EMU_REDUCE_MAX: return std::max(x, y);
    case EMU_REDUCE_IMIN: return (unsigned)std::min((int)x, (int)y);
    case EMU_REDUCE_IMAX: return (unsigned)std::max((int)x, (int)y);
    case EMU_REDUCE_AND: return x & y;
    case EMU_REDUCE_OR: return x | y;
    default: return x ^ y;
    }
}

/* A result that every lane of the mask gets alike. */
static uint64_t common_result(const Warp &warp, emu_warp_op op, unsigned mask) {
    unsigned ballot = 0;
    const unsigned first = (unsigned)__builtin_ctz(mask);
    bool all_equal = true;
    uint64_t reduced = warp.value[first];
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(lanes);
        const uint64_t value = warp.value[lane];
        if (value) ballot |= 1u << lane;
        all_equal = all_equal && value == warp.value[first];
        if (op >= EMU_REDUCE_ADD && lane != first) reduced = reduce_two(op, reduced, value);
    }
    switch (op) {
    case EMU_BALLOT: return ballot;
    case EMU_ANY: return ballot != 0;
    case EMU_ALL: return ballot == mask;
    case EMU_MATCH_ALL: return all_equal ? mask : 0;
    default: return reduced;
    }
}

static unsigned match_any(const Warp &warp, unsigned mask, uint64_t value) {
    unsigned same = 0;
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(lanes);
        if (warp.value[lane] == value) same |= 1u << lane;
    }
    return same;
}

/* A shuffle of one kind, for the lanes of the mask; all of them have the same width. */
template <emu_warp_op op> static void shuffle(Warp &warp, unsigned mask) {
    const unsigned width = (unsigned)warp.slot[__builtin_ctz(mask)].width;
    uint64_t before[32];
    memcpy(before, warp.value, sizeof before);
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask & 1u << lane)) continue;
        const Slot &slot = warp.slot[lane];
        const unsigned source = shuffle_source(op, width, (unsigned)slot.parameter, lane);
        if (!(mask & 1u << source))
            kernel_failed("lane %u shuffles from lane %u, which is not in mask 0x%08x (%s:%d)", lane, source,
                          mask, slot.file, slot.line);
        warp.value[lane] = before[source];
    }
}

static void complete_warp(Warp &warp, emu_warp_op op, unsigned mask) {
    switch (op) {
    case EMU_WARP_SYNC: warp.syncs++; return;
    case EMU_SHFL: shuffle<EMU_SHFL>(warp, mask); return;
    case EMU_SHFL_UP: shuffle<EMU_SHFL_UP>(warp, mask); return;
    case EMU_SHFL_DOWN: shuffle<EMU_SHFL_DOWN>(warp, mask); return;
    case EMU_SHFL_XOR: shuffle<EMU_SHFL_XOR>(warp, mask); return;
    default: break;
    }
    const uint64_t common = op == EMU_MATCH_ANY ? 0 : common_result(warp, op, mask);
    uint64_t result[32];
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(lanes);
        result[lane] = op == EMU_MATCH_ANY ? match_any(warp, mask, warp.value[lane]) : common;
    }
    for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(lanes);
        warp.value[lane] = result[lane];
    }
}

/* Stops the kernel when this lane and a waiting lane have called different operations. */
static inline void check_agreement(const Warp &warp, const Slot &mine, unsigned bit) {
    for (unsigned lanes = warp.waiting & ~bit; lanes; lanes &= lanes - 1) {
        const Slot &other = warp.slot[__builtin_ctz(lanes)];
        const bool meets = (mine.mask & (lanes & -lanes)) || (other.mask & bit);
        if (!meets) continue;
        if (other.mask != mine.mask)
            kernel_failed("lanes with different masks: 0x%08x in %s at %s:%d, 0x%08x in %s at %s:%d",
                          mine.mask, warp_op_names[mine.op], mine.file, mine.line, other.mask,
                          warp_op_names[other.op], other.file, other.line);
        if (other.op != mine.op || other.width != mine.width || other.line != mine.line ||
            !same_file(other.file, mine.file))
            kernel_failed("lanes of one mask in different operations: %s at %s:%d, %s at %s:%d",
                          warp_op_names[mine.op], mine.file, mine.line, warp_op_names[other.op], other.file,
                          other.line);
        if (other.mask == mine.mask && !(warp.waiting & ~mine.mask))
            return; /* the others were compared before */
    }
}

uint64_t emu_warp(emu_warp_op op, unsigned mask, uint64_t value, int parameter, int width, const char *file,
                  int line) {
    Thread *self = running;
    Warp &warp = *self->warp;
    const unsigned bit = 1u << self->lane;
    Slot &slot = warp.slot[self->lane];
    slot = { file, line, parameter, width, mask, op };
    warp.value[self->lane] = value;
    if (!(mask & bit))
        kernel_failed("lane %u is not in mask 0x%08x of %s at %s:%d", self->lane, mask, warp_op_names[op],
                      file, line);
    if (mask & ~warp.exists)
        kernel_failed("mask 0x%08x of %s at %s:%d names lanes that do not exist", mask, warp_op_names[op],
                      file, line);
    if (mask & warp.ended)
        kernel_failed("mask 0x%08x of %s at %s:%d names lanes that have ended", mask, warp_op_names[op], file,
                      line);
    if (width < 1 || width > 32 || (width & (width - 1)))
        kernel_failed("shuffle width %d at %s:%d", width, file, line);
    if (warp.waiting) check_agreement(warp, slot, bit);
    warp.waiting |= bit;
    if ((warp.waiting & mask) == mask) {
        complete_warp(warp, op, mask);
        warp.waiting &= ~mask;
        warp.ready |= mask;
        queue_warp(&warp);
    }
    wait_thread(self, warp_op_names[op], file, line);
    return warp.value[self->lane];
}

void emu_fence(void) {
    check_fence();
}

void emu_trap(const char *file, int line) {
    kernel_failed("__trap at %s:%d", file, line);
}

void emu_require_aligned(const void *address, size_t alignment, const char *file, int line) {
    if ((uintptr_t)address % alignment == 0) return;
    if (running)
        kernel_failed("access of %zu bytes at %p is not aligned (%s:%d)", alignment, address, file, line);
    report("access of %zu bytes at %p is not aligned (%s:%d)", alignment, address, file, line);
}

unsigned emu_cluster_rank(void) {
    return running->warp->block->rank;
}

unsigned emu_cluster_size(void) {
    return (unsigned)team.blocks.size();
}

void *emu_cluster_map(const void *shared, unsigned rank, const char *file, int line) {
    if (rank >= team.blocks.size())
        kernel_failed("cluster has %zu blocks, no rank %u (%s:%d)", team.blocks.size(), rank, file, line);
    if (!in_arenas(shared)) kernel_failed("%p is not shared memory (%s:%d)", shared, file, line);
    const size_t offset = (size_t)(static_cast<const char *>(shared) - arenas) % kArenaBytes;
    return arenas + rank * kArenaBytes + offset;
}
