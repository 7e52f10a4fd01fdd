/* Communicators and groups. A call becomes a part of an item on its stream. When the item is first in its stream its parts are
 * posted; the last rank to post a collective executes it for all. A send waits for its receive. */
#include "collective.h"

#include <algorithm>
#include <deque>
#include <set>
#include <stdarg.h>

namespace emu {

struct Split { /* one call of ncclCommSplit by all ranks */
    std::vector<int> colors, keys;
    std::vector<std::shared_ptr<struct Comm>> results;
    int arrived = 0;
};

/* What the ranks of one communicator share. */
struct Group {
    int size = 0, joined = 0;
    std::vector<bool> taken;                                           /* ranks that have joined */
    std::vector<std::deque<Part *>> collectives;                       /* posted, by rank */
    std::map<std::pair<int, int>, std::deque<Part *>> sends, receives; /* by (from, to) */
    std::vector<std::shared_ptr<Split>> splits;                        /* by the number of the call */
};

struct Comm {
    std::shared_ptr<Group> group; /* NULL until the split that makes it is complete */
    int rank = -1, device = 0;
    bool blocking = true, aborted = false;
    ncclResult_t async = ncclSuccess;
    size_t splits = 0; /* calls so far */
    int pending = 0;   /* items not done */
};

} // namespace emu

struct ncclComm {
    std::shared_ptr<emu::Comm> state;
};

namespace emu {

struct CommPart {
    std::shared_ptr<Comm> comm;
    Part part;
};

struct GroupCall { /* collected between ncclGroupStart and ncclGroupEnd */
    std::vector<std::pair<std::shared_ptr<Stream>, std::vector<CommPart>>> by_stream;
    std::vector<std::shared_ptr<Comm>> joining; /* to be completed at the end of the group */
    ncclResult_t error = ncclSuccess;
};

static std::map<std::string, std::shared_ptr<Group>> groups_by_id;
static std::set<ncclComm_t> handles;
static __thread int group_depth;
static thread_local GroupCall group_call;
static thread_local std::string last_error;
static uint64_t unique_ids;

static ncclResult_t fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));

static ncclResult_t fail(ncclResult_t result, const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    last_error = text;
    report("%s", text);
    return result;
}

/* NULL, after a report, when the handle is not alive. */
static std::shared_ptr<Comm> resolve_comm(ncclComm_t handle, const char *function) {
    if (handles.count(handle)) return handle->state;
    fail(ncclInvalidArgument, "%s: %p is no communicator, or was destroyed", function, (void *)handle);
    return nullptr;
}

static bool complete(const Comm &comm) {
    return comm.group && comm.group->joined == comm.group->size;
}

/* ---- carrying out ---- */

static bool same_call(const Part &a, const Part &b) {
    const bool rooted = a.kind == kReduce || a.kind == kBroadcast || a.kind == kGather || a.kind == kScatter;
    const bool reduces = a.kind <= kReduceScatter;
    return a.kind == b.kind && a.type == b.type && a.count == b.count && (!rooted || a.root == b.root) &&
           (!reduces || a.op == b.op);
}

static std::string text_of(const Part &p) {
    char text[160];
    snprintf(text, sizeof text, "%s of %zu elements, type %d, op %d, root %d on rank %d",
             collective_name(p.kind), p.count, (int)p.type, (int)p.op, p.root, p.rank);
    return text;
}

static void perform_ready_collectives(Group &group) {
    for (;;) {
        std::vector<Part *> parts;
        for (auto &posted : group.collectives)
            if (!posted.empty()) parts.push_back(posted.front());
        if ((int)parts.size() < group.size) return;
        bool agree = true;
        for (const Part *part : parts) {
            if (same_call(*parts[0], *part)) continue;
            report("ranks do not agree: %s; %s", text_of(*parts[0]).c_str(), text_of(*part).c_str());
            agree = false;
            break;
        }
        if (agree) perform_collective(parts);
        for (Part *part : parts) part->done = true;
        for (auto &posted : group.collectives) posted.pop_front();
        note_progress();
    }
}

