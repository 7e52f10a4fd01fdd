/* One rank's part of a collective or of a send and receive pair, and the execution of all parts together. */
#ifndef EMU_COLLECTIVE_H
#define EMU_COLLECTIVE_H

#include "emu.h"
#include "nccl.h"

namespace emu {

enum Collective {
    kAllReduce,
    kReduce,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kAlltoAll,
    kGather,
    kScatter,
    kSend,
    kRecv
};

struct Part {
    Collective kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root; /* or the peer of a send or receive */
    size_t count;
    const char *send;
    char *recv;
    int rank;
    bool done;
};

const char *collective_name(Collective kind);
size_t type_bytes(ncclDataType_t type); /* 0: no such type */
/* Elements that a rank reads and writes, in multiples of count. */
size_t send_factor(const Part &part, int ranks);
size_t recv_factor(const Part &part, int ranks);

/* Executes a collective of all ranks, in the order of ranks, each sum rounded to the type. */
void perform_collective(const std::vector<Part *> &parts);
void perform_pair(const Part &send, const Part &recv);

} // namespace emu

#endif
