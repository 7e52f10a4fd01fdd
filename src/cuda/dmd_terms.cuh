/* The terms of losses over samples: an element's, and eight elements' of one type. kernel/dmd_loss.h has the formulas. */

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

template <typename Storage> struct xdi_cuda_sample_resident {
    enum { BLOCKS = 2 };
};
template <> struct xdi_cuda_sample_resident<xdi_cuda_bf16> {
    enum { BLOCKS = 3 };
};

/* Elements of T, or xdi_cuda_none: of any type, at any address, one at a time. SLOPE_INPUTS: the gradient needs the first of the
 * inputs. AHEAD: steps whose loads are asked for before they are needed. RESIDENT: blocks on a multiprocessor, as registers allow. */
template <typename Storage> struct xdi_cuda_vsd_terms {
    typedef Storage T;
    enum { SLOPE_INPUTS = 2, AHEAD = 2, STREAMS = 0, RESIDENT = xdi_cuda_sample_resident<Storage>::BLOCKS };
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
    typedef xd_vsd_given given_type;
    __device__ xd_vsd_given given(int64_t b) const {
        return xd_vsd_given_of(&a, b);
    }
    /* The sample of these sums, which the first of its blocks keeps. Sums that are not fixed have no code of those that are. */
    template <bool FIXED>
    __device__ xd_sample weigh(int64_t b, const int64_t *sums, const xd_vsd_given &given, bool keeps) const {
        xd_sample s;
        const double mean = xd_vsd_weigh_sums(&a, sums, FIXED, given, &s);
        if (keeps) a.base.sample[b] = s;
        if (keeps && a.distance) a.distance[b] = mean;
        return s;
    }
    XDI_CUDA_ONCE __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
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
    enum { SLOPE_INPUTS = 3, AHEAD = 1, STREAMS = sizeof(Storage) == 2, RESIDENT = STREAMS ? 4 : 2 };
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
    __device__ double known_factor(int64_t b) const {
        return xd_denoise_factor(a.terms + b);
    }
    XDI_CUDA_ONCE __device__ xdi_cuda_sample_pair at(int64_t b, int64_t i) const {
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
        : prediction(xdi_cuda_f32_of(terms.a.terms[b].prediction)), clean(xdi_cuda_f32_of(terms.a.terms[b].clean)),
          noise(xdi_cuda_f32_of(terms.a.terms[b].noise)) {}
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
