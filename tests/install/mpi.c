/* A user's program with MPI, linked with the installed library: the companion alone is compiled here. */
#define XDISTILL_IMPLEMENTED
#define XDISTILL_IMPLEMENTATION
#include <xdistill.h>
#include <xdistill_mpi.h>

int main(void) {
    return xd_comm_mpi == NULL;
}
