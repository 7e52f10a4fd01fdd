/* What a block does with a chunk of a sample, a warp with a tile of it: sums, and the gradient. */

/* ---- what a block does with a chunk ---- */

struct xdi_cuda_sample_range {
    int64_t begin, end; /* elements of a sample, XD_SAMPLE_CHUNK at most */
};

static __device__ inline xdi_cuda_sample_range xdi_cuda_sample_chunk(const xd_sample_args &a, int64_t chunk) {
    const int64_t begin = chunk * XD_SAMPLE_CHUNK, end = begin + XD_SAMPLE_CHUNK;
    return { begin, end < a.elements ? end : a.elements };
}

/* A warp has a tile: a thread has eight neighbouring lanes of it, which are 16 bytes of each narrow tensor, and all eight elements
 * of each lane. So the tree of kernel/dmd_loss.h, neighbours first, is one in the thread and then one over the warp. */
static_assert((int)XD_SAMPLE_LANES == (int)XDI_CUDA_EIGHT * (int)XDI_CUDA_WARP, "a warp has all lanes");
static_assert((int)XD_SAMPLE_CHUNK == (int)XD_SAMPLE_TILE * (XDI_CUDA_SAMPLE_THREADS / (int)XDI_CUDA_WARP), "a block has all tiles");

enum { XDI_CUDA_SAMPLE_STEPS = (int)XD_SAMPLE_TILE / (int)XD_SAMPLE_LANES };

/* This warp's tile of a range. */
static __device__ inline xdi_cuda_sample_range xdi_cuda_sample_tile(xdi_cuda_sample_range range) {
    const int64_t begin = range.begin + (int64_t)(threadIdx.x / XDI_CUDA_WARP) * (int)XD_SAMPLE_TILE;
    const int64_t end = begin + (int)XD_SAMPLE_TILE;
    return { begin, end < range.end ? end : range.end };
}

/* Where a thread keeps eight numbers of a step, as two packs of four: a warp's are neighbours. */
static __device__ inline float *xdi_cuda_sample_kept(float *kept, int step) {
    const int warp = (int)(threadIdx.x / XDI_CUDA_WARP), lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    return kept + (warp * (int)XD_SAMPLE_TILE + step * (int)XD_SAMPLE_LANES + 4 * lane);
}

enum { XDI_CUDA_SAMPLE_HALF = (int)XD_SAMPLE_LANES / 2 };

static __device__ inline void xdi_cuda_sample_keep(float *kept, int step, const xdi_cuda_eight &values) {
    float *at = xdi_cuda_sample_kept(kept, step);
    xdi_cuda_bits16 bits[2];
    memcpy(bits, values.at, sizeof bits);
    *reinterpret_cast<xdi_cuda_bits16 *>(at) = bits[0];
    *reinterpret_cast<xdi_cuda_bits16 *>(at + XDI_CUDA_SAMPLE_HALF) = bits[1];
}

static __device__ inline xdi_cuda_eight xdi_cuda_sample_recall(float *kept, int step) {
    const float *at = xdi_cuda_sample_kept(kept, step);
    const xdi_cuda_bits16 bits[2] = { *reinterpret_cast<const xdi_cuda_bits16 *>(at),
                                      *reinterpret_cast<const xdi_cuda_bits16 *>(at + XDI_CUDA_SAMPLE_HALF) };
    xdi_cuda_eight values;
    memcpy(values.at, bits, sizeof bits);
    return values;
}

/* Calls use(step, inputs) for the eights of a whole tile, the next two steps on their way. */
template <typename Terms, int INPUTS, typename Use>
static __device__ inline void xdi_cuda_sample_walk(const Terms &terms, int64_t b, int64_t begin, Use use) {
    typedef typename Terms::T T;
    const T *from[INPUTS];
    xdi_cuda_raw<T> ahead[2][INPUTS];
    const int64_t first = begin + (int)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
    XD_UNROLL
    for (int k = 0; k < INPUTS; k++) {
        from[k] = xdi_cuda_row<const T>(terms.input(k), b) + first;
        ahead[0][k].load(from[k]);
        ahead[1][k].load(from[k] + (int)XD_SAMPLE_LANES);
    }
    XD_UNROLL_N(1)
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step += 2) {
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) from[k] += 2 * (int)XD_SAMPLE_LANES;
        XD_UNROLL
        for (int half = 0; half < 2; half++) {
            xdi_cuda_raw<T> now[INPUTS];
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) {
                now[k] = ahead[half][k];
                if (step + 2 < XDI_CUDA_SAMPLE_STEPS) ahead[half][k].load(from[k] + half * (int)XD_SAMPLE_LANES);
            }
            use(step + half, now);
        }
    }
}

