/* Losses over samples, but for the way from samples to one value, which is in dmd_total.cu: kernel/cpu/dmd_loss.c is the
 * reference, kernel/dmd_loss.h has the formulas. Sums have the CPU's bits; so
 * have gradients, but for the terms on logits, whose exponentials are the GPU's. */

enum { XDI_CUDA_SAMPLE_THREADS = XD_SAMPLE_LANES };

/* ---- terms: what is added for an element, and what a gradient is a multiple of ---- */

struct xdi_cuda_sample_pair {
    float first, second; /* a magnitude and a square */
};

static __device__ inline float xdi_cuda_sample_load(const xd_rows &x, int64_t b, int64_t i) {
    return xdi_cuda_read_float(x.data, (uint8_t)x.dtype, b * (x.stride ? x.stride : x.cols) + i);
}

/* The sums of a thread over its elements of a tile, eight lanes of each, and what tells whether they were all in the range of the
 * integers' way to double. */
struct xdi_cuda_sample_lanes {
    double first[XDI_CUDA_EIGHT] = {}, second[XDI_CUDA_EIGHT] = {};
    xdi_cuda_finite finite;

    /* An infinity or a NaN of F32 has the place of numbers of 2^128 and more. */
    __device__ bool hold() const {
        double most = 0.0, most_square = 0.0;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            most = fmax(most, first[j]);
            most_square = fmax(most_square, second[j]);
        }
        return finite.holds() && most < 3.402823669209385e38 && most_square < 1.157920892373162e77; /* 2^128, 2^256 */
    }
};

/* Elements of T, or xdi_cuda_none: of any type, at any address, one at a time. SLOPE_INPUTS: the gradient needs the first of the
 * inputs. */
template <typename Storage> struct xdi_cuda_vsd_terms {
    typedef Storage T;
    enum { SLOPE_INPUTS = 2 };
    xd_vsd_args a;
    bool rounded;

    template <typename S> xdi_cuda_vsd_terms<S> of() const {
        return { a, rounded };
    }
    bool one_at_a_time() const {
        return rounded;
    }
    __host__ __device__ const xd_sample_args &base() const {
        return a.base;
    }
    __host__ __device__ const xd_rows &input(int k) const {
        return k == 0 ? a.fake : k == 1 ? a.teacher : a.generated;
    }
    __host__ __device__ const xd_rows &out() const {
        return a.gradient;
    }
    __device__ void weigh(int64_t b) const {
        xd_vsd_weigh_sample(&a, b);
    }
    __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
        const float x = xdi_cuda_sample_load(a.generated, b, i), t = xdi_cuda_sample_load(a.teacher, b, i),
                    f = xdi_cuda_sample_load(a.fake, b, i);
        if (rounded)
            return { 0.0f, xd_vsd_step(a.generated.dtype, (float)a.base.sample[b].weight, x, t, f) };
        return { xd_subf(x, t), xd_subf(f, t) };
    }
    /* x may be under the gradient already, and only COMPAT needs it. */
    __device__ float slope(int64_t b, int64_t i) const {
        if (rounded) return at(b, i).second;
        return xd_subf(xdi_cuda_sample_load(a.fake, b, i), xdi_cuda_sample_load(a.teacher, b, i));
    }
};

/* What a thread does with eight elements of a sample. seconds(): what the gradient is a multiple of; add() returns it too, where
 * somebody keeps it. */
template <typename Terms> struct xdi_cuda_sample_eights;

