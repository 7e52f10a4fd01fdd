/* mpi_written.h - what one of several processes has written, beside what one rank has written of all. */
#ifndef MPI_WRITTEN_H
#define MPI_WRITTEN_H

#include "xd_test.h"

#include <stdint.h>
#include <string.h>

enum { WRITTEN_ARRAYS = 4 };

/* Arrays of `room` numbers, in which all bits of what was not written are set; returns how many were. */
static int64_t compare_arrays(const float *const *wanted, const float *const *got, int room) {
    int64_t written = 0, differ = 0;
    for (int k = 0; k < WRITTEN_ARRAYS; k++)
        for (int i = 0; i < room; i++) {
            uint32_t bits;
            memcpy(&bits, &got[k][i], sizeof bits);
            if (bits == UINT32_MAX) continue;
            written++;
            differ += memcmp(&got[k][i], &wanted[k][i], sizeof bits) != 0;
        }
    CHECK_EQ_INT(differ, 0);
    return written;
}

#endif
