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

/* Where the numbers go that the gradient is a multiple of, eight a step. ready(): that place, once the first elements are on their
 * way. Nowhere; */
struct xdi_cuda_sample_nowhere {
    enum { WANTS = 0 };
    __device__ xdi_cuda_sample_nowhere ready() const {
        return *this;
    }
    __device__ void whole(int, const xdi_cuda_eight &) const {}
    __device__ void some(int, xdi_cuda_sample_range, const xdi_cuda_eight &) const {}
};

/* into shared memory, of which a thread reads only what it has written there itself. */
struct xdi_cuda_sample_keeper {
    enum { WANTS = 1 };
    float *kept;
    __device__ xdi_cuda_sample_keeper ready() const {
        return *this;
    }
    __device__ void whole(int step, const xdi_cuda_eight &values) const {
        xdi_cuda_sample_keep(kept, step, values);
    }
    __device__ void some(int step, xdi_cuda_sample_range tile, const xdi_cuda_eight &values) const {
        if (tile.begin + step * (int)XD_SAMPLE_LANES < tile.end) xdi_cuda_sample_keep(kept, step, values);
    }
};

/* The eights of a whole tile: the first are asked for when it is made, so that other loads and factors do not come before. */
template <typename Terms, int INPUTS> struct xdi_cuda_sample_walk {
    typedef typename Terms::T T;
    enum { AHEAD = Terms::AHEAD };
    const T *from[INPUTS];
    xdi_cuda_raw<T> ahead[AHEAD][INPUTS];

    __device__ xdi_cuda_sample_walk(const Terms &terms, int64_t b, int64_t begin) {
        const int64_t first = begin + (int)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) from[k] = xdi_cuda_row<const T>(terms.input(k), b) + first;
        XD_UNROLL
        for (int i = 0; i < AHEAD; i++) {
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) ahead[i][k].load(from[k] + i * (int)XD_SAMPLE_LANES);
        }
    }
    /* Calls use(step, inputs) for each, the next steps on their way. */
    template <typename Use> __device__ void each(Use use) {
        XD_UNROLL_N(1)
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step += AHEAD) {
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) from[k] += AHEAD * (int)XD_SAMPLE_LANES;
            XD_UNROLL
            for (int i = 0; i < AHEAD; i++) {
                xdi_cuda_raw<T> now[INPUTS];
                XD_UNROLL
                for (int k = 0; k < INPUTS; k++) {
                    now[k] = ahead[i][k];
                    if (step + AHEAD < XDI_CUDA_SAMPLE_STEPS) ahead[i][k].load(from[k] + i * (int)XD_SAMPLE_LANES);
                }
                use(step + i, now);
            }
        }
    }
};

/* The same through shared memory, by copies that hold no register. A thread reads only what it has asked for. */
template <typename Terms, int INPUTS> struct xdi_cuda_sample_stream {
    typedef typename Terms::T T;
    enum { STAGES = 2 };
    const T *from[INPUTS];
    T (*room)[INPUTS][XDI_CUDA_SAMPLE_THREADS][XDI_CUDA_EIGHT]; /* of each stage */

    __device__ xdi_cuda_sample_stream(const Terms &terms, int64_t b, int64_t begin) {
        XD_SHARED(xdi_cuda_bits16, bytes, [STAGES * INPUTS * XDI_CUDA_SAMPLE_THREADS * XDI_CUDA_EIGHT * sizeof(T) / 16]);
        const int64_t first = begin + (int)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        room = reinterpret_cast<T(*)[INPUTS][XDI_CUDA_SAMPLE_THREADS][XDI_CUDA_EIGHT]>(bytes);
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) from[k] = xdi_cuda_row<const T>(terms.input(k), b) + first;
        XD_UNROLL
        for (int i = 0; i < STAGES; i++) ask(i);
    }
    template <typename Use> __device__ void each(Use use) {
        XD_UNROLL_N(1)
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
            xdi_cuda_raw<T> now[INPUTS];
            xdi_cuda_copies_wait<STAGES - 1>();
            XD_UNROLL
            for (int k = 0; k < INPUTS; k++) now[k].load(&room[step % STAGES][k][threadIdx.x][0]);
            if (step + STAGES < XDI_CUDA_SAMPLE_STEPS)
                ask(step % STAGES);
            else
                xdi_cuda_copies_group();
            use(step, now);
        }
    }

  private:
    /* For the next step. */
    __device__ void ask(int stage) {
        XD_UNROLL
        for (int k = 0; k < INPUTS; k++) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i += xdi_cuda_pack<T>::COUNT)
                xdi_cuda_copy16(&room[stage][k][threadIdx.x][i], from[k] + i);
            from[k] += XD_SAMPLE_LANES;
        }
        xdi_cuda_copies_group();
    }
};