template <typename Storage> struct xdi_cuda_sample_eights<xdi_cuda_vsd_terms<Storage> > {
    __device__ xdi_cuda_sample_eights(const xdi_cuda_vsd_terms<Storage> &, int64_t) {}
    __device__ bool fits() const {
        return true;
    }
    template <bool EXACT> __device__ xdi_cuda_eight seconds(const xdi_cuda_raw<Storage> *in) const {
        xdi_cuda_eight f = in[0].widened();
        const xdi_cuda_eight t = in[1].widened();
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) f.at[j] = xd_subf(f.at[j], t.at[j]);
        return f;
    }
    __device__ xdi_cuda_eight add(const xdi_cuda_raw<Storage> *in, xdi_cuda_sample_lanes *lanes, bool) const {
        const xdi_cuda_eight t = in[1].widened(), x = in[2].widened(), second = seconds<true>(in);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const uint32_t first = xd_bits_of_float(xd_subf(x.at[j], t.at[j])) & 0x7fffffffu;
            const uint32_t other = xd_bits_of_float(second.at[j]) & 0x7fffffffu;
            const double root = xd_mul(xdi_cuda_lowered(other), XDI_CUDA_RAISE);
            lanes->first[j] = xd_fma(xdi_cuda_lowered(first), XDI_CUDA_RAISE, lanes->first[j]);
            lanes->second[j] = xd_fma(root, root, lanes->second[j]);
        }
        return second;
    }
};

template <typename Storage> struct xdi_cuda_denoise_terms {
    typedef Storage T;
    enum { SLOPE_INPUTS = 3 };
    xd_denoise_args a;

    template <typename S> xdi_cuda_denoise_terms<S> of() const {
        return { a };
    }
    bool one_at_a_time() const {
        return false;
    }
    __host__ __device__ const xd_sample_args &base() const {
        return a.base;
    }
    __host__ __device__ const xd_rows &input(int k) const {
        return k == 0 ? a.prediction : k == 1 ? a.clean : a.noise;
    }
    __host__ __device__ const xd_rows &out() const {
        return a.gradient;
    }
    __device__ void weigh(int64_t b) const {
        xd_denoise_weigh_sample(&a, b);
    }
    __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
        return { 0.0f, xd_denoise_residual(a.terms + b, xdi_cuda_sample_load(a.prediction, b, i),
                                           xdi_cuda_sample_load(a.clean, b, i), xdi_cuda_sample_load(a.noise, b, i)) };
    }
    __device__ float slope(int64_t b, int64_t i) const {
        return at(b, i).second;
    }
};

template <typename Storage> struct xdi_cuda_sample_eights<xdi_cuda_denoise_terms<Storage> > {
    xd_denoise_term term;

    __device__ xdi_cuda_sample_eights(const xdi_cuda_denoise_terms<Storage> &terms, int64_t b) : term(terms.a.terms[b]) {}
    __device__ bool fits() const {
        return true;
    }
    template <bool EXACT> __device__ xdi_cuda_eight seconds(const xdi_cuda_raw<Storage> *in) const {
        const xdi_cuda_eight p = in[0].widened(), x = in[1].widened(), e = in[2].widened();
        xdi_cuda_eight second;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) second.at[j] = xd_denoise_residual(&term, p.at[j], x.at[j], e.at[j]);
        return second;
    }
    __device__ xdi_cuda_eight add(const xdi_cuda_raw<Storage> *in, xdi_cuda_sample_lanes *lanes, bool) const {
        const xdi_cuda_eight second = seconds<true>(in);
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const uint32_t bits = xd_bits_of_float(second.at[j]) & 0x7fffffffu;
            const double root = xd_mul(xdi_cuda_lowered(bits), XDI_CUDA_RAISE);
            lanes->second[j] = xd_fma(root, root, lanes->second[j]);
        }
        return second;
    }
};

/* Of BF16: lowered elements, whose sum is the lowered residual, and rounding in integers. With factors of 2^-22 or more, all
 * products are multiples of 2^-178, the smallest double lowered, so that a subnormal sum is exact as well. */
