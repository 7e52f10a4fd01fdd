/* A thread's columns of a row on the chip, once the whole row's sums are known: the gradient, and before it JSD's mixtures, which
 * leave the logarithm of student/mixture in the teacher's place. */

/* A thread's part of the sums over JSD's mixtures. */
struct xdi_cuda_ring_mixtures {
    float student, teacher; /* the student's is negative */
    float largest;          /* of this thread's columns */
    bool mine;              /* it is the row's */
};

/* What both types have: exponents relative to the largest element of the row, and what multiplies powers. */
template <typename X, int KIND> struct xdi_cuda_ring_scale {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X, is::TENSORS> form;
    xdi_cuda_ring_exponent student, teacher, hard;
    float weight, hard_weight, teacher_weight;
    float uniform, slope; /* of a smoothed label; see the forms of REVERSE and JSD */
    float top;            /* JSD: the logarithm of student/mixture at the row's arg */
    float max;            /* of the row */
    int arg;              /* in this block's columns; may lie outside */
    bool guarded;         /* its loops are */

    __device__ void begin(const xdi_cuda_ring_call &call, const xdi_cuda_ring_row &row, bool large) {
        const float base = xdi_cuda_ring_base(row.max), teacher_base = xdi_cuda_ring_base(row.teacher_max);
        student = xdi_cuda_ring_exponent_of(is::ALONE ? call.hard_factor : call.soft_factor, base, 0.0f, large);
        teacher = xdi_cuda_ring_exponent_of(call.soft_factor, teacher_base, 0.0f, large);
        hard = xdi_cuda_ring_exponent_of(call.hard_factor, base, 0.0f, large);
        max = row.max;
        arg = row.arg;
        guarded = large;
    }
    /* Leaves out both terms of the row's arg, which the second kernel has with all digits; the student's others at the largest
     * element become relative to that of arg. `log`: of mixture/student. */
    __device__ void set_apart(const xdi_cuda_ring_mixtures &sums, const xdi_cuda_eight &x, int column, int part,
                              xdi_cuda_eight *log, xdi_cuda_eight *power, xdi_cuda_eight *teacher_power) const {
        if (!sums.mine || xdi_cuda_max_of(x) != sums.largest) return;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (x.at[i] == sums.largest) log->at[i] = __fadd_rn(log->at[i], top);
            if (column + form::column(part, i) == arg) power->at[i] = teacher_power->at[i] = 0.0f;
        }
    }
};

template <typename X, int KIND> struct xdi_cuda_ring_factors;

/* ---- BF16: exponents are divided by their sum, and all but those of BOTH are times the weight, whose sign is in `flip` ---- */