/* The same sums of any tile: an element at a time. Elements that do not count add nothing. KEPT: `kept` may be given. */
template <bool FIXED, bool KEPT, typename Terms>
static __device__ int64_t xdi_cuda_sample_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, float *kept,
                                               xdi_cuda_sample_lanes *lanes, unsigned long long *limbs) {
    const xd_sample_args &a = terms.base();
    const int lane = (int)(threadIdx.x % XDI_CUDA_WARP);
    int64_t counted = 0;
    *lanes = xdi_cuda_sample_lanes();
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
        xdi_cuda_eight values = {};
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const int64_t i = tile.begin + step * (int)XD_SAMPLE_LANES + lane * (int)XDI_CUDA_EIGHT + j;
            if (i >= tile.end || (a.mask && !a.mask[b * a.elements + i])) continue;
            const xdi_cuda_sample_pair pair = terms.at(b, i);
            counted++;
            values.at[j] = pair.second;
            lanes->first[j] = xd_add(lanes->first[j], fabs((double)pair.first));
            lanes->second[j] = xd_add(lanes->second[j], xd_mul((double)pair.second, (double)pair.second));
            if (!FIXED || !isfinite(pair.first) || !isfinite(pair.second)) continue;
            int exponent;
            uint64_t mantissa = xd_norm_mantissa(pair.first, &exponent);
            xdi_cuda_limbs_add(limbs, mantissa, exponent + 320);
            mantissa = xd_norm_mantissa(pair.second, &exponent);
            xdi_cuda_limbs_add(limbs + XD_NORM_LIMBS, mantissa * mantissa, 2 * exponent + 320);
        }
        if (KEPT && kept && tile.begin + step * (int)XD_SAMPLE_LANES < tile.end) xdi_cuda_sample_keep(kept, step, values);
    }
    return counted;
}

/* All elements of the tile are there and count. */
template <typename Terms>
static __device__ inline bool xdi_cuda_sample_is_whole(const Terms &terms, xdi_cuda_sample_range tile) {
    return !terms.base().mask && tile.end - tile.begin == (int)XD_SAMPLE_TILE;
}

/* The lanes of a whole tile of such a type; false: not every number was in the range of that way. */
template <typename Terms>
static __device__ bool xdi_cuda_sample_add_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, float *kept,
                                                 xdi_cuda_sample_lanes *lanes, std::true_type) {
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    if (!xdi_cuda_sample_is_whole(terms, tile) || !eights.fits()) return false;
    xdi_cuda_sample_walk<Terms, 3>(terms, b, tile.begin, [&](int step, const xdi_cuda_raw<typename Terms::T> *in) {
        const xdi_cuda_eight second = eights.add(in, lanes, kept != nullptr);
        if (kept) xdi_cuda_sample_keep(kept, step, second);
    });
    return !__any_sync(0xffffffffu, !lanes->hold());
}

template <typename Terms>
static __device__ bool xdi_cuda_sample_add_whole(const Terms &, int64_t, xdi_cuda_sample_range, float *, xdi_cuda_sample_lanes *,
                                                 std::false_type) {
    return false;
}

/* The lanes of a tile; how many of its elements this thread has counted. */
template <bool FIXED, bool KEPT, typename Terms>
static __device__ int64_t xdi_cuda_sample_add(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, float *kept,
                                              xdi_cuda_sample_lanes *lanes, unsigned long long *limbs) {
    enum { GIVEN = !FIXED && xdi_cuda_is<typename Terms::T>::GIVEN };
    if (xdi_cuda_sample_add_whole(terms, b, tile, kept, lanes, std::integral_constant<bool, GIVEN != 0>()))
        return XDI_CUDA_SAMPLE_STEPS * (int)XDI_CUDA_EIGHT;
    return xdi_cuda_sample_each<FIXED, KEPT>(terms, b, tile, kept, lanes, limbs);
}