template <> struct xdi_cuda_sample_eights<xdi_cuda_denoise_terms<xdi_cuda_bf16> > {
    double prediction, clean, noise;

    __device__ xdi_cuda_sample_eights(const xdi_cuda_denoise_terms<xdi_cuda_bf16> &terms, int64_t b)
        : prediction((double)(float)terms.a.terms[b].prediction), clean((double)(float)terms.a.terms[b].clean),
          noise((double)(float)terms.a.terms[b].noise) {}
    static __device__ bool is_large(double factor) {
        return factor == 0.0 || (fabs(factor) >= 2.384185791015625e-7 && isfinite(factor)); /* 2^-22 */
    }
    __device__ bool fits() const {
        return is_large(prediction) && is_large(clean) && is_large(noise);
    }
    __device__ double sum(double p, double x, double e) const {
        return xd_fma(noise, e, xd_fma(clean, x, xd_mul(prediction, p)));
    }
    /* Lowered, of halves `upper` of three words. */
    __device__ double residual(bool upper, uint32_t p, uint32_t x, uint32_t e) const {
        return upper ? sum(xdi_cuda_upper_half(p), xdi_cuda_upper_half(x), xdi_cuda_upper_half(e))
                     : sum(xdi_cuda_lower_half(p), xdi_cuda_lower_half(x), xdi_cuda_lower_half(e));
    }
    /* Not EXACT: cut off to F32, where rounding is exact. */
    template <bool EXACT> __device__ xdi_cuda_eight seconds(const xdi_cuda_raw<xdi_cuda_bf16> *in) const {
        xdi_cuda_eight second;
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const double r = residual(j % 2 != 0, in[0].pairs.at[j / 2], in[1].pairs.at[j / 2], in[2].pairs.at[j / 2]);
            second.at[j] = xdi_cuda_raised(EXACT ? __longlong_as_double((long long)xdi_cuda_as_f32_bits(r)) : r);
        }
        return second;
    }
    __device__ xdi_cuda_eight add(const xdi_cuda_raw<xdi_cuda_bf16> *in, xdi_cuda_sample_lanes *lanes, bool keeps) const {
        xdi_cuda_eight second = {};
        XD_UNROLL
        for (int j = 0; j < XDI_CUDA_EIGHT; j++) {
            const uint32_t p = in[0].pairs.at[j / 2], x = in[1].pairs.at[j / 2], e = in[2].pairs.at[j / 2];
            const double r = xdi_cuda_as_f32(residual(j % 2 != 0, p, x, e)), root = xd_mul(r, XDI_CUDA_RAISE);
            if (j % 2 == 0) lanes->finite.note(p, x, e);
            lanes->second[j] = xd_fma(root, root, lanes->second[j]);
            if (keeps) second.at[j] = xdi_cuda_raised(r);
        }
        return second;
    }
};

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

