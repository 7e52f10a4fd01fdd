/* What the report of the PTX interpreter knows of memory: bytes that are on their way while a warp waits, bytes that pass between
 * a GPU's memory and its L2, and a clock that says what a warp waits for. Nothing here runs unless a report is asked for.
 *
 * A load into registers is on its way until the first instruction, other than a move, that reads a destination; a cp.async until
 * its group is waited for; a bulk copy until its mbarrier is. A wait counts when its load was issued after the wait before it: the
 * loads that were on their way then have come with it. */
#ifndef EMU_PTX_FLIGHT_H
#define EMU_PTX_FLIGHT_H

#include <unordered_map>

#include "ptx.h"

namespace emu {
namespace ptx {

/* The clock, in ns: what docs/performance.md has fitted. A lone warp issues an instruction every (1 + 3.5) cycles of 1.98 GHz. */
const double kInstruction = 4.5 / 1.98, kLatency = 700.0, kNearLatency = 300.0, kClusterLatency = 1000.0;
/* Of a store into another block of the cluster: taken as a hit of L2, which published measurements find slower. */
const double kRemoteLatency = 300.0;
/* Sectors of 32 bytes that a block finds in L2 again: its part of 50 MB among 132 multiprocessors with three blocks each. */
const uint64_t kNearSectors = 4096;

/* Waits for memory: how many, the bytes on their way then, and the squares of these. */
struct Waits {
    uint64_t count = 0;
    double bytes = 0, squares = 0;
};

struct Watched {
    uint64_t blocks = 0, warps = 0, threads = 0, dynamic = 0; /* threads and dynamic shared memory: of a block, the most */
    uint64_t loaded = 0, read = 0, again = 0, written = 0;   /* bytes: by loads; from memory; those read before; to memory */
    Waits waits, bulk;                                      /* of warps, and of blocks for bulk copies */
    double waited = 0, stalled = 0, crossed = 0;            /* ns: of warps for memory, for other warps, for the cluster's barrier */
    double path = 0;                                        /* ns: of blocks from end to end */
};

struct OnTheWay {
    uint32_t serial, group; /* group: of cp.async, else 0 */
    uint32_t bytes;
    double ready;
};

/* A warp's. */
struct Flight {
    std::vector<uint32_t> owners; /* by row of registers: the load that writes it; 0: none */
    std::vector<OnTheWay> loads;
    uint32_t issued = 0, waited_for = 0, groups = 1;
    double clock = 0;
};

/* Whether a report is asked for (EMU_PTX_REPORT); only then is anything below called in this grid. */
bool flights_begin_grid(const Launch &launch, uint32_t rows);
bool flights_wanted();
Flight *flight_of(size_t warp);
void flights_begin_team();
void flights_end_team();
const Watched &flights_of_grid();

/* Before an instruction runs for these lanes; with none, it is issued only. */
void watch(const Instruction &in, Lanes &lanes, unsigned active);
/* A barrier opens: its warps go on together. */
void watch_meeting(std::vector<Lanes> &warps, const BlockState *block);
void watch_cluster_arrival(const Lanes &lanes, unsigned phase);
void watch_cluster_wait(const Lanes &lanes, unsigned phase);
void watch_copy(Lanes &lanes, uint64_t from, unsigned bytes, bool first);
void watch_group(Lanes &lanes);
void watch_group_wait(Lanes &lanes, unsigned left);
void watch_arrival(Lanes &lanes, const void *barrier);
void watch_bulk_load(Lanes &lanes, const void *barrier, uint64_t from, unsigned bytes);
void watch_store_async(Lanes &lanes, const void *barrier);
void watch_bulk_wait(Lanes &lanes, const void *barrier);
void watch_bulk_store(uint64_t to, unsigned bytes);

} // namespace ptx
} // namespace emu

#endif
