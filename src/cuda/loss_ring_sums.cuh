/* A thread's columns of a row on the chip: the largest elements, then sums relative to the largest of the block.
 *
 * The power of the largest element, exactly 1, is counted apart, so that the others keep their digits: on nearly one-hot rows the
 * gradient consists of them. Only threads that have such a column look for it, where powers sum to so much. */

/* Exponents of powers of 2: x s + c, which is (x - base) s + rest, the form of GUARDED loops. These leave out products with a
 * power of 0, which may be of infinity, and have digits where the largest element is so large that a rounded c has none. */
struct xdi_cuda_ring_exponent {
    float s, base, c, rest;

    template <bool GUARDED> __device__ xdi_cuda_eight of(const xdi_cuda_eight &x) const {
        xdi_cuda_eight e;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            e.at[i] = GUARDED ? __fmaf_rn(__fsub_rn(x.at[i], base), s, rest) : __fmaf_rn(x.at[i], s, c);
        return e;
    }
};

/* Of powers relative to `base`, times 2^shift; `large`: c has no digits. */
static __device__ inline xdi_cuda_ring_exponent xdi_cuda_ring_exponent_of(float s, float base, float shift, bool large) {
    const float c = __fmaf_rn(-base, s, shift);
    return { s, base, c, large ? shift : __fmaf_rn(base, s, c) };
}

/* Where only GUARDED loops have digits. */
static __device__ inline bool xdi_cuda_ring_large(float base) {
    return !(fabsf(base) <= 4096.0f);
}

/* Computed here, and not again where it is needed. */
static __device__ inline float xdi_cuda_ring_held(float value) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+f"(value));
#endif
    return value;
}

static __device__ inline xdi_cuda_eight xdi_cuda_ring_powers(const xdi_cuda_eight &exponents) {
    xdi_cuda_eight power;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) power.at[i] = xdi_cuda_power(exponents.at[i]);
    return power;
}

static __device__ inline xdi_cuda_eight xdi_cuda_ring_gaps(const xdi_cuda_eight &own, const xdi_cuda_eight &other) {
    xdi_cuda_eight gap;
    XD_UNROLL
    for (int i = 0; i < XDI_CUDA_EIGHT; i++) gap.at[i] = xdi_cuda_ring_held(__fsub_rn(own.at[i], other.at[i]));
    return gap;
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

/* The largest elements that a thread has seen, and with LOW the lowest of both tensors. */
template <typename X, int KIND> struct xdi_cuda_ring_peak;

template <int KIND> struct xdi_cuda_ring_peak<xdi_cuda_bf16, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<xdi_cuda_bf16, is::TENSORS> form;
    uint32_t student, teacher, low; /* pairs */

    __device__ xdi_cuda_ring_peak() : student(0xff80ff80u), teacher(0xff80ff80u), low(0x7f807f80u) {}
    __device__ void look(const unsigned char *at, int left) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            const xdi_cuda_words x = form::words(at, part);
            student = xdi_cuda_pair_max(student, xdi_cuda_words_max(x));
            if (!is::SOFT) continue;
            const xdi_cuda_words y = form::words(at + form::BYTES, part);
            teacher = xdi_cuda_pair_max(teacher, xdi_cuda_words_max(y));
            if (is::JSD) low = xdi_cuda_pair_min(low, xdi_cuda_pair_min(xdi_cuda_words_min(x), xdi_cuda_words_min(y)));
        }
    }
    __device__ float largest() const {
        return fmaxf(xdi_cuda_pair_low(student), xdi_cuda_pair_high(student));
    }
    __device__ float teacher_largest() const {
        return fmaxf(xdi_cuda_pair_low(teacher), xdi_cuda_pair_high(teacher));
    }
    __device__ float lowest() const {
        return fminf(xdi_cuda_pair_low(low), xdi_cuda_pair_high(low));
    }
};

template <int KIND> struct xdi_cuda_ring_peak<float, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<float, is::TENSORS> form;
    float student, teacher;

    __device__ xdi_cuda_ring_peak() : student(-INFINITY), teacher(-INFINITY) {}
    __device__ void look(const unsigned char *at, int left) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            student = fmaxf(student, xdi_cuda_max_of(form::read(at, part, left)));
            if (is::SOFT) teacher = fmaxf(teacher, xdi_cuda_max_of(form::read(at + form::BYTES, part, left)));
        }
    }
    __device__ float largest() const {
        return student;
    }
    __device__ float teacher_largest() const {
        return teacher;
    }
    __device__ float lowest() const {
        return 0.0f;
    }
};

