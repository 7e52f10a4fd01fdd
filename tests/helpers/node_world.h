/* Worlds of xd_comm_node whose ranks are processes, forked by the test before it has threads. Alarms end ranks that hang. */
#ifndef NODE_WORLD_H
#define NODE_WORLD_H

#include "xd_test.h"
#include "xdistill.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NODE_RANKS = XD_NODE_RANKS_MAX, NODE_SECONDS = 100 };

/* What a rank's process leaves behind. */
typedef struct node_end {
    xd_result result;
    long failures; /* of checks */
    int status;    /* of the process, by waitpid */
    char message[256];
} node_end;

/* How ranks are started. Zero is the default of every field but ranks. */
typedef struct node_start {
    int ranks;
    int victim; /* 1 + a rank that may end in any way */
    size_t slot_bytes;
    const xd_ctx_desc *desc;
    xd_rank_function function;
    void *argument;
} node_start;

static inline void *node_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A name that no other test uses. */
static inline void node_name(char name[32]) {
    static int number;
    snprintf(name, 32, "test-%ld-%d", (long)getpid(), number++);
}

/* Files of jobs in /dev/shm whose names begin like this test's. */
static inline int node_left_behind(void) {
    char begin[48];
    int count = 0;
    snprintf(begin, sizeof begin, "xdistill-job-test-%ld-", (long)getpid());
    DIR *names = opendir("/dev/shm");
    for (const struct dirent *entry; names && (entry = readdir(names)) != NULL;)
        count += strncmp(entry->d_name, begin, strlen(begin)) == 0;
    if (names) closedir(names);
    return count;
}

/* Joins, in a process of its own, and does what all ranks do. */
static inline void node_main(const node_start *start, const char *name, int rank, node_end *end) {
    const xd_node_desc desc = { name, rank, start->ranks, 0.0, start->slot_bytes };
    xd_ctx *ctx = NULL;
    xd_comm *world = NULL;
    alarm(NODE_SECONDS);
    xd_test_failures = 0;
    end->result = xd_ctx_create(start->desc, &ctx);
    if (end->result == XD_OK) end->result = xd_comm_node(ctx, &desc, &world);
    if (end->result == XD_OK) end->result = start->function(world, start->argument);
    if (end->result != XD_OK && ctx)
        snprintf(end->message, sizeof end->message, "%.255s", xd_last_error(ctx)->message);
    if (end->result != XD_OK && world) xd_comm_abort(world);
    xd_comm_destroy(world);
    xd_ctx_destroy(ctx);
    end->failures = xd_test_failures;
    fflush(stdout);
}

/* Starts the processes; `ends` has room for all, in memory that they share. */
static inline void node_fork(const node_start *start, const char *name, pid_t *children, node_end *ends) {
    fflush(stdout);
    for (int r = 0; r < start->ranks; r++) {
        children[r] = fork();
        if (children[r] != 0) continue;
        node_main(start, name, r, &ends[r]);
        _exit(0);
    }
}

/* Runs the function in processes and counts their failed checks; one that ends abnormally is a failed check too, unless it is the
 * victim. Returns the first result that is not XD_OK, its message in `message`. */
static inline xd_result node_run(const node_start *start, char message[256]) {
    node_end *ends = (node_end *)node_memory(NODE_RANKS * sizeof *ends);
    pid_t children[NODE_RANKS];
    char name[32];
    xd_result result = XD_OK;
    message[0] = 0;
    CHECK(ends != NULL);
    if (!ends) return XD_ERROR_MEMORY;
    node_name(name);
    node_fork(start, name, children, ends);
    for (int r = 0; r < start->ranks; r++) {
        CHECK(waitpid(children[r], &ends[r].status, 0) == children[r]);
        if (r + 1 == start->victim) continue;
        CHECK_EQ_INT(ends[r].status, 0);
        CHECK_EQ_INT(ends[r].failures, 0);
        if (result != XD_OK || ends[r].result == XD_OK) continue;
        result = ends[r].result;
        memcpy(message, ends[r].message, sizeof ends[r].message);
    }
    CHECK_EQ_INT(node_left_behind(), 0);
    munmap(ends, NODE_RANKS * sizeof *ends);
    return result;
}

#endif
