/* Memory of the PTX interpreter: loads, stores, atomics, addresses of other spaces, barriers in shared memory, copies.
 *
 * A global or generic address is the emulation's own. An address in shared memory counts from the first block's; one in local
 * memory from the lane's own. Every access is checked: whole, in one live variable or block, and aligned. */
#include "ptx_flight.h"

#include <algorithm>
#include <vector>

#include "exec.h"

namespace emu {
namespace ptx {

/* ---- what may be touched ---- */

struct Range {
    uint64_t begin, end;
};

static uint64_t number_of(const void *address) {
    return (uint64_t)(uintptr_t)address;
}

static char *pointer_to(uint64_t address) {
    return reinterpret_cast<char *>((uintptr_t)address);
}

static Range range_of_data(uint64_t address) {
    for (const auto &entry : running_module->data) {
        const uint64_t begin = number_of(entry.second.words.data());
        if (address >= begin && address < begin + entry.second.bytes)
            return { begin, begin + entry.second.bytes };
    }
    return { 0, 0 };
}

static Range range_of_parameters(uint64_t address) {
    const uint64_t begin = number_of(arguments);
    return address >= begin && address < begin + kMostArguments ? Range{ begin, begin + kMostArguments }
                                                                : Range{ 0, 0 };
}

/* The live memory around an address that this space and the generic one have; empty: nothing. */
static Range range_of(Space space, uint64_t address) {
    const void *at = pointer_to(address);
    const char *begin = nullptr;
    size_t bytes = 0;
    if (in_arenas(at)) {
        if (space != kShared && space != kGeneric) return { 0, 0 };
        if (!shared_range(at, &begin, &bytes)) return { 0, 0 };
        return { number_of(begin), number_of(begin) + bytes };
    }
    if (space == kShared) return { 0, 0 };
    const Range parameters = range_of_parameters(address);
    if (parameters.end) return space == kGlobal ? Range{ 0, 0 } : parameters;
    if (const Block *block = find_block(at))
        return { number_of(block->base), number_of(block->base) + block->bytes };
    return range_of_data(address);
}

static std::string describe_address(uint64_t address) {
    const void *at = pointer_to(address);
    if (!address) return "address 0";
    return in_arenas(at) ? shared_describe(at) : describe(at);
}

[[noreturn]] static __attribute__((noinline)) void refuse(const Instruction &in, Lanes &lanes, unsigned lane,
                                                          uint64_t address, unsigned bytes, const char *why) {
    char place[300]; /* a string would never be freed */
    snprintf(place, sizeof place, "%s", describe_address(address).c_str());
    fail(in, lanes, lane, "%s: %u bytes at %s", why, bytes, place);
}

static __attribute__((noinline)) void look_up(const Instruction &in, Lanes &lanes, unsigned lane, Space space,
                                              uint64_t address, unsigned bytes) {
    const Range range = range_of(space, address);
    if (!range.end || address + bytes > range.end)
        refuse(in, lanes, lane, address, bytes, "touches no memory of its own");
    in.seen = { range.begin, range.end, team.serial };
}

static inline char *frame_of(const Lanes &lanes, unsigned lane) {
    return lanes.frames + lane * lanes.frame_bytes;
}

/* The place of a lane's access, after the checks. */
template <Space space>
static inline char *reach(const Instruction &in, Lanes &lanes, unsigned lane, uint64_t address,
                          unsigned bytes) {
    if (space == kShared) address = number_of(arenas) + (uint32_t)address;
    const uint64_t frame = number_of(frame_of(lanes, lane));
    if (space == kLocal) {
        if (address + bytes > lanes.frame_bytes || address + bytes < bytes)
            fail(in, lanes, lane, "touches byte %llu of %zu in local memory", (unsigned long long)address,
                 lanes.frame_bytes);
        address += frame;
    }
    if (address & (bytes - 1)) refuse(in, lanes, lane, address, bytes, "is not aligned");
    if (space == kLocal || (space == kGeneric && address - frame < lanes.frame_bytes))
        return pointer_to(address);
    if (address < in.seen.begin || address + bytes > in.seen.end)
        look_up(in, lanes, lane, space, address, bytes);
    return pointer_to(address);
}

/* What an earlier launch has touched may be gone. A memory fault names the running thread. */
static inline void begin_access(const Instruction &in, Lanes &lanes, unsigned active) {
    if (in.seen.launch != team.serial) in.seen = { 0, 0, team.serial };
    become(lanes, (unsigned)__builtin_ctz(active));
}

/* ---- loads and stores ---- */

template <typename T, Space space> static void load(const Instruction &in, Lanes &lanes, unsigned active) {
    const uint64_t *base = lanes.row(in.from[0]);
    begin_access(in, lanes, active);
    if (in.results == 1) {
        uint64_t *to = lanes.row(in.to[0]);
        each(active, [&](unsigned lane) {
            T value;
            memcpy(&value, reach<space>(in, lanes, lane, base[lane] + (uint64_t)in.offset, sizeof value),
                   sizeof value);
            to[lane] = (uint64_t)(int64_t)value;
        });
        return;
    }
    each(active, [&](unsigned lane) {
        T values[4];
        const unsigned bytes = (unsigned)sizeof(T) * in.results;
        memcpy(values, reach<space>(in, lanes, lane, base[lane] + (uint64_t)in.offset, bytes), bytes);
        for (unsigned i = 0; i < in.results; i++) lanes.row(in.to[i])[lane] = (uint64_t)(int64_t)values[i];
    });
}

template <typename T, Space space> static void store(const Instruction &in, Lanes &lanes, unsigned active) {
    const uint64_t *base = lanes.row(in.from[0]);
    const unsigned elements = in.count - 1u, bytes = (unsigned)sizeof(T) * elements;
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        T values[4];
        for (unsigned i = 0; i < elements; i++) values[i] = (T)lanes.row(in.from[i + 1])[lane];
        memcpy(reach<space>(in, lanes, lane, base[lane] + (uint64_t)in.offset, bytes), values, bytes);
    });
}