static void perform_ready_pairs(Group &group, std::pair<int, int> way) {
    std::deque<Part *> &sends = group.sends[way], &receives = group.receives[way];
    while (!sends.empty() && !receives.empty()) {
        Part *send = sends.front(), *receive = receives.front();
        if (send->count != receive->count || type_bytes(send->type) != type_bytes(receive->type))
            report("send and receive do not agree: %s; %s", text_of(*send).c_str(),
                   text_of(*receive).c_str());
        else
            perform_pair(*send, *receive);
        send->done = receive->done = true;
        sends.pop_front();
        receives.pop_front();
        note_progress();
    }
}

static void post(Group &group, Part *part) {
    if (part->kind < kSend) {
        group.collectives[(size_t)part->rank].push_back(part);
        perform_ready_collectives(group);
        return;
    }
    const std::pair<int, int> way =
        part->kind == kSend ? std::make_pair(part->rank, part->root) : std::make_pair(part->root, part->rank);
    (part->kind == kSend ? group.sends : group.receives)[way].push_back(part);
    perform_ready_pairs(group, way);
}

static void withdraw(std::deque<Part *> &posted, const Part *part) {
    posted.erase(std::remove(posted.begin(), posted.end(), part), posted.end());
}

/* Withdraws what an aborted rank has posted: its item ends, its peers go on waiting. */
static void withdraw_part(Group &group, const Part *part) {
    for (auto &posted : group.collectives) withdraw(posted, part);
    for (auto &entry : group.sends) withdraw(entry.second, part);
    for (auto &entry : group.receives) withdraw(entry.second, part);
}

/* The parts of one rank thread on one stream, in an item. */
struct Parts {
    std::vector<CommPart> parts;
    bool posted = false;
    explicit Parts(const std::vector<CommPart> &p) : parts(p) {}
};

static bool step_parts(Parts &item) {
    if (!item.posted) {
        item.posted = true;
        for (CommPart &p : item.parts)
            if (!p.comm->aborted && p.comm->async == ncclSuccess) post(*p.comm->group, &p.part);
        note_progress();
    }
    for (CommPart &p : item.parts) {
        if (p.part.done) continue;
        if (!p.comm->aborted) return false;
        withdraw_part(*p.comm->group, &p.part);
        p.part.done = true;
    }
    for (CommPart &p : item.parts) p.comm->pending--;
    return true;
}

static ncclResult_t submit_parts(const std::shared_ptr<Stream> &stream, const std::vector<CommPart> &parts) {
    const cudaError_t submitted = submit_fresh(stream, [parts] {
        const auto item = std::make_shared<Parts>(parts);
        for (const CommPart &p : parts) p.comm->pending++;
        return [item] { return step_parts(*item); };
    });
    if (submitted) last_error = cudaGetErrorName(submitted);
    return submitted ? ncclUnhandledCudaError : ncclSuccess;
}

/* ---- the checks of a call ---- */

static ncclResult_t check_buffer(const Comm &comm, const Part &part, const void *buffer, size_t elements,
                                 const char *which) {
    const size_t bytes = elements * type_bytes(part.type);
    if (bytes == 0) return ncclSuccess;
    const char *name = collective_name(part.kind), *at = static_cast<const char *>(buffer);
    const Block *block = find_block(buffer);
    if (!block || block->device < 0)
        return fail(ncclInvalidArgument, "%s on rank %d: the %s buffer is no device memory: %s", name,
                    comm.rank, which, describe(buffer).c_str());
    if (block->device != comm.device)
        return fail(ncclInvalidArgument,
                    "%s on rank %d: the %s buffer is on device %d, the communicator on device %d", name,
                    comm.rank, which, block->device, comm.device);
    if (at + bytes > block->base + block->bytes)
        return fail(ncclInvalidArgument, "%s on rank %d: the %s buffer is too short: %zu bytes at %s", name,
                    comm.rank, which, bytes, describe(buffer).c_str());
    return ncclSuccess;
}

