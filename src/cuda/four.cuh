/* Four elements of a thread. The accesses of a warp are contiguous: 512 bytes of an f32 array, 256 of a narrower one. What a thread
 * asks for stays as it lies in memory until it is widened, so that nothing waits before all arrays have been asked for. */

enum { XDI_CUDA_FOUR = 4, XDI_CUDA_FOURS = 2, XDI_CUDA_FOURS_APART = 4 * XDI_CUDA_WARP };

/* Of 16-bit types the first two words, the first element in the lower half. */
struct xdi_cuda_four {
    uint32_t words[4];
};

/* Element i of an F32, BF16 or F16 array and the next three; the address is a multiple of what they take. */
static __device__ inline xdi_cuda_four xdi_cuda_ask4(const void *data, int dtype, int64_t i) {
    xdi_cuda_four four;
    if (dtype == XD_DTYPE_F32) {
        const xdi_cuda_pack<float> pack = xdi_cuda_load16(static_cast<const float *>(data) + i);
        memcpy(four.words, &pack, sizeof pack);
    } else {
        const xdi_cuda_bits8 bits = xdi_cuda_load8(static_cast<const uint16_t *>(data) + i);
        memcpy(four.words, &bits, sizeof bits);
        four.words[2] = four.words[3] = 0;
    }
    return four;
}

static __device__ inline void xdi_cuda_put4(void *data, int dtype, int64_t i, const xdi_cuda_four &four) {
    if (dtype == XD_DTYPE_F32) {
        xdi_cuda_pack<float> pack;
        memcpy(&pack, four.words, sizeof pack);
        xdi_cuda_store16(static_cast<float *>(data) + i, pack);
    } else {
        xdi_cuda_bits8 bits;
        memcpy(&bits, four.words, sizeof bits);
        xdi_cuda_store8(static_cast<uint16_t *>(data) + i, bits);
    }
}

static __device__ inline void xdi_cuda_read4(const float *from, float (&values)[4]) {
    const xdi_cuda_pack<float> pack = xdi_cuda_load16(from);
    memcpy(values, &pack, sizeof pack);
}

static __device__ inline void xdi_cuda_write4(float *to, const float (&values)[4]) {
    xdi_cuda_pack<float> pack;
    memcpy(&pack, values, sizeof pack);
    xdi_cuda_store16(to, pack);
}

static __device__ inline void xdi_cuda_widen4(const xdi_cuda_four &four, int dtype, float (&values)[4]) {
    if (dtype == XD_DTYPE_F32) {
        memcpy(values, four.words, sizeof values);
    } else if (dtype == XD_DTYPE_BF16) {
        XD_UNROLL
        for (int j = 0; j < 4; j++)
            values[j] = xd_float_of_bits(j % 2 ? four.words[j / 2] & 0xffff0000u : four.words[j / 2] << 16);
    } else {
        XD_UNROLL
        for (int j = 0; j < 4; j++) values[j] = xdi_cuda_from_f16((uint16_t)(four.words[j / 2] >> (j % 2 * 16) & 0xffffu));
    }
}

static __device__ inline xdi_cuda_four xdi_cuda_narrow4(const float (&values)[4], int dtype) {
    xdi_cuda_four four = {};
    if (dtype == XD_DTYPE_F32) {
        memcpy(four.words, values, sizeof values);
    } else if (dtype == XD_DTYPE_BF16) {
        XD_UNROLL
        for (int j = 0; j < 4; j++) four.words[j / 2] |= (uint32_t)xd_bits_to_bf16(values[j]) << (j % 2 * 16);
    } else {
        XD_UNROLL
        for (int j = 0; j < 4; j++) four.words[j / 2] |= (uint32_t)xdi_cuda_to_f16(values[j]) << (j % 2 * 16);
    }
    return four;
}

/* The threads of a block share the elements of a span: fours(at) for four at at[0] and four at at[1] while `wide`, one(i) for the
 * others. Where the second four are not there, at[1] is at[0], so that they are loaded twice and have the same results. The result
 * of an element must not depend on which of the two is called. */
template <typename Fours, typename One>
static __device__ inline void xdi_cuda_walk4(xdi_cuda_span span, bool wide, Fours fours, One one) {
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP), warp = (int)(threadIdx.x / XDI_CUDA_WARP);
    const int64_t end = span.begin + (wide ? (span.end - span.begin) / XDI_CUDA_FOUR * XDI_CUDA_FOUR : 0);
    const int64_t step = (int64_t)blockDim.x * (XDI_CUDA_FOUR * XDI_CUDA_FOURS);
    int64_t i = span.begin + warp * (XDI_CUDA_FOURS * XDI_CUDA_FOURS_APART) + lane * XDI_CUDA_FOUR;
    for (; i < end; i += step) {
        const int64_t at[XDI_CUDA_FOURS] = { i, i + XDI_CUDA_FOURS_APART < end ? i + XDI_CUDA_FOURS_APART : i };
        fours(at);
    }
    for (i = end + threadIdx.x; i < span.end; i += blockDim.x) one(i);
}