template <typename T> static Handler load_from(Space space) {
    switch (space) {
    case kGlobal: return load<T, kGlobal>;
    case kConstant: return load<T, kConstant>;
    case kParameter: return load<T, kParameter>;
    case kShared: return load<T, kShared>;
    case kLocal: return load<T, kLocal>;
    default: return load<T, kGeneric>;
    }
}

template <typename T> static Handler store_to(Space space) {
    switch (space) {
    case kGlobal: return store<T, kGlobal>;
    case kShared: return store<T, kShared>;
    case kLocal: return store<T, kLocal>;
    case kGeneric: return store<T, kGeneric>;
    default: return nullptr;
    }
}

static Handler load_handler(Type type, Space space) {
    switch (type) {
    case kS8: return load_from<int8_t>(space);
    case kS16: return load_from<int16_t>(space);
    case kS32: return load_from<int32_t>(space);
    case kNoType:
    case kPredicate: return nullptr;
    default: break;
    }
    switch (bytes_of(type)) {
    case 1: return load_from<uint8_t>(space);
    case 2: return load_from<uint16_t>(space);
    case 4: return load_from<uint32_t>(space);
    default: return load_from<uint64_t>(space);
    }
}

static Handler store_handler(Type type, Space space) {
    if (type == kNoType || type == kPredicate) return nullptr;
    switch (bytes_of(type)) {
    case 1: return store_to<uint8_t>(space);
    case 2: return store_to<uint16_t>(space);
    case 4: return store_to<uint32_t>(space);
    default: return store_to<uint64_t>(space);
    }
}

/* Words about order and caches, which mean nothing here. */
static void take_hints(Statement *statement) {
    static const char *const hints[] = { "volatile",
                                         "weak",
                                         "relaxed",
                                         "acquire",
                                         "release",
                                         "acq_rel",
                                         "sys",
                                         "gpu",
                                         "cluster",
                                         "cta",
                                         "ca",
                                         "cg",
                                         "cs",
                                         "lu",
                                         "cv",
                                         "wb",
                                         "wt",
                                         "nc",
                                         "v2",
                                         "v4",
                                         "L1::no_allocate",
                                         "L1::evict_first",
                                         "L1::evict_last",
                                         "L2::128B",
                                         "L2::64B",
                                         "L2::256B" };
    for (const char *hint : hints) statement->take(hint);
}