template <int KIND>
struct xdi_cuda_ring_factors<xdi_cuda_bf16, KIND> : xdi_cuda_ring_scale<xdi_cuda_bf16, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_scale<xdi_cuda_bf16, KIND> base_type;
    using typename base_type::form;
    using base_type::student;
    using base_type::teacher;
    using base_type::hard;
    using base_type::guarded;
    using base_type::weight;
    using base_type::hard_weight;
    using base_type::uniform;
    using base_type::slope;
    using base_type::top;
    enum { WEIGHED = !is::BOTH };
    uint32_t flip; /* of a pair's signs */
    float gap;     /* JSD: between the exponents of teacher and student */

    __device__ void settle(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        const float own = is::REVERSE ? __fmul_rn(w.soft, (float)XDI_CUDA_LN2) : is::ALONE ? w.hard : w.soft;
        const float shift = WEIGHED && !is::JSD ? xdi_cuda_log2(fabsf(own)) : 0.0f;
        const float base = xdi_cuda_ring_base(row.max), teacher_base = xdi_cuda_ring_base(row.teacher_max);
        const float log_sum = xdi_cuda_log2(is::ALONE ? row.hard : row.soft), log_teacher = xdi_cuda_log2(row.teacher);
        const bool large = xdi_cuda_ring_large(base) || (is::SOFT && xdi_cuda_ring_large(teacher_base));
        base_type::begin(call, row, large);
        student = xdi_cuda_ring_exponent_of(student.s, base, __fsub_rn(shift, log_sum), large);
        teacher = xdi_cuda_ring_exponent_of(teacher.s, teacher_base, __fsub_rn(shift, log_teacher), large);
        if (is::BOTH && !is::SHARED) hard = xdi_cuda_ring_exponent_of(hard.s, base, -xdi_cuda_log2(row.hard), large);
        flip_by(WEIGHED && !is::JSD ? own : 0.0f);
        weight = own;
        hard_weight = is::SHARED ? __fadd_rn(w.hard, own) : w.hard;
        uniform = __fmul_rn(fabsf(own), call.uniform);
        gap = __fmaf_rn(__fsub_rn(base, teacher_base), student.s, __fsub_rn(log_sum, log_teacher));
    }
    __device__ void flip_by(float own) {
        flip = own < 0.0f ? 0x80008000u : 0u;
        guarded = guarded || own < 0.0f;
    }
    /* REVERSE: log2 of student/teacher, less its mean, is (x - y) s + slope. JSD: that of student/mixture, slope - l, where l is
     * log2 of mixture/student. */
    __device__ void lean(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        if (is::REVERSE)
            slope = __fmaf_rn(__fsub_rn(row.beside, student.base), student.s, -__fmul_rn(row.mean, call.hard_factor));
        if (!is::JSD) return;
        const float own = __fmul_rn(__fmul_rn(w.soft, __fsub_rn(1.0f, call.beta)), (float)XDI_CUDA_LN2);
        const float shift = xdi_cuda_log2(fabsf(own));
        slope = __fmul_rn(-__fadd_rn(row.top, row.mean), call.hard_factor);
        student.c = __fadd_rn(student.c, shift);
        student.rest = __fadd_rn(student.rest, shift);
        flip_by(own);
    }
    template <bool GUARDED> __device__ void grade(const unsigned char *at, int left, xdi_cuda_bf16 *to) const {
        enum { TOGETHER = GUARDED || XDI_CUDA_RING_NARROW ? 0 : (int)form::PARTS };
        XD_UNROLL
        for (int part = 0; part < TOGETHER; part++)
            if (form::has(part, left)) grade_part<GUARDED>(at, left, to, part);
        XD_UNROLL_N(1)
        for (int part = TOGETHER; part < form::PARTS; part++)
            if (form::has(part, left)) grade_part<GUARDED>(at, left, to, part);
    }
    template <bool GUARDED> __device__ void grade_part(const unsigned char *at, int left, xdi_cuda_bf16 *to, int part) const {
        xdi_cuda_words y = {}, out;
        const xdi_cuda_eight x = form::read(at, part, left);
        if (is::SOFT) y = form::words(at + form::BYTES, part);
        const xdi_cuda_eight g = gradient<GUARDED>(x, y);
        XD_UNROLL
        for (int i = 0; i < 4; i++) {
            out.at[i] = xdi_cuda_bf16_pair(g.at[2 * i], g.at[2 * i + 1]);
            if (WEIGHED && GUARDED) out.at[i] ^= flip;
        }
        xdi_cuda_store16(reinterpret_cast<uint32_t *>(to + form::column(part, 0)), out);
    }
    template <bool GUARDED> __device__ xdi_cuda_eight gradient(const xdi_cuda_eight &x, const xdi_cuda_words &beside) const {
        const xdi_cuda_eight a = student.template of<GUARDED>(x), p = xdi_cuda_ring_powers(a);
        xdi_cuda_eight g = p, y = {};
        if (is::SOFT && !is::JSD) y = xdi_cuda_words_widened(beside);
        if (is::FORWARD) {
            const xdi_cuda_eight q = xdi_cuda_ring_powers(teacher.template of<GUARDED>(y));
            xdi_cuda_eight h = {};
            if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<GUARDED>(x));
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                g.at[i] = is::SHARED ? __fmaf_rn(hard_weight, p.at[i], -__fmul_rn(weight, q.at[i]))
                          : is::BOTH ? __fmaf_rn(hard_weight, h.at[i], __fmul_rn(weight, __fsub_rn(p.at[i], q.at[i])))
                                     : __fsub_rn(p.at[i], q.at[i]);
        }
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (is::SMOOTH) g.at[i] = __fsub_rn(p.at[i], uniform);
            if (is::REVERSE) {
                const float log = __fmaf_rn(__fsub_rn(x.at[i], y.at[i]), student.s, slope);
                g.at[i] = GUARDED && !(p.at[i] > 0.0f) ? 0.0f : __fmul_rn(p.at[i], log);
            }
            if (is::JSD) g.at[i] = __fmul_rn(p.at[i], __fsub_rn(slope, xdi_cuda_log_in(beside.at[i / 2], i % 2)));
        }
        return g;
    }

    /* ---- JSD ---- */

    /* Of a row: log2 of student/mixture at its arg, relative to which the student's sum is. */
    __device__ float top_of(float beta, const xdi_cuda_ring_row &row) const {
        float log, teacher_log;
        const float apart = __fsub_rn(row.beside, xdi_cuda_ring_base(row.max));
        logs(__fmaf_rn(apart, student.s, gap), beta, &log, &teacher_log);
        return -log;
    }
    static __device__ float nats(float log) {
        return __fmul_rn(log, (float)XDI_CUDA_LN2);
    }
    /* log2 of mixture/student and of teacher/mixture, d that of teacher/student. Returns the smaller's part of the larger. */
    static __device__ float logs(float d, float beta, float *log, float *teacher_log) {
        const float rest = __fsub_rn(1.0f, beta), z = xdi_cuda_power(-fabsf(d));
        const bool more = d > 0.0f;
        const float low = xdi_cuda_log2(__fmaf_rn(more ? rest : beta, z, more ? beta : rest));
        const float high = __fadd_rn(low, fabsf(d));
        *log = more ? high : low;
        *teacher_log = more ? -low : -high;
        return z;
    }
    __device__ void weigh(xdi_cuda_ring_mixtures *) const {}
    /* Whether 2^d neither overflows nor loses a power that is in the sums, when the lowest logit of a thread's is this. */
    __device__ bool is_narrow(float beta, float lowest) const {
        return __fmul_rn(__fsub_rn(this->max, lowest), student.s) < 100.0f && beta < 1.0f;
    }
    template <bool GUARDED>
    __device__ void mix(unsigned char *at, int left, int column, float beta, xdi_cuda_ring_mixtures *sums) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            const xdi_cuda_eight x = form::read(at, part, left), y = form::read(at + form::BYTES, part, left);
            const xdi_cuda_eight log = GUARDED ? mixed_apart(x, y, beta, column, part, sums)
                                               : mixed(x, y, beta, column, part, sums);
            xdi_cuda_words out;
            XD_UNROLL
            for (int i = 0; i < 4; i++) out.at[i] = xdi_cuda_f16_pair(log.at[2 * i], log.at[2 * i + 1]);
            xdi_cuda_put16(at + form::BYTES + part * XDI_CUDA_RING_PART, out);
        }
    }
    __device__ xdi_cuda_eight mixed(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                    xdi_cuda_ring_mixtures *sums) const {
        const float rest = __fsub_rn(1.0f, beta);
        xdi_cuda_eight power = xdi_cuda_ring_powers(student.template of<false>(x)), teacher_power, log, own, teacher_log;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float d = __fmaf_rn(__fsub_rn(y.at[i], x.at[i]), student.s, gap), z = xdi_cuda_power(d);
            teacher_power.at[i] = __fmul_rn(power.at[i], z);
            log.at[i] = xdi_cuda_log2(__fmaf_rn(beta, z, rest));
            teacher_log.at[i] = __fsub_rn(d, log.at[i]);
        }
        own = log;
        this->set_apart(*sums, x, column, part, &own, &power, &teacher_power);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            sums->student = __fmaf_rn(power.at[i], own.at[i], sums->student);
            sums->teacher = __fmaf_rn(teacher_power.at[i], teacher_log.at[i], sums->teacher);
        }
        return log;
    }
    /* The same where one has a power that the other has not. */
    __device__ xdi_cuda_eight mixed_apart(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                          xdi_cuda_ring_mixtures *sums) const {
        const xdi_cuda_eight a = student.template of<true>(x), b = teacher.template of<true>(y);
        xdi_cuda_eight power, teacher_power, log, own, teacher_log;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float apart = y.at[i] == x.at[i] ? 0.0f : __fsub_rn(y.at[i], x.at[i]);
            const float d = __fmaf_rn(apart, student.s, gap), z = logs(d, beta, &log.at[i], &teacher_log.at[i]);
            const float large = xdi_cuda_power(fmaxf(a.at[i], b.at[i])), small = __fmul_rn(large, z);
            power.at[i] = d > 0.0f ? small : large;
            teacher_power.at[i] = d > 0.0f ? large : small;
        }
        own = log;
        this->set_apart(*sums, x, column, part, &own, &power, &teacher_power);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (power.at[i] > 0.0f) sums->student = __fmaf_rn(power.at[i], own.at[i], sums->student);
            if (teacher_power.at[i] > 0.0f) sums->teacher = __fmaf_rn(teacher_power.at[i], teacher_log.at[i], sums->teacher);
            log.at[i] = fminf(log.at[i], 1024.0f); /* of f16 */
        }
        return log;
    }
};

