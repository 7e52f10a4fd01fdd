/* The executor's state, shared with the checker and the bulk copies. Private to tests/emu. */
#ifndef EMU_EXEC_H
#define EMU_EXEC_H

#include "emu.h"
#include "fiber.h"

namespace emu {

const unsigned kMaxClusterBlocks = 16;
/* Shared memory of one block: 227 KiB, red zones, and in PTX the variables of other kernels. */
const size_t kArenaBytes = 512 << 10;
const size_t kRedZone = 64;
const size_t kDynamicOffset = 128; /* after the first red zone, aligned for bulk copies */
const size_t kMaxShared = 227 << 10, kDefaultShared = 48 << 10;

/* A group of threads that meet. All of them arrive before the first leaves. */
struct Barrier {
    unsigned arrived, expected;
    unsigned passed; /* number of completions */
    emu_block_op op;
    const char *file;
    int line, accumulated, result;
};

struct BlockState {
    uint3 index;
    uint64_t linear;
    unsigned rank; /* within the cluster */
    char *arena;
    Barrier barrier;
};

struct Slot { /* a lane's input of a warp operation, beside its value */
    const char *file;
    int line, parameter, width;
    unsigned mask;
    emu_warp_op op;
};

struct Warp {
    BlockState *block;
    unsigned first;                         /* its first thread, in the team */
    unsigned exists, ready, waiting, ended; /* lanes, one bit each */
    unsigned syncs;                         /* number of __syncwarp so far */
    bool queued;
    uint64_t value[32]; /* the inputs of the lanes, then their results */
    Slot slot[32];
};

struct BulkStore {
    char *to;
    const char *from;
    unsigned bytes, group;
};

struct Thread {
    Fiber *fiber; /* NULL before the start and after the end */
    Warp *warp;
    uint3 index;
    unsigned lane, linear; /* in the warp; in the block */
    const char *waits_for; /* for the report of a deadlock */
    const char *file;
    int line;
    unsigned groups; /* of bulk stores, committed */
    unsigned cluster_phase; /* of the cluster's barrier, at this thread's last arrival */
    std::vector<BulkStore> stores;
};

/* The blocks of one cluster, which run together; usually a single block. */
struct Team {
    const Launch *launch;
    uint64_t serial; /* of the launch */
    std::vector<BlockState> blocks;
    std::vector<Warp> warps;
    std::vector<Thread> threads;
    Barrier cluster_barrier;
    unsigned alive;
    bool failed;
};

extern Team team;
extern __thread Thread *running; /* NULL in host code */
extern char *arenas;             /* kMaxClusterBlocks of them, one after another */

/* The name of the running kernel. */
std::string running_kernel();
/* The numbers below `count` in the order of this run, for warps of a phase. */
const std::vector<unsigned> &phase_order(size_t count);

/* Lets other threads run; returns when this one has been made ready again. */
void wait_as(const char *what, const char *file, int line);
void make_ready(Thread *thread);
/* Makes ready all threads that wait in wait_as() under this name. */
void wake_all(const char *what);

/* Reports with block and thread, then ends the kernel. */
[[noreturn]] void kernel_failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same without ending it. */
void kernel_report(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string where(const Thread &thread);

/* ---- shared memory (shared.cpp) ---- */

void shared_map(); /* before the first team */
void shared_begin_launch(size_t dynamic_bytes);
/* A variable of every block at this offset, behind all that were declared before. */
void shared_declare(size_t offset, size_t bytes, const char *name);
void shared_begin_block(unsigned rank);
void shared_end_block(unsigned rank); /* checks the red zones */
void shared_end_launch();
inline bool in_arenas(const void *address) {
    return (size_t)(static_cast<const char *>(address) - arenas) < kMaxClusterBlocks * kArenaBytes;
}
/* The declared variable of some arena that contains the bytes; false: a red zone or beyond. */
bool shared_holds(const void *address, size_t bytes);
/* The declared variable around the address; false: there is none. */
bool shared_range(const void *address, const char **begin, size_t *bytes);
std::string shared_describe(const void *address);

/* ---- bulk copies (bulk.cpp) ---- */

void bulk_begin_team();
/* Whether the phase of this parity is complete, after the copies that it waits for. */
bool mbarrier_passed(uint64_t *barrier, unsigned parity, const char *file, int line);
/* Whether it waits for a copy that never arrives. */
bool mbarrier_lost(const uint64_t *barrier);
void bulk_end_thread(Thread *thread); /* executes what was not waited for */

/* ---- access checker (check.cpp) ---- */

void check_begin_launch(const Launch &launch);
void check_begin_team();
void check_end_launch();
void check_fence();
/* An access that no callback sees: atomics, bulk copies. */
void check_access(const void *address, size_t bytes, bool write, bool atomic);
/* A bulk load has arrived in shared memory. */
void check_bulk_written(const void *address, size_t bytes);

} // namespace emu

#endif