static Class memory_class(Space space, bool loads) {
    if (space == kShared) return kSharedClass;
    if (space == kLocal) return kLocalClass;
    if (space == kParameter || space == kConstant) return kMoveClass;
    return loads ? kLoadClass : kStoreClass;
}

static void decode_access(Statement &statement, Instruction *in, bool loads) {
    const unsigned elements = statement.has("v4") ? 4 : statement.has("v2") ? 2 : 1;
    const Space space = statement.take_space();
    take_hints(&statement);
    const Type type = statement.take_type();
    statement.argument(loads ? 1 : 0, Argument::kAddress);
    statement.operands(in, loads ? 1 : 0);
    if ((loads ? in->results : in->count - 1u) != elements) throw Unknown{ "number of elements" };
    in->handler = loads ? load_handler(type, space) : store_handler(type, space);
    in->kind = memory_class(space, loads);
    in->bytes = (uint8_t)(elements * bytes_of(type));
    if (in->kind == kLoadClass || in->kind == kStoreClass) in->traffic = loads ? kReads : kWrites;
}

/* ---- addresses of other spaces ---- */

template <Space space, bool to_space>
static void change_space(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *from = lanes.row(in.from[0]);
    each(active, [&](unsigned lane) {
        const uint64_t base = space == kShared  ? number_of(arenas)
                              : space == kLocal ? number_of(frame_of(lanes, lane))
                                                : 0;
        to[lane] = to_space ? from[lane] - base : from[lane] + base;
    });
}

static void decode_cvta(Statement &statement, Instruction *in) {
    const bool to_space = statement.take("to");
    const Space space = statement.take_space();
    if (!statement.take("u64")) statement.take("u32");
    statement.operands(in, 1);
    in->kind = kMoveClass;
    if (space == kShared)
        in->handler = to_space ? change_space<kShared, true> : change_space<kShared, false>;
    else if (space == kLocal)
        in->handler = to_space ? change_space<kLocal, true> : change_space<kLocal, false>;
    else
        in->handler = change_space<kGlobal, false>;
}

/* The same place in the shared memory of another block of the cluster. */
static void map_to_block(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    const uint64_t *from = lanes.row(in.from[0]), *rank = lanes.row(in.from[1]);
    const uint64_t base = in.mode ? 0 : number_of(arenas);
    each(active, [&](unsigned lane) {
        const uint64_t offset = from[lane] - base;
        if ((uint32_t)rank[lane] >= team.blocks.size())
            fail(in, lanes, lane, "the cluster has %zu blocks, no rank %u", team.blocks.size(),
                 (uint32_t)rank[lane]);
        if (offset >= kMaxClusterBlocks * kArenaBytes)
            fail(in, lanes, lane, "the address is not in shared memory");
        to[lane] = base + (uint32_t)rank[lane] * kArenaBytes + offset % kArenaBytes;
    });
}

/* ---- atomics ---- */

enum AtomicOperation {
    kAtomicAdd,
    kAtomicMin,
    kAtomicMax,
    kAtomicAnd,
    kAtomicOr,
    kAtomicXor,
    kAtomicExchange,
    kAtomicIncrement,
    kAtomicDecrement,
    kAtomicSwap
};

template <typename T> static T bitwise(int operation, T old, T value) {
    return operation == kAtomicAnd  ? (T)(old & value)
           : operation == kAtomicOr ? (T)(old | value)
                                    : (T)(old ^ value);
}
static float bitwise(int, float, float value) {
    return value;
}
static double bitwise(int, double, double value) {
    return value;
}