/* ---- F32 ---- */

template <int KIND> struct xdi_cuda_ring_factors<float, KIND> : xdi_cuda_ring_scale<float, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_scale<float, KIND> base_type;
    using typename base_type::form;
    using base_type::student;
    using base_type::teacher;
    using base_type::hard;
    using base_type::weight;
    using base_type::hard_weight;
    using base_type::teacher_weight;
    using base_type::uniform;
    using base_type::slope;
    float beside, log_gap, per_tau; /* log_gap: ln of the student's sum less that of the teacher's */

    __device__ void settle(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        base_type::begin(call, row, true);
        hard_weight = is::HARD ? __fdiv_rn(w.hard, row.hard) : 0.0f;
        weight = is::SOFT ? __fdiv_rn(w.soft, row.soft) : 0.0f;
        teacher_weight = is::SOFT ? __fdiv_rn(w.soft, row.teacher) : 0.0f;
        if (is::SHARED) weight = __fadd_rn(weight, hard_weight);
        uniform = __fmul_rn(w.hard, call.uniform);
        beside = row.beside;
        per_tau = call.per_tau;
        if (is::JSD) log_gap = logf(__fdiv_rn(row.soft, row.teacher));
        if (is::JSD) weight = __fdiv_rn(1.0f, row.soft); /* the mixtures are of probabilities */
        if (is::JSD) teacher_weight = __fdiv_rn(1.0f, row.teacher);
    }
    /* The mean of a logarithm, REVERSE of student/teacher, JSD of student/mixture. */
    __device__ void lean(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        if (is::REVERSE) slope = row.mean;
        if (is::JSD) slope = __fadd_rn(row.top, row.mean);
        if (is::JSD) weight = __fdiv_rn(__fmul_rn(w.soft, __fsub_rn(1.0f, call.beta)), row.soft);
    }
    template <bool GUARDED> __device__ void grade(const unsigned char *at, int left, float *to) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            xdi_cuda_eight y = {};
            const xdi_cuda_eight x = form::read(at, part, left);
            if (is::SOFT) y = form::read(at + form::BYTES, part, left);
            const xdi_cuda_eight g = gradient(x, y);
            xdi_cuda_store16(to + form::column(part, 0), xdi_cuda_rounded<float>(g.at));
            if (form::has_second(part, left)) xdi_cuda_store16(to + form::column(part, 4), xdi_cuda_rounded<float>(g.at + 4));
        }
    }
    /* Relative to the largest element: `rest` is 0. */
    static __device__ xdi_cuda_eight powers(const xdi_cuda_ring_exponent &of, const xdi_cuda_eight &x) {
        xdi_cuda_eight e;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) e.at[i] = __fmul_rn(__fsub_rn(x.at[i], of.base), of.s);
        return xdi_cuda_ring_powers(e);
    }
    __device__ xdi_cuda_eight gradient(const xdi_cuda_eight &x, const xdi_cuda_eight &y) const {
        const xdi_cuda_eight p = powers(student, x);
        xdi_cuda_eight g, q = {}, h = {};
        if (is::FORWARD) q = powers(teacher, y);
        if (is::BOTH && !is::SHARED) h = powers(hard, x);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float scaled = __fmul_rn(p.at[i], is::ALONE ? hard_weight : weight);
            g.at[i] = scaled;
            if (is::SMOOTH) g.at[i] = __fsub_rn(scaled, uniform);
            if (is::FORWARD) g.at[i] = __fmaf_rn(-q.at[i], teacher_weight, scaled);
            if (is::BOTH && !is::SHARED) g.at[i] = __fmaf_rn(h.at[i], hard_weight, g.at[i]);
            if (is::REVERSE) {
                const float apart = __fsub_rn(__fsub_rn(x.at[i], student.base), __fsub_rn(y.at[i], beside));
                g.at[i] = p.at[i] > 0.0f ? __fmul_rn(scaled, __fmaf_rn(apart, per_tau, -slope)) : 0.0f;
            }
            if (is::JSD) g.at[i] = p.at[i] > 0.0f ? __fmul_rn(scaled, __fsub_rn(y.at[i], slope)) : 0.0f;
        }
        return g;
    }

    /* ---- JSD, in nats ---- */

    __device__ float ratio_of(float x, float y) const {
        return __fmaf_rn(__fsub_rn(__fsub_rn(y, teacher.base), __fsub_rn(x, student.base)), per_tau, log_gap);
    }
    __device__ float top_of(float beta, const xdi_cuda_ring_row &row) const {
        float student_log, teacher_log;
        xdi_cuda_loss_log_ratios_of(ratio_of(student.base, row.beside), beta, &student_log, &teacher_log);
        return student_log;
    }
    static __device__ float nats(float log) {
        return log;
    }
    __device__ bool is_narrow(float, float) const {
        return false;
    }
    template <bool GUARDED>
    __device__ void mix(unsigned char *at, int left, int column, float beta, xdi_cuda_ring_mixtures *sums) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (!form::has(part, left)) break;
            unsigned char *const to = at + form::BYTES + 2 * part * XDI_CUDA_RING_PART;
            const xdi_cuda_eight x = form::read(at, part, left), y = form::read(at + form::BYTES, part, left);
            const xdi_cuda_eight log = mixed(x, y, beta, column, part, sums);
            xdi_cuda_put16(to, xdi_cuda_rounded<float>(log.at));
            if (form::has_second(part, left)) xdi_cuda_put16(to + XDI_CUDA_RING_PART, xdi_cuda_rounded<float>(log.at + 4));
        }
    }
    /* The sums are of powers; those of probabilities are asked for. */
    __device__ void weigh(xdi_cuda_ring_mixtures *sums) const {
        sums->student = __fmul_rn(sums->student, weight);
        sums->teacher = __fmul_rn(sums->teacher, teacher_weight);
    }
    /* Returns the logarithms of student/mixture. */
    __device__ xdi_cuda_eight mixed(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                    xdi_cuda_ring_mixtures *sums) const {
        xdi_cuda_eight log, own, teacher_log;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            xdi_cuda_loss_log_ratios_of(ratio_of(x.at[i], y.at[i]), beta, &log.at[i], &teacher_log.at[i]);
            own.at[i] = -log.at[i];
        }
        xdi_cuda_eight power = powers(student, x);
        xdi_cuda_eight teacher_power = powers(teacher, y);
        this->set_apart(*sums, x, column, part, &own, &power, &teacher_power);
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (power.at[i] > 0.0f)
                sums->student = __fmaf_rn(power.at[i], own.at[i], sums->student);
            if (teacher_power.at[i] > 0.0f)
                sums->teacher = __fmaf_rn(teacher_power.at[i], teacher_log.at[i], sums->teacher);
        }
        return log;
    }
};