/* Where the compiler has no registers for two parts of a stage at once. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
enum { XDI_CUDA_RING_NARROW = 1 };
#else
enum { XDI_CUDA_RING_NARROW = 0 };
#endif

template <typename X, int KIND> struct xdi_cuda_ring_sums {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X, is::TENSORS> form;
    enum { ASKED_APART = is::FORWARD || form::FINE }; /* one question a tensor: what both have does not fit into registers together */

    float largest, teacher_largest, lowest; /* of this thread */
    bool mine, teacher_mine;                /* it has a column with the block's largest element */
    float least, teacher_least; /* powers of eight columns that sum to less have none of these; the teacher's where ASKED_APART */
    bool guarded;                           /* its loops are */
    xdi_cuda_ring_exponent student, teacher, hard;
    float sum[XDI_CUDA_RING_SUMS];
    int arg;

    __device__ void begin(const xdi_cuda_ring_peak<X, KIND> &peak, const xdi_cuda_ring_call &call, float max, float teacher_max) {
        const float base = xdi_cuda_ring_base(max), teacher_base = xdi_cuda_ring_base(teacher_max);
        largest = peak.largest();
        teacher_largest = peak.teacher_largest();
        lowest = peak.lowest();
        mine = largest == max;
        teacher_mine = is::SOFT && teacher_largest == teacher_max;
        const float some = max == -INFINITY || (is::SOFT && teacher_max == -INFINITY) ? 0.0f : 0.9f; /* 1, but for roundings */
        least = mine || (!ASKED_APART && teacher_mine) ? some : INFINITY;
        teacher_least = ASKED_APART && teacher_mine ? some : INFINITY;
        guarded = form::FINE || xdi_cuda_ring_large(base) || (is::SOFT && xdi_cuda_ring_large(teacher_base));
        student = xdi_cuda_ring_exponent_of(is::ALONE ? call.hard_factor : call.soft_factor, base, 0.0f, guarded);
        hard = xdi_cuda_ring_exponent_of(call.hard_factor, base, 0.0f, guarded);
        teacher = xdi_cuda_ring_exponent_of(call.soft_factor, teacher_base, 0.0f, guarded);
        student.c = xdi_cuda_ring_held(student.c);
        clear();
    }
    __device__ void clear() {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_RING_SUMS; i++) sum[i] = 0.0f;
        arg = INT32_MAX;
    }
    /* After loops that were not guarded: whether a product with a power of 0 was of infinity. Then the warp repeats them. */
    __device__ bool repeats() const {
        return !form::FINE && (is::FORWARD || is::REVERSE) && !guarded && isnan(sum[XD_LOSS_CROSS]);
    }
    /* Whether the thread has a largest element. */
    __device__ bool has_any() const {
        return fminf(least, teacher_least) < INFINITY;
    }
    /* The thread's columns in one stage: `left` packs before the end of the block's `packs`. */
    template <bool GUARDED> __device__ void take(const unsigned char *at, int left, int packs) {
        enum { TOGETHER = GUARDED || XDI_CUDA_RING_NARROW ? 0 : (int)form::PARTS };
        XD_UNROLL
        for (int part = 0; part < TOGETHER; part++)
            if (form::has(part, left)) take_part<GUARDED>(at, left, packs, part);
        XD_UNROLL_N(1)
        for (int part = TOGETHER; part < form::PARTS; part++)
            if (form::has(part, left)) take_part<GUARDED>(at, left, packs, part);
    }

  private:
    template <bool GUARDED> __device__ void take_part(const unsigned char *at, int left, int packs, int part) {
        const xdi_cuda_eight x = form::read(at, part, left);
        if (is::SMOOTH) put(XD_LOSS_LINEAR, form::has_second(part, left) ? xdi_cuda_sum_of(x) : sum_of_four(x));
        add<GUARDED>(x, at, left, packs, part);
    }
    template <bool GUARDED> __device__ void add(const xdi_cuda_eight &x, const unsigned char *at, int left, int packs, int part) {
        enum { APART = ASKED_APART, NARROW = XDI_CUDA_RING_NARROW };
        const xdi_cuda_eight a = student.template of<GUARDED>(x);
        xdi_cuda_eight e = xdi_cuda_ring_powers(a), h = {}, f = {}, gap = {}, y = {};
        if (is::SOFT && (!APART || is::REVERSE)) y = form::read(at + form::BYTES, part, left);
        float own = NARROW ? INFINITY : xdi_cuda_sum_of(e), other = 0.0f;
        if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<GUARDED>(x));
        if (APART && may_have(own, least)) own = set_apart(x, y, packs - left, part, &e, &h);
        if (APART) put_student(NARROW ? xdi_cuda_sum_of(e) : own, h);
        if (is::SOFT && APART && !is::REVERSE) y = form::read(at + form::BYTES, part, left); /* until then no registers */
        if (is::SOFT) {
            const xdi_cuda_eight b = teacher.template of<GUARDED>(y);
            f = xdi_cuda_ring_powers(b);
            other = NARROW ? INFINITY : xdi_cuda_sum_of(f);
            if (!is::JSD) gap = xdi_cuda_ring_gaps(is::REVERSE ? a : b, is::REVERSE ? b : a);
        }
        if (APART && is::SOFT && may_have(other, teacher_least)) other = set_teacher_apart(x, y, &f);
        if (!APART && may_have(is::SOFT ? fmaxf(own, other) : own, least)) {
            own = set_apart(x, y, packs - left, part, &e, &h);
            if (is::SOFT) other = set_teacher_apart(x, y, &f);
        }
        if (!APART) put_student(NARROW ? xdi_cuda_sum_of(e) : own, h);
        if (!is::SOFT) return;
        put(XD_LOSS_TEACHER, NARROW ? xdi_cuda_sum_of(f) : other);
        if (is::FORWARD) put_cross<GUARDED>(f, gap);
        if (is::REVERSE) put_cross<GUARDED>(e, gap);
    }
    /* Whether eight columns, by the sum of their powers, may have a largest element of the block. */
    static __device__ bool may_have(float power, float least) {
        return XDI_CUDA_RING_NARROW ? least < INFINITY : power >= least;
    }
    __device__ void put_student(float own, const xdi_cuda_eight &h) {
        put(is::ALONE ? XD_LOSS_HARD : XD_LOSS_SOFT, own);
        if (is::BOTH && !is::SHARED) put(XD_LOSS_HARD, xdi_cuda_sum_of(h));
    }
    template <bool GUARDED> __device__ void put_cross(const xdi_cuda_eight &power, const xdi_cuda_eight &gap) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++)
            if (!GUARDED || power.at[i] > 0.0f)
                sum[XD_LOSS_CROSS] = __fmaf_rn(power.at[i], gap.at[i], sum[XD_LOSS_CROSS]);
    }
    static __device__ float sum_of_four(const xdi_cuda_eight &x) {
        return __fadd_rn(__fadd_rn(x.at[0], x.at[1]), __fadd_rn(x.at[2], x.at[3]));
    }
    __device__ void put(int which, float term) {
        sum[which] = __fadd_rn(sum[which], term);
    }
    /* Of columns from pack `first` on. Returns what remains. */
    __device__ float set_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, int first, int part, xdi_cuda_eight *e,
                               xdi_cuda_eight *h) {
        const int column = first * (int)xdi_cuda_pack<X>::COUNT;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT && (ASKED_APART || mine); i++) {
            if (x.at[i] != largest) continue;
            const int at = column + form::column(part, i);
            e->at[i] = h->at[i] = 0.0f;
            put(XDI_CUDA_RING_ONES, 1.0f);
            if (is::REVERSE) put(XDI_CUDA_RING_APART, y.at[i]);
            if (at < arg) arg = at;
        }
        return xdi_cuda_sum_of(*e);
    }
    __device__ float set_teacher_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, xdi_cuda_eight *f) {
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT && (ASKED_APART || teacher_mine); i++) {
            if (y.at[i] != teacher_largest) continue;
            f->at[i] = 0.0f;
            put(XDI_CUDA_RING_TEACHER_ONES, 1.0f);
            if (is::FORWARD) put(XDI_CUDA_RING_APART, __fmul_rn(__fsub_rn(x.at[i], student.base), student.s));
        }
        return xdi_cuda_sum_of(*f);
    }
};