template <typename T> static T updated(int operation, T old, T value, T other) {
    switch (operation) {
    case kAtomicAdd: return (T)(old + value);
    case kAtomicMin: return std::min(old, value);
    case kAtomicMax: return std::max(old, value);
    case kAtomicExchange: return value;
    case kAtomicIncrement: return old >= value ? (T)0 : (T)(old + 1);
    case kAtomicDecrement: return old == 0 || old > value ? value : (T)(old - 1);
    case kAtomicSwap: return old == value ? other : old;
    default: return bitwise(operation, old, value);
    }
}

/* Signed sums wrap around. */
template <> int32_t updated<int32_t>(int operation, int32_t old, int32_t value, int32_t) {
    if (operation == kAtomicAdd) return (int32_t)((uint32_t)old + (uint32_t)value);
    return operation == kAtomicMin ? std::min(old, value) : std::max(old, value);
}

template <typename T, Space space> static void atomic(const Instruction &in, Lanes &lanes, unsigned active) {
    const uint64_t *base = lanes.row(in.from[0]), *value = lanes.row(in.from[1]);
    const uint64_t *other = in.count > 2 ? lanes.row(in.from[2]) : value;
    uint64_t *to = lanes.row(in.to[0]);
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        char *at = reach<space>(in, lanes, lane, base[lane] + (uint64_t)in.offset, sizeof(T));
        T old;
        memcpy(&old, at, sizeof old);
        const T result = updated<T>(in.mode, old, value_of<T>(value[lane]), value_of<T>(other[lane]));
        memcpy(at, &result, sizeof result);
        to[lane] = bits_of(old);
    });
}

template <typename T> static Handler atomic_in(Space space) {
    return space == kShared   ? atomic<T, kShared>
           : space == kGlobal ? atomic<T, kGlobal>
                              : atomic<T, kGeneric>;
}

static Handler atomic_handler(Type type, Space space, int operation) {
    const bool arithmetic = operation == kAtomicAdd || operation == kAtomicMin || operation == kAtomicMax;
    switch (type) {
    case kU32:
    case kB32: return atomic_in<uint32_t>(space);
    case kU64:
    case kB64: return atomic_in<uint64_t>(space);
    case kS32: return arithmetic ? atomic_in<int32_t>(space) : nullptr;
    case kS64: return arithmetic && operation != kAtomicAdd ? atomic_in<int64_t>(space) : nullptr;
    case kF32: return operation == kAtomicAdd ? atomic_in<float>(space) : nullptr;
    case kF64: return operation == kAtomicAdd ? atomic_in<double>(space) : nullptr;
    default: return nullptr;
    }
}

static int take_atomic(Statement *statement) {
    static const char *const names[] = {
        "add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas"
    };
    for (int i = 0; i < 10; i++)
        if (statement->take(names[i])) return i;
    throw Unknown{ "operation" };
}

static void decode_atomic(Statement &statement, Instruction *in, bool has_result) {
    const Space space = statement.take_space();
    const int operation = take_atomic(&statement);
    take_hints(&statement);
    const Type type = statement.take_type();
    statement.argument(has_result ? 1 : 0, Argument::kAddress);
    statement.operands(in, has_result ? 1 : 0);
    if (in->count != (operation == kAtomicSwap ? 3 : 2)) throw Unknown{ "number of operands" };
    if (!has_result) in->to[0] = { kSink, 0 };
    in->mode = (uint8_t)operation;
    in->handler = atomic_handler(type, space, operation);
    in->kind = kAtomicClass;
    in->bytes = (uint8_t)bytes_of(type);
    in->traffic = kUpdates;
}

/* ---- barriers in shared memory, and bulk copies: the emulation's own (bulk.cpp) ---- */

static const char *path() {
    return running_module->path.c_str();
}

static uint64_t *barrier_of(const Instruction &in, Lanes &lanes, unsigned lane) {
    const uint64_t address = lanes.row(in.from[0])[lane] + (uint64_t)in.offset;
    if (in.mode) return reinterpret_cast<uint64_t *>(reach<kGeneric>(in, lanes, lane, address, 8));
    return reinterpret_cast<uint64_t *>(reach<kShared>(in, lanes, lane, address, 8));
}

