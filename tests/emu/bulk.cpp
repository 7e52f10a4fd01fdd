/* Twins of mbarrier and of 1-D bulk copies. A copy is carried out as late as the program allows: a load when a thread waits for
 * its barrier, a store when its group is waited for or its thread ends. */
#include "exec.h"

#include <algorithm>

namespace emu {

/* The 8 bytes in shared memory: arrivals that a phase needs, arrivals and bytes still missing, phase. */
struct MBarrier {
    uint64_t expected : 12, pending : 12, bytes : 32, phase : 8;
};
static_assert(sizeof(MBarrier) == sizeof(uint64_t), "an mbarrier has 8 bytes");

struct BulkLoad {
    char *to;
    const char *from; /* NULL: 16 bytes of a thread, which are here */
    unsigned bytes;
    uint64_t *barrier;
    uint64_t own[2];
};
static std::vector<BulkLoad> loads;   /* of the running team, not yet executed */
static std::vector<uint64_t *> lost; /* its barriers that wait for a copy which never arrives */
static long until_lost;              /* loads; 0: none is lost */

void bulk_begin_team() {
    loads.clear();
    lost.clear();
}

bool mbarrier_lost(const uint64_t *barrier) {
    return std::find(lost.begin(), lost.end(), barrier) != lost.end();
}

static void carry_out_store(const BulkStore &store) {
    check_access(store.from, store.bytes, false, false);
    check_access(store.to, store.bytes, true, false);
    memcpy(store.to, store.from, store.bytes);
}

void bulk_end_thread(Thread *thread) {
    for (const BulkStore &store : thread->stores) carry_out_store(store);
    thread->stores.clear();
}

static MBarrier *valid(uint64_t *barrier, const char *file, int line) {
    if (!in_arenas(barrier) || (uintptr_t)barrier % 8)
        kernel_failed("%p is no mbarrier in shared memory (%s:%d)", (void *)barrier, file, line);
    MBarrier *state = reinterpret_cast<MBarrier *>(barrier);
    if (state->expected == 0 || state->expected == 0xfff)
        kernel_failed("the mbarrier was not initialised (%s:%d)", file, line);
    return state;
}

/* Begins the next phase when nothing of this one is missing. */
static void advance(MBarrier *state) {
    if (state->pending || state->bytes) return;
    state->phase ^= 1;
    state->pending = state->expected;
    wake_all("an mbarrier");
}

static void arrive(MBarrier *state, const char *file, int line) {
    if (state->pending == 0) kernel_failed("more arrivals than the mbarrier expects (%s:%d)", file, line);
    state->pending--;
    advance(state);
}

static void carry_out_loads(uint64_t *barrier) {
    std::vector<BulkLoad> mine, others;
    for (const BulkLoad &load : loads) (load.barrier == barrier ? mine : others).push_back(load);
    loads.swap(others);
    MBarrier *state = reinterpret_cast<MBarrier *>(barrier);
    for (const BulkLoad &load : mine) {
        if (load.from) check_access(load.from, load.bytes, false, false);
        check_bulk_written(load.to, load.bytes);
        memcpy(load.to, load.from ? load.from : reinterpret_cast<const char *>(load.own), load.bytes);
        state->bytes -= load.bytes;
    }
    if (!mine.empty()) advance(state);
}

bool mbarrier_passed(uint64_t *barrier, unsigned parity, const char *file, int line) {
    const MBarrier *state = valid(barrier, file, line);
    if ((state->phase & 1u) == (parity & 1u)) carry_out_loads(barrier);
    return (state->phase & 1u) != (parity & 1u);
}

static void check_bulk(const void *shared, const void *global, unsigned bytes, const char *file, int line) {
    if (!in_arenas(shared) || !shared_holds(shared, bytes) || in_arenas(global))
        kernel_failed("bulk copy of %u bytes between %p and %p (%s:%d)", bytes, shared, global, file, line);
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16 || bytes % 16)
        kernel_failed("bulk copy of %u bytes: address or size is no multiple of 16 (%s:%d)", bytes, file,
                      line);
    const Block *block = find_block(global);
    if (!block || block->device < 0 || static_cast<const char *>(global) + bytes > block->base + block->bytes)
        kernel_failed("bulk copy of %u bytes does not fit at %s (%s:%d)", bytes, describe(global).c_str(),
                      file, line);
}

} // namespace emu

using namespace emu;

void emu_mbarrier_init(uint64_t *barrier, unsigned arrivals, const char *file, int line) {
    if (!in_arenas(barrier) || arrivals == 0 || arrivals >= 0xfff)
        kernel_failed("mbarrier of %u arrivals at %p (%s:%d)", arrivals, (void *)barrier, file, line);
    check_access(barrier, sizeof *barrier, true, false);
    MBarrier state = MBarrier();
    state.expected = state.pending = arrivals;
    memcpy(barrier, &state, sizeof state);
}

void emu_mbarrier_arrive(uint64_t *barrier, const char *file, int line) {
    arrive(valid(barrier, file, line), file, line);
}

void emu_mbarrier_expect(uint64_t *barrier, unsigned bytes, const char *file, int line) {
    MBarrier *state = valid(barrier, file, line);
    state->bytes += bytes;
    arrive(state, file, line);
}

void emu_mbarrier_wait(uint64_t *barrier, unsigned parity, const char *file, int line) {
    while (!mbarrier_passed(barrier, parity, file, line)) wait_as("an mbarrier", file, line);
}

int emu_mbarrier_try(uint64_t *barrier, unsigned parity, const char *file, int line) {
    while (!mbarrier_passed(barrier, parity, file, line)) {
        if (mbarrier_lost(barrier)) return 0;
        wait_as("an mbarrier", file, line);
    }
    return 1;
}

void emu_lose_bulk_load(long n) {
    until_lost = n;
}

void emu_bulk_load(void *shared, const void *global, unsigned bytes, uint64_t *barrier, const char *file,
                   int line) {
    valid(barrier, file, line);
    check_bulk(shared, global, bytes, file, line);
    if (until_lost > 0 && --until_lost == 0)
        lost.push_back(barrier);
    else
        loads.push_back({ static_cast<char *>(shared), static_cast<const char *>(global), bytes, barrier, { 0, 0 } });
    wake_all("an mbarrier"); /* a thread may wait for this barrier already: it then executes the copy */
}

void emu_store_async(void *shared, uint64_t first, uint64_t second, uint64_t *barrier, const char *file, int line) {
    valid(barrier, file, line);
    if (!in_arenas(shared) || !shared_holds(shared, 16) || (uintptr_t)shared % 16)
        kernel_failed("store of 16 bytes at %p in the cluster (%s:%d)", shared, file, line);
    loads.push_back({ static_cast<char *>(shared), nullptr, 16, barrier, { first, second } });
    wake_all("an mbarrier");
}

void emu_bulk_store(void *global, const void *shared, unsigned bytes, const char *file, int line) {
    check_bulk(shared, global, bytes, file, line);
    running->stores.push_back(
        { static_cast<char *>(global), static_cast<const char *>(shared), bytes, running->groups });
}

void emu_bulk_commit(const char *, int) {
    running->groups++;
}

void emu_bulk_wait(unsigned pending, const char *, int) {
    Thread &self = *running;
    std::vector<BulkStore> later;
    for (const BulkStore &store : self.stores) {
        if (store.group + pending < self.groups)
            carry_out_store(store);
        else
            later.push_back(store);
    }
    self.stores.swap(later);
}
