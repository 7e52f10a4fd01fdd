/* A thread's columns of a row on the chip: the largest elements, then sums relative to the largest of the block.
 *
 * The power of the largest element, exactly 1, is counted apart, so that the others keep their digits: on nearly one-hot rows the
 * gradient consists of them. Only threads that have such a column look for it. */

/* Exponents of powers of 2: x s + c, or GUARDED, (x - base) s + c. GUARDED leaves out products with a power of 0, which may be
 * of infinity, and has digits where the largest element is so large that a rounded c has none. */
struct xdi_cuda_ring_exponent {
    float s, base, c;

    template <bool GUARDED> __device__ xdi_cuda_eight of(const xdi_cuda_eight &x) const {
        xdi_cuda_eight e;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            e.at[i] = GUARDED ? __fmaf_rn(__fsub_rn(x.at[i], base), s, c) : __fmaf_rn(x.at[i], s, c);
        return e;
    }
    /* What the exponent of the base itself is, since c is rounded. */
    __device__ double rest(bool guarded) const {
        return guarded ? (double)c : __fma_rn((double)base, (double)s, (double)c);
    }
};

/* Of powers relative to `base`, times 2^shift. */
static __device__ inline xdi_cuda_ring_exponent xdi_cuda_ring_exponent_of(float s, float base, float shift, bool guarded) {
    return { s, base, guarded ? shift : __fmaf_rn(-base, s, shift) };
}

static __device__ inline xdi_cuda_eight xdi_cuda_ring_powers(const xdi_cuda_eight &exponents) {
    xdi_cuda_eight power;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) power.at[i] = xdi_cuda_power(exponents.at[i]);
    return power;
}

/* 2^-rest of a small rest; where it is not small, only the largest element has a power. */
static __device__ inline double xdi_cuda_ring_correction(double rest) {
    const double r = rest * XDI_CUDA_LN2;
    return fabs(rest) < 0.01 ? 1.0 - r + 0.5 * r * r : 1.0;
}

/* The reference of a block of nothing but -infinity. */
static __device__ inline float xdi_cuda_ring_base(float max) {
    return max == -INFINITY ? 0.0f : max;
}

/* The largest elements that a thread has seen, and whether one was -infinity where that matters. */
template <typename X, bool SOFT> struct xdi_cuda_ring_peak;

template <bool SOFT> struct xdi_cuda_ring_peak<xdi_cuda_bf16, SOFT> {
    typedef xdi_cuda_ring_form<xdi_cuda_bf16> form;
    uint32_t student, teacher, lowest; /* pairs */

    __device__ xdi_cuda_ring_peak() : student(0xff80ff80u), teacher(0xff80ff80u), lowest(0x7f807f80u) {}
    __device__ void look(const unsigned char *at, bool second) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (part > 0 && !second) break;
            const xdi_cuda_words x = form::words(at, part);
            student = xdi_cuda_pair_max(student, xdi_cuda_words_max(x));
            if (!SOFT) continue;
            const xdi_cuda_words y = form::words(at + XDI_CUDA_RING_BYTES, part);
            teacher = xdi_cuda_pair_max(teacher, xdi_cuda_words_max(y));
            lowest = xdi_cuda_pair_min(lowest, xdi_cuda_pair_min(xdi_cuda_words_min(x), xdi_cuda_words_min(y)));
        }
    }
    __device__ float largest() const {
        return fmaxf(xdi_cuda_pair_low(student), xdi_cuda_pair_high(student));
    }
    __device__ float teacher_largest() const {
        return fmaxf(xdi_cuda_pair_low(teacher), xdi_cuda_pair_high(teacher));
    }
    __device__ bool guarded() const {
        return fminf(xdi_cuda_pair_low(lowest), xdi_cuda_pair_high(lowest)) == -INFINITY;
    }
};

template <bool SOFT> struct xdi_cuda_ring_peak<float, SOFT> {
    typedef xdi_cuda_ring_form<float> form;
    float student, teacher;

    __device__ xdi_cuda_ring_peak() : student(-INFINITY), teacher(-INFINITY) {}
    __device__ void look(const unsigned char *at, bool second) {
        student = fmaxf(student, xdi_cuda_max_of(form::read(at, 0, second)));
        if (SOFT) teacher = fmaxf(teacher, xdi_cuda_max_of(form::read(at + XDI_CUDA_RING_BYTES, 0, second)));
    }
    __device__ float largest() const {
        return student;
    }
    __device__ float teacher_largest() const {
        return teacher;
    }
    __device__ bool guarded() const {
        return true;
    }
};