template <typename Function>
static void at_barrier(const Instruction &in, Lanes &lanes, unsigned active, Function function) {
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        become(lanes, lane);
        uint64_t *barrier = barrier_of(in, lanes, lane);
        function(barrier, lanes.row(in.from[1])[lane]);
        if (lanes.flight) watch_arrival(lanes, barrier);
    });
    note_event();
}

static void barrier_init(const Instruction &in, Lanes &lanes, unsigned active) {
    at_barrier(in, lanes, active, [&](uint64_t *barrier, uint64_t arrivals) {
        emu_mbarrier_init(barrier, (unsigned)arrivals, path(), in.line);
    });
}

static void barrier_arrive(const Instruction &in, Lanes &lanes, unsigned active) {
    at_barrier(in, lanes, active,
               [&](uint64_t *barrier, uint64_t) { emu_mbarrier_arrive(barrier, path(), in.line); });
}

static void barrier_expect(const Instruction &in, Lanes &lanes, unsigned active) {
    at_barrier(in, lanes, active, [&](uint64_t *barrier, uint64_t bytes) {
        emu_mbarrier_expect(barrier, (unsigned)bytes, path(), in.line);
    });
}

/* Lanes that find the phase complete go on, or that a copy is lost; the other ones look again. */
static void barrier_wait(const Instruction &in, Lanes &lanes, unsigned active) {
    unsigned passed = 0, lost = 0;
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        become(lanes, lane);
        const unsigned parity = (unsigned)lanes.row(in.from[1])[lane] & 1u, bit = 1u << lane;
        uint64_t *const barrier = barrier_of(in, lanes, lane);
        if (mbarrier_passed(barrier, parity, path(), in.line))
            passed |= bit;
        else if (mbarrier_lost(barrier))
            lost |= bit;
    });
    set_predicate(lanes, in.to[0], active, passed);
    if (passed | lost) note_event();
    if (passed && lanes.flight) watch_bulk_wait(lanes, barrier_of(in, lanes, (unsigned)__builtin_ctz(passed)));
    if ((passed | lost) == active)
        lanes.pc++;
    else
        look_again(in, lanes, active & ~(passed | lost));
}

static void decode_mbarrier(Statement &statement, Instruction *in) {
    in->mode = statement.take_space() == kGeneric;
    in->kind = kExchangeClass;
    take_hints(&statement);
    const bool arrives = statement.take("arrive"), expects = statement.take("expect_tx");
    const bool waits = statement.take("try_wait") || statement.take("test_wait");
    if (waits && !statement.take("parity")) throw Unknown{ "wait for a state" };
    statement.take("b64");
    in->jumps = waits;
    in->handler = statement.take("init") ? barrier_init
                  : waits                ? barrier_wait
                  : arrives && expects   ? barrier_expect
                  : arrives              ? barrier_arrive
                                         : nullptr;
    const bool has_result = waits || arrives;
    statement.argument(has_result ? 1 : 0, Argument::kAddress);
    statement.operands(in, has_result ? 1 : 0);
    if (arrives && in->to[0].row != kSink) throw Unknown{ "state of a barrier" };
    if (arrives && !expects) in->from[1] = { kZero, 0 };
}

static void bulk_load(const Instruction &in, Lanes &lanes, unsigned active) {
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        const uint64_t to = number_of(arenas) + (uint32_t)(lanes.row(in.from[0])[lane] + (uint64_t)in.offset);
        char *at = reach<kShared>(in, lanes, lane, lanes.row(in.from[3])[lane], 8);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(at);
        become(lanes, lane);
        emu_bulk_load(pointer_to(to), pointer_to(lanes.row(in.from[1])[lane]),
                      (unsigned)lanes.row(in.from[2])[lane], barrier, path(), in.line);
        if (lanes.flight)
            watch_bulk_load(lanes, barrier, lanes.row(in.from[1])[lane], (unsigned)lanes.row(in.from[2])[lane]);
    });
    note_event();
}

