/* Work in rounds. */

#include "checkpoint/internal.h"
#include "comm/internal.h"

XD_PRIVATE xd_result xdi_round_count(xd_comm *comm, uint64_t left, int64_t *rounds) {
    int64_t most = (int64_t)(left / XDI_ROUND + (left % XDI_ROUND != 0));
    if (most == 0) most = 1;
    return xd_all_reduce(comm, &most, rounds, 1, XD_DTYPE_I64, XD_MAX);
}

XD_PRIVATE xd_result xdi_rounds(xd_comm *comm, uint64_t left, xdi_work work, void *argument) {
    int64_t rounds = 0;
    XD_TRY(xdi_round_count(comm, left, &rounds));
    for (; rounds > 0; rounds--) XD_TRY(xdi_comm_agree_alike(comm, work(argument, XDI_ROUND)));
    return XD_OK;
}
