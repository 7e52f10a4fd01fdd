/* Lanes of the PTX interpreter: which of them run, branches and calls, barriers, exchange in a warp. */
#include "ptx_flight.h"

#include <algorithm>
#include <limits.h>
#include <stdarg.h>

#include "exec.h"

namespace emu {
namespace ptx {

Module *running_module;
uint64_t counts[kClasses];

static const Function *kernel;
static std::vector<Lanes> warps; /* of the team */
static std::vector<uint64_t> registers;
static std::vector<char> frames;
static uint64_t events;          /* what may wake a thread */
static unsigned cluster_arrived; /* threads, in this phase of the cluster's barrier */
static unsigned cluster_phase;

/* A block's barrier: what its lanes have brought to this phase. */
struct Gathering {
    unsigned arrived, count; /* lanes, and those of them with a true predicate */
};
static std::vector<Gathering> gatherings; /* of the blocks */

void note_event() {
    events++;
}

void become(Lanes &lanes, unsigned lane) {
    Thread *next = &team.threads[lanes.first + lane];
    if (next == running) return;
    next->fiber = running->fiber;
    running->fiber = nullptr;
    running = next;
}

void fail(const Instruction &in, Lanes &lanes, unsigned lane, const char *format, ...) {
    char text[500];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    become(lanes, lane);
    kernel_failed("%s %s (%s:%d)", in.name, text, running_module->path.c_str(), in.line);
}

/* ---- which lanes run ---- */

/* The running lanes remember where they stand. */
static void park(Lanes &lanes) {
    for (unsigned left = lanes.mask; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        lanes.lane_pc[lane] = lanes.pc;
        lanes.lane_depth[lane] = lanes.depth;
    }
    lanes.mask = 0;
}

/* Of the lanes that can run: those of the innermost call at the lowest instruction. False: none can. */
static bool choose_lanes(Lanes &lanes) {
    int depth = -1, pc = INT_MAX, next = INT_MAX;
    unsigned chosen = 0;
    for (unsigned left = lanes.runnable; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        const int lane_pc = lanes.lane_pc[lane];
        if (lanes.lane_depth[lane] > depth) {
            depth = lanes.lane_depth[lane];
            pc = next = INT_MAX;
        }
        if (lanes.lane_depth[lane] < depth) continue;
        if (lane_pc < pc) {
            next = pc;
            pc = lane_pc;
            chosen = 0;
        }
        if (lane_pc == pc)
            chosen |= 1u << lane;
        else
            next = std::min(next, lane_pc);
    }
    lanes.mask = chosen;
    lanes.pc = pc;
    lanes.stop = next;
    lanes.depth = depth;
    return chosen != 0;
}

static inline unsigned guarded(const Instruction &in, const Lanes &lanes) {
    if (!in.guard) return lanes.mask;
    const unsigned mask = (unsigned)lanes.rows[0][(size_t)in.guard * kWarp];
    return lanes.mask & (in.guard_negated ? ~mask : mask);
}

/* Until no lane of the warp can go on. */
template <bool watched> static void run_warp(Lanes &lanes) {
    const Instruction *code = running_module->code.data();
    lanes.runnable |= lanes.looking;
    lanes.looking = 0;
    lanes.yields = false;
    while (!lanes.yields && choose_lanes(lanes)) {
        do {
            const Instruction &in = code[lanes.pc];
            const unsigned active = guarded(in, lanes);
            counts[in.kind] += in.counted;
            if (watched) watch(in, lanes, active);
            if (!active || !in.jumps) lanes.pc++;
            if (active) in.handler(in, lanes, active);
        } while (lanes.pc < lanes.stop);
        park(lanes);
    }
}

/* ---- branches and calls ---- */

/* Some of the running lanes go elsewhere; the other ones go on behind the instruction. Another choice follows. */
static void split(Lanes &lanes, unsigned leaving, int pc, int depth) {
    const unsigned staying = lanes.mask & ~leaving;
    for (unsigned left = leaving; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        lanes.lane_pc[lane] = pc;
        lanes.lane_depth[lane] = depth;
    }
    lanes.mask = staying;
    lanes.pc++;
    park(lanes);
    lanes.stop = 0;
}

void branch(const Instruction &in, Lanes &lanes, unsigned active) {
    if (active == lanes.mask)
        lanes.pc = in.target;
    else
        split(lanes, active, in.target, lanes.depth);
}

void call(const Instruction &in, Lanes &lanes, unsigned active) {
    if (lanes.depth == kMostCalls)
        fail(in, lanes, (unsigned)__builtin_ctz(active), "is the 17th call within another");
    for (unsigned left = active; left; left &= left - 1)
        lanes.returns[lanes.depth][__builtin_ctz(left)] = lanes.pc + 1;
    split(lanes, active, in.target, lanes.depth + 1);
}

static void end_lanes(Lanes &lanes, unsigned active) {
    for (unsigned left = active; left; left &= left - 1)
        bulk_end_thread(&team.threads[lanes.first + (unsigned)__builtin_ctz(left)]);
    lanes.alive &= ~active;
    lanes.runnable &= ~active;
    team.alive -= (unsigned)__builtin_popcount(active);
    note_event();
    split(lanes, active, 0, 0);
}

static void give_back(const Instruction &, Lanes &lanes, unsigned active) {
    if (lanes.depth == 0) return end_lanes(lanes, active);
    split(lanes, active, 0, lanes.depth - 1);
    for (unsigned left = active; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        lanes.lane_pc[lane] = lanes.returns[lanes.lane_depth[lane]][lane];
    }
}

static void leave(const Instruction &, Lanes &lanes, unsigned active) {
    end_lanes(lanes, active);
}

static void trap(const Instruction &in, Lanes &lanes, unsigned active) {
    fail(in, lanes, (unsigned)__builtin_ctz(active), "ends the kernel");
}

/* ---- barriers ---- */

/* The lanes wait at the instruction itself. */
static void wait_here(Lanes &lanes, unsigned active) {
    const int pc = lanes.pc;
    lanes.runnable &= ~active;
    split(lanes, active, pc, lanes.depth);
}

void look_again(const Instruction &in, Lanes &lanes, unsigned active) {
    counts[in.kind]--; /* it is one instruction that waits */
    if (lanes.flight) lanes.flight->clock -= kInstruction;
    lanes.looking |= active;
    wait_here(lanes, active);
}

enum BarrierKind { kPlainBarrier, kAnyBarrier, kAllBarrier, kCountBarrier };

/* What a lane gets from a barrier that collects predicates. */
static void give_result(const Instruction &in, Lanes &lanes, unsigned lane, const Gathering &gathering) {
    const unsigned bit = 1u << lane;
    if (in.mode == kAnyBarrier) set_predicate(lanes, in.to[0], bit, gathering.count ? bit : 0);
    if (in.mode == kAllBarrier)
        set_predicate(lanes, in.to[0], bit, gathering.count == gathering.arrived ? bit : 0);
    if (in.mode == kCountBarrier) lanes.row(in.to[0])[lane] = gathering.count;
}

/* The last one has arrived: all lanes of the block go on. The running ones have to be parked. */
static void open_barrier(const BlockState *block) {
    const Instruction *code = running_module->code.data();
    Gathering &gathering = gatherings[block->rank];
    if (warps[0].flight) watch_meeting(warps, block);
    for (Lanes &lanes : warps) {
        if (lanes.block != block) continue;
        for (unsigned left = lanes.alive; left; left &= left - 1) {
            const unsigned lane = (unsigned)__builtin_ctz(left);
            give_result(code[lanes.lane_pc[lane]], lanes, lane, gathering);
            lanes.lane_pc[lane]++;
        }
        lanes.runnable = lanes.alive;
    }
    gathering = { 0, 0 };
}

static void block_barrier(const Instruction &in, Lanes &lanes, unsigned active) {
    Gathering &gathering = gatherings[lanes.block->rank];
    const unsigned expected = (unsigned)(team.threads.size() / team.blocks.size());
    if (lanes.row(in.from[0])[0]) fail(in, lanes, (unsigned)__builtin_ctz(active), "is not barrier 0");
    gathering.arrived += (unsigned)__builtin_popcount(active);
    if (in.mode != kPlainBarrier) {
        const Operand &predicate = in.from[in.count - 1];
        gathering.count += (unsigned)__builtin_popcount(active & maybe_negated(in, lanes, predicate));
    }
    note_event();
    wait_here(lanes, active);
    if (gathering.arrived < expected) return;
    open_barrier(lanes.block);
    lanes.yields = true; /* the next phase begins in its own order */
}

static void cluster_arrive(const Instruction &, Lanes &lanes, unsigned active) {
    if (lanes.flight) watch_cluster_arrival(lanes, cluster_phase);
    each(active, [&](unsigned lane) { lanes.cluster_phase[lane] = cluster_phase; });
    cluster_arrived += (unsigned)__builtin_popcount(active);
    note_event();
    if (cluster_arrived < team.threads.size()) return;
    cluster_arrived = 0;
    cluster_phase++;
}

static void cluster_wait(const Instruction &in, Lanes &lanes, unsigned active) {
    unsigned passed = 0;
    each(active,
         [&](unsigned lane) { passed |= (unsigned)(lanes.cluster_phase[lane] != cluster_phase) << lane; });
    if (passed) note_event();
    if (passed && lanes.flight) watch_cluster_wait(lanes, cluster_phase - 1);
    if (passed == active)
        lanes.pc++;
    else
        look_again(in, lanes, active & ~passed);
}

/* ---- exchange in a warp ---- */

/* True when all lanes of the mask are here; `active` gets those that have waited here. Else the lanes wait. */
static bool gather(const Instruction &in, Lanes &lanes, unsigned *active, const Operand &members) {
    const unsigned first = (unsigned)__builtin_ctz(*active), mask = (unsigned)lanes.row(members)[first];
    if (*active & ~mask)
        fail(in, lanes, (unsigned)__builtin_ctz(*active & ~mask), "has mask 0x%08x without this lane", mask);
    if (mask & ~lanes.alive) fail(in, lanes, first, "has mask 0x%08x with lanes that are not there", mask);
    unsigned here = *active;
    for (unsigned left = mask & lanes.alive & ~lanes.runnable; left; left &= left - 1) {
        const unsigned lane = (unsigned)__builtin_ctz(left);
        if (lanes.lane_pc[lane] == lanes.pc && lanes.lane_depth[lane] == lanes.depth) here |= 1u << lane;
    }
    if (mask & ~here) {
        wait_here(lanes, *active);
        return false;
    }
    lanes.runnable |= here;
    lanes.mask |= here;
    *active = here;
    lanes.pc++;
    return true;
}

static const Operand &last_operand(const Instruction &in) {
    return in.from[in.count - 1];
}

static void warp_barrier(const Instruction &in, Lanes &lanes, unsigned active) {
    gather(in, lanes, &active, in.from[0]);
}

enum Shuffle { kShuffleUp, kShuffleDown, kShuffleXor, kShuffleIndex };

struct Source {
    unsigned lane;
    bool within; /* the segment */
};

/* As the PTX manual has it: `clamp` holds the last lane and, above it, the mask of the segment. */
static Source source_of(int how, unsigned lane, unsigned by, unsigned clamp) {
    const unsigned segment = clamp >> 8 & 31u, limit = clamp & 31u;
    const unsigned last = (lane & segment) | (limit & ~segment), delta = by & 31u;
    int source = how == kShuffleUp     ? (int)lane - (int)delta
                 : how == kShuffleDown ? (int)(lane + delta)
                 : how == kShuffleXor  ? (int)(lane ^ delta)
                                       : (int)((lane & segment) | (delta & ~segment));
    const bool within = how == kShuffleUp ? source >= (int)last : source <= (int)last;
    return { within ? (unsigned)source : lane, within };
}

static void shuffle(const Instruction &in, Lanes &lanes, unsigned active) {
    if (!gather(in, lanes, &active, last_operand(in))) return;
    uint64_t before[kWarp], *to = lanes.row(in.to[0]);
    memcpy(before, lanes.row(in.from[0]), sizeof before);
    const uint64_t *by = lanes.row(in.from[1]), *clamp = lanes.row(in.from[2]);
    unsigned within = 0;
    each(active, [&](unsigned lane) {
        const Source source = source_of(in.mode, lane, (unsigned)by[lane], (unsigned)clamp[lane]);
        if (!(active >> source.lane & 1))
            fail(in, lanes, lane, "reads lane %u, which is not here", source.lane);
        to[lane] = before[source.lane];
        within |= (unsigned)source.within << lane;
    });
    if (in.results > 1) set_predicate(lanes, in.to[1], active, within);
}

enum Vote { kVoteAny, kVoteAll, kVoteUniform, kVoteBallot };

static void vote(const Instruction &in, Lanes &lanes, unsigned active) {
    if (!gather(in, lanes, &active, last_operand(in))) return;
    const unsigned ballot = active & maybe_negated(in, lanes, in.from[0]);
    const bool all = ballot == active, none = ballot == 0;
    if (in.mode == kVoteBallot) {
        uint64_t *to = lanes.row(in.to[0]);
        each(active, [=](unsigned lane) { to[lane] = ballot; });
        return;
    }
    const bool result = in.mode == kVoteAny ? !none : in.mode == kVoteAll ? all : all || none;
    set_predicate(lanes, in.to[0], active, result ? kEveryLane : 0);
}

/* The lanes that have the same value; with `all`, every lane or none. */
static void match(const Instruction &in, Lanes &lanes, unsigned active) {
    if (!gather(in, lanes, &active, last_operand(in))) return;
    const bool wide = in.mode & 2, all = in.mode & 1;
    uint64_t value[kWarp], *to = lanes.row(in.to[0]);
    memcpy(value, lanes.row(in.from[0]), sizeof value);
    if (!wide) each(active, [&](unsigned lane) { value[lane] = (uint32_t)value[lane]; });
    unsigned equal = 0;
    each(active, [&](unsigned lane) {
        unsigned same = 0;
        each(active, [&](unsigned other) { same |= (unsigned)(value[other] == value[lane]) << other; });
        if (same == active) equal |= 1u << lane;
        to[lane] = !all || same == active ? same : 0;
    });
    if (in.results > 1) set_predicate(lanes, in.to[1], active, equal);
}

enum Reduction { kSum, kLeast, kMost, kSignedLeast, kSignedMost, kBitAnd, kBitOr, kBitXor };

static uint32_t reduced(int how, uint32_t a, uint32_t b) {
    switch (how) {
    case kSum: return a + b;
    case kLeast: return std::min(a, b);
    case kMost: return std::max(a, b);
    case kSignedLeast: return (uint32_t)std::min((int32_t)a, (int32_t)b);
    case kSignedMost: return (uint32_t)std::max((int32_t)a, (int32_t)b);
    case kBitAnd: return a & b;
    case kBitOr: return a | b;
    default: return a ^ b;
    }
}

static void reduce(const Instruction &in, Lanes &lanes, unsigned active) {
    if (!gather(in, lanes, &active, last_operand(in))) return;
    const uint64_t *from = lanes.row(in.from[0]);
    const unsigned first = (unsigned)__builtin_ctz(active);
    uint32_t result = (uint32_t)from[first];
    each(active & ~(1u << first),
         [&](unsigned lane) { result = reduced(in.mode, result, (uint32_t)from[lane]); });
    uint64_t *to = lanes.row(in.to[0]);
    each(active, [=](unsigned lane) { to[lane] = result; });
}

static void active_mask(const Instruction &in, Lanes &lanes, unsigned active) {
    uint64_t *to = lanes.row(in.to[0]);
    each(active, [=](unsigned lane) { to[lane] = active; });
}

static void nothing(const Instruction &, Lanes &, unsigned) {}

/* ---- decoding ---- */

static void decode_bar(Statement &statement, Instruction *in) {
    in->kind = kExchangeClass;
    in->jumps = true;
    statement.take("aligned");
    if (statement.take("cluster")) {
        statement.take("release");
        statement.take("acquire");
        statement.take("relaxed");
        in->jumps = statement.take("wait");
        in->handler = in->jumps ? cluster_wait : statement.take("arrive") ? cluster_arrive : nullptr;
        return;
    }
    if (statement.take("warp")) {
        statement.take("sync");
        statement.operands(in, 0);
        in->handler = warp_barrier;
        return;
    }
    const bool reduces = statement.take("red");
    if (!reduces && !statement.take("sync")) throw Unknown{ "barrier" };
    in->handler = block_barrier;
    if (reduces) {
        in->mode = statement.take("or") ? kAnyBarrier : statement.take("and") ? kAllBarrier : kCountBarrier;
        statement.take("popc");
        statement.take_type();
    }
    statement.operands(in, reduces ? 1 : 0);
    const Operand &number = in->from[0];
    if (in->count != (reduces ? 2 : 1) || !number.constant) throw Unknown{ "number of threads at a barrier" };
}

static int take_one_of(Statement *statement, std::initializer_list<const char *> words) {
    int index = 0;
    for (const char *word : words) {
        if (statement->take(word)) return index;
        index++;
    }
    throw Unknown{ "kind" };
}

static int take_reduction(Statement *statement) {
    const int how = take_one_of(statement, { "add", "min", "max", "and", "or", "xor" });
    const Type type = statement->take_type();
    if (how == 0) return kSum;
    if (how > 2) return kBitAnd + how - 3;
    return type == kS32 ? (how == 1 ? kSignedLeast : kSignedMost) : how == 1 ? kLeast : kMost;
}

static void decode_exchange(Statement &statement, Instruction *in) {
    const std::string &opcode = statement.opcode;
    in->kind = kExchangeClass;
    in->jumps = true;
    if (!statement.take("sync")) throw Unknown{ "form without .sync" };
    if (opcode == "shfl") {
        in->handler = shuffle;
        in->mode = (uint8_t)take_one_of(&statement, { "up", "down", "bfly", "idx" });
    } else if (opcode == "vote") {
        in->handler = vote;
        in->mode = (uint8_t)take_one_of(&statement, { "any", "all", "uni", "ballot" });
    } else if (opcode == "match") {
        in->handler = match;
        in->mode = (uint8_t)take_one_of(&statement, { "any", "all" });
        if (statement.has("b64")) in->mode |= 2;
    } else {
        in->handler = reduce;
        in->mode = (uint8_t)take_reduction(&statement);
    }
    statement.take_type();
    statement.operands(in, 1);
}

bool decode_control(Statement &statement, Instruction *in) {
    const std::string &opcode = statement.opcode;
    if (opcode == "ret" || opcode == "exit" || opcode == "trap") {
        statement.take("uni");
        in->kind = kControlClass;
        in->jumps = true;
        in->handler = opcode == "ret" ? give_back : opcode == "exit" ? leave : trap;
    } else if (opcode == "bar" || opcode == "barrier") {
        decode_bar(statement, in);
    } else if (opcode == "shfl" || opcode == "vote" || opcode == "match" || opcode == "redux") {
        decode_exchange(statement, in);
    } else if (opcode == "activemask") {
        statement.take_type();
        statement.operands(in, 1);
        in->handler = active_mask;
        in->kind = kExchangeClass;
    } else if (opcode == "nanosleep" || opcode == "prefetch" || opcode == "prefetchu") {
        statement.suffixes.clear();
        in->handler = nothing;
        in->kind = kControlClass;
    } else {
        return false;
    }
    return true;
}

/* ---- a team ---- */

static void fill(Lanes &lanes, SpecialRow row, uint64_t value) {
    std::fill_n(lanes.rows[0] + (size_t)row * kWarp, kWarp, value);
}

/* What is the same in every block. */
static void fill_lanes(Lanes &lanes, const Launch &launch) {
    for (unsigned lane = 0; lane < kWarp; lane++) {
        const uint3 index =
            lanes.alive >> lane & 1 ? team.threads[lanes.first + lane].index : uint3{ 0, 0, 0 };
        uint64_t *rows = lanes.rows[0] + lane;
        rows[kTidX * kWarp] = index.x;
        rows[kTidY * kWarp] = index.y;
        rows[kTidZ * kWarp] = index.z;
        rows[kLane * kWarp] = lane;
        rows[kMaskEq * kWarp] = 1u << lane;
        rows[kMaskLt * kWarp] = (1u << lane) - 1;
        rows[kMaskLe * kWarp] = (2u << lane) - 1;
        rows[kMaskGt * kWarp] = ~((2u << lane) - 1);
        rows[kMaskGe * kWarp] = ~((1u << lane) - 1);
    }
    fill(lanes, kBlockDimX, launch.block.x);
    fill(lanes, kBlockDimY, launch.block.y);
    fill(lanes, kBlockDimZ, launch.block.z);
    fill(lanes, kGridX, launch.grid.x);
    fill(lanes, kGridY, launch.grid.y);
    fill(lanes, kGridZ, launch.grid.z);
    fill(lanes, kWarpIndex, lanes.index);
    fill(lanes, kClusterRank, lanes.block->rank);
    fill(lanes, kClusterSize, team.blocks.size());
    fill(lanes, kDynamicBytes, launch.dynamic_bytes);
    fill(lanes, kZero, 0);
    fill(lanes, kSharedBase, lanes.block->rank * kArenaBytes);
    fill(lanes, kDynamicBase, lanes.block->rank * kArenaBytes + dynamic_offset(kernel));
}

static void make_warps(const Launch &launch) {
    const size_t rows = (size_t)kernel->rows * kWarp, frame = (kernel->frame_bytes + 63) / 64 * 64;
    if (registers.size() < rows * team.warps.size()) registers.resize(rows * team.warps.size(), ~(uint64_t)0);
    if (frames.size() < frame * kWarp * team.warps.size() + 64)
        frames.resize(frame * kWarp * team.warps.size() + 64, (char)kFresh);
    warps.resize(team.warps.size());
    char *aligned = frames.data() + (64 - (uintptr_t)frames.data() % 64) % 64;
    const unsigned per_block = (unsigned)(team.warps.size() / team.blocks.size());
    for (size_t w = 0; w < warps.size(); w++) {
        Lanes &lanes = warps[w];
        lanes.rows[0] = registers.data() + w * rows;
        lanes.rows[1] = running_module->constants.data();
        lanes.frames = aligned + w * frame * kWarp;
        lanes.frame_bytes = frame;
        lanes.block = team.warps[w].block;
        lanes.first = team.warps[w].first;
        lanes.index = (unsigned)w % per_block;
        lanes.alive = team.warps[w].exists;
        lanes.flight = flights_wanted() ? flight_of(w) : nullptr;
        fill_lanes(lanes, launch);
    }
}

void begin_grid(const Function *function, const Launch &launch) {
    running_module = function->module;
    kernel = function;
    std::fill(counts, counts + kClasses, 0);
    flights_begin_grid(launch, function->rows);
    make_warps(launch);
}

static void begin_warp(Lanes &lanes, unsigned exists) {
    lanes.alive = lanes.runnable = exists;
    lanes.mask = lanes.looking = 0;
    for (unsigned lane = 0; lane < kWarp; lane++) {
        lanes.lane_pc[lane] = kernel->first;
        lanes.lane_depth[lane] = 0;
    }
    fill(lanes, kBlockX, lanes.block->index.x);
    fill(lanes, kBlockY, lanes.block->index.y);
    fill(lanes, kBlockZ, lanes.block->index.z);
}

/* For the report of a deadlock: where each thread stands. */
static void note_waits() {
    for (const Lanes &lanes : warps)
        for (unsigned left = lanes.alive; left; left &= left - 1) {
            const unsigned lane = (unsigned)__builtin_ctz(left);
            const Instruction &in = running_module->code[(size_t)lanes.lane_pc[lane]];
            Thread &thread = team.threads[lanes.first + lane];
            thread.waits_for = in.name;
            thread.file = running_module->path.c_str();
            thread.line = in.line;
        }
}

void run_team() {
    gatherings.assign(team.blocks.size(), Gathering{ 0, 0 });
    cluster_arrived = cluster_phase = 0;
    const bool watched = flights_wanted();
    if (watched) flights_begin_team();
    for (size_t w = 0; w < warps.size(); w++) begin_warp(warps[w], team.warps[w].exists);
    for (uint64_t before = events - 1; team.alive && before != events;) {
        before = events;
        for (const unsigned w : phase_order(warps.size()))
            if (warps[w].runnable | warps[w].looking) watched ? run_warp<true>(warps[w]) : run_warp<false>(warps[w]);
    }
    if (watched) flights_end_team();
    if (team.alive) note_waits();
}

} // namespace ptx
} // namespace emu