static void bulk_store(const Instruction &in, Lanes &lanes, unsigned active) {
    each(active, [&](unsigned lane) {
        const uint64_t from = number_of(arenas) + (uint32_t)lanes.row(in.from[1])[lane];
        become(lanes, lane);
        const uint64_t to = lanes.row(in.from[0])[lane] + (uint64_t)in.offset;
        const unsigned bytes = (unsigned)lanes.row(in.from[2])[lane];
        emu_bulk_store(pointer_to(to), pointer_to(from), bytes, path(), in.line);
        if (lanes.flight) watch_bulk_store(to, bytes);
    });
}

/* Into shared memory of the cluster, to be counted by a barrier there. */
static void store_async(const Instruction &in, Lanes &lanes, unsigned active) {
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        char *to = reach<kShared>(in, lanes, lane, lanes.row(in.from[0])[lane], 16);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(reach<kShared>(in, lanes, lane, lanes.row(in.from[3])[lane], 8));
        become(lanes, lane);
        emu_store_async(to, lanes.row(in.from[1])[lane], lanes.row(in.from[2])[lane], barrier, path(), in.line);
        if (lanes.flight) watch_store_async(lanes, barrier);
    });
    note_event();
}

static void decode_store_async(Statement &statement, Instruction *in) {
    const bool pairs = statement.has("v2");
    statement.take("async");
    statement.take("mbarrier::complete_tx::bytes");
    const Space space = statement.take_space();
    take_hints(&statement);
    if (space != kShared || !pairs || !statement.take("b64")) throw Unknown{ "asynchronous store" };
    statement.operands(in, 0);
    if (in->count != 4 || in->offset) throw Unknown{ "operands of an asynchronous store" };
    in->handler = store_async;
    in->kind = kSharedClass;
}

static void bulk_commit(const Instruction &in, Lanes &lanes, unsigned active) {
    each(active, [&](unsigned lane) {
        become(lanes, lane);
        emu_bulk_commit(path(), in.line);
    });
}

static void bulk_wait(const Instruction &in, Lanes &lanes, unsigned active) {
    each(active, [&](unsigned lane) {
        become(lanes, lane);
        emu_bulk_wait((unsigned)lanes.row(in.from[0])[lane], path(), in.line);
    });
}

static void decode_late(Statement &statement, Instruction *in);

static void decode_copy(Statement &statement, Instruction *in) {
    const bool to_shared = !statement.suffixes.empty() && statement.has("mbarrier::complete_tx::bytes");
    if (!statement.take("async")) throw Unknown{ "copy" };
    if (!statement.take("bulk")) return decode_late(statement, in);
    in->kind = to_shared ? kLoadClass : kStoreClass;
    statement.take("mbarrier::complete_tx::bytes");
    const bool group = statement.take("bulk_group");
    statement.take_space();
    statement.take_space();
    statement.take("read");
    in->handler = to_shared                        ? bulk_load
                  : group                          ? bulk_store
                  : statement.take("commit_group") ? bulk_commit
                  : statement.take("wait_group")   ? bulk_wait
                                                   : nullptr;
    statement.operands(in, 0);
    if (to_shared && in->count != 4) throw Unknown{ "number of operands" };
}

/* ---- copies that a thread waits for ---- */

/* They are made as late as they may be, when the thread waits for their group: code that does not wait reads what was there. */
struct LateCopy {
    const Instruction *in;
    uint64_t to, from;
    unsigned bytes, group;
};

struct LateCopies {
    uint64_t launch = 0;
    unsigned groups = 0; /* that are complete */
    std::vector<LateCopy> copies;
};

static LateCopies &late_copies_of(const Lanes &lanes, unsigned lane) {
    static std::vector<LateCopies> all; /* of the team's threads */
    const size_t thread = lanes.first + lane;
    if (all.size() <= thread) all.resize(thread + 1);
    if (all[thread].launch != team.serial) {
        all[thread] = LateCopies();
        all[thread].launch = team.serial;
    }
    return all[thread];
}

