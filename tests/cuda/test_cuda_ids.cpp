/* Labels and ids of 32 and of 64 bits give the same bits on a GPU too, and nothing is copied for the narrow ones. */
#include "cuda_test.h"
#include "ids_scene.h"

static void compare(xd_reduction reduction, bool two_sweeps) {
    Gpu gpu(reduction, two_sweeps);
    xd_vocab *vocab = nullptr;
    std::vector<ids_memory> start(1);
    ids_fill(start.data());
    Device wide(start), narrow(start);
    CHECK(vocab_even(gpu.ctx, nullptr, IDS_VOCAB, &vocab) == XD_OK);
    ids_calls(gpu.ctx, vocab, wide.at<ids_memory>(), XD_DTYPE_NONE);
    ids_calls(gpu.ctx, vocab, narrow.at<ids_memory>(), XD_DTYPE_I32);
    gpu.wait();
    const std::vector<ids_memory> a = wide.host<ids_memory>(), b = narrow.host<ids_memory>();
    ids_seen(a.data());
    CHECK(memcmp(&a[0].out, &b[0].out, sizeof a[0].out) == 0);
    ids_refusals(gpu.ctx, vocab, wide.at<ids_memory>());
    xd_vocab_destroy(vocab);
}

XD_TEST(losses_on_a_gpu_give_the_same_bits_for_ids_of_32_and_64_bits) {
    compare(XD_REDUCTION_DETERMINISTIC, false);
    compare(XD_REDUCTION_DETERMINISTIC, true);
    compare(XD_REDUCTION_INVARIANT, false);
}

XD_CUDA_TEST_MAIN()