/* Buffers may coincide as NCCL's rules for in-place calls say, but not overlap otherwise. */
static ncclResult_t check_overlap(const Comm &comm, const Part &part, int ranks) {
    const size_t size = type_bytes(part.type) * part.count;
    const size_t send_bytes = size * send_factor(part, ranks), recv_bytes = size * recv_factor(part, ranks);
    if (!send_bytes || !recv_bytes || part.send + send_bytes <= part.recv ||
        part.recv + recv_bytes <= part.send)
        return ncclSuccess;
    const char *in_place = part.recv;
    if (part.kind == kAllGather || part.kind == kGather) in_place = part.recv + (size_t)comm.rank * size;
    if (part.kind == kReduceScatter || part.kind == kScatter) in_place = part.recv - (size_t)comm.rank * size;
    if (part.send == in_place && part.kind != kAlltoAll) return ncclSuccess;
    return fail(ncclInvalidUsage, "%s on rank %d: the buffers overlap other than in place",
                collective_name(part.kind), comm.rank);
}

static ncclResult_t check_part(const Comm &comm, const Part &part) {
    const char *name = collective_name(part.kind);
    if (!complete(comm)) return fail(ncclInvalidUsage, "%s: the communicator is not ready", name);
    const int ranks = comm.group->size;
    if (!type_bytes(part.type)) return fail(ncclInvalidArgument, "%s: type %d", name, (int)part.type);
    if ((int)part.op < 0 || part.op >= ncclNumOps)
        return fail(ncclInvalidArgument, "%s: op %d", name, (int)part.op);
    if (part.root < 0 || part.root >= ranks)
        return fail(ncclInvalidArgument, "%s: rank %d of a communicator of %d", name, part.root, ranks);
    ncclResult_t result = check_buffer(comm, part, part.send, part.count * send_factor(part, ranks), "send");
    if (!result)
        result = check_buffer(comm, part, part.recv, part.count * recv_factor(part, ranks), "receive");
    return result ? result : check_overlap(comm, part, ranks);
}

static ncclResult_t enqueue(ncclComm_t handle, cudaStream_t stream_handle, Part part) {
    const char *name = collective_name(part.kind);
    if (injected_fault()) return ncclUnhandledCudaError;
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, name);
    const std::shared_ptr<Stream> stream = resolve(stream_handle, name);
    if (!comm || !stream) return group_call.error = ncclInvalidArgument;
    part.rank = comm->rank;
    const ncclResult_t checked = check_part(*comm, part);
    if (checked) return group_call.error = checked;
    if (device_of(*stream) != comm->device)
        return group_call.error =
                   fail(ncclInvalidUsage, "%s: the stream is of device %d, the communicator of device %d",
                        name, device_of(*stream), comm->device);
    if (part.count == 0) return ncclSuccess;
    if (group_depth == 0) return submit_parts(stream, { CommPart{ comm, part } });
    for (auto &entry : group_call.by_stream) {
        if (entry.first != stream) continue;
        entry.second.push_back({ comm, part });
        return ncclSuccess;
    }
    group_call.by_stream.push_back({ stream, { CommPart{ comm, part } } });
    return ncclSuccess;
}

static ncclResult_t call(ncclComm_t comm, cudaStream_t stream, Collective kind, const void *send, void *recv,
                         size_t count, ncclDataType_t type, ncclRedOp_t op, int root) {
    return enqueue(comm, stream,
                   Part{ kind, type, op, root, count, static_cast<const char *>(send),
                         static_cast<char *>(recv), 0, false });
}

/* ---- making communicators ---- */

static ncclComm_t new_handle(const std::shared_ptr<Comm> &comm) {
    ncclComm_t handle = new ncclComm{ comm };
    handles.insert(handle);
    count_handle(kCommunicator, 1);
    return handle;
}

static std::shared_ptr<Comm> new_comm(const ncclConfig_t *config) {
    const auto comm = std::make_shared<Comm>();
    comm->device = current_device;
    comm->blocking = !config || config->blocking != 0;
    return comm;
}

/* What a call that makes a communicator returns: it waits, or defers that to the end of the group, or to
 * polling. */
static ncclResult_t await(Lock &lock, const std::shared_ptr<Comm> &comm, const char *function) {
    note_progress();
    if (group_depth > 0) {
        group_call.joining.push_back(comm);
        return ncclSuccess;
    }
    if (!comm->blocking) return complete(*comm) ? ncclSuccess : ncclInProgress;
    return wait_until(
               lock, [&] { return complete(*comm) || comm->aborted; }, function)
               ? ncclSuccess
               : ncclSystemError;
}