static void late_copy(const Instruction &in, Lanes &lanes, unsigned active) {
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        const uint64_t to = lanes.row(in.from[0])[lane] + (uint64_t)in.offset, from = lanes.row(in.from[1])[lane];
        const unsigned bytes = (unsigned)lanes.row(in.from[2])[lane];
        LateCopies &late = late_copies_of(lanes, lane);
        if (bytes != 4 && bytes != 8 && bytes != 16) fail(in, lanes, lane, "copies %u bytes: 4, 8 or 16 can be", bytes);
        reach<kShared>(in, lanes, lane, to, bytes);
        reach<kGlobal>(in, lanes, lane, from, bytes);
        late.copies.push_back({ &in, to, from, bytes, late.groups });
        if (lanes.flight) watch_copy(lanes, from, bytes, lane == (unsigned)__builtin_ctz(active));
    });
}

static void late_group(const Instruction &in, Lanes &lanes, unsigned active) {
    each(active, [&](unsigned lane) { late_copies_of(lanes, lane).groups++; });
    if (lanes.flight) watch_group(lanes);
    (void)in;
}

/* Makes the copies of all groups but the latest ones, as many as the operand says; of wait_all, every copy. */
static void late_wait(const Instruction &in, Lanes &lanes, unsigned active) {
    begin_access(in, lanes, active);
    each(active, [&](unsigned lane) {
        LateCopies &late = late_copies_of(lanes, lane);
        const unsigned left = in.mode ? 0 : (unsigned)lanes.row(in.from[0])[lane];
        size_t made = 0;
        for (const LateCopy &c : late.copies) {
            if (!in.mode && c.group + left >= late.groups) break;
            memcpy(reach<kShared>(in, lanes, lane, c.to, c.bytes), reach<kGlobal>(*c.in, lanes, lane, c.from, c.bytes),
                   c.bytes);
            made++;
        }
        late.copies.erase(late.copies.begin(), late.copies.begin() + (long)made);
    });
    const uint64_t left = in.mode ? 0 : lanes.row(in.from[0])[(unsigned)__builtin_ctz(active)];
    if (lanes.flight && in.mode) watch_group(lanes); /* copies of no group yet */
    if (lanes.flight) watch_group_wait(lanes, (unsigned)left);
}

static void decode_late(Statement &statement, Instruction *in) {
    in->kind = kLoadClass;
    in->mode = statement.take("wait_all");
    in->handler = statement.take("commit_group")             ? late_group
                  : in->mode || statement.take("wait_group") ? late_wait
                                                             : nullptr;
    if (!in->handler && (statement.take("cg") || statement.take("ca"))) {
        if (statement.take_space() != kShared || statement.take_space() != kGlobal) throw Unknown{ "copy" };
        in->handler = late_copy;
    }
    statement.operands(in, 0);
    if (in->handler == late_copy && in->count != 3) throw Unknown{ "number of operands" };
}

/* ---- decoding ---- */

static void nothing(const Instruction &, Lanes &, unsigned) {}

static void decode_fence(Statement &statement, Instruction *in) {
    static const char *const words[] = { "proxy",       "async",           "sc",    "mbarrier_init", "gl",
                                         "shared::cta", "shared::cluster", "global" };
    take_hints(&statement);
    for (const char *word : words) statement.take(word);
    in->handler = nothing;
    in->kind = kExchangeClass;
}

bool decode_memory(Statement &statement, Instruction *in) {
    const std::string &opcode = statement.opcode;
    if (opcode == "st" && statement.has("async")) {
        decode_store_async(statement, in);
    } else if (opcode == "ld" || opcode == "st") {
        decode_access(statement, in, opcode == "ld");
    } else if (opcode == "atom" || opcode == "red") {
        decode_atomic(statement, in, opcode == "atom");
    } else if (opcode == "cvta") {
        decode_cvta(statement, in);
    } else if (opcode == "mapa") {
        in->mode = statement.take_space() == kShared;
        if (!statement.take("u64")) statement.take("u32");
        statement.operands(in, 1);
        in->handler = map_to_block;
    } else if (opcode == "mbarrier") {
        decode_mbarrier(statement, in);
    } else if (opcode == "cp") {
        decode_copy(statement, in);
    } else if (opcode == "fence" || opcode == "membar") {
        decode_fence(statement, in);
    } else {
        return false;
    }
    return true;
}

} // namespace ptx
} // namespace emu
