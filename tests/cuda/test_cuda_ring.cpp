/* Losses of rows that stay on the chip against the plain CPU kernels: every kind and type, every number of blocks, what rows must
 * not lose, and which rows take the other path. */
#include "cuda_loss_case.h"

/* The divergences and weights that have kernels of their own. */
struct Kind {
    xd_divergence divergence;
    double temperature, hard, soft, smoothing;
};

static const Kind kinds[] = {
    { XD_KL_FORWARD, 1.0, 0.7, 0.0, 0.0 }, { XD_KL_FORWARD, 1.0, 0.7, 0.0, 0.1 }, { XD_KL_FORWARD, 1.7, 0.0, 0.6, 0.0 },
    { XD_KL_REVERSE, 1.7, 0.0, 0.6, 0.0 }, { XD_JSD, 1.7, 0.0, 0.6, 0.0 },        { XD_KL_FORWARD, 1.7, 0.4, 0.6, 0.0 },
    { XD_KL_FORWARD, 1.0, 0.4, 0.6, 0.0 },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static LossCase case_of(const Kind &k, const Shape &s) {
    LossCase c = { s, k.divergence, k.temperature, k.hard, k.soft, k.smoothing, false, false };
    return c;
}

/* True where the path is there; elsewhere its tests have nothing to test. */
static bool has_ring() {
    const Gpu other(XD_REDUCTION_DETERMINISTIC, true), gpu;
    return other.kernels()->loss.fused != gpu.kernels()->loss.fused;
}

XD_TEST(rows_on_the_chip_have_the_losses_of_the_cpu) {
    if (!has_ring()) SKIP("needs compute capability 9.0");
    Pair pair;
    static const int64_t widths[] = { 2056, 4096, 4864, 8200 };
    for (int i = 0; i < 4 * KINDS; i++) { /* findings, rows that do not count and padding in half of the cases */
        const xd_dtype x = i & 1 ? XD_DTYPE_F32 : XD_DTYPE_BF16;
        const int64_t cols = widths[i / 2 % 4];
        const Shape s = { i & 2 ? 9 : 3, cols, i % 3 * 8, 0, x, x, x };
        LossCase c = case_of(kinds[i % KINDS], s);
        c.in_place = i % 5 != 0;
        c.bad = (i & 2) != 0;
        c.rising = i % 4 == 3;
        compare_losses(&pair, c, (uint64_t)(500 + i));
    }
}

XD_CUDA_TEST_MAIN()
