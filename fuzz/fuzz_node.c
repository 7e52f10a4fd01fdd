/* Any bytes are in the file in which the processes of a job meet, left there by one that has died: the job joins as if they were
 * not there, or ends in words; and the name is gone afterwards. */
#if !defined(_DEFAULT_SOURCE)
#    define _DEFAULT_SOURCE /* getpid */
#endif
#include "fuzz.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_BYTES = 1 << 16 };

/* What a rank makes of the file: it joins alone, or waits a moment for another rank, which never comes. */
static void join(const char *name, const char *path, const uint8_t *data, size_t bytes, int rank) {
    xd_node_desc d;
    xd_comm *comm = NULL;
    struct stat status;
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    FUZZ_CHECK(file >= 0 && (bytes == 0 || write(file, data, bytes) == (ssize_t)bytes));
    if (bytes % 2 == 0) FUZZ_CHECK(ftruncate(file, FILE_BYTES) == 0); /* else it ends early */
    close(file);
    memset(&d, 0, sizeof d);
    d.name = name;
    d.rank = rank;
    d.size = rank + 1;
    d.timeout_s = 0.005;
    const xd_result result = xd_comm_node(fuzz_ctx(), &d, &comm);
    FUZZ_CHECK(rank == 0 || result != XD_OK);
    if (result != XD_OK) FUZZ_CHECK(!comm && xd_last_error(fuzz_ctx())->message[0]);
    xd_comm_destroy(comm);
    if (result != XD_ERROR_IO) FUZZ_CHECK(stat(path, &status) != 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char name[32], path[96];
    if (bytes > (size_t)FILE_BYTES) return 0;
    snprintf(name, sizeof name, "fuzz-%ld", (long)getpid());
    snprintf(path, sizeof path, "/dev/shm/xdistill-job-%s", name);
    for (int rank = 0; rank < 2; rank++) join(name, path, data, bytes, rank);
    unlink(path);
    return 0;
}