template <typename X, int KIND> struct xdi_cuda_ring_sums {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X> form;

    float largest, teacher_largest; /* of this thread */
    bool mine, teacher_mine;        /* it has a column with the block's largest element */
    bool guarded;                   /* the same in the whole block */
    xdi_cuda_ring_exponent student, teacher, hard;
    float sum[XDI_CUDA_RING_SUMS];
    int arg;

    __device__ void begin(const xdi_cuda_ring_peak<X, is::SOFT> &peak, const xdi_cuda_ring_call &call, float max,
                          float teacher_max, bool infinite) {
        const float base = xdi_cuda_ring_base(max), teacher_base = xdi_cuda_ring_base(teacher_max);
        largest = peak.largest();
        teacher_largest = peak.teacher_largest();
        mine = largest == max;
        teacher_mine = is::SOFT && teacher_largest == teacher_max;
        guarded = form::FINE || infinite;
        guard(base, teacher_base);
        student = xdi_cuda_ring_exponent_of(is::ALONE ? call.hard_factor : call.soft_factor, base, 0.0f, guarded);
        hard = xdi_cuda_ring_exponent_of(call.hard_factor, base, 0.0f, guarded);
        teacher = xdi_cuda_ring_exponent_of(call.soft_factor, teacher_base, 0.0f, guarded);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_RING_SUMS; i++) sum[i] = 0.0f;
        arg = INT32_MAX;
    }
    __device__ void guard(float base, float teacher_base) {
        guarded = guarded || fabsf(base) > 4096.0f || (is::SOFT && fabsf(teacher_base) > 4096.0f);
    }
    /* The thread's columns in one stage, the first of which is `column` of the block's. */
    template <bool GUARDED> __device__ void take(const unsigned char *at, bool second, int column) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (part > 0 && !second) break;
            xdi_cuda_eight y = {};
            const xdi_cuda_eight x = form::read(at, part, second);
            if (is::SOFT) y = form::read(at + XDI_CUDA_RING_BYTES, part, second);
            if (is::SMOOTH) put(XD_LOSS_LINEAR, form::FINE && !second ? sum_of_four(x) : xdi_cuda_sum_of(x));
            add<GUARDED>(x, y, column, part);
        }
    }

  private:
    template <bool GUARDED> __device__ void add(const xdi_cuda_eight &x, const xdi_cuda_eight &y, int column, int part) {
        const xdi_cuda_eight a = student.template of<GUARDED>(x);
        xdi_cuda_eight e = xdi_cuda_ring_powers(a), h = {};
        if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<GUARDED>(x));
        if (mine && xdi_cuda_max_of(x) == largest) set_apart(x, y, column, part, &e, &h);
        put(is::ALONE ? XD_LOSS_HARD : XD_LOSS_SOFT, xdi_cuda_sum_of(e));
        if (is::BOTH && !is::SHARED) put(XD_LOSS_HARD, xdi_cuda_sum_of(h));
        if (!is::SOFT) return;
        const xdi_cuda_eight b = teacher.template of<GUARDED>(y);
        xdi_cuda_eight f = xdi_cuda_ring_powers(b);
        if (teacher_mine && xdi_cuda_max_of(y) == teacher_largest) set_teacher_apart(x, y, &f);
        put(XD_LOSS_TEACHER, xdi_cuda_sum_of(f));
        if (is::FORWARD) put_cross<GUARDED>(f, b, a);
        if (is::REVERSE) put_cross<GUARDED>(e, a, b);
    }
    /* Terms power * (own - other). */
    template <bool GUARDED>
    __device__ void put_cross(const xdi_cuda_eight &power, const xdi_cuda_eight &own, const xdi_cuda_eight &other) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (!GUARDED || power.at[i] > 0.0f)
                sum[XD_LOSS_CROSS] = __fmaf_rn(power.at[i], __fsub_rn(own.at[i], other.at[i]), sum[XD_LOSS_CROSS]);
    }
    static __device__ float sum_of_four(const xdi_cuda_eight &x) {
        return __fadd_rn(__fadd_rn(x.at[0], x.at[1]), __fadd_rn(x.at[2], x.at[3]));
    }
    __device__ void put(int which, float term) {
        sum[which] = __fadd_rn(sum[which], term);
    }
    __device__ void set_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, int column, int part, xdi_cuda_eight *e,
                              xdi_cuda_eight *h) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (x.at[i] != largest) continue;
            const int at = column + form::column(part, i);
            e->at[i] = h->at[i] = 0.0f;
            put(XDI_CUDA_RING_ONES, 1.0f);
            if (is::REVERSE) put(XDI_CUDA_RING_APART, y.at[i]);
            if (at < arg) arg = at;
        }
    }
    __device__ void set_teacher_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, xdi_cuda_eight *f) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (y.at[i] != teacher_largest) continue;
            f->at[i] = 0.0f;
            put(XDI_CUDA_RING_TEACHER_ONES, 1.0f);
            if (is::FORWARD) put(XDI_CUDA_RING_APART, __fmul_rn(__fsub_rn(x.at[i], student.base), student.s));
        }
    }
};

/* A block's sums, of any of its threads' exponents: in nats and relative to the largest elements; XDI_CUDA_RING_ONES and what
 * follows it are still apart. */
template <typename X, int KIND>
static __device__ inline void xdi_cuda_ring_correct(const xdi_cuda_ring_sums<X, KIND> &of, double *sum) {
    typedef xdi_cuda_ring_is<KIND> is;
    const double rest = of.student.rest(of.guarded), teacher_rest = of.teacher.rest(of.guarded);
    const double by = xdi_cuda_ring_correction(rest), teacher_by = xdi_cuda_ring_correction(teacher_rest);
    double *cross = &sum[XD_LOSS_CROSS];
    if (is::FORWARD) *cross = XDI_CUDA_LN2 * teacher_by * (*cross - (teacher_rest - rest) * sum[XD_LOSS_TEACHER]);
    if (is::REVERSE) { /* relative to a teacher's logit of 0 at the student's largest */
        const double c = of.guarded ? -(double)of.teacher.base * (double)of.teacher.s : (double)of.teacher.c;
        *cross = XDI_CUDA_LN2 * by * (*cross + (c - rest) * sum[XD_LOSS_SOFT]);
    }
    sum[XD_LOSS_HARD] *= is::ALONE ? by : xdi_cuda_ring_correction(of.hard.rest(of.guarded));
    sum[XD_LOSS_SOFT] *= by;
    sum[XD_LOSS_TEACHER] *= teacher_by;
}
