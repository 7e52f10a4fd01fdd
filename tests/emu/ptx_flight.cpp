/* Bytes on their way, sectors of memory and the clocks of warps; ptx_flight.h says what counts. */
#include "ptx_flight.h"

#include <algorithm>
#include <stdlib.h>

#include "exec.h"

namespace emu {
namespace ptx {

static std::vector<Flight> flights;
static Watched watched; /* of this grid */
static double cluster_times[4]; /* of the last arrival, by the phase modulo 4 */
const size_t kMostLoads = 32; /* on their way; more: some were forgotten */

struct Awaited { /* what an mbarrier's phase waits for */
    double ready = 0;
    uint32_t serial = 0, bytes = 0;
};
struct BlockFlight { /* mbarriers and bulk copies belong to blocks */
    std::unordered_map<const void *, Awaited> barriers;
    uint32_t issued = 0, waited_for = 0;
};
static std::vector<BlockFlight> blocks;

/* ---- sectors of global memory ---- */

struct Sectors {
    std::unordered_map<uint64_t, uint64_t> touched; /* when they were last */
    uint64_t now = 0;
};
static Sectors sectors, stored; /* touched in any way; by stores */

enum Distance { kNew, kFar, kNear };

static Distance touch(Sectors *all, uint64_t sector) {
    uint64_t &last = all->touched[sector];
    const uint64_t before = last;
    last = ++all->now;
    return !before ? kNew : all->now - before > kNearSectors ? kFar : kNear;
}

static double read_sector(uint64_t sector) {
    const Distance distance = touch(&sectors, sector);
    if (distance != kNear) watched.read += 32;
    if (distance == kFar) watched.again += 32;
    return distance == kNear ? kNearLatency : kLatency;
}

static void write_sector(uint64_t sector) {
    touch(&sectors, sector);
    if (touch(&stored, sector) != kNear) watched.written += 32;
}

/* The longest latency of the sectors of a range. */
static double read_range(uint64_t from, unsigned bytes) {
    double latency = kNearLatency;
    for (uint64_t sector = from / 32; sector <= (from + bytes - 1) / 32; sector++)
        latency = std::max(latency, read_sector(sector));
    return latency;
}

/* ---- the grid ---- */

static bool wanted;

bool flights_wanted() {
    return wanted;
}

bool flights_begin_grid(const Launch &launch, uint32_t rows) {
    wanted = getenv("EMU_PTX_REPORT") != nullptr;
    if (!wanted) return false;
    watched = Watched();
    watched.blocks = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
    watched.warps = watched.blocks * team.warps.size() / team.blocks.size();
    watched.threads = team.threads.size() / team.blocks.size();
    watched.dynamic = launch.dynamic_bytes;
    sectors = stored = Sectors();
    flights.assign(team.warps.size(), Flight());
    for (Flight &flight : flights) flight.owners.assign(rows, 0);
    return true;
}

Flight *flight_of(size_t warp) {
    return &flights[warp];
}

void flights_begin_team() {
    for (Flight &flight : flights) {
        std::fill(flight.owners.begin(), flight.owners.end(), 0);
        flight.loads.clear();
        flight.issued = flight.waited_for = 0;
        flight.groups = 1;
        flight.clock = 0;
    }
    blocks.assign(team.blocks.size(), BlockFlight());
    std::fill(cluster_times, cluster_times + 4, 0.0);
}

void flights_end_team() {
    const size_t warps_of_a_block = team.warps.size() / team.blocks.size();
    for (size_t first = 0; first < flights.size(); first += warps_of_a_block) {
        double path = 0;
        for (size_t w = first; w < first + warps_of_a_block; w++) path = std::max(path, flights[w].clock);
        watched.path += path;
    }
}

const Watched &flights_of_grid() {
    return watched;
}

/* ---- waits ---- */

static void await_time(Flight *flight, double time, double *sum) {
    if (time <= flight->clock) return;
    *sum += time - flight->clock;
    flight->clock = time;
}

static void count_wait(Waits *waits, double bytes) {
    if (bytes <= 0) return;
    waits->count++;
    waits->bytes += bytes;
    waits->squares += bytes * bytes;
}

static double bytes_on_the_way(const std::vector<OnTheWay> &loads) {
    double bytes = 0;
    for (const OnTheWay &load : loads) bytes += load.bytes;
    return bytes;
}

static void await_load(Flight *flight, size_t index) {
    const OnTheWay load = flight->loads[index];
    await_time(flight, load.ready, &watched.waited);
    if (load.serial > flight->waited_for) {
        count_wait(&watched.waits, bytes_on_the_way(flight->loads));
        flight->waited_for = flight->issued;
    }
    flight->loads.erase(flight->loads.begin() + (long)index);
}

static void await_owner(Flight *flight, uint32_t owner) {
    for (size_t i = 0; i < flight->loads.size(); i++)
        if (flight->loads[i].serial == owner) return await_load(flight, i);
}

static void await_operand(Flight *flight, const Operand &operand) {
    if (!operand.constant && flight->owners[operand.row]) await_owner(flight, flight->owners[operand.row]);
}

/* ---- instructions ---- */

static bool is_global(const Lanes &lanes, uint64_t address) {
    const char *at = reinterpret_cast<const char *>((uintptr_t)address);
    return !in_arenas(at) && (size_t)(at - lanes.frames) >= lanes.frame_bytes * kWarp &&
           (size_t)(at - arguments) >= kMostArguments;
}

/* The sectors of all lanes, each once when lanes beside each other share it; returns the longest latency. */
static double touch_all(const Instruction &in, const Lanes &lanes, unsigned active, bool writes) {
    const uint64_t *base = lanes.row(in.from[0]);
    double latency = kNearLatency;
    uint64_t last = 0;
    each(active, [&](unsigned lane) {
        const uint64_t sector = (base[lane] + (uint64_t)in.offset) / 32;
        if (sector == last) return;
        last = sector;
        if (writes)
            write_sector(sector);
        else
            latency = std::max(latency, read_sector(sector));
    });
    return latency;
}

/* Loads that no register waits for any more: moves have replaced all that did. */
static void forget(Flight *flight) {
    for (size_t i = 0; i < flight->loads.size();) {
        const OnTheWay &load = flight->loads[i];
        const std::vector<uint32_t> &owners = flight->owners;
        if (!load.group && std::find(owners.begin(), owners.end(), load.serial) == owners.end())
            flight->loads.erase(flight->loads.begin() + (long)i);
        else
            i++;
    }
}

static uint32_t begin_load(Flight *flight, uint32_t bytes, double latency, uint32_t group) {
    if (flight->loads.size() >= kMostLoads) forget(flight);
    flight->loads.push_back({ ++flight->issued, group, bytes, flight->clock + latency });
    watched.loaded += bytes;
    return flight->issued;
}

/* What a move gives its result is still on its way. */
static void pass_on(Flight *flight, const Instruction &in) {
    uint32_t owner = 0;
    for (unsigned i = 0; i < in.count; i++)
        if (!in.from[i].constant) owner = std::max(owner, flight->owners[in.from[i].row]);
    for (unsigned i = 0; i < in.results; i++) flight->owners[in.to[i].row] = owner;
}

static void move_data(Flight *flight, const Instruction &in, const Lanes &lanes, unsigned active) {
    const uint64_t address =
        lanes.row(in.from[0])[(unsigned)__builtin_ctz(active)] + (uint64_t)in.offset;
    if (!is_global(lanes, address)) return;
    const double latency = touch_all(in, lanes, active, in.traffic == kWrites);
    if (in.traffic == kUpdates) touch_all(in, lanes, active, true);
    if (in.traffic == kWrites || !in.results) return;
    const uint32_t bytes = in.traffic == kReads ? in.bytes * (uint32_t)__builtin_popcount(active) : 0;
    const uint32_t serial = begin_load(flight, bytes, latency, 0);
    for (unsigned i = 0; i < in.results; i++) flight->owners[in.to[i].row] = serial;
}

void watch(const Instruction &in, Lanes &lanes, unsigned active) {
    Flight *flight = lanes.flight;
    const bool moves = (in.kind == kMoveClass || in.kind == kElementClass) && !in.bytes;
    if (in.guard) await_operand(flight, { in.guard, 0 });
    if (in.counted && in.kind != kMoveClass && in.kind != kElementClass) flight->clock += kInstruction;
    if (!active) return;
    if (moves) return pass_on(flight, in);
    for (unsigned i = 0; i < in.count; i++) await_operand(flight, in.from[i]);
    for (unsigned i = 0; i < in.results; i++) {
        await_operand(flight, in.to[i]); /* as a GPU does before it overwrites a register */
        flight->owners[in.to[i].row] = 0;
    }
    if (in.traffic) move_data(flight, in, lanes, active);
}

/* ---- barriers ---- */

void watch_meeting(std::vector<Lanes> &warps, const BlockState *block) {
    double last = 0;
    for (const Lanes &lanes : warps)
        if (lanes.block == block && lanes.alive) last = std::max(last, lanes.flight->clock);
    for (Lanes &lanes : warps)
        if (lanes.block == block && lanes.alive) await_time(lanes.flight, last, &watched.stalled);
}

void watch_cluster_arrival(const Lanes &lanes, unsigned phase) {
    cluster_times[phase % 4] = std::max(cluster_times[phase % 4], lanes.flight->clock);
    cluster_times[(phase + 2) % 4] = 0; /* some may not have waited for the phase before this one */
}

void watch_cluster_wait(const Lanes &lanes, unsigned phase) {
    const double last = cluster_times[phase % 4];
    await_time(lanes.flight, last, &watched.stalled);
    await_time(lanes.flight, last + kClusterLatency, &watched.crossed);
}

/* ---- copies into shared memory ---- */

/* One load for all lanes of the instruction. */
void watch_copy(Lanes &lanes, uint64_t from, unsigned bytes, bool first) {
    static uint64_t last; /* the sector of the lane before */
    Flight *flight = lanes.flight;
    const double latency = !first && from / 32 == last ? kNearLatency : read_range(from, bytes);
    last = from / 32;
    if (first) {
        begin_load(flight, bytes, latency, flight->groups);
        return;
    }
    OnTheWay &load = flight->loads.back();
    load.bytes += bytes;
    load.ready = std::max(load.ready, flight->clock + latency);
    watched.loaded += bytes;
}

void watch_group(Lanes &lanes) {
    lanes.flight->groups++;
}

/* All groups but the latest ones, `left` of them. */
void watch_group_wait(Lanes &lanes, unsigned left) {
    Flight *flight = lanes.flight;
    for (size_t i = 0; i < flight->loads.size();) {
        const uint32_t group = flight->loads[i].group;
        if (group && group + left < flight->groups)
            await_load(flight, i);
        else
            i++;
    }
}

/* ---- mbarriers and bulk copies ---- */

static Awaited &awaited_at(const Lanes &lanes, const void *barrier) {
    return blocks[lanes.block->rank].barriers[barrier];
}

void watch_arrival(Lanes &lanes, const void *barrier) {
    Awaited &awaited = awaited_at(lanes, barrier);
    awaited.ready = std::max(awaited.ready, lanes.flight->clock);
}

void watch_bulk_load(Lanes &lanes, const void *barrier, uint64_t from, unsigned bytes) {
    Awaited &awaited = awaited_at(lanes, barrier);
    awaited.ready = std::max(awaited.ready, lanes.flight->clock + read_range(from, bytes));
    awaited.serial = ++blocks[lanes.block->rank].issued;
    awaited.bytes += bytes;
    watched.loaded += bytes;
}

/* The barrier is that of another block, or of this one. */
void watch_store_async(Lanes &lanes, const void *barrier) {
    const size_t rank = (size_t)(static_cast<const char *>(barrier) - arenas) / kArenaBytes;
    Awaited &awaited = blocks[rank].barriers[barrier];
    awaited.ready = std::max(awaited.ready, lanes.flight->clock + kRemoteLatency);
}

void watch_bulk_wait(Lanes &lanes, const void *barrier) {
    BlockFlight &block = blocks[lanes.block->rank];
    Awaited &awaited = block.barriers[barrier];
    await_time(lanes.flight, awaited.ready, &watched.waited);
    if (awaited.bytes && awaited.serial > block.waited_for) {
        double bytes = 0;
        for (const auto &entry : block.barriers) bytes += entry.second.bytes;
        count_wait(&watched.bulk, bytes);
        block.waited_for = block.issued;
    }
    awaited.bytes = 0;
}

void watch_bulk_store(uint64_t to, unsigned bytes) {
    for (uint64_t sector = to / 32; sector <= (to + bytes - 1) / 32; sector++) write_sector(sector);
}

} // namespace ptx
} // namespace emu
