/* Mixed rows on a GPU: the bits of the plain CPU kernel, for every type of the tensors, odd lengths, strides and extremes. */
#include "cuda_test.h"

static const xd_dtype mix_dtypes[] = { XD_DTYPE_F32, XD_DTYPE_BF16, XD_DTYPE_F16, XD_DTYPE_F64 };

enum { ROWS = 3, MOST = 2500, STRIDE = MOST + 3, ROOM = ROWS * STRIDE, EVEN = 4352 };

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
static bool same_values(const std::vector<unsigned char> &a, const std::vector<unsigned char> &b, xd_dtype dtype,
                        int64_t count) {
    const size_t size = xd_dtype_size(dtype);
    for (int64_t i = 0; i < count; i++) {
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
        CHECK(same_values(out, there_out.host<unsigned char>(), of_out, ROOM));
    }
    xd_ctx_destroy(host);
}

/* Rows at multiples of 16 bytes, eight elements at a time: numbers of like size, halves whose sums are ties, rows with one number out
 * of the range of that way, factors of every size. */
static std::vector<unsigned char> even_tensor(Random *random, xd_dtype dtype, int kind) {
    static const double special[] = { INFINITY, NAN, 1e-39, 3e38, -1e-45, 0.0, -0.0, -INFINITY };
    const int64_t count = ROWS * EVEN;
    std::vector<unsigned char> out((size_t)count * xd_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) {
        const double fine = (double)(random->below(2000001) - 1000000) * 1e-6, whole = (double)(random->below(513) - 256) / 128.0;
        double value = kind == 1 ? whole : fine * ldexp(1.0, (int)random->below(9) - 4);
        if (kind == 2 && random->below(40) == 0) value = special[random->below(8)];
        if (kind == 3) value = ldexp(fine, (int)random->below(250) - 125);
        xd_store_f64(out.data(), dtype, i, value);
    }
    return out;
}

XD_TEST(even_rows_have_the_bits_of_the_cpu) {
    static const xd_mix factors[][ROWS] = {
        { { 0.5, 0.5 }, { -0.5, 0.25 }, { 1.0, 0.0 } },          { { 0.3, 0.7 }, { -1.0 / 3.0, 1e6 }, { -0.7, 0.0 } },
        { { 1e-38, 1e38 }, { 0.0, -0.3 }, { 1e-200, 1e200 } },   { { 1.0, -1.0 }, { 1.0 + 1e-15, -1.0 }, { 3.0, -2.9999 } },
    };
    static const int64_t columns[] = { 8, 2048, 4096, 4099, EVEN };
    Gpu gpu;
    Random random(6);
    xd_ctx *host = nullptr;
    CHECK(xd_ctx_create(nullptr, &host) == XD_OK);
    for (int k = 0; k < 96; k++) {
        const xd_dtype dtype = mix_dtypes[k < 48 ? 1 : k % 3];
        const size_t bytes = (size_t)(ROWS * EVEN) * xd_dtype_size(dtype);
        const std::vector<unsigned char> p = even_tensor(&random, dtype, k % 4), q = even_tensor(&random, dtype, k % 4);
        const std::vector<xd_mix> mix(factors[k / 4 % 4], factors[k / 4 % 4] + ROWS);
        std::vector<unsigned char> out(bytes, 0x5a);
        const Device there_p(p), there_q(q), there_out(out), there_mix(mix);
        xd_mix_desc d = {};
        d.p = xd_rows_of((void *)p.data(), dtype, ROWS, columns[k % 5]);
        d.q = xd_rows_of((void *)q.data(), dtype, ROWS, columns[k % 5]);
        d.out = xd_rows_of(out.data(), dtype, ROWS, columns[k % 5]);
        d.p.stride = d.q.stride = d.out.stride = EVEN;
        if (k % 7 == 0) d.q.data = nullptr;
        d.mix = mix.data();
        CHECK(xd_mix_rows(host, &d) == XD_OK);
        d.p.data = there_p.at();
        if (d.q.data) d.q.data = there_q.at();
        d.out.data = there_out.at();
        d.mix = static_cast<const xd_mix *>(there_mix.at());
        CHECK(xd_mix_rows(gpu.ctx, &d) == XD_OK);
        gpu.wait();
        CHECK(same_values(out, there_out.host<unsigned char>(), dtype, ROWS * EVEN));
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