/* The sum over the tree; on every thread of the warp. */
static __device__ inline double xdi_cuda_sample_tree(double (&lanes)[XDI_CUDA_EIGHT]) {
    XD_UNROLL
    for (int apart = 1; apart < XDI_CUDA_EIGHT; apart *= 2) {
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j += 2 * apart) lanes[j] = xd_add(lanes[j], lanes[j + apart]);
    }
    XD_UNROLL
    for (int mask = 1; mask < XDI_CUDA_WARP; mask *= 2)
        lanes[0] = xd_add(lanes[0], xdi_cuda_shuffle_xor(lanes[0], mask));
    return lanes[0];
}

/* The sums of a range to out[xd_sample_words]; all threads of a block. When fixed, integers are added in shared memory. `kept`:
 * gets what the gradient is a multiple of, or NULL, always without KEPT; a thread reads only what it has written there itself. */
template <bool FIXED, bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_sums(const Terms &terms, int64_t b, xdi_cuda_sample_range range, int64_t *out,
                                            float *kept) {
    enum { WARPS = XDI_CUDA_SAMPLE_THREADS / (int)XDI_CUDA_WARP };
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    XD_SHARED(double, tiles, [2 * WARPS]);
    const int t = (int)threadIdx.x, warp = t / XDI_CUDA_WARP;
    if (FIXED && t < 2 * XD_NORM_LIMBS) limbs[t] = 0;
    if (FIXED) __syncthreads();
    xdi_cuda_sample_lanes lanes;
    int64_t counted = xdi_cuda_sample_add<FIXED, KEPT>(terms, b, xdi_cuda_sample_tile(range), kept, &lanes, limbs);
    const double first = xdi_cuda_sample_tree(lanes.first), second = xdi_cuda_sample_tree(lanes.second);
    if (t % XDI_CUDA_WARP == 0) tiles[warp] = first;
    if (t % XDI_CUDA_WARP == 0) tiles[WARPS + warp] = second;
    counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add()); /* behind its barriers the tiles are there */
    if (t == 0) {
        int64_t finding = XD_SAMPLE_FINE;
        double sums[2] = { 0.0, 0.0 };
        for (int k = 0; k < 2 * WARPS; k++) {
            if (xd_sample_finding(tiles[k]) > finding) finding = xd_sample_finding(tiles[k]);
            sums[k / WARPS] = xd_add(sums[k / WARPS], tiles[k]);
        }
        out[XD_SAMPLE_COUNTED] = counted;
        out[XD_SAMPLE_FINDING] = finding;
        if (!FIXED) memcpy(out + XD_SAMPLE_SUMS, sums, sizeof sums);
    }
    if (FIXED && t < 2) xd_norm_carry((int64_t *)limbs + t * XD_NORM_LIMBS);
    if (FIXED) __syncthreads();
    if (FIXED && t < 2 * XD_NORM_LIMBS) out[XD_SAMPLE_SUMS + t] = (int64_t)limbs[t];
}

/* ---- the gradient of a range, of what was KEPT of it or is read again ---- */

/* What eight numbers are multiplied by: the product in double, rounded to F32 and to the tensor's type. */
struct xdi_cuda_sample_factor {
    double factor;
    float near;
    bool exact; /* near is factor: the product in F32 is the same */
    bool close; /* near has a relative error of 2^-24, and enlarges nothing */

    explicit __device__ xdi_cuda_sample_factor(double by) : factor(by), near((float)by) {
        exact = (double)near == factor;
        close = fabs(factor) > 1e-30 && fabs(factor) <= 1.0;
    }
};

template <typename T>
static __device__ inline void xdi_cuda_sample_write8(T *to, const xdi_cuda_sample_factor &by, const xdi_cuda_eight &slope) {
    xdi_cuda_eight values;
    XD_UNROLL
    for (int j = 0; j < XDI_CUDA_EIGHT; j++) values.at[j] = (float)xd_mul(by.factor, (double)slope.at[j]);
    xdi_cuda_write_whole(to, values);
}

/* To BF16 by way of the product in F32, which is at most four steps of F32 off: true, and written, unless one of the eight is as
 * near as that to the middle of two numbers of BF16. */
