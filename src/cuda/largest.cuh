/* The largest elements of a row: what a thread has seen at each of the eight places of its loads, four of which are on their way
 * at a time. Halves are compared in pairs, as they lie in memory. */

/* The larger of two, and of pairs of bf16; NaN is smaller than everything, or, where NANS, larger. */
template <bool NANS> static __device__ inline float xdi_cuda_larger_of(float a, float b) {
    if (!NANS) return fmaxf(a, b);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return isnan(a) ? a : isnan(b) ? b : fmaxf(a, b);
#endif
}

template <bool NANS> static __device__ inline uint32_t xdi_cuda_larger_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t larger;
    if (NANS)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else
        asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    const float low = xdi_cuda_larger_of<NANS>(xd_float_of_bits(a << 16), xd_float_of_bits(b << 16));
    const float high = xdi_cuda_larger_of<NANS>(xd_float_of_bits(a & 0xffff0000u), xd_float_of_bits(b & 0xffff0000u));
    return xd_bits_of_float(low) >> 16 | (xd_bits_of_float(high) & 0xffff0000u);
#endif
}

/* Elements [column, column + 8) of a row as they lie in memory; -infinity for those at `end` and beyond. */
static __device__ inline xdi_cuda_raw<float> xdi_cuda_raw_of(const float *row, int64_t column, int64_t end) {
    xdi_cuda_raw<float> raw;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT / 2; i++) {
        raw.low.at[i] = column + i < end ? row[column + i] : -INFINITY;
        raw.high.at[i] = column + 4 + i < end ? row[column + 4 + i] : -INFINITY;
    }
    return raw;
}

static __device__ inline xdi_cuda_raw<xdi_cuda_bf16> xdi_cuda_raw_of(const xdi_cuda_bf16 *row, int64_t column, int64_t end) {
    const uint32_t nothing = 0xff80u; /* -infinity */
    xdi_cuda_raw<xdi_cuda_bf16> raw;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i += 2) {
        const uint32_t low = column + i < end ? row[column + i].bits : nothing;
        const uint32_t high = column + i + 1 < end ? row[column + i + 1].bits : nothing;
        raw.pairs.at[i / 2] = low | high << 16;
    }
    return raw;
}

/* Calls use(eight elements as in memory, column) for the team's columns [0, end) of a row, in their order for each thread;
 * elements at `end` and beyond are -infinity. The loads of four steps are asked for before the first is used. */
template <int TEAM, typename T, typename Use>
static __device__ inline void xdi_cuda_each_eight(const T *row, int64_t end, Use use) {
    enum { AHEAD = 4, STEP = TEAM * XDI_CUDA_EIGHT };
    int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    if (xdi_cuda_is_aligned16(row)) {
        xdi_cuda_raw<T> raw[AHEAD];
        for (; c + (AHEAD - 1) * STEP + XDI_CUDA_EIGHT <= end; c += AHEAD * STEP) {
            XD_UNROLL
            for (int k = 0; k < AHEAD; k++) raw[k].load(row + c + k * STEP);
            XD_UNROLL
            for (int k = 0; k < AHEAD; k++) use(raw[k], c + k * STEP);
        }
        XD_UNROLL
        for (int k = 0; k < AHEAD - 1; k++)
            if (c + k * STEP + XDI_CUDA_EIGHT <= end) raw[k].load(row + c + k * STEP);
        XD_UNROLL
        for (int k = 0; k < AHEAD - 1; k++) {
            if (c + XDI_CUDA_EIGHT > end) break;
            use(raw[k], c);
            c += STEP;
        }
    }
    XD_UNROLL_N(1)
    for (; c < end; c += STEP) use(xdi_cuda_raw_of(row, c, end), c);
}

/* The same with four loads on their way all the time, for more registers: a step's is asked for as soon as those of the step four
 * before are free. */