static void join(const std::shared_ptr<Group> &group, const std::shared_ptr<Comm> &comm, int rank) {
    comm->group = group;
    comm->rank = rank;
    group->taken[(size_t)rank] = true;
    group->joined++;
}

static std::shared_ptr<Group> new_group(int size) {
    const auto group = std::make_shared<Group>();
    group->size = size;
    group->collectives.resize((size_t)size);
    group->taken.resize((size_t)size);
    return group;
}

/* All ranks have called: makes one communicator for each color, ranks by key and then by old rank. */
static void complete_split(const Split &split) {
    std::map<int, std::vector<std::pair<int, size_t>>> members;
    for (size_t r = 0; r < split.colors.size(); r++)
        if (split.colors[r] != NCCL_SPLIT_NOCOLOR) members[split.colors[r]].push_back({ split.keys[r], r });
    for (auto &entry : members) {
        std::sort(entry.second.begin(), entry.second.end());
        const std::shared_ptr<Group> group = new_group((int)entry.second.size());
        for (size_t i = 0; i < entry.second.size(); i++)
            join(group, split.results[entry.second[i].second], (int)i);
    }
}

} // namespace emu

using namespace emu;

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (injected_fault()) return ncclSystemError;
    Lock lock(big_lock);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "emulated communicator %llu",
             (unsigned long long)++unique_ids);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *handle, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (injected_fault()) return ncclSystemError;
    if (sealed("ncclCommInitRank")) return ncclInvalidUsage;
    Lock lock(big_lock);
    if (config && config->magic != EMU_NCCL_MAGIC)
        return fail(ncclInvalidArgument, "ncclCommInitRank: bad config");
    if (!handle || ranks < 1 || rank < 0 || rank >= ranks)
        return fail(ncclInvalidArgument, "ncclCommInitRank: rank %d of %d", rank, ranks);
    const std::string key(id.internal, sizeof id.internal);
    std::shared_ptr<Group> &group = groups_by_id[key];
    if (!group) group = new_group(ranks);
    if (group->size != ranks)
        return fail(ncclInvalidUsage, "ncclCommInitRank: rank %d says %d ranks, others %d", rank, ranks,
                    group->size);
    if (group->taken[(size_t)rank])
        return fail(ncclInvalidUsage, "ncclCommInitRank: rank %d joins twice", rank);
    const std::shared_ptr<Comm> comm = new_comm(config);
    join(group, comm, rank);
    if (group->joined == ranks) groups_by_id.erase(key);
    *handle = new_handle(comm);
    return await(lock, comm, "ncclCommInitRank");
}