static __device__ inline bool xdi_cuda_sample_write_near(xdi_cuda_bf16 *to, const xdi_cuda_sample_factor &by,
                                                         const xdi_cuda_eight &slope) {
    xdi_cuda_pack<uint32_t> words;
    uint32_t least = 0xffffu;
    XD_UNROLL
    for (int j = 0; j < XDI_CUDA_EIGHT; j += 2) {
        const uint32_t low = xd_bits_of_float(xd_mulf(by.near, slope.at[j])) + 0x8004u;
        const uint32_t high = xd_bits_of_float(xd_mulf(by.near, slope.at[j + 1])) + 0x8004u;
        least = (low & 0xffffu) < least ? low & 0xffffu : least;
        least = (high & 0xffffu) < least ? high & 0xffffu : least;
        words.at[j / 2] = xdi_cuda_upper_halves(low, high);
    }
    if (least <= 8) return false;
    xdi_cuda_store16(reinterpret_cast<uint32_t *>(to), words);
    return true;
}

/* slopes(true or false): exact, or cut off. All numbers are finite, as a sample with a finding has no factor. */
template <typename T, typename Slopes>
static __device__ inline void xdi_cuda_sample_put(T *to, const xdi_cuda_sample_factor &by, Slopes slopes) {
    xdi_cuda_sample_write8(to, by, slopes(std::true_type()));
}

template <typename Slopes>
static __device__ inline void xdi_cuda_sample_put(xdi_cuda_bf16 *to, const xdi_cuda_sample_factor &by, Slopes slopes) {
    if (by.exact) {
        xdi_cuda_eight values = slopes(std::true_type());
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) values.at[j] = xd_mulf(by.near, values.at[j]);
        xdi_cuda_write_whole(to, values);
        return;
    }
    if (by.close && xdi_cuda_sample_write_near(to, by, slopes(std::false_type()))) return;
    xdi_cuda_sample_write8(to, by, slopes(std::true_type()));
}

template <bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_write_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, double factor,
                                                  float *kept) {
    const xd_sample_args &a = terms.base();
    const xd_rows &out = terms.out();
    const bool none = a.sample[b].factor == 0.0;
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
        const int64_t first =
            tile.begin + step * (int)XD_SAMPLE_LANES + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL_N(1)
        for (int j = 0; j < XDI_CUDA_EIGHT && first + j < tile.end; j++) {
            const int64_t i = first + j;
            const bool counts = !none && (!a.mask || a.mask[b * a.elements + i]);
            const int at = j < 4 ? j : j - 4 + (int)XDI_CUDA_SAMPLE_HALF;
            const float slope = !counts ? 0.0f : KEPT ? xdi_cuda_sample_kept(kept, step)[at] : terms.slope(b, i);
            xd_sample_store(&out, b, i, none ? 0.0 : xd_mul(factor, (double)slope));
        }
    }
}

/* Of a whole tile of elements of a type; false: nothing is written. */
template <bool KEPT, typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, double factor,
                                                   float *kept, std::true_type) {
    typedef typename Terms::T T;
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    if (!xdi_cuda_sample_is_whole(terms, tile) || terms.base().sample[b].factor == 0.0 || !(KEPT || eights.fits())) return false;
    const xdi_cuda_sample_factor by(factor);
    T *to = xdi_cuda_row<T>(terms.out(), b) + (tile.begin + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT);
    if (KEPT) {
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
            const xdi_cuda_eight slope = xdi_cuda_sample_recall(kept, step);
            xdi_cuda_sample_put(to + step * (int)XD_SAMPLE_LANES, by, [&](auto) { return slope; });
        }
        return true;
    }
    xdi_cuda_sample_walk<Terms, Terms::SLOPE_INPUTS>(terms, b, tile.begin, [&](int step, const xdi_cuda_raw<T> *in) {
        xdi_cuda_sample_put(to + step * (int)XD_SAMPLE_LANES, by,
                            [&](auto exact) { return eights.template seconds<decltype(exact)::value>(in); });
    });
    return true;
}

template <bool KEPT, typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &, int64_t, xdi_cuda_sample_range, double, float *,
                                                   std::false_type) {
    return false;
}

template <bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_write(const Terms &terms, int64_t b, xdi_cuda_sample_range range, double whole,
                                             float *kept) {
    enum { GIVEN = xdi_cuda_is<typename Terms::T>::GIVEN };
    const double factor = xd_mul(terms.base().sample[b].factor, whole);
    const xdi_cuda_sample_range tile = xdi_cuda_sample_tile(range);
    if (!xdi_cuda_sample_write_whole<KEPT>(terms, b, tile, factor, kept, std::integral_constant<bool, GIVEN != 0>()))
        xdi_cuda_sample_write_each<KEPT>(terms, b, tile, factor, kept);
}