/* The same sums of any tile: an element at a time. Elements that do not count add nothing. */
template <bool FIXED, typename Terms>
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
        if (kept && tile.begin + step * (int)XD_SAMPLE_LANES < tile.end) xdi_cuda_sample_keep(kept, step, values);
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
template <bool FIXED, typename Terms>
static __device__ int64_t xdi_cuda_sample_add(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, float *kept,
                                              xdi_cuda_sample_lanes *lanes, unsigned long long *limbs) {
    enum { GIVEN = !FIXED && xdi_cuda_is<typename Terms::T>::GIVEN };
    if (xdi_cuda_sample_add_whole(terms, b, tile, kept, lanes, std::integral_constant<bool, GIVEN != 0>()))
        return XDI_CUDA_SAMPLE_STEPS * (int)XDI_CUDA_EIGHT;
    return xdi_cuda_sample_each<FIXED>(terms, b, tile, kept, lanes, limbs);
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
 * gets what the gradient is a multiple of, or NULL; a thread reads only what it has written there itself. */
template <bool FIXED, typename Terms>
static __device__ void xdi_cuda_sample_sums(const Terms &terms, int64_t b, xdi_cuda_sample_range range, int64_t *out,
                                            float *kept) {
    enum { WARPS = XDI_CUDA_SAMPLE_THREADS / (int)XDI_CUDA_WARP };
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    XD_SHARED(double, tiles, [2 * WARPS]);
    const int t = (int)threadIdx.x, warp = t / XDI_CUDA_WARP;
    if (FIXED && t < 2 * XD_NORM_LIMBS) limbs[t] = 0;
    if (FIXED) __syncthreads();
    xdi_cuda_sample_lanes lanes;
    int64_t counted = xdi_cuda_sample_add<FIXED>(terms, b, xdi_cuda_sample_tile(range), kept, &lanes, limbs);
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

/* ---- the gradient of a range, of what was kept of it or is read again ---- */

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

template <typename Terms>
static __device__ void xdi_cuda_sample_write_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, double factor,
                                                  float *kept) {
    const xd_sample_args &a = terms.base();
    const xd_rows &out = terms.out();
    const bool none = a.sample[b].factor == 0.0;
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
        const int64_t first =
            tile.begin + step * (int)XD_SAMPLE_LANES + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        for (int j = 0; j < XDI_CUDA_EIGHT && first + j < tile.end; j++) {
            const int64_t i = first + j;
            const bool counts = !none && (!a.mask || a.mask[b * a.elements + i]);
            const int at = j < 4 ? j : j - 4 + (int)XDI_CUDA_SAMPLE_HALF;
            const float slope = !counts ? 0.0f : kept ? xdi_cuda_sample_kept(kept, step)[at] : terms.slope(b, i);
            xd_sample_store(&out, b, i, none ? 0.0 : xd_mul(factor, (double)slope));
        }
    }
}

/* Of a whole tile of elements of a type; false: nothing is written. */
template <typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, double factor,
                                                   float *kept, std::true_type) {
    typedef typename Terms::T T;
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    if (!xdi_cuda_sample_is_whole(terms, tile) || terms.base().sample[b].factor == 0.0 || !(kept || eights.fits())) return false;
    const xdi_cuda_sample_factor by(factor);
    T *to = xdi_cuda_row<T>(terms.out(), b) + (tile.begin + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT);
    if (kept) {
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

template <typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &, int64_t, xdi_cuda_sample_range, double, float *,
                                                   std::false_type) {
    return false;
}

template <typename Terms>
static __device__ void xdi_cuda_sample_write(const Terms &terms, int64_t b, xdi_cuda_sample_range range, double whole,
                                             float *kept) {
    enum { GIVEN = xdi_cuda_is<typename Terms::T>::GIVEN };
    const double factor = xd_mul(terms.base().sample[b].factor, whole);
    const xdi_cuda_sample_range tile = xdi_cuda_sample_tile(range);
    if (!xdi_cuda_sample_write_whole(terms, b, tile, factor, kept, std::integral_constant<bool, GIVEN != 0>()))
        xdi_cuda_sample_write_each(terms, b, tile, factor, kept);
}

/* ---- measure: grid (rows x chunks), block XD_SAMPLE_LANES; reads every element once. ---- */

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : 0)
    xdi_cuda_sample_measure_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const uint32_t b = blockIdx.x / chunks;
    const int64_t words = xd_sample_words(FIXED);
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), blockIdx.x - b * chunks);
    xdi_cuda_sample_sums<FIXED>(terms, b, range, terms.base().parts + (int64_t)blockIdx.x * words, nullptr);
}

/* ---- slope: the same grid; one read of what the term needs, one write. ---- */

template <typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, 1)
    xdi_cuda_sample_slope_kernel(const __grid_constant__ Terms terms, uint32_t chunks) {
    const uint32_t b = blockIdx.x / chunks;
    const xdi_cuda_sample_range range = xdi_cuda_sample_chunk(terms.base(), blockIdx.x - b * chunks);
    xdi_cuda_sample_write(terms, b, range, *terms.base().factor, nullptr);
}