/* The one that terms ask for. */
template <typename Terms, int INPUTS>
using xdi_cuda_sample_way = typename std::conditional<Terms::STREAMS != 0, xdi_cuda_sample_stream<Terms, INPUTS>,
                                                      xdi_cuda_sample_walk<Terms, INPUTS> >::type;

/* The same sums of any tile: an element at a time. Elements that do not count add nothing. */
template <bool FIXED, typename Terms, typename Sink>
static __device__ int64_t xdi_cuda_sample_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, const Sink &sink,
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
        sink.some(step, tile, values);
    }
    return counted;
}

/* All elements of the tile are there and count. */
template <typename Terms>
static __device__ inline bool xdi_cuda_sample_is_whole(const Terms &terms, xdi_cuda_sample_range tile) {
    return !terms.base().mask && tile.end - tile.begin == (int)XD_SAMPLE_TILE;
}

/* The lanes of a whole tile of such a type; false: not every number was in the range of that way. */
template <typename Terms, typename Sink>
static __device__ bool xdi_cuda_sample_add_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, const Sink &sink,
                                                 xdi_cuda_sample_lanes *lanes, std::true_type) {
    if (!xdi_cuda_sample_is_whole(terms, tile)) return false;
    xdi_cuda_sample_way<Terms, 3> walk(terms, b, tile.begin);
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    const auto to = sink.ready();
    if (!eights.fits()) return false;
    walk.each([&](int step, const xdi_cuda_raw<typename Terms::T> *in) { to.whole(step, eights.add(in, lanes, Sink::WANTS != 0)); });
    return !__any_sync(0xffffffffu, !lanes->hold());
}

template <typename Terms, typename Sink>
static __device__ bool xdi_cuda_sample_add_whole(const Terms &, int64_t, xdi_cuda_sample_range, const Sink &,
                                                 xdi_cuda_sample_lanes *, std::false_type) {
    return false;
}