/* What makes a block's sums, of any of its threads' exponents, relative to the largest elements and in nats. */
struct xdi_cuda_ring_corrections {
    double student, teacher, hard; /* factors */
    double cross;                  /* of sum SOFT or TEACHER, in CROSS */
};

template <typename X, int KIND>
static __device__ inline xdi_cuda_ring_corrections xdi_cuda_ring_corrections_of(const xdi_cuda_ring_sums<X, KIND> &of) {
    typedef xdi_cuda_ring_is<KIND> is;
    const double rest = (double)of.student.rest, teacher_rest = (double)of.teacher.rest;
    xdi_cuda_ring_corrections by = { xdi_cuda_ring_correction(rest), 1.0, 1.0, 0.0 };
    if (is::SOFT) by.teacher = xdi_cuda_ring_correction(teacher_rest);
    by.hard = is::ALONE ? by.student : xdi_cuda_ring_correction((double)of.hard.rest);
    if (is::FORWARD) by.cross = rest - teacher_rest;
    if (is::REVERSE) /* relative to a teacher's logit of 0 at the student's largest */
        by.cross = teacher_rest - (double)of.teacher.base * (double)of.teacher.s - rest;
    return by;
}

/* XDI_CUDA_RING_ONES and what follows it are still apart. */
template <int KIND> static __device__ inline void xdi_cuda_ring_correct(const xdi_cuda_ring_corrections &by, double *sum) {
    typedef xdi_cuda_ring_is<KIND> is;
    double *cross = &sum[XD_LOSS_CROSS];
    if (is::FORWARD) *cross = XDI_CUDA_LN2 * by.teacher * (*cross + by.cross * sum[XD_LOSS_TEACHER]);
    if (is::REVERSE) *cross = XDI_CUDA_LN2 * by.student * (*cross + by.cross * sum[XD_LOSS_SOFT]);
    sum[XD_LOSS_HARD] *= by.hard;
    sum[XD_LOSS_SOFT] *= by.student;
    sum[XD_LOSS_TEACHER] *= by.teacher;
}