/* ---- by sample: a block a sample, whose only chunk it keeps in shared memory, 64 KiB at most, so nothing is read twice: three
 * reads and one write of an element in place of the six or seven that measure and slope make, and one launch for three. That
 * predicts, in f32, 16 bytes an element for 24 of the student's term and 28 of denoising. A sample of more chunks stays with those:
 * they have a block for each chunk, and one block alone would get the bandwidth of one multiprocessor for all of it. ---- */

enum { XDI_CUDA_BY_SAMPLE = XD_SAMPLE_CHUNK };

template <bool FIXED, typename Terms>
static __global__ void __launch_bounds__(XDI_CUDA_SAMPLE_THREADS, FIXED ? 1 : 0)
    xdi_cuda_by_sample_kernel(const __grid_constant__ Terms terms) {
    XD_DYN_SHARED(float, kept);
    XD_SHARED(double, whole, [1]);
    const xd_sample_args &a = terms.base();
    const int64_t b = (int64_t)blockIdx.x;
    const xdi_cuda_sample_range range = { 0, a.elements };
    const bool slope = terms.out().data != nullptr;
    xdi_cuda_sample_sums<FIXED>(terms, b, range, a.sums + b * xd_sample_words(FIXED), slope ? kept : nullptr);
    __syncthreads(); /* the sums are there for the first thread */
    if (threadIdx.x == 0) {
        terms.weigh(b);
        *whole = xd_sample_factor(&a, xd_sample_denominator(&a, a.samples * a.elements));
    }
    __syncthreads();
    if (slope) xdi_cuda_sample_write(terms, b, range, *whole, kept);
}

/* ---- the type that all tensors have ---- */

static bool xdi_cuda_sample_is_even(const xd_rows &x, xd_dtype dtype) {
    return x.dtype == dtype && xdi_cuda_is_aligned16(x.data) && xdi_cuda_stride(x) % XDI_CUDA_EIGHT == 0;
}

/* Calls launch(terms of that type), or of none: then elements are read one at a time. */
template <typename Terms, typename Launch> static xd_result xdi_cuda_sample_typed(const Terms &terms, Launch launch) {
    const xd_dtype dtype = terms.input(0).dtype;
    bool even = !terms.base().mask && !terms.one_at_a_time();
    for (int k = 0; k < 3; k++) even = even && xdi_cuda_sample_is_even(terms.input(k), dtype);
    if (terms.out().data) even = even && xdi_cuda_sample_is_even(terms.out(), dtype);
    if (!even) return launch(terms);
    XDI_CUDA_FLOATS(dtype, T, return launch(terms.template of<T>());)
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_by_sample_launch(const xd_launch *launch, const Terms &terms) {
    const xd_sample_args &a = terms.base();
    const int64_t room = (a.elements + XD_SAMPLE_LANES - 1) / XD_SAMPLE_LANES * XD_SAMPLE_LANES;
    const xdi_cuda_grid grid = xdi_cuda_grid_of(a.samples, XDI_CUDA_SAMPLE_THREADS, (size_t)room * sizeof(float));
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_by_sample_kernel<FIXED, Terms>, terms);
}

template <typename Terms> static xd_result xdi_cuda_by_sample(const xd_launch *launch, const Terms &terms,
                                                              const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    XD_REQUIRE(launch->ctx, a->elements <= XDI_CUDA_BY_SAMPLE, XD_ERROR_ARGUMENT,
               "a sample of %lld elements; %lld are finished at once", (long long)a->elements,
               (long long)XDI_CUDA_BY_SAMPLE);
    if (a->samples == 0) return XD_OK;
    if (a->fixed) return xdi_cuda_by_sample_launch<true>(launch, terms);
    return xdi_cuda_sample_typed(terms, [&](const auto &typed) { return xdi_cuda_by_sample_launch<false>(launch, typed); });
}