/* The lanes of a tile; how many of its elements this thread has counted. */
template <bool FIXED, typename Terms, typename Sink>
static __device__ int64_t xdi_cuda_sample_add(const Terms &terms, int64_t b, xdi_cuda_sample_range tile, const Sink &sink,
                                              xdi_cuda_sample_lanes *lanes, unsigned long long *limbs) {
    enum { GIVEN = !FIXED && xdi_cuda_is<typename Terms::T>::GIVEN };
    if (xdi_cuda_sample_add_whole(terms, b, tile, sink, lanes, std::integral_constant<bool, GIVEN != 0>()))
        return XDI_CUDA_SAMPLE_STEPS * (int)XDI_CUDA_EIGHT;
    return xdi_cuda_sample_each<FIXED>(terms, b, tile, sink.ready(), lanes, limbs);
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

enum { XDI_CUDA_SAMPLE_WARPS = XDI_CUDA_SAMPLE_THREADS / (int)XDI_CUDA_WARP };

/* What the tiles of a range come to, in order, to words behind XD_SAMPLE_FINDING; the first warp. Its lanes 0 and 1 add a sum each. */
static __device__ inline void xdi_cuda_sample_add_tiles(const double *tiles, int64_t *words, bool fixed) {
    enum { WARPS = XDI_CUDA_SAMPLE_WARPS };
    const int lane = (int)threadIdx.x;
    const double tile = tiles[lane % (2 * WARPS)];
    const bool nan = __any_sync(0xffffffffu, isnan(tile)), infinite = __any_sync(0xffffffffu, !isfinite(tile));
    double sum = 0.0;
    if (lane < 2)
        for (int k = 0; k < WARPS; k++) sum = xd_add(sum, tiles[lane * WARPS + k]);
    if (lane < 2 && !fixed) words[XD_SAMPLE_SUMS + lane] = __double_as_longlong(sum);
    if (lane == 0) words[XD_SAMPLE_FINDING] = nan ? XD_SAMPLE_NAN : infinite ? XD_SAMPLE_INFINITE : XD_SAMPLE_FINE;
}

/* The sums of a range to out[xd_sample_words], which the first threads write; all threads of a block. When fixed, integers are added
 * in shared memory. */
template <bool FIXED, typename Terms, typename Sink>
static __device__ void xdi_cuda_sample_sums(const Terms &terms, int64_t b, xdi_cuda_sample_range range, int64_t *out,
                                            const Sink &sink) {
    enum { WARPS = XDI_CUDA_SAMPLE_WARPS };
    XD_SHARED(unsigned long long, limbs, [2 * XD_NORM_LIMBS]);
    XD_SHARED(double, tiles, [2 * WARPS]);
    const int t = (int)threadIdx.x, warp = t / XDI_CUDA_WARP;
    if (FIXED && t < 2 * XD_NORM_LIMBS) limbs[t] = 0;
    if (FIXED) __syncthreads();
    xdi_cuda_sample_lanes lanes;
    int64_t counted = xdi_cuda_sample_add<FIXED>(terms, b, xdi_cuda_sample_tile(range), sink, &lanes, limbs);
    const double first = xdi_cuda_sample_tree(lanes.first), second = xdi_cuda_sample_tree(lanes.second);
    if (t % XDI_CUDA_WARP == 0) tiles[warp] = first;
    if (t % XDI_CUDA_WARP == 0) tiles[WARPS + warp] = second;
    __syncthreads();
    if (terms.base().mask)
        counted = xdi_cuda_block_reduce(counted, (int64_t)0, xdi_cuda_add());
    else
        counted = range.end - range.begin;
    if (t == 0) out[XD_SAMPLE_COUNTED] = counted;
    if (warp == 0) xdi_cuda_sample_add_tiles(tiles, out, FIXED);
    if (FIXED && t < 2) xd_norm_carry((int64_t *)limbs + t * XD_NORM_LIMBS);
    if (FIXED) __syncthreads();
    if (FIXED && t < 2 * XD_NORM_LIMBS) out[XD_SAMPLE_SUMS + t] = (int64_t)limbs[t];
}

/* ---- the gradient of a range, of what was kept of it (KEPT) or is read again ---- */

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

/* The factor of a sample's gradient; `none`: it is all zero, as of a sample with a finding. */
struct xdi_cuda_sample_by {
    double factor;
    bool none;
};

static __device__ inline xdi_cuda_sample_by xdi_cuda_sample_by_of(double factor, double whole) {
    return { xd_mul(factor, whole), factor == 0.0 };
}

template <bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_write_each(const Terms &terms, int64_t b, xdi_cuda_sample_range tile,
                                                  xdi_cuda_sample_by by, float *kept) {
    const xd_sample_args &a = terms.base();
    const xd_rows &out = terms.out();
    for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
        const int64_t first =
            tile.begin + step * (int)XD_SAMPLE_LANES + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL_N(1)
        for (int j = 0; j < XDI_CUDA_EIGHT && first + j < tile.end; j++) {
            const int64_t i = first + j;
            const bool counts = !by.none && (!a.mask || a.mask[b * a.elements + i]);
            const int at = j < 4 ? j : j - 4 + (int)XDI_CUDA_SAMPLE_HALF;
            const float slope = !counts ? 0.0f : KEPT ? xdi_cuda_sample_kept(kept, step)[at] : terms.slope(b, i);
            xd_sample_store(&out, b, i, by.none ? 0.0 : xd_mul(by.factor, (double)slope));
        }
    }
}

/* Where a thread's first eight of a tile's gradient go. */
template <typename Terms>
static __device__ typename Terms::T *xdi_cuda_sample_to(const Terms &terms, int64_t b, xdi_cuda_sample_range tile) {
    return xdi_cuda_row<typename Terms::T>(terms.out(), b) +
           (tile.begin + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT);
}

