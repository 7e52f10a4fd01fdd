/* Sums over ranks and leaves, and copies, on a GPU: the bits of the plain CPU kernels. */
#include "cuda_test.h"
#include "planned.h"

XD_TEST(sums_over_ranks_have_the_bits_of_the_cpu) {
    static const xd_dtype dtypes[] = { XD_DTYPE_F32, XD_DTYPE_F64, XD_DTYPE_BF16, XD_DTYPE_F16,
                                       XD_DTYPE_I32, XD_DTYPE_I64, XD_DTYPE_U8 };
    Gpu gpu;
    Random random(8);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int form = 0; form < 140; form++) {
        const xd_dtype dtype = dtypes[form % 7];
        const xd_reduce_op op = (xd_reduce_op)(form / 7 % 4);
        const int ranks = 1 + (int)random.below(9);
        const int64_t n = random.below(150);
        const size_t skew = form % 3 == 0 ? xd_dtype_size(dtype) : 0;
        if (!xd_reduce_supports(dtype, op)) continue;
        std::vector<std::vector<unsigned char>> data;
        std::vector<Device> device;
        std::vector<const void *> from, on_device;
        for (int r = 0; r < ranks; r++) {
            data.push_back(elements(dtype, n, &random, true));
            device.emplace_back(data.back(), skew);
        }
        for (int r = 0; r < ranks; r++) {
            from.push_back(data[r].data());
            on_device.push_back(device[r].at());
        }
        std::vector<unsigned char> out(data[0].size());
        CHECK(xd_reduce_pieces(host, out.data(), from.data(), ranks, n, dtype, op) == XD_OK);
        CHECK(xd_reduce_pieces(gpu.ctx, device[0].at(), on_device.data(), ranks, n, dtype, op) == XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(dtype, out, device[0].host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(sums_over_leaves_have_the_bits_of_the_cpu) {
    Gpu gpu;
    Random random(9);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int form = 0; form < 60; form++) {
        const xd_dtype dtype = form % 2 ? XD_DTYPE_F64 : XD_DTYPE_F32;
        const int ranks = 1 + (int)random.below(6);
        const int64_t n = 1 + random.below(300), stride = n + random.below(3);
        std::vector<xd_leaves> leaves(ranks);
        int64_t total = 0;
        for (xd_leaves &l : leaves) {
            l.first = total;
            l.count = random.below(7);
            total += l.count;
        }
        leaves[0].count += total == 0;
        total += total == 0;
        std::vector<std::vector<unsigned char>> data;
        std::vector<Device> device;
        std::vector<const void *> from, on_device;
        for (xd_leaves &l : leaves) {
            l.total = total;
            if (&l != &leaves[0] && l.first == 0) l.first = leaves[0].count;
            data.push_back(elements(dtype, xd_leaves_nodes(l.first, l.count) * stride, &random, false));
            device.emplace_back(data.back());
        }
        for (int r = 0; r < ranks; r++) {
            from.push_back(data[r].data());
            on_device.push_back(device[r].at());
        }
        const xd_reduce_op op = form % 3 ? XD_SUM : XD_AVG;
        std::vector<unsigned char> out((size_t)n * xd_dtype_size(dtype));
        const Device d_out(out);
        CHECK(xd_reduce_leaves(host, out.data(), from.data(), leaves.data(), ranks, stride, n, dtype, op) == XD_OK);
        CHECK(xd_reduce_leaves(gpu.ctx, d_out.at(), on_device.data(), leaves.data(), ranks, stride, n, dtype, op) ==
              XD_OK);
        gpu.wait();
        CHECK_ELEMENTS(dtype, out, d_out.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_TEST(a_stack_of_leaves_on_the_device_has_the_bits_of_the_cpu) {
    Gpu gpu;
    Random random(12);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int count = 1; count <= 40; count++) {
        const int64_t n = 1 + random.below(70), first = random.below(24);
        xd_leaf_stack_desc d = {};
        d.leaves.first = first;
        d.leaves.count = count;
        d.leaves.total = 64;
        d.elements = n;
        xd_leaf_stack *there = nullptr, *here = nullptr;
        d.memory = &d; /* any address: the size of memory of the caller's */
        const std::vector<unsigned char> nothing(
            PLANNED_WORKSPACE(gpu.ctx, xd_leaf_stack_create(gpu.ctx, &d, &there)));
        const Device room(nothing, count % 2 ? 4 : 0);
        d.memory = count % 3 ? room.at() : nullptr;
        d.memory_bytes = nothing.size();
        xd_leaf_stack_desc own = {};
        own.leaves = d.leaves;
        own.elements = n;
        CHECK(xd_leaf_stack_create(host, &own, &here) == XD_OK);
        CHECK(xd_leaf_stack_create(gpu.ctx, &d, &there) == XD_OK);
        for (int l = 0; l < count; l++) {
            const std::vector<unsigned char> data = elements(XD_DTYPE_F32, n, &random, false);
            const Device leaf(data);
            float *place = nullptr;
            CHECK(xd_leaf_stack_push(here, (const float *)(const void *)data.data()) == XD_OK);
            if (l % 3 != 2) {
                CHECK(xd_leaf_stack_next(there, &place) == XD_OK);
                gpu.wait();
                CHECK(cudaMemcpy(place, data.data(), data.size(), cudaMemcpyHostToDevice) == cudaSuccess);
            }
            CHECK(xd_leaf_stack_push(there, place ? place : leaf.at<float>()) == XD_OK);
            gpu.wait();
        }
        std::vector<unsigned char> expected((size_t)(xd_leaves_nodes(first, count) * n) * sizeof(float)), got(expected);
        memcpy(expected.data(), xd_leaf_stack_forest(here), expected.size());
        CHECK(cudaMemcpy(got.data(), xd_leaf_stack_forest(there), got.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
        CHECK_ELEMENTS(XD_DTYPE_F32, expected, got);
        xd_leaf_stack_destroy(there);
        xd_leaf_stack_destroy(here);
    }
    xd_ctx_destroy(host);
}

XD_TEST(leaves_and_their_stack_are_both_on_the_host_or_both_on_the_device) {
    Gpu gpu;
    const std::vector<float> data(8, 1.0f);
    std::vector<float> memory(16);
    const Device leaf(data);
    xd_leaf_stack_desc d = {};
    d.leaves.count = d.leaves.total = 2;
    d.elements = 8;
    xd_leaf_stack *there = nullptr, *here = nullptr;
    CHECK(xd_leaf_stack_create(gpu.ctx, &d, &there) == XD_OK);
    d.memory = memory.data();
    d.memory_bytes = memory.size() * sizeof(float);
    CHECK(xd_leaf_stack_create(gpu.ctx, &d, &here) == XD_OK);
    CHECK(xd_leaf_stack_push(there, data.data()) == XD_ERROR_ARGUMENT);
    CHECK(xd_leaf_stack_push(here, leaf.at<float>()) == XD_ERROR_ARGUMENT);
    CHECK(xd_leaf_stack_push(there, leaf.at<float>()) == XD_OK);
    CHECK(xd_leaf_stack_push(here, data.data()) == XD_OK && xd_leaf_stack_push(here, data.data()) == XD_OK);
    CHECK(memory[0] == 2.0f && memory[7] == 2.0f);
    gpu.wait();
    xd_leaf_stack_destroy(there);
    xd_leaf_stack_destroy(here);
}

XD_TEST(strided_blocks_are_copied_as_on_the_cpu) {
    Gpu gpu;
    Random random(10);
    xd_ctx *host = plain_ctx();
    const xd_launch launch = gpu.launch(), host_launch = xd_ctx_launch(host);
    for (int form = 0; form < 60; form++) {
        static const size_t sizes[] = { 1, 2, 4, 8 };
        const size_t size = sizes[form % 4];
        std::vector<xd_copy> copies(1 + (size_t)random.below(30));
        int64_t room = 0; /* blocks of the target stand behind each other; those of the source may overlap */
        for (xd_copy &c : copies) {
            memset(&c, 0, sizeof c);
            c.ndim = 1 + (int)random.below(4);
            int64_t step = form % 3 == 0 ? 2 : 1;
            c.dst_offset = room;
            c.src_offset = random.below(20);
            for (int d = c.ndim - 1; d >= 0; d--) {
                c.extent[d] = 1 + random.below(d == c.ndim - 1 ? 24 : 3);
                c.dst_stride[d] = step;
                c.src_stride[d] = form % 5 == 0 ? 0 : step;
                step *= c.extent[d] + random.below(2) * 4;
            }
            room += step;
        }
        std::vector<unsigned char> source(size * (size_t)(room + 8000)), target(size * (size_t)room);
        for (unsigned char &byte : source) byte = (unsigned char)random.bits();
        const Device d_source(source), d_target(target);
        CHECK(xd_ctx_kernels(host)->copies(&host_launch, copies.data(), (int64_t)copies.size(), source.data(), target.data(),
                                           size) == XD_OK);
        CHECK(gpu.kernels()->copies(&launch, copies.data(), (int64_t)copies.size(), d_source.at(), d_target.at(), size) ==
              XD_OK);
        gpu.wait();
        CHECK_SAME(target, d_target.host<unsigned char>());
    }
    xd_ctx_destroy(host);
}

XD_CUDA_TEST_MAIN()