template <int TEAM, typename T, typename Use>
static __device__ inline void xdi_cuda_stream_eights(const T *row, int64_t end, Use use) {
    enum { AHEAD = 4, STEP = TEAM * XDI_CUDA_EIGHT };
    int64_t c = XDI_CUDA_EIGHT * xdi_cuda_team_thread<TEAM>();
    if (xdi_cuda_is_aligned16(row) && c + XDI_CUDA_EIGHT <= end) {
        int left = (int)((end - XDI_CUDA_EIGHT - c) / STEP) + 1; /* whole steps */
        xdi_cuda_raw<T> raw[AHEAD];
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (k < left) raw[k].load(row + c + k * STEP);
        XD_UNROLL_N(1)
        for (; left > AHEAD; left -= AHEAD) {
            XD_UNROLL
            for (int k = 0; k < AHEAD; k++, c += STEP) {
                const xdi_cuda_raw<T> now = raw[k];
                if (k + AHEAD < left) raw[k].load(row + c + AHEAD * STEP);
                use(now, c);
            }
        }
        XD_UNROLL
        for (int k = 0; k < AHEAD; k++) {
            if (k >= left) break;
            use(raw[k], c);
            c += STEP;
        }
    }
    XD_UNROLL_N(1)
    for (; c < end; c += STEP) use(xdi_cuda_raw_of(row, c, end), c);
}

/* The largest at each of the eight places. */
template <typename T, bool NANS> struct xdi_cuda_places;

template <bool NANS> struct xdi_cuda_places<float, NANS> {
    float at[XDI_CUDA_EIGHT];

    __device__ xdi_cuda_places() {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) at[i] = -INFINITY;
    }
    __device__ void see(const xdi_cuda_raw<float> &raw) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            at[i] = xdi_cuda_larger_of<NANS>(at[i], i < 4 ? raw.low.at[i % 4] : raw.high.at[i % 4]);
    }
    __device__ float value(int place) const {
        return at[place];
    }
};

template <bool NANS> struct xdi_cuda_places<xdi_cuda_bf16, NANS> {
    uint32_t pairs[XDI_CUDA_EIGHT / 2];

    __device__ xdi_cuda_places() {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT / 2; i++) pairs[i] = 0xff80ff80u;
    }
    __device__ void see(const xdi_cuda_raw<xdi_cuda_bf16> &raw) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT / 2; i++) pairs[i] = xdi_cuda_larger_pair<NANS>(pairs[i], raw.pairs.at[i]);
    }
    __device__ float value(int place) const {
        return xd_float_of_bits(place % 2 ? pairs[place / 2] & 0xffff0000u : pairs[place / 2] << 16);
    }
};

template <bool NANS> struct xdi_cuda_larger_float {
    __device__ float operator()(float a, float b) const {
        return xdi_cuda_larger_of<NANS>(a, b);
    }
};

/* Of eight elements; NaN does not count. */
static __device__ inline float xdi_cuda_largest_of(const xdi_cuda_raw<float> &raw) {
    const float low = fmaxf(fmaxf(raw.low.at[0], raw.low.at[1]), fmaxf(raw.low.at[2], raw.low.at[3]));
    return fmaxf(low, fmaxf(fmaxf(raw.high.at[0], raw.high.at[1]), fmaxf(raw.high.at[2], raw.high.at[3])));
}

static __device__ inline float xdi_cuda_largest_of(const xdi_cuda_raw<xdi_cuda_bf16> &raw) {
    const uint32_t pair = xdi_cuda_larger_pair<false>(xdi_cuda_larger_pair<false>(raw.pairs.at[0], raw.pairs.at[1]),
                                                      xdi_cuda_larger_pair<false>(raw.pairs.at[2], raw.pairs.at[3]));
    return fmaxf(xd_float_of_bits(pair << 16), xd_float_of_bits(pair & 0xffff0000u));
}

/* What a thread has seen, over all places. */
template <bool NANS, typename T> static __device__ inline float xdi_cuda_largest_of(const xdi_cuda_places<T, NANS> &places) {
    float max = places.value(0);
    XD_UNROLL
    for (int i = 1; i < XDI_CUDA_EIGHT; i++) max = xdi_cuda_larger_of<NANS>(max, places.value(i));
    return max;
}