/* Of a whole tile of elements of a type; false: nothing is written. */
template <bool KEPT, typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &terms, int64_t b, xdi_cuda_sample_range tile,
                                                   xdi_cuda_sample_by of, float *kept, std::true_type) {
    typedef typename Terms::T T;
    if (!xdi_cuda_sample_is_whole(terms, tile) || of.none) return false;
    T *to = xdi_cuda_sample_to(terms, b, tile);
    if (KEPT) {
        const xdi_cuda_sample_factor by(of.factor);
        XD_UNROLL_N(2)
        for (int step = 0; step < XDI_CUDA_SAMPLE_STEPS; step++) {
            const xdi_cuda_eight slope = xdi_cuda_sample_recall(kept, step);
            xdi_cuda_sample_put(to + step * (int)XD_SAMPLE_LANES, by, [&](auto) { return slope; });
        }
        return true;
    }
    xdi_cuda_sample_way<Terms, Terms::SLOPE_INPUTS> walk(terms, b, tile.begin);
    const xdi_cuda_sample_eights<Terms> eights(terms, b);
    if (!eights.fits()) return false;
    const xdi_cuda_sample_factor by(of.factor);
    walk.each([&](int step, const xdi_cuda_raw<T> *in) {
        xdi_cuda_sample_put(to + step * (int)XD_SAMPLE_LANES, by,
                            [&](auto exact) { return eights.template seconds<decltype(exact)::value>(in); });
    });
    return true;
}

template <bool KEPT, typename Terms>
static __device__ bool xdi_cuda_sample_write_whole(const Terms &, int64_t, xdi_cuda_sample_range, xdi_cuda_sample_by, float *,
                                                   std::false_type) {
    return false;
}

template <bool KEPT, typename Terms>
static __device__ void xdi_cuda_sample_write(const Terms &terms, int64_t b, xdi_cuda_sample_range range, xdi_cuda_sample_by by,
                                             float *kept) {
    enum { GIVEN = xdi_cuda_is<typename Terms::T>::GIVEN };
    const xdi_cuda_sample_range tile = xdi_cuda_sample_tile(range);
    if (!xdi_cuda_sample_write_whole<KEPT>(terms, b, tile, by, kept, std::integral_constant<bool, GIVEN != 0>()))
        xdi_cuda_sample_write_each<KEPT>(terms, b, tile, by, kept);
}

/* ---- sums and gradient at once, where the factor is known before the sums ---- */

/* weight scale / N, known before the sums: nobody else has parts of samples. */
static __device__ inline double xdi_cuda_sample_whole(const xd_sample_args &a) {
    return xd_sample_factor(&a, xd_sample_denominator(&a, a.samples * a.elements));
}

template <typename Terms> struct xdi_cuda_sample_writer {
    const Terms &terms;
    int64_t b;
    xdi_cuda_sample_range tile;
    xdi_cuda_sample_factor by;

    __device__ void whole(int step, const xdi_cuda_eight &values) const {
        put(step, values, std::integral_constant<bool, xdi_cuda_is<typename Terms::T>::GIVEN != 0>());
    }
    __device__ void some(int step, xdi_cuda_sample_range range, const xdi_cuda_eight &values) const {
        const int64_t first =
            range.begin + step * (int)XD_SAMPLE_LANES + (int64_t)(threadIdx.x % XDI_CUDA_WARP) * (int)XDI_CUDA_EIGHT;
        XD_UNROLL_N(1)
        for (int j = 0; j < XDI_CUDA_EIGHT && first + j < range.end; j++)
            xd_sample_store(&terms.out(), b, first + j, xd_mul(by.factor, (double)values.at[j]));
    }

  private:
    __device__ void put(int step, const xdi_cuda_eight &values, std::true_type) const {
        xdi_cuda_sample_put(xdi_cuda_sample_to(terms, b, tile) + step * (int)XD_SAMPLE_LANES, by, [&](auto) { return values; });
    }
    __device__ void put(int, const xdi_cuda_eight &, std::false_type) const {}
};

/* The same before its factor is formed. */
template <typename Terms> struct xdi_cuda_sample_writing {
    enum { WANTS = 1 };
    const Terms &terms;
    int64_t b;
    xdi_cuda_sample_range tile;

    __device__ xdi_cuda_sample_writer<Terms> ready() const {
        const double factor = xd_mul(terms.known_factor(b), xdi_cuda_sample_whole(terms.base()));
        return { terms, b, tile, xdi_cuda_sample_factor(factor) };
    }
};