template <bool FIXED, typename Terms>
static xd_result xdi_cuda_sample_measure_launch(const xd_launch *launch, const Terms &terms, int64_t chunks) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_measure_kernel<FIXED, Terms>, terms, (uint32_t)chunks);
}

template <typename Terms> static xd_result xdi_cuda_sample_measure(const xd_launch *launch, const Terms &terms,
                                                                   const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    if (a->fixed) return xdi_cuda_sample_measure_launch<true>(launch, terms, chunks);
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_measure_launch<false>(launch, typed, chunks); });
}

template <typename Terms>
static xd_result xdi_cuda_sample_slope_launch(const xd_launch *launch, const Terms &terms, int64_t chunks) {
    const xdi_cuda_grid grid = xdi_cuda_grid_of(terms.base().samples * chunks, XDI_CUDA_SAMPLE_THREADS);
    return XDI_CUDA_LAUNCH(launch, grid, xdi_cuda_sample_slope_kernel<Terms>, terms, (uint32_t)chunks);
}

template <typename Terms> static xd_result xdi_cuda_sample_slope(const xd_launch *launch, const Terms &terms,
                                                                 const xd_sample_args *a) {
    xdi_cuda_scope scope(launch);
    XD_TRY(scope.result);
    const int64_t chunks = xd_sample_chunks(a->elements);
    if (a->samples * chunks == 0) return XD_OK;
    return xdi_cuda_sample_typed(
        terms, [&](const auto &typed) { return xdi_cuda_sample_slope_launch(launch, typed, chunks); });
}

typedef xdi_cuda_vsd_terms<xdi_cuda_none> xdi_cuda_vsd_any;
typedef xdi_cuda_denoise_terms<xdi_cuda_none> xdi_cuda_denoise_any;

static xd_result xdi_cuda_vsd_measure(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_any{ *args, false }, &args->base);
}

static xd_result xdi_cuda_vsd_rounded(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_vsd_any{ *args, true }, &args->base);
}

static xd_result xdi_cuda_vsd_slope(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_vsd_any{ *args, args->form == XD_VSD_COMPAT }, &args->base);
}

static xd_result xdi_cuda_denoise_measure(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_measure(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

static xd_result xdi_cuda_denoise_slope(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_sample_slope(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

static xd_result xdi_cuda_vsd_by_sample(const xd_launch *launch, const xd_vsd_args *args) {
    return xdi_cuda_by_sample(launch, xdi_cuda_vsd_any{ *args, false }, &args->base);
}

static xd_result xdi_cuda_denoise_by_sample(const xd_launch *launch, const xd_denoise_args *args) {
    return xdi_cuda_by_sample(launch, xdi_cuda_denoise_any{ *args }, &args->base);
}

/* ---- a thread for each sample ---- */

#define XDI_CUDA_EACH_SAMPLE(name, type, base, call)                                                               \
    static __global__ void XDI_CUDA_KERNEL xdi_cuda_##name##_kernel(const __grid_constant__ type args) {           \
        const int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;                                          \
        if (b < args.base samples) call(&args, b);                                                                 \
    }                                                                                                              \
    static xd_result xdi_cuda_##name(const xd_launch *launch, const type *args) {                                  \
        xdi_cuda_scope scope(launch);                                                                              \
        XD_TRY(scope.result);                                                                                      \
        if (args->base samples == 0) return XD_OK;                                                                 \
        const int64_t blocks = (args->base samples + XDI_CUDA_WARP - 1) / XDI_CUDA_WARP;                           \
        return XDI_CUDA_LAUNCH(launch, xdi_cuda_grid_of(blocks, XDI_CUDA_WARP), xdi_cuda_##name##_kernel, *args);  \
    }

XDI_CUDA_EACH_SAMPLE(vsd_weigh, xd_vsd_args, base., xd_vsd_weigh_sample)
XDI_CUDA_EACH_SAMPLE(vsd_settle, xd_vsd_args, base., xd_vsd_settle_sample)
XDI_CUDA_EACH_SAMPLE(denoise_weigh, xd_denoise_args, base., xd_denoise_weigh_sample)
XDI_CUDA_EACH_SAMPLE(gan_terms, xd_gan_args, base., xd_gan_sample)
XDI_CUDA_EACH_SAMPLE(gan_slope, xd_gan_args, base., xd_gan_slope_sample)
XDI_CUDA_EACH_SAMPLE(sample_join, xd_sample_args, , xd_sample_join_chunks)

/* ---- the table ---- */

/* The dynamic shared memory is more than a block has unasked. */
template <typename... Parameters>
static xd_result xdi_cuda_by_sample_load(xd_ctx *ctx, void (*kernel)(Parameters...)) {
    XD_TRY(xdi_cuda_load(ctx, kernel));
    return XDI_CUDA_CHECK(ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    (int)(XDI_CUDA_BY_SAMPLE * sizeof(float))));
}

template <typename Terms> static xd_result xdi_cuda_sample_load_type(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<false, Terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<false, Terms>));
    return xdi_cuda_load(ctx, xdi_cuda_sample_slope_kernel<Terms>);
}

