/* The conformance suite of transports over NCCL. */
#ifndef XD_CUDA_NCCL_SUITE_H
#define XD_CUDA_NCCL_SUITE_H

#include "comm_suite.h"

#include "cuda_nccl_test.h"

static thread_local Member *here; /* whose calls this thread makes */

static inline void *suite_allocate(size_t bytes) {
    void *memory = nullptr;
    if (!Buffer::is_device(here)) return malloc(bytes);
    CHECK(cudaMalloc(&memory, bytes) == cudaSuccess);
    return memory;
}

static inline void suite_release(void *memory) {
    if (!Buffer::is_device(here)) return free(memory);
    CHECK(cudaFree(memory) == cudaSuccess);
}

static inline void suite_put_there(void *to, const void *host, size_t bytes) {
    if (!Buffer::is_device(here)) return suite_put_host(to, host, bytes);
    CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, here->stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(here->stream) == cudaSuccess);
}

static inline void suite_get_there(xd_comm *comm, void *host, const void *from, size_t bytes) {
    if (!Buffer::is_device(here)) return suite_get_host(comm, host, from, bytes);
    CHECK(xd_read(here->ctx, host, from, bytes) == XD_OK);
}

static inline void run_suite(World *world, xd_rank_function function) {
    static const int64_t sizes[] = { 0, 7, 700 };
    suite = { suite_allocate, suite_release, suite_put_there, suite_get_there, sizes, 3 };
    run_members(world, [function](Member *member) {
        here = member;
        CHECK(member->join() == XD_OK);
        CHECK(function(member->comm, nullptr) == XD_OK);
    });
}

#endif