ncclResult_t ncclCommInitRank(ncclComm_t *handle, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(handle, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int devices, const int *list) {
    if (injected_fault()) return ncclSystemError;
    if (sealed("ncclCommInitAll")) return ncclInvalidUsage;
    Lock lock(big_lock);
    if (!comms || devices < 1) return fail(ncclInvalidArgument, "ncclCommInitAll: %d devices", devices);
    const std::shared_ptr<Group> group = new_group(devices);
    for (int d = 0; d < devices; d++) {
        const std::shared_ptr<Comm> comm = new_comm(nullptr);
        comm->device = list ? list[d] : d;
        join(group, comm, d);
        comms[d] = new_handle(comm);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t *result, ncclConfig_t *config) {
    if (injected_fault()) return ncclSystemError;
    if (sealed("ncclCommSplit")) return ncclInvalidUsage;
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommSplit");
    if (!comm || !complete(*comm)) return ncclInvalidUsage;
    Group &group = *comm->group;
    if (comm->splits == group.splits.size()) group.splits.push_back(std::make_shared<Split>());
    const std::shared_ptr<Split> split = group.splits[comm->splits++];
    split->colors.resize((size_t)group.size);
    split->keys.resize((size_t)group.size);
    split->results.resize((size_t)group.size);
    const std::shared_ptr<Comm> made = new_comm(config);
    made->device = comm->device;
    if (!config) made->blocking = comm->blocking;
    split->colors[(size_t)comm->rank] = color;
    split->keys[(size_t)comm->rank] = key;
    split->results[(size_t)comm->rank] = made;
    if (++split->arrived == group.size) complete_split(*split);
    *result = color == NCCL_SPLIT_NOCOLOR ? nullptr : new_handle(made);
    if (*result) return await(lock, made, "ncclCommSplit");
    note_progress();
    return ncclSuccess;
}

/* ---- their end ---- */

/* Waits until no stream has an item of the communicator. */
static ncclResult_t drain(const std::shared_ptr<Comm> &comm, Lock &lock, const char *function) {
    return wait_until(
               lock, [&] { return comm->pending == 0; }, function)
               ? ncclSuccess
               : ncclInternalError;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommFinalize");
    return comm ? drain(comm, lock, "ncclCommFinalize") : ncclInvalidArgument;
}

static void forget(ncclComm_t handle) {
    handles.erase(handle);
    delete handle;
    count_handle(kCommunicator, -1);
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    if (!handle) return ncclSuccess;
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommDestroy");
    if (!comm) return ncclInvalidArgument;
    const ncclResult_t drained = drain(comm, lock, "ncclCommDestroy");
    forget(handle);
    return drained;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
    if (!handle) return ncclSuccess;
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommAbort");
    if (!comm) return ncclInvalidArgument;
    comm->aborted = true;
    forget(handle);
    note_progress();
    drive(); /* its items end now, without effect */
    return ncclSuccess;
}

void emu_nccl_fail(ncclComm_t handle, ncclResult_t error) {
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "emu_nccl_fail");
    if (comm) comm->async = error;
    note_progress();
}

/* ---- questions ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommGetAsyncError");
    if (!comm) return ncclInvalidArgument;
    drive(); /* polling in a loop counts as progress */
    *error = comm->async != ncclSuccess ? comm->async : complete(*comm) ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int *count) {
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommCount");
    if (!comm || !comm->group) return ncclInvalidArgument;
    *count = comm->group->size;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int *device) {
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommCuDevice");
    if (!comm) return ncclInvalidArgument;
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int *rank) {
    Lock lock(big_lock);
    const std::shared_ptr<Comm> comm = resolve_comm(handle, "ncclCommUserRank");
    if (!comm || !comm->group) return ncclInvalidArgument;
    *rank = comm->rank;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = { "no error",
                                         "unhandled cuda error",
                                         "unhandled system error",
                                         "internal error",
                                         "invalid argument",
                                         "invalid usage",
                                         "remote process exited or there was a network error",
                                         "NCCL operation in progress" };
    return (int)result >= 0 && result < ncclNumResults ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t) {
    return last_error.c_str();
}

ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclMemFree(void *pointer) {
    return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess;
}

/* ---- groups and collectives ---- */

ncclResult_t ncclGroupStart(void) {
    if (group_depth++ == 0) group_call = GroupCall();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (group_depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group_depth > 0) return ncclSuccess;
    GroupCall group;
    std::swap(group, group_call);
    if (group.error) return group.error;
    if (injected_fault()) return ncclSystemError;
    Lock lock(big_lock);
    ncclResult_t result = ncclSuccess;
    for (const std::shared_ptr<Comm> &comm : group.joining) {
        const ncclResult_t joined = await(lock, comm, "ncclGroupEnd");
        if (joined) result = joined;
    }
    for (const auto &entry : group.by_stream) {
        const ncclResult_t submitted = submit_parts(entry.first, entry.second);
        if (submitted) result = submitted;
    }
    return result;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kAllReduce, send, recv, count, type, op, 0);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kReduce, send, recv, count, type, op, root);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t recv_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kReduceScatter, send, recv, recv_count, type, op, 0);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kAllGather, send, recv, send_count, type, ncclSum, 0);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kBroadcast, send, recv, count, type, ncclSum, root);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    return call(comm, stream, kAlltoAll, send, recv, count, type, ncclSum, 0);
}

ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kGather, send, recv, count, type, ncclSum, root);
}

ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, kScatter, send, recv, count, type, ncclSum, root);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return call(comm, stream, kSend, send, nullptr, count, type, ncclSum, peer);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return call(comm, stream, kRecv, nullptr, recv, count, type, ncclSum, peer);
}
