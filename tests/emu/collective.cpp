/* The arithmetic of the collectives. NCCL leaves the order of a sum open; here it is the order of the ranks. */
#include "collective.h"

#include <algorithm>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace emu {

const char *collective_name(Collective kind) {
    static const char *const names[] = { "ncclAllReduce", "ncclReduce",    "ncclReduceScatter",
                                         "ncclAllGather", "ncclBroadcast", "ncclAlltoAll",
                                         "ncclGather",    "ncclScatter",   "ncclSend",
                                         "ncclRecv" };
    return names[kind];
}

size_t type_bytes(ncclDataType_t type) {
    static const size_t bytes[ncclNumTypes] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };
    return (int)type >= 0 && type < ncclNumTypes ? bytes[type] : 0;
}

size_t send_factor(const Part &part, int ranks) {
    const bool is_root = part.rank == part.root;
    switch (part.kind) {
    case kReduceScatter:
    case kAlltoAll: return (size_t)ranks;
    case kScatter: return is_root ? (size_t)ranks : 0;
    case kBroadcast: return is_root ? 1 : 0;
    case kRecv: return 0;
    default: return 1;
    }
}

size_t recv_factor(const Part &part, int ranks) {
    const bool is_root = part.rank == part.root;
    switch (part.kind) {
    case kAllGather:
    case kAlltoAll: return (size_t)ranks;
    case kGather: return is_root ? (size_t)ranks : 0;
    case kReduce: return is_root ? 1 : 0;
    case kSend: return 0;
    default: return 1;
    }
}

/* ---- reduction ---- */

template <typename T> static T combine(T a, T b, ncclRedOp_t op) {
    switch (op) {
    case ncclProd: return (T)(a * b);
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return (T)(a + b);
    }
}

/* The sum (or maximum, ...) of element i over all ranks; Wide is the type of one operation, T that of the memory. */
template <typename T, typename Wide>
static T reduce_element(const std::vector<Part *> &parts, size_t i, ncclRedOp_t op) {
    T sum;
    memcpy(&sum, parts[0]->send + i * sizeof(T), sizeof(T));
    for (size_t r = 1; r < parts.size(); r++) {
        T value;
        memcpy(&value, parts[r]->send + i * sizeof(T), sizeof(T));
        sum = (T)combine((Wide)sum, (Wide)value, op);
    }
    if (op == ncclAvg) sum = (T)((Wide)sum / (Wide)(int)parts.size());
    return sum;
}

template <typename T, typename Wide>
static void reduce_range(const std::vector<Part *> &parts, size_t begin, size_t count, char *result) {
    const ncclRedOp_t op = parts[0]->op;
    for (size_t i = 0; i < count; i++) {
        const T value = reduce_element<T, Wide>(parts, begin + i, op);
        memcpy(result + i * sizeof(T), &value, sizeof(T));
    }
}

/* Elements [begin, begin + count) of the sum, into a separate buffer: the operands may be reduced in place. */
static std::vector<char> reduced(const std::vector<Part *> &parts, size_t begin, size_t count) {
    std::vector<char> bytes(count * type_bytes(parts[0]->type));
    char *result = bytes.data();
    switch (parts[0]->type) {
    case ncclInt8: reduce_range<int8_t, int>(parts, begin, count, result); break;
    case ncclUint8: reduce_range<uint8_t, unsigned>(parts, begin, count, result); break;
    case ncclInt32: reduce_range<int32_t, int64_t>(parts, begin, count, result); break;
    case ncclUint32: reduce_range<uint32_t, uint32_t>(parts, begin, count, result); break;
    case ncclInt64: reduce_range<int64_t, __int128>(parts, begin, count, result); break;
    case ncclUint64: reduce_range<uint64_t, uint64_t>(parts, begin, count, result); break;
    case ncclFloat16: reduce_range<__half, float>(parts, begin, count, result); break;
    case ncclFloat32: reduce_range<float, float>(parts, begin, count, result); break;
    case ncclFloat64: reduce_range<double, double>(parts, begin, count, result); break;
    default: reduce_range<__nv_bfloat16, float>(parts, begin, count, result); break;
    }
    return bytes;
}

/* ---- moving ---- */

static void put(char *to, const char *from, size_t bytes) {
    if (!to || bytes == 0) return;
    memmove(to, from, bytes);
    check_written(to, bytes);
}

static void perform_reduction(const std::vector<Part *> &parts) {
    const Part &first = *parts[0];
    const size_t n = parts.size(), bytes = first.count * type_bytes(first.type);
    const std::vector<char> sum = reduced(parts, 0, first.count * (first.kind == kReduceScatter ? n : 1));
    for (size_t r = 0; r < n; r++) {
        if (first.kind == kReduce && (int)r != first.root) continue;
        put(parts[r]->recv, sum.data() + (first.kind == kReduceScatter ? r * bytes : 0), bytes);
    }
}

/* Moves that read everything before they write anything, as in-place calls need. */
static void perform_exchange(const std::vector<Part *> &parts) {
    const Part &first = *parts[0];
    const size_t n = parts.size(), bytes = first.count * type_bytes(first.type), root = (size_t)first.root;
    std::vector<std::vector<char>> sent(n);
    for (size_t r = 0; r < n; r++)
        sent[r].assign(parts[r]->send, parts[r]->send + bytes * send_factor(*parts[r], (int)n));
    for (size_t r = 0; r < n; r++) {
        char *to = parts[r]->recv;
        if (first.kind == kBroadcast) put(to, sent[root].data(), bytes);
        if (first.kind == kScatter) put(to, sent[root].data() + r * bytes, bytes);
        if (first.kind == kAllGather || (first.kind == kGather && r == root))
            for (size_t s = 0; s < n; s++) put(to + s * bytes, sent[s].data(), bytes);
        if (first.kind == kAlltoAll)
            for (size_t s = 0; s < n; s++) put(to + s * bytes, sent[s].data() + r * bytes, bytes);
    }
}

void perform_collective(const std::vector<Part *> &parts) {
    DeviceAccess access;
    if (parts[0]->kind <= kReduceScatter)
        perform_reduction(parts);
    else
        perform_exchange(parts);
}

void perform_pair(const Part &send, const Part &recv) {
    DeviceAccess access;
    put(recv.recv, send.send, send.count * type_bytes(send.type));
}

} // namespace emu