template <typename Terms> static xd_result xdi_cuda_sample_load_types(xd_ctx *ctx) {
    const Terms terms = {};
    XD_TRY(xdi_cuda_by_sample_load(ctx, xdi_cuda_by_sample_kernel<true, Terms>));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_measure_kernel<true, Terms>));
    XD_TRY(xdi_cuda_sample_load_type<Terms>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<decltype(terms.template of<float>())>(ctx));
    XD_TRY(xdi_cuda_sample_load_type<decltype(terms.template of<xdi_cuda_bf16>())>(ctx));
    return xdi_cuda_sample_load_type<decltype(terms.template of<xdi_cuda_f16>())>(ctx);
}

static xd_result xdi_cuda_dmd_loss_load(xd_ctx *ctx) {
    XD_TRY(xdi_cuda_sample_load_types<xdi_cuda_vsd_any>(ctx));
    XD_TRY(xdi_cuda_sample_load_types<xdi_cuda_denoise_any>(ctx));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_vsd_settle_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_denoise_weigh_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_terms_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_gan_slope_kernel));
    XD_TRY(xdi_cuda_load(ctx, xdi_cuda_sample_join_kernel));
    return xdi_cuda_dmd_total_load(ctx);
}

static xd_dmd_loss_kernels xdi_cuda_dmd_loss_table() {
    xd_dmd_loss_kernels kernels = {};
    kernels.vsd_measure = xdi_cuda_vsd_measure;
    kernels.vsd_weigh = xdi_cuda_vsd_weigh;
    kernels.vsd_rounded = xdi_cuda_vsd_rounded;
    kernels.vsd_settle = xdi_cuda_vsd_settle;
    kernels.vsd_slope = xdi_cuda_vsd_slope;
    kernels.denoise_measure = xdi_cuda_denoise_measure;
    kernels.denoise_weigh = xdi_cuda_denoise_weigh;
    kernels.denoise_slope = xdi_cuda_denoise_slope;
    kernels.gan_terms = xdi_cuda_gan_terms;
    kernels.gan_slope = xdi_cuda_gan_slope;
    kernels.join = xdi_cuda_sample_join;
    kernels.total = xdi_cuda_sample_total;
    kernels.finish = xdi_cuda_sample_finish;
    kernels.fdistill_ratios = xdi_cuda_fdistill_ratios;
    kernels.fdistill_bins = xdi_cuda_fdistill_bins;
    kernels.fdistill_weights = xdi_cuda_fdistill_weights;
    kernels.vsd_by_sample = xdi_cuda_vsd_by_sample;
    kernels.denoise_by_sample = xdi_cuda_denoise_by_sample;
    kernels.by_sample_elements = XDI_CUDA_BY_SAMPLE;
    return kernels;
}
