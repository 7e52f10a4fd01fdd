/* Mixed rows on a GPU: the bits of the plain CPU kernel, for every type of the tensors, odd lengths, strides and extremes. */
#include "cuda_test.h"

static const xd_dtype mix_dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };

enum { ROWS = 3, MOST = 2500, STRIDE = MOST + 3, ROOM = ROWS * STRIDE };

/* Numbers of every size, the special ones among them, as one type. */
static std::vector<unsigned char> tensor_of(Random *random, xd_dtype dtype) {
    static const double special[] = { 0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, -65520.0, 3.4e38, 1e-300, INFINITY };
    std::vector<unsigned char> out(ROOM * xd_dtype_size(dtype));
    for (int64_t i = 0; i < ROOM; i++) {
        const double size = ldexp(1.0, (int)random->below(60) - 30);
        const double value = (double)(random->below(2000001) - 1000000) * 1e-6 * size;
        xd_store_f64(out.data(), dtype, i, random->below(9) ? value : special[random->below(10)]);
    }
    return out;
}

/* NaNs are equal whatever their bits. */
static bool same_values(const std::vector<unsigned char> &a, const std::vector<unsigned char> &b, xd_dtype dtype) {
    const size_t size = xd_dtype_size(dtype);
    for (int64_t i = 0; i < ROOM; i++) {
        const bool nan = isnan(xd_load_f64(a.data(), dtype, i)) && isnan(xd_load_f64(b.data(), dtype, i));
        if (!nan && memcmp(a.data() + (size_t)i * size, b.data() + (size_t)i * size, size) != 0) return false;
    }
    return true;
}

XD_TEST(mixed_rows_have_the_bits_of_the_cpu) {
    static const int64_t sizes[] = { 1, 3, 31, 256, 257, 1023, 1024, 1025, MOST };
    Gpu gpu;
    Random random(5);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    const std::vector<xd_mix> mix = { { 0.3, 0.7 }, { 1.0 / 3.0, -1e6 }, { 1.0, 0.0 } };
    const Device there_mix(mix);
    for (int k = 0; k < 64; k++) {
        const xd_dtype of_p = mix_dtypes[k % 4], of_q = mix_dtypes[k / 4 % 4], of_out = mix_dtypes[k / 16];
        const int64_t columns = sizes[k % 9];
        const std::vector<unsigned char> p = tensor_of(&random, of_p), q = tensor_of(&random, of_q);
        std::vector<unsigned char> out((size_t)ROOM * xd_dtype_size(of_out), 0x5a);
        const Device there_p(p), there_q(q), there_out(out);
        xd_mix_desc d = {};
        d.p = xd_rows_of(p.data(), of_p, ROWS, columns);
        if (k % 5) d.q = xd_rows_of(q.data(), of_q, ROWS, columns);
        d.out = xd_rows_of(out.data(), of_out, ROWS, columns);
        d.p.stride = d.q.stride = d.out.stride = STRIDE;
        d.mix = mix.data();
        CHECK(xd_mix_rows(host, &d) == XD_OK);
        d.p.data = there_p.at();
        if (d.q.data) d.q.data = there_q.at();
        d.out.data = there_out.at();
        d.mix = static_cast<const xd_mix *>(there_mix.at());
        seal();
        CHECK(xd_mix_rows(gpu.ctx, &d) == XD_OK);
        unseal();
        gpu.wait();
        CHECK(same_values(out, there_out.host<unsigned char>(), of_out));
    }
    xd_ctx_destroy(host);
}

XD_TEST(no_rows_and_no_columns_launch_nothing) {
    Gpu gpu;
    const std::vector<float> x(4, 7.0f);
    const Device there(x);
    const std::vector<xd_mix> mix(4);
    const Device there_mix(mix);
    xd_mix_desc d = {};
    d.p = xd_rows_of(there.at(), XD_DTYPE_F32, 0, 4);
    d.out = d.p;
    d.mix = static_cast<const xd_mix *>(there_mix.at());
    CHECK(xd_mix_rows(gpu.ctx, &d) == XD_OK);
    d.p = xd_rows_of(there.at(), XD_DTYPE_F32, 4, 0);
    d.out = d.p;
    CHECK(xd_mix_rows(gpu.ctx, &d) == XD_OK);
    gpu.wait();
    CHECK_SAME(x, there.host<float>());
}

XD_CUDA_TEST_MAIN()
